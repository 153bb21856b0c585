//! Checks whether this machine runs the kernels, and runs them correctly.

use std::arch::x86_64::{__cpuid, __cpuid_count};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use super::product::{Product, Right};
use super::{AmxError, model};
use crate::buffer::Scratch;
use crate::cpu::KernelSet;
use crate::matrix::{Mat, MatMut};

/// CPUID leaf 7, register EDX.
const CPUID_AMX_BF16: u32 = 1 << 22;
const CPUID_AMX_TILE: u32 = 1 << 24;
/// CPUID leaf 1, register ECX: the system uses XSAVE and programs may read XCR0.
const CPUID_OSXSAVE: u32 = 1 << 27;
/// Tile configuration and tile data, in XCR0.
const XCR0_TILES: u64 = 1 << 17 | 1 << 18;
/// Requests a state component for the process (Linux 5.16 and later, `asm/prctl.h`).
const ARCH_REQ_XCOMP_PERM: libc::c_long = 0x1023;
const XFEATURE_XTILEDATA: libc::c_long = 18;

static EMULATED: AtomicBool = AtomicBool::new(false);
static HARDWARE: OnceLock<Result<(), AmxError>> = OnceLock::new();

/// Lets [`KernelSet::parse`] and [`Cpu::new`](crate::Cpu::new) take `amx` where the CPU or the system lacks
/// it, and keeps this process from asking the system for tile registers until [`use_hardware`]: where they
/// are granted, nothing traps. [`KernelSet::detect`] does not choose the set then. The self-check runs all
/// the same.
///
/// # Safety
/// Something must carry out the instructions in every thread of the process from now on: without it the
/// first product ends the process. `sinew-amx-emulator` does, for tests.
pub unsafe fn assume_emulated() {
    EMULATED.store(true, Ordering::Release);
}

/// Ends what [`assume_emulated`] began: from now on the set runs on the CPU's own tiles, or not at all.
pub fn use_hardware() {
    EMULATED.store(false, Ordering::Release);
}

/// Whether the CPU and the system run the kernels, and their results are right. Asks the system for tile
/// registers at the first call, unless they are emulated.
pub(crate) fn hardware() -> Result<(), AmxError> {
    if EMULATED.load(Ordering::Acquire) && HARDWARE.get().is_none() {
        return Err(AmxError::Emulated);
    }
    HARDWARE
        .get_or_init(|| {
            cpu()?;
            permission()?;
            self_check(product)
        })
        .clone()
}

/// Whether the kernels may run: on [`hardware`], or emulated.
pub(crate) fn support() -> Result<(), AmxError> {
    static EMULATION: OnceLock<Result<(), AmxError>> = OnceLock::new();
    if !EMULATED.load(Ordering::Acquire) {
        return hardware();
    }
    EMULATION
        .get_or_init(|| {
            if KernelSet::Avx512.is_available() {
                self_check(product)
            } else {
                Err(AmxError::Avx512)
            }
        })
        .clone()
}

fn cpu() -> Result<(), AmxError> {
    if !KernelSet::Avx512.is_available() {
        return Err(AmxError::Avx512);
    }
    // AVX-512 implies that leaf 7 exists.
    let features = __cpuid_count(7, 0).edx;
    for (bit, name) in [(CPUID_AMX_TILE, "AMX-TILE"), (CPUID_AMX_BF16, "AMX-BF16")] {
        if features & bit == 0 {
            return Err(AmxError::Cpu(name));
        }
    }
    let xcr0 = if __cpuid(1).ecx & CPUID_OSXSAVE == 0 {
        0
    } else {
        // SAFETY: OSXSAVE means that the instruction may be used.
        unsafe { enabled_state() }
    };
    if xcr0 & XCR0_TILES == XCR0_TILES {
        Ok(())
    } else {
        Err(AmxError::System { xcr0 })
    }
}

/// XCR0.
///
/// # Safety
/// CPUID must report OSXSAVE.
unsafe fn enabled_state() -> u64 {
    let (low, high): (u32, u32);
    // SAFETY: by the caller's promise; reads only a register.
    unsafe {
        std::arch::asm!("xgetbv", in("ecx") 0, out("eax") low, out("edx") high, options(nomem, nostack));
    }
    u64::from(high) << 32 | u64::from(low)
}

fn permission() -> Result<(), AmxError> {
    // SAFETY: the call changes what the process may use, and no memory.
    let done = unsafe {
        libc::syscall(
            libc::SYS_arch_prctl,
            ARCH_REQ_XCOMP_PERM,
            XFEATURE_XTILEDATA,
        )
    };
    if done == 0 {
        Ok(())
    } else {
        let errno = std::io::Error::last_os_error().raw_os_error().unwrap_or(0);
        Err(AmxError::Permission { errno })
    }
}

/// `c += a · b` by the kernels.
fn product(a: Mat<'_>, b: Mat<'_>, c: MatMut<'_>) {
    Product {
        pool: None,
        a,
        b: Right::Plain(b),
        c,
        accumulate: true,
    }
    .run(&mut Scratch::new());
}

/// A product with rests in all three directions, once of whole numbers, which every order of summation
/// gives exactly, and once of fractions. The bound of the second is far below what an operand in a wrong
/// place would change, and above what another order of summation could.
fn self_check(product: impl Fn(Mat<'_>, Mat<'_>, MatMut<'_>)) -> Result<(), AmxError> {
    const M: usize = 37;
    const K: usize = 77;
    const N: usize = 45;
    let whole = |i: usize| ((i * 37 + i / 7) % 17) as f32 - 8.0;
    let fraction = |i: usize| (((i * 7919 + 13) % 4093) as f32 - 2046.5) / 512.0;
    for (value, unit) in [
        (&whole as &dyn Fn(usize) -> f32, 0.0),
        (&fraction, 16.0 * f32::EPSILON),
    ] {
        let a: Vec<f32> = (0..M * K).map(value).collect();
        let b: Vec<f32> = (0..N * K).map(|i| value(i + M * K)).collect();
        let mut found: Vec<f32> = (0..M * N).map(value).collect();
        let mut expected = found.clone();
        let (left, right) = (Mat::new(&a, M, K), Mat::new(&b, N, K).t());
        model::product(left, right, &mut expected, true);
        product(left, right, MatMut::new(&mut found, M, N));
        for (at, (&found, &expected)) in found.iter().zip(&expected).enumerate() {
            let (row, col) = (at / N, at % N);
            let terms = (0..K).map(|p| (a[row * K + p] * b[col * K + p]).abs());
            let bound = unit * (1.0 + terms.sum::<f32>());
            // Also false where either is NaN.
            let right = (found - expected).abs() <= bound;
            if !right {
                return Err(AmxError::SelfCheck {
                    row,
                    col,
                    found: found.to_string(),
                    expected: expected.to_string(),
                    bound: bound.to_string(),
                });
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The model's result, with `change` made to its operands and to itself.
    fn checked(change: impl Fn(&mut [f32], &mut [f32], &mut [f32])) -> Result<(), AmxError> {
        self_check(|a, b, c| {
            let (m, k, n) = (a.rows(), a.cols(), c.cols());
            // SAFETY: both views are dense, `b` is the transpose of `[n, k]`, and `c` is dense and ours.
            let (a, b, c) = unsafe {
                let a = std::slice::from_raw_parts(a.as_ptr(), m * k);
                let b = std::slice::from_raw_parts(b.as_ptr(), n * k);
                (a, b, std::slice::from_raw_parts_mut(c.as_ptr(), m * n))
            };
            let (mut a, mut b) = (a.to_vec(), b.to_vec());
            change(&mut a, &mut b, &mut []);
            model::product(Mat::new(&a, m, k), Mat::new(&b, n, k).t(), c, true);
            change(&mut [], &mut [], c);
        })
    }

    #[test]
    fn wrong_results_are_refused_and_right_ones_are_not() {
        assert_eq!(checked(|_, _, _| ()), Ok(()));
        // Another order of summation may cause this change.
        let unit = |c: &mut f32| {
            if c.fract() != 0.0 {
                *c = c.next_up();
            }
        };
        assert_eq!(checked(|_, _, c| c.iter_mut().for_each(unit)), Ok(()));
        let refused = |result| matches!(result, Err(AmxError::SelfCheck { .. }));
        assert!(refused(checked(|_, _, c| if let Some(c) = c.last_mut() {
            *c += 0.01;
        })));
        assert!(refused(checked(|_, _, c| if let Some(c) = c.first_mut() {
            *c = f32::NAN;
        })));
        assert!(refused(checked(|a, _, _| if !a.is_empty() {
            a.swap(3, 4);
        })));
        assert!(refused(checked(|_, b, _| if !b.is_empty() {
            b.rotate_left(1);
        })));
        let truncated = |x: &mut f32| *x = f32::from_bits(x.to_bits() & 0xffff_0000);
        assert!(
            refused(checked(|a, _, _| a.iter_mut().for_each(truncated))),
            "rounding towards zero"
        );
    }
}
