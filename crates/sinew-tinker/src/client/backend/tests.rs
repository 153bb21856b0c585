//! The backend behind the router, against a service in this process.

use super::*;
use crate::client::fake::{BASE, Fake, Fault, State, VOCAB};
use crate::client::weights::ServiceWeights;
use sinew_engines::{FormatMode, RemoteConfig, RemoteEngine};
use sinew_types::{
    Engine, EngineEvent, FinishReason, Format, GenerateRequest, Grammar, PolicyVersion,
    PromptLogprobs, RequestId, SampledToken,
};
use std::sync::mpsc::{Receiver, sync_channel};

/// Longer than anything takes that works.
const PATIENCE: Duration = Duration::from_secs(60);
/// Token that ends an output.
const END: u32 = 7;

fn options(fake: &Fake) -> SamplerOptions {
    SamplerOptions {
        service: ServiceOptions {
            timeout: PATIENCE,
            ..ServiceOptions::new(fake.url(), "secret")
        },
        base_model: None,
        vocab: Some(VOCAB),
        context: None,
    }
}

fn engine_of(options: SamplerOptions, formats: FormatMode) -> RemoteEngine {
    let backend = Arc::new(TinkerBackend::new(options).unwrap());
    let mut config = RemoteConfig::new(Box::new(|| 0.5));
    config.probe_interval_s = 0.2;
    config.router.formats = formats;
    RemoteEngine::new(vec![backend], None, config).unwrap()
}

/// Publishes these logits under a name, and loads them as a version.
fn load(fake: &Fake, engine: &RemoteEngine, version: u64, logits: Vec<f32>) {
    let path = format!("tinker://m/sampler_weights/v{version}");
    fake.with(|state| state.saved.insert(path.clone(), logits));
    let weights = Arc::new(ServiceWeights::new(path));
    engine
        .load_weights(PolicyVersion(version), weights)
        .unwrap();
}

/// Logits after which `next` is certain.
fn always(next: usize) -> Vec<f32> {
    let logit = |i: usize| if i % VOCAB == next { 50.0 } else { 0.0 };
    (0..VOCAB * VOCAB).map(logit).collect()
}

fn sampling(max_tokens: u32) -> SamplingParams {
    SamplingParams {
        max_tokens,
        stop_ids: vec![END],
        seed: 3,
        ..SamplingParams::default()
    }
}

fn submit(engine: &RemoteEngine, id: u64, sampling: SamplingParams) -> Receiver<EngineEvent> {
    let (to, events) = sync_channel(64);
    let request = GenerateRequest::new(RequestId(id), vec![1, 2], sampling);
    let sink = Box::new(move |event| {
        // The test may have continued.
        let _ = to.try_send(event);
    });
    engine.submit(request, sink).unwrap();
    events
}

/// Tokens and end of a request.
fn outcome(
    events: &Receiver<EngineEvent>,
) -> (Vec<SampledToken>, Result<FinishReason, EngineError>) {
    let mut all = Vec::new();
    loop {
        match events.recv_timeout(PATIENCE).unwrap() {
            EngineEvent::Tokens { tokens, .. } => all.extend(tokens),
            EngineEvent::Finished { reason, .. } => return (all, Ok(reason)),
            EngineEvent::Failed { error, .. } => return (all, Err(error)),
            EngineEvent::Prompt { .. } => {}
        }
    }
}

/// Waits until something holds of the service.
fn until(fake: &Fake, what: &str, holds: impl Fn(&State) -> bool) {
    let end = std::time::Instant::now() + PATIENCE;
    while !fake.with(|state| holds(state)) {
        assert!(std::time::Instant::now() < end, "never: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn ids(tokens: &[SampledToken]) -> Vec<u32> {
    tokens.iter().map(|token| token.id).collect()
}

#[test]
fn versions_are_sampled_by_their_address() {
    let fake = Fake::start();
    let engine = engine_of(options(&fake), FormatMode::Refuse);
    assert_eq!(engine.fidelity(), Fidelity::TokenExact);
    load(&fake, &engine, 4, always(5));
    let asked = SamplingParams {
        top_logprobs: 2,
        ..sampling(3)
    };
    let (tokens, end) = outcome(&submit(&engine, 1, asked));
    assert_eq!(ids(&tokens), [5, 5, 5]);
    assert_eq!(end, Ok(FinishReason::Length));
    for token in &tokens {
        assert_eq!(token.version, PolicyVersion(4));
        assert!(token.logprob <= 0.0 && token.logprob > -1e-3);
        assert_eq!((token.top.len(), token.top[0].id), (2, 5));
    }
    load(&fake, &engine, 5, always(END as usize));
    let (tokens, end) = outcome(&submit(&engine, 2, sampling(3)));
    assert_eq!(
        (ids(&tokens), tokens[0].version),
        (vec![END], PolicyVersion(5))
    );
    assert_eq!(end, Ok(FinishReason::StopId { id: END }));
    assert_eq!(engine.status().version, PolicyVersion(5));
}

#[test]
fn the_same_seed_gives_the_same_tokens_and_faults_change_nothing() {
    let fake = Fake::start();
    let engine = engine_of(options(&fake), FormatMode::Refuse);
    load(&fake, &engine, 0, fake.base());
    let (expected, _) = outcome(&submit(&engine, 1, sampling(8)));
    let faults = [
        ("asample", Fault::Lost),
        ("asample", Fault::Status(503, "down")),
        ("asample", Fault::Status(429, "busy")),
        ("retrieve_future", Fault::Lost),
        ("retrieve_future", Fault::Status(500, "down")),
        ("asample", Fault::Fails("server")),
        // The result is gone, and the sampler with it.
        (
            "retrieve_future",
            Fault::Status(404, "{\"detail\": \"gone\"}"),
        ),
    ];
    for (at, (path, fault)) in faults.into_iter().enumerate() {
        fake.fault(path, fault.clone());
        let (tokens, end) = outcome(&submit(&engine, 10 + at as u64, sampling(8)));
        assert!(end.is_ok(), "{fault:?}: {end:?}");
        assert_eq!(tokens, expected, "{fault:?}");
    }
}

#[test]
fn a_service_that_forgot_its_samplers_gets_them_again() {
    let mut fake = Fake::start();
    let engine = engine_of(options(&fake), FormatMode::Refuse);
    load(&fake, &engine, 1, always(3));
    fake.kill();
    fake.with(State::forget_samplers);
    fake.restart();
    let (tokens, _) = outcome(&submit(&engine, 1, sampling(2)));
    assert_eq!(
        (ids(&tokens), tokens[0].version),
        (vec![3, 3], PolicyVersion(1))
    );
}

#[test]
fn requests_in_flight_keep_their_weights_and_cancelled_ones_are_cancelled() {
    let fake = Fake::start();
    let engine = engine_of(options(&fake), FormatMode::Refuse);
    load(&fake, &engine, 1, always(3));
    fake.fault("retrieve_future", Fault::Late(700));
    let old = submit(&engine, 1, sampling(2));
    until(&fake, "it is in flight", |state| state.faults.is_empty());
    load(&fake, &engine, 2, always(4));
    let (new, _) = outcome(&submit(&engine, 2, sampling(2)));
    assert_eq!((ids(&new), new[0].version), (vec![4, 4], PolicyVersion(2)));
    let (old, _) = outcome(&old);
    assert_eq!((ids(&old), old[0].version), (vec![3, 3], PolicyVersion(1)));
    fake.fault("retrieve_future", Fault::Late(5000));
    let aborted = submit(&engine, 3, sampling(2));
    until(&fake, "it is in flight", |state| state.faults.is_empty());
    engine.abort(RequestId(3));
    assert_eq!(outcome(&aborted).1, Ok(FinishReason::Aborted));
    until(&fake, "cancelled", |state| !state.cancelled.is_empty());
}

#[test]
fn prompts_are_scored() {
    let fake = Fake::start();
    let engine = engine_of(options(&fake), FormatMode::Refuse);
    load(&fake, &engine, 0, always(2));
    let asked = PromptLogprobs {
        top: 1,
        targets: vec![vec![2, 3], Vec::new()],
        ..PromptLogprobs::default()
    };
    let (to, events) = sync_channel(64);
    let request = GenerateRequest {
        prompt_logprobs: Some(asked),
        ..GenerateRequest::new(RequestId(1), vec![1, 2, 1], sampling(1))
    };
    let sink = Box::new(move |event| to.try_send(event).unwrap());
    engine.submit(request, sink).unwrap();
    let EngineEvent::Prompt { logprobs, .. } = events.recv_timeout(PATIENCE).unwrap() else {
        panic!("the prompt comes first");
    };
    // After every token the next one is certainly 2.
    let positions: Vec<u32> = logprobs.iter().map(|place| place.position).collect();
    assert_eq!(positions, [1, 2]);
    assert!(logprobs[0].logprob > -1e-3 && logprobs[1].logprob < -10.0);
    assert!(logprobs.iter().all(|place| place.top[0].id == 2));
    assert_eq!(logprobs[0].targets.len(), 2);
    assert!(logprobs[0].targets[0] > -1e-3 && logprobs[0].targets[1] < -10.0);
    assert!(logprobs[1].targets.is_empty());
    assert!(outcome(&events).1.is_ok());
}

#[test]
fn a_base_model_samples_where_nothing_is_trained() {
    let fake = Fake::start();
    let mut own = options(&fake);
    own.base_model = Some(BASE.to_owned());
    let engine = engine_of(own, FormatMode::Refuse);
    engine.wait_ready(PATIENCE).unwrap();
    let (tokens, end) = outcome(&submit(&engine, 1, sampling(4)));
    assert!(end.is_ok() && !tokens.is_empty());
    assert!(tokens.iter().all(|token| token.version == PolicyVersion(0)));
}

#[test]
fn weights_that_are_not_at_the_service_are_refused() {
    let fake = Fake::start();
    let engine = engine_of(options(&fake), FormatMode::Refuse);
    let here = Arc::new(sinew_types::TensorList::default());
    let error = engine.load_weights(PolicyVersion(1), here).unwrap_err();
    assert!(error.to_string().contains("not at the service"), "{error}");
    let mut wrong = options(&fake);
    wrong.service.url = "127.0.0.1".to_owned();
    assert!(TinkerBackend::new(wrong).is_err());
}

#[test]
fn what_the_protocol_lacks_is_refused_by_name() {
    let backend = TinkerBackend::new(options(&Fake::start())).unwrap();
    let plain = SamplingParams::default();
    let format = Format::new(Grammar::JsonObject);
    let cases = [
        (
            "temperature",
            SamplingParams {
                temperature: 0.7,
                ..plain.clone()
            },
        ),
        (
            "top_p",
            SamplingParams {
                top_p: 0.9,
                ..plain.clone()
            },
        ),
        (
            "top_k",
            SamplingParams {
                top_k: 5,
                ..plain.clone()
            },
        ),
        (
            "min_p",
            SamplingParams {
                min_p: 0.1,
                ..plain.clone()
            },
        ),
        (
            "logit_bias",
            SamplingParams {
                logit_bias: vec![(1, 1.0)],
                ..plain.clone()
            },
        ),
        (
            "stop_strings",
            SamplingParams {
                stop_strings: vec!["x".into()],
                ..plain.clone()
            },
        ),
        (
            "output formats",
            SamplingParams {
                format: Some(Arc::new(format)),
                ..plain.clone()
            },
        ),
    ];
    for (name, sampling) in cases {
        let error = backend.accepts(&sampling).unwrap_err();
        assert_eq!(error.blame(), sinew_engines::Blame::Request);
        assert!(error.to_string().contains(name), "{error}");
    }
    assert_eq!(backend.accepts(&plain), Ok(()));
    let greedy = SamplingParams {
        temperature: 0.0,
        top_p: 0.5,
        ..plain
    };
    assert_eq!(backend.accepts(&greedy), Ok(()));
}
