//! Figures against hand-made tables and against a measured run, verdicts, and ways out.

use super::*;
use serde_json::json;
use sinew_model::ModelShape;

/// A decoder by vocabulary, width, layers, heads, KV heads, head width, feed-forward width.
fn dense(family: &str, sizes: [u64; 7], tied: bool) -> ModelShape {
    let [vocab, hidden, layers, heads, kv_heads, head, width] = sizes;
    let text = json!({
        "model_type": family, "vocab_size": vocab, "hidden_size": hidden, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head,
        "intermediate_size": width, "tie_word_embeddings": tied,
    });
    ModelShape::from_json(&text.to_string()).unwrap()
}

fn half() -> ModelShape {
    dense("qwen2", [151_936, 896, 24, 14, 2, 64, 4864], true)
}

fn eight() -> ModelShape {
    dense("qwen3", [151_936, 4096, 36, 32, 8, 128, 12_288], false)
}

fn thirty_two() -> ModelShape {
    dense("qwen2", [152_064, 5120, 64, 40, 8, 128, 27_648], false)
}

fn mixture() -> ModelShape {
    let text = json!({
        "model_type": "qwen3_moe", "vocab_size": 151_936, "hidden_size": 2048, "num_hidden_layers": 48,
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 6144,
        "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
        "tie_word_embeddings": false,
    });
    ModelShape::from_json(&text.to_string()).unwrap()
}

/// bf16 on `ranks` GPUs with 16k tokens, as the table is for.
fn setup(model: ModelShape, ranks: u64, lora: bool) -> TrainerSetup {
    TrainerSetup {
        model,
        frozen: Vec::new(),
        ranks,
        cuda: true,
        dtype: ComputeType::Bf16,
        checkpointing: Checkpointing::Full,
        attention: AttentionMemory::Linear,
        micro_batch_tokens: 16_384,
        least_tokens: 2048,
        adapters: lora.then(|| Adapters {
            rank: 32,
            targets: Vec::new(),
        }),
    }
}

fn plan(trainer: TrainerSetup, count: u64, gb: u64) -> GpuPlan {
    GpuPlan {
        trainer,
        engine: None,
        turns: false,
        gpus: Some(Gpus {
            count,
            bytes: gb * 1_000_000_000,
        }),
        installed: None,
        own: 0,
        keys: KeyNames::RECIPE,
    }
}

fn gb(bytes: u64) -> f64 {
    bytes as f64 / 1e9
}

fn near(found: u64, wanted: f64, share: f64) {
    let found = gb(found);
    assert!((found - wanted).abs() <= share * wanted, "{found} {wanted}");
}

/// States on eight ranks: 16 bytes a trained parameter, or a bf16 base with adapters.
#[test]
fn states_are_those_of_the_rule_of_thumb() {
    for (model, full, lora) in [
        (half(), 1.0, 0.16),
        (eight(), 16.4, 2.2),
        (thirty_two(), 65.5, 8.7),
        (mixture(), 61.0, 7.7),
    ] {
        near(setup(model.clone(), 8, false).bytes().states(), full, 0.02);
        near(setup(model, 8, true).bytes().states(), lora, 0.02);
    }
    // Inputs of 36 layers and one layer computed again, with 16k tokens.
    near(setup(eight(), 8, false).bytes().activations, 8.25, 0.01);
    near(
        setup(thirty_two(), 8, false).bytes().activations,
        16.6,
        0.01,
    );
    // Two gathered layers of 1.2 GB, embedding and output matrix.
    near(setup(mixture(), 8, false).bytes().gathered, 3.74, 0.01);
}

/// SmolLM2-135M in f32 with two ranks on a CPU and 512 tokens each. Measured with `full`: 2.19 GB a rank at
/// the peak of an update and 1.89 GB after it, with `MALLOC_MMAP_THRESHOLD_=65536`. A prototype without
/// checkpointing held 3.2 GB at its peak.
#[test]
fn a_measured_run_lies_within_the_estimates() {
    let smol = dense("llama", [49_152, 576, 30, 9, 3, 64, 1536], true);
    let rank = |checkpointing| TrainerSetup {
        cuda: false,
        dtype: ComputeType::F32,
        attention: AttentionMemory::Mask,
        micro_batch_tokens: 512,
        checkpointing,
        ..setup(smol.clone(), 2, false)
    };
    let (full, none) = (
        rank(Checkpointing::Full).bytes(),
        rank(Checkpointing::None).bytes(),
    );
    let (peak, after) = (2.19, 1.89);
    assert!((peak..=1.15 * peak).contains(&gb(full.total())), "{full}");
    near(full.states() + full.process, after, 0.05);
    assert!((2.4..=3.2).contains(&gb(none.total())), "{none}");
    near(none.total(), 3.05, 0.01);
    near(full.states(), 1.08, 0.01);
}

#[test]
fn verdicts_are_those_of_the_table() {
    let fits = |model: ModelShape, lora, count, size| {
        plan(setup(model, count, lora), count, size).check().is_ok()
    };
    for (model, expected) in [
        (half(), [true, true, true, true, true, true]),
        (eight(), [false, false, false, true, true, true]),
        (thirty_two(), [false, false, false, false, false, true]),
        (mixture(), [false, false, false, true, false, true]),
    ] {
        let machines = [(1, 24), (1, 80), (8, 80)];
        let found: Vec<bool> = machines
            .iter()
            .flat_map(|(count, size)| [false, true].map(|lora| (*count, *size, lora)))
            .map(|(count, size, lora)| fits(model.clone(), lora, count, size))
            .collect();
        assert_eq!(found, expected, "{}", model.parameters);
    }
}

#[test]
fn a_refusal_names_the_keys_that_help() {
    let refused = |plan: &GpuPlan| plan.check().unwrap_err();
    // One key is enough.
    let text = refused(&plan(setup(mixture(), 8, false), 8, 80));
    assert!(
        text.contains("an update needs 78.6 GB on each of 8 ranks"),
        "{text}"
    );
    for part in [
        "moments 30.5 GB",
        "\n  hint: train.micro_batch_tokens = ",
        ", or trainer.checkpointing = \"offload\" (",
        ", or train.lora.rank = 32 (19.6 GB a GPU)",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    // Ranks that are not used.
    let text = refused(&plan(setup(eight(), 1, false), 8, 80));
    assert!(
        text.contains("hint: trainer.ranks = 8 (34.6 GB a GPU), or train.lora.rank"),
        "{text}"
    );
    let text = refused(&plan(setup(eight(), 8, true), 4, 80));
    assert!(
        text.contains("trainer.ranks = 8: the machine has 4 GPUs of 80.0 GB"),
        "{text}"
    );
    assert!(text.contains("hint: trainer.ranks = 4 ("), "{text}");
    // Only several keys, or more GPUs.
    let text = refused(&plan(setup(thirty_two(), 1, false), 1, 80));
    assert!(
        text.contains("16 GPUs of this size are, or 2 with adapters"),
        "{text}"
    );
    let none = TrainerSetup {
        dtype: ComputeType::F32,
        checkpointing: Checkpointing::None,
        ..setup(eight(), 8, false)
    };
    let text = refused(&plan(none.clone(), 8, 80));
    assert!(
        text.contains("hint: trainer.checkpointing = \"full\" (44.4 GB a GPU)"),
        "{text}"
    );
    let text = refused(&plan(none, 8, 37));
    let way = "hint: together: trainer.dtype = \"bf16\", trainer.checkpointing = \"full\" (34.6 GB";
    assert!(text.contains(way), "{text}");
}

/// A proposed micro-batch fits, and the next larger one does not.
#[test]
fn a_proposed_micro_batch_is_the_largest() {
    let text = plan(setup(mixture(), 8, false), 8, 80).check().unwrap_err();
    let after = text.split("train.micro_batch_tokens = ").nth(1).unwrap();
    let tokens: u64 = after.split(' ').next().unwrap().parse().unwrap();
    let with = |tokens| TrainerSetup {
        micro_batch_tokens: tokens,
        ..setup(mixture(), 8, false)
    };
    assert!(plan(with(tokens), 8, 80).check().is_ok(), "{tokens}");
    assert!(plan(with(tokens + 256), 8, 80).check().is_err(), "{tokens}");
}

#[test]
fn turns_move_states_to_the_host() {
    let mut both = plan(setup(eight(), 8, false), 8, 80);
    both.engine = Some(EngineSetup {
        model: eight(),
        kv_tokens: 32_768,
        tensor_parallel: None,
        here: true,
    });
    let own = both.rows();
    let names: Vec<&str> = own.iter().map(|row| row.name).collect();
    assert_eq!(names, ["trainer", "generation", "memory"]);
    let text = own[1].result.clone().unwrap();
    assert!(
        text.contains("warning: trainer and one server take 9 GPUs, there are 8"),
        "{text}"
    );
    both.turns = true;
    let rows = both.rows();
    let total = |rows: &[PlanRow], at: usize| rows[at].figures["total"].as_u64().unwrap();
    assert_eq!(total(&rows, 0) - total(&own, 0), 1_500_000_000);
    near(total(&rows, 2), 131.1, 0.01);
    let text = rows[1].result.clone().unwrap();
    assert!(
        text.contains("states are on the host") && !text.contains("warning"),
        "{text}"
    );
    both.installed = Some(64_000_000_000);
    let text = both.check().unwrap_err();
    assert!(
        text.contains("it has 64.0 GB\n  hint: train.lora.rank = 32"),
        "{text}"
    );
}

#[test]
fn an_engine_gets_as_many_gpus_as_it_needs() {
    let engine = |model, kv_tokens| EngineSetup {
        model,
        kv_tokens,
        tensor_parallel: None,
        here: true,
    };
    let (large, small) = (engine(thirty_two(), 32_768), engine(eight(), 32_768));
    assert_eq!(large.fewest(80_000_000_000), Some(2));
    assert_eq!(small.fewest(80_000_000_000), Some(1));
    assert_eq!(small.fewest(24_000_000_000), Some(2));
    assert_eq!(engine(eight(), u64::MAX / 4).fewest(80_000_000_000), None);
    // 36 layers x 2 x 8 heads x 128 x 2 bytes a token.
    assert_eq!(small.bytes(1, 80_000_000_000).keys, 32_768 * 147_456);
    let mut tight = plan(setup(half(), 1, false), 1, 24);
    tight.engine = Some(small.clone());
    let text = tight.check().unwrap_err();
    assert!(
        text.contains("a server on 2 GPUs of this size fits"),
        "{text}"
    );
    // A server that may be elsewhere is no reason to refuse.
    tight.engine = Some(EngineSetup {
        here: false,
        ..small
    });
    assert_eq!(tight.check(), Ok(()));
    let text = tight.rows()[1].result.clone().unwrap();
    assert!(
        text.starts_with("warning: unless it is elsewhere, a server"),
        "{text}"
    );
}

#[test]
fn ranks_on_a_cpu_share_the_memory_of_the_host() {
    let mut host = plan(setup(half(), 2, false), 1, 80);
    (host.gpus, host.installed) = (None, Some(16_000_000_000));
    host.trainer.cuda = false;
    host.trainer.dtype = ComputeType::F32;
    host.trainer.attention = AttentionMemory::Mask;
    let text = host.check().unwrap_err();
    assert!(
        text.contains(" on each of 2 ranks: weights ") && text.contains("it has 16.0 GB"),
        "{text}"
    );
    assert!(
        text.contains("hint: ") && !text.contains("offload"),
        "{text}"
    );
    host.trainer.micro_batch_tokens = 2048;
    host.installed = Some(24_000_000_000);
    assert_eq!(host.rows().len(), 1);
    assert_eq!(host.check(), Ok(()));
}

#[test]
fn the_largest_numbers_do_not_overflow() {
    for attention in [
        AttentionMemory::Linear,
        AttentionMemory::Mask,
        AttentionMemory::Scores,
    ] {
        for checkpointing in [
            Checkpointing::Full,
            Checkpointing::None,
            Checkpointing::Offload,
        ] {
            let trainer = TrainerSetup {
                attention,
                checkpointing,
                micro_batch_tokens: u64::MAX,
                ranks: u64::MAX,
                adapters: Some(Adapters {
                    rank: 1024,
                    targets: Vec::new(),
                }),
                ..setup(thirty_two(), 8, false)
            };
            assert!(plan(trainer, 8, 80).check().is_err());
        }
    }
}

#[test]
fn amounts_are_short() {
    assert_eq!(
        [amount(12_345_678_901), amount(45_000_000), amount(0)],
        ["12.3 GB", "45 MB", "0 MB"]
    );
}

/// Models of the page, by name.
fn models() -> [(&'static str, ModelShape); 4] {
    [
        ("0.5B (Qwen2.5)", half()),
        ("8B (Qwen3)", eight()),
        ("32B (Qwen2.5)", thirty_two()),
        ("30B-A3B (Qwen3)", mixture()),
    ]
}

/// Peak of one rank with 16k tokens, else with as many as fit, at least 2048.
fn cell(model: &ModelShape, lora: bool, (count, size): (u64, u64)) -> String {
    let fitting = |tokens| {
        let trainer = TrainerSetup {
            micro_batch_tokens: tokens,
            ..setup(model.clone(), count, lora)
        };
        let plan = plan(trainer, count, size);
        plan.check()
            .ok()
            .map(|()| amount(plan.trainer.bytes().total()))
    };
    let fewer = || {
        (8..64)
            .rev()
            .find_map(|n| Some((n * 256, fitting(n * 256)?)))
    };
    match (fitting(16_384), fewer()) {
        (Some(need), _) => need,
        (None, Some((tokens, need))) => format!("{need} with {tokens} tokens"),
        (None, None) => "no".to_owned(),
    }
}

/// The tables of `docs/gpu.md`.
fn tables() -> String {
    let mut text =
        "| model | trained | 1 x 24 GB | 1 x 80 GB | 8 x 80 GB |\n|---|---|---|---|---|\n"
            .to_owned();
    let kinds = [(false, "all weights"), (true, "LoRA, rank 32")];
    for (name, model) in models() {
        for (lora, kind) in kinds {
            let cells = [(1, 24), (1, 80), (8, 80)].map(|machine| cell(&model, lora, machine));
            text += &format!("| {name} | {kind} | {} |\n", cells.join(" | "));
        }
    }
    text += "\n| model | trained | weights | gradients | moments | gathered | activations | head, reduction | \
             process | all |\n|---|---|---|---|---|---|---|---|---|---|\n";
    for (name, model) in models() {
        for (lora, kind) in kinds {
            let b = setup(model.clone(), 8, lora).bytes();
            let parts = [
                b.weights,
                b.gradients,
                b.moments,
                b.gathered,
                b.activations,
                b.working,
                b.process,
            ];
            let cells: Vec<String> = parts.into_iter().chain([b.total()]).map(amount).collect();
            text += &format!("| {name} | {kind} | {} |\n", cells.join(" | "));
        }
    }
    text += "\n| model | weights | keys and values of 32k tokens | on GPUs of 24 GB | on GPUs of 80 GB |\n\
             |---|---|---|---|---|\n";
    for (name, model) in models() {
        let engine = EngineSetup {
            model,
            kv_tokens: 32_768,
            tensor_parallel: None,
            here: true,
        };
        let one = engine.bytes(1, 0);
        let servers = [24_000_000_000, 80_000_000_000].map(|bytes| {
            let gpus = engine.fewest(bytes).unwrap();
            format!("{gpus}: {} tokens", engine.bytes(gpus, bytes).kv_tokens)
        });
        text += &format!(
            "| {name} | {} | {} | {} |\n",
            amount(one.weights),
            amount(one.keys),
            servers.join(" | ")
        );
    }
    text
}

#[test]
fn the_page_has_the_figures_of_the_formulas() {
    let page = include_str!("../../../../docs/gpu.md");
    let tables = tables();
    for table in tables.split("\n\n") {
        let table = table.trim_end();
        assert!(
            page.contains(table),
            "docs/gpu.md needs the tables\n{tables}"
        );
    }
}
