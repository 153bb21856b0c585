//! Adapters that requests name: several at once, on all servers, never one for another.

use crate::mock::{Fault, Kind, MODEL, Mock};
use crate::support::{
    self, Bench, Outcome, SERVERS, adapter, backend, config, deep, in_process, load, long, name,
    server, submit, try_submit, until, versions, weights_folder, with, with_folder,
};
use sinew_engines::{Backend, OpenaiBackend, RemoteEngine};
use sinew_infer::FakeModel;
use sinew_types::{Engine, EngineError, GenerateRequest, PolicyVersion};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

fn bench(kinds: &[Kind], backend: fn(&Mock) -> Arc<dyn Backend>) -> Bench {
    support::bench(kinds, backend, config())
}

impl Bench {
    fn load(&self, text: &str, version: u64) -> Result<(), EngineError> {
        let adapter = adapter(self.dir.path(), version);
        let version = PolicyVersion(version);
        self.engine.load_adapter(&name(text), version, adapter)
    }

    /// Names of all folders of adapters.
    fn folders(&self) -> Vec<String> {
        let own = self.dir.path().join("weights/adapters/0");
        let Ok(entries) = std::fs::read_dir(own) else {
            return Vec::new();
        };
        let names = entries.map(|e| e.unwrap().file_name().to_string_lossy().into_owned());
        let mut names: Vec<_> = names.filter(|n| n != "owner").collect();
        names.sort();
        names
    }
}

/// The model of a server under the adapter of this name.
fn under(server_name: &str) -> FakeModel {
    MODEL.adapted(&name(server_name))
}

/// Checks that each token was sampled by the model of its version.
fn check(outcome: &Outcome, prompt: &[u32], models: &[(u64, FakeModel)]) {
    assert!(outcome.end.is_ok(), "{outcome:?}");
    assert!(!outcome.tokens.is_empty());
    let mut prefix = prompt.to_vec();
    for token in &outcome.tokens {
        let mut models = models.iter();
        let model = models.find(|(version, _)| *version == token.version.0);
        let (_, model) = model.unwrap_or_else(|| panic!("{} came", token.version));
        let truth = model.logprob(&prefix, token.id);
        assert!(truth > -9.0, "another model samples {}", token.id);
        let gap = (token.logprob - truth).abs();
        assert!(gap < 1e-4, "{} and {truth}", token.logprob);
        prefix.push(token.id);
    }
}

/// A [`long`] request of an adapter.
fn of(adapter: &str, id: u64) -> GenerateRequest {
    with(Some(adapter), long(id))
}

fn unknown(text: &str) -> EngineError {
    EngineError::UnknownAdapter { name: name(text) }
}

#[test]
fn several_adapters_sample_at_once() {
    for (kind, backend) in SERVERS {
        let b = bench(&[kind, kind], backend);
        b.load("a", 7).unwrap();
        b.load("b", 9).unwrap();
        let kinds = [
            (Some("a"), 7, under("a-v7-000000aa-0")),
            (Some("b"), 9, under("b-v9-000000aa-1")),
            (None, 0, MODEL),
        ];
        let pending: Vec<_> = (0..12)
            .map(|id| {
                let (adapter, ..) = kinds[id as usize % 3];
                submit(&b.engine, with(adapter, long(id)))
            })
            .collect();
        for (id, pending) in pending.into_iter().enumerate() {
            let (_, version, model) = kinds[id % 3];
            check(&pending.outcome(), &[id as u32, 2, 3], &[(version, model)]);
        }
        for mock in &b.mocks {
            assert_eq!(
                mock.adapters(),
                ["a-v7-000000aa-0", "b-v9-000000aa-1"],
                "{kind:?}"
            );
            assert!(mock.generations() > 0, "both serve");
            assert_eq!(mock.label(), "v0-000000aa", "its own weights are verified");
        }
        let counters = b.engine.counters();
        assert_eq!(
            (counters.interrupted_attempts, counters.failed_attempts),
            (0, 0)
        );
    }
}

#[test]
fn a_replaced_adapter_samples_the_rest() {
    for (kind, backend) in SERVERS {
        let b = bench(&[kind], backend);
        b.load("a", 1).unwrap();
        b.load("b", 1).unwrap();
        b.mocks[0].fail_next(Fault::HangAfter(3));
        let replaced = submit(&b.engine, of("a", 1));
        until("it samples", || b.engine.counters().sampled_tokens > 2);
        b.mocks[0].fail_next(Fault::Slow(2));
        let other = submit(&b.engine, of("b", 2));
        b.load("a", 2).unwrap();
        let models = [(1, under("a-v1-000000aa-0")), (2, under("a-v2-000000aa-2"))];
        let outcome = replaced.outcome();
        check(&outcome, &[1, 2, 3], &models);
        let seen: Vec<_> = outcome.tokens.iter().map(|t| t.version.0).collect();
        assert!(seen.is_sorted() && seen[0] == 1, "{seen:?}");
        assert_eq!((seen.len(), seen.last()), (20, Some(&2)), "{seen:?}");
        check(
            &other.outcome(),
            &[2, 2, 3],
            &[(1, under("b-v1-000000aa-1"))],
        );
        until("the old one is removed", || {
            b.mocks[0].adapters() == ["a-v2-000000aa-2", "b-v1-000000aa-1"]
        });
        let counters = b.engine.counters();
        assert_eq!(
            (counters.interrupted_attempts, counters.failed_attempts),
            (1, 0),
            "{kind:?}"
        );
        assert_eq!(b.folders(), ["a-v2-000000aa-2", "b-v1-000000aa-1"]);
    }
}

#[test]
fn an_unloaded_adapter_ends_its_requests_and_no_others() {
    for (kind, backend) in SERVERS {
        let b = bench(&[kind], backend);
        b.load("a", 1).unwrap();
        b.load("b", 1).unwrap();
        b.mocks[0].fail_next(Fault::HangAfter(3));
        let gone = submit(&b.engine, of("a", 1));
        until("it samples", || b.engine.counters().sampled_tokens > 2);
        let other = submit(&b.engine, of("b", 2));
        b.engine.unload_adapter(&name("a")).unwrap();
        assert_eq!(gone.outcome().end, Err(unknown("a")), "{kind:?}");
        let again = try_submit(&b.engine, of("a", 3)).err();
        assert_eq!(again, Some(unknown("a")));
        assert_eq!(versions(other), [1; 20], "{kind:?}");
        until("it is removed", || {
            b.mocks[0].adapters() == ["b-v1-000000aa-1"]
        });
        assert_eq!(b.folders(), ["b-v1-000000aa-1"]);
        // Unknown ones are ignored.
        b.engine.unload_adapter(&name("a")).unwrap();
        b.engine.unload_adapter(&name("b")).unwrap();
        until("all are removed", || b.mocks[0].adapters().is_empty());
        assert_eq!(versions(submit(&b.engine, long(4))), [0; 20]);
    }
}

#[test]
fn an_adapter_that_is_not_loaded_is_refused_at_once() {
    let b = bench(&[Kind::Vllm], backend);
    let refused = try_submit(&b.engine, of("a", 1)).err();
    assert_eq!(refused, Some(unknown("a")));
    b.load("a", 1).unwrap();
    assert_eq!(versions(submit(&b.engine, of("a", 1))), [1; 20]);
}

#[test]
fn a_server_that_was_started_anew_is_given_all_adapters_again() {
    for (kind, backend) in SERVERS {
        let mut b = bench(&[kind], backend);
        b.load("a", 1).unwrap();
        b.load("b", 2).unwrap();
        assert_eq!(versions(submit(&b.engine, of("a", 1))), [1; 20]);
        b.mocks[0].restart();
        assert_eq!(versions(submit(&b.engine, of("b", 2))), [2; 20], "{kind:?}");
        assert_eq!(versions(submit(&b.engine, of("a", 3))), [1; 20], "{kind:?}");
        assert_eq!(
            b.mocks[0].adapters(),
            ["a-v1-000000aa-0", "b-v2-000000aa-1"],
            "{kind:?}"
        );
    }
}

/// An SGLang that lists no adapters shows with the first request that it has lost one.
#[test]
fn a_server_that_hides_its_adapters_is_given_one_once_it_is_missed() {
    let b = bench(&[Kind::Sglang], backend);
    let state = &b.mocks[0].state;
    state.hides_adapters.store(true, Ordering::SeqCst);
    b.load("a", 1).unwrap();
    assert_eq!(versions(submit(&b.engine, of("a", 1))), [1; 20]);
    state.adapters.lock().unwrap().clear();
    assert_eq!(versions(submit(&b.engine, of("a", 2))), [1; 20]);
    assert_eq!(b.mocks[0].adapters(), ["a-v1-000000aa-0"]);
}

#[test]
fn a_server_that_refused_an_adapter_is_given_it_later() {
    let b = bench(&[Kind::Vllm, Kind::Sglang], backend);
    let breaks = |engine: usize, broken: bool| {
        let state = &b.mocks[engine].state;
        state.broken_loader.store(broken, Ordering::SeqCst);
    };
    (0..2).for_each(|i| breaks(i, true));
    let error = b.load("a", 1).unwrap_err().to_string();
    assert!(
        error.contains("adapter a: ") && error.contains("rank 64"),
        "{error}"
    );
    let refused = try_submit(&b.engine, of("a", 1)).err();
    assert_eq!(refused, Some(unknown("a")));
    assert_eq!(b.folders(), [""; 0], "no folder stays");
    breaks(0, false);
    b.load("a", 2).unwrap();
    let pending: Vec<_> = (0..4).map(|id| submit(&b.engine, of("a", id))).collect();
    for pending in pending {
        assert_eq!(versions(pending), [2; 20]);
    }
    assert_eq!(b.mocks[1].generations(), 0, "it does not have it");
    breaks(1, false);
    until("the other one has it", || {
        b.mocks[1].adapters() == ["a-v2-000000aa-1"]
    });
}

/// An adapter of the same name on a server may have other values.
#[test]
fn an_adapter_of_an_earlier_engine_is_not_taken_for_the_own() {
    for (kind, backend) in SERVERS {
        let b = bench(&[kind], backend);
        b.load("a", 1).unwrap();
        drop(b.engine);
        assert_eq!(b.mocks[0].adapters(), ["a-v1-000000aa-0"]);
        let backends = b.mocks.iter().map(backend).collect();
        let engine = with_folder(backends, Some(weights_folder(b.dir.path())), config());
        b.mocks[0].calls();
        let own = adapter(b.dir.path(), 1);
        engine
            .load_adapter(&name("a"), PolicyVersion(1), own)
            .unwrap();
        let mut calls = b.mocks[0].calls();
        calls.retain(|c| c.contains("load a-"));
        assert_eq!(
            calls,
            ["unload a-v1-000000aa-0", "load a-v1-000000aa-0"],
            "{kind:?}"
        );
        assert_eq!(versions(submit(&engine, of("a", 1))), [1; 20], "{kind:?}");
    }
}

#[test]
fn a_server_without_adapters_is_named_with_how_to_start_it() {
    for (kind, flags) in [
        (
            Kind::Vllm,
            ["--enable-lora", "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"],
        ),
        (Kind::Sglang, ["--enable-lora", "--lora-target-modules"]),
    ] {
        let b = bench(&[kind], backend);
        b.mocks[0].state.lora.store(false, Ordering::SeqCst);
        let error = b.load("a", 1).unwrap_err().to_string();
        assert!(flags.iter().all(|f| error.contains(f)), "{error}");
        // It serves its own weights as before.
        assert_eq!(versions(submit(&b.engine, long(1))), [0; 20]);
    }
}

#[test]
fn an_answer_that_is_lost_is_no_adapter_that_is_lost() {
    for (kind, path) in [
        (Kind::Vllm, "/v1/load_lora_adapter"),
        (Kind::Sglang, "/load_lora_adapter"),
    ] {
        let b = bench(&[kind], backend);
        *b.mocks[0].state.loses.lock().unwrap() = Some(path.to_owned());
        b.load("a", 1).unwrap();
        assert_eq!(versions(submit(&b.engine, of("a", 1))), [1; 20], "{kind:?}");
    }
}

#[test]
fn engines_that_take_no_adapters_name_why() {
    let mock = Mock::start(Kind::Vllm);
    let dir = tempfile::tempdir().unwrap();
    let load = |engine: &RemoteEngine| {
        let adapter = adapter(dir.path(), 1);
        let loaded = engine.load_adapter(&name("a"), PolicyVersion(1), adapter);
        loaded.unwrap_err().to_string()
    };
    let without = with_folder(vec![backend(&mock)], None, config());
    let why = load(&without);
    assert!(
        why.contains("adapter a") && why.contains("weights_dir"),
        "{why}"
    );
    let mock = Mock::start(Kind::OpenaiWithIds);
    let openai: Arc<dyn Backend> = Arc::new(OpenaiBackend::new(server(&mock), None).unwrap());
    let why = load(&with_folder(vec![openai], None, config()));
    assert!(
        why.contains("adapter a") && why.contains("evaluation"),
        "{why}"
    );
}

#[test]
fn the_bound_on_adapters_is_named() {
    let mut config = config();
    config.router.max_adapters = 1;
    let b = support::bench(&[Kind::Vllm], backend, config);
    b.load("a", 1).unwrap();
    let why = b.load("b", 1).unwrap_err().to_string();
    assert!(why.contains("max_adapters = 1"), "{why}");
    b.load("a", 2).unwrap();
    b.engine.unload_adapter(&name("a")).unwrap();
    b.load("b", 1).unwrap();
    assert_eq!(versions(submit(&b.engine, of("b", 1))), [1; 20]);
}

/// No folder holds the weights that adapters are applied to, so a server may not lose them.
#[test]
fn a_server_with_adapters_keeps_its_own_weights_while_it_sleeps() {
    for (kind, expected) in [
        (Kind::Vllm, "/sleep?level=1"),
        (Kind::Sglang, "/release_memory_occupation [\"kv_cache\"]"),
    ] {
        let b = bench(&[kind], deep);
        b.load("a", 1).unwrap();
        assert_eq!(versions(submit(&b.engine, of("a", 1))), [1; 20]);
        b.engine.sleep().unwrap();
        let calls = b.mocks[0].calls();
        assert!(calls.contains(&expected.to_owned()), "{calls:?}");
        b.load("a", 2).unwrap();
        let pending = submit(&b.engine, of("a", 2));
        assert!(pending.nothing_for(Duration::from_millis(100)), "{kind:?}");
        b.engine.wake().unwrap();
        assert_eq!(versions(pending), [2; 20], "{kind:?}");
    }
}

/// Adapters stay where whole weights are loaded below them.
#[test]
fn new_weights_leave_the_adapters() {
    for (kind, backend) in SERVERS {
        let b = bench(&[kind], backend);
        b.load("a", 1).unwrap();
        load(&b.engine, 5).unwrap();
        assert_eq!(versions(submit(&b.engine, of("a", 1))), [1; 20], "{kind:?}");
        assert_eq!(versions(submit(&b.engine, long(2))), [5; 20], "{kind:?}");
        assert_eq!(b.mocks[0].adapters(), ["a-v1-000000aa-0"]);
    }
}

#[test]
fn folders_of_adapters_live_as_long_as_their_engine() {
    let b = bench(&[Kind::Vllm], backend);
    b.load("a", 1).unwrap();
    assert_eq!(b.folders(), ["a-v1-000000aa-0"]);
    let root = b.dir.path().join("weights/adapters");
    drop(b.engine);
    assert_eq!(std::fs::read_dir(root).unwrap().count(), 0);
}

#[test]
fn an_engine_of_this_process_has_the_adapters_of_the_router() {
    let engine = with_folder(vec![in_process()], None, config());
    let dir = tempfile::tempdir().unwrap();
    let load = |text: &str, version: u64| {
        let adapter = adapter(dir.path(), version);
        engine.load_adapter(&name(text), PolicyVersion(version), adapter)
    };
    load("a", 1).unwrap();
    load("b", 2).unwrap();
    load("a", 3).unwrap();
    let outcome = submit(&engine, of("a", 1)).outcome();
    check(&outcome, &[1, 2, 3], &[(3, under("a-v3-000000aa-2"))]);
    let outcome = submit(&engine, of("b", 2)).outcome();
    check(&outcome, &[2, 2, 3], &[(2, under("b-v2-000000aa-1"))]);
    engine.unload_adapter(&name("a")).unwrap();
    assert_eq!(try_submit(&engine, of("a", 3)).err(), Some(unknown("a")));
}
