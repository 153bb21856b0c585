//! Secrets: made from the system's randomness, kept as hashes, compared in constant time.

use crate::keys::hex;
use sinew_dialect::ApiError;
use std::fmt;

/// A secret that can be recognized, but not read.
#[derive(Clone, Copy)]
pub struct Secret(blake3::Hash);

impl Secret {
    /// Remembers `text`.
    pub fn new(text: &str) -> Self {
        Self(blake3::hash(text.as_bytes()))
    }

    /// Its hash, as hexadecimal digits.
    pub(crate) fn hash_hex(&self) -> String {
        self.0.to_hex().to_string()
    }

    /// Half of what is remembered: it names the secret in a table.
    pub(crate) fn name(&self) -> [u8; 16] {
        let mut name = [0; 16];
        name.copy_from_slice(&self.0.as_bytes()[..16]);
        name
    }

    /// A secret whose [`Secret::hash_hex`] is known.
    pub(crate) fn from_hash_hex(digits: &str) -> Option<Self> {
        blake3::Hash::from_hex(digits).ok().map(Self)
    }

    /// Whether `text` is the secret. Comparing hashes takes the same time for all of them.
    pub fn matches(&self, text: &str) -> bool {
        self.0 == blake3::hash(text.as_bytes())
    }

    /// So many random bytes as hexadecimal digits.
    ///
    /// # Errors
    /// If the system has no randomness to give.
    pub fn random_hex(bytes: usize) -> Result<String, ApiError> {
        let mut buffer = vec![0u8; bytes];
        fill(&mut buffer)?;
        Ok(hex(&buffer))
    }

    /// A random trace id.
    ///
    /// # Errors
    /// Same as [`Secret::random_hex`].
    pub(crate) fn random_id() -> Result<[u8; 16], ApiError> {
        let mut id = [0; 16];
        fill(&mut id)?;
        Ok(id)
    }
}

fn fill(buffer: &mut [u8]) -> Result<(), ApiError> {
    getrandom::fill(buffer)
        .map_err(|e| ApiError::server("no_randomness", format!("no randomness: {e}")))
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}
