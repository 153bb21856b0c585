//! Structured output: token masks that hold generated text to a format.
//! The sampler applies the masks. A trace records the format, and [`replay`] recomputes the same masks, so
//! that training uses the distribution that was sampled.
//!
//! [`Grammars`] starts a [`Matcher`] for a format. Before each token the matcher returns the allowed tokens.
//! [`GuidedGrammars`] compiles every format with `llguidance`. [`ListGrammars`] supports fixed texts only and
//! needs no compiler.
//!
//! Invariants:
//! - Masks depend on the format, the environment (vocabulary, end token, settings) and the tokens so far,
//!   not on time, other requests or caches.
//! - No mask is empty. If no text may follow, the mask allows only the end token.
//! - A case that a matcher cannot decide is an error, never a mask that allows every token.
//! - Formats whose compilation has no bound are refused before it.
//! - This crate reads no clock, file or network.

mod bounds;
mod cache;
mod error;
mod guided;
mod lark;
mod list;
mod mask;
mod replay;
mod vocabulary;

pub use error::{CompileError, GrammarError};
pub use guided::{GuidedGrammars, IMPLEMENTATION};
pub use list::ListGrammars;
pub use mask::Mask;
pub use replay::{ReplayError, replay};
pub use vocabulary::{Encode, Vocabulary};

use sinew_types::{Enforced, Format, FormatLaw, TokenId};
use std::fmt::Debug;
use std::sync::Arc;

/// Compiler of formats for one vocabulary.
pub trait Grammars: Send + Sync + Debug {
    /// Name and versions of the mask implementation. Traces record it, and replay compares it.
    fn implementation(&self) -> &str;

    /// BLAKE3 hash of the vocabulary, the end token and the settings: 64 hexadecimal digits.
    fn environment(&self) -> &str;

    /// Number of mask columns, equal to the columns of the model's logits.
    fn columns(&self) -> usize;

    /// Returns a matcher that is positioned before the first token.
    ///
    /// # Errors
    /// Returns an error if the format is invalid, unsupported or too large for the compiler's limits.
    fn start(&self, format: &Arc<Format>) -> Result<Box<dyn Matcher>, GrammarError>;

    /// Checks that the text of `tokens` belongs to the format's language. The tokenization does not matter.
    /// The last token can be the end token.
    ///
    /// # Errors
    /// Returns an error if the format is invalid, or the first position where the text violates it.
    fn check(&self, format: &Arc<Format>, tokens: &[TokenId]) -> Result<(), GrammarError>;

    /// The record that a trace keeps with tokens sampled under `format`.
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

/// State of one output: the tokens so far and the tokens allowed next.
pub trait Matcher: Send + Debug {
    /// The tokens allowed next. When the text is complete and cannot continue, only the end token is allowed.
    ///
    /// # Errors
    /// Returns an error at a limit, at a dead end, or after the end token.
    fn mask(&mut self) -> Result<Arc<Mask>, GrammarError>;

    /// Appends one token, which the current mask must allow.
    ///
    /// # Errors
    /// Returns an error if the mask forbids `token`, or at a limit. The matcher is then unusable.
    fn advance(&mut self, token: TokenId) -> Result<(), GrammarError>;

    /// True after the end token. No token may follow.
    fn ended(&self) -> bool;

    /// An independent copy.
    fn fork(&self) -> Box<dyn Matcher>;
}

/// BLAKE3 hash of a format as 64 hexadecimal digits. It covers the kind, every byte of the texts and the
/// settings.
pub fn format_hash(format: &Format) -> String {
    // Every field of a format is text, a list or a flag, so serialization does not fail. If it did, the hash
    // would match no recorded hash.
    let text = serde_json::to_vec(format).unwrap_or_default();
    blake3::hash(&text).to_hex().to_string()
}
