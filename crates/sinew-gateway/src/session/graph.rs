//! The captured tokens of a session as a graph, and the points in it from which a request can continue.

use super::known_turns::KnownTurns;
use super::states::States;
use super::types::{PlannedNode, SampledTurn};
use crate::keys::{self, Key, StateId};
use sinew_types::{
    BranchCause, Message, Node, NodeFormat, NodeId, RouteSpan, TokenId, TokenKind, VersionSpan,
};

/// Text that a client has seen, up to the end of an output.
#[derive(Clone, Copy, Debug)]
pub(super) struct TextAnchor {
    pub(super) bytes: usize,
    pub(super) key: Key,
    pub(super) node: NodeId,
}

/// Captured tokens.
#[derive(Debug)]
pub(super) struct Graph {
    /// The trace so far. Nodes are only added.
    pub(super) nodes: Vec<Node>,
    /// Conversations that are known, as a trie of messages.
    pub(super) states: States,
    /// Ends of text prompts and their outputs.
    pub(super) texts: Vec<TextAnchor>,
    /// The model's turns, by their content.
    pub(super) known_turns: KnownTurns,
}

impl Graph {
    /// Nothing was captured yet.
    pub(super) fn new() -> Self {
        Self {
            nodes: Vec::new(),
            states: States::new(),
            texts: Vec::new(),
            known_turns: KnownTurns::default(),
        }
    }

    /// Whether a node, if there is one, and a state exist; journals may name others.
    pub(super) fn contains(&self, node: Option<NodeId>, state: StateId) -> bool {
        let nodes = self.nodes.len() as NodeId;
        node.is_none_or(|node| node < nodes) && self.states.contains(state)
    }

    /// Adds a node of a prompt after `parent`.
    pub(super) fn add(&mut self, parent: NodeId, planned: PlannedNode) -> NodeId {
        let id = self.push(parent, planned.kind, planned.tokens, planned.messages);
        let node = &mut self.nodes[id as usize];
        node.tools = planned.tools;
        node.branch = planned.branch;
        id
    }

    /// Adds the steps of a prompt after the state `from`, and returns the last state. Its prompt ends with
    /// `node`, unless an earlier one led there.
    pub(super) fn step(&mut self, from: StateId, keys: Vec<Key>, node: NodeId) -> StateId {
        let keys = keys.into_iter();
        let state = keys.fold(from, |at, key| self.states.step(at, key));
        if self.states.get(state).prompt.is_none() {
            self.states.set_prompt(state, node);
        }
        state
    }

    /// Adds a sampled turn after `parent`, the prompt of `state`. `text`: bytes and key of the text up to its
    /// end, if the prompt was text.
    pub(super) fn add_output(
        &mut self,
        parent: NodeId,
        state: StateId,
        output: SampledTurn,
        text: Option<(usize, Key)>,
    ) -> NodeId {
        let ids = output.tokens.iter().map(|t| t.id).collect();
        let again = self.has_children(parent);
        let id = self.push(parent, TokenKind::Sampled, ids, Vec::new());
        let node = &mut self.nodes[id as usize];
        node.branch = again.then_some(BranchCause::Resample);
        node.logprobs = output.tokens.iter().map(|t| t.logprob).collect();
        node.temperature = output.temperature;
        for (start, token) in output.tokens.iter().enumerate() {
            NodeFormat::push(&mut node.format, token);
            match node.versions.last_mut() {
                Some(span) if span.version == token.version => span.len += 1,
                _ => node.versions.push(VersionSpan {
                    start: start as u32,
                    len: 1,
                    version: token.version,
                }),
            }
        }
        node.finish = Some(output.finish);
        node.routes.extend(output.routes);
        match text {
            Some((bytes, key)) => self.texts.push(TextAnchor {
                bytes,
                key,
                node: id,
            }),
            None => {
                self.states.add_turn(state, &output.message, id);
                let before = self.last_message(parent).map(keys::exact);
                let at = self.states.messages(state);
                self.known_turns.add(before, &output.message, at);
            }
        }
        self.nodes[id as usize].messages = vec![output.message];
        id
    }

    fn push(
        &mut self,
        parent: NodeId,
        kind: TokenKind,
        tokens: Vec<TokenId>,
        messages: Vec<Message>,
    ) -> NodeId {
        let turn = match self.nodes.get(parent as usize) {
            Some(node) => node.turn,
            None => 0,
        };
        let turn = turn + u32::from(kind == TokenKind::Sampled);
        self.nodes
            .push(Node::given(parent, turn, kind, tokens, messages));
        (self.nodes.len() - 1) as NodeId
    }

    /// Position up to which the experts of the path of `node` are recorded.
    pub(super) fn routes_known(&self, node: Option<NodeId>) -> u32 {
        let mut path = Vec::new();
        let mut at = node.and_then(|id| self.nodes.get(id as usize));
        while let Some(node) = at {
            path.push(node);
            at = self.nodes.get(node.parent as usize);
        }
        RouteSpan::known(path.iter().rev().flat_map(|node| &node.routes))
    }

    /// The last message on the path of a node.
    fn last_message(&self, node: NodeId) -> Option<&Message> {
        let mut at = self.nodes.get(node as usize);
        while let Some(node) = at {
            if let Some(message) = node.messages.last() {
                return Some(message);
            }
            at = self.nodes.get(node.parent as usize);
        }
        None
    }
}
