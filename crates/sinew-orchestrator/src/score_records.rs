//! Group scores as records of the store, stored separately from the traces that they complete.
//!
//! A trace is stored when its episode ends, before its group is scored. The scores follow as records of one
//! source: a record for each part of the score, and last the value, or the reason why there is none. Every
//! reader of a trace completes the trace with these records ([`completed`]), so that a resumed run has the
//! same rewards without computing them again.

use crate::error::PipelineError;
use sinew_env::{Score, Unscored, waits_for_group, with_group};
use sinew_store::{
    MAX_SCORE_NAME, MAX_SCORE_REASON, Score as Scored, ScoreRecord, TraceStore, in_force,
};
use sinew_types::{EpisodeId, Outcome, Trace};
use std::collections::BTreeMap;

/// Source name of the records.
const SOURCE: &str = "group";
/// Record name of the value. The names of its parts begin with this name.
const VALUE: &str = "group";

/// An episode as the reward of its group sees it.
#[derive(Debug)]
pub struct Member {
    pub episode: EpisodeId,
    /// Outcome without the group's rewards.
    pub outcome: Outcome,
}

fn part_name(part: &str) -> String {
    format!("{VALUE}/{part}")
}

/// Stores the scores of a group at `at_us`, microseconds since 1970. They are durable when the function
/// returns.
///
/// The value of each episode is stored last. After a crash in between, the value is missing and the episode
/// is scored again.
///
/// # Errors
/// If the store fails or refuses a record.
pub fn keep(
    store: &dyn TraceStore,
    scores: &[(Member, Result<Score, Unscored>)],
    at_us: u64,
) -> Result<(), PipelineError> {
    let record = |episode: &EpisodeId, name: String, score| ScoreRecord {
        episode: episode.clone(),
        name,
        source: SOURCE.to_owned(),
        at_us,
        score,
    };
    let (mut records, mut values) = (Vec::new(), Vec::new());
    for (member, score) in scores {
        let episode = &member.episode;
        // A part that the store refuses must not end the run: it is a measurement, and can be left out.
        let fits = |p: &str| part_name(p).len() <= MAX_SCORE_NAME && !p.contains(char::is_control);
        let parts = score.iter().flat_map(|s| &s.parts);
        let parts = parts.filter(|(p, _)| fits(p));
        records.extend(parts.map(|(p, v)| record(episode, part_name(p), Scored::Value(*v))));
        let value = match score {
            Ok(score) => Scored::Value(score.value),
            Err(missing) => Scored::Unscored(shortened(&missing.reason)),
        };
        values.push(record(episode, VALUE.to_owned(), value));
    }
    records.append(&mut values);
    for stored in store.put_scores(&records).map_err(PipelineError::system)? {
        stored.map_err(PipelineError::system)?;
    }
    Ok(())
}

/// Shortens a reason to the limit of the store, between characters.
fn shortened(reason: &str) -> String {
    reason[..reason.floor_char_boundary(MAX_SCORE_REASON)].to_owned()
}

/// Completes a trace that waits for the score of its group, if the store has it.
///
/// # Errors
/// If the store cannot be read.
pub fn completed(store: &dyn TraceStore, trace: Trace) -> Result<Trace, PipelineError> {
    if !waits_for_group(&trace.outcome) {
        return Ok(trace);
    }
    let records = store.scores(&trace.episode);
    let outcome = grouped(&trace, &records.map_err(PipelineError::system)?);
    Ok(Trace { outcome, ..trace })
}

/// Returns the outcome of a trace, with the score of its group if `records` contain it.
pub(crate) fn grouped(trace: &Trace, records: &[ScoreRecord]) -> Outcome {
    if !waits_for_group(&trace.outcome) {
        return trace.outcome.clone();
    }
    let (mut parts, mut value) = (BTreeMap::new(), None);
    for ((name, source), record) in in_force(records) {
        let part = name.strip_prefix(VALUE).and_then(|n| n.strip_prefix('/'));
        match (&record.score, part) {
            _ if source != SOURCE => {}
            (Scored::Value(v), Some(part)) => {
                parts.insert(part.to_owned(), *v);
            }
            (Scored::Value(v), None) if name == VALUE => value = Some(Ok(*v)),
            (Scored::Unscored(why), None) if name == VALUE => value = Some(Err(why.clone())),
            _ => {}
        }
    }
    let score = match value {
        None => return trace.outcome.clone(),
        Some(Ok(value)) => Score::with_parts(value, parts),
        Some(Err(reason)) => Err(Unscored::new(reason)),
    };
    with_group(&trace.outcome, score)
}
