//! The `[pool]` table: limits, checks, filters, sampling.

use serde::{Deserialize, Serialize};
use sinew_algo::{AdaptiveConfig, Signal};
use std::collections::BTreeMap;

/// A refused key: its name, its value, and the allowed range.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("pool.{key} = {value}: allowed: {allowed}")]
pub struct ConfigError {
    /// Name below `pool.`.
    pub key: String,
    /// The value that was given.
    pub value: String,
    /// The allowed range, for users.
    pub allowed: String,
}

/// The handling of spans that have only text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TextSpans {
    /// Spans go into quarantine: text is not evidence of which tokens were sampled.
    #[default]
    Quarantine,
    /// Rendered and tokenized here, for imitation.
    Sft,
    /// Rendered and tokenized here, as a side of a preference.
    Dpo,
}

/// Compares pushed log-probabilities with those that the engine gives now.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SpotCheck {
    /// Tokens of each trajectory, 0 to 64; 0 checks none. Only tokens that the engine's present
    /// weights sampled can be compared. Default: 0.
    pub tokens: u32,
    /// Maximum difference, in nats. Default: 0.25.
    pub gap: f32,
}

impl Default for SpotCheck {
    fn default() -> Self {
        Self {
            tokens: 0,
            gap: 0.25,
        }
    }
}

/// The conditions for admission of a task type, and its maximum age at training. Ranges are
/// inclusive; a field that is left out admits everything.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TypeFilter {
    /// Minimum and maximum of the total reward.
    pub reward: Option<[f64; 2]>,
    /// Minimum and maximum of sampled nodes.
    pub turns: Option<[u64; 2]>,
    /// Minimum and maximum of sampled tokens.
    pub sampled_tokens: Option<[u64; 2]>,
    /// Minimum and maximum of the longest path, in tokens.
    pub path_tokens: Option<[u64; 2]>,
    /// Only successes, or only failures.
    pub success: Option<bool>,
    /// Names of admitted senders; left out: all of them.
    pub sources: Option<Vec<String>>,
    /// Maximum number of versions that a sampled token can be behind the trainer's weights, for kind `rl`.
    /// Checked when a lease is requested; older groups go to quarantine.
    pub max_staleness: Option<u64>,
}

/// The order in which groups are given to trainers.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case", deny_unknown_fields)]
pub enum Sampling {
    // The braces are needed: serde lets a variant without them have any keys.
    /// Groups come in the order in which they became complete.
    Fifo {},
    /// Task types with more to learn from them first, the oldest group of the type first.
    Adaptive(AdaptiveConfig),
}

impl Default for Sampling {
    fn default() -> Self {
        Self::Fifo {}
    }
}

/// The `[pool]` table of `sinew pool serve`. Every limit is at least 1.
///
/// A full pool refuses a push (429 over HTTP, 507 if the disk is full) and keeps
/// what is stored.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct PoolConfig {
    /// Name of the one model whose trajectories are admitted; left out: it is not compared.
    pub model: Option<String>,
    /// Maximum trajectories that wait or are leased. Default: 65,536.
    pub max_rows: usize,
    /// Their maximum size in bytes, compressed. Default: 4 GiB.
    pub max_bytes: u64,
    /// Maximum bytes of one request. Default: 16 MiB.
    pub max_body_bytes: usize,
    /// Maximum trajectories of one request. Default: 4096.
    pub max_batch: usize,
    /// Rollouts of one `group` of this gateway that make the group complete, 1 or more; its finished
    /// rollouts are trajectories, too. Default: 1.
    pub rollout_group_size: u32,
    /// Maximum nodes of one trajectory. Default: 4096.
    pub max_nodes: usize,
    /// Maximum tokens of one trajectory, and of one path. Default: 262,144.
    pub max_tokens: usize,
    /// Maximum trajectories of one group. Default: 1024.
    pub max_group: u32,
    /// Maximum rows in quarantine, and of spans whose trace is incomplete. Default: 16,384.
    pub max_quarantine: usize,
    /// Seconds for a group to become complete. Default: 3600.
    pub group_ttl_s: f64,
    /// Seconds from the first span of a trace to its root. Default: 900.
    pub span_ttl_s: f64,
    /// Times that a trajectory is given out without being acknowledged; then it goes to quarantine.
    /// Default: 8.
    pub max_attempts: u32,
    /// Ids of trained trajectories that stay known, to recognize duplicates. Default: 1,048,576.
    pub remember: usize,
    /// Decode tokens that come with messages, and compare. Default: true.
    pub check_messages: bool,
    /// Compare some log-probabilities with the engine's. Default: none.
    pub spot_check: SpotCheck,
    /// Handling of spans that have only text. Default: quarantine.
    pub text_spans: TextSpans,
    /// Order of groups. Default: `fifo`.
    pub sampling: Sampling,
    /// Conditions for every task type.
    pub filter: TypeFilter,
    /// Conditions for a task type by name, which replace `filter`.
    pub filters: BTreeMap<String, TypeFilter>,
}

impl Default for PoolConfig {
    fn default() -> Self {
        Self {
            model: None,
            max_rows: 65_536,
            max_bytes: 4 << 30,
            max_body_bytes: 16 << 20,
            max_batch: 4096,
            rollout_group_size: 1,
            max_nodes: 4096,
            max_tokens: 262_144,
            max_group: 1024,
            max_quarantine: 16_384,
            group_ttl_s: 3600.0,
            span_ttl_s: 900.0,
            max_attempts: 8,
            remember: 1 << 20,
            check_messages: true,
            spot_check: SpotCheck::default(),
            text_spans: TextSpans::default(),
            sampling: Sampling::default(),
            filter: TypeFilter::default(),
            filters: BTreeMap::new(),
        }
    }
}

impl PoolConfig {
    /// Checks every value.
    ///
    /// # Errors
    /// Names the first key that is out of its range.
    pub fn check(&self) -> Result<(), ConfigError> {
        let counts = [
            ("max_rows", self.max_rows as u64, 1 << 24),
            ("max_bytes", self.max_bytes, 1 << 40),
            ("max_body_bytes", self.max_body_bytes as u64, 1 << 30),
            ("max_batch", self.max_batch as u64, 1 << 20),
            (
                "rollout_group_size",
                u64::from(self.rollout_group_size),
                65_536,
            ),
            ("max_nodes", self.max_nodes as u64, 1 << 20),
            ("max_tokens", self.max_tokens as u64, 1 << 26),
            ("max_group", u64::from(self.max_group), 65_536),
            ("max_quarantine", self.max_quarantine as u64, 1 << 24),
            ("max_attempts", u64::from(self.max_attempts), 1 << 20),
            ("remember", self.remember as u64, 1 << 28),
        ];
        let outside = counts
            .into_iter()
            .find(|(_, v, maximum)| *v < 1 || v > maximum);
        if let Some((key, value, maximum)) = outside {
            return Err(refused(key, value, format!("1 to {maximum}")));
        }
        for (key, s) in [
            ("group_ttl_s", self.group_ttl_s),
            ("span_ttl_s", self.span_ttl_s),
        ] {
            if !(s.is_finite() && s > 0.0) {
                return Err(refused(key, s, "a number of seconds above 0"));
            }
        }
        let spot = self.spot_check;
        if spot.tokens > 64 {
            return Err(refused("spot_check.tokens", spot.tokens, "0 to 64"));
        }
        if !(spot.gap.is_finite() && spot.gap > 0.0) {
            return Err(refused("spot_check.gap", spot.gap, "a number above 0"));
        }
        if let Sampling::Adaptive(config) = &self.sampling
            && let Some((field, value, allowed)) = config.broken()
        {
            return Err(refused(&format!("sampling.{field}"), value, allowed));
        }
        if let Sampling::Adaptive(config) = &self.sampling {
            curriculum(config)?;
        }
        self.filter.check("filter")?;
        let mut filters = self.filters.iter();
        filters.try_for_each(|(kind, filter)| filter.check(&format!("filters.{kind}")))
    }

    /// The filter of a task type: its own, or the general one.
    pub fn filter_of(&self, task_kind: &str) -> &TypeFilter {
        self.filters.get(task_kind).unwrap_or(&self.filter)
    }
}

impl TypeFilter {
    /// Refuses ranges that admit nothing.
    fn check(&self, name: &str) -> Result<(), ConfigError> {
        if let Some([least, most]) = self.reward
            && (least.is_nan() || most.is_nan() || least > most)
        {
            let value = format!("[{least}, {most}]");
            return Err(refused(&format!("{name}.reward"), value, "[least, most]"));
        }
        let ranges = [
            ("turns", self.turns),
            ("sampled_tokens", self.sampled_tokens),
            ("path_tokens", self.path_tokens),
        ];
        for (field, range) in ranges {
            if let Some([least, most]) = range.filter(|[least, most]| least > most || *most == 0) {
                let value = format!("[{least}, {most}]");
                let allowed = "[least, most], most above 0";
                return Err(refused(&format!("{name}.{field}"), value, allowed));
            }
        }
        Ok(())
    }
}

/// Refuses what only a run can follow that draws its tasks: a pool chooses among the types that wait.
///
/// A dial needs levels in order, pools of tasks need the tasks, and windows need the order in which episodes
/// ended: of rows that wait, none of these is known.
///
/// # Errors
/// If the signal is another one, or a key is one that the signals of a pool do not read.
fn curriculum(config: &AdaptiveConfig) -> Result<(), ConfigError> {
    let follows = matches!(config.signal, Signal::Success | Signal::Reward);
    let own = AdaptiveConfig {
        signal: config.signal,
        prior_successes: config.prior_successes,
        prior_failures: config.prior_failures,
        floor: config.floor,
        memory: config.memory,
        ..AdaptiveConfig::default()
    };
    if follows && own == *config {
        Ok(())
    } else {
        Err(refused(
            "sampling",
            format!("{config:?}"),
            "the signals \"success\" and \"reward\", with prior_successes, prior_failures, floor and memory; the \
             others are of [tasks] in a recipe",
        ))
    }
}

/// The error for a key, its value and the allowed range.
fn refused(key: &str, value: impl ToString, allowed: impl Into<String>) -> ConfigError {
    ConfigError {
        key: key.to_owned(),
        value: value.to_string(),
        allowed: allowed.into(),
    }
}
