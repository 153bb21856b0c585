//! Experts that vLLM reports for each token with `--enable-return-routed-experts`. Pure.
//!
//! `/inference/v1/generate` has them in the last piece of an answer, as an array of numpy in base64:
//! `[tokens, layers, top_k]` of `uint8`, or of `uint16` for more than 256 experts. Its tokens are those from
//! `routed_experts_prompt_start` on, up to the one before the last sampled token. `/v1/completions` has them
//! only in answers that are not streamed.

use crate::error::AttemptError;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use sinew_types::{MAX_ROUTE_BYTES, RouteSpan};

/// First bytes of a numpy array.
const MAGIC: &[u8] = b"\x93NUMPY";

/// The experts of an answer. `start` is the position of their first token. An array of more than
/// [`MAX_ROUTE_BYTES`] bytes or without tokens is left out.
///
/// # Errors
/// If the text is not an array of that form.
pub(super) fn parse(text: &str, start: u32) -> Result<Option<RouteSpan>, AttemptError> {
    let wrong = |why: &str| {
        let why = format!("`routed_experts`: {why}");
        AttemptError::Protocol(why)
    };
    if text.len() / 4 * 3 > MAX_ROUTE_BYTES {
        tracing::warn!(
            bytes = text.len() / 4 * 3,
            limit = MAX_ROUTE_BYTES,
            "experts of a request are not recorded"
        );
        return Ok(None);
    }
    let bytes = STANDARD.decode(text);
    let bytes = bytes.map_err(|e| wrong(&format!("not base64: {e}")))?;
    let (header, data) = split(&bytes).ok_or_else(|| wrong("not an array of numpy"))?;
    let kind = quoted(header, "descr").ok_or_else(|| wrong("its header has no type"))?;
    if !header.contains("'fortran_order': False") {
        return Err(wrong("its last dimension must be the innermost"));
    }
    let wide = match kind {
        "|u1" => false,
        "<u2" => true,
        other => {
            let why = format!("its type is {other}, expected |u1 or <u2");
            return Err(wrong(&why));
        }
    };
    let shape = shape(header).ok_or_else(|| wrong("its shape is not [tokens, layers, top_k]"))?;
    let [tokens, layers, top_k] = shape;
    if tokens == 0 {
        return Ok(None);
    }
    let narrow = |size: usize| u16::try_from(size).map_err(|_| wrong("its shape is too large"));
    let span = RouteSpan {
        start,
        layers: narrow(layers)?,
        top_k: narrow(top_k)?,
        wide,
        experts: data.into(),
    };
    if span.validate().is_err() || span.tokens() != tokens {
        let why = format!("{} bytes are not an array of {shape:?} {kind}", data.len());
        return Err(wrong(&why));
    }
    Ok(Some(span))
}

/// The header of an array, and its numbers.
fn split(bytes: &[u8]) -> Option<(&str, &[u8])> {
    let (version, rest) = bytes.strip_prefix(MAGIC)?.split_at_checked(2)?;
    let (length, rest) = if version[0] == 1 {
        let (length, rest) = rest.split_first_chunk::<2>()?;
        (usize::from(u16::from_le_bytes(*length)), rest)
    } else {
        let (length, rest) = rest.split_first_chunk::<4>()?;
        (u32::from_le_bytes(*length) as usize, rest)
    };
    let (header, data) = rest.split_at_checked(length)?;
    Some((std::str::from_utf8(header).ok()?, data))
}

/// The text in quotes after a key of the header, which is a dictionary in Python's notation.
fn quoted<'a>(header: &'a str, key: &str) -> Option<&'a str> {
    let (_, rest) = header.split_once(&format!("'{key}': '"))?;
    Some(rest.split_once('\'')?.0)
}

/// The three sizes of the header's shape.
fn shape(header: &str) -> Option<[usize; 3]> {
    let (_, rest) = header.split_once("'shape': (")?;
    let (sizes, _) = rest.split_once(')')?;
    let sizes: Vec<usize> = sizes
        .split(',')
        .map(|size| size.trim().parse().ok())
        .collect::<Option<_>>()?;
    sizes.try_into().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `numpy2base64` of vLLM 0.32.0 for `[[[3, 1], [0, 2]], [[1, 2], [3, 0]]]` as `uint8` and as `uint16`.
    const BYTES: &str = "k05VTVBZAQB2AHsnZGVzY3InOiAnfHUxJywgJ2ZvcnRyYW5fb3JkZXInOiBGYWxzZSwgJ3NoYXBlJzogKDIsIDIsIDIpLCB9ICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgIAoDAQACAQIDAA==";
    const WIDE: &str = "k05VTVBZAQB2AHsnZGVzY3InOiAnPHUyJywgJ2ZvcnRyYW5fb3JkZXInOiBGYWxzZSwgJ3NoYXBlJzogKDIsIDIsIDIpLCB9ICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgIAoDAAEAAAACAAEAAgADAAAA";

    #[test]
    fn arrays_of_numpy_are_read() {
        let span = parse(BYTES, 5).unwrap().unwrap();
        assert_eq!((span.start, span.tokens(), span.end()), (5, 2, 7));
        assert_eq!(span.shape(), (2, 2, false));
        assert_eq!(span.at(6), Some(&[1, 2, 3, 0][..]));
        let wide = parse(WIDE, 0).unwrap().unwrap();
        assert_eq!(wide.shape(), (2, 2, true));
        let numbers = RouteSpan::numbers(wide.at(0).unwrap(), true);
        assert_eq!(numbers.collect::<Vec<u16>>(), [3, 1, 0, 2]);
    }

    #[test]
    fn other_texts_are_refused() {
        let refused = |text: &str, word: &str| match parse(text, 0) {
            Err(AttemptError::Protocol(why)) => assert!(why.contains(word), "{why}"),
            other => panic!("{other:?}"),
        };
        refused("?", "base64");
        refused("AAAA", "numpy");
        let edited = |from: &str, to: &str| {
            let bytes = STANDARD.decode(BYTES).unwrap();
            let at = bytes.windows(from.len()).position(|w| w == from.as_bytes());
            let at = at.unwrap();
            let changed = [&bytes[..at], to.as_bytes(), &bytes[at + from.len()..]];
            STANDARD.encode(changed.concat())
        };
        refused(&edited("|u1", "<f4"), "<f4");
        refused(&edited("False", "True "), "innermost");
        refused(&edited("(2, 2, 2)", "(2, 2)   "), "shape");
        refused(&edited("(2, 2, 2)", "(3, 2, 2)"), "8 bytes");
        let none = edited("(2, 2, 2)", "(0, 2, 2)");
        assert_eq!(parse(&none, 0).unwrap(), None);
    }
}
