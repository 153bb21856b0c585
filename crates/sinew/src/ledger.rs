//! Which episode was trained in which step: kept inside each checkpoint, so that one commit
//! ties episodes, optimizer step and weights.

use serde::{Deserialize, Serialize};
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
}

/// The count that a run ends with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Samples {
    pub(crate) trained: usize,
    /// Left out for a recorded reason (no difference within the group, failed, ...).
    pub(crate) dropped: usize,
    pub(crate) trained_twice: usize,
    /// Stored for a step that was trained, but neither trained nor dropped.
    pub(crate) lost: usize,
}

impl Ledger {
    /// Counts against the episodes that the store holds: `(episode, step)` of training episodes.
    pub(crate) fn samples(&self, stored: &[(EpisodeId, u64)]) -> Samples {
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
        samples.lost = stored
            .iter()
            .filter(|(episode, step)| steps.contains(step) && !seen.contains(episode))
            .count();
        samples
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn twice_and_lost_are_counted() {
        let id = |text: &str| EpisodeId::new(text);
        let step = |step, trained: &[&str]| LedgerStep {
            step,
            trained: trained.iter().map(|e| id(e)).collect(),
            dropped: BTreeMap::from([(id(&format!("d{step}")), "equal rewards".into())]),
        };
        let ledger = Ledger {
            steps: vec![step(1, &["a", "b"]), step(2, &["b", "c"])],
        };
        let stored: Vec<_> = [
            ("a", 1),
            ("b", 1),
            ("x", 1),
            ("c", 2),
            ("d1", 1),
            ("d2", 2),
            ("later", 3),
        ]
        .map(|(e, s)| (id(e), s))
        .into();
        let samples = ledger.samples(&stored);
        assert_eq!(
            samples,
            Samples {
                trained: 4,
                dropped: 2,
                trained_twice: 1,
                lost: 1
            }
        );
    }
}
