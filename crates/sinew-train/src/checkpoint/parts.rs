//! The files of a checkpoint, written with their checksums in one pass over the data.

use super::{CheckpointError, Storage};
use sinew_types::{Dtype, TensorSource, TensorView};
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::io::{self, Write};
use std::path::Path;

/// One file of a checkpoint. File names must be plain (no directories, no leading dot) and unique.
#[derive(Debug)]
pub enum Part<'a> {
    /// A file with arbitrary content, from memory.
    Bytes { file: String, bytes: Vec<u8> },
    /// A safetensors file, written tensor by tensor.
    Tensors {
        file: String,
        tensors: Box<dyn TensorSource + 'a>,
    },
}

impl Part<'_> {
    pub(super) fn file(&self) -> &str {
        match self {
            Self::Bytes { file, .. } | Self::Tensors { file, .. } => file,
        }
    }
}

/// Writer that counts and hashes the bytes written through it.
struct HashingWriter<W> {
    inner: W,
    hasher: blake3::Hasher,
    bytes: u64,
}

impl<W: Write> Write for HashingWriter<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let n = self.inner.write(bytes)?;
        self.hasher.update(&bytes[..n]);
        self.bytes += n as u64;
        Ok(n)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}

/// Writes `part` into `dir` and waits until it is on the storage device. Returns its length and BLAKE3 hash.
pub(super) fn write_part(
    storage: &dyn Storage,
    dir: &Path,
    part: &Part<'_>,
) -> Result<(u64, String), CheckpointError> {
    let path = dir.join(part.file());
    let failed = |source| CheckpointError::io("write", &path, source);
    let file = storage.create_file(&path).map_err(failed)?;
    let mut out = HashingWriter {
        inner: io::BufWriter::with_capacity(1 << 20, file),
        hasher: blake3::Hasher::new(),
        bytes: 0,
    };
    let written = match part {
        Part::Bytes { bytes, .. } => out.write_all(bytes),
        Part::Tensors { tensors, .. } => write_safetensors(&mut out, &**tensors),
    };
    written.map_err(failed)?;
    let (bytes, hash) = (out.bytes, out.hasher.finalize().to_hex().to_string());
    let mut file = out.inner.into_inner().map_err(|e| failed(e.into_error()))?;
    file.sync().map_err(failed)?;
    Ok((bytes, hash))
}

/// The safetensors format (huggingface/safetensors README): header length as u64, JSON header padded with
/// spaces to 8 bytes, then the data; little-endian. Written here because the data is streamed tensor by
/// tensor, which avoids a copy of all of it in memory.
fn write_safetensors(out: &mut impl Write, tensors: &dyn TensorSource) -> io::Result<()> {
    let invalid = |name: &str, what: &str| {
        let text = format!("tensor {name} {what}");
        io::Error::new(io::ErrorKind::InvalidInput, text)
    };
    let mut header = BTreeMap::new();
    header.insert(
        "__metadata__".to_owned(),
        serde_json::json!({ "format": "pt" }),
    );
    let names = tensors.names();
    let mut offset = 0usize;
    for name in &names {
        let info = tensors.info(name);
        let info = info.ok_or_else(|| invalid(name, "is named and missing"))?;
        let end = offset + info.bytes();
        let entry = serde_json::json!({
            "dtype": info.dtype.name(), "shape": info.shape, "data_offsets": [offset, end],
        });
        if header.insert(name.clone(), entry).is_some() {
            return Err(invalid(name, "is named twice"));
        }
        offset = end;
    }
    let mut header = serde_json::to_vec(&header)?;
    header.resize(header.len().next_multiple_of(8), b' ');
    out.write_all(&(header.len() as u64).to_le_bytes())?;
    out.write_all(&header)?;
    for name in &names {
        match (tensors.tensor(name), tensors.info(name)) {
            (Some(view), Some(info)) if view.info() == info => out.write_all(view.bytes())?,
            _ => return Err(invalid(name, "is not of the announced type and shape")),
        }
    }
    Ok(())
}

/// A tensor of a file.
#[derive(Clone, Debug)]
struct StoredTensor {
    dtype: Dtype,
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

/// The tensors of a checkpoint's files by name, in memory and in their stored types.
#[derive(Clone, Debug, Default)]
pub struct StoredTensors(BTreeMap<String, StoredTensor>);

impl StoredTensors {
    /// Adds the tensors of another file.
    pub(crate) fn extend(&mut self, other: Self) {
        self.0.extend(other.0);
    }

    /// Adds a copy of every tensor of a source.
    #[cfg(test)]
    pub(crate) fn copy_from(&mut self, source: &dyn TensorSource) {
        for name in source.names() {
            if let Some(view) = source.tensor(&name) {
                let tensor = StoredTensor {
                    dtype: view.dtype(),
                    shape: view.shape().to_vec(),
                    bytes: view.into_bytes().into_owned(),
                };
                self.0.insert(name, tensor);
            }
        }
    }
}

impl TensorSource for StoredTensors {
    fn names(&self) -> Vec<String> {
        self.0.keys().cloned().collect()
    }

    fn tensor(&self, name: &str) -> Option<TensorView<'_>> {
        let StoredTensor {
            dtype,
            shape,
            bytes,
        } = self.0.get(name)?;
        TensorView::new(*dtype, shape, Cow::Borrowed(bytes)).ok()
    }
}

/// Reads the tensors of a safetensors file.
///
/// # Errors
/// If a type is not F32, F16 or BF16, or the file is damaged.
pub(super) fn read_safetensors(path: &Path) -> Result<StoredTensors, CheckpointError> {
    let corrupt = |reason: String| CheckpointError::Corrupt {
        path: path.to_owned(),
        reason,
    };
    let bytes = std::fs::read(path).map_err(|e| CheckpointError::io("read", path, e))?;
    let file = safetensors::SafeTensors::deserialize(&bytes).map_err(|e| corrupt(e.to_string()))?;
    let mut out = StoredTensors::default();
    for (name, view) in file.tensors() {
        let dtype = match view.dtype() {
            safetensors::Dtype::F32 => Dtype::F32,
            safetensors::Dtype::F16 => Dtype::F16,
            safetensors::Dtype::BF16 => Dtype::Bf16,
            other => {
                return Err(corrupt(format!(
                    "tensor {name} has dtype {other:?}, expected F32, F16 or BF16"
                )));
            }
        };
        let tensor = StoredTensor {
            dtype,
            shape: view.shape().to_vec(),
            bytes: view.data().to_vec(),
        };
        out.0.insert(name, tensor);
    }
    Ok(out)
}
