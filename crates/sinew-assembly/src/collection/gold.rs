//! The environment's gold policy in place of an engine.

use sinew_orchestrator::{Draw, PipelineError, RolloutProgress};
use sinew_pipeline::{RolloutReading, Rollouts, StoredEpisode};
use sinew_sources::GoldRuns;
use sinew_store::TraceStore;
use sinew_types::Trace;
use std::collections::VecDeque;
use std::sync::Arc;
use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio::task::JoinSet;

/// Plays gold runs as episodes. Their tokens have the log-probability 0: no policy has scored them.
#[derive(Debug)]
pub struct GoldRollouts {
    runs: Arc<GoldRuns>,
    store: Arc<dyn TraceStore>,
    seed: u64,
    runtime: Handle,
    /// Turning true ends a wait.
    cancel: watch::Receiver<bool>,
    waiting: VecDeque<Draw>,
    running: JoinSet<Result<Trace, PipelineError>>,
    known: Vec<StoredEpisode>,
}

impl GoldRollouts {
    /// Plays nothing yet. `seed` is that of the recipe.
    pub fn new(
        runs: Arc<GoldRuns>,
        store: Arc<dyn TraceStore>,
        seed: u64,
        runtime: Handle,
        cancel: watch::Receiver<bool>,
    ) -> Self {
        Self {
            runs,
            store,
            seed,
            runtime,
            cancel,
            waiting: VecDeque::new(),
            running: JoinSet::new(),
            known: Vec::new(),
        }
    }

    fn fill(&mut self) {
        while self.running.len() < self.runs.max_in_flight.max(1)
            && let Some(draw) = self.waiting.pop_front()
        {
            let (runs, seed) = (Arc::clone(&self.runs), self.seed);
            let play = async move {
                let mut trace = runs.play(seed, draw.draw, draw.task).await?;
                trace.episode = draw.episode;
                Ok(trace)
            };
            self.running.spawn_on(play, &self.runtime);
        }
    }
}

fn unchanged(trace: Trace, known: bool) -> StoredEpisode {
    StoredEpisode {
        trace,
        known,
        changed: None,
        rescored: false,
    }
}

impl Rollouts for GoldRollouts {
    fn start(&mut self, draws: &[Draw], _: Option<f32>) -> Result<(), PipelineError> {
        for draw in draws {
            let stored = self.store.get(&draw.episode);
            match stored.map_err(PipelineError::system)? {
                Some(trace) => self.known.push(unchanged(trace, true)),
                None => self.waiting.push_back(draw.clone()),
            }
        }
        self.fill();
        Ok(())
    }

    fn ended(
        &mut self,
        _: &mut dyn FnMut(RolloutProgress),
    ) -> Result<Vec<StoredEpisode>, PipelineError> {
        if !self.known.is_empty() {
            return Ok(std::mem::take(&mut self.known));
        }
        let (running, cancel) = (&mut self.running, &mut self.cancel);
        let first = self.runtime.block_on(async {
            tokio::select! {
                first = running.join_next() => Ok(first),
                _ = cancel.wait_for(|&stop| stop) => Err(PipelineError::Interrupted),
            }
        })?;
        let mut traces = Vec::new();
        let mut next = first;
        while let Some(done) = next {
            traces.push(done.map_err(PipelineError::system)??);
            next = self.running.try_join_next();
        }
        // The others are played while the disk is waited for.
        self.fill();
        let stored = self.store.commit_batch(&traces);
        stored.map_err(PipelineError::system)?;
        let new = traces.into_iter().map(|trace| unchanged(trace, false));
        Ok(new.collect())
    }

    fn is_running(&self) -> bool {
        !(self.running.is_empty() && self.waiting.is_empty() && self.known.is_empty())
    }

    fn reading(&self) -> RolloutReading {
        RolloutReading::default()
    }
}
