//! How a run ends: what it showed, what it leaves behind, and whether it did what it was to do.

use super::{Ended, Run, held_out};
use crate::failure::Failure;
use crate::ledger::Samples;
use crate::report::Report;
use crate::run_dir::write_atomic;
use crate::summary;
use sinew_pipeline::{EpisodeStats, TokenSummary};
use sinew_types::Trace;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Time between two reports of a run that goes on.
const REPORT_EVERY: Duration = Duration::from_secs(20);

impl Run<'_> {
    /// The last measurement, report and counts of a run that did its steps.
    pub(super) fn end(&mut self) -> Result<Ended, Failure> {
        let after = self.evaluate("eval-after", self.step)?;
        let after_stats = self.with_greedy(&after, "greedy-after", self.step)?;
        self.measured("after", &after_stats)?;
        self.note_lost()?;
        let samples = self.ledger.samples(&self.parts.stored()?);
        self.write_report(Some((&after_stats, after.as_slice())))?;
        let trouble = self.trouble(&after);
        let wall_s = self.wall_s();
        let tokens = TokenSummary::of(&self.history);
        self.view.update(|s| {
            s.phase = "done".into();
            s.wall_s = wall_s;
        });
        let (before, before_stats) = self.before.clone().unwrap_or_default();
        if !self.json {
            self.view.stop();
            let text = summary::text(&summary::Summary {
                recipe: self.recipe,
                dir: self.dir,
                before: &before_stats,
                after: &after_stats,
                history: &self.history,
                samples,
                tokens: &tokens,
                wall_s,
                examples: first_of([&before, &after]),
            });
            crate::output::print(&text);
        }
        let mut last = last_line(&before_stats, &after_stats, wall_s, samples);
        last["tokens"] = serde_json::json!(tokens);
        last["trouble"] = serde_json::json!(trouble);
        let trouble = (!trouble.is_empty()).then(|| Failure::system(trouble.join("\n")));
        Ok(Ended { last, trouble })
    }

    /// Why a run that came to its end did not do what it was to do.
    fn trouble(&self, after: &[Trace]) -> Vec<String> {
        let mut trouble: Vec<String> = self.health.verdict().into_iter().collect();
        trouble.extend(held_out::failed_measurement(after));
        if self.lost_now > 0 && !self.accept_loss {
            trouble.push(format!(
                "{} trained episodes are gone from the store\n  hint: --accept-loss ends with 0 all the same",
                self.lost_now
            ));
        }
        trouble
    }

    /// A run that ends before its time. Its steps since the last checkpoint are done again.
    pub(super) fn stopped(&self, why: &str) -> Failure {
        let dir = self.dir.path().display();
        let go_on = format!(
            "`sinew {} {dir}/recipe.toml --run-dir {dir} --resume` begins after step {} and runs failed episodes again",
            self.command, self.saved_step
        );
        Failure::system(match why.contains("\n  hint: ") {
            true => format!("the run was stopped: {why}; {go_on}"),
            false => {
                format!("the run was stopped: {why}\n  hint: when the cause is put right, {go_on}")
            }
        })
    }

    /// The report of a run that goes on, now and then.
    pub(super) fn refresh_report(&mut self) -> Result<(), Failure> {
        if self.reported.is_some_and(|at| at.elapsed() < REPORT_EVERY) {
            return Ok(());
        }
        self.reported = Some(Instant::now());
        self.write_report(None)
    }

    fn write_report(&self, after: Option<(&EpisodeStats, &[Trace])>) -> Result<(), Failure> {
        let Some((episodes, stats)) = &self.before else {
            return Ok(());
        };
        let recipe_toml = std::fs::read_to_string(self.dir.recipe_path()).unwrap_or_default();
        let html = Report {
            recipe: self.recipe,
            recipe_toml: &recipe_toml,
            steps: &self.history,
            evals: &self.measurements,
            before: stats,
            after: after.map(|a| a.0),
            episodes_before: episodes,
            episodes_after: after.map_or(&[], |a| a.1),
            wall_s: self.wall_s(),
            renderer: self.parts.episode.renderer.as_ref(),
        }
        .html()
        .map_err(Failure::system)?;
        let report = self.dir.report_path();
        write_atomic(&report, html.as_bytes())
            .map_err(|e| Failure::system(format!("{}: {e}", report.display())))
    }

    pub(super) fn only_measured(&mut self) -> Result<Ended, Failure> {
        let traces = self.evaluate("eval", 0)?;
        self.refuse_hopeless(&traces)?;
        let stats = self.with_greedy(&traces, "greedy", 0)?;
        self.measured("now", &stats)?;
        let wall_s = self.wall_s();
        if !self.json {
            self.view.stop();
            let example = traces.first().map(|t| t.episode.as_str());
            crate::output::print(&summary::measured(&stats, self.dir, wall_s, example));
        }
        Ok(Ended {
            last: serde_json::json!({ "eval": measures(&stats), "wall_s": wall_s }),
            trouble: held_out::failed_measurement(&traces).map(Failure::system),
        })
    }
}

/// The first episode of each.
fn first_of(traces: [&Vec<Trace>; 2]) -> Vec<String> {
    let first = |t: &Vec<Trace>| t.first().map(|t| t.episode.as_str().to_string());
    traces.into_iter().filter_map(first).collect()
}

/// Averages by name.
fn measures(s: &EpisodeStats) -> BTreeMap<String, f64> {
    let mut map = BTreeMap::from([
        ("success".to_string(), s.success),
        ("reward".into(), s.reward),
        ("turns".into(), s.turns),
        ("sampled_tokens".into(), s.sampled_tokens),
    ]);
    map.extend(s.greedy_success.map(|g| ("greedy_success".to_string(), g)));
    for (name, value) in &s.metrics {
        map.entry(name.clone()).or_insert(*value);
    }
    map
}

/// The object that scripts read.
fn last_line(
    before: &EpisodeStats,
    after: &EpisodeStats,
    wall_s: f64,
    samples: Samples,
) -> serde_json::Value {
    serde_json::json!({
        "eval": { "before": measures(before), "after": measures(after) },
        "wall_s": wall_s,
        "samples": samples,
    })
}
