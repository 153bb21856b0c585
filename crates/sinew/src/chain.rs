//! `sinew train` of a recipe with stages: each is a run in a separate folder, by the code of all runs.

use crate::track::{TrackArgs, Trackers};
use crate::train::{self, CommandEnd, TrainOptions};
use crate::{RunArgs, check, output, signals};
use serde_json::{Value, json};
use sinew_assembly::Failure;
use sinew_recipe::{ChainPlan, RunPlan};
use sinew_runs::Resume;
use sinew_runs::chain::{ChainDir, HandedWeights, StageStart, Stages, drive};
use std::path::{Path, PathBuf};
use tokio::runtime::Runtime;
use tokio::sync::watch;

/// Trains stages.
struct Trainer<'a> {
    /// The command line, which holds for every stage.
    args: &'a RunArgs,
    /// Trackers of every stage.
    track: Option<Trackers>,
    /// Arguments to repeat in the command that resumes.
    typed: String,
    /// Signals so far.
    signals: watch::Receiver<u32>,
}

/// Runs a chain, or continues with it.
///
/// # Errors
/// If a stage is refused, fails or is interrupted, with the command that resumes.
pub(crate) fn run(
    args: &RunArgs,
    track: &TrackArgs,
    chain: &ChainPlan,
) -> Result<CommandEnd, Failure> {
    let default = || PathBuf::from("runs").join(&chain.name);
    let path = args.run_dir.clone().unwrap_or_else(default);
    let trackers = track.trackers()?;
    let runtime = Runtime::new().map_err(Failure::system)?;
    let signals = signals::count(&runtime, args.stop_on_eof)?;
    if !sinew_runs::chain::holds_chain(&path) {
        for (at, stage) in chain.stages.iter().enumerate() {
            let folder = path.join(&stage.name);
            let checked = check::before_training(&folder, &chain.before_it_runs(at));
            checked.map_err(|e| e.of(&format!("stage {}", stage.name)))?;
        }
    }
    let mut dir = ChainDir::open(&path, chain, args.resume)?;
    let typed = args.serve.typed() + &track.typed();
    let mut stages = Trainer {
        args,
        track: trackers,
        typed: typed.clone(),
        signals,
    };
    let driven = drive(chain, &mut dir, &mut stages).map_err(|e| {
        let interrupt = interrupted(dir.path(), &typed);
        match e {
            Failure::Interrupt(_) => interrupt,
            Failure::Stopped(_) => interrupt.by_order(true),
            other => other,
        }
    });
    let reported = sinew_runs::chain::write_report(chain, &dir);
    // The stage's failure is reported first; a report that cannot be written often fails with it.
    driven?;
    reported?;
    if !args.json {
        output::print(&sinew_runs::chain::table(&dir));
    }
    Ok(CommandEnd {
        last: sinew_runs::chain::last_line(dir.ended()),
        trouble: None,
    })
}

/// The end of a chain by Ctrl-C or TERM, with the command that continues.
fn interrupted(dir: &Path, serve: &str) -> Failure {
    Failure::Interrupt(format!("interrupted; {}", how_to_go_on(dir, serve)))
}

/// Message about the kept parts of a chain, and the command that resumes.
pub(crate) fn how_to_go_on(dir: &Path, serve: &str) -> String {
    let dir = dir.display();
    format!(
        "stages that ended, episodes and steps are kept\n  hint: go on with `sinew train {dir}/chain.toml --run-dir {dir} --resume{serve}`"
    )
}

impl Stages for Trainer<'_> {
    type Error = Failure;

    /// Says which stage begins and with which weights; after a signal, no further stage begins.
    fn begin(&mut self, begin: &StageStart<'_>) -> Result<(), Failure> {
        if *self.signals.borrow() > 0 {
            return Err(Failure::Interrupt(String::new()));
        }
        let from = begin.from.map(|end| {
            let (name, checkpoint, weights) = (&end.name, &end.checkpoint, &end.weights);
            json!({ "stage": name, "checkpoint": checkpoint, "weights": weights })
        });
        let n = begin.at + 1;
        if self.args.json {
            let stage = json!({ "name": begin.name, "n": n, "of": begin.of, "from": from });
            output::print_json(&json!({ "stage": stage }));
            return Ok(());
        }
        let with = begin.from.map_or_else(
            || "a model of its own".to_owned(),
            |end| {
                format!(
                    "{} of {}, to the bit: BLAKE3 {}",
                    end.checkpoint, end.name, end.weights
                )
            },
        );
        output::say_error(&format!(
            "stage {n} of {}: {}, begins with {with}\n",
            begin.of, begin.name
        ));
        Ok(())
    }

    /// Trains one stage in its folder, and gives its last line. A folder that holds a run already is resumed.
    fn run(&mut self, plan: &RunPlan, folder: &Path) -> Result<Value, Failure> {
        self.args.serve.address(plan)?;
        let resume = sinew_runs::holds_run(folder).then(|| Resume {
            allow_change: self.args.allow_change.clone(),
        });
        let options = TrainOptions {
            command: "train",
            resume,
            json: self.args.json,
            // Counted with the signals.
            stop_on_eof: false,
            serve: self.args.serve.clone(),
            typed: self.typed.clone(),
            view: self.args.view,
            signals_to: self.args.signals()?,
            adapter: None,
            track: self.track.clone(),
            tasks: None,
            accept_loss: self.args.accept_loss,
            signals: Some(self.signals.clone()),
            go_on: None,
        };
        let ended = crate::execute(folder, plan, check::before_training, train::train, &options);
        let stage = folder.file_name().unwrap_or_default().to_string_lossy();
        let stage = format!("stage {stage}");
        let ended = ended.map_err(|e| e.of(&stage))?;
        let bad = ended.trouble.map(|e| e.of(&stage));
        bad.map_or(Ok(ended.last), Err)
    }

    /// The newest whole checkpoint of a stage, and the BLAKE3 hash of its weights with adapters merged.
    fn weights(&mut self, folder: &Path) -> Result<HandedWeights, Failure> {
        let run = sinew_assembly::RunModel::open(folder)?;
        let checkpoint = run.checkpoint()?;
        let name = checkpoint.file_name().unwrap_or_default();
        let params = run.params()?;
        let hash = blake3::hash(bytemuck::cast_slice(params.values()));
        Ok(HandedWeights {
            checkpoint: name.to_string_lossy().into_owned(),
            weights: hash.to_hex().to_string(),
        })
    }
}
