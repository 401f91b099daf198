//! From the ABI's structs to the safe crate's values. Only what those cannot express is refused here.

use std::ffi::c_void;

use hopper_attention::raw::{
    Place, RawBackward, RawForward, RawFp8, RawQuantize, RawQuantizeTensor, RawTensor, RawWorkspace,
};
use hopper_attention::{
    Arch, BackwardProblem, Corner, DType, Dims, Error, ForwardProblem, Layout, Mask, Quantizer, Scaling,
};

use crate::abi::*;
use crate::devices::ordinal;
use crate::status::{Failure, Outcome};

/// A forward problem, with all of the safe crate's checks.
pub(crate) fn forward_problem(given: &hattn_forward_problem) -> Outcome<ForwardProblem> {
    let size = |what: &'static str, got: i64| {
        let refuse = |_| Error::Value { what, got: got.to_string(), allowed: "0 and above".into() };
        usize::try_from(got).map_err(refuse)
    };
    let dims = Dims {
        batch: size("batch", given.batch)?,
        seqlen_q: size("seqlen_q", given.seqlen_q)?,
        seqlen_kv: size("seqlen_kv", given.seqlen_kv)?,
        heads_q: size("heads_q", given.heads_q)?,
        heads_kv: size("heads_kv", given.heads_kv)?,
        head_dim_qk: size("head_dim_qk", given.head_dim_qk)?,
        head_dim_vo: size("head_dim_vo", given.head_dim_vo)?,
    };
    let lse = flag("lse", given.lse, "wanted")?;
    let mut problem = ForwardProblem::new(dtype("dtype", given.dtype)?, dims)?.mask(mask(given)?).lse(lse);
    if given.output != 0 {
        problem = problem.output(dtype("output", given.output)?)?;
    }
    // 0 is what operands without factors have, too.
    if given.scaling != HATTN_PER_TENSOR {
        problem = problem.scaling(scaling(given.scaling)?)?;
    }
    if flag("amax", given.amax, "wanted")? {
        problem = problem.amax(true)?;
    }
    if flag("half_scores", given.half_scores, "wanted")? {
        problem = problem.half_scores(true)?;
    }
    // -0 is 0 too.
    let problem = if given.softmax_scale == 0.0 { problem } else { problem.softmax_scale(given.softmax_scale)? };
    Ok(match arch(given.arch)? {
        Some(arch) => problem.arch(arch),
        None => problem,
    })
}

/// A backward problem, with all of the safe crate's checks: but for two fields the forward problem that it is of.
pub(crate) fn backward_problem(given: &hattn_backward_problem) -> Outcome<BackwardProblem> {
    reserved("problem", given.reserved != 0)?;
    let d_lse = flag("d_lse", given.d_lse, "given")?;
    let deterministic = flag("deterministic", given.deterministic, "wanted")?;
    let forward = hattn_forward_problem {
        struct_size: given.struct_size,
        abi_version: given.abi_version,
        dtype: given.dtype,
        mask: given.mask,
        corner: given.corner,
        lse: 1,
        batch: given.batch,
        seqlen_q: given.seqlen_q,
        seqlen_kv: given.seqlen_kv,
        heads_q: given.heads_q,
        heads_kv: given.heads_kv,
        head_dim_qk: given.head_dim_qk,
        head_dim_vo: given.head_dim_vo,
        window_left: given.window_left,
        window_right: given.window_right,
        softmax_scale: given.softmax_scale,
        arch: given.arch,
        ..Default::default()
    };
    if given.dtype == HATTN_E4M3 {
        // Its problem would be one without gradients, whose scaling has no field here.
        let allowed = "f16, bf16, f32".into();
        return Err(Error::Dtype { what: "q, k and v", got: DType::E4M3, allowed }.into());
    }
    Ok(BackwardProblem::of(&forward_problem(&forward)?).d_lse(d_lse).deterministic(deterministic))
}

fn flag(what: &str, given: i32, yes: &str) -> Outcome<bool> {
    match given {
        0 => Ok(false),
        1 => Ok(true),
        other => Err(Failure::argument(what, &other.to_string(), format_args!("0 (not {yes}), 1 ({yes})"))),
    }
}

fn mask(given: &hattn_forward_problem) -> Outcome<Mask> {
    let corner = match given.corner {
        HATTN_BOTTOM_RIGHT => Corner::BottomRight,
        HATTN_TOP_LEFT => Corner::TopLeft,
        other => {
            let allowed = "HATTN_BOTTOM_RIGHT (0), HATTN_TOP_LEFT (1)";
            return Err(Failure::argument("corner", &other.to_string(), allowed));
        }
    };
    let bound = |what: &'static str, keys: i64| match usize::try_from(keys) {
        Ok(keys) => Ok(Some(keys)),
        Err(_) if keys == HATTN_UNBOUNDED => Ok(None),
        Err(_) => {
            let allowed = "0 and above, HATTN_UNBOUNDED (-1)".into();
            Err(Error::Value { what, got: keys.to_string(), allowed })
        }
    };
    match given.mask {
        HATTN_MASK_FULL => Ok(Mask::Full),
        HATTN_MASK_CAUSAL => Ok(Mask::Causal { corner }),
        HATTN_MASK_WINDOW => Ok(Mask::Window {
            left: bound("window_left", given.window_left)?,
            right: bound("window_right", given.window_right)?,
            corner,
        }),
        other => {
            let allowed = "HATTN_MASK_FULL (0), HATTN_MASK_CAUSAL (1), HATTN_MASK_WINDOW (2)";
            Err(Failure::argument("mask", &other.to_string(), allowed))
        }
    }
}

fn arch(given: hattn_arch) -> Outcome<Option<Arch>> {
    match given {
        HATTN_ARCH_OWN => Ok(None),
        HATTN_ARCH_SM80 => Ok(Some(Arch::Sm80)),
        HATTN_ARCH_SM90 => Ok(Some(Arch::Sm90)),
        other => {
            let allowed = "HATTN_ARCH_OWN (0), HATTN_ARCH_SM80 (80), HATTN_ARCH_SM90 (90)";
            Err(Failure::argument("arch", &other.to_string(), allowed))
        }
    }
}

fn dtype(what: &str, given: hattn_dtype) -> Outcome<DType> {
    match given {
        HATTN_F16 => Ok(DType::F16),
        HATTN_BF16 => Ok(DType::BF16),
        HATTN_F32 => Ok(DType::F32),
        HATTN_E4M3 => Ok(DType::E4M3),
        other => {
            let allowed = "HATTN_F16 (1), HATTN_BF16 (2), HATTN_F32 (3), HATTN_E4M3 (4)";
            Err(Failure::argument(what, &format!("dtype {other}"), allowed))
        }
    }
}

fn scaling(given: hattn_scaling) -> Outcome<Scaling> {
    match given {
        HATTN_PER_TENSOR => Ok(Scaling::PerTensor),
        HATTN_PER_HEAD => Ok(Scaling::PerHead),
        HATTN_PER_BLOCK => Ok(Scaling::PerBlock),
        other => {
            let allowed = "HATTN_PER_TENSOR (0), HATTN_PER_HEAD (1), HATTN_PER_BLOCK (2)";
            Err(Failure::argument("scaling", &other.to_string(), allowed))
        }
    }
}

/// A quantiser, with all of the safe crate's checks.
///
/// # Safety
/// The forward problem is as [`read`] asks.
pub(crate) unsafe fn quantizer(given: &hattn_quantize_problem) -> Outcome<Quantizer> {
    // SAFETY: the caller's promise.
    let forward = forward_problem(&unsafe { read("forward", given.forward) }?)?;
    let quantizer = Quantizer::of(&forward, dtype("source", given.source)?)?;
    Ok(if flag("hadamard", given.hadamard, "wanted")? { quantizer.hadamard(given.seed) } else { quantizer })
}

fn reserved(what: &str, set: bool) -> Outcome {
    if set { Err(Failure::argument(what, "a reserved field that is set", "0")) } else { Ok(()) }
}

/// What a forward pass of this problem reads and writes.
///
/// # Safety
/// The tensors are as [`read`] asks.
pub(crate) unsafe fn forward(args: &hattn_forward_args, problem: &ForwardProblem) -> Outcome<RawForward> {
    // SAFETY: the caller's promise.
    unsafe {
        Ok(RawForward {
            q: tensor("q", args.q)?,
            k: tensor("k", args.k)?,
            v: tensor("v", args.v)?,
            o: tensor("o", args.o)?,
            lse: tensor_or_none("lse", args.lse)?,
            fp8: fp8(args, problem)?,
            workspace: workspace(args.workspace, args.workspace_bytes),
        })
    }
}

/// What e4m3 operands have beside them; nothing of it for others.
///
/// # Safety
/// As [`forward`].
unsafe fn fp8(args: &hattn_forward_args, problem: &ForwardProblem) -> Outcome<Option<RawFp8>> {
    if problem.scaling_value().is_none() {
        let given = [
            ("descale_q", args.descale_q),
            ("descale_k", args.descale_k),
            ("descale_v", args.descale_v),
            ("scale_o", args.scale_o),
            ("amax", args.amax),
        ];
        return match given.into_iter().find(|(_, tensor)| !tensor.is_null()) {
            None => Ok(None),
            Some((what, _)) => {
                let allowed = format!("null, since the operands are {}", problem.dtype());
                Err(Error::Value { what, got: "given".into(), allowed }.into())
            }
        };
    }
    // SAFETY: the caller's promise.
    unsafe {
        Ok(Some(RawFp8 {
            descale_q: tensor("descale_q", args.descale_q)?,
            descale_k: tensor("descale_k", args.descale_k)?,
            descale_v: tensor("descale_v", args.descale_v)?,
            scale_o: tensor_or_none("scale_o", args.scale_o)?,
            amax: tensor_or_none("amax", args.amax)?,
        }))
    }
}

/// What a quantiser reads and writes.
///
/// # Safety
/// The structs are as [`read`] asks.
pub(crate) unsafe fn quantize(args: &hattn_quantize_args) -> Outcome<RawQuantize> {
    // SAFETY: the caller's promise.
    unsafe {
        Ok(RawQuantize {
            q: quantize_tensor("q", ["q.values", "q.stored", "q.descale"], args.q)?,
            k: quantize_tensor("k", ["k.values", "k.stored", "k.descale"], args.k)?,
            v: quantize_tensor("v", ["v.values", "v.stored", "v.descale"], args.v)?,
            counts: tensor_or_none("counts", args.counts)?,
            workspace: workspace(args.workspace, args.workspace_bytes),
        })
    }
}

/// # Safety
/// As [`quantize`].
unsafe fn quantize_tensor(
    name: &'static str,
    [values, stored, descale]: [&'static str; 3],
    given: *const hattn_quantize_tensor,
) -> Outcome<Option<RawQuantizeTensor>> {
    if given.is_null() {
        return Ok(None);
    }
    // SAFETY: the caller's promise.
    unsafe {
        let from = read(name, given)?;
        reserved(name, from.reserved != 0)?;
        Ok(Some(RawQuantizeTensor {
            values: tensor(values, from.values)?,
            stored: tensor(stored, from.stored)?,
            descale: tensor(descale, from.descale)?,
            given: flag("given", from.given, "given")?,
        }))
    }
}

/// What a backward pass reads and writes.
///
/// # Safety
/// The tensors are as [`read`] asks.
pub(crate) unsafe fn backward(args: &hattn_backward_args) -> Outcome<RawBackward> {
    // SAFETY: the caller's promise.
    unsafe {
        Ok(RawBackward {
            q: tensor("q", args.q)?,
            k: tensor("k", args.k)?,
            v: tensor("v", args.v)?,
            o: tensor("o", args.o)?,
            lse: tensor("lse", args.lse)?,
            d_o: tensor("d_o", args.d_o)?,
            d_lse: tensor_or_none("d_lse", args.d_lse)?,
            d_q: tensor("d_q", args.d_q)?,
            d_k: tensor("d_k", args.d_k)?,
            d_v: tensor("d_v", args.d_v)?,
            workspace: workspace(args.workspace, args.workspace_bytes),
        })
    }
}

fn workspace(address: *mut c_void, bytes: usize) -> RawWorkspace {
    RawWorkspace { address: address as u64, bytes }
}

/// # Safety
/// As [`read`].
unsafe fn tensor_or_none<const R: usize>(
    name: &'static str,
    given: *const hattn_tensor,
) -> Outcome<Option<RawTensor<R>>> {
    // SAFETY: the caller's promise.
    if given.is_null() { Ok(None) } else { unsafe { tensor(name, given) }.map(Some) }
}

/// # Safety
/// As [`read`].
unsafe fn tensor<const R: usize>(name: &'static str, given: *const hattn_tensor) -> Outcome<RawTensor<R>> {
    // SAFETY: the caller's promise.
    let given = unsafe { read(name, given) }?;
    reserved(name, given.reserved != 0)?;
    let axes = match R {
        1 => "[1]",
        2 => "[q k v, saturated and not finite]",
        3 if name.contains("descale") => "[batch, heads, blocks]",
        3 => "[batch, heads, seqlen]",
        _ => "[batch, seqlen, heads, head_dim]",
    };
    if given.ndim != R as i32 {
        return Err(Failure::argument(name, &format!("ndim {}", given.ndim), format_args!("{R}, {axes}")));
    }
    let (mut shape, mut stride) = ([0; R], [0; R]);
    for axis in 0..R {
        shape[axis] = usize::try_from(given.shape[axis]).map_err(|_| Error::Layout {
            tensor: name,
            got: format!("size {} in dimension {axis}", given.shape[axis]),
            allowed: "0 and above".into(),
        })?;
        stride[axis] = given.stride[axis];
    }
    let named = |error| match error {
        Error::Layout { got, allowed, .. } => Error::Layout { tensor: name, got, allowed },
        other => other,
    };
    let place = ordinal(name, given.device)?.map_or(Place::Cpu, Place::Cuda);
    let layout = Layout::with_strides(shape, stride).map_err(named)?;
    Ok(RawTensor { address: given.data as u64, dtype: dtype(name, given.dtype)?, place, layout })
}
