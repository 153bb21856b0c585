//! Errors of requests.

use crate::trust::cause;
use std::error::Error;
use std::fmt;

/// A request without an answer that can be used. Its text has the reason in one line, without the address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HttpError {
    /// The address, the key or another part of the request cannot be sent.
    Address(String),
    /// There is no connection.
    Connect {
        /// Reason, in words.
        why: String,
        /// The time to connect is over.
        late: bool,
    },
    /// The time of the request is over.
    Deadline(String),
    /// There are more redirects than allowed.
    Redirect(String),
    /// The connection broke before the answer was complete.
    Body(String),
    /// The answer is longer than this number of bytes.
    TooLarge(u64),
    /// The status is not a success.
    Status {
        /// The status.
        code: u16,
        /// Beginning of the server's text, in one line.
        text: String,
    },
}

impl fmt::Display for HttpError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Connect { why, .. } => f.write_str(why),
            Self::Address(why) | Self::Deadline(why) | Self::Redirect(why) | Self::Body(why) => {
                f.write_str(why)
            }
            Self::TooLarge(limit) if *limit > 0 && limit.is_multiple_of(1 << 20) => {
                write!(f, "the answer is longer than {} MiB", limit >> 20)
            }
            Self::TooLarge(limit) => write!(f, "the answer is longer than {limit} bytes"),
            Self::Status { code, text } => write!(f, "status {code}: {text}"),
        }
    }
}

impl Error for HttpError {}

impl From<reqwest::Error> for HttpError {
    fn from(error: reqwest::Error) -> Self {
        let (why, late) = (cause(&error), error.is_timeout());
        match () {
            () if error.is_builder() => Self::Address(why),
            () if error.is_connect() => Self::Connect { why, late },
            () if error.is_redirect() => Self::Redirect(why),
            () if late => Self::Deadline(why),
            () => Self::Body(why),
        }
    }
}

/// The first `max_chars` characters of a server's text, on one line and without control characters.
pub fn line(text: &[u8], max_chars: usize) -> String {
    let text = String::from_utf8_lossy(&text[..text.len().min(4 * max_chars)]);
    let shown = |c: char| if c.is_control() { ' ' } else { c };
    text.chars().take(max_chars).map(shown).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_of_servers_are_short_and_harmless() {
        let said = line("a\n\u{1b}[31m".repeat(200).as_bytes(), 160);
        assert!(said.chars().count() == 160 && !said.contains(char::is_control));
    }
}
