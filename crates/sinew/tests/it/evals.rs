//! Benchmarks, their comparison, and harnesses of the field at the gateway.

use crate::runs::small_folder;
use crate::{failure, last_line, root, run_ok, sinew, small_tiny};
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The interpreter of a set of packages; `None`: it was not installed.
pub(crate) fn interpreter(set: &str) -> Option<PathBuf> {
    let python = root().join(format!(".cache/venv-{set}/bin/python3"));
    python.is_file().then_some(python)
}

/// `sinew eval --bench NAME` of a model, into a folder.
fn bench(name: &str, model: &Path, run: &Path, more: &[&str]) -> Command {
    let mut command = sinew();
    command.args(["eval", "--bench", name, "--json"]).args(more);
    command.arg("--model").arg(model).arg("--run-dir").arg(run);
    command
}

/// Four problems of the repository's rows, answered in eight tokens.
const SHORT: [&str; 12] = [
    "--data",
    "data/gsm8k-200.jsonl",
    "--tasks",
    "4",
    "--samples",
    "2",
    "--seeds",
    "0,1",
    "--max-tokens",
    "8",
    "--price",
    "1,2",
];

#[test]
fn a_benchmark_has_intervals_counts_and_reports_and_continues() {
    let dir = tempfile::tempdir().unwrap();
    let model = small_folder(dir.path());
    let run = dir.path().join("eval");
    let eval = |more: &[&str]| bench("gsm8k", &model, &run, &[&SHORT[..], more].concat());
    let first = last_line(&eval(&[]).output().unwrap());
    let result = &first["results"][0];
    assert_eq!(
        (&result["bench"], &result["tasks"]),
        (&json!("gsm8k"), &json!(4))
    );
    for (set, samples) in [("greedy", 4), ("sampled", 16)] {
        let counts = &result[set]["counts"];
        assert_eq!(counts["samples"], samples, "{result}");
        let apart = counts["failed"].as_u64().unwrap() + counts["unscored"].as_u64().unwrap();
        assert_eq!(counts["scored"].as_u64().unwrap() + apart, samples);
        assert!(result[set]["as_zero"].is_number(), "{result}");
    }
    // Random weights solve nothing: one answer of each task has Wilson's interval, several have none.
    let greedy = &result["greedy"]["success"];
    assert_eq!(
        (&greedy["mean"], &greedy["method"]),
        (&json!(0.0), &json!("wilson")),
        "{greedy}"
    );
    assert!(greedy["interval"]["high"].as_f64().unwrap() > 0.3);
    assert!(result["sampled"]["pass_at"]["4"].is_object(), "{result}");
    assert_eq!(result["by_seed"], json!({"0": 0.0, "1": 0.0}));
    assert_eq!(result["contamination"]["state"], "not_checked");
    assert!(result["tokens"]["cost"].as_f64().unwrap() > 0.0);
    assert_eq!(result["settings"]["rollout.max_turn_tokens"], 8);
    assert!(result.get("per_task").is_none());
    let rows = fs::read_to_string(run.join("rows/gsm8k.jsonl")).unwrap();
    assert_eq!(rows.lines().count(), 200);
    let kept = fs::read(run.join("gsm8k/result.json")).unwrap();
    let kept: Value = serde_json::from_slice(&kept).unwrap();
    assert_eq!(kept["per_task"].as_array().unwrap().len(), 4);
    let report = fs::read_to_string(run.join("report.md")).unwrap();
    assert!(report.contains("| gsm8k | 4 |"), "{report}");
    assert!(run.join("report.html").is_file() && run.join("evaluation.json").is_file());

    // It is not overwritten, continues with its stored episodes, and refuses another limit.
    let text = failure(&eval(&[]).output().unwrap(), 2);
    assert!(text.contains("--resume continues it"), "{text}");
    assert_eq!(first, last_line(&eval(&["--resume"]).output().unwrap()));
    fs::remove_file(run.join("gsm8k/result.json")).unwrap();
    let again = last_line(&eval(&["--resume"]).output().unwrap());
    for key in ["greedy", "sampled", "by_kind", "tokens"] {
        assert_eq!(again["results"][0][key], result[key], "{key}");
    }
    let text = failure(
        &eval(&["--resume", "--context", "1000"]).output().unwrap(),
        2,
    );
    assert!(text.contains("rollout.max_context_tokens"), "{text}");
}

#[test]
fn measurements_of_the_same_tasks_are_compared_and_others_refused() {
    let dir = tempfile::tempdir().unwrap();
    let model = small_folder(dir.path());
    let place = |name: &str| dir.path().join(name);
    let few = ["--data", "data/gsm8k-200.jsonl", "--samples", "0"];
    for (name, more) in [
        ("a", ["--tasks", "3", "--max-tokens", "8"]),
        ("b", ["--tasks", "3", "--max-tokens", "8"]),
        ("longer", ["--tasks", "3", "--max-tokens", "9"]),
        ("more", ["--tasks", "4", "--max-tokens", "8"]),
    ] {
        let more = [&few[..], &more[..]].concat();
        last_line(
            &bench("gsm8k", &model, &place(name), &more)
                .output()
                .unwrap(),
        );
    }
    let compare = |other: &str| {
        let mut command = sinew();
        command.args(["eval", "--json", "--compare"]);
        command.arg(place("a")).arg(place(other));
        command.output().unwrap()
    };
    let found = last_line(&compare("b"));
    let greedy = &found["comparisons"][0]["greedy"];
    assert_eq!(
        (&greedy["tasks"], &greedy["difference"], &greedy["better"]),
        (&json!(3), &json!(0.0), &json!(0)),
        "{found}"
    );
    let text = failure(&compare("longer"), 2);
    assert!(text.contains("rollout.max_turn_tokens: 8 and 9"), "{text}");
    let text = failure(&compare("more"), 2);
    assert!(text.contains("different tasks"), "{text}");
}

/// The end of a training run and `sinew eval` of its recipe with its weights are the same measurement.
#[test]
fn runs_are_compared_by_their_last_measurement() {
    let dir = tempfile::tempdir().unwrap();
    let recipe = dir.path().join("recipe.toml");
    fs::write(&recipe, small_tiny()).unwrap();
    let (run, eval) = (dir.path().join("run"), dir.path().join("eval"));
    let mut command = sinew();
    command.arg("train").arg(&recipe).arg("--run-dir").arg(&run);
    run_ok(&mut command);
    // It says itself what it gained, sampled and greedy.
    let evals = fs::read_to_string(run.join("evals.jsonl")).unwrap();
    let after: Value = serde_json::from_str(evals.lines().last().unwrap()).unwrap();
    for set in ["sampled", "greedy"] {
        let gain = &after["gain"][set];
        assert!(gain["difference"].is_number(), "{after}");
        // Tasks that all differ by the same have no spread, so that an exact test stands in for the interval.
        let certain = if gain["se"] == 0.0 {
            "mcnemar_p"
        } else {
            "low"
        };
        assert!(gain[certain].is_number(), "{after}");
    }
    let mut command = sinew();
    command.arg("eval").arg(&recipe).arg("--model").arg(&run);
    run_ok(command.arg("--run-dir").arg(&eval));
    let mut command = sinew();
    command.args(["eval", "--json", "--compare"]);
    let found = last_line(&command.arg(&run).arg(&eval).output().unwrap());
    let sampled = &found["comparisons"][0]["sampled"];
    assert!(sampled["first"].as_f64().unwrap() > 0.0, "{found}");
    assert_eq!(
        (&sampled["better"], &sampled["worse"]),
        (&json!(0), &json!(0)),
        "{found}"
    );
}

#[test]
fn training_tasks_of_a_run_are_found_among_the_prompts() {
    let dir = tempfile::tempdir().unwrap();
    let model = small_folder(dir.path());
    let rows = fs::read_to_string(root().join("data/gsm8k-200.jsonl")).unwrap();
    let few: Vec<&str> = rows.lines().take(8).collect();
    fs::write(dir.path().join("few.jsonl"), few.join("\n")).unwrap();
    let recipe = format!(
        "name = \"few\"\nmodel = {:?}\nreward = \"number(answer)\"\n\
         tasks = {{ source = {:?}, prompt = \"{{{{ question }}}}\", held_out = 0.2 }}\n\
         [rollout]\ntasks_per_step = 1\ngroup_size = 2\nmax_turns = 1\nmax_turn_tokens = 4\nmax_context_tokens = 768\n\
         [algorithm]\ntype = \"reinforce_pp\"\nkl = {{ place = \"reward\", coefficient = 0.1 }}\n\
         [train]\nsteps = 1\n[eval]\ntasks = 1\n",
        model,
        dir.path().join("few.jsonl")
    );
    let path = dir.path().join("few.toml");
    fs::write(&path, recipe).unwrap();
    let run = dir.path().join("run");
    let mut command = sinew();
    command.arg("train").arg(&path).arg("--run-dir").arg(&run);
    // A model that never solved a task has nothing to tell its episodes apart by.
    let errors = failure(&command.output().unwrap(), 1);
    assert!(errors.contains("the run trained no token"), "{errors}");
    let more = [
        "--data",
        "data/gsm8k-200.jsonl",
        "--samples",
        "0",
        "--max-tokens",
        "1",
    ];
    let eval = bench("gsm8k", &run, &dir.path().join("eval"), &more).output();
    let last = last_line(&eval.unwrap());
    let found = &last["results"][0]["contamination"];
    let number = |name: &str| found[name].as_u64().unwrap();
    assert_eq!((&found["state"], number("tasks")), (&json!("checked"), 200));
    assert!((1..8).contains(&number("trained")), "{found}");
    assert!(number("overlapping") >= number("trained"), "{found}");
}

#[test]
fn benchmarks_of_packages_are_measured_whole() {
    let dir = tempfile::tempdir().unwrap();
    let model = small_folder(dir.path());
    let rows = dir.path().join("ifeval.jsonl");
    let row = |i: u32| {
        json!({
            "prompt": format!("Say {i}. Do not use any commas."),
            "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}],
        })
    };
    let text: Vec<String> = (0..4).map(|i| row(i).to_string()).collect();
    fs::write(&rows, text.join("\n")).unwrap();
    let rows = rows.to_str().unwrap();
    for (name, set, more) in [
        ("humaneval", "games", &[][..]),
        ("bfcl", "bfcl", &[][..]),
        ("reasoning-gym", "reasoning", &[][..]),
        ("ifeval", "ifeval", &["--data", rows][..]),
    ] {
        let python = interpreter(set).unwrap_or_else(|| panic!("run scripts/bridges.sh {set}"));
        let python = python.to_str().unwrap();
        let short = [
            "--samples",
            "0",
            "--tasks",
            "4",
            "--max-tokens",
            "8",
            "--context",
            "1600",
        ];
        let more = [&short[..], &["--python", python], more].concat();
        let run = dir.path().join(name);
        let last = last_line(&bench(name, &model, &run, &more).output().unwrap());
        let result = &last["results"][0];
        assert_eq!(result["greedy"]["counts"]["failed"], 0, "{result}");
        if name == "bfcl" {
            // Four tasks out of all 1,000, of more than two categories.
            assert!(result["by_kind"].as_object().unwrap().len() > 2, "{result}");
        }
    }
    // The context of this model is too small for the benchmark, and the message says how to set another.
    let python = interpreter("games").unwrap();
    let more = ["--samples", "0", "--python", python.to_str().unwrap()];
    let refused = bench("humaneval", &model, &dir.path().join("x"), &more).output();
    let text = failure(&refused.unwrap(), 2);
    assert!(text.contains("--context N sets it"), "{text}");
}

#[test]
fn wrong_options_of_benchmarks_are_named() {
    for (args, said) in [
        (
            &["--bench", "gsm9k", "--model", "m"][..],
            "there is no such benchmark; allowed: gsm8k, math",
        ),
        (
            &["--bench", "gsm8k", "--model", "vllm+http://127.0.0.1:1"][..],
            "--tokenizer is missing",
        ),
        (
            &["--bench", "gsm8k", "--model", "m", "--user", "u"][..],
            "--user: has an effect with benchmarks that have a user only",
        ),
        (
            &["--bench", "gsm8k", "--model", "m", "--level", "process"][..],
            "--level: has an effect with --bench harbor:DIR only",
        ),
        (
            &["--bench", "harbor:a b", "--model", "m"][..],
            "the last part of the path names the result",
        ),
        (
            &["--bench", "tau2-airline", "--model", "m"][..],
            "--user is missing",
        ),
        (
            &["--bench", "gsm8k", "--model", "m", "--tokenizer", "t"][..],
            "has an effect with --model URL only",
        ),
        (
            &[
                "--bench",
                "gsm8k",
                "--model",
                "m",
                "--samples",
                "0",
                "--no-greedy",
            ][..],
            "nothing left to measure",
        ),
        (
            &["--bench", "bfcl", "--model", "m", "--data", "d"][..],
            "--data: has no effect",
        ),
        (
            &["--bench", "gsm8k,gsm8k", "--model", "m"][..],
            "named twice",
        ),
        (&["--bench", "gsm8k"][..], "--model"),
        (
            &["--compare", "runs/none", "runs/none"][..],
            "holds no measurement",
        ),
        (&[][..], "RECIPE"),
    ] {
        let output = sinew().arg("eval").args(args).output().unwrap();
        let text = failure(&output, 2);
        assert!(text.contains(said), "{args:?}: {text}");
    }
    let all = run_ok(sinew().args(["eval", "--benches", "--json"]));
    let names: Vec<Value> = all
        .lines()
        .map(|line| serde_json::from_str::<Value>(line).unwrap()["bench"].clone())
        .collect();
    assert!(names.contains(&json!("ifeval")) && names.contains(&json!("humaneval+")));
}

/// A task of lm-eval whose options are weighed by their log-probabilities.
fn weighed(folder: &Path) {
    let row = |i: u32| {
        let question = format!("Which is a number? Case {i}.");
        json!({"question": question, "choices": [" seven", " a blue door"], "answer": 0})
    };
    let rows: Vec<String> = (0..3).map(|i| row(i).to_string()).collect();
    fs::write(folder.join("rows.jsonl"), rows.join("\n")).unwrap();
    // JSON is YAML.
    let task = json!({
        "task": "weighed", "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": folder.join("rows.jsonl")}},
        "output_type": "multiple_choice", "test_split": "test",
        "doc_to_text": "{{ question }} Answer:", "doc_to_choice": "{{ choices }}", "doc_to_target": "{{ answer }}",
        "target_delimiter": "", "metric_list": [{"metric": "acc"}],
    });
    fs::write(folder.join("weighed.yaml"), task.to_string()).unwrap();
}

const INSPECT: &str = "
from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import match
from inspect_ai.solver import generate

@task
def words():
    return Task(dataset=[Sample(input=f'Say yes ({i}).', target='yes') for i in range(3)], solver=generate(), scorer=match('any'))
";

/// lm-eval gets log-likelihoods of given tokens, and Inspect answers, from the gateway.
#[test]
fn harnesses_of_the_field_ask_the_gateway_where_they_are_installed() {
    let Some(python) = interpreter("harnesses") else {
        return;
    };
    let key = "0123456789-harness";
    let dir = tempfile::tempdir().unwrap();
    let model = small_folder(dir.path());
    let named = model.to_str().unwrap();
    let options = ["--engine", "embedded", "--model", named, "--api-key", key];
    let server = crate::serve::serving(&[&options[..], &["--context", "1024"]].concat());
    weighed(dir.path());
    let out = dir.path().join("out");
    let arguments = format!(
        "model=sinew,base_url=http://{}/v1/completions,num_concurrent=2,tokenizer_backend=huggingface,tokenizer={named}",
        server.address
    );
    let mut command = Command::new(&python);
    command
        .args(["-m", "lm_eval", "--model", "local-completions"])
        .args(["--tasks", "weighed"])
        .args(["--model_args", &arguments, "--log_samples"])
        .arg("--include_path")
        .arg(dir.path())
        .arg("--output_path")
        .arg(&out)
        .env("OPENAI_API_KEY", key)
        .env("HF_HUB_OFFLINE", "1")
        .env("HF_HOME", dir.path().join("hf"));
    run_ok(&mut command);
    let find = "import pathlib, sys; print(next(pathlib.Path(sys.argv[1]).rglob('samples_*.jsonl')).read_text(), end='')";
    let samples = run_ok(Command::new(&python).args(["-c", find]).arg(&out));
    assert_eq!(samples.lines().count(), 3);
    for line in samples.lines() {
        let sample: Value = serde_json::from_str(line).unwrap();
        let weight = |i: usize| {
            let text = sample["resps"][i][0][0].to_string();
            text.trim_matches('"').parse::<f64>().unwrap()
        };
        // Random weights: each token has about one chance in as many as there are, and the right
        // text has more of them.
        assert!(weight(0) < -5.0 && weight(1) < weight(0), "{sample}");
    }
    answers_inspect(&python, dir.path(), &server.address, key);
}

/// Inspect gets answers of the chat interface. It takes only relative paths of tasks.
fn answers_inspect(python: &Path, folder: &Path, address: &str, key: &str) {
    fs::write(folder.join("words.py"), INSPECT).unwrap();
    let program = fs::canonicalize(python.parent().unwrap()).unwrap();
    let mut command = Command::new(program.join("inspect"));
    command
        .current_dir(folder)
        .args(["eval", "words.py", "--model", "openai/sinew"])
        .args(["-M", "responses_api=false", "--max-tokens", "8"])
        .args(["--display", "plain", "--log-dir", "logs"])
        .env("OPENAI_API_KEY", key)
        .env("OPENAI_BASE_URL", format!("http://{address}/v1"));
    let said = run_ok(&mut command);
    assert!(said.contains("accuracy"), "{said}");
}
