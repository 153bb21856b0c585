//! Arguments that the commands of `sinew env` share, as values.

use sinew_assembly::Failure;
use std::time::Duration;

/// Attributes of a class, of the argument `--options`.
///
/// # Errors
/// If it is not a JSON object.
pub(crate) fn options(text: &str) -> Result<serde_json::Map<String, serde_json::Value>, Failure> {
    sinew_types::json::from_str(text).map_err(|e| {
        Failure::input(format!(
            "--options {text}: {e}; expected an object, such as {{\"rooms\": 5}}"
        ))
    })
}

/// The value of a variable that an argument names.
pub(crate) fn key(name: Option<&String>) -> Result<Option<String>, Failure> {
    let read = |name: &String| {
        std::env::var(name).map_err(|_| Failure::input(format!("--key-env {name}: it is not set")))
    };
    name.map(read).transpose()
}

/// Seconds of an argument.
///
/// # Errors
/// If it is not 0.01 to 86400, or not a number.
pub(crate) fn seconds(name: &str, value: f64) -> Result<Duration, Failure> {
    if (0.01..=86_400.0).contains(&value) {
        Ok(Duration::from_secs_f64(value))
    } else {
        Err(Failure::input(format!(
            "{name} {value}: allowed: 0.01 to 86400"
        )))
    }
}
