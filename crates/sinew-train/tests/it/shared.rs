//! Policies with adapters on one base: shared weights, buffers that move, memory that is given back; and
//! adapters for engines.

use crate::{adapted, batch, clip, config, device, full, params, random_lora, trainer};
use sinew_model::{Lora, Params, Projection};
use sinew_train::checkpoint::CheckpointStore;
use sinew_train::optim::{AdamWConfig, Outcome, Update};
use sinew_train::pack::{Packing, pack};
use sinew_train::{
    ModelPolicy, OutputChoice, Policy, ScoreGrads, Trainer, TrainerConfig, score_rows,
};
use sinew_types::{PolicyVersion, TensorSource};
use std::sync::Arc;

const BACKWARD: OutputChoice = OutputChoice {
    entropies: false,
    values: false,
    backward: true,
};

fn policy(base: &Arc<Params>, seed: u64) -> ModelPolicy {
    adapted(
        Arc::clone(base),
        random_lora(&[Projection::Q, Projection::Down], seed),
    )
}

fn lora_bytes(policy: &ModelPolicy) -> usize {
    size_of_val(policy.lora().unwrap().values())
}

fn packed() -> Packing {
    pack(&batch(&mut full()), usize::MAX).unwrap()
}

/// Runs both passes, with a derivative of 1 for every log-probability.
fn pass(policy: &mut ModelPolicy, packing: &Packing) {
    let wave = [&packing.micro_batches[0]];
    let scores = policy.forward(&wave, BACKWARD).unwrap();
    let grads = ScoreGrads {
        logprobs: vec![1.0; scores[0].logprobs.len()],
        ..ScoreGrads::default()
    };
    policy.backward(&wave, &[grads]).unwrap();
}

#[test]
fn policies_on_one_base_train_as_if_each_was_by_itself() {
    let base = Arc::new(params());
    let make = |seed| trainer(policy(&base, seed), TrainerConfig::new(256, 1e-2));
    let rows = batch(&mut full());
    let values = |t: &Trainer<ModelPolicy>| t.policy().lora().unwrap().values().to_vec();
    let alone = [0, 1].map(|seed| {
        let mut one = make(seed);
        for _ in 0..3 {
            one.step(&rows, &clip()).unwrap();
        }
        values(&one)
    });
    let (mut a, mut b) = (make(0), make(1));
    let own = lora_bytes(a.policy());
    // Adapters and gradients; the rest are tables.
    let tables = a.policy().resident_bytes() - 2 * own;
    for _ in 0..3 {
        for turn in [true, false] {
            let (next, last) = if turn {
                (&mut a, &mut b)
            } else {
                (&mut b, &mut a)
            };
            next.policy_mut().swap_buffers(last.policy_mut());
            last.policy_mut().zero_gradients().unwrap();
            last.policy_mut().release_gradients();
            next.step(&rows, &clip()).unwrap();
            assert!(next.policy().resident_bytes() > 4 * own + tables);
            // Adapters, and two moments if it computed already.
            let idle = last.policy().resident_bytes() - tables;
            assert!(idle == own || idle == 3 * own, "{idle} of {own}");
        }
    }
    assert_eq!(values(&a), alone[0]);
    assert_eq!(values(&b), alone[1]);
    assert_eq!(base.values(), params().values());
    assert_eq!(Arc::strong_count(&base), 3);
}

#[test]
fn moved_buffers_have_no_backward_pass() {
    let base = Arc::new(params());
    let (mut a, mut b) = (policy(&base, 0), policy(&base, 1));
    let packing = packed();
    let wave = [&packing.micro_batches[0]];
    let scores = a.forward(&wave, BACKWARD).unwrap();
    b.forward(&wave, BACKWARD).unwrap();
    a.swap_buffers(&mut b);
    let grads = [ScoreGrads {
        logprobs: vec![1.0; scores[0].logprobs.len()],
        ..ScoreGrads::default()
    }];
    for policy in [&mut a, &mut b] {
        let error = policy.backward(&wave, &grads).unwrap_err().to_string();
        assert!(error.contains("backward without a forward pass"), "{error}");
    }
    let again = a.forward(&wave, BACKWARD).unwrap();
    assert_eq!(again, scores);
    a.backward(&wave, &grads).unwrap();
}

/// Policies of all weights and of adapters exchange buffers of other layouts, too.
#[test]
fn buffers_of_other_policies_do_not_change_results() {
    let packing = packed();
    let wave = [&packing.micro_batches[0]];
    let mut whole = full();
    let mut adapters = policy(&Arc::new(params()), 3);
    let expected = whole.forward(&wave, BACKWARD).unwrap();
    let scoring = adapters.forward(&wave, OutputChoice::default()).unwrap();
    whole.swap_buffers(&mut adapters);
    assert_eq!(whole.forward(&wave, BACKWARD).unwrap(), expected);
    let again = adapters.forward(&wave, OutputChoice::default()).unwrap();
    assert_eq!(again, scoring);
}

#[test]
fn gradients_of_zero_need_no_memory() {
    let mut policy = policy(&Arc::new(params()), 2);
    let (packing, own) = (packed(), lora_bytes(&policy));
    let fresh = policy.resident_bytes();
    policy.release_gradients();
    assert_eq!(policy.resident_bytes(), fresh - own);
    pass(&mut policy, &packing);
    let held = policy.resident_bytes();
    policy.release_gradients();
    assert_eq!(policy.resident_bytes(), held, "gradients are kept");
    policy.zero_gradients().unwrap();
    policy.release_gradients();
    assert_eq!(policy.resident_bytes(), held - own);

    let update = Update {
        number: 1,
        lr: 1e-3,
        adamw: AdamWConfig::default(),
        max_grad_norm: None,
    };
    let outcome = policy.apply(&update).unwrap();
    assert_eq!(outcome, Outcome::Applied { grad_norm: 0.0 });
    pass(&mut policy, &packing);
    let outcome = policy
        .apply(&Update {
            number: 2,
            ..update
        })
        .unwrap();
    assert!(matches!(outcome, Outcome::Applied { grad_norm } if grad_norm > 0.0));

    // A checkpoint is written and read without them.
    policy.zero_gradients().unwrap();
    policy.release_gradients();
    let idle = policy.resident_bytes();
    let dir = tempfile::tempdir().unwrap();
    let store = CheckpointStore::open(dir.path(), 1).unwrap();
    let mut draft = store.begin(2).unwrap();
    let files = policy.save(&mut draft).unwrap();
    draft.commit().unwrap();
    let loaded = store.load().unwrap().unwrap();
    policy.load(&loaded, &files, 2).unwrap();
    assert_eq!(policy.resident_bytes(), idle);
}

#[test]
fn frozen_policies_and_whole_models_count_their_weights() {
    let weights = size_of_val(params().values());
    let frozen = ModelPolicy::frozen(params(), 128, device()).unwrap();
    let whole = full();
    assert!(frozen.resident_bytes() >= weights && whole.resident_bytes() >= 2 * weights);
    assert!(frozen.resident_bytes() < whole.resident_bytes());
    assert!(whole.adapter().is_none() && frozen.adapter().is_none());
}

/// The adapter of the output projection is trained, copied for engines, and merged into a separate matrix.
#[test]
fn an_adapted_output_projection_is_trained_and_published() {
    let lora = random_lora(&[Projection::V, Projection::Head], 5);
    let policy = adapted(Arc::new(params()), lora);
    let mut trainer = trainer(policy, TrainerConfig::new(256, 1e-2));
    let rows = batch(trainer.policy_mut());
    let first = trainer.step(&rows, &clip()).unwrap();
    let last = (0..5).map(|_| trainer.step(&rows, &clip()).unwrap()).last();
    assert!(last.unwrap().loss < first.loss);

    let policy = trainer.policy_mut();
    let copied = Lora::from_adapter(&policy.adapter().unwrap(), &config()).unwrap();
    let own = policy.lora().unwrap();
    assert_eq!(
        (copied.values(), copied.config()),
        (own.values(), own.config())
    );
    let mut merged = Params::zeros(&copied.config().merged_config(&config()));
    let weights = policy.weights(PolicyVersion(1)).unwrap();
    merged.copy_from(&*weights).unwrap();
    let embeddings = |source: &dyn TensorSource| {
        let view = source.tensor("model.embed_tokens.weight").unwrap();
        view.into_f32().into_owned()
    };
    assert_eq!(embeddings(&merged), embeddings(&params()));
    let head = merged.tensor("lm_head.weight").unwrap().into_f32();
    assert_ne!(*head, *embeddings(&merged));
    let mut frozen = ModelPolicy::frozen(merged.clone(), 128, device()).unwrap();
    let expected = score_rows(policy, &rows, 256).unwrap().concat();
    let found = score_rows(&mut frozen, &rows, 256).unwrap().concat();
    let gap = |(a, b): (&f32, &f32)| (a - b).abs();
    let worst = expected.iter().zip(&found).map(gap).fold(0.0, f32::max);
    assert!(worst < 1e-4, "{worst}");

    // A copy does not change with the policy.
    let before = copied.values().to_vec();
    let adapter = policy.adapter().unwrap();
    trainer.step(&rows, &clip()).unwrap();
    let after = Lora::from_adapter(&adapter, &config()).unwrap();
    assert_eq!(after.values(), before);
    assert_ne!(trainer.policy().lora().unwrap().values(), before);
}
