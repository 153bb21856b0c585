//! The way of an episode: task, environment, render, generate, act, observe, score, store.
//!
//! | part | what it does |
//! |---|---|
//! | [`EpisodeMachine`] | one episode as a pure state machine: events in, commands out |
//! | [`run_episode`] | carries its commands out: engine, environment, renderer, clock |
//! | [`Runner`] | runs hundreds of episodes side by side, so that the engine works while tools run |
//! | [`AdmissionCore`] | decides, as pure, which episodes start and which generate next: as many as fit into the engine's KV cache |
//! | [`OutlookCore`] | how long episodes are expected to take, as pure: who begins first, where the longest are to |
//! | [`Playback`] | an engine that says again what an episode sampled: [`replay()`] compares a world of now with the recorded one, [`fork()`] goes on from a turn |
//! | [`InFlight`] | how far episodes have come: what a session that goes on takes up |
//! | [`Harness`] | port of what drives the turns: the built-in loop, or an agent program ([`ProgramHarness`]), a service ([`ServiceHarness`]) |
//! | [`Gauges`] | counters and live episodes, for views |
//!
//! # Invariants
//!
//! - Every episode that was begun ends in exactly one trace, which is valid, and committed before it is
//!   reported.
//! - A failure is data with a typed reason. It ends the episode and nothing else.
//! - Every token that the model saw or sampled is in exactly one node of the trace.
//! - This crate names no concrete engine, gateway, environment or store.

mod action;
mod admission;
mod batch;
mod driver;
mod episode;
mod gauges;
mod harness;
mod in_flight;
#[cfg(test)]
mod in_flight_tests;
mod outlook;
mod parts;
mod playback;
mod replay;
mod rescore;
mod sample;
mod wait_times;

pub use action::of_tokens as action_of_tokens;
pub use admission::{
    Admission, AdmissionConfig, AdmissionCore, AdmissionReading, EpisodeKey, Place, PressureConfig,
    Ticket, TurnPlace,
};
pub use batch::{BatchError, FinishedEpisode, Runner};
pub use driver::run_episode;
pub use episode::{
    EpisodeCommand, EpisodeEvent, EpisodeLimits, EpisodeMachine, EpisodeSpec, REWARD, RunInfo,
};
pub use gauges::{
    EndedEpisode, FailedEpisode, FlightGuard, Gauges, GaugesReading, LiveEpisode, Phase,
    PhaseGuard, PhaseSpan,
};
pub use harness::{
    AgentReport, BuiltInLoop, ModelAccess, ModelServer, ModelServerError, ProgramCommand,
    ProgramConfig, ProgramError, ProgramHarness, Programs, ServiceConfig, ServiceHarness,
    grade_answer,
};
pub use in_flight::{InFlight, ResumedCounts, SavedEpisode};
pub use outlook::{LengthEvidence, Outlook, OutlookCore, Rank, TurnOrder};
pub use parts::{EpisodeOptions, EpisodeParts, Harness};
pub use playback::{ContextChange, Playback, PlaybackError};
pub use replay::{
    ForkedEpisode, PartDrift, ReplayChange, ReplayedEpisode, changes, drift, fork, replay, spec_of,
};
pub use rescore::{
    ComponentChange, EpisodeRescore, ScoreChanges, TOTAL, outcomes, outcomes_of, rescore, rescored,
    tasks_of,
};
pub use sample::reward_sample;
pub use wait_times::{TrainerActivity, WaitClock, WaitTimes};
