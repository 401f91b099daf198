//! The one definition of what Rust hands to the kernels, and of what the kernels say of themselves.
//!
//! Words: a *tile* is what a CTA computes at a time. A *block* is what a tile visits, one after the other. In the
//! forward a tile is `tile_m` queries and a block is `tile_n` keys. In the backward a tile is `tile_n` keys and a block
//! is `tile_m` queries. A *row* is a row of a launch table (one compiled kernel), or a row of a tensor, as the sentence
//! says.
//!
//! Both sides read it. Rust uses the types below. C++ includes the header that cxx makes of this file
//! (`hopper-attention-sys/src/params.rs.h`, which includes the standard library only) through `include/kernels.hpp`.
//! So a field is added here and nowhere else: a Rust literal that does not fill it does not compile.
//!
//! Who fills what: the safe crate fills the launch parameters, in `launch/forward.rs`, `launch/backward.rs` and
//! `launch/quantize.rs`. The kernels' launchers (`kernels/*/launch.hpp`) fill the rows of the tables.
//!
//! Nothing here is checked at a launch. The safe crate has checked it, and the kernels rely on it:
//!
//! - Tensors of four dimensions (Q, K, V, O, their gradients, what is quantised): the address is a multiple of 16. Strides
//!   in bytes are multiples of 16, from 0 to below 2^40.
//! - Other tensors: the address is a multiple of the element size.
//! - The workspace: the address is a multiple of 16. Its contents are undefined before and after a launch.
//! - `heads_q` and `heads_kv` are at least 1, and `heads_q` is a multiple of `heads_kv`. `batch * heads_q < 2^31`.
//! - `seqlen_q + seqlen_kv < 2^30`.
//! - A forward has queries (`batch >= 1`, `seqlen_q >= 1`), except where `amax` or `max_logits` is wanted. It
//!   may have no keys.
//! - A backward has `batch >= 1`, except where `d_sinks` is wanted. One of the two lengths may be 0, and then both.
//! - Head dims are multiples of 8 (16 where operands are e4m3), at least 8, and at most those of the row.

/// The types, in the module that cxx makes.
#[cxx::bridge(namespace = "hattn")]
mod ffi {
    /// Element type of a tensor.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
    #[repr(u8)]
    enum DType {
        /// IEEE half precision.
        F16 = 0,
        /// bfloat16.
        BF16 = 1,
        /// 8-bit float with 4 exponent bits; its largest value is 448.
        E4M3 = 2,
        /// IEEE single precision.
        F32 = 3,
    }

    /// Shape of a kernel's loop over key blocks. The bounds of the loop are run-time values (`FwdParams`). A block is `tile_n`
    /// keys.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
    #[repr(u8)]
    enum MaskClass {
        /// Every key is visited. Only the ragged last block is masked.
        Full = 0,
        /// Keys up to a diagonal. Blocks on the diagonal are masked, those left of it are not.
        Causal = 1,
        /// An interval of keys for each query, neither end of which falls from one query to the next (`MaskEdges`): a band
        /// along a diagonal, chunks, a prefix. Blocks on either edge are masked, those between are not.
        Window = 2,
        /// Lists of the blocks of keys that each block of queries visits, and bits of some of them, beside such an interval
        /// (`BlockLists`).
        Blocks = 3,
    }

    /// Instruction set that a kernel is written for.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
    #[repr(u8)]
    enum Arch {
        /// Ampere and later.
        Sm80 = 0,
        /// Hopper (sm_90a), and nothing else.
        Sm90 = 1,
    }

    /// Which elements of an e4m3 tensor share one descale factor. A real value is the stored value times its factor.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
    #[repr(u8)]
    enum Scaling {
        /// All of a tensor.
        PerTensor = 0,
        /// All rows of one batch entry and key head. Of Q: all rows of the query heads that read the key head.
        PerHead = 1,
        /// 128 rows of one head.
        PerBlock = 2,
    }

    /// Type in which a kernel sums scores. Only rows of e4m3 operands have `F16`.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
    #[repr(u8)]
    enum Scores {
        /// Single precision. (Of a sum of e4m3 products the tensor cores keep only some 13 bits.)
        F32 = 0,
        /// Half precision. Sums fit where no element of Q and K is larger than 14 in magnitude (448 / 32):
        /// 256 * 14^2 = 50176. The kernel checks all elements that it reads, and reports in `FwdParams::range_check`.
        F16 = 1,
    }

    /// Which problems a row computes: those without modifiers of the scores (`softcap`, `alibi`, `bias`, `max_logits`
    /// and `dropout` of `FwdParams`, which see or change single scores or weights), or those with one or more.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
    #[repr(u8)]
    enum Modifiers {
        /// Those without modifiers.
        Never = 0,
        /// All.
        Either = 1,
        /// Those with one modifier or more.
        Always = 2,
    }

    /// Result of a call.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
    #[repr(i32)]
    enum StatusCode {
        /// The call did what it says.
        Ok = 0,
        /// A CUDA runtime call failed. The detail is its `cudaError_t`.
        Cuda = 1,
        /// The driver refused a tensor map. The detail is its `CUresult`.
        TensorMap = 2,
        /// The table has no such row. The detail is the row's index.
        NoSuchRow = 3,
        /// The driver has no `cuTensorMapEncodeTiled`.
        DriverTooOld = 4,
    }

    /// Result of a call, with the number behind it.
    #[derive(Debug, Clone, Copy)]
    struct Status {
        /// Kind of failure.
        code: StatusCode,
        /// The number that the comment of the code names (`StatusCode`), else 0.
        detail: i32,
    }

    /// Place of one operand in device memory.
    ///
    /// An operand is indexed by batch entry, row and head. What a row is:
    /// - of Q, K, V, O and their gradients: a token. Its `head_dim` elements lie side by side.
    /// - of a log-sum-exp: a query.
    /// - of descale factors: a block of 128 tokens.
    ///
    /// A stride of 0 means that all indices of that dimension read the same element. Descale factors use it where several
    /// blocks, heads or batch entries share one.
    #[derive(Debug, Clone, Copy, Default)]
    struct TensorDesc {
        /// Device address of the first element. 0: the operand was not given.
        address: u64,
        /// Elements from one batch entry to the next.
        stride_batch: i64,
        /// Elements from one row to the next.
        stride_row: i64,
        /// Elements from one head to the next.
        stride_head: i64,
    }

    /// Where the sequences of a batch lie, where a launch reads their lengths from device memory.
    ///
    /// A side (queries, or keys) is *packed* where all its sequences lie one behind the other in one tensor without a
    /// batch dimension: then `stride_batch` is 0 in its operands, and `seqlen` counts the rows of the tensor. Else the
    /// side is *dense*, and `seqlen` counts the rows of a batch entry.
    ///
    /// Only the launch's first kernel reads the arrays (`kernels/common/schedule.cu`). It clamps what it reads, so that
    /// no contents make a kernel read or write outside of the tensors. All others read the table that it makes.
    #[derive(Debug, Clone, Copy, Default)]
    struct Sequences {
        /// Device address of i32 `[batch + 1]`: the queries of sequence `i` are rows `[i]` to `[i + 1]`. 0: queries are
        /// dense.
        cu_seqlens_q: u64,
        /// The same for keys and values.
        cu_seqlens_kv: u64,
        /// Device address of i32 `[batch]`: how many of its queries a sequence has. The rows after them are neither read
        /// nor written. 0: all.
        seqused_q: u64,
        /// The same for keys and values.
        seqused_kv: u64,
        /// The most queries that a sequence may have: those after them are as those after `seqused_q`. A bias with numbers of
        /// its own for each query has so many. Else they are `seqlen_q`.
        most_queries: i32,
        /// The same for keys: a bias has so many. Else they are `seqlen_kv`.
        most_keys: i32,
        /// Device address in the workspace, a multiple of 16: the table of sequences that the launch's first kernel makes
        /// (`kernels/common/sequences.hpp`). 0: all of this is unused, and every sequence has `seqlen_q` queries and
        /// `seqlen_kv` keys.
        table: u64,
        /// Size of the table's list of tiles: no fewer than all sequences together have tiles in one head.
        list_size: i32,
        /// Size of the table's list of blocks of queries: no fewer than all sequences together have in one head. Backward
        /// and quantiser only.
        block_list_size: i32,
        /// Blocks of queries of one head that have sums of dQ. Backward only.
        /// - sm90: no fewer than those of all sequences with more than one tile of keys. (Others have one contribution to
        ///   each dQ, and no sums.)
        /// - sm80: `block_list_size`.
        sum_blocks: i32,
        /// Whether the rows of outputs that belong to no sequence are filled: with zeros, and an LSE with -inf. Else they are
        /// not written.
        fill_gaps: bool,
        /// Whether query 0 of a sequence stands at key `diagonal_offset` plus the sequence's keys less its queries (masks
        /// at the bottom right), and not at key `diagonal_offset`.
        bottom_right: bool,
    }

    /// What the edges of a mask have beside its bounds. Rows of class Window alone read it. It comes from the plan.
    ///
    /// The left edge moves in steps of `step` keys: the first key that a query keeps is its bound to the left, or 0 if that is
    /// below 0, rounded up to a multiple of `step`. The last key that it keeps is its bound to the right, or `prefix_last` if that
    /// is larger. So neither falls from one query to the next.
    ///
    /// A window has a step of 1 and no prefix. A mask of chunks has steps as long as a chunk, and a `window_left` of one less.
    #[derive(Debug, Clone, Copy)]
    struct MaskEdges {
        /// Keys from one place of the left edge to the next: 1 to 2^30.
        step: i32,
        /// `ceil(2^(31 + shift) / step)`: kernels multiply by it to divide by `step`.
        multiplier: u32,
        /// The least number with `2^shift >= step`.
        shift: i32,
        /// The last of the keys that no query loses to the right edge: 0 to 2^30 - 1, or -1 where there are none.
        prefix_last: i32,
    }

    /// Lists of blocks of 128 queries and 128 keys, of a launch of a row of class Blocks. All zeros of other launches.
    ///
    /// The caller's lists may hold anything. The launch's first kernels (`kernels/common/blocks.cu`) read them, leave out what
    /// is no block of keys, and make lists of their own in the workspace. All others read those, and the bits. The lists of a
    /// *row* are those of a block of queries, of one of `batch` times one of `heads`.
    #[derive(Debug, Clone, Copy, Default)]
    struct BlockLists {
        /// How many partial blocks a row has, i32 `[batch, heads, q_blocks]`, read.
        mask_block_cnt: TensorDesc,
        /// Which, i32 `[batch, heads, q_blocks, k_blocks]`, read. A list's elements lie side by side, here and below.
        mask_block_idx: TensorDesc,
        /// Their bits, `[batch, heads, q_blocks, most_partial * 512]` words, read: 128 queries of 128 bits. The address and the
        /// strides are multiples of 16 bytes.
        mask_bits: TensorDesc,
        /// How many full blocks, as above. May be absent, and then so is the other one.
        full_block_cnt: TensorDesc,
        /// Which.
        full_block_idx: TensorDesc,
        /// Batch entries with lists of their own: those of the launch, or 1.
        batch: i32,
        /// Query heads with lists of their own: those of the launch, or 1.
        heads: i32,
        /// Blocks of queries: `ceil(seqlen_q / 128)`, at most 2^14.
        q_blocks: i32,
        /// Blocks of keys: `ceil(seqlen_kv / 128)`, at most 2^14.
        k_blocks: i32,
        /// Backward: blocks that a tile may visit, `ceil(seqlen_q / tile_m)`. Else 0.
        m_blocks: i32,
        /// The most partial blocks of a row. At most `k_blocks`. `most_partial` times the rows is below 2^31.
        most_partial: i32,
        /// Device address in the workspace, a multiple of 16, and so all that follow: entries of each row, `[rows]` of
        /// two i32. How many are masked, and how many there are in all.
        counts: u64,
        /// Entries (`BlockEntry` in `kernels/common/blocks.hpp`), u32 `[rows, k_blocks]`. Of a forward: those of a row, the
        /// masked ones first. Of a backward: a matrix, with an entry or nothing for each block of keys.
        entries: u64,
        /// Backward: how many blocks of queries a tile of keys visits, i32 `[batch, heads, k_blocks]`. Else 0, as below.
        key_counts: u64,
        /// Backward: which, `[batch, heads, k_blocks, m_blocks]` of 8 bytes (`QueryEntry`).
        key_entries: u64,
        /// Backward: the bits with keys as rows, `[rows, most_partial]` of 2048 bytes.
        key_bits: u64,
    }

    /// Dropout of the weights (`kernels/common/dropout.hpp`). All zeros where nothing is dropped.
    #[derive(Debug, Clone, Copy, Default)]
    struct Dropout {
        /// Device address of i32 `[4]`, read: the words of the seed and of the offset, the low ones first. 0: the next two have them.
        state: u64,
        /// The seed. Read where there is no `state`.
        seed: u64,
        /// The offset. Read where there is no `state`.
        offset: u64,
        /// How many of 32768 weights are dropped, on average: 1 to 32767. 0: there is no dropout.
        dropped: i32,
        /// What the other weights are multiplied by: `32768 / (32768 - dropped)`.
        factor: f32,
    }

    /// One forward launch.
    ///
    /// Tensors come from the caller. Sizes, scale and options come from the problem. The schedule (`diagonal_offset` to
    /// `split_tiles`) comes from the plan, except for addresses: these are places in the caller's workspace, at offsets that
    /// the plan has chosen.
    #[derive(Debug, Clone, Copy)]
    struct FwdParams {
        /// Queries `[batch, seqlen_q, heads_q, head_dim_qk]`, read.
        q: TensorDesc,
        /// Keys `[batch, seqlen_kv, heads_kv, head_dim_qk]`, read.
        k: TensorDesc,
        /// Values `[batch, seqlen_kv, heads_kv, head_dim_vo]`, read.
        v: TensorDesc,
        /// Output `[batch, seqlen_q, heads_q, head_dim_vo]`, written.
        o: TensorDesc,
        /// Log-sum-exp, natural logarithm, f32 `[batch, heads_q, seqlen_q]`, written. With e4m3 operands the queries lie side by
        /// side (`stride_row` is 1, or unused). May be absent.
        lse: TensorDesc,
        /// Batch entries. 0 or more.
        batch: i32,
        /// Query heads. At least 1.
        heads_q: i32,
        /// Key and value heads. At least 1. Query head `h` reads key head `h / (heads_q / heads_kv)`.
        heads_kv: i32,
        /// Queries of a batch entry, or of all where they are packed (`sequences`). 0 or more.
        seqlen_q: i32,
        /// Keys of a batch entry, or of all where they are packed. 0 or more.
        seqlen_kv: i32,
        /// Head dim of Q and K, in elements.
        head_dim_qk: i32,
        /// Head dim of V and O, in elements.
        head_dim_vo: i32,
        /// Factor of Q K^T. Finite and above 0. For e4m3 operands it comes on top of the descale factors.
        softmax_scale: f32,
        /// Key at which query 0 stands: above -2^30, below 2^30. Query `i` keeps the keys from
        /// `i + diagonal_offset - window_left` to `i + diagonal_offset + window_right`, and see `edges`.
        diagonal_offset: i32,
        /// Keys kept before the diagonal: 0 to 2^30. 2^30 stands for all. Rows of class Full and Causal ignore it.
        window_left: i32,
        /// Keys kept behind the diagonal: 0 to 2^30. 2^30 stands for all. Rows of class Full ignore it.
        window_right: i32,
        /// CTAs of the grid. A tile is `tile_m` queries of one query head.
        /// - sm90: the multiprocessors that the plan uses, or the tiles where they are fewer. A CTA computes one tile after
        ///   another. Where CTAs share tiles (`shares` above 1, and rows with tiles of 64 queries): the tiles times
        ///   `shares` and `splits`. A CTA computes one share of a tile.
        /// - sm80: the number of tiles, or no fewer where a launch reads lengths from memory (`sequences`). A CTA computes
        ///   one tile.
        grid: i32,
        /// CTAs that share a tile's keys, as a cluster: at least 1, and at most `most_shares` of the row. Above 1
        /// there is no `tile_counter`.
        shares: i32,
        /// Clusters that share a tile's keys: at least 1. Above 1 there are `split_sums`, and `shares` is at least 2 where
        /// tiles have 128 queries.
        splits: i32,
        /// Device address in the workspace, a multiple of 16, of what clusters that share a tile leave for each other
        /// (`kernels/sm90/fwd/shares.hpp`). 0 where `splits` is 1.
        /// - `grid / splits` counters of 4 bytes, rounded up to a multiple of 16 in all. The launch zeroes them.
        /// - Partial sums: `sums_bytes` of the row for each of the `grid / shares` clusters.
        split_sums: u64,
        /// Heads in a group, at least 1. A head here is a (batch entry, query head) pair. The tile order lists the tiles group
        /// by group (`kernels/common/tile_scheduler.hpp`).
        heads_per_group: i32,
        /// Number of groups, at least 1. The last group has all heads that are left.
        groups: i32,
        /// Device address of an i32 in the workspace: the counter that CTAs draw their tiles from. The launch zeroes it, in
        /// stream order. 0: CTAs do not draw, and a CTA's tiles follow from its index. sm80 rows have 0.
        tile_counter: u64,
        /// Number of tiles at the end of the tile order that are split over CTAs by key blocks
        /// (`kernels/sm90/fp8/split.hpp`). 0 turns splitting off.
        ///
        /// - Range: 0, or `grid < split_tiles < 2 * grid`. The launch then has at least `2 * grid` tiles.
        /// - Needs a row with `split_bytes > 0`, and a `tile_counter`.
        /// - `tile_counter` is then the beginning of the workspace. The workspace has a header (16 bytes, or
        ///   `range_check_bytes(grid)` in a row with scores in f16), then `grid * split_bytes` of flags and partial sums.
        /// - A fallback row (see `RangeCheck` in `include/kernels.hpp`) has 0.
        split_tiles: i32,
        /// Element type of O. Read by rows of e4m3 operands only: F16, BF16 or E4M3. The O of other rows has their own type.
        output: DType,
        /// Descale factors of Q, f32 `[batch, heads_q / descale_q_group, blocks of 128 queries]`, read. This field and all
        /// that follow are for e4m3 operands only.
        descale_q: TensorDesc,
        /// Descale factors of K, f32 `[batch, heads_kv, blocks of 128 keys]`, read.
        descale_k: TensorDesc,
        /// Descale factors of V, f32 `[batch, heads_kv, blocks of 128 keys]`, read.
        descale_v: TensorDesc,
        /// Query heads that share one head of `descale_q`: 1, or `heads_q / heads_kv` where factors are per head.
        descale_q_group: i32,
        /// Factor of O before O is rounded to e4m3, f32 `[1]`, read. Given if and only if `output` is E4M3.
        scale_o: TensorDesc,
        /// Largest magnitude of O, before `scale_o`, f32 `[1]`, written. May be absent.
        amax: TensorDesc,
        /// Device address of the beginning of the workspace, which has a `RangeCheck` there (`include/kernels.hpp`). A
        /// row with scores in f16 and the fallback row that is launched after it get the same address. 0: there is no
        /// such pair.
        range_check: u64,
        /// CTAs of the row with scores in f16. The fallback row reads one word of the workspace for each.
        range_grid: i32,
        /// Sequences of lengths that the device knows. Rows with `packs` alone take them.
        sequences: Sequences,
        /// Attention sinks `[heads_q]`, read: a logit for each query head, `stride_head` apart. May be absent. All rows
        /// take them (`kernels/common/sinks.hpp`).
        sinks: TensorDesc,
        /// Element type of `sinks`: F32 or BF16. Not read where they are absent.
        sinks_dtype: DType,
        /// Edges of the mask.
        edges: MaskEdges,
        /// Cap of the scores, in units of scaled scores: a score `s = softmax_scale * q k` becomes
        /// `softcap * tanh(s / softcap)`, before the mask (`kernels/common/softcap.hpp`). 0: there is none. Else it is
        /// above 0, and `softmax_scale / softcap` and `softcap * log2(e)` are normal. The row's `modifiers` allow it.
        softcap: f32,
        /// Slopes of ALiBi, f32 `[batch, heads_q]`, read (`kernels/common/alibi.hpp`): the score of query `i` and key `j` loses
        /// `slope * |i + diagonal - j|`, after the cap and before the mask. The diagonal is `diagonal_offset`, or that of a
        /// sequence where it has one of its own (`Sequences::bottom_right`). `stride_batch` is 0 where batch entries share
        /// slopes. Packed sequences are batch entries. May be absent. The row's `modifiers` allow it.
        alibi: TensorDesc,
        /// Largest score of each query head, f32 `[heads_q]`, `stride_head` apart, written (`kernels/common/max_logits.hpp`):
        /// of all batch entries, queries and keys that are kept, in natural units, after `softmax_scale`, cap and ALiBi. -inf
        /// where there is none. May be absent. The row's `modifiers` allow it.
        max_logits: TensorDesc,
        /// Lists of blocks, of rows of class Blocks.
        blocks: BlockLists,
        /// Dropout of the weights. Packed sequences are batch entries. The row takes it (`drops`, `drops_packed`).
        dropout: Dropout,
        /// Additive bias `[batch, heads_q, seqlen_q, seqlen_kv]`, read (`kernels/common/bias.hpp`): it is added to the scores
        /// after the cap, in natural units. The keys of a query lie side by side. Strides are 0 where a dimension is shared.
        /// With `sequences` it is `[batch, heads_q, most_queries, most_keys]`, and query 0 and key 0 are a sequence's first.
        /// May be absent. The row `adds_bias`.
        bias: TensorDesc,
        /// Element type of `bias`: F32, BF16 or F16. Not read where it is absent.
        bias_dtype: DType,
    }

    /// One backward launch. Fields that are named as in `FwdParams` have the same meaning and range.
    ///
    /// Tensors come from the caller, sizes and scale from the problem, the schedule (`diagonal_offset` and what follows) from
    /// the plan. Addresses in the workspace are the caller's, at offsets that the plan has chosen.
    #[derive(Debug, Clone, Copy)]
    struct BwdParams {
        /// Queries, read.
        q: TensorDesc,
        /// Keys, read.
        k: TensorDesc,
        /// Values, read.
        v: TensorDesc,
        /// Output of the forward, read.
        o: TensorDesc,
        /// Log-sum-exp of the forward, read. Never absent.
        lse: TensorDesc,
        /// Gradient of O, of O's shape, read.
        d_o: TensorDesc,
        /// Gradient of the log-sum-exp, f32, of its shape, read. May be absent: the gradient is then 0.
        d_lse: TensorDesc,
        /// Gradient of Q, of Q's shape, written.
        d_q: TensorDesc,
        /// Gradient of K, of K's shape, written.
        d_k: TensorDesc,
        /// Gradient of V, of V's shape, written.
        d_v: TensorDesc,
        /// Batch entries. At least 1.
        batch: i32,
        /// Query heads. At least 1.
        heads_q: i32,
        /// Key and value heads. At least 1.
        heads_kv: i32,
        /// Queries of a batch entry. 0 or more.
        seqlen_q: i32,
        /// Keys of a batch entry. 0 or more.
        seqlen_kv: i32,
        /// Head dim of Q and K, in elements.
        head_dim_qk: i32,
        /// Head dim of V and O, in elements.
        head_dim_vo: i32,
        /// Factor of Q K^T. Finite and above 0.
        softmax_scale: f32,
        /// Key at which query 0 stands: above -2^30, below 2^30.
        diagonal_offset: i32,
        /// Keys kept before the diagonal: 0 to 2^30. 2^30 stands for all.
        window_left: i32,
        /// Keys kept behind the diagonal: 0 to 2^30. 2^30 stands for all.
        window_right: i32,
        /// CTAs of the main kernel's grid. A tile is `tile_n` keys of one key head.
        /// - sm90: the multiprocessors that the plan uses, or the tiles where they are fewer. A CTA computes one tile after
        ///   another.
        /// - sm80: the number of tiles, or no fewer where a launch reads lengths from memory (`sequences`). A CTA computes
        ///   one tile.
        grid: i32,
        /// Shares of a tile's work, at least 1. A CTA computes one share of a tile at a time (`kernels/common/visits.hpp`).
        /// sm80: 1. Above 1 the tiles' dK and dV are summed in `key_sums`, or by the CTAs of a cluster.
        shares: i32,
        /// Tiles that are cut into `shares`: all of them, or the last of the list. 0 where `shares` is 1.
        cut_tiles: i32,
        /// CTAs of a cluster: 1, or `shares`. Then a cluster has one tile, and a CTA one share of it. Such a launch has
        /// no `key_sums` and no `tile_counter`, and its grid is the tiles times `shares`. At most `most_shares` of the
        /// row.
        cluster: i32,
        /// Heads in a group, at least 1. A head here is a share of a (batch entry, key head) pair, or that pair where clusters
        /// have the shares.
        heads_per_group: i32,
        /// Number of groups, at least 1. The last group has all heads that are left.
        groups: i32,
        /// Device address in the workspace, a multiple of 16: the statistics of each query, made of its LSE and of
        /// `delta = rowsum(dO * O) - dLSE`. `[blocks, tile_m]` of 16 bytes (sm80: 8). A block here is `tile_m` queries:
        /// `blocks = batch * heads_q * ceil(seqlen_q / tile_m)`, which is below 2^31. The launch's first kernel writes
        /// it.
        statistics: u64,
        /// Device address in the workspace, a multiple of 16: sums of dQ, f32
        /// `[blocks, tile_m * head_dim_qk of the row]`. Tiles add to them. The launch's last kernel converts them to dQ.
        sums: u64,
        /// Device address in the workspace: which tiles have added to the sums of each block, i32 `[blocks]`. The
        /// launch's first kernel writes the initial values. What is counted depends on the architecture. sm90: see
        /// `Progress` in `kernels/sm90/bwd/traits.hpp`. sm80: warps, and only where `ordered`.
        progress: u64,
        /// Device address in the workspace, a multiple of 16: sums of dV and dK, f32
        /// `[copies, cut_tiles, tile_n * (head_dim_vo + head_dim_qk) of the row]`. Shares of a tile
        /// add to it, each to a copy of its own where `ordered` (`copies` is then `shares`, else 1). The launch's first
        /// kernel zeroes it, its last kernel converts it to dK and dV. 0 where `shares` is 1, and of clusters.
        key_sums: u64,
        /// Device address in the workspace, a multiple of 16: the list of all shares, 32 bytes each
        /// (`TileShare` in `kernels/sm90/bwd/share.hpp`). The launch's first kernel writes it. sm80 has none: 0.
        share_list: u64,
        /// Device address of an i32 in the workspace. The launch's first kernel zeroes it. Kernels set it where a dK is not
        /// finite, and then the last kernel looks for what has leaked into it from under the mask.
        leak_flag: u64,
        /// Whether tiles add to the sums of dQ in the order of their numbers, and shares of a tile to sums of their own.
        /// The result is then the same on every run, as a deterministic pass needs. Needs a `tile_counter`, and so no clusters.
        ordered: bool,
        /// Device address of an i32 in the workspace: the counter that CTAs draw their tiles from. The launch's first
        /// kernel zeroes it. 0: a CTA's tiles follow from its index.
        tile_counter: u64,
        /// Sequences of lengths that the device knows. Rows with `packs` alone take them. Then `statistics` are
        /// `[heads_q, rows]`, where the rows are those of the tensor of queries (packed) or of all batch entries; `sums` and
        /// `progress` are of `heads_q * sum_blocks` blocks; `share_list` has 64 bytes an entry, for
        /// `heads_kv * list_size` of them; and `shares` is 1.
        sequences: Sequences,
        /// Attention sinks of the forward, as there, read. Given if and only if `d_sinks` is.
        sinks: TensorDesc,
        /// Element type of `sinks`: F32 or BF16. Not read where they are absent.
        sinks_dtype: DType,
        /// Gradient of the sinks, f32 `[heads_q]`, written, `stride_head` apart. May be absent.
        d_sinks: TensorDesc,
        /// Edges of the mask.
        edges: MaskEdges,
        /// Cap of the scores, as there.
        softcap: f32,
        /// Slopes of ALiBi, as there.
        alibi: TensorDesc,
        /// Lists of blocks, of rows of class Blocks.
        blocks: BlockLists,
        /// Dropout of the weights, as there.
        dropout: Dropout,
        /// Additive bias, as there.
        bias: TensorDesc,
        /// Element type of `bias`, as there.
        bias_dtype: DType,
        /// Gradient of the bias, of its shape and type, written (`kernels/common/d_bias.hpp`). May be absent.
        d_bias: TensorDesc,
    }

    /// One tensor `[batch, seqlen, heads, head_dim]` that is quantised to e4m3. A tensor that is not quantised is all zeros.
    ///
    /// Tensors come from the caller, the rest from the quantiser's problem, `state` from the plan.
    #[derive(Debug, Clone, Copy, Default)]
    struct QuantizeTensor {
        /// Elements of the row's source type (16 bits), read.
        values: TensorDesc,
        /// e4m3 elements, written.
        stored: TensorDesc,
        /// Descale factors, f32 `[batch, heads / group, blocks of 128 rows]`. Read where `given`, else written.
        descale: TensorDesc,
        /// Whether the caller gives the factors. Else a factor is made of the largest magnitude of the values that share it.
        given: bool,
        /// Whether rows are rotated (random signs, then a Hadamard transform) before they are quantised.
        rotated: bool,
        /// Whether this tensor is quantised at all.
        wanted: bool,
        /// Largest magnitude that is stored: 448, or 14 for Q and K that go to scores in f16.
        most: f32,
        /// Batch entries, or sequences that follow each other in a tensor whose `stride_batch` is 0. 0 or more.
        batch: i32,
        /// Rows of a batch entry, or of all sequences together. 0 or more.
        seqlen: i32,
        /// Heads. At least 1.
        heads: i32,
        /// Head dim, in elements: a multiple of 16, from 16 to 256.
        head_dim: i32,
        /// Heads that share one head of `descale`: 1, or `heads_q / heads_kv` for Q where factors are per head.
        group: i32,
        /// Device address in the workspace, a multiple of 16. CTAs tell each other there which largest magnitudes they
        /// have measured. It is used only where `shares_factors` (`include/kernels.hpp`) holds. Size: the larger of
        /// `16 + 8 * factors` bytes, where `factors` is the number of descale factors, and
        /// `4 * batch * heads * ceil(seqlen / rows)` bytes, where `rows` is 64, or 32 above head dim 128. The former alone where sequences have lengths of their own.
        state: u64,
    }

    /// One launch that quantises any of Q, K and V. Each tensor has fewer than 2^30 tiles: `batch * heads * ceil(seqlen / 128)`
    /// are the most, or `heads * floor(seqlen / 128 + batch)` where sequences follow each other.
    #[derive(Debug, Clone, Copy)]
    struct QuantizeParams {
        /// Queries.
        q: QuantizeTensor,
        /// Keys.
        k: QuantizeTensor,
        /// Values.
        v: QuantizeTensor,
        /// Elements that share a descale factor. From the problem.
        scaling: Scaling,
        /// Seed of the rotation's signs, from the caller. 0 where no tensor is rotated.
        seed: u64,
        /// How many elements were saturated and how many were not finite, f32 `[3, 2]`, written. Row 0 is q, row 1 is k, row 2
        /// is v. Rows are `stride_batch` apart, the two numbers lie side by side. May be absent.
        counts: TensorDesc,
        /// Device address of the workspace. Its first 48 bytes are the counts, as six u64. The launch zeroes it in stream order,
        /// but for the table of sequences at its end, unless nothing of the launch uses it.
        workspace: u64,
        /// Size of the workspace without that table, in bytes. From the plan.
        workspace_bytes: u64,
        /// Multiprocessors of the GPU, at least 1. From the device.
        multiprocessors: i32,
        /// Where sequences have lengths that the host does not know. A side of which no tensor is quantised has no addresses
        /// here. The lists are of blocks of 128 rows: `list_size` of keys, `block_list_size` of queries, each 0 for a side
        /// without lengths.
        sequences: Sequences,
    }

    /// One row of the forward's or the backward's table: what was compiled. Its launcher fills it at compile time, from one
    /// line of a list of kernels (`fwd.def`, `fp8.def`, `bwd.def`).
    #[derive(Debug, Clone, Copy)]
    struct RowInfo {
        /// Instruction set.
        arch: Arch,
        /// Element type of Q, K, V and O. (Where it is e4m3, O has the type that `FwdParams::output` says.)
        dtype: DType,
        /// Mask class.
        mask: MaskClass,
        /// Largest head dim of Q and K, in elements.
        head_dim_qk: i32,
        /// Largest head dim of V and O, in elements.
        head_dim_vo: i32,
        /// Queries of a tile (backward: of a block).
        tile_m: i32,
        /// Keys of a block (backward: of a tile).
        tile_n: i32,
        /// Blocks in flight, of either operand. At least 1.
        stages: i32,
        /// Threads of a CTA.
        threads: i32,
        /// Dynamic shared memory of a CTA, in bytes.
        smem_bytes: i32,
        /// Type in which scores are summed.
        scores: Scores,
        /// Workspace of one CTA where the last tiles are split (`FwdParams::split_tiles`), in bytes. 0: the row never splits.
        split_bytes: i32,
        /// CTAs of a cluster that may share a tile (`FwdParams::shares`, `BwdParams::cluster`). 1: none may.
        most_shares: i32,
        /// Workspace of one cluster where several share a tile (`FwdParams::splits`), in bytes. 0: only one cluster may.
        sums_bytes: i32,
        /// Whether the row takes sequences of lengths that the device knows (`Sequences`).
        packs: bool,
        /// Whether the row has code for modifiers of the scores.
        modifiers: Modifiers,
        /// Whether the row takes dropout.
        drops: bool,
        /// The same beside sequences of lengths that the device knows.
        drops_packed: bool,
        /// Whether it adds a bias (`FwdParams::bias`).
        adds_bias: bool,
        /// The same beside sequences of lengths that the device knows.
        adds_bias_packed: bool,
    }

    /// One row of the quantiser's table: its kernels for one source type. Its launcher fills it at compile time.
    #[derive(Debug, Clone, Copy)]
    struct QuantizeRowInfo {
        /// Instruction set.
        arch: Arch,
        /// Element type of the values that the kernels read.
        source: DType,
    }
}

pub use ffi::{
    Arch, BlockLists, BwdParams, DType, Dropout, FwdParams, MaskClass, MaskEdges, Modifiers, QuantizeParams,
    QuantizeRowInfo, QuantizeTensor, RowInfo, Scaling, Scores, Sequences, Status, StatusCode, TensorDesc,
};
