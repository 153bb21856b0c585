//! Many episodes at once: admission, ownership, durable commit.

use crate::driver::{EpisodeOptions, EpisodeParts};
use crate::episode::{EpisodeEvent, EpisodeMachine, EpisodeSpec};
use sinew_store::{StoreError, TraceStore};
use sinew_types::{FailureKind, Timing, Trace};
use std::collections::HashMap;
use std::sync::Arc;
use tokio::sync::watch;
use tokio::task::JoinSet;

/// Why a batch of episodes stopped.
#[derive(Debug, thiserror::Error)]
pub enum BatchError {
    #[error("episodes cannot be stored: {0}")]
    Store(#[from] StoreError),
    #[error("stopped on request")]
    Cancelled,
}

/// Runs episodes with at most `max_in_flight` at once and returns a trace for each, in the
/// order of `specs`. Each trace is durable in the store before it counts. Episodes that the
/// store already holds are taken from there and not run again. `cancel` turning true ends the
/// batch: episodes that are committed stay, the others will be run again.
pub async fn run_batch(
    parts: &EpisodeParts,
    options: &EpisodeOptions,
    store: &Arc<dyn TraceStore>,
    specs: Vec<EpisodeSpec>,
    max_in_flight: usize,
    mut cancel: watch::Receiver<bool>,
) -> Result<Vec<Trace>, BatchError> {
    let mut done: HashMap<usize, Trace> = HashMap::new();
    let mut waiting = Vec::new();
    for (index, spec) in specs.iter().enumerate() {
        match store.get(&spec.episode)? {
            Some(trace) => {
                done.insert(index, trace);
            }
            None => waiting.push(index),
        }
    }
    waiting.reverse();
    let mut running = JoinSet::new();
    let mut owners = HashMap::new();
    loop {
        while running.len() < max_in_flight.max(1)
            && let Some(index) = waiting.pop()
        {
            let (parts, options, spec) = (parts.clone(), options.clone(), specs[index].clone());
            let handle = running.spawn(async move {
                let _in_flight = parts.gauges.begin();
                parts.harness.run(&parts, &options, &spec).await
            });
            owners.insert(handle.id(), index);
        }
        if running.is_empty() {
            break;
        }
        let finished = tokio::select! {
            finished = running.join_next_with_id() => finished,
            _ = cancel.wait_for(|&stop| stop) => {
                running.shutdown().await;
                return Err(BatchError::Cancelled);
            }
        };
        // Whoever finished meanwhile shares one synchronization of the disk.
        let mut finished: Vec<_> = finished.into_iter().collect();
        while let Some(another) = running.try_join_next_with_id() {
            finished.push(another);
        }
        let mut traces = Vec::with_capacity(finished.len());
        for result in finished {
            let (id, result) = match result {
                Ok((id, trace)) => (id, Ok(trace)),
                Err(e) => (e.id(), Err(e.to_string())),
            };
            if let Some(index) = owners.remove(&id) {
                let trace = result.unwrap_or_else(|e| panicked(&specs[index], options, e));
                parts.gauges.finish(&trace);
                traces.push((index, trace));
            }
        }
        done.extend(commit(store, traces).await?);
    }
    Ok((0..specs.len()).filter_map(|i| done.remove(&i)).collect())
}

/// The trace of an episode whose task died: nothing of it can be trusted but that it failed.
fn panicked(spec: &EpisodeSpec, options: &EpisodeOptions, message: String) -> Trace {
    let mut machine = EpisodeMachine::new(spec, options.limits.clone());
    machine.on_event(EpisodeEvent::Failed {
        kind: FailureKind::Cancelled,
        message,
    });
    machine.into_trace(Timing::default())
}

async fn commit(
    store: &Arc<dyn TraceStore>,
    traces: Vec<(usize, Trace)>,
) -> Result<Vec<(usize, Trace)>, StoreError> {
    let store = Arc::clone(store);
    let committed = tokio::task::spawn_blocking(move || {
        let (indexes, traces): (Vec<usize>, Vec<Trace>) = traces.into_iter().unzip();
        store.commit_batch(&traces)?;
        Ok(indexes.into_iter().zip(traces).collect())
    });
    committed.await.unwrap_or_else(|e| {
        Err(StoreError::Io {
            path: "commit task".into(),
            source: std::io::Error::other(e),
        })
    })
}
