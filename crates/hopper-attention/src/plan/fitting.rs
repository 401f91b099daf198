//! Which kernels compute a problem on a GPU.
//!
//! The rows of the kernel table pass one filter after another. There is one filter for each reason why a kernel may not fit.
//! An error names the first filter that leaves no row, and what the rows before it have.

use super::target::Target;
use crate::arch::{Arch, DeviceFacts, MaskClass, Pass};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::mask::Band;
use crate::problem::ForwardProblem;
use crate::table::KernelInfo;

/// Kernels move the vectors of Q, K, V and O (`head_dim` elements) in steps of this many bytes.
const TMA_BYTES: usize = 16;

/// The most tiles, or shares of tiles, of a launch. CTAs count on where the list of tiles ends: each of a grid's CTAs looks at an
/// index or two past it. So 2^20 numbers are left below 2^31.
pub(super) const MOST_TILES: i32 = i32::MAX - (1 << 20);
/// The same in words.
pub(super) const MOST_TILES_TEXT: &str = "below 2^31 - 2^20";

/// A count of tiles, unless there are too many.
pub(super) fn tile_count(per_head: usize, heads: usize) -> Option<i32> {
    let tiles = per_head.checked_mul(heads).and_then(|tiles| i32::try_from(tiles).ok())?;
    (tiles < MOST_TILES).then_some(tiles)
}

/// The class of a problem's mask. It follows from the keys that the mask keeps, not from the variant of [`Mask`](crate::Mask): a
/// causal mask with one query keeps every key, so the class is `Full`. Lists of blocks are a class of their own.
pub fn mask_class(problem: &ForwardProblem) -> MaskClass {
    let dims = problem.dims();
    if problem.block_mask().is_some() {
        return MaskClass::Blocks;
    }
    let band = band(problem, dims.seqlen_q, dims.seqlen_kv);
    match (band.left, band.right, band.chunk, band.prefix) {
        (None, None, None, 0) => MaskClass::Full,
        (None, Some(_), None, 0) => MaskClass::Causal,
        _ => MaskClass::Window,
    }
}

/// The problem's mask as intervals of keys. Where the kernels know the lengths of sequences, and not the plan, it serves all
/// sequences of up to so many queries and keys, which have offsets of their own.
pub(super) fn band(problem: &ForwardProblem, seqlen_q: usize, seqlen_kv: usize) -> Band {
    let mask = problem.mask();
    if problem.has_lengths() { mask.band_of_sequences(seqlen_q, seqlen_kv) } else { mask.band(seqlen_q, seqlen_kv) }
}

/// The rows of a pass that compute the problem on the GPU. The list is never empty.
///
/// They are of one instruction set: the one that the problem asks for, or else the newest that has any. So a GPU of sm_90 computes by
/// sm80 kernels what no sm90 kernel computes.
///
/// # Errors
/// [`Error::Unsupported`] of [`fitting_of`], for the newest instruction set that the GPU runs.
pub(super) fn fitting<'a>(
    pass: Pass,
    problem: &ForwardProblem,
    gpu: &DeviceFacts,
    rows: &'a [KernelInfo],
) -> Result<Vec<&'a KernelInfo>> {
    let newest = fitting_of(problem.arch(), pass, problem, gpu, rows);
    if newest.is_ok() || problem.arch().is_some() {
        return newest;
    }
    newest.or_else(|error| fitting_of(Some(Arch::Sm80), pass, problem, gpu, rows).map_err(|_| error))
}

/// The rows of an instruction set, or of the newest that the GPU runs. The filters, in this order:
/// 1. instruction set: the GPU runs it;
/// 2. instruction set: `arch`, or else the newest of those left;
/// 3. element type of Q, K and V;
/// 4. packed sequences and used lengths: the kernel takes them, if the problem has any;
/// 5. what is done to scores or weights or read of them (softcap, ALiBi, a bias, the maximum logit, dropout): the kernel takes
///    such problems, or problems without any of it;
/// 6. softcap together with ALiBi or a bias: the kernel is not of the sm80 backward, and with a bias of no backward;
/// 7. scores in f16: only if the problem allows them;
/// 8. mask class: the kernel computes masks of the problem's class, and with lists of blocks, dropout and a bias it is not of the
///    sm90 forward;
/// 9. head dims: the kernel's are at least the problem's, and the problem's are multiples of 16 bytes;
/// 10. dropout, and a bias: the kernel takes it;
/// 11. shared memory: the GPU gives a CTA as much as the kernel asks for;
/// 12. mask class: no kernel that is left has the same head dims and a narrower class.
///
/// # Errors
/// [`Error::Unsupported`] naming the first filter that leaves no row.
fn fitting_of<'a>(
    arch: Option<Arch>,
    pass: Pass,
    problem: &ForwardProblem,
    gpu: &DeviceFacts,
    rows: &'a [KernelInfo],
) -> Result<Vec<&'a KernelInfo>> {
    let dims = problem.dims();
    let dtype = problem.dtype();
    if rows.is_empty() {
        // A build with few features may have the kernels of one pass alone.
        let (kernels, other) = match pass {
            Pass::Forward => ("GPU kernels", "CUDA"),
            Pass::Backward => ("backward kernels", "such kernels: CUDA, and a head dim up to 128"),
        };
        return Err(unsupported(
            format!("{gpu}, in a build without {kernels}"),
            format!("the CPU, or a build with {other}"),
        ));
    }
    let rows: Vec<_> = rows.iter().collect();
    let rows = filter_rows(
        rows,
        |row| row.arch.runs_on(gpu.arch),
        |rows| {
            // Say "backward", because the same GPU may have kernels for the forward pass.
            let what = if is_backward(rows) { "backward kernels for a GPU" } else { "a GPU" };
            (format!("{what} of {}", gpu.arch), list(rows, |row| arch_name(row.arch)))
        },
    )?;
    let latest = rows.iter().map(|row| row.arch).max();
    let rows = filter_rows(
        rows,
        |row| arch.or(latest) == Some(row.arch),
        |rows| {
            let arch = arch.map_or(String::new(), |arch| arch.to_string());
            let pass = if is_backward(rows) { "backward " } else { "" };
            (format!("{pass}{arch} kernels on a GPU of {}", gpu.arch), list(rows, |row| row.arch.to_string()))
        },
    )?;
    let rows = filter_rows(
        rows,
        |row| row.dtype == dtype,
        |rows| (format!("{dtype} operands on a GPU"), list(rows, |row| row.dtype.to_string())),
    )?;
    let rows = filter_rows(
        rows,
        |row| row.packs || !problem.has_lengths(),
        |rows| {
            let wanted = format!("packed sequences or used lengths with {}", kernels_of(rows, dtype));
            (wanted, "Device::cpu(), or one problem for each length".into())
        },
    )?;
    let modifiers = modifiers(problem);
    let modified = !modifiers.is_empty();
    let rows = filter_rows(
        rows,
        |row| if modified { row.takes_modifiers() } else { !row.needs_modifiers() },
        |rows| {
            let kernels = kernels_of(rows, dtype);
            match modified {
                true => {
                    let (with, names): (Vec<_>, Vec<_>) = modifiers.iter().cloned().unzip();
                    (
                        format!("{} with {kernels}", with.join(" and ")),
                        format!("no {}, or Device::cpu()", names.join(", ")),
                    )
                }
                false => (
                    format!("{kernels} without softcap, alibi, bias, max_logits and dropout"),
                    "with one of them".into(),
                ),
            }
        },
    )?;
    // The sm80 backward has no registers for both.
    let cap_and_alibi = problem.softcap() != 0.0 && problem.alibi().is_some();
    let rows = filter_rows(
        rows,
        |row| !(cap_and_alibi && row.pass == Pass::Backward && row.arch == Arch::Sm80),
        |_| {
            let wanted = format!("softcap and alibi together with backward {} kernels for {dtype}", Arch::Sm80);
            (wanted, format!("one of the two, {} kernels, or Device::cpu()", Arch::Sm90))
        },
    )?;
    let cap_and_bias = problem.softcap() != 0.0 && problem.bias().is_some();
    let rows = filter_rows(
        rows,
        |row| !(cap_and_bias && row.pass == Pass::Backward),
        |rows| {
            let wanted = format!("softcap and a bias together with {}", kernels_of(rows, dtype));
            (wanted, "one of the two, or Device::cpu()".into())
        },
    )?;
    // A problem that allows scores in f16 may also be computed with scores in f32.
    let rows = filter_rows(
        rows,
        |row| row.scores != DType::F16 || problem.allows_half_scores(),
        |_| (format!("{dtype} operands without half_scores on a GPU"), "with half_scores".into()),
    )?;
    let class = mask_class(problem);
    let rows = filter_rows(
        rows,
        |row| computes_masks_of(row.mask, class),
        |rows| (format!("mask class {class} for {dtype}"), list(rows, |row| row.mask.to_string())),
    )?;
    // The sm90 forward has no registers for both beside lists of blocks.
    let drops_beside_bias = problem.drops().is_some() && problem.bias().is_some();
    let rows = filter_rows(
        rows,
        |row| {
            let is_listed = row.mask == MaskClass::Blocks && row.pass == Pass::Forward && row.arch == Arch::Sm90;
            !(drops_beside_bias && is_listed)
        },
        |_| {
            let wanted = format!("dropout and a bias together with {} kernels for {dtype}, blocks", Arch::Sm90);
            (wanted, format!("one of the two, {} kernels, or Device::cpu()", Arch::Sm80))
        },
    )?;
    let (qk, vo) = (dims.head_dim_qk, dims.head_dim_vo);
    let rows = filter_rows(
        rows,
        |row| row.head_dim_qk >= qk && row.head_dim_vo >= vo,
        |rows| {
            // The other pass, and the other instruction set, may have larger ones.
            let pass = if is_backward(rows) { "a backward pass of " } else { "" };
            let arch = list(rows, |row| row.arch.to_string());
            let wanted = format!("head_dim_qk {qk} with head_dim_vo {vo} for {pass}{dtype}, {class}, on {arch}");
            (wanted, list(rows, |row| format!("up to {} with {}", row.head_dim_qk, row.head_dim_vo)))
        },
    )?;
    let packed = problem.has_lengths();
    let rows = filter_rows(
        rows,
        |row| problem.drops().is_none() || row.drops(packed),
        |rows| {
            let sequences = if packed { ", packed" } else { "" };
            let wanted = format!("dropout with {}, {class}{sequences}, head_dim {qk}/{vo}", kernels_of(rows, dtype));
            (wanted, "no dropout, or Device::cpu()".into())
        },
    )?;
    let rows = filter_rows(
        rows,
        |row| problem.bias().is_none() || row.adds_bias(packed),
        |rows| {
            let sequences = if packed { ", packed" } else { "" };
            let wanted = format!("a bias with {}, {class}{sequences}, head_dim {qk}/{vo}", kernels_of(rows, dtype));
            (wanted, "no bias, or Device::cpu()".into())
        },
    )?;
    let step = TMA_BYTES / dtype.bytes();
    for (what, got) in [("head_dim_qk", qk), ("head_dim_vo", vo)] {
        if !got.is_multiple_of(step) {
            let nearest =
                format!("{} (multiples of {step}: GPU rows are moved in 16-byte steps)", nearest_step(got, step));
            return Err(unsupported(format!("{what} {got} on a GPU"), nearest));
        }
    }
    let rows = filter_rows(
        rows,
        |row| row.runs_on(gpu),
        |rows| {
            let least = rows.iter().map(|row| row.smem_bytes).min().unwrap_or(0);
            let wanted = format!("{least} bytes of shared memory a block, which the smallest kernel for this asks for");
            (wanted, format!("{} bytes on this GPU", gpu.smem_bytes_per_block))
        },
    )?;
    let narrower = |row: &KernelInfo, than: &KernelInfo| {
        (row.head_dim_qk, row.head_dim_vo) == (than.head_dim_qk, than.head_dim_vo)
            && row.mask != than.mask
            && computes_masks_of(than.mask, row.mask)
    };
    Ok(rows.iter().copied().filter(|row| !rows.iter().any(|other| narrower(other, row))).collect())
}

/// Whether kernels of a class compute masks of another. A full mask is a causal one whose diagonal is past the last key, and both
/// are windows without an end.
fn computes_masks_of(kernel: MaskClass, mask: MaskClass) -> bool {
    match mask {
        MaskClass::Full => kernel != MaskClass::Blocks,
        MaskClass::Causal => kernel == MaskClass::Causal || kernel == MaskClass::Window,
        other => kernel == other,
    }
}

/// What a problem does to its scores or weights or reads of them, with and without numbers.
fn modifiers(problem: &ForwardProblem) -> Vec<(String, &'static str)> {
    let softcap = problem.softcap();
    let all = [
        (softcap != 0.0, format!("softcap {softcap}"), "softcap"),
        (problem.alibi().is_some(), "alibi".into(), "alibi"),
        (problem.bias().is_some(), "a bias".into(), "bias"),
        (problem.wants_max_logits(), "max_logits".into(), "max_logits"),
        (problem.drops().is_some(), problem.drops().map_or(String::new(), |dropout| dropout.to_string()), "dropout"),
    ];
    all.into_iter().filter(|(is_there, ..)| *is_there).map(|(_, with, name)| (with, name)).collect()
}

/// The target of a plan for the CPU. A problem that asks for a GPU's instruction set is refused.
pub(super) fn cpu<C>(problem: &ForwardProblem) -> Result<Target<C>> {
    match problem.arch() {
        None => Ok(Target::Cpu),
        Some(arch) => Err(unsupported(format!("{arch} kernels on the CPU"), format!("a GPU of {}", arch_name(arch)))),
    }
}

/// Refuses a kernel that is not a row of the table of `pass`. A launch uses the row's index alone, so the index must be right.
#[cfg(feature = "cuda")]
pub(super) fn check_row(row: &KernelInfo, pass: Pass) -> Result<()> {
    if row.pass == pass && row.is_in_table() {
        return Ok(());
    }
    let table = match pass {
        Pass::Forward => "kernels()",
        Pass::Backward => "backward_kernels()",
    };
    Err(Error::Value { what: "row", got: row.to_string(), allowed: format!("a row of {table}") })
}

/// The rows for which `keep` is true. If there is none, `name` makes the texts of the error (what was wanted, and the nearest
/// that exists) from the rows before the filter.
fn filter_rows(
    rows: Vec<&KernelInfo>,
    keep: impl Fn(&KernelInfo) -> bool,
    name: impl FnOnce(&[&KernelInfo]) -> (String, String),
) -> Result<Vec<&KernelInfo>> {
    let kept: Vec<_> = rows.iter().copied().filter(|row| keep(row)).collect();
    if kept.is_empty() {
        let (wanted, nearest) = name(&rows);
        return Err(unsupported(wanted, nearest));
    }
    Ok(kept)
}

fn is_backward(rows: &[&KernelInfo]) -> bool {
    rows.iter().all(|row| row.pass == Pass::Backward)
}

/// What the rows are called in an error that says what they lack.
fn kernels_of(rows: &[&KernelInfo], dtype: DType) -> String {
    let pass = if is_backward(rows) { "backward " } else { "" };
    format!("{pass}{} kernels for {dtype}", list(rows, |row| row.arch.to_string()))
}

/// The names of the rows, each once, in the order of the rows.
fn list(rows: &[&KernelInfo], name: impl Fn(&KernelInfo) -> String) -> String {
    let mut names: Vec<String> = Vec::new();
    for row in rows {
        let name = name(row);
        if !names.contains(&name) {
            names.push(name);
        }
    }
    names.join(", ")
}

fn arch_name(arch: Arch) -> String {
    match arch {
        Arch::Sm80 => "sm_80 and later".into(),
        Arch::Sm90 => "sm_90".into(),
    }
}

/// The multiple of `step` that is nearest to `got`, but not 0.
fn nearest_step(got: usize, step: usize) -> usize {
    let below = got / step * step;
    if below > 0 && got - below < step.div_ceil(2) { below } else { below.saturating_add(step) }
}

pub(super) fn unsupported(wanted: String, nearest: String) -> Error {
    Error::Unsupported { wanted, nearest }
}
