//! Measures the time for which a run waits for its disk.

use std::time::Instant;

/// Times since the last take.
#[derive(Debug, Default)]
pub(super) struct DiskTime {
    /// The store's own clock at the last take.
    store_s: f64,
    /// Commits of updates, which are part of that clock, and checkpoints.
    commits_s: f64,
    saves_s: f64,
}

impl DiskTime {
    /// Starts with a store that has waited for `store_s` seconds before.
    pub(super) fn from(store_s: f64) -> Self {
        Self {
            store_s,
            ..Self::default()
        }
    }

    /// Records the duration of a commit that began at `began`.
    pub(super) fn committed(&mut self, began: Instant) {
        self.commits_s += began.elapsed().as_secs_f64();
    }

    /// Records the duration of a checkpoint that began at `began`.
    pub(super) fn saved(&mut self, began: Instant) {
        self.saves_s += began.elapsed().as_secs_f64();
    }

    /// Returns the seconds that the loop waited, and those of all episodes. `store_s` is the present value of
    /// the store's counter.
    pub(super) fn take(&mut self, store_s: f64) -> (f64, f64) {
        let before = std::mem::replace(self, Self::from(store_s));
        let episodes_s = store_s - before.store_s - before.commits_s;
        (before.commits_s + before.saves_s, episodes_s.max(0.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commits_of_updates_are_not_put_down_to_episodes() {
        let mut disk = DiskTime::from(2.0);
        disk.commits_s = 0.5;
        disk.saves_s = 0.25;
        assert_eq!(disk.take(5.0), (0.75, 2.5));
        assert_eq!(disk.take(5.0), (0.0, 0.0));
    }
}
