//! A circuit breaker: an engine that fails repeatedly gets no attempts for a while.
//!
//! ```text
//! closed --failures in a row, or a trip--> open --time is over: one trial--> closed, or open twice as long
//! ```

/// Conditions for opening a breaker, and the time that it stays open.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BreakerConfig {
    /// Failures in a row that open it. Default: 3.
    pub failures: u32,
    /// Seconds that it stays open the first time; doubles while trials fail. Default: 2.
    pub open_s: f64,
    /// Maximum seconds that it stays open. Default: 60.
    pub max_open_s: f64,
}

impl Default for BreakerConfig {
    fn default() -> Self {
        Self {
            failures: 3,
            open_s: 2.0,
            max_open_s: 60.0,
        }
    }
}

/// The attempts that may be started.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Permit {
    /// Closed: no limit.
    Any,
    /// One attempt, to see whether the engine works again.
    Trial,
    /// Open.
    None,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum State {
    Closed { failures: u32 },
    Open { until: f64 },
}

/// The breaker of one engine.
#[derive(Clone, Copy, Debug)]
pub(super) struct Breaker {
    config: BreakerConfig,
    state: State,
    /// Times it has opened since the last success.
    opened: u32,
}

impl Breaker {
    pub(super) fn new(config: BreakerConfig) -> Self {
        Self {
            config,
            state: State::Closed { failures: 0 },
            opened: 0,
        }
    }

    pub(super) fn permit(&self, now: f64) -> Permit {
        match self.state {
            State::Closed { .. } => Permit::Any,
            State::Open { until } if now >= until => Permit::Trial,
            State::Open { .. } => Permit::None,
        }
    }

    /// Time of the next trial, if it is open.
    pub(super) fn opens_until(&self) -> Option<f64> {
        match self.state {
            State::Closed { .. } => None,
            State::Open { until } => Some(until),
        }
    }

    /// Closes it: one success is enough.
    pub(super) fn succeeded(&mut self) {
        self.state = State::Closed { failures: 0 };
        self.opened = 0;
    }

    /// Counts a failure; whether it has opened the breaker. Failures of attempts that began before
    /// it opened do not count twice.
    pub(super) fn failed(&mut self, now: f64) -> bool {
        match &mut self.state {
            State::Closed { failures } => {
                *failures += 1;
                if *failures < self.config.failures {
                    return false;
                }
                self.trip(now);
                true
            }
            State::Open { until } if now >= *until => {
                self.trip(now);
                true
            }
            State::Open { .. } => false,
        }
    }

    /// Opens it at once, for twice as long as the last time.
    pub(super) fn trip(&mut self, now: f64) {
        let open_s = self.config.open_s * f64::from(1u32 << self.opened.min(16));
        self.opened += 1;
        self.state = State::Open {
            until: now + open_s.min(self.config.max_open_s),
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_opens_tries_and_closes() {
        let mut b = Breaker::new(BreakerConfig {
            failures: 2,
            open_s: 1.0,
            max_open_s: 3.0,
        });
        assert!(!b.failed(0.0));
        assert_eq!(b.permit(0.0), Permit::Any);
        assert!(b.failed(0.0));
        assert_eq!(
            (b.permit(0.5), b.permit(1.0)),
            (Permit::None, Permit::Trial)
        );
        assert!(!b.failed(0.5), "late news of the same trouble");
        assert!(b.failed(1.0));
        assert_eq!(
            (b.permit(2.9), b.permit(3.0)),
            (Permit::None, Permit::Trial)
        );
        assert!(b.failed(3.0));
        assert_eq!(b.opens_until(), Some(6.0), "no longer than the limit");
        b.succeeded();
        assert_eq!(b.permit(3.0), Permit::Any);
        assert!(!b.failed(3.0));
    }
}
