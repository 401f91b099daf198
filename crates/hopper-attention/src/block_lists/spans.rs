//! Lists of blocks that keep more than a mask does: prefixes of batch entries, and spans whose tokens see each other.

use super::owned::{Keys, OwnedBlockLists};
use crate::error::{Error, Result};
use crate::mask::{Corner, Mask};
use crate::problem::{BlockMask, Dims};

impl OwnedBlockLists {
    /// The lists that keep a pair if `mask` keeps it, or the key is in the prefix of the batch entry: `key < prefixes[batch]`. So
    /// does a prefix LM whose prefixes differ in length. (Where they do not, [`Mask::Prefix`] needs no lists.)
    ///
    /// `prefixes` is `[batch]`. The lists only narrow the problem's own mask, so leave that [`Mask::Full`].
    ///
    /// # Errors
    /// - [`Error::Shape`]: there is another number of prefixes.
    /// - [`Error::Value`]: a prefix is below 0 or longer than the keys. The mask has chunks of 0 keys.
    /// - As [`from_predicate`](Self::from_predicate).
    pub fn from_prefixes(dims: Dims, mask: Mask, prefixes: &[i32]) -> Result<Self> {
        dims.check()?;
        mask.check()?;
        if prefixes.len() != dims.batch {
            let (got, want) = (vec![prefixes.len()], vec![dims.batch]);
            return Err(Error::Shape { tensor: "prefixes", got, want, axes: "[batch]" });
        }
        let within = |(batch, &prefix): (usize, &i32)| {
            usize::try_from(prefix).ok().filter(|&prefix| prefix <= dims.seqlen_kv).ok_or_else(|| {
                let (got, allowed) = (format!("{prefix} of batch entry {batch}"), format!("0 to {}", dims.seqlen_kv));
                Error::Value { what: "prefixes", got, allowed }
            })
        };
        let prefixes = prefixes.iter().enumerate().map(within).collect::<Result<Vec<usize>>>()?;
        let band = mask.band(dims.seqlen_q, dims.seqlen_kv);
        Self::from_keys(dims, BlockMask::new(0).per_batch(dims.batch != 1), |[batch, _, query], kept| {
            let (first, end) = band.keys(query, dims.seqlen_kv);
            kept.extend([[0, prefixes[batch]], [first, end]]);
            Ok(())
        })
    }

    /// The lists that keep a pair if `mask` keeps it or both are in one span, and `within` keeps it, too:
    /// `(mask or span) and within`. A span is a run of tokens that see each other in both directions, such as an image.
    ///
    /// Models compose a window with the spans in two ways:
    ///
    /// | which | `mask` | `within` |
    /// | --- | --- | --- |
    /// | `(causal and window) or span`, as FlashInfer does it | `Mask::window(Some(left), Some(0))` | `Mask::Full` |
    /// | `(causal or span) and window`, as Gemma 4 does it | `Mask::causal()` | `Mask::window(Some(left), None)` |
    ///
    /// `spans[batch]` has the spans of a batch entry: the first key, and the one after the last. `spans` has one entry for each
    /// batch entry, or one that all share. Spans may overlap: a pair is kept if any span has both. A query is in a span if the key
    /// at which it stands is: with `mask`'s corner, which for [`Mask::Full`] does not matter.
    ///
    /// The lists only narrow the problem's own mask, so leave that [`Mask::Full`].
    ///
    /// # Errors
    /// - [`Error::Shape`]: `spans` is neither of 1 nor of `batch` entries.
    /// - [`Error::Value`]: a span is not within the keys, or ends before it starts. A mask has chunks of 0 keys.
    /// - As [`from_predicate`](Self::from_predicate).
    pub fn from_spans(dims: Dims, mask: Mask, spans: &[impl AsRef<[[i32; 2]]>], within: Mask) -> Result<Self> {
        dims.check()?;
        mask.check()?;
        within.check()?;
        if spans.len() != 1 && spans.len() != dims.batch {
            let (got, want) = (vec![spans.len()], vec![dims.batch]);
            return Err(Error::Shape { tensor: "spans", got, want, axes: "[batch]" });
        }
        let mut of_batch: Vec<Vec<Keys>> = Vec::with_capacity(spans.len());
        for (batch, its) in spans.iter().enumerate() {
            let span = |(number, &[first, end]): (usize, &[i32; 2])| {
                let keys = usize::try_from(first).ok().zip(usize::try_from(end).ok());
                let keys = keys.filter(|&(first, end)| first <= end && end <= dims.seqlen_kv);
                keys.map(|(first, end)| [first, end]).ok_or_else(|| {
                    let got = format!("{first} to {end}, span {number} of batch entry {batch}");
                    let allowed = format!("0 to {}, and no end before its start", dims.seqlen_kv);
                    Error::Value { what: "spans", got, allowed }
                })
            };
            let mut its = its.as_ref().iter().enumerate().map(span).collect::<Result<Vec<Keys>>>()?;
            its.sort_unstable();
            of_batch.push(its);
        }
        let offset = mask.corner().unwrap_or(Corner::BottomRight).offset(dims.seqlen_q, dims.seqlen_kv);
        let [band, within] = [mask, within].map(|mask| mask.band(dims.seqlen_q, dims.seqlen_kv));
        Self::from_keys(dims, BlockMask::new(0).per_batch(spans.len() != 1), |[batch, _, query], kept| {
            let (first, end) = band.keys(query, dims.seqlen_kv);
            kept.push([first, end]);
            if let Ok(own) = usize::try_from(query as i64 + offset) {
                // They are in the order of their first keys.
                let begun = of_batch[batch].partition_point(|span| span[0] <= own);
                kept.extend(of_batch[batch][..begun].iter().filter(|span| own < span[1]));
            }
            let (first, end) = within.keys(query, dims.seqlen_kv);
            kept.iter_mut().for_each(|keys| *keys = [keys[0].max(first), keys[1].min(end)]);
            Ok(())
        })
    }
}
