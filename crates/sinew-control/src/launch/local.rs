//! Child processes of the owner on its own host: each in its own process group, with a log file.
//!
//! The standard input of a child is a pipe of the owner. It closes when the owner ends in any way, and the
//! child ends with it (`--stop-on-eof`).

use super::{LaunchError, Launched, LaunchedRole, Launcher, RoleSpec, files, shell_line};
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process_group, waitid};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

const ENGINE: &str = "local";
/// Time between the request to end and the end by force.
const GRACE: Duration = Duration::from_secs(30);
/// Time for all children when the launcher is dropped, and interval of looks.
const LAST_GRACE: Duration = Duration::from_secs(5);
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// Ended children that are remembered.
const MAX_ENDED: usize = 256;

/// Starts roles as child processes. Dropping it ends them all.
#[derive(Debug)]
pub struct LocalLauncher {
    logs: PathBuf,
    children: Mutex<BTreeMap<String, Process>>,
}

#[derive(Debug)]
struct Process {
    child: Child,
    /// Kept open: the child ends when it closes.
    input: Option<ChildStdin>,
    /// The time when it was asked to end.
    asked: Option<Instant>,
    ended: Option<String>,
}

impl Process {
    fn signal(&self, signal: Signal) {
        if self.ended.is_none() {
            // It may have ended just now, which is what is wanted.
            let _ = kill_process_group(Pid::from_child(&self.child), signal);
        }
    }

    /// Looks whether it ended. Its group is killed before its number can be used again.
    fn look(&mut self) {
        if self.ended.is_some() {
            return;
        }
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        let exited = waitid(WaitId::Pid(Pid::from_child(&self.child)), options);
        if matches!(exited, Ok(Some(_))) {
            self.signal(Signal::KILL);
            let status = self.child.wait();
            self.ended = Some(status.map_or_else(|e| e.to_string(), |status| status.to_string()));
        } else if self.asked.is_some_and(|asked| asked.elapsed() >= GRACE) {
            self.signal(Signal::KILL);
        }
    }

    fn ask_to_end(&mut self) {
        if self.asked.is_none() {
            self.asked = Some(Instant::now());
            self.input = None;
            self.signal(Signal::TERM);
        }
    }
}

impl LocalLauncher {
    /// A launcher with a folder for the logs, which is made when the first role starts.
    pub fn new(logs: &Path) -> Self {
        Self {
            logs: logs.to_owned(),
            children: Mutex::default(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Process>> {
        self.children.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn log(&self, name: &str) -> PathBuf {
        self.logs.join(format!("{name}.log"))
    }

    fn spawn(&self, spec: &RoleSpec) -> Result<Process, LaunchError> {
        fs::create_dir_all(&self.logs).map_err(LaunchError::file("make", &self.logs))?;
        let path = self.log(&spec.name);
        let log = File::options().create(true).append(true).open(&path);
        let log = log.map_err(LaunchError::file("open", &path))?;
        let errors = log.try_clone().map_err(LaunchError::file("open", &path))?;
        let Some((program, arguments)) = spec.command.split_first() else {
            return Err(LaunchError::setting(
                "command",
                "",
                "a program with its arguments",
            ));
        };
        let mut command = Command::new(program);
        if let Some(folder) = &spec.folder {
            command.current_dir(folder);
        }
        let child = command
            .args(arguments)
            .envs(spec.env.iter().map(|(name, value)| (name, value)))
            .stdin(Stdio::piped())
            .stdout(log)
            .stderr(errors)
            // Ctrl-C is for the owner, which then ends its children.
            .process_group(0)
            .spawn();
        let mut child = child.map_err(|error| LaunchError::Program {
            engine: ENGINE,
            program: program.clone(),
            error,
        })?;
        Ok(Process {
            input: child.stdin.take(),
            child,
            asked: None,
            ended: None,
        })
    }
}

impl Launcher for LocalLauncher {
    fn name(&self) -> &'static str {
        ENGINE
    }

    fn interval(&self) -> Duration {
        Duration::from_millis(500)
    }

    fn preview(&self, spec: &RoleSpec) -> Result<String, LaunchError> {
        Ok(shell_line(&spec.command))
    }

    fn ensure(&self, spec: &RoleSpec) -> Result<(), LaunchError> {
        let mut children = self.lock();
        if children.contains_key(&spec.name) {
            return Ok(());
        }
        let process = self.spawn(spec)?;
        children.insert(spec.name.clone(), process);
        let ended = children
            .iter()
            .filter(|(_, process)| process.ended.is_some());
        let ended: Vec<String> = ended.map(|(name, _)| name.clone()).collect();
        for name in ended.iter().take(ended.len().saturating_sub(MAX_ENDED)) {
            children.remove(name);
        }
        Ok(())
    }

    fn list(&self) -> Result<Vec<LaunchedRole>, LaunchError> {
        let mut children = self.lock();
        let state = |(name, process): (&String, &mut Process)| {
            process.look();
            LaunchedRole {
                name: name.clone(),
                state: match &process.ended {
                    Some(why) => Launched::Ended(why.clone()),
                    None => Launched::Running,
                },
            }
        };
        Ok(children.iter_mut().map(state).collect())
    }

    fn logs(&self, name: &str, lines: usize) -> Result<String, LaunchError> {
        let path = self.log(name);
        files::tail(&path, lines).map_err(LaunchError::file("read", &path))
    }

    fn stop(&self, name: &str) -> Result<(), LaunchError> {
        if let Some(process) = self.lock().get_mut(name) {
            process.look();
            process.ask_to_end();
        }
        Ok(())
    }
}

impl Drop for LocalLauncher {
    fn drop(&mut self) {
        let mut children = self.lock();
        children.values_mut().for_each(Process::ask_to_end);
        let end = Instant::now() + LAST_GRACE;
        loop {
            children.values_mut().for_each(Process::look);
            if children.values().all(|process| process.ended.is_some()) {
                return;
            }
            if Instant::now() >= end {
                break;
            }
            std::thread::sleep(LOOK_EVERY);
        }
        for process in children.values_mut() {
            process.signal(Signal::KILL);
            let _ = process.child.wait();
        }
    }
}
