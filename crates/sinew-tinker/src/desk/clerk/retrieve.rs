//! Results of commands.

use super::Clerk;
use crate::desk::journal::CommandRow;
use crate::desk::share::Place;
use crate::desk::types::{ModelId, QueueState, Refusal, RequestId, SamplerId, Tenant};
use tokio::sync::oneshot;

/// A result, encoded, or why there is none yet.
#[derive(Debug)]
pub(crate) enum Found {
    /// The outcome.
    Done(Vec<u8>),
    /// It waits or runs.
    Pending(QueueState),
}

impl Clerk {
    /// A command of a tenant.
    pub(super) fn own_command(
        &self,
        tenant: &Tenant,
        request: &RequestId,
    ) -> Result<CommandRow, Refusal> {
        let row = self.parts.journal.command(request)?;
        match row.filter(|row| row.tenant == tenant.name) {
            Some(row) => Ok(row),
            None => Err(self.missing(tenant, request)?),
        }
    }

    /// The reason for which there is no command: its result was dropped, or it never existed.
    fn missing(&self, tenant: &Tenant, request: &RequestId) -> Result<Refusal, Refusal> {
        let gone = match request.as_str().rsplit_once(':') {
            Some((owner, seq)) => {
                let seq = seq.parse::<u64>().ok();
                let model = self.parts.journal.model(&ModelId::from(owner))?;
                let model = model.filter(|model| model.tenant == tenant.name);
                let sampler = self.parts.journal.sampler(&SamplerId::from(owner))?;
                let sampler = sampler.filter(|sampler| sampler.tenant == tenant.name);
                let ended = model.is_some_and(|model| seq.is_none_or(|seq| seq < model.next));
                ended || (sampler.is_some() && seq.is_some())
            }
            None => false,
        };
        if gone {
            let why = "results are dropped after their time; send the request again";
            return Ok(Refusal::gone("result", request, why));
        }
        Ok(Refusal::not_found("request", request))
    }

    /// The result of a command. If there is none yet, `bell` rings at its end.
    pub(crate) fn retrieve(
        &mut self,
        tenant: &Tenant,
        request: &RequestId,
        bell: oneshot::Sender<()>,
    ) -> Result<Found, Refusal> {
        let row = self.own_command(tenant, request)?;
        if row.done_ms.is_none() {
            let state = self.queue_state(&row, request);
            self.wait_for(request.as_str(), bell);
            return Ok(Found::Pending(state));
        }
        let result = self.parts.journal.result(request)?;
        let result = result
            .ok_or_else(|| Refusal::Failed(format!("the journal has no result of {request}")))?;
        self.retrieved.insert(request.clone(), self.now);
        Ok(Found::Done(result))
    }

    /// The reason for which a command has no result yet.
    fn queue_state(&self, row: &CommandRow, request: &RequestId) -> QueueState {
        if self.drain.is_some() {
            let reason = "the server restarts; the command runs after that".to_owned();
            return QueueState::PausedCapacity { reason };
        }
        let held_by_others = match &row.model {
            Some(model) => self.schedule.waits_for_others(model, row.seq),
            None => {
                let waits = self.share.place(request) == Place::Waiting;
                waits && self.share.is_shared(&row.tenant)
            }
        };
        if held_by_others {
            let reason = "commands of other tenants have their turn".to_owned();
            return QueueState::PausedCapacity { reason };
        }
        QueueState::Active
    }
}
