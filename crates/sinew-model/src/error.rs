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

/// Reasons for which the files of a repository cannot be brought into the cache, or chosen.
#[derive(Debug, thiserror::Error)]
pub enum HubError {
    #[error("{}: {error}", path.display())]
    File { path: PathBuf, error: io::Error },
    #[error("{}: more than {limit} bytes", path.display())]
    LargeFile { path: PathBuf, limit: u64 },
    #[error("writing the cache: {0}")]
    Cache(#[from] io::Error),
    /// The HTTP client cannot be made, with its reason.
    #[error("{0}")]
    Client(String),
    /// The request failed, or the answer breaks off; the reason is that of the HTTP client.
    #[error("{url}: {reason}")]
    Request { url: String, reason: String },
    #[error("{url} answers {status}{hint}")]
    Status {
        url: String,
        status: u16,
        /// What may be wrong, and what helps.
        hint: &'static str,
    },
    #[error("{url}: more than {limit} bytes")]
    LargeAnswer { url: String, limit: u64 },
    #[error("{url}: more than the {limit} bytes announced")]
    Announced { url: String, limit: u64 },
    #[error("{url}: {found} of {size} bytes")]
    Short { url: String, found: u64, size: u64 },
    #[error("{url}: larger than {limit} bytes")]
    LargeRemote { url: String, limit: u64 },
    #[error("{url}: more than {limit} redirects")]
    Redirects { url: String, limit: usize },
    #[error("{url}: tag `{tag}` does not identify a file")]
    Tag { url: String, tag: String },
    #[error("{url}: {error}")]
    Json {
        url: String,
        error: serde_json::Error,
    },
    #[error("{url}: `{sha}` is no commit")]
    Commit { url: String, sha: String },
    #[error("{url}: {error}")]
    Read { url: String, error: io::Error },
    #[error("{url}: content has SHA-256 {found}, expected {expected}")]
    Digest {
        url: String,
        found: String,
        expected: String,
    },
    #[error("no attempt was made")]
    NoAttempt,
    #[error("{name}: {bytes} bytes; allowed: up to {limit}")]
    Limit {
        name: String,
        bytes: u64,
        limit: u64,
    },
    #[error("the repository has no config.json")]
    NoConfig,
    #[error("the repository has neither `{0}` nor `{1}`")]
    NoWeights(&'static str, &'static str),
    #[error(transparent)]
    Index(#[from] SafetensorsError),
    #[error(
        "its files have {bytes} bytes; allowed: up to {limit}. Take a configuration, or a data set of its own \
         with the rows that are needed"
    )]
    LargeDataset { bytes: u64, limit: u64 },
    /// The note of a data set's files cannot be encoded.
    #[error(transparent)]
    Note(serde_json::Error),
    #[error("the YAML at the top of README.md: {0}")]
    Readme(String),
    #[error("dataset_infos.json: {0}")]
    Infos(serde_json::Error),
    #[error("more than {0} configurations or patterns")]
    Entries(usize),
    /// The endings of files of rows.
    #[error("the data set has no files that end in {0}")]
    NoRows(String),
    #[error("the configuration `{0}` has no files of rows")]
    EmptyConfig(String),
    #[error(
        "{count} files of rows; allowed: up to {limit}. Name a configuration, or convert the data set to \
         fewer files"
    )]
    Files { count: usize, limit: usize },
    #[error("no configuration `{wanted}`; allowed: {names}")]
    NoSuchConfig { wanted: String, names: String },
    #[error(
        "the data set has {count} configurations: {names}; name one as hf:ORG/NAME/CONFIGURATION"
    )]
    SeveralConfigs { count: usize, names: String },
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
