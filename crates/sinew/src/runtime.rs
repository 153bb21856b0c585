//! Small runtimes for commands that wait for little at a time.

use sinew_assembly::Failure;
use tokio::runtime::{Builder, Runtime};

/// A runtime whose tasks run in the thread that waits for it.
pub(crate) fn on_this_thread() -> Result<Runtime, Failure> {
    built(&mut Builder::new_current_thread())
}

/// A runtime with as many worker threads.
pub(crate) fn with_threads(threads: usize) -> Result<Runtime, Failure> {
    built(Builder::new_multi_thread().worker_threads(threads))
}

fn built(builder: &mut Builder) -> Result<Runtime, Failure> {
    builder.enable_all().build().map_err(Failure::system)
}
