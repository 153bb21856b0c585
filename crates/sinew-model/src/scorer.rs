//! Reward models: a decoder with one linear output in place of a vocabulary.
//!
//! The layout is that of sequence classification in `transformers` (`LlamaForSequenceClassification` and the
//! same of Qwen2 and Qwen3): the decoder under `model.`, and the head `score.weight` `[1, d]`. The score of a
//! sequence is the head's output at its last token.

use crate::config::ModelConfig;
use crate::decoder::ForwardError;
use crate::error::LoadError;
use crate::load::{check_finite, read_config, read_params};
use crate::lookup::ModelFiles;
use crate::params::{ParamEntry, ParamLayout, Params};
use crate::safetensors::Safetensors;
use crate::train::{Activations, Keep, TrainModel, ValueHead, Weights};
use sinew_tensor::Cpu;
use sinew_tensor::attention::TreeLayout;
use sinew_types::TokenId;
use std::path::Path;

/// Name of the head.
const HEAD: &str = "score.weight";

/// A reward model with the memory of its passes.
#[derive(Debug)]
pub struct Scorer {
    model: TrainModel,
    params: Params,
    head: ValueHead,
    acts: Activations,
}

/// The folder, opened: its weights, and the shape of the decoder.
fn open(files: &ModelFiles) -> Result<(&Path, Safetensors, ModelConfig), LoadError> {
    let refused = |path: &Path, reason: &str| LoadError::Scorer {
        path: path.to_owned(),
        reason: reason.to_owned(),
    };
    let dir = match files {
        ModelFiles::Dir(dir) => dir,
        ModelFiles::Gguf(path) => {
            let why = "a GGUF file has no scalar head; use a folder with safetensors";
            return Err(refused(path, why));
        }
    };
    let mut config = read_config(dir)?;
    // There is no output projection: the layout without one is that of tied embeddings.
    config.tied_embeddings = true;
    let weights = Safetensors::open_dir(dir)?;
    let expected = [1, config.d_model];
    match weights.shape(HEAD) {
        Some(shape) if shape == expected => {}
        Some([labels, d]) if *d == config.d_model => {
            let why = format!("`{HEAD}` has {labels} labels; a reward model has one");
            return Err(refused(dir, &why));
        }
        Some(shape) => {
            let why = format!("`{HEAD}` has the shape {shape:?}, expected {expected:?}");
            return Err(refused(dir, &why));
        }
        None => {
            let kind = match weights.shape("lm_head.weight") {
                Some(_) => "it is a language model",
                None => "it has no head",
            };
            let why = format!(
                "there is no `{HEAD}`: {kind}; a reward model is saved by a class such as \
                 LlamaForSequenceClassification with num_labels = 1"
            );
            return Err(refused(dir, &why));
        }
    }
    let own = |name: &str| name != HEAD && !name.ends_with(".rotary_emb.inv_freq");
    let shapes = weights.shapes().filter(|(name, _)| own(name));
    let fits = ParamLayout::new(&config).compare(shapes);
    fits.map_err(LoadError::mismatch(dir))?;
    Ok((dir, weights, config))
}

/// Reads the configuration of a reward model and compares the headers of its weights with it.
///
/// # Errors
/// Same as of [`Scorer::load`], except for values.
pub fn check_scorer(files: &ModelFiles) -> Result<ModelConfig, LoadError> {
    open(files).map(|(_, _, config)| config)
}

impl Scorer {
    /// Reads a reward model.
    ///
    /// # Errors
    /// If there is no head of one output, or the weights do not fit their configuration or are not finite.
    pub fn load(files: &ModelFiles) -> Result<Self, LoadError> {
        let (dir, weights, config) = open(files)?;
        let params = read_params(dir, &weights, &config)?;
        let d = config.d_model;
        let mut head = ValueHead::zeros(d);
        let row = &mut head.values_mut()[..d];
        weights.read_tensor(HEAD, row)?;
        let entry = ParamEntry {
            name: HEAD.to_owned(),
            shape: vec![1, d],
            offset: 0,
        };
        check_finite(dir, &entry, row)?;
        let model = TrainModel::new(&config, config.max_context);
        Ok(Self {
            model: model.map_err(LoadError::config(dir))?,
            params,
            head,
            acts: Activations::new(Keep::Nothing),
        })
    }

    /// Shape and constants of the decoder.
    pub fn config(&self) -> &ModelConfig {
        self.model.config()
    }

    /// Scores of sequences, none of them empty, in one pass. A score does not depend on the other sequences.
    ///
    /// # Errors
    /// If a sequence is empty or longer than the model's context, or a token does not exist.
    pub fn scores(
        &mut self,
        dev: &Cpu,
        sequences: &[Vec<TokenId>],
    ) -> Result<Vec<f32>, ForwardError> {
        if sequences.is_empty() {
            return Ok(Vec::new());
        }
        if sequences.iter().any(Vec::is_empty) {
            return Err(ForwardError::State("a sequence has no tokens"));
        }
        let lens: Vec<u32> = sequences.iter().map(|s| s.len() as u32).collect();
        let layout = TreeLayout::sequences(&lens);
        let layout = layout.map_err(|_| ForwardError::State("the sequences are too long"))?;
        let mut end = 0;
        let last = lens.iter().map(|len| {
            end += len;
            end - 1
        });
        let last: Vec<u32> = last.collect();
        let tokens = sequences.concat();
        let (model, weights) = (&self.model, Weights::full(&self.params));
        model.forward_for(dev, weights, &tokens, &layout, &last, &mut self.acts)?;
        let mut scores = vec![0.0; sequences.len()];
        model.values(dev, weights, &mut self.acts, &self.head, &last, &mut scores)?;
        Ok(scores)
    }
}
