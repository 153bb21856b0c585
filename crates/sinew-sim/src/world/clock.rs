//! The clocks of the simulation, and the events to come.

use crate::agenda::{Agenda, Micros, micros, seconds};

/// The wall clock at the start, in milliseconds: room for a clock that is set back.
const WALL_MS: i64 = 1_000_000_000_000;

/// An episode's place in the slab, and the number of the happening that counts for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct At {
    /// Place in the slab.
    pub(super) slot: u32,
    /// Number of its stay in this place.
    pub(super) round: u32,
}

/// Event of the simulation.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Happening {
    Booted(At),
    ToolDone(At),
    Deadline(At),
    Stored(At),
    /// An engine has news, if this wake-up still counts.
    Engine(u32, u32),
    EngineBack(u32),
    EngineReady(u32),
    Scored(u64),
    Trained(u64),
    Transferred,
    Loaded,
    Look,
    Probe,
    RouterTick,
    Fault(u32),
    /// Another session begins after a kill.
    Session,
    /// A unit knows of its loss, is lost, is replaced.
    Notice(u32),
    Lost(u32),
    UnitBack(u32),
    /// Many units of a role are about to be lost at once.
    Wave(u32),
    /// Counts follow the work, and rent is added up.
    Tick,
    /// The ticket of an episode is given out again.
    Ticket(At),
}

impl Happening {
    /// Whether it outlives a kill of the run's process: engines and failures do.
    pub(super) fn outlives(&self) -> bool {
        matches!(
            self,
            Self::EngineBack(_)
                | Self::Fault(_)
                | Self::Session
                | Self::Engine(..)
                | Self::Notice(_)
                | Self::Lost(_)
                | Self::UnitBack(_)
                | Self::Wave(_)
                | Self::Tick
        )
    }
}

/// Virtual time, the wall clock, and future events.
#[derive(Debug, Default)]
pub(super) struct Clock {
    /// The virtual time.
    pub(super) now: Micros,
    /// Future events.
    pub(super) agenda: Agenda<Happening>,
    /// Lead of the wall clock over the virtual time, in milliseconds.
    wall_ahead_ms: i64,
    /// It was set at some time: a lease that began before may have run out since.
    pub(super) wall_was_set: bool,
}

impl Clock {
    /// Virtual seconds.
    pub(super) fn now_s(&self) -> f64 {
        seconds(self.now)
    }

    /// The wall clock, which can be set.
    pub(super) fn wall_ms(&self) -> u64 {
        (WALL_MS + (self.now / 1000) as i64 + self.wall_ahead_ms).max(0) as u64
    }

    /// Sets the wall clock forward, or back if `by_s` is negative.
    pub(super) fn set_wall(&mut self, by_s: f64) {
        self.wall_ahead_ms += (by_s * 1e3) as i64;
        self.wall_was_set = true;
    }

    /// Something happens later.
    pub(super) fn after(&mut self, delay_s: f64, what: Happening) {
        self.agenda.add(self.now + micros(delay_s), what);
    }
}
