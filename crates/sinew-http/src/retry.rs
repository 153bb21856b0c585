//! The schedule of requests that are repeated: pure, without a clock.

use crate::error::HttpError;
use std::time::Duration;

/// Attempts at a request, and the pauses between them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Retry {
    /// Maximum number of attempts, the first included.
    pub attempts: u32,
    /// Pause after the first attempt.
    pub first: Duration,
    /// Every pause is longer than the last one by this factor.
    pub factor: u32,
    /// Longest pause, also where the server asks for a longer one.
    pub longest: Duration,
}

impl Retry {
    /// A schedule whose pauses double.
    pub const fn doubling(attempts: u32, first: Duration, longest: Duration) -> Self {
        Self {
            attempts,
            first,
            factor: 2,
            longest,
        }
    }

    /// The pause after `failed` attempts, of which there is at least one; `None` if there is no further
    /// attempt. The pause that the server asks for, if any, replaces that of the schedule.
    pub fn pause(&self, failed: u32, retry_after: Option<Duration>) -> Option<Duration> {
        let growing = || {
            let factor = self.factor.saturating_pow(failed.saturating_sub(1));
            self.first.saturating_mul(factor)
        };
        let pause = retry_after.unwrap_or_else(growing).min(self.longest);
        (failed < self.attempts).then_some(pause)
    }
}

/// A failed attempt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Failure<E> {
    /// Another attempt can succeed, after a pause that the server may have named.
    Passing(String, Option<Duration>),
    /// Another attempt would fail as well.
    Lasting(E),
}

impl<E> From<HttpError> for Failure<E> {
    fn from(error: HttpError) -> Self {
        Self::Passing(error.to_string(), None)
    }
}

impl From<Failure<Self>> for String {
    fn from(failure: Failure<Self>) -> Self {
        match failure {
            Failure::Passing(why, _) | Failure::Lasting(why) => why,
        }
    }
}

/// True for the statuses of a server that may answer the same request later: 408, 429 and 500 or more.
pub fn may_pass(status: u16) -> bool {
    matches!(status, 408 | 429 | 500..)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn s(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn pauses_grow_up_to_the_longest_until_no_attempt_is_left() {
        let retry = Retry::doubling(6, s(1), s(7));
        let pauses: Vec<_> = (1..8).map(|failed| retry.pause(failed, None)).collect();
        let expected = [Some(1), Some(2), Some(4), Some(7), Some(7), None, None];
        assert_eq!(pauses, expected.map(|p| p.map(s)));
        let endless = Retry {
            attempts: u32::MAX,
            ..retry
        };
        assert_eq!(endless.pause(u32::MAX - 1, None), Some(s(7)));
        let four = Retry {
            factor: 4,
            ..endless
        };
        assert_eq!(four.pause(2, None), Some(s(4)));
    }

    #[test]
    fn a_server_may_name_the_pause_up_to_the_longest() {
        let retry = Retry::doubling(3, s(2), s(7));
        assert_eq!(retry.pause(1, Some(s(0))), Some(s(0)));
        assert_eq!(retry.pause(2, Some(s(5))), Some(s(5)));
        assert_eq!(retry.pause(2, Some(s(60))), Some(s(7)));
        assert_eq!(retry.pause(3, Some(s(1))), None);
    }
}
