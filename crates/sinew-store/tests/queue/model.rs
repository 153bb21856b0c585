//! Random uses of a queue compared with a small model of the allowed results.

use super::{LIMITS, Subject, consumer, random_subjects};
use proptest::prelude::*;
use proptest::test_runner::TestRunner;
use sinew_store::queue::{
    AckedRow, Field, LeaseId, NewRow, PutOutcome, QueueLimits, RowSelection, RowState, Sample,
};
use std::collections::{BTreeMap, BTreeSet};

#[derive(Clone, Debug)]
enum Event {
    Put(Vec<u8>),
    /// A holder of a consumer takes rows for some time.
    Lease(usize, usize, usize, u64, bool),
    /// A holder is done with what it has, or with the front half of it.
    Ack(usize, usize, bool),
    Release(usize, usize),
    Fail(usize, usize),
    /// A holder forgets what it had.
    Crash(usize, usize),
    Wait(u64),
    Restart,
}

fn event() -> impl Strategy<Value = Event> {
    let who = || (0..2usize, 0..3usize);
    prop_oneof![
        3 => prop::collection::vec(0u8..40, 1..6).prop_map(Event::Put),
        5 => (who(), 1usize..6, 1u64..20, any::<bool>())
            .prop_map(|((c, h), rows, ttl, whole)| Event::Lease(c, h, rows, ttl, whole)),
        5 => (who(), any::<bool>()).prop_map(|((c, h), all)| Event::Ack(c, h, all)),
        1 => who().prop_map(|(c, h)| Event::Release(c, h)),
        1 => who().prop_map(|(c, h)| Event::Fail(c, h)),
        1 => who().prop_map(|(c, h)| Event::Crash(c, h)),
        3 => (1u64..15).prop_map(Event::Wait),
        1 => Just(Event::Restart),
    ]
}

const NAMES: [&str; 2] = ["scorer", "trainer"];

/// Leases of a holder: lease, key, end.
type Held = Vec<(LeaseId, String, u64)>;

/// A queue and what is known of it.
struct World {
    subject: Subject,
    now: u64,
    /// Leases by consumer and holder.
    held: BTreeMap<(usize, usize), Held>,
    put: BTreeSet<String>,
    acked: [BTreeSet<String>; 2],
}

impl World {
    fn new(subject: Subject) -> Self {
        let queue = &subject.queue;
        queue
            .join(&consumer(NAMES[0], &["trace"], &["reward"], false))
            .unwrap();
        queue
            .join(&consumer(NAMES[1], &["trace", "reward"], &[], true))
            .unwrap();
        Self {
            subject,
            now: 0,
            held: BTreeMap::new(),
            put: BTreeSet::new(),
            acked: [BTreeSet::new(), BTreeSet::new()],
        }
    }

    fn lease(&mut self, c: usize, h: usize, sample: Sample, ttl: u64) -> Result<(), TestCaseError> {
        let loan = self
            .subject
            .lease(NAMES[c], RowSelection::Sample(sample), ttl, self.now);
        for row in loan.rows {
            prop_assert!(!self.acked[c].contains(&row.key), "{} came back", row.key);
            prop_assert!(
                c == 0 || self.acked[0].contains(&row.key),
                "{} has no score",
                row.key
            );
            for ((other, _), held) in &self.held {
                let live =
                    |(_, key, end): &&(LeaseId, String, u64)| *key == row.key && *end > self.now;
                prop_assert!(
                    *other != c || !held.iter().any(|r| live(&r)),
                    "{} has two holders",
                    row.key
                );
            }
            let held = self.held.entry((c, h)).or_default();
            held.push((loan.lease.unwrap(), row.key, loan.until_ms));
        }
        Ok(())
    }

    fn ack(&mut self, c: usize, rows: Held) -> Result<(), TestCaseError> {
        for (lease, key, end) in rows {
            let fields = match c {
                0 => vec![Field::new("reward", "1")],
                _ => Vec::new(),
            };
            let done = AckedRow {
                key: key.clone(),
                fields,
            };
            let settled = self.subject.queue.ack(NAMES[c], lease, &[done]).unwrap();
            prop_assert!(
                settled.lost.is_empty() || end <= self.now,
                "{} was held",
                key
            );
            if settled.changed == 1 {
                prop_assert!(self.acked[c].insert(key), "acked twice");
            }
        }
        Ok(())
    }

    fn play(&mut self, event: &Event) -> Result<(), TestCaseError> {
        match event {
            Event::Put(numbers) => {
                let rows: Vec<NewRow> = numbers.iter().map(new_row).collect();
                if let Ok(put) = self.subject.queue.put(&rows) {
                    for (row, _) in rows.iter().zip(put).filter(|(_, p)| *p == PutOutcome::New) {
                        prop_assert!(self.put.insert(row.key.clone()), "put twice");
                    }
                }
            }
            Event::Lease(c, h, rows, ttl, whole_groups) => {
                let sample = Sample {
                    whole_groups: *whole_groups,
                    ..Sample::rows(*rows)
                };
                self.lease(*c, *h, sample, *ttl)?;
            }
            Event::Ack(c, h, all) => {
                let mut rows = self.held.remove(&(*c, *h)).unwrap_or_default();
                if !all {
                    rows.truncate(rows.len() / 2);
                }
                self.ack(*c, rows)?;
            }
            Event::Release(c, h) | Event::Fail(c, h) => {
                for (lease, key, _) in self.held.remove(&(*c, *h)).unwrap_or_default() {
                    let queue = &self.subject.queue;
                    match event {
                        Event::Fail(..) => queue.fail(NAMES[*c], lease, &[key], "no").unwrap(),
                        _ => queue.release(NAMES[*c], lease, &[key]).unwrap(),
                    };
                }
            }
            Event::Crash(c, h) => drop(self.held.remove(&(*c, *h))),
            Event::Wait(ms) => self.now += ms,
            Event::Restart => self.subject.restart(),
        }
        self.check()
    }

    /// Checks the invariants.
    fn check(&self) -> Result<(), TestCaseError> {
        let stats = self.subject.queue.stats().unwrap();
        prop_assert!(stats.rows <= LIMITS.max_rows);
        prop_assert_eq!(stats.rows + stats.done, self.put.len(), "a row is lost");
        prop_assert_eq!(stats.done, self.acked[1].len());
        let rows = self.subject.queue.rows(None, 100).unwrap();
        let bytes: usize = rows
            .iter()
            .filter(|r| !r.done)
            .map(|r| 10 + usize::from(r.fields.len() > 1))
            .sum();
        prop_assert_eq!(stats.bytes, bytes as u64);
        for (c, name) in NAMES.iter().enumerate() {
            let of = stats.of(name);
            let sum = of.waiting + of.ready + of.leased + of.acked + of.dead;
            prop_assert_eq!(sum, self.put.len());
            let count = |ready: fn(&RowState) -> bool| {
                rows.iter()
                    .filter(|r| ready(r.state(name).unwrap()))
                    .count()
            };
            prop_assert_eq!(count(|s| *s == RowState::Ready), of.ready);
            prop_assert_eq!(count(|s| matches!(s, RowState::Dead { .. })), of.dead);
            prop_assert_eq!(of.acked, self.acked[c].len());
        }
        Ok(())
    }

    /// Works off what is left: every row that was put is acked by both, once.
    fn finish(&mut self) -> Result<(), TestCaseError> {
        let all: Vec<String> = self.put.iter().cloned().collect();
        for (c, name) in NAMES.iter().enumerate() {
            self.now += 1_000;
            self.subject.queue.sweep(usize::MAX, self.now).unwrap();
            self.subject.queue.revive(name, &all).unwrap();
            self.held.clear();
            self.lease(c, 0, Sample::rows(100), 10)?;
            let held = self.held.remove(&(c, 0)).unwrap_or_default();
            self.ack(c, held)?;
            prop_assert_eq!(&self.acked[c], &self.put);
        }
        self.check()
    }
}

/// A row in one of a few groups of two.
fn new_row(number: &u8) -> NewRow {
    NewRow {
        group: format!("g{}", number / 2 % 4),
        group_size: 2,
        ..NewRow::new(number.to_string(), Field::new("trace", vec![7; 10]))
    }
}

fn play(subject: Subject, events: &[Event]) -> Result<(), TestCaseError> {
    let mut world = World::new(subject);
    events.iter().try_for_each(|event| world.play(event))?;
    world.finish()
}

const ROOMY: QueueLimits = QueueLimits {
    max_bytes: 10_000,
    ..LIMITS
};

/// Runs `cases` random sequences of uses on each queue.
#[test]
fn no_row_is_lost_held_twice_or_acked_twice() {
    for (cases, subject) in random_subjects() {
        let mut runner = TestRunner::new(ProptestConfig::with_cases(cases));
        let events = prop::collection::vec(event(), 1..50);
        let played = runner.run(&events, |events| play(subject(ROOMY), &events));
        played.unwrap_or_else(|e| panic!("{e}"));
    }
}
