//! What a gateway has counted: as JSON in `GET /health`, as Prometheus' text in `GET /metrics`.

use crate::ignored::{Ignored, count_ignored};
use crate::session::Join;
use serde::Serialize;
use sinew_types::EngineStatus;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

/// Share of calls with a rewritten history that is worth an alarm, and calls that it takes.
const ALARM_RATE: f64 = 0.05;
const ALARM_CALLS: u64 = 100;

/// Counters of a gateway since its start.
///
/// Nothing is lost or counted twice: once no call runs, `sampled_tokens` is `open_tokens` plus
/// `stored_tokens`, and, with an engine of its own and without `failed` calls, what the engine
/// says that it sampled.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct GatewayStats {
    /// Open rollouts, and calls that run.
    pub rollouts: usize,
    pub in_flight: usize,
    pub opened: u64,
    pub finished: u64,
    pub calls: u64,
    /// Calls that gave nothing: failed, aborted, too late.
    pub failed: u64,
    /// Calls that were aborted because all of their clients had gone.
    pub clients_gone: u64,
    /// Repeated requests that were answered by the call they repeat.
    pub coalesced: u64,
    /// Calls whose known messages were recognized by their bytes, and not read again.
    pub recognized: u64,
    pub joins: BTreeMap<Join, u64>,
    /// Sampled tokens that were captured, those of recovered rollouts included.
    pub sampled_tokens: u64,
    /// Of these, in open rollouts.
    pub open_tokens: u64,
    /// Of these, in finished traces, each of which was proven call by call.
    pub stored_tokens: u64,
    /// Traces that were not proven; their rollouts stay.
    pub unproven: u64,
    /// Fields of requests that were accepted without effect, by path.
    pub ignored_fields: Ignored,
}

#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub(crate) opened: AtomicU64,
    pub(crate) finished: AtomicU64,
    pub(crate) calls: AtomicU64,
    pub(crate) failed: AtomicU64,
    pub(crate) clients_gone: AtomicU64,
    pub(crate) coalesced: AtomicU64,
    pub(crate) recognized: AtomicU64,
    pub(crate) joins: [AtomicU64; Join::ALL.len()],
    pub(crate) sampled_tokens: AtomicU64,
    pub(crate) stored_tokens: AtomicU64,
    pub(crate) unproven: AtomicU64,
    ignored: Mutex<Ignored>,
    alarmed: AtomicBool,
}

impl Counters {
    pub(crate) fn add(counter: &AtomicU64, count: u64) {
        counter.fetch_add(count, Ordering::Relaxed);
    }

    pub(crate) fn joined(&self, join: Join) {
        Self::add(&self.calls, 1);
        if let Some(index) = Join::ALL.iter().position(|j| *j == join) {
            Self::add(&self.joins[index], 1);
        }
    }

    /// Counts fields without effect, and says of each once that it has none.
    pub(crate) fn ignored(&self, fields: &Ignored) {
        if fields.is_empty() {
            return;
        }
        let mut all = self.ignored.lock().unwrap_or_else(PoisonError::into_inner);
        for (path, count) in fields {
            let known = all.len();
            count_ignored(&mut all, path, *count);
            if all.len() > known {
                tracing::warn!(
                    "requests have the field {path:?}, which has no effect here: see ignored_fields \
                     of GET /rollouts/ID; --strict-fields refuses such requests"
                );
            }
        }
    }

    /// What was counted; what is open now is the caller's to say.
    pub(crate) fn stats(&self) -> GatewayStats {
        let load = |n: &AtomicU64| n.load(Ordering::Relaxed);
        let joins = Join::ALL.into_iter().zip(self.joins.iter().map(load));
        GatewayStats {
            opened: load(&self.opened),
            finished: load(&self.finished),
            calls: load(&self.calls),
            failed: load(&self.failed),
            clients_gone: load(&self.clients_gone),
            coalesced: load(&self.coalesced),
            recognized: load(&self.recognized),
            joins: joins.collect(),
            sampled_tokens: load(&self.sampled_tokens),
            stored_tokens: load(&self.stored_tokens),
            unproven: load(&self.unproven),
            ignored_fields: self
                .ignored
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .clone(),
            ..GatewayStats::default()
        }
    }

    /// Says once that clients rewrite their histories more often than they should.
    pub(crate) fn alarm(&self) {
        let stats = self.stats();
        if stats.diverges_too_often() && !self.alarmed.swap(true, Ordering::Relaxed) {
            let percent = 100.0 * stats.divergence_rate();
            tracing::warn!(
                "{percent:.1} % of {} calls came with a history that is not the captured one: \
                 see the joins of GET /rollouts/ID",
                stats.calls
            );
        }
    }
}

impl GatewayStats {
    /// Share of calls whose history was not the captured one.
    pub fn divergence_rate(&self) -> f64 {
        let diverged = |(join, n): (&Join, &u64)| if join.diverges() { *n } else { 0 };
        let diverged: u64 = self.joins.iter().map(diverged).sum();
        diverged as f64 / self.calls.max(1) as f64
    }

    fn diverges_too_often(&self) -> bool {
        self.calls >= ALARM_CALLS && self.divergence_rate() > ALARM_RATE
    }

    /// In the text format of Prometheus, version 0.0.4.
    pub fn prometheus(&self, engine: &EngineStatus) -> String {
        let mut out = Exposition::default();
        out.counter("rollouts_opened", "Rollouts opened", self.opened);
        out.counter("rollouts_finished", "Rollouts stored", self.finished);
        out.counter("calls", "Calls begun", self.calls);
        out.counter("calls_failed", "Calls without an answer", self.failed);
        let gone = "Calls aborted as all of their clients had gone";
        out.counter("clients_gone", gone, self.clients_gone);
        let retries = "Repeated requests answered by the call they repeat";
        out.counter("retries_coalesced", retries, self.coalesced);
        let known = "Calls whose known messages were not read again";
        out.counter("calls_recognized", known, self.recognized);
        out.counter(
            "sampled_tokens",
            "Sampled tokens captured",
            self.sampled_tokens,
        );
        out.counter(
            "stored_tokens",
            "Sampled tokens in stored traces",
            self.stored_tokens,
        );
        out.counter(
            "traces_unproven",
            "Traces that were not proven",
            self.unproven,
        );
        let ignored = self.ignored_fields.values().sum();
        out.counter(
            "ignored_fields",
            "Fields of requests without effect",
            ignored,
        );
        let sampled = "Tokens that the engine sampled, for all users";
        out.counter("engine_sampled_tokens", sampled, engine.sampled_tokens);
        out.head(
            "joins_total",
            "counter",
            "How calls joined what was captured",
        );
        for (join, count) in &self.joins {
            let label = format!("{{join=\"{}\"}}", format!("{join:?}").to_lowercase());
            out.sample("joins_total", &label, *count as f64);
        }
        out.gauge("rollouts_open", "Open rollouts", self.rollouts as f64);
        out.gauge("calls_in_flight", "Calls that run", self.in_flight as f64);
        out.gauge(
            "open_tokens",
            "Sampled tokens in open rollouts",
            self.open_tokens as f64,
        );
        let rate = "Share of calls whose history was not the captured one";
        out.gauge("divergence_rate", rate, self.divergence_rate());
        let alarm = f64::from(u8::from(self.diverges_too_often()));
        out.gauge("divergence_alarm", "1 if that share is above 5 %", alarm);
        let free = engine.kv_tokens_free as f64;
        out.gauge("engine_kv_tokens_free", "Free KV capacity in tokens", free);
        let version = engine.version.0 as f64;
        out.gauge(
            "engine_version",
            "Version of the weights that sample",
            version,
        );
        out.0
    }
}

/// Metrics in the text format of Prometheus. Not by prometheus-client: it holds counters of its own
/// or wraps a snapshot as this one, in three crates for these lines.
#[derive(Default)]
struct Exposition(String);

impl Exposition {
    fn counter(&mut self, name: &str, help: &str, value: u64) {
        let name = format!("{name}_total");
        self.head(&name, "counter", help);
        self.sample(&name, "", value as f64);
    }

    fn gauge(&mut self, name: &str, help: &str, value: f64) {
        self.head(name, "gauge", help);
        self.sample(name, "", value);
    }

    // Writing to a string cannot fail.
    fn head(&mut self, name: &str, kind: &str, help: &str) {
        let _ = writeln!(
            self.0,
            "# HELP sinew_{name} {help}\n# TYPE sinew_{name} {kind}"
        );
    }

    fn sample(&mut self, name: &str, labels: &str, value: f64) {
        let _ = writeln!(self.0, "sinew_{name}{labels} {value}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rewritten_histories_raise_an_alarm() {
        let counters = Counters::default();
        for i in 0..200u64 {
            counters.joined(if i % 10 == 0 {
                Join::Fork
            } else {
                Join::Extend
            });
            let stats = counters.stats();
            assert_eq!(stats.diverges_too_often(), stats.calls >= ALARM_CALLS);
        }
        assert!((counters.stats().divergence_rate() - 0.1).abs() < 1e-9);
        let text = counters.stats().prometheus(&EngineStatus::default());
        for line in [
            "sinew_calls_total 200",
            "sinew_joins_total{join=\"fork\"} 20",
            "sinew_joins_total{join=\"realign\"} 0",
            "sinew_divergence_rate 0.1",
            "sinew_divergence_alarm 1",
            "# TYPE sinew_sampled_tokens_total counter",
        ] {
            assert!(text.lines().any(|l| l == line), "{line}\n{text}");
        }
    }
}
