//! Phases of episodes, kept in the folder of a run: `phases.jsonl` has one [`SpanRow`] a line, in the order
//! of their ends.
//!
//! The file is bounded: when it reaches [`MOST_BYTES`] it becomes `phases.1.jsonl`, in the place of an older
//! one, so that the newest phases of a long run are kept.

use serde::Serialize;
use serde_json::{Value, json};
use sinew_rollout::PhaseSpan;
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

/// Name of the file with the newest phases, and of the one with those before them.
pub const PHASES_FILE: &str = "phases.jsonl";
const OLDER: &str = "phases.1.jsonl";
/// Bytes at which a new file begins: phases of some 400,000 turns.
const MOST_BYTES: u64 = 32 << 20;

/// A phase of an episode that ended: episode, phase, end in seconds since 1970, length in seconds.
pub type SpanRow = (String, String, f64, f64);

/// Phases within a window of time.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Phases {
    /// Begin and end of all phases that are kept, in seconds since 1970; `None` without any.
    pub kept: Option<(f64, f64)>,
    /// Phases of earlier times were given up for newer ones.
    pub older_gone: bool,
    /// Spans that overlap the window, in the order of their ends.
    pub spans: Vec<SpanRow>,
}

/// Adds phases to the file of a run.
///
/// # Errors
/// If the folder cannot be written.
pub(crate) fn append(folder: &Path, spans: &[PhaseSpan]) -> std::io::Result<()> {
    if spans.is_empty() {
        return Ok(());
    }
    let path = folder.join(PHASES_FILE);
    if std::fs::metadata(&path).is_ok_and(|m| m.len() >= MOST_BYTES) {
        std::fs::rename(&path, folder.join(OLDER))?;
    }
    let mut text = Vec::new();
    if torn(&path) {
        text.push(b'\n');
    }
    for span in spans {
        // Tenths of a millisecond are enough for people, and half of the bytes.
        let rounded = |x: f64| (x * 1e4).round() / 1e4;
        let (episode, phase) = (span.episode.as_str(), span.phase.name());
        let row = (
            episode,
            phase,
            rounded(span.ended_unix_s),
            rounded(span.seconds),
        );
        serde_json::to_writer(&mut text, &row)?;
        text.push(b'\n');
    }
    let file = std::fs::OpenOptions::new()
        .append(true)
        .create(true)
        .open(path);
    file?.write_all(&text)
}

/// Whether a file ends within a line: its process was killed.
fn torn(path: &Path) -> bool {
    let last = || {
        let mut file = std::fs::File::open(path).ok()?;
        file.seek(SeekFrom::End(-1)).ok()?;
        let mut byte = [0];
        file.read_exact(&mut byte).ok()?;
        Some(byte[0])
    };
    last().is_some_and(|byte| byte != b'\n')
}

/// Calls `look` for every phase that a run keeps, oldest first. A torn line is left out: it is the last
/// one of a run that was killed.
fn each(folder: &Path, look: &mut dyn FnMut(SpanRow)) {
    for path in files(folder) {
        let Ok(file) = std::fs::File::open(path) else {
            continue;
        };
        for line in BufReader::new(file).split(b'\n').map_while(Result::ok) {
            if let Ok(row) = serde_json::from_slice(&line) {
                look(row);
            }
        }
    }
}

fn files(folder: &Path) -> [PathBuf; 2] {
    [folder.join(OLDER), folder.join(PHASES_FILE)]
}

/// The phases of a run that overlap `from..to`, in seconds since 1970.
pub fn phases(folder: &Path, (from, to): (f64, f64)) -> Phases {
    let mut found = Phases {
        older_gone: folder.join(OLDER).exists(),
        ..Phases::default()
    };
    each(folder, &mut |row| {
        let (begin, end) = (row.2 - row.3, row.2);
        let kept = found.kept.unwrap_or((begin, end));
        found.kept = Some((kept.0.min(begin), kept.1.max(end)));
        if end >= from && begin <= to {
            found.spans.push(row);
        }
    });
    found
}

/// Mean numbers of episodes in each phase over a part of a window.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Flight {
    /// The middle of the part, in seconds since 1970.
    pub at: f64,
    /// Episodes in the model, in tools and scores, and those that start.
    pub model: f64,
    pub tool: f64,
    pub boot: f64,
}

/// Number of episodes in each phase over `from..to`, in `parts` parts of equal length. A phase shorter than a
/// part counts with its duration.
pub fn flight(spans: &[SpanRow], (from, to): (f64, f64), parts: usize) -> Vec<Flight> {
    let width = (to - from) / parts.max(1) as f64;
    let begin = |i: usize| from + i as f64 * width;
    let mut all: Vec<Flight> = (0..parts)
        .map(|i| Flight {
            at: begin(i) + width / 2.0,
            ..Flight::default()
        })
        .collect();
    for (_, phase, end, length) in spans {
        let (first, last) = ((end - length).max(from), end.min(to));
        if first > last || width <= 0.0 {
            continue;
        }
        let part = |t: f64| (((t - from) / width) as usize).min(parts - 1);
        for (i, flight) in all
            .iter_mut()
            .enumerate()
            .take(part(last) + 1)
            .skip(part(first))
        {
            let within = (last.min(begin(i + 1)) - first.max(begin(i))).max(0.0) / width;
            match phase.as_str() {
                "model" => flight.model += within,
                "tool" | "score" => flight.tool += within,
                _ => flight.boot += within,
            }
        }
    }
    all
}

/// Returns the phases of a run in the format of Perfetto and Chrome's tracing: an episode is a thread, and a
/// phase a slice of it. Times begin with the first phase.
pub fn chrome_trace(folder: &Path, run: &str) -> Value {
    let Phases { kept, spans, .. } = phases(folder, (f64::NEG_INFINITY, f64::INFINITY));
    let zero = kept.map_or(0.0, |k| k.0);
    let mut threads = BTreeMap::<String, usize>::new();
    let mut events = vec![json!({
        "ph": "M", "pid": 1, "tid": 0, "name": "process_name", "args": { "name": run },
    })];
    let micros = |s: f64| (s * 1e6).round();
    for (episode, phase, end, length) in spans {
        let next = threads.len() + 1;
        let thread = *threads.entry(episode.clone()).or_insert_with(|| {
            events.push(json!({
                "ph": "M", "pid": 1, "tid": next, "name": "thread_name", "args": { "name": episode },
            }));
            next
        });
        events.push(json!({
            "ph": "X", "pid": 1, "tid": thread, "name": phase, "cat": "phase",
            "ts": micros(end - length - zero), "dur": micros(length),
        }));
    }
    json!({
        "traceEvents": events, "displayTimeUnit": "ms",
        "otherData": { "run": run, "began_unix_s": zero },
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use sinew_rollout::Phase;
    use sinew_types::EpisodeId;

    fn span(episode: &str, phase: Phase, ended_unix_s: f64, seconds: f64) -> PhaseSpan {
        PhaseSpan {
            episode: EpisodeId::new(episode),
            phase,
            ended_unix_s,
            seconds,
        }
    }

    #[test]
    fn phases_of_a_window_are_those_that_overlap_it() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path();
        assert_eq!(phases(folder, (0.0, 9.0)), Phases::default());
        append(folder, &[span("a", Phase::Boot, 101.0, 1.0)]).unwrap();
        let more = [
            span("a", Phase::Generate, 104.0, 3.0),
            span("b", Phase::Tool, 109.0, 1.5),
        ];
        append(folder, &more).unwrap();
        std::fs::OpenOptions::new()
            .append(true)
            .open(folder.join(PHASES_FILE))
            .unwrap()
            .write_all(b"[\"b\",\"to")
            .unwrap();
        let found = phases(folder, (102.0, 103.0));
        assert_eq!(found.kept, Some((100.0, 109.0)));
        assert_eq!(found.spans, [("a".into(), "model".into(), 104.0, 3.0)]);
        assert_eq!(phases(folder, (0.0, 1e9)).spans.len(), 3);
        // A resumed run begins a separate line.
        append(folder, &[span("c", Phase::Tool, 120.0, 1.0)]).unwrap();
        assert_eq!(phases(folder, (0.0, 1e9)).spans.len(), 4);
    }

    #[test]
    fn numbers_in_flight_are_means_over_the_parts_of_a_window() {
        let row = |phase: &str, end, length| ("e".to_owned(), phase.to_owned(), end, length);
        let spans = [
            row("model", 12.0, 2.0),
            row("model", 10.5, 0.5),
            row("score", 13.5, 0.5),
            row("boot", 100.0, 95.0),
        ];
        let flight = flight(&spans, (10.0, 14.0), 4);
        let of = |pick: fn(&Flight) -> f64| flight.iter().map(pick).collect::<Vec<_>>();
        assert_eq!(of(|f| f.at), [10.5, 11.5, 12.5, 13.5]);
        assert_eq!(of(|f| f.model), [1.5, 1.0, 0.0, 0.0]);
        assert_eq!(of(|f| f.tool), [0.0, 0.0, 0.0, 0.5]);
        assert_eq!(of(|f| f.boot), [1.0; 4]);
        assert!(
            super::flight(&spans, (3.0, 3.0), 2)
                .iter()
                .all(|f| f.model == 0.0)
        );
    }

    #[test]
    fn an_export_has_a_slice_for_each_phase() {
        let dir = tempfile::tempdir().unwrap();
        let spans = [
            span("a", Phase::Boot, 101.0, 1.0),
            span("b", Phase::Tool, 103.0, 2.5),
            span("a", Phase::Generate, 104.0, 3.0),
        ];
        append(dir.path(), &spans).unwrap();
        let trace = chrome_trace(dir.path(), "r");
        let events = trace["traceEvents"].as_array().unwrap();
        let slices: Vec<&Value> = events.iter().filter(|e| e["ph"] == "X").collect();
        assert_eq!(slices.len(), 3);
        assert_eq!(
            (&slices[1]["ts"], &slices[1]["dur"]),
            (&json!(5e5), &json!(2.5e6))
        );
        assert_eq!(slices[0]["tid"], slices[2]["tid"]);
        let named = |e: &&Value| e["name"] == "thread_name" && e["tid"] == slices[1]["tid"];
        assert_eq!(events.iter().find(named).unwrap()["args"]["name"], "b");
    }

    #[test]
    fn a_full_file_makes_room_and_that_is_known() {
        let dir = tempfile::tempdir().unwrap();
        append(dir.path(), &[span("a", Phase::Boot, 1.0, 1.0)]).unwrap();
        let file = std::fs::OpenOptions::new()
            .write(true)
            .open(dir.path().join(PHASES_FILE))
            .unwrap();
        file.set_len(MOST_BYTES).unwrap();
        append(dir.path(), &[span("b", Phase::Boot, 2.0, 1.0)]).unwrap();
        assert!(dir.path().join(OLDER).exists());
        let found = phases(dir.path(), (0.0, 9.0));
        assert!(found.older_gone);
        let episodes: Vec<&str> = found.spans.iter().map(|s| s.0.as_str()).collect();
        assert_eq!(episodes, ["a", "b"]);
    }
}
