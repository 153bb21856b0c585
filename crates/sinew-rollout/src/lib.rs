//! Runs episodes: task, environment, render, generate, act, observe, score, store.
//!
//! | part | what it does |
//! |---|---|
//! | [`EpisodeMachine`] | one episode as a pure state machine: events in, commands out |
//! | [`run_episode`] | executes its commands with engine, environment, renderer and clock |
//! | [`Runner`] | runs hundreds of episodes concurrently, so that the engine works while tools run |
//! | [`AdmissionCore`] | pure state machine that decides which episodes start and which generate next: as many as fit into the engine's KV cache |
//! | [`OutlookCore`] | pure estimates of the duration of episodes, so that the longest ones start first |
//! | [`Playback`] | an engine that replays the sampled tokens of an episode: [`replay()`] compares a present environment with the recorded one, [`fork()`] continues from a turn |
//! | [`InFlight`] | saved progress of episodes, from which the next session resumes them |
//! | [`Harness`] | trait of the code that drives the turns: the built-in loop, an agent program ([`ProgramHarness`]), or a service ([`ServiceHarness`]) |
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
mod hops;
mod in_flight;
#[cfg(test)]
mod in_flight_tests;
mod outlook;
mod parts;
mod playback;
mod replay;
mod rescore;
mod sample;
mod shown;
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
    PhaseGuard, PhaseSpan, unix_s,
};
pub use harness::{
    AgentReport, BuiltInLoop, ModelAccess, ModelServer, ModelServerError, ProgramCommand,
    ProgramConfig, ProgramError, ProgramHarness, Programs, ServiceConfig, ServiceHarness,
    grade_answer,
};
pub use hops::{Hop, Hops};
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
