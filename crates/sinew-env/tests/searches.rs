//! Questions over a corpus: gold runs, answers without evidence, a corpus of a user's own.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

use serde_json::{Value, json};
use sinew_env::search::KIND;
use sinew_env::{Action, EnvConfig, EnvError, EnvFactory, Split, validate};
use sinew_types::{Outcome, Task, TaskId, ToolCall};
use std::sync::Arc;
use toml::de::ValueDeserializer;

fn config(keys: &str) -> Arc<dyn EnvConfig> {
    KIND.read(ValueDeserializer::parse(keys).unwrap())
        .unwrap()
        .0
}

fn call(name: &str, arguments: Value) -> Action {
    let call = ToolCall {
        id: "call-0".into(),
        name: name.into(),
        arguments,
    };
    Action {
        tool_calls: vec![call],
        ..Action::say("")
    }
}

async fn play(
    factory: &dyn EnvFactory,
    task: &Task,
    actions: Vec<Action>,
) -> (Outcome, Vec<String>) {
    let mut env = factory.create(task).unwrap();
    env.reset().await.unwrap();
    let mut seen = Vec::new();
    for action in actions {
        let step = env.step(action).await.unwrap();
        if let Some(outcome) = step.outcome {
            return (outcome, seen);
        }
        seen.push(step.observation.unwrap().content.to_string());
    }
    (env.score().await.unwrap(), seen)
}

#[tokio::test]
async fn generated_questions_are_solved_by_opening_their_pages() {
    let config = config("{}");
    let (tasks, factory) = (config.taskset(4).unwrap(), config.factory(None).unwrap());
    let some: Vec<Task> = (0..60)
        .map(|i| tasks.get(Split::Train, i).unwrap())
        .collect();
    validate(factory.as_ref(), &some).await.unwrap();
    for index in 0..60 {
        let held_out = tasks.get(Split::HeldOut, index).unwrap();
        assert!(
            some.iter().all(|t| t.prompt != held_out.prompt),
            "{}",
            held_out.prompt
        );
    }
}

#[tokio::test]
async fn answers_without_evidence_earn_nothing() {
    let config = config("{ hops = [2], max_calls = 200 }");
    let (tasks, factory) = (config.taskset(4).unwrap(), config.factory(None).unwrap());
    let task = tasks.get(Split::Train, 0).unwrap();
    let (answer, pages) = (
        task.data["answer"].clone(),
        task.data["citations"].as_array().unwrap().clone(),
    );
    let said = |text: &Value, ids: Value| call("answer", json!({ "text": text, "citations": ids }));
    let open = |id: &Value| call("open", json!({ "id": id }));
    let both = || pages.iter().map(open).collect::<Vec<_>>();
    let with = |mut actions: Vec<Action>, last: Action| {
        actions.push(last);
        actions
    };
    let more: Vec<Action> = (0..60).map(|i| open(&json!(format!("town-{i}")))).collect();
    let all: Vec<Value> = pages
        .iter()
        .cloned()
        .chain((0..60).map(|i| json!(format!("town-{i}"))))
        .collect();
    let cheats = [
        // The answer alone; pages that were not opened, not cited, cited by the dozen; a wrong answer.
        vec![said(&answer, json!([]))],
        vec![said(&answer, json!(pages))],
        with(both(), said(&answer, json!([]))),
        with(both(), said(&answer, json!([pages[0]]))),
        with([both(), more].concat(), said(&answer, json!(all))),
        with(both(), said(&json!("nowhere"), json!(pages))),
        with(
            both(),
            said(
                &json!(format!("{} or not", answer.as_str().unwrap())),
                json!(pages),
            ),
        ),
        with(both(), said(&json!(""), json!(pages))),
    ];
    for (i, cheat) in cheats.into_iter().enumerate() {
        let (outcome, _) = play(factory.as_ref(), &task, cheat).await;
        assert!(
            !outcome.success && outcome.reward == 0.0,
            "cheat {i}: {outcome:?}"
        );
    }
    let shouted = json!(format!(
        "  the {}! ",
        answer.as_str().unwrap().to_uppercase()
    ));
    let (outcome, _) = play(
        factory.as_ref(),
        &task,
        with(both(), said(&shouted, json!(pages))),
    )
    .await;
    assert!(outcome.success, "{outcome:?}");
}

#[tokio::test]
async fn pages_and_questions_of_a_user_are_searched() {
    let file = std::env::temp_dir().join(format!("sinew-corpus-{}.jsonl", std::process::id()));
    let long = format!(
        "{} The needle is here. {}",
        "hay ".repeat(200),
        "hay ".repeat(200)
    );
    let rows = [
        json!({"id": "a", "title": "Tea", "text": "Tea is made of leaves."}),
        json!({"id": "b", "title": "Stack", "text": long}),
    ];
    std::fs::write(&file, rows.map(|r| r.to_string()).join("\n")).unwrap();
    let keys = format!(
        "{{ corpus = {:?}, page_chars = 100 }}",
        file.display().to_string()
    );
    let config = config(&keys);
    assert!(
        config
            .taskset(1)
            .is_err_and(|e| e.to_string().contains("answer and citations"))
    );
    let factory = config.factory(None).unwrap();
    let task = |data: Value| Task {
        id: TaskId::new("own"),
        kind: "own".into(),
        preamble: Vec::new(),
        prompt: "What is tea made of?".into(),
        data,
        seed: 0,
    };
    let own = task(json!({ "answer": ["leaves", "of leaves"] }));
    let tea = vec![
        call("search", json!({ "query": "tea leaves" })),
        call("find", json!({ "id": "b", "text": "needle" })),
        call("open", json!({ "id": "b", "part": 99 })),
        call("open", json!({ "id": "b" })),
        call("find", json!({ "id": "b", "text": "NEEDLE" })),
        call("open", json!({ "id": "c" })),
        call("open", json!({ "id": "a" })),
        call("answer", json!({ "text": "Leaves", "citations": ["a"] })),
    ];
    let (outcome, seen) = play(factory.as_ref(), &own, tea).await;
    assert!(outcome.success, "{seen:?}");
    assert!(
        seen[0].starts_with("a \"Tea\"") && seen[1].contains("open page b first"),
        "{seen:?}"
    );
    assert!(
        seen[2].contains("parts 0 to") && seen[4].contains("The needle is here"),
        "{seen:?}"
    );
    assert!(seen[5].contains("there is no page"), "{seen:?}");
    assert!(matches!(factory.gold(&own, 0), Ok(None)));
    for wrong in [
        json!({}),
        json!({ "answer": 1.5, "citations": ["zz"] }),
        json!({ "answer": {} }),
    ] {
        let refused = factory.create(&task(wrong));
        assert!(matches!(refused, Err(EnvError::Task { .. })));
    }
    std::fs::write(&file, "{\"id\": \"a\", \"title\": \"x\", \"text\": 5}").unwrap();
    let error = config.factory(None).err().unwrap().to_string();
    assert!(
        error.contains("corpus") && error.contains("line 1"),
        "{error}"
    );
    std::fs::remove_file(file).unwrap();
}
