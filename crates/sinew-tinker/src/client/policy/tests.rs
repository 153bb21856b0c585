//! The policy against a service in this process.

use super::*;
use crate::client::fake::{BASE, Fake, Fault, VOCAB};
use crate::client::options::ServiceOptions;
use crate::client::testing::row;
use sinew_train::checkpoint::CheckpointStore;
use sinew_train::optim::AdamWConfig;
use sinew_train::pack::{Packing, pack_flat};
use sinew_types::TrainRow;
use std::time::Duration;

const BACKWARD: OutputChoice = OutputChoice {
    entropies: false,
    values: false,
    backward: true,
};

fn service(fake: &Fake) -> ServiceOptions {
    ServiceOptions {
        timeout: Duration::from_secs(60),
        run: "test".to_owned(),
        ..ServiceOptions::new(fake.url(), "secret")
    }
}

fn setup(fake: &Fake) -> TinkerSetup {
    TinkerSetup::new(service(fake))
}

fn open(fake: &Fake) -> TinkerPolicy {
    TinkerPolicy::open(&setup(fake)).unwrap()
}

fn rows() -> Vec<TrainRow> {
    vec![
        row(&[1, 2, 3, 4], 2),
        row(&[1, 2, 5, 6, 7], 2),
        row(&[3, 1], 1),
    ]
}

fn packed() -> Packing {
    pack_flat(&rows(), 6).unwrap()
}

fn update(number: u64) -> Update {
    Update {
        number,
        lr: 0.1,
        adamw: AdamWConfig::default(),
        max_grad_norm: Some(1.0),
    }
}

/// One update by every item with this derivative; returns its scores.
fn train(policy: &mut TinkerPolicy, number: u64, slope: f32) -> Result<Vec<f32>, PolicyError> {
    let packing = packed();
    policy.zero_gradients()?;
    let mut all = Vec::new();
    for batch in &packing.micro_batches {
        let scores = policy.forward(&[batch], BACKWARD)?.remove(0).logprobs;
        let grads = ScoreGrads {
            logprobs: vec![slope; scores.len()],
            ..ScoreGrads::default()
        };
        policy.backward(&[batch], &[grads])?;
        all.extend(scores);
    }
    policy.apply(&update(number))?;
    Ok(all)
}

/// Log-probabilities of the items by a table of logits.
fn expected(table: &[f32]) -> Vec<f32> {
    let packing = packed();
    let mut all = Vec::new();
    for batch in &packing.micro_batches {
        for item in &batch.items {
            let at = batch.tokens[item.row as usize] as usize * VOCAB;
            let row = &table[at..at + VOCAB];
            let sum: f32 = row.iter().map(|x| x.exp()).sum();
            all.push(row[item.target as usize] - sum.ln());
        }
    }
    all
}

fn near(a: &[f32], b: &[f32]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| (a - b).abs() < 1e-5)
}

/// The table after `updates` updates without a fault.
fn trained(updates: u64) -> Vec<f32> {
    let fake = Fake::start();
    let mut policy = open(&fake);
    for number in 1..=updates {
        train(&mut policy, number, -1.0).unwrap();
    }
    fake.table(policy.model_id())
}

#[test]
fn an_update_is_one_pass_with_gradients_and_one_step() {
    let fake = Fake::start();
    let mut policy = open(&fake);
    assert_eq!((policy.base_model(), policy.context()), (BASE, Some(64)));
    let scores = train(&mut policy, 1, -1.0).unwrap();
    assert!(near(&scores, &expected(&fake.base())), "{scores:?}");
    let after = train(&mut policy, 2, -1.0).unwrap();
    let sum = |scores: &[f32]| scores.iter().sum::<f32>();
    assert!(sum(&after) > sum(&scores), "an update goes downhill");
    let micro_batches = packed().micro_batches.len();
    assert!(micro_batches > 1);
    let (passes, steps) = fake.with(|state| (state.passes.clone(), state.steps.clone()));
    let backward: Vec<usize> = passes.iter().filter(|p| p.1).map(|p| p.0).collect();
    assert_eq!(backward, [3, 3], "all datums of an update in one request");
    assert_eq!(passes.len(), 2 * (micro_batches + 1));
    assert_eq!(steps.len(), 2);
    let number = |name: &str| steps[0][name].as_f64().unwrap() as f32;
    assert_eq!(
        (number("learning_rate"), number("grad_clip_norm")),
        (0.1, 1.0)
    );
    assert_eq!((number("beta2"), number("eps")), (0.95, 1e-8));
}

#[test]
fn gradients_that_are_not_applied_never_reach_the_service() {
    let fake = Fake::start();
    let mut policy = open(&fake);
    let packing = packed();
    let batch = &packing.micro_batches[0];
    let backward = |policy: &mut TinkerPolicy, slope: f32| {
        let items = policy.forward(&[batch], BACKWARD).unwrap()[0]
            .logprobs
            .len();
        let grads = ScoreGrads {
            logprobs: vec![slope; items],
            ..ScoreGrads::default()
        };
        policy.backward(&[batch], &[grads]).unwrap();
    };
    backward(&mut policy, 5.0);
    policy.zero_gradients().unwrap();
    backward(&mut policy, 0.0);
    let Outcome::Applied { grad_norm } = policy.apply(&update(1)).unwrap() else {
        panic!("an update");
    };
    assert_eq!(grad_norm, 0.0);
    assert_eq!(fake.table(policy.model_id()), fake.base());
    assert!(fake.with(|state| state.passes.iter().all(|pass| !pass.1)));
    backward(&mut policy, f32::NAN);
    let skipped = policy.apply(&update(1)).unwrap();
    assert!(matches!(skipped, Outcome::SkippedNonFinite { .. }));
    assert_eq!(fake.table(policy.model_id()), fake.base());
    let again = policy.backward(&[batch], &[ScoreGrads::default()]);
    assert!(
        again
            .unwrap_err()
            .to_string()
            .contains("without a forward pass")
    );
}

#[test]
fn several_passes_add_up() {
    let fake = Fake::start();
    let (mut once, mut twice) = (open(&fake), open(&fake));
    train(&mut once, 1, -2.0).unwrap();
    let packing = packed();
    for batch in packing.micro_batches.iter().chain(&packing.micro_batches) {
        let items = twice.forward(&[batch], BACKWARD).unwrap()[0].logprobs.len();
        let grads = ScoreGrads {
            logprobs: vec![-1.0; items],
            ..ScoreGrads::default()
        };
        twice.backward(&[batch], &[grads]).unwrap();
    }
    twice.apply(&update(1)).unwrap();
    let (a, b) = (fake.table(once.model_id()), fake.table(twice.model_id()));
    assert!(near(&a, &b));
}

#[test]
fn faults_of_every_call_change_nothing() {
    let expected = &trained(2);
    let calls = &[
        "client/config",
        "get_server_capabilities",
        "create_session",
        "create_model",
        "forward_backward",
        "optim_step",
        "retrieve_future",
    ];
    let faults = [
        Fault::Lost,
        Fault::Status(500, "down"),
        Fault::Status(503, "{\"detail\": \"starting\"}"),
        Fault::Status(429, "busy"),
        Fault::Status(408, "late"),
        Fault::Status(409, "in doubt"),
        Fault::Late(400),
    ];
    std::thread::scope(|scope| {
        for fault in &faults {
            scope.spawn(move || {
                let fake = Fake::start();
                for call in calls {
                    // Settings are asked for under a path of two parts.
                    fake.fault(call.split('/').next().unwrap(), fault.clone());
                }
                let mut policy = open(&fake);
                fake.fault("forward_backward", fault.clone());
                train(&mut policy, 1, -1.0).unwrap();
                fake.fault("retrieve_future", fault.clone());
                train(&mut policy, 2, -1.0).unwrap();
                assert_eq!(&fake.table(policy.model_id()), expected, "{fault:?}");
                assert_eq!(fake.with(|state| state.steps.len()), 2, "{fault:?}");
            });
        }
    });
}

#[test]
fn a_service_that_is_killed_and_started_again_goes_on() {
    let mut fake = Fake::start();
    let mut policy = open(&fake);
    train(&mut policy, 1, -1.0).unwrap();
    fake.kill();
    let model = policy.model_id().to_owned();
    let trainer = std::thread::spawn(move || train(&mut policy, 2, -1.0).map(drop));
    std::thread::sleep(Duration::from_millis(600));
    fake.restart();
    trainer.join().unwrap().unwrap();
    assert_eq!(fake.table(&model), trained(2));
}

#[test]
fn batches_are_divided_by_the_settings_of_the_service() {
    let fake = Fake::start();
    let config = serde_json::json!({ "fwdbwd_max_chunk_len": 1 });
    fake.with(|state| state.config = config);
    let mut policy = open(&fake);
    let packing = pack_flat(&rows(), 64).unwrap();
    let [batch] = &packing.micro_batches[..] else {
        panic!("one micro-batch");
    };
    let scores = policy
        .forward(&[batch], BACKWARD)
        .unwrap()
        .remove(0)
        .logprobs;
    let grads = ScoreGrads {
        logprobs: vec![-1.0; scores.len()],
        ..ScoreGrads::default()
    };
    policy.backward(&[batch], &[grads]).unwrap();
    policy.apply(&update(1)).unwrap();
    let passes = fake.with(|state| state.passes.clone());
    assert_eq!(passes, [[(1, false); 3], [(1, true); 3]].concat());
    assert!(near(&fake.table(policy.model_id()), &trained(1)));
}

#[test]
fn a_part_of_an_update_ends_the_model() {
    let fake = Fake::start();
    let config = serde_json::json!({ "fwdbwd_max_chunk_len": 1 });
    fake.with(|state| state.config = config);
    let mut policy = open(&fake);
    let packing = pack_flat(&rows(), 64).unwrap();
    let batch = &packing.micro_batches[0];
    let items = policy.forward(&[batch], BACKWARD).unwrap()[0]
        .logprobs
        .len();
    let grads = ScoreGrads {
        logprobs: vec![-1.0; items],
        ..ScoreGrads::default()
    };
    policy.backward(&[batch], &[grads]).unwrap();
    fake.fault("forward_backward", Fault::Fails("server"));
    let error = policy.apply(&update(1)).unwrap_err();
    assert!(matches!(&error, PolicyError::Lost(_)), "{error}");
    assert!(error.to_string().contains("a part of an update"), "{error}");
    assert!(
        fake.with(|state| state.steps.is_empty()),
        "it is not applied"
    );
    let later = policy.forward(&[batch], OutputChoice::default());
    assert_eq!(later.unwrap_err(), error);
    assert!(open(&fake).forward(&[batch], BACKWARD).is_ok());
}

#[test]
fn failures_are_the_requests_or_the_services() {
    let fake = Fake::start();
    let mut policy = open(&fake);
    let packing = packed();
    let batch = &packing.micro_batches[0];
    let mut failed = |fault: Fault| {
        fake.fault("forward_backward", fault);
        let error = policy.forward(&[batch], OutputChoice::default());
        let error = error.unwrap_err();
        // One refused command leaves the model as it was.
        let usable = policy.forward(&[batch], OutputChoice::default()).is_ok();
        (
            matches!(error, PolicyError::Lost(_)),
            usable,
            error.to_string(),
        )
    };
    let (lost, usable, text) = failed(Fault::Fails("user"));
    assert!(!lost && usable && text.contains("it failed"), "{text}");
    let (lost, usable, _) = failed(Fault::Fails("server"));
    assert!(lost && usable);
    let refused = Fault::Status(422, "{\"detail\": \"data[0] is wrong\"}");
    let (lost, usable, text) = failed(refused);
    assert!(
        !lost && usable && text.contains("data[0] is wrong"),
        "{text}"
    );
    let (lost, usable, _) = failed(Fault::Status(404, "{\"detail\": \"no model\"}"));
    assert!(lost && !usable, "the model is gone");
}

#[test]
fn keys_and_models_that_are_not_there_are_named() {
    let fake = Fake::start();
    let mut wrong = setup(&fake);
    wrong.service.api_key = "other".to_owned();
    let error = TinkerPolicy::open(&wrong).unwrap_err().to_string();
    assert!(
        error.contains("unknown key") && error.contains("api_key_env"),
        "{error}"
    );
    assert!(!error.contains("other"), "{error}");
    let mut unknown = setup(&fake);
    unknown.base_model = Some("large".to_owned());
    let error = TinkerPolicy::open(&unknown).unwrap_err().to_string();
    assert!(
        error.contains("\"large\"") && error.contains(BASE),
        "{error}"
    );
    let mut nowhere = setup(&fake);
    nowhere.service.timeout = Duration::from_millis(700);
    nowhere.service.url = "http://127.0.0.1:1".to_owned();
    let error = TinkerPolicy::open(&nowhere).unwrap_err();
    assert!(matches!(error, ClientError::Connection { .. }), "{error}");
}

#[test]
fn a_run_that_is_killed_continues_from_its_checkpoint() {
    let fake = Fake::start();
    let dir = tempfile::tempdir().unwrap();
    let store = CheckpointStore::open(dir.path(), 1).unwrap();
    let mut policy = open(&fake);
    let save = |policy: &mut TinkerPolicy, number: u64| {
        let mut draft = store.begin(number).unwrap();
        let files = policy.save(&mut draft).unwrap();
        draft.commit().unwrap();
        files
    };
    train(&mut policy, 1, -1.0).unwrap();
    train(&mut policy, 2, -1.0).unwrap();
    let files = save(&mut policy, 2);
    assert_eq!(files, [STATE_FILE]);
    // Steps after the checkpoint are lost with the process.
    train(&mut policy, 3, -5.0).unwrap();
    drop(policy);
    let mut resumed = open(&fake);
    let loaded = store.load().unwrap().unwrap();
    resumed.load(&loaded, &files, 2).unwrap();
    train(&mut resumed, 3, -1.0).unwrap();
    assert_eq!(fake.table(resumed.model_id()), trained(3));
    for number in 3..6 {
        save(&mut resumed, number);
    }
    let states: Vec<String> = fake.with(|state| state.saved.keys().cloned().collect());
    assert_eq!(
        states.len(),
        2,
        "the kept one and the one before: {states:?}"
    );
    let loaded = store.load().unwrap().unwrap();
    let named = ServiceState::of_checkpoint(&loaded.path).unwrap().unwrap();
    assert!(states.contains(&named.path), "{named:?}");
    std::fs::remove_file(loaded.path.join(STATE_FILE)).unwrap();
    assert!(resumed.load(&loaded, &files, 5).is_err());
    let other = resumed.load(&loaded, &["model.safetensors".to_owned()], 5);
    let text = other.unwrap_err().to_string();
    assert!(text.contains("at a Tinker service"), "{text}");
}

#[test]
fn checkpoints_of_other_models_are_refused() {
    let fake = Fake::start();
    let dir = tempfile::tempdir().unwrap();
    let store = CheckpointStore::open(dir.path(), 1).unwrap();
    let mut draft = store.begin(1).unwrap();
    let files = open(&fake).save(&mut draft).unwrap();
    draft.commit().unwrap();
    let loaded = store.load().unwrap().unwrap();
    let mut with_adapters = setup(&fake);
    with_adapters.adapters = Some(AdapterOptions {
        rank: 4,
        attn: true,
        mlp: true,
        unembed: false,
    });
    let mut policy = TinkerPolicy::open(&with_adapters).unwrap();
    let error = policy.load(&loaded, &files, 0).unwrap_err().to_string();
    assert!(error.contains("does not fit this run"), "{error}");
}

#[test]
fn versions_have_addresses_and_old_ones_are_deleted() {
    let fake = Fake::start();
    let mut policy = open(&fake);
    let mut paths = Vec::new();
    for version in [0, 0, 1, 2, 3] {
        let weights = policy.weights(PolicyVersion(version)).unwrap();
        assert!(weights.names().is_empty() && weights.folder().is_none());
        paths.push(weights.address().unwrap().to_owned());
    }
    assert!(paths[0].starts_with("tinker://s1:train:0/sampler_weights/v00000000-"));
    let (saved, deleted) = fake.with(|state| (state.saved.clone(), state.deleted.clone()));
    assert_eq!(deleted, paths[..2]);
    assert!(saved.keys().eq(&paths[2..]), "{saved:?}");
}

#[test]
fn models_are_freed_when_their_owner_ends() {
    let fake = Fake::start();
    let policy = open(&fake);
    let model = policy.model_id().to_owned();
    let reference = policy.reference().unwrap();
    drop((policy, reference));
    let unloaded = fake.with(|state| state.unloaded.clone());
    assert_eq!(unloaded, [model, "s1:train:1".to_owned()]);
}

#[test]
fn references_stay_as_the_model_began() {
    let fake = Fake::start();
    let mut policy = open(&fake);
    let mut reference = policy.reference().unwrap();
    let mut sampler = policy.scorer(BASE).unwrap();
    train(&mut policy, 1, -1.0).unwrap();
    let address = policy.weights(PolicyVersion(1)).unwrap();
    let mut newest = policy.scorer(address.address().unwrap()).unwrap();
    let before = expected(&fake.base());
    let after = expected(&fake.table(policy.model_id()));
    let packing = packed();
    let wave: Vec<&MicroBatch> = packing.micro_batches.iter().collect();
    let scored = |model: &mut TinkerScorer| -> Vec<f32> {
        let scores = model.forward(&wave, OutputChoice::default()).unwrap();
        scores.into_iter().flat_map(|s| s.logprobs).collect()
    };
    assert!(near(&scored(&mut reference), &before));
    assert!(near(&scored(&mut sampler), &before));
    assert!(near(&scored(&mut newest), &after));
    let top = sampler.top(&wave, 2).unwrap();
    let items = packing.micro_batches.iter().flat_map(|b| &b.items);
    let top: Vec<_> = top.into_iter().flatten().collect();
    assert_eq!(top.len(), items.count());
    assert!(
        top.iter()
            .all(|t| t.len() == 2 && t[0].logprob >= t[1].logprob)
    );
    assert!(reference.top(&wave, 2).is_err());
    let frozen = reference.apply(&update(1)).unwrap_err().to_string();
    assert!(frozen.contains("frozen"), "{frozen}");
}

#[test]
fn training_may_begin_with_a_state_of_the_service() {
    let fake = Fake::start();
    let dir = tempfile::tempdir().unwrap();
    let store = CheckpointStore::open(dir.path(), 1).unwrap();
    let mut first = open(&fake);
    train(&mut first, 1, -1.0).unwrap();
    let mut draft = store.begin(1).unwrap();
    first.save(&mut draft).unwrap();
    let folder = draft.commit().unwrap();
    let state = ServiceState::of_checkpoint(&folder).unwrap().unwrap();
    let second = TinkerSetup {
        start: Some(state.path),
        ..setup(&fake)
    };
    let second = TinkerPolicy::open(&second).unwrap();
    let began = fake.table(second.model_id());
    assert_eq!(began, fake.table(first.model_id()));
    let mut reference = second.reference().unwrap();
    let packing = packed();
    let wave: Vec<&MicroBatch> = packing.micro_batches.iter().collect();
    let scores = reference.forward(&wave, OutputChoice::default()).unwrap();
    let scores: Vec<f32> = scores.into_iter().flat_map(|s| s.logprobs).collect();
    assert!(near(&scores, &expected(&began)));
}

#[test]
fn a_norm_that_is_not_reported_is_that_of_the_derivatives() {
    let fake = Fake::start();
    fake.with(|state| state.reports_norm = false);
    let mut policy = open(&fake);
    let packing = packed();
    let mut items = 0;
    for batch in &packing.micro_batches {
        let n = policy.forward(&[batch], BACKWARD).unwrap()[0]
            .logprobs
            .len();
        let grads = ScoreGrads {
            logprobs: vec![-2.0; n],
            ..ScoreGrads::default()
        };
        policy.backward(&[batch], &[grads]).unwrap();
        items += n;
    }
    let applied = policy.apply(&update(1)).unwrap();
    let expected = (4.0 * items as f64).sqrt();
    assert!(
        matches!(applied, Outcome::Applied { grad_norm } if (grad_norm - expected).abs() < 1e-9),
        "{applied:?}"
    );
}

#[test]
fn what_the_protocol_lacks_is_refused() {
    let fake = Fake::start();
    let mut policy = open(&fake);
    let packing = packed();
    let batch = &packing.micro_batches[0];
    assert!(!policy.has_entropies() && !policy.has_critic() && !policy.shares_prefixes());
    for (want, named) in [
        (
            OutputChoice {
                entropies: true,
                ..OutputChoice::default()
            },
            "entropies",
        ),
        (
            OutputChoice {
                values: true,
                ..OutputChoice::default()
            },
            "critic",
        ),
    ] {
        let error = policy.forward(&[batch], want).unwrap_err().to_string();
        assert!(error.contains(named), "{error}");
    }
    assert!(policy.use_base(true).is_err() && policy.top(&[batch], 2).is_err());
    let grads = ScoreGrads {
        entropies: vec![1.0],
        ..ScoreGrads::default()
    };
    policy.forward(&[batch], BACKWARD).unwrap();
    assert!(policy.backward(&[batch], &[grads]).is_err());
}
