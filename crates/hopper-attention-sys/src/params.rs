//! The one definition of what Rust hands to the kernels, and of what the kernels say of themselves.
//!
//! Both sides read it. Rust uses the types below. C++ includes the header that cxx makes of this file
//! (`hopper-attention-sys/src/params.rs.h`, which includes the standard library only) through `include/kernels.hpp`.
//! So a field is added here and nowhere else: a Rust literal that does not fill it does not compile.
//!
//! Nothing here is checked at a launch. The safe crate has checked it, and the kernels rely on it:
//!
//! - Addresses and strides in bytes are multiples of 16, unless a field says otherwise.
//! - `batch`, `heads_q`, `heads_kv` are at least 1, and `heads_q` is a multiple of `heads_kv`.
//! - `seqlen_q + seqlen_kv < 2^30`. A forward has queries (`seqlen_q >= 1`) and may have no keys. In a backward one of
//!   the two may be 0.
//! - Head dims are multiples of 8 (16 where operands are e4m3), at least 8, and at most those of the row.
//! - `softmax_scale` is finite and above 0.
//! - `0 <= window_left <= 2^30`, and the same of `window_right`.

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

    /// Shape of a kernel's loop over key blocks. The bounds of the loop are run-time values (`FwdParams`).
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
    #[repr(u8)]
    enum MaskClass {
        /// Every key is visited. Only the ragged last block is masked.
        Full = 0,
        /// Keys up to a diagonal. Blocks on the diagonal are masked, those left of it are not.
        Causal = 1,
        /// A band of keys along a diagonal. Blocks on either edge are masked, those between are not.
        Window = 2,
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

    /// Elements that share one descale factor.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
    #[repr(u8)]
    enum Scaling {
        /// All of a tensor.
        PerTensor = 0,
        /// Those of one batch entry and key head.
        PerHead = 1,
        /// 128 rows of one head.
        PerBlock = 2,
    }

    /// Type in which a kernel sums scores. Only rows of e4m3 operands have `F16`.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
    #[repr(u8)]
    enum Scores {
        /// Single precision. For e4m3 operands this is what the tensor cores keep of such a sum.
        F32 = 0,
        /// Half precision. Sums fit where no element of Q and K is larger than 14 in magnitude (448 / 32):
        /// 128 * 14^2 = 25088. The kernel checks all that it reads (`range_check`).
        F16 = 1,
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
        /// Number that the failing call returned, else 0.
        detail: i32,
    }

    /// Place of one operand on the device: the address of its first element, and strides in elements.
    ///
    /// An operand is indexed by batch entry, row and head. A row is
    /// - a token of Q, K, V, O and of their gradients, whose `head_dim` elements lie side by side;
    /// - a query of a log-sum-exp, whose queries lie side by side (`stride_row` is 1);
    /// - a block of 128 rows of a tensor that descale factors belong to (stride 0: all of that index share a factor).
    #[derive(Debug, Clone, Copy, Default)]
    struct TensorDesc {
        /// Device address of the first element. 0: the operand is not there.
        address: u64,
        /// Elements from one batch entry to the next.
        stride_batch: i64,
        /// Elements from one row to the next.
        stride_row: i64,
        /// Elements from one head to the next.
        stride_head: i64,
    }

    /// One forward launch.
    #[derive(Debug, Clone, Copy)]
    struct FwdParams {
        /// Queries `[batch, seqlen_q, heads_q, head_dim_qk]`.
        q: TensorDesc,
        /// Keys `[batch, seqlen_kv, heads_kv, head_dim_qk]`.
        k: TensorDesc,
        /// Values `[batch, seqlen_kv, heads_kv, head_dim_vo]`.
        v: TensorDesc,
        /// Output `[batch, seqlen_q, heads_q, head_dim_vo]`, written.
        o: TensorDesc,
        /// Log-sum-exp, natural logarithm, f32 `[batch, heads_q, seqlen_q]`, written. May be absent.
        lse: TensorDesc,
        /// Batch entries.
        batch: i32,
        /// Query heads.
        heads_q: i32,
        /// Key and value heads.
        heads_kv: i32,
        /// Queries of a batch entry.
        seqlen_q: i32,
        /// Keys of a batch entry.
        seqlen_kv: i32,
        /// Head dim of Q and K.
        head_dim_qk: i32,
        /// Head dim of V and O.
        head_dim_vo: i32,
        /// Factor of Q K^T.
        softmax_scale: f32,
        /// Key that query 0 stands at. Query `i` keeps the keys from `i + diagonal_offset - window_left` to
        /// `i + diagonal_offset + window_right`.
        diagonal_offset: i32,
        /// Keys kept before the diagonal. 2^30: all. Rows of class Full and Causal ignore it.
        window_left: i32,
        /// Keys kept behind the diagonal. 2^30: all. Rows of class Full ignore it.
        window_right: i32,
        /// CTAs of the grid. sm90: a persistent grid. sm80: one CTA a tile.
        grid: i32,
        /// (Batch entry, head) pairs whose tiles are walked together (`kernels/common/tile_scheduler.hpp`).
        heads_per_group: i32,
        /// Number of such groups. The last one has all heads that are left.
        groups: i32,
        /// Device address of 4 bytes of workspace, aligned to 4: the counter that CTAs draw their tiles from. The launch
        /// zeroes it in stream order. 0: a CTA's tiles follow from its index. sm80 has none.
        tile_counter: u64,
        /// Number of tiles at the end of the tile order that are split over CTAs by key blocks
        /// (`kernels/sm90/fp8/split.hpp`). 0 turns splitting off.
        ///
        /// - Range: 0, or `grid <= split_tiles < 2 * grid`; the launch then has at least `2 * grid` tiles.
        /// - Needs a row with `split_bytes > 0`, and a `tile_counter`.
        /// - `tile_counter` is then the beginning of the workspace: a header (16 bytes, or `range_check_bytes(grid)` of a
        ///   row with scores in f16), then `grid * split_bytes` of partial sums.
        /// - A fallback row (behind one with scores in f16) has 0.
        split_tiles: i32,
        /// Element type of O where operands are e4m3: F16, BF16 or E4M3. Other rows have an O of their own type.
        output: DType,
        /// Descale factors of Q, f32 `[batch, heads, blocks]`. These and what follows belong to e4m3 operands alone.
        descale_q: TensorDesc,
        /// Descale factors of K, likewise.
        descale_k: TensorDesc,
        /// Descale factors of V, likewise.
        descale_v: TensorDesc,
        /// Query heads that share a head of `descale_q`, at least 1.
        descale_q_group: i32,
        /// f32 `[1]`: factor of O before it is rounded to e4m3. There exactly where O is e4m3.
        scale_o: TensorDesc,
        /// f32 `[1]`, written: the largest magnitude of O. May be absent.
        amax: TensorDesc,
        /// Device address of the workspace's beginning, as the `RangeCheck` and what belongs to it (`kernels.hpp`), for a
        /// row with scores in f16 and for its fallback row. 0: there is no such pair.
        range_check: u64,
        /// CTAs of the row with scores in f16.
        range_grid: i32,
    }

    /// One backward launch. Fields named as in `FwdParams` mean the same.
    #[derive(Debug, Clone, Copy)]
    struct BwdParams {
        /// Queries.
        q: TensorDesc,
        /// Keys.
        k: TensorDesc,
        /// Values.
        v: TensorDesc,
        /// The forward's output.
        o: TensorDesc,
        /// The forward's log-sum-exp.
        lse: TensorDesc,
        /// Gradient of O, of O's shape.
        d_o: TensorDesc,
        /// Gradient of the log-sum-exp, of its shape. May be absent.
        d_lse: TensorDesc,
        /// Gradient of Q, of Q's shape, written.
        d_q: TensorDesc,
        /// Gradient of K, of K's shape, written.
        d_k: TensorDesc,
        /// Gradient of V, of V's shape, written.
        d_v: TensorDesc,
        /// Batch entries.
        batch: i32,
        /// Query heads.
        heads_q: i32,
        /// Key and value heads.
        heads_kv: i32,
        /// Queries of a batch entry.
        seqlen_q: i32,
        /// Keys of a batch entry.
        seqlen_kv: i32,
        /// Head dim of Q and K.
        head_dim_qk: i32,
        /// Head dim of V and O.
        head_dim_vo: i32,
        /// Factor of Q K^T.
        softmax_scale: f32,
        /// Key that query 0 stands at.
        diagonal_offset: i32,
        /// Keys kept before the diagonal.
        window_left: i32,
        /// Keys kept behind the diagonal.
        window_right: i32,
        /// CTAs of the grid. sm90: a persistent grid. sm80: one CTA a tile.
        grid: i32,
        /// (Batch entry, key head) pairs whose tiles are walked together.
        heads_per_group: i32,
        /// Number of such groups. The last one has all heads that are left.
        groups: i32,
        /// Device address of workspace, aligned to 16: what is kept of each query. With
        /// `blocks = batch * heads_q * ceil(seqlen_q / tile_m)`, `[blocks][tile_m]` of 16 bytes (sm80: 8).
        statistics: u64,
        /// Device address of workspace, aligned to 16: the sums of dQ, f32 `[blocks][tile_m * head_dim_qk of the row]`.
        sums: u64,
        /// Device address of workspace: how far the sums of each block are, i32 `[blocks]`.
        progress: u64,
        /// Whether tiles add to the sums of dQ in the order of their numbers. The result is then the same on every run.
        /// Needs a `tile_counter`.
        ordered: bool,
        /// Device address of the counter that CTAs draw their tiles from; 0: a CTA's tiles follow from its index.
        tile_counter: u64,
    }

    /// A tensor `[batch, seqlen, heads, head_dim]` that is quantised to e4m3.
    #[derive(Debug, Clone, Copy, Default)]
    struct QuantizeTensor {
        /// 16-bit elements, read.
        values: TensorDesc,
        /// e4m3 elements, written.
        stored: TensorDesc,
        /// Descale factors, f32 `[batch, heads / group, blocks]`.
        descale: TensorDesc,
        /// Whether the factors are read. Else they are made from the largest magnitudes and written.
        given: bool,
        /// Whether rows are rotated (Hadamard transform) before.
        rotated: bool,
        /// Whether there is this tensor at all.
        wanted: bool,
        /// Largest magnitude that is stored: 448, or that divided by a power of two.
        most: f32,
        /// Batch entries.
        batch: i32,
        /// Rows of a batch entry.
        seqlen: i32,
        /// Heads.
        heads: i32,
        /// Head dim, a multiple of 16, at most 128.
        head_dim: i32,
        /// Heads that share a head of `descale`, at least 1.
        group: i32,
        /// Device address of workspace for what the tensor's tiles share. It is used where `shares_factors`
        /// (`kernels.hpp`) says so, and has `16 + 8 * heads of descale` bytes, or `4 * batch * heads * ceil(seqlen / 64)`
        /// where that is more.
        state: u64,
    }

    /// One launch that quantises any of Q, K and V. Each has `batch * heads * ceil(seqlen / 128) < 2^30`.
    #[derive(Debug, Clone, Copy)]
    struct QuantizeParams {
        /// Queries.
        q: QuantizeTensor,
        /// Keys.
        k: QuantizeTensor,
        /// Values.
        v: QuantizeTensor,
        /// Elements that share a descale factor.
        scaling: Scaling,
        /// Seed of the signs, for what is rotated.
        seed: u64,
        /// f32 `[3, 2]`, written: how many elements of q, k and v were saturated, and how many were not finite. The rows
        /// are `stride_batch` apart, the two numbers side by side. May be absent.
        counts: TensorDesc,
        /// Device address of the workspace. The launch zeroes all of it in stream order. It begins with 48 bytes for the
        /// counts.
        workspace: u64,
        /// Size of the workspace.
        workspace_bytes: u64,
        /// Multiprocessors of the GPU, at least 1.
        multiprocessors: i32,
    }

    /// One row of the forward's or the backward's table: what was compiled.
    #[derive(Debug, Clone, Copy)]
    struct RowInfo {
        /// Instruction set.
        arch: Arch,
        /// Element type of Q, K, V and O (of e4m3 operands O has another one).
        dtype: DType,
        /// Mask class.
        mask: MaskClass,
        /// Largest head dim of Q and K.
        head_dim_qk: i32,
        /// Largest head dim of V and O.
        head_dim_vo: i32,
        /// Queries of a tile (backward: of a block).
        tile_m: i32,
        /// Keys of a block (backward: of a tile).
        tile_n: i32,
        /// Blocks in flight, of either operand.
        stages: i32,
        /// Threads of a CTA.
        threads: i32,
        /// Dynamic shared memory of a CTA, in bytes.
        smem_bytes: i32,
        /// Type in which scores are summed.
        scores: Scores,
        /// Workspace of a CTA where the last tiles are split (`split_tiles`), in bytes. 0: the row does not split.
        split_bytes: i32,
    }

    /// One row of the quantiser's table: its kernels for one source type.
    #[derive(Debug, Clone, Copy)]
    struct QuantizeRowInfo {
        /// Instruction set.
        arch: Arch,
        /// Element type of what they read.
        source: DType,
    }
}

pub use ffi::{
    Arch, BwdParams, DType, FwdParams, MaskClass, QuantizeParams, QuantizeRowInfo, QuantizeTensor, RowInfo, Scaling,
    Scores, Status, StatusCode, TensorDesc,
};
