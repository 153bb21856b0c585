//! Exports the events of a run: Prometheus, OpenTelemetry, alerts.
//!
//! Trackers of experiments are not here: `python/src/sinew/track.py` sends the records of a run to them, by
//! their own clients.
//!
//! [`Signals::start`] watches the bus of a run through a bounded queue. A thread turns events into numbers,
//! spans and alerts; data for the network leave through a second bounded queue.
//!
//! Invariants:
//! - The run is never delayed and never fails because of this crate. Data that do not fit into a queue are
//!   lost and counted. Data that cannot be sent are retried a few times, then lost and counted.
//! - Rules of alerts, the text of Prometheus, spans and records are made by pure parts, with time as an
//!   argument; the clock is in one module.
//! - An alert is sent once, not again while its condition lasts, and at most a set number of times an hour.
//!
//! | key | goes to |
//! |---|---|
//! | `[prometheus]` | `/metrics` on an address, and a text file for the node exporter |
//! | `[otlp]` | spans of episodes, turns and tools, and log records, by OTLP over HTTP |
//! | `[alerts]` | webhooks: plain JSON, Slack, Apprise; mail |

mod alerts;
mod config;
mod logs;
mod machine;
mod mail;
mod message;
mod numbers;
mod otlp;
mod prometheus;
mod run;
mod run_info;
mod send;
mod spans;
mod worker;

pub use alerts::{Alert, Alerts, MachineReading, Rule};
pub use config::{
    AlertsConfig, Format, MailConfig, OtlpConfig, PrometheusConfig, SignalsConfig, SignalsError,
    Tls,
};
pub use machine::{Memory, disk_free};
pub use run::Signals;
pub use run_info::Run;
