//! The structs of lists of blocks: what they are made of, and where their numbers are.
//!
//! `include/hopper_attention_lists.h` is made of this file, with its comments. Write them for a C programmer. `abi.rs` states the
//! layouts.

use super::{hattn_block_mask, hattn_corner, hattn_mask};

/// Slices of the pairs of queries and keys, for hattn_block_lists_from_slices. Begin with HATTN_SLICES_INIT.
///
/// MagiAttention's flexible flash attention (FFA) describes masks so. Slice n has the queries from q0 to below q1 and the keys from
/// k0 to below k1. Which of its pairs of a query q and a key k are kept is its type:
/// - 0, full: all.
/// - 1, causal: those with k - k1 <= q - q1. The last query sees the last key.
/// - 2, inverse causal: those with k - k0 >= q - q0. The first query sees every key.
/// - 3, both: those that 1 and 2 keep. Nothing, with more queries than keys.
///
/// A query of no slice keeps nothing.
#[repr(C)]
#[allow(missing_docs, reason = "size and version are explained in hattn_forward_problem")]
#[derive(Clone, Copy, Debug)]
pub struct hattn_slices {
    pub struct_size: u32,
    pub abi_version: u32,
    /// Number of queries, and (below) of keys, of a sequence, 0 or more. Their sum is below 2^30.
    pub seqlen_q: i64,
    pub seqlen_kv: i64,
    /// Number of slices, 0 or more.
    pub count: i64,
    /// The queries of each slice: [count, 2], q0 and q1. 0 <= q0 <= q1 <= seqlen_q. May be null if count is 0.
    pub q_ranges: *const i32,
    /// The keys of each slice: [count, 2], k0 and k1. 0 <= k0 <= k1 <= seqlen_kv. May be null if count is 0.
    pub k_ranges: *const i32,
    /// The type of each slice: `[count]`, 0 to 3. May be null if count is 0.
    pub types: *const i32,
}

/// Documents, for hattn_block_lists_from_documents. Begin with HATTN_DOCUMENTS_INIT.
///
/// A pair of a query and a key is kept if both have the same number, 0 or more. A negative number keeps nothing, such as that of
/// padding. A document need not be in one piece.
#[repr(C)]
#[allow(missing_docs, reason = "size and version are explained in hattn_forward_problem")]
#[derive(Clone, Copy, Debug)]
pub struct hattn_documents {
    pub struct_size: u32,
    pub abi_version: u32,
    /// Number of batch entries that have numbers, 0 or more: that of the problem, or 1 if all of them share the numbers.
    pub batch: i64,
    /// Number of queries, and (below) of keys, of a sequence, 0 or more. Their sum is below 2^30.
    pub seqlen_q: i64,
    pub seqlen_kv: i64,
    /// The document of each query: [batch, seqlen_q]. May be null if that is no element.
    pub q_ids: *const i32,
    /// The document of each key: [batch, seqlen_kv]. May be null if that is no element. May be q_ids.
    pub kv_ids: *const i32,
}

/// Prefixes of batch entries, for hattn_block_lists_from_prefixes. Begin with HATTN_PREFIXES_INIT.
///
/// A pair of a query and a key is kept if the mask keeps it, or the key is below the prefix of the batch entry. This is a prefix
/// LM whose prefixes differ in length. (Where they do not, HATTN_MASK_PREFIX needs no lists.)
#[repr(C)]
#[allow(missing_docs, reason = "size and version are explained in hattn_forward_problem")]
#[derive(Clone, Copy, Debug)]
pub struct hattn_prefixes {
    pub struct_size: u32,
    pub abi_version: u32,
    /// Number of batch entries, 0 or more.
    pub batch: i64,
    /// Number of queries, and (below) of keys, of a sequence, 0 or more. Their sum is below 2^30.
    pub seqlen_q: i64,
    pub seqlen_kv: i64,
    /// The number of keys of each prefix: `[batch]`, 0 to seqlen_kv. May be null if batch is 0.
    pub prefixes: *const i32,
    /// The mask: these four are as in hattn_forward_problem.
    pub mask: hattn_mask,
    pub corner: hattn_corner,
    pub window_left: i64,
    pub window_right: i64,
}

/// Spans whose tokens see each other, for hattn_block_lists_from_spans. Begin with HATTN_SPANS_INIT.
///
/// A span is a run of keys, such as those of an image. A pair of a query and a key is kept if the mask keeps it or both are in one
/// span, and `within` keeps it, too: (mask or span) and within. A query is in a span if its aligned key is (hattn_mask).
///
/// Models compose a window with the spans in two ways:
/// - (causal and window) or span: mask is HATTN_MASK_WINDOW with window_right 0, and within is HATTN_MASK_FULL.
/// - (causal or span) and window: mask is HATTN_MASK_CAUSAL, and within is HATTN_MASK_WINDOW with within_right HATTN_UNBOUNDED.
#[repr(C)]
#[allow(missing_docs, reason = "size and version are explained in hattn_forward_problem")]
#[derive(Clone, Copy, Debug)]
pub struct hattn_spans {
    pub struct_size: u32,
    pub abi_version: u32,
    /// Number of batch entries that have spans, 0 or more: that of the problem, or 1 if all of them share the spans.
    pub batch: i64,
    /// Number of queries, and (below) of keys, of a sequence, 0 or more. Their sum is below 2^30.
    pub seqlen_q: i64,
    pub seqlen_kv: i64,
    /// How many spans each batch entry has: `[batch]`, each 0 or more. May be null if batch is 0.
    pub counts: *const i32,
    /// The spans of all batch entries, one entry after the other: [sum of counts, 2], the first key and the one after the last.
    /// 0 <= first <= end <= seqlen_kv. Spans may overlap. May be null if there are none.
    pub spans: *const i32,
    /// The mask: these four are as in hattn_forward_problem. Its corner says which key is the aligned key of a query.
    pub mask: hattn_mask,
    pub corner: hattn_corner,
    pub window_left: i64,
    pub window_right: i64,
    /// The mask that also holds within spans, likewise. HATTN_MASK_FULL (0) keeps every pair.
    pub within: hattn_mask,
    pub within_corner: hattn_corner,
    pub within_left: i64,
    pub within_right: i64,
}

/// A dense mask, for hattn_block_lists_from_dense_mask. Begin with HATTN_DENSE_MASK_INIT.
#[repr(C)]
#[allow(missing_docs, reason = "size and version are explained in hattn_forward_problem")]
#[derive(Clone, Copy, Debug)]
pub struct hattn_dense_mask {
    pub struct_size: u32,
    pub abi_version: u32,
    /// Number of batch entries that have a mask, 0 or more: that of the problem, or 1 if all of them share the mask.
    pub batch: i64,
    /// Number of query heads that have a mask, 1 or more: heads_q of the problem, or 1 if all of them share the mask.
    pub heads_q: i64,
    /// Number of queries, and (below) of keys, of a sequence, 0 or more. Their sum is below 2^30.
    pub seqlen_q: i64,
    pub seqlen_kv: i64,
    /// Whether each pair is kept: [batch, heads_q, seqlen_q, seqlen_kv], a byte for each, 1 (kept) or 0. May be null if that is no
    /// element.
    pub kept: *const u8,
}

/// Where the numbers of lists of blocks are, for hattn_block_lists_arrays. Begin with HATTN_BLOCK_ARRAYS_INIT.
///
/// The arrays are int32_t in host memory, row-major and without gaps. They belong to the lists: they are only read, and stay where
/// they are until the lists are destroyed. An array without elements may have any address. hattn_block_mask says what is in them.
#[repr(C)]
#[allow(missing_docs, reason = "size and version are explained in hattn_forward_problem")]
#[derive(Clone, Copy, Debug)]
pub struct hattn_block_arrays {
    pub struct_size: u32,
    pub abi_version: u32,
    /// What a problem's fields of these names must be. There always are lists of full blocks.
    pub block_mask: hattn_block_mask,
    pub block_mask_most_partial: i32,
    /// The shape of mask_block_idx and full_block_idx: [B, H, Qb, Kb]. That of mask_block_cnt and full_block_cnt is the first three.
    pub shape: [i64; 4],
    /// The shape of mask_bits: [B, H, Qb, 512 * block_mask_most_partial].
    pub bits_shape: [i64; 4],
    /// The operands of a run on the CPU. For a run on a GPU they are copied there.
    pub mask_block_cnt: *const i32,
    pub mask_block_idx: *const i32,
    pub mask_bits: *const i32,
    pub full_block_cnt: *const i32,
    pub full_block_idx: *const i32,
    /// How many elements mask_block_cnt and full_block_cnt have each; mask_block_idx and full_block_idx each; and mask_bits.
    pub cnt_elements: i64,
    pub idx_elements: i64,
    pub bits_elements: i64,
}
