//! Server processes under measurement: start, CPU time, memory, end.

use crate::{BenchError, machine};
use serde_json::Value;
use std::net::SocketAddr;
use std::process::Stdio;
use std::time::Duration;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{Child, ChildStdout, Command};

/// Longest that our own server may take to listen.
const START_LIMIT: Duration = Duration::from_secs(20);

/// Open files that thousands of connections need.
const FILES: u64 = 20_000;

/// Lets this process, and those it starts, open as many files as it may.
pub(super) fn raise_files() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    let wanted = limit.maximum.unwrap_or(FILES).min(FILES);
    if limit.current.is_some_and(|n| n < wanted) {
        let raised = Rlimit {
            current: Some(wanted),
            maximum: limit.maximum,
        };
        if let Err(error) = setrlimit(Resource::Nofile, raised) {
            tracing::warn!(%error, "the limit of open files stays");
        }
    }
}

/// A server that ends with this value.
#[derive(Debug)]
pub(super) struct Process {
    /// Killed when it is dropped.
    child: Child,
    /// Address and control token of our gateway.
    listens: Option<(SocketAddr, String)>,
}

impl Process {
    /// Our gateway with a fake engine that gives a token each `pass`.
    pub(super) async fn serve(pass: Duration) -> Result<Self, BenchError> {
        let program = crate::programs::sinew()?;
        let pass_ms = (pass.as_secs_f64() * 1e3).to_string();
        let mut child = Command::new(program)
            .args(["serve", "--engine", "fake", "--listen", "127.0.0.1:0"])
            .args(["--json", "--context", "65536", "--fake-words", "64"])
            .args(["--fake-pass-ms", &pass_ms])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .map_err(BenchError::system)?;
        let out = child.stdout.take();
        let out = out.ok_or_else(|| BenchError::system("sinew serve: no output"))?;
        let mut lines = BufReader::new(out).lines();
        let line = tokio::time::timeout(START_LIMIT, lines.next_line())
            .await
            .map_err(|_| BenchError::system("sinew serve: does not listen"))?
            .map_err(BenchError::system)?
            .ok_or_else(|| BenchError::system("sinew serve: ended at once"))?;
        let told: Value = serde_json::from_str(&line).map_err(BenchError::system)?;
        let text = |field: &str| told[field].as_str().unwrap_or_default().to_owned();
        let address = text("listening").parse().map_err(BenchError::system)?;
        Ok(Self {
            child,
            listens: Some((address, text("control_token"))),
        })
    }

    /// Another program, which is not a gateway.
    pub(super) fn other(command: &mut Command) -> std::io::Result<Self> {
        let child = command.kill_on_drop(true).spawn()?;
        Ok(Self {
            child,
            listens: None,
        })
    }

    /// Address and control token of our gateway.
    ///
    /// # Errors
    /// If the process is another program.
    pub(super) fn listens(&self) -> Result<(SocketAddr, &str), BenchError> {
        let listens = self.listens.as_ref().map(|(a, token)| (*a, token.as_str()));
        listens.ok_or_else(|| BenchError::system("not a gateway"))
    }

    /// Standard output of the process, if it is piped; returned once.
    pub(super) fn stdout(&mut self) -> Option<ChildStdout> {
        self.child.stdout.take()
    }

    /// Whether it has not ended.
    pub(super) fn is_running(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }

    /// Seconds of CPU that it and its children have used.
    pub(super) fn cpu_s(&self) -> f64 {
        self.child.id().map_or(0.0, tree_cpu_s)
    }

    /// Resident memory.
    pub(super) fn resident_bytes(&self) -> Result<f64, BenchError> {
        let id = self.child.id();
        let id = id.ok_or_else(|| BenchError::system("the server has ended"))?;
        machine::resident_memory(&id.to_string())
            .ok_or_else(|| BenchError::system(format!("/proc/{id}/status: no VmRSS")))
    }
}

/// Nanoseconds on a CPU of every thread (first number of schedstat), and of every child.
fn tree_cpu_s(id: u32) -> f64 {
    let Ok(tasks) = std::fs::read_dir(format!("/proc/{id}/task")) else {
        return 0.0;
    };
    let mut total = 0.0;
    for task in tasks.flatten() {
        let read = |file: &str| std::fs::read_to_string(task.path().join(file)).unwrap_or_default();
        let first = read("schedstat");
        let nanoseconds = first
            .split_whitespace()
            .next()
            .and_then(|n| n.parse::<f64>().ok());
        total += nanoseconds.unwrap_or(0.0) / 1e9;
        let children = read("children");
        let ids = children.split_whitespace().filter_map(|c| c.parse().ok());
        total += ids.map(tree_cpu_s).sum::<f64>();
    }
    total
}
