//! Checksums of the weights that servers have in memory, compared between the replicas of one router.
//!
//! A label shows the version that was set, not the weights in memory. The first replica's sums of a version
//! are what the others must have. Sums of servers that cut their weights in another way have other keys,
//! and are compared only with each other.

use crate::error::AttemptError;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

/// Checksum of each parameter, by its place in the server and its name.
pub(crate) type WeightSums = BTreeMap<String, String>;

/// The sums of one version: those of the first replica of each layout. Clones share them.
#[derive(Clone, Debug, Default)]
pub struct ReplicaSums(Arc<Mutex<Vec<(String, WeightSums)>>>);

impl ReplicaSums {
    /// Compares the sums of `server` with those of the first replica, or keeps them as such.
    ///
    /// # Errors
    /// [`AttemptError::Sums`] if they differ.
    pub(crate) fn compare(&self, server: &str, sums: WeightSums) -> Result<(), AttemptError> {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let first = known.iter().find(|(_, first)| first.keys().eq(sums.keys()));
        let Some((replica, first)) = first else {
            known.push((server.to_owned(), sums));
            return Ok(());
        };
        let differing = sums
            .iter()
            .filter(|(key, sum)| first.get(*key) != Some(*sum));
        let differing: Vec<&String> = differing.map(|(key, _)| key).collect();
        match differing.first() {
            None => Ok(()),
            Some(tensor) => Err(AttemptError::Sums {
                replica: replica.clone(),
                differing: differing.len(),
                tensors: sums.len(),
                tensor: (*tensor).clone(),
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sums(of: &[(&str, &str)]) -> WeightSums {
        let own = |(key, sum): &(&str, &str)| ((*key).to_owned(), (*sum).to_owned());
        of.iter().map(own).collect()
    }

    #[test]
    fn the_first_replica_of_a_layout_decides() {
        let all = ReplicaSums::default();
        let whole = sums(&[("tp0:a", "1"), ("tp0:b", "2")]);
        all.compare("http://one", whole.clone()).unwrap();
        all.clone().compare("http://two", whole).unwrap();
        // Cut in two: nothing to compare with yet.
        let halves = sums(&[("tp0:a", "8"), ("tp1:a", "9")]);
        all.compare("http://three", halves).unwrap();
        let other = sums(&[("tp0:a", "1"), ("tp0:b", "3")]);
        let error = all.compare("http://four", other).unwrap_err();
        assert_eq!(
            error.to_string(),
            "its weights differ from those of http://one in 1 of 2 tensors, the first is `tp0:b`"
        );
    }
}
