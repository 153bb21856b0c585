//! Archives of work folders, as every level writes them: tar files that depend only on the content.
//!
//! Entries have no owners and no times. An aligned block of [`BLOCK`] zero bytes is a hole (a sparse
//! entry of GNU tar), however the file was written: so the same files give the same bytes at every
//! level, and a file of holes takes no space in its archive. Archives from outside are read by
//! [`reader`].

pub mod reader;

use std::io::{self, BufWriter, Read, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;

/// Bytes of a block that can be a hole: a page, which is what a file in memory is made of.
pub const BLOCK: usize = 4096;
/// Blocks that are examined together.
const WINDOW: usize = 16 * BLOCK;

/// Content of a file that can be read twice: for its holes, and for what lies between them.
pub trait Content {
    /// Bytes of it, holes included.
    fn size(&self) -> u64;

    /// Fills `into` with what stands at `at`; the content goes that far.
    ///
    /// # Errors
    /// Fails if it cannot be read, or is shorter than its stated size.
    fn read_at(&self, at: u64, into: &mut [u8]) -> io::Result<()>;

    /// The first place from `at` on that can hold anything but zeros.
    ///
    /// # Errors
    /// If the file cannot be searched.
    fn data_from(&self, at: u64) -> io::Result<u64> {
        Ok(at)
    }
}

impl Content for &[u8] {
    fn size(&self) -> u64 {
        self.len() as u64
    }

    fn read_at(&self, at: u64, into: &mut [u8]) -> io::Result<()> {
        let at = usize::try_from(at).map_err(io::Error::other)?;
        let from = self.get(at..at + into.len());
        into.copy_from_slice(from.ok_or(io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }
}

/// A regular file that does not change, with the size that it had.
#[derive(Debug)]
pub struct Held<'a>(pub &'a std::fs::File, pub u64);

impl Content for Held<'_> {
    fn size(&self) -> u64 {
        self.1
    }

    fn read_at(&self, at: u64, into: &mut [u8]) -> io::Result<()> {
        self.0.read_exact_at(into, at)
    }

    fn data_from(&self, at: u64) -> io::Result<u64> {
        match nix::unistd::lseek64(self.0, at as i64, nix::unistd::Whence::SeekData) {
            Ok(data) => Ok(data as u64),
            Err(nix::errno::Errno::ENXIO) => Ok(self.1),
            // The file system does not report holes.
            Err(_) => Ok(at),
        }
    }
}

/// Offset and length of what is not a hole, in whole blocks but for the end of the file.
fn data(content: &dyn Content) -> io::Result<Vec<(u64, u64)>> {
    let (size, block) = (content.size(), BLOCK as u64);
    let mut pieces: Vec<(u64, u64)> = Vec::new();
    let mut window = vec![0; WINDOW];
    let mut at = 0;
    while at < size {
        let next = content.data_from(at)?.min(size) / block * block;
        if next > at {
            at = next;
            continue;
        }
        let bytes = (size - at).min(WINDOW as u64) as usize;
        content.read_at(at, &mut window[..bytes])?;
        for part in window[..bytes].chunks(BLOCK) {
            // The end of a file that is not a whole block stays as it is.
            if part.len() < BLOCK || part.iter().any(|byte| *byte != 0) {
                match pieces.last_mut() {
                    Some((from, len)) if *from + *len == at => *len += part.len() as u64,
                    _ => pieces.push((at, part.len() as u64)),
                }
            }
            at += part.len() as u64;
        }
    }
    Ok(pieces)
}

/// Reads what is not a hole.
struct Pieces<'a> {
    content: &'a dyn Content,
    pieces: std::vec::IntoIter<(u64, u64)>,
    now: (u64, u64),
}

impl Read for Pieces<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        while self.now.1 == 0 {
            match self.pieces.next() {
                Some(piece) => self.now = piece,
                None => return Ok(0),
            }
        }
        let bytes = (into.len() as u64).min(self.now.1);
        self.content
            .read_at(self.now.0, &mut into[..bytes as usize])?;
        self.now = (self.now.0 + bytes, self.now.1 - bytes);
        Ok(bytes as usize)
    }
}

/// Writer that accepts a limited number of bytes.
#[derive(Debug)]
struct Bounded<W> {
    inner: W,
    left: u64,
    max: u64,
}

impl<W: Write> Write for Bounded<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if bytes.len() as u64 > self.left {
            let max = self.max;
            return Err(io::Error::other(format!(
                "the archive is larger than {max} bytes"
            )));
        }
        let written = self.inner.write(bytes)?;
        self.left -= written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}

/// Writes an archive entry by entry; folders come before what they hold, names are sorted.
pub struct Writer<W: Write> {
    builder: tar::Builder<Bounded<BufWriter<W>>>,
}

impl<W: Write> std::fmt::Debug for Writer<W> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Writer").finish_non_exhaustive()
    }
}

fn header(kind: tar::EntryType, mode: u32, size: u64) -> tar::Header {
    let mut header = tar::Header::new_gnu();
    header.set_entry_type(kind);
    header.set_mode(mode & 0o777);
    header.set_size(size);
    header
}

impl<W: Write> Writer<W> {
    /// An archive of at most `max_bytes`.
    pub fn new(out: W, max_bytes: u64) -> Self {
        let bounded = Bounded {
            inner: BufWriter::with_capacity(WINDOW, out),
            left: max_bytes,
            max: max_bytes,
        };
        Self {
            builder: tar::Builder::new(bounded),
        }
    }

    /// A folder.
    ///
    /// # Errors
    /// If the name does not fit into an archive, or the archive not where it is written.
    pub fn folder(&mut self, path: &Path, mode: u32) -> io::Result<()> {
        let mut header = header(tar::EntryType::Directory, mode, 0);
        self.builder.append_data(&mut header, path, io::empty())
    }

    /// A symbolic link.
    ///
    /// # Errors
    /// Fails as [`Writer::folder`] does.
    pub fn link(&mut self, path: &Path, mode: u32, target: &Path) -> io::Result<()> {
        let mut header = header(tar::EntryType::Symlink, mode, 0);
        self.builder.append_link(&mut header, path, target)
    }

    /// Another name of a file that was written before.
    ///
    /// # Errors
    /// Fails as [`Writer::folder`] does.
    pub fn hard_link(&mut self, path: &Path, mode: u32, first: &Path) -> io::Result<()> {
        let mut header = header(tar::EntryType::Link, mode, 0);
        self.builder.append_link(&mut header, path, first)
    }

    /// A regular file.
    ///
    /// # Errors
    /// Fails as [`Writer::folder`] does, or if the content cannot be read.
    pub fn file(&mut self, path: &Path, mode: u32, content: &dyn Content) -> io::Result<()> {
        let (size, mut pieces) = (content.size(), data(content)?);
        let bytes = pieces.iter().map(|(_, len)| len).sum();
        let mut header = header(tar::EntryType::Regular, mode, bytes);
        let mut more = Vec::new();
        if bytes < size {
            if pieces.last().is_none_or(|(at, len)| at + len < size) {
                pieces.push((size, 0));
            }
            more = sparse(&mut header, &pieces, size)?;
        }
        let content = Pieces {
            content,
            pieces: pieces.into_iter(),
            now: (0, 0),
        };
        let content = more.as_slice().chain(content);
        self.builder.append_data(&mut header, path, content)
    }

    /// Ends the archive.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn end(self) -> io::Result<W> {
        let bounded = self.builder.into_inner()?;
        let out = bounded.inner.into_inner();
        out.map_err(io::IntoInnerError::into_error)
    }
}

/// Writes into a header where a file's data are. Pieces that do not fit there are returned, for the blocks
/// after it.
fn sparse(header: &mut tar::Header, pieces: &[(u64, u64)], size: u64) -> io::Result<Vec<u8>> {
    header.set_entry_type(tar::EntryType::GNUSparse);
    let gnu = header.as_gnu_mut().ok_or(io::ErrorKind::InvalidInput)?;
    gnu.set_real_size(size);
    let first = pieces.len().min(gnu.sparse.len());
    let (first, rest) = pieces.split_at(first);
    for (slot, (at, len)) in gnu.sparse.iter_mut().zip(first) {
        slot.set_offset(*at);
        slot.set_length(*len);
    }
    gnu.set_is_extended(!rest.is_empty());
    let mut more = Vec::new();
    let mut rest = rest.iter().peekable();
    while rest.peek().is_some() {
        let mut block = tar::GnuExtSparseHeader::new();
        for slot in &mut block.sparse {
            let Some((at, len)) = rest.next() else { break };
            slot.set_offset(*at);
            slot.set_length(*len);
        }
        block.set_is_extended(rest.peek().is_some());
        more.extend_from_slice(block.as_bytes());
    }
    Ok(more)
}

/// Writes `content` to a new file, its zero blocks as holes; how many bytes of data there were, or
/// none where there were more than `max_bytes`.
///
/// # Errors
/// If it cannot be read or written.
pub fn fill(
    content: &mut dyn Read,
    size: u64,
    max_bytes: u64,
    file: &mut std::fs::File,
) -> io::Result<Option<u64>> {
    let mut block = vec![0; BLOCK];
    let (mut at, mut data) = (0, 0);
    while at < size {
        let bytes = (size - at).min(BLOCK as u64) as usize;
        content.read_exact(&mut block[..bytes])?;
        if block[..bytes].iter().any(|byte| *byte != 0) {
            data += bytes as u64;
            if data > max_bytes {
                return Ok(None);
            }
            file.write_all_at(&block[..bytes], at)?;
        }
        at += bytes as u64;
    }
    file.set_len(size)?;
    Ok(Some(data))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn packed(content: &[u8]) -> Vec<u8> {
        let mut writer = Writer::new(Vec::new(), 1 << 30);
        writer.file(Path::new("f"), 0o600, &content).unwrap();
        writer.end().unwrap()
    }

    fn unpacked(archive: &[u8]) -> Vec<u8> {
        let mut archive = tar::Archive::new(archive);
        let mut entry = archive.entries().unwrap().next().unwrap().unwrap();
        let mut content = Vec::new();
        entry.read_to_end(&mut content).unwrap();
        assert_eq!(content.len() as u64, entry.size());
        content
    }

    proptest! {
        #[test]
        fn content_comes_back_whatever_its_holes(
            blocks in proptest::collection::vec(any::<bool>(), 0..80),
            tail in 0..BLOCK,
        ) {
            let mut content: Vec<u8> = blocks.iter().flat_map(|b| [u8::from(*b); BLOCK]).collect();
            content.extend(vec![0; tail]);
            let archive = packed(&content);
            prop_assert_eq!(unpacked(&archive), content.clone());
            let mut file = tempfile::tempfile().unwrap();
            let size = content.len() as u64;
            let data = fill(&mut content.as_slice(), size, 1 << 20, &mut file).unwrap().unwrap();
            prop_assert!(data <= (blocks.iter().filter(|b| **b).count() * BLOCK) as u64);
            // A file with real holes gives the same bytes.
            let mut writer = Writer::new(Vec::new(), 1 << 30);
            writer.file(Path::new("f"), 0o600, &Held(&file, content.len() as u64)).unwrap();
            prop_assert_eq!(writer.end().unwrap(), archive);
        }
    }

    #[test]
    fn holes_take_no_room_in_an_archive() {
        let mut content = vec![0; 16 << 20];
        assert!(packed(&content).len() < 4096);
        content[9 << 20] = 1;
        assert!(packed(&content).len() < 4096 + BLOCK);
        // Content without a whole block of zeros is a plain entry.
        let plain = packed(&[0; BLOCK - 1]);
        assert_eq!(plain[156], b'0');
        assert_eq!(plain.len(), 512 + BLOCK + 1024);
    }

    #[test]
    fn an_archive_ends_at_its_bound() {
        let mut writer = Writer::new(Vec::new(), 10_000);
        let content: &[u8] = &[1; 20_000];
        let refused = writer.file(Path::new("f"), 0o600, &content).unwrap_err();
        assert_eq!(
            refused.to_string(),
            "the archive is larger than 10000 bytes"
        );
    }
}
