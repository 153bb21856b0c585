//! Errors of files: models and adapters that cannot be read, do not fit, or cannot be written, and
//! repositories of the hub that cannot be brought into the cache.

use crate::config::ConfigError;
use crate::gguf::GgufError;
use crate::params::TensorMismatch;
use crate::safetensors::SafetensorsError;
use std::io;
use std::path::{Path, PathBuf};

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

impl LoadError {
    /// Adds its path to the error of a GGUF.
    pub(crate) fn gguf(path: &Path) -> impl Fn(GgufError) -> Self + Copy {
        move |error| Self::Gguf {
            path: path.to_owned(),
            error,
        }
    }

    /// Adds its path to the error of a configuration.
    pub(crate) fn config(path: &Path) -> impl Fn(ConfigError) -> Self + Copy {
        move |error| Self::Config {
            path: path.to_owned(),
            error,
        }
    }

    /// Adds their path to the error of tensors.
    pub(crate) fn mismatch(path: &Path) -> impl Fn(TensorMismatch) -> Self + Copy {
        move |error| Self::Mismatch {
            path: path.to_owned(),
            error,
        }
    }

    /// Adds its path to the error of a file or folder.
    pub(crate) fn io(path: &Path) -> impl Fn(io::Error) -> Self + Copy {
        move |error| Self::Io {
            path: path.to_owned(),
            error,
        }
    }
}

/// Reasons for which adapters are not usable.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum LoraError {
    /// A name that is not a projection.
    #[error(
        "LoRA target `{0}` is unknown: use q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj, \
         lm_head"
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
    /// A tensor that is not a part of adapters, or whose values are not usable.
    #[error("adapter: `{name}` {reason}")]
    Tensor { name: String, reason: &'static str },
    /// Tensors that are not those of the adapters' rank and targets on the decoder.
    #[error("adapter: {0}")]
    Tensors(#[from] TensorMismatch),
}

/// Reasons for which the files of a repository cannot be brought into the cache, or chosen.
#[derive(Debug, thiserror::Error)]
pub enum HubError {
    #[error("{}: {error}", path.display())]
    File { path: PathBuf, error: io::Error },
    #[error("{}: more than {limit} bytes", path.display())]
    LargeFile { path: PathBuf, limit: u64 },
    /// A request failed, or its answer cannot be used; with the address.
    #[error("{0}")]
    Request(String),
    /// Files of the repository are missing, too many or too large, or belong to several configurations.
    #[error("{0}")]
    Repository(String),
    /// The index of the files of weights cannot be read.
    #[error(transparent)]
    Index(#[from] SafetensorsError),
    /// The note of a data set's files cannot be encoded.
    #[error(transparent)]
    Note(serde_json::Error),
    /// The download failed, and the cache has a copy.
    #[error("{0} (HF_HUB_OFFLINE=1 uses the copy in the cache)")]
    Cached(Box<HubError>),
    #[error(
        "this build has no `hub` feature: put the files into the cache with `hf download` ({})",
        .0.display()
    )]
    NoFeature(PathBuf),
}

impl HubError {
    /// Adds its path to the error of a file.
    pub(crate) fn file(path: &Path) -> impl Fn(io::Error) -> Self + Copy {
        move |error| Self::File {
            path: path.to_owned(),
            error,
        }
    }
}
