//! Places in browsers as a state machine: events in, decisions out. It knows no process and no clock.
//!
//! A browser serves several episodes at once, each in a context of its own. It is retired after a number of
//! episodes, since browsers grow, and replaced after a crash.
//!
//! Invariants, which a property test holds:
//! - There are never more than `browsers` browsers, nor more than `pages` episodes in one.
//! - A browser that is retired or dead gets no episode.
//! - Every place that is given is given back once.

use std::collections::BTreeMap;

/// Number of a browser; never used again for another one.
pub(super) type BrowserId = u64;

/// Limits.
#[derive(Clone, Copy, Debug)]
pub(super) struct SlotLimits {
    /// Browsers at once.
    pub(super) browsers: usize,
    /// Episodes at once in a browser.
    pub(super) pages: usize,
    /// Episodes after which a browser is retired.
    pub(super) episodes: u64,
}

/// Phase of a browser.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// It does not answer yet.
    Starting,
    /// It gets episodes.
    Ready,
    /// It gets no more episodes, and ends with its last one.
    Retired,
}

/// One browser.
#[derive(Clone, Copy, Debug)]
struct Slot {
    /// Its phase.
    state: State,
    /// Episodes that it runs now.
    live: usize,
    /// Episodes that it was given.
    served: u64,
}

/// Where an episode goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    /// Into this browser, whose place is taken.
    In(BrowserId),
    /// Start a browser of this number, then ask again.
    Start(BrowserId),
    /// Nowhere until a place is given back or a browser is ready.
    Wait,
}

/// The places of a pool.
#[derive(Debug)]
pub(super) struct Slots {
    /// Limits of the pool.
    limits: SlotLimits,
    /// Number of the next browser.
    next: BrowserId,
    /// Those that start or run.
    browsers: BTreeMap<BrowserId, Slot>,
}

impl Slots {
    /// No browsers yet.
    pub(super) fn new(limits: SlotLimits) -> Self {
        Self {
            limits,
            next: 0,
            browsers: BTreeMap::new(),
        }
    }

    /// A place for an episode: in the browser with the fewest. A browser more comes before a second episode
    /// in one.
    pub(super) fn place(&mut self) -> Place {
        let limits = self.limits;
        let open = |s: &Slot| s.state == State::Ready && s.live < limits.pages;
        let ready = self.browsers.iter().filter(|(_, slot)| open(slot));
        let best = ready.map(|(id, slot)| (slot.live, *id)).min();
        let may_start = self.browsers.len() < limits.browsers;
        let starting = self.browsers.values().any(|s| s.state == State::Starting);
        match best {
            Some((live, _)) if live > 0 && may_start && !starting => Place::Start(self.begin()),
            None if may_start => Place::Start(self.begin()),
            None => Place::Wait,
            Some((_, id)) => {
                if let Some(slot) = self.browsers.get_mut(&id) {
                    slot.live += 1;
                    slot.served += 1;
                    if slot.served >= limits.episodes {
                        slot.state = State::Retired;
                    }
                }
                Place::In(id)
            }
        }
    }

    /// A number for a browser that is to be started.
    fn begin(&mut self) -> BrowserId {
        let id = self.next;
        self.next += 1;
        let slot = Slot {
            state: State::Starting,
            live: 0,
            served: 0,
        };
        self.browsers.insert(id, slot);
        id
    }

    /// A browser answers.
    pub(super) fn started(&mut self, id: BrowserId) {
        if let Some(slot) = self.browsers.get_mut(&id) {
            slot.state = State::Ready;
        }
    }

    /// A browser did not start, or is dead: its place is free for another one.
    pub(super) fn gone(&mut self, id: BrowserId) {
        self.browsers.remove(&id);
    }

    /// An episode ended. Returns true if its browser is to be ended with it.
    pub(super) fn given_back(&mut self, id: BrowserId) -> bool {
        let Some(slot) = self.browsers.get_mut(&id) else {
            return false;
        };
        slot.live = slot.live.saturating_sub(1);
        let over = slot.state == State::Retired && slot.live == 0;
        if over {
            self.browsers.remove(&id);
        }
        over
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const LIMITS: SlotLimits = SlotLimits {
        browsers: 3,
        pages: 2,
        episodes: 5,
    };

    proptest! {
        #[test]
        fn places_stay_within_their_limits(events in prop::collection::vec(0u8..4, 1..300)) {
            let mut slots = Slots::new(LIMITS);
            let (mut starting, mut held, mut dead) = (Vec::new(), Vec::new(), Vec::new());
            let mut served: BTreeMap<BrowserId, u64> = BTreeMap::new();
            for event in events {
                match event {
                    0 => match slots.place() {
                        Place::Start(id) => starting.push(id),
                        Place::In(id) => {
                            prop_assert!(!dead.contains(&id) && !starting.contains(&id));
                            held.push(id);
                            *served.entry(id).or_default() += 1;
                        }
                        Place::Wait => prop_assert_eq!(slots.browsers.len(), LIMITS.browsers),
                    },
                    1 => {
                        if let Some(id) = starting.pop() {
                            slots.started(id);
                        }
                    }
                    2 => {
                        if let Some(id) = held.pop()
                            && slots.given_back(id)
                        {
                            dead.push(id);
                        }
                    }
                    _ => {
                        if let Some(id) = held.first().copied() {
                            slots.gone(id);
                            dead.push(id);
                            held.retain(|h| *h != id);
                        }
                    }
                }
                prop_assert!(slots.browsers.len() <= LIMITS.browsers);
                prop_assert!(slots.browsers.values().all(|s| s.live <= LIMITS.pages));
                let live: usize = slots.browsers.values().map(|s| s.live).sum();
                prop_assert_eq!(live, held.len());
                prop_assert!(served.values().all(|n| *n <= LIMITS.episodes));
            }
        }
    }

    #[test]
    fn browsers_share_the_load_and_are_replaced() {
        let mut slots = Slots::new(LIMITS);
        assert_eq!(slots.place(), Place::Start(0));
        slots.started(0);
        assert_eq!(slots.place(), Place::In(0));
        assert_eq!(slots.place(), Place::Start(1));
        slots.started(1);
        assert_eq!(slots.place(), Place::In(1));
        slots.gone(0);
        assert_eq!(slots.place(), Place::Start(2));
        // The place of the dead one was not given back twice.
        assert!(!slots.given_back(0));
    }
}
