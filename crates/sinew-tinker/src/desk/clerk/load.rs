//! The clerk's state from the journal: at the start, and after a commit that failed.

use super::Clerk;
use crate::desk::prepared::Kind;
use crate::desk::quota::{Meter, day};
use crate::desk::schedule::{Item, Schedule};
use crate::desk::share::Share;
use crate::desk::types::Refusal;
use std::collections::{BTreeMap, BTreeSet};

impl Clerk {
    /// Reads everything that follows from the journal.
    pub(super) fn load(&mut self) -> Result<(), Refusal> {
        let (limits, journal) = (&self.parts.limits, &self.parts.journal);
        let switches = self.parts.rules.support.switches;
        let mut schedule = Schedule::new(limits.quantum_tokens, switches);
        let mut share = Share::new(limits.engine_sequences as u64);
        let mut models: BTreeMap<String, u64> = BTreeMap::new();
        for row in journal.open_models()? {
            schedule.add(&row.model, &row.tenant, row.next);
            *models.entry(row.tenant).or_default() += 1;
        }
        let opened: u64 = models.values().sum();
        for row in journal.waiting()? {
            let kind = Kind::parse(&row.kind)?;
            match row.model {
                Some(model) => {
                    let item = Item {
                        request: row.request,
                        cost: row.cost,
                        kind,
                    };
                    schedule.enter(&model, row.seq, item);
                }
                None => share.enter(&row.tenant, row.request, row.cost),
            }
        }
        let mut meter = Meter::new(limits, &self.parts.tenants);
        meter.set_uses(journal.tenant_uses()?);
        meter.set_models(models);
        let today = day(self.now);
        meter.set_tokens(today, journal.tokens(today)?);
        let last_end = journal.last_end()?;
        for session in journal.open_sessions()? {
            // Clients could not be heard while the server was down.
            self.heard.entry(session).or_insert(self.now);
        }
        self.schedule = schedule;
        self.share = share;
        self.meter = meter;
        self.epoch += 1;
        self.last_end = self.last_end.max(last_end);
        self.status.models = opened;
        self.count_disk()
    }

    /// Removes folders that a kill left over.
    pub(super) fn sweep(&self) -> Result<(), Refusal> {
        let journal = &self.parts.journal;
        let mut keep: BTreeSet<String> = journal.live_folders()?.into_iter().collect();
        keep.extend(journal.checkpoint_folders()?);
        let swept = self.parts.folders.sweep(&keep);
        swept.map_err(|e| Refusal::Failed(format!("the state folder: {e}")))
    }

    /// Counts the bytes of the state folder.
    pub(super) fn count_disk(&mut self) -> Result<(), Refusal> {
        let journal = &self.parts.journal;
        let files = journal.live_bytes()? + journal.checkpoint_bytes()?;
        self.status.disk_bytes = files + journal.bytes()?;
        Ok(())
    }
}
