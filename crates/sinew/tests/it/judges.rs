//! Judges: a model that learns from one, a spent budget, and early refusals.

use crate::{Running, failure, json_file, last_line, request, sinew, steps, with_changes};
use serde_json::{Value, json};
use std::collections::HashSet;
use std::fmt::Write as _;
use std::io::{BufRead, BufReader, Write as _};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Command, Output};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

/// A server that judges by a rule: an answer meets the item if it has a small letter; of two answers,
/// that with more of them is better, and the first where both have equally many. Every tenth verdict is
/// none, but no question gets none twice, whatever the order of the calls. Its calls are counted.
fn judge() -> (String, Arc<AtomicUsize>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}/v1", listener.local_addr().unwrap());
    let calls = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&calls);
    let refused = Arc::<Mutex<HashSet<String>>>::default();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let call = counted.fetch_add(1, Ordering::SeqCst);
            let refused = Arc::clone(&refused);
            std::thread::spawn(move || verdict(stream.unwrap(), call, &refused));
        }
    });
    (url, calls)
}

/// Number of small letters.
fn small(output: &str) -> usize {
    output.chars().filter(char::is_ascii_lowercase).count()
}

fn verdict(mut stream: TcpStream, call: usize, refused: &Mutex<HashSet<String>>) {
    let (_, body) = request(&stream).unwrap();
    let body: Value = serde_json::from_slice(&body).unwrap();
    let asked = body["messages"][1]["content"].as_str().unwrap();
    let (id, data) = asked
        .split_once("BEGIN DATA ")
        .unwrap()
        .1
        .split_once('\n')
        .unwrap();
    let data: Value = serde_json::from_str(data.split_once("\nEND DATA").unwrap().0).unwrap();
    let said = if call % 10 == 9 && refused.lock().unwrap().insert(data.to_string()) {
        "I like it.".to_owned()
    } else if data["answers"].is_object() {
        let count = |label: &str| small(data["answers"][label]["output"].as_str().unwrap());
        let better = if count("A") >= count("B") { "A" } else { "B" };
        json!({"id": id, "better": better}).to_string()
    } else {
        let met = small(data["output"].as_str().unwrap()) > 0;
        json!({"id": id, "item_1": met}).to_string()
    };
    let answer = json!({
        "choices": [{"message": {"role": "assistant", "content": said}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 100, "completion_tokens": 10},
    })
    .to_string();
    // A run that was stopped needs no answer.
    let _ = write!(
        stream,
        "HTTP/1.1 200 OK\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{answer}",
        answer.len()
    );
}

/// A recipe next to 60 rows: a model from scratch, and a judge with further keys `more`.
fn project(dir: &Path, url: &str, more: &str) {
    let rows = (0..60).fold(String::new(), |mut rows, i| {
        let _ = writeln!(rows, r#"{{"question": "Say {i}", "answer": "{i}"}}"#);
        rows
    });
    std::fs::write(dir.join("tasks.jsonl"), rows).unwrap();
    let text = format!(
        "model = {{ type = \"scratch\", d_model = 64, layers = 2, heads = 4, kv_heads = 2, d_ff = 128 }}\n\
         tasks = {{ source = \"tasks.jsonl\", prompt = \"{{{{ question }}}}\" }}\n\
         [reward]\n\"judge.letters\" = 1.0\n\"exact(answer)\" = 0\n\
         [judge.letters]\nmodel = \"rule\"\nurl = \"{url}\"\nrubric = [\"Has a small letter\"]\n\
         columns = [\"answer\"]\n{more}\n\
         [rollout]\ntasks_per_step = 6\ngroup_size = 8\nmax_turn_tokens = 4\nmax_context_tokens = 160\n\
         [train]\nsteps = 25\nlearning_rate = 3e-3\nmicro_batch_tokens = 4096\n"
    );
    std::fs::write(dir.join("own.toml"), text).unwrap();
}

fn run(dir: &Path, args: &[&str]) -> Output {
    command(dir, args).output().unwrap()
}

fn command(dir: &Path, args: &[&str]) -> Command {
    let mut command = sinew();
    command.current_dir(dir).args(args);
    command
}

#[test]
fn a_model_learns_from_a_judge() {
    let dir = tempfile::tempdir().unwrap();
    let (url, calls) = judge();
    project(dir.path(), &url, "");
    let checked = run(dir.path(), &["check", "own.toml"]);
    let text = String::from_utf8_lossy(&checked.stdout);
    assert!(
        checked.status.success() && text.contains("ready: exact(answer), judge.letters"),
        "{text}"
    );
    let output = run(
        dir.path(),
        &["train", "own.toml", "--json", "--run-dir", "run"],
    );
    let last = last_line(&output);
    let success = |at: &str| last["eval"][at]["success"].as_f64().unwrap();
    assert!(success("before") < 0.7 && success("after") > 0.9, "{last}");
    for step in steps(&dir.path().join("run")) {
        let metrics = &step["rollout"]["metrics"];
        assert!(metrics["reward/judge.letters"].is_f64(), "{step}");
        assert!(metrics["reward/judge.letters/item_1"].is_f64(), "{step}");
        assert_eq!(
            step["rollout"]["unscored"], 0,
            "refused verdicts were asked for again"
        );
    }
    // Every verdict is kept, so no question was asked twice.
    let lines = json_file(dir.path().join("run/judges/letters.jsonl"));
    let mut keys: Vec<&str> = lines.iter().filter_map(|l| l["key"].as_str()).collect();
    let verdicts = keys.len();
    keys.sort_unstable();
    keys.dedup();
    assert_eq!(keys.len(), verdicts);
    assert!(lines.len() > verdicts && calls.load(Ordering::SeqCst) > verdicts);
}

#[test]
fn a_model_learns_from_comparisons() {
    let dir = tempfile::tempdir().unwrap();
    let (url, calls) = judge();
    project(dir.path(), &url, "mode = \"compare\"");
    edit(
        dir.path(),
        &[
            (
                "\"judge.letters\" = 1.0\n\"exact(answer)\" = 0",
                "\"judge.letters\" = { weight = 1.0, pairs = 16 }\n'regex(\"[a-z]\")' = 0",
            ),
            ("steps = 25", "steps = 30"),
            ("group_size = 8", "group_size = 5"),
        ],
    );
    let checked = run(dir.path(), &["check", "own.toml"]);
    let text = String::from_utf8_lossy(&checked.stdout);
    assert!(
        checked.status.success() && text.contains("judge.letters (up to 16 pairs of a group)"),
        "{text}"
    );
    let args = ["train", "own.toml", "--json", "--run-dir", "run"];
    last_line(&run(dir.path(), &args));
    let steps = steps(&dir.path().join("run"));
    let metric = |step: &Value, name: &str| step["rollout"]["metrics"][name].as_f64().unwrap();
    for step in &steps {
        assert_eq!(step["rollout"]["unscored"], 0, "{step}");
        // Each win of one is a loss of another.
        let mean = metric(step, "reward/judge.letters");
        assert!((mean - 0.5).abs() < 1e-9, "{step}");
        assert_eq!(metric(step, "reward/judge.letters/pairs"), 4.0, "{step}");
    }
    let met = |step: &Value| metric(step, "reward/regex");
    let (first, last) = (met(&steps[0]), met(&steps[29]));
    assert!(first < 0.6 && last > 0.85, "{first} {last}");
    // The bound is 6 groups of 10 pairs in both orders; every tenth answer is not a verdict and is asked for
    // again.
    let asked = calls.load(Ordering::SeqCst);
    assert!((500..=30 * 120 * 2).contains(&asked), "{asked} calls");
}

#[test]
fn the_first_weights_judge_and_what_they_do_not_say_is_unscored() {
    let dir = tempfile::tempdir().unwrap();
    let judged = |more: &str, name: &str| {
        project(dir.path(), "http://x", more);
        let policy = ("model = \"rule\"\nurl = \"http://x\"", "model = \"policy\"");
        edit(dir.path(), &[policy, ("steps = 25", "steps = 2")]);
        run(
            dir.path(),
            &["train", "own.toml", "--json", "--run-dir", name],
        )
    };
    // Masks give its verdicts the right form, whatever it finds.
    last_line(&judged("mode = \"scale\"\ntemperature = 1.0", "each"));
    for step in steps(&dir.path().join("each")) {
        assert_eq!(step["rollout"]["unscored"], 0, "{step}");
        assert!(step["rollout"]["metrics"]["reward/judge.letters"].is_f64());
    }
    // Its reasons have no end, so there is no verdict: no score, no crash.
    let output = judged("reasons = true\nmax_tokens = 32\nretries = 0", "cut");
    let errors = failure(&output, 1);
    let cause = "judge.letters: it was cut after max_tokens = 32";
    assert!(
        errors.contains("48 of 48 episodes: unscored") && errors.contains(cause),
        "{errors}"
    );
    let steps = steps(&dir.path().join("cut"));
    assert_eq!(steps.len(), 2);
    for step in steps {
        assert_eq!(step["dropped"][format!("unscored: {cause}")], 48, "{step}");
        assert_eq!(step["trained_tokens"], 0, "{step}");
    }
}

#[test]
fn a_spent_budget_stops_the_run_which_goes_on_with_a_larger_one() {
    let dir = tempfile::tempdir().unwrap();
    let (url, _) = judge();
    project(dir.path(), &url, "max_calls = 60");
    let errors = failure(
        &run(dir.path(), &["train", "own.toml", "--run-dir", "run"]),
        3,
    );
    let expected = "judge.letters: the budget is spent: max_calls = 60";
    assert!(
        errors.contains(expected) && errors.contains("--resume"),
        "{errors}"
    );
    // No step was trained on missing scores.
    let steps = std::fs::read_to_string(dir.path().join("run/metrics.jsonl")).unwrap_or_default();
    assert!(
        steps.lines().all(|s| s.contains("\"unscored\":0")),
        "{steps}"
    );
    let recipe = dir.path().join("run/recipe.toml");
    let text = std::fs::read_to_string(&recipe).unwrap();
    let larger = text
        .replace("max_calls = 60", "max_calls = 100000")
        .replace("steps = 25", "steps = 3");
    std::fs::write(&recipe, larger).unwrap();
    let args = [
        "train",
        "run/recipe.toml",
        "--run-dir",
        "run",
        "--resume",
        "--json",
    ];
    let allowed = [&args[..], &["--allow-change", "judge.letters.max_calls"]].concat();
    let last = last_line(&run(dir.path(), &allowed));
    assert_eq!(last["samples"]["lost"], 0, "{last}");
}

#[test]
fn a_judge_that_lacks_something_is_named_before_the_run() {
    let dir = tempfile::tempdir().unwrap();
    let (url, calls) = judge();
    project(dir.path(), &url, "key_env = \"SINEW_TEST_NO_SUCH_KEY\"");
    for command in ["check", "train"] {
        let output = run(dir.path(), &[command, "own.toml"]);
        let all = format!(
            "{}{}",
            String::from_utf8_lossy(&output.stdout),
            failure(&output, 3)
        );
        assert!(
            all.contains("SINEW_TEST_NO_SUCH_KEY") && all.contains("not set"),
            "{all}"
        );
    }
    let mut with_key = command(dir.path(), &["check", "own.toml"]);
    let output = with_key
        .env("SINEW_TEST_NO_SUCH_KEY", "k")
        .output()
        .unwrap();
    assert!(output.status.success());
    let before = calls.load(Ordering::SeqCst);
    project(dir.path(), &url, "");
    let path = dir.path().join("own.toml");
    let text = std::fs::read_to_string(&path).unwrap();
    std::fs::write(&path, text.replace("[\"answer\"]", "[\"source\"]")).unwrap();
    let output = run(dir.path(), &["check", "own.toml"]);
    let all = String::from_utf8_lossy(&output.stdout);
    assert!(
        all.contains("judge.letters.columns: tasks have no column source"),
        "{all}"
    );
    assert_eq!(output.status.code(), Some(1));
    std::fs::write(
        &path,
        text.replace("rubric = [\"Has a small letter\"]", "rubric = \"none.md\""),
    )
    .unwrap();
    assert!(failure(&run(dir.path(), &["train", "own.toml"]), 2).contains("none.md"));
    project(dir.path(), "http://127.0.0.1:1/v1", "");
    assert!(failure(&run(dir.path(), &["check", "own.toml"]), 3).contains("judge.letters.url"));
    assert_eq!(calls.load(Ordering::SeqCst), before);
}

/// A tiny Llama for bytes: a reward model, or a language model where `is_reward` is false.
fn write_model(dir: &Path, is_reward: bool) {
    use sinew_render::Renderer;
    std::fs::create_dir_all(dir).unwrap();
    let renderer = sinew_render::byte_renderer().unwrap();
    for (name, bytes) in renderer.files().unwrap() {
        std::fs::write(dir.join(name), bytes).unwrap();
    }
    let (vocab, d) = (renderer.vocab_size(), 16);
    let config = json!({
        "model_type": "llama", "vocab_size": vocab, "hidden_size": d, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": d, "rope_theta": 1e4,
        "rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "tie_word_embeddings": true,
        "eos_token_id": renderer.stop_ids()[0],
    });
    std::fs::write(dir.join("config.json"), config.to_string()).unwrap();
    let mut tensors = vec![
        ("embed_tokens".to_owned(), vec![vocab, d]),
        ("norm".to_owned(), vec![d]),
        ("layers.0.input_layernorm".to_owned(), vec![d]),
        ("layers.0.post_attention_layernorm".to_owned(), vec![d]),
    ];
    for name in [
        "self_attn.q",
        "self_attn.k",
        "self_attn.v",
        "self_attn.o",
        "mlp.gate",
        "mlp.up",
        "mlp.down",
    ] {
        tensors.push((format!("layers.0.{name}_proj"), vec![d, d]));
    }
    let names = tensors
        .into_iter()
        .map(|(name, shape)| (format!("model.{name}.weight"), shape));
    let head = is_reward.then(|| ("score.weight".to_owned(), vec![1, d]));
    let (mut header, mut data) = (serde_json::Map::new(), Vec::new());
    for (name, shape) in names.chain(head) {
        let start = data.len();
        for i in 0..shape.iter().product::<usize>() {
            data.extend((0.5 * (0.37 * (i + start) as f32).sin()).to_le_bytes());
        }
        let place = json!({"dtype": "F32", "shape": shape, "data_offsets": [start, data.len()]});
        header.insert(name, place);
    }
    let header = Value::Object(header).to_string();
    let length = (header.len() as u64).to_le_bytes();
    let bytes = [&length[..], header.as_bytes(), &data].concat();
    std::fs::write(dir.join("model.safetensors"), bytes).unwrap();
}

/// Replaces parts of the recipe.
fn edit(dir: &Path, changes: &[(&str, &str)]) {
    let path = dir.join("own.toml");
    let text = std::fs::read_to_string(&path).unwrap();
    std::fs::write(path, with_changes(text, changes)).unwrap();
}

#[test]
fn models_in_this_process_judge_and_score() {
    let dir = tempfile::tempdir().unwrap();
    write_model(&dir.path().join("judge"), false);
    write_model(&dir.path().join("rm"), true);
    project(dir.path(), "http://x", "");
    let here = [
        (
            "model = \"rule\"\nurl = \"http://x\"",
            "model = \"./judge\"",
        ),
        (
            "\"exact(answer)\" = 0",
            "\"model:./rm\" = { weight = 0.1, clip = [-5.0, 5.0] }",
        ),
        ("steps = 25", "steps = 2"),
    ];
    edit(dir.path(), &here);
    let output = run(
        dir.path(),
        &["train", "own.toml", "--json", "--run-dir", "run"],
    );
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let steps = steps(&dir.path().join("run"));
    assert_eq!(steps.len(), 2);
    for step in steps {
        let metrics = &step["rollout"]["metrics"];
        // Masks give every verdict the right form, whatever the model.
        assert_eq!(step["rollout"]["unscored"], 0, "{step}");
        assert!(metrics["reward/judge.letters"].is_f64(), "{step}");
        assert!(metrics["reward/model:./rm"].is_f64(), "{step}");
    }
    edit(dir.path(), &[("model:./rm", "model:./judge")]);
    let errors = failure(&run(dir.path(), &["train", "own.toml"]), 2);
    assert!(
        errors.contains("there is no `score.weight`: it has no head"),
        "{errors}"
    );
    edit(dir.path(), &[("model:./judge", "model:./none")]);
    assert!(failure(&run(dir.path(), &["train", "own.toml"]), 3).contains("./none"));
}

#[test]
fn a_judge_is_calibrated_against_labels() {
    let dir = tempfile::tempdir().unwrap();
    let (url, _) = judge();
    project(dir.path(), &url, "");
    let rows = [("abc", true), ("ABC", false), ("xyz", false), ("7", false)];
    let rows = rows.map(|(output, label)| {
        json!({"prompt": "Say.", "output": output, "answer": "x", "label": label}).to_string()
    });
    std::fs::write(dir.path().join("labels.jsonl"), rows.join("\n")).unwrap();
    let args = ["judge", "calibrate", "own.toml", "--labels", "labels.jsonl"];
    let table = last_line(&run(dir.path(), &[&args[..], &["--json"]].concat()));
    assert_eq!((&table["rows"], &table["unscored"]), (&json!(4), &json!(0)));
    // Two of the judge's yes, one of them right: kappa is (3/4 - 1/2) / (1/2).
    let item = &table["items"][0];
    assert_eq!(item["precision"], 0.5);
    assert_eq!(item["recall"], 1.0);
    assert_eq!(item["kappa"], 0.5);
    let text = String::from_utf8(run(dir.path(), &args).stdout).unwrap();
    assert!(
        text.contains("Has a small letter") && text.contains("0.750"),
        "{text}"
    );
    std::fs::write(dir.path().join("labels.jsonl"), "{\"output\": 1}").unwrap();
    assert!(failure(&run(dir.path(), &args), 2).contains("line 1"));
}

/// The server of `examples/`, which ends with the test.
struct Example {
    _child: Running,
    url: String,
}

fn example(key: &str) -> Example {
    let mut child = Command::new("python3")
        .arg(crate::root().join("examples/reward_server.py"))
        .arg("0")
        .env("REWARD_KEY", key)
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let mut url = String::new();
    BufReader::new(child.stdout.as_mut().unwrap())
        .read_line(&mut url)
        .unwrap();
    Example {
        _child: Running(child),
        url: url.trim().to_owned(),
    }
}

#[test]
fn the_reward_server_of_the_examples_keeps_the_protocol_and_scores() {
    let dir = tempfile::tempdir().unwrap();
    let server = example("secret");
    project(dir.path(), "http://x", "");
    let path = dir.path().join("own.toml");
    let text = std::fs::read_to_string(&path).unwrap();
    let (head, rest) = text.split_once("[reward]").unwrap();
    let rest = rest
        .split_once("[rollout]")
        .unwrap()
        .1
        .replace("steps = 25", "steps = 2");
    let reward = format!(
        "\"{}\" = {{ weight = 1.0, key_env = \"SINEW_TEST_REWARD_KEY\", batch = 8 }}",
        server.url
    );
    std::fs::write(&path, format!("{head}[reward]\n{reward}\n[rollout]{rest}")).unwrap();
    let with_key = |args: &[&str], key: &str| {
        let mut command = command(dir.path(), args);
        command.env("SINEW_TEST_REWARD_KEY", key).output().unwrap()
    };
    let checked = with_key(&["judge", "check-server", "own.toml", "--json"], "secret");
    let findings = String::from_utf8(checked.stdout).unwrap();
    assert!(
        checked.status.success() && findings.lines().count() == 7,
        "{findings}"
    );
    let output = with_key(
        &["train", "own.toml", "--json", "--run-dir", "run"],
        "secret",
    );
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let steps = std::fs::read_to_string(dir.path().join("run/metrics.jsonl")).unwrap();
    assert!(
        steps.lines().all(|s| s.contains("\"unscored\":0")),
        "{steps}"
    );
    // A wrong key scores nothing, with the reason; an outage is not a zero.
    let wrong = with_key(&["check", "own.toml"], "wrong");
    let text = String::from_utf8_lossy(&wrong.stdout).into_owned();
    assert!(
        !wrong.status.success() && text.contains("status 401"),
        "{text}"
    );
    assert!(
        failure(
            &run(dir.path(), &["train", "own.toml", "--run-dir", "x"]),
            3
        )
        .contains("not set")
    );
    drop(server);
    let gone = with_key(&["check", "own.toml"], "secret");
    assert!(failure(&gone, 3).contains("not reachable"));
}
