//! Lists through C, small enough for Miri. `tests/tests/capi_lists.rs` compares more of them with the safe crate's.

use std::ptr::{null, null_mut};

use super::*;
use crate::abi::{HATTN_BLOCK_MASK_FULL_BLOCKS, HATTN_BLOCK_MASK_LISTS};
use crate::status::{HATTN_ERROR_ARGUMENT, HATTN_ERROR_VALUE, HATTN_OK};

fn no_arrays() -> hattn_block_arrays {
    hattn_block_arrays {
        struct_size: size_of::<hattn_block_arrays>() as u32,
        abi_version: HATTN_ABI_VERSION,
        block_mask: 0,
        block_mask_most_partial: 0,
        shape: [0; 4],
        bits_shape: [0; 4],
        mask_block_cnt: null(),
        mask_block_idx: null(),
        mask_bits: null(),
        full_block_cnt: null(),
        full_block_idx: null(),
        cnt_elements: 0,
        idx_elements: 0,
        bits_elements: 0,
    }
}

#[test]
fn slices_become_lists_that_are_shown_and_freed() {
    let (q_ranges, k_ranges, types) = ([0, 128, 128, 130], [0, 128, 126, 130], [0, 1]);
    let mut slices = hattn_slices {
        struct_size: size_of::<hattn_slices>() as u32,
        abi_version: HATTN_ABI_VERSION,
        seqlen_q: 130,
        seqlen_kv: 130,
        count: 2,
        q_ranges: q_ranges.as_ptr(),
        k_ranges: k_ranges.as_ptr(),
        types: types.as_ptr(),
    };
    let (mut lists, mut arrays) = (null_mut(), no_arrays());
    // SAFETY: structs and arrays of this function, with as many elements as they say.
    unsafe {
        assert_eq!(hattn_block_lists_from_slices(&slices, &mut lists), HATTN_OK);
        assert_eq!(hattn_block_lists_arrays(lists, &mut arrays), HATTN_OK);
        assert_eq!(arrays.block_mask, HATTN_BLOCK_MASK_LISTS | HATTN_BLOCK_MASK_FULL_BLOCKS);
        assert_eq!((arrays.block_mask_most_partial, arrays.shape), (2, [1, 1, 2, 2]));
        assert_eq!((arrays.bits_shape, arrays.cnt_elements), ([1, 1, 2, 1024], 2));
        assert_eq!((arrays.idx_elements, arrays.bits_elements), (4, 2048));
        let of = |at, count| std::slice::from_raw_parts::<i32>(at, count);
        assert_eq!((of(arrays.mask_block_cnt, 2), of(arrays.mask_block_idx, 4)), (&[0, 2][..], &[0, 0, 0, 1][..]));
        assert_eq!((of(arrays.full_block_cnt, 2), of(arrays.full_block_idx, 4)), (&[1, 0][..], &[0; 4][..]));
        // The two queries of the second slice: keys 126 and on of the first block, then keys of the second one.
        let bits = of(arrays.mask_bits, 2048);
        assert_eq!((bits[1027], bits[1031], bits[1536], bits[1540]), (3 << 30, 3 << 30, 1, 3));
        assert_eq!(bits.iter().map(|word| word.count_ones()).sum::<u32>(), 7);
        hattn_block_lists_destroy(lists);
        slices.types = null();
        assert_eq!(hattn_block_lists_from_slices(&slices, &mut lists), HATTN_ERROR_ARGUMENT);
        slices.types = types.as_ptr();
        slices.k_ranges = q_ranges.as_ptr().cast::<u8>().wrapping_add(1).cast();
        assert_eq!(hattn_block_lists_from_slices(&slices, &mut lists), HATTN_ERROR_ARGUMENT);
        (slices.k_ranges, slices.count) = (k_ranges.as_ptr(), i64::MAX);
        assert_eq!(hattn_block_lists_from_slices(&slices, &mut lists), HATTN_ERROR_VALUE);
        hattn_block_lists_destroy(lists);
        hattn_block_lists_destroy(null_mut());
    }
}
