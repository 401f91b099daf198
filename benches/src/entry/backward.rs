//! The backward's entry, over the raw layer. As in the forward, plans are kept for the life of the process.

use std::ffi::{c_int, c_void};
use std::sync::Arc;

use hopper_attention::raw::{Place, RawBackward, RawTensor, RawWorkspace};
use hopper_attention::{BackwardPlan, BackwardProblem, DType, Error, Layout};

use super::problem::{self, told};
use super::{INVALID, Key, Numbers, Plans, Refused, answer, key, read, sixteen_bits};

/// `hattn_peer_bwd_args`: the header says what the fields mean.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
#[allow(missing_docs)]
pub struct BackwardArgs {
    pub struct_bytes: u64,
    pub q: *const c_void,
    pub k: *const c_void,
    pub v: *const c_void,
    pub o: *const c_void,
    pub d_o: *const c_void,
    pub lse: *const f32,
    pub d_q: *mut c_void,
    pub d_k: *mut c_void,
    pub d_v: *mut c_void,
    pub q_stride: [i64; 3],
    pub k_stride: [i64; 3],
    pub v_stride: [i64; 3],
    pub o_stride: [i64; 3],
    pub d_o_stride: [i64; 3],
    pub d_q_stride: [i64; 3],
    pub d_k_stride: [i64; 3],
    pub d_v_stride: [i64; 3],
    pub numbers: Numbers,
    pub stream: *mut c_void,
    pub workspace: *mut c_void,
    pub workspace_bytes: u64,
}

// As for the forward's.
const _: () = assert!(size_of::<BackwardArgs>() == 352);
const _: () = assert!(std::mem::offset_of!(BackwardArgs, numbers) == 272);
const _: () = assert!(std::mem::offset_of!(BackwardArgs, stream) == 328);

/// Enqueues a backward: `hattn_peer_bwd` of some library.
pub type Backward = unsafe extern "C" fn(*const BackwardArgs) -> c_int;
/// The scratch of a backward: `hattn_peer_bwd_workspace` of some library.
pub type BackwardWorkspace = unsafe extern "C" fn(*const BackwardArgs, *mut u64) -> c_int;

static PLANS: Plans<Key, Arc<BackwardPlan>> = Plans::new();

/// One backward, enqueued on `args.stream` on the current CUDA context; returns a `HATTN_PEER_` status.
///
/// # Safety
/// As for [`hattn_peer_fwd`](super::hattn_peer_fwd).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hattn_peer_bwd(args: *const BackwardArgs) -> c_int {
    answer(|| {
        // SAFETY: the caller's promise; the struct begins with its size and its fields take any bits.
        let args = unsafe { read(args) }?;
        let key = key(&args.numbers, sixteen_bits(&args.numbers)?, true)?;
        let plan = plan(&key)?;
        let raw = raw(&args, &plan, key.place()).map_err(told)?;
        // SAFETY: the caller vouches for addresses, strides and sizes, for the workspace, and for the stream.
        unsafe { plan.run_raw(&raw, args.stream) }.map_err(told)
    })
}

/// Writes how many bytes of scratch [`hattn_peer_bwd`] needs for these arguments; returns a `HATTN_PEER_` status.
///
/// # Safety
/// `args` as for [`hattn_peer_fwd`](super::hattn_peer_fwd), addresses and workspace aside, which are not looked at;
/// `bytes` is null or may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hattn_peer_bwd_workspace(args: *const BackwardArgs, bytes: *mut u64) -> c_int {
    answer(|| {
        // SAFETY: as in `hattn_peer_bwd`.
        let args = unsafe { read(args) }?;
        if bytes.is_null() {
            return Err((INVALID, "bytes is null".to_owned()));
        }
        let plan = plan(&key(&args.numbers, sixteen_bits(&args.numbers)?, true)?)?;
        // SAFETY: not null, and the caller lets it be written.
        unsafe { bytes.write(plan.workspace_bytes() as u64) };
        Ok(())
    })
}

fn plan(key: &Key) -> Result<Arc<BackwardPlan>, Refused> {
    PLANS.get(key, || {
        let device = key.device()?;
        problem(key).and_then(|problem| problem.plan(&device)).map(Arc::new).map_err(told)
    })
}

fn problem(key: &Key) -> hopper_attention::Result<BackwardProblem> {
    Ok(BackwardProblem::of(&problem::forward(key)?))
}

fn raw(args: &BackwardArgs, plan: &BackwardPlan, place: Place) -> hopper_attention::Result<RawBackward> {
    let problem = plan.problem();
    let tensor = |data: *const c_void, shape: [usize; 4], [batch, seqlen, head]: [i64; 3]| {
        let layout = Layout::with_strides(shape, [batch, seqlen, head, 1])?;
        Ok::<_, Error>(RawTensor { address: data as u64, dtype: problem.dtype(), place, layout })
    };
    let forward = problem.forward();
    let lse = Layout::contiguous(forward.lse_shape())?;
    Ok(RawBackward {
        q: tensor(args.q, forward.q_shape(), args.q_stride)?,
        k: tensor(args.k, forward.k_shape(), args.k_stride)?,
        v: tensor(args.v, forward.v_shape(), args.v_stride)?,
        o: tensor(args.o, forward.o_shape(), args.o_stride)?,
        lse: RawTensor { address: args.lse as u64, dtype: DType::F32, place, layout: lse },
        d_o: tensor(args.d_o, problem.d_o_shape(), args.d_o_stride)?,
        d_lse: None,
        d_q: tensor(args.d_q, problem.d_q_shape(), args.d_q_stride)?,
        d_k: tensor(args.d_k, problem.d_k_shape(), args.d_k_stride)?,
        d_v: tensor(args.d_v, problem.d_v_shape(), args.d_v_stride)?,
        workspace: RawWorkspace {
            address: args.workspace as u64,
            bytes: usize::try_from(args.workspace_bytes).unwrap_or(usize::MAX),
        },
    })
}

#[cfg(test)]
mod tests {
    use hopper_attention::Device;
    use hopper_attention_capi as capi;

    use super::super::{Entry, OK};
    use super::*;

    fn args() -> BackwardArgs {
        // SAFETY: every field is an integer, a float or a raw pointer, and all of them may be 0.
        let zero: BackwardArgs = unsafe { std::mem::zeroed() };
        BackwardArgs { struct_bytes: size_of::<BackwardArgs>() as u64, ..zero }
    }

    #[test]
    fn what_is_wrong_is_told_without_a_gpu() {
        let entry = Entry::own();
        let (backward, workspace) = (entry.backward.expect("ours has it"), entry.backward_workspace.expect("too"));
        let refused = |args: *const BackwardArgs| {
            let mut bytes = 7;
            // SAFETY: null or a live struct, which is refused before any of its addresses is used.
            let both = unsafe { [backward(args), workspace(args, &mut bytes)] };
            assert_eq!((both, bytes), ([INVALID; 2], 7));
            entry.complaint(INVALID)
        };
        assert_eq!(refused(std::ptr::null()), "invalid argument: args is null");
        assert!(
            refused(&BackwardArgs { struct_bytes: 8, ..args() }).ends_with("struct_bytes 8; allowed: 352 and above")
        );
        assert!(
            refused(&BackwardArgs { numbers: Numbers { dtype: 3, ..args().numbers }, ..args() }).contains("dtype: 3")
        );
        // SAFETY: as above; a null in place of an address to write.
        assert_eq!(unsafe { workspace(&args(), std::ptr::null_mut()) }, INVALID);
        assert!(entry.complaint(INVALID).ends_with("bytes is null"));
    }

    fn key() -> Key {
        Key {
            ordinal: 0,
            sizes: [2, 5, 7, 4, 2, 64, 32],
            dtype: capi::HATTN_BF16,
            mask: [2, 1, 3, -1],
            scale_bits: 0.5f32.to_bits(),
            lse: true,
            arch: None,
        }
    }

    #[test]
    fn the_problem_is_what_the_arguments_say() {
        let text = |key: Key| problem(&key).map_or_else(|error| error.to_string(), |problem| problem.to_string());
        let window =
            "backward bf16 batch 2 seqlen 5x7 heads 4/2 head_dim 64/32 window left 3 right all top-left scale 0.5";
        assert_eq!(text(key()), window);
        let causal = text(Key { mask: [1, 0, -1, -1], dtype: capi::HATTN_F16, ..key() });
        assert_eq!(causal, "backward f16 batch 2 seqlen 5x7 heads 4/2 head_dim 64/32 causal scale 0.5");
        for (wrong, part) in [
            (Key { mask: [3, 0, 0, 0], ..key() }, "mask: 3; allowed: 0 (full)"),
            (Key { mask: [2, 2, 0, 0], ..key() }, "corner: 2; allowed: 0 (bottom-right)"),
            (Key { mask: [2, 0, -2, 0], ..key() }, "window_left: -2; allowed: 0 and above"),
            (Key { sizes: [2, -5, 7, 4, 2, 64, 32], ..key() }, "seqlen_q: -5; allowed: 0 and above"),
            (Key { scale_bits: 0, ..key() }, "softmax_scale: 0; allowed: finite and above 0"),
        ] {
            assert!(text(wrong).starts_with(part), "{}", text(wrong));
        }
    }

    #[test]
    fn addresses_and_strides_reach_the_raw_layer() {
        let plan = problem(&key()).and_then(|problem| problem.plan(&Device::cpu())).expect("the CPU has every plan");
        let strides = |heads: i64, seqlen: i64, dims: i64| [seqlen * heads * dims, heads * dims, dims];
        let (of_q, of_o) = (strides(4, 5, 64), strides(4, 5, 32));
        let (of_k, of_v) = (strides(2, 7, 64), strides(2, 7, 32));
        let mut data: Vec<Vec<u16>> = vec![vec![0x3f80; 2 * 7 * 4 * 64]; 8]; // ones
        let lse = [f32::NEG_INFINITY; 2 * 4 * 5]; // no row has a part in any gradient
        let addresses: Vec<*mut c_void> = data.iter_mut().map(|data| data.as_mut_ptr().cast()).collect();
        let [q, k, v, o, d_o, d_q, d_k, d_v] = addresses[..] else { panic!("eight tensors") };
        let args = BackwardArgs {
            q,
            k,
            v,
            o,
            d_o,
            lse: lse.as_ptr(),
            d_q,
            d_k,
            d_v,
            q_stride: of_q,
            k_stride: of_k,
            v_stride: of_v,
            o_stride: of_o,
            d_o_stride: of_o,
            d_q_stride: of_q,
            d_k_stride: of_k,
            d_v_stride: of_v,
            ..args()
        };
        let raw = raw(&args, &plan, Place::Cpu).expect("fitting strides");
        // SAFETY: live memory, as large as the shapes.
        let ran = unsafe { plan.run_raw(&raw, std::ptr::null_mut()) };
        assert_eq!(ran.map_or_else(|error| told(error).0, |()| OK), OK);
        for (gradient, elements) in data[5..].iter().zip([2 * 5 * 4 * 64, 2 * 7 * 2 * 64, 2 * 7 * 2 * 32]) {
            let (written, rest) = gradient.split_at(elements);
            assert!(written.iter().all(|&bits| bits == 0) && rest.iter().all(|&bits| bits == 0x3f80));
        }
        let broken = BackwardArgs { d_q_stride: [0; 3], ..args };
        let error = super::raw(&broken, &plan, Place::Cpu).and_then(|raw| {
            // SAFETY: as above; refused, since the elements of dQ would lie on each other.
            unsafe { plan.run_raw(&raw, std::ptr::null_mut()) }
        });
        assert!(error.is_err_and(|error| told(error.clone()).0 == INVALID && error.to_string().starts_with("d_q")));
    }
}
