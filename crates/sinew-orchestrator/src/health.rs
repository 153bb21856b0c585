//! Alarms about steps. Pure: records of steps go in, alarms come out.
//!
//! The alarms watch for four problems: the system fails episodes, no episode gets a score, steps train
//! nothing, and updates are skipped because the gradient is not finite. Each step with a failed episode is
//! reported. A run ends after `BAD` steps in a row in which most episodes failed, none got a score, or every
//! update was skipped. Steps that train nothing are only reported: a hard task may show a training signal
//! late. The `Verdict` covers the run as a whole.

use crate::record::{EpisodeStats, StepRecord};
use crate::verdict::{moved, why_idle};
use sinew_types::{EpisodeEnd, Trace};
use std::collections::BTreeMap;

/// Steps in a row in which most episodes failed, none got a score, or every update was skipped, after which
/// a run ends.
pub(crate) const BAD: u32 = 3;
/// Number of steps in a row without training after which a warning is sent, and again after each further such
/// number.
pub(crate) const IDLE: u32 = 5;

/// Error text of the engine for logits that are not numbers.
const NOT_FINITE: &str = "logits are not finite";

/// Alarm raised by a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Alarm {
    /// Message for the user; the run continues.
    Warning(String),
    /// The run must end for this reason.
    Stop(String),
}

/// Counts of consecutive bad steps.
#[derive(Clone, Debug, Default)]
pub struct Health {
    /// Steps in a row in which most episodes failed.
    failing: u32,
    /// Steps in a row whose every update was skipped.
    skipping: u32,
    /// Steps in a row without a score.
    unscored: u32,
    /// Steps in a row that trained nothing.
    idle: u32,
    /// Description of the last bad step.
    why_bad: String,
}

/// Whether the system failed most of these episodes.
pub fn mostly_failed(stats: &EpisodeStats) -> bool {
    2 * stats.failed > stats.episodes
}

/// Reason why most of the failed episodes failed: the most frequent kind with the first message of it.
pub fn cause<'a>(traces: impl IntoIterator<Item = &'a Trace>) -> Option<String> {
    let mut kinds: BTreeMap<String, (usize, &str)> = BTreeMap::new();
    for trace in traces {
        if let EpisodeEnd::Failed { kind, message } = &trace.end {
            let name = format!("{kind:?}").to_lowercase();
            kinds.entry(name).or_insert((0, message.as_str())).0 += 1;
        }
    }
    let (kind, (_, message)) = kinds.into_iter().max_by_key(|(_, (count, _))| *count)?;
    Some(format!("{kind}: {message}"))
}

/// Describes the cause, with a remedy if one is known.
fn explained(cause: Option<&str>) -> String {
    match cause {
        Some(cause) if cause.contains(NOT_FINITE) => format!(
            "the model has diverged ({cause})\n  hint: start again with a lower train.learning_rate or train.lora.alpha, as the weights of the last checkpoint may have diverged already"
        ),
        Some(cause) => cause.to_owned(),
        None => "no reason was recorded".into(),
    }
}

impl Health {
    /// Builds the health after the steps of `history`, which a checkpoint contains.
    pub fn after(history: &[StepRecord]) -> Self {
        let mut health = Self::default();
        for record in history {
            health.step(record);
        }
        // Steps in a checkpoint have been trained; a resumed run is judged by its own steps.
        (health.failing, health.skipping) = (0, 0);
        health
    }

    /// Checks the scores of a step. Only for runs that score their own episodes: a reward that cannot judge
    /// any episode would otherwise let the run continue to its end without training. The steps themselves are
    /// valid, since they trained nothing.
    pub fn scores(&mut self, r: &StepRecord) -> Option<Alarm> {
        let (scored, unscored) = (r.samples.scored, &r.samples.unscored);
        let none = count(&mut self.unscored, scored == 0 && unscored.count > 0);
        let first = unscored.first.as_deref().unwrap_or_default();
        (none >= BAD).then(|| {
            Alarm::Stop(format!(
                "no episode of {none} steps in a row got a score; the first: {first}\n  hint: put the reward right, and go on \
                 with --resume --allow-change reward"
            ))
        })
    }

    /// Handles the record of a step; returns an alarm if there is one.
    pub fn step(&mut self, r: &StepRecord) -> Option<Alarm> {
        let failing = count(&mut self.failing, mostly_failed(&r.rollout));
        let skipping = count(&mut self.skipping, r.rows > 0 && r.updates_applied == 0);
        let solved = r.rollout.failed == 0 && r.rollout.success >= 1.0;
        let idle = count(&mut self.idle, !moved(r) && !solved);
        let failed = failures(r);
        if let (1.., Some(what)) = (failing, &failed) {
            self.why_bad.clone_from(what);
            return Some(if failing >= BAD {
                Alarm::Stop(format!(
                    "most episodes failed in {failing} steps in a row; {what}"
                ))
            } else {
                Alarm::Warning(what.clone())
            });
        }
        if skipping > 0 {
            let what = format!(
                "step {}: the gradient is not finite, the update was skipped",
                r.step
            );
            self.why_bad.clone_from(&what);
            return Some(if skipping >= BAD {
                Alarm::Stop(format!(
                    "{what}, as in the {} steps before: the model has diverged\n  hint: start again with a lower train.learning_rate",
                    skipping - 1
                ))
            } else {
                Alarm::Warning(what)
            });
        }
        let still = (idle > 0 && idle.is_multiple_of(IDLE))
            .then(|| format!("nothing was trained in {idle} steps: {}", why_idle(r)));
        let said: Vec<String> = failed.into_iter().chain(still).collect();
        (!said.is_empty()).then(|| Alarm::Warning(said.join("; ")))
    }

    /// Describes the last step if it was a bad one. No checkpoint is written then, so that a resumed run
    /// repeats these steps.
    pub fn bad(&self) -> Option<&str> {
        (self.failing > 0 || self.skipping > 0).then_some(self.why_bad.as_str())
    }
}

/// Describes the episodes of a step that the system failed, with the cause, if there are any.
fn failures(r: &StepRecord) -> Option<String> {
    let (failed, all) = (r.rollout.failed, r.rollout.episodes);
    (failed > 0).then(|| {
        let why = explained(r.failed_cause.as_deref());
        format!(
            "{failed} of {all} episodes of step {} failed: {why}",
            r.step
        )
    })
}

/// Increments a streak, or resets it to 0 if the event did not happen.
fn count(streak: &mut u32, happened: bool) -> u32 {
    *streak = if happened {
        streak.saturating_add(1)
    } else {
        0
    };
    *streak
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(step: u64, failed: usize) -> StepRecord {
        let mut r = StepRecord {
            step,
            rows: 8,
            trained_tokens: 50,
            updates_applied: 1,
            grad_norm: 0.5,
            ..StepRecord::default()
        };
        (r.rollout.episodes, r.rollout.failed) = (8, failed);
        r.failed_cause = (failed > 0).then(|| "engine: logits are not finite: ...".into());
        r
    }

    fn idle(step: u64) -> StepRecord {
        StepRecord {
            rows: 0,
            trained_tokens: 0,
            updates_applied: 0,
            dropped: [("equal rewards in the group".into(), 8)].into(),
            ..record(step, 0)
        }
    }

    #[test]
    fn a_run_whose_episodes_mostly_fail_ends_after_three_steps_with_the_cause() {
        let mut health = Health::default();
        let half = health.step(&record(1, 4));
        assert!(matches!(half, Some(Alarm::Warning(_))), "half is not most");
        assert!(health.bad().is_none());
        for step in 2..4 {
            let alarm = health.step(&record(step, 5));
            assert!(matches!(alarm, Some(Alarm::Warning(_))), "{alarm:?}");
            assert!(health.bad().is_some());
        }
        let Some(Alarm::Stop(why)) = health.step(&record(4, 8)) else {
            panic!("it goes on");
        };
        for needle in [
            "3 steps in a row",
            "8 of 8",
            "the model has diverged",
            "not finite",
        ] {
            assert!(why.contains(needle), "{needle}: {why}");
        }
        // One good step between them, and counting begins again.
        let mut health = Health::default();
        for (step, failed) in [(1, 8), (2, 8), (3, 0), (4, 8), (5, 8)] {
            let alarm = health.step(&record(step, failed));
            assert!(!matches!(alarm, Some(Alarm::Stop(_))), "{step}: {alarm:?}");
        }
    }

    #[test]
    fn updates_that_are_skipped_end_a_run() {
        let mut health = Health::default();
        let skipped = |step| StepRecord {
            updates_applied: 0,
            skipped_updates: 1,
            grad_norm: 0.0,
            ..record(step, 0)
        };
        assert!(matches!(health.step(&skipped(1)), Some(Alarm::Warning(_))));
        health.step(&skipped(2));
        let stopped = health.step(&skipped(3));
        assert!(matches!(&stopped, Some(Alarm::Stop(why)) if why.contains("diverged")));
    }

    #[test]
    fn a_failed_episode_is_never_silent() {
        let mut health = Health::default();
        assert_eq!(health.step(&record(1, 0)), None);
        let Some(Alarm::Warning(one)) = health.step(&record(2, 1)) else {
            panic!("it is silent");
        };
        assert!(
            one.starts_with("1 of 8 episodes of step 2 failed: "),
            "{one}"
        );
        assert!(health.bad().is_none(), "the step stands");
        // Another warning does not hide it.
        for step in 3..3 + u64::from(IDLE) {
            let mut r = idle(step);
            r.rollout.failed = 1;
            let alarm = health.step(&r);
            let both = matches!(&alarm, Some(Alarm::Warning(w)) if w.contains("failed") && w.contains("nothing was trained"));
            assert_eq!(both, step == 2 + u64::from(IDLE), "{alarm:?}");
        }
    }

    #[test]
    fn steps_that_train_nothing_are_reported() {
        let mut health = Health::default();
        for step in 1..=u64::from(IDLE) {
            let alarm = health.step(&idle(step));
            let told = matches!(&alarm, Some(Alarm::Warning(w)) if w.contains("equal rewards"));
            assert_eq!(told, step == u64::from(IDLE), "{alarm:?}");
        }
        for step in 6..60 {
            let mut solved = idle(step);
            solved.rollout.success = 1.0;
            assert_eq!(health.step(&solved), None);
        }
    }

    #[test]
    fn a_reward_that_judges_nothing_ends_a_run_after_three_steps_with_the_cause() {
        let of = |scored, unscored| {
            let mut r = idle(1);
            r.samples.scored = scored;
            r.samples.unscored.count = unscored;
            r.samples.unscored.first = Some("e1: ZeroDivisionError".into());
            r
        };
        let mut health = Health::default();
        // One score between them, or nothing that could have one, and counting begins again.
        for (scored, unscored) in [
            (0, 8),
            (0, 8),
            (1, 7),
            (0, 8),
            (0, 8),
            (0, 0),
            (0, 8),
            (0, 8),
        ] {
            assert_eq!(health.scores(&of(scored, unscored)), None);
        }
        let stopped = health.scores(&of(0, 8));
        let Some(Alarm::Stop(why)) = stopped else {
            panic!("it goes on: {stopped:?}");
        };
        assert!(
            why.contains("3 steps in a row") && why.contains("ZeroDivisionError"),
            "{why}"
        );
        assert!(
            health.bad().is_none(),
            "a resumed run does not do them again"
        );
    }

    #[test]
    fn a_resumed_run_is_judged_by_its_own_steps() {
        let history: Vec<StepRecord> = (1..=2).map(|s| record(s, 8)).collect();
        let mut health = Health::after(&history);
        assert!(health.bad().is_none());
        let alarm = health.step(&record(3, 8));
        assert!(matches!(alarm, Some(Alarm::Warning(_))), "{alarm:?}");
    }
}
