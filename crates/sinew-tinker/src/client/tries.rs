//! The schedule of requests that are repeated, as the SDK repeats them: pure, without a clock.
//!
//! | what happened | what follows |
//! |---|---|
//! | no connection, or it broke | again, after 0.25 s, 0.5 s, ... up to 30 s |
//! | 408, 425, 429, 500 or more | the same, or after the time that the server names, up to 60 s |
//! | 402 (the account has to be paid) | again after 5 s |
//! | 409, and 400 without a text (a proxy's) | again, three times |
//! | any other status | no further attempt |

use sinew_http::Retry;
use std::time::Duration;

/// Pauses after attempts that may pass.
const GROWING: Retry = Retry::doubling(
    u32::MAX,
    Duration::from_millis(250),
    Duration::from_secs(30),
);
/// Longest pause that a server may name.
const LONGEST_NAMED: Duration = Duration::from_secs(60);
/// Pause while the account has to be paid.
const UNPAID: Duration = Duration::from_secs(5);
/// Further attempts after a refusal that may be a proxy's, or of a state that passes.
const DOUBTFUL: u32 = 3;

/// The end of an attempt that was not a success.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// The connection failed, or the answer did not come in time.
    Connection,
    /// An answer.
    Status {
        /// The HTTP status.
        status: u16,
        /// Pause that the server asks for.
        retry_after: Option<Duration>,
        /// Whether it has no text.
        is_empty: bool,
    },
}

/// Attempts at one request.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Tries {
    connections: u32,
    statuses: u32,
    doubtful: u32,
}

impl Tries {
    /// The pause before the next attempt; `None`: it would fail as well.
    pub(crate) fn pause(&mut self, fault: Fault) -> Option<Duration> {
        let Fault::Status {
            status,
            retry_after,
            is_empty,
        } = fault
        else {
            self.connections += 1;
            return GROWING.pause(self.connections, None);
        };
        // An answer of any kind shows that the connection works.
        self.connections = 0;
        match status {
            402 => Some(UNPAID),
            408 | 425 | 429 | 500.. => {
                self.statuses += 1;
                let named = retry_after.map(|pause| pause.min(LONGEST_NAMED));
                named.or_else(|| GROWING.pause(self.statuses, None))
            }
            409 => self.doubtful(),
            400 if is_empty => self.doubtful(),
            _ => None,
        }
    }

    fn doubtful(&mut self) -> Option<Duration> {
        self.doubtful += 1;
        let pause = GROWING.pause(self.doubtful, None);
        pause.filter(|_| self.doubtful <= DOUBTFUL)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status(status: u16) -> Fault {
        Fault::Status {
            status,
            retry_after: None,
            is_empty: false,
        }
    }

    #[test]
    fn pauses_grow_until_the_server_answers() {
        let mut tries = Tries::default();
        let mut lost = || tries.pause(Fault::Connection).unwrap().as_millis();
        assert_eq!([lost(), lost(), lost()], [250, 500, 1000]);
        for _ in 0..20 {
            lost();
        }
        assert_eq!(lost(), 30_000);
        assert!(tries.pause(status(503)).is_some());
        assert_eq!(
            tries.pause(Fault::Connection),
            Some(Duration::from_millis(250))
        );
    }

    #[test]
    fn a_server_may_name_the_pause() {
        let mut tries = Tries::default();
        let named = |seconds| Fault::Status {
            status: 429,
            retry_after: Some(Duration::from_secs(seconds)),
            is_empty: false,
        };
        assert_eq!(tries.pause(named(7)), Some(Duration::from_secs(7)));
        assert_eq!(tries.pause(named(900)), Some(Duration::from_secs(60)));
    }

    #[test]
    fn refusals_last_and_doubtful_ones_are_repeated_a_few_times() {
        for lasting in [400, 401, 403, 404, 410, 413, 422] {
            assert_eq!(Tries::default().pause(status(lasting)), None, "{lasting}");
        }
        let proxy = Fault::Status {
            status: 400,
            retry_after: None,
            is_empty: true,
        };
        for doubtful in [status(409), proxy] {
            let mut tries = Tries::default();
            let pauses: Vec<_> = (0..4).map(|_| tries.pause(doubtful).is_some()).collect();
            assert_eq!(pauses, [true, true, true, false]);
        }
        let mut unpaid = Tries::default();
        assert!((0..100).all(|_| unpaid.pause(status(402)) == Some(UNPAID)));
    }
}
