//! Renderers for chat templates without their model: a file that somebody wrote, or a template in a package.
//!
//! The tokenizer is made up: each byte is a token, and so is each control token that the template writes. The
//! text of renders is that of the model; how text splits into tokens is not.

use crate::chat::{ChatConfig, ChatRenderer};
use crate::error::RenderError;
use crate::format::TurnEnds;
use crate::template::ChatTemplate;
use crate::tokenizer::{GgufVocab, Tokenizer};
use serde_json::{Map, Value};
use sinew_types::{Message, Role};

/// `tokenizer.ggml.token_type` of normal tokens.
const NORMAL: i32 = 1;
/// `tokenizer.ggml.token_type` of control tokens.
pub(crate) const CONTROL: i32 = 3;
/// `tokenizer.ggml.token_type` of tokens that are text.
const TEXT: i32 = 4;

/// Tokens at the start of a conversation and at the end of a turn, for templates that have variables for
/// them.
const BOS: &str = "<s>";
const EOS: &str = "</s>";

/// Texts that no template writes by itself.
const QUESTION: &str = "sinewquestion";
const ANSWER: &str = "sinewanswer";

/// Stands for an argument of `format`.
const BLANK: &str = "{}";

/// Control tokens without the form of one.
const IRREGULAR: [&str; 21] = [
    "<start_of_turn>",
    "<end_of_turn>",
    "<end_of_utterance>",
    "<sop>",
    "[gMASK]",
    "]~b]",
    "]~!b[",
    "[e~[",
    "<seed:bos>",
    "<seed:eos>",
    "<seed:pad>",
    "<|\"|>",
    "<bos>",
    "<eos>",
    "]<]minimax[>[",
    "<SPECIAL_10>",
    "<SPECIAL_11>",
    "<SPECIAL_12>",
    "<begin_of_document>",
    "<beginning_of_sentence>",
    "<end_of_sentence>",
];

/// Marks that models have as tokens of text.
const MARKS: [&str; 10] = [
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
];

/// A tokenizer of bytes and some further tokens, each with its type.
pub(crate) fn byte_tokenizer<'a>(
    further: impl IntoIterator<Item = (&'a str, i32)>,
) -> Result<Tokenizer, RenderError> {
    let mut tokens = byte_tokens();
    let mut token_types = vec![NORMAL; tokens.len()];
    for (token, kind) in further {
        if !tokens.iter().any(|t| t == token) {
            tokens.push(token.to_owned());
            token_types.push(kind);
        }
    }
    Tokenizer::from_gguf(&GgufVocab {
        model: "gpt2".into(),
        pre: "smollm".into(),
        tokens,
        token_types,
        merges: Vec::new(),
    })
}

/// GPT-2's spelling of bytes as printable characters (Radford et al. 2019).
fn byte_tokens() -> Vec<String> {
    let mut unprintable = 0;
    let spelled = |byte: u8| {
        let printable = matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
        let code = if printable {
            u32::from(byte)
        } else {
            unprintable += 1;
            255 + unprintable
        };
        let spelled = char::from_u32(code).unwrap_or(char::REPLACEMENT_CHARACTER);
        spelled.to_string()
    };
    (0..=255u8).map(spelled).collect()
}

/// All texts in a template that have the form of control tokens, in alphabetical order. Tokens that the
/// template puts together by `format` are those of a conversation.
pub fn control_tokens(source: &str) -> Vec<String> {
    let mut found = tokens_in(source);
    if found.iter().any(|token| token.contains(BLANK)) {
        found.retain(|token| !token.contains(BLANK));
        found.extend(tokens_in(&conversation(source, &Map::new())));
        found.sort();
        found.dedup();
    }
    found
}

/// A question, an answer and another question as a template writes them. Empty if it refuses them.
fn conversation(source: &str, options: &Map<String, Value>) -> String {
    let question = || Message::new(Role::User, QUESTION);
    let messages = [
        question(),
        Message::new(Role::Assistant, ANSWER),
        question(),
    ];
    let template = ChatTemplate::new(source, BOS, EOS, options.clone());
    let text = template.and_then(|template| template.render(&messages, &[], true));
    text.unwrap_or_default()
}

/// All texts that have the form of control tokens, in alphabetical order.
fn tokens_in(source: &str) -> Vec<String> {
    let lower = |c: char| c.is_ascii_lowercase() || c == '_';
    let upper = |c: char| c.is_ascii_uppercase() || matches!(c, '_' | '/');
    let name = |name: &str| !name.contains([' ', '\n', '<', '\'', '|', '"']) && name.len() < 40;
    let bars = |text: &str| !text.is_empty() && name(text);
    let wide = |text: &str| name(text) && text != "DSML" && !text.contains('｜');
    let brackets = |text: &str| text.len() > 2 && text.chars().all(upper);
    let words = |text: &str| text.len() > 1 && text.chars().all(lower);
    let mut found = Vec::new();
    find(source, "<|", "|>", &bars, &mut found);
    find(source, "<｜", "｜>", &wide, &mut found);
    find(source, "[", "]", &brackets, &mut found);
    // Gemma 4: `<|turn>` and `<turn|>`.
    find(source, "<|", ">", &words, &mut found);
    find(source, "<", "|>", &words, &mut found);
    let irregular = IRREGULAR.iter().filter(|token| source.contains(**token));
    found.extend(irregular.map(|token| (*token).to_owned()));
    found.sort();
    found.dedup();
    found
}

/// Adds the texts between two marks whose inner part fits.
fn find(
    source: &str,
    open: &str,
    close: &str,
    fits: &dyn Fn(&str) -> bool,
    found: &mut Vec<String>,
) {
    let mut rest = source;
    while let Some(at) = rest.find(open) {
        rest = &rest[at + open.len()..];
        let Some(end) = rest.find(close) else { break };
        let name = &rest[..end];
        if fits(name) {
            found.push(format!("{open}{name}{close}"));
        }
    }
}

/// The mark that a template writes after the last answer, such as `<|END_OF_TURN_TOKEN|>` or `</assistant>`:
/// a model ends its turns by it. `None` if there is none, as in templates of GLM.
fn end_mark(source: &str, options: &Map<String, Value>) -> Option<String> {
    let template = ChatTemplate::new(source, BOS, EOS, options.clone()).ok()?;
    let answer = Message::new(Role::Assistant, ANSWER);
    let messages = [Message::new(Role::User, "x"), answer];
    let text = template.render(&messages, &[], false).ok()?;
    let (_, end) = text.trim_end().rsplit_once(ANSWER)?;
    let history = conversation(source, options);
    let mark = match end.rfind('<') {
        Some(at) => &end[at..],
        // The last answer is open, as one to be continued.
        None => closing_mark(&history)?,
    };
    let whole = mark.ends_with('>') && !mark.contains(char::is_whitespace);
    // A mark that only closes a turn in the history ends no generation.
    let ends = !TurnEnds::of_template(source).closes.contains(&mark);
    (whole && ends).then(|| mark.to_owned())
}

/// The mark between an answer and the mark of the next role; `None` if only the latter stands there.
fn closing_mark(history: &str) -> Option<&str> {
    let (_, after) = history.split_once(ANSWER)?;
    let (between, _) = after.split_once(QUESTION)?;
    let mark = between.trim_start();
    let (end, next) = (mark.find('>')? + 1, mark.rfind('<')?);
    (mark.starts_with('<') && next >= end).then(|| &mark[..end])
}

impl ChatRenderer {
    /// A renderer for a template without its model. `options` are variables of the template.
    ///
    /// # Errors
    /// If the template is invalid, or ends no turn with a control token.
    pub fn of_template(source: &str, options: Map<String, Value>) -> Result<Self, RenderError> {
        let found = control_tokens(source);
        let end = end_mark(source, &options).unwrap_or_else(|| EOS.to_owned());
        let controls = found.iter().map(String::as_str).chain([BOS, end.as_str()]);
        let marks = MARKS.map(|mark| (mark, TEXT));
        let tokenizer = byte_tokenizer(controls.map(|token| (token, CONTROL)).chain(marks))?;
        let config = ChatConfig {
            template: source.to_owned(),
            bos_token: BOS.into(),
            eos_token: end,
            options,
            ..ChatConfig::default()
        };
        Self::new(tokenizer, config)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Renderer;

    #[test]
    fn control_tokens_of_all_forms_are_found() {
        let source = "{{ '<|im_start|>' + '[INST]' }}<｜User｜><|turn>x<turn|>]~b]<|\"|>[e~[ <think> \
                      <｜DSML｜invoke a[i] <|{ '|> [TOOL_CALLS]";
        let expected = [
            "<turn|>",
            "<|\"|>",
            "<|im_start|>",
            "<|turn>",
            "<｜User｜>",
            "[INST]",
            "[TOOL_CALLS]",
            "[e~[",
            "]~b]",
        ];
        assert_eq!(control_tokens(source), expected);
    }

    #[test]
    fn control_tokens_that_a_template_puts_together_are_those_of_its_text() {
        let source = "{% set end = '<｜end{}｜>'.format(':a') %}{% for m in messages %}\
                      {{ '<｜{}:a｜>'.format(m.role) + m.content + end }}{% endfor %}";
        let expected = ["<｜assistant:a｜>", "<｜end:a｜>", "<｜user:a｜>"];
        assert_eq!(control_tokens(source), expected);
    }

    #[test]
    fn a_template_alone_renders() {
        let source = "{% for m in messages %}<|turn>{{ m.role }}\n{{ m.content }}<turn|>\n{% endfor %}\
                      {% if add_generation_prompt %}<|turn>model\n{% endif %}";
        let renderer = ChatRenderer::of_template(source, Map::new()).unwrap();
        let ids = renderer.render_prompt(&[Message::new(Role::User, "é")], &[]);
        let text = renderer.decode_with_special(&ids.unwrap());
        assert_eq!(text, "<|turn>user\né<turn|>\n<|turn>model\n");
        let stops = renderer.decode_with_special(renderer.stop_ids());
        assert_eq!(stops, "<turn|>");
    }

    #[test]
    fn the_end_of_turns_is_read_from_the_template() {
        let words = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>\n{% endfor %}\
                     {% if add_generation_prompt %}<assistant>{% endif %}";
        let two = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|text_end|><|turn_end|>\
                   {% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}";
        let open = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% if not loop.last %}\n\
                    <|stop|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}";
        for (source, expected) in [
            (words, "</assistant>"),
            (two, "<|text_end|><|turn_end|>"),
            (open, "<|stop|>"),
        ] {
            let renderer = ChatRenderer::of_template(source, Map::new()).unwrap();
            let stops = renderer.decode_with_special(renderer.stop_ids());
            assert_eq!(stops, expected);
        }
    }
}
