//! Settings of the client.

use super::error::ClientError;
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// Default limit of one command.
const TIMEOUT: Duration = Duration::from_secs(1800);
/// Scale of all adapters of the protocol: a product is multiplied by `32 / rank`.
const ALPHA: f32 = 32.0;
/// Projections of attention, by PEFT's names.
const ATTENTION: [&str; 4] = ["q_proj", "k_proj", "v_proj", "o_proj"];
/// Projections of the feed-forward layers.
const MLP: [&str; 3] = ["gate_proj", "up_proj", "down_proj"];
/// The output matrix.
const UNEMBEDDING: [&str; 1] = ["lm_head"];

/// A service with its key and limits.
#[derive(Clone, PartialEq, Eq)]
pub struct ServiceOptions {
    /// Address, such as `http://127.0.0.1:8400`: requests go to `/api/v1/...` below it.
    pub url: String,
    /// Key that is sent with every request.
    pub api_key: String,
    /// Longest time of one command, its wait in queues included. Default: 30 minutes.
    pub timeout: Duration,
    /// Name of the run, which the service shows in its lists. Default: empty.
    pub run: String,
}

sinew_types::debug_fields!(ServiceOptions, url, timeout, run);

impl ServiceOptions {
    /// The service at `url`, with default limits.
    pub fn new(url: impl Into<String>, api_key: impl Into<String>) -> Self {
        Self {
            url: url.into(),
            api_key: api_key.into(),
            timeout: TIMEOUT,
            run: String::new(),
        }
    }
}

/// Adapters as the protocol describes them: groups of projections with one rank. Their scale is 32.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AdapterOptions {
    /// Inner width, at least 1.
    pub rank: u32,
    /// Whether the projections of attention have adapters.
    pub attn: bool,
    /// Whether those of the feed-forward layers have.
    pub mlp: bool,
    /// Whether the output matrix has.
    pub unembed: bool,
}

impl AdapterOptions {
    /// Adapters from the keys of a recipe. No targets: all projections of the layers.
    ///
    /// # Errors
    /// If the scale is not 32, or the targets are not whole groups; names the key and what is allowed.
    pub fn from_targets(rank: usize, alpha: f32, targets: &[String]) -> Result<Self, ClientError> {
        let wrong = |text: String| Err(ClientError::Setup(text));
        if alpha != ALPHA {
            return wrong(format!(
                "train.lora.alpha = {alpha}: allowed: {ALPHA}, the scale of all adapters of the protocol"
            ));
        }
        let Some(rank) = u32::try_from(rank).ok().filter(|&rank| rank > 0) else {
            return wrong(format!("train.lora.rank = {rank}: allowed: 1 or more"));
        };
        let named = |name: &&str| targets.iter().any(|target| target == *name);
        let group = |names: &[&str]| match names.iter().filter(|name| named(name)).count() {
            0 => Some(false),
            n if n == names.len() => Some(true),
            _ => None,
        };
        let known = |target: &String| {
            let mut all = ATTENTION.iter().chain(&MLP).chain(&UNEMBEDDING);
            all.any(|name| name == target)
        };
        let groups = (group(&ATTENTION), group(&MLP), group(&UNEMBEDDING));
        match groups {
            _ if targets.is_empty() => Ok(Self {
                rank,
                attn: true,
                mlp: true,
                unembed: false,
            }),
            (Some(attn), Some(mlp), Some(unembed)) if targets.iter().all(known) => Ok(Self {
                rank,
                attn,
                mlp,
                unembed,
            }),
            _ => wrong(format!(
                "train.lora.targets = {targets:?}: allowed: whole groups, as the protocol has them: \
                 {ATTENTION:?}, {MLP:?}, {UNEMBEDDING:?}"
            )),
        }
    }
}

/// A model to train at a service.
#[derive(Clone, Debug, PartialEq)]
pub struct TinkerSetup {
    /// The service.
    pub service: ServiceOptions,
    /// Name of the base model at the service; `None`: the only one that it trains.
    pub base_model: Option<String>,
    /// Adapters; `None`: all weights are trained.
    pub adapters: Option<AdapterOptions>,
    /// Seed of the adapters' first values.
    pub seed: u64,
    /// State that training begins with (`tinker://...`); `None`: the base model.
    pub start: Option<String>,
    /// Number of checkpoints of the run that are kept, at least 1: older states are deleted at the service.
    pub keep: usize,
}

impl TinkerSetup {
    /// Trains all weights of the only model of a service.
    pub fn new(service: ServiceOptions) -> Self {
        Self {
            service,
            base_model: None,
            adapters: None,
            seed: 0,
            start: None,
            keep: 1,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(groups: &[&[&str]]) -> Vec<String> {
        groups.concat().into_iter().map(str::to_owned).collect()
    }

    #[test]
    fn targets_are_whole_groups() {
        let of = |groups: &[&[&str]]| AdapterOptions::from_targets(8, 32.0, &names(groups));
        let parts = |groups: &[&[&str]]| of(groups).map(|a| (a.attn, a.mlp, a.unembed));
        assert_eq!(parts(&[]), Ok((true, true, false)));
        assert_eq!(parts(&[&ATTENTION]), Ok((true, false, false)));
        assert_eq!(parts(&[&MLP, &ATTENTION]), Ok((true, true, false)));
        assert_eq!(parts(&[&UNEMBEDDING]), Ok((false, false, true)));
        for part in [&["q_proj"][..], &["q_proj", "v_proj"], &["embed_tokens"]] {
            let error = of(&[part]).unwrap_err().to_string();
            assert!(error.contains("train.lora.targets"), "{error}");
            assert!(error.contains("down_proj"), "{error}");
        }
    }

    #[test]
    fn other_scales_are_refused() {
        let error = AdapterOptions::from_targets(8, 16.0, &[]).unwrap_err();
        let text = error.to_string();
        assert!(
            text.contains("train.lora.alpha = 16: allowed: 32"),
            "{text}"
        );
        assert!(AdapterOptions::from_targets(0, 32.0, &[]).is_err());
    }
}
