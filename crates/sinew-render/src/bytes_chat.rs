//! A chat renderer without a model: each byte is a token, conversations are ChatML.
//!
//! It lets agents talk to the gateway before anything was downloaded, if the engine is a fake one. Its
//! renders can be read back ([`byte_conversation`]), for servers that take messages and no tokens.

use crate::bare::{CONTROL, byte_tokenizer};
use crate::chat::{ChatConfig, ChatRenderer};
use crate::error::RenderError;
use crate::format::TurnFormat;
use crate::tool_call::{ParsedCall, ToolCallFormat};
use crate::turn::parse_turn;
use serde_json::Value;
use sinew_types::{Message, Role, TokenId, ToolCall, ToolSpec};

/// Opens a message.
const START: &str = "<|im_start|>";
/// Closes a message.
const END: &str = "<|im_end|>";
/// Id of [`START`]: the first after the bytes. That of [`END`] follows it.
const START_ID: TokenId = 256;
/// Id of [`END`].
const END_ID: TokenId = 257;

/// Text of the template around the tools in the first message.
const TOOLS: (&str, &str) = (
    "You may call these tools:\n<tools>\n",
    "</tools>\nWrite a call as <tool_call>{\"name\": ..., \"arguments\": {...}}</tool_call>.",
);

/// ChatML with tools in the way of Hermes.
const TEMPLATE: &str = r#"{%- if tools %}<|im_start|>system
{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] }}

{% endif %}You may call these tools:
<tools>
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}</tools>
Write a call as <tool_call>{"name": ..., "arguments": {...}}</tool_call>.<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if not (loop.first and tools and message['role'] == 'system') %}<|im_start|>{{ message['role'] }}
{{ message['content'] }}
{%- for call in message.tool_calls or [] %}{% if message['content'] or not loop.first %}
{% endif %}<tool_call>
{{ call.function | tojson }}
</tool_call>
{%- endfor %}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"#;

/// The renderer: 256 bytes, then the tokens that open and close a message.
///
/// # Errors
/// None that a caller can cause.
pub fn byte_renderer() -> Result<ChatRenderer, RenderError> {
    let config = ChatConfig {
        template: TEMPLATE.to_owned(),
        eos_token: END.to_owned(),
        eos_ids: vec![END_ID],
        ..ChatConfig::default()
    };
    ChatRenderer::new(byte_tokenizer([(START, CONTROL), (END, CONTROL)])?, config)
}

/// The text of a turn with calls, as the renderer's notation has it.
pub fn byte_turn(content: &str, calls: &[ParsedCall]) -> String {
    let calls = crate::write::write_calls(calls, &ToolCallFormat::Hermes);
    match (content.is_empty(), calls.is_empty()) {
        (_, true) => content.to_owned(),
        (true, false) => calls,
        (false, false) => format!("{content}\n{calls}"),
    }
}

/// Reads a context of [`byte_renderer`] back: its messages and tools. Calls and their results get ids by
/// their order, and calls without a result are left out.
///
/// # Errors
/// [`RenderError::Message`] if the ids are not of such a conversation that waits for the model's turn.
pub fn byte_conversation(ids: &[TokenId]) -> Result<(Vec<Message>, Vec<ToolSpec>), RenderError> {
    let mut frames = frames(ids)?;
    let mut tools = Vec::new();
    if let Some((role, text)) = frames.first_mut()
        && role == "system"
        && let Some((before, found)) = tools_of(text)
    {
        *text = before;
        tools = found;
    }
    if tools.is_empty() {
        let plain = |(role, text): (String, String)| Ok(Message::new(role_of(&role)?, text));
        return Ok((
            frames.into_iter().map(plain).collect::<Result<_, _>>()?,
            tools,
        ));
    }
    // The template begins such a conversation with a message of its own, if there is no other.
    if frames.first().is_some_and(|(_, text)| text.is_empty()) {
        frames.remove(0);
    }
    let mut said = Answered::default();
    for (role, text) in frames {
        said.add(role_of(&role)?, text, &tools);
    }
    Ok((said.end(), tools))
}

/// Messages whose calls are followed by their results.
#[derive(Default)]
struct Answered {
    messages: Vec<Message>,
    /// Index of the last turn with calls, and the number of results after it.
    open: Option<(usize, usize)>,
    /// Calls so far, whose ids follow from their number.
    calls: usize,
}

impl Answered {
    fn add(&mut self, role: Role, text: String, tools: &[ToolSpec]) {
        if role != Role::Tool {
            self.close();
        }
        let mut message = Message::new(role, text);
        if role == Role::Assistant {
            self.turn(&mut message, tools);
        }
        if let (Role::Tool, Some((at, results))) = (role, self.open) {
            if let Some(call) = self.messages[at].tool_calls.get(results) {
                message.tool_call_id = Some(call.id.clone());
                message.name = Some(call.name.clone());
            }
            self.open = Some((at, results + 1));
        }
        self.messages.push(message);
    }

    /// Separates the calls of a turn from its text.
    fn turn(&mut self, message: &mut Message, tools: &[ToolSpec]) {
        let format = TurnFormat::of_calls(ToolCallFormat::Hermes);
        let turn = parse_turn(&message.content.text(), &format, tools);
        message.content = turn.content.into();
        for call in turn.calls {
            self.calls += 1;
            message.tool_calls.push(ToolCall {
                id: format!("call-{}", self.calls),
                name: call.name,
                arguments: call.arguments.into(),
            });
        }
        self.open = (!message.tool_calls.is_empty()).then_some((self.messages.len(), 0));
    }

    /// Leaves out the calls without a result: servers refuse them.
    fn close(&mut self) {
        if let Some((at, results)) = self.open.take() {
            self.messages[at].tool_calls.truncate(results);
        }
    }

    fn end(mut self) -> Vec<Message> {
        self.close();
        self.messages
    }
}

/// Roles and texts of all messages before the turn that the model is to say.
fn frames(ids: &[TokenId]) -> Result<Vec<(String, String)>, RenderError> {
    let mut found = Vec::new();
    let mut parts = ids.split(|id| *id == START_ID);
    // The text before the first message is empty.
    parts.next();
    let mut waits = false;
    for part in parts {
        let (body, closed) = match part.iter().position(|id| *id == END_ID) {
            Some(end) => (&part[..end], true),
            None => (part, false),
        };
        let bytes: Vec<u8> = body
            .iter()
            .map(|id| u8::try_from(*id).unwrap_or(b'?'))
            .collect();
        let text = String::from_utf8_lossy(&bytes).into_owned();
        let (role, content) = text.split_once('\n').unwrap_or((&text, ""));
        waits = !closed && role == "assistant" && content.is_empty();
        if closed {
            found.push((role.to_owned(), content.to_owned()));
        }
    }
    if waits {
        return Ok(found);
    }
    Err(RenderError::Message {
        role: "assistant".into(),
        message: "the context does not end where the model's turn begins".into(),
    })
}

fn role_of(name: &str) -> Result<Role, RenderError> {
    match name {
        "system" => Ok(Role::System),
        "user" => Ok(Role::User),
        "assistant" => Ok(Role::Assistant),
        "tool" => Ok(Role::Tool),
        other => Err(RenderError::Message {
            role: other.to_owned(),
            message: "allowed: system, user, assistant, tool".into(),
        }),
    }
}

/// The system message without its tools, and the tools; `None` if it has none.
fn tools_of(text: &str) -> Option<(String, Vec<ToolSpec>)> {
    let (before, list) = text.strip_suffix(TOOLS.1)?.rsplit_once(TOOLS.0)?;
    let tool = |line: &str| {
        let value: Value = serde_json::from_str(line).ok()?;
        let function = value.get("function").unwrap_or(&value);
        serde_json::from_value::<ToolSpec>(function.clone()).ok()
    };
    let tools: Option<Vec<ToolSpec>> = list.lines().map(tool).collect();
    let before = before.strip_suffix("\n\n").unwrap_or(before);
    Some((before.to_owned(), tools?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{MockTrajectory, Renderer, conformance_check};
    use serde_json::json;
    use sinew_types::FinishReason;

    #[test]
    fn it_passes_the_conformance_gate() {
        let renderer = byte_renderer().unwrap();
        let mocks = MockTrajectory::standard(Some("be brief"), "héllo\n1");
        let report = conformance_check(&renderer, &mocks).unwrap();
        assert!(report.refused.is_empty(), "{:?}", report.refused);
        let ids = renderer.encode_text("é!").unwrap();
        assert_eq!(ids, [0xc3, 0xa9, 0x21]);
    }

    fn tool() -> ToolSpec {
        ToolSpec {
            name: "add".into(),
            description: "Adds <two> numbers & \"more\".".into(),
            parameters: json!({"type": "object", "properties": {"a": {"type": "integer"}}}),
        }
    }

    #[test]
    fn a_conversation_without_tools_is_read_back() {
        let renderer = byte_renderer().unwrap();
        let messages = [
            Message::new(Role::System, "Be brief.\nSay <tool_call>x</tool_call>."),
            Message::new(Role::User, "héllo\n\n1"),
        ];
        let ids = renderer.render_prompt(&messages, &[]).unwrap();
        let (read, tools) = byte_conversation(&ids).unwrap();
        assert_eq!((read.as_slice(), tools.len()), (&messages[..], 0));
        assert!(byte_conversation(&ids[..ids.len() - 4]).is_err());
        assert!(byte_conversation(&[]).is_err());
    }

    #[test]
    fn calls_and_results_get_the_same_ids() {
        let renderer = byte_renderer().unwrap();
        for system in [Some("Policy."), None] {
            let mut asked: Vec<Message> = system
                .map(|text| Message::new(Role::System, text))
                .into_iter()
                .collect();
            asked.push(Message::new(Role::User, "1 and 2"));
            let mut ids = renderer.render_prompt(&asked, &[tool()]).unwrap();
            let call = |a: i64| {
                let arguments = json!({"a": a}).as_object().unwrap().clone();
                ParsedCall::new("add", arguments)
            };
            // The third call is not answered, as after an error of its turn.
            let turn = byte_turn("I add.", &[call(1), call(2), call(3)]);
            ids.extend(renderer.encode_text(&turn).unwrap());
            ids.push(END_ID);
            let results = [Message::new(Role::Tool, "1"), Message::new(Role::Tool, "3")];
            let finish = FinishReason::StopId { id: END_ID };
            let more = renderer.extend(&ids, &finish, &results, &[tool()]).unwrap();
            ids.extend([more.forced, more.observation].concat());
            let (read, tools) = byte_conversation(&ids).unwrap();
            assert_eq!(tools, [tool()]);
            assert_eq!(read[..asked.len()], asked[..]);
            let said = &read[asked.len()];
            assert_eq!(said.content.text(), "I add.");
            let calls: Vec<&str> = said.tool_calls.iter().map(|c| c.id.as_str()).collect();
            assert_eq!(calls, ["call-1", "call-2"]);
            let results = read[asked.len() + 1..].iter();
            let results: Vec<_> = results
                .map(|m| m.tool_call_id.as_deref().unwrap())
                .collect();
            assert_eq!(results, calls);
        }
    }
}
