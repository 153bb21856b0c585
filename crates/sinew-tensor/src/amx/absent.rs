//! The same items for platforms without AMX.
#![expect(dead_code, reason = "no device has these kernels here")]

use super::AmxError;
use crate::buffer::Scratch;
use crate::matrix::{Mat, MatMut};
use crate::pool::Pool;

/// Whether this CPU runs the set: never.
pub(crate) fn hardware() -> Result<(), AmxError> {
    Err(AmxError::Platform)
}

/// Same as [`hardware`].
pub(crate) fn support() -> Result<(), AmxError> {
    hardware()
}

/// Has no effect here.
///
/// # Safety
/// None.
pub unsafe fn assume_emulated() {}

/// Has no effect here.
pub fn use_hardware() {}

pub(crate) enum Right<'a> {
    Plain(Mat<'a>),
    Packed(&'a [f32]),
}

pub(crate) struct Product<'a> {
    pub(crate) pool: Option<&'a Pool>,
    pub(crate) a: Mat<'a>,
    pub(crate) b: Right<'a>,
    pub(crate) c: MatMut<'a>,
    pub(crate) accumulate: bool,
}

impl Product<'_> {
    pub(crate) fn run(&self, _: &mut Scratch) {
        unreachable!("no device has these kernels here");
    }
}

pub(crate) fn packed_len(_: usize, _: usize) -> usize {
    unreachable!("no device has these kernels here");
}

pub(crate) fn pack_weights(_: Option<&Pool>, _: Mat<'_>, _: &mut [f32]) {
    unreachable!("no device has these kernels here");
}

pub(crate) unsafe fn spin(_: usize) -> f64 {
    unreachable!("no device has these kernels here");
}
