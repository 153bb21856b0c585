//! The worker: a process in a sandbox of its own that runs programs one after the other.

use crate::engine::{Interpreters, Outcome};
use crate::wasi::{Bounds, JOB_PATH, Setting, Start};
use crate::wire::{Done, Job, Kind, head, pack_done, read_head, unpack_job};
use sinew_sandbox::OutputStream;
use std::collections::VecDeque;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Hidden first argument; then the port of the host, the folder of modules, how many
/// interpreters wait for work, and the names of modules.
pub(crate) const FLAG: &str = "--sinew-wasm-worker";

/// What a Python that was started early runs: it waits for its program, and then is as if it had
/// been started with it.
const BOOT: &str = "\
import os,sys,traceback
with open('/dev/job') as f:
    e,a,c=eval(f.read())
os.environ.clear();os.environ.update(e);sys.argv[:]=a;sys.path_importer_cache.clear()
del f,e,a
g={'__name__':'__main__','__builtins__':__builtins__}
try:
    exec(compile(c,'<string>','exec'),g)
except SystemExit:
    raise
except BaseException as x:
    t=x.__traceback__
    traceback.print_exception(type(x),x,t.tb_next if t.tb_next else t)
    sys.exit(1)
";

type Stream = Arc<Mutex<TcpStream>>;

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
            // Standard error is what the host shows when a worker does not come up.
            let _ = writeln!(std::io::stderr(), "{problem}");
            1
        }
    })
}

fn send(stream: &Stream, kind: Kind, bytes: &[u8]) -> std::io::Result<()> {
    let mut stream = stream.lock().unwrap_or_else(PoisonError::into_inner);
    let mut frame = head(kind, bytes.len()).to_vec();
    frame.extend_from_slice(bytes);
    stream.write_all(&frame)
}

fn serve(port: &str, folder: &Path, warm: &str, names: &[String]) -> Result<(), String> {
    let number = |text: &str| text.parse::<u16>().map_err(|e| format!("{text:?}: {e}"));
    let interpreters = Interpreters::load(folder, names)?;
    let mut input = TcpStream::connect(("127.0.0.1", number(port)?))
        .map_err(|e| format!("connect to the host: {e}"))?;
    input.set_nodelay(true).map_err(|e| e.to_string())?;
    let output: Stream = Arc::new(Mutex::new(input.try_clone().map_err(|e| e.to_string())?));
    let mut pool = Pool {
        waiting: VecDeque::new(),
        size: number(warm)?.into(),
    };
    pool.fill(&interpreters);
    send(&output, Kind::Ready, &[]).map_err(|e| e.to_string())?;
    loop {
        let mut start = [0; 5];
        if input.read_exact(&mut start).is_err() {
            // The host is gone.
            return Ok(());
        }
        let (kind, len) = read_head(start)?;
        let mut bytes = vec![0; len];
        input
            .read_exact(&mut bytes)
            .map_err(|e| format!("read a job: {e}"))?;
        if kind != Kind::Job {
            return Err(format!("a frame of kind {kind:?} is not for a worker"));
        }
        let outcome = run(&interpreters, &mut pool, &output, &bytes)?;
        let files = outcome.files.as_ref();
        let done = Done {
            truncated: outcome.truncated,
            cpu_s: outcome.cpu_s,
            peak_memory_bytes: outcome.peak_memory_bytes,
            failure: outcome.failure.clone(),
            ..Done::new(outcome.ending)
        };
        send(&output, Kind::Done, &pack_done(done, files)?).map_err(|e| format!("answer: {e}"))?;
        pool.fill(&interpreters);
    }
}

/// Python interpreters that wait for a program; each serves one.
struct Pool {
    waiting: VecDeque<SyncSender<Start>>,
    size: usize,
}

impl Pool {
    fn fill(&mut self, interpreters: &Interpreters) {
        while self.waiting.len() < self.size {
            let args = ["python", "-S", "-B", "-c", BOOT]
                .map(String::from)
                .to_vec();
            match interpreters.warm("python", args, python_env()) {
                Some(sender) => self.waiting.push_back(sender),
                None => return,
            }
        }
    }
}

/// What the interpreter itself needs to know.
fn python_env() -> Vec<(String, String)> {
    [("PYTHONDONTWRITEBYTECODE", "1"), ("PYTHONNOUSERSITE", "1")]
        .map(|(n, v)| (n.into(), v.into()))
        .to_vec()
}

fn setting(job: &Job, stdin: Vec<u8>, files: crate::wire::Tree, output: &Stream) -> Setting {
    let output = Arc::clone(output);
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
            stream: job.stream,
        },
        sink: Box::new(move |stream, bytes| {
            let kind = match stream {
                OutputStream::Stdout => Kind::Stdout,
                OutputStream::Stderr => Kind::Stderr,
            };
            // A host that is gone ends the worker at its next read.
            let _ = send(&output, kind, bytes);
        }),
    }
}

fn run(
    interpreters: &Interpreters,
    pool: &mut Pool,
    output: &Stream,
    bytes: &[u8],
) -> Result<Outcome, String> {
    let (job, stdin, files) = unpack_job(bytes)?;
    let setting = setting(&job, stdin, files, output);
    let Some(code) = &job.code else {
        return Ok(interpreters.run(&job.module, job.args, job.env, setting));
    };
    let mut setting = setting;
    if let Some(waiting) = pool.waiting.pop_front() {
        let (reply, outcome) = sync_channel(1);
        let program = literal(&job.env, code)?;
        let start = Start {
            setting,
            program,
            reply,
        };
        match waiting.send(start) {
            Ok(()) => {
                let died = |_| format!("an interpreter died while it waited at /{JOB_PATH}");
                return outcome.recv().map_err(died);
            }
            // It never came to wait: a fresh one says why.
            Err(unsent) => setting = unsent.0.setting,
        }
    }
    let args = ["python", "-S", "-B", "-c", code]
        .map(String::from)
        .to_vec();
    let env = python_env().into_iter().chain(job.env).collect();
    Ok(interpreters.run("python", args, env, setting))
}

/// Environment, arguments and code as a literal of Python: texts of JSON are texts of Python.
fn literal(env: &[(String, String)], code: &str) -> Result<Vec<u8>, String> {
    let text = |t: &str| serde_json::to_string(t).map_err(|e| e.to_string());
    let mut out = String::from("({");
    for (name, value) in env {
        out.push_str(&format!("{}:{},", text(name)?, text(value)?));
    }
    out.push_str(&format!("}},['-c'],{})", text(code)?));
    Ok(out.into_bytes())
}
