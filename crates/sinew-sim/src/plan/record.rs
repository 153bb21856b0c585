//! Distributions of a recorded run: turns, lengths and latencies of its episodes, times of its steps.

use super::{HopTimes, Plan, PlanError};
use crate::dist::{Dist, Form};
use serde::Deserialize;
use sinew_rollout::{Hop, Hops};
use sinew_store::{Filter, StoreReader};
use sinew_types::{EpisodeEnd, TokenKind, Trace};
use std::path::{Path, PathBuf};

/// Episodes that are read, at most.
const MAX_EPISODES: usize = 5000;

/// A run's record of a step, one line each.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
pub(crate) struct Step {
    /// Seconds since the start of the run.
    pub(crate) wall_s: f64,
    /// Seconds from the first start of an episode to rows.
    #[serde(default)]
    pub(crate) rollout_s: f64,
    /// Seconds that the trainer computed.
    pub(crate) train_s: f64,
    pub(crate) publish_s: f64,
    #[serde(default)]
    pub(crate) checkpoint_s: f64,
    /// Tokens of the rows. A prefix that rows share counts for each, as in a plan.
    #[serde(default)]
    unshared_tokens: f64,
    #[serde(default)]
    pub(crate) waits: Waits,
    #[serde(default)]
    samples: Samples,
    /// Calls between owner and workers; none in a run of one process.
    #[serde(default)]
    hops: Hops,
}

/// Waiting times since the step before.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
pub(crate) struct Waits {
    /// Seconds in which the engine computed.
    #[serde(default)]
    pub(crate) engine_busy_s: f64,
    /// Seconds in which it waited for tools and for what runs them.
    #[serde(default)]
    pub(crate) engine_tools_s: f64,
}

/// Counts of the samples of a step.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
struct Samples {
    #[serde(default)]
    scored: f64,
    #[serde(default)]
    equal: Equal,
}

/// Samples of groups without a signal.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
struct Equal {
    #[serde(default)]
    count: f64,
}

/// Lengths and times of a recorded run.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RecordedRun {
    /// Values of each episode.
    pub turns: Vec<f64>,
    pub prompt_tokens: Vec<f64>,
    /// Values of each turn.
    pub turn_tokens: Vec<f64>,
    pub observation_tokens: Vec<f64>,
    /// Seconds in the environment, by turn on the mean of an episode.
    pub call_s: Vec<f64>,
    /// Seconds and tokens of each update, and seconds until new weights sampled.
    pub train_s: Vec<f64>,
    /// Tokens that were trained.
    pub train_tokens: Vec<f64>,
    pub publish_s: Vec<f64>,
    /// The steps in order.
    pub(crate) steps: Vec<Step>,
}

impl RecordedRun {
    /// Reads the store and the metrics of a run's folder. Failed episodes and those of measurements are left
    /// out.
    ///
    /// # Errors
    /// If there is no run, or it has no episode.
    pub fn read(run: &Path) -> Result<Self, PlanError> {
        let refused = |path: PathBuf, why: String| PlanError::Read { path, why };
        let folder = run.join("store");
        if !folder.exists() {
            let why = if run.join("store.id").is_file() {
                let run = run.display();
                format!(
                    "has its episodes in a database, and a plan reads only files: `sinew runs copy {run} \
                     {run}` copies them into the folder"
                )
            } else {
                "holds no stored run: allowed is the folder of `sinew train --run-dir`".into()
            };
            return Err(refused(run.into(), why));
        }
        let reader = StoreReader::open(&folder);
        let reader = reader.map_err(|e| refused(folder.clone(), e.to_string()))?;
        let mut recorded = Self::default();
        let mut filter = Filter {
            purpose: Some("train".into()),
            limit: 500,
            ..Filter::default()
        };
        while recorded.turns.len() < MAX_EPISODES {
            let page = reader.list(&filter);
            let page = page.map_err(|e| refused(folder.clone(), e.to_string()))?;
            for summary in &page.episodes {
                let trace = reader.get(&summary.episode);
                let trace = trace.map_err(|e| refused(folder.clone(), e.to_string()))?;
                trace.iter().for_each(|t| recorded.episode(t));
            }
            match page.next {
                Some(next) => filter.after = Some(next),
                None => break,
            }
        }
        if recorded.turns.is_empty() {
            return Err(refused(run.into(), "has no training episode".into()));
        }
        recorded.steps(&run.join("metrics.jsonl"));
        Ok(recorded)
    }

    /// Adds an episode.
    fn episode(&mut self, trace: &Trace) {
        if matches!(trace.end, EpisodeEnd::Failed { .. }) {
            return;
        }
        let of = |kind: TokenKind| {
            let nodes = trace.nodes.iter().filter(move |n| n.kind == kind);
            nodes.map(|n| n.tokens.len() as f64)
        };
        let turns = of(TokenKind::Sampled).count().max(1) as f64;
        self.turns.push(turns);
        self.prompt_tokens.push(of(TokenKind::Prompt).sum());
        self.turn_tokens.extend(of(TokenKind::Sampled));
        // Tokens that a template puts between two turns are computed and trained like those of a tool's
        // answer.
        let mut between = None;
        for node in &trace.nodes {
            let length = node.tokens.len() as f64;
            match node.kind {
                TokenKind::Sampled => {
                    self.observation_tokens.extend(between.replace(0.0));
                }
                TokenKind::Prompt => {}
                _ => between = between.map(|sum: f64| sum + length),
            }
        }
        self.call_s.push(trace.timing.tool_s / turns);
    }

    /// Steps that cannot be read are left out: the plan's values count then.
    fn steps(&mut self, path: &Path) {
        let text = std::fs::read_to_string(path).unwrap_or_default();
        for step in text
            .lines()
            .filter_map(|l| serde_json::from_str::<Step>(l).ok())
        {
            self.train_s.push(step.train_s);
            self.train_tokens.push(step.unshared_tokens);
            self.publish_s.push(step.publish_s);
            self.steps.push(step);
        }
    }

    /// Share of samples whose group had no signal.
    pub(crate) fn no_signal(&self) -> f64 {
        let scored: f64 = self.steps.iter().map(|s| s.samples.scored).sum();
        let equal: f64 = self.steps.iter().map(|s| s.samples.equal.count).sum();
        (equal / scored.max(1.0)).clamp(0.0, 1.0)
    }

    /// Mean times of the calls between owner and workers; `None` in a run of one process.
    pub(crate) fn hops(&self) -> Option<HopTimes> {
        let mut sum = Hops::default();
        self.steps.iter().for_each(|step| sum.add(&step.hops));
        let mean = |hop: &Hop| hop.mean_s().unwrap_or(0.0);
        (!sum.is_empty()).then(|| HopTimes {
            put_s: mean(&sum.put),
            lease_s: mean(&sum.lease),
            ack_s: mean(&sum.ack),
            take_s: sum.take.total_s / sum.take.items.max(1) as f64,
            weights_s: mean(&sum.weights),
        })
    }

    /// Puts the recorded values into a plan, except those that its text sets itself.
    pub(crate) fn fill(&self, plan: &mut Plan, text: &str) -> Result<(), PlanError> {
        let typed: toml::Table = text.parse().unwrap_or_default();
        let said = |section: &str, key: &str| {
            let section = typed.get(section).and_then(toml::Value::as_table);
            section.is_some_and(|s| s.contains_key(key))
        };
        let fill = |to: &mut Dist, section: &str, key: &str, values: &[f64]| {
            if !said(section, key) && !values.is_empty() {
                *to = empirical(values);
            }
        };
        let e = &mut plan.episode;
        fill(&mut e.turns, "episode", "turns", &self.turns);
        fill(
            &mut e.prompt_tokens,
            "episode",
            "prompt_tokens",
            &self.prompt_tokens,
        );
        fill(
            &mut e.turn_tokens,
            "episode",
            "turn_tokens",
            &self.turn_tokens,
        );
        fill(
            &mut e.observation_tokens,
            "episode",
            "observation_tokens",
            &self.observation_tokens,
        );
        fill(&mut plan.tools.call_s, "tools", "call_s", &self.call_s);
        let (fixed_s, per_token_s) = line(&self.train_tokens, &self.train_s);
        if !self.train_s.is_empty()
            && !said("trainer", "fixed_s")
            && !said("trainer", "tokens_per_s")
        {
            plan.trainer.fixed_s = fixed_s;
            plan.trainer.tokens_per_s = 1.0 / per_token_s.max(1e-9);
        }
        if !self.publish_s.is_empty()
            && !said("weights", "load_s")
            && !said("weights", "transfer_s")
        {
            plan.weights.transfer_s = 0.0;
            plan.weights.load_s = self.publish_s.iter().sum::<f64>() / self.publish_s.len() as f64;
        }
        if let Some(hops) = self.hops().filter(|_| !typed.contains_key("hops")) {
            plan.hops = hops;
        }
        Ok(())
    }
}

/// The values as a distribution, sorted so that quantiles are what they should be.
fn empirical(values: &[f64]) -> Dist {
    let mut values = values.to_vec();
    values.sort_by(f64::total_cmp);
    if values.first() == values.last() {
        return values.first().copied().unwrap_or(0.0).into();
    }
    let step = values.len().div_ceil(2000);
    Dist::Of(Form::Values(values.into_iter().step_by(step).collect()))
}

/// Fits a line through points by least squares, with a slope and a value at 0 of at least 0. Returns the
/// value at 0 and the slope.
pub(crate) fn line(x: &[f64], y: &[f64]) -> (f64, f64) {
    let n = x.len().max(1) as f64;
    let (mx, my) = (x.iter().sum::<f64>() / n, y.iter().sum::<f64>() / n);
    let points = || x.iter().zip(y);
    let over: f64 = points().map(|(x, y)| (x - mx) * (y - my)).sum();
    let under: f64 = x.iter().map(|x| (x - mx).powi(2)).sum();
    let slope = if under > 0.0 {
        (over / under).max(0.0)
    } else {
        0.0
    };
    let slope = if mx > 0.0 { slope.min(my / mx) } else { slope };
    (my - slope * mx, slope)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_and_quantiles_are_found_again() {
        let x: Vec<f64> = (0..20).map(f64::from).collect();
        let y: Vec<f64> = x.iter().map(|x| 3.0 + 0.5 * x).collect();
        let (fixed, slope) = line(&x, &y);
        assert!((fixed - 3.0).abs() < 1e-9 && (slope - 0.5).abs() < 1e-9);
        assert_eq!(empirical(&[2.0, 2.0]), Dist::Fixed(2.0));
        assert!((empirical(&y).mean() - y.iter().sum::<f64>() / 20.0).abs() < 0.05);
        assert!(RecordedRun::read(Path::new("/nonexistent")).is_err());
    }
}
