//! The way of an episode: task, environment, render, generate, act, observe, score, store.
//!
//! [`EpisodeMachine`] is the pure core: events in, commands out. [`run_episode`] carries its
//! commands out; [`Runner`] runs hundreds of them side by side, so that the engine works
//! while tools run. [`AdmissionCore`], pure as well, says who may start and who may generate
//! next: as many as the engine's key-value room bears. A [`Harness`] that is not the built-in loop lets an
//! outside program drive the turns. Invariants: every episode that was begun ends in exactly one trace,
//! valid and committed before anyone is told; a failure is data with a typed reason; rollout knows no
//! concrete engine, environment or store.

mod action;
mod admission;
mod batch;
mod driver;
mod episode;
mod gauges;
mod harness;

pub use admission::{
    Admission, AdmissionConfig, AdmissionCore, AdmissionReading, EpisodeKey, Place, PressureConfig,
    Ticket, TurnPlace,
};
pub use batch::{BatchError, Finished, Runner};
pub use driver::{EpisodeOptions, EpisodeParts, run_episode};
pub use episode::{
    EpisodeCommand, EpisodeEvent, EpisodeLimits, EpisodeMachine, EpisodeSpec, RunInfo,
};
pub use gauges::{FlightGuard, Gauges, GaugesReading, LiveEpisode, Phase, PhaseGuard};
pub use harness::{
    BuiltInLoop, Harness, ModelAccess, ModelServer, ProgramCommand, ProgramConfig, ProgramError,
    ProgramHarness, Programs, grade_answer,
};
