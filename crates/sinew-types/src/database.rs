//! Addresses of databases, which recipes and command lines name.

/// Schemes of the addresses of PostgreSQL and Redis.
const SCHEMES: [&str; 4] = ["postgres://", "postgresql://", "redis://", "rediss://"];

/// Whether a text is the address of a database.
pub fn is_database(url: &str) -> bool {
    SCHEMES.iter().any(|scheme| url.starts_with(scheme))
}

/// Whether an address contains a password: after the user's name, or as a parameter. Copies of recipes and
/// lists of processes show addresses, so these must have none.
pub fn holds_password(url: &str) -> bool {
    let Some((_, rest)) = url.split_once("://") else {
        return false;
    };
    let (_, query) = rest.split_once('?').unwrap_or((rest, ""));
    // A password may contain characters that should have been encoded.
    let user = rest.rsplit_once('@').map(|(user, _)| user);
    let password = user.and_then(|user| user.split_once(':'));
    let parameter = |part: &str| part.starts_with("password=");
    password.is_some_and(|(_, password)| !password.is_empty())
        || query.split(['&', '#']).any(parameter)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn passwords_are_found_wherever_an_address_can_have_them() {
        for (url, holds) in [
            ("postgres://h/db", false),
            ("postgres://u@h:5432/db?sslmode=disable", false),
            ("postgres://u:@h/db", false),
            ("postgres://u:s3cret@h/db", true),
            ("postgres://u:s3/cr@et@h/db", true),
            ("postgres://u:s3?cret@h/db", true),
            ("postgres://h/db?user=u&password=s3cret", true),
            ("postgres://h/db?password=s3cret#name", true),
            ("redis://:s3cret@h:6379/1", true),
            ("s3://key:s3cret@bucket/prefix", true),
            ("s3://bucket/prefix", false),
            ("runs/a:b@c", false),
        ] {
            assert_eq!(holds_password(url), holds, "{url}");
        }
    }
}
