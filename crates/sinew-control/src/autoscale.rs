//! The number of roles of a kind that is worth its price: pure, from what the roles report.
//!
//! More are wanted while work waits. Fewer are wanted when roles were idle for a time, and when the work of
//! that time would have fitted into fewer: where work is spread evenly, as a router does, no role is ever
//! idle. A change is followed by a pause, so that its effect is seen first: roles that start do not count as
//! too few.

/// Share of the capacity of the roles that stay which the work of a time may fill for others to be ended.
const FILL: f64 = 0.7;

/// Bounds and habits of one kind.
#[derive(Clone, Debug, PartialEq)]
pub struct AutoscaleLimits {
    /// Least and most roles.
    pub min: u32,
    /// Most roles.
    pub max: u32,
    /// Waiting work for each unit of capacity above which more roles are wanted; above 0.
    pub queue: f64,
    /// Seconds without work, or with work for fewer roles, after which a role is too many.
    pub idle_s: f64,
    /// Pause after a change.
    pub cooldown_ms: u64,
    /// Price of one role for an hour.
    pub price_per_hour: f64,
    /// Most that all roles of the kind may cost in an hour; `None`: any price.
    pub max_cost_per_hour: Option<f64>,
}

/// The roles of one kind at a moment.
#[derive(Clone, Debug, PartialEq)]
pub struct AutoscaleInputs {
    /// Any clock that only grows.
    pub now_ms: u64,
    /// Wanted count.
    pub wanted: u32,
    /// Roles that may get work.
    pub ready: u32,
    /// Work that all ready roles can do at a time.
    pub capacity: u32,
    /// Work in progress.
    pub busy: u32,
    /// Work that waits, with the roles and before them.
    pub queued: u32,
    /// Seconds without work, of each ready role.
    pub idle_s: Vec<f64>,
}

/// Decides for one kind.
#[derive(Clone, Debug, Default)]
pub struct Autoscaler {
    changed_ms: Option<u64>,
    spare: Option<Spare>,
}

/// A time in which fewer roles would have been enough.
#[derive(Clone, Copy, Debug)]
struct Spare {
    since_ms: u64,
    /// Roles that its work needed at most.
    needed: u32,
}

impl Autoscaler {
    /// The count that is wanted from now on; `None`: no change.
    pub fn decide(&mut self, limits: &AutoscaleLimits, now: &AutoscaleInputs) -> Option<u32> {
        let most = limits.most();
        let least = limits.min.min(most);
        let pausing = self
            .changed_ms
            .is_some_and(|at| now.now_ms.saturating_sub(at) < limits.cooldown_ms);
        // Bounds hold at once.
        let bounded = now.wanted.clamp(least, most);
        let enough = self.enough(limits, now);
        let next = if bounded != now.wanted || pausing {
            bounded
        } else {
            wanted(limits, now).min(enough).clamp(least, most)
        };
        if next == now.wanted {
            return None;
        }
        self.changed_ms = Some(now.now_ms);
        self.spare = None;
        Some(next)
    }

    /// The roles into which the work of the last `idle_s` would have fitted; without such a time, any number.
    fn enough(&mut self, limits: &AutoscaleLimits, now: &AutoscaleInputs) -> u32 {
        let each = now.each() * FILL;
        let work = f64::from(now.busy) + f64::from(now.queued);
        // The bound of a cast is the count that it should be.
        let needed = (work / each).ceil() as u32;
        if now.ready < now.wanted || needed >= now.wanted {
            self.spare = None;
            return u32::MAX;
        }
        let spare = self.spare.get_or_insert(Spare {
            since_ms: now.now_ms,
            needed,
        });
        spare.needed = spare.needed.max(needed);
        let lasted_s = now.now_ms.saturating_sub(spare.since_ms) as f64 / 1000.0;
        if lasted_s < limits.idle_s {
            return u32::MAX;
        }
        spare.needed
    }
}

impl AutoscaleInputs {
    /// Work that one role can do at a time.
    fn each(&self) -> f64 {
        let each = f64::from(self.capacity) / f64::from(self.ready.max(1));
        if each > 0.0 { each } else { 1.0 }
    }
}

impl AutoscaleLimits {
    /// Most roles, with their price.
    fn most(&self) -> u32 {
        let affordable = match self.max_cost_per_hour {
            Some(cost) if self.price_per_hour > 0.0 => cost / self.price_per_hour,
            _ => f64::from(u32::MAX),
        };
        // The bound of a cast is the count that it should be.
        self.max.min(affordable.max(0.0) as u32)
    }
}

/// The count that the work asks for.
fn wanted(limits: &AutoscaleLimits, now: &AutoscaleInputs) -> u32 {
    let starting = now.wanted.saturating_sub(now.ready);
    let each = now.each();
    let room = f64::from(now.capacity.saturating_sub(now.busy)) + f64::from(starting) * each;
    let waiting = f64::from(now.queued) - room;
    let allowed = limits.queue * (f64::from(now.capacity) + f64::from(starting) * each);
    if waiting > allowed.max(0.0) {
        // At most twice as many at a time: the queue may be a burst.
        let more = (waiting / (each * (1.0 + limits.queue))).ceil().max(1.0) as u32;
        return now.wanted.saturating_add(more.min(now.wanted.max(1)));
    }
    if now.queued == 0 && starting == 0 {
        let idle = now
            .idle_s
            .iter()
            .filter(|idle| **idle >= limits.idle_s)
            .count();
        let idle = u32::try_from(idle).unwrap_or(u32::MAX);
        return now.wanted.saturating_sub(idle);
    }
    now.wanted
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn limits() -> AutoscaleLimits {
        AutoscaleLimits {
            min: 1,
            max: 10,
            queue: 0.5,
            idle_s: 60.0,
            cooldown_ms: 1000,
            price_per_hour: 2.0,
            max_cost_per_hour: None,
        }
    }

    fn busy(wanted: u32, queued: u32) -> AutoscaleInputs {
        AutoscaleInputs {
            now_ms: 0,
            wanted,
            ready: wanted,
            capacity: wanted * 4,
            busy: wanted * 4,
            queued,
            idle_s: vec![0.0; wanted as usize],
        }
    }

    #[test]
    fn waiting_work_wants_more_up_to_twice_as_many() {
        let decide = |inputs| Autoscaler::default().decide(&limits(), &inputs);
        assert_eq!(decide(busy(2, 4)), None);
        assert_eq!(decide(busy(2, 5)), Some(3));
        assert_eq!(decide(busy(2, 1000)), Some(4));
        assert_eq!(decide(busy(8, 1000)), Some(10));
    }

    #[test]
    fn roles_that_start_are_waited_for() {
        let mut inputs = busy(2, 9);
        inputs.wanted = 4;
        assert_eq!(Autoscaler::default().decide(&limits(), &inputs), None);
    }

    #[test]
    fn idle_roles_are_given_back_down_to_the_least() {
        let mut inputs = busy(4, 0);
        (inputs.busy, inputs.idle_s) = (1, vec![0.0, 61.0, 90.0, 59.0]);
        assert_eq!(Autoscaler::default().decide(&limits(), &inputs), Some(2));
        inputs.idle_s = vec![99.0; 4];
        assert_eq!(Autoscaler::default().decide(&limits(), &inputs), Some(1));
        inputs.queued = 1;
        assert_eq!(Autoscaler::default().decide(&limits(), &inputs), None);
    }

    #[test]
    fn work_that_is_spread_evenly_and_fits_into_fewer_roles_ends_the_others() {
        let mut scaler = Autoscaler::default();
        let at = |now_ms, busy| AutoscaleInputs {
            now_ms,
            wanted: 6,
            busy,
            ..self::busy(6, 0)
        };
        // Eight of 24 places are taken: three roles at 0.7 of theirs. A peak needs one more.
        assert_eq!(scaler.decide(&limits(), &at(0, 8)), None);
        assert_eq!(scaler.decide(&limits(), &at(30_000, 11)), None);
        assert_eq!(scaler.decide(&limits(), &at(59_999, 8)), None);
        assert_eq!(scaler.decide(&limits(), &at(60_000, 8)), Some(4));
        // A moment with work for all of them begins the time anew.
        let mut scaler = Autoscaler::default();
        assert_eq!(scaler.decide(&limits(), &at(0, 8)), None);
        assert_eq!(scaler.decide(&limits(), &at(30_000, 20)), None);
        assert_eq!(scaler.decide(&limits(), &at(60_000, 8)), None);
        assert_eq!(scaler.decide(&limits(), &at(119_999, 8)), None);
        assert_eq!(scaler.decide(&limits(), &at(120_000, 8)), Some(3));
    }

    #[test]
    fn a_change_is_followed_by_a_pause_but_for_the_bounds() {
        let mut scaler = Autoscaler::default();
        assert_eq!(scaler.decide(&limits(), &busy(2, 9)), Some(4));
        let later = |now_ms, wanted| AutoscaleInputs {
            now_ms,
            ..busy(wanted, 100)
        };
        assert_eq!(scaler.decide(&limits(), &later(999, 4)), None);
        assert_eq!(scaler.decide(&limits(), &later(999, 12)), Some(10));
        assert_eq!(scaler.decide(&limits(), &later(2000, 4)), Some(8));
    }

    #[test]
    fn the_price_bounds_the_count() {
        let poor = AutoscaleLimits {
            max_cost_per_hour: Some(7.0),
            ..limits()
        };
        assert_eq!(Autoscaler::default().decide(&poor, &busy(2, 1000)), Some(3));
        assert_eq!(Autoscaler::default().decide(&poor, &busy(5, 0)), Some(3));
    }

    proptest! {
        #[test]
        fn counts_stay_in_their_bounds(
            wanted in 0u32..40, ready in 0u32..40, capacity in 0u32..400, busy in 0u32..500,
            queued in 0u32..5000, idle in proptest::collection::vec(0.0f64..200.0, 0..40),
        ) {
            let inputs = AutoscaleInputs {
                now_ms: 5, wanted, ready, capacity, busy, queued, idle_s: idle,
            };
            if let Some(next) = Autoscaler::default().decide(&limits(), &inputs) {
                prop_assert!((1..=10).contains(&next) && next != wanted);
            } else {
                prop_assert!((1..=10).contains(&wanted));
            }
        }
    }
}
