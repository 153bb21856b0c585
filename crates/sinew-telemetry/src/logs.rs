//! Events of a run as log records of OpenTelemetry. Pure: events and time are arguments.
//!
//! A record has a text for users as its body, an event name, and the facts as attributes. Records about an
//! episode have the ids of its trace if that trace is sent, so that a reader gets from one to the other.

use crate::alerts::Alert;
use crate::otlp::{self, float, int, text};
use crate::spans::{chosen, episode_ids};
use opentelemetry_proto::tonic::collector::logs::v1::ExportLogsServiceRequest;
use opentelemetry_proto::tonic::common::v1::KeyValue;
use opentelemetry_proto::tonic::logs::v1::{LogRecord, ResourceLogs, ScopeLogs, SeverityNumber};
use sinew_orchestrator::{EvalRecord, Phase, RunEvent, StepRecord};
use sinew_rollout::FailedEpisode;
use sinew_types::FailureKind;

/// Records that wait for the next sending; what is above is lost and counted.
const MAX_WAITING: usize = 2048;
/// Bytes of a text; what is above is cut.
const MAX_TEXT: usize = 4096;

/// Collects records until they are sent.
#[derive(Debug)]
pub(crate) struct Logs {
    run: String,
    /// Share of the episodes whose traces are sent; 0: traces are not sent.
    traced: f64,
    waiting: Vec<LogRecord>,
    /// Records that did not fit.
    pub(crate) lost: u64,
}

impl Logs {
    /// A log without records.
    pub(crate) fn new(run: &str, traced: f64) -> Self {
        Self {
            run: run.to_owned(),
            traced,
            waiting: Vec::new(),
            lost: 0,
        }
    }

    /// Takes an event's text for users.
    pub(crate) fn event(&mut self, event: &RunEvent, now_unix_s: f64) {
        use SeverityNumber::{Debug, Info, Warn};
        let (severity, name, said, attributes) = match event {
            RunEvent::Described(what) => (Info, "described", what.clone(), vec![]),
            RunEvent::Resumed { steps, .. } => {
                let said = format!("resumed after {} steps", steps.len());
                (Info, "resumed", said, vec![])
            }
            RunEvent::Serving { url, .. } => (Info, "serving", format!("serving at {url}"), vec![]),
            RunEvent::Controlled { url, .. } => (
                Info,
                "controlled",
                format!("workers reach it at {url}"),
                vec![],
            ),
            RunEvent::Phase(phase) => {
                let ends = matches!(phase, Phase::Stopping | Phase::Done);
                let severity = if ends { Info } else { Debug };
                (severity, "phase", phase.name(), vec![])
            }
            RunEvent::Warning(why) => (Warn, "warning", why.clone(), vec![]),
            RunEvent::SourceDry { step, why } => (Warn, "source_dry", why.clone(), vec![at(*step)]),
            RunEvent::Step(record) => {
                let (said, attributes) = step(record);
                (Info, "step", said, attributes)
            }
            RunEvent::Measured {
                record,
                again: false,
                ..
            } => {
                let (said, attributes) = measured(record);
                (Info, "measured", said, attributes)
            }
            RunEvent::Rollout(seen) => {
                seen.failures.iter().for_each(|failed| self.failed(failed));
                return;
            }
            _ => return,
        };
        self.add(severity, name, &said, attributes, now_unix_s);
    }

    /// Takes an alert.
    pub(crate) fn alert(&mut self, alert: &Alert, now_unix_s: f64) {
        let mut attributes = vec![
            text("sinew.rule", alert.rule.name()),
            float("sinew.value", alert.value),
            float("sinew.threshold", alert.threshold),
        ];
        if let Some(episode) = &alert.episode {
            attributes.push(text("sinew.episode", episode.as_str()));
        }
        let severity = SeverityNumber::Error;
        let added = self.add(severity, "alert", &alert.text, attributes, now_unix_s);
        if let Some(episode) = alert.episode.as_ref().filter(|_| added) {
            self.tie(episode.as_str());
        }
    }

    /// Takes an episode that the system failed.
    fn failed(&mut self, failed: &FailedEpisode) {
        let kind = format!("{:?}", failed.kind).to_lowercase();
        let severity = match failed.kind {
            // It was given up: nothing is wrong.
            FailureKind::Cancelled => SeverityNumber::Info,
            _ => SeverityNumber::Warn,
        };
        let said = format!(
            "episode {} failed: {kind}: {}",
            failed.episode, failed.reason
        );
        let attributes = vec![
            text("sinew.episode", failed.episode.as_str()),
            text("error.type", &kind),
        ];
        let added = self.add(
            severity,
            "episode_failed",
            &said,
            attributes,
            failed.ended_unix_s,
        );
        if added {
            self.tie(failed.episode.as_str());
        }
    }

    /// Adds the ids of an episode's trace to the newest record, if that trace is exported.
    fn tie(&mut self, episode: &str) {
        if !chosen(episode, self.traced) {
            return;
        }
        let (trace, span) = episode_ids(&self.run, episode);
        if let Some(record) = self.waiting.last_mut() {
            (record.trace_id, record.span_id) = (trace, span);
            // The trace is sampled.
            record.flags = 1;
        }
    }

    /// Adds a record, if it fits.
    fn add(
        &mut self,
        severity: SeverityNumber,
        name: &str,
        said: &str,
        attributes: Vec<KeyValue>,
        at_unix_s: f64,
    ) -> bool {
        if self.waiting.len() >= MAX_WAITING {
            self.lost += 1;
            return false;
        }
        let nanos = (at_unix_s.max(0.0) * 1e9) as u64;
        let said = &said[..said.floor_char_boundary(MAX_TEXT)];
        self.waiting.push(LogRecord {
            time_unix_nano: nanos,
            observed_time_unix_nano: nanos,
            severity_number: severity as i32,
            severity_text: word(severity).to_owned(),
            body: Some(otlp::body(said)),
            attributes,
            event_name: format!("sinew.{name}"),
            ..LogRecord::default()
        });
        true
    }

    /// The request with what waits; `None`: nothing does.
    pub(crate) fn request(&mut self, service: &str) -> Option<ExportLogsServiceRequest> {
        let log_records = std::mem::take(&mut self.waiting);
        (!log_records.is_empty()).then(|| ExportLogsServiceRequest {
            resource_logs: vec![ResourceLogs {
                resource: Some(otlp::resource(service, &self.run)),
                scope_logs: vec![ScopeLogs {
                    scope: Some(otlp::scope()),
                    log_records,
                    ..ScopeLogs::default()
                }],
                ..ResourceLogs::default()
            }],
        })
    }
}

fn at(step: u64) -> KeyValue {
    int("sinew.step", step as i64)
}

/// A step in one line.
fn step(r: &StepRecord) -> (String, Vec<KeyValue>) {
    let failed = match (r.rollout.failed, &r.failed_cause) {
        (0, _) => String::new(),
        (n, cause) => format!(
            ", {n} failed: {}",
            cause.as_deref().unwrap_or("no cause was noted")
        ),
    };
    let said = format!(
        "step {}: {} episodes, reward {:.3}, success {:.3}, {} trained tokens{failed}",
        r.step, r.rollout.episodes, r.rollout.reward, r.rollout.success, r.trained_tokens
    );
    let attributes = vec![
        at(r.step),
        int("sinew.episodes", r.rollout.episodes as i64),
        int("sinew.failed", r.rollout.failed as i64),
        float("sinew.reward", r.rollout.reward),
        float("sinew.success", r.rollout.success),
    ];
    (said, attributes)
}

/// A held-out measurement in one line.
fn measured(r: &EvalRecord) -> (String, Vec<KeyValue>) {
    let said = format!(
        "measured {} step {}: success {:.3} of {} episodes",
        r.when, r.step, r.stats.success, r.stats.episodes
    );
    let attributes = vec![
        at(r.step),
        int("sinew.episodes", r.stats.episodes as i64),
        float("sinew.success", r.stats.success),
    ];
    (said, attributes)
}

/// Short name of the data model of OpenTelemetry.
fn word(severity: SeverityNumber) -> &'static str {
    match severity {
        SeverityNumber::Debug => "DEBUG",
        SeverityNumber::Warn => "WARN",
        SeverityNumber::Error => "ERROR",
        _ => "INFO",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sinew_orchestrator::RolloutProgress;
    use sinew_types::EpisodeId;

    fn records(logs: &mut Logs) -> Vec<LogRecord> {
        let request = logs.request("s").unwrap_or_default();
        let resources = request.resource_logs.into_iter();
        resources
            .flat_map(|r| r.scope_logs)
            .flat_map(|s| s.log_records)
            .collect()
    }

    #[test]
    fn only_episodes_whose_trace_is_sent_are_tied_to_it() {
        let failed = |episode: &str| FailedEpisode {
            episode: EpisodeId::new(episode),
            kind: FailureKind::Sandbox,
            reason: "é".repeat(3000),
            ended_unix_s: 2.0,
        };
        let event = RunEvent::Rollout(Box::new(RolloutProgress {
            failures: vec![failed("e")],
            ..RolloutProgress::default()
        }));
        for (share, bytes) in [(1.0, 16), (0.0, 0)] {
            let mut logs = Logs::new("run", share);
            logs.event(&event, 9.0);
            let [record] = &records(&mut logs)[..] else {
                panic!("one record");
            };
            assert_eq!(
                (record.trace_id.len(), record.time_unix_nano),
                (bytes, 2_000_000_000)
            );
            assert_eq!(record.severity_text, "WARN");
        }
    }

    #[test]
    fn what_does_not_fit_is_counted_and_texts_are_cut() {
        let mut logs = Logs::new("run", 1.0);
        for _ in 0..MAX_WAITING + 3 {
            logs.event(&RunEvent::Warning("é".repeat(MAX_TEXT)), 1.0);
        }
        let kept = records(&mut logs);
        assert_eq!((kept.len(), logs.lost), (MAX_WAITING, 3));
        assert_eq!(kept[0].body, Some(otlp::body(&"é".repeat(MAX_TEXT / 2))));
        assert!(logs.request("s").is_none());
    }
}
