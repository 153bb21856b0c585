//! The clerk's work of every few seconds: results, checkpoints and sessions whose time is over.

use super::Clerk;
use crate::desk::journal::FinishRow;
use crate::desk::quota::day;
use crate::desk::types::{Refusal, SessionId};

/// Milliseconds between two upkeeps.
const EVERY_MS: u64 = 10_000;
/// Most results that one upkeep deletes by their age, and by bytes at a time.
const MOST: u64 = 4096;
const STEP: u64 = 64;
/// Days for which the count of tokens is kept.
const TOKEN_DAYS: u64 = 31;

impl Clerk {
    /// The upkeep, if it is due.
    pub(super) fn upkeep_if_due(&mut self) -> Result<(), Refusal> {
        if self.now < self.next_upkeep {
            return Ok(());
        }
        self.next_upkeep = self.now + EVERY_MS;
        for (request, at) in std::mem::take(&mut self.retrieved) {
            self.parts.journal.retrieved(&request, at)?;
        }
        self.expire_results()?;
        self.expire_checkpoints()?;
        self.end_silent()?;
        let today = day(self.now);
        let journal = &self.parts.journal;
        journal.forget_tokens(today.saturating_sub(TOKEN_DAYS))?;
        self.meter.set_uses(journal.tenant_uses()?);
        self.meter.set_tokens(today, journal.tokens(today)?);
        journal.give_back()?;
        self.count_disk()
    }

    /// Deletes results that are too old, or too many.
    fn expire_results(&self) -> Result<(), Refusal> {
        let (limits, journal) = (&self.parts.limits, &self.parts.journal);
        let before = |seconds: u64| self.now.saturating_sub(seconds.saturating_mul(1000));
        journal.expire_results(before(limits.retrieved_s), before(limits.result_s), MOST)?;
        while journal.result_bytes()? > limits.result_bytes {
            if journal.drop_oldest_retrieved(STEP)? == 0 {
                // The rest waits for its clients, within the limits of their tenants.
                break;
            }
        }
        Ok(())
    }

    /// Ends sessions whose clients are gone.
    fn end_silent(&mut self) -> Result<(), Refusal> {
        let silence = self.silence_ms();
        let silent: Vec<SessionId> = self
            .heard
            .iter()
            .filter(|(_, heard)| self.now.saturating_sub(**heard) > silence)
            .map(|(session, _)| session.clone())
            .collect();
        for session in silent {
            let models = self.parts.journal.session_models(&session)?;
            if models.iter().any(|row| self.schedule.is_active(&row.model)) {
                // It still computes for somebody who may come back.
                continue;
            }
            let finish = FinishRow {
                reason: None,
                detail: None,
            };
            tracing::info!(%session, "the client of a session is gone: its models leave the memory");
            self.end_session(&session, &finish, "its client was silent for too long")?;
        }
        Ok(())
    }
}
