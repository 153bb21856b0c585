//! Makes containers, and says what they really enforce.

use crate::engine::{
    Birth, Body, Choice, Common, Engine, INODES, SHARED_UID, next_uid, unavailable,
};
use crate::reaper::Reaper;
use crate::root;
use crate::sandbox::ContainerSandbox;
use crate::state::{Folder, io, orphans, run_tag};
use sinew_guest::{AGENT, Entry, EntryKind, Guest, Setup};
use sinew_image::UnpackLimits;
use sinew_jail::cgroup::Group;
use sinew_sandbox::{
    Ending, ExecRequest, Network, Program, Protection, Sandbox, SandboxError, SandboxFuture,
    SandboxProvider, SandboxSpec, Snapshot,
};
use std::fs::File;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::net::UnixListener;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// How long a container may take to come up.
const START: Duration = Duration::from_secs(60);
/// Where Python may be in an image that only its engine knows.
const PYTHONS: [&str; 3] = ["/usr/bin/python3", "/usr/local/bin/python3", "/bin/python3"];

/// What containers are made of.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Image {
    /// The system folders of the host, read-only.
    #[default]
    Host,
    /// An unpacked root.
    Folder(PathBuf),
    /// A root as a tar archive.
    Archive(PathBuf),
    /// One that the engine has; never pulled.
    Named(String),
}

impl Image {
    /// `host`, a folder, an archive, else the name of an image that the engine has.
    pub fn parse(text: &str) -> Self {
        let path = Path::new(text);
        match text {
            "" | "host" => Self::Host,
            _ if path.is_dir() => Self::Folder(path.into()),
            _ if path.is_file() => Self::Archive(path.into()),
            name => Self::Named(name.into()),
        }
    }
}

/// How a provider runs.
#[derive(Clone, Debug)]
pub struct ContainerConfig {
    /// What starts containers.
    pub engine: Choice,
    /// Where the API of a daemon listens, if not at the usual place.
    pub socket: Option<PathBuf>,
    /// What they are made of.
    pub image: Image,
    /// The Python that runs Python programs where the host's system is the image.
    pub python: PathBuf,
    /// Folders and files of the host to show inside, read-only: where they are, and where they
    /// stand inside.
    pub shows: Vec<(PathBuf, PathBuf)>,
    /// Keep an interpreter waiting in each container for its next Python program.
    pub warm_python: bool,
    /// Processors that one container may use, if bounded.
    pub cpus: Option<f64>,
    /// Most live sandboxes; who asks for more waits.
    pub max_live: usize,
    /// How long [`SandboxProvider::acquire`] waits.
    pub acquire_timeout: Duration,
    /// Folder for what runs keep on the host. Providers that share it remove each other's
    /// leftovers once their processes are gone.
    pub state: PathBuf,
}

impl Default for ContainerConfig {
    fn default() -> Self {
        Self {
            engine: Choice::Auto,
            socket: None,
            image: Image::Host,
            python: "/usr/bin/python3".into(),
            shows: Vec::new(),
            warm_python: true,
            cpus: None,
            max_live: 64,
            acquire_timeout: Duration::from_secs(60),
            state: "/run/sinew".into(),
        }
    }
}

/// What sandboxes hold of their provider.
#[derive(Debug)]
pub(crate) struct Inner {
    pub(crate) engine: Engine,
    pub(crate) config: ContainerConfig,
    pub(crate) common: Common,
    pub(crate) python: Option<String>,
    pub(crate) protections: Arc<Vec<Protection>>,
    /// Folder of the provider on the host. The reaper can hold it longer.
    folder: Arc<Folder>,
    numbers: AtomicU64,
    /// Whether each container has a user of its own.
    own_users: bool,
}

impl Drop for Inner {
    fn drop(&mut self) {
        // A runtime that cleans up after a container needs its state in this folder.
        self.common.reaper.folder(&self.folder);
    }
}

/// Sandboxes of which each is a container.
#[derive(Debug)]
pub struct ContainerProvider {
    inner: Arc<Inner>,
    live: Arc<Semaphore>,
}

/// A container whose agent has answered.
pub(crate) struct Born {
    pub(crate) guest: Guest,
    pub(crate) body: Body,
    pub(crate) folder: Folder,
    pub(crate) pid: i32,
    pub(crate) group: Group,
}

type Made<T> = Result<T, SandboxError>;

/// Tells providers of one process apart.
static PROVIDERS: AtomicU64 = AtomicU64::new(0);

impl ContainerProvider {
    /// Removes what dead runs left, finds an engine and starts one container to see what is
    /// really enforced.
    ///
    /// # Errors
    /// [`SandboxError::Unavailable`] with what is missing and what to do.
    pub fn start(config: ContainerConfig) -> Made<Self> {
        // Callers may be inside a runtime already.
        let thread = std::thread::spawn(move || {
            tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .map_err(|e| io("start a runtime", e))?
                .block_on(Inner::new(config))
        });
        let inner = thread
            .join()
            .map_err(|_| unavailable("its start panicked".into()))??;
        Ok(Self {
            live: Arc::new(Semaphore::new(inner.config.max_live)),
            inner: Arc::new(inner),
        })
    }

    /// Name of the engine that starts containers.
    pub fn engine(&self) -> &'static str {
        self.inner.engine.kind()
    }

    async fn permit(&self) -> Made<OwnedSemaphorePermit> {
        let config = &self.inner.config;
        let permit = Arc::clone(&self.live).acquire_owned();
        match tokio::time::timeout(config.acquire_timeout, permit).await {
            Ok(Ok(permit)) => Ok(permit),
            _ => Err(SandboxError::Busy {
                waited_s: config.acquire_timeout.as_secs(),
                live: config.max_live,
                limit: config.max_live,
            }),
        }
    }

    async fn make(&self, spec: &SandboxSpec, base: Arc<Vec<Entry>>) -> Made<Box<dyn Sandbox>> {
        if spec.live {
            return Err(SandboxError::Unsupported {
                operation: "keep one interpreter for all programs",
            });
        }
        if spec.strict {
            let missing = self.inner.protections.iter().filter(|p| !p.enforced);
            let missing: Vec<_> = missing.map(|p| format!("{} ({})", p.name, p.how)).collect();
            if !missing.is_empty() {
                return Err(SandboxError::NotEnforced {
                    missing: missing.join(", "),
                });
            }
        }
        let permit = self.permit().await?;
        let mut born = self.inner.bear(spec).await?;
        if !base.is_empty()
            && let Err(e) = born.guest.restore(&base).await
        {
            self.inner.bury(born).await?;
            return Err(e);
        }
        let inner = Arc::clone(&self.inner);
        let sandbox = ContainerSandbox::new(inner, spec.clone(), born, base, permit);
        Ok(Box::new(sandbox))
    }
}

impl Inner {
    async fn new(config: ContainerConfig) -> Made<Self> {
        let tag = run_tag(std::process::id()).unwrap_or_default();
        let number = PROVIDERS.fetch_add(1, Ordering::Relaxed);
        let dead = orphans(&config.state);
        let folder = Arc::new(Folder::new(config.state.join(format!("{tag}.{number}")))?);
        let agent = folder.path().join("agent");
        std::fs::write(&agent, AGENT).map_err(|e| io("write the agent", e))?;
        let all = std::fs::Permissions::from_mode(0o755);
        std::fs::set_permissions(&agent, all).map_err(|e| io("write the agent", e))?;
        let mut common = Common {
            agent,
            root_folder: folder.path().join("root"),
            root: root::Root::default(),
            cpus: config.cpus,
            tag,
            reaper: Reaper::start()?,
        };
        let state = folder.path().join("state");
        let socket = config.socket.as_deref();
        let mut engine = Engine::find(config.engine, socket, &common, &state).await?;
        sweep(&engine, dead).await?;
        prepare(&mut engine, &config, &mut common, folder.path()).await?;
        let mut inner = Self {
            engine,
            python: common.root.python.clone(),
            common,
            protections: Arc::default(),
            folder,
            config,
            numbers: AtomicU64::new(0),
            own_users: true,
        };
        if inner.probe().await.is_err() {
            // An engine in a user namespace has few users.
            inner.own_users = false;
            inner.probe().await?;
        }
        Ok(inner)
    }

    /// Starts a container, and takes the connection of its agent.
    pub(crate) async fn bear(&self, spec: &SandboxSpec) -> Made<Born> {
        let number = self.numbers.fetch_add(1, Ordering::Relaxed);
        let provider = self.folder.path().file_name().unwrap_or_default();
        let provider = provider.to_string_lossy().replace('.', "-");
        let folder = Folder::new(self.folder.path().join(format!("c{number}")))?;
        let host = folder.path().join("host");
        std::fs::create_dir(&host).map_err(|e| io("make a folder", e))?;
        let socket = host.join("s");
        let listener = UnixListener::bind(&socket).map_err(|e| io("make a socket", e))?;
        let birth = Birth {
            name: format!("sinew-{provider}-c{number}"),
            folder: folder.path(),
            uid: match self.own_users {
                true => next_uid(),
                false => SHARED_UID,
            },
            host,
            spec,
        };
        let uid = birth.uid;
        let mut body = self.engine.start(&self.common, &birth).await?;
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted.map_err(|e| io("listen", e)),
            ended = ended(&mut body) => Err(self.not_up(folder.path(), &ended)),
            () = tokio::time::sleep(START) => Err(unavailable(format!("a container did not come up in {START:?}"))),
        };
        let (stream, _) = match accepted {
            Ok(accepted) => accepted,
            Err(e) => {
                self.engine.end(body).await?;
                return Err(e);
            }
        };
        // Nothing inside can connect again.
        std::fs::remove_file(&socket).map_err(|e| io("remove a socket", e))?;
        let pid = stream.peer_cred().ok().and_then(|c| c.pid()).unwrap_or(0);
        let ready = async {
            let mut guest = Guest::greet(Box::new(stream), "container", START).await?;
            guest.set_up(&self.setup(spec, uid)).await?;
            Ok(guest)
        };
        match ready.await {
            Ok(guest) => Ok(Born {
                guest,
                body,
                folder,
                pid,
                group: Group::of(pid),
            }),
            Err(e) => {
                self.engine.end(body).await?;
                Err(e)
            }
        }
    }

    pub(crate) async fn bury(&self, born: Born) -> Made<()> {
        // The agent ends with its connection.
        drop(born.guest);
        self.engine.end(born.body).await
    }

    fn setup(&self, spec: &SandboxSpec, uid: u32) -> Setup {
        Setup {
            limits: spec.limits.clone(),
            uid,
            own_user: false,
            tcp: spec.network == Network::Loopback,
            inodes: INODES,
            python: self.python.clone(),
            warm_python: self.config.warm_python,
            env: spec.env.clone(),
        }
    }

    fn not_up(&self, folder: &Path, ended: &str) -> SandboxError {
        let log = std::fs::read_to_string(folder.join("log")).unwrap_or_default();
        let last = log.lines().rev().find(|l| !l.trim().is_empty());
        unavailable(format!(
            "{} {ended}: {}",
            self.engine.kind(),
            last.unwrap_or("it said nothing").trim()
        ))
    }

    /// One container, asked what it is like.
    async fn probe(&mut self) -> Made<()> {
        let spec = SandboxSpec::default();
        let mut born = self.bear(&spec).await?;
        let asked = async {
            if self.python.is_none() && matches!(self.config.image, Image::Named(_)) {
                for path in PYTHONS {
                    let argv = [path, "-I", "-S", "-c", ""];
                    if say(&mut born.guest, &argv).await?.is_some() {
                        self.python = Some(path.into());
                        break;
                    }
                }
            }
            let mut told = Vec::new();
            for path in ["/proc/self/status", "/proc/self/mounts", "/proc/net/dev"] {
                told.push(
                    say(&mut born.guest, &["cat", path])
                        .await?
                        .unwrap_or_default(),
                );
            }
            Ok::<_, SandboxError>(told)
        };
        let told = asked.await;
        let landlock = born.guest.hello().landlock_abi;
        let seen = told.map(|told| Seen {
            status: told[0].clone(),
            mounts: told[1].clone(),
            interfaces: told[2].clone(),
            landlock,
            memory: born.group.memory_limit(),
            processes: born.group.process_limit(),
            processors: born.group.processors(),
            namespaces: namespaces(born.pid),
            own_users: self.own_users,
        });
        self.bury(born).await?;
        let engine = self.engine.kind();
        self.protections = Arc::new(seen?.protections(engine, &spec, self.config.cpus));
        Ok(())
    }
}

/// Removes what runs left whose processes are gone.
async fn sweep(engine: &Engine, dead: Vec<PathBuf>) -> Made<()> {
    for folder in dead {
        if let Engine::Runtime(runtime) = engine {
            runtime.sweep(&folder.join("state")).await;
        }
        // Another run may do the same.
        let _ = std::fs::remove_dir_all(&folder);
    }
    match engine {
        Engine::Api(api) => api.sweep().await,
        Engine::Runtime(_) => {
            sinew_jail::cgroup::sweep("sinew-");
            Ok(())
        }
    }
}

/// Makes the root, or finds the image.
async fn prepare(
    engine: &mut Engine,
    config: &ContainerConfig,
    common: &mut Common,
    folder: &Path,
) -> Made<()> {
    let unpacked = match (&config.image, &mut *engine) {
        (Image::Host, _) => None,
        (Image::Folder(path), _) => Some(path.clone()),
        (Image::Named(name), Engine::Api(api)) => {
            common.root.binds.clone_from(&config.shows);
            return api.use_image(name).await;
        }
        (Image::Archive(path), Engine::Api(api)) => {
            let archive = std::fs::read(path);
            let archive = archive.map_err(|e| io(format!("read {}", path.display()), e))?;
            common.root.binds.clone_from(&config.shows);
            return api.import(archive).await;
        }
        (Image::Named(name), Engine::Runtime(runtime)) => {
            return Err(unavailable(format!(
                "{} keeps no images: for {name} name a folder or an archive instead, or use docker or podman",
                runtime.name()
            )));
        }
        (Image::Archive(path), Engine::Runtime(_)) => {
            let target = folder.join("image");
            let unpacked = sinew_image::unpack_root(path, &target, &UnpackLimits::default());
            unpacked.map_err(|e| io(format!("unpack {}", path.display()), e))?;
            Some(target)
        }
    };
    let python = Some(config.python.as_path());
    let root_folder = &common.root_folder;
    common.root = root::build(root_folder, unpacked.as_deref(), python, &config.shows)?;
    match engine {
        Engine::Api(api) => api.import(root::archive(root_folder)?).await,
        Engine::Runtime(_) => Ok(()),
    }
}

/// Resolves when the process that waits for a container ends; never for a daemon's.
async fn ended(body: &mut Body) -> String {
    match body {
        Body::Process(waiter) => match waiter.child.wait().await {
            Ok(status) => format!("ended with {status}"),
            Err(e) => e.to_string(),
        },
        Body::Named(_) => std::future::pending().await,
    }
}

/// What a program prints, if it can be run and ends well.
async fn say(guest: &mut Guest, argv: &[&str]) -> Made<Option<String>> {
    let request = ExecRequest {
        program: Program::Argv(argv.iter().map(|&a| a.into()).collect()),
        stdin: Vec::new(),
        deadline: Duration::from_secs(20),
    };
    match guest.exec(&request, &[], 1 << 16, None).await {
        Ok(outcome) => {
            let ok = outcome.ended.ending(0, 0, 1e9) == (Ending::Exited { code: 0 });
            let text = String::from_utf8_lossy(&outcome.stdout).into_owned();
            Ok(ok.then_some(text))
        }
        Err(SandboxError::Request { .. }) => Ok(None),
        Err(e) => Err(e),
    }
}

/// Namespaces of a process that are not this one's.
fn namespaces(pid: i32) -> Vec<&'static str> {
    let link = |who: &str, kind: &str| std::fs::read_link(format!("/proc/{who}/ns/{kind}")).ok();
    let pid = pid.to_string();
    let all = ["mnt", "pid", "net", "ipc", "uts", "cgroup"];
    let differs = |kind: &&str| link(&pid, kind).is_some_and(|n| Some(n) != link("self", kind));
    all.into_iter().filter(differs).collect()
}

/// What a container showed of itself.
#[derive(Debug)]
struct Seen {
    status: String,
    mounts: String,
    interfaces: String,
    landlock: u64,
    memory: Option<u64>,
    processes: Option<u64>,
    processors: Option<f64>,
    namespaces: Vec<&'static str>,
    own_users: bool,
}

impl Seen {
    fn field(&self, name: &str) -> &str {
        let line = self.status.lines().find_map(|l| l.strip_prefix(name));
        line.unwrap_or_default().trim()
    }

    fn mounted(&self, path: &str, option: &str) -> bool {
        let of = |l: &str| {
            let fields: Vec<_> = l.split(' ').collect();
            let here = fields.get(1) == Some(&path);
            here && fields
                .get(3)
                .is_some_and(|o| o.split(',').any(|o| o == option))
        };
        self.mounts.lines().any(of)
    }

    fn protections(&self, engine: &str, spec: &SandboxSpec, cpus: Option<f64>) -> Vec<Protection> {
        let mut rows = self.walls(engine);
        rows.extend(self.limits(engine, spec, cpus));
        rows
    }

    /// What keeps programs in.
    fn walls(&self, engine: &str) -> Vec<Protection> {
        let zero = |name| {
            let value = self.field(name);
            !value.is_empty() && value.trim_matches('0').is_empty()
        };
        let caps = ["CapInh:", "CapPrm:", "CapEff:", "CapBnd:", "CapAmb:"];
        // Two lines of headings.
        let names = self.interfaces.lines().skip(2);
        let names: Vec<_> = names
            .filter_map(|l| l.split(':').next())
            .map(str::trim)
            .collect();
        let alone = names.iter().all(|n| *n == "lo") && !self.interfaces.is_empty();
        let user = self.field("Uid:").split_whitespace().next().unwrap_or("0");
        let landlock = match self.landlock {
            0 => format!("the kernel has none, or {engine} forbids it"),
            abi => format!("version {abi}"),
        };
        let namespaces = format!("{engine}: {}", self.namespaces.join(", "));
        let filter = "the allow-list of the process level, in every program";
        vec![
            row("namespaces", self.namespaces.len() == 6, namespaces),
            row("root", self.mounted("/", "ro"), "mounted read-only"),
            row(
                "network",
                alone,
                format!("interfaces: {}", names.join(", ")),
            ),
            row(
                "capabilities",
                caps.into_iter().all(zero),
                "all sets of programs are empty",
            ),
            row("user", user != "0", format!("programs run as {user}")),
            row(
                "own user",
                self.own_users,
                match self.own_users {
                    true => "each container has a user id of its own",
                    false => "the engine takes no other user than 65534: all containers share it",
                },
            ),
            row("no_new_privs", self.field("NoNewPrivs:") == "1", "set"),
            row("seccomp", self.field("Seccomp:") == "2", filter),
            row("landlock", self.landlock > 0, landlock),
        ]
    }

    /// What bounds them.
    fn limits(&self, engine: &str, spec: &SandboxSpec, cpus: Option<f64>) -> Vec<Protection> {
        let limit = |what: Option<u64>, unit: &str| match what {
            Some(n) => format!("{n} {unit}, by control group"),
            None => format!("{engine} set no limit that the host can see"),
        };
        let works = ["/work", "/tmp"].iter().all(|p| self.mounted(p, "nosuid"));
        let memory = self.memory == Some(spec.limits.memory_bytes);
        let processes = self.processes == Some(spec.limits.processes + 1);
        let near = |n: f64| self.processors.is_some_and(|p| (p - n).abs() < 0.01);
        let (bounded, shares) = match (cpus, self.processors) {
            (None, _) => (
                true,
                "CPU seconds of each process; shares are not bounded".into(),
            ),
            (Some(n), _) if near(n) => (
                true,
                format!("{n} at most, by control group; CPU seconds of each process"),
            ),
            (Some(n), seen) => (
                false,
                format!("{engine} was asked for {n} and set {seen:?}"),
            ),
        };
        vec![
            row("memory", memory, limit(self.memory, "bytes")),
            row(
                "processes",
                processes,
                limit(self.processes, "with the agent"),
            ),
            row(
                "files",
                works,
                "work and temporary folder in memory, bounded each",
            ),
            row("processors", bounded, shares),
        ]
    }
}

fn row(name: &str, enforced: bool, how: impl Into<String>) -> Protection {
    Protection {
        name: name.into(),
        enforced,
        how: how.into(),
    }
}

fn own(snapshot: &Snapshot) -> Made<Arc<Vec<Entry>>> {
    let entries = Arc::clone(&snapshot.handle).downcast::<Vec<Entry>>();
    entries.map_err(|_| SandboxError::Request {
        field: "snapshot",
        value: format!("{} of level {}", snapshot.id, snapshot.level),
        allowed: "one of level container; others are exported and imported".into(),
    })
}

/// Numbers of snapshots.
static SNAPSHOTS: AtomicU64 = AtomicU64::new(1);

pub(crate) fn keep(entries: Vec<Entry>) -> Snapshot {
    let bytes = entries.iter().map(|entry| match &entry.kind {
        EntryKind::File(content) => content.len() as u64,
        EntryKind::Folder | EntryKind::Link(_) => 0,
    });
    let id = SNAPSHOTS.fetch_add(1, Ordering::Relaxed);
    Snapshot {
        level: "container",
        id,
        stores: [(id, bytes.sum())].into(),
        handle: Arc::new(entries),
    }
}

impl SandboxProvider for ContainerProvider {
    fn level(&self) -> &'static str {
        "container"
    }

    fn acquire<'a>(&'a self, spec: &'a SandboxSpec) -> SandboxFuture<'a, Box<dyn Sandbox>> {
        Box::pin(self.make(spec, Arc::default()))
    }

    fn protections(&self) -> Arc<Vec<Protection>> {
        Arc::clone(&self.inner.protections)
    }

    fn fork<'a>(
        &'a self,
        spec: &'a SandboxSpec,
        snapshot: &'a Snapshot,
    ) -> SandboxFuture<'a, Box<dyn Sandbox>> {
        Box::pin(async move { self.make(spec, own(snapshot)?).await })
    }

    fn export_file<'a>(
        &'a self,
        snapshot: &'a Snapshot,
        max_bytes: u64,
    ) -> SandboxFuture<'a, File> {
        Box::pin(async move { sinew_guest::export(own(snapshot)?, max_bytes).await })
    }

    fn import_file(&self, archive: File, max_bytes: u64) -> SandboxFuture<'_, Snapshot> {
        Box::pin(async move { sinew_guest::import(archive, max_bytes).await.map(keep) })
    }
}
