//! Addresses of servers. Messages and debug output have them without passwords.

use sinew_store::StoreError;
use sinew_types::holds_password;
use std::fmt;

/// Kind of a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ServerKind {
    Postgres,
    Redis,
}

/// Schemes of addresses, with the kind of their server.
const SCHEMES: [(&str, ServerKind); 4] = [
    ("postgres://", ServerKind::Postgres),
    ("postgresql://", ServerKind::Postgres),
    ("redis://", ServerKind::Redis),
    ("rediss://", ServerKind::Redis),
];

fn kind_of(url: &str) -> Option<ServerKind> {
    let mut schemes = SCHEMES.iter();
    schemes
        .find(|(scheme, _)| url.starts_with(scheme))
        .map(|(_, kind)| *kind)
}

/// Returns an address without its password and its query. A text that is no address is returned as it is.
pub(crate) fn redacted(url: &str) -> String {
    let Some((scheme, rest)) = url.split_once("://") else {
        return url.to_owned();
    };
    // A password may contain characters that should have been encoded.
    let (user, place) = match rest.rsplit_once('@') {
        Some((user, place)) => (Some(user), place),
        None => (None, rest),
    };
    let name = user.map(|user| user.split([':', '/', '?']).next().unwrap_or_default());
    let name = name.map_or_else(String::new, |name| format!("{name}@"));
    let place = place.split('?').next().unwrap_or_default();
    format!("{scheme}://{name}{place}")
}

/// Address of a server with the password to use there.
#[derive(Clone)]
pub struct Address {
    kind: ServerKind,
    url: String,
    password: Option<String>,
}

impl fmt::Debug for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Address").field(&self.shown()).finish()
    }
}

impl Address {
    /// Reads an address. Without a password in it, `password` counts, and then the environment:
    /// `PGPASSWORD` or `REDISCLI_AUTH`, as the servers' own programs read it.
    ///
    /// # Errors
    /// If it is not the address of a database.
    pub fn new(url: &str, password: Option<&str>) -> Result<Self, StoreError> {
        let Some(kind) = kind_of(url) else {
            return Err(StoreError::Server {
                server: redacted(url),
                reason: "allowed: postgres://, postgresql://, redis:// or rediss://".into(),
            });
        };
        let variable = match kind {
            ServerKind::Postgres => "PGPASSWORD",
            ServerKind::Redis => "REDISCLI_AUTH",
        };
        let given = password.map(str::to_owned);
        let password = if holds_password(url) {
            None
        } else {
            given.or_else(|| std::env::var(variable).ok())
        };
        Ok(Self {
            kind,
            url: url.to_owned(),
            password: password.filter(|p| !p.is_empty()),
        })
    }

    /// Kind of its server.
    pub fn kind(&self) -> ServerKind {
        self.kind
    }

    /// The address without its password.
    pub fn shown(&self) -> String {
        redacted(&self.url)
    }

    /// The address as given.
    pub(crate) fn url(&self) -> &str {
        &self.url
    }

    /// The password, where the address has none.
    pub(crate) fn password(&self) -> Option<&str> {
        self.password.as_deref()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn passwords_are_never_shown() {
        for (url, shown) in [
            ("postgres://h/db", "postgres://h/db"),
            (
                "postgres://u@h:5432/db?sslmode=disable",
                "postgres://u@h:5432/db",
            ),
            ("postgres://u:s3cret@h/db", "postgres://u@h/db"),
            ("postgres://u:s3/cr@et@h/db", "postgres://u@h/db"),
            ("postgres://u:s3?cret@h/db", "postgres://u@h/db"),
            ("postgres://h/db?user=u&password=s3cret", "postgres://h/db"),
            (
                "postgres://h/db?password=s3cret&sslrootcert=/a@b",
                "postgres://h@b",
            ),
            ("redis://:s3cret@h:6379/1", "redis://@h:6379/1"),
            ("s3://key:s3cret@b/p", "s3://key@b/p"),
            ("mysql://u:s3cret@h", "mysql://u@h"),
            ("runs/store", "runs/store"),
        ] {
            assert_eq!(redacted(url), shown, "{url}");
            let said = match Address::new(url, Some("0ther")) {
                Ok(address) => format!("{address:?} {}", address.shown()),
                Err(refused) => refused.to_string(),
            };
            assert!(!said.contains("s3c") && !said.contains("0ther"), "{said}");
            assert!(!said.contains("s3/") && !said.contains("s3?"), "{said}");
        }
    }

    #[test]
    fn a_password_in_the_address_goes_before_one_apart() {
        let apart = |url: &str| Address::new(url, Some("apart")).unwrap();
        assert_eq!(apart("redis://u:own@h").password(), None);
        assert_eq!(apart("redis://u@h").password(), Some("apart"));
    }
}
