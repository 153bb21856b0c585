//! Alerts when a run needs a person: a table of rules over its reports. Pure, with time as an argument.
//!
//! A rule fires when its condition begins to hold, and is silent while it continues to hold, for at least
//! `every_s` after its last alert. All rules together fire at most `max_per_hour` times an hour; alerts that
//! are held back are counted.
//!
//! | rule | condition |
//! |---|---|
//! | `stopped` | the run ended before its time, or without doing what it was to do; always said |
//! | `collapse` | the verdict on the run is `collapsed`; or, of a task that is not solved, entropy low or nearly all groups of equal reward for three steps |
//! | `reward_jump` | the reward of a step is far from that of the ten before |
//! | `failures` | the system failed many episodes of a step |
//! | `staleness` | a trained row was too many updates behind |
//! | `hang` | an episode stays in one phase, or the run says nothing |
//! | `disk` | little free space |
//! | `memory` | little free memory |

use crate::config::AlertsConfig;
use sinew_orchestrator::{EvalRecord, Judgement, Process, StepRecord, VerdictInput};
use sinew_rollout::LiveEpisode;
use sinew_types::EpisodeId;
use std::collections::{BTreeMap, VecDeque};

/// Steps for which a collapse must hold.
const COLLAPSE_STEPS: usize = 3;
/// Success from which equal groups and a sure policy are those of a solved task.
const SOLVED: f64 = 0.9;
/// Steps that a reward is compared with, and the fewest.
const BEFORE: usize = 10;
const LEAST_BEFORE: usize = 5;
/// Deviation below which a jump is not one: rewards of few episodes are steps of a staircase.
const LEAST_DEVIATION: f64 = 0.02;
const GIB: f64 = (1u64 << 30) as f64;
const HOUR_S: f64 = 3600.0;

/// Rule of an alert.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Rule {
    /// The run makes no progress.
    Stopped,
    /// The policy collapses.
    Collapse,
    /// The reward jumps.
    RewardJump,
    /// Many episodes fail.
    Failures,
    /// Rows are too old.
    Staleness,
    /// There is no progress.
    Hang,
    /// The disk is nearly full.
    Disk,
    /// Memory is nearly full.
    Memory,
}

impl Rule {
    /// Name in messages.
    pub fn name(self) -> &'static str {
        match self {
            Self::Stopped => "stopped",
            Self::Collapse => "collapse",
            Self::RewardJump => "reward_jump",
            Self::Failures => "failures",
            Self::Staleness => "staleness",
            Self::Hang => "hang",
            Self::Disk => "disk",
            Self::Memory => "memory",
        }
    }
}

/// A message for a person.
#[derive(Clone, Debug, PartialEq)]
pub struct Alert {
    /// Rule that was broken.
    pub rule: Rule,
    /// One sentence.
    pub text: String,
    /// The measured value.
    pub value: f64,
    /// Threshold of the rule, as in the configuration.
    pub threshold: f64,
    /// Alerts that were held back since the last one.
    pub held_back: u64,
    /// The episode that it is about, if it is about one.
    pub episode: Option<EpisodeId>,
}

/// A look at the machine.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MachineReading {
    /// Bytes that the disk of the run's folder has left; `None`: not known.
    pub disk_free: Option<u64>,
    /// Share of memory in use; `None`: not known.
    pub memory_used: Option<f64>,
}

/// The rules and what they remember.
#[derive(Debug)]
pub struct Alerts {
    config: AlertsConfig,
    /// Entropy, share of equal groups, and success of the last steps.
    signs: VecDeque<(Option<f64>, f64, f64)>,
    /// The numbers that the verdict follows from.
    course: VerdictInput,
    rewards: VecDeque<f64>,
    /// Rules whose condition holds.
    holding: BTreeMap<Rule, bool>,
    /// Time at which each rule last fired.
    last: BTreeMap<Rule, f64>,
    /// Times at which any rule fired, within the last hour.
    sent: VecDeque<f64>,
    held_back: u64,
    /// Time of the run's last event.
    heard_s: Option<f64>,
}

impl Alerts {
    /// Creates the state before any event.
    pub fn new(config: AlertsConfig) -> Self {
        Self {
            config,
            signs: VecDeque::new(),
            course: VerdictInput::default(),
            rewards: VecDeque::new(),
            holding: BTreeMap::new(),
            last: BTreeMap::new(),
            sent: VecDeque::new(),
            held_back: 0,
            heard_s: None,
        }
    }

    /// The steps of earlier sessions of a resumed run.
    pub fn resumed(&mut self, steps: &[StepRecord], evals: &[EvalRecord]) {
        self.course = VerdictInput::of(steps, evals);
    }

    /// Held-out tasks were measured.
    pub fn on_measured(&mut self, r: &EvalRecord, now_s: f64) -> Vec<Alert> {
        let mut out = Vec::new();
        self.course.measured(r);
        self.fallen(now_s, &mut out);
        out
    }

    /// The run ends. A good end is not an alert.
    pub fn on_end(&mut self, process: Process, why: Option<&str>) -> Vec<Alert> {
        let verdict = self.course.verdict(process, why);
        let first = why.and_then(|why| why.lines().next());
        let how = match process {
            Process::Ended if !verdict.verdict.is_bad() && first.is_none() => return Vec::new(),
            Process::Ended => "the run ended and did not do what it was to do".to_owned(),
            Process::Interrupted => "the run was stopped".to_owned(),
            _ => format!("the run {}", process.name()),
        };
        let reason = first.map_or_else(String::new, |why| format!(": {why}"));
        vec![Alert {
            rule: Rule::Stopped,
            text: format!("{how}{reason} ({})", verdict.line()),
            value: 0.0,
            threshold: 0.0,
            held_back: std::mem::take(&mut self.held_back),
            episode: None,
        }]
    }

    /// A step is done.
    pub fn on_step(&mut self, r: &StepRecord, now_s: f64) -> Vec<Alert> {
        let mut out = Vec::new();
        self.course.step(r);
        self.collapse(r, now_s, &mut out);
        self.jump(r, now_s, &mut out);
        let share = r.rollout.failed as f64 / r.rollout.episodes.max(1) as f64;
        let above = self.config.failed_above;
        let cause = r.failed_cause.as_deref().unwrap_or("no cause was noted");
        let text = format!(
            "step {}: the system failed {} of {} episodes ({cause})",
            r.step, r.rollout.failed, r.rollout.episodes
        );
        let holds = above > 0.0 && share > above;
        out.extend(self.judge(Rule::Failures, holds, share, above, text, now_s));
        let oldest = r.staleness.keys().last().copied().unwrap_or(0);
        let above = self.config.staleness_above;
        let text = format!("step {}: a trained row was {oldest} updates behind", r.step);
        let holds = above > 0 && oldest > above;
        let (oldest, above) = (oldest as f64, above as f64);
        out.extend(self.judge(Rule::Staleness, holds, oldest, above, text, now_s));
        out
    }

    /// Success that fell; whether it did.
    fn fallen(&mut self, now_s: f64, out: &mut Vec<Alert>) -> bool {
        let verdict = self.course.verdict(Process::Running, None);
        let fell = verdict.verdict == Judgement::Collapsed;
        if fell {
            out.extend(self.judge(Rule::Collapse, true, 0.0, 0.0, verdict.why, now_s));
        }
        fell
    }

    /// Success, entropy and equal groups of the last steps.
    fn collapse(&mut self, r: &StepRecord, now_s: f64, out: &mut Vec<Alert>) {
        let all = (r.rollout.episodes + r.retried).max(1) as f64;
        self.signs.push_back((
            r.entropy(),
            r.samples.equal.count as f64 / all,
            r.rollout.success,
        ));
        if self.signs.len() > COLLAPSE_STEPS {
            self.signs.pop_front();
        }
        if self.fallen(now_s, out) {
            return;
        }
        let (low, equal) = (self.config.entropy_below, self.config.equal_above);
        let solved = self.signs.iter().any(|s| s.2 >= SOLVED);
        let whole = self.signs.len() == COLLAPSE_STEPS && !solved;
        let flat = low > 0.0 && whole && self.signs.iter().all(|s| s.0.is_some_and(|e| e < low));
        let same = equal > 0.0 && whole && self.signs.iter().all(|s| s.1 > equal);
        let entropy = r.entropy().unwrap_or(f64::NAN);
        let share = self.signs.back().map_or(0.0, |s| s.1);
        let (text, value, limit) = if flat {
            (
                format!(
                    "step {}: entropy is {entropy:.4} nats, for {COLLAPSE_STEPS} steps below {low}",
                    r.step
                ),
                entropy,
                low,
            )
        } else {
            (
                format!(
                    "step {}: {:.0} % of the episodes are in groups of equal reward, for {COLLAPSE_STEPS} steps",
                    r.step,
                    100.0 * share
                ),
                share,
                equal,
            )
        };
        out.extend(self.judge(Rule::Collapse, flat || same, value, limit, text, now_s));
    }

    /// The reward of this step next to those before.
    fn jump(&mut self, r: &StepRecord, now_s: f64, out: &mut Vec<Alert>) {
        if r.rollout.episodes <= r.rollout.failed + r.rollout.unscored {
            return;
        }
        let reward = r.rollout.reward;
        let n = self.rewards.len() as f64;
        let mean = self.rewards.iter().sum::<f64>() / n.max(1.0);
        let variance = self.rewards.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / n.max(1.0);
        let jump = (reward - mean).abs() / variance.sqrt().max(LEAST_DEVIATION);
        let limit = self.config.reward_jump;
        let holds = limit > 0.0 && self.rewards.len() >= LEAST_BEFORE && jump > limit;
        let text = format!(
            "step {}: the mean reward is {reward:.3} after {mean:.3} in the {n} steps before",
            r.step
        );
        out.extend(self.judge(Rule::RewardJump, holds, jump, limit, text, now_s));
        self.rewards.push_back(reward);
        if self.rewards.len() > BEFORE {
            self.rewards.pop_front();
        }
    }

    /// Episodes run; the first of `longest` has been in its phase for the longest.
    pub fn on_rollout(&mut self, longest: &[LiveEpisode], now_s: f64) -> Vec<Alert> {
        let mut out = Vec::new();
        let limit = self.config.hang_s;
        // One that waits for its turn waits for the others.
        let waits = |l: &&LiveEpisode| l.phase != sinew_rollout::Phase::Wait;
        if let Some(first) = longest.iter().find(waits) {
            let text = format!(
                "episode {} has been in the phase `{}` for {:.0} s",
                first.episode,
                first.phase.name(),
                first.phase_s
            );
            let holds = limit > 0.0 && first.phase_s > limit;
            out.extend(self.judge(Rule::Hang, holds, first.phase_s, limit, text, now_s));
            out.iter_mut()
                .for_each(|a| a.episode = Some(first.episode.clone()));
        }
        out
    }

    /// Records the time of an event of the run.
    pub fn heard(&mut self, now_s: f64) {
        self.heard_s = Some(now_s);
    }

    /// A look at the machine, and at the silence of the run.
    pub fn on_look(&mut self, look: MachineReading, now_s: f64) -> Vec<Alert> {
        let mut out = Vec::new();
        if let Some(free) = look.disk_free {
            let (free, limit) = (free as f64 / GIB, self.config.disk_free_below_gb);
            let text = format!("the disk of the run has {free:.2} GiB left");
            out.extend(self.judge(Rule::Disk, free < limit, free, limit, text, now_s));
        }
        if let Some(used) = look.memory_used {
            let limit = self.config.memory_above;
            let text = format!("{:.0} % of the memory is in use", 100.0 * used);
            let holds = limit > 0.0 && used > limit;
            out.extend(self.judge(Rule::Memory, holds, used, limit, text, now_s));
        }
        let silent = self.heard_s.map_or(0.0, |at| now_s - at);
        let limit = self.config.hang_s;
        if limit > 0.0 && silent > limit {
            let text = format!("the run has said nothing for {silent:.0} s");
            out.extend(self.judge(Rule::Hang, true, silent, limit, text, now_s));
        }
        out
    }

    /// Returns an alert if its condition begins to hold and the limits allow it.
    fn judge(
        &mut self,
        rule: Rule,
        holds: bool,
        value: f64,
        threshold: f64,
        text: String,
        now_s: f64,
    ) -> Option<Alert> {
        let held = self.holding.insert(rule, holds).unwrap_or(false);
        if !holds || held {
            return None;
        }
        while self.sent.front().is_some_and(|at| now_s - at > HOUR_S) {
            self.sent.pop_front();
        }
        let early = self
            .last
            .get(&rule)
            .is_some_and(|at| now_s - at < self.config.every_s);
        if early || self.sent.len() >= self.config.max_per_hour as usize {
            self.held_back += 1;
            return None;
        }
        self.last.insert(rule, now_s);
        self.sent.push_back(now_s);
        Some(Alert {
            rule,
            text,
            value,
            threshold,
            held_back: std::mem::take(&mut self.held_back),
            episode: None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn config() -> AlertsConfig {
        AlertsConfig {
            webhook: Some("http://x".into()),
            staleness_above: 2,
            ..AlertsConfig::default()
        }
    }

    fn step(step: u64, reward: f64, entropy: f64) -> StepRecord {
        let mut r = StepRecord {
            step,
            metrics: serde_json::json!({ "entropy": entropy }),
            ..StepRecord::default()
        };
        r.rollout.episodes = 8;
        r.rollout.reward = reward;
        r
    }

    fn rules(alerts: Vec<Alert>) -> Vec<Rule> {
        alerts.iter().map(|a| a.rule).collect()
    }

    #[test]
    fn a_collapse_is_said_once_after_three_steps_and_again_after_it_was_over() {
        let mut alerts = Alerts::new(config());
        let mut said = Vec::new();
        let entropies = [0.5, 0.01, 0.01, 0.01, 0.01, 0.5, 0.01, 0.01, 0.01];
        for (i, entropy) in entropies.into_iter().enumerate() {
            let got = alerts.on_step(&step(i as u64, 0.5, entropy), 1000.0 * i as f64);
            said.extend(rules(got).into_iter().map(|r| (i, r)));
        }
        assert_eq!(said, [(3, Rule::Collapse), (8, Rule::Collapse)]);
    }

    #[test]
    fn a_solved_task_is_no_collapse_and_success_that_fell_is_one() {
        let mut alerts = Alerts::new(AlertsConfig {
            reward_jump: 0.0,
            ..config()
        });
        let of = |at, success: f64, entropy| {
            let mut r = step(at, success, entropy);
            r.rollout.success = success;
            r.samples.equal.count = 8;
            r
        };
        for at in 0..8 {
            let said = alerts.on_step(&of(at, 1.0, 0.001), 1000.0 * at as f64);
            assert!(said.is_empty(), "{said:?}");
        }
        let mut said = Vec::new();
        for at in 8..14 {
            said.extend(alerts.on_step(&of(at, 0.0, 2.0), 1000.0 * at as f64));
        }
        let [alert] = &said[..] else {
            panic!("{said:?}");
        };
        assert_eq!(alert.rule, Rule::Collapse);
        assert!(
            alert.text.starts_with("training success 100.0 %"),
            "{alert:?}"
        );
    }

    #[test]
    fn every_end_but_a_good_one_is_said_whatever_was_said_before() {
        let mut alerts = Alerts::new(AlertsConfig {
            max_per_hour: 0,
            ..config()
        });
        let mut good = step(1, 0.5, 1.0);
        (good.trained_tokens, good.updates_applied, good.grad_norm) = (9, 1, 1.0);
        alerts.on_step(&good, 0.0);
        assert_eq!(alerts.on_end(Process::Ended, None), []);
        for (process, why, wanted) in [
            (
                Process::Failed,
                Some("no space\n  hint: x"),
                "the run failed: no space (dead",
            ),
            (
                Process::Failed,
                None,
                "the run failed (dead: the process failed after step 1",
            ),
            (Process::Interrupted, None, "the run was stopped (healthy"),
            (
                Process::Ended,
                Some("3 episodes are gone"),
                "did not do what it was to do: 3 episodes are gone",
            ),
        ] {
            let said = alerts.on_end(process, why);
            assert_eq!(said.len(), 1);
            assert_eq!(said[0].rule, Rule::Stopped);
            assert!(said[0].text.contains(wanted), "{}", said[0].text);
        }
    }

    #[test]
    fn jumps_failures_and_staleness_are_seen() {
        let mut alerts = Alerts::new(config());
        for i in 0..8 {
            let reward = 0.5 + 0.01 * (i % 2) as f64;
            assert!(alerts.on_step(&step(i, reward, 1.0), i as f64).is_empty());
        }
        let mut bad = step(9, -3.0, 1.0);
        bad.rollout.failed = 7;
        bad.staleness = [(5, 1)].into();
        let said = rules(alerts.on_step(&bad, 10.0));
        assert_eq!(said, [Rule::RewardJump, Rule::Failures, Rule::Staleness]);
    }

    #[test]
    fn hangs_disk_and_memory_are_seen() {
        let mut alerts = Alerts::new(config());
        alerts.heard(0.0);
        let live = |phase, phase_s| LiveEpisode {
            episode: sinew_types::EpisodeId::new("e"),
            phase,
            phase_s,
            left_s: None,
        };
        let tool = sinew_rollout::Phase::Tool;
        assert!(
            alerts
                .on_rollout(&[live(sinew_rollout::Phase::Wait, 9e9)], 1.0)
                .is_empty()
        );
        assert_eq!(
            rules(alerts.on_rollout(&[live(tool, 601.0)], 1.0)),
            [Rule::Hang]
        );
        assert!(alerts.on_rollout(&[live(tool, 602.0)], 2.0).is_empty());
        let look = MachineReading {
            disk_free: Some(1 << 30),
            memory_used: Some(0.99),
        };
        assert_eq!(rules(alerts.on_look(look, 3.0)), [Rule::Disk, Rule::Memory]);
        let well = MachineReading {
            disk_free: None,
            memory_used: None,
        };
        assert!(alerts.on_look(well, 4.0).is_empty());
        alerts.on_rollout(&[live(tool, 1.0)], 5.0);
        assert_eq!(rules(alerts.on_look(well, 2000.0)), [Rule::Hang]);
    }

    proptest! {
        #[test]
        fn no_rule_speaks_too_often(
            steps in proptest::collection::vec(
                (0.0..900.0f64, 0usize..9, 0u64..6, -5.0..5.0f64, 0.0..1.0f64),
                1..200
            )
        ) {
            let config = AlertsConfig { max_per_hour: 5, ..config() };
            let every = config.every_s;
            let mut alerts = Alerts::new(config);
            let (mut now, mut said) = (0.0, Vec::new());
            for (i, (after, failed, age, reward, entropy)) in steps.into_iter().enumerate() {
                now += after;
                let mut r = step(i as u64, reward, entropy * 0.05);
                r.rollout.failed = failed.min(8);
                r.staleness = [(age, 1)].into();
                said.extend(alerts.on_step(&r, now).into_iter().map(|a| (a.rule, now)));
            }
            for (i, (rule, at)) in said.iter().enumerate() {
                let within = said[..i].iter().filter(|(_, t)| at - t <= HOUR_S).count();
                prop_assert!(within < 5);
                let same = said[..i].iter().rev().find(|(r, _)| r == rule);
                prop_assert!(same.is_none_or(|(_, t)| at - t >= every));
            }
        }
    }
}
