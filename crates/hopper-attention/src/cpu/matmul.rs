//! Matrix products of f32, with the `matrixmultiply` crate.
//!
//! Why this crate:
//! - The authors of ndarray maintain it. ndarray has used it for ten years.
//! - It picks AVX-512, AVX2 + FMA or NEON kernels at run time.
//! - It takes any strides, so `K^T` needs no copy.
//! - It runs on the calling thread and sums in one order, so results repeat.
//! - It is one small crate. `gemm` is some tens of percent faster, but is twenty crates that take a minute to build.

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
    // SAFETY: a `Matrix` holds rows x columns elements, and its strides address exactly these. `out` holds a.rows x b.columns
    // elements, which the strides (b.columns, 1) address. `out` is borrowed mutably, so it overlaps neither `a` nor `b`.
    unsafe {
        matrixmultiply::sgemm(
            a.rows,
            a.columns,
            b.columns,
            alpha,
            a.data.as_ptr(),
            a.row_stride,
            a.column_stride,
            b.data.as_ptr(),
            b.row_stride,
            b.column_stride,
            beta,
            out.as_mut_ptr(),
            b.columns as isize,
            1,
        );
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
}
