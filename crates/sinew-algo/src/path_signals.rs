//! Signals along a path that several algorithms read: columns of scores, and rewards token by token.

use crate::composition::{Composition, ProcessRewards};
use crate::episode::{Episode, Path};
use crate::error::AlgoError;

/// KL penalty as a reward, `−kl · (ℓ_behaviour − ℓ_ref)` (k1), at each sampled token of a path. 0 elsewhere.
pub(crate) fn kl_rewards(
    c: &Composition,
    episode: &Episode<'_>,
    path: &Path,
) -> Result<Vec<f64>, AlgoError> {
    if c.rewards.kl == 0.0 {
        return Ok(vec![0.0; path.tokens.len()]);
    }
    let reference = required(c, episode, path, "ref_logprobs", |c| {
        c.ref_logprobs.as_ref()
    })?;
    let penalty = |(t, reference): (usize, &f64)| match path.tokens[t].logprob {
        Some(logprob) if path.sampled[t] => -c.rewards.kl * (f64::from(logprob) - reference),
        _ => 0.0,
    };
    Ok(reference.iter().enumerate().map(penalty).collect())
}

/// Rewards per token for recursions: the KL penalty on each sampled token, process rewards on the last token
/// of their turn, and the outcome on the last sampled token of the path.
pub(crate) fn token_rewards(
    c: &Composition,
    episode: &Episode<'_>,
    path: &Path,
) -> Result<Vec<f64>, AlgoError> {
    let mut rewards = kl_rewards(c, episode, path)?;
    if c.rewards.process == ProcessRewards::Sum {
        for step in &path.steps {
            rewards[step.last] += step.reward;
        }
    }
    if let Some(last) = path.sampled.iter().rposition(|&s| s) {
        rewards[last] += episode.outcome;
    }
    Ok(rewards)
}

/// Critic's value after a path. 0 unless the episode was truncated and is bootstrapped.
pub(crate) fn value_after(
    c: &Composition,
    episode: &Episode<'_>,
    path: &Path,
) -> Result<f64, AlgoError> {
    if !episode.bootstrapped {
        return Ok(0.0);
    }
    let leaf = path.tokens.last().map(|t| t.node);
    let values = episode.columns.map(|columns| &columns.values_after);
    let value = leaf.and_then(|leaf| values?.get(&leaf));
    value
        .map(|&v| f64::from(v))
        .ok_or_else(|| AlgoError::MissingColumn {
            algorithm: c.kind.name(),
            column: "values_after",
            episode: episode.trace.episode.clone(),
        })
}

/// Values of a required column along a path.
pub(crate) fn required(
    c: &Composition,
    episode: &Episode<'_>,
    path: &Path,
    column: &'static str,
    pick: impl Fn(&crate::EpisodeColumns) -> Option<&Vec<Vec<f32>>>,
) -> Result<Vec<f64>, AlgoError> {
    episode
        .column(path, pick)
        .ok_or_else(|| AlgoError::MissingColumn {
            algorithm: c.kind.name(),
            column,
            episode: episode.trace.episode.clone(),
        })
}
