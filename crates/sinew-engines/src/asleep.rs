//! The memory that a sleeping server has given up, for a trainer on the same GPUs.

/// Memory that a server has given up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Asleep {
    /// None.
    #[default]
    No,
    /// That of its KV cache.
    KvCache,
    /// That of weights and KV cache.
    All,
}
