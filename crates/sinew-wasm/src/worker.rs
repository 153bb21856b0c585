//! Worker: a process in its own sandbox that runs programs in sequence.
//!
//! It has one thread for programs and one for their clock. It reads a frame, runs its job and answers, so
//! that the host never has two programs in a worker. It prepares interpreters between jobs, if no job arrived
//! for 2 ms.

use crate::engine::{Interpreters, PYTHON, python_env};
use crate::error::WasmError;
use crate::outcome::{Outcome, failed};
use crate::wasi::{Bounds, Setting};
use crate::wire::{Job, Kind, Tree, head, pack_done, program, read_head, unpack_job};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use sinew_sandbox::OutputStream;
use std::cell::RefCell;
use std::io::{BufReader, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::rc::Rc;
use std::time::{Duration, Instant};

/// Hidden first argument. The next ones are the port of the host, the folder of modules, the number of
/// interpreters to keep ready, and the names of modules.
pub(crate) const FLAG: &str = "--sinew-wasm-worker";
/// Frames are buffered up to this size, unless output is streamed.
const GATHER_BYTES: usize = 64 << 10;

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

/// Runs as a worker and returns its exit code if this process was started as one.
pub fn worker_main_if_requested() -> Option<i32> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [flag, port, folder, warm, names @ ..] = args.as_slice() else {
        return None;
    };
    if flag != FLAG {
        return None;
    }
    let result = serve(port, Path::new(folder), warm, names);
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
fn number<T: std::str::FromStr>(text: &str) -> Result<T, WasmError> {
    text.parse()
        .map_err(|_| format!("{text:?} is no number").into())
}

/// Connects to the host, loads the modules and runs jobs until the host closes the connection.
fn serve(port: &str, folder: &Path, warm: &str, names: &[String]) -> Result<(), WasmError> {
    let stream = TcpStream::connect(("127.0.0.1", number(port)?))
        .map_err(|e| format!("connect to the host: {e}"))?;
    stream.set_nodelay(true)?;
    let again = stream.try_clone()?;
    let mut worker = Worker {
        interpreters: Interpreters::load(folder, names, number(warm)?)?,
        output: Rc::new(RefCell::new(Output {
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
            other => return Err(format!("a frame of kind {other:?} is not for a worker").into()),
        }
    }
}

/// True if the worker is idle. No interpreter is started in advance between jobs in close succession, because
/// the warm-up takes longer than it saves.
fn quiet(stream: &TcpStream) -> Result<bool, WasmError> {
    let time = rustix::time::Timespec {
        tv_sec: 0,
        tv_nsec: QUIET.as_nanos() as i64,
    };
    let mut asked = [PollFd::new(stream, PollFlags::IN)];
    match poll(&mut asked, Some(&time)) {
        Ok(ready) => Ok(ready == 0),
        Err(Errno::INTR) => Ok(false),
        Err(e) => Err(format!("wait for the host: {e}").into()),
    }
}

/// State of a worker process.
struct Worker {
    /// Loaded interpreters.
    interpreters: Interpreters,
    /// Connection to the host, shared with the running program.
    output: Rc<RefCell<Output>>,
}

impl Worker {
    /// Sends a frame at once.
    fn answer(&self, kind: Kind, bytes: &[u8]) -> Result<(), WasmError> {
        let mut output = self.output.borrow_mut();
        output.frame(kind, bytes);
        output.send().map_err(|e| format!("answer: {e}").into())
    }

    /// Limits and input of a job. Times count from now on.
    fn setting(&self, job: &Job, stdin: Vec<u8>, files: Tree) -> Setting {
        let output = Rc::clone(&self.output);
        let at_once = job.stream;
        Setting {
            files,
            stdin,
            bounds: Bounds {
                until: Instant::now() + Duration::from_millis(job.deadline_ms),
                cpu: Duration::from_millis((job.limits.cpu_s * 1e3) as u64),
                limits: job.limits.clone(),
                stream: at_once,
            },
            sink: Box::new(move |stream, bytes| {
                let kind = match stream {
                    OutputStream::Stdout => Kind::Stdout,
                    OutputStream::Stderr => Kind::Stderr,
                };
                let mut output = output.borrow_mut();
                output.frame(kind, bytes);
                if at_once || output.gathered.len() > GATHER_BYTES {
                    // If the host has closed the connection, the worker ends at its next read.
                    let _ = output.send();
                }
            }),
        }
    }

    /// Runs a job in a fork of Python, or from the start of a module. The instance is dropped after the
    /// response.
    fn job(&mut self, bytes: &[u8]) -> Result<(), WasmError> {
        let (mut job, stdin, files) = unpack_job(bytes)?;
        let setting = self.setting(&job, stdin, files);
        let code = match job.code.take() {
            Some(code) if self.interpreters.has_turns() => {
                let mut live = match self.interpreters.fork() {
                    Ok(live) => live,
                    Err(problem) => return self.end(failed(problem.to_string())),
                };
                let running = self.interpreters.running();
                let (outcome, _) = live.run(running, setting, program(&job.env, &code), false);
                return self.end(outcome);
            }
            code => code,
        };
        if let Some(code) = code {
            job.module = PYTHON.into();
            job.args = ["python", "-S", "-B", "-c", &code]
                .map(String::from)
                .to_vec();
            job.env.splice(..0, python_env());
        }
        let outcome = self
            .interpreters
            .run(&job.module, job.args, job.env, setting);
        self.end(outcome)
    }

    /// Answers with the result of a program.
    fn end(&self, (done, files): Outcome) -> Result<(), WasmError> {
        self.answer(Kind::Done, &pack_done(done, files.as_ref())?)
    }
}
