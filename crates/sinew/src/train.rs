//! The main job: episodes, training signal, optimizer step, new weights, again and again.

mod begin;
mod end;
mod episodes;
mod held_out;

use crate::failure::Failure;
use crate::ledger::{Ledger, LedgerStep};
use crate::recipe::{Recipe, TasksSection};
use crate::run_dir::{Resume, RunDir};
use crate::view::{LONGEST, Reminder, Sampler, View, duration};
use crate::wire::Parts;
use sinew_pipeline::AdmissionRecord;
use sinew_pipeline::Curriculum;
use sinew_pipeline::PoolSource;
use sinew_pipeline::{Alarm, Health};
use sinew_pipeline::{
    DIVERGENCE_ALARM, EpisodeStats, EvalRecord, MetricsFile, StepRecord, by_group, divergence,
    joins,
};
use sinew_rollout::{BatchError, EpisodeOptions, EpisodeSpec, LiveEpisode, run_batch};
use sinew_types::{EpisodeId, Trace};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};
use tokio::runtime::Runtime;
use tokio::sync::watch;

/// How the command was called.
#[derive(Clone, Debug)]
pub(crate) struct TrainOptions {
    /// `train` or `eval`.
    pub(crate) command: &'static str,
    pub(crate) resume: Option<Resume>,
    pub(crate) json: bool,
    /// Stored episodes that are gone are no reason to end badly.
    pub(crate) accept_loss: bool,
}

/// A command that came to its end.
#[derive(Debug)]
pub(crate) struct Ended {
    /// The last line for `--json`.
    pub(crate) last: serde_json::Value,
    /// Why it did not do what it was to do, if so.
    pub(crate) trouble: Option<Failure>,
}

/// What is counted and kept through a run.
struct Run<'a> {
    command: &'static str,
    recipe: &'a Recipe,
    dir: &'a RunDir,
    parts: Parts,
    runtime: &'a Runtime,
    view: View,
    json: bool,
    /// Earlier sessions may have stored episodes.
    resumed: bool,
    accept_loss: bool,
    cancel: watch::Receiver<bool>,
    metrics: MetricsFile,
    evals: MetricsFile,
    history: Vec<StepRecord>,
    /// Held-out measurements, as in their file.
    measurements: Vec<EvalRecord>,
    health: Health,
    ledger: Ledger,
    /// Steps done, and the last of them that a checkpoint holds.
    step: u64,
    saved_step: u64,
    /// Trained episodes of the steps after this one must be in the store.
    since: u64,
    /// Those that this session found to be gone.
    lost_now: usize,
    started: Instant,
    /// Wall time of earlier sessions of a resumed run.
    earlier_s: f64,
    curriculum: Curriculum,
    /// What an earlier session wrote of its first measurement.
    written_before: Option<EvalRecord>,
    /// The first measurement.
    before: Option<(Vec<Trace>, EpisodeStats)>,
    /// Last step after which held-out tasks were measured in between.
    measured_at: u64,
    /// When the report was written last.
    reported: Option<Instant>,
}

/// Runs a recipe to its end.
pub(crate) fn train(
    recipe: &Recipe,
    dir: &RunDir,
    options: &TrainOptions,
) -> Result<Ended, Failure> {
    let runtime = runtime()?;
    let mut run = Run::begin(recipe, dir, options, &runtime)?;
    let result = run.whole();
    match result {
        Err(failure) if failure.is_interrupt() => {
            run.save_if_needed()?;
            Err(Failure::interrupt(options.command, dir.path()))
        }
        result => result,
    }
}

/// Runs a recipe's held-out tasks once, and trains nothing.
pub(crate) fn evaluate(
    recipe: &Recipe,
    dir: &RunDir,
    options: &TrainOptions,
) -> Result<Ended, Failure> {
    let runtime = runtime()?;
    Run::begin(recipe, dir, options, &runtime)?.only_measured()
}

fn runtime() -> Result<Runtime, Failure> {
    Runtime::new().map_err(|e| Failure::system(format!("async runtime: {e}")))
}

impl Run<'_> {
    fn whole(&mut self) -> Result<Ended, Failure> {
        let (traces, stats) = self.first_measurement()?;
        let success = stats.success;
        self.before = Some((traces, stats));
        self.view.update(|s| s.eval_before = Some(success));
        self.during()?;
        while self.step < self.recipe.train.steps && !self.out_of_time() {
            if !self.one_step()? {
                break;
            }
        }
        if let Some(why) = self.health.bad() {
            return Err(self.stopped(why));
        }
        self.save_if_needed()?;
        self.end()
    }

    fn wall_s(&self) -> f64 {
        self.earlier_s + self.started.elapsed().as_secs_f64()
    }

    fn out_of_time(&self) -> bool {
        let limit = self.recipe.train.max_wall_s;
        limit > 0.0 && self.wall_s() >= limit
    }

    /// Runs episodes while the view follows them.
    fn episodes(
        &mut self,
        specs: Vec<EpisodeSpec>,
        options: &EpisodeOptions,
    ) -> Result<Vec<Trace>, Failure> {
        let total = specs.len();
        let finished_before = self.parts.episode.gauges.read().finished;
        let mut sampler = Sampler::new(self.parts.episode.engine.status().sampled_tokens);
        let mut reminder = Reminder::default();
        let batch = run_batch(
            &self.parts.episode,
            options,
            &self.parts.store,
            specs,
            self.recipe.rollout.max_in_flight,
            self.cancel.clone(),
        );
        let traces = self.runtime.block_on(async {
            tokio::pin!(batch);
            let mut tick = tokio::time::interval(Duration::from_millis(250));
            loop {
                tokio::select! {
                    result = &mut batch => break result,
                    _ = tick.tick() => {
                        let engine = self.parts.episode.engine.status();
                        let rate = sampler.rate(engine.sampled_tokens);
                        self.view.update(|s| s.tokens_per_s = rate);
                        let longest = self.show_progress(finished_before, total);
                        if reminder.is_due(&longest) {
                            self.view.remind(&longest);
                        }
                    }
                }
            }
        });
        self.show_progress(finished_before, total);
        traces.map_err(|e| match e {
            BatchError::Cancelled => Failure::interrupt(self.command, self.dir.path()),
            e @ BatchError::Store(_) => Failure::system(e.to_string()),
        })
    }

    /// Gives the episodes that have been in their phase for the longest.
    fn show_progress(&self, finished_before: u64, total: usize) -> Vec<LiveEpisode> {
        let (gauges, wall_s) = (self.parts.episode.gauges.read(), self.wall_s());
        let admission = self.parts.episode.admission.reading();
        let longest = self.parts.episode.gauges.longest(LONGEST);
        self.view.update(|s| {
            s.longest.clone_from(&longest);
            s.gauges = gauges;
            s.admission = admission;
            s.update = (0, 0);
            s.done = gauges.finished.saturating_sub(finished_before) as usize;
            s.total = total;
            s.wall_s = wall_s;
        });
        longest
    }

    /// Whether there was anything to do it with.
    fn one_step(&mut self) -> Result<bool, Failure> {
        let step = self.step + 1;
        self.view.update(|s| {
            s.step = step;
            s.phase = "rolling out".into();
        });
        let engine_before = self.parts.episode.engine.status();
        let admission_before = self.parts.episode.admission.reading();
        let started = Instant::now();
        let episodes = self.training_episodes(step)?;
        if self.parts.pool.is_some() && episodes.traces.is_empty() && episodes.dropped.is_empty() {
            return self.pool_is_dry();
        }
        let traces = episodes.traces;
        let rollout_s = started.elapsed().as_secs_f64();
        let engine = self.parts.episode.engine.status();
        let sampled: usize = traces.iter().map(Trace::sampled_tokens).sum();
        let mut record = StepRecord {
            step,
            rollout: EpisodeStats::of(&traces),
            failed_cause: sinew_pipeline::cause(&traces),
            rollout_s,
            engine_busy_s: engine.busy_s - engine_before.busy_s,
            sampled_tokens_per_s: sampled as f64 / rollout_s.max(1e-9),
            joins: joins(&traces),
            admission: AdmissionRecord::between(
                &admission_before,
                &self.parts.episode.admission.reading(),
                engine.preemptions.saturating_sub(engine_before.preemptions),
            ),
            retried: episodes.retried,
            recovered: episodes.recovered,
            refilled: episodes.refilled,
            ..StepRecord::default()
        };
        let groups = self.learn(step, traces, episodes.dropped, &mut record)?;
        if let (TasksSection::Adaptive(config), Some(mut next)) =
            (&self.recipe.tasks, episodes.curriculum)
        {
            next.update(config, groups.iter().flatten());
            if let Some(kinds) = &self.parts.task_kinds {
                record.task_shares = next.shares(config, kinds);
            }
            self.curriculum = next;
        }
        self.step = step;
        record.wall_s = self.wall_s();
        self.finish_step(record)?;
        Ok(true)
    }

    /// No group came in time: what was trained is kept, without any step there is no run.
    fn pool_is_dry(&mut self) -> Result<bool, Failure> {
        if *self.cancel.borrow() {
            return Err(Failure::interrupt(self.command, self.dir.path()));
        }
        let why = self.parts.pool.as_ref().map(PoolSource::why_dry);
        let why = why.unwrap_or_default();
        if self.step == 0 {
            return Err(Failure::input(format!(
                "data: the pool had no whole group for this recipe in data.wait_s{why}\n  hint: `sinew pool status` tells what waits there",
            )));
        }
        self.view.line(&format!(
            "the pool has no more groups for this run: ended after step {}{why}",
            self.step
        ));
        Ok(false)
    }

    /// Rows, optimizer step, ledger, publication of the weights.
    fn learn(
        &mut self,
        step: u64,
        traces: Vec<Trace>,
        dropped: BTreeMap<EpisodeId, String>,
        record: &mut StepRecord,
    ) -> Result<Vec<Vec<Trace>>, Failure> {
        self.view.update(|s| {
            s.phase = "training".into();
            (s.done, s.total, s.update) = (0, 0, (0, 0));
            s.tokens_per_s = 0.0;
        });
        let started = Instant::now();
        let mut groups = by_group(traces);
        let mut batch = self.parts.rows(&mut groups)?;
        batch.dropped.extend(dropped);
        record.rows = batch.rows.len();
        record.tokens = batch.tokens;
        record.formats = batch.formats.clone();
        record.repair = batch.report.repair.clone();
        if !record.tokens.holds() {
            return Err(Failure::system(format!(
                "step {step} would train tokens other than once: {:?}",
                record.tokens
            )));
        }
        for reason in batch.dropped.values() {
            *record.dropped.entry(reason.clone()).or_default() += 1;
        }
        if !batch.rows.is_empty() {
            let spec = self.parts.algorithm.loss().clone();
            self.parts.learner.step(&mut batch, &spec, record)?;
        }
        self.ledger.steps.push(LedgerStep {
            step,
            trained: batch.trained,
            dropped: batch.dropped,
        });
        record.train_s = started.elapsed().as_secs_f64();
        let publishing = Instant::now();
        self.parts.publish()?;
        record.publish_s = publishing.elapsed().as_secs_f64();
        Ok(groups)
    }

    fn finish_step(&mut self, mut record: StepRecord) -> Result<(), Failure> {
        let alarm = self.health.step(&record);
        let started = Instant::now();
        let every = self.recipe.train.checkpoint_every;
        let due = self.step.is_multiple_of(every) || self.step == self.recipe.train.steps;
        if due && self.health.bad().is_none() {
            self.save(&record)?;
        }
        record.checkpoint_s = started.elapsed().as_secs_f64();
        self.metrics.append(&record).map_err(Failure::system)?;
        self.view.line(&step_line(&record, self.recipe.train.steps));
        if self.json {
            crate::output::print_json(&serde_json::json!({ "step": record }));
        }
        self.view.update(|s| s.history.push(record.clone()));
        self.history.push(record);
        match alarm {
            Some(Alarm::Stop(why)) => return Err(self.stopped(&why)),
            Some(Alarm::Warning(text)) => self.view.warn(&text),
            None => self.view.update(|s| s.alarm = None),
        }
        self.refresh_report()?;
        self.during()
    }

    fn save(&mut self, record: &StepRecord) -> Result<(), Failure> {
        self.view.update(|s| s.phase = "saving a checkpoint".into());
        let state = begin::state_of(self, record)?;
        self.parts.save(&state)?;
        self.saved_step = self.step;
        Ok(())
    }

    /// Makes a checkpoint of steps that none holds, unless they have to be done again.
    fn save_if_needed(&mut self) -> Result<(), Failure> {
        let good = self.health.bad().is_none() && self.parts.learner.is_whole();
        if self.saved_step < self.step && good {
            let record = self.history.last().cloned().unwrap_or_default();
            self.save(&record)?;
        }
        Ok(())
    }
}

fn step_line(r: &StepRecord, steps: u64) -> String {
    if r.rows == 0 {
        let most = r.dropped.iter().max_by_key(|(_, episodes)| **episodes);
        return format!(
            "step {:>3}/{steps}  reward {:.3}  success {:>5.1} %  nothing to learn from: {}  {}",
            r.step,
            r.rollout.reward,
            100.0 * r.rollout.success,
            most.map_or("no episodes", |(reason, _)| reason),
            duration(r.wall_s)
        );
    }
    format!(
        "step {:>3}/{steps}  reward {:.3}  success {:>5.1} %  tokens/episode {:>5.1}  entropy {}  grad {:.2}  rollout {:.1}s  train {:.1}s  {}",
        r.step,
        r.rollout.reward,
        100.0 * r.rollout.success,
        r.rollout.sampled_tokens,
        r.entropy_text(),
        r.grad_norm,
        r.rollout_s,
        r.train_s,
        duration(r.wall_s)
    ) + &rewritten(r)
}

/// What is said of outside agents that do not extend what was captured.
fn rewritten(r: &StepRecord) -> String {
    match divergence(&r.joins) {
        Some(share) if share > 0.0 => {
            let alarm = if share > DIVERGENCE_ALARM {
                ", more than 5 %: see `sinew show RUN`"
            } else {
                ""
            };
            format!("  histories rewritten {:.1} %{alarm}", 100.0 * share)
        }
        _ => String::new(),
    }
}
