//! Reads bytes of weight files by position.
//!
//! Positioned reads instead of a memory map: a file that shrinks while it is read becomes an error
//! here, where a map would end the process.

use std::fmt;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// Bytes of known length that can be read from any position by several threads.
pub trait ReadAt: Send + Sync + fmt::Debug {
    /// Length in bytes when it was opened.
    fn len(&self) -> u64;

    /// Whether there are no bytes.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Fills `buffer` from byte `offset` on.
    ///
    /// # Errors
    /// If the bytes end before the buffer is full, or reading fails.
    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()>;
}

/// An open file.
#[derive(Debug)]
pub struct FileSource {
    file: File,
    len: u64,
}

impl FileSource {
    /// Opens `path`; directories are refused.
    pub fn open(path: &Path) -> io::Result<Self> {
        let file = File::open(path)?;
        let meta = file.metadata()?;
        if !meta.is_file() {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "not a regular file",
            ));
        }
        Ok(Self {
            file,
            len: meta.len(),
        })
    }
}

impl ReadAt for FileSource {
    fn len(&self) -> u64 {
        self.len
    }

    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        FileExt::read_exact_at(&self.file, buffer, offset)
    }
}

impl ReadAt for Vec<u8> {
    fn len(&self) -> u64 {
        Vec::len(self) as u64
    }

    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        let start = usize::try_from(offset).unwrap_or(usize::MAX);
        let bytes = start
            .checked_add(buffer.len())
            .and_then(|end| self.get(start..end));
        buffer.copy_from_slice(bytes.ok_or(io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }
}

/// Sequential reading of a [`ReadAt`] that never asks for bytes beyond the end.
pub(crate) struct Cursor<'a> {
    source: &'a dyn ReadAt,
    position: u64,
    buffer: Vec<u8>,
    buffer_start: u64,
}

/// Bytes that a [`Cursor`] reads at once.
const CURSOR_BYTES: u64 = 1 << 16;

impl<'a> Cursor<'a> {
    pub(crate) fn new(source: &'a dyn ReadAt) -> Self {
        Self {
            source,
            position: 0,
            buffer: Vec::new(),
            buffer_start: 0,
        }
    }

    pub(crate) fn position(&self) -> u64 {
        self.position
    }

    /// Bytes from the position to the end.
    pub(crate) fn remaining(&self) -> u64 {
        self.source.len().saturating_sub(self.position)
    }

    /// Fills `out`; the caller has compared its length with [`Cursor::remaining`].
    pub(crate) fn read(&mut self, out: &mut [u8]) -> io::Result<()> {
        if out.len() as u64 > self.remaining() {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let mut done = 0;
        while done < out.len() {
            let at = (self.position - self.buffer_start) as usize;
            if at >= self.buffer.len() {
                self.buffer_start = self.position;
                self.buffer
                    .resize(self.remaining().min(CURSOR_BYTES) as usize, 0);
                self.source.read_exact_at(&mut self.buffer, self.position)?;
                continue;
            }
            let n = (self.buffer.len() - at).min(out.len() - done);
            out[done..done + n].copy_from_slice(&self.buffer[at..at + n]);
            done += n;
            self.position += n as u64;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cursors_cross_buffers_and_stop_at_the_end() {
        let bytes: Vec<u8> = (0..200_000u32).map(|i| (i % 251) as u8).collect();
        let mut cursor = Cursor::new(&bytes);
        let mut out = vec![0; 65_530];
        cursor.read(&mut out).unwrap();
        let mut next = vec![0; 100_000];
        cursor.read(&mut next).unwrap();
        assert_eq!(next[..], bytes[65_530..165_530]);
        assert_eq!(cursor.remaining(), 34_470);
        assert!(cursor.read(&mut vec![0; 34_471]).is_err());
        assert_eq!(cursor.position(), 165_530);
    }
}
