//! LoRA adapters in the files of PEFT: `adapter_config.json` and `adapter_model.safetensors`.
//!
//! Rank and targets follow from the tensors, and the engine compares them with its model. Of the
//! configuration only the scale is used; variants that need another computation are refused.

use safetensors::SafeTensors;
use safetensors::tensor::{Dtype as Stored, TensorInfo as StoredInfo};
use serde_json::Value;
use sinew_types::{
    Adapter, Dtype, PublishedFolder, TensorInfo, TensorSource, TensorView, WeightsManifestTensor,
};
use std::borrow::Cow;
use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Read};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// File with the configuration.
pub(super) const CONFIG: &str = "adapter_config.json";
/// File with the tensors.
pub(super) const WEIGHTS: &str = "adapter_model.safetensors";
/// Maximum bytes of a configuration; PEFT writes about 1 KB.
pub(super) const MAX_CONFIG_BYTES: u64 = 1 << 20;

/// Switches of PEFT for other computations than `alpha / rank * B A`.
const SWITCHES: [&str; 4] = ["use_rslora", "use_dora", "fan_in_fan_out", "lora_bias"];
/// Fields of PEFT for ranks or scales that differ between modules, and for weights that are replaced.
const PATTERNS: [&str; 3] = ["rank_pattern", "alpha_pattern", "modules_to_save"];

/// Reasons for which a folder is not that of an adapter.
#[derive(Debug, thiserror::Error)]
pub enum AdapterFolderError {
    /// A file that cannot be read.
    #[error("{}: {source}", path.display())]
    Read { path: PathBuf, source: io::Error },
    /// A file above the limit.
    #[error("{}: {bytes} bytes, allowed are {max}", path.display())]
    TooLarge { path: PathBuf, bytes: u64, max: u64 },
    /// A file with other content than that of an adapter.
    #[error("{}: {why}", path.display())]
    Refused { path: PathBuf, why: String },
}

/// Tensors of an adapter, in the bytes of their file.
struct FileTensors {
    folder: PublishedFolder,
    bytes: Vec<u8>,
    /// Index in the published list, and the place in `bytes`.
    places: HashMap<String, (usize, Range<usize>)>,
}

impl TensorSource for FileTensors {
    fn names(&self) -> Vec<String> {
        let tensors = self.folder.tensors.iter();
        tensors.map(|tensor| tensor.name.clone()).collect()
    }

    fn tensor(&self, name: &str) -> Option<TensorView<'_>> {
        let (index, place) = self.places.get(name)?;
        let tensor = self.folder.tensors.get(*index)?;
        let bytes = self.bytes.get(place.clone())?;
        TensorView::new(tensor.dtype, &tensor.shape, Cow::Borrowed(bytes)).ok()
    }

    fn info(&self, name: &str) -> Option<TensorInfo<'_>> {
        let (index, _) = self.places.get(name)?;
        let tensor = self.folder.tensors.get(*index)?;
        Some(TensorInfo {
            dtype: tensor.dtype,
            shape: &tensor.shape,
        })
    }

    fn folder(&self) -> Option<&PublishedFolder> {
        Some(&self.folder)
    }
}

/// Reads the adapter of a folder into memory. Its file of tensors may have `max_bytes`. The folder may be
/// removed afterwards, unless the engine reads it by its path.
///
/// # Errors
/// If a file is missing, too large or damaged, or the configuration asks for a variant of LoRA.
pub fn read_adapter(folder: &Path, max_bytes: u64) -> Result<Adapter, AdapterFolderError> {
    let path = folder.join(CONFIG);
    let refused = |path: &Path, why: String| AdapterFolderError::Refused {
        path: path.to_owned(),
        why,
    };
    let (rank, alpha) =
        scale(&read(&path, MAX_CONFIG_BYTES)?).map_err(|why| refused(&path, why))?;
    let path = folder.join(WEIGHTS);
    let bytes = read(&path, max_bytes)?;
    let root = std::path::absolute(folder).map_err(|source| AdapterFolderError::Read {
        path: folder.to_owned(),
        source,
    })?;
    let tensors = tensors(root, bytes).map_err(|why| refused(&path, why))?;
    let other = tensors.folder.tensors.iter().find(|tensor| {
        tensor.name.ends_with(".lora_A.weight") && tensor.shape.first() != Some(&rank)
    });
    if let Some(tensor) = other {
        let why = format!("`{}` is {:?}, but r = {rank}", tensor.name, tensor.shape);
        return Err(refused(&path, why));
    }
    Ok(Adapter {
        alpha,
        tensors: Arc::new(tensors),
    })
}

/// Reads a file that has at most `max` bytes.
fn read(path: &Path, max: u64) -> Result<Vec<u8>, AdapterFolderError> {
    let failed = |source| AdapterFolderError::Read {
        path: path.to_owned(),
        source,
    };
    // Opening a pipe would wait for its writer.
    let found = std::fs::metadata(path).map_err(failed)?;
    if !found.is_file() {
        return Err(failed(io::Error::other("not a file")));
    }
    let too_large = |bytes| AdapterFolderError::TooLarge {
        path: path.to_owned(),
        bytes,
        max,
    };
    if found.len() > max {
        return Err(too_large(found.len()));
    }
    let mut bytes = Vec::with_capacity(found.len() as usize);
    let file = File::open(path).map_err(failed)?;
    // The file may grow meanwhile.
    let read = file.take(max + 1).read_to_end(&mut bytes).map_err(failed)?;
    if read as u64 > max {
        return Err(too_large(read as u64));
    }
    Ok(bytes)
}

/// Rank and alpha of a configuration.
fn scale(config: &[u8]) -> Result<(usize, f32), String> {
    let config: Value = serde_json::from_slice(config).map_err(|e| e.to_string())?;
    if let Some(kind) = config.get("peft_type").filter(|kind| *kind != "LORA") {
        return Err(format!("peft_type = {kind}: only \"LORA\" is supported"));
    }
    let on = |field: &&&str| config.get(**field).is_some_and(|value| *value == true);
    if let Some(field) = SWITCHES.iter().find(on) {
        return Err(format!("{field} = true is not supported"));
    }
    let filled = |field: &&&str| match config.get(**field) {
        Some(Value::Object(map)) => !map.is_empty(),
        Some(Value::Array(list)) => !list.is_empty(),
        _ => false,
    };
    if let Some(field) = PATTERNS.iter().find(filled) {
        return Err(format!(
            "{field} is not supported: all adapters need one rank and one scale, and the base stays as it is"
        ));
    }
    let rank = config.get("r").and_then(Value::as_u64);
    let rank = rank.ok_or("r is missing or not a whole number")?;
    let alpha = config.get("lora_alpha").and_then(Value::as_f64);
    let alpha = alpha.ok_or("lora_alpha is missing or not a number")?;
    Ok((rank as usize, alpha as f32))
}

/// The tensors of a file's bytes.
fn tensors(folder: PathBuf, bytes: Vec<u8>) -> Result<FileTensors, String> {
    let (header, metadata) = SafeTensors::read_metadata(&bytes).map_err(|e| e.to_string())?;
    let start = header + size_of::<u64>();
    let (mut published, mut places) = (Vec::new(), HashMap::new());
    for name in metadata.offset_keys() {
        let Some(found) = metadata.info(&name) else {
            continue;
        };
        let (from, to) = found.data_offsets;
        let place = start + from..start + to;
        places.insert(name.clone(), (published.len(), place.clone()));
        let data = bytes.get(place).ok_or_else(|| format!("`{name}` is cut"))?;
        published.push(listed(name, found, data)?);
    }
    let folder = PublishedFolder {
        path: folder,
        is_adapter: true,
        tensors: published,
    };
    Ok(FileTensors {
        folder,
        bytes,
        places,
    })
}

/// The entry of a tensor.
fn listed(name: String, found: &StoredInfo, data: &[u8]) -> Result<WeightsManifestTensor, String> {
    let dtype = match found.dtype {
        Stored::F32 => Dtype::F32,
        Stored::F16 => Dtype::F16,
        Stored::BF16 => Dtype::Bf16,
        other => {
            return Err(format!(
                "`{name}` is stored as {other:?}, supported are F32, F16 and BF16"
            ));
        }
    };
    Ok(WeightsManifestTensor {
        name,
        dtype,
        shape: found.shape.clone(),
        file: WEIGHTS.into(),
        blake3: blake3::hash(data).to_hex().to_string(),
        delta: None,
    })
}

#[cfg(test)]
pub(super) mod testing {
    use super::*;
    use safetensors::tensor::TensorView as Written;

    /// Writes an adapter of one projection, from 4 to 4 values, with alpha 4.
    pub(in crate::adapters) fn write_adapter(dir: &Path, rank: usize, value: f32) {
        let bytes: Vec<u8> = [value; 4]
            .repeat(rank)
            .iter()
            .flat_map(|v| v.to_le_bytes())
            .collect();
        let named = [("A", vec![rank, 4]), ("B", vec![4, rank])].map(|(part, shape)| {
            let name =
                format!("base_model.model.model.layers.0.self_attn.q_proj.lora_{part}.weight");
            (name, Written::new(Stored::F32, shape, &bytes).unwrap())
        });
        safetensors::serialize_to_file(named, None, &dir.join(WEIGHTS)).unwrap();
        let config = serde_json::json!({"peft_type": "LORA", "r": rank, "lora_alpha": 4});
        std::fs::write(dir.join(CONFIG), config.to_string()).unwrap();
    }
}

#[cfg(test)]
mod tests {
    use super::testing::write_adapter;
    use super::*;
    use serde_json::json;
    use std::fs;

    /// Largest file of tensors in these tests.
    const MAX: u64 = 1 << 20;

    fn refusal(edit: impl Fn(&Path)) -> String {
        let dir = tempfile::tempdir().unwrap();
        write_adapter(dir.path(), 2, 1.0);
        edit(dir.path());
        read_adapter(dir.path(), MAX).unwrap_err().to_string()
    }

    #[test]
    fn folders_of_peft_are_read() {
        let dir = tempfile::tempdir().unwrap();
        write_adapter(dir.path(), 2, 0.5);
        let adapter = read_adapter(dir.path(), MAX).unwrap();
        assert_eq!(adapter.alpha, 4.0);
        let tensors = adapter.tensors;
        let mut names = tensors.names();
        names.sort();
        let [a, b] = ["A", "B"].map(|part| {
            format!("base_model.model.model.layers.0.self_attn.q_proj.lora_{part}.weight")
        });
        assert_eq!(names, [a.clone(), b.clone()]);
        assert_eq!(tensors.info(&a).unwrap().shape, [2, 4]);
        assert_eq!(*tensors.tensor(&b).unwrap().into_f32(), [0.5; 8]);
        assert!(tensors.tensor("c").is_none());
        let folder = tensors.folder().unwrap();
        assert!(folder.is_adapter && folder.path.is_absolute());
        let digest = blake3::hash(tensors.tensor(&b).unwrap().bytes());
        let listed = folder.tensors.iter().find(|t| t.name == b).unwrap();
        assert_eq!(listed.blake3, digest.to_hex().as_str());
    }

    #[test]
    fn other_folders_are_refused_with_the_reason() {
        let with = |field: &str, value: Value| {
            refusal(|dir| {
                let path = dir.join(CONFIG);
                let mut config: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
                config[field] = value.clone();
                fs::write(path, config.to_string()).unwrap();
            })
        };
        for (field, value, part) in [
            ("peft_type", json!("IA3"), "only \"LORA\""),
            ("use_rslora", json!(true), "use_rslora = true"),
            ("use_dora", json!(true), "use_dora = true"),
            ("rank_pattern", json!({"q_proj": 4}), "rank_pattern"),
            ("modules_to_save", json!(["lm_head"]), "modules_to_save"),
            ("lora_alpha", json!("a"), "lora_alpha"),
            ("r", json!(null), "r is missing"),
            ("r", json!(3), "but r = 3"),
        ] {
            let error = with(field, value);
            assert!(error.contains(part), "{error}");
        }
        let missing = refusal(|dir| fs::remove_file(dir.join(WEIGHTS)).unwrap());
        assert!(missing.contains(WEIGHTS), "{missing}");
        let cut = refusal(|dir| {
            let bytes = fs::read(dir.join(WEIGHTS)).unwrap();
            fs::write(dir.join(WEIGHTS), &bytes[..bytes.len() - 1]).unwrap();
        });
        assert!(cut.contains(WEIGHTS), "{cut}");
        let dir = refusal(|dir| {
            fs::remove_file(dir.join(CONFIG)).unwrap();
            fs::create_dir(dir.join(CONFIG)).unwrap();
        });
        assert!(dir.contains("not a file"), "{dir}");
        let dir = tempfile::tempdir().unwrap();
        write_adapter(dir.path(), 2, 1.0);
        let large = read_adapter(dir.path(), 64).unwrap_err().to_string();
        assert!(large.contains("allowed are 64"), "{large}");
    }
}
