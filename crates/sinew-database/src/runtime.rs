//! Async work for callers that block: one runtime of this process, which is never dropped.

use sinew_store::StoreError;
use std::sync::LazyLock;
use tokio::runtime::{Builder, Handle, Runtime};

static RUNTIME: LazyLock<Result<Runtime, String>> = LazyLock::new(|| {
    let mut builder = Builder::new_multi_thread();
    builder.worker_threads(1).thread_name("sinew-database");
    builder.enable_all().build().map_err(|e| e.to_string())
});

/// Runs `work` where it may block on the runtime: on this thread, or on another one if this belongs to a
/// runtime of the caller.
///
/// # Errors
/// If the system refuses a thread.
pub(crate) fn outside<T: Send>(
    work: impl FnOnce(&'static Runtime) -> T + Send,
) -> Result<T, StoreError> {
    let runtime = RUNTIME.as_ref().map_err(|reason| StoreError::Server {
        server: "this process".into(),
        reason: reason.clone(),
    })?;
    if Handle::try_current().is_err() {
        return Ok(work(runtime));
    }
    std::thread::scope(|scope| match scope.spawn(|| work(runtime)).join() {
        Ok(done) => Ok(done),
        Err(panic) => std::panic::resume_unwind(panic),
    })
}

/// Returns a random name.
///
/// # Errors
/// If the system has no randomness.
pub(crate) fn random_name() -> Result<String, StoreError> {
    let mut random = [0; 8];
    getrandom::fill(&mut random).map_err(|e| StoreError::Server {
        server: "this process".into(),
        reason: format!("no randomness: {e}"),
    })?;
    Ok(format!("{:016x}", u64::from_le_bytes(random)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn callers_may_belong_to_a_runtime() {
        let work = || outside(|runtime| runtime.block_on(async { 7 })).unwrap();
        assert_eq!(work(), 7);
        let own = Builder::new_current_thread().build().unwrap();
        assert_eq!(own.block_on(async { work() }), 7);
    }
}
