//! Stop strings, matched on bytes across token borders. Only this part of the crate uses the bytes of tokens.

use sinew_types::TokenId;
use std::sync::Arc;

/// The bytes that each token id stands for. Ids past the end of the table, and those with
/// no bytes (control tokens), add nothing to the output's text.
#[derive(Clone, Debug)]
pub struct TokenBytes {
    inner: Arc<Table>,
}

#[derive(Debug)]
struct Table {
    /// Token `i` is `bytes[ends[i - 1]..ends[i]]`, with 0 before the first.
    ends: Vec<usize>,
    bytes: Vec<u8>,
}

impl TokenBytes {
    /// The table whose `i`-th item is the bytes of token `i`.
    pub fn new(tokens: impl IntoIterator<Item = impl AsRef<[u8]>>) -> Self {
        let mut table = Table {
            ends: Vec::new(),
            bytes: Vec::new(),
        };
        for token in tokens {
            table.bytes.extend_from_slice(token.as_ref());
            table.ends.push(table.bytes.len());
        }
        Self {
            inner: Arc::new(table),
        }
    }

    /// The bytes of `id`; empty for ids without any.
    pub fn get(&self, id: TokenId) -> &[u8] {
        let id = id as usize;
        let Some(&end) = self.inner.ends.get(id) else {
            return &[];
        };
        let start = if id == 0 { 0 } else { self.inner.ends[id - 1] };
        &self.inner.bytes[start..end]
    }
}

/// Watches one request's output for its stop strings. Memory is bounded by the longest stop string.
#[derive(Debug, Default)]
pub(crate) struct StopMatcher {
    /// The last bytes of the output: as many as a match that is not complete can need.
    tail: Vec<u8>,
}

impl StopMatcher {
    /// Adds `token`'s bytes to the output. Returns the index in `stops` of the string whose
    /// match ends first; of two that end together, the one listed first.
    pub(crate) fn push(&mut self, token: &[u8], stops: &[String]) -> Option<usize> {
        let old = self.tail.len();
        self.tail.extend_from_slice(token);
        let hit = (old + 1..=self.tail.len()).find_map(|end| {
            let text = &self.tail[..end];
            stops.iter().position(|s| text.ends_with(s.as_bytes()))
        });
        let longest = stops.iter().map(String::len).max().unwrap_or(0);
        let excess = (self.tail.len() + 1).saturating_sub(longest);
        self.tail.drain(..excess.min(self.tail.len()));
        hit
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn table_answers_for_any_id() {
        let table = TokenBytes::new([b"ab".as_slice(), b"", b"c"]);
        assert_eq!(table.get(0), b"ab");
        assert_eq!(table.get(1), b"");
        assert_eq!(table.get(2), b"c");
        assert_eq!(table.get(3), b"");
    }

    #[test]
    fn match_spans_tokens_and_multibyte_characters() {
        let stops = vec!["</tool>".to_owned(), "é".to_owned()];
        let mut m = StopMatcher::default();
        assert_eq!(m.push(b"x </t", &stops), None);
        assert_eq!(m.push(b"", &stops), None);
        assert_eq!(m.push(b"oo", &stops), None);
        assert_eq!(m.push(b"l> tail", &stops), Some(0));
        let mut m = StopMatcher::default();
        assert_eq!(m.push(&[0xc3], &stops), None);
        assert_eq!(m.push(&[0xa9], &stops), Some(1));
    }

    proptest! {
        #[test]
        fn agrees_with_a_search_in_the_whole_text(
            tokens in prop::collection::vec("[ab]{0,3}", 0..20),
            stops in prop::collection::vec("[ab]{1,4}", 1..4),
        ) {
            let mut m = StopMatcher::default();
            let mut text = String::new();
            for token in &tokens {
                text.push_str(token);
                let hit = m.push(token.as_bytes(), &stops).is_some();
                let expected = stops.iter().any(|s| text.contains(s.as_str()));
                prop_assert_eq!(hit, expected);
                if hit {
                    break;
                }
            }
        }
    }
}
