//! Adapters as PEFT stores them: in a directory, and as tensors that others hold.

use super::{Lora, LoraConfig, Projection};
use crate::config::ModelConfig;
use crate::error::{LoadError, LoraError};
use crate::safetensors::Safetensors;
use crate::save::{SaveDtype, write_dir, write_file, write_tensors};
use sinew_types::Adapter;
use std::path::Path;
use std::sync::Arc;

const CONFIG: &str = "adapter_config.json";
const WEIGHTS: &str = "adapter_model.safetensors";
/// Allowed names of tensors.
const NAMES: &str = "is not the `lora_A.weight` or `lora_B.weight` of `base_model.model.lm_head` or of a \
    projection in `base_model.model.model.layers.N`: q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj";

impl LoraConfig {
    /// Reads the `adapter_config.json` of a directory.
    ///
    /// # Errors
    /// If it is missing, or [`LoraConfig::from_json`] refuses it.
    pub fn load(dir: &Path) -> Result<Self, LoadError> {
        let path = dir.join(CONFIG);
        let text = std::fs::read_to_string(&path).map_err(LoadError::io(&path))?;
        Self::from_json(&text).map_err(|error| LoadError::Adapter {
            path: dir.to_owned(),
            error,
        })
    }
}

impl Lora {
    /// Reads a directory as PEFT (or [`Lora::save`]) writes it, for the decoder `model`.
    ///
    /// # Errors
    /// If a file is missing or damaged, or its tensors are not those of its configuration and of
    /// `model`.
    pub fn load(dir: &Path, model: &ModelConfig) -> Result<Self, LoadError> {
        let failed = |error| LoadError::Adapter {
            path: dir.to_owned(),
            error,
        };
        let config = LoraConfig::load(dir)?;
        let mut lora = Self::zeros(&config, model).map_err(failed)?;
        let weights = Safetensors::open_file(&dir.join(WEIGHTS))?;
        refuse_base_weights(weights.shapes().map(|(name, _)| name)).map_err(failed)?;
        let layout = Arc::clone(&lora.layout);
        let fits = layout.table.compare(weights.shapes());
        fits.map_err(LoadError::mismatch(dir))?;
        for (entry, values) in layout.table.split_mut(&mut lora.values) {
            weights.read_tensor(&entry.name, values)?;
        }
        Ok(lora)
    }

    /// Writes `adapter_model.safetensors` and `adapter_config.json` into `dir`, which must not
    /// exist or be empty; it appears complete or not at all.
    pub fn save(&self, dir: &Path, base_model: &str) -> Result<(), LoadError> {
        write_dir(dir, |staging| {
            write_tensors(&staging.join(WEIGHTS), self, SaveDtype::F32)?;
            let config = self.config.to_json(base_model);
            write_file(&staging.join(CONFIG), config.as_bytes())
        })
    }

    /// A copy for an engine: alpha, and the tensors under the names of PEFT.
    pub fn to_adapter(&self) -> Adapter {
        Adapter {
            alpha: self.config.alpha,
            tensors: Arc::new(self.clone()),
        }
    }

    /// Copies the adapters of an engine's caller, for the decoder `model`. Rank and targets follow from names
    /// and shapes.
    ///
    /// # Errors
    /// If there is no tensor, a name is not one of PEFT's for a projection, tensors are missing or of another
    /// shape, a value is not finite, or rank or alpha are refused.
    pub fn from_adapter(adapter: &Adapter, model: &ModelConfig) -> Result<Self, LoraError> {
        let source = &*adapter.tensors;
        let names = source.names();
        refuse_base_weights(names.iter().map(String::as_str))?;
        let (mut rank, mut targets) = (None, Vec::new());
        for name in &names {
            let (projection, is_a) = parse(name).ok_or_else(|| LoraError::Tensor {
                name: name.clone(),
                reason: NAMES,
            })?;
            if !targets.contains(&projection) {
                targets.push(projection);
            }
            let inner = usize::from(!is_a);
            let found = source
                .info(name)
                .and_then(|info| info.shape.get(inner).copied());
            rank = rank.or(found);
        }
        if targets.is_empty() {
            return Err(LoraError::NoTarget);
        }
        targets.sort_unstable();
        let config = LoraConfig {
            rank: rank.unwrap_or(0),
            alpha: adapter.alpha,
            targets,
        };
        let mut lora = Self::zeros(&config, model)?;
        lora.copy_from(source)?;
        let layout = Arc::clone(&lora.layout);
        let finite = |values: &[f32]| values.iter().all(|v| v.is_finite());
        let mut entries = layout.table.entries().iter();
        match entries.find(|entry| !finite(&lora.values[entry.range()])) {
            None => Ok(lora),
            Some(entry) => Err(LoraError::Tensor {
                name: entry.name.clone(),
                reason: "holds a value that is not finite",
            }),
        }
    }
}

/// The projection of a tensor's name, and whether it is an A.
fn parse(name: &str) -> Option<(Projection, bool)> {
    let (module, part) = name
        .strip_prefix("base_model.model.")?
        .split_once(".lora_")?;
    let is_a = match part {
        "A.weight" => true,
        "B.weight" => false,
        _ => return None,
    };
    let projection = Projection::parse(module.rsplit('.').next()?).ok()?;
    let layer = module
        .strip_prefix("model.layers.")
        .map_or(Some(0), |rest| {
            let (layer, _) = rest.split_once('.')?;
            layer.parse().ok()
        })?;
    (projection.module(layer) == module).then_some((projection, is_a))
}

/// Refuses tensors that PEFT copies from the base: they could differ from its weights, which stay as they
/// are.
fn refuse_base_weights<'a>(mut names: impl Iterator<Item = &'a str>) -> Result<(), LoraError> {
    let is_copy = |name: &str| name.contains(".base_layer.") || name.contains("embed_tokens");
    match names.find(|name| is_copy(name)) {
        None => Ok(()),
        Some(name) => Err(LoraError::Tensor {
            name: name.to_owned(),
            reason: "is a weight of the base: save the adapter with `save_embedding_layers=False`",
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_tensors_are_taken_apart() {
        for (projection, layer) in Projection::ALL.into_iter().zip([0, 1, 12, 3, 4, 5, 6, 7]) {
            for (part, is_a) in [("A", true), ("B", false)] {
                let name = super::super::tensor_name(projection, layer, part);
                assert_eq!(parse(&name), Some((projection, is_a)), "{name}");
            }
        }
        for name in [
            "",
            "lm_head.lora_A.weight",
            "base_model.model.lm_head.lora_C.weight",
            "base_model.model.lm_head.lora_A.default.weight",
            "base_model.model.model.layers.0.lm_head.lora_A.weight",
            "base_model.model.model.layers.00.self_attn.q_proj.lora_A.weight",
            "base_model.model.model.layers.x.self_attn.q_proj.lora_A.weight",
            "base_model.model.model.layers.0.mlp.q_proj.lora_A.weight",
            "base_model.model.q_proj.lora_A.weight",
        ] {
            assert_eq!(parse(name), None, "{name}");
        }
    }
}
