//! Random names and keys, and seeds that follow from names.

/// `bytes` random bytes from the system's source, as hexadecimal digits.
pub(crate) fn random_hex(bytes: usize) -> Result<String, getrandom::Error> {
    let mut raw = vec![0; bytes];
    getrandom::fill(&mut raw)?;
    Ok(raw.iter().map(|byte| format!("{byte:02x}")).collect())
}

/// A random name: 24 hexadecimal digits.
pub(crate) fn nonce() -> Result<String, String> {
    random_hex(12).map_err(|e| format!("no randomness: {e}"))
}

/// The seed of a name: the same each time.
pub(crate) fn seed_of(name: &str) -> u64 {
    let hash = blake3::hash(name.as_bytes());
    let mut first = [0; 8];
    first.copy_from_slice(&hash.as_bytes()[..8]);
    u64::from_le_bytes(first)
}
