//! Less for forks to copy: what the dynamic linker wrote into this program's constants, a megabyte
//! and a half in a large one, is memory of the process, whose page tables each fork copies and
//! frees. As pages of a file they are neither.

use super::files::memory_file;
use std::ops::Range;
use std::os::fd::AsRawFd;

const PAGE: usize = 4096;

/// Where the program's relocated constants lie (`PT_GNU_RELRO`), whole pages.
fn relocated() -> Option<Range<usize>> {
    unsafe extern "C" fn first(
        info: *mut libc::dl_phdr_info,
        _: usize,
        found: *mut libc::c_void,
    ) -> libc::c_int {
        // SAFETY: the linker's description of the program, which comes first, and our range.
        unsafe {
            let info = &*info;
            let headers = std::slice::from_raw_parts(info.dlpi_phdr, usize::from(info.dlpi_phnum));
            if let Some(relro) = headers.iter().find(|h| h.p_type == libc::PT_GNU_RELRO) {
                let start = info.dlpi_addr as usize + relro.p_vaddr as usize;
                let end = (start + relro.p_memsz as usize) & !(PAGE - 1);
                *found.cast::<Range<usize>>() = start & !(PAGE - 1)..end;
            }
        }
        1
    }
    let mut found = 0..0;
    // SAFETY: the callback writes to a range that outlives the call.
    unsafe { libc::dl_iterate_phdr(Some(first), (&raw mut found).cast()) };
    (!found.is_empty()).then_some(found)
}

/// Puts a file with the same bytes where the relocated constants are; without it, forks cost
/// more. Nobody can write there before or after.
pub(super) fn share_constants() {
    let Some(range) = relocated() else {
        return;
    };
    // SAFETY: the linker has made these pages readable and will not write to them any more.
    let bytes = unsafe { std::slice::from_raw_parts(range.start as *const u8, range.len()) };
    let Ok(file) = memory_file(bytes) else {
        return;
    };
    let (at, fixed) = (range.start as *mut _, libc::MAP_PRIVATE | libc::MAP_FIXED);
    // SAFETY: the same bytes, in one step; this process has one thread, and its file of them is
    // closed with no other descriptor of it anywhere.
    unsafe { libc::mmap(at, range.len(), libc::PROT_READ, fixed, file.as_raw_fd(), 0) };
}
