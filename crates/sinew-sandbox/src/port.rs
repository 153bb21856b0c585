//! The `Sandbox` port: the operations of every level of isolation.

use crate::guest::Entry;
use futures::future::BoxFuture;
use serde::{Deserialize, Serialize};
pub use sinew_jail::spec::{Limits, Network, Protection};
use std::fs::File;
use std::time::Duration;

/// Requested properties of a sandbox.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct SandboxSpec {
    /// Limits on its resources.
    pub limits: Limits,
    /// Environment variables; nothing of the host's environment is inherited.
    pub env: Vec<(String, String)>,
    /// Refuse if any protection of the level cannot be enforced on this host.
    pub strict: bool,
    /// Network that it has.
    pub network: Network,
    /// Layer that takes what is written anywhere. `None`: only the work folder and `/tmp` can be written.
    pub writable_root: Option<WritableRoot>,
}

impl SandboxSpec {
    /// Refuses a writable root, for levels that have none.
    ///
    /// # Errors
    /// [`SandboxError::Request`] with the level.
    pub fn refuse_writable_root(&self, level: &str) -> Result<(), SandboxError> {
        match &self.writable_root {
            None => Ok(()),
            Some(root) => Err(SandboxError::Request {
                field: "writable_root",
                value: format!("{} bytes at level {level}", root.bytes),
                allowed:
                    "only level container has writable roots; use sandbox.level = \"container\" \
                          with an image, or leave it out"
                        .into(),
            }),
        }
    }

    /// Refuses a level that lacks one of the protections, if all were requested with [`Self::strict`].
    ///
    /// # Errors
    /// [`SandboxError::NotEnforced`] with the names and reasons of the missing ones.
    pub fn refuse_missing<'a>(
        &self,
        protections: impl IntoIterator<Item = &'a Protection>,
    ) -> Result<(), SandboxError> {
        let all = protections.into_iter();
        let missing = all.filter(|p| self.strict && !p.enforced);
        let missing: Vec<_> = missing.map(|p| format!("{} ({})", p.name, p.how)).collect();
        if missing.is_empty() {
            return Ok(());
        }
        Err(SandboxError::NotEnforced {
            missing: missing.join(", "),
        })
    }
}

/// Layer above the image of a sandbox, which ends with the sandbox. Programs can write everywhere, and may
/// run as root of the sandbox, who has no rights outside.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WritableRoot {
    /// Bytes of the layer. Where it is in memory, they count towards [`Limits::memory_bytes`], too.
    pub bytes: u64,
    /// User of programs that name none: a name or number of the image, or two with a colon between them for
    /// user and group.
    pub user: String,
    /// Absolute path of the folder in which programs start.
    pub workdir: String,
}

impl Default for WritableRoot {
    fn default() -> Self {
        Self {
            bytes: 1 << 30,
            user: "root".into(),
            workdir: "/".into(),
        }
    }
}

/// Program to run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Program {
    /// Any binary that the sandbox sees, with arguments.
    Argv(Vec<String>),
    /// Python code, run as a program in a fresh interpreter.
    Python(String),
    /// A `/bin/sh` script.
    Shell(String),
}

/// One execution.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExecRequest {
    /// Program to run.
    pub program: Program,
    /// Bytes on standard input, which is closed after them.
    pub stdin: Vec<u8>,
    /// Wall time after which everything that runs is killed.
    pub deadline: Duration,
}

impl ExecRequest {
    /// A program without input.
    pub fn new(program: Program, deadline: Duration) -> Self {
        Self {
            program,
            stdin: Vec::new(),
            deadline,
        }
    }
}

/// Options of an execution in addition to its program.
#[derive(Clone, Debug, Default)]
pub struct ExecOptions {
    /// Environment variables of this execution, after those of [`SandboxSpec::env`].
    pub env: Vec<(String, String)>,
    /// Gets output as it comes, in addition to the result; the same bound holds. A full
    /// channel holds the program back; a closed one is ignored.
    pub output: Option<tokio::sync::mpsc::Sender<OutputChunk>>,
    /// User of this execution, in the form of [`WritableRoot::user`]. Needs a writable root.
    pub user: Option<String>,
    /// Folder in which it starts, in the form of [`WritableRoot::workdir`]. Needs a writable root.
    pub workdir: Option<String>,
}

impl ExecOptions {
    /// Refuses a chosen user or folder, for sandboxes that have one of each.
    ///
    /// # Errors
    /// [`SandboxError::Request`] with the option.
    pub fn refuse_user_and_workdir(&self) -> Result<(), SandboxError> {
        let options = [("user", &self.user), ("workdir", &self.workdir)];
        match options
            .into_iter()
            .find_map(|(f, v)| Some((f, v.as_ref()?)))
        {
            None => Ok(()),
            Some((field, value)) => Err(SandboxError::Request {
                field,
                value: format!("{value:?}"),
                allowed:
                    "it can be chosen in sandboxes with a writable root only; leave it out, or set \
                          writable_root at level container"
                        .into(),
            }),
        }
    }
}

/// Options of [`Sandbox::upload`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct UploadOptions {
    /// Owner of what is made, in the form of [`WritableRoot::user`]. `None`: root.
    pub user: Option<String>,
    /// Remove what is at the path first.
    pub replace: bool,
}

/// Size of a terminal, in characters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TerminalSize {
    /// Lines.
    pub rows: u16,
    /// Characters of a line.
    pub columns: u16,
}

/// Event at a terminal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TerminalInput {
    /// Bytes were typed.
    Typed(Vec<u8>),
    /// The terminal has another size.
    Resized(TerminalSize),
}

/// The terminal of an execution.
#[derive(Debug)]
pub struct Terminal {
    /// Initial size.
    pub size: TerminalSize,
    /// Environment variables of this execution, after those of [`SandboxSpec::env`].
    pub env: Vec<(String, String)>,
    /// Keys typed and changes of the size. When the channel closes, the terminal hangs up and the program is
    /// killed.
    pub input: tokio::sync::mpsc::Receiver<TerminalInput>,
    /// Gets what the program writes, as bytes that can command a terminal. A full channel holds the
    /// program back; when it closes, the terminal hangs up.
    pub output: tokio::sync::mpsc::Sender<Vec<u8>>,
}

/// A piece of output.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OutputChunk {
    /// Stream to which it was written.
    pub stream: OutputStream,
    /// The bytes.
    pub bytes: Vec<u8>,
}

/// Standard output or standard error.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OutputStream {
    /// Standard output.
    Stdout,
    /// Standard error.
    Stderr,
}

/// Way in which an execution ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "type")]
pub enum Ending {
    /// The program exited by itself.
    Exited {
        /// Exit code.
        code: i32,
    },
    /// A signal ended it.
    Signalled {
        /// Number of the signal.
        signal: i32,
    },
    /// The deadline or the limit of CPU time passed.
    Timeout,
    /// The memory limit was reached and the kernel killed it.
    OutOfMemory,
    /// It failed after the limit of processes had been reached.
    TooManyProcesses,
    /// It wrote more than the captured bytes; killed.
    OutputLimit,
    /// The program was killed because of a forbidden system call.
    Denied,
    /// The sandbox itself died.
    SandboxDied,
}

impl std::fmt::Display for Ending {
    /// The name that it has in JSON, with its number.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Exited { code } => write!(f, "exited {code}"),
            Self::Signalled { signal } => write!(f, "signalled {signal}"),
            Self::Timeout => f.write_str("timeout"),
            Self::OutOfMemory => f.write_str("out_of_memory"),
            Self::TooManyProcesses => f.write_str("too_many_processes"),
            Self::OutputLimit => f.write_str("output_limit"),
            Self::Denied => f.write_str("denied"),
            Self::SandboxDied => f.write_str("sandbox_died"),
        }
    }
}

/// Resources that an execution used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Usage {
    /// User and system CPU seconds.
    pub cpu_s: f64,
    /// Largest memory: of the whole sandbox where a cgroup counts it, else of its largest process.
    pub peak_memory_bytes: u64,
    /// Seconds from the request to the end.
    pub wall_s: f64,
    /// Bytes that it wrote to standard output and standard error, as far as they were read.
    pub output_bytes: u64,
    /// Bytes that files in its folders take after it; 0 where the level does not count them.
    pub file_bytes: u64,
}

/// Resources that a sandbox holds, and its counts so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct SandboxStats {
    /// Memory of it now, files in its folders included.
    pub memory_bytes: u64,
    /// Processes and threads now.
    pub processes: u64,
    /// Bytes of files in its folders.
    pub file_bytes: u64,
    /// Files and folders in its folders.
    pub file_count: u64,
    /// Layers of snapshots below its work folder.
    pub layers: u64,
    /// Executions that ended.
    pub executions: u64,
    /// CPU seconds of all executions that ended.
    pub cpu_s: f64,
}

/// The work folder of a sandbox at one moment, frozen. Clones share it; the last one frees it.
#[derive(Clone, Debug)]
pub struct Snapshot {
    /// Level that made it and can start from it.
    pub level: &'static str,
    /// Number within its provider.
    pub id: u64,
    /// State that the level keeps for it.
    pub handle: std::sync::Arc<dyn std::any::Any + Send + Sync>,
    /// The stores that it keeps alive, by their numbers within the provider, and the bytes of each.
    /// Snapshots can share them.
    pub stores: std::sync::Arc<[(u64, u64)]>,
}

/// The outcome of an execution.
#[derive(Clone, Debug, PartialEq)]
pub struct ExecResult {
    /// Way in which it ended.
    pub ending: Ending,
    /// Captured standard output, at most [`Limits::output_bytes`].
    pub stdout: Vec<u8>,
    /// Captured standard error, at most [`Limits::output_bytes`].
    pub stderr: Vec<u8>,
    /// Whether output was cut.
    pub truncated: bool,
    /// Resources that it used.
    pub usage: Usage,
    /// Protections that were really in force.
    pub protections: std::sync::Arc<Vec<Protection>>,
}

/// Reason why a sandbox could not do what was asked; never the doing of the code inside.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SandboxError {
    /// The host cannot isolate.
    #[error("sandbox level {level} cannot be built on this host: {reason}")]
    Unavailable {
        /// Level asked for.
        level: String,
        /// Missing part and how to get it.
        reason: String,
    },
    /// `strict` was requested.
    #[error("sandbox.strict = true, but this host does not enforce: {missing}")]
    NotEnforced {
        /// Names and reasons.
        missing: String,
    },
    /// No room within the waiting time.
    #[error("no sandbox became free within {waited_s} s: {live} are live, the limit is {limit}")]
    Busy {
        /// Seconds waited.
        waited_s: u64,
        /// Live sandboxes.
        live: usize,
        /// Most live sandboxes.
        limit: usize,
    },
    /// A server has no room now; it may have some later.
    #[error("sandbox level {level} has no room: {reason}")]
    NoRoom {
        /// Level asked for.
        level: String,
        /// Answer of the server.
        reason: String,
    },
    /// A request that no sandbox can take.
    #[error("{field} is {value}: {allowed}")]
    Request {
        /// Field at fault.
        field: &'static str,
        /// The value.
        value: String,
        /// Allowed values.
        allowed: String,
    },
    /// The level has no such operation.
    #[error("this level of sandbox cannot {operation}")]
    Unsupported {
        /// Operation that was requested.
        operation: &'static str,
    },
    /// The sandbox is gone.
    #[error("sandbox died: {0}")]
    Died(String),
    /// The host of the sandbox is gone, and with it all sandboxes that it had.
    #[error("the sandbox host {host} is lost: {reason}")]
    HostLost {
        /// Address of the host.
        host: String,
        /// Reason, in words.
        reason: String,
    },
    /// A system call on the host's side failed.
    #[error("{operation}: {message}")]
    Io {
        /// Operation that failed.
        operation: String,
        /// Message of the system.
        message: String,
    },
}

impl SandboxError {
    /// A system call on the host's side that failed.
    pub fn io(operation: impl Into<String>, e: impl std::fmt::Display) -> Self {
        Self::Io {
            operation: operation.into(),
            message: e.to_string(),
        }
    }
}

/// Return type of a sandbox's methods.
pub type SandboxFuture<'a, T> = BoxFuture<'a, Result<T, SandboxError>>;

/// One isolated place. Dropping it destroys it; [`Sandbox::destroy`] waits for that.
pub trait Sandbox: Send {
    /// Runs a program to its end. Files in the work folder stay for the next execution, processes do not. A
    /// level that takes no [`ExecOptions`] implements only this method.
    fn exec(&mut self, request: ExecRequest) -> SandboxFuture<'_, ExecResult> {
        self.exec_with(request, ExecOptions::default())
    }

    /// Writes a file below the work folder, creating folders on the way. Links are not followed.
    fn write_file<'a>(&'a mut self, path: &'a str, content: &'a [u8]) -> SandboxFuture<'a, ()>;

    /// Reads a regular file below the work folder, at most `max_bytes`. Links are not followed.
    fn read_file<'a>(&'a mut self, path: &'a str, max_bytes: u64) -> SandboxFuture<'a, Vec<u8>>;

    /// Puts entries below a folder, which is made if it is missing, by its absolute path. Files and links
    /// that are there already are replaced. No part of a path may be a link. Needs a writable root.
    fn upload<'a>(
        &'a mut self,
        to: &'a str,
        entries: &'a [Entry],
        options: &'a UploadOptions,
    ) -> SandboxFuture<'a, ()> {
        let _ = (to, entries, options);
        unsupported("take files at absolute paths without a writable root")
    }

    /// The entries below a folder by its absolute path, at most `max_bytes` of content; a regular file gives
    /// one entry with its name. `None` if nothing is there. Devices, pipes and sockets are left out. No part
    /// of the path may be a link. Needs a writable root.
    fn download<'a>(
        &'a mut self,
        path: &'a str,
        max_bytes: u64,
    ) -> SandboxFuture<'a, Option<Vec<Entry>>> {
        let _ = (path, max_bytes);
        unsupported("give files at absolute paths without a writable root")
    }

    /// Same as [`Sandbox::exec`], with environment variables for this execution and with output as it comes.
    fn exec_with(
        &mut self,
        request: ExecRequest,
        options: ExecOptions,
    ) -> SandboxFuture<'_, ExecResult> {
        let _ = (request, options);
        unsupported("take an environment or stream output")
    }

    /// Runs a program on a separate terminal, which is its standard input, output and error. Nothing is
    /// captured, so that [`Limits::output_bytes`] does not hold; `stdin` of the request is empty.
    fn exec_on_terminal(
        &mut self,
        request: ExecRequest,
        terminal: Terminal,
    ) -> SandboxFuture<'_, ExecResult> {
        let _ = (request, terminal);
        unsupported("give a program a terminal")
    }

    /// Freezes the work folder. Programs that run later do not change the snapshot.
    fn snapshot(&mut self) -> SandboxFuture<'_, Snapshot> {
        unsupported("take snapshots")
    }

    /// Back to what it was when it was acquired or forked: all files are gone, nothing runs.
    fn reset(&mut self) -> SandboxFuture<'_, ()> {
        unsupported("reset")
    }

    /// Returns the resources that it holds now.
    fn stats(&mut self) -> SandboxFuture<'_, SandboxStats> {
        unsupported("tell what it holds")
    }

    /// Whether it died with what kept it, so that nothing can be asked of it any more.
    fn is_dead(&self) -> bool {
        false
    }

    /// Listens on `127.0.0.1:port` inside; connections are accepted outside. Needs
    /// [`Network::Loopback`].
    fn listen_inside(&mut self, port: u16) -> SandboxFuture<'_, std::net::TcpListener> {
        let _ = port;
        unsupported("listen inside")
    }

    /// Ends it and frees all that it held.
    fn destroy(self: Box<Self>) -> SandboxFuture<'static, ()>;
}

fn unsupported<T: Send + 'static>(operation: &'static str) -> SandboxFuture<'static, T> {
    Box::pin(async move { Err(SandboxError::Unsupported { operation }) })
}

/// Makes sandboxes of one level.
pub trait SandboxProvider: Send + Sync {
    /// Name of the level: `process`, ...
    fn level(&self) -> &'static str;

    /// A clean, unused sandbox. Waits while the limit of live ones is reached.
    fn acquire<'a>(&'a self, spec: &'a SandboxSpec) -> SandboxFuture<'a, Box<dyn Sandbox>>;

    /// Protections that this host enforces at this level, and the reasons for those that it does not.
    fn protections(&self) -> std::sync::Arc<Vec<Protection>>;

    /// Whether sandboxes can be made now, else why not.
    ///
    /// # Errors
    /// [`SandboxError::Unavailable`] with the broken part.
    fn health(&self) -> Result<(), SandboxError> {
        Ok(())
    }

    /// Performance degradations on this host and their reasons; protections are the same.
    fn degradations(&self) -> Vec<String> {
        Vec::new()
    }

    /// A new sandbox whose work folder starts as the snapshot's.
    fn fork<'a>(
        &'a self,
        spec: &'a SandboxSpec,
        snapshot: &'a Snapshot,
    ) -> SandboxFuture<'a, Box<dyn Sandbox>> {
        let _ = (spec, snapshot);
        unsupported("fork")
    }

    /// A snapshot as an archive of at most `max_bytes` that depends only on its content: the same files give
    /// the same bytes, so that their hash identifies them. The archive is in an unnamed file, whose position
    /// is at its start.
    fn export_file<'a>(
        &'a self,
        snapshot: &'a Snapshot,
        max_bytes: u64,
    ) -> SandboxFuture<'a, File> {
        let _ = (snapshot, max_bytes);
        unsupported("export snapshots")
    }

    /// A snapshot from an exported archive of at most `max_bytes` of content, which is read from
    /// where the file stands.
    fn import_file(&self, archive: File, max_bytes: u64) -> SandboxFuture<'_, Snapshot> {
        let _ = (archive, max_bytes);
        unsupported("import snapshots")
    }

    /// Same as [`SandboxProvider::export_file`], in memory.
    fn export<'a>(&'a self, snapshot: &'a Snapshot) -> SandboxFuture<'a, Vec<u8>> {
        Box::pin(async move {
            let file = self.export_file(snapshot, MAX_ARCHIVE_BYTES).await?;
            crate::archive::unspool(&file, MAX_ARCHIVE_BYTES)
                .map_err(|e| SandboxError::io("export", e))
        })
    }

    /// Same as [`SandboxProvider::import_file`], from memory.
    fn import<'a>(&'a self, archive: &'a [u8], max_bytes: u64) -> SandboxFuture<'a, Snapshot> {
        Box::pin(async move {
            let file = crate::archive::spool(archive).map_err(|e| SandboxError::io("import", e))?;
            self.import_file(file, max_bytes).await
        })
    }
}

/// Largest archive that is held in memory.
const MAX_ARCHIVE_BYTES: u64 = 2 << 30;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn levels_without_writable_roots_refuse_them_by_name() {
        let mut spec = SandboxSpec::default();
        spec.refuse_writable_root("process").unwrap();
        spec.writable_root = Some(WritableRoot::default());
        let refused = spec.refuse_writable_root("process").unwrap_err();
        let text = refused.to_string();
        assert!(
            text.contains("level process") && text.contains("level container"),
            "{text}"
        );
        ExecOptions::default().refuse_user_and_workdir().unwrap();
        let options = ExecOptions {
            workdir: Some("/app".into()),
            ..ExecOptions::default()
        };
        let refused = options.refuse_user_and_workdir().unwrap_err();
        assert!(matches!(
            refused,
            SandboxError::Request {
                field: "workdir",
                ..
            }
        ));
    }
}
