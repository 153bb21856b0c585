//! Weights between processes: the trainer publishes versions in a folder, engines follow it.
//!
//! ```text
//! DIR/v00000010-9f3c12ab/model.safetensors   all tensors: an anchor
//!                        manifest.json       version, lineage, tensors, a BLAKE3 sum of each
//! DIR/v00000013-9f3c12ab/deltas.zst          differences to version 10, if they are smaller
//!                        manifest.json       `base`: 10
//! DIR/LATEST                                 v00000013-9f3c12ab
//! ```
//!
//! A folder on `/dev/shm` is memory that all processes of a host share; one on a shared file system reaches
//! other hosts. Differences are always of the last anchor, never of each other: an engine that comes late, or
//! misses versions, needs two folders and no chain. A version whose difference is more than 0.3 of the whole
//! is published whole, as the next anchor; so are 1, 2, 4, up to 8 versions after it, before another try.
//!
//! Invariants:
//! - `LATEST` names a version that is complete: its manifest was written after its tensors.
//! - A follower gives tensors out once the checksum of each is right, and gives out those bytes.
//! - The publisher waits for no follower: a follower's open file can be read after its name is gone.

mod background;
mod delta;
mod follow;
mod load;
mod publish;
mod tensors;

pub use background::{PublishObserver, Publisher};
pub use follow::{FollowError, FollowedWeights, WeightsFollower};
pub use load::{FollowEvent, follow};
pub use publish::{PublishedVersion, SharedWeights};

/// The name of the newest version.
const LATEST: &str = "LATEST";
/// Written last in a version's folder.
const MANIFEST: &str = "manifest.json";
/// All tensors of a version.
const TENSORS: &str = "model.safetensors";
/// Differences of all tensors, one after the other.
const DELTAS: &str = "deltas.zst";
/// Part of the whole above which a difference is not worth its computing: packing takes about 10 s for a
/// gigabyte, as long as sending it whole at 1 Gbit/s.
const MAX_DELTA: f64 = 0.3;
/// A difference that is too large so far is given up after this part of the bytes: one of so many.
const DELTA_PARTS: usize = 16;
/// Most versions that are published whole after a difference that was too large.
const MAX_PAUSE: u32 = 8;

#[cfg(test)]
mod tests;
