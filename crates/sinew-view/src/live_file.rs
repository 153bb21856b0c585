//! Writes the current state of a run to files in its folder, so that a viewer in another process sees it.
//!
//! `live.json` holds the newest [`LiveState`] and is replaced at most once a second. `timeline.jsonl` has one
//! [`Sample`] a line, appended as time goes by, and `phases.jsonl` the phases of episodes (see
//! [`phases`](crate::phases)). A thread with a bounded queue writes them: a slow disk loses events and never
//! delays the run. No file is needed to resume; a folder that cannot be written has no live view, and the run
//! continues.
//!
//! The last state, which is written when the run's process ends, has no live episode: episodes that were
//! under way are given up.
//!
//! The timeline is bounded: each [`DOUBLE_AFTER`] lines the time between two samples doubles, from one
//! second on, so that a week of training is about 60,000 lines.

use crate::log::say;
use crate::status::Status;
use serde::{Deserialize, Serialize};
use sinew_orchestrator::{Bus, Phase, RunEvent};
use sinew_rollout::{PhaseSpan, unix_s};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Name of the file with the newest state.
pub const LIVE_FILE: &str = "live.json";
/// Name of the file with the samples.
pub const TIMELINE_FILE: &str = "timeline.jsonl";
/// Time between two states, and between the first samples.
const EVERY: Duration = Duration::from_secs(1);
/// Samples after which the time between two of them doubles.
const DOUBLE_AFTER: u32 = 7200;
/// Events that wait for the next state.
const QUEUE: usize = 4096;

/// A live episode.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LiveRow {
    /// Id of the episode.
    pub episode: String,
    /// `boot`, `model`, `tool`, `score` or `wait`.
    pub phase: String,
    /// Seconds in that phase.
    pub phase_s: f64,
    /// Seconds until it is cut; `None`: it has no time limit.
    pub left_s: Option<f64>,
}

/// Current state of a run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct LiveState {
    /// Time at which it was written, in seconds since 1970.
    pub written_unix_s: f64,
    /// Phase, in words.
    pub phase: String,
    /// The step that is worked on, and those that the recipe asks for.
    pub step: u64,
    pub steps: u64,
    /// Progress within the phase.
    pub done: usize,
    pub total: usize,
    /// Wall time of the run.
    pub wall_s: f64,
    /// Episodes that have begun and not ended, and what they do.
    pub in_flight: usize,
    pub booting: usize,
    pub generating: usize,
    pub in_tool: usize,
    /// Episodes that ended since the process began.
    pub finished: u64,
    pub failed: u64,
    /// KV capacity in tokens: held, and all of it; 0 if the engine has no such number.
    pub held_tokens: u64,
    pub kv_tokens: u64,
    /// Turns that wait for capacity, episodes that wait for their start, the limit.
    pub waiting_turns: u64,
    pub waiting_new: u64,
    pub limit: u64,
    /// Tokens a second.
    pub tokens_per_s: f64,
    /// The last warning.
    pub alarm: Option<String>,
    /// Events that a viewer lost.
    pub lost: u64,
    /// Live episodes, longest in their phase first.
    pub board: Vec<LiveRow>,
}

/// A line of the timeline.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Sample {
    /// Seconds since 1970.
    pub at: f64,
    /// `rollout`, `train`, `wait`, `save`, `eval` or `other`.
    pub doing: String,
    pub step: u64,
    pub generating: usize,
    pub in_tool: usize,
    pub in_flight: usize,
    pub waiting: u64,
    /// Tokens a second.
    pub tokens_per_s: f64,
}

/// Writes the files of a run until it is dropped.
#[derive(Debug)]
pub struct LiveFile {
    stop: SyncSender<()>,
    thread: Option<JoinHandle<()>>,
}

impl LiveFile {
    /// Writes the further events of the bus into `folder`.
    pub fn start(folder: &Path, steps: u64, bus: &Bus) -> Self {
        let (stop, stopped) = sync_channel(1);
        let (events, bus, folder) = (bus.watch(QUEUE), bus.clone(), folder.to_owned());
        let mut writer = Writer::new(folder, steps);
        let thread = std::thread::spawn(move || writer.until(&events, &stopped, &bus));
        Self {
            stop,
            thread: Some(thread),
        }
    }
}

impl Drop for LiveFile {
    fn drop(&mut self) {
        let _ = self.stop.try_send(());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// The state of the thread.
struct Writer {
    folder: PathBuf,
    status: Status,
    doing: &'static str,
    /// Phases that ended since the last state.
    spans: Vec<PhaseSpan>,
    samples: u32,
    /// Time at which the last sample was written.
    sampled: Option<Instant>,
    /// A failure was reported.
    silent: bool,
}

impl Writer {
    fn new(folder: PathBuf, steps: u64) -> Self {
        let status = Status {
            steps,
            phase: Phase::Loading.name(),
            ..Status::default()
        };
        // A resumed run continues with its timeline, at its pace.
        let text = std::fs::read(folder.join(TIMELINE_FILE)).unwrap_or_default();
        Self {
            folder,
            status,
            doing: "other",
            spans: Vec::new(),
            samples: text.iter().filter(|b| **b == b'\n').count() as u32,
            sampled: None,
            silent: false,
        }
    }

    /// Receives events and writes once a second, and a last time when it is stopped.
    fn until(&mut self, events: &Receiver<Arc<RunEvent>>, stopped: &Receiver<()>, bus: &Bus) {
        let mut last = false;
        while !last {
            last = !matches!(stopped.recv_timeout(EVERY), Err(RecvTimeoutError::Timeout));
            for event in events.try_iter() {
                self.apply(&event);
            }
            if last {
                self.nothing_lives();
            }
            if let Err(e) = self.write(bus.lost()) {
                if !self.silent {
                    say(&format!("live files in {}: {e}", self.folder.display()));
                }
                self.silent = true;
            }
        }
    }

    fn apply(&mut self, event: &RunEvent) {
        self.status.apply(event);
        match event {
            RunEvent::Phase(phase) => self.doing = doing(phase),
            RunEvent::Rollout(seen) => self.spans.extend(seen.spans.iter().cloned()),
            // Rows of the steps are in separate files.
            RunEvent::Step(_) => self.status.history.clear(),
            _ => {}
        }
    }

    /// Leaves no live episode: the process ends.
    fn nothing_lives(&mut self) {
        let gauges = &mut self.status.gauges;
        (gauges.in_flight, gauges.booting) = (0, 0);
        (gauges.generating, gauges.in_tool) = (0, 0);
        let admission = &mut self.status.admission;
        (
            admission.held_tokens,
            admission.waiting_turns,
            admission.new,
        ) = (0, 0, 0);
        self.status.longest.clear();
        self.status.tokens_per_s = 0.0;
    }

    fn write(&mut self, lost: u64) -> std::io::Result<()> {
        crate::phases::append(&self.folder, &std::mem::take(&mut self.spans))?;
        let state = self.state(unix_s(), lost);
        let path = self.folder.join(LIVE_FILE);
        let temporary = self.folder.join("live.new");
        std::fs::write(&temporary, serde_json::to_vec(&state)?)?;
        std::fs::rename(&temporary, path)?;
        let pace = EVERY * 2u32.saturating_pow((self.samples / DOUBLE_AFTER).min(16));
        if self
            .sampled
            .is_some_and(|at| at.elapsed() + EVERY / 2 < pace)
        {
            return Ok(());
        }
        self.sampled = Some(Instant::now());
        self.samples += 1;
        let mut line = serde_json::to_vec(&self.sample(&state))?;
        line.push(b'\n');
        let path = self.folder.join(TIMELINE_FILE);
        let file = std::fs::OpenOptions::new()
            .append(true)
            .create(true)
            .open(path);
        file?.write_all(&line)
    }

    fn sample(&self, state: &LiveState) -> Sample {
        Sample {
            at: (state.written_unix_s * 100.0).round() / 100.0,
            doing: self.doing.to_owned(),
            step: state.step,
            generating: state.generating,
            in_tool: state.in_tool,
            in_flight: state.in_flight,
            waiting: state.waiting_turns + state.waiting_new,
            tokens_per_s: state.tokens_per_s.round(),
        }
    }

    fn state(&self, now: f64, lost: u64) -> LiveState {
        let s = &self.status;
        let row = |l: &sinew_rollout::LiveEpisode| LiveRow {
            episode: l.episode.to_string(),
            phase: l.phase.name().to_owned(),
            phase_s: l.phase_s,
            left_s: l.left_s,
        };
        let rolls = self.doing == "rollout" || self.doing == "eval";
        LiveState {
            written_unix_s: now,
            phase: s.phase.clone(),
            step: s.step,
            steps: s.steps,
            done: s.done,
            total: s.total,
            wall_s: s.wall_s,
            in_flight: s.gauges.in_flight,
            booting: s.gauges.booting,
            generating: s.gauges.generating,
            in_tool: s.gauges.in_tool,
            finished: s.gauges.finished,
            failed: s.gauges.failed,
            held_tokens: s.admission.held_tokens as u64,
            kv_tokens: s.admission.kv_tokens as u64,
            waiting_turns: s.admission.waiting_turns as u64,
            waiting_new: s.admission.new as u64,
            limit: s.admission.limit as u64,
            tokens_per_s: if rolls { s.tokens_per_s } else { 0.0 },
            alarm: s.alarm.clone(),
            lost,
            board: s.longest.iter().map(row).collect(),
        }
    }
}

/// A phase as a word of the timeline.
fn doing(phase: &Phase) -> &'static str {
    match phase {
        Phase::Rollout { .. } | Phase::Collecting => "rollout",
        Phase::Training { .. } => "train",
        Phase::Waiting { .. } => "wait",
        Phase::Saving => "save",
        Phase::Evaluating(_) => "eval",
        Phase::Loading | Phase::Stopping | Phase::Done => "other",
    }
}

/// Samples of a run's folder, thinned to at most `most`; none of a run that wrote none. Lines that cannot be
/// read are left out: the file is for users.
pub fn timeline(folder: &Path, most: usize) -> Vec<Sample> {
    let text = std::fs::read_to_string(folder.join(TIMELINE_FILE)).unwrap_or_default();
    let lines: Vec<&str> = text.lines().collect();
    let stride = lines.len().div_ceil(most.max(1)).max(1);
    let kept = lines.iter().step_by(stride);
    kept.filter_map(|l| serde_json::from_str(l).ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use sinew_orchestrator::RolloutProgress;
    use sinew_rollout::LiveEpisode;

    #[test]
    fn the_last_state_of_a_run_is_in_its_folder_and_the_timeline_grows() {
        let dir = tempfile::tempdir().unwrap();
        let bus = Bus::default();
        let file = LiveFile::start(dir.path(), 7, &bus);
        bus.emit(RunEvent::Phase(Phase::Rollout { step: 3 }))
            .unwrap();
        let hung = LiveEpisode {
            episode: sinew_types::EpisodeId::new("d1-e0"),
            phase: sinew_rollout::Phase::Tool,
            phase_s: 70.0,
            left_s: Some(50.0),
        };
        let progress = RolloutProgress {
            gauges: sinew_rollout::GaugesReading {
                in_flight: 112,
                ..Default::default()
            },
            spans: vec![PhaseSpan {
                episode: sinew_types::EpisodeId::new("d1-e0"),
                phase: sinew_rollout::Phase::Generate,
                ended_unix_s: 9.0,
                seconds: 2.0,
            }],
            longest: vec![hung],
            done: 2,
            total: 8,
            ..RolloutProgress::default()
        };
        bus.emit(RunEvent::Rollout(Box::new(progress))).unwrap();
        drop(file);
        let text = std::fs::read_to_string(dir.path().join(LIVE_FILE)).unwrap();
        let state: LiveState = serde_json::from_str(&text).unwrap();
        assert_eq!((state.step, state.steps, state.done), (3, 7, 2));
        // The process has ended: nothing lives.
        assert_eq!((state.in_flight, state.board.len()), (0, 0));
        let kept = crate::phases(dir.path(), (0.0, f64::INFINITY)).spans;
        assert_eq!(kept, [("d1-e0".into(), "model".into(), 9.0, 2.0)]);
        let samples = timeline(dir.path(), 10);
        assert_eq!(samples.last().unwrap().doing, "rollout");
    }

    #[test]
    fn a_long_timeline_is_thinned_and_a_broken_line_left_out() {
        let dir = tempfile::tempdir().unwrap();
        let mut text = String::new();
        for at in 0..1000 {
            text += &format!("{{\"at\":{at}}}\n");
        }
        text += "{\"at\":";
        std::fs::write(dir.path().join(TIMELINE_FILE), text).unwrap();
        let samples = timeline(dir.path(), 100);
        assert!((90..=100).contains(&samples.len()), "{}", samples.len());
        assert_eq!(samples[0].at, 0.0);
        assert!(timeline(&dir.path().join("none"), 9).is_empty());
    }
}
