//! Plans requests of messages for `thinking = "dropped"`: the context is what a server renders by the chat
//! template from the messages of the request.
//!
//! The prompt is a full render. Where it has the words of captured tokens, these stand for it: the sampled
//! tokens of a turn whose thinking the render still shows are kept, so that whitespace and the split into
//! tokens are those of the sample. Otherwise the deepest captured prompt that the render begins with is
//! continued, or a new root is made. So an episode has one path, and one more for each time that the render
//! drops thinking.
//!
//! ```text
//! q1 . <think> a1                          first path: a1 with its thinking
//! q1 . a1' q2 . <think> a2 r2 . <think> a3  second path: a2 and a3 behind a1 without its thinking
//! q1 . a1' q2 . a2' r2 . a3' q3 . ...       third path, after the next question
//! ```
//!
//! A template may open the turn's thinking at the end of a prompt. This opening is a node of its own: later
//! renders show the turn without it, and continue the prompt before it.

use super::graph::Graph;
use super::last_path::LastPath;
use super::plan::{JoinPlan, Plan};
use super::states::Walk;
use super::types::{CallRequest, Join, PlannedNode, SessionError};
use crate::keys;
use sinew_render::{Likeness, Renderer};
use sinew_types::{BranchCause, Message, NodeId, Role, TokenId, TokenKind, ToolSpec};

/// Number of tokens at the end of a prompt that are searched for the opening of thinking.
const TAIL_TOKENS: usize = 8;

/// A request and its full render.
struct Shown<'a> {
    renderer: &'a dyn Renderer,
    messages: &'a [Message],
    tools: &'a [ToolSpec],
    ids: Vec<TokenId>,
}

impl Graph {
    /// Plans a conversation whose context is the full render.
    pub(super) fn plan_shown(
        &self,
        renderer: &dyn Renderer,
        messages: &[Message],
        ask: &CallRequest<'_>,
        last_path: &mut LastPath,
    ) -> Result<Plan, SessionError> {
        if ask.known.is_some() {
            // The render needs every message.
            return Err(SessionError::NeedsAll);
        }
        let tools_key = keys::tools(ask.tools);
        let walk = self.walk(self.states.root(tools_key), messages);
        let shown = Shown {
            renderer,
            messages,
            tools: ask.tools,
            ids: renderer.render_prompt(messages, ask.tools)?,
        };
        let plan = Plan::of_walk(&walk, messages, tools_key);
        let (found, cause) = self.continued(&shown, &walk, last_path);
        if let Some(mut found) = found {
            found.nodes = split_opening(renderer, found.nodes);
            return Ok(plan.joined(found));
        }
        let join = match cause {
            Some(_) => Join::Dropped,
            None if self.rewritten(&walk, messages) => Join::Fork,
            None => Join::Start,
        };
        let known = walk.states.len().saturating_sub(1);
        let cause = cause.or_else(|| self.root_cause(join, messages, known, ask.tools));
        let mut prompt = PlannedNode::new(TokenKind::Prompt, shown.ids, messages);
        prompt.tools = ask.tools.to_vec();
        let plan = Plan {
            nodes: split_opening(renderer, vec![prompt]),
            join,
            ..plan
        };
        Ok(plan.branching(cause))
    }

    /// The deepest captured position that the render continues, and the cause why it does not continue the
    /// last sampled turn.
    fn continued(
        &self,
        shown: &Shown<'_>,
        walk: &Walk,
        last_path: &mut LastPath,
    ) -> (Option<JoinPlan>, Option<BranchCause>) {
        let mut cause = None;
        for (at, &id) in walk.states.iter().enumerate().rev() {
            let state = self.states.get(id);
            let whole = at == shown.messages.len();
            if let Some(node) = state.prompt.filter(|_| whole) {
                last_path.go(&self.nodes, Some(node));
                if shown.likeness(last_path.ids()).same_words() {
                    let found = JoinPlan {
                        base: node,
                        nodes: Vec::new(),
                        join: Join::Resample,
                        branch: None,
                    };
                    return (Some(found), None);
                }
            }
            if let Some(node) = state.turn {
                let rest = &shown.messages[at..];
                match self.after_turn(shown, node, rest, walk.last_loose, last_path) {
                    Ok(found) => return (Some(found.caused(cause)), None),
                    Err(why) => cause = cause.or(why),
                }
            }
            let prompt = state.prompt.filter(|_| !whole);
            if let Some(found) =
                prompt.and_then(|node| self.after_prompt(shown, node, at, cause, last_path))
            {
                return (Some(found), cause);
            }
        }
        (None, cause)
    }

    /// A continuation of a sampled turn, if the render has its words; otherwise the cause why it has not, if
    /// that is the template.
    fn after_turn(
        &self,
        shown: &Shown<'_>,
        node: NodeId,
        rest: &[Message],
        loose: bool,
        last_path: &mut LastPath,
    ) -> Result<JoinPlan, Option<BranchCause>> {
        last_path.go(&self.nodes, Some(node));
        let path = last_path.ids();
        let branches = self.has_children(node);
        if rest.iter().any(|m| m.role == Role::Assistant) {
            // Words that the model did not sample follow.
            let tokens = shown
                .ids
                .strip_prefix(path)
                .ok_or(None::<BranchCause>)?
                .to_vec();
            return Ok(JoinPlan {
                base: node,
                nodes: vec![PlannedNode::new(TokenKind::Forced, tokens, rest)],
                join: Join::Rollback,
                branch: branches.then_some(BranchCause::EditedHistory),
            });
        }
        let rewritten = Some(BranchCause::TemplateRewrite);
        let nodes = self.extend(shown.renderer, node, path, rest, shown.tools);
        let nodes = nodes.map_err(|_| rewritten)?;
        let new = nodes.iter().flat_map(|n| &n.tokens);
        let context: Vec<TokenId> = path.iter().chain(new).copied().collect();
        let join = match shown.likeness(&context) {
            Likeness::Reasoning => return Err(Some(BranchCause::DroppedThinking)),
            Likeness::Other => return Err(rewritten),
            _ if branches => Join::Rollback,
            Likeness::Tokens if !loose => Join::Extend,
            _ => Join::Realign,
        };
        Ok(JoinPlan {
            base: node,
            nodes,
            join,
            branch: branches.then_some(BranchCause::EarlierPoint),
        })
    }

    /// A continuation of the prompt of the first `at` messages, or of that prompt without the opening of
    /// thinking, if the render begins with it.
    fn after_prompt(
        &self,
        shown: &Shown<'_>,
        prompt: NodeId,
        at: usize,
        cause: Option<BranchCause>,
        last_path: &mut LastPath,
    ) -> Option<JoinPlan> {
        if shown.messages[at].role != Role::Assistant {
            return None;
        }
        let node = &self.nodes[prompt as usize];
        let opens = node.kind == TokenKind::Forced && node.messages.is_empty();
        let before = Some(node.parent).filter(|_| opens);
        for base in [Some(prompt), before].into_iter().flatten() {
            last_path.go(&self.nodes, Some(base));
            let Some(rest) = shown.ids.strip_prefix(last_path.ids()) else {
                continue;
            };
            if rest.is_empty() || last_path.ids().is_empty() {
                continue;
            }
            let messages = &shown.messages[at..];
            return Some(JoinPlan {
                base,
                nodes: vec![PlannedNode::new(TokenKind::Forced, rest.to_vec(), messages)],
                join: cause.map_or(Join::Rollback, |_| Join::Dropped),
                branch: cause.or_else(|| {
                    let branches = self.has_children(base);
                    branches.then_some(BranchCause::EditedHistory)
                }),
            });
        }
        None
    }
}

impl Shown<'_> {
    /// Compares a context with the render.
    fn likeness(&self, context: &[TokenId]) -> Likeness {
        Likeness::of(self.renderer, context, &self.ids)
    }
}

/// Makes the opening of thinking at the end of a prompt a node of its own.
fn split_opening(renderer: &dyn Renderer, mut nodes: Vec<PlannedNode>) -> Vec<PlannedNode> {
    let Some(marks) = renderer.turn_format().reasoning else {
        return nodes;
    };
    let Some(last) = nodes.last_mut() else {
        return nodes;
    };
    let from = last.tokens.len().saturating_sub(TAIL_TOKENS);
    let opens = |at: &usize| {
        let text = renderer.decode_with_special(&last.tokens[*at..]);
        text.starts_with(&marks.open)
    };
    let opening = (from..last.tokens.len()).rev().find(opens);
    if let Some(at) = opening.filter(|&at| at > 0) {
        let tokens = last.tokens.split_off(at);
        nodes.push(PlannedNode::new(TokenKind::Forced, tokens, &[]));
    }
    nodes
}
