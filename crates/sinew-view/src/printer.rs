//! A run in lines: for users who have no live view, and for scripts.
//!
//! [`OutputForm::Json`] writes each line of standard output as an object with one key that names it (`run`,
//! `step`,
//! `collected`, `measured`, `longest`, `warning`), so that a script can take lines apart without knowing all
//! kinds. The last line, with the evaluation, is the command's own.
//!
//! A recorder is called on the thread of the run and misses nothing. A closed pipe on standard output ends
//! quietly: the run does not depend on a reader.
//!
//! [`Printer`] takes an event as a recorder, `*_line` functions make its text, and `line` or `json` write
//! it, depending on [`OutputForm`]. Warnings are shown in any case. Samples of a model are made visible
//! first, so that they cannot control the terminal.
//!
//! Shares are shown in percent with one decimal, and times in seconds or as a duration. JSON has both as
//! plain numbers, as in the record.

use crate::log;
use crate::status::{duration, told};
use crate::visible::{json_line, visible};
use serde_json::{Value, json};
use sinew_orchestrator::{
    CollectProgress, DIVERGENCE_ALARM, EpisodeStats, EvalRecord, PipelineError, Recorder, RunEvent,
    StepRecord, divergence,
};
use sinew_rollout::LiveEpisode;
use std::io::Write;
use std::path::Path;

/// Form of a run's output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OutputForm {
    /// Drawn on the terminal, with warnings above.
    Live,
    /// Lines on standard error.
    Lines,
    /// Objects on standard output, warnings on standard error as well.
    Json,
}

/// Prints the events of a run with a known number of steps.
#[derive(Clone, Copy, Debug)]
pub struct Printer {
    /// Chosen once, by the command line and the terminal.
    pub out: OutputForm,
    /// Steps that the recipe asks for.
    pub steps: u64,
}

impl Printer {
    /// A run begins, in a folder.
    pub fn begin(&self, name: &str, folder: &Path) {
        self.line(&format!("{name}: loading the model"));
        self.json(&json!({ "run": { "name": name, "folder": folder, "steps": self.steps } }));
    }

    /// A line for those who have no live view.
    pub fn line(&self, text: &str) {
        if self.out == OutputForm::Lines {
            log::say(text);
        }
    }

    /// An object on standard output, flushed at once, if that is requested. An output that cannot be written
    /// is not an error: the run continues without its reader.
    fn json(&self, value: &Value) {
        if self.out == OutputForm::Json {
            let mut out = std::io::stdout().lock();
            // A closed pipe ends quietly.
            let line = json_line(value);
            let _ = writeln!(out, "{line}").and_then(|()| out.flush());
        }
    }

    /// Prints the episodes that have been in one phase for long, which the run waits for. Text has one line;
    /// JSON has one object with the times in seconds: in the phase, and left until its deadline.
    fn longest(&self, longest: &[LiveEpisode]) {
        let live = |l: &LiveEpisode| {
            let phase = l.phase.name();
            json!({"episode": l.episode, "phase": phase, "phase_s": l.phase_s, "left_s": l.left_s})
        };
        let all: Vec<_> = longest.iter().map(live).collect();
        self.json(&json!({ "longest": all }));
        let all: Vec<_> = longest.iter().map(told).collect();
        self.line(&format!("  longest in one phase: {}", all.join(", ")));
    }
}

impl Recorder for Printer {
    fn record(&mut self, event: &RunEvent) -> Result<(), PipelineError> {
        match event {
            RunEvent::Described(text) => self.line(text),
            RunEvent::Serving { url, token_file } => {
                let file = token_file.display().to_string();
                match self.out {
                    OutputForm::Json => {
                        self.json(&json!({"serving": {"url": url, "token_file": file}}))
                    }
                    _ => log::say(&format!(
                        "serving agents at {url}; the control token is in {file}"
                    )),
                }
            }
            RunEvent::Controlled { url, token_file } => {
                let file = token_file.display().to_string();
                match self.out {
                    OutputForm::Json => {
                        self.json(&json!({"control": {"url": url, "token_file": file}}))
                    }
                    _ => log::say(&format!(
                        "workers: sinew worker --role rollout --owner {url} --token-file {file}"
                    )),
                }
            }
            RunEvent::Warning(text) => {
                log::say(&format!("warning: {text}"));
                self.json(&json!({ "warning": text }));
            }
            RunEvent::Longest(longest) => self.longest(longest),
            RunEvent::Step(record) => {
                self.line(&step_line(record, self.steps));
                self.line(&visible(&format!("  samples: {}", record.samples.line())));
                self.json(&json!({ "step": record.as_ref() }));
            }
            RunEvent::Measured { record, .. } => {
                self.line(&measured_line(record));
                self.json(&json!({ "measured": record }));
            }
            RunEvent::Collected(progress) => {
                self.line(&collected_line(progress));
                self.json(&json!({ "collected": progress }));
            }
            RunEvent::SourceDry { step, why } => {
                self.line(&format!("ended after step {step}: {why}"))
            }
            _ => {}
        }
        Ok(())
    }
}

/// Progress of a collection: episodes that ended, those of them without a reward, means, speed, time left.
pub(crate) fn collected_line(p: &CollectProgress) -> String {
    let mut line = format!("{} of {} episodes, {} scored", p.episodes, p.of, p.scored);
    for (count, what) in [(p.unscored, "unscored"), (p.failed, "failed")] {
        if count > 0 {
            line += &format!(", {count} {what}");
        }
    }
    if let (Some(reward), Some(success)) = (p.reward, p.success) {
        line += &format!("; reward {reward:.3}, success {:.1} %", 100.0 * success);
    }
    line += &format!("; {:.1} episodes/s", p.episodes_per_s);
    if let Some(left) = p.left_s.filter(|_| p.episodes < p.of) {
        line += &format!(", {} left", duration(left));
    }
    line
}

/// A held-out measurement: success, and greedy success if it was measured.
fn measured_line(record: &EvalRecord) -> String {
    let percent = |x: f64| format!("{:.1} %", 100.0 * x);
    let greedy = record.stats.greedy_success.map(percent);
    let unscored = match record.stats.unscored {
        0 => String::new(),
        _ => format!(", unscored {}", record.stats.unscored_text()),
    };
    format!(
        "held-out {}: success {}{}{unscored}{}",
        record.when,
        record.stats.success_text(),
        greedy.map_or_else(String::new, |g| format!(", greedy {g}")),
        by_env(&record.stats),
    )
}

/// Success of each environment of a mixture; nothing for a single one. `-` marks an environment without a
/// scored episode.
pub(crate) fn by_env(stats: &EpisodeStats) -> String {
    let one = |(name, own): (&String, &EpisodeStats)| {
        if own.episodes > own.failed + own.unscored {
            format!("  {name} {:.1} %", 100.0 * own.success)
        } else {
            format!("  {name} -")
        }
    };
    stats.by_env.iter().map(one).collect()
}

/// A step on one line; of a step without rows, why there are none.
///
/// Success is in percent, `tokens/episode` counts sampled tokens, and times are in seconds. A step without
/// rows shows the reason of most dropped episodes.
fn step_line(r: &StepRecord, steps: u64) -> String {
    if r.rows == 0 {
        let most = r.dropped.iter().max_by_key(|(_, episodes)| **episodes);
        return format!(
            "step {:>3}/{steps}  reward {:.3}  success {}  nothing to learn from: {}  {}",
            r.step,
            r.rollout.reward,
            success(&r.rollout),
            most.map_or("no episodes", |(reason, _)| reason),
            duration(r.wall_s)
        );
    }
    format!(
        "step {:>3}/{steps}  reward {:.3}  success {}  tokens/episode {:>5.1}  entropy {}  grad {:.2}  rollout {:.1}s  train {:.1}s  {}",
        r.step,
        r.rollout.reward,
        success(&r.rollout),
        r.rollout.sampled_tokens,
        r.entropy_text(),
        r.grad_norm,
        r.rollout_s,
        r.train_s,
        duration(r.wall_s)
    ) + &by_env(&r.rollout)
        + &rewritten(r)
}

/// Success of a step with the number of its scored episodes; the interval is in its record.
fn success(stats: &EpisodeStats) -> String {
    match stats.scored() {
        0 => "    -".into(),
        n => format!("{:>5.1} % of {n}", 100.0 * stats.success),
    }
}

/// Share of outside calls that rewrote their history; empty if none did.
fn rewritten(r: &StepRecord) -> String {
    match divergence(&r.joins) {
        Some(share) if share > 0.0 => {
            let alarm = if share > DIVERGENCE_ALARM {
                ", more than 5 %: see `sinew show RUN`"
            } else {
                ""
            };
            format!("  histories rewritten {:.1} %{alarm}", 100.0 * share)
        }
        _ => String::new(),
    }
}
