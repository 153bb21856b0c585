//! The supervisor: restarts with pauses and bounds, causes that stay, roles of an earlier owner.

use super::*;
use crate::registry::ControlLimits;
use crate::role::{Heartbeat, Registration, RoleKind};

fn limits() -> SupervisorLimits {
    SupervisorLimits {
        starts: 3,
        window_ms: 10_000,
        backoff_ms: 100,
        longest_backoff_ms: 300,
        unlisted_ms: 500,
        quarantine_ms: 400,
    }
}

fn pair() -> (SupervisorCore, Registry) {
    let control = ControlLimits {
        lease_ms: 1000,
        drain_ms: 2000,
        ..ControlLimits::default()
    };
    (
        SupervisorCore::new(limits(), true),
        Registry::new("run", 1, control),
    )
}

fn listed(name: &str, state: Launched) -> LaunchedRole {
    LaunchedRole {
        name: name.into(),
        state,
    }
}

fn ended(name: &str) -> LaunchedRole {
    listed(name, Launched::Ended("exit status: 3".into()))
}

fn starts(steps: &[Step]) -> Vec<&str> {
    let ids = steps.iter().filter_map(|step| match step {
        Step::Start(id) => Some(id.as_str()),
        Step::Stop(_) => None,
    });
    ids.collect()
}

fn registration(name: &str) -> Registration {
    Registration {
        kind: RoleKind::Rollout,
        name: name.into(),
        host: "h".into(),
        address: None,
        build: "1".into(),
        capacity: 1,
        preemptible: false,
    }
}

#[test]
fn a_role_that_fails_starts_again_with_growing_pauses_and_a_bound() {
    let (mut core, mut registry) = pair();
    registry.scale(RoleKind::Rollout, 1, false, 0).unwrap();
    let steps = core.decide(&mut registry, Some(&[]), 0);
    assert_eq!(starts(&steps), ["run-rollout-0-0"]);
    let first = [ended("run-rollout-0-0")];
    assert!(starts(&core.decide(&mut registry, Some(&first), 10)).is_empty());
    assert!(starts(&core.decide(&mut registry, None, 109)).is_empty());
    let steps = core.decide(&mut registry, None, 110);
    assert_eq!(starts(&steps), ["run-rollout-0-1"]);
    let second = [ended("run-rollout-0-1")];
    core.decide(&mut registry, Some(&second), 120);
    assert!(starts(&core.decide(&mut registry, None, 319)).is_empty());
    assert_eq!(
        starts(&core.decide(&mut registry, None, 320)),
        ["run-rollout-0-2"]
    );
    core.decide(&mut registry, Some(&[ended("run-rollout-0-2")]), 330);
    // Three starts in the window: the next one waits until the first is old.
    assert!(starts(&core.decide(&mut registry, None, 9_000)).is_empty());
    let view = &registry.views(9_000)[0];
    assert_eq!(view.state, RoleState::Pending);
    assert!(view.cause.as_ref().unwrap().contains("exit status: 3"));
    let causes = registry.events_after(0).into_iter().filter_map(|e| e.cause);
    assert_eq!(
        causes.filter(|why| why.contains("3 times in 10 s")).count(),
        1
    );
    assert_eq!(
        starts(&core.decide(&mut registry, None, 10_001)),
        ["run-rollout-0-3"]
    );
}

#[test]
fn nothing_starts_before_the_launcher_was_asked() {
    let (mut core, mut registry) = pair();
    registry.scale(RoleKind::Rollout, 1, false, 0).unwrap();
    assert!(core.decide(&mut registry, None, 0).is_empty());
}

#[test]
fn roles_of_an_earlier_owner_are_taken_over() {
    let (mut core, mut registry) = pair();
    registry.scale(RoleKind::Rollout, 3, false, 0).unwrap();
    let list = [
        listed("run-rollout-0-4", Launched::Running),
        ended("run-rollout-1-0"),
        listed("run-owner-0-0", Launched::Running),
    ];
    let steps = core.decide(&mut registry, Some(&list), 0);
    // The name that was used is not used again, and the owner is no role.
    assert_eq!(starts(&steps), ["run-rollout-1-1", "run-rollout-2-0"]);
    assert_eq!(steps.len(), 2);
    let known = registry
        .register(&registration("run-rollout-0-4"), None, 1)
        .unwrap();
    assert_eq!(known.id.as_str(), "run-rollout-0-4");
}

#[test]
fn a_role_that_registered_before_the_first_list_is_not_ended() {
    let (mut core, mut registry) = pair();
    registry
        .register(&registration("run-rollout-0-4"), None, 0)
        .unwrap();
    let list = [listed("run-rollout-0-4", Launched::Running)];
    assert!(core.decide(&mut registry, Some(&list), 1).is_empty());
}

#[test]
fn strays_and_silent_roles_are_ended() {
    let (mut core, mut registry) = pair();
    core.decide(&mut registry, Some(&[]), 0);
    let stray = [listed("run-rollout-5-0", Launched::Running)];
    let steps = core.decide(&mut registry, Some(&stray), 1);
    assert_eq!(steps, [Step::Stop("run-rollout-5-0".into())]);
    registry.scale(RoleKind::Rollout, 1, false, 2).unwrap();
    core.decide(&mut registry, Some(&[]), 2);
    let id = "run-rollout-0-0";
    registry.register(&registration(id), None, 3).unwrap();
    registry.beat(id, 1, Heartbeat::default(), 4).unwrap();
    let list = [listed(id, Launched::Running)];
    let steps = core.decide(&mut registry, Some(&list), 1004);
    assert_eq!(steps, [Step::Stop(id.into())]);
    assert_eq!(
        starts(&core.decide(&mut registry, Some(&list), 1104)),
        ["run-rollout-0-1"]
    );
}

#[test]
fn a_started_role_that_nobody_lists_is_lost() {
    let (mut core, mut registry) = pair();
    registry.scale(RoleKind::Rollout, 1, false, 0).unwrap();
    core.decide(&mut registry, Some(&[]), 0);
    core.decide(&mut registry, Some(&[]), 499);
    assert_eq!(registry.views(499)[0].state, RoleState::Creating);
    core.decide(&mut registry, Some(&[]), 500);
    let cause = registry.views(500)[0].cause.clone().unwrap();
    assert!(cause.contains("does not know"), "{cause}");
}

#[test]
fn a_drain_ends_by_itself_or_by_its_deadline() {
    let (mut core, mut registry) = pair();
    registry.scale(RoleKind::Rollout, 2, false, 0).unwrap();
    core.decide(&mut registry, Some(&[]), 0);
    let names = ["run-rollout-0-0", "run-rollout-1-0"];
    for name in names {
        registry.register(&registration(name), None, 1).unwrap();
        registry.beat(name, 1, Heartbeat::default(), 1).unwrap();
    }
    registry.scale(RoleKind::Rollout, 0, false, 10).unwrap();
    let list = [ended(names[0]), listed(names[1], Launched::Running)];
    assert!(core.decide(&mut registry, Some(&list), 20).is_empty());
    assert!(registry.views(20).iter().all(|view| view.cause.is_none()));
    registry
        .beat(names[1], 1, Heartbeat::default(), 1500)
        .unwrap();
    let steps = core.decide(&mut registry, Some(&list), 2010);
    assert_eq!(steps, [Step::Stop(names[1].into())]);
    let cause = registry.views(2010)[0].cause.clone().unwrap();
    assert!(cause.contains("2000 ms"), "{cause}");
}

#[test]
fn nothing_starts_any_more_at_the_end() {
    let (mut core, mut registry) = pair();
    registry.scale(RoleKind::Rollout, 1, false, 0).unwrap();
    core.end();
    assert!(core.decide(&mut registry, Some(&[]), 0).is_empty());
}

/// An engine registers, and serves version 6 in place of 5.
fn wrong_engine(registry: &mut Registry, name: &str, now_ms: u64) {
    let engine = Registration {
        kind: RoleKind::Engine,
        address: Some("http://h:1".into()),
        ..registration(name)
    };
    registry.register(&engine, None, now_ms).unwrap();
    let beat = Heartbeat {
        version: Some(6),
        ..Heartbeat::default()
    };
    registry.beat(name, 1, beat, now_ms).unwrap();
}

#[test]
fn an_engine_that_stays_in_quarantine_is_replaced_after_a_pause_and_with_a_bound() {
    let (mut core, mut registry) = pair();
    registry.set_weights(5, None, 0);
    registry.scale(RoleKind::Engine, 1, false, 0).unwrap();
    let first = "run-engine-0-0";
    assert_eq!(starts(&core.decide(&mut registry, Some(&[]), 0)), [first]);
    wrong_engine(&mut registry, first, 10);
    let running = [listed(first, Launched::Running)];
    assert!(core.decide(&mut registry, Some(&running), 10).is_empty());
    assert!(core.decide(&mut registry, Some(&running), 409).is_empty());
    let steps = core.decide(&mut registry, Some(&running), 410);
    assert_eq!(steps, [Step::Stop(first.into())]);
    // The engine that is to end is asked again for as long as its launcher lists it.
    let steps = core.decide(&mut registry, Some(&running), 500);
    assert_eq!(steps, [Step::Stop(first.into())]);
    let steps = core.decide(&mut registry, Some(&[]), 510);
    assert_eq!(starts(&steps), ["run-engine-0-1"]);
    let cause = registry.views(510)[0].cause.clone().unwrap();
    assert!(cause.contains("serves weights of version 6"), "{cause}");
    for (name, at, next) in [
        ("run-engine-0-1", 600, Some("run-engine-0-2")),
        ("run-engine-0-2", 1_500, None),
    ] {
        wrong_engine(&mut registry, name, at);
        let running = [listed(name, Launched::Running)];
        let steps = core.decide(&mut registry, Some(&running), at + 400);
        assert_eq!(steps, [Step::Stop(name.into())]);
        let steps = core.decide(&mut registry, Some(&[]), at + 800);
        assert_eq!(starts(&steps), next.into_iter().collect::<Vec<_>>());
    }
}

#[test]
fn quarantine_that_passes_or_is_a_persons_ends_nothing() {
    let (mut core, mut registry) = pair();
    registry.set_weights(5, None, 0);
    registry.scale(RoleKind::Engine, 1, false, 0).unwrap();
    let name = "run-engine-0-0";
    core.decide(&mut registry, Some(&[]), 0);
    wrong_engine(&mut registry, name, 10);
    // The wanted weights follow: the engine was ahead.
    registry.set_weights(6, None, 300);
    let running = [listed(name, Launched::Running)];
    assert!(core.decide(&mut registry, Some(&running), 900).is_empty());
    assert_eq!(registry.views(900)[0].state, RoleState::Ready);
    let (mut core, mut registry) = pair();
    registry.set_weights(5, None, 0);
    wrong_engine(&mut registry, "run-engine-3-0", 10);
    assert!(core.decide(&mut registry, Some(&[]), 10).is_empty());
    assert!(core.decide(&mut registry, Some(&[]), 900).is_empty());
}
