//! The handle by which the HTTP side calls the desk.

use super::clerk::{Clerk, Found, Job, job};
use super::codec::decode;
use super::prepared::Prepared;
use super::types::{
    CheckpointInfo, CheckpointPath, Command, Completions, CopyRequest, DeskStatus, ExternalFile,
    FinishReason, Listing, ModelId, ModelInfo, NewSession, Page, Refusal, RequestId, Retrieved,
    SamplerId, SamplerInfo, ServedModel, SessionId, SessionInfo, StorageUse, Tenant,
};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::{mpsc, oneshot};

/// The desk's door: cheap to clone, and safe to call from any task. Calls return once what they changed is
/// on disk.
#[derive(Clone)]
pub struct Desk {
    inner: Arc<Inner>,
}

struct Inner {
    jobs: mpsc::Sender<Job>,
    served: Vec<ServedModel>,
}

impl std::fmt::Debug for Desk {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let names = self.inner.served.iter().map(|model| &model.name);
        f.debug_struct("Desk")
            .field("served", &names.collect::<Vec<_>>())
            .finish_non_exhaustive()
    }
}

impl Desk {
    pub(super) fn new(jobs: mpsc::Sender<Job>, served: Vec<ServedModel>) -> Self {
        let inner = Arc::new(Inner { jobs, served });
        Self { inner }
    }

    /// Has the clerk do `work`, and returns its result once the changes are on disk.
    async fn ask<T: Send + 'static>(
        &self,
        work: impl FnOnce(&mut Clerk) -> Result<T, Refusal> + Send + 'static,
    ) -> Result<T, Refusal> {
        let (job, answer) = job(work);
        let sent = self.inner.jobs.send(job).await;
        sent.map_err(|_| Refusal::Draining)?;
        answer.await.map_err(|_| Refusal::Draining)?
    }

    /// The base models, one entry for each name.
    pub fn served(&self) -> &[ServedModel] {
        &self.inner.served
    }

    /// Numbers for health pages and metrics.
    ///
    /// # Errors
    /// If the desk has ended.
    pub async fn status(&self) -> Result<DeskStatus, Refusal> {
        self.ask(|clerk| Ok(clerk.status())).await
    }

    /// Makes the command durable and returns the id of its future. The same command under the same place
    /// again returns the same id and runs nothing.
    ///
    /// # Errors
    /// If the place holds another command, what the command names does not exist or belongs to another
    /// tenant, a value is not allowed, or a limit is reached.
    pub async fn submit(&self, tenant: &Tenant, command: Command) -> Result<RequestId, Refusal> {
        let tenant = tenant.clone();
        // Megabytes are encoded here, on a thread that may block.
        let prepared = tokio::task::spawn_blocking(move || Prepared::of(command)).await;
        let prepared = prepared.map_err(|e| Refusal::Failed(e.to_string()))??;
        self.ask(move |clerk| clerk.submit(&tenant, prepared)).await
    }

    /// The result of a command, waiting for it up to `wait`.
    ///
    /// # Errors
    /// If there is no such command of this tenant, or its result expired.
    pub async fn retrieve(
        &self,
        tenant: &Tenant,
        id: &RequestId,
        wait: Duration,
    ) -> Result<Retrieved, Refusal> {
        let deadline = Instant::now() + wait;
        loop {
            let (owner, request) = (tenant.clone(), id.clone());
            let (bell, rings) = oneshot::channel();
            let found = self.ask(move |clerk| clerk.retrieve(&owner, &request, bell));
            let left = deadline.saturating_duration_since(Instant::now());
            match found.await? {
                Found::Done(result) => {
                    let decoded = tokio::task::spawn_blocking(move || decode(&result)).await;
                    let outcome = decoded.map_err(|e| Refusal::Failed(e.to_string()))??;
                    return Ok(Retrieved::Done(outcome));
                }
                Found::Pending(queue) if left.is_zero() => return Ok(Retrieved::Pending { queue }),
                Found::Pending(_) => {}
            }
            // Rings when the command ends; the look after the wait returns its result, or why it waits.
            let _ = tokio::time::timeout(left, rings).await;
        }
    }

    /// Ends a sample request early; other commands are not cancelled, since later ones build on them.
    ///
    /// # Errors
    /// If there is no such command of this tenant.
    pub async fn cancel(&self, tenant: &Tenant, id: &RequestId) -> Result<(), Refusal> {
        let (tenant, id) = (tenant.clone(), id.clone());
        self.ask(move |clerk| clerk.cancel(&tenant, &id)).await
    }

    /// Makes a session.
    ///
    /// # Errors
    /// If a limit is reached.
    pub async fn create_session(
        &self,
        tenant: &Tenant,
        about: NewSession,
    ) -> Result<SessionId, Refusal> {
        let tenant = tenant.clone();
        self.ask(move |clerk| clerk.create_session(&tenant, about))
            .await
    }

    /// Notes that the client of a session lives.
    ///
    /// # Errors
    /// [`Refusal::Gone`] if the session is finished.
    pub async fn heartbeat(&self, tenant: &Tenant, session: &SessionId) -> Result<(), Refusal> {
        let (tenant, session) = (tenant.clone(), session.clone());
        self.ask(move |clerk| clerk.heartbeat(&tenant, &session))
            .await
    }

    /// Ends a session: its waiting commands end as failed, its models and samplers take no more. Checkpoints
    /// stay. The first reason holds.
    ///
    /// # Errors
    /// If there is no such session of this tenant.
    pub async fn finish_session(
        &self,
        tenant: &Tenant,
        session: &SessionId,
        reason: FinishReason,
        detail: Option<String>,
    ) -> Result<(), Refusal> {
        let (tenant, session) = (tenant.clone(), session.clone());
        self.ask(move |clerk| clerk.finish_session(&tenant, &session, reason, detail))
            .await
    }

    /// A session.
    ///
    /// # Errors
    /// If there is no such session of this tenant.
    pub async fn session(
        &self,
        tenant: &Tenant,
        session: &SessionId,
    ) -> Result<SessionInfo, Refusal> {
        let (tenant, session) = (tenant.clone(), session.clone());
        self.ask(move |clerk| clerk.session(&tenant, &session))
            .await
    }

    /// The sessions of a tenant, newest first.
    ///
    /// # Errors
    /// If the journal cannot be read.
    pub async fn sessions(
        &self,
        tenant: &Tenant,
        page: Page,
    ) -> Result<Listing<SessionInfo>, Refusal> {
        let tenant = tenant.clone();
        self.ask(move |clerk| clerk.sessions(&tenant, page)).await
    }

    /// A model.
    ///
    /// # Errors
    /// If there is no such model of this tenant.
    pub async fn model(&self, tenant: &Tenant, model: &ModelId) -> Result<ModelInfo, Refusal> {
        let (tenant, model) = (tenant.clone(), model.clone());
        self.ask(move |clerk| clerk.model(&tenant, &model)).await
    }

    /// The models of a tenant, newest first.
    ///
    /// # Errors
    /// If the journal cannot be read.
    pub async fn models(&self, tenant: &Tenant, page: Page) -> Result<Listing<ModelInfo>, Refusal> {
        let tenant = tenant.clone();
        self.ask(move |clerk| clerk.models(&tenant, page)).await
    }

    /// Checkpoints with names of a tenant, newest first; with `model`, only those of it.
    ///
    /// # Errors
    /// If there is no such model of this tenant.
    pub async fn checkpoints(
        &self,
        tenant: &Tenant,
        model: Option<&ModelId>,
        page: Page,
    ) -> Result<Listing<CheckpointInfo>, Refusal> {
        let (tenant, model) = (tenant.clone(), model.cloned());
        self.ask(move |clerk| clerk.checkpoints(&tenant, model.as_ref(), page))
            .await
    }

    /// The checkpoint at a path, `tinker://...`.
    ///
    /// # Errors
    /// If the path is malformed, or there is no such checkpoint of this tenant.
    pub async fn checkpoint(&self, tenant: &Tenant, path: &str) -> Result<CheckpointInfo, Refusal> {
        let (tenant, path) = (tenant.clone(), path.to_owned());
        self.ask(move |clerk| clerk.checkpoint(&tenant, &path))
            .await
    }

    /// Deletes a checkpoint. Samplers that use it end.
    ///
    /// # Errors
    /// If the path is malformed, or there is no such checkpoint of this tenant.
    pub async fn delete_checkpoint(&self, tenant: &Tenant, path: &str) -> Result<(), Refusal> {
        let (tenant, path) = (tenant.clone(), path.to_owned());
        self.ask(move |clerk| clerk.delete_checkpoint(&tenant, &path))
            .await
    }

    /// Has a checkpoint deleted in `ttl_s` seconds from now; `None`: never.
    ///
    /// # Errors
    /// If the path is malformed, there is no such checkpoint of this tenant, or the time is not allowed.
    pub async fn set_ttl(
        &self,
        tenant: &Tenant,
        path: &str,
        ttl_s: Option<u64>,
    ) -> Result<(), Refusal> {
        let (tenant, path) = (tenant.clone(), path.to_owned());
        self.ask(move |clerk| clerk.set_ttl(&tenant, &path, ttl_s))
            .await
    }

    /// Refuses to publish a checkpoint: keys of this server see only their own.
    ///
    /// # Errors
    /// Always; [`Refusal::NotFound`] if there is no such checkpoint of this tenant.
    pub async fn publish(&self, tenant: &Tenant, path: &str) -> Result<(), Refusal> {
        self.checkpoint(tenant, path).await?;
        Err(Refusal::unsupported(
            "publishing a checkpoint",
            "a checkpoint is seen by the key that wrote it; give the other user that key, or copy the files \
             of the state folder",
        ))
    }

    /// Refuses to make an archive of a checkpoint: the files lie in the server's state folder.
    ///
    /// # Errors
    /// Always; [`Refusal::NotFound`] if there is no such checkpoint of this tenant.
    pub async fn archive(&self, tenant: &Tenant, path: &str) -> Result<(), Refusal> {
        let found = self.checkpoint(tenant, path).await?;
        let why = format!(
            "the server keeps no object store with signed addresses; the operator finds the files of {} \
             under `checkpoints` in the state folder",
            found.path
        );
        Err(Refusal::unsupported("the archive of a checkpoint", why))
    }

    /// Copies a checkpoint under a new model of a session, and returns the copy's path.
    ///
    /// # Errors
    /// If source or session do not exist, the number is in use, or a limit is reached.
    pub async fn copy_checkpoint(
        &self,
        tenant: &Tenant,
        copy: CopyRequest,
    ) -> Result<CheckpointPath, Refusal> {
        let tenant = tenant.clone();
        self.ask(move |clerk| clerk.copy_checkpoint(&tenant, &copy))
            .await
    }

    /// Checkpoints that a tenant keeps.
    ///
    /// # Errors
    /// If the journal cannot be read.
    pub async fn storage(&self, tenant: &Tenant) -> Result<StorageUse, Refusal> {
        let tenant = tenant.clone();
        self.ask(move |clerk| clerk.storage(&tenant)).await
    }

    /// Makes a sampling session on a base model, or on a checkpoint of it. The same call again returns the
    /// same id.
    ///
    /// # Errors
    /// If neither is named, one does not exist, both do not fit each other, or the number is in use.
    pub async fn create_sampler(
        &self,
        tenant: &Tenant,
        session: &SessionId,
        seq: u64,
        base_model: Option<String>,
        path: Option<String>,
    ) -> Result<SamplerId, Refusal> {
        let (tenant, session) = (tenant.clone(), session.clone());
        self.ask(move |clerk| clerk.create_sampler(&tenant, &session, seq, base_model, path))
            .await
    }

    /// Number for a further client of a sampling session, from 1; the first client has 0.
    ///
    /// # Errors
    /// If there is no such sampling session of this tenant.
    pub async fn join_sampler(&self, tenant: &Tenant, sampler: &SamplerId) -> Result<u64, Refusal> {
        let (tenant, sampler) = (tenant.clone(), sampler.clone());
        self.ask(move |clerk| clerk.join_sampler(&tenant, &sampler))
            .await
    }

    /// Requests of one client of a sampling session that ended after a cursor, waiting for one up to `wait`.
    /// The client `clone` has the seqs from `clone * 1_000_000_000`; the cursor 0 is before all.
    ///
    /// # Errors
    /// If there is no such sampling session of this tenant.
    pub async fn completions(
        &self,
        tenant: &Tenant,
        sampler: &SamplerId,
        clone: u64,
        after: u64,
        wait: Duration,
    ) -> Result<Completions, Refusal> {
        let deadline = Instant::now() + wait;
        loop {
            let (owner, id) = (tenant.clone(), sampler.clone());
            let (bell, rings) = oneshot::channel();
            let found = self.ask(move |clerk| clerk.completions(&owner, &id, clone, after, bell));
            let found = found.await?;
            let left = deadline.saturating_duration_since(Instant::now());
            if !found.items.is_empty() || left.is_zero() {
                return Ok(found);
            }
            let _ = tokio::time::timeout(left, rings).await;
        }
    }

    /// Drops results of sample requests that their client has. Others, and those of other tenants, stay.
    ///
    /// # Errors
    /// If the journal cannot be written.
    pub async fn discard(&self, tenant: &Tenant, ids: &[RequestId]) -> Result<(), Refusal> {
        let (tenant, ids) = (tenant.clone(), ids.to_vec());
        self.ask(move |clerk| clerk.discard(&tenant, &ids)).await
    }

    /// The files of external weights.
    ///
    /// # Errors
    /// If there is no such checkpoint of this tenant, or it is of another kind.
    pub async fn external_files(
        &self,
        tenant: &Tenant,
        path: &str,
    ) -> Result<Vec<ExternalFile>, Refusal> {
        let (tenant, path) = (tenant.clone(), path.to_owned());
        self.ask(move |clerk| clerk.external_files(&tenant, &path))
            .await
    }

    /// A sampling session.
    ///
    /// # Errors
    /// If there is no such sampling session of this tenant.
    pub async fn sampler(
        &self,
        tenant: &Tenant,
        sampler: &SamplerId,
    ) -> Result<SamplerInfo, Refusal> {
        let (tenant, sampler) = (tenant.clone(), sampler.clone());
        self.ask(move |clerk| clerk.sampler(&tenant, &sampler))
            .await
    }

    /// Stops taking commands, ends the one that runs, writes checkpoints and closes the journal. Commands
    /// that wait run after the next start.
    ///
    /// # Errors
    /// If a checkpoint or the journal cannot be written; what was acknowledged is kept by the journal all
    /// the same.
    pub async fn drain(&self) -> Result<(), Refusal> {
        let (reply, done) = oneshot::channel();
        self.ask(move |clerk| {
            clerk.drain(reply);
            Ok(())
        })
        .await?;
        done.await.map_err(|_| Refusal::Draining)?
    }
}
