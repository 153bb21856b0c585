//! Programs that do the same work with other systems, run as child processes.
//!
//! A peer is a script under `benches/peers` that prints one JSON line:
//! `{"version":"torch 2.15.0","values":[...],"peak_bytes":n}`, one value a measured step.

use super::row::{Better, Summary};
use serde::Deserialize;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Most bytes read from a peer.
const MAX_OUTPUT: u64 = 1 << 20;

/// Settings of peers.
#[derive(Clone, Debug)]
pub(crate) struct Peers {
    /// Python that has the peers installed; every peer is a row with that reason if there is none.
    pub(crate) python: Option<PathBuf>,
    /// Folder of the peers' programs.
    pub(crate) scripts: PathBuf,
    /// Longest that one may take.
    pub(crate) limit: Duration,
    /// Number of threads, the same as for Sinew, set by `OMP_NUM_THREADS`.
    pub(crate) threads: usize,
}

/// Result of a peer.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct PeerResult {
    /// Name and version of the system.
    pub(crate) version: String,
    /// The peer's values.
    pub(crate) summary: Summary,
    /// Largest resident memory.
    pub(crate) peak_bytes: Option<f64>,
}

/// Reasons for which a peer has no result, as its row prints them.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PeerError {
    #[error(transparent)]
    Io(#[from] std::io::Error),
    #[error(transparent)]
    Json(#[from] serde_json::Error),
    /// It lacks a part, does not start, takes too long or prints something else.
    #[error("{0}")]
    Failed(String),
}

impl From<&str> for PeerError {
    fn from(why: &str) -> Self {
        Self::Failed(why.to_owned())
    }
}

impl PeerError {
    /// The error of a program that could not be started.
    pub(crate) fn start(program: &Path) -> impl Fn(std::io::Error) -> Self {
        move |e: std::io::Error| Self::Failed(format!("{}: {e}", program.display()))
    }
}

/// Line that the script prints.
#[derive(Deserialize)]
struct Line {
    /// Version of the peer's package.
    version: String,
    /// One value for each repetition.
    values: Vec<f64>,
    /// The peer's largest resident memory, where it was measured.
    peak_bytes: Option<f64>,
}

impl Peers {
    /// Runs `script`.
    pub(crate) fn run(&self, script: &str, args: &[&str]) -> Result<PeerResult, PeerError> {
        let python = self
            .python
            .as_ref()
            .ok_or("give --peer-python: a Python with the packages that benches/peers names")?;
        let path = self.scripts.join(script);
        if !path.is_file() {
            let why = format!("{} is missing: see --peers", path.display());
            return Err(PeerError::Failed(why));
        }
        let threads = self.threads.to_string();
        let mut child = Command::new(python)
            .arg(&path)
            .args(args)
            .env("OMP_NUM_THREADS", &threads)
            .env("PEER_THREADS", &threads)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(PeerError::start(python))?;
        let outputs = (child.stdout.take(), child.stderr.take());
        let (out, errors) = std::thread::scope(|scope| {
            let out = scope.spawn(|| outputs.0.map(read_all).unwrap_or_default());
            let errors = scope.spawn(|| outputs.1.map(read_all).unwrap_or_default());
            let ended = wait(&mut child, self.limit);
            let text = |handle: std::thread::ScopedJoinHandle<'_, String>| {
                handle.join().unwrap_or_default()
            };
            ended.map(|()| (text(out), text(errors)))
        })?;
        parse(&out).map_err(|e| {
            let last = errors.lines().rev().find(|l| !l.trim().is_empty());
            let last = last.unwrap_or("it said nothing");
            PeerError::Failed(format!("{script}: {e}: {last}"))
        })
    }
}

/// Output up to [`MAX_OUTPUT`].
fn read_all(from: impl Read) -> String {
    let mut bytes = Vec::new();
    // The part that was read before an error is judged.
    let _ = from.take(MAX_OUTPUT).read_to_end(&mut bytes);
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Waits for the end; a child that takes too long is killed.
fn wait(child: &mut Child, limit: Duration) -> Result<(), PeerError> {
    let start = Instant::now();
    loop {
        match child.try_wait() {
            Ok(Some(_)) => return Ok(()),
            Ok(None) if start.elapsed() < limit => {
                std::thread::sleep(Duration::from_millis(20));
            }
            ended => {
                // A child that is gone already is what was wanted.
                let _ = child.kill();
                let _ = child.wait();
                ended?;
                let why = format!("not done after {} s", limit.as_secs());
                return Err(PeerError::Failed(why));
            }
        }
    }
}

/// The last line that is JSON.
fn parse(out: &str) -> Result<PeerResult, PeerError> {
    let line = out.lines().rev().find(|l| l.starts_with('{'));
    let line: Line = serde_json::from_str(line.ok_or("no result")?)?;
    let summary = Summary::of(line.values, Better::More).ok_or("no values")?;
    Ok(PeerResult {
        version: line.version,
        summary,
        peak_bytes: line.peak_bytes,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn peers(script: &str, limit: Duration) -> (tempfile::TempDir, Peers) {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("peer.py"), script).unwrap();
        let peers = Peers {
            python: Some("/bin/sh".into()),
            scripts: dir.path().to_owned(),
            limit,
            threads: 2,
        };
        (dir, peers)
    }

    #[test]
    fn a_result_is_the_last_json_line() {
        let script = "echo noise; echo '{\"version\":\"x 1\",\"values\":[1,3,2],\"peak_bytes\":8}'";
        let (_dir, peers) = peers(script, Duration::from_secs(60));
        let result = peers.run("peer.py", &[]).unwrap();
        assert_eq!(result.version, "x 1");
        assert_eq!(result.summary.median, 2.0);
        assert_eq!(result.peak_bytes, Some(8.0));
    }

    #[test]
    fn failures_say_why() {
        let (_dir, mut p) = peers(
            "echo no module named torch >&2; exit 1",
            Duration::from_secs(60),
        );
        let why = |p: &Peers, script| p.run(script, &[]).unwrap_err().to_string();
        assert!(why(&p, "peer.py").contains("no module named torch"));
        assert!(why(&p, "other.py").contains("is missing"));
        p.python = None;
        assert!(why(&p, "peer.py").contains("--peer-python"));
        let (_dir, slow) = peers("exec sleep 20", Duration::from_millis(50));
        assert!(why(&slow, "peer.py").contains("not done"));
    }
}
