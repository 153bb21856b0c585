//! What runs: an algorithm taken apart into advantage, rewards, filters, aggregation and loss.
//! Presets make one, a recipe changes parts of it, [`Composition::check`] refuses what cannot
//! work together.

use crate::config::{AlgorithmKind, ConfigError};
use serde::{Deserialize, Serialize};
use sinew_types::{Aggregation, Correction, KlEstimator, LossSpec, Surrogate};

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
    /// Unbiased standard deviation of `R − baseline` over all groups with the same task kind,
    /// plus `epsilon` (AutoForge ERPO).
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
    /// `coefficient · (ℓ_teacher − ℓ_behaviour)` token by token.
    Distill { coefficient: f64 },
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
    /// All trained tokens of one task (AgentRL, arXiv 2510.04206).
    Task,
    /// All trained tokens of one task kind.
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

/// Soft punishment of length: `min(−(len − (max − buffer))/buffer · factor, 0)`, where `len`
/// counts sampled tokens (DAPO, Yu et al. 2025, arXiv 2503.14476, equation 13).
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
    /// Leaves the batch and its denominators, and is named for a refill (dynamic sampling).
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
}

impl Filters {
    /// Keep everything.
    pub const NONE: Self = Self {
        truncated: Truncated::Keep,
        equal_groups: EqualGroups::Zero,
        keep_top_std: None,
        resample: None,
        only_success: false,
    };
}

/// An algorithm, taken apart.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Composition {
    pub kind: AlgorithmKind,
    pub advantage: Advantage,
    pub normalize: Normalize,
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
    /// A reference (or teacher) model is loaded.
    pub reference: bool,
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
    /// Reference log-probabilities in each row, by the time it is trained.
    pub ref_in_loss: bool,
    /// Log-probabilities of the current policy in [`crate::Columns`], before rows are made.
    pub prox_logprobs: bool,
}

impl Composition {
    /// What must be given beside the traces.
    pub fn needs(&self) -> Needs {
        let preference = matches!(self.advantage, Advantage::Preference { .. });
        let distill = matches!(self.advantage, Advantage::Distill { .. });
        Needs {
            values: self.advantage.needs_values(),
            ref_logprobs: preference || distill || self.rewards.kl != 0.0,
            ref_in_loss: self.loss.kl.is_some(),
            prox_logprobs: preference,
        }
    }

    /// Whether anything but the advantage moves the weights.
    pub(crate) fn trains_without_advantage(&self) -> bool {
        self.loss.kl.is_some() || self.loss.entropy != 0.0 || self.loss.value.is_some()
    }

    /// Refuses values out of range and parts that cannot work together.
    pub fn check(&self, facts: &RunFacts) -> Result<(), ConfigError> {
        self.check_surrogate()?;
        self.check_correction()?;
        self.check_numbers()?;
        self.check_filters(facts)?;
        self.check_inputs(facts)?;
        self.check_staleness(facts)
    }

    fn check_surrogate(&self) -> Result<(), ConfigError> {
        let positive =
            |field, value: f32| range(field, value, value > 0.0, "a positive, finite number");
        match &self.loss.surrogate {
            Surrogate::Clip { low, high, dual } => {
                let low = *low;
                range(
                    "clip_low",
                    low,
                    (0.0..1.0).contains(&low),
                    "0 <= clip_low < 1",
                )?;
                positive("clip_high", *high)?;
                match dual {
                    Some(d) => range("dual_clip", *d, *d > 1.0, "a finite number above 1"),
                    None => Ok(()),
                }
            }
            Surrogate::SequenceClip { low, high } => {
                let low = *low;
                range(
                    "clip_low",
                    low,
                    (0.0..1.0).contains(&low),
                    "0 <= clip_low < 1",
                )?;
                positive("clip_high", *high)
            }
            Surrogate::Cispo { low, high } => {
                range(
                    "clip_low",
                    *low,
                    *low >= 0.0,
                    "0 or above; 1 switches it off",
                )?;
                let ok = *high > -1.0 && 1.0 + high >= 1.0 - low;
                range(
                    "clip_high",
                    *high,
                    ok,
                    "1 + clip_high >= 1 - clip_low, above -1",
                )
            }
            Surrogate::Soft { tau_pos, tau_neg } => {
                positive("tau_pos", *tau_pos)?;
                positive("tau_neg", *tau_neg)
            }
            Surrogate::Reinforce | Surrogate::CrossEntropy => Ok(()),
        }
    }

    fn check_correction(&self) -> Result<(), ConfigError> {
        match &self.loss.correction {
            Correction::None => Ok(()),
            Correction::Truncate { low, high } | Correction::Mask { low, high } => {
                range("correction.low", *low, *low >= 0.0, "0 or above")?;
                let allowed = "a finite number above correction.low";
                range("correction.high", *high, high > low, allowed)
            }
            Correction::Reject { upper, .. } => range(
                "correction.upper",
                *upper,
                *upper > 0.0,
                "a positive, finite number",
            ),
        }
    }

    fn check_numbers(&self) -> Result<(), ConfigError> {
        let unit = |field, v: f64| range(field, v, (0.0..=1.0).contains(&v), "0 to 1");
        let above_zero = |field, v: f64| range(field, v, v >= 0.0, "0 or above");
        match self.advantage {
            Advantage::Group { scale, .. } => match scale {
                Scale::GroupStd { epsilon } | Scale::EnvironmentStd { epsilon } => {
                    range("std_epsilon", epsilon, epsilon > 0.0, "a positive number")?;
                }
                Scale::One | Scale::GroupMean => {}
            },
            Advantage::ReturnToGo { gamma } => unit("gamma", gamma)?,
            Advantage::Gae { gamma, lambda } => {
                unit("gamma", gamma)?;
                unit("lambda", lambda)?;
            }
            Advantage::TurnGae {
                gamma_turn,
                lambda_turn,
                gamma,
                lambda,
            } => {
                unit("gamma_turn", gamma_turn)?;
                unit("lambda_turn", lambda_turn)?;
                unit("gamma", gamma)?;
                unit("lambda", lambda)?;
            }
            Advantage::Gigpo { omega, gamma, .. } => {
                above_zero("omega", omega)?;
                unit("gamma", gamma)?;
            }
            Advantage::Distill { coefficient } => {
                range(
                    "coefficient",
                    coefficient,
                    coefficient > 0.0,
                    "a positive number",
                )?;
            }
            Advantage::Preference { beta } => {
                range("beta", beta, beta > 0.0, "a positive number")?;
            }
            Advantage::One => {}
        }
        above_zero("entropy", f64::from(self.loss.entropy))?;
        above_zero("kl.coefficient", self.rewards.kl)?;
        if let Some(kl) = self.loss.kl {
            let allowed = "a positive number; leave kl out for none";
            range(
                "kl.coefficient",
                kl.coefficient,
                kl.coefficient > 0.0,
                allowed,
            )?;
        }
        if let Some((coefficient, clip)) = self.loss.value {
            let allowed = "a positive number";
            range("value_coefficient", coefficient, coefficient > 0.0, allowed)?;
            if let Some(clip) = clip {
                range("value_clip", clip, clip > 0.0, allowed)?;
            }
        }
        self.check_reward_numbers()
    }

    fn check_reward_numbers(&self) -> Result<(), ConfigError> {
        let rewards = &self.rewards;
        range("rewards.bias", rewards.bias, true, "a finite number")?;
        range(
            "rewards.scale",
            rewards.scale,
            rewards.scale > 0.0,
            "a positive number",
        )?;
        if let Some(clip) = rewards.clip {
            range("rewards.clip", clip, clip > 0.0, "a positive number")?;
        }
        if let ProcessRewards::Separate { weight } = rewards.process {
            range("process.weight", weight, weight > 0.0, "a positive number")?;
        }
        if let Some(o) = rewards.overlong {
            let buffer = f64::from(o.buffer_tokens);
            let fits = o.buffer_tokens > 0 && o.buffer_tokens <= o.max_tokens;
            range(
                "overlong.buffer_tokens",
                buffer,
                fits,
                "1 to overlong.max_tokens",
            )?;
            range(
                "overlong.factor",
                o.factor,
                o.factor > 0.0,
                "a positive number",
            )?;
        }
        if let Aggregation::SequenceMeanTokenSumNorm { length } = self.aggregation {
            range(
                "aggregation.length",
                length,
                length > 0.0,
                "a positive number of tokens",
            )?;
        }
        Ok(())
    }

    fn check_filters(&self, facts: &RunFacts) -> Result<(), ConfigError> {
        if let Some(share) = self.filters.keep_top_std {
            let ok = share > 0.0 && share <= 1.0;
            range("keep_top_std", share, ok, "above 0, at most 1")?;
        }
        if let Some(r) = self.filters.resample {
            let ok = r.keep >= 2 && r.keep < facts.group_size;
            let allowed = "2 to group_size - 1, as it chooses among an oversampled group";
            range("resample.keep", r.keep as f64, ok, allowed)?;
            let ok = 2 * r.minimum <= r.keep;
            let allowed = "at most half of resample.keep";
            range("resample.minimum", r.minimum as f64, ok, allowed)?;
        }
        let compared = self.advantage.compares()
            || self.filters.keep_top_std.is_some()
            || self.filters.equal_groups == EqualGroups::Drop;
        if compared && facts.group_size < 2 {
            return Err(ConfigError::impossible(format!(
                "group_size is {}, but `{}` compares the episodes of a group: \
                 the only one would be its own baseline and never train; \
                 set group_size to 2 or more, or use `reinforce` or `ppo`",
                facts.group_size, self.kind
            )));
        }
        Ok(())
    }

    fn check_inputs(&self, facts: &RunFacts) -> Result<(), ConfigError> {
        let needs = self.needs();
        if (needs.ref_logprobs || needs.ref_in_loss) && !facts.reference {
            let what = match self.advantage {
                Advantage::Distill { .. } => "it distils from a teacher",
                Advantage::Preference { .. } => "its margin is relative to a reference",
                _ => "it has a KL term",
            };
            return Err(ConfigError::impossible(format!(
                "`{}` needs a reference model, as {what}, and the run has none; \
                 name one, or remove the term",
                self.kind
            )));
        }
        if needs.values != facts.critic {
            let (have, fix) = if facts.critic {
                (
                    "does not read a critic's values",
                    "remove the critic or use `ppo`",
                )
            } else {
                (
                    "needs a critic",
                    "add one or use an algorithm without values",
                )
            };
            return Err(ConfigError::impossible(format!(
                "`{}` {have}; {fix}",
                self.kind
            )));
        }
        if self.loss.value.is_some() && !needs.values {
            return Err(ConfigError::impossible(format!(
                "`{}` has a value loss but estimates no returns to fit; remove value_coefficient",
                self.kind
            )));
        }
        if let Some(kl) = self.loss.kl {
            // d/dθ of k1 as a loss is E[∇ℓ_π] = 0 on the policy's own samples: it does nothing
            // but add noise (Schulman 2020).
            if kl.estimator == KlEstimator::K1 {
                return Err(ConfigError::impossible(
                    "kl.estimator k1 as a loss has expected gradient zero; \
                     use k2 or k3, or place = \"reward\""
                        .to_owned(),
                ));
            }
        }
        Ok(())
    }

    fn check_staleness(&self, facts: &RunFacts) -> Result<(), ConfigError> {
        let stale = facts.max_staleness > 0 || facts.updates_per_batch > 1;
        let blind = self.loss.surrogate == Surrogate::Reinforce;
        let by_design = matches!(self.advantage, Advantage::Preference { .. });
        if by_design && facts.updates_per_batch > 1 {
            return Err(ConfigError::impossible(format!(
                "`{}` fixes the margin when rows are made, which is exact for one optimizer step \
                 a batch; updates_per_batch is {}",
                self.kind, facts.updates_per_batch
            )));
        }
        if stale && blind && !by_design && self.loss.correction == Correction::None {
            return Err(ConfigError::impossible(format!(
                "`{}` has no importance ratio, so max_staleness {} and updates_per_batch {} \
                 would train on another policy's samples uncorrected; \
                 set them to 0 and 1, or choose a correction",
                self.kind, facts.max_staleness, facts.updates_per_batch
            )));
        }
        Ok(())
    }
}

fn range(
    field: &'static str,
    value: impl Into<f64>,
    ok: bool,
    allowed: &'static str,
) -> Result<(), ConfigError> {
    let value = value.into();
    if ok && value.is_finite() {
        return Ok(());
    }
    Err(ConfigError::Range {
        field,
        value,
        allowed,
    })
}
