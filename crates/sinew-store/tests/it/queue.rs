//! The transfer queue: pure and on disk.

use proptest::prelude::*;
use sinew_store::{
    Delivery, DiskQueue, DiskStore, LeaseId, Put, QueueError, QueueLimits, QueueRow, RowState,
    StoreError, StoreOptions, TransferQueue,
};
use std::collections::BTreeMap;

const LIMITS: QueueLimits = QueueLimits {
    max_rows: 16,
    max_bytes: 1_000,
    max_attempts: 1_000,
};

#[derive(Clone, Debug)]
enum Event {
    Put(Vec<u8>),
    /// Consumer takes rows for some time.
    Lease {
        consumer: u8,
        rows: usize,
        ttl_ms: u64,
    },
    /// A consumer finishes what it holds, or the front half of it.
    Ack {
        consumer: u8,
        all: bool,
    },
    Release {
        consumer: u8,
    },
    Renew {
        consumer: u8,
    },
    Wait(u64),
    /// A consumer forgets what it held.
    Crash {
        consumer: u8,
    },
    Expire,
    /// The process with the queue starts anew.
    Restart,
}

fn event() -> impl Strategy<Value = Event> {
    let consumer = 0u8..3;
    prop_oneof![
        3 => prop::collection::vec(0u8..40, 1..6).prop_map(Event::Put),
        4 => (consumer.clone(), 1usize..5, 1u64..20)
            .prop_map(|(consumer, rows, ttl_ms)| Event::Lease { consumer, rows, ttl_ms }),
        4 => (consumer.clone(), any::<bool>())
            .prop_map(|(consumer, all)| Event::Ack { consumer, all }),
        1 => consumer.clone().prop_map(|consumer| Event::Release { consumer }),
        1 => consumer.clone().prop_map(|consumer| Event::Renew { consumer }),
        3 => (1u64..15).prop_map(Event::Wait),
        1 => consumer.prop_map(|consumer| Event::Crash { consumer }),
        1 => Just(Event::Expire),
        1 => Just(Event::Restart),
    ]
}

/// The disk queue, or the pure one behind the same calls.
trait Queue {
    fn put(&mut self, keys: &[String]) -> Result<Vec<Put>, QueueError>;
    fn lease(&mut self, name: &str, rows: usize, ttl: u64, now: u64) -> Vec<(LeaseId, String)>;
    fn ack(&mut self, lease: LeaseId, keys: &[String]) -> Result<usize, QueueError>;
    fn release(&mut self, lease: LeaseId, keys: &[String]) -> Result<usize, QueueError>;
    fn renew(&mut self, lease: LeaseId, keys: &[String], now: u64) -> Result<(), QueueError>;
    fn expire(&mut self, now: u64);
    fn restart(&mut self);
    fn live(&self) -> usize;
}

impl Queue for TransferQueue {
    fn put(&mut self, keys: &[String]) -> Result<Vec<Put>, QueueError> {
        let rows: Vec<_> = keys.iter().map(|k| (k.clone(), 10)).collect();
        TransferQueue::put(self, &rows)
    }
    fn lease(&mut self, name: &str, rows: usize, ttl: u64, now: u64) -> Vec<(LeaseId, String)> {
        let leased = TransferQueue::lease(self, name, rows, u64::MAX, ttl, now).unwrap();
        leased.into_iter().map(|l| (l.lease, l.key)).collect()
    }
    fn ack(&mut self, lease: LeaseId, keys: &[String]) -> Result<usize, QueueError> {
        TransferQueue::ack(self, lease, keys)
    }
    fn release(&mut self, lease: LeaseId, keys: &[String]) -> Result<usize, QueueError> {
        TransferQueue::release(self, lease, keys)
    }
    fn renew(&mut self, lease: LeaseId, keys: &[String], now: u64) -> Result<(), QueueError> {
        TransferQueue::renew(self, lease, keys, 10, now)
    }
    fn expire(&mut self, now: u64) {
        TransferQueue::expire(self, now);
    }
    fn restart(&mut self) {}
    fn live(&self) -> usize {
        let stats = self.stats();
        assert_eq!(stats.bytes, 10 * (stats.ready + stats.leased) as u64);
        stats.ready + stats.leased
    }
}

struct OnDisk {
    directory: tempfile::TempDir,
    open: Option<(DiskStore, DiskQueue)>,
}

impl OnDisk {
    fn new() -> Self {
        let mut new = Self {
            directory: tempfile::tempdir().unwrap(),
            open: None,
        };
        new.restart();
        new
    }
    fn queue(&self) -> &DiskQueue {
        &self.open.as_ref().unwrap().1
    }
}

fn refusal<T>(result: Result<T, StoreError>) -> Result<T, QueueError> {
    result.map_err(|e| match e {
        StoreError::Queue(e) => e,
        other => panic!("{other}"),
    })
}

impl Queue for OnDisk {
    fn put(&mut self, keys: &[String]) -> Result<Vec<Put>, QueueError> {
        let row = |key: &String| QueueRow {
            key: key.clone(),
            payload: format!("payload{key:>3}").into_bytes(),
        };
        let rows: Vec<_> = keys.iter().map(row).collect();
        refusal(self.queue().put(&rows))
    }
    fn lease(&mut self, name: &str, rows: usize, ttl: u64, now: u64) -> Vec<(LeaseId, String)> {
        let leased = self.queue().lease(name, rows, u64::MAX, ttl, now).unwrap();
        let check = |d: Delivery| {
            assert_eq!(d.payload, format!("payload{:>3}", d.row.key).into_bytes());
            (d.row.lease, d.row.key)
        };
        leased.into_iter().map(check).collect()
    }
    fn ack(&mut self, lease: LeaseId, keys: &[String]) -> Result<usize, QueueError> {
        refusal(self.queue().ack(lease, keys))
    }
    fn release(&mut self, lease: LeaseId, keys: &[String]) -> Result<usize, QueueError> {
        refusal(self.queue().release(lease, keys))
    }
    fn renew(&mut self, lease: LeaseId, keys: &[String], now: u64) -> Result<(), QueueError> {
        refusal(self.queue().renew(lease, keys, 10, now))
    }
    fn expire(&mut self, now: u64) {
        self.queue().expire(now).unwrap();
    }
    fn restart(&mut self) {
        self.open = None;
        let store = DiskStore::open(self.directory.path(), StoreOptions::default()).unwrap();
        let queue = store.queue("rows", LIMITS).unwrap();
        self.open = Some((store, queue));
    }
    fn live(&self) -> usize {
        let stats = self.queue().stats().unwrap();
        stats.ready + stats.leased
    }
}

/// Plays the events and then works off what is left. Returns how often each row was completed;
/// every row that was put must be, once.
fn play(queue: &mut dyn Queue, events: &[Event]) -> Result<(), TestCaseError> {
    let mut now = 0;
    let mut held: BTreeMap<u8, Vec<(LeaseId, String)>> = BTreeMap::new();
    let mut completed: BTreeMap<String, usize> = BTreeMap::new();
    for event in events {
        match event {
            Event::Put(numbers) => {
                let keys: Vec<_> = numbers.iter().map(u8::to_string).collect();
                if let Ok(put) = queue.put(&keys) {
                    for (key, _) in keys.iter().zip(put).filter(|(_, p)| *p == Put::New) {
                        prop_assert!(completed.insert(key.clone(), 0).is_none());
                    }
                }
            }
            Event::Lease {
                consumer,
                rows,
                ttl_ms,
            } => {
                let leased = queue.lease(&consumer.to_string(), *rows, *ttl_ms, now);
                held.entry(*consumer).or_default().extend(leased);
            }
            Event::Ack { consumer, all } => {
                let mut rows = held.remove(consumer).unwrap_or_default();
                if !all {
                    rows.truncate(rows.len() / 2);
                }
                for (lease, key) in rows {
                    if let Ok(1) = queue.ack(lease, std::slice::from_ref(&key)) {
                        *completed.entry(key).or_default() += 1;
                    }
                }
            }
            Event::Release { consumer } => {
                for (lease, key) in held.remove(consumer).unwrap_or_default() {
                    let _late = queue.release(lease, &[key]);
                }
            }
            Event::Renew { consumer } => {
                for (lease, key) in held.get(consumer).into_iter().flatten() {
                    let _late = queue.renew(*lease, std::slice::from_ref(key), now);
                }
            }
            Event::Wait(ms) => now += ms,
            Event::Crash { consumer } => drop(held.remove(consumer)),
            Event::Expire => queue.expire(now),
            Event::Restart => queue.restart(),
        }
        prop_assert!(queue.live() <= LIMITS.max_rows);
    }
    now += 1_000;
    while queue.live() > 0 {
        let leased = queue.lease("last", 3, 10, now);
        prop_assert!(!leased.is_empty(), "a row is stuck");
        for (lease, key) in leased {
            prop_assert_eq!(queue.ack(lease, std::slice::from_ref(&key)).unwrap(), 1);
            *completed.entry(key).or_default() += 1;
        }
    }
    for (key, times) in completed {
        prop_assert_eq!(times, 1, "row {}", key);
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn each_row_is_completed_exactly_once(events in prop::collection::vec(event(), 1..60)) {
        play(&mut TransferQueue::new(LIMITS), &events)?;
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    #[test]
    fn each_row_is_completed_exactly_once_on_disk(
        events in prop::collection::vec(event(), 1..40),
    ) {
        play(&mut OnDisk::new(), &events)?;
    }
}

#[test]
fn queues_of_one_store_are_apart_and_outlive_it() {
    let directory = tempfile::tempdir().unwrap();
    let open = || DiskStore::open(directory.path(), StoreOptions::default()).unwrap();
    let store = open();
    let a = store.queue("a", LIMITS).unwrap();
    let b = store.queue("b", LIMITS).unwrap();
    a.put(&[QueueRow::of("k", &1).unwrap()]).unwrap();
    b.put(&[QueueRow::of("k", &2).unwrap()]).unwrap();
    assert_eq!(
        a.lease("t", 1, 9, 1_000, 0).unwrap()[0]
            .decode::<i32>()
            .unwrap(),
        1
    );
    drop((a, b, store));
    let store = open();
    let a = store.queue("a", LIMITS).unwrap();
    assert!(
        a.lease("t", 1, 9, 10, 5).unwrap().is_empty(),
        "still leased"
    );
    let again = a.lease("t", 1, 9, 10, 1_001).unwrap();
    assert_eq!((again[0].row.attempt, again[0].row.lease), (2, LeaseId(1)));
    assert!(again[0].decode::<String>().is_err());
}

#[test]
fn rows_are_chosen_read_and_removed_by_key() {
    let directory = tempfile::tempdir().unwrap();
    let open = || DiskStore::open(directory.path(), StoreOptions::default()).unwrap();
    let store = open();
    let queue = store.queue("q", LIMITS).unwrap();
    let names = |n: &[&str]| n.iter().map(|k| (*k).to_owned()).collect::<Vec<_>>();
    let rows: Vec<_> = ["a", "b", "c"]
        .iter()
        .map(|k| QueueRow::of(*k, k).unwrap())
        .collect();
    queue.put(&rows).unwrap();
    let taken = queue.lease_keys("t", &names(&["c", "a"]), 10, 0).unwrap();
    let keys: Vec<_> = taken
        .iter()
        .map(|d| d.decode::<String>().unwrap())
        .collect();
    assert_eq!(keys, ["a", "c"]);
    // All or none, and not what another holds.
    for wrong in [names(&["b", "c"]), names(&["c"])] {
        let refused = queue.lease_keys("u", &wrong, 10, 5);
        assert!(matches!(
            refused,
            Err(StoreError::Queue(QueueError::NotReady { .. }))
        ));
        let refused = queue.remove(&wrong);
        assert!(matches!(
            refused,
            Err(StoreError::Queue(QueueError::NotReady { .. }))
        ));
    }
    assert_eq!(queue.state("b").unwrap(), Some(RowState::Ready));
    queue.ack(taken[0].row.lease, &names(&["a"])).unwrap();
    assert_eq!(
        queue.read::<String>("a").unwrap(),
        None,
        "acked: its payload is gone"
    );
    assert_eq!(queue.read::<String>("b").unwrap(), Some("b".into()));
    assert_eq!(queue.remove(&names(&["b"])).unwrap(), 1);
    drop((queue, store));
    let store = open();
    let queue = store.queue("q", LIMITS).unwrap();
    let rows = queue.rows().unwrap();
    let known: Vec<_> = rows.iter().map(|(k, _)| k.as_str()).collect();
    assert_eq!(known, ["a", "c"]);
    assert_eq!(queue.read::<String>("b").unwrap(), None);
    // A lease that ran out is taken back, and can be given to the next.
    let again = queue.lease_keys("u", &names(&["c"]), 10, 11).unwrap();
    assert_eq!(again[0].row.attempt, 2);
}
