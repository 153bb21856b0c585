//! Recipe section `[algorithm]`: `type = "grpo"` and options that differ from the preset.
//!
//! [`AlgorithmConfig::resolve`] converts it to an [`Algorithm`] and refuses options without effect.

use crate::composition::{
    Advantage, Composition, EqualGroups, Normalize, Overlong, ProcessRewards, Resample, RunFacts,
    Scale, Truncated,
};
use crate::dialect::Dialect;
use crate::error::ConfigError;
use crate::kind::AlgorithmKind;
use crate::pipeline::Algorithm;
use crate::strict::strict;
use serde::{Deserialize, Serialize};
use sinew_types::{Aggregation, Correction, Divergence, KlEstimator, KlSpec, Surrogate};

/// Place of a KL term.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema,
)]
#[serde(rename_all = "snake_case")]
pub enum KlPlace {
    /// Differentiable term of the loss.
    #[default]
    Loss,
    /// Subtracted from each token's reward.
    Reward,
}

/// A KL term of a recipe.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct KlConfig {
    /// Place of the term. Default: the loss.
    #[serde(default)]
    pub place: KlPlace,
    /// Estimator. Default: `k3` in the loss, `k1` in the reward.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub estimator: Option<KlEstimator>,
    /// Factor of the term, above 0.
    pub coefficient: f32,
}

/// Distance to a teacher's distribution, of a recipe.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct TeacherConfig {
    /// Number of the teacher's most likely tokens per position, 1 to 256. Default: 8.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub top_k: Option<u32>,
    /// Direction of the divergence. Default: reverse.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub divergence: Option<Divergence>,
    /// Factor of the term, above 0. Default: 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub coefficient: Option<f32>,
}

/// Reward shaping of a recipe: `clip((reward + bias) * scale)`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct RewardConfig {
    /// Added to the reward. Default: 0.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bias: Option<f64>,
    /// Factor after `bias`, above 0. Default: 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scale: Option<f64>,
    /// Maximum magnitude after `scale`, above 0. Default: none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub clip: Option<f64>,
}

macro_rules! options {
    (
        strict { $($(#[$strict_meta:meta])* $strict:ident: $strict_type:ty),* $(,)? }
        plain { $($(#[$meta:meta])* $field:ident: $type:ty),* $(,)? }
    ) => {
        /// Section `[algorithm]` of a recipe. Defaults come from the preset of `type`.
        #[derive(Clone, Debug, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
        #[serde(deny_unknown_fields)]
        pub struct AlgorithmConfig {
            /// Algorithm whose preset applies.
            #[serde(rename = "type")]
            pub kind: AlgorithmKind,
            $(
                $(#[$strict_meta])*
                #[serde(
                    default,
                    deserialize_with = "strict",
                    skip_serializing_if = "Option::is_none"
                )]
                pub $strict: Option<$strict_type>,
            )*
            $(
                $(#[$meta])*
                #[serde(default, skip_serializing_if = "Option::is_none")]
                pub $field: Option<$type>,
            )*
        }

        impl Algorithm {
    /// Resolves a recipe section, see [`AlgorithmConfig::resolve`].
    ///
    /// # Errors
    /// The first problem of the section.
    pub fn new(config: &AlgorithmConfig, facts: &RunFacts) -> Result<Self, ConfigError> {
        config.resolve(facts)
    }
}

impl AlgorithmConfig {
            /// Creates a section without changes to the preset of `kind`.
            pub fn new(kind: AlgorithmKind) -> Self {
                Self { kind, $($strict: None,)* $($field: None,)* }
            }
        }
    };
}

options! {
    strict {
        /// Advantage estimator in place of the preset's. The options below then apply to it.
        advantage: Advantage,
        /// Policy term of the loss in place of the preset's.
        surrogate: Surrogate,
        /// Divisor of group advantages.
        scale: Scale,
        /// Use of process rewards.
        process: ProcessRewards,
        /// Weights of tokens in the loss.
        aggregation: Aggregation,
        /// Correction for the difference between sampling and training policy.
        correction: Correction,
    }
    plain {
        /// Variant of another system.
        dialect: Dialect,
        /// The ratio is clipped below `1 - clip_low`.
        clip_low: f32,
        /// The ratio is clipped above `1 + clip_high`.
        clip_high: f32,
        /// Maximum ratio for tokens with negative advantage, above `1 + clip_high`.
        dual_clip: f32,
        /// Temperature of SAPO's gate for positive advantages.
        tau_pos: f32,
        /// Temperature of SAPO's gate for negative advantages.
        tau_neg: f32,
        /// Added to a standard deviation before division.
        std_epsilon: f64,
        /// Discount per token (GiGPO: per turn), 0 to 1.
        gamma: f64,
        /// GAE parameter over tokens, 0 to 1.
        lambda: f64,
        /// Discount per turn of turn-level GAE, 0 to 1.
        gamma_turn: f64,
        /// GAE parameter over turns, 0 to 1.
        lambda_turn: f64,
        /// Weight of GiGPO's step advantage, 0 or above.
        omega: f64,
        /// Inverse temperature of the DPO margin, above 0.
        beta: f64,
        /// Weight of the teacher's log-ratio in the advantage, 0 or above.
        distill: f64,
        /// Scope of advantage whitening.
        normalize: Normalize,
        /// Reward shaping.
        rewards: RewardConfig,
        /// Soft length penalty.
        overlong: Overlong,
        /// Treatment of truncated episodes.
        truncated: Truncated,
        /// Treatment of groups with equal rewards.
        equal_groups: EqualGroups,
        /// Maximum rounds that replace dropped groups, 0 to 100.
        refill: u32,
        /// Share of groups to keep, by reward deviation, above 0 and at most 1.
        keep_top_std: f64,
        /// Choice among an oversampled group.
        resample: Resample,
        /// Train on successful episodes only.
        only_success: bool,
        /// KL term to the reference model.
        kl: KlConfig,
        /// Distance to the teacher's distribution.
        teacher_kl: TeacherConfig,
        /// Factor of the entropy bonus, 0 or above.
        entropy: f32,
        /// Factor of the value loss, above 0.
        value_coefficient: f32,
        /// Clip range of the value loss, above 0.
        value_clip: f32,
    }
}

impl AlgorithmConfig {
    /// Resolves the section for a run.
    ///
    /// # Errors
    /// The first invalid option, or a combination that cannot work in this run.
    pub fn resolve(&self, facts: &RunFacts) -> Result<Algorithm, ConfigError> {
        let c = self.composition(facts.group_size)?;
        c.check(facts)?;
        Ok(Algorithm::from_checked(c, facts.group_size))
    }

    /// Returns the preset with the options of the section. Does not check it against a run.
    ///
    /// # Errors
    /// [`ConfigError::NoEffect`] for an option that the algorithm does not read.
    pub fn composition(&self, group_size: usize) -> Result<Composition, ConfigError> {
        let mut c = self.kind.preset();
        if let Some(resample) = &mut c.filters.resample {
            // rStar2-Agent keeps half of the sampled episodes.
            resample.keep = group_size / 2;
        }
        if let Some(dialect) = self.dialect {
            dialect.apply(self.kind, &mut c)?;
        }
        set(&mut c.advantage, self.advantage);
        set(&mut c.loss.surrogate, self.surrogate.clone());
        self.apply_clip(&mut c)?;
        self.apply_soft(&mut c)?;
        self.apply_scale(&mut c)?;
        self.apply_discounts(&mut c)?;
        self.apply_rewards(&mut c)?;
        self.apply_filters(&mut c)?;
        self.apply_loss(&mut c)?;
        self.apply_kl(&mut c)?;
        if let Some(configured) = self.teacher_kl {
            let teacher = &mut c.loss.teacher;
            let teacher = teacher.get_or_insert(crate::algorithms::opd_top_k::TEACHER);
            set(&mut teacher.top_k, configured.top_k);
            set(&mut teacher.divergence, configured.divergence);
            set(&mut teacher.coefficient, configured.coefficient);
        }
        Ok(c)
    }

    fn no_effect(&self, field: &'static str, reason: &'static str) -> ConfigError {
        ConfigError::NoEffect {
            field,
            kind: self.kind,
            reason,
        }
    }

    /// Sets `target` to the configured value. A configured value without a target is an error.
    fn place<T>(
        &self,
        field: &'static str,
        reason: &'static str,
        target: Option<&mut T>,
        configured: Option<T>,
    ) -> Result<(), ConfigError> {
        match (target, configured) {
            (Some(target), Some(value)) => *target = value,
            (None, Some(_)) => return Err(self.no_effect(field, reason)),
            (_, None) => {}
        }
        Ok(())
    }

    fn apply_clip(&self, c: &mut Composition) -> Result<(), ConfigError> {
        let mut clip_high = self.clip_high;
        if let (Some(Dialect::Trl), Surrogate::Cispo { .. }) = (self.dialect, &c.loss.surrogate) {
            // TRL configures the maximum ratio itself, not its distance from 1.
            clip_high = clip_high.map(|high| high - 1.0);
        }
        let (low, high, dual) = match &mut c.loss.surrogate {
            Surrogate::Clip { low, high, dual } => (Some(low), Some(high), Some(dual)),
            Surrogate::SequenceClip { low, high }
            | Surrogate::SequenceTokenClip { low, high }
            | Surrogate::Cispo { low, high } => (Some(low), Some(high), None),
            _ => (None, None, None),
        };
        let reason = "its surrogate is not clipped";
        self.place("clip_low", reason, low, self.clip_low)?;
        self.place("clip_high", reason, high, clip_high)?;
        let reason = "its surrogate is not the token clip";
        self.place("dual_clip", reason, dual, self.dual_clip.map(Some))
    }

    fn apply_soft(&self, c: &mut Composition) -> Result<(), ConfigError> {
        let (pos, neg) = match &mut c.loss.surrogate {
            Surrogate::Soft { tau_pos, tau_neg } => (Some(tau_pos), Some(tau_neg)),
            _ => (None, None),
        };
        let reason = "its surrogate is not the soft gate";
        self.place("tau_pos", reason, pos, self.tau_pos)?;
        self.place("tau_neg", reason, neg, self.tau_neg)
    }

    fn apply_scale(&self, c: &mut Composition) -> Result<(), ConfigError> {
        let scale = match &mut c.advantage {
            Advantage::Group { scale, .. } => Some(scale),
            _ => None,
        };
        let reason = "its advantage is not compared within groups alone";
        self.place("scale", reason, scale, self.scale)?;
        let epsilon = match &mut c.advantage {
            Advantage::Group {
                scale: Scale::GroupStd { epsilon } | Scale::EnvironmentStd { epsilon },
                ..
            } => Some(epsilon),
            Advantage::Gigpo { std_epsilon, .. } => std_epsilon.as_mut(),
            _ => None,
        };
        let reason = "it does not divide by a standard deviation";
        self.place("std_epsilon", reason, epsilon, self.std_epsilon)
    }

    fn apply_discounts(&self, c: &mut Composition) -> Result<(), ConfigError> {
        let (mut g, mut l, mut turn) = (None, None, (None, None));
        let (mut o, mut b) = (None, None);
        match &mut c.advantage {
            Advantage::ReturnToGo { gamma } => g = Some(gamma),
            Advantage::Gae { gamma, lambda } => (g, l) = (Some(gamma), Some(lambda)),
            Advantage::TurnGae {
                gamma_turn,
                lambda_turn,
                gamma,
                lambda,
            } => {
                (g, l) = (Some(gamma), Some(lambda));
                turn = (Some(gamma_turn), Some(lambda_turn));
            }
            Advantage::Gigpo { omega, gamma, .. } => (g, o) = (Some(gamma), Some(omega)),
            Advantage::Preference { beta } => b = Some(beta),
            Advantage::Group { .. } | Advantage::One | Advantage::None => {}
        }
        self.place("gamma", "it discounts nothing", g, self.gamma)?;
        self.place("lambda", "it is not GAE", l, self.lambda)?;
        let reason = "it is not GAE over turns";
        self.place("gamma_turn", reason, turn.0, self.gamma_turn)?;
        self.place("lambda_turn", reason, turn.1, self.lambda_turn)?;
        self.place("omega", "it compares no states", o, self.omega)?;
        self.place("beta", "it has no preference margin", b, self.beta)
    }

    fn apply_rewards(&self, c: &mut Composition) -> Result<(), ConfigError> {
        let configured = [
            ("process", self.process.is_some()),
            ("rewards", self.rewards.is_some()),
            ("overlong", self.overlong.is_some()),
        ];
        let blind = matches!(c.advantage, Advantage::One | Advantage::None);
        if let (true, Some((field, _))) = (blind, configured.iter().find(|t| t.1)) {
            return Err(self.no_effect(field, "it does not read rewards"));
        }
        let constant = matches!(c.advantage, Advantage::One | Advantage::Preference { .. });
        if constant && self.normalize.is_some() {
            return Err(self.no_effect("normalize", "its weights are not advantages to whiten"));
        }
        set(&mut c.normalize, self.normalize);
        set(&mut c.distill, self.distill);
        set(&mut c.rewards.process, self.process);
        set(&mut c.rewards.overlong, self.overlong.map(Some));
        if let Some(r) = self.rewards {
            set(&mut c.rewards.bias, r.bias);
            set(&mut c.rewards.scale, r.scale);
            set(&mut c.rewards.clip, r.clip.map(Some));
        }
        Ok(())
    }

    fn apply_filters(&self, c: &mut Composition) -> Result<(), ConfigError> {
        let compares = c.advantage.compares();
        let equal = Some(&mut c.filters.equal_groups).filter(|_| compares);
        let reason = "it does not compare the episodes of a group";
        self.place("equal_groups", reason, equal, self.equal_groups)?;
        let drops = c.filters.equal_groups == EqualGroups::Drop;
        c.filters.refill = c.filters.refill.filter(|_| drops);
        let refill = Some(&mut c.filters.refill).filter(|_| drops);
        let reason = "no group leaves the batch for its rewards; set equal_groups = \"drop\"";
        self.place("refill", reason, refill, self.refill.map(Some))?;
        set(&mut c.filters.truncated, self.truncated);
        set(&mut c.filters.keep_top_std, self.keep_top_std.map(Some));
        set(&mut c.filters.resample, self.resample.map(Some));
        set(&mut c.filters.only_success, self.only_success);
        Ok(())
    }

    fn apply_loss(&self, c: &mut Composition) -> Result<(), ConfigError> {
        if let Advantage::Preference { .. } = c.advantage {
            let reason = "a pair's log-probabilities are plain sums";
            let aggregation = None::<&mut Aggregation>;
            self.place("aggregation", reason, aggregation, self.aggregation)?;
        }
        set(&mut c.aggregation, self.aggregation);
        set(&mut c.loss.correction, self.correction.clone());
        set(&mut c.loss.entropy, self.entropy);
        if !c.advantage.needs_values() {
            // The preset had a critic, and the configured estimator has none.
            c.loss.value = None;
        } else if c.loss.value.is_none() {
            c.loss.value = Some(crate::algorithms::ppo::VALUE);
        }
        let (coefficient, clip) = match &mut c.loss.value {
            Some((coefficient, clip)) => (Some(coefficient), Some(clip)),
            None => (None, None),
        };
        let reason = "it has no critic";
        self.place(
            "value_coefficient",
            reason,
            coefficient,
            self.value_coefficient,
        )?;
        self.place("value_clip", reason, clip, self.value_clip.map(Some))
    }

    fn apply_kl(&self, c: &mut Composition) -> Result<(), ConfigError> {
        let Some(kl) = self.kl else { return Ok(()) };
        match kl.place {
            KlPlace::Loss => {
                c.loss.kl = Some(KlSpec {
                    estimator: kl.estimator.unwrap_or(KlEstimator::K3),
                    coefficient: kl.coefficient,
                });
            }
            KlPlace::Reward => {
                if kl.estimator.is_some_and(|e| e != KlEstimator::K1) {
                    return Err(ConfigError::impossible(
                        "kl.place = \"reward\" takes estimator k1 alone: the gradient of k2 and \
                         k3 through a reward is not that of the KL divergence"
                            .to_owned(),
                    ));
                }
                c.rewards.kl = f64::from(kl.coefficient);
            }
        }
        Ok(())
    }
}

/// Sets `target` if there is a configured value.
fn set<T>(target: &mut T, configured: Option<T>) {
    if let Some(value) = configured {
        *target = value;
    }
}
