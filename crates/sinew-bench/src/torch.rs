//! `sinew bench torch`: the PyTorch trainer against a plain PyTorch loop, on a model of SmolLM2-135M's shape.
//!
//! | row | measures |
//! |---|---|
//! | `protocol overhead` | share of the time of forward and backward calls in which no rank computes |
//! | `shared prefixes` | an update of groups against the same trainer with flat rows |
//! | `plain loop`, `flat rows` | the same update, and the one with flat rows, against a plain loop |
//! | `save` | a checkpoint of weights and moments against `torch.distributed.checkpoint.save` |
//! | `publish` | weights for engines against one synchronized write of the same bytes |
//!
//! Both sides have the same rows, Python, number of threads, rows in a pass and activation checkpointing. The
//! trainer also returns the entropy of each trained token, which the plain loop does not compute.

use crate::machine::CpuTime;
use crate::peers::{PeerError, PeerResult, Peers};
use crate::row::{Better, Printer, Row, Summary};
use crate::{BenchError, clock, shapes, train};
use clap::Args;
use sinew_model::{ModelConfig, Params, SaveDtype, save_pretrained};
use sinew_torch::{
    Checkpointing, Deadlines, EnvironmentVariables, OpenOptions, PublishOptions, RankGroup,
    RankOptions, Sharing, TorchPolicy, TorchSetup, find_python,
};
use sinew_train::checkpoint::CheckpointStore;
use sinew_train::pack::{MicroBatch, pack};
use sinew_train::{OutputChoice, Policy, ScoreGrads, Trainer, TrainerConfig};
use sinew_types::{PolicyVersion, Surrogate, TensorSource, TokenId, TrainRow};
use std::collections::BTreeSet;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// Names that `--only` takes.
const PARTS: [&str; 4] = ["overhead", "update", "save", "publish"];
/// The peer.
const SCRIPT: &str = "torch_update.py";
/// Largest share of the protocol that is hoped for.
const OVERHEAD: f64 = 0.02;
/// Least ratios hoped for: shared prefixes to flat rows, the two to a plain loop, and times of writing,
/// which may be longer than the peer's by a tenth and a fifth.
const SHARED: f64 = 1.8;
const PLAIN: f64 = 1.0;
const FLAT: f64 = 0.95;
const SAVE: f64 = 1.0 / 1.1;
const PUBLISH: f64 = 1.0 / 1.2;
/// Micro-batches of a measurement of the protocol.
const WAVES: usize = 2;

/// Arguments of `sinew bench torch`.
#[derive(Debug, Args)]
pub(crate) struct TorchArgs {
    /// One JSON object a row
    #[arg(long)]
    json: bool,
    /// Only these parts: overhead, update, save, publish
    #[arg(long, value_delimiter = ',')]
    only: Vec<String>,
    /// Python with PyTorch, of both sides; else SINEW_TORCH_PYTHON, else that of `sinew setup torch`
    #[arg(long)]
    python: Option<PathBuf>,
    /// Folder of the peers' programs
    #[arg(long, default_value = "benches/peers")]
    peers: PathBuf,
    /// Longest that a peer may take, in seconds
    #[arg(long, default_value_t = 1800)]
    peer_limit: u64,
    /// Threads of each side; default: one a core
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=1024))]
    threads: Option<u32>,
    /// Repetitions of each measurement
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=100))]
    steps: u32,
    /// Tasks of an update
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=1024))]
    tasks: u32,
    /// Samples of a task
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=1024))]
    samples: u32,
    /// Tokens of a prompt
    #[arg(long, default_value_t = 200, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    shared: u32,
    /// Tokens of an answer
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    own: u32,
    /// Compute activations again in the backward pass, on both sides
    #[arg(long)]
    checkpointing: bool,
    /// A model of a few thousand weights, to try the bench
    #[arg(long)]
    tiny: bool,
    /// Folder for the model and everything that is written; default: that of the system
    #[arg(long)]
    work: Option<PathBuf>,
}

/// Tokens and rows of an update.
#[derive(Clone, Copy, Debug)]
struct Sizes {
    tasks: usize,
    samples: usize,
    shared: usize,
    own: usize,
}

impl Sizes {
    /// Tokens of a task whose samples share the prompt: a micro-batch.
    fn task(self) -> usize {
        self.shared + self.samples * self.own
    }

    /// Tokens of a task without sharing.
    fn flat_task(self) -> usize {
        self.samples * (self.shared + self.own)
    }

    /// Tokens of all rows without sharing.
    fn flat(self) -> usize {
        self.tasks * self.flat_task()
    }

    /// All rows. The peer makes the same.
    fn rows(self, config: &ModelConfig) -> Vec<TrainRow> {
        let count = self.tasks * self.samples;
        let share = 1.0 / (count * self.own) as f32;
        let one = |sample: usize| {
            let task = sample / self.samples;
            let prompt = (0..self.shared).map(|t| train::token(config, 1 + task * 1009 + t * 31));
            let own = (0..self.own).map(|t| train::token(config, 5 + sample * 2003 + t * 17));
            let tokens: Vec<TokenId> = prompt.chain(own).collect();
            train::row(tokens, self.shared, share)
        };
        (0..count).map(one).collect()
    }
}

impl std::fmt::Display for Sizes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self {
            tasks,
            samples,
            shared,
            own,
        } = self;
        write!(f, "{tasks}x{samples}, {shared} shared + {own} own")
    }
}

/// Runs the parts that are asked for: first those of one server, then the peers, which need its memory.
pub(crate) fn run(args: &TorchArgs) -> Result<(), BenchError> {
    let wanted = super::selected(&args.only, &PARTS)?;
    let bench = Bench::new(args)?;
    let mut measured = Measured::default();
    let group = bench.start()?;
    let mut trainer = bench.open(&group, Sharing::Auto)?;
    if wanted("overhead") {
        bench.overhead(&group, &mut trainer)?;
    }
    if wanted("update") {
        measured.shared = Some(bench.updates(&group, &mut trainer)?);
    }
    if wanted("save") {
        measured.save = Some(bench.saves(&group, &mut trainer)?);
    }
    if wanted("publish") {
        bench.publish(&group, &mut trainer)?;
    }
    if wanted("update") {
        // The server drops the first policy when it opens the second one.
        let mut flat = bench.open(&group, Sharing::Flat)?;
        measured.flat = Some(bench.updates(&group, &mut flat)?);
    }
    drop((trainer, group));
    bench.compare(measured);
    Ok(())
}

/// A measurement of this side, with the share of others meanwhile.
#[derive(Clone, Debug, Default)]
struct Timed {
    seconds: Vec<f64>,
    others: Option<f64>,
}

impl Timed {
    fn row(&self, name: String) -> Row {
        let times = Summary::of(self.seconds.clone(), Better::Less).unwrap_or_default();
        Row::new(name, "s", times).others(self.others)
    }
}

/// Measurements that are compared with peers at the end.
#[derive(Debug, Default)]
struct Measured {
    shared: Option<Timed>,
    flat: Option<Timed>,
    save: Option<Timed>,
}

/// Context of the parts.
struct Bench {
    steps: usize,
    sizes: Sizes,
    checkpointing: Checkpointing,
    /// The model in words.
    shape: &'static str,
    rows: Vec<TrainRow>,
    peers: Peers,
    printer: Printer,
    /// Everything that is written.
    dir: TempDir,
}

impl Bench {
    fn new(args: &TorchArgs) -> Result<Self, BenchError> {
        let path = |name: &str| {
            let value = std::env::var_os(name).filter(|value| !value.is_empty());
            value.map(PathBuf::from)
        };
        let variables = EnvironmentVariables {
            torch_python: path("SINEW_TORCH_PYTHON"),
            sinew_cache: path("SINEW_CACHE"),
            xdg_cache_home: path("XDG_CACHE_HOME"),
            home: path("HOME"),
        };
        let python = find_python(args.python.as_deref(), &variables).map_err(BenchError::input)?;
        let work = args.work.clone().unwrap_or_else(std::env::temp_dir);
        let dir = tempfile::tempdir_in(work).map_err(BenchError::input)?;
        let (config, shape) = if args.tiny {
            (shapes::tiny(), "tiny")
        } else {
            (shapes::smollm2(), "135M")
        };
        let params = Params::random(&config, 1);
        save_pretrained(&dir.path().join("model"), &params, SaveDtype::F32, &[])
            .map_err(BenchError::system)?;
        let sizes = Sizes {
            tasks: args.tasks as usize,
            samples: args.samples as usize,
            shared: args.shared as usize,
            own: args.own as usize,
        };
        let cores = || std::thread::available_parallelism().map_or(1, usize::from);
        Ok(Self {
            steps: args.steps as usize,
            sizes,
            checkpointing: if args.checkpointing {
                Checkpointing::Full
            } else {
                Checkpointing::None
            },
            shape,
            rows: sizes.rows(&config),
            peers: Peers {
                python: Some(python),
                scripts: args.peers.clone(),
                limit: Duration::from_secs(args.peer_limit),
                threads: args.threads.map_or_else(cores, |threads| threads as usize),
            },
            printer: Printer::new(args.json),
            dir,
        })
    }

    fn folder(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// One rank.
    fn start(&self) -> Result<RankGroup, BenchError> {
        let python = self.peers.python.clone().unwrap_or_default();
        let options = RankOptions {
            threads: Some(self.peers.threads),
            scratch: Some(self.dir.path().to_owned()),
            ..RankOptions::new(python, 1, self.folder("logs"))
        };
        RankGroup::start(&options).map_err(BenchError::system)
    }

    /// A trainer that has taken a step on the first task, so that it has gradients and moments.
    fn open(
        &self,
        group: &RankGroup,
        sharing: Sharing,
    ) -> Result<Trainer<TorchPolicy>, BenchError> {
        let setup = TorchSetup {
            open: OpenOptions {
                sharing,
                checkpointing: self.checkpointing,
                ..OpenOptions::new(self.folder("model"), self.sizes.flat_task() as u32)
            },
            publish: PublishOptions::new(self.folder("weights")),
            // The second owner takes over from the first.
            fence: 1 + u64::from(sharing == Sharing::Flat),
            deadlines: Deadlines::default(),
        };
        let policy = TorchPolicy::attach(group.server(), &setup).map_err(BenchError::system)?;
        let why = policy.info().why_flat.clone().unwrap_or_default();
        if sharing == Sharing::Auto && !policy.info().shared {
            return Err(BenchError::system(format!(
                "prefixes are not shared: {why}"
            )));
        }
        let config = TrainerConfig::new(self.sizes.task(), 1e-5);
        let mut trainer = Trainer::new(policy, config, clock()).map_err(BenchError::system)?;
        let first = &self.rows[..self.sizes.samples];
        trainer.step(first, &spec()).map_err(BenchError::system)?;
        Ok(trainer)
    }

    /// Repetitions of a call, with the share of others meanwhile.
    fn timed(
        &self,
        group: &RankGroup,
        mut call: impl FnMut(usize) -> Result<f64, BenchError>,
    ) -> Result<Timed, BenchError> {
        let pids = group.pids();
        let cpu = CpuTime::with_children(&pids);
        let seconds = (0..self.steps).map(&mut call);
        Ok(Timed {
            seconds: seconds.collect::<Result<_, _>>()?,
            others: CpuTime::others_beside(cpu, &pids),
        })
    }

    /// Share of the time of waves in which no rank computes.
    fn overhead(
        &self,
        group: &RankGroup,
        trainer: &mut Trainer<TorchPolicy>,
    ) -> Result<(), BenchError> {
        let rows = &self.rows[..self.sizes.samples * WAVES.min(self.sizes.tasks)];
        let packing = pack(rows, self.sizes.task()).map_err(BenchError::system)?;
        let policy = trainer.policy_mut();
        let shares = self.timed(group, |_| overhead(policy, &packing.micro_batches))?;
        let summary = Summary::of(shares.seconds, Better::Less).unwrap_or_default();
        let tokens: usize = packing.micro_batches.iter().map(|b| b.tokens.len()).sum();
        let waves = packing.micro_batches.len();
        let name = format!(
            "torch: protocol overhead, {} shape, {waves} waves of {tokens} tokens in all",
            self.shape
        );
        let row = Row::new(name, "of time", summary).others(shares.others);
        self.printer.row(&row.at_most(OVERHEAD));
        Ok(())
    }

    /// Seconds of whole updates.
    fn updates(
        &self,
        group: &RankGroup,
        trainer: &mut Trainer<TorchPolicy>,
    ) -> Result<Timed, BenchError> {
        self.timed(group, |_| {
            let start = Instant::now();
            let report = trainer
                .step(&self.rows, &spec())
                .map_err(BenchError::system)?;
            tracing::info!(tokens = report.packed_tokens, phases = ?report.seconds, "update");
            Ok(start.elapsed().as_secs_f64())
        })
    }

    /// Seconds of checkpoints until all files are written and synchronized.
    fn saves(
        &self,
        group: &RankGroup,
        trainer: &mut Trainer<TorchPolicy>,
    ) -> Result<Timed, BenchError> {
        let store = CheckpointStore::open(self.folder("checkpoints"), 1);
        let store = store.map_err(BenchError::system)?;
        let mut once = |step: usize| -> Result<f64, BenchError> {
            let mut draft = store.begin(step as u64).map_err(BenchError::system)?;
            let start = Instant::now();
            trainer
                .policy_mut()
                .save(&mut draft)
                .map_err(BenchError::system)?;
            Ok(start.elapsed().as_secs_f64())
        };
        once(0)?;
        self.timed(group, |step| once(step + 1))
    }

    /// Published weights against a write of the same bytes.
    fn publish(
        &self,
        group: &RankGroup,
        trainer: &mut Trainer<TorchPolicy>,
    ) -> Result<(), BenchError> {
        let mut plain = Vec::new();
        let mut once = |step: usize| -> Result<f64, BenchError> {
            let start = Instant::now();
            let version = PolicyVersion(step as u64);
            let written = trainer.policy_mut().weights(version);
            let seconds = start.elapsed().as_secs_f64();
            let written = written.map_err(BenchError::system)?;
            plain.push(write_again(&*written, self.dir.path())?);
            Ok(seconds)
        };
        once(0)?;
        let ours = self.timed(group, |step| once(step + 1))?;
        plain.remove(0);
        let plain = Summary::of(plain, Better::Less).unwrap_or_default();
        let row = ours.row(format!("torch: publish, {} shape, f32", self.shape));
        let row = row.against(
            "one synchronized write of the same bytes",
            plain.median,
            Better::Less,
        );
        self.printer.row(&row.target(PUBLISH));
        Ok(())
    }

    /// Runs a part of the peer.
    fn peer(&self, part: &str) -> Result<PeerResult, PeerError> {
        let checkpointing = match self.checkpointing {
            Checkpointing::None => "none",
            Checkpointing::Full | Checkpointing::Offload => "full",
        };
        let Sizes {
            tasks,
            samples,
            shared,
            own,
        } = self.sizes;
        let spec = serde_json::json!({
            "part": part, "model": self.folder("model"), "folder": self.dir.path(), "steps": self.steps,
            "tasks": tasks, "samples": samples, "shared": shared, "own": own, "batch": samples,
            "checkpointing": checkpointing,
        });
        self.peers.run(SCRIPT, &[&spec.to_string()])
    }

    /// Compares with the peers.
    fn compare(&self, measured: Measured) {
        if let (Some(shared), Some(flat)) = (measured.shared, measured.flat) {
            self.compare_updates(&shared, &flat);
        }
        if let Some(save) = measured.save {
            let row = save.row(format!("torch: save, {} shape, with moments", self.shape));
            let row = against(
                row,
                "torch.distributed.checkpoint",
                &self.peer("save"),
                |s| s,
                Better::Less,
            );
            self.printer.row(&row.target(SAVE));
        }
    }

    /// Updates with shared prefixes and with flat rows against each other and against a plain loop.
    fn compare_updates(&self, shared: &Timed, flat: &Timed) {
        let (sizes, shape) = (self.sizes, self.shape);
        let tokens = sizes.flat() as f64;
        let flat_times = Summary::of(flat.seconds.clone(), Better::Less).unwrap_or_default();
        let row = shared.row(format!("torch: shared prefixes {sizes}, {shape} shape"));
        let row = row.against("ours, sharing = flat", flat_times.median, Better::Less);
        self.printer.row(&row.target(SHARED));
        let (name, peer) = ("plain PyTorch loop, flat rows", self.peer("update"));
        let row = shared.row(format!("torch: the same update {sizes}"));
        let row = against(row, name, &peer, |s| s, Better::Less);
        self.printer.row(&row.target(PLAIN));
        let rates = flat.seconds.iter().map(|s| tokens / s).collect();
        let rates = Summary::of(rates, Better::More).unwrap_or_default();
        let row = Row::new(format!("torch: flat rows {sizes}"), "tok/s", rates);
        let row = row.others(flat.others);
        let row = against(row, name, &peer, |s| tokens / s, Better::More);
        self.printer.row(&row.target(FLAT));
    }
}

/// The loss of the bench.
fn spec() -> sinew_types::LossSpec {
    sinew_types::LossSpec::new(Surrogate::Clip {
        low: 0.2,
        high: 0.2,
        dual: None,
    })
}

/// Compares with the seconds of a peer, in the unit of the row.
fn against(
    row: Row,
    name: &str,
    peer: &Result<PeerResult, PeerError>,
    unit: impl Fn(f64) -> f64,
    better: Better,
) -> Row {
    match peer {
        Ok(found) => {
            let name = format!("{}, {name}", found.version);
            row.against(&name, unit(found.summary.median), better)
        }
        Err(why) => row.without_peer(name, why),
    }
}

/// Share of the time of forward and backward passes in which no rank computes.
fn overhead(policy: &mut TorchPolicy, batches: &[MicroBatch]) -> Result<f64, BenchError> {
    let want = OutputChoice {
        entropies: true,
        values: false,
        backward: true,
    };
    policy.zero_gradients().map_err(BenchError::system)?;
    policy.take_verb_usage();
    let start = Instant::now();
    for wave in batches.chunks(policy.lanes()) {
        let wave: Vec<&MicroBatch> = wave.iter().collect();
        let scores = policy.forward(&wave, want).map_err(BenchError::system)?;
        let slope = |scores: &sinew_train::Scores| ScoreGrads {
            logprobs: vec![-1e-4; scores.logprobs.len()],
            ..ScoreGrads::default()
        };
        let grads: Vec<ScoreGrads> = scores.iter().map(slope).collect();
        policy.backward(&wave, &grads).map_err(BenchError::system)?;
    }
    let wall = start.elapsed().as_secs_f64();
    Ok((wall - policy.take_verb_usage().server_seconds) / wall)
}

/// Seconds of writing the files of published weights once more, synchronized.
fn write_again(written: &dyn TensorSource, to: &Path) -> Result<f64, BenchError> {
    let folder = written
        .folder()
        .ok_or_else(|| BenchError::system("the weights are in no folder"))?;
    let names: BTreeSet<&str> = folder.tensors.iter().map(|t| t.file.as_str()).collect();
    let path = to.join("again");
    let mut seconds = 0.0;
    for name in names {
        let bytes = std::fs::read(folder.path.join(name)).map_err(BenchError::system)?;
        let start = Instant::now();
        let written = std::fs::File::create(&path).and_then(|mut file| {
            file.write_all(&bytes)?;
            file.sync_all()
        });
        written.map_err(BenchError::system)?;
        seconds += start.elapsed().as_secs_f64();
        std::fs::remove_file(&path).map_err(BenchError::system)?;
    }
    Ok(seconds)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_task_is_a_micro_batch() {
        let sizes = Sizes {
            tasks: 3,
            samples: 4,
            shared: 20,
            own: 5,
        };
        assert_eq!(
            (sizes.task(), sizes.flat_task(), sizes.flat()),
            (40, 100, 300)
        );
        let rows = sizes.rows(&shapes::tiny());
        let packing = pack(&rows, sizes.task()).unwrap();
        assert_eq!(packing.micro_batches.len(), 3);
        assert!(packing.micro_batches.iter().all(|b| b.items.len() == 20));
    }
}
