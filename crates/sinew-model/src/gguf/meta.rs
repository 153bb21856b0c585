//! Typed metadata of a GGUF, with the tokenizer's parts by name.
//!
//! Every accessor returns `Ok(None)` (or an error for `need_…`) when the key is absent, and an
//! error that names the key, the value and the expected type when it is of another type.

use crate::config::ConfigError;
use sinew_types::TokenId;
use std::collections::BTreeMap;

/// A metadata value; integers of all widths become 64-bit.
#[derive(Clone, Debug, PartialEq)]
pub enum GgufValue {
    Uint(u64),
    Int(i64),
    Float(f64),
    Bool(bool),
    String(String),
    Array(GgufArray),
}

/// An array of one element type; flags are 0 and 1.
#[derive(Clone, Debug, PartialEq)]
pub enum GgufArray {
    Ints(Vec<i64>),
    Floats(Vec<f64>),
    Strings(Vec<String>),
}

/// All metadata of a file.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GgufMetadata {
    values: BTreeMap<String, GgufValue>,
}

impl GgufValue {
    /// The value as an error shows it: arrays and long texts are cut.
    fn show(&self) -> String {
        match self {
            Self::Uint(v) => v.to_string(),
            Self::Int(v) => v.to_string(),
            Self::Float(v) => v.to_string(),
            Self::Bool(v) => v.to_string(),
            Self::String(v) => format!("\"{}\"", v.chars().take(40).collect::<String>()),
            Self::Array(GgufArray::Ints(v)) => format!("an array of {} integers", v.len()),
            Self::Array(GgufArray::Floats(v)) => format!("an array of {} numbers", v.len()),
            Self::Array(GgufArray::Strings(v)) => format!("an array of {} strings", v.len()),
        }
    }
}

/// Largest value accepted for a size, as for `config.json`.
const MAX_SIZE: u64 = 1 << 24;

impl GgufMetadata {
    /// Metadata from its values, as a file or a test has them.
    pub fn new(values: BTreeMap<String, GgufValue>) -> Self {
        Self { values }
    }

    /// The value of `key`.
    pub fn get(&self, key: &str) -> Option<&GgufValue> {
        self.values.get(key)
    }

    /// All keys and values in order.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &GgufValue)> {
        self.values.iter().map(|(key, value)| (key.as_str(), value))
    }

    /// The error of a key with another value than `expected`.
    fn bad(&self, key: &str, expected: &str) -> ConfigError {
        ConfigError::Field {
            source_kind: super::KIND,
            field: key.to_owned(),
            found: self
                .get(key)
                .map_or_else(|| "missing".to_owned(), GgufValue::show),
            expected: expected.to_owned(),
        }
    }

    /// The value of a key that must be there.
    fn need<T>(&self, key: &str, value: Option<T>) -> Result<T, ConfigError> {
        value.ok_or_else(|| ConfigError::Missing {
            source_kind: super::KIND,
            field: key.to_owned(),
        })
    }

    /// Returns a text, if the key exists.
    pub fn str(&self, key: &str) -> Result<Option<&str>, ConfigError> {
        match self.get(key) {
            None => Ok(None),
            Some(GgufValue::String(text)) => Ok(Some(text)),
            Some(_) => Err(self.bad(key, "a string")),
        }
    }

    /// A text that must be there.
    pub fn need_str(&self, key: &str) -> Result<&str, ConfigError> {
        self.need(key, self.str(key)?)
    }

    /// Returns a whole number of at least 0, if the key exists.
    pub fn uint(&self, key: &str) -> Result<Option<u64>, ConfigError> {
        match self.get(key) {
            None => Ok(None),
            Some(GgufValue::Uint(v)) => Ok(Some(*v)),
            Some(GgufValue::Int(v)) if *v >= 0 => Ok(Some(*v as u64)),
            Some(_) => Err(self.bad(key, "an integer from 0")),
        }
    }

    /// A size from 1 to 2^24. An array (one entry for each layer) is accepted when its entries are
    /// equal.
    pub fn size(&self, key: &str) -> Result<Option<usize>, ConfigError> {
        let expected = "an integer from 1 to 16777216, equal in all layers";
        let value = match self.get(key) {
            Some(GgufValue::Array(GgufArray::Ints(list))) => {
                let first = list
                    .first()
                    .filter(|first| list.iter().all(|v| v == *first));
                Some(first.and_then(|v| u64::try_from(*v).ok()).unwrap_or(0))
            }
            _ => self.uint(key)?,
        };
        match value {
            None => Ok(None),
            Some(size @ 1..=MAX_SIZE) => Ok(Some(size as usize)),
            Some(_) => Err(self.bad(key, expected)),
        }
    }

    /// A size that must be there.
    pub fn need_size(&self, key: &str) -> Result<usize, ConfigError> {
        self.need(key, self.size(key)?)
    }

    /// Returns a number above 0, if the key exists.
    pub fn positive(&self, key: &str) -> Result<Option<f32>, ConfigError> {
        match self.get(key) {
            None => Ok(None),
            Some(GgufValue::Float(v)) if v.is_finite() && *v as f32 > 0.0 => Ok(Some(*v as f32)),
            Some(_) => Err(self.bad(key, "a positive number")),
        }
    }

    /// A number above 0 that must be there.
    pub fn need_positive(&self, key: &str) -> Result<f32, ConfigError> {
        self.need(key, self.positive(key)?)
    }

    /// Returns a list of texts, if the key exists.
    pub fn strings(&self, key: &str) -> Result<Option<&[String]>, ConfigError> {
        match self.get(key) {
            None => Ok(None),
            Some(GgufValue::Array(GgufArray::Strings(list))) => Ok(Some(list)),
            Some(_) => Err(self.bad(key, "an array of strings")),
        }
    }

    /// Returns a list of integers, if the key exists.
    pub fn ints(&self, key: &str) -> Result<Option<&[i64]>, ConfigError> {
        match self.get(key) {
            None => Ok(None),
            Some(GgufValue::Array(GgufArray::Ints(list))) => Ok(Some(list)),
            Some(_) => Err(self.bad(key, "an array of integers")),
        }
    }

    /// Kind of tokenizer: `gpt2` (byte-level BPE), `llama` (SentencePiece) and others.
    pub fn tokenizer_model(&self) -> Result<&str, ConfigError> {
        self.need_str("tokenizer.ggml.model")
    }

    /// Name of the rule that splits text before merging, such as `smollm` or `qwen2`.
    pub fn pre_tokenizer(&self) -> Result<Option<&str>, ConfigError> {
        self.str("tokenizer.ggml.pre")
    }

    /// Text of each token, in the byte-to-unicode spelling of the tokenizer.
    pub fn tokens(&self) -> Result<&[String], ConfigError> {
        let key = "tokenizer.ggml.tokens";
        self.need(key, self.strings(key)?)
    }

    /// Merges in order of rank, each `"left right"`; empty where the tokenizer has none.
    pub fn merges(&self) -> Result<&[String], ConfigError> {
        Ok(self.strings("tokenizer.ggml.merges")?.unwrap_or_default())
    }

    /// Kind of each token: 1 normal, 2 unknown, 3 control, 4 user defined, 5 unused, 6 byte.
    pub fn token_types(&self) -> Result<Option<&[i64]>, ConfigError> {
        self.ints("tokenizer.ggml.token_type")
    }

    /// The chat template (Jinja).
    pub fn chat_template(&self) -> Result<Option<&str>, ConfigError> {
        self.str("tokenizer.chat_template")
    }

    /// A special token by role: `bos`, `eos`, `eot`, `unknown`, `padding`, `separator`.
    pub fn token_id(&self, role: &str) -> Result<Option<TokenId>, ConfigError> {
        let key = format!("tokenizer.ggml.{role}_token_id");
        match self.uint(&key)? {
            None => Ok(None),
            Some(id) => match TokenId::try_from(id) {
                Ok(id) => Ok(Some(id)),
                Err(_) => Err(self.bad(&key, "a token id below 2^32")),
            },
        }
    }
}
