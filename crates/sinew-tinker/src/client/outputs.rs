//! Passes without gradients: micro-batches as flat datums, and their scores.

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

/// Computes the scores of micro-batches without gradients.
pub(super) fn scored(
    model: &mut RemoteModel,
    wave: &[&MicroBatch],
) -> Result<Vec<(FlatBatch, Logprobs)>, PolicyError> {
    let flat: Vec<FlatBatch> = wave
        .iter()
        .map(|batch| FlatBatch::of(batch))
        .collect::<Result<_, _>>()?;
    let datums = || flat.iter().flat_map(|flat| &flat.datums);
    let data: Vec<Datum> = datums().map(FlatDatum::unweighted).collect();
    let parts = cut(model, datums(), &data);
    let mut logprobs = model.pass(&parts, true)?.into_iter();
    Ok(flat
        .into_iter()
        .map(|flat| {
            let own = logprobs.by_ref().take(flat.datums.len()).collect();
            (flat, own)
        })
        .collect())
}

/// The log-probabilities of a micro-batch's items.
pub(super) fn scores_of(flat: &FlatBatch, logprobs: &Logprobs) -> Scores {
    let places = flat.places.iter();
    Scores {
        logprobs: places.map(|p| logprobs[p.datum][p.index]).collect(),
        entropies: Vec::new(),
        values: Vec::new(),
    }
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
