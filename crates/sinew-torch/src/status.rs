//! Answers of a server that people see.

use crate::wire::Reported;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::fmt;

/// Routers of a mixture-of-experts model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
pub struct RouterInfo {
    /// Decoder layers of the model.
    pub layers: u32,
    /// Number of experts of a token in a layer.
    pub top_k: u32,
    /// Number of experts of a layer.
    pub experts: u32,
}

/// Properties of an open server.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
pub struct ServerInfo {
    /// Micro-batches of a wave: the ranks.
    pub lanes: u32,
    /// Whether shared prefixes are computed once.
    #[serde(default)]
    pub shared: bool,
    /// Reason why they are not, in words.
    #[serde(default)]
    pub why_flat: Option<String>,
    /// The model's routers, if recorded experts can replace their choice.
    #[serde(default)]
    pub routers: Option<RouterInfo>,
    /// Tokens of the vocabulary.
    #[serde(default)]
    pub vocabulary: u32,
    /// Width of the hidden states.
    #[serde(default)]
    pub hidden: u32,
    /// Architecture, as `model_type` of the model's configuration.
    #[serde(default)]
    pub family: String,
    /// Numbers of all weights.
    #[serde(default)]
    pub parameters: u64,
    /// Numbers of the trained weights.
    #[serde(default)]
    pub trained: u64,
    /// Kind of the devices: `cuda` or `cpu`.
    #[serde(default)]
    pub device: String,
    /// Device of each rank, in words.
    #[serde(default)]
    pub devices: Vec<String>,
    /// Versions of `torch`, `transformers`, `peft` and `cuda`, where they are there.
    #[serde(default)]
    pub versions: BTreeMap<String, Option<String>>,
}

/// A rank in a [`ServerStatus`].
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
pub struct RankStatus {
    /// Its number, from 0.
    pub rank: u32,
    /// Name of its host.
    #[serde(default)]
    pub host: Option<String>,
    /// Its device, in words.
    #[serde(default)]
    pub device: Option<String>,
    /// Its work, such as `forward`; `idle`: it waits for a call. `None`: it has not reported yet.
    #[serde(default)]
    pub phase: Option<String>,
    /// Seconds since that work began.
    #[serde(default)]
    pub since_s: Option<f64>,
    /// Bytes of memory in use.
    #[serde(default)]
    pub bytes: Option<u64>,
}

/// The work of a server at a moment.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
pub struct ServerStatus {
    /// Number of the last call; `None` before the first.
    #[serde(default)]
    pub seq: Option<u64>,
    /// Name of the call that is computed; `None`: none is.
    #[serde(default)]
    pub verb: Option<String>,
    /// Seconds since that call came.
    #[serde(default)]
    pub since_s: Option<f64>,
    /// All ranks.
    #[serde(default)]
    pub ranks: Vec<RankStatus>,
    #[serde(default)]
    broken: Option<Reported>,
}

impl ServerStatus {
    /// Whether a failure left the server unusable.
    pub fn is_broken(&self) -> bool {
        self.broken.is_some()
    }
}

impl fmt::Display for ServerStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.ranks.is_empty() {
            return f.write_str("no rank reports a phase");
        }
        for (n, rank) in self.ranks.iter().enumerate() {
            let comma = if n > 0 { ", " } else { "" };
            let phase = rank.phase.as_deref().unwrap_or("no report");
            write!(f, "{comma}rank {}: {phase}", rank.rank)?;
            if let Some(seconds) = rank.since_s {
                write!(f, " for {seconds:.0} s")?;
            }
        }
        Ok(())
    }
}
