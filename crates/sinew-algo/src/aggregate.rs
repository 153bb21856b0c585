//! Computes weights and rows, the last step.

use crate::batch::Batch;
use crate::composition::Composition;
use crate::episode::{Episode, EpisodeColumns, Path};
use crate::error::AlgoError;
use crate::report::AlgoReport;
use sinew_types::{Aggregation, TrainRow};

/// Converts a batch with advantages to rows. The weight of a token is its share of the loss. Denominators
/// include all episodes of the batch, also those whose rows are left out because they have no signal.
pub(crate) fn rows(
    c: &Composition,
    batch: &Batch<'_>,
    report: &mut AlgoReport,
) -> Result<Vec<TrainRow>, AlgoError> {
    let tokens = |&i: &usize| batch.episodes[i].trained_tokens();
    let with_times = batch.groups.iter().flat_map(|group| {
        let each = group.members.iter();
        each.map(|&i| (i, batch.times(group, i)))
    });
    let counted: Vec<(usize, usize)> = with_times.filter(|(i, _)| tokens(i) > 0).collect();
    let total: usize = counted.iter().map(|(i, times)| times * tokens(i)).sum();
    report.denominator_episodes = counted.iter().map(|(_, times)| times).sum();
    report.denominator_tokens = total;
    let mut rows = Vec::new();
    for &(i, times) in &counted {
        let episode = &batch.episodes[i];
        let episodes = report.denominator_episodes as f64;
        let weight = token_weight(c.aggregation, episode.trained_tokens(), total, episodes);
        // An episode that counts several times has one row with a larger weight.
        let weight = weight * times as f64;
        let silent = episode.paths.iter().all(without_signal);
        if silent && !c.trains_without_advantage() {
            report.without_signal += 1;
            continue;
        }
        report.trained_episodes += 1;
        for path in &episode.paths {
            rows.push(row(episode, path, weight, episode.columns)?);
            report.trained_tokens += path.trains.iter().filter(|&&t| t).count();
        }
    }
    report.rows = rows.len();
    Ok(rows)
}

/// Rows of preference pairs. All pairs have the same weight, and the log-probability of a sequence is the sum
/// over its tokens.
pub(crate) fn preference_rows(
    batch: &Batch<'_>,
    report: &mut AlgoReport,
) -> Result<Vec<TrainRow>, AlgoError> {
    let has_signal = |e: &Episode<'_>| !e.paths.iter().all(without_signal);
    let chosen: Vec<&Episode<'_>> = batch
        .members()
        .map(|i| &batch.episodes[i])
        .filter(|e| e.trains && has_signal(e))
        .collect();
    let mut rows = Vec::new();
    for episode in &chosen {
        // A pair has two episodes.
        let weight = 2.0 / chosen.len() as f64;
        for path in &episode.paths {
            rows.push(row(episode, path, weight, episode.columns)?);
            report.trained_tokens += path.trains.iter().filter(|&&t| t).count();
        }
    }
    report.trained_episodes = chosen.len();
    report.denominator_episodes = chosen.len();
    report.denominator_tokens = report.trained_tokens;
    report.rows = rows.len();
    Ok(rows)
}

/// Share of one token in the loss. `own` is the number of trained tokens of its episode, `total` that of the
/// batch, and `episodes` the number of episodes with trained tokens.
fn token_weight(aggregation: Aggregation, own: usize, total: usize, episodes: f64) -> f64 {
    match aggregation {
        Aggregation::TokenMean => 1.0 / total as f64,
        Aggregation::SequenceMeanTokenMean => 1.0 / (episodes * own as f64),
        Aggregation::SequenceMeanTokenSum => 1.0 / episodes,
        Aggregation::SequenceMeanTokenSumNorm { length } => 1.0 / (episodes * f64::from(length)),
        Aggregation::TokenSum => 1.0,
    }
}

/// True if all trained tokens of a path have advantage 0.
fn without_signal(path: &Path) -> bool {
    let mut trained = path.advantages.iter().zip(&path.trains);
    trained.all(|(a, trains)| !trains || *a == 0.0)
}

/// Sampling temperatures of the trained tokens. Empty if all are 1.
fn temperatures(episode: &Episode<'_>, path: &Path) -> Vec<f32> {
    let at = |t: usize| {
        if path.trains[t] && episode.tempered {
            path.tokens[t].temperature
        } else {
            1.0
        }
    };
    let all: Vec<f32> = (0..path.tokens.len()).map(at).collect();
    if all.iter().all(|&t| t == 1.0) {
        Vec::new()
    } else {
        all
    }
}

/// Creates the row of a path. `weight` is that of each trained token. `masks` has those of the episode.
pub(crate) fn row(
    episode: &Episode<'_>,
    path: &Path,
    weight: f64,
    masks: Option<&EpisodeColumns>,
) -> Result<TrainRow, AlgoError> {
    let narrow = |values: Vec<f64>| values.into_iter().map(|v| v as f32).collect::<Vec<_>>();
    let only_trained = |values: &[f64]| {
        let pairs = values.iter().zip(&path.trains);
        pairs
            .map(|(v, &t)| if t { *v as f32 } else { 0.0 })
            .collect::<Vec<_>>()
    };
    let logprob = |t: usize| path.tokens[t].logprob.unwrap_or(0.0);
    let versions = path.tokens.iter().filter_map(|t| t.version);
    let leaf = path.tokens.last();
    let row = TrainRow {
        episode: episode.trace.episode.clone(),
        tokens: path.tokens.iter().map(|t| t.id).collect(),
        weights: only_trained(&vec![weight; path.tokens.len()]),
        advantages: only_trained(&path.advantages),
        temperatures: temperatures(episode, path),
        behaviour_logprobs: (0..path.tokens.len()).map(logprob).collect(),
        ref_logprobs: episode
            .column(path, |c| c.ref_logprobs.as_ref())
            .map(narrow),
        prox_logprobs: episode
            .column(path, |c| c.prox_logprobs.as_ref())
            .map(narrow),
        values: path
            .returns
            .as_ref()
            .and_then(|_| episode.column(path, |c| c.values.as_ref()))
            .map(narrow),
        returns: path.returns.as_deref().map(only_trained),
        teacher_top: episode.teacher_top(path),
        masks: episode.masks(path, masks)?,
        routes: leaf.map_or_else(Vec::new, |leaf| episode.trace.path_routes(leaf.node)),
        oldest_version: versions.min().unwrap_or_default(),
    };
    row.validate()?;
    Ok(row)
}
