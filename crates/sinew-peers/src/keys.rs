//! Defaults and checks of keys that the clients of both protocols have.

use sinew_bridge::remote::{check_address, refuse_key};
use sinew_env::KeyError;

/// The full score, where scores are 0 to 1.
pub(crate) fn solved_at() -> f64 {
    1.0
}

/// Seconds for one request with its answer.
pub(crate) fn timeout_s() -> f64 {
    60.0
}

/// Seconds: ten minutes, as episodes of others may take long.
pub(crate) fn wait_s() -> f64 {
    600.0
}

/// Checks the address of a server, and its episodes at once.
pub(crate) fn check_client(url: &str, sessions: usize) -> Result<(), KeyError> {
    check_address(url, "http://127.0.0.1:8000")?;
    if !(1..=4096).contains(&sessions) {
        return refuse_key("sessions", sessions.to_string(), "allowed: 1 to 4096");
    }
    Ok(())
}
