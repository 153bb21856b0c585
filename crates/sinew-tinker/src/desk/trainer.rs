//! The thread that trains: carries out one command at a time, and writes live checkpoints.
//!
//! Its memory can always be made again: the live checkpoint of a model, and the commands after it
//! in the journal. So a failure of the model, or a commit of the journal that fails, only costs time: the
//! model is forgotten, and made again for its next command.

mod replay;
mod step;

use super::clerk::{Done, Line, Live, Ran};
use super::codec::encode;
use super::folders::{About, Folders, failed};
use super::orders::{Order, Orders, TrainJob, Work};
use super::residents::Residents;
use super::types::{ModelId, ModelSpec, Outcome, Refusal, Reply};
use crate::batch::BatchLimits;
use crate::random::{nonce, seed_of};
use crate::{Category, TinkerError};
use sinew_train::PolicyError;
use std::any::Any;
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Wait for orders after which models without commands are looked at.
const IDLE: Duration = Duration::from_secs(20);
/// Times that lost processes of a trainer are started again for one command.
const RESTARTS: u32 = 2;

/// Makes the models' place: at the start, and again when its processes are lost. Called on the trainer's
/// thread.
pub type MakeResidents = Box<dyn FnMut() -> Result<Box<dyn Residents>, String> + Send>;

/// Settings of the trainer's thread.
#[derive(Clone, Copy, Debug)]
pub(super) struct TrainerLimits {
    pub(super) batch: BatchLimits,
    /// A state of at most so many bytes is written after each step.
    pub(super) small_state_bytes: u64,
    /// A larger one after so many steps.
    pub(super) checkpoint_every: u64,
    /// Any after so many tokens.
    pub(super) replay_tokens: u64,
    /// Time after which a model without commands is forgotten.
    pub(super) idle: Duration,
}

/// A model in memory.
#[derive(Clone, Debug)]
struct Present {
    spec: ModelSpec,
    /// Updates of the optimizer's state.
    updates: u64,
    /// Seq after the last command that changed the weights.
    boundary: u64,
    /// Whether gradients were added since then.
    gradient: bool,
    /// Steps and tokens that no live checkpoint covers.
    steps: u64,
    tokens: u64,
    /// Bytes of the last live checkpoint.
    live_bytes: Option<u64>,
    used: Instant,
}

impl Present {
    /// A model at a boundary that a live checkpoint covers, or that is its beginning.
    fn at(spec: &ModelSpec, updates: u64, boundary: u64) -> Self {
        Self {
            spec: spec.clone(),
            updates,
            boundary,
            gradient: false,
            steps: 0,
            tokens: 0,
            live_bytes: None,
            used: Instant::now(),
        }
    }
}

/// State of the thread.
pub(super) struct Trainer {
    line: Line,
    orders: Arc<Orders>,
    make: MakeResidents,
    residents: Box<dyn Residents>,
    folders: Folders,
    limits: TrainerLimits,
    present: BTreeMap<ModelId, Present>,
    /// The epoch of the last order.
    epoch: u64,
}

/// Seed of a model's first weights.
fn seed(model: &ModelId, spec: &ModelSpec) -> u64 {
    let chosen = spec.lora.as_ref().and_then(|lora| lora.seed);
    chosen.unwrap_or_else(|| seed_of(model.as_str()))
}

/// The text of a panic.
fn panic_text(payload: &(dyn Any + Send)) -> String {
    let text = payload
        .downcast_ref::<&str>()
        .map(|text| (*text).to_owned());
    let text = text.or_else(|| payload.downcast_ref::<String>().cloned());
    text.unwrap_or_else(|| "a panic without a text".to_owned())
}

fn journal_failed(error: Refusal) -> TinkerError {
    TinkerError::Internal(error.to_string())
}

impl Trainer {
    /// Makes the models' place.
    pub(super) fn new(
        line: Line,
        orders: Arc<Orders>,
        mut make: MakeResidents,
        folders: Folders,
        limits: TrainerLimits,
    ) -> Result<Self, String> {
        let residents = make()?;
        Ok(Self {
            line,
            orders,
            make,
            residents,
            folders,
            limits,
            present: BTreeMap::new(),
            epoch: 0,
        })
    }

    /// Carries out orders until it is stopped.
    pub(super) fn run(mut self) {
        loop {
            match self.orders.next(IDLE) {
                Order::Stop => return,
                Order::ForgetAll => {
                    for model in self.residents.models() {
                        self.forget(&model);
                    }
                }
                Order::Forget(model) => self.forget(&model),
                Order::Run(work) => self.work(&work),
                Order::Drain => {
                    let saved = self.save_all();
                    self.line.report(move |clerk| clerk.drained(saved));
                }
                Order::Idle => self.rest_idle(),
            }
            self.tell_memory();
        }
    }

    /// Tells the clerk what the memory holds.
    fn tell_memory(&self) {
        let (models, bytes) = (self.residents.models().len() as u64, self.residents.bytes());
        self.line.report(move |clerk| {
            clerk.set_memory(models, bytes);
            Ok(())
        });
    }

    fn forget(&mut self, model: &ModelId) {
        self.present.remove(model);
        self.residents.leave(model);
    }

    /// Makes the place again: its processes are lost, or a panic left it in an unknown state.
    fn renew(&mut self) -> Result<(), TinkerError> {
        self.present.clear();
        self.residents = (self.make)().map_err(TinkerError::Internal)?;
        Ok(())
    }

    /// Carries out a command, reports its result, and writes a live checkpoint if one is due.
    fn work(&mut self, work: &Work) {
        self.epoch = work.epoch;
        let mut restarts = 0;
        let outcome = loop {
            match self.attempt(work) {
                Err(TinkerError::Policy(PolicyError::Lost(why))) if restarts < RESTARTS => {
                    restarts += 1;
                    tracing::warn!(%why, "the trainer is started again");
                    if let Err(error) = self.renew() {
                        break Err(error);
                    }
                }
                other => break other,
            }
        };
        if let Err(error) = &outcome
            && error.category() == Category::Server
        {
            tracing::error!(model = %work.model, request = %work.request, %error, "a command failed");
            self.forget(&work.model);
        }
        self.report(work, outcome);
        self.cover_if_due(&work.model);
    }

    /// Carries out a command. A panic becomes an error.
    fn attempt(&mut self, work: &Work) -> Result<Ran, TinkerError> {
        let ran = catch_unwind(AssertUnwindSafe(|| self.carry_out(work)));
        ran.unwrap_or_else(|payload| {
            let text = panic_text(&*payload);
            // Nothing in memory can be trusted.
            self.renew()?;
            Err(TinkerError::Internal(format!(
                "the trainer panicked: {text}"
            )))
        })
    }

    fn report(&self, work: &Work, outcome: Result<Ran, TinkerError>) {
        let done = Done {
            model: work.model.clone(),
            seq: work.seq,
            request: work.request.clone(),
            epoch: work.epoch,
            outcome,
        };
        self.line.report(move |clerk| clerk.ran(done));
    }

    fn carry_out(&mut self, work: &Work) -> Result<Ran, TinkerError> {
        match &work.job {
            TrainJob::Create => {
                self.enter(&work.model, &work.spec)?;
                self.residents.restart()?;
                self.residents.policy()?.zero_gradients()?;
                self.residents.rest();
                let present = Present::at(&work.spec, 0, 1);
                self.present.insert(work.model.clone(), present);
                Ok(Ran::Created)
            }
            TrainJob::Load {
                folder,
                with_optimizer,
            } => self.load(work, folder, *with_optimizer),
            TrainJob::Compute { payload } => {
                self.ready(&work.model, &work.spec)?;
                self.compute(&work.model, payload, work.cost)
            }
            TrainJob::SaveState { folder } => {
                self.ready(&work.model, &work.spec)?;
                let bytes = self.write_state(&work.model, folder)?;
                Ok(saved(folder, bytes))
            }
            TrainJob::SaveSampler { folder, version } => {
                self.ready(&work.model, &work.spec)?;
                let about = About::new(&work.spec.base_model, work.spec.lora, 0);
                let residents = &mut self.residents;
                let bytes = self.folders.write(folder, about, |draft, about| {
                    let exported = residents.export(draft, *version)?;
                    about.weights = exported.files;
                    about.alpha = exported.alpha;
                    Ok(())
                })?;
                Ok(saved(folder, bytes))
            }
            TrainJob::Unload => {
                self.forget(&work.model);
                Ok(Ran::Unloaded)
            }
        }
    }

    /// Makes a model the current one, and makes room for it. Returns whether it is as it left.
    fn enter(&mut self, model: &ModelId, spec: &ModelSpec) -> Result<bool, TinkerError> {
        loop {
            let held = self.residents.models();
            if held.contains(model) || held.len() < self.residents.capacity() {
                break;
            }
            let used = |model: &ModelId| self.present.get(model).map(|present| present.used);
            let Some(oldest) = held.into_iter().min_by_key(used) else {
                break;
            };
            self.rest(&oldest);
        }
        let seed = seed(model, spec);
        if !self.present.contains_key(model) {
            // One that is only half made is made from its beginning.
            self.residents.leave(model);
        }
        let kept = self.residents.enter(model, spec, seed)?;
        match self.present.get_mut(model) {
            Some(present) if kept => present.used = Instant::now(),
            _ => {
                self.present.remove(model);
            }
        }
        Ok(kept)
    }

    /// Replaces a model's weights by those of a checkpoint, which a live checkpoint covers at once.
    fn load(
        &mut self,
        work: &Work,
        folder: &str,
        with_optimizer: bool,
    ) -> Result<Ran, TinkerError> {
        let (loaded, about) = self.folders.read(folder)?;
        self.enter(&work.model, &work.spec)?;
        let updates = if with_optimizer { about.updates } else { 0 };
        let policy = self.residents.policy()?;
        // Weights and optimizer change together, so a failure before the end makes the model unusable.
        self.present.remove(&work.model);
        let restored = policy.load(&loaded, &about.weights, updates);
        restored.map_err(failed)?;
        policy.zero_gradients()?;
        self.residents.rest();
        let present = Present::at(&work.spec, updates, work.seq + 1);
        self.present.insert(work.model.clone(), present);
        let live = self.write_live(&work.model)?;
        Ok(Ran::Loaded { live })
    }

    /// Writes weights and optimizer state of the current model.
    fn write_state(&mut self, model: &ModelId, folder: &str) -> Result<u64, TinkerError> {
        let Some(present) = self.present.get(model) else {
            return Err(TinkerError::Internal(format!("{model} is not in memory")));
        };
        let about = About::new(&present.spec.base_model, present.spec.lora, present.updates);
        let policy = self.residents.policy()?;
        self.folders.write(folder, about, |draft, about| {
            about.weights = policy.save(draft).map_err(failed)?;
            Ok(())
        })
    }

    /// Writes the live checkpoint of the current model.
    fn write_live(&mut self, model: &ModelId) -> Result<Live, TinkerError> {
        let folder = Folders::name(model, "live", &nonce().map_err(TinkerError::Internal)?);
        let bytes = self.write_state(model, &folder)?;
        let Some(present) = self.present.get_mut(model) else {
            return Err(TinkerError::Internal(format!("{model} is not in memory")));
        };
        (present.steps, present.tokens) = (0, 0);
        present.live_bytes = Some(bytes);
        Ok(Live {
            folder,
            bytes,
            covered: present.boundary,
        })
    }

    /// Writes a live checkpoint and tells the clerk. A failure only makes a replay longer.
    fn cover(&mut self, model: &ModelId) -> Result<(), TinkerError> {
        let live = self.write_live(model)?;
        let (model, epoch) = (model.clone(), self.epoch);
        self.line
            .report(move |clerk| clerk.covered(&model, live, epoch));
        Ok(())
    }

    fn cover_if_due(&mut self, model: &ModelId) {
        let Some(present) = self.present.get(model) else {
            return;
        };
        let limits = &self.limits;
        let small = present
            .live_bytes
            .is_none_or(|bytes| bytes <= limits.small_state_bytes);
        let many = present.steps >= limits.checkpoint_every;
        let long = present.tokens >= limits.replay_tokens;
        let due = present.steps > 0 && !present.gradient && (small || many || long);
        if due && let Err(error) = self.cover(model) {
            tracing::warn!(%model, %error, "the live checkpoint was not written");
        }
    }

    /// Writes the state of a model that is not in a live checkpoint.
    fn save(&mut self, model: &ModelId) -> Result<(), TinkerError> {
        let Some(present) = self.present.get(model).cloned() else {
            return Ok(());
        };
        if present.steps == 0 {
            return Ok(());
        }
        let seed = seed(model, &present.spec);
        if !self.residents.enter(model, &present.spec, seed)? {
            return Err(TinkerError::Internal(format!("{model} left the memory")));
        }
        self.cover(model)
    }

    /// Writes the state of a model and forgets it. What cannot be written is computed again later.
    fn rest(&mut self, model: &ModelId) {
        if let Err(error) = self.save(model) {
            tracing::warn!(%model, %error, "the live checkpoint was not written");
        }
        self.forget(model);
    }

    fn rest_idle(&mut self) {
        let idle = self.limits.idle;
        let idle = self
            .present
            .iter()
            .filter(|(_, present)| present.used.elapsed() >= idle)
            .map(|(model, _)| model.clone());
        for model in idle.collect::<Vec<_>>() {
            self.rest(&model);
        }
    }

    /// Writes the state of all models. Returns the first failure, in words.
    fn save_all(&mut self) -> Result<(), String> {
        let models: Vec<ModelId> = self.present.keys().cloned().collect();
        let mut result = Ok(());
        for model in models {
            if let Err(error) = self.save(&model) {
                result = result.and(Err(format!("{model}: {error}")));
            }
        }
        result
    }
}

fn saved(folder: &str, bytes: u64) -> Ran {
    Ran::Saved {
        folder: folder.to_owned(),
        bytes,
    }
}

/// A reply as the journal keeps it.
fn encoded(reply: Reply) -> Result<Vec<u8>, TinkerError> {
    encode(&Outcome::Value(reply)).map_err(journal_failed)
}
