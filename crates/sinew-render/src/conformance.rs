//! Chat-template conformance check: incremental ids must equal a full render of the same messages.
//!
//! Assistant turns are rendered by the template in place of sampled ones. Prompt, turn and
//! [`Renderer::extend`] together must give the ids of a full render at every turn boundary. Calls in a turn
//! must parse to themselves.
//!
//! Some templates change earlier messages: they drop reasoning, or move the tool descriptions to the last
//! question. The context keeps the tokens that the model read and sampled, so that incremental ids
//! intentionally differ from a full render. Such a difference passes only if it is a [`Rewrite`] and
//! everything else is equal.

use crate::error::{Mismatch, RenderError};
use crate::likeness::Likeness;
use crate::renderer::Renderer;
use crate::turn::parse_tokens;
use serde::Serialize;
use serde_json::json;
use sinew_types::{FinishReason, Message, Role, TokenId, ToolCall, ToolSpec};

/// A conversation for the check. Assistant messages play the model, and all others the environment.
#[derive(Clone, Debug, PartialEq)]
pub struct MockTrajectory {
    /// Name in reports.
    pub name: String,
    /// Messages in order.
    pub messages: Vec<Message>,
    /// Tools of the conversation.
    pub tools: Vec<ToolSpec>,
}

impl MockTrajectory {
    /// Conversations for every renderer: one and several observations after a turn, with the roles `tool` and
    /// `user`. `text` is the content of all messages. It should not begin or end with whitespace, which some
    /// templates trim.
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

    /// Conversations with tool calls and reasoning, like those of agents.
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
            mock(
                "reasoning and answer",
                &[knows.clone(), again, knows.clone()],
            ),
            mock("reasoning and call", &[thinks, first, knows]),
        ]
    }
}

/// Initial messages of a conversation.
fn opening(system: Option<&str>, question: &str) -> Vec<Message> {
    let mut messages: Vec<_> = system
        .map(|s| Message::new(Role::System, s))
        .into_iter()
        .collect();
    messages.push(Message::new(Role::User, question));
    messages
}

/// Tool of the conversations, with a string and an integer argument.
pub(crate) fn mock_tool() -> ToolSpec {
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

/// An assistant message with calls of these ids.
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

/// A change of earlier messages by a template.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Rewrite {
    /// Reasoning or its markers are removed or inserted.
    Reasoning,
    /// The text is equal, but its tokens depend on the following text: whitespace at the end of a prompt, in
    /// vocabularies that merge it with the next word.
    Tokens,
    /// The token that ended a turn is another one in the history.
    Ending,
    /// Whitespace of earlier messages changes.
    Whitespace,
    /// Tool descriptions move to the last question.
    Tools,
    /// The system message moves to the last question.
    System,
}

impl Rewrite {
    /// Name in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Reasoning => "reasoning",
            Self::Tokens => "tokens",
            Self::Ending => "ending",
            Self::Whitespace => "whitespace",
            Self::Tools => "tools",
            Self::System => "system",
        }
    }

    /// Description of the consequence, for reports.
    pub fn rule(self) -> &'static str {
        match self {
            Self::Reasoning => {
                "reasoning of past turns stays in the context as sampled; the template would drop it"
            }
            Self::Tokens => {
                "tokens stay as sampled; a full render would tokenize the same text differently"
            }
            Self::Ending => {
                "the token that ended a turn stays as sampled; the template would write another one"
            }
            Self::Whitespace => "whitespace stays as sampled; the template would trim it",
            Self::Tools => {
                "tools stay where they were described first; the template would move them"
            }
            Self::System => "the system message stays where it was; the template would move it",
        }
    }
}

/// Result for one turn boundary.
#[derive(Clone, Debug, PartialEq)]
pub struct ConformanceStep {
    /// Name of the conversation.
    pub trajectory: String,
    /// Index of the assistant message before the boundary.
    pub message: usize,
    /// Number of compared tokens.
    pub tokens: usize,
    /// Changes of earlier messages by the template. Empty if the ids are equal.
    pub rewrites: Vec<Rewrite>,
}

/// Result of the check. A mismatch is an error.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ConformanceReport {
    /// Compared turn boundaries.
    pub steps: Vec<ConformanceStep>,
    /// Number of turns whose calls were parsed and compared.
    pub turns_with_calls: usize,
    /// Conversations that the template refuses, with the reason.
    pub refused: Vec<(String, String)>,
}

impl ConformanceReport {
    /// Number of boundaries whose ids equal a full render.
    pub fn exact(&self) -> usize {
        self.steps.iter().filter(|s| s.rewrites.is_empty()).count()
    }

    /// All kinds of rewrites, without duplicates.
    pub fn rewrites(&self) -> Vec<Rewrite> {
        let mut all: Vec<_> = self.steps.iter().flat_map(|s| s.rewrites.clone()).collect();
        all.sort_unstable();
        all.dedup();
        all
    }
}

/// Plays every conversation through [`Renderer::extend`] and compares with full renders. Needs no model.
/// Training requires that this check passes. Conversations that the template refuses are reported.
///
/// # Errors
/// [`RenderError::Mismatch`] at the first difference that is not a [`Rewrite`], or an error if the template
/// refuses all conversations.
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

/// Checks all boundaries of a conversation.
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
            // No message follows this turn.
            continue;
        }
        let join = Join::make(renderer, trajectory, at, next)?;
        if !message.tool_calls.is_empty() {
            join.read_back(renderer, trajectory)?;
            report.turns_with_calls += 1;
        }
        let rewrites = if join.is_exact() {
            Vec::new()
        } else {
            explain(renderer, trajectory, &join)
                .ok_or_else(|| join.mismatch(renderer, trajectory))?
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

/// Incremental ids and a full render up to one boundary.
pub(crate) struct Join {
    /// Index of the assistant message.
    pub(crate) at: usize,
    /// Start of the turn in `bridged`.
    pub(crate) turn_at: usize,
    /// Start of the extension in `bridged`.
    pub(crate) extension_at: usize,
    /// Incremental ids.
    pub(crate) bridged: Vec<TokenId>,
    /// Ids of a full render.
    pub(crate) full: Vec<TokenId>,
}

impl Join {
    /// Renders the boundary between the turn `at` and the one at `next`.
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
            // The next role's token ends the turn, and also closes a truncated one.
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

    /// True if incremental ids and full render are equal.
    pub(crate) fn is_exact(&self) -> bool {
        self.bridged == self.full
    }

    /// Checks that the calls in the turn's tokens equal those of the message.
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

    /// Error with the first difference and its context.
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

/// Rewrites that explain a difference. `None` if there are none.
pub(crate) fn explain(
    renderer: &dyn Renderer,
    trajectory: &MockTrajectory,
    join: &Join,
) -> Option<Vec<Rewrite>> {
    if let Some(rewrite) = explain_text(renderer, join) {
        return Some(vec![rewrite]);
    }
    // Earlier text has changed. The same conversation without the part that may move must match exactly or be
    // explained itself.
    let next = trajectory.messages[join.at + 1..]
        .iter()
        .position(|m| m.role == Role::Assistant)
        .map_or(trajectory.messages.len(), |n| join.at + 1 + n);
    for rewrite in [Rewrite::Tools, Rewrite::System] {
        let mut changed = trajectory.clone();
        let stays = |m: &Message| rewrite == Rewrite::Tools || m.role != Role::System;
        changed.messages.retain(stays);
        if rewrite == Rewrite::Tools {
            changed.tools.clear();
        }
        if changed == *trajectory {
            continue;
        }
        let place = |end: usize| {
            trajectory.messages[..end]
                .iter()
                .filter(|m| stays(m))
                .count()
        };
        let Ok(other) = Join::make(renderer, &changed, place(join.at), place(next)) else {
            continue;
        };
        // The appended ids are those of the template in both cases.
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

/// Explains a difference in whitespace, tokenization or reasoning of earlier text, if the appended ids are
/// equal.
fn explain_text(renderer: &dyn Renderer, join: &Join) -> Option<Rewrite> {
    let extension = &join.bridged[join.extension_at..];
    let kept = join.full.strip_suffix(extension)?;
    let made = &join.bridged[..join.extension_at];
    match Likeness::of(renderer, kept, made) {
        Likeness::Tokens | Likeness::Text => Some(Rewrite::Tokens),
        Likeness::Ending => Some(Rewrite::Ending),
        Likeness::Whitespace => Some(Rewrite::Whitespace),
        Likeness::Reasoning => Some(Rewrite::Reasoning),
        Likeness::Other => None,
    }
}
