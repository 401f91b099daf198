//! Cases through the C ABI, called as C would call it.

use std::ffi::{CStr, c_void};
use std::ptr::null;

use hopper_attention::{Corner, DType, ForwardProblem, Layout, Mask};
use hopper_attention_capi::*;

/// A status and the text that came with it.
pub type Refusal = (hattn_status, String);

/// What `hattn_last_error` says on this thread.
pub fn last_error() -> String {
    // SAFETY: a string of this thread, which is copied before its next failure.
    unsafe { CStr::from_ptr(hattn_last_error()) }.to_str().expect("UTF-8").to_owned()
}

/// A status as a result.
///
/// # Errors
/// Every status but `HATTN_OK`, with the text.
pub fn checked(status: hattn_status) -> Result<(), Refusal> {
    if status == HATTN_OK { Ok(()) } else { Err((status, last_error())) }
}

fn signed(size: usize) -> i64 {
    i64::try_from(size).expect("a small size")
}

fn dtype(dtype: DType) -> hattn_dtype {
    match dtype {
        DType::F16 => HATTN_F16,
        DType::BF16 => HATTN_BF16,
        DType::F32 => HATTN_F32,
        other => panic!("no tests of {other}"),
    }
}

/// A problem in C's words.
pub fn problem(problem: &ForwardProblem) -> hattn_forward_problem {
    let dims = problem.dims();
    let corner_of = |corner| if corner == Corner::TopLeft { HATTN_TOP_LEFT } else { HATTN_BOTTOM_RIGHT };
    // Past the largest number that C can say, a bound is none.
    let bound = |keys| i64::try_from(keys).unwrap_or(i64::MAX);
    let (mask, corner, left, right) = match problem.mask_value() {
        Mask::Causal { corner } => (HATTN_MASK_CAUSAL, corner_of(corner), None, None),
        Mask::Window { left, right, corner } => (HATTN_MASK_WINDOW, corner_of(corner), left, right),
        _ => (HATTN_MASK_FULL, HATTN_BOTTOM_RIGHT, None, None),
    };
    hattn_forward_problem {
        struct_size: size_of::<hattn_forward_problem>() as u32,
        abi_version: HATTN_ABI_VERSION,
        dtype: dtype(problem.dtype()),
        mask,
        corner,
        lse: i32::from(problem.wants_lse()),
        batch: signed(dims.batch),
        seqlen_q: signed(dims.seqlen_q),
        seqlen_kv: signed(dims.seqlen_kv),
        heads_q: signed(dims.heads_q),
        heads_kv: signed(dims.heads_kv),
        head_dim_qk: signed(dims.head_dim_qk),
        head_dim_vo: signed(dims.head_dim_vo),
        window_left: left.map_or(HATTN_UNBOUNDED, bound),
        window_right: right.map_or(HATTN_UNBOUNDED, bound),
        softmax_scale: problem.softmax_scale_value(),
        reserved: 0,
    }
}

/// A tensor in C's words.
pub fn tensor<const R: usize>(address: u64, element: DType, device: hattn_device, layout: Layout<R>) -> hattn_tensor {
    // What lies past the dimensions must not matter.
    let (mut shape, mut stride) = ([-99; 4], [-99; 4]);
    for axis in 0..R {
        (shape[axis], stride[axis]) = (signed(layout.shape()[axis]), layout.stride()[axis]);
    }
    hattn_tensor {
        struct_size: size_of::<hattn_tensor>() as u32,
        abi_version: HATTN_ABI_VERSION,
        data: address as *mut c_void,
        dtype: dtype(element),
        device,
        ndim: R as i32,
        reserved: 0,
        shape,
        stride,
    }
}

/// The tensors and the workspace of a run.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct Memory {
    pub q: hattn_tensor,
    pub k: hattn_tensor,
    pub v: hattn_tensor,
    pub o: hattn_tensor,
    pub lse: Option<hattn_tensor>,
    pub workspace: u64,
    pub workspace_bytes: usize,
}

/// A plan that frees itself.
#[derive(Debug)]
pub struct Plan(*mut hattn_forward_plan);

// SAFETY: the ABI says that a plan may be used by any threads at once.
unsafe impl Send for Plan {}
// SAFETY: as above.
unsafe impl Sync for Plan {}

impl Plan {
    /// A plan for a problem.
    ///
    /// # Errors
    /// What the library refused.
    pub fn new(given: &hattn_forward_problem, device: hattn_device) -> Result<Self, Refusal> {
        let mut plan = std::ptr::dangling_mut();
        // SAFETY: both point to live values.
        let status = unsafe { hattn_forward_plan_create(given, device, &raw mut plan) };
        assert_eq!(plan.is_null(), status != HATTN_OK, "a plan exactly when there is no failure");
        checked(status).map(|()| Self(plan))
    }

    /// What the plan says of itself.
    pub fn describe(&self) -> String {
        let mut text = [1u8; 512];
        let mut length = 0;
        // SAFETY: a live plan, and as many bytes as it is told.
        let status =
            unsafe { hattn_forward_plan_describe(self.0, text.as_mut_ptr().cast(), text.len(), &raw mut length) };
        checked(status).expect("a live plan describes itself");
        let text = CStr::from_bytes_until_nul(&text).expect("a final 0").to_str().expect("UTF-8");
        assert_eq!(text.len(), length);
        text.to_owned()
    }

    /// How large a workspace must be.
    pub fn workspace_bytes(&self) -> usize {
        let mut bytes = usize::MAX;
        // SAFETY: a live plan, and a live place for the size.
        checked(unsafe { hattn_forward_plan_workspace_size(self.0, &raw mut bytes) }).expect("a live plan");
        bytes
    }

    /// Runs the plan.
    ///
    /// # Errors
    /// What the library refused, or what failed.
    ///
    /// # Safety
    /// As [`hattn_forward_run`], for what the tensors lead to.
    pub unsafe fn run(&self, memory: &Memory, stream: *mut c_void) -> Result<(), Refusal> {
        let args = hattn_forward_args {
            struct_size: size_of::<hattn_forward_args>() as u32,
            abi_version: HATTN_ABI_VERSION,
            q: &raw const memory.q,
            k: &raw const memory.k,
            v: &raw const memory.v,
            o: &raw const memory.o,
            lse: memory.lse.as_ref().map_or(null(), |lse| &raw const *lse),
            workspace: memory.workspace as *mut c_void,
            workspace_bytes: memory.workspace_bytes,
        };
        // SAFETY: a live plan and live structs; the caller's promise for the rest.
        checked(unsafe { hattn_forward_run(self.0, &args, stream.cast()) })
    }
}

impl Drop for Plan {
    fn drop(&mut self) {
        // SAFETY: it came from the library, and its owner is going.
        unsafe { hattn_forward_plan_destroy(self.0) };
    }
}
