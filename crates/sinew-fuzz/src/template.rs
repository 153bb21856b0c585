//! Chat templates, which come with the files of a model and run on the host.

use sinew_render::ChatTemplate;
use sinew_types::{Message, Role};

/// Statements and names of templates.
pub(crate) const WORDS: &[&str] = &[
    "{% for m in messages %}",
    "{% endfor %}",
    "{{ m.content }}",
    "{{ m['role'] }}",
    "{% if tools %}",
    "{% endif %}",
    "{% set ns = namespace(x=0) %}",
    "{% set x = 1 %}",
    "{{ tools | tojson }}",
    "{{ raise_exception('no') }}",
    "{{ strftime_now('%d %B') }}",
    "{% generation %}",
    "{% endgeneration %}",
    "{% macro f(x) %}",
    "{% endmacro %}",
    "{{ f(1) }}",
    "{%- ",
    " -%}",
    ".strip()",
    ".split('a')",
    "[::-1]",
    " | length",
    " is defined",
    "bos_token",
    "add_generation_prompt",
];

/// Maximum bytes of a template. Longer ones only make a run slow.
const MAX_SOURCE: usize = 8_000;

/// A chat template with fixed messages. It is refused or renders, and gives the same text each time.
///
/// The interpreter limits steps, not the memory of a text that a template multiplies (SECURITY.md), so that
/// libFuzzer can report more memory than its limit for a template.
pub(crate) fn chat_template(data: &[u8]) {
    let source = String::from_utf8_lossy(&data[..data.len().min(MAX_SOURCE)]);
    let options = serde_json::json!({"date": "2026-01-31", "enable_thinking": true});
    let options = options.as_object().cloned().unwrap_or_default();
    let Ok(template) = ChatTemplate::new(&source, "<s>", "</s>", options) else {
        return;
    };
    let messages = [
        Message::new(Role::System, "Be short."),
        Message::new(Role::User, "What is {{ 6 * 7 }}?"),
        Message::new(Role::Assistant, "42"),
    ];
    let text = |prompt| {
        let rendered = template.render(&messages, &[], prompt);
        rendered.map_err(|e| e.to_string())
    };
    for prompt in [false, true] {
        assert_eq!(text(prompt), text(prompt), "a template draws lots");
    }
}
