//! State of a run, from its events.
//!
//! [`Status::apply`] is a pure function of the state and an event, so that any view can be tested without a
//! terminal. Events may be missing: nothing here counts on having seen them all.

use sinew_orchestrator::{CollectProgress, Phase, RunEvent, StepRecord};
use sinew_rollout::{AdmissionReading, GaugesReading, LiveEpisode};

/// State that a view shows. The default is a run that has shown nothing yet.
#[derive(Clone, Debug, Default)]
pub struct Status {
    /// Name of the recipe.
    pub title: String,
    /// `evaluating before`, `rolling out`, `training`, ...
    pub phase: String,
    /// The step that is worked on, from 1.
    pub step: u64,
    /// Steps that the recipe asks for.
    pub steps: u64,
    /// Progress within the phase.
    pub done: usize,
    /// Episodes or micro-batches of the phase; 0 if that is not known.
    pub total: usize,
    /// While it trains: which optimizer update of how many.
    pub update: (u32, u32),
    /// The last warning of a run that is in trouble.
    pub alarm: Option<String>,
    /// Progress of a collection.
    pub collected: Option<CollectProgress>,
    /// Episodes by what they do.
    pub gauges: GaugesReading,
    /// Held KV capacity and waiting turns.
    pub admission: AdmissionReading,
    /// Live episodes, longest in their phase first.
    pub longest: Vec<LiveEpisode>,
    /// Tokens a second that the engine samples now.
    pub tokens_per_s: f64,
    /// Success on held-out tasks under the first weights, 0 to 1.
    pub eval_before: Option<f64>,
    /// All steps, those of earlier sessions included.
    pub history: Vec<StepRecord>,
    /// Seconds of all sessions, as of the last event that has them.
    pub wall_s: f64,
}

impl Status {
    /// Seconds in generation, tools and training over all steps so far. Tools overlap with
    /// generation: their share is the time in which the engine had nothing to compute.
    pub fn split_s(&self) -> (f64, f64, f64, f64) {
        self.history.iter().fold((0.0, 0.0, 0.0, 0.0), |s, r| {
            let waiting = (r.rollout_s - r.engine_busy_s).max(0.0);
            (
                s.0 + r.engine_busy_s.min(r.rollout_s),
                s.1 + waiting,
                s.2 + r.train_s,
                s.3 + r.publish_s + r.checkpoint_s,
            )
        })
    }
}

impl Status {
    /// Handles an event.
    pub fn apply(&mut self, event: &RunEvent) {
        match event {
            RunEvent::Resumed { steps, .. } => self.history.clone_from(steps),
            RunEvent::Phase(phase) => self.enter(phase),
            RunEvent::Rollout(seen) => {
                self.longest.clone_from(&seen.longest);
                (self.gauges, self.admission) = (seen.gauges, seen.admission);
                self.tokens_per_s = seen.tokens_per_s;
                (self.done, self.total) = (seen.done, seen.total);
                self.update = (0, 0);
                self.wall_s = seen.wall_s;
            }
            RunEvent::Collected(progress) => self.collected = Some(progress.clone()),
            RunEvent::Train(seen) => {
                self.wall_s = seen.wall_s;
                (self.done, self.total) = (seen.micro_batch, seen.micro_batches);
                self.update = (seen.update, seen.updates);
            }
            RunEvent::Warning(text) => self.alarm = Some(text.clone()),
            RunEvent::Step(record) => {
                self.alarm = None;
                self.wall_s = record.wall_s;
                self.history.push(record.as_ref().clone());
            }
            RunEvent::Measured { record, .. } if record.when == "before" => {
                self.eval_before = Some(record.stats.success);
            }
            _ => {}
        }
    }

    /// Begins a phase. Progress of the phase before is dropped.
    fn enter(&mut self, phase: &Phase) {
        self.phase = phase.name();
        match phase {
            Phase::Rollout { step } => self.step = *step,
            Phase::Training { step } => {
                self.step = *step;
                (self.done, self.total, self.update) = (0, 0, (0, 0));
                self.tokens_per_s = 0.0;
            }
            _ => {}
        }
    }

    /// Progress of the phase: micro-batches while it trains, episodes otherwise; empty if the total is not
    /// known.
    pub(crate) fn progress(&self) -> String {
        let (done, total) = (self.done, self.total);
        match self.update {
            (update, 1) => format!("micro-batch {done} of {total}, update {update}"),
            (update, updates) if updates > 1 => {
                format!("micro-batch {done} of {total}, update {update} of {updates}")
            }
            _ if total == 0 => String::new(),
            _ => format!("{done} of {total} in this phase"),
        }
    }

    /// Episodes of all steps, and those of them that gave no row, with the most frequent reason.
    pub(crate) fn left_out(&self) -> (usize, usize, Option<&str>) {
        let mut reasons = std::collections::BTreeMap::<&str, usize>::new();
        for (reason, episodes) in self.history.iter().flat_map(|r| &r.dropped) {
            *reasons.entry(reason).or_default() += episodes;
        }
        let all = self.history.iter().map(|r| r.rollout.episodes).sum();
        let most = reasons.iter().max_by_key(|(_, n)| **n).map(|(r, _)| *r);
        (all, reasons.values().sum(), most)
    }

    /// Seconds of training to come, as the last steps went; the evaluation at the end not counted.
    pub fn left_s(&self) -> Option<f64> {
        const LAST: usize = 5;
        let recent = &self.history[self.history.len().saturating_sub(LAST)..];
        let spent: f64 = recent
            .iter()
            .map(|r| r.rollout_s + r.train_s + r.publish_s + r.checkpoint_s)
            .sum();
        let left = self.steps.checked_sub(self.history.last()?.step)?;
        (left > 0).then(|| spent / recent.len() as f64 * left as f64)
    }
}

/// An episode, its phase, the time it has been in it, and the time until the episode is cut; a call within it
/// may have a separate limit.
pub(crate) fn told(live: &LiveEpisode) -> String {
    let limit = live
        .left_s
        .map_or_else(String::new, |left| format!(", cut in {}", duration(left)));
    let (episode, phase) = (&live.episode, live.phase.name());
    format!("{phase:<5} {}  {episode}{limit}", duration(live.phase_s))
}

/// Seconds as `1h02m`, `3m07s`, `12s` or `1.4s`.
pub fn duration(seconds: f64) -> String {
    let s = seconds.max(0.0) as u64;
    match s {
        0..=9 => format!("{:.1}s", seconds.max(0.0)),
        10..=59 => format!("{s}s"),
        60..=3599 => format!("{}m{:02}s", s / 60, s % 60),
        _ => format!("{}h{:02}m", s / 3600, s % 3600 / 60),
    }
}
