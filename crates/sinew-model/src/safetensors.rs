//! Reads weights of a safetensors directory: one `model.safetensors`, or shards under an index.
//!
//! ```text
//! header length u64 (little-endian) | header, JSON: name -> dtype, shape, [start, end) | tensor data
//! ```
//!
//! The length of the file must be exactly that of its header and data: a download that was cut is
//! found at once.

use crate::dequant::{StoredType, read_decoded};
use crate::source::{FileSource, ReadAt};
use safetensors::tensor::{Dtype, Metadata};
use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};

/// Maximum length of a header, as the format defines it.
const MAX_HEADER_BYTES: u64 = 100_000_000;
/// Maximum length of an index, 64 MiB; a thousand tensors take some 100 KB.
const MAX_INDEX_BYTES: u64 = 64 << 20;
/// Name of the weights of a model that has no shards.
pub(crate) const SINGLE: &str = "model.safetensors";
/// Name of the list that gives the shard of each tensor.
pub(crate) const INDEX: &str = "model.safetensors.index.json";

/// Reasons for which safetensors files are not usable.
#[derive(Debug, thiserror::Error)]
pub enum SafetensorsError {
    /// A directory without weights of this format.
    #[error("{}: neither `{SINGLE}` nor `{INDEX}` is there", .0.display())]
    NoWeights(PathBuf),
    /// A header that is not the format's, or a tensor that is in two files.
    #[error("{}: header is corrupt: {reason}", path.display())]
    Header { path: PathBuf, reason: String },
    /// An index that is not the format's, or that names a wrong shard.
    #[error("{}: index is corrupt: {reason}", path.display())]
    Index { path: PathBuf, reason: String },
    /// The file is shorter or longer than its header states.
    #[error("{}: holds {actual} bytes, its header describes {expected}: the file is truncated or damaged", path.display())]
    Length {
        path: PathBuf,
        actual: u64,
        expected: u64,
    },
    /// A type that is not read, such as a quantized one.
    #[error("{}: tensor `{name}` is stored as {found}, supported are F32, F16 and BF16", path.display())]
    Dtype {
        path: PathBuf,
        name: String,
        found: String,
    },
    #[error("{}: {error}", path.display())]
    Io { path: PathBuf, error: io::Error },
}

/// Shape, type and place of a tensor.
#[derive(Debug)]
struct Place {
    shard: usize,
    shape: Vec<usize>,
    stored: StoredType,
    offset: u64,
}

/// Opened safetensors files: headers in memory, tensors on demand.
#[derive(Debug)]
pub struct Safetensors {
    shards: Vec<(PathBuf, Box<dyn ReadAt>)>,
    tensors: BTreeMap<String, Place>,
}

#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

impl Safetensors {
    /// Opens the weights of a directory as the Hugging Face hub lays it out. Reads only headers.
    ///
    /// # Errors
    /// If there are no weights, a shard is missing or damaged, or a tensor is not in the shard that
    /// the index names.
    pub fn open_dir(dir: &Path) -> Result<Self, SafetensorsError> {
        let index_path = dir.join(INDEX);
        if dir.join(SINGLE).exists() {
            return Self::open_file(&dir.join(SINGLE));
        }
        if !index_path.exists() {
            return Err(SafetensorsError::NoWeights(dir.to_owned()));
        }
        let weight_map = read_index(&index_path)?;
        let corrupt = |reason: String| SafetensorsError::Index {
            path: index_path.clone(),
            reason,
        };
        let mut weights = Self {
            shards: Vec::new(),
            tensors: BTreeMap::new(),
        };
        let files: BTreeSet<&String> = weight_map.values().collect();
        for file in files {
            weights.add(&dir.join(file))?;
        }
        for (name, file) in &weight_map {
            let place = weights.tensors.get(name);
            if place.is_none_or(|place| weights.shards[place.shard].0 != dir.join(file)) {
                return Err(corrupt(format!("`{name}` is not in `{file}`")));
            }
        }
        Ok(weights)
    }

    /// Opens one file, of any name.
    pub fn open_file(path: &Path) -> Result<Self, SafetensorsError> {
        let mut weights = Self {
            shards: Vec::new(),
            tensors: BTreeMap::new(),
        };
        weights.add(path)?;
        Ok(weights)
    }

    /// Adds the tensors of a file.
    fn add(&mut self, path: &Path) -> Result<(), SafetensorsError> {
        let io = |error| SafetensorsError::Io {
            path: path.to_owned(),
            error,
        };
        let source = FileSource::open(path).map_err(io)?;
        self.add_source(path.to_owned(), Box::new(source))
    }

    /// Reads the header of `source`; `path` is for messages.
    pub(crate) fn add_source(
        &mut self,
        path: PathBuf,
        source: Box<dyn ReadAt>,
    ) -> Result<(), SafetensorsError> {
        let (metadata, data_start) = read_header(&path, &*source)?;
        let shard = self.shards.len();
        // Names are sorted, so that an error names the same tensor each time.
        let tensors: BTreeMap<_, _> = metadata.tensors().into_iter().collect();
        for (name, info) in tensors {
            let stored = match info.dtype {
                Dtype::F32 => StoredType::F32,
                Dtype::F16 => StoredType::F16,
                Dtype::BF16 => StoredType::Bf16,
                other => {
                    return Err(SafetensorsError::Dtype {
                        path,
                        name,
                        found: format!("{other:?}"),
                    });
                }
            };
            let offset = data_start + info.data_offsets.0 as u64;
            let place = Place {
                shard,
                shape: info.shape.clone(),
                stored,
                offset,
            };
            if let Some(other) = self.tensors.insert(name.clone(), place) {
                let reason = format!(
                    "tensor `{name}` is also in {}",
                    self.shards[other.shard].0.display()
                );
                return Err(SafetensorsError::Header { path, reason });
            }
        }
        self.shards.push((path, source));
        Ok(())
    }

    /// Names and shapes in order of names.
    pub fn shapes(&self) -> impl Iterator<Item = (&str, &[usize])> {
        self.tensors
            .iter()
            .map(|(name, place)| (name.as_str(), place.shape.as_slice()))
    }

    /// The shape of a tensor.
    pub fn shape(&self, name: &str) -> Option<&[usize]> {
        self.tensors.get(name).map(|place| place.shape.as_slice())
    }

    /// Decodes tensor `name` into `out`.
    ///
    /// # Errors
    /// If reading fails.
    ///
    /// # Panics
    /// If there is no such tensor, or `out` does not hold exactly its values.
    pub fn read_tensor(&self, name: &str, out: &mut [f32]) -> Result<(), SafetensorsError> {
        let place = &self.tensors[name];
        assert_eq!(
            out.len(),
            place.shape.iter().product::<usize>(),
            "`{name}` is {:?}",
            place.shape
        );
        let (path, source) = &self.shards[place.shard];
        read_decoded(&**source, place.offset, place.stored, out).map_err(|error| {
            SafetensorsError::Io {
                path: path.clone(),
                error,
            }
        })
    }
}

/// The header and the byte at which the data starts. Offsets, shapes and the file's length agree.
fn read_header(path: &Path, source: &dyn ReadAt) -> Result<(Metadata, u64), SafetensorsError> {
    let corrupt = |reason: String| SafetensorsError::Header {
        path: path.to_owned(),
        reason,
    };
    let io = |error| SafetensorsError::Io {
        path: path.to_owned(),
        error,
    };
    let total = source.len();
    if total < 8 {
        return Err(corrupt(format!("the file has {total} bytes")));
    }
    let mut length = [0; 8];
    source.read_exact_at(&mut length, 0).map_err(io)?;
    let length = u64::from_le_bytes(length);
    if length > MAX_HEADER_BYTES || length > total - 8 {
        return Err(corrupt(format!(
            "it claims {length} bytes of a file of {total}"
        )));
    }
    let mut header = vec![0; length as usize];
    source.read_exact_at(&mut header, 8).map_err(io)?;
    let metadata: Metadata =
        serde_json::from_slice(&header).map_err(|error| corrupt(error.to_string()))?;
    let data_start = 8 + length;
    let expected = data_start.saturating_add(metadata.data_len() as u64);
    if expected != total {
        return Err(SafetensorsError::Length {
            path: path.to_owned(),
            actual: total,
            expected,
        });
    }
    Ok((metadata, data_start))
}

/// Names and shapes of all tensors of a directory, whatever their types. Reads only headers.
///
/// # Errors
/// If there are no weights, or a shard is missing or damaged.
pub(crate) fn header_shapes(dir: &Path) -> Result<Vec<(String, Vec<usize>)>, SafetensorsError> {
    let files: BTreeSet<String> = if dir.join(SINGLE).exists() {
        BTreeSet::from([SINGLE.to_owned()])
    } else if dir.join(INDEX).exists() {
        read_index(&dir.join(INDEX))?.into_values().collect()
    } else {
        return Err(SafetensorsError::NoWeights(dir.to_owned()));
    };
    let mut shapes = Vec::new();
    for file in files {
        let path = dir.join(file);
        let source = FileSource::open(&path).map_err(|error| SafetensorsError::Io {
            path: path.clone(),
            error,
        })?;
        let (metadata, _) = read_header(&path, &source)?;
        let tensors = metadata.tensors();
        shapes.extend(
            tensors
                .into_iter()
                .map(|(name, info)| (name, info.shape.clone())),
        );
    }
    Ok(shapes)
}

/// The bytes of all tensors as the index of a directory states them (`metadata.total_size`).
pub(crate) fn index_bytes(dir: &Path) -> Option<u64> {
    let path = dir.join(INDEX);
    let length = std::fs::metadata(&path).ok()?.len();
    if length > MAX_INDEX_BYTES {
        return None;
    }
    let text = std::fs::read_to_string(path).ok()?;
    let index: serde_json::Value = serde_json::from_str(&text).ok()?;
    index["metadata"]["total_size"].as_u64()
}

/// The shard of each tensor. Names of files cannot leave the directory.
pub(crate) fn read_index(path: &Path) -> Result<BTreeMap<String, String>, SafetensorsError> {
    let corrupt = |reason: String| SafetensorsError::Index {
        path: path.to_owned(),
        reason,
    };
    let io = |error| SafetensorsError::Io {
        path: path.to_owned(),
        error,
    };
    let source = FileSource::open(path).map_err(io)?;
    if source.len() > MAX_INDEX_BYTES {
        return Err(corrupt(format!(
            "it has {} bytes, the limit is {MAX_INDEX_BYTES}",
            source.len()
        )));
    }
    let mut text = vec![0; source.len() as usize];
    source.read_exact_at(&mut text, 0).map_err(io)?;
    let index: Index = serde_json::from_slice(&text).map_err(|error| corrupt(error.to_string()))?;
    let plain = |file: &&String| !file.contains(['/', '\\', '\0']) && !file.starts_with('.');
    match index.weight_map.values().find(|file| !plain(file)) {
        Some(file) => Err(corrupt(format!(
            "`{file}` is not the name of a file in the directory"
        ))),
        None => Ok(index.weight_map),
    }
}
