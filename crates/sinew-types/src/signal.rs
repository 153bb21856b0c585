//! The input of a trainer: rows of tokens with per-token signals, and the computation of the loss from them.
//! The trainer names no algorithm.

use crate::engine::{TEMPERATURES, TokenLogprob};
use crate::ids::{EpisodeId, PolicyVersion, TokenId};
use crate::routes::RouteSpan;
use serde::{Deserialize, Serialize};
use std::collections::HashMap;

/// One training sample: a leaf path of a trace, with per-token signals.
///
/// All vectors have the length of `tokens`. Entry `t` is about predicting `tokens[t]` from `tokens[..t]`;
/// entry 0 never trains. If `weights[t] == 0`, the other signals are ignored.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct TrainRow {
    /// The episode of the path.
    pub episode: EpisodeId,
    /// The path, prompt first, `[tokens]`.
    pub tokens: Vec<TokenId>,
    /// Share of the token in the loss, with the *global* denominator of the batch already
    /// applied: `loss = Σ weights[t] · L_t` over all rows, micro-batches and ranks.
    pub weights: Vec<f32>,
    /// Advantage of the token over the expectation; the surrogate reads it.
    pub advantages: Vec<f32>,
    /// Per-token sampling temperature, above 0. The policy is `softmax(logits / temperature)`, for
    /// log-probs and entropies alike. Empty: 1 for all.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub temperatures: Vec<f32>,
    /// Log-probabilities recorded by the engine that sampled the tokens.
    pub behaviour_logprobs: Vec<f32>,
    /// Log-probabilities of the frozen reference model; required if the loss has a KL term.
    pub ref_logprobs: Option<Vec<f32>>,
    /// Log-probabilities of the proximal policy; `None`: those of the trainer's first forward pass, or of the
    /// behaviour policy.
    pub prox_logprobs: Option<Vec<f32>>,
    /// Value estimates at sampling time, if there is a critic.
    pub values: Option<Vec<f32>>,
    /// The returns that the critic learns, if there is one.
    pub returns: Option<Vec<f32>>,
    /// A teacher's most likely tokens at each place, best first; required if the loss has a
    /// teacher term.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub teacher_top: Option<Vec<Vec<TokenLogprob>>>,
    /// The tokens that an output format allowed. The policy is the softmax over them, and so are all other
    /// log-probs, entropies and divergences of the token. `None`: no format.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub masks: Option<RowMasks>,
    /// Experts that a mixture-of-experts model chose for tokens of this row while it sampled, by position and
    /// without overlaps. A trainer that replays them uses the same ones; elsewhere its own routers choose.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub routes: Vec<RouteSpan>,
    /// Oldest weights that sampled a token of this row.
    pub oldest_version: PolicyVersion,
}

/// The tokens that were allowed in the places of a row, as bit sets without duplicates.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RowMasks {
    /// Words of one bit set: `vocabulary / 32`, rounded up.
    pub words_per_mask: u32,
    /// Bit sets one after the other: bit `v % 32` of word `v / 32` is 1 if token `v` is allowed.
    pub table: Vec<u32>,
    /// Bit set of each token of the row: its index in `table`, or [`RowMasks::ALL`].
    pub rows: Vec<u32>,
}

impl RowMasks {
    /// Entry of [`RowMasks::rows`] without a mask: all tokens are allowed.
    pub const ALL: u32 = u32::MAX;

    /// Collects the bit set of each token, `words` long; `None`: all tokens are allowed.
    pub fn gather<'a>(words: usize, each: impl IntoIterator<Item = Option<&'a [u32]>>) -> Self {
        let (mut table, mut rows) = (Vec::new(), Vec::new());
        let mut known: HashMap<&[u32], u32> = HashMap::new();
        for mask in each {
            let index = mask.map_or(Self::ALL, |mask| {
                *known.entry(mask).or_insert_with(|| {
                    table.extend_from_slice(mask);
                    (table.len() / words.max(1)) as u32 - 1
                })
            });
            rows.push(index);
        }
        Self {
            words_per_mask: words as u32,
            table,
            rows,
        }
    }

    /// The bit set of token `t` of the row; `None`: all tokens are allowed.
    pub fn mask(&self, t: usize) -> Option<&[u32]> {
        let index = self.rows.get(t).copied().filter(|&i| i != Self::ALL)? as usize;
        let words = self.words_per_mask as usize;
        self.table.get(index * words..(index + 1) * words)
    }

    /// Whether `id` was allowed in the place of token `t` of the row.
    pub fn allows(&self, t: usize, id: TokenId) -> bool {
        let bit = |mask: &[u32]| {
            mask.get(id as usize / 32)
                .is_some_and(|w| w >> (id % 32) & 1 == 1)
        };
        self.mask(t).is_none_or(bit)
    }

    /// Checks the table, and that each token was allowed where it is trained.
    fn validate(&self, tokens: &[TokenId], weights: &[f32]) -> Result<(), String> {
        let words = self.words_per_mask as usize;
        if words == 0 || !self.table.len().is_multiple_of(words) {
            return Err(format!(
                "table has {} words, expected a multiple of words_per_mask = {words}, above 0",
                self.table.len()
            ));
        }
        if self.rows.len() != tokens.len() {
            let (actual, expected) = (self.rows.len(), tokens.len());
            return Err(format!("rows has {actual} entries, expected {expected}"));
        }
        let masks = self.table.len() / words;
        let outside = |&i: &u32| i != Self::ALL && i as usize >= masks;
        if let Some(t) = self.rows.iter().position(outside) {
            let index = self.rows[t];
            return Err(format!("rows[{t}] is {index}, the table has {masks} masks"));
        }
        let barred = |&t: &usize| weights[t] != 0.0 && !self.allows(t, tokens[t]);
        match (0..tokens.len()).find(barred) {
            Some(t) => Err(format!("bars token {} at {t}, which is trained", tokens[t])),
            None => Ok(()),
        }
    }

    /// Checks that a teacher names only allowed tokens where the row is trained.
    fn validate_teacher(&self, top: &[Vec<TokenLogprob>], weights: &[f32]) -> Result<(), String> {
        let trained = top.iter().enumerate().filter(|(t, _)| weights[*t] != 0.0);
        for (t, top) in trained {
            if let Some(barred) = top.iter().find(|top| !self.allows(t, top.id)) {
                return Err(format!(
                    "bars token {} that teacher_top[{t}] names",
                    barred.id
                ));
            }
        }
        Ok(())
    }
}

/// Reason why a row is not fit to train on.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum TrainRowError {
    /// A column whose length is not the number of tokens.
    #[error("row of episode {episode}: {field} has {actual} entries, expected {expected}")]
    Length {
        /// Id of the row's episode.
        episode: EpisodeId,
        /// Name of the column.
        field: &'static str,
        /// Entries of the column.
        actual: usize,
        /// Tokens of the row.
        expected: usize,
    },
    /// A NaN or an infinity that would reach the loss.
    #[error("row of episode {episode}: {field}[{index}] is {value}")]
    NotFinite {
        /// Id of the row's episode.
        episode: EpisodeId,
        /// Name of the column.
        field: &'static str,
        /// Index of the token in the row.
        index: usize,
        /// The value that is not finite.
        value: f32,
    },
    /// Token 0 is trained, although no token precedes it.
    #[error(
        "row of episode {episode}: the first token has weight {weight}, it cannot be predicted"
    )]
    FirstToken {
        /// Id of the row's episode.
        episode: EpisodeId,
        /// Weight of token 0.
        weight: f32,
    },
    /// Masks that are malformed, or that forbid a trained token or one of the teacher's.
    #[error("row of episode {episode}: masks: {why}")]
    Masks {
        /// Id of the row's episode.
        episode: EpisodeId,
        /// Reason in words.
        why: String,
    },
    /// Experts of tokens that the row does not have, or spans that overlap or are of different models.
    #[error("row of episode {episode}: routes {why}")]
    Routes {
        /// Id of the row's episode.
        episode: EpisodeId,
        /// Reason in words, which follows the field's name.
        why: String,
    },
    /// A trained token has a temperature that no sampler uses.
    #[error(
        "row of episode {episode}: temperatures[{index}] is {value}: of a trained token it is {} to {} (1 for \
         one chosen greedily)",
        TEMPERATURES.start(),
        TEMPERATURES.end()
    )]
    Temperature {
        /// Id of the row's episode.
        episode: EpisodeId,
        /// Index of the token in the row.
        index: usize,
        /// Temperature outside [`TEMPERATURES`].
        value: f32,
    },
}

impl TrainRow {
    /// The temperature at which token `t` is trained.
    pub fn temperature(&self, t: usize) -> f32 {
        self.temperatures.get(t).copied().unwrap_or(1.0)
    }

    /// Checks lengths, finiteness where the token trains, and that token 0 does not train.
    pub fn validate(&self) -> Result<(), TrainRowError> {
        let n = self.tokens.len();
        let columns = [
            ("weights", Some(&self.weights)),
            ("advantages", Some(&self.advantages)),
            (
                "temperatures",
                Some(&self.temperatures).filter(|t| !t.is_empty()),
            ),
            ("behaviour_logprobs", Some(&self.behaviour_logprobs)),
            ("ref_logprobs", self.ref_logprobs.as_ref()),
            ("prox_logprobs", self.prox_logprobs.as_ref()),
            ("values", self.values.as_ref()),
            ("returns", self.returns.as_ref()),
        ];
        for (field, column) in columns {
            let Some(column) = column else { continue };
            if column.len() != n {
                return Err(TrainRowError::Length {
                    episode: self.episode.clone(),
                    field,
                    actual: column.len(),
                    expected: n,
                });
            }
            let bad = |(i, v): &(usize, &f32)| {
                !v.is_finite() && (field == "weights" || self.weights[*i] != 0.0)
            };
            if let Some((index, value)) = column.iter().enumerate().find(bad) {
                return Err(TrainRowError::NotFinite {
                    episode: self.episode.clone(),
                    field,
                    index,
                    value: *value,
                });
            }
        }
        let bad = |&(i, t): &(usize, &f32)| !TEMPERATURES.contains(t) && self.weights[i] != 0.0;
        if let Some((index, &value)) = self.temperatures.iter().enumerate().find(bad) {
            return Err(TrainRowError::Temperature {
                episode: self.episode.clone(),
                index,
                value,
            });
        }
        self.validate_teacher()?;
        self.validate_masks()?;
        self.validate_routes()?;
        match self.weights.first() {
            Some(&weight) if weight != 0.0 => Err(TrainRowError::FirstToken {
                episode: self.episode.clone(),
                weight,
            }),
            _ => Ok(()),
        }
    }
}

impl TrainRow {
    fn validate_routes(&self) -> Result<(), TrainRowError> {
        let mut end = 0;
        for span in &self.routes {
            let why = if let Err(why) = span.validate() {
                why
            } else if span.shape() != self.routes[0].shape() {
                "are of models of different shapes".to_owned()
            } else if span.start < end {
                format!("have token {} twice", span.start)
            } else if span.end() as usize > self.tokens.len() {
                let (end, tokens) = (span.end(), self.tokens.len());
                format!("end at token {end}, the row has {tokens}")
            } else {
                end = span.end();
                continue;
            };
            return Err(TrainRowError::Routes {
                episode: self.episode.clone(),
                why,
            });
        }
        Ok(())
    }

    fn validate_masks(&self) -> Result<(), TrainRowError> {
        let Some(masks) = &self.masks else {
            return Ok(());
        };
        let top = self.teacher_top.as_deref().unwrap_or_default();
        masks
            .validate(&self.tokens, &self.weights)
            .and_then(|()| masks.validate_teacher(top, &self.weights))
            .map_err(|why| TrainRowError::Masks {
                episode: self.episode.clone(),
                why,
            })
    }

    fn validate_teacher(&self) -> Result<(), TrainRowError> {
        let Some(top) = &self.teacher_top else {
            return Ok(());
        };
        let field = "teacher_top";
        if top.len() != self.tokens.len() {
            return Err(TrainRowError::Length {
                episode: self.episode.clone(),
                field,
                actual: top.len(),
                expected: self.tokens.len(),
            });
        }
        for (index, top) in top.iter().enumerate() {
            let bad = top.iter().find(|t| !t.logprob.is_finite());
            if let Some(bad) = bad.filter(|_| self.weights[index] != 0.0) {
                return Err(TrainRowError::NotFinite {
                    episode: self.episode.clone(),
                    field,
                    index,
                    value: bad.logprob,
                });
            }
        }
        Ok(())
    }
}

/// The policy term `L_t`, with `r = exp(ℓ_π − ℓ_old)` and advantage `A`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case", tag = "type")]
pub enum Surrogate {
    /// `−A·ℓ_π` (REINFORCE).
    Reinforce,
    /// `−rA` without a bound of the ratio (importance sampling).
    Importance,
    /// PPO clip `max(−rA, −clip(r, 1−low, 1+high)A)`, for `A < 0` bounded by `−dual·A`
    /// where `dual` is given (Schulman et al. 2017; Ye et al. 2020).
    Clip {
        /// Distance of the lower bound of the ratio from 1, 0 or above.
        low: f32,
        /// Distance of the upper bound of the ratio from 1, 0 or above.
        high: f32,
        /// Maximum ratio for tokens with negative advantage, above `1 + high`.
        dual: Option<f32>,
    },
    /// PPO clip on the sequence's geometric-mean ratio (GSPO, Zheng et al. 2025).
    SequenceClip {
        /// Distance of the lower bound of the sequence's ratio from 1, 0 or above.
        low: f32,
        /// Distance of the upper bound of the sequence's ratio from 1, 0 or above.
        high: f32,
    },
    /// The clip of `sequence_clip`, of which every token gets the gradient of its own log-probability
    /// alone, so that tokens can have different advantages (GSPO-token, Zheng et al. 2025).
    SequenceTokenClip {
        /// Distance of the lower bound of the sequence's ratio from 1, 0 or above.
        low: f32,
        /// Distance of the upper bound of the sequence's ratio from 1, 0 or above.
        high: f32,
    },
    /// `−sg(clamp(r, 1−low, 1+high))·A·ℓ_π` (CISPO, MiniMax 2025).
    Cispo {
        /// Distance of the lower bound of the ratio from 1, 0 or above.
        low: f32,
        /// Distance of the upper bound of the ratio from 1, 0 or above.
        high: f32,
    },
    /// `−(4/τ)·σ(τ(r−1))·A`, τ by the sign of `A` (SAPO, Qwen 2025).
    Soft {
        /// Temperature of the gate for positive advantages, above 0.
        tau_pos: f32,
        /// Temperature of the gate for the other advantages, above 0.
        tau_neg: f32,
    },
    /// `−rA + penalty·(ℓ_π − ℓ_old)²` (prime-rl). Where the token's probability has moved by more than
    /// `limit` into the advantage's own direction, the penalty alone.
    TrustRegion {
        /// Change of a token's probability above which the penalty acts alone, above 0 and below 1.
        limit: f32,
        /// Factor of the squared log-ratio, 0 or above.
        penalty: f32,
    },
    /// `−A·ℓ_π + ½·beta·(ℓ_π − ℓ_old)²` (DRO, Richemond et al. 2024). The penalty is that of every trained
    /// token, whatever its advantage.
    Dro {
        /// Factor of the squared log-ratio, 0 or above.
        beta: f32,
    },
    /// `−ℓ_π`, advantages as weights (SFT with `A = 1`).
    CrossEntropy,
}

/// The quantity that a rejection compares with its bound.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum RejectionMetric {
    /// `w`; the geometric mean of it for a sequence.
    Ratio,
    /// `−ln w`; the mean of it for a sequence.
    KlK1,
    /// `(ln w)²/2`; the mean of it for a sequence.
    KlK2,
    /// `w − 1 − ln w`; the mean of it for a sequence.
    KlK3,
}

/// The unit that a rejection removes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum RejectionLevel {
    /// Each token by its own metric.
    Token,
    /// All tokens of a row by the metric of the whole row.
    Sequence,
}

/// Correction of the gap between the sampling and the training policy: a factor on
/// `L_t` from `w = exp(ℓ_prox − ℓ_behaviour)`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case", tag = "type")]
pub enum Correction {
    /// `ℓ_old = ℓ_behaviour`: the ratio itself spans the whole gap.
    None,
    /// Truncated importance sampling: `clamp(w, low, high)`.
    Truncate {
        /// Lower bound of the ratio `w`, 0 to 1.
        low: f32,
        /// Upper bound of the ratio `w`, 1 or above.
        high: f32,
    },
    /// IcePop: `w` inside `[low, high]`, 0 outside.
    Mask {
        /// Lower bound of the ratio `w`, 0 to 1.
        low: f32,
        /// Upper bound of the ratio `w`, 1 or above.
        high: f32,
    },
    /// The product of a sequence's `w` on each of its tokens, 0 where it is above `high` (TRL's
    /// `sequence_mask`).
    SequenceMask {
        /// Upper bound of the product of a sequence's ratios, 1 or above.
        high: f32,
    },
    /// Tokens or sequences whose metric exceeds the bound leave the loss; the rest is weighted by `w`.
    Reject {
        /// Quantity that is compared with `upper`.
        metric: RejectionMetric,
        /// Unit that leaves the loss.
        level: RejectionLevel,
        /// Largest value that stays in the loss: 1 or above for `ratio`, above 0 for the others.
        upper: f32,
    },
}

impl Surrogate {
    /// Bound of the factor of `−A·∇ℓ_π`, whatever the token's ratio `r = π/old` and the sign of `A`.
    /// `None`: it has no ratio, or one that grows without bound.
    ///
    /// | surrogate | factor | bound |
    /// |---|---|---|
    /// | clip | for `A < 0`, `max(−rA, −clip(r)A)` is `−rA` at every `r` above 1 (Schulman et al. 2017, arXiv 1707.06347) | none |
    /// | importance | `r` for both signs | none |
    /// | clip, dual | for `A < 0` at most `−dual·A`, where `dual > 1 + high` (Ye et al. 2020, arXiv 1912.09729) | `dual` |
    /// | sequence clip, sequence token clip | as clip, of a sequence's mean ratio, which limits no single token (Zheng et al. 2025, arXiv 2507.18071) | none |
    /// | CISPO | `clamp(r, 1−low, 1+high)` for both signs (MiniMax 2025, arXiv 2506.13585) | `1 + high` |
    /// | soft | `4σ(x)(1−σ(x))·r` with `x = τ(r−1)`, that is `4σ(1−σ) + (4/τ)·xσ(1−σ)`, where `σ(1−σ) ≤ 1/4` and `xσ(1−σ) < 0.224` (SAPO, Qwen 2025, arXiv 2511.20347) | `1 + 0.896/τ` |
    /// | trust region | limits `π − old`, so that the ratio of an unlikely token is free (prime-rl) | none |
    /// | DRO | 1; the gap is in the penalty, which grows with it (Richemond et al. 2024, arXiv 2405.19107) | none |
    pub fn ratio_bound(&self) -> Option<f64> {
        match *self {
            Self::Clip { dual, high, .. } => dual.map(|d| f64::from(d.max(1.0 + high))),
            Self::Cispo { high, .. } => Some(1.0 + f64::from(high)),
            Self::Soft { tau_pos, tau_neg } => {
                Some(1.0 + 4.0 * 0.224 / f64::from(tau_pos.min(tau_neg)))
            }
            Self::Reinforce
            | Self::Importance
            | Self::SequenceClip { .. }
            | Self::SequenceTokenClip { .. }
            | Self::TrustRegion { .. }
            | Self::Dro { .. }
            | Self::CrossEntropy => None,
        }
    }
}

impl Correction {
    /// Bound of a token's factor `w = exp(ℓ_prox − ℓ_behaviour)`, which spans the gap between sampler and
    /// trained policy. `None`: there is no factor, or one without a bound: a sequence's mean bounds none of
    /// its tokens, and k1, `−ln w`, falls where the ratio grows.
    ///
    /// A token with `k2 = g²/2` or `k3 = e^g − 1 − g` up to `upper`, where `g = ln w`, has
    /// `g ≤ √(2·upper)`: for `g ≥ 0`, k3 is at least k2 (Schulman 2020).
    pub fn ratio_bound(&self) -> Option<f64> {
        use RejectionMetric::{KlK1, KlK2, KlK3, Ratio};
        match *self {
            Self::None => None,
            Self::Truncate { high, .. } | Self::Mask { high, .. } | Self::SequenceMask { high } => {
                Some(f64::from(high))
            }
            Self::Reject {
                level: RejectionLevel::Sequence,
                ..
            } => None,
            Self::Reject { metric, upper, .. } => match metric {
                Ratio => Some(f64::from(upper)),
                KlK2 | KlK3 => Some((2.0 * f64::from(upper)).sqrt().exp()),
                KlK1 => None,
            },
        }
    }
}

/// Estimators of KL(π‖ref) from `d = ℓ_π − ℓ_ref` (Schulman 2020): `d`, `d²/2`, `e^{−d} − 1 + d`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum KlEstimator {
    /// `d`: unbiased, and negative for some tokens.
    K1,
    /// `d²/2`: biased, never negative.
    K2,
    /// `e^{−d} − 1 + d`: unbiased, never negative.
    K3,
}

/// A KL term in the loss.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct KlSpec {
    /// Estimator of the divergence.
    pub estimator: KlEstimator,
    /// Factor of the term, above 0.
    pub coefficient: f32,
}

/// The direction of the distance to a teacher's distribution.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema,
)]
#[serde(rename_all = "snake_case")]
pub enum Divergence {
    /// KL(π‖teacher): the policy avoids tokens that are unlikely for the teacher.
    #[default]
    Reverse,
    /// KL(teacher‖π): the policy covers all tokens that are likely for the teacher.
    Forward,
}

/// A term that draws the policy's distribution towards a teacher's at every trained token.
///
/// The term is a KL divergence of coarser distributions: over the teacher's `top_k` most likely tokens and,
/// as one more outcome, all others together. It is a lower bound of the full divergence.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct TeacherSpec {
    /// Number of the teacher's tokens in each place, at least 1.
    pub top_k: u32,
    /// Direction of the divergence.
    pub divergence: Divergence,
    /// Factor of the term, above 0.
    pub coefficient: f32,
}

/// Sum over token losses; an algorithm turns this into [`TrainRow::weights`].
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case", tag = "type")]
pub enum Aggregation {
    /// `Σ L / T`, T the trainable tokens of the whole batch.
    TokenMean,
    /// Mean over episodes of the mean over an episode's tokens.
    SequenceMeanTokenMean,
    /// Mean over episodes of the sum over an episode's tokens.
    SequenceMeanTokenSum,
    /// As before, divided by a constant length (Dr. GRPO).
    SequenceMeanTokenSumNorm {
        /// Number of tokens by which the sums are divided, above 0.
        length: f32,
    },
    /// Plain sum.
    TokenSum,
}

/// The loss of an algorithm: the only part of it that a trainer sees.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LossSpec {
    /// The policy term.
    pub surrogate: Surrogate,
    /// Correction for the gap between the sampling and the training policy.
    pub correction: Correction,
    /// KL term against the reference model, if any.
    pub kl: Option<KlSpec>,
    /// Coefficient of the entropy bonus; 0 for none.
    pub entropy: f32,
    /// Coefficient and clip range of the critic's loss, if there is a critic.
    pub value: Option<(f32, Option<f32>)>,
    /// Distance to a teacher's distribution, if there is a teacher.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub teacher: Option<TeacherSpec>,
}

impl LossSpec {
    /// The surrogate without any other term.
    pub fn new(surrogate: Surrogate) -> Self {
        Self {
            surrogate,
            correction: Correction::None,
            kl: None,
            entropy: 0.0,
            value: None,
            teacher: None,
        }
    }

    /// Bound of the weight that a token gets for the gap between the policy that sampled it and the one that
    /// is trained: of the correction's factor, or without a correction of the surrogate's own ratio, which
    /// then spans the whole gap. `None`: the gap has no weight, or one without a bound.
    pub fn ratio_bound(&self) -> Option<f64> {
        match &self.correction {
            Correction::None => self.surrogate.ratio_bound(),
            correction => correction.ratio_bound(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(masks: RowMasks) -> TrainRow {
        TrainRow {
            episode: EpisodeId::new("e"),
            tokens: vec![1, 33, 2],
            weights: vec![0.0, 1.0, 1.0],
            advantages: vec![1.0; 3],
            behaviour_logprobs: vec![-1.0; 3],
            masks: Some(masks),
            ..TrainRow::default()
        }
    }

    #[test]
    fn routes_that_do_not_fit_their_row_are_refused() {
        let span = |start, experts: &[u8]| RouteSpan {
            start,
            layers: 1,
            top_k: 1,
            wide: false,
            experts: experts.into(),
        };
        let with = |routes: Vec<RouteSpan>| TrainRow {
            masks: None,
            routes,
            ..row(RowMasks::gather(1, [None; 3]))
        };
        with(vec![span(0, &[1]), span(2, &[3])]).validate().unwrap();
        let refused = |routes, word: &str| {
            let error = with(routes).validate().unwrap_err().to_string();
            assert!(error.contains(word), "{error}");
        };
        refused(vec![span(2, &[1, 2])], "end at token 4, the row has 3");
        refused(vec![span(0, &[1, 2]), span(1, &[3])], "token 1 twice");
        refused(vec![span(0, &[])], "0 bytes");
        let other = RouteSpan {
            layers: 2,
            ..span(1, &[1, 2])
        };
        refused(vec![span(0, &[1]), other], "different shapes");
    }

    #[test]
    fn masks_that_do_not_fit_their_row_are_refused() {
        let good = RowMasks {
            words_per_mask: 2,
            table: vec![0, 0b110, 0, 1],
            rows: vec![1, 0, RowMasks::ALL],
        };
        row(good.clone()).validate().unwrap();
        assert!(good.allows(1, 33) && good.allows(1, 34) && good.allows(2, 7));
        assert!(!good.allows(1, 32) && !good.allows(1, 64));
        let refused = |edit: &dyn Fn(&mut RowMasks), field: &str| {
            let mut masks = good.clone();
            edit(&mut masks);
            let error = row(masks).validate().unwrap_err().to_string();
            assert!(error.contains(field), "{error}");
        };
        refused(&|m| m.words_per_mask = 0, "words_per_mask");
        refused(&|m| m.words_per_mask = 3, "words_per_mask");
        refused(&|m| m.rows.truncate(2), "rows has 2");
        refused(&|m| m.rows[1] = 2, "rows[1] is 2");
        refused(&|m| m.rows[1] = 1, "bars token 33 at 1");
    }
}
