//! The main job: episodes, training signal, optimizer step, new weights, again and again.

mod episodes;
mod held_out;

use crate::admission::AdmissionRecord;
use crate::curriculum::Curriculum;
use crate::failure::Failure;
use crate::ledger::{Ledger, LedgerStep, Samples};
use crate::recipe::{Recipe, TasksSection};
use crate::record::{
    DIVERGENCE_ALARM, EpisodeStats, EvalRecord, MetricsFile, StepRecord, TokenSummary, divergence,
    joins,
};
use crate::report::Report;
use crate::run_dir::{RunDir, write_atomic};
use crate::signals::StopSignals;
use crate::summary;
use crate::view::{LONGEST, Reminder, Sampler, Status, View, duration};
use crate::wire::{Parts, SavedState};
use sinew_rollout::{BatchError, EpisodeOptions, EpisodeSpec, LiveEpisode, run_batch};
use sinew_types::{EpisodeId, Trace};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tokio::runtime::Runtime;
use tokio::sync::watch;

/// How the command was called.
#[derive(Clone, Debug)]
pub(crate) struct TrainOptions {
    /// `train` or `eval`.
    pub(crate) command: &'static str,
    pub(crate) resume: bool,
    pub(crate) json: bool,
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
    cancel: watch::Receiver<bool>,
    metrics: MetricsFile,
    evals: MetricsFile,
    history: Vec<StepRecord>,
    ledger: Ledger,
    /// Steps done, and the last of them that a checkpoint holds.
    step: u64,
    saved_step: u64,
    started: Instant,
    /// Wall time of earlier sessions of a resumed run.
    earlier_s: f64,
    curriculum: Curriculum,
    /// What an earlier session wrote of its first measurement.
    written_before: Option<EvalRecord>,
    /// Last step after which held-out tasks were measured in between.
    measured_at: u64,
}

/// Runs a recipe to its end and returns the last line for `--json`.
pub(crate) fn train(
    recipe: &Recipe,
    dir: &RunDir,
    options: &TrainOptions,
) -> Result<serde_json::Value, Failure> {
    let runtime = runtime()?;
    let mut run = Run::begin(recipe, dir, options, &runtime)?;
    let result = run.whole();
    if let Err(failure) = &result
        && failure.is_interrupt()
    {
        run.save_if_needed()?;
    }
    result
}

/// Runs a recipe's held-out tasks once, trains nothing, and returns the last line for `--json`.
pub(crate) fn evaluate(
    recipe: &Recipe,
    dir: &RunDir,
    options: &TrainOptions,
) -> Result<serde_json::Value, Failure> {
    let runtime = runtime()?;
    Run::begin(recipe, dir, options, &runtime)?.only_measured()
}

fn runtime() -> Result<Runtime, Failure> {
    Runtime::new().map_err(|e| Failure::system(format!("async runtime: {e}")))
}

/// A receiver that turns true at the first Ctrl-C or TERM signal.
fn cancel_on_signal(runtime: &Runtime) -> Result<watch::Receiver<bool>, Failure> {
    let (sender, receiver) = watch::channel(false);
    let _inside = runtime.enter();
    let mut signals = StopSignals::new()?;
    runtime.spawn(async move {
        signals.next().await;
        let _ = sender.send(true);
    });
    Ok(receiver)
}

impl<'a> Run<'a> {
    /// Loads all that the recipe names, and what a run that is resumed has done.
    fn begin(
        recipe: &'a Recipe,
        dir: &'a RunDir,
        options: &TrainOptions,
        runtime: &'a Runtime,
    ) -> Result<Self, Failure> {
        let cancel = cancel_on_signal(runtime)?;
        let status = Arc::new(Mutex::new(Status {
            title: recipe.name.clone(),
            phase: "loading the model".into(),
            steps: recipe.train.steps,
            ..Status::default()
        }));
        let started = Instant::now();
        let view = View::start(status, options.json);
        view.line(&format!("{}: loading the model", recipe.name));
        let (parts, saved) = Parts::build(recipe, dir, options.resume)?;
        let saved = saved.unwrap_or_default();
        let unusable = |path: PathBuf| {
            move |e: std::io::Error| Failure::system(format!("{}: {e}", path.display()))
        };
        let done = saved.step;
        let (mut metrics, mut history) =
            MetricsFile::open(&dir.metrics_path(), |r: &StepRecord| r.step <= done)
                .map_err(unusable(dir.metrics_path()))?;
        // The line of the last step, if the run ended between its checkpoint and the line.
        if let Ok(record) = serde_json::from_value::<StepRecord>(saved.record)
            && record.step == done
            && history.iter().all(|r| r.step != done)
        {
            metrics.append(&record).map_err(Failure::system)?;
            history.push(record);
        }
        let earlier = |r: &EvalRecord| match r.when.as_str() {
            "before" => done > 0,
            "during" => r.step <= done,
            _ => false,
        };
        let (evals, measured) =
            MetricsFile::open(&dir.evals_path(), earlier).map_err(unusable(dir.evals_path()))?;
        let during = measured.iter().filter(|r| r.when == "during");
        let measured_at = during.map(|r| r.step).max().unwrap_or(0);
        view.line(&parts.describe());
        view.update(|s| s.history.clone_from(&history));
        Ok(Self {
            command: options.command,
            recipe,
            dir,
            parts,
            runtime,
            view,
            json: options.json,
            cancel,
            metrics,
            evals,
            history,
            step: saved.step,
            saved_step: saved.step,
            ledger: saved.ledger,
            started,
            earlier_s: saved.wall_s,
            curriculum: saved.curriculum,
            written_before: measured.into_iter().find(|r| r.when == "before"),
            measured_at,
        })
    }
}

impl Run<'_> {
    fn only_measured(&mut self) -> Result<serde_json::Value, Failure> {
        let traces = self.evaluate("eval", 0)?;
        self.refuse_hopeless(&traces)?;
        let stats = self.with_greedy(&traces, "greedy", 0)?;
        self.measured("now", &stats)?;
        let wall_s = self.wall_s();
        if !self.json {
            self.stop_view();
            let example = traces.first().map(|t| t.episode.as_str());
            crate::output::print(&summary::measured(&stats, self.dir, wall_s, example));
        }
        Ok(serde_json::json!({ "eval": measures(&stats), "wall_s": wall_s }))
    }

    fn whole(&mut self) -> Result<serde_json::Value, Failure> {
        let (before, before_stats) = self.before()?;
        let success = before_stats.success;
        self.view.update(|s| s.eval_before = Some(success));
        self.during()?;
        while self.step < self.recipe.train.steps && !self.out_of_time() {
            if !self.one_step()? {
                break;
            }
        }
        self.save_if_needed()?;
        let after = self.evaluate("eval-after", self.step)?;
        let after_stats = self.with_greedy(&after, "greedy-after", self.step)?;
        self.measured("after", &after_stats)?;
        let samples = self.samples()?;
        self.write_report(&before_stats, &after_stats, &before, &after)?;
        let wall_s = self.wall_s();
        let tokens = TokenSummary::of(&self.history);
        self.view.update(|s| {
            s.phase = "done".into();
            s.wall_s = wall_s;
        });
        if !self.json {
            self.stop_view();
            let text = summary::text(&summary::Summary {
                recipe: self.recipe,
                dir: self.dir,
                before: &before_stats,
                after: &after_stats,
                history: &self.history,
                samples,
                tokens: &tokens,
                wall_s,
                examples: first_of([&before, &after]),
            });
            crate::output::print(&text);
        }
        let mut last = last_line(&before_stats, &after_stats, wall_s, samples);
        last["tokens"] = serde_json::json!(tokens);
        Ok(last)
    }

    /// Ends the live view, so that what follows is printed below it.
    fn stop_view(&mut self) {
        let quiet = View::start(Arc::new(Mutex::new(Status::default())), true);
        drop(std::mem::replace(&mut self.view, quiet));
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
                            self.view.remind(&longest, self.json);
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
        self.learn(step, &traces, episodes.dropped, &mut record)?;
        if let (TasksSection::Adaptive(config), Some(mut next)) =
            (&self.recipe.tasks, episodes.curriculum)
        {
            next.update(config, &traces);
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
        if self.step == 0 {
            return Err(Failure::input(
                "data: the pool had no whole group for this recipe in data.wait_s\n  hint: `sinew pool status` tells what waits there",
            ));
        }
        self.view.line(&format!(
            "the pool is empty: ended after step {}",
            self.step
        ));
        Ok(false)
    }

    /// Rows, optimizer step, ledger, publication of the weights.
    fn learn(
        &mut self,
        step: u64,
        traces: &[Trace],
        dropped: BTreeMap<EpisodeId, String>,
        record: &mut StepRecord,
    ) -> Result<(), Failure> {
        self.view.update(|s| {
            s.phase = "training".into();
            (s.done, s.total) = (s.total, s.total);
        });
        let started = Instant::now();
        let mut batch = self.parts.rows(traces)?;
        batch.dropped.extend(dropped);
        record.rows = batch.rows.len();
        record.tokens = batch.tokens;
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
        Ok(())
    }

    fn finish_step(&mut self, mut record: StepRecord) -> Result<(), Failure> {
        let started = Instant::now();
        let every = self.recipe.train.checkpoint_every;
        if self.step.is_multiple_of(every) || self.step == self.recipe.train.steps {
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
        self.during()
    }

    fn save(&mut self, record: &StepRecord) -> Result<(), Failure> {
        self.view.update(|s| s.phase = "saving a checkpoint".into());
        let state = SavedState {
            step: self.step,
            wall_s: self.wall_s(),
            ledger: self.ledger.clone(),
            curriculum: self.curriculum.clone(),
            record: serde_json::to_value(record).map_err(Failure::system)?,
        };
        self.parts.save(&state)?;
        self.saved_step = self.step;
        Ok(())
    }

    fn save_if_needed(&mut self) -> Result<(), Failure> {
        if self.saved_step < self.step {
            let record = self.history.last().cloned().unwrap_or_default();
            self.save(&record)?;
        }
        Ok(())
    }

    fn samples(&self) -> Result<Samples, Failure> {
        let stored = self.parts.stored_train_episodes()?;
        Ok(self.ledger.samples(&stored))
    }

    fn write_report(
        &self,
        before: &EpisodeStats,
        after: &EpisodeStats,
        episodes_before: &[Trace],
        episodes_after: &[Trace],
    ) -> Result<(), Failure> {
        let path = self.dir.recipe_path();
        let read = |p: &Path| std::fs::read_to_string(p).unwrap_or_default();
        let html = Report {
            title: &format!("Sinew run: {}", self.recipe.name),
            recipe_toml: &read(&path),
            steps: &self.history,
            before,
            after,
            episodes_before,
            episodes_after,
            renderer: self.parts.episode.renderer.as_ref(),
        }
        .html()
        .map_err(Failure::system)?;
        let report = self.dir.report_path();
        write_atomic(&report, html.as_bytes())
            .map_err(|e| Failure::system(format!("{}: {e}", report.display())))
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

/// The first episode of each.
fn first_of(traces: [&Vec<Trace>; 2]) -> Vec<String> {
    let first = |t: &Vec<Trace>| t.first().map(|t| t.episode.as_str().to_string());
    traces.into_iter().filter_map(first).collect()
}

/// Averages by name.
fn measures(s: &EpisodeStats) -> BTreeMap<String, f64> {
    let mut map = BTreeMap::from([
        ("success".to_string(), s.success),
        ("reward".into(), s.reward),
        ("turns".into(), s.turns),
        ("sampled_tokens".into(), s.sampled_tokens),
    ]);
    map.extend(s.greedy_success.map(|g| ("greedy_success".to_string(), g)));
    for (name, value) in &s.metrics {
        map.entry(name.clone()).or_insert(*value);
    }
    map
}

/// The object that scripts read.
fn last_line(
    before: &EpisodeStats,
    after: &EpisodeStats,
    wall_s: f64,
    samples: Samples,
) -> serde_json::Value {
    serde_json::json!({
        "eval": { "before": measures(before), "after": measures(after) },
        "wall_s": wall_s,
        "samples": samples,
    })
}
