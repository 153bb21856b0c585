//! Adapters: gradients, merging, files.

use crate::infer::logits_of;
use crate::support::{
    FAMILIES, device, golden_dir, read_tensors, relative_error, tiny, tiny_golden,
};
use crate::train::{Case, golden_case, run};
use sinew_model::{
    Activations, Grads, Keep, Lora, LoraConfig, LoraError, MergeError, ModelConfig, ModelFiles,
    Params, Projection, SaveDtype, TrainModel, Weights, load_model, merge_lora, save_pretrained,
};
use sinew_types::{Adapter, TensorSource, TensorView};
use std::fs;
use std::sync::Arc;

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

/// `W + (alpha / rank) B A`, number by number in f64, with a separate output projection.
pub(crate) fn dense(params: &Params, lora: &Lora) -> Params {
    let config = ModelConfig {
        tied_embeddings: false,
        ..params.config().clone()
    };
    let mut dense = Params::zeros(&config);
    let rank = lora.config().rank;
    let scale = f64::from(lora.config().alpha) / rank as f64;
    for (entry, values) in dense.tensors_mut() {
        let own = params.tensor(&entry.name);
        let own = own.or_else(|| params.tensor("model.embed_tokens.weight"));
        values.copy_from_slice(&own.unwrap().into_f32());
        let module = entry.name.trim_end_matches(".weight");
        let part = |part: &str| {
            let name = format!("base_model.model.{module}.lora_{part}.weight");
            lora.tensor(&name).map(TensorView::into_f32)
        };
        let (Some(a), Some(b)) = (part("A"), part("B")) else {
            continue;
        };
        let k = entry.shape[1];
        for (i, row) in values.chunks_mut(k).enumerate() {
            for (j, w) in row.iter_mut().enumerate() {
                let product = |r: usize| f64::from(b[i * rank + r]) * f64::from(a[r * k + j]);
                let sum: f64 = (0..rank).map(product).sum();
                *w = (f64::from(*w) + scale * sum) as f32;
            }
        }
    }
    dense
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
        let merged = lora.merged(&dev, &params).unwrap();
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
            let base = merged.layout().entry(&format!("{module}.weight")).unwrap();
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
        &[
            Projection::Q,
            Projection::V,
            Projection::Down,
            Projection::Head,
        ],
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
    assert_eq!(checked, 14);
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
    let targets = [Projection::V, Projection::Gate, Projection::Head];
    let lora = trained(params.config(), &targets, 4);
    let names = lora.names();
    assert_eq!(
        [&names[..2], &names[8..]].concat(),
        [
            "base_model.model.model.layers.0.self_attn.v_proj.lora_A.weight",
            "base_model.model.model.layers.0.self_attn.v_proj.lora_B.weight",
            "base_model.model.lm_head.lora_A.weight",
            "base_model.model.lm_head.lora_B.weight",
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
    let model = TrainModel::new(params.config(), 256).unwrap();
    let mut acts = Activations::new(Keep::All);
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

/// Adapters of the output projection give the log-probabilities, entropies and ranks of dense weights, with
/// tied embeddings and without, and with what is kept of a pass.
#[test]
fn an_adapted_output_projection_is_that_of_dense_weights() {
    let dev = device();
    for family in FAMILIES {
        let params = tiny(family).params;
        let case = golden_case(&tiny_golden(family));
        for targets in [&[Projection::Head][..], &Projection::ALL] {
            let lora = trained(params.config(), targets, 3);
            let dense = dense(&params, &lora);
            let expected = run(&dev, Weights::full(&dense), &case, Keep::All);
            let weights = Weights {
                params: &params,
                lora: Some(&lora),
            };
            for keep in [Keep::All, Keep::LayerInputs] {
                let found = run(&dev, weights, &case, keep);
                let error = relative_error(&found.logprob, &expected.logprob);
                assert!(error < 1e-5, "{family}: {error}");
                let error = relative_error(&found.entropy, &expected.entropy);
                assert!(error < 1e-5, "{family}: {error}");
            }
            let plain = run(&dev, Weights::full(&params), &case, Keep::All);
            let error = relative_error(&plain.logprob, &expected.logprob);
            assert!(error > 1e-3, "{family}: the adapter matters: {error}");
            let rows: Vec<u32> = case.items.iter().map(|item| item.0).collect();
            let [found, expected] = [weights, Weights::full(&dense)].map(|weights| {
                let model = TrainModel::new(weights.params.config(), 256).unwrap();
                let mut acts = Activations::new(Keep::Nothing);
                let (tokens, layout) = (&case.tokens, &case.layout);
                model
                    .forward(&dev, weights, tokens, layout, &mut acts)
                    .unwrap();
                model
                    .top(&dev, weights, &mut acts, &rows, &[], None, 4)
                    .unwrap()
            });
            for (found, expected) in found.concat().iter().zip(expected.concat()) {
                assert_eq!(found.id, expected.id, "{family}");
                assert!((found.logprob - expected.logprob).abs() < 1e-4, "{family}");
            }
        }
    }
}

/// Merged weights have a separate output projection, also where the base ties it to the embeddings, and are
/// saved as such; there is no place for it in weights that stay tied.
#[test]
fn a_merged_output_projection_is_separate() {
    let dev = device();
    for family in FAMILIES {
        let params = tiny(family).params;
        let lora = trained(params.config(), &Projection::ALL, 6);
        let merged = lora.merged(&dev, &params).unwrap();
        assert!(!merged.config().tied_embeddings);
        let dense = dense(&params, &lora);
        for name in merged.names() {
            let [found, expected] = [&merged, &dense].map(|p| p.tensor(&name).unwrap().into_f32());
            let error = relative_error(&found, &expected);
            assert!(error < 1e-6, "{family} {name}: {error}");
        }
        let embeddings = |params: &Params| {
            let view = params.tensor("model.embed_tokens.weight").unwrap();
            view.into_f32().into_owned()
        };
        assert_eq!(embeddings(&merged), embeddings(&params));
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("model");
        save_pretrained(&folder, &merged, SaveDtype::F32, &[]).unwrap();
        let loaded = load_model(&ModelFiles::Dir(folder)).unwrap();
        assert!(!loaded.params.config().tied_embeddings);
        assert_eq!(loaded.params.values(), merged.values());

        let mut same = Params::zeros(params.config());
        let refused = merge_lora(&dev, &params, &lora, &mut same);
        if params.config().tied_embeddings {
            assert_eq!(refused, Err(MergeError::Tied));
            assert!(same.values().iter().all(|&v| v == 0.0));
            assert!(MergeError::Tied.to_string().contains("`lm_head`"));
            // Layers fit into both.
            let layers = trained(params.config(), &Projection::LAYERS, 6);
            merge_lora(&dev, &params, &layers, &mut same).unwrap();
            let mut untied = Params::zeros(merged.config());
            merge_lora(&dev, &params, &layers, &mut untied).unwrap();
            let head = untied.tensor("lm_head.weight").unwrap().into_f32();
            assert_eq!(*head, *embeddings(&params));
            assert_eq!(
                layers.merged(&dev, &params).unwrap().config(),
                params.config()
            );
        } else {
            assert_eq!(refused, Ok(()));
            assert_eq!(same.values(), merged.values());
        }
    }
}

/// A copy for an engine comes back, with rank and targets from names and shapes.
#[test]
fn adapters_come_back_from_their_tensors() {
    let config = tiny("llama").params.config().clone();
    for targets in [
        &Projection::ALL[..],
        &[Projection::Head],
        &[Projection::K, Projection::Up],
    ] {
        let lora = trained(&config, targets, 7);
        let copy = lora.to_adapter();
        assert_eq!(copy.alpha, 5.0);
        let again = Lora::from_adapter(&copy, &config).unwrap();
        assert_eq!(again.values(), lora.values());
        assert_eq!(again.config(), lora.config());
    }
}

/// Tensors as a caller holds them.
struct Owned(Vec<(String, Vec<usize>, Vec<f32>)>);

impl TensorSource for Owned {
    fn names(&self) -> Vec<String> {
        self.0.iter().map(|tensor| tensor.0.clone()).collect()
    }

    fn tensor(&self, name: &str) -> Option<TensorView<'_>> {
        let (_, shape, values) = self.0.iter().find(|tensor| tensor.0 == name)?;
        TensorView::f32(shape, values).ok()
    }
}

#[test]
fn tensors_of_no_adapter_are_refused() {
    let config = tiny("llama").params.config().clone();
    let lora = trained(&config, &[Projection::Q, Projection::Head], 7);
    let refused = |alpha: f32, change: &dyn Fn(&mut Owned)| {
        let tensor = |name: String| {
            let view = lora.tensor(&name).unwrap();
            let shape = view.shape().to_vec();
            (name, shape, view.into_f32().into_owned())
        };
        let mut tensors = Owned(lora.names().into_iter().map(tensor).collect());
        change(&mut tensors);
        let tensors = Arc::new(tensors);
        let adapter = Adapter { alpha, tensors };
        let error = Lora::from_adapter(&adapter, &config).unwrap_err();
        error.to_string()
    };
    let says = |text: String, part: &str| assert!(text.contains(part), "{text}");
    says(refused(0.0, &|_| {}), "LoRA alpha is 0");
    says(refused(1.0, &|t| t.0.clear()), "no target");
    says(
        refused(1.0, &|t| t.0.truncate(5)),
        "1 missing (base_model.model.lm_head.lora_B.weight)",
    );
    let layers = "base_model.model.model.layers";
    for (name, part) in [
        (
            format!("{layers}.0.mlp.experts.lora_A.weight"),
            "` is not the `lora_A.weight`",
        ),
        (
            format!("{layers}.9.self_attn.q_proj.lora_A.weight"),
            "1 unexpected",
        ),
        (
            "base_model.model.lm_head.base_layer.weight".to_owned(),
            "save_embedding_layers=False",
        ),
    ] {
        let text = refused(1.0, &|t| t.0[0].0.clone_from(&name));
        assert!(text.contains(&name) && text.contains(part), "{text}");
    }
    says(
        refused(1.0, &|t| t.0[1].1 = vec![t.0[1].2.len(), 1]),
        "q_proj.lora_B.weight is [",
    );
    says(
        refused(1.0, &|t| t.0[3].2[1] = f32::NAN),
        "layers.1.self_attn.q_proj.lora_B.weight` holds a value that is not finite",
    );
}
