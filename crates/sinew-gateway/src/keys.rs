//! Hashes and sizes of messages, by which repeated messages are recognized.
//!
//! Each kind of hash has a separate domain byte, and every part is preceded by its length, so that two
//! different messages never have the same hash input. The order of keys in JSON objects does not matter, nor
//! whether a whole number is written with a point: clients in JavaScript write `1.0` as `1`.
//!
//! | hash | of | ignores |
//! |---|---|---|
//! | [`exact`] | a message | nothing |
//! | [`loose`] | an assistant's message | reasoning, ids of calls, white space around the text |
//! | [`tools`] | the tools that the model sees | |
//! | [`head`] | tools and the messages before those that a body repeats | |

use serde_json::{Number, Value};
use sinew_types::{Content, Message, Part, Role, TokenId, ToolCall, ToolSpec};

/// 128-bit BLAKE3 hash, long enough that accidental collisions do not occur.
pub(crate) type Key = [u8; 16];

/// Index of a conversation state, see `session::states`; 0 is the state before any tool and message.
pub(crate) type StateId = u32;

/// Number of bytes that BLAKE3 hashes in parallel with 512-bit vectors.
const HASHED_AT_ONCE: usize = 16 << 10;

/// BLAKE3 over parts of known length.
#[derive(Clone, Debug)]
struct Parts(blake3::Hasher);

impl Parts {
    fn new(domain: u8) -> Self {
        let mut hasher = blake3::Hasher::new();
        hasher.update(&[domain]);
        Self(hasher)
    }

    fn bytes(&mut self, bytes: &[u8]) {
        self.0.update(&(bytes.len() as u64).to_le_bytes());
        self.0.update(bytes);
    }

    fn option(&mut self, text: Option<&str>) {
        self.0.update(&[u8::from(text.is_some())]);
        self.bytes(text.unwrap_or_default().as_bytes());
    }

    /// Hashes content. Plain text is hashed as its bytes.
    fn content(&mut self, content: &Content) {
        if let Some(text) = content.as_text() {
            return self.bytes(text.as_bytes());
        }
        self.0.update(&(content.parts().len() as u64).to_le_bytes());
        for part in content.parts() {
            self.bytes(part.kind().as_bytes());
            match part {
                Part::Text { text } => self.bytes(text.as_bytes()),
                Part::Image(media) | Part::Audio(media) => {
                    self.bytes(media.source.to_string().as_bytes());
                    self.option(media.media_type.as_deref());
                }
            }
        }
    }

    /// Hashes JSON. The order of keys in objects does not matter.
    fn json(&mut self, value: &Value) {
        match value {
            Value::Object(map) => {
                let mut entries: Vec<_> = map.iter().collect();
                entries.sort_by_key(|(key, _)| key.as_str());
                self.bytes(b"{");
                self.0.update(&(entries.len() as u64).to_le_bytes());
                for (key, value) in entries {
                    self.bytes(key.as_bytes());
                    self.json(value);
                }
            }
            Value::Array(items) => {
                self.bytes(b"[");
                self.0.update(&(items.len() as u64).to_le_bytes());
                for item in items {
                    self.json(item);
                }
            }
            Value::String(text) => {
                self.bytes(b"\"");
                self.bytes(text.as_bytes());
            }
            Value::Number(number) => self.bytes(digits(number).as_bytes()),
            plain => self.bytes(plain.to_string().as_bytes()),
        }
    }

    fn key(&self) -> Key {
        let mut key = Key::default();
        key.copy_from_slice(&self.0.finalize().as_bytes()[..16]);
        key
    }
}

/// A number as every client writes it. Larger floats do not represent every whole number.
fn digits(number: &Number) -> String {
    match number.as_f64() {
        Some(float) if number.is_f64() && float.fract() == 0.0 && float.abs() <= 9e15 => {
            (float as i64).to_string()
        }
        _ => number.to_string(),
    }
}

fn role(role: Role) -> u8 {
    match role {
        Role::System => 0,
        Role::User => 1,
        Role::Assistant => 2,
        Role::Tool => 3,
    }
}

/// Hashes the whole content of a message.
pub(crate) fn exact(message: &Message) -> Key {
    let mut parts = Parts::new(1);
    parts.bytes(&[role(message.role)]);
    parts.content(&message.content);
    parts.option(message.reasoning.as_deref());
    parts.option(message.tool_call_id.as_deref());
    parts.option(message.name.as_deref());
    for ToolCall {
        id,
        name,
        arguments,
    } in &message.tool_calls
    {
        parts.bytes(id.as_bytes());
        parts.bytes(name.as_bytes());
        parts.json(arguments);
    }
    parts.key()
}

/// Hashes an assistant's message without the parts that clients drop or rewrite: reasoning, ids of calls,
/// white space around the text.
pub(crate) fn loose(message: &Message) -> Key {
    let mut parts = Parts::new(2);
    match message.content.as_text() {
        Some(text) => parts.bytes(text.trim().as_bytes()),
        None => parts.content(&message.content),
    }
    for ToolCall {
        name, arguments, ..
    } in &message.tool_calls
    {
        parts.bytes(name.as_bytes());
        parts.json(arguments);
    }
    parts.key()
}

/// Hashes the tools that are shown to the model.
pub(crate) fn tools(tools: &[ToolSpec]) -> Key {
    let mut parts = Parts::new(3);
    for tool in tools {
        parts.bytes(tool.name.as_bytes());
        parts.bytes(tool.description.as_bytes());
        parts.json(&tool.parameters);
    }
    parts.key()
}

/// Hashes everything before the messages that a body repeats: tools, and messages from other fields.
pub(crate) fn head(specs: &[ToolSpec], messages: &[Message]) -> Key {
    let mut parts = Parts::new(8);
    parts.bytes(&tools(specs));
    for message in messages {
        parts.bytes(&exact(message));
    }
    parts.key()
}

/// Hashes the name of an adapter: the start of its conversations.
pub(crate) fn adapter(name: &str) -> Key {
    let mut parts = Parts::new(10);
    parts.bytes(name.as_bytes());
    parts.key()
}

/// Returns the hash of a conversation: the one with hash `at`, followed by this message.
pub(crate) fn after(at: &Key, message: &Message) -> Key {
    let mut parts = Parts::new(9);
    parts.bytes(at);
    parts.bytes(&exact(message));
    parts.key()
}

/// Incremental hash of growing prefixes of bytes.
#[derive(Clone, Debug)]
pub(crate) struct PrefixHasher {
    parts: Parts,
    at: usize,
}

impl Default for PrefixHasher {
    fn default() -> Self {
        Self::new(7)
    }
}

impl PrefixHasher {
    fn new(domain: u8) -> Self {
        Self {
            parts: Parts::new(domain),
            at: 0,
        }
    }

    /// Returns the hash of the first `end` bytes; `end` must not decrease between calls.
    pub(crate) fn until(&mut self, bytes: &[u8], end: usize) -> Key {
        self.parts.0.update(&bytes[self.at..end]);
        self.at = end;
        self.parts.key()
    }
}

/// Incremental hash of a growing list of token ids.
#[derive(Clone, Debug)]
pub(crate) struct TokenHasher(Parts);

impl Default for TokenHasher {
    fn default() -> Self {
        Self(Parts::new(5))
    }
}

impl TokenHasher {
    pub(crate) fn push(&mut self, ids: &[TokenId]) {
        let mut buffer = [0u8; HASHED_AT_ONCE];
        for chunk in ids.chunks(buffer.len() / 4) {
            for (slot, id) in buffer.chunks_exact_mut(4).zip(chunk) {
                slot.copy_from_slice(&id.to_le_bytes());
            }
            self.0.0.update(&buffer[..chunk.len() * 4]);
        }
    }

    pub(crate) fn key(&self) -> Key {
        self.0.key()
    }
}

/// Hashes token ids.
pub(crate) fn tokens(ids: &[TokenId]) -> Key {
    let mut hasher = TokenHasher::default();
    hasher.push(ids);
    hasher.key()
}

/// Hashes a text, like [`text_prefixes`].
pub(crate) fn text(text: &str) -> Key {
    PrefixHasher::new(6).until(text.as_bytes(), text.len())
}

/// Returns the hashes of the prefixes of `text` that end at `ends`, which must ascend and lie inside the
/// text.
pub(crate) fn text_prefixes(text: &str, ends: impl Iterator<Item = usize>) -> Vec<(usize, Key)> {
    let mut hasher = PrefixHasher::new(6);
    ends.map(|end| (end, hasher.until(text.as_bytes(), end)))
        .collect()
}

/// Formats bytes as two lower-case hexadecimal digits each.
pub(crate) fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write as _;
    let mut text = String::with_capacity(bytes.len() * 2);
    for byte in bytes {
        // Writing to a string cannot fail.
        let _ = write!(text, "{byte:02x}");
    }
    text
}

/// Parses 32 hexadecimal digits into bytes.
pub(crate) fn unhex(digits: &str) -> Option<[u8; 16]> {
    let mut id = [0; 16];
    if digits.len() != 2 * id.len() {
        return None;
    }
    for (byte, pair) in id.iter_mut().zip(digits.as_bytes().chunks_exact(2)) {
        *byte = u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok()?;
    }
    Some(id)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn assistant(content: &str, arguments: Value) -> Message {
        Message {
            tool_calls: vec![ToolCall {
                id: "a".into(),
                name: "f".into(),
                arguments,
            }],
            ..Message::new(Role::Assistant, content)
        }
    }

    #[test]
    fn order_of_keys_and_what_clients_drop_do_not_count() {
        let a = assistant("x", json!({"a": 1, "b": [1, {"c": 2, "d": 3}]}));
        let b = assistant("x", json!({"b": [1, {"d": 3, "c": 2}], "a": 1}));
        assert_eq!(exact(&a), exact(&b));
        let mut dropped = assistant(" x\n", json!({"b": [1, {"d": 3, "c": 2}], "a": 1}));
        dropped.tool_calls[0].id = "other".into();
        assert_ne!(exact(&a), exact(&dropped));
        assert_eq!(loose(&a), loose(&dropped));
        assert_ne!(loose(&a), loose(&assistant("x", json!({"a": 2}))));
        let of = |number: Value| exact(&assistant("x", json!({"a": number})));
        assert_eq!(of(json!(1.0)), of(json!(1)));
        assert_ne!(of(json!(1.5)), of(json!(1)));
    }

    #[test]
    fn fields_cannot_run_into_each_other() {
        let mut a = Message::new(Role::User, "xy");
        let mut b = Message::new(Role::User, "x");
        b.name = Some("y".into());
        assert_ne!(exact(&a), exact(&b));
        a.content = "x".into();
        a.tool_call_id = Some("y".into());
        assert_ne!(exact(&a), exact(&b));
        assert_ne!(tokens(&[1, 2]), tokens(&[1]));
        let mut grown = TokenHasher::default();
        grown.push(&[1]);
        grown.push(&[2]);
        assert_eq!(grown.key(), tokens(&[1, 2]));
        assert_eq!(
            text_prefixes("abc", [1, 3].into_iter())[1].1,
            text_prefixes("abc", [3].into_iter())[0].1
        );
    }
}
