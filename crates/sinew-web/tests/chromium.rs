//! The environment in real Chromium: gold policies, policies that know nothing, cheats.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

use serde_json::{Value, json};
use sinew_env::{Action, Env, EnvConfig, EnvFactory, Split, gold_run, validate};
use sinew_types::{Outcome, Task, ToolCall};
use sinew_web::{FAMILIES, Web, WebFactory, WebTasks};
use std::path::Path;

/// Keys for a machine that is slow.
fn keys(tasks: WebTasks) -> Web {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    Web {
        tasks,
        pages: root.join(".cache/miniwob/miniwob/html"),
        timeout_s: 120.0,
        ..Web::default()
    }
}

fn task(keys: &Web, index: usize) -> Task {
    keys.taskset(5).unwrap().get(Split::Train, index).unwrap()
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

/// Plays actions to the end. Returns the score and what was seen last.
async fn play(factory: &WebFactory, task: &Task, actions: Vec<Action>) -> (Outcome, String) {
    let mut env = factory.create(task).unwrap();
    let (outcome, seen) = act(env.as_mut(), actions).await;
    env.close().await.unwrap();
    (outcome, seen)
}

async fn act(env: &mut dyn Env, actions: Vec<Action>) -> (Outcome, String) {
    let mut seen = env
        .reset()
        .await
        .unwrap()
        .messages
        .last()
        .unwrap()
        .content
        .to_string();
    for action in actions {
        let step = env.step(action).await.unwrap();
        if let Some(outcome) = step.outcome {
            return (outcome, seen);
        }
        seen = step.observation.unwrap().content.to_string();
    }
    (env.score().await.unwrap(), seen)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_shop_is_solved_by_its_gold_policy_alone() {
    let keys = keys(WebTasks::Shop);
    let factory = WebFactory::start(&keys).unwrap();
    let tasks: Vec<Task> = (0..5).map(|i| task(&keys, i)).collect();
    // It plays every task twice: equal actions give equal pages, states and scores.
    validate(&factory, &tasks).await.unwrap();
    for task in &tasks {
        let done = || call("done", json!({}));
        let (outcome, page) = play(&factory, task, vec![done()]).await;
        assert!(!outcome.success, "{}", task.kind);
        assert!(
            page.contains("[1] link \"Home\"") && page.contains(&task.prompt),
            "{page}"
        );
        // A state is changed by forms alone; an address that looks like one is none.
        let forged = [
            "/cart?id=1&quantity=1",
            "/cart/0?do=remove",
            "/checkout?name=a&street=b&city=c",
        ];
        let forged = forged.map(|path| call("open", json!({ "path": path })));
        let (outcome, _) = play(&factory, task, forged.into_iter().chain([done()]).collect()).await;
        assert!(
            !outcome.success && outcome.metrics["orders"] == 0.0,
            "{outcome:?}"
        );
    }
    // The right state does not count before the model says that it is done, nor after more was bought.
    let mut gold: Vec<Action> = Vec::new();
    while let Some(action) = factory.gold(&tasks[0], gold.len()).unwrap() {
        gold.push(action);
    }
    gold.pop();
    let (outcome, _) = play(&factory, &tasks[0], gold.clone()).await;
    assert!(!outcome.success && outcome.metrics["right_state"] == 1.0);
    let more = [gold.clone(), gold, vec![call("done", json!({}))]].concat();
    let (outcome, _) = play(&factory, &tasks[0], more).await;
    assert!(!outcome.success && outcome.metrics["right_state"] == 0.0);
}

/// Calls that cannot be carried out, and what the model is told.
fn wrong_calls() -> Vec<(Action, &'static str)> {
    vec![
        (
            call("click", json!({ "element": 99 })),
            "there is no element 99; the page has 1 to",
        ),
        (
            call("click", json!({ "element": "1" })),
            "arguments of click",
        ),
        (
            call("click", json!({ "element": 1, "script": "x" })),
            "unknown field",
        ),
        (
            call("type", json!({ "element": 1, "text": "x" })),
            "type needs a field; this is a link",
        ),
        (
            call("select", json!({ "element": 1, "option": "x" })),
            "select needs a list",
        ),
        (
            call("open", json!({ "path": "http://other.test/" })),
            "a path of this site",
        ),
        (
            call("open", json!({ "path": "javascript:alert(1)" })),
            "a path of this site",
        ),
        (call("back", json!({})), "no page to go back to"),
        (
            call("evaluate", json!({ "script": "1" })),
            "there is no tool evaluate",
        ),
        (Action::say("I am done."), "call a tool"),
        // Markup that is typed stays text.
        (
            call(
                "type",
                json!({ "element": 3, "text": "<b id=x>&\"", "enter": true }),
            ),
            "0 found",
        ),
    ]
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn errors_of_the_model_are_observations() {
    let mut keys = keys(WebTasks::Shop);
    let folder = std::env::temp_dir().join(format!("sinew-web-{}", std::process::id()));
    keys.screenshots = folder.clone();
    keys.max_calls = 12;
    let factory = WebFactory::start(&keys).unwrap();
    let mut env = factory.create(&task(&keys, 0)).unwrap();
    let first = env.reset().await.unwrap();
    let page = first.messages.last().unwrap().content.to_string();
    let hash = page.rsplit("screenshot blake3:").next().unwrap();
    let png = std::fs::read(folder.join(format!("{hash}.png"))).unwrap();
    assert!(png.starts_with(b"\x89PNG"));
    for (action, expected) in wrong_calls() {
        let step = env.step(action).await.unwrap();
        let seen = step.observation.unwrap().content.to_string();
        assert!(seen.contains(expected), "{expected}: {seen}");
    }
    let twice = Action {
        tool_calls: [
            call("back", json!({})),
            call("back", json!({})),
            call("back", json!({})),
        ]
        .into_iter()
        .flat_map(|a| a.tool_calls)
        .collect(),
        ..Action::say("")
    };
    let step = env.step(twice).await.unwrap();
    assert!(step.done, "the calls of an episode are limited");
    env.close().await.unwrap();
    std::fs::remove_dir_all(folder).unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_family_of_miniwob_is_solved_and_a_second_problem_does_not_count() {
    let keys = keys(WebTasks::Miniwob);
    let factory = WebFactory::start(&keys).unwrap();
    for (i, family) in FAMILIES.iter().enumerate() {
        let task = task(&keys, i);
        assert_eq!(task.kind, format!("miniwob/{}", family.name));
        let (outcome, turns) = gold_run(&factory, &task).await.unwrap();
        assert!(outcome.success && turns > 0, "{}: {outcome:?}", task.kind);
        let (outcome, _) = play(&factory, &task, vec![call("done", json!({}))]).await;
        assert!(!outcome.success, "{}", task.kind);
    }
    // A click on a wrong button ends the episode: the page's next problem is not offered.
    let index = FAMILIES
        .iter()
        .position(|f| f.name == "enter-text")
        .unwrap();
    let task = task(&keys, index);
    let submit = || call("click", json!({ "element": 2 }));
    let (outcome, page) = play(&factory, &task, vec![submit(), submit()]).await;
    assert!(
        outcome.metrics["raw_reward"] < 0.0 && !outcome.success,
        "{outcome:?}"
    );
    assert!(
        page.contains("[1] textbox") && !page.contains("Last reward"),
        "{page}"
    );
    // Raw rewards do not decay: the same seed gives the same words, later as well.
    let again = play(&factory, &task, Vec::new()).await.1;
    assert_eq!(page, again);
}
