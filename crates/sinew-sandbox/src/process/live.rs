//! What the spawner does for each live sandbox: rooms, programs in them, and their ends.

use super::cgroup::{Counters, Group};
use super::children::{Child, Role};
use super::cpu::Spent;
use super::files::{Files, User};
use super::launch::Launch;
use super::messages::{Creation, End, Exit, MAX_PACKET, Notice, Numbered, Start, send_bytes};
use super::plan::{Confinement, Plan, Who};
use super::report::{Evidence, Report};
use super::room::loopback_up;
use super::spawner::Spawner;
use super::zygote::BASE_ENV;
use crate::port::{Limits, Network};
use nix::poll::PollTimeout;
use nix::sched::{CloneFlags, setns, unshare};
use nix::sys::socket::{AddressFamily, SockFlag, SockType, socketpair};
use std::ffi::CString;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::rc::Rc;
use std::time::{Duration, Instant};

/// A program on its way into a room.
#[derive(Debug)]
pub(super) struct Entrant {
    pub(super) serial: u32,
    /// None as long as it is not forked.
    pub(super) child: Option<Rc<Child>>,
    pub(super) way: Way,
    /// Where it may tell its end.
    pub(super) report: Option<Report>,
    pub(super) evidence: Evidence,
}

#[derive(Debug)]
pub(super) enum Way {
    /// Waits for its room to be ready; then it is forked.
    Program {
        argv: Vec<CString>,
        env: Vec<CString>,
        files: Vec<OwnedFd>,
    },
    /// A fork of the zygote: it gets a plan when its room is ready, then a program.
    Python {
        socket: OwnedFd,
        entered: bool,
        rehearsed: bool,
        program: Option<(Vec<u8>, Vec<OwnedFd>)>,
    },
    /// Nothing more to do for it.
    Started,
}

impl Entrant {
    /// Has a fork of the zygote enter its room; whether it waits for a program there. A packet that
    /// cannot be sent means that the fork is dead, which its end says.
    fn enter(&mut self, plan: Option<&[u8]>, room: &[RawFd]) -> bool {
        match (&mut self.way, plan) {
            (
                Way::Python {
                    socket,
                    entered: entered @ false,
                    program,
                    ..
                },
                Some(plan),
            ) => {
                *entered = send_bytes(socket.as_fd(), plan, room).is_ok();
                program.is_none()
            }
            _ => false,
        }
    }

    /// The program of a fork that has entered its room, and where to send it.
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
pub(super) struct RoomState {
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
    /// Nobody else's as long as a process of it may be there.
    pub(super) user: Option<Rc<User>>,
    /// Of landlock, for these files.
    pub(super) ruleset: Option<OwnedFd>,
    pub(super) net_ns: Option<OwnedFd>,
    pub(super) room: Option<RoomState>,
    pub(super) serial: u32,
    pub(super) warm: Option<Entrant>,
    pub(super) running: Option<Entrant>,
    /// Number of the request that runs.
    pub(super) run: u64,
    /// The end of what ran, while its room is not gone yet.
    pub(super) ended: Option<End>,
    /// Its end is told, but the kernel is not done with the processes: requests wait.
    pub(super) leaving: bool,
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
            || self.leaving
            || self.copying
            || self.destroyed_by.is_some()
    }

    /// What its files take.
    pub(super) fn file_bytes(&self) -> u64 {
        self.files.as_ref().map_or(0, |files| files.usage().0)
    }

    /// The one that the zygote was asked for; there is one at most in a room.
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
        let group = self.new_group(id, &creation)?;
        let live = Live {
            creation,
            group,
            files: Some(files),
            user,
            ruleset: None,
            net_ns,
            room: None,
            serial: 0,
            warm: None,
            running: None,
            run: 0,
            ended: None,
            leaving: false,
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
        let opened = self.open_room(id).and_then(|()| self.warm_up(id));
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
            landlock_abi: self.landlock.as_ref().map_or(0, |common| common.abi),
            has_ruleset: true,
            limit_user_processes: self.hierarchy.limits_processes().is_none(),
            limit_address_space: self.hierarchy.limits_memory().is_none(),
            cpu_counted: self.hierarchy.counts_cpu().is_some(),
            own_namespace: self.nested_users.then_some(self.last_capability),
            tcp,
        }
    }

    /// Asks for an interpreter that waits in the sandbox's room.
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
        let room = live.room.as_ref().ok_or("no room")?;
        let flags = SockFlag::SOCK_CLOEXEC;
        let (ours, theirs) = socketpair(AddressFamily::Unix, SockType::SeqPacket, None, flags)
            .map_err(|e| format!("socketpair: {e}"))?;
        let fd = room.child.as_raw_fd();
        zygote.fork(id, room.serial, fd, theirs.as_raw_fd())?;
        Ok(Entrant {
            serial: room.serial,
            child: None,
            way: Way::Python {
                socket: ours,
                entered: false,
                rehearsed: false,
                program: None,
            },
            report: None,
            evidence: Evidence::default(),
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
        live.group.begin();
        live.run = seq;
        if live.room.is_none() {
            self.open_room(id)?;
        }
        let entrant = match start {
            Start::Python(code) if self.zygote.is_some() => self.python(id, &code, &env, files)?,
            Start::Python(code) => {
                let python = self.python.clone().ok_or("the image has no python3")?;
                let argv = ["-I", "-S", "-B", "-c", &code].map(String::from);
                let argv = std::iter::once(python).chain(argv).collect();
                self.program(id, argv, env, files)?
            }
            Start::Argv(argv) => self.program(id, argv, env, files)?,
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
        argv: Vec<String>,
        env: Vec<(String, String)>,
        files: Vec<OwnedFd>,
    ) -> Result<Entrant, String> {
        let argv = c_strings(argv)?;
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
            report: None,
            evidence: Evidence::default(),
        })
    }

    /// Does for a sandbox what can be done now that its room or its program got further.
    pub(super) fn advance(&mut self, id: u64) {
        let Some(live) = self.live.get(&id) else {
            return;
        };
        let Some(room) = live.room.as_ref().filter(|r| r.ready) else {
            return;
        };
        let (serial, room) = (room.serial, Rc::clone(&room.child));
        if live.evict {
            return;
        }
        let waits = |e: &Entrant| e.serial == serial && matches!(e.way, Way::Program { .. });
        if live.running.as_ref().is_some_and(waits)
            && let Err(why) = self.fork_program(id, &room)
        {
            self.lost(id, why);
            return;
        }
        let enters = |e: &Entrant| matches!(e.way, Way::Python { entered: false, .. });
        let confinement = self.live.get(&id).and_then(|live| {
            let enters = [&live.running, &live.warm]
                .into_iter()
                .flatten()
                .any(enters);
            enters.then(|| self.confinement(live))
        });
        let plan = confinement.map(|c| Plan::confine(Who::Python, &c).encode());
        let Some(live) = self.live.get_mut(&id) else {
            return;
        };
        let ruleset = live.ruleset.as_ref().map(AsRawFd::as_raw_fd);
        let into: Vec<RawFd> = [room.as_raw_fd()].into_iter().chain(ruleset).collect();
        let (mut begun, mut waits) = (false, false);
        let both = [live.running.as_mut(), live.warm.as_mut()];
        for entrant in both.into_iter().flatten() {
            let child = entrant.child.as_ref().filter(|_| entrant.serial == serial);
            let Some(child) = child.map(Rc::clone) else {
                continue;
            };
            waits |= entrant.enter(plan.as_deref(), &into);
            if let Some((socket, packet, files)) = entrant.program() {
                live.spent.begin(&live.group, child.cpu_us().unwrap_or(0));
                begun = true;
                let raw: Vec<RawFd> = files.iter().map(AsRawFd::as_raw_fd).collect();
                let _ = send_bytes(socket.as_fd(), &packet, &raw);
                // It reports its end there, and gets nothing more but the end of file.
                entrant.report = self.reports.watch(id, socket);
            }
        }
        if waits {
            // Many of those that came first are gone.
            if self.to_rehearse.len() >= self.max_waiting {
                self.to_rehearse.pop_front();
            }
            self.to_rehearse.push_back(id);
        }
        if begun {
            self.watch_cpu(id);
        }
    }

    /// Starts a program in the PID namespace of a room.
    fn fork_program(&mut self, id: u64, room: &Child) -> Result<(), String> {
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
            room: room.as_raw_fd(),
            ruleset: live.ruleset.as_ref().map_or(-1, AsRawFd::as_raw_fd),
            files: &files,
            argv: &argv,
            env: &env,
        };
        let pid_ns = CloneFlags::CLONE_NEWPID;
        setns(room.as_fd(), pid_ns).map_err(|e| format!("setns: {e}"))?;
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
        let proc = self.own_proc.as_ref();
        let live = self.live.get_mut(&id);
        let found = live.and_then(|live| {
            let wanted = live.unforked(serial).is_some() && !live.evict;
            // Into its limits before it gets a program; if that fails, it dies.
            if !(wanted && live.group.join(number).is_ok()) {
                child.kill();
            }
            let evidence = Evidence::open(proc, number, &live.group);
            let entrant = live.unforked(serial)?;
            (entrant.child, entrant.evidence) = (Some(Rc::clone(&child)), evidence);
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
        let (id, serial) = (notice.id, notice.room);
        match notice.kind {
            Notice::READY => {
                let room = self.live.get_mut(&id).and_then(|l| l.room.as_mut());
                if let Some(room) = room.filter(|r| r.serial == serial) {
                    room.ready = true;
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
                    zygote.is_ready();
                }
            }
            Notice::FAILED if id != 0 => {
                // What was on its way into a room that is gone does not matter.
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
            events: live.group.events(true, &Counters::default()),
            file_bytes: live.file_bytes(),
        });
        self.close_room(id);
        self.settle(id);
    }

    /// Killing the first process of a PID namespace kills all of it, whatever sessions or
    /// groups it made.
    pub(super) fn close_room(&mut self, id: u64) {
        let Some(live) = self.live.get_mut(&id) else {
            return;
        };
        live.warm = None;
        live.evict = false;
        let shared = live.net_ns.is_some();
        if let Some(room) = live.room.take() {
            if !shared && let Some(network) = room.child.network() {
                self.leaving.insert(room.child.as_raw_fd(), network);
            }
            room.child.kill();
        }
    }

    pub(super) fn kill(&mut self, id: u64) {
        if let Some(room) = self.live.get(&id).and_then(|l| l.room.as_ref()) {
            room.child.kill();
        }
    }

    pub(super) fn destroy(&mut self, id: u64, seq: u64) {
        let Some(live) = self.live.get_mut(&id) else {
            self.done(seq, Ok(()));
            return;
        };
        live.destroyed_by = Some(seq);
        self.close_room(id);
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
        self.close_room(id);
        self.stores += 1;
        let files = Files::new(self.stores, bytes, user, self.mounting, layers)?;
        let live = self.idle(id)?;
        (live.files, live.ruleset) = (Some(files), None);
        self.to_warm.push_back((Instant::now(), id));
        Ok(())
    }

    fn more_may_wait(&self) -> bool {
        self.live.values().filter(|l| l.room.is_some()).count() < self.max_waiting
    }

    /// Makes an interpreter ready that is due; the time until the next is. One at a time: a room and
    /// a fork of the zygote say something each, on a pipe that has to be read in between, or they
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
        if self.live.get(&id).is_some_and(|l| l.leaving) {
            self.close_room(id);
            return PollTimeout::ZERO;
        }
        let wanted = |l: &Live| l.creation.warm && !l.busy() && l.room.is_none();
        let more = self.zygote.is_some() && self.more_may_wait();
        if more && self.live.get(&id).is_some_and(wanted) {
            // Without it the next execution makes its own.
            let _ = self.open_room(id).and_then(|()| self.warm_up(id));
        }
        PollTimeout::ZERO
    }
}

fn listener(port: u16) -> std::io::Result<OwnedFd> {
    let listener = std::net::TcpListener::bind(("127.0.0.1", port))?;
    listener.set_nonblocking(true)?;
    Ok(listener.into())
}
