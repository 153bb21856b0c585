//! The end of a run for a person: changes, times, and next steps.
//!
//! Percentages of time are of the wall time of all sessions. Counts of episodes and tokens are those of the
//! records, so that the end of a resumed run covers the whole run.

use crate::comparison::comparison;
use crate::printer::collected_line;
use crate::report::time_split;
use crate::status::duration;
use sinew_orchestrator::{CollectProgress, EpisodeStats, RunOutcome, StepRecord};
use std::fmt::Write;
use std::path::Path;

/// All that the end shows.
#[derive(Debug)]
pub struct Summary<'a> {
    /// Steps that the recipe asks for.
    pub steps: u64,
    /// Folder of the run, for the suggested commands.
    pub run_dir: &'a Path,
    /// Result of the pipeline.
    pub ended: &'a RunOutcome,
    /// Records of all steps.
    pub history: &'a [StepRecord],
    /// Maximum number of sandboxes, where more episodes than that may run at once.
    pub sandboxes: Option<usize>,
}

impl Summary<'_> {
    /// The end as text.
    pub fn text(&self) -> String {
        text(self)
    }
}

/// Summary of a run at its end. A run without held-out tasks shows the first training step in the first
/// column and the last one in the second, so that the reward's way is still seen.
///
/// The end table, the time table, the counts of episodes and tokens, and the next commands.
fn text(s: &Summary<'_>) -> String {
    let (mut out, e) = (String::new(), s.ended);
    // Agents that bring their own tasks have no held-out ones: what they did at first and at last counts.
    let measured = e.before.episodes > 0 || e.after.episodes > 0;
    let (before, after) = match (s.history.first(), s.history.last()) {
        (Some(first), Some(last)) if !measured => (&first.rollout, &last.rollout),
        _ => (&e.before, &e.after),
    };
    let rows = comparison(before, after);
    let width = rows.iter().map(|r| r.0.len()).max().unwrap_or(0).max(23);
    let (what, columns) = if measured {
        ("held-out", ["before", "after"])
    } else {
        ("in training", ["first step", "last step"])
    };
    let title = format!("{what} ({} episodes)", before.episodes);
    let [first, last] = columns;
    let _ = writeln!(out, "\n{title:width$}  {first:>15}  {last:>15}");
    for (name, before, after) in rows {
        let _ = writeln!(out, "{name:width$}  {before:>15}  {after:>15}");
    }
    if let Some(gain) = &e.gain {
        let _ = writeln!(out);
        for (name, points) in gain.rows() {
            let _ = writeln!(out, "{name:width$}  {points}");
        }
    }
    if let Some(verdict) = &e.verdict {
        let _ = writeln!(out, "\n{}: {}", verdict.verdict.name(), verdict.why);
        if let Some(change) = &verdict.change {
            let _ = writeln!(out, "to change: {change}");
        }
    }
    time_table(&mut out, s);
    waits_table(&mut out, s);
    let x = e.samples;
    let _ = writeln!(
        out,
        "\nepisodes  trained {}  left out {}  trained twice {}  lost {}",
        x.trained, x.dropped, x.trained_twice, x.lost
    );
    failures(&mut out, s.history);
    left_out(&mut out, s);
    let r = e.totals.resumed;
    if !r.is_empty() {
        let _ = writeln!(
            out,
            "in flight when a session ended  went on {} ({} tokens kept)  started again {} ({} tokens lost)",
            r.episodes, r.tokens, r.restarted, r.tokens_lost
        );
    }
    let (t, joins) = (e.tokens.counts, &e.tokens.joins);
    let _ = writeln!(
        out,
        "tokens    sampled {}  trained once {}  trained twice {}  left out {}",
        t.sampled, t.trained_once, t.trained_twice, t.untrained
    );
    if !joins.is_empty() {
        let told: Vec<String> = joins.iter().map(|(j, n)| format!("{j} {n}")).collect();
        let _ = writeln!(out, "calls of agents: {}", told.join("  "));
    }
    let branches = e.tokens.branches_text();
    if !branches.is_empty() {
        let _ = writeln!(out, "branches: {branches}");
    }
    next_commands(&mut out, s);
    out
}

/// Episodes that were not trained, by reason, and those that did not begin.
fn left_out(out: &mut String, s: &Summary<'_>) {
    let mut left_out = std::collections::BTreeMap::<&str, u64>::new();
    for (reason, episodes) in s.history.iter().flat_map(|r| &r.dropped) {
        *left_out.entry(reason).or_default() += *episodes as u64;
    }
    for (reason, episodes) in left_out {
        let _ = writeln!(out, "          left out {episodes}: {reason}");
    }
    let not_begun = s.ended.totals.not_begun;
    if not_begun > 0 {
        let _ = writeln!(
            out,
            "          not begun {}: the first ones of their group decided it (rollout.stop_decided)",
            not_begun
        );
    }
}

/// Episodes that the system failed, in which steps and why; nothing where there are none.
fn failures(out: &mut String, history: &[StepRecord]) {
    let failed: usize = history.iter().map(|r| r.rollout.failed).sum();
    if failed == 0 {
        return;
    }
    let all: usize = history.iter().map(|r| r.rollout.episodes).sum();
    let steps = history.iter().filter(|r| r.rollout.failed > 0).count();
    let first = history.iter().find_map(|r| r.failed_cause.as_deref());
    let first = first.map_or_else(String::new, |why| format!("; the first: {why}"));
    let _ = writeln!(
        out,
        "          the system failed {failed} of {all}, in {steps} of {} steps{first}",
        history.len()
    );
}

/// Summary of held-out tasks that were measured once, for `sinew eval`, which trains nothing.
pub fn measured(
    stats: &EpisodeStats,
    run_dir: &Path,
    wall_s: f64,
    example: Option<&str>,
) -> String {
    let mut out = format!(
        "\nheld-out, {} episodes in {}\n",
        stats.episodes,
        duration(wall_s)
    );
    for (name, value, _) in comparison(stats, stats) {
        let _ = writeln!(out, "{name:23}  {value:>15}");
    }
    let dir = run_dir.display();
    let _ = writeln!(out, "\nnext");
    if let Some(example) = example {
        let _ = writeln!(out, "  sinew show {example} --run-dir {dir}");
    }
    let _ = writeln!(out, "  sinew episodes --run-dir {dir}");
    out
}

/// Summary of a collection, and the next commands for it.
pub fn collected(progress: &CollectProgress, run_dir: &Path, wall_s: f64) -> String {
    let dir = run_dir.display();
    format!(
        "\n{} in {}\n\nnext\n  sinew episodes {dir} --min-reward 1\n  sinew episodes {dir} --export {dir}/episodes.jsonl\n  \
         to imitate the successes, in a recipe with algorithm.type = \"sft\": data = {{ type = \"episodes\", path = \"{dir}\" }}\n",
        collected_line(progress),
        duration(wall_s)
    )
}

/// Seconds by what they were spent on; the parts add up to the wall time.
fn time_table(out: &mut String, s: &Summary<'_>) {
    let _ = writeln!(
        out,
        "\nwhere the time went ({} in all)",
        duration(s.ended.wall_s)
    );
    for (name, seconds) in time_split(s.history, s.ended.wall_s) {
        share(out, name, seconds, s.ended.wall_s);
    }
}

/// Waiting times of engine and trainer by cause; each column adds up to the wall time. The last lines are
/// part of the others: the loop's waits for the disk, and the added waiting times of all episodes.
fn waits_table(out: &mut String, s: &Summary<'_>) {
    let _ = writeln!(out, "\nwhat engine and trainer waited for");
    let waits = &s.ended.totals.waits;
    let rows = waits.rows().into_iter().chain(waits.part_rows());
    // Times that would show as 0.0 % are left out.
    for (name, seconds) in rows.filter(|(_, seconds)| *seconds >= 5e-4 * s.ended.wall_s) {
        share(out, name, seconds, s.ended.wall_s);
    }
    let waited_s = waits.episodes_sandbox_s;
    if let Some(hint) = sandbox_hint(waited_s, s.ended.wall_s, s.sandboxes) {
        let _ = writeln!(out, "{hint}");
    }
    let staleness = s.ended.totals.staleness.iter();
    let behind: Vec<String> = staleness.map(|(n, rows)| format!("{n}: {rows}")).collect();
    if s.ended.totals.staleness.keys().any(|n| *n > 0) {
        let _ = writeln!(out, "trained rows by updates behind  {}", behind.join("  "));
    }
}

/// Advice if on average one episode or more waited for a sandbox, and fewer sandboxes than episodes are
/// allowed.
fn sandbox_hint(waited_s: f64, wall_s: f64, sandboxes: Option<usize>) -> Option<String> {
    let waiting = waited_s / wall_s.max(1e-9);
    let most = sandboxes.filter(|_| waiting >= 1.0)?;
    Some(format!(
        "{waiting:.0} episodes on average waited for a sandbox: raise sandbox.max_sandboxes (now {most}), or lower \
         rollout.max_in_flight"
    ))
}

/// A line of the time table: a name, its time and its share of the whole, with a digit behind the point where
/// that is small, since a bound of two percent is among what the table has to show.
fn share(out: &mut String, name: &str, seconds: f64, whole: f64) {
    let percent = 100.0 * seconds / whole.max(1e-9);
    let digits = usize::from(percent < 9.95);
    let time = duration(seconds);
    let _ = writeln!(out, "{name:27} {time:>7}  {percent:>4.digits$} %");
}

/// Commands that can be copied as they are.
fn next_commands(out: &mut String, s: &Summary<'_>) {
    let dir = s.run_dir.display();
    let _ = writeln!(out, "\nnext");
    let _ = writeln!(out, "  open {}", s.run_dir.join("report.html").display());
    for example in &s.ended.examples {
        let _ = writeln!(out, "  sinew show {example} --run-dir {dir}");
    }
    let _ = writeln!(out, "  sinew episodes --run-dir {dir} --limit 20");
    let _ = writeln!(
        out,
        "  sinew export {dir} model    # the trained model as one folder"
    );
    let _ = writeln!(
        out,
        "more steps: raise train.steps (now {}) in {dir}/recipe.toml, then\n  sinew train {dir}/recipe.toml --run-dir {dir} --resume",
        s.steps
    );
}

#[cfg(test)]
mod tests {
    use super::sandbox_hint;

    #[test]
    fn a_run_whose_episodes_waited_for_sandboxes_says_what_to_raise() {
        let hint = sandbox_hint(500.0, 10.0, Some(64)).unwrap();
        assert!(
            hint.starts_with("50 episodes on average waited for a sandbox"),
            "{hint}"
        );
        assert!(hint.contains("sandbox.max_sandboxes (now 64)"), "{hint}");
        assert_eq!(sandbox_hint(9.0, 10.0, Some(64)), None, "less than one");
        assert_eq!(sandbox_hint(500.0, 10.0, None), None, "there are enough");
        assert_eq!(sandbox_hint(0.0, 0.0, Some(64)), None);
    }
}
