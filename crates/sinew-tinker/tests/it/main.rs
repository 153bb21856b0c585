//! Losses of the protocol on a tiny decoder, as PyTorch computes them.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod served;
mod server;

use sinew_model::{Keep, Lora, LoraConfig, ModelFiles, Params, Projection, load_model};
use sinew_tensor::{Cpu, KernelSet};
use sinew_tinker::{
    BatchLimits, Category, Datum, FbOutput, Loss, LossRequest, Tensor, TensorValues, TinkerError,
    forward_backward,
};
use sinew_train::optim::{AdamWConfig, Update};
use sinew_train::{HostState, ModelPolicy, Policy};
use sinew_types::TensorSource;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

const LIMITS: BatchLimits = BatchLimits {
    vocab: 97,
    context: 64,
    micro_batch_tokens: 256,
    targets: 4096,
};

#[derive(serde::Deserialize)]
struct Case {
    loss: LossRequest,
    data: Vec<Datum>,
    logprobs: Vec<Vec<f64>>,
    loss_sum: f64,
    norms: BTreeMap<String, f64>,
    /// Every n-th gradient of each tensor.
    some: BTreeMap<String, Vec<f64>>,
}

fn cases() -> Vec<Case> {
    serde_json::from_str(include_str!("../golden/losses.json")).unwrap()
}

fn device() -> Cpu {
    Cpu::new(KernelSet::detect_f32(), 1)
}

fn params() -> Params {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../sinew-model/tests/golden/llama");
    load_model(&ModelFiles::Dir(folder)).unwrap().params
}

fn llama() -> ModelPolicy {
    let mut policy = ModelPolicy::full(params(), 64, Keep::All, device()).unwrap();
    policy.zero_gradients().unwrap();
    policy
}

/// A policy that computes each row by itself, on the same model.
struct Flat(ModelPolicy);

/// The gradients by name: an update without a first decay has them as its first moments.
fn gradients(policy: &mut ModelPolicy) -> BTreeMap<String, Vec<f32>> {
    let update = Update {
        number: 1,
        lr: 1e-12,
        adamw: AdamWConfig {
            beta1: 0.0,
            ..AdamWConfig::default()
        },
        max_grad_norm: None,
    };
    policy.apply(&update).unwrap();
    let moments = policy.optimizer();
    let of = |name: String| {
        let tensor = name.strip_prefix("m.")?.to_owned();
        Some((tensor, moments.tensor(&name)?.into_f32().into_owned()))
    };
    moments.names().into_iter().filter_map(of).collect()
}

fn norm(values: &[f32]) -> f64 {
    let squares = values.iter().map(|&v| f64::from(v) * f64::from(v));
    squares.sum::<f64>().sqrt()
}

fn logprobs(output: &FbOutput, datum: usize) -> (&[usize], &[f32]) {
    let Tensor {
        shape,
        values: TensorValues::F32(values),
    } = &output.outputs[datum]["logprobs"]
    else {
        panic!("float32");
    };
    (shape, values)
}

/// Compares outputs with PyTorch's in f64: 2e-6 of the values, 1e-6 of the loss. PyTorch in f32 is off by
/// as much.
fn assert_outputs(case: &Case, output: &FbOutput) {
    let name = &case.loss.name;
    assert_eq!(output.output_type, "ArrayRecord");
    assert_eq!(output.outputs.len(), case.data.len());
    for (i, (datum, expected)) in case.data.iter().zip(&case.logprobs).enumerate() {
        let (shape, found) = logprobs(output, i);
        assert_eq!(shape, datum.inputs["target_tokens"].shape, "{name}");
        assert_eq!(found.len(), expected.len());
        for (l, e) in found.iter().zip(expected) {
            let off = (f64::from(*l) - e).abs();
            assert!(off <= 2e-6 * (1.0 + e.abs()), "{name}: {l} {e}");
        }
    }
    let names: Vec<&String> = output.metrics.keys().collect();
    assert_eq!(names, ["loss:sum"]);
    let sum = output.metrics["loss:sum"];
    let size = 1.0 + case.loss_sum.abs();
    assert!((sum - case.loss_sum).abs() <= 1e-6 * size, "{name}: {sum}");
}

/// Compares gradients with PyTorch's: single ones by 1e-6 of the tensor's norm, and norms, which add up the
/// errors of thousands.
fn assert_gradients(case: &Case, found: &BTreeMap<String, Vec<f32>>) {
    let name = &case.loss.name;
    assert_eq!(found.len(), case.norms.len());
    for (tensor, expected) in &case.norms {
        let off = (norm(&found[tensor]) / expected - 1.0).abs();
        assert!(off < 5e-6, "{name} {tensor}: {off}");
        let step = (found[tensor].len() / 16).max(1);
        let some = found[tensor].iter().step_by(step);
        assert_eq!(some.len(), case.some[tensor].len());
        for (g, e) in some.zip(&case.some[tensor]) {
            let off = (f64::from(*g) - e).abs();
            assert!(off <= 1e-6 * expected, "{name} {tensor}: {g} {e}");
        }
    }
}

#[test]
fn every_loss_is_that_of_pytorch() {
    let cases = cases();
    let mut served: Vec<&str> = cases.iter().map(|case| case.loss.name.as_str()).collect();
    served.dedup();
    assert_eq!(served, Loss::NAMES, "a case of each loss");
    for case in &cases {
        let loss = Loss::parse(&case.loss).unwrap();
        // Prefixes shared in one pass, and a pass for each datum.
        for micro_batch_tokens in [256, 12] {
            let limits = BatchLimits {
                micro_batch_tokens,
                ..LIMITS
            };
            let mut policy = llama();
            let scored = forward_backward(&mut policy, &case.data, &loss, false, &limits).unwrap();
            assert_outputs(case, &scored);
            let output = forward_backward(&mut policy, &case.data, &loss, true, &limits).unwrap();
            assert_eq!(output, scored, "a backward pass changes no output");
            assert_gradients(case, &gradients(&mut policy));
        }
    }
}

/// Gradients of requests add up until an update, so that a client can divide a batch.
#[test]
fn requests_add_their_gradients() {
    let cases = cases();
    let case = &cases[0];
    let loss = Loss::parse(&case.loss).unwrap();
    let mut policy = llama();
    let mut sum = 0.0;
    for datum in &case.data {
        let data = std::slice::from_ref(datum);
        let output = forward_backward(&mut policy, data, &loss, true, &LIMITS).unwrap();
        sum += output.metrics["loss:sum"];
    }
    assert!((sum - case.loss_sum).abs() <= 1e-6 * case.loss_sum.abs());
    assert_gradients(case, &gradients(&mut policy));
}

/// A custom loss of the SDK: log-probabilities from `forward`, and its derivatives as negative weights of
/// `cross_entropy`. Here the loss is `importance_sampling`, whose gradients are known.
#[test]
fn any_loss_trains_through_weights_of_cross_entropy() {
    let cases = cases();
    let case = cases
        .iter()
        .find(|case| case.loss.name == "importance_sampling")
        .unwrap();
    let cross_entropy = Loss::parse(&LossRequest {
        name: "cross_entropy".to_owned(),
        ..LossRequest::default()
    })
    .unwrap();
    let numbers = |datum: &Datum, name: &str| match &datum.inputs[name].values {
        TensorValues::F32(values) => values.clone(),
        TensorValues::I64(_) => panic!("{name} is float32"),
    };
    let bare = |datum: &Datum, weights: Vec<f32>| {
        let mut bare = Datum {
            tokens: datum.tokens.clone(),
            ..Datum::default()
        };
        let targets = datum.inputs["target_tokens"].clone();
        bare.inputs.insert("target_tokens".to_owned(), targets);
        bare.inputs
            .insert("weights".to_owned(), Tensor::floats(weights));
        bare
    };
    let zeros = |datum: &Datum| bare(datum, vec![0.0; datum.tokens.len()]);
    let data: Vec<Datum> = case.data.iter().map(zeros).collect();
    let mut policy = llama();
    let scored = forward_backward(&mut policy, &data, &cross_entropy, false, &LIMITS).unwrap();
    assert_eq!(scored.metrics["loss:sum"], 0.0);
    let mut weighted = Vec::new();
    for (i, datum) in case.data.iter().enumerate() {
        let (sampled, advantages) = (numbers(datum, "logprobs"), numbers(datum, "advantages"));
        let (_, found) = logprobs(&scored, i);
        let each = found.iter().zip(&sampled).zip(&advantages);
        weighted.push(bare(
            datum,
            each.map(|((l, q), a)| (l - q).exp() * a).collect(),
        ));
    }
    forward_backward(&mut policy, &weighted, &cross_entropy, true, &LIMITS).unwrap();
    assert_gradients(case, &gradients(&mut policy));
}

impl Policy for Flat {
    fn shares_prefixes(&self) -> bool {
        false
    }

    fn forward(
        &mut self,
        wave: &[&sinew_train::pack::MicroBatch],
        want: sinew_train::OutputChoice,
    ) -> Result<Vec<sinew_train::Scores>, sinew_train::PolicyError> {
        let mut segments = wave.iter().flat_map(|batch| batch.layout.segments());
        assert!(segments.all(|segment| segment.parent.is_none()));
        self.0.forward(wave, want)
    }

    fn backward(
        &mut self,
        wave: &[&sinew_train::pack::MicroBatch],
        grads: &[sinew_train::ScoreGrads],
    ) -> Result<(), sinew_train::PolicyError> {
        self.0.backward(wave, grads)
    }

    fn zero_gradients(&mut self) -> Result<(), sinew_train::PolicyError> {
        self.0.zero_gradients()
    }

    fn apply(
        &mut self,
        update: &Update,
    ) -> Result<sinew_train::optim::Outcome, sinew_train::PolicyError> {
        self.0.apply(update)
    }

    fn save(
        &mut self,
        draft: &mut sinew_train::checkpoint::Draft<'_>,
    ) -> Result<Vec<String>, sinew_train::checkpoint::CheckpointError> {
        self.0.save(draft)
    }

    fn load(
        &mut self,
        loaded: &sinew_train::checkpoint::LoadedCheckpoint,
        weights: &[String],
        updates: u64,
    ) -> Result<(), sinew_train::checkpoint::CheckpointError> {
        self.0.load(loaded, weights, updates)
    }

    fn weights(
        &mut self,
        version: sinew_types::PolicyVersion,
    ) -> Result<std::sync::Arc<dyn TensorSource>, sinew_train::PolicyError> {
        self.0.weights(version)
    }
}

#[test]
fn a_policy_that_shares_no_prefixes_gets_the_same_gradients() {
    for case in &cases() {
        let loss = Loss::parse(&case.loss).unwrap();
        let mut policy = Flat(llama());
        let output = forward_backward(&mut policy, &case.data, &loss, true, &LIMITS).unwrap();
        assert_outputs(case, &output);
        assert_gradients(case, &gradients(&mut policy.0));
    }
}

#[test]
fn an_adapter_at_its_start_scores_as_its_base_and_gets_gradients() {
    let config = LoraConfig {
        rank: 4,
        alpha: 8.0,
        targets: vec![Projection::Q, Projection::Down],
    };
    let params = Arc::new(params());
    let lora = Lora::random(&config, params.config(), 3).unwrap();
    let keep = Keep::LayerInputs;
    let mut policy = ModelPolicy::adapters(params, lora, "llama", 64, keep, device()).unwrap();
    policy.zero_gradients().unwrap();
    let cases = cases();
    let case = &cases[0];
    let loss = Loss::parse(&case.loss).unwrap();
    let output = forward_backward(&mut policy, &case.data, &loss, true, &LIMITS).unwrap();
    assert_outputs(case, &output);
    let found = gradients(&mut policy);
    assert!(found.keys().all(|name| name.contains("lora_")));
    assert!(found.values().any(|values| norm(values) > 0.0));
}

#[test]
fn requests_that_do_not_fit_are_refused_before_anything_is_computed() {
    let cases = cases();
    let case = &cases[0];
    let loss = Loss::parse(&case.loss).unwrap();
    let mut policy = llama();
    let mut refused = |data: &[Datum], limits: &BatchLimits| {
        let error = forward_backward(&mut policy, data, &loss, true, limits).unwrap_err();
        assert_eq!(error.category(), Category::User, "{error}");
        error
    };
    let error = refused(&[], &LIMITS);
    assert_eq!(error.to_string(), "data is [], allowed: at least one datum");
    let short = BatchLimits {
        context: 8,
        ..LIMITS
    };
    let error = refused(&case.data, &short);
    assert!(
        matches!(
            &error,
            TinkerError::Limit {
                value: 9,
                limit: 8,
                ..
            }
        ),
        "{error}"
    );
    let narrow = BatchLimits {
        micro_batch_tokens: 10,
        ..LIMITS
    };
    let error = refused(&case.data, &narrow).to_string();
    assert!(
        error.starts_with("the length of data[1].model_input is 11"),
        "{error}"
    );
    let mut data = case.data.clone();
    data[2].tokens[3] = 97;
    let error = refused(&data, &LIMITS).to_string();
    assert!(error.starts_with("data[2].model_input[3] is 97"), "{error}");
    data[2].tokens.clear();
    let error = refused(&data, &LIMITS).to_string();
    assert_eq!(
        error,
        "data[2].model_input is empty, allowed: at least one token"
    );
    assert!(
        gradients(&mut policy).values().flatten().all(|&g| g == 0.0),
        "no gradient was added"
    );
}
