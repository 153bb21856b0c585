//! Episodes of Python classes.

use crate::support::{Sizes, call, calls, factory, folder, in_folder, play, task, workers};
use serde_json::json;
use sinew_bridge::{CheckReport, Finding, PythonEnvFactory, TargetKind};
use sinew_env::{Action, CallError, CallNotation, EnvFactory};
use sinew_types::Role;

const SHOP: &str = r#"
from typing import List
from sinew import Env, Done, Step, ToolError, tool

GOODS = {"tea": 3, "milk": 1}

class E(Env):
    system = "You are a shopper."

    def start(self, task):
        self.cart = []

    @tool
    def search(self, query: str) -> List[str]:
        "Find items."
        return [name for name in GOODS if query in name]

    @tool
    def add(self, item: str, count: int = 1):
        """Put an item in the cart.

        Args:
            item: name of the item
        """
        if item not in GOODS:
            raise ToolError("no such item: " + item)
        if not 0 < count < 100:
            raise ToolError("count is 1 to 99")
        self.cart += [item] * count
        return Step("added", reward=0.25)

    @tool
    async def pay(self):
        return Done("paid")

    def state(self):
        return self.cart

    def reward(self, task):
        return {"reward": self.cart == task.want, "items": len(self.cart)}

    @staticmethod
    def gold(task):
        return [[("add", {"item": item}) for item in task.want], ("pay", {})]
"#;

#[tokio::test]
async fn tools_run_in_a_worker_and_the_class_scores_the_episode() {
    let (factory, _dir) = factory(SHOP, Sizes::default());
    let want = task(json!({"want": ["tea", "tea"]}));
    let mut env = factory.create(&want).unwrap();
    let reset = env.reset().await.unwrap();
    let said = |i: usize| (reset.messages[i].role, reset.messages[i].content.text());
    assert_eq!(said(0), (Role::System, "You are a shopper.".into()));
    assert_eq!(said(1), (Role::User, "Buy tea.".into()));
    assert_eq!(reset.calls, CallNotation::Template);
    let names: Vec<_> = reset.tools.iter().map(|t| t.name.as_str()).collect();
    assert_eq!(names, ["search", "add", "pay"]);
    assert_eq!(reset.tools[1].description, "Put an item in the cart.");
    let schema = json!({
        "type": "object",
        "properties": {
            "item": {"type": "string", "description": "name of the item"},
            "count": {"type": "integer", "default": 1},
        },
        "required": ["item"],
    });
    assert_eq!(reset.tools[1].parameters, schema);
    let two = calls(vec![
        call("a", "search", json!({"query": "te"})),
        call("b", "add", json!({"item": "tea", "count": 2})),
    ]);
    let step = env.step(two).await.unwrap();
    assert_eq!((step.process_reward, step.done), (0.25, false));
    assert_ne!(step.state_hash, reset.state_hash);
    let messages = env.format_observation(&step.observation.unwrap());
    let said = |i: usize| {
        (
            messages[i].tool_call_id.as_deref(),
            messages[i].content.text(),
        )
    };
    assert_eq!(said(0), (Some("a"), r#"["tea"]"#.into()));
    assert_eq!(said(1), (Some("b"), "added".into()));
    assert!(messages.iter().all(|m| m.role == Role::Tool));
    let done = env.step(calls(vec![call("c", "pay", json!({}))])).await;
    let outcome = done.unwrap().outcome.unwrap();
    assert_eq!(
        (outcome.reward, outcome.success, outcome.unscored),
        (1.0, true, false)
    );
    assert_eq!(
        (outcome.metrics["items"], outcome.metrics["tool_calls"]),
        (2.0, 3.0)
    );
    env.close().await.unwrap();
}

#[tokio::test]
async fn errors_of_the_model_are_observations() {
    let (factory, _dir) = factory(SHOP, Sizes::default());
    let mut env = factory.create(&task(json!({"want": []}))).unwrap();
    env.reset().await.unwrap();
    let text = json!({"item": "tea", "count": "2"});
    for (name, arguments, said) in [
        ("add", json!({"item": "gold"}), "no such item: gold"),
        ("add", text, "argument count is \"2\": expected int"),
        ("add", json!({}), "missing argument item"),
        (
            "steal",
            json!({}),
            "there is no tool steal; the tools are: search, add, pay",
        ),
    ] {
        let step = env
            .step(calls(vec![call("a", name, arguments)]))
            .await
            .unwrap();
        let observation = step.observation.unwrap();
        assert!(observation.is_error);
        assert!(
            observation.content.text().contains(said),
            "{}",
            observation.content
        );
    }
    let broken = Action {
        call_error: Some(CallError::Unclosed),
        ..Action::say("<tool_call>")
    };
    let observation = env.step(broken).await.unwrap().observation.unwrap();
    assert_eq!(env.format_observation(&observation)[0].role, Role::User);
    // A turn without a call ends an episode of a class without `step`.
    let step = env.step(Action::say("I am done.")).await.unwrap();
    let metrics = step.outcome.unwrap().metrics;
    assert_eq!((metrics["tool_errors"], metrics["malformed"]), (4.0, 1.0));
    env.close().await.unwrap();
}

const PAGES: &str = r#"
from sinew import Env, Step, tool

class E(Env):
    system = "You read."

    def start(self, task):
        return "page 1"

    @tool
    def turn(self):
        return Step("page 2", fresh=True)

    @tool
    def look(self):
        return "a clock"

    def reward(self, messages):
        return sum("page" in m.content for m in messages)
"#;

#[tokio::test]
async fn a_step_takes_what_came_before_out_of_the_context() {
    let (factory, _dir) = factory(PAGES, Sizes::default());
    let mut task = task(json!({}));
    let before = sinew_types::Message::new(Role::User, "Hello.");
    task.preamble = vec![before.clone()];
    let mut env = factory.create(&task).unwrap();
    env.reset().await.unwrap();
    let look = || call("a", "look", json!({}));
    env.step(calls(vec![look()])).await.unwrap();
    assert_eq!(env.renewed(), None);
    // Results of later calls of the turn follow it.
    let turn = calls(vec![look(), call("b", "turn", json!({})), look()]);
    env.step(turn).await.unwrap();
    let renewed = env.renewed().unwrap();
    assert_eq!(renewed[0], before);
    let said = renewed[1..]
        .iter()
        .map(|m| (m.role, m.content.text().into_owned()));
    let expected = [
        (Role::System, "You read.".to_owned()),
        (Role::User, "page 2\na clock".to_owned()),
    ];
    assert_eq!(said.collect::<Vec<_>>(), expected);
    env.step(calls(vec![look()])).await.unwrap();
    assert_eq!(env.renewed(), None);
    // Rewards see the whole episode.
    let outcome = env.step(Action::say("Done.")).await.unwrap().outcome;
    assert_eq!(outcome.unwrap().reward, 2.0);
    env.close().await.unwrap();
}

#[tokio::test]
async fn errors_of_the_code_fail_the_episode_with_file_and_line() {
    let source = r#"
from sinew import Env, tool

class E(Env):
    @tool
    def f(self) -> str:
        return 1 / 0

    @tool
    def leave(self):
        exit(3)

    def reward(self):
        return 1.0
"#;
    let (factory, _dir) = factory(source, Sizes::default());
    for (tool, said) in [
        ("f", "user.py:7: ZeroDivisionError: division by zero"),
        ("leave", "user.py:11: SystemExit: the code called exit(3)"),
    ] {
        let mut env = factory.create(&task(json!({}))).unwrap();
        env.reset().await.unwrap();
        let step = env.step(calls(vec![call("a", tool, json!({}))])).await;
        let error = step.unwrap_err().to_string();
        assert!(error.contains(said), "{error}");
        env.close().await.unwrap();
    }
}

#[tokio::test]
async fn episodes_without_a_score_say_why() {
    let begin = "from sinew import Env, Unscored, Step\nclass E(Env):\n    def step(self, text):\n        \
                 return Step('ok', done=True)\n    ";
    for (body, said) in [
        ("pass", "has no method reward"),
        (
            "def reward(self, task): return task.nothing",
            "user.py:5: AttributeError: no field 'nothing'",
        ),
        ("def reward(self, wrong): return 1", "valid names:"),
        ("def reward(self, taks): return 1", "did you mean `task`?"),
        ("def reward(self, task): return None", "it returned None"),
        (
            "def reward(self, task): return Unscored('no judge')",
            "no judge",
        ),
        ("def reward(self, task): return 'good'", "is of type str"),
        ("def reward(self, task): return float('nan')", "nan"),
        (
            "def reward(self, task): return {'a': 1}",
            "without the key 'reward'",
        ),
    ] {
        let (factory, _dir) = factory(&format!("{begin}{body}"), Sizes::default());
        let outcome = play(&factory, vec![Action::say("x")])
            .await
            .outcome
            .unwrap();
        assert!(outcome.unscored, "{body}");
        let reason = outcome.unscored_reason.unwrap();
        assert!(reason.contains(said), "{reason}");
    }
}

#[tokio::test]
async fn text_environments_answer_each_turn() {
    let source = r#"
from sinew import Done, Env, Step

class E(Env):
    async def reset(self, task, seed):
        self.number = seed
        return "Guess a number."

    async def step(self, text):
        if int(text) == self.number:
            return Done(reward=1.0)
        return Step("higher" if int(text) < self.number else "lower", reward=-0.5)
"#;
    let (factory, _dir) = factory(source, Sizes::default());
    let mut env = factory.create(&task(json!({}))).unwrap();
    let reset = env.reset().await.unwrap();
    assert_eq!(
        reset.messages[0].content.text(),
        "Buy tea.\n\nGuess a number."
    );
    let step = env.step(Action::say("9")).await.unwrap();
    assert_eq!(step.observation.unwrap().content.text(), "lower");
    assert_eq!(step.process_reward, -0.5);
    let step = env.step(Action::say("7")).await.unwrap();
    let outcome = step.outcome.unwrap();
    assert_eq!(
        (step.process_reward, outcome.reward, outcome.unscored),
        (1.0, 0.0, false)
    );
    env.close().await.unwrap();
}

#[test]
fn classes_that_cannot_work_are_refused_at_the_start() {
    for (source, said) in [
        ("class E:\n    pass", "a model could do nothing in it"),
        ("def E(): pass", "is no class"),
        ("class F: pass", "has no E; it defines: F"),
        ("import no_such_package", "user.py:1: ModuleNotFoundError"),
        ("x = (", "user.py:1: SyntaxError"),
        (
            "from sinew import tool\nclass E:\n    @tool\n    def f(self, x): ...",
            "user.py:4: parameter x of the tool f has no type hint",
        ),
        (
            "from sinew import tool\nclass E:\n    @tool\n    def f(self, x: open): ...",
            "user.py:4: parameter x: no JSON schema for",
        ),
        (
            "from sinew import Client",
            "sinew.Client is not available in a worker",
        ),
    ] {
        let error = workers(source, (TargetKind::Env, "E"), Sizes::default()).unwrap_err();
        let error = error.to_string();
        assert!(error.contains(said), "{error}");
    }
}

#[tokio::test]
async fn the_check_finds_what_would_go_wrong() {
    let (good, _dir) = factory(SHOP, Sizes::default());
    let tasks = ["tea", "milk"].map(|item| task(json!({"want": [item]})));
    let report = CheckReport::of(&good, &tasks).await;
    assert!(report.passed(), "{report:?}");
    // Each item that is added has a reward of its turn: to add one again and again pays more than to buy.
    let warned = report.checks.iter().filter(|c| c.finding != Finding::Ok);
    let warned: Vec<_> = warned.map(|c| c.name).collect();
    assert_eq!(warned, ["constant"], "{report:?}");
    let source = r#"
import random
from sinew import Env

class E(Env):
    def start(self, task):
        return "The answer is %s." % task.answer
    def step(self, text):
        return str(random.SystemRandom().random())
    def reward(self, task):
        return 1.0
"#;
    let (bad, _dir) = factory(source, Sizes::default());
    let report = CheckReport::of(&bad, &[task(json!({"answer": "secret"}))]).await;
    let warned = report
        .checks
        .iter()
        .filter(|c| c.finding == Finding::Warning);
    let warned: Vec<_> = warned.map(|c| c.name).collect();
    let expected = ["leaks", "null", "random", "no_tool", "odd", "determinism"];
    assert_eq!(warned, expected);
}

#[test]
fn modules_find_their_neighbours() {
    let dir = folder();
    let root = dir.path();
    std::fs::create_dir(root.join("game")).unwrap();
    for (file, text) in [
        ("__init__.py", ""),
        ("words.py", "WORDS = ['tea']"),
        (
            "env.py",
            "from game.words import WORDS\nclass E:\n    def step(self, text): return WORDS[0]",
        ),
    ] {
        std::fs::write(root.join("game").join(file), text).unwrap();
    }
    let workers = in_folder(root, "game.env:E", TargetKind::Env, Sizes::default()).unwrap();
    assert!(PythonEnvFactory::new(workers, 0, "game.env:E").is_ok());
}

const NOTES: &str = r#"
import os
from sinew import Env, tool

class E(Env):
    def start(self, task):
        self.notes = []

    @tool
    def note(self, text: str) -> int:
        self.notes.append(text)
        return len(self.notes)

    @tool
    def die(self):
        os._exit(1)

    def snapshot(self):
        return self.notes

    def restore(self, snapshot):
        self.notes = snapshot

    def reward(self, calls, messages):
        return {"reward": len(self.notes), "calls": len(calls), "messages": len(messages)}
"#;

#[tokio::test]
async fn an_episode_with_snapshots_survives_the_end_of_its_worker() {
    let (factory, _dir) = factory(NOTES, Sizes::default());
    let mut env = factory.create(&task(json!({}))).unwrap();
    let mut other = factory.create(&task(json!({}))).unwrap();
    env.reset().await.unwrap();
    other.reset().await.unwrap();
    let note = || calls(vec![call("a", "note", json!({"text": "x"}))]);
    env.step(note()).await.unwrap();
    // A call that ends its worker is tried twice, and fails its own episode.
    let die = calls(vec![call("b", "die", json!({}))]);
    let error = other.step(die).await.unwrap_err().to_string();
    assert!(error.contains("its Python worker ended"), "{error}");
    let step = env.step(note()).await.unwrap();
    assert_eq!(step.observation.unwrap().content.text(), "2");
    let outcome = env.score().await.unwrap();
    assert_eq!((outcome.reward, outcome.metrics["calls"]), (2.0, 2.0));
    assert_eq!(outcome.metrics["messages"], 5.0);
    env.close().await.unwrap();
    let _ = other.close().await;
}

#[tokio::test]
async fn the_check_compares_episodes_with_their_snapshots() {
    let source = NOTES.replace("os._exit(1)", "pass");
    for (source, finding) in [
        (source.clone(), Finding::Ok),
        (
            source.replace("return self.notes", "return []"),
            Finding::Error,
        ),
    ] {
        let (factory, _dir) = factory(&source, Sizes::default());
        let tasks: Vec<_> = (0..6).map(|i| task(json!({"i": i}))).collect();
        let report = CheckReport::of(&factory, &tasks).await;
        let check = report
            .checks
            .iter()
            .find(|c| c.name == "snapshots")
            .unwrap();
        assert_eq!(check.finding, finding, "{check:?}");
    }
    let half = NOTES.replace("def restore(self, snapshot)", "def other(self, snapshot)");
    let error = workers(&half, (TargetKind::Env, "E"), Sizes::default()).unwrap_err();
    assert!(error.to_string().contains("belong together"), "{error}");
}

#[tokio::test]
async fn values_that_are_no_json_say_so_and_harm_no_other_call() {
    let source = "from sinew import Env\nclass E(Env):\n    def start(self, task):\n        \
        return [{'role': 'user', 'content': task.get('said') or {1, 2}}]\n    \
        def step(self, text): return text\n";
    let (factory, _dir) = factory(source, Sizes::default());
    let mut env = factory.create(&task(json!({}))).unwrap();
    let error = env.reset().await.unwrap_err().to_string();
    assert!(error.contains("is no JSON: Object of type set"), "{error}");
    let _ = env.close().await;
    let mut env = factory.create(&task(json!({"said": "hi"}))).unwrap();
    assert_eq!(env.reset().await.unwrap().messages[0].content.text(), "hi");
    env.close().await.unwrap();
}

/// A class whose tools depend on the task, and continue with a snapshot.
const OFFERS: &str = r#"
from sinew import Env, ToolError, tool

class E(Env):
    def start(self, task):
        self.names, self.seen = list(task.names), []

    def offered(self):
        for name in self.names:
            def call(arguments, name=name):
                if "x" not in arguments:
                    raise ToolError("x is missing")
                self.seen.append(name)
                return "%s %s" % (name, arguments["x"])
            yield {"name": name, "description": "Says it.", "parameters": {"type": "object"}, "call": call}

    @tool
    def fixed(self):
        return "fixed"

    def reward(self):
        return float(self.seen == self.names)
"#;

#[tokio::test]
async fn an_episode_has_tools_of_its_own() {
    let (factory, _dir) = factory(OFFERS, Sizes::default());
    let mut env = factory.create(&task(json!({"names": ["a", "b"]}))).unwrap();
    let reset = env.reset().await.unwrap();
    let names: Vec<_> = reset.tools.iter().map(|t| t.name.as_str()).collect();
    assert_eq!(names, ["fixed", "a", "b"]);
    let turn = calls(vec![
        call("1", "a", json!({"x": 1})),
        call("2", "b", json!({})),
        call("3", "b", json!([])),
        call("4", "b", json!({"x": 2})),
        call("5", "c", json!({})),
    ]);
    let step = env.step(turn).await.unwrap();
    let text = step.observation.unwrap().content.text().into_owned();
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines[0], "a 1");
    assert_eq!(lines[1], "Error: x is missing");
    assert!(lines[2].contains("are no object"), "{text}");
    assert_eq!(lines[3], "b 2");
    assert!(lines[4].ends_with("the tools are: fixed, a, b"), "{text}");
    assert!(env.score().await.unwrap().success);
    env.close().await.unwrap();
    for (names, said) in [
        (json!(["fixed"]), "two tools are called fixed"),
        (json!([""]), "a tool's name has 1 to 128 characters"),
        (
            json!([7]),
            "expected dicts with name, description, parameters",
        ),
    ] {
        let mut env = factory.create(&task(json!({"names": names}))).unwrap();
        let error = env.reset().await.unwrap_err().to_string();
        assert!(error.contains(said), "{error}");
        env.close().await.unwrap();
    }
}
