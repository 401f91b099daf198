//! The entry of forwards of e4m3 operands, over the raw layer. As in the forward, plans are kept for the life of the process.

use std::ffi::{c_int, c_void};
use std::sync::Arc;

use hopper_attention::raw::{Place, RawForward, RawFp8, RawTensor, RawWorkspace};
use hopper_attention::{DType, Error, ForwardPlan, ForwardProblem, Layout, Scaling};
use hopper_attention_capi as capi;

use super::problem::{self, told};
use super::{E4M3, INVALID, Key, Numbers, Plans, Refused, answer, key, read};

/// `hattn_peer_fwd_fp8_args`: the header says what the fields mean.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
#[allow(missing_docs)]
pub struct Fp8Args {
    pub struct_bytes: u64,
    pub q: *const c_void,
    pub k: *const c_void,
    pub v: *const c_void,
    pub o: *mut c_void,
    pub lse: *mut f32,
    pub q_descale: *const f32,
    pub k_descale: *const f32,
    pub v_descale: *const f32,
    pub q_stride: [i64; 3],
    pub k_stride: [i64; 3],
    pub v_stride: [i64; 3],
    pub o_stride: [i64; 3],
    pub numbers: Numbers,
    pub scaling: i32,
    pub o_dtype: i32,
    pub stream: *mut c_void,
    pub workspace: *mut c_void,
    pub workspace_bytes: u64,
    pub half_scores: i32,
    pub reserved_1: i32,
}

// As for the forward's.
const _: () = assert!(size_of::<Fp8Args>() == 264 && std::mem::offset_of!(Fp8Args, half_scores) == OLDER_BYTES);
const _: () = assert!(std::mem::offset_of!(Fp8Args, numbers) == 168 && std::mem::offset_of!(Fp8Args, stream) == 232);

/// The size that the struct came with; what a caller does not know is 0.
const OLDER_BYTES: usize = 256;

/// A plan's key: that of any forward, the scaling and the type of O as the entry numbers them.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Fp8Key {
    forward: Key,
    scaling: i32,
    o_dtype: i32,
    half_scores: i32,
}

static PLANS: Plans<Fp8Key, Arc<ForwardPlan>> = Plans::new();

/// One forward of e4m3 operands, enqueued on `args.stream` on the current CUDA context; returns a `HATTN_PEER_` status.
///
/// # Safety
/// As for [`hattn_peer_fwd`](super::hattn_peer_fwd).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hattn_peer_fwd_fp8(args: *const Fp8Args) -> c_int {
    answer(|| {
        // SAFETY: the caller's promise; the struct begins with its size and its fields take any bits.
        let args = unsafe { read_grown(args) }?;
        if args.numbers.dtype != E4M3 {
            return Err((INVALID, format!("dtype: {}; allowed: 2 (e4m3)", args.numbers.dtype)));
        }
        let forward = key(&args.numbers, capi::HATTN_E4M3, !args.lse.is_null())?;
        let plan =
            plan(&Fp8Key { forward, scaling: args.scaling, o_dtype: args.o_dtype, half_scores: args.half_scores })?;
        let raw = raw(&args, &plan, forward.place()).map_err(told)?;
        // SAFETY: the caller vouches for addresses, strides and sizes, for the workspace, and for the stream.
        unsafe { plan.run_raw(&raw, args.stream) }.map_err(told)
    })
}

/// A caller's struct of either size.
///
/// # Safety
/// As [`read`].
unsafe fn read_grown(args: *const Fp8Args) -> Result<Fp8Args, Refused> {
    /// All of it that was there at first.
    #[derive(Clone, Copy)]
    #[repr(C)]
    struct Older([u64; OLDER_BYTES / 8]);
    // SAFETY: the caller's promise; integers take any bits.
    let older = unsafe { read(args.cast::<Older>()) }?;
    if older.0[0] >= size_of::<Fp8Args>() as u64 {
        // SAFETY: the caller's promise; its fields take any bits.
        return unsafe { read(args) };
    }
    let mut grown = [0; size_of::<Fp8Args>() / 8];
    grown[..older.0.len()].copy_from_slice(&older.0);
    // SAFETY: as many bytes, which are valid for fields that take any; what the caller did not have is 0.
    Ok(unsafe { std::mem::transmute::<[u64; size_of::<Fp8Args>() / 8], Fp8Args>(grown) })
}

fn plan(key: &Fp8Key) -> Result<Arc<ForwardPlan>, Refused> {
    PLANS.get(key, || {
        let device = key.forward.device()?;
        problem(key).and_then(|problem| problem.plan(&device)).map(Arc::new).map_err(told)
    })
}

fn problem(key: &Fp8Key) -> hopper_attention::Result<ForwardProblem> {
    let value = |what, got: i32, allowed: &str| Error::Value { what, got: got.to_string(), allowed: allowed.into() };
    let scaling = match key.scaling {
        0 => Scaling::PerTensor,
        1 => Scaling::PerHead,
        2 => Scaling::PerBlock,
        other => return Err(value("scaling", other, "0 (per tensor), 1 (per head), 2 (per block)")),
    };
    let output = match key.o_dtype {
        0 => DType::F16,
        1 => DType::BF16,
        other => return Err(value("o_dtype", other, "0 (f16), 1 (bf16)")),
    };
    let half_scores = match key.half_scores {
        0 => false,
        1 => true,
        other => return Err(value("half_scores", other, "0 (nothing promised), 1 (Q and K are 14 at most)")),
    };
    problem::forward(&key.forward)?.lse(key.forward.lse).scaling(scaling)?.half_scores(half_scores)?.output(output)
}

fn raw(args: &Fp8Args, plan: &ForwardPlan, place: Place) -> hopper_attention::Result<RawForward> {
    let problem = plan.problem();
    let tensor = |data: *const c_void, dtype, shape: [usize; 4], [batch, seqlen, head]: [i64; 3]| {
        let layout = Layout::with_strides(shape, [batch, seqlen, head, 1])?;
        Ok::<_, Error>(RawTensor { address: data as u64, dtype, place, layout })
    };
    let floats = |data: *const f32, shape: [usize; 3]| {
        Ok::<_, Error>(RawTensor { address: data as u64, dtype: DType::F32, place, layout: Layout::contiguous(shape)? })
    };
    Ok(RawForward {
        q: tensor(args.q, problem.dtype(), problem.q_shape(), args.q_stride)?,
        k: tensor(args.k, problem.dtype(), problem.k_shape(), args.k_stride)?,
        v: tensor(args.v, problem.dtype(), problem.v_shape(), args.v_stride)?,
        o: tensor(args.o, problem.output_dtype(), problem.o_shape(), args.o_stride)?,
        lse: if problem.wants_lse() { Some(floats(args.lse, problem.lse_shape())?) } else { None },
        fp8: Some(RawFp8 {
            descale_q: floats(args.q_descale, problem.descale_q_shape())?,
            descale_k: floats(args.k_descale, problem.descale_k_shape())?,
            descale_v: floats(args.v_descale, problem.descale_v_shape())?,
            scale_o: None,
            amax: None,
        }),
        workspace: RawWorkspace {
            address: args.workspace as u64,
            bytes: usize::try_from(args.workspace_bytes).unwrap_or(usize::MAX),
        },
    })
}

#[cfg(test)]
mod tests {
    use hopper_attention::{Device, E4M3 as Code};

    use super::super::{Entry, OK};
    use super::*;

    fn args() -> Fp8Args {
        // SAFETY: every field is an integer, a float or a raw pointer, and all of them may be 0.
        let zero: Fp8Args = unsafe { std::mem::zeroed() };
        Fp8Args { struct_bytes: size_of::<Fp8Args>() as u64, ..zero }
    }

    fn key(scaling: i32, o_dtype: i32) -> Fp8Key {
        let forward = Key {
            ordinal: 0,
            sizes: [1, 2, 130, 2, 1, 16, 16],
            dtype: capi::HATTN_E4M3,
            mask: [0; 4],
            scale_bits: 0.25f32.to_bits(),
            lse: true,
            arch: None,
        };
        Fp8Key { forward, scaling, o_dtype, half_scores: 0 }
    }

    #[test]
    fn what_is_wrong_is_told_without_a_gpu() {
        let refused = |args: *const Fp8Args| {
            // SAFETY: null or a live struct, which is refused before any of its addresses is used.
            assert_eq!(unsafe { hattn_peer_fwd_fp8(args) }, INVALID);
            Entry::own().complaint(INVALID)
        };
        assert_eq!(refused(std::ptr::null()), "invalid argument: args is null");
        assert!(refused(&Fp8Args { struct_bytes: 8, ..args() }).ends_with("struct_bytes 8; allowed: 256 and above"));
        assert!(refused(&args()).ends_with("dtype: 0; allowed: 2 (e4m3)"));
    }

    #[test]
    fn the_problem_is_what_the_arguments_say() {
        let text = |key: &Fp8Key| problem(key).map_or_else(|error| error.to_string(), |problem| problem.to_string());
        let of = |scaling, o| {
            format!("forward e4m3 {scaling} to {o} batch 1 seqlen 2x130 heads 2/1 head_dim 16/16 full scale 0.25 lse")
        };
        assert_eq!(text(&key(0, 1)), of("per-tensor", "bf16"));
        assert_eq!(text(&key(1, 0)), of("per-head", "f16"));
        assert_eq!(text(&key(2, 1)), of("per-block", "bf16"));
        assert_eq!(text(&key(3, 1)), "scaling: 3; allowed: 0 (per tensor), 1 (per head), 2 (per block)");
        let promised = |half_scores| Fp8Key { half_scores, ..key(2, 1) };
        assert_eq!(text(&promised(1)), of("per-block half-scores", "bf16"));
        assert_eq!(text(&promised(2)), "half_scores: 2; allowed: 0 (nothing promised), 1 (Q and K are 14 at most)");
        assert_eq!(text(&key(0, 2)), "o_dtype: 2; allowed: 0 (f16), 1 (bf16)");
    }

    #[test]
    fn an_older_callers_struct_promises_nothing() {
        let given = |struct_bytes| Fp8Args { struct_bytes, scaling: 2, workspace_bytes: 9, half_scores: 1, ..args() };
        let read = |args: &Fp8Args| {
            // SAFETY: a live struct that is at least as large as it says.
            unsafe { read_grown(args) }.map(|read| (read.scaling, read.workspace_bytes, read.half_scores))
        };
        assert_eq!(read(&given(256)), Ok((2, 9, 0)));
        assert_eq!(read(&given(264)), Ok((2, 9, 1)));
        assert_eq!(read(&given(272)), Ok((2, 9, 1)));
        assert!(read(&given(255)).is_err_and(|(_, text)| text == "struct_bytes 255; allowed: 256 and above"));
    }

    /// Values of one and factors that tell blocks apart: what reaches the CPU backend through the raw layer.
    #[test]
    fn addresses_strides_and_factors_reach_the_raw_layer() {
        let plan =
            problem(&key(2, 1)).and_then(|problem| problem.plan(&Device::cpu())).expect("the CPU has every plan");
        let (zeros, ones) = (vec![Code::from_f32(0.0); 2 * 2 * 16], vec![Code::from_f32(1.0); 130 * 16]);
        let mut o = vec![0x7fc0_u16; 2 * 2 * 16];
        let mut lse = [f32::NAN; 4];
        let (for_q, for_k, for_v) = ([1.0_f32; 2], [1.0_f32; 2], [2.0_f32, 67.0]);
        let args = Fp8Args {
            q: zeros.as_ptr().cast(),
            k: ones.as_ptr().cast(),
            v: ones.as_ptr().cast(),
            o: o.as_mut_ptr().cast(),
            lse: lse.as_mut_ptr(),
            q_descale: for_q.as_ptr(),
            k_descale: for_k.as_ptr(),
            v_descale: for_v.as_ptr(),
            q_stride: [64, 32, 16],
            k_stride: [130 * 16, 16, 16],
            v_stride: [130 * 16, 16, 16],
            o_stride: [64, 32, 16],
            ..args()
        };
        let raw = raw(&args, &plan, Place::Cpu).expect("fitting strides");
        // SAFETY: live memory, as large as the shapes.
        let ran = unsafe { plan.run_raw(&raw, std::ptr::null_mut()) };
        assert_eq!(ran.map_or_else(|error| told(error).0, |()| OK), OK);
        // 128 values of 2 and two of 67: their mean is 3.
        assert!(o.iter().all(|&bits| bits == 0x4040), "{o:x?}");
        assert!(lse.iter().all(|lse| (lse - 130.0_f32.ln()).abs() < 1e-3), "{lse:?}");
    }
}
