//! A problem with its inputs, and random ones.

use std::fmt;

use hopper_attention::{DType, Dims, ForwardProblem, ForwardProblemBuilder, Mask};

use crate::alibi::Alibi;
use crate::bias::{Bias, BiasImage};
use crate::blocks::{Blocks, BlocksImage};
use crate::data::Values;
use crate::dropout;
use crate::layouts::Placement;
use crate::packing::{Packing, longest};
use crate::sinks::Sinks;

pub mod random;

/// A problem with its inputs, for every element type.
#[derive(Clone, Debug, PartialEq)]
pub struct Case {
    /// The sizes.
    pub dims: Dims,
    /// The mask.
    pub mask: Mask,
    /// The softmax scale, where it is not the default.
    pub scale: Option<f32>,
    /// Whether the LSE is asked for.
    pub lse: bool,
    /// Where the tensors lie.
    pub placement: Placement,
    /// What the inputs hold.
    pub values: Values,
    /// Of the values.
    pub seed: u64,
    /// Packed sequences and used lengths.
    pub packing: Packing,
    /// Attention sinks.
    pub sinks: Sinks,
    /// The cap of the scores. 0 where there is none.
    pub softcap: f32,
    /// ALiBi slopes.
    pub alibi: Alibi,
    /// Whether the maximum logits are asked for. Gradients have no use for them.
    pub max_logits: bool,
    /// Lists of blocks, beside the mask.
    pub blocks: Blocks,
    /// The additive bias.
    pub bias: Bias,
    /// The probability with which dropout makes a weight 0. 0 where there is no dropout.
    pub dropout: f32,
}

impl Case {
    /// One sequence, two query heads on one key head, everything else plain.
    pub fn new(seqlen_q: usize, seqlen_kv: usize, head_dim: usize, mask: Mask) -> Self {
        let dims = Dims::new(1, seqlen_q, 2, head_dim).with_seqlen_kv(seqlen_kv).with_heads_kv(1);
        Self {
            dims,
            mask,
            scale: None,
            lse: true,
            placement: Placement::Bshd,
            values: Values::Normal,
            seed: (seqlen_q * 31 + seqlen_kv * 7 + head_dim) as u64,
            packing: Packing::default(),
            sinks: Sinks::None,
            softcap: 0.0,
            alibi: Alibi::None,
            max_logits: false,
            blocks: Blocks::None,
            bias: Bias::NONE,
            dropout: 0.0,
        }
    }

    /// The same with other heads and batch.
    #[must_use]
    pub fn heads(mut self, batch: usize, heads_q: usize, heads_kv: usize) -> Self {
        self.dims = self.dims.with_batch(batch).with_heads_q(heads_q).with_heads_kv(heads_kv);
        self
    }

    /// The same with another head dim of V and O.
    #[must_use]
    pub fn head_dim_vo(mut self, head_dim_vo: usize) -> Self {
        self.dims = self.dims.with_head_dim_vo(head_dim_vo);
        self
    }

    /// The same with capped scores.
    #[must_use]
    pub fn softcap(mut self, softcap: f32) -> Self {
        self.softcap = softcap;
        self
    }

    /// The same with ALiBi.
    #[must_use]
    pub fn alibi(mut self, alibi: Alibi) -> Self {
        self.alibi = alibi;
        self
    }

    /// The same with the maximum logits as an output, or without.
    #[must_use]
    pub fn max_logits(mut self, wanted: bool) -> Self {
        self.max_logits = wanted;
        self
    }

    /// The same with lists of blocks.
    #[must_use]
    pub fn blocks(mut self, blocks: Blocks) -> Self {
        self.blocks = blocks;
        self
    }

    /// The same with an additive bias.
    #[must_use]
    pub fn bias(mut self, bias: Bias) -> Self {
        self.bias = bias;
        self
    }

    /// The numbers of the bias, where there is one.
    pub fn biases(&self) -> Option<BiasImage> {
        self.bias.image_of(self.dims, self.covering(), &self.sequences(), self.mask, self.seed)
    }

    /// Memory for the gradient of the bias, where there is one.
    pub fn bias_gradient(&self) -> Option<BiasImage> {
        self.bias.gradient(self.dims, self.covering(), self.seed)
    }

    /// How many queries and keys each sequence has.
    fn sequences(&self) -> Vec<[usize; 2]> {
        self.packing.sequences(self.dims).expect("legal sizes")
    }

    /// How many queries and keys the bias has numbers for, where sequences are packed: as many as the longest has, or a few more.
    fn covering(&self) -> Option<[usize; 2]> {
        let packed = [&self.packing.cu_seqlens_q, &self.packing.cu_seqlens_kv].map(Option::is_some);
        let dense = [self.dims.seqlen_q, self.dims.seqlen_kv];
        let more = [self.seed % 3, self.seed / 3 % 9].map(|more| more as usize);
        let most = longest(&self.sequences());
        let of_side = |side: usize| if packed[side] { most[side] + more[side] } else { dense[side] };
        packed.contains(&true).then(|| [0, 1].map(of_side))
    }

    /// The same with dropout.
    #[must_use]
    pub fn dropout(mut self, probability: f32) -> Self {
        self.dropout = probability;
        self
    }

    /// The words of the seed and the offset of dropout, where there is any.
    pub fn dropout_state(&self) -> Option<[i32; 4]> {
        dropout::state(self.dropout, self.seed)
    }

    /// The lists of blocks, where there are any.
    pub fn block_lists(&self) -> Option<BlocksImage> {
        self.blocks.image(self.dims, self.seed)
    }

    /// The library's problem.
    pub fn problem(&self, dtype: DType) -> ForwardProblem {
        self.options(dtype).build().expect("legal sizes and a legal scale")
    }

    /// The library's problem, with options still to be chosen.
    pub fn options(&self, dtype: DType) -> ForwardProblemBuilder {
        let options = ForwardProblem::builder(dtype, self.dims).mask(self.mask).lse(self.lse).softcap(self.softcap);
        let options = self.packing.options(options).max_logits(self.max_logits);
        let options = match self.alibi.option() {
            Some(slopes) => options.alibi(slopes),
            None => options,
        };
        let covering = |bias: hopper_attention::Bias| match self.covering() {
            Some([queries, keys]) => bias.covering(queries, keys),
            None => bias,
        };
        let options = options.block_mask(self.block_lists().map(|lists| lists.mask));
        let options = options.bias(self.bias.option().map(covering));
        let options = options.dropout(dropout::option(self.dropout));
        let options = match self.sinks.dtype(self.seed) {
            Some(dtype) => options.sinks(dtype),
            None => options,
        };
        match self.scale {
            Some(scale) => options.softmax_scale(scale),
            None => options,
        }
    }
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            dims: d,
            mask,
            scale,
            lse,
            placement,
            values,
            seed,
            packing,
            sinks,
            softcap,
            alibi,
            max_logits,
            blocks,
            bias,
            dropout,
        } = self;
        write!(f, "b{} q{} kv{} h{}/{} ", d.batch, d.seqlen_q, d.seqlen_kv, d.heads_q, d.heads_kv)?;
        write!(f, "d{}/{} {mask} {placement:?} {values:?} seed {seed}", d.head_dim_qk, d.head_dim_vo)?;
        if let Some(scale) = scale {
            write!(f, " scale {scale}")?;
        }
        for (slot, list) in packing.lists() {
            write!(f, " {slot} {list:?}")?;
        }
        if !sinks.is_none() {
            write!(f, " sinks {sinks:?}")?;
        }
        if *softcap != 0.0 {
            write!(f, " softcap {softcap}")?;
        }
        if !alibi.is_none() {
            write!(f, " alibi {alibi}")?;
        }
        f.write_str(if *max_logits { " max_logits" } else { "" })?;
        if !blocks.is_none() {
            write!(f, " blocks {blocks:?}")?;
        }
        if !bias.is_none() {
            write!(f, " bias {bias}")?;
        }
        if *dropout != 0.0 {
            write!(f, " dropout {dropout}")?;
        }
        f.write_str(if packing.fill_gaps { " fill_gaps" } else { "" })?;
        for (name, hint) in [("max_seqlen_q", packing.max_seqlen_q), ("max_seqlen_kv", packing.max_seqlen_kv)] {
            if let Some(hint) = hint {
                write!(f, " {name} {hint}")?;
            }
        }
        f.write_str(if *lse { "" } else { " without lse" })
    }
}
