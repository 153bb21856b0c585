//! The desk as a whole: commands, kills, turns and samples.

use super::testing::{
    BASE, Bench, Death, config, create, embedded, forward_backward, lora, save, set_clock, step,
    switched, switched_support,
};
use super::types::{
    Category, Command, FinishReason, Metadata, ModelId, Outcome, Page, QueueState, Refusal, Reply,
    Retrieved, SampleInput, SampleOutput, SampleParams, SamplerId, SamplerRef, SessionId, Stop,
    StopReason, TargetLayout, Tenant,
};
use super::{DeskLimits, TenantLimits};
use crate::{Tensor, TensorValues};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

const ALL: Page = Page {
    offset: 0,
    limit: 100,
};

fn model_of(reply: Reply) -> ModelId {
    match reply {
        Reply::CreateModel { model } => model,
        other => panic!("{other:?}"),
    }
}

fn new_model(bench: &Bench, session: &SessionId, seq: u64, rank: Option<u32>) -> ModelId {
    model_of(bench.reply(create(session, seq, rank.map(lora))))
}

/// The sum of a loss.
fn loss(reply: &Reply) -> f64 {
    match reply {
        Reply::ForwardBackward(output) => output.metrics["loss:sum"],
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_model_learns_and_its_commands_run_once() {
    let dir = tempfile::tempdir().unwrap();
    let bench = Bench::simple(dir.path());
    let session = bench.session().unwrap();
    let model = new_model(&bench, &session, 0, Some(4));
    assert_eq!(model, ModelId::of(&session, 0));
    let mut losses = Vec::new();
    for i in 0..4 {
        losses.push(loss(&bench.reply(forward_backward(&model, 2 * i + 1, 0))));
        let Reply::OptimStep { metrics } = bench.reply(step(&model, 2 * i + 2)) else {
            panic!("a step has metrics");
        };
        assert!(metrics["grad_norm"] > 0.0);
        assert_eq!(metrics["skipped_nonfinite"], 0.0);
    }
    assert!(losses[3] < losses[0], "{losses:?}");
    // The same command again has the same future; another one in its place is refused.
    let again = bench.submit(forward_backward(&model, 1, 0)).unwrap();
    let known = bench.outcome(&again).unwrap();
    assert!(matches!(&known, Outcome::Value(reply) if loss(reply) == losses[0]));
    let other = bench.submit(forward_backward(&model, 1, 9));
    assert!(matches!(other, Err(Refusal::Conflict(_))), "{other:?}");
    let info = bench.wait(bench.desk.model(&bench.tenant, &model)).unwrap();
    assert_eq!((info.steps, info.ended), (4, None));
    let stranger = Tenant {
        name: "bob".to_owned(),
    };
    let hidden = bench.wait(bench.desk.model(&stranger, &model));
    assert!(matches!(hidden, Err(Refusal::NotFound { .. })));
    let hidden = bench.wait(bench.desk.retrieve(&stranger, &again, Duration::ZERO));
    assert!(matches!(hidden, Err(Refusal::NotFound { .. })));
}

#[test]
fn commands_wait_for_their_order_and_wrong_ones_keep_it() {
    let dir = tempfile::tempdir().unwrap();
    let bench = Bench::simple(dir.path());
    let session = bench.session().unwrap();
    let model = new_model(&bench, &session, 0, Some(2));
    let third = bench.submit(step(&model, 3)).unwrap();
    let second = bench.submit(forward_backward(&model, 2, 1)).unwrap();
    let short = Duration::from_millis(50);
    let waits = bench.wait(bench.desk.retrieve(&bench.tenant, &third, short));
    assert_eq!(
        waits,
        Ok(Retrieved::Pending {
            queue: QueueState::Active
        })
    );
    let mut wrong = forward_backward(&model, 1, 1);
    if let Command::ForwardBackward { loss, .. } = &mut wrong {
        loss.name = "unknown".to_owned();
    }
    let text = bench.failure(wrong);
    assert!(text.contains("unknown"), "{text}");
    assert!(matches!(bench.outcome(&second), Ok(Outcome::Value(_))));
    assert!(matches!(bench.outcome(&third), Ok(Outcome::Value(_))));
    let early = bench.submit(step(&model, 0));
    assert!(matches!(early, Err(Refusal::Invalid { .. })));
    let base = bench.submit(create(&session, 1, Some(lora(100_000))));
    assert!(matches!(base, Err(Refusal::Invalid { .. })));
    let Command::CreateModel { session, seq, spec } = create(&session, 1, None) else {
        panic!("a creation");
    };
    let unserved = bench.submit(Command::CreateModel {
        session,
        seq,
        spec: super::types::ModelSpec {
            base_model: "gpt".to_owned(),
            ..spec
        },
    });
    let text = unserved.unwrap_err().to_string();
    assert!(text.contains("one of tiny"), "{text}");
}

/// The commands of a small run: steps, a state, and a sampler.
fn script(model: &ModelId) -> Vec<Command> {
    let mut commands = Vec::new();
    for i in 0..3 {
        commands.push(forward_backward(model, 3 * i + 1, i as u32));
        commands.push(forward_backward(model, 3 * i + 2, i as u32 + 7));
        commands.push(step(model, 3 * i + 3));
    }
    commands.push(save(model, 10, "end"));
    commands.push(Command::SaveForSampler {
        model: model.clone(),
        seq: 11,
        name: None,
        inflight: false,
        sampling_seq: Some(0),
        ttl_s: None,
        metadata: Metadata::new(),
    });
    commands.push(forward_backward(model, 12, 3));
    commands.push(step(model, 13));
    commands
}

/// Numbers of the outcomes that do not depend on random names.
fn numbers(outcomes: &[Outcome]) -> Vec<Vec<u64>> {
    let of = |outcome: &Outcome| match outcome {
        Outcome::Value(Reply::ForwardBackward(output)) => {
            let tensors = output.outputs.iter().flat_map(BTreeMap::values);
            let values = tensors.flat_map(|tensor| match &tensor.values {
                TensorValues::F32(values) => values.clone(),
                TensorValues::I64(_) => Vec::new(),
            });
            let bits = values.map(|value| u64::from(value.to_bits()));
            bits.chain(output.metrics.values().map(|v| v.to_bits()))
                .collect()
        }
        Outcome::Value(Reply::OptimStep { metrics }) => {
            metrics.values().map(|value| value.to_bits()).collect()
        }
        Outcome::Value(_) => Vec::new(),
        Outcome::Failed { text, .. } => panic!("{text}"),
    };
    outcomes.iter().map(of).collect()
}

/// A client that tries again after each death of the desk, and opens it again.
struct Client<'a> {
    state: &'a Path,
    limits: DeskLimits,
    capacity: usize,
    bench: Option<Bench>,
}

impl Client<'_> {
    fn open(&mut self, death: Option<&Arc<Death>>) {
        let mut config = config(self.state);
        config.limits = self.limits.clone();
        let clock = super::wall_clock();
        let residents = embedded(self.capacity);
        self.bench = Some(Bench::open(config, residents, clock, death));
    }

    /// Calls until the desk answers.
    fn until<T>(&mut self, call: impl Fn(&Bench) -> Result<T, Refusal>) -> T {
        for _ in 0..3 {
            let bench = self.bench.as_ref().unwrap();
            match call(bench) {
                Ok(value) => return value,
                Err(Refusal::Draining) => {
                    if let Some(dead) = self.bench.take() {
                        dead.kill();
                    }
                    self.open(None);
                }
                Err(other) => panic!("{other}"),
            }
        }
        panic!("the desk died again");
    }

    /// A whole run: everything is sent before the first result is awaited.
    fn run(&mut self) -> Vec<Outcome> {
        let session = self.until(Bench::session);
        let id = self.until(|bench| bench.submit(create(&session, 0, Some(lora(2)))));
        let mut ids = vec![id];
        let model = ModelId::of(&session, 0);
        for command in script(&model) {
            ids.push(self.until(|bench| bench.submit(command.clone())));
        }
        let sample = sample_command(SamplerRef::Base(BASE.to_owned()), None);
        ids.push(self.until(|bench| bench.submit(sample.clone())));
        let outcomes = ids.iter().map(|id| self.until(|bench| bench.outcome(id)));
        let outcomes = outcomes.collect();
        // They stay as they were.
        let again: Vec<Outcome> = ids
            .iter()
            .map(|id| self.until(|bench| bench.outcome(id)))
            .collect();
        assert_eq!(again, outcomes);
        outcomes
    }
}

fn client(state: &Path, limits: DeskLimits) -> Client<'_> {
    Client {
        state,
        limits,
        capacity: 8,
        bench: None,
    }
}

/// States that are written rarely, so that restarts have something to compute again.
fn rare_checkpoints() -> DeskLimits {
    DeskLimits {
        small_state_bytes: 0,
        checkpoint_every: 2,
        ..DeskLimits::default()
    }
}

#[test]
fn a_kill_between_any_two_commits_loses_nothing_and_repeats_nothing() {
    // With rare checkpoints each run computes more again, so that a third of the commits has to do.
    for (limits, every) in [(DeskLimits::default(), 1), (rare_checkpoints(), 3)] {
        let dir = tempfile::tempdir().unwrap();
        let count = Death::at(u64::MAX, false);
        let mut reference = client(dir.path(), limits.clone());
        reference.open(Some(&count));
        let expected = numbers(&reference.run());
        reference.bench.take().unwrap().kill();
        let commits = count.commits();
        assert!(commits >= 16, "{commits}");
        // Every second one with the commit on disk.
        for at in (1..=commits).step_by(every) {
            let dir = tempfile::tempdir().unwrap();
            let death = Death::at(at, at % 2 == 0);
            let mut killed = client(dir.path(), limits.clone());
            killed.open(Some(&death));
            let found = killed.run();
            assert_eq!(numbers(&found), expected, "commit {at}");
            let bench = killed.bench.take().unwrap();
            let models = bench.wait(bench.desk.models(&bench.tenant, ALL)).unwrap();
            assert_eq!((models.total, models.items[0].steps), (1, 4), "commit {at}");
            bench.kill();
        }
    }
}

#[test]
fn a_restart_continues_with_what_waits_and_sweeps_what_is_left_over() {
    let dir = tempfile::tempdir().unwrap();
    let bench = Bench::simple(dir.path());
    let session = bench.session().unwrap();
    let model = new_model(&bench, &session, 0, Some(2));
    bench.reply(forward_backward(&model, 1, 0));
    let ids: Vec<_> = script(&model)
        .into_iter()
        .skip(1)
        .map(|command| bench.submit(command).unwrap())
        .collect();
    bench.kill();
    let left = dir.path().join("models/nobody/live-0/step-00000000");
    std::fs::create_dir_all(&left).unwrap();
    let bench = Bench::simple(dir.path());
    assert!(!left.exists());
    for id in &ids {
        assert!(matches!(bench.outcome(id), Ok(Outcome::Value(_))));
    }
    let drained = bench.wait(bench.desk.drain());
    assert_eq!(drained, Ok(()));
    let refused = bench.session();
    assert_eq!(refused, Err(Refusal::Draining));
}

/// Interleaves two models on one place, each step in the middle of the other's gradient.
fn interleaved(bench: &Bench, rank: Option<u32>) -> Vec<Outcome> {
    let session = bench.session().unwrap();
    let models = [0, 1].map(|seq| new_model(bench, &session, seq, rank));
    let mut outcomes = Vec::new();
    for i in 0..3 {
        let seq = 3 * i + 1;
        for (salt, model) in (0..).zip(&models) {
            let command = forward_backward(model, seq, salt + i as u32);
            outcomes.push(bench.run(command).unwrap());
        }
        for (salt, model) in (0..).zip(&models) {
            let command = forward_backward(model, seq + 1, salt + i as u32 + 3);
            outcomes.push(bench.run(command).unwrap());
        }
        for model in &models {
            outcomes.push(bench.run(step(model, seq + 2)).unwrap());
        }
    }
    outcomes
}

#[test]
fn models_that_leave_the_memory_come_back_as_they_were() {
    let run = |capacity: usize, limits: DeskLimits| {
        let dir = tempfile::tempdir().unwrap();
        let mut config = config(dir.path());
        config.limits = limits;
        let bench = Bench::open(config, embedded(capacity), super::wall_clock(), None);
        numbers(&interleaved(&bench, Some(2)))
    };
    let together = run(2, DeskLimits::default());
    assert_eq!(run(1, DeskLimits::default()), together);
    assert_eq!(run(1, rare_checkpoints()), together);
}

#[test]
fn models_that_take_turns_at_one_place_compute_the_same() {
    let dir = tempfile::tempdir().unwrap();
    let bench = Bench::simple(dir.path());
    let together = numbers(&interleaved(&bench, None));
    let dir = tempfile::tempdir().unwrap();
    let mut config = config(dir.path());
    config.support = switched_support();
    let residents = switched(dir.path());
    let bench = Bench::open(config, residents, super::wall_clock(), None);
    assert_eq!(numbers(&interleaved(&bench, None)), together);
    let session = bench.session().unwrap();
    let refused = bench.submit(create(&session, 0, Some(lora(2))));
    assert!(matches!(refused, Err(Refusal::Unsupported { .. })));
}

/// The losses of a batch before and after a step with it.
fn two_losses(bench: &Bench, model: &ModelId, seq: u64) -> (f64, f64) {
    let before = loss(&bench.reply(forward_backward(model, seq, 1)));
    bench.reply(step(model, seq + 1));
    let after = loss(&bench.reply(forward_backward(model, seq + 2, 1)));
    (before, after)
}

#[test]
fn a_name_of_a_state_is_checked() {
    let dir = tempfile::tempdir().unwrap();
    let bench = Bench::simple(dir.path());
    let session = bench.session().unwrap();
    let model = new_model(&bench, &session, 0, Some(2));
    bench.reply(save(&model, 1, "one"));
    let text = bench.failure(save(&model, 2, "one"));
    assert!(text.contains("overwrite"), "{text}");
    let text = bench.failure(save(&model, 3, "../x"));
    assert!(text.contains("letters"), "{text}");
}

#[test]
fn a_state_is_loaded_with_and_without_its_optimizer() {
    let dir = tempfile::tempdir().unwrap();
    let bench = Bench::simple(dir.path());
    let session = bench.session().unwrap();
    let model = new_model(&bench, &session, 0, Some(2));
    bench.reply(forward_backward(&model, 1, 0));
    bench.reply(step(&model, 2));
    let Reply::SaveState { path } = bench.reply(save(&model, 3, "one")) else {
        panic!("a state has a path");
    };
    assert_eq!(path, format!("tinker://{model}/weights/one"));
    let next = |model: &ModelId, seq: u64| two_losses(&bench, model, seq);
    let from = |seq: u64, with_optimizer: bool| {
        let command = Command::CreateFromState {
            session: session.clone(),
            seq,
            path: path.clone(),
            with_optimizer,
            base_model: None,
            metadata: Metadata::new(),
        };
        match bench.reply(command) {
            Reply::LoadState { model, path: of } => {
                assert_eq!(of, path);
                model
            }
            other => panic!("{other:?}"),
        }
    };
    let first = next(&model, 4);
    let same = next(&from(1, true), 1);
    let fresh = next(&from(2, false), 1);
    assert_eq!(first, same);
    assert_eq!(first.0, fresh.0);
    assert_ne!(first.1, fresh.1);
    let back = bench.reply(Command::LoadState {
        model: model.clone(),
        seq: 7,
        path: path.clone(),
        with_optimizer: true,
    });
    assert!(matches!(back, Reply::LoadState { .. }));
    assert_eq!(next(&model, 8), first);
    let listed = bench.desk.checkpoints(&bench.tenant, Some(&model), ALL);
    let listed = bench.wait(listed).unwrap();
    assert_eq!(
        (listed.total, listed.items[0].path.name.as_str()),
        (1, "one")
    );
    bench
        .wait(bench.desk.delete_checkpoint(&bench.tenant, &path))
        .unwrap();
    let gone = bench.failure(Command::LoadState {
        model,
        seq: 11,
        path,
        with_optimizer: false,
    });
    assert!(gone.contains("no checkpoint"), "{gone}");
}

fn sample_command(sampler: SamplerRef, seq: Option<u64>) -> Command {
    Command::Sample {
        sampler,
        seq,
        request: SampleInput {
            prompt: vec![5, 6, 7, 8],
            samples: 2,
            params: SampleParams {
                max_tokens: Some(5),
                seed: Some(3),
                ..SampleParams::default()
            },
            ..SampleInput::default()
        },
    }
}

fn samples(reply: Reply) -> SampleOutput {
    match reply {
        Reply::Sample(output) => *output,
        other => panic!("{other:?}"),
    }
}

/// A sample of the base model with all that can be asked for.
fn sample_of_everything(layout: &TargetLayout) -> Command {
    let mut command = sample_command(SamplerRef::Base(BASE.to_owned()), None);
    let Command::Sample { request, .. } = &mut command else {
        panic!("a sample");
    };
    let ids = vec![-1, -1, 9, 10, -1, 11];
    request.prompt_logprobs = true;
    request.prompt_last = Some(1);
    request.top_prompt = 2;
    request.top_sample = 1;
    request.targets = Some(Tensor::new("t", vec![3, 2], TensorValues::I64(ids)).unwrap());
    request.target_layout = Some(layout.clone());
    request.alternatives = 3;
    request.params.stop = Stop::Never;
    command
}

#[test]
fn a_sample_has_what_was_asked_for() {
    let dir = tempfile::tempdir().unwrap();
    let bench = Bench::simple(dir.path());
    let base = || SamplerRef::Base(BASE.to_owned());
    let plain = samples(bench.reply(sample_command(base(), None)));
    assert_eq!(plain.sequences.len(), 2);
    assert_ne!(plain.sequences[0].tokens, plain.sequences[1].tokens);
    for sequence in &plain.sequences {
        assert_eq!((sequence.tokens.len(), sequence.logprobs.len()), (5, 5));
        assert_eq!((sequence.stop, &sequence.top), (StopReason::Length, &None));
    }
    let again = samples(bench.reply(sample_command(base(), None)));
    assert_eq!(again.sequences, plain.sequences);
    let layout = TargetLayout {
        rows: vec![0, 0, 2, 3],
        columns: vec![0, 1, 1],
    };
    let full = samples(bench.reply(sample_of_everything(&layout)));
    assert_eq!(full.sequences[0].tokens, plain.sequences[0].tokens);
    assert!(
        full.sequences
            .iter()
            .all(|s| s.top.as_ref().is_some_and(|top| top.len() == 5))
    );
    let scores = full.prompt_logprobs.unwrap();
    assert_eq!(
        scores.iter().map(Option::is_some).collect::<Vec<_>>(),
        [false, false, false, true]
    );
    assert!(
        full.top_prompt.unwrap()[3]
            .as_ref()
            .is_some_and(|top| top.len() == 2)
    );
    let targets = full.targets.unwrap();
    let TensorValues::F32(values) = &targets.values else {
        panic!("scores");
    };
    let scored: Vec<bool> = values.iter().map(|value| *value != 0.0).collect();
    assert_eq!(scored, [false, false, true, true, false, true]);
    assert_eq!(
        (targets.shape, full.target_layout),
        (vec![3, 2], Some(layout))
    );
    let drawn = full.alternatives.unwrap();
    assert_eq!(
        (&drawn.tokens.shape, &drawn.logprobs.shape),
        (&vec![3, 3], &vec![3, 3])
    );
    let TensorValues::F32(values) = &drawn.logprobs.values else {
        panic!("scores");
    };
    assert!(values.iter().all(|value| value.is_finite() && *value < 0.0));
}

#[test]
fn samplers_have_the_weights_of_their_save_and_few_stay_loaded() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = config(dir.path());
    config.limits.loaded_adapters = 1;
    config.limits.snapshots = 2;
    let bench = Bench::open(config, embedded(2), super::wall_clock(), None);
    let session = bench.session().unwrap();
    let model = new_model(&bench, &session, 0, Some(2));
    let saved = |seq: u64, inflight: bool| {
        let reply = bench.reply(Command::SaveForSampler {
            model: model.clone(),
            seq,
            name: None,
            inflight,
            sampling_seq: Some(seq),
            ttl_s: None,
            metadata: Metadata::new(),
        });
        match reply {
            Reply::SaveForSampler {
                path: None,
                sampler: Some(sampler),
            } => sampler,
            other => panic!("{other:?}"),
        }
    };
    let mut samplers: Vec<SamplerId> = vec![saved(1, false), saved(2, false), saved(3, true)];
    let sample = |sampler: &SamplerId, seq: u64| {
        sample_command(SamplerRef::Session(sampler.clone()), Some(seq))
    };
    // Each load takes the only place from the other.
    for seq in 0..3 {
        for sampler in &samplers {
            let output = samples(bench.reply(sample(sampler, seq)));
            assert_eq!(output.sequences.len(), 2);
        }
    }
    let info = bench.desk.sampler(&bench.tenant, &samplers[0]);
    let info = bench.wait(info).unwrap();
    assert_eq!(info.base_model, BASE);
    // Mutable weights stay behind the same path; the oldest snapshot goes.
    samplers.push(saved(4, true));
    samples(bench.reply(sample(&samplers[2], 7)));
    samples(bench.reply(sample(&samplers[1], 7)));
    samplers.push(saved(5, false));
    let gone = bench.submit(sample(&samplers[0], 9));
    assert!(matches!(gone, Err(Refusal::Gone { .. })), "{gone:?}");
    samples(bench.reply(sample(&samplers[4], 9)));
    let found = bench
        .desk
        .completions(&bench.tenant, &samplers[1], 0, 0, Duration::ZERO);
    let found = bench.wait(found).unwrap();
    assert_eq!(found.items.len(), 4);
    let ids: Vec<_> = found
        .items
        .iter()
        .map(|ended| ended.request.clone())
        .collect();
    bench.wait(bench.desk.discard(&bench.tenant, &ids)).unwrap();
    let dropped = bench.outcome(&ids[0]);
    assert!(matches!(dropped, Err(Refusal::Gone { .. })), "{dropped:?}");
}

#[test]
fn a_named_sampler_is_copied_exported_and_counted() {
    let dir = tempfile::tempdir().unwrap();
    let bench = Bench::simple(dir.path());
    let session = bench.session().unwrap();
    let model = new_model(&bench, &session, 0, Some(2));
    let reply = bench.reply(Command::SaveForSampler {
        model: model.clone(),
        seq: 1,
        name: Some("final".to_owned()),
        inflight: false,
        sampling_seq: None,
        ttl_s: Some(7200),
        metadata: Metadata::new(),
    });
    let Reply::SaveForSampler {
        path: Some(path), ..
    } = reply
    else {
        panic!("{reply:?}");
    };
    samples(bench.reply(sample_command(SamplerRef::Path(path.clone()), None)));
    let Reply::SaveExternal {
        path: outside,
        bytes,
    } = bench.reply(Command::SaveExternal {
        model,
        seq: 2,
        name: "out".to_owned(),
        ttl_s: None,
    })
    else {
        panic!("external weights have a path");
    };
    let files = bench.desk.external_files(&bench.tenant, &outside);
    let files = bench.wait(files).unwrap();
    let names: Vec<&str> = files.iter().map(|file| file.name.as_str()).collect();
    assert_eq!(names, ["adapter_config.json", "adapter_model.safetensors"]);
    assert!(bytes > files.iter().map(|file| file.bytes).sum::<u64>());
    let refused = bench.submit(sample_command(SamplerRef::Path(outside), None));
    assert!(matches!(refused, Err(Refusal::Invalid { .. })));
    let other = bench.session().unwrap();
    let copied = bench.desk.copy_checkpoint(
        &bench.tenant,
        super::types::CopyRequest {
            source: path.clone(),
            session: other.clone(),
            seq: 4,
            ttl_s: None,
        },
    );
    let copied = bench.wait(copied).unwrap();
    assert_eq!(copied.model, ModelId::of(&other, 4));
    samples(bench.reply(sample_command(SamplerRef::Path(copied.to_string()), None)));
    let used = bench.wait(bench.desk.storage(&bench.tenant)).unwrap();
    assert_eq!(used.checkpoints, 3);
    let finish = FinishReason::Success;
    bench
        .wait(
            bench
                .desk
                .finish_session(&bench.tenant, &session, finish, None),
        )
        .unwrap();
    let beat = bench.wait(bench.desk.heartbeat(&bench.tenant, &session));
    assert!(matches!(beat, Err(Refusal::Gone { .. })));
    // The checkpoint of an ended session is sampled by another one.
    samples(bench.reply(sample_command(SamplerRef::Path(path), None)));
}

#[test]
fn an_ended_session_fails_what_waits() {
    let dir = tempfile::tempdir().unwrap();
    let bench = Bench::simple(dir.path());
    let session = bench.session().unwrap();
    let model = new_model(&bench, &session, 0, Some(2));
    let waits = bench.submit(step(&model, 2)).unwrap();
    let finish = FinishReason::Interrupted;
    let detail = Some("enough".to_owned());
    bench
        .wait(
            bench
                .desk
                .finish_session(&bench.tenant, &session, finish, detail),
        )
        .unwrap();
    let outcome = bench.outcome(&waits).unwrap();
    assert!(matches!(
        outcome,
        Outcome::Failed {
            category: Category::User,
            ..
        }
    ));
    let late = bench.submit(step(&model, 3));
    assert!(matches!(late, Err(Refusal::Gone { .. })));
    let info = bench
        .wait(bench.desk.session(&bench.tenant, &session))
        .unwrap();
    assert_eq!(info.models, [model]);
}

#[test]
fn limits_are_refused_by_name_and_time_frees_what_is_old() {
    let dir = tempfile::tempdir().unwrap();
    let time = Arc::new(AtomicU64::new(1_000_000_000_000));
    let mut config = config(dir.path());
    config.limits.tenant = TenantLimits {
        models: 1,
        tokens_per_day: Some(50),
        ..TenantLimits::default()
    };
    let bench = Bench::open(config, embedded(2), set_clock(&time), None);
    let session = bench.session().unwrap();
    let model = new_model(&bench, &session, 0, Some(2));
    let second = bench.submit(create(&session, 1, Some(lora(2))));
    assert!(matches!(
        second,
        Err(Refusal::Quota {
            limit: "models",
            ..
        })
    ));
    let first = bench.submit(forward_backward(&model, 1, 0)).unwrap();
    bench.outcome(&first).unwrap();
    bench.reply(step(&model, 2));
    let saved = bench.reply(save(&model, 3, "kept"));
    let command = forward_backward(&model, 4, 0);
    bench.reply(command);
    let spent = bench.submit(forward_backward(&model, 5, 0));
    assert!(matches!(
        spent,
        Err(Refusal::Quota {
            limit: "tokens_per_day",
            ..
        })
    ));
    // Results leave an hour after they were retrieved, and a silent session leaves the memory.
    for _ in 0..3 {
        time.fetch_add(2 * 3_600_000, Ordering::SeqCst);
        bench.wait(bench.desk.status()).unwrap();
    }
    let dropped = bench.outcome(&first);
    assert!(matches!(dropped, Err(Refusal::Gone { .. })), "{dropped:?}");
    let info = bench.wait(bench.desk.model(&bench.tenant, &model)).unwrap();
    assert!(info.ended.is_some_and(|why| why.contains("silent")));
    let Reply::SaveState { path } = saved else {
        panic!("a state has a path");
    };
    let kept = bench
        .wait(bench.desk.checkpoint(&bench.tenant, &path))
        .unwrap();
    assert_eq!(kept.expires_ms, None);
    bench
        .wait(bench.desk.set_ttl(&bench.tenant, &path, Some(3600)))
        .unwrap();
    for _ in 0..2 {
        time.fetch_add(2 * 3_600_000, Ordering::SeqCst);
        bench.wait(bench.desk.status()).unwrap();
    }
    let expired = bench.wait(bench.desk.checkpoint(&bench.tenant, &path));
    assert!(matches!(expired, Err(Refusal::NotFound { .. })));
}
