//! Rows of a benchmark: read from files, checked, and completed with the columns that it derives.
//!
//! The prepared rows are written into the folder of the measurement, so that what was asked can be read there
//! and the same rows are asked again.

use crate::bench::Bench;
use sinew_tasks::{DerivedColumns, TasksError, read_rows};
use std::fs;
use std::path::{Path, PathBuf};

/// Endings of files with rows.
const ENDINGS: [&str; 6] = ["jsonl", "ndjson", "json", "csv", "tsv", "parquet"];

/// Reason why rows cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum RowsError {
    /// A file or a row cannot be read, or a column cannot be made.
    #[error(transparent)]
    Rows(#[from] TasksError),
    /// A row lacks a column.
    #[error("--bench {bench}: {} has no column `{column}`; needed: {}; columns: {}", path.display(), needed.join(", "), columns.join(", "))]
    Column {
        /// Name of the benchmark.
        bench: String,
        /// File of the row.
        path: PathBuf,
        /// The missing column.
        column: String,
        /// Columns that the benchmark needs.
        needed: Vec<String>,
        /// Columns of the row.
        columns: Vec<String>,
    },
    /// There are no rows.
    #[error("--bench {bench}: {} has no rows", path.display())]
    Empty {
        /// Name of the benchmark.
        bench: String,
        /// File or folder.
        path: PathBuf,
    },
    /// A folder or file cannot be read or written.
    #[error("{}: {source}", path.display())]
    Io {
        /// File or folder.
        path: PathBuf,
        /// The error.
        source: std::io::Error,
    },
}

/// The files of a local source: the file itself, or those of a folder (or of its folder `data`) whose names
/// begin with the split; a folder without such files is taken as a whole.
///
/// # Errors
/// If the folder cannot be read.
pub fn local_files(source: &Path, split: &str) -> Result<Vec<PathBuf>, RowsError> {
    if !source.is_dir() {
        return Ok(vec![source.to_owned()]);
    }
    let mut found = Vec::new();
    for folder in [source.to_owned(), source.join("data")] {
        if !folder.is_dir() {
            continue;
        }
        let failed = |source| RowsError::Io {
            path: folder.clone(),
            source,
        };
        for entry in fs::read_dir(&folder).map_err(failed)? {
            let path = entry.map_err(failed)?.path();
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            let ending = path.extension().unwrap_or_default().to_string_lossy();
            if name.starts_with(split) && ENDINGS.contains(&ending.as_ref()) {
                found.push(path);
            }
        }
    }
    found.sort();
    if found.is_empty() {
        found.push(source.to_owned());
    }
    Ok(found)
}

/// Reads the rows of `files` and writes them to `target` as JSON lines, with the columns that the benchmark
/// derives. Returns their number.
///
/// # Errors
/// If a file cannot be read, a row lacks a column, or there are none.
pub fn prepare(bench: &Bench, files: &[PathBuf], target: &Path) -> Result<usize, RowsError> {
    let templates = bench.columns.iter();
    let derived =
        DerivedColumns::new(templates.map(|(name, text)| (name.as_str(), text.as_str())))?;
    let (mut lines, mut count) = (String::new(), 0);
    for file in files {
        for mut row in read_rows(file)? {
            let missing = bench
                .needs
                .iter()
                .find(|name| !row.columns.contains_key(*name));
            if let Some(column) = missing {
                return Err(RowsError::Column {
                    bench: bench.name.clone(),
                    path: row.path.to_path_buf(),
                    column: column.clone(),
                    needed: bench.needs.clone(),
                    columns: row.columns.keys().cloned().collect(),
                });
            }
            derived.add(&mut row)?;
            lines.push_str(&serde_json::Value::Object(row.columns).to_string());
            lines.push('\n');
            count += 1;
        }
    }
    if count == 0 {
        return Err(RowsError::Empty {
            bench: bench.name.clone(),
            path: files.first().cloned().unwrap_or_default(),
        });
    }
    fs::write(target, lines).map_err(|source| RowsError::Io {
        path: target.to_owned(),
        source,
    })?;
    Ok(count)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Value;

    fn prepared(name: &str, rows: &str) -> Result<Vec<Value>, String> {
        let dir = tempfile::tempdir().unwrap();
        let (source, target) = (dir.path().join("test.jsonl"), dir.path().join("rows.jsonl"));
        fs::write(&source, rows).unwrap();
        let bench = Bench::named(name).unwrap().remove(0);
        let files = local_files(dir.path(), "test").unwrap();
        assert_eq!(files, [source]);
        prepare(&bench, &files, &target).map_err(|e| e.to_string())?;
        let text = fs::read_to_string(&target).unwrap();
        Ok(text
            .lines()
            .map(|l| serde_json::from_str(l).unwrap())
            .collect())
    }

    #[test]
    fn tests_options_and_letters_are_derived() {
        let row = r#"{"text": "Add.", "test_list": ["assert f(1) == 2", "assert f(2) == 3"]}"#;
        let rows = prepared("mbpp", row).unwrap();
        assert_eq!(rows[0]["tests"], "\nassert f(1) == 2\nassert f(2) == 3");
        let row = r#"{"question": "Q?", "choices": ["x", "y"], "answer": 1, "subject": "law"}"#;
        let rows = prepared("mmlu", row).unwrap();
        assert_eq!(
            (&rows[0]["letter"], &rows[0]["options"]),
            (&"B".into(), &"A. x\nB. y\n".into())
        );
        assert_eq!(rows[0]["subject"], "law");
        let row = r#"{"question": "Q?", "choices": ["x", "y"], "answer": "0"}"#;
        let rows = prepared("mmlu", row).unwrap();
        assert_eq!(
            (&rows[0]["letter"], &rows[0]["subject"]),
            (&"A".into(), &"all".into())
        );
    }

    #[test]
    fn tests_that_import_numpy_get_a_stand_in() {
        let row = serde_json::json!({
            "task_id": "HumanEval/0", "prompt": "def f(x):\n", "entry_point": "f",
            "test": "import numpy as np\n\ndef check(candidate):\n    assert candidate(1) == 1\n",
        });
        let rows = prepared("humaneval+", &row.to_string()).unwrap();
        let tests = rows[0]["tests"].as_str().unwrap();
        assert!(
            !tests.contains("import numpy") && tests.starts_with("class np:"),
            "{tests}"
        );
        assert!(tests.contains("def test_all():\n    check(f)"), "{tests}");
    }

    #[test]
    fn missing_columns_and_rows_are_named() {
        let error = prepared("gsm8k", r#"{"question": "Q?"}"#).unwrap_err();
        assert!(
            error.contains("no column `answer`; needed: question, answer"),
            "{error}"
        );
        let error = prepared("gsm8k", "\n").unwrap_err();
        assert!(error.contains("has no rows"), "{error}");
        let row = r#"{"question": "Q?", "choices": ["x"], "answer": "z"}"#;
        let error = prepared("mmlu", row).unwrap_err();
        assert!(error.contains("column `letter`"), "{error}");
    }

    #[test]
    fn a_folder_without_the_split_is_taken_whole() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("rows.jsonl"), "{}\n").unwrap();
        assert_eq!(local_files(dir.path(), "test").unwrap(), [dir.path()]);
        fs::create_dir(dir.path().join("data")).unwrap();
        let file = dir.path().join("data/test-00000-of-00001.jsonl");
        fs::write(&file, "{}\n").unwrap();
        assert_eq!(
            local_files(dir.path(), "test").unwrap(),
            std::slice::from_ref(&file)
        );
        assert_eq!(local_files(&file, "test").unwrap(), [file]);
    }
}
