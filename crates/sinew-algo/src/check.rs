//! Checks of a composition before a run, with reasons.

use crate::composition::{
    Advantage, Baseline, Composition, EqualGroups, Normalize, ProcessRewards, RunFacts, Scale,
    Truncated,
};
use crate::error::ConfigError;
use sinew_types::{Aggregation, Correction, KlEstimator, RejectionMetric, Surrogate};

impl Composition {
    /// Refuses values out of range and parts that cannot work together in this run.
    ///
    /// # Errors
    /// The first problem.
    pub fn check(&self, facts: &RunFacts) -> Result<(), ConfigError> {
        self.check_surrogate()?;
        self.check_correction()?;
        self.check_parts()?;
        self.check_numbers()?;
        self.check_filters(facts)?;
        self.check_inputs(facts)?;
        self.check_staleness(facts)
    }

    /// Ranges of the surrogate's parameters.
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
                // A lower value would limit ratios that the clip allows.
                let above = |d: f32| range("dual_clip", d, d > 1.0 + high, "above 1 + clip_high");
                dual.map_or(Ok(()), above)
            }
            Surrogate::SequenceClip { low, high } | Surrogate::SequenceTokenClip { low, high } => {
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
                range("clip_high", *high, *high >= 0.0, "0 or above")
            }
            Surrogate::Soft { tau_pos, tau_neg } => {
                positive("tau_pos", *tau_pos)?;
                positive("tau_neg", *tau_neg)
            }
            Surrogate::TrustRegion { limit, penalty } => {
                let probability = *limit > 0.0 && *limit < 1.0;
                range("surrogate.limit", *limit, probability, "above 0, below 1")?;
                range("surrogate.penalty", *penalty, *penalty >= 0.0, "0 or above")
            }
            Surrogate::Dro { beta } => range("surrogate.beta", *beta, *beta >= 0.0, "0 or above"),
            Surrogate::Reinforce | Surrogate::Importance | Surrogate::CrossEntropy => Ok(()),
        }
    }

    /// Refuses combinations of parts that contradict each other or have no effect.
    fn check_parts(&self) -> Result<(), ConfigError> {
        let refuse = |what: &str| {
            let reason = format!("`{}`: {what}", self.kind);
            Err(ConfigError::impossible(reason))
        };
        let advantage = &self.advantage;
        let constant = matches!(advantage, Advantage::One | Advantage::Preference { .. });
        if self.filters.truncated == Truncated::Bootstrap && !advantage.needs_values() {
            return refuse(
                "truncated = \"bootstrap\" asks a critic what would have come, and it has none; \
                 set it to keep, mask or exclude, or use `ppo` or `turn_ppo`",
            );
        }
        if *advantage == Advantage::None && self.distill == 0.0 && self.loss.teacher.is_none() {
            return refuse("advantage none without a teacher trains nothing; set distill");
        }
        if constant && (self.distill != 0.0 || self.normalize != Normalize::None) {
            return refuse("its weights are fixed by its loss; remove distill and normalize");
        }
        if matches!(advantage, Advantage::Preference { .. })
            && (self.loss.surrogate != Surrogate::Reinforce
                || self.loss.correction != Correction::None
                || self.loss.teacher.is_some())
        {
            return refuse(
                "a preference pair needs surrogate reinforce, no correction and no teacher",
            );
        }
        let imitates = self.loss.surrogate == Surrogate::CrossEntropy;
        if imitates && self.loss.correction != Correction::None {
            return refuse("cross-entropy has no sampling policy to correct for");
        }
        if imitates != (*advantage == Advantage::One) {
            return refuse("surrogate cross_entropy goes with advantage one, and only with it");
        }
        let grouped = matches!(advantage, Advantage::Group { .. });
        if let Advantage::Group {
            baseline: Baseline::Zero,
            scale,
        } = advantage
            && matches!(scale, Scale::GroupStd { .. } | Scale::EnvironmentStd { .. })
        {
            return refuse(
                "without a baseline, equal rewards would be divided by std_epsilon alone; \
                 set scale to one or group_mean, or baseline to mean",
            );
        }
        if matches!(self.rewards.process, ProcessRewards::Separate { .. }) && !grouped {
            return refuse("process rewards can be normalized apart for group advantages alone");
        }
        let places_kl = matches!(
            advantage,
            Advantage::ReturnToGo { .. } | Advantage::Gae { .. }
        );
        if self.rewards.kl != 0.0 && !grouped && !places_kl {
            return refuse("it has no place for a KL term in the reward; use place = \"loss\"");
        }
        if advantage.needs_values() && self.loss.value.is_none() {
            return refuse("it reads a critic that no value loss trains");
        }
        Ok(())
    }

    /// Ranges of the correction's parameters.
    fn check_correction(&self) -> Result<(), ConfigError> {
        match &self.loss.correction {
            Correction::None => Ok(()),
            Correction::Truncate { low, high } | Correction::Mask { low, high } => {
                range("correction.low", *low, *low >= 0.0, "0 or above")?;
                let allowed = "a finite number above correction.low";
                range("correction.high", *high, high > low, allowed)?;
                let allowed = "0 to 1: the ratio is 1 where both policies agree";
                range("correction.low", *low, *low <= 1.0, allowed)?;
                let allowed = "1 or above: the ratio is 1 where both policies agree";
                range("correction.high", *high, *high >= 1.0, allowed)
            }
            Correction::SequenceMask { high } => {
                let allowed = "1 or above: the ratio is 1 where both policies agree";
                range("correction.high", *high, *high >= 1.0, allowed)
            }
            Correction::Reject { metric, upper, .. } => {
                let (holds, allowed) = match metric {
                    RejectionMetric::Ratio => (
                        *upper >= 1.0,
                        "1 or above: the ratio is 1 where both policies agree",
                    ),
                    _ => (*upper > 0.0, "a positive, finite number"),
                };
                range("correction.upper", *upper, holds, allowed)
            }
        }
    }

    /// Ranges of the estimator's and the loss's numbers.
    fn check_numbers(&self) -> Result<(), ConfigError> {
        let unit = |field, v: f64| range(field, v, (0.0..=1.0).contains(&v), "0 to 1");
        let above_zero = |field, v: f64| range(field, v, v >= 0.0, "0 or above");
        match self.advantage {
            Advantage::Group { scale, .. } => match scale {
                Scale::GroupStd { epsilon } | Scale::EnvironmentStd { epsilon } => {
                    positive("std_epsilon", epsilon)?;
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
            Advantage::Gigpo {
                omega,
                gamma,
                std_epsilon,
            } => {
                above_zero("omega", omega)?;
                unit("gamma", gamma)?;
                positive("std_epsilon", std_epsilon.unwrap_or(1.0))?;
            }
            Advantage::Preference { beta } => positive("beta", beta)?,
            Advantage::One | Advantage::None => {}
        }
        above_zero("distill", self.distill)?;
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
        if let Some(teacher) = self.loss.teacher {
            let top_k = teacher.top_k;
            let holds = (1..=256).contains(&top_k);
            range("teacher_kl.top_k", f64::from(top_k), holds, "1 to 256")?;
            let c = teacher.coefficient;
            let allowed = "a positive number; leave teacher_kl out for none";
            range("teacher_kl.coefficient", c, c > 0.0, allowed)?;
        }
        if let Some((coefficient, clip)) = self.loss.value {
            positive("value_coefficient", coefficient)?;
            if let Some(clip) = clip {
                positive("value_clip", clip)?;
            }
        }
        self.check_reward_numbers()
    }

    /// Ranges of reward shaping and aggregation.
    fn check_reward_numbers(&self) -> Result<(), ConfigError> {
        let rewards = &self.rewards;
        range("rewards.bias", rewards.bias, true, "a finite number")?;
        positive("rewards.scale", rewards.scale)?;
        if let Some(clip) = rewards.clip {
            positive("rewards.clip", clip)?;
        }
        if let ProcessRewards::Separate { weight } = rewards.process {
            positive("process.weight", weight)?;
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
            positive("overlong.factor", o.factor)?;
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

    /// Ranges of filters, and the group size that they need.
    fn check_filters(&self, facts: &RunFacts) -> Result<(), ConfigError> {
        if let Some(share) = self.filters.keep_top_std {
            let ok = share > 0.0 && share <= 1.0;
            range("keep_top_std", share, ok, "above 0, at most 1")?;
        }
        if let Some(rounds) = self.filters.refill {
            range("refill", rounds, rounds <= 100, "0 to 100 rounds")?;
        }
        if let Some(r) = self.filters.resample {
            let ok = r.keep >= 2 && r.keep < facts.group_size;
            let allowed = "2 to group_size - 1, as it chooses among an oversampled group";
            range("resample.keep", r.keep as f64, ok, allowed)?;
            let ok = r.minimum <= r.keep / 2;
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

    /// Checks that the run has the models that the algorithm reads.
    fn check_inputs(&self, facts: &RunFacts) -> Result<(), ConfigError> {
        let needs = self.needs();
        if (needs.ref_logprobs || needs.ref_in_loss) && !facts.reference {
            let what = match self.advantage {
                Advantage::Preference { .. } => "its margin is relative to it",
                _ => "it has a KL term",
            };
            return Err(ConfigError::impossible(format!(
                "`{}` needs a reference model, as {what}, and the run has none; \
                 name one, or remove the term",
                self.kind
            )));
        }
        if needs.teacher() != facts.teacher {
            let (have, fix) = if facts.teacher {
                ("asks no teacher", "remove it, or set distill or teacher_kl")
            } else {
                (
                    "learns from a teacher and the run has none",
                    "name one: [teacher] model = \"...\"",
                )
            };
            let reason = format!("`{}` {have}; {fix}", self.kind);
            return Err(ConfigError::impossible(reason));
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
            // The gradient of k1 as a loss is E[∇ℓ_π] = 0 on the policy's own samples: it only adds noise
            // (Schulman 2020).
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

    /// Off-policy samples need an importance ratio or a correction.
    fn check_staleness(&self, facts: &RunFacts) -> Result<(), ConfigError> {
        let blind = self.loss.surrogate == Surrogate::Reinforce;
        let by_design = matches!(self.advantage, Advantage::Preference { .. });
        if by_design && facts.updates_per_batch > 1 {
            return Err(ConfigError::impossible(format!(
                "`{}` fixes the margin when rows are made, which is exact for one optimizer step \
                 a batch; updates_per_batch is {}",
                self.kind, facts.updates_per_batch
            )));
        }
        if !blind || by_design {
            return Ok(());
        }
        if facts.updates_per_batch > 1 {
            return Err(ConfigError::impossible(format!(
                "`{}` has no importance ratio, so from the second of {} optimizer steps on a batch it would \
                 train on another policy's samples uncorrected (a correction covers only \
                 the first one); set updates_per_batch (train.minibatches) to 1, or choose a surrogate \
                 with a ratio",
                self.kind, facts.updates_per_batch
            )));
        }
        if facts.max_staleness > 0 && self.loss.correction == Correction::None {
            return Err(ConfigError::impossible(format!(
                "`{}` has no importance ratio, so max_staleness {} would train on another policy's samples \
                 uncorrected; set it to 0, or choose a correction",
                self.kind, facts.max_staleness
            )));
        }
        Ok(())
    }
}

/// Returns an error for a number that is not finite or not above 0.
fn positive(field: &'static str, value: impl Into<f64>) -> Result<(), ConfigError> {
    let value = value.into();
    range(field, value, value > 0.0, "a positive number")
}

/// Returns an error for a number that is not finite or not `ok`.
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
