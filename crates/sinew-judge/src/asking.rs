//! Whether to ask again: the course of one vote, without I/O and without a clock.

use std::time::Duration;

/// First pause before a question is asked again; it doubles each time.
const FIRST_PAUSE: Duration = Duration::from_millis(500);
/// Maximum pause.
const MAX_PAUSE: Duration = Duration::from_secs(8);

/// Result of one question.
#[derive(Clone, Debug, PartialEq)]
pub enum JudgeReply<V> {
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
pub enum VoteAction<V> {
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
pub struct Vote {
    attempt: u32,
    retries: u32,
}

impl Vote {
    /// A vote that asks up to `retries` times more than once.
    pub fn new(retries: u32) -> Self {
        Self {
            attempt: 0,
            retries,
        }
    }

    /// The first question.
    pub fn first<V>(&self) -> VoteAction<V> {
        VoteAction::Ask {
            attempt: 0,
            pause: Duration::ZERO,
            refused: None,
        }
    }

    /// Decides the next action after an answer.
    pub fn on<V>(&mut self, heard: JudgeReply<V>) -> VoteAction<V> {
        let (why, refused, pause) = match heard {
            JudgeReply::Verdict(verdict) => return VoteAction::Done(verdict),
            JudgeReply::Lasting(why) => return VoteAction::Failed(why),
            JudgeReply::NoVerdict(why) => (why.clone(), Some(why), Duration::ZERO),
            JudgeReply::Passing(why) => (why, None, self.pause()),
        };
        if self.attempt >= self.retries {
            let times = self.attempt + 1;
            return VoteAction::Failed(match times {
                1 => why,
                _ => format!("{why} (asked {times} times)"),
            });
        }
        self.attempt += 1;
        VoteAction::Ask {
            attempt: self.attempt,
            pause,
            refused,
        }
    }

    /// Time to wait after an outage.
    fn pause(&self) -> Duration {
        let doubled = FIRST_PAUSE.saturating_mul(1 << self.attempt.min(16));
        doubled.min(MAX_PAUSE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vote_is_asked_again_until_its_retries_are_used() {
        let mut vote = Vote::new(2);
        let ask = |attempt, ms, refused: Option<&str>| VoteAction::Ask::<i32> {
            attempt,
            pause: Duration::from_millis(ms),
            refused: refused.map(str::to_owned),
        };
        assert_eq!(vote.first(), ask(0, 0, None));
        assert_eq!(
            vote.on(JudgeReply::Passing("503".into())),
            ask(1, 500, None)
        );
        let no = JudgeReply::NoVerdict("no JSON".into());
        assert_eq!(vote.on(no.clone()), ask(2, 0, Some("no JSON")));
        let failed = VoteAction::Failed("no JSON (asked 3 times)".into());
        assert_eq!(vote.on(no), failed);
        assert_eq!(Vote::new(0).on(JudgeReply::Verdict(7)), VoteAction::Done(7));
    }

    #[test]
    fn what_lasts_is_not_asked_again_and_pauses_are_bounded() {
        let mut vote = Vote::new(100);
        let lasting: JudgeReply<i32> = JudgeReply::Lasting("wrong key".into());
        assert_eq!(vote.on(lasting), VoteAction::Failed("wrong key".into()));
        for _ in 0..100 {
            let next: VoteAction<i32> = vote.on(JudgeReply::Passing("down".into()));
            assert!(matches!(next, VoteAction::Ask { pause, .. } if pause <= MAX_PAUSE));
        }
    }
}
