//! Fields of requests that are accepted without effect, counted by path.

use std::collections::BTreeMap;

/// Maximum number of paths that are counted apart, in a request and in a rollout.
pub(crate) const MAX_IGNORED: usize = 64;

/// Name under which further paths are counted.
pub(crate) const MORE_IGNORED: &str = "(other fields)";

/// Counts of fields without effect, by path. Bounded: further paths share one count.
pub type Ignored = BTreeMap<String, u64>;

/// Adds to the count of a path, within the bound.
pub fn count_ignored(ignored: &mut Ignored, path: &str, count: u64) {
    let known = ignored.contains_key(path);
    let path = if known || ignored.len() < MAX_IGNORED {
        path
    } else {
        MORE_IGNORED
    };
    *ignored.entry(path.to_owned()).or_default() += count;
}
