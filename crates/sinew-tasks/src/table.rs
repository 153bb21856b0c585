//! Rows with settings as a taskset.

use crate::error::TasksError;
use crate::folder::{NamedSplits, named_splits, read_files, read_rows};
use crate::row::{Row, made_rows};
use crate::template::PromptTemplate;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use sinew_dialect::{Ignored, count_ignored};
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

/// Default share of the rows that is held out.
const SHARE: f64 = 0.05;

/// Source of the held-out split.
#[derive(Clone, Debug, PartialEq)]
pub enum Splits {
    /// The source's own split: that of a folder whose files are named `train…` and `test…`, `eval…`, `valid…`
    /// or `dev…`, or that of [`Source::Split`]. Other sources hold out 5 % of the rows, like
    /// [`Splits::Share`].
    Given,
    /// Share of the rows, chosen by the hash of their prompts, above 0. With 1 there are none to train on:
    /// they are measured only. Refused for a source that has a separate held-out split.
    Share(f64),
    /// Separate rows.
    Own(Source),
}

/// Source of rows.
#[derive(Clone, Debug, PartialEq)]
pub enum Source {
    /// A file or folder.
    Files(PathBuf),
    /// Files by split, such as those of a data set of the hub.
    Split {
        /// Name for messages.
        name: String,
        /// Files to train on.
        train: Vec<PathBuf>,
        /// Files that are held out; can be empty.
        held_out: Vec<PathBuf>,
    },
    /// Rows that were made already.
    Made {
        /// Maker of the rows, such as `gen.py:rows`: messages name it, with the index of a row from 0.
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
    /// The rows to train on. Those that were made are moved out.
    fn read(&mut self) -> Result<Vec<Row>, TasksError> {
        match self {
            Self::Files(path) => read_rows(path),
            Self::Split { train, .. } => read_files(train),
            Self::Made { by, rows } => made_rows(by, std::mem::take(rows)),
        }
    }

    /// The rows, as a held-out split of another source: the held-out ones, where it has splits.
    fn read_held_out(&mut self) -> Result<Vec<Row>, TasksError> {
        match self {
            Self::Split { held_out, .. } if !held_out.is_empty() => read_files(held_out),
            other => other.read(),
        }
    }

    /// Path of the files, or what made the rows, for messages.
    fn shown(&self) -> &Path {
        match self {
            Self::Files(path) => path,
            Self::Split { name, .. } => Path::new(name),
            Self::Made { by, .. } => Path::new(by),
        }
    }
}

/// Settings of a [`TableTaskset`].
#[derive(Clone, Debug, PartialEq)]
pub struct TableConfig {
    /// Name in task ids.
    pub name: String,
    pub source: Source,
    /// Source of the held-out split. A split made of the rows is never empty if there are two different
    /// prompts.
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

/// Numbers of rows, by their fate.
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
    /// Files that are left out, since they belong to neither split, for users.
    pub notes: Vec<String>,
}

/// A taskset of rows, all in memory. Prompts are rendered when a task is requested.
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
        let (train, own) = sources(&mut config, &mut summary.notes)?;
        let mut kept = |rows| kept(rows, &config, &template, &mut summary);
        let mut train = kept(train)?;
        let held_out = match own {
            Some(rows) => kept(rows)?,
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

    /// BLAKE3 of all rows of both splits, in their order: 64 hexadecimal digits.
    ///
    /// Rows that were left out are not part of it, and neither are file names and lines.
    pub fn digest(&self) -> String {
        let mut hasher = blake3::Hasher::new();
        for split in [Split::Train, Split::HeldOut] {
            hasher.update(split.as_str().as_bytes());
            for row in self.rows(split) {
                hasher.update(b"\n");
                hasher.update(Value::Object(row.columns.clone()).to_string().as_bytes());
            }
        }
        hasher.finalize().to_hex().to_string()
    }

    /// Counts the rows, and refuses a split without any that should have some.
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
        let measured = self.config.held_out == Splits::Share(1.0);
        let empty = match (self.train.is_empty(), self.held_out.is_empty()) {
            (true, _) if !measured => "no rows to train on",
            (_, true) => "no rows to hold out for the evaluation",
            _ => return Ok(()),
        };
        let (filtered, overlapping) = (self.summary.filtered, self.summary.overlapping);
        if self.train.len() + self.held_out.len() + filtered + overlapping == 0 {
            return Err(TasksError::Format {
                path: self.config.source.shown().into(),
                reason: "it has no rows; at least 2 different prompts are needed".into(),
            });
        }
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
        let (mut messages, _) = self.template.messages(row)?;
        let Some(last) = messages.pop() else {
            return Err(row.error("the prompt has no message"));
        };
        let preamble = preamble(&self.config, messages);
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
    /// Rows of a split, in their order.
    fn rows(&self, split: Split) -> &[Row] {
        match split {
            Split::Train => &self.train,
            Split::HeldOut => &self.held_out,
        }
    }
}

/// The messages before the last one: the system prompt, the worked examples, then the row's own.
fn preamble(config: &TableConfig, messages: Vec<Message>) -> Vec<Message> {
    let text = |role, text: &str| Message::new(role, text.to_owned());
    let system = config.system.as_deref().map(|s| text(Role::System, s));
    let mut messages = messages.into_iter().peekable();
    // A row's own system prompt comes first as well.
    let own = messages.next_if(|m| m.role == Role::System);
    let examples = config.examples.iter();
    let examples = examples.flat_map(|e| {
        [
            text(Role::User, &e.user),
            text(Role::Assistant, &e.assistant),
        ]
    });
    let first = system.into_iter().chain(own);
    first.chain(examples).chain(messages).collect()
}

/// Rows to train on, and those of the held-out split if they have separate files.
fn sources(
    config: &mut TableConfig,
    notes: &mut Vec<String>,
) -> Result<(Vec<Row>, Option<Vec<Row>>), TasksError> {
    if let Splits::Own(held_out) = &mut config.held_out {
        return Ok((config.source.read()?, Some(held_out.read_held_out()?)));
    }
    let splits = match &config.source {
        Source::Files(folder) if folder.is_dir() => named_splits(folder)?,
        Source::Split {
            train, held_out, ..
        } if !held_out.is_empty() => Some(NamedSplits {
            train: train.clone(),
            held_out: held_out.clone(),
            others: Vec::new(),
        }),
        _ => None,
    };
    let Some(splits) = splits else {
        return Ok((config.source.read()?, None));
    };
    if let Splits::Share(share) = config.held_out {
        let first = splits.held_out.first().map(|f| f.display().to_string());
        return Err(TasksError::Key {
            key: "held_out",
            value: share.to_string(),
            reason: format!(
                "has no effect: {} has held-out rows of its own ({}); remove the key, or name the files to \
                 train on as tasks.source",
                config.source.shown().display(),
                first.unwrap_or_default()
            ),
        });
    }
    for other in &splits.others {
        notes.push(format!(
            "{} belongs to no split: it is left out",
            other.display()
        ));
    }
    Ok((
        read_files(&splits.train)?,
        Some(read_files(&splits.held_out)?),
    ))
}

/// The share of rows to hold out.
fn share(splits: &Splits) -> Result<f64, TasksError> {
    match splits {
        Splits::Share(share) if *share > 0.0 && *share <= 1.0 => Ok(*share),
        Splits::Share(share) => Err(TasksError::Key {
            key: "held_out",
            value: share.to_string(),
            reason: "allowed: above 0, up to 1, for example 0.05".into(),
        }),
        Splits::Given => Ok(SHARE),
        Splits::Own(_) => Ok(0.0),
    }
}

/// Rows that the filter keeps, each with the hash of its prompt.
fn kept(
    rows: Vec<Row>,
    config: &TableConfig,
    template: &PromptTemplate,
    summary: &mut TableSummary,
) -> Result<Vec<(Row, [u8; 32])>, TasksError> {
    let mut kept = Vec::with_capacity(rows.len());
    let mut unknown = Ignored::new();
    for row in rows {
        if !template.keeps(&row)? {
            summary.filtered += 1;
            continue;
        }
        let mut hash = blake3::Hasher::new();
        let (messages, fields) = template.messages(&row)?;
        for (field, count) in fields {
            count_ignored(&mut unknown, &field, count);
        }
        if config.system.is_some() && messages.iter().any(|m| m.role == Role::System) {
            return Err(row.error(
                "its messages have a system prompt, and tasks.system is another one: remove one of them",
            ));
        }
        for message in messages {
            hash.update(message.content.text().as_bytes());
            hash.update(b"\0");
        }
        let hash = *hash.finalize().as_bytes();
        kept.push((row, hash));
    }
    let notes = unknown.into_iter();
    summary
        .notes
        .extend(notes.map(|(field, n)| format!("{field} ({n}) is not read")));
    Ok(kept)
}

/// Takes the held-out part from the rows: those whose hash is below the share, so that the rows that are held
/// out stay the same when others are added. It takes the one with the lowest hash if there are few rows.
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
