//! Held-out measurements: their records, and those of earlier sessions.

use super::sync::Driver;
use sinew_orchestrator::{
    Draw, EpisodeStats, EvalRecord, EvalSet, EvalTime, HeldOutGain, HeldOutScores, PipelineError,
    RunEvent, health,
};
use sinew_types::{EpisodeEnd, EpisodeId, Trace};
use std::sync::Arc;

/// Reason why a measurement is weak: most of its episodes failed.
fn failed_measurement(traces: &[Trace]) -> Option<String> {
    let stats = EpisodeStats::of(traces);
    let (failed, all) = (stats.failed, stats.episodes);
    let why = health::cause(traces).unwrap_or_default();
    health::mostly_failed(&stats)
        .then(|| format!("{failed} of {all} held-out episodes failed: {why}"))
}

/// If every episode of the first measurement failed, training cannot help: stop before anything is
/// spent.
fn refuse_hopeless(traces: &[Trace]) -> Result<(), PipelineError> {
    let reason = |t: &Trace| match &t.end {
        EpisodeEnd::Failed { kind, message } => Some(format!("{kind:?}: {message}")),
        _ => None,
    };
    match traces.first().and_then(reason) {
        Some(first) if traces.iter().all(|t| reason(t).is_some()) => {
            Err(PipelineError::system(format!(
                "all {} held-out episodes failed; the first: {first}",
                traces.len()
            )))
        }
        _ => Ok(()),
    }
}

/// Statistics of sampled episodes, and the success of the greedy ones.
fn with_greedy(sampled: &[Trace], greedy: &[Trace]) -> EpisodeStats {
    let mut stats = EpisodeStats::of(sampled);
    if greedy.is_empty() {
        return stats;
    }
    let greedy = EpisodeStats::of(greedy);
    stats.greedy_success = Some(greedy.success);
    for (name, own) in &mut stats.by_env {
        own.greedy_success = greedy.by_env.get(name).map(|of| of.success);
    }
    stats
}

impl Driver {
    /// Sums a measurement up.
    pub(super) fn measure(
        &mut self,
        when: EvalTime,
        sets: Vec<Vec<EpisodeId>>,
    ) -> Result<(), PipelineError> {
        let mut sets = sets.into_iter().map(|set| self.episodes.take(&set));
        let sampled = sets.next().unwrap_or_default();
        let greedy = sets.next().unwrap_or_default();
        drop(sets);
        let failed = failed_measurement(&sampled);
        if let Some(why) = &failed {
            self.emit(RunEvent::Warning(why.clone()))?;
        }
        if matches!(when, EvalTime::Before | EvalTime::Now) {
            refuse_hopeless(&sampled)?;
        }
        let stats = with_greedy(&sampled, &greedy);
        let scores = HeldOutScores::of(&sampled, &greedy);
        let first = self.measurements.first_scores.as_ref();
        let gain = first.and_then(|first| HeldOutGain::between(first, &scores));
        match when {
            EvalTime::Before => {
                self.measurements.before = stats.clone();
                self.measurements.first_scores = Some(scores);
            }
            EvalTime::After | EvalTime::Now => {
                self.measurements.trouble = failed;
                self.measurements.after = stats.clone();
                self.measurements.gain.clone_from(&gain);
            }
            EvalTime::During => {}
        }
        self.measured(when, stats, gain, sampled, false)
    }

    fn measured(
        &mut self,
        when: EvalTime,
        stats: EpisodeStats,
        gain: Option<HeldOutGain>,
        episodes: Vec<Trace>,
        again: bool,
    ) -> Result<(), PipelineError> {
        if stats.episodes == 0 {
            // There are no held-out tasks, so nothing was measured or reported.
            return Ok(());
        }
        let record = EvalRecord {
            when: when.name().into(),
            step: match when {
                EvalTime::Before => 0,
                _ => self.core.step(),
            },
            wall_s: self.wall_s(),
            stats,
            gain,
        };
        if when != EvalTime::During {
            let first = episodes.first().map(|t| t.episode.clone());
            self.measurements.examples.extend(first);
        }
        if !again {
            self.sums.course.measured(&record);
            self.measurements.uncommitted.push(record.clone());
        }
        self.emit(RunEvent::Measured {
            record: Box::new(record),
            episodes: Arc::new(episodes),
            again,
        })
    }

    /// Reads the measurement that the run began with from the store. If its episodes are gone (a store in
    /// memory, a torn one), the written record counts: the current weights would measure something else.
    pub(super) fn find_first_eval(&mut self, sets: &[EvalSet]) -> Result<(), PipelineError> {
        let (mut stored, mut all) = (Vec::new(), true);
        for set in sets {
            let mut traces = Vec::with_capacity(set.draws.len());
            for draw in &set.draws {
                traces.extend(self.last_attempt(draw)?);
            }
            all &= traces.len() == set.draws.len();
            stored.push(traces);
        }
        let mut stored = stored.into_iter();
        let sampled = stored.next().unwrap_or_default();
        let greedy = stored.next().unwrap_or_default();
        let written = self.measurements.written.take();
        let (stats, again) = match (all, written) {
            (true, written) => (with_greedy(&sampled, &greedy), written.is_some()),
            (false, Some(written)) => (written.stats, true),
            (false, None) => return Err(self.unmeasured()),
        };
        self.measurements.before = stats.clone();
        self.measurements.first_scores = all.then(|| HeldOutScores::of(&sampled, &greedy));
        self.measured(EvalTime::Before, stats, None, sampled, again)
    }

    fn unmeasured(&self) -> PipelineError {
        PipelineError::system(format!(
            "the episodes that were measured before training are no longer stored, and {} does not say what they showed\n  hint: `sinew export` writes the trained weights; `sinew eval` with and without --model compares them with the first ones",
            self.run_dir().join("evals.jsonl").display()
        ))
    }

    /// The stored episode, or that of its last attempt if the system failed it.
    fn last_attempt(&self, draw: &Draw) -> Result<Option<Trace>, PipelineError> {
        let stored = |draw: &Draw| self.stored(&draw.episode);
        let mut last = stored(draw)?;
        for attempt in 1.. {
            let failed = |t: &Trace| matches!(t.end, EpisodeEnd::Failed { .. });
            if !last.as_ref().is_some_and(failed) {
                break;
            }
            match stored(&draw.again(attempt))? {
                Some(trace) => last = Some(trace),
                None => break,
            }
        }
        Ok(last)
    }
}
