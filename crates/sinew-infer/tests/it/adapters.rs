//! Adapters and log-probabilities of prompts on a tiny model with random weights.

use crate::model::{device, engine, groups, run, scheduler, tiny_params};
use crate::{channel, collect_all, ids};
use sinew_infer::EmbeddedEngine;
use sinew_model::{
    Activations, Keep, Lora, LoraConfig, Params, Projection, TrainModel, Weights, merge_lora,
};
use sinew_tensor::attention::TreeLayout;
use sinew_types::{
    Adapter, AdapterName, Engine, FinishReason, GenerateRequest, PolicyVersion, PromptLogprob,
    PromptLogprobs, SampledToken, TokenId, finalize64,
};
use std::sync::Arc;

/// Random adapters of all projections, large enough to change every logit.
pub(crate) fn adapter(params: &Params, seed: u64) -> Adapter {
    let lora = lora(params, &Projection::ALL, seed);
    Adapter {
        alpha: lora.config().alpha,
        tensors: Arc::new(lora),
    }
}

fn lora(params: &Params, targets: &[Projection], seed: u64) -> Lora {
    let config = LoraConfig {
        rank: 4,
        alpha: 8.0,
        targets: targets.to_vec(),
    };
    let mut lora = Lora::random(&config, params.config(), seed).unwrap();
    let mut state = seed;
    for (_, values) in lora.tensors_mut() {
        for value in values {
            state = finalize64(state.wrapping_add(1));
            *value = (state >> 40) as f32 / (1u64 << 24) as f32 * 0.2 - 0.1;
        }
    }
    lora
}

fn name(text: &str) -> AdapterName {
    AdapterName::new(text).unwrap()
}

/// An engine with the adapters `a` and `b`, as versions 1 and 2.
fn adapted(params: &Params, kv_tokens: usize, max_num_seqs: usize) -> EmbeddedEngine {
    let engine = engine(params, kv_tokens, scheduler(max_num_seqs, 64));
    for (text, seed) in [("a", 1), ("b", 2)] {
        let adapter = adapter(params, seed);
        engine
            .load_adapter(&name(text), PolicyVersion(seed), adapter)
            .unwrap();
    }
    engine
}

/// Requests of which every third one names `a`, every third one `b`.
fn mixed() -> Vec<GenerateRequest> {
    let named = groups()
        .into_iter()
        .zip([None, Some("a"), Some("b")].into_iter().cycle());
    let requests = named.map(|(request, adapter)| GenerateRequest {
        adapter: adapter.map(name),
        ..request
    });
    requests.collect()
}

/// Runs requests, and returns the log-probabilities of their prompts with their tokens.
fn run_all(
    engine: &EmbeddedEngine,
    requests: &[GenerateRequest],
) -> Vec<(Vec<PromptLogprob>, Vec<SampledToken>)> {
    let pending = requests.iter().map(|r| {
        let (sink, events) = channel();
        engine.submit(r.clone(), sink).unwrap();
        events
    });
    let pending: Vec<_> = pending.collect();
    let answers = pending.iter().map(|events| {
        let (prompt, tokens, end) = collect_all(events);
        assert_eq!(end, Ok(FinishReason::Length));
        (prompt.unwrap(), tokens)
    });
    answers.collect()
}

fn scored(request: &GenerateRequest, asked: PromptLogprobs) -> GenerateRequest {
    GenerateRequest {
        prompt_logprobs: Some(asked),
        ..request.clone()
    }
}

/// Tokens and log-probabilities, bit by bit: a batch of different adapters, a batch of one at a time, little
/// memory.
#[test]
fn rows_of_different_adapters_do_not_disturb_each_other() {
    let params = tiny_params(1);
    let requests = mixed();
    let expected = run(&adapted(&params, 8192, 64), &requests);
    for (request, answer) in requests.iter().zip(&expected) {
        let version = match request.adapter.as_ref().map(AdapterName::as_str) {
            Some("a") => 1,
            Some("b") => 2,
            _ => 0,
        };
        assert!(answer.iter().all(|t| t.version == PolicyVersion(version)));
    }
    let alone = adapted(&params, 8192, 1);
    for (request, expected) in requests.iter().zip(&expected) {
        assert_eq!(&run(&alone, std::slice::from_ref(request))[0], expected);
    }
    let tight = adapted(&params, 192, 6);
    assert_eq!(run(&tight, &requests), expected);
    assert!(tight.status().preemptions > 0);
    // Without adapters the engine is the one that has none.
    let plain: Vec<_> = requests.iter().zip(&expected).step_by(3).collect();
    let none = engine(&params, 8192, scheduler(64, 64));
    for (request, expected) in plain {
        assert_eq!(&run(&none, std::slice::from_ref(request))[0], expected);
    }
}

/// Low-rank products next to the packed weights give what merged weights give, but for rounding.
#[test]
fn an_adapter_computes_what_merged_weights_compute() {
    let params = tiny_params(2);
    let targets = [
        Projection::Q,
        Projection::V,
        Projection::O,
        Projection::Down,
    ];
    let lora = lora(&params, &targets, 5);
    let mut merged = params.clone();
    merge_lora(&device(), &params, &lora, &mut merged).unwrap();
    let side = engine(&params, 4096, scheduler(16, 64));
    let adapter = Adapter {
        alpha: lora.config().alpha,
        tensors: Arc::new(lora),
    };
    side.load_adapter(&name("x"), PolicyVersion(1), adapter)
        .unwrap();
    let merged = engine(&merged, 4096, scheduler(16, 64));
    let plain = engine(&params, 4096, scheduler(16, 64));
    let (mut widest, mut moved) = (0.0f32, 0.0f32);
    for request in groups().iter().step_by(4) {
        let request = scored(request, PromptLogprobs::default());
        let named = GenerateRequest {
            adapter: Some(name("x")),
            ..request.clone()
        };
        let of = |engine: &EmbeddedEngine, request: &GenerateRequest| {
            run_all(engine, std::slice::from_ref(request)).remove(0).0
        };
        let (a, b) = (of(&side, &named), of(&merged, &request));
        for ((a, b), c) in a.iter().zip(&b).zip(&of(&plain, &request)) {
            widest = widest.max((a.logprob - b.logprob).abs());
            moved = moved.max((a.logprob - c.logprob).abs());
        }
    }
    assert!(widest < 1e-3 && moved > 0.05, "{widest} of {moved}");
}

/// The log-probabilities of a prompt are those that training computes for it, bit for bit.
#[test]
fn prompts_are_scored_as_training_scores_them() {
    let params = tiny_params(3);
    let device = device();
    let prompt: Vec<TokenId> = (0..50).map(|i| (i * 11 + i / 7) % 97).collect();
    let targets: Vec<Vec<TokenId>> = (1..50).map(|i| (0..i % 4).collect()).collect();
    let mut items: Vec<(u32, TokenId)> = Vec::new();
    for (row, ids) in (0..).zip(&targets) {
        items.push((row, prompt[row as usize + 1]));
        items.extend(ids.iter().map(|&id| (row, id)));
    }
    let model = TrainModel::new(params.config(), 256).unwrap();
    let layout = TreeLayout::sequences(&[50]).unwrap();
    let (weights, mut acts) = (Weights::full(&params), Activations::new(Keep::Nothing));
    model
        .forward(&device, weights, &prompt, &layout, &mut acts)
        .unwrap();
    let at = vec![1.0; items.len()];
    let trained = model.logprobs(&device, weights, &mut acts, &items, &at, None, false);
    let trained = trained.unwrap();
    let asked = PromptLogprobs {
        targets,
        top: 2,
        last: None,
    };
    let mut request = crate::request(1, &prompt, 3);
    // It decides about the sampled tokens only.
    request.sampling.temperature = 0.3;
    for budget in [7, 64] {
        let engine = engine(&params, 4096, scheduler(4, budget));
        let (found, tokens) = run_all(&engine, &[scored(&request, asked.clone())]).remove(0);
        let flat = found.iter().flat_map(|place| {
            [place.logprob]
                .into_iter()
                .chain(place.targets.iter().copied())
        });
        assert_eq!(flat.collect::<Vec<f32>>(), trained.logprob);
        assert!(found.iter().all(|place| place.top.len() == 2));
        // The tokens are those of a request that does not ask for it.
        assert_eq!(run(&engine, std::slice::from_ref(&request))[0], tokens);
        // Everything is cached now; only the last rows are computed again.
        let last = PromptLogprobs {
            last: Some(3),
            ..asked.clone()
        };
        let before = engine.status().prefill_tokens;
        let (tail, _) = run_all(&engine, &[scored(&request, last)]).remove(0);
        assert_eq!(tail, found[46..]);
        assert_eq!(engine.status().prefill_tokens - before, 4);
    }
}

/// A token that was sampled at temperature 1 has the same log-probability as a part of the next prompt, with
/// every adapter, while requests of other adapters run.
#[test]
fn sampled_tokens_are_scored_as_they_were_sampled() {
    let params = tiny_params(4);
    let mut requests = mixed();
    requests
        .iter_mut()
        .for_each(|r| r.sampling.temperature = 1.0);
    let engine = adapted(&params, 8192, 64);
    let answers = run(&engine, &requests);
    let scoring = requests.iter().zip(&answers).map(|(r, answer)| {
        let mut next = scored(
            r,
            PromptLogprobs {
                last: Some(answer.len() as u32),
                ..PromptLogprobs::default()
            },
        );
        next.prompt = Arc::new([&r.prompt[..], &ids(answer)[..]].concat());
        next.sampling.max_tokens = 1;
        next
    });
    let scoring: Vec<_> = scoring.collect();
    for (answer, (prompt, _)) in answers.iter().zip(run_all(&engine, &scoring)) {
        let scored: Vec<f32> = prompt.iter().map(|p| p.logprob).collect();
        let sampled: Vec<f32> = answer.iter().map(|t| t.logprob).collect();
        assert_eq!(scored, sampled);
    }
}
