//! A chat renderer without a model: each byte is a token, conversations are ChatML.
//!
//! It lets agents talk to the gateway before anything was downloaded, if the engine is a fake one.

use crate::bare::byte_tokens;
use crate::chat::{ChatConfig, ChatRenderer};
use crate::error::RenderError;
use crate::tokenizer::{GgufVocab, Tokenizer};
use sinew_types::TokenId;

/// `tokenizer.ggml.token_type` of control tokens.
const CONTROL: i32 = 3;
/// `tokenizer.ggml.token_type` of normal tokens.
const NORMAL: i32 = 1;

/// Closes a message.
const END: &str = "<|im_end|>";

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
    let mut tokens = byte_tokens();
    let mut token_types = vec![NORMAL; tokens.len()];
    for control in ["<|im_start|>", END] {
        tokens.push(control.to_owned());
        token_types.push(CONTROL);
    }
    let end = (tokens.len() - 1) as TokenId;
    let vocab = GgufVocab {
        model: "gpt2".into(),
        pre: "smollm".into(),
        tokens,
        token_types,
        merges: Vec::new(),
    };
    let config = ChatConfig {
        template: TEMPLATE.to_owned(),
        eos_token: END.to_owned(),
        eos_ids: vec![end],
        ..ChatConfig::default()
    };
    ChatRenderer::new(Tokenizer::from_gguf(&vocab)?, config)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{MockTrajectory, Renderer, conformance_check};

    #[test]
    fn it_passes_the_conformance_gate() {
        let renderer = byte_renderer().unwrap();
        let mocks = MockTrajectory::standard(Some("be brief"), "héllo\n1");
        let report = conformance_check(&renderer, &mocks).unwrap();
        assert!(report.refused.is_empty(), "{:?}", report.refused);
        let ids = renderer.encode_text("é!").unwrap();
        assert_eq!(ids, [0xc3, 0xa9, 0x21]);
    }
}
