//! The trainer on small random decoders: all parts real.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod golden;
mod masked;
mod shared;
mod temperature;

use sinew_model::{
    Family, Keep, Lora, LoraConfig, ModelConfig, ModelFiles, Params, Projection, RopeScaling,
    ValueHead, load_model,
};
use sinew_tensor::{Cpu, KernelSet};
use sinew_train::checkpoint::CheckpointStore;
use sinew_train::optim::AdamWConfig;
use sinew_train::{
    Commit, HostState, ModelPolicy, Policy, StepReport, Trainer, TrainerConfig, conformance,
    score_rows, score_values,
};
use sinew_types::{
    Correction, EpisodeId, KlEstimator, KlSpec, LossSpec, PolicyVersion, Surrogate, TensorSource,
    TokenId, TrainRow,
};
use std::sync::Arc;

fn config() -> ModelConfig {
    ModelConfig {
        family: Family::Llama,
        vocab: 61,
        d_model: 32,
        layers: 2,
        heads: 4,
        kv_heads: 2,
        head_dim: 8,
        d_ff: 64,
        rope_theta: 10_000.0,
        rope_scaling: RopeScaling::None,
        rms_eps: 1e-5,
        tied_embeddings: true,
        qkv_bias: false,
        qk_norm: false,
        max_context: 128,
        bos_id: None,
        eos_ids: vec![1],
    }
}

fn device() -> Cpu {
    Cpu::new(KernelSet::detect_f32(), 2)
}

fn params() -> Params {
    Params::random(&config(), 11)
}

fn full() -> ModelPolicy {
    ModelPolicy::full(params(), 128, Keep::All, device()).unwrap()
}

fn with_adapters() -> ModelPolicy {
    let lora = random_lora(&[Projection::Q, Projection::V, Projection::Down], 5);
    adapted(Arc::new(params()), lora)
}

fn random_lora(targets: &[Projection], seed: u64) -> Lora {
    let lora = LoraConfig {
        rank: 4,
        alpha: 8.0,
        targets: targets.to_vec(),
    };
    Lora::random(&lora, &config(), seed).unwrap()
}

fn adapted(params: Arc<Params>, lora: Lora) -> ModelPolicy {
    ModelPolicy::adapters(params, lora, "base", 128, Keep::LayerInputs, device()).unwrap()
}

fn trainer(policy: ModelPolicy, settings: TrainerConfig) -> Trainer<ModelPolicy> {
    Trainer::new(policy, settings, Box::new(|| 0.0)).unwrap()
}

/// A row that trains all tokens from `prompt` on.
fn row(tokens: &[TokenId], prompt: usize, weight: f32, advantage: f32) -> TrainRow {
    let n = tokens.len();
    let mut weights = vec![weight; n];
    weights[..prompt].fill(0.0);
    TrainRow {
        episode: EpisodeId::new("e"),
        tokens: tokens.to_vec(),
        weights,
        advantages: vec![advantage; n],
        behaviour_logprobs: vec![0.0; n],
        ..TrainRow::default()
    }
}

/// Two groups of three rows with long prompts, log-probabilities those of `policy`.
fn batch(policy: &mut ModelPolicy) -> Vec<TrainRow> {
    let mut rows = Vec::new();
    for group in 0..2u32 {
        for answer in 0..3u32 {
            let mut tokens: Vec<TokenId> = (0..20).map(|i| (i * 7 + 3) % 61).collect();
            tokens.extend((0..8).map(|i| (i * 5 + group * 13) % 61));
            let prompt = tokens.len();
            tokens.extend((0..5 + answer).map(|i| (i * 11 + answer / 2 * 17) % 61));
            rows.push(row(&tokens, prompt, 0.03, answer as f32 - 1.2));
        }
    }
    fill_behaviour(policy, &mut rows);
    rows
}

/// Fills `behaviour_logprobs` of every row.
fn fill_behaviour(policy: &mut ModelPolicy, rows: &mut [TrainRow]) {
    let columns = score_rows(policy, rows, 256).unwrap();
    for (row, column) in rows.iter_mut().zip(columns) {
        row.behaviour_logprobs = column;
    }
}

fn clip() -> LossSpec {
    LossSpec::new(Surrogate::Clip {
        low: 0.2,
        high: 0.2,
        dual: None,
    })
}

#[test]
fn supervised_training_overfits_a_batch() {
    let mut trainer = trainer(full(), TrainerConfig::new(256, 3e-3));
    let rows: Vec<TrainRow> = (0..4u32)
        .map(|r| {
            let tokens: Vec<TokenId> = (0..16).map(|i| (i * (r + 3) + r * 9) % 61).collect();
            row(&tokens, 1, 1.0 / 60.0, 1.0)
        })
        .collect();
    let mut step = || {
        trainer
            .step(&rows, &LossSpec::new(Surrogate::CrossEntropy))
            .unwrap()
    };
    let first = step();
    // An untrained model is close to uniform over 61 tokens: ln 61 = 4.11.
    assert!((first.loss - 61f64.ln()).abs() < 0.2, "{}", first.loss);
    assert_eq!((first.gap_mean_abs, first.metrics.ratio_mean), (None, None));
    let last = (0..120).map(|_| step()).last().unwrap();
    assert!(last.loss < 0.1, "{}", last.loss);
}

#[test]
fn weights_that_an_engine_holds_stay_while_training_goes_on() {
    let mut trainer = trainer(full(), TrainerConfig::new(96, 1e-2));
    let rows = batch(trainer.policy_mut());
    let held = trainer.policy().shared_params();
    let before = held.values().to_vec();
    trainer.step(&rows, &clip()).unwrap();
    assert_eq!(held.values(), before);
    let after = trainer.policy().shared_params();
    assert_ne!(after.values(), before);
    // Nobody else holds the new ones: the next update is in place.
    let place = after.values().as_ptr();
    drop(after);
    trainer.step(&rows, &clip()).unwrap();
    assert_eq!(trainer.policy().params().values().as_ptr(), place);
}

#[test]
fn reinforce_raises_the_probability_of_the_rewarded_token() {
    let mut trainer = trainer(full(), TrainerConfig::new(64, 3e-3));
    let arms: Vec<TrainRow> = (10..18)
        .map(|arm| row(&[3, 4, arm], 2, 0.125, 0.0))
        .collect();
    let probabilities = |trainer: &mut Trainer<ModelPolicy>| -> Vec<f32> {
        let scored = score_rows(trainer.policy_mut(), &arms, 64).unwrap();
        scored.iter().map(|column| column[2].exp()).collect()
    };
    let before = probabilities(&mut trainer)[3];
    for _ in 0..60 {
        let p = probabilities(&mut trainer);
        let mut rows = arms.clone();
        for (arm, row) in rows.iter_mut().enumerate() {
            row.weights[2] = p[arm];
            row.advantages[2] = if arm == 3 { 1.0 } else { -0.2 };
            row.behaviour_logprobs[2] = p[arm].ln();
        }
        trainer
            .step(&rows, &LossSpec::new(Surrogate::Reinforce))
            .unwrap();
    }
    let after = probabilities(&mut trainer)[3];
    assert!(before < 0.05 && after > 0.8, "{before} to {after}");
}

/// All gradients of one step at a learning rate too small to matter.
fn gradients(mut policy: ModelPolicy, tokens: usize, spec: &LossSpec) -> (Vec<f32>, StepReport) {
    let mut rows = batch(&mut policy);
    let mut frozen = ModelPolicy::frozen(params(), 128, device()).unwrap();
    fill_reference(&mut frozen, &mut rows);
    for (i, row) in rows.iter_mut().enumerate() {
        let off = 0.05 * i as f32;
        row.behaviour_logprobs.iter_mut().for_each(|l| *l -= off);
        let reference = row.ref_logprobs.as_mut().unwrap();
        reference.iter_mut().for_each(|l| *l += off);
    }
    let mut trainer = trainer(
        policy,
        with_first_moments(TrainerConfig::new(tokens, 1e-12)),
    );
    let report = trainer.step(&rows, spec).unwrap();
    let named = first_moments(trainer.policy());
    (named.into_iter().flat_map(|(_, g)| g).collect(), report)
}

/// Fills `ref_logprobs` of every row.
fn fill_reference(policy: &mut ModelPolicy, rows: &mut [TrainRow]) {
    let columns = score_rows(policy, rows, 256).unwrap();
    for (row, column) in rows.iter_mut().zip(columns) {
        row.ref_logprobs = Some(column);
    }
}

/// Settings under which the first moments of an update are its gradients.
fn with_first_moments(config: TrainerConfig) -> TrainerConfig {
    let adamw = AdamWConfig {
        beta1: 0.0,
        ..config.adamw
    };
    TrainerConfig {
        adamw,
        max_grad_norm: None,
        ..config
    }
}

/// The gradients of an update with [`with_first_moments`], in the order of the tensors.
fn first_moments(policy: &ModelPolicy) -> Vec<(String, Vec<f32>)> {
    let moments = policy.optimizer();
    let names = moments.names();
    let of = |name: &String| {
        let tensor = name.strip_prefix("m.")?;
        let values = moments.tensor(name)?.into_f32().into_owned();
        Some((tensor.to_owned(), values))
    };
    names.iter().filter_map(of).collect()
}

/// The gradients differ by the order of f32 additions over some hundred terms: 1e-5 of the norm.
#[test]
fn any_split_into_micro_batches_gives_the_same_gradient() {
    let mut full_spec = clip();
    full_spec.correction = Correction::Truncate {
        low: 0.0,
        high: 1.2,
    };
    full_spec.kl = Some(KlSpec {
        estimator: KlEstimator::K3,
        coefficient: 0.1,
    });
    full_spec.entropy = 0.01;
    let sequence = LossSpec::new(Surrogate::SequenceClip {
        low: 0.2,
        high: 0.2,
    });
    for spec in [full_spec, sequence] {
        let (whole, report) = gradients(full(), 1000, &spec);
        assert_eq!(report.micro_batches, 1);
        let (split, report_split) = gradients(full(), 36, &spec);
        assert!(
            report_split.micro_batches >= 4,
            "{}",
            report_split.micro_batches
        );
        assert!(report.naive_tokens > 2 * report.packed_tokens, "{report:?}");
        let norm = |g: &[f32]| g.iter().map(|v| f64::from(v * v)).sum::<f64>().sqrt();
        let apart: Vec<f32> = whole.iter().zip(&split).map(|(a, b)| a - b).collect();
        assert!(norm(&whole) > 1e-2);
        assert!(
            norm(&apart) < 1e-5 * norm(&whole),
            "{} of {}",
            norm(&apart),
            norm(&whole)
        );
        assert!((report.loss - report_split.loss).abs() < 1e-6);
    }
}

#[test]
fn adapters_train_and_the_base_stays() {
    let mut trainer = trainer(with_adapters(), TrainerConfig::new(256, 1e-2));
    let mut rows = batch(trainer.policy_mut());
    let policy = trainer.policy_mut();
    policy.use_base(true).unwrap();
    fill_reference(policy, &mut rows);
    policy.use_base(false).unwrap();
    let mut spec = clip();
    spec.kl = Some(KlSpec {
        estimator: KlEstimator::K2,
        coefficient: 0.01,
    });
    let before = trainer.policy().lora().unwrap().values().to_vec();
    let first = trainer.step(&rows, &spec).unwrap();
    // B starts at zero: the policy is the base, and so is its reference.
    assert!(first.metrics.kl_reference.unwrap() < 1e-9);
    assert!(first.gap_max_abs.unwrap() < 1e-4);
    let second = trainer.step(&rows, &spec).unwrap();
    // K2 of the scores that the adapters give now against those of the weights below.
    let policy = trainer.policy_mut();
    let scored = score_rows(policy, &rows, 256).unwrap();
    let mut expected = (0.0, 0.0);
    for (row, scored) in rows.iter().zip(&scored) {
        let reference = row.ref_logprobs.as_ref().unwrap();
        for ((ours, base), weight) in scored.iter().zip(reference).zip(&row.weights) {
            if *weight != 0.0 {
                expected.0 += 0.5 * f64::from(ours - base).powi(2);
                expected.1 += 1.0;
            }
        }
    }
    let third = trainer.step(&rows, &spec).unwrap();
    let (found, expected) = (third.metrics.kl_reference.unwrap(), expected.0 / expected.1);
    assert!(expected > 1e-6, "the adapters have moved: {expected}");
    assert!(
        (found - expected).abs() < 1e-3 * expected,
        "{found} for {expected}"
    );
    assert!(second.metrics.kl_reference.unwrap() > 1e-9);
    assert!(
        second.loss < first.loss,
        "{} to {}",
        first.loss,
        second.loss
    );
    assert_eq!(trainer.policy().params().values(), params().values());
    assert_ne!(trainer.policy().lora().unwrap().values(), before);
    assert!(full().use_base(true).is_err());
}

#[test]
fn saved_adapters_load_as_peft_ones_and_go_on() {
    let dir = tempfile::tempdir().unwrap();
    let store = CheckpointStore::open(dir.path(), 2).unwrap();
    let mut first = trainer(with_adapters(), TrainerConfig::new(256, 1e-2));
    let rows = batch(first.policy_mut());
    first.step(&rows, &clip()).unwrap();
    let path = first.save(&store, 1, &Commit::default(), vec![]).unwrap();
    let loaded = Lora::load(&path, &config()).unwrap();
    assert_eq!(loaded.values(), first.policy().lora().unwrap().values());
    first.step(&rows, &clip()).unwrap();
    let mut second = trainer(with_adapters(), TrainerConfig::new(256, 1e-2));
    second.restore(&store.load().unwrap().unwrap()).unwrap();
    second.step(&rows, &clip()).unwrap();
    let lora = |t: &Trainer<ModelPolicy>| t.policy().lora().unwrap().values().to_vec();
    assert_eq!(lora(&first), lora(&second));
    let mut other = trainer(full(), TrainerConfig::new(256, 1e-2));
    let error = other.restore(&store.load().unwrap().unwrap()).unwrap_err();
    assert!(
        error.to_string().contains("adapter_model.safetensors"),
        "{error}"
    );
}

#[test]
fn six_steps_are_three_and_three_to_the_bit_and_the_weights_load_as_a_model() {
    let dir = tempfile::tempdir().unwrap();
    let store = CheckpointStore::open(dir.path(), 1).unwrap();
    let mut settings = TrainerConfig::new(40, 1e-3);
    settings.adamw.weight_decay = 0.1;
    let rows = batch(&mut full());
    let steps = |trainer: &mut Trainer<ModelPolicy>| {
        for _ in 0..3 {
            trainer.step(&rows, &clip()).unwrap();
        }
    };
    let values = |t: &Trainer<ModelPolicy>| t.policy().params().values().to_vec();
    let mut straight = trainer(full(), settings);
    steps(&mut straight);
    let middle = values(&straight);
    let path = straight
        .save(&store, 1, &Commit::default(), vec![])
        .unwrap();
    steps(&mut straight);
    let mut resumed = trainer(full(), settings);
    let state = resumed.restore(&store.load().unwrap().unwrap()).unwrap();
    assert_eq!((state.step, resumed.version()), (3, PolicyVersion(3)));
    assert_eq!(values(&resumed), middle);
    steps(&mut resumed);
    let bits = |v: Vec<f32>| v.into_iter().map(f32::to_bits).collect::<Vec<_>>();
    assert_eq!(bits(values(&resumed)), bits(values(&straight)));
    let model = load_model(&ModelFiles::Dir(path)).unwrap();
    assert_eq!(model.params.values(), middle);
}

#[test]
fn a_critic_learns_its_returns() {
    let policy = full().with_critic(ValueHead::random(32, 1), 1.0);
    let mut settings = TrainerConfig::new(64, 3e-3);
    settings.max_grad_norm = None;
    let mut trainer = trainer(policy, settings);
    let mut rows = batch(trainer.policy_mut());
    let mut spec = clip();
    spec.value = Some((1.0, None));
    assert!(
        trainer
            .step(&rows, &spec)
            .unwrap_err()
            .to_string()
            .contains("lacks values")
    );
    let values = score_values(trainer.policy_mut(), &rows, 256).unwrap();
    for (i, row) in rows.iter_mut().enumerate() {
        row.values = Some(values[i].clone());
        row.returns = Some(vec![if i < 3 { 1.0 } else { -1.0 }; row.tokens.len()]);
        row.advantages.fill(0.0);
    }
    let first = trainer.step(&rows, &spec).unwrap().metrics.value_loss;
    let last = (0..60)
        .map(|_| trainer.step(&rows, &spec).unwrap().metrics.value_loss)
        .last();
    assert!(last.unwrap() < 0.05 * first, "{first} to {last:?}");
    let dir = tempfile::tempdir().unwrap();
    let store = CheckpointStore::open(dir.path(), 1).unwrap();
    trainer.save(&store, 1, &Commit::default(), vec![]).unwrap();
    let fresh = full().with_critic(ValueHead::random(32, 2), 1.0);
    let mut again = Trainer::new(fresh, settings, Box::new(|| 0.0)).unwrap();
    again.restore(&store.load().unwrap().unwrap()).unwrap();
    let scored = |t: &mut Trainer<ModelPolicy>| score_values(t.policy_mut(), &rows, 64).unwrap();
    assert_eq!(scored(&mut again), scored(&mut trainer));
}

#[test]
fn model_policies_pass_the_conformance_tests() {
    let rows = batch(&mut full());
    let dir = tempfile::tempdir().unwrap();
    let folder = |name: &str| dir.path().join(name);
    conformance::policy(full, &rows, &folder("full"));
    conformance::policy(with_adapters, &rows, &folder("adapters"));
    let critic = || full().with_critic(ValueHead::random(config().d_model, 3), 10.0);
    conformance::policy(critic, &rows, &folder("critic"));
    let head = || {
        let lora = random_lora(&[Projection::O, Projection::Head], 5);
        let policy = adapted(Arc::new(params()), lora);
        policy.with_critic(ValueHead::random(config().d_model, 3), 10.0)
    };
    conformance::policy(head, &rows, &folder("head"));
    conformance::policy(|| head().adding_adapters(), &rows, &folder("added"));
}

#[test]
fn what_is_published_names_every_tensor() {
    let policy = full();
    assert_eq!(policy.params().names().len(), 1 + 2 * 9 + 1);
    assert!(score_values(&mut full(), &[], 8).is_err());
}
