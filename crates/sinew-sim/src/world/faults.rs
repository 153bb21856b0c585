//! Failures of parts of the system, and their return.
//!
//! Engines and scorers are separate processes: a kill of the run's process leaves them running and cuts their
//! connections. The next session has only the data that were durable before the kill.

use super::rows::Scorers;
use super::{Happening, World, admission, router};
use crate::agenda::micros;
use crate::plan::{Fault, FaultKind};
use sinew_engines::{AttemptError, AttemptId, Stage};
use sinew_orchestrator::PipelineCore;
use sinew_rollout::OutlookCore;
use sinew_types::FailureKind;
use std::sync::Arc;

impl World {
    /// Makes failure `n` of the plan happen.
    pub(super) fn fault(&mut self, n: usize) {
        let fault = self.plan.faults[n];
        let engine = fault.target as usize % self.engines.len();
        let of_run = matches!(
            fault.kind,
            FaultKind::SandboxLoss | FaultKind::ToolHang | FaultKind::ScorerCrash
        );
        if self.dead && of_run {
            return;
        }
        match fault.kind {
            FaultKind::EngineCrash => self.crash(engine, &fault),
            FaultKind::Partition => self.partition(engine, &fault),
            FaultKind::SandboxLoss => {
                if let Some(slot) = self.victim(&fault) {
                    self.fail(slot, FailureKind::Sandbox, "the sandbox is gone");
                }
            }
            FaultKind::ToolHang => {
                if let Some(slot) = self.victim(&fault) {
                    self.episodes[slot as usize].hangs = true;
                }
            }
            FaultKind::ScorerCrash => self.scorers.crash(),
            FaultKind::StorePause => {
                let until = self.now + micros(fault.for_s);
                self.scorers.paused_until = self.scorers.paused_until.max(until);
            }
            FaultKind::SlowDisk => {
                self.scorers.slow = (fault.by.max(0.0), self.now + micros(fault.for_s));
            }
            FaultKind::ClockJump => {
                self.wall_ahead_ms += (fault.by * 1e3) as i64;
                self.wall_was_set = true;
            }
            FaultKind::Kill => self.kill(&fault),
        }
    }

    /// A live episode, by the fault's number.
    fn victim(&self, fault: &Fault) -> Option<u32> {
        let live: Vec<u32> = (0..self.episodes.len() as u32)
            .filter(|slot| self.episodes[*slot as usize].has_sandbox())
            .collect();
        let count = live.len().max(1) as u64;
        live.get((fault.target % count) as usize).copied()
    }

    /// Attempts that run on an engine.
    fn attempts_on(&self, engine: usize) -> Vec<AttemptId> {
        let here = self.attempts.iter().filter(|(_, (e, _))| *e == engine);
        let mut here: Vec<AttemptId> = here.map(|(id, _)| *id).collect();
        here.sort_unstable();
        here
    }

    /// Loses everything.
    fn crash(&mut self, engine: usize, fault: &Fault) {
        let until = self.now + micros(fault.for_s);
        // Events that it had sent before have arrived.
        let cut = self.attempts_on(engine);
        let down = &mut self.engines[engine];
        down.down_until = down.down_until.max(until);
        down.crash();
        self.wake(engine);
        self.after(fault.for_s, Happening::EngineBack(engine as u32));
        for attempt in cut {
            self.attempt_over(attempt, Err(AttemptError::Cut("the engine is gone".into())));
        }
    }

    /// Disconnects an engine.
    fn partition(&mut self, engine: usize, fault: &Fault) {
        let until = self.now + micros(fault.for_s);
        let cut = self.attempts_on(engine);
        for attempt in &cut {
            self.engines[engine].cancel(*attempt, self.now);
        }
        let away = &mut self.engines[engine];
        away.cut_until = away.cut_until.max(until);
        self.wake(engine);
        self.after(fault.for_s, Happening::EngineBack(engine as u32));
        for attempt in cut {
            let stage = Stage::BetweenTokens;
            let limit_s = fault.for_s;
            self.attempt_over(attempt, Err(AttemptError::Timeout { stage, limit_s }));
        }
    }

    /// The process of the run is gone with all that it knew.
    fn kill(&mut self, fault: &Fault) {
        if self.dead {
            return;
        }
        self.dead = true;
        self.agenda.retain(Happening::outlives);
        self.commands.clear();
        for engine in 0..self.engines.len() {
            for attempt in self.attempts_on(engine) {
                self.engines[engine].cancel(attempt, self.now);
            }
        }
        self.attempts.clear();
        self.ledger.killed();
        self.after(fault.for_s, Happening::Session);
    }

    /// Another session continues from what is durable.
    pub(super) fn next_session(&mut self) {
        if !self.dead {
            return;
        }
        let checkpoint = self.kept.checkpoint;
        let grain = self.speed.grain;
        for slot in 0..self.episodes.len() as u32 {
            if self.episodes[slot as usize].doing != super::episodes::EpisodeState::Nothing {
                self.leave(slot);
            }
        }
        self.by_id.clear();
        self.waiting.clear();
        self.tickets.clear();
        self.held.clear();
        self.attempts.clear();
        self.tick_at = None;
        let open = (self.scorers.paused_until, self.scorers.slow);
        self.scorers = Scorers::new(self.plan.scoring.scorers);
        (self.scorers.paused_until, self.scorers.slow) = open;
        self.admission = admission(&self.plan, grain);
        self.outlook = OutlookCore::default();
        self.router = router(&self.plan, grain, checkpoint);
        self.core = PipelineCore::new(Arc::clone(&self.config), self.state());
        self.updates = super::Updates::default();
        self.updates.version = checkpoint;
        self.ledger.goes_on(checkpoint);
        for engine in 0..self.engines.len() {
            if self.engines[engine].is_up(self.now) {
                self.engines[engine].load(checkpoint);
            }
        }
        self.measure.sessions += 1;
        self.begin_session();
    }
}
