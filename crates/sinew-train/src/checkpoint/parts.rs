//! The files of a checkpoint, written with their checksums in one pass.

use super::{CheckpointError, Storage};
use sinew_types::TensorView;
use std::collections::BTreeMap;
use std::io::{self, Write};
use std::path::Path;

// Values go to files and back as they lie in memory, and the format is little-endian.
const _: () = assert!(cfg!(target_endian = "little"));

/// One file of a checkpoint.
#[derive(Debug)]
pub enum Part<'a> {
    Bytes {
        file: String,
        bytes: Vec<u8>,
    },
    /// A safetensors file of f32 tensors.
    Tensors {
        file: String,
        tensors: Vec<(String, TensorView<'a>)>,
    },
}

impl Part<'_> {
    pub(super) fn file(&self) -> &str {
        match self {
            Self::Bytes { file, .. } | Self::Tensors { file, .. } => file,
        }
    }
}

/// Counts and hashes what passes.
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

/// Writes `part` into `dir`, waits until it is on the device; returns its length and BLAKE3.
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
        Part::Tensors { tensors, .. } => write_safetensors(&mut out, tensors),
    };
    written.map_err(failed)?;
    let (bytes, hash) = (out.bytes, out.hasher.finalize().to_hex().to_string());
    let mut file = out.inner.into_inner().map_err(|e| failed(e.into_error()))?;
    file.sync().map_err(failed)?;
    Ok((bytes, hash))
}

/// The safetensors format (huggingface/safetensors README): header length as u64, JSON header
/// padded with spaces to 8 bytes, then the data; little-endian. Written by hand because the data
/// is streamed from borrowed memory, several times the size of a sensible copy.
fn write_safetensors(out: &mut impl Write, tensors: &[(String, TensorView<'_>)]) -> io::Result<()> {
    let mut header = BTreeMap::new();
    header.insert(
        "__metadata__".to_owned(),
        serde_json::json!({ "format": "pt" }),
    );
    let mut offset = 0usize;
    for (name, view) in tensors {
        let elements: usize = view.shape.iter().product();
        let end = offset + 4 * view.data.len();
        let entry = serde_json::json!({
            "dtype": "F32", "shape": view.shape, "data_offsets": [offset, end],
        });
        if elements != view.data.len() || header.insert(name.clone(), entry).is_some() {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!(
                    "tensor {name} is named twice or its shape {:?} does not match",
                    view.shape
                ),
            ));
        }
        offset = end;
    }
    let mut header = serde_json::to_vec(&header)?;
    header.resize(header.len().next_multiple_of(8), b' ');
    out.write_all(&(header.len() as u64).to_le_bytes())?;
    out.write_all(&header)?;
    tensors
        .iter()
        .try_for_each(|(_, view)| out.write_all(bytemuck::cast_slice(view.data)))
}

/// Shape and values of tensors, by name.
pub type StoredTensors = BTreeMap<String, (Vec<usize>, Vec<f32>)>;

/// Tensors of a safetensors file by name: shape and values. Only f32 is read.
pub(super) fn read_safetensors(path: &Path) -> Result<StoredTensors, CheckpointError> {
    let corrupt = |reason: String| CheckpointError::Corrupt {
        path: path.to_owned(),
        reason,
    };
    let bytes = std::fs::read(path).map_err(|e| CheckpointError::io("read", path, e))?;
    let file = safetensors::SafeTensors::deserialize(&bytes).map_err(|e| corrupt(e.to_string()))?;
    let mut out = BTreeMap::new();
    for (name, view) in file.tensors() {
        if view.dtype() != safetensors::Dtype::F32 {
            return Err(corrupt(format!(
                "tensor {name} has dtype {:?}, expected F32",
                view.dtype()
            )));
        }
        let mut values = vec![0.0f32; view.data().len() / 4];
        bytemuck::cast_slice_mut(&mut values).copy_from_slice(view.data());
        out.insert(name, (view.shape().to_vec(), values));
    }
    Ok(out)
}
