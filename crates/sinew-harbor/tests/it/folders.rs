//! Folders of tasks on disk: trees, registries, kinds, splits, tasks that are left out.

use sinew_env::{McpFacts, McpServer, Split, Taskset};
use sinew_harbor::{
    Base, HarborError, HarborTasks, HeldOutTasks, PassedEnv, PlaceFacts, SkipReason, TaskFolder,
    TaskKind, TasksConfig,
};
use std::fs;
use std::path::Path;

/// Writes a file with the folders above it.
pub(crate) fn file(path: &Path, text: &str) {
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, text).unwrap();
}

/// Writes a task that writes its reward by itself, with more keys.
pub(crate) fn task(folder: &Path, keys: &str) {
    file(&folder.join("task.toml"), keys);
    file(&folder.join("instruction.md"), "Do it.\n");
    file(&folder.join("tests/test.sh"), "echo 1 >reward.txt\n");
}

/// A place with or without containers.
fn place(containers: bool) -> PlaceFacts {
    PlaceFacts {
        containers,
        network: false,
        host_lists: containers,
        program: false,
        mcp: Some(McpFacts::BUILT_IN_LOOP),
        passed: PassedEnv::default(),
    }
}

fn config(folder: &Path, held_out: HeldOutTasks) -> TasksConfig {
    TasksConfig {
        held_out: Some(held_out),
        ..TasksConfig::measured(folder)
    }
}

/// Names of a split.
fn names(tasks: &HarborTasks, split: Split) -> Vec<String> {
    let id = |index| tasks.get(split, index).unwrap().id.to_string();
    (0..tasks.len(split)).map(id).collect()
}

#[test]
fn a_tree_of_tasks_is_split_by_share_family_or_folder() {
    let dir = tempfile::tempdir().unwrap();
    for (name, category) in [("csv-001", "csv"), ("csv-002", "csv"), ("logs-001", "logs")] {
        let keys = format!("[metadata]\ncategory = {category:?}\n");
        task(&dir.path().join("all/nested").join(name), &keys);
    }
    task(&dir.path().join("other/one"), "");
    let all = dir.path().join("all");
    let families = HeldOutTasks::Families(vec!["logs".into()]);
    let tasks = HarborTasks::open(&config(&all, families), &place(false)).unwrap();
    let held_out = ["harbor/held-out/nested/logs-001"];
    assert_eq!(names(&tasks, Split::HeldOut), held_out);
    assert_eq!(names(&tasks, Split::Train).len(), 2);
    assert_eq!(tasks.kind(Split::Train, 0).unwrap(), "csv");
    let share = HarborTasks::open(&config(&all, HeldOutTasks::Share(0.01)), &place(false)).unwrap();
    assert_eq!((share.len(Split::Train), share.len(Split::HeldOut)), (2, 1));
    let other = dir.path().join("other").to_string_lossy().into_owned();
    let own = config(&all, HeldOutTasks::Folder(other));
    let own = HarborTasks::open(&own, &place(false)).unwrap();
    assert_eq!(names(&own, Split::HeldOut), ["harbor/held-out/one"]);
    let measured = TasksConfig::measured(all.join("nested/csv-001"));
    let one = HarborTasks::open(&measured, &place(false)).unwrap();
    assert_eq!(names(&one, Split::HeldOut), ["harbor/held-out/csv-001"]);
    assert!(one.is_empty(Split::Train));
}

#[test]
fn kinds_come_from_the_metadata_or_the_name() {
    let dir = tempfile::tempdir().unwrap();
    let keys = "[metadata]\ndifficulty = \"hard\"\ntags = [\"text\", \"x\"]\n";
    for name in ["parse-logs-07", "parse-logs-08"] {
        task(&dir.path().join(name), keys);
    }
    for (kind, named) in [
        (TaskKind::Category, "parse-logs"),
        (TaskKind::Difficulty, "hard"),
        (TaskKind::Tag, "text"),
        (TaskKind::Name, "parse-logs"),
    ] {
        let config = TasksConfig {
            kind,
            ..TasksConfig::measured(dir.path())
        };
        let tasks = HarborTasks::open(&config, &place(false)).unwrap();
        assert_eq!(tasks.kind(Split::HeldOut, 0).unwrap(), named);
    }
}

#[test]
fn tasks_that_cannot_run_are_counted_with_their_reason() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path();
    task(&root.join("plain"), "");
    let dockerfile = root.join("plain/environment/Dockerfile");
    file(&dockerfile, "FROM a\nWORKDIR /app\nCOPY files/ .\n");
    task(
        &root.join("image"),
        "[environment]\ndocker_image = \"debian:12\"\n",
    );
    task(&root.join("gpu"), "[environment]\ngpus = 1\n");
    task(&root.join("windows"), "[environment]\nos = \"Windows\"\n");
    task(&root.join("key"), "[verifier.env]\nA = \"${JUDGE_KEY}\"\n");
    task(&root.join("two"), "");
    let services = "services:\n  a:\n    image: x\n  b:\n    image: y\n";
    file(&root.join("two/environment/docker-compose.yaml"), services);
    fs::create_dir_all(root.join("bare/tests")).unwrap();
    file(&root.join("bare/task.toml"), "");
    file(&root.join("bare/instruction.md"), "x");
    let skipped = |containers| {
        let tasks = HarborTasks::open(&TasksConfig::measured(root), &place(containers)).unwrap();
        let skipped = tasks.skipped().iter();
        let skipped = skipped.map(|s| (s.name.clone(), s.reason.name()));
        (
            names(&tasks, Split::HeldOut).len(),
            skipped.collect::<Vec<_>>(),
        )
    };
    let everywhere = [
        ("bare", "no_verifier"),
        ("gpu", "accelerator"),
        ("key", "variable"),
        ("two", "services"),
        ("windows", "windows"),
    ];
    let everywhere = everywhere.map(|(n, r)| (n.to_owned(), r));
    let (left, reasons) = skipped(true);
    assert_eq!((left, reasons), (2, everywhere.to_vec()));
    let (left, reasons) = skipped(false);
    assert_eq!(left, 1);
    assert!(reasons.contains(&("image".to_owned(), "needs_container")));
    let tasks = HarborTasks::open(&TasksConfig::measured(root), &place(false)).unwrap();
    let notes = tasks.notes().join("\n");
    assert!(
        notes.contains("1 tasks are left out, such as gpu"),
        "{notes}"
    );
}

#[test]
fn an_agent_program_plays_tasks_with_a_container_and_without_a_conversation() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path();
    for name in ["bare", "image", "prior", "plain"] {
        task(&root.join(name), "");
    }
    for name in ["image", "prior", "plain"] {
        let line = if name == "plain" { "" } else { "RUN true\n" };
        let dockerfile = root.join(name).join("environment/Dockerfile");
        file(&dockerfile, &format!("FROM a\n{line}"));
    }
    let said = r#"{"schema_version": "ATIF-v1.8", "steps": [{"step_id": 1, "source": "user", "message": "Hi."}]}"#;
    file(&root.join("prior/trajectory.json"), said);
    let open = |program| {
        let place = PlaceFacts {
            program,
            ..place(true)
        };
        HarborTasks::open(&TasksConfig::measured(root), &place).unwrap()
    };
    assert_eq!(open(false).len(Split::HeldOut), 4);
    let tasks = open(true);
    let skipped = tasks.skipped().iter();
    let skipped: Vec<_> = skipped
        .map(|s| (s.name.as_str(), s.reason.name()))
        .collect();
    assert_eq!(skipped, [("bare", "no_container"), ("prior", "trajectory")]);
    let why = tasks.skipped()[0].reason.to_string();
    assert!(why.contains("environment/Dockerfile"), "{why}");
}

/// Writes a task for each kind of MCP server, and one without.
fn with_servers(root: &Path) {
    let of =
        |name: &str, rest: &str| format!("[[environment.mcp_servers]]\nname = {name:?}\n{rest}");
    let stdio = "transport = \"stdio\"\ncommand = \"python3\"\n";
    let at = |url: &str| format!("transport = \"streamable-http\"\nurl = {url:?}\n");
    let check = "[environment.healthcheck]\ncommand = \"serve\"\n";
    let local = at("http://localhost:8000/mcp");
    for (folder, keys) in [
        ("plain", String::new()),
        ("stdio", of("files", stdio)),
        ("started", check.to_owned() + &of("web", &local)),
        ("unstarted", of("web", &local)),
        (
            "outside",
            check.to_owned() + &of("web", &at("http://web:8000/mcp")),
        ),
        (
            "sse",
            check.to_owned() + &of("web", "url = \"http://127.0.0.1:1/sse\"\n"),
        ),
        (
            "headers",
            of("web", &format!("{local}headers = {{ A = \"b\" }}\n")),
        ),
        ("named", of("my files", stdio)),
        (
            "long",
            of(
                "files",
                &format!("{stdio}args = [{:?}]\n", "x".repeat(40_000)),
            ),
        ),
    ] {
        task(&root.join(folder), &keys);
        file(
            &root.join(folder).join("environment/Dockerfile"),
            "FROM a\n",
        );
    }
}

#[test]
fn tasks_with_mcp_servers_are_for_players_that_take_them() {
    let dir = tempfile::tempdir().unwrap();
    with_servers(dir.path());
    let skipped = |player: Option<McpFacts>| {
        let place = PlaceFacts {
            program: true,
            mcp: player,
            ..place(true)
        };
        let tasks = HarborTasks::open(&TasksConfig::measured(dir.path()), &place).unwrap();
        let skipped = tasks.skipped().iter();
        let skipped = skipped.map(|s| (s.name.clone(), s.reason.to_string()));
        skipped.collect::<Vec<_>>()
    };
    assert!(skipped(None).is_empty());
    let built_in = skipped(Some(McpFacts::BUILT_IN_LOOP));
    assert_eq!(built_in.len(), 8);
    let why = "the MCP server web: the built-in loop takes no MCP servers";
    assert_eq!(built_in[0], ("headers".to_owned(), why.to_owned()));
    let agent = McpFacts {
        player: "Codex",
        transports: &["stdio", "http"],
    };
    let found = skipped(Some(agent));
    for ((name, why), (task, part)) in found.iter().zip([
        ("headers", "headers"),
        ("long", "bytes"),
        ("named", "letters"),
        ("outside", "http://web:8000/mcp is not in the container"),
        ("sse", "Codex has no transport sse, but stdio, http"),
        ("unstarted", "environment.healthcheck"),
    ]) {
        assert_eq!(name, task);
        assert!(why.contains(part), "{why}");
    }
    assert_eq!(found.len(), 6);
    let all = McpFacts {
        transports: McpServer::TRANSPORTS,
        ..agent
    };
    assert_eq!(skipped(Some(all)).len(), 5);
}

#[test]
fn networks_that_one_container_cannot_have_are_a_reason() {
    let dir = tempfile::tempdir().unwrap();
    let steps = |second: &str| {
        format!(
            "[[steps]]\nname = \"a\"\n[[steps]]\nname = \"b\"\n[steps.agent]\nnetwork_mode = {second:?}\n"
        )
    };
    let range = "[agent]\nnetwork_mode = \"allowlist\"\nallowed_hosts = [\"10.0.0.0/8\"]\n";
    for (name, keys, reason) in [
        ("same", steps("public").as_str(), None),
        ("other", steps("no-network").as_str(), Some("step_networks")),
        ("range", range, Some("host_range")),
    ] {
        let folder = dir.path().join(name);
        task(&folder, keys);
        for step in ["a", "b"] {
            file(&folder.join("steps").join(step).join("instruction.md"), "x");
        }
        let skip = TaskFolder::read(&folder).unwrap().skip;
        assert_eq!(skip.as_ref().map(SkipReason::name), reason, "{name}");
    }
}

#[test]
fn a_conversation_is_read_next_to_the_first_instruction() {
    let dir = tempfile::tempdir().unwrap();
    let said = |text: &str| {
        format!(
            "{{\"schema_version\": \"ATIF-v1.4\", \"steps\": [{{\"step_id\": 1, \"source\": \"agent\", \
             \"message\": {text:?}}}]}}"
        )
    };
    let one = dir.path().join("one");
    task(&one, "");
    file(&one.join("trajectory.json"), &said("I did it."));
    let read = TaskFolder::read(&one).unwrap();
    assert_eq!((read.prior.len(), read.skip), (1, None));
    let two = dir.path().join("two");
    task(&two, "[[steps]]\nname = \"a\"\n[[steps]]\nname = \"b\"\n");
    for step in ["a", "b"] {
        let folder = two.join("steps").join(step);
        file(&folder.join("instruction.md"), "Do it.\n");
        file(&folder.join("trajectory.json"), &said(step));
    }
    let read = TaskFolder::read(&two).unwrap();
    assert_eq!(read.prior.len(), 1);
    assert_eq!(read.prior[0].content, "a");
    file(&one.join("trajectory.json"), "[]");
    let e = TaskFolder::read(&one).unwrap_err().to_string();
    assert!(
        e.contains("trajectory.json") && e.contains("ATIF-v1."),
        "{e}"
    );
}

#[test]
fn a_registry_names_tasks_of_its_folder_and_others() {
    let dir = tempfile::tempdir().unwrap();
    task(&dir.path().join("tasks/a"), "");
    let registry = r#"[
        {"name": "own", "version": "1.0", "description": "", "tasks": [
            {"name": "first", "path": "tasks/a"},
            {"name": "far", "git_url": "https://example.com/x.git", "git_commit_id": "head", "path": "tasks/b"}]},
        {"name": "own", "version": "2.0", "description": "", "tasks": []}]"#;
    file(&dir.path().join("registry.json"), registry);
    let open = |dataset: Option<&str>| {
        let config = TasksConfig {
            dataset: dataset.map(str::to_owned),
            ..TasksConfig::measured(dir.path())
        };
        HarborTasks::open(&config, &place(false))
    };
    let tasks = open(Some("own@1.0")).unwrap();
    assert_eq!(names(&tasks, Split::HeldOut), ["harbor/held-out/first"]);
    assert!(matches!(
        tasks.skipped()[0].reason,
        SkipReason::NotHere { .. }
    ));
    for unclear in [None, Some("own"), Some("no")] {
        let e = open(unclear).unwrap_err().to_string();
        assert!(e.contains("own@1.0, own@2.0"), "{e}");
    }
    let out = r#"[{"name": "own", "tasks": [{"name": "first", "path": "../a"}]}]"#;
    file(&dir.path().join("registry.json"), out);
    assert!(open(None).unwrap_err().to_string().contains("leads out"));
}

#[test]
fn links_that_leave_a_task_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    file(&dir.path().join("private"), "a key\n");
    let one = dir.path().join("one");
    task(&one, "");
    fs::remove_file(one.join("instruction.md")).unwrap();
    std::os::unix::fs::symlink("../private", one.join("instruction.md")).unwrap();
    let e = TaskFolder::read(&one).unwrap_err();
    assert!(matches!(e, HarborError::Format { .. }), "{e}");
    assert!(e.to_string().contains("leads out of the task"), "{e}");
}

#[test]
fn steps_have_their_own_instruction_tests_and_keys() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path();
    let keys = "multi_step_reward_strategy = \"final\"\n[agent]\ntimeout_sec = 10\n[verifier]\nuser = \"judge\"\n\
                [[steps]]\nname = \"one\"\nmin_reward = 0.5\n[[steps]]\nname = \"two\"\nagent.timeout_sec = 3\n";
    file(&root.join("task.toml"), keys);
    file(&root.join("tests/helper.py"), "");
    for step in ["one", "two"] {
        let folder = root.join("steps").join(step);
        file(
            &folder.join("instruction.md"),
            &format!("# canary 1\nDo {step}.\n"),
        );
        file(&folder.join("tests/test.sh"), "");
    }
    file(&root.join("steps/two/workdir/a.txt"), "a");
    let task = TaskFolder::read(root).unwrap();
    assert_eq!((&task.base, task.skip), (&Base::Empty, None));
    let [one, two] = &task.steps[..] else {
        panic!("two steps");
    };
    assert_eq!(one.instruction, "Do one.");
    assert_eq!(
        (one.agent.timeout_s, two.agent.timeout_s),
        (Some(10.0), Some(3.0))
    );
    assert_eq!(one.verifier.tests.len(), 2);
    assert_eq!(two.verifier.keys.user.as_deref(), Some("judge"));
    assert!(one.workdir.is_none() && two.workdir.is_some());
}

#[test]
fn a_folder_without_tasks_says_what_is_allowed() {
    let dir = tempfile::tempdir().unwrap();
    let config = TasksConfig::measured(dir.path());
    let e = HarborTasks::open(&config, &place(true)).unwrap_err();
    assert!(e.to_string().contains("no tasks here; allowed"), "{e}");
    task(&dir.path().join("one"), "");
    let half = self::config(dir.path(), HeldOutTasks::Share(0.5));
    let e = HarborTasks::open(&half, &place(true)).unwrap_err();
    assert!(e.to_string().contains("no task is left to train on"), "{e}");
}
