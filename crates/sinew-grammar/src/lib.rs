//! Output formats as masks over the vocabulary: made while tokens are sampled, and made again from what a
//! trace records, so that training is of the distribution that was sampled.
//!
//! [`Grammars`] starts a [`Matcher`] for a format; the matcher says before each token which ones may come.
//! [`GuidedGrammars`] compiles every format with `llguidance`; [`ListGrammars`] knows fixed texts only, in a
//! few lines that need no compiler. [`replay`] makes the masks of a node of a trace again.
//!
//! Invariants:
//! - The masks depend on the format, the environment (vocabulary, end, settings) and the tokens so far: not
//!   on when they are asked for, on other requests or on caches.
//! - No mask is empty: where nothing may follow, the end token alone may.
//! - What a matcher cannot decide is an error, never a mask that allows all.
//! - Nothing here reads a clock, a file or the network.

mod cache;
mod error;
mod guided;
mod lark;
mod list;
mod mask;
mod replay;
mod vocabulary;

pub use error::GrammarError;
pub use guided::{GuidedGrammars, IMPLEMENTATION};
pub use list::ListGrammars;
pub use mask::Mask;
pub use replay::{ReplayError, replay};
pub use vocabulary::{Encode, Vocabulary};

use sinew_types::{Enforced, Format, FormatLaw, TokenId};
use std::fmt::Debug;
use std::sync::Arc;

/// Makes matchers for formats, for one vocabulary.
pub trait Grammars: Send + Sync + Debug {
    /// What makes the masks, with the versions that decide their meaning.
    fn implementation(&self) -> &str;

    /// Hash of the vocabulary, the end token and the settings, in hexadecimal digits.
    fn environment(&self) -> &str;

    /// Columns of a mask: one more than the largest token id of the model.
    fn columns(&self) -> usize;

    /// A matcher before the first token.
    ///
    /// # Errors
    /// What is wrong with the format, or that it needs more work than the limits allow.
    fn start(&self, format: &Arc<Format>) -> Result<Box<dyn Matcher>, GrammarError>;

    /// Whether the text of these tokens is in the format's language, however it is cut; an end token may come last.
    ///
    /// # Errors
    /// What is wrong with the format, or where the text leaves it.
    fn check(&self, format: &Arc<Format>, tokens: &[TokenId]) -> Result<(), GrammarError>;

    /// What is recorded with tokens that are held to `format`.
    fn law(&self, format: &Arc<Format>) -> FormatLaw {
        FormatLaw {
            format: Arc::clone(format),
            enforced: Enforced::Masks {
                implementation: self.implementation().to_owned(),
                environment: self.environment().to_owned(),
                format: format_hash(format),
            },
        }
    }
}

/// Follows one output.
pub trait Matcher: Send + Debug {
    /// The tokens that may come next; once the text is complete and nothing may follow, the end alone.
    ///
    /// # Errors
    /// A limit, a dead end, or that the output has ended.
    fn mask(&mut self) -> Result<Arc<Mask>, GrammarError>;

    /// Goes on with a token of the mask.
    ///
    /// # Errors
    /// If the mask bars it, or a limit is reached.
    fn advance(&mut self, token: TokenId) -> Result<(), GrammarError>;

    /// Whether the end token has come: nothing may follow.
    fn ended(&self) -> bool;

    /// An independent copy.
    fn fork(&self) -> Box<dyn Matcher>;
}

/// Hash of a format, in hexadecimal digits: of its kind, its texts to the byte and its settings.
pub fn format_hash(format: &Format) -> String {
    // Every field of a format is text, a list or a flag, so that this does not fail; one that did would be
    // equal to no other hash.
    let text = serde_json::to_vec(format).unwrap_or_default();
    blake3::hash(&text).to_hex().to_string()
}
