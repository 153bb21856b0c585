//! Changes of runs as server-sent events.
//!
//! One task looks at the folders twice a second and sends the names of changed parts; pages then ask for
//! those. A page that is slow loses changes and gets a message to load everything again: nothing is kept for
//! it.

use crate::runs::{Runs, Stamp};
use crate::shared::{Changes, Shared};
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use serde_json::json;
use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::broadcast;

/// Interval of looks.
const EVERY: Duration = Duration::from_millis(500);
/// Looks until it is dropped.
pub(crate) async fn watch(runs: Arc<Runs>, changes: Changes) {
    let mut seen = BTreeMap::<String, Stamp>::new();
    let mut ticks = tokio::time::interval(EVERY);
    loop {
        ticks.tick().await;
        // Nothing is looked at while no page is open.
        if changes.sender.receiver_count() == 0 {
            seen.clear();
            continue;
        }
        let runs = Arc::clone(&runs);
        let look = tokio::task::spawn_blocking(move || {
            let runs = runs.all();
            let stamps = runs.iter().map(|run| (run.name.clone(), run.stamp()));
            stamps.collect::<BTreeMap<_, _>>()
        });
        let Ok(now) = look.await else { continue };
        for (run, stamp) in &now {
            let what = match seen.get(run) {
                Some(before) => changed(before, stamp),
                None if seen.is_empty() => continue,
                None => vec!["runs"],
            };
            if !what.is_empty() {
                // The event may be lost if no page listens.
                let _ = changes
                    .sender
                    .send(json!({ "run": run, "what": what }).to_string());
            }
        }
        seen = now;
    }
}

/// Changed parts of a run.
fn changed(before: &Stamp, now: &Stamp) -> Vec<&'static str> {
    let parts = [
        ("steps", before.steps != now.steps),
        ("live", before.live != now.live),
        ("episodes", before.episodes != now.episodes),
        ("runs", before.ended != now.ended),
    ];
    parts.into_iter().filter(|p| p.1).map(|p| p.0).collect()
}

/// `GET /api/events`
pub(crate) async fn stream(State(shared): State<Shared>) -> Response {
    let Ok(permit) = Arc::clone(&shared.changes.places).try_acquire_owned() else {
        let why = "too many pages listen; close one";
        return (StatusCode::SERVICE_UNAVAILABLE, why).into_response();
    };
    let receiver = shared.changes.sender.subscribe();
    let events = futures::stream::unfold((receiver, permit), |(mut receiver, permit)| async move {
        let event = match receiver.recv().await {
            Ok(text) => Event::default().event("change").data(text),
            Err(broadcast::error::RecvError::Lagged(_)) => {
                Event::default().event("resync").data("{}")
            }
            Err(broadcast::error::RecvError::Closed) => return None,
        };
        Some((Ok::<_, Infallible>(event), (receiver, permit)))
    });
    Sse::new(events)
        .keep_alive(KeepAlive::default())
        .into_response()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_changed_is_named() {
        let before = Stamp::default();
        assert!(changed(&before, &before).is_empty());
        let now = Stamp {
            live: (1, 2, 3),
            ..before
        };
        assert_eq!(changed(&before, &now), ["live"]);
    }
}
