//! Errors of files: models and adapters that cannot be read, do not fit, or cannot be written.

use crate::config::ConfigError;
use crate::gguf::GgufError;
use crate::params::TensorMismatch;
use crate::safetensors::SafetensorsError;
use std::io;
use std::path::PathBuf;

/// Reasons for which a model could not be loaded or saved.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    #[error("{}: {error}", path.display())]
    Gguf { path: PathBuf, error: GgufError },
    #[error(transparent)]
    Safetensors(#[from] SafetensorsError),
    /// The configuration is not usable.
    #[error("{}: {error}", path.display())]
    Config { path: PathBuf, error: ConfigError },
    /// The file's tensors are not those of its configuration.
    #[error("{}: {error}", path.display())]
    Mismatch {
        path: PathBuf,
        error: TensorMismatch,
    },
    /// A weight is infinite or not a number.
    #[error("{}: tensor `{name}` holds a value that is not finite", path.display())]
    NotFinite { path: PathBuf, name: String },
    /// The configuration ties output projection and embeddings, but the file has two different
    /// ones.
    #[error(
        "{}: `lm_head.weight` differs from the embeddings, but config.json ties the two: set tie_word_embeddings to false or remove the tensor", .0.display()
    )]
    TiedHead(PathBuf),
    #[error("{}: {error}", path.display())]
    Io { path: PathBuf, error: io::Error },
    /// The target cannot be written as asked.
    #[error("{}: {reason}", path.display())]
    Save { path: PathBuf, reason: String },
    /// The files hold no reward model.
    #[error("{}: {reason}", path.display())]
    Scorer { path: PathBuf, reason: String },
    /// An adapter's configuration is not usable.
    #[error("{}: {error}", path.display())]
    Adapter { path: PathBuf, error: LoraError },
}

/// Reasons for which adapters are not usable.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum LoraError {
    /// A name that is not a projection.
    #[error(
        "LoRA target `{0}` is unknown: use q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj"
    )]
    Target(String),
    /// No projection at all.
    #[error("LoRA has no target: name at least one projection")]
    NoTarget,
    /// A projection that is named twice.
    #[error("LoRA target `{0}` is named twice")]
    Twice(&'static str),
    /// A rank outside 1 to 1024.
    #[error("LoRA rank is {0}, expected 1 to 1024")]
    Rank(usize),
    /// An alpha that is not above 0 and finite.
    #[error("LoRA alpha is {0}, expected a number above 0")]
    Alpha(f32),
    /// An `adapter_config.json` that cannot be read, or that asks for another kind of adapter.
    #[error("adapter_config.json: {0}")]
    Config(String),
}
