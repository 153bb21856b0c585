//! The verdict on a run. Terminal, list of runs, dashboard, alerts and exit code all show this one.
//!
//! The code is pure: a [`VerdictInput`] reads the records of steps and held-out measurements of one run, in
//! their order, and returns the [`Verdict`]. The input keeps sums and a few windows, so that its size does
//! not grow with the run.
//!
//! | verdict | condition, the first that holds |
//! |---|---|
//! | `dead` | the process was killed or failed, and none of the next two holds |
//! | `collapsed` | success fell far from its best (see below) |
//! | `failing` | the system failed a quarter or more of the episodes: of the last 4 steps, of the last measurement, or of all |
//! | `stalled` | the last 20 steps trained nothing; a run that ended trained no token; or 20 or more steps, nine tenths of whose scored episodes are in groups of equal reward, gained nothing |
//! | `solved` | every scored episode of the last measurement succeeded; before trained weights are measured, also every one of the last 4 steps |
//! | `learning` | success is above that at the start, by an interval of 95 % |
//! | `starting` | no step is done |
//! | `healthy` | all else: it trains, and nothing is measured yet that is beyond chance |
//!
//! Success has collapsed if the confidence intervals of the best and the present success do not overlap, and
//! the present success is at most half (held-out) or a quarter (in training, where tasks may become harder)
//! of the best. Held-out success counts more: a run whose last measurement is newer and did not fall has not
//! collapsed. A run without any success is judged by its reward: it has collapsed if the mean fell by more
//! than two standard deviations of the episodes.

use crate::record::{EpisodeStats, EvalRecord, StepRecord};
use crate::status::EQUAL;
use serde::{Deserialize, Serialize};
use sinew_algo::EpisodeSums;
use std::collections::{BTreeMap, VecDeque};

/// Number of steps that are judged together, since one step has too few tasks.
pub(crate) const WINDOW: usize = 4;
/// Number of steps without training after which a run is stalled.
pub(crate) const IDLE_END: u32 = 20;
/// Share of system-failed episodes from which a run is failing.
pub const FAILING: f64 = 0.25;
/// Share of scored episodes in groups of equal reward from which a run without progress is stalled.
const EQUAL_STALLS: f64 = 0.9;
/// Share of episodes from which an obstacle is named as the one that keeps a run from learning.
const NAMED: f64 = 0.5;
/// Shares of the best success at or below which a run has collapsed.
const HELD_OUT_FALL: f64 = 0.5;
const TRAINING_FALL: f64 = 0.25;

/// State of a run's process, read from the folder of the run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Process {
    /// The process runs and holds the lock of the folder.
    Running,
    /// The process finished its work.
    Ended,
    /// The process was asked to stop, for example by a signal.
    Interrupted,
    /// The process ended with an error.
    Failed,
    /// The process ended without recording an end, for example because it was killed.
    Killed,
}

impl Process {
    /// Name in `end.json` and in lists of runs.
    pub fn name(self) -> &'static str {
        match self {
            Self::Running => "running",
            Self::Ended => "ended",
            Self::Interrupted => "interrupted",
            Self::Failed => "failed",
            Self::Killed => "killed",
        }
    }

    /// Finds a state by its name.
    pub fn parse(name: &str) -> Option<Self> {
        let all = [
            Self::Running,
            Self::Ended,
            Self::Interrupted,
            Self::Failed,
            Self::Killed,
        ];
        all.into_iter().find(|p| p.name() == name)
    }
}

/// The word of a verdict; the table of this module lists the conditions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Judgement {
    Starting,
    Healthy,
    Learning,
    Solved,
    Stalled,
    Collapsed,
    Failing,
    Dead,
}

impl Judgement {
    /// Name in reports and files.
    pub fn name(self) -> &'static str {
        match self {
            Self::Starting => "starting",
            Self::Healthy => "healthy",
            Self::Learning => "learning",
            Self::Solved => "solved",
            Self::Stalled => "stalled",
            Self::Collapsed => "collapsed",
            Self::Failing => "failing",
            Self::Dead => "dead",
        }
    }

    /// Whether the verdict means that the run did not do its work. It is then not shown in green, and its
    /// command does not end with exit code 0.
    pub fn is_bad(self) -> bool {
        matches!(
            self,
            Self::Stalled | Self::Collapsed | Self::Failing | Self::Dead
        )
    }
}

/// The verdict on a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Verdict {
    /// Verdict in one word.
    pub verdict: Judgement,
    /// Reason in one sentence, with numbers.
    pub why: String,
    /// The recipe key to change, and its change; `None` if there is nothing to change.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub change: Option<String>,
}

impl Verdict {
    /// Judges a run by its records and the state of its process. `end` is the reason that the run recorded
    /// for its end.
    pub fn of(
        steps: &[StepRecord],
        evals: &[EvalRecord],
        process: Process,
        end: Option<&str>,
    ) -> Self {
        VerdictInput::of(steps, evals).verdict(process, end)
    }

    /// Reason why the run did not do its work, with a hint on a separate line; `None` if it did.
    pub fn trouble(&self) -> Option<String> {
        let change = self.change.as_ref();
        let hint = change.map_or_else(String::new, |c| format!("\n  hint: {c}"));
        let bad = self.verdict.is_bad();
        bad.then(|| format!("{}: {}{hint}", self.verdict.name(), self.why))
    }

    /// Formats one line: the word, its reason, and the key to change.
    pub fn line(&self) -> String {
        let change = self.change.as_ref();
        let change = change.map_or_else(String::new, |c| format!("; {c}"));
        format!("{}: {}{change}", self.verdict.name(), self.why)
    }
}

/// Converts a record into sums.
fn sums(stats: &EpisodeStats) -> EpisodeSums {
    let n = stats.scored() as f64;
    let std = stats.reward_spread.map_or(0.0, |s| s.std);
    EpisodeSums {
        n,
        successes: stats.successes(),
        reward: n * stats.reward,
        squares: n * (std * std + stats.reward * stats.reward),
        episodes: stats.episodes,
        failed: stats.failed,
    }
}

fn is_failing(sums: &EpisodeSums) -> bool {
    sums.episodes > 0 && sums.failed as f64 >= FAILING * sums.episodes as f64
}

/// Describes the change from one sum to another in words.
fn way(what: &str, from: &EpisodeSums, to: &EpisodeSums) -> String {
    let by_success = from.successes + to.successes > 0.0;
    let measure = if by_success { "success" } else { "reward" };
    format!(
        "{what} {measure} {} -> {}",
        from.told(by_success),
        to.told(by_success)
    )
}

/// Returns the sums with the better success, or the better mean reward at equal success. Sums without scored
/// episodes are ignored.
fn better(best: Option<EpisodeSums>, other: EpisodeSums) -> Option<EpisodeSums> {
    let key = |p: &EpisodeSums| (p.share(), p.mean());
    match best {
        Some(best) if other.n == 0.0 || key(&best) >= key(&other) => Some(best),
        _ if other.n == 0.0 => best,
        _ => Some(other),
    }
}

/// The data of a run that its verdict is computed from.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct VerdictInput {
    steps: u64,
    /// Number of steps in a row that trained nothing.
    idle: u32,
    /// Reason why the last of these steps trained nothing.
    why_idle: String,
    trained: bool,
    /// Sums of all training episodes.
    all: EpisodeSums,
    recent: VecDeque<EpisodeSums>,
    first: Vec<EpisodeSums>,
    /// The best of the windows that ended before the newest window begins.
    best: Option<EpisodeSums>,
    /// The steps just before the newest window, at most as many as a window has. Their sum is compared with
    /// `best` after each step.
    before: VecDeque<EpisodeSums>,
    /// Held-out measurements: the first, the best and the last, and the step of the last.
    held_out: Option<(EpisodeSums, EpisodeSums, EpisodeSums, u64)>,
    truncated: usize,
    truncated_by: BTreeMap<String, usize>,
    longest_turn: usize,
    unscored: usize,
    unscored_why: Option<String>,
    failed_why: Option<String>,
    equal: usize,
    dropped: BTreeMap<String, usize>,
}

impl VerdictInput {
    /// Builds the input from the records of a run.
    pub fn of(steps: &[StepRecord], evals: &[EvalRecord]) -> Self {
        let mut course = Self::default();
        steps.iter().for_each(|r| course.step(r));
        evals.iter().for_each(|r| course.measured(r));
        course
    }

    /// Adds the record of the next step.
    pub fn step(&mut self, r: &StepRecord) {
        self.steps += 1;
        self.trained |= moved(r);
        let pool = sums(&r.rollout);
        if moved(r) || pool.is_solved() {
            self.idle = 0
        } else {
            self.idle = self.idle.saturating_add(1);
            self.why_idle = why_idle(r);
        }
        self.all = EpisodeSums::sum([&self.all, &pool]);
        if self.first.len() < WINDOW {
            self.first.push(pool);
        }
        self.recent.push_back(pool);
        if self.recent.len() > WINDOW {
            self.before.extend(self.recent.pop_front());
            if self.before.len() > WINDOW {
                self.before.pop_front();
            }
            self.best = better(self.best, EpisodeSums::sum(&self.before));
        }
        self.count(r);
    }

    /// Counts the obstacles that keep episodes from giving a training signal.
    fn count(&mut self, r: &StepRecord) {
        let stats = &r.rollout;
        self.truncated += stats.truncated;
        for (limit, n) in &stats.truncated_by {
            *self.truncated_by.entry(limit.clone()).or_default() += n;
        }
        self.longest_turn = self.longest_turn.max(stats.longest_turn);
        self.unscored += stats.unscored;
        self.equal += r.samples.equal.count;
        for (why, first) in [
            (&mut self.unscored_why, &r.samples.unscored.first),
            (&mut self.failed_why, &r.failed_cause),
        ] {
            if why.is_none() {
                why.clone_from(first);
            }
        }
        for (why, n) in &r.dropped {
            *self.dropped.entry(why.clone()).or_default() += n;
        }
    }

    /// Adds the record of the next measurement.
    pub fn measured(&mut self, r: &EvalRecord) {
        let now = sums(&r.stats);
        self.held_out = Some(match self.held_out {
            None => (now, now, now, r.step),
            Some((first, best, last, _)) => {
                let best = better(Some(best), last).unwrap_or(best);
                (first, best, now, r.step)
            }
        });
    }

    /// Number of training episodes that the system failed, and number of all.
    pub fn failures(&self) -> (usize, usize) {
        (self.all.failed, self.all.episodes)
    }

    /// Returns the verdict for the state of the run's process. `end` is the reason that the run recorded for
    /// its end.
    pub fn verdict(&self, process: Process, end: Option<&str>) -> Verdict {
        let dead = matches!(process, Process::Failed | Process::Killed);
        let (verdict, why) = if let Some(why) = self.collapse() {
            (Judgement::Collapsed, why)
        } else if let Some(why) = self.failing() {
            (Judgement::Failing, why)
        } else if dead {
            (Judgement::Dead, self.death(process, end))
        } else if let Some(why) = self.stalled(process) {
            (Judgement::Stalled, why)
        } else if let Some(why) = self.solved() {
            (Judgement::Solved, why)
        } else if let Some(why) = self.gain() {
            (Judgement::Learning, why)
        } else if self.steps == 0 && self.held_out.is_none() {
            (Judgement::Starting, "no step is done".into())
        } else {
            (Judgement::Healthy, self.no_gain())
        };
        Verdict {
            verdict,
            why,
            change: self.change(verdict),
        }
    }

    fn window(&self) -> EpisodeSums {
        EpisodeSums::sum(&self.recent)
    }

    /// Whether the last held-out measurement used weights of the newest window.
    fn held_out_is_new(&self) -> bool {
        let oldest = self.steps.saturating_sub(self.recent.len() as u64);
        self.held_out.is_some_and(|(.., step)| step > oldest)
    }

    /// Describes the collapse of success, if there was one.
    fn collapse(&self) -> Option<String> {
        if let Some((_, best, last, _)) = &self.held_out {
            if best.fell(last, HELD_OUT_FALL) {
                return Some(format!("{} since its best", way("held-out", best, last)));
            }
            if self.held_out_is_new() && last.successes > 0.0 {
                return None;
            }
        }
        let (best, now) = (self.best?, self.window());
        best.fell(&now, TRAINING_FALL).then(|| {
            format!(
                "{} in the last {} steps, since its best",
                way("training", &best, &now),
                self.recent.len()
            )
        })
    }

    /// Describes the episodes that the system failed, if they are too many.
    fn failing(&self) -> Option<String> {
        let now = self.window();
        let last = self.held_out.map(|(_, _, last, _)| last);
        let told = |p: &EpisodeSums, of: &str| {
            let cause = self.failed_why.as_deref();
            let cause = cause.map_or_else(String::new, |c| format!(": {c}"));
            format!(
                "the system failed {} of {} {of}{cause}",
                p.failed, p.episodes
            )
        };
        if is_failing(&self.all) {
            return Some(told(&self.all, "training episodes"));
        }
        if is_failing(&now) {
            let of = format!("episodes of the last {} steps", self.recent.len());
            return Some(told(&now, &of));
        }
        last.filter(is_failing).map(|p| {
            format!(
                "the system failed {} of {} held-out episodes",
                p.failed, p.episodes
            )
        })
    }

    /// Returns the reason why nothing is trained, if that is the case.
    fn stalled(&self, process: Process) -> Option<String> {
        let idle = &self.why_idle;
        if process == Process::Ended && self.steps > 0 && !self.trained && self.solved().is_none() {
            return Some(format!("the run trained no token: {idle}"));
        }
        if self.idle >= IDLE_END {
            return Some(format!(
                "the last {} steps trained nothing: {idle}",
                self.idle
            ));
        }
        let equal = self.equal as f64 >= EQUAL_STALLS * self.all.n && self.all.n > 0.0;
        let long = self.steps >= u64::from(IDLE_END);
        (equal && long && self.gain().is_none() && self.solved().is_none()).then(|| self.no_gain())
    }

    /// Describes that a run is solved: success in all held-out episodes. Training episodes count only until
    /// trained weights are measured.
    fn solved(&self) -> Option<String> {
        if let Some((_, _, last, step)) = self.held_out
            && (last.is_solved() || step > 0)
        {
            let success = || format!("held-out success {}", last.told(true));
            return last.is_solved().then(success);
        }
        let now = self.window();
        now.is_solved()
            .then(|| format!("training success {}", now.told(true)))
    }

    /// Describes the progress of a run, if it is statistically significant; on held-out tasks if there are
    /// two measurements.
    fn gain(&self) -> Option<String> {
        if let Some((first, _, last, step)) = &self.held_out
            && *step > 0
        {
            return first.gained(last).then(|| way("held-out", first, last));
        }
        let (first, now) = self.ends()?;
        first.gained(&now).then(|| way("training", &first, &now))
    }

    /// Returns the sums of the first and of the last steps, if they do not overlap.
    fn ends(&self) -> Option<(EpisodeSums, EpisodeSums)> {
        let apart = self.steps >= 2 * WINDOW as u64;
        apart.then(|| (EpisodeSums::sum(&self.first), self.window()))
    }

    /// Names the obstacle of a run without progress, as far as it is known.
    fn no_gain(&self) -> String {
        let seen = match (&self.held_out, self.ends()) {
            (Some((first, _, last, step)), _) if *step > 0 => Some(way("held-out", first, last)),
            (Some((_, _, last, _)), None) if self.steps == 0 => {
                return format!("held-out success {}", last.told(true));
            }
            (_, Some((first, now))) => Some(way("training", &first, &now)),
            _ => None,
        };
        let Some(seen) = seen else {
            let now = self.window();
            return format!("training success {}", now.told(true));
        };
        match self.obstacle() {
            Some((what, _)) => format!("{seen} is no gain beyond chance: {what}"),
            None => format!("{seen} is no gain beyond chance"),
        }
    }

    fn death(&self, process: Process, end: Option<&str>) -> String {
        let how = match process {
            Process::Failed => "the process failed",
            _ => "the process was killed",
        };
        let first = end.and_then(|why| why.lines().next());
        match first.filter(|_| process == Process::Failed) {
            Some(why) => format!("{how} after step {}: {why}", self.steps),
            None => format!("{how} after step {}", self.steps),
        }
    }

    /// Returns the recipe key that helps.
    fn change(&self, verdict: Judgement) -> Option<String> {
        match verdict {
            Judgement::Collapsed => Some(
                "lower train.learning_rate, or hold the policy near its start with algorithm.kl; \
                 the weights of the best step are in its checkpoint, if it was kept (train.keep_checkpoints)"
                    .into(),
            ),
            Judgement::Stalled | Judgement::Healthy => self.obstacle().map(|(_, change)| change),
            _ => None,
        }
    }

    /// Returns the reason why most episodes gave no training signal, and the key to change.
    fn obstacle(&self) -> Option<(String, String)> {
        let ended = self.all.episodes - self.all.failed;
        let share = |count: usize, of: usize| count as f64 / of.max(1) as f64;
        if share(self.unscored, ended) >= NAMED {
            let why = self.unscored_why.as_deref();
            let why = why.map_or_else(String::new, |why| format!(" ({why})"));
            return Some((
                format!("{} of {ended} episodes have no score{why}", self.unscored),
                "put [reward] right".into(),
            ));
        }
        if share(self.truncated, ended) >= NAMED {
            return Some(self.cut(ended));
        }
        let scored = self.all.n as usize;
        if share(self.equal, scored) >= NAMED {
            let success = self.all.share();
            let change = match success {
                s if s < 0.1 => {
                    "the tasks are too hard for the model: use easier ones, a larger rollout.group_size, or a \
                     reward that gives a part for a part"
                }
                s if s > 0.9 => "the tasks are too easy for the model: use harder ones",
                _ => {
                    "use tasks of middling difficulty (tasks.sampling = \"adaptive\"), a larger rollout.group_size, or a higher \
                     rollout.temperature"
                }
            };
            return Some((
                format!(
                    "{} of {scored} episodes are in groups of equal reward, which teach nothing",
                    self.equal
                ),
                change.into(),
            ));
        }
        let (why, n) = self.dropped.iter().max_by_key(|(_, n)| **n)?;
        (share(*n, self.all.episodes) >= NAMED && why != EQUAL).then(|| {
            let what = format!("{n} of {} episodes were left out: {why}", self.all.episodes);
            (what, "see docs/metrics.md for `dropped`".into())
        })
    }

    /// Describes the episodes that a limit cut, by the most frequent limit.
    fn cut(&self, ended: usize) -> (String, String) {
        let most = self.truncated_by.iter().max_by_key(|(_, n)| **n);
        let (limit, n) = most.map_or(("", self.truncated), |(l, n)| (l.as_str(), *n));
        let (how, key) = match limit {
            "turn_tokens" => (
                format!("cut at {} tokens", self.longest_turn),
                "rollout.max_turn_tokens",
            ),
            "turns" => ("cut at the limit of turns".into(), "rollout.max_turns"),
            "context" => (
                "cut at the end of the context".into(),
                "rollout.max_context_tokens",
            ),
            _ => ("cut by time".into(), "rollout.episode_timeout_s"),
        };
        (format!("{n} of {ended} {how}"), format!("raise {key}"))
    }
}

/// Whether a step changed the weights.
pub(crate) fn moved(r: &StepRecord) -> bool {
    r.trained_tokens > 0 && r.updates_applied > 0 && r.grad_norm > 0.0
}

/// Returns the reason why a step trained nothing.
pub(crate) fn why_idle(r: &StepRecord) -> String {
    if r.rows == 0 || r.trained_tokens == 0 {
        let most = r.dropped.iter().max_by_key(|(_, episodes)| **episodes);
        return match most {
            Some((reason, episodes)) => {
                format!("{episodes} of {} episodes: {reason}", r.rollout.episodes)
            }
            None => "there were no tokens to train on".into(),
        };
    }
    if r.updates_applied == 0 {
        return "the gradient is not finite".into();
    }
    "the gradient is 0: the loss leaves out every token (a correction or a clip that no ratio passes), or both sides of each comparison are equal".into()
}

#[cfg(test)]
mod tests;
