//! Several processes use one queue: each is a connection of its own here.

use crate::{POSTGRES, REDIS, keys, new_name, open_at, row, trainer};
use sinew_store::StoreError;
use sinew_store::queue::{
    AckedRow, LeaseBatch, LeaseClock, NewRow, PutOutcome, Queue, QueueError, QueueLimits,
    RowRequest, RowSelection, Sample, put_within,
};
use std::collections::BTreeMap;
use std::time::Duration;

/// Addresses of the servers of this test.
fn urls() -> [String; 2] {
    [POSTGRES.with(|s| s.url()), REDIS.with(|s| s.url())]
}

fn take(queue: &dyn Queue, rows: usize, ttl_ms: u64, now_ms: u64) -> LeaseBatch {
    let ask = RowRequest {
        consumer: "trainer".into(),
        holder: "tests".into(),
        ttl_ms,
        take: RowSelection::Sample(Sample::rows(rows)),
    };
    queue.lease(&ask, now_ms).unwrap()
}

fn ack(queue: &dyn Queue, batch: &LeaseBatch) -> usize {
    let rows: Vec<AckedRow> = keys(batch).iter().map(AckedRow::of).collect();
    queue
        .ack("trainer", batch.lease.unwrap(), &rows)
        .unwrap()
        .changed
}

#[test]
fn each_row_is_put_leased_and_acked_once() {
    for url in urls() {
        let name = new_name();
        let open = || open_at(&url, &name, QueueLimits::default(), LeaseClock::Server);
        let queues: Vec<_> = (0..4).map(|_| open()).collect();
        queues[0].join(&trainer()).unwrap();
        let hour = 3_600_000;
        let counts: Vec<(usize, Vec<String>)> = std::thread::scope(|scope| {
            let work = |queue: &dyn Queue, t: usize| {
                let mut put = 0;
                let mut acked = Vec::new();
                for n in 0..25 {
                    let rows = [row(&format!("k{}", (n + t * 9) % 40), 3)];
                    put += usize::from(queue.put(&rows).unwrap() == [PutOutcome::New]);
                    let batch = take(queue, 2, hour, 0);
                    if batch.lease.is_some() {
                        assert_eq!(ack(queue, &batch), batch.rows.len());
                        acked.extend(keys(&batch));
                    }
                }
                (put, acked)
            };
            let threads: Vec<_> = queues
                .iter()
                .enumerate()
                .map(|(t, queue)| scope.spawn(move || work(queue, t)))
                .collect();
            threads.into_iter().map(|t| t.join().unwrap()).collect()
        });
        let mut acked: BTreeMap<String, usize> = BTreeMap::new();
        for key in counts.iter().flat_map(|c| &c.1) {
            *acked.entry(key.clone()).or_default() += 1;
        }
        let rest = take(&open(), 99, hour, 0);
        for key in keys(&rest) {
            *acked.entry(key).or_default() += 1;
        }
        assert_eq!(counts.iter().map(|c| c.0).sum::<usize>(), 40, "{url}");
        assert_eq!(acked.len(), 40);
        assert!(acked.values().all(|count| *count == 1), "{acked:?}");
        // All of them know the same.
        let stats = queues[0].stats().unwrap();
        assert!(queues.iter().all(|q| q.stats().unwrap() == stats));
    }
}

#[test]
fn leases_follow_the_clock_of_the_server() {
    for url in urls() {
        let name = new_name();
        let open = || open_at(&url, &name, QueueLimits::default(), LeaseClock::Server);
        let (first, second) = (open(), open());
        first.join(&trainer()).unwrap();
        first.put(&[row("a", 1)]).unwrap();
        // Callers whose clocks are wrong by decades take nothing from each other.
        let batch = take(&first, 1, 3_600_000, 0);
        assert_eq!(keys(&batch), ["a"]);
        assert!(take(&second, 1, 1, u64::MAX / 2).rows.is_empty());
        assert!(batch.until_ms > 1_600_000_000_000, "{}", batch.until_ms);
        assert_eq!(second.sweep(9, u64::MAX / 2).unwrap(), 0);
        assert_eq!(ack(&first, &batch), 1);
    }
}

#[test]
fn a_waiting_producer_sees_what_another_process_did() {
    for url in urls() {
        let (name, limits) = (
            new_name(),
            QueueLimits {
                max_rows: 1,
                ..QueueLimits::default()
            },
        );
        let open = || open_at(&url, &name, limits, LeaseClock::Server);
        let (producer, trainer_side) = (open(), open());
        producer.join(&trainer()).unwrap();
        producer.put(&[row("a", 1)]).unwrap();
        let full = producer.put(&[row("b", 1)]);
        assert!(matches!(
            full,
            Err(StoreError::Queue(QueueError::Full { .. }))
        ));
        std::thread::scope(|scope| {
            let waits = scope
                .spawn(|| put_within(&producer, &[row("b", 1)], Duration::from_secs(300)).unwrap());
            let batch = take(&trainer_side, 1, 3_600_000, 0);
            ack(&trainer_side, &batch);
            assert_eq!(waits.join().unwrap(), [PutOutcome::New]);
        });
    }
}

#[test]
fn a_long_log_is_renewed_and_read_by_those_who_come_later() {
    for url in urls() {
        let name = new_name();
        let limits = QueueLimits {
            max_rows: 100_000,
            ..QueueLimits::default()
        };
        let open = || open_at(&url, &name, limits, LeaseClock::Server);
        let (writer, slow) = (open(), open());
        writer.join(&trainer()).unwrap();
        slow.stats().unwrap();
        let rows = |n: usize| -> Vec<NewRow> {
            // Keys that do not compress, so that few calls make a long log.
            let text = |i: usize, part: usize| format!("{:016x}", tempered(n * 1_000 + i, part));
            let key = |i: usize| (0..50).map(|part| text(i, part)).collect::<String>();
            (0..1_000).map(|i| row(&key(i), 1)).collect()
        };
        for n in 0..9 {
            writer.put(&rows(n)).unwrap();
        }
        let late = open();
        for queue in [&writer, &slow, &late] {
            assert_eq!(queue.stats().unwrap().rows, 9_000, "{url}");
        }
        let first = rows(0).remove(0).key;
        assert!(late.read(&first, "trace").unwrap().is_some());
        assert_eq!(late.rows(None, 9).unwrap(), slow.rows(None, 9).unwrap());
    }
}

/// A number that looks random.
fn tempered(n: usize, part: usize) -> u64 {
    let mixed = (n as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ ((part as u64 + 7) << 32);
    (mixed ^ (mixed >> 31)).wrapping_mul(0xbf58_476d_1ce4_e5b9)
}
