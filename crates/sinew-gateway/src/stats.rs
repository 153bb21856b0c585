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
    /// Calls that were aborted because everybody who waited for them had gone.
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
        let mut out = String::new();
        for (name, value, help) in self.counters(engine) {
            metric(
                &mut out,
                name,
                "counter",
                help,
                &[(String::new(), value as f64)],
            );
        }
        let labelled = |(join, count): (&Join, &u64)| {
            let name = format!("{join:?}").to_lowercase();
            (format!("{{join=\"{name}\"}}"), *count as f64)
        };
        let joins: Vec<_> = self.joins.iter().map(labelled).collect();
        let help = "How calls joined what was captured";
        metric(&mut out, "joins_total", "counter", help, &joins);
        for (name, value, help) in self.gauges(engine) {
            metric(&mut out, name, "gauge", help, &[(String::new(), value)]);
        }
        out
    }

    fn counters(&self, engine: &EngineStatus) -> [(&'static str, u64, &'static str); 12] {
        let retries = "Repeated requests answered by the call they repeat";
        let known = "Calls whose known messages were not read again";
        let gone = "Calls aborted as nobody waited any more";
        let stored = "Sampled tokens in stored traces";
        let engines = "Tokens that the engine sampled, for anyone";
        let without = "Fields of requests accepted without effect";
        [
            ("rollouts_opened_total", self.opened, "Rollouts opened"),
            ("rollouts_finished_total", self.finished, "Rollouts stored"),
            ("calls_total", self.calls, "Calls begun"),
            ("calls_failed_total", self.failed, "Calls that gave nothing"),
            ("clients_gone_total", self.clients_gone, gone),
            ("retries_coalesced_total", self.coalesced, retries),
            ("calls_recognized_total", self.recognized, known),
            (
                "sampled_tokens_total",
                self.sampled_tokens,
                "Sampled tokens captured",
            ),
            ("stored_tokens_total", self.stored_tokens, stored),
            (
                "traces_unproven_total",
                self.unproven,
                "Traces that were not proven",
            ),
            (
                "ignored_fields_total",
                self.ignored_fields.values().sum(),
                without,
            ),
            (
                "engine_sampled_tokens_total",
                engine.sampled_tokens,
                engines,
            ),
        ]
    }

    fn gauges(&self, engine: &EngineStatus) -> [(&'static str, f64, &'static str); 7] {
        let rate = "Share of calls whose history was not the captured one";
        let alarm = f64::from(u8::from(self.diverges_too_often()));
        let (room, version) = (engine.kv_tokens_free as f64, engine.version.0 as f64);
        [
            ("rollouts_open", self.rollouts as f64, "Open rollouts"),
            ("calls_in_flight", self.in_flight as f64, "Calls that run"),
            (
                "open_tokens",
                self.open_tokens as f64,
                "Sampled tokens in open rollouts",
            ),
            ("divergence_rate", self.divergence_rate(), rate),
            ("divergence_alarm", alarm, "1 if that share is above 5 %"),
            (
                "engine_kv_tokens_free",
                room,
                "Free tokens of key-value room",
            ),
            (
                "engine_version",
                version,
                "Version of the weights that sample",
            ),
        ]
    }
}

fn metric(out: &mut String, name: &str, kind: &str, help: &str, samples: &[(String, f64)]) {
    // Writing to a string cannot fail.
    let _ = writeln!(
        out,
        "# HELP sinew_{name} {help}\n# TYPE sinew_{name} {kind}"
    );
    for (labels, value) in samples {
        let _ = writeln!(out, "sinew_{name}{labels} {value}");
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
