//! A run as an offline run of Weights & Biases, which `wandb sync FOLDER` uploads.
//!
//! The folder is `wandb/offline-run-TIME-ID` with `run-ID.wandb`, a log of protobuf messages (`Record` of
//! `wandb_internal.proto` of wandb 0.26), and `files/` with the files of the run. Numbers are rows of the
//! history: `_step` counts rows, and `step` is the training step, which is the axis of all numbers. Each
//! session is a run of its own, in the group of the run's name.

use crate::config::WandbConfig;
use crate::facts::{MAX_FILE, Run};
use crate::wandb_log::{HEADER, Log};
use prost::encoding::{WireType, encode_key, encode_varint, int32, int64, string, uint64};
use serde_json::Value;
use std::collections::BTreeSet;
use std::fs::File;
use std::io::Write;
use std::path::PathBuf;

/// Numbers of the fields of `Record`.
const NUM: u32 = 1;
const HISTORY: u32 = 2;
const SUMMARY: u32 = 3;
const FILES: u32 = 6;
const METRIC: u32 = 12;
const RUN: u32 = 17;
const EXIT: u32 = 18;
const VERSIONS: u32 = 21;
/// Of an item of configuration, history and summary.
const KEY: u32 = 1;
const VALUE_JSON: u32 = 16;
/// Of all of these: its items.
const ITEM: u32 = 1;
/// The version of wandb whose records these are.
const PRODUCER: &str = "0.26.0";
/// Numbers whose axis is said at most.
const MAX_KNOWN: usize = 2000;
/// The training step among the numbers of a row.
const STEP: &str = "step";

/// An offline run at work.
#[derive(Debug)]
pub(crate) struct Wandb {
    file: File,
    log: Log,
    /// `files/` of the run.
    folder: PathBuf,
    began_s: f64,
    /// Records and rows so far.
    records: i64,
    rows: i64,
    /// Numbers whose axis is said.
    known: BTreeSet<String>,
}

impl Wandb {
    /// Begins a run in a folder of `folder`.
    ///
    /// # Errors
    /// If it cannot be written.
    pub(crate) fn start(
        config: &WandbConfig,
        run: &Run,
        folder: &std::path::Path,
        now_unix_s: f64,
    ) -> std::io::Result<Self> {
        let id = run.session(now_unix_s)[..8].to_owned();
        let own = folder.join(format!("offline-run-{}-{id}", stamp(now_unix_s as u64)));
        std::fs::create_dir_all(own.join("files"))?;
        let mut wandb = Self {
            file: File::create_new(own.join(format!("run-{id}.wandb")))?,
            log: Log::default(),
            folder: own.join("files"),
            began_s: now_unix_s,
            records: 0,
            rows: 0,
            known: BTreeSet::new(),
        };
        wandb.file.write_all(&HEADER)?;
        let mut versions = Vec::new();
        string::encode(1, &PRODUCER.to_owned(), &mut versions);
        let mut header = Vec::new();
        message(1, &versions, &mut header);
        let run = run_record(config, run, &id, now_unix_s);
        wandb.write([(VERSIONS, header), (RUN, run)])?;
        Ok(wandb)
    }

    /// Adds a row of numbers.
    ///
    /// # Errors
    /// If it cannot be written.
    pub(crate) fn row(
        &mut self,
        step: u64,
        numbers: &[(String, f64)],
        now_unix_s: f64,
    ) -> std::io::Result<()> {
        let mut records = Vec::new();
        for (name, _) in numbers {
            if self.known.len() < MAX_KNOWN && self.known.insert(name.clone()) {
                records.push((METRIC, axis(name)));
            }
        }
        let number = |(name, value): &(String, f64)| (name.clone(), value.to_string());
        let numbers = numbers.iter().map(number).chain([
            (STEP.to_owned(), step.to_string()),
            ("_step".into(), self.rows.to_string()),
            ("_timestamp".into(), now_unix_s.to_string()),
            (
                "_runtime".into(),
                (now_unix_s - self.began_s).max(0.0).to_string(),
            ),
        ]);
        let numbers: Vec<(String, String)> = numbers.collect();
        let mut history = items(&numbers);
        let mut row = Vec::new();
        int64::encode(1, &self.rows, &mut row);
        message(2, &row, &mut history);
        records.extend([(HISTORY, history), (SUMMARY, items(&numbers))]);
        self.rows += 1;
        self.write(records)
    }

    /// Ends the run with the files that go along; those that are not there or too large are left out.
    ///
    /// # Errors
    /// If it cannot be written.
    pub(crate) fn end(
        &mut self,
        files: &[PathBuf],
        failed: bool,
        now_unix_s: f64,
    ) -> std::io::Result<()> {
        let mut list = Vec::new();
        for file in files {
            let fits = std::fs::metadata(file).is_ok_and(|m| m.len() <= MAX_FILE);
            if let Some(name) = file.file_name().filter(|_| fits) {
                std::fs::copy(file, self.folder.join(name))?;
                let mut item = Vec::new();
                string::encode(1, &name.to_string_lossy().into_owned(), &mut item);
                // It is uploaded at the end.
                int32::encode(2, &1, &mut item);
                message(ITEM, &item, &mut list);
            }
        }
        let mut exit = Vec::new();
        int32::encode(1, &i32::from(failed), &mut exit);
        int32::encode(2, &((now_unix_s - self.began_s).max(0.0) as i32), &mut exit);
        self.write([(FILES, list), (EXIT, exit)])
    }

    /// Appends records in one write.
    fn write(&mut self, records: impl IntoIterator<Item = (u32, Vec<u8>)>) -> std::io::Result<()> {
        let mut out = Vec::new();
        for (kind, body) in records {
            self.records += 1;
            let mut record = Vec::new();
            int64::encode(NUM, &self.records, &mut record);
            message(kind, &body, &mut record);
            self.log.append(&record, &mut out);
        }
        self.file.write_all(&out)
    }
}

/// `RunRecord`.
fn run_record(config: &WandbConfig, run: &Run, id: &str, now_unix_s: f64) -> Vec<u8> {
    let mut out = Vec::new();
    let recipe = run.recipe.as_object().into_iter().flatten();
    let pairs: Vec<(String, String)> = recipe
        .map(|(key, value): (&String, &Value)| (key.clone(), value.to_string()))
        .collect();
    let texts = [
        (1, id),
        (2, config.entity.as_deref().unwrap_or_default()),
        (3, config.project.as_str()),
        (6, run.name.as_str()),
        (7, run.command.as_str()),
        (8, run.name.as_str()),
    ];
    for (field, text) in texts.iter().filter(|(_, text)| !text.is_empty()) {
        string::encode(*field, &(*text).to_owned(), &mut out);
    }
    message(4, &items(&pairs), &mut out);
    string::encode_repeated(10, &config.tags, &mut out);
    let mut start = Vec::new();
    int64::encode(1, &(now_unix_s as i64), &mut start);
    int32::encode(2, &((now_unix_s.fract() * 1e9) as i32), &mut start);
    message(17, &start, &mut out);
    out
}

/// `MetricRecord`: the axis of a number is the training step.
fn axis(name: &str) -> Vec<u8> {
    let mut out = Vec::new();
    string::encode(1, &name.to_owned(), &mut out);
    string::encode(4, &STEP.to_owned(), &mut out);
    let mut options = Vec::new();
    // Rows without a step take the last one; the metric is defined by its name.
    uint64::encode(1, &1, &mut options);
    uint64::encode(3, &1, &mut options);
    message(6, &options, &mut out);
    out
}

/// Items with keys and JSON values.
fn items(pairs: &[(String, String)]) -> Vec<u8> {
    let mut out = Vec::new();
    for (key, value) in pairs {
        let mut item = Vec::new();
        string::encode(KEY, key, &mut item);
        string::encode(VALUE_JSON, value, &mut item);
        message(ITEM, &item, &mut out);
    }
    out
}

/// A field that is a message.
fn message(field: u32, bytes: &[u8], out: &mut Vec<u8>) {
    encode_key(field, WireType::LengthDelimited, out);
    encode_varint(bytes.len() as u64, out);
    out.extend_from_slice(bytes);
}

/// `YYYYMMDD_HHMMSS` of seconds since 1970, in UTC.
fn stamp(unix_s: u64) -> String {
    let minute = sinew_view::date(unix_s as f64);
    let minute = minute.replace(['-', ':'], "").replace(' ', "_");
    format!("{minute}{:02}", unix_s % 60)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_those_of_the_calendar() {
        assert_eq!(stamp(0), "19700101_000000");
        assert_eq!(stamp(951_782_399), "20000228_235959");
        assert_eq!(stamp(951_782_400), "20000229_000000");
        assert_eq!(stamp(1_735_689_599), "20241231_235959");
        assert_eq!(stamp(4_102_444_800), "21000101_000000");
    }
}
