//! File operations that writing a checkpoint needs, behind a trait so that tests can make each of them fail.

use std::fmt::Debug;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;

/// A file being written.
pub trait StorageFile: Write {
    /// Waits until the contents are on the storage device (fsync).
    fn sync(&mut self) -> io::Result<()>;
}

/// Storage for writing checkpoints. Reading goes to the file system directly.
pub trait Storage: Debug + Send + Sync {
    /// Creates a directory and its parents, unless they exist.
    fn create_dir(&self, path: &Path) -> io::Result<()>;
    /// Creates a new file; fails if it exists.
    fn create_file(&self, path: &Path) -> io::Result<Box<dyn StorageFile>>;
    /// Waits until the directory's entries are on the storage device.
    fn sync_dir(&self, path: &Path) -> io::Result<()>;
    /// Renames atomically; replaces a file, never a directory with entries.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;
    /// Removes a directory and everything in it.
    fn remove_dir(&self, path: &Path) -> io::Result<()>;
    /// Removes a file.
    fn remove_file(&self, path: &Path) -> io::Result<()>;
}

/// Storage on the file system.
#[derive(Clone, Copy, Debug, Default)]
pub struct DiskStorage;

struct DiskFile(File);

impl Write for DiskFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

impl StorageFile for DiskFile {
    fn sync(&mut self) -> io::Result<()> {
        self.0.sync_all()
    }
}

impl Storage for DiskStorage {
    fn create_dir(&self, path: &Path) -> io::Result<()> {
        fs::create_dir_all(path)
    }

    fn create_file(&self, path: &Path) -> io::Result<Box<dyn StorageFile>> {
        Ok(Box::new(DiskFile(File::create_new(path)?)))
    }

    fn sync_dir(&self, path: &Path) -> io::Result<()> {
        File::open(path)?.sync_all()
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        fs::rename(from, to)
    }

    fn remove_dir(&self, path: &Path) -> io::Result<()> {
        fs::remove_dir_all(path)
    }

    fn remove_file(&self, path: &Path) -> io::Result<()> {
        fs::remove_file(path)
    }
}
