//! Timing for the benches.

use std::time::{Duration, Instant};

/// Best seconds of a call of `f` within `budget`: wall time, or the CPU time of this thread when
/// there is only one, which leaves out the time that others had the CPU.
pub(crate) fn best(threads: usize, budget: Duration, mut f: impl FnMut()) -> f64 {
    f();
    let start = Instant::now();
    let now = || {
        if threads == 1 {
            thread_time()
        } else {
            start.elapsed().as_secs_f64()
        }
    };
    let mut best = f64::INFINITY;
    while start.elapsed() < budget {
        let t = now();
        f();
        best = best.min(now() - t);
    }
    best
}

fn thread_time() -> f64 {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: `time` is valid for the write.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) };
    time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9
}

/// Bytes/s of reading a large buffer on all threads, eight streams a task.
pub(crate) fn read_bandwidth(dev: &sinew_tensor::Cpu) -> f64 {
    let data = sinew_tensor::Buffer::from_slice(&vec![1.0; 64 << 20]);
    let time = best(dev.threads(), Duration::from_millis(700), || {
        dev.pool().parallel_ranges(data.len(), 1 << 20, &|range| {
            let mut sums = [0.0f32; 16];
            let part = &data[range];
            let each = part.len() / 8;
            for i in (0..each).step_by(16) {
                for stream in 0..8 {
                    let at = stream * each + i;
                    sums.iter_mut()
                        .zip(&part[at..at + 16])
                        .for_each(|(s, x)| *s += x);
                }
            }
            std::hint::black_box(sums);
        });
    });
    (data.len() * 4) as f64 / time
}
