//! Adapters by name: a server that holds two next to its model, and a measurement with one.

use crate::runs::small_folder;
use crate::serve::{Serving, get, post, serving_by};
use crate::{failure, json_lines, last_line, run_ok, sinew};
use serde_json::{Value, json};
use sinew_model::{
    Lora, LoraConfig, ModelFiles, Projection, SaveDtype, load_model, save_pretrained,
};
use sinew_tensor::{Cpu, KernelSet};
use std::path::Path;
use std::process::Command;

const API_KEY: &str = "key-of-the-adapter-tests";

/// The program with products of 32 bits: AMX rounds operands, and merged weights round differently.
fn exact() -> Command {
    let mut command = sinew();
    command.env("SINEW_CPU", KernelSet::detect_f32().name());
    command
}

/// Writes random adapters for the model in `base` to `dir`, and the model with them merged to `merged`.
fn write_adapter(base: &Path, targets: &[Projection], seed: u64, dir: &Path, merged: &Path) {
    let model = load_model(&ModelFiles::Dir(base.to_owned()))
        .unwrap()
        .params;
    let config = LoraConfig {
        rank: 4,
        alpha: 8.0,
        targets: targets.to_vec(),
    };
    let mut lora = Lora::random(&config, model.config(), seed).unwrap();
    let mut state = seed;
    for (entry, values) in lora.tensors_mut() {
        // B begins at 0.
        if entry.name.ends_with("lora_B.weight") {
            for value in values {
                state = state
                    .wrapping_mul(6_364_136_223_846_793_005)
                    .wrapping_add(1_442_695_040_888_963_407);
                *value = (state >> 40) as f32 / (1 << 24) as f32 - 0.5;
            }
        }
    }
    lora.save(dir, "base").unwrap();
    let whole = lora.merged(&Cpu::new(KernelSet::detect_f32(), 1), &model);
    let files = [
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
    ];
    let files = files.map(|name| (name.to_owned(), std::fs::read(base.join(name)).unwrap()));
    save_pretrained(merged, &whole.unwrap(), SaveDtype::F32, &files).unwrap();
}

fn server(model: &Path, more: &[&str]) -> Serving {
    let model = model.to_str().unwrap();
    let options = ["--engine", "embedded", "--model", model, "--context", "256"];
    serving_by(exact(), &[options.as_slice(), more].concat())
}

/// Tokens and log-probabilities of an output, and its text.
#[derive(Debug)]
struct Said {
    tokens: Vec<u64>,
    logprobs: Vec<f64>,
    text: String,
}

fn ask(model: &str, text: &str) -> Value {
    let messages = json!([{"role": "user", "content": text}]);
    json!({"model": model, "temperature": 0, "max_tokens": 6, "messages": messages})
}

fn text(answer: &Value) -> String {
    let text = &answer["choices"][0]["message"]["content"];
    text.as_str().unwrap_or_default().to_owned()
}

/// Greedy answers of a rollout with an adapter.
fn answers(server: &Serving, adapter: Option<&str>) -> Vec<Said> {
    let open = json!({"adapter": adapter});
    let (status, opened) = post(&server.address, "/rollouts", &server.token, &open);
    assert_eq!(status, 201, "{opened}");
    let (id, key) = (
        opened["id"].as_str().unwrap(),
        opened["api_key"].as_str().unwrap(),
    );
    let mut texts = Vec::new();
    for question in ["What is 2 + 2?", "Name a color."] {
        let path = format!("/r/{id}/v1/chat/completions");
        let (status, said) = post(&server.address, &path, key, &ask("any", question));
        assert_eq!(status, 200, "{said}");
        texts.push(text(&said));
    }
    let (status, view) = get(&server.address, &format!("/rollouts/{id}"), &server.token);
    assert_eq!(status, 200, "{view}");
    assert_eq!(view["trace"]["provenance"]["adapter"].as_str(), adapter);
    let nodes = view["trace"]["nodes"].as_array().unwrap().iter();
    let sampled = nodes.filter(|node| node["kind"] == "sampled");
    let numbers = |value: &Value| value.as_array().unwrap().clone();
    let said = sampled.zip(texts).map(|(node, text)| Said {
        tokens: numbers(&node["tokens"])
            .iter()
            .map(|t| t.as_u64().unwrap())
            .collect(),
        logprobs: numbers(&node["logprobs"])
            .iter()
            .map(|l| l.as_f64().unwrap())
            .collect(),
        text,
    });
    said.collect()
}

/// Both computed the same, but for rounding.
fn same(a: &[Said], b: &[Said]) {
    assert_eq!((a.len(), b.len()), (2, 2));
    for (a, b) in a.iter().zip(b) {
        assert_eq!(a.tokens, b.tokens, "{a:?} {b:?}");
        let near = |(a, b): (&f64, &f64)| (a - b).abs() < 1e-3;
        assert!(a.logprobs.iter().zip(&b.logprobs).all(near), "{a:?} {b:?}");
    }
}

fn differ(a: &[Said], b: &[Said]) {
    assert!(
        a.iter().zip(b).any(|(a, b)| a.tokens != b.tokens),
        "{a:?} {b:?}"
    );
}

#[test]
fn adapters_answer_as_models_with_merged_weights() {
    let dir = tempfile::tempdir().unwrap();
    let base = small_folder(dir.path());
    let at = |name: &str| dir.path().join(name);
    write_adapter(&base, &Projection::LAYERS, 1, &at("a"), &at("merged-a"));
    write_adapter(&base, &Projection::ALL, 2, &at("b"), &at("merged-b"));
    let [a, b] = ["a", "b"].map(|name| format!("{name}={}", at(name).display()));
    let (given_a, given_b) = (a.as_str(), b.as_str());
    let options = [
        "--adapter",
        given_a,
        "--adapter",
        given_b,
        "--api-key",
        API_KEY,
    ];
    let served = server(&base, &options);
    let plain = answers(&served, None);
    let (first, second) = (answers(&served, Some("a")), answers(&served, Some("b")));
    differ(&plain, &first);
    differ(&plain, &second);
    differ(&first, &second);
    same(&first, &answers(&server(&at("merged-a"), &[]), None));
    same(&second, &answers(&server(&at("merged-b"), &[]), None));
    // Other weights next to it change nothing.
    same(&plain, &answers(&server(&base, &[]), None));
    let (status, models) = get(&served.address, "/v1/models", API_KEY);
    assert_eq!(status, 200, "{models}");
    for (i, (name, expected)) in [("model", &plain), ("a", &first), ("b", &second)]
        .into_iter()
        .enumerate()
    {
        assert_eq!(models["data"][i]["id"], name);
        let question = ask(name, "What is 2 + 2?");
        let (status, said) = post(&served.address, "/v1/chat/completions", API_KEY, &question);
        assert_eq!((status, &text(&said)), (200, &expected[0].text), "{said}");
    }
    let refused = |given: &str| {
        let mut command = sinew();
        command.args(["serve", "--engine", "fake", "--adapter", given]);
        failure(&command.output().unwrap(), 2)
    };
    for (given, part) in [
        ("a", "NAME=DIR"),
        ("a=/nowhere", "/nowhere"),
        ("a b=c", "not allowed"),
    ] {
        let errors = refused(given);
        assert!(errors.contains(part), "{errors}");
    }
}

#[test]
fn a_recipe_is_measured_with_an_adapter() {
    let dir = tempfile::tempdir().unwrap();
    let base = small_folder(dir.path());
    let adapter = dir.path().join("adapter");
    write_adapter(
        &base,
        &Projection::LAYERS,
        1,
        &adapter,
        &dir.path().join("merged"),
    );
    let recipe = dir.path().join("recipe.toml");
    let text = format!(
        "name = \"adapted\"\nmodel = \"{}\"\n[env]\ntype = \"tool_math\"\n[rollout]\ntasks_per_step = 1\n\
         group_size = 2\nmax_turns = 2\nmax_turn_tokens = 16\nmax_context_tokens = 768\n\
         [algorithm]\ntype = \"grpo\"\n[train]\nsteps = 1\n[eval]\ntasks = 2\n",
        base.display()
    );
    std::fs::write(&recipe, text).unwrap();
    let run = dir.path().join("run");
    let given = format!("mine={}", adapter.display());
    let eval = |more: &[&str]| {
        let mut command = sinew();
        command.arg("eval").arg(&recipe).arg("--run-dir").arg(&run);
        command.arg("--json").args(more);
        command
    };
    let last = last_line(&eval(&["--adapter", &given]).output().unwrap());
    assert_eq!(last["adapter"], "mine", "{last}");
    let listed = run_ok(sinew().args(["episodes", "--json", "--run-dir"]).arg(&run));
    let episodes = json_lines(&listed);
    assert!(!episodes.is_empty());
    for episode in episodes {
        let id = episode["episode"].as_str().unwrap();
        let shown = run_ok(sinew().args(["show", id, "--json", "--run-dir"]).arg(&run));
        let trace: Value = serde_json::from_str(&shown).unwrap();
        assert_eq!(trace["provenance"]["adapter"], "mine", "{id}");
    }
    // A measurement with the adapter is not continued without it.
    let errors = failure(&eval(&["--resume"]).output().unwrap(), 2);
    assert!(errors.contains("--allow-change 'adapter'"), "{errors}");
}
