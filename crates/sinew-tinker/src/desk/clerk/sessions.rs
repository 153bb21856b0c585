//! Sessions of clients.

use super::Clerk;
use crate::desk::journal::{FinishRow, SessionRow};
use crate::desk::types::{
    FinishReason, Listing, NewSession, Page, Refusal, SessionId, SessionInfo, SessionStatus, Tenant,
};
use crate::random::nonce;

/// Most entries of a page.
pub(super) const MAX_PAGE: u64 = 1000;

/// A page within the limit.
pub(super) fn bounded(page: Page) -> Page {
    Page {
        offset: page.offset,
        limit: page.limit.min(MAX_PAGE),
    }
}

impl Clerk {
    /// Makes a session.
    pub(crate) fn create_session(
        &mut self,
        tenant: &Tenant,
        about: NewSession,
    ) -> Result<SessionId, Refusal> {
        self.check_open()?;
        let session = SessionId::from(nonce().map_err(Refusal::Failed)?);
        self.parts.journal.insert_session(&SessionRow {
            session: session.clone(),
            tenant: tenant.name.clone(),
            created_ms: self.now,
            about,
            finish: None,
        })?;
        self.heard.insert(session.clone(), self.now);
        Ok(session)
    }

    /// Notes that the client of a session lives.
    pub(crate) fn heartbeat(
        &mut self,
        tenant: &Tenant,
        session: &SessionId,
    ) -> Result<(), Refusal> {
        self.open_session(tenant, session)?;
        self.hear(session);
        Ok(())
    }

    /// Ends a session.
    pub(crate) fn finish_session(
        &mut self,
        tenant: &Tenant,
        session: &SessionId,
        reason: FinishReason,
        detail: Option<String>,
    ) -> Result<(), Refusal> {
        let row = self.own_session(tenant, session)?;
        if row.finish.is_some() {
            return Ok(());
        }
        let finish = FinishRow {
            reason: Some(reason),
            detail,
        };
        let ended = self.end_session(session, &finish, "its session ended");
        if let Err(refusal) = &ended {
            // More than the journal may have changed.
            self.broken = Some(refusal.clone());
        }
        ended
    }

    /// Ends a session with its models and samplers.
    pub(super) fn end_session(
        &mut self,
        session: &SessionId,
        finish: &FinishRow,
        why: &str,
    ) -> Result<(), Refusal> {
        self.parts.journal.finish_session(session, finish)?;
        for model in self.parts.journal.session_models(session)? {
            self.end_model(model, why)?;
        }
        self.end_samples(session, why)?;
        self.heard.remove(session);
        Ok(())
    }

    /// A session.
    pub(crate) fn session(
        &self,
        tenant: &Tenant,
        session: &SessionId,
    ) -> Result<SessionInfo, Refusal> {
        let row = self.own_session(tenant, session)?;
        self.session_info(row)
    }

    /// The sessions of a tenant.
    pub(crate) fn sessions(
        &self,
        tenant: &Tenant,
        page: Page,
    ) -> Result<Listing<SessionInfo>, Refusal> {
        let (rows, total) = self.parts.journal.sessions(&tenant.name, bounded(page))?;
        let items = rows.into_iter().map(|row| self.session_info(row));
        Ok(Listing {
            items: items.collect::<Result<_, _>>()?,
            total,
        })
    }

    fn session_info(&self, row: SessionRow) -> Result<SessionInfo, Refusal> {
        let journal = &self.parts.journal;
        let models = journal.session_models(&row.session)?;
        let samplers = journal.session_samplers(&row.session)?;
        let (checkpoints, checkpoint_bytes) = journal.session_storage(&row.session)?;
        let heard = self.heard.get(&row.session).copied().unwrap_or(0);
        let silent = self.now.saturating_sub(heard) > self.silence_ms() / 4;
        let status = match row.finish {
            Some(FinishRow {
                reason: Some(reason),
                detail,
            }) => SessionStatus::Finished { reason, detail },
            Some(FinishRow { reason: None, .. }) => SessionStatus::Silent,
            None if silent => SessionStatus::Silent,
            None => SessionStatus::Active,
        };
        Ok(SessionInfo {
            session: row.session,
            created_ms: row.created_ms,
            status,
            about: row.about,
            models: models.into_iter().map(|row| row.model).collect(),
            samplers: samplers.into_iter().map(|row| row.sampler).collect(),
            checkpoints,
            checkpoint_bytes,
        })
    }

    /// Time without a sign of a client after which its session ends.
    pub(super) fn silence_ms(&self) -> u64 {
        self.parts.limits.silent_s.saturating_mul(1000)
    }
}
