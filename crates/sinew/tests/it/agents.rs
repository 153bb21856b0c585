//! Agent programs from outside: trained end to end, refused, cut, and the wheel of the client.

use crate::queue::until;
use crate::resume::done;
use crate::{failure, passes_every_check, python3, root, sinew, steps, with_changes};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A copy of a recipe with some of its text replaced.
pub(crate) fn recipe(dir: &Path, name: &str, changes: &[(&str, &str)]) -> PathBuf {
    let text = std::fs::read_to_string(root().join("recipes").join(name)).unwrap();
    let path = dir.join("recipe.toml");
    std::fs::write(&path, with_changes(text, changes)).unwrap();
    path
}

/// Trains with a recipe; gives the last line and the records of the steps.
fn train(dir: &Path, recipe: &Path) -> (Value, Vec<Value>) {
    python3();
    let run = dir.join("run");
    (done(recipe, &run, &[]), steps(&run))
}

/// Trains a program for some of the recipe's 12 steps, and holds what does not depend on its learning.
fn trains(program: &str, count: usize) -> (Value, Vec<Value>) {
    let dir = tempfile::tempdir().unwrap();
    let recipe = recipe(
        dir.path(),
        "agent-tiny.toml",
        &[
            ("examples/chat_agent.py", program),
            ("kv_tokens = 8192", "kv_tokens = 128"),
            ("\nsteps = 12", &format!("\nsteps = {count}")),
        ],
    );
    let (last, steps) = train(dir.path(), &recipe);
    assert_eq!(steps.len(), count, "{last}");
    // Its calls take their turns in front of an engine with room for a few.
    let waited = |s: &Value| s["admission"]["waited_turns"].as_u64().unwrap();
    assert!(
        steps.iter().map(waited).sum::<u64>() > 0,
        "{:?}",
        steps.last()
    );
    // The environment's own tool was not offered: its use is not reported.
    assert!(last["eval"]["after"]["used_tool"].is_null(), "{last}");
    assert_eq!(last["samples"]["trained_twice"], 0, "{last}");
    assert_eq!(last["samples"]["lost"], 0, "{last}");
    for step in &steps {
        // Tokens of the program's calls have the trainer's log-probabilities, to the bit.
        assert_eq!(step["logprob_gap_max"], 0.0, "{step}");
    }
    (last, steps)
}

#[test]
fn an_openai_sdk_agent_is_trained() {
    let (last, steps) = trains("examples/chat_agent.py", 12);
    let reward = |s: &Value| s["rollout"]["reward"].as_f64().unwrap();
    let mean = |s: &[Value]| s.iter().map(reward).sum::<f64>() / s.len() as f64;
    // A step's reward depends on how many of its tasks one move solves: means are compared.
    let (first, end) = (mean(&steps[..3]), mean(&steps[steps.len() - 6..]));
    assert!(end > first + 0.04, "{first} to {end}: {last}");
    let format = |when: &str| last["eval"][when]["format"].as_f64().unwrap();
    let (before, after) = (format("before"), format("after"));
    assert!(after > before + 0.25, "format {before} to {after}");
}

#[test]
fn a_langgraph_agent_is_trained() {
    trains("examples/langgraph_chat_agent.py", 3);
}

/// Checks from inside what an agent's sandbox can reach; the exit code is the result.
const PROBE: &str = r#"
import os, socket, sys, urllib.request
task = os.environ["SINEW_TASK"]
base = os.environ["OPENAI_BASE_URL"]
def refused(*address):
    try:
        socket.create_connection(address, timeout=2)
    except OSError as e:
        return e.strerror or str(e)
    return None
problems = []
port = int(base.split(":")[2].split("/")[0])
if refused("127.0.0.1", port) is not None:
    problems.append("the gateway cannot be reached")
for address in [("127.0.0.1", 22), ("127.0.0.1", port + 1), ("10.0.0.1", 80), ("1.1.1.1", 53)]:
    if refused(*address) is None:
        problems.append(f"{address} can be reached")
for path in ["/root", "/home", os.environ.get("OUTSIDE", "/nowhere")]:
    if os.path.exists(path) and os.listdir(path):
        problems.append(f"{path} is there")
try:
    urllib.request.urlopen(base.split("/r/")[0] + "/rollouts/e")
    problems.append("the control API is open")
except urllib.error.HTTPError as e:
    if e.code != 401:
        problems.append(f"the control API answered {e.code}")
sys.exit("; ".join(problems) or "all as it should be")
"#;

/// Runs one evaluation with a script as agent, which fails; gives the message.
fn fails(script: &str, more: &str) -> String {
    let dir = tempfile::tempdir().unwrap();
    let program = dir.path().join("agent.py");
    std::fs::write(&program, script).unwrap();
    let changed = recipe(
        dir.path(),
        "agent-tiny.toml",
        &[
            (
                "command = [\".cache/venv/bin/python3\", \"examples/chat_agent.py\"]\npreload = true",
                &format!(
                    "command = [\"python3\", {:?}]\n{more}",
                    program.display().to_string()
                ),
            ),
            ("episodes_per_task = 4", "episodes_per_task = 1"),
        ],
    );
    let mut command = sinew();
    command.arg("train").arg(changed).arg("--run-dir");
    failure(&command.arg(dir.path().join("run")).output().unwrap(), 1)
}

#[test]
fn an_agent_reaches_its_model_and_nothing_else() {
    let mut ways = vec!["preload = false", "preload = true"];
    if cfg!(feature = "container") {
        ways.push("level = \"container\"");
    }
    for more in ways {
        let told = fails(PROBE, more);
        assert!(told.contains("all as it should be"), "{more}: {told}");
        assert!(told.contains("Harness"), "{told}");
    }
}

#[test]
fn failures_of_an_agent_are_typed_data() {
    let crash = fails("raise ValueError('my agent is broken')", "");
    assert!(
        crash.contains("exit code 1") && crash.contains("my agent is broken"),
        "{crash}"
    );
    let mute = fails("print('Answer: 1')", "");
    assert!(mute.contains("without an answer of the model"), "{mute}");
    let slow = fails("import time; time.sleep(60)", "timeout_s = 1.0");
    assert!(slow.contains("(timeout"), "{slow}");
}

#[test]
fn wrong_harnesses_are_refused_before_anything_runs() {
    let dir = tempfile::tempdir().unwrap();
    for (from, to, needle) in [
        (
            "preload = true",
            "preload = true\ntimeout_s = 0.0",
            "harness.timeout_s",
        ),
        (
            "preload = true",
            "preload = true\nlevel = \"container\"",
            "a container of its own",
        ),
        ("preload = true", "image = \"some/image\"", "harness.image"),
        (
            "[rollout]",
            "[sandbox]\ncontainer_engine = \"crun\"\n\n[rollout]",
            "has an effect at level container only",
        ),
        ("preload = true", "prelaod = true", "did you mean `preload`"),
        (
            ".cache/venv/bin/python3",
            "no/such/python",
            "no such file: no/such/python",
        ),
        (
            "[rollout]",
            "[sandbox]\nstrict = true\n\n[rollout]",
            "share a sandbox",
        ),
        (
            "preload = true",
            "mounts = { \"/work/x\" = \"/tmp\" }",
            "harness.mounts",
        ),
    ] {
        let changed = recipe(dir.path(), "agent-tiny.toml", &[(from, to)]);
        let code = if needle.starts_with("no such file") {
            3
        } else {
            1
        };
        let told = failure(&sinew().arg("check").arg(changed).output().unwrap(), code);
        assert!(told.contains(needle), "{to}: {told}");
    }
}

#[test]
fn recipes_with_agents_pass_every_check() {
    python3();
    for name in ["agent-tiny.toml", "agent-openai.toml"] {
        let text = passes_every_check(&format!("recipes/{name}"));
        assert!(
            text.contains("reaches the gateway and nothing else"),
            "{text}"
        );
        assert!(
            text.contains("starts, and the gateway takes its first call"),
            "{text}"
        );
    }
}

/// A program that is there and does not come as far as a model: its last output is shown.
#[test]
fn a_program_that_does_not_start_is_something_to_get_first() {
    python3();
    let dir = tempfile::tempdir().unwrap();
    let script = dir.path().join("agent/main.py");
    std::fs::create_dir(script.parent().unwrap()).unwrap();
    std::fs::write(&script, "import no_such_package\n").unwrap();
    let script = script.display().to_string();
    for preload in ["preload = true", "preload = false"] {
        let changes = [
            ("examples/chat_agent.py", &*script),
            ("preload = true", preload),
        ];
        let recipe = recipe(dir.path(), "agent-tiny.toml", &changes);
        let told = failure(&sinew().arg("check").arg(recipe).output().unwrap(), 3);
        for needle in [
            "harness.command",
            "did not ask the model",
            "no_such_package",
        ] {
            assert!(told.contains(needle), "{preload}: {needle}: {told}");
        }
    }
}

/// A program whose first call the gateway refuses is not a program that works.
#[test]
fn a_program_that_asks_in_vain_fails_its_check() {
    python3();
    let dir = tempfile::tempdir().unwrap();
    let script = dir.path().join("agent/main.py");
    std::fs::create_dir(script.parent().unwrap()).unwrap();
    let ask = "import os, urllib.request as r\n\
               url = os.environ['OPENAI_BASE_URL'] + '/chat/completions'\n\
               key = {'authorization': 'Bearer ' + os.environ['OPENAI_API_KEY']}\n\
               r.urlopen(r.Request(url, b'{\"model\": \"m\"}', key))\n";
    std::fs::write(&script, ask).unwrap();
    let script = script.display().to_string();
    let changes = [
        ("examples/chat_agent.py", &*script),
        ("preload = true", "preload = false"),
    ];
    let recipe = recipe(dir.path(), "agent-tiny.toml", &changes);
    let told = failure(&sinew().arg("check").arg(recipe).output().unwrap(), 3);
    for needle in ["refused the program's first call", "messages is missing"] {
        assert!(told.contains(needle), "{needle}: {told}");
    }
}

/// Runs one of the client's scripts against a server.
fn client_script(args: &[&str], token_key: &str, script: &str) {
    let mut server = sinew();
    server.arg("serve").args(args);
    server.args(["--listen", "127.0.0.1:0", "--json"]);
    // Its first line has its address and token.
    let (_served, told) = until(&mut server, |_| true);
    let done = Command::new(python3())
        .arg(root().join("python/tests").join(script))
        .env("PYTHONPATH", root().join("python/src"))
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .env("SINEW_URL", told["url"].as_str().unwrap())
        .env("SINEW_TOKEN", told[token_key].as_str().unwrap())
        .output()
        .unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let (out, err) = (text(&done.stdout), text(&done.stderr));
    assert!(done.status.success(), "{out}{err}");
    assert_eq!(out.lines().last(), Some("ok"));
}

#[test]
fn one_pooled_client_serves_many_rollouts_by_their_keys() {
    client_script(&["--engine", "fake"], "control_token", "against_keys.py");
}

#[test]
fn the_python_client_drives_sandboxes() {
    client_script(&["--sandbox-only"], "token", "against_sandboxes.py");
}

#[test]
fn the_wheel_installs_into_a_fresh_environment() {
    python3();
    let dir = tempfile::tempdir().unwrap();
    let run = |command: &mut Command| {
        let done = command.current_dir(root()).output().unwrap();
        let errors = String::from_utf8_lossy(&done.stderr).into_owned();
        assert!(done.status.success(), "{command:?}: {errors}");
        String::from_utf8_lossy(&done.stdout).trim().to_owned()
    };
    let wheels = dir.path().join("wheels");
    let mut build = Command::new("python3");
    build.args([
        "python/build_wheel.py",
        "--compression=1",
        "--binary",
        env!("CARGO_BIN_EXE_sinew"),
        "--out",
    ]);
    let wheel = run(build.arg(&wheels));
    let venv = dir.path().join("venv");
    let mut make = Command::new(root().join(".cache/uv/bin/uv"));
    run(make.args(["venv", "--quiet", "--offline"]).arg(&venv));
    let mut pip = Command::new("python3");
    pip.args([
        "-m",
        "pip",
        "--quiet",
        "--disable-pip-version-check",
        "--python",
    ]);
    run(pip
        .arg(venv.join("bin/python"))
        .args(["install", "--no-index", &wheel]));
    let version = run(Command::new(venv.join("bin/sinew")).arg("--version"));
    assert_eq!(version, concat!("sinew ", env!("CARGO_PKG_VERSION")));
    let code = "import importlib.metadata as m, importlib.resources as r, sinew; \
                print(m.version('sinew'), sinew.__version__, r.files(sinew).joinpath('py.typed').is_file(), *m.metadata('sinew').get_all('Provides-Extra'))";
    let seen = run(Command::new(venv.join("bin/python")).args(["-c", code]));
    let version = env!("CARGO_PKG_VERSION");
    assert_eq!(seen, format!("{version} {version} True model torch track"));
}
