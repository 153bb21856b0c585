//! Reading traces of all formats.
//!
//! | format | what it changed |
//! |---|---|
//! | 1 | `step` and `purpose` are fields of the trace; a message's content is a text |
//! | 2 | a node may have a `format` |
//! | 3 | `origin` in place of `step` and `purpose`; `provenance`; content may be a list of parts |

use super::{EpisodeEnd, Node, NodeId, Outcome, TRACE_FORMAT_VERSION, Timing, Trace, TraceError};
use crate::ids::{EpisodeId, GroupId, TaskId};
use crate::origin::{Origin, Provenance};
use serde::Deserialize;
use std::collections::BTreeMap;

/// The first format whose nodes may have a format.
const FORMATS_SINCE: u32 = 2;
/// The first format with an origin.
const ORIGIN_SINCE: u32 = 3;

/// A trace as any format has it.
#[derive(Deserialize)]
pub(crate) struct StoredTrace {
    format_version: u32,
    episode: EpisodeId,
    group: GroupId,
    task: TaskId,
    task_kind: String,
    step: Option<u64>,
    purpose: Option<String>,
    origin: Option<Origin>,
    #[serde(default)]
    provenance: Provenance,
    nodes: Vec<Node>,
    outcome: Outcome,
    end: EpisodeEnd,
    timing: Timing,
    #[serde(default)]
    ignored: BTreeMap<String, u64>,
}

impl StoredTrace {
    fn origin(&mut self) -> Result<Origin, TraceError> {
        let missing = |field| TraceError::Missing {
            episode: self.episode.clone(),
            version: self.format_version,
            field,
        };
        if self.format_version >= ORIGIN_SINCE {
            let missing = missing("origin");
            return self.origin.take().ok_or(missing);
        }
        Ok(Origin {
            run: String::new(),
            draw: self.step.ok_or_else(|| missing("step"))?,
            purpose: self.purpose.clone().ok_or_else(|| missing("purpose"))?,
            external: None,
        })
    }
}

impl TryFrom<StoredTrace> for Trace {
    type Error = TraceError;

    fn try_from(mut stored: StoredTrace) -> Result<Self, TraceError> {
        let version = stored.format_version;
        if !(1..=TRACE_FORMAT_VERSION).contains(&version) {
            return Err(TraceError::Version {
                episode: stored.episode,
                actual: version,
                expected: TRACE_FORMAT_VERSION,
            });
        }
        let formatted = stored.nodes.iter().position(|n| n.format.is_some());
        if let Some(node) = formatted.filter(|_| version < FORMATS_SINCE) {
            return Err(TraceError::Format {
                episode: stored.episode,
                node: node as NodeId,
                field: "law",
                why: format!("needs format version {FORMATS_SINCE}, the trace says {version}"),
            });
        }
        let origin = stored.origin()?;
        Ok(Self {
            format_version: TRACE_FORMAT_VERSION,
            episode: stored.episode,
            group: stored.group,
            task: stored.task,
            task_kind: stored.task_kind,
            origin,
            provenance: stored.provenance,
            nodes: stored.nodes,
            outcome: stored.outcome,
            end: stored.end,
            timing: stored.timing,
            ignored: stored.ignored,
        })
    }
}
