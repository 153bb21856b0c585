//! A file of records, one JSON line each.

use serde::Serialize;
use serde::de::DeserializeOwned;
use sinew_orchestrator::{EvalRecord, PipelineError, StepRecord};
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::io::Write as _;
use std::path::{Path, PathBuf};

/// A line of a file of records.
pub(crate) trait Record: Serialize + DeserializeOwned + Clone {
    /// Position in the file. Each position occurs once.
    fn place(&self) -> (u64, u8);
}

impl Record for StepRecord {
    fn place(&self) -> (u64, u8) {
        (self.step, 0)
    }
}

impl Record for EvalRecord {
    fn place(&self) -> (u64, u8) {
        let order = ["before", "during", "after"];
        let when = order.iter().position(|w| *w == self.when);
        (self.step, when.unwrap_or(order.len()) as u8)
    }
}

/// Damage found in a file of records.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct RecordsDamage {
    /// Whole lines that could not be read.
    pub(crate) unreadable: usize,
    /// Records that were not in the file and were written again.
    pub(crate) rebuilt: usize,
}

/// Appends JSON lines, each flushed, so that a killed run loses at most the line in flight.
#[derive(Debug)]
pub(crate) struct MetricsFile {
    path: PathBuf,
    file: std::fs::File,
}

impl MetricsFile {
    /// Opens `path` for appending. A resumed run drops the lines that `keep` does not want, which will be
    /// written again, and a torn last line. Kept lines stay unchanged; records of `known` that the file lacks
    /// are inserted at their positions.
    pub(crate) fn open<T: Record>(
        path: &Path,
        known: &[T],
        keep: impl Fn(&T) -> bool,
    ) -> std::io::Result<(Self, Vec<T>, RecordsDamage)> {
        let text = match std::fs::read(path) {
            Ok(bytes) => String::from_utf8_lossy(&bytes).into_owned(),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => String::new(),
            Err(e) => return Err(e),
        };
        let mut damage = RecordsDamage::default();
        let mut kept: BTreeMap<(u64, u8), (String, T)> = BTreeMap::new();
        for line in text.split_inclusive('\n') {
            let whole = line.ends_with('\n');
            match serde_json::from_str::<T>(line) {
                Ok(record) if keep(&record) => {
                    let place = kept.entry(record.place());
                    place.or_insert_with(|| (line.trim_end().to_owned(), record));
                }
                Ok(_) => {}
                Err(_) => damage.unreadable += usize::from(whole),
            }
        }
        for record in known.iter().filter(|r| keep(r)) {
            if let Entry::Vacant(place) = kept.entry(record.place()) {
                place.insert((serde_json::to_string(record)?, record.clone()));
                damage.rebuilt += 1;
            }
        }
        let temporary = path.with_extension("jsonl.new");
        let mut file = std::fs::File::create(&temporary)?;
        for (line, _) in kept.values() {
            writeln!(file, "{line}")?;
        }
        file.sync_all()?;
        std::fs::rename(&temporary, path)?;
        let file = std::fs::OpenOptions::new().append(true).open(path)?;
        let path = path.into();
        let kept = kept.into_values().map(|(_, record)| record).collect();
        Ok((Self { path, file }, kept, damage))
    }

    pub(crate) fn append(&mut self, record: &impl Serialize) -> Result<(), PipelineError> {
        serde_json::to_string(record)
            .map_err(std::io::Error::from)
            .and_then(|line| writeln!(self.file, "{line}"))
            .map_err(|e| PipelineError::System(format!("{}: {e}", self.path.display())))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step(step: u64) -> StepRecord {
        StepRecord {
            step,
            wall_s: 0.1 + 0.2 * step as f64,
            loss: 1.0 / 3.0,
            ..StepRecord::default()
        }
    }

    #[test]
    fn resuming_drops_lines_after_the_checkpoint_and_a_torn_one() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("metrics.jsonl");
        let (mut file, kept, _) = MetricsFile::open(&path, &[], |_: &StepRecord| true).unwrap();
        assert!(kept.is_empty());
        for n in 1..=3 {
            file.append(&step(n)).unwrap();
        }
        drop(file);
        let text = std::fs::read_to_string(&path).unwrap();
        std::fs::write(&path, format!("{text}{{\"step\": 4, \"wall")).unwrap();
        let keep = |r: &StepRecord| r.step <= 2;
        let (_, kept, damage) = MetricsFile::open(&path, &[], keep).unwrap();
        let steps: Vec<u64> = kept.iter().map(|r| r.step).collect();
        assert_eq!(steps, [1, 2]);
        assert_eq!(damage, RecordsDamage::default(), "a torn line is no damage");
        let whole: Vec<&str> = text.lines().take(2).collect();
        let left = std::fs::read_to_string(&path).unwrap();
        assert_eq!(left.lines().collect::<Vec<_>>(), whole, "to the bit");
    }

    #[test]
    fn lines_that_cannot_be_read_are_counted_and_written_again_in_their_place() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("metrics.jsonl");
        let known: Vec<StepRecord> = (1..=3).map(step).collect();
        let lines: Vec<String> = known
            .iter()
            .map(|r| serde_json::to_string(r).unwrap())
            .collect();
        let damaged = format!("{}\nnonsense \u{fffd}\n{}\n", lines[0], lines[2]);
        std::fs::write(&path, damaged).unwrap();
        let (_, kept, damage) = MetricsFile::open(&path, &known, |_| true).unwrap();
        assert_eq!(kept, known);
        let (unreadable, rebuilt) = (1, 1);
        assert_eq!(
            damage,
            RecordsDamage {
                unreadable,
                rebuilt
            }
        );
        let left = std::fs::read_to_string(&path).unwrap();
        assert_eq!(left.lines().collect::<Vec<_>>(), lines);
    }
}
