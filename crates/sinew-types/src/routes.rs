//! Experts that a mixture-of-experts model chose while it sampled, so that a trainer can use the same ones.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::de::{Error, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::fmt;
use std::sync::Arc;

/// Maximum bytes of the experts of one generation; an engine records none of a generation with more.
pub const MAX_ROUTE_BYTES: usize = 64 << 20;

/// The experts of consecutive tokens of a context: each was computed by them when it was an input.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RouteSpan {
    /// Position of the first token in its context.
    pub start: u32,
    /// Decoder layers of the model. Entries of layers without experts have no meaning.
    pub layers: u16,
    /// Number of experts of a token in a layer.
    pub top_k: u16,
    /// Whether the number of an expert takes two bytes, little-endian, instead of one.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub wide: bool,
    /// Numbers of the experts, `[tokens][layers][top_k]`. Text formats hold them in base64.
    #[serde(serialize_with = "write_bytes", deserialize_with = "read_bytes")]
    pub experts: Arc<[u8]>,
}

crate::debug_fields!(
    RouteSpan as this,
    start = this.start,
    tokens = this.tokens(),
    layers = this.layers,
    top_k = this.top_k,
    wide = this.wide
);

impl RouteSpan {
    /// Bytes of one token.
    pub fn token_bytes(&self) -> usize {
        let width = if self.wide { 2 } else { 1 };
        usize::from(self.layers) * usize::from(self.top_k) * width
    }

    /// Number of tokens.
    pub fn tokens(&self) -> usize {
        self.experts
            .len()
            .checked_div(self.token_bytes())
            .unwrap_or(0)
    }

    /// Position after the last token.
    pub fn end(&self) -> u32 {
        self.start.saturating_add(self.tokens() as u32)
    }

    /// Layers, experts of a token in a layer, and whether numbers take two bytes: equal for one model.
    pub fn shape(&self) -> (u16, u16, bool) {
        (self.layers, self.top_k, self.wide)
    }

    /// Bytes of the token at a position of the context; `None` outside the span.
    pub fn at(&self, position: usize) -> Option<&[u8]> {
        let index = position.checked_sub(self.start as usize)?;
        let size = self.token_bytes();
        self.experts
            .get(index.checked_mul(size)?..(index + 1).checked_mul(size)?)
    }

    /// Numbers of experts that [`RouteSpan::at`] gives as bytes.
    pub fn numbers(bytes: &[u8], wide: bool) -> impl Iterator<Item = u16> + '_ {
        let width = if wide { 2 } else { 1 };
        bytes.chunks_exact(width).map(|number| match *number {
            [low, high] => u16::from_le_bytes([low, high]),
            [low] => u16::from(low),
            _ => 0,
        })
    }

    /// Drops the tokens from position `end` on.
    pub fn truncate(&mut self, end: u32) {
        let kept = end.saturating_sub(self.start) as usize;
        if kept < self.tokens() {
            self.experts = Arc::from(&self.experts[..kept * self.token_bytes()]);
        }
    }

    /// Checks the sizes.
    ///
    /// # Errors
    /// The field and its value, in words.
    pub fn validate(&self) -> Result<(), String> {
        let (layers, top_k, bytes) = (self.layers, self.top_k, self.experts.len());
        let size = self.token_bytes();
        if size == 0 {
            return Err(format!(
                "have {layers} layers of {top_k} experts, expected at least 1 of each"
            ));
        }
        if bytes == 0 || !bytes.is_multiple_of(size) || bytes > MAX_ROUTE_BYTES {
            return Err(format!(
                "have {bytes} bytes, expected a multiple of {size}, above 0 and up to {MAX_ROUTE_BYTES}"
            ));
        }
        Ok(())
    }

    /// The position up to which all tokens of a context are recorded, given its spans in the order of their
    /// generations.
    pub fn known<'a>(spans: impl IntoIterator<Item = &'a Self>) -> u32 {
        let further = |known: u32, span: &Self| {
            if span.start <= known {
                known.max(span.end())
            } else {
                known
            }
        };
        spans.into_iter().fold(0, further)
    }

    /// The spans of a context by position and without overlaps, given them in the order of their generations;
    /// a later one replaces what overlaps it. Empty if they are of models of different shapes.
    pub fn joined<'a>(spans: impl IntoIterator<Item = &'a Self>) -> Vec<Self> {
        let mut joined: Vec<Self> = Vec::new();
        for span in spans {
            let same = |first: &Self| first.shape() == span.shape();
            if !joined.first().is_none_or(same) {
                return Vec::new();
            }
            while joined.last().is_some_and(|last| last.start >= span.start) {
                joined.pop();
            }
            if let Some(last) = joined.last_mut() {
                last.truncate(span.start);
            }
            joined.push(span.clone());
        }
        joined
    }
}

fn write_bytes<S: Serializer>(bytes: &Arc<[u8]>, serializer: S) -> Result<S::Ok, S::Error> {
    if serializer.is_human_readable() {
        serializer.serialize_str(&STANDARD.encode(bytes))
    } else {
        serializer.serialize_bytes(bytes)
    }
}

struct BytesVisitor;

impl Visitor<'_> for BytesVisitor {
    type Value = Arc<[u8]>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("bytes, or text in base64")
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<Self::Value, E> {
        let bytes = STANDARD.decode(text).map_err(E::custom)?;
        Ok(bytes.into())
    }

    fn visit_bytes<E: Error>(self, bytes: &[u8]) -> Result<Self::Value, E> {
        Ok(bytes.into())
    }

    fn visit_byte_buf<E: Error>(self, bytes: Vec<u8>) -> Result<Self::Value, E> {
        Ok(bytes.into())
    }
}

fn read_bytes<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Arc<[u8]>, D::Error> {
    deserializer.deserialize_any(BytesVisitor)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A span of two layers of one expert.
    fn span(start: u32, experts: &[u8]) -> RouteSpan {
        RouteSpan {
            start,
            layers: 2,
            top_k: 1,
            wide: false,
            experts: experts.into(),
        }
    }

    #[test]
    fn spans_know_their_tokens() {
        let mut one = span(3, &[1, 2, 3, 4]);
        one.validate().unwrap();
        assert_eq!((one.tokens(), one.end()), (2, 5));
        assert_eq!(one.at(4), Some(&[3, 4][..]));
        assert_eq!((one.at(2), one.at(5)), (None, None));
        one.truncate(4);
        assert_eq!((one.tokens(), one.at(4)), (1, None));
        let wide = RouteSpan {
            wide: true,
            ..span(0, &[1, 1, 2, 0])
        };
        assert_eq!((wide.token_bytes(), wide.tokens()), (4, 1));
        let numbers = |bytes: &[u8], wide| RouteSpan::numbers(bytes, wide).collect::<Vec<u16>>();
        assert_eq!(numbers(&wide.experts, true), [257, 2]);
        assert_eq!(numbers(&[9, 255], false), [9, 255]);
        for bad in [span(0, &[1]), span(0, &[])] {
            assert!(bad.validate().unwrap_err().contains("multiple of 2"));
        }
        let none = RouteSpan {
            layers: 0,
            ..span(0, &[1])
        };
        assert!(none.validate().unwrap_err().contains("0 layers"));
        assert_eq!(none.tokens(), 0);
    }

    #[test]
    fn later_spans_replace_earlier_ones() {
        let (first, second) = (span(0, &[1; 8]), span(3, &[2; 6]));
        assert_eq!(RouteSpan::known([&first, &second]), 6);
        assert_eq!(RouteSpan::known([&second]), 0);
        assert_eq!(RouteSpan::known([]), 0);
        let joined = RouteSpan::joined([&first, &second]);
        assert_eq!(joined, [span(0, &[1; 6]), second.clone()]);
        let whole = span(0, &[3; 14]);
        let joined = RouteSpan::joined([&first, &second, &whole]);
        assert_eq!(joined, [whole]);
        let other = RouteSpan {
            top_k: 2,
            ..first.clone()
        };
        assert!(RouteSpan::joined([&first, &other]).is_empty());
    }

    #[test]
    fn bytes_are_text_in_json() {
        let one = span(3, &[1, 2, 3, 255]);
        let text = serde_json::to_string(&one).unwrap();
        assert_eq!(
            text,
            r#"{"start":3,"layers":2,"top_k":1,"experts":"AQID/w=="}"#
        );
        assert_eq!(serde_json::from_str::<RouteSpan>(&text).unwrap(), one);
        let bad = text.replace("AQID/w==", "?");
        assert!(serde_json::from_str::<RouteSpan>(&bad).is_err());
    }
}
