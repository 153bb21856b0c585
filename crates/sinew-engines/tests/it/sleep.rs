//! Engines that give up their memory while a trainer uses the GPUs.

use crate::mock::{Kind, Mock};
use crate::support::{
    self, Bench, config, deep, load, long, server, submit, versions, weights_folder,
};
use sinew_engines::{Backend, LocalBackend, OpenaiBackend, RemoteConfig, RemoteEngine};
use sinew_infer::{FakeConfig, FakeEngine};
use sinew_types::Engine;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Servers with the weights of version 1.
fn bench(kinds: &[Kind], config: RemoteConfig) -> Bench {
    let b = support::bench(kinds, deep, config);
    load(&b.engine, 1).unwrap();
    b.mocks.iter().for_each(|m| drop(m.calls()));
    b
}

/// The commands of a server without those that end requests.
fn calls(mock: &Mock) -> Vec<String> {
    let mut calls = mock.calls();
    calls.retain(|c| c != "/abort_request");
    calls
}

#[test]
fn weights_are_loaded_before_the_kv_cache_wakes() {
    let vllm: [&[&str]; 3] = [
        &["/update_weight_version discarded", "/sleep?level=2"],
        &[
            "/wake_up?tags=weights",
            "/update_weight_version loading-v2-000000aa",
            "/collective_rpc",
            "/reset_prefix_cache",
            "/update_weight_version v2-000000aa",
        ],
        &["/wake_up?tags=kv_cache", "/resume"],
    ];
    let sglang: [&[&str]; 3] = [
        &[
            "/flush_cache",
            "/update_weight_version released",
            "/release_memory_occupation [\"kv_cache\",\"weights\"]",
        ],
        &[
            "/resume_memory_occupation [\"weights\"]",
            "/update_weight_version loading-v2-000000aa",
            "/update_weights_from_disk",
        ],
        &["/resume_memory_occupation [\"kv_cache\"]"],
    ];
    for (kind, expected) in [(Kind::Vllm, vllm), (Kind::Sglang, sglang)] {
        let b = bench(&[kind], config());
        b.engine.sleep().unwrap();
        assert_eq!(calls(&b.mocks[0]), expected[0]);
        let status = b.engine.status();
        assert!(status.asleep && status.kv_tokens_total == 0, "{status:?}");
        let why = b.engine.engines()[0].idle_because.clone();
        assert_eq!(why.as_deref(), Some("it sleeps"));
        let pending = submit(&b.engine, long(1));
        load(&b.engine, 2).unwrap();
        assert_eq!(calls(&b.mocks[0]), expected[1]);
        assert!(pending.nothing_for(Duration::from_millis(150)), "{kind:?}");
        assert!(b.engine.status().asleep);
        assert_eq!(calls(&b.mocks[0]).len(), 0, "{kind:?}");
        b.engine.wake().unwrap();
        assert_eq!(calls(&b.mocks[0]), expected[2]);
        assert_eq!(versions(pending), [2; 20], "{kind:?}");
        assert!(!b.engine.status().asleep);
    }
}

#[test]
fn weights_that_were_discarded_are_loaded_again_before_a_token_is_sampled() {
    for kind in [Kind::Vllm, Kind::Sglang] {
        let b = bench(&[kind], config());
        let pending = submit(&b.engine, long(1));
        b.engine.sleep().unwrap();
        assert_ne!(b.mocks[0].label(), "v1-000000aa");
        b.engine.wake().unwrap();
        assert_eq!(versions(pending), [1; 20], "{kind:?}");
        assert_eq!(b.mocks[0].label(), "v1-000000aa");
        let calls = calls(&b.mocks[0]);
        let load = ["/collective_rpc", "/update_weights_from_disk"];
        let loads = calls.iter().filter(|c| load.contains(&c.as_str()));
        assert_eq!(loads.count(), 1, "{calls:?}");
    }
}

#[test]
fn the_time_of_a_sleep_counts_against_no_request() {
    let mut config = config();
    config.router.max_wait_s = 2.0;
    let b = bench(&[Kind::Vllm], config);
    b.engine.sleep().unwrap();
    let pending = submit(&b.engine, long(1));
    std::thread::sleep(Duration::from_millis(2500));
    load(&b.engine, 2).unwrap();
    b.engine.wake().unwrap();
    assert_eq!(versions(pending), [2; 20]);
}

/// A session that was killed while its servers slept, or between the wake-up of weights and of the KV cache.
#[test]
fn a_server_that_another_session_put_to_sleep_is_woken_by_the_first_load() {
    for partly in [false, true] {
        let b = bench(&[Kind::Vllm], config());
        b.engine.sleep().unwrap();
        if partly {
            load(&b.engine, 2).unwrap();
        }
        drop(b.engine);
        assert!(b.mocks[0].state.sleeping.load(Ordering::SeqCst));
        let folder = weights_folder(b.dir.path());
        let backends = b.mocks.iter().map(deep).collect();
        let engine = RemoteEngine::new(backends, Some(folder), config()).unwrap();
        load(&engine, 3).unwrap();
        assert_eq!(versions(submit(&engine, long(1))), [3; 20]);
    }
}

#[test]
fn a_server_that_cannot_sleep_is_named_and_the_others_wake() {
    let b = bench(&[Kind::Vllm, Kind::Vllm], config());
    b.mocks[1].state.bare.store(true, Ordering::SeqCst);
    let error = b.engine.sleep().unwrap_err().to_string();
    assert!(error.contains("VLLM_SERVER_DEV_MODE=1"), "{error}");
    assert!(!b.engine.status().asleep);
    b.mocks[1].state.bare.store(false, Ordering::SeqCst);
    b.engine.wake().unwrap();
    assert_eq!(versions(submit(&b.engine, long(1))), [1; 20]);
    b.all_serve();
}

/// Answers that are lost leave no server that is taken to be awake.
#[test]
fn a_lost_answer_to_a_sleep_or_a_wake_up_is_made_good_by_the_next_one() {
    let b = bench(&[Kind::Vllm], config());
    for path in ["/sleep", "/wake_up"] {
        *b.mocks[0].state.loses.lock().unwrap() = Some(path.to_owned());
        let slept = b.engine.sleep();
        let pending = submit(&b.engine, long(1));
        let woke = b.engine.wake();
        assert!(slept.is_err() || woke.is_err(), "{path}");
        b.engine.wake().unwrap();
        assert_eq!(versions(pending), [1; 20], "{path}");
    }
}

#[test]
fn engines_that_keep_their_memory_say_so() {
    let fake = || Arc::new(FakeEngine::stepped(FakeConfig::default()).unwrap());
    assert!(fake().sleep().is_err() && fake().wake().is_err());
    let local: Arc<dyn Backend> = Arc::new(LocalBackend::new("fake", fake()));
    let mock = Mock::start(Kind::OpenaiWithIds);
    let openai: Arc<dyn Backend> = Arc::new(OpenaiBackend::new(server(&mock), None).unwrap());
    for backend in [local, openai] {
        let engine = RemoteEngine::new(vec![backend], None, config()).unwrap();
        let error = engine.sleep().unwrap_err().to_string();
        assert!(error.contains("sleep"), "{error}");
        assert!(!engine.status().asleep);
    }
}
