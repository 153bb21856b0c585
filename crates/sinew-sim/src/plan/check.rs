//! Checks the values of a plan, and derives others from them.

use super::{Mode, Model, Plan, PlanError};
use crate::dist::Dist;

/// Largest numbers of a plan: what a machine with some gigabytes can hold.
const MAX_ENGINES: usize = 10_000;
const MAX_EPISODES: usize = 1_000_000;
const MAX_FAULTS: usize = 10_000;
/// Tokens of contexts that a plan may hold at once; above it, one simulated id represents several tokens.
const FINE_TOKENS: f64 = 16e6;
/// Ids that one engine of the scheduler's model may hold.
const MAX_BLOCK_IDS: usize = 1 << 22;

/// A refusal of a key.
pub(super) fn refused<T>(key: &str, value: impl ToString, allowed: &str) -> Result<T, PlanError> {
    Err(PlanError::Value {
        key: key.into(),
        value: value.to_string(),
        allowed: format!("allowed: {allowed}"),
    })
}

/// Refuses a count out of its bounds.
pub(super) fn count(key: &str, value: usize, most: usize) -> Result<(), PlanError> {
    if (1..=most).contains(&value) {
        Ok(())
    } else {
        refused(key, value, &format!("1 to {most}"))
    }
}

/// Refuses a number out of its bounds.
pub(super) fn number(key: &str, value: f64, above_zero: bool) -> Result<(), PlanError> {
    let good = (0.0..=1e12).contains(&value) && !(above_zero && value == 0.0);
    match (good, above_zero) {
        (true, _) => Ok(()),
        (false, true) => refused(key, value, "above 0, up to 1e12"),
        (false, false) => refused(key, value, "0 to 1e12"),
    }
}

impl Plan {
    /// Refuses values that mean nothing, and keys without effect.
    pub(crate) fn check(&self) -> Result<(), PlanError> {
        self.check_counts()?;
        self.check_numbers()?;
        self.check_together()?;
        self.check_roles()?;
        self.check_scaling()?;
        self.hops.check()?;
        for (key, dist) in self.distributions() {
            if let Some(allowed) = dist.fault() {
                return Err(PlanError::Value {
                    key: key.into(),
                    value: format!("{dist:?}"),
                    allowed,
                });
            }
        }
        Ok(())
    }

    /// Returns all distributions with their keys.
    fn distributions(&self) -> [(&'static str, &Dist); 7] {
        let (e, t) = (&self.episode, &self.tools);
        [
            ("episode.turns", &e.turns),
            ("episode.prompt_tokens", &e.prompt_tokens),
            ("episode.turn_tokens", &e.turn_tokens),
            ("episode.observation_tokens", &e.observation_tokens),
            ("tools.boot_s", &t.boot_s),
            ("tools.call_s", &t.call_s),
            ("scoring.score_s", &self.scoring.score_s),
        ]
    }

    /// Counts within their bounds.
    fn check_counts(&self) -> Result<(), PlanError> {
        let (r, e) = (&self.rollout, &self.engines);
        count("engines.count", e.count, MAX_ENGINES)?;
        count("role.max", self.engine_places(), 2 * MAX_ENGINES)?;
        count("engines.max_running", e.max_running, 65_536)?;
        count("engines.max_batched_tokens", e.max_batched_tokens, 1 << 24)?;
        count("engines.kv_tokens", e.kv_tokens, 1 << 40)?;
        count("rollout.group_size", r.group_size, 4096)?;
        count(
            "rollout.groups_per_update",
            r.groups_per_update,
            MAX_EPISODES,
        )?;
        count("rollout.in_flight", r.in_flight, MAX_EPISODES)?;
        count("rollout.tasks", r.tasks, 1 << 40)?;
        count("tools.sandboxes", self.tools.sandboxes, MAX_EPISODES)?;
        count("tools.starting", self.tools.starting, MAX_EPISODES)?;
        count("scoring.scorers", self.scoring.scorers, 100_000)?;
        count(
            "episode.max_context_tokens",
            self.episode.max_context_tokens,
            1 << 24,
        )?;
        let each = r.groups_per_update.saturating_mul(r.group_size);
        if each.saturating_mul(self.ahead() + 1) > 4 * MAX_EPISODES {
            return refused(
                "rollout.groups_per_update",
                each,
                "4,000,000 episodes begun at once",
            );
        }
        if self.faults.len() > MAX_FAULTS {
            refused("fault", self.faults.len(), "10,000 of them")
        } else {
            Ok(())
        }
    }

    /// Numbers within their bounds.
    fn check_numbers(&self) -> Result<(), PlanError> {
        let (e, w) = (&self.engines, &self.weights);
        for (key, value, above_zero) in [
            ("run.max_s", self.run.max_s, false),
            ("rollout.timeout_s", self.rollout.timeout_s, true),
            ("scoring.lease_s", self.scoring.lease_s, true),
            ("engines.devices", e.devices, true),
            ("engines.pass_s", e.pass_s, true),
            ("engines.row_s", e.row_s, false),
            ("engines.kv_s", e.kv_s, false),
            ("engines.prefill_tokens_per_s", e.prefill_tokens_per_s, true),
            ("engines.tokens_per_pass", e.tokens_per_pass, true),
            ("engines.probe_s", e.probe_s, true),
            ("trainer.devices", self.trainer.devices, true),
            ("trainer.fixed_s", self.trainer.fixed_s, false),
            ("trainer.tokens_per_s", self.trainer.tokens_per_s, true),
            ("weights.transfer_s", w.transfer_s, false),
            ("weights.load_s", w.load_s, false),
            ("weights.gigabytes", w.gigabytes, false),
            ("store.commit_s", self.store.commit_s, false),
            (
                "prices.engine_device_hour",
                self.prices.engine_device_hour,
                false,
            ),
            (
                "prices.trainer_device_hour",
                self.prices.trainer_device_hour,
                false,
            ),
            ("prices.sandbox_hour", self.prices.sandbox_hour, false),
        ] {
            number(key, value, above_zero)?;
        }
        for (key, value) in [
            ("episode.task_share", self.episode.task_share),
            ("rollout.no_signal", self.rollout.no_signal),
        ] {
            if !(0.0..=1.0).contains(&value) {
                return refused(key, value, "0 to 1");
            }
        }
        for fault in &self.faults {
            number("fault.at_s", fault.at_s, false)?;
            number("fault.for_s", fault.for_s, false)?;
            if !fault.by.is_finite() {
                return refused("fault.by", fault.by, "finite numbers");
            }
        }
        Ok(())
    }

    /// Keys that exclude each other.
    fn check_together(&self) -> Result<(), PlanError> {
        let overlaps = self.run.mode != Mode::Sync;
        if self.run.updates == 0 {
            return refused("run.updates", 0, "1 or more");
        }
        if self.run.updates <= self.run.warm_up {
            return refused("run.warm_up", self.run.warm_up, "fewer than run.updates");
        }
        if self.run.checkpoint_every == 0 {
            return refused("run.checkpoint_every", 0, "1 or more");
        }
        if overlaps && self.rollout.over_sample > 0 {
            return refused(
                "rollout.over_sample",
                self.rollout.over_sample,
                "0 unless run.mode is sync",
            );
        }
        if overlaps && self.trainer.colocated {
            return refused("trainer.colocated", true, "false unless run.mode is sync");
        }
        if self.rollout.over_sample > 0 && self.rollout.refill > 0 {
            return refused(
                "rollout.refill",
                self.rollout.refill,
                "0 with rollout.over_sample",
            );
        }
        let ids = self.engines.kv_tokens / self.grain();
        if self.engines.model == Model::Scheduler && ids > MAX_BLOCK_IDS {
            return refused(
                "engines.kv_tokens",
                self.engines.kv_tokens,
                "4,194,304 with engines.model = \"scheduler\"",
            );
        }
        let context = self.episode.max_context_tokens;
        if context > self.engines.kv_tokens {
            return refused(
                "episode.max_context_tokens",
                context,
                "up to engines.kv_tokens, so that an episode fits",
            );
        }
        Ok(())
    }

    /// Updates that generation may be ahead of training.
    pub(crate) fn ahead(&self) -> usize {
        match self.run.mode {
            Mode::Sync => 0,
            Mode::OneStepOff => 1,
            Mode::Async => self.run.max_staleness as usize,
        }
    }

    /// Episodes that run at once, at most: each has a sandbox.
    pub(crate) fn places(&self) -> usize {
        let (r, t) = (&self.rollout, &self.tools);
        r.in_flight.min(t.sandboxes)
    }

    /// Tokens that an id stands for: 1 in small plans, more where contexts would not fit into memory.
    pub(crate) fn grain(&self) -> usize {
        match self.engines.grain {
            0 => {
                let e = &self.episode;
                let turn = e.turn_tokens.mean() + e.observation_tokens.mean();
                let context = e.prompt_tokens.mean() + e.turns.mean() * turn;
                let context = context.min(e.max_context_tokens as f64);
                let all = context * self.places() as f64;
                ((all / FINE_TOKENS).ceil() as usize)
                    .clamp(1, 4096)
                    .next_power_of_two()
            }
            grain => grain,
        }
    }
}
