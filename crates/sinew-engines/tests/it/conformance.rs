//! The same expectations of every engine behind the port.

use crate::mock::{CONTEXT, END, Kind, MODEL, Mock, OneTensor, VOCAB, text_of};
use crate::support::{
    PATIENCE, backend, config, remote, request, server, submit, try_submit, vllm, with_folder,
};
use sinew_engines::{
    Backend, FolderDtype, LocalBackend, LogprobMode, SglangBackend, SglangOptions, VllmApi,
    WeightsFolder,
};
use sinew_infer::testing::HashForward;
use sinew_infer::{
    EmbeddedEngine, EngineConfig, FakeConfig, FakeEngine, ForwardLimits, TokenBytes,
};
use sinew_types::{
    Engine, EngineError, Fidelity, FinishReason, PolicyVersion, SampledToken, SamplingParams,
};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Log-probability of a token after a prefix at a temperature.
type Truth = Box<dyn Fn(&[u32], u32, f32) -> f32>;

/// An engine and its expected reports.
struct Subject {
    name: &'static str,
    engine: Arc<dyn Engine>,
    truth: Truth,
    _mocks: Vec<Mock>,
    _dir: Option<tempfile::TempDir>,
}

fn bytes() -> TokenBytes {
    TokenBytes::new((0..VOCAB).map(|id| text_of(id as u32)))
}

fn clock() -> sinew_types::Clock {
    let start = Instant::now();
    Box::new(move || start.elapsed().as_secs_f64())
}

fn fake() -> Arc<FakeEngine> {
    let config = FakeConfig {
        model: MODEL,
        context: CONTEXT,
        token_bytes: Some(bytes()),
        latency: Duration::from_millis(1),
        ..FakeConfig::default()
    };
    Arc::new(FakeEngine::threaded(config, clock()).unwrap())
}

fn embedded() -> Arc<EmbeddedEngine> {
    let forward = HashForward::new(ForwardLimits {
        vocab: VOCAB,
        context: CONTEXT,
        block_tokens: 8,
        blocks: 256,
    });
    let config = EngineConfig::default();
    Arc::new(EmbeddedEngine::new(forward, config, Some(bytes()), clock()).unwrap())
}

fn fake_truth() -> Truth {
    Box::new(|prefix, token, temperature| MODEL.logprob_at(prefix, token, temperature))
}

/// The expected log-probabilities before any weights were loaded.
fn hash_truth() -> Truth {
    Box::new(|prefix, token, temperature| {
        let logits = HashForward::logits_after(VOCAB, 0, prefix);
        let divided = |l: &f32| f64::from(*l) / f64::from(temperature);
        let sum: f64 = logits.iter().map(|l| divided(l).exp()).sum();
        (divided(&logits[token as usize]) - sum.ln()) as f32
    })
}

fn local(name: &'static str, engine: Arc<dyn Engine>, truth: Truth) -> Subject {
    Subject {
        name,
        engine,
        truth,
        _mocks: Vec::new(),
        _dir: None,
    }
}

fn outside(name: &'static str, mocks: Vec<Mock>, generate: bool) -> Subject {
    let dir = tempfile::tempdir().unwrap();
    let folder = WeightsFolder::new(dir.path(), None, FolderDtype::F32);
    let backends = mocks.iter().map(|m| {
        if generate {
            vllm(m, VllmApi::Generate)
        } else {
            backend(m)
        }
    });
    let engine = with_folder(backends.collect(), Some(folder), config());
    Subject {
        name,
        engine: Arc::new(engine),
        truth: fake_truth(),
        _mocks: mocks,
        _dir: Some(dir),
    }
}

fn subjects() -> Vec<Subject> {
    let start = Mock::start;
    let routed: Vec<Arc<dyn Backend>> = vec![
        Arc::new(LocalBackend::new("one", fake())),
        Arc::new(LocalBackend::new("two", fake())),
    ];
    vec![
        local("fake", fake(), fake_truth()),
        local("embedded", embedded(), hash_truth()),
        local(
            "two fakes, routed",
            Arc::new(remote(routed, config())),
            fake_truth(),
        ),
        outside("vLLM, completions", vec![start(Kind::Vllm)], false),
        outside("vLLM, generate", vec![start(Kind::Vllm)], true),
        outside(
            "vLLM, completions, processed",
            vec![start(Kind::VllmProcessed)],
            false,
        ),
        outside(
            "vLLM, generate, processed",
            vec![start(Kind::VllmProcessed)],
            true,
        ),
        outside("SGLang", vec![start(Kind::Sglang)], false),
        outside(
            "SGLang, incremental",
            vec![start(Kind::SglangIncremental)],
            false,
        ),
        outside(
            "vLLM and SGLang",
            vec![start(Kind::Vllm), start(Kind::Sglang)],
            false,
        ),
    ]
}

fn for_each(test: impl Fn(&Subject)) {
    for subject in subjects() {
        eprintln!("{}", subject.name);
        test(&subject);
    }
}

fn check_tokens(s: &Subject, prompt: &[u32], tokens: &[SampledToken], temperature: f32) {
    let version = 0;
    let mut prefix = prompt.to_vec();
    for token in tokens {
        let truth = (s.truth)(&prefix, token.id, temperature);
        let gap = (token.logprob - truth).abs();
        assert!(gap < 1e-4, "{}: {} and {truth}", s.name, token.logprob);
        assert_eq!(token.version, PolicyVersion(version), "{}", s.name);
        prefix.push(token.id);
    }
}

#[test]
fn tokens_logprobs_and_ends_are_those_of_the_model() {
    for_each(|s| {
        assert_eq!(s.engine.fidelity(), Fidelity::TokenExact, "{}", s.name);
        let mut stops = 0;
        for id in 0..8 {
            let prompt = [5, 6, id as u32 + 20];
            let outcome = submit(&*s.engine, request(id, &prompt, 12)).outcome();
            check_tokens(s, &prompt, &outcome.tokens, 1.0);
            let ids = outcome.ids();
            match outcome.reason() {
                FinishReason::StopId { id } => {
                    stops += 1;
                    assert_eq!((*id, ids.last()), (END, Some(&END)), "{}", s.name);
                    assert_eq!(ids.iter().filter(|t| **t == END).count(), 1);
                }
                FinishReason::Length => assert_eq!(ids.len(), 12, "{}", s.name),
                other => panic!("{}: {other:?}", s.name),
            }
        }
        assert!(
            stops > 0 || s.name == "embedded",
            "{}: some stop early",
            s.name
        );
    });
}

/// The error that names a parameter.
fn refused(s: &Subject, edit: impl FnOnce(&mut SamplingParams)) -> String {
    let mut request = request(1, &[1, 2], 3);
    edit(&mut request.sampling);
    match try_submit(&*s.engine, request) {
        Err(error @ EngineError::InvalidSampling { .. }) => error.to_string(),
        Err(other) => panic!("{}: {other}", s.name),
        Ok(_) => panic!("{}: it was taken", s.name),
    }
}

/// Every log-probability is the policy's at the request's temperature, or the request is refused with what
/// to do.
#[test]
fn logprobs_are_at_the_temperature_or_it_is_refused() {
    for_each(|s| {
        // Servers that report raw logits.
        let raw = s.name.starts_with("vLLM") && !s.name.ends_with("processed");
        for (id, temperature) in [0.7, 1.2, 0.0].into_iter().enumerate() {
            if raw && temperature != 0.0 {
                let why = refused(s, |p| p.temperature = temperature);
                assert!(why.contains("--logprobs-mode processed_logprobs"), "{why}");
                continue;
            }
            let mut request = request(id as u64, &[5, 6, 20], 12);
            request.sampling.temperature = temperature;
            let at = request.sampling.policy_temperature();
            let outcome = submit(&*s.engine, request).outcome();
            assert!(!outcome.tokens.is_empty(), "{}", s.name);
            check_tokens(s, &[5, 6, 20], &outcome.tokens, at);
        }
    });
}

#[test]
fn what_would_make_told_logprobs_wrong_is_refused() {
    for s in subjects() {
        let truncations: [fn(&mut SamplingParams); 3] =
            [|p| p.top_p = 0.9, |p| p.top_k = 5, |p| p.min_p = 0.1];
        if s.name.ends_with("processed") {
            for truncate in truncations {
                let why = refused(&s, truncate);
                assert!(why.contains("log-probs are taken after it"), "{why}");
            }
        } else {
            for (id, truncate) in truncations.into_iter().enumerate() {
                let mut request = request(id as u64, &[5, 6, 20], 4);
                truncate(&mut request.sampling);
                let outcome = submit(&*s.engine, request).outcome();
                check_tokens(&s, &[5, 6, 20], &outcome.tokens, 1.0);
            }
        }
        if s.name.ends_with("processed") || s.name.contains("SGLang") {
            let why = refused(&s, |p| p.logit_bias = vec![(3, 1.0)]);
            assert!(why.contains("logit_bias"), "{why}");
        }
        if s.name.starts_with("vLLM") {
            // vLLM samples at 0.01 instead, and reports it only in its log.
            let why = refused(&s, |p| p.temperature = 0.005);
            assert!(why.contains("at least 0.01"), "{why}");
        }
    }
}

/// A server that reports the logits of temperature 1 is recognized only by the configuration.
#[test]
fn an_sglang_of_original_logprobs_samples_at_zero_and_one() {
    let mock = Mock::start(Kind::Sglang);
    let options = SglangOptions {
        logprobs: LogprobMode::Raw,
        ..SglangOptions::default()
    };
    let backend = SglangBackend::new(server(&mock), options, 1).unwrap();
    for (temperature, fits) in [(0.0, true), (1.0, true), (0.7, false), (1.2, false)] {
        let sampling = SamplingParams {
            temperature,
            ..SamplingParams::default()
        };
        let taken = backend.accepts(&sampling);
        assert_eq!(taken.is_ok(), fits, "{taken:?}");
        if let Err(why) = taken {
            let why = why.to_string();
            assert!(
                why.contains("without SGLANG_RETURN_ORIGINAL_LOGPROB"),
                "{why}"
            );
        }
    }
}

#[test]
fn greedy_and_seeded_outputs_are_reproduced() {
    for_each(|s| {
        for temperature in [0.0, 1.0] {
            let run = |id: u64| {
                let mut request = request(id, &[9, 8, 7], 10);
                request.sampling.temperature = temperature;
                request.sampling.seed = 4;
                submit(&*s.engine, request).outcome().ids()
            };
            assert_eq!(run(1), run(2), "{} at {temperature}", s.name);
        }
    });
}

#[test]
fn alternatives_come_best_first() {
    for_each(|s| {
        let mut request = request(1, &[3, 1], 6);
        request.sampling.top_logprobs = 3;
        let prompt = request.prompt.clone();
        let outcome = submit(&*s.engine, request).outcome();
        let mut prefix = prompt.to_vec();
        for token in &outcome.tokens {
            let top = &token.top;
            assert!(!top.is_empty() && top.len() <= 3, "{}: {top:?}", s.name);
            assert!(
                top.is_sorted_by(|a, b| a.logprob >= b.logprob),
                "{}",
                s.name
            );
            for candidate in top {
                let truth = (s.truth)(&prefix, candidate.id, 1.0);
                assert!((candidate.logprob - truth).abs() < 1e-4, "{}", s.name);
            }
            assert!(token.logprob <= top[0].logprob + 1e-6, "{}", s.name);
            prefix.push(token.id);
        }
    });
}

#[test]
fn stop_strings_and_full_contexts_end_it() {
    for_each(|s| {
        let greedy = |id: u64, edit: &dyn Fn(&mut sinew_types::GenerateRequest)| {
            let mut request = request(id, &[40, 41], 8);
            request.sampling.temperature = 0.0;
            request.sampling.stop_ids.clear();
            edit(&mut request);
            submit(&*s.engine, request).outcome()
        };
        let whole = greedy(1, &|_| {});
        assert_eq!(
            (whole.reason(), whole.tokens.len()),
            (&FinishReason::Length, 8)
        );
        let text = text_of(whole.tokens[3].id);
        let first = whole
            .ids()
            .iter()
            .position(|id| text_of(*id) == text)
            .unwrap();
        let cut = greedy(2, &|r| r.sampling.stop_strings = vec![text.clone()]);
        assert_eq!(
            *cut.reason(),
            FinishReason::StopString { text },
            "{}",
            s.name
        );
        assert_eq!(cut.ids(), whole.ids()[..=first], "{}", s.name);
        let full = greedy(3, &|r| {
            r.prompt = vec![40; CONTEXT - 5].into();
            r.sampling.max_tokens = 50;
        });
        assert_eq!(*full.reason(), FinishReason::ContextFull, "{}", s.name);
        assert_eq!(full.tokens.len(), 5, "{}", s.name);
    });
}

#[test]
fn pausing_holds_requests_and_aborting_ends_them() {
    for_each(|s| {
        s.engine.pause(true);
        let kept = submit(&*s.engine, request(1, &[1, 2], 5));
        let dropped = submit(&*s.engine, request(2, &[1, 2], 5));
        let twice = try_submit(&*s.engine, request(1, &[1], 5)).err();
        assert!(
            matches!(twice, Some(EngineError::Failed(_))),
            "{}: {twice:?}",
            s.name
        );
        assert!(kept.nothing_for(Duration::from_millis(30)), "{}", s.name);
        s.engine.abort(sinew_types::RequestId(2));
        s.engine.abort(sinew_types::RequestId(999));
        let dropped = dropped.outcome();
        assert_eq!(dropped.reason(), &FinishReason::Aborted, "{}", s.name);
        s.engine.pause(false);
        let kept = kept.outcome();
        assert!(!kept.tokens.is_empty() && kept.end.is_ok(), "{}", s.name);
    });
}

#[test]
fn new_weights_sample_and_stamp_from_then_on() {
    for_each(|s| {
        submit(&*s.engine, request(1, &[1, 2], 3)).outcome();
        s.engine.pause(true);
        let across = submit(&*s.engine, request(2, &[1, 2], 5));
        let load = |version: u64| {
            let weights = Arc::new(OneTensor([version as f32]));
            s.engine.load_weights(PolicyVersion(version), weights)
        };
        load(5).unwrap_or_else(|e| panic!("{}: {e}", s.name));
        s.engine.pause(false);
        let across = across.outcome();
        let stamped = across.tokens.iter().all(|t| t.version == PolicyVersion(5));
        assert!(
            stamped && !across.tokens.is_empty(),
            "{}: {across:?}",
            s.name
        );
        assert_eq!(s.engine.status().version, PolicyVersion(5), "{}", s.name);
        load(6).unwrap();
        let outcome = submit(&*s.engine, request(3, &[1, 2], 3)).outcome();
        assert_eq!(outcome.tokens[0].version, PolicyVersion(6), "{}", s.name);
    });
}

#[test]
fn what_cannot_run_is_refused_by_name() {
    for_each(|s| {
        let fails = |edit: &dyn Fn(&mut sinew_types::GenerateRequest)| {
            let mut request = request(1, &[1, 2], 3);
            edit(&mut request);
            match try_submit(&*s.engine, request) {
                Err(error) => error,
                Ok(pending) => pending.outcome().end.expect_err(s.name),
            }
        };
        type Check = fn(&EngineError) -> bool;
        type Edit = fn(&mut sinew_types::GenerateRequest);
        let cases: [(Edit, Check); 6] = [
            (
                |r| r.prompt = Vec::new().into(),
                |e| e.to_string().contains("prompt"),
            ),
            (
                |r| r.sampling.max_tokens = 0,
                |e| e.to_string().contains("max_tokens"),
            ),
            (
                |r| r.sampling.top_p = 0.0,
                |e| e.to_string().contains("top_p"),
            ),
            (
                |r| r.sampling.temperature = -1.0,
                |e| e.to_string().contains("temperature"),
            ),
            (
                |r| r.prompt = vec![1; CONTEXT].into(),
                |e| matches!(e, EngineError::PromptTooLong { .. }),
            ),
            (
                |r| r.prompt = vec![1, VOCAB as u32].into(),
                |e| matches!(e, EngineError::UnknownToken { position: 1, .. }),
            ),
        ];
        for (i, (edit, check)) in cases.into_iter().enumerate() {
            let error = fails(&edit);
            // The router does not have the limits of an engine of this process, and reports that.
            let said = check(&error) || error.to_string().contains("prompt");
            assert!(said, "{}, case {i}: {error}", s.name);
        }
        // It is none the worse for it.
        assert!(
            submit(&*s.engine, request(2, &[1], 2))
                .outcome()
                .end
                .is_ok()
        );
    });
}

#[test]
fn many_requests_do_not_mix() {
    for_each(|s| {
        let prompt = |id: u64| vec![id as u32 % 7, 3, id as u32];
        let pending: Vec<_> = (0..40)
            .map(|id| submit(&*s.engine, request(id, &prompt(id), 9)))
            .collect();
        for (id, pending) in pending.into_iter().enumerate() {
            let outcome = pending.outcome();
            assert!(outcome.end.is_ok(), "{}: {:?}", s.name, outcome.end);
            check_tokens(s, &prompt(id as u64), &outcome.tokens, 1.0);
        }
        let start = Instant::now();
        while s.engine.status().running + s.engine.status().waiting > 0 {
            assert!(
                start.elapsed() < PATIENCE,
                "{}: {:?}",
                s.name,
                s.engine.status()
            );
            std::thread::sleep(Duration::from_millis(2));
        }
        let status = s.engine.status();
        assert!(
            status.kv_tokens_total > 0 && status.kv_tokens_free > 0,
            "{}",
            s.name
        );
        assert!(status.sampled_tokens >= 40, "{}: {status:?}", s.name);
    });
}

#[test]
fn a_full_queue_refuses() {
    let mut config = config();
    config.router.max_waiting = 2;
    let engine = remote(vec![Arc::new(LocalBackend::new("fake", fake()))], config);
    engine.pause(true);
    let first = submit(&engine, request(1, &[1], 2));
    let second = submit(&engine, request(2, &[1], 2));
    let third = try_submit(&engine, request(3, &[1], 2)).err();
    assert_eq!(
        third,
        Some(EngineError::QueueFull {
            waiting: 2,
            limit: 2
        })
    );
    engine.pause(false);
    assert!(first.outcome().end.is_ok() && second.outcome().end.is_ok());
}

#[test]
fn a_dropped_engine_ends_its_requests() {
    let engine = remote(vec![Arc::new(LocalBackend::new("fake", fake()))], config());
    engine.pause(true);
    let pending = submit(&engine, request(1, &[1], 2));
    drop(engine);
    assert!(pending.outcome().error().contains("dropped"));
}
