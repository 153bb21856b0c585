//! Scores that arrive after an episode: their records, their order, and the outcome computed from them.
//!
//! A record holds one source's score for one component of one episode's reward at one time. Records are only
//! added. For each (episode, name, source), the record with the newest time is in force; records with equal
//! times are ordered by their content. The result therefore does not depend on the order of arrival, and a
//! repeated record has no effect.

use serde::{Deserialize, Serialize};
use sinew_types::{EpisodeId, MAX_REWARD, Outcome, Trace, is_reward};
use std::cmp::Ordering;
use std::collections::{BTreeMap, HashMap};

/// Maximum number of records of one episode.
pub const MAX_SCORES: usize = 1_000;
/// Maximum number of records in one call.
pub const MAX_SCORE_BATCH: usize = 100_000;
/// Maximum bytes of a name, and of a source.
pub const MAX_SCORE_NAME: usize = 128;
/// Maximum bytes of a reason.
pub const MAX_SCORE_REASON: usize = 1_024;

/// Score of one component, from one source.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Score {
    /// A finite number.
    Value(f64),
    /// The score is missing, with the reason in one line. A missing score is not 0.
    Unscored(String),
}

/// A score of one component of an episode's reward.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ScoreRecord {
    /// The episode that is scored.
    pub episode: EpisodeId,
    /// Component of the reward, such as `thumbs`.
    pub name: String,
    /// Origin of the score, such as `import`, `api` or `rescore:exact`.
    pub source: String,
    /// Time of the score in microseconds since 1970; the newest is in force.
    pub at_us: u64,
    /// The value, or the reason why there is none.
    pub score: Score,
}

/// Reason why a store refuses a score. Other scores of the same call are not affected.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ScoreRefused {
    /// The episode is unknown. The score is not kept, since it would wait forever if the id is mistyped.
    /// Clients receive ids when a rollout is opened, and the trace is committed before its end is reported.
    #[error(
        "episode {episode} is not in the store; give the id of a finished episode (see `sinew episodes`)"
    )]
    UnknownEpisode { episode: EpisodeId },
    /// The trace was removed, so that the score has no use.
    #[error("episode {episode} was removed by `sinew gc`; its scores are not kept")]
    Collected { episode: EpisodeId },
    /// The episode has [`MAX_SCORES`] records.
    #[error("episode {episode} has {MAX_SCORES} scores, the maximum")]
    TooMany { episode: EpisodeId },
    /// A field of the record is outside its range.
    #[error("{field} is {value}, allowed: {allowed}")]
    Field {
        field: &'static str,
        value: String,
        allowed: &'static str,
    },
}

impl ScoreRecord {
    /// Order of records of one (episode, name, source): by time. At equal times, a score comes after a
    /// missing one, and otherwise the content decides, so that the order does not depend on arrival.
    pub fn order(&self, other: &Self) -> Ordering {
        let by_score = || match (&self.score, &other.score) {
            (Score::Value(a), Score::Value(b)) => a.total_cmp(b),
            (Score::Value(_), Score::Unscored(_)) => Ordering::Greater,
            (Score::Unscored(_), Score::Value(_)) => Ordering::Less,
            (Score::Unscored(a), Score::Unscored(b)) => a.cmp(b),
        };
        self.at_us.cmp(&other.at_us).then_with(by_score)
    }

    /// Returns the record in its stored form (-0 becomes 0), or refuses it if it exceeds the limits.
    ///
    /// # Errors
    /// [`ScoreRefused::Field`].
    pub(crate) fn checked(&self) -> Result<Self, ScoreRefused> {
        let refused = |field, value: String, allowed| ScoreRefused::Field {
            field,
            value,
            allowed,
        };
        for (field, text) in [("name", &self.name), ("source", &self.source)] {
            let plain = !text.is_empty() && text.len() <= MAX_SCORE_NAME;
            if !plain || text.chars().any(char::is_control) {
                let allowed = "1 to 128 bytes without control characters";
                return Err(refused(field, quoted(text), allowed));
            }
        }
        if i64::try_from(self.at_us).is_err() {
            let allowed = "microseconds since 1970, up to 2^63 - 1";
            return Err(refused("at", self.at_us.to_string(), allowed));
        }
        let score = match &self.score {
            Score::Value(value) if !is_reward(*value) => {
                let allowed = "a finite number of magnitude up to 1e30, or null with a reason";
                return Err(refused("value", value.to_string(), allowed));
            }
            Score::Value(value) => Score::Value(value + 0.0),
            Score::Unscored(reason) if reason.len() > MAX_SCORE_REASON => {
                return Err(refused("reason", quoted(reason), "up to 1,024 bytes"));
            }
            Score::Unscored(reason) => Score::Unscored(reason.clone()),
        };
        Ok(Self {
            score,
            ..self.clone()
        })
    }
}

/// Returns the start of a refused text, for a message.
fn quoted(text: &str) -> String {
    format!("{:?}", text.chars().take(40).collect::<String>())
}

/// Returns the records in force among those of one episode: the newest of each (name, source).
///
/// Keys are (name, source). The order of `records` does not matter.
pub fn in_force(records: &[ScoreRecord]) -> BTreeMap<(&str, &str), &ScoreRecord> {
    let mut newest: BTreeMap<(&str, &str), &ScoreRecord> = BTreeMap::new();
    for record in records {
        let place = newest.entry((&record.name, &record.source));
        let known = place.or_insert(record);
        if record.order(known) == Ordering::Greater {
            *known = record;
        }
    }
    newest
}

/// A component of the reward that is scored from outside.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ScoreTerm {
    /// Name of the component, see [`ScoreRecord::name`].
    pub name: String,
    /// Weight in the sum. With weight 0 it is only a measurement, and may be missing.
    pub weight: f64,
    /// Source whose scores count; `None`: the newest score of any source.
    pub source: Option<String>,
}

/// Rule that computes the outcome of an episode from its trace and its scores.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ScoreRule {
    /// Weight of the trace's own reward, which is then required; `None`: only the scores count.
    pub own: Option<f64>,
    /// Components of the sum. If empty, only the weighted own reward counts.
    pub terms: Vec<ScoreTerm>,
}

impl ScoreRule {
    /// Computes the outcome of an episode: the weighted sum of its own reward and the scores in force. If a
    /// weighted component is missing, the episode is unscored, with the component's name and reason; a
    /// missing score is never 0. Each score also becomes the metric `reward/NAME`. If there is no own reward,
    /// a positive sum counts as success.
    pub fn outcome(&self, trace: &Trace, records: &[ScoreRecord]) -> Outcome {
        let mut outcome = trace.outcome.clone();
        let mut missing = None;
        let mut sum = 0.0;
        match self.own {
            Some(weight) if !outcome.unscored => sum += weight * outcome.reward,
            Some(_) => missing = outcome.unscored_reason.take().or(Some(NO_REWARD.into())),
            None => {}
        }
        for term in &self.terms {
            match self.score(term, records) {
                Some(Score::Value(value)) => {
                    sum += term.weight * value;
                    let metric = format!("reward/{}", term.name);
                    outcome.metrics.insert(metric, *value);
                }
                _ if term.weight == 0.0 => {}
                Some(Score::Unscored(reason)) => {
                    missing = missing.or_else(|| Some(format!("reward {}: {reason}", term.name)));
                }
                None => {
                    missing = missing.or_else(|| Some(format!("reward {}: not given", term.name)));
                }
            }
        }
        if !is_reward(sum) {
            let why =
                || format!("the sum of the rewards is {sum:e}, allowed: up to {MAX_REWARD:e}");
            missing = missing.or_else(|| Some(why()));
        }
        outcome.unscored = missing.is_some();
        outcome.unscored_reason = missing;
        outcome.reward = if outcome.unscored { 0.0 } else { sum };
        outcome.success = match self.own {
            _ if outcome.unscored => false,
            Some(_) => outcome.success,
            None => sum > 0.0,
        };
        outcome
    }

    /// Returns the weighted components without any record, which are still awaited. A record of a missing
    /// score is not awaited.
    pub fn awaited<'a>(&'a self, records: &[ScoreRecord]) -> Vec<&'a str> {
        let terms = self.terms.iter().filter(|t| t.weight != 0.0);
        let open = terms.filter(|t| self.score(t, records).is_none());
        open.map(|t| t.name.as_str()).collect()
    }

    /// Returns the score in force of a component: that of its source, or the newest of all.
    fn score<'a>(&self, term: &ScoreTerm, records: &'a [ScoreRecord]) -> Option<&'a Score> {
        let of_term = |r: &&ScoreRecord| {
            r.name == term.name && term.source.as_ref().is_none_or(|s| *s == r.source)
        };
        let newest = records.iter().filter(of_term).max_by(|a, b| {
            // Two sources at one time: the content decides first, then the name of the source.
            a.order(b).then_with(|| a.source.cmp(&b.source))
        });
        newest.map(|r| &r.score)
    }
}

/// Reason for an episode whose own reward is missing without a reason.
const NO_REWARD: &str = "no reward was given";

/// New records of one call, to detect repeated records and to keep the limit per episode.
#[derive(Debug, Default)]
pub(crate) struct ScoreBatch {
    /// Names, sources, times and scores, by episode.
    new: HashMap<EpisodeId, Vec<ScoreRecord>>,
}

impl ScoreBatch {
    /// Number of new records of an episode.
    pub(crate) fn of(&self, episode: &EpisodeId) -> usize {
        self.new.get(episode).map_or(0, Vec::len)
    }

    /// Whether the call already contained the record.
    pub(crate) fn holds(&self, record: &ScoreRecord) -> bool {
        let known = self.new.get(&record.episode);
        known.is_some_and(|known| known.contains(record))
    }

    /// Adds a record.
    pub(crate) fn add(&mut self, record: &ScoreRecord) {
        let known = self.new.entry(record.episode.clone()).or_default();
        known.push(record.clone());
    }
}
