//! Parts of an algorithm: advantage, rewards, filters, aggregation and loss. A preset has default parts, a
//! recipe changes some, and [`Composition::check`] refuses combinations that cannot work.

use crate::kind::AlgorithmKind;
use serde::{Deserialize, Serialize};
use sinew_types::{Aggregation, EpisodeInput, LossSpec, Surrogate};

/// Baseline of group advantages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Baseline {
    /// No baseline.
    Zero,
    /// Mean reward of the group.
    Mean,
    /// Mean reward of the other episodes of the group.
    LeaveOneOut,
}

/// Divisor of group advantages.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case", tag = "type")]
pub enum Scale {
    /// No division.
    One,
    /// Unbiased standard deviation of the group's rewards plus `epsilon`.
    GroupStd {
        /// Added to the standard deviation, above 0.
        epsilon: f64,
    },
    /// Unbiased standard deviation of the rewards of all episodes of the same environment plus `epsilon`
    /// (ERPO, Cai et al. 2025, AutoForge, arXiv 2512.22857, equation 4).
    EnvironmentStd {
        /// Added to the standard deviation, above 0.
        epsilon: f64,
    },
    /// Mean reward of the group. The advantage is 0 if it is not positive (MaxRL).
    GroupMean,
}

/// Advantage estimator.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case", tag = "type")]
pub enum Advantage {
    /// `(R − baseline) / scale`, equal for all tokens of an episode.
    Group {
        /// Value that is subtracted from an episode's reward.
        baseline: Baseline,
        /// Divisor of the reward minus the baseline.
        scale: Scale,
    },
    /// Discounted sum of later rewards, per token (REINFORCE++).
    ReturnToGo {
        /// Discount per token, 0 to 1.
        gamma: f64,
    },
    /// Generalized advantage estimation over the sampled tokens.
    Gae {
        /// Discount per token, 0 to 1.
        gamma: f64,
        /// GAE parameter over tokens, 0 to 1.
        lambda: f64,
    },
    /// GAE over turns, then over the tokens of each turn.
    TurnGae {
        /// Discount per turn, 0 to 1.
        gamma_turn: f64,
        /// GAE parameter over turns, 0 to 1.
        lambda_turn: f64,
        /// Discount per token within a turn, 0 to 1.
        gamma: f64,
        /// GAE parameter over the tokens of a turn, 0 to 1.
        lambda: f64,
    },
    /// Episode advantage plus `omega` times a step advantage between equal states.
    Gigpo {
        /// Weight of the step advantage, 0 or above.
        omega: f64,
        /// Discount per turn, 0 to 1.
        gamma: f64,
        /// Added to the standard deviation, which divides both advantages. `None`: no division.
        std_epsilon: Option<f64>,
    },
    /// 0 for all tokens: only a teacher trains.
    None,
    /// 1 for all tokens.
    One,
    /// The best and worst episode of a group as a preference pair. The advantage is the sigmoid of the
    /// margin.
    Preference {
        /// Inverse temperature of the margin, above 0.
        beta: f64,
    },
}

impl Advantage {
    /// True if episodes are compared within their group.
    pub fn compares(&self) -> bool {
        match self {
            Self::Group { baseline, scale } => *baseline != Baseline::Zero || *scale != Scale::One,
            Self::Gigpo { .. } | Self::Preference { .. } => true,
            _ => false,
        }
    }

    /// True if the estimator reads rewards.
    pub fn reads_rewards(&self) -> bool {
        !matches!(self, Self::None | Self::One)
    }

    /// True if the estimator reads a critic's values.
    pub fn needs_values(&self) -> bool {
        matches!(self, Self::Gae { .. } | Self::TurnGae { .. })
    }
}

/// Scope of advantage whitening (mean 0, standard deviation 1), the last step of the estimation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Normalize {
    /// No whitening.
    None,
    /// Trained tokens of the batch.
    Batch,
    /// Trained tokens of one task.
    Task,
    /// Trained tokens of one task type.
    Kind,
    /// Trained tokens of one environment (AgentRL, arXiv 2510.04206, which calls an environment a task).
    Environment,
}

/// Use of process rewards, which belong to turns.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case", tag = "type")]
pub enum ProcessRewards {
    /// Added to the outcome (group estimators) or placed on their turns (recursions).
    Sum,
    /// Not used.
    Ignore,
    /// Normalized separately. Then `weight` times the sum from the token's turn on is added to the advantage
    /// (Shao et al. 2024, arXiv 2402.03300, section 4.1.3).
    Separate {
        /// Factor of the sum of normalized process rewards, above 0.
        weight: f64,
    },
}

/// Soft length penalty: `−(len − (max − buffer))/buffer · factor` within the buffer, 0 below and `−factor`
/// above it, where `len` is the number of sampled tokens (DAPO, Yu et al. 2025, arXiv 2503.14476, equation
/// 13).
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Overlong {
    /// Length at which the penalty reaches `factor`.
    pub max_tokens: u32,
    /// Tokens below `max_tokens` at which the penalty starts, 1 to `max_tokens`.
    pub buffer_tokens: u32,
    /// Maximum penalty, above 0.
    #[serde(default = "one")]
    pub factor: f64,
}

fn one() -> f64 {
    1.0
}

/// Reward shaping.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Rewards {
    /// Use of process rewards.
    pub process: ProcessRewards,
    /// Added to the outcome before `scale`.
    pub bias: f64,
    /// Factor of the outcome.
    pub scale: f64,
    /// Maximum magnitude after `scale`.
    pub clip: Option<f64>,
    /// Length penalty.
    pub overlong: Option<Overlong>,
    /// Factor of the penalty `−kl · k1(π_behaviour ‖ ref)` per sampled token. 0: none.
    pub kl: f64,
}

impl Rewards {
    /// No shaping, with process rewards summed.
    pub const PLAIN: Self = Self {
        process: ProcessRewards::Sum,
        bias: 0.0,
        scale: 1.0,
        clip: None,
        overlong: None,
        kl: 0.0,
    };
}

/// Treatment of truncated episodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Truncated {
    /// Train like all others.
    Keep,
    /// Train. The critic's value after the last token stands for the missing rewards (Pardo et al. 2018,
    /// arXiv 1712.00378, partial-episode bootstrapping).
    Bootstrap,
    /// Count in the baseline but do not train (DAPO's overlong filtering).
    Mask,
    /// Ignore.
    Exclude,
}

/// Treatment of groups with equal rewards.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum EqualGroups {
    /// Advantage 0, and the group counts in the denominators of the loss. Without other loss terms (KL,
    /// entropy) its rows are left out: the gradient is the same.
    Zero,
    /// Remove the group from the batch and the denominators. `refill` replaces it (dynamic sampling).
    Drop,
}

/// GRPO-RoC: keep a part of an oversampled group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Resample {
    /// Number of episodes to keep, 2 to `group_size − 1`.
    pub keep: usize,
    /// Minimum number of successes and of failures to keep, if there are as many.
    #[serde(default = "two")]
    pub minimum: usize,
}

fn two() -> usize {
    2
}

/// Filters of episodes and groups.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Filters {
    /// Treatment of truncated episodes.
    pub truncated: Truncated,
    /// Treatment of groups with equal rewards.
    pub equal_groups: EqualGroups,
    /// Share of groups to keep, those with the largest reward deviation (StarPO-S).
    pub keep_top_std: Option<f64>,
    /// Choice among oversampled groups.
    pub resample: Option<Resample>,
    /// Train on successful episodes only (rejection-sampling fine-tuning).
    pub only_success: bool,
    /// Maximum rounds that replace dropped groups by other tasks (dynamic sampling).
    pub refill: Option<u32>,
}

impl Filters {
    /// No filter.
    pub const NONE: Self = Self {
        truncated: Truncated::Keep,
        equal_groups: EqualGroups::Zero,
        keep_top_std: None,
        resample: None,
        only_success: false,
        refill: None,
    };
}

/// The parts of an algorithm.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Composition {
    /// Algorithm whose preset is the base.
    pub kind: AlgorithmKind,
    /// Advantage estimator.
    pub advantage: Advantage,
    /// Scope of advantage whitening.
    pub normalize: Normalize,
    /// Factor of `ℓ_teacher − ℓ_behaviour`, which is added to the advantage after whitening. 0: none.
    pub distill: f64,
    /// Reward shaping.
    pub rewards: Rewards,
    /// Filters of episodes and groups.
    pub filters: Filters,
    /// Weights of tokens in the loss.
    pub aggregation: Aggregation,
    /// Loss for the trainer.
    pub loss: LossSpec,
}

/// Properties of a run that algorithms depend on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RunFacts {
    /// Episodes per task whose rewards are compared.
    pub group_size: usize,
    /// True if there is a reference model.
    pub reference: bool,
    /// True if there is a teacher.
    pub teacher: bool,
    /// True if a critic is trained.
    pub critic: bool,
    /// Maximum number of versions that a trained token can be behind. 0: synchronous.
    pub max_staleness: u64,
    /// Optimizer steps per batch. All but the first are off-policy.
    pub updates_per_batch: usize,
}

/// Inputs of an algorithm in addition to tokens and outcomes: of the run ([`crate::Columns`]), and of the
/// episodes themselves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Needs {
    /// Critic's values in [`crate::Columns`].
    pub values: bool,
    /// Reference log-probabilities in [`crate::Columns`].
    pub ref_logprobs: bool,
    /// Teacher's log-probabilities in [`crate::Columns`].
    pub teacher_logprobs: bool,
    /// Number of the teacher's most likely tokens in [`crate::Columns`]. 0: none.
    pub teacher_top: u32,
    /// Reference log-probabilities in each row when it is trained. All other inputs are needed before rows
    /// are created.
    pub ref_in_loss: bool,
    /// Log-probabilities of the current policy in [`crate::Columns`].
    pub prox_logprobs: bool,
    /// [`EpisodeInput::States`] in traces.
    pub states: bool,
    /// [`EpisodeInput::TurnRewards`] in traces.
    pub turn_rewards: bool,
    /// [`EpisodeInput::ToolCounts`] and [`EpisodeInput::FormatPenalty`] in traces.
    pub tool_counts: bool,
}

impl Needs {
    /// True if columns are needed before rows are created.
    pub fn columns(&self) -> bool {
        self.values || self.ref_logprobs || self.prox_logprobs || self.teacher()
    }

    /// True if a teacher is needed.
    pub fn teacher(&self) -> bool {
        self.teacher_logprobs || self.teacher_top > 0
    }

    /// Inputs that must be in the traces. Optional inputs, such as rewards of turns that are added to the
    /// outcome, are not among them.
    pub fn of_episodes(&self) -> impl Iterator<Item = EpisodeInput> {
        let needs = *self;
        EpisodeInput::ALL.into_iter().filter(move |i| match i {
            EpisodeInput::States => needs.states,
            EpisodeInput::TurnRewards => needs.turn_rewards,
            EpisodeInput::ToolCounts | EpisodeInput::FormatPenalty => needs.tool_counts,
        })
    }

    /// True if a reference model is needed.
    pub fn reference(&self) -> bool {
        self.ref_logprobs || self.ref_in_loss
    }
}

impl Composition {
    /// Inputs in addition to tokens and outcomes.
    pub fn needs(&self) -> Needs {
        let preference = matches!(self.advantage, Advantage::Preference { .. });
        Needs {
            values: self.advantage.needs_values(),
            ref_logprobs: preference || self.rewards.kl != 0.0,
            teacher_logprobs: self.distill != 0.0,
            teacher_top: self.loss.teacher.map_or(0, |t| t.top_k),
            ref_in_loss: self.loss.kl.is_some(),
            prox_logprobs: preference,
            states: matches!(self.advantage, Advantage::Gigpo { omega, .. } if omega > 0.0),
            turn_rewards: matches!(self.rewards.process, ProcessRewards::Separate { .. }),
            tool_counts: self.filters.resample.is_some(),
        }
    }

    /// True if tokens are trained at their sampling temperature, as policy gradients require. SFT and DPO
    /// train the model itself at temperature 1, because their losses have no sampling policy.
    pub fn tempered(&self) -> bool {
        !matches!(
            self.advantage,
            Advantage::One | Advantage::Preference { .. }
        )
    }

    /// True if a loss term other than the policy term trains.
    pub(crate) fn trains_without_advantage(&self) -> bool {
        let penalizes = |s: &Surrogate| match s {
            Surrogate::TrustRegion { penalty, .. } => *penalty != 0.0,
            Surrogate::Dro { beta } => *beta != 0.0,
            _ => false,
        };
        self.loss.kl.is_some()
            || self.loss.entropy != 0.0
            || penalizes(&self.loss.surrogate)
            || self.loss.value.is_some()
            || self.loss.teacher.is_some()
    }
}
