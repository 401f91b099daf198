use super::tests::{DIMS, H100, problem, refused, row, table};
use super::*;
use crate::arch::Arch;
use crate::mask::Mask;

/// What no row of the newest instruction set computes, rows of an older one do. The error is that of the newest.
#[test]
fn older_rows_compute_what_newer_ones_do_not() {
    let dropout = Some(crate::problem::Dropout::new(0.5).unwrap());
    let dropping = problem(DIMS, Mask::causal()).to_builder().dropout(dropout).build().unwrap();
    let text = "unsupported: dropout with sm90 kernels for bf16, causal, head_dim 128/128; nearest: no dropout, or Device::cpu()";
    let mut rows = table();
    assert_eq!(refused(&dropping, &H100, &rows), text);
    let of_sm80 = KernelInfo { arch: Arch::Sm80, ..row(rows.len() as u32, MaskClass::Window, 128, 64) };
    rows.push(of_sm80);
    assert_eq!(refused(&dropping, &H100, &rows), text);
    rows.push(KernelInfo { drops: [true; 2], row: of_sm80.row + 1, ..of_sm80 });
    assert_eq!(select(&dropping, &H100, &rows).unwrap().kernel, rows[rows.len() - 1]);
    // Not where a problem asks for the newest, nor where that has a row.
    let asks = dropping.to_builder().arch(Arch::Sm90).build().unwrap();
    assert_eq!(refused(&asks, &H100, &rows), text);
    assert_eq!(select(&problem(DIMS, Mask::causal()), &H100, &rows).unwrap().kernel.arch, Arch::Sm90);
}

/// Dropout and a bias beside lists of blocks: each alone is for the newest rows.
#[test]
fn older_rows_drop_beside_lists_and_a_bias() {
    let lists = Some(crate::problem::BlockMask::new(2).full_blocks(true));
    let (dropout, bias) = (crate::problem::Dropout::new(0.5).unwrap(), crate::problem::Bias::new(DType::F32));
    let of = |dropout, bias| {
        problem(DIMS, Mask::causal()).to_builder().block_mask(lists).dropout(dropout).bias(bias).build().unwrap()
    };
    let modifiers = crate::arch::Modifiers::Always;
    let newest =
        KernelInfo { modifiers, drops: [true, false], adds_bias: [true, false], ..row(0, MaskClass::Blocks, 128, 128) };
    let older = KernelInfo { arch: Arch::Sm80, modifiers: crate::arch::Modifiers::Either, row: 1, ..newest };
    let chosen = |problem: &_| select(problem, &H100, &[newest, older]).unwrap().kernel.arch;
    assert_eq!([of(Some(dropout), None), of(None, Some(bias))].map(|problem| chosen(&problem)), [Arch::Sm90; 2]);
    let both = of(Some(dropout), Some(bias));
    assert_eq!(chosen(&both), Arch::Sm80);
    let text = "unsupported: dropout and a bias together with sm90 kernels for bf16, blocks; \
                nearest: one of the two, sm80 kernels, or Device::cpu()";
    assert_eq!(refused(&both, &H100, &[newest]), text);
}
