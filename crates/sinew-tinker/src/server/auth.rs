//! Keys and their tenants.

use crate::desk::types::Tenant;
use crate::random::random_hex;
use axum::http::header::{AUTHORIZATION, HeaderMap};
use std::fmt;

/// Prefix that the SDK asks of each key.
const PREFIX: &str = "tml-";
/// Least characters of a key after the prefix. Made ones have 64 hexadecimal digits: 256 bits.
const MIN_SECRET: usize = 16;
/// Most characters of a key.
const MAX_KEY: usize = 512;
/// Most characters of a tenant's name.
const MAX_NAME: usize = 64;

/// Reason why keys cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum KeyError {
    /// A tenant with a name that is not allowed.
    #[error("tenant {0:?}: allowed: 1 to 64 of a-z, A-Z, 0-9, ., - and _, no dot first")]
    Name(String),
    /// A key that the SDK would refuse, or that can be guessed.
    #[error(
        "the key of tenant {0:?}: allowed: `tml-` and at least 16 printable characters, at most 512 in all"
    )]
    Key(String),
    /// Two tenants with one key.
    #[error("tenants {0:?} and {1:?} have the same key; give each its own")]
    Twice(String, String),
    /// No key at all.
    #[error("no keys; give at least one line TENANT:KEY, where the key begins with `tml-`")]
    None,
    /// The system's random number generator failed.
    #[error("cannot make a key: {0}")]
    Random(String),
}

/// One key.
#[derive(Clone, PartialEq, Eq)]
struct Known {
    tenant: Tenant,
    /// BLAKE3 hash of the key's text.
    digest: blake3::Hash,
}

/// The keys that a server accepts, as hashes.
#[derive(Clone)]
pub struct Keys(Vec<Known>);

impl fmt::Debug for Keys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = self.0.iter().map(|known| &known.tenant.name);
        f.debug_list().entries(names).finish()
    }
}

impl Keys {
    /// Keys of tenants: names and keys. A tenant may have several keys.
    ///
    /// # Errors
    /// If a name or a key is not allowed, two tenants have one key, or there is none.
    pub fn new(pairs: &[(String, String)]) -> Result<Self, KeyError> {
        let mut known: Vec<Known> = Vec::with_capacity(pairs.len());
        for (name, key) in pairs {
            let plain = |b: u8| b.is_ascii_alphanumeric() || b"._-".contains(&b);
            let fits = !name.is_empty() && name.len() <= MAX_NAME && !name.starts_with('.');
            if !fits || !name.bytes().all(plain) {
                return Err(KeyError::Name(name.clone()));
            }
            let secret = key.strip_prefix(PREFIX).unwrap_or_default();
            let printable = key.bytes().all(|b| b.is_ascii_graphic());
            if secret.len() < MIN_SECRET || key.len() > MAX_KEY || !printable {
                return Err(KeyError::Key(name.clone()));
            }
            let digest = blake3::hash(key.as_bytes());
            let other = known.iter().find(|k| k.digest == digest);
            if let Some(other) = other.filter(|other| other.tenant.name != *name) {
                return Err(KeyError::Twice(other.tenant.name.clone(), name.clone()));
            }
            let tenant = Tenant { name: name.clone() };
            known.push(Known { tenant, digest });
        }
        if known.is_empty() {
            return Err(KeyError::None);
        }
        Ok(Self(known))
    }

    /// Reads lines `TENANT:KEY`. Empty lines and lines that begin with `#` are skipped.
    ///
    /// # Errors
    /// As [`Keys::new`] does.
    pub fn parse(text: &str) -> Result<Self, KeyError> {
        let lines = text.lines().map(str::trim);
        let lines = lines.filter(|line| !line.is_empty() && !line.starts_with('#'));
        let pair = |line: &str| {
            // A line without a colon may be a key: it is never part of a message.
            let (name, key) = line.split_once(':').unwrap_or(("", line));
            (name.to_owned(), key.to_owned())
        };
        Self::new(&lines.map(pair).collect::<Vec<_>>())
    }

    /// Makes a key of the tenant `default`, and returns it.
    ///
    /// # Errors
    /// If the system has no random numbers.
    pub fn generate() -> Result<(Self, String), KeyError> {
        let digits = random_hex(32).map_err(|error| KeyError::Random(error.to_string()))?;
        let key = format!("{PREFIX}{digits}");
        let keys = Self::new(&[("default".to_owned(), key.clone())])?;
        Ok((keys, key))
    }

    /// The tenant of a request. Hashes are compared in constant time.
    pub(crate) fn tenant(&self, headers: &HeaderMap) -> Option<&Tenant> {
        let key = headers.get("x-api-key").and_then(|v| v.to_str().ok());
        let bearer = || {
            let value = headers.get(AUTHORIZATION)?.to_str().ok()?;
            let (scheme, key) = value.split_once(' ')?;
            scheme.eq_ignore_ascii_case("bearer").then_some(key)
        };
        let key = key.or_else(bearer)?.trim();
        let digest = blake3::hash(key.as_bytes());
        let found = self.0.iter().find(|known| known.digest == digest);
        found.map(|known| &known.tenant)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(name: &'static str, value: &str) -> HeaderMap {
        let mut headers = HeaderMap::new();
        headers.insert(name, value.parse().unwrap());
        headers
    }

    #[test]
    fn only_whole_keys_have_a_tenant() {
        let text = "# two\nann:tml-0123456789abcdef\n\nbob:tml-fedcba9876543210\n";
        let keys = Keys::parse(text).unwrap();
        let of = |headers: &HeaderMap| keys.tenant(headers).map(|t| t.name.clone());
        let bob = Some("bob".to_owned());
        assert_eq!(of(&headers("x-api-key", "tml-fedcba9876543210")), bob);
        assert_eq!(
            of(&headers("authorization", "bearer tml-fedcba9876543210")),
            bob
        );
        for wrong in ["", "tml-", "tml-0123456789abcde", "0123456789abcdef"] {
            assert_eq!(of(&headers("x-api-key", wrong)), None, "{wrong}");
            assert_eq!(of(&headers("authorization", wrong)), None, "{wrong}");
        }
        assert!(!format!("{keys:?}").contains("0123456789abcdef"));
    }

    #[test]
    fn keys_that_the_sdk_refuses_or_that_are_shared_are_refused() {
        let refused = |text: &str| Keys::parse(text).unwrap_err();
        assert_eq!(refused("# nothing"), KeyError::None);
        assert_eq!(refused("a:0123456789abcdef0123"), KeyError::Key("a".into()));
        assert_eq!(refused("a:tml-short"), KeyError::Key("a".into()));
        assert_eq!(
            refused("a b:tml-0123456789abcdef"),
            KeyError::Name("a b".into())
        );
        let twice = "a:tml-0123456789abcdef\nb:tml-0123456789abcdef";
        assert_eq!(refused(twice), KeyError::Twice("a".into(), "b".into()));
        let (keys, key) = Keys::generate().unwrap();
        assert!(keys.tenant(&headers("x-api-key", &key)).is_some() && key.starts_with("tml-"));
    }
}
