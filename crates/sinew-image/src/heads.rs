//! A bound on what stands between the contents of an archive.
//!
//! Long names and extended headers are entries of their own, which the reader of archives holds
//! in memory before it gives the entry that they belong to: as long as their sizes say.

use std::cell::Cell;
use std::io::{Read, Seek, SeekFrom};
use std::rc::Rc;

/// Most bytes from the end of one entry's content to the beginning of the next one's.
pub(crate) const MAX_HEAD_BYTES: u64 = 1 << 20;

/// What may still be read.
#[derive(Clone, Debug)]
pub(crate) struct Heads(Rc<Cell<u64>>);

impl Heads {
    /// A reader of an archive whose first head comes now.
    pub(crate) fn of<R>(inner: R) -> (Self, Bounded<R>) {
        let left = Rc::new(Cell::new(MAX_HEAD_BYTES));
        let bounded = Bounded {
            inner,
            left: Rc::clone(&left),
        };
        (Self(left), bounded)
    }

    /// Content comes now, which is counted elsewhere.
    pub(crate) fn content(&self) {
        self.0.set(u64::MAX);
    }

    /// All content of an entry was read: the next head comes.
    pub(crate) fn head(&self) {
        self.0.set(MAX_HEAD_BYTES);
    }

    /// Whether a read failed for being too long a head.
    pub(crate) fn exceeded(&self) -> bool {
        self.0.get() == 0
    }
}

/// A reader that ends with an error where a head is too long.
#[derive(Debug)]
pub(crate) struct Bounded<R> {
    inner: R,
    left: Rc<Cell<u64>>,
}

impl<R: Read> Read for Bounded<R> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let left = self.left.get();
        if left == 0 && !buffer.is_empty() {
            return Err(std::io::Error::other(format!(
                "names and extensions of an entry have more than {MAX_HEAD_BYTES} bytes"
            )));
        }
        let most = buffer
            .len()
            .min(usize::try_from(left).unwrap_or(usize::MAX));
        let n = self.inner.read(&mut buffer[..most])?;
        self.left.set(left - n as u64);
        Ok(n)
    }
}

impl<R: Seek> Seek for Bounded<R> {
    fn seek(&mut self, to: SeekFrom) -> std::io::Result<u64> {
        self.inner.seek(to)
    }
}
