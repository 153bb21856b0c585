//! Scores and updates of both policies on the same rows.

use crate::bench::{
    Bench, assert_scores, assert_weights, batches, config, device, params, rows, scored, tensors,
    update, weights,
};
use sinew_model::{Family, Keep, Lora, LoraConfig, Projection, ValueHead};
use sinew_torch::{CriticOptions, LoraOptions};
use sinew_train::checkpoint::CheckpointStore;
use sinew_train::pack::MicroBatch;
use sinew_train::{ModelPolicy, OutputChoice, Policy};
use sinew_types::{RowMasks, TokenId, TrainRow};
use std::path::Path;
use std::sync::Arc;

const ALL: OutputChoice = OutputChoice {
    entropies: true,
    values: false,
    backward: false,
};

fn embedded(family: Family) -> ModelPolicy {
    ModelPolicy::full(params(family, 11), 256, Keep::All, device()).unwrap()
}

pub(crate) fn three_updates_are_those_of_the_embedded_policy(bench: &Bench, family: Family) {
    let what = format!("{family:?}");
    let mut torch = bench.open(&bench.model(family, 11), |_| {});
    let mut own = embedded(family);
    assert_weights(&what, &weights(&mut torch), &weights(&mut own));
    let batches = batches(&rows(3));
    for number in 1..=3 {
        let (found, found_norm) = update(&mut torch, &batches, number);
        let (expected, norm) = update(&mut own, &batches, number);
        assert_scores(&what, &found, &expected);
        assert!(norm > 0.5, "the gradients are clipped: {norm}");
        assert!(
            (found_norm / norm - 1.0).abs() < 1e-5,
            "{what}: {found_norm} and {norm}"
        );
    }
    assert_weights(&what, &weights(&mut torch), &weights(&mut own));
    let wave: Vec<&MicroBatch> = batches.iter().take(1).collect();
    assert!(torch.backward(&wave, &[]).is_err(), "no pass was announced");
}

/// Rows with temperatures, whose answers were drawn from some of the tokens.
fn masked_rows() -> Vec<TrainRow> {
    let mut rows = rows(5);
    for (r, row) in rows.iter_mut().enumerate() {
        row.temperatures = (0..row.tokens.len())
            .map(|t| 0.6 + 0.1 * (t % 7) as f32)
            .collect();
        let mask = |t: usize| {
            // One token is allowed, some are, or (0) all of them.
            let count = [1, 4, 40, 0][(t + r) % 4];
            let mut words = vec![0u32; 2];
            for i in 0..count {
                let id = (row.tokens[t] + 11 * i) % 61;
                words[id as usize / 32] |= 1 << (id % 32);
            }
            (count > 0).then_some(words)
        };
        let masks: Vec<Option<Vec<u32>>> = (0..row.tokens.len()).map(mask).collect();
        row.masks = Some(RowMasks::gather(2, masks.iter().map(Option::as_deref)));
    }
    rows
}

pub(crate) fn masks_temperatures_and_values(bench: &Bench, model: &Path) {
    let head = ValueHead::random(32, 4);
    let critic = CriticOptions {
        head: head.values().to_vec(),
        lr_scale: 0.5,
    };
    let mut torch = bench.open(model, |setup| setup.open.critic = Some(critic));
    let mut own = embedded(Family::Llama).with_critic(head, 0.5);
    let batches = batches(&masked_rows());
    assert!(batches.iter().all(|batch| batch.masks.words == 2));
    for number in 1..=3 {
        let (found, _) = update(&mut torch, &batches, number);
        let (expected, _) = update(&mut own, &batches, number);
        assert!(!found[0].values.is_empty());
        assert_scores("masks", &found, &expected);
    }
    assert_weights("masks", &weights(&mut torch), &weights(&mut own));
}

pub(crate) fn the_most_likely_tokens(bench: &Bench, model: &Path) {
    let mut torch = bench.open(model, |_| {});
    let mut own = embedded(Family::Llama);
    let batches = batches(&masked_rows());
    let wave: Vec<&MicroBatch> = batches.iter().take(2).collect();
    for k in [0, 3, 61, 100] {
        let found = torch.top(&wave, k).unwrap();
        let each = wave.iter().map(|batch| own.top(&[batch], k).unwrap());
        let expected: Vec<_> = each.flatten().collect();
        assert_eq!(found.len(), expected.len());
        for (found, expected) in found.iter().flatten().zip(expected.iter().flatten()) {
            assert_eq!(found.len(), expected.len(), "of {k}");
            for (a, b) in found.iter().zip(expected) {
                assert!((a.logprob - b.logprob).abs() <= 1e-5, "{a:?} and {b:?}");
            }
            let ids = |top: &[sinew_types::TokenLogprob]| -> Vec<TokenId> {
                top.iter().take(3).map(|token| token.id).collect()
            };
            assert_eq!(ids(found), ids(expected));
        }
    }
}

pub(crate) fn frozen_models(bench: &Bench, model: &Path) {
    let other = bench.model(Family::Llama, 12);
    let mut torch = bench.open(model, |setup| {
        setup.open.frozen.insert("reference".to_owned(), other);
    });
    let mut scorer = torch.scorer("reference");
    let mut own = ModelPolicy::frozen(params(Family::Llama, 12), 256, device()).unwrap();
    let batches = batches(&rows(0));
    let expected = scored(&mut own, &batches, ALL);
    assert_scores("reference", &scored(&mut scorer, &batches, ALL), &expected);
    update(&mut torch, &batches, 1);
    assert_scores("reference", &scored(&mut scorer, &batches, ALL), &expected);
    let own = scored(&mut embedded(Family::Llama), &batches, ALL);
    assert!(
        (own[0].logprobs[0] - expected[0].logprobs[0]).abs() > 1e-4,
        "another model"
    );
}

pub(crate) fn adapters(bench: &Bench, model: &Path) {
    let lora = LoraConfig {
        rank: 4,
        alpha: 8.0,
        targets: vec![Projection::Q, Projection::V, Projection::Down],
    };
    let targets = lora.targets.iter().map(|t| t.name().to_owned()).collect();
    let mut torch = bench.open(model, |setup| {
        setup.open.lora = Some(LoraOptions {
            rank: 4,
            alpha: 8.0,
            targets,
            seed: 1,
            base_name: Some("base".to_owned()),
        });
    });
    let random = Lora::random(&lora, &config(Family::Llama), 5).unwrap();
    let params = Arc::new(params(Family::Llama, 11));
    let own = ModelPolicy::adapters(params, random, "base", 256, Keep::All, device());
    let mut own = own.unwrap();
    // Both begin with the embedded policy's random adapters.
    let store = CheckpointStore::open(bench.dir.path().join("adapters"), 2).unwrap();
    let mut draft = store.begin(0).unwrap();
    let files = own.save(&mut draft).unwrap();
    draft.commit().unwrap();
    torch
        .load(&store.load().unwrap().unwrap(), &files, 0)
        .unwrap();
    let batches = batches(&rows(7));
    let base = scored(&mut own, &batches, ALL);
    for number in 1..=3 {
        let (found, _) = update(&mut torch, &batches, number);
        let (expected, _) = update(&mut own, &batches, number);
        assert_scores("adapters", &found, &expected);
    }
    assert_weights("merged", &weights(&mut torch), &weights(&mut own));
    torch.use_base(true).unwrap();
    assert_scores("base", &scored(&mut torch, &batches, ALL), &base);
    torch.use_base(false).unwrap();
    let trained = scored(&mut own, &batches, ALL);
    assert_scores("adapters", &scored(&mut torch, &batches, ALL), &trained);
    assert!((trained[0].logprobs[0] - base[0].logprobs[0]).abs() > 1e-5);
    // The adapters that the ranks write are those of the embedded policy's format.
    let mut draft = store.begin(3).unwrap();
    assert_eq!(
        torch.save(&mut draft).unwrap(),
        ["adapter_model.safetensors"]
    );
    let path = draft.commit().unwrap();
    let saved = Lora::load(&path, &config(Family::Llama)).unwrap();
    assert_eq!((saved.config().rank, saved.config().alpha), (4, 8.0));
    assert_weights("saved", &tensors(&saved), &tensors(own.lora().unwrap()));
}
