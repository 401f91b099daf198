//! The C entry of `peers/hattn_peer.h`: ours, over the C ABI that callers link (that of the backward and of e4m3 operands over
//! the raw layer), and that of a peer's shared object.
//!
//! Our plans are made once a problem and device and kept for the life of the process.

mod backward;
mod fp8;
mod library;
mod problem;

use std::cell::RefCell;
use std::collections::HashMap;
use std::ffi::{CStr, CString, OsStr, c_char, c_int, c_void};
use std::hash::Hash;
use std::sync::{LazyLock, Mutex, PoisonError};

use hopper_attention::cudarc::driver::sys;
use hopper_attention::raw::Place;
use hopper_attention::{Arch, Device};
use hopper_attention_capi as capi;

pub use backward::{Backward, BackwardArgs, BackwardWorkspace, hattn_peer_bwd, hattn_peer_bwd_workspace};
pub use fp8::{Fp8Args, hattn_peer_fwd_fp8};
pub use library::{Entry, Forward, Text};

use crate::{ARCH_VARIABLE, Point, Precision};

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
    pub reserved: i32,
}

impl Numbers {
    /// Those of a point.
    ///
    /// # Errors
    /// When a size is past the entry's 32 bits.
    pub fn of(point: &Point) -> anyhow::Result<Self> {
        let size = |size: usize| i32::try_from(size).map_err(|_| anyhow::anyhow!("{size} is past the entry's 32 bits"));
        Ok(Self {
            batch: size(point.batch)?,
            seqlen_q: size(point.seqlen)?,
            seqlen_kv: size(point.seqlen)?,
            heads_q: size(point.heads_q)?,
            heads_kv: size(point.heads_kv)?,
            head_dim_qk: size(point.head_dim)?,
            head_dim_vo: size(point.head_dim)?,
            dtype: match point.dtype {
                Precision::F16 => 0,
                Precision::Bf16 => 1,
                Precision::E4m3 => E4M3,
            },
            // The C ABI's masks, corners and "without bound".
            mask: if point.window.is_some() { 2 } else { point.causal.into() },
            corner: 0,
            window_left: point.window.map_or(Ok(-1), size)?,
            window_right: if point.window.is_some() { 0 } else { -1 },
            softmax_scale: 1.0 / (point.head_dim as f32).sqrt(),
            reserved: 0,
        })
    }
}

// The offsets that the header's compiler finds (peers/test_sweep.py compares that compiler with Python).
const _: () = assert!(size_of::<Args>() == 224);
const _: () = assert!(std::mem::offset_of!(Args, numbers) == 144 && std::mem::offset_of!(Args, stream) == 200);

/// `HATTN_PEER_E4M3`.
const E4M3: i32 = 2;

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
            .ok_or_else(|| (INVALID, format!("{ARCH_VARIABLE} is {name:?}; allowed: sm80, sm90"))),
    }
}

/// A plan's key: the device's ordinal, and everything of the arguments that a problem is made of.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Key {
    ordinal: c_int,
    sizes: [i32; 7],
    dtype: i32,
    mask: [i32; 4],
    scale_bits: u32,
    lse: bool,
    arch: Option<Arch>,
}

impl Key {
    /// Its device, as the raw layer names it.
    fn place(&self) -> Place {
        Place::Cuda(usize::try_from(self.ordinal).unwrap_or_default())
    }

    /// Its device, opened.
    fn device(&self) -> Result<Device, Refused> {
        Device::cuda(usize::try_from(self.ordinal).unwrap_or_default()).map_err(problem::told)
    }
}

/// A plan of the C ABI, which any threads may run at once.
#[derive(Clone, Copy)]
struct Plan(*mut capi::hattn_forward_plan);

// SAFETY: the C ABI says that a plan may be used by any threads at once.
unsafe impl Send for Plan {}

/// Plans by what they were made of, for the life of the process.
struct Plans<K, P>(LazyLock<Mutex<HashMap<K, P>>>);

impl<K: Copy + Eq + Hash, P: Clone> Plans<K, P> {
    const fn new() -> Self {
        Self(LazyLock::new(Default::default))
    }

    /// The plan of a key, made where there is none yet.
    fn get(&self, key: &K, make: impl FnOnce() -> Result<P, Refused>) -> Result<P, Refused> {
        let known = self.0.lock().unwrap_or_else(PoisonError::into_inner).get(key).cloned();
        if let Some(plan) = known {
            return Ok(plan);
        }
        let plan = make()?;
        self.0.lock().unwrap_or_else(PoisonError::into_inner).insert(*key, plan.clone());
        Ok(plan)
    }
}

static PLANS: Plans<Key, Plan> = Plans::new();

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

/// One forward, enqueued on `args.stream` on the current CUDA context; returns a `HATTN_PEER_` status.
///
/// # Safety
/// `args` is null or points to a struct whose first `struct_bytes` bytes are readable; its pointers, strides and sizes
/// describe device memory of the current context, as `hattn_peer.h` asks.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hattn_peer_fwd(args: *const Args) -> c_int {
    answer(|| {
        // SAFETY: the caller's promise; the struct begins with its size and its fields take any bits.
        let args = unsafe { read(args) }?;
        // SAFETY: the caller vouches for the memory that the fields describe.
        unsafe { forward(&args) }
    })
}

/// A status that is not ok, and its words.
type Refused = (c_int, String);

/// The status of a call, whose words are kept for [`hattn_peer_last_error`].
fn answer(call: impl FnOnce() -> Result<(), Refused>) -> c_int {
    let Err((status, text)) = call() else { return OK };
    LAST_ERROR.with_borrow_mut(|last| *last = CString::new(text.replace('\0', " ")).unwrap_or_default());
    status
}

/// A caller's struct of arguments.
///
/// # Safety
/// It is null, or begins with a `u64` that says how many of its bytes may be read; all its fields take any bits.
unsafe fn read<A: Copy>(args: *const A) -> Result<A, Refused> {
    if args.is_null() {
        return Err((INVALID, "args is null".to_owned()));
    }
    // SAFETY: not null, and the caller lets at least the first field be read.
    let bytes = unsafe { args.cast::<u64>().read() };
    if bytes < size_of::<A>() as u64 {
        return Err((INVALID, format!("struct_bytes {bytes}; allowed: {} and above", size_of::<A>())));
    }
    // SAFETY: the caller's struct is at least as large as ours.
    Ok(unsafe { args.read() })
}

/// # Safety
/// As for [`hattn_peer_fwd`].
unsafe fn forward(args: &Args) -> Result<(), Refused> {
    let key = key(&args.numbers, sixteen_bits(&args.numbers)?, !args.lse.is_null())?;
    let plan = PLANS.get(&key, || make(&key, args.numbers.softmax_scale))?;
    let [batch, seqlen_q, seqlen_kv, heads_q, heads_kv, head_dim_qk, head_dim_vo] = key.sizes.map(i64::from);
    let tensor = |data: *const c_void, shape, [batch, seqlen, head]: [i64; 3]| capi::hattn_tensor {
        stride: [batch, seqlen, head, 1],
        ..described(key.ordinal, data, key.dtype, 4, shape)
    };
    let (q, k, v, o) = (
        tensor(args.q, [batch, seqlen_q, heads_q, head_dim_qk], args.q_stride),
        tensor(args.k, [batch, seqlen_kv, heads_kv, head_dim_qk], args.k_stride),
        tensor(args.v, [batch, seqlen_kv, heads_kv, head_dim_vo], args.v_stride),
        tensor(args.o, [batch, seqlen_q, heads_q, head_dim_vo], args.o_stride),
    );
    let lse = capi::hattn_tensor {
        stride: [heads_q * seqlen_q, seqlen_q, 1, 0],
        ..described(key.ordinal, args.lse.cast(), capi::HATTN_F32, 3, [batch, heads_q, seqlen_q, 0])
    };
    let call = capi::hattn_forward_args {
        struct_size: size_of::<capi::hattn_forward_args>() as u32,
        abi_version: capi::HATTN_ABI_VERSION,
        q: &q,
        k: &k,
        v: &v,
        o: &o,
        lse: if key.lse { &lse } else { std::ptr::null() },
        workspace: args.workspace,
        workspace_bytes: usize::try_from(args.workspace_bytes).unwrap_or(usize::MAX),
        ..Default::default()
    };
    // SAFETY: a live plan, since none is ever destroyed; the caller vouches for addresses, strides and sizes, for the
    // workspace, and for the stream.
    told(unsafe { capi::hattn_forward_run(plan.0, &call, args.stream.cast()) })
}

/// A tensor of the C ABI, strides aside.
pub(crate) fn described(
    device: c_int,
    data: *const c_void,
    dtype: i32,
    ndim: i32,
    shape: [i64; 4],
) -> capi::hattn_tensor {
    capi::hattn_tensor {
        struct_size: size_of::<capi::hattn_tensor>() as u32,
        abi_version: capi::HATTN_ABI_VERSION,
        data: data.cast_mut(),
        dtype,
        device,
        ndim,
        reserved: 0,
        shape,
        stride: [0; 4],
    }
}

fn make(key: &Key, softmax_scale: f32) -> Result<Plan, Refused> {
    let [batch, seqlen_q, seqlen_kv, heads_q, heads_kv, head_dim_qk, head_dim_vo] = key.sizes.map(i64::from);
    let [mask, corner, window_left, window_right] = key.mask;
    let problem = capi::hattn_forward_problem {
        struct_size: size_of::<capi::hattn_forward_problem>() as u32,
        abi_version: capi::HATTN_ABI_VERSION,
        dtype: key.dtype,
        mask,
        corner,
        lse: key.lse.into(),
        batch,
        seqlen_q,
        seqlen_kv,
        heads_q,
        heads_kv,
        head_dim_qk,
        head_dim_vo,
        window_left: window_left.into(),
        window_right: window_right.into(),
        softmax_scale,
        arch: match key.arch {
            None => capi::HATTN_ARCH_OWN,
            Some(Arch::Sm80) => capi::HATTN_ARCH_SM80,
            Some(Arch::Sm90) => capi::HATTN_ARCH_SM90,
            Some(other) => return Err((INVALID, format!("no number for {other}"))),
        },
        ..Default::default()
    };
    let mut plan = Plan(std::ptr::null_mut());
    // SAFETY: both are live structs.
    told(unsafe { capi::hattn_forward_plan_create(&problem, key.ordinal, &mut plan.0) })?;
    Ok(plan)
}

/// The entry's status and words for one of the C ABI.
fn told(status: capi::hattn_status) -> Result<(), Refused> {
    let status = match status {
        capi::HATTN_OK => return Ok(()),
        capi::HATTN_ERROR_UNSUPPORTED => UNSUPPORTED,
        capi::HATTN_ERROR_DRIVER
        | capi::HATTN_ERROR_LAUNCH
        | capi::HATTN_ERROR_NO_DEVICE
        | capi::HATTN_ERROR_CAPTURE
        | capi::HATTN_ERROR_INTERNAL => FAILED,
        _ => INVALID,
    };
    Err((status, last_error()))
}

/// What the C ABI says of this thread's last failure.
pub(crate) fn last_error() -> String {
    // SAFETY: a string of this thread, valid until its next failure.
    let text = unsafe { CStr::from_ptr(capi::hattn_last_error()) };
    text.to_string_lossy().into_owned()
}

/// The C ABI's word for the type of a forward and a backward.
fn sixteen_bits(numbers: &Numbers) -> Result<i32, Refused> {
    match numbers.dtype {
        0 => Ok(capi::HATTN_F16),
        1 => Ok(capi::HATTN_BF16),
        other => Err((INVALID, format!("dtype: {other}; allowed: 0 (f16), 1 (bf16)"))),
    }
}

fn key(numbers: &Numbers, dtype: i32, lse: bool) -> Result<Key, Refused> {
    // cudarc panics on its first call where there is no driver.
    static DRIVER: LazyLock<bool> = LazyLock::new(|| !Device::available().is_empty());
    if !*DRIVER {
        return Err((FAILED, "this machine has no CUDA driver, or no GPU".to_owned()));
    }
    let mut ordinal = 0;
    // SAFETY: writes one int.
    let code = unsafe { sys::cuCtxGetDevice(&mut ordinal) };
    if code != sys::CUresult::CUDA_SUCCESS {
        return Err((FAILED, format!("no current CUDA context ({code:?})")));
    }
    Ok(Key {
        ordinal,
        sizes: [
            numbers.batch,
            numbers.seqlen_q,
            numbers.seqlen_kv,
            numbers.heads_q,
            numbers.heads_kv,
            numbers.head_dim_qk,
            numbers.head_dim_vo,
        ],
        dtype,
        // The entry's masks, corners and "without bound" are the C ABI's.
        mask: [numbers.mask, numbers.corner, numbers.window_left, numbers.window_right],
        scale_bits: numbers.softmax_scale.to_bits(),
        lse,
        arch: arch()?,
    })
}

const _: () = assert!(capi::HATTN_MASK_FULL == 0 && capi::HATTN_MASK_CAUSAL == 1 && capi::HATTN_MASK_WINDOW == 2);
const _: () = assert!(capi::HATTN_BOTTOM_RIGHT == 0 && capi::HATTN_TOP_LEFT == 1 && capi::HATTN_UNBOUNDED == -1);

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
            let (status, text) = named(Some(wrong)).unwrap_err();
            assert_eq!(status, INVALID);
            assert!(text.ends_with("allowed: sm80, sm90"), "{text}");
        }
    }

    #[test]
    fn the_problem_goes_through_the_c_abi() {
        let key = Key {
            ordinal: -1,
            sizes: [1, 1, 1, 3, 2, 8, 8],
            dtype: 2,
            mask: [0; 4],
            scale_bits: 0,
            lse: true,
            arch: None,
        };
        let Err((status, text)) = make(&key, 0.0) else { panic!("three heads do not share two") };
        assert!(status == INVALID && text.contains("heads_q"), "{text}");
        // The CPU has a plan for the same with heads that divide, as the C ABI says.
        assert!(make(&Key { sizes: [1, 1, 1, 4, 2, 8, 8], ..key }, 0.0).is_ok_and(|plan| !plan.0.is_null()));
    }
}
