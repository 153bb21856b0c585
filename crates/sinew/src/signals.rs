//! Signals that end a command in order: Ctrl-C, TERM, and HUP when the terminal goes.
//!
//! A command makes [`StopSignals`] before it prints its address, so that no signal of a script comes too
//! early.

use sinew_assembly::Failure;
use tokio::runtime::Runtime;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::watch;

/// A write beyond `ulimit -f`; the same number on every architecture that Linux has but MIPS.
const FILE_SIZE: i32 = 25;

/// Catches them from the moment that it is made: until then they end the process at once.
pub(crate) struct StopSignals {
    interrupt: Signal,
    terminate: Signal,
    /// `None` under `nohup`, which asks for it to be ignored.
    hangup: Option<Signal>,
}

impl StopSignals {
    /// Catches the signals; needs a runtime around it. It also makes a write beyond the file size limit an
    /// error of that write instead of a silent end of the process.
    ///
    /// # Errors
    /// If the system refuses a handler.
    pub(crate) fn new() -> Result<Self, Failure> {
        let wait = |kind| signal(kind).map_err(Failure::system);
        // A handler, not `SIG_IGN`: programs in sandboxes must not inherit it.
        drop(wait(SignalKind::from_raw(FILE_SIZE))?);
        let ignored = is_ignored(SignalKind::hangup());
        Ok(Self {
            interrupt: wait(SignalKind::interrupt())?,
            terminate: wait(SignalKind::terminate())?,
            hangup: (!ignored).then(|| wait(SignalKind::hangup())).transpose()?,
        })
    }

    /// Waits for one of them; one that came since the last call counts. May be called again, for a second
    /// signal that ends at once what the first ended in order.
    pub(crate) async fn next(&mut self) {
        let hangup = async {
            match &mut self.hangup {
                Some(signal) => signal.recv().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            _ = self.interrupt.recv() => {}
            _ = self.terminate.recv() => {}
            _ = hangup => {}
        }
    }
}

/// Waits until standard input ends or fails. Its content is ignored.
pub(crate) async fn end_of_input() {
    let (sender, ended) = tokio::sync::oneshot::channel();
    // A separate thread: a read cannot be cancelled, and would hold up the end of the runtime.
    std::thread::spawn(move || {
        let _ = std::io::copy(&mut std::io::stdin().lock(), &mut std::io::sink());
        let _ = sender.send(());
    });
    let _ = ended.await;
}

/// Counts signals from now on, for as long as the runtime lives; the end of standard input is the first one,
/// if that is requested.
///
/// # Errors
/// If the system refuses a handler.
pub(crate) fn count(runtime: &Runtime, stop_on_eof: bool) -> Result<watch::Receiver<u32>, Failure> {
    let mut signals = {
        let _inside = runtime.enter();
        StopSignals::new()?
    };
    let (sender, count) = watch::channel(0);
    runtime.spawn(async move {
        tokio::select! {
            () = signals.next() => {}
            () = end_of_input(), if stop_on_eof => {}
        }
        loop {
            sender.send_modify(|n| *n += 1);
            signals.next().await;
        }
    });
    Ok(count)
}

/// Whether this process was started with a signal ignored: bit `n - 1` of `SigIgn` (proc(5)).
fn is_ignored(kind: SignalKind) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = status.lines().find_map(|l| l.strip_prefix("SigIgn:"));
    let mask = ignored.and_then(|text| u64::from_str_radix(text.trim(), 16).ok());
    mask.is_some_and(|mask| mask & (1 << (kind.as_raw_value() - 1)) != 0)
}
