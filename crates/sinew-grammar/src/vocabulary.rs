//! The model's tokens, as mask compilers need them.

use crate::GrammarError;
use sinew_types::TokenId;
use std::sync::Arc;

/// Encodes text with the model's tokenizer.
pub type Encode = Arc<dyn Fn(&str) -> Vec<TokenId> + Send + Sync>;

/// The tokens of a model.
#[derive(Clone)]
pub struct Vocabulary {
    /// Bytes by token id. `None` for unused ids, which are never allowed.
    pub tokens: Vec<Option<Box<[u8]>>>,
    /// Ids of control tokens. They are never text and are allowed only where a format names them.
    pub special: Vec<TokenId>,
    /// Id of the token that ends an output.
    pub end: TokenId,
    /// Columns of the model's logits, at least `tokens.len()`. Ids past `tokens` are never allowed.
    pub columns: usize,
    /// Tokenizer for text that a format forces.
    pub encode: Encode,
    /// Other data that determines the result of `encode`, such as `tokenizer.json`. Part of the environment
    /// hash.
    pub source: Vec<u8>,
}

sinew_types::debug_fields!(
    Vocabulary as this,
    tokens = this.tokens.len(),
    end = this.end,
    columns = this.columns
);

impl Vocabulary {
    /// Checks the sizes.
    ///
    /// # Errors
    /// Returns an error if there are more tokens than columns, or the end token has no bytes.
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

    /// Hash of the vocabulary and of the implementation's `settings`: all that masks depend on, except the
    /// format.
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
