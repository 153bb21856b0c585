//! Variants of algorithms in other systems, where they differ from the papers.
//!
//! A dialect changes the preset before the options of a recipe apply. Known defects are not reproduced: a
//! group of one that trains on its raw reward, groups by equal prompts, and reference log-probabilities that
//! are silently zero.

use crate::composition::{Advantage, Composition, EqualGroups, Normalize, Scale};
use crate::error::ConfigError;
use crate::kind::AlgorithmKind as Kind;
use serde::{Deserialize, Serialize};
use sinew_types::{Aggregation, Correction, Surrogate};

/// System whose variant is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Dialect {
    /// TRL (`huggingface/trl`): variants of `grpo`, `gspo` and `cispo`.
    Trl,
    /// verl (`verl-project/verl`): variants of `grpo`, `gspo` and `ppo`.
    Verl,
    /// slime (`THUDM/slime`): variants of `gspo` and `ppo`.
    Slime,
    /// Relax (`redai-studio/Relax`): variants of `gspo`, `rloo` and `ppo`; refused for `cispo`.
    Relax,
    /// AReaL: variants of `grpo`, `gspo`, `sapo`, `ppo` and `decoupled_ppo`.
    Areal,
    /// OpenRLHF: variants of `grpo` and `gspo`.
    Openrlhf,
    /// NeMo RL (`NVIDIA-NeMo/RL`): variants of `grpo` and `ppo`.
    NemoRl,
    /// prime-rl (`PrimeIntellect-ai/prime-rl`): variant of `grpo`.
    PrimeRl,
    /// ROLL: variant of `ppo`.
    Roll,
}

impl Dialect {
    /// All systems.
    pub const ALL: [Self; 9] = [
        Self::Trl,
        Self::Verl,
        Self::Slime,
        Self::Relax,
        Self::Areal,
        Self::Openrlhf,
        Self::NemoRl,
        Self::PrimeRl,
        Self::Roll,
    ];

    /// Changes a preset to the variant of this system.
    ///
    /// # Errors
    /// [`ConfigError::NoEffect`] if no difference is known.
    pub fn apply(self, kind: Kind, c: &mut Composition) -> Result<(), ConfigError> {
        let before = c.clone();
        match kind {
            Kind::Grpo => self.grpo(c),
            Kind::Gspo => self.gspo(c),
            Kind::Cispo => self.cispo()?,
            Kind::Sapo if self == Self::Areal => c.aggregation = Aggregation::TokenMean,
            Kind::Rloo if self == Self::Relax => c.aggregation = Aggregation::TokenMean,
            Kind::Ppo => self.ppo(c),
            Kind::DecoupledPpo if self == Self::Areal => clip(c, 0.4, 0.4),
            _ => {}
        }
        // The cap of TRL is absolute and applies only to a configured `clip_high`.
        if *c == before && !(kind == Kind::Cispo && self == Self::Trl) {
            return Err(ConfigError::NoEffect {
                field: "dialect",
                kind,
                reason: "no difference of this system is known",
            });
        }
        Ok(())
    }

    /// Sets ε of the standard deviation, aggregation and correction.
    fn grpo(self, c: &mut Composition) {
        let epsilon = match self {
            Self::Trl => 1e-4,
            Self::Areal => 1e-5,
            Self::Openrlhf => 1e-9,
            _ => 1e-6,
        };
        match self {
            // Equal to the preset.
            Self::Slime | Self::Relax | Self::Roll => return,
            // `R − mean` without division.
            Self::PrimeRl => set_scale(c, Scale::One),
            _ => set_scale(c, Scale::GroupStd { epsilon }),
        }
        c.aggregation = Aggregation::TokenMean;
        match (self, &mut c.loss.surrogate) {
            // The dual clip is on by default.
            (Self::Verl, Surrogate::Clip { dual, .. }) => *dual = Some(3.0),
            // `vllm_importance_sampling_correction`, on by default: mode `sequence_mask`, at most 3.
            (Self::Trl, _) => c.loss.correction = Correction::SequenceMask { high: 3.0 },
            // Default loss: no clip but a trust region around the sampling policy. Groups without advantage
            // leave the batch.
            (Self::PrimeRl, surrogate) => {
                c.filters.equal_groups = EqualGroups::Drop;
                *surrogate = Surrogate::TrustRegion {
                    limit: 0.2,
                    penalty: 1e-3,
                }
            }
            _ => {}
        }
    }

    /// These systems keep the token clip of 0.2 for the sequence ratio, a thousand times the paper's value.
    fn gspo(self, c: &mut Composition) {
        match self {
            Self::Verl | Self::Slime | Self::Relax | Self::Openrlhf | Self::Trl => {
                clip(c, 0.2, 0.2)
            }
            Self::Areal => {
                clip(c, 0.2, 0.2);
                c.aggregation = Aggregation::TokenMean;
            }
            _ => {}
        }
    }

    fn cispo(self) -> Result<(), ConfigError> {
        if self == Self::Relax {
            return Err(ConfigError::impossible(
                "dialect `relax` of `cispo` bounds the ratio on one side only, so that a token \
                 with negative advantage has an unbounded weight; no loss here does that"
                    .to_owned(),
            ));
        }
        Ok(())
    }

    fn ppo(self, c: &mut Composition) {
        match (self, &mut c.advantage, &mut c.loss.surrogate) {
            (Self::Roll, Advantage::Gae { lambda, .. }, _) => *lambda = 0.95,
            (Self::Verl, _, Surrogate::Clip { dual, .. }) => *dual = Some(3.0),
            // Whitening is optional in these systems, and off by default.
            (Self::Areal | Self::Slime | Self::Relax | Self::NemoRl, ..) => {
                c.normalize = Normalize::None;
            }
            _ => {}
        }
    }
}

fn set_scale(c: &mut Composition, to: Scale) {
    if let Advantage::Group { scale, .. } = &mut c.advantage {
        *scale = to;
    }
}

fn clip(c: &mut Composition, to_low: f32, to_high: f32) {
    if let Surrogate::Clip { low, high, .. } | Surrogate::SequenceClip { low, high } =
        &mut c.loss.surrogate
    {
        (*low, *high) = (to_low, to_high);
    }
}
