//! A model's turn as an environment receives it: its text, and the tool calls parsed from it.
//!
//! Calls are parsed only here, for every environment. Their notation is the one of the model's chat template,
//! or a tag that the environment explains in its prompt.

use sinew_env::{Action, CallError, CallNotation};
use sinew_render::{
    ParsedCall, Renderer, ToolCallError, ToolCallFormat, TurnDelta, TurnFormat, TurnParser,
    TurnStream, parse_tokens, split_thoughts,
};
use sinew_types::{Message, Role, TokenId, ToolCall, ToolSpec};

/// Returns the notation of tool calls that the renderer parses; `None` for an environment without tools,
/// whose turns contain only text.
fn turn_format(
    notation: &CallNotation,
    renderer: &dyn Renderer,
    tools: &[ToolSpec],
) -> Option<TurnFormat> {
    match notation {
        CallNotation::Template if tools.is_empty() => None,
        CallNotation::Template => Some(renderer.turn_format()),
        // A call inside a thought does not count.
        CallNotation::Tag { tag, tool } => Some(TurnFormat {
            reasoning: renderer.turn_format().reasoning,
            ..tag_format(tag, tool)
        }),
    }
}

/// Separates text and reasoning of a sampled turn. Reasoning is removed if it has the notation of the model's
/// template or the channels of gpt-oss. Other tags stay in the text, where [`Action::turn`] finds them.
pub(crate) fn said(renderer: &dyn Renderer, tokens: &[TokenId]) -> Action {
    let turn = split_thoughts(renderer, tokens);
    Action {
        reasoning: turn.reasoning,
        ..Action::say(turn.answer)
    }
}

fn tag_format(tag: &str, tool: &str) -> TurnFormat {
    TurnFormat::of_calls(ToolCallFormat::Tag {
        tag: tag.to_owned(),
        tool: tool.to_owned(),
    })
}

/// Builds the action of a sampled turn. `truncated` means that a limit ended the turn, so that an unfinished
/// call does not count as wrong notation.
pub fn of_tokens(
    renderer: &dyn Renderer,
    notation: &CallNotation,
    tools: &[ToolSpec],
    tokens: &[TokenId],
    truncated: bool,
) -> Action {
    let mut action = Action {
        truncated,
        ..said(renderer, tokens)
    };
    let Some(format) = turn_format(notation, renderer, tools) else {
        return action;
    };
    let mut stream = TurnStream::new(&format, tools);
    let mut deltas = stream.push(renderer, tokens);
    deltas.extend(stream.finish());
    read(deltas, &mut action);
    action
}

/// Returns the sampled turn of this action as a message with separate answer, reasoning and calls, so that
/// the chat template can render them again. Calls in an environment's own notation also stay in the text.
pub(crate) fn message(
    renderer: &dyn Renderer,
    notation: &CallNotation,
    tools: &[ToolSpec],
    tokens: &[TokenId],
    action: &Action,
) -> Message {
    let of_template = *notation == CallNotation::Template && !tools.is_empty();
    let mut format = renderer.turn_format();
    if !of_template {
        format = format.without_calls();
    }
    let turn = parse_tokens(renderer, tokens, &format, tools);
    let mut said = Message::new(Role::Assistant, turn.content);
    said.reasoning = turn.reasoning;
    said.tool_calls = if of_template {
        turn.calls.into_iter().enumerate().map(call).collect()
    } else {
        action.tool_calls.clone()
    };
    said
}

/// Converts a parsed call with its index into a tool call.
fn call((index, call): (usize, ParsedCall)) -> ToolCall {
    ToolCall {
        id: call.id.unwrap_or_else(|| format!("call-{index}")),
        name: call.name,
        arguments: call.arguments.into(),
    }
}

/// Builds the action of a program's final answer, which is plain text and not in the notation of the chat
/// template.
pub(crate) fn of_answer(notation: &CallNotation, answer: &str) -> Action {
    let mut action = Action::say(answer);
    if let CallNotation::Tag { tag, tool } = notation {
        let mut parser = TurnParser::new(&tag_format(tag, tool), &[]);
        let mut deltas = parser.push(answer);
        deltas.extend(parser.finish());
        read(deltas, &mut action);
    }
    action
}

/// Collects calls up to the first one that cannot be parsed. A closing tag without an opening one, before the
/// first call, is an error only in a turn without calls.
fn read(deltas: Vec<TurnDelta>, action: &mut Action) {
    let mut unopened = None;
    for delta in deltas {
        let called = !action.tool_calls.is_empty();
        match delta {
            TurnDelta::Call { index, call } => action.tool_calls.push(self::call((index, call))),
            TurnDelta::Broken(error @ ToolCallError::Unopened { .. }) if !called => {
                unopened.get_or_insert(error);
            }
            TurnDelta::Broken(error) => {
                action.call_error = Some(call_error(error));
                return;
            }
            TurnDelta::Text(text) if called && !text.trim().is_empty() => {
                action.call_error = Some(CallError::Trailing);
                return;
            }
            TurnDelta::Text(_) | TurnDelta::Reasoning(_) => {}
        }
    }
    if action.tool_calls.is_empty() {
        action.call_error = unopened.map(call_error);
    }
}

fn call_error(error: ToolCallError) -> CallError {
    match error {
        ToolCallError::Unclosed { .. } => CallError::Unclosed,
        ToolCallError::Unopened { .. } => CallError::Unopened,
        ToolCallError::Empty => CallError::Empty,
        other => CallError::Invalid(other.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn tag() -> CallNotation {
        CallNotation::Tag {
            tag: "tool".into(),
            tool: "python".into(),
        }
    }

    fn codes(action: &Action) -> Vec<&str> {
        let code = |call: &'_ ToolCall| call.arguments["code"].as_str().map(str::to_owned);
        assert!(action.tool_calls.iter().all(|c| code(c).is_some()));
        let calls = action.tool_calls.iter();
        calls.filter_map(|c| c.arguments["code"].as_str()).collect()
    }

    #[test]
    fn calls_are_read_up_to_the_first_error() {
        use CallError::{Empty, Trailing, Unclosed, Unopened};
        let cases: [(&str, &[&str], Option<CallError>); 12] = [
            ("<tool>1 + 2</tool>", &["1 + 2"], None),
            (" so <tool> x = 1\nx </tool>\n", &[" x = 1\nx"], None),
            ("Answer: 3 <tool>1</tool>", &["1"], None),
            ("<tool>1</tool> Answer: 3", &["1"], Some(Trailing)),
            ("<tool>1</tool><tool>2</tool>", &["1", "2"], None),
            ("<tool>1</tool></tool>", &["1"], Some(Unopened)),
            ("<tool> </tool><tool>1</tool>", &[], Some(Empty)),
            ("<tool>1</tool><tool></tool>", &["1"], Some(Empty)),
            ("<tool>1 + 2", &[], Some(Unclosed)),
            ("1 + 2</tool>", &[], Some(Unopened)),
            ("</tool><tool>1</tool>", &["1"], None),
            ("Answer: 3", &[], None),
        ];
        for (text, expected, error) in cases {
            let action = of_answer(&tag(), text);
            assert_eq!(action.text, text);
            assert_eq!(
                (codes(&action), action.call_error.clone()),
                (expected.to_vec(), error),
                "{text}"
            );
        }
        let plain = of_answer(&CallNotation::Template, "<tool>1</tool>");
        assert!(plain.tool_calls.is_empty() && plain.call_error.is_none());
    }

    #[test]
    fn a_turn_is_kept_as_its_template_writes_it() {
        let renderer = sinew_render::byte_renderer().unwrap();
        let tools = [ToolSpec {
            name: "f".into(),
            description: String::new(),
            parameters: serde_json::json!({}),
        }];
        let said = |notation: &CallNotation, tools: &[ToolSpec], text: &str| {
            let tokens = renderer.encode_text(text).unwrap();
            let action = of_tokens(&renderer, notation, tools, &tokens, false);
            message(&renderer, notation, tools, &tokens, &action)
        };
        let text = "so\n<tool_call>{\"name\": \"f\", \"arguments\": {\"x\": 1}}</tool_call>";
        let called = said(&CallNotation::Template, &tools, text);
        assert_eq!((called.content, called.tool_calls.len()), ("so".into(), 1));
        // Text that is not a call of the template stays in the message.
        let plain = said(&CallNotation::Template, &[], text);
        assert_eq!((plain.content, plain.tool_calls.len()), (text.into(), 0));
        let text = "so <tool>1</tool>";
        let tagged = said(&tag(), &[], text);
        assert_eq!((tagged.content, tagged.tool_calls.len()), (text.into(), 1));
    }

    /// The template of a family whose messages name their recipient, as Muse's does.
    const ADDRESSED: &str = "{% for m in messages %}<|start|>{{ m.role }} to=user<|message|>{{ m.content }}\
        <|eot|>{% endfor %}{# <|eom|> <atem:invoke #}{% if add_generation_prompt %}<|start|>assistant\
        {% endif %}";

    #[test]
    fn headers_of_messages_are_no_text() {
        let renderer = sinew_render::ChatRenderer::of_template(ADDRESSED, Default::default());
        let renderer = renderer.unwrap();
        let text = " to=self<|message|>Hm.<|eom|><|start|>assistant to=user<|message|>391<|eot|>";
        let tokens = renderer.tokenizer().encode(text).unwrap();
        let action = of_tokens(&renderer, &CallNotation::Template, &[], &tokens, false);
        assert_eq!(
            (action.text.as_str(), action.reasoning.as_deref()),
            ("391", Some("Hm."))
        );
        let said = message(&renderer, &CallNotation::Template, &[], &tokens, &action);
        assert_eq!(said.reasoning.as_deref(), Some("Hm."));
        assert_eq!(said.content, "391");
    }

    proptest! {
        /// The first call of a turn is what stands between the first opening mark and the next closing one.
        #[test]
        fn the_first_call_is_between_the_first_marks(
            pieces in prop::collection::vec(prop::sample::select(vec!["<tool>", "</tool>", "x", " ", "\n"]), 0..9),
        ) {
            let text = pieces.concat();
            let action = of_answer(&tag(), &text);
            let first = text.split_once("<tool>").map(|(_, after)| after.split_once("</tool>"));
            match first {
                None => {
                    let closed = text.contains("</tool>").then_some(CallError::Unopened);
                    prop_assert!(action.tool_calls.is_empty());
                    prop_assert_eq!(action.call_error, closed);
                }
                Some(None) => {
                    prop_assert!(action.tool_calls.is_empty());
                    prop_assert_eq!(action.call_error, Some(CallError::Unclosed));
                }
                Some(Some((code, _))) if code.trim().is_empty() => {
                    prop_assert!(action.tool_calls.is_empty());
                    prop_assert_eq!(action.call_error, Some(CallError::Empty));
                }
                Some(Some((code, rest))) => {
                    prop_assert_eq!(codes(&action)[0].trim(), code.trim());
                    let alone = action.call_error.is_none() && action.tool_calls.len() == 1;
                    prop_assert_eq!(alone, rest.trim().is_empty());
                }
            }
        }
    }
}
