//! The mother of rooms: a process that has nothing but a page of machine code ([`super::enter`]),
//! its stack and a buffer. A fork of it costs the kernel little, where one of the spawner copies
//! the tables of all its memory, and both then the pages that they write to.
//!
//! It keeps the capabilities that making a room takes, holds a socket and a pipe, and never runs
//! anything but that code. Its forks are children of the spawner. It ends when the spawner does, which is
//! the first process of its PID namespace.

use super::children::Child;
use super::enter;
use super::messages::{Notice, send_bytes};
use super::plan::{Plan, step_name};
use super::room::Tabled;
use super::zygote::default_signals;
use nix::sys::socket::{AddressFamily, MsgFlags, SockFlag, SockType, recv, socketpair};
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::rc::Rc;

/// How often one that died is replaced within the life of a spawner; then it forks by itself.
pub(super) const MAX_STARTS: u32 = 16;
/// How long an answer may take.
const ANSWER_S: i64 = 3;

const PAGE: usize = 4096;
/// Largest request: far more than the rows of a room take.
const MAX_REQUEST: usize = 4 * PAGE;
/// Code, then places, messages and the stack in one page, then a request.
const ARENA: usize = 2 * PAGE + MAX_REQUEST;
/// Where addresses of a process end.
const END: usize = (1 << 47) - PAGE;

/// Where things are in the second page, after seven places: a struct msghdr and a struct iovec,
/// a struct cmsghdr with descriptors and slots.
const MESSAGE: usize = 64;
const VECTOR: usize = 128;
const CONTROL: usize = 192;

/// What a request begins with: cmsg_len, a notice.
const HEAD: usize = 8 + Notice::BYTES;

#[derive(Debug)]
pub(super) struct Mother {
    pub(super) child: Rc<Child>,
    socket: OwnedFd,
}

/// Why there is no room.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Barren {
    /// There cannot be one now.
    Refused(String),
    /// The mother is dead or stuck; whether she made one is not known.
    Gone(String),
}

/// What the child that becomes a mother finds.
struct Birth {
    plan: Plan,
    arena: usize,
    socket: RawFd,
    notices: RawFd,
    pid: i64,
}

/// Memory that is unmapped at the end.
struct Arena(usize);

impl Drop for Arena {
    fn drop(&mut self) {
        // SAFETY: memory of ours that nobody refers to.
        unsafe { libc::munmap(self.0 as *mut _, ARENA) };
    }
}

impl Arena {
    /// What a mother needs, at the place where she will have it.
    fn new(socket: RawFd, notices: RawFd) -> Result<Self, String> {
        let code = enter::code();
        if code.is_empty() || code.len() > PAGE {
            return Err(format!("{} bytes of machine code", code.len()));
        }
        let (both, private) = (
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
        );
        // SAFETY: new memory at any place.
        let at = unsafe { libc::mmap(std::ptr::null_mut(), ARENA, both, private, -1, 0) };
        if at == libc::MAP_FAILED {
            return Err(format!("mmap: {}", std::io::Error::last_os_error()));
        }
        let arena = Self(at as usize);
        let (data, end) = (arena.0 + PAGE, arena.0 + ARENA);
        let words = [
            // Places. The lowest page is never mapped.
            (0, PAGE),
            (1, arena.0 - PAGE),
            (2, end),
            (3, END - end),
            (4, socket as usize),
            (5, notices as usize),
            (6, data + MESSAGE),
            // struct msghdr: no name, one vector, descriptors.
            (MESSAGE / 8 + 2, data + VECTOR),
            (MESSAGE / 8 + 3, 1),
            (MESSAGE / 8 + 4, data + CONTROL),
            // struct iovec.
            (VECTOR / 8, data + PAGE),
            (VECTOR / 8 + 1, MAX_REQUEST),
        ];
        // SAFETY: all of it lies in the arena; the code fits its page.
        unsafe {
            std::ptr::copy_nonoverlapping(code.as_ptr(), at.cast(), code.len());
            for (word, value) in words {
                (data as *mut usize).add(word).write(value);
            }
            let fixed = libc::PROT_READ | libc::PROT_EXEC;
            if libc::mprotect(at, PAGE, fixed) != 0 {
                return Err(format!("mprotect: {}", std::io::Error::last_os_error()));
            }
        }
        Ok(arena)
    }
}

impl Mother {
    /// Starts one and waits until it is ready.
    ///
    /// # Errors
    /// Why there is none: no machine code for this processor, or the step that failed.
    pub(super) fn start(notices: RawFd) -> Result<Self, String> {
        let (kind, flags) = (SockType::SeqPacket, SockFlag::SOCK_CLOEXEC);
        let pair = socketpair(AddressFamily::Unix, kind, None, flags);
        let (socket, theirs) = pair.map_err(|e| format!("socketpair: {e}"))?;
        let arena = Arena::new(theirs.as_raw_fd(), notices)?;
        let mut birth = Birth {
            plan: Plan::mother(),
            arena: arena.0,
            socket: theirs.as_raw_fd(),
            notices,
            pid: -1,
        };
        let mut stack = Vec::<u128>::with_capacity(PAGE);
        // Two children in turn: what is registered with the kernel for each thread of this process
        // (rseq) is left out where memory is shared, and that which is a copy has none then.
        let flags = libc::CLONE_VM | libc::CLONE_VFORK | libc::SIGCHLD;
        // SAFETY: the child runs on a stack of its own, of which the other end is given, on what
        // outlives it here: this process goes on when the child is gone, and reaps it.
        unsafe {
            let top = stack.as_mut_ptr().add(stack.capacity());
            let midwife = libc::clone(deliver, top.cast(), flags, (&raw mut birth).cast());
            if midwife == -1 {
                return Err(format!("clone: {}", std::io::Error::last_os_error()));
            }
            libc::waitpid(midwife, std::ptr::null_mut(), libc::__WALL);
        }
        drop(theirs);
        let pid = match birth.pid {
            pid @ 1.. => pid as i32,
            errno => return Err(format!("clone: {}", os_error(-errno))),
        };
        let child = Child::of(pid)?;
        let mother = Self { child, socket };
        mother.limit_waiting();
        match mother.answer() {
            Ok(0) => Ok(mother),
            other => {
                mother.child.end();
                Err(match other {
                    Ok(failed) => {
                        let (step, errno) = (-failed >> 16, -failed & 0xffff);
                        format!("{}: {}", step_name(step as u32), os_error(errno))
                    }
                    Err(why) => why,
                })
            }
        }
    }

    fn limit_waiting(&self) {
        let time = libc::timeval {
            tv_sec: ANSWER_S,
            tv_usec: 0,
        };
        let (fd, size) = (self.socket.as_raw_fd(), size_of_val(&time) as u32);
        let (level, option) = (libc::SOL_SOCKET, libc::SO_RCVTIMEO);
        // SAFETY: reads a local value.
        unsafe { libc::setsockopt(fd, level, option, (&raw const time).cast(), size) };
    }

    fn answer(&self) -> Result<i64, String> {
        let mut bytes = [0; 8];
        loop {
            match recv(self.socket.as_raw_fd(), &mut bytes, MsgFlags::empty()) {
                Ok(8) => return Ok(i64::from_ne_bytes(bytes)),
                Ok(_) => return Err("it is dead".into()),
                Err(nix::errno::Errno::EINTR) => {}
                Err(e) => return Err(format!("recv: {e}")),
            }
        }
    }

    /// Makes the first process of a room, a child of this process: its process id.
    pub(super) fn room(&self, table: &Tabled, notice: &Notice) -> Result<i32, Barren> {
        let control = 16 + 4 * table.fds.len() as u64;
        let mut request = Vec::with_capacity(MAX_REQUEST);
        request.extend(control.to_ne_bytes());
        request.extend(notice.encode());
        debug_assert_eq!(request.len(), HEAD);
        table.plan.encode_into(&mut request);
        if request.len() > MAX_REQUEST {
            let bytes = request.len();
            let why = format!("a room of {bytes} bytes, at most {MAX_REQUEST}");
            return Err(Barren::Refused(why));
        }
        send_bytes(self.socket.as_fd(), &request, &table.fds).map_err(Barren::Gone)?;
        match self.answer() {
            Ok(pid @ 1..) => Ok(pid as i32),
            Ok(errno) => Err(Barren::Refused(format!("clone: {}", os_error(-errno)))),
            Err(why) => Err(Barren::Gone(why)),
        }
    }
}

fn os_error(errno: i64) -> std::io::Error {
    std::io::Error::from_raw_os_error(errno as i32)
}

/// Shares the spawner's memory, which stands still; makes the mother.
extern "C" fn deliver(birth: *mut libc::c_void) -> libc::c_int {
    // SAFETY: what `start` gave.
    let birth = unsafe { &mut *birth.cast::<Birth>() };
    let flags = libc::CLONE_PARENT | libc::SIGCHLD;
    // SAFETY: the copy never returns; ends without destructors, which are the spawner's to run.
    unsafe {
        match libc::syscall(libc::SYS_clone, flags, 0, 0, 0, 0) {
            0 => settle(birth),
            -1 => birth.pid = -i64::from(*libc::__errno_location()),
            pid => birth.pid = pid,
        }
        libc::_exit(0)
    }
}

/// In the new process: keeps two descriptors, gives up what it does not need, and becomes the code.
fn settle(birth: &mut Birth) -> ! {
    let (low, high) = match birth.socket < birth.notices {
        true => (birth.socket, birth.notices),
        false => (birth.notices, birth.socket),
    };
    let others = [(0, low - 1), (low + 1, high - 1), (high + 1, i32::MAX)];
    // SAFETY: no pointers; nothing here refers to the files.
    unsafe {
        for (first, last) in others.into_iter().filter(|(first, last)| first <= last) {
            libc::syscall(libc::SYS_close_range, first, last, 0);
        }
        default_signals();
        // The kernel reaps orphans that end up at the first processes of rooms.
        libc::signal(libc::SIGCHLD, libc::SIG_IGN);
    }
    if let Err((step, errno)) = birth.plan.run(&[]) {
        let failed = -(i64::from(step) << 16 | i64::from(errno));
        // SAFETY: sends a local value; ends without destructors.
        unsafe {
            libc::send(
                birth.socket,
                (&raw const failed).cast(),
                8,
                libc::MSG_NOSIGNAL,
            );
            libc::_exit(1);
        }
    }
    become_code(birth.arena)
}

#[cfg(target_arch = "x86_64")]
fn become_code(arena: usize) -> ! {
    let places = arena + PAGE;
    // SAFETY: the code is there, with what it needs; it unmaps all else, and this with it. Its
    // stack begins at the end of the page of places.
    unsafe {
        core::arch::asm!(
            "mov rsp, {stack}",
            "xor ebp, ebp",
            "jmp {code}",
            stack = in(reg) places + PAGE,
            code = in(reg) arena + enter::mother(),
            in("rdi") places,
            options(noreturn),
        )
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn become_code(_: usize) -> ! {
    // SAFETY: ends without destructors. Not reached: without code there is no arena.
    unsafe { libc::_exit(127) }
}

#[cfg(test)]
mod tests {
    use super::super::plan::{Arg, GIVEN};
    use super::super::room;
    use super::*;
    use std::io::{PipeReader, Read};

    const FIRST: u8 = GIVEN as u8;

    /// Writes "a" and "c" to the first descriptor given.
    fn rows() -> Plan {
        let mut plan = Plan::default();
        let given = Arg::Slot(0);
        plan.call_into(12, libc::SYS_dup, &[given], Some(FIRST));
        let letter = |plan: &mut Plan, letter: &[u8]| {
            let at = Arg::At(plan.bytes(letter));
            let args = [Arg::Slot(FIRST), at, Arg::Is(1)];
            plan.call_into(12, libc::SYS_write, &args, Some(FIRST + 1));
        };
        letter(&mut plan, b"a");
        plan.unless_more(FIRST + 1, 1);
        letter(&mut plan, b"b");
        plan.unless_more(FIRST + 1, 0);
        letter(&mut plan, b"c");
        // It is the first process of its PID namespace.
        plan.call_into(12, libc::SYS_getpid, &[], Some(FIRST + 2));
        plan.unless_more(FIRST + 2, 1);
        letter(&mut plan, b"d");
        plan
    }

    fn notice_of(notices: &mut PipeReader) -> Notice {
        let mut bytes = [0; Notice::BYTES];
        notices.read_exact(&mut bytes).expect("a notice");
        Notice::decode(&bytes)
    }

    /// What is written, what is told at the end of the rows, and what if one of them fails.
    fn outcomes(
        notices: &mut PipeReader,
        make: impl Fn(&Tabled, &Notice) -> i32,
    ) -> (String, Notice, Notice) {
        let ready = Notice {
            id: 7,
            room: 3,
            kind: Notice::READY,
            value: 0,
            errno: 0,
        };
        let (mut output, output_in) = std::io::pipe().expect("a pipe");
        let fds = vec![output_in.as_raw_fd()];
        let mut table = Tabled { plan: rows(), fds };
        let pid = make(&table, &ready);
        let told = notice_of(notices);
        let bad = [Arg::Is(9999)];
        table.plan.call(11, libc::SYS_close, &bad);
        let failed = make(&table, &ready);
        let why = notice_of(notices);
        drop(output_in);
        let mut text = String::new();
        // Its end comes when both have closed what they were given.
        output.read_to_string(&mut text).expect("letters");
        let mut status = 0;
        // SAFETY: children of this process.
        unsafe {
            assert_eq!(
                libc::waitpid(pid, &raw mut status, libc::WNOHANG),
                0,
                "it waits"
            );
            libc::kill(pid, libc::SIGKILL);
            assert_eq!(libc::waitpid(pid, &raw mut status, 0), pid);
            assert_eq!(libc::waitpid(failed, &raw mut status, 0), failed);
        }
        assert_eq!(
            (libc::WIFEXITED(status), libc::WEXITSTATUS(status)),
            (true, 1)
        );
        (text, told, why)
    }

    #[test]
    fn the_mother_and_forks_carry_out_the_same() {
        let (mut notices, notices_in) = std::io::pipe().expect("a pipe");
        let fd = notices_in.as_raw_fd();
        let forked = outcomes(&mut notices, |table, notice| {
            let plan = table.plan.clone();
            let fds = table.fds.clone();
            let flags = libc::CLONE_NEWPID | libc::SIGCHLD;
            // SAFETY: the child makes nothing but system calls.
            match unsafe { libc::syscall(libc::SYS_clone, flags, 0, 0, 0, 0) } {
                0 => room::run(Tabled { plan, fds }, *notice, fd),
                pid => pid as i32,
            }
        });
        let (text, ready, failed) = &forked;
        assert_eq!((text.as_str(), ready.kind), ("acac", Notice::READY));
        assert_eq!(
            (failed.id, failed.room, failed.kind),
            (7, 3, Notice::FAILED)
        );
        assert_eq!((failed.value, failed.errno), (11, libc::EBADF));
        match Mother::start(fd) {
            Ok(mother) => {
                let pid = mother.child.number().expect("it lives");
                let maps = std::fs::read_to_string(format!("/proc/{pid}/maps"));
                let own = maps
                    .expect("maps")
                    .lines()
                    .filter(|l| !l.contains('['))
                    .count();
                assert_eq!(own, 2, "code and data");
                let open = std::fs::read_dir(format!("/proc/{pid}/fd"));
                assert_eq!(open.expect("files").count(), 2);
                let born =
                    |table: &Tabled, notice: &Notice| mother.room(table, notice).expect("a room");
                assert_eq!(outcomes(&mut notices, born), forked);
                let open = std::fs::read_dir(format!("/proc/{pid}/fd"));
                assert_eq!(open.expect("files").count(), 2);
                // SAFETY: a child of this process, which `end` reaps.
                unsafe { libc::kill(pid, libc::SIGKILL) };
                let (table, notice) = (
                    Tabled {
                        plan: rows(),
                        fds: vec![fd],
                    },
                    forked.1,
                );
                assert!(matches!(mother.room(&table, &notice), Err(Barren::Gone(_))));
                mother.child.end();
            }
            Err(why) => assert!(enter::code().is_empty(), "{why}"),
        }
    }

    #[test]
    fn a_request_that_is_too_large_is_refused() {
        let (_notices, notices_in) = std::io::pipe().expect("a pipe");
        let Ok(mother) = Mother::start(notices_in.as_raw_fd()) else {
            assert!(enter::code().is_empty());
            return;
        };
        let mut table = Tabled {
            plan: rows(),
            fds: vec![notices_in.as_raw_fd()],
        };
        table.plan.bytes(&[0; MAX_REQUEST]);
        let notice = Notice {
            id: 1,
            room: 1,
            kind: Notice::READY,
            value: 0,
            errno: 0,
        };
        assert!(matches!(
            mother.room(&table, &notice),
            Err(Barren::Refused(_))
        ));
        mother.child.end();
    }
}
