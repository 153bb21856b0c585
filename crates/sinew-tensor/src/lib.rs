//! Buffers and operators with forward and backward, chosen at run time per CPU.
//!
//! Everything runs on a [`Cpu`]: a kernel set (AMX, AVX-512, AVX2, NEON or portable,
//! see [`KernelSet::detect`])
//! and a bounded [`Pool`] of threads. Values are `f32` (AMX products round operands to bfloat16, see
//! [`amx`]). There is no tensor type and no graph: operators take slices or strided views ([`Mat`],
//! [`MatMut`]) and write to memory of the caller.
//!
//! # Invariants
//! * A row of a matrix product has the same bits in any batch, packed or not (see [`gemm`]): a trainer
//!   computes in one pass the results that an engine computed token by token.
//! * Results do not depend on the number of threads or on their timing.
//! * Hot paths do not allocate after their first call: scratch belongs to the thread or the caller.
//! * Shapes that do not fit are errors of the program and panic with both shapes, before any write.
//! * Nothing here reads the clock, the environment or files.
//!
//! # Example
//! ```
//! use sinew_tensor::{Cpu, KernelSet, Mat, MatMut, PackedWeights};
//!
//! let dev = Cpu::new(KernelSet::detect(), 2);
//! let weights = PackedWeights::pack(&dev, &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], 3, 2);
//! let mut y = [0.0; 3];
//! dev.matmul_packed(Mat::new(&[1.0, 10.0], 1, 2), &weights, MatMut::new(&mut y, 1, 3), false);
//! assert_eq!(y, [21.0, 43.0, 65.0]);
//! ```
//!
//! | module | purpose |
//! |---|---|
//! | [`gemm`], [`int8`], [`amx`] | matrix products: f32, weights of 12 bits, of 8 bits, tiles of bfloat16 |
//! | [`attention`] | attention of packed training batches that share prefixes, forward and backward |
//! | [`paged`] | attention over stored keys and values, for generation |
//! | [`logprob`] | log-probabilities of chosen tokens under a linear head, and their gradients |
//! | [`ops`] | norms, rotary embedding, SwiGLU, AdamW and other row-wise operators |
//! | [`buffer`], [`matrix`], [`pool`], [`cpu`] | memory, views, threads, the handle that operators take |
//! | [`probe`] | the limits of the machine, which speeds are compared with |
//!
//! Tests compare every kernel set that runs with the plain counterparts in f64 of `tests/it/reference.rs`,
//! gradients with differences, and kernel sets with each other bit for bit where that is promised.
#![expect(
    unsafe_code,
    reason = "vector instructions, aligned memory and disjoint writes of tasks"
)]
#![expect(
    clippy::too_many_arguments,
    reason = "operators and kernels take their tensors and raw shapes"
)]

pub mod amx;
pub mod attention;
pub mod buffer;
pub mod cpu;
pub mod gemm;
pub mod int8;
pub mod logprob;
pub mod matrix;
pub mod ops;
pub mod paged;
pub mod pool;
pub mod probe;
pub(crate) mod simd;

pub use amx::AmxError;
pub use buffer::{Buffer, Scratch, SharedMut};
pub use cpu::{Cpu, KernelSet, KernelSetError};
pub use gemm::{PackedBf16, PackedWeights};
pub use int8::PackedInt8;
pub use matrix::{Mat, MatMut};
pub use pool::Pool;
