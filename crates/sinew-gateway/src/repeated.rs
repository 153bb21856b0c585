//! Requests repeat the whole conversation. The part that was read before is recognized by its
//! bytes and not read again, so that a turn costs what is new in it.
//!
//! A list that is cut where the model speaks next reads the same: no item before such a place
//! is read together with one after it ([`Dialect::repeated`](crate::dialect::Dialect::repeated)).

use crate::session::{Key, PrefixHasher, StateId};
use serde::de::{DeserializeOwned, IgnoredAny};

/// Bodies of a rollout that are remembered.
pub(crate) const MAX_SEEN: usize = 8;

/// Messages that were read, as bytes of their array without its brackets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Seen {
    pub(crate) bytes: usize,
    pub(crate) key: Key,
    /// Of what the request says before them ([`crate::session::head_key`]).
    pub(crate) head: Key,
    /// Where they lead to.
    pub(crate) state: StateId,
    /// That they asked for.
    pub(crate) call: u32,
}

/// What the bytes of a body tell.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Scan {
    /// Where the messages begin.
    pub(crate) start: usize,
    /// Length and key of all messages.
    pub(crate) bytes: usize,
    pub(crate) key: Key,
    /// The longest known beginning, and the body without it.
    pub(crate) cut: Option<(Seen, Vec<u8>)>,
}

impl Scan {
    /// Key of the whole body that was scanned; its messages are not hashed again.
    pub(crate) fn body_key(&self, body: &[u8]) -> [u8; 32] {
        let (head, rest) = body.split_at(self.start);
        let mut hasher = blake3::Hasher::new();
        hasher
            .update(&(head.len() as u64).to_le_bytes())
            .update(head);
        hasher
            .update(&(self.bytes as u64).to_le_bytes())
            .update(&self.key);
        hasher.update(&rest[self.bytes..]);
        *hasher.finalize().as_bytes()
    }
}

/// The longest of the `seen` that `array` begins with, where its next item starts, and the hasher
/// at its end. The newest is tried first: most bodies are the last one and something new.
fn longest<'a>(array: &[u8], seen: &'a [Seen]) -> Option<(&'a Seen, usize, PrefixHasher)> {
    let matches = |seen: &'a Seen, hasher: &mut PrefixHasher| {
        let key = hasher.until(array, seen.bytes);
        let comma = skip_space(array, seen.bytes);
        let same = key == seen.key && array.get(comma) == Some(&b',');
        same.then(|| (seen, comma + 1, hasher.clone()))
    };
    let fits = |s: &&Seen| s.bytes < array.len();
    let mut hasher = PrefixHasher::default();
    let newest = seen
        .last()
        .filter(fits)
        .and_then(|s| matches(s, &mut hasher));
    if newest.is_none() {
        hasher = PrefixHasher::default();
    }
    let from = newest.as_ref().map_or(0, |(s, ..)| s.bytes);
    let mut longer: Vec<&Seen> = seen
        .iter()
        .filter(fits)
        .filter(|s| s.bytes > from)
        .collect();
    longer.sort_by_key(|s| s.bytes);
    let mut known = newest;
    for candidate in longer {
        known = matches(candidate, &mut hasher).or(known);
    }
    known
}

/// Looks for the array `field` of the object in `body`. `None` if there is none, or the bytes
/// are not what they should be: reading the body tells why.
pub(crate) fn scan(body: &[u8], field: &str, seen: &[Seen]) -> Option<Scan> {
    let start = find_array(body, field)? + 1;
    let array = &body[start..];
    let known = longest(array, seen);
    let from = known.as_ref().map_or(0, |(_, from, _)| *from);
    let bytes = last_item(array, from)?;
    let (known, mut hasher) = match known {
        Some((seen, from, hasher)) => (Some((seen, from)), hasher),
        None => (None, PrefixHasher::default()),
    };
    let key = hasher.until(array, bytes);
    let cut = known.map(|(seen, from)| {
        let mut rest = Vec::with_capacity(start + array.len() - from);
        rest.extend_from_slice(&body[..start]);
        rest.extend_from_slice(&array[from..]);
        (*seen, rest)
    });
    Some(Scan {
        start,
        bytes,
        key,
        cut,
    })
}

/// Position of the bracket that opens the array `field`.
fn find_array(body: &[u8], field: &str) -> Option<usize> {
    let mut at = skip_space(body, 0);
    if body.get(at) != Some(&b'{') {
        return None;
    }
    loop {
        at = skip_space(body, at + 1);
        let (name, used): (String, usize) = next(&body[at..])?;
        at = skip_space(body, at + used);
        if body.get(at) != Some(&b':') {
            return None;
        }
        at = skip_space(body, at + 1);
        if name == field {
            return (body.get(at) == Some(&b'[')).then_some(at);
        }
        let (_, used): (IgnoredAny, usize) = next(&body[at..])?;
        at = skip_space(body, at + used);
        if body.get(at) != Some(&b',') {
            return None;
        }
    }
}

/// Where the last item of an array ends, reading from the beginning of one.
fn last_item(array: &[u8], from: usize) -> Option<usize> {
    let mut at = from;
    loop {
        at = skip_space(array, at);
        let (_, used): (IgnoredAny, usize) = next(&array[at..])?;
        let end = at + used;
        at = skip_space(array, end);
        match array.get(at) {
            Some(b',') => at += 1,
            Some(b']') => return Some(end),
            _ => return None,
        }
    }
}

fn next<T: DeserializeOwned>(bytes: &[u8]) -> Option<(T, usize)> {
    let mut values = serde_json::Deserializer::from_slice(bytes).into_iter();
    let value = values.next()?.ok()?;
    Some((value, values.byte_offset()))
}

fn skip_space(bytes: &[u8], at: usize) -> usize {
    let space = |b: &&u8| matches!(b, b' ' | b'\n' | b'\r' | b'\t');
    let rest = bytes.get(at..).unwrap_or_default();
    at + rest.iter().take_while(space).count()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dialect::Dialect;
    use crate::dialect::anthropic::Messages;
    use crate::dialect::responses::Responses;
    use crate::session::Prompt;
    use proptest::prelude::*;
    use serde_json::{Value, json};
    use sinew_types::{Message, Role};

    fn seen(scan: &Scan, state: StateId) -> Seen {
        Seen {
            bytes: scan.bytes,
            key: scan.key,
            head: Key::default(),
            state,
            call: 0,
        }
    }

    fn text(scan: &Scan) -> &str {
        let (_, body) = scan.cut.as_ref().unwrap();
        std::str::from_utf8(body).unwrap()
    }

    #[test]
    fn known_beginnings_are_cut_off() {
        let one = br#"{"model": "m,[]", "messages": [ {"a": "]}"} ], "n": 1}"#;
        let first = scan(one, "messages", &[]).unwrap();
        assert_eq!(first.cut, None);
        let two = br#"{"n":2,"messages":[ {"a": "]}"} , 3,{"b":1}],"x":[]}"#;
        let second = scan(two, "messages", &[seen(&first, 1)]).unwrap();
        assert_eq!(text(&second), r#"{"n":2,"messages":[ 3,{"b":1}],"x":[]}"#);
        let three = br#"{"messages":[ {"a": "]}"} , 3,{"b":1},4]}"#;
        let both = [seen(&second, 2), seen(&first, 1)];
        let third = scan(three, "messages", &both).unwrap();
        assert_eq!(third.cut.as_ref().unwrap().0.state, 2);
        assert_eq!(text(&third), r#"{"messages":[4]}"#);
        // The key of the whole does not depend on what was cut.
        assert_eq!(scan(three, "messages", &[]).unwrap().key, third.key);
        // Nor does that of the body, and no other body has it.
        assert_eq!(
            scan(three, "messages", &[]).unwrap().body_key(three),
            third.body_key(three)
        );
        for other in [
            two.as_slice(),
            br#"{"messages":[ {"a": "]}"} , 3,{"b":1},4],"n":1}"#,
        ] {
            let scanned = scan(other, "messages", &[]).unwrap();
            assert_ne!(scanned.body_key(other), third.body_key(three));
        }
        // A longer known beginning wins over the newest, and an older one is found, too.
        for known in [[both[0], both[1]], [both[1], both[0]]] {
            assert_eq!(scan(three, "messages", &known).unwrap(), third);
            let again = scan(two, "messages", &known).unwrap();
            assert_eq!(again, second);
        }
        // The same again has nothing new in it.
        assert_eq!(scan(one, "messages", &[seen(&first, 1)]).unwrap().cut, None);
    }

    #[test]
    fn other_bytes_are_read_whole() {
        let first = scan(br#"{"messages":[1,2]}"#, "messages", &[]).unwrap();
        let known = [seen(&first, 1)];
        for body in [
            r#"{"messages":[1,3,4]}"#,
            r#"{"messages":[1, 2,4]}"#,
            r#"{"messages":[1,23]}"#,
        ] {
            let scanned = scan(body.as_bytes(), "messages", &known).unwrap();
            assert_eq!(scanned.cut, None, "{body}");
        }
        for broken in [
            "",
            "{",
            "[]",
            "{}",
            r#"{"messages":7}"#,
            r#"{"messages":[]}"#,
            r#"{"messages":[1,2"#,
            r#"{"messages":[1,2,]}"#,
            r#"{"x":1 "messages":[1]}"#,
            r#"{1:2}"#,
            "\u{ff}",
        ] {
            assert_eq!(
                scan(broken.as_bytes(), "messages", &known),
                None,
                "{broken}"
            );
        }
    }

    /// Items of the model's turns and of others, in any order a client may send.
    fn item(kind: u8, at: usize) -> Value {
        let text = format!("t{at}");
        match kind {
            0 => json!({"role": "user", "content": text}),
            1 => json!({"type": "function_call_output", "call_id": "c", "output": text}),
            2 => json!({"type": "message", "role": "assistant", "content": text}),
            3 => {
                json!({"type": "reasoning", "content": [{"type": "reasoning_text", "text": text}]})
            }
            _ => json!({"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}),
        }
    }

    fn block(kind: u8, at: usize) -> Value {
        let text = format!("t{at}");
        let result = json!({"type": "tool_result", "tool_use_id": "c", "content": text});
        match kind {
            0 => json!({"role": "user", "content": text}),
            1 => json!({"role": "user", "content": [result, {"type": "text", "text": "and"}]}),
            2 => json!({"role": "assistant", "content": text}),
            3 => json!({"role": "user", "content": []}),
            _ => json!({"role": "assistant", "content": [
                {"type": "tool_use", "id": "c", "name": "f", "input": {}},
            ]}),
        }
    }

    fn messages(dialect: &dyn Dialect, body: &Value) -> Option<Vec<Message>> {
        let request = dialect.parse(body.to_string().as_bytes()).ok()?;
        match request.prompt {
            Prompt::Messages(messages) => Some(messages[request.head..].to_vec()),
            _ => None,
        }
    }

    proptest! {
        /// Wherever a list may be cut, its parts are read as the whole is.
        #[test]
        fn a_cut_list_reads_the_same(
            kinds in prop::collection::vec(0u8..5, 2..9),
            cut in 1usize..8,
            anthropic in any::<bool>(),
        ) {
            let cut = cut.min(kinds.len() - 1);
            let make = if anthropic { block } else { item };
            let items: Vec<Value> = kinds.iter().enumerate().map(|(i, &k)| make(k, i)).collect();
            let body = |items: &[Value]| match anthropic {
                true => json!({"model": "m", "max_tokens": 9, "system": "s", "messages": items}),
                false => json!({"model": "m", "instructions": "s", "input": items}),
            };
            let dialect: &dyn Dialect = if anthropic { &Messages } else { &Responses };
            let Some(before) = messages(dialect, &body(&items[..cut])) else { return Ok(()) };
            let spoken = before.last().is_none_or(|m| m.role == Role::Assistant);
            let (Some(after), Some(whole)) =
                (messages(dialect, &body(&items[cut..])), messages(dialect, &body(&items)))
            else {
                return Ok(());
            };
            if !spoken {
                prop_assert_eq!([before, after].concat(), whole);
            }
        }
    }
}
