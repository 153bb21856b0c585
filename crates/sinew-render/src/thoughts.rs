//! Text and thoughts of a turn that makes no calls, for those who read only its answer.

use crate::renderer::Renderer;
use crate::turn::parse_tokens;
use sinew_answer::{Turn, has_channels, is_thought_mark};
use sinew_types::TokenId;

/// Separates text and reasoning of a sampled turn. Reasoning has the notation of the model's template or the
/// channels of gpt-oss; other tags stay in the text. An unfinished turn has no answer.
pub fn split_thoughts(renderer: &dyn Renderer, tokens: &[TokenId]) -> Turn {
    // Marks of thoughts may be control tokens, which plain decoding leaves out.
    let text = renderer.decode_keeping(tokens, is_thought_mark);
    if has_channels(&text) {
        let opened = renderer.turn_format().reasoning;
        return Turn::split(&text, opened.is_some_and(|r| r.opened_by_prompt));
    }
    let format = renderer.turn_format().without_calls();
    let marks = format.reasoning.as_ref();
    let known = marks.is_none_or(|marks| is_thought_mark(&marks.close));
    // Headers of messages are no text, and some marks are those of one family only.
    if format.calls.is_some() || !known {
        let turn = parse_tokens(renderer, tokens, &format, &[]);
        return Turn {
            finished: !turn.content.is_empty(),
            reasoning: turn.reasoning,
            answer: turn.content,
            tag: None,
        };
    }
    match marks {
        Some(marks) => Turn::split(&text, marks.opened_by_prompt),
        None => Turn {
            answer: renderer.decode(tokens),
            finished: true,
            ..Turn::default()
        },
    }
}
