//! Folders of files with rows.
//!
//! The order of the rows is that of the names, so that equal folders give equal tasks on every machine.
//! Hidden files are left out, and so are files whose ending is unknown, such as a README.

use crate::error::TasksError;
use crate::row::{Row, Rows, read_error};
use crate::rows::{is_known, read_file};
use std::fs;
use std::path::{Path, PathBuf};

/// File that makes a folder a task of another form.
const TASK_FILE: &str = "task.toml";

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

/// Appends the rows of all files of a folder.
fn read_folder(path: &Path, rows: &mut Rows) -> Result<(), TasksError> {
    let files = data_files(path)?;
    if !files.is_empty() {
        return files.iter().try_for_each(|file| read_file(file, rows));
    }
    let folders = entries(path)?;
    let tasks = folders.iter().any(|p| p.join(TASK_FILE).is_file());
    let hint = if tasks || path.join(TASK_FILE).is_file() {
        format!(
            "\n  hint: folders with {TASK_FILE} are tasks of env = {{ type = \"harbor\", tasks = {path:?} }}"
        )
    } else {
        String::new()
    };
    Err(TasksError::Format {
        path: path.into(),
        reason: format!(
            "no rows here; allowed: files that end in .jsonl, .json, .csv, .tsv or .parquet{hint}"
        ),
    })
}
