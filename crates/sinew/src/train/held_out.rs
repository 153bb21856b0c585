//! Held-out measurements: before, in between, after.

use super::Run;
use crate::failure::Failure;
use sinew_pipeline::eval_episodes;
use sinew_pipeline::{EpisodeStats, EvalRecord};
use sinew_rollout::{EpisodeSpec, again};
use sinew_types::{EpisodeEnd, Trace};

/// Purposes of the episodes that the run began with.
const BEFORE: &str = "eval-before";
const GREEDY_BEFORE: &str = "greedy-before";

impl Run<'_> {
    /// The measurement that the run began with. A resumed run reads its episodes from the store. Where
    /// they are gone (a store in memory, a torn one) what was written down counts: the weights of now
    /// would measure something else.
    pub(super) fn first_measurement(&mut self) -> Result<(Vec<Trace>, EpisodeStats), Failure> {
        let written = self.written_before.take();
        if self.step > 0 {
            let (traces, all) = self.stored(BEFORE, self.recipe.eval.episodes_per_task)?;
            let (greedy, greedy_all) = match self.recipe.eval_greedy() {
                true => self.stored(GREEDY_BEFORE, 1)?,
                false => (Vec::new(), true),
            };
            let written = written.map(|record| record.stats);
            let new = written.is_none();
            if !(all && greedy_all) {
                let stats = written.ok_or_else(|| self.unmeasured())?;
                self.say("before", &stats);
                return Ok((traces, stats));
            }
            let mut stats = EpisodeStats::of(&traces);
            stats.greedy_success = (!greedy.is_empty()).then(|| EpisodeStats::of(&greedy).success);
            match new {
                true => self.measured("before", &stats)?,
                false => self.say("before", &stats),
            }
            return Ok((traces, stats));
        }
        let before = self.evaluate(BEFORE, 0)?;
        self.refuse_hopeless(&before)?;
        let stats = self.with_greedy(&before, GREEDY_BEFORE, 0)?;
        match written {
            Some(_) => self.say("before", &stats),
            None => self.measured("before", &stats)?,
        }
        Ok((before, stats))
    }

    /// Measures in between, where it is time to and that was not done yet: a run may have ended
    /// between a checkpoint and its measurement.
    pub(super) fn during(&mut self) -> Result<(), Failure> {
        let every = self.recipe.eval.every;
        let due = every > 0 && self.step > 0 && self.step.is_multiple_of(every);
        if !due || self.step >= self.recipe.train.steps || self.measured_at >= self.step {
            return Ok(());
        }
        let traces = self.evaluate(&format!("eval-{:05}", self.step), self.step)?;
        self.measured_at = self.step;
        self.measured("during", &EpisodeStats::of(&traces))
    }

    fn unmeasured(&self) -> Failure {
        Failure::system(format!(
            "the episodes that were measured before training are no longer stored, and {} does not say what they showed\n  hint: `sinew export` writes the trained weights; `sinew eval` with and without --model compares them with the first ones",
            self.dir.evals_path().display()
        ))
    }

    /// Held-out episodes that the store has, and whether they are all.
    fn stored(
        &self,
        purpose: &str,
        episodes_per_task: usize,
    ) -> Result<(Vec<Trace>, bool), Failure> {
        let specs = self.specs(purpose, 0, episodes_per_task)?;
        let mut traces = Vec::with_capacity(specs.len());
        for spec in &specs {
            traces.extend(self.last_attempt(spec)?);
        }
        let all = traces.len() == specs.len();
        Ok((traces, all))
    }

    /// The stored episode, or that of its last attempt if the system failed it.
    fn last_attempt(&self, spec: &EpisodeSpec) -> Result<Option<Trace>, Failure> {
        let stored = |spec: &EpisodeSpec| self.parts.store.get(&spec.episode);
        let mut last = stored(spec).map_err(Failure::system)?;
        for attempt in 1.. {
            let Some(trace) = &last else { break };
            let next = again(
                std::slice::from_ref(spec),
                std::slice::from_ref(trace),
                attempt,
            );
            let Some((_, next)) = next.first() else { break };
            match stored(next).map_err(Failure::system)? {
                Some(trace) => last = Some(trace),
                None => break,
            }
        }
        Ok(last)
    }

    fn specs(
        &self,
        purpose: &str,
        step: u64,
        episodes_per_task: usize,
    ) -> Result<Vec<EpisodeSpec>, Failure> {
        // A run may end several times, each time with other weights.
        let ids = match purpose.ends_with("-after") {
            true => format!("{purpose}-{step}"),
            false => purpose.to_owned(),
        };
        eval_episodes(
            self.parts.taskset.as_ref(),
            self.recipe.seed,
            (&ids, purpose),
            self.recipe.eval.tasks,
            episodes_per_task,
        )
        .map_err(|e| Failure::system(e.to_string()))
    }

    /// If every episode of the first evaluation failed for the same reason, training cannot
    /// help: stop before anything is spent.
    pub(super) fn refuse_hopeless(&self, traces: &[Trace]) -> Result<(), Failure> {
        let reason = |t: &Trace| match &t.end {
            EpisodeEnd::Failed { kind, message } => Some(format!("{kind:?}: {message}")),
            _ => None,
        };
        match traces.first().and_then(reason) {
            Some(first) if traces.iter().all(|t| reason(t).is_some()) => {
                Err(Failure::system(format!(
                    "all {} held-out episodes failed; the first: {first}",
                    traces.len()
                )))
            }
            _ => Ok(()),
        }
    }

    pub(super) fn evaluate(&mut self, purpose: &str, step: u64) -> Result<Vec<Trace>, Failure> {
        let eval = &self.recipe.eval;
        let traces = self.held_out(purpose, step, eval.episodes_per_task, eval.temperature)?;
        if let Some(why) = failed_measurement(&traces) {
            self.view.warn(&why);
        }
        Ok(traces)
    }

    /// Statistics of sampled held-out episodes, with the success of greedy ones beside them.
    pub(super) fn with_greedy(
        &mut self,
        sampled: &[Trace],
        purpose: &str,
        step: u64,
    ) -> Result<EpisodeStats, Failure> {
        let mut stats = EpisodeStats::of(sampled);
        if self.recipe.eval_greedy() {
            let greedy = self.held_out(purpose, step, 1, 0.0)?;
            stats.greedy_success = Some(EpisodeStats::of(&greedy).success);
        }
        Ok(stats)
    }

    /// Writes a held-out measurement down and says it.
    pub(super) fn measured(&mut self, when: &str, stats: &EpisodeStats) -> Result<(), Failure> {
        let record = EvalRecord {
            when: when.into(),
            step: if when == "before" { 0 } else { self.step },
            wall_s: self.wall_s(),
            stats: stats.clone(),
        };
        self.evals.append(&record).map_err(Failure::system)?;
        self.measurements.push(record);
        self.say(when, stats);
        Ok(())
    }

    fn say(&self, when: &str, stats: &EpisodeStats) {
        let percent = |x: f64| format!("{:.1} %", 100.0 * x);
        let greedy = stats.greedy_success.map(percent);
        self.view.line(&format!(
            "held-out {when}: success {}{}",
            percent(stats.success),
            greedy.map_or_else(String::new, |g| format!(", greedy {g}")),
        ));
    }

    fn held_out(
        &mut self,
        purpose: &str,
        step: u64,
        episodes_per_task: usize,
        temperature: f32,
    ) -> Result<Vec<Trace>, Failure> {
        if let Some(cross) = &self.parts.cross {
            cross.mix(false);
        }
        let specs = self.specs(purpose, step, episodes_per_task)?;
        let mut options = self.parts.episode_options(self.recipe);
        options.sampling.temperature = temperature;
        self.view
            .update(|s| s.phase = format!("evaluating ({purpose})"));
        Ok(self.settled(&specs, &options, 0)?.traces)
    }
}

/// Why a measurement says little: most of its episodes failed.
pub(super) fn failed_measurement(traces: &[Trace]) -> Option<String> {
    let stats = EpisodeStats::of(traces);
    let (failed, all) = (stats.failed, stats.episodes);
    let why = sinew_pipeline::cause(traces).unwrap_or_default();
    sinew_pipeline::mostly_failed(&stats)
        .then(|| format!("{failed} of {all} held-out episodes failed: {why}"))
}
