//! Matrix products on AMX tiles: operands rounded to bfloat16, sums in `f32`.
//!
//! The kernel set [`Amx`](crate::KernelSet::Amx) replaces the products ([`crate::gemm`] and what
//! [`crate::logprob`] does with the head); all other operators, attention included, are those of AVX-512.
//! Stable Rust has no intrinsics for tiles, so the instructions stand in one place, `tile.rs`, as assembly.
//!
//! # Numerics
//! Operands are rounded to the nearest bfloat16, ties to even, and numbers too small for a normal `f32` count
//! as zero. The contracted index is cut in steps of 32. Even and odd members of a step are added up
//! separately by fused multiply-adds, then both sums, then the old value ([`model`] has it in plain Rust). So
//! an element depends neither on threads, blocking or packing, nor on the other rows and columns of the call.
//! A row has the same bits in any batch, as with the other kernel sets: engine and trainer, which round in
//! the same way, have the same log-probabilities.
//!
//! # Verification
//! The first use compares a small product with [`model`]; if it differs, the set is refused. Tests run the
//! same machine code on hardware, if there is some, and everywhere through an emulator
//! (`sinew-amx-emulator`).

#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
mod check;
pub mod model;
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
mod pack;
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
pub(crate) mod product;
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
mod tile;

#[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
pub(crate) mod absent;
#[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
use absent as check;
#[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
pub(crate) use absent as product;

pub use check::{assume_emulated, use_hardware};
pub(crate) use check::{hardware, support};

/// Reasons why the kernel set `amx` cannot be used here.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AmxError {
    /// Other processors and systems have no AMX.
    #[error("it exists on x86-64 Linux alone")]
    Platform,
    /// The operators that are not products use AVX-512.
    #[error("it needs the instructions of `avx512` too, which this CPU lacks")]
    Avx512,
    /// CPUID, leaf 7.
    #[error("this CPU has no {0} (CPUID)")]
    Cpu(&'static str),
    /// The system does not save tile registers when it switches threads.
    #[error(
        "the operating system has not enabled tile registers (XCR0 is {xcr0:#x}, bits 17 and 18 are needed)"
    )]
    System {
        /// Register state that the system enabled.
        xcr0: u64,
    },
    /// Linux grants tile registers to processes that ask.
    #[error(
        "linux does not grant tile registers to this process (ARCH_REQ_XCOMP_PERM: error {errno})"
    )]
    Permission {
        /// Error number as in `errno.h`.
        errno: i32,
    },
    /// A test asked for it (`assume_emulated`).
    #[error("this process emulates its instructions, so that the CPU's own are not asked for")]
    Emulated,
    /// The product at first use.
    #[error(
        "the self-check failed: element ({row}, {col}) of a product is {found}, not {expected} (within {bound}): \
         results of these instructions on this machine cannot be trusted"
    )]
    SelfCheck {
        row: usize,
        col: usize,
        found: String,
        expected: String,
        bound: String,
    },
}
