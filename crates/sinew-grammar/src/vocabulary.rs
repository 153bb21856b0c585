//! What masks are over.

use crate::GrammarError;
use sinew_types::TokenId;
use std::fmt;
use std::sync::Arc;

/// The usual tokens of a text, as the model's tokenizer gives them.
pub type Encode = Arc<dyn Fn(&str) -> Vec<TokenId> + Send + Sync>;

/// The tokens of a model.
#[derive(Clone)]
pub struct Vocabulary {
    /// Bytes of each id; none for holes, which are never allowed.
    pub tokens: Vec<Option<Box<[u8]>>>,
    /// Control tokens by id: never part of text, allowed only where a format names them.
    pub special: Vec<TokenId>,
    /// Ends an output.
    pub end: TokenId,
    /// Columns of the model's logits: at least as many as `tokens`, the rest is never allowed.
    pub columns: usize,
    /// How text is cut into tokens where a format leaves no choice about it.
    pub encode: Encode,
    /// Whatever else decides what `encode` gives (a `tokenizer.json`): part of the environment's hash.
    pub source: Vec<u8>,
}

impl fmt::Debug for Vocabulary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Vocabulary")
            .field("tokens", &self.tokens.len())
            .field("end", &self.end)
            .field("columns", &self.columns)
            .finish_non_exhaustive()
    }
}

impl Vocabulary {
    /// Checks sizes.
    ///
    /// # Errors
    /// What does not fit.
    pub(crate) fn validate(&self) -> Result<(), GrammarError> {
        let wrong = |why: String| Err(GrammarError::Vocabulary(why));
        if self.columns < self.tokens.len() {
            let (columns, tokens) = (self.columns, self.tokens.len());
            return wrong(format!("{tokens} tokens do not fit {columns} columns"));
        }
        if self.end as usize >= self.tokens.len() {
            return wrong(format!("the end token {} has no bytes", self.end));
        }
        Ok(())
    }

    /// Hash of all that masks depend on but the format; `settings` are those of the implementation.
    pub(crate) fn hash(&self, settings: &str) -> String {
        let mut hasher = blake3::Hasher::new();
        let mut field = |bytes: &[u8]| {
            hasher.update(&(bytes.len() as u64).to_le_bytes());
            hasher.update(bytes);
        };
        field(settings.as_bytes());
        field(&(self.columns as u64).to_le_bytes());
        field(&self.end.to_le_bytes());
        field(&(self.tokens.len() as u64).to_le_bytes());
        for token in &self.tokens {
            field(&[u8::from(token.is_some())]);
            field(token.as_deref().unwrap_or(&[]));
        }
        for id in &self.special {
            field(&id.to_le_bytes());
        }
        field(&self.source);
        hasher.finalize().to_hex().to_string()
    }
}
