//! How far FP8 is from the f64 oracle on the tensors before they were quantised, as relative RMSE of O: measured, held
//! against what is claimed, and against the table of `docs/fp8.md` (`HATTN_UPDATE=1` writes it again).

use std::fmt::Write as _;
use std::path::Path;

use hopper_attention::reference::{Tensor, forward, forward_plain};
use hopper_attention::{DType, Dims, Element, ForwardProblem, Scaling, bf16};
use hopper_attention_tests::fp8::Operands;
use hopper_attention_tests::say;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use rand_distr::StandardNormal;
use safetensors::SafeTensors;

/// Q, K and V of bf16 values, and what is exact for them.
struct Inputs {
    dims: Dims,
    qkv: [Tensor; 3],
    exact: Tensor,
}

/// Of one setting: the CPU backend's relative RMSE, and that of the oracle-side emulation of quantisation alone.
#[derive(Clone, Copy)]
struct Measured {
    backend: f64,
    emulated: f64,
}

impl Inputs {
    fn new(dims: Dims, qkv: [Tensor; 3]) -> Self {
        let problem = ForwardProblem::builder(DType::BF16, dims).build().unwrap();
        let [q, k, v] = &qkv;
        let exact = forward(&problem, q, k, v).unwrap().o;
        Self { dims, qkv, exact }
    }

    /// Unit normal values, of which this share has a normal value of deviation 10 added: the distribution of the
    /// FlashAttention-3 paper.
    fn normal([seqlen_q, seqlen_kv]: [usize; 2], [heads_q, heads_kv]: [usize; 2], outliers: f64) -> Self {
        let dims = Dims::new(1, seqlen_q, heads_q, 128).with_seqlen_kv(seqlen_kv).with_heads_kv(heads_kv);
        let problem = ForwardProblem::builder(DType::BF16, dims).build().unwrap();
        let mut rng = StdRng::seed_from_u64(SEED);
        let qkv = [problem.q_shape(), problem.k_shape(), problem.v_shape()].map(|shape| {
            Tensor::from_fn(shape, |_| {
                let x: f64 = rng.sample(StandardNormal);
                let far: f64 = if rng.random_bool(outliers) { rng.sample(StandardNormal) } else { 0.0 };
                f64::from(Element::to_f32(<bf16 as Element>::from_f32((x + 10.0 * far) as f32)))
            })
        });
        Self::new(dims, qkv)
    }

    /// Queries, keys and values of a transformer layer.
    fn activations() -> Self {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fixtures/minilm_layer3.safetensors");
        let file = std::fs::read(path).unwrap();
        let tensors = SafeTensors::deserialize(&file).unwrap();
        let qkv = ["q", "k", "v"].map(|name| {
            let tensor = tensors.tensor(name).unwrap();
            let mut values = tensor.data().chunks_exact(2).map(|b| bf16::from_bits(u16::from_le_bytes([b[0], b[1]])));
            let shape = <[usize; 4]>::try_from(tensor.shape()).unwrap();
            Tensor::from_fn(shape, |_| f64::from(Element::to_f32(values.next().unwrap())))
        });
        let [batch, seqlen, heads, dim] = qkv[0].shape();
        let dims = Dims::new(batch, seqlen, heads, dim);
        Self::new(dims, qkv)
    }

    /// The error of the plain computation in bf16.
    fn bf16(&self) -> f64 {
        let problem = ForwardProblem::builder(DType::BF16, self.dims).build().unwrap();
        let [q, k, v] = &self.qkv;
        self.error(&forward_plain(&problem, q, k, v).unwrap().o)
    }

    fn quantised(&self, scaling: Scaling, hadamard: Option<u64>) -> Operands {
        let problem = ForwardProblem::builder(DType::E4M3, self.dims).scaling(scaling).build().unwrap();
        Operands::quantised(&problem, self.qkv.each_ref(), hadamard)
    }

    fn measure(&self, scaling: Scaling, hadamard: Option<u64>) -> Measured {
        let operands = self.quantised(scaling, hadamard);
        let [q, k, v] = operands.real();
        let emulated = forward_plain(operands.problem(), &q, &k, &v).unwrap().o;
        Measured { backend: self.error(&operands.run().0), emulated: self.error(&emulated) }
    }

    /// The root of the mean squared error over that of the mean square.
    fn error(&self, o: &Tensor) -> f64 {
        let squares = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>();
        let errors = squares(&mut o.data().iter().zip(self.exact.data()).map(|(o, exact)| o - exact));
        (errors / squares(&mut self.exact.data().iter().copied())).sqrt()
    }
}

/// Of all that is drawn.
const SEED: u64 = 20_261_122;

/// The six settings, in the order of the table's columns.
fn settings() -> impl Iterator<Item = (Scaling, Option<u64>)> {
    [None, Some(SEED)].into_iter().flat_map(|hadamard| Scaling::ALL.map(|scaling| (scaling, hadamard)))
}

const HEAD: &str = "\
| inputs | keys | per tensor | per head | per block | per tensor, Hadamard | per head, Hadamard | per block, Hadamard | bf16 |
|---|---|---|---|---|---|---|---|---|
";

/// All six settings on some inputs, as a row of the table.
fn row(table: &mut String, name: &str, inputs: &Inputs) -> Vec<f64> {
    let measured: Vec<Measured> = settings().map(|(scaling, hadamard)| inputs.measure(scaling, hadamard)).collect();
    let _ = write!(table, "| {name} | {} |", inputs.dims.seqlen_kv);
    for (Measured { backend, emulated }, setting) in measured.iter().zip(settings()) {
        let _ = write!(table, " {:.2}% |", 100.0 * backend);
        // What there is beyond quantisation is next to nothing.
        assert!((backend / emulated - 1.0).abs() < 0.05, "{name} {setting:?}: {backend}, emulated {emulated}");
    }
    let _ = writeln!(table, " {:.2}% |", 100.0 * inputs.bf16());
    measured.into_iter().map(|measured| measured.backend).collect()
}

#[test]
fn errors_are_those_of_the_page() {
    let mut table = String::from(HEAD);
    let normal = row(&mut table, "(a) unit normal", &Inputs::normal([64, 4096], [12, 3], 0.0));
    let outliers = row(&mut table, "(b) with outliers", &Inputs::normal([64, 4096], [12, 3], 0.001));
    let long = Inputs::normal([32, 16384], [8, 2], 0.001);
    let outliers_long = row(&mut table, "(b) with outliers", &long);
    let activations = row(&mut table, "(c) activations", &Inputs::activations());
    say(&table);

    // Three bits of P and V are 4% to 6% whatever the factors are.
    assert!(normal.iter().chain(&activations).all(|error| (0.02..0.06).contains(error)));
    let gains = [&outliers, &outliers_long].map(|errors| errors[0] / errors[5]);
    say(&format!("per block with Hadamard, times as accurate as per tensor without: {gains:.2?}"));
    // A few rows in which an outlier of a query meets one of a key make most of the error without the rotation, so that
    // the gain depends on the draw; the next test has enough rows. This much is in all.
    assert!(gains.iter().all(|&gain| gain > 1.6), "{gains:?}");
    for errors in [outliers, outliers_long] {
        let [tensor, head, block, tensor_hadamard, head_hadamard, block_hadamard] = errors[..] else {
            panic!("six settings")
        };
        // Outliers cost what the rotation gives back, all of it.
        assert!([tensor_hadamard, head_hadamard, block_hadamard].iter().all(|error| (0.02..0.06).contains(error)));
        assert!(tensor > 1.5 * tensor_hadamard && head > 1.5 * head_hadamard && block > 1.5 * block_hadamard);
    }
    assert_page(&table);
}

/// Factors per block with the transform against one per tensor without, on (b): over 2048 rows of 16k keys, of which enough
/// have outliers. Three draws of this size made 3.1, 3.3 and 3.6, three of 8192 rows of 4k keys 2.4 to 2.6.
#[test]
fn the_transform_gives_back_what_outliers_cost() {
    let inputs = Inputs::normal([64, 16384], [32, 4], 0.001);
    let [tensor, block_hadamard] = [(Scaling::PerTensor, None), (Scaling::PerBlock, Some(SEED))]
        .map(|(scaling, hadamard)| inputs.error(&inputs.quantised(scaling, hadamard).run().0));
    say(&format!(
        "2048 rows of 16384 keys with outliers: per tensor {:.2}%, per block with Hadamard {:.2}%, {:.2} times as accurate",
        100.0 * tensor,
        100.0 * block_hadamard,
        tensor / block_hadamard
    ));
    assert!(tensor / block_hadamard >= 2.6, "{tensor} {block_hadamard}");
}

/// What finer factors are for: a head whose values are a millionth of the others' is lost under one factor for all, and
/// as accurate as any under its own.
#[test]
fn finer_factors_keep_what_is_small() {
    let mut inputs = Inputs::normal([16, 512], [2, 2], 0.0);
    let [q, k, v] = &mut inputs.qkv;
    *v = Tensor::from_fn(v.shape(), |[b, s, h, d]| v.row(b, s, h)[d] * if h == 0 { 1e-6 } else { 1.0 });
    let problem = ForwardProblem::builder(DType::BF16, inputs.dims).build().unwrap();
    let exact = forward(&problem, q, k, v).unwrap().o;
    // Of the first head alone.
    let first = |o: &Tensor| Tensor::from_fn([1, 16, 1, 128], |[b, s, _, d]| o.row(b, s, 0)[d]);
    inputs.exact = first(&exact);
    let [tensor, head, block] =
        Scaling::ALL.map(|scaling| inputs.error(&first(&inputs.quantised(scaling, None).run().0)));
    assert!(tensor > 0.9 && head < 0.07 && block < 0.07, "{tensor} {head} {block}");
}

const BEGIN: &str = "<!-- begin generated by the test fp8_accuracy -->\n";
const END: &str = "<!-- end generated by the test fp8_accuracy -->\n";

/// Whether the page's table has these words, and numbers that are 3% off at most: cores add up in different orders.
fn assert_page(table: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/fp8.md");
    let page = std::fs::read_to_string(&path).unwrap();
    let (before, rest) = page.split_once(BEGIN).expect("a marker in docs/fp8.md");
    let (old, after) = rest.split_once(END).expect("a marker in docs/fp8.md");
    if std::env::var_os("HATTN_UPDATE").is_some() {
        std::fs::write(&path, format!("{before}{BEGIN}{table}{END}{after}")).unwrap();
        return;
    }
    let again =
        "the table of docs/fp8.md is another; HATTN_UPDATE=1 cargo test -p hopper-attention-tests --test fp8_accuracy";
    let (old, new): (Vec<&str>, Vec<&str>) = (old.split_whitespace().collect(), table.split_whitespace().collect());
    assert_eq!(old.len(), new.len(), "{again}");
    for (old, new) in old.into_iter().zip(new) {
        let number = |word: &str| word.strip_suffix('%').and_then(|word| word.parse::<f64>().ok());
        match number(old).zip(number(new)) {
            Some((old, new)) => assert!((old / new - 1.0).abs() < 0.03, "{again}: {old}, measured {new}"),
            None => assert_eq!(old, new, "{again}"),
        }
    }
}
