//! The core with a real queue, workers that die at any call, and an owner that is replaced.

use super::*;
use crate::samples::{ticket, trace};
use crate::ticket::{OWNER, ROLLOUT, owner_consumer, ran, rollout_consumer, trace_of};
use proptest::prelude::*;
use sinew_store::StoreError;
use sinew_store::queue::{
    LeaseId, MemoryQueue, Queue, QueueError, QueueLimits, RowRequest, RowSelection, RowState,
    Sample,
};

const TTL_MS: u64 = 10;
const LIMIT: usize = 3;
const ATTEMPTS: u32 = 3;

/// A worker's or the owner's next act.
#[derive(Clone, Copy, Debug)]
enum Act {
    /// The core begins an episode.
    Start,
    /// Due tickets become rows.
    Put,
    /// A worker leases a row.
    Lease,
    /// The oldest leased row gets its trace, whether or not the lease still holds.
    Ack,
    /// A worker brings a trace that cannot be used.
    Spoil,
    /// A worker returns a row.
    Release,
    /// All leases end.
    Expire,
    /// The owner stops an episode.
    Cancel(u64),
    /// The owner takes traces, and gives up dead rows.
    Take,
    /// Another owner continues.
    Replace,
}

fn act() -> impl Strategy<Value = Act> {
    prop_oneof![
        3 => Just(Act::Start),
        3 => Just(Act::Put),
        4 => Just(Act::Lease),
        4 => Just(Act::Ack),
        1 => Just(Act::Spoil),
        1 => Just(Act::Release),
        2 => Just(Act::Expire),
        2 => (0..12u64).prop_map(Act::Cancel),
        4 => Just(Act::Take),
        1 => Just(Act::Replace),
    ]
}

/// Owner, queue and workers.
struct World {
    queue: MemoryQueue,
    core: TicketCore,
    now_ms: u64,
    begun: u64,
    /// Leases of workers, also of dead ones, which may still bring a trace.
    held: VecDeque<(LeaseId, Ticket)>,
    /// Ends of the episodes of the present owner.
    accepted: Vec<EpisodeId>,
    failed: Vec<EpisodeId>,
    cancelled: Vec<EpisodeId>,
    started: Vec<EpisodeId>,
}

impl World {
    fn new() -> Self {
        let queue = MemoryQueue::in_memory(QueueLimits {
            max_attempts: ATTEMPTS,
            ..QueueLimits::default()
        });
        queue.join(&rollout_consumer()).unwrap();
        queue.join(&owner_consumer()).unwrap();
        Self {
            queue,
            core: TicketCore::new(1, LIMIT),
            now_ms: 0,
            begun: 0,
            held: VecDeque::new(),
            accepted: Vec::new(),
            failed: Vec::new(),
            cancelled: Vec::new(),
            started: Vec::new(),
        }
    }

    fn ask(consumer: &str) -> RowRequest {
        RowRequest {
            consumer: consumer.into(),
            holder: "w".into(),
            ttl_ms: TTL_MS,
            take: RowSelection::Sample(Sample::rows(1)),
        }
    }

    fn act(&mut self, act: Act) {
        match act {
            Act::Start => {
                let ticket = ticket(0, self.begun);
                self.begun += 1;
                self.started.push(ticket.episode.clone());
                self.core.start(ticket);
            }
            Act::Put => {
                let rows: Vec<_> = self.core.due().iter().map(|t| t.row().unwrap()).collect();
                self.queue.put(&rows).unwrap();
            }
            Act::Lease => {
                let batch = self.queue.lease(&Self::ask(ROLLOUT), self.now_ms).unwrap();
                for row in batch.rows {
                    let ticket = Ticket::of_row(&row).unwrap();
                    self.held.push_back((batch.lease.unwrap(), ticket));
                }
            }
            Act::Ack | Act::Spoil => {
                let Some((lease, ticket)) = self.held.pop_front() else {
                    return;
                };
                // Weights that were never published sampled a spoilt one.
                let version = if matches!(act, Act::Spoil) { 9 } else { 0 };
                let row = ran(&ticket.key(), &trace(&ticket, version)).unwrap();
                self.queue.ack(ROLLOUT, lease, &[row]).unwrap();
            }
            Act::Release => {
                if let Some((lease, ticket)) = self.held.pop_front() {
                    self.queue.release(ROLLOUT, lease, &[ticket.key()]).unwrap();
                }
            }
            Act::Expire => self.now_ms += 2 * TTL_MS,
            Act::Cancel(number) => {
                let episode = ticket(0, number).episode;
                let open = self.started.contains(&episode) && !self.ended(&episode);
                self.core.cancel(std::slice::from_ref(&episode));
                if open {
                    self.cancelled.push(episode);
                }
            }
            Act::Take => self.take(),
            Act::Replace => self.replace(),
        }
        self.sweep();
    }

    fn ended(&self, episode: &EpisodeId) -> bool {
        [&self.accepted, &self.failed, &self.cancelled]
            .into_iter()
            .any(|list| list.contains(episode))
    }

    /// Removes the rows of cancelled tickets that nobody holds.
    fn sweep(&mut self) {
        self.queue.sweep(usize::MAX, self.now_ms).unwrap();
        for key in self.core.cancelled().clone() {
            match self.queue.remove(std::slice::from_ref(&key)) {
                Ok(_) => self.core.removed(&key),
                Err(StoreError::Queue(QueueError::NotReady { .. })) => {}
                Err(e) => panic!("{e}"),
            }
        }
    }

    fn take(&mut self) {
        loop {
            let batch = self.queue.lease(&Self::ask(OWNER), self.now_ms).unwrap();
            let Some(lease) = batch.lease else { break };
            for row in batch.rows {
                let trace = trace_of(&row).unwrap();
                if let Some(ticket) = self.core.arrived(&row.key) {
                    match ticket.check(&trace, 0) {
                        Ok(()) => self.accepted.push(trace.episode),
                        Err(_) => {
                            let failed = self.core.refused(ticket);
                            self.failed.extend(failed.map(|t| t.episode));
                        }
                    }
                }
                let done = sinew_store::queue::AckedRow::of(row.key);
                self.queue.ack(OWNER, lease, &[done]).unwrap();
            }
        }
        let out: Vec<String> = self.core.out().cloned().collect();
        for key in out {
            let state = self.queue.state(ROLLOUT, &key).unwrap();
            if matches!(state, Some(RowState::Dead { .. })) {
                let ticket = self.core.given_up(&key).unwrap();
                self.failed.push(ticket.episode);
            }
        }
    }

    /// The next owner forgets the rows of this one, and begins its open episodes anew.
    fn replace(&mut self) {
        let fence = self.core.fence + 1;
        self.core = TicketCore::new(fence, LIMIT);
        let rows = self.queue.rows(None, usize::MAX).unwrap();
        let foreign = rows
            .iter()
            .filter(|r| !r.done && self.core.is_foreign(&r.key));
        let keys: Vec<String> = foreign.map(|r| r.key.clone()).collect();
        keys.into_iter().for_each(|key| self.core.disown(key));
        let open = self.started.clone();
        for episode in open
            .into_iter()
            .filter(|e| !self.ended(e))
            .collect::<Vec<_>>()
        {
            let number = sinew_orchestrator::draw_of(&episode).unwrap();
            self.core.start(ticket(0, number));
        }
    }

    /// Lets everything end, with workers that work.
    fn settle(&mut self) {
        for _ in 0..200 {
            for act in [Act::Put, Act::Lease, Act::Ack, Act::Take] {
                self.act(act);
            }
            if self.held.is_empty() {
                self.act(Act::Expire);
            }
        }
    }
}

proptest! {
    #[test]
    fn every_episode_ends_once_whoever_dies(acts in prop::collection::vec(act(), 1..120)) {
        let mut world = World::new();
        for act in acts {
            world.act(act);
            prop_assert!(world.core.counts().1 <= LIMIT);
        }
        world.settle();
        prop_assert!(!world.core.is_running(), "{:?}", world.core);
        prop_assert!(world.core.cancelled().is_empty());
        let mut ends: Vec<&EpisodeId> =
            world.accepted.iter().chain(&world.failed).chain(&world.cancelled).collect();
        ends.sort();
        let mut started: Vec<&EpisodeId> = world.started.iter().collect();
        started.sort();
        prop_assert_eq!(ends, started);
    }
}

#[test]
fn an_episode_whose_traces_are_all_refused_fails() {
    let mut core = TicketCore::new(1, 1);
    core.start(ticket(0, 0));
    let mut refusals = 0;
    loop {
        let due = core.due();
        let arrived = core.arrived(&due[0].key()).unwrap();
        refusals += 1;
        if core.refused(arrived).is_some() {
            break;
        }
    }
    assert_eq!(refusals, MAX_REFUSALS);
    assert!(!core.is_running());
}
