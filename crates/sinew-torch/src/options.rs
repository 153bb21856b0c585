//! Settings of a torch policy.

use crate::error::TorchError;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Number type. Masters and moments are always f32.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TorchDtype {
    /// 32 bits.
    #[default]
    F32,
    /// The upper 16 bits of an `f32`.
    Bf16,
}

/// The attention of the ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Attention {
    /// Flex on GPUs, SDPA on CPUs.
    #[default]
    Auto,
    /// FlexAttention: memory linear in the length of a lane.
    Flex,
    /// Scaled dot-product attention with a mask: memory quadratic in the length of a lane.
    Sdpa,
    /// Plain products and softmax, for comparisons.
    Eager,
}

/// Whether shared prefixes are computed once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Sharing {
    /// Once, where the model's attention allows it.
    #[default]
    Auto,
    /// Once for each row, which works with every model.
    Flat,
}

/// Activations that are computed again in the backward pass.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Checkpointing {
    /// None: fastest, most memory.
    None,
    /// Those of every layer but its input.
    #[default]
    Full,
    /// As `full`, with the inputs in host memory.
    Offload,
}

/// Location of weights, gradients and moments.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Residence {
    /// Memory of the ranks' devices.
    Device,
    /// Memory of the host, while engines use the devices. Nothing is computed.
    Host,
}

/// Adapters that are trained instead of the weights.
#[derive(Clone, Debug, PartialEq)]
pub struct LoraOptions {
    /// Inner width, at least 1.
    pub rank: u32,
    /// The output is scaled by `alpha / rank`.
    pub alpha: f32,
    /// Names of modules, such as `q_proj`; empty: all linear layers but the output matrix.
    pub targets: Vec<String>,
    /// Seed of the random factor.
    pub seed: u64,
    /// Name of the base model in the configuration of saved adapters; `None`: the path of the model.
    pub base_name: Option<String>,
}

/// A critic on the policy's trunk.
#[derive(Clone, Debug, PartialEq)]
pub struct CriticOptions {
    /// Its first weights `[hidden + 1]`, the last one is the bias.
    pub head: Vec<f32>,
    /// Factor on the policy's learning rate.
    pub lr_scale: f32,
}

/// Request to load a model into the ranks.
#[derive(Clone, Debug, PartialEq)]
pub struct OpenOptions {
    /// Folder in the Hugging Face layout: `config.json` and safetensors files. All ranks see it under the
    /// same path.
    pub model: PathBuf,
    /// Number type of the computation.
    pub dtype: TorchDtype,
    /// Attention of the ranks.
    pub attention: Attention,
    /// Whether shared prefixes are computed once.
    pub sharing: Sharing,
    /// Activations that are computed again.
    pub checkpointing: Checkpointing,
    /// Tokens of the longest micro-batch.
    pub max_tokens: u32,
    /// Items whose logits are in memory at once; `None`: the server chooses.
    pub head_chunk: Option<u32>,
    /// Whether torch must use deterministic kernels.
    pub deterministic: bool,
    /// Seed of the ranks' random states.
    pub seed: u64,
    /// Whether tokens are computed by the experts of [`TrainRow::routes`](sinew_types::TrainRow), where they
    /// are recorded and the model's routers allow it.
    pub replay_routes: bool,
    /// Coefficient of the load-balancing loss of the model's routers; 0: it is not computed.
    pub router_loss: f32,
    /// Adapters; `None`: all weights are trained.
    pub lora: Option<LoraOptions>,
    /// Critic; `None`: there are no values.
    pub critic: Option<CriticOptions>,
    /// Folders of whole other models that only score, by name (`reference`, `teacher`).
    pub frozen: BTreeMap<String, PathBuf>,
}

impl OpenOptions {
    /// Trains all weights of `model` in f32 with micro-batches of at most `max_tokens` tokens.
    pub fn new(model: impl Into<PathBuf>, max_tokens: u32) -> Self {
        Self {
            model: model.into(),
            dtype: TorchDtype::default(),
            attention: Attention::default(),
            sharing: Sharing::default(),
            checkpointing: Checkpointing::default(),
            max_tokens,
            head_chunk: None,
            deterministic: false,
            seed: 0,
            replay_routes: true,
            router_loss: 0.0,
            lora: None,
            critic: None,
            frozen: BTreeMap::new(),
        }
    }
}

/// A path as the ranks see it: their working directory is another one.
///
/// # Errors
/// If it is not Unicode.
pub(crate) fn absolute(path: &Path) -> Result<String, TorchError> {
    let whole = std::path::absolute(path).map_err(TorchError::io("find", path))?;
    let text = whole.into_os_string().into_string();
    text.map_err(|path| {
        let path = path.to_string_lossy();
        TorchError::Setup(format!("the path {path} is not Unicode"))
    })
}

/// The form of published weights.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PublishForm {
    /// All weights; adapters are merged.
    #[default]
    Full,
    /// Only the adapters.
    Adapter,
}

/// Settings of published weights.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PublishOptions {
    /// Folder in which each version gets a temporary folder `.v00000012.trainer`. All ranks and this process
    /// see it under the same path.
    pub root: PathBuf,
    /// Form of the weights.
    pub form: PublishForm,
    /// Number type of the files.
    pub dtype: TorchDtype,
    /// Whether a model with tied embeddings also gets its output matrix as a tensor.
    pub untied: bool,
}

impl PublishOptions {
    /// All weights in f32 below `root`.
    pub fn new(root: impl Into<PathBuf>) -> Self {
        Self {
            root: root.into(),
            form: PublishForm::default(),
            dtype: TorchDtype::default(),
            untied: false,
        }
    }
}

/// Limits of time for the calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Deadlines {
    /// Loading of models. Default: 30 minutes.
    pub open: Duration,
    /// Passes and updates. It should be longer than the limit of a collective
    /// ([`RankOptions::collective`](crate::RankOptions::collective)), so that the ranks report first.
    /// Default: 15 minutes.
    pub compute: Duration,
    /// Writing and reading of checkpoints and weights. Default: 30 minutes.
    pub files: Duration,
    /// All other calls. Default: 2 minutes.
    pub other: Duration,
}

impl Default for Deadlines {
    fn default() -> Self {
        let minutes = |n: u64| Duration::from_secs(60 * n);
        Self {
            open: minutes(30),
            compute: minutes(15),
            files: minutes(30),
            other: minutes(2),
        }
    }
}

/// The whole setup of a policy.
#[derive(Clone, Debug, PartialEq)]
pub struct TorchSetup {
    /// The model and how it is trained.
    pub open: OpenOptions,
    /// Weights for engines.
    pub publish: PublishOptions,
    /// Generation of the owner: the server refuses owners with a lower one.
    pub fence: u64,
    /// Limits of time.
    pub deadlines: Deadlines,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(value: &impl Serialize) -> String {
        serde_json::to_string(value).unwrap()
    }

    #[test]
    fn options_have_the_names_of_the_protocol() {
        assert_eq!(text(&Attention::Sdpa), "\"sdpa\"");
        assert_eq!(text(&TorchDtype::Bf16), "\"bf16\"");
        assert_eq!(text(&Checkpointing::Offload), "\"offload\"");
        assert_eq!(text(&Sharing::Flat), "\"flat\"");
        assert_eq!(text(&PublishForm::Adapter), "\"adapter\"");
        assert_eq!(text(&Residence::Host), "\"host\"");
    }

    #[test]
    fn paths_of_requests_are_absolute() {
        let path = absolute(Path::new("models/tiny")).unwrap();
        assert!(path.starts_with('/') && path.ends_with("models/tiny"));
    }
}
