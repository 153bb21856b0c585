//! Weights of a run for engines of other processes: `engine.weights_dir` with an engine of this process.

use crate::Session;
use crate::failure::Failure;
use crate::first_weights::FirstWeights;
use crate::model::model_folder;
use crate::torch::EngineSlot;
use sinew_engines::{FolderDtype, Publisher, SharedWeights, WeightsFolder};
use sinew_orchestrator::{Bus, PipelineError, RunEvent};
use sinew_pipeline::WeightsTransport;
use sinew_recipe::{EngineType, RunPlan, Transfer};
use sinew_types::{Engine, PolicyVersion, TensorSource};
use std::sync::Arc;

/// The engine of this process, and a folder that others follow.
struct Publishing {
    engine: Arc<dyn Engine>,
    publisher: Publisher,
}

impl WeightsTransport for Publishing {
    /// Waits only for the engine of this process.
    fn publish(
        &mut self,
        version: PolicyVersion,
        weights: Arc<dyn TensorSource>,
    ) -> Result<(), PipelineError> {
        self.engine.publish(version, Arc::clone(&weights))?;
        self.publisher.offer(version, weights);
        Ok(())
    }
}

/// An engine that sleeps while the trainer uses its GPUs: it loads weights, and then takes back the memory of
/// its KV cache.
struct Waking(Arc<dyn Engine>);

impl WeightsTransport for Waking {
    fn publish(
        &mut self,
        version: PolicyVersion,
        weights: Arc<dyn TensorSource>,
    ) -> Result<(), PipelineError> {
        self.0.publish(version, weights)?;
        let woken = self.0.wake();
        woken.map_err(|e| PipelineError::system(format!("engine: {e}")))
    }
}

/// Transport of new weights to the engines that sample. The weights that the run begins with are published at
/// once.
pub(crate) fn transport(
    recipe: &RunPlan,
    engine: Arc<dyn Engine>,
    first: FirstWeights,
    turns: Option<EngineSlot>,
    session: &Session<'_>,
) -> Result<Box<dyn WeightsTransport>, Failure> {
    if let Some(slot) = turns {
        // The slot is empty: this is the only engine of the run.
        let _ = slot.0.set(Arc::clone(&engine));
        return Ok(Box::new(Waking(engine)));
    }
    let section = &recipe.engine;
    let dir = match &section.weights_dir {
        Some(dir) if section.kind == EngineType::Embedded => dir,
        _ => return Ok(Box::new(engine)),
    };
    let base = model_folder(&recipe.model)?;
    let folder = WeightsFolder::new(dir, base, FolderDtype::F32).fenced(first.fence);
    let deltas = section.weights_transfer != Some(Transfer::Full);
    let bus = session.bus.clone();
    let publisher = Publisher::start(
        SharedWeights::new(folder, first.lineage, deltas),
        Box::new(move |version, published| {
            if let Err(e) = published {
                warn(&bus, version, &e);
            }
        }),
    );
    let publisher = publisher.map_err(Failure::system)?;
    publisher.offer(first.version, first.tensors);
    Ok(Box::new(Publishing { engine, publisher }))
}

/// Warns that a version was not published. The run continues, and engines that follow it continue with the
/// previous version.
fn warn(bus: &Bus, version: PolicyVersion, why: &dyn std::fmt::Display) {
    let text = format!("weights {} were not published: {why}", version.0);
    // A warning that cannot be recorded ends the run elsewhere.
    let _ = bus.emit(RunEvent::Warning(text));
}
