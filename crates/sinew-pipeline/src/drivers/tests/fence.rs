//! Runs that another process takes over while their owner still works.

use super::*;

/// A session of owner 1 that is taken over by owner 2, then one of owner 3. Owner 1 commits `kept` updates.
fn taken_over(takeover: Takeover, kept: usize, published: &[u64]) {
    let (commits, run) = unharmed();
    let world = World::new(SampleKind::Run);
    let faults = Faults {
        takeover,
        ..Faults::default()
    };
    let error = world.session(faults).unwrap_err().to_string();
    let folder = world.run_dir.path().display().to_string();
    for part in ["owner 1", "owner 2", folder.as_str()] {
        assert!(error.contains(part), "{error}");
    }
    assert_eq!(world.commits(), commits[..kept]);
    {
        let log = world.log.lock().unwrap();
        assert_eq!(log.published, published);
        assert!(log.saved.is_none());
    }
    let ended = world.session(Faults::default()).unwrap();
    assert_eq!(world.commits(), commits);
    assert_eq!((ended.samples.lost, ended.samples.trained_twice), (0, 0));
    assert_eq!(
        world.log.lock().unwrap().run,
        run,
        "episodes of the first owner are kept"
    );
    let owners = world.store.trained_batches().unwrap();
    let owners: Vec<u64> = owners.iter().map(|b| b.fence).collect();
    let steps = STEPS as usize;
    assert_eq!(owners, [vec![1; kept], vec![3; steps - kept]].concat());
}

#[test]
fn an_old_owner_does_not_commit() {
    taken_over(Takeover::Publishing(2), 1, &[1, 2]);
}

#[test]
fn an_old_owner_does_not_publish() {
    taken_over(Takeover::AfterStep(1), 1, &[1]);
}

#[test]
fn an_old_owner_makes_no_checkpoint() {
    taken_over(Takeover::Saving, STEPS as usize, &[1, 2, 3]);
}

/// Owner 1 dies between a commit and its ack. Owner 2 would make the ack, but owner 3 has the run.
#[test]
fn an_old_owner_gives_no_rows_back() {
    let mut world = World::new(SampleKind::Given);
    let faults = Faults {
        acks: 2,
        ..Faults::default()
    };
    world.session(faults).unwrap_err();
    world.fence = Some(world.own());
    world.store.take_fence().unwrap();
    let error = world.session(Faults::default()).unwrap_err().to_string();
    assert!(
        error.contains("owner 2") && error.contains("owner 3"),
        "{error}"
    );
    let consumed = |world: &World| world.log.lock().unwrap().consumed.clone();
    assert_eq!(consumed(&world), [Value::from(1u64)]);
    world.fence = None;
    world.session(Faults::default()).unwrap();
    assert_eq!(consumed(&world), [1u64, 2, 3].map(Value::from));
}

/// A process that dies after it took its number and before it committed leaves the run to the next one.
#[test]
fn an_owner_that_died_before_its_first_commit_is_in_nobodys_way() {
    let world = World::new(SampleKind::Run);
    drop(world.own());
    world.session(Faults::default()).unwrap();
    assert_eq!(world.commits(), unharmed().0);
}
