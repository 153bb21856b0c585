//! Gate before training: bridged ids must equal a full render of the same messages.
//!
//! Turns that the template itself writes stand in for sampled ones. At every join, what
//! [`Renderer::extend`] appends after prompt and turn must give, token by token, what the
//! template renders for the conversation so far; and the calls in a turn must read back.
//!
//! Some templates rewrite what was said before: they drop thoughts, or move the description of
//! the tools to the last question. Token-in-token-out keeps the context as the model saw and
//! sampled it, so there bridged ids and a full render differ by intent. Such a difference
//! passes only if it is one of [`Rewrite`], and if everything else is equal.

use crate::renderer::{Mismatch, RenderError, Renderer};
use crate::turn::parse_tokens;
use serde_json::json;
use sinew_types::{FinishReason, Message, Role, TokenId, ToolCall, ToolSpec};

/// A conversation to play: everything but assistant messages is given to the renderer as the
/// environment would, assistant messages play the model.
#[derive(Clone, Debug, PartialEq)]
pub struct MockTrajectory {
    pub name: String,
    pub messages: Vec<Message>,
    pub tools: Vec<ToolSpec>,
}

impl MockTrajectory {
    /// An environment's own start, followed by two turns that say `turn` with `observation`
    /// between them.
    pub fn around(
        name: &str,
        start: &[Message],
        tools: &[ToolSpec],
        turn: &str,
        observation: &[Message],
    ) -> Self {
        let turn = [Message::new(Role::Assistant, turn)];
        Self {
            name: name.to_owned(),
            messages: [start, &turn, observation, &turn].concat(),
            tools: tools.to_vec(),
        }
    }

    /// The conversations every renderer is held to: one and several observations after a turn,
    /// by the `tool` and by the `user` role. `text` is the content of all messages; it should
    /// not begin or end with whitespace, which some templates trim from the model's turns.
    pub fn standard(system: Option<&str>, text: &str) -> Vec<Self> {
        let say = |role, n: usize| Message::new(role, text.repeat(n));
        let mock = |name: &str, turns: &[Message]| Self {
            name: name.to_owned(),
            messages: [&opening(system, &text.repeat(2)), turns].concat(),
            tools: Vec::new(),
        };
        let a = say(Role::Assistant, 1);
        let u = say(Role::User, 1);
        let t = say(Role::Tool, 3);
        vec![
            mock("user answers", &[a.clone(), u.clone(), a.clone()]),
            mock(
                "tool answers",
                &[a.clone(), t.clone(), a.clone(), t.clone(), a.clone()],
            ),
            mock("two tools answer", &[a.clone(), t.clone(), t.clone(), a]),
        ]
    }

    /// Conversations of a model that calls tools, and of one that thinks, as agents have them.
    pub fn agentic(system: Option<&str>) -> Vec<Self> {
        let tools = [mock_tool()];
        let mock = |name: &str, turns: &[Message]| Self {
            name: name.to_owned(),
            messages: [&opening(system, "What is 17 * 23?"), turns].concat(),
            tools: tools.to_vec(),
        };
        let answer = Message::new(Role::Assistant, "It is 391.");
        let again = Message::new(Role::User, "And twice that?");
        let one = mock_calls("", &["call_aaaaaaaa1"]);
        let two = mock_calls("", &["call_aaaaaaaa2", "call_aaaaaaaa3"]);
        let result = |id: &str| {
            let mut message = Message::new(Role::Tool, "{\"out\": 391}");
            message.tool_call_id = Some(id.into());
            message.name = Some("python".into());
            message
        };
        let first = result("call_aaaaaaaa1");
        let both = [result("call_aaaaaaaa2"), result("call_aaaaaaaa3")];
        let mut thinks = one.clone();
        thinks.reasoning = Some("I should compute.".into());
        let mut knows = answer.clone();
        knows.reasoning = Some("The tool says so.".into());
        vec![
            mock(
                "call and answer",
                &[one.clone(), first.clone(), answer.clone()],
            ),
            mock(
                "calls over two questions",
                &[
                    one.clone(),
                    first.clone(),
                    answer.clone(),
                    again.clone(),
                    one.clone(),
                    first.clone(),
                    answer.clone(),
                ],
            ),
            mock(
                "two calls at once",
                &[two, both[0].clone(), both[1].clone(), answer.clone()],
            ),
            mock(
                "text and call",
                &[
                    mock_calls("I will compute.", &["call_aaaaaaaa1"]),
                    first.clone(),
                    answer,
                ],
            ),
            mock("thought and answer", &[knows.clone(), again, knows.clone()]),
            mock("thought and call", &[thinks, first, knows]),
        ]
    }
}

fn opening(system: Option<&str>, question: &str) -> Vec<Message> {
    let mut messages: Vec<_> = system
        .map(|s| Message::new(Role::System, s))
        .into_iter()
        .collect();
    messages.push(Message::new(Role::User, question));
    messages
}

fn mock_tool() -> ToolSpec {
    ToolSpec {
        name: "python".into(),
        description: "Runs Python code.".into(),
        parameters: json!({
            "type": "object",
            "properties": { "code": { "type": "string" }, "limit": { "type": "integer" } },
            "required": ["code"],
        }),
    }
}

fn mock_calls(content: &str, ids: &[&str]) -> Message {
    let mut message = Message::new(Role::Assistant, content);
    message.tool_calls = ids
        .iter()
        .map(|id| ToolCall {
            id: (*id).into(),
            name: "python".into(),
            arguments: json!({ "code": "if 1 < 2:\n    print(\"17\" * 23)", "limit": 5 }),
        })
        .collect();
    message
}

/// What a template changes of messages that it has rendered before.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Rewrite {
    /// What the model thought, or the marks that a thought has, is left out or put in later.
    Reasoning,
    /// The text is the same, but its tokens depend on what follows them: whitespace at the
    /// end of a prompt, in vocabularies that join it to the next word.
    Tokens,
    /// Whitespace of what was said before.
    Whitespace,
    /// The description of the tools moves to the last question.
    Tools,
    /// The system message moves to the last question.
    System,
}

impl Rewrite {
    /// What is done about it, for people.
    pub fn rule(self) -> &'static str {
        match self {
            Self::Reasoning => {
                "thoughts of past turns stay in the context as sampled; the template would drop them"
            }
            Self::Tokens => {
                "tokens stay as sampled; a full render would cut the same text otherwise"
            }
            Self::Whitespace => "whitespace stays as sampled; the template would trim it",
            Self::Tools => {
                "tools stay where they were described first; the template would move them"
            }
            Self::System => "the system message stays where it was; the template would move it",
        }
    }
}

/// One compared join.
#[derive(Clone, Debug, PartialEq)]
pub struct ConformanceStep {
    pub trajectory: String,
    /// Index of the assistant message before the join.
    pub message: usize,
    /// Tokens compared.
    pub tokens: usize,
    /// What the template would have changed of the past; nothing if the ids are equal.
    pub rewrites: Vec<Rewrite>,
}

/// What was compared; a mismatch is an error instead.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ConformanceReport {
    pub steps: Vec<ConformanceStep>,
    /// Turns with calls whose calls read back.
    pub turns_with_calls: usize,
    /// Conversations that the template itself refuses, with its reason.
    pub refused: Vec<(String, String)>,
}

impl ConformanceReport {
    /// Joins whose ids equal a full render.
    pub fn exact(&self) -> usize {
        self.steps.iter().filter(|s| s.rewrites.is_empty()).count()
    }

    /// Every kind of rewriting that was met, once.
    pub fn rewrites(&self) -> Vec<Rewrite> {
        let mut all: Vec<_> = self.steps.iter().flat_map(|s| s.rewrites.clone()).collect();
        all.sort_unstable();
        all.dedup();
        all
    }
}

/// Plays every trajectory through [`Renderer::extend`], on the CPU and without a model, and
/// compares with full renders; training on a renderer that fails this is refused. The first
/// difference that is no [`Rewrite`] is [`RenderError::Mismatch`]. Trajectories whose full
/// render the template refuses are reported; it is an error if all are.
pub fn conformance_check(
    renderer: &dyn Renderer,
    trajectories: &[MockTrajectory],
) -> Result<ConformanceReport, RenderError> {
    let mut report = ConformanceReport::default();
    for trajectory in trajectories {
        match renderer.render_prompt(&trajectory.messages, &trajectory.tools) {
            Ok(_) => play(renderer, trajectory, &mut report)?,
            Err(e) => report
                .refused
                .push((trajectory.name.clone(), e.to_string())),
        }
    }
    match report.refused.first() {
        Some((name, why)) if report.steps.is_empty() => Err(RenderError::Join(format!(
            "the template refuses every trajectory; {name}: {why}"
        ))),
        _ => Ok(report),
    }
}

fn play(
    renderer: &dyn Renderer,
    trajectory: &MockTrajectory,
    report: &mut ConformanceReport,
) -> Result<(), RenderError> {
    let messages = &trajectory.messages;
    for (at, message) in messages.iter().enumerate() {
        if message.role != Role::Assistant {
            continue;
        }
        let next = messages[at + 1..]
            .iter()
            .position(|m| m.role == Role::Assistant)
            .map_or(messages.len(), |n| at + 1 + n);
        if next == at + 1 {
            // The last turn, or one that nothing answers: there is no join after it.
            continue;
        }
        let join = Join::make(renderer, trajectory, at, next)?;
        if !message.tool_calls.is_empty() {
            join.read_back(renderer, trajectory)?;
            report.turns_with_calls += 1;
        }
        let rewrites = match join.is_exact() {
            true => Vec::new(),
            false => explain(renderer, trajectory, &join)
                .ok_or_else(|| join.mismatch(renderer, trajectory))?,
        };
        report.steps.push(ConformanceStep {
            trajectory: trajectory.name.clone(),
            message: at,
            tokens: join.bridged.len(),
            rewrites,
        });
    }
    Ok(())
}

/// Both ways over one join.
struct Join {
    at: usize,
    /// Where the turn begins in `bridged`.
    turn_at: usize,
    /// Where the extension begins in `bridged`.
    extension_at: usize,
    bridged: Vec<TokenId>,
    full: Vec<TokenId>,
}

impl Join {
    /// The join between the turn `at` and the one at `next`.
    fn make(
        renderer: &dyn Renderer,
        trajectory: &MockTrajectory,
        at: usize,
        next: usize,
    ) -> Result<Self, RenderError> {
        let (messages, tools) = (&trajectory.messages, &trajectory.tools);
        let mut bridged = renderer.render_prompt(&messages[..at], tools)?;
        let turn_at = bridged.len();
        bridged.extend(renderer.render_turn(&messages[..=at], tools)?);
        let new = &messages[at + 1..next];
        let stopped = bridged[turn_at..]
            .last()
            .is_some_and(|id| renderer.stop_ids().contains(id));
        if !stopped {
            // The next role's token ends the turn: it is what a cut turn is closed with.
            let cut = renderer.extend(&bridged, &FinishReason::Length, new, tools)?;
            bridged.extend(cut.forced);
        }
        let finish = match bridged.last() {
            Some(&id) if bridged.len() > turn_at && renderer.stop_ids().contains(&id) => {
                FinishReason::StopId { id }
            }
            _ => FinishReason::Length,
        };
        let extension_at = bridged.len();
        let extension = renderer.extend(&bridged, &finish, new, tools)?;
        bridged.extend(extension.forced);
        bridged.extend(extension.observation);
        Ok(Self {
            at,
            turn_at,
            extension_at,
            bridged,
            full: renderer.render_prompt(&messages[..next], tools)?,
        })
    }

    fn is_exact(&self) -> bool {
        self.bridged == self.full
    }

    /// The turn's calls, taken from its tokens, are those of the message.
    fn read_back(
        &self,
        renderer: &dyn Renderer,
        trajectory: &MockTrajectory,
    ) -> Result<(), RenderError> {
        let turn = &self.bridged[self.turn_at..self.extension_at];
        let format = renderer.turn_format();
        let parsed = parse_tokens(renderer, turn, &format, &trajectory.tools);
        let calls = &trajectory.messages[self.at].tool_calls;
        let same = parsed.calls.len() == calls.len()
            && parsed.calls.iter().zip(calls).all(|(read, call)| {
                read.name == call.name && call.arguments.as_object() == Some(&read.arguments)
            });
        if same && parsed.broken.is_empty() {
            return Ok(());
        }
        let read = match parsed.broken.first() {
            Some(error) => error.to_string(),
            None => format!("{} calls: {:?}", parsed.calls.len(), parsed.calls),
        };
        Err(RenderError::Calls {
            trajectory: trajectory.name.clone(),
            message: self.at,
            written: renderer.decode_with_special(turn),
            read,
        })
    }

    fn mismatch(&self, renderer: &dyn Renderer, trajectory: &MockTrajectory) -> RenderError {
        let (bridged, full) = (&self.bridged, &self.full);
        let index = bridged
            .iter()
            .zip(full)
            .position(|(a, b)| a != b)
            .unwrap_or(bridged.len().min(full.len()));
        let context =
            |ids: &[TokenId]| renderer.decode_with_special(&ids[index.saturating_sub(8)..index]);
        let token = |ids: &[TokenId]| {
            ids.get(index)
                .map(|&id| renderer.decode_with_special(&[id]))
        };
        RenderError::Mismatch(Box::new(Mismatch {
            trajectory: trajectory.name.clone(),
            message: self.at,
            index,
            bridged: token(bridged),
            full: token(full),
            bridged_context: context(bridged),
            full_context: context(full),
        }))
    }
}

/// The rewriting that explains a difference; `None` if nothing does.
fn explain(
    renderer: &dyn Renderer,
    trajectory: &MockTrajectory,
    join: &Join,
) -> Option<Vec<Rewrite>> {
    if let Some(rewrite) = explain_text(renderer, join) {
        return Some(vec![rewrite]);
    }
    // What was rendered before has changed: the same conversation without what may move must
    // join exactly, or be explained in its turn.
    let next = trajectory.messages[join.at + 1..]
        .iter()
        .position(|m| m.role == Role::Assistant)
        .map_or(trajectory.messages.len(), |n| join.at + 1 + n);
    for rewrite in [Rewrite::Tools, Rewrite::System] {
        let mut changed = trajectory.clone();
        match rewrite {
            Rewrite::Tools => changed.tools.clear(),
            _ => changed.messages.retain(|m| m.role != Role::System),
        }
        let dropped = trajectory.messages.len() - changed.messages.len();
        if changed == *trajectory {
            continue;
        }
        let Ok(other) = Join::make(renderer, &changed, join.at - dropped, next - dropped) else {
            continue;
        };
        // What is appended stays the template's own, whatever moves before it or into it.
        let extension = &join.bridged[join.extension_at..];
        if !join.full.ends_with(extension) && other.bridged[other.extension_at..] != *extension {
            continue;
        }
        if other.is_exact() {
            return Some(vec![rewrite]);
        }
        if let Some(mut more) = explain(renderer, &changed, &other) {
            more.push(rewrite);
            return Some(more);
        }
    }
    None
}

/// What follows is equal, and of what was before only whitespace, the cut into tokens, or
/// thoughts and their marks differ.
fn explain_text(renderer: &dyn Renderer, join: &Join) -> Option<Rewrite> {
    let extension = &join.bridged[join.extension_at..];
    let kept = renderer.decode_with_special(join.full.strip_suffix(extension)?);
    let made = renderer.decode_with_special(&join.bridged[..join.extension_at]);
    if kept == made {
        return Some(Rewrite::Tokens);
    }
    let solid = |text: &str| text.split_whitespace().collect::<String>();
    if solid(&kept) == solid(&made) {
        return Some(Rewrite::Whitespace);
    }
    let marks = renderer.turn_format().reasoning?;
    let bare = |text: &str| solid(&without_thoughts(text, &marks.open, &marks.close));
    (bare(&kept) == bare(&made)).then_some(Rewrite::Reasoning)
}

/// A text without thoughts; marks that stand alone go as well.
fn without_thoughts(text: &str, open: &str, close: &str) -> String {
    let mut out = String::new();
    let mut rest = text;
    while let Some(start) = rest.find(open) {
        let (before, after) = rest.split_at(start);
        out.push_str(before);
        let after = &after[open.len()..];
        // A thought ends before the next one begins.
        let next = after.find(open).unwrap_or(after.len());
        rest = match after[..next].find(close) {
            Some(end) => &after[end + close.len()..],
            None => after,
        };
    }
    out.push_str(rest);
    out.replace(close, "")
}
