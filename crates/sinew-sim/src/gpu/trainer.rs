//! Bytes of one rank of the trainer.

use super::amount;
use serde::{Deserialize, Serialize};
use sinew_model::ModelShape;
use std::fmt;

/// CUDA context, kernels and workspaces of a process. An estimate; not measured here.
const CONTEXT: u128 = 1_000_000_000;
/// Buffers of NCCL, if there are several ranks. An estimate; not measured here.
const NCCL: u128 = 500_000_000;
/// Resident memory of a process on a CPU after it imported torch 2.15, transformers 5.23 and peft 0.21:
/// measured 0.76 GB.
const IMPORTS: u128 = 760_000_000;
/// Bytes of a chunk of logits in f32, as the trainer chooses it: on GPUs and on CPUs.
const CHUNK: [u128; 2] = [1 << 30, 64 << 20];
/// Most rows of such a chunk.
const CHUNK_ROWS: u128 = 4096;
/// Bound of every figure, so that sums do not overflow.
const MOST: u128 = 1 << 100;

/// Number type of the computation. Masters, gradients and moments of what is trained are f32 in any case.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ComputeType {
    F32,
    #[default]
    Bf16,
}

impl ComputeType {
    /// Bytes of a number.
    fn bytes(self) -> u128 {
        match self {
            Self::F32 => 4,
            Self::Bf16 => 2,
        }
    }
}

/// Activations that are computed again in the backward pass.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Checkpointing {
    /// All but the inputs of layers.
    #[default]
    Full,
    None,
    /// As `Full`, with the inputs in host memory.
    Offload,
}

impl Checkpointing {
    /// The name in recipes.
    pub fn name(self) -> &'static str {
        match self {
            Self::Full => "full",
            Self::None => "none",
            Self::Offload => "offload",
        }
    }
}

/// Memory of the implementation of attention.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AttentionMemory {
    /// FlexAttention and flash kernels: nothing that grows with the square of the tokens.
    #[default]
    Linear,
    /// SDPA with a mask: `b T^2` once.
    Mask,
    /// Eager attention: scores and probabilities of each head, `(4 + 2 b) heads T^2`, kept in each layer that
    /// is not computed again.
    Scores,
}

/// LoRA adapters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Adapters {
    /// Inner width.
    pub rank: u64,
    /// Names of the layers; empty: all linear layers but the output matrix.
    pub targets: Vec<String>,
}

/// Everything about a trainer that decides its memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TrainerSetup {
    /// The trained model.
    pub model: ModelShape,
    /// Other models in the same ranks that only score: reference and teacher.
    pub frozen: Vec<ModelShape>,
    /// Processes over which states are sharded, 1 or more.
    pub ranks: u64,
    /// Whether they compute on GPUs.
    pub cuda: bool,
    pub dtype: ComputeType,
    pub checkpointing: Checkpointing,
    pub attention: AttentionMemory,
    /// Packed tokens of a micro-batch, at most.
    pub micro_batch_tokens: u64,
    /// The least that `micro_batch_tokens` may be: the longest episode.
    pub least_tokens: u64,
    /// `None`: all weights are trained.
    pub adapters: Option<Adapters>,
}

/// Bytes of one rank at the peak of an update.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct TrainerBytes {
    /// f32 masters of what is trained, `4 A / R`; with adapters also the frozen base in the compute type,
    /// `b N / R`.
    pub weights: u64,
    /// f32, `4 A / R`.
    pub gradients: u64,
    /// AdamW's two moments in f32, `8 A / R`.
    pub moments: u64,
    /// Reference and teacher in the compute type, `b N / R` each.
    pub frozen: u64,
    /// FSDP2's whole parameters in the compute type: embedding and output matrix during the whole pass, and
    /// two layers, `b (root + 2 layer)`. None in one rank with f32, which is not sharded.
    pub gathered: u64,
    /// Inputs of layers, `b L T d` (`full`), or all that layers keep (`none`), or two inputs (`offload`), and
    /// with `full` and `offload` one layer that is computed again.
    pub activations: u64,
    /// Working memory above the activations at the worst moment: the head (three chunks of logits in f32, and
    /// the f32 gradient of the output matrix twice), a layer's gradients and their reduction, or those of
    /// embedding and output matrix, `(b + 4) root`.
    pub working: u64,
    /// CUDA context and NCCL, or the imports of a process on a CPU.
    pub process: u64,
}

impl TrainerBytes {
    /// All together.
    pub fn total(&self) -> u64 {
        let parts = [
            self.states(),
            self.gathered,
            self.activations,
            self.working,
            self.process,
        ];
        parts.into_iter().fold(0, u64::saturating_add)
    }

    /// The part that stays between updates, and moves to the host if trainer and engine take turns.
    pub fn states(&self) -> u64 {
        let parts = [self.weights, self.gradients, self.moments, self.frozen];
        parts.into_iter().fold(0, u64::saturating_add)
    }
}

impl fmt::Display for TrainerBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let parts = [
            ("weights", self.weights),
            ("gradients", self.gradients),
            ("moments", self.moments),
            ("reference and teacher", self.frozen),
            ("gathered layers", self.gathered),
            ("activations", self.activations),
            ("head and reduction", self.working),
            ("process", self.process),
        ];
        let shown = parts.iter().filter(|(_, bytes)| *bytes > 0);
        let shown: Vec<String> = shown
            .map(|(name, bytes)| format!("{name} {}", amount(*bytes)))
            .collect();
        f.write_str(&shown.join(", "))
    }
}

/// A figure as it is reported.
fn narrow(bytes: u128) -> u64 {
    u64::try_from(bytes).unwrap_or(u64::MAX)
}

impl TrainerSetup {
    /// Bytes of one rank.
    pub fn bytes(&self) -> TrainerBytes {
        let (b, ranks) = (self.dtype.bytes(), u128::from(self.ranks.max(1)));
        let all = u128::from(self.model.parameters);
        let trained = self.trained();
        // Masters of encoders are never trained, and so in the compute type.
        let base = all - trained.min(all);
        let base = match self.adapters {
            Some(_) => all,
            None => base,
        };
        let frozen: u128 = self.frozen.iter().map(|m| u128::from(m.parameters)).sum();
        let (kept, again) = (self.kept(), self.recomputed());
        let activations = kept + again;
        let moments = [
            kept + self.head(),
            activations + self.layer_gradients(),
            self.root_gradients(),
        ];
        let peak = moments.into_iter().max().unwrap_or(0);
        TrainerBytes {
            weights: narrow((4 * trained + b * base).div_ceil(ranks)),
            gradients: narrow((4 * trained).div_ceil(ranks)),
            moments: narrow((8 * trained).div_ceil(ranks)),
            frozen: narrow((b * frozen).div_ceil(ranks)),
            gathered: narrow(self.gathered()),
            activations: narrow(activations),
            working: narrow(peak.saturating_sub(activations)),
            process: narrow(self.process()),
        }
    }

    /// Number of trained parameters, `A`.
    pub fn trained(&self) -> u128 {
        match &self.adapters {
            Some(a) => u128::from(self.model.adapter_parameters(a.rank, &a.targets)),
            None => {
                u128::from(self.model.parameters - self.model.encoders.min(self.model.parameters))
            }
        }
    }

    /// Bytes on the host for ranks on GPUs: their processes, and the f32 copy from which rank 0 fills the
    /// others while the model loads, `4 N`, or the inputs of layers that `offload` puts there, whichever is
    /// larger.
    pub fn host(&self) -> u64 {
        let offloaded = match self.checkpointing {
            Checkpointing::Offload => self.inputs().saturating_mul(u128::from(self.ranks)),
            _ => 0,
        };
        let processes = IMPORTS * u128::from(self.ranks);
        narrow(processes.saturating_add(self.loading().max(offloaded)))
    }

    /// Bytes on the host for ranks on CPUs: at the peak of an update, or while the model loads.
    pub fn host_without_gpus(&self) -> u64 {
        let (one, ranks) = (self.bytes(), u128::from(self.ranks));
        let stays = u128::from(one.weights) + u128::from(one.frozen) + u128::from(one.process);
        // A single rank computes with the copy that it loaded.
        let copy = if self.is_sharded() { self.loading() } else { 0 };
        let loading = (ranks * stays).saturating_add(copy);
        narrow(loading.max(ranks * u128::from(one.total())))
    }

    /// The largest model in f32.
    fn loading(&self) -> u128 {
        let models = std::iter::once(&self.model).chain(&self.frozen);
        4 * models.map(|m| u128::from(m.parameters)).max().unwrap_or(0)
    }

    /// Whether parameters are sharded, and so gathered for each layer.
    fn is_sharded(&self) -> bool {
        self.ranks > 1 || self.dtype == ComputeType::Bf16
    }

    /// Gathered parameters, of the largest model.
    fn gathered(&self) -> u128 {
        if !self.is_sharded() {
            return 0;
        }
        let models = std::iter::once(&self.model).chain(&self.frozen);
        let whole =
            models.map(|m| u128::from(m.root_parameters()) + 2 * u128::from(m.layer_parameters));
        self.dtype.bytes() * whole.max().unwrap_or(0)
    }

    fn tokens(&self) -> u128 {
        u128::from(self.micro_batch_tokens)
    }

    /// Inputs of all layers, `b L T d`.
    fn inputs(&self) -> u128 {
        let (layers, width) = (self.model.layers, self.model.hidden);
        self.dtype.bytes() * u128::from(layers) * self.tokens() * u128::from(width)
    }

    /// All that one layer keeps for its backward pass: two norms (input in f32 if the type is narrower,
    /// result before and after its weight), queries, keys, values and output of attention, four times the
    /// width of the feed-forward part (gate, up, activation, product), and with experts three copies of each
    /// token's input an expert (gathered, computed, weighted). Attention scores are added.
    fn layer(&self) -> u128 {
        let (m, b) = (&self.model, self.dtype.bytes());
        let wide = match self.dtype {
            ComputeType::F32 => 0,
            ComputeType::Bf16 => 4,
        };
        let norms = 2 * (wide + 2 * b) * u128::from(m.hidden);
        let attention = 2 * b * u128::from(m.queries + m.keys);
        let feed_forward = 4 * b * u128::from(m.feed_forward);
        let experts = 3 * b * u128::from(m.routed) * u128::from(m.hidden);
        let token = norms + attention + feed_forward + experts;
        self.tokens() * token + self.scores()
    }

    /// The part of attention that grows with the square of the tokens.
    fn scores(&self) -> u128 {
        let (b, t) = (self.dtype.bytes(), self.tokens());
        let square = t.saturating_mul(t);
        let all = match self.attention {
            AttentionMemory::Linear => 0,
            AttentionMemory::Mask => square.saturating_mul(b),
            AttentionMemory::Scores => {
                square.saturating_mul((4 + 2 * b) * u128::from(self.model.heads))
            }
        };
        all.min(MOST)
    }

    /// Activations that stay from the forward pass to the backward pass, and the last hidden states.
    fn kept(&self) -> u128 {
        let (b, width) = (self.dtype.bytes(), u128::from(self.model.hidden));
        let input = b * self.tokens() * width;
        let last = (b + 4) * self.tokens() * width;
        let layers = match self.checkpointing {
            Checkpointing::Full => self.inputs(),
            Checkpointing::None => u128::from(self.model.layers)
                .saturating_mul(self.layer())
                .min(MOST),
            Checkpointing::Offload => 2 * input,
        };
        layers + last
    }

    /// The layer that is computed again.
    fn recomputed(&self) -> u128 {
        match self.checkpointing {
            Checkpointing::None => 0,
            _ => self.layer(),
        }
    }

    /// Three chunks of logits in f32 (logits, probabilities, their derivatives) and, if it is trained, the
    /// output matrix's gradient in f32 and the product that is added to it.
    fn head(&self) -> u128 {
        let (vocab, width) = (u128::from(self.model.vocab), u128::from(self.model.hidden));
        let chunk = if self.cuda { CHUNK[0] } else { CHUNK[1] };
        let rows = (chunk / (4 * vocab))
            .clamp(1, CHUNK_ROWS)
            .min(self.tokens().max(1));
        let gradient = match self.adapters {
            Some(_) => 0,
            None => 2 * 4 * vocab * width,
        };
        3 * 4 * rows * vocab + gradient
    }

    /// Gradients of two layers before their reduction and its buffer in f32, beside that of the output
    /// matrix. Adapters are too few to count.
    fn layer_gradients(&self) -> u128 {
        if self.adapters.is_some() {
            return 0;
        }
        let (b, layer) = (self.dtype.bytes(), u128::from(self.model.layer_parameters));
        let head = b * u128::from(self.model.vocab) * u128::from(self.model.hidden);
        if self.is_sharded() {
            (2 * b + 4) * layer + head
        } else {
            4 * layer
        }
    }

    /// Gradients of embedding and output matrix and the buffer of their reduction, when layers are done.
    fn root_gradients(&self) -> u128 {
        if self.adapters.is_some() || !self.is_sharded() {
            return 0;
        }
        (self.dtype.bytes() + 4) * u128::from(self.model.root_parameters())
    }

    fn process(&self) -> u128 {
        match (self.cuda, self.ranks) {
            (false, _) => IMPORTS,
            (true, 0 | 1) => CONTEXT,
            (true, _) => CONTEXT + NCCL,
        }
    }
}
