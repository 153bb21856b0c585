//! `[store]`: where traces are kept.

use crate::section::{choice, section};

choice! {
    /// Where traces are kept.
    StoreKind {
        /// In the run's folder; survives the process.
        Disk = "disk",
        /// In memory, up to 4 GiB; gone with the process.
        Memory = "memory",
    }
}

section! {
    /// Where traces are kept.
    StoreKeys => StorePlan, "store" {
        /// Where traces are kept.
        kind as "type": StoreKind = StoreKind::Disk;
    }
}
