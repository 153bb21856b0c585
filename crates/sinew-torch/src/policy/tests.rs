//! The policy over a scripted server.

use super::*;
use crate::client::tests::{FakeTransport, Fate, client, packed};
use crate::options::OpenOptions;
use crate::options::{CriticOptions, Deadlines, LoraOptions};
use serde::Serialize;
use serde_json::json;
use sinew_train::checkpoint::CheckpointStore;
use sinew_train::optim::AdamWConfig;
use sinew_train::pack::pack;
use sinew_types::{EpisodeId, TrainRow};
use std::path::Path;

fn row(tokens: &[u32]) -> TrainRow {
    let n = tokens.len();
    TrainRow {
        episode: EpisodeId::new("e"),
        tokens: tokens.to_vec(),
        weights: vec![1.0; n],
        advantages: vec![1.0; n],
        behaviour_logprobs: vec![0.0; n],
        ..TrainRow::default()
    }
}

/// A micro-batch of two items.
fn batch() -> MicroBatch {
    let mut row = row(&[5, 6, 7]);
    row.weights[0] = 0.0;
    pack(&[row], 64).unwrap().micro_batches.remove(0)
}

fn setup(root: &Path) -> TorchSetup {
    TorchSetup {
        open: OpenOptions::new("model", 64),
        publish: PublishOptions::new(root),
        fence: 7,
        deadlines: Deadlines::default(),
    }
}

/// A policy of two ranks with these answers.
fn policy(
    answers: Vec<(&'static str, Vec<u8>)>,
    edit: impl FnOnce(&mut TorchSetup),
) -> (TorchPolicy, FakeTransport) {
    let (client, server) = client(&[]);
    let open = packed(&json!({"lanes": 2, "family": "llama", "vocabulary": 61}));
    server.0.lock().unwrap().answers = [vec![("open", open)], answers].concat();
    let mut setup = setup(Path::new("weights"));
    edit(&mut setup);
    (TorchPolicy::open(client, &setup).unwrap(), server)
}

fn with_critic(setup: &mut TorchSetup) {
    setup.open.critic = Some(CriticOptions {
        head: vec![0.0; 5],
        lr_scale: 1.0,
    });
}

fn with_adapters(setup: &mut TorchSetup) {
    setup.open.lora = Some(LoraOptions {
        rank: 4,
        alpha: 8.0,
        targets: Vec::new(),
        seed: 1,
        base_name: None,
    });
}

#[derive(Serialize)]
struct Answer<'a> {
    scores: Vec<ScoreColumns<'a>>,
}

fn scores(logprobs: &[f32]) -> Vec<u8> {
    let lane = ScoreColumns {
        logprobs: Bin::of(logprobs),
        ..ScoreColumns::default()
    };
    packed(&Answer { scores: vec![lane] })
}

const PLAIN: OutputChoice = OutputChoice {
    entropies: false,
    values: false,
    backward: false,
};

fn grads(items: usize) -> [ScoreGrads; 1] {
    [ScoreGrads {
        logprobs: vec![1.0; items],
        ..ScoreGrads::default()
    }]
}

#[test]
fn scores_are_those_of_the_answer_and_have_the_items_of_the_wave() {
    let batch = batch();
    assert_eq!(batch.items.len(), 2);
    let (mut policy, _) = policy(vec![("forward", scores(&[-1.0, -2.0]))], |_| {});
    assert_eq!(
        (policy.lanes(), policy.info().family.as_str()),
        (2, "llama")
    );
    let scores = policy.forward(&[&batch], PLAIN).unwrap();
    assert_eq!(scores[0].logprobs, [-1.0, -2.0]);
    let want = OutputChoice {
        entropies: true,
        ..PLAIN
    };
    let error = policy.forward(&[&batch], want).unwrap_err();
    let text = "model failed: the torch trainer answered 0 entropies, expected 2";
    assert_eq!(error.to_string(), text);
    let error = policy.forward(&[&batch; 3], PLAIN).unwrap_err();
    assert!(error.to_string().contains("computes 1 to 2"), "{error}");
    let error = policy.forward(&[&batch; 2], PLAIN).unwrap_err();
    assert!(
        error.to_string().contains("answered 1 scores, expected 2"),
        "{error}"
    );
}

#[test]
fn backward_needs_a_pass_and_its_items() {
    let batch = batch();
    let (mut policy, server) = policy(vec![("forward", scores(&[-1.0, -2.0]))], |_| {});
    let wave = [&batch];
    assert!(policy.backward(&wave, &grads(2)).is_err());
    policy.forward(&wave, PLAIN).unwrap();
    assert!(policy.backward(&wave, &grads(2)).is_err());
    let backward = OutputChoice {
        backward: true,
        ..PLAIN
    };
    policy.forward(&wave, backward).unwrap();
    let error = policy.backward(&wave, &grads(3)).unwrap_err();
    let text = "model failed: 3 derivatives of a micro-batch with 2 items";
    assert_eq!(error.to_string(), text);
    assert!(policy.backward(&wave, &[]).is_err());
    policy.backward(&wave, &grads(2)).unwrap();
    assert!(policy.backward(&wave, &grads(2)).is_err());
    let fake = server.0.lock().unwrap();
    let calls: Vec<&str> = fake
        .computed
        .iter()
        .map(|(verb, _)| verb.as_str())
        .collect();
    assert_eq!(calls, ["open", "forward", "forward", "backward"]);
}

#[test]
fn updates_are_applied_or_skipped() {
    let update = Update {
        number: 1,
        lr: 1e-3,
        adamw: AdamWConfig::default(),
        max_grad_norm: Some(1.0),
    };
    let applied = |answer: serde_json::Value| {
        let (mut policy, _) = policy(vec![("apply", packed(&answer))], |_| {});
        policy.apply(&update)
    };
    let outcome = applied(json!({"grad_norm": 2.5})).unwrap();
    assert_eq!(outcome, Outcome::Applied { grad_norm: 2.5 });
    let tensor = "lm_head.weight".to_owned();
    let outcome = applied(json!({"skipped": tensor})).unwrap();
    assert_eq!(outcome, Outcome::SkippedNonFinite { tensor });
    assert!(applied(json!({})).is_err());
}

#[test]
fn the_base_exists_only_under_adapters() {
    let batch = batch();
    let (mut full, _) = policy(Vec::new(), |_| {});
    assert!(full.use_base(true).is_err());
    let answer = vec![("forward", scores(&[-1.0, -2.0]))];
    let (mut policy, server) = policy(answer, with_adapters);
    policy.use_base(true).unwrap();
    policy.forward(&[&batch], PLAIN).unwrap();
    let backward = OutputChoice {
        backward: true,
        ..PLAIN
    };
    assert!(policy.forward(&[&batch], backward).is_err());
    let fake = server.0.lock().unwrap();
    let base = b"\xa2of\xa4base";
    assert!(fake.computed[1].1.windows(base.len()).any(|w| w == base));
}

#[test]
fn experts_are_replayed_by_routers_that_allow_it() {
    let opened = |routers: serde_json::Value, edit: fn(&mut TorchSetup)| {
        let (client, server) = client(&[]);
        let open = packed(&json!({"lanes": 1, "vocabulary": 61, "routers": routers}));
        server.0.lock().unwrap().answers = vec![("open", open)];
        let mut setup = setup(Path::new("weights"));
        edit(&mut setup);
        TorchPolicy::open(client, &setup).unwrap()
    };
    let routers = || json!({"layers": 2, "top_k": 2, "experts": 4});
    let mut policy = opened(routers(), with_adapters);
    assert_eq!(policy.info().routers.unwrap().experts, 4);
    assert!(policy.replays_routes());
    policy.use_base(true).unwrap();
    assert!(!policy.replays_routes());
    assert!(!opened(json!(null), with_adapters).replays_routes());
    let off = opened(routers(), |setup| setup.open.replay_routes = false);
    assert!(!off.replays_routes());
}

#[test]
fn the_load_balancing_loss_is_a_mean_over_tokens() {
    let mut batch = batch();
    batch.packed_tokens = 4;
    let lane = |router: f32| ScoreColumns {
        logprobs: Bin::of(&[-1.0f32, -2.0]),
        router,
        ..ScoreColumns::default()
    };
    let answer = packed(&Answer {
        scores: vec![lane(3.0), lane(1.0)],
    });
    let (mut policy, server) = policy(vec![("forward", answer)], |setup| {
        setup.open.router_loss = 0.5;
    });
    let backward = OutputChoice {
        backward: true,
        ..PLAIN
    };
    let wave = [&batch, &batch];
    policy.forward(&wave, backward).unwrap();
    let slopes = [grads(2), grads(2)].concat();
    policy.backward(&wave, &slopes).unwrap();
    assert_eq!(policy.take_router_loss(), Some(2.0));
    assert_eq!(policy.take_router_loss(), None);
    let fake = server.0.lock().unwrap();
    // A factor of 0.5 times half of the tokens.
    let router = [&b"\xa6router\xca"[..], &0.25f32.to_be_bytes()].concat();
    let body = &fake.computed[2].1;
    assert_eq!(
        body.windows(router.len()).filter(|w| *w == router).count(),
        2
    );
    let open = b"\xabrouter_loss\xc3";
    assert!(fake.computed[0].1.windows(open.len()).any(|w| w == open));
}

#[test]
fn values_need_a_critic() {
    let batch = batch();
    let want = OutputChoice {
        values: true,
        ..PLAIN
    };
    let (mut plain, _) = policy(Vec::new(), |_| {});
    assert!(!plain.has_critic());
    let error = plain.forward(&[&batch], want).unwrap_err();
    assert_eq!(error.to_string(), "model failed: there is no critic");
    let (critic, _) = policy(Vec::new(), with_critic);
    assert!(critic.has_critic());
}

#[test]
fn rankings_leave_out_what_has_no_probability() {
    #[derive(Serialize)]
    struct Tops<'a> {
        ids: Bin<'a>,
        logprobs: Bin<'a>,
    }
    #[derive(Serialize)]
    struct TopsAnswer<'a> {
        tops: Vec<Tops<'a>>,
    }
    let tops = Tops {
        ids: Bin::of(&[4u32, 5, 6, 7]),
        logprobs: Bin::of(&[-0.1f32, -2.0, 0.0, f32::NEG_INFINITY]),
    };
    let answer = packed(&TopsAnswer { tops: vec![tops] });
    let (mut policy, _) = policy(vec![("top", answer)], |_| {});
    let top = policy.top(&[&batch()], 2).unwrap();
    let ids: Vec<Vec<u32>> = top[0]
        .iter()
        .map(|item| item.iter().map(|t| t.id).collect())
        .collect();
    assert_eq!(ids, [vec![4, 5], vec![6]]);
}

#[test]
fn files_of_weights_are_known_by_their_names() {
    let file = |path: &str| StoredFile {
        path: path.to_owned(),
        bytes: 1,
        blake3: String::new(),
    };
    let names = |paths: &[&str]| {
        let files: Vec<StoredFile> = paths.iter().map(|path| file(path)).collect();
        weight_files(&files)
    };
    let shards = [
        "optimizer/.metadata",
        "critic.safetensors",
        "model.safetensors.index.json",
        "config.json",
        "model-00002-of-00002.safetensors",
        "model-00001-of-00002.safetensors",
    ];
    let found = names(&shards);
    assert_eq!(
        found,
        [
            "model-00001-of-00002.safetensors",
            "model-00002-of-00002.safetensors",
            "model.safetensors.index.json",
            "critic.safetensors"
        ]
    );
    let kind = |names: &[String]| Trained::of(names).map(Trained::words);
    assert_eq!(kind(&found), Some("all weights and a critic"));
    let adapters = names(&["adapter_model.safetensors", "adapter_config.json"]);
    assert_eq!(kind(&adapters), Some("adapters"));
    assert_eq!(kind(&names(&["model.safetensors"])), Some("all weights"));
    assert_eq!(kind(&names(&["critic.safetensors"])), None);
    assert_eq!(kind(&["model.gguf".to_owned()]), None);
}

#[test]
fn files_that_the_ranks_write_become_part_of_the_checkpoint() {
    let dir = tempfile::tempdir().unwrap();
    let store = CheckpointStore::open(dir.path().join("checkpoints"), 1).unwrap();
    let files = ["model.safetensors", "optimizer/__0_0.distcp", "config.json"];
    let entry = |path: &&str| json!({"path": path, "bytes": 4, "blake3": "00"});
    let written: Vec<_> = files.iter().map(entry).collect();
    let answer = packed(&json!({"files": written}));
    let (mut policy, server) = policy(vec![("save", answer.clone())], |_| {});
    let mut draft = store.begin(1).unwrap();
    std::fs::create_dir(draft.path().join("optimizer")).unwrap();
    for file in files {
        std::fs::write(draft.path().join(file), b"text").unwrap();
    }
    assert_eq!(policy.save(&mut draft).unwrap(), ["model.safetensors"]);
    let path = draft.commit().unwrap();
    let sums = std::fs::read_to_string(path.join("checksums.json")).unwrap();
    assert!(sums.contains("optimizer/__0_0.distcp"), "{sums}");
    let folder = dir.path().join("checkpoints");
    let sent = String::from_utf8_lossy(&server.0.lock().unwrap().computed[1].1).into_owned();
    assert!(sent.contains(&*folder.to_string_lossy()), "{sent}");
    // A file that is not there, and files of another kind.
    let mut draft = store.begin(2).unwrap();
    assert!(policy.save(&mut draft).is_err());
    let (mut adapters, _) = self::policy(vec![("save", answer)], with_adapters);
    for file in files {
        let path = draft.path().join(file);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, b"text").unwrap();
    }
    let error = adapters.save(&mut draft).unwrap_err().to_string();
    assert!(error.contains("expected are files of adapters"), "{error}");
}

#[test]
fn checkpoints_of_another_kind_are_refused_without_a_call() {
    let loaded = LoadedCheckpoint {
        path: "checkpoints/step-00000001".into(),
        skipped: Vec::new(),
    };
    let (mut policy, server) = policy(Vec::new(), |_| {});
    let names = |name: &str| vec![name.to_owned()];
    let refused = policy.load(&loaded, &names("adapter_model.safetensors"), 1);
    let text = refused.unwrap_err().to_string();
    assert!(
        text.contains("it holds adapters, this run trains all weights"),
        "{text}"
    );
    assert!(policy.load(&loaded, &[], 1).is_err());
    server.0.lock().unwrap().fates = [Fate::Error("input")].into();
    let refused = policy.load(&loaded, &names("model.safetensors"), 1);
    assert!(matches!(refused, Err(CheckpointError::Mismatch { .. })));
    policy
        .load(&loaded, &names("model.safetensors"), 1)
        .unwrap();
    assert_eq!(server.0.lock().unwrap().computed.len(), 2);
}

#[test]
fn frozen_models_only_score() {
    let batch = batch();
    let answer = vec![("forward", scores(&[-1.0, -2.0]))];
    let (policy, server) = policy(answer, |_| {});
    let mut scorer = policy.scorer("teacher");
    assert_eq!(scorer.lanes(), 2);
    scorer.forward(&[&batch], PLAIN).unwrap();
    let text = scorer.zero_gradients().unwrap_err().to_string();
    assert!(text.contains("`teacher` is frozen"), "{text}");
    assert!(scorer.weights(PolicyVersion(1)).is_err());
    let fake = server.0.lock().unwrap();
    let of = b"\xa2of\xa7teacher";
    assert!(fake.computed[1].1.windows(of.len()).any(|w| w == of));
}

#[test]
fn only_adapters_are_published_as_adapters() {
    let (client, _) = client(&[]);
    let mut setup = setup(Path::new("weights"));
    setup.publish.form = PublishForm::Adapter;
    assert!(matches!(
        TorchPolicy::open(client, &setup),
        Err(TorchError::Setup(_))
    ));
}

/// The trainer leaves the devices once its weights are published, and comes back after the engines left.
#[test]
fn devices_are_used_in_turns() {
    let dir = tempfile::tempdir().unwrap();
    let (mut policy, server) = policy(vec![("forward", scores(&[-1.0, -2.0]))], |setup| {
        setup.publish = PublishOptions::new(dir.path());
    });
    let published = packed(&json!({"files": [], "tensors": []}));
    server
        .0
        .lock()
        .unwrap()
        .answers
        .push(("publish", published));
    let engines = server.clone();
    let mut refusals = vec![Err("no sleep mode".to_owned()), Ok(())];
    policy.take_turns(Box::new(move || {
        engines
            .0
            .lock()
            .unwrap()
            .computed
            .push(("free".into(), Vec::new()));
        refusals.pop().unwrap_or(Ok(()))
    }));
    let batch = batch();
    policy.forward(&[&batch], PLAIN).unwrap();
    policy.weights(PolicyVersion(1)).unwrap();
    policy.zero_gradients().unwrap();
    policy.forward(&[&batch], PLAIN).unwrap();
    policy.forward(&[&batch], PLAIN).unwrap();
    policy.weights(PolicyVersion(2)).unwrap();
    let refused = policy.forward(&[&batch], PLAIN).unwrap_err();
    assert!(refused.to_string().contains("no sleep mode"), "{refused}");
    policy.forward(&[&batch], PLAIN).unwrap();
    let fake = server.0.lock().unwrap();
    let verbs: Vec<&str> = fake.computed.iter().map(|(verb, _)| &**verb).collect();
    let first = [
        "open", "forward", "publish", "reside", "zero", "free", "reside",
    ];
    let second = [
        "forward", "forward", "publish", "reside", "free", "free", "reside", "forward",
    ];
    assert_eq!(verbs, [&first[..], &second[..]].concat());
}
