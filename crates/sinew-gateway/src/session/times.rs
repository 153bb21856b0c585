//! Times of a session. All are Unix times in seconds.

use sinew_types::Timing;

/// Times of a session.
#[derive(Debug)]
pub(super) struct Times {
    opened_s: f64,
    /// Time of its last call.
    pub(super) touched_s: f64,
    /// Start of the time in which at least one call runs; `generate_s` is the time before that.
    busy_since_s: f64,
    generate_s: f64,
}

impl Times {
    /// A session that opens.
    pub(super) fn new(now_s: f64) -> Self {
        Self {
            opened_s: now_s,
            touched_s: now_s,
            busy_since_s: now_s,
            generate_s: 0.0,
        }
    }

    /// A call begins while no other runs.
    pub(super) fn busy(&mut self, now_s: f64) {
        self.busy_since_s = now_s;
    }

    /// A call has ended; `last`: no other runs.
    pub(super) fn ended(&mut self, last: bool, now_s: f64) {
        self.touched_s = now_s;
        if last {
            self.generate_s += (now_s - self.busy_since_s).max(0.0);
        }
    }

    /// The timing of the trace; `runs`: a call runs.
    pub(super) fn timing(&self, runs: bool, now_s: f64) -> Timing {
        let total_s = (now_s - self.opened_s).max(0.0);
        let open = if runs {
            (now_s - self.busy_since_s).max(0.0)
        } else {
            0.0
        };
        let generate_s = (self.generate_s + open).min(total_s);
        Timing {
            started_unix_s: self.opened_s,
            total_s,
            generate_s,
            // Time of the agent between its calls: tools and its own work.
            tool_s: total_s - generate_s,
            queue_s: 0.0,
        }
    }
}
