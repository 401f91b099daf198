//! The CUDA kernels of Hopper Attention, seen from Rust: the table of what was compiled, and one launch function a direction.
//!
//! This crate validates nothing and promises nothing. It exists so that all C++ is in one place; the crate
//! `hopper-attention` is the one to use, and the only one that calls this one. Everything here mirrors
//! `include/kernels.hpp`, which says what a launch relies on.
//!
//! Functions return a [`Status`] rather than throw, and none of them panics.

// Clippy does not see documentation through cxx's macro: `fwd_launch` has its section on safety.
#[allow(clippy::missing_safety_doc)]
#[cxx::bridge(namespace = "hattn::bridge")]
mod ffi {
    /// Element types of a kernel's operands.
    #[namespace = "hattn"]
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
    #[repr(u8)]
    enum DType {
        /// IEEE half precision.
        F16 = 0,
        /// bfloat16.
        BF16 = 1,
        /// 8-bit float with 4 exponent bits; largest value 448.
        E4M3 = 2,
        /// IEEE single precision.
        F32 = 3,
    }

    /// How a kernel's loop over key blocks is shaped.
    #[namespace = "hattn"]
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
    #[repr(u8)]
    enum MaskClass {
        /// Every key.
        Full = 0,
        /// Keys up to a diagonal.
        Causal = 1,
        /// A band of keys along a diagonal.
        Window = 2,
    }

    /// The instruction set a kernel is written for.
    #[namespace = "hattn"]
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
    #[repr(u8)]
    enum Arch {
        /// Ampere and later.
        Sm80 = 0,
        /// Hopper (sm_90a), and nothing else.
        Sm90 = 1,
    }

    /// How many elements share a descale factor.
    #[namespace = "hattn"]
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
    #[repr(u8)]
    enum Scaling {
        /// All of a tensor.
        PerTensor = 0,
        /// Those of one sequence and key head.
        PerHead = 1,
        /// 128 rows of a head.
        PerBlock = 2,
    }

    /// What a kernel of e4m3 operands sums scores in.
    #[namespace = "hattn"]
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
    #[repr(u8)]
    enum Scores {
        /// Single precision; of other operands too.
        F32 = 0,
        /// Half precision, which holds for Q and K of 14 in magnitude at most: the kernel looks.
        F16 = 1,
    }

    /// What became of a call.
    #[namespace = "hattn"]
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
    #[repr(i32)]
    enum StatusCode {
        /// It was done.
        Ok = 0,
        /// A CUDA runtime call failed; the detail is its `cudaError_t`.
        Cuda = 1,
        /// The driver refused a tensor map; the detail is its `CUresult`.
        TensorMap = 2,
        /// The row index is outside of the table; the detail is the index.
        NoSuchRow = 3,
        /// The driver has no `cuTensorMapEncodeTiled`.
        DriverTooOld = 4,
    }

    /// A status code with the CUDA error behind it; [`status_text`] puts it in words.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    struct Status {
        /// What kind of failure it was.
        code: StatusCode,
        /// The number the failing call returned, else 0.
        detail: i32,
    }

    /// A device tensor `[batch, seqlen, heads, head_dim]` with unit stride in `head_dim`. Strides count elements.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
    struct TensorDesc {
        /// Device address of the first element, a multiple of 16 bytes.
        address: u64,
        /// Elements from one batch entry to the next.
        stride_batch: i64,
        /// Elements from one position to the next.
        stride_seqlen: i64,
        /// Elements from one head to the next.
        stride_head: i64,
    }

    /// f32 factors `[batch, heads, blocks]` on the device. Strides count elements, and are 0 where all share a factor.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
    struct FactorsDesc {
        /// Device address of the first factor, a multiple of 4 bytes.
        address: u64,
        /// Elements from one batch entry to the next.
        stride_batch: i64,
        /// Elements from one head to the next.
        stride_head: i64,
        /// Elements from one block to the next.
        stride_block: i64,
    }

    /// One forward launch; `include/kernels.hpp` says what each field must satisfy.
    #[derive(Debug, Clone, Copy, PartialEq)]
    struct FwdParams {
        /// Queries.
        q: TensorDesc,
        /// Keys.
        k: TensorDesc,
        /// Values.
        v: TensorDesc,
        /// Output.
        o: TensorDesc,
        /// Device address of the f32 log-sum-exp `[batch, heads_q, seqlen_q]` with unit stride in `seqlen_q`; 0: not wanted.
        lse_address: u64,
        /// Elements from one batch entry of the log-sum-exp to the next.
        lse_stride_batch: i64,
        /// Elements from one head of the log-sum-exp to the next.
        lse_stride_head: i64,
        /// Batch entries.
        batch: i32,
        /// Query heads.
        heads_q: i32,
        /// Key and value heads.
        heads_kv: i32,
        /// Queries a batch entry.
        seqlen_q: i32,
        /// Keys a batch entry.
        seqlen_kv: i32,
        /// Head dim of Q and K.
        head_dim_qk: i32,
        /// Head dim of V and O.
        head_dim_vo: i32,
        /// What Q K^T is multiplied with.
        softmax_scale: f32,
        /// Where query 0 stands on the keys' axis.
        diagonal_offset: i32,
        /// Keys kept before the diagonal; 2^30: all.
        window_left: i32,
        /// Keys kept after the diagonal; 2^30: all.
        window_right: i32,
        /// CTAs of the grid, which is persistent but for sm80: there one a tile.
        grid: i32,
        /// Heads whose tiles are walked together.
        heads_per_group: i32,
        /// Such groups; the last one has all heads that are left.
        groups: i32,
        /// Device address of 4 bytes of workspace for the counter that CTAs draw their tiles from; 0: a fixed order.
        tile_counter: u64,
        /// Tiles at the end of the list that are shared out: 0, or at least `grid` and less than twice that, of at least
        /// twice that in all, with a counter, at which there is workspace for `grid` times the row's `share_bytes` more.
        shared_tiles: i32,
        /// Of e4m3 operands alone: the type of O.
        output: DType,
        /// Descale factors of Q.
        descale_q: FactorsDesc,
        /// Descale factors of K.
        descale_k: FactorsDesc,
        /// Descale factors of V.
        descale_v: FactorsDesc,
        /// Query heads that share a head of `descale_q`.
        descale_q_group: i32,
        /// Device address of the f32 that an O of e4m3 is multiplied by.
        scale_o: u64,
        /// Device address of the f32 that the largest magnitude of O is written to; 0: not wanted.
        amax: u64,
        /// Device address of where a row with scores in f16 says whether the one behind it is needed; 0: there are no such rows.
        range_check: u64,
        /// CTAs of the row with scores in f16.
        range_grid: i32,
    }

    /// One backward launch; `include/kernels.hpp` says what each field must satisfy.
    #[derive(Debug, Clone, Copy, PartialEq, Default)]
    struct BwdParams {
        /// Queries.
        q: TensorDesc,
        /// Keys.
        k: TensorDesc,
        /// Values.
        v: TensorDesc,
        /// The forward's output.
        o: TensorDesc,
        /// The gradient of the output.
        d_o: TensorDesc,
        /// The gradient of the queries.
        d_q: TensorDesc,
        /// The gradient of the keys.
        d_k: TensorDesc,
        /// The gradient of the values.
        d_v: TensorDesc,
        /// Device address of the forward's f32 log-sum-exp `[batch, heads_q, seqlen_q]` with unit stride in `seqlen_q`.
        lse_address: u64,
        /// Elements from one batch entry of the log-sum-exp to the next.
        lse_stride_batch: i64,
        /// Elements from one head of the log-sum-exp to the next.
        lse_stride_head: i64,
        /// Device address of the gradient of the log-sum-exp, in the same form; 0: there is none.
        d_lse_address: u64,
        /// Elements from one batch entry of it to the next.
        d_lse_stride_batch: i64,
        /// Elements from one head of it to the next.
        d_lse_stride_head: i64,
        /// Batch entries.
        batch: i32,
        /// Query heads.
        heads_q: i32,
        /// Key and value heads.
        heads_kv: i32,
        /// Queries a batch entry.
        seqlen_q: i32,
        /// Keys a batch entry.
        seqlen_kv: i32,
        /// Head dim of Q and K.
        head_dim_qk: i32,
        /// Head dim of V and O.
        head_dim_vo: i32,
        /// What Q K^T is multiplied with.
        softmax_scale: f32,
        /// Where query 0 stands on the keys' axis.
        diagonal_offset: i32,
        /// Keys kept before the diagonal; 2^30: all.
        window_left: i32,
        /// Keys kept after the diagonal; 2^30: all.
        window_right: i32,
        /// CTAs of the persistent grid.
        grid: i32,
        /// Key heads whose tiles are walked together.
        heads_per_group: i32,
        /// Such groups; the last one has all heads that are left.
        groups: i32,
        /// Device address of workspace for what is kept of each query.
        statistics: u64,
        /// Device address of workspace for the sums of `d_q`.
        sums: u64,
        /// Device address of workspace for how far each block's sums are.
        progress: u64,
        /// Whether tiles add to the sums in one order, which needs a tile counter.
        ordered: bool,
        /// Device address of 4 bytes of workspace for the counter that CTAs draw their tiles from; 0: a fixed order.
        tile_counter: u64,
    }

    /// A tensor `[batch, seqlen, heads, head_dim]` that is taken to e4m3.
    #[derive(Debug, Clone, Copy, PartialEq, Default)]
    struct QuantizeTensor {
        /// Of 16-bit elements.
        values: TensorDesc,
        /// Of e4m3.
        stored: TensorDesc,
        /// Its factors.
        descale: FactorsDesc,
        /// Whether factors are read; else they are written.
        given: bool,
        /// Whether it is rotated before.
        rotated: bool,
        /// Whether there is this tensor at all.
        wanted: bool,
        /// The largest magnitude that is stored: 448, or that divided by a power of two.
        most: f32,
        /// Batch entries.
        batch: i32,
        /// Rows a batch entry.
        seqlen: i32,
        /// Heads.
        heads: i32,
        /// Head dim.
        head_dim: i32,
        /// Heads that share a head of the factors.
        group: i32,
        /// Device address of what its tiles share, in the workspace.
        state: u64,
    }

    /// One launch that quantises any of Q, K and V; `include/kernels.hpp` says what each field must satisfy.
    #[derive(Debug, Clone, Copy, PartialEq)]
    struct QuantizeParams {
        /// Queries.
        q: QuantizeTensor,
        /// Keys.
        k: QuantizeTensor,
        /// Values.
        v: QuantizeTensor,
        /// How many elements share a factor.
        scaling: Scaling,
        /// Of the signs, for what is rotated.
        seed: u64,
        /// Device address of the f32 counts `[3, 2]`; 0: not wanted.
        counts: u64,
        /// Elements from one tensor's counts to the next.
        counts_stride: i64,
        /// Device address of the workspace.
        workspace: u64,
        /// Its size.
        workspace_bytes: u64,
        /// Multiprocessors of the GPU.
        multiprocessors: i32,
    }

    /// A row of the quantiser's table: its kernels for one source type.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    struct QuantizeRowInfo {
        /// Instruction set.
        arch: Arch,
        /// Element type that they read.
        source: DType,
    }

    /// A row of a table: one compiled kernel.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    struct RowInfo {
        /// Instruction set.
        arch: Arch,
        /// Element type of Q, K, V and O.
        dtype: DType,
        /// Mask class.
        mask: MaskClass,
        /// Largest head dim of Q and K.
        head_dim_qk: i32,
        /// Largest head dim of V and O.
        head_dim_vo: i32,
        /// Queries a tile (backward: a block).
        tile_m: i32,
        /// Keys a block (backward: a tile).
        tile_n: i32,
        /// Blocks in flight, of either operand.
        stages: i32,
        /// Threads a CTA.
        threads: i32,
        /// Dynamic shared memory a CTA, in bytes.
        smem_bytes: i32,
        /// What scores are summed in.
        scores: Scores,
        /// Workspace that a CTA needs where the last tiles are shared out, in bytes; 0: they are not.
        share_bytes: i32,
    }

    unsafe extern "C++" {
        include!("hopper-attention-sys/include/bridge.h");

        // Declared on both sides: cxx makes the C++ compiler check that the values agree.
        #[namespace = "hattn"]
        type DType;
        #[namespace = "hattn"]
        type MaskClass;
        #[namespace = "hattn"]
        type Arch;
        #[namespace = "hattn"]
        type Scaling;
        #[namespace = "hattn"]
        type Scores;
        #[namespace = "hattn"]
        type StatusCode;

        /// CUDA's stream; a `CUstream` or `cudaStream_t` points to one.
        #[namespace = ""]
        type CUstream_st;

        /// The compiled forward kernels. A row's index here is its index everywhere.
        fn fwd_rows() -> Vec<RowInfo>;

        /// Loads a row's module on the current device, so that a later launch does not (a lazy load breaks a graph capture).
        fn fwd_prepare(row: u32) -> Status;

        /// Enqueues one forward kernel on a stream of the current context and returns.
        ///
        /// # Safety
        ///
        /// `params` must satisfy what `include/kernels.hpp` says of `FwdParams` for this row, its addresses must be valid
        /// device memory of the current context until the kernel has run, and `stream` must be a live stream of that
        /// context or null.
        unsafe fn fwd_launch(row: u32, params: &FwdParams, stream: *mut CUstream_st) -> Status;

        /// The compiled backward kernels, likewise.
        fn bwd_rows() -> Vec<RowInfo>;

        /// As [`fwd_prepare`], of a backward row and the kernels before and after it.
        fn bwd_prepare(row: u32) -> Status;

        /// Enqueues one backward pass on a stream of the current context and returns.
        ///
        /// # Safety
        ///
        /// As [`fwd_launch`], of `BwdParams`.
        unsafe fn bwd_launch(row: u32, params: &BwdParams, stream: *mut CUstream_st) -> Status;

        /// The quantising kernels, by source type.
        fn quantize_rows() -> Vec<QuantizeRowInfo>;

        /// As [`fwd_prepare`], of all kernels of a quantising row.
        fn quantize_prepare(row: u32) -> Status;

        /// Enqueues the quantisation of up to three tensors on a stream of the current context and returns.
        ///
        /// # Safety
        ///
        /// As [`fwd_launch`], of `QuantizeParams`.
        unsafe fn quantize_launch(row: u32, params: &QuantizeParams, stream: *mut CUstream_st) -> Status;

        /// A status in words.
        fn status_text(status: Status) -> String;
    }
}

pub use ffi::{
    Arch, BwdParams, CUstream_st, DType, FactorsDesc, FwdParams, MaskClass, QuantizeParams, QuantizeRowInfo,
    QuantizeTensor, RowInfo, Scaling, Scores, Status, StatusCode, TensorDesc, bwd_launch, bwd_prepare, bwd_rows,
    fwd_launch, fwd_prepare, fwd_rows, quantize_launch, quantize_prepare, quantize_rows, status_text,
};
