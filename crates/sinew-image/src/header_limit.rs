//! Limit for the headers between the contents of an archive.
//!
//! Long names and extended headers are separate entries, which the `tar` crate buffers in memory before it
//! returns the entry that they belong to. Their sizes come from the archive.

use std::cell::Cell;
use std::io::{Read, Seek, SeekFrom};
use std::rc::Rc;

/// Maximum bytes between the content of one entry and the content of the next one.
pub(crate) const MAX_HEADER_BYTES: u64 = 1 << 20;

/// Remaining bytes of the current headers.
#[derive(Clone, Debug)]
pub(crate) struct HeaderLimit(Rc<Cell<u64>>);

impl HeaderLimit {
    /// Wraps a reader of an archive that is positioned at the first header.
    pub(crate) fn of<R>(inner: R) -> (Self, Bounded<R>) {
        let left = Rc::new(Cell::new(MAX_HEADER_BYTES));
        let bounded = Bounded {
            inner,
            left: Rc::clone(&left),
        };
        (Self(left), bounded)
    }

    /// Starts the content of an entry, which is limited elsewhere.
    pub(crate) fn content(&self) {
        self.0.set(u64::MAX);
    }

    /// Starts the header of the next entry.
    pub(crate) fn header(&self) {
        self.0.set(MAX_HEADER_BYTES);
    }

    /// True if a read failed because headers are too long.
    pub(crate) fn exceeded(&self) -> bool {
        self.0.get() == 0
    }
}

/// Reader that fails if headers are too long.
#[derive(Debug)]
pub(crate) struct Bounded<R> {
    inner: R,
    /// Remaining bytes of the current headers.
    left: Rc<Cell<u64>>,
}

impl<R: Read> Read for Bounded<R> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let left = self.left.get();
        if left == 0 && !buffer.is_empty() {
            return Err(std::io::Error::other(format!(
                "names and extensions of an entry have more than {MAX_HEADER_BYTES} bytes"
            )));
        }
        let max = buffer
            .len()
            .min(usize::try_from(left).unwrap_or(usize::MAX));
        let n = self.inner.read(&mut buffer[..max])?;
        self.left.set(left - n as u64);
        Ok(n)
    }
}

impl<R: Seek> Seek for Bounded<R> {
    fn seek(&mut self, to: SeekFrom) -> std::io::Result<u64> {
        self.inner.seek(to)
    }
}
