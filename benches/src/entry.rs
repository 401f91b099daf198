//! The C entry of `peers/hattn_peer.h`: ours, over the raw layer, and that of a peer's shared object.
//!
//! Our plans are made once a problem and device and kept for the life of the process.

mod backward;
mod call;
mod fp8;
mod library;
mod problem;

use std::cell::RefCell;
use std::ffi::{CStr, CString, OsStr, c_char, c_int, c_void};
use std::sync::LazyLock;

use hopper_attention::{Arch, Bias, DType, Dropout, Slot};

pub use backward::{Backward, BackwardArgs, BackwardWorkspace, hattn_peer_bwd, hattn_peer_bwd_workspace};
pub use fp8::{Fp8Args, hattn_peer_fwd_fp8};
pub use library::{Entry, Forward, Text};

use crate::{ARCH_VARIABLE, FullBlocks, Point, Precision, SM_MARGIN_VARIABLE};
use call::{Call, Given, Problem};

/// `hattn_peer_fwd_args`: the header says what the fields mean.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
#[allow(missing_docs)]
pub struct Args {
    pub struct_bytes: u64,
    pub q: *const c_void,
    pub k: *const c_void,
    pub v: *const c_void,
    pub o: *mut c_void,
    pub lse: *mut f32,
    pub q_stride: [i64; 3],
    pub k_stride: [i64; 3],
    pub v_stride: [i64; 3],
    pub o_stride: [i64; 3],
    pub numbers: Numbers,
    pub stream: *mut c_void,
    pub workspace: *mut c_void,
    pub workspace_bytes: u64,
    pub packing: Packing,
    /// Null where there is no ALiBi, and where a caller was compiled before there was.
    pub alibi_slopes: *const f32,
    /// Lists of full blocks, and as many counts of partial blocks, which are 0: `[Qb]`, `[Qb, Kb]` and `[Qb]`. Null where there are
    /// none, and where a caller was compiled before there were.
    pub full_block_cnt: *const i32,
    pub full_block_idx: *const i32,
    pub mask_block_cnt: *const i32,
    pub dropping: Dropping,
    pub biasing: Biasing,
}

/// An additive bias, after dropout. All 0 where there is none, and where a caller was compiled before there was.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
#[allow(missing_docs)]
pub struct Biasing {
    /// Contiguous: `[1 or batch, 1 or heads_q, 1 or seqlen_q, seqlen_kv]`. Of packed sequences
    /// `[1 or batch, 1 or heads_q, 1 or longest, longest]`.
    pub bias: *const c_void,
    pub bias_dtype: i32,
    /// Which dimensions it has beside the keys: a sum of 1 (batch), 2 (heads) and 4 (queries).
    pub bias_dims: i32,
}

impl Biasing {
    /// No bias.
    pub const NONE: Self = Self { bias: std::ptr::null(), bias_dtype: 0, bias_dims: 0 };

    /// A bias of this form, contiguous at this address.
    pub fn of(bias: *const c_void, form: Bias) -> Self {
        let bias_dtype = match form.dtype() {
            DType::F16 => 0,
            DType::BF16 => 1,
            _ => F32,
        };
        let own = [(form.is_per_batch(), 1), (form.is_per_head(), 2), (form.is_per_query(), 4)];
        Self { bias, bias_dtype, bias_dims: own.into_iter().filter_map(|(own, bit)| own.then_some(bit)).sum() }
    }

    /// As problems take it.
    fn option(&self, packing: Packing) -> Result<Option<Bias>, Refused> {
        if self.bias.is_null() {
            return Ok(None);
        }
        let dtype = match self.bias_dtype {
            0 => DType::F16,
            1 => DType::BF16,
            F32 => DType::F32,
            other => return Err(problem::refused("bias_dtype", other, "0 (f16), 1 (bf16), 3 (f32)")),
        };
        if !(0..8).contains(&self.bias_dims) {
            let allowed = "any sum of 1 (batch), 2 (heads) and 4 (queries)";
            return Err(problem::refused("bias_dims", self.bias_dims, allowed));
        }
        let has = |bit| self.bias_dims & bit != 0;
        let form = Bias::new(dtype).per_batch(has(1)).per_head(has(2)).per_query(has(4));
        if packing.cu_seqlens.is_null() {
            return Ok(Some(form));
        }
        let longest = problem::size("longest", packing.longest)?;
        Ok(Some(form.covering(longest, longest)))
    }
}

/// Dropout, after the lists of blocks. All 0 where there is none, and where a caller was compiled before there was.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
#[allow(missing_docs)]
pub struct Dropping {
    /// The words of the seed and of the offset, low ones first.
    pub dropout_state: *const i32,
    /// The probability with which a weight becomes 0.
    pub dropout: f32,
    pub reserved: i32,
}

impl Dropping {
    /// No dropout.
    pub const NONE: Self = Self { dropout_state: std::ptr::null(), dropout: 0.0, reserved: 0 };

    /// As problems take it.
    fn option(&self) -> Result<Option<Dropout>, Refused> {
        if self.dropout_state.is_null() { Ok(None) } else { Ok(Some(Dropout::new(self.dropout)?)) }
    }
}

/// What all structs of arguments end with: where packed sequences begin. All 0 where nothing is packed, and where a
/// caller was compiled before there were packed sequences.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
#[allow(missing_docs)]
pub struct Packing {
    pub cu_seqlens: *const i32,
    pub longest: i32,
    pub reserved: i32,
}

impl Packing {
    /// No packed sequences.
    pub const NONE: Self = Self { cu_seqlens: std::ptr::null(), longest: 0, reserved: 0 };
}

/// The fields that all structs of arguments have in common, in a row.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
#[allow(missing_docs)]
pub struct Numbers {
    pub batch: i32,
    pub seqlen_q: i32,
    pub seqlen_kv: i32,
    pub heads_q: i32,
    pub heads_kv: i32,
    pub head_dim_qk: i32,
    pub head_dim_vo: i32,
    pub dtype: i32,
    pub mask: i32,
    pub corner: i32,
    pub window_left: i32,
    pub window_right: i32,
    pub softmax_scale: f32,
    pub softcap: f32,
}

impl Numbers {
    /// Those of a point.
    ///
    /// # Errors
    /// When a size is past the entry's 32 bits.
    pub fn of(point: &Point) -> anyhow::Result<Self> {
        let size = |size: usize| i32::try_from(size).map_err(|_| anyhow::anyhow!("{size} is past the entry's 32 bits"));
        Ok(Self {
            batch: size(point.sequences())?,
            seqlen_q: size(point.seqlen_q())?,
            seqlen_kv: size(point.seqlen)?,
            heads_q: size(point.heads_q)?,
            heads_kv: size(point.heads_kv)?,
            head_dim_qk: size(point.head_dim)?,
            head_dim_vo: size(point.head_dims().vo)?,
            dtype: match point.dtype {
                Precision::F16 => 0,
                Precision::Bf16 => 1,
                Precision::E4m3 => E4M3,
            },
            mask: if point.window.is_some() { 2 } else { point.causal.into() },
            corner: 0,
            window_left: point.window.map_or(Ok(-1), size)?,
            window_right: if point.window.is_some() { 0 } else { -1 },
            softmax_scale: point.scale() as f32,
            softcap: point.cap(),
        })
    }
}

// The offsets that the header's compiler finds (peers/test_sweep.py compares that compiler with Python).
const _: () = assert!(size_of::<Args>() == 304 && std::mem::offset_of!(Args, packing) == OLDER_BYTES);
const _: () = assert!(std::mem::offset_of!(Args, numbers) == 144 && std::mem::offset_of!(Args, stream) == 200);

/// The size that the struct came with.
const OLDER_BYTES: usize = 224;

/// `HATTN_PEER_E4M3`.
const E4M3: i32 = 2;
/// `HATTN_PEER_F32`, of a bias alone.
const F32: i32 = 3;

const OK: c_int = 0;
const INVALID: c_int = 1;
const UNSUPPORTED: c_int = 2;
const FAILED: c_int = 3;

/// What a status of the entry means.
pub fn status_text(status: c_int) -> String {
    match status {
        OK => "ok".into(),
        INVALID => "invalid argument".into(),
        UNSUPPORTED => "unsupported problem".into(),
        FAILED => "a CUDA call failed".into(),
        other => format!("status {other}"),
    }
}

/// What [`ARCH_VARIABLE`] asks for; `None` without it. Looked at once: calls are timed.
fn arch() -> Result<Option<Arch>, Refused> {
    static ASKED: LazyLock<Result<Option<Arch>, Refused>> =
        LazyLock::new(|| named_arch(std::env::var_os(ARCH_VARIABLE).as_deref()));
    ASKED.clone()
}

fn named_arch(name: Option<&OsStr>) -> Result<Option<Arch>, Refused> {
    match name {
        None => Ok(None),
        Some(name) => [Arch::Sm80, Arch::Sm90]
            .into_iter()
            .find(|arch| *name == *arch.to_string())
            .map(Some)
            .ok_or_else(|| Refused(INVALID, format!("{ARCH_VARIABLE} is {name:?}; allowed: sm80, sm90"))),
    }
}

/// What [`SM_MARGIN_VARIABLE`] asks for; 0 without it. Looked at once, too.
fn sm_margin() -> Result<usize, Refused> {
    static ASKED: LazyLock<Result<usize, Refused>> =
        LazyLock::new(|| margin(std::env::var_os(SM_MARGIN_VARIABLE).as_deref()));
    ASKED.clone()
}

fn margin(number: Option<&OsStr>) -> Result<usize, Refused> {
    let Some(number) = number else { return Ok(0) };
    number.to_str().and_then(|text| text.parse().ok()).ok_or_else(|| {
        Refused(INVALID, format!("{SM_MARGIN_VARIABLE} is {number:?}; allowed: a number of multiprocessors"))
    })
}

thread_local! {
    static LAST_ERROR: RefCell<CString> = RefCell::default();
}

/// The name that tables use.
#[unsafe(no_mangle)]
pub extern "C" fn hattn_peer_name() -> *const c_char {
    const NAME: &CStr = c"hopper-attention";
    NAME.as_ptr()
}

/// Why the last call of this thread did not return 0, as text; valid until the next call.
#[unsafe(no_mangle)]
pub extern "C" fn hattn_peer_last_error() -> *const c_char {
    LAST_ERROR.with_borrow(|text| text.as_ptr())
}

/// 1: the functions of this library take packed sequences.
#[unsafe(no_mangle)]
pub extern "C" fn hattn_peer_packs() -> c_int {
    1
}

/// 1: the functions of this library take a cap of the scores.
#[unsafe(no_mangle)]
pub extern "C" fn hattn_peer_caps() -> c_int {
    1
}

/// 1: the functions of this library take ALiBi's slopes.
#[unsafe(no_mangle)]
pub extern "C" fn hattn_peer_biases() -> c_int {
    1
}

/// 1: the functions of this library take lists of blocks.
#[unsafe(no_mangle)]
pub extern "C" fn hattn_peer_lists() -> c_int {
    1
}

/// 1: the functions of this library take dropout, and keep the pairs that docs/numerics.md defines.
#[unsafe(no_mangle)]
pub extern "C" fn hattn_peer_drops() -> c_int {
    1
}

/// 1: the functions of this library take an additive bias, and the backward gives its gradient.
#[unsafe(no_mangle)]
pub extern "C" fn hattn_peer_adds() -> c_int {
    1
}

/// One forward, enqueued on `args.stream` on the current CUDA context; returns a `HATTN_PEER_` status.
///
/// # Safety
/// `args` is null or points to a struct whose first `struct_bytes` bytes are readable; its pointers, strides and sizes
/// describe device memory of the current context, as `hattn_peer.h` asks.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hattn_peer_fwd(args: *const Args) -> c_int {
    answer(|| {
        // SAFETY: the caller's promise; the struct begins with its size and its fields take any bits.
        let args = unsafe { read(args, OLDER_BYTES) }?;
        // SAFETY: the caller vouches for the memory that the fields describe.
        unsafe { args.call()?.run() }
    })
}

impl Args {
    fn call(&self) -> Result<Call<13>, Refused> {
        let options = self.numbers.forward(self.numbers.sixteen_bits()?, self.packing)?.lse(!self.lse.is_null());
        let options = options.operand(Slot::AlibiSlopes, !self.alibi_slopes.is_null());
        let options = options.block_mask((!self.full_block_cnt.is_null()).then(FullBlocks::form));
        let options = options.dropout(self.dropping.option()?).bias(self.biasing.option(self.packing)?);
        let [counts, indices, bits, full_counts, full] =
            Given::lists([self.full_block_cnt, self.full_block_idx, self.mask_block_cnt]);
        Ok(Call {
            problem: Problem::Forward(options.build()?),
            packing: self.packing,
            tensors: [
                Given::strided(Slot::Q, self.q, self.q_stride),
                Given::strided(Slot::K, self.k, self.k_stride),
                Given::strided(Slot::V, self.v, self.v_stride),
                Given::strided(Slot::O, self.o, self.o_stride),
                Given::contiguous(Slot::Lse, self.lse),
                Given::contiguous(Slot::AlibiSlopes, self.alibi_slopes),
                counts,
                indices,
                bits,
                full_counts,
                full,
                Given::contiguous(Slot::DropoutState, self.dropping.dropout_state),
                Given::contiguous(Slot::Bias, self.biasing.bias),
            ],
            workspace: self.workspace,
            workspace_bytes: self.workspace_bytes,
            stream: self.stream,
        })
    }
}

/// A status that is not ok, and its words.
#[derive(Clone, Debug, PartialEq)]
struct Refused(c_int, String);

/// The status of a call, whose words are kept for [`hattn_peer_last_error`].
fn answer(call: impl FnOnce() -> Result<(), Refused>) -> c_int {
    let Err(Refused(status, text)) = call() else { return OK };
    LAST_ERROR.with_borrow_mut(|last| *last = CString::new(text.replace('\0', " ")).unwrap_or_default());
    status
}

/// A caller's struct of arguments. What a caller does not know, whose struct is an older one of `older` bytes or more,
/// is 0.
///
/// # Safety
/// It is null, or begins with a `u64` that says how many of its bytes may be read; all its fields take any bits.
unsafe fn read<A: Copy>(args: *const A, older: usize) -> Result<A, Refused> {
    if args.is_null() {
        return Err(Refused(INVALID, "args is null".to_owned()));
    }
    // SAFETY: not null, and the caller lets at least the first field be read.
    let bytes = unsafe { args.cast::<u64>().read() };
    if bytes < older as u64 {
        return Err(Refused(INVALID, format!("struct_bytes {bytes}; allowed: {older} and above")));
    }
    let known = usize::try_from(bytes).map_or(size_of::<A>(), |bytes| bytes.min(size_of::<A>()));
    let mut read = std::mem::MaybeUninit::<A>::zeroed();
    // SAFETY: the caller lets so many bytes be read, and there is room for them. Fields take any bits, 0 among them.
    unsafe {
        args.cast::<u8>().copy_to_nonoverlapping(read.as_mut_ptr().cast(), known);
        Ok(read.assume_init())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args() -> Args {
        // SAFETY: every field is an integer, a float or a raw pointer, and all of them may be 0.
        let zero: Args = unsafe { std::mem::zeroed() };
        Args { struct_bytes: size_of::<Args>() as u64, ..zero }
    }

    fn refused(args: *const Args) -> String {
        let entry = Entry::own();
        // SAFETY: null or a live struct, which is refused before any of its addresses is used.
        let status = unsafe { (entry.forward)(args) };
        assert_eq!(status, INVALID);
        entry.complaint(status)
    }

    #[test]
    fn what_is_wrong_is_told_without_a_gpu() {
        assert_eq!(refused(std::ptr::null()), "invalid argument: args is null");
        assert!(refused(&Args { struct_bytes: 8, ..args() }).ends_with("struct_bytes 8; allowed: 224 and above"));
        assert!(refused(&Args { numbers: Numbers { dtype: 3, ..args().numbers }, ..args() }).contains("dtype: 3"));
    }

    #[test]
    fn an_instruction_set_is_one_of_ours() {
        let named = |name: Option<&str>| named_arch(name.map(OsStr::new));
        assert_eq!(named(None), Ok(None));
        assert_eq!((named(Some("sm80")), named(Some("sm90"))), (Ok(Some(Arch::Sm80)), Ok(Some(Arch::Sm90))));
        for wrong in ["", "sm70", "SM80"] {
            let Refused(status, text) = named(Some(wrong)).unwrap_err();
            assert_eq!(status, INVALID);
            assert!(text.ends_with("allowed: sm80, sm90"), "{text}");
        }
    }

    #[test]
    fn a_margin_is_a_number() {
        let margin = |number: Option<&str>| margin(number.map(OsStr::new));
        assert_eq!((margin(None), margin(Some("0")), margin(Some("16"))), (Ok(0), Ok(0), Ok(16)));
        for wrong in ["", "-1", "many"] {
            let Refused(status, text) = margin(Some(wrong)).unwrap_err();
            assert!(status == INVALID && text.ends_with("allowed: a number of multiprocessors"), "{text}");
        }
    }

    #[test]
    fn the_problem_is_what_the_arguments_say() {
        let numbers = Numbers {
            batch: 2,
            seqlen_q: 5,
            seqlen_kv: 7,
            heads_q: 4,
            heads_kv: 2,
            head_dim_qk: 64,
            head_dim_vo: 32,
            dtype: 1,
            mask: 1,
            softmax_scale: 0.5,
            ..args().numbers
        };
        let text = |lse, numbers| match (Args { lse, numbers, ..args() }).call().map(|call| call.problem) {
            Ok(Problem::Forward(problem) | Problem::Wished(problem, _)) => problem.to_string(),
            Ok(Problem::Backward(problem)) => panic!("{problem}"),
            Err(Refused(status, text)) => format!("{status} {text}"),
        };
        let causal = "forward bf16 batch 2 seqlen 5x7 heads 4/2 head_dim 64/32 causal scale 0.5";
        assert_eq!(text(std::ptr::null_mut(), numbers), causal);
        assert_eq!(text(std::ptr::dangling_mut(), numbers), format!("{causal} lse"));
        let three = text(std::ptr::null_mut(), Numbers { heads_q: 3, ..numbers });
        assert!(three.starts_with("1 heads_q: 3 with heads_kv 2"), "{three}");
    }

    #[test]
    fn an_older_callers_struct_packs_nothing() {
        let packing = Packing { longest: 9, ..Packing::NONE };
        // SAFETY: a live struct that is at least as large as it says.
        let read = |struct_bytes| unsafe { read(&Args { struct_bytes, packing, ..args() }, OLDER_BYTES) };
        let read = |struct_bytes| read(struct_bytes).map(|args| (args.struct_bytes, args.packing.longest));
        assert_eq!([224, 240, 304].map(read), [Ok((224, 0)), Ok((240, 9)), Ok((304, 9))]);
        assert!(read(223).is_err_and(|Refused(_, text)| text == "struct_bytes 223; allowed: 224 and above"));
    }

    /// As many queries as keys, one key head, of head dim 16 in bf16.
    fn short(batch: i32, tokens: i32, heads_q: i32) -> Numbers {
        Numbers {
            batch,
            seqlen_q: tokens,
            seqlen_kv: tokens,
            heads_q,
            heads_kv: 1,
            head_dim_qk: 16,
            head_dim_vo: 16,
            dtype: 1,
            softmax_scale: 0.25,
            ..args().numbers
        }
    }

    /// Two queries on two keys, of which the bias of -inf hides the second from the first query.
    #[test]
    fn a_bias_reaches_the_raw_layer() {
        let (q, v) = ([0_u16; 2 * 16], [[0x3f80_u16; 16], [0x4040; 16]]); // 1 and 3
        let (mut o, mut lse) = ([0x7fc0_u16; 2 * 16], [f32::NAN; 2]);
        let bias = [0.0, f32::NEG_INFINITY, 1.0, 1.0];
        let form = Bias::new(DType::F32).per_query(true);
        let numbers = short(1, 2, 1);
        let stride = [32, 16, 16];
        let args = Args {
            q: q.as_ptr().cast(),
            k: q.as_ptr().cast(),
            v: v.as_ptr().cast(),
            o: o.as_mut_ptr().cast(),
            lse: lse.as_mut_ptr(),
            q_stride: stride,
            k_stride: stride,
            v_stride: stride,
            o_stride: stride,
            numbers,
            biasing: Biasing::of(bias.as_ptr().cast(), form),
            ..args()
        };
        // SAFETY: live memory, as large as the shapes.
        assert_eq!(args.call().and_then(|call| unsafe { call.run_on_cpu() }), Ok(()));
        // The second query sees both: the mean is 2.
        assert!(o[..16].iter().all(|&bits| bits == 0x3f80) && o[16..].iter().all(|&bits| bits == 0x4000), "{o:x?}");
        assert!(lse[0].abs() < 1e-3 && (lse[1] - 1.0 - 2.0_f32.ln()).abs() < 1e-3, "{lse:?}");
        for (biasing, part) in [
            (Biasing { bias_dtype: 2, ..args.biasing }, "bias_dtype: 2; allowed: 0 (f16)"),
            (Biasing { bias_dims: 8, ..args.biasing }, "bias_dims: 8; allowed: any sum of 1 (batch)"),
        ] {
            let refused = Args { biasing, ..args }.call().err();
            assert!(refused.is_some_and(|Refused(status, text)| status == INVALID && text.starts_with(part)));
        }
        for (form, dims) in [(Bias::new(DType::F16), 0), (Bias::new(DType::BF16).per_batch(true).per_head(true), 3)] {
            let biasing = Biasing::of(bias.as_ptr().cast(), form);
            assert_eq!((biasing.bias_dims, biasing.option(args.packing)), (dims, Ok(Some(form))));
            // Of packed sequences it covers the longest. Nothing reads the address here.
            let packing = Packing { cu_seqlens: std::ptr::dangling(), longest: 9, ..args.packing };
            assert_eq!(biasing.option(packing), Ok(Some(form.covering(9, 9))));
            assert!(biasing.option(Packing { longest: -1, ..packing }).is_err());
        }
        assert_eq!(Biasing::NONE.option(args.packing), Ok(None));
    }

    /// Two sequences of one and two tokens, with zeros for queries and keys.
    #[test]
    fn packed_sequences_reach_the_raw_layer() {
        let (q, v) = ([0_u16; 3 * 2 * 16], [[0x3f80_u16; 16], [0x4000; 16], [0x4080; 16]]); // 1, 2 and 4
        let (mut o, mut lse) = ([0x7fc0_u16; 3 * 2 * 16], [f32::NAN; 2 * 3]);
        let numbers = short(2, 3, 2);
        let offsets = [0, 1, 3];
        let packing = Packing { cu_seqlens: offsets.as_ptr(), longest: 2, reserved: 0 };
        let args = Args {
            q: q.as_ptr().cast(),
            k: q.as_ptr().cast(),
            v: v.as_ptr().cast(),
            o: o.as_mut_ptr().cast(),
            lse: lse.as_mut_ptr(),
            q_stride: [96, 32, 16],
            k_stride: [48, 16, 16],
            v_stride: [48, 16, 16],
            o_stride: [96, 32, 16],
            numbers,
            packing,
            ..args()
        };
        let Problem::Forward(problem) = args.call().expect("it is a problem").problem else { panic!("a forward") };
        let packed =
            "forward bf16 batch 2 seqlen 3x3 packed q kv max_seqlen_q 2 max_seqlen_kv 2 heads 2/1 head_dim 16/16";
        assert_eq!(problem.to_string(), format!("{packed} full scale 0.25 lse"));
        // SAFETY: live memory, as large as the shapes.
        assert_eq!(args.call().and_then(|call| unsafe { call.run_on_cpu() }), Ok(()));
        let (first, second) = o.split_at(32);
        assert!(first.iter().all(|&bits| bits == 0x3f80) && second.iter().all(|&bits| bits == 0x4040), "{o:x?}");
        let two = 2.0_f32.ln();
        assert!([0.0, two, two].iter().zip(&lse).all(|(right, lse)| (right - lse).abs() < 1e-3), "{lse:?}");
        let wrong = Args { packing: Packing { longest: -1, ..packing }, ..args };
        assert!(wrong.call().is_err_and(|Refused(_, text)| text == "longest: -1; allowed: 0 and above"));
    }
}
