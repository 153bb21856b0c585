//! Whether to ask again: the course of one vote, without I/O and without a clock.

use sinew_http::Retry;
use std::time::Duration;

/// First and longest pause after an outage; it doubles each time.
const PAUSES: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(8));

/// Result of one question.
#[derive(Clone, Debug, PartialEq)]
pub enum Heard<V> {
    /// A verdict of the right form.
    Verdict(V),
    /// An answer that is not a verdict, with the reason.
    NoVerdict(String),
    /// There was no answer, but the next one may be different.
    Passing(String),
    /// There was no answer, and none is to be expected.
    Lasting(String),
}

/// Next action of a vote.
#[derive(Clone, Debug, PartialEq)]
pub enum Next<V> {
    /// Ask after `pause`. `refused` is the fault of the last answer.
    Ask {
        /// Number of the question, from 0.
        attempt: u32,
        /// Time to wait before.
        pause: Duration,
        /// Reason why the last answer is not a verdict.
        refused: Option<String>,
    },
    /// The verdict.
    Done(V),
    /// There is no verdict; holds the last reason.
    Failed(String),
}

/// One vote: asked up to `1 + retries` times.
#[derive(Clone, Debug)]
pub struct Asking {
    asked: u32,
    retry: Retry,
}

impl Asking {
    /// A vote that asks up to `retries` times more than once.
    pub fn new(retries: u32) -> Self {
        let (attempts, (first, longest)) = (retries.saturating_add(1), PAUSES);
        Self {
            asked: 0,
            retry: Retry::doubling(attempts, first, longest),
        }
    }

    /// The first question.
    pub fn first<V>(&self) -> Next<V> {
        Next::Ask {
            attempt: 0,
            pause: Duration::ZERO,
            refused: None,
        }
    }

    /// Decides the next action after an answer.
    pub fn on<V>(&mut self, heard: Heard<V>) -> Next<V> {
        let (why, refused) = match heard {
            Heard::Verdict(verdict) => return Next::Done(verdict),
            Heard::Lasting(why) => return Next::Failed(why),
            Heard::NoVerdict(why) => (why.clone(), Some(why)),
            Heard::Passing(why) => (why, None),
        };
        self.asked += 1;
        match (self.retry.pause(self.asked, None), self.asked) {
            (None, 1) => Next::Failed(why),
            (None, times) => Next::Failed(format!("{why} (asked {times} times)")),
            (Some(pause), attempt) => Next::Ask {
                attempt,
                pause: refused.as_ref().map_or(pause, |_| Duration::ZERO),
                refused,
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vote_is_asked_again_until_its_retries_are_used() {
        let mut vote = Asking::new(2);
        let ask = |attempt, ms, refused: Option<&str>| Next::Ask::<i32> {
            attempt,
            pause: Duration::from_millis(ms),
            refused: refused.map(str::to_owned),
        };
        assert_eq!(vote.first(), ask(0, 0, None));
        assert_eq!(vote.on(Heard::Passing("503".into())), ask(1, 500, None));
        let no = Heard::NoVerdict("no JSON".into());
        assert_eq!(vote.on(no.clone()), ask(2, 0, Some("no JSON")));
        let failed = Next::Failed("no JSON (asked 3 times)".into());
        assert_eq!(vote.on(no), failed);
        assert_eq!(Asking::new(0).on(Heard::Verdict(7)), Next::Done(7));
    }

    #[test]
    fn what_lasts_is_not_asked_again_and_pauses_are_bounded() {
        let mut vote = Asking::new(100);
        let lasting: Heard<i32> = Heard::Lasting("wrong key".into());
        assert_eq!(vote.on(lasting), Next::Failed("wrong key".into()));
        for _ in 0..100 {
            let next: Next<i32> = vote.on(Heard::Passing("down".into()));
            assert!(matches!(next, Next::Ask { pause, .. } if pause <= PAUSES.1));
        }
    }
}
