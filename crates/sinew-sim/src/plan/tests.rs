use super::*;

fn parse(text: &str) -> Result<Plan, PlanError> {
    Plan::parse(Path::new("plan.toml"), text)
}

fn refused(text: &str) -> String {
    parse(text).map_err(|e| e.to_string()).expect_err(text)
}

#[test]
fn every_preset_is_a_plan_and_its_keys_can_be_changed() {
    for (name, _) in PRESETS {
        let plan = parse(&format!("preset = \"{name}\"\n[run]\nupdates = 33\n")).unwrap();
        assert_eq!(
            (plan.run.updates, plan.name.as_str()),
            (33, "plan"),
            "{name}"
        );
    }
    let plan = parse("preset = \"areal-async\"\n[engines]\nkv_s = 1\n").unwrap();
    assert_eq!(
        (plan.engines.count, plan.engines.kv_s, plan.engines.pass_s),
        (96, 1.0, 0.0035)
    );
}

#[test]
fn unknown_keys_and_wrong_values_are_refused_with_their_line() {
    let text = refused("[engines]\ncount = 4\nspeed = 3\n");
    assert!(text.contains("line 3") && text.contains("speed"), "{text}");
    assert!(refused("[run]\nmode = \"fast\"\n").contains("line 2"));
    for (text, key) in [
        ("[engines]\ncount = 0\n", "engines.count"),
        ("[trainer]\ntokens_per_s = 0\n", "trainer.tokens_per_s"),
        ("[tools]\ncall_s = { values = [] }\n", "tools.call_s"),
        ("[run]\nupdates = 1\n", "run.warm_up"),
        ("preset = \"nothing\"\n", "preset"),
        (
            "[run]\nmode = \"async\"\n[trainer]\ncolocated = true\n",
            "trainer.colocated",
        ),
        (
            "[episode]\nmax_context_tokens = 900000\n",
            "episode.max_context_tokens",
        ),
        ("from_run = \"nowhere\"\n", "nowhere"),
    ] {
        assert!(refused(text).contains(key), "{}", refused(text));
    }
}

/// A plan with GPUs is refused where a run would be, with the keys of the plan.
#[test]
fn memory_that_does_not_fit_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let config = serde_json::json!({
        "model_type": "qwen3", "vocab_size": 151_936, "hidden_size": 4096, "num_hidden_layers": 36,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "intermediate_size": 12_288, "tie_word_embeddings": false,
    });
    std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
    let head = format!("[memory]\nmodel = {:?}\n", dir.path().display().to_string());
    let context = "[episode]\nmax_context_tokens = 8192\n[engines]\nkv_tokens = 200000\n";
    let text = |memory: &str, trainer: &str| format!("{head}{memory}{context}[trainer]\n{trainer}");
    let fitting = parse(&text("", "devices = 8\n")).unwrap();
    let plan = fitting.gpu_plan().unwrap().unwrap();
    assert_eq!(
        (plan.trainer.ranks, plan.trainer.least_tokens, plan.turns),
        (8, 8192, false)
    );
    assert_eq!(parse(&toml::to_string(&fitting).unwrap()).unwrap(), fitting);
    let told = refused(&text("", "devices = 1\n"));
    assert!(
        told.starts_with("memory: an update needs 148.7 GB on one rank"),
        "{told}"
    );
    assert!(
        told.contains("hint: memory.lora_rank = 32 (30.5 GB a GPU)"),
        "{told}"
    );
    assert!(parse(&text("lora_rank = 32\n", "devices = 1\n")).is_ok());
    for (memory, key) in [
        ("gpu_gb = 0\n", "memory.gpu_gb"),
        ("lora_rank = 2000\n", "memory.lora_rank"),
        ("micro_batch_tokens = 100\n", "memory.micro_batch_tokens"),
        (
            "gpu_gb = 18\nlora_rank = 32\n",
            "a server on 1 of 8 GPUs of 18.0 GB needs",
        ),
        ("dtype = \"fp8\"\n", "fp8"),
    ] {
        let told = refused(&text(memory, "devices = 8\n"));
        assert!(told.contains(key), "{told}");
    }
    assert!(refused("[memory]\ngpu_gb = 80\n").contains("memory.model"));
}

#[test]
fn a_plan_is_written_as_it_is_read() {
    let plan = crate::search::random_plan(11);
    let text = toml::to_string(&plan).unwrap();
    assert_eq!(parse(&text).unwrap(), plan);
}
