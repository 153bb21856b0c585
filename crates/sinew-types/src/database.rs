//! Addresses of databases, which recipes and command lines name.

/// Schemes of the addresses of PostgreSQL and Redis.
const SCHEMES: [&str; 4] = ["postgres://", "postgresql://", "redis://", "rediss://"];

/// Whether a text is the address of a database.
pub fn is_database(url: &str) -> bool {
    SCHEMES.iter().any(|scheme| url.starts_with(scheme))
}
