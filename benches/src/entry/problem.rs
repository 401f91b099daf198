//! From the entry's numbers to problems of the library, and from its errors to the entry's.

use hopper_attention::{Corner, DType, Dims, Error, ForwardProblem, ForwardProblemBuilder, Mask};

use super::{FAILED, INVALID, Numbers, Packing, Refused, UNSUPPORTED, arch, sm_margin};

/// A number that the header has no meaning for.
pub(super) fn refused(what: &str, got: i32, allowed: &str) -> Refused {
    Refused(INVALID, format!("{what}: {got}; allowed: {allowed}"))
}

/// A size.
pub(super) fn size(what: &str, size: i32) -> Result<usize, Refused> {
    usize::try_from(size).map_err(|_| refused(what, size, "0 and above"))
}

impl Numbers {
    /// The forward problem, with the options that all structs have.
    pub(super) fn forward(&self, dtype: DType, packing: Packing) -> Result<ForwardProblemBuilder, Refused> {
        let dims = Dims::new(
            size("batch", self.batch)?,
            size("seqlen_q", self.seqlen_q)?,
            size("heads_q", self.heads_q)?,
            size("head_dim_qk", self.head_dim_qk)?,
        )
        .with_seqlen_kv(size("seqlen_kv", self.seqlen_kv)?)
        .with_heads_kv(size("heads_kv", self.heads_kv)?)
        .with_head_dim_vo(size("head_dim_vo", self.head_dim_vo)?);
        let options = ForwardProblem::builder(dtype, dims).mask(self.mask()?).softmax_scale(self.softmax_scale);
        let mut options = options.softcap(self.softcap).sm_margin(sm_margin()?);
        if !packing.cu_seqlens.is_null() {
            let longest = size("longest", packing.longest)?;
            options = options.packed(true).max_seqlen_q(longest).max_seqlen_kv(longest);
        }
        Ok(match arch()? {
            Some(arch) => options.arch(arch),
            None => options,
        })
    }

    /// The type of a forward and a backward.
    pub(super) fn sixteen_bits(&self) -> Result<DType, Refused> {
        match self.dtype {
            0 => Ok(DType::F16),
            1 => Ok(DType::BF16),
            other => Err(refused("dtype", other, "0 (f16), 1 (bf16)")),
        }
    }

    fn mask(&self) -> Result<Mask, Refused> {
        let corner = match self.corner {
            0 => Corner::BottomRight,
            1 => Corner::TopLeft,
            other => return Err(refused("corner", other, "0 (bottom-right), 1 (top-left)")),
        };
        let bound = |what, keys: i32| match usize::try_from(keys) {
            Ok(keys) => Ok(Some(keys)),
            Err(_) if keys == -1 => Ok(None),
            Err(_) => Err(refused(what, keys, "0 and above, -1 (without bound)")),
        };
        match self.mask {
            0 => Ok(Mask::Full),
            1 => Ok(Mask::Causal { corner }),
            2 => {
                let (left, right) =
                    (bound("window_left", self.window_left)?, bound("window_right", self.window_right)?);
                Ok(Mask::Window { left, right, corner })
            }
            other => Err(refused("mask", other, "0 (full), 1 (causal), 2 (window)")),
        }
    }
}

impl From<Error> for Refused {
    fn from(error: Error) -> Self {
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
        Self(status, error.to_string())
    }
}
