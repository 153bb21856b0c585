//! Archivers: forks of the spawner that read and write archives and copy files, so that the spawner never
//! waits for files, however many a sandbox has.
//!
//! An archiver has bounds on memory and time, a low priority and no descriptors but those of its task. It
//! runs no code of others. Its output counts only if it ended well; if it fails, it writes the reason to a
//! file in memory.
//!
//! | task | reads | writes | counted in |
//! |---|---|---|---|
//! | export | layers of a snapshot, as one folder | a file of the caller | nothing: the view is 1 MiB |
//! | import | a file of the caller | a new layer | the bound of the request |
//! | copy | the files of a sandbox with too many layers | a new layer | the sandbox's control group |
//!
//! A caller that gives up drops the number of the snapshot or export, which kills the archiver.

use super::Spawner;
use super::children::{Child, Fate, Role};
use super::files::{self, Files, Layer};
use super::live::NO_SANDBOX;
use super::tree;
use crate::error::{Error, Result, call, on};
use crate::protocol::{Reply, Request, memory_file};
use nix::fcntl::{OFlag, openat};
use nix::sys::resource::{Resource, setrlimit};
use nix::sys::stat::Mode;
use std::fs::File;
use std::io::{Read, Seek, Write};
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::rc::Rc;

/// A request for which a file must come.
const NO_FILE: Error = Error::Files {
    got: 0,
    expected: 1,
};
/// Maximum time of a task.
const TIME_S: u32 = 120;
/// Private memory of an archiver: names of the largest archive, buffers, and what it has of the spawner.
const MEMORY_BYTES: u64 = 256 << 20;
/// Largest text of a failure.
const MAX_WHY: u64 = 4096;

/// Task of an archiver.
#[derive(Debug)]
enum Task {
    /// Writes an archive; `_view` keeps the files mounted for it.
    Export { export: u64, _view: Files },
    /// Reads an archive into a layer, which becomes a separate snapshot.
    Import { snapshot: u64, layer: Layer },
    /// Copies the files of a sandbox into a layer.
    Copy {
        id: u64,
        snapshot: u64,
        layer: Layer,
    },
}

/// A request for an archive of a snapshot, of at most `max_bytes`.
#[derive(Clone, Copy, Debug)]
struct ArchiveRequest {
    snapshot: u64,
    export: u64,
    max_bytes: u64,
}

/// An archiver at work.
#[derive(Debug)]
pub(super) struct Archiver {
    child: Rc<Child>,
    /// The request to be answered.
    seq: u64,
    task: Task,
    /// File to which it writes the reason of a failure.
    why: File,
}

impl Archiver {
    pub(super) fn kill(&self) {
        self.child.kill();
    }

    /// Success is the exit code 0 and nothing else.
    fn outcome(&mut self, fate: Fate) -> Result<()> {
        match fate {
            Fate::Code(0) => return Ok(()),
            Fate::Signal(libc::SIGALRM) => {
                return Err(failed(format!("it took more than {TIME_S} s")));
            }
            _ => {}
        }
        let mut why = String::new();
        let _ = self.why.rewind();
        let _ = (&mut self.why).take(MAX_WHY).read_to_string(&mut why);
        Err(failed(if why.is_empty() {
            "it took too much memory, or was killed".into()
        } else {
            why
        }))
    }
}

/// Error of an archiver, with its reason.
fn failed(why: String) -> Error {
    Error::Unavailable(why)
}

/// Closes all open files but `keep`, and limits the archiver's priority, time and memory.
fn confine(keep: &[RawFd]) -> Result<()> {
    let mut keep = keep.to_vec();
    keep.sort_unstable();
    let mut from = 0;
    for fd in keep {
        if from < fd {
            // SAFETY: no pointers; nothing in this process uses these descriptors.
            unsafe { libc::syscall(libc::SYS_close_range, from, fd - 1, 0) };
        }
        from = fd + 1;
    }
    // SAFETY: as before; no pointers.
    unsafe {
        libc::syscall(libc::SYS_close_range, from, libc::c_uint::MAX, 0);
        libc::setpriority(libc::PRIO_PROCESS, 0, 10);
        libc::alarm(TIME_S);
    }
    setrlimit(Resource::RLIMIT_DATA, MEMORY_BYTES, MEMORY_BYTES).map_err(call("setrlimit"))
}

/// Runs the task of an archiver from its fork to its end.
fn work(keep: &[RawFd], mut why: &File, task: impl FnOnce() -> Result<()>) -> i32 {
    let all = std::panic::AssertUnwindSafe(|| confine(keep).and_then(|()| task()));
    match std::panic::catch_unwind(all) {
        Ok(Ok(())) => 0,
        Ok(Err(error)) => {
            let error = error.to_string();
            let end = error.floor_char_boundary(MAX_WHY as usize);
            let _ = why.write_all(&error.as_bytes()[..end]);
            1
        }
        Err(_) => 2,
    }
}

/// Folders of control groups, and the files in them by which a process joins.
type Members = Vec<(RawFd, String)>;

/// Copies folders through an archive that is never whole anywhere. The memory of the copy belongs to a
/// control group.
fn copy(
    pairs: [(OwnedFd, OwnedFd); 2],
    max_bytes: u64,
    uid: Option<u32>,
    group: &Members,
) -> Result<()> {
    // Threads come first: the group may have no room for another.
    let mut copies = Vec::new();
    for (from, to) in pairs {
        let (reader, writer) = std::io::pipe().map_err(call("pipe"))?;
        let writing = std::thread::Builder::new()
            .spawn(move || tree::write(&from, writer, u64::MAX))
            .map_err(call("start a thread"))?;
        copies.push((reader, to, writing));
    }
    for (folder, file) in group {
        join(*folder, file).map_err(on("join", file))?;
    }
    for (reader, to, writing) in copies {
        let read = tree::read(&reader, &to, max_bytes, uid);
        drop(reader);
        let written = writing.join();
        read?;
        written.unwrap_or_else(|_| Err(failed("the archive could not be written".into())))?;
    }
    Ok(())
}

/// Puts this process into a control group by its open hierarchy.
fn join(folder: RawFd, file: &str) -> nix::Result<()> {
    // SAFETY: the group that it belongs to lives as long as the sandbox, which waits for this.
    let folder = unsafe { BorrowedFd::borrow_raw(folder) };
    let flags = OFlag::O_WRONLY | OFlag::O_CLOEXEC;
    let file = openat(folder, file, flags, Mode::empty())?;
    nix::unistd::write(file, b"0").map(|_| ())
}

impl Spawner {
    /// Forks an archiver; `task` runs in it, with the descriptors of `keep`.
    fn start_archiver(
        &mut self,
        (seq, what): (u64, Task),
        keep: &[RawFd],
        task: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        let why = File::from(memory_file(&[])?);
        let keep = [keep, &[why.as_raw_fd()]].concat();
        // SAFETY: this process has one thread; the child ends here.
        let number = match unsafe { libc::fork() } {
            -1 => return Err(Error::last("fork")),
            0 => {
                let code = work(&keep, &why, task);
                // SAFETY: ends this process, without what others left to be done at an exit.
                unsafe { libc::_exit(code) }
            }
            number => number,
        };
        let child = Child::of(number)?;
        self.children.watch(&child, Role::Archiver)?;
        let place = child.as_raw_fd();
        let archiver = Archiver {
            child,
            seq,
            task: what,
            why,
        };
        self.archivers.insert(place, archiver);
        Ok(())
    }

    /// Handles requests about snapshots. Long ones are answered when they are done.
    pub(super) fn archives(&mut self, seq: u64, request: Request, given: Vec<OwnedFd>) {
        match request {
            Request::Snapshot { id, snapshot } => self.snapshot(seq, id, snapshot),
            Request::DropSnapshot { snapshot } => {
                self.drop_snapshot(snapshot);
                self.done(seq, Ok(()));
            }
            Request::Export {
                snapshot,
                export,
                max_bytes,
            } => {
                let what = ArchiveRequest {
                    snapshot,
                    export,
                    max_bytes,
                };
                self.export(seq, what, given);
            }
            Request::Import {
                snapshot,
                max_bytes,
            } => self.import(seq, (snapshot, max_bytes), given),
            _ => self.done(seq, Err(Error::NoSuch("request about snapshots"))),
        }
    }

    /// A snapshot's archive into a file of the host's.
    fn export(&mut self, seq: u64, what: ArchiveRequest, given: Vec<OwnedFd>) {
        let begin = || {
            let out = given.into_iter().next().ok_or(NO_FILE)?;
            let layers = self.stores.layers(Some(what.snapshot))?;
            let number = self.stores.next();
            let view = Files::new(number, 1 << 20, None, self.host.mounting, layers)?;
            let work = view.work()?;
            let keep = [out.as_raw_fd(), work.as_raw_fd()];
            let task = Task::Export {
                export: what.export,
                _view: view,
            };
            self.start_archiver((seq, task), &keep, move || {
                tree::write(&work, File::from(out), what.max_bytes)
            })
        };
        let begun: Result<()> = begin();
        if begun.is_err() {
            self.done(seq, begun);
        }
    }

    /// A snapshot from an archive of the host's.
    fn import(&mut self, seq: u64, (snapshot, max): (u64, u64), given: Vec<OwnedFd>) {
        let begin = || {
            let archive = given.into_iter().next().ok_or(NO_FILE)?;
            let user = self.stores.new_user()?;
            let uid = user.as_ref().map(|user| user.uid);
            let layer = files::blank(max, user, self.host.mounting, self.stores.next())?;
            let work = layer.work()?;
            let keep = [archive.as_raw_fd(), work.as_raw_fd()];
            let what = Task::Import { snapshot, layer };
            self.start_archiver((seq, what), &keep, move || {
                let archive = std::io::BufReader::new(File::from(archive));
                tree::read(archive, &work, max, uid)
            })
        };
        let begun: Result<()> = begin();
        if begun.is_err() {
            self.done(seq, begun);
        }
    }

    /// Freezes the files of a sandbox, or has them copied where there are many layers already.
    fn snapshot(&mut self, seq: u64, id: u64, snapshot: u64) {
        match self.freeze(seq, id, snapshot) {
            Ok(true) => self.answer(seq, snapshot),
            Ok(false) => {}
            Err(why) => self.done(seq, Err(why)),
        }
    }

    /// Whether it is done already.
    fn freeze(&mut self, seq: u64, id: u64, snapshot: u64) -> Result<bool> {
        self.idle(id)?;
        // The namespaces hold the folder as it was.
        self.stop_init(id);
        let live = self.idle(id)?;
        live.ruleset = None;
        let files = live.files.as_mut().ok_or(NO_SANDBOX)?;
        if files.is_deep() {
            self.copy_files(seq, id, snapshot)?;
            return Ok(false);
        }
        let layers = files.freeze()?;
        self.stores.keep(snapshot, layers);
        self.warming.later(id);
        Ok(true)
    }

    /// Requests for the sandbox wait until it is done.
    fn copy_files(&mut self, seq: u64, id: u64, snapshot: u64) -> Result<()> {
        let number = self.stores.next();
        let live = self.live.get(&id).ok_or(NO_SANDBOX)?;
        let files = live.files.as_ref().ok_or(NO_SANDBOX)?;
        let layer = files.blank(number)?;
        let (work, temporary) = files.folders()?;
        let pairs = [(work, layer.work()?), (temporary, layer.temporary()?)];
        let members: Members = live.group.members().collect();
        let mut keep: Vec<RawFd> = members.iter().map(|(folder, _)| *folder).collect();
        for (from, to) in &pairs {
            keep.extend([from.as_raw_fd(), to.as_raw_fd()]);
        }
        let (bytes, uid) = (live.creation.limits.work_bytes, files.uid());
        let what = Task::Copy {
            id,
            snapshot,
            layer,
        };
        self.start_archiver((seq, what), &keep, move || {
            copy(pairs, bytes.saturating_mul(2), uid, &members)
        })?;
        if let Some(live) = self.live.get_mut(&id) {
            live.copying = true;
            live.children += 1;
        }
        Ok(())
    }

    /// A snapshot is not needed any more, be it made or not.
    fn drop_snapshot(&mut self, dropped: u64) {
        self.stores.forget(dropped);
        for archiver in self.archivers.values() {
            match archiver.task {
                Task::Import { snapshot: it, .. }
                | Task::Copy { snapshot: it, .. }
                | Task::Export { export: it, .. }
                    if it == dropped =>
                {
                    archiver.kill();
                }
                _ => {}
            }
        }
    }

    /// A sandbox is to go: a copy of its files is not needed any more.
    pub(super) fn end_copy(&self, of: u64) {
        for archiver in self.archivers.values() {
            if matches!(archiver.task, Task::Copy { id, .. } if id == of) {
                archiver.kill();
            }
        }
    }

    /// An archiver is gone.
    pub(super) fn archiver_ended(&mut self, child: &Child, fate: Fate) {
        let Some(mut archiver) = self.archivers.remove(&child.as_raw_fd()) else {
            return;
        };
        let outcome = archiver.outcome(fate);
        let seq = archiver.seq;
        match archiver.task {
            Task::Export { .. } => self.done(seq, outcome),
            Task::Import {
                snapshot,
                mut layer,
            } => match outcome {
                Ok(()) => {
                    layer.measure();
                    self.stores.keep(snapshot, vec![layer]);
                    self.answer(seq, snapshot);
                }
                failed => self.done(seq, failed),
            },
            Task::Copy {
                id,
                snapshot,
                layer,
            } => {
                let copied = outcome.and_then(|()| self.copied(id, snapshot, layer));
                match copied {
                    Ok(()) => self.answer(seq, snapshot),
                    failed => self.done(seq, failed),
                }
                self.stop_copying(id);
            }
        }
    }

    /// The files of a sandbox are in a layer now.
    fn copied(&mut self, id: u64, snapshot: u64, mut layer: Layer) -> Result<()> {
        let number = self.stores.next();
        let live = self.live.get_mut(&id).ok_or(NO_SANDBOX)?;
        let files = live.files.as_mut().ok_or(NO_SANDBOX)?;
        layer.measure();
        *files = files.over(number, layer.clone())?;
        self.stores.keep(snapshot, vec![layer]);
        Ok(())
    }

    /// Answers the requests that waited, in their order.
    fn stop_copying(&mut self, id: u64) {
        let Some(live) = self.live.get_mut(&id) else {
            return;
        };
        live.copying = false;
        live.children -= 1;
        let deferred = std::mem::take(&mut live.deferred);
        self.warming.later(id);
        self.settle(id);
        for (message, files) in deferred {
            self.handle(message, files);
        }
    }

    /// Reports that a snapshot was created, and the storage that it holds.
    fn answer(&self, seq: u64, snapshot: u64) {
        let layers = self.stores.layers(Some(snapshot)).unwrap_or_default();
        let done = Reply::Done {
            seq,
            error: None,
            stats: None,
            held: files::held(&layers),
        };
        self.reply(&done, &[]);
    }
}
