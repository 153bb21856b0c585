//! The fake engine, stepped and threaded.

use crate::{channel, collect, collect_all, ids, request};
use sinew_infer::testing::HashWeights;
use sinew_infer::{FakeConfig, FakeEngine, FakeModel, Fault};
use sinew_types::{
    AdapterName, Engine, EngineError, FinishReason, PolicyVersion, PromptLogprobs, RequestId,
};
use std::collections::HashMap;
use std::sync::Arc;

fn stepped(config: FakeConfig) -> FakeEngine {
    FakeEngine::stepped(config).unwrap()
}

#[test]
fn both_modes_give_the_same_tokens() {
    let engine = stepped(FakeConfig::default());
    let (sink, events) = channel();
    engine.submit(request(1, &[1, 2, 3], 20), sink).unwrap();
    while engine.step() {}
    let (a, end) = collect(&events);
    assert_eq!(end, Ok(FinishReason::Length));

    let engine = FakeEngine::threaded(FakeConfig::default(), Box::new(|| 0.0)).unwrap();
    let (sink, events) = channel();
    engine.submit(request(1, &[1, 2, 3], 20), sink).unwrap();
    let (b, _) = collect(&events);
    assert_eq!(a, b);
    let (sink, events) = channel();
    engine.submit(request(2, &[1, 2, 3], 20), sink).unwrap();
    assert_ne!(ids(&collect(&events).0), ids(&b), "another seed");
}

#[test]
fn logprobs_can_be_recomputed_and_sum_to_one() {
    let model = FakeModel {
        vocab: 50,
        seed: 3,
        end: Some((49, 8)),
    };
    for (temperature, at) in [(1.0, 1.0), (0.7, 0.7), (0.0, 1.0)] {
        let engine = stepped(FakeConfig {
            model,
            ..FakeConfig::default()
        });
        let mut r = request(1, &[1, 2], 200);
        r.sampling.temperature = temperature;
        r.sampling.stop_ids = vec![49];
        r.sampling.top_logprobs = 4;
        let (sink, events) = channel();
        engine.submit(r.clone(), sink).unwrap();
        while engine.step() {}
        let (tokens, end) = collect(&events);
        assert_eq!(end, Ok(FinishReason::StopId { id: 49 }));
        let mut prefix = r.prompt.to_vec();
        for token in &tokens {
            assert_eq!(model.logprob_at(&prefix, token.id, at), token.logprob);
            let sum: f32 = token.top.iter().map(|t| t.logprob.exp()).sum();
            assert!((sum - 1.0).abs() < 1e-5);
            prefix.push(token.id);
        }
    }
}

#[test]
fn scripts_decide_the_tokens_and_stops_still_apply() {
    let engine = stepped(FakeConfig {
        script: Some(Arc::new(|r| (r.prompt[0] == 7).then(|| vec![9, 8, 5, 4]))),
        ..FakeConfig::default()
    });
    let mut r = request(1, &[7], 20);
    r.sampling.stop_ids = vec![5];
    let (sink, events) = channel();
    engine.submit(r, sink).unwrap();
    while engine.step() {}
    let (tokens, end) = collect(&events);
    assert_eq!(ids(&tokens), [9, 8, 5]);
    assert_eq!(end, Ok(FinishReason::StopId { id: 5 }));
    assert!(tokens.iter().all(|t| t.logprob < -9.0));
}

#[test]
fn faults_strike_the_requests_they_are_set_for() {
    let broken = EngineError::Failed("a fault".to_owned());
    let faults = HashMap::from([
        (0, Fault::Refuse(broken.clone())),
        (
            1,
            Fault::FailAfter {
                tokens: 2,
                error: broken.clone(),
            },
        ),
        (2, Fault::HangAfter { tokens: 3 }),
    ]);
    let engine = stepped(FakeConfig {
        faults: faults.clone(),
        ..FakeConfig::default()
    });
    assert_eq!(
        engine.submit(request(0, &[1], 5), channel().0),
        Err(broken.clone())
    );
    let receivers: Vec<_> = (1..4)
        .map(|id| {
            let (sink, events) = channel();
            engine.submit(request(id, &[1], 5), sink).unwrap();
            events
        })
        .collect();
    while engine.step() {}
    let (tokens, end) = collect(&receivers[0]);
    assert_eq!((tokens.len(), end), (2, Err(broken)));
    assert_eq!(collect(&receivers[2]).1, Ok(FinishReason::Length));
    engine.abort(RequestId(2));
    let (tokens, end) = collect(&receivers[1]);
    assert_eq!((tokens.len(), end), (3, Ok(FinishReason::Aborted)));

    let faults = HashMap::from([(0, Fault::PanicAfter { tokens: 1 })]);
    let config = FakeConfig {
        faults,
        ..FakeConfig::default()
    };
    let engine = FakeEngine::threaded(config, Box::new(|| 0.0)).unwrap();
    let (sink, events) = channel();
    engine.submit(request(1, &[1], 5), sink).unwrap();
    assert!(matches!(collect(&events).1, Err(EngineError::Stopped(_))));
}

#[test]
fn versions_pause_limits_and_queue_are_those_of_an_engine() {
    let engine = Arc::new(stepped(FakeConfig {
        context: 10,
        max_running: 1,
        max_waiting: 1,
        ..FakeConfig::default()
    }));
    let (sink, events) = channel();
    engine.submit(request(1, &[1, 2, 3, 4], 50), sink).unwrap();
    engine.step();
    engine.pause(true);
    assert!(!engine.step());
    engine.pause(false);
    let weights = Arc::new(HashWeights([0.0]));
    engine.load_weights(PolicyVersion(4), weights).unwrap();
    // A sink that submits again from inside an event.
    let again = Arc::clone(&engine);
    let (second, second_events) = channel();
    let mut second = Some(second);
    let resubmit = Box::new(move |_| {
        if let Some(sink) = second.take() {
            again.submit(request(3, &[1], 1), sink).unwrap();
        }
    });
    engine.submit(request(2, &[1], 1), resubmit).unwrap();
    let full = engine.submit(request(4, &[1], 1), channel().0);
    assert!(
        matches!(full, Err(EngineError::QueueFull { .. })),
        "{full:?}"
    );
    while engine.step() {}
    let (tokens, end) = collect(&events);
    assert_eq!(end, Ok(FinishReason::ContextFull));
    let versions: Vec<_> = tokens.iter().map(|t| t.version.0).collect();
    assert_eq!(versions, [0, 4, 4, 4, 4, 4]);
    assert_eq!(collect(&second_events).1, Ok(FinishReason::Length));
}

#[test]
fn a_sink_may_abort_its_own_request() {
    let engine = Arc::new(stepped(FakeConfig::default()));
    let (mut sink, events) = channel();
    let handle = Arc::clone(&engine);
    let aborting = Box::new(move |event| {
        sink(event);
        handle.abort(RequestId(1));
    });
    engine.submit(request(1, &[1], 50), aborting).unwrap();
    while engine.step() {}
    let (tokens, end) = collect(&events);
    assert_eq!((tokens.len(), end), (1, Ok(FinishReason::Aborted)));
}

/// Adapters and prompts, as with a real engine: each adapter is a model that a test can ask.
#[test]
fn adapters_are_models_and_prompts_are_scored() {
    let config = FakeConfig {
        max_adapters: 1,
        ..FakeConfig::default()
    };
    let model = config.model;
    let engine = stepped(config);
    let name = AdapterName::new("a").unwrap();
    let mut r = request(1, &[1, 2, 3, 4], 5);
    r.adapter = Some(name.clone());
    r.prompt_logprobs = Some(PromptLogprobs {
        last: Some(2),
        top: 2,
        targets: vec![vec![], vec![7], vec![3, 4]],
    });
    let unknown = EngineError::UnknownAdapter { name: name.clone() };
    assert_eq!(engine.submit(r.clone(), channel().0), Err(unknown.clone()));
    let load = |name: &AdapterName, version| {
        engine.load_adapter(name, PolicyVersion(version), HashWeights::adapter(1.0))
    };
    load(&name, 3).unwrap();
    let other = load(&AdapterName::new("b").unwrap(), 3).unwrap_err();
    assert!(other.to_string().contains("max_adapters = 1"), "{other}");
    let (sink, events) = channel();
    engine.submit(r.clone(), sink).unwrap();
    engine.step();
    load(&name, 8).unwrap();
    while engine.step() {}
    let (prompt, tokens, end) = collect_all(&events);
    assert_eq!(end, Ok(FinishReason::Length));
    let versions: Vec<_> = tokens.iter().map(|t| t.version.0).collect();
    assert_eq!(versions, [3, 8, 8, 8, 8]);
    let adapted = model.adapted(&name);
    let mut prefix = r.prompt.to_vec();
    for token in &tokens {
        assert_eq!(adapted.logprob(&prefix, token.id), token.logprob);
        prefix.push(token.id);
    }
    let prompt = prompt.unwrap();
    assert_eq!(prompt.len(), 2);
    for (scored, (position, targets)) in prompt.iter().zip([(2, vec![7]), (3, vec![3, 4])]) {
        let before = &r.prompt[..position];
        assert_eq!(scored.position as usize, position);
        assert_eq!(scored.logprob, adapted.logprob(before, r.prompt[position]));
        let expected: Vec<_> = targets
            .iter()
            .map(|&t| adapted.logprob(before, t))
            .collect();
        assert_eq!(scored.targets, expected);
        let likely = [0.4f32, 0.3].map(f32::ln);
        let near = scored.top.iter().zip(likely);
        assert!(near.clone().all(|(top, p)| (top.logprob - p).abs() < 1e-6));
        assert_eq!(near.count(), 2);
    }
    let (sink, events) = channel();
    engine.submit(r.clone(), sink).unwrap();
    engine.unload_adapter(&name).unwrap();
    assert_eq!(collect(&events).1, Err(unknown));
}
