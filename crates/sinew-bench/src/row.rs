//! One line of a bench.
//!
//! The option `--json` prints one object a line: `name`, `value`, `unit`, `spread`, `peer`, `peer_value`,
//! `ratio`, `target`, `met`, `why`, `others_cpu`. A peer that could not run leaves `met: false` and `why`; a
//! row without a target has neither `target` nor `met`.

use crate::output;
use serde::Serialize;

/// A measurement, its peer's in the same run, and what was hoped for.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(crate) struct Row {
    /// Name of the measurement, with its size.
    pub(crate) name: String,
    /// Median over the measured steps.
    pub(crate) value: Option<f64>,
    /// Unit of `value`, `spread` and `peer_value`.
    pub(crate) unit: String,
    /// 90th minus 10th percentile of the measured steps.
    pub(crate) spread: f64,
    /// Name and version of what it is compared with.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) peer: Option<String>,
    /// The peer's median.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) peer_value: Option<f64>,
    /// Factor by which it is better than the peer; above 1 is better.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) ratio: Option<f64>,
    /// Least `ratio` hoped for, or where a row is not about one the largest or the least `value`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) target: Option<f64>,
    /// Whether the target is met.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) met: Option<bool>,
    /// Reason why there is no value, or no peer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) why: Option<String>,
    /// Share of the machine's CPU time that other processes took meanwhile, 0 to 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) others_cpu: Option<f64>,
}

/// Better direction of a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Better {
    /// Rates.
    More,
    /// Times and sizes.
    Less,
}

/// Median and spread of some measurements.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Summary {
    /// Nearest rank.
    pub(crate) median: f64,
    /// 90th minus 10th percentile.
    pub(crate) spread: f64,
    /// The best single measurement.
    pub(crate) best: f64,
}

impl Summary {
    /// `None` of nothing.
    pub(crate) fn of(mut values: Vec<f64>, better: Better) -> Option<Self> {
        values.sort_by(f64::total_cmp);
        let last = values.len().checked_sub(1)?;
        let at = |q: f64| values[(last as f64 * q).round() as usize];
        Some(Self {
            median: at(0.5),
            spread: at(0.9) - at(0.1),
            best: match better {
                Better::More => values[last],
                Better::Less => values[0],
            },
        })
    }
}

impl Row {
    /// A row without a peer.
    pub(crate) fn new(name: impl Into<String>, unit: &str, value: Summary) -> Self {
        Self {
            name: name.into(),
            value: Some(value.median),
            unit: unit.to_owned(),
            spread: value.spread,
            ..Self::default()
        }
    }

    /// A row for what could not be measured here.
    pub(crate) fn missing(
        name: impl Into<String>,
        unit: &str,
        why: impl std::fmt::Display,
    ) -> Self {
        Self {
            name: name.into(),
            unit: unit.to_owned(),
            met: Some(false),
            why: Some(why.to_string()),
            ..Self::default()
        }
    }

    /// Compares with a peer's median.
    #[must_use]
    pub(crate) fn against(mut self, peer: &str, peer_value: f64, better: Better) -> Self {
        self.peer = Some(peer.to_owned());
        self.peer_value = Some(peer_value);
        self.ratio = self.value.map(|value| match better {
            Better::More => value / peer_value,
            Better::Less => peer_value / value,
        });
        self
    }

    /// The peer could not run: the target, if there is one, is not met.
    #[must_use]
    pub(crate) fn without_peer(mut self, peer: &str, why: impl std::fmt::Display) -> Self {
        self.peer = Some(peer.to_owned());
        self.met = Some(false);
        self.why = Some(why.to_string());
        self
    }

    /// Sets the least ratio hoped for.
    #[must_use]
    pub(crate) fn target(mut self, least: f64) -> Self {
        self.target = Some(least);
        self.met = Some(self.ratio.is_some_and(|ratio| ratio >= least));
        self
    }

    /// Sets the largest value hoped for.
    #[must_use]
    pub(crate) fn at_most(mut self, limit: f64) -> Self {
        self.target = Some(limit);
        self.met = Some(self.value.is_some_and(|value| value <= limit));
        self
    }

    /// Sets the least value hoped for.
    #[must_use]
    pub(crate) fn at_least(mut self, limit: f64) -> Self {
        self.target = Some(limit);
        self.met = Some(self.value.is_some_and(|value| value >= limit));
        self
    }

    /// Records the share of time that the machine was busy with other processes.
    #[must_use]
    pub(crate) fn others(mut self, share: Option<f64>) -> Self {
        self.others_cpu = share.map(|share| (share * 100.0).round() / 100.0);
        self
    }
}

/// Prints rows as they come.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Printer {
    /// Objects in place of text.
    json: bool,
}

impl Printer {
    /// `json`: one object for each row, for programs.
    pub(crate) fn new(json: bool) -> Self {
        Self { json }
    }

    pub(crate) fn row(self, row: &Row) {
        if self.json {
            output::json(row);
        } else {
            output::print(&text(row));
        }
    }
}

/// A row for a person.
fn text(row: &Row) -> String {
    let number = |value: Option<f64>| value.map_or("-".to_owned(), |v| format!("{v:.4}"));
    let mut line = format!(
        "{:44} {:>12} ±{:<10.4} {:8}",
        row.name,
        number(row.value),
        row.spread,
        row.unit
    );
    if let Some(peer) = &row.peer {
        line += &format!(" {peer} {}", number(row.peer_value));
    }
    if let Some(ratio) = row.ratio {
        line += &format!(" ratio {ratio:.2}");
    }
    if let (Some(target), Some(met)) = (row.target, row.met) {
        line += &format!(" target {target} {}", if met { "met" } else { "NOT met" });
    }
    if let Some(why) = &row.why {
        line += &format!(" ({why})");
    }
    line + "\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ratios_say_how_many_times_better() {
        let summary = Summary::of(vec![3.0, 1.0, 2.0], Better::Less).unwrap();
        assert_eq!(
            (summary.median, summary.best, summary.spread),
            (2.0, 1.0, 2.0)
        );
        let time = Row::new("t", "s", summary).against("peer", 8.0, Better::Less);
        assert_eq!(time.ratio, Some(4.0));
        assert_eq!(time.clone().target(4.0).met, Some(true));
        assert_eq!(time.target(4.1).met, Some(false));
        let rate = Row::new("r", "tok/s", summary).against("peer", 8.0, Better::More);
        assert_eq!(rate.ratio, Some(0.25));
        assert_eq!(Summary::of(Vec::new(), Better::More), None);
    }

    #[test]
    fn a_row_without_a_peer_says_why_and_is_not_met() {
        let row = Row::new("r", "s", Summary::default()).without_peer("torch", "no torch");
        let row = serde_json::json!(row.target(2.0));
        assert_eq!(row["met"], false);
        assert_eq!(row["why"], "no torch");
        assert!(row.get("ratio").is_none());
        let plain = serde_json::json!(Row::new("r", "s", Summary::default()));
        assert!(plain.get("met").is_none() && plain.get("target").is_none());
    }
}
