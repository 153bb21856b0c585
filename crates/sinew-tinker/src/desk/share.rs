//! The order in which sample requests go to the engine, as a pure state machine.
//!
//! The engine mixes all requests that it has; this queue bounds them, and gives the next place to the tenant
//! with the fewest sequences at the engine. A large request that does not fit holds the others back until it
//! does, so that small ones cannot pass it forever.

use super::types::RequestId;
use std::collections::{BTreeMap, VecDeque};

#[derive(Clone, Debug, Default)]
struct Queue {
    waiting: VecDeque<(RequestId, u64)>,
    /// Sequences at the engine.
    flying: u64,
    /// When it last got a place, as a count of places.
    turn: u64,
}

/// State of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    /// At the engine.
    Flying,
    /// It waits for its tenant's turn.
    Waiting,
    /// Not here.
    Unknown,
}

/// All sample requests.
#[derive(Clone, Debug)]
pub(super) struct Share {
    capacity: u64,
    queues: BTreeMap<String, Queue>,
    /// Tenant and sequences of each request at the engine.
    flying: BTreeMap<RequestId, (String, u64)>,
    turns: u64,
}

impl Share {
    /// A queue for an engine that takes `capacity` sequences at once.
    pub(super) fn new(capacity: u64) -> Self {
        Self {
            capacity: capacity.max(1),
            queues: BTreeMap::new(),
            flying: BTreeMap::new(),
            turns: 0,
        }
    }

    /// Adds a request.
    pub(super) fn enter(&mut self, tenant: &str, request: RequestId, sequences: u64) {
        let queue = self.queues.entry(tenant.to_owned()).or_default();
        queue.waiting.push_back((request, sequences.max(1)));
    }

    /// The request that goes to the engine next, if one fits.
    pub(super) fn next(&mut self) -> Option<RequestId> {
        let used: u64 = self.queues.values().map(|queue| queue.flying).sum();
        let waiting = self
            .queues
            .iter_mut()
            .filter(|(_, q)| !q.waiting.is_empty());
        let (tenant, queue) = waiting.min_by_key(|(_, q)| (q.flying, q.turn))?;
        let (_, sequences) = queue.waiting.front()?;
        if used > 0 && used + sequences > self.capacity {
            return None;
        }
        let (request, sequences) = queue.waiting.pop_front()?;
        self.turns += 1;
        queue.turn = self.turns;
        queue.flying += sequences;
        let owner = (tenant.clone(), sequences);
        self.flying.insert(request.clone(), owner);
        Some(request)
    }

    /// A request has left the engine.
    pub(super) fn done(&mut self, request: &RequestId) {
        let Some((tenant, sequences)) = self.flying.remove(request) else {
            return;
        };
        let Some(queue) = self.queues.get_mut(&tenant) else {
            return;
        };
        queue.flying = queue.flying.saturating_sub(sequences);
        if queue.flying == 0 && queue.waiting.is_empty() {
            self.queues.remove(&tenant);
        }
    }

    /// Removes a request that waits.
    pub(super) fn cancel(&mut self, request: &RequestId) {
        self.queues.retain(|_, queue| {
            queue.waiting.retain(|(own, _)| own != request);
            queue.flying > 0 || !queue.waiting.is_empty()
        });
    }

    /// The place of a request.
    pub(super) fn place(&self, request: &RequestId) -> Place {
        if self.flying.contains_key(request) {
            return Place::Flying;
        }
        let mut all = self.queues.values().flat_map(|queue| &queue.waiting);
        if all.any(|(own, _)| own == request) {
            Place::Waiting
        } else {
            Place::Unknown
        }
    }

    /// Whether other tenants have requests at the engine.
    pub(super) fn is_shared(&self, tenant: &str) -> bool {
        let mut others = self.flying.values();
        others.any(|(owner, _)| owner != tenant)
    }

    /// Requests at the engine.
    pub(super) fn flying(&self) -> usize {
        self.flying.len()
    }

    /// Requests that wait.
    pub(super) fn waiting(&self) -> usize {
        self.queues.values().map(|queue| queue.waiting.len()).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn id(text: &str) -> RequestId {
        RequestId::from(text)
    }

    #[test]
    fn a_tenant_with_few_sequences_goes_first() {
        let mut share = Share::new(3);
        for i in 0..10 {
            share.enter("ann", id(&format!("a{i}")), 1);
        }
        assert_eq!(share.next(), Some(id("a0")));
        share.enter("bob", id("b0"), 1);
        assert_eq!(share.next(), Some(id("b0")));
        assert_eq!(share.next(), Some(id("a1")));
        assert_eq!(share.next(), None);
        assert_eq!(share.place(&id("a2")), Place::Waiting);
        share.done(&id("a0"));
        assert_eq!(share.next(), Some(id("a2")));
        share.cancel(&id("a2"));
        assert_eq!(share.place(&id("a2")), Place::Flying);
        share.cancel(&id("a9"));
        assert_eq!(share.place(&id("a9")), Place::Unknown);
    }

    #[test]
    fn a_request_above_the_capacity_runs_by_itself() {
        let mut share = Share::new(4);
        share.enter("ann", id("small"), 1);
        share.enter("ann", id("large"), 64);
        assert_eq!(share.next(), Some(id("small")));
        assert_eq!(share.next(), None);
        share.done(&id("small"));
        assert_eq!(share.next(), Some(id("large")));
        assert_eq!((share.flying(), share.waiting()), (1, 0));
    }

    proptest! {
        #[test]
        fn all_run_once_within_the_capacity(
            requests in prop::collection::vec((0usize..4, 1u64..9), 1..60),
            capacity in 1u64..12,
        ) {
            let mut share = Share::new(capacity);
            let mut sizes = BTreeMap::new();
            for (i, (tenant, sequences)) in requests.iter().enumerate() {
                let request = id(&i.to_string());
                share.enter(&format!("t{tenant}"), request.clone(), *sequences);
                sizes.insert(request, *sequences);
            }
            let mut flying: Vec<RequestId> = Vec::new();
            let mut ran = 0;
            while ran < requests.len() {
                match share.next() {
                    Some(request) => {
                        flying.push(request);
                        let used: u64 = flying.iter().map(|r| sizes[r]).sum();
                        prop_assert!(used <= capacity || flying.len() == 1);
                    }
                    None => {
                        prop_assert!(!flying.is_empty());
                        share.done(&flying.remove(0));
                        ran += 1;
                    }
                }
                if share.waiting() == 0 && flying.is_empty() {
                    break;
                }
            }
            prop_assert_eq!(ran, requests.len());
        }
    }
}
