//! Judges a tensor row by row, and then the groups that its elements make.

use std::collections::HashSet;

use super::super::rounding::hypot;
use super::figures::{Bound, Figures, Group};
use super::{BLOCK, COLUMN_DEVIATIONS, DEVIATIONS, NOISE, TIMES_PLAIN, TIMES_RMS};

/// One row to be judged.
pub(super) struct Row<'a> {
    /// The place `[batch, token, head]`.
    pub at: [usize; 3],
    pub got: &'a [f64],
    pub exact: &'a [f64],
    pub plain: &'a [f64],
    /// The standard deviation that the error of an element is expected to have.
    pub deviation: Vec<f64>,
    /// The standard deviation that the sum of the errors times the exact values is expected to have.
    pub along: f64,
    /// The part of the error of each element that does not average out over the elements of a row.
    pub alike: Vec<f64>,
    /// The part that does not average out over rows either.
    pub systematic: Vec<f64>,
    /// The least error of the plain computation that is allowed for, for the largest error.
    pub floor: f64,
    /// What the largest error is allowed in addition.
    pub ulps: f64,
    /// The least magnitude that the type of the results makes infinite. Infinity where infinities must match.
    pub overflow: f64,
}

impl Row<'_> {
    /// An infinite result stands for a number that rounds to it: the exact one, or else the nearest that does.
    fn unrounded(&self, got: f64, exact: f64) -> f64 {
        let finite = got.is_infinite() && exact.is_finite() && self.overflow.is_finite();
        if finite { got.signum() * self.overflow.max(exact * got.signum()) } else { got }
    }
}

/// Sums over elements. They decide about a group.
#[derive(Clone, Copy, Default)]
struct Sums {
    /// Squared errors, and squared errors of the plain computation.
    squares: [f64; 2],
    /// Variances that the errors are expected to have.
    variance: f64,
    /// Squared variances of those parts of the group whose errors are independent.
    variance_squares: f64,
    /// Errors times exact values, and the same for the plain computation.
    along: [f64; 2],
    /// The standard deviation that the first of `along` is expected to have.
    along_deviation: f64,
    /// Squared exact values.
    exact_squares: f64,
    /// Squares of the errors that do not average out.
    alike_squares: f64,
    /// The sum of `alike` times the exact values, and the root of the sum of its squares over rows.
    alike_along: [f64; 2],
    /// The sum of `systematic` times the exact values.
    systematic_along: f64,
}

impl Sums {
    fn of(row: &Row<'_>, dim: usize, error: f64, plain_error: f64) -> Self {
        let [deviation, alike, systematic] =
            [&row.deviation, &row.alike, &row.systematic].map(|sizes| sizes[dim].max(0.0));
        let exact = row.exact[dim];
        let variance = deviation * deviation;
        Self {
            squares: [error * error, plain_error * plain_error],
            variance,
            variance_squares: variance * variance,
            along: [error * exact, plain_error * exact],
            along_deviation: deviation * exact.abs(),
            exact_squares: exact * exact,
            alike_squares: (alike + systematic).powi(2),
            alike_along: [alike * exact.abs(); 2],
            systematic_along: systematic * exact.abs(),
        }
    }

    fn add(&mut self, other: &Self) {
        self.squares.iter_mut().zip(other.squares).for_each(|(sum, x)| *sum += x);
        self.variance += other.variance;
        self.variance_squares += other.variance_squares;
        self.along.iter_mut().zip(other.along).for_each(|(sum, x)| *sum += x);
        // The squares of numbers below 1e-154 are 0.
        self.along_deviation = hypot(self.along_deviation, other.along_deviation);
        self.exact_squares += other.exact_squares;
        self.alike_squares += other.alike_squares;
        self.alike_along =
            [self.alike_along[0] + other.alike_along[0], hypot(self.alike_along[1], other.alike_along[1])];
        self.systematic_along += other.systematic_along;
    }
}

/// The hash of a list with one number more. Nobody chooses these numbers, so a simple one is enough.
fn mixed(hash: u64, bits: u32) -> u64 {
    let product = u128::from(hash.wrapping_add(u64::from(bits) + 0x1000_0000_0001)) * 0x9e37_79b9_7f4a_7c15;
    product as u64 ^ (product >> 64) as u64
}

/// The figures of a tensor while its rows are judged one after another.
pub(super) struct Tally {
    figures: Figures,
    /// The relative error that all elements of a group may have together. `None` if this is not judged.
    common: Option<f64>,
    /// `[batch, tokens, heads, dims]`.
    shape: [usize; 4],
    /// The largest floor of a row.
    floor_max: f64,
    /// The largest allowance of a row in ulps.
    ulps_max: f64,
    /// The index of the largest error, the value that was found there, and the exact value.
    max_at: ([usize; 4], f64, f64),
    /// Number of finite elements.
    finite: usize,
    /// Hashes of the exact rows, rounded to f32.
    distinct: HashSet<u64>,
    rows: usize,
    tensor: Sums,
    heads: Vec<Sums>,
    /// `[head, dim]`.
    columns: Vec<Sums>,
    /// For each column the sum of the plain computation's errors.
    plain_sums: Vec<f64>,
    /// `[batch, head, block of tokens]`.
    blocks: Vec<Sums>,
}

impl Tally {
    pub(super) fn new(shape: [usize; 4], common: Option<f64>) -> Self {
        let [batch, tokens, heads, dims] = shape;
        let sums = |len: usize| vec![Sums::default(); len];
        Self {
            figures: Figures::default(),
            common,
            shape,
            floor_max: 0.0,
            ulps_max: 0.0,
            max_at: Default::default(),
            finite: 0,
            distinct: HashSet::new(),
            rows: 0,
            tensor: Sums::default(),
            heads: sums(heads),
            columns: sums(heads * dims),
            plain_sums: vec![0.0; heads * dims],
            blocks: sums(batch * heads * tokens.div_ceil(BLOCK)),
        }
    }

    pub(super) fn row(&mut self, row: &Row<'_>) {
        let [batch, token, head] = row.at;
        let place = |dim| [batch, token, head, dim];
        let mut hash = 0;
        let (mut worst, mut worst_dim, mut plain_worst) = (0.0_f64, None, 0.0_f64);
        let mut sums = Sums::default();
        for (dim, ((&got, &exact), &plain)) in row.got.iter().zip(row.exact).zip(row.plain).enumerate() {
            hash = mixed(hash, (exact as f32).to_bits()); // equal but for the rounding of f64
            let got = row.unrounded(got, exact);
            if !exact.is_finite() || !got.is_finite() {
                if !(got == exact || got.is_nan() && exact.is_nan()) {
                    self.worst(f64::INFINITY, Bound::Row, Some((place(dim), got, exact)));
                }
                continue;
            }
            let error = got - exact;
            if error.abs() > worst {
                (worst, worst_dim) = (error.abs(), Some(dim));
            }
            self.finite += 1;
            // If the plain computation overflowed, its error does not widen the tolerance.
            let plain_error = if plain.is_finite() { plain - exact } else { 0.0 };
            plain_worst = plain_worst.max(plain_error.abs());
            let element = Sums::of(row, dim, error, plain_error);
            let column = head * self.shape[3] + dim;
            self.columns[column].add(&element);
            self.plain_sums[column] += plain_error;
            sums.add(&element);
        }
        // The elements of a row share the errors of their weights. So a row counts as one sample.
        sums.variance_squares = sums.variance * sums.variance;
        sums.along_deviation = row.along.max(0.0);
        sums.alike_along[1] = sums.alike_along[0];
        let [_, tokens, heads, _] = self.shape;
        let block = (batch * heads + head) * tokens.div_ceil(BLOCK) + token / BLOCK;
        for group in [&mut self.tensor, &mut self.heads[head], &mut self.blocks[block]] {
            group.add(&sums);
        }
        self.distinct.insert(hash);
        self.rows += 1;

        // NaN inputs give a NaN floor. `f64::max` ignores the NaN.
        let alike = row.alike.iter().zip(&row.systematic).map(|(alike, systematic)| alike + systematic);
        let floor = alike.fold(row.floor.max(0.0), f64::max);
        let ulps = row.ulps.max(0.0);
        if let Some(dim) = worst_dim {
            let ratio = worst / (TIMES_PLAIN * plain_worst.max(floor) + ulps);
            self.worst(ratio, Bound::Row, Some((place(dim), row.got[dim], row.exact[dim])));
            if worst > self.figures.max {
                self.figures.max = worst;
                self.max_at = (place(dim), row.got[dim], row.exact[dim]);
            }
        }
        self.figures.plain_max = self.figures.plain_max.max(plain_worst);
        self.floor_max = self.floor_max.max(floor);
        self.ulps_max = self.ulps_max.max(ulps);
    }

    /// Takes a ratio of an error and its bound, and for a bound on one element the index, the value and the exact value.
    fn worst(&mut self, ratio: f64, bound: Bound, at: Option<([usize; 4], f64, f64)>) {
        let figures = &mut self.figures;
        let of_kind = match bound {
            Bound::Row => &mut figures.ratios.row,
            Bound::Tensor => &mut figures.ratios.tensor,
            Bound::Rms(_) => &mut figures.ratios.rms,
            Bound::Common(_) => &mut figures.ratios.common,
        };
        *of_kind = of_kind.max(ratio);
        if ratio > figures.worst_ratio {
            (figures.worst_ratio, figures.worst_bound) = (ratio, bound);
            let (place, got, exact) = at.map_or((Vec::new(), 0.0, 0.0), |(at, got, exact)| (at.to_vec(), got, exact));
            (figures.worst_at, figures.worst_got, figures.worst_exact) = (place, got, exact);
        }
    }

    fn group(&mut self, group: Group, sums: &Sums, copies: f64) {
        let deviations = if matches!(group, Group::Column { .. }) { COLUMN_DEVIATIONS } else { DEVIATIONS };
        let [error, plain] = sums.squares.map(f64::sqrt);
        // The number of samples, if rows of a larger variance count more.
        let samples = sums.variance * sums.variance / (sums.variance_squares * copies);
        let times = TIMES_RMS + if samples > 0.0 { deviations / (2.0 * samples).sqrt() } else { 0.0 };
        let noise = plain.max(sums.variance.sqrt());
        let noise_allowed = times * noise + sums.alike_squares.sqrt();
        if error > 0.0 {
            self.worst(error / noise_allowed, Bound::Rms(group), None);
        }
        let [along, plain_along] = sums.along.map(f64::abs);
        if let Some(common) = self.common
            && along > 0.0
        {
            let chance = deviations * sums.along_deviation * copies.sqrt();
            // Rows are rounded independently of each other, so far as they are not copies.
            let alike = sums.alike_along[0].min(deviations * sums.alike_along[1] * copies.sqrt());
            // Elements that are nothing but noise have no factor: what the first line allows, this one does.
            let exact = sums.exact_squares.sqrt();
            let of_noise = noise_allowed * exact * (noise / (NOISE * exact)).powi(2).min(1.0);
            let chance = chance.max(TIMES_PLAIN * plain_along).max(of_noise);
            let allowed = chance + common * sums.exact_squares + alike + sums.systematic_along;
            if allowed > 0.0 {
                self.worst(along / allowed, Bound::Common(group), None);
            }
        }
    }

    pub(super) fn figures(mut self) -> Figures {
        let tolerance = TIMES_PLAIN * self.figures.plain_max.max(self.floor_max) + self.ulps_max;
        if self.figures.max > 0.0 {
            self.worst(self.figures.max / tolerance, Bound::Tensor, Some(self.max_at));
        }
        // Equal rows have equal errors.
        let copies = self.rows as f64 / self.distinct.len().max(1) as f64;
        let [_, tokens, heads, dims] = self.shape;
        // Where rows have nearly the same weights, the plain computation's errors add up along a column. So do the others.
        let (columns, plain_sums) = (std::mem::take(&mut self.columns), std::mem::take(&mut self.plain_sums));
        let together = |columns: &[Sums], plain_sums: &[f64]| {
            let squares = columns.iter().map(|sums| sums.squares[1]).sum::<f64>();
            let of_sums = plain_sums.iter().map(|sum| sum * sum).sum::<f64>();
            if squares > 0.0 { copies.max(of_sums / squares) } else { copies }
        };
        self.group(Group::Tensor, &self.tensor.clone(), together(&columns, &plain_sums));
        let by_head = columns.chunks(dims.max(1)).zip(plain_sums.chunks(dims.max(1)));
        let by_head: Vec<f64> = by_head.map(|(columns, plain_sums)| together(columns, plain_sums)).collect();
        for (head, sums) in std::mem::take(&mut self.heads).iter().enumerate() {
            self.group(Group::Head(head), sums, by_head.get(head).copied().unwrap_or(copies));
        }
        for (i, (sums, plain_sum)) in columns.iter().zip(plain_sums).enumerate() {
            // In one column the plain errors may cancel by luck, where rows are nearly the same.
            let of_head = by_head.get(i / dims).copied().unwrap_or(copies);
            let copies = together(std::slice::from_ref(sums), &[plain_sum]).max(of_head);
            self.group(Group::Column { head: i / dims, dim: i % dims }, sums, copies);
        }
        let blocks = tokens.div_ceil(BLOCK);
        for (i, sums) in std::mem::take(&mut self.blocks).iter().enumerate() {
            let (batch, head) = (i / blocks / heads, i / blocks % heads);
            let copies = by_head.get(head).map_or(copies, |copies| copies.min(BLOCK as f64));
            self.group(Group::Block { batch, head, first: i % blocks * BLOCK }, sums, copies);
        }
        let mean = |squares: f64| if self.finite == 0 { 0.0 } else { (squares / self.finite as f64).sqrt() };
        [self.figures.rms, self.figures.plain_rms] = self.tensor.squares.map(mean);
        if self.tensor.exact_squares > 0.0 {
            self.figures.common = self.tensor.along[0] / self.tensor.exact_squares;
        }
        self.figures
    }
}
