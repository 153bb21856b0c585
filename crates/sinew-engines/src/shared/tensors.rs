//! The tensors of a published file, read by position.
//!
//! No memory map: a file that shrinks while it is read becomes an error here, where a map would end the
//! process.

use safetensors::tensor::{Metadata, TensorInfo};
use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// Most bytes of a file's list of tensors.
const MAX_HEADER: u64 = 64 << 20;

/// An open file of tensors. It can be read after its name is gone.
#[derive(Debug)]
pub(super) struct TensorFile {
    file: File,
    /// Bytes of the file.
    length: u64,
    /// First byte and length of each tensor.
    places: HashMap<String, (u64, usize)>,
}

impl TensorFile {
    /// Opens a `safetensors` file.
    ///
    /// # Errors
    /// If it cannot be read, or is none.
    pub(super) fn open(path: &Path) -> io::Result<Self> {
        let file = File::open(path)?;
        let length = file.metadata()?.len();
        let mut prefix = [0; 8];
        file.read_exact_at(&mut prefix, 0)?;
        let header = u64::from_le_bytes(prefix).saturating_add(8);
        if header > length.min(MAX_HEADER) {
            return Err(invalid("its list of tensors is longer than allowed"));
        }
        let mut bytes = vec![0; header as usize - 8];
        file.read_exact_at(&mut bytes, 8)?;
        let metadata: Metadata =
            serde_json::from_slice(&bytes).map_err(|e| invalid(e.to_string()))?;
        let place = |(name, info): (String, &TensorInfo)| {
            let (from, to) = info.data_offsets;
            (
                name,
                (header.saturating_add(from as u64), to.saturating_sub(from)),
            )
        };
        Ok(Self {
            file,
            length,
            places: metadata.tensors().into_iter().map(place).collect(),
        })
    }

    /// The bytes of a tensor, which must be `expected`.
    ///
    /// # Errors
    /// If it is not there, has another length, or cannot be read.
    pub(super) fn read(&self, name: &str, expected: usize) -> io::Result<Vec<u8>> {
        let place = self.places.get(name);
        let (from, length) = place.ok_or_else(|| invalid("it has no such tensor"))?;
        if *length != expected {
            return Err(invalid(format!(
                "it has {length} bytes, expected {expected}"
            )));
        }
        if from
            .checked_add(expected as u64)
            .is_none_or(|end| end > self.length)
        {
            return Err(invalid("the file ends before it"));
        }
        let mut bytes = vec![0; expected];
        self.file.read_exact_at(&mut bytes, *from)?;
        Ok(bytes)
    }
}

pub(super) fn invalid(why: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why.into())
}
