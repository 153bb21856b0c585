//! Deserialization that refuses keys which nothing reads.

use serde::de::{DeserializeOwned, Deserializer, Error};
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// A field whose type may ignore unknown keys (serde's tagged enums do, in variants without
/// fields): what was read is written again, and a key that is then missing was not read.
pub(crate) fn strict<'de, D, T>(deserializer: D) -> Result<Option<T>, D::Error>
where
    D: Deserializer<'de>,
    T: DeserializeOwned + Serialize,
{
    let typed = Value::deserialize(deserializer)?;
    let value = T::deserialize(&typed).map_err(D::Error::custom)?;
    let read = serde_json::to_value(&value).map_err(D::Error::custom)?;
    if let (Value::Object(typed), Value::Object(read)) = (&typed, &read) {
        // A `null` for an option that was left out is written and not typed, never the reverse.
        let unread = typed.keys().find(|key| !read.contains_key(*key));
        if let Some(key) = unread {
            let known: Vec<&str> = read.keys().map(String::as_str).collect();
            return Err(D::Error::custom(format!(
                "unknown key `{key}`, allowed here: {}",
                known.join(", ")
            )));
        }
    }
    Ok(Some(value))
}
