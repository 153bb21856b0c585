//! Strided views of matrices, which the matrix products read and write.

use std::marker::PhantomData;

/// A read-only `[rows, cols]` view; element `(i, j)` lies at `i * row_stride + j * col_stride`.
///
/// It holds a pointer and not a slice, so that tasks may read a column block of memory in which
/// others write neighbouring column blocks.
#[derive(Debug, Clone, Copy)]
pub struct Mat<'a> {
    ptr: *const f32,
    rows: usize,
    cols: usize,
    row_stride: usize,
    col_stride: usize,
    life: PhantomData<&'a [f32]>,
}

/// A writable `[rows, cols]` view, see [`Mat`]. Two elements never share an address.
#[derive(Debug)]
pub struct MatMut<'a> {
    ptr: *mut f32,
    rows: usize,
    cols: usize,
    row_stride: usize,
    life: PhantomData<&'a mut [f32]>,
}

// SAFETY: a `Mat` gives shared read access, as `&[f32]`.
unsafe impl Send for Mat<'_> {}
// SAFETY: as for `Send`.
unsafe impl Sync for Mat<'_> {}
// SAFETY: a `MatMut` gives exclusive access, as `&mut [f32]`.
unsafe impl Send for MatMut<'_> {}
// SAFETY: a shared `MatMut` gives nothing but its shape and pointer.
unsafe impl Sync for MatMut<'_> {}

/// Panics unless `len` values hold a `[rows, cols]` matrix with row stride `ld`.
fn check_len(len: usize, rows: usize, cols: usize, ld: usize) {
    let need = if rows == 0 || cols == 0 {
        0
    } else {
        (rows - 1) * ld + cols
    };
    assert!(
        need <= len,
        "[{rows}, {cols}] with row stride {ld} needs {need} values, has {len}"
    );
}

impl<'a> Mat<'a> {
    /// Dense row-major `[rows, cols]` at the start of `data`.
    #[must_use]
    pub fn new(data: &'a [f32], rows: usize, cols: usize) -> Self {
        Self::with_ld(data, rows, cols, cols)
    }

    /// Row-major with `ld` values from one row to the next. Panics when `data` is too short.
    #[must_use]
    pub fn with_ld(data: &'a [f32], rows: usize, cols: usize, ld: usize) -> Self {
        check_len(data.len(), rows, cols, ld);
        Self {
            ptr: data.as_ptr(),
            rows,
            cols,
            row_stride: ld,
            col_stride: 1,
            life: PhantomData,
        }
    }

    /// The transposed view; nothing moves.
    #[must_use]
    pub fn t(self) -> Self {
        Self {
            rows: self.cols,
            cols: self.rows,
            row_stride: self.col_stride,
            col_stride: self.row_stride,
            ..self
        }
    }

    /// Number of rows.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Number of columns.
    #[must_use]
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Values between neighbours in a column.
    #[must_use]
    pub fn row_stride(&self) -> usize {
        self.row_stride
    }

    /// Values between neighbours in a row.
    #[must_use]
    pub fn col_stride(&self) -> usize {
        self.col_stride
    }

    /// Pointer to element (0, 0).
    #[must_use]
    pub fn as_ptr(&self) -> *const f32 {
        self.ptr
    }
}

impl<'a> MatMut<'a> {
    /// Dense row-major `[rows, cols]` at the start of `data`.
    pub fn new(data: &'a mut [f32], rows: usize, cols: usize) -> Self {
        Self::with_ld(data, rows, cols, cols)
    }

    /// Row-major with `ld >= cols` values from one row to the next. Panics when `data` is too short
    /// or rows would overlap.
    pub fn with_ld(data: &'a mut [f32], rows: usize, cols: usize, ld: usize) -> Self {
        check_len(data.len(), rows, cols, ld);
        assert!(
            ld >= cols || rows <= 1,
            "row stride {ld} is below the {cols} columns"
        );
        Self {
            ptr: data.as_mut_ptr(),
            rows,
            cols,
            row_stride: ld,
            life: PhantomData,
        }
    }

    /// Number of rows.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Number of columns.
    #[must_use]
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Values between neighbours in a column.
    #[must_use]
    pub fn row_stride(&self) -> usize {
        self.row_stride
    }

    /// Pointer to element (0, 0).
    #[must_use]
    pub fn as_ptr(&self) -> *mut f32 {
        self.ptr
    }
}
