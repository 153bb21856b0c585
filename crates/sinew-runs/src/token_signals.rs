//! Training signals of each token: its advantage, and its log-probability under the weights that were
//! trained.
//!
//! `tokens/step-00000012.jsonl.zst` in a run's folder has a line for each trained row of a step. A row is a
//! path of its episode from the root to a leaf; tokens themselves are in the store. Files of the newest steps
//! are kept. A step that is done again writes its file again.

use crate::write_atomic;
use serde::{Deserialize, Serialize};
use sinew_types::{EpisodeId, PathToken, TokenId, Trace, TrainRow};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

const FOLDER: &str = "tokens";
/// Compression level: fast, and floats that repeat shrink to little.
const LEVEL: i32 = 3;
/// Bytes of a file that are read, unpacked.
const MAX_BYTES: u64 = 1 << 30;

/// A trained row.
#[derive(Debug, Serialize, Deserialize)]
struct RowSignals {
    episode: EpisodeId,
    /// Checksum of its path's tokens.
    path: u64,
    /// Places of the trained tokens in the path, ascending.
    at: Vec<u32>,
    /// Advantages of these tokens.
    advantages: Vec<f32>,
    /// Log-probabilities of these tokens, in nats; empty: not computed.
    logprobs: Vec<f32>,
}

/// A trained token of an episode.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct TokenSignal {
    /// Place in its node.
    pub at: usize,
    pub advantage: f32,
    /// Probability under the weights that were trained, divided by that under the weights that sampled it;
    /// `None` if one of them is not known.
    pub ratio: Option<f32>,
}

/// Writes the signals of the newest steps of a run.
#[derive(Debug)]
pub struct TokenSignals {
    folder: PathBuf,
    keep: usize,
}

impl TokenSignals {
    /// Writes for the run in `run_dir` and keeps the files of the newest `keep` steps.
    pub fn new(run_dir: &Path, keep: usize) -> Self {
        Self {
            folder: run_dir.join(FOLDER),
            keep,
        }
    }

    /// Writes those of one step. `logprobs` are those of the trainer, a column for each row, or none at all.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn write(
        &self,
        step: u64,
        rows: &[TrainRow],
        logprobs: &[Option<Vec<f32>>],
    ) -> io::Result<()> {
        let mut lines = Vec::new();
        for (at, row) in rows.iter().enumerate() {
            let column = logprobs.get(at).and_then(Option::as_deref);
            if let Some(signals) = signals(row, column) {
                serde_json::to_writer(&mut lines, &signals)?;
                lines.push(b'\n');
            }
        }
        std::fs::create_dir_all(&self.folder)?;
        write_atomic(
            &path(&self.folder, step),
            &zstd::encode_all(&lines[..], LEVEL)?,
        )?;
        self.forget()
    }

    /// Removes files of older steps.
    fn forget(&self) -> io::Result<()> {
        let mut files = Vec::new();
        for entry in std::fs::read_dir(&self.folder)? {
            files.push(entry?.path());
        }
        // Numbers of one width: the order of names is that of steps.
        files.sort();
        let old = files.len().saturating_sub(self.keep);
        files[..old].iter().try_for_each(std::fs::remove_file)
    }
}

/// Reads the signals that `step` of the run in `run_dir` recorded for an episode: for each node its trained
/// tokens, in their order. `None` if nothing was recorded. A token that several rows trained has the signal
/// of the first one.
///
/// # Errors
/// If the file cannot be read.
pub fn token_signals(
    run_dir: &Path,
    step: u64,
    trace: &Trace,
) -> io::Result<Option<Vec<Vec<TokenSignal>>>> {
    let file = match std::fs::File::open(path(&run_dir.join(FOLDER), step)) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        file => file?,
    };
    let mut text = String::new();
    let unpacked = zstd::Decoder::new(file)?;
    unpacked.take(MAX_BYTES).read_to_string(&mut text)?;
    let mut nodes = vec![Vec::new(); trace.nodes.len()];
    let mut found = false;
    let paths: Vec<Vec<PathToken>> = trace
        .leaves()
        .into_iter()
        .map(|l| trace.path_tokens(l))
        .collect();
    // The quick look spares parsing most lines.
    for line in text.lines().filter(|l| l.contains(trace.episode.as_str())) {
        let row: RowSignals = serde_json::from_str(line)?;
        let same = |p: &&Vec<PathToken>| checksum(p.iter().map(|t| t.id)) == row.path;
        if row.episode != trace.episode {
            continue;
        }
        if let Some(path) = paths.iter().find(same) {
            found = true;
            place(&row, path, &mut nodes);
        }
    }
    Ok(found.then_some(nodes))
}

/// Adds a row's tokens to their nodes.
fn place(row: &RowSignals, path: &[PathToken], nodes: &mut [Vec<TokenSignal>]) {
    let mut begin = 0;
    let places = path.iter().enumerate().map(|(t, token)| {
        if t > 0 && path[t - 1].node != token.node {
            begin = t;
        }
        t - begin
    });
    let places: Vec<usize> = places.collect();
    for (i, (&at, &advantage)) in row.at.iter().zip(&row.advantages).enumerate() {
        let Some(token) = path.get(at as usize) else {
            return;
        };
        let (node, at) = (&mut nodes[token.node as usize], places[at as usize]);
        let ratio = |(new, old): (&f32, f32)| (new - old).exp();
        if node.last().is_none_or(|s| s.at < at) {
            node.push(TokenSignal {
                at,
                advantage,
                ratio: row.logprobs.get(i).zip(token.logprob).map(ratio),
            });
        }
    }
}

/// Signals of the trained tokens of a row; `None` if it has none.
fn signals(row: &TrainRow, logprobs: Option<&[f32]>) -> Option<RowSignals> {
    let trained = (0..row.tokens.len()).filter(|&t| row.weights[t] != 0.0);
    let at: Vec<u32> = trained.map(|t| t as u32).collect();
    let pick = |column: &[f32]| at.iter().map(|&t| column[t as usize]).collect();
    let (advantages, logprobs) = (pick(&row.advantages), logprobs.map(pick));
    (!at.is_empty()).then(|| RowSignals {
        episode: row.episode.clone(),
        path: checksum(row.tokens.iter().copied()),
        at,
        advantages,
        logprobs: logprobs.unwrap_or_default(),
    })
}

fn path(folder: &Path, step: u64) -> PathBuf {
    folder.join(format!("step-{step:08}.jsonl.zst"))
}

/// FNV-1a with 64 bits over the bytes of the tokens: distinguishes the few paths of one episode.
fn checksum(tokens: impl Iterator<Item = TokenId>) -> u64 {
    let bytes = tokens.flat_map(|t| t.to_le_bytes());
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use sinew_types::{
        EpisodeEnd, FinishReason, GroupId, NO_PARENT, Node, Origin, Outcome, PolicyVersion,
        Provenance, TRACE_FORMAT_VERSION, TaskId, Timing, TokenKind, VersionSpan,
    };

    fn node(parent: u32, kind: TokenKind, tokens: &[u32]) -> Node {
        let sampled = kind == TokenKind::Sampled;
        let span = VersionSpan {
            start: 0,
            len: tokens.len() as u32,
            version: PolicyVersion(3),
        };
        Node {
            logprobs: vec![-1.0; if sampled { tokens.len() } else { 0 }],
            versions: sampled.then_some(span).into_iter().collect(),
            finish: sampled.then_some(FinishReason::Length),
            ..Node::given(parent, 1, kind, tokens.into(), Vec::new())
        }
    }

    /// A prompt with two answers, the second of which continues.
    fn trace() -> Trace {
        Trace {
            format_version: TRACE_FORMAT_VERSION,
            episode: EpisodeId::new("d00000007-e1"),
            group: GroupId::new("d00000007"),
            task: TaskId::new("t"),
            task_kind: "k".into(),
            origin: Origin::default(),
            provenance: Provenance::default(),
            nodes: vec![
                node(NO_PARENT, TokenKind::Prompt, &[1, 2]),
                node(0, TokenKind::Sampled, &[3, 4]),
                node(0, TokenKind::Sampled, &[5, 6]),
                node(2, TokenKind::Observation, &[7]),
                node(3, TokenKind::Sampled, &[8]),
            ],
            outcome: Outcome::default(),
            end: EpisodeEnd::Terminated,
            timing: Timing::default(),
            ignored: Default::default(),
        }
    }

    /// The row of a leaf whose sampled tokens have `advantage`, with twice their probability.
    fn row(trace: &Trace, leaf: u32, advantage: f32) -> (TrainRow, Option<Vec<f32>>) {
        let path = trace.path_tokens(leaf);
        let weight = |t: &PathToken| if t.logprob.is_some() { 0.5 } else { 0.0 };
        let doubled = |t: &PathToken| t.logprob.map_or(0.0, |l| l + 2f32.ln());
        let row = TrainRow {
            episode: trace.episode.clone(),
            tokens: path.iter().map(|t| t.id).collect(),
            weights: path.iter().map(weight).collect(),
            advantages: vec![advantage; path.len()],
            behaviour_logprobs: path.iter().map(|t| t.logprob.unwrap_or(0.0)).collect(),
            oldest_version: PolicyVersion(3),
            ..TrainRow::default()
        };
        (row, Some(path.iter().map(doubled).collect()))
    }

    #[test]
    fn each_node_of_a_tree_gets_the_signals_of_its_tokens() {
        let dir = tempfile::tempdir().expect("a folder");
        let trace = trace();
        let (rows, mut logprobs): (Vec<_>, Vec<_>) = [row(&trace, 1, -2.0), row(&trace, 4, 1.5)]
            .into_iter()
            .unzip();
        let signals = TokenSignals::new(dir.path(), 2);
        signals.write(12, &rows, &logprobs).expect("written");
        let nodes = token_signals(dir.path(), 12, &trace).expect("read");
        let nodes = nodes.expect("they were written");
        let seen = |node: &[TokenSignal]| -> Vec<(usize, f32)> {
            assert!(
                node.iter()
                    .all(|s| (s.ratio.expect("a ratio") - 2.0).abs() < 1e-5)
            );
            node.iter().map(|s| (s.at, s.advantage)).collect()
        };
        let expected: [&[(usize, f32)]; 5] = [
            &[],
            &[(0, -2.0), (1, -2.0)],
            &[(0, 1.5), (1, 1.5)],
            &[],
            &[(0, 1.5)],
        ];
        for (node, expected) in nodes.iter().zip(expected) {
            assert_eq!(seen(node), expected);
        }
        // A ratio needs the trainer's log-probabilities.
        logprobs.clear();
        signals.write(12, &rows, &logprobs).expect("written again");
        let nodes = token_signals(dir.path(), 12, &trace).expect("read");
        assert!(
            nodes
                .expect("written")
                .iter()
                .flatten()
                .all(|s| s.ratio.is_none())
        );
    }

    #[test]
    fn files_of_the_newest_steps_stay() {
        let dir = tempfile::tempdir().expect("a folder");
        let (trace, signals) = (trace(), TokenSignals::new(dir.path(), 2));
        let (row, logprobs) = row(&trace, 4, 1.0);
        for step in [1, 2, 3, 10] {
            signals
                .write(
                    step,
                    std::slice::from_ref(&row),
                    std::slice::from_ref(&logprobs),
                )
                .expect("written");
        }
        let there = |step| {
            token_signals(dir.path(), step, &trace)
                .expect("read")
                .is_some()
        };
        assert_eq!([1, 2, 3, 10].map(there), [false, false, true, true]);
        let mut other = trace.clone();
        other.episode = EpisodeId::new("d00000007-e2");
        assert_eq!(token_signals(dir.path(), 10, &other).expect("read"), None);
        // A trace that changed since has no signals, rather than those of other tokens.
        let mut changed = trace.clone();
        changed.nodes[4].tokens[0] = 9;
        assert_eq!(token_signals(dir.path(), 10, &changed).expect("read"), None);
        std::fs::write(path(&dir.path().join(FOLDER), 10), "rubbish").expect("damaged");
        assert!(token_signals(dir.path(), 10, &trace).is_err());
    }
}
