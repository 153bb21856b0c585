//! Renders messages to the tokens that this model would write them in. The result serves only imitation: the
//! tokens that another program sampled cannot be seen in its text.

use crate::reason::Reason;
use sinew_render::Renderer;
use sinew_types::{
    EpisodeEnd, EpisodeId, FinishReason, GroupId, Message, NO_PARENT, Node, NodeId, Origin,
    Outcome, PolicyVersion, Provenance, Role, TRACE_FORMAT_VERSION, TaskId, Timing, TokenId,
    TokenKind, ToolSpec, Trace, VersionSpan,
};

/// A tree of nodes that is being built.
pub(crate) struct Tree<'a> {
    pub(crate) renderer: &'a dyn Renderer,
    pub(crate) tools: &'a [ToolSpec],
    /// Maximum tokens of a path.
    pub(crate) max_tokens: usize,
    pub(crate) nodes: Vec<Node>,
}

/// The reason for text that the template refuses.
fn render(e: impl std::fmt::Display) -> Reason {
    Reason::Render {
        detail: e.to_string(),
    }
}

impl Tree<'_> {
    /// The tokens from the root to `node`.
    pub(crate) fn context(&self, node: NodeId) -> Vec<TokenId> {
        let mut path = Vec::new();
        let mut at = node;
        while let Some(node) = self.nodes.get(at as usize) {
            path.push(&node.tokens);
            at = node.parent;
        }
        path.into_iter().rev().flatten().copied().collect()
    }

    /// Adds a node after `parent`, unless it has no tokens.
    fn add(
        &mut self,
        parent: NodeId,
        kind: TokenKind,
        tokens: Vec<TokenId>,
        messages: Vec<Message>,
    ) -> Result<NodeId, Reason> {
        if tokens.is_empty() {
            return Ok(parent);
        }
        let before = self.nodes.get(parent as usize);
        let turn = before.map_or(0, |n| n.turn) + u32::from(kind == TokenKind::Sampled);
        self.nodes
            .push(Node::given(parent, turn, kind, tokens, messages));
        let node = (self.nodes.len() - 1) as NodeId;
        let length = self.context(node).len();
        if length > self.max_tokens {
            return Err(Reason::TooLarge {
                field: "tokens of a path".into(),
                value: length as u64,
                limit: self.max_tokens as u64,
            });
        }
        Ok(node)
    }

    /// Adds a root: the messages before the model's first turn.
    pub(crate) fn prompt(&mut self, messages: &[Message]) -> Result<NodeId, Reason> {
        let tokens = self.renderer.render_prompt(messages, self.tools);
        let tokens = tokens.map_err(render)?;
        let id = self.add(NO_PARENT, TokenKind::Prompt, tokens, messages.to_vec())?;
        if let Some(prompt) = self.nodes.get_mut(id as usize) {
            prompt.tools = self.tools.to_vec();
        }
        Ok(id)
    }

    /// Adds the last of `messages`, a turn of the model that is not trained, after `parent`.
    fn quote(&mut self, parent: NodeId, messages: &[Message]) -> Result<NodeId, Reason> {
        let tokens = self.turn(messages)?;
        let said = messages.last().cloned().into_iter().collect();
        self.add(parent, TokenKind::Forced, tokens, said)
    }

    /// The tokens of the last of `messages`, a turn of the model. A template that leaves its reasoning out
    /// would have the model answer without it.
    fn turn(&self, messages: &[Message]) -> Result<Vec<TokenId>, Reason> {
        let tokens = self.renderer.render_turn(messages, self.tools);
        let tokens = tokens.map_err(render)?;
        let reasoning = messages.last().and_then(|m| m.reasoning.as_deref());
        // Control tokens in a text are written with a space.
        let dense = |text: &str| text.split_whitespace().collect::<String>();
        let reasoning = dense(reasoning.unwrap_or_default());
        let written = || dense(&self.renderer.decode_with_special(&tokens));
        if reasoning.is_empty() || written().contains(&reasoning) {
            Ok(tokens)
        } else {
            Err(render(
                "the chat template leaves out the reasoning of a turn: leave it out of the data, or use a model \
                 whose template writes it",
            ))
        }
    }

    /// Adds the last of `messages`, a turn of the model, after `parent`.
    pub(crate) fn say(&mut self, parent: NodeId, messages: &[Message]) -> Result<NodeId, Reason> {
        let tokens = self.turn(messages)?;
        let (count, last) = (tokens.len(), tokens.last().copied());
        let said = messages.last().cloned().into_iter().collect();
        let id = self.add(parent, TokenKind::Sampled, tokens, said)?;
        if let Some(node) = self.nodes.get_mut(id as usize).filter(|_| count > 0) {
            let stops = self.renderer.stop_ids();
            let stop = last.filter(|id| stops.contains(id));
            node.finish = Some(stop.map_or(FinishReason::Length, |id| FinishReason::StopId { id }));
            // They were not sampled: the trainer puts its own in their place.
            node.logprobs = vec![0.0; count];
            node.versions = VersionSpan::whole(count, PolicyVersion(0));
        }
        Ok(id)
    }

    /// Adds the messages that follow the model's turn `said`, with the tokens between the two.
    pub(crate) fn observe(&mut self, said: NodeId, new: &[Message]) -> Result<NodeId, Reason> {
        let node = self.nodes.get(said as usize);
        let stops = self.renderer.stop_ids();
        let last = node.and_then(|n| n.tokens.last().copied());
        let stop = last.filter(|id| stops.contains(id));
        let finish = node.and_then(|n| n.finish.clone());
        let finish = finish.or(stop.map(|id| FinishReason::StopId { id }));
        let finish = finish.unwrap_or(FinishReason::Length);
        let context = self.context(said);
        let join = self
            .renderer
            .extend(&context, &finish, new, self.tools)
            .map_err(render)?;
        let forced = self.add(said, TokenKind::Forced, join.forced, Vec::new())?;
        self.add(
            forced,
            TokenKind::Observation,
            join.observation,
            new.to_vec(),
        )
    }

    /// The nodes as a trace of an episode that ended by itself.
    pub(crate) fn trace(self) -> Trace {
        Trace {
            format_version: TRACE_FORMAT_VERSION,
            episode: EpisodeId::new(""),
            group: GroupId::new(""),
            task: TaskId::new("data"),
            task_kind: String::new(),
            origin: Origin {
                purpose: "train".into(),
                ..Origin::default()
            },
            provenance: Provenance::default(),
            nodes: self.nodes,
            outcome: Outcome::default(),
            end: EpisodeEnd::Terminated,
            timing: Timing::default(),
            ignored: std::collections::BTreeMap::new(),
        }
    }
}

/// A conversation as a trace of one path: turns of the assistant are trained if `trained` holds for their
/// index, all else is not. Messages before the first of them are the prompt. Its log-probabilities are 0, to
/// be replaced by a trainer's own.
///
/// # Errors
/// If it does not begin with a prompt and end with the assistant, if two turns of the assistant
/// follow each other, if it cannot be rendered, loses reasoning or is longer than `max_tokens`.
pub fn conversation(
    messages: &[Message],
    trained: impl Fn(usize) -> bool,
    tools: &[ToolSpec],
    renderer: &dyn Renderer,
    max_tokens: usize,
) -> Result<Trace, Reason> {
    let is_assistant = |m: &Message| m.role == Role::Assistant;
    let wrong = |detail: &str| Reason::Render {
        detail: detail.into(),
    };
    let mut said = messages.iter().enumerate();
    let first = said.find_map(|(at, m)| (is_assistant(m) && trained(at)).then_some(at));
    let first = first.ok_or(Reason::NothingSampled)?;
    if first == 0 || !messages.last().is_some_and(is_assistant) {
        return Err(wrong(
            "it must begin with a prompt and end with the assistant",
        ));
    }
    let mut tree = Tree {
        renderer,
        tools,
        max_tokens,
        nodes: Vec::new(),
    };
    let mut at = tree.prompt(&messages[..first])?;
    let mut said = first;
    loop {
        at = if trained(said) {
            tree.say(at, &messages[..=said])?
        } else {
            tree.quote(at, &messages[..=said])?
        };
        let rest = &messages[said + 1..];
        if rest.is_empty() {
            return Ok(tree.trace());
        }
        let next = rest.iter().position(is_assistant).unwrap_or(rest.len());
        if next == 0 {
            return Err(wrong("two messages of the assistant follow each other"));
        }
        at = tree.observe(at, &rest[..next])?;
        said += 1 + next;
    }
}
