//! Check of a chat template for reinforcement learning: is the history that a client rebuilds from messages
//! what the model has read and sampled?
//!
//! Conversations are played turn by turn. The context grows by the tokens of each turn, as the template
//! writes it for the model, and by [`Renderer::extend`]. Before each further turn, it is compared with a
//! full render of the messages that a client sends. Differences that Sinew makes up for by keeping the
//! sampled tokens are [`Verdict::Realigned`]; a trainer that renders the history anew trains other contexts
//! there.

use crate::conformance::{Join, MockTrajectory, Rewrite, explain, mock_tool};
use crate::error::RenderError;
use crate::renderer::Renderer;
use crate::turn::parse_tokens;
use serde::Serialize;
use serde_json::json;
use sinew_types::{FinishReason, Message, Role, TokenId, ToolCall, ToolSpec};

/// Number of tokens of a difference that are shown on each side.
const SHOWN_TOKENS: usize = 24;

/// A conversation as the model samples it, and as a client sends it back.
#[derive(Clone, Debug, PartialEq)]
pub struct TemplateCase {
    /// Name in reports.
    pub name: &'static str,
    /// Messages with the turns as they were sampled.
    pub sampled: Vec<Message>,
    /// The same messages as a client returns them.
    pub returned: Vec<Message>,
    /// Tools of the conversation.
    pub tools: Vec<ToolSpec>,
}

/// Result of a case.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    /// The rebuilt history has the tokens that were read and sampled.
    Exact,
    /// The rebuilt history differs by a known rewrite. Sampled tokens stand for it.
    Realigned,
    /// The template refuses the conversation.
    Refused,
    /// The rebuilt history has another content, or calls are not read as they were written.
    Broken,
}

impl Verdict {
    /// Name in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Exact => "exact",
            Self::Realigned => "realigned",
            Self::Refused => "refused",
            Self::Broken => "broken",
        }
    }
}

/// First difference between a context and the history rebuilt from messages.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct FirstDifference {
    /// Number of the turn before the comparison, from 1.
    pub turn: usize,
    /// Index of the first different token.
    pub token: usize,
    /// Text before it, which both have.
    pub before: String,
    /// Text from there on, as it was read and sampled.
    pub sampled: String,
    /// Text from there on in the rebuilt history.
    pub rebuilt: String,
}

/// Report on one case.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CaseReport {
    /// Name of the case.
    pub name: &'static str,
    /// Result.
    pub verdict: Verdict,
    /// Rewrites of the template, for [`Verdict::Realigned`].
    pub rewrites: Vec<Rewrite>,
    /// Number of histories that were compared: one before each turn but the first.
    pub compared: usize,
    /// The first difference, if there is one.
    pub difference: Option<FirstDifference>,
    /// Reason of a refusal or a fault.
    pub reason: Option<String>,
}

/// Checks the template of a renderer with all [`template_cases`].
pub fn check_template(renderer: &dyn Renderer) -> Vec<CaseReport> {
    let system = Message::new(Role::System, "You are helpful.");
    let asked = [system, Message::new(Role::User, "x")];
    let takes_system = renderer.render_prompt(&asked, &[]).is_ok();
    let cases = template_cases(takes_system);
    cases.iter().map(|case| check(renderer, case)).collect()
}

/// The conversations of the check.
pub fn template_cases(system: bool) -> Vec<TemplateCase> {
    [plain_cases(system), thinking_cases(system)].concat()
}

/// A case of these turns, whose client sends back what was sampled.
fn case(system: bool, name: &'static str, turns: &[Message], tools: &[ToolSpec]) -> TemplateCase {
    let system = system.then(|| Message::new(Role::System, "You are helpful."));
    let question = Message::new(Role::User, "What is 17 * 23?");
    let mut messages: Vec<_> = system.into_iter().chain([question]).collect();
    messages.extend_from_slice(turns);
    TemplateCase {
        name,
        sampled: messages.clone(),
        returned: messages,
        tools: tools.to_vec(),
    }
}

fn answer(text: &str) -> Message {
    Message::new(Role::Assistant, text)
}

fn again() -> Message {
    Message::new(Role::User, "And twice that?")
}

/// Cases without thinking.
fn plain_cases(system: bool) -> Vec<TemplateCase> {
    let case = |name, turns: &[Message], tools: &[ToolSpec]| case(system, name, turns, tools);
    let tools = [mock_tool()];
    let (known, twice, again) = (answer("It is 391."), answer("That is 782."), again());
    let (one, first) = (calls("", 1), result(0));
    let french = Message::new(Role::System, "From now on, answer in French.");
    let talk = [known.clone(), again.clone(), twice.clone(), again.clone()];
    let work = [one.clone(), first.clone(), one.clone(), first.clone()];
    let both = [
        one.clone(),
        first.clone(),
        known.clone(),
        again.clone(),
        one,
        first.clone(),
    ];
    let parallel = [
        calls("", 2),
        first.clone(),
        result(1),
        known.clone(),
        again.clone(),
    ];
    let said = [calls("I will compute.", 1), first];
    let middle = [known, again.clone(), twice, french, again.clone()];
    let one_turn = |text: &str| [answer(text), again.clone()];
    vec![
        case("several questions", &talk, &[]),
        case("calls and results", &work, &tools),
        case("calls over two questions", &both, &tools),
        case("parallel calls", &parallel, &tools),
        case("text before a call", &said, &tools),
        case("system message in the middle", &middle, &[]),
        case("empty content", &one_turn(""), &[]),
        case("unicode", &one_turn("naïve 日本 🙂 e\u{301} ﬁ שלום"), &[]),
        case(
            "whitespace around content",
            &one_turn("\n  It is 391.  \n\n"),
            &[],
        ),
    ]
}

/// Cases with thinking, which clients return or leave out.
fn thinking_cases(system: bool) -> Vec<TemplateCase> {
    let thinking = |message: Message, thought: &str| Message {
        reasoning: Some(thought.to_owned()),
        ..message
    };
    let known = thinking(answer("It is 391."), "17 * 23 is 391.");
    let twice = thinking(answer("That is 782."), "2 * 391 is 782.");
    let asks = thinking(calls("", 1), "I should compute.");
    let first = result(0);
    let talk = [known.clone(), again(), twice.clone(), again()];
    let work = [
        asks.clone(),
        first.clone(),
        asks,
        first,
        known,
        again(),
        twice,
        again(),
    ];
    let tools = [mock_tool()];
    let case = |name, turns: &[Message], tools: &[ToolSpec]| case(system, name, turns, tools);
    vec![
        case("thinking returned", &talk, &[]),
        without_thinking(case("thinking left out by the client", &talk, &[])),
        case("thinking and calls returned", &work, &tools),
        without_thinking(case(
            "thinking and calls left out by the client",
            &work,
            &tools,
        )),
    ]
}

/// A case whose client returns no thinking.
fn without_thinking(mut case: TemplateCase) -> TemplateCase {
    for message in &mut case.returned {
        message.reasoning = None;
    }
    case
}

fn call_id(index: usize) -> String {
    format!("call_aaaaaaaa{index}")
}

/// A turn with this many calls.
fn calls(content: &str, count: usize) -> Message {
    let call = |index| ToolCall {
        id: call_id(index),
        name: "python".into(),
        arguments: json!({ "code": "if 1 < 2:\n    print(17 * 23)", "limit": 5 }),
    };
    Message {
        tool_calls: (0..count).map(call).collect(),
        ..Message::new(Role::Assistant, content)
    }
}

fn result(index: usize) -> Message {
    Message {
        tool_call_id: Some(call_id(index)),
        name: Some("python".into()),
        ..Message::new(Role::Tool, "391")
    }
}

/// Plays a case until a fault, and reports it.
fn check(renderer: &dyn Renderer, case: &TemplateCase) -> CaseReport {
    let mut report = CaseReport {
        name: case.name,
        verdict: Verdict::Exact,
        rewrites: Vec::new(),
        compared: 0,
        difference: None,
        reason: None,
    };
    if let Err(error) = renderer.render_prompt(&case.returned, &case.tools) {
        report.verdict = Verdict::Refused;
        report.reason = Some(error.to_string());
        return report;
    }
    if let Err(error) = play(renderer, case, &mut report) {
        report.verdict = Verdict::Broken;
        report.reason.get_or_insert(error.to_string());
    }
    report.rewrites.sort_unstable();
    report.rewrites.dedup();
    report
}

/// Plays a case. An error is a fault of the template.
fn play(
    renderer: &dyn Renderer,
    case: &TemplateCase,
    report: &mut CaseReport,
) -> Result<(), RenderError> {
    let turns = |m: &Message| m.role == Role::Assistant;
    let first = case.returned.iter().position(turns).unwrap_or(0);
    let mut context = renderer.render_prompt(&case.returned[..first], &case.tools)?;
    let mut at = first;
    let mut number = 0;
    while case.returned.get(at).is_some_and(turns) {
        number += 1;
        let turn_at = context.len();
        context.extend(renderer.render_turn(&case.sampled[..=at], &case.tools)?);
        read_back(renderer, case, at, &context[turn_at..])?;
        let rest = &case.returned[at + 1..];
        let next = rest
            .iter()
            .position(turns)
            .map_or(case.returned.len(), |n| at + 1 + n);
        let new = &case.returned[at + 1..next];
        if new.is_empty() {
            return Ok(());
        }
        let finish = match context.last() {
            Some(&id) if context.len() > turn_at && renderer.stop_ids().contains(&id) => {
                FinishReason::StopId { id }
            }
            _ => FinishReason::Length,
        };
        let extension = renderer.extend(&context, &finish, new, &case.tools)?;
        context.extend(extension.forced);
        let extension_at = context.len();
        context.extend(extension.observation);
        shows(renderer, &case.returned[..next], &context)?;
        let full = renderer.render_prompt(&case.returned[..next], &case.tools)?;
        let join = Join {
            at,
            turn_at,
            extension_at,
            bridged: context,
            full,
        };
        compare(renderer, case, number, &join, report)?;
        context = join.bridged;
        at = next;
    }
    Ok(())
}

/// Compares a context with the rebuilt history, and records the first difference.
fn compare(
    renderer: &dyn Renderer,
    case: &TemplateCase,
    turn: usize,
    join: &Join,
    report: &mut CaseReport,
) -> Result<(), RenderError> {
    report.compared += 1;
    if join.is_exact() {
        return Ok(());
    }
    report.verdict = Verdict::Realigned;
    if report.difference.is_none() {
        report.difference = Some(difference(renderer, turn, &join.bridged, &join.full));
    }
    let trajectory = MockTrajectory {
        name: case.name.to_owned(),
        messages: case.sampled.clone(),
        tools: case.tools.clone(),
    };
    match explain(renderer, &trajectory, join) {
        Some(rewrites) => {
            report.rewrites.extend(rewrites);
            Ok(())
        }
        None => {
            // The fault, not an earlier rewrite.
            report.difference = Some(difference(renderer, turn, &join.bridged, &join.full));
            Err(RenderError::Join(
                "the rebuilt history has other words than the one that was read and sampled".into(),
            ))
        }
    }
}

/// The texts around the first different token.
fn difference(
    renderer: &dyn Renderer,
    turn: usize,
    sampled: &[TokenId],
    rebuilt: &[TokenId],
) -> FirstDifference {
    let pairs = sampled.iter().zip(rebuilt);
    let token = pairs.take_while(|(a, b)| a == b).count();
    let after = |ids: &[TokenId]| {
        let end = ids.len().min(token + SHOWN_TOKENS);
        renderer.decode_with_special(&ids[token..end])
    };
    let before = &sampled[token.saturating_sub(SHOWN_TOKENS)..token];
    FirstDifference {
        turn,
        token,
        before: renderer.decode_with_special(before),
        sampled: after(sampled),
        rebuilt: after(rebuilt),
    }
}

/// Refuses a turn whose calls are not read as they were written.
fn read_back(
    renderer: &dyn Renderer,
    case: &TemplateCase,
    at: usize,
    turn: &[TokenId],
) -> Result<(), RenderError> {
    let calls = &case.sampled[at].tool_calls;
    if calls.is_empty() {
        return Ok(());
    }
    let format = renderer.turn_format();
    let parsed = parse_tokens(renderer, turn, &format, &case.tools);
    let same = parsed.calls.len() == calls.len()
        && parsed.calls.iter().zip(calls).all(|(read, call)| {
            read.name == call.name && call.arguments.as_object() == Some(&read.arguments)
        });
    if same {
        return Ok(());
    }
    Err(RenderError::Calls {
        trajectory: case.name.to_owned(),
        message: at,
        written: renderer.decode_with_special(turn),
        read: match parsed.broken.first() {
            Some(error) => error.to_string(),
            None => format!("{} calls", parsed.calls.len()),
        },
    })
}

/// Refuses a context from which the template leaves out a question or an instruction.
fn shows(
    renderer: &dyn Renderer,
    messages: &[Message],
    context: &[TokenId],
) -> Result<(), RenderError> {
    let text = renderer.decode_with_special(context);
    let given = |m: &&Message| matches!(m.role, Role::System | Role::User);
    let hidden = |m: &&Message| !text.contains(m.content.text().trim());
    match messages.iter().filter(given).find(hidden) {
        None => Ok(()),
        Some(message) => Err(RenderError::Message {
            role: message.role.name().into(),
            message: format!(
                "the template leaves out {:?}, so that the model never reads it",
                message.content.text()
            ),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{ChatRenderer, byte_renderer};
    use serde_json::Map;

    fn named<'r>(reports: &'r [CaseReport], name: &str) -> &'r CaseReport {
        reports.iter().find(|r| r.name == name).unwrap()
    }

    #[test]
    fn a_plain_template_is_exact() {
        let reports = check_template(&byte_renderer().unwrap());
        let plain = named(&reports, "several questions");
        assert_eq!((plain.verdict, plain.compared), (Verdict::Exact, 2));
        assert_eq!(named(&reports, "parallel calls").verdict, Verdict::Exact);
    }

    /// ChatML that drops the thinking of answered turns, and hides system messages in the middle.
    const DROPS: &str = "{% for m in messages %}{% if m.role != 'system' or loop.first %}\
        <|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and m.reasoning_content and loop.last %}\
        <think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}\
        {% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

    #[test]
    fn dropped_thinking_is_shown_at_its_first_token() {
        let renderer = ChatRenderer::of_template(DROPS, Map::new()).unwrap();
        let reports = check_template(&renderer);
        let thinks = named(&reports, "thinking returned");
        assert_eq!(thinks.verdict, Verdict::Realigned, "{thinks:?}");
        assert_eq!(thinks.rewrites, [Rewrite::Reasoning]);
        let found = thinks.difference.as_ref().unwrap();
        assert_eq!(found.turn, 1);
        assert!(
            found.before.ends_with("<|im_start|>assistant\n"),
            "{found:?}"
        );
        assert!(found.sampled.starts_with("<think>17 * 23"), "{found:?}");
        assert!(found.rebuilt.starts_with("It is 391."), "{found:?}");
        let hidden = named(&reports, "system message in the middle");
        assert_eq!(hidden.verdict, Verdict::Broken);
        assert!(hidden.reason.as_ref().unwrap().contains("French"));
    }

    #[test]
    fn a_changed_word_is_broken() {
        let source = DROPS.replace(
            "{{ m.content }}",
            "{{ m.content }}{% if not loop.last %}!{% endif %}",
        );
        let renderer = ChatRenderer::of_template(&source, Map::new()).unwrap();
        let reports = check_template(&renderer);
        let plain = named(&reports, "several questions");
        assert_eq!(plain.verdict, Verdict::Broken);
        assert!(plain.difference.is_some() && plain.reason.is_some());
    }

    /// The template reads messages backwards, and shows those of the system at the end.
    #[test]
    fn a_moved_system_message_is_found_with_another_one_behind_it() {
        let source = "{% for m in messages[::-1] %}{% endfor %}{% for m in messages %}\
            {% if m.role != 'system' %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}\
            {% if loop.last and m.role == 'user' %}{% for s in messages if s.role == 'system' %}\
            <|im_start|>system\n{{ s.content }}<|im_end|>\n{% endfor %}{% endif %}{% endfor %}\
            {% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";
        let renderer = ChatRenderer::of_template(source, Map::new()).unwrap();
        let reports = check_template(&renderer);
        let plain = named(&reports, "several questions");
        assert_eq!(plain.verdict, Verdict::Realigned, "{plain:?}");
        // The first question is before the second system message.
        for name in ["several questions", "system message in the middle"] {
            assert_eq!(named(&reports, name).rewrites, [Rewrite::System], "{name}");
        }
    }
}
