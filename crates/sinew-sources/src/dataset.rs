//! Training data that is not sampled: demonstrations and preference pairs from files, episodes
//! that another run stored.
//!
//! Each becomes a trace like any other, so that masks, weights, packing and the ledger are those
//! of sampled episodes. The log-probabilities of the given tokens are the policy's own, scored
//! when their step is trained.

use serde_json::Value;
use sinew_dialect::conversation::{Conversations, Said};
use sinew_dialect::count_ignored;
use sinew_grammar::Grammars;
use sinew_orchestrator::{LateConfig, PipelineError, by_group, settle, shuffled};
use sinew_pipeline::masks;
use sinew_pipeline::{GroupRequest, SampleSource, SourceGroups};
use sinew_render::Renderer;
use sinew_rollout::rescored;
use sinew_store::{Filter, StoreError, StoreReader};
use sinew_tasks::{Row, TasksError, read_rows};
use sinew_types::{
    EpisodeEnd, EpisodeId, GroupId, Message, Origin, Outcome, Role, ToolSpec, Trace, mix_seed,
};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fmt::Display;
use std::path::Path;
use std::sync::Arc;

/// Maximum rows of a file, or episodes of a run.
const MAX_ROWS: usize = 1_000_000;

/// Columns of a demonstration.
const MESSAGES: &str = "messages";
const PROMPT: &str = "prompt";
const COMPLETION: &str = "completion";
const TOOLS: &str = "tools";
/// Columns of a preference pair, with the prompt and the tools.
const CHOSEN: &str = "chosen";
const REJECTED: &str = "rejected";

/// Name under which messages after the model's last turn are counted.
const AFTER: &str = "messages after the last turn of the assistant";

/// Source of the given episodes.
#[derive(Debug)]
pub enum DatasetConfig {
    /// Rows with `messages`, or `prompt` and `completion`; and `tools`.
    Demonstrations { path: String },
    /// Rows with `prompt`, `chosen` and `rejected`; and `tools`.
    Pairs { path: String },
    /// Episodes that a run stored.
    Episodes(Box<StoredEpisodes>),
}

/// Episodes of a run, and which of their rewards count.
#[derive(Debug)]
pub struct StoredEpisodes {
    /// Folder of the run, for messages.
    pub path: String,
    /// Store of the run.
    pub store: StoreReader,
    /// Purpose of the episodes.
    pub purpose: String,
    /// Source of scores that take the place of the rewards; `None`: the rewards that `sinew episodes` lists,
    /// with those of groups and from outside.
    pub scores: Option<String>,
    /// Rules of that run for rewards from outside.
    pub late: Option<LateConfig>,
}

/// Groups of given episodes: one of each demonstration, two of each pair.
#[derive(Debug)]
pub struct Dataset {
    /// Rendered rows: a group a row, with both answers of a pair, or the group of a stored run.
    groups: Vec<Vec<Trace>>,
    /// Columns and fields of the rows that are not trained on, and how often they came.
    unused: BTreeMap<String, u64>,
}

impl Dataset {
    /// Loads the data that `config` names, for contexts of a given number of tokens.
    ///
    /// # Errors
    /// The line that cannot be trained on, or the folder that holds nothing.
    pub fn load(
        config: &DatasetConfig,
        renderer: &dyn Renderer,
        context: usize,
    ) -> Result<Self, PipelineError> {
        let mut unused = BTreeMap::new();
        let mut read = |path: &str, pairs: bool| {
            let rows = Rows {
                renderer,
                context,
                reader: Conversations::default(),
                unused: RefCell::default(),
            };
            let groups = rows.groups(path, pairs)?;
            unused = rows.unused.into_inner();
            unused.extend(rows.reader.unknown());
            Ok::<_, PipelineError>(groups)
        };
        let groups = match config {
            DatasetConfig::Demonstrations { path } => read(path, false)?,
            DatasetConfig::Pairs { path } => read(path, true)?,
            DatasetConfig::Episodes(from) => stored(from, context)?,
        };
        if groups.is_empty() {
            return Err(PipelineError::input("[data]: nothing is in it to train on"));
        }
        Ok(Self { groups, unused })
    }

    /// Columns and fields of the rows that are not trained on, and how often they came.
    pub fn unused(&self) -> &BTreeMap<String, u64> {
        &self.unused
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

    /// The groups of a training step (from 1), each epoch in a separate order. Episodes are named after their
    /// draw: what is trained twice in two epochs is two episodes.
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
    fn groups(&mut self, wanted: GroupRequest<'_>) -> Result<SourceGroups, PipelineError> {
        let mut groups = self.data.batch(wanted.seed, wanted.step, wanted.groups);
        let known = masks(self.grammars.as_ref(), &mut groups);
        wanted
            .learner
            .score_data(wanted.algorithm, &mut groups, &known)?;
        let traces: Vec<Trace> = groups.into_iter().flatten().collect();
        let stored = wanted.store.commit_batch(&traces);
        stored.map_err(PipelineError::system)?;
        Ok(SourceGroups {
            groups: by_group(traces),
            ..SourceGroups::default()
        })
    }
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

/// Reads the rows of a file.
struct Rows<'a> {
    renderer: &'a dyn Renderer,
    /// Maximum tokens of a row.
    context: usize,
    /// The one reader of messages and tools.
    reader: Conversations,
    /// Columns that are not read, with their counts.
    unused: RefCell<BTreeMap<String, u64>>,
}

impl Rows<'_> {
    /// The groups of a file's rows: pairs, or demonstrations.
    fn groups(&self, path: &str, pairs: bool) -> Result<Vec<Vec<Trace>>, PipelineError> {
        let named = |e: &dyn Display| PipelineError::input(format!("data.path = {path:?}: {e}"));
        let rows = read_rows(Path::new(path)).map_err(|e| match e {
            TasksError::Row { line, message, .. } => named(&format!("line {line}: {message}")),
            TasksError::Read { source, .. } => named(&source),
            TasksError::Format { reason, .. } => named(&reason),
            other => named(&other),
        })?;
        if rows.len() > MAX_ROWS {
            return Err(named(&format!(
                "{} rows; allowed: up to {MAX_ROWS}",
                rows.len()
            )));
        }
        let group = |row: &Row| {
            let made = if pairs {
                self.pair(&row.columns)
            } else {
                self.demonstration(&row.columns)
            };
            made.map_err(|e| named(&format!("line {}: {e}", row.line)))
        };
        rows.iter().map(group).collect()
    }

    fn demonstration(&self, columns: &Columns) -> Result<Vec<Trace>, String> {
        let parts = [PROMPT, COMPLETION];
        let split = parts.iter().all(|name| columns.contains_key(*name));
        let (said, given) = match columns.get(MESSAGES) {
            Some(list) => (self.messages(list, MESSAGES, Role::User)?, 0),
            None if split => {
                let mut said = self.messages(&columns[PROMPT], PROMPT, Role::User)?;
                let given = said.len();
                said.extend(self.messages(&columns[COMPLETION], COMPLETION, Role::Assistant)?);
                (said, given)
            }
            None => return Err(missing(MESSAGES, columns)),
        };
        let read: &[&str] = match given {
            0 => &[MESSAGES, TOOLS],
            _ => &[PROMPT, COMPLETION, TOOLS],
        };
        self.count(columns, read);
        let trace = self.conversation(said, given, &self.tools(columns)?)?;
        Ok(vec![scored(trace, "demonstration", 1.0)])
    }

    fn pair(&self, columns: &Columns) -> Result<Vec<Trace>, String> {
        let column = |name| columns.get(name).ok_or_else(|| missing(name, columns));
        let tools = self.tools(columns)?;
        let prompt = self.messages(column(PROMPT)?, PROMPT, Role::User)?;
        let answered = |name| {
            let answer = self.messages(column(name)?, name, Role::Assistant)?;
            self.conversation([prompt.clone(), answer].concat(), prompt.len(), &tools)
        };
        let (chosen, rejected) = (answered(CHOSEN)?, answered(REJECTED)?);
        self.count(columns, &[PROMPT, CHOSEN, REJECTED, TOOLS]);
        let tokens =
            |trace: &Trace| -> Vec<_> { trace.nodes.iter().map(|n| n.tokens.clone()).collect() };
        if tokens(&chosen) == tokens(&rejected) {
            return Err("chosen and rejected are the same, so there is nothing to learn".into());
        }
        let chosen = scored(chosen, "chosen", 1.0);
        Ok(vec![chosen, scored(rejected, "rejected", 0.0)])
    }

    /// Messages of a column; a plain text is one message of `role`.
    fn messages(&self, value: &Value, name: &str, role: Role) -> Result<Vec<Said>, String> {
        let said = self
            .reader
            .texts(value, name, role)
            .map_err(|e| e.message)?;
        if said.is_empty() {
            Err(format!("{name} is empty; a list of messages is expected"))
        } else {
            Ok(said)
        }
    }

    fn tools(&self, columns: &Columns) -> Result<Vec<ToolSpec>, String> {
        let tools = columns.get(TOOLS).unwrap_or(&Value::Null);
        self.reader.tools(tools, TOOLS).map_err(|e| e.message)
    }

    /// Counts the columns that are not read.
    fn count(&self, columns: &Columns, read: &[&str]) {
        let mut unused = self.unused.borrow_mut();
        for name in columns.keys().filter(|name| !read.contains(&name.as_str())) {
            count_ignored(&mut unused, &format!("column {name}"), 1);
        }
    }

    /// A conversation as a trace: turns of the assistant after the first `given` messages are trained, unless
    /// their weight is 0; all else is not.
    fn conversation(
        &self,
        mut said: Vec<Said>,
        given: usize,
        tools: &[ToolSpec],
    ) -> Result<Trace, String> {
        let last = said.iter().rposition(|s| s.message.role == Role::Assistant);
        if let Some(after) = last
            .map(|at| said.split_off(at + 1))
            .filter(|a| !a.is_empty())
        {
            count_ignored(&mut self.unused.borrow_mut(), AFTER, after.len() as u64);
        }
        let trained: Vec<bool> = said.iter().map(|s| s.trained).collect();
        let trained = |at: usize| at >= given && trained[at];
        let messages: Vec<Message> = said.into_iter().map(|s| s.message).collect();
        sinew_pool::conversation(&messages, trained, tools, self.renderer, self.context)
            .map_err(|e| e.to_string())
    }
}

/// Values of a row by the names of their columns.
type Columns = serde_json::Map<String, Value>;

/// Message for a row that lacks a column.
fn missing(name: &str, columns: &Columns) -> String {
    let known: Vec<&str> = columns.keys().map(String::as_str).collect();
    format!("no column `{name}`; columns: {}", known.join(", "))
}

/// Reason of an episode whose reward has not come yet.
const WAITS: &str = "waits for its reward";

/// Sets the outcome of a stored episode from its scores, according to `from`.
fn settled(mut trace: Trace, from: &StoredEpisodes) -> Result<Trace, StoreError> {
    let records = from.store.scores(&trace.episode)?;
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
    let unreadable = |e| PipelineError::input(format!("data.path = {path:?}: {e}"));
    let mut filter = Filter {
        purpose: Some(from.purpose.clone()),
        limit: 1000,
        ..Filter::default()
    };
    let mut groups: BTreeMap<GroupId, Vec<Trace>> = BTreeMap::new();
    let (mut count, mut scored) = (0, 0);
    loop {
        let page = from.store.list(&filter).map_err(unreadable)?;
        for episode in &page.episodes {
            let trace = from.store.get(&episode.episode).map_err(unreadable)?;
            // Removed, failed and too long episodes are left out.
            let fits = |t: &Trace| t.nodes.iter().map(|n| n.tokens.len()).sum::<usize>() <= context;
            let failed = |t: &Trace| matches!(t.end, EpisodeEnd::Failed { .. });
            if let Some(trace) = trace.filter(|t| fits(t) && !failed(t)) {
                let trace = settled(trace, from).map_err(unreadable)?;
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
mod tests;
