//! Log-probabilities of prompts, from every kind of server.

use crate::mock::{Fault, Kind, MODEL, Mock, VOCAB};
use crate::support::{
    Outcome, adapter, backend, config, generate, in_process, long, name, remote, server, submit,
    try_submit, with, with_folder,
};
use sinew_engines::{Backend, FolderDtype, OpenaiBackend, RemoteEngine, WeightsFolder};
use sinew_infer::FakeModel;
use sinew_types::{Engine, EngineError, GenerateRequest, PolicyVersion, PromptLogprobs};
use std::sync::Arc;
use std::time::Duration;

/// Each kind of server, the form of its requests, and whether it reports targets.
const SERVERS: [(Kind, fn(&Mock) -> Arc<dyn Backend>, bool); 6] = [
    (Kind::Vllm, backend, false),
    (Kind::Vllm, generate, false),
    (Kind::VllmProcessed, backend, false),
    (Kind::VllmProcessed, generate, false),
    (Kind::Sglang, backend, true),
    (Kind::SglangIncremental, backend, true),
];

fn scoring(request: GenerateRequest, asked: &PromptLogprobs) -> GenerateRequest {
    GenerateRequest {
        prompt_logprobs: Some(asked.clone()),
        ..request
    }
}

/// Checks the log-probabilities of a prompt.
fn check(outcome: &Outcome, prompt: &[u32], asked: &PromptLogprobs, model: FakeModel) {
    assert!(outcome.end.is_ok(), "{outcome:?}");
    let scored = outcome.prompt.as_ref().expect("they are told");
    let found = scored.iter().map(|place| place.position as usize);
    assert!(found.eq(asked.places(prompt.len())), "{scored:?}");
    for place in scored {
        let at = place.position as usize;
        let close = |told: f32, id: u32| {
            let truth = model.logprob(&prompt[..at], id);
            let gap = (told - truth).abs();
            assert!(gap < 1e-4, "{at}: {told} and {truth} for {id}");
        };
        close(place.logprob, prompt[at]);
        assert_eq!(place.top.is_empty(), asked.top == 0);
        assert!(place.top.len() <= usize::from(asked.top));
        assert!(place.top.is_sorted_by(|a, b| a.logprob >= b.logprob));
        place.top.iter().for_each(|t| close(t.logprob, t.id));
        let targets = asked.targets_at(at);
        assert_eq!(place.targets.len(), targets.len());
        let pairs = place.targets.iter().zip(targets);
        pairs.for_each(|(logprob, id)| close(*logprob, *id));
    }
}

/// A prompt that the model could have written.
fn written(engine: &RemoteEngine) -> Vec<u32> {
    let mut prompt = vec![1, 2, 3];
    prompt.extend(submit(engine, long(1)).outcome().ids());
    prompt
}

/// Questions of every form about a prompt of `len` tokens.
fn all_kinds(len: usize, targets: bool) -> Vec<PromptLogprobs> {
    let last = |n: u32, top: u8| PromptLogprobs {
        last: Some(n),
        top,
        ..PromptLogprobs::default()
    };
    let mut all = vec![
        PromptLogprobs::default(),
        last(1, 0),
        last(5, 3),
        last(1000, 4),
    ];
    if targets {
        let each = |i: usize| {
            let first = (i % 2) as u32;
            (0..i % 4).map(|n| first + 3 * n as u32).collect::<Vec<_>>()
        };
        all.push(PromptLogprobs {
            targets: (1..len).map(each).collect(),
            ..last(7, 2)
        });
    }
    all
}

#[test]
fn log_probs_of_prompts_are_those_of_the_model() {
    for (kind, backend, targets) in SERVERS {
        let mock = Mock::start(kind);
        let engine = remote(vec![backend(&mock)], config());
        let prompt = written(&engine);
        for (i, asked) in all_kinds(prompt.len(), targets).into_iter().enumerate() {
            let mut request = long(10 + i as u64);
            request.prompt = prompt.clone().into();
            request.sampling.max_tokens = 3;
            // Those of the prompt are at temperature 1 nevertheless.
            if kind != Kind::Vllm {
                request.sampling.temperature = 0.7;
            }
            let outcome = submit(&engine, scoring(request, &asked)).outcome();
            check(&outcome, &prompt, &asked, MODEL);
            assert_eq!(outcome.tokens.len(), 3, "{kind:?}");
            assert_eq!(mock.state.scored.lock().unwrap().len(), i + 1);
        }
        let counters = engine.counters();
        assert_eq!(counters.failed_attempts, 0, "{kind:?}");
    }
}

/// Nothing predicts the first token.
#[test]
fn a_prompt_of_one_token_has_none() {
    for (kind, backend, _) in SERVERS {
        let mock = Mock::start(kind);
        let engine = remote(vec![backend(&mock)], config());
        let mut request = long(1);
        request.prompt = vec![4].into();
        let asked = PromptLogprobs::default();
        let outcome = submit(&engine, scoring(request, &asked)).outcome();
        assert_eq!(outcome.prompt, Some(Vec::new()), "{kind:?}");
        assert_eq!(outcome.tokens.len(), 20);
        assert!(mock.state.scored.lock().unwrap().is_empty());
    }
}

#[test]
fn prompts_are_scored_with_the_adapter_of_the_request() {
    for (kind, backend, _) in SERVERS {
        let mock = Mock::start(kind);
        let dir = tempfile::tempdir().unwrap();
        let folder = WeightsFolder::new(dir.path().join("weights"), None, FolderDtype::F32);
        let engine = with_folder(vec![backend(&mock)], Some(folder), config());
        let version = PolicyVersion(4);
        let loaded = engine.load_adapter(&name("a"), version, adapter(dir.path(), 4));
        loaded.unwrap();
        let asked = PromptLogprobs {
            top: 2,
            ..PromptLogprobs::default()
        };
        let adapted = MODEL.adapted(&name("a-v4-000000aa-0"));
        for (id, adapter, model) in [(1, Some("a"), adapted), (2, None, MODEL)] {
            let request = with(adapter, scoring(long(id), &asked));
            let outcome = submit(&engine, request).outcome();
            check(&outcome, &[id as u32, 2, 3], &asked, model);
        }
    }
}

#[test]
fn a_prompt_is_scored_once_although_its_attempts_are_cut() {
    for (kind, backend, _) in SERVERS {
        let mut config = config();
        config.hold_until_verified = kind == Kind::VllmProcessed;
        let mock = Mock::start(kind);
        let engine = remote(vec![backend(&mock)], config);
        mock.fail_next(Fault::CutAfter(2));
        engine.pause(true);
        let asked = PromptLogprobs::default();
        let pending = submit(&engine, scoring(long(1), &asked));
        assert!(pending.nothing_for(Duration::from_millis(20)));
        engine.pause(false);
        let outcome = pending.outcome();
        check(&outcome, &[1, 2, 3], &asked, MODEL);
        assert_eq!(outcome.tokens.len(), 20, "{kind:?}");
        assert_eq!(engine.counters().failed_attempts, 1, "{kind:?}");
        assert_eq!(mock.state.scored.lock().unwrap().len(), 1, "{kind:?}");
    }
}

/// Somebody else loads weights into a server.
#[test]
fn a_prompt_is_not_scored_with_other_weights() {
    for (kind, backend, _) in SERVERS {
        let mock = Mock::start(kind);
        let engine = remote(vec![backend(&mock)], config());
        mock.set_label("v7-000000bb");
        let asked = PromptLogprobs::default();
        let pending = submit(&engine, scoring(long(1), &asked));
        assert!(pending.nothing_for(Duration::from_millis(100)), "{kind:?}");
        mock.set_label("v0-000000aa");
        check(&pending.outcome(), &[1, 2, 3], &asked, MODEL);
    }
}

/// The error of a request that is not taken.
fn refused(engine: &RemoteEngine, asked: &PromptLogprobs) -> String {
    match try_submit(engine, scoring(long(1), asked)) {
        Err(error @ EngineError::InvalidSampling { .. }) => error.to_string(),
        Err(other) => panic!("{other}"),
        Ok(_) => panic!("it was taken"),
    }
}

#[test]
fn what_a_server_cannot_report_is_refused_by_name() {
    let of = |first: Vec<u32>| PromptLogprobs {
        targets: vec![first, vec![]],
        ..PromptLogprobs::default()
    };
    let mock = Mock::start(Kind::Vllm);
    let vllm = remote(vec![backend(&mock)], config());
    let why = refused(&vllm, &of(vec![4]));
    assert!(
        why.contains("prompt_logprobs.targets") && why.contains("vLLM"),
        "{why}"
    );
    let mock = Mock::start(Kind::Sglang);
    let sglang = remote(vec![backend(&mock)], config());
    let why = refused(&sglang, &of((0..65).collect()));
    assert!(
        why.contains("prompt_logprobs.targets") && why.contains("at most 64"),
        "{why}"
    );
    let mock = Mock::start(Kind::OpenaiWithIds);
    let openai: Arc<dyn Backend> = Arc::new(OpenaiBackend::new(server(&mock), None).unwrap());
    let openai = remote(vec![openai], config());
    let why = refused(&openai, &PromptLogprobs::default());
    assert!(
        why.contains("prompt_logprobs") && why.contains("OpenAI"),
        "{why}"
    );
    // The other requests are served.
    assert!(submit(&vllm, long(2)).outcome().end.is_ok());
}

#[test]
fn what_no_engine_can_report_is_refused_by_name() {
    let mock = Mock::start(Kind::Sglang);
    let engine = remote(vec![backend(&mock)], config());
    let cases = [
        (
            PromptLogprobs {
                last: Some(0),
                ..PromptLogprobs::default()
            },
            "prompt_logprobs.last",
        ),
        (
            PromptLogprobs {
                targets: vec![vec![]],
                ..PromptLogprobs::default()
            },
            "prompt_logprobs.targets",
        ),
        (
            PromptLogprobs {
                targets: vec![vec![], vec![VOCAB as u32]],
                ..PromptLogprobs::default()
            },
            "prompt_logprobs.targets",
        ),
    ];
    for (asked, name) in cases {
        let why = refused(&engine, &asked);
        assert!(why.contains(name), "{why}");
    }
    assert_eq!(mock.generations(), 0);
}

#[test]
fn an_engine_of_this_process_scores_prompts_behind_the_router() {
    let engine = remote(vec![in_process()], config());
    let prompt = written(&engine);
    for (i, asked) in all_kinds(prompt.len(), true).into_iter().enumerate() {
        let mut request = long(10 + i as u64);
        request.prompt = prompt.clone().into();
        let outcome = submit(&engine, scoring(request, &asked)).outcome();
        check(&outcome, &prompt, &asked, MODEL);
    }
}
