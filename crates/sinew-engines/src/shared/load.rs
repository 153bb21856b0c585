//! An engine that follows a folder.

use super::follow::WeightsFollower;
use sinew_types::{Engine, PolicyVersion, WeightsId};
use std::sync::Arc;
use std::time::Duration;

/// Interval of reading `LATEST`, which has a few bytes.
const LOOK_EVERY: Duration = Duration::from_millis(200);

/// Result of a look.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FollowEvent {
    /// The engine samples with this version now.
    Loaded {
        /// Version and lineage of the loaded weights.
        id: WeightsId,
        /// The version that it came as a difference of.
        base: Option<PolicyVersion>,
    },
    /// The engine continues with its weights; reported once for each reason in a row.
    Kept {
        /// Error of the folder or the engine.
        why: String,
    },
}

/// One look: what it led to, if anything.
fn look(follower: &mut WeightsFollower, engine: &dyn Engine) -> Option<FollowEvent> {
    let found = match follower.look() {
        Ok(found) => found?,
        Err(e) => return Some(FollowEvent::Kept { why: e.to_string() }),
    };
    let (id, base) = (found.id(), found.base());
    Some(match engine.load_weights(id.version, Arc::new(found)) {
        Ok(()) => FollowEvent::Loaded { id, base },
        Err(e) => FollowEvent::Kept { why: e.to_string() },
    })
}

/// Loads each version that is published into `engine`, between two tokens, once it is verified. Runs until it
/// is dropped, or `heard` returns false.
pub async fn follow(
    engine: Arc<dyn Engine>,
    follower: WeightsFollower,
    mut heard: impl FnMut(FollowEvent) -> bool,
) {
    let mut follower = Some(follower);
    let mut last = None;
    let mut ticks = tokio::time::interval(LOOK_EVERY);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    while let Some(mut own) = follower.take() {
        ticks.tick().await;
        let engine = Arc::clone(&engine);
        // Reading and verifying take a core for a while.
        let looked = tokio::task::spawn_blocking(move || {
            let followed = look(&mut own, &*engine);
            (own, followed)
        });
        let Ok((own, followed)) = looked.await else {
            return;
        };
        follower = Some(own);
        if followed.is_some() && followed != last && !followed.clone().is_none_or(&mut heard) {
            return;
        }
        last = followed.or(last);
    }
}
