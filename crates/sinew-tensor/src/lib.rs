//! Buffers and operators with forward and backward, chosen at run time per CPU.
#![expect(
    unsafe_code,
    reason = "vector instructions, aligned memory and disjoint writes of tasks"
)]
#![expect(
    clippy::too_many_arguments,
    reason = "operators and kernels take their tensors and raw shapes"
)]

pub mod attention;
pub mod buffer;
pub mod device;
pub mod gemm;
pub mod logprob;
pub mod matrix;
pub mod ops;
pub mod paged;
pub mod pool;
pub mod reference;
pub(crate) mod simd;

pub use buffer::{Buffer, Scratch, SharedMut};
pub use device::{Device, KernelSet, KernelSetError};
pub use gemm::{PackedWeights, gemm_serial};
pub use matrix::{Mat, MatMut};
pub use pool::Pool;
