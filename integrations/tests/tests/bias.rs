//! An additive bias on the CPU: values and gradients beside candle's own operations, with what it goes with, and what
//! is refused.

use std::cell::RefCell;

use candle_core::{D, DType, Device, Result, Shape, Tensor, Var};
use hopper_attention_candle::hopper_attention::{Error, dropout_state, reference::DropoutMask};
use hopper_attention_candle::{
    BlockLists, Dropout, Mask, Modifiers, Options, attention, attention_with, attention_with_alibi,
    attention_with_bias, attention_with_blocks, attention_with_sinks, cause,
};
use hopper_attention_integration_tests::{difference, gradients::on_several_threads};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use rand_distr::StandardNormal;

/// Batch, queries, keys, heads of Q and of K, and the head dim.
const BATCH: usize = 2;
const QUERIES: usize = 7;
const KEYS: usize = 10;
const HEADS: [usize; 2] = [4, 2];
const DIM: usize = 16;
const CAP: f64 = 2.0;
const SLOPES: [f32; HEADS[0]] = [0.5, 0.25, 0.125, 0.0625];
const SINKS: [f32; HEADS[0]] = [-20.0, 2.0, 0.5, -1.5];
const SEED: [u64; 2] = [77, 5 << 32];

thread_local! {
    /// Each test has a thread of its own, and so the same numbers every time.
    static NUMBERS: RefCell<StdRng> = RefCell::new(StdRng::seed_from_u64(11));
}

/// Normal numbers of mean 0 and deviation 1.
fn randn(shape: impl Into<Shape>) -> Result<Tensor> {
    let shape = shape.into();
    let values =
        NUMBERS.with_borrow_mut(|random| (0..shape.elem_count()).map(|_| random.sample(StandardNormal)).collect());
    Tensor::from_vec::<_, f32>(values, shape, &Device::Cpu)
}

/// What a call has beside Q, K, V and the bias.
#[derive(Clone, Copy, Debug)]
struct With {
    mask: Mask,
    softcap: bool,
    alibi: bool,
    sinks: bool,
    dropout: bool,
}

const PLAIN: With = With { mask: Mask::Full, softcap: false, alibi: false, sinks: false, dropout: false };

fn cases() -> [With; 8] {
    [
        PLAIN,
        With { mask: Mask::causal(), ..PLAIN },
        With { mask: Mask::window(Some(3), Some(1)), ..PLAIN },
        With { softcap: true, ..PLAIN },
        With { alibi: true, ..PLAIN },
        With { sinks: true, ..PLAIN },
        With { dropout: true, mask: Mask::causal(), ..PLAIN },
        With { mask: Mask::causal(), softcap: true, alibi: true, sinks: true, dropout: true },
    ]
}

fn dropout() -> Dropout {
    Dropout::new(0.3).expect("a probability")
}

impl With {
    fn options(self) -> Options {
        let options = Options::new().mask(self.mask).softcap(if self.softcap { CAP as f32 } else { 0.0 });
        if self.dropout { options.dropout(dropout(), SEED[0], SEED[1]) } else { options }
    }
}

/// The shape of each form of a bias.
fn forms() -> impl Iterator<Item = [usize; 4]> {
    let size = |wanted: bool, size: usize| if wanted { size } else { 1 };
    (0..8).map(move |bits| {
        [size(bits & 1 != 0, BATCH), size(bits & 2 != 0, HEADS[0]), size(bits & 4 != 0, QUERIES), KEYS]
    })
}

/// Numbers of which some are -inf. Where there are several rows, all of the last row are.
fn some_hidden(shape: [usize; 4]) -> Result<Tensor> {
    let rows = shape[0] * shape[1] * shape[2];
    let numbers = randn(rows * KEYS)?.to_vec1::<f32>()?;
    let hidden = |i: usize| i % 7 == 3 || (rows > 1 && i / KEYS == rows - 1);
    let numbers = numbers.into_iter().enumerate().map(|(i, x)| if hidden(i) { f32::NEG_INFINITY } else { x });
    Tensor::from_iter(numbers, &Device::Cpu)?.reshape(&shape)
}

/// Q, K, V and the gradient of O, rounded to a type, in f32.
fn inputs(dtype: DType) -> Result<[Tensor; 4]> {
    let random = |rows, heads| randn((BATCH, rows, heads, DIM))?.to_dtype(dtype)?.to_dtype(DType::F32);
    Ok([random(QUERIES, HEADS[0])?, random(KEYS, HEADS[1])?, random(KEYS, HEADS[1])?, random(QUERIES, HEADS[0])?])
}

/// A number of each batch entry, head, query and key.
fn each(number: impl Fn(usize, usize, usize, usize) -> f32) -> Result<Tensor> {
    let all = (0..BATCH * HEADS[0] * QUERIES * KEYS).map(|i| {
        let (row, head) = (i / KEYS, i / KEYS / QUERIES);
        number(head / HEADS[0], head % HEADS[0], row % QUERIES, i % KEYS)
    });
    Tensor::from_iter(all, &Device::Cpu)?.reshape((BATCH, HEADS[0], QUERIES, KEYS))
}

/// The definition, by candle's own operations. A row without keys is 0.
fn defined([q, k, v]: [&Tensor; 3], bias: &Tensor, sinks: Option<&Tensor>, with: With) -> Result<Tensor> {
    let group = HEADS[0] / HEADS[1];
    let repeated = |tensor: &Tensor| {
        let wide = tensor.unsqueeze(3)?.broadcast_as((BATCH, KEYS, HEADS[1], group, DIM))?;
        wide.reshape((BATCH, KEYS, HEADS[0], DIM))?.transpose(1, 2)?.contiguous()
    };
    let mut scores = (q.transpose(1, 2)?.contiguous()?.matmul(&repeated(k)?.t()?)? * (1.0 / (DIM as f64).sqrt()))?;
    if with.softcap {
        scores = ((scores / CAP)?.tanh()? * CAP)?;
    }
    scores = scores.broadcast_add(bias)?;
    if with.alibi {
        scores = (scores - each(|_, head, i, j| SLOPES[head] * (i + KEYS - QUERIES).abs_diff(j) as f32)?)?;
    }
    let hidden = |keep: bool| if keep { 0.0 } else { f32::NEG_INFINITY };
    scores = (scores + each(|_, _, i, j| hidden(with.mask.keep(i, j, QUERIES, KEYS)))?)?;
    // A finite maximum, near the sinks, so that a row without keys makes no NaN. Its sum of 0 becomes 1.
    let highest = scores.max_keepdim(D::Minus1)?.clamp(-3f32, f32::MAX)?.detach();
    let weights = scores.broadcast_sub(&highest)?.exp()?;
    let mut sum = weights.sum_keepdim(D::Minus1)?;
    if let Some(sinks) = sinks {
        sum = (sum + sinks.to_dtype(DType::F32)?.reshape((1, HEADS[0], 1, 1))?.broadcast_sub(&highest)?.exp()?)?;
    }
    let empty = sum.eq(0f32)?.to_dtype(DType::F32)?;
    let mut weights = weights.broadcast_div(&(sum + empty)?)?;
    if with.dropout {
        let mask = DropoutMask::new(dropout(), HEADS[0], dropout_state(SEED[0], SEED[1]));
        let factor = dropout().factor() as f32;
        weights = (weights * each(|b, head, i, j| if mask.keeps(b, head, i, j) { factor } else { 0.0 })?)?;
    }
    weights.matmul(&repeated(v)?)?.transpose(1, 2)?.contiguous()
}

fn ours([q, k, v]: [&Tensor; 3], bias: &Tensor, sinks: Option<&Tensor>, with: With) -> Result<Tensor> {
    let slopes = Tensor::new(&SLOPES, &Device::Cpu)?;
    let mut modifiers = Modifiers::new().bias(bias);
    if let Some(sinks) = sinks {
        modifiers = modifiers.sinks(sinks);
    }
    if with.alibi {
        modifiers = modifiers.alibi_slopes(&slopes);
    }
    attention_with(q, k, v, modifiers, &with.options())
}

type Attend<'a> = &'a dyn Fn([&Tensor; 3], &Tensor, Option<&Tensor>, With) -> Result<Tensor>;

/// A part of a tensor.
type View<'a> = &'a dyn Fn(&Tensor) -> Result<Tensor>;

const NAMES: [&str; 6] = ["o", "d_q", "d_k", "d_v", "d_bias", "d_sinks"];

/// O, and the gradients of Q, K, V, the bias and, where there are any, the sinks. Q, K and V have the first type, and
/// the bias the second.
fn outcome(
    [q, k, v, d_o]: &[Tensor; 4],
    bias: &Tensor,
    with: With,
    [dtype, of_bias]: [DType; 2],
    attend: Attend<'_>,
) -> Result<Vec<Tensor>> {
    let var = |tensor: &Tensor, dtype| Var::from_tensor(&tensor.to_dtype(dtype)?);
    let vars = [var(q, dtype)?, var(k, dtype)?, var(v, dtype)?, var(bias, of_bias)?, Var::new(&SINKS, &Device::Cpu)?];
    let [q, k, v, bias, sinks] = &vars;
    let o = attend([q, k, v], bias, with.sinks.then_some(sinks.as_tensor()), with)?;
    let gradients = (&o * d_o.to_dtype(dtype)?)?.sum_all()?.backward()?;
    let mut all = vec![o];
    for var in vars.iter().take(if with.sinks { 5 } else { 4 }) {
        // What has no gradient has one of 0.
        let gradient = gradients.get(var).cloned().map_or_else(|| var.zeros_like(), Ok)?;
        assert_eq!((gradient.dims(), gradient.dtype()), (var.dims(), var.dtype()));
        all.push(gradient);
    }
    // candle's maximum can lose a NaN.
    for (name, tensor) in NAMES.iter().zip(&all) {
        let sum = tensor.to_dtype(DType::F32)?.sum_all()?.to_scalar::<f32>()?;
        assert!(sum.is_finite(), "{name}: {sum}");
    }
    Ok(all)
}

/// The largest difference of O and of gradients from the definition in f32, each as a part of the largest magnitude.
fn worst(bias: &Tensor, with: With, [dtype, of_bias]: [DType; 2], attend: Attend<'_>) -> Result<f32> {
    let inputs = inputs(dtype)?;
    let bias = bias.to_dtype(of_bias)?.to_dtype(DType::F32)?;
    let want = outcome(&inputs, &bias, with, [DType::F32; 2], &defined)?;
    let got = outcome(&inputs, &bias, with, [dtype, of_bias], attend)?;
    let mut worst = 0f32;
    for (name, (got, want)) in NAMES.iter().zip(got.iter().zip(&want)) {
        let (difference, largest) = difference(got, want)?;
        assert!(largest > 1e-3, "{name}: {largest}");
        let part = difference / largest;
        // Unlike `f32::max`, this keeps a NaN.
        worst = if part <= worst { worst } else { part };
    }
    Ok(worst)
}

#[test]
fn values_and_gradients_are_those_of_the_definition() -> Result<()> {
    for shape in forms() {
        for with in cases() {
            let worst = worst(&some_hidden(shape)?, with, [DType::F32; 2], &ours)?;
            assert!(worst <= 2e-5, "{shape:?} {with:?}: {worst}");
        }
    }
    Ok(())
}

#[test]
fn the_bias_has_a_type_of_its_own() -> Result<()> {
    let types = [(DType::F32, 2e-5), (DType::BF16, 3e-2), (DType::F16, 5e-3)];
    for (dtype, bound) in types {
        for (of_bias, of_gradient) in types {
            for shape in [[1, 1, 1, KEYS], [BATCH, HEADS[0], QUERIES, KEYS]] {
                let worst = worst(&some_hidden(shape)?, cases()[7], [dtype, of_bias], &ours)?;
                assert!(worst <= f32::max(bound, of_gradient), "{dtype:?} {of_bias:?} {shape:?}: {worst}");
            }
        }
    }
    Ok(())
}

#[test]
fn a_wrong_bias_and_a_lost_gradient_are_seen() -> Result<()> {
    for shape in forms() {
        for wrong in ["a little more", "without a gradient"] {
            let attend: Attend<'_> = &|qkv, bias, sinks, with| match wrong {
                "a little more" => ours(qkv, &(bias * 1.01)?, sinks, with),
                _ => ours(qkv, &bias.detach(), sinks, with),
            };
            let worst = worst(&some_hidden(shape)?, cases()[1], [DType::F32; 2], attend)?;
            assert!(worst > 5e-4, "{shape:?} {wrong}: {worst}");
        }
    }
    Ok(())
}

/// A pair that is hidden has a gradient of 0, and NaN in its key and value reaches nothing. A hidden row is 0.
#[test]
fn minus_infinity_hides() -> Result<()> {
    let [q, k, v, d_o] = inputs(DType::F32)?;
    // The first key of all queries, and all keys of query 2.
    let hidden = |i: usize| i.is_multiple_of(KEYS) || i / KEYS == 2;
    let numbers = (0..QUERIES * KEYS).map(|i| if hidden(i) { f32::NEG_INFINITY } else { i as f32 / 50.0 });
    let bias = Tensor::from_iter(numbers, &Device::Cpu)?.reshape((1, 1, QUERIES, KEYS))?;
    let poisoned = |tensor: &Tensor| {
        let nan = tensor.narrow(1, 0, 1)?.affine(0.0, f64::NAN)?;
        Tensor::cat(&[&nan, &tensor.narrow(1, 1, KEYS - 1)?], 1)
    };
    let clean = outcome(&[q.clone(), k.clone(), v.clone(), d_o.clone()], &bias, PLAIN, [DType::F32; 2], &ours)?;
    let got = outcome(&[q, poisoned(&k)?, poisoned(&v)?, d_o], &bias, PLAIN, [DType::F32; 2], &ours)?;
    for (name, (got, clean)) in NAMES.iter().zip(got.iter().zip(&clean)) {
        // A NaN can make the CPU sum in another order.
        assert!(difference(got, clean)?.0 <= 2e-6, "{name}");
    }
    let zero = |tensor: Tensor| tensor.abs()?.max_all()?.to_scalar::<f32>();
    let [o, d_q, d_k, d_v, d_bias] = &clean[..] else { panic!("five tensors") };
    for of in [o.narrow(1, 2, 1)?, d_q.narrow(1, 2, 1)?, d_k.narrow(1, 0, 1)?, d_v.narrow(1, 0, 1)?] {
        assert_eq!(zero(of)?, 0.0);
    }
    for (i, gradient) in d_bias.flatten_all()?.to_vec1::<f32>()?.into_iter().enumerate() {
        assert_eq!(gradient == 0.0, hidden(i), "{i}: {gradient}");
    }
    Ok(())
}

/// Parts of larger tensors, transposed ones, and one that strides of 0 repeat. Gradients flow to where the views come
/// from.
#[test]
fn any_strides_will_do() -> Result<()> {
    let [q, k, v, _] = inputs(DType::F32)?;
    let random = |shape: [usize; 4]| Var::from_tensor(&randn(&shape[..])?);
    let [batch, heads] = [BATCH, HEADS[0]];
    let views: [(Var, View<'_>); 4] = [
        (random([batch, QUERIES, heads, KEYS])?, &|whole| whole.transpose(1, 2)),
        (random([batch, heads, QUERIES, KEYS + 5])?, &|whole| whole.narrow(3, 3, KEYS)),
        (random([1, heads, 1, KEYS])?, &|whole| whole.broadcast_as((batch, heads, QUERIES, KEYS))),
        (random([batch + 1, 1, QUERIES + 2, KEYS])?, &|whole| whole.narrow(0, 1, batch)?.narrow(2, 2, QUERIES)),
    ];
    for (i, (whole, view)) in views.iter().enumerate() {
        let bias = view(whole)?;
        assert!(!bias.is_contiguous(), "{i}");
        let o = attention_with_bias(&q, &k, &v, &bias, &Options::new())?;
        let want = defined([&q, &k, &v], &bias, None, PLAIN)?;
        let (worst, largest) = difference(&o, &want)?;
        assert!(worst <= 2e-6 * largest, "{i}: {worst}");
        let of = |o: Tensor| Ok::<_, candle_core::Error>(o.sqr()?.sum_all()?.backward()?.get(whole).cloned());
        let (got, want) = (of(o)?.expect("a gradient"), of(want)?.expect("a gradient"));
        let (worst, largest) = difference(&got, &want)?;
        assert!(worst <= 2e-5 * largest && largest > 1e-3, "{i}: a gradient, {worst}");
    }
    Ok(())
}

/// Each set of inputs that want a gradient, with sinks and without, and gradients that several threads compute.
#[test]
fn any_of_the_inputs_may_want_a_gradient() -> Result<()> {
    let [q, k, v, _] = inputs(DType::F32)?;
    let var = Var::from_tensor;
    let bias = some_hidden([1, HEADS[0], QUERIES, KEYS])?;
    let vars = [var(&q)?, var(&k)?, var(&v)?, var(&bias)?, Var::new(&SINKS, &Device::Cpu)?];
    for with_sinks in [false, true] {
        let with = With { sinks: with_sinks, mask: Mask::causal(), ..PLAIN };
        let count = if with_sinks { 5 } else { 4 };
        let loss = |wanted: [bool; 5]| {
            let [q, k, v, bias, sinks] = [0, 1, 2, 3, 4]
                .map(|i| if wanted[i] { vars[i].as_tensor().clone() } else { vars[i].as_detached_tensor() });
            ours([&q, &k, &v], &bias, with_sinks.then_some(&sinks), with)?.sqr()?.sum_all()
        };
        let all = loss([true; 5])?;
        let want = all.backward()?;
        for bits in 1..1 << count {
            let wanted = [0, 1, 2, 3, 4].map(|i| bits >> i & 1 == 1);
            let got = loss(wanted)?.backward()?;
            for i in 0..count {
                match got.get(&vars[i]) {
                    Some(gradient) if wanted[i] => {
                        let want = want.get(&vars[i]).expect("a gradient");
                        assert_eq!(difference(gradient, want)?.0, 0.0, "{wanted:?} {i}");
                    }
                    other => assert!(other.is_none() && !wanted[i], "{wanted:?} {i}"),
                }
            }
        }
        assert!(!loss([false; 5])?.track_op());
        on_several_threads(&all, &want, &vars[..count].iter().collect::<Vec<_>>(), 1..4)?;
    }
    Ok(())
}

/// Each modifier alone is its own function, and a bias of 0 and -inf is a mask, also beside lists of blocks.
#[test]
fn modifiers_are_what_they_say() -> Result<()> {
    let [q, k, v, _] = inputs(DType::F32)?;
    let options = Options::new().mask(Mask::causal());
    let kept = each(|_, _, i, j| f32::from((i * 3 + j * 5) % 4 != 0))?.narrow(0, 0, 1)?.narrow(1, 0, 1)?;
    let blocks = BlockLists::from_mask(&kept.to_dtype(DType::U8)?)?;
    let (sinks, slopes) = (Tensor::new(&SINKS, &Device::Cpu)?, Tensor::new(&SLOPES, &Device::Cpu)?);
    let numbers = some_hidden([BATCH, 1, QUERIES, KEYS])?;
    let with = |modifiers| attention_with(&q, &k, &v, modifiers, &options);
    let new = Modifiers::new;
    for (name, got, want) in [
        ("none", with(new())?, attention(&q, &k, &v, &options)?),
        ("bias", with(new().bias(&numbers))?, attention_with_bias(&q, &k, &v, &numbers, &options)?),
        ("sinks", with(new().sinks(&sinks))?, attention_with_sinks(&q, &k, &v, &sinks, &options)?),
        ("alibi", with(new().alibi_slopes(&slopes))?, attention_with_alibi(&q, &k, &v, &slopes, &options)?),
        ("blocks", with(new().blocks(&blocks))?, attention_with_blocks(&q, &k, &v, &blocks, &options)?),
    ] {
        assert_eq!(difference(&got, &want)?.0, 0.0, "{name}");
    }
    let as_bias = kept.log()?; // 0, and -inf
    let both = numbers.broadcast_add(&as_bias)?;
    let got = with(new().bias(&numbers).blocks(&blocks).sinks(&sinks).alibi_slopes(&slopes))?;
    let want = with(new().bias(&both).sinks(&sinks).alibi_slopes(&slopes))?;
    assert!(difference(&got, &want)?.0 < 1e-6);
    assert!(difference(&got, &with(new().bias(&numbers).sinks(&sinks).alibi_slopes(&slopes))?)?.0 > 1e-2);
    assert!(difference(&with(new().bias(&as_bias))?, &with(new().blocks(&blocks))?)?.0 < 1e-6);
    Ok(())
}

#[test]
fn no_keys_and_no_queries_are_legal() -> Result<()> {
    let zeros = |shape: &[usize]| Var::zeros(shape, DType::F32, &Device::Cpu);
    for (rows, keys) in [(3, 0), (0, 3)] {
        let (q, k, bias) = (zeros(&[2, rows, 4, DIM])?, zeros(&[2, keys, 2, DIM])?, zeros(&[1, 4, rows, keys])?);
        let o = attention_with_bias(&q, &k, &k, &bias, &Options::new())?;
        assert_eq!(o.dims(), [2, rows, 4, DIM]);
        assert_eq!(o.sum_all()?.backward()?.get(&bias).expect("a gradient").dims(), bias.dims());
        // One bias for all queries has a gradient of 0 where there is no query.
        let shared = zeros(&[1, 4, 1, keys])?;
        let o = attention_with_bias(&q, &k, &k, &shared, &Options::new())?;
        let gradient = o.sum_all()?.backward()?.get(&shared).expect("a gradient").clone();
        assert_eq!(gradient.flatten_all()?.to_vec1::<f32>()?, vec![0.0; 4 * keys]);
    }
    Ok(())
}

#[test]
fn what_is_wrong_is_named() -> Result<()> {
    let [q, k, v, _] = inputs(DType::F32)?;
    let bias = |shape: &[usize], dtype| Tensor::zeros(shape, dtype, &Device::Cpu);
    let allowed = "allowed: [1 or 2, 1 or 4, 1 or 7, 10]";
    let shape = |shape: &[usize]| {
        Ok::<_, candle_core::Error>((format!("shape {shape:?}; {allowed}"), bias(shape, DType::F32)?))
    };
    let other = |words: &str, bias: Tensor| (words.to_string(), bias);
    for (words, bias) in [
        shape(&[3, 4, 7, 10])?,
        shape(&[2, 2, 7, 10])?,
        shape(&[2, 4, 8, 10])?,
        shape(&[2, 4, 7, 9])?,
        shape(&[2, 4, 7, 1])?,
        shape(&[0, 4, 7, 10])?,
        other("3 dimensions, [4, 7, 10]; allowed: 4, [1 or batch", bias(&[4, 7, 10], DType::F32)?),
        other("dtype f64; allowed: f32, bf16, f16", bias(&[1, 1, 7, 10], DType::F64)?),
        other("dtype u8; allowed: f32, bf16, f16", bias(&[1, 1, 7, 10], DType::U8)?),
        other("stride 7 in seqlen_kv; allowed: stride 1", bias(&[1, 1, 10, 7], DType::F32)?.t()?),
        other(
            "stride 0 in seqlen_kv; allowed: stride 1",
            bias(&[1, 1, 7, 1], DType::F32)?.broadcast_as((1, 1, 7, 10))?,
        ),
    ] {
        let error = attention_with_bias(&q, &k, &v, &bias, &Options::new()).unwrap_err();
        assert!(error.to_string().contains("bias: ") && error.to_string().contains(&words), "{words}: {error}");
        assert!(matches!(cause(&error), Some(Error::Value { .. } | Error::Layout { .. })), "{error}");
    }
    // A Q with another number of dimensions is named itself.
    let error = attention_with_bias(&q.get(0)?, &k, &v, &bias(&[1, 1, 7, 10], DType::F32)?, &Options::new());
    assert!(error.unwrap_err().to_string().contains("q: 3 dimensions"));
    Ok(())
}
