//! Sampling sessions and sample requests.

use super::ran::INFLIGHT;
use super::{Clerk, Effect};
use crate::Category;
use crate::desk::codec::{decode, encode};
use crate::desk::flight_orders::{AdapterSource, SampleTask, Source};
use crate::desk::journal::{CheckpointRow, ModelRow, SamplerRow};
use crate::desk::prepared::Prepared;
use crate::desk::sample_check::check_sample;
use crate::desk::schedule::LAST;
use crate::desk::share::Place;
use crate::desk::types::{
    CheckpointKind, CheckpointPath, Command, Completions, LoraSpec, Outcome, Refusal, RequestId,
    SamplerId, SamplerInfo, SamplerRef, SessionId, Tenant,
};
use crate::random::{nonce, seed_of};
use sinew_types::{AdapterName, PolicyVersion};
use tokio::sync::oneshot;

/// Start of the ids of requests outside of a sampling session.
const SINGLE: &str = "single";
/// Numbers of a client's requests: those of the next client of a sampling session begin above.
const CLIENT_SEQS: u64 = 1_000_000_000;
/// Most ends in one answer.
const MAX_COMPLETIONS: u64 = 4096;
/// The reason for which a request has no samples.
const CANCELLED: &str = "the request was cancelled by its client";

/// The adapter of a checkpoint at the engine. Weights that change have one name; others one for each folder.
fn adapter(row: &CheckpointRow) -> Result<AdapterSource, Refusal> {
    let name = if row.path.name == INFLIGHT {
        let hash = blake3::hash(row.path.model.as_str().as_bytes());
        format!("inflight-{}", &hash.to_hex()[..24])
    } else {
        let folder = row.folder.rsplit('/').next();
        folder.unwrap_or_default().to_owned()
    };
    let name = AdapterName::new(&name).map_err(|e| Refusal::Failed(e.to_string()))?;
    Ok(AdapterSource {
        name,
        version: PolicyVersion(row.version),
        folder: row.folder.clone(),
    })
}

/// The weights of a checkpoint at the engine.
fn source(row: &CheckpointRow) -> Result<Source, Refusal> {
    if row.lora.is_some() {
        return adapter(row).map(Source::Adapter);
    }
    Ok(Source::Full {
        folder: row.folder.clone(),
    })
}

impl Clerk {
    /// Makes a sample request durable, or finds that it is.
    pub(super) fn submit_sample(
        &mut self,
        tenant: &Tenant,
        new: &Prepared,
    ) -> Result<RequestId, Refusal> {
        let Command::Sample {
            sampler,
            seq,
            request: input,
        } = &new.command
        else {
            return Err(Refusal::Failed("no sample request".to_owned()));
        };
        let (request, source) = match sampler {
            SamplerRef::Session(id) => {
                let row = self.own_sampler(tenant, id)?;
                self.hear(&row.session);
                let allowed = "a number of its own for each request of a sampling session";
                let seq = seq
                    .filter(|seq| *seq < LAST)
                    .ok_or_else(|| Refusal::invalid("seq_id", format!("{seq:?}"), allowed))?;
                let request = RequestId::from(format!("{id}:{seq}"));
                if self.is_known(tenant, &request, &new.digest)? {
                    return Ok(request);
                }
                self.open_session(tenant, &row.session)?;
                (request, row.path)
            }
            SamplerRef::Base(name) => {
                self.sampleable(name)?;
                (single()?, None)
            }
            SamplerRef::Path(path) => {
                let found = self.sampled_checkpoint(tenant, path)?;
                (single()?, Some(found.path.to_string()))
            }
        };
        if let Some(path) = &source {
            self.sampled_checkpoint(tenant, path)?;
        }
        check_sample(input, &self.parts.rules)?;
        self.admit(tenant, new, Some(new.cost))?;
        let seq = seq.unwrap_or(0);
        self.insert(tenant, new, None, source, seq, &request)?;
        self.share.enter(&tenant.name, request.clone(), new.cost);
        Ok(request)
    }

    /// Refuses a base model that is not sampled.
    fn sampleable(&self, name: &str) -> Result<(), Refusal> {
        let served = self.served(name)?;
        if served.sampleable {
            return Ok(());
        }
        let what = format!("sampling of {name}");
        Err(Refusal::unsupported(
            what,
            "the server has no engine for it",
        ))
    }

    /// A checkpoint of a tenant that can be sampled.
    fn sampled_checkpoint(&self, tenant: &Tenant, path: &str) -> Result<CheckpointRow, Refusal> {
        let found = self.own_checkpoint(tenant, path)?;
        if found.path.kind == CheckpointKind::External {
            let allowed =
                "a checkpoint of save_weights_for_sampler: tinker://MODEL_ID/sampler_weights/NAME";
            return Err(Refusal::invalid("model_path", format!("{path:?}"), allowed));
        }
        self.served(&found.base_model)?;
        self.check_form(found.lora.as_ref())?;
        Ok(found)
    }

    /// Refuses weights that no engine of this server takes.
    fn check_form(&self, lora: Option<&LoraSpec>) -> Result<(), Refusal> {
        let rules = &self.parts.rules;
        let (what, why) = match lora {
            Some(_) if rules.samples_adapters => return Ok(()),
            None if rules.samples_full => return Ok(()),
            Some(_) => (
                "sampling with adapters",
                "the engine of this server takes no adapters by name",
            ),
            None => (
                "sampling of a model whose weights were all trained",
                "the engine of this server has one set of weights: train adapters, or save_weights_external \
                 and serve the folder elsewhere",
            ),
        };
        Err(Refusal::unsupported(what, why))
    }

    /// Refuses to save weights for sampling that could not be sampled.
    pub(super) fn check_sampled(&self, row: &ModelRow) -> Result<(), Refusal> {
        self.sampleable(&row.spec.base_model)?;
        self.check_form(row.spec.lora.as_ref())
    }

    /// Checks the number of a sampling session that a command makes.
    pub(super) fn check_sampler(&self, row: &ModelRow, seq: Option<u64>) -> Result<(), Refusal> {
        let Some(seq) = seq else {
            let allowed = "a number, where the weights have no path";
            return Err(Refusal::invalid("sampling_session_seq_id", "none", allowed));
        };
        let sampler = SamplerId::of(&row.session, seq);
        if self.parts.journal.sampler(&sampler)?.is_some() {
            return Err(Refusal::Conflict(format!(
                "{sampler} exists: each sampling session needs a number of its own"
            )));
        }
        Ok(())
    }

    /// Gives a request to the engine.
    pub(super) fn begin_sample(&mut self, request: &RequestId) -> Result<(), Refusal> {
        let payload = self.payload(request)?;
        let Command::Sample { request: input, .. } = decode(&payload)? else {
            return Err(Refusal::Failed(format!("{request} samples nothing")));
        };
        let source = match self.parts.journal.source(request)? {
            None => Source::Base,
            Some(path) => {
                let path = CheckpointPath::parse(&path)?;
                let row = self.parts.journal.checkpoint(&path)?;
                let row =
                    row.ok_or_else(|| Refusal::gone("checkpoint", &path, "it was deleted"))?;
                self.parts.journal.used_checkpoint(&path, self.now)?;
                source(&row)?
            }
        };
        // A repeated request samples the same.
        let seed = input.params.seed;
        let seed = seed.unwrap_or_else(|| seed_of(request.as_str()));
        self.effects.push(Effect::Sample(Box::new(SampleTask {
            request: request.clone(),
            source,
            input,
            seed,
        })));
        Ok(())
    }

    /// Writes the end of a request that the engine carried out.
    pub(crate) fn flown(
        &mut self,
        request: &RequestId,
        result: &[u8],
        failed: bool,
        tokens: u64,
    ) -> Result<(), Refusal> {
        let row = self.parts.journal.command(request)?;
        if let Some(row) = row.filter(|row| row.done_ms.is_none()) {
            self.end_command(&row.tenant, request, result, failed, false)?;
            self.spend(&row.tenant, tokens)?;
            if let Some((sampler, _)) = request.as_str().rsplit_once(':') {
                self.effects.push(Effect::Ring(sampler.to_owned()));
            }
        }
        self.share.done(request);
        Ok(())
    }

    /// Ends a request with an outcome.
    pub(super) fn end_sample(
        &mut self,
        request: &RequestId,
        outcome: &Outcome,
        tokens: u64,
    ) -> Result<(), Refusal> {
        let failed = matches!(outcome, Outcome::Failed { .. });
        self.flown(request, &encode(outcome)?, failed, tokens)
    }

    /// Ends a sample request early.
    pub(crate) fn cancel(&mut self, tenant: &Tenant, request: &RequestId) -> Result<(), Refusal> {
        let row = self.own_command(tenant, request)?;
        if row.model.is_some() {
            let what = format!("cancelling {request}");
            let why = "later commands of the model build on it";
            return Err(Refusal::unsupported(what, why));
        }
        if row.done_ms.is_some() {
            return Ok(());
        }
        match self.share.place(request) {
            Place::Flying => self.effects.push(Effect::CancelSample(request.clone())),
            Place::Waiting | Place::Unknown => {
                self.end_sample(request, &sample_cancelled(), 0)?;
                self.share.cancel(request);
            }
        }
        Ok(())
    }

    /// Makes a sampling session, or finds it.
    pub(crate) fn create_sampler(
        &mut self,
        tenant: &Tenant,
        session: &SessionId,
        seq: u64,
        base_model: Option<String>,
        path: Option<String>,
    ) -> Result<SamplerId, Refusal> {
        self.own_session(tenant, session)?;
        self.hear(session);
        let sampler = SamplerId::of(session, seq);
        let known = self.parts.journal.sampler(&sampler)?;
        let base_model = match (base_model, &path) {
            (Some(base), _) => base,
            (None, Some(path)) => self.sampled_checkpoint(tenant, path)?.base_model,
            (None, None) => {
                let allowed = "base_model, model_path, or both";
                return Err(Refusal::invalid("base_model", "none", allowed));
            }
        };
        if let Some(known) = known {
            if known.base_model == base_model && known.path == path {
                return Ok(sampler);
            }
            return Err(Refusal::Conflict(format!(
                "{sampler} has other weights: each sampling session needs a number of its own"
            )));
        }
        self.open_session(tenant, session)?;
        self.check_open()?;
        match &path {
            Some(path) => {
                self.served(&base_model)?;
                self.sampled_checkpoint(tenant, path)?;
            }
            None => self.sampleable(&base_model)?,
        }
        self.parts.journal.insert_sampler(&SamplerRow {
            sampler: sampler.clone(),
            session: session.clone(),
            tenant: tenant.name.clone(),
            created_ms: self.now,
            base_model,
            path,
            clients: 0,
        })?;
        Ok(sampler)
    }

    fn own_sampler(&self, tenant: &Tenant, sampler: &SamplerId) -> Result<SamplerRow, Refusal> {
        let row = self.parts.journal.sampler(sampler)?;
        let own = row.filter(|row| row.tenant == tenant.name);
        own.ok_or_else(|| Refusal::not_found("sampling session", sampler))
    }

    /// Number for a further client of a sampling session.
    pub(crate) fn join_sampler(
        &mut self,
        tenant: &Tenant,
        sampler: &SamplerId,
    ) -> Result<u64, Refusal> {
        let row = self.own_sampler(tenant, sampler)?;
        self.hear(&row.session);
        Ok(self.parts.journal.join_sampler(sampler)?)
    }

    /// A sampling session.
    pub(crate) fn sampler(
        &self,
        tenant: &Tenant,
        sampler: &SamplerId,
    ) -> Result<SamplerInfo, Refusal> {
        let row = self.own_sampler(tenant, sampler)?;
        Ok(SamplerInfo {
            sampler: row.sampler,
            base_model: row.base_model,
            path: row.path,
        })
    }

    /// Requests of one client of a sampling session that ended after a cursor. Without any, `bell` rings at
    /// the next end.
    pub(crate) fn completions(
        &mut self,
        tenant: &Tenant,
        sampler: &SamplerId,
        clone: u64,
        after: u64,
        bell: oneshot::Sender<()>,
    ) -> Result<Completions, Refusal> {
        self.own_sampler(tenant, sampler)?;
        let first = clone.saturating_mul(CLIENT_SEQS);
        let seqs = first..=first.saturating_add(CLIENT_SEQS - 1);
        let journal = &self.parts.journal;
        let found = journal.completions(sampler, seqs, after, MAX_COMPLETIONS)?;
        if found.is_empty() {
            self.wait_for(sampler.as_str(), bell);
        }
        let cursor = found.last().map_or(after, |(_, ended)| *ended);
        let items = found.into_iter().map(|(completion, _)| completion);
        Ok(Completions {
            items: items.collect(),
            cursor,
        })
    }

    /// Drops results that a client has.
    pub(crate) fn discard(&mut self, tenant: &Tenant, ids: &[RequestId]) -> Result<(), Refusal> {
        let mut freed = 0;
        for id in ids {
            freed += self.parts.journal.discard(&tenant.name, id)?;
            self.retrieved.remove(id);
        }
        self.meter.free(&tenant.name, freed);
        Ok(())
    }

    /// Has the engine replace the weights that a model's inflight samplers share.
    pub(super) fn publish_inflight(&mut self, row: &CheckpointRow) -> Result<(), Refusal> {
        if row.path.name == INFLIGHT && row.lora.is_some() {
            self.effects.push(Effect::Publish(adapter(row)?));
        }
        Ok(())
    }

    /// Fails the sample requests of a session's sampling sessions that wait or run.
    pub(super) fn end_samples(&mut self, session: &SessionId, why: &str) -> Result<(), Refusal> {
        let start = format!("{session}:sample:");
        for row in self.parts.journal.waiting()? {
            if row.model.is_some() || !row.request.as_str().starts_with(&start) {
                continue;
            }
            if self.share.place(&row.request) == Place::Flying {
                self.effects.push(Effect::CancelSample(row.request.clone()));
            }
            let outcome = Outcome::failed(Category::User, why);
            self.end_sample(&row.request, &outcome, 0)?;
            self.share.cancel(&row.request);
        }
        Ok(())
    }
}

/// The id of a request outside of a sampling session.
fn single() -> Result<RequestId, Refusal> {
    let nonce = nonce().map_err(Refusal::Failed)?;
    Ok(RequestId::from(format!("{SINGLE}:{nonce}")))
}

/// The outcome of a request that its client gave up.
pub(crate) fn sample_cancelled() -> Outcome {
    Outcome::failed(Category::User, CANCELLED)
}
