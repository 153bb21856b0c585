//! Episodes as rows, the common form of all producers and consumers.
//!
//! A row has the whole trace, compressed, as its consumers may be on other machines; it goes when the row is
//! done. The outcome is in the field `reward`: a row without it waits for a scorer.

use super::payload::{pack, unpack};
use super::rows::{AckedRow, Consumer, Field, LeasedRow, NewRow, field, fields};
use crate::error::StoreError;
use sinew_types::{Outcome, Trace};

/// An episode as a row: `source` names its producer, in whose name its key and its group are unique.
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

/// The outcome of an episode as the field of its row.
///
/// # Errors
/// If it cannot be encoded.
pub fn reward_field(key: &str, outcome: &Outcome) -> Result<Field, StoreError> {
    Ok(Field::new(fields::REWARD, pack(key, outcome)?))
}

/// A row with its reward, as a scorer acks it.
///
/// # Errors
/// If the outcome cannot be encoded.
pub fn scored(key: &str, outcome: &Outcome) -> Result<AckedRow, StoreError> {
    Ok(AckedRow {
        key: key.to_owned(),
        fields: vec![reward_field(key, outcome)?],
    })
}

/// The episode of a row that was leased, with the outcome of its field `reward` where it has one.
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

/// The consumer that gives rows their reward, in any number of processes.
pub fn scorer_consumer() -> Consumer {
    Consumer {
        name: "scorer".into(),
        needs: vec![fields::TRACE.into()],
        writes: vec![fields::REWARD.into()],
        last: false,
    }
}

/// A consumer that trains on rows with a reward, each of them once under its name.
pub fn trainer_consumer(name: &str) -> Consumer {
    Consumer {
        name: name.to_owned(),
        needs: vec![fields::TRACE.into(), fields::REWARD.into()],
        writes: Vec::new(),
        last: true,
    }
}
