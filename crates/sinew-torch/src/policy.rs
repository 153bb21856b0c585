//! The policy whose weights are in the ranks of a server.

use crate::client::{Client, FreeDevices, SharedClient};
use crate::error::TorchError;
use crate::folder::{FolderTensors, staging};
use crate::options::{PublishForm, PublishOptions, TorchSetup, absolute};
use crate::ranks::RankGroup;
use crate::scorer::{Scoring, TorchScorer};
use crate::status::{ServerInfo, ServerStatus};
use crate::transport::ServerAddress;
use crate::usage::TorchUsage;
use crate::wire::{
    ApplyAnswer, ApplyBody, BackwardBody, Bin, LoadBody, Nothing, OpenBody, PublishAnswer,
    PublishBody, SaveAnswer, SaveBody, ScoreColumns, Verb,
};
use sinew_train::checkpoint::{CheckpointError, Draft, LoadedCheckpoint, StoredFile};
use sinew_train::optim::{Outcome, Update};
use sinew_train::pack::MicroBatch;
use sinew_train::{OutputChoice, Policy, PolicyError, RankUsage, ScoreGrads, Scores, TopTokens};
use sinew_types::{PolicyVersion, PublishedFolder, TensorSource};
use std::sync::Arc;

/// File name of the adapters, as PEFT uses it.
const ADAPTER: &str = "adapter_model.safetensors";
/// File name of the critic's head.
const CRITIC: &str = "critic.safetensors";
/// File name of whole weights without shards, and the beginning of the names of shards.
const WEIGHTS: &str = "model";
/// End of the names of files with tensors.
const TENSORS: &str = ".safetensors";
/// File name of the list of shards.
const INDEX: &str = "model.safetensors.index.json";

/// The kind of weights that is trained, as the names of a checkpoint's files show it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Trained {
    has_adapters: bool,
    has_critic: bool,
}

impl Trained {
    /// The kind of files with these names; `None` if they are none of a policy.
    fn of(names: &[String]) -> Option<Self> {
        let has = |file: &str| names.iter().any(|name| name == file);
        let has_weights = names.iter().any(|name| is_weights(name));
        let known =
            |name: &String| is_weights(name) || [ADAPTER, CRITIC, INDEX].contains(&name.as_str());
        let fits = has(ADAPTER) != has_weights && names.iter().all(known);
        fits.then(|| Self {
            has_adapters: has(ADAPTER),
            has_critic: has(CRITIC),
        })
    }

    fn words(self) -> &'static str {
        match (self.has_adapters, self.has_critic) {
            (true, true) => "adapters and a critic",
            (true, false) => "adapters",
            (false, true) => "all weights and a critic",
            (false, false) => "all weights",
        }
    }
}

/// Whether a file has whole weights: `model.safetensors` or a shard.
fn is_weights(name: &str) -> bool {
    let middle = name
        .strip_prefix(WEIGHTS)
        .and_then(|rest| rest.strip_suffix(TENSORS));
    middle.is_some_and(|middle| middle.is_empty() || middle.starts_with('-'))
}

/// Names of the files with weights: those with tensors first, by name.
fn weight_files(files: &[StoredFile]) -> Vec<String> {
    let rank = |name: &str| match name {
        CRITIC => 2,
        INDEX => 1,
        _ => 0,
    };
    let wanted = |name: &&str| is_weights(name) || [ADAPTER, CRITIC, INDEX].contains(name);
    let names = files.iter().map(|file| file.path.as_str());
    let mut names: Vec<String> = names.filter(wanted).map(str::to_owned).collect();
    names.sort_by(|a, b| rank(a).cmp(&rank(b)).then_with(|| a.cmp(b)));
    names
}

/// A model that is trained by the ranks of a server. Micro-batches of a wave are computed by one rank each.
///
/// Its calls block; it must not be made, used or dropped on a thread of an async runtime.
#[derive(Debug)]
pub struct TorchPolicy {
    scoring: Scoring,
    info: ServerInfo,
    trained: Trained,
    publish: PublishOptions,
    /// Whether scores are those of the weights under the adapters.
    is_base: bool,
    /// Items of each micro-batch of the last pass that was to be followed by a backward pass.
    ready: Option<Vec<usize>>,
    /// Version that an engine may still read.
    published: Option<PolicyVersion>,
    /// Whether recorded experts replace the choice of the model's routers.
    replays: bool,
    routers: RouterLoss,
}

/// The load-balancing loss of the model's routers.
#[derive(Debug, Default)]
struct RouterLoss {
    /// Factor in the loss; 0: it is not computed.
    coefficient: f32,
    /// Sums since the last look: of the shares of micro-batches in their packings, each times its loss, and
    /// of the shares.
    loss: f64,
    shares: f64,
}

impl RouterLoss {
    /// Share of a micro-batch in the tokens of its update.
    fn share(batch: &MicroBatch) -> f64 {
        batch.tokens.len() as f64 / batch.packed_tokens.max(1) as f64
    }

    /// Adds the loss of a micro-batch.
    fn add(&mut self, batch: &MicroBatch, loss: f32) {
        let share = Self::share(batch);
        self.loss += share * f64::from(loss);
        self.shares += share;
    }

    /// Derivative of the step's loss by that of a micro-batch.
    fn slope(&self, batch: &MicroBatch) -> f32 {
        (f64::from(self.coefficient) * Self::share(batch)) as f32
    }
}

impl TorchPolicy {
    /// Opens a model in ranks of this host, which end with the policy and its scorers.
    ///
    /// # Errors
    /// If the model cannot be loaded.
    pub fn start(group: RankGroup, setup: &TorchSetup) -> Result<Self, TorchError> {
        let server = group.server().clone();
        let TorchSetup {
            fence, deadlines, ..
        } = *setup;
        let client = Client::connect(&server, Some(Box::new(group)), fence, deadlines)?;
        Self::open(client, setup)
    }

    /// Opens a model in a server that somebody else started, and who ends it.
    ///
    /// # Errors
    /// If the server is not reached, has an owner with a higher fence, or cannot load the model.
    pub fn attach(server: &ServerAddress, setup: &TorchSetup) -> Result<Self, TorchError> {
        let client = Client::connect(server, None, setup.fence, setup.deadlines)?;
        Self::open(client, setup)
    }

    pub(crate) fn open(mut client: Client, setup: &TorchSetup) -> Result<Self, TorchError> {
        let TorchSetup { open, publish, .. } = setup;
        let has_adapters = open.lora.is_some();
        if publish.form == PublishForm::Adapter && !has_adapters {
            let text = "only adapters are to be published, and all weights are trained";
            return Err(TorchError::Setup(text.to_owned()));
        }
        let info: ServerInfo = client.call(Verb::Open, &OpenBody::of(open)?)?;
        let lanes = info.lanes.max(1) as usize;
        let replays = open.replay_routes && info.routers.is_some();
        Ok(Self {
            scoring: Scoring {
                client: SharedClient::new(client),
                lanes,
                vocabulary: info.vocabulary as usize,
            },
            info,
            trained: Trained {
                has_adapters,
                has_critic: open.critic.is_some(),
            },
            publish: publish.clone(),
            is_base: false,
            ready: None,
            published: None,
            replays,
            routers: RouterLoss {
                coefficient: open.router_loss,
                ..RouterLoss::default()
            },
        })
    }

    /// Properties of the server and its model.
    pub fn info(&self) -> &ServerInfo {
        &self.info
    }

    /// The frozen model that was opened as `name`.
    pub fn scorer(&self, name: &str) -> TorchScorer {
        TorchScorer::new(self.scoring.clone(), name.to_owned())
    }

    /// Returns seconds and memory of all calls by verb since the last look, those of scorers included.
    pub fn take_verb_usage(&mut self) -> TorchUsage {
        self.scoring.client.lock().take_usage()
    }

    /// The work of the ranks.
    ///
    /// # Errors
    /// If the server does not answer within 5 s.
    pub fn status(&self) -> Result<ServerStatus, TorchError> {
        self.scoring.client.lock().status()
    }

    /// Whether a call may succeed. If not, the server has to be started again and a checkpoint to be loaded.
    pub fn is_usable(&self) -> bool {
        self.scoring.client.lock().is_usable()
    }

    /// Uses the devices in turns with engines: the trainer leaves them after each publication, and calls
    /// `free`, which makes the engines leave, before it comes back.
    pub fn take_turns(&mut self, free: FreeDevices) {
        self.scoring.client.lock().take_turns(free);
    }

    /// Ends all ranks, also those of an attached server.
    ///
    /// # Errors
    /// If the server does not answer; ranks of this host are killed in any case.
    pub fn close(self) -> Result<(), TorchError> {
        self.scoring.client.lock().close()
    }

    fn call<B: serde::Serialize, T: serde::de::DeserializeOwned>(
        &self,
        verb: Verb,
        body: &B,
    ) -> Result<T, TorchError> {
        self.scoring.client.lock().call(verb, body)
    }

    fn model(&self) -> &'static str {
        if self.is_base { "base" } else { "policy" }
    }

    fn written(&mut self, version: PolicyVersion) -> Result<FolderTensors, TorchError> {
        let folder = staging(&self.publish.root, version, self.published)?;
        let body = PublishBody {
            folder: absolute(&folder)?,
            form: self.publish.form,
            dtype: self.publish.dtype,
            untied: self.publish.untied,
        };
        let answer: PublishAnswer = self.call(Verb::Publish, &body)?;
        let tensors = FolderTensors::open(PublishedFolder {
            path: folder,
            is_adapter: self.publish.form == PublishForm::Adapter,
            tensors: answer.tensors,
        })?;
        self.published = Some(version);
        Ok(tensors)
    }
}

/// A column of derivatives, with `items` values or none.
fn column(values: &[f32], items: usize) -> Result<Bin<'_>, PolicyError> {
    if values.is_empty() || values.len() == items {
        return Ok(Bin::of(values));
    }
    Err(PolicyError::failed(format!(
        "{} derivatives of a micro-batch with {items} items",
        values.len()
    )))
}

/// The derivatives of a micro-batch as columns; `router` is that by its load-balancing loss.
fn columns(grads: &ScoreGrads, items: usize, router: f32) -> Result<ScoreColumns<'_>, PolicyError> {
    Ok(ScoreColumns {
        router,
        logprobs: column(&grads.logprobs, items)?,
        entropies: column(&grads.entropies, items)?,
        values: column(&grads.values, items)?,
    })
}

impl Policy for TorchPolicy {
    fn lanes(&self) -> usize {
        self.scoring.lanes
    }

    fn shares_prefixes(&self) -> bool {
        self.info.shared
    }

    /// The base is a reference, whose routers choose.
    fn replays_routes(&self) -> bool {
        self.replays && !self.is_base
    }

    fn take_router_loss(&mut self) -> Option<f64> {
        let RouterLoss { loss, shares, .. } = self.routers;
        (self.routers.loss, self.routers.shares) = (0.0, 0.0);
        (self.routers.coefficient > 0.0 && shares > 0.0).then(|| loss / shares)
    }

    fn forward(
        &mut self,
        wave: &[&MicroBatch],
        want: OutputChoice,
    ) -> Result<Vec<Scores>, PolicyError> {
        self.ready = None;
        if want.values && !self.trained.has_critic {
            return Err(PolicyError::failed("there is no critic".to_owned()));
        }
        if want.backward && self.is_base {
            return Err(PolicyError::failed("the base is frozen".to_owned()));
        }
        let scored = self.scoring.forward(wave, want, self.model())?;
        let items = || wave.iter().map(|batch| batch.items.len()).collect();
        self.ready = want.backward.then(items);
        let mut all = Vec::with_capacity(scored.len());
        for (batch, (scores, router)) in wave.iter().zip(scored) {
            if want.backward {
                self.routers.add(batch, router);
            }
            all.push(scores);
        }
        Ok(all)
    }

    fn backward(&mut self, wave: &[&MicroBatch], grads: &[ScoreGrads]) -> Result<(), PolicyError> {
        let state = |text: &str| PolicyError::failed(text.to_owned());
        let ready = self.ready.as_ref();
        let items = ready
            .ok_or_else(|| state("backward without a forward pass that was to keep its state"))?;
        if items.len() != grads.len() {
            return Err(PolicyError::failed(format!(
                "derivatives of {} micro-batches, the last pass had {}",
                grads.len(),
                items.len()
            )));
        }
        if wave.len() != grads.len() {
            return Err(state("derivatives of another wave"));
        }
        let lanes = grads.iter().zip(items).zip(wave);
        let grads =
            lanes.map(|((grads, &items), batch)| columns(grads, items, self.routers.slope(batch)));
        let body = BackwardBody {
            grads: grads.collect::<Result<_, _>>()?,
        };
        let done: Result<Nothing, TorchError> = self.call(Verb::Backward, &body);
        self.ready = None;
        let Nothing {} = done?;
        Ok(())
    }

    fn top(&mut self, wave: &[&MicroBatch], k: usize) -> Result<Vec<TopTokens>, PolicyError> {
        self.ready = None;
        self.scoring.top(wave, k, self.model())
    }

    fn has_critic(&self) -> bool {
        self.trained.has_critic
    }

    fn use_base(&mut self, base: bool) -> Result<(), PolicyError> {
        if !self.trained.has_adapters {
            return Err(PolicyError::no_base());
        }
        self.is_base = base;
        self.ready = None;
        Ok(())
    }

    fn zero_gradients(&mut self) -> Result<(), PolicyError> {
        self.ready = None;
        let Nothing {} = self.call(Verb::Zero, &Nothing {})?;
        Ok(())
    }

    fn apply(&mut self, update: &Update) -> Result<Outcome, PolicyError> {
        self.ready = None;
        let body = ApplyBody {
            number: update.number,
            lr: update.lr,
            beta1: update.adamw.beta1,
            beta2: update.adamw.beta2,
            eps: update.adamw.epsilon,
            decay: update.adamw.weight_decay,
            max_grad_norm: update.max_grad_norm,
        };
        let answer: ApplyAnswer = self.call(Verb::Apply, &body)?;
        match answer {
            ApplyAnswer {
                skipped: Some(tensor),
                ..
            } => Ok(Outcome::SkippedNonFinite { tensor }),
            ApplyAnswer {
                grad_norm: Some(grad_norm),
                ..
            } => Ok(Outcome::Applied { grad_norm }),
            ApplyAnswer { .. } => Err(PolicyError::failed(
                "the torch trainer answered neither a norm nor a reason to skip".to_owned(),
            )),
        }
    }

    fn save(&mut self, draft: &mut Draft<'_>) -> Result<Vec<String>, CheckpointError> {
        self.ready = None;
        let failed = |error: TorchError| PolicyError::from(error);
        let body = SaveBody {
            folder: absolute(draft.path()).map_err(failed)?,
        };
        let written: SaveAnswer = self.call(Verb::Save, &body).map_err(failed)?;
        for file in &written.files {
            draft.adopt(file)?;
        }
        let names = weight_files(&written.files);
        if Trained::of(&names) == Some(self.trained) {
            return Ok(names);
        }
        Err(CheckpointError::Part {
            file: "weights".to_owned(),
            reason: format!(
                "the torch trainer wrote {names:?}, expected are files of {}",
                self.trained.words()
            ),
        })
    }

    fn load(
        &mut self,
        loaded: &LoadedCheckpoint,
        weights: &[String],
        updates: u64,
    ) -> Result<(), CheckpointError> {
        let own = self.trained.words();
        let Some(found) = Trained::of(weights) else {
            return Err(loaded.mismatch(format!("it holds {weights:?}, this run trains {own}")));
        };
        if found != self.trained {
            let found = found.words();
            return Err(loaded.mismatch(format!("it holds {found}, this run trains {own}")));
        }
        self.ready = None;
        let body = LoadBody {
            folder: absolute(&loaded.path).map_err(PolicyError::from)?,
            number: updates,
        };
        let done: Result<Nothing, TorchError> = self.call(Verb::Load, &body);
        let Nothing {} = done.map_err(|error| match error {
            TorchError::Input(fault) => loaded.mismatch(fault.to_string()),
            other => PolicyError::from(other).into(),
        })?;
        Ok(())
    }

    fn take_usage(&mut self) -> Option<RankUsage> {
        let usage = self.take_verb_usage();
        Some(RankUsage {
            compute_s: usage.server_seconds,
            wall_s: usage.wall_seconds,
            peak_bytes: usage.peak_bytes,
        })
    }

    /// The ranks write the weights into a folder; their tensors are read when they are asked for.
    fn weights(&mut self, version: PolicyVersion) -> Result<Arc<dyn TensorSource>, PolicyError> {
        self.ready = None;
        let written = self.written(version)?;
        self.scoring.client.lock().leave_devices()?;
        Ok(Arc::new(written))
    }
}

#[cfg(test)]
mod tests;
