//! Servers of the tests: PostgreSQL and Redis as Debian has them, and S3 by moto. Each has a folder of its
//! own and a free port of this host, and dies with the thread that started it, at the latest with the test.

use std::io::Read;
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// Time in which a server starts on any machine.
const START: Duration = Duration::from_secs(300);

/// A free port of this host, below the ports that the system assigns by itself: no other test gets it before
/// the server listens there. Each process begins elsewhere.
pub(crate) fn free_port() -> u16 {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let is_free = |port: &u16| TcpListener::bind((Ipv4Addr::LOCALHOST, *port)).is_ok();
    let port = || {
        let number = std::process::id() * 31 + NEXT.fetch_add(1, Ordering::Relaxed);
        10_000 + u16::try_from(number % 20_000).unwrap()
    };
    let mut ports = (0..20_000).map(|_| port());
    ports.find(is_free).expect("a port is free")
}

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// The user that runs PostgreSQL, which refuses root: `nobody`, whom every Debian has.
const USER: (u32, u32) = (65_534, 65_534);

/// A program that runs as another user where this process is root.
fn command(program: &Path, as_user: bool) -> Command {
    let mut command = Command::new(program);
    command.stdin(Stdio::null());
    if as_user && is_root() {
        command.uid(USER.0).gid(USER.1);
    }
    command
}

/// Starts a server that dies with its parent. `setpriv` sets that, and keeps the process id.
fn start(program: &Path, args: &[String], as_user: bool, log: &Path) -> Child {
    let mut parent = command(Path::new("/usr/bin/setpriv"), as_user);
    parent.args(["--pdeathsig", "KILL"]).arg(program).args(args);
    let log = std::fs::OpenOptions::new()
        .create(true)
        .append(true)
        .open(log)
        .unwrap();
    parent.stdout(log.try_clone().unwrap()).stderr(log);
    parent
        .spawn()
        .unwrap_or_else(|e| panic!("{}: {e}", program.display()))
}

/// Waits until `ready` holds; fails with the server's log if it ends or takes too long.
fn wait(child: &mut Child, log: &Path, ready: impl Fn() -> bool) {
    let began = Instant::now();
    while !ready() {
        let ended = child.try_wait().unwrap();
        if ended.is_some() || began.elapsed() > START {
            let mut text = String::new();
            std::fs::File::open(log)
                .unwrap()
                .read_to_string(&mut text)
                .unwrap();
            panic!("the server does not start ({ended:?}):\n{text}");
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn answers(port: u16) -> bool {
    TcpStream::connect((Ipv4Addr::LOCALHOST, port)).is_ok()
}

fn kill(child: &mut Child) {
    child.kill().unwrap();
    child.wait().unwrap();
}

/// The newest PostgreSQL of Debian on this machine.
fn postgres_programs() -> PathBuf {
    let versions = std::fs::read_dir("/usr/lib/postgresql");
    let versions = versions.expect("PostgreSQL is not installed: run scripts/setup.sh");
    let mut found: Vec<PathBuf> = versions.map(|v| v.unwrap().path().join("bin")).collect();
    found.retain(|bin| bin.join("initdb").is_file());
    found.sort();
    found
        .pop()
        .expect("PostgreSQL has no initdb: run scripts/setup.sh")
}

/// PostgreSQL with one user, `sinew`.
pub(crate) struct PostgresServer {
    folder: TempDir,
    port: u16,
    child: Child,
}

/// A temporary folder of the user that runs PostgreSQL.
fn user_folder() -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    if is_root() {
        std::os::unix::fs::chown(folder.path(), Some(USER.0), Some(USER.1)).unwrap();
    }
    folder
}

/// Runs a program of PostgreSQL, or `cp`, to its end.
fn done(program: &Path, args: &[&str]) {
    let mut command = command(program, true);
    let done = command.args(args).current_dir("/").output().unwrap();
    let said = String::from_utf8_lossy(&done.stderr);
    assert!(done.status.success(), "{}: {said}", program.display());
}

/// A new cluster of databases, to be copied: `initdb` takes seconds, so all tests of a user share its result.
/// It becomes visible whole, by renaming.
fn template() -> PathBuf {
    let user = if is_root() {
        USER.0
    } else {
        rustix::process::geteuid().as_raw()
    };
    let programs = postgres_programs();
    let version = programs.parent().unwrap().file_name().unwrap().display();
    let place = std::env::temp_dir().join(format!("sinew-test-postgres-{version}-{user}"));
    if !place.is_dir() {
        let made = user_folder();
        let data = made.path().join("data").display().to_string();
        let args = [
            "--username=sinew",
            "--auth=trust",
            "--encoding=UTF8",
            "--no-sync",
        ];
        let args: Vec<&str> = args.into_iter().chain(["--pgdata", &data]).collect();
        done(&programs.join("initdb"), &args);
        // Another test may have been faster.
        let _ = std::fs::rename(&data, &place);
    }
    place
}

impl PostgresServer {
    pub(crate) fn start() -> Self {
        let folder = user_folder();
        let (from, to) = (template(), folder.path().join("data"));
        let paths = [from.display().to_string(), to.display().to_string()];
        done(Path::new("/bin/cp"), &["-a", &paths[0], &paths[1]]);
        let port = free_port();
        let child = run_postgres(folder.path(), port);
        Self {
            folder,
            port,
            child,
        }
    }

    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    pub(crate) fn url(&self) -> String {
        format!("postgres://sinew@127.0.0.1:{}/postgres", self.port)
    }

    /// Kills the server, and starts it again over the same files. Its other processes end when they see that
    /// the first one is gone.
    pub(crate) fn crash(&mut self) {
        kill(&mut self.child);
        self.child = run_postgres(self.folder.path(), self.port);
    }
}

impl Drop for PostgresServer {
    fn drop(&mut self) {
        kill(&mut self.child);
    }
}

fn run_postgres(folder: &Path, port: u16) -> Child {
    let log = folder.join("log");
    let data = folder.join("data");
    let args = [
        "-D".to_owned(),
        data.display().to_string(),
        format!("-p{port}"),
        "-clisten_addresses=127.0.0.1".to_owned(),
        "-cunix_socket_directories=".to_owned(),
        "-cshared_buffers=16MB".to_owned(),
        "-cmax_connections=60".to_owned(),
        "-crestart_after_crash=off".to_owned(),
    ];
    let program = postgres_programs().join("postgres");
    let ready = || {
        let mut ask = command(&postgres_programs().join("pg_isready"), false);
        ask.args(["--quiet", "--host=127.0.0.1"])
            .arg(format!("--port={port}"));
        ask.status().unwrap().success()
    };
    let began = Instant::now();
    loop {
        let mut child = start(&program, &args, true, &log);
        // After a kill, the shared memory is in use until the other processes have noticed.
        while child.try_wait().unwrap().is_none() {
            if ready() {
                return child;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        let text = std::fs::read_to_string(&log).unwrap_or_default();
        assert!(
            began.elapsed() < START,
            "PostgreSQL does not start:\n{text}"
        );
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Redis with an append-only file.
pub(crate) struct RedisServer {
    folder: TempDir,
    port: u16,
    child: Child,
}

impl RedisServer {
    pub(crate) fn start() -> Self {
        let (folder, port) = (tempfile::tempdir().unwrap(), free_port());
        let child = run_redis(folder.path(), port);
        Self {
            folder,
            port,
            child,
        }
    }

    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    pub(crate) fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    /// Kills the server, and starts it again over the same files.
    pub(crate) fn crash(&mut self) {
        kill(&mut self.child);
        self.child = run_redis(self.folder.path(), self.port);
    }
}

impl Drop for RedisServer {
    fn drop(&mut self) {
        kill(&mut self.child);
    }
}

fn run_redis(folder: &Path, port: u16) -> Child {
    let log = folder.join("log");
    let args = [
        "--bind".to_owned(),
        "127.0.0.1".to_owned(),
        "--port".to_owned(),
        port.to_string(),
        "--dir".to_owned(),
        folder.display().to_string(),
        "--appendonly".to_owned(),
        "yes".to_owned(),
        "--save".to_owned(),
        String::new(),
    ];
    let program = Path::new("/usr/bin/redis-server");
    assert!(
        program.is_file(),
        "Redis is not installed: run scripts/setup.sh"
    );
    let mut child = start(program, &args, false, &log);
    wait(&mut child, &log, || answers(port));
    child
}

/// S3 by moto, with one bucket `sinew`.
pub(crate) struct S3Server {
    _folder: TempDir,
    port: u16,
    child: Child,
}

impl S3Server {
    pub(crate) fn start() -> Self {
        let (folder, port) = (tempfile::tempdir().unwrap(), free_port());
        let log = folder.path().join("log");
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let program = root.join(".cache/venv-moto/bin/moto_server");
        assert!(
            program.is_file(),
            "moto is not installed: run scripts/setup.sh"
        );
        let args = ["-H127.0.0.1".to_owned(), format!("-p{port}")];
        let mut child = start(&program, &args, false, &log);
        wait(&mut child, &log, || answers(port));
        let made = Command::new("/usr/bin/env")
            .args(["python3", "-c"])
            .arg(format!(
                "import urllib.request as u; \
                 u.urlopen(u.Request('http://127.0.0.1:{port}/sinew', method='PUT')).read()"
            ))
            .status();
        assert!(made.unwrap().success());
        Self {
            _folder: folder,
            port,
            child,
        }
    }

    /// Variables of the environment for its clients.
    pub(crate) fn variables(&self) -> [(&'static str, String); 5] {
        [
            ("AWS_ENDPOINT", format!("http://127.0.0.1:{}", self.port)),
            ("AWS_ALLOW_HTTP", "true".into()),
            ("AWS_ACCESS_KEY_ID", "tests".into()),
            ("AWS_SECRET_ACCESS_KEY", "tests-secret".into()),
            ("AWS_REGION", "us-east-1".into()),
        ]
    }
}

impl Drop for S3Server {
    fn drop(&mut self) {
        kill(&mut self.child);
    }
}
