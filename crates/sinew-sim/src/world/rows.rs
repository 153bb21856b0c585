//! Episodes that are over: the store, the queue, scorers and the trainer's leases.
//!
//! An episode becomes durable first. Then its row enters the queue, a scorer leases it and brings the reward;
//! the trainer leases the rows of an update and acks them once the update is committed.

use super::World;
use super::clock::{At, Happening};
use super::durable::StoredEpisode;
use super::slab::EpisodeState;
use crate::check::Bug;
use sinew_orchestrator::{Draw, EpisodeResult, Event};
use sinew_types::{EpisodeId, mix_seed};
use std::sync::Arc;

impl World {
    /// A trace is durable.
    pub(super) fn stored(&mut self, at: At) {
        if !self.episodes.is(at, EpisodeState::Stores) {
            return;
        }
        let Some(trace) = self.episodes[at.slot].trace.take() else {
            return;
        };
        let id = trace.episode.clone();
        let record = Arc::new(StoredEpisode::of(&trace));
        self.kept.stored.insert(id.clone(), Arc::clone(&record));
        self.ledger.stored(&id);
        self.updates.ended.insert(id.clone(), Arc::clone(&record));
        if record.failed {
            return self.tell_end(at.slot, &record, false);
        }
        self.episodes[at.slot].doing = EpisodeState::Scores;
        self.put_row(&id, &record);
        self.score_some();
    }

    /// An earlier session stored the episode: it is scored if it was not.
    pub(super) fn recover(&mut self, draw: Draw, record: Arc<StoredEpisode>) {
        let id = draw.episode.clone();
        let slot = self.episodes.place(draw, self.clock.now);
        self.updates.ended.insert(id.clone(), Arc::clone(&record));
        let scored = self.rows.is_scored(&id, &mut self.ledger);
        if record.failed || scored {
            return self.tell_end(slot, &record, true);
        }
        self.episodes[slot].doing = EpisodeState::Scores;
        self.put_row(&id, &record);
    }

    /// The loop hears of an episode's end.
    fn tell_end(&mut self, slot: u32, record: &StoredEpisode, before: bool) {
        let episode = self.episodes[slot].draw.episode.clone();
        self.episodes.leave(slot);
        let outcome = (record.kind.clone(), record.success, record.reward);
        self.tell(Event::EpisodeEnded(EpisodeResult {
            episode,
            failed: record.failed,
            stored: before,
            outcome: (!record.failed).then_some(outcome),
            waits_for_group: false,
            changed: None,
        }));
    }

    /// The row of a stored episode enters the queue.
    fn put_row(&mut self, id: &EpisodeId, record: &StoredEpisode) {
        self.measure.inputs += 1;
        let group_size = self.plan.rollout.group_size as u32;
        self.rows.put(id, record, group_size, &mut self.ledger);
    }

    /// Assigns rows to idle scorers.
    pub(super) fn score_some(&mut self) {
        if !self.rows.may_score() {
            return;
        }
        self.measure.inputs += 1;
        let scoring = &self.plan.scoring;
        let ttl_ms = (scoring.lease_s * 1e3).max(1.0) as u64;
        let wall_ms = self.clock.wall_ms();
        for job in self.rows.begin_scores(ttl_ms, wall_ms, &mut self.ledger) {
            let seed = mix_seed(self.plan.seed ^ 0x5c0e, job);
            let score_s = scoring.score_s.draw(seed);
            self.clock.after(score_s, Happening::Scored(job));
        }
    }

    /// A scorer has its score.
    pub(super) fn scored(&mut self, job: u64) {
        let Some((lease, key)) = self.rows.end_score(job) else {
            return;
        };
        self.measure.inputs += 1;
        if let Some(id) = self.rows.bring_reward(lease, key, &mut self.ledger) {
            let slot = self.episodes.find(&id);
            let slot = slot.filter(|s| self.episodes[*s].doing == EpisodeState::Scores);
            let record = self.updates.ended.get(&id).cloned();
            if let (Some(slot), Some(record)) = (slot, record) {
                self.tell_end(slot, &record, false);
            }
        }
        self.score_some();
    }

    /// The trainer leases the rows of an update; those that it acked in an earlier session are done.
    pub(super) fn lease_rows(&mut self, keys: Vec<String>) {
        let ready = self.rows.ready(keys, &mut self.ledger);
        if !ready.is_empty() {
            self.measure.inputs += 1;
            self.rows.lease(ready, &self.clock, &mut self.ledger);
        }
    }

    /// The trainer keeps what it leased.
    pub(super) fn renew_rows(&mut self) {
        if self.rows.is_renewal_due(self.clock.now) {
            self.measure.inputs += 1;
            self.rows.renew(&self.clock, &mut self.ledger);
        }
    }

    /// An update is committed: its rows are done.
    pub(super) fn ack_rows(&mut self, named: impl Iterator<Item = EpisodeId>) {
        let skips = self.bug == Some(Bug::SkipAck);
        let wall_ms = self.clock.wall_ms();
        let acked = self.rows.ack(named, skips, wall_ms, &mut self.ledger);
        self.measure.inputs += u64::from(acked);
    }
}
