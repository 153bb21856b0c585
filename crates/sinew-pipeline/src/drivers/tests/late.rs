//! Runs whose rewards come from outside, some of them after their batch left.

use super::*;
use crate::late::{LateRewards, LateScores};
use sinew_orchestrator::{LateConfig, LateGroups, Overlap, StaleGroups};
use sinew_store::{Filter, Score, ScoreRecord, ScoreRule, ScoreTerm, TrainedBatch};

/// Scores every group of an even draw at once, and those of odd draws once later ones have ended or nothing
/// else can be done.
struct Person {
    /// Groups that are scored only later, by draws.
    delay: u64,
    /// Draws from this number on are never scored.
    silent_from: u64,
    /// End of the ids of episodes that are never scored; empty: none.
    silent_to: &'static str,
    now_s: f64,
}

impl LateScores for Person {
    fn take(&mut self, store: &dyn TraceStore, wait: bool) -> Result<(), PipelineError> {
        let filter = Filter {
            purpose: Some("train".into()),
            limit: 1_000,
            ..Filter::default()
        };
        let episodes = store.list(&filter).unwrap().episodes;
        let last = episodes.iter().map(|e| e.draw).max().unwrap_or(0);
        let told = episodes.iter().filter(|e| {
            let waits = !wait && e.draw % 2 == 1 && e.draw + self.delay > last;
            let silent = !self.silent_to.is_empty() && e.episode.as_str().ends_with(self.silent_to);
            !waits && !silent && e.draw < self.silent_from
        });
        let scores: Vec<ScoreRecord> = told
            .map(|e| ScoreRecord {
                episode: e.episode.clone(),
                name: "thumbs".into(),
                source: "person".into(),
                at_us: 1,
                score: Score::Value(if e.episode.as_str().ends_with("e1") {
                    -1.0
                } else {
                    1.0
                }),
            })
            .collect();
        for put in store.put_scores(&scores).unwrap() {
            put.unwrap();
        }
        Ok(())
    }

    fn now_s(&self) -> f64 {
        self.now_s
    }
}

fn late_config(max_staleness: u64) -> LateConfig {
    LateConfig {
        rule: ScoreRule {
            own: None,
            terms: vec![ScoreTerm {
                name: "thumbs".into(),
                weight: 2.0,
                source: None,
            }],
        },
        own_if_given: false,
        wait_s: 100.0,
        max_staleness,
        after: StaleGroups::Drop,
        partial: false,
        max_waiting: 8,
    }
}

/// A world whose rewards come late.
fn world() -> World {
    World::new(SampleKind::Run)
}

fn session(
    world: &World,
    faults: Faults,
    person: Person,
    late: LateConfig,
) -> Result<RunOutcome, PipelineError> {
    let core = CoreConfig {
        late_rounds: Some(3),
        ..config(SampleKind::Run)
    };
    let late = LateRewards {
        config: late,
        scores: Box::new(person),
    };
    world.session_late(faults, core, Some(late))
}

fn patient(delay: u64) -> Person {
    Person {
        delay,
        silent_from: u64::MAX,
        silent_to: "",
        now_s: 50.0,
    }
}

fn batches(world: &World) -> Vec<TrainedBatch> {
    let mut batches = world.store.trained_batches().unwrap();
    batches.sort_by_key(|b| b.step);
    batches
}

/// Every training episode is trained once, left out once, or waits.
fn check(world: &World, ended: &RunOutcome) {
    assert_eq!((ended.samples.lost, ended.samples.trained_twice), (0, 0));
    let batches = batches(world);
    let trained: usize = batches.iter().map(|b| b.episodes.len()).sum();
    let dropped: usize = batches.iter().map(|b| b.dropped.len()).sum();
    assert_eq!(
        (ended.samples.trained, ended.samples.dropped),
        (trained, dropped)
    );
    let run = world.log.lock().unwrap().run.clone();
    let of_training = run
        .iter()
        .filter(|e| !e.as_str().starts_with("eval"))
        .count();
    assert_eq!(trained + dropped + ended.samples.waiting, of_training);
}

#[test]
fn a_group_is_trained_when_its_reward_comes() {
    let world = world();
    let ended = session(&world, Faults::default(), patient(4), late_config(16)).unwrap();
    check(&world, &ended);
    assert!(ended.samples.waiting > 0, "{:?}", ended.samples);
    let of_step = |b: &TrainedBatch| {
        let traces = b
            .episodes
            .iter()
            .map(|e| world.store.get(e).unwrap().unwrap());
        traces.map(|t| t.origin.draw).collect::<BTreeSet<_>>()
    };
    let draws: Vec<BTreeSet<u64>> = batches(&world).iter().map(of_step).collect();
    assert_eq!(draws.len(), STEPS as usize);
    let later = draws.iter().enumerate().any(|(n, draws)| {
        let first = n as u64 * config(SampleKind::Run).tasks_per_step as u64 * 4;
        draws.iter().any(|d| *d < first)
    });
    assert!(later, "{draws:?}");
}

#[test]
fn what_waits_survives_a_kill_between_score_and_training() {
    let unharmed = world();
    session(&unharmed, Faults::default(), patient(4), late_config(16)).unwrap();
    for faults in [
        Faults {
            learner: 2,
            ..Faults::default()
        },
        Faults {
            transport: 2,
            ..Faults::default()
        },
        Faults {
            killed_after: 2,
            ..Faults::default()
        },
    ] {
        let world = world();
        session(&world, faults, patient(4), late_config(16)).unwrap_err();
        let ended = session(&world, Faults::default(), patient(4), late_config(16)).unwrap();
        check(&world, &ended);
        assert_eq!(world.commits(), unharmed.commits());
    }
}

#[test]
fn a_newer_score_does_not_change_what_was_trained() {
    let world = world();
    let killed = Faults {
        killed_after: 2,
        ..Faults::default()
    };
    session(&world, killed, patient(4), late_config(16)).unwrap_err();
    let outcome = |b: &TrainedBatch| b.detail["outcomes"].clone();
    let before: Vec<_> = batches(&world).iter().map(outcome).collect();
    assert!(
        before[0].as_object().is_some_and(|o| !o.is_empty()),
        "{before:?}"
    );
    let episode = batches(&world)[0].episodes[0].clone();
    let newer = ScoreRecord {
        episode,
        name: "thumbs".into(),
        source: "person".into(),
        at_us: 9,
        score: Score::Value(-7.0),
    };
    world.store.put_scores(&[newer]).unwrap()[0]
        .clone()
        .unwrap();
    let ended = session(&world, Faults::default(), patient(4), late_config(16)).unwrap();
    check(&world, &ended);
    let after: Vec<_> = batches(&world).iter().map(outcome).collect();
    assert_eq!(after[..2], before[..]);
}

#[test]
fn rewards_that_come_too_late_are_counted_with_the_reason() {
    let world = world();
    let ended = session(&world, Faults::default(), patient(4), late_config(0)).unwrap();
    check(&world, &ended);
    let reasons: BTreeSet<String> = batches(&world)
        .into_iter()
        .flat_map(|b| b.dropped.into_values())
        .collect();
    let late = reasons.iter().any(|r| r.starts_with("late: "));
    assert!(late, "{reasons:?}");
    let text = std::fs::read_to_string(world.run_dir.path().join("metrics.jsonl")).unwrap();
    let first = "\"first\":\"d00000001-e0: late: 1 updates behind";
    assert!(text.contains(first), "{text}");
}

#[test]
fn rewards_that_never_come_are_left_out_when_their_time_is_up() {
    let world = world();
    let person = Person {
        delay: 0,
        silent_from: 0,
        silent_to: "",
        now_s: 1e12,
    };
    let never = Faults {
        transport: u64::MAX,
        ..Faults::default()
    };
    let ended = session(&world, never, person, late_config(16)).unwrap();
    check(&world, &ended);
    assert_eq!((ended.samples.trained, ended.samples.waiting), (0, 0));
    for reason in batches(&world).iter().flat_map(|b| b.dropped.values()) {
        assert_eq!(reason, "reward thumbs: not given within 100 s");
    }
}

#[test]
fn offline_trains_groups_that_are_too_old_and_drop_does_not() {
    let trained = |after: StaleGroups| {
        let world = world();
        let late = LateConfig {
            after,
            ..late_config(0)
        };
        let ended = session(&world, Faults::default(), patient(4), late).unwrap();
        check(&world, &ended);
        let dropped = batches(&world).into_iter().flat_map(|b| b.dropped);
        let too_old = dropped.filter(|(_, why)| why.starts_with("late: ")).count();
        (ended.samples.trained, too_old)
    };
    let (dropping, offline) = (trained(StaleGroups::Drop), trained(StaleGroups::Offline));
    assert!(dropping.1 > 0, "{dropping:?}");
    assert_eq!(offline.1, 0, "{offline:?}");
    assert!(offline.0 > dropping.0, "{offline:?} {dropping:?}");
}

#[test]
fn partial_hands_on_the_episodes_of_a_group_that_have_their_rewards() {
    for partial in [false, true] {
        let world = world();
        let person = Person {
            delay: 0,
            silent_from: u64::MAX,
            silent_to: "e0",
            now_s: 1e12,
        };
        let late = LateConfig {
            partial,
            ..late_config(16)
        };
        let never = Faults {
            transport: u64::MAX,
            ..Faults::default()
        };
        let ended = session(&world, never, person, late).unwrap();
        check(&world, &ended);
        // Those that have their rewards reach the algorithm, which finds only one in its group.
        let left_out = batches(&world).into_iter().flat_map(|b| b.dropped);
        let (mut answered, mut silent) = (BTreeSet::new(), BTreeSet::new());
        for (episode, why) in left_out {
            if episode.as_str().ends_with("e0") {
                silent.insert(why)
            } else {
                answered.insert(why)
            };
        }
        let not_given = |why: &String| why.contains("reward thumbs: not given");
        assert!(
            !silent.is_empty() && silent.iter().all(not_given),
            "{silent:?}"
        );
        assert!(!answered.is_empty(), "{partial}");
        assert_eq!(answered.iter().any(not_given), !partial, "{answered:?}");
    }
}

/// A session whose groups wait for their rewards while others run and are trained.
fn overlapping(
    world: &World,
    faults: Faults,
    person: Person,
    (steps, max_staleness): (u64, u64),
) -> Result<RunOutcome, PipelineError> {
    let core = CoreConfig {
        steps,
        ..overlapping_core(max_staleness)
    };
    let late = LateRewards {
        config: late_config(max_staleness),
        scores: Box::new(person),
    };
    world.session_late(faults, core, Some(late))
}

fn overlapping_core(max_staleness: u64) -> CoreConfig {
    let overlap = Overlap {
        max_staleness: 1,
        updates_per_step: 1,
        in_order: false,
        late: Some(LateGroups {
            max_waiting: late_config(0).max_waiting,
            max_staleness,
        }),
    };
    CoreConfig {
        overlap: Some(overlap),
        ..config(SampleKind::Run)
    }
}

/// Draws that each update trained.
fn draws(world: &World) -> Vec<BTreeSet<u64>> {
    let draw = |e: &EpisodeId| world.store.get(e).unwrap().unwrap().origin.draw;
    let of_step = |b: &TrainedBatch| b.episodes.iter().map(draw).collect();
    batches(world).iter().map(of_step).collect()
}

#[test]
fn a_group_that_waits_holds_no_other_group_back() {
    let world = world();
    let ended = overlapping(&world, Faults::default(), patient(9), (6, 16)).unwrap();
    check(&world, &ended);
    let draws = draws(&world);
    assert_eq!(draws.len(), 6);
    // Nothing is behind the first ones: those of an even draw, which have their rewards at once.
    assert!(draws[0].iter().all(|d| d % 2 == 0), "{draws:?}");
    let later = (1..draws.len()).any(|n| draws[n].first() < draws[n - 1].last());
    assert!(
        later,
        "groups are trained when their rewards come: {draws:?}"
    );
    let odd = draws.iter().flatten().any(|d| d % 2 == 1);
    assert!(odd, "{draws:?}");
    for batch in batches(&world) {
        let outcomes = batch.detail["outcomes"].as_object().unwrap();
        let known = batch
            .episodes
            .iter()
            .all(|e| outcomes.contains_key(e.as_str()));
        assert!(
            known,
            "an update is done again from its rewards: {outcomes:?}"
        );
    }
}

#[test]
fn groups_that_wait_while_others_are_trained_survive_a_kill() {
    let fault = |learner, transport, killed_after| Faults {
        learner,
        transport,
        killed_after,
        ..Faults::default()
    };
    for faults in [fault(2, 0, 0), fault(0, 2, 0), fault(0, 0, 2)] {
        let world = world();
        overlapping(&world, faults, patient(9), (5, 16)).unwrap_err();
        let committed = world.commits();
        let stored = world.log.lock().unwrap().run.len();
        let ended = overlapping(&world, Faults::default(), patient(9), (5, 16)).unwrap();
        check(&world, &ended);
        let commits = world.commits();
        assert_eq!(commits.len(), 5);
        assert_eq!(commits[..committed.len()], committed[..]);
        let run = world.log.lock().unwrap().run.clone();
        let distinct: BTreeSet<_> = run.iter().collect();
        assert_eq!(distinct.len(), run.len(), "no episode is run twice");
        // The second session trains the groups that the first one left waiting.
        let left: BTreeSet<&EpisodeId> = run[..stored].iter().collect();
        let later = commits[committed.len()..].iter().flat_map(|(_, e)| e);
        assert!(later.into_iter().any(|e| left.contains(e)), "{commits:?}");
    }
}

#[test]
fn groups_that_are_too_old_when_their_rewards_come_are_replaced() {
    let world = world();
    let ended = overlapping(&world, Faults::default(), patient(1_000), (8, 1)).unwrap();
    check(&world, &ended);
    assert_eq!(ended.samples.trained, 8 * TASKS * GROUP);
    let dropped = batches(&world).into_iter().flat_map(|b| b.dropped);
    let reasons: BTreeSet<String> = dropped.map(|(_, why)| why).collect();
    let late = |why: &String| why.starts_with("late: ") && why.contains("allowed: 1 (reward.late");
    assert!(
        !reasons.is_empty() && reasons.iter().all(late),
        "{reasons:?}"
    );
    let text = std::fs::read_to_string(world.run_dir.path().join("metrics.jsonl")).unwrap();
    assert!(text.contains("-e0: late: "), "{text}");
}

#[test]
fn a_run_whose_rewards_never_come_says_so_with_each_step_and_ends() {
    let world = world();
    let person = Person {
        delay: 0,
        silent_from: 0,
        silent_to: "",
        now_s: 1e12,
    };
    let never = Faults {
        transport: u64::MAX,
        ..Faults::default()
    };
    let ended = overlapping(&world, never, person, (3, 16)).unwrap();
    check(&world, &ended);
    assert_eq!(ended.samples.trained, 0);
    let batches = batches(&world);
    assert_eq!(batches.len(), 3);
    for batch in &batches {
        assert!(batch.dropped.len() >= late_config(16).max_waiting * GROUP);
        let mut reasons = batch.dropped.values();
        assert!(reasons.all(|why| why == "reward thumbs: not given within 100 s"));
    }
    let text = std::fs::read_to_string(world.run_dir.path().join("metrics.jsonl")).unwrap();
    assert!(text.contains("-e0: reward thumbs: not given"), "{text}");
}

/// Rewards may take days: a run whose time is up waits for none.
#[test]
fn a_run_whose_time_is_up_leaves_what_waits_to_the_next_session() {
    let world = world();
    let silent = Person {
        silent_from: 0,
        ..patient(0)
    };
    let core = CoreConfig {
        max_wall_s: Some(0.1),
        ..overlapping_core(16)
    };
    let late = LateRewards {
        config: late_config(16),
        scores: Box::new(silent),
    };
    let ended = world
        .session_late(Faults::default(), core, Some(late))
        .unwrap();
    check(&world, &ended);
    assert_eq!((ended.samples.trained, ended.samples.dropped), (0, 0));
}
