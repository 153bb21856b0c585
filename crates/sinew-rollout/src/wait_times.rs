//! Counters of the time that engine and trainer spend waiting.
//!
//! Every event of the driver ends one interval of the session and starts the next. In each interval, the
//! engine was busy for the time that its own counter reports. The rest of the interval is attributed to the
//! state at its start.

use serde::{Deserialize, Serialize};

/// Seconds of a step or a run, in which engine and trainer worked or waited. The first four add up to the
/// wall time, and so do the last three.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct WaitTimes {
    /// Seconds in which the engine computed.
    pub engine_busy_s: f64,
    /// Seconds in which the engine was idle while all running episodes were in tools and environments.
    pub engine_tools_s: f64,
    /// Seconds in which the engine was idle and no episode ran, because the trainer worked.
    pub engine_trainer_s: f64,
    /// Seconds in which the engine was idle and no episode ran for another reason: weights, commits,
    /// checkpoints, or the start.
    pub engine_empty_s: f64,
    /// Seconds in which the trainer scored or updated.
    pub trainer_busy_s: f64,
    /// Seconds in which the trainer waited for groups.
    pub trainer_groups_s: f64,
    /// Seconds of measurements, publication, commits and checkpoints.
    pub trainer_other_s: f64,
    /// Seconds in which the loop waited until commits and checkpoints were on disk; part of the other values.
    pub loop_disk_s: f64,
    /// Seconds in which episodes waited until they were on disk, summed over episodes. Other episodes
    /// continue meanwhile.
    pub episodes_disk_s: f64,
    /// Seconds in which episodes waited for sandboxes of their environments, summed over episodes.
    pub episodes_sandbox_s: f64,
}

impl WaitTimes {
    /// Returns the seconds with display names, in order.
    pub fn rows(&self) -> [(&'static str, f64); 7] {
        [
            ("engine computes", self.engine_busy_s),
            ("  waits for tools", self.engine_tools_s),
            ("  waits for trainer", self.engine_trainer_s),
            ("  has no episode", self.engine_empty_s),
            ("trainer computes", self.trainer_busy_s),
            ("  waits for groups", self.trainer_groups_s),
            ("  other waits", self.trainer_other_s),
        ]
    }

    /// Waits by name that are part of [`rows`](Self::rows). Sums over episodes can be longer than the run.
    pub fn part_rows(&self) -> [(&'static str, f64); 3] {
        [
            ("loop waits for disk", self.loop_disk_s),
            ("episodes for disk, sum", self.episodes_disk_s),
            ("episodes for sandboxes, sum", self.episodes_sandbox_s),
        ]
    }

    /// Adds the times of a later interval.
    pub fn add(&mut self, later: &Self) {
        self.engine_busy_s += later.engine_busy_s;
        self.engine_tools_s += later.engine_tools_s;
        self.engine_trainer_s += later.engine_trainer_s;
        self.engine_empty_s += later.engine_empty_s;
        self.trainer_busy_s += later.trainer_busy_s;
        self.trainer_groups_s += later.trainer_groups_s;
        self.trainer_other_s += later.trainer_other_s;
        self.loop_disk_s += later.loop_disk_s;
        self.episodes_disk_s += later.episodes_disk_s;
        self.episodes_sandbox_s += later.episodes_sandbox_s;
    }
}

/// State of the trainer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TrainerActivity {
    /// Scores or updates.
    Works,
    /// Waits, because no group can be trained.
    WaitsForGroups,
    /// Measurements, publication, commits and checkpoints.
    #[default]
    Other,
}

/// Sums waiting times. It is pure: callers pass the time.
#[derive(Clone, Copy, Debug, Default)]
pub struct WaitClock {
    sums: WaitTimes,
    /// Values at the last reading.
    now_s: f64,
    busy_s: f64,
    sandbox_s: f64,
    /// State of the trainer since the last reading.
    pub trainer: TrainerActivity,
    /// Whether episodes run, as of the last reading.
    running: bool,
}

impl WaitClock {
    /// Ends an interval at `now_s` seconds, with `busy_s` of the engine's counter and `sandbox_s` of the
    /// waits for sandboxes; from now on episodes run or not.
    pub fn look(&mut self, now_s: f64, (busy_s, sandbox_s): (f64, f64), running: bool) {
        let passed = (now_s - self.now_s).max(0.0);
        let busy = (busy_s - self.busy_s).clamp(0.0, passed);
        self.sums.engine_busy_s += busy;
        let waited = match (self.running, self.trainer) {
            (true, _) => &mut self.sums.engine_tools_s,
            (false, TrainerActivity::Works) => &mut self.sums.engine_trainer_s,
            (false, _) => &mut self.sums.engine_empty_s,
        };
        *waited += passed - busy;
        *match self.trainer {
            TrainerActivity::Works => &mut self.sums.trainer_busy_s,
            TrainerActivity::WaitsForGroups => &mut self.sums.trainer_groups_s,
            TrainerActivity::Other => &mut self.sums.trainer_other_s,
        } += passed;
        self.sums.episodes_sandbox_s += (sandbox_s - self.sandbox_s).max(0.0);
        (self.now_s, self.busy_s, self.sandbox_s) = (now_s, busy_s, sandbox_s);
        self.running = running;
    }

    /// Returns and resets the sums.
    pub fn take(&mut self) -> WaitTimes {
        std::mem::take(&mut self.sums)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_second_is_put_down_to_one_cause_of_engine_and_trainer() {
        let mut watch = WaitClock::default();
        watch.look(1.0, (0.0, 0.0), true); // loading
        watch.trainer = TrainerActivity::WaitsForGroups;
        watch.look(5.0, (1.5, 6.0), false); // a rollout
        watch.trainer = TrainerActivity::Works;
        watch.look(7.0, (1.5, 6.0), true); // an update
        watch.look(10.0, (3.5, 6.5), false); // an update, while episodes run
        watch.trainer = TrainerActivity::Other;
        watch.look(11.0, (3.5, 6.5), false); // a checkpoint
        let seen = watch.take();
        let expected = WaitTimes {
            engine_busy_s: 3.5,
            engine_tools_s: 3.5,
            engine_trainer_s: 2.0,
            engine_empty_s: 2.0,
            trainer_busy_s: 5.0,
            trainer_groups_s: 4.0,
            trainer_other_s: 2.0,
            episodes_sandbox_s: 6.5,
            ..WaitTimes::default()
        };
        assert_eq!(seen, expected);
        let all: f64 = seen.rows().iter().map(|(_, s)| s).sum();
        assert_eq!(all, 2.0 * 11.0);
        assert_eq!(watch.take(), WaitTimes::default());
    }
}
