//! The inputs of a pass, and classes of values that attention meets in practice.
//!
//! A class says how normal values are changed. `hattn random`, `hattn bench` and the tests draw from the same classes, so that
//! what one of them shows can be looked at with another. `benches/peers/inputs.py` has the same definitions for PyTorch.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use rand_distr::StandardNormal;
use serde::{Deserialize, Serialize};

/// Which input.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Input {
    /// Queries.
    Q,
    /// Keys.
    K,
    /// Values.
    V,
    /// The gradient of the output.
    DO,
}

impl Input {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Q, Self::K, Self::V, Self::DO];
}

/// A class of inputs. Q, K and V are normal with mean 0 and deviation 1, and then changed. Scores are at the default softmax
/// scale, in natural units.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Class {
    /// Nothing is changed.
    #[default]
    Normal,
    /// Q and K times 3. Scores have a deviation of 9, so that a few keys have most of a query's weight.
    Peaky,
    /// The first key scores 15 on average for every query, the others 0: an attention sink.
    Sink,
    /// One key in 64, anywhere, scores up to 25 on average for every query: a row's maximum may come late.
    Late,
    /// One query in 128 is NaN: the first, the 129th, and so on.
    Nan,
}

/// Q and K times this.
const PEAKY: f64 = 3.0;
/// How far all queries lie along a common direction, so that a key along it has the same score for all of them on average.
const ALONG: f64 = 4.0;
/// The mean score of the first key.
const SINK: f64 = 15.0;
/// The largest mean score of a late key, and how many keys there are to a late one.
const LATE: f64 = 25.0;
const KEYS_TO_A_LATE_ONE: usize = 64;
/// How many queries there are to one of NaN.
const QUERIES_TO_A_NAN: usize = 128;

impl Class {
    /// All classes, in the order of tables.
    pub const ALL: [Self; 5] = [Self::Normal, Self::Peaky, Self::Sink, Self::Late, Self::Nan];

    /// The word for it on command lines, in the names of points and in files.
    pub fn name(self) -> &'static str {
        match self {
            Self::Normal => "normal",
            Self::Peaky => "peaky",
            Self::Sink => "sink",
            Self::Late => "late",
            Self::Nan => "nan",
        }
    }

    /// Whether nothing is changed: records leave such a class out.
    pub fn is_normal(&self) -> bool {
        *self == Self::Normal
    }

    /// Whether query number `query` of every sequence and head is NaN, and so is its row of the results.
    pub fn is_nan(self, query: usize) -> bool {
        self == Self::Nan && query.is_multiple_of(QUERIES_TO_A_NAN)
    }

    /// How an input of shape `[batch, seqlen, heads, head_dim]` is changed. Q and K must be given the same seed.
    pub fn shaped(self, input: Input, shape: [usize; 4], seed: u64) -> Shaped {
        let [batch, seqlen, heads, head_dim] = shape;
        // Far from the seeds of the values themselves, which are small multiples of this one.
        let mut rng = StdRng::seed_from_u64(seed ^ 0x5eed_c1a5_5e5e_ed00);
        let mut direction: Vec<f64> = (0..head_dim).map(|_| rng.sample(StandardNormal)).collect();
        let length = direction.iter().map(|x| x * x).sum::<f64>().sqrt();
        direction.iter_mut().for_each(|x| *x /= length);
        // A key of this length has a mean score of 1.
        let unit = (head_dim as f64).sqrt() / ALONG;
        let mut keys = BTreeMap::new();
        // Without keys there may be more heads than anybody can count.
        let batch = if seqlen == 0 { 0 } else { batch };
        for (batch, head) in (0..batch).flat_map(|batch| (0..heads).map(move |head| (batch, head))) {
            match (self, input) {
                (Self::Sink, Input::K) => {
                    keys.insert([batch, 0, head], SINK * unit);
                }
                (Self::Late, Input::K) => {
                    // In a short sequence one.
                    let count = (seqlen / KEYS_TO_A_LATE_ONE).max(1);
                    for key in rand::seq::index::sample(&mut rng, seqlen, count) {
                        keys.insert([batch, key, head], rng.random::<f64>() * LATE * unit);
                    }
                }
                _ => {}
            }
        }
        Shaped { class: self, input, direction, keys }
    }
}

impl fmt::Display for Class {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Class {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Self::ALL.into_iter().find(|class| class.name() == text).ok_or_else(|| {
            let names: Vec<_> = Self::ALL.iter().map(|class| class.name()).collect();
            format!("inputs `{text}`; allowed: {}", names.join(", "))
        })
    }
}

/// What a class makes of the rows of one input.
#[derive(Clone, Debug)]
pub struct Shaped {
    class: Class,
    input: Input,
    /// Of length 1.
    direction: Vec<f64>,
    /// `[batch, token, head]` of the keys that lie along the direction, and their lengths.
    keys: BTreeMap<[usize; 3], f64>,
}

impl Shaped {
    /// Changes the normal values of the row `[batch, token, head]`.
    pub fn row(&self, at: [usize; 3], row: &mut [f64]) {
        match (self.class, self.input) {
            (Class::Peaky, Input::Q | Input::K) => row.iter_mut().for_each(|x| *x *= PEAKY),
            (Class::Sink | Class::Late, Input::Q) => {
                row.iter_mut().zip(&self.direction).for_each(|(x, along)| *x += ALONG * along);
            }
            (Class::Nan, Input::Q) if self.class.is_nan(at[1]) => row.fill(f64::NAN),
            (_, Input::K) => {
                if let Some(length) = self.keys.get(&at) {
                    row.iter_mut().zip(&self.direction).for_each(|(x, along)| *x = length * along);
                }
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::Values;

    const KEYS: usize = 1024;
    const DIM: usize = 64;

    /// The scores of each key, `[key][query]`.
    fn scores(class: Class) -> Vec<Vec<f64>> {
        let [q, k] = [Input::Q, Input::K].map(|input| Values::Like(class).tensor(input, [1, KEYS, 1, DIM], 7));
        let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
        let score = |key, query| dot(q.row(0, query, 0), k.row(0, key, 0)) / (DIM as f64).sqrt();
        (0..KEYS).map(|key| (0..KEYS).map(|query| score(key, query)).collect()).collect()
    }

    fn mean(values: &[f64]) -> f64 {
        values.iter().sum::<f64>() / values.len() as f64
    }

    #[test]
    fn normal_is_what_it_was_and_no_class_changes_v() {
        for input in [Input::Q, Input::K, Input::V, Input::DO] {
            let shape = [2, 130, 3, 16];
            let normal = Values::Normal.tensor(input, shape, 5);
            assert_eq!(Values::Like(Class::Normal).tensor(input, shape, 5), normal);
            if matches!(input, Input::V | Input::DO) {
                assert!(Class::ALL.iter().all(|&class| Values::Like(class).tensor(input, shape, 5) == normal));
            }
        }
    }

    #[test]
    fn scores_of_a_sink_and_of_late_keys() {
        let sink = scores(Class::Sink);
        assert!((mean(&sink[0]) - 15.0).abs() < 0.5, "{}", mean(&sink[0]));
        assert!(sink[1..].iter().all(|key| mean(key).abs() < 3.0));

        let late: Vec<f64> = scores(Class::Late).iter().map(|key| mean(key)).collect();
        // Keys with a mean far from that of a normal key, whose deviation is 4 * 1 / sqrt(64) = 0.5.
        let high: Vec<f64> = late.iter().copied().filter(|&mean| mean > 2.5).collect();
        assert!((8..=16).contains(&high.len()) && high.iter().all(|&mean| mean < 26.0), "{high:?}");
    }

    #[test]
    fn peaky_scores_have_nine_times_the_deviation() {
        let deviation = |class| mean(&scores(class).concat().iter().map(|x| x * x).collect::<Vec<_>>()).sqrt();
        let ratio = deviation(Class::Peaky) / deviation(Class::Normal);
        assert!((ratio - 9.0).abs() < 1e-9, "{ratio}");
    }

    #[test]
    fn one_query_in_128_is_nan() {
        let q = Values::Like(Class::Nan).tensor(Input::Q, [2, 300, 2, 8], 1);
        for (i, row) in q.data().chunks_exact(8).enumerate() {
            let nan = Class::Nan.is_nan(i / 2 % 300);
            assert!(row.iter().all(|x| x.is_nan() == nan));
        }
        assert_eq!((0..300).filter(|&query| Class::Nan.is_nan(query)).collect::<Vec<_>>(), [0, 128, 256]);
        assert!((0..300).all(|query| !Class::Peaky.is_nan(query)));
    }

    #[test]
    fn each_head_has_late_keys_of_its_own_and_a_short_one_has_one() {
        let of = |seqlen| Class::Late.shaped(Input::K, [2, seqlen, 3, 8], 9).keys;
        assert_eq!((of(0).len(), of(1).len(), of(127).len(), of(640).len()), (0, 6, 6, 60));
        let heads = [[0, 0], [0, 1], [1, 0]].map(|[batch, head]| {
            let keys = of(640).into_keys().filter(move |at| (at[0], at[2]) == (batch, head));
            keys.map(|at| at[1]).collect::<Vec<_>>()
        });
        assert!(heads[0] != heads[1] && heads[0] != heads[2]);
    }

    #[test]
    fn words() {
        for class in Class::ALL {
            assert_eq!(class.to_string().parse(), Ok(class));
            assert_eq!(serde_json::to_string(&class).unwrap(), format!("\"{class}\""));
        }
        assert_eq!("x".parse::<Class>(), Err("inputs `x`; allowed: normal, peaky, sink, late, nan".into()));
    }
}
