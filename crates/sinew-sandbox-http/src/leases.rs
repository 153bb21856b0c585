//! Leases of hours and days, under virtual time.

use crate::api::CreateRequest;
use crate::{Bounds, Service, Tokens};
use sinew_sandbox::NullProvider;
use std::sync::Arc;
use std::time::Duration;

const HOUR: Duration = Duration::from_secs(3600);

fn service() -> Arc<Service> {
    let (tokens, _) = Tokens::generate().unwrap();
    let provider = Arc::new(NullProvider::default());
    Arc::new(Service::new(
        vec![provider],
        tokens,
        Bounds::default(),
        None,
    ))
}

#[tokio::test(start_paused = true)]
async fn a_lease_of_hours_holds_and_ends_and_is_renewed_by_use() {
    let service = service();
    let own = Arc::clone(&service);
    let sweep = tokio::spawn(async move { own.sweep().await });
    let hours = |hours: f64| CreateRequest {
        lease_s: Some(hours * 3600.0),
        ..CreateRequest::default()
    };
    let used = service.create("ann", &hours(8.0)).await.unwrap();
    service.create("ann", &hours(8.0)).await.unwrap();
    assert_eq!((used.lease_s, used.expires_in_s), (28_800.0, 28_800.0));
    tokio::time::sleep(7 * HOUR).await;
    assert_eq!(service.live().0, 2);
    service.view("ann", &used.id).unwrap();
    tokio::time::sleep(HOUR + Duration::from_secs(2)).await;
    // The one that was not used is gone, the other one has its eight hours again.
    assert_eq!(service.live().0, 1);
    tokio::time::sleep(6 * HOUR).await;
    assert_eq!(service.live().0, 1);
    tokio::time::sleep(HOUR + Duration::from_secs(2)).await;
    assert_eq!(service.live().0, 0);
    // A day is the longest.
    let day = service.create("ann", &hours(24.0)).await.unwrap();
    tokio::time::sleep(23 * HOUR).await;
    assert!(service.view("ann", &day.id).is_ok());
    let error = service.create("ann", &hours(24.1)).await.unwrap_err();
    assert!(error.to_string().contains("lease_s"), "{error}");
    sweep.abort();
}

#[tokio::test(start_paused = true)]
async fn an_operation_of_hours_holds_its_sandbox() {
    let service = service();
    let own = Arc::clone(&service);
    let sweep = tokio::spawn(async move { own.sweep().await });
    let short = CreateRequest {
        lease_s: Some(60.0),
        ..CreateRequest::default()
    };
    let sandbox = service.create("ann", &short).await.unwrap();
    // An execution or a session of twelve hours holds its sandbox so.
    let held = service.lock_sandbox("ann", &sandbox.id, 12 * HOUR).unwrap();
    tokio::time::sleep(12 * HOUR).await;
    assert_eq!(service.live().0, 1);
    drop(held);
    tokio::time::sleep(Duration::from_secs(62)).await;
    assert_eq!(service.live().0, 0);
    sweep.abort();
}
