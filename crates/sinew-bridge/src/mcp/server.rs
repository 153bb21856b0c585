//! Starts an MCP server in a sandbox, or reaches it at an address.
//!
//! A command speaks MCP over standard input and output. A small program in the sandbox connects to the host
//! over the loopback interface and becomes the command, with the connection as both streams. Nothing has to
//! be copied between pipes. The sandbox shows the interpreter, its packages, and the folders of the files
//! that the command names; it has no network.

use super::keys::{McpServer, shown_folder};
use crate::code::{PythonCode, SYSTEM, in_path};
use crate::error::McpError;
use sinew_sandbox::{
    ExecOptions, ExecRequest, Limits, Network, Program, Sandbox, SandboxError, SandboxProvider,
    SandboxSpec,
};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::oneshot;
use tokio::task::AbortHandle;

/// Port inside on which the program finds the host.
const PORT: u16 = 4200;
/// Connects to the host and becomes the command.
const CONNECT: &str = "import os, socket, sys\n\
    s = socket.create_connection(('127.0.0.1', int(sys.argv[1])))\n\
    s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)\n\
    for fd in (0, 1):\n    os.dup2(s.fileno(), fd)\n\
    s.close()\n\
    os.execv(sys.argv[2], sys.argv[2:])\n";
/// Longest life of a server.
const LIFE: Duration = Duration::from_secs(30 * 24 * 3600);
/// Bytes that a server may write to its standard error.
const STDERR: u64 = 1 << 20;
/// Minimum limit of processes and threads: Node.js starts this many threads.
const PROCESSES: u64 = 32;

/// A server that sessions can be opened with.
#[derive(Clone)]
pub(crate) enum McpTarget {
    /// A command in sandboxes.
    Command(Command),
    /// An address, with its key.
    Url { url: String, key: Option<String> },
}

/// A command with its paths inside the sandbox.
#[derive(Clone)]
pub(crate) struct Command {
    provider: Arc<dyn SandboxProvider>,
    spec: SandboxSpec,
    /// Program and arguments inside.
    argv: Vec<String>,
    /// The command as it was typed, for messages.
    shown: String,
}

impl McpTarget {
    /// Finds the program and the folders that it needs. `sessions` bounds the sandboxes at once.
    pub(crate) fn find(
        server: &McpServer,
        spec: &SandboxSpec,
        sessions: usize,
    ) -> Result<Self, McpError> {
        if server.command.is_empty() {
            let key = match server.key_env.as_str() {
                "" => None,
                name => Some(std::env::var(name).map_err(|_| {
                    let why = format!("the environment variable is not set: export {name}=...");
                    McpError::Missing(why)
                })?),
            };
            let url = server.url.clone();
            return Ok(Self::Url { url, key });
        }
        let search = std::env::var("PATH").unwrap_or_default();
        Command::find(server, spec, sessions, &search).map(Self::Command)
    }

    /// Name for messages.
    pub(crate) fn shown(&self) -> &str {
        match self {
            Self::Command(command) => &command.shown,
            Self::Url { url, .. } => url,
        }
    }
}

impl Command {
    /// Finds the program, and shows what it and its arguments need.
    fn find(
        server: &McpServer,
        spec: &SandboxSpec,
        sessions: usize,
        search: &str,
    ) -> Result<Self, McpError> {
        let command = &server.command;
        let empty = || McpError::Missing("the command is empty".into());
        let (name, arguments) = command.split_first().ok_or_else(empty)?;
        let file = Path::new(name).file_name().unwrap_or_default();
        let is_python = file.to_string_lossy().starts_with("python");
        let interpreter = if is_python { name } else { "python3" };
        let mut code = PythonCode::find(&[], interpreter, search)?;
        let mut argv = vec![
            code.python.clone(),
            "-c".into(),
            CONNECT.into(),
            PORT.to_string(),
        ];
        argv.push(if is_python {
            code.python.clone()
        } else {
            program(&mut code, name, search)?
        });
        for argument in arguments {
            argv.push(shown_file(&mut code, argument)?);
        }
        let mut spec = spec.clone();
        // Packages of a virtual environment, and `print` without a delay.
        spec.env.extend([
            ("PYTHONPATH".to_owned(), code.path.join(":")),
            ("PYTHONUNBUFFERED".to_owned(), "1".to_owned()),
            ("PYTHONDONTWRITEBYTECODE".to_owned(), "1".to_owned()),
        ]);
        spec.env.extend(server.env.clone());
        spec.network = Network::Loopback;
        spec.limits = Limits {
            // Calls have deadlines.
            cpu_s: 1e8,
            output_bytes: STDERR,
            processes: spec.limits.processes.max(PROCESSES),
            ..spec.limits
        };
        let provider = code.process_provider(sessions + 1)?;
        Ok(Self {
            provider,
            spec,
            argv,
            shown: command.join(" "),
        })
    }

    /// Starts the command in a separate sandbox, and connects to it.
    pub(crate) async fn start(&self) -> Result<(TcpStream, Process), McpError> {
        let failed = |reason: String| McpError::Start {
            server: self.shown.clone(),
            reason,
        };
        let text = |e: SandboxError| failed(e.to_string());
        let io = |e: std::io::Error| failed(e.to_string());
        let mut sandbox = self.provider.acquire(&self.spec).await.map_err(text)?;
        let inside = sandbox.listen_inside(PORT).await.map_err(text)?;
        inside.set_nonblocking(true).map_err(io)?;
        let listener = TcpListener::from_std(inside).map_err(io)?;
        let (sender, mut ended) = oneshot::channel();
        let running = tokio::spawn(run(sandbox, self.argv.clone(), sender));
        // Dropping it ends the program and destroys the sandbox.
        let task = Task(running.abort_handle());
        tokio::select! {
            accepted = listener.accept() => {
                let (stream, _) = accepted.map_err(io)?;
                stream.set_nodelay(true).map_err(io)?;
                Ok((stream, Process { ended: Some(ended), _task: task }))
            }
            why = &mut ended => Err(failed(why.unwrap_or_default())),
        }
    }
}

/// A running command. Dropping it ends the program and its sandbox.
pub(crate) struct Process {
    ended: Option<oneshot::Receiver<String>>,
    _task: Task,
}

/// Ends a task when it is dropped.
struct Task(AbortHandle);

impl Drop for Task {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl Process {
    /// The program's end, if it ends within a moment.
    pub(crate) async fn ending(&mut self) -> Option<String> {
        let ended = self.ended.take()?;
        let soon = tokio::time::timeout(Duration::from_millis(500), ended).await;
        soon.ok()?.ok()
    }
}

/// Runs the program to its end, and reports how it ended.
async fn run(mut sandbox: Box<dyn Sandbox>, argv: Vec<String>, ended: oneshot::Sender<String>) {
    let request = ExecRequest {
        program: Program::Argv(argv),
        stdin: Vec::new(),
        deadline: LIFE,
    };
    let why = match sandbox.exec_with(request, ExecOptions::default()).await {
        Ok(result) => crate::worker::ending(&result),
        Err(e) => e.to_string(),
    };
    let _ = ended.send(why);
}

/// Path inside of a program that is not a Python: those of the system keep their place.
fn program(code: &mut PythonCode, name: &str, search: &str) -> Result<String, McpError> {
    let found = if name.contains('/') {
        Some(PathBuf::from(name))
    } else {
        in_path(name, search)
    };
    let none = || McpError::Missing(format!("there is no program {name} in PATH"));
    let found = found.ok_or_else(none)?;
    if SYSTEM.iter().any(|s| found.starts_with(s)) {
        return Ok(found.to_string_lossy().into_owned());
    }
    shown_file(code, &found.to_string_lossy())
}

/// An argument inside: the path of a file is that of its folder as the sandbox shows it.
fn shown_file(code: &mut PythonCode, argument: &str) -> Result<String, McpError> {
    let path = Path::new(argument);
    if !path.is_file() || SYSTEM.iter().any(|s| path.starts_with(s)) {
        return Ok(argument.to_owned());
    }
    let real = path.canonicalize();
    let path = real.map_err(|e| McpError::Missing(format!("{argument}: {e}")))?;
    let folder = shown_folder(&path);
    let inside = code.show(folder)?;
    let rest = path.strip_prefix(folder).unwrap_or(&path);
    Ok(format!("{inside}/{}", rest.to_string_lossy()))
}
