//! Counts of a step's samples by their fate, each with its first cause.

use crate::rows::Rows;
use serde::{Deserialize, Serialize};
use sinew_types::{EpisodeEnd, EpisodeId, Trace};
use std::collections::BTreeMap;

/// Reason for episodes whose group has no training signal.
pub const EQUAL: &str = "equal rewards in the group";

/// Prefix of the reasons for samples whose rewards arrived too late for the policy.
pub(crate) const TOO_OLD: &str = "late: ";

/// Prefix of the reasons for rollouts that became too stale before they were finished.
pub const BEHIND: &str = "too old: ";

/// Prefix of the reasons for episodes whose rewards did not arrive in time.
pub(crate) const NOT_GIVEN: &str = "reward ";

/// Whether a step counts an episode with this reason although the episode is in none of its groups.
pub(crate) fn is_counted(why: &str) -> bool {
    [TOO_OLD, BEHIND, NOT_GIVEN]
        .iter()
        .any(|begin| why.starts_with(begin))
}

/// Returns the reason for a sample whose rewards arrived after the policy advanced too far.
pub(crate) fn came_late(behind: u64, allowed: u64) -> String {
    format!("{TOO_OLD}{behind} updates behind, allowed: {allowed} (reward.late.max_staleness)")
}

/// Prefix of the reasons of episodes with suspicious rewards.
pub const SUSPICIOUS: &str = "suspicious: ";

/// Number of samples with a common property, and the first cause.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SampleCount {
    pub count: usize,
    /// Reason of the first counted sample, with its id.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub first: Option<String>,
}

impl SampleCount {
    fn is_zero(&self) -> bool {
        self.count == 0
    }

    fn add(&mut self, episode: &EpisodeId, why: &str) {
        self.count += 1;
        let line = why.lines().next().unwrap_or_default();
        self.first
            .get_or_insert_with(|| format!("{episode}: {line:.200}"));
    }
}

/// Label of the samples without a score.
pub const UNSCORED: &str = "unscored";

/// Formats the share of `unscored` in the sum of `unscored` and `scored`, such as `25.0 %`; empty if there
/// are none.
pub(crate) fn share_text(unscored: usize, scored: usize) -> String {
    match unscored {
        0 => String::new(),
        count => format!("{:.1} %", 100.0 * count as f64 / (count + scored) as f64),
    }
}

/// Sample counts of a step. A sample may count in several numbers; samples that the system failed count in
/// none. A missing score never counts as 0.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SampleStatus {
    /// Samples with a score.
    pub scored: usize,
    /// Samples without a score; they count neither in the loss nor in a baseline.
    pub unscored: SampleCount,
    /// Samples in groups with equal rewards, which give no training signal.
    pub equal: SampleCount,
    /// Samples cut by a limit.
    pub truncated: SampleCount,
    /// Samples whose weights version is too far behind, because they or their rewards were too late.
    pub too_old: SampleCount,
    /// Samples that were left out because of a suspicion flag of the recipe.
    #[serde(default, skip_serializing_if = "SampleCount::is_zero")]
    pub suspicious: SampleCount,
    /// Number of groups that wait for rewards from outside.
    #[serde(default)]
    pub waiting: usize,
}

impl SampleStatus {
    /// Counts the samples of a step's groups. An episode without a row counts by its reason, even if it is in
    /// no group.
    pub fn of(groups: &[Vec<Trace>], rows: &Rows) -> Self {
        let dropped = &rows.dropped;
        let mut status = Self::default();
        for (episode, seen) in &rows.suspicious {
            status.suspicious.add(episode, &seen.to_string());
        }
        for trace in groups.iter().flatten() {
            if matches!(trace.end, EpisodeEnd::Failed { .. }) {
                continue;
            }
            let outcome = &trace.outcome;
            if outcome.unscored {
                let why = outcome.unscored_reason.as_deref();
                status
                    .unscored
                    .add(&trace.episode, why.unwrap_or("no reward was given"));
            } else {
                status.scored += 1;
            }
            if let EpisodeEnd::Truncated { limit } = &trace.end {
                let why = format!("limit {}", limit.name());
                status.truncated.add(&trace.episode, &why);
            }
            if dropped.get(&trace.episode).is_some_and(|why| why == EQUAL) {
                let reward = format!("all of group {} have {}", trace.group, trace.total_reward());
                status.equal.add(&trace.episode, &reward);
            }
        }
        status
    }

    /// Counts episodes that were left out before rows were made.
    pub fn left_out(&mut self, dropped: &BTreeMap<EpisodeId, String>) {
        for (episode, why) in dropped {
            if why.starts_with(TOO_OLD) || why.starts_with(BEHIND) {
                self.too_old.add(episode, why)
            } else {
                self.unscored.add(episode, why)
            }
        }
    }

    /// Adds a later step of the same run. First causes stay, and the number of waiting groups is replaced.
    pub fn add(&mut self, later: &Self) {
        self.scored += later.scored;
        for (sum, more) in [
            (&mut self.unscored, &later.unscored),
            (&mut self.equal, &later.equal),
            (&mut self.truncated, &later.truncated),
            (&mut self.too_old, &later.too_old),
            (&mut self.suspicious, &later.suspicious),
        ] {
            sum.count += more.count;
            sum.first = sum.first.take().or_else(|| more.first.clone());
        }
        self.waiting = later.waiting;
    }

    /// Returns the counts by name, in a fixed order, each with its first cause. The count of suspicious
    /// samples is only present if it is not 0, since most recipes do not look for them.
    pub fn numbers(&self) -> Vec<(&'static str, usize, Option<&str>)> {
        let of = |name, c| {
            let SampleCount { count, first }: &SampleCount = c;
            (name, *count, first.as_deref())
        };
        let mut numbers = vec![
            ("scored", self.scored, None),
            of(UNSCORED, &self.unscored),
            of("equal rewards", &self.equal),
            of("truncated", &self.truncated),
            of("too old", &self.too_old),
        ];
        numbers.extend((self.suspicious.count > 0).then(|| of("suspicious", &self.suspicious)));
        numbers
    }

    /// Formats the share of unscored samples among those that the system did not fail, such as `25.0 %`;
    /// empty if all are scored.
    pub fn unscored_share(&self) -> String {
        share_text(self.unscored.count, self.scored)
    }

    /// Formats one line, such as `scored 12, unscored 4 (25.0 %; e3: judge down), equal rewards 0, truncated
    /// 0, too old 0`, with the number of waiting groups if there are any.
    pub fn line(&self) -> String {
        let shown = |(name, count, first): (&str, usize, Option<&str>)| match first {
            Some(first) if name == UNSCORED => {
                format!("{name} {count} ({}; {first})", self.unscored_share())
            }
            Some(first) => format!("{name} {count} ({first})"),
            None => format!("{name} {count}"),
        };
        let numbers: Vec<String> = self.numbers().into_iter().map(shown).collect();
        let waiting = match self.waiting {
            0 => String::new(),
            groups => format!(", waiting {groups} groups"),
        };
        numbers.join(", ") + &waiting
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_names_the_first_cause_of_each_number() {
        let mut status = SampleStatus {
            scored: 3,
            ..SampleStatus::default()
        };
        let dropped = [
            ("e1", "late: 9 updates behind"),
            ("e2", "reward thumbs: not given\nmore"),
            ("e3", "reward thumbs: not given"),
        ];
        let dropped = dropped.map(|(e, why)| (EpisodeId::new(e), why.to_owned()));
        status.left_out(&dropped.into());
        assert_eq!(
            status.line(),
            "scored 3, unscored 2 (40.0 %; e2: reward thumbs: not given), equal rewards 0, truncated 0, \
             too old 1 (e1: late: 9 updates behind)"
        );
        status.waiting = 2;
        assert!(status.line().ends_with(", waiting 2 groups"));
    }
}
