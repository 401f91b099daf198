//! The additive bias of a case, and its gradient, in guarded memory.

use std::cmp::Ordering;
use std::fmt;
use std::str::FromStr;

use hopper_attention::{Args, DType, Dims, Element, Layout, Mask, Slot, TensorMut, TensorRef, bf16, f16};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use rand_distr::StandardNormal;
use serde::{Deserialize, Serialize};

use crate::data::{Image, Poison};

/// What the numbers of a bias are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Numbers {
    /// Normal, of deviation 2.
    Normal,
    /// The same, and -inf in one of four places and in one of eight rows. Where the mask hides all pairs that share a number, it is NaN.
    Hidden,
    /// The same as normal, and -1e30 (f16: -60000) in one of three places and in one of eight rows: nearly hidden.
    Lowest,
    /// 0, and -inf in half of the places and in one of eight rows: a mask.
    Mask,
}

impl Numbers {
    const ALL: [(&'static str, Self); 4] =
        [("normal", Self::Normal), ("hidden", Self::Hidden), ("lowest", Self::Lowest), ("mask", Self::Mask)];

    /// One of them.
    fn one(self, dtype: DType, kept: bool, draw: BiasDraw) -> f64 {
        let BiasDraw { whole, one_of, normal } = draw;
        match self {
            Self::Normal => normal,
            Self::Hidden if !kept => f64::NAN,
            Self::Hidden if whole || one_of < 3 => f64::NEG_INFINITY,
            Self::Lowest if whole || one_of < 4 => {
                if dtype == DType::F16 {
                    -60000.0
                } else {
                    -1e30
                }
            }
            Self::Hidden | Self::Lowest => normal,
            Self::Mask if whole || one_of < 6 => f64::NEG_INFINITY,
            Self::Mask => 0.0,
        }
    }
}

/// What is drawn for a number of a bias, whatever it holds.
#[derive(Clone, Copy, Debug)]
pub struct BiasDraw {
    /// Whether its row is hidden, or lowest, in all places: one row in eight.
    pub whole: bool,
    /// From 0 to below 12.
    pub one_of: u32,
    /// Normal, of deviation 2.
    pub normal: f64,
}

/// The bias of a case: which form it has, and what it holds.
///
/// As text it is `none`, or the type, the dimensions that it has beside the keys, and what it holds: `f32:bhq`, `bf16:h:hidden`,
/// `f16` or `f16::mask`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Bias(Option<(hopper_attention::Bias, &'static str)>);

impl Bias {
    /// None at all.
    pub const NONE: Self = Self(None);

    /// Every form of every type, with every kind of numbers.
    pub fn all() -> impl Iterator<Item = Self> + Clone {
        let forms = (0..8).flat_map(|bits| [DType::F32, DType::BF16, DType::F16].map(|dtype| form(dtype, bits)));
        forms.flat_map(|form| Numbers::ALL.map(|(name, _)| Self(Some((form, name)))))
    }

    /// Whether the problem has none.
    pub fn is_none(&self) -> bool {
        self.0.is_none()
    }

    /// The form. `None` where there is no bias.
    pub fn option(self) -> Option<hopper_attention::Bias> {
        self.0.map(|(form, _)| form)
    }

    /// What it holds: `normal`, `hidden`, `lowest` or `mask`. `None` where there is no bias.
    pub fn holds(self) -> Option<&'static str> {
        self.0.map(|(_, numbers)| numbers)
    }

    /// The number that a draw makes. `kept`: whether the mask keeps a pair that reads it. 0 where there is no bias.
    pub fn number(self, kept: bool, draw: BiasDraw) -> f64 {
        self.0.map_or(0.0, |(form, numbers)| {
            let known = Numbers::ALL.into_iter().find(|(name, _)| *name == numbers);
            known.map_or(f64::NAN, |(_, numbers)| numbers.one(form.dtype(), kept, draw))
        })
    }

    /// The numbers of a problem of these sizes. The same seed gives the same numbers on every machine. In each second seed rows lie
    /// apart.
    pub fn image(self, dims: Dims, mask: Mask, seed: u64) -> Option<BiasImage> {
        self.image_of(dims, None, &[[dims.seqlen_q, dims.seqlen_kv]], mask, seed)
    }

    /// The same of a problem whose sequences have these numbers of queries and of keys. `covering`: those that the bias has, where
    /// they are not those of the problem.
    pub fn image_of(
        self,
        dims: Dims,
        covering: Option<[usize; 2]>,
        sequences: &[[usize; 2]],
        mask: Mask,
        seed: u64,
    ) -> Option<BiasImage> {
        let (form, _) = self.0?;
        let shape = shape(form, dims, covering);
        let [_, _, queries, keys] = shape;
        let mut rng = StdRng::seed_from_u64(seed ^ 0x6269_6173);
        // For each place of a row whether the mask keeps a pair of it, in any sequence.
        let kept: Vec<bool> = (0..queries * keys)
            .map(|i| {
                let (query, key) = (i / keys.max(1), i % keys.max(1));
                sequences.iter().any(|&[seqlen_q, seqlen_kv]| {
                    let keeps =
                        |query| query < seqlen_q && key < seqlen_kv && mask.keep(query, key, seqlen_q, seqlen_kv);
                    if form.is_per_query() { keeps(query) } else { (0..seqlen_q).any(keeps) }
                })
            })
            .collect();
        let mut row = 0;
        let mut values = Vec::with_capacity(shape.iter().product());
        for i in 0..shape.iter().product::<usize>() {
            if i.is_multiple_of(keys) {
                row = rng.random_range(0..8);
            }
            let normal = 2.0 * rng.sample::<f64, _>(StandardNormal);
            let draw = BiasDraw { whole: row == 7, one_of: rng.random_range(0..12), normal };
            values.push(self.number(kept[i % kept.len()], draw));
        }
        Some(BiasImage::holding(form.dtype(), &values, layout(shape, seed)))
    }

    /// Memory for the gradient, which was not written yet. `covering`: as in [`image_of`](Self::image_of).
    pub fn gradient(self, dims: Dims, covering: Option<[usize; 2]>, seed: u64) -> Option<BiasImage> {
        let (form, _) = self.0?;
        Some(BiasImage::poisoned(form.dtype(), layout(shape(form, dims, covering), seed / 2)))
    }
}

fn form(dtype: DType, bits: u8) -> hopper_attention::Bias {
    let form = hopper_attention::Bias::new(dtype).per_batch(bits & 1 != 0);
    form.per_head(bits & 2 != 0).per_query(bits & 4 != 0)
}

fn shape(form: hopper_attention::Bias, dims: Dims, covering: Option<[usize; 2]>) -> [usize; 4] {
    let of = |own, size| if own { size } else { 1 };
    let (batch, heads) = (of(form.is_per_batch(), dims.batch), of(form.is_per_head(), dims.heads_q));
    let [queries, keys] = covering.unwrap_or([dims.seqlen_q, dims.seqlen_kv]);
    [batch, heads, of(form.is_per_query(), queries), keys]
}

/// Rows that follow each other, or that lie apart, with the heads outside of the batch entries.
fn layout(shape: [usize; 4], seed: u64) -> Layout<4> {
    if seed.is_multiple_of(2) {
        return Layout::contiguous(shape).expect("a small tensor");
    }
    let [batch, _, queries, keys] = shape.map(|size| size as i64);
    let row = keys + 3;
    Layout::with_strides(shape, [row * queries, row * queries * batch, row, 1]).expect("a small tensor")
}

impl Ord for Bias {
    fn cmp(&self, other: &Self) -> Ordering {
        self.to_string().cmp(&other.to_string())
    }
}

impl PartialOrd for Bias {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl fmt::Display for Bias {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some((form, numbers)) = self.0 else { return f.pad("none") };
        let own = [(form.is_per_batch(), "b"), (form.is_per_head(), "h"), (form.is_per_query(), "q")];
        let own: String = own.into_iter().filter_map(|(own, letter)| own.then_some(letter)).collect();
        let text = match (own.as_str(), numbers) {
            ("", "normal") => form.dtype().to_string(),
            (_, "normal") => format!("{}:{own}", form.dtype()),
            _ => format!("{}:{own}:{numbers}", form.dtype()),
        };
        f.pad(&text)
    }
}

impl FromStr for Bias {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "none" {
            return Ok(Self::NONE);
        }
        let refused = || {
            format!(
                "bias `{text}`; allowed: none, or f32, bf16 or f16, then `:` and some of the letters bhq, then `:` and normal, \
                 hidden, lowest or mask"
            )
        };
        let mut words = text.split(':');
        let dtype =
            [DType::F32, DType::BF16, DType::F16].into_iter().find(|dtype| words.clone().next() == Some(dtype.name()));
        let (Some(dtype), _) = (dtype, words.next()) else { return Err(refused()) };
        let own = words.next().unwrap_or("");
        let bits = (0..8).find(|&bits| {
            let letters = [(1, 'b'), (2, 'h'), (4, 'q')].into_iter().filter(|(bit, _)| bits & bit != 0);
            letters.map(|(_, letter)| letter).eq(own.chars())
        });
        let numbers = words.next().unwrap_or("normal");
        let numbers = Numbers::ALL.into_iter().map(|(name, _)| name).find(|name| *name == numbers);
        match (bits, numbers, words.next()) {
            (Some(bits), Some(numbers), None) => Ok(Self(Some((form(dtype, bits), numbers)))),
            _ => Err(refused()),
        }
    }
}

impl TryFrom<String> for Bias {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<Bias> for String {
    fn from(bias: Bias) -> Self {
        bias.to_string()
    }
}

/// Memory of a bias, or of its gradient.
#[derive(Clone, Debug)]
pub enum BiasImage {
    /// In f32.
    F32(Image<f32, 4>),
    /// In bf16.
    Bf16(Image<bf16, 4>),
    /// In f16.
    F16(Image<f16, 4>),
}

/// Does the same to the memory of every type.
macro_rules! each {
    ($self:expr, $image:ident => $what:expr) => {
        match $self {
            BiasImage::F32($image) => $what,
            BiasImage::Bf16($image) => $what,
            BiasImage::F16($image) => $what,
        }
    };
}

impl BiasImage {
    fn holding(dtype: DType, values: &[f64], layout: Layout<4>) -> Self {
        match dtype {
            DType::BF16 => Self::Bf16(Image::holding(values, layout)),
            DType::F16 => Self::F16(Image::holding(values, layout)),
            _ => Self::F32(Image::holding(values, layout)),
        }
    }

    fn poisoned(dtype: DType, layout: Layout<4>) -> Self {
        match dtype {
            DType::BF16 => Self::Bf16(Image::poisoned(layout)),
            DType::F16 => Self::F16(Image::poisoned(layout)),
            _ => Self::F32(Image::poisoned(layout)),
        }
    }

    /// The numbers as the oracle reads them.
    pub fn values(&self) -> Vec<f64> {
        each!(self, image => image.values())
    }

    /// The layout.
    pub fn layout(&self) -> Layout<4> {
        each!(self, image => image.layout())
    }

    /// The element type.
    pub fn dtype(&self) -> DType {
        match self {
            Self::F32(_) => DType::F32,
            Self::Bf16(_) => DType::BF16,
            Self::F16(_) => DType::F16,
        }
    }

    /// The address of the first element.
    pub fn address(&self) -> *const std::ffi::c_void {
        each!(self, image => image.inner().as_ptr().cast())
    }

    /// The same, to be written.
    pub fn address_mut(&mut self) -> *mut std::ffi::c_void {
        each!(self, image => image.inner_mut().as_mut_ptr().cast())
    }

    /// Adds a bias to the arguments of a run in host memory.
    pub fn add_to<'a>(&'a self, args: Args<'a>) -> Args<'a> {
        each!(self, image => read(args, image))
    }

    /// Adds its gradient to the arguments of a run in host memory.
    pub fn add_gradient_to<'a>(&'a mut self, args: Args<'a>) -> Args<'a> {
        each!(self, image => write(args, image))
    }

    /// Takes the numbers of a bias that has at least as many of each dimension, from its first ones on.
    ///
    /// # Panics
    /// When that bias is smaller, or of another type.
    pub fn copy_from(&mut self, larger: &Self) {
        fn copy<T: Poison>(into: &mut Image<T, 4>, from: &Image<T, 4>) {
            let (to, of) = (into.layout(), from.layout());
            let shape = to.shape();
            for i in 0..shape.iter().product() {
                let index = [0, 1, 2, 3].map(|axis| i / shape[axis + 1..].iter().product::<usize>() % shape[axis]);
                let (to, of) = (to.offset(index).expect("of the shape"), of.offset(index).expect("a larger bias"));
                into.inner_mut()[to] = from.inner()[of];
            }
        }
        match (self, larger) {
            (Self::F32(into), Self::F32(from)) => copy(into, from),
            (Self::Bf16(into), Self::Bf16(from)) => copy(into, from),
            (Self::F16(into), Self::F16(from)) => copy(into, from),
            _ => panic!("a bias of another type"),
        }
    }

    /// Whether the memory is still what it was in `before`.
    ///
    /// # Errors
    /// Where it is not.
    pub fn check_unchanged(&self, before: &Self) -> Result<(), String> {
        match (before, self) {
            (Self::F32(before), Self::F32(now)) => before.check_unchanged(now.data()),
            (Self::Bf16(before), Self::Bf16(now)) => before.check_unchanged(now.data()),
            (Self::F16(before), Self::F16(now)) => before.check_unchanged(now.data()),
            _ => Err("a bias of another type".into()),
        }
    }

    /// As [`Image::check_written`].
    ///
    /// # Errors
    /// What a run did to this memory that it may not.
    pub fn check_written(&self) -> Result<(), String> {
        each!(self, image => image.check_written())
    }
}

fn read<'a, T: Poison + Element>(args: Args<'a>, image: &'a Image<T, 4>) -> Args<'a> {
    args.read(Slot::Bias, TensorRef::host(image.inner(), image.layout()).expect("a fitting layout"))
}

fn write<'a, T: Poison + Element>(args: Args<'a>, image: &'a mut Image<T, 4>) -> Args<'a> {
    let layout = image.layout();
    args.write(Slot::DBias, TensorMut::host(image.inner_mut(), layout).expect("a fitting layout"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn biases_follow_from_the_seed_and_have_names() {
        let dims = Dims::new(3, 20, 4, 8).with_seqlen_kv(30);
        for bias in Bias::all().chain([Bias::NONE]) {
            assert_eq!(bias.to_string().parse(), Ok(bias));
            let of = |seed| bias.image(dims, Mask::causal(), seed).map(|image| image.values());
            let [once, again] = [(); 2].map(|()| format!("{:?}", of(4)));
            assert_eq!(once, again);
            let Some(form) = bias.option() else { continue };
            let problem = hopper_attention::ForwardProblem::builder(DType::F32, dims).bias(Some(form)).build().unwrap();
            assert_eq!(bias.image(dims, Mask::Full, 1).unwrap().layout().shape(), problem.bias_shape());
            assert_eq!(of(5).unwrap().len(), problem.bias_shape().iter().product::<usize>());
        }
        assert_eq!(Bias::all().count(), 8 * 3 * 4);
        for wrong in ["", "f64", "f32:x", "f32:hb", "f32:b:c", "f32:b:normal:", "i32"] {
            assert!(wrong.parse::<Bias>().unwrap_err().contains("allowed: none, or f32, bf16 or f16"), "{wrong}");
        }
        let hidden = "f32:hq:hidden".parse::<Bias>().unwrap().image(dims, Mask::causal(), 2).unwrap().values();
        assert!(hidden.contains(&f64::NEG_INFINITY));
        for (i, x) in hidden.iter().enumerate() {
            assert_eq!(x.is_nan(), i % 30 > i / 30 % 20 + 10, "{i}: {x}");
        }
        assert!(hidden.chunks(30).any(|row| row.iter().all(|x| x.is_nan() || *x == f64::NEG_INFINITY)));
    }
}
