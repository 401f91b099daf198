//! Which keys a query attends to.

use std::fmt;

use crate::error::{Error, Result};

/// Where the diagonal of a causal mask or window lies when `seqlen_q != seqlen_kv`.
///
/// Query `q` *stands at* a key: the key on the diagonal in its row.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Corner {
    /// Bottom-right aligned: query `q` stands at key `q + seqlen_kv - seqlen_q`. So the last query stands at the last key.
    #[default]
    BottomRight,
    /// Top-left aligned: query `q` stands at key `q`. So the first query stands at the first key.
    TopLeft,
}

impl Corner {
    /// The key at which query 0 stands. It may be negative.
    pub fn offset(self, seqlen_q: usize, seqlen_kv: usize) -> i64 {
        match self {
            Self::BottomRight => signed(seqlen_kv).saturating_sub(signed(seqlen_q)),
            Self::TopLeft => 0,
        }
    }
}

impl fmt::Display for Corner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::BottomRight => "bottom-right",
            Self::TopLeft => "top-left",
        })
    }
}

/// Which keys a query attends to. A query that keeps no key gets output 0 and LSE -inf.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Mask {
    /// Every key.
    #[default]
    Full,
    /// The keys up to and including the one at which the query stands (its own key).
    Causal {
        /// Where query 0 stands.
        corner: Corner,
    },
    /// The keys from `left` before the query's own key to `right` after it, both included.
    Window {
        /// How many keys before the query's own are kept. `None`: all of them.
        left: Option<usize>,
        /// How many keys after the query's own are kept. `None`: all of them.
        right: Option<usize>,
        /// Where query 0 stands.
        corner: Corner,
    },
    /// Chunked local attention, as some layers of Llama 4 have it. The keys are cut into chunks of equal length, from key 0 on. A
    /// query keeps the keys of the chunk that its own key is in, up to and including its own. (A query whose own key is negative
    /// keeps none.)
    Chunked {
        /// Number of keys of a chunk. At least 1: a problem with 0 is refused.
        chunk: usize,
        /// Where query 0 stands.
        corner: Corner,
    },
    /// A prefix that every query keeps, and causal behind it: a prefix LM. A query keeps the first keys, and all keys up to and
    /// including its own.
    Prefix {
        /// Number of keys of the prefix. 0: causal.
        keys: usize,
        /// Where query 0 stands.
        corner: Corner,
    },
}

impl Mask {
    /// The causal mask, bottom-right aligned: query `q` sees keys up to `q + seqlen_kv - seqlen_q`.
    pub const fn causal() -> Self {
        Self::Causal { corner: Corner::BottomRight }
    }

    /// A window, bottom-right aligned: query `q` stands at key `q + seqlen_kv - seqlen_q`.
    pub const fn window(left: Option<usize>, right: Option<usize>) -> Self {
        Self::Window { left, right, corner: Corner::BottomRight }
    }

    /// Chunks of `chunk` keys, bottom-right aligned: query `q` stands at key `q + seqlen_kv - seqlen_q`.
    pub const fn chunked(chunk: usize) -> Self {
        Self::Chunked { chunk, corner: Corner::BottomRight }
    }

    /// A prefix of `keys` keys, bottom-right aligned: query `q` stands at key `q + seqlen_kv - seqlen_q`.
    pub const fn prefix(keys: usize) -> Self {
        Self::Prefix { keys, corner: Corner::BottomRight }
    }

    /// Whether query `q` of `seqlen_q` attends to key `kv` of `seqlen_kv`.
    ///
    /// This function defines the masks. Plans and kernels use [`band`](Self::band), which is tested against this function.
    #[inline]
    pub fn keep(&self, q: usize, kv: usize, seqlen_q: usize, seqlen_kv: usize) -> bool {
        let kv = signed(kv);
        match *self {
            Self::Full => true,
            Self::Causal { corner } => kv <= signed(q).saturating_add(corner.offset(seqlen_q, seqlen_kv)),
            Self::Window { left, right, corner } => {
                let own = signed(q).saturating_add(corner.offset(seqlen_q, seqlen_kv));
                left.is_none_or(|left| own.saturating_sub(signed(left)) <= kv)
                    && right.is_none_or(|right| kv <= own.saturating_add(signed(right)))
            }
            Self::Chunked { chunk, corner } => {
                let own = signed(q).saturating_add(corner.offset(seqlen_q, seqlen_kv));
                let chunk = signed(chunk.max(1));
                kv <= own && kv.div_euclid(chunk) == own.div_euclid(chunk)
            }
            Self::Prefix { keys, corner } => {
                kv < signed(keys) || kv <= signed(q).saturating_add(corner.offset(seqlen_q, seqlen_kv))
            }
        }
    }

    /// Where query 0 stands. `None` where it does not matter, as there is no mask.
    pub fn corner(&self) -> Option<Corner> {
        match *self {
            Self::Full => None,
            Self::Causal { corner }
            | Self::Window { corner, .. }
            | Self::Chunked { corner, .. }
            | Self::Prefix { corner, .. } => Some(corner),
        }
    }

    /// Whether the last query stands at the last key, whatever the lengths. (Without a mask it does not matter.)
    #[cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "told to kernels"))]
    pub(crate) fn is_bottom_right(&self) -> bool {
        self.corner() == Some(Corner::BottomRight)
    }

    /// Whether the mask is one: chunks have keys.
    pub(crate) fn check(&self) -> Result<()> {
        match self {
            Self::Chunked { chunk: 0, .. } => Err(Error::Value {
                what: "mask",
                got: "chunks of 0 keys".into(),
                allowed: "chunks of at least 1 key".into(),
            }),
            _ => Ok(()),
        }
    }

    /// The mask as an interval of keys for each query. A bound that excludes no key is left out (`None`).
    pub fn band(&self, seqlen_q: usize, seqlen_kv: usize) -> Band {
        let band = self.band_of_sequences(seqlen_q, seqlen_kv);
        // The prefix matters where the first query does not keep all of it anyway.
        let prefix = if signed(band.prefix) - 1 > band.offset { band.prefix } else { 0 };
        Band { prefix, ..band }
    }

    /// The same for sequences of up to so many queries and keys. A bound is left out where it excludes no key of any of them.
    pub(crate) fn band_of_sequences(&self, seqlen_q: usize, seqlen_kv: usize) -> Band {
        let (left, right, chunk, prefix) = match *self {
            Self::Full => (None, None, None, 0),
            Self::Causal { .. } => (None, Some(0), None, 0),
            Self::Window { left, right, .. } => (left, right, None, 0),
            Self::Chunked { chunk, .. } => (None, Some(0), Some(chunk.max(1)), 0),
            Self::Prefix { keys, .. } => (None, Some(0), None, keys),
        };
        let offset = self.corner().unwrap_or(Corner::TopLeft).offset(seqlen_q, seqlen_kv);
        if seqlen_q == 0 || seqlen_kv == 0 {
            return Band { offset, left: None, right: None, chunk: None, prefix: 0 };
        }
        // A lower bound excludes most for the last query, an upper bound for the first one.
        let last_own = (signed(seqlen_q) - 1).saturating_add(offset);
        let left = left.filter(|&left| last_own.saturating_sub(signed(left)) > 0);
        let chunk = chunk.filter(|&chunk| last_own >= signed(chunk));
        let right =
            right.filter(|&right| offset.saturating_add(signed(right)).max(signed(prefix) - 1) < signed(seqlen_kv) - 1);
        let prefix = if right.is_some() { prefix } else { 0 };
        Band { offset, left, right, chunk, prefix }
    }
}

impl fmt::Display for Mask {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        struct Bound(Option<usize>);
        impl fmt::Display for Bound {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                match self.0 {
                    Some(keys) => write!(f, "{keys}"),
                    None => f.write_str("all"),
                }
            }
        }
        match *self {
            Self::Full => f.write_str("full"),
            Self::Causal { corner: Corner::BottomRight } => f.write_str("causal"),
            Self::Causal { corner } => write!(f, "causal {corner}"),
            Self::Window { left, right, corner: Corner::BottomRight } => {
                write!(f, "window left {} right {}", Bound(left), Bound(right))
            }
            Self::Window { left, right, corner } => {
                write!(f, "window left {} right {} {corner}", Bound(left), Bound(right))
            }
            Self::Chunked { chunk, corner: Corner::BottomRight } => write!(f, "chunk {chunk}"),
            Self::Chunked { chunk, corner } => write!(f, "chunk {chunk} {corner}"),
            Self::Prefix { keys, corner: Corner::BottomRight } => write!(f, "prefix {keys}"),
            Self::Prefix { keys, corner } => write!(f, "prefix {keys} {corner}"),
        }
    }
}

/// The keys that a mask keeps for given sequence lengths.
///
/// Query `q` stands at key `own = q + offset`. It keeps the keys `kv` from `own - left` to `own + right`, of these the keys from
/// the beginning of its own chunk on, and those before key `prefix` whatever `right` is. `None` stands for "no bound".
///
/// So a query keeps one interval of keys, and neither end of it falls from one query to the next.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Band {
    /// The key at which query 0 stands. It may be negative.
    pub offset: i64,
    /// How many keys before the query's own are kept. `None`: all of them.
    pub left: Option<usize>,
    /// How many keys after the query's own are kept. `None`: all of them.
    pub right: Option<usize>,
    /// Number of keys of a chunk. `None`: there are no chunks. Keys before that of the query's own key are not kept.
    pub chunk: Option<usize>,
    /// Number of keys at the beginning that `right` hides from no query.
    pub prefix: usize,
}

impl Band {
    /// Whether query `q` keeps key `kv`.
    pub fn keep(&self, q: usize, kv: usize) -> bool {
        let (first, end) = self.interval(q);
        first <= signed(kv) && signed(kv) < end
    }

    /// How many of `seqlen_kv` keys query `q` keeps, as the first of them and the one after the last. The two are equal where it
    /// keeps none.
    pub fn keys(&self, q: usize, seqlen_kv: usize) -> (usize, usize) {
        let (first, end) = self.interval(q);
        let within = |key: i64| usize::try_from(key.max(0)).map_or(seqlen_kv, |key| key.min(seqlen_kv));
        let first = within(first);
        (first, within(end).max(first))
    }

    /// The first key that query `q` keeps, and the one after the last. Neither is held to the keys that there are.
    fn interval(&self, q: usize) -> (i64, i64) {
        let own = signed(q).saturating_add(self.offset);
        let first = self.left.map_or(0, |left| own.saturating_sub(signed(left)));
        let first = match self.chunk {
            Some(chunk) if own > 0 => first.max(own - own % signed(chunk.max(1))),
            _ => first,
        };
        let end = self.right.map_or(i64::MAX, |right| own.saturating_add(signed(right)).saturating_add(1));
        (first, end.max(signed(self.prefix)))
    }
}

/// A count as `i64`. A problem's lengths are far below 2^63. Other counts saturate, and comparisons with them stay right.
fn signed(count: usize) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn kept(mask: Mask, seqlen_q: usize, seqlen_kv: usize) -> Vec<String> {
        let row = |q| (0..seqlen_kv).map(|kv| if mask.keep(q, kv, seqlen_q, seqlen_kv) { 'x' } else { '.' }).collect();
        (0..seqlen_q).map(row).collect()
    }

    #[test]
    fn causal_by_hand() {
        assert_eq!(kept(Mask::causal(), 2, 4), ["xxx.", "xxxx"]);
        assert_eq!(kept(Mask::causal(), 4, 2), ["..", "..", "x.", "xx"]);
        assert_eq!(kept(Mask::Causal { corner: Corner::TopLeft }, 2, 4), ["x...", "xx.."]);
        assert_eq!(kept(Mask::Causal { corner: Corner::TopLeft }, 4, 2), ["x.", "xx", "xx", "xx"]);
    }

    #[test]
    fn windows_by_hand() {
        assert_eq!(kept(Mask::window(Some(1), Some(0)), 3, 4), ["xx..", ".xx.", "..xx"]);
        assert_eq!(kept(Mask::window(Some(0), Some(1)), 3, 3), ["xx.", ".xx", "..x"]);
        assert_eq!(kept(Mask::window(None, Some(1)), 3, 3), ["xx.", "xxx", "xxx"]);
        assert_eq!(kept(Mask::window(Some(1), None), 3, 3), ["xxx", "xxx", ".xx"]);
        assert_eq!(kept(Mask::window(Some(usize::MAX), Some(usize::MAX)), 2, 2), ["xx", "xx"]);
    }

    #[test]
    fn bands_lose_bounds_that_exclude_nothing() {
        let band = |mask: Mask, q, kv| mask.band(q, kv);
        let all = |offset| Band { offset, left: None, right: None, chunk: None, prefix: 0 };
        assert_eq!(band(Mask::causal(), 1, 9), all(8));
        assert_eq!(band(Mask::causal(), 2, 9), Band { right: Some(0), ..all(7) });
        assert_eq!(band(Mask::window(Some(8), Some(0)), 9, 9), Band { right: Some(0), ..all(0) });
        assert_eq!(band(Mask::window(Some(7), Some(8)), 9, 9), Band { left: Some(7), ..all(0) });
        assert_eq!(band(Mask::causal(), 3, 0).right, None);
        // Chunks that no query leaves; one whose border the last query passes.
        assert_eq!(band(Mask::chunked(9), 9, 9), Band { right: Some(0), ..all(0) });
        assert_eq!(band(Mask::chunked(8), 9, 9), Band { right: Some(0), chunk: Some(8), ..all(0) });
        // A prefix that the first query keeps anyway; all keys.
        assert_eq!(band(Mask::prefix(3), 2, 4), Band { right: Some(0), ..all(2) });
        assert_eq!(band(Mask::prefix(3), 3, 4), Band { right: Some(0), prefix: 3, ..all(1) });
        assert_eq!(band(Mask::prefix(4), 3, 4), all(1));
        // Of sequences up to this length a shorter one may need it.
        assert_eq!(Mask::prefix(3).band_of_sequences(2, 4), Band { right: Some(0), prefix: 3, ..all(2) });
    }

    #[test]
    fn chunks_by_hand() {
        assert_eq!(kept(Mask::chunked(2), 4, 4), ["x...", "xx..", "..x.", "..xx"]);
        // Chunks lie among the keys, wherever the queries begin.
        assert_eq!(kept(Mask::chunked(3), 4, 5), ["xx...", "xxx..", "...x.", "...xx"]);
        assert_eq!(kept(Mask::chunked(2), 4, 2), ["..", "..", "x.", "xx"]);
        let top_left = |chunk| Mask::Chunked { chunk, corner: Corner::TopLeft };
        assert_eq!(kept(top_left(2), 5, 3), ["x..", "xx.", "..x", "..x", "..."]);
        assert_eq!(kept(Mask::chunked(1), 2, 3), [".x.", "..x"]);
        assert_eq!(kept(Mask::chunked(usize::MAX), 2, 3), kept(Mask::causal(), 2, 3));
    }

    #[test]
    fn prefixes_by_hand() {
        assert_eq!(kept(Mask::prefix(2), 3, 4), ["xx..", "xxx.", "xxxx"]);
        assert_eq!(kept(Mask::prefix(3), 3, 4), ["xxx.", "xxx.", "xxxx"]);
        assert_eq!(kept(Mask::prefix(1), 4, 2), ["x.", "x.", "x.", "xx"]);
        assert_eq!(kept(Mask::Prefix { keys: 2, corner: Corner::TopLeft }, 3, 4), ["xx..", "xx..", "xxx."]);
        assert_eq!(kept(Mask::prefix(0), 2, 3), kept(Mask::causal(), 2, 3));
        assert_eq!(kept(Mask::prefix(usize::MAX), 2, 3), kept(Mask::Full, 2, 3));
    }

    #[test]
    fn chunks_have_keys() {
        assert!(Mask::chunked(0).check().is_err_and(|error| error.to_string().contains("at least 1")));
        assert!(Mask::chunked(1).check().is_ok() && Mask::prefix(0).check().is_ok());
        Mask::chunked(0).keep(1, 1, 2, 2); // No division by 0.
    }

    #[test]
    fn display() {
        assert_eq!(Mask::causal().to_string(), "causal");
        assert_eq!(Mask::Causal { corner: Corner::TopLeft }.to_string(), "causal top-left");
        assert_eq!(Mask::window(Some(64), None).to_string(), "window left 64 right all");
        assert_eq!(Mask::chunked(8192).to_string(), "chunk 8192");
        assert_eq!(Mask::Prefix { keys: 7, corner: Corner::TopLeft }.to_string(), "prefix 7 top-left");
    }

    fn masks() -> impl Strategy<Value = Mask> {
        let corner = || prop_oneof![Just(Corner::BottomRight), Just(Corner::TopLeft)];
        let number = || prop_oneof![4 => 0usize..14, 1 => Just(usize::MAX), 1 => Just(1 << 30)];
        let bound = || proptest::option::of(number());
        prop_oneof![
            Just(Mask::Full),
            corner().prop_map(|corner| Mask::Causal { corner }),
            (bound(), bound(), corner()).prop_map(|(left, right, corner)| Mask::Window { left, right, corner }),
            (number(), corner()).prop_map(|(chunk, corner)| Mask::Chunked { chunk, corner }),
            (number(), corner()).prop_map(|(keys, corner)| Mask::Prefix { keys, corner }),
        ]
    }

    proptest! {
        #[test]
        fn a_band_keeps_what_its_mask_keeps(mask in masks(), seqlen_q in 0usize..12, seqlen_kv in 0usize..12) {
            let band = mask.band(seqlen_q, seqlen_kv);
            let mut all = true;
            for q in 0..seqlen_q {
                for kv in 0..seqlen_kv {
                    prop_assert_eq!(band.keep(q, kv), mask.keep(q, kv, seqlen_q, seqlen_kv), "q {} kv {}", q, kv);
                    all &= mask.keep(q, kv, seqlen_q, seqlen_kv);
                }
            }
            // A bound is kept exactly where it excludes something.
            prop_assert_eq!(all, band.left.is_none() && band.right.is_none() && band.chunk.is_none());
            for q in 0..seqlen_q {
                let kept: Vec<_> = (0..seqlen_kv).filter(|&kv| mask.keep(q, kv, seqlen_q, seqlen_kv)).collect();
                let (first, end) = band.keys(q, seqlen_kv);
                prop_assert_eq!((first..end).collect::<Vec<_>>(), kept);
            }
            // Of sequences up to these lengths: so are those of these lengths.
            let of_any = mask.band_of_sequences(seqlen_q, seqlen_kv);
            let keeps = |q: usize, kv: usize| of_any.keep(q, kv) == mask.keep(q, kv, seqlen_q, seqlen_kv);
            prop_assert!((0..seqlen_q).all(|q| (0..seqlen_kv).all(|kv| keeps(q, kv))));
        }

        /// A shorter sequence of the same corner has no bound that one of the most queries and keys does not have.
        #[test]
        fn a_band_of_sequences_serves_all_of_them(
            mask in masks(), most_q in 0usize..12, most_kv in 0usize..12, less_q in 0usize..12, less_kv in 0usize..12,
        ) {
            let (q, kv) = (most_q.saturating_sub(less_q), most_kv.saturating_sub(less_kv));
            let of_any = mask.band_of_sequences(most_q, most_kv);
            let band = Band { offset: mask.band(q, kv).offset, ..of_any };
            for query in 0..q {
                for key in 0..kv {
                    prop_assert_eq!(band.keep(query, key), mask.keep(query, key, q, kv), "q {} kv {}", query, key);
                }
            }
        }

        #[test]
        fn extreme_numbers_do_not_overflow(mask in masks(), q in any::<usize>(), kv in any::<usize>()) {
            let band = mask.band(q, kv);
            mask.keep(q, kv, q, kv);
            band.keep(q, kv);
        }
    }
}
