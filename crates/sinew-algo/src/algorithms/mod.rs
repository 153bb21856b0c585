//! One file an algorithm: its formula, paper and preset.

pub mod dapo;
pub mod dr_grpo;
pub mod grpo;
pub mod grpo_roc;
pub mod reinforce;
pub mod rloo;

mod normalize;

use crate::batch::Batch;
use crate::composition::{Advantage, Composition};
use crate::episode::{Episode, Path};
use crate::pipeline::AlgoError;
use crate::report::AlgoReport;
pub(crate) use normalize::normalize;

/// Fills in the advantages (and returns) of every path in the batch.
pub(crate) fn advantages(
    c: &Composition,
    batch: &mut Batch<'_>,
    _report: &mut AlgoReport,
) -> Result<(), AlgoError> {
    match c.advantage {
        Advantage::Group { baseline, scale } => {
            grpo::advantages(baseline, scale, c.rewards.process, batch);
        }
        Advantage::One => {
            for i in batch.members().collect::<Vec<_>>() {
                batch.broadcast(i, 1.0);
            }
        }
        _ => {}
    }
    Ok(())
}

/// `−kl · (ℓ_behaviour − ℓ_ref)` on each sampled token of a path, 0 elsewhere: k1 as a reward.
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

/// A column that the algorithm cannot do without.
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
