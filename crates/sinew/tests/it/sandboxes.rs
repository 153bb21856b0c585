//! Sandboxes at the command line: refusals, and commands of another program.

#[cfg(feature = "egress")]
use crate::egress::Api;
#[cfg(feature = "egress")]
use crate::run_ok;
use crate::{root, sinew};
#[cfg(feature = "egress")]
use serde_json::Value;

#[test]
fn a_server_of_sandboxes_for_other_hosts_needs_chosen_tokens() {
    let refused = sinew()
        .args(["serve", "--sandbox-only", "--listen", "0.0.0.0:0"])
        .output()
        .unwrap();
    assert!(crate::failure(&refused, 2).contains("--token-file"));
    let wrong = root().join("Cargo.toml");
    let refused = sinew()
        .args([
            "serve",
            "--sandbox-only",
            "--listen",
            "127.0.0.1:0",
            "--token-file",
        ])
        .arg(wrong)
        .output()
        .unwrap();
    assert!(crate::failure(&refused, 2).contains("line 1"));
}

/// `sinew-bench` and `sinew-lab` next to the program carry its sub-commands out, with their arguments as they
/// are.
#[test]
fn benches_and_attacks_are_another_program() {
    use std::os::unix::fs::PermissionsExt;
    let dir = tempfile::tempdir().unwrap();
    let own = dir.path().join("sinew");
    std::fs::copy(env!("CARGO_BIN_EXE_sinew"), &own).unwrap();
    let run = |args: &[&str]| {
        let mut command = std::process::Command::new(&own);
        command.args(args).env("PATH", "/usr/bin:/bin");
        command.output().unwrap()
    };
    let missing = crate::failure(&run(&["bench", "soak"]), 3);
    assert!(missing.contains("cargo build -p sinew-bench"), "{missing}");
    for name in ["bench", "lab"] {
        let program = dir.path().join(format!("sinew-{name}"));
        std::fs::write(&program, format!("#!/bin/sh\necho {name} \"$@\"\nexit 7\n")).unwrap();
        std::fs::set_permissions(&program, PermissionsExt::from_mode(0o755)).unwrap();
    }
    for (args, expected) in [
        (
            &["bench", "compute", "--help"][..],
            "bench compute --help\n",
        ),
        (
            &["sandbox", "attack", "--level", "crun", "--json"],
            "lab sandbox attack --level crun --json\n",
        ),
        (&["sandbox", "leaks"], "lab sandbox leaks\n"),
    ] {
        let output = run(args);
        assert_eq!(String::from_utf8_lossy(&output.stdout), expected);
        assert_eq!(output.status.code(), Some(7));
    }
}

#[cfg(not(feature = "wasm"))]
#[test]
fn a_part_that_was_not_built_is_refused_with_its_feature() {
    let run = |args: &[&str]| crate::failure(&sinew().args(args).output().unwrap(), 3);
    let missing = run(&["sandbox", "run", "--level", "wasm", "--code", "1"]);
    assert!(missing.contains("the feature `wasm`"), "{missing}");
    assert!(missing.contains("--features wasm"), "{missing}");
}

/// Solutions of `tool_math` call Python, here in sandboxes of another program.
#[cfg(feature = "egress")]
#[test]
fn episodes_run_in_sandboxes_of_a_server() {
    let api = Api::start(&["--max-sandboxes", "2"]);
    let dir = tempfile::tempdir().unwrap();
    let folder = crate::runs::small_folder(dir.path());
    let recipe = dir.path().join("r.toml");
    let write = |sandbox: &str| {
        let text = format!(
            "name = \"remote\"\nmodel = {folder:?}\nenv = {{ type = \"tool_math\" }}\n\
             algorithm = {{ type = \"grpo\" }}\n[rollout]\ntasks_per_step = 4\nmax_turns = 3\nmax_turn_tokens = 48\n\
             max_context_tokens = 768\n[train]\nsteps = 1\n[eval]\ntasks = 2\n[sandbox]\n\
             server = \"http://{}\"\n{sandbox}",
            api.address
        );
        std::fs::write(&recipe, text).unwrap();
    };
    let run = |command: &str, token: &str| {
        let mut run = sinew();
        run.arg(command)
            .arg(&recipe)
            .env("SINEW_SANDBOX_TOKEN", token);
        run
    };
    for (sandbox, token, code, said) in [
        (
            "volumes = { x = \"/tmp\" }\n",
            api.token.as_str(),
            2,
            "sandbox.volumes",
        ),
        (
            "image = \"x\"\n",
            &api.token,
            1,
            "has no image \"x\"; allowed for sandbox.image: nothing",
        ),
        (
            "level = \"wasm\"\n",
            &api.token,
            1,
            "allowed for sandbox.level: process",
        ),
        ("", "wrong", 1, "refuses the token"),
    ] {
        write(sandbox);
        let mut train = run("train", token);
        let run_dir = dir.path().join("refused");
        let refused = train.arg("--run-dir").arg(&run_dir).output().unwrap();
        let errors = String::from_utf8_lossy(&refused.stderr);
        assert!(errors.contains(said), "{said}: {errors}");
        assert_eq!(refused.status.code(), Some(code), "{errors}");
    }
    write("");
    let mut env_check = sinew();
    env_check.args(["env", "check"]).arg(&recipe);
    env_check.args(["--tasks", "2", "--json"]);
    let report = run_ok(env_check.env("SINEW_SANDBOX_TOKEN", &api.token));
    let report: Value = serde_json::from_str(&report).unwrap();
    let gold = report["checks"].as_array().unwrap();
    let gold = gold.iter().find(|c| c["name"] == "gold").unwrap();
    // A turn with a call of Python, and one with the answer.
    assert_eq!(gold["values"]["turns"], 4, "{report}");
}

/// A folder of data is seen, links in it do not lead to the host, and nothing of it can be changed.
#[cfg(feature = "container")]
#[test]
fn volumes_are_seen_and_lead_nowhere() {
    let dir = tempfile::tempdir().unwrap();
    let own = dir.path().join("books");
    std::fs::create_dir_all(own.join("deep")).unwrap();
    std::fs::write(own.join("deep/a"), "inside\n").unwrap();
    std::fs::write(dir.path().join("secret"), "of the host\n").unwrap();
    for (name, target) in [
        ("up", "../secret".into()),
        ("far", dir.path().join("secret").display().to_string()),
        (
            "climb",
            "../".repeat(40) + dir.path().join("secret").to_str().unwrap(),
        ),
        ("host", "/etc/hostname".into()),
    ] {
        std::os::unix::fs::symlink(target, own.join(name)).unwrap();
    }
    let volume = format!("books={}", own.display());
    let script = "cat /volumes/books/deep/a; cd /volumes/books; cat up far climb host; \
         touch x; rm -f deep/a; echo y > deep/a; mkdir z; chmod 777 deep; ls /volumes; exit 0";
    for level in ["process", "crun"] {
        let args = [
            "sandbox", "run", "--level", level, "--volume", &volume, "--shell", script,
        ];
        let told = sinew().args(args).output().unwrap();
        let (shown, errors) = (
            String::from_utf8_lossy(&told.stdout),
            String::from_utf8_lossy(&told.stderr),
        );
        assert_eq!(shown, "inside\nbooks\n", "{level}: {errors}");
        assert_eq!(
            errors.matches("Read-only file system").count(),
            5,
            "{level}: {errors}"
        );
    }
    assert_eq!(
        std::fs::read_to_string(own.join("deep/a")).unwrap(),
        "inside\n"
    );
    for (args, said) in [
        (
            ["--level", "wasm", "--volume", &volume],
            "process and container",
        ),
        (["--level", "process", "--volume", "x=/"], "the host's"),
        (["--level", "process", "--volume", "x"], "NAME=FOLDER"),
    ] {
        let refused = sinew()
            .args(["sandbox", "run", "--code", "1"])
            .args(args)
            .output()
            .unwrap();
        let errors = crate::failure(&refused, 2);
        assert!(errors.contains(said), "{errors}");
    }
}

/// An environment in Python, and a reward whose program runs in a sandbox.
#[cfg(feature = "egress")]
const WORLD: &str = "
from sinew import Env, Step


class World(Env):
    def start(self, task):
        pass

    def step(self, text):
        return Step(\"end\", done=True)

    def reward(self, task):
        return 0.5

    tasks = [{\"prompt\": str(n), \"check\": \"pass\"} for n in range(20)]
";

/// A Python environment runs on this host, and the programs of rewards on the server.
#[cfg(feature = "egress")]
#[test]
fn a_python_environment_stays_here_while_rewards_run_on_a_server() {
    let api = Api::start(&["--max-sandboxes", "4"]);
    let dir = tempfile::tempdir().unwrap();
    let module = dir.path().join("world.py");
    std::fs::write(&module, WORLD).unwrap();
    let text = format!(
        "name = \"here\"\nreward = \"program(check)\"\nalgorithm = {{ type = \"grpo\" }}\n\
         model = {{ type = \"scratch\", d_model = 32, layers = 1, heads = 2, kv_heads = 1, d_ff = 64 }}\n\
         env = {{ type = \"python\", module = \"{}:World\" }}\neval = {{ tasks = 1 }}\n\
         train = {{ steps = 1, learning_rate = 1e-3, micro_batch_tokens = 1024 }}\n\
         sandbox = {{ server = \"http://{}\" }}\n[rollout]\ntasks_per_step = 2\ngroup_size = 2\nmax_turns = 1\n\
         max_turn_tokens = 4\nmax_context_tokens = 256\n",
        module.display(),
        api.address
    );
    let recipe = dir.path().join("r.toml");
    std::fs::write(&recipe, text).unwrap();
    let run = dir.path().join("run");
    let mut train = sinew();
    train.arg("train").arg(&recipe).arg("--run-dir").arg(&run);
    run_ok(train.env("SINEW_SANDBOX_TOKEN", &api.token));
    let step = &crate::steps(&run)[0];
    assert_eq!(step["samples"]["unscored"]["count"], 0, "{step}");
    assert_eq!(step["rollout"]["reward"], 1.0, "{step}");
}
