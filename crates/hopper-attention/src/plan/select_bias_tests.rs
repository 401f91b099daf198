//! Rows that add a bias, for dense tensors and for packed sequences.

use super::tests::{DIMS, H100, problem, refused, table};
use super::*;
use crate::arch::Modifiers;
use crate::mask::Mask;

/// Rows that add a bias take it, and others refuse it by name.
#[test]
fn a_bias_takes_rows_that_add_it() {
    let bias = crate::problem::Bias::new(DType::F32).per_head(true);
    let biased = problem(DIMS, Mask::causal()).to_builder().bias(Some(bias)).build().unwrap();
    let rows = |modifiers, adds_bias| -> Vec<KernelInfo> {
        let adds_bias = |row: &KernelInfo| adds_bias && row.mask == MaskClass::Window;
        table().into_iter().map(|row| KernelInfo { modifiers, adds_bias: [adds_bias(&row), false], ..row }).collect()
    };
    let text = "unsupported: a bias with sm90 kernels for bf16; nearest: no bias, or Device::cpu()";
    assert_eq!(refused(&biased, &H100, &rows(Modifiers::Never, false)), text);
    let text =
        "unsupported: a bias with sm90 kernels for bf16, causal, head_dim 128/128; nearest: no bias, or Device::cpu()";
    assert_eq!(refused(&biased, &H100, &rows(Modifiers::Always, false)), text);
    // Those of class window do, whatever the mask.
    assert!(select(&biased, &H100, &rows(Modifiers::Always, true)).unwrap().kernel.adds_bias(false));
    let plain = biased.to_builder().bias(None).build().unwrap();
    assert!(select(&plain, &H100, &table()).is_ok());

    // Packed sequences ask for rows that do it beside them.
    let packed = biased.to_builder().packed(true).bias(Some(bias.covering(1, 700))).build().unwrap();
    let rows = |of_packed| -> Vec<KernelInfo> {
        let row = |row| KernelInfo { packs: true, adds_bias: [true, of_packed], ..row };
        rows(Modifiers::Always, true).into_iter().filter(|row| row.mask == MaskClass::Window).map(row).collect()
    };
    let text = "unsupported: a bias with sm90 kernels for bf16, causal, packed, head_dim 128/128; \
                nearest: no bias, or Device::cpu()";
    assert_eq!(refused(&packed, &H100, &rows(false)), text);
    assert!(select(&packed, &H100, &rows(true)).unwrap().kernel.adds_bias(true));
}
