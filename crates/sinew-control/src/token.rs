//! The token that every call must bring, kept as a hash.

use crate::error::ControlError;
use std::fmt;
use std::fs::File;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// Minimum bytes of a token. Generated ones have 64 hexadecimal digits.
pub const MIN_TOKEN_BYTES: usize = 16;
/// Random bytes of a generated token.
const RANDOM_BYTES: usize = 32;

/// A token that a server knows. It can be compared, and not read.
#[derive(Clone)]
pub struct Token(blake3::Hash);

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token")
    }
}

impl Token {
    /// The token with this text.
    ///
    /// # Errors
    /// If it is shorter than [`MIN_TOKEN_BYTES`], or has other than printable characters.
    pub fn new(text: &str) -> Result<Self, ControlError> {
        if text.len() < MIN_TOKEN_BYTES || !text.bytes().all(|b| b.is_ascii_graphic()) {
            let allowed = format!("at least {MIN_TOKEN_BYTES} printable characters without spaces");
            return Err(ControlError::field("the token", "(hidden)", allowed));
        }
        Ok(Self(blake3::hash(text.as_bytes())))
    }

    /// Whether a header `authorization` brings this token. The comparison of hashes takes constant time.
    pub fn is_in(&self, header: Option<&str>) -> bool {
        let given = header.and_then(|value| value.strip_prefix("Bearer "));
        given.is_some_and(|text| blake3::hash(text.trim().as_bytes()) == self.0)
    }
}

/// Writes a new random token to a file that only this user can read, unless the file exists, and returns the
/// text of the file.
///
/// # Errors
/// If the file can be neither written nor read, or the system has no randomness.
pub fn token_in(path: &Path) -> Result<String, ControlError> {
    let mut random = [0; RANDOM_BYTES];
    getrandom::fill(&mut random)
        .map_err(|e| ControlError::file("make", path)(std::io::Error::other(e.to_string())))?;
    let text: String = random.iter().map(|byte| format!("{byte:02x}")).collect();
    let made = File::options()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path);
    match made.and_then(|mut file| file.write_all(text.as_bytes())) {
        Ok(()) => Ok(text),
        Err(e) if e.kind() == std::io::ErrorKind::AlreadyExists => {
            let text = std::fs::read_to_string(path).map_err(ControlError::file("read", path))?;
            Ok(text.trim().to_owned())
        }
        Err(e) => Err(ControlError::file("write", path)(e)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_whole_token_is_accepted() {
        let token = Token::new("0123456789abcdef").unwrap();
        assert!(token.is_in(Some("Bearer 0123456789abcdef")));
        for wrong in [
            None,
            Some(""),
            Some("Bearer "),
            Some("Bearer 0123456789abcde"),
        ] {
            assert!(!token.is_in(wrong), "{wrong:?}");
        }
        assert!(Token::new("short").is_err() && Token::new("0123456789 abcdef").is_err());
    }

    #[test]
    fn a_token_is_made_once() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("token");
        let text = token_in(&path).unwrap();
        assert_eq!(token_in(&path).unwrap(), text);
        assert!(Token::new(&text).is_ok());
    }
}
