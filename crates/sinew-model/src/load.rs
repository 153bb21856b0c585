//! Reads weights from files into [`Params`].
//!
//! Names and shapes in the file's header are compared with the configuration before any buffer is
//! allocated, and every value is checked to be finite.

use crate::config::{Family, ModelConfig};
use crate::error::LoadError;
use crate::gguf::{Gguf, GgufError, GgufMetadata, gguf_name};
use crate::lookup::ModelFiles;
use crate::params::{ParamEntry, ParamLayout, Params, TensorMismatch};
use crate::safetensors::Safetensors;
use std::io;
use std::path::Path;
use std::sync::Arc;

/// Maximum length of a `config.json`, 16 MiB.
const MAX_CONFIG_BYTES: u64 = 16 << 20;

/// A model read from files.
#[derive(Debug)]
pub struct LoadedModel {
    /// All weights, as f32.
    pub params: Params,
    /// The metadata of a GGUF (tokenizer, chat template), when it came from one.
    pub gguf: Option<GgufMetadata>,
}

/// Reads configuration and weights.
///
/// # Errors
/// If the files are damaged, do not fit each other, or hold a value that is not finite.
pub fn load_model(files: &ModelFiles) -> Result<LoadedModel, LoadError> {
    match files {
        ModelFiles::Gguf(path) => load_gguf(path),
        ModelFiles::Dir(dir) => load_dir(dir),
    }
}

/// Reads only the configuration. The weights can still be missing or damaged; see [`check_model`].
pub fn load_config(files: &ModelFiles) -> Result<ModelConfig, LoadError> {
    match files {
        ModelFiles::Gguf(path) => Ok(open_gguf(path)?.1),
        ModelFiles::Dir(dir) => read_config(dir),
    }
}

/// Reads the configuration and compares the headers of the weights with it; no weight is read.
/// Takes milliseconds for any size of model.
pub fn check_model(files: &ModelFiles) -> Result<ModelConfig, LoadError> {
    match files {
        ModelFiles::Gguf(path) => Ok(fitting_gguf(path)?.1),
        ModelFiles::Dir(dir) => Ok(fitting_dir(dir)?.1),
    }
}

/// Reads only the metadata of a GGUF.
pub fn load_gguf_metadata(path: &Path) -> Result<GgufMetadata, LoadError> {
    let gguf = Gguf::open(path).map_err(LoadError::gguf(path))?;
    Ok(gguf.into_metadata())
}

/// Tensor of a GGUF that is part of the configuration rather than of the weights.
const ROPE_DIVISORS: &str = "rope_freqs.weight";

fn open_gguf(path: &Path) -> Result<(Gguf, ModelConfig), LoadError> {
    let failed = LoadError::gguf(path);
    let gguf = Gguf::open(path).map_err(failed)?;
    let divisors = match gguf.tensors().get(ROPE_DIVISORS) {
        // Half of the largest head is the limit; a longer tensor is refused before it is read.
        Some(tensor) if tensor.shape.iter().product::<usize>() <= 256 => {
            let mut values = vec![0.0; tensor.shape.iter().product()];
            gguf.read_tensor(ROPE_DIVISORS, &mut values)
                .map_err(failed)?;
            Some(values)
        }
        Some(tensor) => {
            let reason = format!("tensor `{ROPE_DIVISORS}` has shape {:?}", tensor.shape);
            return Err(failed(GgufError::Corrupt(reason)));
        }
        None => None,
    };
    let has_output = gguf.tensors().contains_key("output.weight");
    let config = ModelConfig::from_gguf(gguf.metadata(), has_output, divisors);
    Ok((gguf, config.map_err(LoadError::config(path))?))
}

/// Opens a GGUF and checks that its tensors are those of its configuration.
fn fitting_gguf(path: &Path) -> Result<(Gguf, ModelConfig), LoadError> {
    let (gguf, config) = open_gguf(path)?;
    let layout = ParamLayout::new(&config);
    compare_gguf(&layout, &gguf).map_err(LoadError::mismatch(path))?;
    Ok((gguf, config))
}

fn load_gguf(path: &Path) -> Result<LoadedModel, LoadError> {
    // The layout is compared before the buffer is taken: a hostile header asks for no memory.
    let (gguf, config) = fitting_gguf(path)?;
    let mut params = Params::zeros(&config);
    let layout = Arc::clone(params.layout());
    let mut rows = Vec::new();
    for entry in layout.entries() {
        let out = &mut params.values_mut()[entry.range()];
        let name = gguf_name(&entry.name).unwrap_or_default();
        gguf.read_tensor(&name, out)
            .map_err(LoadError::gguf(path))?;
        check_finite(path, entry, out)?;
        if config.family == Family::Llama && is_rotated(&entry.name) {
            rows.clear();
            rows.extend_from_slice(out);
            unpermute(
                &rows,
                out,
                entry.shape[0] / config.head_dim,
                config.head_dim,
            );
        }
    }
    Ok(LoadedModel {
        params,
        gguf: Some(gguf.into_metadata()),
    })
}

fn compare_gguf(layout: &ParamLayout, gguf: &Gguf) -> Result<(), TensorMismatch> {
    let mut expected = std::collections::BTreeMap::new();
    for entry in layout.entries() {
        expected.insert(gguf_name(&entry.name).unwrap_or_default(), entry);
    }
    let mut mismatch = TensorMismatch::default();
    for (name, tensor) in gguf.tensors() {
        match expected.remove(name) {
            None if name == ROPE_DIVISORS => {}
            None => mismatch.unexpected.push(name.clone()),
            Some(entry) if entry.shape != tensor.shape => {
                mismatch
                    .misshaped
                    .push((name.clone(), tensor.shape.clone(), entry.shape.clone()))
            }
            Some(_) => {}
        }
    }
    mismatch.missing = expected.into_keys().collect();
    if mismatch == TensorMismatch::default() {
        Ok(())
    } else {
        Err(mismatch)
    }
}

/// Whether a llama GGUF stores the rows of this projection in another order.
fn is_rotated(name: &str) -> bool {
    name.contains(".q_proj.") || name.contains(".k_proj.")
}

/// Undoes the row order of a llama GGUF: it stores the two halves of each head interleaved (row
/// `2 i + j` of a head is row `j · head_dim / 2 + i` here), for rotations of neighbouring pairs.
fn unpermute(stored: &[f32], out: &mut [f32], heads: usize, head_dim: usize) {
    let width = stored.len() / (heads * head_dim);
    let half = head_dim / 2;
    for (row, values) in stored.chunks_exact(width).enumerate() {
        let (head, at) = (row / head_dim, row % head_dim);
        let target = head * head_dim + at % 2 * half + at / 2;
        out[target * width..][..width].copy_from_slice(values);
    }
}

/// Refuses weights that are not finite.
pub(crate) fn check_finite(
    path: &Path,
    entry: &ParamEntry,
    values: &[f32],
) -> Result<(), LoadError> {
    // A sum of absolute values is not finite when one of them is not; it overflows only for
    // weights that would overflow the model as well.
    let mut sums = values
        .chunks(1024)
        .map(|chunk| chunk.iter().map(|v| v.abs()).sum::<f32>());
    if sums.all(f32::is_finite) {
        return Ok(());
    }
    Err(LoadError::NotFinite {
        path: path.to_owned(),
        name: entry.name.clone(),
    })
}

/// Reads a text file of at most [`MAX_CONFIG_BYTES`].
pub(crate) fn read_text(path: &Path) -> Result<String, LoadError> {
    let failed = LoadError::io(path);
    let length = std::fs::metadata(path).map_err(failed)?.len();
    if length > MAX_CONFIG_BYTES {
        let text = format!("{length} bytes, the limit is {MAX_CONFIG_BYTES}");
        return Err(failed(io::Error::new(io::ErrorKind::InvalidData, text)));
    }
    std::fs::read_to_string(path).map_err(failed)
}

/// Reads `config.json`, and the end tokens of `generation_config.json` if that exists.
pub(crate) fn read_config(dir: &Path) -> Result<ModelConfig, LoadError> {
    let path = dir.join("config.json");
    let config = ModelConfig::from_json(&read_text(&path)?);
    let mut config = config.map_err(LoadError::config(&path))?;
    let path = dir.join("generation_config.json");
    if path.exists() {
        let added = config.add_generation_config(&read_text(&path)?);
        added.map_err(LoadError::config(&path))?;
    }
    config.checked().map_err(LoadError::config(&path))
}

/// Opens a directory and checks that its tensors are those of its configuration.
fn fitting_dir(dir: &Path) -> Result<(Safetensors, ModelConfig), LoadError> {
    let config = read_config(dir)?;
    let weights = Safetensors::open_dir(dir)?;
    let layout = ParamLayout::new(&config);
    let shapes = weights.shapes();
    let own = shapes.filter(|(name, _)| !is_redundant(&config, name));
    layout.compare(own).map_err(LoadError::mismatch(dir))?;
    Ok((weights, config))
}

fn load_dir(dir: &Path) -> Result<LoadedModel, LoadError> {
    let (weights, config) = fitting_dir(dir)?;
    let params = read_params(dir, &weights, &config)?;
    check_tied_head(dir, &weights, &params)?;
    Ok(LoadedModel { params, gguf: None })
}

/// Reads the tensors of a directory, whose shapes were compared.
pub(crate) fn read_params(
    dir: &Path,
    weights: &Safetensors,
    config: &ModelConfig,
) -> Result<Params, LoadError> {
    let mut params = Params::zeros(config);
    let layout = Arc::clone(params.layout());
    for entry in layout.entries() {
        let out = &mut params.values_mut()[entry.range()];
        weights.read_tensor(&entry.name, out)?;
        check_finite(dir, entry, out)?;
    }
    Ok(params)
}

/// Whether a tensor of an old checkpoint repeats something: rotary tables, and a copy of tied
/// embeddings.
fn is_redundant(config: &ModelConfig, name: &str) -> bool {
    name.ends_with(".rotary_emb.inv_freq") || (config.tied_embeddings && name == "lm_head.weight")
}

/// Checks that a copy of tied embeddings is equal to them.
fn check_tied_head(dir: &Path, weights: &Safetensors, params: &Params) -> Result<(), LoadError> {
    let embed = &params.values()[params.layout().embed.clone()];
    let Some(shape) = weights.shape("lm_head.weight") else {
        return Ok(());
    };
    if !params.config().tied_embeddings {
        return Ok(());
    }
    let same = shape == [params.config().vocab, params.config().d_model] && {
        let mut head = vec![0.0; embed.len()];
        weights.read_tensor("lm_head.weight", &mut head)?;
        head == embed
    };
    if same {
        Ok(())
    } else {
        Err(LoadError::TiedHead(dir.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unpermute_restores_halves() {
        // Two heads of four rows of width 1; the file holds 0, 2, 1, 3 for each head.
        let stored = [0.0, 2.0, 1.0, 3.0, 10.0, 12.0, 11.0, 13.0];
        let mut out = [0.0; 8];
        unpermute(&stored, &mut out, 2, 4);
        assert_eq!(out, [0.0, 1.0, 2.0, 3.0, 10.0, 11.0, 12.0, 13.0]);
    }
}
