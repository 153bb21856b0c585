//! Proofs that Coq checks in real sandboxes: gold ones, cheats.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

use serde_json::json;
use sinew_env::proof::{KIND, ProofTasks};
use sinew_env::{Action, Env, EnvFactory, Sandboxes, Split, Taskset, gold_run};
use sinew_sandbox::{Limits, ProcessConfig, ProcessProvider, SandboxSpec};
use sinew_types::{Outcome, Task, ToolCall};
use std::sync::Arc;
use toml::de::ValueDeserializer;

fn factory(keys: &str) -> Arc<dyn EnvFactory> {
    let path = std::env::var("PATH").unwrap_or_default();
    let provider = Arc::new(ProcessProvider::start(ProcessConfig::new(&path)).unwrap());
    let spec = SandboxSpec {
        // A machine that is ten times slower has the same proofs.
        limits: Limits {
            cpu_s: 60.0,
            ..Limits::default()
        },
        ..SandboxSpec::default()
    };
    let keys = ValueDeserializer::parse(keys).unwrap();
    let (config, _) = KIND.read(keys).unwrap();
    config.check().unwrap();
    let images = Default::default();
    config
        .factory(Some(Sandboxes {
            provider,
            spec,
            images,
        }))
        .unwrap()
}

fn prove(script: &str) -> Action {
    let call = ToolCall {
        id: "call-0".into(),
        name: "prove".into(),
        arguments: json!({ "script": script }),
    };
    Action {
        tool_calls: vec![call],
        ..Action::say("")
    }
}

/// Tries scripts one after the other. Returns the score, and what was seen.
async fn attempts(
    factory: &dyn EnvFactory,
    task: &Task,
    scripts: &[&str],
) -> (Outcome, Vec<String>) {
    let mut env = factory.create(task).unwrap();
    let played = tries(env.as_mut(), scripts).await;
    env.close().await.unwrap();
    played
}

async fn tries(env: &mut dyn Env, scripts: &[&str]) -> (Outcome, Vec<String>) {
    env.reset().await.unwrap();
    let mut seen = Vec::new();
    for script in scripts {
        let step = env.step(prove(script)).await.unwrap();
        if let Some(outcome) = step.outcome {
            return (outcome, seen);
        }
        seen.push(step.observation.unwrap().content.to_string());
    }
    (env.score().await.unwrap(), seen)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn gold_proofs_of_every_level_hold() {
    let factory = factory("{ timeout_s = 300.0 }");
    for split in [Split::Train, Split::HeldOut] {
        let tasks = ProofTasks::new(7, vec![1, 2, 3, 4], 24, 12);
        for index in 0..tasks.len(split) {
            let task = tasks.get(split, index).unwrap();
            let (outcome, turns) = gold_run(factory.as_ref(), &task).await.unwrap();
            assert!(outcome.success && turns == 1, "{}: {}", task.id, task.data);
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn scripts_that_prove_nothing_earn_nothing() {
    let factory = factory("{ timeout_s = 300.0, attempts = 20 }");
    let tasks = ProofTasks::new(3, vec![1, 4], 10, 2);
    let (chain, induction) = (
        tasks.get(Split::Train, 0).unwrap(),
        tasks.get(Split::Train, 1).unwrap(),
    );
    let other = tasks.get(Split::Train, 2).unwrap();
    let gold = other.data["statement"]["gold"].as_str().unwrap();
    let cheats = [
        "Admitted.",
        "intros. admit.",
        "exact I. Qed. Axiom goal : False.",
        "Abort. Definition goal := I.",
        "tauto.",
        "intros; auto.",
        "idtac.",
        "exact goal.",
        "exact (fun x => x x).",
        "intros A B. fail.",
    ];
    let (outcome, seen) = attempts(factory.as_ref(), &chain, &cheats).await;
    assert!(!outcome.success && outcome.reward == 0.0, "{seen:?}");
    assert!(seen.iter().all(|s| s.starts_with("Error: ")), "{seen:?}");
    assert!(
        seen[0].contains("Admitted is not allowed") && seen[4].contains("tauto"),
        "{seen:?}"
    );
    // A proof of another theorem, then Coq's own words, then the right one.
    let own = induction.data["statement"]["gold"].as_str().unwrap();
    let (outcome, seen) = attempts(
        factory.as_ref(),
        &induction,
        &[gold, "intros n. reflexivity.", own],
    )
    .await;
    assert!(
        outcome.success && outcome.metrics["tool_errors"] == 2.0,
        "{seen:?}"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn attempts_are_limited_and_a_proof_that_does_not_end_is_stopped() {
    let factory = factory("{ timeout_s = 2.0, attempts = 2, automation = true, levels = [4] }");
    let tasks = ProofTasks::new(3, vec![4], 10, 2);
    let task = tasks.get(Split::Train, 0).unwrap();
    let endless = "intros n. do 100000000 idtac. repeat (assert (0 = 0) by reflexivity).";
    let (outcome, seen) = attempts(factory.as_ref(), &task, &[endless, "idtac."]).await;
    assert!(
        !outcome.success && outcome.metrics["tool_calls"] == 2.0,
        "{outcome:?}"
    );
    assert!(seen[0].contains("Coq"), "{seen:?}");
}
