//! Control tokens in files, of `sinew serve` and of `sinew train --serve`, and addresses with passwords.

use crate::failure::Failure;
use sinew_types::holds_password;
use std::path::Path;

/// Minimum length of a control token: shorter ones could be guessed.
const MIN_TOKEN_CHARS: usize = 16;

/// The secret in a file: its first line, long enough not to be guessed.
///
/// # Errors
/// If the file cannot be read, or its text is shorter than 16 characters or holds white space.
pub fn read_token(path: &Path) -> Result<String, Failure> {
    token_of("--control-token-file", path)
}

/// Same as [`read_token`], for another option or key.
///
/// # Errors
/// Fails as [`read_token`] does.
pub fn token_of(option: &str, path: &Path) -> Result<String, Failure> {
    let text = std::fs::read_to_string(path)
        .map_err(|e| Failure::input(format!("{option} {}: {e}", path.display())))?;
    let token = text.trim();
    let fits = token.len() >= MIN_TOKEN_CHARS && token.chars().all(|c| c.is_ascii_graphic());
    if !fits {
        return Err(Failure::input(format!(
            "{option} {}: expected one line of at least {MIN_TOKEN_CHARS} characters \
             without white space\n  hint: head -c 24 /dev/urandom | base64 > token",
            path.display()
        )));
    }
    Ok(token.to_owned())
}

/// The first line of a file, which is a password or an address with one.
///
/// # Errors
/// If the file cannot be read, or begins with an empty line.
pub(crate) fn first_line(option: &str, path: &Path) -> Result<String, Failure> {
    let text = std::fs::read_to_string(path)
        .map_err(|e| Failure::input(format!("{option} {}: {e}", path.display())))?;
    match text.lines().next().map(str::trim) {
        Some(line) if !line.is_empty() => Ok(line.to_owned()),
        _ => Err(Failure::input(format!(
            "{option} {}: its first line is empty",
            path.display()
        ))),
    }
}

/// Refuses an address that contains a password: others see recipes and the list of processes.
///
/// # Errors
/// If it contains one. The message does not.
pub(crate) fn refuse_password(what: &str, url: &str) -> Result<(), Failure> {
    if !holds_password(url) {
        return Ok(());
    }
    Err(Failure::input(format!(
        "{what} contains a password, which others see in recipes and lists of processes\n  hint: give it as \
         PGPASSWORD or REDISCLI_AUTH in the environment, or in a file; keys of S3 as AWS_ACCESS_KEY_ID and \
         AWS_SECRET_ACCESS_KEY"
    )))
}
