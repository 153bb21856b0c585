//! A process that is killed at any instant loses nothing that it acknowledged.

use crate::support::{id, trace};
use sinew_store::queue::{
    AckedRow, Consumer, Field, LeasedRow, NewRow, Queue, QueueLimits, RowRequest, RowSelection,
    Sample, fields,
};
use sinew_store::{DiskStore, StoreOptions, TraceStore, TrainedBatch};
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, Stdio};

const DIRECTORY: &str = "SINEW_STORE_CRASH_DIRECTORY";

fn options() -> StoreOptions {
    StoreOptions {
        segment_bytes: 20_000,
        ..StoreOptions::default()
    }
}

fn trainer() -> Consumer {
    Consumer {
        name: "trainer".into(),
        needs: vec![fields::TRACE.into()],
        writes: Vec::new(),
        last: true,
    }
}

/// The victim: commits without end and prints the acknowledged ids. Does nothing unless it is started by the
/// test below.
#[test]
fn victim() {
    let Some(directory) = std::env::var_os(DIRECTORY) else {
        return;
    };
    let store = DiskStore::open(Path::new(&directory), options()).unwrap();
    let queue = store.queue("q", QueueLimits::default()).unwrap();
    queue.join(&trainer()).unwrap();
    let mut out = std::io::stdout();
    let mut say = |text: String| {
        writeln!(out, "ack {text}").unwrap();
        out.flush().unwrap();
    };
    let fence = store.take_fence().unwrap();
    say(format!("fence {fence}"));
    let start = store.stats().unwrap().episodes;
    for n in (start..start + 10_000).step_by(4) {
        let batch: Vec<_> = (n..n + 4).map(|n| trace(n, 100)).collect();
        store.commit_batch(&batch).unwrap();
        say(format!("commit {n}"));
        let row = |n: u64| {
            let value = Field::new(fields::TRACE, n.to_le_bytes().to_vec());
            NewRow::new(format!("e{n}"), value)
        };
        queue.put(&(n..n + 4).map(row).collect::<Vec<_>>()).unwrap();
        say(format!("put {n}"));
        let ask = RowRequest {
            consumer: "trainer".into(),
            holder: "victim".into(),
            ttl_ms: 1,
            take: RowSelection::Sample(Sample::rows(3)),
        };
        let loan = queue.lease(&ask, n).unwrap();
        // A row that comes again after its update was committed is only acknowledged.
        let batches = store.trained_batches().unwrap();
        let trained = |n: &u64| batches.iter().any(|b| b.episodes.contains(&id(*n)));
        let number = |r: &LeasedRow| u64::from_le_bytes(r.fields[0].value[..].try_into().unwrap());
        let numbers = loan.rows.iter().map(number);
        let fresh: Vec<u64> = numbers.filter(|n| !trained(n)).collect();
        if let Some(&first) = fresh.first() {
            let ids: Vec<_> = fresh.iter().map(|n| id(*n)).collect();
            let batch = format!("b-{}", ids[0]);
            let update = TrainedBatch {
                fence,
                ..TrainedBatch::new(&batch, first, &ids)
            };
            store.commit_update(&update, false).unwrap();
            say(format!("step {batch}"));
        }
        let rows: Vec<AckedRow> = loan.rows.iter().map(|r| AckedRow::of(&r.key)).collect();
        if let Some(lease) = loan.lease {
            queue.ack("trainer", lease, &rows).unwrap();
        }
    }
}

#[test]
fn killed_while_committing() {
    let directory = tempfile::tempdir().unwrap();
    let mut acked = Acked::default();
    for round in 0..12usize {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args([
                "--exact",
                "crash::victim",
                "--nocapture",
                "--test-threads=1",
            ])
            .env(DIRECTORY, directory.path())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        // Killed right after an acknowledgement, of each kind in turn and ever later.
        let mut left = 3 + round * 5;
        for line in lines.by_ref() {
            left -= usize::from(acked.note(&line.unwrap()));
            if left == 0 {
                break;
            }
        }
        assert_eq!(left, 0, "the victim ended by itself");
        child.kill().unwrap();
        // Lines that it still printed before it died were acknowledged as well.
        for line in lines.map_while(Result::ok) {
            acked.note(&line);
        }
        child.wait().unwrap();
        // Each victim takes its number first.
        let fences: Vec<u64> = (1..=round as u64 + 1).collect();
        assert_eq!(acked.fences, fences);
        check(directory.path(), &acked);
    }
}

/// Acknowledged calls of all victims.
#[derive(Default)]
struct Acked {
    committed: Vec<u64>,
    put: Vec<u64>,
    steps: Vec<String>,
    fences: Vec<u64>,
}

impl Acked {
    /// Notes the acknowledgement of a line, if there is one.
    fn note(&mut self, line: &str) -> bool {
        // The test harness writes on the same stream.
        let Some((_, said)) = line.split_once("ack ") else {
            return false;
        };
        match said.split_once(' ') {
            Some(("commit", n)) => self.committed.push(n.parse().unwrap()),
            Some(("put", n)) => self.put.push(n.parse().unwrap()),
            Some(("step", batch)) => self.steps.push(batch.to_owned()),
            Some(("fence", n)) => self.fences.push(n.parse().unwrap()),
            _ => return false,
        }
        true
    }
}

fn check(directory: &Path, acked: &Acked) {
    let store = DiskStore::open(directory, options()).unwrap();
    assert!(store.recovery().damaged.is_empty());
    assert_eq!(Some(&store.newest_fence().unwrap()), acked.fences.last());
    for &n in &acked.committed {
        for n in n..n + 4 {
            assert_eq!(store.get(&id(n)).unwrap(), Some(trace(n, 100)), "{n}");
        }
    }
    let stats = store.stats().unwrap();
    assert_eq!(
        stats.episodes % 4,
        0,
        "a batch is there whole or not at all"
    );
    let queue = store.queue("q", QueueLimits::default()).unwrap();
    queue.join(&trainer()).unwrap();
    for &n in &acked.put {
        for n in n..n + 4 {
            let state = queue.state("trainer", &format!("e{n}")).unwrap();
            assert!(state.is_some(), "{n}");
        }
    }
    let batches = store.trained_batches().unwrap();
    for step in &acked.steps {
        assert!(batches.iter().any(|b| &b.batch == step), "{step}");
    }
    let trained: u64 = batches.iter().map(|b| b.episodes.len() as u64).sum();
    assert_eq!(trained, stats.trained, "none is trained twice");
    // A row is acked once its episode was trained.
    assert!(queue.stats().unwrap().done as u64 <= trained);
}
