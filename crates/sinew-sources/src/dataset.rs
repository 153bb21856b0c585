//! Training data that is not sampled: demonstrations and preference pairs from files, episodes
//! that another run stored.
//!
//! Each becomes a trace like any other, so that masks, weights, packing and the ledger are those
//! of sampled episodes. The log-probabilities of the given tokens are the policy's own, scored
//! when their step is trained.

use serde::Deserialize;
use sinew_grammar::Grammars;
use sinew_pipeline::PipelineError;
use sinew_pipeline::by_group;
use sinew_pipeline::masks;
use sinew_pipeline::shuffled;
use sinew_pipeline::{Given, SampleSource, Wanted};
use sinew_pipeline::{LateConfig, settle};
use sinew_render::Renderer;
use sinew_rollout::rescored;
use sinew_store::{Filter, StoreError, StoreReader};
use sinew_types::{
    EpisodeEnd, EpisodeId, GroupId, Message, Origin, Outcome, Role, Trace, mix_seed,
};
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::sync::Arc;

/// Maximum bytes of one line of a file.
const MAX_LINE_BYTES: usize = 16 << 20;

/// Maximum rows of a file, or episodes of a run.
const MAX_ROWS: usize = 1_000_000;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Demonstration {
    /// The conversation, in the form of the chat API: turns of the model are imitated.
    messages: Vec<Message>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Pair {
    /// What both answers follow.
    prompt: Vec<Message>,
    /// The answer that is preferred.
    chosen: Answer,
    /// The answer that is not.
    rejected: Answer,
}

/// What follows a prompt: one assistant's text, or more messages.
#[derive(Deserialize)]
#[serde(untagged, expecting = "an answer is a text, or a list of messages")]
enum Answer {
    Text(String),
    Messages(Vec<Message>),
}

impl Answer {
    fn messages(self) -> Vec<Message> {
        match self {
            Self::Text(text) => vec![Message::new(Role::Assistant, text)],
            Self::Messages(messages) => messages,
        }
    }
}

/// Where given episodes are read from.
#[derive(Clone, Debug, PartialEq)]
pub enum DatasetConfig {
    /// JSON lines `{"messages": [...]}`.
    Demonstrations { path: String },
    /// JSON lines `{"prompt": [...], "chosen": ..., "rejected": ...}`.
    Pairs { path: String },
    /// Episodes that a run stored.
    Episodes(StoredEpisodes),
}

/// Episodes of a run, and which of their rewards count.
#[derive(Clone, Debug, PartialEq)]
pub struct StoredEpisodes {
    /// Folder of the run.
    pub path: String,
    /// Of the episodes.
    pub purpose: String,
    /// Source of scores that take the place of the rewards; `None`: the rewards that `sinew episodes` lists,
    /// with those of groups and from outside.
    pub scores: Option<String>,
    /// How rewards from outside count in that run.
    pub late: Option<LateConfig>,
}

/// Groups of given episodes: one of each demonstration, two of each pair.
#[derive(Debug)]
pub struct Dataset {
    /// Rendered rows: a group a row, with both answers of a pair, or the group of a stored run.
    groups: Vec<Vec<Trace>>,
}

/// A row that is refused: file and line, counted from 1, and the reason.
fn refused(path: &str, line: usize, reason: impl std::fmt::Display) -> PipelineError {
    PipelineError::input(format!("data.path = {path:?} line {line}: {reason}"))
}

impl Dataset {
    /// Reads what `config` names, for contexts of so many tokens.
    ///
    /// # Errors
    /// The line that cannot be trained on, or the folder that holds nothing.
    pub fn load(
        config: &DatasetConfig,
        renderer: &dyn Renderer,
        context: usize,
    ) -> Result<Self, PipelineError> {
        let groups = match config {
            DatasetConfig::Demonstrations { path } => rows(path, |line, row: Demonstration| {
                let trace = conversation(&row.messages, renderer, context);
                let trace = trace.map_err(|e| refused(path, line, e))?;
                Ok(vec![scored(trace, "demonstration", 1.0)])
            })?,
            DatasetConfig::Pairs { path } => rows(path, |line, row: Pair| {
                let of = |answer: Answer| {
                    let messages = [row.prompt.clone(), answer.messages()].concat();
                    conversation(&messages, renderer, context).map_err(|e| refused(path, line, e))
                };
                let (chosen, rejected) = (of(row.chosen)?, of(row.rejected)?);
                if chosen
                    .nodes
                    .iter()
                    .map(|n| &n.tokens)
                    .eq(rejected.nodes.iter().map(|n| &n.tokens))
                {
                    let why = "chosen and rejected are the same, so there is nothing to learn";
                    return Err(refused(path, line, why));
                }
                let chosen = scored(chosen, "chosen", 1.0);
                Ok(vec![chosen, scored(rejected, "rejected", 0.0)])
            })?,
            DatasetConfig::Episodes(from) => stored(from, context)?,
        };
        if groups.is_empty() {
            return Err(PipelineError::input("[data]: nothing is in it to train on"));
        }
        Ok(Self { groups })
    }

    /// Groups in it; at least one.
    #[expect(clippy::len_without_is_empty, reason = "an empty one is refused")]
    pub fn len(&self) -> usize {
        self.groups.len()
    }

    /// A hash of what is in it, in its order: tokens, rewards, and what is trained.
    pub fn digest(&self) -> String {
        let mut hash = blake3::Hasher::new();
        for trace in self.groups.iter().flatten() {
            let (group, outcome) = (trace.group.as_str(), &trace.outcome);
            let length = (group.len() as u64).to_le_bytes();
            hash.update(&length).update(group.as_bytes());
            hash.update(&trace.total_reward().to_le_bytes());
            hash.update(&[u8::from(outcome.success), u8::from(outcome.unscored)]);
            hash.update(&(trace.nodes.len() as u64).to_le_bytes());
            for node in &trace.nodes {
                hash.update(&[node.kind as u8]);
                hash.update(&(node.tokens.len() as u64).to_le_bytes());
                let tokens = node.tokens.iter().flat_map(|t| t.to_le_bytes());
                hash.update(&tokens.collect::<Vec<u8>>());
            }
        }
        hash.finalize().to_hex().to_string()
    }

    /// The groups of a training step (from 1), each epoch in an order of its own. Episodes are
    /// named after their draw: what is trained twice in two epochs is two episodes.
    pub fn batch(&self, seed: u64, step: u64, groups: usize) -> Vec<Vec<Trace>> {
        let first = (step - 1) * groups as u64;
        let group = |g: u64| {
            let n = first + g;
            let (epoch, at) = (n / self.len() as u64, n % self.len() as u64);
            let name = format!("d{n:08}");
            let traces = &self.groups[shuffled(mix_seed(seed, epoch), self.len(), at as usize)];
            let rename = |(k, trace): (usize, &Trace)| Trace {
                episode: EpisodeId::new(format!("{name}-e{k}")),
                group: GroupId::new(name.clone()),
                origin: Origin {
                    draw: n,
                    purpose: "train".into(),
                    ..trace.origin.clone()
                },
                ..trace.clone()
            };
            traces.iter().enumerate().map(rename).collect()
        };
        (0..groups as u64).map(group).collect()
    }
}

/// A data set as a source, with what makes the masks of its tokens again.
#[derive(Debug)]
pub struct DatasetSource {
    /// All rows, rendered when they were read.
    pub data: Dataset,
    /// Make the masks of episodes that were sampled under an output format again.
    pub grammars: Arc<dyn Grammars>,
}

impl SampleSource for DatasetSource {
    fn groups(&mut self, wanted: Wanted<'_>) -> Result<Given, PipelineError> {
        let mut groups = self.data.batch(wanted.seed, wanted.step, wanted.groups);
        let known = masks(self.grammars.as_ref(), &mut groups);
        wanted
            .learner
            .score_data(wanted.algorithm, &mut groups, &known)?;
        let traces: Vec<Trace> = groups.into_iter().flatten().collect();
        let stored = wanted.store.commit_batch(&traces);
        stored.map_err(PipelineError::system)?;
        Ok(Given {
            groups: by_group(traces),
            ..Given::default()
        })
    }
}

/// The groups that the lines of a JSON-lines file make.
fn rows<T: for<'de> Deserialize<'de>>(
    path: &str,
    make: impl Fn(usize, T) -> Result<Vec<Trace>, PipelineError>,
) -> Result<Vec<Vec<Trace>>, PipelineError> {
    let unreadable = |e| PipelineError::input(format!("data.path = {path:?}: {e}"));
    let file = std::fs::File::open(path).map_err(unreadable)?;
    let mut groups = Vec::new();
    for (n, line) in BufReader::new(file).lines().enumerate() {
        let line = line.map_err(unreadable)?;
        if line.trim().is_empty() {
            continue;
        }
        if line.len() > MAX_LINE_BYTES || groups.len() >= MAX_ROWS {
            let limit = "lines of up to 16 MiB, up to a million of them, are read";
            return Err(refused(path, n + 1, limit));
        }
        let row = serde_json::from_str(&line).map_err(|e| refused(path, n + 1, e))?;
        groups.push(make(n + 1, row)?);
    }
    Ok(groups)
}

/// The trace with a reward and the type of its task.
fn scored(mut trace: Trace, kind: &str, reward: f64) -> Trace {
    trace.task_kind = kind.into();
    trace.outcome = Outcome {
        reward,
        success: reward > 0.0,
        ..Outcome::default()
    };
    trace
}

/// A conversation as a trace: what the assistant says is trained, all else is not.
fn conversation(
    messages: &[Message],
    renderer: &dyn Renderer,
    context: usize,
) -> Result<Trace, String> {
    if messages.iter().any(|m| !m.tool_calls.is_empty()) {
        return Err("tool calls must stand in the content, as the model writes them".into());
    }
    sinew_pool::conversation(messages, 0, &[], renderer, context).map_err(|e| e.to_string())
}

/// Reason of an episode whose reward has not come yet.
const WAITS: &str = "waits for its reward";

/// Gives an episode of a run the outcome that counts.
fn settled(
    mut trace: Trace,
    reader: &StoreReader,
    from: &StoredEpisodes,
) -> Result<Trace, StoreError> {
    let records = reader.scores(&trace.episode)?;
    if let Some(source) = &from.scores {
        trace.outcome = rescored(&trace.outcome, &records, source);
    } else if settle(&mut trace, &records, from.late.as_ref()) {
        trace.outcome.unscored_reason = Some(WAITS.into());
    }
    Ok(trace)
}

/// Episodes of a run, grouped as they were sampled.
fn stored(from: &StoredEpisodes, context: usize) -> Result<Vec<Vec<Trace>>, PipelineError> {
    let path = from.path.as_str();
    let folder = Path::new(path).join("store");
    if !folder.is_dir() {
        return Err(PipelineError::input(format!(
            "data.path = {path:?} holds no stored run\n  hint: it is the folder given to `sinew train --run-dir`"
        )));
    }
    let unreadable = |e| PipelineError::input(format!("data.path = {path:?}: {e}"));
    let reader = StoreReader::open(&folder).map_err(unreadable)?;
    let mut filter = Filter {
        purpose: Some(from.purpose.clone()),
        limit: 1000,
        ..Filter::default()
    };
    let mut groups: BTreeMap<GroupId, Vec<Trace>> = BTreeMap::new();
    let (mut count, mut scored) = (0, 0);
    loop {
        let page = reader.list(&filter).map_err(unreadable)?;
        for episode in &page.episodes {
            let trace = reader.get(&episode.episode).map_err(unreadable)?;
            // What gc removed meanwhile, what failed, and what is too long is left out.
            let fits = |t: &Trace| t.nodes.iter().map(|n| n.tokens.len()).sum::<usize>() <= context;
            let failed = |t: &Trace| matches!(t.end, EpisodeEnd::Failed { .. });
            if let Some(trace) = trace.filter(|t| fits(t) && !failed(t)) {
                let trace = settled(trace, &reader, from).map_err(unreadable)?;
                count += 1;
                scored += usize::from(!trace.outcome.unscored);
                groups.entry(trace.group.clone()).or_default().push(trace);
            }
        }
        match page.next {
            Some(next) if count < MAX_ROWS => filter.after = Some(next),
            _ => break,
        }
    }
    if let (Some(source), true) = (&from.scores, count > 0 && scored == 0) {
        return Err(PipelineError::input(format!(
            "data.scores = {source:?}: no episode of {path} has a score of that source\n  hint: `sinew rescore {path} --source {source}` gives them one"
        )));
    }
    // They are stored as they ended, and which of equal ones is the best must not depend on that.
    for group in groups.values_mut() {
        group.sort_by(|a, b| a.episode.cmp(&b.episode));
    }
    Ok(groups.into_values().collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use sinew_env::tiny;
    use sinew_render::TinyRenderer;
    use sinew_types::{TokenId, TokenKind};
    use std::collections::BTreeSet;

    fn load(kind: &str, lines: &str) -> Result<Dataset, String> {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), lines).unwrap();
        let path = file.path().display().to_string();
        let config = match kind {
            "pairs" => DatasetConfig::Pairs { path },
            _ => DatasetConfig::Demonstrations { path },
        };
        let loaded = Dataset::load(&config, &TinyRenderer::new(tiny::ALPHABET), 64);
        loaded.map_err(|e| e.to_string())
    }

    #[test]
    fn every_turn_of_the_assistant_trains_and_nothing_else() {
        let line = r#"{"messages":[{"role":"user","content":"A.>"},{"role":"assistant","content":"r"},{"role":"tool","content":".A>"},{"role":"assistant","content":"rl"}]}"#;
        let data = load("demonstrations", line).unwrap();
        let batch = data.batch(0, 3, 1);
        let trace = &batch[0][0];
        trace.validate().unwrap();
        assert_eq!(trace.episode.as_str(), "d00000002-e0");
        // A move and the stop token; two moves and the stop token.
        assert_eq!(trace.sampled_tokens(), 5);
        let kinds: Vec<TokenKind> = trace.nodes.iter().map(|n| n.kind).collect();
        let (p, s, o) = (
            TokenKind::Prompt,
            TokenKind::Sampled,
            TokenKind::Observation,
        );
        assert_eq!(kinds, [p, s, o, s]);
        assert!(trace.outcome.success);
    }

    #[test]
    fn pairs_are_groups_of_two_and_epochs_visit_all_of_them() {
        let line = |a: &str| {
            format!(
                "{{\"prompt\":[{{\"role\":\"user\",\"content\":\"{a}\"}}],\"chosen\":\"r\",\"rejected\":\"l\"}}\n"
            )
        };
        let data = load("pairs", &["A>", "A.>", ".A>"].map(line).concat()).unwrap();
        let prompts = |step| -> Vec<Vec<TokenId>> {
            let groups = data.batch(7, step, 3);
            assert!(groups.iter().all(|g| g.len() == 2));
            assert!(
                groups
                    .iter()
                    .all(|g| g[0].outcome.reward > g[1].outcome.reward)
            );
            groups
                .iter()
                .map(|g| g[0].nodes[0].tokens.clone())
                .collect()
        };
        for step in 1..5 {
            let seen: BTreeSet<_> = prompts(step).into_iter().collect();
            assert_eq!(seen.len(), 3);
        }
        assert_eq!(prompts(2), prompts(2));
    }

    #[test]
    fn bad_rows_are_refused_with_their_line() {
        let user = r#"{"role":"user","content":"A>"}"#;
        let said = r#"{"role":"assistant","content":"r"}"#;
        for (line, needle) in [
            (format!("{{\"messages\":[{user}]}}"), "nothing to learn"),
            (
                format!("{{\"messages\":[{user},{said},{user}]}}"),
                "end with",
            ),
            (
                format!("{{\"messages\":[{user},{said},{said}]}}"),
                "follow each other",
            ),
            (format!("{{\"mesages\":[{user}]}}"), "unknown field"),
            ("{".to_owned(), "EOF"),
        ] {
            let good = format!("{{\"messages\":[{user},{said}]}}");
            let e = load("demonstrations", &format!("{good}\n{line}\n"))
                .err()
                .unwrap();
            assert!(e.contains("line 2") && e.contains(needle), "{line}: {e}");
        }
        let pair = |rejected: &str| {
            format!("{{\"prompt\":[{user}],\"chosen\":\"r\",\"rejected\":{rejected}}}\n")
        };
        for (rejected, needle) in [
            ("\"r\"", "the same"),
            (r#"[{"role":"assistant","content":"r"}]"#, "the same"),
            ("3", "a text, or a list of messages"),
        ] {
            let lines = format!("{}{}", pair("\"l\""), pair(rejected));
            let e = load("pairs", &lines).err().unwrap();
            assert!(e.contains("line 2") && e.contains(needle), "{e}");
        }
        assert!(
            load("demonstrations", "\n")
                .err()
                .unwrap()
                .contains("nothing is in it")
        );
    }
}
