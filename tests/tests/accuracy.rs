//! The accuracy of O on each class of inputs, on the CPU backend; and that the emulation which it is compared with is what it says.
//! `tests/tests/gpu/accuracy.rs` does the same for every kernel.

use hopper_attention::reference::{Tensor, forward};
use hopper_attention::{
    BackwardArgs, Device, Float, ForwardArgs, Layout, OutputOf, Stream, TensorMut, TensorRef, Workspace, bf16, f16,
};
use hopper_attention_tests::accuracy::{DRAWS, Reference, Sample, Setting, Verdict};
use hopper_attention_tests::gradients;
use hopper_attention_tests::inputs::Class;
use hopper_attention_tests::layers;
use hopper_attention_tests::say;

/// Of the CPU backend.
fn o<T: Float + OutputOf<T>>(sample: &Sample<T>) -> Vec<T> {
    let layout = Layout::contiguous(sample.problem.q_shape()).unwrap();
    let mut o = vec![T::from_f32(0.0); layout.span()];
    let mut lse = vec![0.0_f32; sample.problem.lse_shape().iter().product()];
    let [q, k, v] = [0, 1, 2].map(|i| TensorRef::host(&sample.qkv[i], layout).unwrap());
    let lse = TensorMut::host(&mut lse, Layout::contiguous(sample.problem.lse_shape()).unwrap()).unwrap();
    let args = ForwardArgs::new(q, k, v, TensorMut::host(&mut o, layout).unwrap()).lse(lse);
    let plan = sample.problem.plan(&Device::cpu()).unwrap();
    let mut workspace = Workspace::alloc(&Stream::Cpu, plan.workspace_bytes()).unwrap();
    plan.run(&Stream::Cpu, &mut workspace, args).unwrap();
    o
}

fn verdicts<T: Float + OutputOf<T>>(wrong: &mut Vec<String>) {
    for setting in Setting::all(&[64, 128], &[512]) {
        let sample = Sample::<T>::new(setting);
        let verdict = sample.judge(&o(&sample)).unwrap();
        say(&verdict.to_string());
        wrong.extend((!verdict.passed()).then(|| verdict.to_string()));
    }
}

#[test]
fn the_cpu_is_as_accurate_as_a_running_maximum() {
    let mut wrong = Vec::new();
    say(Verdict::HEAD);
    verdicts::<bf16>(&mut wrong);
    verdicts::<f16>(&mut wrong);
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Of the CPU backend: O, and gradients of its own O and LSE.
fn gradients<T: Float + OutputOf<T>>(sample: &gradients::Sample<T>) -> [Vec<T>; 4] {
    let (forward, problem) = (&sample.forward, &sample.problem);
    let layout = Layout::contiguous(forward.q_shape()).unwrap();
    let rows = Layout::contiguous(forward.lse_shape()).unwrap();
    let zeros = || vec![T::from_f32(0.0); layout.span()];
    let (mut o, mut lse) = (zeros(), vec![0.0_f32; rows.span()]);
    let [q, k, v, d_o] = [0, 1, 2, 3].map(|i| TensorRef::host(&sample.inputs[i], layout).unwrap());
    let args = ForwardArgs::new(q, k, v, TensorMut::host(&mut o, layout).unwrap());
    let plan = forward.plan(&Device::cpu()).unwrap();
    let mut workspace = Workspace::alloc(&Stream::Cpu, plan.workspace_bytes()).unwrap();
    plan.run(&Stream::Cpu, &mut workspace, args.lse(TensorMut::host(&mut lse, rows).unwrap())).unwrap();

    let mut gradients = [zeros(), zeros(), zeros()];
    let [q, k, v] = [0, 1, 2].map(|i| TensorRef::host(&sample.inputs[i], layout).unwrap());
    let (of_o, lse) = (TensorRef::host(&o, layout).unwrap(), TensorRef::host(&lse, rows).unwrap());
    let outputs = gradients.each_mut().map(|gradient| TensorMut::host(gradient, layout).unwrap());
    let plan = problem.plan(&Device::cpu()).unwrap();
    let mut workspace = Workspace::alloc(&Stream::Cpu, plan.workspace_bytes()).unwrap();
    plan.run(&Stream::Cpu, &mut workspace, BackwardArgs::new([q, k, v], of_o, lse, d_o, outputs)).unwrap();
    let [d_q, d_k, d_v] = gradients;
    [o, d_q, d_k, d_v]
}

fn gradient_verdicts<T: Float + OutputOf<T>>(samples: Vec<gradients::Sample<T>>, wrong: &mut Vec<String>) {
    for sample in samples {
        let verdict = sample.judge(&gradients(&sample)).unwrap();
        say(&verdict.to_string());
        wrong.extend((!verdict.passed()).then(|| verdict.to_string()));
    }
}

#[test]
fn the_cpus_gradients_are_as_accurate_as_a_running_maximums() {
    let mut wrong = Vec::new();
    say(gradients::Verdict::HEAD);
    let settings = || Setting::all(&[64, 128], &[256]).into_iter();
    gradient_verdicts::<bf16>(settings().map(gradients::Sample::new).collect(), &mut wrong);
    gradient_verdicts::<f16>(settings().map(gradients::Sample::new).collect(), &mut wrong);
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// The same on layers of trained models.
#[test]
fn the_cpu_is_as_accurate_on_real_layers() {
    let mut wrong = Vec::new();
    gradient_verdicts::<bf16>(layers::samples(), &mut wrong);
    gradient_verdicts::<f16>(layers::samples(), &mut wrong);
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// What is called exact is the oracle's.
#[test]
fn exact_rows_are_those_of_the_oracle() {
    for (class, causal) in [(Class::Normal, false), (Class::Sink, true), (Class::Late, false)] {
        let sample = Sample::<bf16>::new(Setting { class, head_dim: 64, causal, seqlen: 300 });
        let layout = Layout::contiguous(sample.problem.q_shape()).unwrap();
        let [q, k, v] = [0, 1, 2].map(|i| Tensor::from_strided(&sample.qkv[i], &layout));
        let oracle = forward(&sample.problem, &q, &k, &v).unwrap().o;
        let mut rows = 0;
        for (head, query, exact) in sample.exact() {
            let far = oracle.row(0, query, head).iter().zip(exact).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
            assert!(far < 1e-12, "{class}, query {query}, head {head}: {far}");
            rows += 1;
        }
        assert_eq!(rows, DRAWS * 150);
    }
}

/// The emulation's error is that of rounding weights and O, but for weights that are the maximum when they come.
#[test]
fn the_emulation_errs_by_what_rounding_explains() {
    fn check<T: Float>(setting: Setting) {
        let sample = Sample::<T>::new(setting);
        let (emulated, predicted) = (sample.emulated().rmse, sample.predicted_rmse());
        say(&format!("{} {setting}: rmse {emulated:.3e}, predicted {predicted:.3e}", T::DTYPE));
        assert!((emulated / predicted - 1.0).abs() < 0.02, "{} {setting}: {emulated} is not {predicted}", T::DTYPE);
    }
    for class in Class::ALL {
        for (head_dim, causal) in [(64, false), (128, true)] {
            check::<bf16>(Setting { class, head_dim, causal, seqlen: 640 });
            check::<f16>(Setting { class, head_dim, causal, seqlen: 512 });
        }
    }
}

/// The bounds notice a computation without a maximum, which rounds the weight of a key that has all of it.
#[test]
fn weights_without_a_maximum_are_noticed() {
    for (class, noticed) in [(Class::Normal, false), (Class::Peaky, true), (Class::Sink, true), (Class::Late, true)] {
        let sample = Sample::<bf16>::new(Setting { class, head_dim: 128, causal: false, seqlen: 256 });
        let verdict = sample.judge(&sample.emulate(Reference::Zero)).unwrap();
        say(&format!("without a maximum: {verdict}"));
        // Even a normal row is a little more accurate with a maximum: at 256 keys one weight in 256 matters.
        assert_eq!(verdict.ratios()[0] > 1.12, noticed, "{verdict}");
    }
}

#[test]
fn nan_elsewhere_is_noticed() {
    let sample = Sample::<bf16>::new(Setting { class: Class::Nan, head_dim: 64, causal: true, seqlen: 200 });
    let right = o(&sample);
    assert!(sample.judge(&right).is_ok());
    let [mut more, mut less] = [right.clone(), right];
    // The second query's first head; the 129th query's last one.
    more[DRAWS * 64] = bf16::NAN;
    less[(128 * DRAWS + 7) * 64] = bf16::ONE;
    assert!(sample.judge(&more).unwrap_err().contains("1 elements of query 1, head 0 are NaN, not 0"));
    assert!(sample.judge(&less).unwrap_err().contains("63 elements of query 128, head 7 are NaN, not 64"));
}
