//! What a point is called: in reports, on charts, and by filters.

use std::fmt;

use super::{Kind, Packed, Point};
use crate::text::thousands;

impl Point {
    /// The part of the name that the points of one chart share: `fwd-bf16-d64-causal`, with `-gqa8` where heads share,
    /// `-lopsided` where there are not as many queries as keys, `-packed` or `-ragged16k` where sequences are packed (of one
    /// length, or not), `-f32scores` where FP8 has scores in f32, `-softcap50` where they are capped, `-alibi` where they have
    /// linear biases, `-bias-f32-bhq` where they have such a bias, `-dropout10` where dropout makes 10% of the weights 0, and
    /// `-peaky` where inputs are not normal.
    pub fn family(&self) -> String {
        let (Self { direction, dtype, .. }, head_dims) = (self, self.head_dims());
        let grouped = if self.group() == 1 { String::new() } else { format!("-gqa{}", self.group()) };
        let lopsided = if self.queries.is_some() { "-lopsided" } else { "" };
        let packed = match &self.packed {
            None => String::new(),
            Some(Packed { kind: Kind::Equal(_), .. }) => "-packed".into(),
            Some(_) => format!("-ragged{}", thousands(self.seqlen)),
        };
        let (softcap, inputs) = (self.named_scores("-"), self.named_inputs("-"));
        let more = format!("{grouped}{lopsided}{packed}{softcap}{inputs}");
        format!("{direction}-{dtype}-d{head_dims}-{}{more}", self.mask_name())
    }

    /// What a chart or a table says of the sequences of its points; nothing where they are not packed.
    pub fn packed_words(&self) -> String {
        match &self.packed {
            None => String::new(),
            Some(Packed { kind: Kind::Equal(_), .. }) => ", packed".into(),
            Some(_) => format!(", ragged batches of {} tokens", thousands(self.seqlen)),
        }
    }

    /// `f32scores`, `softcap50`, `alibi`, `bias-f32-bhq` and `dropout10`, each after a separator and where the point has it.
    pub fn named_scores(&self, separator: &str) -> String {
        // Names of files have no colons.
        let bias = self.bias.to_string().replace("::", "-").replace(':', "-");
        let words = [
            self.f32_scores.then(|| "f32scores".into()),
            self.softcap.map(|cap| format!("softcap{cap}")),
            self.alibi.then(|| "alibi".into()),
            (!self.bias.is_none()).then(|| format!("bias-{bias}")),
            self.dropout.map(|percent| format!("dropout{percent}")),
        ];
        words.into_iter().flatten().map(|word| separator.to_string() + &word).collect()
    }

    /// Whether every word between the slashes of a filter is one of the point's own.
    pub(crate) fn matches(&self, filter: &str) -> bool {
        let name = self.to_string();
        filter.split('/').all(|word| name.split('/').any(|own| own == word))
    }
}

/// The name that `--filter` sees: `fwd/bf16/d64/causal/s512/b32/h32/kv32`, or `bwd/...`. 128 queries on 512 keys are `s128x512`,
/// and Q and K of 192 with V of 128 are `d192x128`.
/// Packed sequences are `lognormal512/t16384/b32`. FP8 scores in f32 add `f32scores`, capped scores `softcap50`, linear biases
/// `alibi`, an additive bias `f32:bhq` `bias-f32-bhq`, dropout of 10% `dropout10`. Where
/// inputs are not normal, their class or file comes last.
impl fmt::Display for Point {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (Self { direction, dtype, heads_q, heads_kv, .. }, head_dims) = (self, self.head_dims());
        let (mask, lengths) = (self.mask_name(), self.lengths());
        let more = self.named_scores("/") + &self.named_inputs("/");
        let (s, batch) = (if self.packed.is_some() { "" } else { "s" }, self.sequences());
        write!(f, "{direction}/{dtype}/d{head_dims}/{mask}/{s}{lengths}/b{batch}/h{heads_q}/kv{heads_kv}{more}")
    }
}
