//! Deserialization that refuses unknown keys at any depth.

use serde::de::{DeserializeOwned, Deserializer, Error};
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// Deserializes a field whose type may ignore unknown keys, as serde's tagged enums do in variants without
/// fields. The value is serialized again, and a key that is then missing was unknown.
pub(crate) fn strict<'de, D, T>(deserializer: D) -> Result<Option<T>, D::Error>
where
    D: Deserializer<'de>,
    T: DeserializeOwned + Serialize,
{
    let typed = Value::deserialize(deserializer)?;
    let value = T::deserialize(&typed).map_err(D::Error::custom)?;
    let read = serde_json::to_value(&value).map_err(D::Error::custom)?;
    match unread(&typed, &read) {
        Some((key, known)) => Err(D::Error::custom(format!(
            "unknown key `{key}`, allowed here: {}",
            known.join(", ")
        ))),
        None => Ok(Some(value)),
    }
}

/// The first key of `typed` that `read` does not have, at any depth, and the keys of `read` at that place. A
/// `null` for a missing option occurs in `read` only.
fn unread<'a>(typed: &'a Value, read: &'a Value) -> Option<(&'a str, Vec<String>)> {
    let (Value::Object(typed), Value::Object(read)) = (typed, read) else {
        return None;
    };
    let known = || read.keys().map(|key| format!("`{key}`")).collect();
    typed.iter().find_map(|(key, typed)| match read.get(key) {
        Some(read) => unread(typed, read),
        None => Some((key.as_str(), known())),
    })
}
