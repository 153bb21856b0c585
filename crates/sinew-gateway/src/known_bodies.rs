//! Recognizes the known part of request bodies. Requests repeat the whole conversation; the known part is
//! recognized by its bytes and not parsed again, so that a turn costs only its new part.
//!
//! A list of messages may be cut at a point where the model speaks next: no item before such a point is
//! parsed together with one after it ([`Dialect::repeated`](sinew_dialect::Dialect::repeated)).
//!
//! An agent with 50 turns would have its first message parsed 50 times. Here a known beginning costs one
//! comparison of bytes, or one pass of BLAKE3 if it is too large to be stored. An unrecognized body is parsed
//! as a whole, so the answer never depends on recognition.

use crate::keys::{Key, PrefixHasher, StateId};
use serde::de::{DeserializeOwned, IgnoredAny};
use std::collections::VecDeque;

/// Maximum number of bodies of a rollout that are remembered by their hash.
const MAX_KNOWN: usize = 8;

/// Maximum length of messages that are stored and compared byte by byte; longer ones are hashed.
const MAX_COMPARED_BYTES: usize = 1 << 20;

/// Messages that were parsed before, as bytes of their JSON array without its brackets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct KnownBody {
    /// Number of these bytes.
    pub(crate) bytes: usize,
    /// BLAKE3 hash of these bytes.
    pub(crate) key: Key,
    /// Hash of the request's part before the messages ([`crate::keys::head`]).
    pub(crate) head: Key,
    /// Conversation state after the messages.
    pub(crate) state: StateId,
    /// Number of the model call that followed them.
    pub(crate) call: u32,
}

/// Result of scanning the bytes of a body.
#[derive(Clone, Debug)]
pub(crate) struct Scan {
    /// Offset of the first message.
    pub(crate) start: usize,
    /// Number of bytes of all messages.
    pub(crate) bytes: usize,
    pub(crate) key: Key,
    /// Hasher at the end of the messages.
    hasher: PrefixHasher,
    /// The longest known prefix, and the body without it.
    pub(crate) cut: Option<(KnownBody, Vec<u8>)>,
}

impl Scan {
    /// Hash of the whole scanned body; its messages are not hashed again.
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

/// The newest body's messages as bytes. Most bodies start with these: comparing costs a tenth of hashing, and
/// the hash continues at their end.
#[derive(Clone, Debug)]
struct NewestBody {
    seen: KnownBody,
    messages: Vec<u8>,
    hasher: PrefixHasher,
}

/// Bodies of a rollout whose messages were parsed.
#[derive(Clone, Debug, Default)]
pub(crate) struct KnownBodies {
    newest: Option<NewestBody>,
    /// Bodies that are known only by their hash: older ones, and new ones that are too long to compare. The
    /// newest is last.
    older: VecDeque<KnownBody>,
}

impl KnownBodies {
    /// Remembers that `scan` of `body` led to `call` at `state`. `head` as in [`KnownBody`].
    pub(crate) fn remember(
        &mut self,
        body: &[u8],
        scan: &Scan,
        head: Key,
        (call, state): (u32, StateId),
    ) {
        let seen = KnownBody {
            bytes: scan.bytes,
            key: scan.key,
            head,
            state,
            call,
        };
        let messages = &body[scan.start..scan.start + scan.bytes];
        let before = self.newest.take();
        if let Some(NewestBody { seen, .. }) = &before {
            self.older.push_back(*seen);
        }
        self.older.retain(|older| older.key != seen.key);
        if messages.len() > MAX_COMPARED_BYTES {
            self.older.push_back(seen);
        } else {
            let known = scan.cut.as_ref().map(|(known, _)| known.key);
            let messages = match before {
                Some(before) if Some(before.seen.key) == known => {
                    let mut grown = before.messages;
                    grown.extend_from_slice(&messages[grown.len()..]);
                    grown
                }
                _ => messages.to_vec(),
            };
            self.newest = Some(NewestBody {
                seen,
                messages,
                hasher: scan.hasher.clone(),
            });
        }
        while self.older.len() > MAX_KNOWN {
            self.older.pop_front();
        }
    }

    /// Returns the longest known messages that `array` begins with, the start of its next item, and the
    /// hasher at their end.
    fn longest(&self, array: &[u8]) -> Option<(KnownBody, usize, PrefixHasher)> {
        let next = |seen: &KnownBody| {
            let comma = skip_space(array, seen.bytes);
            (array.get(comma) == Some(&b',')).then_some(comma + 1)
        };
        let newest = self.newest.as_ref();
        let mut known = newest
            .filter(|newest| array.starts_with(&newest.messages))
            .and_then(|n| Some((n.seen, next(&n.seen)?, n.hasher.clone())));
        let from = known.as_ref().map_or(0, |(seen, ..)| seen.bytes);
        let longer = |s: &&KnownBody| (from + 1..array.len()).contains(&s.bytes);
        let mut longer: Vec<&KnownBody> = self.older.iter().filter(longer).collect();
        longer.sort_by_key(|s| s.bytes);
        let mut hasher = known.as_ref().map(|(.., hasher)| hasher.clone());
        for seen in longer {
            let hasher = hasher.get_or_insert_default();
            if hasher.until(array, seen.bytes) == seen.key
                && let Some(next) = next(seen)
            {
                known = Some((*seen, next, hasher.clone()));
            }
        }
        known
    }

    /// Finds the array `field` of the object in `body`. `None` if there is none or the bytes are unexpected;
    /// parsing the body then reports the error.
    pub(crate) fn scan(&self, body: &[u8], field: &str) -> Option<Scan> {
        let start = find_array(body, field)? + 1;
        let array = &body[start..];
        let known = self.longest(array);
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
            (seen, rest)
        });
        Some(Scan {
            start,
            bytes,
            key,
            hasher,
            cut,
        })
    }
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

/// Returns the end of the last item of an array. `from` is the start of an item.
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
    use proptest::prelude::*;
    use serde_json::{Value, json};
    use sinew_dialect::Dialect;
    use sinew_dialect::Prompt;
    use sinew_dialect::anthropic::Messages;
    use sinew_dialect::google::{AnswerForm, GenerateContent};
    use sinew_dialect::responses::Responses;
    use sinew_types::{Message, Role};

    /// KnownBodies that were read, the first at state 1.
    fn known(bodies: &[&[u8]]) -> KnownBodies {
        let mut known = KnownBodies::default();
        for (&body, state) in bodies.iter().zip(1..) {
            let scan = known.scan(body, "messages").unwrap();
            known.remember(body, &scan, Key::default(), (state, state));
        }
        known
    }

    /// All of a scan but the hasher, whose key is among them.
    fn told(scan: &Scan) -> (usize, usize, Key, Option<(StateId, &str)>) {
        let cut = scan.cut.as_ref();
        let text = |body| std::str::from_utf8(body).unwrap();
        let cut = cut.map(|(seen, body)| (seen.state, text(body)));
        (scan.start, scan.bytes, scan.key, cut)
    }

    #[test]
    fn known_beginnings_are_cut_off() {
        let one = br#"{"model": "m,[]", "messages": [ {"a": "]}"} ], "n": 1}"#.as_slice();
        let two = br#"{"n":2,"messages":[ {"a": "]}"} , 3,{"b":1}],"x":[]}"#.as_slice();
        let three = br#"{"messages":[ {"a": "]}"} , 3,{"b":1},4]}"#.as_slice();
        let none = KnownBodies::default();
        assert!(none.scan(one, "messages").unwrap().cut.is_none());
        let second = known(&[one]).scan(two, "messages").unwrap();
        let rest = r#"{"n":2,"messages":[ 3,{"b":1}],"x":[]}"#;
        assert_eq!(told(&second).3, Some((1, rest)));
        let third = known(&[one, two]).scan(three, "messages").unwrap();
        assert_eq!(told(&third).3, Some((2, r#"{"messages":[4]}"#)));
        // The key of the whole does not depend on what was cut.
        let whole = none.scan(three, "messages").unwrap();
        assert_eq!(whole.key, third.key);
        // Nor does that of the body, and no other body has it.
        assert_eq!(whole.body_key(three), third.body_key(three));
        for other in [
            two,
            br#"{"messages":[ {"a": "]}"} , 3,{"b":1},4],"n":1}"#.as_slice(),
        ] {
            let scanned = none.scan(other, "messages").unwrap();
            assert_ne!(scanned.body_key(other), third.body_key(three));
        }
        // A longer known beginning wins over the newest, and an older one is found, too.
        let elsewhere = br#"{"messages":["no",1]}"#.as_slice();
        let rest = r#"{"messages":[4]}"#;
        for (bodies, state) in [
            ([two, one].as_slice(), 1),
            (&[one, two, elsewhere], 2),
            (&[one, two, one], 2),
        ] {
            let scan = known(bodies).scan(three, "messages").unwrap();
            assert_eq!(told(&scan).3, Some((state, rest)));
            assert_eq!(scan.key, third.key);
        }
        // The same again has nothing new in it.
        assert!(known(&[one]).scan(one, "messages").unwrap().cut.is_none());
    }

    #[test]
    fn so_many_are_remembered_and_long_ones_by_their_key() {
        let body = |items: &str| format!(r#"{{"messages":[{items}]}}"#).into_bytes();
        let long = format!(r#""{}""#, "x".repeat(MAX_COMPARED_BYTES));
        let mut bodies: Vec<Vec<u8>> = (0..20).map(|i| body(&i.to_string())).collect();
        bodies.push(body(&long));
        let bodies: Vec<&[u8]> = bodies.iter().map(Vec::as_slice).collect();
        let known = known(&bodies);
        assert!(known.newest.is_none());
        assert_eq!(known.older.len(), MAX_KNOWN);
        let grown = |items: &str| {
            known
                .scan(&body(&format!("{items},1")), "messages")
                .unwrap()
        };
        assert_eq!(told(&grown(&long)).3, Some((21, r#"{"messages":[1]}"#)));
        assert_eq!(told(&grown("19")).3, Some((20, r#"{"messages":[1]}"#)));
        assert!(grown("2").cut.is_none());
    }

    #[test]
    fn other_bytes_are_read_whole() {
        let known = known(&[br#"{"messages":[1,2]}"#]);
        for body in [
            r#"{"messages":[1,3,4]}"#,
            r#"{"messages":[1, 2,4]}"#,
            r#"{"messages":[1,23]}"#,
        ] {
            let scanned = known.scan(body.as_bytes(), "messages").unwrap();
            assert!(scanned.cut.is_none(), "{body}");
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
            assert!(
                known.scan(broken.as_bytes(), "messages").is_none(),
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

    fn content(kind: u8, at: usize) -> Value {
        let text = json!({"text": format!("t{at}")});
        let result = json!({"functionResponse": {"name": "f", "response": {"output": "1"}}});
        let (role, parts) = match kind {
            0 => ("user", json!([text])),
            1 => ("user", json!([result, text])),
            2 => ("model", json!([text])),
            3 => ("user", json!([])),
            _ => (
                "model",
                json!([{"functionCall": {"name": "f", "args": {}}}]),
            ),
        };
        json!({"role": role, "parts": parts})
    }

    /// The dialect, an item of its list, and a body with such items.
    type Case = (
        &'static dyn Dialect,
        fn(u8, usize) -> Value,
        fn(&[Value]) -> Value,
    );

    fn case(number: u8) -> Case {
        static GOOGLE: GenerateContent = GenerateContent {
            model: String::new(),
            form: AnswerForm::Whole,
        };
        match number {
            0 => (
                &Responses,
                item,
                |items| json!({"model": "m", "instructions": "s", "input": items}),
            ),
            1 => (
                &Messages,
                block,
                |items| json!({"model": "m", "max_tokens": 9, "system": "s", "messages": items}),
            ),
            _ => (
                &GOOGLE,
                content,
                |items| json!({"systemInstruction": {"parts": [{"text": "s"}]}, "contents": items}),
            ),
        }
    }

    fn messages(dialect: &dyn Dialect, body: &Value) -> Option<Vec<Message>> {
        let request = dialect
            .parse(
                body.to_string().as_bytes(),
                &sinew_dialect::fields::Notes::new(true),
            )
            .ok()?;
        match request.prompt {
            Prompt::Messages(messages) => Some(messages[request.head..].to_vec()),
            _ => None,
        }
    }

    proptest! {
        /// Whatever was read before, a body has the same key, and what is cut off and what is
        /// left are the whole.
        #[test]
        fn what_was_read_before_changes_no_key(
            lists in prop::collection::vec(prop::collection::vec(0u8..3, 1..6), 1..14),
        ) {
            let mut known = KnownBodies::default();
            for (list, call) in lists.iter().zip(1u32..) {
                let body = json!({"messages": list, "n": call}).to_string();
                let scan = known.scan(body.as_bytes(), "messages").unwrap();
                let fresh = KnownBodies::default().scan(body.as_bytes(), "messages").unwrap();
                prop_assert_eq!(scan.key, fresh.key);
                prop_assert_eq!((scan.start, scan.bytes), (fresh.start, fresh.bytes));
                if let Some((seen, rest)) = &scan.cut {
                    let before = &lists[seen.call as usize - 1];
                    let rest: Value = serde_json::from_slice(rest).unwrap();
                    let rest = rest["messages"].as_array().unwrap().iter();
                    let rest = rest.map(|v| v.as_u64().unwrap() as u8);
                    prop_assert_eq!(&before.iter().copied().chain(rest).collect::<Vec<_>>(), list);
                }
                known.remember(body.as_bytes(), &scan, Key::default(), (call, call));
            }
        }

        /// Wherever a list may be cut, its parts are read as the whole is.
        #[test]
        fn a_cut_list_reads_the_same(
            kinds in prop::collection::vec(0u8..5, 2..9),
            cut in 1usize..8,
            of in 0u8..3,
        ) {
            let cut = cut.min(kinds.len() - 1);
            let (dialect, make, body) = case(of);
            let items: Vec<Value> = kinds.iter().enumerate().map(|(i, &k)| make(k, i)).collect();
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
