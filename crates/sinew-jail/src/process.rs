//! Counts of the kernel for a process.

/// Microseconds of a time in `struct rusage`, which is never negative.
fn micros(time: libc::timeval) -> u64 {
    time.tv_sec.unsigned_abs() * 1_000_000 + time.tv_usec.unsigned_abs()
}

/// User and system time of a process that ended, and of the children that it waited for, in
/// microseconds.
pub(crate) fn ended_us(usage: &libc::rusage) -> u64 {
    micros(usage.ru_utime) + micros(usage.ru_stime)
}

/// Time on processors that a process has taken so far, in microseconds; `None` once it is reaped. The
/// number must be that of a child that is not reaped: another process may have it otherwise.
pub(crate) fn cpu_us(pid: i32) -> Option<u64> {
    // The clock of a process (clock_getcpuclockid(3)): its number inverted, and CPUCLOCK_SCHED, which
    // is 2 (linux/posix-timers.h).
    let clock = (!pid << 3) | 2;
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: writes a local value.
    match unsafe { libc::clock_gettime(clock, &raw mut time) } {
        0 => Some(time.tv_sec.unsigned_abs() * 1_000_000 + time.tv_nsec.unsigned_abs() / 1000),
        _ => None,
    }
}
