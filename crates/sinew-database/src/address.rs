//! Addresses of servers. Messages and debug output have them without passwords.

use sinew_store::StoreError;
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

/// Parts of an address: scheme, user with password, the rest without the query, the query.
struct Parts<'a> {
    scheme: &'a str,
    user: Option<&'a str>,
    place: &'a str,
    query: &'a str,
}

fn parts(url: &str) -> Option<Parts<'_>> {
    let (scheme, rest) = url.split_once("://")?;
    let (before, query) = rest.split_once('?').unwrap_or((rest, ""));
    // A password may contain characters that should have been encoded.
    let (user, place) = match before.rsplit_once('@') {
        Some((user, place)) => (Some(user), place),
        None => (None, before),
    };
    Some(Parts {
        scheme,
        user,
        place,
        query,
    })
}

/// Returns an address without its password and its query. A text that is no address is returned as it is.
pub(crate) fn redacted(url: &str) -> String {
    let Some(parts) = parts(url) else {
        return url.to_owned();
    };
    let name = parts
        .user
        .map(|user| user.split(':').next().unwrap_or_default());
    let user = name.map_or_else(String::new, |name| format!("{name}@"));
    format!("{}://{user}{}", parts.scheme, parts.place)
}

/// Whether an address contains a password.
pub(crate) fn holds_password(url: &str) -> bool {
    parts(url).is_some_and(|parts| {
        let in_user = parts.user.and_then(|user| user.split_once(':'));
        in_user.is_some_and(|(_, password)| !password.is_empty())
            || parts
                .query
                .split('&')
                .any(|part| part.starts_with("password="))
    })
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

    /// The address with the password inside, percent-encoded.
    pub(crate) fn with_password(&self) -> String {
        let (Some(password), Some(parts)) = (&self.password, parts(&self.url)) else {
            return self.url.clone();
        };
        let user = parts
            .user
            .map(|user| user.split(':').next().unwrap_or_default());
        let mut secret = String::new();
        for byte in password.bytes() {
            match byte {
                b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' => secret.push(char::from(byte)),
                other => secret.push_str(&format!("%{other:02X}")),
            }
        }
        let query = match parts.query {
            "" => String::new(),
            query => format!("?{query}"),
        };
        let (scheme, user, place) = (parts.scheme, user.unwrap_or_default(), parts.place);
        format!("{scheme}://{user}:{secret}@{place}{query}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn passwords_are_never_shown() {
        for (url, shown, holds) in [
            ("postgres://h/db", "postgres://h/db", false),
            (
                "postgres://u@h:5432/db?sslmode=disable",
                "postgres://u@h:5432/db",
                false,
            ),
            ("postgres://u:s3cret@h/db", "postgres://u@h/db", true),
            ("postgres://u:s3/cr@et@h/db", "postgres://u@h/db", true),
            (
                "postgres://h/db?user=u&password=s3cret",
                "postgres://h/db",
                true,
            ),
            ("redis://:s3cret@h:6379/1", "redis://@h:6379/1", true),
            ("runs/store", "runs/store", false),
        ] {
            assert_eq!(
                (redacted(url).as_str(), holds_password(url)),
                (shown, holds),
                "{url}"
            );
            if let Ok(address) = Address::new(url, Some("0ther")) {
                let debug = format!("{address:?}");
                assert!(!debug.contains("s3") && !debug.contains("0ther"), "{debug}");
            }
        }
    }

    #[test]
    fn a_password_apart_is_put_in() {
        let with = |url: &str| Address::new(url, Some("a/b")).unwrap().with_password();
        assert_eq!(with("redis://h:6379/1"), "redis://:a%2Fb@h:6379/1");
        assert_eq!(with("rediss://u@h?x=1"), "rediss://u:a%2Fb@h?x=1");
        assert_eq!(with("redis://u:own@h"), "redis://u:own@h");
        let refused = Address::new("mysql://u:p@h", None).unwrap_err().to_string();
        assert!(
            refused.contains("mysql://u@h") && !refused.contains(":p@"),
            "{refused}"
        );
    }
}
