//! Many episodes at once: admission, ownership, durable commit.

use crate::admission::READ_EVERY;
use crate::driver::{EpisodeOptions, EpisodeParts};
use crate::episode::{EpisodeEvent, EpisodeSpec};
use sinew_store::{StoreError, TraceStore};
use sinew_types::{EpisodeEnd, EpisodeId, FailureKind, Timing, Trace, mix_seed};
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

/// Runs episodes with at most `max_in_flight` at once, fewer while admission says so, and returns
/// a trace for each, in the order of `specs`. Each trace is durable in the store before it counts. Episodes
/// that the store already holds are taken from there and not run again. `cancel` turning true ends the
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
    let mut looks = tokio::time::interval(READ_EVERY);
    loop {
        while running.len() < max_in_flight.max(1)
            && let Some(index) = waiting.pop()
        {
            let (parts, options, spec) = (parts.clone(), options.clone(), specs[index].clone());
            let handle = running.spawn(async move {
                let place = parts.admission.begin(&spec.episode).await;
                let _in_flight = parts.gauges.begin(&spec.episode);
                let mut trace = parts.harness.run(&parts, &options, &spec).await;
                trace.timing.queue_s = place.waited.as_secs_f64();
                trace
            });
            owners.insert(handle.id(), index);
        }
        if running.is_empty() {
            break;
        }
        let finished = tokio::select! {
            finished = running.join_next_with_id() => finished,
            _ = looks.tick() => {
                parts.admission.look();
                continue;
            }
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
                let trace = result.unwrap_or_else(|e| panicked(parts, &specs[index], options, e));
                parts.gauges.finish(&trace);
                traces.push((index, trace));
            }
        }
        done.extend(commit(store, traces).await?);
    }
    Ok((0..specs.len()).filter_map(|i| done.remove(&i)).collect())
}

/// The episodes that are run again because the system failed them, each with its index in
/// `traces`. `attempt` counts from 1; equal calls give equal ids and seeds.
pub fn again(specs: &[EpisodeSpec], traces: &[Trace], attempt: u32) -> Vec<(usize, EpisodeSpec)> {
    let failed = |trace: &Trace| matches!(trace.end, EpisodeEnd::Failed { .. });
    let pairs = specs.iter().zip(traces).enumerate();
    let failed = pairs.filter(|(_, (_, trace))| failed(trace));
    let next = |spec: &EpisodeSpec| EpisodeSpec {
        episode: EpisodeId::new(format!("{}-r{attempt}", spec.episode)),
        seed: mix_seed(spec.seed, u64::from(attempt)),
        ..spec.clone()
    };
    failed.map(|(i, (spec, _))| (i, next(spec))).collect()
}

/// The trace of an episode whose task died: nothing of it can be trusted but that it failed.
fn panicked(
    parts: &EpisodeParts,
    spec: &EpisodeSpec,
    options: &EpisodeOptions,
    message: String,
) -> Trace {
    let mut machine = options.machine(spec, &parts.run);
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::episode::{EpisodeLimits, EpisodeMachine, RunInfo};
    use sinew_types::{GroupId, SamplingParams, Task, TaskId};

    fn spec(id: &str) -> EpisodeSpec {
        EpisodeSpec {
            episode: EpisodeId::new(id),
            group: GroupId::new("g"),
            task: Task {
                id: TaskId::new("t"),
                kind: "k".into(),
                prompt: String::new(),
                data: serde_json::Value::Null,
                seed: 0,
            },
            draw: 1,
            purpose: "train".into(),
            seed: 7,
        }
    }

    #[test]
    fn what_failed_is_run_again_under_another_id_and_seed() {
        let limits = EpisodeLimits {
            max_turns: 1,
            max_turn_tokens: 1,
            max_context_tokens: 8,
        };
        let specs = [spec("a"), spec("b")];
        let traces: Vec<Trace> = specs
            .iter()
            .zip([false, true])
            .map(|(spec, fails)| {
                let mut machine = {
                    let sampling = SamplingParams::default();
                    let trace = spec.empty_trace(&RunInfo::default(), &sampling);
                    EpisodeMachine::new(trace, limits.clone(), 1.0)
                };
                let message = "gone".to_owned();
                let kind = FailureKind::Sandbox;
                if fails {
                    machine.on_event(EpisodeEvent::Failed { kind, message });
                }
                machine.into_trace(Timing::default())
            })
            .collect();
        let next = again(&specs, &traces, 1);
        assert_eq!(next, again(&specs, &traces, 1));
        let [(1, spec)] = next.as_slice() else {
            panic!("{next:?}");
        };
        assert_eq!(spec.episode.as_str(), "b-r1");
        assert_eq!((&spec.group, &spec.task), (&specs[1].group, &specs[1].task));
        assert_ne!(spec.seed, again(&specs, &traces, 2)[0].1.seed);
        assert_ne!(spec.seed, specs[1].seed);
    }
}
