//! A runtime of its own, so that browsers live as long as their factory and serve callers of every runtime.

use std::future::Future;
use std::sync::mpsc;
use tokio::runtime::{Builder, Handle, Runtime, RuntimeFlavor};

/// A runtime with one thread. Dropping it ends its tasks.
#[derive(Debug)]
pub(crate) struct OwnRuntime {
    /// For tasks.
    handle: Handle,
    /// Until it is dropped.
    runtime: Option<Runtime>,
}

impl OwnRuntime {
    /// Starts the thread.
    pub(crate) fn start() -> std::io::Result<Self> {
        let builder = &mut Builder::new_multi_thread();
        let runtime = builder
            .worker_threads(1)
            .thread_name("sinew-web")
            .enable_all()
            .build()?;
        Ok(Self {
            handle: runtime.handle().clone(),
            runtime: Some(runtime),
        })
    }

    /// For tasks that live as long as this.
    pub(crate) fn handle(&self) -> &Handle {
        &self.handle
    }
}

impl Drop for OwnRuntime {
    fn drop(&mut self) {
        // A runtime that is dropped within another one must not block.
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

/// Runs a future on the runtime and blocks this thread until it is ready. `None` if the runtime is gone. A
/// thread of a runtime with several gives its other tasks away first.
pub(crate) fn block_on<F>(handle: &Handle, future: F) -> Option<F::Output>
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
