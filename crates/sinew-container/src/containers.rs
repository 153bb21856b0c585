//! The containers of a provider: start, probe and end.
//!
//! A container starts with the agent as its first process, which connects to a socket on the host. The start
//! is complete when the agent has answered and has set up users, limits and the waiting interpreter. A probe
//! container at the start of the provider shows which protections are in force.

use crate::config::{ContainerConfig, Image};
use crate::engine::Engine;
use crate::observed::Observed;
use crate::reaper::Reaper;
use crate::root;
use crate::spec::{
    Body, Common, INODES, RootWay, SHARED_UID, StartSpec, next_uid, next_users, unavailable,
};
use crate::state::{Folder, io, orphans};
use sinew_image::UnpackLimits;
use sinew_jail::cgroup::{Group, run_tag};
use sinew_sandbox::guest::{AGENT, Guest, Setup};
use sinew_sandbox::{
    Ending, ExecRequest, Network, Program, Protection, SandboxError, SandboxSpec, WritableRoot,
};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::OnceCell;

type SandboxResult<T> = Result<T, SandboxError>;

/// Maximum time from the start of a container to the first message of its agent.
const START: Duration = Duration::from_secs(60);
/// Paths of Python to try in an image that only its engine has.
const PYTHONS: [&str; 3] = ["/usr/bin/python3", "/usr/local/bin/python3", "/bin/python3"];

/// Containers of a provider, shared with its sandboxes.
#[derive(Debug)]
pub(crate) struct Containers {
    /// Starts and ends containers.
    pub(crate) engine: Engine,
    /// Settings of the provider.
    pub(crate) config: ContainerConfig,
    /// Parts that all containers share.
    pub(crate) common: Common,
    /// Path of Python inside. `None`: the image has none, and Python programs are refused.
    pub(crate) python: Option<String>,
    /// Protections of the probe container, reported with every result.
    pub(crate) protections: Arc<Vec<Protection>>,
    /// Folder of the provider on the host. The reaper can hold it longer.
    folder: Arc<Folder>,
    /// Number of the next container.
    numbers: AtomicU64,
    /// True if each container has a separate user. False if the engine has few users.
    own_users: bool,
    /// Way to writable roots, and the protections of a probe container with one. Found when the first is
    /// requested.
    writable: OnceCell<(RootWay, Arc<Vec<Protection>>)>,
}

impl Drop for Containers {
    fn drop(&mut self) {
        // A runtime that cleans up after a container needs its state in this folder.
        self.common.reaper.folder(&self.folder);
    }
}

/// A container whose agent has answered.
pub(crate) struct RunningContainer {
    /// Connection to the agent. The agent and with it the container end when it is dropped.
    pub(crate) guest: Guest,
    /// The container for its engine.
    pub(crate) body: Body,
    /// Folder of the container on the host.
    pub(crate) folder: Folder,
    /// First process of the container in the host's numbers. 0 if the socket did not tell.
    pub(crate) pid: i32,
    /// Control groups of the container.
    pub(crate) group: Group,
}

/// Number of the next provider of this process.
static PROVIDERS: AtomicU64 = AtomicU64::new(0);

impl Containers {
    /// Removes leftovers, chooses an engine, prepares the image and starts a probe container. If the probe
    /// fails with a separate user, it is repeated with the shared user.
    pub(crate) async fn new(config: ContainerConfig) -> SandboxResult<Self> {
        let tag = run_tag(std::process::id());
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
            writable: OnceCell::new(),
        };
        if inner.probe().await.is_err() {
            // An engine in a user namespace has few users.
            inner.own_users = false;
            inner.probe().await?;
        }
        Ok(inner)
    }

    /// Starts a container and waits until its agent is set up.
    ///
    /// # Errors
    /// [`SandboxError::Unavailable`] with the last line of the runtime's log if it ends before the agent
    /// connects, or after [`START`]. The container is removed then.
    pub(crate) async fn start(&self, spec: &SandboxSpec) -> SandboxResult<RunningContainer> {
        let way = match spec.writable_root {
            None => None,
            Some(_) => Some(self.writable().await?.0),
        };
        self.start_by(spec, way).await
    }

    /// Same as [`Self::start`], with a writable root by this way.
    async fn start_by(
        &self,
        spec: &SandboxSpec,
        way: Option<RootWay>,
    ) -> SandboxResult<RunningContainer> {
        let number = self.numbers.fetch_add(1, Ordering::Relaxed);
        let provider = self.folder.path().file_name().unwrap_or_default();
        let provider = provider.to_string_lossy().replace('.', "-");
        let folder = Folder::new(self.folder.path().join(format!("c{number}")))?;
        let host = folder.path().join("host");
        std::fs::create_dir(&host).map_err(|e| io("make a folder", e))?;
        let socket = host.join("s");
        let listener = UnixListener::bind(&socket).map_err(|e| io("make a socket", e))?;
        if way.is_some() {
            // The agent is another user outside. Nobody else on the host can enter the folders above.
            for (path, mode) in [(&host, 0o755), (&socket, 0o666)] {
                let mode = std::fs::Permissions::from_mode(mode);
                std::fs::set_permissions(path, mode).map_err(|e| io("open a socket", e))?;
            }
        }
        let start = StartSpec {
            name: format!("sinew-{provider}-c{number}"),
            folder: folder.path(),
            uid: match way {
                Some(_) => next_users(),
                None if self.own_users => next_uid(),
                None => SHARED_UID,
            },
            host,
            spec,
            way,
        };
        let uid = start.uid;
        let mut body = self.engine.start(&self.common, &start).await?;
        let stream = match self.accept(&listener, &mut body, folder.path()).await {
            Ok(stream) => stream,
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
            Ok(guest) => {
                let group = Group::of(pid);
                // The limit comes before a program can make a connection. The probe reports where it has no
                // effect.
                let _ = group.limit_tcp(spec.limits.memory_bytes);
                Ok(RunningContainer {
                    guest,
                    body,
                    folder,
                    pid,
                    group,
                })
            }
            Err(e) => {
                self.engine.end(body).await?;
                Err(e)
            }
        }
    }

    /// Waits for the connection of an agent, or for the end of its container.
    async fn accept(
        &self,
        listener: &UnixListener,
        body: &mut Body,
        folder: &Path,
    ) -> SandboxResult<UnixStream> {
        tokio::select! {
            accepted = listener.accept() => {
                accepted.map(|(stream, _)| stream).map_err(|e| io("listen", e))
            }
            ended = ended(body) => Err(self.not_up(folder, &ended)),
            () = tokio::time::sleep(START) => {
                Err(unavailable(format!("a container did not come up in {START:?}")))
            }
        }
    }

    /// Way to writable roots, and their protections. The first call starts a probe container for each way
    /// until one works.
    ///
    /// # Errors
    /// The failure of the last way.
    async fn writable(&self) -> SandboxResult<&(RootWay, Arc<Vec<Protection>>)> {
        let find = async {
            let spec = SandboxSpec {
                writable_root: Some(WritableRoot {
                    bytes: 16 << 20,
                    ..WritableRoot::default()
                }),
                ..SandboxSpec::default()
            };
            let mut failed = unavailable("the engine has no way to a writable root".into());
            for &way in self.engine.root_ways() {
                match self.look(&spec, Some(way)).await {
                    Ok(seen) => {
                        let engine = self.engine.kind();
                        let rows = seen.protections(engine, &spec, self.config.cpus);
                        return Ok((way, Arc::new(rows)));
                    }
                    Err(e) => failed = e,
                }
            }
            Err(failed)
        };
        self.writable.get_or_try_init(|| find).await
    }

    /// Protections of containers with this specification.
    ///
    /// # Errors
    /// If no container with a writable root can be started.
    pub(crate) async fn protections_of(
        &self,
        spec: &SandboxSpec,
    ) -> SandboxResult<Arc<Vec<Protection>>> {
        Ok(match spec.writable_root {
            None => Arc::clone(&self.protections),
            Some(_) => Arc::clone(&self.writable().await?.1),
        })
    }

    /// Ends a container and waits until nothing of it is left.
    pub(crate) async fn end(&self, started: RunningContainer) -> SandboxResult<()> {
        // The agent ends with its connection.
        drop(started.guest);
        self.engine.end(started.body).await
    }

    /// First request to the agent: limits, user, interpreter and environment.
    fn setup(&self, spec: &SandboxSpec, uid: u32) -> Setup {
        let mut limits = spec.limits.clone();
        if let Some(root) = &spec.writable_root {
            limits.work_bytes = root.bytes;
        }
        Setup {
            limits,
            uid,
            own_user: false,
            tcp: spec.network == Network::Loopback,
            inodes: INODES,
            python: self.python.clone(),
            // An interpreter that waits would have the user and the folder of another program.
            warm_python: self.config.warm_python && spec.writable_root.is_none(),
            env: spec.env.clone(),
            writable_root: spec.writable_root.clone(),
        }
    }

    /// Error for a container whose runtime ended before its agent connected.
    fn not_up(&self, folder: &Path, ended: &str) -> SandboxError {
        let log = std::fs::read_to_string(folder.join("log")).unwrap_or_default();
        let last = log.lines().rev().find(|l| !l.trim().is_empty());
        unavailable(format!(
            "{} {ended}: {}",
            self.engine.kind(),
            last.unwrap_or("it said nothing").trim()
        ))
    }

    /// Starts a container with default limits and compares its own view with what was requested.
    async fn probe(&mut self) -> SandboxResult<()> {
        let spec = SandboxSpec::default();
        if self.python.is_none() && matches!(self.config.image, Image::Named(_)) {
            self.python = self.find_python(&spec).await?;
        }
        let seen = self.look(&spec, None).await?;
        let engine = self.engine.kind();
        self.protections = Arc::new(seen.protections(engine, &spec, self.config.cpus));
        Ok(())
    }

    /// Path of Python in an image that only its engine has.
    async fn find_python(&self, spec: &SandboxSpec) -> SandboxResult<Option<String>> {
        let mut started = self.start_by(spec, None).await?;
        let mut found = Ok(None);
        for path in PYTHONS {
            let argv = [path, "-I", "-S", "-c", ""];
            match say(&mut started.guest, &argv).await {
                Ok(None) => {}
                Ok(Some(_)) => {
                    found = Ok(Some(path.into()));
                    break;
                }
                Err(e) => {
                    found = Err(e);
                    break;
                }
            }
        }
        self.end(started).await?;
        found
    }

    /// Own view of a container with this specification, and that of the kernel.
    async fn look(&self, spec: &SandboxSpec, way: Option<RootWay>) -> SandboxResult<Observed> {
        let mut started = self.start_by(spec, way).await?;
        let asked = async {
            let mut told = Vec::new();
            for path in ["/proc/self/status", "/proc/self/mounts", "/proc/net/dev"] {
                told.push(
                    say(&mut started.guest, &["cat", path])
                        .await?
                        .unwrap_or_default(),
                );
            }
            Ok::<_, SandboxError>(told)
        };
        let told = asked.await;
        let landlock = started.guest.hello().landlock_abi;
        let seen = told.map(|told| Observed {
            status: told[0].clone(),
            mounts: told[1].clone(),
            interfaces: told[2].clone(),
            landlock,
            memory: started.group.memory_limit(),
            tcp: started.group.limit_tcp(spec.limits.memory_bytes),
            processes: started.group.process_limit(),
            processors: started.group.processors(),
            namespaces: namespaces(started.pid),
            own_users: way.map_or(self.own_users, |way| way.mapped),
            root_user: root_user(started.pid),
            root_bytes: root_bytes(started.pid),
        });
        self.end(started).await?;
        seen
    }
}

/// User outside that is root of a process's user namespace.
fn root_user(pid: i32) -> Option<u32> {
    let map = std::fs::read_to_string(format!("/proc/{pid}/uid_map")).ok()?;
    let mut lines = map
        .lines()
        .map(|l| l.split_whitespace().collect::<Vec<_>>());
    lines.find_map(|l| match l.as_slice() {
        ["0", outside, _] => outside.parse().ok(),
        _ => None,
    })
}

/// Size of the file system that a process has as its root.
fn root_bytes(pid: i32) -> Option<u64> {
    let stat = rustix::fs::statfs(format!("/proc/{pid}/root/")).ok()?;
    Some(stat.f_blocks.saturating_mul(stat.f_bsize as u64))
}

/// Removes what processes that are gone left on the host: containers, groups and folders.
async fn sweep(engine: &Engine, dead: Vec<PathBuf>) -> SandboxResult<()> {
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

/// Makes the root that all containers share, or finds the image in the engine.
///
/// Engines with a daemon import the root as an image. Runtimes without one use the folder.
async fn prepare(
    engine: &mut Engine,
    config: &ContainerConfig,
    common: &mut Common,
    folder: &Path,
) -> SandboxResult<()> {
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
        Engine::Api(api) => {
            api.set_whole(unpacked);
            api.import(root::archive(root_folder)?).await
        }
        Engine::Runtime(_) => Ok(()),
    }
}

/// Waits until the runtime's process of a container ends, and returns its status. Never returns for a daemon.
async fn ended(body: &mut Body) -> String {
    match body {
        Body::Process(waiter) => match waiter.child.wait().await {
            Ok(status) => format!("ended with {status}"),
            Err(e) => e.to_string(),
        },
        Body::Named(_) => std::future::pending().await,
    }
}

/// Output of a program if it can be run and exits with 0, else `None`.
async fn say(guest: &mut Guest, argv: &[&str]) -> SandboxResult<Option<String>> {
    let request = ExecRequest::new(
        Program::Argv(argv.iter().map(|&a| a.into()).collect()),
        Duration::from_secs(20),
    );
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

/// Kinds of namespaces in which a process differs from this one.
fn namespaces(pid: i32) -> Vec<&'static str> {
    let link = |who: &str, kind: &str| std::fs::read_link(format!("/proc/{who}/ns/{kind}")).ok();
    let pid = pid.to_string();
    let all = ["mnt", "pid", "net", "ipc", "uts", "cgroup"];
    let differs = |kind: &&str| link(&pid, kind).is_some_and(|n| Some(n) != link("self", kind));
    all.into_iter().filter(differs).collect()
}
