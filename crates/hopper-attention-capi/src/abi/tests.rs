//! How structs of other versions are read.

use super::*;
use crate::status::HATTN_ERROR_ABI;

/// A problem in memory of any size.
#[repr(C, align(8))]
struct Block([u8; 8192]);

fn block(size: u32, version: u32) -> Block {
    let mut block = Block([0; 8192]);
    block.0[..4].copy_from_slice(&size.to_ne_bytes());
    block.0[4..8].copy_from_slice(&version.to_ne_bytes());
    block
}

fn text(block: &Block) -> Result<hattn_forward_problem, String> {
    // SAFETY: aligned, and larger than any size that is followed.
    unsafe { read("problem", (&raw const *block).cast::<hattn_forward_problem>()) }.map_err(|failure| {
        assert_eq!(failure.status(), HATTN_ERROR_ABI);
        failure.to_string()
    })
}

/// The sizes that are taken of a struct whose fields are all 0, up to 17 bytes more than it has.
fn taken<T: Versioned>() -> Vec<usize> {
    let is_taken = |&size: &usize| {
        let given = block(size as u32, 1);
        // SAFETY: aligned, and larger than any size that is followed.
        unsafe { read("it", (&raw const given).cast::<T>()) }.is_ok()
    };
    (0..size_of::<T>() + 18).filter(is_taken).collect()
}

#[test]
fn a_size_ends_between_two_fields() {
    // The last two of each list are those of structs that a newer header may have.
    assert_eq!(
        taken::<hattn_forward_problem>(),
        [104, 112, 120, 128, 136, 144, 152, 160, 168, 176, 184, 192, 200, 208, 216, 224, 232, 240]
    );
    assert_eq!(
        taken::<hattn_backward_problem>(),
        [104, 112, 120, 128, 136, 144, 152, 160, 168, 176, 184, 192, 200, 208, 216, 224, 232]
    );
    assert_eq!(taken::<hattn_quantize_problem>(), [32, 40, 48]);
    assert_eq!(taken::<hattn_tensor>(), [96, 104, 112]);
    let by_eight = |from: usize, to: usize| (from..=to).step_by(8).collect::<Vec<_>>();
    assert_eq!(taken::<hattn_forward_args>(), by_eight(64, 232));
    assert_eq!(taken::<hattn_backward_args>(), by_eight(104, 240));
    assert_eq!(taken::<hattn_quantize_tensor>(), [40, 48, 56]);
    assert_eq!(taken::<hattn_quantize_args>(), [56, 64, 72, 80, 88, 96, 104]);
    assert_eq!(taken::<hattn_slices>(), [56, 64, 72]);
    assert_eq!(taken::<hattn_documents>(), [48, 56, 64]);
    assert_eq!(taken::<hattn_prefixes>(), [64, 72, 80]);
    assert_eq!(taken::<hattn_spans>(), [96, 104, 112]);
    assert_eq!(taken::<hattn_dense_mask>(), [48, 56, 64]);
    assert_eq!(taken::<hattn_block_arrays>(), [144, 152, 160]);
    let inside_of_an_array = StructLayout { name: "", least: 8, size: 48, fields: &[("array", 8), ("last", 40)] };
    assert_eq!(inside_of_an_array.sizes().collect::<Vec<_>>(), [8, 40, 48]);
}

#[test]
fn sizes_and_versions_are_those_that_exist() {
    assert_eq!(text(&block(104, 1)).unwrap().batch, 0);
    assert_eq!(text(&block(104, 2)).unwrap_err(), "problem: abi_version 2; allowed: 1");
    for size in [0, 103, 119, 4097, 4104, u32::MAX] {
        let want = format!(
            "problem: struct_size {size}; allowed: 104, 112, 120, 128, 136, 144, 152, 160, 168, 176, 184, 192, 200, 208, \
             216, 224 (sizeof(hattn_forward_problem)), or a larger multiple of 8 up to 4096 if the fields that this library does not know are 0"
        );
        assert_eq!(text(&block(size, 1)).unwrap_err(), want);
    }
}

#[test]
fn fields_of_a_newer_caller_must_be_zero() {
    let known = size_of::<hattn_forward_problem>();
    let size = known + 8;
    let mut newer = block(size as u32, 1);
    newer.0[24] = 3;
    assert_eq!(text(&newer).unwrap().batch, 3);
    newer.0[size - 1] = 1;
    let error = text(&newer).unwrap_err();
    assert!(
        error.starts_with(&format!(
            "problem: struct_size {size}; allowed: 104, 112, 120, 128, 136, 144, 152, 160, 168, 176, 184, 192, 200, 208, 216, {known} ("
        )),
        "{error}"
    );
    // Bytes behind the size that the caller gave are not the struct's.
    newer.0[size - 1] = 0;
    newer.0[size] = 1;
    assert!(text(&newer).is_ok());
}

#[test]
fn reserved_fields_must_be_zero() {
    assert_eq!(hattn_tensor::LAYOUT.reserved(), Some(28));
    assert_eq!(hattn_forward_args::LAYOUT.reserved(), None);
    let mut given = block(96, 1);
    // SAFETY: aligned, and larger than any size that is followed.
    let read = |given: &Block| unsafe { read("tensor", (&raw const *given).cast::<hattn_tensor>()) };
    assert!(read(&given).is_ok());
    given.0[31] = 1;
    assert_eq!(read(&given).unwrap_err().to_string(), "tensor: reserved 0x1000000; allowed: 0");
}

#[test]
fn fields_that_an_older_caller_does_not_know_are_zero() {
    let mut older = block(104, 1);
    older.0[104..4096].fill(1);
    let read = text(&older).unwrap();
    assert_eq!((read.output, read.scaling, read.amax, read.half_scores, read.sm_margin), (0, 0, 0, 0, 0));
    assert_eq!(read.workspace_limit, 0);
    assert_eq!((read.cu_seqlens_q, read.seqused_kv, read.max_seqlen_q, read.fill_gaps), (0, 0, 0, 0));
}

#[test]
fn what_is_filled_in_is_what_the_caller_knows() {
    let value = hattn_tensor {
        struct_size: 0,
        abi_version: 0,
        data: std::ptr::without_provenance_mut(0x0101_0101_0101_0101),
        dtype: 0x0101_0101,
        device: 0x0101_0101,
        ndim: 0x0101_0101,
        reserved: 0x0101_0101,
        shape: [0x0101_0101_0101_0101; 4],
        stride: [0x0101_0101_0101_0101; 4],
    };
    for size in [96, 104] {
        let mut given = block(size, 1);
        // SAFETY: aligned, and larger than any size that is followed.
        unsafe { fill("tensor", (&raw mut given).cast::<hattn_tensor>(), &value) }.unwrap();
        let mut want = block(size, 1);
        want.0[8..96].fill(1);
        assert!(given.0 == want.0);
    }
    let mut given = block(95, 1);
    // SAFETY: as above.
    let refused = unsafe { fill("tensor", (&raw mut given).cast::<hattn_tensor>(), &value) }.unwrap_err();
    assert!(refused.to_string().starts_with("tensor: struct_size 95; allowed: 96 ("), "{refused}");
    assert!(given.0 == block(95, 1).0);
}
