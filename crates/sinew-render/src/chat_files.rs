//! Fields of the files of a model folder that a conversation format is read from.

use crate::error::RenderError;
use serde_json::Value;
use sinew_types::TokenId;
use std::path::Path;

pub(crate) fn read(path: &Path) -> Result<Vec<u8>, RenderError> {
    std::fs::read(path).map_err(|e| RenderError::Read {
        path: path.to_owned(),
        message: e.to_string(),
    })
}

pub(crate) fn read_json(path: &Path) -> Result<Value, RenderError> {
    serde_json::from_slice(&read(path)?).map_err(|e| RenderError::Read {
        path: path.to_owned(),
        message: e.to_string(),
    })
}

/// Parses a template: a text, or a list of named templates with `default`.
pub(crate) fn template_of(value: &Value) -> Option<String> {
    match value {
        Value::String(text) => Some(text.clone()),
        Value::Array(named) => named
            .iter()
            .find(|entry| entry["name"] == "default")
            .and_then(|entry| entry["template"].as_str())
            .map(str::to_owned),
        _ => None,
    }
}

/// A token is a text, or an object with `content`.
pub(crate) fn token_text(value: &Value) -> String {
    value
        .as_str()
        .or_else(|| value["content"].as_str())
        .unwrap_or_default()
        .to_owned()
}

/// One id or several.
pub(crate) fn eos_ids(value: &Value) -> Vec<TokenId> {
    let id = |v: &Value| v.as_u64().and_then(|id| TokenId::try_from(id).ok());
    match value {
        Value::Array(ids) => ids.iter().filter_map(id).collect(),
        one => id(one).into_iter().collect(),
    }
}
