//! Secrets: generated from the system's random source, stored as hashes, compared in constant time.

use crate::keys::hex;
use sinew_dialect::ApiError;
use std::fmt;

/// A secret that can be verified, but not read.
#[derive(Clone, Copy)]
pub struct Secret(blake3::Hash);

impl Secret {
    /// Stores the hash of `text`.
    pub fn new(text: &str) -> Self {
        Self(blake3::hash(text.as_bytes()))
    }

    /// Returns the hash in hexadecimal digits.
    pub(crate) fn hash_hex(&self) -> String {
        self.0.to_hex().to_string()
    }

    /// Returns half of the hash, which identifies the secret in a table.
    pub(crate) fn name(&self) -> [u8; 16] {
        let mut name = [0; 16];
        name.copy_from_slice(&self.0.as_bytes()[..16]);
        name
    }

    /// Restores a secret from its [`Secret::hash_hex`].
    pub(crate) fn from_hash_hex(digits: &str) -> Option<Self> {
        blake3::Hash::from_hex(digits).ok().map(Self)
    }

    /// Whether `text` is the secret. The comparison of hashes takes constant time.
    pub fn matches(&self, text: &str) -> bool {
        self.0 == blake3::hash(text.as_bytes())
    }

    /// Returns `bytes` random bytes as hexadecimal digits.
    ///
    /// # Errors
    /// If the system's random source fails.
    pub fn random_hex(bytes: usize) -> Result<String, ApiError> {
        let mut buffer = vec![0u8; bytes];
        fill(&mut buffer)?;
        Ok(hex(&buffer))
    }

    /// Returns a random trace id.
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
