//! Bytes of an engine server (vLLM, SGLang) on each of its GPUs.

use super::amount;
use serde::Serialize;
use sinew_model::ModelShape;
use std::fmt;

/// Share of a GPU that servers take by default, in percent: vLLM's
/// `--gpu-memory-utilization 0.9`.
const SHARE: u64 = 90;
/// CUDA context, CUDA graphs and activations of a server. An estimate; not measured here.
const PROCESS: u64 = 2_000_000_000;
/// Bytes of a number of the served weights and of the KV cache: bf16.
const NUMBER: u64 = 2;
/// Most GPUs of one server that are tried.
const MOST_PARALLEL: u64 = 64;

/// An engine server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EngineSetup {
    /// The served model.
    pub model: ModelShape,
    /// Tokens that the KV cache must hold at least: one whole context.
    pub kv_tokens: u64,
    /// GPUs of one server (tensor parallelism); `None`: the fewest that fit, a power of two.
    pub tensor_parallel: Option<u64>,
    /// Whether it must run on the GPUs of the plan. Otherwise it may be elsewhere, and a server that does not
    /// fit is a warning.
    pub here: bool,
}

/// Bytes on each GPU of a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct EngineBytes {
    /// GPUs of one server, `P`.
    pub tensor_parallel: u64,
    /// Weights in bf16, `2 N / P`.
    pub weights: u64,
    /// Keys and values of the tokens that must fit: `2 bytes x 2 x layers x KV heads x head width`, divided
    /// by the GPUs over which KV heads can be split.
    pub keys: u64,
    /// Context, graphs and activations.
    pub process: u64,
    /// Tokens for which the rest of the server's share has room.
    pub kv_tokens: u64,
}

impl EngineBytes {
    /// All together, with the least KV cache.
    pub fn total(&self) -> u64 {
        let rest = self.keys.saturating_add(self.process);
        self.weights.saturating_add(rest)
    }
}

impl fmt::Display for EngineBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "weights {}, keys and values of one context {}, process {}",
            amount(self.weights),
            amount(self.keys),
            amount(self.process)
        )
    }
}

impl EngineSetup {
    /// Bytes on GPUs of `bytes` each if a server has `parallel` of them.
    pub fn bytes(&self, parallel: u64, bytes: u64) -> EngineBytes {
        let parallel = parallel.max(1);
        let split = parallel.min(self.model.kv_heads.max(1));
        let token = (NUMBER * self.model.cached).div_ceil(split);
        let weights = self
            .model
            .parameters
            .saturating_mul(NUMBER)
            .div_ceil(parallel);
        let used = weights.saturating_add(PROCESS);
        let room = (bytes / 100 * SHARE).saturating_sub(used);
        EngineBytes {
            tensor_parallel: parallel,
            weights,
            keys: token.saturating_mul(self.kv_tokens),
            process: PROCESS,
            kv_tokens: room / token.max(1),
        }
    }

    /// The server that fits `count` GPUs of `bytes` each; otherwise the bytes of the largest that was tried.
    pub(super) fn fitting(&self, count: u64, bytes: u64) -> Result<EngineBytes, EngineBytes> {
        let fits = |found: &EngineBytes| found.kv_tokens >= self.kv_tokens;
        let mut parallel = self.tensor_parallel.unwrap_or(1).max(1);
        loop {
            let found = self.bytes(parallel, bytes);
            if fits(&found) && parallel <= count {
                return Ok(found);
            }
            let more = parallel * 2;
            if self.tensor_parallel.is_some() || more > count.min(MOST_PARALLEL) {
                return Err(found);
            }
            parallel = more;
        }
    }

    /// The fewest GPUs of `bytes` each, a power of two, on which a server fits.
    pub(super) fn fewest(&self, bytes: u64) -> Option<u64> {
        let free = Self {
            tensor_parallel: None,
            ..self.clone()
        };
        let found = free.fitting(MOST_PARALLEL, bytes).ok();
        found.map(|found| found.tensor_parallel)
    }
}
