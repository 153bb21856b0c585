//! The whole core against a naive engine that computes every token from nothing.

mod adapters;
mod prompts;

use super::*;
use crate::draw::Draw;
use crate::sampler;
use crate::scheduler::SwapPolicy;
use crate::testing::{HashForward, HashWeights};
use proptest::prelude::*;
use sinew_types::{
    FinishReason, PromptLogprob, PromptLogprobs, SamplingParams, TensorList, TokenId,
};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::Ordering;

const VOCAB: usize = 7;

fn limits(blocks: usize) -> ForwardLimits {
    ForwardLimits {
        vocab: VOCAB,
        context: 40,
        block_tokens: 4,
        blocks,
    }
}

fn config(max_num_seqs: usize, max_batched_tokens: usize) -> SchedulerConfig {
    SchedulerConfig {
        max_num_seqs,
        max_batched_tokens,
        ..SchedulerConfig::default()
    }
}

fn core(blocks: usize, config: SchedulerConfig) -> ModelCore<HashForward> {
    let forward = HashForward::new(limits(blocks));
    ModelCore::new(forward, config, None, PolicyVersion(0)).unwrap()
}

fn request(id: u64, prompt: &[TokenId], max_tokens: u32) -> GenerateRequest {
    let sampling = SamplingParams {
        max_tokens,
        seed: id,
        ..SamplingParams::default()
    };
    GenerateRequest::new(RequestId(id), prompt.to_vec(), sampling)
}

/// Results of a request.
#[derive(Debug, Default)]
struct Answer {
    prompt: Option<Vec<PromptLogprob>>,
    tokens: Vec<TokenId>,
    versions: Vec<u64>,
    logprobs: Vec<f32>,
    ends: Vec<Result<(FinishReason, u32), EngineError>>,
}

fn collect(answers: &mut BTreeMap<u64, Answer>, events: Vec<EngineEvent>) {
    for event in events {
        let id = crate::engine_thread::request_of(&event).0;
        let answer = answers.entry(id).or_default();
        assert!(answer.ends.is_empty(), "{event:?} after the end");
        match event {
            EngineEvent::Prompt { logprobs, .. } => {
                assert!(answer.tokens.is_empty(), "a prompt after the first token");
                let before = answer.prompt.replace(logprobs);
                assert!(before.is_none(), "a prompt is reported twice");
            }
            EngineEvent::Tokens { tokens, .. } => {
                for t in tokens {
                    answer.tokens.push(t.id);
                    answer.versions.push(t.version.0);
                    answer.logprobs.push(t.logprob);
                }
            }
            EngineEvent::Finished {
                reason,
                cached_prompt_tokens,
                ..
            } => answer.ends.push(Ok((reason, cached_prompt_tokens))),
            EngineEvent::Failed { error, .. } => answer.ends.push(Err(error)),
        }
    }
}

fn run(core: &mut ModelCore<HashForward>, requests: &[GenerateRequest]) -> BTreeMap<u64, Answer> {
    for r in requests {
        core.submit(r.clone(), None).unwrap();
    }
    drain(core)
}

fn drain(core: &mut ModelCore<HashForward>) -> BTreeMap<u64, Answer> {
    let mut answers = BTreeMap::new();
    let mut passes = 0;
    while core.has_work() {
        let mut events = Vec::new();
        core.step(&mut events);
        core.scheduler.check();
        collect(&mut answers, events);
        passes += 1;
        assert!(passes < 100_000, "the engine makes no progress");
    }
    answers
}

/// The next token, from nothing.
fn naive_next(request: &GenerateRequest, sampled: &[TokenId], weights: u64) -> Draw {
    let tokens = [&request.prompt[..], sampled].concat();
    let logits = HashForward::logits_after(VOCAB, weights, &tokens);
    sampler::draw(&logits, &request.sampling, tokens.len()).unwrap()
}

/// Every token is the one that its version of the weights gives after those before it.
fn check_answer(request: &GenerateRequest, answer: &Answer) {
    check_answer_of(request, answer, |version| vec![version]);
}

/// [`check_answer`] where a version can stand for several weights, which follow one another.
fn check_answer_of(
    request: &GenerateRequest,
    answer: &Answer,
    weights_of: impl Fn(u64) -> Vec<u64>,
) {
    let (mut version, mut from) = (u64::MAX, 0);
    for (i, &token) in answer.tokens.iter().enumerate() {
        if answer.versions[i] != version {
            (version, from) = (answer.versions[i], 0);
        }
        let weights = weights_of(version);
        let drawn = |&weights: &u64| {
            let draw = naive_next(request, &answer.tokens[..i], weights);
            (draw.id, draw.logprob) == (token, answer.logprobs[i])
        };
        let found = weights[from..].iter().position(drawn);
        from += found.unwrap_or_else(|| panic!("token {i} of {request:?}: {answer:?}"));
        if i == 0 {
            let expected = prompts::expected(request, weights[from]);
            assert_eq!(answer.prompt, expected, "{request:?}");
        }
    }
    if answer.tokens.is_empty() {
        assert_eq!(answer.prompt, None, "{request:?}");
    }
    assert_eq!(answer.ends.len(), 1, "{request:?}: {answer:?}");
    let n = answer.tokens.len();
    match &answer.ends[0] {
        Ok((FinishReason::Length, _)) => assert_eq!(n, request.sampling.max_tokens as usize),
        Ok((FinishReason::StopId { id }, _)) => assert_eq!(answer.tokens.last(), Some(id)),
        Ok((FinishReason::ContextFull, _)) => assert!(n < request.sampling.max_tokens as usize),
        Ok((FinishReason::Aborted, _)) => {}
        Err(EngineError::UnknownAdapter { name }) => {
            assert_eq!(request.adapter.as_ref(), Some(name))
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_group_computes_its_prompt_once_and_copies_only_the_tail() {
    let prompt: Vec<TokenId> = (0..10).map(|i| i % 5).collect();
    let group: Vec<_> = (0..6).map(|i| request(i, &prompt, 5)).collect();
    // The budget cuts the prompt in pieces.
    for budget in [6, 7, 64] {
        let mut core = core(64, config(8, budget));
        let answers = run(&mut core, &group);
        for (r, a) in group.iter().zip(answers.values()) {
            check_answer(r, a);
        }
        let status = core.status();
        assert_eq!(status.prefill_tokens, 10, "budget {budget}");
        assert_eq!(status.cached_prompt_tokens, 50);
        assert_eq!(status.sampled_tokens, 30);
        assert_eq!(status.kv_tokens_free, status.kv_tokens_total);
        // The last token of each is sampled, never computed.
        let computed = core.forward.computed().load(Ordering::Relaxed);
        assert_eq!(computed, 10 + 6 * 4);
    }
}

#[test]
fn the_next_turn_finds_all_of_the_last_one() {
    let mut core = core(32, config(4, 64));
    let first = request(1, &[1, 2, 3, 4, 5, 6], 5);
    let answers = run(&mut core, std::slice::from_ref(&first));
    let mut prompt = first.prompt.to_vec();
    prompt.extend(&answers[&1].tokens);
    prompt.extend([0, 6, 0]);
    let second = request(2, &prompt, 4);
    let answers = run(&mut core, std::slice::from_ref(&second));
    check_answer(&second, &answers[&2]);
    // 6 + 5 tokens were known, the last of them never computed.
    assert_eq!(answers[&2].ends[0], Ok((FinishReason::Length, 10)));
    assert_eq!(core.status().prefill_tokens, 6 + 4);
}

#[test]
fn a_branch_inside_a_block_copies_what_it_shares() {
    let mut core = core(32, config(4, 64));
    let trunk = request(1, &[1, 2, 3, 4, 5, 6, 1, 2], 1);
    run(&mut core, std::slice::from_ref(&trunk));
    let branch = request(2, &[1, 2, 3, 4, 5, 6, 6, 6], 3);
    let again = request(3, &trunk.prompt, 3);
    let answers = run(&mut core, &[branch.clone(), again.clone()]);
    check_answer(&branch, &answers[&2]);
    check_answer(&again, &answers[&3]);
    assert_eq!(answers[&2].ends[0], Ok((FinishReason::Length, 6)));
    assert_eq!(answers[&3].ends[0], Ok((FinishReason::Length, 7)));
}

#[test]
fn preemption_under_tiny_memory_loses_nothing() {
    // 10 blocks of 4: three sequences of up to 24 tokens cannot stay together.
    let mut core = core(10, config(4, 16));
    let requests: Vec<_> = (0..5).map(|i| request(i, &[i as u32, 1, 2], 20)).collect();
    let answers = run(&mut core, &requests);
    for (r, a) in requests.iter().zip(answers.values()) {
        check_answer(r, a);
        assert_eq!(a.tokens.len(), 20);
    }
    assert!(core.status().preemptions > 0);
}

#[test]
fn larger_priority_runs_first() {
    let mut core = core(64, config(1, 16));
    let mut late = request(2, &[2], 2);
    late.priority = 5;
    core.submit(request(1, &[1], 2), None).unwrap();
    core.submit(late, None).unwrap();
    let mut order = Vec::new();
    while core.has_work() {
        let mut events = Vec::new();
        core.step(&mut events);
        order.extend(events.iter().filter_map(crate::engine_thread::last_of));
    }
    assert_eq!(order, [RequestId(2), RequestId(1)]);
}

#[test]
fn swapped_weights_stamp_later_tokens_and_hide_old_prefixes() {
    for swap in [SwapPolicy::Recompute, SwapPolicy::Keep] {
        let mut core = core(
            32,
            SchedulerConfig {
                swap,
                ..config(4, 16)
            },
        );
        let r = request(1, &[1, 2, 3, 4, 5], 6);
        core.submit(r.clone(), None).unwrap();
        let mut answers = BTreeMap::new();
        for _ in 0..3 {
            let mut events = Vec::new();
            core.step(&mut events);
            collect(&mut answers, events);
        }
        core.load_weights(PolicyVersion(7), &HashWeights([7.0]))
            .unwrap();
        assert_eq!(core.status().version, PolicyVersion(7));
        // The same prompt again: nothing of version 0 may serve it.
        let again = request(2, &r.prompt, 3);
        core.submit(again.clone(), None).unwrap();
        let rest = drain(&mut core);
        let mut answer = answers.remove(&1).unwrap();
        answer.tokens.extend(&rest[&1].tokens);
        answer.versions.extend(&rest[&1].versions);
        answer.logprobs.extend(&rest[&1].logprobs);
        answer.ends = rest[&1].ends.clone();
        assert_eq!(answer.versions, [0, 0, 0, 7, 7, 7]);
        if swap == SwapPolicy::Recompute {
            check_answer(&r, &answer);
        } else {
            // Nothing was computed twice for the running one.
            assert_eq!(core.status().prefill_tokens, 5 + 5);
        }
        check_answer(&again, &rest[&2]);
        // The cache has nothing of version 0 after the end.
        let third = request(3, &r.prompt, 1);
        let cached = run(&mut core, std::slice::from_ref(&third))[&3].ends[0].clone();
        assert_eq!(cached, Ok((FinishReason::Length, 4)));
    }
}

#[test]
fn refused_weights_change_nothing() {
    let mut core = core(32, config(4, 16));
    let r = request(1, &[1, 2, 3], 6);
    core.submit(r.clone(), None).unwrap();
    core.step(&mut Vec::new());
    let refused = core.load_weights(PolicyVersion(1), &TensorList::default());
    assert!(
        matches!(refused, Err(EngineError::Weights(_))),
        "{refused:?}"
    );
    assert_eq!(core.status().version, PolicyVersion(0));
    let answers = drain(&mut core);
    assert!(answers[&1].versions.iter().all(|&v| v == 0));
}

#[test]
fn a_failed_pass_fails_its_requests_and_no_other() {
    let forward = HashForward::new(limits(32)).failing_at(2);
    let mut core = ModelCore::new(forward, config(4, 16), None, PolicyVersion(0)).unwrap();
    // The failing pass would fill a block that holds three tokens already.
    core.submit(request(1, &[1, 2], 9), None).unwrap();
    core.submit(request(2, &[1, 2], 9), None).unwrap();
    let mut answers = BTreeMap::new();
    for _ in 0..3 {
        let mut events = Vec::new();
        core.step(&mut events);
        core.scheduler.check();
        collect(&mut answers, events);
    }
    let why = EngineError::Failed("pass 2 was to fail".to_owned());
    assert!(answers.values().all(|a| a.ends == [Err(why.clone())]));
    let r = request(3, &[1, 2, 3, 4], 3);
    let answers = run(&mut core, std::slice::from_ref(&r));
    check_answer(&r, &answers[&3]);
}

#[test]
fn guesses_save_passes_and_change_no_token() {
    let mut first = request(1, &[1, 2, 3], 30);
    first.sampling.temperature = 0.0;
    let mut again = first.clone();
    again.id = RequestId(2);
    let passes = |speculative_tokens: usize| {
        let config = SchedulerConfig {
            speculative_tokens,
            ..config(4, 64)
        };
        let mut core = core(32, config);
        run(&mut core, std::slice::from_ref(&first));
        // The same text was seen before.
        core.submit(again.clone(), None).unwrap();
        let mut passes = 0;
        let mut answers = BTreeMap::new();
        while core.has_work() {
            let mut events = Vec::new();
            core.step(&mut events);
            core.scheduler.check();
            collect(&mut answers, events);
            passes += 1;
        }
        check_answer(&again, &answers[&2]);
        (passes, core.scheduler.counters.accepted)
    };
    assert_eq!(passes(0), (30, 0));
    let (with, accepted) = passes(8);
    assert!(
        with <= 9 && accepted >= 20,
        "{with} passes, {accepted} accepted"
    );
}

/// The joint distribution of two tokens, the first of which is drafted, is the softmax of the model.
/// Draft tokens come from siblings of the same prompt, as in a group.
#[test]
#[expect(clippy::needless_range_loop, reason = "tokens are numbers here")]
fn guessed_tokens_follow_the_distribution_of_the_model() {
    const ANSWERS: u64 = 4000;
    let prompt = [1, 2, 3, 4, 1, 2];
    let mut core = core(
        64,
        SchedulerConfig {
            speculative_tokens: 64,
            ..config(8, 64)
        },
    );
    let mut seen = [[0u32; VOCAB]; VOCAB];
    for group in 0..ANSWERS / 8 {
        let group: Vec<_> = (0..8)
            .map(|i| {
                let mut r = request(group * 8 + i, &prompt, 3);
                r.sampling.seed = 77 + group * 8 + i;
                r
            })
            .collect();
        for (r, answer) in group.iter().zip(run(&mut core, &group).values()) {
            check_answer(r, answer);
            seen[answer.tokens[1] as usize][answer.tokens[2] as usize] += 1;
        }
    }
    let softmax = |logits: Vec<f32>| -> Vec<f64> {
        let mass: Vec<f64> = logits.iter().map(|&l| f64::from(l).exp()).collect();
        let sum: f64 = mass.iter().sum();
        mass.into_iter().map(|m| m / sum).collect()
    };
    let after = |more: &[TokenId]| {
        let tokens = [&prompt[..], more].concat();
        softmax(HashForward::logits_after(VOCAB, 0, &tokens))
    };
    let first = after(&[]);
    for b in 0..VOCAB {
        for c in 0..VOCAB {
            let share: f64 = (0..VOCAB)
                .map(|a| {
                    let (a, b) = (a as TokenId, b as TokenId);
                    first[a as usize] * after(&[a])[b as usize] * after(&[a, b])[c]
                })
                .sum();
            let n = ANSWERS as f64;
            let sd = (n * share * (1.0 - share)).sqrt();
            let off = (f64::from(seen[b][c]) - n * share).abs();
            assert!(off < 5.0 * sd, "tokens {b}, {c}: {off} off, deviation {sd}");
        }
    }
    let counters = core.scheduler.counters;
    assert!(
        counters.drafted > 100 && counters.accepted > 20,
        "{counters:?}"
    );
    assert!(counters.accepted < counters.drafted);
}

#[test]
fn limits_that_leave_no_room_are_named() {
    let forward = HashForward::new(limits(4));
    let refused = ModelCore::new(forward, config(0, 16), None, PolicyVersion(0)).err();
    assert!(refused.unwrap().to_string().contains("max_num_seqs"));
}

/// Something that happens to an engine.
#[derive(Clone, Debug)]
enum Op {
    Submit(GenerateRequest),
    Step(u8),
    /// Aborts one of the requests so far.
    Abort(u8),
    Swap,
    /// Loads or replaces one of the adapters.
    Load(AdapterName),
    Unload(AdapterName),
}

fn any_adapter() -> impl Strategy<Value = AdapterName> {
    prop_oneof![Just("a"), Just("b")].prop_map(|name| AdapterName::new(name).unwrap())
}

fn any_prompt_logprobs() -> impl Strategy<Value = PromptLogprobs> {
    (prop::option::of(1..9u32), 0..3u8).prop_map(|(last, top)| PromptLogprobs {
        last,
        top,
        targets: Vec::new(),
    })
}

fn any_request() -> impl Strategy<Value = GenerateRequest> {
    let prompt = prop::collection::vec(0..3u32, 1..24);
    let stops = prop::collection::vec(0..VOCAB as u32, 0..2);
    let numbers = (1..16u32, -1..2i32, any::<u8>());
    let adapter = prop::option::weighted(0.6, any_adapter());
    let scored = prop::option::weighted(0.3, any_prompt_logprobs());
    (prompt, stops, numbers, adapter, scored).prop_map(
        |(prompt, stop_ids, (max_tokens, priority, seed), adapter, prompt_logprobs)| {
            GenerateRequest {
                id: RequestId(0),
                prompt: prompt.into(),
                sampling: SamplingParams {
                    max_tokens,
                    stop_ids,
                    seed: u64::from(seed % 4),
                    temperature: f32::from(seed % 4) * 0.6,
                    ..SamplingParams::default()
                },
                priority,
                adapter,
                prompt_logprobs,
            }
        },
    )
}

fn any_op() -> impl Strategy<Value = Op> {
    prop_oneof![
        4 => any_request().prop_map(Op::Submit),
        4 => (1..6u8).prop_map(Op::Step),
        1 => any::<u8>().prop_map(Op::Abort),
        1 => Just(Op::Swap),
        3 => any_adapter().prop_map(Op::Load),
        1 => any_adapter().prop_map(Op::Unload),
    ]
}

/// Runs `ops`, checking every invariant after each. Versions of weights and adapters are the numbers that
/// they consist of; no two are equal. Returns the last number, too.
fn play(core: &mut ModelCore<HashForward>, ops: Vec<Op>) -> (Vec<(GenerateRequest, Answer)>, u64) {
    let mut requests = Vec::new();
    let mut answers = BTreeMap::new();
    let mut version = 0;
    let mut loaded = BTreeSet::new();
    for op in ops {
        let mut events = Vec::new();
        match op {
            Op::Submit(mut r) => {
                r.id = RequestId(requests.len() as u64);
                let known = r.adapter.iter().all(|name| loaded.contains(name));
                let submitted = core.submit(r.clone(), None);
                assert_eq!(submitted.is_ok(), known, "{submitted:?}");
                requests.extend(known.then_some(r));
            }
            Op::Load(name) => {
                version += 1;
                let adapter = HashWeights::adapter(version as f32);
                core.load_adapter(&name, PolicyVersion(version), &adapter)
                    .unwrap();
                loaded.insert(name);
            }
            Op::Unload(name) => {
                core.unload_adapter(&name, &mut events);
                loaded.remove(&name);
            }
            Op::Step(n) => (0..n).for_each(|_| core.step(&mut events)),
            Op::Abort(i) => core.abort(RequestId(u64::from(i) % 20), &mut events),
            Op::Swap => {
                version += 1;
                let weights = HashWeights([version as f32]);
                core.load_weights(PolicyVersion(version), &weights).unwrap();
            }
        }
        core.scheduler.check();
        collect(&mut answers, events);
    }
    for (id, rest) in drain(core) {
        let answer: &mut Answer = answers.entry(id).or_default();
        answer.prompt = answer.prompt.take().or(rest.prompt);
        answer.tokens.extend(rest.tokens);
        answer.versions.extend(rest.versions);
        answer.logprobs.extend(rest.logprobs);
        answer.ends.extend(rest.ends);
    }
    assert_eq!(answers.len(), requests.len(), "a request without an event");
    let answered = requests.into_iter().zip(answers.into_values());
    (answered.collect(), version)
}

/// Numbers that the weights of `version` can have for a request: under an adapter, each version of the
/// engine's own weights up to `last` makes others.
fn numbers(request: &GenerateRequest, version: u64, last: u64) -> Vec<u64> {
    match request.adapter {
        Some(_) => (0..=last)
            .map(|own| HashForward::adapted(own, version))
            .collect(),
        None => vec![version],
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn answers_are_those_of_a_naive_engine(
        ops in prop::collection::vec(any_op(), 1..40),
        blocks in 10usize..30,
        max_num_seqs in 1usize..6,
        max_batched_tokens in 1usize..30,
        speculative_tokens in prop_oneof![Just(0), 1usize..20],
        prompt_rows in 1usize..8,
    ) {
        let config = SchedulerConfig {
            speculative_tokens,
            ..config(max_num_seqs, max_batched_tokens)
        };
        let mut core = core(blocks, config);
        core.scheduler.prompt_rows = prompt_rows;
        let (answered, last) = play(&mut core, ops);
        for (request, answer) in answered {
            check_answer_of(&request, &answer, |version| numbers(&request, version, last));
        }
        let status = core.status();
        prop_assert_eq!(status.kv_tokens_free, status.kv_tokens_total);
    }

    #[test]
    fn kept_keys_and_values_leave_no_trace_behind(
        ops in prop::collection::vec(any_op(), 1..40),
        blocks in 10usize..30,
    ) {
        let swap = SwapPolicy::Keep;
        let mut core = core(blocks, SchedulerConfig { swap, ..config(4, 16) });
        for (_, answer) in play(&mut core, ops).0 {
            prop_assert_eq!(answer.ends.len(), 1);
            prop_assert!(answer.versions.is_sorted());
        }
        let status = core.status();
        prop_assert_eq!(status.kv_tokens_free, status.kv_tokens_total);
    }

    /// Each distinct prefix is computed once if there is enough memory. A request may add one token, to get
    /// logits for a prompt that was computed before.
    #[test]
    fn prompts_are_computed_once(
        requests in prop::collection::vec(any_request(), 1..12),
        max_batched_tokens in 12usize..40,
    ) {
        let mut core = core(600, config(12, max_batched_tokens));
        let mut prefixes = BTreeSet::new();
        for (i, mut r) in requests.iter().cloned().enumerate() {
            r = GenerateRequest {
                id: RequestId(i as u64),
                adapter: None,
                prompt_logprobs: None,
                ..r
            };
            for n in 1..=r.prompt.len() {
                prefixes.insert(r.prompt[..n].to_vec());
            }
            core.submit(r, None).unwrap();
        }
        drain(&mut core);
        let status = core.status();
        prop_assert_eq!(status.preemptions, 0);
        let bound = prefixes.len() + requests.len();
        prop_assert!(
            status.prefill_tokens as usize <= bound,
            "{} computed, {} distinct", status.prefill_tokens, prefixes.len()
        );
    }
}
