//! JSON from outside, whose integers may have any size.
//!
//! `serde_json` reads an integer beyond 64 bits as the nearest `f64`, which is another number. Its feature
//! `arbitrary_precision` would keep the digits, but it holds for the whole program: floating-point numbers in
//! tagged, untagged and flattened types can no longer be read, those of the `tokenizers` crate among them.
//! Here such an integer is read as the text of its digits.

use serde::de::DeserializeOwned;
use std::io::{self, Read};

/// Integers with at most this many digits fit into 64 bits.
const SAFE_DIGITS: usize = 18;

/// Maximum bytes of a number that is parsed; a longer one is kept unchanged.
const MAX_NUMBER_BYTES: usize = 1 << 20;

/// Reads JSON; an integer beyond 64 bits is the text of its digits.
///
/// # Errors
/// Fails as [`serde_json::from_str`] does.
pub fn from_str<T: DeserializeOwned>(text: &str) -> serde_json::Result<T> {
    from_slice(text.as_bytes())
}

/// Same as [`from_str`], for bytes.
///
/// # Errors
/// Fails as [`serde_json::from_slice`] does.
pub fn from_slice<T: DeserializeOwned>(bytes: &[u8]) -> serde_json::Result<T> {
    let mut digits = 0;
    let long = bytes.iter().any(|b| {
        digits = if b.is_ascii_digit() { digits + 1 } else { 0 };
        digits > SAFE_DIGITS
    });
    if !long {
        return serde_json::from_slice(bytes);
    }
    let (mut quotes, mut quoted) = (Quotes::default(), Vec::with_capacity(bytes.len() + 2));
    bytes.iter().for_each(|b| quotes.push(*b, &mut quoted));
    quotes.end(&mut quoted);
    serde_json::from_slice(&quoted)
}

/// JSON with quotes around each integer beyond 64 bits, while it is read.
#[derive(Debug)]
pub struct Quoted<R> {
    inner: R,
    quotes: Quotes,
    /// Bytes that are ready, from `at` on.
    ready: Vec<u8>,
    at: usize,
}

impl<R: Read> Quoted<R> {
    /// JSON as `inner` gives it.
    pub fn new(inner: R) -> Self {
        Self {
            inner,
            quotes: Quotes::default(),
            ready: Vec::new(),
            at: 0,
        }
    }
}

impl<R: Read> Read for Quoted<R> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        while self.at == self.ready.len() {
            (self.at, self.ready) = (0, Vec::new());
            let mut chunk = [0; 4096];
            let count = self.inner.read(&mut chunk)?;
            if count == 0 {
                self.quotes.end(&mut self.ready);
                if self.ready.is_empty() {
                    return Ok(0);
                }
            }
            for byte in &chunk[..count] {
                self.quotes.push(*byte, &mut self.ready);
            }
        }
        let count = out.len().min(self.ready.len() - self.at);
        out[..count].copy_from_slice(&self.ready[self.at..self.at + count]);
        self.at += count;
        Ok(count)
    }
}

/// Position of the next byte in JSON.
#[derive(Debug, Default)]
struct Quotes {
    in_string: bool,
    /// The last byte was a backslash in a string.
    escaped: bool,
    /// The number at hand.
    number: Vec<u8>,
}

impl Quotes {
    /// Takes a byte, and writes what is known of the text before it.
    fn push(&mut self, byte: u8, out: &mut Vec<u8>) {
        let in_number = matches!(byte, b'0'..=b'9' | b'-' | b'+' | b'.' | b'e' | b'E');
        let begins = byte == b'-' || byte.is_ascii_digit();
        let goes_on = in_number && (begins || !self.number.is_empty());
        if !self.in_string && goes_on && self.number.len() < MAX_NUMBER_BYTES {
            self.number.push(byte);
            return;
        }
        self.end(out);
        match byte {
            _ if self.escaped => self.escaped = false,
            b'\\' if self.in_string => self.escaped = true,
            b'"' => self.in_string = !self.in_string,
            _ => {}
        }
        out.push(byte);
    }

    /// Writes the number at hand.
    fn end(&mut self, out: &mut Vec<u8>) {
        let beyond = is_beyond(&self.number);
        out.extend(beyond.then_some(b'"'));
        out.append(&mut self.number);
        out.extend(beyond.then_some(b'"'));
    }
}

/// Whether a number is an integer beyond 64 bits.
fn is_beyond(number: &[u8]) -> bool {
    let digits = number.strip_prefix(b"-").unwrap_or(number);
    if digits.len() <= SAFE_DIGITS || digits[0] == b'0' || !digits.iter().all(u8::is_ascii_digit) {
        return false;
    }
    let text = String::from_utf8_lossy(number);
    text.parse::<i64>().is_err() && text.parse::<u64>().is_err()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    #[test]
    fn integers_keep_their_digits_whatever_their_size() {
        let huge = "1".repeat(400);
        let cases = [
            ("18446744073709551617", json!("18446744073709551617")),
            ("-9223372036854775809", json!("-9223372036854775809")),
            (huge.as_str(), json!(huge)),
            ("18446744073709551615", json!(u64::MAX)),
            ("-9223372036854775808", json!(i64::MIN)),
            ("1e30", json!(1e30)),
            (
                "123456789012345678901.5",
                json!(123_456_789_012_345_678_901.5),
            ),
        ];
        for (text, expected) in cases {
            let object = format!("{{\"a\": [{text},{text}], \"b\":{text}}}");
            let read: Value = from_str(&object).unwrap();
            assert_eq!(read, json!({"a": [expected, expected], "b": expected}));
            assert_eq!(from_str::<Value>(text).unwrap(), expected);
            let streamed: Value = serde_json::from_reader(Quoted::new(object.as_bytes())).unwrap();
            assert_eq!(streamed, read);
        }
    }

    #[test]
    fn texts_are_as_they_were() {
        let text = r#"{"18446744073709551617": "\"18446744073709551617\\", "é": "\\"}"#;
        let plain: Value = serde_json::from_str(text).unwrap();
        assert_eq!(from_str::<Value>(text).unwrap(), plain);
        for wrong in [
            "018446744073709551617",
            "--18446744073709551617",
            "{",
            "\"\\",
        ] {
            assert!(from_str::<Value>(wrong).is_err(), "{wrong}");
        }
        assert!(from_slice::<Value>(b"\"\xff\"").is_err());
    }
}
