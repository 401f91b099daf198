//! How a tensor of the file lies: its shape there, and its strides in logical order.

use hopper_attention::{Layout, Operand, Slot};

use crate::args::FileLayout;
use crate::blocks::is_list;

/// `[batch, seqlen, heads, head_dim]` from a shape in the file's order.
pub fn logical(layout: FileLayout, shape: [usize; 4]) -> [usize; 4] {
    match layout {
        FileLayout::Bhsd => [shape[0], shape[2], shape[1], shape[3]],
        FileLayout::Bshd | FileLayout::Thd => shape,
    }
}

/// A shape in the file's order from `[batch, seqlen, heads, head_dim]`: the swap is its own inverse.
pub fn file_shape(layout: FileLayout, logical_shape: [usize; 4]) -> [usize; 4] {
    logical(layout, logical_shape)
}

/// The strides, in logical order, of a tensor that lies in the file's order without gaps.
pub fn strided(layout: FileLayout, logical_shape: [usize; 4]) -> hopper_attention::Result<Layout<4>> {
    let in_file = Layout::contiguous(file_shape(layout, logical_shape))?;
    let [batch, second, third, inner] = in_file.stride();
    match layout {
        FileLayout::Bhsd => Layout::with_strides(logical_shape, [batch, third, second, inner]),
        FileLayout::Bshd | FileLayout::Thd => Ok(in_file),
    }
}

/// Whether an operand has the file's order of dimensions and the file's element type, as those of four dimensions do, and of
/// three where sequences are packed. Others (also a bias and its gradient) are contiguous, and of the type that the library lists.
pub fn is_in_files_order(operand: &Operand) -> bool {
    operand.slot().rank() == 4 && !is_list(operand.slot()) && !matches!(operand.slot(), Slot::Bias | Slot::DBias)
}

/// An operand's shape in the file.
pub fn shape_in_file(layout: FileLayout, operand: &Operand) -> Vec<usize> {
    match *operand.shape() {
        [batch, seqlen, heads, head_dim] if is_in_files_order(operand) => {
            file_shape(layout, [batch, seqlen, heads, head_dim]).to_vec()
        }
        _ => operand.shape().to_vec(),
    }
}

/// What the file's dimensions are.
pub fn axes(layout: FileLayout) -> &'static str {
    match layout {
        FileLayout::Bshd => "[batch, seqlen, heads, head_dim]",
        FileLayout::Bhsd => "[batch, heads, seqlen, head_dim]",
        FileLayout::Thd => "[total, heads, head_dim]",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bhsd_is_bshd_with_other_strides() -> hopper_attention::Result<()> {
        let shape = [2, 5, 3, 8]; // logical: batch, seqlen, heads, head_dim
        assert_eq!(file_shape(FileLayout::Bhsd, shape), [2, 3, 5, 8]);
        assert_eq!(strided(FileLayout::Bshd, shape)?.stride(), [120, 24, 8, 1]);
        let bhsd = strided(FileLayout::Bhsd, shape)?;
        assert_eq!((bhsd.shape(), bhsd.stride()), (shape, [120, 8, 40, 1]));
        Ok(())
    }
}
