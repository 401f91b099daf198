//! The suite that needs a GPU. Without one every test prints a line `skipped: no GPU (NAME)`; with `HATTN_REQUIRE_GPU=1`
//! that is a failure. `HATTN_TEST_GRID=small` is for compute-sanitizer; `HATTN_TEST_RECORD=PATH` gets the table as JSON.
//! `HATTN_TEST_ROWS='sm80 fwd|head_dim 96/96'` runs the kernels alone whose description has one of these texts.
#![cfg(feature = "cuda")]

mod accuracy;
mod alibi;
mod allocations;
mod backward;
mod bias;
mod blocks;
mod by_type;
mod capi;
mod capi_fp8;
mod capture;
mod contexts;
mod driver_errors;
mod dropout;
mod e4m3;
mod edges;
mod fp8;
mod fp8_factors;
mod fp8_long;
mod fp8_shares;
mod fp8_streams;
mod garbage_lengths;
mod graphs;
mod green;
mod grid;
mod large;
mod limits;
mod margins;
mod ordering;
mod other_rows;
mod packed;
mod packed_fp8;
mod packed_quantize;
mod pairs;
mod quantize;
mod refusals;
mod sequences;
mod sinks;
mod softcap;
mod special_streams;
mod streams;
mod training;
mod workspaces;

use hopper_attention::{Mask, MaskClass};

/// A mask of each class that bites.
fn mask_of(class: MaskClass) -> Mask {
    match class {
        MaskClass::Full => Mask::Full,
        MaskClass::Causal => Mask::causal(),
        _ => Mask::window(Some(100), Some(20)),
    }
}

/// Calls a generic function with the element type of a row.
macro_rules! with_dtype {
    ($dtype:expr, $function:ident($($argument:expr),* $(,)?)) => {
        match $dtype {
            hopper_attention::DType::BF16 => $function::<hopper_attention::bf16>($($argument),*),
            hopper_attention::DType::F16 => $function::<hopper_attention::f16>($($argument),*),
            other => panic!("no test inputs of type {other}"),
        }
    };
}
use with_dtype;
