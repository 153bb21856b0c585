//! Scheduler, paged KV, prefix cache, sampler: the embedded engine. Token ids only.
