//! The processes of a server on this host: one for each device, started, watched and killed together.
//!
//! They form one process group. A thread looks at them: when one ends, the others get a moment to report what
//! they saw, and are killed, so that no call waits for a collective that cannot end. Each rank also watches
//! its standard input, a pipe of this process, and ends with it.

mod processes;

use crate::client::Watch;
use crate::error::TorchError;
use crate::sources;
use crate::transport::ServerAddress;
use processes::{Processes, RankProcess};
use std::ffi::OsString;
use std::fmt;
use std::fs::{self, File, Permissions};
use std::io::Write;
use std::net::TcpListener;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// Network interface of ranks on one host.
const LOOPBACK: &str = if cfg!(target_os = "macos") {
    "lo0"
} else {
    "lo"
};
/// Interval of looking for the address of the server.
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// Ports that are tried for the rendezvous.
const PORT_TRIES: usize = 100;
/// Random bytes of a token.
const TOKEN_BYTES: usize = 32;

/// Settings of ranks on this host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankOptions {
    /// Python with the packages of [`requirements`](crate::requirements()).
    pub python: PathBuf,
    /// Number of processes, at least 1.
    pub ranks: usize,
    /// Threads of each process; `None`: torch chooses.
    pub threads: Option<usize>,
    /// Folder for the standard error of each rank, `rank-0.log` and so on.
    pub logs: PathBuf,
    /// Folder in which the private folder with sources and token is created; `None`: that of the system.
    pub scratch: Option<PathBuf>,
    /// Time until the server must listen. Default: 5 minutes.
    pub ready: Duration,
    /// Limit of each collective of the ranks, in whole seconds. Default: 10 minutes.
    pub collective: Duration,
}

impl RankOptions {
    /// `ranks` processes of `python`, whose standard errors are in `logs`.
    pub fn new(python: impl Into<PathBuf>, ranks: usize, logs: impl Into<PathBuf>) -> Self {
        Self {
            python: python.into(),
            ranks,
            threads: None,
            logs: logs.into(),
            scratch: None,
            ready: Duration::from_secs(300),
            collective: Duration::from_secs(600),
        }
    }
}

/// A rank that ended before it was to end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EndedRank {
    /// Its number, from 0.
    pub rank: usize,
    /// Its exit status or signal, in words.
    pub status: String,
    /// The last 40 lines of its standard error at most.
    pub tail: String,
}

impl fmt::Display for EndedRank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.status)?;
        if self.tail.is_empty() {
            return f.write_str("; its standard error is empty");
        }
        write!(f, "; the end of its standard error:\n{}", self.tail)
    }
}

/// The ranks of a server. Dropping it kills them.
#[derive(Debug)]
pub struct RankGroup {
    server: ServerAddress,
    // Dropped before their folder.
    processes: Processes,
    _private: TempDir,
}

impl RankGroup {
    /// Starts all ranks and waits until the server listens. Nothing is loaded yet.
    ///
    /// # Errors
    /// If a process cannot be started, ends, or the server does not listen in time. All are killed then.
    pub fn start(options: &RankOptions) -> Result<Self, TorchError> {
        if options.ranks == 0 {
            return Err(TorchError::Setup(
                "there must be at least 1 rank".to_owned(),
            ));
        }
        fs::create_dir_all(&options.logs).map_err(TorchError::io("create", &options.logs))?;
        let private = Private::new(options.scratch.as_deref())?;
        let port = free_port()?;
        let mut processes = Processes::default();
        for rank in 0..options.ranks {
            let process = spawn(options, &private, rank, port, processes.leader())?;
            processes.add(process);
        }
        processes.watch()?;
        let url = listening(&processes, &private.ready(), options.ready)?;
        Ok(Self {
            server: ServerAddress {
                url,
                token: private.token,
            },
            processes,
            _private: private.dir,
        })
    }

    /// The address of the server, for other clients.
    pub fn server(&self) -> &ServerAddress {
        &self.server
    }

    /// Process ids by rank.
    pub fn pids(&self) -> Vec<u32> {
        self.processes.pids()
    }

    /// The first rank that ended, if one did. Ranks that were killed by [`RankGroup::kill`] or ended by a
    /// `close` are none.
    pub fn check(&self) -> Option<EndedRank> {
        self.processes.check()
    }

    /// Kills all ranks and everything that they started, and waits for their ends.
    pub fn kill(&self) {
        self.processes.kill();
    }
}

impl Watch for RankGroup {
    fn ended(&mut self) -> Option<(usize, String)> {
        self.check().map(|ended| (ended.rank, ended.to_string()))
    }

    fn expect_end(&mut self) {
        self.processes.expect_end();
    }
}

/// The folder with the sources and the token, which only this user can read.
struct Private {
    dir: TempDir,
    token: String,
}

impl Private {
    fn new(scratch: Option<&Path>) -> Result<Self, TorchError> {
        let scratch = scratch.map_or_else(std::env::temp_dir, Path::to_owned);
        let scratch = std::path::absolute(&scratch).map_err(TorchError::io("find", &scratch))?;
        let dir = tempfile::Builder::new()
            .prefix("sinew-torch-")
            .permissions(Permissions::from_mode(0o700))
            .tempdir_in(&scratch)
            .map_err(TorchError::io("create a folder in", &scratch))?;
        let package = dir.path().join(sources::PACKAGE);
        fs::create_dir(&package).map_err(TorchError::io("create", &package))?;
        for (name, text) in sources::FILES {
            let path = package.join(name);
            fs::write(&path, text).map_err(TorchError::io("write", &path))?;
        }
        let mut random = [0; TOKEN_BYTES];
        getrandom::fill(&mut random)
            .map_err(|e| TorchError::Setup(format!("no randomness: {e}")))?;
        let private = Self {
            dir,
            token: random.iter().map(|byte| format!("{byte:02x}")).collect(),
        };
        let path = private.token_file();
        let file = File::options()
            .create_new(true)
            .write(true)
            .mode(0o600)
            .open(&path);
        file.and_then(|mut file| file.write_all(private.token.as_bytes()))
            .map_err(TorchError::io("write", &path))?;
        Ok(private)
    }

    fn token_file(&self) -> PathBuf {
        self.dir.path().join("token")
    }

    /// The file that rank 0 writes when it listens.
    fn ready(&self) -> PathBuf {
        self.dir.path().join("ready.json")
    }
}

/// A port that is free at this moment, for the rendezvous of the ranks. Rank 0 binds it only after it has
/// loaded torch, so it is below the ports that systems give to others by themselves: from 32768 on.
fn free_port() -> Result<u16, TorchError> {
    let failed = |e: String| TorchError::Setup(format!("no free port: {e}"));
    let mut tries = 0;
    loop {
        let mut random = [0; 2];
        getrandom::fill(&mut random).map_err(|e| failed(e.to_string()))?;
        let port = 20_000 + u16::from_le_bytes(random) % 10_000;
        tries += 1;
        match TcpListener::bind(("127.0.0.1", port)) {
            Ok(_) => return Ok(port),
            Err(e) if tries == PORT_TRIES => return Err(failed(e.to_string())),
            Err(_) => {}
        }
    }
}

/// Starts a rank in the process group of `leader`, or as the leader of a new one.
fn spawn(
    options: &RankOptions,
    private: &Private,
    rank: usize,
    port: u16,
    leader: Option<i32>,
) -> Result<RankProcess, TorchError> {
    let log = options.logs.join(format!("rank-{rank}.log"));
    let stderr = File::create(&log).map_err(TorchError::io("create", &log))?;
    let mut command = Command::new(program(&options.python)?);
    let numbers = [
        ("RANK", rank),
        ("WORLD_SIZE", options.ranks),
        ("LOCAL_RANK", rank),
        ("LOCAL_WORLD_SIZE", options.ranks),
        ("MASTER_PORT", usize::from(port)),
    ];
    for (name, number) in numbers {
        command.env(name, number.to_string());
    }
    if let Some(threads) = options.threads {
        command.env("OMP_NUM_THREADS", threads.to_string());
    }
    command
        .args(["-m", sources::PACKAGE])
        // The package is found here, and no file of the user's folder takes the place of a module.
        .current_dir(private.dir.path())
        .env("PYTHONPATH", python_path(private.dir.path()))
        // Without it the allocator of a CPU keeps freed activations: 3.5 GB where 2.2 GB are in use.
        .env("MALLOC_MMAP_THRESHOLD_", "65536")
        .env("PYTHONUNBUFFERED", "1")
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .env("MASTER_ADDR", "127.0.0.1")
        .env("GLOO_SOCKET_IFNAME", LOOPBACK)
        .env("SINEW_TORCH_LISTEN", "127.0.0.1:0")
        .env("SINEW_TORCH_TOKEN_FILE", private.token_file())
        .env("SINEW_TORCH_READY", private.ready())
        .env(
            "SINEW_TORCH_TIMEOUT_S",
            options.collective.as_secs().max(1).to_string(),
        )
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(stderr)
        // Ctrl-C is for the owner, which then ends the ranks.
        .process_group(leader.unwrap_or(0));
    let started = command.spawn();
    let child = started.map_err(TorchError::io("start", &options.python))?;
    Ok(RankProcess::new(child, log))
}

/// A program as a rank finds it, whose working directory is another one. A name without a folder is looked
/// for in the path of the environment.
fn program(python: &Path) -> Result<PathBuf, TorchError> {
    if python.components().count() > 1 {
        return std::path::absolute(python).map_err(TorchError::io("find", python));
    }
    Ok(python.to_owned())
}

/// The folders in which Python looks for packages: this one, and those of the environment.
fn python_path(own: &Path) -> OsString {
    let mut path = own.as_os_str().to_owned();
    if let Some(others) = std::env::var_os("PYTHONPATH").filter(|others| !others.is_empty()) {
        path.push(":");
        path.push(others);
    }
    path
}

#[derive(serde::Deserialize)]
struct Ready {
    url: String,
}

/// Waits for the address of the server.
fn listening(processes: &Processes, file: &Path, within: Duration) -> Result<String, TorchError> {
    let end = Instant::now() + within;
    loop {
        if let Ok(text) = fs::read(file) {
            let ready: Result<Ready, _> = serde_json::from_slice(&text);
            return ready
                .map(|ready| ready.url)
                .map_err(|e| TorchError::Setup(format!("{}: {e}", file.display())));
        }
        if let Some(ended) = processes.check() {
            return Err(TorchError::Ended {
                rank: ended.rank,
                why: ended.to_string(),
            });
        }
        if Instant::now() >= end {
            let seconds = within.as_secs();
            let tail = processes.tail(0);
            return Err(TorchError::Setup(format!(
                "the server does not listen after {seconds} s; the end of rank 0's standard error:\n{tail}"
            )));
        }
        std::thread::sleep(LOOK_EVERY);
    }
}

#[cfg(test)]
mod tests;
