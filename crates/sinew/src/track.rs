//! `--track`: a process of Python that follows a run and sends its numbers to trackers of experiments.
//!
//! The program carries the source, `python/src/sinew/track.py`, so that an interpreter needs only the clients
//! of the trackers. The run continues and ends in the same way, whatever happens to the process.
//!
//! | when | a failure is |
//! |---|---|
//! | before the run | a refusal: an unknown tracker, no interpreter, no client |
//! | in the run | a line that begins with `track:` |
//! | after the run | the same, with the command that sends the rest, after `--track-wait` seconds |

use clap::Args;
use sinew_assembly::Failure;
use sinew_view::say;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, sync_channel};
use std::time::{Duration, Instant};

/// The follower.
const SOURCE: &str = include_str!("../../../python/src/sinew/track.py");
/// Exit status of the follower where a name is refused.
const UNKNOWN: i32 = 2;
/// Interval of checks for a process that is to end.
const LOOK: Duration = Duration::from_millis(20);
/// Bytes of a line that are shown.
const MAX_LINE: u64 = 1000;

/// Arguments of commands that measure something.
#[derive(Clone, Debug, Args)]
pub(crate) struct TrackArgs {
    /// Send the numbers of the run to trackers of experiments, by their own Python clients: clearml, mlflow,
    /// tensorboard, wandb, with commas between them; see docs/track.md
    #[arg(long, value_name = "NAMES")]
    track: Option<String>,
    /// Python interpreter that has the clients of --track: a path, or a name in PATH
    #[arg(
        long,
        value_name = "PYTHON",
        default_value = "python3",
        requires = "track"
    )]
    track_python: String,
    /// Seconds that the end of the run waits for trackers
    #[arg(long, value_name = "SECONDS", default_value_t = 30, requires = "track")]
    track_wait: u32,
}

/// Trackers whose clients are there.
#[derive(Clone, Debug)]
pub(crate) struct Trackers {
    names: String,
    python: String,
    wait_s: u32,
}

impl TrackArgs {
    /// The named trackers, if there are any.
    ///
    /// # Errors
    /// If there is no such tracker, interpreter or client.
    pub(crate) fn trackers(&self) -> Result<Option<Trackers>, Failure> {
        let Some(names) = self.track.clone() else {
            return Ok(None);
        };
        let trackers = Trackers {
            names,
            python: self.track_python.clone(),
            wait_s: self.track_wait,
        };
        let checked = trackers.check().output().map_err(|e| {
            let python = &trackers.python;
            Failure::outside(format!(
                "--track-python = {python:?}: {e}\n  hint: a path or a name in PATH of Python 3.10 or later"
            ))
        })?;
        if checked.status.success() {
            return Ok(Some(trackers));
        }
        let why = String::from_utf8_lossy(&checked.stderr);
        let why = format!("--track {}: {}", trackers.names, why.trim());
        if checked.status.code() == Some(UNKNOWN) {
            Err(Failure::input(why))
        } else {
            Err(Failure::outside(why))
        }
    }

    /// Arguments to repeat in the command that resumes, each after a space.
    pub(crate) fn typed(&self) -> String {
        let Some(names) = &self.track else {
            return String::new();
        };
        match self.track_python.as_str() {
            "python3" => format!(" --track {names}"),
            python => format!(" --track {names} --track-python {python}"),
        }
    }
}

impl Trackers {
    /// Trackers by their names, with commas between them, and the interpreter that has their clients.
    pub(crate) fn new(names: &str, python: &str) -> Self {
        Self {
            names: names.into(),
            python: python.into(),
            wait_s: 0,
        }
    }

    /// The command that says which client is missing.
    pub(crate) fn check(&self) -> Command {
        let mut command = self.command(Path::new("."));
        command.arg("--check");
        command
    }

    /// The follower of a run, not started.
    fn command(&self, run: &Path) -> Command {
        let mut command = Command::new(&self.python);
        command
            .args(["-c", SOURCE])
            .arg(run)
            .args(["--to", &self.names])
            // The current folder is not a place for modules.
            .env("PYTHONSAFEPATH", "1")
            .stdin(Stdio::null());
        command
    }

    /// Starts to follow the run in a folder, which is in use. A failure is reported, and the run continues.
    pub(crate) fn follow(&self, run: &Path) -> Option<Follower> {
        let mut command = self.command(run);
        command
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            // Ctrl-C of a terminal is for the run, whose end is sent as well.
            .process_group(0);
        let started = command.spawn();
        let mut child = started
            .inspect_err(|e| say(&format!("track: {}: {e}; the run goes on", self.python)))
            .ok()?;
        let said = child.stderr.take().map(pass_on);
        Some(Follower {
            child,
            said,
            trackers: self.clone(),
            run: run.to_owned(),
        })
    }
}

/// Says the lines of a pipe in a thread. The receiver is disconnected when the pipe ends.
fn pass_on(pipe: impl Read + Send + 'static) -> Receiver<()> {
    let (open, ended) = sync_channel(0);
    std::thread::spawn(move || {
        let _open = open;
        let mut pipe = BufReader::new(pipe);
        let mut line = Vec::new();
        // The rest of a longer line is printed as separate lines.
        while (&mut pipe)
            .take(MAX_LINE)
            .read_until(b'\n', &mut line)
            .is_ok_and(|n| n > 0)
        {
            say(String::from_utf8_lossy(&line).trim_end());
            line.clear();
        }
    });
    ended
}

/// A process that follows a run.
#[derive(Debug)]
pub(crate) struct Follower {
    child: Child,
    said: Option<Receiver<()>>,
    trackers: Trackers,
    run: PathBuf,
}

impl Drop for Follower {
    /// Waits for it, but not for long; the folder of the run is not in use any more.
    fn drop(&mut self) {
        let Trackers {
            names,
            python,
            wait_s,
        } = &self.trackers;
        let give_up = Instant::now() + Duration::from_secs((*wait_s).into());
        while matches!(self.child.try_wait(), Ok(None)) {
            if Instant::now() >= give_up {
                say(&format!(
                    "track: {names} did not take all in {wait_s} s after the end of the run: \
                     `{python} -m sinew.track {} --to {names}` sends the rest",
                    self.run.display()
                ));
                // Its processes are its group.
                let group = rustix::process::Pid::from_child(&self.child);
                let _ = rustix::process::kill_process_group(group, rustix::process::Signal::KILL);
                let _ = self.child.wait();
            }
            std::thread::sleep(LOOK);
        }
        // The follower may print an error at its end; a process that it left behind may hold the pipe open.
        if let Some(said) = &self.said {
            let _ = said.recv_timeout(Duration::from_secs(1));
        }
    }
}
