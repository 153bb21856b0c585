//! Users' tasks and environments, by the commands that people type.

use super::{Running, json_lines, last_line, root, sinew};
use serde_json::Value;
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Output, Stdio};

const MODEL: &str = "model = { type = \"scratch\", d_model = 64, layers = 2, heads = 4, kv_heads = 2, d_ff = 128 }\n";

/// A command in a folder.
fn run(folder: &Path, arguments: &[&str]) -> Output {
    let mut command = sinew();
    command.current_dir(folder).args(arguments);
    command.output().unwrap()
}

/// Lines of standard output as JSON.
fn lines(output: &Output) -> Vec<Value> {
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    let text = String::from_utf8_lossy(&output.stdout);
    json_lines(&text)
}

#[test]
fn rows_of_a_function_are_tasks() {
    let dir = tempfile::tempdir().unwrap();
    let code = "def rows(split, seed):\n    for i in range(40 if split == 'train' else 8):\n        \
                yield {'question': f'{split} {seed} {i}', 'answer': 'a', 'level': i % 2}\n\n\
                def bad():\n    return [{'question': 'x', 'answer': 'a'}, {'answer': 'a'}]\n\n\
                def endless():\n    while True:\n        yield 7\n";
    fs::write(dir.path().join("gen.py"), code).unwrap();
    let recipe = |source: &str| {
        let text = format!(
            "{MODEL}tasks = {{ source = \"{source}\", prompt = \"{{{{ question }}}}\" }}\n\
             reward = \"contains(answer)\"\nseed = 3\n[rollout]\ntasks_per_step = 4\ngroup_size = 4\n\
             max_turn_tokens = 4\nmax_context_tokens = 160\n[train]\nsteps = 2\n[eval]\ntasks = 8\n"
        );
        fs::write(dir.path().join("own.toml"), text).unwrap();
    };
    recipe("gen.py:rows");
    let shown = lines(&run(
        dir.path(),
        &["tasks", "own.toml", "--split", "held-out", "--json"],
    ));
    assert_eq!(shown.len(), 3);
    assert_eq!(shown[1]["data"]["question"], "held-out 3 1");
    assert_eq!(shown[1]["task"], "gen/held-out/1");
    let output = run(
        dir.path(),
        &["train", "own.toml", "--json", "--run-dir", "run"],
    );
    let all = lines(&output);
    let last = all.last().unwrap();
    assert!(last["eval"]["after"]["success"].is_f64(), "{last}");
    assert_eq!(last["samples"]["lost"], 0);
    for (source, said) in [
        (
            "gen.py:bad",
            "gen.py:bad, index 1: tasks.prompt: undefined value",
        ),
        (
            "gen.py:endless",
            "index 0: a row is a text or a dict of columns, not 7",
        ),
        ("gen.py:gone", "has no gone; it defines: rows, bad, endless"),
    ] {
        recipe(source);
        let output = run(dir.path(), &["check", "own.toml"]);
        assert!(!output.status.success());
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(text.contains(said), "{source}: {text}");
    }
}

#[test]
fn tasks_of_reasoning_gym_are_made_and_scored_in_sandboxes() {
    // A relative folder, as people type it.
    let mut path = std::ffi::OsString::from(".cache/venv-reasoning/bin:");
    path.push(std::env::var_os("PATH").unwrap());
    let ask = |arguments: &[&str]| {
        let mut command = sinew();
        command.current_dir(root()).env("PATH", &path);
        command.args(arguments).output().unwrap()
    };
    let recipe = "recipes/reasoning-tiny.toml";
    let checked = lines(&ask(&["check", recipe, "--json"]));
    assert!(checked.len() > 4, "{checked:?}");
    let shown = lines(&ask(&[
        "tasks", recipe, "--split", "held-out", "--limit", "40", "--json",
    ]));
    let mut families: Vec<_> = shown.iter().filter_map(|t| t["kind"].as_str()).collect();
    families.sort_unstable();
    families.dedup();
    assert_eq!(
        families,
        ["chain_sum", "gcd", "letter_counting", "products"]
    );
}

/// `sinew env serve` of a class; it ends with this value.
struct Served {
    _child: Running,
    url: String,
}

impl Served {
    fn start(folder: &Path, module: &str) -> Self {
        let mut command = sinew();
        command.current_dir(folder).stdout(Stdio::piped());
        command.args([
            "env",
            "serve",
            module,
            "--listen",
            "127.0.0.1:0",
            "--max-episodes",
            "16",
        ]);
        command.args([
            "--lease-s",
            "60",
            "--workers",
            "2",
            "--key-env",
            "TEST_ENV_KEY",
        ]);
        let mut child = command.env("TEST_ENV_KEY", "secret").spawn().unwrap();
        let mut line = String::new();
        let mut lines = BufReader::new(child.stdout.take().unwrap());
        lines.read_line(&mut line).unwrap();
        let url = line.trim().rsplit(' ').next().unwrap().to_owned();
        assert!(url.starts_with("http://"), "{line}");
        Self {
            _child: Running(child),
            url,
        }
    }
}

#[test]
fn a_model_learns_in_an_environment_behind_http() {
    let dir = tempfile::tempdir().unwrap();
    let output = run(dir.path(), &["init", "mine", "--start", "env"]);
    assert!(output.status.success());
    let project = dir.path().join("mine");
    let served = Served::start(&project, "env.py:Letters");
    let recipe = fs::read_to_string(project.join("recipe.toml")).unwrap();
    let ours = "type = \"python\"\nmodule = \"env.py:Letters\"\nworkers = 2\n";
    let theirs = format!(
        "type = \"http\"\nurl = \"{}\"\nkey_env = \"TEST_ENV_KEY\"\n",
        served.url
    );
    assert!(recipe.contains(ours));
    let recipe = format!(
        "{}\n[tasks]\nsource = \"env.py:Letters.tasks\"\n",
        recipe.replace(ours, &theirs)
    );
    fs::write(project.join("recipe.toml"), recipe).unwrap();
    let ask = |arguments: &[&str], key: &str| {
        let mut command = sinew();
        command.current_dir(&project).env("TEST_ENV_KEY", key);
        command.args(arguments).output().unwrap()
    };
    let test = [
        "env",
        "test",
        &served.url,
        "--key-env",
        "TEST_ENV_KEY",
        "--json",
    ];
    for row in lines(&ask(&test, "secret")) {
        assert_eq!(row["outcome"], "passed", "{row}");
    }
    assert_eq!(ask(&test, "wrong").status.code(), Some(1));
    let output = ask(&["check", "recipe.toml"], "wrong");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(
        !output.status.success() && text.contains("the key is missing or wrong"),
        "{text}"
    );
    let last = last_line(&ask(
        &["train", "recipe.toml", "--json", "--run-dir", "run"],
        "secret",
    ));
    let reward = |at: &str| last["eval"][at]["reward"].as_f64().unwrap();
    assert!(reward("after") > reward("before") + 0.3, "{last}");
}

/// Values that only the class reports are checked when it has described itself: before anything runs, with
/// the way out.
#[test]
fn a_class_without_what_the_algorithm_reads_is_refused_before_it_runs() {
    let dir = tempfile::tempdir().unwrap();
    let class = "from sinew import Env, tool\n\nclass Say(Env):\n    \
                 tasks = [{'prompt': f'say {i}', 'want': str(i)} for i in range(60)]\n    \
                 def reward(self, output, want): return want in output\n";
    let state = "    def state(self): return 0\n";
    let tool = "    @tool\n    def ask(self): return 'hi'\n";
    let mixed = "[[env]]\nname = \"say\"\ntype = \"python\"\nmodule = \"say.py:Say\"\n\
                 [[env]]\nname = \"two\"\ntype = \"python\"\nmodule = \"two.py:Say\"\n";
    let single = "[env]\ntype = \"python\"\nmodule = \"say.py:Say\"\n";
    let others = format!("{class}{state}{tool}");
    fs::write(dir.path().join("two.py"), others).unwrap();
    for (kind, env, more, said) in [
        (
            "gigpo",
            single,
            "",
            Some("add the method `state(self)` to your class"),
        ),
        ("gigpo", single, state, None),
        ("grpo_roc", single, state, Some("add a tool")),
        ("grpo_roc", single, tool, None),
        (
            "gigpo",
            mixed,
            "",
            Some("episodes of [[env]] name = \"say\" of type \"python\""),
        ),
        ("gigpo", mixed, state, None),
    ] {
        fs::write(dir.path().join("say.py"), format!("{class}{more}")).unwrap();
        let text = format!(
            "{MODEL}algorithm = {{ type = \"{kind}\" }}\n{env}\n[rollout]\ntasks_per_step = 4\ngroup_size = 8\n\
             max_turn_tokens = 4\nmax_context_tokens = 500\n[train]\nsteps = 1\n[eval]\ntasks = 2\n"
        );
        fs::write(dir.path().join("own.toml"), text).unwrap();
        let checked = run(dir.path(), &["check", "own.toml"]);
        let text = String::from_utf8_lossy(&checked.stdout);
        let read = format!("`{kind}` reads ");
        let Some(said) = said else {
            assert!(
                checked.status.success() && text.contains(&read),
                "{kind}: {text}"
            );
            continue;
        };
        assert_eq!(checked.status.code(), Some(1), "{kind}: {text}");
        assert!(
            text.contains(said) && text.contains("algorithm.type = "),
            "{kind}: {text}"
        );
        let trained = run(dir.path(), &["train", "own.toml", "--run-dir", "run"]);
        let errors = String::from_utf8_lossy(&trained.stderr);
        assert!(
            !trained.status.success() && errors.contains(said),
            "{kind}: {errors}"
        );
        assert!(!dir.path().join("run").exists(), "{kind}: something ran");
    }
}

#[cfg(feature = "mcp")]
#[test]
fn a_model_learns_beside_the_tools_of_an_mcp_server() {
    let dir = tempfile::tempdir().unwrap();
    let server = "import json, sys\n\n\
        tool = {'name': 'look_up', 'description': 'Finds things.', 'inputSchema': {'type': 'object'}}\n\
        for line in sys.stdin:\n    \
            m = json.loads(line)\n    \
            if 'id' not in m:\n        continue\n    \
            result = {'tools': [tool], 'content': []}\n    \
            if m['method'] == 'initialize':\n        \
                result = {'protocolVersion': m['params']['protocolVersion'], 'capabilities': {'tools': {}}, \
                          'serverInfo': {'name': 'x', 'version': '1'}}\n    \
            print(json.dumps({'jsonrpc': '2.0', 'id': m['id'], 'result': result}), flush=True)\n";
    fs::write(dir.path().join("server.py"), server).unwrap();
    let rows: String = (0..400)
        .map(|i| format!("{{\"prompt\": \"Say {i}\"}}\n"))
        .collect();
    fs::write(dir.path().join("tasks.jsonl"), rows).unwrap();
    let text = format!(
        "{MODEL}tasks = \"tasks.jsonl\"\nreward = 'regex(\"[a-z]\")'\n\
         [env]\ntype = \"mcp\"\nservers = [{{ command = [\"python3\", \"server.py\"] }}]\nsessions = 8\n\
         [rollout]\ntasks_per_step = 4\ngroup_size = 8\nmax_turns = 2\nmax_turn_tokens = 4\n\
         max_context_tokens = 1024\n[train]\nsteps = 12\nlearning_rate = 3e-3\nmicro_batch_tokens = 8192\n\
         [eval]\ntasks = 8\n"
    );
    fs::write(dir.path().join("own.toml"), text).unwrap();
    let shown = lines(&run(
        dir.path(),
        &["tasks", "own.toml", "--limit", "1", "--json"],
    ));
    let prompt = shown[0]["prompt"].as_str().unwrap();
    assert!(
        prompt.contains("look_up") && prompt.contains("Say "),
        "{prompt}"
    );
    let last = last_line(&run(
        dir.path(),
        &["train", "own.toml", "--json", "--run-dir", "run"],
    ));
    let success = |at: &str| last["eval"][at]["success"].as_f64().unwrap();
    assert!(success("after") > success("before") + 0.2, "{last}");
}
