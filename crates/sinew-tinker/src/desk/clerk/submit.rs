//! Commands that arrive: each becomes durable once, under the place that its client gave it.

use super::Clerk;
use crate::desk::journal::{ModelRow, NewCommand};
use crate::desk::prepared::{Kind, Prepared, model_request, unload_request};
use crate::desk::residents::LoraSupport;
use crate::desk::schedule::{Item, LAST};
use crate::desk::types::{
    CheckpointKind, Command, LoraSpec, ModelId, ModelSpec, Refusal, RequestId, SessionId, Tenant,
};
use std::fmt;

impl Clerk {
    /// Makes a command durable, or finds that it is.
    pub(crate) fn submit(&mut self, tenant: &Tenant, new: Prepared) -> Result<RequestId, Refusal> {
        let (model, seq) = match &new.command {
            Command::CreateModel { session, seq, spec } => {
                let (session, seq, spec) = (session.clone(), *seq, spec.clone());
                return self.create(tenant, &new, &session, seq, spec);
            }
            Command::CreateFromState { session, seq, .. } => {
                let (session, seq) = (session.clone(), *seq);
                let spec = self.spec_of_state(tenant, &new.command)?;
                return self.create(tenant, &new, &session, seq, spec);
            }
            Command::Sample { .. } => return self.submit_sample(tenant, &new),
            Command::Unload { model } => {
                let (model, request) = (model.clone(), unload_request(model));
                return self.enqueue(tenant, &new, &model, LAST, request);
            }
            Command::ForwardBackward { model, seq, .. }
            | Command::OptimStep { model, seq, .. }
            | Command::SaveState { model, seq, .. }
            | Command::LoadState { model, seq, .. }
            | Command::SaveForSampler { model, seq, .. }
            | Command::SaveExternal { model, seq, .. }
            | Command::Refused { model, seq, .. } => (model.clone(), *seq),
        };
        if !(1..LAST).contains(&seq) {
            let allowed = "at least 1: the creation of the model has 0";
            return Err(Refusal::invalid("seq_id", seq, allowed));
        }
        let request = model_request(&model, seq);
        self.enqueue(tenant, &new, &model, seq, request)
    }

    /// Whether the place holds this command already.
    ///
    /// # Errors
    /// If it holds another one.
    pub(super) fn is_known(
        &self,
        tenant: &Tenant,
        request: &RequestId,
        digest: &[u8; 32],
    ) -> Result<bool, Refusal> {
        match self.parts.journal.command(request)? {
            None => Ok(false),
            Some(row) if row.tenant == tenant.name && row.digest == digest => Ok(true),
            Some(_) => Err(Refusal::Conflict(format!(
                "{request} is another command already: each command needs a seq_id of its own, and a \
                 repeated one the same content"
            ))),
        }
    }

    /// Adds a command of a model.
    fn enqueue(
        &mut self,
        tenant: &Tenant,
        new: &Prepared,
        model: &ModelId,
        seq: u64,
        request: RequestId,
    ) -> Result<RequestId, Refusal> {
        let row = self.own_model(tenant, model)?;
        self.hear(&row.session);
        if self.is_known(tenant, &request, &new.digest)? {
            return Ok(request);
        }
        if let Some(why) = row.ended {
            return Err(Refusal::gone("model", model, why));
        }
        if seq < row.next {
            let why = "the command ended, and its result was dropped after its time";
            return Err(Refusal::gone("result", request, why));
        }
        self.admit(tenant, new, None)?;
        self.insert(tenant, new, Some(model), None, seq, &request)?;
        let item = Item {
            request: request.clone(),
            cost: new.cost,
            kind: new.kind,
        };
        self.schedule.enter(model, seq, item);
        Ok(request)
    }

    /// Checks the limits of the tenant and of the disk. `sequences` is the number of a sample request.
    pub(super) fn admit(
        &self,
        tenant: &Tenant,
        new: &Prepared,
        sequences: Option<u64>,
    ) -> Result<(), Refusal> {
        self.check_open()?;
        let bytes = new.payload.len() as u64;
        let meter = &self.meter;
        meter.admit(&tenant.name, bytes, sequences, self.now)?;
        self.check_disk(bytes)
    }

    /// Writes a command, and counts it.
    pub(super) fn insert(
        &mut self,
        tenant: &Tenant,
        new: &Prepared,
        model: Option<&ModelId>,
        source: Option<String>,
        seq: u64,
        request: &RequestId,
    ) -> Result<(), Refusal> {
        self.parts.journal.insert_command(&NewCommand {
            request: request.clone(),
            tenant: tenant.name.clone(),
            model: model.cloned(),
            source,
            seq,
            kind: new.kind.name(),
            digest: new.digest,
            cost: new.cost,
            payload: new.payload.clone(),
            submitted_ms: self.now,
        })?;
        let sequences = (new.kind == Kind::Sample).then_some(new.cost);
        let bytes = new.payload.len() as u64;
        self.meter.enter(&tenant.name, bytes, sequences);
        Ok(())
    }

    /// Adds a model and the command that makes it.
    fn create(
        &mut self,
        tenant: &Tenant,
        new: &Prepared,
        session: &SessionId,
        seq: u64,
        spec: ModelSpec,
    ) -> Result<RequestId, Refusal> {
        let model = ModelId::of(session, seq);
        let request = model_request(&model, 0);
        self.own_session(tenant, session)?;
        self.hear(session);
        if self.is_known(tenant, &request, &new.digest)? {
            return Ok(request);
        }
        if self.parts.journal.model(&model)?.is_some() {
            return Err(Refusal::Conflict(format!(
                "{model} exists: each model of a session needs a model_seq_id of its own"
            )));
        }
        self.open_session(tenant, session)?;
        self.check_spec(&spec)?;
        self.meter.admit_model(&tenant.name)?;
        self.admit(tenant, new, None)?;
        self.parts.journal.put_model(&ModelRow {
            model: model.clone(),
            session: session.clone(),
            tenant: tenant.name.clone(),
            created_ms: self.now,
            last_ms: self.now,
            spec,
            next: 0,
            covered: 0,
            steps: 0,
            saves: 0,
            live: None,
            live_bytes: 0,
            save_bytes: 0,
            ended: None,
            corrupted: false,
        })?;
        self.insert(tenant, new, Some(&model), None, 0, &request)?;
        let item = Item {
            request: request.clone(),
            cost: new.cost,
            kind: new.kind,
        };
        self.schedule.add(&model, &tenant.name, 0);
        self.schedule.enter(&model, 0, item);
        self.meter.add_model(&tenant.name);
        Ok(request)
    }

    /// The model that continues from a checkpoint.
    fn spec_of_state(&self, tenant: &Tenant, command: &Command) -> Result<ModelSpec, Refusal> {
        let Command::CreateFromState {
            path,
            base_model,
            metadata,
            ..
        } = command
        else {
            return Err(Refusal::Failed("no command from a state".to_owned()));
        };
        let found = self.own_checkpoint(tenant, path)?;
        if found.path.kind != CheckpointKind::State {
            return Err(not_a_state(path));
        }
        Ok(ModelSpec {
            base_model: base_model.clone().unwrap_or(found.base_model),
            lora: found.lora,
            metadata: metadata.clone(),
        })
    }

    /// Refuses a model that the trainer cannot make.
    fn check_spec(&self, spec: &ModelSpec) -> Result<(), Refusal> {
        let served = self.served(&spec.base_model)?;
        if !served.trainable {
            let what = format!("training of {}", served.name);
            return Err(Refusal::unsupported(what, "the server only samples it"));
        }
        let support = &self.parts.rules.support;
        let Some(lora) = &spec.lora else {
            if support.full {
                return Ok(());
            }
            let why = "this server's trainer has adapters: send a lora_config";
            return Err(Refusal::unsupported("training of all weights", why));
        };
        match &support.lora {
            LoraSupport::None => Err(Refusal::unsupported(
                "lora_config",
                "this server's trainer trains all weights: leave it out",
            )),
            LoraSupport::Any => check_lora(lora, self.parts.limits.max_rank),
            LoraSupport::Only(only) => check_only(lora, only),
        }
    }
}

fn invalid(field: &str, value: impl fmt::Display, allowed: impl Into<String>) -> Refusal {
    Refusal::invalid(format!("lora_config.{field}"), value, allowed)
}

/// Checks adapters of any form.
fn check_lora(lora: &LoraSpec, max_rank: u32) -> Result<(), Refusal> {
    if !(1..=max_rank).contains(&lora.rank) {
        let allowed = format!("1 to {max_rank}, the server's limits.max_rank");
        return Err(invalid("rank", lora.rank, allowed));
    }
    if !(lora.attn || lora.mlp || lora.unembed) {
        let allowed = "at least one of train_attn, train_mlp and train_unembed is true";
        return Err(invalid("train_attn", "false", allowed));
    }
    Ok(())
}

/// Checks adapters against the only form that the trainer has.
fn check_only(lora: &LoraSpec, only: &LoraSpec) -> Result<(), Refusal> {
    let fixed = |value: &dyn fmt::Display| {
        format!("{value}, as the trainer of this server was started with")
    };
    if lora.rank != only.rank {
        return Err(invalid("rank", lora.rank, fixed(&only.rank)));
    }
    for (field, sent, has) in [
        ("train_attn", lora.attn, only.attn),
        ("train_mlp", lora.mlp, only.mlp),
        ("train_unembed", lora.unembed, only.unembed),
    ] {
        if sent != has {
            return Err(invalid(field, sent, fixed(&has)));
        }
    }
    match lora.seed {
        None => Ok(()),
        Some(seed) => {
            let allowed = "left out: all models of this trainer start with the same adapters";
            Err(invalid("seed", seed, allowed))
        }
    }
}

/// The refusal of a checkpoint that has no optimizer state.
pub(super) fn not_a_state(path: &str) -> Refusal {
    let allowed = "a checkpoint of save_state: tinker://MODEL_ID/weights/NAME";
    Refusal::invalid("path", format!("{path:?}"), allowed)
}
