//! What runs: an algorithm taken apart into advantage, rewards, filters, aggregation and loss.
//! Presets make one, a recipe changes parts of it, [`Composition::check`] refuses what cannot
//! work together.

use crate::kind::AlgorithmKind;
use serde::{Deserialize, Serialize};
use sinew_types::{Aggregation, LossSpec, Surrogate};

/// How the episodes of a group are compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Baseline {
    /// Nothing is subtracted.
    Zero,
    /// Mean of the group.
    Mean,
    /// Mean of the *other* episodes of the group.
    LeaveOneOut,
}

/// What the difference to the baseline is divided by.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "type")]
pub enum Scale {
    One,
    /// Unbiased standard deviation of the group, plus `epsilon`.
    GroupStd {
        epsilon: f64,
    },
    /// Unbiased standard deviation of the rewards of all episodes with the same task kind, plus
    /// `epsilon` (ERPO; Cai et al. 2025, AutoForge, arXiv 2512.22857, equation 4).
    EnvironmentStd {
        epsilon: f64,
    },
    /// Mean of the group; the advantage is 0 where that is not positive (MaxRL).
    GroupMean,
}

/// How rewards become a number for each token.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "type")]
pub enum Advantage {
    /// `(R − baseline) / scale`, the same for all tokens of an episode.
    Group { baseline: Baseline, scale: Scale },
    /// Discounted sum of what follows, token by token (REINFORCE++).
    ReturnToGo { gamma: f64 },
    /// Generalized advantage estimation over the sampled tokens.
    Gae { gamma: f64, lambda: f64 },
    /// GAE over turns, then over the tokens inside each turn.
    TurnGae {
        gamma_turn: f64,
        lambda_turn: f64,
        gamma: f64,
        lambda: f64,
    },
    /// Episode advantage plus `omega` times a step advantage among equal states.
    Gigpo {
        omega: f64,
        gamma: f64,
        /// Divide both by the standard deviation plus this; `None`: do not divide.
        std_epsilon: Option<f64>,
    },
    /// 0 everywhere: nothing but a teacher trains.
    None,
    /// 1 everywhere.
    One,
    /// Best and worst of a group as a preference pair, with the margin's sigmoid as advantage.
    Preference { beta: f64 },
}

impl Advantage {
    /// Whether episodes are compared within their group.
    pub fn compares(&self) -> bool {
        match self {
            Self::Group { baseline, scale } => *baseline != Baseline::Zero || *scale != Scale::One,
            Self::Gigpo { .. } | Self::Preference { .. } => true,
            _ => false,
        }
    }

    /// Whether it reads what an episode was worth.
    pub fn reads_rewards(&self) -> bool {
        !matches!(self, Self::None | Self::One)
    }

    /// Whether it reads a critic's values.
    pub fn needs_values(&self) -> bool {
        matches!(self, Self::Gae { .. } | Self::TurnGae { .. })
    }
}

/// Over which tokens advantages are brought to mean 0 and standard deviation 1, last of all.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Normalize {
    None,
    /// All trained tokens of the batch.
    Batch,
    /// All trained tokens of one task: the episodes of one prompt.
    Task,
    /// All trained tokens of one task kind (AgentRL, arXiv 2510.04206, which calls the kind a task).
    Environment,
}

/// What becomes of rewards attached to turns.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "type")]
pub enum ProcessRewards {
    /// Added to the outcome (group methods) or placed where they were earned (recursions).
    Sum,
    /// Not used.
    Ignore,
    /// Normalized apart from the outcome, then `weight` times the sum from the token's turn on
    /// is added to the advantage (Shao et al. 2024, arXiv 2402.03300, section 4.1.3).
    Separate { weight: f64 },
}

/// Soft punishment of length: `−(len − (max − buffer))/buffer · factor` within the buffer, 0 below and
/// `−factor` above it, where `len` counts sampled tokens (DAPO, Yu et al. 2025, arXiv 2503.14476,
/// equation 13).
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Overlong {
    pub max_tokens: u32,
    pub buffer_tokens: u32,
    #[serde(default = "one")]
    pub factor: f64,
}

fn one() -> f64 {
    1.0
}

/// From the recorded reward to the one that is compared.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Rewards {
    pub process: ProcessRewards,
    /// Added to the outcome, before `scale`.
    pub bias: f64,
    pub scale: f64,
    /// Bound on the magnitude, after `scale`.
    pub clip: Option<f64>,
    pub overlong: Option<Overlong>,
    /// `−kl · k1(π_behaviour ‖ ref)` on each sampled token; 0 for none.
    pub kl: f64,
}

impl Rewards {
    /// As recorded, process rewards summed.
    pub const PLAIN: Self = Self {
        process: ProcessRewards::Sum,
        bias: 0.0,
        scale: 1.0,
        clip: None,
        overlong: None,
        kl: 0.0,
    };
}

/// What becomes of an episode that a limit cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Truncated {
    /// Trains like any other.
    Keep,
    /// Trains, and what the critic expects behind its last token stands for the rewards that the
    /// limit cut off (Pardo et al. 2018, arXiv 1712.00378, partial-episode bootstrapping).
    Bootstrap,
    /// Counts in its group's baseline, trains nothing (DAPO's overlong filtering).
    Mask,
    /// Leaves its group, as if it had not been run.
    Exclude,
}

/// What becomes of a group whose rewards are all equal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EqualGroups {
    /// Advantage 0; counts in the loss's denominators. Its rows are left out where nothing but
    /// the advantage would train (no KL, no entropy term): the gradient is the same.
    Zero,
    /// Leaves the batch and its denominators; `refill` replaces it (dynamic sampling).
    Drop,
}

/// GRPO-RoC: keep `keep` of an oversampled group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Resample {
    pub keep: usize,
    /// At least so many successes and failures stay, where there are any.
    #[serde(default = "two")]
    pub minimum: usize,
}

fn two() -> usize {
    2
}

/// What leaves the batch before and after advantages are known.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Filters {
    pub truncated: Truncated,
    pub equal_groups: EqualGroups,
    /// Keep this share of groups, those with the largest reward deviation (StarPO-S).
    pub keep_top_std: Option<f64>,
    pub resample: Option<Resample>,
    /// Train on successes alone (rejection-sampling fine-tuning).
    pub only_success: bool,
    /// Rounds in which groups that left the batch are replaced by other tasks' (dynamic sampling).
    pub refill: Option<u32>,
}

impl Filters {
    /// Keep everything.
    pub const NONE: Self = Self {
        truncated: Truncated::Keep,
        equal_groups: EqualGroups::Zero,
        keep_top_std: None,
        resample: None,
        only_success: false,
        refill: None,
    };
}

/// An algorithm, taken apart.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Composition {
    pub kind: AlgorithmKind,
    pub advantage: Advantage,
    pub normalize: Normalize,
    /// `A_t += distill · (ℓ_teacher − ℓ_behaviour)`, after normalization; 0 for none.
    pub distill: f64,
    pub rewards: Rewards,
    pub filters: Filters,
    pub aggregation: Aggregation,
    pub loss: LossSpec,
}

/// What the run brings, as far as an algorithm depends on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RunFacts {
    /// Episodes of a task whose rewards are compared.
    pub group_size: usize,
    /// A reference model is loaded.
    pub reference: bool,
    /// A teacher is loaded.
    pub teacher: bool,
    /// A critic is trained.
    pub critic: bool,
    /// Most versions that a trained token may be behind; 0: fully synchronous.
    pub max_staleness: u64,
    /// Optimizer steps on one batch; beyond 1 the later ones are off-policy.
    pub updates_per_batch: usize,
}

/// Inputs that an algorithm reads beside the traces.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Needs {
    /// Values in [`crate::Columns`], before rows are made.
    pub values: bool,
    /// Reference log-probabilities in [`crate::Columns`], before rows are made.
    pub ref_logprobs: bool,
    /// A teacher's log-probabilities in [`crate::Columns`], before rows are made.
    pub teacher_logprobs: bool,
    /// How many of a teacher's most likely tokens in [`crate::Columns`], before rows are made.
    pub teacher_top: u32,
    /// Reference log-probabilities in each row, by the time it is trained.
    pub ref_in_loss: bool,
    /// Log-probabilities of the current policy in [`crate::Columns`], before rows are made.
    pub prox_logprobs: bool,
}

impl Needs {
    /// Whether anything has to be scored before rows are made.
    pub fn columns(&self) -> bool {
        self.values || self.ref_logprobs || self.prox_logprobs || self.teacher()
    }

    /// Whether a teacher is asked.
    pub fn teacher(&self) -> bool {
        self.teacher_logprobs || self.teacher_top > 0
    }

    /// Whether a reference model is asked, before or after rows are made.
    pub fn reference(&self) -> bool {
        self.ref_logprobs || self.ref_in_loss
    }
}

impl Composition {
    /// What must be given beside the traces.
    pub fn needs(&self) -> Needs {
        let preference = matches!(self.advantage, Advantage::Preference { .. });
        Needs {
            values: self.advantage.needs_values(),
            ref_logprobs: preference || self.rewards.kl != 0.0,
            teacher_logprobs: self.distill != 0.0,
            teacher_top: self.loss.teacher.map_or(0, |t| t.top_k),
            ref_in_loss: self.loss.kl.is_some(),
            prox_logprobs: preference,
        }
    }

    /// Whether a token is trained at the temperature that it was sampled at: a policy gradient is of the
    /// policy that acted. What is imitated (SFT) or preferred (DPO) is data for the model itself, at
    /// temperature 1, whoever sampled it and however: its loss has no sampling policy in it.
    pub fn tempered(&self) -> bool {
        !matches!(
            self.advantage,
            Advantage::One | Advantage::Preference { .. }
        )
    }

    /// Whether anything but the advantage moves the weights.
    pub(crate) fn trains_without_advantage(&self) -> bool {
        let penalizes =
            |s: &Surrogate| matches!(s, Surrogate::TrustRegion { penalty, .. } if *penalty != 0.0);
        self.loss.kl.is_some()
            || self.loss.entropy != 0.0
            || penalizes(&self.loss.surrogate)
            || self.loss.value.is_some()
            || self.loss.teacher.is_some()
    }
}
