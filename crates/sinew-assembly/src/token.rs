//! Control tokens in files, of `sinew serve` and of `sinew train --serve`.

use crate::failure::Failure;
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
