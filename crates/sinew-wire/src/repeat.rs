//! Steps of a run, done again in a copy of its folder from the episodes that its commits name.

use crate::failure::Failure;
use crate::step_changes::StopAfter;
use crate::{Invocation, ServeAt, Session, pipeline, tasks};
use sinew_judge::Bench;
use sinew_pipeline::{Bus, Goal, StepRecord, run};
use sinew_project::{Resume, RunDir, checkpoint_of, copy_before};
use sinew_train::checkpoint::weights_hash;
use std::path::Path;
use std::time::Instant;
use tokio::runtime::Handle;
use tokio::sync::watch;

/// Steps that were done again.
#[derive(Debug)]
pub struct Repeated {
    /// Step of the checkpoint that they began with; 0: the first weights.
    pub from: u64,
    /// Records of now, in order.
    pub records: Vec<StepRecord>,
    /// Hash of the weights after the last step, then and now; `None`: no checkpoint of it is kept.
    pub weights: Option<(String, String)>,
}

/// Does the steps of a run up to `step` again, from the newest checkpoint before it, in a copy at `copy`
/// outside the run. What the steps trained on is what was committed: no episode is run.
///
/// # Errors
/// If the run keeps no episodes on disk, a part of it is gone, or the copy cannot be made.
pub fn repeat_steps(
    (run_dir, copy): (&Path, &Path),
    step: u64,
    runtime: Handle,
    cancel: watch::Receiver<bool>,
) -> Result<Repeated, Failure> {
    let from = copy_before(run_dir, copy, step);
    let from = from.map_err(|e| Failure::system(format!("{}: {e}", copy.display())))?;
    let recipe = sinew_project::recipe(copy)?;
    let dir = RunDir::open(copy, &recipe, Some(&Resume::default())).map_err(Failure::input)?;
    let (bus, stop) = (Bus::default(), StopAfter::new(step));
    bus.record(Box::new(stop.clone()));
    let resume = Resume::default();
    let session = Session {
        dir: &dir,
        resume: Some(&resume),
        tasks: tasks(&recipe)?,
        runtime,
        bus,
        cancel: cancel.clone(),
        bench: Bench::default(),
        started: Instant::now(),
        serve: ServeAt::default(),
    };
    let how = Invocation {
        goal: Goal::Train,
        command: "replay",
        accept_loss: false,
    };
    let (pipeline, _) = pipeline(&recipe, how, session)?;
    match run(pipeline) {
        Ok(_) => {}
        Err(e) if e.is_interrupt() && !*cancel.borrow() => {}
        Err(e) => return Err(e.into()),
    }
    let hash = |folder: &Path| -> Result<Option<String>, Failure> {
        let checkpoint = checkpoint_of(folder, step).map_err(Failure::system)?;
        let hash = checkpoint.map(|c| weights_hash(&c)).transpose();
        hash.map_err(Failure::system)
    };
    let records = stop.records().into_iter();
    Ok(Repeated {
        from,
        records: records.filter(|r| r.step > from).collect(),
        weights: hash(run_dir)?.zip(hash(copy)?),
    })
}
