//! What the spawner does for each live sandbox: namespaces, programs in them, and their ends.

use super::Spawner;
use super::children::{Child, Role};
use super::cpu::Spent;
use super::files::{Files, User};
use super::init::loopback_up;
use super::launch::Launch;
use super::zygote::BASE_ENV;
use crate::cgroup::{Bounds, Group};
use crate::python;
use crate::protocol::{Creation, End, Exit, MAX_PACKET, Notice, Numbered, Start, send_bytes};
use crate::spec::{Limits, Network};
use crate::walls::{Confinement, Plan, Who};
use nix::poll::PollTimeout;
use nix::sched::{CloneFlags, setns, unshare};
use nix::sys::socket::{AddressFamily, SockFlag, SockType, socketpair};
use std::ffi::CString;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::rc::Rc;
use std::time::{Duration, Instant};

/// A program on its way into a sandbox.
#[derive(Debug)]
pub(super) struct Entrant {
    pub(super) serial: u32,
    /// None as long as it is not forked.
    pub(super) child: Option<Rc<Child>>,
    pub(super) way: Way,
}

#[derive(Debug)]
pub(super) enum Way {
    /// Waits for the namespaces to be ready; then it is forked.
    Program {
        argv: Vec<CString>,
        env: Vec<CString>,
        files: Vec<OwnedFd>,
    },
    /// A fork of the zygote: it gets a plan when the namespaces are ready, then a program.
    Python {
        socket: OwnedFd,
        entered: bool,
        program: Option<(Vec<u8>, Vec<OwnedFd>)>,
    },
    /// Nothing more to do for it.
    Started,
}

impl Entrant {
    /// Whether it is a fork of the zygote that has no plan yet.
    fn lacks_plan(&self) -> bool {
        self.child.is_some() && matches!(self.way, Way::Python { entered: false, .. })
    }

    /// Has a fork of the zygote enter its namespaces. A packet that cannot be sent means that the
    /// fork is dead, which its end shows.
    fn enter(&mut self, plan: &[u8], given: &[RawFd]) {
        if let Way::Python {
            socket,
            entered: entered @ false,
            ..
        } = &mut self.way
        {
            *entered = send_bytes(socket.as_fd(), plan, given).is_ok();
        }
    }

    /// The program of a fork that has entered, and where to send it.
    fn program(&mut self) -> Option<(OwnedFd, Vec<u8>, Vec<OwnedFd>)> {
        let ready = |way: &Way| {
            matches!(
                way,
                Way::Python {
                    entered: true,
                    program: Some(_),
                    ..
                }
            )
        };
        if !ready(&self.way) {
            return None;
        }
        match std::mem::replace(&mut self.way, Way::Started) {
            Way::Python {
                socket,
                program: Some((packet, files)),
                ..
            } => Some((socket, packet, files)),
            _ => None,
        }
    }
}

#[derive(Debug)]
pub(super) struct InitState {
    pub(super) serial: u32,
    pub(super) child: Rc<Child>,
    pub(super) ready: bool,
}

/// One live sandbox.
#[derive(Debug)]
pub(super) struct Live {
    pub(super) creation: Creation,
    pub(super) group: Group,
    /// None any more once it is being destroyed.
    pub(super) files: Option<Files>,
    /// No other sandbox has it as long as a process of this one may be there.
    pub(super) user: Option<Rc<User>>,
    /// Of landlock, for these files.
    pub(super) ruleset: Option<OwnedFd>,
    pub(super) net_ns: Option<OwnedFd>,
    pub(super) init: Option<InitState>,
    pub(super) serial: u32,
    pub(super) warm: Option<Entrant>,
    pub(super) running: Option<Entrant>,
    /// Number of the request that runs.
    pub(super) run: u64,
    /// The end of what ran, while its namespaces are not gone yet.
    pub(super) ended: Option<End>,
    /// Its files are being copied for a snapshot: requests wait.
    pub(super) copying: bool,
    pub(super) deferred: Vec<(Numbered, Vec<OwnedFd>)>,
    /// The interpreter that waits is to make way for a program.
    pub(super) evict: bool,
    /// A step that failed before hostile code ran.
    pub(super) failed: Option<(u32, i32)>,
    /// CPU time of what runs.
    pub(super) spent: Spent,
    /// Children that were not reaped yet.
    pub(super) children: usize,
    /// To be answered when it is gone.
    pub(super) destroyed_by: Option<u64>,
}

impl Live {
    pub(super) fn busy(&self) -> bool {
        self.running.is_some()
            || self.ended.is_some()
            || self.copying
            || self.destroyed_by.is_some()
    }

    /// What its files take.
    pub(super) fn file_bytes(&self) -> u64 {
        self.files.as_ref().map_or(0, |files| files.usage().0)
    }

    /// The one that the zygote was asked for; there is at most one.
    fn unforked(&mut self, serial: u32) -> Option<&mut Entrant> {
        let both = [self.running.as_mut(), self.warm.as_mut()];
        let python = |e: &&mut Entrant| matches!(e.way, Way::Python { .. });
        both.into_iter()
            .flatten()
            .find(|e| e.serial == serial && e.child.is_none() && python(e))
    }
}

/// Arguments without inner zero bytes.
fn c_strings(list: impl IntoIterator<Item = String>) -> Result<Vec<CString>, String> {
    list.into_iter()
        .map(|s| CString::new(s).map_err(|e| format!("argument with a zero byte: {e}")))
        .collect()
}

/// What a fork of the zygote gets: the bytes of the environment, which it has beside that of the
/// zygote, the environment, the code.
fn program_packet(code: &str, env: &[(String, String)]) -> Result<Vec<u8>, String> {
    let mut packet = vec![0; 4];
    for (name, value) in env {
        if name.is_empty() || name.contains('=') || name.contains('\0') || value.contains('\0') {
            return Err(format!(
                "environment variable {name:?}: a name is not empty and has no '=', and there are no zero bytes"
            ));
        }
        for part in [name.as_str(), "=", value, "\0"] {
            packet.extend_from_slice(part.as_bytes());
        }
    }
    let bytes = packet.len() as u32 - 4;
    packet[..4].copy_from_slice(&bytes.to_le_bytes());
    packet.extend_from_slice(code.as_bytes());
    if packet.len() > MAX_PACKET {
        return Err(format!(
            "program and environment of {} bytes, at most {MAX_PACKET}",
            packet.len()
        ));
    }
    Ok(packet)
}

impl Spawner {
    pub(super) fn create(&mut self, id: u64, creation: Creation) -> Result<(), String> {
        let layers = match creation.base {
            None => Vec::new(),
            Some(base) => {
                let layers = self.snapshots.get(&base);
                layers.ok_or("no such snapshot")?.clone()
            }
        };
        let inherited = layers.first().and_then(super::files::Layer::user);
        let user = match inherited {
            Some(user) => Some(user),
            None => self.new_user()?,
        };
        self.stores += 1;
        let bytes = creation.limits.work_bytes;
        let files = Files::new(self.stores, bytes, user.clone(), self.mounting, layers)?;
        let net_ns = match creation.network {
            Network::None => None,
            Network::Loopback => Some(self.new_network()?),
        };
        let name = format!("sinew-{}-{id}", self.tag);
        let tcp = creation.network == Network::Loopback;
        let bounds = Bounds {
            memory_bytes: creation.limits.memory_bytes,
            // One more for the sandbox init.
            processes: creation.limits.processes + 1,
            tcp,
        };
        let group = self.hierarchy.create(&name, &bounds)?;
        let live = Live {
            creation,
            group,
            files: Some(files),
            user,
            ruleset: None,
            net_ns,
            init: None,
            serial: 0,
            warm: None,
            running: None,
            run: 0,
            ended: None,
            copying: false,
            deferred: Vec::new(),
            evict: false,
            failed: None,
            spent: Spent::default(),
            children: 0,
            destroyed_by: None,
        };
        let more = self.more_may_wait();
        self.live.insert(id, live);
        if !more {
            return Ok(());
        }
        let opened = self.start_init(id).and_then(|()| self.warm_up(id));
        if opened.is_err() {
            self.destroy(id, 0);
        }
        opened
    }

    /// A network namespace with nothing but a loopback interface.
    fn new_network(&self) -> Result<OwnedFd, String> {
        let made = unshare(CloneFlags::CLONE_NEWNET)
            .map_err(|e| format!("unshare: {e}"))
            .and_then(|()| loopback_up().map_err(|e| format!("loopback: {e}")))
            .and_then(|()| self.net_ns());
        self.go_home()?;
        made
    }

    fn go_home(&self) -> Result<(), String> {
        setns(self.own_net_ns.as_fd(), CloneFlags::CLONE_NEWNET).map_err(|e| format!("setns: {e}"))
    }

    pub(super) fn listen(&mut self, id: u64, port: u16) -> Result<OwnedFd, String> {
        let live = self.live.get(&id).ok_or("no such sandbox")?;
        let net_ns = live.net_ns.as_ref().ok_or("it has no loopback interface")?;
        setns(net_ns.as_fd(), CloneFlags::CLONE_NEWNET).map_err(|e| format!("setns: {e}"))?;
        let listening = listener(port);
        self.go_home()?;
        listening.map_err(|e| format!("listen on port {port} inside: {e}"))
    }

    pub(super) fn confinement<'a>(&'a self, live: &'a Live) -> Confinement<'a> {
        let limits: &Limits = &live.creation.limits;
        let tcp = live.creation.network == Network::Loopback;
        Confinement {
            limits,
            uid: live.user.as_ref().map(|user| user.uid),
            filter: &self.filters[usize::from(tcp)],
            landlock: self.landlock.is_some(),
            limit_user_processes: self.hierarchy.limits_processes().is_none(),
            limit_address_space: self.hierarchy.limits_memory().is_err(),
            cpu_counted: self.hierarchy.counts_cpu().is_some(),
            own_namespace: self.nested_users.then_some(self.last_capability),
        }
    }

    /// Asks for an interpreter that waits in the sandbox.
    fn warm_up(&mut self, id: u64) -> Result<(), String> {
        let wanted = |live: &Live| live.creation.warm && live.warm.is_none();
        if self.zygote.is_none() || !self.live.get(&id).is_some_and(wanted) {
            return Ok(());
        }
        let entrant = self.fork_python(id)?;
        if let Some(live) = self.live.get_mut(&id) {
            live.warm = Some(entrant);
        }
        Ok(())
    }

    pub(super) fn fork_python(&mut self, id: u64) -> Result<Entrant, String> {
        let zygote = self.zygote.as_mut().ok_or("there is no zygote")?;
        let live = self.live.get(&id).ok_or("no such sandbox")?;
        let init = live.init.as_ref().ok_or("no namespaces")?;
        let flags = SockFlag::SOCK_CLOEXEC;
        let (ours, theirs) = socketpair(AddressFamily::Unix, SockType::SeqPacket, None, flags)
            .map_err(|e| format!("socketpair: {e}"))?;
        let fd = init.child.as_raw_fd();
        zygote.fork(id, init.serial, fd, theirs.as_raw_fd())?;
        Ok(Entrant {
            serial: init.serial,
            child: None,
            way: Way::Python {
                socket: ours,
                entered: false,
                program: None,
            },
        })
    }

    pub(super) fn exec(
        &mut self,
        id: u64,
        (seq, start): (u64, Start),
        env: Vec<(String, String)>,
        files: Vec<OwnedFd>,
    ) -> Result<(), String> {
        if files.len() != 3 {
            return Err(format!("{} files, expected 3", files.len()));
        }
        let live = self.idle(id)?;
        live.run = seq;
        if live.init.is_none() {
            self.start_init(id)?;
        }
        let entrant = match start {
            Start::Python(code) if self.zygote.is_some() => self.python(id, &code, &env, files)?,
            Start::Python(code) => {
                let python = self.python.as_deref().ok_or("the image has no python3")?;
                let argv = python::command(python.as_bytes(), code.as_bytes());
                self.program(id, argv.map_err(|e| e.to_string())?, env, files)?
            }
            Start::Argv(argv) => self.program(id, c_strings(argv)?, env, files)?,
        };
        if let Some(live) = self.live.get_mut(&id) {
            live.running = Some(entrant);
        }
        self.advance(id);
        Ok(())
    }

    fn python(
        &mut self,
        id: u64,
        code: &str,
        env: &[(String, String)],
        files: Vec<OwnedFd>,
    ) -> Result<Entrant, String> {
        let packet = program_packet(code, env)?;
        let warm = self.live.get_mut(&id).and_then(|live| live.warm.take());
        let mut entrant = match warm {
            Some(warm) => warm,
            None => self.fork_python(id)?,
        };
        if let Way::Python { program, .. } = &mut entrant.way {
            *program = Some((packet, files));
        }
        Ok(entrant)
    }

    fn program(
        &mut self,
        id: u64,
        argv: Vec<CString>,
        env: Vec<(String, String)>,
        files: Vec<OwnedFd>,
    ) -> Result<Entrant, String> {
        if argv.is_empty() {
            return Err("no program".into());
        }
        let base = BASE_ENV.iter().map(|&(k, v)| (k.to_owned(), v.to_owned()));
        let env: std::collections::BTreeMap<String, String> = base.chain(env).collect();
        let env = c_strings(env.into_iter().map(|(k, v)| format!("{k}={v}")))?;
        let live = self.live.get_mut(&id).ok_or("no such sandbox")?;
        // An interpreter that waits would be seen by the program, and could be killed by it.
        live.evict = live.warm.is_some();
        if let Some(child) = live.warm.as_ref().and_then(|w| w.child.as_ref()) {
            child.kill();
        }
        let serial = live.serial;
        Ok(Entrant {
            serial,
            child: None,
            way: Way::Program { argv, env, files },
        })
    }

    /// Does for a sandbox what can be done now that its namespaces or its program got further.
    pub(super) fn advance(&mut self, id: u64) {
        let Some(live) = self.live.get(&id) else {
            return;
        };
        let Some(init) = live.init.as_ref().filter(|init| init.ready) else {
            return;
        };
        let (serial, init) = (init.serial, Rc::clone(&init.child));
        if live.evict {
            return;
        }
        let waits = |e: &Entrant| e.serial == serial && matches!(e.way, Way::Program { .. });
        if live.running.as_ref().is_some_and(waits)
            && let Err(why) = self.fork_program(id, &init)
        {
            self.lost(id, why);
            return;
        }
        let Some(live) = self.live.get(&id) else {
            return;
        };
        let both = [&live.running, &live.warm];
        let plan = match both.into_iter().flatten().any(Entrant::lacks_plan) {
            true => Plan::confine(Who::Python, &self.confinement(live)).encode(),
            false => Vec::new(),
        };
        let Some(live) = self.live.get_mut(&id) else {
            return;
        };
        let ruleset = live.ruleset.as_ref().map(AsRawFd::as_raw_fd);
        let given: Vec<RawFd> = [init.as_raw_fd()].into_iter().chain(ruleset).collect();
        let mut begun = false;
        let both = [live.running.as_mut(), live.warm.as_mut()];
        for entrant in both.into_iter().flatten() {
            let child = entrant.child.as_ref().filter(|_| entrant.serial == serial);
            let Some(child) = child.map(Rc::clone) else {
                continue;
            };
            entrant.enter(&plan, &given);
            if let Some((socket, packet, files)) = entrant.program() {
                live.spent.begin(&live.group, child.cpu_us().unwrap_or(0));
                begun = true;
                let raw: Vec<RawFd> = files.iter().map(AsRawFd::as_raw_fd).collect();
                let _ = send_bytes(socket.as_fd(), &packet, &raw);
            }
        }
        if begun {
            self.watch_cpu(id);
        }
    }

    /// Starts a program in the PID namespace of a sandbox init.
    fn fork_program(&mut self, id: u64, init: &Child) -> Result<(), String> {
        let live = self.live.get_mut(&id).ok_or("no such sandbox")?;
        let entrant = live.running.as_mut().ok_or("nothing to run")?;
        let way = std::mem::replace(&mut entrant.way, Way::Started);
        let Way::Program { argv, env, files } = way else {
            return Err("not a program".into());
        };
        live.spent.begin(&live.group, 0);
        let live = self.live.get(&id).ok_or("no such sandbox")?;
        let launch = Launch {
            group: &live.group,
            plan: Plan::confine(Who::Program, &self.confinement(live)),
            init: init.as_raw_fd(),
            ruleset: live.ruleset.as_ref().map_or(-1, AsRawFd::as_raw_fd),
            files: &files,
            argv: &argv,
            env: &env,
        };
        let pid_ns = CloneFlags::CLONE_NEWPID;
        setns(init.as_fd(), pid_ns).map_err(|e| format!("setns: {e}"))?;
        let started = launch.start();
        let home = setns(self.own_pid_ns.as_fd(), pid_ns).map_err(|e| format!("setns: {e}"));
        let (number, failed) = started?;
        let child = Child::of(number)?;
        self.children.watch(&child, Role::Program { id })?;
        if let Some(live) = self.live.get_mut(&id) {
            live.children += 1;
            live.failed = failed;
            if let Some(running) = &mut live.running {
                running.child = Some(child);
            }
        }
        self.watch_cpu(id);
        home
    }

    /// The zygote has forked, and says which of this process's children it is.
    fn forked(&mut self, id: u64, serial: u32, number: i32) -> Result<(), String> {
        let child = Child::of(number)?;
        let live = self.live.get_mut(&id);
        let found = live.and_then(|live| {
            let wanted = live.unforked(serial).is_some() && !live.evict;
            // Into its limits before it gets a program; if that fails, it dies.
            if !(wanted && live.group.join(number).is_ok()) {
                child.kill();
            }
            live.unforked(serial)?.child = Some(Rc::clone(&child));
            live.children += 1;
            Some(())
        });
        if found.is_none() {
            child.kill();
        }
        let role = found.map_or(Role::Stray, |()| Role::Program { id });
        self.children.watch(&child, role)
    }

    /// What the zygote was asked for will not come.
    fn unforked(&mut self, id: u64, serial: u32, why: String) {
        let Some(live) = self.live.get_mut(&id) else {
            return;
        };
        if live.warm.as_ref().is_some_and(|w| w.serial == serial) {
            live.warm = None;
            live.evict = false;
            self.advance(id);
        } else if live.unforked(serial).is_some() {
            self.lost(id, why);
        }
    }

    pub(super) fn noticed(&mut self, notice: Notice) {
        let (id, serial) = (notice.id, notice.serial);
        match notice.kind {
            Notice::READY => {
                let init = self.live.get_mut(&id).and_then(|l| l.init.as_mut());
                if let Some(init) = init.filter(|init| init.serial == serial) {
                    init.ready = true;
                    self.advance(id);
                }
            }
            Notice::FORKED => {
                if let Some(zygote) = &mut self.zygote {
                    zygote.answered();
                }
                let forked = match notice.value {
                    number @ 1.. => self.forked(id, serial, number),
                    _ => Err(format!(
                        "fork: {}",
                        std::io::Error::from_raw_os_error(notice.errno)
                    )),
                };
                match forked {
                    Ok(()) => self.advance(id),
                    Err(why) => self.unforked(id, serial, why),
                }
            }
            Notice::ZYGOTE => {
                if let Some(zygote) = &mut self.zygote {
                    zygote.set_ready();
                }
            }
            Notice::FAILED if id != 0 => {
                // What was on its way into namespaces that are gone does not matter.
                let live = self.live.get_mut(&id).filter(|l| l.serial == serial);
                if let Some(live) = live {
                    live.failed = Some((notice.value as u32, notice.errno));
                }
            }
            _ => {}
        }
    }

    /// What was to run never did.
    pub(super) fn lost(&mut self, id: u64, why: String) {
        let Some(live) = self.live.get_mut(&id) else {
            return;
        };
        if live.running.take().is_none() {
            return;
        }
        let exit = match live.failed.take() {
            Some((step, errno)) => Exit::SetUp(step, errno),
            None => Exit::Lost(why),
        };
        live.ended = Some(End {
            exit,
            cpu_us: 0,
            cpu_spent: false,
            max_rss_kib: 0,
            events: live.group.events(true),
            file_bytes: live.file_bytes(),
        });
        self.stop_init(id);
        self.settle(id);
    }

    /// Killing the first process of a PID namespace kills all of it, whatever sessions or
    /// groups it made.
    pub(super) fn stop_init(&mut self, id: u64) {
        let Some(live) = self.live.get_mut(&id) else {
            return;
        };
        live.warm = None;
        live.evict = false;
        if let Some(init) = live.init.take() {
            init.child.kill();
        }
    }

    pub(super) fn kill(&mut self, id: u64) {
        if let Some(init) = self.live.get(&id).and_then(|l| l.init.as_ref()) {
            init.child.kill();
        }
    }

    pub(super) fn destroy(&mut self, id: u64, seq: u64) {
        let Some(live) = self.live.get_mut(&id) else {
            self.done(seq, Ok(()));
            return;
        };
        live.destroyed_by = Some(seq);
        self.stop_init(id);
        self.end_copy(id);
        // The kernel waits for a grace period when it takes a mount apart: meanwhile the processes
        // go. What runs is counted once more at its end.
        if let Some(live) = self.live.get_mut(&id).filter(|l| l.running.is_none()) {
            (live.files, live.ruleset) = (None, None);
        }
        self.settle(id);
    }

    pub(super) fn reset(&mut self, id: u64) -> Result<(), String> {
        let live = self.idle(id)?;
        let base = live.creation.base;
        let (bytes, user) = (live.creation.limits.work_bytes, live.user.clone());
        let layers = match base.and_then(|b| self.snapshots.get(&b)) {
            Some(layers) => layers.clone(),
            None if base.is_some() => {
                return Err("the snapshot that it started from is gone".into());
            }
            None => Vec::new(),
        };
        self.stop_init(id);
        self.stores += 1;
        let files = Files::new(self.stores, bytes, user, self.mounting, layers)?;
        let live = self.idle(id)?;
        (live.files, live.ruleset) = (Some(files), None);
        self.to_warm.push_back((Instant::now(), id));
        Ok(())
    }

    fn more_may_wait(&self) -> bool {
        self.live.values().filter(|l| l.init.is_some()).count() < self.max_waiting
    }

    /// Makes an interpreter ready that is due; the time until the next is. One at a time: an init and
    /// a fork of the zygote write a notice each, on a pipe that has to be read in between, or they
    /// and this process wait for each other.
    pub(super) fn warm_due(&mut self) -> PollTimeout {
        let Some(&(due, id)) = self.to_warm.front() else {
            return PollTimeout::NONE;
        };
        let left = due.saturating_duration_since(Instant::now());
        if !left.is_zero() {
            let left = left + Duration::from_millis(1);
            return PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX);
        }
        self.to_warm.pop_front();
        let wanted = |l: &Live| l.creation.warm && !l.busy() && l.init.is_none();
        let more = self.zygote.is_some() && self.more_may_wait();
        if more && self.live.get(&id).is_some_and(wanted) {
            // Without it the next execution makes its own.
            let _ = self.start_init(id).and_then(|()| self.warm_up(id));
        }
        PollTimeout::ZERO
    }
}

fn listener(port: u16) -> std::io::Result<OwnedFd> {
    let listener = std::net::TcpListener::bind(("127.0.0.1", port))?;
    listener.set_nonblocking(true)?;
    Ok(listener.into())
}
