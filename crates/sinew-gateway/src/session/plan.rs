//! Plans the way in which a request joins the graph, and the part that must be rendered.
//!
//! A request of messages walks the trie of known messages to the last state that has tokens. Then:
//!
//! - all messages known, the model speaks next: sample again at the same node;
//! - known up to a sampled turn, new messages after it: append their tokens to the turn;
//! - an assistant message that the model did not sample: append it as forced tokens;
//! - nothing known, or a render that does not only append: render the whole prompt as a new root.
//!
//! The anchors of a text are the ends of earlier prompts and outputs; the anchor of ids is the longest path
//! that they begin with.
//!
//! This is how thinking is kept; [`super::shown`] plans messages where it is dropped. The first node of a
//! branch has its cause, see [`super::branches`].

use super::graph::{Graph, TextAnchor};
use super::last_path::LastPath;
use super::states::{NOWHERE, Walk};
use super::types::{CallRequest, Join, PlannedNode, SessionError};
use crate::keys::{self, Key, StateId};
use sinew_dialect::Prompt;
use sinew_render::{Renderer, exceeds, render_after, text_exceeds};
use sinew_types::{
    BranchCause, FinishReason, Message, NodeId, Role, Thinking, TokenId, TokenKind, ToolSpec,
};

/// Plan for joining a request. It has not changed the session.
#[derive(Debug)]
pub(super) struct Plan {
    /// Node after which the new nodes are added.
    pub(super) base: Option<NodeId>,
    pub(super) nodes: Vec<PlannedNode>,
    pub(super) join: Join,
    /// The last known state, and the steps from there to the prompt's state.
    pub(super) from: StateId,
    pub(super) keys: Vec<Key>,
}

/// The new nodes, and the node that they follow.
pub(super) struct JoinPlan {
    pub(super) base: NodeId,
    pub(super) nodes: Vec<PlannedNode>,
    pub(super) join: Join,
    /// Cause of the branch that begins there, if one does.
    pub(super) branch: Option<BranchCause>,
}

impl JoinPlan {
    /// The plan as a branch that begins because the template dropped or rewrote what followed; the same plan
    /// without a cause.
    pub(super) fn caused(mut self, cause: Option<BranchCause>) -> Self {
        if cause.is_some() {
            self.join = Join::Dropped;
            self.branch = cause;
        }
        self
    }
}

impl Plan {
    /// Creates the plan for a text or token prompt, which has no messages.
    fn raw(base: Option<NodeId>, nodes: Vec<PlannedNode>, join: Join, key: Key) -> Self {
        Self {
            base,
            nodes,
            join,
            from: NOWHERE,
            keys: vec![key],
        }
    }

    /// The plan of a conversation of which `walk` is known, without its nodes.
    pub(super) fn of_walk(walk: &Walk, messages: &[Message], tools: Key) -> Self {
        let known = walk.states.len();
        let new = messages[known.saturating_sub(1)..].iter();
        let tools_step = (known == 0).then_some(tools);
        Self {
            base: None,
            nodes: Vec::new(),
            join: Join::Start,
            from: walk.states.last().copied().unwrap_or(NOWHERE),
            keys: tools_step.into_iter().chain(new.map(keys::exact)).collect(),
        }
    }

    /// This plan with a way to join captured tokens.
    pub(super) fn joined(self, found: JoinPlan) -> Self {
        let plan = Self {
            base: Some(found.base),
            nodes: found.nodes,
            join: found.join,
            ..self
        };
        plan.branching(found.branch)
    }

    /// This plan with the cause of the branch that its first node begins.
    pub(super) fn branching(mut self, cause: Option<BranchCause>) -> Self {
        if let Some(first) = self.nodes.first_mut() {
            first.branch = cause;
        }
        self
    }
}

/// The last known position up to which captured tokens can be reused.
#[derive(Clone, Copy, Debug)]
enum Position {
    /// After a sampled turn.
    Turn(NodeId),
    /// At a prompt.
    Prompt(NodeId),
}

/// Refuses a prompt that has more tokens than the context however it is tokenized, before it
/// is: that takes microseconds and hundreds of bytes for each token.
fn may_fit(renderer: &dyn Renderer, prompt: &Prompt, context: u32) -> Result<(), SessionError> {
    let limit = context as usize;
    let too_many = match prompt {
        Prompt::Messages(messages) => exceeds(renderer, messages, limit)?,
        Prompt::Text(text) => text_exceeds(renderer, text, limit)?,
        Prompt::Tokens(ids) => Some(ids.len()).filter(|&count| count >= limit),
    };
    match too_many {
        None => Ok(()),
        Some(prompt) => Err(SessionError::ContextFull { prompt, context }),
    }
}

impl Graph {
    /// Plans the addition of a request to a context of at most `context` tokens. Changes nothing but
    /// `last_path`.
    pub(super) fn plan(
        &self,
        renderer: &dyn Renderer,
        ask: &CallRequest<'_>,
        context: u32,
        thinking: Thinking,
        last_path: &mut LastPath,
    ) -> Result<Plan, SessionError> {
        may_fit(renderer, ask.prompt, context)?;
        // A template without thinking has none to drop.
        let drops = thinking == Thinking::Dropped && renderer.turn_format().reasoning.is_some();
        let mut plan = match ask.prompt {
            Prompt::Messages(messages) if drops => {
                self.plan_shown(renderer, messages, ask, last_path)?
            }
            Prompt::Messages(messages) => self.plan_messages(renderer, messages, ask, last_path)?,
            Prompt::Text(text) => self.plan_text(renderer, text)?,
            Prompt::Tokens(ids) => self.plan_tokens(renderer, ids)?,
        };
        if !ask.opening.is_empty() {
            let tokens = renderer.encode_text(ask.opening)?;
            let mut opening = PlannedNode::new(TokenKind::Forced, tokens, &[]);
            let again = |base| plan.nodes.is_empty() && self.has_children(base);
            if plan.base.is_some_and(again) {
                opening.branch = Some(BranchCause::Resample);
            }
            plan.nodes.push(opening);
        }
        Ok(plan)
    }

    /// The known part of a conversation that begins at a state; nothing is known without one.
    pub(super) fn walk(&self, from: Option<StateId>, messages: &[Message]) -> Walk {
        from.map_or_else(Walk::default, |from| self.states.walk(from, messages))
    }

    /// A plan for a conversation.
    fn plan_messages(
        &self,
        renderer: &dyn Renderer,
        messages: &[Message],
        ask: &CallRequest<'_>,
        last_path: &mut LastPath,
    ) -> Result<Plan, SessionError> {
        let tools = ask.tools;
        let tools_key = keys::tools(tools);
        let walk = self.walk(ask.known.or(self.states.root(tools_key)), messages);
        let joined = match self.position(&walk, messages.len()) {
            Some((at, position)) => {
                let rest = &messages[at..];
                self.join(renderer, position, rest, tools, walk.last_loose, last_path)?
            }
            None => None,
        };
        let plan = Plan::of_walk(&walk, messages, tools_key);
        if let Some(joined) = joined {
            return Ok(plan.joined(joined));
        }
        if ask.known.is_some() {
            return Err(SessionError::NeedsAll);
        }
        let join = if self.rewritten(&walk, messages) {
            Join::Fork
        } else {
            Join::Start
        };
        let tokens = renderer.render_prompt(messages, tools)?;
        let mut prompt = PlannedNode::new(TokenKind::Prompt, tokens, messages);
        prompt.tools = tools.to_vec();
        let known = walk.states.len().saturating_sub(1);
        let cause = self.root_cause(join, messages, known, tools);
        let plan = Plan {
            nodes: vec![prompt],
            join,
            ..plan
        };
        Ok(plan.branching(cause))
    }

    /// Returns the last state on the walk that has tokens, and the number of messages before it.
    fn position(&self, walk: &Walk, messages: usize) -> Option<(usize, Position)> {
        let states = walk.states.iter().enumerate().rev();
        states
            .filter_map(|(at, &id)| {
                let state = self.states.get(id);
                // A prompt after a turn is rendered without an answer in between: both may be.
                let prompt = state.prompt.map(Position::Prompt);
                let turn = state.turn.map(Position::Turn);
                let whole = at == messages;
                let found = if whole {
                    prompt.or(turn)
                } else {
                    turn.or(prompt)
                };
                found.map(|position| (at, position))
            })
            .next()
    }

    /// Whether a conversation that shares no tokens with an earlier one is a rewritten version of it: it
    /// begins like an earlier prompt but continues differently, or it contains turns of the model. A
    /// conversation that only shares the beginning, such as instructions and examples, is a separate one.
    pub(super) fn rewritten(&self, walk: &Walk, messages: &[Message]) -> bool {
        let asked = |id: &StateId| {
            let state = self.states.get(*id);
            state.prompt.is_some() || state.turn.is_some()
        };
        walk.states.iter().skip(1).any(asked) || self.known_turns.moved_up(messages).is_some()
    }

    /// Returns the nodes from a position over `rest`; `None` if the tokens before it cannot be reused.
    fn join(
        &self,
        renderer: &dyn Renderer,
        position: Position,
        rest: &[Message],
        tools: &[ToolSpec],
        loose: bool,
        last_path: &mut LastPath,
    ) -> Result<Option<JoinPlan>, SessionError> {
        let foreign = rest.iter().position(|m| m.role == Role::Assistant);
        let at = |base, join| JoinPlan {
            base,
            nodes: Vec::new(),
            join,
            branch: None,
        };
        let (mut joined, foreign_from) = match position {
            Position::Prompt(node) if rest.is_empty() => {
                return Ok(Some(at(node, Join::Resample)));
            }
            Position::Prompt(node) if foreign == Some(0) => (at(node, Join::Rollback), Some(0)),
            // The prompt ends where the model speaks, but here someone else does.
            Position::Prompt(_) => return Ok(None),
            Position::Turn(node) => {
                let answers = &rest[..foreign.unwrap_or(rest.len())];
                last_path.go(&self.nodes, Some(node));
                let nodes = self.extend(renderer, node, last_path.ids(), answers, tools)?;
                let joined = JoinPlan {
                    nodes,
                    ..at(node, Join::Rollback)
                };
                (joined, foreign)
            }
        };
        let branches = self.has_children(joined.base);
        let Some(from) = foreign_from else {
            joined.join = match (branches, loose) {
                (true, _) => Join::Rollback,
                (false, true) => Join::Realign,
                (false, false) => Join::Extend,
            };
            joined.branch = branches.then_some(BranchCause::EarlierPoint);
            return Ok(Some(joined));
        };
        let Some(tokens) = render_after(renderer, &rest[from..], tools)? else {
            return Ok(None);
        };
        let foreign = PlannedNode::new(TokenKind::Forced, tokens, &rest[from..]);
        joined.nodes.push(foreign);
        joined.branch = branches.then_some(BranchCause::EditedHistory);
        Ok(Some(joined))
    }

    /// Returns the tokens of new messages after a sampled turn.
    pub(super) fn extend(
        &self,
        renderer: &dyn Renderer,
        turn: NodeId,
        path: &[TokenId],
        answers: &[Message],
        tools: &[ToolSpec],
    ) -> Result<Vec<PlannedNode>, SessionError> {
        let finish = self.nodes[turn as usize].finish.as_ref();
        let finish = finish.unwrap_or(&FinishReason::Length);
        let extension = renderer.extend(path, finish, answers, tools)?;
        let mut nodes = Vec::new();
        if !extension.forced.is_empty() {
            let forced = extension.forced;
            nodes.push(PlannedNode::new(TokenKind::Forced, forced, &[]));
        }
        let observation = extension.observation;
        nodes.push(PlannedNode::new(
            TokenKind::Observation,
            observation,
            answers,
        ));
        Ok(nodes)
    }

    /// Whether any node follows this one.
    pub(super) fn has_children(&self, node: NodeId) -> bool {
        let later = self.nodes.iter().skip(node as usize + 1);
        later.rev().any(|n| n.parent == node)
    }

    /// Plans a text prompt: it continues the longest known text that it begins with.
    fn plan_text(&self, renderer: &dyn Renderer, text: &str) -> Result<Plan, SessionError> {
        if text.is_empty() {
            return Err(SessionError::Prompt("the prompt is empty".into()));
        }
        let mut ends: Vec<usize> = self
            .texts
            .iter()
            .map(|a| a.bytes)
            .filter(|&end| end < text.len() && text.is_char_boundary(end))
            .collect();
        ends.sort_unstable();
        ends.dedup();
        ends.push(text.len());
        let keys = keys::text_prefixes(text, ends.into_iter());
        let (_, key) = keys[keys.len() - 1];
        let whole = self.states.find(NOWHERE, key);
        if let Some(node) = whole.and_then(|id| self.states.get(id).prompt) {
            return Ok(Plan::raw(Some(node), Vec::new(), Join::Resample, key));
        }
        let anchor = keys.iter().rev().find_map(|&(bytes, key)| {
            let same = |a: &&TextAnchor| a.bytes == bytes && a.key == key;
            self.texts.iter().rev().find(same).copied()
        });
        let rest = &text[anchor.map_or(0, |a| a.bytes)..];
        let base = anchor.map(|a| a.node);
        let nodes = match rest {
            "" => Vec::new(),
            rest => vec![self.raw_node(base, renderer.encode_text(rest)?, rest)],
        };
        let join = self.raw_join(base);
        Ok(Plan::raw(base, nodes, join, key).branching(self.raw_cause(base)))
    }

    /// Plans a token prompt: it continues the longest known path that it begins with.
    fn plan_tokens(&self, renderer: &dyn Renderer, ids: &[TokenId]) -> Result<Plan, SessionError> {
        let vocab = renderer.vocab_size();
        if ids.is_empty() {
            return Err(SessionError::Prompt("the prompt has no token".into()));
        }
        if let Some(id) = ids.iter().find(|&&id| id as usize >= vocab) {
            return Err(SessionError::Prompt(format!(
                "token id {id} is outside the vocabulary of {vocab}"
            )));
        }
        let (base, known) = match self.longest_prefix(ids) {
            Some((node, len)) => (Some(node), len),
            None => (None, 0),
        };
        let rest = &ids[known..];
        let (nodes, join) = if rest.is_empty() {
            (Vec::new(), Join::Resample)
        } else {
            let node = self.raw_node(base, rest.to_vec(), "");
            (vec![node], self.raw_join(base))
        };
        let plan = Plan::raw(base, nodes, join, keys::tokens(ids));
        Ok(plan.branching(self.raw_cause(base)))
    }

    fn raw_node(&self, base: Option<NodeId>, tokens: Vec<TokenId>, text: &str) -> PlannedNode {
        let kind = match base {
            Some(_) => TokenKind::Observation,
            None => TokenKind::Prompt,
        };
        if text.is_empty() {
            return PlannedNode::new(kind, tokens, &[]);
        }
        PlannedNode::new(kind, tokens, &[Message::new(Role::User, text)])
    }

    fn raw_join(&self, base: Option<NodeId>) -> Join {
        match base {
            None => Join::Start,
            Some(node) if self.has_children(node) => Join::Rollback,
            Some(_) => Join::Extend,
        }
    }

    /// Returns the deepest node whose path is a prefix of `ids`, and the length of that path.
    fn longest_prefix(&self, ids: &[TokenId]) -> Option<(NodeId, usize)> {
        let mut ends: Vec<Option<usize>> = Vec::with_capacity(self.nodes.len());
        let mut best: Option<(NodeId, usize)> = None;
        for (i, node) in self.nodes.iter().enumerate() {
            let start = match self.nodes.get(node.parent as usize) {
                Some(_) => ends[node.parent as usize],
                None => Some(0),
            };
            let end = start
                .filter(|&s| ids[s..].starts_with(&node.tokens))
                .map(|s| s + node.tokens.len());
            ends.push(end);
            if let Some(end) = end
                && best.is_none_or(|(_, len)| end >= len)
            {
                best = Some((i as NodeId, end));
            }
        }
        best
    }
}
