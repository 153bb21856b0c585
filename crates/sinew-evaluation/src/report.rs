//! Results for people: text for a terminal, Markdown, and one HTML page without scripts.

use crate::compare::Comparison;
use crate::result::{BenchResult, Counts, Facts, Measures};
use sinew_algo::{IntervalMethod, TaskMean};
use std::fmt::Write;

/// Looks of the page.
const STYLE: &str = "body{font:15px/1.5 system-ui,sans-serif;max-width:1100px;margin:2em auto;padding:0 1em;color:#222}\
table{border-collapse:collapse;margin:.8em 0}td,th{padding:.2em .9em;text-align:right;border-bottom:1px solid #ddd}\
td:first-child,th:first-child{text-align:left}code{color:#555}summary{cursor:pointer}";

/// A table: its head, and rows of as many cells.
struct Grid {
    title: String,
    head: Vec<String>,
    rows: Vec<Vec<String>>,
}

impl Grid {
    fn new(title: &str, head: &[&str]) -> Self {
        Self {
            title: title.to_owned(),
            head: head.iter().map(|h| (*h).to_owned()).collect(),
            rows: Vec::new(),
        }
    }

    /// Columns of equal width, the first one to the left.
    fn text(&self) -> String {
        let all: Vec<&Vec<String>> = std::iter::once(&self.head).chain(&self.rows).collect();
        let width = |column: usize| {
            let cells = all.iter().filter_map(|row| row.get(column));
            cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
        };
        let widths: Vec<usize> = (0..self.head.len()).map(width).collect();
        let mut out = String::new();
        for row in all {
            let cells = row.iter().zip(&widths).enumerate();
            let cells = cells.map(|(i, (cell, &width))| match i {
                0 => format!("{cell:width$}"),
                _ => format!("{cell:>width$}"),
            });
            let line = cells.collect::<Vec<_>>().join("  ");
            let _ = writeln!(out, "{}", line.trim_end());
        }
        out
    }

    fn markdown(&self) -> String {
        let cell = |text: &String| text.replace('|', "\\|");
        let line = |row: &Vec<String>| {
            let cells: Vec<String> = row.iter().map(cell).collect();
            format!("| {} |\n", cells.join(" | "))
        };
        let mut out = line(&self.head);
        let _ = writeln!(out, "|---{}|", "|---:".repeat(self.head.len() - 1));
        self.rows.iter().for_each(|row| out.push_str(&line(row)));
        out
    }

    fn html(&self) -> String {
        let mut out = String::from("<table><tr>");
        for name in &self.head {
            let _ = write!(out, "<th>{}", escape(name));
        }
        for row in &self.rows {
            out.push_str("<tr>");
            for cell in row {
                let _ = write!(out, "<td>{}", escape(cell));
            }
        }
        out + "</table>"
    }
}

/// Text as HTML text.
fn escape(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
}

/// A share in percent.
fn percent(share: f64) -> String {
    format!("{:.1} %", 100.0 * share)
}

/// A mean of shares with its interval, such as `12.5 % (10.1 to 15.3)`.
fn share(mean: Option<&TaskMean>) -> String {
    let Some(mean) = mean else {
        return "-".to_owned();
    };
    match mean.interval {
        Some(i) => format!(
            "{} ({:.1} to {:.1})",
            percent(mean.mean),
            100.0 * i.low,
            100.0 * i.high
        ),
        None => percent(mean.mean),
    }
}

/// Results of all benchmarks, one row each.
fn overview(results: &[BenchResult]) -> Grid {
    let mut grid = Grid::new(
        "Results",
        &[
            "benchmark",
            "tasks",
            "greedy",
            "sampled",
            "pass@k",
            "cut",
            "no score",
            "tokens",
            "cost",
            "time",
        ],
    );
    for result in results {
        let success = |m: &Option<Measures>| share(m.as_ref().and_then(|m| m.success.as_ref()));
        let best = result
            .sampled
            .as_ref()
            .and_then(|m| m.pass_at.iter().next_back());
        let sets = || [&result.greedy, &result.sampled].into_iter().flatten();
        let cut: usize = sets()
            .map(|m| m.counts.truncated.values().sum::<usize>())
            .sum();
        let missing: usize = sets().map(|m| m.counts.failed + m.counts.unscored).sum();
        grid.rows.push(vec![
            result.facts.bench.clone(),
            result.tasks.to_string(),
            success(&result.greedy),
            success(&result.sampled),
            best.map_or("-".to_owned(), |(k, mean)| {
                format!("{}: {}", k, share(Some(mean)))
            }),
            cut.to_string(),
            missing.to_string(),
            format!("{} + {}", result.tokens.prompt, result.tokens.sampled),
            result
                .tokens
                .cost
                .map_or("-".to_owned(), |c| format!("{c:.4}")),
            format!("{:.0} s", result.facts.wall_s),
        ]);
    }
    grid
}

/// Means and rates of one benchmark: greedy, and sampled.
fn measures(result: &BenchResult) -> Grid {
    let mut grid = Grid::new(
        "Success over tasks, with 95 % intervals",
        &["", "greedy", "sampled"],
    );
    let sets = [result.greedy.as_ref(), result.sampled.as_ref()];
    let mut row = |name: &str, of: &dyn Fn(&Measures) -> String| {
        let cells = sets.map(|set| set.map_or("-".to_owned(), of));
        grid.rows
            .push(std::iter::once(name.to_owned()).chain(cells).collect());
    };
    row("success", &|m| share(m.success.as_ref()));
    row("interval", &|m| {
        m.success.map_or("-".to_owned(), |s| method(&s).to_owned())
    });
    let rewards = sets.iter().flatten().any(|m| m.reward.is_some());
    if rewards {
        row("reward", &|m| match m.reward {
            Some(r) => match r.interval {
                Some(i) => format!("{:.3} ({:.3} to {:.3})", r.mean, i.low, i.high),
                None => format!("{:.3}", r.mean),
            },
            None => "-".to_owned(),
        });
    }
    let ks: std::collections::BTreeSet<usize> = sets
        .iter()
        .flatten()
        .flat_map(|m| m.pass_at.keys().copied())
        .collect();
    for k in ks {
        row(&format!("pass@{k}"), &|m| share(m.pass_at.get(&k)));
        row(&format!("pass^{k}"), &|m| share(m.all_at.get(&k)));
    }
    row("samples", &|m| m.counts.samples.to_string());
    row("cut by a limit (scored as they are)", &|m| cut(&m.counts));
    row("without a score (in no mean)", &|m| {
        format!("{} failed, {} unscored", m.counts.failed, m.counts.unscored)
    });
    row("success if those counted as 0", &|m| percent(m.as_zero));
    grid
}

/// The method of an interval in words.
fn method(mean: &TaskMean) -> &'static str {
    match mean.method {
        IntervalMethod::Wilson => "Wilson",
        IntervalMethod::Clustered => "by task",
        IntervalMethod::None => "none",
    }
}

/// Samples that a limit cut, by its name.
fn cut(counts: &Counts) -> String {
    let all: usize = counts.truncated.values().sum();
    let named = counts
        .truncated
        .iter()
        .map(|(limit, n)| format!("{n} by {limit}"));
    let named: Vec<String> = named.collect();
    match all {
        0 => "0".to_owned(),
        _ => named.join(", "),
    }
}

/// Success by type of task; `None` with one type.
fn kinds(result: &BenchResult) -> Option<Grid> {
    let mut grid = Grid::new("By type of task", &["type", "tasks", "greedy", "sampled"]);
    for (kind, [greedy, sampled]) in &result.by_kind {
        let tasks = result.per_task.iter().filter(|t| t.kind == *kind).count();
        let tasks = tasks.to_string();
        grid.rows.push(vec![
            kind.clone(),
            tasks,
            share(greedy.as_ref()),
            share(sampled.as_ref()),
        ]);
    }
    (grid.rows.len() > 1).then_some(grid)
}

/// Every task: greedy success, and successes of its samples.
fn tasks(result: &BenchResult) -> Grid {
    let mut grid = Grid::new(
        "By task",
        &["task", "type", "greedy", "sampled", "cut", "no score"],
    );
    for task in &result.per_task {
        let successes = task.sampled.iter().filter(|s| **s > 0.0).count();
        let greedy = task
            .greedy
            .first()
            .map_or("-", |s| if *s > 0.0 { "1" } else { "0" });
        grid.rows.push(vec![
            task.task.clone(),
            task.kind.clone(),
            greedy.to_owned(),
            format!("{successes} of {}", task.sampled.len()),
            task.truncated.to_string(),
            task.missing.to_string(),
        ]);
    }
    grid
}

/// Success of each seed, and how far they differ.
fn seeds(result: &BenchResult) -> String {
    let each: Vec<String> = result
        .by_seed
        .iter()
        .map(|(seed, mean)| format!("{seed}: {}", percent(*mean)))
        .collect();
    let means: Vec<f64> = result.by_seed.values().copied().collect();
    let n = means.len() as f64;
    let middle = means.iter().sum::<f64>() / n;
    let squares: f64 = means.iter().map(|m| (m - middle).powi(2)).sum();
    let deviation = 100.0 * (squares / (n - 1.0)).sqrt();
    format!(
        "sampled success by seed: {}; standard deviation {deviation:.1} points",
        each.join(", ")
    )
}

/// Notes on what the servers of a model report.
fn served(facts: &Facts) -> Vec<String> {
    let mut lines = Vec::new();
    if facts.is_text_only {
        lines.push(
            "the server reports neither token ids nor log-probs: texts are scored, and none of it can be trained on"
                .to_owned(),
        );
    }
    if let Some(served) = &facts.served {
        let uncounted = match served.uncounted {
            0 => String::new(),
            n => format!("; {n} of them came without counts, and their bytes are in the sums"),
        };
        lines.push(format!(
            "tokens are those that the server counted, in {} requests{uncounted}",
            served.requests
        ));
    }
    lines
}

/// Facts in words, one line each.
fn facts(result: &BenchResult) -> Vec<String> {
    let f = &result.facts;
    let mut lines = vec![format!("model {}", f.model)];
    if result.by_seed.len() > 1 {
        lines.push(seeds(result));
    }
    lines.push(format!("contamination: {}", f.contamination.line()));
    let t = &result.tokens;
    let cost = match (t.cost, f.price) {
        (Some(cost), Some([input, output])) => {
            format!("; cost {cost:.4} at {input} and {output} a million")
        }
        _ => String::new(),
    };
    lines.push(format!(
        "tokens: {} of prompts, {} sampled{cost}",
        t.prompt, t.sampled
    ));
    lines.extend(served(f));
    if let Some(user) = &f.user {
        let cost = user
            .cost
            .map_or(String::new(), |c| format!("; cost {c:.4}"));
        lines.push(format!(
            "simulated user {}: {} answers, {} tokens of questions, {} of answers{cost}",
            user.model, user.calls, user.prompt, user.sampled
        ));
    }
    lines.push(format!(
        "time: {:.0} s, {:.1} s an episode",
        f.wall_s, result.episode_s
    ));
    let sets = [&result.greedy, &result.sampled];
    let missing = sets
        .into_iter()
        .flatten()
        .find_map(|m| m.counts.first_missing.as_ref());
    if let Some(why) = missing {
        lines.push(format!("first sample without a score: {why}"));
    }
    let settings = f
        .settings
        .iter()
        .map(|(key, value)| format!("{key} = {value}"));
    let settings: Vec<String> = settings.collect();
    lines.push(format!("settings: {}", settings.join(", ")));
    lines
}

/// Results as text.
pub fn text(results: &[BenchResult]) -> String {
    let mut out = format!("\n{}", overview(results).text());
    for result in results {
        let _ = writeln!(out, "\n{}", result.facts.bench);
        out.push_str(&measures(result).text());
        if let Some(kinds) = kinds(result) {
            let _ = write!(out, "\n{}", kinds.text());
        }
        for line in facts(result).iter().filter(|l| !l.starts_with("settings:")) {
            let _ = writeln!(out, "{line}");
        }
    }
    out
}

/// Results as Markdown, without the table of tasks.
pub fn markdown(results: &[BenchResult]) -> String {
    let mut out = format!("# Evaluation\n\n{}", overview(results).markdown());
    for result in results {
        let _ = write!(
            out,
            "\n## {}\n\n{}",
            result.facts.bench,
            measures(result).markdown()
        );
        if let Some(kinds) = kinds(result) {
            let _ = write!(out, "\n{}", kinds.markdown());
        }
        out.push('\n');
        for line in facts(result) {
            let _ = writeln!(out, "- {line}");
        }
    }
    out
}

/// Results as one page; the tables of tasks are folded.
pub fn html(results: &[BenchResult]) -> String {
    let mut page = format!(
        "<!doctype html><html lang=en><meta charset=utf-8><title>Sinew evaluation</title><style>{STYLE}</style>\
         <h1>Evaluation</h1>{}",
        overview(results).html()
    );
    for result in results {
        let _ = write!(page, "<h2>{}</h2>", escape(&result.facts.bench));
        let grids = [Some(measures(result)), kinds(result)];
        for grid in grids.into_iter().flatten() {
            let _ = write!(page, "<h3>{}</h3>{}", escape(&grid.title), grid.html());
        }
        page.push_str("<ul>");
        for line in facts(result) {
            let _ = write!(page, "<li>{}", escape(&line));
        }
        let tasks = tasks(result);
        let _ = write!(
            page,
            "</ul><details><summary>{}</summary>{}</details>",
            escape(&tasks.title),
            tasks.html()
        );
    }
    page
}

/// Comparisons as text.
pub fn comparison_text(comparisons: &[Comparison]) -> String {
    let mut out = String::new();
    for found in comparisons {
        let [first, second] = &found.models;
        let _ = writeln!(out, "\n{}: {second} minus {first}", found.bench);
        for (name, paired) in [("greedy", &found.greedy), ("sampled", &found.sampled)] {
            let Some(p) = paired else { continue };
            let _ = writeln!(
                out,
                "{name:8} {} to {}: {}; better in {} tasks, worse in {}",
                percent(p.first),
                percent(p.second),
                p.points(),
                p.better,
                p.worse
            );
            if let Some(least) = p.detectable {
                let points = 100.0 * least;
                let _ = writeln!(
                    out,
                    "         smallest difference found with a power of 80 %: {points:.1} points"
                );
            }
            if let Some(value) = p.mcnemar_p {
                let _ = writeln!(out, "         McNemar's exact test: p = {value:.4}");
            }
        }
        for (kind, p) in &found.by_kind {
            let _ = writeln!(out, "  {kind}: {}", p.points());
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compare::compare;
    use crate::result::summarize;
    use crate::result::tests::{facts, sample};

    fn result(solved: bool) -> BenchResult {
        let mut facts = facts();
        facts.model = "<model>".into();
        let samples = [
            sample("a|1", Some(0), true),
            sample("a|1", Some(1), solved),
            sample("b2", Some(0), false),
            sample("b2", Some(1), solved),
            sample("a|1", None, true),
            sample("b2", None, solved),
        ];
        summarize(facts, &samples)
    }

    #[test]
    fn reports_have_intervals_counts_and_notes_and_no_markup_of_others() {
        let results = [result(false)];
        let text = text(&results);
        for needle in [
            "success",
            "pass@2",
            "25.0 % (",
            "by task",
            "sampled success by seed: 0: 50.0 %, 1: 0.0 %",
            "contamination: not checked: the model is not of a run",
            "cost 0.0120 at 1 and 10 a million",
            "success if those counted as 0",
            "pass^2",
            "1: 0.0 %; standard deviation 35.4 points",
            "time: 12 s, 1.0 s an episode",
        ] {
            assert!(text.contains(needle), "{needle}: {text}");
        }
        let markdown = markdown(&results);
        assert!(markdown.contains("| gsm8k | 2 |"), "{markdown}");
        assert!(
            markdown.contains("settings: rollout.max_turn_tokens = 512"),
            "{markdown}"
        );
        let page = html(&results);
        assert!(
            page.contains("&lt;model&gt;") && !page.contains("<model>"),
            "{page}"
        );
        assert!(
            page.contains("<td>a|1<td>a<td>1<td>1 of 2<td>0<td>0"),
            "{page}"
        );
    }

    #[test]
    fn what_servers_and_users_report_is_stated() {
        let mut result = result(true);
        result.facts.is_text_only = true;
        result.facts.served = Some(crate::ServedTokens {
            requests: 6,
            uncounted: 2,
            prompt: 70,
            sampled: 5,
        });
        result.facts.user = Some(crate::UserTokens {
            model: "u".into(),
            calls: 9,
            prompt: 100,
            sampled: 20,
            cost: Some(0.5),
        });
        let text = text(&[result]);
        for needle in [
            "neither token ids nor log-probs",
            "in 6 requests; 2 of them came without counts",
            "simulated user u: 9 answers, 100 tokens of questions, 20 of answers; cost 0.5000",
        ] {
            assert!(text.contains(needle), "{needle}: {text}");
        }
    }

    #[test]
    fn a_comparison_says_what_it_could_have_found() {
        let found = compare(&result(false), &result(true)).unwrap();
        let text = comparison_text(&[found]);
        for needle in [
            "gsm8k: <model> minus <model>",
            "sampled  25.0 % to 75.0 %: +50.0 points",
            "McNemar's exact test: p = 1.0000",
        ] {
            assert!(text.contains(needle), "{needle}: {text}");
        }
    }
}
