//! Runs the stages that have not ended, one after the other.

use crate::chain::folder::{ChainDir, ChainError, StageEnd, recipe_hash};
use crate::chain::report::write_report;
use serde_json::{Value, json};
use sinew_recipe::{ChainPlan, RunPlan};
use std::path::Path;

/// The weights that the folder of a run gives to whatever begins with it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HandedWeights {
    /// Name of the checkpoint's folder.
    pub checkpoint: String,
    /// BLAKE3 of the weights in 32 bits, adapters merged: 64 hexadecimal digits.
    pub weights: String,
}

/// A stage that is about to run.
#[derive(Debug)]
pub struct StageStart<'a> {
    /// Position of the stage, from 0.
    pub at: usize,
    /// Number of stages.
    pub of: usize,
    /// Name of the stage.
    pub name: &'a str,
    /// The stage whose weights it begins with, which were found to be as it ended; `None`: its own model.
    pub from: Option<&'a StageEnd>,
}

/// Trains the stages of a chain.
pub trait Stages {
    /// Reason why it failed.
    type Error: From<ChainError>;

    /// A stage is about to run, or to continue.
    ///
    /// # Errors
    /// If the chain is asked to stop.
    fn begin(&mut self, begin: &StageStart<'_>) -> Result<(), Self::Error>;

    /// Runs a stage in its folder to its end, from where it was: the last line of the run.
    ///
    /// # Errors
    /// Reason why it did not come to a good end.
    fn run(&mut self, plan: &RunPlan, folder: &Path) -> Result<Value, Self::Error>;

    /// The newest weights of the run in a folder.
    ///
    /// # Errors
    /// If they cannot be read.
    fn weights(&mut self, folder: &Path) -> Result<HandedWeights, Self::Error>;
}

/// Runs every stage that has not ended. It may be stopped at any instant, and called again.
///
/// # Errors
/// Fails if a stage does, or if the weights that a stage begins with differ from those that the stage before
/// left.
pub fn drive<S: Stages>(
    chain: &ChainPlan,
    dir: &mut ChainDir,
    stages: &mut S,
) -> Result<(), S::Error> {
    while let Some(stage) = chain.stages.get(dir.ended().len()) {
        let at = dir.ended().len();
        let reads = chain.weights_of(at);
        for before in dir.ended().iter().filter(|e| reads.contains(&e.name)) {
            let folder = dir.stage(&before.name);
            let found = stages.weights(&folder)?.weights;
            if found != before.weights {
                return Err(S::Error::from(ChainError::Weights {
                    stage: before.name.clone(),
                    expected: before.weights.clone(),
                    found,
                    folder,
                }));
            }
        }
        stages.begin(&StageStart {
            at,
            of: chain.stages.len(),
            name: &stage.name,
            from: dir.ended().last().filter(|_| !stage.own_model),
        })?;
        let folder = dir.stage(&stage.name);
        let last = stages.run(&chain.run(at, dir.path()), &folder)?;
        let handed = stages.weights(&folder)?;
        dir.end(StageEnd {
            name: stage.name.clone(),
            recipe: recipe_hash(stage),
            steps: stage.plan.train.steps,
            checkpoint: handed.checkpoint,
            weights: handed.weights,
            last,
        })?;
        write_report(chain, dir)?;
    }
    Ok(())
}

/// The last line of a chain: that of a run over all stages, and each stage.
pub fn last_line(ended: &[StageEnd]) -> Value {
    let eval = |end: Option<&StageEnd>, key: &str| {
        end.map_or(Value::Null, |e| e.last["eval"][key].clone())
    };
    let mut whole = json!({
        "eval": { "before": eval(ended.first(), "before"), "after": eval(ended.last(), "after") },
        "wall_s": 0.0,
        "samples": {},
        "tokens": {},
        "trouble": [],
    });
    let mut stages = Vec::new();
    for end in ended {
        for key in ["wall_s", "samples", "tokens"] {
            add(&mut whole[key], &end.last[key]);
        }
        let mut stage = end.last.clone();
        stage["name"] = end.name.clone().into();
        stage["checkpoint"] = end.checkpoint.clone().into();
        stage["weights"] = end.weights.clone().into();
        stages.push(stage);
    }
    whole["stages"] = stages.into();
    whole
}

/// Adds numbers to numbers, in objects by their keys.
fn add(sum: &mut Value, more: &Value) {
    match (&mut *sum, more) {
        (Value::Object(sum), Value::Object(more)) => {
            for (key, value) in more {
                add(sum.entry(key.clone()).or_insert(Value::Null), value);
            }
        }
        (Value::Number(a), Value::Number(b)) => {
            *sum = match (a.as_u64(), b.as_u64()) {
                (Some(a), Some(b)) => json!(a + b),
                _ => json!(a.as_f64().unwrap_or_default() + b.as_f64().unwrap_or_default()),
            };
        }
        (Value::Null, more) => *sum = more.clone(),
        _ => {}
    }
}
