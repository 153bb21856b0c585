//! Random names.

use crate::random::random_hex;

/// 24 hexadecimal digits from the system's random source.
pub(super) fn nonce() -> Result<String, String> {
    random_hex(12).map_err(|e| format!("no randomness: {e}"))
}
