//! The text format of Prometheus (exposition format 0.0.4). Pure.

use crate::numbers::{Numbers, help};
use std::collections::BTreeMap;
use std::fmt::Write;

/// Series that are kept at most: a run with thousands of metrics is cut, which is reported.
const MAX_SERIES: usize = 2000;

/// The newest value of each series of a run.
#[derive(Clone, Debug, Default)]
pub(crate) struct Board {
    /// Label `run` of every series.
    run: String,
    /// Values by names with `/`.
    values: BTreeMap<String, f64>,
    counters: BTreeMap<&'static str, f64>,
    /// Values of series beyond the limit.
    lost: u64,
}

impl Board {
    /// A board without series.
    pub(crate) fn new(run: &str) -> Self {
        Self {
            run: run.to_owned(),
            ..Self::default()
        }
    }

    /// Sets gauges, by their names with `/`.
    pub(crate) fn set(&mut self, numbers: &Numbers) {
        for (name, value) in numbers {
            if self.values.len() < MAX_SERIES || self.values.contains_key(name) {
                self.values.insert(name.clone(), *value);
            } else {
                self.lost += 1;
            }
        }
    }

    /// Sets a number that only grows.
    pub(crate) fn count(&mut self, name: &'static str, value: f64) {
        self.counters.insert(name, value);
    }

    /// Adds to a number that only grows.
    pub(crate) fn add(&mut self, name: &'static str, more: f64) {
        *self.counters.entry(name).or_default() += more;
    }

    /// All of it as text.
    pub(crate) fn text(&self) -> String {
        let mut out = String::new();
        let run = escaped(&self.run);
        // Names of environments become labels; several share a family, which is announced once.
        // Two names that look the same without their marks are one series: a reader refuses doubles.
        let mut families = BTreeMap::<String, (String, BTreeMap<String, f64>)>::new();
        for (name, value) in &self.values {
            let (family, labels) = family(name);
            let (_, rows) = families
                .entry(family)
                .or_insert_with(|| (help(name), BTreeMap::new()));
            rows.insert(labels, *value);
        }
        for (family, (help, rows)) in families {
            let _ = writeln!(out, "# HELP sinew_{family} {}", one_line(&help));
            let _ = writeln!(out, "# TYPE sinew_{family} gauge");
            for (labels, value) in rows {
                let _ = writeln!(out, "sinew_{family}{{run=\"{run}\"{labels}}} {value}");
            }
        }
        let lost = ("signals_series_left_out", self.lost as f64);
        for (name, value) in self.counters.iter().map(|(n, v)| (*n, *v)).chain([lost]) {
            let _ = writeln!(out, "# HELP sinew_{name}_total {}", counted(name));
            let _ = writeln!(out, "# TYPE sinew_{name}_total counter");
            let _ = writeln!(out, "sinew_{name}_total{{run=\"{run}\"}} {value}");
        }
        out
    }
}

/// The family of a name and its further labels: `rollout/env/shop/success` is `rollout_env_success` with
/// `env="shop"`, `rollout/reward/format` is `rollout_reward_part` with `part="format"`.
fn family(name: &str) -> (String, String) {
    if let Some((prefix, rest)) = name.split_once("/env/")
        && let Some((env, what)) = rest.rsplit_once('/')
    {
        let family = format!("{}_env_{}", plain(prefix), plain(what));
        return (family, format!(",env=\"{}\"", escaped(env)));
    }
    if let Some((prefix, part)) = name.split_once("/reward/") {
        let label = format!(",part=\"{}\"", escaped(part));
        return (format!("{}_reward_part", plain(prefix)), label);
    }
    (plain(name), String::new())
}

/// A text as `# HELP` takes it.
fn one_line(text: &str) -> String {
    text.replace('\\', "\\\\").replace('\n', "\\n")
}

/// A counter in words. Counters begin with 0 in each session of a run: what reads them has to bear that.
fn counted(name: &str) -> &'static str {
    match name {
        "steps" => "Training steps of this process.",
        "episodes" => "Training episodes of this process.",
        "sampled_tokens" => "Tokens that were sampled in training episodes of this process.",
        "alerts" => "Alerts that were raised.",
        "events_lost" => "Events of the run that a viewer had no room for.",
        "signals_sent" => "Requests to other systems that were answered.",
        "signals_lost" => "Requests to other systems that were given up.",
        "signals_spans_lost" => "Phases of episodes that did not fit into the traces.",
        "signals_log_records_lost" => "Log records that did not fit into their queue.",
        "signals_cpu_seconds" => "Processor seconds that the signals took.",
        "signals_series_left_out" => "Values of series beyond the most that are kept.",
        _ => "A count of the run.",
    }
}

/// A valid name: letters, digits and `_`.
fn plain(name: &str) -> String {
    let fits = |c: char| if c.is_ascii_alphanumeric() { c } else { '_' };
    name.chars().map(fits).collect()
}

/// A text as the value of a label.
fn escaped(text: &str) -> String {
    text.replace('\\', "\\\\")
        .replace('"', "\\\"")
        .replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn environments_and_parts_are_labels() {
        let mut board = Board::new("a\"b");
        board.set(&vec![
            ("rollout/env/shop/success".into(), 0.5),
            ("rollout/env/web/success".into(), 0.25),
            ("rollout/reward/format".into(), 1.0),
            ("rollout/reward".into(), 2.0),
        ]);
        board.add("steps", 1.0);
        let text = board.text();
        for line in [
            "sinew_rollout_env_success{run=\"a\\\"b\",env=\"shop\"} 0.5",
            "sinew_rollout_reward_part{run=\"a\\\"b\",part=\"format\"} 1",
            "sinew_rollout_reward{run=\"a\\\"b\"} 2",
            "sinew_steps_total{run=\"a\\\"b\"} 1",
        ] {
            assert!(text.lines().any(|l| l == line), "{line} not in\n{text}");
        }
        let types = text.matches("# TYPE sinew_rollout_env_success ").count();
        assert_eq!(types, 1);
        // Every family has its description once, before its rows.
        let mut lines = text.lines().peekable();
        while let Some(line) = lines.next() {
            if let Some(rest) = line.strip_prefix("# HELP ") {
                let (family, help) = rest.split_once(' ').unwrap();
                let next = lines.peek().unwrap();
                assert!(next.starts_with(&format!("# TYPE {family} ")), "{next}");
                assert!(help.ends_with('.') && help.len() > 10, "{help}");
            }
        }
        let kinds = [
            text.matches("# HELP ").count(),
            text.matches("# TYPE ").count(),
        ];
        assert_eq!(kinds[0], kinds[1]);
        assert!(text.contains(
            "# HELP sinew_rollout_reward Training episodes of the last step: mean reward"
        ));
    }

    #[test]
    fn series_are_bounded() {
        let mut board = Board::new("r");
        for i in 0..MAX_SERIES + 5 {
            board.set(&vec![(format!("m{i}"), 0.0)]);
        }
        assert!(
            board
                .text()
                .contains("sinew_signals_series_left_out_total{run=\"r\"} 5")
        );
    }

    proptest! {
        #[test]
        fn any_name_gives_a_line_of_the_format(name in "\\PC{1,30}", run in "\\PC{0,10}") {
            let mut board = Board::new(&run);
            board.set(&vec![(name, 1.0)]);
            let text = board.text();
            let line = text.lines().find(|l| !l.starts_with('#')).unwrap();
            let family = line.split('{').next().unwrap();
            prop_assert!(family.chars().all(|c| c.is_ascii_alphanumeric() || c == '_'));
        }
    }
}
