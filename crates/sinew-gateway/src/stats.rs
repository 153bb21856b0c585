//! Counters of a gateway: as JSON in `GET /health`, and in the text format of Prometheus in `GET /metrics`.

use crate::session::Join;
use serde::Serialize;
use sinew_dialect::{ApiError, Ignored, count_ignored};
use sinew_types::{BranchCause, EngineStatus};
use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};
use tokio::sync::Notify;

/// Share of calls with a rewritten history above which a warning is logged.
const ALARM_RATE: f64 = 0.05;
/// Minimum number of calls for the warning; fewer are not significant.
const ALARM_CALLS: u64 = 100;

/// Counters of a gateway since its start.
///
/// No token is lost or counted twice: while no call runs, `sampled_tokens` equals `open_tokens` plus
/// `stored_tokens`. If only this gateway uses the engine and no call is `failed`, it also equals the engine's
/// count of sampled tokens.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct GatewayStats {
    /// Number of open rollouts.
    pub rollouts: usize,
    /// Number of running calls.
    pub in_flight: usize,
    /// Number of running calls that no client reads.
    pub unread: usize,
    /// Number of rollouts opened since the start.
    pub opened: u64,
    /// Number of rollouts finished since the start.
    pub finished: u64,
    pub calls: u64,
    /// Number of calls that ended with an error: failed, aborted, too late.
    pub failed: u64,
    /// Number of calls that were aborted because all of their clients had disconnected.
    pub clients_gone: u64,
    /// Number of repeated requests that were answered by the call they repeat.
    pub coalesced: u64,
    /// Number of calls whose known messages were recognized by their bytes and not parsed again.
    pub recognized: u64,
    /// Number of calls by the way in which they joined the captured tokens.
    pub joins: BTreeMap<Join, u64>,
    /// Number of branches of finished traces by cause.
    pub branches: BTreeMap<BranchCause, u64>,
    /// Number of captured sampled tokens, including those of recovered rollouts.
    pub sampled_tokens: u64,
    /// Number of sampled tokens in open rollouts.
    pub open_tokens: u64,
    /// Number of sampled tokens in finished traces, each of which was verified call by call.
    pub stored_tokens: u64,
    /// Number of traces whose verification failed; their rollouts stay, without accepting calls.
    pub unproven: u64,
    /// Request fields that were accepted without effect, by path.
    pub ignored_fields: Ignored,
}

/// Counters behind one lock, which is held only for a few additions.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    stats: Mutex<GatewayStats>,
    /// Whether the warning was logged.
    alarmed: AtomicBool,
    /// Result of the first model call: accepted, or the reason of its refusal.
    first_answer: OnceLock<Result<(), ApiError>>,
    first_answered: Notify,
}

impl Counters {
    /// Adds to the counters.
    pub(crate) fn count(&self, add: impl FnOnce(&mut GatewayStats)) {
        add(&mut self.stats.lock().unwrap_or_else(PoisonError::into_inner));
    }

    pub(crate) fn joined(&self, join: Join) {
        self.count(|stats| {
            stats.calls += 1;
            *stats.joins.entry(join).or_default() += 1;
        });
    }

    /// Records the result of a model call; the first one is remembered.
    pub(crate) fn answered(&self, refused: Option<&ApiError>) {
        if self.first_answer.get().is_none() {
            let answer = refused.map_or(Ok(()), |error| Err(error.clone()));
            // Calls that are answered at the same time are as good as each other.
            let _ = self.first_answer.set(answer);
            self.first_answered.notify_waiters();
        }
    }

    /// Waits for the first model call, and returns whether it was accepted, or else the reason of its
    /// refusal.
    pub(crate) async fn first_answer(&self) -> Result<(), ApiError> {
        loop {
            let answered = self.first_answered.notified();
            if let Some(answer) = self.first_answer.get() {
                return answer.clone();
            }
            answered.await;
        }
    }

    /// Removes the join of a call that had no output from the counts.
    pub(crate) fn unjoined(&self, join: Join) {
        self.count(|stats| {
            if let Some(count) = stats.joins.get_mut(&join) {
                *count = count.saturating_sub(1);
            }
        });
    }

    /// Counts fields without effect, and logs each once.
    pub(crate) fn ignored(&self, fields: &Ignored) {
        self.count(|stats| {
            for (path, count) in fields {
                let known = stats.ignored_fields.len();
                count_ignored(&mut stats.ignored_fields, path, *count);
                if stats.ignored_fields.len() > known {
                    tracing::warn!(
                        "requests have the field {path:?}, which has no effect here: see ignored_fields \
                         of GET /rollouts/ID; --strict-fields refuses such requests"
                    );
                }
            }
        });
    }

    /// Returns the counters, with an entry for every kind of join and every cause of a branch. The caller adds
    /// the numbers of open rollouts.
    pub(crate) fn stats(&self) -> GatewayStats {
        let mut stats = GatewayStats::default();
        self.count(|counted| stats.clone_from(counted));
        for join in Join::ALL {
            stats.joins.entry(join).or_default();
        }
        for cause in BranchCause::ALL {
            stats.branches.entry(cause).or_default();
        }
        stats
    }

    /// Logs one warning if clients rewrite their histories more often than expected.
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
    /// Share of calls whose history differs from the captured one.
    pub fn divergence_rate(&self) -> f64 {
        let diverged = |(join, n): (&Join, &u64)| if join.diverges() { *n } else { 0 };
        let diverged: u64 = self.joins.iter().map(diverged).sum();
        diverged as f64 / self.calls.max(1) as f64
    }

    fn diverges_too_often(&self) -> bool {
        self.calls >= ALARM_CALLS && self.divergence_rate() > ALARM_RATE
    }

    /// Writes the text format of Prometheus, version 0.0.4.
    pub fn prometheus(&self, engine: &EngineStatus) -> String {
        let ignored = self.ignored_fields.values().sum();
        let mut out = Exposition::default();
        for (name, value, help) in [
            ("rollouts_opened", self.opened, "Rollouts opened"),
            ("rollouts_finished", self.finished, "Rollouts stored"),
            ("calls", self.calls, "Calls begun"),
            ("calls_failed", self.failed, "Calls without an answer"),
            ("clients_gone", self.clients_gone, "Calls that clients left"),
            ("retries_coalesced", self.coalesced, "Repeated requests"),
            (
                "calls_recognized",
                self.recognized,
                "Calls whose known messages were not read again",
            ),
            ("sampled_tokens", self.sampled_tokens, "Tokens captured"),
            ("stored_tokens", self.stored_tokens, "Tokens in the store"),
            ("traces_unproven", self.unproven, "Unproven traces"),
            ("ignored_fields", ignored, "Fields without effect"),
            (
                "engine_sampled_tokens",
                engine.sampled_tokens,
                "Tokens that the engine sampled, for all users",
            ),
        ] {
            let name = format!("{name}_total");
            out.head(&name, "counter", help);
            out.sample(&name, "", value as f64);
        }
        out.head("joins_total", "counter", "How calls joined the trace");
        for (join, count) in &self.joins {
            let label = format!("{{join=\"{}\"}}", format!("{join:?}").to_lowercase());
            out.sample("joins_total", &label, *count as f64);
        }
        let help = "Branches of finished traces";
        out.head("branches_total", "counter", help);
        for (cause, count) in &self.branches {
            let label = format!("{{cause=\"{}\"}}", cause.name());
            out.sample("branches_total", &label, *count as f64);
        }
        let alarm = f64::from(u8::from(self.diverges_too_often()));
        for (name, value, help) in [
            ("rollouts_open", self.rollouts as f64, "Open rollouts"),
            ("calls_in_flight", self.in_flight as f64, "Calls that run"),
            (
                "calls_unread",
                self.unread as f64,
                "Calls that run and have no client",
            ),
            (
                "open_tokens",
                self.open_tokens as f64,
                "Sampled tokens in open rollouts",
            ),
            (
                "divergence_rate",
                self.divergence_rate(),
                "Share of calls whose history was not the captured one",
            ),
            ("divergence_alarm", alarm, "1 if that share is above 5 %"),
            (
                "engine_kv_tokens_free",
                engine.kv_tokens_free as f64,
                "Free KV capacity in tokens",
            ),
            (
                "engine_version",
                engine.version.0 as f64,
                "Version of the weights that sample",
            ),
        ] {
            out.head(name, "gauge", help);
            out.sample(name, "", value);
        }
        out.0
    }
}

/// Metrics in the text format of Prometheus. The crate prometheus-client is not used: it holds its own
/// counters or wraps a snapshot like this one, in three crates for these lines.
#[derive(Default)]
struct Exposition(String);

impl Exposition {
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
            "sinew_branches_total{cause=\"compaction\"} 0",
            "sinew_divergence_rate 0.1",
            "sinew_divergence_alarm 1",
            "# TYPE sinew_sampled_tokens_total counter",
        ] {
            assert!(text.lines().any(|l| l == line), "{line}\n{text}");
        }
    }
}
