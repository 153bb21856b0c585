//! Any sequence of calls, with reopening in between, does what the memory model does.

use crate::calls::{Call, call, run, view};
use crate::support::{new_name, open_at, url};
use crate::traces::id;
use proptest::prelude::*;
use sinew_store::{MemoryStore, TraceStore};

proptest! {
    #![proptest_config(ProptestConfig::with_cases(8))]

    #[test]
    fn postgres_does_what_memory_does(calls in prop::collection::vec(call(), 1..25)) {
        let (memory, name) = (MemoryStore::new(1 << 30), new_name());
        let mut store = open_at(&url(), &name, None);
        for call in &calls {
            prop_assert_eq!(run(&memory, call), run(&store, call), "{:?}", call);
            if matches!(call, Call::Reopen) {
                store = open_at(&url(), &name, None);
            }
        }
        prop_assert_eq!(view(&memory), view(&store));
        let all = |store: &dyn TraceStore| store.scores_after(Default::default(), 1_000).unwrap();
        prop_assert_eq!(all(&memory).scores, all(&store).scores);
        for n in 0..40 {
            prop_assert_eq!(memory.get(&id(n)).unwrap(), store.get(&id(n)).unwrap());
            prop_assert_eq!(memory.scores(&id(n)).unwrap(), store.scores(&id(n)).unwrap());
        }
    }
}
