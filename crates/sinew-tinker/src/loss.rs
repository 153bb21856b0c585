//! The losses of the protocol: names, configuration, inputs, and the loss of the trainer that each one is.
//!
//! With `ℓ` the log-probability of a target, `q` the sampler's (`logprobs`), `r = exp(ℓ − q)`, `A` the
//! advantage, and sums over all positions of all datums:
//!
//! | `loss_fn` | loss | inputs besides `target_tokens` | `loss_fn_config` |
//! |---|---|---|---|
//! | `cross_entropy` | `−Σ weights ℓ` | `weights` (1 if absent); targets and weights `[N]` or `[N, K]` | |
//! | `importance_sampling` | `−Σ r A` | `logprobs`, `advantages` | |
//! | `ppo` | `−Σ min(r A, clip(r, low, high) A)` | as above, thresholds by position | `clip_low_threshold` 0.8, `clip_high_threshold` 1.2 |
//! | `cispo` | `−Σ sg(clip(r, low, high)) ℓ A` | as `ppo` | `clip_low_threshold` 0, `clip_high_threshold` 4 |
//! | `dro` | `−Σ (ℓ A − ½ beta (ℓ − q)²)` | `logprobs`, `advantages` | `beta`, required |
//! | `gspo` | `−Σ min(s A, clip(s, low, high) A)`, `s = sg(exp(mean(ℓ − q))) exp(ℓ − sg(ℓ))` | as `ppo`, and `sequence_ratio_mask`, which marks the positions of the mean | both thresholds, required unless given by position |
//!
//! `sg` passes no gradient. Thresholds are ratios, not distances from 1. No loss is a mean.
//! The penalty of `dro` is that of every position, also of a prompt with `q = 0`: it is defined without a
//! mask. Log-ratios are bounded by ±20 before `exp`, as in every loss of the trainer.
//!
//! Sources: the losses, inputs and defaults that Thinking Machines documents
//! (<https://tinker-docs.thinkingmachines.ai/tinker/losses/>); Schulman et al. 2017 (arXiv 1707.06347),
//! MiniMax 2025 (arXiv 2506.13585), Richemond et al. 2024 (arXiv 2405.19107), Zheng et al. 2025 (arXiv
//! 2507.18071). There is no documented default of `beta` or of the thresholds of `gspo`, so they have to be
//! given.
//!
//! Two losses are refused. `stable_reinforce` has no published objective. `custom` is a graph of any PyTorch
//! operations; a service that does not announce `custom_loss_server_side` lets the SDK compute it, for every
//! operation, through `forward` and `cross_entropy`.

mod columns;

pub(crate) use columns::{Columns, Space};

use crate::error::TinkerError;
use crate::types::{LossRequest, LossValue};
use sinew_types::{LossSpec, Surrogate};
use std::collections::BTreeMap;

/// Configuration key and input of the lowest ratio that a clip leaves as it is.
const LOW: &str = "clip_low_threshold";
/// Configuration key and input of the highest ratio that a clip leaves as it is.
const HIGH: &str = "clip_high_threshold";
/// Configuration key of the penalty of `dro`.
const BETA: &str = "beta";

/// A loss with its configuration, both checked.
#[derive(Clone, Debug, PartialEq)]
pub struct Loss {
    kind: Kind,
    /// Thresholds of the configuration, which for some losses have defaults and can be given by position.
    low: Option<f32>,
    high: Option<f32>,
    /// Penalty of `dro`; 0 for other losses.
    beta: f32,
}

/// The served losses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    CrossEntropy,
    ImportanceSampling,
    Ppo,
    Cispo,
    Dro,
    Gspo,
}

impl Kind {
    const ALL: [Self; 6] = [
        Self::CrossEntropy,
        Self::ImportanceSampling,
        Self::Ppo,
        Self::Cispo,
        Self::Dro,
        Self::Gspo,
    ];

    const fn name(self) -> &'static str {
        match self {
            Self::CrossEntropy => "cross_entropy",
            Self::ImportanceSampling => "importance_sampling",
            Self::Ppo => "ppo",
            Self::Cispo => "cispo",
            Self::Dro => "dro",
            Self::Gspo => "gspo",
        }
    }

    /// Keys of `loss_fn_config`.
    fn keys(self) -> &'static [&'static str] {
        match self {
            Self::CrossEntropy | Self::ImportanceSampling => &[],
            Self::Ppo | Self::Cispo | Self::Gspo => &[LOW, HIGH],
            Self::Dro => &[BETA],
        }
    }

    /// Names of `loss_fn_inputs`, the required ones first.
    fn inputs(self) -> &'static [&'static str] {
        match self {
            Self::CrossEntropy => &["target_tokens", "weights"],
            Self::ImportanceSampling | Self::Dro => &["target_tokens", "logprobs", "advantages"],
            Self::Ppo | Self::Cispo => &["target_tokens", "logprobs", "advantages", LOW, HIGH],
            Self::Gspo => &[
                "target_tokens",
                "logprobs",
                "advantages",
                "sequence_ratio_mask",
                LOW,
                HIGH,
            ],
        }
    }

    fn is_clipped(self) -> bool {
        matches!(self, Self::Ppo | Self::Cispo | Self::Gspo)
    }

    /// Documented threshold of a clip's lower bound.
    fn low(self) -> Option<f32> {
        match self {
            Self::Ppo => Some(0.8),
            Self::Cispo => Some(0.0),
            _ => None,
        }
    }

    /// Documented threshold of a clip's upper bound.
    fn high(self) -> Option<f32> {
        match self {
            Self::Ppo => Some(1.2),
            Self::Cispo => Some(4.0),
            _ => None,
        }
    }
}

impl Loss {
    /// Names of the served losses.
    pub const NAMES: [&'static str; 6] = [
        Kind::CrossEntropy.name(),
        Kind::ImportanceSampling.name(),
        Kind::Ppo.name(),
        Kind::Cispo.name(),
        Kind::Dro.name(),
        Kind::Gspo.name(),
    ];

    /// Checks the name and the configuration of a loss.
    ///
    /// # Errors
    /// If the loss is not served, a key is unknown, missing or of another type, or a number is out of range.
    pub fn parse(request: &LossRequest) -> Result<Self, TinkerError> {
        let kind = Kind::ALL
            .into_iter()
            .find(|kind| kind.name() == request.name)
            .ok_or_else(|| not_served(&request.name))?;
        let config = &request.config;
        if let Some(key) = config
            .keys()
            .find(|key| !kind.keys().contains(&key.as_str()))
        {
            let allowed = match kind.keys() {
                [] => format!("no keys for {}", kind.name()),
                keys => format!("keys {} for {}", keys.join(", "), kind.name()),
            };
            return Err(TinkerError::value("a key of loss_fn_config", key, allowed));
        }
        let loss = Self {
            kind,
            low: number(config, LOW)?,
            high: number(config, HIGH)?,
            beta: number(config, BETA)?.unwrap_or_default(),
        };
        if kind == Kind::Dro && !config.contains_key(BETA) {
            return Err(TinkerError::missing(
                "loss_fn_config.beta",
                "dro has no documented default of its penalty; its documentation uses 0.05",
            ));
        }
        loss.check_thresholds()?;
        Ok(loss)
    }

    /// Name of the loss on the wire.
    pub fn name(&self) -> &'static str {
        self.kind.name()
    }

    fn check_thresholds(&self) -> Result<(), TinkerError> {
        let low = self.low.or(self.kind.low());
        let high = self.high.or(self.kind.high());
        match (low, high) {
            (Some(low), Some(high)) if low > high => Err(TinkerError::value(
                format!("loss_fn_config.{LOW}"),
                low,
                format!("at most {HIGH}, which is {high}"),
            )),
            _ => Ok(()),
        }
    }

    /// The loss of the trainer. Bounds of the ratio are columns ([`Columns`]), so its own are not read.
    pub(crate) fn spec(&self) -> LossSpec {
        let (low, high) = (0.0, 0.0);
        let surrogate = match self.kind {
            Kind::CrossEntropy => Surrogate::CrossEntropy,
            Kind::ImportanceSampling => Surrogate::Importance,
            Kind::Ppo => Surrogate::Clip {
                low,
                high,
                dual: None,
            },
            Kind::Cispo => Surrogate::Cispo { low, high },
            Kind::Dro => Surrogate::Dro { beta: self.beta },
            Kind::Gspo => Surrogate::SequenceTokenClip { low, high },
        };
        LossSpec::new(surrogate)
    }
}

/// A number of the configuration: finite, 0 or above.
fn number(config: &BTreeMap<String, LossValue>, key: &str) -> Result<Option<f32>, TinkerError> {
    let field = || format!("loss_fn_config.{key}");
    let allowed = "a finite number, 0 or above";
    match config.get(key) {
        None => Ok(None),
        Some(LossValue::Text(text)) => {
            Err(TinkerError::value(field(), format!("{text:?}"), allowed))
        }
        Some(&LossValue::Number(number)) => {
            let single = number as f32;
            if single.is_finite() && single >= 0.0 {
                Ok(Some(single))
            } else {
                Err(TinkerError::value(field(), number, allowed))
            }
        }
    }
}

/// Refuses a loss, with the reason and what to use in its place.
fn not_served(name: &str) -> TinkerError {
    match name {
        "stable_reinforce" => stability_not_served("loss_fn stable_reinforce"),
        "custom" => TinkerError::not_served(
            "loss_fn custom",
            "this service does not announce custom_loss_server_side, so that the SDK computes the loss itself: \
             pass the function, or a handle that was created with this service, to forward_backward_custom",
        ),
        _ => TinkerError::value(
            "loss_fn",
            format!("{name:?}"),
            format!("one of {}", Loss::NAMES.join(", ")),
        ),
    }
}

/// Refuses what only `stable_reinforce` needs: the loss itself, and records of samples for it.
pub(crate) fn stability_not_served(feature: &str) -> TinkerError {
    TinkerError::not_served(
        feature,
        "the objective of stable_reinforce is not published, and no other one is trained under its name: use \
         importance_sampling, ppo, cispo, dro or gspo, or forward_backward_custom with a function",
    )
}

#[cfg(test)]
mod tests;
