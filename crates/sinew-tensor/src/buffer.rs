//! Memory for tensors: aligned buffers, growing scratch and disjoint access from tasks.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::fmt;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut, Range};
use std::ptr::NonNull;
use std::slice;

/// Alignment of every buffer in bytes: a cache line and an AVX-512 register.
const ALIGN: usize = 64;
/// Buffers from this size on are mapped separately, aligned to and advised for huge pages: these double the
/// read bandwidth on the measured machines.
const HUGE: usize = 2 << 20;

/// A fixed-size `f32` array, aligned to 64 bytes (2 MiB from 2 MiB on, with huge pages where the
/// system grants them), zeroed at birth.
pub struct Buffer {
    ptr: NonNull<f32>,
    len: usize,
}

// SAFETY: a `Buffer` owns its memory, like a `Box<[f32]>`.
unsafe impl Send for Buffer {}
// SAFETY: shared access is read-only, like a `Box<[f32]>`.
unsafe impl Sync for Buffer {}

impl Buffer {
    /// `len` zeros. Panics (or aborts, as `Vec` does) when memory is out.
    #[must_use]
    pub fn zeros(len: usize) -> Self {
        let bytes = len
            .checked_mul(4)
            .expect("buffer size fits the address space");
        if bytes == 0 {
            return Self {
                ptr: NonNull::dangling(),
                len,
            };
        }
        let ptr = if bytes >= HUGE {
            map_huge(bytes)
        } else {
            alloc_small(bytes)
        };
        Self { ptr, len }
    }

    /// A copy of `values`.
    #[must_use]
    pub fn from_slice(values: &[f32]) -> Self {
        let mut buffer = Self::zeros(values.len());
        buffer.copy_from_slice(values);
        buffer
    }
}

fn layout(bytes: usize) -> Layout {
    Layout::from_size_align(bytes, ALIGN).expect("buffer size fits the address space")
}

fn alloc_small(bytes: usize) -> NonNull<f32> {
    let layout = layout(bytes);
    // SAFETY: the layout has a size above 0.
    let ptr = unsafe { alloc_zeroed(layout) };
    NonNull::new(ptr.cast()).unwrap_or_else(|| handle_alloc_error(layout))
}

/// Maps `bytes` rounded up to whole huge pages; the kernel hands out zeroed pages at first touch.
fn map_huge(bytes: usize) -> NonNull<f32> {
    let size = bytes.next_multiple_of(HUGE);
    // SAFETY: a fresh anonymous mapping touches no memory of others.
    let base = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            size + HUGE,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
            -1,
            0,
        )
    };
    if base == libc::MAP_FAILED {
        handle_alloc_error(layout(bytes));
    }
    let start = base.addr().next_multiple_of(HUGE);
    let head = start - base.addr();
    // SAFETY: head and tail lie inside the mapping above, outside the part we keep. The advice is a hint: its
    // failure changes only speed.
    unsafe {
        let kept = base.byte_add(head);
        if head > 0 {
            libc::munmap(base, head);
        }
        libc::munmap(kept.byte_add(size), HUGE - head);
        libc::madvise(kept, size, libc::MADV_HUGEPAGE);
        NonNull::new_unchecked(kept.cast())
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let bytes = self.len * 4;
        if bytes >= HUGE {
            // SAFETY: mapped by `map_huge` with this size, and it is not used any more.
            unsafe { libc::munmap(self.ptr.as_ptr().cast(), bytes.next_multiple_of(HUGE)) };
        } else if bytes > 0 {
            // SAFETY: allocated by `alloc_small` with this layout.
            unsafe { dealloc(self.ptr.as_ptr().cast(), layout(bytes)) };
        }
    }
}

impl Deref for Buffer {
    type Target = [f32];
    fn deref(&self) -> &[f32] {
        // SAFETY: `ptr` is valid for `len` initialized values (dangling only with `len == 0`).
        unsafe { slice::from_raw_parts(self.ptr.as_ptr(), self.len) }
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [f32] {
        // SAFETY: as in `deref`, and `&mut self` makes the access exclusive.
        unsafe { slice::from_raw_parts_mut(self.ptr.as_ptr(), self.len) }
    }
}

impl Clone for Buffer {
    fn clone(&self) -> Self {
        Self::from_slice(self)
    }
}

impl Default for Buffer {
    fn default() -> Self {
        Self::zeros(0)
    }
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Buffer")
            .field("len", &self.len)
            .finish_non_exhaustive()
    }
}

/// Reusable aligned memory that only grows: after warm-up a hot path takes from it without allocating.
#[derive(Debug, Default)]
pub struct Scratch(Buffer);

impl Scratch {
    /// Empty scratch.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Bytes that it holds. The system provides large ones page by page, as they are first written.
    #[must_use]
    pub fn bytes(&self) -> usize {
        size_of_val(&*self.0)
    }

    /// `len` values of unspecified content (left from earlier use, or zero).
    pub fn take(&mut self, len: usize) -> &mut [f32] {
        if self.0.len() < len {
            // The old block goes first, so that the two never exist together.
            self.0 = Buffer::default();
            self.0 = Buffer::zeros(len.next_power_of_two().max(1024));
        }
        &mut self.0[..len]
    }
}

/// A mutable slice that the tasks of one parallel loop share, each touching its own part.
#[derive(Debug, Clone, Copy)]
pub struct SharedMut<'a, T = f32> {
    ptr: *mut T,
    len: usize,
    life: PhantomData<&'a mut [T]>,
}

// SAFETY: access goes through `range`, whose callers promise that parts in use are disjoint.
unsafe impl<T: Send> Send for SharedMut<'_, T> {}
// SAFETY: as for `Send`.
unsafe impl<T: Send> Sync for SharedMut<'_, T> {}

impl<'a, T> SharedMut<'a, T> {
    /// Shares `slice` until the end of its borrow.
    pub fn new(slice: &'a mut [T]) -> Self {
        Self {
            ptr: slice.as_mut_ptr(),
            len: slice.len(),
            life: PhantomData,
        }
    }

    /// Number of values.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has no values.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Pointer to the first value, for strided access.
    #[must_use]
    pub fn as_ptr(&self) -> *mut T {
        self.ptr
    }

    /// The part `range`; panics when it is out of bounds.
    ///
    /// # Safety
    /// No other reference to a value of the part may exist while the result lives.
    #[must_use]
    pub unsafe fn range(&self, range: Range<usize>) -> &'a mut [T] {
        assert!(
            range.start <= range.end && range.end <= self.len,
            "part {range:?} of {}",
            self.len
        );
        // SAFETY: in bounds of a slice valid for `'a`; the caller promises exclusiveness.
        unsafe { slice::from_raw_parts_mut(self.ptr.add(range.start), range.len()) }
    }
}

/// A pointer that the tasks of one parallel loop share; each task touches its own part.
///
/// It replaces [`SharedMut`] if parts are panels at computed offsets, or if an offset may lie behind the end
/// as long as nothing is read there.
#[derive(Clone, Copy)]
pub(crate) struct Part<T = f32>(pub(crate) *mut T);
// SAFETY: all uses give disjoint parts to the tasks, of values that threads may share.
unsafe impl<T: Send> Send for Part<T> {}
// SAFETY: as for `Send`.
unsafe impl<T: Send> Sync for Part<T> {}

impl<T> Part<T> {
    /// `self + offset`, out of bounds only if never read.
    pub(crate) fn at(self, offset: usize) -> *mut T {
        self.0.wrapping_add(offset)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_aligned_zeroed_and_copied() {
        for len in [
            0,
            1,
            100,
            HUGE / 4 - 1,
            HUGE / 4,
            HUGE / 4 + 1,
            3 * HUGE / 4 + 7,
        ] {
            let mut a = Buffer::zeros(len);
            assert_eq!(a.len(), len);
            assert!(a.iter().all(|&x| x == 0.0));
            let align = if len * 4 >= HUGE { HUGE } else { ALIGN };
            assert!(len == 0 || a.as_ptr().addr().is_multiple_of(align));
            if let Some(last) = a.last_mut() {
                *last = 7.0;
            }
            assert_eq!(a.clone()[..], a[..]);
        }
    }

    #[test]
    fn scratch_grows_and_keeps_its_block() {
        let mut scratch = Scratch::new();
        let first = scratch.take(5000).as_ptr();
        assert_eq!(scratch.take(10).as_ptr(), first);
        assert_eq!(scratch.take(5001).len(), 5001);
        assert_eq!((Scratch::new().bytes(), scratch.bytes()), (0, 4 * 8192));
    }

    #[test]
    #[should_panic(expected = "part 3..5 of 4")]
    fn shared_parts_are_checked() {
        let mut values = [0.0; 4];
        let shared = SharedMut::new(&mut values);
        // SAFETY: the only part taken.
        let _ = unsafe { shared.range(3..5) };
    }
}
