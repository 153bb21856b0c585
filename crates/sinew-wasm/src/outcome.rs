//! The end of a program: its limits while it runs, and its result.
//!
//! Every program of a worker runs in a store of [`store`], and every result goes through [`finish`], whether
//! the instance is new or continues.

use crate::wasi::{Host, Stop, thread_cpu};
use crate::wire::{JobResult, Tree};
use sinew_sandbox::Ending;
use wasmtime::{InstancePre, Store, Trap, UpdateDeadline};

/// Result of an execution, and its files if they have changed.
pub(crate) type Outcome = (JobResult, Option<Tree>);

/// Result of a failure of the worker itself.
pub(crate) fn failed(failure: String) -> Outcome {
    let done = JobResult::new(Ending::SandboxDied);
    (
        JobResult {
            failure: Some(failure),
            ..done
        },
        None,
    )
}

/// Creates a store whose program checks its limits at every tick.
pub(crate) fn store(module: &InstancePre<Host>, host: Host) -> Store<Host> {
    let mut store = Store::new(module.module().engine(), host);
    store.limiter(|host| &mut host.ceiling);
    store.set_epoch_deadline(1);
    store.epoch_deadline_callback(|context| {
        if context.data().over() {
            return Err(wasmtime::Error::new(Stop(Ending::Timeout)));
        }
        Ok(UpdateDeadline::Continue(1))
    });
    store
}

/// Collects the result of an execution.
pub(crate) fn finish(host: &mut Host, ending: Ending, failure: Option<String>) -> Outcome {
    let cpu = thread_cpu().saturating_sub(host.cpu_from);
    host.flush();
    let failed = !matches!(
        ending,
        Ending::Exited { code: 0 } | Ending::Timeout | Ending::OutputLimit
    );
    let done = JobResult {
        truncated: host.truncated,
        cpu_s: cpu.as_secs_f64(),
        peak_memory_bytes: host.ceiling.peak as u64,
        failure,
        ..JobResult::new(if failed && host.ceiling.refused {
            Ending::OutOfMemory
        } else {
            ending
        })
    };
    (done, host.fs.changes())
}

/// Converts a trap to the signal that would have killed native code.
pub(crate) fn ended(error: &wasmtime::Error) -> (Ending, Option<String>) {
    if let Some(Stop(ending)) = error.downcast_ref::<Stop>() {
        return (*ending, None);
    }
    /// Signals with which native code ends for the same reasons (signal(7)).
    const ABORT: i32 = 6;
    const FLOATING: i32 = 8;
    const SEGMENT: i32 = 11;
    let signal = match error.downcast_ref::<Trap>() {
        Some(Trap::UnreachableCodeReached) => ABORT,
        Some(
            Trap::IntegerDivisionByZero | Trap::IntegerOverflow | Trap::BadConversionToInteger,
        ) => FLOATING,
        Some(_) => SEGMENT,
        None => return (Ending::SandboxDied, Some(format!("{error:?}"))),
    };
    (Ending::Signalled { signal }, None)
}
