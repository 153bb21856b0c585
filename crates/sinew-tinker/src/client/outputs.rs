//! Passes without gradients: micro-batches as flat datums, and their scores.

use super::error::ClientError;
use super::flat::{FlatBatch, FlatDatum, requests};
use super::model::{Logprobs, RemoteModel};
use crate::types::Datum;
use sinew_train::pack::MicroBatch;
use sinew_train::{OutputChoice, PolicyError, Scores};

/// The parts of `data` that fit one request each.
pub(super) fn cut<'a, 'b>(
    model: &RemoteModel,
    sizes: impl IntoIterator<Item = &'b FlatDatum>,
    data: &'a [Datum],
) -> Vec<&'a [Datum]> {
    let config = model.service().api().config;
    let (most, bytes) = (
        config.fwdbwd_max_chunk_len,
        config.fwdbwd_max_chunk_bytes_count,
    );
    let ranges = requests(sizes, most, bytes);
    ranges.into_iter().map(|range| &data[range]).collect()
}

/// Flattens micro-batches, and has `score` compute a row for each of their datums.
pub(super) fn passed<T>(
    wave: &[&MicroBatch],
    score: impl FnOnce(&[&FlatDatum]) -> Result<Vec<T>, ClientError>,
) -> Result<Vec<(FlatBatch, Vec<T>)>, PolicyError> {
    let flat: Vec<FlatBatch> = wave
        .iter()
        .map(|batch| FlatBatch::of(batch))
        .collect::<Result<_, _>>()?;
    let datums: Vec<&FlatDatum> = flat.iter().flat_map(|flat| &flat.datums).collect();
    let mut rows = score(&datums)?.into_iter();
    let own = |flat: FlatBatch| {
        let rows = rows.by_ref().take(flat.datums.len()).collect();
        (flat, rows)
    };
    Ok(flat.into_iter().map(own).collect())
}

/// Computes the log-probabilities of datums without gradients.
pub(super) fn unweighted(
    model: &mut RemoteModel,
    datums: &[&FlatDatum],
) -> Result<Logprobs, ClientError> {
    let data: Vec<Datum> = datums.iter().map(|datum| datum.unweighted()).collect();
    let parts = cut(model, datums.iter().copied(), &data);
    model.pass(&parts, true)
}

/// The log-probabilities of the items of micro-batches.
pub(super) fn scores(passed: &[(FlatBatch, Logprobs)]) -> Vec<Scores> {
    let of = |(flat, logprobs): &(FlatBatch, Logprobs)| Scores {
        logprobs: flat
            .places
            .iter()
            .map(|p| logprobs[p.datum][p.index])
            .collect(),
        entropies: Vec::new(),
        values: Vec::new(),
    };
    passed.iter().map(of).collect()
}

/// Refuses outputs that the protocol does not have.
pub(super) fn check_outputs(want: OutputChoice) -> Result<(), PolicyError> {
    let missing = if want.entropies {
        "entropies"
    } else if want.values {
        "values of a critic"
    } else {
        return Ok(());
    };
    Err(PolicyError::failed(format!(
        "{missing}: the Tinker protocol has log-probabilities only"
    )))
}
