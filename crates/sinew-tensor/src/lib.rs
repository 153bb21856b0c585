//! Buffers and operators with forward and backward, chosen at run time per CPU.

#![expect(unsafe_code, reason = "SIMD kernels and the thread pool need it; each block says why it is sound")]

pub mod attention;
pub mod buffer;
pub mod device;
pub mod logprob;
pub mod matrix;
pub mod paged;
pub mod pool;
