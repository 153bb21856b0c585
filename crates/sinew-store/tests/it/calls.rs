//! Random calls of a store, for comparisons with the model in memory.

use crate::traces::{id, score, trace};
use proptest::prelude::*;
use sinew_store::{Filter, GcPolicy, TraceStore, TrainedBatch};

#[derive(Clone, Debug)]
pub(crate) enum Call {
    Commit(Vec<u64>),
    /// An update of the newest owner, or of one so many numbers before it.
    Mark(u8, Vec<u64>, u64),
    TakeFence,
    Score(Vec<(u64, u64)>),
    Gc(u64, bool),
    Reopen,
}

pub(crate) fn call() -> impl Strategy<Value = Call> {
    let ids = || prop::collection::vec(0u64..40, 0..5);
    prop_oneof![
        4 => ids().prop_map(Call::Commit),
        3 => prop::collection::vec((0u64..44, 0u64..3), 0..6).prop_map(Call::Score),
        2 => (0u8..6, ids()).prop_map(|(b, ids)| Call::Mark(b, ids, 0)),
        1 => (0u8..6, ids(), 1u64..3).prop_map(|(b, ids, old)| Call::Mark(b, ids, old)),
        1 => Just(Call::TakeFence),
        1 => (0u64..5, any::<bool>()).prop_map(|(s, k)| Call::Gc(s, k)),
        1 => Just(Call::Reopen),
    ]
}

/// The outcome of a call as text; of errors only which one it was.
pub(crate) fn run(store: &dyn TraceStore, call: &Call) -> String {
    let name = |e: sinew_store::StoreError| {
        let text = format!("{e:?}");
        text.split([' ', '(']).next().unwrap_or_default().to_owned()
    };
    match call {
        Call::Commit(ids) => {
            let traces: Vec<_> = ids.iter().map(|&n| trace(n, n as usize)).collect();
            format!("{:?}", store.commit_batch(&traces).map_err(name))
        }
        Call::Mark(batch, ids, old) => {
            let ids: Vec<_> = ids.iter().map(|&n| id(n)).collect();
            let (batch, step) = (format!("b{batch}"), u64::from(*batch));
            let update = TrainedBatch {
                fence: store.newest_fence().unwrap().saturating_sub(*old),
                ..TrainedBatch::new(&batch, step, &ids)
            };
            format!("{:?}", store.commit_update(&update, false).map_err(name))
        }
        Call::Gc(before_update, keep_untrained) => {
            let policy = GcPolicy {
                before_update: *before_update,
                keep_untrained: *keep_untrained,
            };
            format!("{:?}", store.gc(policy).map(|r| r.episodes).map_err(name))
        }
        Call::Score(scores) => {
            // Two values at most of a time, so that some come again.
            let of = |&(n, at): &(u64, u64)| score(n, "thumbs", at, (n % 2) as f64);
            let scores: Vec<_> = scores.iter().map(of).collect();
            format!("{:?}", store.put_scores(&scores).map_err(name))
        }
        Call::TakeFence => format!("{:?}", store.take_fence().map_err(name)),
        Call::Reopen => String::new(),
    }
}

pub(crate) fn view(store: &dyn TraceStore) -> String {
    let mut page = store.list(&Filter::default()).unwrap();
    // Cursors have the same order, but need not be the same numbers.
    for e in &mut page.episodes {
        e.cursor = Default::default();
    }
    let stats = sinew_store::StoreStats {
        bytes: 0,
        ..store.stats().unwrap()
    };
    let batches = store.trained_batches().unwrap();
    let fence = store.newest_fence().unwrap();
    format!("{page:#?}\n{stats:#?}\n{batches:#?}\n{fence}")
}
