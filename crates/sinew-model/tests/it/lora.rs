//! Adapters: gradients, merging, files.

use crate::infer::logits_of;
use crate::support::{
    FAMILIES, device, golden_dir, read_tensors, relative_error, tiny, tiny_golden,
};
use crate::train::{Case, golden_case, run};
use sinew_model::{
    Grads, Keep, Lora, LoraConfig, LoraError, ModelConfig, Params, Projection, Weights, merge_lora,
};
use sinew_types::TensorSource;
use std::fs;

fn config(targets: &[Projection]) -> LoraConfig {
    LoraConfig {
        rank: 3,
        alpha: 5.0,
        targets: targets.to_vec(),
    }
}

/// Adapters whose B is not zero.
pub(crate) fn trained(model: &ModelConfig, targets: &[Projection], seed: u64) -> Lora {
    let mut lora = Lora::random(&config(targets), model, seed).unwrap();
    for (n, (_, values)) in lora.tensors_mut().into_iter().enumerate() {
        for (i, value) in values.iter_mut().enumerate() {
            *value += ((i * 31 + n * 7) % 23) as f32 / 230.0 - 0.05;
        }
    }
    lora
}

fn loss(params: &Params, lora: &Lora, case: &Case) -> f64 {
    let weights = Weights {
        params,
        lora: Some(lora),
    };
    let out = run(&device(), weights, case, Keep::LayerInputs);
    let dot = |a: &[f32], b: &[f32]| -> f64 {
        a.iter()
            .zip(b)
            .map(|(a, b)| f64::from(*a) * f64::from(*b))
            .sum()
    };
    dot(&out.logprob, &case.d_logprob) + dot(&out.entropy, &case.d_entropy)
}

/// `dB = s · dW Aᵀ` and `dA = s · Bᵀ dW`, with dW the gradient of the merged weights: the same
/// numbers through the golden-tested path.
#[test]
fn gradients_follow_from_those_of_merged_weights() {
    let dev = device();
    for family in FAMILIES {
        let params = tiny(family).params;
        let case = golden_case(&tiny_golden(family));
        let lora = trained(params.config(), &Projection::ALL, 1);
        let mut merged = Params::zeros(params.config());
        merge_lora(&dev, &params, &lora, &mut merged).unwrap();
        let full = run(&dev, Weights::full(&merged), &case, Keep::All);
        let weights = Weights {
            params: &params,
            lora: Some(&lora),
        };
        let adapted = run(&dev, weights, &case, Keep::All);
        assert!(
            relative_error(&adapted.logprob, &full.logprob) < 1e-5,
            "{family}"
        );
        let scale = 5.0 / 3.0;
        for entry in lora.layout().table().entries() {
            let name = entry.name.strip_prefix("base_model.model.").unwrap();
            let (module, part) = name.split_once(".lora_").unwrap();
            let base = params.layout().entry(&format!("{module}.weight")).unwrap();
            let dw = &full.grads.values()[base.range()];
            let (n, k) = (base.shape[0], base.shape[1]);
            let other = match part {
                "A.weight" => entry.name.replace("lora_A", "lora_B"),
                _ => entry.name.replace("lora_B", "lora_A"),
            };
            let other = lora.tensor(&other).unwrap().into_f32();
            let mut expected = vec![0.0f32; entry.len()];
            for (i, row) in dw.chunks(k).enumerate() {
                for (j, g) in row.iter().enumerate() {
                    for r in 0..3 {
                        match part {
                            "A.weight" => expected[r * k + j] += scale * g * other[i * 3 + r],
                            _ => expected[i * 3 + r] += scale * g * other[r * k + j],
                        }
                    }
                }
            }
            assert_eq!(entry.len(), if part == "A.weight" { 3 * k } else { 3 * n });
            let found = &adapted.grads.values()[entry.range()];
            let error = relative_error(found, &expected);
            assert!(error < 5e-5, "{family} {}: {error}", entry.name);
        }
    }
}

#[test]
fn gradients_are_those_of_finite_differences() {
    let params = tiny("qwen2").params;
    let case = golden_case(&tiny_golden("qwen2"));
    let lora = trained(
        params.config(),
        &[Projection::Q, Projection::V, Projection::Down],
        2,
    );
    let weights = Weights {
        params: &params,
        lora: Some(&lora),
    };
    let grads = run(&device(), weights, &case, Keep::All).grads;
    let step = 4e-3f32;
    let mut checked = 0;
    for entry in lora.layout().table().entries() {
        let at = entry.offset + entry.len() / 2;
        let mut moved = lora.clone();
        moved.values_mut()[at] += step;
        let up = loss(&params, &moved, &case);
        moved.values_mut()[at] -= 2.0 * step;
        let expected = (up - loss(&params, &moved, &case)) / f64::from(2.0 * step);
        let found = f64::from(grads.values()[at]);
        let error = (found - expected).abs();
        assert!(
            error < 1e-2 * expected.abs().max(0.5),
            "{}: {found} {expected}",
            entry.name
        );
        checked += 1;
    }
    assert_eq!(checked, 12);
}

#[test]
fn fresh_adapters_change_nothing_and_partial_targets_work() {
    let dev = device();
    let params = tiny("qwen3").params;
    let case = golden_case(&tiny_golden("qwen3"));
    let plain = run(&dev, Weights::full(&params), &case, Keep::All);
    for target in Projection::ALL {
        let lora = Lora::random(&config(&[target]), params.config(), 9).unwrap();
        let weights = Weights {
            params: &params,
            lora: Some(&lora),
        };
        let out = run(&dev, weights, &case, Keep::All);
        assert_eq!(out.logprob, plain.logprob, "{target:?}");
        for entry in lora.layout().table().entries() {
            let part = &out.grads.values()[entry.range()];
            let zero = part.iter().all(|&g| g == 0.0);
            assert_eq!(zero, entry.name.contains("lora_A"), "{}", entry.name);
        }
    }
}

#[test]
fn adapters_are_saved_in_the_form_of_peft() {
    let params = tiny("llama").params;
    let lora = trained(params.config(), &[Projection::V, Projection::Gate], 4);
    assert_eq!(
        lora.names()[..2],
        [
            "base_model.model.model.layers.0.self_attn.v_proj.lora_A.weight",
            "base_model.model.model.layers.0.self_attn.v_proj.lora_B.weight",
        ]
    );
    let dir = tempfile::tempdir().unwrap();
    let target = dir.path().join("adapter");
    lora.save(&target, "tiny").unwrap();
    let again = Lora::load(&target, params.config()).unwrap();
    assert_eq!(
        (again.values(), again.config()),
        (lora.values(), lora.config())
    );
    let other = Lora::load(&target, tiny("qwen3").params.config()).unwrap_err();
    assert!(other.to_string().contains("lora_B.weight is ["), "{other}");
    let path = target.join("adapter_config.json");
    let text = fs::read_to_string(&path).unwrap();
    for (from, to, expected) in [
        ("\"r\": 3", "\"r\": 0", "rank is 0"),
        ("v_proj", "w_proj", "target `w_proj` is unknown"),
        (
            "\"bias\"",
            "\"use_dora\": true, \"bias\"",
            "`use_dora` is not supported",
        ),
    ] {
        fs::write(&path, text.replace(from, to)).unwrap();
        let error = Lora::load(&target, params.config())
            .unwrap_err()
            .to_string();
        assert!(error.contains(expected), "{error}");
    }
}

/// An adapter that PEFT wrote gives the logits that PEFT gives, merged; and what is written of it has its
/// tensors and the settings that decide about them.
#[test]
fn an_adapter_of_peft_gives_its_logits() {
    let params = tiny("llama").params;
    let folder = golden_dir().join("peft");
    let lora = Lora::load(&folder, params.config()).unwrap();
    let mut merged = Params::zeros(params.config());
    merge_lora(&device(), &params, &lora, &mut merged).unwrap();
    let tokens = tiny_golden("llama");
    let lengths: Vec<usize> = tokens["lengths"].1.iter().map(|&n| n as usize).collect();
    let ids: Vec<u32> = tokens["tokens"].1.iter().map(|&t| t as u32).collect();
    let expected = &read_tensors(&folder.join("golden.safetensors"))["logits"].1;
    let error = relative_error(&logits_of(&merged, &ids, &lengths), expected);
    assert!(error < 1e-5, "{error}");
    let error = relative_error(&logits_of(&params, &ids, &lengths), expected);
    assert!(error > 0.1, "the adapter matters: {error}");

    let dir = tempfile::tempdir().unwrap();
    let written = dir.path().join("adapter");
    lora.save(&written, "llama").unwrap();
    let [ours, theirs] =
        [&written, &folder].map(|d| read_tensors(&d.join("adapter_model.safetensors")));
    assert_eq!(ours, theirs);
    let config = |folder: &std::path::Path| -> serde_json::Value {
        let text = fs::read_to_string(folder.join("adapter_config.json")).unwrap();
        serde_json::from_str(&text).unwrap()
    };
    let (ours, theirs) = (config(&written), config(&folder));
    for (key, value) in ours.as_object().unwrap() {
        match key.as_str() {
            "target_modules" => {
                let names = |v: &serde_json::Value| {
                    let mut names: Vec<_> = v.as_array().unwrap().to_vec();
                    names.sort_by_key(ToString::to_string);
                    names
                };
                assert_eq!(names(value), names(&theirs[key]));
            }
            "lora_alpha" => assert_eq!(value.as_f64(), theirs[key].as_f64()),
            _ => assert_eq!(value, &theirs[key], "{key}"),
        }
    }
}

#[test]
fn impossible_adapters_and_mixed_gradients_are_refused() {
    let params = tiny("llama").params;
    let random = |config: &LoraConfig| Lora::random(config, params.config(), 0).unwrap_err();
    let good = config(&[Projection::Q]);
    assert_eq!(
        random(&LoraConfig {
            rank: 0,
            ..good.clone()
        }),
        LoraError::Rank(0)
    );
    assert_eq!(
        random(&LoraConfig {
            alpha: -1.0,
            ..good.clone()
        }),
        LoraError::Alpha(-1.0)
    );
    assert_eq!(
        random(&LoraConfig {
            targets: vec![],
            ..good.clone()
        }),
        LoraError::NoTarget
    );
    let twice = config(&[Projection::Q, Projection::Q]);
    assert_eq!(random(&twice), LoraError::Twice("q_proj"));
    let lora = Lora::random(&good, params.config(), 0).unwrap();
    let foreign = tiny("qwen3").params;
    let mut merged = Params::zeros(foreign.config());
    assert!(merge_lora(&device(), &foreign, &lora, &mut merged).is_err());
    let case = golden_case(&tiny_golden("llama"));
    let model = sinew_model::TrainModel::new(params.config(), 256).unwrap();
    let mut acts = sinew_model::Activations::new(Keep::All);
    let weights = Weights {
        params: &params,
        lora: Some(&lora),
    };
    model
        .forward(&device(), weights, &case.tokens, &case.layout, &mut acts)
        .unwrap();
    let mut grads = Grads::of_params(params.layout());
    let outputs = sinew_model::OutputGrads::default();
    let error = model
        .backward(&device(), weights, &mut acts, outputs, &mut grads)
        .unwrap_err();
    assert!(
        error
            .to_string()
            .contains("of the adapters when there are some"),
        "{error}"
    );
}
