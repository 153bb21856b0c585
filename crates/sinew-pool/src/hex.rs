//! Hexadecimal digits of hashes and ids.

/// Two lower-case digits for each byte.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}
