//! `sinew bench queue`: rows and bytes a second through a queue: put, leased, acked.
//!
//! | part | measures |
//! |---|---|
//! | `memory` | small rows, and large ones, through a queue in memory |
//! | `disk` | the same through an SQLite file, each call one synchronized transaction |
//! | `http` | the same through a server and a client, with the rows in memory |
//!
//! A producer and a consumer run in two threads, with a number of rows a call. The producer makes each key
//! and copies each value in; the consumer copies each value out. Done rows are forgotten as they go, beyond a
//! number that stays known. The peer does the same with batches of a tensor that has the row's bytes, in its
//! own processes, without leases, acks and durability, which it does not have.

use crate::machine::CpuTime;
use crate::peers::Peers;
use crate::row::{Better, Printer, Row, Summary};
use crate::{BenchError, clock};
use bytes::Bytes;
use clap::Args;
use sinew_queue::{HttpQueue, QueueServer, QueueServerConfig, system_clock};
use sinew_store::queue::{
    AckedRow, Consumer, DiskQueue, Field, MemoryQueue, NewRow, Queue, QueueLimits, RowRequest,
    RowSelection, Sample, fields, put_within,
};
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// Names that `--only` takes.
const PARTS: [&str; 3] = ["memory", "disk", "http"];
/// Rows a second that are hoped for, in memory and on disk.
const ROWS: (f64, f64) = (100_000.0, 10_000.0);
/// Gigabytes a second that are hoped for in memory.
const GIGABYTES: f64 = 1.0;
/// Bytes of a small row, and of a large one.
const SIZES: (usize, usize) = (64, 1 << 20);
/// Rows of a call, small ones and large ones.
const BATCHES: (usize, usize) = (256, 16);
/// Calls of the consumer between two sweeps, and rows that stay known.
const SWEEPS: (usize, usize) = (64, 16_384);
/// Longest that a producer waits for room.
const ROOM: Duration = Duration::from_secs(60);
/// Token of the server, whose address only this process has.
const TOKEN: &str = "token-of-the-bench";

/// Arguments of `sinew bench queue`.
#[derive(Debug, Args)]
pub(crate) struct QueueArgs {
    /// One JSON object a row
    #[arg(long)]
    json: bool,
    /// Only these parts: memory, disk, http
    #[arg(long, value_delimiter = ',')]
    only: Vec<String>,
    /// Rounds of each measurement
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=100))]
    rounds: u32,
    /// Small rows of a round in memory; a tenth of it on disk
    #[arg(long, default_value_t = 200_000, value_parser = clap::value_parser!(u64).range(1000..=10_000_000))]
    rows: u64,
    /// Python that has the peer
    #[arg(long)]
    peer_python: Option<PathBuf>,
    /// Folder of the peers' programs
    #[arg(long, default_value = "benches/peers")]
    peers: PathBuf,
    /// Longest that a peer may take, in seconds
    #[arg(long, default_value_t = 300)]
    peer_limit: u64,
}

/// Load of one round.
#[derive(Clone, Copy, Debug)]
struct Load {
    rows: usize,
    /// Bytes of each row.
    bytes: usize,
    /// Rows of a call.
    batch: usize,
}

/// Runs the parts that are asked for.
pub(crate) fn run(args: &QueueArgs) -> Result<(), BenchError> {
    let wanted = super::selected(&args.only, &PARTS)?;
    let bench = Bench {
        rounds: args.rounds,
        printer: Printer::new(args.json),
        peers: Peers {
            python: args.peer_python.clone(),
            scripts: args.peers.clone(),
            limit: Duration::from_secs(args.peer_limit),
            threads: std::thread::available_parallelism().map_or(1, usize::from),
        },
    };
    let rows = args.rows as usize;
    if wanted("memory") {
        let queue = MemoryQueue::in_memory(QueueLimits::default());
        bench.part("memory", &queue, rows, Some(ROWS.0), Some(GIGABYTES))?;
    }
    if wanted("disk") {
        let folder = tempfile::tempdir().map_err(BenchError::system)?;
        let path = folder.path().join("queue.sqlite");
        let queue = DiskQueue::open(&path, QueueLimits::default(), false);
        let queue = queue.map_err(BenchError::system)?;
        bench.part("disk", &queue, rows / 10, Some(ROWS.1), None)?;
    }
    if wanted("http") {
        http(&bench, rows / 2)?;
    }
    Ok(())
}

/// Rows through a server of this process, whose queue is in memory.
fn http(bench: &Bench, rows: usize) -> Result<(), BenchError> {
    let runtime = tokio::runtime::Runtime::new().map_err(BenchError::system)?;
    let serving = QueueServerConfig {
        listen: SocketAddr::from((Ipv4Addr::LOCALHOST, 0)).into(),
        token: TOKEN.into(),
        clock: system_clock(),
        sweep: None,
    };
    let queue = Arc::new(MemoryQueue::in_memory(QueueLimits::default()));
    let server = runtime.block_on(QueueServer::start(queue, serving));
    let server = server.map_err(BenchError::system)?;
    let client = HttpQueue::new(&format!("http://{}", server.address()), TOKEN, ROOM);
    let client = client.map_err(BenchError::system)?;
    let done = bench.part("http", &client, rows, None, None);
    runtime.block_on(server.stop());
    done
}

/// Context of the parts.
struct Bench {
    rounds: u32,
    printer: Printer,
    peers: Peers,
}

impl Bench {
    /// Small rows, then large ones; with the least rates that are hoped for.
    fn part(
        &self,
        part: &str,
        queue: &dyn Queue,
        rows: usize,
        least_rows: Option<f64>,
        least_gb: Option<f64>,
    ) -> Result<(), BenchError> {
        let small = Load {
            rows,
            bytes: SIZES.0,
            batch: BATCHES.0,
        };
        let large = Load {
            rows: (rows / 200).clamp(BATCHES.1, 1024),
            bytes: SIZES.1,
            batch: BATCHES.1,
        };
        queue.join(&consumer()).map_err(BenchError::system)?;
        let per_row = |_: Load, rate: f64| rate;
        let gigabytes = |load: Load, rate: f64| rate * load.bytes as f64 / 1e9;
        self.row(part, queue, small, "rows/s", least_rows, per_row)?;
        self.row(part, queue, large, "GB/s", least_gb, gigabytes)
    }

    /// One measurement, and a second row with the peer, where it has such a part.
    fn row(
        &self,
        part: &str,
        queue: &dyn Queue,
        load: Load,
        unit: &str,
        least: Option<f64>,
        scale: impl Fn(Load, f64) -> f64,
    ) -> Result<(), BenchError> {
        let cpu = CpuTime::now();
        let mut rates = Vec::new();
        for round in 0..=self.rounds {
            let rate = pass(queue, load, round).map_err(BenchError::system)?;
            // The first warms caches and allocators.
            if round > 0 {
                rates.push(scale(load, rate));
            }
        }
        let others = CpuTime::others_since(cpu);
        let Load { bytes, batch, .. } = load;
        let name = format!("queue: {part}, rows of {bytes} bytes, {batch} a call");
        let summary = Summary::of(rates, Better::More).unwrap_or_default();
        let row = Row::new(name.clone(), unit, summary).others(others);
        let row = least.into_iter().fold(row, Row::at_least);
        self.printer.row(&row);
        // The peer has no durable queue to compare with.
        if part != "disk" {
            let row = Row::new(format!("{name}, beside TransferQueue"), unit, summary);
            self.printer.row(&self.beside(row, load, &scale));
        }
        Ok(())
    }

    /// The same work by the peer.
    fn beside(&self, row: Row, load: Load, scale: &impl Fn(Load, f64) -> f64) -> Row {
        if self.peers.python.is_none() {
            let why = "give --peer-python: a Python with benches/peers/transferqueue.txt";
            return row.without_peer("TransferQueue", why);
        }
        // It takes seconds for what takes milliseconds here.
        let rows = load.rows.min(20 * load.batch);
        let args = [rows, load.bytes, load.batch, self.rounds as usize].map(|n| n.to_string());
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        match self.peers.run("transferqueue.py", &args) {
            Ok(peer) => {
                let value = scale(load, peer.summary.median);
                row.against(&peer.version, value, Better::More)
            }
            Err(why) => row.without_peer("TransferQueue", why),
        }
    }
}

/// The only consumer: it needs traces, and a row is done after it.
fn consumer() -> Consumer {
    Consumer {
        name: "consumer".into(),
        needs: vec![fields::TRACE.into()],
        writes: Vec::new(),
        last: true,
    }
}

/// Rows a second of one round.
fn pass(queue: &dyn Queue, load: Load, round: u32) -> Result<f64, sinew_store::StoreError> {
    let time = clock();
    let source = vec![round as u8; load.bytes];
    std::thread::scope(|scope| {
        let producer = scope.spawn(|| produce(queue, load, round, &source));
        let consumed = consume(queue, load);
        // A panic of it is one of the test ware.
        let produced = producer.join().unwrap_or(Ok(()));
        consumed.and(produced)
    })?;
    Ok(load.rows as f64 / time())
}

/// Puts the rows of a round.
fn produce(
    queue: &dyn Queue,
    load: Load,
    round: u32,
    source: &[u8],
) -> Result<(), sinew_store::StoreError> {
    let mut next = 0;
    while next < load.rows {
        let end = (next + load.batch).min(load.rows);
        let row = |n: usize| {
            let value = Bytes::copy_from_slice(source);
            NewRow::new(
                format!("{}-{round}-{n}", load.bytes),
                Field::new(fields::TRACE, value),
            )
        };
        let rows: Vec<NewRow> = (next..end).map(row).collect();
        put_within(queue, &rows, ROOM)?;
        next = end;
    }
    Ok(())
}

/// Takes as many rows as a round has, and acks them.
fn consume(queue: &dyn Queue, load: Load) -> Result<(), sinew_store::StoreError> {
    let ask = RowRequest {
        consumer: consumer().name,
        holder: "bench".into(),
        ttl_ms: 600_000,
        take: RowSelection::Sample(Sample::rows(load.batch)),
    };
    let (mut taken, mut calls, mut copy) = (0, 0, Vec::new());
    while taken < load.rows {
        let seen = queue.wait(0, Duration::ZERO)?;
        let loan = queue.lease(&ask, 0)?;
        let Some(lease) = loan.lease else {
            queue.wait(seen, ROOM)?;
            continue;
        };
        for field in loan.rows.iter().flat_map(|row| &row.fields) {
            copy.clear();
            copy.extend_from_slice(&field.value);
        }
        let done: Vec<AckedRow> = loan
            .rows
            .into_iter()
            .map(|row| AckedRow::of(row.key))
            .collect();
        queue.ack(&ask.consumer, lease, &done)?;
        taken += done.len();
        calls += 1;
        if calls % SWEEPS.0 == 0 {
            queue.sweep(SWEEPS.1, 0)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_rows_of_a_round_go_through() {
        let queue = MemoryQueue::in_memory(QueueLimits::default());
        queue.join(&consumer()).unwrap();
        let load = Load {
            rows: 1000,
            bytes: 10,
            batch: 7,
        };
        for round in 0..2 {
            assert!(pass(&queue, load, round).unwrap() > 0.0);
        }
        let stats = queue.stats().unwrap();
        assert_eq!((stats.rows, stats.done), (0, 2000));
    }

    #[test]
    fn a_peer_that_is_not_there_is_said() {
        let bench = Bench {
            rounds: 1,
            printer: Printer::new(true),
            peers: Peers {
                python: None,
                scripts: "benches/peers".into(),
                limit: Duration::from_secs(1),
                threads: 1,
            },
        };
        let load = Load {
            rows: 1,
            bytes: 1,
            batch: 1,
        };
        let row = Row::new("r", "rows/s", Summary::default());
        let row = bench.beside(row, load, &|_, rate| rate);
        assert_eq!(row.met, Some(false));
        assert!(row.why.unwrap().contains("--peer-python"));
    }
}
