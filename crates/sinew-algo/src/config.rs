//! What was typed: `type = "grpo"` and the options that differ from its preset.
//!
//! [`AlgorithmConfig::resolve`] turns it into what runs, and refuses options without effect.

use crate::algorithms;
use crate::composition::{
    Advantage, Composition, EqualGroups, Normalize, Overlong, ProcessRewards, Resample, RunFacts,
    Scale, Truncated,
};
use crate::pipeline::Algorithm;
use serde::{Deserialize, Serialize};
use sinew_types::{Aggregation, Correction, KlEstimator, KlSpec, Surrogate};
use std::fmt;

/// An algorithm by name. One file of [`crate::algorithms`] each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AlgorithmKind {
    Grpo,
    DrGrpo,
    Dapo,
    Rloo,
    Reinforce,
}

impl AlgorithmKind {
    /// All of them, in the order of the documentation.
    pub const ALL: [Self; 5] = [
        Self::Grpo,
        Self::DrGrpo,
        Self::Dapo,
        Self::Rloo,
        Self::Reinforce,
    ];

    /// The name in a recipe.
    pub fn name(self) -> &'static str {
        match self {
            Self::Grpo => "grpo",
            Self::DrGrpo => "dr_grpo",
            Self::Dapo => "dapo",
            Self::Rloo => "rloo",
            Self::Reinforce => "reinforce",
        }
    }

    /// The composition that the name stands for.
    pub fn preset(self) -> Composition {
        match self {
            Self::Grpo => algorithms::grpo::preset(),
            Self::DrGrpo => algorithms::dr_grpo::preset(),
            Self::Dapo => algorithms::dapo::preset(),
            Self::Rloo => algorithms::rloo::preset(),
            Self::Reinforce => algorithms::reinforce::preset(),
        }
    }
}

impl fmt::Display for AlgorithmKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Where a KL term acts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum KlPlace {
    /// A term of the loss, differentiated.
    #[default]
    Loss,
    /// Subtracted from each token's reward.
    Reward,
}

/// A KL term as typed.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KlConfig {
    #[serde(default)]
    pub place: KlPlace,
    /// Default: `k3` in the loss, `k1` in the reward.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub estimator: Option<KlEstimator>,
    pub coefficient: f32,
}

/// Reward shaping as typed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RewardConfig {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bias: Option<f64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scale: Option<f64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub clip: Option<f64>,
}

/// The `[algorithm]` table of a recipe. What is left out comes from the preset of `type`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AlgorithmConfig {
    #[serde(rename = "type")]
    pub kind: AlgorithmKind,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub clip_low: Option<f32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub clip_high: Option<f32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dual_clip: Option<f32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub std_epsilon: Option<f64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub normalize: Option<Normalize>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub process: Option<ProcessRewards>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rewards: Option<RewardConfig>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub overlong: Option<Overlong>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub truncated: Option<Truncated>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub equal_groups: Option<EqualGroups>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keep_top_std: Option<f64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resample: Option<Resample>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub only_success: Option<bool>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub aggregation: Option<Aggregation>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub correction: Option<Correction>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kl: Option<KlConfig>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub entropy: Option<f32>,
}

/// Why an algorithm cannot run as configured.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum ConfigError {
    #[error("algorithm.{field} is {value}, allowed: {allowed}")]
    Range {
        field: &'static str,
        value: f64,
        allowed: &'static str,
    },
    #[error("algorithm.{field} has no effect on `{kind}`: {reason}; remove it")]
    NoEffect {
        field: &'static str,
        kind: AlgorithmKind,
        reason: &'static str,
    },
    #[error("{reason}")]
    Impossible { reason: String },
}

impl ConfigError {
    pub(crate) fn impossible(reason: String) -> Self {
        Self::Impossible { reason }
    }
}

impl AlgorithmConfig {
    /// The preset of `kind`, nothing changed.
    pub fn new(kind: AlgorithmKind) -> Self {
        Self {
            kind,
            clip_low: None,
            clip_high: None,
            dual_clip: None,
            std_epsilon: None,
            normalize: None,
            process: None,
            rewards: None,
            overlong: None,
            truncated: None,
            equal_groups: None,
            keep_top_std: None,
            resample: None,
            only_success: None,
            aggregation: None,
            correction: None,
            kl: None,
            entropy: None,
        }
    }

    /// What runs, or why it cannot.
    pub fn resolve(&self, facts: &RunFacts) -> Result<Algorithm, ConfigError> {
        let mut c = self.kind.preset();
        self.apply_clip(&mut c)?;
        self.apply_advantage(&mut c)?;
        self.apply_rewards(&mut c)?;
        self.apply_filters(&mut c)?;
        self.apply_loss(&mut c)?;
        c.check(facts)?;
        Ok(Algorithm::from_checked(c, facts.group_size))
    }

    fn no_effect(&self, field: &'static str, reason: &'static str) -> ConfigError {
        ConfigError::NoEffect {
            field,
            kind: self.kind,
            reason,
        }
    }

    fn apply_clip(&self, c: &mut Composition) -> Result<(), ConfigError> {
        let reason = "its surrogate is not clipped";
        let bounds = match &mut c.loss.surrogate {
            Surrogate::Clip { low, high, .. }
            | Surrogate::SequenceClip { low, high }
            | Surrogate::Cispo { low, high } => Some((low, high)),
            _ => None,
        };
        match bounds {
            Some((low, high)) => {
                set(low, self.clip_low);
                set(high, self.clip_high);
            }
            None if self.clip_low.is_some() => return Err(self.no_effect("clip_low", reason)),
            None if self.clip_high.is_some() => return Err(self.no_effect("clip_high", reason)),
            None => {}
        }
        match &mut c.loss.surrogate {
            Surrogate::Clip { dual, .. } => set(dual, self.dual_clip.map(Some)),
            _ if self.dual_clip.is_some() => {
                return Err(self.no_effect("dual_clip", "its surrogate is not the token clip"));
            }
            _ => {}
        }
        Ok(())
    }

    fn apply_advantage(&self, c: &mut Composition) -> Result<(), ConfigError> {
        if let Some(epsilon) = self.std_epsilon {
            match &mut c.advantage {
                Advantage::Group {
                    scale: Scale::GroupStd { epsilon: e } | Scale::EnvironmentStd { epsilon: e },
                    ..
                } => *e = epsilon,
                _ => {
                    let reason = "it does not divide by a standard deviation";
                    return Err(self.no_effect("std_epsilon", reason));
                }
            }
        }
        set(&mut c.normalize, self.normalize);
        Ok(())
    }

    fn apply_rewards(&self, c: &mut Composition) -> Result<(), ConfigError> {
        if c.advantage == Advantage::One {
            let reason = "it does not read rewards";
            let typed = [
                ("process", self.process.is_some()),
                ("rewards", self.rewards.is_some()),
                ("overlong", self.overlong.is_some()),
                ("normalize", self.normalize.is_some()),
            ];
            if let Some((field, _)) = typed.iter().find(|(_, typed)| *typed) {
                return Err(self.no_effect(field, reason));
            }
        }
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
        if self.equal_groups.is_some() && !c.advantage.compares() {
            let reason = "it does not compare the episodes of a group";
            return Err(self.no_effect("equal_groups", reason));
        }
        set(&mut c.filters.truncated, self.truncated);
        set(&mut c.filters.equal_groups, self.equal_groups);
        set(&mut c.filters.keep_top_std, self.keep_top_std.map(Some));
        set(&mut c.filters.resample, self.resample.map(Some));
        set(&mut c.filters.only_success, self.only_success);
        Ok(())
    }

    fn apply_loss(&self, c: &mut Composition) -> Result<(), ConfigError> {
        set(&mut c.aggregation, self.aggregation);
        set(&mut c.loss.correction, self.correction.clone());
        set(&mut c.loss.entropy, self.entropy);
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

/// Overwrites where something was typed.
fn set<T>(target: &mut T, typed: Option<T>) {
    if let Some(value) = typed {
        *target = value;
    }
}
