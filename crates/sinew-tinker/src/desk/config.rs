//! Limits of the desk and of its tenants: the tables `[limits]` and `[[tenant]]` of the configuration.

use serde::{Deserialize, Serialize};

/// A refused key: its name, its value, and the allowed range.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{key} = {value}: allowed: {allowed}")]
pub struct LimitError {
    /// Name with its table.
    pub key: String,
    /// The value that was given.
    pub value: String,
    /// The allowed range, for users.
    pub allowed: String,
}

fn require<T: std::fmt::Display>(
    key: &str,
    value: T,
    allowed: &str,
    holds: bool,
) -> Result<(), LimitError> {
    if holds {
        return Ok(());
    }
    Err(LimitError {
        key: key.to_owned(),
        value: value.to_string(),
        allowed: allowed.to_owned(),
    })
}

/// Limits of one tenant. Keys of a `[[tenant]]`, or of `[limits.tenant]` for all tenants without own ones.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TenantLimits {
    /// Models that take commands. Default: 256.
    pub models: u64,
    /// Commands that wait or run. Default: 4096.
    pub queued_commands: u64,
    /// Bytes in the journal: commands that wait, and results that are kept. Default: 2 GiB.
    pub queued_bytes: u64,
    /// Tokens of prompts, samples and training in a day (UTC); left out: no limit.
    pub tokens_per_day: Option<u64>,
    /// Bytes of checkpoints with names. Default: 20 GiB.
    pub checkpoint_bytes: u64,
    /// Sequences that are sampled or wait for it. Default: 8192.
    pub samples_in_flight: u64,
}

impl Default for TenantLimits {
    fn default() -> Self {
        Self {
            models: 256,
            queued_commands: 4096,
            queued_bytes: 2 << 30,
            tokens_per_day: None,
            checkpoint_bytes: 20 << 30,
            samples_in_flight: 8192,
        }
    }
}

impl TenantLimits {
    /// Refuses limits under which nothing works. `table` is the name of the table, for messages.
    ///
    /// # Errors
    /// The first key that is out of its range.
    pub fn validate(&self, table: &str) -> Result<(), LimitError> {
        let key = |name: &str| format!("{table}.{name}");
        let counts = [
            ("models", self.models),
            ("queued_commands", self.queued_commands),
            ("samples_in_flight", self.samples_in_flight),
        ];
        for (name, value) in counts {
            require(&key(name), value, "at least 1", value >= 1)?;
        }
        for (name, value) in [
            ("queued_bytes", self.queued_bytes),
            ("checkpoint_bytes", self.checkpoint_bytes),
        ] {
            require(
                &key(name),
                value,
                "at least 1048576 (1 MiB)",
                value >= 1 << 20,
            )?;
        }
        match self.tokens_per_day {
            Some(0) => require(
                &key("tokens_per_day"),
                0,
                "at least 1; left out: no limit",
                false,
            ),
            _ => Ok(()),
        }
    }
}

/// Limits of the whole desk: the table `[limits]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct DeskLimits {
    /// Limits of tenants without own ones.
    pub tenant: TenantLimits,
    /// Tokens that a model may compute before another tenant's turn, unless its optimizer step ends the turn
    /// earlier. Default: 65,536.
    pub quantum_tokens: u64,
    /// Tokens of a micro-batch, at least the longest sequence. Default: 4096.
    pub micro_batch_tokens: usize,
    /// Largest rank of adapters. Default: 128.
    pub max_rank: u32,
    /// Adapters are scaled by `lora_alpha / rank`. Default: 32, as the cookbook's learning rates assume.
    pub lora_alpha: f32,
    /// Models in the trainer's memory at once. Default: 32.
    pub resident_models: usize,
    /// Seconds after which a model without commands leaves the trainer's memory. Default: 1800.
    pub resident_idle_s: u64,
    /// A state of at most so many bytes is written after each optimizer step. Default: 32 MiB.
    pub small_state_bytes: u64,
    /// A larger state is written after so many steps. Default: 8.
    pub checkpoint_every: u64,
    /// A state is written after so many trained tokens at the latest: they are computed again after a kill.
    /// Default: 262,144.
    pub replay_tokens: u64,
    /// Checkpoints for sampling without a name that a model keeps; the one used longest ago goes first.
    /// Default: 8.
    pub snapshots: u64,
    /// Sequences at the engine at once; others wait for their tenant's turn. Default: 256.
    pub engine_sequences: usize,
    /// Adapters at the engine at once. Default: 32.
    pub loaded_adapters: usize,
    /// Whole models for sampling in memory at once, besides the base model. Default: 1.
    pub full_samplers: usize,
    /// Seconds for which a result is kept that nobody retrieved. Default: 86,400.
    pub result_s: u64,
    /// Seconds for which a result is kept after it was retrieved, since the answer may have been lost.
    /// Default: 3600.
    pub retrieved_s: u64,
    /// Bytes of all results; above it, those retrieved longest ago go first. Default: 4 GiB.
    pub result_bytes: u64,
    /// Seconds without a sign of a session's client after which its models leave memory and disk. Their
    /// checkpoints stay. Default: 14,400.
    pub silent_s: u64,
    /// Bytes of the state folder; above it, commands that write are refused. Default: 200 GiB.
    pub disk_bytes: u64,
}

impl Default for DeskLimits {
    fn default() -> Self {
        Self {
            tenant: TenantLimits::default(),
            quantum_tokens: 65_536,
            micro_batch_tokens: 4096,
            max_rank: 128,
            lora_alpha: 32.0,
            resident_models: 32,
            resident_idle_s: 1800,
            small_state_bytes: 32 << 20,
            checkpoint_every: 8,
            replay_tokens: 262_144,
            snapshots: 8,
            engine_sequences: 256,
            loaded_adapters: 32,
            full_samplers: 1,
            result_s: 86_400,
            retrieved_s: 3600,
            result_bytes: 4 << 30,
            silent_s: 14_400,
            disk_bytes: 200 << 30,
        }
    }
}

impl DeskLimits {
    /// Refuses values out of their ranges.
    ///
    /// # Errors
    /// The first key that is out of its range.
    pub fn validate(&self) -> Result<(), LimitError> {
        self.tenant.validate("limits.tenant")?;
        let key = |name: &str| format!("limits.{name}");
        for (name, value) in [
            ("quantum_tokens", self.quantum_tokens),
            ("micro_batch_tokens", self.micro_batch_tokens as u64),
            ("resident_models", self.resident_models as u64),
            ("resident_idle_s", self.resident_idle_s),
            ("checkpoint_every", self.checkpoint_every),
            ("replay_tokens", self.replay_tokens),
            ("snapshots", self.snapshots),
            ("engine_sequences", self.engine_sequences as u64),
            ("loaded_adapters", self.loaded_adapters as u64),
            ("full_samplers", self.full_samplers as u64),
        ] {
            require(&key(name), value, "at least 1", value >= 1)?;
        }
        for (name, value) in [
            ("result_s", self.result_s),
            ("retrieved_s", self.retrieved_s),
            ("silent_s", self.silent_s),
        ] {
            require(&key(name), value, "at least 60", value >= 60)?;
        }
        for (name, value) in [
            ("result_bytes", self.result_bytes),
            ("disk_bytes", self.disk_bytes),
        ] {
            let allowed = "at least 1048576 (1 MiB)";
            require(&key(name), value, allowed, value >= 1 << 20)?;
        }
        let rank = self.max_rank;
        let in_range = (1..=1024).contains(&rank);
        require(&key("max_rank"), rank, "1 to 1024", in_range)?;
        let alpha = self.lora_alpha;
        let holds = alpha.is_finite() && alpha > 0.0;
        require(&key("lora_alpha"), alpha, "above 0", holds)
    }
}

/// A tenant and its limits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TenantConfig {
    /// Name: 1 to 64 of `[A-Za-z0-9._-]`.
    pub name: String,
    /// Own limits; `None`: those of all.
    pub limits: Option<TenantLimits>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_defaults_are_allowed_and_zero_is_named() {
        DeskLimits::default().validate().unwrap();
        let wrong = DeskLimits {
            quantum_tokens: 0,
            ..DeskLimits::default()
        };
        let error = wrong.validate().unwrap_err().to_string();
        assert_eq!(error, "limits.quantum_tokens = 0: allowed: at least 1");
        let limits = TenantLimits {
            tokens_per_day: Some(0),
            ..TenantLimits::default()
        };
        let error = limits.validate("tenant.ann").unwrap_err().to_string();
        assert!(
            error.starts_with("tenant.ann.tokens_per_day = 0"),
            "{error}"
        );
    }
}
