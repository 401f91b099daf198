//! The C entry of `peers/hattn_peer.h`, over the plans and the raw launch of the safe crate.
//!
//! Plans are made once a problem and device and kept for the life of the process. Nothing unwinds into the caller.

use std::cell::RefCell;
use std::collections::HashMap;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

use hopper_attention::cudarc::driver::sys;
use hopper_attention::raw::{Place, RawForward, RawTensor, RawWorkspace};
use hopper_attention::{Corner, DType, Device, Dims, Error, ForwardPlan, ForwardProblem, Layout, Mask};

/// `hattn_peer_fwd_args`: the header says what the fields mean.
#[derive(Clone, Copy)]
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

/// A plan's key: the device's ordinal and everything a [`ForwardProblem`] is made of.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Key {
    ordinal: usize,
    dims: Dims,
    dtype: DType,
    mask: Mask,
    scale_bits: u32,
    lse: bool,
}

static PLANS: LazyLock<Mutex<HashMap<Key, Arc<ForwardPlan>>>> = LazyLock::new(Default::default);

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
    let outcome = catch_unwind(AssertUnwindSafe(|| {
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
    }));
    let (status, text) = match outcome {
        Ok(Ok(())) => return OK,
        Ok(Err(failure)) => failure,
        Err(_) => (FAILED, "a panic was caught".to_owned()),
    };
    LAST_ERROR.with_borrow_mut(|last| *last = CString::new(text.replace('\0', " ")).unwrap_or_default());
    status
}

/// # Safety
/// As for [`hattn_peer_fwd`].
unsafe fn forward(args: &Args) -> Result<(), (c_int, String)> {
    let refused = |error: Error| {
        let status = match error {
            Error::Unsupported { .. } => UNSUPPORTED,
            Error::Driver { .. } | Error::Launch { .. } | Error::NoDevice { .. } => FAILED,
            _ => INVALID,
        };
        (status, error.to_string())
    };
    let key = key(args)?;
    let known = PLANS.lock().unwrap_or_else(PoisonError::into_inner).get(&key).cloned();
    let plan = match known {
        Some(plan) => plan,
        None => {
            let problem = ForwardProblem::new(key.dtype, key.dims).map_err(refused)?;
            let problem = problem.mask(key.mask).softmax_scale(args.softmax_scale).map_err(refused)?.lse(key.lse);
            let device = Device::cuda(key.ordinal).map_err(refused)?;
            let plan = Arc::new(problem.plan(&device).map_err(refused)?);
            PLANS.lock().unwrap_or_else(PoisonError::into_inner).insert(key, plan.clone());
            plan
        }
    };
    let place = Place::Cuda(key.ordinal);
    let tensor = |pointer: *const c_void, shape, [batch, seqlen, head]: [i64; 3]| {
        let layout = Layout::with_strides(shape, [batch, seqlen, head, 1]).map_err(refused)?;
        Ok(RawTensor { address: pointer as u64, dtype: key.dtype, place, layout })
    };
    let problem = plan.problem();
    let lse = if key.lse {
        let layout = Layout::contiguous(problem.lse_shape()).map_err(refused)?;
        Some(RawTensor { address: args.lse as u64, dtype: DType::F32, place, layout })
    } else {
        None
    };
    let call = RawForward {
        q: tensor(args.q, problem.q_shape(), args.q_stride)?,
        k: tensor(args.k, problem.k_shape(), args.k_stride)?,
        v: tensor(args.v, problem.v_shape(), args.v_stride)?,
        o: tensor(args.o, problem.o_shape(), args.o_stride)?,
        lse,
        workspace: RawWorkspace { address: args.workspace as u64, bytes: args.workspace_bytes as usize },
    };
    // SAFETY: the caller vouches for addresses, strides and sizes, for the stream being of the current context, and for
    // the workspace.
    unsafe { plan.run_raw(&call, args.stream) }.map_err(refused)
}

fn key(args: &Args) -> Result<Key, (c_int, String)> {
    let invalid = |what: &str, got: i32, allowed: &str| (INVALID, format!("{what}: {got}; allowed: {allowed}"));
    let size = |what, got: i32| usize::try_from(got).map_err(|_| invalid(what, got, "0 and above"));
    let dims = Dims {
        batch: size("batch", args.batch)?,
        seqlen_q: size("seqlen_q", args.seqlen_q)?,
        seqlen_kv: size("seqlen_kv", args.seqlen_kv)?,
        heads_q: size("heads_q", args.heads_q)?,
        heads_kv: size("heads_kv", args.heads_kv)?,
        head_dim_qk: size("head_dim_qk", args.head_dim_qk)?,
        head_dim_vo: size("head_dim_vo", args.head_dim_vo)?,
    };
    let dtype = match args.dtype {
        0 => DType::F16,
        1 => DType::BF16,
        other => return Err(invalid("dtype", other, "0 (f16), 1 (bf16)")),
    };
    let corner = match args.corner {
        0 => Corner::BottomRight,
        1 => Corner::TopLeft,
        other => return Err(invalid("corner", other, "0 (bottom-right), 1 (top-left)")),
    };
    let mask = match args.mask {
        0 => Mask::Full,
        1 => Mask::Causal { corner },
        // Negative is "without bound".
        2 => Mask::Window {
            left: usize::try_from(args.window_left).ok(),
            right: usize::try_from(args.window_right).ok(),
            corner,
        },
        other => return Err(invalid("mask", other, "0 (full), 1 (causal), 2 (window)")),
    };
    // cudarc panics on its first call where there is no driver.
    static DRIVER: LazyLock<bool> = LazyLock::new(|| !Device::available().is_empty());
    if !*DRIVER {
        return Err((FAILED, "this machine has no CUDA driver, or no GPU".to_owned()));
    }
    let mut ordinal = 0;
    // SAFETY: writes one int.
    let code = unsafe { sys::cuCtxGetDevice(&mut ordinal) };
    let ordinal = usize::try_from(ordinal).unwrap_or_default();
    if code != sys::CUresult::CUDA_SUCCESS {
        return Err((FAILED, format!("no current CUDA context ({code:?})")));
    }
    Ok(Key { ordinal, dims, dtype, mask, scale_bits: args.softmax_scale.to_bits(), lse: !args.lse.is_null() })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args() -> Args {
        // SAFETY: every field is an integer, a float or a raw pointer, and all of them may be 0.
        let zero: Args = unsafe { std::mem::zeroed() };
        Args { struct_bytes: size_of::<Args>() as u64, dtype: 1, heads_q: 1, heads_kv: 1, ..zero }
    }

    fn refused(args: *const Args) -> (c_int, String) {
        // SAFETY: null or a live struct, which is refused before any of its addresses is used.
        let status = unsafe { hattn_peer_fwd(args) };
        // SAFETY: a string of this thread, and no call comes between.
        let text = unsafe { CStr::from_ptr(hattn_peer_last_error()) };
        (status, text.to_string_lossy().into_owned())
    }

    #[test]
    fn what_is_wrong_is_told_without_a_gpu() {
        assert_eq!(refused(std::ptr::null()), (INVALID, "args is null".into()));
        assert_eq!(refused(&Args { struct_bytes: 8, ..args() }).1, "struct_bytes 8; allowed: 224 and above");
        for (wrong, what) in [
            (Args { batch: -1, ..args() }, "batch: -1"),
            (Args { dtype: 3, ..args() }, "dtype: 3"),
            (Args { corner: 2, ..args() }, "corner: 2"),
            (Args { mask: -1, ..args() }, "mask: -1"),
        ] {
            let (status, text) = refused(&wrong);
            assert!(status == INVALID && text.starts_with(what), "{status}: {text}");
        }
    }

    #[test]
    fn the_name_is_the_reports() {
        // SAFETY: a string of the program.
        let name = unsafe { CStr::from_ptr(hattn_peer_name()) };
        assert_eq!(name.to_str(), Ok(crate::NAME));
    }
}
