//! Parts of stores that other crates make: what a trace becomes, and the rules that every store keeps.
//!
//! A store of another crate passes the same suite: `conformance`, `expire`, `owners`, `scores` and `calls` in
//! `tests/it/` of this crate, which its tests include by path.

use crate::error::{RecordError, StoreError};
use crate::facets::Facets;
use crate::packed;
use crate::score::{ScoreBatch, ScoreRecord, ScoreRefused};
use crate::sqlite_int;
use crate::store::{self, CommitOutcome, EndKind, EpisodeSummary, Filter, TrainedBatch};
use sinew_types::{EpisodeId, Trace};
use std::collections::HashMap;

/// Bytes before the packed trace: codec, uncompressed length, checksum.
const HEADER: usize = 1 + 4 + CHECKSUM;
/// Bytes of the checksum: the beginning of BLAKE3.
const CHECKSUM: usize = 16;

/// A trace as a store writes it.
#[derive(Clone, Debug)]
pub struct PreparedTrace {
    /// Row of the listing; its cursor is given by the store.
    pub summary: EpisodeSummary,
    /// Name of the environment.
    pub env: String,
    /// Version of the environment, if known.
    pub env_version: Option<String>,
    /// Oldest and newest policy version of the sampled tokens; `None` without any.
    pub versions: Option<(u64, u64)>,
    /// Number of the last sampled turn, from 1; 0 without any.
    pub last_turn: u32,
    /// Equal for episodes with equal task, tokens and messages.
    pub content: [u8; 16],
    /// Id in an external system.
    pub external: Option<String>,
    /// Codec, length (4 bytes, little-endian), checksum of the rest, packed trace.
    pub payload: Vec<u8>,
}

/// Encodes a trace and reads its row.
///
/// # Errors
/// If it breaks an invariant, or has more than `max_bytes` before compression.
pub fn prepare(trace: &Trace, max_bytes: u32) -> Result<PreparedTrace, StoreError> {
    trace.validate()?;
    signed("draw", trace.origin.draw)?;
    let episode = || trace.episode.clone();
    let encoded = packed::encode(trace, true).map_err(|reason| StoreError::Encode {
        episode: episode(),
        reason,
    })?;
    if encoded.raw_len > max_bytes {
        return Err(StoreError::TooLarge {
            episode: episode(),
            field: "encoded length",
            value: u64::from(encoded.raw_len),
            limit: u64::from(max_bytes),
        });
    }
    let facets = Facets::of(trace);
    let mut payload = Vec::with_capacity(HEADER + encoded.bytes.len());
    payload.push(encoded.codec as u8);
    payload.extend(encoded.raw_len.to_le_bytes());
    payload.extend(checksum(&encoded.bytes));
    payload.extend(&encoded.bytes);
    Ok(PreparedTrace {
        summary: EpisodeSummary::of(trace),
        env: facets.env,
        env_version: facets.env_version,
        versions: facets.versions,
        last_turn: facets.last_turn,
        content: facets.content,
        external: trace.origin.external.clone(),
        payload,
    })
}

fn checksum(bytes: &[u8]) -> [u8; CHECKSUM] {
    let mut sum = [0; CHECKSUM];
    sum.copy_from_slice(&blake3::hash(bytes).as_bytes()[..CHECKSUM]);
    sum
}

/// Decodes the payload of an episode, the inverse of [`prepare`].
///
/// # Errors
/// [`StoreError::Payload`] if it fails its checksum, or belongs to another episode.
pub fn trace_of(episode: &EpisodeId, payload: &[u8]) -> Result<Trace, StoreError> {
    let damaged = |reason: RecordError| StoreError::Payload {
        episode: episode.clone(),
        reason: reason.to_string(),
    };
    let bytes = |reason| damaged(RecordError::Bytes(reason));
    let Some((header, packed)) = payload.split_at_checked(HEADER) else {
        return Err(bytes("it is shorter than its header"));
    };
    let [codec, a, b, c, d, sum @ ..] = header else {
        return Err(bytes("it is shorter than its header"));
    };
    if sum != checksum(packed) {
        return Err(bytes("it fails its checksum"));
    }
    let raw_len = u32::from_le_bytes([*a, *b, *c, *d]);
    let trace = packed::decode(*codec, raw_len, packed).map_err(damaged)?;
    if trace.episode != *episode {
        return Err(damaged(RecordError::OtherEpisode(trace.episode)));
    }
    Ok(trace)
}

/// Returns the number of an end in an index.
pub fn end_code(end: EndKind) -> i16 {
    end.code() as i16
}

/// Inverse of [`end_code`].
pub fn end_of(code: i16) -> Option<EndKind> {
    EndKind::from_code(i64::from(code))
}

/// Returns the number of rows of a page.
///
/// # Errors
/// If the filter asks for more than [`crate::MAX_PAGE`].
pub fn page_limit(filter: &Filter) -> Result<usize, StoreError> {
    filter.checked_limit()
}

/// Converts a count for a database without unsigned integers.
///
/// # Errors
/// If the value is above 2^63 - 1.
pub fn signed(field: &'static str, value: u64) -> Result<i64, StoreError> {
    sqlite_int::signed(field, value)
}

/// Refuses an update that names an episode twice, or whose number does not fit.
///
/// # Errors
/// [`StoreError::TrainedTwice`], [`StoreError::Argument`].
pub fn check_update(update: &TrainedBatch) -> Result<(), StoreError> {
    signed("step", update.step)?;
    store::check_batch(&update.batch, &update.episodes)
}

/// Refuses a commit of owner `own` unless `newest` is its number.
///
/// # Errors
/// [`StoreError::Fenced`], [`StoreError::Argument`].
pub fn check_fence(own: u64, newest: u64) -> Result<(), StoreError> {
    store::check_fence(own, newest)
}

/// Returns the result of committing a batch name again.
///
/// # Errors
/// [`StoreError::BatchConflict`] if the contents differ.
pub fn same_batch(known: &TrainedBatch, given: &TrainedBatch) -> Result<CommitOutcome, StoreError> {
    store::same_batch(known, given)
}

/// State of an episode for scores.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ScoredEpisode {
    /// Whether its trace can be read.
    pub readable: bool,
    /// Its records.
    pub records: Vec<ScoreRecord>,
}

/// Records to insert, and the result of each given record.
pub type AdmittedScores = (Vec<ScoreRecord>, Vec<Result<CommitOutcome, ScoreRefused>>);

/// Decides for each of several scores whether it is new. `known` has the episodes that the store knows.
///
/// # Errors
/// If there are more than [`crate::MAX_SCORE_BATCH`].
pub fn admit_scores(
    records: &[ScoreRecord],
    known: &HashMap<EpisodeId, ScoredEpisode>,
) -> Result<AdmittedScores, StoreError> {
    store::check_scores(records)?;
    let (mut new, mut out) = (Vec::new(), Vec::with_capacity(records.len()));
    let mut batch = ScoreBatch::default();
    for record in records {
        let admitted = record.checked().and_then(|record| {
            let more = batch.of(&record.episode);
            let is_new = !batch.holds(&record) && is_new(&record, known, more)?;
            Ok((record, is_new))
        });
        out.push(admitted.map(|(record, is_new)| {
            if !is_new {
                return CommitOutcome::Duplicate;
            }
            batch.add(&record);
            new.push(record);
            CommitOutcome::New
        }));
    }
    Ok((new, out))
}

/// Whether a record is to be stored, after `more` others of its episode.
fn is_new(
    record: &ScoreRecord,
    known: &HashMap<EpisodeId, ScoredEpisode>,
    more: usize,
) -> Result<bool, ScoreRefused> {
    let episode = || record.episode.clone();
    let Some(scored) = known.get(&record.episode) else {
        return Err(ScoreRefused::UnknownEpisode { episode: episode() });
    };
    if !scored.readable {
        return Err(ScoreRefused::Collected { episode: episode() });
    }
    if scored.records.contains(record) {
        return Ok(false);
    }
    if scored.records.len() + more >= crate::MAX_SCORES {
        return Err(ScoreRefused::TooMany { episode: episode() });
    }
    Ok(true)
}

/// Encodes an update as text. The inverse of [`update_of`].
pub fn update_text(update: &TrainedBatch) -> String {
    serde_json::to_string(update).unwrap_or_default()
}

/// Decodes an update.
///
/// # Errors
/// [`StoreError::Payload`] if the text is none.
pub fn update_of(batch: &str, text: &str) -> Result<TrainedBatch, StoreError> {
    serde_json::from_str(text).map_err(|e| StoreError::Payload {
        episode: EpisodeId::new(batch),
        reason: format!("the update of that name is no JSON of one: {e}"),
    })
}
