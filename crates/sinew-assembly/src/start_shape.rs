//! The shape of a model that a run begins with, for every trainer and engine.

use crate::failure::Failure;
use serde_json::Value;
use sinew_model::{ModelConfig, ModelFiles, load_config};
use std::path::Path;

/// Shape of a model, as far as every trainer and engine needs it.
#[derive(Clone, Debug)]
pub(crate) struct StartShape {
    /// Number of tokens.
    pub(crate) vocab: usize,
    /// Maximum number of positions.
    pub(crate) context: usize,
    /// Width of the hidden states.
    pub(crate) hidden: usize,
    /// Family, layers and width in words.
    pub(crate) words: String,
    /// The shape for an engine of this process, or the reason why it has none.
    config: Result<ModelConfig, String>,
}

impl StartShape {
    pub(crate) fn of(config: ModelConfig) -> Self {
        Self {
            vocab: config.vocab,
            context: config.max_context,
            hidden: config.d_model,
            words: format!(
                "model {:?}, {} layers of {}",
                config.family, config.layers, config.d_model
            ),
            config: Ok(config),
        }
    }

    /// Reads `config.json` of any family. A model of several parts has those of its text in `text_config`.
    pub(crate) fn of_folder(folder: &Path) -> Result<Self, Failure> {
        let why = match load_config(&ModelFiles::Dir(folder.to_owned())) {
            Ok(config) => return Ok(Self::of(config)),
            Err(e) => e.to_string(),
        };
        let path = folder.join("config.json");
        let failed = |e: &dyn std::fmt::Display| Failure::input(format!("{}: {e}", path.display()));
        let bytes = std::fs::read(&path).map_err(|e| failed(&e))?;
        let whole: Value = serde_json::from_slice(&bytes).map_err(|e| failed(&e))?;
        let text = whole.get("text_config").unwrap_or(&whole);
        let size = |key: &str| {
            let value = text[key].as_u64().filter(|&n| n > 0);
            value.ok_or_else(|| failed(&format!("{key} is missing")))
        };
        let (vocab, hidden) = (size("vocab_size")?, size("hidden_size")?);
        let layers = size("num_hidden_layers")?;
        let family = whole["model_type"].as_str().unwrap_or("of no known type");
        Ok(Self {
            vocab: vocab as usize,
            // Models without a table of positions have no limit of their own.
            context: size("max_position_embeddings").map_or(usize::MAX, |n| n as usize),
            hidden: hidden as usize,
            words: format!("model {family}, {layers} layers of {hidden}"),
            config: Err(why),
        })
    }

    /// The shape for an engine of this process.
    ///
    /// # Errors
    /// If such an engine does not know the family.
    pub(crate) fn config(&self) -> Result<&ModelConfig, Failure> {
        self.config.as_ref().map_err(|why| {
            Failure::input(format!(
                "engine.type = \"embedded\": {why}\n  hint: engine.type = \"vllm\" or \"sglang\" runs this model"
            ))
        })
    }
}
