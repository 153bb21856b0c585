//! Peers that start `true` in isolation on this host: bubblewrap, crun, Docker.
//!
//! Each peer runs the same program, `true`, in isolation of about the same kind, in the same run. The ratio
//! is ours over the peer's median, so that less than 1 is faster; the target is 1.0. A peer that is not
//! installed, or has no daemon, is a row with the reason, and its target is not met.

use super::{BenchRow, OnRow, Timing, compared, plain, repeat, row, timing};
use sinew_sandbox::SandboxError;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Instant;

/// Runs of peers that take a tenth of a second and more.
const SLOW_RUNS: usize = 10;

/// One row for each peer; `ours` is a fresh sandbox that runs `true`.
pub(crate) async fn beside(ours: Timing, on_row: OnRow<'_>) {
    let rows = [
        ("bubblewrap", bubblewrap().await),
        ("crun_run", crun()),
        ("docker_run", docker_run()),
        ("docker_exec", docker_exec()),
    ];
    for (peer, theirs) in rows {
        let name = format!("true_fresh_beside_{peer}");
        on_row(match theirs {
            Ok(theirs) => {
                let ours = row(&name, ours);
                compared(ours, peer, theirs.median, Some(1.0))
            }
            Err(e) => missing(&name, peer, &e),
        });
    }
}

/// A row for a peer that cannot run here; its target, if there is one, is not met.
fn missing(name: &str, peer: &str, why: &SandboxError) -> BenchRow {
    BenchRow {
        name: name.into(),
        unit: "ms".into(),
        peer: Some(peer.into()),
        met: Some(false),
        why: Some(why.to_string()),
        ..BenchRow::default()
    }
}

/// An error of a peer, which ends in its row and never ends the bench.
fn failed(operation: &str, message: impl std::fmt::Display) -> SandboxError {
    SandboxError::Io {
        operation: operation.into(),
        message: message.to_string(),
    }
}

/// Measures `bwrap` with all namespaces, the system's folder read-only and an empty temporary folder, started
/// again for each run.
async fn bubblewrap() -> Result<Timing, SandboxError> {
    let line = "bwrap --unshare-all --die-with-parent --ro-bind /usr /usr --symlink usr/lib /lib \
                --symlink usr/lib64 /lib64 --proc /proc --dev /dev --tmpfs /tmp /usr/bin/true";
    let argv: Vec<&str> = line.split_whitespace().collect();
    repeat(|| async { plain(&argv) }).await
}

/// A shell in a separate mount namespace that runs one command for each line it is sent.
struct Loop {
    child: Child,
    asked: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl Loop {
    /// Runs `before` once, then `command` for each line. The shell answers an empty line, or what the
    /// command printed if it failed. Unsharing the mount namespace needs root.
    fn start(before: &str, command: &str) -> Result<Self, SandboxError> {
        let start = |e: std::io::Error| failed("start unshare", e);
        let script = format!(
            "{before}; while read i; do if e=$({command} 2>&1); then echo; else echo \"failed: $e\" \
             | tr '\\n' ' '; echo; fi; done"
        );
        let mut child = Command::new("unshare")
            .args(["--mount", "--propagation", "private", "sh", "-c", &script])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .map_err(start)?;
        let (asked, answers) = (child.stdin.take(), child.stdout.take());
        let (Some(asked), Some(answers)) = (asked, answers) else {
            return Err(failed("start unshare", "no pipes"));
        };
        Ok(Self {
            child,
            asked,
            answers: BufReader::new(answers),
        })
    }

    /// Milliseconds from a line sent to its answer. The shell's own start is not counted; its fork of the
    /// command is, as a launcher would have to do the same.
    fn time(mut self, runs: usize) -> Result<Timing, SandboxError> {
        let mut ms = Vec::new();
        let measured = (0..runs).try_for_each(|i| {
            let begun = Instant::now();
            let mut answer = String::new();
            writeln!(self.asked, "{i}").map_err(|e| failed("ask the shell", e))?;
            let read = self.answers.read_line(&mut answer);
            match read.map_err(|e| failed("ask the shell", e))? {
                0 => Err(failed("ask the shell", "it ended: namespaces need root")),
                _ if !answer.trim().is_empty() => Err(failed("run", answer.trim())),
                _ => {
                    ms.push(begun.elapsed().as_secs_f64() * 1e3);
                    Ok(())
                }
            }
        });
        drop(self.asked);
        let ended = self.child.wait().map_err(|e| failed("end the shell", e));
        measured.and(ended).map(|_| timing(ms))
    }
}

/// An OCI bundle over the host's system folders, run by crun without a daemon.
///
/// 50 runs. Control groups are off: crun has less to do than a sandbox with limits.
pub(super) fn crun() -> Result<Timing, SandboxError> {
    let made = |e: std::io::Error| failed("make a bundle", e);
    let folder = tempfile::tempdir().map_err(made)?;
    let root = folder.path().join("rootfs");
    for below in ["usr", "proc", "dev"] {
        std::fs::create_dir_all(root.join(below)).map_err(made)?;
    }
    for link in ["bin", "lib", "lib64"] {
        std::os::unix::fs::symlink(format!("usr/{link}"), root.join(link)).map_err(made)?;
    }
    std::fs::write(folder.path().join("config.json"), BUNDLE).map_err(made)?;
    let (bundle, id) = (folder.path().display(), std::process::id());
    // crun refuses hosts where version 2 has a controller in addition to version 1; mounted as version 1 in
    // only this namespace, it goes back when the shell ends.
    let before =
        format!("mkdir {bundle}/h; mount -t cgroup -o hugetlb cgroup {bundle}/h 2>/dev/null");
    let run = format!("crun --cgroup-manager=disabled run -b {bundle} sinew-bench-{id}-$i");
    Loop::start(&before, &run)?.time(50)
}

/// All namespaces, no network, no terminal (OCI runtime specification 1.0).
const BUNDLE: &str = r#"{"ociVersion":"1.0.0","root":{"path":"rootfs","readonly":true},
"process":{"terminal":false,"user":{"uid":0,"gid":0},"cwd":"/","args":["/usr/bin/true"],"env":["PATH=/usr/bin"],"noNewPrivileges":true},
"mounts":[{"destination":"/usr","type":"bind","source":"/usr","options":["bind","ro"]},
{"destination":"/proc","type":"proc","source":"proc"},{"destination":"/dev","type":"tmpfs","source":"tmpfs"}],
"linux":{"namespaces":[{"type":"pid"},{"type":"mount"},{"type":"ipc"},{"type":"uts"},{"type":"network"}]}}"#;

/// An image with a static busybox in it; removed when dropped.
struct Image(String);

impl Image {
    /// Made with the daemon that the `docker` command finds (`DOCKER_HOST`).
    fn import() -> Result<Self, SandboxError> {
        plain(&["docker", "version"]).map_err(|e| {
            failed(
                "docker",
                format!("no daemon answers ({e}); start dockerd or set DOCKER_HOST"),
            )
        })?;
        let busybox = Path::new("/bin/busybox");
        if !busybox.exists() {
            return Err(failed(
                "docker",
                "/bin/busybox is missing: install busybox-static",
            ));
        }
        let image = Self(format!("sinew-bench:{}", std::process::id()));
        let import = format!(
            "tar -C / --transform 's,^bin/busybox,bin/true,' -c bin/busybox | docker import - {}",
            image.0
        );
        plain(&["sh", "-c", &import])?;
        Ok(image)
    }
}

impl Drop for Image {
    fn drop(&mut self) {
        let _ = plain(&["docker", "rmi", "-f", &self.0]);
    }
}

/// Milliseconds of `SLOW_RUNS` runs of a whole command, the client included.
fn slowly(argv: &[&str]) -> Result<Timing, SandboxError> {
    let mut ms = Vec::new();
    for _ in 0..SLOW_RUNS {
        let begun = Instant::now();
        plain(argv)?;
        ms.push(begun.elapsed().as_secs_f64() * 1e3);
    }
    Ok(timing(ms))
}

/// A whole container by the `docker` command.
///
/// `--rm` and no network. The row includes the client, the daemon, the container's start and its removal.
pub(super) fn docker_run() -> Result<Timing, SandboxError> {
    let image = Image::import()?;
    slowly(&[
        "docker",
        "run",
        "--rm",
        "--network=none",
        &image.0,
        "/bin/true",
    ])
}

/// A program in a container that runs, by the `docker` command.
///
/// The container sleeps for at most ten minutes and is removed afterwards, also if a run failed.
pub(super) fn docker_exec() -> Result<Timing, SandboxError> {
    let image = Image::import()?;
    let name = format!("sinew-bench-{}", std::process::id());
    // Busybox under the name of `true` is `true`: waiting needs the shell's own name.
    let import = ["docker", "run", "-d", "--network=none", "--name", &name];
    let wait = [
        "-v",
        "/bin/busybox:/bin/sleep:ro",
        &image.0,
        "/bin/sleep",
        "600",
    ];
    let timed = plain(&[&import[..], &wait].concat())
        .and_then(|()| slowly(&["docker", "exec", &name, "/bin/true"]));
    let _ = plain(&["docker", "rm", "-f", &name]);
    timed
}
