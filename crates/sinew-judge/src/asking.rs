//! Whether to ask again: the course of one vote, without I/O and without a clock.

use sinew_http::Retry;
use std::time::Duration;

/// First and longest pause after an outage; it doubles each time.
const PAUSES: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(8));

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
    asked: u32,
    retry: Retry,
}

impl Vote {
    /// A vote that asks up to `retries` times more than once.
    pub fn new(retries: u32) -> Self {
        let (attempts, (first, longest)) = (retries.saturating_add(1), PAUSES);
        Self {
            asked: 0,
            retry: Retry::doubling(attempts, first, longest),
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
        let (why, refused) = match heard {
            JudgeReply::Verdict(verdict) => return VoteAction::Done(verdict),
            JudgeReply::Lasting(why) => return VoteAction::Failed(why),
            JudgeReply::NoVerdict(why) => (why.clone(), Some(why)),
            JudgeReply::Passing(why) => (why, None),
        };
        self.asked += 1;
        match (self.retry.pause(self.asked, None), self.asked) {
            (None, 1) => VoteAction::Failed(why),
            (None, times) => VoteAction::Failed(format!("{why} (asked {times} times)")),
            (Some(pause), attempt) => VoteAction::Ask {
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
            assert!(matches!(next, VoteAction::Ask { pause, .. } if pause <= PAUSES.1));
        }
    }
}
