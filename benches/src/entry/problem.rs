//! From the entry's arguments to problems of the library, and from its errors to the entry's.

use hopper_attention::{Corner, DType, Dims, Error, ForwardProblem, Mask};
use hopper_attention_capi as capi;

use super::{FAILED, INVALID, Key, Refused, UNSUPPORTED};

/// The forward problem of a key, its LSE aside.
pub(super) fn forward(key: &Key) -> hopper_attention::Result<ForwardProblem> {
    let value = |what, got: i32, allowed: &str| Error::Value { what, got: got.to_string(), allowed: allowed.into() };
    let size = |what, at: usize| usize::try_from(key.sizes[at]).map_err(|_| value(what, key.sizes[at], "0 and above"));
    let dims = Dims {
        batch: size("batch", 0)?,
        seqlen_q: size("seqlen_q", 1)?,
        seqlen_kv: size("seqlen_kv", 2)?,
        heads_q: size("heads_q", 3)?,
        heads_kv: size("heads_kv", 4)?,
        head_dim_qk: size("head_dim_qk", 5)?,
        head_dim_vo: size("head_dim_vo", 6)?,
    };
    let dtype = match key.dtype {
        capi::HATTN_F16 => DType::F16,
        capi::HATTN_BF16 => DType::BF16,
        capi::HATTN_E4M3 => DType::E4M3,
        other => return Err(value("dtype", other, "f16, bf16 and e4m3 of the C ABI")),
    };
    let [mask, corner, left, right] = key.mask;
    let corner = match corner {
        capi::HATTN_BOTTOM_RIGHT => Corner::BottomRight,
        capi::HATTN_TOP_LEFT => Corner::TopLeft,
        other => return Err(value("corner", other, "0 (bottom-right), 1 (top-left)")),
    };
    let bound = |what, keys: i32| match usize::try_from(keys) {
        Ok(keys) => Ok(Some(keys)),
        Err(_) if i64::from(keys) == capi::HATTN_UNBOUNDED => Ok(None),
        Err(_) => Err(value(what, keys, "0 and above, -1 (without bound)")),
    };
    let mask = match mask {
        capi::HATTN_MASK_FULL => Mask::Full,
        capi::HATTN_MASK_CAUSAL => Mask::Causal { corner },
        capi::HATTN_MASK_WINDOW => {
            Mask::Window { left: bound("window_left", left)?, right: bound("window_right", right)?, corner }
        }
        other => return Err(value("mask", other, "0 (full), 1 (causal), 2 (window)")),
    };
    let problem = ForwardProblem::new(dtype, dims)?.mask(mask).softmax_scale(f32::from_bits(key.scale_bits))?;
    Ok(match key.arch {
        Some(arch) => problem.arch(arch),
        None => problem,
    })
}

/// The entry's status and words for an error of the library.
pub(super) fn told(error: Error) -> Refused {
    let status = match error {
        Error::Unsupported { .. } => UNSUPPORTED,
        Error::Shape { .. }
        | Error::Layout { .. }
        | Error::Dtype { .. }
        | Error::Value { .. }
        | Error::Workspace { .. }
        | Error::Device { .. } => INVALID,
        _ => FAILED,
    };
    (status, error.to_string())
}
