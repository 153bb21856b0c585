//! A separate runtime for workers, so that they live as long as their handle and serve callers on any
//! runtime, or on none.

use std::future::Future;
use std::sync::mpsc;
use tokio::runtime::{Builder, Handle, Runtime, RuntimeFlavor};

/// A runtime with one thread. Dropping it ends its tasks.
#[derive(Debug)]
pub(crate) struct OwnRuntime(Option<Runtime>);

impl OwnRuntime {
    /// Starts the thread.
    ///
    /// # Errors
    /// If the system gives no thread.
    pub(crate) fn start() -> std::io::Result<Self> {
        let runtime = Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name("sinew-python")
            .enable_all()
            .build()?;
        Ok(Self(Some(runtime)))
    }

    /// Handle for spawning tasks of the runtime. `None` only while it is dropped.
    pub(crate) fn handle(&self) -> Option<Handle> {
        self.0.as_ref().map(|r| r.handle().clone())
    }
}

impl Drop for OwnRuntime {
    fn drop(&mut self) {
        // A runtime that is dropped within another one must not block.
        if let Some(runtime) = self.0.take() {
            runtime.shutdown_background();
        }
    }
}

/// Runs a future on the runtime and blocks this thread until it is ready. `None` if the runtime is gone.
///
/// It may be called within another runtime: a thread of one with several gives its other tasks away first.
pub fn block_on<F>(handle: &Handle, future: F) -> Option<F::Output>
where
    F: Future + Send + 'static,
    F::Output: Send + 'static,
{
    let (sender, receiver) = mpsc::sync_channel(1);
    handle.spawn(async move {
        let _ = sender.send(future.await);
    });
    let wait = || receiver.recv().ok();
    match Handle::try_current().map(|h| h.runtime_flavor()) {
        Ok(RuntimeFlavor::MultiThread) => tokio::task::block_in_place(wait),
        _ => wait(),
    }
}
