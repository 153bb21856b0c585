//! A model's turn taken apart: its reasoning, its answer, and in the answer code, JSON, a number, a choice.
//!
//! Every reader of a model's text uses these functions, so that all rewards, judges and environments agree on
//! what the answer is.
//!
//! | function | from | to |
//! |---|---|---|
//! | [`Turn::split`] | the text of a turn | reasoning and answer |
//! | [`stated`] | an answer | the part that it states as its result: a box, a tag, a phrase |
//! | [`number()`] | an answer | its number, exactly |
//! | [`choice()`] | an answer | the option that it takes |
//! | [`code()`] | an answer | its code, by the names that are needed |
//! | [`json`] | an answer | JSON, alone or in a fenced block |
//!
//! Invariants:
//! - Everything is a function of the text: no clock, no randomness, no state.
//! - An unfinished thought has no answer.
//! - Digits, signs and letters of all scripts count by their meaning in Unicode.
//! - A text with two readings is never decided silently: both readings are returned.
//! - The time is linear in the text, except for limits that are constants here.

mod blocks;
mod choice;
mod code;
mod measure;
mod notation;
mod number;
mod stated;
mod turn;

pub use blocks::{Block, blocks, json};
pub use choice::{Choice, choice, option};
pub use code::{Code, code};
pub use measure::{citations, is_tags, repeated};
pub use notation::improper;
pub use number::{Comparison, Number, compare, expected_number, number};
pub use stated::{Mark, Stated, stated};
pub use turn::{Turn, has_channels, is_thought_mark};

use regex::Regex;
use std::sync::LazyLock;

/// A pattern that is compiled at its first use.
struct Pattern(LazyLock<Option<Regex>>);

impl Pattern {
    const fn new(make: fn() -> Option<Regex>) -> Self {
        Self(LazyLock::new(make))
    }

    /// The pattern. The patterns of this crate are constants, which a test compiles.
    fn get(&self) -> Option<&Regex> {
        self.0.as_ref()
    }

    fn is_match(&self, text: &str) -> bool {
        self.get().is_some_and(|p| p.is_match(text))
    }

    /// The first match with its groups.
    fn captures<'t>(&self, text: &'t str) -> Option<regex::Captures<'t>> {
        self.get()?.captures(text)
    }

    fn all<'p, 't: 'p>(
        &'p self,
        text: &'t str,
    ) -> impl Iterator<Item = regex::Captures<'t>> + use<'p, 't> {
        self.get()
            .into_iter()
            .flat_map(move |p| p.captures_iter(text))
    }
}

/// A pattern as a constant.
macro_rules! pattern {
    ($name:ident, $text:expr) => {
        static $name: crate::Pattern = crate::Pattern::new(|| regex::Regex::new($text).ok());
    };
}
use pattern;
