//! Whitening of advantages over the trained tokens of a batch, a task, a task type or an environment.

use crate::batch::Batch;
use crate::composition::Normalize;
use std::collections::BTreeMap;

/// Minimum variance (REINFORCE++, Hu et al. 2025).
const MIN_VARIANCE: f64 = 1e-8;

/// Whitening `(A − mean) / sqrt(max(var, 1e-8))` with the population variance over the trained tokens of each
/// scope. Tokens of episodes that do not train are ignored.
pub(crate) fn normalize(scope: Normalize, batch: &mut Batch<'_>) {
    if scope == Normalize::None {
        return;
    }
    let mut by_scope: BTreeMap<String, (f64, f64, f64)> = BTreeMap::new();
    let members: Vec<usize> = batch.members().collect();
    let key = |batch: &Batch<'_>, i: usize| match scope {
        Normalize::Task => batch.episodes[i].trace.task.0.clone(),
        Normalize::Kind => batch.episodes[i].trace.task_kind.clone(),
        Normalize::Environment => batch.episodes[i].trace.environment().to_owned(),
        Normalize::None | Normalize::Batch => String::new(),
    };
    let each = |batch: &Batch<'_>, i: usize| -> Vec<f64> {
        let episode = &batch.episodes[i];
        let paths = episode.paths.iter().filter(|_| episode.trains);
        let pairs = paths.flat_map(|p| p.advantages.iter().zip(&p.trains));
        pairs.filter(|(_, t)| **t).map(|(a, _)| *a).collect()
    };
    for &i in &members {
        let sums = by_scope.entry(key(batch, i)).or_default();
        for a in each(batch, i) {
            sums.0 += 1.0;
            sums.1 += a;
        }
    }
    for &i in &members {
        let sums = by_scope.entry(key(batch, i)).or_default();
        let mean = sums.1 / sums.0.max(1.0);
        for a in each(batch, i) {
            sums.2 += (a - mean) * (a - mean);
        }
    }
    for &i in &members {
        let (count, sum, squares) = by_scope[&key(batch, i)];
        // A scope without trained episodes has no tokens.
        let count = count.max(1.0);
        let mean = sum / count;
        let std = (squares / count).max(MIN_VARIANCE).sqrt();
        for path in &mut batch.episodes[i].paths {
            for t in 0..path.advantages.len() {
                if path.sampled[t] {
                    path.advantages[t] = (path.advantages[t] - mean) / std;
                }
            }
        }
    }
}
