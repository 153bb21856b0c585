//! Sessions whose generation and training overlap: the learner has a separate thread.

use super::super::learner_thread::{SharedLearner, is_whole};
use super::*;
use sinew_orchestrator::Overlap;

fn core(in_order: bool) -> CoreConfig {
    CoreConfig {
        overlap: Some(Overlap {
            max_staleness: 1,
            updates_per_step: 1,
            in_order,
            late: None,
        }),
        ..config(SampleKind::Run)
    }
}

/// Every training episode is trained once or left out, and none waits at the end.
fn check(world: &World, ended: &RunOutcome) {
    assert_eq!((ended.samples.lost, ended.samples.trained_twice), (0, 0));
    assert!(ended.trouble.is_empty(), "{:?}", ended.trouble);
    let named: Vec<EpisodeId> = world.commits().into_iter().flat_map(|(_, e)| e).collect();
    let distinct: BTreeSet<&EpisodeId> = named.iter().collect();
    assert_eq!(
        (distinct.len(), named.len()),
        (ended.samples.trained, ended.samples.trained)
    );
    let batches = world.store.trained_batches().unwrap();
    let dropped: usize = batches.iter().map(|b| b.dropped.len()).sum();
    let run = world.log.lock().unwrap().run.clone();
    let train = run.iter().filter(|e| e.as_str().starts_with('d')).count();
    assert_eq!(named.len() + dropped + ended.samples.waiting, train);
    let rows: usize = ended.totals.staleness.values().sum();
    assert_eq!(rows, ended.samples.trained);
    let behind = ended.totals.staleness.keys().max();
    assert!(behind <= Some(&1), "{:?}", ended.totals.staleness);
}

#[test]
fn steps_are_trained_while_the_next_episodes_run() {
    for in_order in [true, false] {
        let world = World::new(SampleKind::Run);
        let ended = world
            .session_with(Faults::default(), core(in_order))
            .unwrap();
        check(&world, &ended);
        assert_eq!(world.log.lock().unwrap().published, [1, 2, 3]);
        let waits = ended.totals.waits;
        let (wall, engine) = (
            ended.wall_s,
            waits.rows()[..4].iter().map(|r| r.1).sum::<f64>(),
        );
        assert!(engine <= wall, "{waits:?} of {wall}");
    }
}

/// Episodes that were sampled ahead and not trained when a session ended are trained by the next one, and not
/// run again.
#[test]
fn faults_lose_no_episode_and_train_none_twice() {
    let fault = |learner, transport, killed_after| Faults {
        learner,
        transport,
        killed_after,
        ..Faults::default()
    };
    let whole = |in_order| {
        let world = World::new(SampleKind::Run);
        world
            .session_with(Faults::default(), core(in_order))
            .unwrap();
        world.commits()
    };
    for in_order in [true, false] {
        for faults in [
            fault(2, 0, 0),
            fault(0, 2, 0),
            fault(0, 0, 1),
            fault(0, 0, 2),
        ] {
            let world = World::new(SampleKind::Run);
            world.session_with(faults, core(in_order)).unwrap_err();
            let committed = world.commits();
            let ended = world
                .session_with(Faults::default(), core(in_order))
                .unwrap();
            check(&world, &ended);
            let commits = world.commits();
            assert_eq!(
                commits[..committed.len()],
                committed[..],
                "committed updates stay"
            );
            if in_order {
                assert_eq!(commits, whole(true));
            }
            let run = world.log.lock().unwrap().run.clone();
            let distinct: BTreeSet<_> = run.iter().collect();
            assert_eq!(distinct.len(), run.len(), "no episode is run twice");
        }
    }
}

/// A learner whose thread panics ends the run with a message, not with a wait for ever.
#[test]
fn a_panic_of_the_learner_ends_the_run() {
    let world = World::new(SampleKind::Run);
    let faults = Faults {
        learner: u64::MAX,
        ..Faults::default()
    };
    let failed = world.session_with(faults, core(false)).unwrap_err();
    assert!(
        failed.to_string().contains("learner: its thread panicked"),
        "{failed}"
    );
}

/// An update that panicked half-way leaves the version as it was, but not the weights: they are not saved.
#[test]
fn weights_of_a_learner_that_panicked_are_not_whole() {
    let learner: SharedLearner = Arc::new(Mutex::new(Counter {
        updates: 3,
        fails_at: 0,
        log: Log::default(),
    }));
    assert!(is_whole(&learner, Some(3)) && is_whole(&learner, None));
    assert!(!is_whole(&learner, Some(2)), "an update is not in use yet");
    let own = Arc::clone(&learner);
    let worked = std::thread::spawn(move || {
        let _held = own.lock().unwrap();
        panic!("half-way");
    });
    worked.join().unwrap_err();
    assert!(!is_whole(&learner, Some(3)) && !is_whole(&learner, None));
}

/// A session ended between new weights and their commit: what they sampled is not taken for the policy's.
#[test]
fn episodes_of_weights_that_were_lost_are_left_out() {
    for in_order in [true, false] {
        let world = World::new(SampleKind::Run);
        let draw = &sinew_orchestrator::train_groups(7, 2, (0, &[0]), GROUP, 1)[0][0];
        let mut trace = episode(draw);
        trace.nodes[1].versions[0].version = PolicyVersion(1);
        world.store.commit(&trace).unwrap();
        let ended = world
            .session_with(Faults::default(), core(in_order))
            .unwrap();
        assert_eq!((ended.samples.lost, ended.samples.trained_twice), (0, 0));
        let batches = world.store.trained_batches().unwrap();
        let reason = batches.iter().find_map(|b| b.dropped.get(&draw.episode));
        let trained = batches.iter().any(|b| b.episodes.contains(&draw.episode));
        assert_eq!(trained, in_order);
        assert_eq!(reason.is_some_and(|r| r.contains("version 1")), !in_order);
    }
}
