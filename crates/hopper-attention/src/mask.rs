//! Which keys a query attends to.

use std::fmt;

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

    /// Whether query `q` of `seqlen_q` attends to key `kv` of `seqlen_kv`.
    ///
    /// This function defines the masks. Plans and kernels use [`band`](Self::band), which is tested against this function.
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
        }
    }

    /// Whether the last query stands at the last key, whatever the lengths. (Without a mask it does not matter.)
    #[cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "told to kernels"))]
    pub(crate) fn is_bottom_right(&self) -> bool {
        matches!(self, Self::Causal { corner: Corner::BottomRight } | Self::Window { corner: Corner::BottomRight, .. })
    }

    /// The mask as a band of keys around a diagonal. A bound that excludes no key is left out (`None`).
    pub fn band(&self, seqlen_q: usize, seqlen_kv: usize) -> Band {
        let (left, right, corner) = match *self {
            Self::Full => (None, None, Corner::TopLeft),
            Self::Causal { corner } => (None, Some(0), corner),
            Self::Window { left, right, corner } => (left, right, corner),
        };
        let offset = corner.offset(seqlen_q, seqlen_kv);
        if seqlen_q == 0 || seqlen_kv == 0 {
            return Band { offset, left: None, right: None };
        }
        // A lower bound excludes most for the last query, an upper bound for the first one.
        let last_own = (signed(seqlen_q) - 1).saturating_add(offset);
        let left = left.filter(|&left| last_own.saturating_sub(signed(left)) > 0);
        let right = right.filter(|&right| offset.saturating_add(signed(right)) < signed(seqlen_kv) - 1);
        Band { offset, left, right }
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
        }
    }
}

/// The keys that a mask keeps for given sequence lengths.
///
/// Query `q` keeps the keys `kv` with `q + offset - left <= kv <= q + offset + right`. `None` stands for "no bound".
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Band {
    /// The key at which query 0 stands. It may be negative.
    pub offset: i64,
    /// How many keys before the query's own are kept. `None`: all of them.
    pub left: Option<usize>,
    /// How many keys after the query's own are kept. `None`: all of them.
    pub right: Option<usize>,
}

impl Band {
    /// Whether query `q` keeps key `kv`.
    pub fn keep(&self, q: usize, kv: usize) -> bool {
        let own = signed(q).saturating_add(self.offset);
        self.left.is_none_or(|left| own.saturating_sub(signed(left)) <= signed(kv))
            && self.right.is_none_or(|right| signed(kv) <= own.saturating_add(signed(right)))
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
        assert_eq!(band(Mask::causal(), 1, 9), Band { offset: 8, left: None, right: None });
        assert_eq!(band(Mask::causal(), 2, 9), Band { offset: 7, left: None, right: Some(0) });
        assert_eq!(band(Mask::window(Some(8), Some(0)), 9, 9), Band { offset: 0, left: None, right: Some(0) });
        assert_eq!(band(Mask::window(Some(7), Some(8)), 9, 9), Band { offset: 0, left: Some(7), right: None });
        assert_eq!(band(Mask::causal(), 3, 0).right, None);
    }

    #[test]
    fn display() {
        assert_eq!(Mask::causal().to_string(), "causal");
        assert_eq!(Mask::Causal { corner: Corner::TopLeft }.to_string(), "causal top-left");
        assert_eq!(Mask::window(Some(64), None).to_string(), "window left 64 right all");
    }

    fn masks() -> impl Strategy<Value = Mask> {
        let corner = || prop_oneof![Just(Corner::BottomRight), Just(Corner::TopLeft)];
        let bound = || proptest::option::of(prop_oneof![0usize..12, Just(usize::MAX), Just(1 << 30)]);
        prop_oneof![
            Just(Mask::Full),
            corner().prop_map(|corner| Mask::Causal { corner }),
            (bound(), bound(), corner()).prop_map(|(left, right, corner)| Mask::Window { left, right, corner }),
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
            prop_assert_eq!(all, band.left.is_none() && band.right.is_none());
        }

        #[test]
        fn extreme_numbers_do_not_overflow(mask in masks(), q in any::<usize>(), kv in any::<usize>()) {
            let band = mask.band(q, kv);
            mask.keep(q, kv, q, kv);
            band.keep(q, kv);
        }
    }
}
