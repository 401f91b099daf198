//! Modified scores under chunks, prefixes and masks of the top-left corner, through the CPU backend. `cpu_more` takes a share of the same
//! lists, which has few of these.

use hopper_attention::{Corner, Mask, bf16, f16};
use hopper_attention_tests::problems::{Case, Grid};
use hopper_attention_tests::runner::{Prepared, Runner};
use hopper_attention_tests::{alibi, backward, bias, dropout, sinks, softcap};

fn is_other(case: &Case) -> bool {
    match case.mask {
        Mask::Chunked { .. } | Mask::Prefix { .. } => true,
        Mask::Causal { corner } | Mask::Window { corner, .. } => corner == Corner::TopLeft,
        _ => false,
    }
}

/// The oracle takes long: each pass takes some.
#[test]
fn other_masks_keep_the_tolerance() {
    let grid = Grid::from_env();
    let lists = [
        softcap::cases(grid),
        softcap::packed_cases(grid),
        sinks::cases(grid),
        sinks::packed_cases(grid),
        alibi::cases(grid),
        alibi::packed_cases(grid),
        bias::cases(grid),
        bias::packed_cases(grid),
        dropout::cases(grid),
        dropout::packed_cases(grid),
    ];
    let mut all: Vec<Case> = Vec::new();
    for list in lists {
        let others: Vec<Case> = list.into_iter().filter(is_other).collect();
        assert!(others.len() > 10, "{}", others.len());
        all.extend(others);
    }
    let some = |first: usize, step: usize| all.iter().skip(first).step_by(step).cloned();
    Runner::all_on_cpu::<Prepared<bf16>>("cpu bf16", &some(0, 9).collect::<Vec<_>>());
    let of_gradients = some(1, 23).map(|case| case.max_logits(false));
    Runner::all_on_cpu::<backward::Prepared<f16>>("cpu f16 backward", &of_gradients.collect::<Vec<_>>());
}
