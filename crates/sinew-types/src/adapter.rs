//! LoRA adapters that engines hold next to their own weights, and their names.

use crate::weights::TensorSource;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

/// LoRA adapters for an engine: tensors under PEFT's names; rank and targets follow from names and shapes.
#[derive(Clone)]
pub struct Adapter {
    /// The product of both matrices is scaled by `alpha / rank`.
    pub alpha: f32,
    /// `base_model.model.PATH.lora_A.weight` `[rank, in]` and `lora_B` `[out, rank]` of each adapted matrix.
    pub tensors: Arc<dyn TensorSource>,
}

impl fmt::Debug for Adapter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Adapter")
            .field("alpha", &self.alpha)
            .field("tensors", &self.tensors)
            .finish()
    }
}

/// Name of an adapter at an engine: 1 to 128 characters of `A-Z`, `a-z`, `0-9`, `.`, `_`, `:` and `-`.
///
/// Engines put it into paths of URLs, names of folders and names of models: other characters would need
/// quotes in one of them, and `.` and `..` are not names of folders.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct AdapterName(Arc<str>);

/// A text that cannot name an adapter.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "adapter name {text:?} is not allowed: use 1 to {} letters, digits, `.`, `_`, `:` or `-`, not only dots",
    AdapterName::MAX_LEN
)]
pub struct AdapterNameError {
    /// The text, cut after some characters if it is too long.
    pub text: String,
}

impl AdapterName {
    /// Maximum length in bytes.
    pub const MAX_LEN: usize = 128;

    /// The name made from a text.
    ///
    /// # Errors
    /// If the text is empty, too long, has another character, or only dots.
    pub fn new(text: &str) -> Result<Self, AdapterNameError> {
        let allowed = |b: u8| b.is_ascii_alphanumeric() || b"._:-".contains(&b);
        let only_dots = text.bytes().all(|b| b == b'.');
        if text.len() <= Self::MAX_LEN && text.bytes().all(allowed) && !only_dots {
            return Ok(Self(text.into()));
        }
        Err(AdapterNameError {
            text: text.chars().take(Self::MAX_LEN + 1).collect(),
        })
    }

    /// The name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for AdapterName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl FromStr for AdapterName {
    type Err = AdapterNameError;

    fn from_str(text: &str) -> Result<Self, AdapterNameError> {
        Self::new(text)
    }
}

impl TryFrom<String> for AdapterName {
    type Error = AdapterNameError;

    fn try_from(text: String) -> Result<Self, AdapterNameError> {
        Self::new(&text)
    }
}

impl From<AdapterName> for String {
    fn from(name: AdapterName) -> Self {
        name.as_str().to_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::weights::TensorList;

    #[test]
    fn names_have_a_length_and_an_alphabet() {
        let longest = "a".repeat(128);
        for text in ["a", "model:train:0-v12", "A_b.9", longest.as_str()] {
            let name = AdapterName::new(text).unwrap();
            assert_eq!((name.as_str(), name.to_string().as_str()), (text, text));
            let json = serde_json::to_string(&name).unwrap();
            assert_eq!(json, format!("{text:?}"));
            assert_eq!(serde_json::from_str::<AdapterName>(&json).unwrap(), name);
        }
        let long = "a".repeat(1000);
        for text in ["", "a/b", "a b", "ä", "a\n", ".", "..", long.as_str()] {
            let error = text.parse::<AdapterName>().unwrap_err().to_string();
            assert!(error.contains("1 to 128 letters"), "{error}");
            assert!(error.len() < 300, "{error}");
            let json = serde_json::to_string(text).unwrap();
            assert!(serde_json::from_str::<AdapterName>(&json).is_err());
        }
    }

    #[test]
    fn adapters_print_their_size_and_not_their_values() {
        let adapter = Adapter {
            alpha: 16.0,
            tensors: Arc::new(TensorList::default()),
        };
        let text = format!("{:?}", adapter.clone());
        assert_eq!(
            text,
            "Adapter { alpha: 16.0, tensors: TensorSource { tensors: 0, .. } }"
        );
    }
}
