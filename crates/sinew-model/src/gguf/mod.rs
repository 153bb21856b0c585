//! GGUF files, versions 2 and 3 (little-endian): header, metadata, tensors.
//!
//! ```text
//! "GGUF" | version u32 | tensor count u64 | metadata count u64
//! metadata: key (u64 length + UTF-8) | type u32 | value            repeated
//! tensors:  name | dimensions u32 | sizes u64 each | type u32 | offset u64   repeated
//! padding to the alignment (`general.alignment`, 32 by default) | tensor data
//! ```
//!
//! Format: <https://github.com/ggml-org/ggml/blob/master/docs/gguf.md>. Every count and offset of a
//! file is compared with its length before memory is taken or bytes are read.

mod config;
mod meta;
mod names;

pub use meta::{GgufArray, GgufMetadata, GgufValue};
pub(crate) use names::gguf_name;

use crate::dequant::{StoredType, read_decoded};
use crate::source::{Cursor, FileSource, ReadAt};
use std::collections::BTreeMap;
use std::io;
use std::path::Path;

/// Name of this kind of file in errors.
pub(crate) const KIND: &str = "GGUF";

/// Longest key of the format.
const MAX_KEY_BYTES: u64 = 65_535;
/// Longest text accepted; chat templates are the longest in practice, some 10 KB.
const MAX_STRING_BYTES: u64 = 16 << 20;
/// Maximum dimensions of a tensor, as in ggml.
const MAX_DIMS: u32 = 4;
/// Fewest bytes of a tensor's entry: name length, one dimension, type, offset.
const MIN_TENSOR_ENTRY: u64 = 8 + 4 + 4 + 8;
/// Fewest bytes of a metadata entry: key length, type, one byte.
const MIN_KV_ENTRY: u64 = 8 + 4 + 1;
/// Maximum capacity that is allocated before a file's claim is checked, in elements; vectors grow from there
/// with the bytes really read.
const MAX_TRUSTED_CAPACITY: usize = 1 << 16;

/// Reasons for which a file is not a usable GGUF.
#[derive(Debug, thiserror::Error)]
pub enum GgufError {
    /// Not a GGUF at all.
    #[error("not a GGUF: the file starts with {found:02x?}, expected \"GGUF\"")]
    Magic { found: [u8; 4] },
    /// Version 1, a later one, or big-endian.
    #[error("GGUF version {0} is not supported: supported are 2 and 3 (little-endian)")]
    Version(u32),
    /// The file ends before something that its header describes.
    #[error(
        "GGUF is truncated or corrupt: {what} at byte {position} needs {needed} bytes, {remaining} remain"
    )]
    Truncated {
        what: String,
        position: u64,
        needed: u64,
        remaining: u64,
    },
    /// The header contradicts itself.
    #[error("GGUF is corrupt: {0}")]
    Corrupt(String),
    /// A stored type that is not decoded here.
    #[error(
        "tensor `{name}` has type {number}, which is not supported: supported are {}",
        StoredType::GGML_SUPPORTED
    )]
    TensorType { name: String, number: u32 },
    /// A tensor that was requested is not in the file.
    #[error("tensor `{0}` is not in the file")]
    NoTensor(String),
    #[error(transparent)]
    Config(#[from] crate::config::ConfigError),
    #[error("reading failed: {0}")]
    Io(#[from] io::Error),
}

/// Shape, type and place of a tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GgufTensor {
    /// Row-major: the last dimension is contiguous (GGUF lists them the other way round).
    pub shape: Vec<usize>,
    /// Storage type of its values.
    pub stored: StoredType,
    /// Byte at which it starts in the file.
    pub offset: u64,
    /// Length in bytes.
    pub bytes: usize,
}

/// An opened GGUF: metadata in memory, tensors on demand.
#[derive(Debug)]
pub struct Gguf {
    source: Box<dyn ReadAt>,
    meta: GgufMetadata,
    tensors: BTreeMap<String, GgufTensor>,
}

impl Gguf {
    /// Opens a file and reads its header; no tensor data is read.
    pub fn open(path: &Path) -> Result<Self, GgufError> {
        Self::read(Box::new(FileSource::open(path)?))
    }

    /// Reads the header of `source`.
    ///
    /// # Errors
    /// If the file is not a GGUF, a key or a tensor appears twice, or a tensor lies outside the
    /// file.
    pub fn read(source: Box<dyn ReadAt>) -> Result<Self, GgufError> {
        let mut reader = Reader(Cursor::new(&*source));
        let magic: [u8; 4] = reader.array("magic")?;
        if &magic != b"GGUF" {
            return Err(GgufError::Magic { found: magic });
        }
        let version = reader.u32("version")?;
        if !(2..=3).contains(&version) {
            return Err(GgufError::Version(version));
        }
        let tensor_count = reader.count("tensor count", MIN_TENSOR_ENTRY)?;
        let kv_count = reader.count("metadata count", MIN_KV_ENTRY)?;
        let mut values = BTreeMap::new();
        for _ in 0..kv_count {
            let key = reader.string("metadata key", MAX_KEY_BYTES)?;
            let kind = reader.u32("metadata type")?;
            let value = reader.value(&key, kind)?;
            if values.insert(key.clone(), value).is_some() {
                return Err(GgufError::Corrupt(format!(
                    "metadata key `{key}` appears twice"
                )));
            }
        }
        let meta = GgufMetadata::new(values);
        let mut tensors = reader.tensors(tensor_count)?;
        let alignment = alignment(&meta)?;
        let data_start = reader.0.position().next_multiple_of(alignment);
        for (name, tensor) in &mut tensors {
            place(name, tensor, data_start, alignment, source.len())?;
        }
        Ok(Self {
            source,
            meta,
            tensors,
        })
    }

    /// The metadata.
    pub fn metadata(&self) -> &GgufMetadata {
        &self.meta
    }

    /// Only the metadata; closes the file.
    pub fn into_metadata(self) -> GgufMetadata {
        self.meta
    }

    /// All tensors by their GGUF names.
    pub fn tensors(&self) -> &BTreeMap<String, GgufTensor> {
        &self.tensors
    }

    /// Decodes tensor `name` into `out`.
    ///
    /// # Errors
    /// If there is no such tensor or reading fails.
    ///
    /// # Panics
    /// If `out` does not hold exactly the tensor's values.
    pub fn read_tensor(&self, name: &str, out: &mut [f32]) -> Result<(), GgufError> {
        let tensor = self
            .tensors
            .get(name)
            .ok_or_else(|| GgufError::NoTensor(name.to_owned()))?;
        let values: usize = tensor.shape.iter().product();
        assert_eq!(out.len(), values, "`{name}` has shape {:?}", tensor.shape);
        read_decoded(&*self.source, tensor.offset, tensor.stored, out)?;
        Ok(())
    }
}

/// Alignment of tensor data in bytes: a multiple of 8, at most 1 MiB.
fn alignment(meta: &GgufMetadata) -> Result<u64, GgufError> {
    let alignment = meta.uint("general.alignment")?.unwrap_or(32);
    if alignment == 0 || alignment % 8 != 0 || alignment > 1 << 20 {
        return Err(GgufError::Corrupt(format!(
            "general.alignment is {alignment}, expected a multiple of 8 up to 1048576"
        )));
    }
    Ok(alignment)
}

/// Turns the offset inside the data section into one inside the file and checks both ends.
fn place(
    name: &str,
    tensor: &mut GgufTensor,
    data_start: u64,
    alignment: u64,
    file_len: u64,
) -> Result<(), GgufError> {
    if !tensor.offset.is_multiple_of(alignment) {
        return Err(GgufError::Corrupt(format!(
            "tensor `{name}` starts at offset {}, which is not a multiple of {alignment}",
            tensor.offset
        )));
    }
    let start = data_start.checked_add(tensor.offset);
    let end = start.and_then(|start| start.checked_add(tensor.bytes as u64));
    match (start, end) {
        (Some(start), Some(end)) if end <= file_len => {
            tensor.offset = start;
            Ok(())
        }
        _ => Err(GgufError::Truncated {
            what: format!("tensor `{name}`"),
            position: start.unwrap_or(u64::MAX),
            needed: tensor.bytes as u64,
            remaining: file_len.saturating_sub(start.unwrap_or(u64::MAX)),
        }),
    }
}

/// Reads the header's primitives, checking each length against the bytes that remain.
struct Reader<'a>(Cursor<'a>);

impl Reader<'_> {
    /// Refuses to read more bytes than remain.
    fn need(&self, what: &str, needed: u64) -> Result<(), GgufError> {
        let remaining = self.0.remaining();
        if needed > remaining {
            return Err(GgufError::Truncated {
                what: what.to_owned(),
                position: self.0.position(),
                needed,
                remaining,
            });
        }
        Ok(())
    }

    fn array<const N: usize>(&mut self, what: &str) -> Result<[u8; N], GgufError> {
        self.need(what, N as u64)?;
        let mut bytes = [0; N];
        self.0.read(&mut bytes)?;
        Ok(bytes)
    }

    fn u32(&mut self, what: &str) -> Result<u32, GgufError> {
        Ok(u32::from_le_bytes(self.array(what)?))
    }

    fn u64(&mut self, what: &str) -> Result<u64, GgufError> {
        Ok(u64::from_le_bytes(self.array(what)?))
    }

    /// A count of entries of at least `min_bytes` each, all of which must fit in the file.
    fn count(&mut self, what: &str, min_bytes: u64) -> Result<usize, GgufError> {
        let count = self.u64(what)?;
        self.need(
            &format!("{what} of {count}"),
            count.saturating_mul(min_bytes),
        )?;
        usize::try_from(count).map_err(|_| GgufError::Corrupt(format!("{what} is {count}")))
    }

    /// A UTF-8 text of at most `limit` bytes.
    fn string(&mut self, what: &str, limit: u64) -> Result<String, GgufError> {
        let len = self.u64(what)?;
        self.need(what, len)?;
        if len > limit {
            return Err(GgufError::Corrupt(format!(
                "{what} has {len} bytes, the limit is {limit}"
            )));
        }
        let mut bytes = vec![0; len as usize];
        self.0.read(&mut bytes)?;
        String::from_utf8(bytes).map_err(|_| GgufError::Corrupt(format!("{what} is not UTF-8")))
    }

    /// A metadata value of type `kind`, 0 to 12.
    fn value(&mut self, key: &str, kind: u32) -> Result<GgufValue, GgufError> {
        Ok(match kind {
            0 => GgufValue::Uint(self.array::<1>(key)?[0].into()),
            1 => GgufValue::Int(i8::from_le_bytes(self.array(key)?).into()),
            2 => GgufValue::Uint(u16::from_le_bytes(self.array(key)?).into()),
            3 => GgufValue::Int(i16::from_le_bytes(self.array(key)?).into()),
            4 => GgufValue::Uint(self.u32(key)?.into()),
            5 => GgufValue::Int(i32::from_le_bytes(self.array(key)?).into()),
            6 => GgufValue::Float(f32::from_le_bytes(self.array(key)?).into()),
            7 => GgufValue::Bool(self.flag(key)?),
            8 => GgufValue::String(self.string(key, MAX_STRING_BYTES)?),
            9 => GgufValue::Array(self.list(key)?),
            10 => GgufValue::Uint(self.u64(key)?),
            11 => GgufValue::Int(i64::from_le_bytes(self.array(key)?)),
            12 => GgufValue::Float(f64::from_le_bytes(self.array(key)?)),
            _ => {
                return Err(GgufError::Corrupt(format!(
                    "metadata `{key}` has type {kind}, types are 0 to 12"
                )));
            }
        })
    }

    fn flag(&mut self, key: &str) -> Result<bool, GgufError> {
        match self.array::<1>(key)?[0] {
            0 => Ok(false),
            1 => Ok(true),
            other => Err(GgufError::Corrupt(format!(
                "metadata `{key}` is a flag of value {other}"
            ))),
        }
    }

    /// An array: element type, count, elements. Arrays of arrays are refused.
    fn list(&mut self, key: &str) -> Result<GgufArray, GgufError> {
        let kind = self.u32(key)?;
        let min_bytes = match kind {
            0 | 1 | 7 => 1,
            2 | 3 => 2,
            4..=6 => 4,
            8 | 10..=12 => 8,
            9 => {
                return Err(GgufError::Corrupt(format!(
                    "metadata `{key}` is an array of arrays, which no known writer makes"
                )));
            }
            _ => {
                return Err(GgufError::Corrupt(format!(
                    "metadata `{key}` is an array of type {kind}, types are 0 to 12"
                )));
            }
        };
        let count = self.count(key, min_bytes)?;
        let capacity = count.min(MAX_TRUSTED_CAPACITY);
        if kind == 8 {
            let mut strings = Vec::with_capacity(capacity);
            for _ in 0..count {
                strings.push(self.string(key, MAX_STRING_BYTES)?);
            }
            return Ok(GgufArray::Strings(strings));
        }
        let mut ints = Vec::new();
        let mut floats = Vec::new();
        for _ in 0..count {
            match self.value(key, kind)? {
                GgufValue::Uint(v) => ints.push(i64::try_from(v).map_err(|_| {
                    GgufError::Corrupt(format!("metadata `{key}` holds {v}, beyond 2^63"))
                })?),
                GgufValue::Int(v) => ints.push(v),
                GgufValue::Bool(v) => ints.push(v.into()),
                GgufValue::Float(v) => floats.push(v),
                GgufValue::String(_) | GgufValue::Array(_) => {}
            }
        }
        let is_float = kind == 6 || kind == 12;
        Ok(if is_float {
            GgufArray::Floats(floats)
        } else {
            GgufArray::Ints(ints)
        })
    }

    fn tensors(&mut self, count: usize) -> Result<BTreeMap<String, GgufTensor>, GgufError> {
        let mut tensors = BTreeMap::new();
        for _ in 0..count {
            let name = self.string("tensor name", MAX_KEY_BYTES)?;
            let tensor = self.tensor(&name)?;
            if tensors.insert(name.clone(), tensor).is_some() {
                return Err(GgufError::Corrupt(format!("tensor `{name}` appears twice")));
            }
        }
        Ok(tensors)
    }

    /// One entry of the tensor table; its offset is still relative to the data section.
    fn tensor(&mut self, name: &str) -> Result<GgufTensor, GgufError> {
        let dims = self.u32("tensor dimensions")?;
        if dims > MAX_DIMS {
            return Err(GgufError::Corrupt(format!(
                "tensor `{name}` has {dims} dimensions, at most {MAX_DIMS} are possible"
            )));
        }
        let mut shape = Vec::with_capacity(dims as usize);
        for _ in 0..dims {
            let size = self.u64("tensor dimension")?;
            shape.push(usize::try_from(size).unwrap_or(usize::MAX));
        }
        shape.reverse();
        let number = self.u32("tensor type")?;
        let offset = self.u64("tensor offset")?;
        let stored = StoredType::from_ggml(number).ok_or_else(|| GgufError::TensorType {
            name: name.to_owned(),
            number,
        })?;
        // Blocks run along rows, so that a row must hold whole blocks.
        let row = shape.last().copied().unwrap_or(1);
        let bytes = shape
            .iter()
            .try_fold(1usize, |product, &size| product.checked_mul(size))
            .filter(|_| row.is_multiple_of(stored.block().0))
            .and_then(|values| stored.bytes_of(values))
            .ok_or_else(|| {
                GgufError::Corrupt(format!("tensor `{name}` of {stored:?} has shape {shape:?}"))
            })?;
        Ok(GgufTensor {
            shape,
            stored,
            offset,
            bytes,
        })
    }
}
