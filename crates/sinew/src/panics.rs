//! Handles a panic when no memory is left.
//!
//! The standard library's hook holds the lock of backtraces while it prints one. If an allocation
//! fails meanwhile, the report of that failure waits for the same lock, and the process never ends.

use std::panic::PanicHookInfo;

/// Address space that a backtrace may need: the symbols of this program, and what finds them.
const BACKTRACE_BYTES: usize = 64 << 20;

/// Makes every panic without room for its backtrace end the process with SIGABRT and a message. Other panics
/// are reported by the default hook.
pub(crate) fn install() {
    let default = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        if Vec::<u8>::new().try_reserve_exact(BACKTRACE_BYTES).is_err() {
            abort(panic);
        }
        default(panic);
    }));
}

/// Allocates nothing.
fn abort(panic: &PanicHookInfo<'_>) -> ! {
    eprintln!(
        "sinew: {panic}\nno memory is left: the process or its control group is at its limit; raise it, or run fewer episodes at once"
    );
    std::process::abort()
}

#[cfg(test)]
mod tests {
    use rustix::process::{Resource, Rlimit, setrlimit};
    use std::os::unix::process::ExitStatusExt;
    use std::process::{Command, Stdio};
    use std::time::{Duration, Instant};

    /// Set in the process that runs out of memory.
    const CHILD: &str = "SINEW_TEST_OUT_OF_MEMORY";

    /// Takes what the address space has left, down to few bytes, and panics.
    fn run_out_of_memory() {
        super::install();
        let mut held: Vec<Vec<u8>> = Vec::with_capacity(1 << 20);
        let statm = std::fs::read_to_string("/proc/self/statm").expect("the size of this process");
        let pages: u64 = statm
            .split(' ')
            .next()
            .expect("a number")
            .parse()
            .expect("of pages");
        let limit = Rlimit {
            current: Some(pages * 4096),
            maximum: None,
        };
        setrlimit(Resource::As, limit).expect("a limit");
        for bytes in [1 << 16, 1 << 12, 256, 64, 32, 16] {
            while held.len() < held.capacity() {
                let mut room = Vec::new();
                if room.try_reserve_exact(bytes).is_err() {
                    break;
                }
                held.push(room);
            }
        }
        // Room for the panic itself, and too little for its backtrace.
        held.pop();
        panic!("no room");
    }

    #[test]
    fn a_panic_without_memory_ends_the_process() {
        if std::env::var_os(CHILD).is_some() {
            run_out_of_memory();
        }
        let test = "panics::tests::a_panic_without_memory_ends_the_process";
        let mut child = Command::new(std::env::current_exe().expect("this test"))
            .args(["--exact", test, "--nocapture", "--test-threads=1"])
            .env(CHILD, "1")
            .env("RUST_BACKTRACE", "1")
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .expect("a process");
        let until = Instant::now() + Duration::from_secs(60);
        let status = loop {
            match child.try_wait().expect("a status") {
                Some(status) => break status,
                None if Instant::now() < until => std::thread::sleep(Duration::from_millis(10)),
                None => {
                    child.kill().expect("a kill");
                    panic!("the process did not end");
                }
            }
        };
        let mut said = String::new();
        let mut errors = child.stderr.take().expect("its errors");
        std::io::Read::read_to_string(&mut errors, &mut said).expect("text");
        assert_eq!(status.signal(), Some(6), "{status}: {said}");
        assert!(said.contains("no memory is left"), "{said}");
    }
}
