//! Times for which engine, trainer and loop wait.

use super::disk::DiskTime;
use crate::ports::RolloutReading;
use sinew_rollout::{TrainerActivity, WaitClock, WaitTimes};

/// Times since the last take.
pub(super) struct Waits {
    /// State of engine and trainer.
    watch: WaitClock,
    pub(super) disk: DiskTime,
}

impl Waits {
    /// Starts with a store that has waited for `store_s` seconds before.
    pub(super) fn new(store_s: f64) -> Self {
        Self {
            watch: WaitClock::default(),
            disk: DiskTime::from(store_s),
        }
    }

    /// Notes what the time since the last look was spent on; from now on the trainer does this. `running`:
    /// whether episodes run.
    pub(super) fn look(
        &mut self,
        now_s: f64,
        reading: &RolloutReading,
        running: bool,
        trainer: Option<TrainerActivity>,
    ) {
        let counters = (reading.engine_busy_s, reading.sandbox_s);
        self.watch.look(now_s, counters, running);
        self.watch.trainer = trainer.unwrap_or(self.watch.trainer);
    }

    /// The times since the last take, with the store's clock of now.
    pub(super) fn take(&mut self, store_s: f64) -> WaitTimes {
        let (loop_disk_s, episodes_disk_s) = self.disk.take(store_s);
        WaitTimes {
            loop_disk_s,
            episodes_disk_s,
            ..self.watch.take()
        }
    }
}
