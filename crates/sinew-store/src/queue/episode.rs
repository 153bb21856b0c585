//! Episodes as queue rows: the common form of all producers and consumers.
//!
//! A row contains the whole compressed trace, since its consumers may be on other machines. The trace is
//! deleted when the row is done. The outcome is in the field `reward`; a row without this field waits for a
//! scorer.

use super::payload::{pack, unpack};
use super::rows::{AckedRow, Consumer, Field, LeasedRow, NewRow, field, fields};
use crate::error::StoreError;
use sinew_types::{Outcome, Trace};

/// Builds the row of an episode. `source` is the name of its producer; key and group are unique within a
/// source.
///
/// A row without `scored` has no reward and waits for a scorer.
///
/// # Errors
/// If the trace cannot be encoded.
pub fn episode_row(
    source: &str,
    trace: &Trace,
    group_size: u32,
    scored: bool,
) -> Result<NewRow, StoreError> {
    let key = format!("{source}:{}", trace.episode);
    let mut row = NewRow {
        group: match group_size {
            0 | 1 => String::new(),
            _ => format!("{source}:{}", trace.group),
        },
        group_size: group_size.max(1),
        tokens: trace.sampled_tokens() as u64,
        version: trace.oldest_version().unwrap_or_default().0,
        ..NewRow::new(key, Field::new(fields::TRACE, Vec::new()))
    };
    row.fields = vec![Field::new(fields::TRACE, pack(&row.key, trace)?)];
    if scored {
        row.fields.push(reward_field(&row.key, &trace.outcome)?);
    }
    Ok(row)
}

/// Builds the field with the outcome of an episode.
///
/// # Errors
/// If it cannot be encoded.
pub fn reward_field(key: &str, outcome: &Outcome) -> Result<Field, StoreError> {
    Ok(Field::new(fields::REWARD, pack(key, outcome)?))
}

/// Builds the acknowledgement with which a scorer adds the outcome to a row.
///
/// # Errors
/// If the outcome cannot be encoded.
pub fn scored(key: &str, outcome: &Outcome) -> Result<AckedRow, StoreError> {
    Ok(AckedRow {
        key: key.to_owned(),
        fields: vec![reward_field(key, outcome)?],
    })
}

/// Decodes the episode of a leased row, with the outcome from its field `reward` if there is one.
///
/// # Errors
/// [`StoreError::Row`] if a field is missing or holds something else.
pub fn episode(row: &LeasedRow) -> Result<Trace, StoreError> {
    let Some(value) = field(&row.fields, fields::TRACE) else {
        return Err(StoreError::Row {
            key: row.key.clone(),
            reason: format!("it has no field {:?}", fields::TRACE),
        });
    };
    let mut trace: Trace = unpack(&row.key, value)?;
    if let Some(value) = field(&row.fields, fields::REWARD) {
        trace.outcome = unpack(&row.key, value)?;
    }
    trace.validate().map_err(|e| StoreError::Row {
        key: row.key.clone(),
        reason: e.to_string(),
    })?;
    Ok(trace)
}

/// Consumer that adds the reward to rows, in any number of processes.
pub fn scorer_consumer() -> Consumer {
    Consumer {
        name: "scorer".into(),
        needs: vec![fields::TRACE.into()],
        writes: vec![fields::REWARD.into()],
        last: false,
    }
}

/// Consumer that trains on rows with a reward; each row is acked once per consumer name.
pub fn trainer_consumer(name: &str) -> Consumer {
    Consumer {
        name: name.to_owned(),
        needs: vec![fields::TRACE.into(), fields::REWARD.into()],
        writes: Vec::new(),
        last: true,
    }
}
