//! `train.data_parallel`: other processes of this host compute parts of the gradient.
//!
//! Weights and gradients go through memory that the processes share, an anonymous file without a
//! name: when the last of them ends, however it ends, it is gone. Rows and reports go through the
//! workers' standard input and output. A worker whose input closes ends.

use crate::error::PipelineError;
use rustix::fs::MemfdFlags;
use serde::{Deserialize, Serialize};
use sinew_tensor::{Device, KernelSet, ops};
use sinew_train::{ModelPolicy, PeerError, Peers, Policy, Shard, ShardReport, Trainer};
use std::fs::File;
use std::io::{BufRead, BufReader, BufWriter, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::time::Duration;

/// The command that makes this program a worker.
pub const COMMAND: &str = "train-worker";

/// Numbers that are read from another process and added at once: they stay in the second cache level.
const PIECE: usize = 1 << 17;

/// Longest wait for a worker: to load its model, or to compute its part.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(1800);

/// How long a worker may take to end once its input is closed.
const END_TIMEOUT: Duration = Duration::from_secs(2);
/// How long the status of a worker that closed its pipes may take.
const STATUS_TIMEOUT: Duration = Duration::from_millis(500);

/// The first line a worker reads.
#[derive(Debug, Serialize, Deserialize)]
struct Setup {
    /// What is trained, for the one that loads it.
    run: String,
    rank: usize,
    kernels: String,
    threads: usize,
    /// Where the shared memory is opened.
    memory: String,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Answer {
    Ready { weights: usize, gradients: usize },
    Done(ShardReport),
    Failed(String),
}

/// Numbers of the trained tensors, and of the buffers with their gradients.
fn sizes(policy: &mut ModelPolicy) -> (usize, usize) {
    let weights = policy.tensors().iter().map(|t| t.values.len()).sum();
    let gradients = policy.gradients_mut().iter().map(|g| g.len()).sum();
    (weights, gradients)
}

/// Shared numbers: the weights, then the gradients of rank 1, of rank 2, ...
#[derive(Debug)]
struct Memory {
    file: File,
    weights: usize,
    gradients: usize,
}

impl Memory {
    fn write<'a>(
        &self,
        mut at: usize,
        parts: impl Iterator<Item = &'a [f32]>,
    ) -> std::io::Result<()> {
        for part in parts {
            let bytes = bytemuck::cast_slice(part);
            self.file.write_all_at(bytes, 4 * at as u64)?;
            at += part.len();
        }
        Ok(())
    }

    fn read(&self, at: usize, into: &mut [f32]) -> std::io::Result<()> {
        let bytes = bytemuck::cast_slice_mut(into);
        self.file.read_exact_at(bytes, 4 * at as u64)
    }

    /// Where the gradients of `rank` (from 1) begin.
    fn place(&self, rank: usize) -> usize {
        self.weights + (rank - 1) * self.gradients
    }
}

#[derive(Debug)]
struct Worker {
    rank: usize,
    child: Child,
    /// `None` once it was closed.
    input: Option<BufWriter<ChildStdin>>,
    answers: Receiver<std::io::Result<String>>,
}

/// The workers of a run.
#[derive(Debug)]
pub struct ProcessPeers {
    memory: Memory,
    workers: Vec<Worker>,
    device: Device,
}

impl Worker {
    fn start(rank: usize, setup: &Setup) -> std::io::Result<Self> {
        let mut child = Command::new(std::env::current_exe()?)
            .arg(COMMAND)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            // Ctrl-C is for the run, which then closes the worker's input.
            .process_group(0)
            .spawn()?;
        let closed = || std::io::Error::other("a pipe of a new process is missing");
        let mut input = BufWriter::new(child.stdin.take().ok_or_else(closed)?);
        let output = BufReader::new(child.stdout.take().ok_or_else(closed)?);
        // One answer for each question: the thread never waits long, and ends with the pipe.
        let (sender, answers) = sync_channel(1);
        std::thread::spawn(move || {
            for line in output.lines() {
                if sender.send(line).is_err() {
                    return;
                }
            }
        });
        writeln!(input, "{}", serde_json::to_string(setup)?)?;
        input.flush()?;
        Ok(Self {
            rank,
            child,
            input: Some(input),
            answers,
        })
    }

    fn ask(&mut self, shard: &Shard, count: usize) -> Result<(), PeerError> {
        let sent = (|| {
            let closed = || std::io::Error::other("its input is closed");
            let input = self.input.as_mut().ok_or_else(closed)?;
            serde_json::to_writer(&mut *input, shard)?;
            input.write_all(b"\n")?;
            input.flush()
        })();
        sent.map_err(|e| self.gone(count, &e.to_string()))
    }

    fn answer(&mut self, count: usize) -> Result<Answer, PeerError> {
        let line = match self.answers.recv_timeout(ANSWER_TIMEOUT) {
            Ok(Ok(line)) => line,
            Ok(Err(e)) => return Err(self.gone(count, &e.to_string())),
            Err(RecvTimeoutError::Disconnected) => return Err(self.gone(count, "it ended")),
            Err(RecvTimeoutError::Timeout) => {
                let waited = format!("no answer for {} s", ANSWER_TIMEOUT.as_secs());
                return Err(self.gone(count, &waited));
            }
        };
        match serde_json::from_str(&line) {
            Ok(Answer::Failed(reason)) => Err(PeerError::Failed {
                rank: self.rank,
                count,
                reason,
            }),
            Ok(answer) => Ok(answer),
            Err(e) => Err(self.gone(count, &format!("an answer that is none: {e}"))),
        }
    }

    /// How it ended, if it ends in time.
    fn ended_within(&mut self, limit: Duration) -> Option<std::process::ExitStatus> {
        let until = std::time::Instant::now() + limit;
        loop {
            match self.child.try_wait() {
                Ok(Some(status)) => return Some(status),
                Ok(None) if std::time::Instant::now() < until => {
                    std::thread::sleep(Duration::from_millis(5));
                }
                _ => return None,
            }
        }
    }

    fn gone(&mut self, count: usize, reason: &str) -> PeerError {
        // Its pipes close a moment before it can be waited for.
        let status = match self.ended_within(STATUS_TIMEOUT) {
            Some(status) => format!("{reason} ({status})"),
            None => reason.to_owned(),
        };
        PeerError::Gone {
            rank: self.rank,
            count,
            reason: status,
        }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.input = None;
        if self.ended_within(END_TIMEOUT).is_some() {
            return;
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl ProcessPeers {
    /// Starts workers, so that `count` processes compute with this one, and waits until each has loaded
    /// what `run` describes.
    pub fn start(
        count: usize,
        run: &str,
        device: &Device,
        policy: &mut ModelPolicy,
    ) -> Result<Self, PipelineError> {
        let failed = |e: &dyn std::fmt::Display| {
            PipelineError::system(format!("train.data_parallel = {count}: {e}"))
        };
        let (weights, gradients) = sizes(policy);
        let file = rustix::fs::memfd_create("sinew-train", MemfdFlags::CLOEXEC);
        let file = File::from(file.map_err(|e| failed(&e))?);
        let numbers = weights + (count - 1) * gradients;
        file.set_len(4 * numbers as u64).map_err(|e| failed(&e))?;
        let memory = format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd());
        let mut peers = Self {
            memory: Memory {
                file,
                weights,
                gradients,
            },
            workers: Vec::new(),
            device: device.clone(),
        };
        for rank in 1..count {
            let setup = Setup {
                run: run.to_owned(),
                rank,
                kernels: device.kernels().name().to_string(),
                threads: device.threads(),
                memory: memory.clone(),
            };
            let worker = Worker::start(rank, &setup).map_err(|e| failed(&e))?;
            peers.workers.push(worker);
        }
        for worker in &mut peers.workers {
            match worker.answer(count).map_err(|e| failed(&e))? {
                Answer::Ready {
                    weights: w,
                    gradients: g,
                } if (w, g) == (weights, gradients) => {}
                other => {
                    let rank = worker.rank;
                    return Err(failed(&format!("process {rank} began with {other:?}")));
                }
            }
        }
        Ok(peers)
    }

    fn memory_failed(&self, e: &std::io::Error) -> PeerError {
        PeerError::Failed {
            rank: 0,
            count: self.count(),
            reason: format!("shared memory: {e}"),
        }
    }
}

impl Peers for ProcessPeers {
    fn count(&self) -> usize {
        self.workers.len() + 1
    }

    fn start(&mut self, weights: &[&[f32]], shards: &[Shard]) -> Result<(), PeerError> {
        let written = self.memory.write(0, weights.iter().copied());
        written.map_err(|e| self.memory_failed(&e))?;
        let count = self.count();
        for (worker, shard) in self.workers.iter_mut().zip(shards) {
            worker.ask(shard, count)?;
        }
        Ok(())
    }

    fn finish(&mut self, gradients: &mut [&mut [f32]]) -> Result<Vec<ShardReport>, PeerError> {
        let count = self.count();
        let mut reports = Vec::with_capacity(self.workers.len());
        for worker in &mut self.workers {
            match worker.answer(count)? {
                Answer::Done(report) => reports.push(report),
                other => return Err(worker.gone(count, &format!("it answered {other:?}"))),
            }
        }
        let mut part = vec![0.0; PIECE];
        for rank in 1..count {
            let mut place = self.memory.place(rank);
            for sums in gradients.iter_mut().flat_map(|g| g.chunks_mut(PIECE)) {
                let part = &mut part[..sums.len()];
                let read = self.memory.read(place, part);
                read.map_err(|e| self.memory_failed(&e))?;
                ops::add(&self.device, part, sums);
                place += part.len();
            }
        }
        Ok(reports)
    }
}

/// What `sinew train-worker` does: parts of the gradient until the input closes. `load` makes the trainer
/// of a run's description.
///
/// # Errors
/// What could not be read, loaded or answered.
pub fn work(
    load: impl FnOnce(&str, &Device) -> Result<Trainer<ModelPolicy>, PipelineError>,
) -> Result<(), PipelineError> {
    let mut lines = std::io::stdin().lock().lines();
    let Some(line) = lines.next() else {
        return Err(PipelineError::input(
            "train-worker is started by `sinew train` with train.data_parallel",
        ));
    };
    let line = line.map_err(PipelineError::system)?;
    let setup: Setup = serde_json::from_str(&line).map_err(PipelineError::input)?;
    let (mut trainer, memory) = match prepare(&setup, load) {
        Ok(ready) => ready,
        Err(e) => {
            reply(&Answer::Failed(e.to_string()))?;
            return Err(e);
        }
    };
    reply(&Answer::Ready {
        weights: memory.weights,
        gradients: memory.gradients,
    })?;
    for line in lines {
        let line = line.map_err(PipelineError::system)?;
        let answer = match part(&line, setup.rank, &mut trainer, &memory) {
            Ok(report) => Answer::Done(report),
            Err(reason) => Answer::Failed(reason),
        };
        reply(&answer)?;
    }
    Ok(())
}

fn prepare(
    setup: &Setup,
    load: impl FnOnce(&str, &Device) -> Result<Trainer<ModelPolicy>, PipelineError>,
) -> Result<(Trainer<ModelPolicy>, Memory), PipelineError> {
    let kernels = KernelSet::parse(&setup.kernels).map_err(PipelineError::input)?;
    let device = Device::new(kernels, setup.threads);
    let mut trainer = load(&setup.run, &device)?;
    let (weights, gradients) = sizes(trainer.policy_mut());
    let options = File::options().read(true).write(true).open(&setup.memory);
    let file = options.map_err(|e| PipelineError::system(format!("{}: {e}", setup.memory)))?;
    Ok((
        trainer,
        Memory {
            file,
            weights,
            gradients,
        },
    ))
}

fn part(
    line: &str,
    rank: usize,
    trainer: &mut Trainer<ModelPolicy>,
    memory: &Memory,
) -> Result<ShardReport, String> {
    let shard: Shard = serde_json::from_str(line).map_err(|e| e.to_string())?;
    let mut at = 0;
    for tensor in trainer.policy_mut().tensors() {
        memory.read(at, tensor.values).map_err(|e| e.to_string())?;
        at += tensor.values.len();
    }
    let policy = trainer.policy_mut();
    policy.weights_changed().map_err(|e| e.to_string())?;
    let report = trainer.shard(&shard).map_err(|e| e.to_string())?;
    let gradients = trainer.policy_mut().gradients_mut();
    let parts = gradients.iter().map(|g| &**g);
    let written = memory.write(memory.place(rank), parts);
    written.map_err(|e| e.to_string())?;
    Ok(report)
}

fn reply(answer: &Answer) -> Result<(), PipelineError> {
    let mut out = std::io::stdout().lock();
    serde_json::to_writer(&mut out, answer)
        .map_err(std::io::Error::from)
        .and_then(|()| out.write_all(b"\n"))
        .and_then(|()| out.flush())
        .map_err(PipelineError::system)
}
