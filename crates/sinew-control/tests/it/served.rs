//! An owner and its roles over HTTP.

use crate::{Served, TOKEN};
use sinew_control::{
    ControlDesk, ControlError, ControlLimits, Heartbeat, OwnerClient, Registration, RoleClient,
    RoleKind, RoleState, Token,
};
use std::sync::Arc;

fn desk(fence: u64) -> Arc<ControlDesk> {
    Arc::new(ControlDesk::new("run", fence, ControlLimits::default()))
}

fn serve(desk: &Arc<ControlDesk>) -> Served {
    Served::new(desk.router(Token::new(TOKEN).unwrap()))
}

fn engine() -> Registration {
    Registration {
        kind: RoleKind::Engine,
        name: String::new(),
        host: "gpu-1".into(),
        address: Some("http://gpu-1:8000".into()),
        build: "1".into(),
        capacity: 8,
        preemptible: true,
    }
}

fn serving(version: u64) -> Heartbeat {
    Heartbeat {
        version: Some(version),
        ..Heartbeat::default()
    }
}

#[test]
fn a_role_lives_from_registration_to_its_end() {
    let desk = desk(1);
    let served = serve(&desk);
    desk.set_wanted_weights(7, None);
    let role = RoleClient::register(&served.url(), TOKEN, &engine()).unwrap();
    let orders = role.beat(&serving(6)).unwrap();
    assert_eq!(
        (orders.wanted_version, orders.drain, orders.fence),
        (Some(7), false, 1)
    );
    assert_eq!(desk.views()[0].state, RoleState::WeightSyncing);
    role.beat(&serving(7)).unwrap();
    let views = RoleClient::roles(&served.url(), TOKEN, Some(RoleKind::Engine)).unwrap();
    assert_eq!((views.len(), views[0].state), (1, RoleState::Ready));
    assert_eq!(views[0].registration, engine());
    let none = RoleClient::roles(&served.url(), TOKEN, Some(RoleKind::Scorer)).unwrap();
    assert!(none.is_empty());
    role.drain().unwrap();
    assert!(role.beat(&serving(7)).unwrap().drain);
    role.leave().unwrap();
    role.leave().unwrap();
    assert!(matches!(role.beat(&serving(7)), Err(ControlError::Gone(_))));
}

#[test]
fn a_role_that_falls_silent_is_removed_without_a_supervisor() {
    let limits = ControlLimits {
        lease_ms: 0,
        ..ControlLimits::default()
    };
    let desk = Arc::new(ControlDesk::new("run", 1, limits));
    let served = serve(&desk);
    let role = RoleClient::register(&served.url(), TOKEN, &engine()).unwrap();
    assert_eq!(desk.expire(), std::slice::from_ref(&role.lease().id));
    let views = desk.views();
    assert_eq!(views[0].state, RoleState::Removed);
    let cause = views[0].cause.clone().unwrap();
    assert!(cause.contains("not heard of"), "{cause}");
    assert!(desk.expire().is_empty());
    assert!(matches!(role.beat(&serving(7)), Err(ControlError::Gone(_))));
}

#[test]
fn roles_register_again_with_the_next_owner_and_refuse_the_last_one() {
    let (old, new) = (desk(1), desk(2));
    let (old_served, new_served) = (serve(&old), serve(&new));
    let role = RoleClient::register(&old_served.url(), TOKEN, &engine()).unwrap();
    // The address stays and the owner changes: a client of the new one with the old lease.
    let registration = Registration {
        name: role.lease().id.to_string(),
        ..engine()
    };
    let mut moved = RoleClient::register(&new_served.url(), TOKEN, &registration).unwrap();
    assert_eq!(
        (moved.lease().fence, &moved.lease().id),
        (2, &role.lease().id)
    );
    moved.again().unwrap();
    moved.beat(&Heartbeat::default()).unwrap();
    // Two owners of one address: what the newer one leased, the older one refuses.
    let newer = desk(3);
    let newest = serve(&newer);
    let lease = RoleClient::register(&newest.url(), TOKEN, &engine()).unwrap();
    let refused = beat_with(&new_served.url(), lease.lease().fence);
    assert_eq!(refused, (409, "fenced".to_owned()));
}

/// Status and code of a heartbeat with a fence.
fn beat_with(url: &str, fence: u64) -> (u16, String) {
    use sinew_http::blocking::Client;
    use sinew_http::{ClientOptions, Method};
    let client = Client::new(ClientOptions::default()).unwrap();
    let request = client
        .request(Method::POST, &format!("{url}/roles/run-engine-0-0/beat"))
        .bearer_auth(TOKEN)
        .header("sinew-fence", fence.to_string())
        .header("content-type", "application/json")
        .body(serde_json::to_vec(&Heartbeat::default()).unwrap());
    let answer = client.ask(request).unwrap();
    let value: serde_json::Value = serde_json::from_slice(&answer.body).unwrap();
    let code = value["error"]["code"].as_str().unwrap().to_owned();
    (answer.status.as_u16(), code)
}

#[test]
fn counts_are_set_over_http_and_outlive_the_owner() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("wanted.json");
    let first = desk(1);
    first
        .keep_wanted(file.clone(), &[(RoleKind::Rollout, 2)])
        .unwrap();
    let served = serve(&first);
    let owner = OwnerClient::new(&served.url(), TOKEN).unwrap();
    let dry = owner.scale(RoleKind::Rollout, 5, true).unwrap();
    assert_eq!((dry.before, dry.start.len()), (2, 3));
    owner.scale(RoleKind::Rollout, 5, false).unwrap();
    assert!(owner.scale(RoleKind::Rollout, 5, false).unwrap().is_met());
    let why = owner
        .scale(RoleKind::Rollout, 9999, false)
        .unwrap_err()
        .to_string();
    assert!(why.contains("count") && why.contains("1024"), "{why}");
    let next = desk(2);
    next.keep_wanted(file, &[(RoleKind::Rollout, 2)]).unwrap();
    assert_eq!(next.page(None).wanted[&RoleKind::Rollout], 5);
}

#[test]
fn servers_are_added_by_hand_and_a_run_is_asked_to_end() {
    let desk = desk(1);
    let served = serve(&desk);
    let owner = OwnerClient::new(&served.url(), TOKEN).unwrap();
    let id = owner.add(&engine()).unwrap();
    assert_eq!(id.as_str(), "run-engine-0-0");
    let none = Registration {
        address: None,
        ..engine()
    };
    assert!(
        owner
            .add(&none)
            .unwrap_err()
            .to_string()
            .contains("address")
    );
    assert!(!owner.page(None).unwrap().stopping);
    owner.stop().unwrap();
    assert!(desk.is_stopping() && owner.page(None).unwrap().stopping);
    owner.drain(&id).unwrap();
    assert!(owner.page(None).unwrap().roles.is_empty());
}

#[test]
fn nothing_is_answered_without_the_token_or_to_what_is_no_call() {
    let desk = desk(1);
    let served = serve(&desk);
    let other = OwnerClient::new(&served.url(), "fedcba9876543210").unwrap();
    let refused = other.page(None).unwrap_err();
    assert!(
        matches!(refused, ControlError::Refused { status: 401, .. }),
        "{refused}"
    );
    let refused = RoleClient::register(&served.url(), "fedcba9876543210", &engine());
    assert!(matches!(
        refused,
        Err(ControlError::Refused { status: 401, .. })
    ));
    let zero = Registration {
        capacity: 0,
        ..engine()
    };
    let why = RoleClient::register(&served.url(), TOKEN, &zero)
        .unwrap_err()
        .to_string();
    assert!(
        why.contains("capacity") && why.contains("at least 1"),
        "{why}"
    );
    assert!(OwnerClient::new("gpu-1:80", TOKEN).is_err());
}
