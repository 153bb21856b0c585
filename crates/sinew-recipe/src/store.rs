//! `[store]`: where traces are kept.

use crate::section::{choice, section};

choice! {
    /// The place of traces.
    StoreKind {
        /// In the run's folder; survives the process.
        Disk = "disk",
        /// In memory, up to 4 GiB; gone with the process.
        Memory = "memory",
    }
}

section! {
    /// The place of traces.
    StoreKeys => StorePlan, "store" {
        /// The place of traces.
        kind as "type": StoreKind = StoreKind::Disk;
    }
}
