//! Positions of a client in a conversation: a trie over the messages it has sent.
//!
//! One state for each prefix of messages that was ever sent. A state that was rendered has a
//! prompt node, after which turns were sampled; a state at the end of a sampled turn has that
//! turn's node. Walking down costs one look-up for each message.
//!
//! States are numbered from 1 and never removed; their number is bounded by the rollout's messages. An edge
//! is the key of a message, so that a walk costs one look-up a message.

use crate::keys::{self, Key, StateId};
use sinew_types::{Message, NodeId, Role};
use std::collections::HashMap;

/// The state without any message or tool.
pub(crate) const NOWHERE: StateId = 0;

#[derive(Clone, Debug, Default)]
pub(crate) struct State {
    /// Node whose path ends where the model speaks after exactly these messages.
    pub(crate) prompt: Option<NodeId>,
    /// Sampled node of the last of these messages.
    pub(crate) turn: Option<NodeId>,
    /// Turns sampled here, in order.
    turns: Vec<Turn>,
}

/// A turn that the model took after a state.
#[derive(Clone, Copy, Debug)]
struct Turn {
    exact: Key,
    loose: Key,
    state: StateId,
}

/// Known part of a list of messages.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Walk {
    /// State after each known message, the root first.
    pub(crate) states: Vec<StateId>,
    /// Number of turns on the way that were recognized though the client had changed them.
    pub(crate) loose_turns: u32,
    /// The last recognized turn was changed by the client.
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

    /// Whether a state exists; journals may name others.
    pub(crate) fn contains(&self, id: StateId) -> bool {
        (id as usize) < self.states.len()
    }

    pub(crate) fn set_prompt(&mut self, id: StateId, node: NodeId) {
        self.states[id as usize].prompt = Some(node);
    }

    /// The state one step after `from`, made if there is none.
    pub(crate) fn step(&mut self, from: StateId, key: Key) -> StateId {
        if let Some(&to) = self.edges.get(&(from, key)) {
            return to;
        }
        let to = self.push();
        self.edges.insert((from, key), to);
        to
    }

    /// The state one step after `from`, if there is one.
    pub(crate) fn find(&self, from: StateId, key: Key) -> Option<StateId> {
        self.edges.get(&(from, key)).copied()
    }

    fn push(&mut self) -> StateId {
        self.states.push(State::default());
        (self.states.len() - 1) as StateId
    }

    /// The state before any message, given the tools; `None` if no such conversation is known.
    pub(crate) fn root(&self, tools: Key) -> Option<StateId> {
        self.find(NOWHERE, tools)
    }

    /// A turn was sampled at `prompt`, and sent to the client as `message`.
    pub(crate) fn add_turn(&mut self, prompt: StateId, message: &Message, node: NodeId) -> StateId {
        let state = self.push();
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
            loose_turns: 0,
            last_loose: false,
        };
        let mut at = root;
        for message in messages {
            let exact = keys::exact(message);
            let next = match self.turn(at, message, exact) {
                Some((state, changed)) => {
                    walk.loose_turns += u32::from(changed);
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

    /// The sampled turn that `message` repeats, and whether the client changed it. The last of several equal
    /// ones is taken: a retrying client has seen that one.
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
