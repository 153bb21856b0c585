//! Python functions as rewards.

use crate::support::{Sizes, call, calls, factory, reward, sample, task, workers};
use serde_json::json;
use sinew_bridge::{PythonReward, TargetKind};
use sinew_env::{EnvFactory, GroupReward, Preference, Reward, Rewarded, Score};
use std::sync::Arc;
use std::time::Duration;

async fn score(function: &PythonReward, output: &str) -> Result<Score, String> {
    let sample = sample(output, json!({"answer": "42"}));
    function.score(&sample).await.map_err(|u| u.reason)
}

#[tokio::test]
async fn arguments_are_bound_by_name() {
    for (source, value) in [
        (
            "def f(output, answer): return output.strip() == answer",
            1.0,
        ),
        (
            "async def f(answer, output): return float(answer in output)",
            1.0,
        ),
        (
            "def f(task): return {'reward': task.answer == '42', 'length': 3}",
            1.0,
        ),
        ("def f(messages): return messages[-1].content == ' 42'", 1.0),
        (
            "def f(calls, metrics): return metrics['turns'] * (calls[0].arguments['item'] == 'tea')",
            2.0,
        ),
        ("def f(**all): return len(all['prompt'])", 8.0),
        ("def f(seed, missing=2): return seed + missing", 9.0),
    ] {
        let (function, _dir) = reward(source, Sizes::default());
        let got = score(&function, " 42").await;
        assert_eq!(
            got.unwrap_or_else(|e| panic!("{source}: {e}")).value,
            value,
            "{source}"
        );
        function.check(&["answer"]).unwrap();
    }
}

/// A basket that ends its episode when it is full; its state fails when it is asked for too late.
const BASKET: &str = r#"
from sinew import Done, tool


class E:
    def start(self, limit):
        self.items, self.limit = [], limit

    @tool
    def add(self, item: str):
        self.items.append(item)
        return Done("full") if len(self.items) == self.limit else "added"

    def state(self):
        return {"items": self.items, "secret": 1 // (3 - len(self.items))}

    def reward(self):
        return len(self.items) / 4
"#;

#[tokio::test]
async fn a_reward_reads_the_end_of_the_environment() {
    let source =
        "def f(env): return {'reward': len(env.state['items']) + env.reward, 'own': env.success}";
    let (function, _reward_dir) = reward(source, Sizes::default());
    function.check(&[]).unwrap();
    let (inner, _env_dir) = factory(BASKET, Sizes::default());
    let factory = Rewarded::new(Arc::new(inner), Arc::new(function));
    // The state cannot be had for three items: the function fails, the episode does not.
    for (limit, reward) in [(1, Some(1.25)), (2, Some(2.5)), (3, None)] {
        let mut env = factory.create(&task(json!({"limit": limit}))).unwrap();
        env.reset().await.unwrap();
        let mut last = None;
        for n in 0..limit {
            let add = call(&format!("c{n}"), "add", json!({"item": "tea"}));
            last = Some(env.step(calls(vec![add])).await.unwrap());
        }
        env.close().await.unwrap();
        let outcome = last.unwrap().outcome.unwrap();
        assert_eq!(
            (!outcome.unscored).then_some(outcome.reward),
            reward,
            "{outcome:?}"
        );
        assert_eq!(outcome.metrics["env/reward"], f64::from(limit) / 4.0);
    }
}

#[tokio::test]
async fn a_missing_score_names_its_cause_and_place() {
    let hang = "import asyncio, time\ndef f(output): time.sleep(60)";
    let wait = "import asyncio\nasync def f(output): await asyncio.sleep(60)";
    let unscored = "from sinew import Unscored\ndef f(output): raise Unscored('judge down')";
    for (source, timeout_s, said) in [
        (
            "def f(output):\n    return 1 / 0",
            60.0,
            "user.py:2: ZeroDivisionError: division by zero",
        ),
        ("def f(output): return None", 60.0, "it returned None"),
        (
            "def f(output): return 'yes'",
            60.0,
            "user.py:1: the reward is of type str",
        ),
        ("def f(output): return float('inf')", 60.0, "finite"),
        (unscored, 60.0, "judge down"),
        (hang, 0.5, "user.py:2: it took longer than 0.5 s"),
        (wait, 0.5, "user.py:2: it took longer than 0.5 s"),
        (
            "import os\ndef f(output): os._exit(4)",
            60.0,
            "its Python worker ended: exited 4",
        ),
        ("def f(output): exit()", 60.0, "SystemExit"),
        ("def f(nothing): return 1", 60.0, "valid names: "),
    ] {
        let (function, _dir) = reward(source, Sizes::within(timeout_s));
        let reason = score(&function, "x").await.unwrap_err();
        assert!(reason.contains(said), "{source}: {reason}");
    }
}

#[test]
fn unknown_names_are_refused_before_any_sample() {
    let (function, _dir) = reward("def f(output, anwser): return 1", Sizes::default());
    let error = function.check(&["answer"]).unwrap_err().to_string();
    assert!(error.contains("user.py:1: the parameter anwser"), "{error}");
    assert!(error.contains("did you mean `answer`?"), "{error}");
    assert!(
        error.contains("valid names: a, answer, b, calls, "),
        "{error}"
    );
    for (typed, meant) in [
        ("outputs", Some("output")),
        ("messsages", Some("messages")),
        ("cals", Some("calls")),
        ("gruop", Some("group")),
        ("x", None),
        ("nothing", None),
    ] {
        let source = format!("def f({typed}): return 1");
        let (function, _dir) = reward(&source, Sizes::default());
        let error = function.check(&["answer"]).unwrap_err().to_string();
        let said = meant.map_or("tasks; valid names".into(), |m| {
            format!("did you mean `{m}`?")
        });
        assert!(error.contains(&said), "{error}");
    }
    for (source, said) in [
        ("f = 3", "is no function"),
        ("def f(*a): 1", "parameter a of f has no name"),
    ] {
        let error = workers(source, (TargetKind::Reward, "f"), Sizes::default()).unwrap_err();
        assert!(error.to_string().contains(said), "{error}");
    }
}

#[tokio::test]
async fn group_rewards_score_all_members_at_once() {
    let source = "def f(group, answer):\n    return [len(g.output) or None for g in group if answer == '42']";
    let (function, _dir) = reward(source, Sizes::default());
    assert!(function.is_group());
    let samples = ["a", "", "ccc"].map(|output| sample(output, json!({"answer": "42"})));
    let scores = function.score_group(&samples).await;
    assert_eq!(scores[0].as_ref().unwrap().value, 1.0);
    assert!(
        scores[1]
            .as_ref()
            .unwrap_err()
            .reason
            .contains("it returned None")
    );
    assert_eq!(scores[2].as_ref().unwrap().value, 3.0);
    let (short, _dir) = reward("def f(group): return [1.0]", Sizes::default());
    let scores = short.score_group(&samples).await;
    assert_eq!(scores.len(), 3);
    let reason = &scores[2].as_ref().unwrap_err().reason;
    assert!(
        reason.contains("1 values for a group of 3 samples"),
        "{reason}"
    );
}

#[tokio::test]
async fn one_bad_sample_harms_no_other() {
    let source = "import os\nasync def f(output):\n    if output == 'bad': os._exit(1)\n    \
                  return len(output)";
    let sizes = Sizes {
        workers: 2,
        ..Sizes::default()
    };
    let (function, _dir) = reward(source, sizes);
    let output = |i| if i == 50 { "bad" } else { "good" };
    let samples: Vec<_> = (0..100).map(|i| sample(output(i), json!({}))).collect();
    let scores = futures::future::join_all(samples.iter().map(|s| function.score(s))).await;
    for (i, score) in scores.iter().enumerate() {
        assert_eq!(score.is_ok(), i != 50, "{i}: {score:?}");
    }
}

#[tokio::test]
async fn two_samples_are_compared_in_words_or_as_a_probability() {
    let pair = ["long", "no"].map(|output| sample(output, json!({"answer": "42"})));
    for (source, said) in [
        (
            "def f(a, b): return a if len(a.output) > len(b.output) else b",
            Ok(1.0),
        ),
        (
            "def f(a, b, answer): return 'b' if answer == '42' else 'a'",
            Ok(0.0),
        ),
        ("async def f(a, b): return 0.25", Ok(0.25)),
        (
            "def f(a, b): return a.calls[0].arguments['item'] == 'tea'",
            Ok(1.0),
        ),
        ("def f(a, b): return None", Err("it returned None")),
        (
            "def f(a, b): return 'c'",
            Err("user.py:1: it returned str: return a, b, a probability"),
        ),
        (
            "def f(a, b): return 1.5",
            Err("the probability of a is 0 to 1"),
        ),
        ("def f(a, b): return 1 / 0", Err("ZeroDivisionError")),
    ] {
        let (function, _dir) = reward(source, Sizes::default());
        assert!(
            function.compares(&["answer"]) && !function.compares(&["a"]),
            "{source}"
        );
        function.check(&["answer"]).unwrap();
        match (function.prefer(&pair[0], &pair[1]).await, said) {
            (Ok(p), Ok(expected)) => assert_eq!(p, expected, "{source}"),
            (Err(e), Err(expected)) => assert!(e.reason.contains(expected), "{source}: {e}"),
            (got, _) => panic!("{source}: {got:?}"),
        }
    }
}

#[test]
fn functions_of_several_samples_find_outputs_in_the_members() {
    let (function, _dir) = reward("def f(group, output): return group", Sizes::default());
    let error = function.check(&[]).unwrap_err().to_string();
    assert!(error.contains("the parameter output"), "{error}");
    assert!(error.contains("group, id, kind"), "{error}");
}

#[tokio::test]
async fn a_deadline_of_its_own_holds_for_one_function() {
    for source in [
        "import time\ndef f(output): time.sleep(60)",
        "import asyncio\nasync def f(output): await asyncio.sleep(60)",
    ] {
        let (function, _dir) = reward(source, Sizes::default());
        let function = function.with_timeout(Duration::from_millis(300));
        let reason = score(&function, "x").await.unwrap_err();
        assert!(reason.contains("it took longer than 0.3 s"), "{reason}");
    }
}

/// A coroutine that holds the event loop harms no other one.
#[tokio::test]
async fn a_neighbour_that_blocks_does_not_make_others_late() {
    let source = "import asyncio, time\nasync def f(output):\n    if output == 'bad': time.sleep(60)\n    \
                  await asyncio.sleep(0.2)\n    return 1.0";
    let (function, _dir) = reward(source, Sizes::within(4.0));
    let output = |i| if i == 3 { "bad" } else { "good" };
    let samples: Vec<_> = (0..8).map(|i| sample(output(i), json!({}))).collect();
    let scores = futures::future::join_all(samples.iter().map(|s| function.score(s))).await;
    for (i, score) in scores.iter().enumerate() {
        assert_eq!(score.is_ok(), i != 3, "{i}: {score:?}");
    }
}

/// A caller that gives up ends what it asked for, and the worker takes the next call.
#[tokio::test]
async fn a_call_that_is_given_up_does_not_go_on() {
    let plain =
        "import time\ndef f(output):\n    if output == 'slow': time.sleep(60)\n    return 1.0";
    let wait = "import asyncio\nLEFT = []\nasync def f(output):\n    if output == 'slow':\n        \
                try: await asyncio.sleep(60)\n        finally: LEFT.append(1)\n    \
                return float(len(LEFT) if output == 'left' else 1)";
    for source in [plain, wait] {
        // One worker: a call that keeps running would hold it until its deadline.
        let (function, _dir) = reward(source, Sizes::within(120.0));
        let slow = tokio::time::timeout(Duration::from_secs(1), score(&function, "slow"));
        assert!(slow.await.is_err(), "{source}");
        let next = tokio::time::timeout(Duration::from_secs(60), score(&function, "left"));
        assert_eq!(next.await.unwrap().unwrap().value, 1.0, "{source}");
    }
}

#[tokio::test]
async fn entries_of_a_score_are_bounded() {
    for (source, said) in [
        (
            "def f(output): return dict({str(i): 1.0 for i in range(65)}, reward=1.0)",
            "allowed: 64",
        ),
        (
            "def f(output): return {'reward': 1.0, 'x' * 101: 1.0}",
            "longer than 100 bytes",
        ),
    ] {
        let (function, _dir) = reward(source, Sizes::default());
        let reason = score(&function, "x").await.unwrap_err();
        assert!(reason.contains(said), "{reason}");
    }
}

/// Code that does not load is reported to all that wait for it, after one start.
#[tokio::test]
async fn callers_share_the_error_of_a_start() {
    let source = "import os\nif os.path.exists('/code/0/gone'): raise ValueError('no model')\n\
                  def f(output): os._exit(1)";
    let (function, dir) = reward(source, Sizes::default());
    std::fs::write(dir.path().join("gone"), "").unwrap();
    score(&function, "x").await.unwrap_err();
    let samples: Vec<_> = (0..20).map(|_| sample("x", json!({}))).collect();
    let scores = futures::future::join_all(samples.iter().map(|s| function.score(s))).await;
    for score in scores {
        let reason = score.unwrap_err().reason;
        assert!(reason.contains("ValueError: no model"), "{reason}");
    }
}
