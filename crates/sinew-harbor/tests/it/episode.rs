//! Episodes in machines of the test: order of the stages, what the verifier sees, what has no score.

use crate::fake::{Answer, Files, Run, World, exited};
use crate::folders::{file, task};
use sinew_env::{Action, Env, EnvFactory, HostedProgram, ImageSource, MachineNetwork, StepResult};
use sinew_harbor::Harbor;
use sinew_sandbox::Ending;
use sinew_types::{Outcome, Task, TaskId, ToolCall};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

const REWARD: &str = "/logs/verifier/reward.txt";

fn row(folder: &Path) -> Task {
    Task {
        id: TaskId::new("harbor/train/one"),
        kind: "one".into(),
        preamble: Vec::new(),
        prompt: String::new(),
        data: serde_json::json!({ "folder": folder }),
        seed: 0,
    }
}

/// A task with an image, and more keys.
fn with_image(folder: &Path, keys: &str) {
    task(folder, keys);
    file(&folder.join("environment/Dockerfile"), "FROM a\nRUN true\n");
}

fn start(world: &Arc<World>, folder: &Path) -> Box<dyn Env> {
    let keys = Harbor::new(folder.to_string_lossy());
    let factory = keys.environments(world.sandboxes());
    factory.create(&row(folder)).unwrap()
}

fn call(script: &str) -> Action {
    let call = ToolCall {
        id: "c1".into(),
        name: "shell".into(),
        arguments: serde_json::json!({ "command": script }),
    };
    Action {
        tool_calls: vec![call],
        ..Action::say("")
    }
}

fn text(step: &StepResult) -> String {
    let observation = step.observation.as_ref().unwrap();
    observation.content.text().into_owned()
}

/// A verifier that writes a reward, beside programs that end well.
fn rewards(value: &'static str) -> impl FnMut(&Run, &mut Files) -> Answer + Send {
    move |run, files| {
        if run.is_verifier() {
            files.insert(REWARD.into(), value.into());
        }
        exited(0, "")
    }
}

/// Plays an episode without a call, and closes it.
async fn outcome(world: &Arc<World>, folder: &Path) -> Outcome {
    let mut env = start(world, folder);
    env.reset().await.unwrap();
    let step = env.step(Action::say("Done.")).await.unwrap();
    env.close().await.unwrap();
    step.outcome.unwrap()
}

#[tokio::test]
async fn tests_come_after_the_agent_and_planted_rewards_go() {
    let dir = tempfile::tempdir().unwrap();
    let keys = "[environment]\ncpus = 2\nmemory_mb = 64\nenv = { A = \"1\" }\n[verifier]\nenv = { B = \"2\" }\n";
    with_image(dir.path(), keys);
    let world = World::new(|run, files| {
        if !run.is_verifier() {
            let tests = files.keys().any(|path| path.starts_with("/tests"));
            assert!(!tests, "the agent sees the tests");
            files.insert(REWARD.into(), "1".into());
            files.insert("/tests/conftest.py".into(), "cheat".into());
            return exited(3, "worked\n");
        }
        assert!(files.contains_key("/tests/test.sh"));
        assert!(!files.contains_key(REWARD) && !files.contains_key("/tests/conftest.py"));
        assert_eq!(
            (run.user.as_deref(), run.env["B"].as_str()),
            (Some("root"), "2")
        );
        assert_eq!(run.deadline, Duration::from_secs(600));
        files.insert("/logs/artifacts/notes.txt".into(), "n".into());
        files.insert(REWARD.into(), "0.25\n".into());
        files.insert(
            "/logs/verifier/test-stdout.txt".into(),
            "one failed\n".into(),
        );
        exited(1, "")
    });
    let mut env = start(&world, dir.path());
    let reset = env.reset().await.unwrap();
    let texts: Vec<_> = reset.messages.iter().map(|m| m.content.text()).collect();
    assert!(
        texts[0].contains("/app") && texts[1] == "Do it.",
        "{texts:?}"
    );
    let step = env.step(call("work")).await.unwrap();
    assert_eq!(text(&step), "worked\n[exit code 3]");
    let wrong = env.step(call(" ")).await.unwrap();
    assert!(wrong.observation.unwrap().is_error);
    let step = env.step(Action::say("Done.")).await.unwrap();
    let outcome = step.outcome.unwrap();
    assert_eq!(
        (outcome.reward, outcome.success, outcome.unscored),
        (0.25, false, false)
    );
    assert_eq!(outcome.metrics["tool_calls"], 2.0);
    assert_eq!(outcome.metrics["tool_errors"], 1.0);
    assert_eq!(env.end_state().unwrap()["output"], "one failed\n");
    assert!(world.file(0, "/tests/test.sh").is_none());
    let spec = world.specs.lock().unwrap()[0].clone();
    assert_eq!((spec.cpus, spec.memory_bytes), (Some(2.0), Some(64 << 20)));
    assert_eq!(spec.network, MachineNetwork::Recipe);
    env.close().await.unwrap();
}

#[tokio::test]
async fn a_missing_or_broken_reward_is_unscored_and_never_zero() {
    let dir = tempfile::tempdir().unwrap();
    with_image(dir.path(), "");
    for (value, why) in [
        ("", "reward.txt is empty"),
        ("high", "not a finite number"),
        ("nan", "not a finite number"),
    ] {
        let outcome = outcome(&World::new(rewards(value)), dir.path()).await;
        assert!(outcome.unscored, "{value}");
        assert!(outcome.unscored_reason.unwrap().contains(why), "{value}");
    }
    let silent = World::new(|run, _| exited(i32::from(run.is_verifier()), "no pytest here"));
    let outcome = outcome(&silent, dir.path()).await;
    let why = outcome.unscored_reason.unwrap();
    assert!(
        why.contains("neither") && why.contains("no pytest here"),
        "{why}"
    );
}

#[tokio::test]
async fn named_rewards_are_metrics() {
    let dir = tempfile::tempdir().unwrap();
    with_image(dir.path(), "");
    let world = World::new(|run, files| {
        if run.is_verifier() {
            let json = r#"{"reward": 1, "style": 0.5}"#;
            files.insert("/logs/verifier/reward.json".into(), json.into());
            files.insert(REWARD.into(), "0".into());
        }
        exited(0, "")
    });
    let outcome = outcome(&world, dir.path()).await;
    assert_eq!((outcome.reward, outcome.success), (1.0, true));
    assert_eq!(outcome.metrics["style"], 0.5);
}

#[tokio::test(start_paused = true)]
async fn a_verifier_that_is_late_gives_no_score() {
    let dir = tempfile::tempdir().unwrap();
    with_image(dir.path(), "[verifier]\ntimeout_sec = 5\n");
    let world = World::new(|run, files| {
        let seconds = if run.is_verifier() { 9 } else { 0 };
        files.insert(REWARD.into(), "1".into());
        (
            Duration::from_secs(seconds),
            Ending::Exited { code: 0 },
            String::new(),
        )
    });
    let outcome = outcome(&world, dir.path()).await;
    let why = outcome.unscored_reason.unwrap();
    assert!(why.contains("longer than 5 s"), "{why}");
}

#[tokio::test(start_paused = true)]
async fn the_time_of_the_agent_ends_with_the_verifier() {
    let dir = tempfile::tempdir().unwrap();
    with_image(dir.path(), "[agent]\ntimeout_sec = 10\n");
    let world = World::new(|run, files| {
        if run.is_verifier() {
            files.insert(REWARD.into(), "1".into());
            return exited(0, "");
        }
        (
            Duration::from_secs(8),
            Ending::Exited { code: 0 },
            String::new(),
        )
    });
    let mut env = start(&world, dir.path());
    env.reset().await.unwrap();
    assert!(!env.step(call("slow")).await.unwrap().done);
    let step = env.step(call("slow")).await.unwrap();
    let outcome = step.outcome.unwrap();
    assert_eq!(
        (outcome.reward, outcome.metrics["agent_timeout"]),
        (1.0, 1.0)
    );
    let runs = world.runs.lock().unwrap();
    let seconds = runs.iter().map(|run| run.deadline.as_secs_f64().round());
    let deadlines: Vec<f64> = seconds.collect();
    assert_eq!(deadlines, [10.0, 2.0, 600.0]);
}

#[tokio::test(start_paused = true)]
async fn a_limit_of_the_rollout_leaves_the_place_to_the_verifier() {
    let dir = tempfile::tempdir().unwrap();
    with_image(dir.path(), "");
    let world = World::new(|run, files| {
        if run.is_verifier() {
            assert!(
                files.contains_key("/app/late"),
                "the command was not waited for"
            );
            files.insert(REWARD.into(), "1".into());
            return exited(0, "");
        }
        files.insert("/app/late".into(), Vec::new());
        (
            Duration::from_secs(30),
            Ending::Exited { code: 0 },
            String::new(),
        )
    });
    let mut env = start(&world, dir.path());
    env.reset().await.unwrap();
    let step = tokio::time::timeout(Duration::from_secs(5), env.step(call("slow"))).await;
    assert!(step.is_err());
    let outcome = env.score().await.unwrap();
    assert_eq!((outcome.reward, outcome.unscored), (1.0, false));
    assert_eq!(world.runs.lock().unwrap().len(), 2);
    env.close().await.unwrap();
}

#[tokio::test]
async fn steps_follow_each_other_in_one_machine() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path();
    let keys = "[[steps]]\nname = \"one\"\nmin_reward = 0.5\n[[steps]]\nname = \"two\"\n";
    with_image(root, keys);
    for step in ["one", "two"] {
        let text = format!("Do {step}.");
        file(&root.join("steps").join(step).join("instruction.md"), &text);
    }
    file(&root.join("steps/two/workdir/setup.sh"), "true\n");
    for (value, steps, reward) in [("0.75", 2, 0.75), ("0.25", 1, 0.25)] {
        let world = World::new(rewards(value));
        let mut env = start(&world, root);
        let reset = env.reset().await.unwrap();
        assert_eq!(reset.messages.last().unwrap().content, "Do one.");
        let mut step = env.step(Action::say("Done.")).await.unwrap();
        if steps == 2 {
            assert_eq!((text(&step).as_str(), step.done), ("Do two.", false));
            let messages = env.format_observation(step.observation.as_ref().unwrap());
            assert_eq!(messages.len(), 1);
            assert!(world.file(0, "/app/setup.sh").is_some());
            step = env.step(Action::say("Done.")).await.unwrap();
        }
        let outcome = step.outcome.unwrap();
        assert_eq!(
            (outcome.reward, outcome.metrics["steps_done"]),
            (reward, f64::from(steps))
        );
        assert_eq!(world.specs.lock().unwrap().len(), 1);
    }
}

#[tokio::test]
async fn a_separate_verifier_gets_artifacts_and_nothing_else() {
    let dir = tempfile::tempdir().unwrap();
    let keys = "artifacts = [\"/data/out.txt\"]\n[verifier]\nenvironment_mode = \"separate\"\n\
                [[verifier.collect]]\ncommand = \"dump\"\n";
    with_image(dir.path(), keys);
    file(&dir.path().join("tests/Dockerfile"), "FROM judge\n");
    let world = World::new(|run, files| {
        if run.is_verifier() {
            assert_eq!(run.machine, 1);
            let seen: Vec<&str> = files.keys().map(String::as_str).collect();
            assert_eq!(seen, ["/data/out.txt", "/logs/artifacts/a.txt"]);
            files.insert(REWARD.into(), "1".into());
        } else if run.argv.last().is_some_and(|word| word == "dump") {
            files.insert("/data/out.txt".into(), "state".into());
            files.insert("/logs/artifacts/a.txt".into(), "a".into());
            files.insert("/data/secret".into(), "s".into());
        }
        exited(0, "")
    });
    let outcome = outcome(&world, dir.path()).await;
    assert_eq!((outcome.reward, outcome.unscored), (1.0, false));
    let sources = world.sources.lock().unwrap();
    let folders = ["environment", "tests"].map(|name| ImageSource::Build {
        context: dir.path().join(name),
        dockerfile: "Dockerfile".into(),
    });
    assert_eq!(*sources, folders);
}

#[tokio::test]
async fn plain_tasks_share_the_machine_image_of_their_base() {
    let dir = tempfile::tempdir().unwrap();
    let environment = dir.path().join("environment");
    let text = "FROM base:1\nENV A=1\nWORKDIR /srv\nCOPY files/ sub/\nCOPY files/ ./\n";
    file(&environment.join("files/in.txt"), "in");
    file(&environment.join("Dockerfile"), text);
    let built = ImageSource::Build {
        context: environment.clone(),
        dockerfile: "Dockerfile".into(),
    };
    for (keys, source) in [
        ("", ImageSource::Named("base:1".into())),
        ("[environment]\nworkdir = \"/other\"\n", built.clone()),
    ] {
        task(dir.path(), keys);
        let world = World::new(rewards("1"));
        assert!(outcome(&world, dir.path()).await.success);
        assert_eq!(
            *world.sources.lock().unwrap(),
            std::slice::from_ref(&source)
        );
        let shared = source != built;
        for path in ["/srv/sub/in.txt", "/srv/in.txt"] {
            let put = world.file(0, path);
            assert_eq!(put.as_deref(), shared.then_some("in"), "{path}");
        }
        let specs = world.specs.lock().unwrap();
        let variable = ("A".to_owned(), "1".to_owned());
        assert_eq!(specs[0].env.contains(&variable), shared);
        assert_eq!(specs[0].workdir.as_deref() == Some("/srv"), shared);
    }
    task(dir.path(), "");
    file(&environment.join(".dockerignore"), "files/secret\n");
    let world = World::new(rewards("1"));
    assert!(outcome(&world, dir.path()).await.success);
    assert_eq!(*world.sources.lock().unwrap(), [built]);
}

#[tokio::test]
async fn the_user_of_the_image_runs_the_tests_where_the_task_names_none() {
    for (keys, user) in [("", "dev"), ("[verifier]\nuser = \"judge\"\n", "judge")] {
        let dir = tempfile::tempdir().unwrap();
        with_image(dir.path(), keys);
        let world = World::new(rewards("1"));
        *world.user.lock().unwrap() = "dev".into();
        assert!(outcome(&world, dir.path()).await.success);
        let runs = world.runs.lock().unwrap();
        let tests = runs.iter().find(|run| run.is_verifier()).unwrap();
        assert_eq!(tests.user.as_deref(), Some(user));
    }
}

#[tokio::test]
async fn artifacts_leave_files_out_and_are_kept_at_their_destination() {
    let dir = tempfile::tempdir().unwrap();
    let keys = "[[artifacts]]\nsource = \"/data\"\ndestination = \"result\"\nexclude = [\"*.tmp\", \"cache\"]\n\
                [[artifacts]]\nsource = \"notes.md\"\n[verifier]\nenvironment_mode = \"separate\"\n";
    let task = dir.path().join("task");
    with_image(&task, keys);
    file(&task.join("tests/Dockerfile"), "FROM judge\n");
    let world = World::new(|run, files| {
        if run.is_verifier() {
            let seen: Vec<&str> = files.keys().map(String::as_str).collect();
            let put = ["/app/notes.md", "/data/out.txt", "/logs/artifacts/a.txt"];
            assert_eq!(seen, put, "the destination is for the host");
            files.insert(REWARD.into(), "1".into());
            return exited(0, "");
        }
        for path in [
            "/data/out.txt",
            "/data/x.tmp",
            "/data/cache/y",
            "/app/notes.md",
            "/logs/artifacts/a.txt",
        ] {
            files.insert(path.into(), path.into());
        }
        exited(0, "")
    });
    let kept = dir.path().join("kept");
    let keys = Harbor {
        artifacts: kept.to_string_lossy().into_owned(),
        ..Harbor::new(task.to_string_lossy())
    };
    let factory = keys.environments(world.sandboxes());
    let mut env = factory.create(&row(&task)).unwrap();
    env.reset().await.unwrap();
    env.step(call("work")).await.unwrap();
    let step = env.step(Action::say("Done.")).await.unwrap();
    assert_eq!(step.outcome.unwrap().reward, 1.0);
    let state = env.end_state().unwrap().clone();
    let paths = state["artifacts"].as_array().unwrap().iter();
    let paths: Vec<&str> = paths.map(|f| f["path"].as_str().unwrap()).collect();
    let expected = ["logs/artifacts/a.txt", "result/out.txt", "app/notes.md"];
    assert_eq!(paths, expected);
    let folder = kept.join("harbor-train-one.0");
    for path in expected {
        assert!(folder.join(path).is_file(), "{path}");
    }
    assert!(!folder.join("result/cache").exists());
}

#[tokio::test]
async fn named_artifacts_of_a_shared_verifier_are_copied_only_to_be_kept() {
    let dir = tempfile::tempdir().unwrap();
    let task = dir.path().join("task");
    with_image(&task, "artifacts = [\"/data/out.txt\"]\n");
    for keep in [false, true] {
        let world = World::new(|run, files| {
            if run.is_verifier() {
                files.insert(REWARD.into(), "1".into());
            } else {
                files.insert("/data/out.txt".into(), "x".into());
            }
            exited(0, "")
        });
        let kept = dir.path().join("kept");
        let mut keys = Harbor::new(task.to_string_lossy());
        if keep {
            keys.artifacts = kept.to_string_lossy().into_owned();
        }
        let factory = keys.environments(world.sandboxes());
        let mut env = factory.create(&row(&task)).unwrap();
        env.reset().await.unwrap();
        env.step(call("work")).await.unwrap();
        env.step(Action::say("Done.")).await.unwrap();
        let out = kept.join("harbor-train-one.0/data/out.txt");
        assert_eq!(out.is_file(), keep);
    }
}

#[tokio::test]
async fn a_conversation_comes_before_the_instruction() {
    let dir = tempfile::tempdir().unwrap();
    with_image(dir.path(), "");
    let said = r#"{"schema_version": "ATIF-v1.8", "steps": [
        {"step_id": 1, "source": "user", "message": "Look."},
        {"step_id": 2, "source": "agent", "message": "I looked."}]}"#;
    file(&dir.path().join("trajectory.json"), said);
    let world = World::new(rewards("1"));
    let mut env = start(&world, dir.path());
    let reset = env.reset().await.unwrap();
    let texts: Vec<_> = reset.messages.iter().map(|m| m.content.text()).collect();
    assert_eq!(texts[1..], ["Look.", "I looked.", "Do it."]);
}

#[tokio::test]
async fn a_command_of_collect_that_fails_leaves_no_score() {
    let dir = tempfile::tempdir().unwrap();
    with_image(dir.path(), "[[verifier.collect]]\ncommand = \"dump\"\n");
    let world = World::new(|run, _| {
        assert!(!run.is_verifier(), "it would judge an older state");
        exited(2, "no database")
    });
    let outcome = outcome(&world, dir.path()).await;
    let why = outcome.unscored_reason.unwrap();
    assert!(
        why.contains("collect") && why.contains("no database"),
        "{why}"
    );
}

#[tokio::test]
async fn a_program_works_in_the_machine_of_its_task() {
    let dir = tempfile::tempdir().unwrap();
    with_image(
        dir.path(),
        "[agent]\nuser = \"dev\"\n[environment]\nnetwork_mode = \"no-network\"\n",
    );
    let world = World::new(rewards("1"));
    let keys = Harbor::new(dir.path().to_string_lossy());
    let factory = keys.environments(world.sandboxes());
    assert!(factory.hosts_programs(&row(dir.path())));
    let mut env = factory.create(&row(dir.path())).unwrap();
    assert!(env.host().is_none(), "it has not started");
    env.reset().await.unwrap();
    let program = HostedProgram {
        argv: vec!["/agents/run".into()],
        env: vec![("KEY".into(), "k".into())],
        deadline: Duration::from_secs(5),
    };
    let done = env.host().unwrap().run(program).await.unwrap();
    assert_eq!(done.ending, Ending::Exited { code: 0 });
    let outcome = env.step(Action::say("answer")).await.unwrap().outcome;
    assert!(outcome.unwrap().success);
    let runs = world.runs.lock().unwrap();
    let run = runs.iter().find(|run| run.argv == ["/agents/run"]).unwrap();
    assert_eq!(
        (run.user.as_deref(), run.env["KEY"].as_str()),
        (Some("dev"), "k")
    );
    assert!(run.env.contains_key("SINEW_AGENT_HOME"));
    assert_eq!(
        world.specs.lock().unwrap()[0].network,
        MachineNetwork::Loopback
    );
}

#[tokio::test]
async fn servers_with_an_address_are_started_before_the_program() {
    let dir = tempfile::tempdir().unwrap();
    let check =
        "[environment.healthcheck]\ncommand = \"serve\"\nstart_period_sec = 10\nretries = 2\n";
    let stdio = "[[environment.mcp_servers]]\nname = \"files\"\ntransport = \"stdio\"\ncommand = \"files\"\n";
    let web = "[[environment.mcp_servers]]\nname = \"web\"\ntransport = \"http\"\nurl = \"http://localhost:1\"\n";
    for (keys, names) in [
        (format!("{check}{stdio}"), vec!["files"]),
        (format!("{check}{stdio}{web}"), vec!["files", "web"]),
    ] {
        with_image(dir.path(), &keys);
        let world = World::new(rewards("1"));
        let mut env = start(&world, dir.path());
        env.reset().await.unwrap();
        let host = env.host().unwrap();
        let servers = host.mcp_servers();
        assert_eq!(servers.keys().collect::<Vec<_>>(), names);
        let program = HostedProgram {
            argv: vec!["/agents/run".into(), "x y".into()],
            env: Vec::new(),
            deadline: Duration::from_secs(5),
        };
        host.run(program).await.unwrap();
        let runs = world.runs.lock().unwrap();
        let run = runs.last().unwrap();
        let own = ["/agents/run", "x y"];
        if names.len() == 1 {
            assert_eq!(run.argv, own);
        } else {
            assert_eq!(run.argv[..2], ["/bin/sh", "-c"]);
            assert_eq!(run.argv[3..], ["serve", "4", "5", own[0], own[1]]);
        }
    }
}

#[tokio::test]
async fn the_verifier_sees_the_conversation_of_the_loop_and_not_one_of_the_agent() {
    const PATH: &str = "/logs/agent/trajectory.json";
    let dir = tempfile::tempdir().unwrap();
    with_image(dir.path(), "");
    let world = World::new(|run, files| {
        if !run.is_verifier() {
            files.insert(PATH.into(), "planted".into());
            return exited(0, "seen\n");
        }
        let text = String::from_utf8(files[PATH].clone()).unwrap();
        let whole: serde_json::Value = serde_json::from_str(&text).unwrap();
        let steps = whole["steps"].as_array().unwrap();
        let said = steps
            .iter()
            .map(|s| (s["source"].as_str(), s["message"].as_str()));
        let said: Vec<_> = said
            .skip(1)
            .map(|(a, b)| (a.unwrap(), b.unwrap()))
            .collect();
        assert_eq!(
            said,
            [("user", "Do it."), ("agent", ""), ("agent", "Done.")]
        );
        let step = &steps[2];
        assert_eq!(step["tool_calls"][0]["arguments"]["command"], "look");
        assert_eq!(step["observation"]["results"][0]["content"], "seen");
        files.insert(REWARD.into(), "1".into());
        exited(0, "")
    });
    let mut env = start(&world, dir.path());
    env.reset().await.unwrap();
    env.step(call("look")).await.unwrap();
    let end = env.step(Action::say("Done.")).await.unwrap();
    assert!(end.outcome.unwrap().success);
    // The messages of a program are at its model server.
    let other = World::new(rewards("1"));
    let mut env = start(&other, dir.path());
    env.reset().await.unwrap();
    let program = HostedProgram {
        argv: vec!["/agents/run".into()],
        env: Vec::new(),
        deadline: Duration::from_secs(5),
    };
    env.host().unwrap().run(program).await.unwrap();
    env.step(Action::say("answer")).await.unwrap();
    assert_eq!(other.file(0, PATH), None);
}

#[tokio::test]
async fn the_check_solves_a_task_and_leaves_it_alone() {
    let dir = tempfile::tempdir().unwrap();
    with_image(dir.path(), "");
    file(
        &dir.path().join("solution/solve.sh"),
        "#!/bin/bash\ntouch /app/done\n",
    );
    let world = World::new(|run, files| {
        if run.is_verifier() {
            assert!(!files.keys().any(|path| path.starts_with("/solution")));
            let reward = if files.contains_key("/app/done") {
                "1"
            } else {
                "0"
            };
            files.insert(REWARD.into(), reward.into());
        } else {
            assert_eq!(run.argv, ["/bin/bash", "/solution/solve.sh"]);
            files.insert("/app/done".into(), Vec::new());
        }
        exited(0, "")
    });
    let keys = Harbor::new(dir.path().to_string_lossy());
    let factory = keys.environments(world.sandboxes());
    let mut seen = 0;
    let tasks = [row(dir.path())];
    let checks = factory.check_all(&tasks, 2, |_| seen += 1).await;
    assert_eq!((checks.len(), seen), (1, 1));
    let check = &checks[0];
    assert_eq!(
        (check.oracle.reward, check.null.reward),
        (Some(1.0), Some(0.0))
    );
    assert!(check.passed());
    let gold = factory.gold(&row(dir.path()), 0).unwrap().unwrap();
    assert_eq!(gold.tool_calls[0].arguments["command"], "touch /app/done");
    let end = factory.gold(&row(dir.path()), 1).unwrap().unwrap();
    assert!(end.tool_calls.is_empty());
    assert_eq!(factory.gold(&row(dir.path()), 2).unwrap(), None);
}

#[tokio::test]
async fn a_task_that_is_never_healthy_fails_its_episode() {
    let dir = tempfile::tempdir().unwrap();
    let keys =
        "[environment.healthcheck]\ncommand = \"ready\"\ninterval_sec = 0.001\nretries = 2\n";
    with_image(dir.path(), keys);
    let world = World::new(|_, _| exited(1, "not yet"));
    let mut env = start(&world, dir.path());
    let e = env.reset().await.unwrap_err().to_string();
    assert!(e.contains("health check failed 2 times"), "{e}");
    assert_eq!(world.runs.lock().unwrap().len(), 2);
    env.close().await.unwrap();
}
