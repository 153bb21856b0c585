//! Which episode was trained in which step: kept inside each checkpoint, so that one commit
//! ties episodes, optimizer step and weights.

use crate::failure::Failure;
use crate::wire::Parts;
use serde::{Deserialize, Serialize};
use sinew_store::{Filter, StoreError};
use sinew_types::EpisodeId;
use std::collections::{BTreeMap, BTreeSet};

/// What became of the episodes of one step.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct LedgerStep {
    pub(crate) step: u64,
    pub(crate) trained: Vec<EpisodeId>,
    /// Episodes that gave no row, with the reason.
    pub(crate) dropped: BTreeMap<EpisodeId, String>,
}

/// All steps up to a checkpoint.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Ledger {
    pub(crate) steps: Vec<LedgerStep>,
    /// Trained episodes that the store was found to have lost.
    #[serde(default)]
    pub(crate) lost: BTreeSet<EpisodeId>,
}

/// The count that a run ends with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Samples {
    pub(crate) trained: usize,
    /// Left out for a recorded reason (no difference within the group, failed, ...).
    pub(crate) dropped: usize,
    pub(crate) trained_twice: usize,
    /// Trained, and no longer in the store; or stored for a step that was trained, but neither
    /// trained nor dropped.
    pub(crate) lost: usize,
}

/// What a store has.
#[derive(Clone, Debug, Default)]
pub(crate) struct Stored {
    /// Training episodes that can be read, with their steps.
    pub(crate) episodes: Vec<(EpisodeId, u64)>,
    /// All that it knows: these, and those that `sinew gc` removed after they were trained.
    known: BTreeSet<EpisodeId>,
}

impl Ledger {
    /// Notes which episodes of the steps after `since` the store has lost; gives those that were not
    /// noted before.
    pub(crate) fn note_lost(&mut self, stored: &Stored, since: u64) -> Vec<EpisodeId> {
        let steps = self.steps.iter().filter(|s| s.step > since);
        let gone = steps
            .flat_map(|s| &s.trained)
            .filter(|e| !stored.known.contains(*e) && !self.lost.contains(*e));
        let gone: BTreeSet<EpisodeId> = gone.cloned().collect();
        self.lost.extend(gone.iter().cloned());
        gone.into_iter().collect()
    }

    /// Counts against the episodes that the store holds.
    pub(crate) fn samples(&self, stored: &Stored) -> Samples {
        let mut seen = BTreeSet::new();
        let mut samples = Samples::default();
        let mut steps = BTreeSet::new();
        for step in &self.steps {
            steps.insert(step.step);
            for episode in &step.trained {
                samples.trained += 1;
                samples.trained_twice += usize::from(!seen.insert(episode));
            }
            for episode in step.dropped.keys() {
                samples.dropped += 1;
                seen.insert(episode);
            }
        }
        let stray = stored
            .episodes
            .iter()
            .filter(|(episode, step)| steps.contains(step) && !seen.contains(episode))
            .count();
        samples.lost = self.lost.len() + stray;
        samples
    }
}

impl Parts {
    /// Idempotent: a crash between the checkpoint and this is repaired at the next start.
    pub(crate) fn mark_trained(&self, ledger: &Ledger) -> Result<(), Failure> {
        let marked: BTreeSet<String> = self
            .store
            .trained_batches()
            .map_err(Failure::system)?
            .into_iter()
            .map(|b| b.batch)
            .collect();
        let mut stored = None;
        for step in &ledger.steps {
            let batch = format!("s{:05}", step.step);
            if marked.contains(&batch) || step.trained.is_empty() {
                continue;
            }
            let done = self.store.mark_trained(&batch, step.step, &step.trained);
            match done {
                Err(StoreError::UnknownEpisode { .. }) => {
                    let all = match stored.take() {
                        Some(all) => all,
                        None => self.stored()?.episodes,
                    };
                    let all = stored.insert(all);
                    self.mark_known(&batch, step, all)?;
                }
                done => done.map(|_| ()).map_err(Failure::system)?,
            }
        }
        Ok(())
    }

    /// As far as the store still holds what a step trained: one in memory begins empty, and an index
    /// that was made anew has what its segments have. No episode of a step that is done is run again.
    fn mark_known(
        &self,
        batch: &str,
        step: &LedgerStep,
        stored: &[(EpisodeId, u64)],
    ) -> Result<(), Failure> {
        let stored: BTreeSet<&EpisodeId> = stored.iter().map(|(episode, _)| episode).collect();
        let known: Vec<EpisodeId> = step
            .trained
            .iter()
            .filter(|e| stored.contains(e))
            .cloned()
            .collect();
        if known.is_empty() {
            return Ok(());
        }
        let done = self.store.mark_trained(batch, step.step, &known);
        done.map(|_| ()).map_err(Failure::system)
    }

    /// What the store has of training episodes.
    pub(crate) fn stored(&self) -> Result<Stored, Failure> {
        let mut stored = Stored::default();
        let mut filter = Filter {
            purpose: Some("train".into()),
            limit: 1000,
            ..Filter::default()
        };
        loop {
            let page = self.store.list(&filter).map_err(Failure::system)?;
            let step_of = |draw: u64| draw / self.draws_per_step + 1;
            let found = page.episodes.into_iter();
            let found = found.map(|e| (e.episode, step_of(e.draw)));
            stored.episodes.extend(found);
            match page.next {
                Some(next) => filter.after = Some(next),
                None => break,
            }
        }
        let marked = self.store.trained_batches().map_err(Failure::system)?;
        let readable = stored.episodes.iter().map(|(e, _)| e.clone());
        stored.known = readable
            .chain(marked.into_iter().flat_map(|b| b.episodes))
            .filter(|e| !self.torn.contains(e))
            .collect();
        Ok(stored)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(text: &str) -> EpisodeId {
        EpisodeId::new(text)
    }

    fn ledger() -> Ledger {
        let step = |step, trained: &[&str]| LedgerStep {
            step,
            trained: trained.iter().map(|e| id(e)).collect(),
            dropped: BTreeMap::from([(id(&format!("d{step}")), "equal rewards".into())]),
        };
        Ledger {
            steps: vec![step(1, &["a", "b"]), step(2, &["b", "c"])],
            ..Ledger::default()
        }
    }

    /// A store with these episodes, which knows `collected` besides.
    fn stored(episodes: &[(&str, u64)], collected: &[&str]) -> Stored {
        let episodes: Vec<_> = episodes.iter().map(|(e, s)| (id(e), *s)).collect();
        let known = episodes.iter().map(|(e, _)| e.clone());
        Stored {
            known: known.chain(collected.iter().map(|e| id(e))).collect(),
            episodes,
        }
    }

    #[test]
    fn twice_and_stray_episodes_are_counted() {
        let stored = stored(
            &[
                ("a", 1),
                ("b", 1),
                ("x", 1),
                ("c", 2),
                ("d1", 1),
                ("d2", 2),
                ("later", 3),
            ],
            &[],
        );
        let mut ledger = ledger();
        assert!(ledger.note_lost(&stored, 0).is_empty());
        assert_eq!(
            ledger.samples(&stored),
            Samples {
                trained: 4,
                dropped: 2,
                trained_twice: 1,
                lost: 1
            }
        );
    }

    #[test]
    fn trained_episodes_that_are_gone_are_lost_and_collected_ones_are_not() {
        let mut ledger = ledger();
        let left = stored(&[("b", 1)], &["a"]);
        assert_eq!(ledger.note_lost(&left, 0), [id("c")]);
        assert!(ledger.note_lost(&left, 0).is_empty(), "it is noted once");
        assert_eq!(ledger.samples(&left).lost, 1);
        let mut ledger = self::ledger();
        assert_eq!(ledger.note_lost(&stored(&[], &[]), 0).len(), 3);
        assert_eq!(
            ledger.samples(&stored(&[], &[])).lost,
            3,
            "b is one episode"
        );
        // A store in memory is not asked for what earlier sessions trained.
        let mut ledger = self::ledger();
        assert_eq!(ledger.note_lost(&stored(&[], &[]), 1).len(), 2);
    }
}
