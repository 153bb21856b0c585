//! Calls of a session, running or ended.

use super::types::{CallRecord, Join};
use crate::keys::{Key, StateId, hex};
use sinew_types::NodeId;
use std::collections::BTreeMap;

/// A call, running or ended.
#[derive(Clone, Debug)]
pub(super) struct Call {
    /// Kind of the request's join to the captured tokens.
    pub(super) join: Join,
    pub(super) parent: NodeId,
    pub(super) prompt_tokens: u32,
    /// Key of the ids that the engine got; compared when the rollout is finished.
    pub(super) prompt_key: Key,
    /// Sampled nodes, one a choice.
    pub(super) outputs: Vec<NodeId>,
    pub(super) started_s: f64,
    pub(super) ended_s: Option<f64>,
    pub(super) error: Option<String>,
}

impl Call {
    /// Whether it failed before anything was sampled.
    fn is_void(&self) -> bool {
        self.outputs.is_empty() && self.error.is_some()
    }
}

/// State of a call until its output is there.
#[derive(Clone, Debug)]
pub(super) struct Running {
    /// State that the messages of the prompt lead to.
    pub(super) state: StateId,
    /// The prompt, if it was text.
    pub(super) text: Option<String>,
    pub(super) choices_left: u32,
}

/// All calls of a session.
#[derive(Debug, Default)]
pub(super) struct Calls {
    /// Calls in the order of their numbers, which begin with 1.
    pub(super) all: Vec<Call>,
    /// Calls that have not ended, by number.
    pub(super) running: BTreeMap<u32, Running>,
}

impl Calls {
    /// Every call so far.
    pub(super) fn records(&self) -> Vec<CallRecord> {
        let record = |(i, c): (usize, &Call)| CallRecord {
            call: i as u32 + 1,
            join: c.join,
            parent: c.parent,
            prompt_tokens: c.prompt_tokens,
            prompt_hash: hex(&c.prompt_key),
            outputs: c.outputs.clone(),
            started_s: c.started_s,
            ended_s: c.ended_s,
            error: c.error.clone(),
        };
        self.all.iter().enumerate().map(record).collect()
    }

    /// Kind of a call's join: a repeated request after a call without output joins in the same way.
    pub(super) fn join_again(&self, base: Option<NodeId>, join: Join) -> Join {
        let before = self.all.iter().rev().find(|c| Some(c.parent) == base);
        match before {
            Some(call) if join == Join::Resample && call.is_void() => call.join,
            _ => join,
        }
    }

    /// Opens a call, and gives its number.
    pub(super) fn open(&mut self, call: Call, running: Running) -> u32 {
        self.all.push(call);
        let number = self.all.len() as u32;
        self.running.insert(number, running);
        number
    }

    /// Nodes that a call sampled; none if there is no such call.
    pub(super) fn outputs(&self, call: u32) -> Vec<NodeId> {
        let call = (call as usize).checked_sub(1).and_then(|i| self.all.get(i));
        call.map(|c| c.outputs.clone()).unwrap_or_default()
    }

    /// Whether a call can fail: it runs, or gave nothing and has not failed.
    pub(super) fn may_fail(&self, call: u32) -> bool {
        let record = call.checked_sub(1).and_then(|i| self.all.get(i as usize));
        let silent = record.is_some_and(|c| c.outputs.is_empty() && c.error.is_none());
        silent || self.running.contains_key(&call)
    }

    /// Notes why a call failed, and returns whether it was running.
    pub(super) fn fail(&mut self, call: u32, why: &str) -> bool {
        if let Some(record) = self.all.get_mut(call as usize - 1) {
            record.error = Some(why.to_owned());
        }
        self.running.remove(&call).is_some()
    }

    /// The join of a call that returned nothing.
    pub(super) fn void_join(&self, call: u32) -> Option<Join> {
        let void = self.all.get(call as usize - 1).filter(|c| c.is_void());
        void.map(|c| c.join)
    }

    /// A choice of a call is over; returns whether the call is, too.
    pub(super) fn end_choice(&mut self, call: u32) -> bool {
        let Some(running) = self.running.get_mut(&call) else {
            return false;
        };
        running.choices_left = running.choices_left.saturating_sub(1);
        let ended = running.choices_left == 0;
        if ended {
            self.running.remove(&call);
        }
        ended
    }

    /// Notes when a call ended.
    pub(super) fn end(&mut self, call: u32, now_s: f64) {
        if let Some(record) = self.all.get_mut(call as usize - 1) {
            record.ended_s = Some(now_s);
        }
    }
}
