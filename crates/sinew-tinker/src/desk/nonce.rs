//! Random names.

use std::fmt::Write as _;

/// 24 hexadecimal digits from the system's random source.
///
/// # Errors
/// If the source fails, in words.
pub(super) fn nonce() -> Result<String, String> {
    let mut bytes = [0u8; 12];
    getrandom::fill(&mut bytes).map_err(|e| format!("no randomness: {e}"))?;
    Ok(bytes
        .iter()
        .fold(String::with_capacity(24), |mut text, byte| {
            let _ = write!(text, "{byte:02x}");
            text
        }))
}
