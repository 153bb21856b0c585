//! A desk on a tiny decoder and a fake engine, and deaths at any commit.

use super::journal::Journal;
use super::residents::{Embedded, EmbeddedConfig, Residents, Switched, SwitchedConfig};
use super::running::{DeskConfig, DeskParts, RunningDesk};
use super::trainer::MakeResidents;
use super::types::{
    AdamParams, Command, LoraSpec, Metadata, ModelId, ModelSpec, NewSession, Outcome, Refusal,
    Reply, RequestId, Retrieved, SessionId, Tenant,
};
use super::{Desk, DeskLimits, TrainerSupport, WallClock};
use crate::{Datum, LossRequest, Tensor};
use sinew_infer::{FakeConfig, FakeEngine, FakeModel};
use sinew_model::{Keep, ModelFiles, Params, load_model};
use sinew_tensor::{Cpu, KernelSet};
use sinew_train::ModelPolicy;
use sinew_types::{Engine, TokenId};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

/// Number of token ids of the tiny decoder.
pub(super) const VOCAB: usize = 97;
/// Its longest sequence here.
pub(super) const CONTEXT: usize = 64;
/// Name of the base model.
pub(super) const BASE: &str = "tiny";

/// The end of a process at a commit: before it, or after it and before anybody is told.
#[derive(Debug)]
pub(super) struct Death {
    at: u64,
    keep: bool,
    commits: AtomicU64,
    is_dead: AtomicBool,
}

impl Death {
    /// At the commit numbered `at`, from 1; `keep`: the commit is on disk.
    pub(super) fn at(at: u64, keep: bool) -> Arc<Self> {
        Arc::new(Self {
            at,
            keep,
            commits: AtomicU64::new(0),
            is_dead: AtomicBool::new(false),
        })
    }

    /// Counts a commit. Whether it must not happen.
    pub(super) fn before_commit(&self) -> bool {
        if self.is_dead() {
            return true;
        }
        let number = self.commits.fetch_add(1, Ordering::SeqCst) + 1;
        if number == self.at {
            self.is_dead.store(true, Ordering::SeqCst);
            return !self.keep;
        }
        false
    }

    pub(super) fn is_dead(&self) -> bool {
        self.is_dead.load(Ordering::SeqCst)
    }

    pub(super) fn commits(&self) -> u64 {
        self.commits.load(Ordering::SeqCst)
    }
}

fn device() -> Cpu {
    Cpu::new(KernelSet::detect_f32(), 1)
}

fn params() -> Params {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../sinew-model/tests/golden/llama");
    load_model(&ModelFiles::Dir(folder)).unwrap().params
}

/// Models on one base, at most `capacity` in memory.
pub(super) fn embedded(capacity: usize) -> MakeResidents {
    Box::new(move || {
        let config = EmbeddedConfig {
            base_name: BASE.to_owned(),
            context: CONTEXT,
            keep: Keep::All,
            lora_alpha: 32.0,
            capacity,
        };
        let embedded = Embedded::new(Arc::new(params()), config, device());
        Ok(Box::new(embedded) as Box<dyn Residents>)
    })
}

/// One place for models that train all weights.
pub(super) fn switched(first: &Path) -> MakeResidents {
    let first = first.join("first");
    Box::new(move || {
        let policy = ModelPolicy::full(params(), CONTEXT, Keep::All, device());
        let policy = policy.map_err(|e| e.to_string())?;
        let config = SwitchedConfig {
            first: first.clone(),
            side_files: Vec::new(),
            alpha: None,
        };
        let place = Switched::new(policy, config).map_err(|e| e.to_string())?;
        Ok(Box::new(place) as Box<dyn Residents>)
    })
}

/// A fake engine that takes `adapters` at once.
pub(super) fn engine(adapters: usize) -> Arc<dyn Engine> {
    let config = FakeConfig {
        model: FakeModel {
            vocab: VOCAB,
            seed: 5,
            end: None,
        },
        context: CONTEXT,
        max_adapters: adapters,
        ..FakeConfig::default()
    };
    Arc::new(FakeEngine::threaded(config, Box::new(|| 0.0)).unwrap())
}

/// Settings of a desk in `state`.
pub(super) fn config(state: &Path) -> DeskConfig {
    DeskConfig {
        state: state.to_owned(),
        limits: DeskLimits::default(),
        tenants: Vec::new(),
        served: vec![super::types::ServedModel {
            name: BASE.to_owned(),
            max_context: CONTEXT,
            trainable: true,
            sampleable: true,
            tokenizer: None,
            arch: "llama".to_owned(),
        }],
        vocab: VOCAB,
        stop_ids: Vec::new(),
        support: Embedded::support(),
        samples_adapters: true,
    }
}

/// Support of a [`switched`] place.
pub(super) fn switched_support() -> TrainerSupport {
    TrainerSupport {
        lora: super::LoraSupport::None,
        full: true,
        switches: true,
    }
}

/// A clock that a test sets.
pub(super) fn set_clock(time: &Arc<AtomicU64>) -> WallClock {
    let time = Arc::clone(time);
    Arc::new(move || time.load(Ordering::SeqCst))
}

/// A desk, and a client of it.
pub(super) struct Bench {
    runtime: tokio::runtime::Runtime,
    pub(super) desk: Desk,
    running: Option<RunningDesk>,
    pub(super) tenant: Tenant,
}

impl Bench {
    /// Opens a desk; with a death, it ends at that commit.
    pub(super) fn open(
        config: DeskConfig,
        residents: MakeResidents,
        clock: WallClock,
        death: Option<&Arc<Death>>,
    ) -> Self {
        let mut journal = Journal::open(&config.state).unwrap();
        journal.death = death.map(Arc::clone);
        let parts = DeskParts {
            residents,
            engine: engine(config.limits.loaded_adapters),
            full_engines: None,
            clock,
        };
        let (desk, running) = Desk::open_with(config, parts, journal).unwrap();
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap();
        Self {
            runtime,
            desk,
            running: Some(running),
            tenant: Tenant {
                name: "ann".to_owned(),
            },
        }
    }

    /// A desk on one base in memory, with default settings.
    pub(super) fn simple(state: &Path) -> Self {
        let clock = super::wall_clock();
        Self::open(config(state), embedded(8), clock, None)
    }

    /// Ends the desk as a kill would.
    pub(super) fn kill(mut self) {
        self.running = None;
    }

    /// Waits for a call of the desk.
    pub(super) fn wait<T>(&self, call: impl Future<Output = T>) -> T {
        self.runtime.block_on(call)
    }

    pub(super) fn session(&self) -> Result<SessionId, Refusal> {
        self.wait(
            self.desk
                .create_session(&self.tenant, NewSession::default()),
        )
    }

    pub(super) fn submit(&self, command: Command) -> Result<RequestId, Refusal> {
        self.wait(self.desk.submit(&self.tenant, command))
    }

    /// The outcome of a future, within a minute.
    pub(super) fn outcome(&self, id: &RequestId) -> Result<Outcome, Refusal> {
        for _ in 0..60 {
            let second = Duration::from_secs(1);
            match self.wait(self.desk.retrieve(&self.tenant, id, second))? {
                Retrieved::Done(outcome) => return Ok(outcome),
                Retrieved::Pending { .. } => {}
            }
        }
        panic!("{id} has no result after a minute");
    }

    /// Submits a command and waits for its outcome.
    pub(super) fn run(&self, command: Command) -> Result<Outcome, Refusal> {
        let id = self.submit(command)?;
        self.outcome(&id)
    }

    /// Submits a command that succeeds.
    pub(super) fn reply(&self, command: Command) -> Reply {
        match self.run(command).unwrap() {
            Outcome::Value(reply) => reply,
            Outcome::Failed { text, .. } => panic!("{text}"),
        }
    }

    /// Submits a command that fails, and returns the reason.
    pub(super) fn failure(&self, command: Command) -> String {
        match self.run(command).unwrap() {
            Outcome::Failed { text, .. } => text,
            Outcome::Value(reply) => panic!("{reply:?}"),
        }
    }
}

/// Adapters everywhere, with a seed.
pub(super) fn lora(rank: u32) -> LoraSpec {
    LoraSpec {
        rank,
        seed: Some(11),
        unembed: true,
        mlp: true,
        attn: true,
    }
}

pub(super) fn create(session: &SessionId, seq: u64, lora: Option<LoraSpec>) -> Command {
    Command::CreateModel {
        session: session.clone(),
        seq,
        spec: ModelSpec {
            base_model: BASE.to_owned(),
            lora,
            metadata: Metadata::new(),
        },
    }
}

/// A loss on tokens that follow from `salt`.
pub(super) fn forward_backward(model: &ModelId, seq: u64, salt: u32) -> Command {
    let tokens: Vec<TokenId> = (0..12).map(|i| 3 + (i * 7 + salt * 5) % 90).collect();
    let targets = tokens.iter().skip(1).map(|id| i64::from(*id));
    let targets: Vec<i64> = targets.chain([4]).collect();
    let inputs = BTreeMap::from([
        ("target_tokens".to_owned(), Tensor::integers(targets)),
        ("weights".to_owned(), Tensor::floats(vec![0.5; 12])),
    ]);
    Command::ForwardBackward {
        model: model.clone(),
        seq,
        data: vec![Datum { tokens, inputs }],
        loss: LossRequest {
            name: "cross_entropy".to_owned(),
            config: BTreeMap::new(),
        },
        forward_only: false,
    }
}

pub(super) fn step(model: &ModelId, seq: u64) -> Command {
    Command::OptimStep {
        model: model.clone(),
        seq,
        adam: AdamParams {
            learning_rate: 0.01,
            ..AdamParams::default()
        },
    }
}

pub(super) fn save(model: &ModelId, seq: u64, name: &str) -> Command {
    Command::SaveState {
        model: model.clone(),
        seq,
        name: Some(name.to_owned()),
        ttl_s: None,
        overwrite: false,
        metadata: Metadata::new(),
    }
}
