//! Bearer tokens and their owners.

use std::fmt;

/// Minimum bytes of a token. Generated ones have 64 hexadecimal digits (256 bits).
const MIN_TOKEN_BYTES: usize = 16;

/// Reason why tokens cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TokenError {
    /// A line of the token file is invalid.
    #[error(
        "line {line} of the tokens: {problem}; \
             allowed: OWNER:TOKEN with at least 16 characters of token"
    )]
    Line {
        /// Line number, from 1.
        line: usize,
        /// The problem, without the token.
        problem: &'static str,
    },
    /// The file contains no token.
    #[error("no tokens; allowed: at least one line OWNER:TOKEN")]
    None,
    /// The system's random number generator failed.
    #[error("cannot make a token: {0}")]
    Random(String),
}

/// A token and its owner.
#[derive(Clone, PartialEq, Eq)]
pub struct Token {
    /// Owner of the sandboxes that the token gives access to.
    pub owner: String,
    /// BLAKE3 hash of the token text.
    digest: blake3::Hash,
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Token")
            .field("owner", &self.owner)
            .finish_non_exhaustive()
    }
}

/// All valid tokens, as hashes.
#[derive(Clone, Debug)]
pub struct Tokens(Vec<Token>);

/// Returns `bytes` random bytes as hexadecimal digits.
pub(crate) fn random_hex(bytes: usize) -> Result<String, getrandom::Error> {
    let mut raw = vec![0; bytes];
    getrandom::fill(&mut raw)?;
    Ok(raw.iter().map(|b| format!("{b:02x}")).collect())
}

impl Tokens {
    /// Generates one token for the owner `default`. Returns the tokens and the token's text.
    ///
    /// # Errors
    /// [`TokenError::Random`] if the system has no random numbers.
    pub fn generate() -> Result<(Self, String), TokenError> {
        let text = random_hex(32).map_err(|e| TokenError::Random(e.to_string()))?;
        let token = Token {
            owner: "default".into(),
            digest: blake3::hash(text.as_bytes()),
        };
        Ok((Self(vec![token]), text))
    }

    /// Parses lines of `OWNER:TOKEN`. Empty lines and lines that start with `#` are skipped. The owner has 1
    /// to 64 characters of `a-z`, `A-Z`, `0-9`, `-` and `_`.
    ///
    /// # Errors
    /// Fails with the first invalid line, or if there is no token.
    pub fn parse(text: &str) -> Result<Self, TokenError> {
        let mut tokens = Vec::new();
        for (at, line) in text.lines().enumerate() {
            let line = line.trim();
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let wrong = |problem| TokenError::Line {
                line: at + 1,
                problem,
            };
            let (owner, token) = line.split_once(':').ok_or_else(|| wrong("no colon"))?;
            let plain = |b: u8| b.is_ascii_alphanumeric() || b == b'-' || b == b'_';
            if owner.is_empty() || owner.len() > 64 || !owner.bytes().all(plain) {
                return Err(wrong("the owner is not 1 to 64 of a-z, A-Z, 0-9, - and _"));
            }
            if token.len() < MIN_TOKEN_BYTES || !token.bytes().all(|b| b.is_ascii_graphic()) {
                return Err(wrong(
                    "the token is too short or has other than printable characters",
                ));
            }
            tokens.push(Token {
                owner: owner.into(),
                digest: blake3::hash(token.as_bytes()),
            });
        }
        if tokens.is_empty() {
            return Err(TokenError::None);
        }
        Ok(Self(tokens))
    }

    /// Returns the owner for an `authorization` header `Bearer TOKEN`. Compares hashes in constant time.
    pub(crate) fn owner(&self, header: Option<&str>) -> Option<&str> {
        let (scheme, token) = header?.split_once(' ')?;
        if !scheme.eq_ignore_ascii_case("bearer") {
            return None;
        }
        let digest = blake3::hash(token.trim().as_bytes());
        let found = self.0.iter().find(|t| t.digest == digest);
        found.map(|t| t.owner.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_complete_tokens_have_an_owner() {
        let tokens =
            Tokens::parse("# team\nann:0123456789abcdef\n\nbob:fedcba9876543210\n").unwrap();
        assert_eq!(tokens.owner(Some("Bearer fedcba9876543210")), Some("bob"));
        assert_eq!(tokens.owner(Some("bearer 0123456789abcdef")), Some("ann"));
        for wrong in [
            None,
            Some(""),
            Some("Bearer"),
            Some("Bearer "),
            Some("Bearer 0123456789abcde"),
            Some("Basic 0123456789abcdef"),
        ] {
            assert_eq!(tokens.owner(wrong), None, "{wrong:?}");
        }
        assert!(!format!("{tokens:?}").contains("0123456789abcdef"));
    }

    #[test]
    fn errors_name_the_line_and_hide_the_token() {
        for (text, line) in [
            ("a:0123456789abcdef\nsecret", 2),
            ("a:short", 1),
            ("a b:0123456789abcdef", 1),
            (":0123456789abcdef", 1),
        ] {
            let error = Tokens::parse(text).unwrap_err();
            assert!(
                matches!(error, TokenError::Line { line: l, .. } if l == line),
                "{error}"
            );
        }
        assert_eq!(Tokens::parse("# nothing\n").unwrap_err(), TokenError::None);
        let (tokens, text) = Tokens::generate().unwrap();
        assert_eq!(
            (tokens.owner(Some(&format!("Bearer {text}"))), text.len()),
            (Some("default"), 64)
        );
    }
}
