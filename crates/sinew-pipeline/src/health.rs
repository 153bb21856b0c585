//! Whether a run still learns. Pure: it is given the records of steps and gives alarms.
//!
//! Four things are looked for: most episodes of a step fall to the system, no episode gets a score, steps
//! train nothing, and updates are skipped because the gradient is no number. All but the third end a run
//! after [`BAD`] steps in a row. Steps that train nothing are reported and decide how the run ends: a task
//! that is hard may give a signal late, so that they alone do not stop it.

use crate::record::{EpisodeStats, StepRecord};
use sinew_types::{EpisodeEnd, Trace};
use std::collections::BTreeMap;

/// Steps in a row in which most episodes failed, none got a score, or every update was skipped, after which
/// a run ends.
pub(crate) const BAD: u32 = 3;
/// Steps in a row that trained nothing after which it is reported, and again after as many more.
pub(crate) const IDLE: u32 = 5;
/// With so many of them at its end a run has not learned what it was to learn.
pub(crate) const IDLE_END: u32 = 20;

/// What the engine says of logits that are no numbers.
const NOT_FINITE: &str = "logits are not finite";

/// What a step gives rise to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Alarm {
    /// For the person who looks on.
    Warning(String),
    /// The run must end, for this reason.
    Stop(String),
}

/// Counts of what goes wrong step after step.
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
    trained: bool,
    /// Why the last bad step was bad, and why the last idle one trained nothing.
    why_bad: String,
    why_idle: String,
}

/// Whether most of these episodes fell to the system.
pub(crate) fn mostly_failed(stats: &EpisodeStats) -> bool {
    2 * stats.failed > stats.episodes
}

/// Why most of the failed episodes failed: the most frequent kind with the first message of it.
pub(crate) fn cause<'a>(traces: impl IntoIterator<Item = &'a Trace>) -> Option<String> {
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

/// The cause in words, with what can be done about it.
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
    /// As it is after the steps of `history`, which are in a checkpoint.
    pub fn after(history: &[StepRecord]) -> Self {
        let mut health = Self::default();
        for record in history {
            health.step(record);
        }
        // What a checkpoint holds has been trained; a run that goes on is judged by its own steps.
        (health.failing, health.skipping) = (0, 0);
        health
    }

    /// Takes in the scores of a step of a run that scores its own episodes: a reward that can judge none of
    /// them would let it train on nothing to its end. Its steps stand, as nothing was trained in them.
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

    /// Takes a step in.
    pub fn step(&mut self, r: &StepRecord) -> Option<Alarm> {
        self.trained |= moved(r);
        let failing = count(&mut self.failing, mostly_failed(&r.rollout));
        let skipping = count(&mut self.skipping, r.rows > 0 && r.updates_applied == 0);
        let solved = r.rollout.failed == 0 && r.rollout.success >= 1.0;
        let idle = count(&mut self.idle, !moved(r) && !solved);
        if idle > 0 {
            self.why_idle = why_idle(r);
        }
        if failing > 0 {
            let (failed, all) = (r.rollout.failed, r.rollout.episodes);
            let why = explained(r.failed_cause.as_deref());
            let what = format!(
                "{failed} of {all} episodes of step {} failed: {why}",
                r.step
            );
            self.why_bad.clone_from(&what);
            return Some(match failing >= BAD {
                true => Alarm::Stop(format!(
                    "most episodes failed in {failing} steps in a row; {what}"
                )),
                false => Alarm::Warning(what),
            });
        }
        if skipping > 0 {
            let what = format!(
                "step {}: the gradient is not finite, the update was skipped",
                r.step
            );
            self.why_bad.clone_from(&what);
            return Some(match skipping >= BAD {
                true => Alarm::Stop(format!(
                    "{what}, as in the {} steps before: the model has diverged\n  hint: start again with a lower train.learning_rate",
                    skipping - 1
                )),
                false => Alarm::Warning(what),
            });
        }
        (idle > 0 && idle.is_multiple_of(IDLE)).then(|| {
            Alarm::Warning(format!(
                "nothing was trained in {idle} steps: {}",
                self.why_idle
            ))
        })
    }

    /// What was wrong with the last step, if it was one of those that end a run: no checkpoint is made
    /// then, so that a resumed run does these steps again.
    pub fn bad(&self) -> Option<&str> {
        (self.failing > 0 || self.skipping > 0).then_some(self.why_bad.as_str())
    }

    /// Why a run that came to its end did not learn, if so.
    pub fn verdict(&self) -> Option<String> {
        if !self.trained {
            let why = match self.why_idle.as_str() {
                "" => "every episode succeeded before: there was nothing to learn",
                why => why,
            };
            return Some(format!("the run trained no token: {why}"));
        }
        (self.idle >= IDLE_END).then(|| {
            let (idle, why) = (self.idle, &self.why_idle);
            format!("the last {idle} steps trained nothing: {why}")
        })
    }
}

/// One more of what happens in a row, or none.
fn count(streak: &mut u32, happened: bool) -> u32 {
    *streak = if happened {
        streak.saturating_add(1)
    } else {
        0
    };
    *streak
}

/// Whether a step changed the weights.
fn moved(r: &StepRecord) -> bool {
    r.trained_tokens > 0 && r.updates_applied > 0 && r.grad_norm > 0.0
}

fn why_idle(r: &StepRecord) -> String {
    if r.rows == 0 || r.trained_tokens == 0 {
        let most = r.dropped.iter().max_by_key(|(_, episodes)| **episodes);
        return match most {
            Some((reason, episodes)) => {
                format!("{episodes} of {} episodes: {reason}", r.rollout.episodes)
            }
            None => "there were no tokens to train on".into(),
        };
    }
    if r.updates_applied == 0 {
        return "the gradient is not finite".into();
    }
    "the gradient is 0: the loss leaves out every token (a correction or a clip that no ratio passes), or both sides of each comparison are equal".into()
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
        assert_eq!(health.step(&record(1, 4)), None, "half is not most");
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
    fn steps_that_train_nothing_are_reported_and_decide_the_end() {
        let mut health = Health::default();
        for step in 1..=u64::from(IDLE) {
            let alarm = health.step(&idle(step));
            let told = matches!(&alarm, Some(Alarm::Warning(w)) if w.contains("equal rewards"));
            assert_eq!(told, step == u64::from(IDLE), "{alarm:?}");
        }
        assert!(health.verdict().unwrap().contains("trained no token"));
        health.step(&record(6, 0));
        assert_eq!(health.verdict(), None);
        for step in 1..=u64::from(IDLE_END) {
            health.step(&idle(step));
        }
        assert!(health.verdict().unwrap().contains("last 20 steps"));
    }

    #[test]
    fn a_run_that_has_nothing_left_to_learn_ended_well() {
        let mut health = Health::default();
        health.step(&record(1, 0));
        for step in 2..60 {
            let mut solved = idle(step);
            solved.rollout.success = 1.0;
            assert_eq!(health.step(&solved), None);
        }
        assert_eq!(health.verdict(), None);
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
    fn a_gradient_of_zero_trains_nothing() {
        let mut health = Health::default();
        let zero = StepRecord {
            grad_norm: 0.0,
            ..record(1, 0)
        };
        health.step(&zero);
        assert!(health.verdict().unwrap().contains("gradient is 0"));
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
