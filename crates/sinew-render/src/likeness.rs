//! Comparison of two renders of one conversation: the tokens that were read and sampled, and those of a full
//! render of the same messages.

use crate::format::Reasoning;
use crate::renderer::Renderer;
use sinew_types::TokenId;

/// The smallest kind of difference between two token sequences, in ascending order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Likeness {
    /// The same tokens.
    Tokens,
    /// The same text in other tokens.
    Text,
    /// The same text but for the token that ends a turn, for which the history shows another one.
    Ending,
    /// The same text but for whitespace.
    Whitespace,
    /// The same text but for whitespace, and for reasoning and its marks.
    Reasoning,
    /// Other text.
    Other,
}

impl Likeness {
    /// Compares two token sequences.
    pub fn of(renderer: &dyn Renderer, one: &[TokenId], other: &[TokenId]) -> Self {
        if one == other {
            return Self::Tokens;
        }
        let text = |ids: &[TokenId]| renderer.decode_with_special(ids);
        let marks = renderer.turn_format().reasoning;
        let likeness = Self::of_texts(&text(one), &text(other), marks.as_ref());
        let Some(&closing) = renderer.closing_ids().first() else {
            return likeness;
        };
        if likeness == Self::Text {
            return likeness;
        }
        let closed = |ids: &[TokenId]| {
            let stops = renderer.stop_ids();
            let ids = ids.iter();
            let ids: Vec<_> = ids
                .map(|id| if stops.contains(id) { closing } else { *id })
                .collect();
            text(&ids)
        };
        match Self::of_texts(&closed(one), &closed(other), marks.as_ref()) {
            Self::Text => Self::Ending,
            other => other,
        }
    }

    /// Compares two texts.
    pub(crate) fn of_texts(one: &str, other: &str, marks: Option<&Reasoning>) -> Self {
        if one == other {
            return Self::Text;
        }
        if solid(one) == solid(other) {
            return Self::Whitespace;
        }
        let bare = |marks: &Reasoning| {
            let bare = |text: &str| solid(&without_reasoning(text, &marks.open, &marks.close));
            bare(one) == bare(other)
        };
        if marks.is_some_and(bare) {
            Self::Reasoning
        } else {
            Self::Other
        }
    }

    /// Whether the words are the same, so that sampled tokens can stand for those of the render.
    pub fn same_words(self) -> bool {
        self <= Self::Whitespace
    }
}

/// A text without whitespace.
fn solid(text: &str) -> String {
    text.split_whitespace().collect()
}

/// Removes reasoning with its markers from a text.
fn without_reasoning(text: &str, open: &str, close: &str) -> String {
    let mut out = String::new();
    let mut rest = text;
    while let Some(start) = rest.find(open) {
        let (before, after) = rest.split_at(start);
        out.push_str(before);
        let after = &after[open.len()..];
        // Reasoning ends before the next one starts.
        let next = after.find(open).unwrap_or(after.len());
        rest = match after[..next].find(close) {
            Some(end) => &after[end + close.len()..],
            None => after,
        };
    }
    out.push_str(rest);
    out.replace(close, "")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_smallest_difference_is_named() {
        let marks = Reasoning {
            open: "<think>".into(),
            close: "</think>".into(),
            opened_by_prompt: false,
        };
        let of = |one: &str, other: &str| Likeness::of_texts(one, other, Some(&marks));
        let whole = "q<think>\nso\n</think>\n\na";
        assert_eq!(of(whole, whole), Likeness::Text);
        assert_eq!(of(whole, "q<think>so</think>a"), Likeness::Whitespace);
        assert_eq!(of(whole, "q a"), Likeness::Reasoning);
        assert_eq!(of(whole, "q</think>a"), Likeness::Reasoning);
        assert_eq!(of(whole, "q b"), Likeness::Other);
        assert_eq!(Likeness::of_texts(whole, "q a", None), Likeness::Other);
        assert!(Likeness::Whitespace.same_words() && !Likeness::Reasoning.same_words());
    }
}
