//! Inserts into a store that is large already, and its size on disk.
//!
//! Rates are taken over twenty equal parts, so that the last one shows a store that has nearly all of its
//! rows. Episodes are committed 256 at a time with one synchronization of the disk, as the driver does when
//! many end at once. The size counts all files of the store, the index included, against the necessary bytes:
//! four bytes for an id and four for a log-probability of each token.
//!
//! Tokens are drawn from a hash, so that they compress no better than those of a real model.
//! The store lies in the folder of temporary files and is removed at the end.

use crate::BenchError;
use crate::machine::CpuTime;
use crate::row::{Better, Printer, Row, Summary};
use sinew_rollout::{EpisodeSpec, RunInfo};
use sinew_store::{DiskStore, StoreOptions, TraceStore};
use sinew_types::{
    EpisodeId, FinishReason, GroupId, NO_PARENT, Node, Outcome, PolicyVersion, SamplingParams,
    Task, TaskId, TokenKind, Trace, VersionSpan, mix_hash,
};
use std::path::Path;
use std::time::Instant;

/// Episodes that end together and share one synchronization of the disk.
const BATCH: usize = 256;
/// Turns of an episode, tokens of a turn, of the prompt and of what a tool answers.
const TURNS: u32 = 4;
/// Tokens of a turn.
const TURN: usize = 48;
/// Tokens of the prompt.
const PROMPT: usize = 64;
/// Tokens of what a tool answers.
const ANSWER: usize = 24;
/// Size of a vocabulary, which bounds ids.
const VOCAB: u64 = 49_152;
/// Number of equal parts of the run; a rate is measured for each part.
const PARTS: usize = 20;

/// An episode without two equal tokens in a row: nothing of it is easier to compress than a real one.
fn episode(number: usize) -> Trace {
    let random = |place: u64| mix_hash(number as u64, place);
    let group = number / 8;
    let spec = EpisodeSpec {
        episode: EpisodeId::new(format!("d{group:08}-e{}", number % 8)),
        group: GroupId::new(format!("d{group:08}")),
        task: Task {
            id: TaskId::new(format!("bench/train/{}", group % 5000)),
            kind: ["code", "math", "search"][group % 3].into(),
            seed: group as u64,
            ..Task::default()
        },
        draw: group as u64,
        purpose: "train".into(),
        seed: random(0),
    };
    let mut trace = spec.empty_trace(&RunInfo::default(), &SamplingParams::default());
    let ids = |from: u64, count: usize| {
        let one = |n: u64| (random(from + n) % VOCAB) as u32;
        (0..count as u64).map(one).collect::<Vec<u32>>()
    };
    let prompt = Node::given(NO_PARENT, 0, TokenKind::Prompt, ids(1, PROMPT), Vec::new());
    trace.nodes.push(prompt);
    for turn in 1..=TURNS {
        let from = u64::from(turn) * 1000;
        let parent = trace.nodes.len() as u32 - 1;
        let kind = TokenKind::Sampled;
        let mut said = Node::given(parent, turn, kind, ids(from, TURN), Vec::new());
        let logprob = |n: u64| -((random(from + 500 + n) % 100_000) as f32) / 20_000.0;
        said.logprobs = (0..TURN as u64).map(logprob).collect();
        said.finish = Some(FinishReason::Length);
        said.versions = vec![VersionSpan {
            start: 0,
            len: TURN as u32,
            version: PolicyVersion(group as u64 / 64),
        }];
        trace.nodes.push(said);
        if turn < TURNS {
            let answer = ids(from + 900, ANSWER);
            let kind = TokenKind::Observation;
            let node = Node::given(parent + 1, turn, kind, answer, Vec::new());
            trace.nodes.push(node);
        }
    }
    trace.outcome = Outcome {
        reward: (random(7) % 2) as f64,
        success: random(7) % 2 == 1,
        ..Outcome::default()
    };
    trace
}

/// Bytes of what cannot be left out: ids and log-probabilities at four bytes each.
fn payload(trace: &Trace) -> usize {
    let numbers = trace
        .nodes
        .iter()
        .map(|n| n.tokens.len() + n.logprobs.len());
    4 * numbers.sum::<usize>()
}

/// Seconds of CPU time of this thread, which do not depend on what else the machine does.
fn thread_cpu_s() -> f64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

/// Bytes of all files below a folder.
fn on_disk(folder: &Path) -> std::io::Result<u64> {
    let mut bytes = 0;
    for entry in std::fs::read_dir(folder)? {
        let entry = entry?;
        bytes += if entry.file_type()?.is_dir() {
            on_disk(&entry.path())?
        } else {
            entry.metadata()?.len()
        };
    }
    Ok(bytes)
}

/// Inserts `rows` rows, and prints the rate of the last twentieth and the size.
pub(super) fn run(rows: usize, printer: Printer) -> Result<(), BenchError> {
    let folder = super::folder()?;
    let path = folder.path().join("store");
    let cpu = CpuTime::now();
    let store = DiskStore::open(&path, StoreOptions::default()).map_err(BenchError::system)?;
    let (mut rates, mut core_rates, mut bytes) = (Vec::new(), Vec::new(), 0);
    let part = rows.div_ceil(PARTS);
    let mut next = 0;
    while next < rows {
        let end = (next + part).min(rows);
        let (mut inserting, mut computing, count) = (0.0, 0.0, end - next);
        while next < end {
            let traces: Vec<Trace> = (next..(next + BATCH).min(end)).map(episode).collect();
            next += traces.len();
            bytes += traces.iter().map(payload).sum::<usize>();
            let (start, cpu) = (Instant::now(), thread_cpu_s());
            store.commit_batch(&traces).map_err(BenchError::system)?;
            inserting += start.elapsed().as_secs_f64();
            computing += thread_cpu_s() - cpu;
        }
        rates.push(count as f64 / inserting);
        core_rates.push(count as f64 / computing);
    }
    drop(store);
    let others = CpuTime::others_since(cpu);
    let last = rates.last().copied().unwrap_or_default();
    let all = Summary::of(rates, Better::More).unwrap_or_default();
    let name = format!("store: inserts at {rows} rows, {BATCH} a commit");
    let mut row = Row::new(
        name,
        "rows/s",
        Summary {
            median: last,
            ..all
        },
    );
    row.target = Some(10_000.0);
    row.met = Some(last >= 10_000.0);
    printer.row(&row.others(others));
    let row = Row::new(
        format!("store: inserts, median over {rows} rows"),
        "rows/s",
        all,
    );
    printer.row(&row.others(others));
    let core = Summary::of(core_rates, Better::More).unwrap_or_default();
    let name = format!("store: inserts a second of CPU time, median over {rows} rows");
    printer.row(&Row::new(name, "rows/s", core).others(others));
    let disk = on_disk(&path).map_err(BenchError::system)? as f64;
    let size = Summary {
        median: disk / bytes as f64,
        ..Summary::default()
    };
    let each = bytes / rows.max(1);
    let row = Row::new(
        format!("store: disk per payload ({each} bytes a row)"),
        "ratio",
        size,
    );
    printer.row(&row.at_most(1.1));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn episodes_are_valid_and_differ() {
        let (a, b) = (episode(7), episode(8));
        a.validate().unwrap();
        assert_ne!((&a.episode, &a.nodes), (&b.episode, &b.nodes));
        // 64 + 4 x 48 + 3 x 24 ids, 4 x 48 log-probabilities.
        assert_eq!(payload(&a), 4 * (328 + 192));
    }
}
