//! A run as a whole: the use of every sampled token, from the records that it has written.
//!
//! It reads `metrics.jsonl` and `evals.jsonl` of the run's folder, which a running process appends to: a torn
//! last line is left out. The field names are those of `sinew show RUN --json`.

use crate::error::ViewError;
use crate::status::duration;
use serde::Serialize;
use serde::de::DeserializeOwned;
use sinew_orchestrator::{
    AdmissionRecord, DIVERGENCE_ALARM, EvalRecord, HeldOutGain, Process, StepRecord, TokenSummary,
    Verdict, VerdictInput, divergence,
};
use std::collections::BTreeMap;
use std::fmt::Write;
use std::fs::File;
use std::io::Read;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// Summary that `sinew show RUN --json` prints.
#[derive(Debug, Serialize)]
pub struct RunSummary {
    /// Name of the recipe.
    name: String,
    /// The last step that is recorded.
    steps: u64,
    /// Steps that the recipe asks for.
    of_steps: u64,
    /// Seconds of all sessions.
    wall_s: f64,
    /// Success on held-out tasks, in the order of measurement.
    evals: Vec<EvalRecord>,
    /// Gain of the last measurement over the first, with its 95 % interval.
    #[serde(skip_serializing_if = "Option::is_none")]
    gain: Option<HeldOutGain>,
    /// Training episodes of all steps, without those that were run again.
    episodes: usize,
    /// Episodes of these that the system failed; the replaced attempts follow.
    failed: usize,
    /// Attempts that replaced failed ones.
    retried: usize,
    /// Episodes that gave no row, by reason.
    left_out: BTreeMap<String, usize>,
    /// Counts over all steps; `trained_twice`, `forced_trained` and `stray` must be 0.
    tokens: TokenSummary,
    /// Share of the calls of external agents whose history differs from the captured one.
    #[serde(skip_serializing_if = "Option::is_none")]
    divergence: Option<f64>,
    /// Sums over all steps.
    admission: AdmissionRecord,
    /// The numbers that its verdict follows from.
    #[serde(skip)]
    course: VerdictInput,
}

/// Maximum bytes of a file of records.
const MAX_RECORD_BYTES: u64 = 2 << 30;

/// Opens a file of a run for reading. Folders of runs come from other people, too: what is not a regular
/// file, such as a pipe that nobody writes or a device without an end, is an error and not waited for.
///
/// # Errors
/// If it cannot be opened, or is not a regular file.
pub fn open_regular(path: &Path) -> std::io::Result<File> {
    let nonblock = rustix::fs::OFlags::NONBLOCK.bits().cast_signed();
    let file = File::options()
        .read(true)
        .custom_flags(nonblock)
        .open(path)?;
    if file.metadata()?.is_file() {
        Ok(file)
    } else {
        Err(std::io::Error::other("it is no regular file"))
    }
}

/// The whole lines of a file that a run may be writing; none if it is not there yet.
/// A file that cannot be parsed is an error that names it.
pub fn lines<T: DeserializeOwned>(path: &Path) -> Result<Vec<T>, ViewError> {
    let failed = |reason| ViewError::Records {
        path: path.to_owned(),
        reason,
    };
    let text = open_regular(path).and_then(|file| {
        let mut text = String::new();
        file.take(MAX_RECORD_BYTES).read_to_string(&mut text)?;
        Ok(text)
    });
    let text = match text {
        Ok(text) if text.len() as u64 == MAX_RECORD_BYTES => {
            let most = MAX_RECORD_BYTES;
            return Err(failed(format!("it is larger than {most} bytes")));
        }
        Ok(text) => text,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => String::new(),
        Err(e) => return Err(failed(e.to_string())),
    };
    let whole = text.split_inclusive('\n').filter(|l| l.ends_with('\n'));
    let parsed = whole.map(serde_json::from_str);
    let parsed: Result<Vec<T>, _> = parsed.collect();
    parsed.map_err(|e| failed(e.to_string()))
}

impl RunSummary {
    /// Reads the records so far of the run in `folder`. `name` and `of_steps` are the recipe's name and
    /// steps.
    ///
    /// # Errors
    /// If it holds a record that is none.
    pub fn read(folder: &Path, name: String, of_steps: u64) -> Result<Self, ViewError> {
        let steps: Vec<StepRecord> = lines(&folder.join("metrics.jsonl"))?;
        let evals: Vec<EvalRecord> = lines(&folder.join("evals.jsonl"))?;
        let mut left_out = BTreeMap::<String, usize>::new();
        let mut admission = AdmissionRecord::default();
        for step in &steps {
            admission.add(&step.admission);
            for (reason, episodes) in &step.dropped {
                *left_out.entry(reason.clone()).or_default() += episodes;
            }
        }
        let tokens = TokenSummary::of(&steps);
        let last_eval = evals.last().map_or(0.0, |e| e.wall_s);
        Ok(Self {
            name,
            steps: steps.last().map_or(0, |s| s.step),
            of_steps,
            wall_s: steps.last().map_or(0.0, |s| s.wall_s).max(last_eval),
            episodes: steps.iter().map(|s| s.rollout.episodes).sum(),
            failed: steps.iter().map(|s| s.rollout.failed).sum(),
            retried: steps.iter().map(|s| s.retried).sum(),
            divergence: divergence(&tokens.joins),
            course: VerdictInput::of(&steps, &evals),
            gain: evals.last().and_then(|e| e.gain.clone()),
            evals,
            left_out,
            tokens,
            admission,
        })
    }

    /// The verdict for this state of the process and the end that it recorded.
    pub fn verdict(&self, process: Process, end: Option<&str>) -> Verdict {
        self.course.verdict(process, end)
    }

    /// One line for a list of runs: its progress, gain and duration.
    pub fn line(&self) -> String {
        let percent = |e: &EvalRecord| e.stats.success_text();
        let gained = match self.evals.as_slice() {
            [] => "not measured yet".to_string(),
            [only] => format!("success {}", percent(only)),
            [first, .., last] => format!("success {} -> {}", percent(first), percent(last)),
        };
        let wall = duration(self.wall_s);
        if self.evals.iter().any(|e| e.when == "now") {
            return format!("{}  {gained}  {wall}", self.name);
        }
        let (name, done, of) = (&self.name, self.steps, self.of_steps);
        format!("{name}  step {done} of {of}  {gained}  {wall}")
    }

    /// Measurements of held-out tasks, and the gain.
    fn held_out_text(&self) -> String {
        let mut out = String::new();
        for eval in &self.evals {
            let (when, step) = (&eval.when, eval.step);
            let _ = writeln!(
                out,
                "held-out {when:6} step {step:>4}  success {}",
                eval.stats.success_text()
            );
        }
        let gain = self.gain.as_ref();
        for (name, points) in gain.map(HeldOutGain::rows).unwrap_or_default() {
            let _ = writeln!(out, "{name:15}  {points}");
        }
        out
    }

    /// Text for a person: all counts, with the alarm of rewritten histories where it applies.
    pub fn text(&self) -> String {
        let mut out = String::new();
        let _ = writeln!(
            out,
            "{}  step {} of {}  {}",
            self.name,
            self.steps,
            self.of_steps,
            duration(self.wall_s)
        );
        out.push_str(&self.held_out_text());
        let (episodes, failed, again) = (self.episodes, self.failed, self.retried);
        let _ = writeln!(
            out,
            "episodes  {episodes} trained on or left out  failed {failed}  run again {again}"
        );
        for (reason, episodes) in &self.left_out {
            let _ = writeln!(out, "          left out {episodes}: {reason}");
        }
        let t = &self.tokens.counts;
        let _ = writeln!(
            out,
            "tokens    sampled {}  trained once {}  trained twice {}  left out {}",
            t.sampled, t.trained_once, t.trained_twice, t.untrained
        );
        let _ = writeln!(
            out,
            "          trained and not sampled {}  on no path of a trace {}",
            t.forced_trained, t.stray
        );
        if let Some(share) = self.divergence {
            let joins = &self.tokens.joins;
            let told: Vec<String> = joins.iter().map(|(j, n)| format!("{j} {n}")).collect();
            let alarm = if share > DIVERGENCE_ALARM {
                "  (more than 5 %: the agent or its template rewrites what was sampled)"
            } else {
                ""
            };
            let _ = writeln!(
                out,
                "calls     {}\n          histories rewritten {:.1} %{alarm}",
                told.join("  "),
                100.0 * share
            );
        }
        let branches = self.tokens.branches_text();
        if !branches.is_empty() {
            let _ = writeln!(out, "branches  {branches}");
        }
        let a = &self.admission;
        let _ = writeln!(
            out,
            "admission preemptions {}  pauses {}  turns that waited {}, {} in all  limit lowered {}",
            a.preemptions,
            a.pauses,
            a.waited_turns,
            duration(a.waited_s),
            a.cuts
        );
        out
    }
}

/// Steps that a point of a curve averages: a single step has too few tasks.
pub const WINDOW: usize = 4;

/// Success of training episodes by step, as means over the scored episodes of the last steps; NaN where there
/// are none. The first points average fewer steps, so that the curve begins at the first step.
pub fn smoothed(records: &[StepRecord]) -> Vec<(f64, f64)> {
    (0..records.len())
        .map(|i| {
            let window = &records[i.saturating_sub(WINDOW - 1)..=i];
            let (mut n, mut sum) = (0, 0.0);
            for stats in window.iter().map(|r| &r.rollout) {
                n += stats.scored();
                sum += stats.success * stats.scored() as f64;
            }
            (records[i].step as f64, sum / n as f64)
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn points_are_means_of_the_last_steps() {
        let record = |step: u64, success: f64| {
            let mut r = StepRecord {
                step,
                ..StepRecord::default()
            };
            r.rollout.success = success;
            r.rollout.episodes = 4;
            r
        };
        let points = smoothed(&[record(1, 0.0), record(2, 1.0), record(3, 0.5)]);
        assert_eq!(points, [(1.0, 0.0), (2.0, 0.5), (3.0, 0.5)]);
        // A step whose episodes all failed has no success of 0.
        let mut failed = record(2, 0.0);
        failed.rollout.failed = 4;
        let points = smoothed(&[failed.clone(), record(3, 1.0)]);
        assert!(
            points[0].1.is_nan() && points[1] == (3.0, 1.0),
            "{points:?}"
        );
    }

    #[test]
    fn tokens_joins_and_reasons_are_summed_over_steps_and_a_torn_line_is_left() {
        let dir = tempfile::tempdir().unwrap();
        let empty = RunSummary::read(dir.path(), "t".into(), 9).unwrap();
        assert_eq!((empty.steps, empty.of_steps), (0, 9));
        let mut text = String::new();
        for step in 1..=2 {
            let mut record = StepRecord {
                step,
                wall_s: 60.0,
                joins: [("extend".into(), 18), ("fork".into(), 2)].into(),
                dropped: [("group too small".into(), 3)].into(),
                ..StepRecord::default()
            };
            record.tokens.sampled = 100;
            record.tokens.trained_once = 70;
            record.tokens.untrained = 30;
            record.admission.preemptions = step;
            text += &(serde_json::to_string(&record).unwrap() + "\n");
        }
        text += "{\"step\": 3, \"wal";
        std::fs::write(dir.path().join("metrics.jsonl"), text).unwrap();
        let run = RunSummary::read(dir.path(), "t".into(), 9).unwrap();
        let shown = run.text();
        for needle in [
            "t  step 2 of 9  1m00s",
            "left out 6: group too small",
            "sampled 200  trained once 140  trained twice 0  left out 60",
            "extend 36  fork 4",
            "histories rewritten 10.0 %  (more than 5 %",
            "preemptions 3",
        ] {
            assert!(shown.contains(needle), "{needle} not in\n{shown}");
        }
        let json = serde_json::to_value(&run).unwrap();
        assert_eq!(json["tokens"]["sampled"], 200);
        assert_eq!(json["tokens"]["joins"]["fork"], 4);
        std::fs::write(dir.path().join("metrics.jsonl"), "nonsense\n").unwrap();
        assert!(
            RunSummary::read(dir.path(), "t".into(), 9)
                .unwrap_err()
                .to_string()
                .contains("metrics.jsonl")
        );
    }

    #[test]
    fn only_regular_files_are_records() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("metrics.jsonl");
        // Nobody writes the pipe, and the device has no end.
        rustix::fs::mkfifoat(rustix::fs::CWD, &path, rustix::fs::Mode::RUSR).unwrap();
        assert!(
            lines::<StepRecord>(&path)
                .unwrap_err()
                .to_string()
                .contains("no regular file")
        );
        std::fs::remove_file(&path).unwrap();
        std::os::unix::fs::symlink("/dev/zero", &path).unwrap();
        assert!(
            lines::<StepRecord>(&path)
                .unwrap_err()
                .to_string()
                .contains("no regular file")
        );
    }
}
