//! Rows that an update consumes, and its commit: sessions that end between the two.

use super::*;

/// Rows that the commits name as consumed, by step.
fn named(world: &World) -> Vec<Value> {
    let batches = world.store.trained_batches().unwrap();
    let mut named: Vec<_> = batches
        .iter()
        .map(|b| b.detail["consumed"].clone())
        .collect();
    named.sort_by_key(Value::as_u64);
    named
}

/// The values of some steps.
fn steps(of: &[u64]) -> Vec<Value> {
    of.iter().map(|step| (*step).into()).collect()
}

/// Sessions with these faults, then one without. Gives what the source heard of commits.
fn heard(faults: Faults, error: &str, committed: u64) -> Vec<Value> {
    let world = World::new(SampleKind::Given);
    let failed = world.session(faults).unwrap_err();
    assert!(failed.to_string().contains(error), "{failed}");
    let before: Vec<u64> = (1..=committed).collect();
    assert_eq!(named(&world), steps(&before));
    let ended = world.session(Faults::default()).unwrap();
    assert_eq!(named(&world), steps(&[1, 2, 3]));
    let samples = ended.samples;
    assert_eq!(samples.trained, STEPS as usize * GROUP);
    assert_eq!((samples.lost, samples.trained_twice), (0, 0));
    world.log.lock().unwrap().consumed.clone()
}

#[test]
fn a_commit_names_what_it_consumes_and_the_source_hears_of_it_afterwards() {
    let world = World::new(SampleKind::Given);
    world.session(Faults::default()).unwrap();
    assert_eq!(named(&world), steps(&[1, 2, 3]));
    assert_eq!(world.log.lock().unwrap().consumed, steps(&[1, 2, 3]));
    // A run that samples its own episodes consumes nothing.
    let world = World::new(SampleKind::Run);
    world.session(Faults::default()).unwrap();
    assert_eq!(named(&world), [Value::Null, Value::Null, Value::Null]);
}

#[test]
fn what_a_crash_after_the_commit_left_is_given_back_when_the_run_goes_on() {
    let faults = Faults {
        acks: 2,
        ..Faults::default()
    };
    let heard = heard(faults, "killed before the ack", 2);
    assert_eq!(heard, steps(&[1, 2, 3]));
}

/// Nothing is committed of a step whose rows the run does not hold any more: they may be another trainer's.
#[test]
fn a_step_whose_rows_are_gone_is_not_committed() {
    let faults = Faults {
        consumes: 2,
        ..Faults::default()
    };
    let heard = heard(faults, "another trainer", 1);
    // The last commit is reported once more, which changes nothing.
    assert_eq!(heard, steps(&[1, 1, 2, 3]));
}
