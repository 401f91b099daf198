//! Matrix products of f32, with the `matrixmultiply` crate.
//!
//! Why this crate:
//! - The authors of ndarray maintain it. ndarray has used it for ten years.
//! - It picks AVX-512, AVX2 + FMA or NEON kernels at run time.
//! - It takes any strides, so `K^T` needs no copy.
//! - It runs on the calling thread and sums in one order, so results repeat.
//! - It is one small crate. `gemm` is some tens of percent faster, but is twenty crates that take a minute to build.
//!
//! The crate copies parts of both matrices into a buffer, which it allocates for every product. Where it gets no memory for
//! the buffer, it ends the process. [`check_memory`] makes this an error, and [`matmul`] keeps the buffer small.

use super::memory::reserved;
use crate::error::Result;

/// Columns of a product that are computed by one call of the crate. It bounds the buffer.
const COLUMNS: usize = 256;
/// The size of the crate's buffer in bytes, at most: 256 columns of 64 rows of `a`, and 256 rows of the columns of `b`.
const BUFFER_BYTES: usize = 256 * (64 + COLUMNS) * size_of::<f32>();

/// Refuses to compute where there is no memory for the buffers that products on `threads` threads allocate.
///
/// The memory is given back at once, so that the crate finds it.
pub(super) fn check_memory(threads: usize) -> Result<()> {
    reserved::<u8>(threads * BUFFER_BYTES).map(drop)
}

/// A row-major matrix in a slice without gaps, or the transpose of one.
#[derive(Clone, Copy)]
pub(super) struct Matrix<'a> {
    data: &'a [f32],
    rows: usize,
    columns: usize,
    row_stride: isize,
    column_stride: isize,
}

impl<'a> Matrix<'a> {
    pub(super) fn new(data: &'a [f32], rows: usize, columns: usize) -> Self {
        // The slice ends where the matrix ends, so that no product reads past it.
        Self { data: &data[..rows * columns], rows, columns, row_stride: columns as isize, column_stride: 1 }
    }

    pub(super) fn transposed(self) -> Self {
        Self {
            data: self.data,
            rows: self.columns,
            columns: self.rows,
            row_stride: self.column_stride,
            column_stride: self.row_stride,
        }
    }
}

/// `out = alpha * a b + beta * out`, with `out` row-major without gaps. With `beta` 0 the old contents of `out` are not read.
pub(super) fn matmul(alpha: f32, a: Matrix<'_>, b: Matrix<'_>, beta: f32, out: &mut [f32]) {
    assert_eq!(a.columns, b.rows, "inner sizes");
    let out = &mut out[..a.rows * b.columns];
    for first in (0..b.columns).step_by(COLUMNS) {
        // SAFETY: a `Matrix` holds rows x columns elements, and its strides address exactly these. `out` holds a.rows x b.columns
        // elements, which the strides (b.columns, 1) address. Of `b` and `out` the columns from `first` on are used, of which
        // there are COLUMNS or as many as are left. `out` is borrowed mutably, so it overlaps neither `a` nor `b`.
        unsafe {
            matrixmultiply::sgemm(
                a.rows,
                a.columns,
                COLUMNS.min(b.columns - first),
                alpha,
                a.data.as_ptr(),
                a.row_stride,
                a.column_stride,
                b.data.as_ptr().offset(first as isize * b.column_stride),
                b.row_stride,
                b.column_stride,
                beta,
                out.as_mut_ptr().add(first),
                b.columns as isize,
                1,
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn products_by_hand() {
        let a = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0];
        let mut out = [f32::NAN; 4];
        matmul(2.0, Matrix::new(&a, 2, 3), Matrix::new(&a, 2, 3).transposed(), 0.0, &mut out);
        assert_eq!(out, [28.0, 64.0, 64.0, 154.0]);
        matmul(1.0, Matrix::new(&a, 2, 1), Matrix::new(&a, 1, 2), 1.0, &mut out);
        assert_eq!(out, [29.0, 66.0, 66.0, 158.0]);
    }

    #[test]
    fn products_with_many_columns() {
        let (a, columns) = ([1.0, 10.0, 2.0, 20.0], 2 * COLUMNS + 1);
        let b: Vec<f32> = (0..2 * columns).map(|i| i as f32).collect();
        let want = |row: f32, i: usize| row * (i as f32 + 10.0 * (columns + i) as f32);
        let wanted: Vec<f32> = [1.0, 2.0].iter().flat_map(|row| (0..columns).map(|i| want(*row, i))).collect();
        let mut out = vec![f32::NAN; 2 * columns];
        matmul(1.0, Matrix::new(&a, 2, 2), Matrix::new(&b, 2, columns), 0.0, &mut out);
        assert_eq!(out, wanted);
        let transposed: Vec<f32> = (0..columns).flat_map(|i| [b[i], b[columns + i]]).collect();
        out.fill(f32::NAN);
        matmul(1.0, Matrix::new(&a, 2, 2), Matrix::new(&transposed, columns, 2).transposed(), 0.0, &mut out);
        assert_eq!(out, wanted);
    }
}
