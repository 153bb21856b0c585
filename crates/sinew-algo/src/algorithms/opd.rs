//! On-policy distillation (Agarwal et al. 2024, arXiv 2306.13649; Lu 2025, Thinking Machines).
//!
//! `A_t = distill·(ℓ_teacher − ℓ_behaviour)` on the student's own samples: the negative single-sample
//! estimate of the reverse KL per token, without discount or rewards. Another algorithm with `distill` adds
//! the term to its advantage, as in slime.

use super::{grpo, required};
use crate::batch::Batch;
use crate::composition::{Advantage, Composition};
use crate::error::AlgoError;
use crate::kind::AlgorithmKind;
use sinew_types::Aggregation;

/// Default composition.
pub(crate) fn preset() -> Composition {
    Composition {
        kind: AlgorithmKind::Opd,
        advantage: Advantage::None,
        distill: 1.0,
        aggregation: Aggregation::TokenMean,
        ..grpo::preset()
    }
}

/// Adds the teacher's term to the advantage of every sampled token.
pub(crate) fn distill(c: &Composition, batch: &mut Batch<'_>) -> Result<(), AlgoError> {
    if c.distill == 0.0 {
        return Ok(());
    }
    for i in batch.members().collect::<Vec<_>>() {
        for p in 0..batch.episodes[i].paths.len() {
            let episode = &batch.episodes[i];
            let path = &episode.paths[p];
            let teacher = required(c, episode, path, "teacher_logprobs", |c| {
                c.teacher_logprobs.as_ref()
            })?;
            let path = &mut batch.episodes[i].paths[p];
            for (t, teacher) in teacher.iter().enumerate() {
                if let (true, Some(own)) = (path.sampled[t], path.tokens[t].logprob) {
                    path.advantages[t] += c.distill * (teacher - f64::from(own));
                }
            }
        }
    }
    Ok(())
}
