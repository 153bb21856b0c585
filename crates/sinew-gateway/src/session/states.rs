//! States of a conversation: a trie over the messages that clients have sent.
//!
//! There is one state for each prefix of messages that was ever sent. A state that was rendered as a prompt
//! has a prompt node, after which turns were sampled. A state whose last message is a sampled turn has the
//! node of that turn.
//!
//! States are numbered from 1 and never removed; their number is bounded by the rollout's messages. An edge
//! is the hash of a message, so that a walk costs one look-up per message.

use crate::keys::{self, Key, StateId};
use sinew_types::{Message, NodeId, Role};
use std::collections::HashMap;

/// The state before any message and tool.
pub(crate) const NOWHERE: StateId = 0;

#[derive(Clone, Debug, Default)]
pub(crate) struct State {
    /// Node of the prompt that consists of exactly these messages.
    pub(crate) prompt: Option<NodeId>,
    /// Sampled node of the last message, if the model sampled it.
    pub(crate) turn: Option<NodeId>,
    /// Turns sampled after this prompt, in order.
    turns: Vec<Turn>,
    /// Steps from [`NOWHERE`]: one for the tools, and one for each message.
    steps: u32,
}

/// A turn that the model sampled after a state.
#[derive(Clone, Copy, Debug)]
struct Turn {
    exact: Key,
    loose: Key,
    state: StateId,
}

/// Result of following a list of messages through the trie.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Walk {
    /// State after each known message, starting with the root.
    pub(crate) states: Vec<StateId>,
    /// Whether the client had changed the last recognized turn.
    pub(crate) last_loose: bool,
}

#[derive(Debug)]
pub(crate) struct States {
    states: Vec<State>,
    edges: HashMap<(StateId, Key), StateId>,
}

impl States {
    pub(crate) fn new() -> Self {
        Self {
            states: vec![State::default()],
            edges: HashMap::new(),
        }
    }

    pub(crate) fn get(&self, id: StateId) -> &State {
        &self.states[id as usize]
    }

    /// Whether a state exists. A damaged journal may name others.
    pub(crate) fn contains(&self, id: StateId) -> bool {
        (id as usize) < self.states.len()
    }

    pub(crate) fn set_prompt(&mut self, id: StateId, node: NodeId) {
        self.states[id as usize].prompt = Some(node);
    }

    /// Returns the state after one more message, and creates it if it is missing.
    pub(crate) fn step(&mut self, from: StateId, key: Key) -> StateId {
        if let Some(&to) = self.edges.get(&(from, key)) {
            return to;
        }
        let to = self.push(from);
        self.edges.insert((from, key), to);
        to
    }

    /// Returns the state after one more message, if it exists.
    pub(crate) fn find(&self, from: StateId, key: Key) -> Option<StateId> {
        self.edges.get(&(from, key)).copied()
    }

    /// Adds a state that follows `from`.
    fn push(&mut self, from: StateId) -> StateId {
        let steps = self.get(from).steps + 1;
        self.states.push(State {
            steps,
            ..State::default()
        });
        (self.states.len() - 1) as StateId
    }

    /// Number of messages that lead to a state.
    pub(crate) fn messages(&self, id: StateId) -> u32 {
        self.get(id).steps.saturating_sub(1)
    }

    /// Returns the state before any message for these tools; `None` if no conversation has them.
    pub(crate) fn root(&self, tools: Key) -> Option<StateId> {
        self.find(NOWHERE, tools)
    }

    /// Records a turn that was sampled at `prompt` and sent to the client as `message`.
    pub(crate) fn add_turn(&mut self, prompt: StateId, message: &Message, node: NodeId) -> StateId {
        let state = self.push(prompt);
        self.states[state as usize].turn = Some(node);
        self.states[prompt as usize].turns.push(Turn {
            exact: keys::exact(message),
            loose: keys::loose(message),
            state,
        });
        state
    }

    /// Follows `messages` from `root` as far as they are known.
    pub(crate) fn walk(&self, root: StateId, messages: &[Message]) -> Walk {
        let mut walk = Walk {
            states: vec![root],
            last_loose: false,
        };
        let mut at = root;
        for message in messages {
            let exact = keys::exact(message);
            let next = match self.turn(at, message, exact) {
                Some((state, changed)) => {
                    walk.last_loose = changed;
                    Some(state)
                }
                None => self.find(at, exact),
            };
            let Some(next) = next else { break };
            walk.states.push(next);
            at = next;
        }
        walk
    }

    /// Returns the sampled turn that `message` repeats, and whether the client changed it. Of several equal
    /// turns the last one is chosen, since a retrying client has seen that one.
    fn turn(&self, at: StateId, message: &Message, exact: Key) -> Option<(StateId, bool)> {
        let turns = &self.get(at).turns;
        if turns.is_empty() || message.role != Role::Assistant {
            return None;
        }
        if let Some(turn) = turns.iter().rev().find(|t| t.exact == exact) {
            return Some((turn.state, false));
        }
        let loose = keys::loose(message);
        let turn = turns.iter().rev().find(|t| t.loose == loose)?;
        Some((turn.state, true))
    }
}
