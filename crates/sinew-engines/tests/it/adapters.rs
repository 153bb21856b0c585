//! LoRA adapters by name: no pause, exact versions, none removed that is asked for.

use crate::mock::{Fault, Kind, Mock, OneTensor};
use crate::support::{
    SERVERS, backend, config, deep, long, submit, until, until_idle_because, versions,
    weights_folder,
};
use sinew_engines::{Backend, RemoteEngine};
use sinew_types::{
    Dtype, Engine, EngineError, PolicyVersion, PublishedFolder, TensorSource, TensorView,
    WeightsManifestTensor,
};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// An adapter that a trainer wrote.
struct Adapter(PublishedFolder);

impl TensorSource for Adapter {
    fn names(&self) -> Vec<String> {
        self.0.tensors.iter().map(|t| t.name.clone()).collect()
    }

    fn tensor(&self, name: &str) -> Option<TensorView<'_>> {
        panic!("{name} is read again");
    }

    fn folder(&self) -> Option<&PublishedFolder> {
        Some(&self.0)
    }
}

fn adapter(dir: &Path) -> Arc<dyn TensorSource> {
    let path = dir.join("trainer");
    std::fs::create_dir_all(&path).unwrap();
    std::fs::write(path.join("adapter_config.json"), "{}").unwrap();
    std::fs::write(path.join("adapter_model.safetensors"), "tensors").unwrap();
    let tensor = WeightsManifestTensor {
        name: "base_model.model.q_proj.lora_A.weight".to_owned(),
        dtype: Dtype::F32,
        shape: vec![1],
        file: "adapter_model.safetensors".to_owned(),
        blake3: "0".repeat(64),
        delta: None,
    };
    Arc::new(Adapter(PublishedFolder {
        path,
        is_adapter: true,
        tensors: vec![tensor],
    }))
}

struct Bench {
    mocks: Vec<Mock>,
    engine: RemoteEngine,
    dir: tempfile::TempDir,
}

impl Bench {
    fn load(&self, version: u64) -> Result<(), EngineError> {
        let adapter = adapter(self.dir.path());
        self.engine.load_weights(PolicyVersion(version), adapter)
    }

    fn folders(&self) -> Vec<String> {
        let entries = std::fs::read_dir(self.dir.path().join("weights")).unwrap();
        let names = entries.map(|e| e.unwrap().file_name().to_string_lossy().into_owned());
        let mut names: Vec<_> = names.collect();
        names.sort();
        names
    }
}

fn bench(kinds: &[Kind], backend: fn(&Mock) -> Arc<dyn Backend>) -> Bench {
    let mocks: Vec<_> = kinds.iter().map(|k| Mock::start(*k)).collect();
    let dir = tempfile::tempdir().unwrap();
    let folder = weights_folder(dir.path());
    let mut config = config();
    config.router.adapters = Some("run".to_owned());
    let backends = mocks.iter().map(backend).collect();
    let engine = RemoteEngine::new(backends, Some(folder), config).unwrap();
    Bench { mocks, engine, dir }
}

/// Names of the models that requests asked for.
fn asked(mock: &Mock) -> Vec<String> {
    let seen = mock.state.seen.lock().unwrap();
    let name = |body: &serde_json::Value| {
        let name = body.get("lora_path").or(body.get("model"));
        name.and_then(|n| n.as_str()).unwrap_or("none").to_owned()
    };
    seen.iter().map(name).collect()
}

#[test]
fn requests_in_flight_end_on_the_adapter_that_they_asked_for() {
    for (kind, backend) in SERVERS {
        let b = bench(&[kind], backend);
        b.load(1).unwrap();
        b.mocks[0].state.spans.store(true, Ordering::SeqCst);
        b.mocks[0].hold_next();
        let old = submit(&b.engine, long(1));
        until("it samples", || b.engine.counters().sampled_tokens > 2);
        b.load(2).unwrap();
        let new = submit(&b.engine, long(2));
        assert_eq!(versions(new), [2; 20], "{kind:?}");
        // The old one is there as long as it is asked for.
        assert_eq!(
            b.mocks[0].adapters(),
            ["run-v1-000000aa", "run-v2-000000aa"]
        );
        b.mocks[0].release();
        assert_eq!(versions(old), [1; 20], "{kind:?}");
        until("the old one is removed", || {
            b.mocks[0].adapters() == ["run-v2-000000aa"]
        });
        assert_eq!(Mock::count(&b.mocks[0].state.removed_in_use), 0);
        assert_eq!(asked(&b.mocks[0]), ["run-v1-000000aa", "run-v2-000000aa"]);
        let counters = b.engine.counters();
        assert_eq!(
            (counters.interrupted_attempts, counters.failed_attempts),
            (0, 0)
        );
        let calls = b.mocks[0].calls();
        let adapters = |c: &String| c.starts_with("load run-") || c.starts_with("unload run-");
        assert!(
            calls.iter().all(adapters),
            "no pause and no label: {calls:?}"
        );
        assert_eq!(b.mocks[0].label(), "default");
    }
}

/// An adapter that left the memory of a server is read from its folder again.
#[test]
fn folders_of_adapters_stay_as_long_as_they_are_asked_for() {
    let b = bench(&[Kind::Vllm], backend);
    b.load(1).unwrap();
    b.mocks[0].hold_next();
    let old = submit(&b.engine, long(1));
    until("it samples", || b.engine.counters().sampled_tokens > 2);
    for version in 2..6 {
        b.load(version).unwrap();
    }
    let folders = b.folders();
    assert!(
        folders.contains(&"v00000001-000000aa".to_owned()),
        "{folders:?}"
    );
    b.mocks[0].release();
    assert_eq!(versions(old), [1; 20]);
    until("the old ones are removed", || {
        b.mocks[0].adapters() == ["run-v5-000000aa"]
    });
    b.load(6).unwrap();
    assert_eq!(b.folders(), ["v00000005-000000aa", "v00000006-000000aa"]);
    let manifest = b
        .dir
        .path()
        .join("weights/v00000006-000000aa/manifest.json");
    let manifest = std::fs::read_to_string(manifest).unwrap();
    assert!(manifest.contains("000000aa") && manifest.contains("lora_A"));
}

#[test]
fn a_server_that_was_started_anew_is_given_the_newest_adapter() {
    for (kind, backend) in SERVERS {
        let mut b = bench(&[kind], backend);
        b.load(1).unwrap();
        b.load(2).unwrap();
        assert_eq!(versions(submit(&b.engine, long(1))), [2; 20]);
        b.mocks[0].restart();
        assert_eq!(versions(submit(&b.engine, long(2))), [2; 20], "{kind:?}");
        assert_eq!(b.mocks[0].adapters(), ["run-v2-000000aa"], "{kind:?}");
    }
}

/// An SGLang that lists no adapters shows with the first request that it has lost them.
#[test]
fn a_server_that_hides_its_adapters_is_given_the_newest_one_once_it_is_missed() {
    let b = bench(&[Kind::Sglang], backend);
    b.mocks[0]
        .state
        .hides_adapters
        .store(true, Ordering::SeqCst);
    b.load(1).unwrap();
    assert_eq!(versions(submit(&b.engine, long(1))), [1; 20]);
    b.mocks[0].state.adapters.lock().unwrap().clear();
    assert_eq!(versions(submit(&b.engine, long(2))), [1; 20]);
    assert_eq!(b.mocks[0].adapters(), ["run-v1-000000aa"]);
}

#[test]
fn an_adapter_that_is_refused_leaves_the_one_before() {
    for (kind, backend) in SERVERS {
        let b = bench(&[kind], backend);
        b.load(1).unwrap();
        b.mocks[0].state.broken_loader.store(true, Ordering::SeqCst);
        b.mocks[0].fail_next(Fault::Slow(10));
        let running = submit(&b.engine, long(1));
        until("it samples", || b.engine.counters().sampled_tokens > 2);
        let error = b.load(2).unwrap_err().to_string();
        assert!(
            error.contains("rank 64") && error.contains("--max-lora-rank"),
            "{error}"
        );
        assert_eq!(versions(running), [1; 20], "{kind:?}");
        assert_eq!(versions(submit(&b.engine, long(2))), [1; 20], "{kind:?}");
        b.mocks[0]
            .state
            .broken_loader
            .store(false, Ordering::SeqCst);
        b.load(3).unwrap();
        assert_eq!(versions(submit(&b.engine, long(3))), [3; 20], "{kind:?}");
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
        let error = b.load(1).unwrap_err().to_string();
        assert!(flags.iter().all(|f| error.contains(f)), "{error}");
        // Its own weights are not those of the run.
        let pending = submit(&b.engine, long(1));
        assert!(pending.nothing_for(Duration::from_millis(100)));
        assert_eq!(b.mocks[0].generations(), 0);
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
        b.load(1).unwrap();
        assert_eq!(versions(submit(&b.engine, long(1))), [1; 20], "{kind:?}");
    }
}

#[test]
fn a_server_whose_own_weights_were_replaced_serves_no_adapter() {
    for (kind, backend) in SERVERS {
        let b = bench(&[kind], backend);
        b.load(1).unwrap();
        assert_eq!(versions(submit(&b.engine, long(1))), [1; 20]);
        b.mocks[0].set_label("v7-000000bb");
        until_idle_because(&b.engine, "v7-000000bb");
        let pending = submit(&b.engine, long(2));
        assert!(pending.nothing_for(Duration::from_millis(100)), "{kind:?}");
        let error = b.load(2).unwrap_err().to_string();
        assert!(error.contains("own weights were replaced"), "{error}");
        b.mocks[0].set_label("default");
        assert_eq!(versions(pending), [1; 20], "{kind:?}");
    }
}

/// No folder holds the weights that adapters belong to, so a server may not lose them.
#[test]
fn a_server_with_adapters_keeps_its_own_weights_while_it_sleeps() {
    for (kind, expected) in [
        (Kind::Vllm, "/sleep?level=1"),
        (Kind::Sglang, "/release_memory_occupation [\"kv_cache\"]"),
    ] {
        let b = bench(&[kind], deep);
        b.load(1).unwrap();
        assert_eq!(versions(submit(&b.engine, long(1))), [1; 20]);
        b.engine.sleep().unwrap();
        let calls = b.mocks[0].calls();
        assert!(calls.contains(&expected.to_owned()), "{calls:?}");
        b.load(2).unwrap();
        let pending = submit(&b.engine, long(2));
        assert!(pending.nothing_for(Duration::from_millis(100)), "{kind:?}");
        b.engine.wake().unwrap();
        assert_eq!(versions(pending), [2; 20], "{kind:?}");
        assert_eq!(b.mocks[0].label(), "default");
    }
}

#[test]
fn adapters_and_whole_weights_are_not_taken_for_each_other() {
    let b = bench(&[Kind::Vllm], backend);
    let whole = Arc::new(OneTensor([1.0]));
    let error = b.engine.load_weights(PolicyVersion(1), whole).unwrap_err();
    assert!(error.to_string().contains("whole weights"), "{error}");
    let dir = tempfile::tempdir().unwrap();
    let folder = weights_folder(dir.path());
    let mock = Mock::start(Kind::Vllm);
    let engine = RemoteEngine::new(vec![backend(&mock)], Some(folder), config()).unwrap();
    let error = engine.load_weights(PolicyVersion(1), adapter(dir.path()));
    let error = error.unwrap_err().to_string();
    assert!(error.contains("engine.adapters"), "{error}");
}
