use super::*;
use crate::checkpoint::CheckpointStore;
use crate::comm::{Link, ProcessComm};
use crate::conformance;
use crate::reference::{score_rows, score_top};
use crate::resume::Commit;
use crate::testing::{Bigram, device};
use sinew_types::RowMasks;
use sinew_types::{
    Divergence, KlEstimator, KlSpec, RejectionLevel, RejectionMetric, Surrogate, TeacherSpec,
};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

fn clip() -> LossSpec {
    LossSpec::new(Surrogate::Clip {
        low: 0.2,
        high: 0.2,
        dual: None,
    })
}

/// [`clip`] with a correction of at most 2.
fn truncated() -> LossSpec {
    LossSpec {
        correction: Correction::Truncate {
            low: 0.0,
            high: 2.0,
        },
        ..clip()
    }
}

/// Asserts that two trainers have the same weights up to rounding.
fn assert_near(one: &Trainer<Bigram>, other: &Trainer<Bigram>) {
    for (a, b) in one.policy.logits.iter().zip(&other.policy.logits) {
        assert!((a - b).abs() < 1e-4, "{a} {b}");
    }
}

/// A clock that advances one second at each look.
fn clock() -> Clock {
    let ticks = Arc::new(AtomicU64::new(0));
    Box::new(move || ticks.fetch_add(1, Ordering::Relaxed) as f64)
}

fn trainer(config: TrainerConfig) -> Trainer<Bigram> {
    Trainer::new(Bigram::new(8), config, clock()).unwrap()
}

/// Two groups of two answers.
fn batch(policy: &Bigram) -> Vec<TrainRow> {
    let rows = [
        policy.row(&[1, 2, 3, 4, 5], 3, 0.125, 1.0),
        policy.row(&[1, 2, 6, 6, 7], 2, 0.125, 0.7),
        policy.row(&[1, 2, 3, 4, 6, 1], 3, 0.125, -1.0),
        policy.row(&[1, 2, 6, 5], 2, 0.125, -0.7),
    ];
    let named = |(at, row)| TrainRow {
        episode: sinew_types::EpisodeId::new(format!("e{at}")),
        ..row
    };
    rows.into_iter().enumerate().map(named).collect()
}

/// The gradient that one step accumulates, without applying it.
fn gradient(micro_batch_tokens: usize, spec: &LossSpec) -> (Vec<f32>, StepReport) {
    let mut trainer = trainer(TrainerConfig::new(micro_batch_tokens, 1e-12));
    let mut rows = batch(trainer.policy());
    let reference = score_rows(&mut Bigram::new(8), &rows, 64).unwrap();
    for (row, column) in rows.iter_mut().zip(reference) {
        row.ref_logprobs = Some(column);
    }
    rows[0]
        .ref_logprobs
        .as_mut()
        .unwrap()
        .iter_mut()
        .for_each(|l| *l -= 0.3);
    rows[1]
        .behaviour_logprobs
        .iter_mut()
        .for_each(|l| *l += 0.1);
    let report = trainer.step(&rows, spec).unwrap();
    (trainer.policy().gradient.clone(), report)
}

/// Splitting into micro-batches adds the same f32 numbers in another order: 1e-6 absolute.
#[test]
fn micro_batches_accumulate_to_the_gradient_of_one_batch() {
    let mut full = clip();
    full.kl = Some(KlSpec {
        estimator: KlEstimator::K3,
        coefficient: 0.1,
    });
    full.entropy = 0.05;
    full.correction = Correction::Truncate {
        low: 0.0,
        high: 2.0,
    };
    for spec in [
        full,
        LossSpec::new(Surrogate::SequenceClip {
            low: 0.1,
            high: 0.1,
        }),
    ] {
        let (one, whole) = gradient(64, &spec);
        let (many, split) = gradient(5, &spec);
        assert_eq!((whole.micro_batches, split.micro_batches), (1, 2));
        assert!(one.iter().any(|g| g.abs() > 1e-3));
        for (a, b) in one.iter().zip(&many) {
            assert!((a - b).abs() < 1e-6, "{a} {b}");
        }
        assert!((whole.loss - split.loss).abs() < 1e-9);
        assert_eq!(whole.metrics.trained_tokens, split.metrics.trained_tokens);
        assert!(whole.packed_tokens < split.packed_tokens);
        assert_eq!((whole.naive_tokens, whole.computed_tokens), (20, 7));
    }
}

#[test]
fn the_gradient_is_that_of_the_loss_by_finite_differences() {
    let mut spec = clip();
    spec.entropy = 0.1;
    let (gradient, _) = gradient(64, &spec);
    let rows = {
        let mut rows = batch(&Bigram::new(8));
        rows[1]
            .behaviour_logprobs
            .iter_mut()
            .for_each(|l| *l += 0.1);
        rows
    };
    let loss = |at: usize, by: f32| {
        let mut policy = Bigram::new(8);
        policy.logits[at] += by;
        let mut trainer = Trainer::new(policy, TrainerConfig::new(64, 1e-12), clock()).unwrap();
        trainer.step(&rows, &spec).unwrap().loss
    };
    for (at, &slope) in gradient.iter().enumerate() {
        let difference = (loss(at, 1e-2) - loss(at, -1e-2)) / 2e-2;
        assert!(
            (difference - f64::from(slope)).abs() < 1e-3,
            "{at}: {difference} {slope}"
        );
    }
}

#[test]
fn a_bandit_learns_the_rewarded_token() {
    let mut config = TrainerConfig::new(64, 0.05);
    config.max_grad_norm = None;
    let mut trainer = trainer(config);
    let probability = |t: &Trainer<Bigram>| t.policy().after(1)[4].exp();
    let before = probability(&trainer);
    for _ in 0..60 {
        // Every arm once, weighted by its probability: the exact policy gradient.
        let policy = trainer.policy();
        let rows: Vec<TrainRow> = (0..8)
            .map(|arm| {
                let p = policy.after(1)[arm as usize].exp() as f32;
                policy.row(&[1, arm], 1, p, if arm == 4 { 1.0 } else { 0.0 })
            })
            .collect();
        trainer
            .step(&rows, &LossSpec::new(Surrogate::Reinforce))
            .unwrap();
    }
    let after = probability(&trainer);
    assert!(before < 0.3 && after > 0.9, "{before} to {after}");
    assert_eq!(trainer.version(), PolicyVersion(60));
}

#[test]
fn at_the_sampling_weights_there_is_no_gap() {
    let mut trainer = trainer(TrainerConfig::new(64, 0.1));
    let rows = batch(trainer.policy());
    let report = trainer.step(&rows, &clip()).unwrap();
    assert!(report.gap_max_abs.unwrap() < 1e-6);
    assert_eq!(report.metrics.clip_fraction, 0.0);
    assert_eq!((report.version, report.updates), (PolicyVersion(1), 1));
    let seconds = report.seconds;
    assert!(seconds.forward > 0.0 && seconds.backward > 0.0 && seconds.optimizer > 0.0);
    assert!(trainer.step(&rows, &clip()).unwrap().gap_max_abs.unwrap() > 1e-3);
}

/// The ratio compares with the weights before the first of several updates if there is a correction: the
/// first update's ratios are 1, later ones are not. Ratios without recomputation would always be 1.
#[test]
fn several_updates_keep_the_first_weights_as_the_proximal_policy() {
    let mut spec = clip();
    spec.correction = Correction::Reject {
        metric: RejectionMetric::Ratio,
        level: RejectionLevel::Token,
        upper: 5.0,
    };
    let mut config = TrainerConfig::new(64, 0.3);
    config.minibatches = 4;
    let mut trainer = trainer(config);
    let mut rows = batch(trainer.policy());
    // An engine that is a little off: corrected by a factor, not by the ratio.
    rows.iter_mut()
        .for_each(|r| r.behaviour_logprobs.iter_mut().for_each(|l| *l -= 0.2));
    let mut once = Trainer::new(Bigram::new(8), TrainerConfig::new(64, 0.3), clock()).unwrap();
    let single = once.step(&rows, &spec).unwrap();
    assert_eq!(
        (single.metrics.ratio_min, single.metrics.ratio_max),
        (Some(1.0), Some(1.0))
    );
    assert!((single.metrics.correction_mean.unwrap() - 0.2f64.exp()).abs() < 1e-6);
    assert_eq!(single.computed_tokens, 7);
    let report = trainer.step(&rows, &spec).unwrap();
    assert_eq!(report.updates, 4);
    let metrics = &report.metrics;
    assert!(metrics.ratio_min.unwrap() < 0.5, "{metrics:?}");
    assert!(metrics.ratio_max.unwrap() > 1.1, "{metrics:?}");
    // Given log-probabilities are used as they are: the same step without the extra pass.
    for row in &mut rows {
        let given: Vec<f32> = row.behaviour_logprobs.iter().map(|l| l + 0.2).collect();
        row.prox_logprobs = Some(given);
    }
    let mut given = Trainer::new(Bigram::new(8), config, clock()).unwrap();
    let without = given.step(&rows, &spec).unwrap();
    assert_eq!(report.computed_tokens, without.computed_tokens + 7);
    for (a, b) in given.policy().logits.iter().zip(&trainer.policy().logits) {
        assert!((a - b).abs() < 1e-5);
    }
}

#[test]
fn minibatches_weigh_like_the_batch() {
    let mut config = TrainerConfig::new(64, 0.1);
    config.minibatches = 2;
    let mut trainer = trainer(config);
    let rows = batch(trainer.policy());
    let report = trainer.step(&rows, &clip()).unwrap();
    assert_eq!((report.updates, report.micro_batches), (2, 2));
    assert_eq!(report.metrics.trained_tokens, 10);
    assert!((report.loss - report.metrics.policy_loss).abs() < 1e-12);
    assert!(report.loss != 0.0);
}

/// Rows of episodes with so many rows each, and their place as the number of tokens.
fn episodes(counts: &[usize]) -> Vec<TrainRow> {
    let policy = Bigram::new(8);
    let mut rows = Vec::new();
    for (episode, count) in counts.iter().enumerate() {
        for branch in 0..*count {
            // All begin with the same prompt, as those of one group do.
            let answer = (0..=episode + branch).map(|t| (t % 7) as u32);
            let tokens: Vec<u32> = std::iter::once(1).chain(answer).collect();
            let mut row = policy.row(&tokens, 1, 0.5, 1.0);
            row.episode = sinew_types::EpisodeId::new(format!("e{episode}"));
            rows.push(row);
        }
    }
    rows
}

#[test]
fn an_episode_stays_in_one_minibatch_and_company_is_drawn_by_the_seed() {
    let rows = episodes(&[1, 3, 1, 2, 1, 1, 4, 1, 1, 2, 1]);
    let mut together = std::collections::BTreeSet::new();
    for seed in 0..40 {
        let parts = minibatch::split(&rows, 4, seed);
        assert_eq!(parts, minibatch::split(&rows, 4, seed));
        let mut all: Vec<usize> = parts.concat();
        all.sort_unstable();
        assert!(all.into_iter().eq(0..rows.len()));
        let mut sizes = Vec::new();
        let mut seen = std::collections::BTreeSet::new();
        for part in &parts {
            let own: std::collections::BTreeSet<&str> =
                part.iter().map(|&r| rows[r].episode.as_str()).collect();
            sizes.push(own.len());
            for episode in &own {
                assert!(seen.insert(*episode), "{episode} is in two parts");
            }
            if own.contains("e0") {
                together.extend(own.into_iter().map(str::to_owned));
            }
        }
        assert!(sizes.iter().all(|n| (2..=3).contains(n)), "{sizes:?}");
    }
    assert_eq!(together.len(), 11, "each meets each: {together:?}");
    // More parts than episodes, and rows that train nothing.
    let mut few = episodes(&[2, 1]);
    assert_eq!(minibatch::split(&few, 8, 0).len(), 2);
    few[2].weights.iter_mut().for_each(|w| *w = 0.0);
    assert_eq!(minibatch::split(&few, 8, 0), [vec![0, 1]]);
    assert_eq!(minibatch::split(&[], 3, 0), [Vec::<usize>::new()]);
}

/// Whatever the parts, the gradients of the minibatches sum up to that of the batch times their number, so
/// that each episode weighs what it weighs in the batch; nothing is updated between them here.
#[test]
fn each_episode_weighs_the_same_in_any_minibatch() {
    let rows = episodes(&[1, 1, 2, 1, 1]);
    let gradient = |rows: &[TrainRow]| {
        let mut trainer = trainer(TrainerConfig {
            max_grad_norm: None,
            ..TrainerConfig::new(64, 1e-12)
        });
        trainer.step(rows, &clip()).unwrap();
        trainer.policy().gradient.clone()
    };
    let scaled = |rows: &[TrainRow], factor: f32| {
        let mut rows = rows.to_vec();
        rows.iter_mut()
            .for_each(|r| r.weights.iter_mut().for_each(|w| *w *= factor));
        gradient(&rows)
    };
    for seed in 0..8 {
        let parts = minibatch::split(&rows, 2, seed);
        let last: Vec<TrainRow> = parts[1].iter().map(|&r| rows[r].clone()).collect();
        let mut trainer = trainer(TrainerConfig {
            minibatches: 2,
            max_grad_norm: None,
            seed,
            ..TrainerConfig::new(64, 1e-12)
        });
        trainer.step(&rows, &clip()).unwrap();
        let expected = scaled(&last, 2.0);
        let near = trainer.policy().gradient.iter().zip(&expected);
        assert!(near.clone().all(|(a, b)| (a - b).abs() < 1e-5), "{seed}");
    }
}

#[test]
fn the_learning_rate_follows_the_steps_those_included_that_trained_nothing() {
    let schedule = Schedule {
        peak_lr: 1.0,
        warmup_steps: 0,
        decay: crate::optim::Decay::Linear {
            total_steps: 8,
            final_fraction: 0.0,
        },
    };
    let config = TrainerConfig {
        minibatches: 2,
        schedule,
        ..TrainerConfig::new(64, 1.0)
    };
    let mut trainer = trainer(config);
    let rows = batch(trainer.policy());
    let mut rate = |step: Option<u64>| {
        if let Some(step) = step {
            trainer.begin_step(step);
        }
        // The values of the step's last update.
        trainer.step(&rows, &clip()).unwrap().lr
    };
    // Step 3 trained nothing, and the last step has the last rate all the same.
    assert_eq!(rate(Some(1)), 7.0 / 8.0);
    assert_eq!(rate(Some(2)), 5.0 / 8.0);
    assert_eq!(rate(Some(4)), 1.0 / 8.0);
    assert_eq!(rate(None), 0.0, "the schedule is over");
}

#[test]
fn a_non_finite_gradient_skips_the_update_and_is_counted() {
    let mut trainer = trainer(TrainerConfig::new(64, 0.1));
    let rows = batch(trainer.policy());
    trainer.policy_mut().poison = true;
    let before = trainer.policy().logits.clone();
    let report = trainer.step(&rows, &clip()).unwrap();
    assert_eq!(
        report.skipped,
        [NonFiniteGradient {
            tensor: "table.weight".into()
        }]
    );
    assert_eq!((report.updates, report.version), (0, PolicyVersion(0)));
    assert_eq!(trainer.policy().logits, before);
    assert_eq!(trainer.skipped_updates, 1);
    assert_eq!(
        trainer.step(&rows, &clip()).unwrap().version,
        PolicyVersion(1)
    );
}

#[test]
fn a_policy_without_entropies_trains_and_measures_none() {
    let config = TrainerConfig::new(64, 0.1);
    let (mut with, mut without) = (trainer(config), trainer(config));
    without.policy_mut().has_entropies = false;
    let rows = batch(with.policy());
    let (with, report) = (
        with.step(&rows, &clip()).unwrap(),
        without.step(&rows, &clip()).unwrap(),
    );
    assert!(with.metrics.entropy.is_some() && report.metrics.entropy.is_none());
    assert_eq!(report.grad_norm, with.grad_norm);
    let mut bonus = clip();
    bonus.entropy = 0.01;
    assert_eq!(without.step(&rows, &bonus), Err(TrainError::NoEntropies));
    assert_eq!(without.version(), PolicyVersion(1));
}

#[test]
fn what_cannot_be_trained_is_refused_before_anything_moves() {
    let mut trainer = trainer(TrainerConfig::new(4, 0.1));
    let rows = batch(trainer.policy());
    let mut with_kl = clip();
    with_kl.kl = Some(KlSpec {
        estimator: KlEstimator::K1,
        coefficient: 0.1,
    });
    let error = trainer.step(&rows[3..], &with_kl).unwrap_err();
    assert!(matches!(
        error,
        TrainError::Loss {
            error: LossError::MissingReference,
            ..
        }
    ));
    assert!(matches!(
        trainer.step(&rows, &clip()),
        Err(TrainError::Pack(_))
    ));
    assert!(matches!(
        trainer.step(&[], &clip()),
        Err(TrainError::NothingToTrain { rows: 0 })
    ));
    let mut critic = clip();
    critic.value = Some((0.5, None));
    assert_eq!(trainer.step(&rows[3..], &critic), Err(TrainError::NoCritic));
    assert_eq!(trainer.policy().computed, 0);
    let mut bad = TrainerConfig::new(0, 0.1);
    assert_eq!(bad.validate().unwrap_err().field, "micro_batch_tokens");
    bad = TrainerConfig::new(8, 0.1);
    bad.max_grad_norm = Some(0.0);
    assert_eq!(bad.validate().unwrap_err().field, "max_grad_norm");
}

#[test]
fn cancelling_leaves_the_weights_of_the_last_update() {
    let mut trainer = trainer(TrainerConfig::new(5, 0.1));
    let rows = batch(trainer.policy());
    let before = trainer.policy().logits.clone();
    trainer.on_progress(Box::new(|p| {
        assert_eq!(p.micro_batches, 2);
        if p.micro_batch == 2 {
            ControlFlow::Break(())
        } else {
            ControlFlow::Continue(())
        }
    }));
    assert_eq!(
        trainer.step(&rows, &clip()),
        Err(TrainError::Cancelled { updates: 0 })
    );
    assert_eq!(trainer.policy().logits, before);
}

#[test]
fn a_step_is_cancelled_while_it_scores_and_between_its_updates() {
    let mut config = TrainerConfig::new(5, 0.1);
    config.minibatches = 2;
    let mut clipped = clip();
    clipped.correction = Correction::Truncate {
        low: 0.0,
        high: 2.0,
    };
    // The first report comes of the pass that scores the rows, before any gradient.
    for updates in [0, 1] {
        let mut trainer = trainer(config);
        let rows = batch(trainer.policy());
        let before = trainer.policy().logits.clone();
        trainer.on_progress(Box::new(move |p| {
            if p.update == updates {
                ControlFlow::Break(())
            } else {
                ControlFlow::Continue(())
            }
        }));
        let cancelled = trainer.step(&rows, &clipped);
        assert_eq!(cancelled, Err(TrainError::Cancelled { updates }));
        assert_eq!(trainer.policy().logits == before, updates == 0);
    }
}

fn bits(trainer: &Trainer<Bigram>) -> Vec<u32> {
    trainer
        .policy()
        .logits
        .iter()
        .map(|v| v.to_bits())
        .collect()
}

#[test]
fn six_steps_are_three_and_three_to_the_bit() {
    let dir = tempfile::tempdir().unwrap();
    let store = CheckpointStore::open(dir.path(), 2).unwrap();
    let mut config = TrainerConfig::new(8, 0.05);
    config.minibatches = 2;
    config.schedule.warmup_steps = 9;
    let rows = batch(&Bigram::new(8));
    let run = |trainer: &mut Trainer<Bigram>, steps: usize| {
        (0..steps).for_each(|_| drop(trainer.step(&rows, &clip()).unwrap()));
    };
    let mut straight = trainer(config);
    run(&mut straight, 6);
    let mut first = trainer(config);
    run(&mut first, 3);
    let commit = Commit {
        trained_batches: vec!["b2".into()],
        config_hash: "h".into(),
        cursor: serde_json::json!({ "row": 12 }),
    };
    // Three steps of two updates each; the caller's number is its steps.
    let saved = first
        .save(
            &store,
            3,
            &commit,
            vec![("tokenizer.json".into(), b"{}".to_vec())],
        )
        .unwrap();
    assert!(saved.ends_with("step-00000003"), "{saved:?}");
    let mut second = trainer(config);
    let loaded = store.load().unwrap().unwrap();
    let state = second.restore(&loaded).unwrap();
    assert_eq!(
        (state.step, &state.commit, state.trainer),
        (6, &commit, config)
    );
    assert_eq!(bits(&second), bits(&first));
    run(&mut second, 3);
    assert_eq!(bits(&second), bits(&straight));
    assert_ne!(bits(&second), bits(&first));
}

#[test]
fn a_checkpoint_of_another_model_is_refused_and_changes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let store = CheckpointStore::open(dir.path(), 2).unwrap();
    let mut small = Trainer::new(Bigram::new(3), TrainerConfig::new(8, 0.1), clock()).unwrap();
    small.save(&store, 1, &Commit::default(), vec![]).unwrap();
    let mut other = trainer(TrainerConfig::new(8, 0.1));
    let before = bits(&other);
    let error = other.restore(&store.load().unwrap().unwrap()).unwrap_err();
    assert!(
        error
            .to_string()
            .contains("table.weight has shape [3, 3], expected [8, 8]"),
        "{error}"
    );
    assert_eq!(bits(&other), before);
    // A fresh trainer's checkpoint has no moments, and restores.
    small.restore(&store.load().unwrap().unwrap()).unwrap();
}

/// The two ends of a pipe.
fn pipe() -> (std::io::PipeReader, std::io::PipeWriter) {
    std::io::pipe().unwrap()
}

/// A group of processes, all of which are here.
fn group(ranks: usize) -> Vec<ProcessComm> {
    let numbers = 80_000;
    let memory = tempfile::tempfile().unwrap();
    memory
        .set_len(ProcessComm::memory_bytes(ranks, numbers))
        .unwrap();
    let (mut links, mut all) = (Vec::new(), Vec::new());
    for rank in 1..ranks {
        let (down, up) = (pipe(), pipe());
        links.push(Link::new(rank, up.0, down.1));
        let (link, memory) = (Link::new(0, down.0, up.1), memory.try_clone().unwrap());
        let comm = ProcessComm::follower(rank, ranks, link, memory, numbers, device());
        all.push(comm);
    }
    let deadline = std::time::Duration::from_secs(60);
    let leader = ProcessComm::leader(links, memory, numbers, deadline, device());
    all.insert(0, leader);
    all
}

#[test]
fn processes_pass_the_conformance_tests() {
    conformance::comm(|ranks| {
        let boxed = |comm| Box::new(comm) as Box<dyn Comm>;
        group(ranks).into_iter().map(boxed).collect()
    });
}

#[test]
fn one_process_is_a_group_of_one() {
    let single = || Box::new(SingleProcess) as Box<dyn Comm>;
    let mut comm = single();
    let mut numbers = [1.0, 2.0];
    comm.all_reduce(&mut [&mut numbers]).unwrap();
    assert_eq!((numbers, comm.ranks()), ([1.0, 2.0], 1));
    assert!(comm.send(1, b"x").is_err() && comm.receive(0).is_err());
    assert_eq!(comm.all_gather(b"x"), Ok(vec![b"x".to_vec()]));
}

#[test]
fn the_test_s_own_policy_passes_the_conformance_tests() {
    let rows = batch(&Bigram::new(8));
    for lanes in 1..=3 {
        let dir = tempfile::tempdir().unwrap();
        let make = || {
            let mut policy = Bigram::new(8);
            policy.lanes = lanes;
            policy
        };
        conformance::policy(make, &rows, dir.path());
    }
}

/// A trainer whose updates are shared with `others` further processes.
fn with_others(config: TrainerConfig, others: usize) -> Trainer<Bigram> {
    let mut all = group(others + 1);
    for comm in all.drain(1..) {
        let mut worker = trainer(config);
        worker.with_comm(Box::new(comm));
        std::thread::spawn(move || worker.serve());
    }
    let mut first = trainer(config);
    first.with_comm(Box::new(all.remove(0)));
    first
}

/// [`batch`] in which tokens were drawn from the lower or the upper half of the vocabulary.
fn masked_batch(policy: &Bigram) -> Vec<TrainRow> {
    let mut rows = batch(policy);
    for row in &mut rows {
        let half = |t: usize| u32::from(row.tokens[t] >= 4);
        let masks = RowMasks {
            words_per_mask: 1,
            table: vec![0x0f, 0xf0],
            rows: (0..row.tokens.len()).map(half).collect(),
        };
        for t in (1..row.tokens.len()).filter(|&t| row.weights[t] != 0.0) {
            let p = policy.after_among(row.tokens[t - 1], 1.0, masks.mask(t));
            row.behaviour_logprobs[t] = p[row.tokens[t] as usize] as f32;
        }
        row.masks = Some(masks);
    }
    rows
}

/// Minibatches, proximal log-probabilities and other processes choose among the tokens that the sampler chose
/// among.
#[test]
fn masks_go_wherever_rows_go() {
    let spec = LossSpec {
        entropy: 0.01,
        ..truncated()
    };
    for minibatches in [1, 2] {
        let config = TrainerConfig {
            minibatches,
            ..TrainerConfig::new(64, 0.05)
        };
        let mut one = trainer(config);
        let mut several = with_others(config, 2);
        for _ in 0..3 {
            let rows = masked_batch(one.policy());
            let alone = one.step(&rows, &spec).unwrap();
            let shared = several.step(&rows, &spec).unwrap();
            assert!((shared.loss - alone.loss).abs() < 1e-6, "{shared:?}");
            let gap = |r: &StepReport| r.gap_max_abs.unwrap();
            assert!(gap(&alone) < 1e-5 && gap(&shared) < 1e-5, "{alone:?}");
            assert_near(&several, &one);
            // Read without masks, the same rows would not fit the policy that drew them.
            let mut plain = rows.clone();
            plain.iter_mut().for_each(|row| row.masks = None);
            let mut other = trainer(config);
            other.policy.logits.clone_from(&one.policy.logits);
            assert!(gap(&other.step(&plain, &spec).unwrap()) > 1e-2);
        }
    }
}

/// Asserts that two columns agree.
fn close(a: Option<&[f32]>, b: Option<&[f32]>) {
    let (a, b) = (a.unwrap(), b.unwrap());
    assert_eq!(a.len(), b.len());
    let mut pairs = a.iter().zip(b);
    assert!(pairs.all(|(a, b)| (a - b).abs() < 1e-4), "{a:?} {b:?}");
}

/// Asserts that each row has a log-probability at its trained tokens, and 0 elsewhere; `fresh`: those of the
/// policy that sampled it.
fn check_logprobs(rows: &[TrainRow], report: &StepReport, fresh: bool) {
    assert_eq!(report.logprobs.len(), rows.len());
    for (row, kept) in rows.iter().zip(&report.logprobs) {
        let kept = kept.as_deref().unwrap();
        for (t, &logprob) in kept.iter().enumerate() {
            let trained = row.weights[t] != 0.0;
            assert!(trained == (logprob < 0.0), "{t}: {kept:?}");
            let gap = (logprob - row.behaviour_logprobs[t]).abs();
            assert!(!fresh || !trained || gap < 1e-4, "{t}: {kept:?}");
        }
    }
}

#[test]
fn log_probabilities_are_reported_only_if_they_are_kept() {
    let mut trainer = trainer(TrainerConfig::new(64, 0.05));
    let rows = batch(trainer.policy());
    assert!(trainer.step(&rows, &clip()).unwrap().logprobs.is_empty());
}

#[test]
fn several_processes_compute_what_one_does() {
    let spec = truncated();
    for minibatches in [1, 2] {
        let config = TrainerConfig {
            minibatches,
            ..TrainerConfig::new(64, 0.05)
        };
        let mut one = trainer(config);
        let mut shared: Vec<_> = [1, 2, 5].map(|n| with_others(config, n)).into();
        one.keep_logprobs();
        shared.iter_mut().for_each(Trainer::keep_logprobs);
        for _ in 0..4 {
            let rows = batch(one.policy());
            let alone = one.step(&rows, &spec).unwrap();
            check_logprobs(&rows, &alone, minibatches == 1);
            for several in &mut shared {
                let report = several.step(&rows, &spec).unwrap();
                let pairs = report.logprobs.iter().zip(&alone.logprobs);
                pairs.for_each(|(a, b)| close(a.as_deref(), b.as_deref()));
                assert!((report.loss - alone.loss).abs() < 1e-6, "{report:?}");
                assert!((report.grad_norm - alone.grad_norm).abs() < 1e-5);
                let tokens = |r: &StepReport| r.metrics.trained_tokens;
                assert_eq!(tokens(&report), tokens(&alone));
                let gap = |r: &StepReport| r.gap_max_abs.unwrap();
                assert!((gap(&report) - gap(&alone)).abs() < 1e-5);
                assert_near(several, &one);
            }
        }
    }
}

#[test]
fn a_process_that_is_gone_is_an_error_and_nothing_is_updated() {
    let config = TrainerConfig::new(64, 0.05);
    let mut all = trainer(config);
    let mut comms = group(2);
    drop(comms.pop());
    all.with_comm(Box::new(comms.remove(0)));
    let before = all.policy().logits.clone();
    let error = all.step(&batch(all.policy()), &clip()).unwrap_err();
    assert!(matches!(error, TrainError::Comm(CommError::Gone { .. })));
    assert_eq!(all.policy().logits, before);
    assert_eq!(all.version(), PolicyVersion(0));
}

/// A process that cannot compute its part reports it, and continues with the next one.
#[test]
fn a_part_that_fails_is_reported_by_all() {
    let config = TrainerConfig::new(64, 0.05);
    let mut all = with_others(config, 2);
    let mut rows = batch(all.policy());
    rows[2].weights[4] = f32::NAN;
    let before = all.policy().logits.clone();
    let error = all.step(&rows, &clip()).unwrap_err().to_string();
    assert!(error.contains("row of episode"), "{error}");
    assert_eq!(all.policy().logits, before);
}

mod teacher;
mod waves;
