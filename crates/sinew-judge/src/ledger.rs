//! Ledger of a judge: its spending and limits, and its verdicts, which need not be asked for again.
//!
//! A ledger is a file of JSON lines, `{"key": …, "values": […], "input": …, "output": …}` for a verdict and
//! the same without key and values for a call that gave none. The sums over all lines are the spending so
//! far, so a resumed run keeps its budget. A line is whole once its end is written: a last line that a crash
//! cut is dropped, and the remains of a failed write are taken back before the next line.

use crate::chat::Usage;
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::fmt;
use std::fs::{File, OpenOptions};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::path::Path;

/// Maximum verdicts that are kept, about 200 MiB of memory; later ones are requested each time.
const MAX_VERDICTS: usize = 1 << 20;
/// Maximum bytes of a line; a longer one does not belong to a ledger.
const MAX_LINE: u64 = 1 << 16;

/// Limits of a judge over a whole run. Calls that are under way when a limit is reached still count.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Limits {
    /// Maximum calls.
    pub calls: Option<u64>,
    /// Maximum tokens, questions and answers together.
    pub tokens: Option<u64>,
    /// Maximum cost, in the currency of `price`.
    pub cost: Option<f64>,
    /// Price of a million tokens: of questions, of answers.
    pub price: [f64; 2],
}

/// Calls and tokens that a judge spent.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct JudgeUsage {
    /// Calls that a model answered, or may have.
    pub calls: u64,
    /// Tokens of questions and answers.
    pub usage: Usage,
}

impl JudgeUsage {
    /// Cost at a price of a million tokens: of questions, of answers.
    pub fn cost(&self, price: [f64; 2]) -> f64 {
        (self.usage.input as f64 * price[0] + self.usage.output as f64 * price[1]) / 1e6
    }
}

impl Limits {
    /// The limit that `spent` has reached, in words.
    pub fn reached(&self, spent: &JudgeUsage) -> Option<String> {
        let tokens = spent.usage.input.saturating_add(spent.usage.output);
        let cost = spent.cost(self.price);
        match self {
            Self {
                calls: Some(limit), ..
            } if spent.calls >= *limit => Some(format!(
                "max_calls = {limit}: {} calls were made",
                spent.calls
            )),
            Self {
                tokens: Some(limit),
                ..
            } if tokens >= *limit => Some(format!(
                "max_total_tokens = {limit}: {tokens} tokens were used"
            )),
            Self {
                cost: Some(limit), ..
            } if cost >= *limit => Some(format!("max_cost = {limit}: {cost:.4} was spent")),
            _ => None,
        }
    }
}

/// One line of the file.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Line {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    key: Option<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    values: Vec<f64>,
    input: u64,
    output: u64,
}

/// Verdicts by key, and the sums of all calls.
#[derive(Debug, Default)]
pub struct Ledger {
    verdicts: HashMap<String, Vec<f64>>,
    spent: JudgeUsage,
    lines: Option<Lines>,
    torn: u64,
}

/// A file that grows by whole lines.
trait AppendOnly: fmt::Debug + Send {
    /// Adds bytes at the end; after an error, some of them may be there.
    fn add(&mut self, bytes: &[u8]) -> io::Result<()>;
    /// Takes back what is after the first `len` bytes.
    fn cut(&mut self, len: u64) -> io::Result<()>;
}

impl AppendOnly for File {
    fn add(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.write_all(bytes)
    }

    fn cut(&mut self, len: u64) -> io::Result<()> {
        self.set_len(len)
    }
}

/// The lines of a file.
#[derive(Debug)]
struct Lines {
    file: Box<dyn AppendOnly>,
    /// Bytes of the whole lines.
    len: u64,
    /// Whether a write failed, so that more may be there.
    failed: bool,
}

impl Lines {
    /// Adds a line, whole or not at all.
    fn add(&mut self, line: &str) -> io::Result<()> {
        if self.failed {
            self.file.cut(self.len)?;
        }
        self.failed = true;
        if let Err(e) = self.file.add(line.as_bytes()) {
            // If this fails too, the next line begins with it.
            self.failed = self.file.cut(self.len).is_err();
            return Err(e);
        }
        self.failed = false;
        self.len += line.len() as u64;
        Ok(())
    }
}

impl Ledger {
    /// A ledger that ends with the process.
    pub fn in_memory() -> Self {
        Self::default()
    }

    /// Opens or creates the file at `path`, and its folder.
    ///
    /// # Errors
    /// If it cannot be read or written, or a line other than the last is damaged.
    pub fn open(path: &Path) -> io::Result<Self> {
        if let Some(folder) = path.parent() {
            std::fs::create_dir_all(folder)?;
        }
        let mut options = OpenOptions::new();
        let file = options.read(true).append(true).create(true).open(path)?;
        let mut ledger = Self::default();
        let mut reader = BufReader::new(&file);
        let (mut good, mut line) = (0, Vec::new());
        loop {
            line.clear();
            let read = reader
                .by_ref()
                .take(MAX_LINE)
                .read_until(b'\n', &mut line)?;
            if read == 0 || line.last() != Some(&b'\n') {
                break;
            }
            let parsed: Line = serde_json::from_slice(&line).map_err(|e| {
                let text = format!(
                    "{}: byte {good}: {e}; remove this line, or the file with all that the judge spent",
                    path.display()
                );
                io::Error::new(io::ErrorKind::InvalidData, text)
            })?;
            ledger.count(parsed);
            good += read as u64;
        }
        if line.len() as u64 >= MAX_LINE {
            let text = format!("{}: byte {good}: the line is too long", path.display());
            return Err(io::Error::new(io::ErrorKind::InvalidData, text));
        }
        file.set_len(good)?;
        ledger.torn = line.len() as u64;
        ledger.lines = Some(Lines {
            file: Box::new(file),
            len: good,
            failed: false,
        });
        Ok(ledger)
    }

    fn count(&mut self, line: Line) {
        self.spent.calls += 1;
        let usage = &mut self.spent.usage;
        usage.input = usage.input.saturating_add(line.input);
        usage.output = usage.output.saturating_add(line.output);
        if let Some(key) = line.key
            && self.verdicts.len() < MAX_VERDICTS
        {
            self.verdicts.insert(key, line.values);
        }
    }

    /// Bytes of a last line that a crash cut, and that [`Ledger::open`] dropped.
    pub fn torn(&self) -> u64 {
        self.torn
    }

    /// Calls and tokens so far.
    pub fn spent(&self) -> JudgeUsage {
        self.spent
    }

    /// The verdict with this key.
    pub fn verdict(&self, key: &str) -> Option<&[f64]> {
        self.verdicts.get(key).map(Vec::as_slice)
    }

    /// Books one call, with its verdict if it gave one.
    ///
    /// # Errors
    /// If the file cannot be written: it stays as it was, and the call counts in this process.
    pub fn book(&mut self, usage: Usage, verdict: Option<(String, Vec<f64>)>) -> io::Result<()> {
        let (key, values) = verdict.map_or((None, Vec::new()), |(key, v)| (Some(key), v));
        let Usage { input, output } = usage;
        let line = Line {
            key,
            values,
            input,
            output,
        };
        let mut text = serde_json::to_string(&line)?;
        text.push('\n');
        self.count(line);
        match &mut self.lines {
            Some(lines) => lines.add(&text),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::{Arc, Mutex};

    fn usage(input: u64, output: u64) -> Usage {
        Usage { input, output }
    }

    #[test]
    fn a_ledger_survives_its_process_and_a_cut_line() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("judge/quality.jsonl");
        let mut ledger = Ledger::open(&path).unwrap();
        ledger
            .book(usage(10, 2), Some(("a".into(), vec![1.0, 0.25])))
            .unwrap();
        ledger.book(usage(7, 1), None).unwrap();
        let whole = std::fs::read(&path).unwrap();
        std::fs::write(&path, [&whole[..], br#"{"key":"b","val"#].concat()).unwrap();
        let mut again = Ledger::open(&path).unwrap();
        assert_eq!((ledger.torn(), again.torn()), (0, 15));
        assert_eq!(again.verdict("a"), Some(&[1.0, 0.25][..]));
        assert_eq!(again.verdict("b"), None);
        let spent = JudgeUsage {
            calls: 2,
            usage: usage(17, 3),
        };
        assert_eq!(again.spent(), spent);
        again.book(usage(1, 1), Some(("b".into(), vec![]))).unwrap();
        assert_eq!(Ledger::open(&path).unwrap().spent().calls, 3);
        std::fs::write(&path, "{\"key\":3}\n").unwrap();
        assert!(
            Ledger::open(&path)
                .unwrap_err()
                .to_string()
                .contains("byte 0")
        );
    }

    /// A disk that takes `room` bytes, and that cannot take anything back while `stuck`.
    #[derive(Clone, Debug, Default)]
    struct FullDisk(Arc<Mutex<(Vec<u8>, usize, bool)>>);

    impl AppendOnly for FullDisk {
        fn add(&mut self, bytes: &[u8]) -> io::Result<()> {
            let mut disk = self.0.lock().unwrap();
            let room = disk.1.saturating_sub(disk.0.len()).min(bytes.len());
            disk.0.extend_from_slice(&bytes[..room]);
            if room == bytes.len() {
                Ok(())
            } else {
                Err(io::ErrorKind::StorageFull.into())
            }
        }

        fn cut(&mut self, len: u64) -> io::Result<()> {
            let mut disk = self.0.lock().unwrap();
            if disk.2 {
                return Err(io::ErrorKind::StorageFull.into());
            }
            disk.0.truncate(len as usize);
            Ok(())
        }
    }

    #[test]
    fn a_short_write_leaves_a_ledger_that_can_be_read() {
        for stuck in [false, true] {
            let disk = FullDisk::default();
            *disk.0.lock().unwrap() = (Vec::new(), 70, stuck);
            let mut ledger = Ledger {
                lines: Some(Lines {
                    file: Box::new(disk.clone()),
                    len: 0,
                    failed: false,
                }),
                ..Ledger::default()
            };
            let mut book = |key: &str| ledger.book(usage(10, 2), Some((key.into(), vec![1.0])));
            book("a").unwrap();
            assert!(book("b").is_err() && book("c").is_err());
            let mut room = disk.0.lock().unwrap();
            (room.1, room.2) = (1000, false);
            drop(room);
            book("d").unwrap();
            assert_eq!(ledger.spent().calls, 4);
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("quality.jsonl");
            std::fs::write(&path, &disk.0.lock().unwrap().0).unwrap();
            let again = Ledger::open(&path).unwrap();
            assert_eq!((again.spent().calls, again.torn()), (2, 0));
            assert!(again.verdict("b").is_none() && again.verdict("d").is_some());
        }
    }

    #[test]
    fn limits_are_reached_by_calls_tokens_and_cost() {
        let spent = JudgeUsage {
            calls: 4,
            usage: usage(1_000_000, 500_000),
        };
        let none = Limits::default();
        assert_eq!(none.reached(&spent), None);
        let calls = |n| {
            Limits {
                calls: Some(n),
                ..none
            }
            .reached(&spent)
        };
        assert!(calls(5).is_none() && calls(4).unwrap().starts_with("max_calls = 4"));
        let tokens = |n| {
            Limits {
                tokens: Some(n),
                ..none
            }
            .reached(&spent)
        };
        assert!(tokens(1_500_001).is_none() && tokens(1_500_000).is_some());
        let price = [0.5, 2.0];
        assert_eq!(spent.cost(price), 1.5);
        let cost = |limit| {
            Limits {
                cost: Some(limit),
                price,
                ..none
            }
            .reached(&spent)
        };
        assert!(cost(1.51).is_none() && cost(1.5).unwrap().contains("1.5000"));
    }
}
