//! The registry: places, leases, states, counts and weights.

use super::*;
use proptest::prelude::*;

fn registry() -> Registry {
    let limits = ControlLimits {
        lease_ms: 100,
        start_ms: 1000,
        roles: 8,
        events: 16,
        ..ControlLimits::default()
    };
    Registry::new("run", 3, limits)
}

fn engine(name: &str) -> Registration {
    Registration {
        kind: RoleKind::Engine,
        name: name.into(),
        host: "h".into(),
        address: Some("http://h:1".into()),
        build: "1".into(),
        capacity: 4,
        preemptible: false,
    }
}

fn serving(version: u64, checksum: &str) -> Heartbeat {
    Heartbeat {
        version: Some(version),
        checksum: Some(checksum.into()),
        ..Heartbeat::default()
    }
}

fn state(registry: &Registry, id: &RoleId) -> RoleState {
    let views = registry.views(0);
    views
        .iter()
        .find(|v| v.id == *id)
        .map_or(RoleState::Removed, |v| v.state)
}

#[test]
fn a_role_registers_beats_and_leaves() {
    let mut registry = registry();
    let lease = registry.register(&engine(""), None, 0).unwrap();
    assert_eq!((lease.id.as_str(), lease.fence), ("run-engine-0-0", 3));
    assert_eq!(state(&registry, &lease.id), RoleState::HealthChecking);
    let orders = registry
        .beat(lease.id.as_str(), 3, Heartbeat::default(), 50)
        .unwrap();
    assert!(!orders.drain && orders.wanted_version.is_none());
    assert_eq!(state(&registry, &lease.id), RoleState::Ready);
    registry.leave(lease.id.as_str(), 3, 60).unwrap();
    let gone = registry.beat(lease.id.as_str(), 3, Heartbeat::default(), 70);
    assert!(matches!(gone, Err(ControlError::Gone(_))), "{gone:?}");
    let next = registry.register(&engine(""), None, 80).unwrap();
    assert_eq!(next.id.as_str(), "run-engine-0-1");
}

#[test]
fn a_lease_ends_by_the_owners_clock_and_may_be_taken_again() {
    let mut registry = registry();
    let lease = registry.register(&engine(""), None, 0).unwrap();
    assert!(registry.expire(99).is_empty());
    assert_eq!(registry.expire(100), std::slice::from_ref(&lease.id));
    assert!(
        registry.views(100)[0]
            .cause
            .as_ref()
            .unwrap()
            .contains("100 ms")
    );
    let again = registry
        .register(&engine(lease.id.as_str()), Some(3), 200)
        .unwrap();
    assert_eq!(again.id, lease.id);
}

#[test]
fn calls_of_other_generations_are_refused_in_both_directions() {
    let mut registry = registry();
    let lease = registry.register(&engine(""), Some(2), 0).unwrap();
    for fence in [2, 4] {
        let refused = registry.beat(lease.id.as_str(), fence, Heartbeat::default(), 1);
        assert!(
            matches!(refused, Err(ControlError::Fenced { own: 3, .. })),
            "{refused:?}"
        );
        assert!(registry.leave(lease.id.as_str(), fence, 1).is_err());
        assert!(registry.drain(lease.id.as_str(), Some(fence), 1).is_err());
    }
    let old_owner = registry.register(&engine(""), Some(4), 0);
    assert!(matches!(
        old_owner,
        Err(ControlError::Fenced { given: 4, own: 3 })
    ));
    registry.drain(lease.id.as_str(), None, 2).unwrap();
}

#[test]
fn a_newer_incarnation_replaces_the_older_one() {
    let mut registry = registry();
    registry
        .register(&engine("run-engine-0-1"), None, 0)
        .unwrap();
    registry
        .register(&engine("run-engine-0-2"), None, 1)
        .unwrap();
    for old in [
        registry
            .beat("run-engine-0-1", 3, Heartbeat::default(), 2)
            .map(drop),
        registry
            .register(&engine("run-engine-0-1"), None, 2)
            .map(drop),
    ] {
        assert!(matches!(old, Err(ControlError::Superseded(_))), "{old:?}");
    }
    registry
        .beat("run-engine-0-2", 3, Heartbeat::default(), 2)
        .unwrap();
}

#[test]
fn wrong_registrations_are_refused_by_field() {
    let mut registry = registry();
    let long = "x".repeat(300);
    let wrong = [
        (engine("other-engine-0-0"), "name"),
        (engine("run-rollout-0-0"), "name"),
        (engine("run-engine-8-0"), "name"),
        (engine(&long), "name"),
        (
            Registration {
                host: String::new(),
                ..engine("")
            },
            "host",
        ),
        (
            Registration {
                capacity: 0,
                ..engine("")
            },
            "capacity",
        ),
        (
            Registration {
                build: "a\nb".into(),
                ..engine("")
            },
            "build",
        ),
    ];
    for (registration, field) in wrong {
        let why = registry
            .register(&registration, None, 0)
            .unwrap_err()
            .to_string();
        assert!(why.starts_with(field) && why.contains("allowed"), "{why}");
    }
    for _ in 0..8 {
        registry.register(&engine(""), None, 0).unwrap();
    }
    let full = registry.register(&engine(""), None, 0);
    assert!(matches!(full, Err(ControlError::Full(8))), "{full:?}");
}

#[test]
fn engines_are_ready_only_with_the_wanted_weights() {
    let mut registry = registry();
    registry.set_weights(5, Some("aa".into()), 0);
    let id = registry.register(&engine(""), None, 0).unwrap().id;
    let mut after = |heartbeat: Heartbeat| {
        let orders = registry.beat(id.as_str(), 3, heartbeat, 1).unwrap();
        assert_eq!(orders.wanted_version, Some(5));
        let view = registry.views(1).remove(0);
        (view.state, view.quarantined)
    };
    assert_eq!(
        after(Heartbeat::default()),
        (RoleState::WeightSyncing, false)
    );
    assert_eq!(after(serving(4, "aa")), (RoleState::WeightSyncing, false));
    assert_eq!(after(serving(5, "bb")), (RoleState::WeightSyncing, true));
    assert_eq!(after(serving(6, "aa")), (RoleState::WeightSyncing, true));
    assert_eq!(after(serving(5, "aa")), (RoleState::Ready, false));
    registry.set_weights(6, Some("cc".into()), 2);
    assert_eq!(state(&registry, &id), RoleState::WeightSyncing);
    let causes: Vec<String> = registry
        .events_after(0)
        .into_iter()
        .filter_map(|e| e.cause)
        .collect();
    assert!(
        causes
            .iter()
            .any(|why| why.contains("checksum bb, wanted is aa")),
        "{causes:?}"
    );
}

#[test]
fn the_first_error_of_a_role_stays() {
    let mut registry = registry();
    let id = registry.register(&engine(""), None, 0).unwrap().id;
    let failed = |why: &str| Heartbeat {
        cause: Some(why.into()),
        ..Heartbeat::default()
    };
    registry
        .beat(id.as_str(), 3, failed("out of memory"), 1)
        .unwrap();
    registry
        .beat(id.as_str(), 3, failed("connection reset"), 2)
        .unwrap();
    registry.expire(200);
    assert_eq!(
        registry.views(200)[0].cause.as_deref(),
        Some("out of memory")
    );
    let long = "é".repeat(MAX_CAUSE_BYTES);
    let id = registry.register(&engine(""), None, 300).unwrap().id;
    registry.beat(id.as_str(), 3, failed(&long), 301).unwrap();
    assert!(registry.views(301)[0].cause.as_ref().unwrap().len() <= MAX_CAUSE_BYTES);
}

#[test]
fn the_last_words_of_a_role_that_drains_are_an_event_and_no_failure() {
    let mut registry = registry();
    let id = registry.register(&engine(""), None, 0).unwrap().id;
    registry.drain(id.as_str(), Some(3), 1).unwrap();
    let words = Heartbeat {
        cause: Some("2 episodes had not ended".into()),
        ..Heartbeat::default()
    };
    for now_ms in [2, 3] {
        let orders = registry.beat(id.as_str(), 3, words.clone(), now_ms);
        assert!(orders.unwrap().drain);
    }
    registry.leave(id.as_str(), 3, 4).unwrap();
    let events = registry.events_after(0);
    let causes = events.iter().filter_map(|event| event.cause.as_deref());
    assert_eq!(causes.collect::<Vec<_>>(), ["2 episodes had not ended"]);
    assert!(registry.views(4).is_empty(), "it left as it should");
}

#[test]
fn counts_are_absolute_and_met_once() {
    let mut registry = registry();
    let plan = registry.scale(RoleKind::Engine, 3, true, 0).unwrap();
    assert_eq!((plan.start.len(), plan.dry_run), (3, true));
    assert!(registry.views(0).is_empty());
    registry.scale(RoleKind::Engine, 3, false, 0).unwrap();
    assert!(
        registry
            .scale(RoleKind::Engine, 3, false, 1)
            .unwrap()
            .is_met()
    );
    let why = registry
        .scale(RoleKind::Engine, 9, false, 1)
        .unwrap_err()
        .to_string();
    assert!(why.contains("count") && why.contains("0 to 8"), "{why}");
}

#[test]
fn the_least_useful_roles_drain_first() {
    let mut registry = registry();
    let beat = |registry: &mut Registry, id: &RoleId, busy: u32| {
        let heartbeat = Heartbeat {
            busy,
            ..Heartbeat::default()
        };
        registry.beat(id.as_str(), 3, heartbeat, 1).unwrap();
    };
    let spot = Registration {
        preemptible: true,
        ..engine("")
    };
    let ids: Vec<RoleId> = [engine(""), spot, engine("")]
        .iter()
        .map(|r| registry.register(r, None, 0).unwrap().id)
        .collect();
    for (id, busy) in ids.iter().zip([3, 4, 0]) {
        beat(&mut registry, id, busy);
    }
    let plan = registry.scale(RoleKind::Engine, 1, false, 2).unwrap();
    assert_eq!(plan.drain, [ids[1].clone(), ids[2].clone()]);
    let orders = registry
        .beat(ids[1].as_str(), 3, Heartbeat::default(), 3)
        .unwrap();
    assert!(orders.drain);
    assert_eq!(state(&registry, &ids[1]), RoleState::Draining);
    // A wanted count that grows again does not call back a role that drains.
    assert_eq!(
        registry
            .scale(RoleKind::Engine, 2, false, 4)
            .unwrap()
            .start
            .len(),
        1
    );
}

#[test]
fn servers_from_outside_count_and_wait_for_their_health() {
    let mut registry = registry();
    let id = registry.add_outside(&engine("http://h:1"), 0).unwrap();
    assert_eq!(registry.add_outside(&engine("http://h:1"), 0).unwrap(), id);
    let plan = registry.scale(RoleKind::Engine, 2, true, 0).unwrap();
    assert_eq!(plan.start.len(), 1);
    registry.observe(id.as_str(), Heartbeat::default(), 1);
    assert_eq!(state(&registry, &id), RoleState::Ready);
    assert!(registry.expire(500).is_empty());
    assert_eq!(state(&registry, &id), RoleState::HealthChecking);
    registry.observe(id.as_str(), Heartbeat::default(), 600);
    assert_eq!(state(&registry, &id), RoleState::Ready);
    let none = Registration {
        address: None,
        ..engine("")
    };
    assert!(registry.add_outside(&none, 0).is_err());
}

#[test]
fn a_person_may_take_a_place_that_was_not_started_yet() {
    let mut registry = registry();
    registry.scale(RoleKind::Engine, 1, false, 0).unwrap();
    let lease = registry.register(&engine(""), None, 1).unwrap();
    assert_eq!(lease.id.as_str(), "run-engine-0-0");
    assert!(
        registry
            .scale(RoleKind::Engine, 1, true, 2)
            .unwrap()
            .is_met()
    );
}

#[test]
fn events_are_bounded_and_numbered() {
    let mut registry = registry();
    for now_ms in 0..40 {
        let id = registry.register(&engine(""), None, now_ms).unwrap().id;
        registry.leave(id.as_str(), 3, now_ms).unwrap();
    }
    let events = registry.events_after(0);
    assert_eq!((events.len(), events.last().unwrap().seq), (16, 80));
    assert_eq!(registry.events_after(79).len(), 1);
}

proptest! {
    /// Whatever roles do, incarnations of a place only grow, and no more are there than places.
    #[test]
    fn places_hold_one_role_each(calls in proptest::collection::vec((0u8..6, 0u32..10, 0u32..4), 1..200)) {
        let mut registry = registry();
        let mut highest: BTreeMap<Place, u32> = BTreeMap::new();
        for (now, (call, index, incarnation)) in calls.into_iter().enumerate() {
            let (now_ms, id) = (now as u64 * 30, format!("run-engine-{index}-{incarnation}"));
            match call {
                0 => drop(registry.register(&engine(&id), None, now_ms)),
                1 => drop(registry.register(&engine(""), None, now_ms)),
                2 => drop(registry.beat(&id, 3, Heartbeat::default(), now_ms)),
                3 => drop(registry.leave(&id, 3, now_ms)),
                4 => drop(registry.scale(RoleKind::Engine, index, false, now_ms)),
                _ => drop(registry.expire(now_ms)),
            }
            for (place, slot) in registry.slots() {
                prop_assert!(place.1 < 8);
                let most = highest.entry(place).or_insert(slot.incarnation);
                prop_assert!(slot.incarnation >= *most);
                *most = slot.incarnation;
            }
        }
    }
}
