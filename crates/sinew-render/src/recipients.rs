//! Notations whose messages name their recipient: Functionary 3.2 and Muse.
//!
//! ```text
//! >>>all                     to=self<|message|>Thinking.<|eom|><|start|>assistant
//! I compute.>>>run           to=run<|message|><atem:function_calls>
//! {"code": "1 + 1"}          <atem:invoke name="run">...</atem:invoke>
//! ```
//!
//! Sources: the chat templates of the models, as the packages of `tests/templates/README.md` ship them.

use crate::marked::{NamedTags, Schemas, named_call};
use crate::region::{MAX_HEAD, Marks, Region, Scan, code, endless_json, object, owned, parse_json};
use crate::tool_call::{ParsedCall, ToolCallError};

/// Stands before a recipient of Functionary; the prompt ends with the first one.
const ADDRESS: &str = ">>>";
/// The recipient of Functionary that is the user.
const EVERYBODY: &str = "all";
/// The tool of Functionary whose content can be code, in place of JSON.
const INTERPRETER: &str = "python";

/// Stands before a recipient of Muse.
const TO: &str = " to=";
/// End of the header of a message of Muse.
const MESSAGE: &str = "<|message|>";
/// The recipient of Muse that is the model itself.
const ITSELF: &str = "self";

const MUSE: NamedTags = NamedTags {
    open: "<atem:invoke name=\"",
    close: "</atem:invoke>",
    argument: "<atem:parameter name=\"",
    argument_end: "</atem:parameter>",
};

/// Markers of Functionary.
pub(crate) fn functionary_marks() -> Marks {
    Marks {
        open: owned(&[ADDRESS]),
        addressed: true,
        ..Marks::default()
    }
}

/// Markers of Muse.
pub(crate) fn muse_marks() -> Marks {
    let wrapper = [
        "<|start|>assistant",
        "<|eom|>",
        MESSAGE,
        "<atem:function_calls>",
        "</atem:function_calls>",
    ];
    Marks {
        open: owned(&[TO, MUSE.open]),
        ..Marks::pair(MUSE.open, MUSE.close, &wrapper)
    }
}

/// The word at the start of a text that may be a recipient. `None` if it may go further.
fn recipient(text: &str, last: bool) -> Option<&str> {
    // The text may arrive in any pieces: the search ends at the same byte for all of them.
    let head = &text[..text.floor_char_boundary(MAX_HEAD)];
    let other = |c: char| !c.is_alphanumeric() && !"_.-".contains(c);
    match head.find(other) {
        Some(end) => Some(&head[..end]),
        None if last || text.len() >= MAX_HEAD => Some(head),
        None => None,
    }
}

/// Parses `>>>name` with its content, from the name on at the start of a turn.
pub(crate) fn functionary(text: &str, scan: &mut Scan, last: bool) -> Region {
    let rest = text.strip_prefix(ADDRESS).unwrap_or(text);
    let marked = rest.len() < text.len();
    let Some(name) = recipient(rest, last) else {
        return Region::More;
    };
    let end = text.len() - rest.len() + name.len();
    let after = &text[end..];
    if after.starts_with('\n') && !name.is_empty() {
        return content(text, end + 1, name, marked, scan, last);
    }
    if after.is_empty() && marked && !name.is_empty() {
        let error = ToolCallError::syntax(name, "a line break after the recipient");
        return Region::Broken { used: end, error };
    }
    Region::Text { used: end }
}

/// Parses the content of a message of Functionary, which starts at `body`.
fn content(
    text: &str,
    body: usize,
    name: &str,
    marked: bool,
    scan: &mut Scan,
    last: bool,
) -> Region {
    if name == EVERYBODY {
        let calls = Vec::new();
        return Region::Calls { used: body, calls };
    }
    let at = text.len() - text[body..].trim_start().len();
    let broken = |used, error| Region::Broken { used, error };
    if at == text.len() && !last {
        return Region::More;
    }
    if !text[at..].starts_with('{') {
        if name == INTERPRETER && !last {
            return Region::More;
        }
        if name == INTERPRETER {
            return Region::of(text.len(), code(&text[at..], name));
        }
        if marked {
            let error = ToolCallError::syntax(name, "a JSON object after the recipient");
            return broken(at, error);
        }
        // The start of a turn that has no recipient.
        return Region::Text { used: at };
    }
    let Some(used) = scan.json.advance(text, at, text.len()) else {
        return if last {
            broken(text.len(), endless_json())
        } else {
            Region::More
        };
    };
    let arguments = parse_json(&text[at..used]).and_then(|value| object(Some(&value)));
    let calls = arguments.map(|arguments| vec![ParsedCall::new(name, arguments)]);
    Region::of(used, calls)
}

/// Parses a call of Muse, or the header of a message.
pub(crate) fn muse(text: &str, scan: &mut Scan, last: bool, schemas: &Schemas) -> Region {
    if let Some(rest) = text.strip_prefix(TO) {
        return header(rest, last);
    }
    named_call(text, &MUSE, scan, last, schemas)
}

/// Parses `name<|message|>`. Other text behind ` to=` is text.
fn header(text: &str, last: bool) -> Region {
    let Some(name) = recipient(text, last) else {
        return Region::More;
    };
    let after = &text[name.len()..];
    let used = TO.len() + name.len() + MESSAGE.len();
    match after.strip_prefix(MESSAGE) {
        Some(_) if name == ITSELF => Region::Thought { used },
        Some(_) => Region::Calls {
            used,
            calls: Vec::new(),
        },
        None if !last && MESSAGE.starts_with(after) => Region::More,
        None => Region::Text { used: TO.len() },
    }
}
