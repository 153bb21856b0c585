//! Models and checkpoints as clients see them, and what they change of checkpoints.

use super::Clerk;
use super::dispatch::new_folder;
use super::sessions::bounded;
use crate::desk::journal::{CheckpointRow, ModelRow};
use crate::desk::paths::check_ttl;
use crate::desk::types::{
    CheckpointInfo, CheckpointKind, CheckpointPath, CopyRequest, ExternalFile, Listing, ModelId,
    ModelInfo, ModelSpec, Page, Refusal, StorageUse, Tenant,
};

/// The reason for which the model of a copy takes no commands.
const A_COPY: &str = "it holds a copy of a checkpoint: create a model from that";

/// Files of a checkpoint that only this program reads.
const OWN_FILES: [&str; 2] = ["checksums.json", "tinker.json"];

impl Clerk {
    /// A checkpoint of a tenant.
    pub(super) fn own_checkpoint(
        &self,
        tenant: &Tenant,
        path: &str,
    ) -> Result<CheckpointRow, Refusal> {
        let path = CheckpointPath::parse(path)?;
        let row = self.parts.journal.checkpoint(&path)?;
        if let Some(row) = row.filter(|row| row.tenant == tenant.name) {
            return Ok(row);
        }
        let model = self.parts.journal.model(&path.model)?;
        let own = model.is_some_and(|model| model.tenant == tenant.name);
        if own && path.name.starts_with('.') {
            let why =
                "weights without a name are kept for a while: save them again, or under a name";
            return Err(Refusal::gone("checkpoint", path, why));
        }
        Err(Refusal::not_found("checkpoint", path))
    }

    fn model_info(&self, row: ModelRow) -> Result<ModelInfo, Refusal> {
        let newest = |kind| -> Result<Option<CheckpointInfo>, Refusal> {
            let found = self.parts.journal.newest_checkpoint(&row.model, kind)?;
            Ok(found.map(|row| row.info()))
        };
        let (last_state, last_sampler) = (
            newest(CheckpointKind::State)?,
            newest(CheckpointKind::Sampler)?,
        );
        Ok(ModelInfo {
            model: row.model,
            owner: row.tenant,
            spec: row.spec,
            last_request_ms: row.last_ms,
            steps: row.steps,
            ended: row.ended,
            corrupted: row.corrupted,
            last_state,
            last_sampler,
        })
    }

    /// A model.
    pub(crate) fn model(&self, tenant: &Tenant, model: &ModelId) -> Result<ModelInfo, Refusal> {
        self.model_info(self.own_model(tenant, model)?)
    }

    /// The models of a tenant.
    pub(crate) fn models(
        &self,
        tenant: &Tenant,
        page: Page,
    ) -> Result<Listing<ModelInfo>, Refusal> {
        let (rows, total) = self.parts.journal.models(&tenant.name, bounded(page))?;
        let items = rows.into_iter().map(|row| self.model_info(row));
        Ok(Listing {
            items: items.collect::<Result<_, _>>()?,
            total,
        })
    }

    /// Checkpoints with names of a tenant.
    pub(crate) fn checkpoints(
        &self,
        tenant: &Tenant,
        model: Option<&ModelId>,
        page: Page,
    ) -> Result<Listing<CheckpointInfo>, Refusal> {
        if let Some(model) = model {
            self.own_model(tenant, model)?;
        }
        let journal = &self.parts.journal;
        let (rows, total) = journal.checkpoints(&tenant.name, model, bounded(page))?;
        Ok(Listing {
            items: rows.iter().map(CheckpointRow::info).collect(),
            total,
        })
    }

    /// The checkpoint at a path.
    pub(crate) fn checkpoint(
        &self,
        tenant: &Tenant,
        path: &str,
    ) -> Result<CheckpointInfo, Refusal> {
        Ok(self.own_checkpoint(tenant, path)?.info())
    }

    /// Deletes a checkpoint.
    pub(crate) fn delete_checkpoint(&mut self, tenant: &Tenant, path: &str) -> Result<(), Refusal> {
        let row = self.own_checkpoint(tenant, path)?;
        self.parts.journal.delete_checkpoint(&row.path)?;
        self.retire(&row, false);
        Ok(())
    }

    /// Has a checkpoint deleted later.
    pub(crate) fn set_ttl(
        &mut self,
        tenant: &Tenant,
        path: &str,
        ttl_s: Option<u64>,
    ) -> Result<(), Refusal> {
        let row = self.own_checkpoint(tenant, path)?;
        check_ttl(ttl_s)?;
        let expires_ms = self.expiry(ttl_s);
        Ok(self.parts.journal.set_expiry(&row.path, expires_ms)?)
    }

    /// Number and bytes of a tenant's checkpoints.
    pub(crate) fn storage(&self, tenant: &Tenant) -> Result<StorageUse, Refusal> {
        let (checkpoints, bytes) = self.parts.journal.storage(&tenant.name)?;
        Ok(StorageUse { checkpoints, bytes })
    }

    /// The files of external weights: those that other programs read.
    pub(crate) fn external_files(
        &self,
        tenant: &Tenant,
        path: &str,
    ) -> Result<Vec<ExternalFile>, Refusal> {
        let row = self.own_checkpoint(tenant, path)?;
        if row.path.kind != CheckpointKind::External {
            let allowed =
                "a checkpoint of save_weights_external: tinker://MODEL_ID/external_weights/NAME";
            return Err(Refusal::invalid("path", format!("{path:?}"), allowed));
        }
        let files = self.parts.folders.files(&row.folder);
        let files = files.map_err(|e| Refusal::Failed(format!("{}: {e}", row.path)))?;
        let foreign = |file: &ExternalFile| !OWN_FILES.contains(&file.name.as_str());
        Ok(files.into_iter().filter(foreign).collect())
    }

    /// Copies a checkpoint under a new model, which takes no commands.
    pub(crate) fn copy_checkpoint(
        &mut self,
        tenant: &Tenant,
        copy: &CopyRequest,
    ) -> Result<CheckpointPath, Refusal> {
        let source = self.own_checkpoint(tenant, &copy.source)?;
        self.open_session(tenant, &copy.session)?;
        self.check_open()?;
        self.hear(&copy.session);
        check_ttl(copy.ttl_s)?;
        let model = ModelId::of(&copy.session, copy.seq);
        if self.parts.journal.model(&model)?.is_some() {
            return Err(Refusal::Conflict(format!(
                "{model} exists: a copy needs a model_seq_id of its own"
            )));
        }
        let (_, stored) = self.parts.journal.storage(&tenant.name)?;
        let meter = &self.meter;
        meter.admit_checkpoint(&tenant.name, stored, source.bytes)?;
        self.check_disk(source.bytes)?;
        let name = source.path.name.trim_start_matches('.').to_owned();
        let kind = source.path.kind;
        let path = CheckpointPath {
            model: model.clone(),
            kind,
            name,
        };
        let folder = new_folder(&model, "copy")?;
        let copied = self.parts.folders.copy(&source.folder, &folder);
        copied.map_err(|e| Refusal::Failed(format!("the checkpoint was not copied: {e}")))?;
        let written = self.put_copy(tenant, copy, &source, &path, &folder);
        if written.is_err() {
            self.parts.folders.remove(&folder);
        }
        written.map(|()| path)
    }

    /// Writes the rows of a copy.
    fn put_copy(
        &mut self,
        tenant: &Tenant,
        copy: &CopyRequest,
        source: &CheckpointRow,
        path: &CheckpointPath,
        folder: &str,
    ) -> Result<(), Refusal> {
        self.parts.journal.put_model(&ModelRow {
            model: path.model.clone(),
            session: copy.session.clone(),
            tenant: tenant.name.clone(),
            created_ms: self.now,
            last_ms: self.now,
            spec: ModelSpec {
                base_model: source.base_model.clone(),
                lora: source.lora,
                metadata: source.metadata.clone(),
            },
            next: 1,
            covered: 1,
            steps: 0,
            saves: 0,
            live: None,
            live_bytes: 0,
            save_bytes: source.bytes,
            ended: Some(A_COPY.to_owned()),
            corrupted: false,
        })?;
        self.parts.journal.put_checkpoint(&CheckpointRow {
            path: path.clone(),
            named: true,
            folder: folder.to_owned(),
            created_ms: self.now,
            used_ms: self.now,
            expires_ms: self.expiry(copy.ttl_s),
            ..source.clone()
        })?;
        Ok(())
    }

    /// Deletes checkpoints whose time is over.
    pub(super) fn expire_checkpoints(&mut self) -> Result<(), Refusal> {
        for row in self.parts.journal.expired_checkpoints(self.now)? {
            self.parts.journal.delete_checkpoint(&row.path)?;
            self.retire(&row, false);
        }
        Ok(())
    }
}
