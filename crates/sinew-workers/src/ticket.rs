//! Tickets: episodes to run, as plain data in rows of a queue.
//!
//! A row has the field `ticket` when it is put. The consumer `rollout` (any number of workers) runs the
//! episode and adds the field `trace`; the consumer `owner` takes it, and the row is done.

use serde::{Deserialize, Serialize};
use sinew_rollout::{EpisodeOptions, EpisodeSpec};
use sinew_store::StoreError;
use sinew_store::queue::{
    AckedRow, Consumer, Field, LeasedRow, NewRow, episode, field, fields, pack, unpack,
};
use sinew_types::{EpisodeId, GroupId, PolicyVersion, Task, Trace, WeightsId};

/// Name of the field with the ticket.
const TICKET: &str = "ticket";
/// Name of the consumer that runs episodes.
pub const ROLLOUT: &str = "rollout";
/// Name of the consumer that takes their traces.
pub const OWNER: &str = "owner";

/// An episode to run on any worker.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Ticket {
    /// Generation of the owner that issued it.
    pub fence: u64,
    /// Number among the tickets of this owner: an episode that is issued again has another one.
    pub number: u64,
    /// Number of its traces that were refused.
    pub refusals: u32,
    /// Id, group, draw, purpose and seed of the episode, as in [`EpisodeSpec`].
    pub episode: EpisodeId,
    pub group: GroupId,
    pub draw: u64,
    pub purpose: String,
    pub seed: u64,
    /// The task, with the data that only the environment reads.
    pub task: Task,
    /// Sampling temperature of held-out episodes; `None`: that of the recipe.
    pub temperature: Option<f32>,
    /// Maximum number of turns.
    pub max_turns: u32,
    /// Oldest version of the weights that may sample its tokens.
    pub version: u64,
    /// Lineage of these weights, as text.
    pub lineage: String,
}

/// Reasons for which the trace of a ticket is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TicketFault {
    /// The trace is of another episode.
    #[error("its {field} is {found:?}, expected {expected:?}")]
    Other {
        /// Name of the field.
        field: &'static str,
        /// Value in the trace.
        found: String,
        /// Value in the ticket.
        expected: String,
    },
    /// Weights that are not published sampled a token.
    #[error("version {version} sampled a token, and the newest published one is {newest}")]
    TooNew {
        /// Version in the trace.
        version: u64,
        /// The newest published version.
        newest: u64,
    },
    /// Weights that are too old sampled a token.
    #[error("version {version} sampled a token, allowed: {oldest} and newer")]
    TooOld {
        /// Version in the trace.
        version: u64,
        /// The oldest allowed version.
        oldest: u64,
    },
}

impl Ticket {
    /// Key of its row, unique over all owners of the run.
    pub fn key(&self) -> String {
        format!("{:08}/{:08}/{}", self.fence, self.number, self.episode)
    }

    /// Description of the episode for the code that runs it.
    pub fn spec(&self) -> EpisodeSpec {
        EpisodeSpec {
            episode: self.episode.clone(),
            group: self.group.clone(),
            task: self.task.clone(),
            draw: self.draw,
            purpose: self.purpose.clone(),
            seed: self.seed,
        }
    }

    /// The options of the run, with the limits and the temperature of this episode.
    pub fn options(&self, of_run: &EpisodeOptions) -> EpisodeOptions {
        let mut options = of_run.clone();
        options.limits.max_turns = self.max_turns;
        if let Some(temperature) = self.temperature {
            options.sampling.temperature = temperature;
        }
        options
    }

    /// Whether an engine with these weights may run it.
    pub fn allows(&self, weights: &WeightsId) -> bool {
        weights.version.0 >= self.version && weights.lineage.to_string() == self.lineage
    }

    /// The row to put.
    ///
    /// # Errors
    /// If the ticket cannot be encoded.
    pub fn row(&self) -> Result<NewRow, StoreError> {
        let key = self.key();
        let field = Field::new(TICKET, pack(&key, self)?);
        Ok(NewRow {
            version: self.version,
            ..NewRow::new(key, field)
        })
    }

    /// The ticket of a row that a worker leased.
    ///
    /// # Errors
    /// [`StoreError::Row`] if the row has none.
    pub fn of_row(row: &LeasedRow) -> Result<Self, StoreError> {
        let value = field(&row.fields, TICKET).ok_or_else(|| StoreError::Row {
            key: row.key.clone(),
            reason: format!("it has no field {TICKET:?}"),
        })?;
        unpack(&row.key, value)
    }

    /// Checks that a trace is of this episode, and that allowed weights sampled it. `newest` is the newest
    /// published version.
    ///
    /// # Errors
    /// The first difference.
    pub fn check(&self, trace: &Trace, newest: u64) -> Result<(), TicketFault> {
        let seed = |seed: Option<u64>| seed.map_or_else(String::new, |seed| seed.to_string());
        let facts = [
            (
                "episode",
                trace.episode.to_string(),
                self.episode.to_string(),
            ),
            ("group", trace.group.to_string(), self.group.to_string()),
            ("task", trace.task.to_string(), self.task.id.to_string()),
            ("draw", trace.origin.draw.to_string(), self.draw.to_string()),
            (
                "purpose",
                trace.origin.purpose.clone(),
                self.purpose.clone(),
            ),
            ("seed", seed(trace.provenance.seed), self.seed.to_string()),
        ];
        let other = facts
            .into_iter()
            .find(|(_, found, expected)| found != expected);
        if let Some((field, found, expected)) = other {
            return Err(TicketFault::Other {
                field,
                found,
                expected,
            });
        }
        let number = |version: PolicyVersion| version.0;
        match (
            trace.oldest_version().map(number),
            trace.newest_version().map(number),
        ) {
            (_, Some(version)) if version > newest => Err(TicketFault::TooNew { version, newest }),
            (Some(version), _) if version < self.version => Err(TicketFault::TooOld {
                version,
                oldest: self.version,
            }),
            _ => Ok(()),
        }
    }
}

/// The owner's generation in the key of a ticket.
pub(crate) fn fence_of(key: &str) -> Option<u64> {
    key.split_once('/')?.0.parse().ok()
}

/// The consumer that runs episodes.
pub fn rollout_consumer() -> Consumer {
    Consumer {
        name: ROLLOUT.into(),
        needs: vec![TICKET.into()],
        writes: vec![fields::TRACE.into()],
        last: false,
    }
}

/// The consumer that takes traces.
pub fn owner_consumer() -> Consumer {
    Consumer {
        name: OWNER.into(),
        needs: vec![fields::TRACE.into()],
        writes: Vec::new(),
        last: true,
    }
}

/// The acknowledgement of a worker that ran an episode.
///
/// # Errors
/// If the trace cannot be encoded.
pub(crate) fn ran(key: &str, trace: &Trace) -> Result<AckedRow, StoreError> {
    Ok(AckedRow {
        key: key.to_owned(),
        fields: vec![Field::new(fields::TRACE, pack(key, trace)?)],
    })
}

/// The valid trace of a row that the owner leased.
///
/// # Errors
/// [`StoreError::Row`] if the row has none, or the trace breaks an invariant.
pub(crate) fn trace_of(row: &LeasedRow) -> Result<Trace, StoreError> {
    episode(row)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::samples::{ticket, trace};

    #[test]
    fn a_ticket_travels_in_a_row() {
        let ticket = ticket(3, 7);
        let row = ticket.row().unwrap();
        assert_eq!(fence_of(&row.key), Some(3));
        let leased = LeasedRow {
            key: row.key.clone(),
            group: String::new(),
            attempt: 1,
            tokens: 0,
            version: row.version,
            part: 0,
            fields: row.fields.clone(),
        };
        assert_eq!(Ticket::of_row(&leased).unwrap(), ticket);
        let empty = LeasedRow {
            fields: Vec::new(),
            ..leased
        };
        assert!(Ticket::of_row(&empty).is_err() && trace_of(&empty).is_err());
        assert_eq!(fence_of("no key"), None);
    }

    #[test]
    fn a_trace_of_something_else_is_refused() {
        let ticket = ticket(1, 0);
        let good = trace(&ticket, 5);
        assert_eq!(ticket.check(&good, 5), Ok(()));
        let new = TicketFault::TooNew {
            version: 5,
            newest: 4,
        };
        assert_eq!(ticket.check(&good, 4), Err(new));
        let late = Ticket {
            version: 6,
            ..ticket.clone()
        };
        let old = TicketFault::TooOld {
            version: 5,
            oldest: 6,
        };
        assert_eq!(late.check(&good, 6), Err(old));
        let other = Ticket { seed: 9, ..ticket };
        let fault = other.check(&good, 5).unwrap_err().to_string();
        assert!(fault.contains("seed") && fault.contains('9'), "{fault}");
    }
}
