//! The largest score of a query head, and which scores a sum in f32 may give where it may overflow.
//!
//! A score is a sum of products. In f32 a sum of large products may overflow on its way, in one order of the products and not in
//! another. Then a score is one of several numbers, or NaN, and each of them is right. So the largest score is one of several, too.

/// The largest score of a query head. All are -inf where no key is kept, or no score is a number above -inf.
#[derive(Clone, Debug)]
pub struct MaxLogit {
    /// The exact one. A score that overflows f32 counts as infinite: with a cap `c` as `c` or `-c`.
    pub value: f64,
    /// What it would be if each score were smaller by the size of its error.
    pub least: f64,
    /// What it would be if each score were larger by the size of its error.
    pub most: f64,
    /// The largest of what scores are in every order of their sums: itself, and what it would be as above.
    sure: [f64; 3],
    /// What scores are in some order of their sums, and not in another.
    possible: Vec<Span>,
}

/// Scores from one to another, and the size of the errors that they have besides.
#[derive(Clone, Copy, Debug)]
struct Span {
    from: f64,
    to: f64,
    error: f64,
}

/// So many possible scores are kept apart. Of more than that, neighbours are taken together with what is between them.
const MOST_POSSIBLE: usize = 4096;

impl MaxLogit {
    /// That of no score.
    pub(super) const NONE: Self = {
        let none = f64::NEG_INFINITY;
        Self { value: none, least: none, most: none, sure: [none; 3], possible: Vec::new() }
    };

    /// Takes a score that every sum gives, with the size of its error. A NaN does not count.
    pub(super) fn take(&mut self, score: f64, error: f64) {
        let error = finite_or_0(error);
        self.take_exact([score, score - error, score + error]);
        self.take_sure([score, score - error, score + error]);
    }

    /// Takes a score of which sums give several numbers, or NaN. `modified` makes of a sum what the cap and the bias make of it.
    /// `error` is the size of the error of a sum that does not overflow, and `later` of those behind the sum.
    pub(super) fn take_any(&mut self, sums: &Sums, modified: impl Fn(f64) -> f64, error: f64, later: f64) {
        let [error, later] = [error, later].map(finite_or_0);
        let around = |sum: f64, error: f64| [sum, sum - error, sum + error].map(&modified);
        let [exact, from, to] = around(sums.exact, error);
        self.take_exact([exact, from - later, to + later]);
        let (mut least, mut may_be_nan) = (None, sums.may_be_nan);
        for sum in sums.numbers() {
            let [score, from, to] = around(sum, 2.0 * error);
            // The bias may make a NaN of an infinity.
            if score.is_nan() {
                may_be_nan = true;
                continue;
            }
            let three = [score, from - later, to + later];
            least = least.filter(|least: &[f64; 3]| least[0] <= score).or(Some(three));
            self.possible.push(Span { from, to, error: later });
        }
        if let Some(least) = least.filter(|_| !may_be_nan) {
            self.take_sure(least);
        }
        if self.possible.len() > MOST_POSSIBLE {
            self.prune();
        }
    }

    fn take_exact(&mut self, [value, least, most]: [f64; 3]) {
        self.value = self.value.max(value);
        self.least = self.least.max(least);
        self.most = self.most.max(most);
    }

    fn take_sure(&mut self, score: [f64; 3]) {
        self.sure.iter_mut().zip(score).for_each(|(sure, score)| *sure = sure.max(score));
    }

    /// Takes the scores of another part of the head.
    pub(super) fn join(&mut self, other: Self) {
        self.take_exact([other.value, other.least, other.most]);
        self.take_sure(other.sure);
        if !other.possible.is_empty() {
            self.possible.extend(other.possible);
            self.prune();
        }
    }

    /// Forgets possible scores that are below a sure one. (What is there of -inf changes no maximum.)
    fn prune(&mut self) {
        let sure = self.sure[0];
        self.possible.retain(|span| span.to > sure);
        while self.possible.len() > MOST_POSSIBLE {
            self.possible.sort_unstable_by(|a, b| a.from.total_cmp(&b.from));
            let both = |pair: &[Span]| {
                pair.iter().copied().reduce(|a, b| Span {
                    from: a.from.min(b.from),
                    to: a.to.max(b.to),
                    error: a.error.max(b.error),
                })
            };
            // An infinity stands alone: no number is between it and others.
            let (finite, infinite): (Vec<Span>, Vec<Span>) = self.possible.iter().partition(|span| span.to.is_finite());
            self.possible = finite.chunks(2).filter_map(both).chain(infinite.into_iter().take(1)).collect();
        }
    }

    /// The size of the error of the exact one. 0 where it is not finite.
    pub fn error(&self) -> f64 {
        size_of_error([self.value, self.least, self.most])
    }

    /// Of the numbers that the largest score may be, the one that a number is to be compared with, and the size of its error.
    /// That is [`value`](Self::value), unless sums of some scores may overflow in f32.
    pub fn nearest(&self, got: f64) -> (f64, f64) {
        if self.possible.is_empty() || got.is_nan() {
            return (self.value, self.error());
        }
        let sure = Span { from: self.sure[0], to: self.sure[0], error: size_of_error(self.sure) };
        let possible = self.possible.iter().copied().filter(|span| span.to > sure.from);
        let mut nearest = (sure, f64::INFINITY);
        for span in possible.chain([sure]) {
            let at = got.max(span.from.max(sure.from)).min(span.to);
            let distance = if at == got { 0.0 } else { (got - at).abs() - 2.0 * span.error };
            if distance < nearest.1 {
                nearest = (Span { from: at, ..span }, distance);
            }
        }
        (nearest.0.from, nearest.0.error)
    }
}

/// How far a number is from what it might be instead. 0 where that is not finite.
fn size_of_error([value, least, most]: [f64; 3]) -> f64 {
    finite_or_0((value - least).max(most - value))
}

fn finite_or_0(x: f64) -> f64 {
    if x.is_finite() { x } else { 0.0 }
}

/// What sums in f32 of a query's and a key's products may give, times the softmax scale.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sums {
    /// The exact one, infinite if it is no number of f32. NaN if a product is NaN, or products are infinite with both signs.
    exact: f64,
    /// The exact one, if no product is infinite and f32 has it.
    finite: Option<f64>,
    /// Whether it may be -inf and inf.
    infinite: [bool; 2],
    may_be_nan: bool,
}

/// Partial sums below this do not overflow, also where a kernel has scores in powers of two (times 1.44).
const NEVER_OVERFLOWS: f64 = f32::MAX as f64 / 2.0;
/// What may still be a number of f32, with the error of a sum.
const MAY_BE_FINITE: f64 = f32::MAX as f64 * (1.0 + 1.0 / 1024.0);

impl Sums {
    /// Those of vectors. `None` if no order overflows and no product is infinite or NaN: then the score is what it is. `size` is at
    /// least the sum of the products' magnitudes.
    pub(super) fn of(softmax_scale: f64, q: &[f64], k: &[f64], size: f64) -> Option<Self> {
        // Products are scaled behind the sum, or before.
        let overflows = |size: f64| size * softmax_scale.max(1.0) >= NEVER_OVERFLOWS;
        if !size.is_nan() && !overflows(size) {
            return None;
        }
        let (mut sum, mut parts) = (0.0, [0.0; 2]);
        for product in q.iter().zip(k).map(|(q, k)| q * k) {
            sum += product;
            parts[usize::from(product > 0.0)] += product.abs();
        }
        // That is so in every order.
        if sum.is_nan() {
            return Some(Self { exact: f64::NAN, finite: None, infinite: [false; 2], may_be_nan: true });
        }
        let reached = parts.map(overflows);
        if reached == [false; 2] {
            return None;
        }
        let score = softmax_scale * sum;
        Some(Self {
            exact: if score.abs() > f64::from(f32::MAX) { score * f64::INFINITY } else { score },
            finite: (score.abs() <= MAY_BE_FINITE).then_some(score),
            // Beside an infinite product a sum is that infinity, or NaN.
            infinite: if sum.is_infinite() { parts.map(f64::is_infinite) } else { reached },
            may_be_nan: reached == [true; 2],
        })
    }

    /// The numbers among them.
    fn numbers(&self) -> impl Iterator<Item = f64> {
        let infinities = [f64::NEG_INFINITY, f64::INFINITY].into_iter().zip(self.infinite);
        infinities.filter_map(|(number, may_be)| may_be.then_some(number)).chain(self.finite)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAX: f64 = f32::MAX as f64;
    const INF: f64 = f64::INFINITY;

    fn of(softmax_scale: f64, q: &[f64], k: &[f64]) -> Option<(f64, Vec<f64>, bool)> {
        let size = q.iter().zip(k).map(|(q, k)| (q * k).abs()).sum();
        let sums = Sums::of(softmax_scale, q, k, size)?;
        let mut numbers: Vec<f64> = sums.numbers().collect();
        numbers.sort_by(f64::total_cmp);
        Some((sums.exact, numbers, sums.may_be_nan))
    }

    #[test]
    fn sums_by_hand() {
        assert_eq!(of(1.0, &[1.0, -2.0], &[3.0, 1e30]), None);
        // Infinite products of one sign. Beside those of the other sign, NaN.
        assert_eq!(of(1.0, &[1.0, -2.0], &[INF, 1e30]), Some((INF, vec![INF], false)));
        assert_eq!(of(1.0, &[-1.0, -2.0], &[INF, -MAX]), Some((-INF, vec![-INF], true)));
        let nan = |q: &[f64], k: &[f64]| {
            let (exact, numbers, may_be_nan) = of(1.0, q, k).unwrap();
            assert!(exact.is_nan() && numbers.is_empty() && may_be_nan);
        };
        nan(&[1.0, -1.0], &[INF, INF]);
        nan(&[1.0, 0.0], &[1.0, INF]);
        nan(&[1.0, 1.0], &[1.0, f64::NAN]);
        // Sums that overflow, and sums that do in one order: 2 MAX - MAX.
        assert_eq!(of(0.5, &[3.0, 1.0], &[MAX, 0.0]), Some((INF, vec![INF], false)));
        assert_eq!(of(1.0, &[-3.0, 1.0], &[MAX, 1.0]), Some((-INF, vec![-INF], false)));
        assert_eq!(of(0.5, &[2.0, -1.0], &[MAX, 0.25 * MAX]), Some((0.875 * MAX, vec![0.875 * MAX, INF], false)));
        assert_eq!(of(1.0, &[2.0, -1.0], &[MAX, MAX]), Some((MAX, vec![-INF, MAX, INF], true)));
        assert_eq!(of(1.0, &[2.0, -2.0], &[MAX, MAX]), Some((0.0, vec![-INF, 0.0, INF], true)));
        // The scale alone may make a sum overflow.
        assert_eq!(of(8.0, &[1.0], &[0.2 * MAX]), Some((INF, vec![INF], false)));
        assert_eq!(of(1.0, &[1.0], &[0.2 * MAX]), None);
    }

    fn judged(logit: &MaxLogit, got: f64) -> bool {
        let (near, error) = logit.nearest(got);
        got == near || (got - near).abs() <= 2.0 * error
    }

    #[test]
    fn any_order_is_right_and_nothing_else() {
        let sums = |q: &[f64], k: &[f64]| Sums::of(1.0, q, k, INF).unwrap();
        // A sure score of 3, one that is 5, inf, -inf or NaN, and one that is -inf or NaN.
        let mut logit = MaxLogit::NONE;
        logit.take(3.0, 0.25);
        logit.take(f64::NAN, 1.0);
        logit.take_any(&sums(&[2.0, -2.0, 1.0], &[MAX, MAX, 5.0]), |sum| sum, 0.25, 0.0);
        assert_eq!((logit.value, logit.least, logit.most), (5.0, 4.75, 5.25));
        let right = [2.5, 3.0, 3.5, 4.5, 5.0, 5.5, INF];
        let wrong = [-INF, 2.4, 3.6, 4.4, 5.6, 1e38, MAX, f64::NAN];
        assert!(right.iter().all(|&got| judged(&logit, got)) && !wrong.iter().any(|&got| judged(&logit, got)));
        // A cap c: it is c, -c or what is between.
        let mut capped = MaxLogit::NONE;
        capped.take_any(&sums(&[-2.0, 1.0], &[MAX, 1.0]), |sum| 50.0 * (sum / 50.0).tanh(), 1e-5, 0.0);
        assert_eq!(capped.value, -50.0);
        assert!(judged(&capped, -50.0) && ![-INF, 50.0, 0.0].iter().any(|&got| judged(&capped, got)));
        capped.take_any(&sums(&[-2.0, 2.0, 1.0], &[MAX, MAX, 30.0]), |sum| 50.0 * (sum / 50.0).tanh(), 1e-5, 0.0);
        let between = 50.0 * 0.6f64.tanh();
        assert!([-50.0, between, 50.0].iter().all(|&got| judged(&capped, got)));
        assert!(![-INF, INF, 30.0, 49.0].iter().any(|&got| judged(&capped, got)));
        // Where nothing is left of a sum but its error, the cap bounds it.
        let mut any = MaxLogit::NONE;
        any.take_any(&sums(&[-2.0, 2.0, 1.0], &[MAX, MAX, 30.0]), |sum| 50.0 * (sum / 50.0).tanh() - 3.0, 1e32, 0.25);
        assert!([-INF, -53.5, -53.0, 0.0, 47.0, 47.5].iter().all(|&got| judged(&any, got)));
        assert!(![INF, 50.0, -60.0, f64::NAN].iter().any(|&got| judged(&any, got)));
        // Nothing but NaN.
        let mut none = MaxLogit::NONE;
        none.take_any(&sums(&[1.0, -1.0], &[INF, INF]), |sum| sum, 0.0, 0.0);
        assert!(judged(&none, -INF) && !judged(&none, INF) && !judged(&none, f64::NAN) && !judged(&none, 0.0));
        // An infinite score that is sure leaves nothing else.
        logit.take_any(&sums(&[1.0], &[INF]), |sum| sum, 0.0, 0.0);
        assert!(logit.value == INF && judged(&logit, INF) && !judged(&logit, 5.0) && !judged(&logit, MAX));
        let mut all = capped;
        all.join(logit);
        assert!(judged(&all, INF) && !judged(&all, 50.0));
    }

    #[test]
    fn very_many_possible_scores_take_little_memory() {
        let mut logit = MaxLogit::NONE;
        for i in 0..3 * MOST_POSSIBLE {
            let sums = Sums { exact: i as f64, finite: Some(i as f64), infinite: [true, true], may_be_nan: true };
            logit.take_any(&sums, |sum| sum, 0.0, 0.0);
        }
        assert!(logit.possible.len() <= MOST_POSSIBLE);
        let last = 3.0 * MOST_POSSIBLE as f64 - 1.0;
        assert!([0.0, 7.0, last, INF, -INF].iter().all(|&got| judged(&logit, got)));
        assert!(![-1.0, last + 1.0].iter().any(|&got| judged(&logit, got)));
    }
}
