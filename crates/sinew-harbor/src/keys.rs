//! Tables of `task.toml`, whose keys are taken out one by one: a wrong value is an error with file and key,
//! and the keys that nobody took are known at the end.

use crate::error::HarborError;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use toml::Value;

type Read<T> = Result<T, HarborError>;

/// Maximum seconds of a timeout: a week.
const MAX_SECONDS: f64 = 604_800.0;

/// One table.
#[derive(Debug)]
pub(crate) struct Keys {
    file: PathBuf,
    /// Path of the table with a dot at its end; empty for the root.
    path: String,
    table: toml::Table,
}

impl Keys {
    /// Parses a file's text.
    pub(crate) fn parse(file: &Path, text: &str) -> Read<Self> {
        let table = text.parse::<toml::Table>().map_err(|e| {
            let before = e.span().map_or("", |s| &text[..s.start.min(text.len())]);
            HarborError::Format {
                path: file.into(),
                reason: format!("line {}: {}", before.lines().count().max(1), e.message()),
            }
        })?;
        Ok(Self {
            file: file.into(),
            path: String::new(),
            table,
        })
    }

    /// The error of a key.
    pub(crate) fn wrong(&self, key: &str, value: impl ToString, allowed: &str) -> HarborError {
        HarborError::Key {
            path: self.file.clone(),
            key: format!("{}{key}", self.path),
            value: value.to_string(),
            allowed: allowed.into(),
        }
    }

    /// Takes any value.
    pub(crate) fn any(&mut self, key: &str) -> Option<Value> {
        self.table.remove(key)
    }

    /// Takes a text.
    pub(crate) fn text(&mut self, key: &str) -> Read<Option<String>> {
        match self.any(key) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(other) => Err(self.wrong(key, other, "text")),
        }
    }

    /// Takes a text that is not empty, or the error that it is missing.
    pub(crate) fn required(&mut self, key: &str) -> Read<String> {
        match self.text(key)? {
            Some(text) if !text.is_empty() => Ok(text),
            _ => Err(self.wrong(key, "missing", "text that is not empty")),
        }
    }

    /// Takes one of several words.
    pub(crate) fn word<T: Copy>(&mut self, key: &str, words: &[(&str, T)]) -> Read<Option<T>> {
        let Some(text) = self.text(key)? else {
            return Ok(None);
        };
        let found = words
            .iter()
            .find(|(word, _)| word.eq_ignore_ascii_case(&text));
        match found {
            Some((_, value)) => Ok(Some(*value)),
            None => {
                let words: Vec<&str> = words.iter().map(|(word, _)| *word).collect();
                Err(self.wrong(key, format!("{text:?}"), &words.join(", ")))
            }
        }
    }

    /// Takes a finite number of at least 0.
    pub(crate) fn number(&mut self, key: &str) -> Read<Option<f64>> {
        let value = match self.any(key) {
            None => return Ok(None),
            Some(Value::Integer(value)) => value as f64,
            Some(Value::Float(value)) => value,
            Some(other) => return Err(self.wrong(key, other, "a number")),
        };
        if value.is_finite() && value >= 0.0 {
            Ok(Some(value))
        } else {
            Err(self.wrong(key, value, "a number of at least 0"))
        }
    }

    /// Takes a number above 0.
    pub(crate) fn positive(&mut self, key: &str) -> Read<Option<f64>> {
        match self.number(key)? {
            Some(0.0) => Err(self.wrong(key, 0, "a number above 0")),
            other => Ok(other),
        }
    }

    /// Takes a duration in seconds, above 0 and at most a week.
    pub(crate) fn seconds(&mut self, key: &str) -> Read<Option<f64>> {
        match self.positive(key)? {
            Some(value) if value > MAX_SECONDS => {
                Err(self.wrong(key, value, "seconds, at most a week (604800)"))
            }
            other => Ok(other),
        }
    }

    /// Takes a whole number of at least 0.
    pub(crate) fn count(&mut self, key: &str) -> Read<Option<u64>> {
        match self.any(key) {
            None => Ok(None),
            Some(Value::Integer(value)) => match u64::try_from(value) {
                Ok(count) => Ok(Some(count)),
                Err(_) => Err(self.wrong(key, value, "a whole number of at least 0")),
            },
            Some(other) => Err(self.wrong(key, other, "a whole number of at least 0")),
        }
    }

    /// Takes a truth value.
    pub(crate) fn flag(&mut self, key: &str) -> Read<Option<bool>> {
        match self.any(key) {
            None => Ok(None),
            Some(Value::Boolean(value)) => Ok(Some(value)),
            Some(other) => Err(self.wrong(key, other, "true or false")),
        }
    }

    /// Takes a list of texts.
    pub(crate) fn texts(&mut self, key: &str) -> Read<Option<Vec<String>>> {
        let list = match self.any(key) {
            None => return Ok(None),
            Some(Value::Array(list)) => list,
            Some(other) => return Err(self.wrong(key, other, "a list of texts")),
        };
        let text = |value: Value| match value {
            Value::String(text) => Ok(text),
            other => Err(self.wrong(key, other, "a list of texts")),
        };
        list.into_iter().map(text).collect::<Read<_>>().map(Some)
    }

    /// Takes a user: a name or a number.
    pub(crate) fn user(&mut self, key: &str) -> Read<Option<String>> {
        match self.any(key) {
            None => Ok(None),
            Some(Value::String(name)) if !name.is_empty() => Ok(Some(name)),
            Some(Value::Integer(id)) if id >= 0 => Ok(Some(id.to_string())),
            Some(other) => Err(self.wrong(key, other, "the name or number of a user")),
        }
    }

    /// Takes a table of variables.
    pub(crate) fn variables(&mut self, key: &str) -> Read<BTreeMap<String, String>> {
        let table = match self.any(key) {
            None => return Ok(BTreeMap::new()),
            Some(Value::Table(table)) => table,
            Some(other) => return Err(self.wrong(key, other, "a table of texts")),
        };
        let one = |(name, value): (String, Value)| match value {
            Value::String(text) if !name.contains(['=', '\0']) => Ok((name, text)),
            other => Err(self.wrong(&format!("{key}.{name}"), other, "text")),
        };
        table.into_iter().map(one).collect()
    }

    /// Takes a table.
    pub(crate) fn table(&mut self, key: &str) -> Read<Option<Self>> {
        match self.any(key) {
            None => Ok(None),
            Some(Value::Table(table)) => Ok(Some(self.below(key, table))),
            Some(other) => Err(self.wrong(key, other, "a table")),
        }
    }

    /// Takes a list of tables.
    pub(crate) fn tables(&mut self, key: &str) -> Read<Vec<Self>> {
        let list = match self.any(key) {
            None => return Ok(Vec::new()),
            Some(Value::Array(list)) => list,
            Some(other) => return Err(self.wrong(key, other, "a list of tables")),
        };
        let table = |(at, value): (usize, Value)| match value {
            Value::Table(table) => Ok(self.below(&format!("{key}[{at}]"), table)),
            other => Err(self.wrong(key, other, "a list of tables")),
        };
        list.into_iter().enumerate().map(table).collect()
    }

    /// A table below this one.
    pub(crate) fn below(&self, key: &str, table: toml::Table) -> Self {
        Self {
            file: self.file.clone(),
            path: format!("{}{key}.", self.path),
            table,
        }
    }

    /// Adds the paths of the keys that nobody took.
    pub(crate) fn rest(self, unknown: &mut Vec<String>) {
        let keys = self.table.keys();
        unknown.extend(keys.map(|key| format!("{}{key}", self.path)));
    }
}
