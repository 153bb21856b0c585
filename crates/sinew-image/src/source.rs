//! Source of an image's files: a folder or a tar file.

use crate::{ImageError, io_error};
use sinew_jail::archive::reader::HeaderLimit;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// Maximum bytes of long names and extended headers of an entry, in an image and in its layers.
pub(crate) const MAX_HEADER_BYTES: u64 = 1 << 20;
/// Maximum entries of a tar file that contains an image.
const MAX_ENTRIES: usize = 65_536;
/// Maximum bytes of a document: index, manifest or configuration.
const MAX_DOCUMENT: u64 = 4 << 20;

/// Files of an image by name.
#[derive(Debug)]
pub(crate) struct Source {
    /// The folder or tar file.
    path: PathBuf,
    /// Index of the tar file. `None` for a folder.
    tar: Option<Tar>,
}

/// Index of a tar file.
#[derive(Debug)]
struct Tar {
    file: File,
    /// Offset and length of each file.
    places: BTreeMap<String, (u64, u64)>,
    /// Target of each link. `docker save` links equal layers.
    links: BTreeMap<String, String>,
}

/// Reader of a part of a file.
struct Slice<'a> {
    file: &'a File,
    /// Offset of the next byte.
    at: u64,
    /// Remaining bytes.
    left: u64,
}

impl Read for Slice<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let max = buffer.len().min(self.left.min(1 << 30) as usize);
        let n = self.file.read_at(&mut buffer[..max], self.at)?;
        self.at += n as u64;
        self.left -= n as u64;
        Ok(n)
    }
}

/// Normalizes a name. `None` if it is absolute, empty or contains `..`.
fn plain(name: &str) -> Option<String> {
    let parts: Vec<&str> = name
        .split('/')
        .filter(|p| !matches!(*p, "" | "."))
        .collect();
    let fine = !name.starts_with('/') && !parts.is_empty() && !parts.contains(&"..");
    fine.then(|| parts.join("/"))
}

/// Target of a link within the tar file.
fn target(from: &str, link: &str) -> Option<String> {
    let mut parts: Vec<&str> = from.split('/').collect();
    parts.pop();
    for part in link.split('/') {
        match part {
            "" | "." => {}
            ".." => {
                parts.pop()?;
            }
            part => parts.push(part),
        }
    }
    Some(parts.join("/"))
}

impl Source {
    /// Opens a folder or tar file.
    ///
    /// # Errors
    /// [`ImageError::NotAnImage`] if the path is neither a folder nor a tar file.
    pub(crate) fn open(path: &Path) -> Result<Self, ImageError> {
        let wrong = |reason: String| ImageError::NotAnImage {
            path: path.display().to_string(),
            reason,
        };
        let meta = std::fs::metadata(path).map_err(|e| wrong(e.to_string()))?;
        if meta.is_dir() {
            return Ok(Self {
                path: path.into(),
                tar: None,
            });
        }
        if !meta.is_file() {
            return Err(wrong("it is neither a folder nor a regular file".into()));
        }
        let file = File::open(path).map_err(|e| wrong(e.to_string()))?;
        let mut places = BTreeMap::new();
        let mut links = BTreeMap::new();
        let again = file.try_clone().map_err(|e| io_error("open again", e))?;
        // Contents are skipped, so that only headers are read.
        let (limit, again) = HeaderLimit::of(again, MAX_HEADER_BYTES);
        let mut archive = tar::Archive::new(again);
        let entries = archive
            .entries_with_seek()
            .map_err(|e| wrong(e.to_string()))?;
        for (n, entry) in entries.enumerate() {
            let entry = entry.map_err(|e| wrong(not_a_tar(&e)))?;
            limit.header();
            if n >= MAX_ENTRIES {
                return Err(wrong(format!("more than {MAX_ENTRIES} entries")));
            }
            let name = String::from_utf8_lossy(&entry.path_bytes()).into_owned();
            let Some(name) = plain(&name) else { continue };
            match entry.header().entry_type() {
                tar::EntryType::Regular | tar::EntryType::Continuous => {
                    places.insert(name, (entry.raw_file_position(), entry.size()));
                }
                tar::EntryType::Symlink | tar::EntryType::Link => {
                    let link = entry.link_name_bytes().unwrap_or_default();
                    let link = String::from_utf8_lossy(&link).into_owned();
                    let from = if entry.header().entry_type().is_symlink() {
                        name.as_str()
                    } else {
                        ""
                    };
                    if let Some(target) = target(from, &link) {
                        links.insert(name, target);
                    }
                }
                _ => {}
            }
        }
        Ok(Self {
            path: path.into(),
            tar: Some(Tar {
                file,
                places,
                links,
            }),
        })
    }

    /// Path of the image, for errors.
    pub(crate) fn path(&self) -> String {
        self.path.display().to_string()
    }

    /// True if the image has a regular file of this name.
    pub(crate) fn has(&self, name: &str) -> bool {
        match &self.tar {
            None => self.path.join(name).is_file(),
            Some(tar) => tar.places.contains_key(name),
        }
    }

    /// Opens a file and returns its length in bytes.
    pub(crate) fn reader(&self, name: &str) -> Result<(Box<dyn Read + '_>, u64), ImageError> {
        let missing = |reason: String| ImageError::NotAnImage {
            path: self.path(),
            reason,
        };
        let name = plain(name).ok_or_else(|| missing(format!("it names a file {name:?}")))?;
        if let Some(tar) = &self.tar {
            let name = tar.links.get(&name).unwrap_or(&name);
            let &(at, left) = tar
                .places
                .get(name)
                .ok_or_else(|| missing(format!("{name} is missing")))?;
            let slice = Slice {
                file: &tar.file,
                at,
                left,
            };
            return Ok((Box::new(slice), left));
        }
        // NONBLOCK avoids blocking on a FIFO.
        let opened = File::options()
            .read(true)
            .custom_flags(rustix::fs::OFlags::NONBLOCK.bits() as i32)
            .open(self.path.join(&name));
        let file = opened.map_err(|e| missing(format!("{name}: {e}")))?;
        let meta = file.metadata().map_err(|e| io_error(&name, e))?;
        if !meta.is_file() {
            return Err(missing(format!("{name} is no regular file")));
        }
        Ok((Box::new(file), meta.len()))
    }

    /// Reads a complete document.
    pub(crate) fn document(&self, name: &str) -> Result<Vec<u8>, ImageError> {
        let (reader, len) = self.reader(name)?;
        if len > MAX_DOCUMENT {
            return Err(ImageError::Document {
                document: name.into(),
                reason: format!("has {len} bytes, at max {MAX_DOCUMENT}"),
            });
        }
        let mut bytes = Vec::new();
        let read = reader.take(MAX_DOCUMENT).read_to_end(&mut bytes);
        read.map_err(|e| io_error(format!("read {name}"), e))?;
        Ok(bytes)
    }
}

/// Error text for an invalid tar file. Only the first part is used, because the library quotes the file's
/// content.
fn not_a_tar(e: &std::io::Error) -> String {
    let message = e.to_string();
    let first = message.split([':', '\n']).next().unwrap_or_default();
    format!("as a tar file: {first}")
}
