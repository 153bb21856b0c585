//! `train.data_parallel`: other processes of this host compute parts of the gradient.
//!
//! Weights and gradients go through memory that the processes share, an anonymous file without a
//! name: when the last of them ends, however it ends, it is gone. Rows and reports go through the
//! workers' standard input and output. A worker whose input closes ends.

use rustix::fs::MemfdFlags;
use serde::{Deserialize, Serialize};
use sinew_orchestrator::PipelineError;
use sinew_tensor::{Cpu, KernelSet};
use sinew_train::{Comm, CommError, HostState, Link, ModelPolicy, ProcessComm, Trainer};
use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::fd::AsRawFd;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// The command that makes this program a worker.
pub const COMMAND: &str = "train-worker";

/// Longest wait for a worker: to load its model, or to compute its part.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(1800);

/// Maximum time of a worker for its end once its input is closed.
const END_TIMEOUT: Duration = Duration::from_secs(2);
/// Maximum wait for the status of a worker that closed its pipes.
const STATUS_TIMEOUT: Duration = Duration::from_secs(10);

/// Gradients of one tensor or group of tensors begin at a multiple of as many numbers.
const PADDING: usize = 64;

/// The first line a worker reads.
#[derive(Debug, Serialize, Deserialize)]
struct Setup {
    /// Description of the training, for the function that loads it.
    run: String,
    /// Number of the process, from 1; the leading process is 0.
    rank: usize,
    ranks: usize,
    /// Name of the kernel set. All processes use the leader's, so that the bits do not depend on the process
    /// that computes.
    kernels: String,
    /// Threads of each process.
    threads: usize,
    /// Path of the shared memory.
    memory: String,
    /// Numbers of the leading process, as in [`WorkerReady`].
    numbers: usize,
}

/// Message of a worker that has loaded its model: the maximum of numbers that it will exchange.
type WorkerReady = Result<usize, String>;

/// The most numbers of one exchange: the trained weights, or as many gradients with their padding.
fn numbers(policy: &ModelPolicy) -> usize {
    let mut total = 0usize;
    for file in policy.trained() {
        for name in file.tensors.names() {
            let elements = file.tensors.info(&name).map_or(0, |info| info.elements());
            total += elements.next_multiple_of(PADDING);
        }
    }
    total
}

/// A worker's process. Dropping it kills what does not end by itself in time.
#[derive(Debug)]
struct Worker(Child);

impl Worker {
    /// Returns the status of its end, if it ends in time.
    fn ended_within(&mut self, limit: Duration) -> Option<std::process::ExitStatus> {
        let until = std::time::Instant::now() + limit;
        loop {
            match self.0.try_wait() {
                Ok(Some(status)) => return Some(status),
                Ok(None) if std::time::Instant::now() < until => {
                    std::thread::sleep(Duration::from_millis(5));
                }
                _ => return None,
            }
        }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        if self.ended_within(END_TIMEOUT).is_some() {
            return;
        }
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The group of processes of a run, seen from the one that leads: their exchange, and the processes
/// themselves.
#[derive(Debug)]
pub struct WorkerGroup {
    // Dropped first: a worker whose input closes ends.
    comm: ProcessComm,
    workers: Vec<Worker>,
}

impl WorkerGroup {
    /// Starts workers, so that `count` processes compute with this one, and waits until each has loaded
    /// what `run` describes.
    ///
    /// # Errors
    /// If a process or the memory cannot be had, or a worker fails to load.
    pub fn start(
        count: usize,
        run: &str,
        device: &Cpu,
        policy: &ModelPolicy,
    ) -> Result<Self, PipelineError> {
        let failed = |e: &dyn std::fmt::Display| {
            PipelineError::system(format!("train.data_parallel = {count}: {e}"))
        };
        let numbers = numbers(policy);
        let file = rustix::fs::memfd_create("sinew-train", MemfdFlags::CLOEXEC);
        let file = File::from(file.map_err(|e| failed(&e))?);
        let bytes = ProcessComm::memory_bytes(count, numbers);
        file.set_len(bytes).map_err(|e| failed(&e))?;
        let memory = format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd());
        let (mut workers, mut links) = (Vec::new(), Vec::new());
        for rank in 1..count {
            let setup = Setup {
                run: run.to_owned(),
                rank,
                ranks: count,
                kernels: device.kernels().name().to_string(),
                threads: device.threads(),
                memory: memory.clone(),
                numbers,
            };
            let (worker, link) = start(rank, &setup).map_err(|e| failed(&e))?;
            workers.push(worker);
            links.push(link);
        }
        let comm = ProcessComm::leader(links, file, numbers, ANSWER_TIMEOUT, device.clone());
        let mut group = Self { comm, workers };
        for rank in 1..count {
            let message = group.receive(rank).map_err(|e| failed(&e))?;
            let ready: WorkerReady = serde_json::from_slice(&message).map_err(|e| failed(&e))?;
            let lost = |reason| CommError::Failed {
                rank,
                ranks: count,
                reason,
            };
            match ready {
                Ok(own) if own == numbers => {}
                Ok(own) => {
                    let reason = format!("it trains {own} numbers, this process {numbers}");
                    return Err(failed(&lost(reason)));
                }
                Err(reason) => return Err(failed(&lost(reason))),
            }
        }
        Ok(group)
    }

    /// Adds to an error of a worker that is gone how it ended.
    fn explained<T>(&mut self, result: Result<T, CommError>) -> Result<T, CommError> {
        result.map_err(|error| match error {
            CommError::Gone {
                rank,
                ranks,
                reason,
            } => {
                let worker = self.workers.get_mut(rank.wrapping_sub(1));
                // Its pipes close a moment before it can be waited for.
                let status = worker.and_then(|w| w.ended_within(STATUS_TIMEOUT));
                CommError::Gone {
                    rank,
                    ranks,
                    reason: match status {
                        Some(status) => format!("{reason} ({status})"),
                        None => reason,
                    },
                }
            }
            other => other,
        })
    }
}

impl Comm for WorkerGroup {
    fn rank(&self) -> usize {
        self.comm.rank()
    }

    fn ranks(&self) -> usize {
        self.comm.ranks()
    }

    fn send(&mut self, to: usize, message: &[u8]) -> Result<(), CommError> {
        let sent = self.comm.send(to, message);
        self.explained(sent)
    }

    fn receive(&mut self, from: usize) -> Result<Vec<u8>, CommError> {
        let received = self.comm.receive(from);
        self.explained(received)
    }

    fn broadcast(&mut self, buffers: &mut [&mut [f32]]) -> Result<(), CommError> {
        let done = self.comm.broadcast(buffers);
        self.explained(done)
    }

    fn all_reduce(&mut self, buffers: &mut [&mut [f32]]) -> Result<(), CommError> {
        let done = self.comm.all_reduce(buffers);
        self.explained(done)
    }

    fn all_gather(&mut self, own: &[u8]) -> Result<Vec<Vec<u8>>, CommError> {
        let gathered = self.comm.all_gather(own);
        self.explained(gathered)
    }
}

/// Starts the worker of a rank and sends it its setup, a line before the first message.
fn start(rank: usize, setup: &Setup) -> std::io::Result<(Worker, Link)> {
    let child = Command::new(std::env::current_exe()?)
        .arg(COMMAND)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        // Ctrl-C is for the run, which then closes the worker's input.
        .process_group(0)
        .spawn()?;
    let mut worker = Worker(child);
    let closed = || std::io::Error::other("a pipe of a new process is missing");
    let mut input = worker.0.stdin.take().ok_or_else(closed)?;
    let output = worker.0.stdout.take().ok_or_else(closed)?;
    writeln!(input, "{}", serde_json::to_string(setup)?)?;
    let link = Link::new(rank, output, input);
    Ok((worker, link))
}

/// The command `sinew train-worker`: parts of the gradient until the input closes. `load` makes the trainer
/// of a run's description.
///
/// # Errors
/// Fails if a message or the model cannot be read, or an answer cannot be sent.
pub fn work(
    load: impl FnOnce(&str, &Cpu) -> Result<Trainer<ModelPolicy>, PipelineError>,
) -> Result<(), PipelineError> {
    let mut input = BufReader::new(std::io::stdin());
    let mut line = String::new();
    input.read_line(&mut line).map_err(PipelineError::system)?;
    if line.is_empty() {
        return Err(PipelineError::input(
            "train-worker is started by `sinew train` with train.data_parallel",
        ));
    }
    let setup: Setup = serde_json::from_str(&line).map_err(PipelineError::input)?;
    let kernels = KernelSet::parse(&setup.kernels).map_err(PipelineError::input)?;
    let device = Cpu::new(kernels, setup.threads);
    let options = File::options().read(true).write(true).open(&setup.memory);
    let memory = options.map_err(|e| PipelineError::system(format!("{}: {e}", setup.memory)))?;
    let link = Link::new(0, input, std::io::stdout());
    let mut comm = ProcessComm::follower(
        setup.rank,
        setup.ranks,
        link,
        memory,
        setup.numbers,
        device.clone(),
    );
    let loaded = load(&setup.run, &device);
    let ready: WorkerReady = match &loaded {
        Ok(trainer) => Ok(numbers(trainer.policy())),
        Err(e) => Err(e.to_string()),
    };
    let ready = serde_json::to_vec(&ready).map_err(PipelineError::system)?;
    comm.send(0, &ready).map_err(PipelineError::system)?;
    let mut trainer = loaded?;
    trainer.with_comm(Box::new(comm));
    trainer.serve().map_err(PipelineError::system)
}
