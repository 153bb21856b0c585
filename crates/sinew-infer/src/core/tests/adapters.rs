//! Adapters side by side: mixed, isolated, replaced, dropped.

use super::*;

fn name(text: &str) -> AdapterName {
    AdapterName::new(text).unwrap()
}

fn load(core: &mut ModelCore<HashForward>, text: &str, version: u64) {
    let adapter = HashWeights::adapter(version as f32);
    core.load_adapter(&name(text), PolicyVersion(version), &adapter)
        .unwrap();
}

fn with(adapter: Option<&str>, request: GenerateRequest) -> GenerateRequest {
    GenerateRequest {
        adapter: adapter.map(name),
        ..request
    }
}

/// The answer of a request whose adapter had this number, on the engine's first weights.
fn check_adapted(request: &GenerateRequest, answer: &Answer) {
    check_answer_of(request, answer, |version| numbers(request, version, 0));
}

const PROMPT: [TokenId; 9] = [1, 2, 3, 4, 5, 6, 1, 2, 3];

#[test]
fn a_batch_mixes_adapters_and_each_row_has_its_own() {
    let mixed = |ids: &[u64]| {
        let mut core = core(64, config(8, 64));
        load(&mut core, "a", 11);
        load(&mut core, "b", 22);
        let adapters = [None, Some("a"), Some("b"), Some("a"), None, Some("b")];
        let requests = ids.iter().map(|&id| {
            let adapter = adapters[id as usize];
            with(adapter, request(id, &PROMPT, 6))
        });
        let requests: Vec<_> = requests.collect();
        let answers = run(&mut core, &requests);
        for r in &requests {
            check_adapted(r, &answers[&r.id.0]);
        }
        (answers, core.status())
    };
    let (together, status) = mixed(&[0, 1, 2, 3, 4, 5]);
    // Each prompt is computed once for each adapter.
    assert_eq!(status.prefill_tokens, 3 * 9);
    for id in 0..6 {
        let (alone, _) = mixed(&[id]);
        assert_eq!(alone[&id].tokens, together[&id].tokens);
        assert_eq!(alone[&id].logprobs, together[&id].logprobs);
        let version = [0, 11, 22, 11, 0, 22][id as usize];
        assert_eq!(together[&id].versions, [version; 6]);
    }
}

#[test]
fn the_cache_has_prefixes_of_the_same_adapter_only() {
    let mut core = core(64, config(8, 64));
    load(&mut core, "a", 1);
    load(&mut core, "b", 2);
    let cached = |core: &mut ModelCore<HashForward>, id, adapter| {
        let r = with(adapter, request(id, &PROMPT, 2));
        let answers = run(core, std::slice::from_ref(&r));
        check_adapted(&r, &answers[&id]);
        answers[&id].ends[0].clone().unwrap().1
    };
    assert_eq!(cached(&mut core, 1, Some("a")), 0);
    assert_eq!(cached(&mut core, 2, Some("b")), 0);
    assert_eq!(cached(&mut core, 3, None), 0);
    for (id, adapter) in [(4, Some("a")), (5, Some("b")), (6, None)] {
        assert_eq!(cached(&mut core, id, adapter), 8);
    }
    // A replaced adapter has nothing; the others keep what they have.
    load(&mut core, "a", 3);
    core.scheduler.check();
    assert_eq!(cached(&mut core, 7, Some("a")), 0);
    assert_eq!(cached(&mut core, 8, Some("b")), 8);
    assert_eq!(cached(&mut core, 9, None), 8);
    // A name that is loaded again does not find what was stored before.
    core.unload_adapter(&name("a"), &mut Vec::new());
    core.scheduler.check();
    load(&mut core, "a", 3);
    assert_eq!(cached(&mut core, 10, Some("a")), 0);
    let status = core.status();
    assert_eq!(status.kv_tokens_free, status.kv_tokens_total);
}

#[test]
fn a_replaced_adapter_stamps_later_tokens_of_its_own_requests() {
    for swap in [SwapPolicy::Recompute, SwapPolicy::Keep] {
        let config = SchedulerConfig {
            swap,
            ..config(4, 32)
        };
        let mut core = core(64, config);
        load(&mut core, "a", 1);
        load(&mut core, "b", 2);
        let requests = [
            with(Some("a"), request(1, &PROMPT, 6)),
            with(Some("b"), request(2, &PROMPT, 6)),
            request(3, &PROMPT, 6),
        ];
        for r in &requests {
            core.submit(r.clone(), None).unwrap();
        }
        let mut answers = BTreeMap::new();
        for _ in 0..3 {
            let mut events = Vec::new();
            core.step(&mut events);
            collect(&mut answers, events);
        }
        let computed = core.status().prefill_tokens;
        load(&mut core, "a", 9);
        core.scheduler.check();
        for (id, rest) in drain(&mut core) {
            let answer = answers.get_mut(&id).unwrap();
            answer.tokens.extend(rest.tokens);
            answer.versions.extend(rest.versions);
            answer.logprobs.extend(rest.logprobs);
            answer.ends.extend(rest.ends);
        }
        assert_eq!(answers[&1].versions, [1, 1, 1, 9, 9, 9]);
        assert_eq!(answers[&2].versions, [2; 6]);
        assert_eq!(answers[&3].versions, [0; 6]);
        check_adapted(&requests[1], &answers[&2]);
        check_adapted(&requests[2], &answers[&3]);
        let again = core.status().prefill_tokens - computed;
        if swap == SwapPolicy::Recompute {
            check_adapted(&requests[0], &answers[&1]);
            assert_eq!(again, 12, "prompt and three tokens of one request");
        } else {
            assert_eq!(again, 0);
        }
    }
}

#[test]
fn new_weights_reach_requests_with_adapters_and_their_versions_stay() {
    let mut core = core(64, config(4, 32));
    load(&mut core, "a", 1);
    let r = with(Some("a"), request(1, &PROMPT, 3));
    run(&mut core, std::slice::from_ref(&r));
    core.load_weights(PolicyVersion(6), &HashWeights([6.0]))
        .unwrap();
    core.scheduler.check();
    let r = with(Some("a"), request(2, &PROMPT, 3));
    let answers = run(&mut core, std::slice::from_ref(&r));
    assert_eq!(answers[&2].versions, [1; 3]);
    check_answer_of(&r, &answers[&2], |version| {
        vec![HashForward::adapted(6, version)]
    });
    assert_eq!(answers[&2].ends[0], Ok((FinishReason::Length, 0)));
}

#[test]
fn unknown_and_dropped_adapters_fail_their_requests_only() {
    let mut core = core(64, config(1, 32));
    let unknown = EngineError::UnknownAdapter { name: name("a") };
    let early = core.submit(with(Some("a"), request(9, &PROMPT, 3)), None);
    assert_eq!(early, Err(unknown.clone()));
    load(&mut core, "a", 1);
    load(&mut core, "b", 2);
    // One runs, the others wait.
    for (id, adapter) in [(1, Some("a")), (2, Some("a")), (3, Some("b")), (4, None)] {
        core.submit(with(adapter, request(id, &PROMPT, 4)), None)
            .unwrap();
    }
    let mut events = Vec::new();
    core.step(&mut events);
    core.unload_adapter(&name("a"), &mut events);
    core.unload_adapter(&name("a"), &mut events);
    core.unload_adapter(&name("none"), &mut events);
    core.scheduler.check();
    let mut answers = BTreeMap::new();
    collect(&mut answers, events);
    assert_eq!(answers[&1].tokens.len(), 1);
    for id in [1, 2] {
        assert_eq!(answers[&id].ends, [Err(unknown.clone())]);
    }
    let rest = drain(&mut core);
    assert_eq!(rest.len(), 2);
    check_adapted(&with(Some("b"), request(3, &PROMPT, 4)), &rest[&3]);
    check_adapted(&request(4, &PROMPT, 4), &rest[&4]);
}

#[test]
fn the_bound_on_adapters_is_named_and_replacing_is_not_loading_more() {
    let config = SchedulerConfig {
        max_adapters: 2,
        ..config(4, 32)
    };
    let mut core = core(64, config);
    load(&mut core, "a", 1);
    load(&mut core, "b", 2);
    load(&mut core, "b", 3);
    let adapter = HashWeights::adapter(4.0);
    let refused = core.load_adapter(&name("c"), PolicyVersion(4), &adapter);
    let refused = refused.unwrap_err().to_string();
    assert!(refused.contains("max_adapters = 2"), "{refused}");
    core.unload_adapter(&name("a"), &mut Vec::new());
    load(&mut core, "c", 4);
    let r = with(Some("c"), request(1, &PROMPT, 3));
    let answers = run(&mut core, std::slice::from_ref(&r));
    check_adapted(&r, &answers[&1]);
}

#[test]
fn a_refused_adapter_leaves_the_old_one() {
    let mut core = core(64, config(4, 32));
    load(&mut core, "a", 1);
    let empty = Adapter {
        alpha: 1.0,
        tensors: std::sync::Arc::new(TensorList::default()),
    };
    let refused = core.load_adapter(&name("a"), PolicyVersion(2), &empty);
    assert!(
        matches!(&refused, Err(EngineError::Weights(why)) if why.contains("adapter a")),
        "{refused:?}"
    );
    let r = with(Some("a"), request(1, &PROMPT, 3));
    let answers = run(&mut core, std::slice::from_ref(&r));
    assert_eq!(answers[&1].versions, [1; 3]);
    check_adapted(&r, &answers[&1]);
}
