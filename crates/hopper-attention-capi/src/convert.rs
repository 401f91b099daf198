//! From the ABI's structs to the safe crate's values. The safe crate checks these. What is refused here has no value there,
//! such as an unknown constant.

use std::ffi::c_void;

use arrayvec::ArrayVec;
use hopper_attention::raw::{Place, RawArgs, RawTensor};
use hopper_attention::{
    AlibiSlopes, Arch, BackwardProblem, Bias, BlockMask, Corner, DType, Dims, Dropout, Error, ForwardProblem, Layout,
    Mask, Operand, Operands, Quantizer, Scaling, Slot,
};

use crate::abi::*;
use crate::devices::ordinal;
use crate::status::{Failure, Outcome};

/// The types of 16 and 32 bits, as errors print them.
const WIDE: &str = "HATTN_F16 (1), HATTN_BF16 (2), on the CPU also HATTN_F32 (3)";

/// A forward problem, with all of the safe crate's checks.
pub(crate) fn forward_problem(given: &hattn_forward_problem) -> Outcome<ForwardProblem> {
    problem(given, "HATTN_F16 (1), HATTN_BF16 (2), HATTN_E4M3 (4), on the CPU also HATTN_F32 (3)")
}

/// The forward problem of any pass. `dtypes` are the types of operands that the pass takes, for an error.
fn problem(given: &hattn_forward_problem, dtypes: &str) -> Outcome<ForwardProblem> {
    let length = |what, got| size(what, got, "0 and above");
    let heads = |what, got| size(what, got, "1 and above");
    let head_dim = |what, got| size(what, got, "1 to 2^31 - 1");
    let dims = Dims::new(
        length("batch", given.batch)?,
        length("seqlen_q", given.seqlen_q)?,
        heads("heads_q", given.heads_q)?,
        head_dim("head_dim_qk", given.head_dim_qk)?,
    )
    .with_seqlen_kv(length("seqlen_kv", given.seqlen_kv)?)
    .with_heads_kv(heads("heads_kv", given.heads_kv)?)
    .with_head_dim_vo(head_dim("head_dim_vo", given.head_dim_vo)?);
    let dtype = operand_type(given.dtype).ok_or_else(|| Failure::argument("dtype", given.dtype, dtypes))?;
    let half_scores = flag("half_scores", given.half_scores, "wanted")?;
    let sm_margin = usize::try_from(given.sm_margin).map_err(|_| Error::Value {
        what: "sm_margin",
        got: given.sm_margin.to_string(),
        allowed: "0 and above".into(),
    })?;
    let options = ForwardProblem::builder(dtype, dims);
    let window = [given.window_left, given.window_right];
    let options = options.mask(mask(MASK, given.mask, given.corner, window)?);
    let fill_gaps = flag("fill_gaps", given.fill_gaps, "wanted")?;
    let mut problem = options.half_scores(half_scores).sm_margin(sm_margin).fill_gaps(fill_gaps);
    if given.workspace_limit != 0 {
        problem = problem.workspace_limit(Some(given.workspace_limit));
    }
    if given.max_seqlen_q != 0 {
        problem = problem.max_seqlen_q(length("max_seqlen_q", given.max_seqlen_q)?);
    }
    if given.max_seqlen_kv != 0 {
        problem = problem.max_seqlen_kv(length("max_seqlen_kv", given.max_seqlen_kv)?);
    }
    for (slot, wanted) in given.asked_for() {
        problem = problem.operand(slot, flag(slot.name(), wanted, "wanted")?);
    }
    if given.sinks != 0 {
        let dtype = operand_type(given.sinks).filter(|dtype| matches!(dtype, DType::F32 | DType::BF16));
        let allowed = "0 (none), HATTN_BF16 (2), HATTN_F32 (3)";
        problem = problem.sinks(dtype.ok_or_else(|| Failure::argument("sinks", given.sinks, allowed))?);
    }
    problem = match given.alibi {
        HATTN_ALIBI_NONE => problem,
        HATTN_ALIBI_PER_HEAD => problem.alibi(AlibiSlopes::PerHead),
        HATTN_ALIBI_PER_BATCH => problem.alibi(AlibiSlopes::PerBatch),
        other => {
            let allowed = "HATTN_ALIBI_NONE (0), HATTN_ALIBI_PER_HEAD (1), HATTN_ALIBI_PER_BATCH (2)";
            return Err(Failure::argument("alibi", other, allowed));
        }
    };
    let covered = [length("bias_queries", given.bias_queries)?, length("bias_keys", given.bias_keys)?];
    problem = problem.block_mask(block_mask(given)?).bias(bias(given, &dims, covered)?);
    // -0 is 0 too.
    if given.dropout != 0.0 {
        problem = problem.dropout(Some(Dropout::new(given.dropout)?));
    }
    if given.output != 0 {
        let refuse = || match dtype {
            DType::E4M3 => {
                let allowed = "0, HATTN_F16 (1), HATTN_BF16 (2), HATTN_E4M3 (4)";
                Failure::argument("output", given.output, allowed)
            }
            same => Failure::argument("output", given.output, format_args!("0, {}", constant(same))),
        };
        problem = problem.output(operand_type(given.output).ok_or_else(refuse)?);
    }
    // 0 is what operands without factors have, too.
    if given.scaling != HATTN_PER_TENSOR {
        problem = problem.scaling(scaling(given.scaling)?);
    }
    // -0 is 0 too.
    if given.softmax_scale != 0.0 {
        problem = problem.softmax_scale(given.softmax_scale);
    }
    if let Some(arch) = arch(given.arch)? {
        problem = problem.arch(arch);
    }
    Ok(problem.softcap(given.softcap).build()?)
}

/// A backward problem, with all of the safe crate's checks. All fields but two describe the forward problem.
pub(crate) fn backward_problem(given: &hattn_backward_problem) -> Outcome<BackwardProblem> {
    let d_lse = flag("d_lse", given.d_lse, "given")?;
    let deterministic = flag("deterministic", given.deterministic, "wanted")?;
    let d_sinks = flag("d_sinks", given.d_sinks, "wanted")?;
    let d_bias = flag("d_bias", given.d_bias, "wanted")?;
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
        sm_margin: given.sm_margin,
        workspace_limit: given.workspace_limit,
        fill_gaps: given.fill_gaps,
        cu_seqlens_q: given.cu_seqlens_q,
        cu_seqlens_kv: given.cu_seqlens_kv,
        seqused_q: given.seqused_q,
        seqused_kv: given.seqused_kv,
        max_seqlen_q: given.max_seqlen_q,
        max_seqlen_kv: given.max_seqlen_kv,
        sinks: given.sinks,
        softcap: given.softcap,
        alibi: given.alibi,
        block_mask: given.block_mask,
        block_mask_most_partial: given.block_mask_most_partial,
        bias: given.bias,
        bias_dims: given.bias_dims,
        bias_queries: given.bias_queries,
        bias_keys: given.bias_keys,
        dropout: given.dropout,
        ..Default::default()
    };
    let forward = problem(&forward, WIDE)?;
    let options = BackwardProblem::builder(&forward).d_lse(d_lse).d_sinks(d_sinks).d_bias(d_bias);
    Ok(options.deterministic(deterministic).build()?)
}

fn flag(what: &str, given: i32, yes: &str) -> Outcome<bool> {
    match given {
        0 => Ok(false),
        1 => Ok(true),
        other => Err(Failure::argument(what, other, format_args!("0 (not {yes}), 1 ({yes})"))),
    }
}

/// A size, which is not negative.
pub(crate) fn size(what: &'static str, got: i64, allowed: &str) -> Outcome<usize> {
    Ok(usize::try_from(got).map_err(|_| {
        let got = if got == HATTN_UNSET { "HATTN_UNSET (-1)".into() } else { got.to_string() };
        Error::Value { what, got, allowed: allowed.into() }
    })?)
}

/// What a problem calls its mask, the corner and the two numbers.
pub(crate) const MASK: [&str; 4] = ["mask", "corner", "window_left", "window_right"];

/// A mask, of fields with these names.
pub(crate) fn mask(
    [name, name_of_corner, name_of_left, name_of_right]: [&'static str; 4],
    mask: hattn_mask,
    corner: hattn_corner,
    [left, right]: [i64; 2],
) -> Outcome<Mask> {
    let corner = match corner {
        HATTN_BOTTOM_RIGHT => Corner::BottomRight,
        HATTN_TOP_LEFT => Corner::TopLeft,
        other => {
            let allowed = "HATTN_BOTTOM_RIGHT (0), HATTN_TOP_LEFT (1)";
            return Err(Failure::argument(name_of_corner, other, allowed));
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
    // Of a chunk, or of the prefix.
    let keys = |keys: i64, least: usize| {
        usize::try_from(keys).ok().filter(|&keys| keys >= least).ok_or_else(|| Error::Value {
            what: name_of_left,
            got: keys.to_string(),
            allowed: format!("{least} and above with this mask"),
        })
    };
    match mask {
        HATTN_MASK_FULL => Ok(Mask::Full),
        HATTN_MASK_CAUSAL => Ok(Mask::Causal { corner }),
        HATTN_MASK_WINDOW => {
            Ok(Mask::Window { left: bound(name_of_left, left)?, right: bound(name_of_right, right)?, corner })
        }
        HATTN_MASK_CHUNKED => Ok(Mask::Chunked { chunk: keys(left, 1)?, corner }),
        HATTN_MASK_PREFIX => Ok(Mask::Prefix { keys: keys(left, 0)?, corner }),
        other => {
            let allowed = "HATTN_MASK_FULL (0), HATTN_MASK_CAUSAL (1), HATTN_MASK_WINDOW (2), HATTN_MASK_CHUNKED (3), \
                           HATTN_MASK_PREFIX (4)";
            Err(Failure::argument(name, other, allowed))
        }
    }
}

/// The form of the lists of blocks. `None` where there are none.
fn block_mask(given: &hattn_forward_problem) -> Outcome<Option<BlockMask>> {
    const OPTIONS: hattn_block_mask =
        HATTN_BLOCK_MASK_PER_BATCH | HATTN_BLOCK_MASK_PER_HEAD | HATTN_BLOCK_MASK_FULL_BLOCKS;
    let most = given.block_mask_most_partial;
    let refused = |allowed: &str| Error::Value {
        what: "block_mask_most_partial",
        got: most.to_string(),
        allowed: allowed.into(),
    };
    let has = |flag| given.block_mask & flag != 0;
    match given.block_mask {
        HATTN_BLOCK_MASK_NONE if most != 0 => Err(refused("0 without a block_mask").into()),
        HATTN_BLOCK_MASK_NONE => Ok(None),
        flags if flags & !OPTIONS == HATTN_BLOCK_MASK_LISTS => {
            let most = usize::try_from(most).map_err(|_| refused("0 and above"))?;
            let lists = BlockMask::new(most).per_batch(has(HATTN_BLOCK_MASK_PER_BATCH));
            let lists = lists.per_head(has(HATTN_BLOCK_MASK_PER_HEAD));
            Ok(Some(lists.full_blocks(has(HATTN_BLOCK_MASK_FULL_BLOCKS))))
        }
        other => {
            let allowed = "0, or HATTN_BLOCK_MASK_LISTS (1) with any of HATTN_BLOCK_MASK_PER_BATCH (2), \
                           HATTN_BLOCK_MASK_PER_HEAD (4) and HATTN_BLOCK_MASK_FULL_BLOCKS (8) added";
            Err(Failure::argument("block_mask", other, allowed))
        }
    }
}

/// The flags of a form of lists, as [`block_mask`] reads them.
pub(crate) fn block_mask_flags(form: BlockMask) -> hattn_block_mask {
    let flags = [
        (form.is_per_batch(), HATTN_BLOCK_MASK_PER_BATCH),
        (form.is_per_head(), HATTN_BLOCK_MASK_PER_HEAD),
        (form.has_full_blocks(), HATTN_BLOCK_MASK_FULL_BLOCKS),
    ];
    flags.into_iter().filter(|&(has, _)| has).fold(HATTN_BLOCK_MASK_LISTS, |all, (_, flag)| all | flag)
}

/// The form of the additive bias. `None` where there is none. `covered`: of how many queries and keys of a sequence, 0 where these
/// are all.
fn bias(given: &hattn_forward_problem, dims: &Dims, covered: [usize; 2]) -> Outcome<Option<Bias>> {
    const ALL: hattn_bias_dims = HATTN_BIAS_PER_BATCH | HATTN_BIAS_PER_HEAD | HATTN_BIAS_PER_QUERY;
    let has = |flag| given.bias_dims & flag != 0;
    if given.bias_dims & !ALL != 0 || (given.bias == 0 && given.bias_dims != 0) {
        let allowed = "0, or with a bias any sum of HATTN_BIAS_PER_BATCH (1), HATTN_BIAS_PER_HEAD (2) and HATTN_BIAS_PER_QUERY (4)";
        return Err(Failure::argument("bias_dims", given.bias_dims, allowed));
    }
    if given.bias == 0 {
        if covered != [0; 2] {
            return Err(Failure::argument("bias_queries and bias_keys", format!("{covered:?}"), "0, without a bias"));
        }
        return Ok(None);
    }
    let dtype = operand_type(given.bias).filter(|dtype| *dtype != DType::E4M3);
    let allowed = "0 (none), HATTN_F16 (1), HATTN_BF16 (2), HATTN_F32 (3)";
    let form = Bias::new(dtype.ok_or_else(|| Failure::argument("bias", given.bias, allowed))?);
    let form = form.per_batch(has(HATTN_BIAS_PER_BATCH)).per_head(has(HATTN_BIAS_PER_HEAD));
    let form = form.per_query(has(HATTN_BIAS_PER_QUERY));
    if covered == [0; 2] {
        return Ok(Some(form));
    }
    let or = |covered: usize, all| if covered == 0 { all } else { covered };
    Ok(Some(form.covering(or(covered[0], dims.seqlen_q), or(covered[1], dims.seqlen_kv))))
}

fn arch(given: hattn_arch) -> Outcome<Option<Arch>> {
    match given {
        HATTN_ARCH_OWN => Ok(None),
        HATTN_ARCH_SM80 => Ok(Some(Arch::Sm80)),
        HATTN_ARCH_SM90 => Ok(Some(Arch::Sm90)),
        other => {
            let allowed = "HATTN_ARCH_OWN (0), HATTN_ARCH_SM80 (80), HATTN_ARCH_SM90 (90)";
            Err(Failure::argument("arch", other, allowed))
        }
    }
}

/// The element type of Q, K, V or O that a constant stands for. `None` for any other number.
fn operand_type(given: hattn_dtype) -> Option<DType> {
    dtype_of(given).filter(|&dtype| dtype != DType::I32)
}

/// The element type that a constant stands for. `None` for any other number.
fn dtype_of(given: hattn_dtype) -> Option<DType> {
    match given {
        HATTN_F16 => Some(DType::F16),
        HATTN_BF16 => Some(DType::BF16),
        HATTN_F32 => Some(DType::F32),
        HATTN_E4M3 => Some(DType::E4M3),
        HATTN_I32 => Some(DType::I32),
        _ => None,
    }
}

/// The constant of an element type, as errors print it.
fn constant(dtype: DType) -> &'static str {
    match dtype {
        DType::F16 => "HATTN_F16 (1)",
        DType::BF16 => "HATTN_BF16 (2)",
        DType::F32 => "HATTN_F32 (3)",
        DType::E4M3 => "HATTN_E4M3 (4)",
        DType::I32 => "HATTN_I32 (5)",
        // A type that was added to the safe crate and forgotten here.
        other => other.name(),
    }
}

fn scaling(given: hattn_scaling) -> Outcome<Scaling> {
    match given {
        HATTN_PER_TENSOR => Ok(Scaling::PerTensor),
        HATTN_PER_HEAD => Ok(Scaling::PerHead),
        HATTN_PER_BLOCK => Ok(Scaling::PerBlock),
        other => {
            let allowed = "HATTN_PER_TENSOR (0), HATTN_PER_HEAD (1), HATTN_PER_BLOCK (2)";
            Err(Failure::argument("scaling", other, allowed))
        }
    }
}

/// A quantiser, with all of the safe crate's checks.
///
/// # Safety
/// The forward problem is as [`read`] asks.
pub(crate) unsafe fn quantizer(given: &hattn_quantize_problem) -> Outcome<Quantizer> {
    // SAFETY: the caller's promise.
    let forward = problem(&unsafe { read("forward", given.forward) }?, constant(DType::E4M3))?;
    let source = operand_type(given.source).ok_or_else(|| Failure::argument("source", given.source, WIDE))?;
    let quantizer = Quantizer::builder(&forward, source);
    let hadamard = flag("hadamard", given.hadamard, "wanted")?;
    Ok(if hadamard { quantizer.hadamard(given.seed) } else { quantizer }.build()?)
}

fn not_null<T: Versioned>(what: &str, pointer: *const T) -> Outcome {
    let allowed = format_args!("a pointer to a {}", T::LAYOUT.name);
    if pointer.is_null() { Err(Failure::argument(what, "a null pointer", allowed)) } else { Ok(()) }
}

/// The arguments of a run, from the tensors and the workspace of a struct.
///
/// A null pointer is a tensor that is not given. It is refused here only if every problem of the pass has that operand.
///
/// # Safety
/// The tensors are null or as [`read`] asks.
unsafe fn arguments(
    tensors: impl IntoIterator<Item = (Slot, *const hattn_tensor)>,
    operands: &Operands,
    workspace: *mut c_void,
    workspace_bytes: usize,
) -> Outcome<RawArgs> {
    let mut args = RawArgs::new().with_workspace(workspace as u64, workspace_bytes);
    for (slot, given) in tensors {
        let Some(operand) = operands.find(slot) else {
            // No pass has a pointer in its arguments that is no operand of its problems.
            return Err(Failure::argument(slot.name(), "given", "the tensors of the problem"));
        };
        if given.is_null() && !operand.is_always_required() {
            continue;
        }
        // SAFETY: the caller's promise; null is refused.
        args = args.with(slot, unsafe { tensor(operand, given) }?);
    }
    Ok(args)
}

/// The arguments of a forward pass.
///
/// # Safety
/// As [`arguments`].
pub(crate) unsafe fn forward_arguments(args: &hattn_forward_args, operands: &Operands) -> Outcome<RawArgs> {
    // SAFETY: the caller's promise.
    unsafe { arguments(args.tensors(), operands, args.workspace, args.workspace_bytes) }
}

/// The arguments of a backward pass.
///
/// # Safety
/// As [`arguments`].
pub(crate) unsafe fn backward_arguments(args: &hattn_backward_args, operands: &Operands) -> Outcome<RawArgs> {
    // SAFETY: the caller's promise.
    unsafe { arguments(args.tensors(), operands, args.workspace, args.workspace_bytes) }
}

/// The arguments of a quantiser.
///
/// # Safety
/// The structs are null or as [`read`] asks.
pub(crate) unsafe fn quantize_arguments(args: &hattn_quantize_args, operands: &Operands) -> Outcome<RawArgs> {
    // A run allocates nothing.
    let mut tensors = ArrayVec::<_, 14>::new();
    tensors.push((Slot::Counts, args.counts));
    tensors.extend([
        (Slot::CuSeqlensQ, args.cu_seqlens_q),
        (Slot::CuSeqlensKv, args.cu_seqlens_kv),
        (Slot::SequsedQ, args.seqused_q),
        (Slot::SequsedKv, args.seqused_kv),
    ]);
    for (name, is_given, given, slots) in [
        ("q", "q.given", args.q, [Slot::QValues, Slot::QStored, Slot::QDescale, Slot::QDescaleGiven]),
        ("k", "k.given", args.k, [Slot::KValues, Slot::KStored, Slot::KDescale, Slot::KDescaleGiven]),
        ("v", "v.given", args.v, [Slot::VValues, Slot::VStored, Slot::VDescale, Slot::VDescaleGiven]),
    ] {
        if given.is_null() {
            continue;
        }
        // SAFETY: the caller's promise.
        let from = unsafe { read(name, given) }?;
        let [values, stored, written, read] = slots;
        let descale = if flag(is_given, from.given, "given")? { read } else { written };
        for (slot, tensor) in [(values, from.values), (stored, from.stored), (descale, from.descale)] {
            not_null(slot.name(), tensor)?;
            tensors.push((slot, tensor));
        }
    }
    // SAFETY: the caller's promise.
    unsafe { arguments(tensors, operands, args.workspace, args.workspace_bytes) }
}

/// # Safety
/// As [`read`].
unsafe fn tensor(operand: &Operand, given: *const hattn_tensor) -> Outcome<RawTensor> {
    let slot = operand.slot();
    // SAFETY: the caller's promise.
    let given = unsafe { read(slot.name(), given) }?;
    match operand.shape().len() {
        1 => ranked::<1>(operand, &given),
        2 => ranked::<2>(operand, &given),
        3 => ranked::<3>(operand, &given),
        _ => ranked::<4>(operand, &given),
    }
}

fn ranked<const R: usize>(operand: &Operand, given: &hattn_tensor) -> Outcome<RawTensor> {
    let (name, axes) = (operand.slot().name(), operand.axes());
    if given.ndim != R as i32 {
        return Err(Failure::argument(name, format_args!("ndim {}", given.ndim), format_args!("{R}, {axes}")));
    }
    let shape = shape::<R>(name, given)?;
    let stride = std::array::from_fn(|axis| given.stride[axis]);
    let place = ordinal(name, format_args!("device {}", given.device), given.device)?.map_or(Place::Cpu, Place::Cuda);
    let layout = Layout::with_strides(shape, stride).map_err(|error| named(name, error))?;
    let dtype = dtype_of(given.dtype)
        .ok_or_else(|| Failure::argument(name, format_args!("dtype {}", given.dtype), constant(operand.dtype())))?;
    Ok(RawTensor::new(given.data.expose_provenance() as u64, dtype, place, layout))
}

/// The first `R` sizes of a tensor.
fn shape<const R: usize>(name: &'static str, given: &hattn_tensor) -> Outcome<[usize; R]> {
    let mut shape = [0; R];
    for (axis, (size, &from)) in shape.iter_mut().zip(&given.shape).enumerate() {
        *size = usize::try_from(from).map_err(|_| Error::Layout {
            tensor: name,
            got: format!("size {from} in dimension {axis}"),
            allowed: "0 and above".into(),
        })?;
    }
    Ok(shape)
}

/// An error of a layout, with the name of the tensor that has it.
fn named(name: &'static str, error: Error) -> Error {
    match error {
        Error::Layout { got, allowed, .. } => Error::Layout { tensor: name, got, allowed },
        other => other,
    }
}

/// The strides that the sizes of a tensor give if its memory is row-major without gaps. Entries from `ndim` on are those of
/// the tensor.
pub(crate) fn contiguous_stride(name: &'static str, given: &hattn_tensor) -> Outcome<[i64; 4]> {
    fn of<const R: usize>(name: &'static str, given: &hattn_tensor) -> Outcome<[i64; 4]> {
        let layout = Layout::contiguous(shape::<R>(name, given)?).map_err(|error| named(name, error))?;
        let mut stride = given.stride;
        stride[..R].copy_from_slice(&layout.stride());
        Ok(stride)
    }
    match given.ndim {
        1 => of::<1>(name, given),
        2 => of::<2>(name, given),
        3 => of::<3>(name, given),
        4 => of::<4>(name, given),
        other => Err(Failure::argument(name, format_args!("ndim {other}"), "1 to 4")),
    }
}
