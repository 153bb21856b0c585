//! A model made again: its live checkpoint, and the commands after it.

use super::{Present, Trainer, failed, journal_failed};
use crate::TinkerError;
use crate::desk::types::{ModelId, ModelSpec};
use std::time::Instant;

impl Trainer {
    /// Makes a model the current one, with the effects of all its commands that ended.
    pub(super) fn ready(&mut self, model: &ModelId, spec: &ModelSpec) -> Result<(), TinkerError> {
        if self.enter(model, spec)? {
            return Ok(());
        }
        let made = self.make_again(model, spec);
        if made.is_err() {
            self.forget(model);
        }
        made
    }

    fn make_again(&mut self, model: &ModelId, spec: &ModelSpec) -> Result<(), TinkerError> {
        let started = Instant::now();
        let id = model.clone();
        let plan = self.line.ask(move |clerk| clerk.replay_plan(&id));
        let plan = plan.map_err(journal_failed)?;
        let updates = match &plan.live {
            Some(folder) => {
                let (loaded, about) = self.folders.read(folder)?;
                let policy = self.residents.policy()?;
                let restored = policy.load(&loaded, &about.weights, about.updates);
                restored.map_err(failed)?;
                about.updates
            }
            None => {
                self.residents.restart()?;
                0
            }
        };
        self.residents.policy()?.zero_gradients()?;
        let mut present = Present::at(spec, updates, plan.covered);
        present.live_bytes = plan.live.as_ref().map(|_| plan.live_bytes);
        self.present.insert(model.clone(), present);
        let commands = plan.commands.len();
        for row in plan.commands {
            let request = row.request;
            let payload = self.line.ask(move |clerk| clerk.payload(&request));
            self.compute(model, &payload.map_err(journal_failed)?, row.cost)?;
        }
        let seconds = started.elapsed().as_secs_f64();
        tracing::info!(%model, commands, seconds, "a model was made again");
        Ok(())
    }
}
