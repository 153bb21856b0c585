//! How a run starts: all that its recipe names, and what earlier sessions did.

use super::{Run, TrainOptions};
use crate::failure::Failure;
use crate::recipe::Recipe;
use crate::run_dir::RunDir;
use crate::signals::StopSignals;
use crate::view::{Status, Teller, View};
use crate::wire::{Parts, SavedState};
use sinew_pipeline::Health;
use sinew_pipeline::{Damage, EvalRecord, MetricsFile, Record, StepRecord};
use sinew_train::Progress;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Instant;
use tokio::runtime::Runtime;
use tokio::sync::watch;

/// Exit code of a run that a second signal ends at once.
const INTERRUPTED: i32 = 130;

/// The first signal makes `sender` true and is answered at once; the second ends the process. What is
/// committed stays, as after `kill -9`.
#[expect(
    clippy::disallowed_methods,
    reason = "the second signal asks for no clean end, and the main thread may be deep in a pass"
)]
fn stop_on_signal(
    runtime: &Runtime,
    mut signals: StopSignals,
    sender: watch::Sender<bool>,
    teller: Teller,
) {
    runtime.spawn(async move {
        signals.next().await;
        let _ = sender.send(true);
        teller.note("stopping: the work at hand ends, then a checkpoint is made; Ctrl-C once more ends at once");
        teller.update(|s| s.phase = "stopping".into());
        signals.next().await;
        teller.leave_terminal();
        std::process::exit(INTERRUPTED);
    });
}

/// A file of records with those of a checkpoint that it lacks.
fn records<T: Record>(
    path: &Path,
    known: &[T],
    keep: impl Fn(&T) -> bool,
    view: &View,
) -> Result<(MetricsFile, Vec<T>), Failure> {
    let opened = MetricsFile::open(path, known, keep);
    let (file, kept, damage) =
        opened.map_err(|e| Failure::system(format!("{}: {e}", path.display())))?;
    let Damage {
        unreadable,
        rebuilt,
    } = damage;
    if unreadable > 0 {
        view.warn(&format!(
            "{}: {unreadable} lines could not be read; {rebuilt} records were written again from the checkpoint",
            path.display()
        ));
    }
    Ok((file, kept))
}

/// What earlier sessions wrote, as far as the checkpoint goes.
struct Written {
    metrics: MetricsFile,
    history: Vec<StepRecord>,
    evals: MetricsFile,
    measured: Vec<EvalRecord>,
}

impl Written {
    fn open(dir: &RunDir, saved: &SavedState, view: &View) -> Result<Self, Failure> {
        let done = saved.step;
        let steps = |r: &StepRecord| r.step <= done;
        let (metrics, history) = records(&dir.metrics_path(), &saved.history, steps, view)?;
        if (history.len() as u64) < done {
            let missing = done - history.len() as u64;
            view.warn(&format!(
                "the records of {missing} steps are gone: counts at the end leave them out"
            ));
        }
        let earlier = |r: &EvalRecord| match r.when.as_str() {
            "before" => done > 0,
            "during" => r.step <= done,
            _ => false,
        };
        let (evals, measured) = records(&dir.evals_path(), &saved.evals, earlier, view)?;
        Ok(Self {
            metrics,
            history,
            evals,
            measured,
        })
    }
}

/// The last step after which held-out tasks were measured in between.
fn last_between(measured: &[EvalRecord]) -> u64 {
    let during = measured.iter().filter(|r| r.when == "during");
    during.map(|r| r.step).max().unwrap_or(0)
}

/// Shows the progress of training steps, and the time since the run began.
fn follow(
    parts: &mut Parts,
    cancel: watch::Receiver<bool>,
    teller: Teller,
    (started, earlier_s): (Instant, f64),
) {
    let tell = move |p: &Progress| {
        teller.update(|s| {
            s.wall_s = earlier_s + started.elapsed().as_secs_f64();
            (s.done, s.total) = (p.micro_batch, p.micro_batches);
            s.update = (p.update + 1, p.updates);
        });
    };
    parts.learner.follow(cancel, tell);
}

impl<'a> Run<'a> {
    /// Loads all that the recipe names, and what a run that is resumed has done.
    pub(super) fn begin(
        recipe: &'a Recipe,
        dir: &'a RunDir,
        options: &TrainOptions,
        runtime: &'a Runtime,
    ) -> Result<Self, Failure> {
        let signals = {
            let _inside = runtime.enter();
            StopSignals::new()?
        };
        let started = Instant::now();
        let view = View::start(
            Arc::new(Mutex::new(Status {
                title: recipe.name.clone(),
                phase: "loading the model".into(),
                steps: recipe.train.steps,
                ..Status::default()
            })),
            options.json,
        );
        view.line(&format!("{}: loading the model", recipe.name));
        let (sender, cancel) = watch::channel(false);
        stop_on_signal(runtime, signals, sender, view.teller());
        let (mut parts, saved) = Parts::build(recipe, dir, options.resume.as_ref())?;
        dir.write_recipe(recipe).map_err(Failure::input)?;
        let saved = saved.unwrap_or_default();
        let since = (started, saved.wall_s);
        follow(&mut parts, cancel.clone(), view.teller(), since);
        let done = saved.step;
        let written = Written::open(dir, &saved, &view)?;
        let (history, measured) = (written.history, written.measured);
        view.line(&parts.describe());
        view.update(|s| s.history.clone_from(&history));
        let mut run = Self {
            command: options.command,
            recipe,
            dir,
            parts,
            runtime,
            view,
            json: options.json,
            resumed: options.resume.is_some(),
            accept_loss: options.accept_loss,
            cancel,
            metrics: written.metrics,
            evals: written.evals,
            health: Health::after(&history),
            history,
            step: done,
            saved_step: done,
            // What a store in memory held ended with the session.
            since: if recipe.store.kind == "memory" {
                done
            } else {
                0
            },
            lost_now: 0,
            ledger: saved.ledger,
            started,
            earlier_s: saved.wall_s,
            curriculum: saved.curriculum,
            written_before: measured.iter().find(|r| r.when == "before").cloned(),
            measured_at: last_between(&measured),
            measurements: measured,
            before: None,
            reported: None,
        };
        run.note_lost()?;
        Ok(run)
    }

    /// Looks for trained episodes that the store no longer has.
    pub(super) fn note_lost(&mut self) -> Result<(), Failure> {
        let gone = self.ledger.note_lost(&self.parts.stored()?, self.since);
        if let Some(first) = gone.first() {
            self.lost_now += gone.len();
            self.view.warn(&format!(
                "{} trained episodes are gone from the store, {first} the first of them: the weights keep what they taught, but nobody can look at them",
                gone.len()
            ));
        }
        Ok(())
    }
}

/// What a checkpoint of the run says, with the records up to `last`.
pub(super) fn state_of(run: &Run<'_>, last: &StepRecord) -> Result<SavedState, Failure> {
    let mut history = run.history.clone();
    if history.last().is_none_or(|r| r.step < last.step) {
        history.push(last.clone());
    }
    Ok(SavedState {
        step: run.step,
        wall_s: run.wall_s(),
        ledger: run.ledger.clone(),
        curriculum: run.curriculum.clone(),
        recipe: toml::to_string(run.recipe).map_err(Failure::system)?,
        history,
        evals: run.measurements.clone(),
    })
}
