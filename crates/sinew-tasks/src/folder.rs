//! Folders of tasks: files of rows, or one folder for each task.
//!
//! The order of the rows is that of the names, so that equal folders give equal tasks on every machine.
//! Hidden files are left out, and so are files whose ending is unknown, such as a README.

use crate::error::TasksError;
use crate::row::{Row, Rows, read_error, row_error};
use crate::rows::{is_known, read_file};
use serde_json::{Map, Value};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Columns of a task with a separate folder.
const TASK_FILE: &str = "task.toml";

/// Text of such a task, as the column `prompt`.
const PROMPT_FILES: [&str; 2] = ["prompt.md", "instruction.md"];

/// Starts of the names of files that are held out, as the hub's data sets name them.
const HELD_OUT: [&str; 5] = ["test", "eval", "valid", "dev", "held"];

/// Reads all rows of a file, or of a folder without named splits.
///
/// # Errors
/// The first file that cannot be read, or the first invalid row, with its line.
pub fn read_rows(path: &Path) -> Result<Vec<Row>, TasksError> {
    let mut rows = Rows::default();
    if path.is_dir() {
        read_folder(path, &mut rows)?;
    } else {
        read_file(path, &mut rows)?;
    }
    Ok(rows.rows)
}

/// Reads all rows of some files.
pub(crate) fn read_files(files: &[PathBuf]) -> Result<Vec<Row>, TasksError> {
    let mut rows = Rows::default();
    files.iter().try_for_each(|f| read_file(f, &mut rows))?;
    Ok(rows.rows)
}

/// Files of a folder by split.
#[derive(Debug, Default)]
pub(crate) struct NamedSplits {
    pub(crate) train: Vec<PathBuf>,
    pub(crate) held_out: Vec<PathBuf>,
    /// Files of no split.
    pub(crate) others: Vec<PathBuf>,
}

/// Files of a folder by split; `None` if it does not have files of both.
pub(crate) fn named_splits(path: &Path) -> Result<Option<NamedSplits>, TasksError> {
    let mut splits = NamedSplits::default();
    for file in data_files(path)? {
        let name = file.file_name().unwrap_or_default();
        let name = name.to_string_lossy().to_ascii_lowercase();
        if name.starts_with("train") {
            splits.train.push(file);
        } else if HELD_OUT.iter().any(|h| name.starts_with(h)) {
            splits.held_out.push(file);
        } else {
            splits.others.push(file);
        }
    }
    let both = !splits.train.is_empty() && !splits.held_out.is_empty();
    Ok(both.then_some(splits))
}

/// Entries of a folder in the order of their names, hidden ones left out.
fn entries(path: &Path) -> Result<Vec<PathBuf>, TasksError> {
    let failed = |e| read_error(path, e);
    let mut found = Vec::new();
    for entry in fs::read_dir(path).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        if !entry.file_name().to_string_lossy().starts_with('.') {
            found.push(entry.path());
        }
    }
    found.sort();
    Ok(found)
}

/// Files of rows in a folder, and in its `data` folder, where the hub keeps them.
fn data_files(path: &Path) -> Result<Vec<PathBuf>, TasksError> {
    let mut files = entries(path)?;
    let data = path.join("data");
    if data.is_dir() {
        files.extend(entries(&data)?);
    }
    files.retain(|f| f.is_file() && is_known(f));
    Ok(files)
}

/// Appends the rows of all files of a folder, or of its task folders.
fn read_folder(path: &Path, rows: &mut Rows) -> Result<(), TasksError> {
    let tasks: Vec<PathBuf> = entries(path)?
        .into_iter()
        .filter(|p| p.join(TASK_FILE).is_file())
        .collect();
    let files = data_files(path)?;
    if tasks.is_empty() && files.is_empty() {
        let reason = format!(
            "no tasks here; allowed: files that end in .jsonl, .json, .csv, .tsv or .parquet, or \
             folders with {TASK_FILE}"
        );
        return Err(TasksError::Format {
            path: path.into(),
            reason,
        });
    }
    if !tasks.is_empty() {
        return tasks
            .iter()
            .try_for_each(|task| read_task(path, task, rows));
    }
    files.iter().try_for_each(|file| read_file(file, rows))
}

/// Reads a file of a folder of tasks. Links that lead out of the folder are refused: they would show a file
/// of the user to the model and to everyone who sees its prompts.
///
/// # Errors
/// If it cannot be read, or lies elsewhere.
fn read_inside(root: &Path, file: &Path) -> Result<String, TasksError> {
    let real = |path: &Path| path.canonicalize().map_err(|e| read_error(path, e));
    if !real(file)?.starts_with(real(root)?) {
        return Err(TasksError::Format {
            path: file.into(),
            reason:
                "it is a link that leads out of the folder of tasks; allowed: files of the folder"
                    .into(),
        });
    }
    fs::read_to_string(file).map_err(|e| read_error(file, e))
}

/// One task folder: the keys of `task.toml`, the text as `prompt`, and its path as `folder`.
fn read_task(root: &Path, dir: &Path, rows: &mut Rows) -> Result<(), TasksError> {
    let path = dir.join(TASK_FILE);
    let text = read_inside(root, &path)?;
    let mut columns: Map<String, Value> = toml::from_str(&text).map_err(|e| {
        let before = e.span().map_or("", |s| &text[..s.start]);
        row_error(&path, before.lines().count().max(1), e.message())
    })?;
    for name in PROMPT_FILES {
        let file = dir.join(name);
        if file.is_file() {
            let prompt = read_inside(root, &file)?;
            columns.entry("prompt").or_insert(prompt.trim_end().into());
        }
    }
    let folder = dir.to_string_lossy().into_owned();
    columns.entry("folder").or_insert(folder.into());
    let path: Arc<Path> = path.into();
    let prompt = columns.get("prompt").and_then(Value::as_str);
    let bytes = text.len() + prompt.map_or(0, str::len);
    rows.push(&path, 1, columns, bytes)
}
