//! Several environments in one run: shares of the draws, and results of each.

use crate::{failure, json_lines, last_line, sinew, steps};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;

const MODEL: &str = "model = { type = \"scratch\", d_model = 64, layers = 2, heads = 4, kv_heads = 2, d_ff = 128 }\n";

const LIMITS: &str = "[rollout]\ntasks_per_step = 8\ngroup_size = 8\nmax_turn_tokens = 4\nmax_context_tokens = 160\n\
    [train]\nsteps = 25\nlearning_rate = 3e-3\nmicro_batch_tokens = 4096\n";

/// Two files of rows, and a recipe that draws three times as often from the first.
fn project(dir: &Path, algorithm: &str, steps: usize) {
    for (name, count) in [("letters", 40), ("digits", 24)] {
        let rows = (0..count).fold(String::new(), |mut rows, i| {
            let hard = ["easy", "hard"][i % 2];
            let _ = writeln!(rows, r#"{{"question": "{name} {i}", "level": "{hard}"}}"#);
            rows
        });
        std::fs::write(dir.join(format!("{name}.jsonl")), rows).unwrap();
    }
    let text = format!(
        "{MODEL}algorithm = {{ type = \"{algorithm}\" }}\n\
         [[env]]\nname = \"letters\"\nweight = 3\ntype = \"chat\"\nreward = 'regex(\"[a-z]\")'\n\
         tasks = {{ source = \"letters.jsonl\", prompt = \"{{{{ question }}}}\", held_out = 0.2 }}\n\
         [[env]]\nname = \"digits\"\ntype = \"chat\"\nreward = {{ 'regex(\"[0-9]\")' = 1, \"repetition(n = 1)\" = 0 }}\n\
         tasks = {{ source = \"digits.jsonl\", prompt = \"{{{{ question }}}}\", held_out = 0.2, kind = \"level\", \
         weights = {{ easy = 1, hard = 1 }} }}\n{LIMITS}"
    );
    let text = text.replace("steps = 25", &format!("steps = {steps}"));
    std::fs::write(dir.join("mix.toml"), text).unwrap();
}

fn train(dir: &Path, run: &str) -> std::process::Output {
    let mut command = sinew();
    command
        .current_dir(dir)
        .args(["train", "mix.toml", "--json", "--run-dir", run]);
    command.output().unwrap()
}

#[test]
fn one_policy_learns_two_environments_by_their_weights() {
    let dir = tempfile::tempdir().unwrap();
    project(dir.path(), "agent_rl", 30);
    let last = last_line(&train(dir.path(), "run"));
    let success = |at: &str, env: &str| {
        let own = &last["eval"][at]["by_env"][env];
        assert!(own["episodes"].as_u64() > Some(2), "{last}");
        own["success"].as_f64().unwrap()
    };
    // One answer of four bytes can hold a letter and a digit.
    for env in ["letters", "digits"] {
        let (before, after) = (success("before", env), success("after", env));
        assert!(after > before + 0.2, "{env}: {last}");
    }
    let both = last["eval"]["after"]["success"].as_f64().unwrap();
    let (a, b) = (success("after", "letters"), success("after", "digits"));
    assert!(both >= a.min(b) && both <= a.max(b), "{last}");
    let digits = &last["eval"]["after"]["by_env"]["digits"];
    assert!(digits["reward/repetition"].is_f64(), "{last}");
    for step in steps(&dir.path().join("run")) {
        let by_env = &step["rollout"]["by_env"];
        let groups = |env: &str| by_env[env]["episodes"].as_u64().unwrap() / 8;
        assert_eq!((groups("letters"), groups("digits")), (6, 2), "{step}");
        let kinds = &step["rollout"]["success_by_kind"];
        for kind in ["letters:letters", "digits:easy", "digits:hard"] {
            assert!(kinds[kind].is_f64(), "{kind}: {step}");
            let n = step["rollout"]["scored_by_kind"][kind].as_u64();
            assert!(n.unwrap() > 0, "{kind}: {step}");
        }
    }
    let report = std::fs::read_to_string(dir.path().join("run/report.html")).unwrap();
    assert!(report.contains("Success by environment") && report.contains("success: digits"));
}

#[test]
fn the_same_seed_draws_the_same_mixture_also_after_a_resume() {
    let dir = tempfile::tempdir().unwrap();
    project(dir.path(), "grpo", 4);
    let drawn = |run: &str| {
        let mut command = sinew();
        command.current_dir(dir.path());
        command.args([
            "episodes",
            "--run-dir",
            run,
            "--purpose",
            "train",
            "--limit",
            "1000",
        ]);
        let output = command.arg("--json").output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        let rows = json_lines(&text).into_iter();
        let rows = rows.filter(|row| row["episode"].is_string());
        let one = |row: Value| {
            let text = |key: &str| row[key].as_str().unwrap().to_owned();
            (text("episode"), text("task"))
        };
        rows.map(one).collect::<BTreeMap<String, String>>()
    };
    last_line(&train(dir.path(), "one"));
    last_line(&train(dir.path(), "two"));
    let all = drawn("one");
    assert_eq!(all.len(), 4 * 64);
    assert_eq!(all, drawn("two"));
    // Two steps, then the rest in another session.
    let text = std::fs::read_to_string(dir.path().join("mix.toml")).unwrap();
    std::fs::write(
        dir.path().join("mix.toml"),
        text.replace("steps = 4", "steps = 2"),
    )
    .unwrap();
    last_line(&train(dir.path(), "three"));
    std::fs::write(dir.path().join("mix.toml"), text).unwrap();
    let mut command = sinew();
    command.current_dir(dir.path());
    command.args([
        "train",
        "mix.toml",
        "--json",
        "--resume",
        "--run-dir",
        "three",
    ]);
    last_line(&command.output().unwrap());
    assert_eq!(all, drawn("three"));
}

#[test]
fn mixtures_that_cannot_work_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    project(dir.path(), "grpo", 1);
    let good = std::fs::read_to_string(dir.path().join("mix.toml")).unwrap();
    let check = |text: &str| {
        std::fs::write(dir.path().join("mix.toml"), text).unwrap();
        let mut command = sinew();
        command.current_dir(dir.path()).args(["check", "mix.toml"]);
        command.output().unwrap()
    };
    let output = check(&good);
    let told = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{told}");
    assert!(told.contains("mixture: 5"), "{told}");
    for (from, to, part) in [
        (
            "weight = 3",
            "weight = 0",
            "env[0].weight = 0: allowed: a number above 0",
        ),
        (
            "\"digits\"\ntype",
            "\"letters\"\ntype",
            "a name that no other [[env]] has",
        ),
        (
            "\"digits\"\ntype",
            "\"a:b\"\ntype",
            "letters, digits, `.`, `_` and `-`",
        ),
        ("hard = 1 }", "hard = 1, odd = 1 }", "unknown type `odd`"),
        ("easy = 1, ", "", "without the type `easy`"),
        ("kind = \"level\", ", "", "has no effect without tasks.kind"),
        (
            "kind = \"level\"",
            "sampling = \"adaptive\"",
            "`sampling` belongs to [tasks]",
        ),
        (
            "[rollout]",
            "[tasks]\nsource = \"letters.jsonl\"\n[rollout]",
            "each environment has",
        ),
        ("reward = 'regex(\"[a-z]\")'", "", "env[0].reward = missing"),
        ("tasks_per_step", "tasks_per_stp", "tasks_per_step"),
        (
            "digits.jsonl\", prompt",
            "none.jsonl\", prompt",
            "env \"digits\"",
        ),
    ] {
        assert!(good.contains(from), "{from}");
        let output = check(&good.replacen(from, to, 1));
        let told = [output.stdout.as_slice(), output.stderr.as_slice()].concat();
        let told = String::from_utf8_lossy(&told);
        assert!(
            !output.status.success() && told.contains(part),
            "{to}: {told}"
        );
    }
    let tiny = good.replacen(
        "type = \"chat\"\nreward = 'regex(\"[a-z]\")'\n",
        "type = \"tiny\"\n",
        1,
    );
    let tiny = tiny.lines().filter(|l| !l.contains("letters.jsonl"));
    let tiny: Vec<&str> = tiny.collect();
    let errors = failure(&check(&tiny.join("\n")), 1);
    assert!(errors.contains("one tokenizer"), "{errors}");
}

/// Episodes of a mixture are scored again, each by the reward of its environment.
#[test]
fn stored_episodes_are_scored_again_by_their_environment() {
    let dir = tempfile::tempdir().unwrap();
    project(dir.path(), "agent_rl", 1);
    last_line(&train(dir.path(), "run"));
    let rescore = |more: &[&str]| {
        let mut command = sinew();
        let args = ["rescore", "run", "--dry-run", "--json"];
        command.current_dir(dir.path()).args(args).args(more);
        let output = command.output().unwrap();
        let whole = last_line(&output);
        let rows = String::from_utf8(output.stdout).unwrap();
        (whole, json_lines(&rows))
    };
    let (whole, rows) = rescore(&[]);
    let episodes = whole["episodes"].as_u64().unwrap();
    assert_eq!(
        (episodes, &whole["unscored"]),
        (64, &Value::from(0)),
        "{whole}"
    );
    let row = |name: &str| rows.iter().find(|r| r["component"] == name).unwrap();
    // Nothing changed since: the same rewards, of the same episodes.
    for component in rows.iter().filter(|r| r["component"].is_string()) {
        assert_eq!(component["changed"], 0, "{component}");
        assert_eq!(
            component["old_episodes"], component["new_episodes"],
            "{component}"
        );
    }
    assert_eq!(row("total")["new_episodes"], episodes);
    let digits = row("repetition")["new_episodes"].as_u64().unwrap();
    assert!(0 < digits && digits < episodes, "{rows:?}");
    // Only its environment could score the episodes of an environment without a reward in the recipe.
    let text = std::fs::read_to_string(dir.path().join("mix.toml")).unwrap();
    let chat = "type = \"chat\"\nreward = 'regex(\"[a-z]\")'";
    let other = text.replace(chat, "type = \"http\"\nurl = \"http://127.0.0.1:9\"");
    assert_ne!(text, other);
    std::fs::write(dir.path().join("other.toml"), other).unwrap();
    let (whole, _) = rescore(&["--recipe", "other.toml"]);
    assert_eq!(
        (&whole["episodes"], &whole["without_reward"]),
        (&digits.into(), &(64 - digits).into())
    );
    let (whole, _) = rescore(&["--reward", "length(max = 1)"]);
    assert_eq!(
        (&whole["episodes"], &whole["without_reward"]),
        (&64.into(), &0.into())
    );
}

#[test]
fn a_reward_server_of_one_environment_must_take_a_connection() {
    let dir = tempfile::tempdir().unwrap();
    project(dir.path(), "grpo", 1);
    let text = std::fs::read_to_string(dir.path().join("mix.toml")).unwrap();
    let url = "http://127.0.0.1:1/score";
    let served = text.replace("'regex(\"[a-z]\")'", &format!("\"{url}\""));
    assert_ne!(text, served);
    std::fs::write(dir.path().join("mix.toml"), served).unwrap();
    let mut command = sinew();
    command.current_dir(dir.path()).args(["check", "mix.toml"]);
    let said = failure(&command.output().unwrap(), 3);
    assert!(
        said.contains(&format!("reward = {url:?} is not reachable")),
        "{said}"
    );
}
