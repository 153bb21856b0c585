//! Commands that begin: what each needs is looked up, and checked, at its turn.

use super::{Clerk, Effect};
use crate::Category;
use crate::desk::codec::{decode, encode};
use crate::desk::folders::Folders;
use crate::desk::journal::{CheckpointRow, CommandEnd, ModelRow};
use crate::desk::orders::{TrainJob, Work};
use crate::desk::paths::{check_name, check_ttl};
use crate::desk::prepared::Kind;
use crate::desk::schedule::{LAST, Turn};
use crate::desk::types::{
    CheckpointKind, CheckpointPath, Command, ModelId, Outcome, Refusal, RequestId, Tenant,
};
use crate::random::nonce;
use sinew_types::PolicyVersion;

/// A command that cannot be carried out, as its client sees it.
pub(super) fn user_failure(refusal: &Refusal) -> Outcome {
    let category = match refusal {
        Refusal::Failed(_) => Category::Server,
        _ => Category::User,
    };
    Outcome::failed(category, refusal.to_string())
}

/// Name of a state without one: it sorts by the command that made it.
pub(super) fn state_name(name: Option<&str>, seq: u64) -> String {
    name.map_or_else(|| format!("{seq:06}"), str::to_owned)
}

impl Clerk {
    /// Begins what may begin: a command at the trainer, and requests at the engine.
    pub(super) fn pump(&mut self) -> Result<(), Refusal> {
        if self.drain.is_some() {
            return Ok(());
        }
        while let Some(turn) = self.schedule.next() {
            if let Err(refusal) = self.begin(&turn) {
                if matches!(refusal, Refusal::Failed(_)) {
                    return Err(refusal);
                }
                self.fail(&turn, user_failure(&refusal))?;
            }
        }
        while let Some(request) = self.share.next() {
            if let Err(refusal) = self.begin_sample(&request) {
                if matches!(refusal, Refusal::Failed(_)) {
                    return Err(refusal);
                }
                self.end_sample(&request, &user_failure(&refusal), 0)?;
            }
        }
        Ok(())
    }

    /// Gives a command to the trainer.
    fn begin(&mut self, turn: &Turn) -> Result<(), Refusal> {
        let row = self.model_row(&turn.model)?;
        let payload = self.payload(&turn.request)?;
        let job = if turn.kind.is_compute() {
            TrainJob::Compute { payload }
        } else {
            let command: Command = decode(&payload)?;
            self.job(&row, turn.kind, &command)?
        };
        let work = Work {
            model: turn.model.clone(),
            seq: turn.seq,
            request: turn.request.clone(),
            spec: row.spec,
            cost: turn.cost,
            epoch: self.epoch,
            job,
        };
        self.effects.push(Effect::Run(Box::new(work)));
        Ok(())
    }

    /// The trainer's part of a command that writes or reads checkpoints.
    fn job(&self, row: &ModelRow, kind: Kind, command: &Command) -> Result<TrainJob, Refusal> {
        match command {
            Command::CreateModel { .. } => Ok(TrainJob::Create),
            Command::Unload { .. } => Ok(TrainJob::Unload),
            Command::CreateFromState {
                path,
                with_optimizer,
                ..
            }
            | Command::LoadState {
                path,
                with_optimizer,
                ..
            } => self.load_job(row, path, *with_optimizer),
            Command::SaveState {
                seq,
                name,
                ttl_s,
                overwrite,
                ..
            } => {
                let name = state_name(name.as_deref(), *seq);
                let path = named(row, CheckpointKind::State, &name)?;
                check_ttl(*ttl_s)?;
                self.check_free(&path, *overwrite)?;
                self.check_room(row)?;
                let folder = new_folder(&row.model, "state")?;
                Ok(TrainJob::SaveState { folder })
            }
            Command::Refused { text, .. } => Err(Refusal::Conflict(text.clone())),
            Command::SaveExternal { name, ttl_s, .. } => {
                let path = named(row, CheckpointKind::External, name)?;
                check_ttl(*ttl_s)?;
                self.check_free(&path, false)?;
                self.check_room(row)?;
                sampler_job(row, "external")
            }
            Command::SaveForSampler {
                name,
                ttl_s,
                inflight,
                sampling_seq,
                ..
            } => {
                check_ttl(*ttl_s)?;
                self.check_sampled(row)?;
                match name {
                    Some(_) if *inflight => return Err(named_inflight()),
                    Some(name) => {
                        named(row, CheckpointKind::Sampler, name)?;
                        self.check_room(row)?;
                    }
                    None => self.check_sampler(row, *sampling_seq)?,
                }
                sampler_job(row, "sampler")
            }
            _ => Err(Refusal::Failed(format!("no such command: {}", kind.name()))),
        }
    }

    /// Finds the checkpoint that a model loads, and compares both.
    fn load_job(
        &self,
        row: &ModelRow,
        path: &str,
        with_optimizer: bool,
    ) -> Result<TrainJob, Refusal> {
        let tenant = Tenant {
            name: row.tenant.clone(),
        };
        let found = self.own_checkpoint(&tenant, path)?;
        if found.path.kind != CheckpointKind::State {
            return Err(super::submit::not_a_state(path));
        }
        self.served(&found.base_model)?;
        if !same_form(&found, row) {
            let allowed = "a checkpoint of a model with the same lora_config (rank, train_attn, train_mlp, \
                           train_unembed); create a model from the checkpoint instead";
            return Err(Refusal::invalid("path", format!("{path:?}"), allowed));
        }
        Ok(TrainJob::Load {
            folder: found.folder,
            with_optimizer,
        })
    }

    /// Refuses a name that is taken.
    fn check_free(&self, path: &CheckpointPath, overwrite: bool) -> Result<(), Refusal> {
        if !overwrite && self.parts.journal.checkpoint(path)?.is_some() {
            return Err(Refusal::Conflict(format!(
                "{path} exists: take another name, delete it, or set overwrite"
            )));
        }
        Ok(())
    }

    /// Refuses a checkpoint that would exceed the tenant's limit, as far as its size is known.
    fn check_room(&self, row: &ModelRow) -> Result<(), Refusal> {
        let (_, stored) = self.parts.journal.storage(&row.tenant)?;
        let meter = &self.meter;
        meter.admit_checkpoint(&row.tenant, stored, row.save_bytes)?;
        self.check_disk(row.save_bytes)
    }

    /// The payload of a command that waits.
    pub(crate) fn payload(&self, request: &RequestId) -> Result<Vec<u8>, Refusal> {
        let payload = self.parts.journal.payload(request)?;
        payload.ok_or_else(|| Refusal::Failed(format!("the journal has no payload of {request}")))
    }

    /// Ends a command of a model that was not given to the trainer.
    fn fail(&mut self, turn: &Turn, outcome: Outcome) -> Result<(), Refusal> {
        if let Some(mut row) = self.parts.journal.model(&turn.model)? {
            row.last_ms = self.now;
            row.next = row.next.max(next_after(turn.seq));
            self.parts.journal.put_model(&row)?;
            let result = encode(&outcome)?;
            self.end_command(&row.tenant, &turn.request, &result, true, false)?;
            self.schedule.done();
            if turn.seq == 0 {
                self.end_model(row, "it was not made")?;
            }
        } else {
            self.schedule.done();
        }
        Ok(())
    }

    /// Writes the end of a command, frees its place in the queue, and wakes those who wait.
    pub(super) fn end_command(
        &mut self,
        tenant: &str,
        request: &RequestId,
        result: &[u8],
        failed: bool,
        replay: bool,
    ) -> Result<(), Refusal> {
        let journal = &self.parts.journal;
        let before = journal.command(request)?;
        let ended = (self.last_end + 1).max(self.now.saturating_mul(1024));
        let end = CommandEnd {
            now_ms: self.now,
            ended,
            failed,
            result,
            replay,
        };
        journal.finish_command(request, &end)?;
        let after = journal.command(request)?;
        self.last_end = ended;
        if let (Some(before), Some(after)) = (before, after) {
            let freed = before.bytes as i64 - after.bytes as i64;
            let sequences = before.model.is_none().then_some(before.cost);
            self.meter.leave(tenant, freed, sequences);
        }
        self.status.done += 1;
        self.effects.push(Effect::Ring(request.to_string()));
        Ok(())
    }
}

/// The refusal of weights that have a name and change.
fn named_inflight() -> Refusal {
    let allowed = "snapshot with a path, or inflight without one";
    Refusal::invalid("kind", "\"inflight\" with a path", allowed)
}

/// The seq after a command; the end of a model has none.
pub(super) fn next_after(seq: u64) -> u64 {
    if seq == LAST { 0 } else { seq + 1 }
}

/// A path with a name that a client chose.
fn named(row: &ModelRow, kind: CheckpointKind, name: &str) -> Result<CheckpointPath, Refusal> {
    check_name(name)?;
    Ok(CheckpointPath {
        model: row.model.clone(),
        kind,
        name: name.to_owned(),
    })
}

/// Whether a checkpoint fits a model.
fn same_form(found: &CheckpointRow, row: &ModelRow) -> bool {
    match (&found.lora, &row.spec.lora) {
        (None, None) => true,
        (Some(a), Some(b)) => {
            let targets = (a.attn, a.mlp, a.unembed) == (b.attn, b.mlp, b.unembed);
            a.rank == b.rank && targets
        }
        _ => false,
    }
}

/// Name of a folder for a checkpoint of a model.
pub(super) fn new_folder(model: &ModelId, kind: &str) -> Result<String, Refusal> {
    let nonce = nonce().map_err(Refusal::Failed)?;
    Ok(Folders::name(model, kind, &nonce))
}

fn sampler_job(row: &ModelRow, kind: &str) -> Result<TrainJob, Refusal> {
    Ok(TrainJob::SaveSampler {
        folder: new_folder(&row.model, kind)?,
        version: PolicyVersion(row.saves + 1),
    })
}
