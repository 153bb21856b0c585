//! CPU time of an execution: of all its processes together, those that ended included, as its control group
//! counts it. An execution that exceeds the limit is killed.
//!
//! A limit of one process (RLIMIT_CPU) does not bound a sandbox: a program can start others. Nothing
//! signals the end of a group's time, so it is read again when it can have been spent on all processors
//! at once, and at most every 10 ms.

use super::Spawner;
use crate::cgroup::Group;
use nix::poll::PollTimeout;
use std::time::{Duration, Instant};

/// Minimum pause between two readings.
const LOOK_PAUSE: Duration = Duration::from_millis(10);
/// Maximum pause between two readings.
const MAX_PAUSE: Duration = Duration::from_secs(3600);

/// CPU time of the running execution of a sandbox.
#[derive(Debug, Default)]
pub(super) struct Spent {
    /// Count of the group before the program; `None` if nothing runs or nothing counts.
    before_us: Option<u64>,
    /// CPU time of the main process before its program came.
    pub(super) main_before_us: u64,
    /// Time of the next reading.
    look: Option<Instant>,
    /// It exceeded its limit.
    pub(super) over: bool,
}

impl Spent {
    /// A program begins.
    pub(super) fn begin(&mut self, group: &Group, main_before_us: u64) {
        *self = Self {
            before_us: group.cpu_us(),
            main_before_us,
            ..Self::default()
        };
    }

    /// Returns the CPU time of the group since the program began, in microseconds; `None` if it is not
    /// counted.
    fn since_us(&self, group: &Group) -> Option<u64> {
        Some(group.cpu_us()?.saturating_sub(self.before_us?))
    }

    /// Ends the count of a program and returns its time in microseconds.
    pub(super) fn end(&mut self, group: &Group) -> u64 {
        let spent = self.since_us(group).unwrap_or(0);
        self.before_us = None;
        spent
    }
}

/// Shortest time in which a program can take the CPU time that it has left.
fn pause(left_us: u64, at_once: u64) -> Duration {
    Duration::from_micros(left_us / at_once.max(1)).clamp(LOOK_PAUSE, MAX_PAUSE)
}

impl Spawner {
    /// Reads the CPU time of a sandbox at intervals from now on.
    pub(super) fn watch_cpu(&mut self, id: u64) {
        let processors = self.host.processors;
        let Some(live) = self.live.get_mut(&id) else {
            return;
        };
        let Some(since_us) = live.spent.since_us(&live.group) else {
            return;
        };
        let limits = &live.creation.limits;
        let limit_us = (limits.cpu_s * 1e6) as u64;
        if since_us >= limit_us {
            live.spent.over = true;
            self.kill(id);
            return;
        }
        let at_once = processors.min(limits.processes);
        let look = Instant::now() + pause(limit_us - since_us, at_once);
        live.spent.look = Some(look);
        self.cpu_looks.insert((look, id));
    }

    /// Looks at what is due; the time until the next is.
    pub(super) fn cpu_due(&mut self) -> PollTimeout {
        let now = Instant::now();
        while let Some(&(due, id)) = self.cpu_looks.first() {
            let runs = self.live.get(&id).is_some_and(|live| {
                live.running.is_some() && live.spent.look == Some(due) && !live.spent.over
            });
            if runs && due > now {
                let left = due - now + Duration::from_millis(1);
                return PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX);
            }
            self.cpu_looks.pop_first();
            if runs {
                self.watch_cpu(id);
            }
        }
        PollTimeout::NONE
    }

    /// Forgets the next reading of an execution that is over.
    pub(super) fn forget_cpu(&mut self, id: u64) {
        if let Some(look) = self.live.get_mut(&id).and_then(|l| l.spent.look.take()) {
            self.cpu_looks.remove(&(look, id));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_looked_at_before_all_processors_can_have_taken_the_rest() {
        assert_eq!(pause(4_000_000, 2), Duration::from_secs(2));
        assert_eq!(pause(4_000_000, 0), Duration::from_secs(4));
        assert_eq!(pause(1, 2), LOOK_PAUSE);
        assert_eq!(pause(u64::MAX, 1), MAX_PAUSE);
    }
}
