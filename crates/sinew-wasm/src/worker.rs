//! Worker: a process in its own sandbox that runs programs in sequence.
//!
//! It has one thread for programs and one for their clock. It reads a frame, runs its job and answers, so
//! that the host never has two programs in a worker. It prepares interpreters between jobs, if nothing was
//! asked for 2 ms.
//!
//! Its memory is split: 512 MiB for modules, the running program and interpreters that are ready, and the
//! rest for interpreters of live sandboxes and snapshots. A job that does not fit is refused before it runs,
//! because the kernel would kill the worker with all of them.

use crate::engine::{Interpreters, PYTHON, python_env};
use crate::live::{Frozen, Live};
use crate::outcome::{Outcome, failed};
use crate::wasi::{Bounds, Setting};
use crate::wire::{
    Forget, Freeze, From, Job, JobResult, Kind, Place, Tree, head, pack_done, program, read_head,
    unpack, unpack_job,
};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use sinew_sandbox::{Ending, OutputStream};
use std::collections::HashMap;
use std::io::{BufReader, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Hidden first argument. The next ones are the port of the host, the folder of modules, the number of
/// interpreters to keep ready, the maximum bytes of kept interpreters and snapshots, and the names of
/// modules.
pub(crate) const FLAG: &str = "--sinew-wasm-worker";
/// Frames are buffered up to this size, unless output is streamed.
const GATHER_BYTES: usize = 64 << 10;

/// Memory and files of a program with the default limits. A worker has 512 MiB in addition to the memory for
/// kept interpreters and snapshots.
const PROGRAM_BYTES: u64 = 272 << 20;

/// Idle time before the worker starts interpreters in advance.
const QUIET: Duration = Duration::from_millis(2);

/// Buffered frames to the host.
#[derive(Debug)]
struct Output {
    /// Connection to the host.
    stream: TcpStream,
    /// Buffered bytes.
    gathered: Vec<u8>,
}

impl Output {
    /// Buffers a frame.
    fn frame(&mut self, kind: Kind, bytes: &[u8]) {
        self.gathered.extend_from_slice(&head(kind, bytes.len()));
        self.gathered.extend_from_slice(bytes);
    }

    /// Sends all buffered frames.
    fn send(&mut self) -> std::io::Result<()> {
        let bytes = std::mem::take(&mut self.gathered);
        self.stream.write_all(&bytes)
    }
}

/// Output shared with running programs.
type Shared = Arc<Mutex<Output>>;

/// The output. A panic of another holder leaves at most a frame that is cut, at which the host kills the
/// worker.
fn locked(output: &Shared) -> std::sync::MutexGuard<'_, Output> {
    output.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs as a worker and returns its exit code if this process was started as one.
pub fn worker_main_if_requested() -> Option<i32> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [flag, port, folder, warm, kept, names @ ..] = args.as_slice() else {
        return None;
    };
    if flag != FLAG {
        return None;
    }
    let result = serve(port, Path::new(folder), (warm, kept), names);
    Some(match result {
        Ok(()) => 0,
        Err(problem) => {
            // The host shows standard error if a worker does not start.
            let _ = writeln!(std::io::stderr(), "{problem}");
            1
        }
    })
}

/// Parses a number of the command line.
fn number<T: std::str::FromStr>(text: &str) -> Result<T, String> {
    text.parse().map_err(|_| format!("{text:?} is no number"))
}

/// Connects to the host, loads the modules and runs jobs until the host closes the connection.
fn serve(
    port: &str,
    folder: &Path,
    (warm, kept): (&str, &str),
    names: &[String],
) -> Result<(), String> {
    let stream = TcpStream::connect(("127.0.0.1", number(port)?))
        .map_err(|e| format!("connect to the host: {e}"))?;
    stream.set_nodelay(true).map_err(|e| e.to_string())?;
    let again = stream.try_clone().map_err(|e| e.to_string())?;
    let mut worker = Worker {
        interpreters: Interpreters::load(folder, names, number(warm)?)?,
        places: HashMap::new(),
        snapshots: HashMap::new(),
        kept: number(kept)?,
        output: Arc::new(Mutex::new(Output {
            stream: again,
            gathered: Vec::new(),
        })),
    };
    while worker.interpreters.lacks() {
        worker.interpreters.add()?;
    }
    worker.answer(Kind::Ready, &[])?;
    let mut input = BufReader::with_capacity(GATHER_BYTES, stream);
    loop {
        while input.buffer().is_empty() && worker.interpreters.lacks() && quiet(input.get_ref())? {
            worker.interpreters.add()?;
        }
        let mut start = [0; 5];
        if input.read_exact(&mut start).is_err() {
            // The host has closed the connection.
            return Ok(());
        }
        let (kind, len) = read_head(start)?;
        let mut bytes = vec![0; len];
        input
            .read_exact(&mut bytes)
            .map_err(|e| format!("read a job: {e}"))?;
        match kind {
            Kind::Job => worker.job(&bytes)?,
            Kind::Freeze => worker.freeze(unpack(&bytes)?.0)?,
            Kind::Forget => worker.forget(&unpack(&bytes)?.0),
            other => return Err(format!("a frame of kind {other:?} is not for a worker")),
        }
    }
}

/// True if the worker is idle. No interpreter is started in advance between jobs in close succession, because
/// the warm-up takes longer than it saves.
fn quiet(stream: &TcpStream) -> Result<bool, String> {
    let time = rustix::time::Timespec {
        tv_sec: 0,
        tv_nsec: QUIET.as_nanos() as i64,
    };
    let mut asked = [PollFd::new(stream, PollFlags::IN)];
    match poll(&mut asked, Some(&time)) {
        Ok(ready) => Ok(ready == 0),
        Err(Errno::INTR) => Ok(false),
        Err(e) => Err(format!("wait for the host: {e}")),
    }
}

/// State of a worker process.
struct Worker {
    /// Loaded interpreters.
    interpreters: Interpreters,
    /// Interpreters of sandboxes, by number.
    places: HashMap<u64, Live>,
    /// Copies of interpreters, by number.
    snapshots: HashMap<u64, Frozen>,
    /// Maximum bytes of interpreters and snapshots. Memory that forks share counts for each.
    kept: u64,
    /// Connection to the host.
    output: Shared,
}

/// The memory for another interpreter or snapshot is exhausted.
struct MemoryFull;

impl Worker {
    /// Sends a frame at once.
    fn answer(&self, kind: Kind, bytes: &[u8]) -> Result<(), String> {
        let mut output = locked(&self.output);
        output.frame(kind, bytes);
        output.send().map_err(|e| format!("answer: {e}"))
    }

    /// Sends the result of a job.
    fn done(&self, done: JobResult, files: Option<&Tree>) -> Result<(), String> {
        self.answer(Kind::Done, &pack_done(done, files)?)
    }

    /// Checks that `more` bytes fit into the memory for interpreters and snapshots.
    fn check_memory(&self, more: u64) -> Result<(), MemoryFull> {
        let places: u64 = self.places.values().map(Live::bytes).sum();
        let snapshots: u64 = self.snapshots.values().map(|f| f.stored).sum();
        if places + snapshots + more > self.kept {
            Err(MemoryFull)
        } else {
            Ok(())
        }
    }

    /// Limits and input of a job. Times count from now on.
    fn setting(&self, job: &Job, stdin: Vec<u8>, files: Tree) -> Setting {
        let output = Arc::clone(&self.output);
        let at_once = job.stream;
        Setting {
            files,
            stdin,
            bounds: Bounds {
                until: Instant::now() + Duration::from_millis(job.deadline_ms),
                cpu: Duration::from_millis(job.cpu_ms),
                memory_bytes: job.memory_bytes as usize,
                output_bytes: job.output_bytes as usize,
                work_bytes: job.work_bytes,
                open_files: job.open_files as usize,
                stream: at_once,
            },
            sink: Box::new(move |stream, bytes| {
                let kind = match stream {
                    OutputStream::Stdout => Kind::Stdout,
                    OutputStream::Stderr => Kind::Stderr,
                };
                let mut output = locked(&output);
                output.frame(kind, bytes);
                if at_once || output.gathered.len() > GATHER_BYTES {
                    // If the host has closed the connection, the worker ends at its next read.
                    let _ = output.send();
                }
            }),
        }
    }

    /// Runs a job: in the sandbox's own interpreter, in a fork that is dropped, or from the start of a
    /// module.
    fn job(&mut self, bytes: &[u8]) -> Result<(), String> {
        let (mut job, stdin, files) = unpack_job(bytes)?;
        // A program must not use the memory of other interpreters.
        let asked = job.memory_bytes.saturating_add(job.work_bytes);
        if self
            .check_memory(asked.saturating_sub(PROGRAM_BYTES))
            .is_err()
        {
            return self.memory_full();
        }
        let code = job.code.take();
        let (outcome, alive) = match (code, job.place) {
            (Some(code), Some(place)) => {
                let setting = self.setting(&job, stdin, Tree::new());
                match self.in_place(&job, place, setting, &files, &code) {
                    Ok(ran) => ran,
                    Err(MemoryFull) => return self.memory_full(),
                }
            }
            (Some(code), None) if self.interpreters.has_turns() => {
                let setting = self.setting(&job, stdin, Tree::new());
                match self.interpreters.fork(None) {
                    Err(problem) => (failed(problem), false),
                    Ok(mut live) => {
                        if !files.is_empty() {
                            live.replace_files(&files);
                        }
                        let running = self.interpreters.running();
                        let (outcome, _) =
                            live.run(running, setting, program(&job.env, &code), false);
                        // Sends the response before it frees the memory.
                        return self.end(outcome, false);
                    }
                }
            }
            (code, _) => {
                let setting = self.setting(&job, stdin, files);
                let outcome = match code {
                    None => self
                        .interpreters
                        .run(&job.module, job.args, job.env, setting),
                    Some(code) => {
                        let args = ["python", "-S", "-B", "-c", &code].map(String::from);
                        let env = python_env().into_iter().chain(job.env).collect();
                        self.interpreters.run(PYTHON, args.to_vec(), env, setting)
                    }
                };
                (outcome, false)
            }
        };
        self.end(outcome, alive)
    }

    /// Answers that no program has run, because memory for it would be missing.
    fn memory_full(&self) -> Result<(), String> {
        let done = JobResult {
            memory_full: true,
            ..JobResult::new(Ending::SandboxDied)
        };
        self.done(done, None)
    }

    /// Answers with the result of a program.
    fn end(&self, outcome: Outcome, alive: bool) -> Result<(), String> {
        let done = JobResult {
            truncated: outcome.truncated,
            cpu_s: outcome.cpu_s,
            peak_memory_bytes: outcome.peak_memory_bytes,
            failure: outcome.failure,
            alive,
            ..JobResult::new(outcome.ending)
        };
        self.done(done, outcome.files.as_ref())
    }

    /// Runs a turn of a sandbox's own interpreter, and keeps the interpreter if it continues and fits into
    /// the memory.
    fn in_place(
        &mut self,
        job: &Job,
        place: Place,
        setting: Setting,
        files: &Tree,
        code: &str,
    ) -> Result<(Outcome, bool), MemoryFull> {
        let live = match place.from {
            From::Last => self
                .places
                .remove(&place.number)
                .ok_or("its interpreter is gone".to_string()),
            From::Start => {
                self.check_memory(0)?;
                self.interpreters.fork(None)
            }
            From::Snapshot(snapshot) => match self.snapshots.get(&snapshot) {
                None => Err("its snapshot is gone".into()),
                Some(frozen) => {
                    self.check_memory(frozen.stored)?;
                    self.interpreters.fork(Some(frozen))
                }
            },
        };
        let mut live = match live {
            Ok(live) => live,
            Err(problem) => return Ok((failed(problem), false)),
        };
        if place.from == From::Start {
            self.check_memory(live.bytes())?;
        }
        if !job.same_files {
            live.replace_files(files);
        }
        let running = self.interpreters.running();
        let (mut outcome, alive) = live.run(running, setting, program(&job.env, code), true);
        let kept = alive && self.check_memory(live.bytes()).is_ok();
        if kept {
            self.places.insert(place.number, live);
        } else if alive {
            // The interpreter exceeds the memory for all of them, so that only this one is dropped.
            outcome.ending = Ending::OutOfMemory;
        }
        Ok((outcome, kept))
    }

    /// Copies an interpreter as a snapshot. Its sandbox continues.
    fn freeze(&mut self, freeze: Freeze) -> Result<(), String> {
        let mut done = JobResult::new(Ending::Exited { code: 0 });
        done.memory_full = match self.places.get(&freeze.place) {
            None => false,
            Some(live) => self.check_memory(live.bytes()).is_err(),
        };
        if !done.memory_full {
            let live = self.places.get_mut(&freeze.place);
            let frozen = live.map_or(Err("its interpreter is gone".into()), Live::freeze);
            match frozen {
                Ok(frozen) => drop(self.snapshots.insert(freeze.snapshot, frozen)),
                Err(problem) => done.failure = Some(problem),
            }
        }
        self.done(done, None)
    }

    /// Drops interpreters and snapshots that no sandbox uses any more.
    fn forget(&mut self, forget: &Forget) {
        for place in &forget.places {
            self.places.remove(place);
        }
        for snapshot in &forget.snapshots {
            self.snapshots.remove(snapshot);
        }
    }
}
