//! The C entry of `peers/hattn_peer.h`: ours, over the C ABI that callers link, and that of a peer's shared object.
//!
//! Our plans are made once a problem and device and kept for the life of the process.

use std::cell::RefCell;
use std::collections::HashMap;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::sync::{LazyLock, Mutex, PoisonError};

use hopper_attention::Device;
use hopper_attention::cudarc::driver::sys;
use hopper_attention_capi as capi;

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
    pub stream: *mut c_void,
    pub workspace: *mut c_void,
    pub workspace_bytes: u64,
}

// The offsets that the header's compiler finds (peers/test_sweep.py compares that compiler with Python).
const _: () = assert!(size_of::<Args>() == 224);
const _: () = assert!(std::mem::offset_of!(Args, batch) == 144 && std::mem::offset_of!(Args, stream) == 200);

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

/// A plan's key: the device's ordinal, and everything of the arguments that a problem is made of.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Key {
    ordinal: c_int,
    sizes: [i32; 7],
    dtype: i32,
    mask: [i32; 4],
    scale_bits: u32,
    lse: bool,
}

/// A plan of the C ABI, which any threads may run at once.
#[derive(Clone, Copy)]
struct Plan(*mut capi::hattn_forward_plan);

// SAFETY: the C ABI says that a plan may be used by any threads at once.
unsafe impl Send for Plan {}

static PLANS: LazyLock<Mutex<HashMap<Key, Plan>>> = LazyLock::new(Default::default);

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
    let enqueue = || {
        if args.is_null() {
            return Err((INVALID, "args is null".to_owned()));
        }
        // SAFETY: not null, and the caller lets at least the first field be read.
        let bytes = unsafe { (&raw const (*args).struct_bytes).read() };
        if bytes < size_of::<Args>() as u64 {
            return Err((INVALID, format!("struct_bytes {bytes}; allowed: {} and above", size_of::<Args>())));
        }
        // SAFETY: the caller's struct is at least as large as ours, whose fields all take any bits.
        let args = unsafe { args.read() };
        // SAFETY: the caller vouches for the memory that the fields describe.
        unsafe { forward(&args) }
    };
    let Err((status, text)) = enqueue() else { return OK };
    LAST_ERROR.with_borrow_mut(|last| *last = CString::new(text.replace('\0', " ")).unwrap_or_default());
    status
}

/// # Safety
/// As for [`hattn_peer_fwd`].
unsafe fn forward(args: &Args) -> Result<(), (c_int, String)> {
    let key = key(args)?;
    let known = PLANS.lock().unwrap_or_else(PoisonError::into_inner).get(&key).copied();
    let plan = match known {
        Some(plan) => plan,
        None => {
            let plan = make(&key, args.softmax_scale)?;
            PLANS.lock().unwrap_or_else(PoisonError::into_inner).insert(key, plan);
            plan
        }
    };
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

fn make(key: &Key, softmax_scale: f32) -> Result<Plan, (c_int, String)> {
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
        reserved: 0,
    };
    let mut plan = Plan(std::ptr::null_mut());
    // SAFETY: both are live structs.
    told(unsafe { capi::hattn_forward_plan_create(&problem, key.ordinal, &mut plan.0) })?;
    Ok(plan)
}

/// The entry's status and words for one of the C ABI.
fn told(status: capi::hattn_status) -> Result<(), (c_int, String)> {
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

fn key(args: &Args) -> Result<Key, (c_int, String)> {
    let dtype = match args.dtype {
        0 => capi::HATTN_F16,
        1 => capi::HATTN_BF16,
        other => return Err((INVALID, format!("dtype: {other}; allowed: 0 (f16), 1 (bf16)"))),
    };
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
            args.batch,
            args.seqlen_q,
            args.seqlen_kv,
            args.heads_q,
            args.heads_kv,
            args.head_dim_qk,
            args.head_dim_vo,
        ],
        dtype,
        // The entry's masks, corners and "without bound" are the C ABI's.
        mask: [args.mask, args.corner, args.window_left, args.window_right],
        scale_bits: args.softmax_scale.to_bits(),
        lse: !args.lse.is_null(),
    })
}

const _: () = assert!(capi::HATTN_MASK_FULL == 0 && capi::HATTN_MASK_CAUSAL == 1 && capi::HATTN_MASK_WINDOW == 2);
const _: () = assert!(capi::HATTN_BOTTOM_RIGHT == 0 && capi::HATTN_TOP_LEFT == 1 && capi::HATTN_UNBOUNDED == -1);

/// Enqueues a forward: `hattn_peer_fwd` of some library.
pub type Forward = unsafe extern "C" fn(*const Args) -> c_int;
/// `hattn_peer_name` or `hattn_peer_last_error` of some library.
pub type Text = unsafe extern "C" fn() -> *const c_char;

/// Somebody's entry.
#[derive(Clone, Copy)]
pub struct Entry {
    /// `hattn_peer_fwd`.
    pub forward: Forward,
    last_error: Option<Text>,
    name: Text,
}

impl Entry {
    /// That of this program.
    pub fn own() -> Self {
        Self { forward: hattn_peer_fwd, last_error: Some(hattn_peer_last_error), name: hattn_peer_name }
    }

    /// That of a shared object, which stays loaded.
    ///
    /// # Errors
    /// When it cannot be loaded, or has no such entry.
    pub fn load(path: &str) -> Result<Self, String> {
        // What went wrong is in an error's source, and the name that was asked for in neither.
        let told = |what: String| {
            move |error: libloading::Error| match std::error::Error::source(&error) {
                Some(source) => format!("{what}: {error}: {source}"),
                None => format!("{what}: {error}"),
            }
        };
        // SAFETY: loading runs what the library runs on being loaded; whoever named it trusts it.
        let library = unsafe { libloading::Library::new(path) }.map_err(told(path.to_owned()))?;
        // A library's code must outlive all that may call it, CUDA's exit handlers too.
        let library: &'static libloading::Library = Box::leak(Box::new(library));
        let missing = |name: &str| told(format!("{path} has no {name}"));
        // SAFETY: these names have these types, as `hattn_peer.h` says.
        unsafe {
            Ok(Self {
                forward: *library.get::<Forward>(b"hattn_peer_fwd").map_err(missing("hattn_peer_fwd"))?,
                name: *library.get::<Text>(b"hattn_peer_name").map_err(missing("hattn_peer_name"))?,
                last_error: library.get::<Text>(b"hattn_peer_last_error").ok().map(|f| *f),
            })
        }
    }

    /// The short name.
    pub fn name(&self) -> String {
        // SAFETY: a function of the entry, which returns a string for the life of the process.
        unsafe { CStr::from_ptr((self.name)()) }.to_string_lossy().into_owned()
    }

    /// What a status means, with the library's own words where it has some.
    pub fn complaint(&self, status: c_int) -> String {
        let text = status_text(status);
        let Some(last_error) = self.last_error else { return text };
        // SAFETY: a function of the entry, whose string is valid until this thread's next call.
        let own = unsafe { CStr::from_ptr(last_error()) }.to_string_lossy();
        if own.is_empty() { text } else { format!("{text}: {own}") }
    }

    /// Whether a status means that there is no kernel for a legal problem.
    pub fn unsupported(status: c_int) -> bool {
        status == UNSUPPORTED
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args() -> Args {
        // SAFETY: every field is an integer, a float or a raw pointer, and all of them may be 0.
        let zero: Args = unsafe { std::mem::zeroed() };
        Args { struct_bytes: size_of::<Args>() as u64, dtype: 1, heads_q: 1, heads_kv: 1, ..zero }
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
        assert!(refused(&Args { dtype: 3, ..args() }).contains("dtype: 3"));
    }

    #[test]
    fn the_problem_goes_through_the_c_abi() {
        let key = Key { ordinal: -1, sizes: [1, 1, 1, 3, 2, 8, 8], dtype: 2, mask: [0; 4], scale_bits: 0, lse: true };
        let Err((status, text)) = make(&key, 0.0) else { panic!("three heads do not share two") };
        assert!(status == INVALID && text.contains("heads_q"), "{text}");
        // The CPU has a plan for the same with heads that divide, as the C ABI says.
        assert!(make(&Key { sizes: [1, 1, 1, 4, 2, 8, 8], ..key }, 0.0).is_ok_and(|plan| !plan.0.is_null()));
    }

    #[test]
    fn the_name_is_the_reports() {
        assert_eq!(Entry::own().name(), crate::NAME);
    }

    #[test]
    fn a_library_without_the_entry_is_refused() {
        let Err(why) = Entry::load("libm.so.6") else { panic!("libm computes no attention") };
        assert!(why.contains("hattn_peer_fwd"), "{why}");
        assert!(Entry::load("libnowhere.so").is_err_and(|why| why.contains("libnowhere.so")));
    }
}
