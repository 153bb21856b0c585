//! Rows with settings as a taskset.

use crate::error::TasksError;
use crate::folder::{named_splits, read_rows};
use crate::row::{Row, made_rows};
use crate::rows::read_file;
use crate::template::PromptTemplate;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use sinew_env::{Split, Taskset, TasksetError};
use sinew_types::{Message, Role, Task, TaskId};
use std::collections::{BTreeMap, HashSet};
use std::path::{Path, PathBuf};

/// A worked example: a question and its answer, before the task's own prompt.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Example {
    /// Text of the user.
    pub user: String,
    /// Text of the assistant.
    pub assistant: String,
}

/// Source of the held-out split.
#[derive(Clone, Debug, PartialEq)]
pub enum Splits {
    /// Share of the rows, chosen by the hash of their prompts, above 0 and below 1. A folder whose files are
    /// named `train…` and `test…`, `eval…`, `valid…` or `dev…` has its splits already, and keeps them.
    Share(f64),
    /// Rows of their own.
    Own(Source),
}

/// Where rows come from.
#[derive(Clone, Debug, PartialEq)]
pub enum Source {
    /// A file or folder.
    Files(PathBuf),
    /// Rows that were made already.
    Made {
        /// What made them, such as `gen.py:rows`: messages name it, with the index of a row from 0.
        by: String,
        /// The columns of each row, in order.
        rows: Vec<Map<String, Value>>,
    },
}

impl From<PathBuf> for Source {
    fn from(path: PathBuf) -> Self {
        Self::Files(path)
    }
}

impl From<&Path> for Source {
    fn from(path: &Path) -> Self {
        Self::Files(path.into())
    }
}

impl Source {
    /// The rows. Those that were made are moved out.
    fn read(&mut self) -> Result<Vec<Row>, TasksError> {
        match self {
            Self::Files(path) => read_rows(path),
            Self::Made { by, rows } => made_rows(by, std::mem::take(rows)),
        }
    }

    /// Path of the files, or what made the rows, for messages.
    fn shown(&self) -> &Path {
        match self {
            Self::Files(path) => path,
            Self::Made { by, .. } => Path::new(by),
        }
    }
}

/// Settings of a [`TableTaskset`].
#[derive(Clone, Debug, PartialEq)]
pub struct TableConfig {
    /// Name in task ids.
    pub name: String,
    /// Where the rows come from.
    pub source: Source,
    /// Source of the held-out split. Without a file it is never empty, if there are two different prompts.
    pub held_out: Splits,
    /// Jinja template over the columns. `None`: the column `prompt`.
    pub prompt: Option<String>,
    /// Jinja expression over the columns: rows for which it is false are left out.
    pub filter: Option<String>,
    /// System prompt, before everything else.
    pub system: Option<String>,
    /// Worked examples after the system prompt, in order.
    pub examples: Vec<Example>,
    /// Column whose value is the task type. `None`: all tasks have one type, the name.
    pub kind: Option<String>,
}

/// Numbers of rows, by what became of them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct TableSummary {
    /// Rows of the training split.
    pub train: usize,
    /// Rows of the held-out split.
    pub held_out: usize,
    /// Rows that the filter left out.
    pub filtered: usize,
    /// Rows of the training split that are left out since their prompt is held out.
    pub overlapping: usize,
    /// Rows of the training split by task type.
    pub kinds: BTreeMap<String, usize>,
}

/// A taskset of rows, all in memory. Prompts are rendered when a task is asked for.
///
/// A task's [`Task::data`] is the whole row, its prompt the last message of the user, its seed the index of
/// the row in its split.
#[derive(Debug)]
pub struct TableTaskset {
    config: TableConfig,
    template: PromptTemplate,
    train: Vec<Row>,
    held_out: Vec<Row>,
    summary: TableSummary,
}

impl TableTaskset {
    /// Reads all rows and renders each once.
    ///
    /// # Errors
    /// The first invalid row or setting, or a split without rows.
    pub fn open(mut config: TableConfig) -> Result<Self, TasksError> {
        let template = PromptTemplate::new(config.prompt.as_deref(), config.filter.as_deref())?;
        let mut summary = TableSummary::default();
        let (train, own) = sources(&mut config)?;
        let mut train = kept(train, &template, &mut summary)?;
        let held_out = match own {
            Some(rows) => kept(rows, &template, &mut summary)?,
            None => split(&mut train, share(&config.held_out)?),
        };
        let seen: HashSet<[u8; 32]> = held_out.iter().map(|(_, hash)| *hash).collect();
        let all = train.len();
        train.retain(|(_, hash)| !seen.contains(hash));
        summary.overlapping = all - train.len();
        let rows = |split: Vec<(Row, _)>| split.into_iter().map(|(row, _)| row).collect();
        let mut table = Self {
            train: rows(train),
            held_out: rows(held_out),
            config,
            template,
            summary,
        };
        table.count()?;
        Ok(table)
    }

    /// Numbers of rows.
    pub fn summary(&self) -> &TableSummary {
        &self.summary
    }

    /// Counts the rows, and refuses a split without any.
    fn count(&mut self) -> Result<(), TasksError> {
        for row in &self.train {
            let kind = self.kind(row)?;
            *self.summary.kinds.entry(kind).or_default() += 1;
        }
        for row in &self.held_out {
            self.kind(row)?;
        }
        self.summary.train = self.train.len();
        self.summary.held_out = self.held_out.len();
        let empty = match (self.train.is_empty(), self.held_out.is_empty()) {
            (true, _) => "no rows to train on",
            (_, true) => "no rows to hold out for the evaluation",
            _ => return Ok(()),
        };
        let (filtered, overlapping) = (self.summary.filtered, self.summary.overlapping);
        Err(TasksError::Format {
            path: self.config.source.shown().into(),
            reason: format!(
                "{empty}: the filter left out {filtered} rows, {overlapping} are held out as well; \
                 at least 2 different prompts are needed"
            ),
        })
    }

    /// The task type of a row.
    fn kind(&self, row: &Row) -> Result<String, TasksError> {
        let Some(column) = &self.config.kind else {
            return Ok(self.config.name.clone());
        };
        match row.columns.get(column) {
            Some(Value::String(kind)) => Ok(kind.clone()),
            Some(value @ (Value::Number(_) | Value::Bool(_))) => Ok(value.to_string()),
            Some(other) => Err(row.error(format!(
                "tasks.kind: the column `{column}` is {other}; allowed: text or a number"
            ))),
            None => Err(row.error(format!("tasks.kind: no column `{column}`"))),
        }
    }

    /// The task of a row.
    fn task(&self, split: Split, index: usize, row: &Row) -> Result<Task, TasksError> {
        let mut preamble = Vec::new();
        let text = |role, text: &str| Message::new(role, text.to_owned());
        preamble.extend(self.config.system.as_deref().map(|s| text(Role::System, s)));
        for example in &self.config.examples {
            preamble.push(text(Role::User, &example.user));
            preamble.push(text(Role::Assistant, &example.assistant));
        }
        let mut messages = self.template.messages(row)?;
        let Some(last) = messages.pop() else {
            return Err(row.error("the prompt has no message"));
        };
        preamble.extend(messages);
        Ok(Task {
            id: TaskId::new(format!("{}/{}/{index}", self.config.name, split.as_str())),
            kind: self.kind(row)?,
            prompt: last.content.text().into_owned(),
            preamble,
            data: Value::Object(row.columns.clone()),
            seed: index as u64,
        })
    }
}

impl Taskset for TableTaskset {
    fn name(&self) -> &str {
        &self.config.name
    }

    fn len(&self, split: Split) -> usize {
        self.rows(split).len()
    }

    fn get(&self, split: Split, index: usize) -> Result<Task, TasksetError> {
        let rows = self.rows(split);
        let row = rows.get(index).ok_or_else(|| TasksetError::Index {
            taskset: self.config.name.clone(),
            split,
            index,
            len: rows.len(),
        })?;
        self.task(split, index, row).map_err(|e| TasksetError::Row {
            taskset: self.config.name.clone(),
            line: row.line,
            message: e.to_string(),
        })
    }
}

impl TableTaskset {
    fn rows(&self, split: Split) -> &[Row] {
        match split {
            Split::Train => &self.train,
            Split::HeldOut => &self.held_out,
        }
    }
}

/// Rows to train on, and those of the held-out split if they have files of their own.
fn sources(config: &mut TableConfig) -> Result<(Vec<Row>, Option<Vec<Row>>), TasksError> {
    if let Splits::Own(held_out) = &mut config.held_out {
        return Ok((config.source.read()?, Some(held_out.read()?)));
    }
    if let Source::Files(folder) = &config.source
        && folder.is_dir()
    {
        let (train, held_out) = named_splits(folder)?;
        if !train.is_empty() && !held_out.is_empty() {
            return Ok((read_files(&train)?, Some(read_files(&held_out)?)));
        }
    }
    Ok((config.source.read()?, None))
}

fn read_files(files: &[PathBuf]) -> Result<Vec<Row>, TasksError> {
    let mut rows = Vec::new();
    files.iter().try_for_each(|f| read_file(f, &mut rows))?;
    Ok(rows)
}

/// The share of rows to hold out.
fn share(splits: &Splits) -> Result<f64, TasksError> {
    match splits {
        Splits::Share(share) if *share > 0.0 && *share < 1.0 => Ok(*share),
        Splits::Share(share) => Err(TasksError::Key {
            key: "held_out",
            value: share.to_string(),
            reason: "allowed: above 0 and below 1, for example 0.05".into(),
        }),
        Splits::Own(_) => Ok(0.0),
    }
}

/// Rows that the filter keeps, each with the hash of its prompt.
fn kept(
    rows: Vec<Row>,
    template: &PromptTemplate,
    summary: &mut TableSummary,
) -> Result<Vec<(Row, [u8; 32])>, TasksError> {
    let mut kept = Vec::with_capacity(rows.len());
    for row in rows {
        if !template.keeps(&row)? {
            summary.filtered += 1;
            continue;
        }
        let mut hash = blake3::Hasher::new();
        for message in template.messages(&row)? {
            hash.update(message.content.text().as_bytes());
            hash.update(b"\0");
        }
        let hash = *hash.finalize().as_bytes();
        kept.push((row, hash));
    }
    Ok(kept)
}

/// Takes the held-out part from the rows: those whose hash is below the share, so that the rows that are held
/// out stay the same when others are added. Of few rows it takes the one with the lowest hash.
fn split(rows: &mut Vec<(Row, [u8; 32])>, share: f64) -> Vec<(Row, [u8; 32])> {
    let number = |hash: &[u8; 32]| {
        let [a, b, c, d, ..] = *hash;
        f64::from(u32::from_be_bytes([a, b, c, d])) / 2f64.powi(32)
    };
    let lowest = rows.iter().map(|(_, h)| number(h)).reduce(f64::min);
    let below = |hash: &[u8; 32]| {
        number(hash) < share || lowest.is_some_and(|l| l >= share && number(hash) <= l)
    };
    let all = std::mem::take(rows);
    let (held_out, train) = all.into_iter().partition(|(_, hash)| below(hash));
    *rows = train;
    held_out
}
