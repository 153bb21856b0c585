//! Memory of virtual machines: sealed files in memory that clones map privately, and the changes of a clone.
//!
//! A monitor that was taken over may open such a file for writing: the seals refuse its writes, whatever user
//! it is.

use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use rustix::fs::{MemfdFlags, SeekFrom, memfd_create, seek};
use std::fs::File;
use std::io::{Error, Read, Result, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// Bytes of a page of a guest, the unit of changes.
const PAGE: u64 = 4096;
/// Bytes that are copied or compared at once.
const BLOCK: usize = 1 << 20;
/// Name of mappings of guest memory in `/proc/PID/maps`.
const NAME: &str = "sinew-vm-ram";

/// A file in memory.
#[derive(Debug)]
pub(crate) struct Ram {
    /// The file in memory.
    file: File,
    /// Size in bytes.
    pub(crate) bytes: u64,
}

/// Error for memory that is not as expected.
fn invalid(text: impl Into<String>) -> Error {
    Error::other(text.into())
}

/// Path by which a child of this process opens a file that is open here.
pub(crate) fn path_of(file: &File) -> PathBuf {
    let (pid, fd) = (std::process::id(), file.as_raw_fd());
    PathBuf::from(format!("/proc/{pid}/fd/{fd}"))
}

/// An empty file in memory that others may open.
pub(crate) fn scratch(name: &str) -> Result<File> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    Ok(File::from(memfd_create(name, flags)?))
}

/// Parts of a file that hold data: start and end.
fn extents(file: &File, bytes: u64) -> Result<Vec<(u64, u64)>> {
    let (mut found, mut at) = (Vec::new(), 0);
    while at < bytes {
        let start = match seek(file, SeekFrom::Data(at)) {
            Ok(start) => start,
            Err(rustix::io::Errno::NXIO) => break,
            Err(e) => return Err(e.into()),
        };
        let end = seek(file, SeekFrom::Hole(start))?.min(bytes);
        found.push((start, end));
        at = end;
    }
    Ok(found)
}

/// Copies the parts of a file that hold data.
fn copy(from: &File, to: &File, bytes: u64) -> Result<()> {
    let mut block = vec![0; BLOCK];
    for (start, end) in extents(from, bytes)? {
        let mut at = start;
        while at < end {
            let take = BLOCK.min((end - at) as usize);
            from.read_exact_at(&mut block[..take], at)?;
            to.write_all_at(&block[..take], at)?;
            at += take as u64;
        }
    }
    Ok(())
}

impl Ram {
    /// Memory of zeroes that a machine writes to.
    pub(crate) fn new(bytes: u64) -> Result<Self> {
        let file = scratch(NAME)?;
        file.set_len(bytes)?;
        Ok(Self { file, bytes })
    }

    /// Makes the memory immutable for all processes, also through existing mappings.
    pub(crate) fn seal(&self) -> Result<()> {
        let seals = SealFlag::F_SEAL_WRITE
            | SealFlag::F_SEAL_SHRINK
            | SealFlag::F_SEAL_GROW
            | SealFlag::F_SEAL_SEAL;
        fcntl(&self.file, FcntlArg::F_ADD_SEALS(seals))?;
        Ok(())
    }

    /// Path by which a child opens it.
    pub(crate) fn path(&self) -> PathBuf {
        path_of(&self.file)
    }

    /// Writes it to disk, holes left out.
    pub(crate) fn save(&self, path: &Path) -> Result<()> {
        let file = File::create_new(path)?;
        file.set_len(self.bytes)?;
        copy(&self.file, &file, self.bytes)
    }

    /// Reads what [`Ram::save`] wrote, sealed.
    pub(crate) fn load(path: &Path, bytes: u64) -> Result<Self> {
        let saved = File::open(path)?;
        let found = saved.metadata()?.len();
        if found != bytes {
            return Err(invalid(format!("{found} bytes of memory, not {bytes}")));
        }
        let ram = Self::new(bytes)?;
        copy(&saved, &ram.file, bytes)?;
        ram.seal()?;
        Ok(ram)
    }

    /// This memory with what a clone changed, sealed.
    pub(crate) fn with(&self, delta: &Delta) -> Result<Self> {
        let ram = Self::new(self.bytes)?;
        copy(&self.file, &ram.file, self.bytes)?;
        let (mut block, mut at) = (vec![0; BLOCK], 0);
        for &(start, end) in &delta.runs {
            let mut to = start;
            while to < end {
                let take = BLOCK.min((end - to) as usize);
                delta.file.read_exact_at(&mut block[..take], at)?;
                ram.file.write_all_at(&block[..take], to)?;
                at += take as u64;
                to += take as u64;
            }
        }
        ram.seal()?;
        Ok(ram)
    }
}

/// Changed pages of a clone.
#[derive(Debug)]
pub(crate) struct Delta {
    /// Start and end of changed parts.
    runs: Vec<(u64, u64)>,
    /// Their content, one after the other.
    file: File,
}

impl Delta {
    /// Bytes of the content.
    pub(crate) fn bytes(&self) -> u64 {
        self.runs.iter().map(|(start, end)| end - start).sum()
    }

    /// Copies what the process `pid`, which must not run the guest meanwhile, changed in its
    /// private mapping. `folder` takes the content, without a name.
    pub(crate) fn take(pid: u32, folder: &Path) -> Result<Self> {
        let maps = std::fs::read_to_string(format!("/proc/{pid}/maps"))?;
        let areas: Vec<Area> = maps.lines().filter_map(Area::parse).collect();
        if areas.is_empty() {
            return Err(invalid("the memory of the machine is not mapped"));
        }
        let pagemap = File::open(format!("/proc/{pid}/pagemap"))?;
        let memory = File::open(format!("/proc/{pid}/mem"))?;
        let mut out = unnamed(folder)?;
        let (mut runs, mut block) = (Vec::new(), Vec::new());
        for area in areas {
            for (start, end) in area.private_pages(&pagemap)? {
                block.resize((end - start) as usize, 0);
                memory.read_exact_at(&mut block, start)?;
                out.write_all(&block)?;
                let at = start - area.start + area.offset;
                runs.push((at, at + end - start));
            }
        }
        Ok(Self { runs, file: out })
    }
}

/// A file on disk without a name, removed when it is closed.
fn unnamed(folder: &Path) -> Result<File> {
    let path = folder.join(format!("delta-{:x}", unique()?));
    let file = File::options()
        .read(true)
        .write(true)
        .create_new(true)
        .open(&path)?;
    std::fs::remove_file(&path)?;
    Ok(file)
}

/// A random number, for names that cannot be guessed.
pub(crate) fn unique() -> Result<u64> {
    getrandom::u64().map_err(|e| invalid(e.to_string()))
}

/// A part of a process's memory that maps guest memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Area {
    /// First address in the process.
    start: u64,
    /// Address after the last one.
    end: u64,
    /// Offset in the file.
    offset: u64,
}

impl Area {
    /// A line of `/proc/PID/maps`, if it is about guest memory.
    fn parse(line: &str) -> Option<Self> {
        let mut fields = line.split_ascii_whitespace();
        let (start, end) = fields.next()?.split_once('-')?;
        let offset = fields.nth(1)?;
        if !fields.nth(2)?.ends_with(NAME) {
            return None;
        }
        let hex = |text: &str| u64::from_str_radix(text, 16).ok();
        Some(Self {
            start: hex(start)?,
            end: hex(end)?,
            offset: hex(offset)?,
        })
    }

    /// Runs of pages that are the process's own: present or swapped, and of no file
    /// (`Documentation/admin-guide/mm/pagemap.rst`: bits 63, 62 and 61).
    fn private_pages(&self, pagemap: &File) -> Result<Vec<(u64, u64)>> {
        let count = ((self.end - self.start) / PAGE) as usize;
        let mut words = vec![0u8; count * 8];
        pagemap.read_exact_at(&mut words, self.start / PAGE * 8)?;
        let mut runs: Vec<(u64, u64)> = Vec::new();
        for (i, word) in words.chunks_exact(8).enumerate() {
            // The flags are the highest bits of a little-endian word.
            let flags = word[7];
            if flags & 0xc0 == 0 || flags & 0x20 != 0 {
                continue;
            }
            let at = self.start + i as u64 * PAGE;
            match runs.last_mut() {
                Some((_, end)) if *end == at => *end += PAGE,
                _ => runs.push((at, at + PAGE)),
            }
        }
        Ok(runs)
    }
}

/// Everything that a file in memory holds, at most `most` bytes.
pub(crate) fn content(file: &File, most: u64) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    File::open(path_of(file))?
        .take(most)
        .read_to_end(&mut bytes)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sealed_memory_refuses_writers_and_keeps_holes() {
        let folder = tempfile::tempdir().expect("folder");
        let ram = Ram::new(64 << 20).expect("memory");
        ram.file.write_all_at(b"start", 0).expect("write");
        ram.file.write_all_at(b"far", 40 << 20).expect("write");
        let path = folder.path().join("ram");
        ram.save(&path).expect("save");
        let loaded = Ram::load(&path, 64 << 20).expect("load");
        let mut seen = [0; 3];
        loaded
            .file
            .read_exact_at(&mut seen, 40 << 20)
            .expect("read");
        assert_eq!(&seen, b"far");
        assert!(extents(&loaded.file, 64 << 20).expect("extents").len() >= 2);
        // A monitor opens it in this way.
        let opened = File::options().read(true).write(true).open(loaded.path());
        assert!(opened.expect("open").write_all_at(b"x", 0).is_err());
        assert!(Ram::load(&path, 32 << 20).is_err());
    }

    #[test]
    fn lines_of_maps() {
        let line =
            "7f00c0000000-7f00d0000000 rw-p 00001000 00:01 1052  /memfd:sinew-vm-ram (deleted)";
        let area = Area::parse(line).expect("an area");
        assert_eq!(
            (area.start, area.end, area.offset),
            (0x7f00_c000_0000, 0x7f00_d000_0000, 0x1000)
        );
        for other in [
            "7f00-7f01 rw-p 00000000 00:00 0",
            "7f00-7f01 rw-p 00000000 00:01 5 /memfd:else (deleted)",
            "",
        ] {
            assert_eq!(Area::parse(other), None);
        }
    }
}
