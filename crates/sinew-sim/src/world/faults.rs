//! Failures of parts of the system, and their return.
//!
//! Engines and scorers are separate processes: a kill of the run's process leaves them running and cuts their
//! connections. The next session has only the data that were durable before the kill.

use super::World;
use super::clock::Happening;
use super::gate::Gate;
use crate::agenda::{Micros, micros};
use crate::plan::{Fault, FaultKind};
use sinew_engines::{AttemptError, Stage};
use sinew_orchestrator::PipelineCore;
use sinew_types::FailureKind;
use std::sync::Arc;

impl World {
    /// Makes failure `n` of the plan happen.
    pub(super) fn fault(&mut self, n: usize) {
        let fault = self.plan.faults[n];
        let engine = fault.target as usize % self.fleet.engines.len();
        let of_run = matches!(
            fault.kind,
            FaultKind::SandboxLoss | FaultKind::ToolHang | FaultKind::ScorerCrash
        );
        if self.dead && of_run {
            return;
        }
        match fault.kind {
            FaultKind::EngineCrash => self.crash(engine, fault.for_s),
            FaultKind::Partition => self.partition(engine, &fault),
            FaultKind::SandboxLoss => {
                if let Some(slot) = self.episodes.victim(fault.target) {
                    self.fail(slot, FailureKind::Sandbox, "the sandbox is gone");
                }
            }
            FaultKind::ToolHang => {
                if let Some(slot) = self.episodes.victim(fault.target) {
                    self.episodes[slot].hangs = true;
                }
            }
            FaultKind::ScorerCrash => self.rows.scorers.crash(),
            FaultKind::StorePause => {
                let until = self.clock.now + micros(fault.for_s);
                self.rows.scorers.paused_until = self.rows.scorers.paused_until.max(until);
            }
            FaultKind::SlowDisk => {
                self.rows.scorers.slow = (fault.by.max(0.0), self.clock.now + micros(fault.for_s));
            }
            FaultKind::ClockJump => self.clock.set_wall(fault.by),
            FaultKind::Kill => self.kill(&fault),
        }
    }

    /// Loses everything, and is back after `for_s`.
    pub(super) fn crash(&mut self, engine: usize, for_s: f64) {
        let until = self.clock.now + micros(for_s);
        self.clock
            .after(for_s, Happening::EngineBack(engine as u32));
        self.take_down(engine, until);
    }

    /// Loses everything until a time.
    pub(super) fn take_down(&mut self, engine: usize, until: Micros) {
        // Events that it had sent before have arrived.
        let cut = self.fleet.attempts_on(engine);
        let down = &mut self.fleet.engines[engine];
        down.down_until = down.down_until.max(until);
        down.crash();
        self.fleet.wake(engine, &mut self.clock);
        for attempt in cut {
            self.attempt_over(attempt, Err(AttemptError::Cut("the engine is gone".into())));
        }
    }

    /// Disconnects an engine.
    fn partition(&mut self, engine: usize, fault: &Fault) {
        let until = self.clock.now + micros(fault.for_s);
        let cut = self.fleet.attempts_on(engine);
        for attempt in &cut {
            self.fleet.engines[engine].cancel(*attempt, self.clock.now);
        }
        let away = &mut self.fleet.engines[engine];
        away.cut_until = away.cut_until.max(until);
        self.fleet.wake(engine, &mut self.clock);
        self.clock
            .after(fault.for_s, Happening::EngineBack(engine as u32));
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
        self.clock.agenda.retain(Happening::outlives);
        self.commands.clear();
        self.fleet.cancel_all(self.clock.now);
        self.units.empty(self.clock.now);
        self.ledger.killed();
        self.clock.after(fault.for_s, Happening::Session);
    }

    /// Another session continues from what is durable.
    pub(super) fn next_session(&mut self) {
        if !self.dead {
            return;
        }
        let checkpoint = self.kept.checkpoint;
        let grain = self.speed.grain;
        self.episodes.leave_all();
        self.held.clear();
        self.rows.begin_session();
        self.gate = Gate::new(&self.plan, grain);
        self.fleet
            .begin_session(&self.plan, grain, checkpoint, self.clock.now);
        let state = self.kept.core_state(self.plan.run.mode, &self.ledger);
        self.core = PipelineCore::new(Arc::clone(&self.config), state);
        self.updates = super::Updates::default();
        self.updates.version = checkpoint;
        self.ledger.goes_on(checkpoint);
        self.measure.sessions += 1;
        self.begin_session();
    }
}
