//! Runs stored episodes again, with the same actions in a new environment, and reports the differences.
//!
//! The comparison covers the answers of the environment: messages and their tokens, rewards of turns, hashes
//! of states, the outcome and the end. Sampled tokens are the recorded ones by construction.

use crate::admission::{Admission, AdmissionConfig};
use crate::driver::run_episode;
use crate::episode::{EpisodeSpec, REWARD};
use crate::harness::BuiltInLoop;
use crate::parts::{EpisodeOptions, EpisodeParts};
use crate::playback::{ContextChange, Playback, PlaybackError};
use serde::Serialize;
use sinew_env::waits_for_group;
use sinew_types::{Engine, EpisodeEnd, EpisodeId, Limit, Node, Provenance, Task, TokenKind, Trace};
use std::sync::Arc;

/// One difference between the recording and the replay.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ReplayChange {
    /// Number of the turn before the difference; 0 is before the first turn, in the first messages. `None`:
    /// the whole episode.
    pub turn: Option<u32>,
    /// Name of the field: `tokens`, `messages`, `process_reward`, `state_hash`, `reward`, ...
    pub field: String,
    /// Recorded value.
    pub was: String,
    /// Value in the replay.
    pub is: String,
}

/// A part of the system whose version differs from that of the recording.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct PartDrift {
    /// `environment`, `chat_template`, `tools.NAME`, `kernels` or `sandbox`.
    pub part: String,
    /// Version at the time of the recording. Parts without a recorded version are not compared.
    pub was: String,
    /// Version in the replay; empty if there is none.
    pub is: String,
}

/// Result of a replay.
#[derive(Clone, Debug)]
pub struct ReplayedEpisode {
    /// Trace of the replay.
    pub trace: Trace,
    /// Differences in the order of the episode; the first one is the start of the divergence.
    pub changes: Vec<ReplayChange>,
    /// Parts with a different version.
    pub drift: Vec<PartDrift>,
    /// Number of nodes that were compared.
    pub compared: usize,
    /// Reason why the end was not compared; `None` if it was.
    pub open_end: Option<&'static str>,
}

/// Runs one episode with another engine and a separate admission. A turn is played as a whole.
async fn run_alone(
    parts: &EpisodeParts,
    options: &EpisodeOptions,
    spec: &EpisodeSpec,
    engine: Arc<dyn Engine>,
) -> Trace {
    let parts = EpisodeParts {
        admission: Admission::new(AdmissionConfig::new(1, 1), Arc::clone(&engine)),
        engine,
        harness: Arc::new(BuiltInLoop),
        outlook: None,
        ..parts.clone()
    };
    let options = EpisodeOptions {
        chunk_tokens: None,
        ..options.clone()
    };
    run_episode(&parts, &options, spec).await
}

/// Builds the spec that runs the episode of a trace again, under another id.
pub fn spec_of(trace: &Trace, task: Task, episode: EpisodeId, purpose: &str) -> EpisodeSpec {
    EpisodeSpec {
        episode,
        group: trace.group.clone(),
        task,
        draw: trace.origin.draw,
        purpose: purpose.to_owned(),
        seed: trace.provenance.seed.unwrap_or_default(),
    }
}

/// Runs a stored episode again in environments of `parts`. The engine of `parts` is not used.
///
/// # Errors
/// [`PlaybackError`]; what goes wrong in the world is a change.
pub async fn replay(
    parts: &EpisodeParts,
    options: &EpisodeOptions,
    recorded: &Trace,
    task: Task,
) -> Result<ReplayedEpisode, PlaybackError> {
    let playback = Arc::new(Playback::new(recorded)?);
    let spec = spec_of(recorded, task, recorded.episode.clone(), "replay");
    let trace = run_alone(parts, options, &spec, playback.clone()).await;
    let open_end = open_end(recorded, &trace);
    let compared = shared(recorded, &trace).count();
    let mut changes = changes(recorded, &trace, open_end.is_none());
    if changes.is_empty() {
        changes.extend(playback.change().map(context_change));
    }
    Ok(ReplayedEpisode {
        drift: drift(&recorded.provenance, &trace.provenance),
        changes,
        compared,
        open_end,
        trace,
    })
}

/// An episode that resumes from a turn of another one.
#[derive(Clone, Debug)]
pub struct ForkedEpisode {
    /// The whole episode: recorded turns, then new turns.
    pub trace: Trace,
    /// The first difference from the recording before the fork, if any.
    pub change: Option<ReplayChange>,
}

/// Runs an episode again up to its turn `turn`, counted from 1, and lets `engine` resume from there.
///
/// # Errors
/// [`PlaybackError`].
pub async fn fork(
    parts: &EpisodeParts,
    options: &EpisodeOptions,
    recorded: &Trace,
    turn: u32,
    spec: &EpisodeSpec,
    engine: Arc<dyn Engine>,
) -> Result<ForkedEpisode, PlaybackError> {
    let playback = Arc::new(Playback::new(recorded)?.then(turn, engine)?);
    let mut trace = run_alone(parts, options, spec, playback.clone()).await;
    let mut change = None;
    for (was, is) in recorded.nodes.iter().zip(&mut trace.nodes) {
        if was.turn >= turn {
            break;
        }
        match was.kind {
            // Masks of an output format are not played again.
            TokenKind::Sampled if was.tokens == is.tokens => is.format.clone_from(&was.format),
            // A message that the fork adds follows the world's messages.
            _ if is.messages.starts_with(&was.messages) => {}
            _ => change = change.or(Some(messages(was, is))),
        }
    }
    let context = playback.change().map(context_change);
    Ok(ForkedEpisode {
        trace,
        change: change.or(context),
    })
}

/// Returns the reason why the end of a recording cannot be compared, if there is one.
fn open_end(recorded: &Trace, again: &Trace) -> Option<&'static str> {
    match &recorded.end {
        EpisodeEnd::Failed { .. } => Some("the system ended the recorded episode"),
        EpisodeEnd::Truncated {
            limit: Limit::WallTime,
        } => Some("wall time ended the recorded episode"),
        _ if waits_for_group(&again.outcome) => Some("its group is scored as a whole"),
        _ => None,
    }
}

/// Pairs of nodes at the same position, up to the shorter trace.
fn shared<'a>(a: &'a Trace, b: &'a Trace) -> impl Iterator<Item = (&'a Node, &'a Node)> {
    a.nodes.iter().zip(&b.nodes)
}

fn change(turn: Option<u32>, field: &str, was: impl ToString, is: impl ToString) -> ReplayChange {
    ReplayChange {
        turn,
        field: field.to_owned(),
        was: was.to_string(),
        is: is.to_string(),
    }
}

fn context_change(at: ContextChange) -> ReplayChange {
    let was = format!("equal for {} tokens", at.equal);
    change(Some(at.turn), "context", was, "another one")
}

fn messages(was: &Node, is: &Node) -> ReplayChange {
    change(Some(was.turn), "messages", said(was), said(is))
}

/// Lists the differences between a recording and a replay. `end`: also compare outcome and end.
pub fn changes(recorded: &Trace, again: &Trace, end: bool) -> Vec<ReplayChange> {
    let mut changes = Vec::new();
    for (was, is) in shared(recorded, again) {
        node_changes(was, is, &mut changes);
    }
    let (was, is) = (recorded.nodes.len(), again.nodes.len());
    if was > is || (was < is && end) {
        let last = recorded.nodes.last().map(|n| n.turn);
        changes.push(change(last, "nodes", was, is));
    }
    if let (EpisodeEnd::Failed { message, .. }, true) = (&again.end, was > is || end) {
        changes.push(change(None, "failure", "none", message));
    } else if end {
        end_changes(recorded, again, &mut changes);
    }
    changes
}

fn node_changes(was: &Node, is: &Node, changes: &mut Vec<ReplayChange>) {
    let turn = Some(was.turn);
    if was.kind != is.kind {
        let kind = |n: &Node| format!("{:?}", n.kind);
        changes.push(change(turn, "kind", kind(was), kind(is)));
        return;
    }
    if was.kind != TokenKind::Sampled && was.messages != is.messages {
        changes.push(messages(was, is));
    }
    if was.tokens != is.tokens {
        let pairs = was.tokens.iter().zip(&is.tokens);
        let equal = pairs.take_while(|(a, b)| a == b).count();
        let count = |n: &Node| format!("{} tokens, {equal} equal", n.tokens.len());
        changes.push(change(turn, "tokens", count(was), count(is)));
    }
    if was.process_reward != is.process_reward {
        let (was, is) = (was.process_reward, is.process_reward);
        changes.push(change(turn, "process_reward", was, is));
    }
    if was.state_hash != is.state_hash {
        let hash = |n: &Node| {
            n.state_hash
                .map_or_else(|| "none".into(), |h| format!("{h:016x}"))
        };
        changes.push(change(turn, "state_hash", hash(was), hash(is)));
    }
}

/// The texts of a node's messages.
fn said(node: &Node) -> String {
    let texts = node.messages.iter().map(|m| m.content.text().into_owned());
    texts.collect::<Vec<_>>().join("\n")
}

fn end_changes(recorded: &Trace, again: &Trace, changes: &mut Vec<ReplayChange>) {
    if recorded.end != again.end {
        let end = |t: &Trace| match &t.end {
            EpisodeEnd::Terminated => "terminated".to_owned(),
            EpisodeEnd::Truncated { limit } => format!("truncated by {}", limit.name()),
            EpisodeEnd::Failed { message, .. } => message.clone(),
        };
        changes.push(change(None, "end", end(recorded), end(again)));
    }
    let (was, is) = (&recorded.outcome, &again.outcome);
    if was.unscored != is.unscored {
        changes.push(change(None, "unscored", was.unscored, is.unscored));
        return;
    }
    if was.reward != is.reward {
        changes.push(change(None, "reward", was.reward, is.reward));
    }
    if was.success != is.success {
        changes.push(change(None, "success", was.success, is.success));
    }
    let names = was.metrics.keys().chain(is.metrics.keys());
    let names: std::collections::BTreeSet<_> = names.collect();
    for name in names {
        let of = |o: &sinew_types::Outcome| o.metrics.get(name).copied();
        if of(was) != of(is) {
            let shown = |v: Option<f64>| v.map_or_else(|| "none".into(), |v| v.to_string());
            let field = format!("metrics.{name}");
            changes.push(change(None, &field, shown(of(was)), shown(of(is))));
        }
    }
}

/// Lists the parts whose version differs. Parts that were not recorded are not compared.
pub fn drift(was: &Provenance, is: &Provenance) -> Vec<PartDrift> {
    let mut found = Vec::new();
    let mut part = |name: &str, was: Option<&str>, is: Option<&str>| {
        if let Some(was) = was.filter(|w| is != Some(*w)) {
            found.push(PartDrift {
                part: name.to_owned(),
                was: was.to_owned(),
                is: is.unwrap_or_default().to_owned(),
            });
        }
    };
    let environment = |p: &Provenance| {
        let component = p.environment.as_ref();
        component.map(|c| format!("{} {}", c.name, c.version))
    };
    let (then, now) = (environment(was), environment(is));
    part("environment", then.as_deref(), now.as_deref());
    let (then, now) = (&was.chat_template, &is.chat_template);
    part("chat_template", then.as_deref(), now.as_deref());
    part("kernels", was.kernels.as_deref(), is.kernels.as_deref());
    part("sandbox", was.sandbox.as_deref(), is.sandbox.as_deref());
    // Rewards show in the outcome.
    let tools = was
        .tools
        .iter()
        .filter(|(name, _)| !name.starts_with(REWARD));
    for (tool, version) in tools {
        let now = is.tools.get(tool).map(String::as_str);
        part(&format!("tools.{tool}"), Some(version), now);
    }
    found
}
