//! Storage formats of a generating model's matrices.
//!
//! Decoding reads every matrix once per pass, so at few rows its speed is that of memory: fewer
//! bits are faster. The trainer always computes from f32 weights; anything but [`Precision::F32`]
//! is another policy than the trained one, and the difference is measured at every step
//! (`logprob_gap_max`).

use sinew_tensor::{Cpu, KernelSet, Mat, MatMut, PackedBf16, PackedInt8, PackedWeights};

/// Rows of a tile: from this number on tiles are the faster storage of 16 bits.
const TILE_ROWS: usize = 16;

/// Storage of the matrices of an [`InferModel`](crate::InferModel).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Precision {
    /// `f32`, as in training: the engine's log-probabilities are the trainer's.
    #[default]
    F32,
    /// Weights rounded to bfloat16 and kept in 12 bits, inputs and sums in `f32`: three eighths of the bytes
    /// to read for each token. Like [`Precision::Int8`] another policy than the one that is trained, but
    /// nearer to it.
    Bf16,
    /// Weights and inputs rounded to 8 bits in groups ([`sinew_tensor::int8`]): a quarter of the bytes to
    /// read for each token, and another policy than the one that is trained, so that training needs a
    /// correction by the ratio of both.
    Int8,
}

impl Precision {
    /// All variants, the most exact first.
    pub const ALL: [Self; 3] = [Self::F32, Self::Bf16, Self::Int8];

    /// The best storage for passes of up to `rows` rows if this one was requested. AMX tiles multiply with
    /// weights of bfloat16 in any case: 1.7 times as fast as [`Precision::Bf16`] at 32 rows, and with the
    /// trainer's bits. Its 12 bits are faster at few rows, where reading takes the time (1.3 times at one
    /// row).
    #[must_use]
    pub fn suited(self, kernels: KernelSet, rows: usize) -> Self {
        match self {
            Self::Bf16 if kernels == KernelSet::Amx && rows >= TILE_ROWS => Self::F32,
            other => other,
        }
    }

    /// The value of the recipe key `engine.weights`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
            Self::Int8 => "int8",
        }
    }
}

/// A packed matrix `[n, k]` of one precision.
#[derive(Debug)]
pub(crate) enum Matrix {
    F32(PackedWeights),
    Bf16(PackedBf16),
    Int8(PackedInt8),
}

impl Matrix {
    /// Packs `w` `[n, k]`.
    pub(crate) fn pack(dev: &Cpu, precision: Precision, w: &[f32], n: usize, k: usize) -> Self {
        match precision {
            Precision::F32 => Self::F32(PackedWeights::pack(dev, w, n, k)),
            Precision::Bf16 => Self::Bf16(PackedBf16::pack(dev, w, n, k)),
            Precision::Int8 => Self::Int8(PackedInt8::pack(dev, w, n, k)),
        }
    }

    /// Replaces the weights by others of the same shape.
    pub(crate) fn repack(&mut self, dev: &Cpu, w: &[f32]) {
        match self {
            Self::F32(packed) => packed.repack(dev, w),
            Self::Bf16(packed) => packed.repack(dev, w),
            Self::Int8(packed) => packed.repack(dev, w),
        }
    }

    /// `y (+)= x · wᵀ`: `x` `[rows, k]`, `y` `[rows, n]`, overwritten or, with `accumulate`, added
    /// to.
    pub(crate) fn product(&self, dev: &Cpu, x: Mat<'_>, y: MatMut<'_>, accumulate: bool) {
        match self {
            Self::F32(packed) => dev.matmul_packed(x, packed, y, accumulate),
            Self::Bf16(packed) => dev.matmul_bf16(x, packed, y, accumulate),
            Self::Int8(packed) => dev.matmul_int8(x, packed, y, accumulate),
        }
    }

    /// Bytes that a product reads of the matrix.
    pub(crate) fn bytes(&self) -> usize {
        match self {
            Self::F32(packed) => packed.bytes(),
            Self::Bf16(packed) => packed.bytes(),
            Self::Int8(packed) => packed.bytes(),
        }
    }
}
