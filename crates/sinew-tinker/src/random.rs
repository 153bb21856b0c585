//! Random names and keys.

/// `bytes` random bytes from the system's source, as hexadecimal digits.
///
/// # Errors
/// If the source fails.
pub(crate) fn random_hex(bytes: usize) -> Result<String, getrandom::Error> {
    let mut raw = vec![0; bytes];
    getrandom::fill(&mut raw)?;
    Ok(raw.iter().map(|byte| format!("{byte:02x}")).collect())
}
