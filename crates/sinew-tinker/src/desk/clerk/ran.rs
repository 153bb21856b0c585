//! Results of the trainer: each is written together with what it changes.

use super::dispatch::{next_after, state_name, user_failure};
use super::{Clerk, Effect};
use crate::desk::codec::{decode, encode};
use crate::desk::journal::{CheckpointRow, ModelRow, ReplayRow, SamplerRow};
use crate::desk::prepared::Kind;
use crate::desk::quota::day;
use crate::desk::schedule::LAST;
use crate::desk::types::{
    CheckpointKind, CheckpointPath, Command, Metadata, ModelId, Outcome, Refusal, Reply, RequestId,
    SamplerId,
};
use crate::{Category, TinkerError};

/// Name of the weights that a model's inflight samplers share.
pub(super) const INFLIGHT: &str = ".inflight";

/// A live checkpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Live {
    /// Its folder.
    pub(crate) folder: String,
    /// Its size.
    pub(crate) bytes: u64,
    /// It holds the effects of commands below this seq.
    pub(crate) covered: u64,
}

/// An order that the trainer carried out.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Ran {
    /// The model has its first weights.
    Created,
    /// The model has the weights of a checkpoint, which a live checkpoint holds.
    Loaded {
        /// That checkpoint.
        live: Live,
    },
    /// A loss was computed: the outcome, encoded.
    Output(Vec<u8>),
    /// An update was applied: the outcome, encoded.
    Stepped(Vec<u8>),
    /// A checkpoint was written into the folder of the order.
    Saved {
        /// Its folder.
        folder: String,
        /// Its size.
        bytes: u64,
    },
    /// The model is forgotten.
    Unloaded,
}

/// The end of a command at the trainer.
#[derive(Debug)]
pub(crate) struct Done {
    pub(crate) model: ModelId,
    pub(crate) seq: u64,
    pub(crate) request: RequestId,
    /// The epoch of the order.
    pub(crate) epoch: u64,
    pub(crate) outcome: Result<Ran, TinkerError>,
}

impl Done {
    /// Folder that the command wrote.
    fn folder(self) -> Option<String> {
        match self.outcome {
            Ok(Ran::Saved { folder, .. }) => Some(folder),
            Ok(Ran::Loaded { live }) => Some(live.folder),
            _ => None,
        }
    }
}

/// From which the trainer makes a model again.
#[derive(Debug)]
pub(crate) struct ReplayPlan {
    /// Folder of the live checkpoint; `None`: the model begins anew.
    pub(crate) live: Option<String>,
    pub(crate) live_bytes: u64,
    pub(crate) covered: u64,
    /// Commands after it, in order.
    pub(crate) commands: Vec<ReplayRow>,
}

/// A checkpoint that was written.
struct Saved {
    folder: String,
    bytes: u64,
}

impl Clerk {
    /// From which a model is made again.
    pub(crate) fn replay_plan(&self, model: &ModelId) -> Result<ReplayPlan, Refusal> {
        let row = self.model_row(model)?;
        Ok(ReplayPlan {
            live: row.live,
            live_bytes: row.live_bytes,
            covered: row.covered.max(1),
            commands: self.parts.journal.replay(model)?,
        })
    }

    /// Writes the end of a command.
    pub(crate) fn ran(&mut self, done: Done) -> Result<(), Refusal> {
        if done.epoch != self.epoch {
            // The command runs again.
            self.effects.extend(done.folder().map(Effect::Remove));
            return Ok(());
        }
        let mut row = self.model_row(&done.model)?;
        let command = self.parts.journal.command(&done.request)?;
        let command = command.filter(|command| command.done_ms.is_none());
        let Some(command) = command else {
            // Its model ended while it ran.
            self.effects.extend(done.folder().map(Effect::Remove));
            self.schedule.done();
            return Ok(());
        };
        let kind = Kind::parse(&command.kind)?;
        row.last_ms = self.now;
        row.next = row.next.max(next_after(done.seq));
        let tenant = row.tenant.clone();
        let (result, failed, replay) = match &done.outcome {
            Ok(ran) => self.keep(&mut row, &done, kind, ran)?,
            Err(error) => (encode(&Outcome::from(error))?, true, false),
        };
        let broken = |error: &TinkerError| error.category() == Category::Server;
        row.corrupted = done.outcome.as_ref().is_err_and(broken);
        self.parts.journal.put_model(&row)?;
        self.end_command(&tenant, &done.request, &result, failed, replay)?;
        if matches!(kind, Kind::Forward | Kind::ForwardBackward) {
            self.spend(&tenant, command.cost)?;
        }
        self.schedule.done();
        if failed && done.seq == 0 {
            self.end_model(row, "it was not made")?;
        } else if done.seq == LAST {
            self.end_model(row, "it was unloaded")?;
        }
        Ok(())
    }

    /// Counts computed tokens of a tenant.
    pub(super) fn spend(&mut self, tenant: &str, tokens: u64) -> Result<(), Refusal> {
        if tokens > 0 {
            self.parts
                .journal
                .add_tokens(tenant, day(self.now), tokens)?;
            self.meter.spend(tenant, tokens, self.now);
        }
        Ok(())
    }

    /// Writes what a command changed. Returns its outcome, encoded, whether it failed, and whether the change
    /// is only in memory.
    fn keep(
        &mut self,
        row: &mut ModelRow,
        done: &Done,
        kind: Kind,
        ran: &Ran,
    ) -> Result<(Vec<u8>, bool, bool), Refusal> {
        let (request, seq) = (&done.request, done.seq);
        let kept = |reply: Reply| encode(&Outcome::Value(reply));
        match ran {
            Ran::Created => {
                row.covered = 1;
                let model = row.model.clone();
                Ok((kept(Reply::CreateModel { model })?, false, false))
            }
            Ran::Loaded { live } => {
                self.set_live(row, live.clone())?;
                let reply = self.loaded(row, request)?;
                Ok((kept(reply)?, false, false))
            }
            Ran::Output(result) => Ok((result.clone(), false, kind.is_replayed())),
            Ran::Stepped(result) => {
                row.steps += 1;
                Ok((result.clone(), false, kind.is_replayed()))
            }
            Ran::Saved { folder, bytes } => {
                let command: Command = decode(&self.payload(request)?)?;
                let saved = Saved {
                    folder: folder.clone(),
                    bytes: *bytes,
                };
                match self.keep_checkpoint(row, seq, command, saved)? {
                    Ok(reply) => Ok((kept(reply)?, false, false)),
                    Err(outcome) => Ok((encode(&outcome)?, true, false)),
                }
            }
            Ran::Unloaded => {
                let model = row.model.clone();
                Ok((kept(Reply::Unload { model })?, false, false))
            }
        }
    }

    /// The reply to a command that loaded a checkpoint.
    fn loaded(&self, row: &ModelRow, request: &RequestId) -> Result<Reply, Refusal> {
        match decode::<Command>(&self.payload(request)?)? {
            Command::CreateFromState { path, .. } | Command::LoadState { path, .. } => {
                let model = row.model.clone();
                Ok(Reply::LoadState { path, model })
            }
            _ => Err(Refusal::Failed(format!("{request} loads nothing"))),
        }
    }

    /// Takes over a live checkpoint: what it covers is not needed any more.
    fn set_live(&mut self, row: &mut ModelRow, live: Live) -> Result<(), Refusal> {
        self.parts.journal.drop_covered(&row.model, live.covered)?;
        if let Some(old) = row.live.replace(live.folder) {
            self.effects.push(Effect::Remove(old));
        }
        row.live_bytes = live.bytes;
        row.covered = live.covered;
        Ok(())
    }

    /// Writes that a live checkpoint covers commands.
    pub(crate) fn covered(
        &mut self,
        model: &ModelId,
        live: Live,
        epoch: u64,
    ) -> Result<(), Refusal> {
        let known = epoch == self.epoch;
        match self.parts.journal.model(model)? {
            Some(mut row) if known && row.ended.is_none() && live.covered >= row.covered => {
                self.set_live(&mut row, live)?;
                self.parts.journal.put_model(&row)?;
            }
            _ => self.effects.push(Effect::Remove(live.folder)),
        }
        Ok(())
    }

    /// Writes the row of a checkpoint. The inner error is the outcome of a command whose checkpoint is too
    /// large for its tenant.
    fn keep_checkpoint(
        &mut self,
        row: &mut ModelRow,
        seq: u64,
        command: Command,
        saved: Saved,
    ) -> Result<Result<Reply, Outcome>, Refusal> {
        let form = match command {
            Command::SaveState {
                name,
                ttl_s,
                metadata,
                ..
            } => {
                let name = state_name(name.as_deref(), seq);
                let kind = CheckpointKind::State;
                Form::new(kind, name, ttl_s, metadata)
            }
            Command::SaveExternal { name, ttl_s, .. } => {
                Form::new(CheckpointKind::External, name, ttl_s, Metadata::new())
            }
            Command::SaveForSampler {
                name,
                ttl_s,
                metadata,
                inflight,
                sampling_seq,
                ..
            } => {
                let unnamed = name.is_none();
                let name = match name {
                    Some(name) => name,
                    None if inflight => INFLIGHT.to_owned(),
                    None => format!(".snapshot-{}", row.saves + 1),
                };
                let form = Form::new(CheckpointKind::Sampler, name, ttl_s, metadata);
                let sampler = unnamed.then_some(sampling_seq).flatten();
                Form { sampler, ..form }
            }
            _ => return Err(Refusal::Failed("the command saves nothing".to_owned())),
        };
        let named = form.sampler.is_none();
        if let Some(outcome) = self.too_large(row, named, &saved)? {
            self.effects.push(Effect::Remove(saved.folder));
            return Ok(Err(outcome));
        }
        row.save_bytes = row.save_bytes.max(saved.bytes);
        if form.kind != CheckpointKind::State {
            row.saves += 1;
        }
        let path = self.put_checkpoint(row, &form, &saved)?;
        let reply = match form.kind {
            CheckpointKind::State => Reply::SaveState {
                path: path.to_string(),
            },
            CheckpointKind::External => Reply::SaveExternal {
                path: path.to_string(),
                bytes: saved.bytes,
            },
            CheckpointKind::Sampler => self.put_sampler(row, &form, &path)?,
        };
        Ok(Ok(reply))
    }

    /// The outcome of a checkpoint that exceeds the tenant's limit.
    fn too_large(
        &self,
        row: &ModelRow,
        named: bool,
        saved: &Saved,
    ) -> Result<Option<Outcome>, Refusal> {
        if !named {
            return Ok(None);
        }
        let (_, stored) = self.parts.journal.storage(&row.tenant)?;
        let admitted = self
            .meter
            .admit_checkpoint(&row.tenant, stored, saved.bytes);
        Ok(admitted.err().map(|refusal| user_failure(&refusal)))
    }

    /// Writes a checkpoint's row, in place of one with the same path.
    fn put_checkpoint(
        &mut self,
        row: &ModelRow,
        form: &Form,
        saved: &Saved,
    ) -> Result<CheckpointPath, Refusal> {
        let path = CheckpointPath {
            model: row.model.clone(),
            kind: form.kind,
            name: form.name.clone(),
        };
        let old = self.parts.journal.checkpoint(&path)?;
        let new = CheckpointRow {
            path: path.clone(),
            tenant: row.tenant.clone(),
            named: form.sampler.is_none(),
            folder: saved.folder.clone(),
            bytes: saved.bytes,
            created_ms: self.now,
            used_ms: self.now,
            expires_ms: self.expiry(form.ttl_s),
            base_model: row.spec.base_model.clone(),
            lora: row.spec.lora,
            metadata: form.metadata.clone(),
            version: match form.kind {
                CheckpointKind::State => row.steps,
                _ => row.saves,
            },
        };
        self.parts.journal.put_checkpoint(&new)?;
        self.publish_inflight(&new)?;
        if let Some(old) = old {
            self.retire(&old, form.name == INFLIGHT);
        }
        Ok(path)
    }

    /// The files of a checkpoint are not needed any more. Requests of an inflight sampler continue with the
    /// newest weights, so that its adapter stays at the engine.
    pub(super) fn retire(&mut self, old: &CheckpointRow, stays_loaded: bool) {
        if old.path.kind != CheckpointKind::External && !stays_loaded {
            self.effects.push(Effect::Ground(old.folder.clone()));
        }
        self.effects.push(Effect::Remove(old.folder.clone()));
    }

    /// Makes the sampling session of weights without a name, and lets old ones go.
    fn put_sampler(
        &mut self,
        row: &ModelRow,
        form: &Form,
        path: &CheckpointPath,
    ) -> Result<Reply, Refusal> {
        let Some(seq) = form.sampler else {
            return Ok(Reply::SaveForSampler {
                path: Some(path.to_string()),
                sampler: None,
            });
        };
        let sampler = SamplerId::of(&row.session, seq);
        self.parts.journal.insert_sampler(&SamplerRow {
            sampler: sampler.clone(),
            session: row.session.clone(),
            tenant: row.tenant.clone(),
            created_ms: self.now,
            base_model: row.spec.base_model.clone(),
            path: Some(path.to_string()),
            clients: 0,
        })?;
        self.trim_snapshots(&row.model)?;
        Ok(Reply::SaveForSampler {
            path: None,
            sampler: Some(sampler),
        })
    }

    /// Drops the snapshots that were used longest ago, beyond the limit. Those that requests wait for stay.
    fn trim_snapshots(&mut self, model: &ModelId) -> Result<(), Refusal> {
        let mut snapshots = self.parts.journal.snapshots(model)?;
        snapshots.retain(|snapshot| snapshot.path.name != INFLIGHT);
        let mut beyond = (snapshots.len() as u64).saturating_sub(self.parts.limits.snapshots);
        for snapshot in snapshots {
            let journal = &self.parts.journal;
            if beyond == 0 || journal.is_sampled(&snapshot.path.to_string())? {
                continue;
            }
            journal.delete_checkpoint(&snapshot.path)?;
            self.retire(&snapshot, false);
            beyond -= 1;
        }
        Ok(())
    }

    /// Ends a model: its commands that wait or run fail, its state leaves memory and disk. Checkpoints with
    /// names stay.
    pub(super) fn end_model(&mut self, mut row: ModelRow, why: &str) -> Result<(), Refusal> {
        if row.ended.is_some() {
            return Ok(());
        }
        row.ended = Some(why.to_owned());
        let live = row.live.take();
        row.live_bytes = 0;
        self.parts.journal.put_model(&row)?;
        self.parts.journal.drop_covered(&row.model, u64::MAX)?;
        let text = format!("{} takes no commands: {why}", row.model);
        let result = encode(&Outcome::failed(Category::User, text))?;
        for snapshot in self.parts.journal.snapshots(&row.model)? {
            self.parts.journal.delete_checkpoint(&snapshot.path)?;
            self.retire(&snapshot, false);
        }
        let runs = self.schedule.running(&row.model);
        for request in self.schedule.remove(&row.model).into_iter().chain(runs) {
            self.end_command(&row.tenant, &request, &result, true, false)?;
        }
        self.meter.drop_model(&row.tenant);
        self.status.models = self.status.models.saturating_sub(1);
        if let Some(live) = live {
            self.effects.push(Effect::Remove(live));
        }
        self.effects.push(Effect::Forget(row.model));
        Ok(())
    }
}

/// A client's wish with a checkpoint.
struct Form {
    kind: CheckpointKind,
    name: String,
    ttl_s: Option<u64>,
    metadata: Metadata,
    /// Number of the sampling session of weights without a name.
    sampler: Option<u64>,
}

impl Form {
    fn new(kind: CheckpointKind, name: String, ttl_s: Option<u64>, metadata: Metadata) -> Self {
        Self {
            kind,
            name,
            ttl_s,
            metadata,
            sampler: None,
        }
    }
}
