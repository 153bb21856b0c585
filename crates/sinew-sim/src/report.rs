//! A report for users: text with curves of blocks, and SVG.

use crate::measure::{Gauge, Report};
use sinew_view::ViewError;
use sinew_view::plot::{Curve, plot};
use std::fmt::Write;

/// Columns of a curve of blocks.
const COLUMNS: usize = 60;
/// Heights of a block.
const BLOCKS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];

/// A curve in one line, scaled to its largest number.
fn blocks(values: &[f64]) -> String {
    let most = values.iter().copied().fold(0.0, f64::max);
    if values.is_empty() || most <= 0.0 {
        return String::new();
    }
    let columns = COLUMNS.min(values.len());
    let of = |column: usize| {
        let (from, to) = (
            column * values.len() / columns,
            (column + 1) * values.len() / columns,
        );
        let part = &values[from..to.max(from + 1)];
        let mean = part.iter().sum::<f64>() / part.len() as f64;
        BLOCKS[((mean / most * 7.0).round() as usize).min(7)]
    };
    let line: String = (0..columns).map(of).collect();
    format!("{line}  up to {most:.0}")
}

/// A share as text.
fn percent(share: f64) -> String {
    format!("{:.1} %", 100.0 * share)
}

/// A report as text.
pub fn text(report: &Report) -> String {
    let mut out = String::new();
    let (u, t) = (&report.utilization, &report.throughput);
    // Writing to a string does not fail.
    let _ = writeln!(
        out,
        "{}: {} updates in {:.0} s, seed {}, {} events",
        report.name, report.updates, report.virtual_s, report.seed, report.events
    );
    let _ = writeln!(
        out,
        "use         engines {} (batch {})  tools {}  sandboxes {}  trainer {}",
        percent(u.engines),
        percent(u.batch),
        percent(u.tools),
        percent(u.sandboxes),
        percent(u.trainer)
    );
    let _ = writeln!(
        out,
        "throughput  {:.0} sampled tokens/s  {:.0} trained of {:.0} computed tokens/s  {:.2} episodes/s  {:.1} updates/h",
        t.sampled_tokens_per_s,
        t.trained_tokens_per_s,
        t.computed_tokens_per_s,
        t.episodes_per_s,
        t.updates_per_h
    );
    let ages = report
        .staleness
        .iter()
        .map(|(age, n)| format!("{age}: {n}"));
    let _ = writeln!(out, "staleness   {}", ages.collect::<Vec<_>>().join("  "));
    for (name, p) in [
        ("episode", &report.tail.episode_s),
        ("step", &report.tail.step_s),
    ] {
        let _ = writeln!(
            out,
            "{name:<11} p50 {:.1} s  p95 {:.1} s  p99 {:.1} s",
            p.p50, p.p95, p.p99
        );
    }
    if report.cost.per_hour > 0.0 {
        let c = &report.cost;
        let _ = writeln!(
            out,
            "cost        {:.2} an hour  {:.3} an update  {:.3} a million trained tokens  {:.0} trained tokens for 1",
            c.per_hour, c.per_update, c.per_million_trained_tokens, c.trained_tokens_per_unit
        );
    }
    roles(&mut out, report);
    curves(&mut out, report);
    for (n, variant) in report.next.iter().enumerate() {
        let head = if n == 0 { "next" } else { "" };
        let _ = writeln!(
            out,
            "{head:<11} {:+.1} %  {}",
            100.0 * (variant.gain - 1.0),
            variant.what
        );
    }
    out
}

/// The part of a system that is busy most, and its share of the time.
pub fn bottleneck(report: &Report) -> (&'static str, f64) {
    let u = &report.utilization;
    let parts = [
        ("engines", u.engines),
        ("trainer", u.trainer),
        ("places for episodes", u.sandboxes),
    ];
    parts
        .into_iter()
        .fold(("engines", 0.0), |a, b| if b.1 > a.1 { b } else { a })
}

/// The figures that a plan is made for, in a table.
pub fn table(report: &Report) -> String {
    let (t, s, c) = (&report.throughput, &report.tail.step_s, &report.cost);
    let (part, share) = bottleneck(report);
    let or_dash = |value: f64, text: String| if value > 0.0 { text } else { "-".to_owned() };
    let rows = [
        (
            "step",
            format!("{:.2} s, 95 of 100 below {:.2} s", s.mean, s.p95),
        ),
        ("updates", format!("{:.1} an hour", t.updates_per_h)),
        (
            "throughput",
            format!(
                "{:.0} sampled and {:.0} trained tokens/s, {:.2} episodes/s",
                t.sampled_tokens_per_s, t.trained_tokens_per_s, t.episodes_per_s
            ),
        ),
        (
            "cost",
            or_dash(
                c.per_hour,
                format!("{:.2} an hour, {:.4} an update", c.per_hour, c.per_update),
            ),
        ),
        (
            "bottleneck",
            format!("{part}, {} of the time", percent(share)),
        ),
    ];
    rows.iter()
        .map(|(name, value)| format!("{name:<11} {value}\n"))
        .collect()
}

/// A line for each role, and the work that losses destroyed.
fn roles(out: &mut String, report: &Report) {
    for (n, role) in report.roles.iter().enumerate() {
        let head = if n == 0 { "roles" } else { "" };
        let kind = role.kind.name();
        let used = role.utilization.map_or("-".to_owned(), percent);
        let up = percent(role.up);
        let (units, host, losses, price) = (role.units, &role.host, role.losses, role.per_hour);
        let _ = writeln!(
            out,
            "{head:<11} {units} x {kind} on {host}: used {used}  up {up}  lost {losses} times  {price:.2} an hour"
        );
        if let Some(s) = &role.scaling {
            let _ = writeln!(
                out,
                "            {:.1} units on the mean, {} to {}, {} at the end  {} changes, {} of them back",
                s.mean, s.least, s.most, s.last, s.changes, s.reversals
            );
        }
    }
    if report.roles.iter().any(|role| role.losses > 0) {
        let _ = writeln!(out, "lost        {:.0} s of work", report.lost_s);
    }
}

/// Name of a curve, and its value at a moment.
type CurveValue = (&'static str, fn(&Gauge) -> f64);

/// Curves over time.
fn curves(out: &mut String, report: &Report) {
    let rows: [CurveValue; 3] = [
        ("generating", |g| g.generating as f64),
        ("in tools", |g| g.acting as f64),
        ("waiting", |g| g.waiting as f64),
    ];
    for (name, of) in rows {
        let values: Vec<f64> = report.gauges.iter().map(of).collect();
        let line = blocks(&values);
        if !line.is_empty() {
            let _ = writeln!(out, "{name:<11} {line}");
        }
    }
    let line = blocks(&report.steps_s);
    if !line.is_empty() {
        let _ = writeln!(out, "step s      {line}");
    }
}

/// Draws generation, tools and waiting over time as SVG.
///
/// # Errors
/// If it cannot be drawn.
pub fn svg(report: &Report) -> Result<String, ViewError> {
    let curve = |name: &str, of: fn(&Gauge) -> f64| Curve {
        name: name.into(),
        points: report.gauges.iter().map(|g| (g.at_s, of(g))).collect(),
    };
    let curves = [
        curve("generating", |g| g.generating as f64),
        curve("in tools", |g| g.acting as f64),
        curve("waiting to begin", |g| g.waiting as f64),
    ];
    let title = format!("{}: episodes by what they do", report.name);
    plot(&title, "virtual seconds", "episodes", &curves)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_curve_of_blocks_rises_with_its_values() {
        assert_eq!(blocks(&[0.0, 7.0]), "▁█  up to 7");
        assert_eq!(blocks(&[]), "");
        let long: Vec<f64> = (0..600).map(f64::from).collect();
        let line = blocks(&long);
        assert_eq!(
            line.split_whitespace().next().unwrap().chars().count(),
            COLUMNS
        );
    }
}
