//! Any sequence of calls, with reopening in between, does what the memory model does.

use crate::calls::{Call, call, run, view};
use crate::traces::id;
use proptest::prelude::*;
use sinew_store::{DiskStore, MemoryStore, StoreOptions, TraceStore};

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn disk_does_what_memory_does(calls in prop::collection::vec(call(), 1..25)) {
        let directory = tempfile::tempdir().unwrap();
        let options = StoreOptions { segment_bytes: 1_500, ..StoreOptions::default() };
        let memory = MemoryStore::new(1 << 30);
        let mut disk = DiskStore::open(directory.path(), options).unwrap();
        for call in &calls {
            prop_assert_eq!(run(&memory, call), run(&disk, call), "{:?}", call);
            if matches!(call, Call::Reopen) {
                drop(disk);
                disk = DiskStore::open(directory.path(), options).unwrap();
                prop_assert!(disk.recovery().damaged.is_empty());
                prop_assert_eq!(disk.recovery().indexed, 0);
            }
        }
        prop_assert_eq!(view(&memory), view(&disk));
        let all = |store: &dyn TraceStore| store.scores_after(Default::default(), 1_000).unwrap();
        prop_assert_eq!(all(&memory).scores, all(&disk).scores);
        for n in 0..40 {
            prop_assert_eq!(memory.get(&id(n)).unwrap(), disk.get(&id(n)).unwrap());
            prop_assert_eq!(memory.scores(&id(n)).unwrap(), disk.scores(&id(n)).unwrap());
        }
    }
}
