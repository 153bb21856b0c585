//! Turns a session into a trace: removes dead ends, verifies every call, validates.
//!
//! The verification recomputes the hash of the token ids on the path to a call's outputs, and compares it
//! with the hash of the prompt that the engine received. Prompts whose calls all failed have no outputs; they
//! are left out of the trace.

use super::Session;
use super::calls::Call;
use super::last_path::LastPath;
use super::types::SessionError;
use sinew_types::{EpisodeEnd, NO_PARENT, NodeId, Origin, TRACE_FORMAT_VERSION, TokenKind, Trace};

impl Session {
    /// Returns the present trace, including prompts without outputs.
    pub fn snapshot(&self, now_s: f64) -> Trace {
        Trace {
            format_version: TRACE_FORMAT_VERSION,
            episode: self.id.clone(),
            group: self.spec.group.clone(),
            task: self.spec.task.clone(),
            task_kind: self.spec.task_kind.clone(),
            origin: Origin {
                run: self.spec.run.clone(),
                draw: self.spec.draw,
                purpose: self.spec.purpose.clone(),
                external: self.spec.external.clone(),
            },
            provenance: self.spec.provenance.clone(),
            nodes: self.graph.nodes.clone(),
            outcome: self.rewards.outcome.clone(),
            end: self.natural_end(),
            timing: self.times.timing(!self.calls.running.is_empty(), now_s),
            ignored: self.ignored.clone(),
        }
    }

    /// Returns the finished trace. Prompts without samples after them are left out. Its metrics count the
    /// kinds of joins as `join_extend`, `join_fork` and so on, and branches by cause as `branch_compaction`.
    ///
    /// # Errors
    /// If an invariant does not hold; no part of the trace may then be trained.
    pub fn trace(&self, end: EpisodeEnd, now_s: f64) -> Result<Trace, SessionError> {
        let mut trace = self.snapshot(now_s);
        trace.end = end;
        for (join, count) in &self.stats.joins {
            let name = format!("join_{join:?}").to_lowercase();
            trace.outcome.metrics.insert(name, f64::from(*count));
        }
        let mut path = LastPath::default();
        for (index, call) in self.calls.all.iter().enumerate() {
            prove(&trace, index, call, &mut path)?;
        }
        prune(&mut trace);
        for (cause, count) in trace.branches() {
            let name = format!("branch_{}", cause.name());
            trace.outcome.metrics.insert(name, f64::from(count));
        }
        trace.bound_rewards();
        trace
            .validate()
            .map_err(|e| SessionError::Broken(e.to_string()))?;
        Ok(trace)
    }
}

/// Verifies that the path above a call's outputs equals the prompt that the engine received. `path` holds the
/// path of the previous verification.
fn prove(
    trace: &Trace,
    index: usize,
    call: &Call,
    path: &mut LastPath,
) -> Result<(), SessionError> {
    let broken = |what: String| SessionError::Broken(format!("call {}: {what}", index + 1));
    if trace.nodes.get(call.parent as usize).is_none() {
        return Err(broken(format!("its parent {} does not exist", call.parent)));
    }
    path.go(&trace.nodes, Some(call.parent));
    if path.key() != call.prompt_key {
        return Err(broken(format!(
            "the engine was given other tokens than the {} of its path",
            path.ids().len()
        )));
    }
    let strays = |id: &&NodeId| {
        let node = trace.nodes.get(**id as usize);
        node.is_none_or(|n| n.parent != call.parent || n.kind != TokenKind::Sampled)
    };
    match call.outputs.iter().find(strays) {
        Some(id) => Err(broken(format!("its output {id} is not where it belongs"))),
        None => Ok(()),
    }
}

/// Removes nodes without a sampled node below them, unless nothing was sampled at all.
fn prune(trace: &mut Trace) {
    let mut keep: Vec<bool> = trace
        .nodes
        .iter()
        .map(|n| n.kind == TokenKind::Sampled)
        .collect();
    if !keep.contains(&true) {
        return;
    }
    for i in (0..trace.nodes.len()).rev() {
        let parent = trace.nodes[i].parent;
        if keep[i] && parent != NO_PARENT {
            keep[parent as usize] = true;
        }
    }
    // New ids of the nodes so far; a parent comes before its children.
    let mut moved = Vec::with_capacity(keep.len());
    let mut next = 0;
    trace.nodes.retain_mut(|node| {
        let kept = keep[moved.len()];
        moved.push(next);
        next += NodeId::from(kept);
        if node.parent != NO_PARENT {
            node.parent = moved[node.parent as usize];
        }
        kept
    });
    // The node that it branched from had no output.
    if let Some(first) = trace.nodes.first_mut() {
        first.branch = None;
    }
}
