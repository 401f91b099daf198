//! The accuracy of O and of the gradients on each class of inputs: every kernel beside a computation with a true running maximum.

use hopper_attention::{Arch, Device, Float, ForwardArgs, KernelInfo, MaskClass, OutputOf, Workspace, bf16, f16};
use hopper_attention_tests::accuracy::{LARGEST, RMSE, Sample, Setting, Verdict};
use hopper_attention_tests::gpu::{Gpu, dense, supported, whole, whole_mut};
use hopper_attention_tests::gradients;
use hopper_attention_tests::layers;
use hopper_attention_tests::problems::Grid;
use hopper_attention_tests::say;

/// What the errors of a row's kernel are held to, as times the emulation's: of the RMSE, and of the largest error. The goal is [`RMSE`]
/// and [`LARGEST`] for all. It is not reached yet: each verdict past it is printed as such. (sm90: 117 of 2200 are, and the largest
/// error is up to 1.476 times the emulation's, at head dim 256; earlier kernels had 1.502. sm80: the RMSE of inputs of class late is up
/// to 1.080 times, at head dim 96.)
fn held(row: &KernelInfo) -> (f64, f64) {
    match row.arch() {
        Arch::Sm90 => (1.075, 1.55),
        _ if row.head_dim_qk() == 96 => (1.09, 1.4),
        _ => (1.06, 1.4),
    }
}

/// The verdicts on the kernels of an instruction set.
#[derive(Default)]
struct Verdicts {
    /// How many each row took.
    taken: Vec<usize>,
    past_goal: usize,
    wrong: Vec<String>,
}

/// The head dims of forward kernels that have one for all tensors, and 160, which kernels of a larger one compute. (Gradients end at 128.)
const FORWARD: [usize; 6] = [64, 96, 128, 160, 192, 256];

/// Whether a row has the smallest head dims of those that take a setting's.
fn is_narrowest(row: &KernelInfo, rows: &[KernelInfo], head_dim: usize) -> bool {
    let takes = |row: &KernelInfo| row.head_dim_qk().min(row.head_dim_vo()) >= head_dim;
    let of = |row: &KernelInfo| row.head_dim_qk() + row.head_dim_vo();
    let of_arch = rows.iter().filter(|other| other.arch() == row.arch() && takes(other));
    takes(row) && of_arch.map(of).min() == Some(of(row))
}

/// Judges the kernels of an instruction set on all settings; prints a line for each.
fn judge<T: Float + OutputOf<T>>(gpu: &Gpu, rows: &[KernelInfo], verdicts: &mut Verdicts) {
    let stream = &gpu.stream;
    for setting in Setting::all(&FORWARD, Grid::from_env().pick(&[512], &[512, 1024, 2048, 4096])) {
        let sample = Sample::<T>::new(setting);
        let problem = &sample.problem;
        let [q, k, v] = [0, 1, 2].map(|i| stream.clone_htod(&sample.qkv[i]).expect("device memory"));
        let fits = |row: &KernelInfo| row.dtype() == T::DTYPE && is_narrowest(row, rows, setting.head_dim);
        for (i, row) in rows.iter().enumerate().filter(|(_, row)| fits(row)) {
            let plan = supported(problem.plan_with_row(&gpu.device, row), || format!("{row}, {problem}"));
            let Some(plan) = plan else { continue };
            verdicts.taken[i] += 1;
            let mut workspace = Workspace::alloc(&gpu.lane(), plan.workspace_bytes()).expect("device memory");
            let mut o = stream.clone_htod(&vec![T::from_f32(0.0); sample.qkv[0].len()]).expect("device memory");
            let mut lse = stream.alloc_zeros::<f32>(problem.lse_shape().iter().product()).expect("device memory");
            let [q, k, v] = [&q, &k, &v].map(|x| whole(x, problem.q_shape()).expect("a fitting layout"));
            let args = ForwardArgs::new(q, k, v, whole_mut(&mut o, problem.o_shape()).expect("a fitting layout"));
            let args = args.lse(whole_mut(&mut lse, problem.lse_shape()).expect("a fitting layout"));
            plan.run(&gpu.lane(), &mut workspace, args).unwrap_or_else(|error| panic!("{row}, {setting}: {error}"));
            match sample.judge(&stream.clone_dtoh(&o).expect("a copy")) {
                Ok(verdict) => {
                    say(&format!("{verdict}  {row}"));
                    verdicts.past_goal += usize::from(!verdict.passed());
                    let (rmse, largest) = held(row);
                    let [got, most] = verdict.ratios();
                    // (A NaN is in no comparison.)
                    let holds = got <= rmse && most <= largest;
                    verdicts.wrong.extend((!holds).then(|| format!("{verdict}  {row}: allowed {rmse}, {largest}")));
                }
                Err(why) => verdicts.wrong.push(format!("{why}: {} {row}", T::DTYPE)),
            }
        }
    }
}

/// The rows of an instruction set. A window is none of the masks here.
fn kernels_of(test: &str, arch: Arch) {
    let Some(gpu) = Gpu::open(test) else { return };
    let rows: Vec<_> = gpu.rows().into_iter().filter(|row| row.arch() == arch).collect();
    let settings = Setting::all(&FORWARD, &[512]);
    let plans = |row: &KernelInfo| {
        settings.iter().any(|setting| {
            let plan = || setting.problem(row.dtype()).plan_with_row(&gpu.device, row);
            is_narrowest(row, &rows, setting.head_dim) && supported(plan(), || row.to_string()).is_some()
        })
    };
    let rows: Vec<_> = rows.iter().copied().filter(plans).collect();
    assert!(!rows.is_empty(), "no {arch} row runs on {:?}", Device::available());
    let mut verdicts = Verdicts { taken: vec![0; rows.len()], ..Verdicts::default() };
    say(Verdict::HEAD);
    judge::<bf16>(&gpu, &rows, &mut verdicts);
    judge::<f16>(&gpu, &rows, &mut verdicts);
    let Verdicts { taken, past_goal, wrong } = verdicts;
    assert!(taken.iter().all(|&taken| taken > 0), "rows that took no case: {taken:?}");
    let total = taken.iter().sum::<usize>();
    say(&format!("{arch}: {total} verdicts, {past_goal} past {RMSE} (rmse) or {LARGEST} (max), {} wrong", wrong.len()));
    assert!(
        wrong.is_empty(),
        "errors of O past what is allowed (rmse, max), as times those with a running maximum, or NaN where none belongs:\n{}",
        wrong.join("\n")
    );
}

#[test]
fn sm90_is_nearly_as_accurate_as_a_running_maximum() {
    kernels_of("sm90_is_nearly_as_accurate_as_a_running_maximum", Arch::Sm90);
}

#[test]
fn sm80_keeps_to_its_bounds_beside_a_running_maximum() {
    kernels_of("sm80_keeps_to_its_bounds_beside_a_running_maximum", Arch::Sm80);
}

/// What the errors of gradients are held to, as [`held`]. The goal is the same as of O. (sm80 makes dS of rounded weights at head dim
/// 64.)
fn gradients_held(row: &KernelInfo) -> (f64, f64) {
    match (row.arch(), row.head_dim_qk()) {
        (Arch::Sm90, _) => (1.1, 1.5),
        (_, 64) => (1.25, 1.5),
        _ => (RMSE, LARGEST),
    }
}

/// O of the library's forward of a row's instruction set, and the gradients that the row makes of that and of its LSE.
fn gradients<T: Float + OutputOf<T>>(
    gpu: &Gpu,
    row: &KernelInfo,
    sample: &gradients::Sample<T>,
) -> Option<[Vec<T>; 4]> {
    let plan = supported(sample.problem.plan_with_row(&gpu.device, row), || row.to_string())?;
    let forward = sample.forward.to_builder().arch(row.arch()).build().expect("the same numbers");
    let forward = forward.plan(&Device::Cuda(gpu.device.clone())).expect("a forward");
    let (problem, stream) = (&sample.forward, &gpu.stream);
    let [q, k, v, d_o] = [0, 1, 2, 3].map(|i| stream.clone_htod(&sample.inputs[i]).expect("device memory"));
    let zeros = || stream.clone_htod(&vec![T::from_f32(0.0); sample.inputs[0].len()]).expect("device memory");
    let mut o = zeros();
    let mut lse = stream.alloc_zeros::<f32>(problem.lse_shape().iter().product()).expect("device memory");
    let mut workspace = Workspace::alloc(&gpu.lane(), forward.workspace_bytes()).expect("device memory");
    let of = |x| whole(x, problem.q_shape()).expect("a fitting layout");
    let args =
        ForwardArgs::new(of(&q), of(&k), of(&v), whole_mut(&mut o, problem.o_shape()).expect("a fitting layout"));
    let args = args.lse(whole_mut(&mut lse, problem.lse_shape()).expect("a fitting layout"));
    forward.run(&gpu.lane(), &mut workspace, args).unwrap_or_else(|error| panic!("{forward}: {error}"));

    let [mut d_q, mut d_k, mut d_v] = [zeros(), zeros(), zeros()];
    let mut workspace = Workspace::alloc(&gpu.lane(), plan.workspace_bytes()).expect("device memory");
    let outputs = [&mut d_q, &mut d_k, &mut d_v];
    let args = dense(&sample.problem, [&q, &k, &v, &o, &d_o], &lse, outputs).expect("fitting layouts");
    plan.run(&gpu.lane(), &mut workspace, args).unwrap_or_else(|error| panic!("{row}: {error}"));
    Some([o, d_q, d_k, d_v].map(|result| stream.clone_dtoh(&result).expect("a copy")))
}

/// Judges backward kernels on these inputs, and holds each to its bounds (RMSE, largest); prints a line for each.
fn judge_gradients<T: Float + OutputOf<T>>(
    gpu: &Gpu,
    rows: &[KernelInfo],
    sample: &gradients::Sample<T>,
    held: impl Fn(&KernelInfo) -> (f64, f64),
    verdicts: &mut Verdicts,
) {
    for (i, row) in rows.iter().enumerate().filter(|(_, row)| row.dtype() == T::DTYPE) {
        // Wider rows take it too; one of the width that there is will do.
        let dim = sample.forward.dims().head_dim_qk;
        if row.head_dim_qk() != dim.next_multiple_of(64) {
            continue;
        }
        let Some(gradients) = gradients(gpu, row, sample) else { continue };
        verdicts.taken[i] += 1;
        match sample.judge(&gradients) {
            Ok(verdict) => {
                say(&format!("{verdict}  {row}"));
                verdicts.past_goal += usize::from(!verdict.passed());
                let (rmse, largest) = held(row);
                let holds = verdict.within(rmse, largest);
                verdicts.wrong.extend((!holds).then(|| format!("{verdict}  {row}: allowed {rmse}, {largest}")));
            }
            Err(why) => verdicts.wrong.push(format!("{why}: {} {row}", T::DTYPE)),
        }
    }
}

/// On which inputs.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Samples {
    Classes,
    Layers,
}

/// Judges the backward kernels of an instruction set, and the forwards before them.
fn gradients_of(test: &str, arch: Arch, samples: Samples) {
    let Some(gpu) = Gpu::open(test) else { return };
    let takes = |row: &KernelInfo| row.arch() == arch && row.mask() != MaskClass::Window;
    let rows: Vec<_> = gpu.backward_rows().into_iter().filter(takes).collect();
    assert!(!rows.is_empty(), "no {arch} row runs on {:?}", Device::available());
    let mut verdicts = Verdicts { taken: vec![0; rows.len()], ..Verdicts::default() };
    say(gradients::Verdict::HEAD);
    match samples {
        Samples::Classes => {
            for setting in Setting::all(&[64, 128], Grid::from_env().pick(&[512], &[512, 1024])) {
                judge_gradients(&gpu, &rows, &gradients::Sample::<bf16>::new(setting), gradients_held, &mut verdicts);
                judge_gradients(&gpu, &rows, &gradients::Sample::<f16>::new(setting), gradients_held, &mut verdicts);
            }
            assert!(verdicts.taken.iter().all(|&taken| taken > 0), "rows that took no case: {:?}", verdicts.taken);
        }
        // A model has heads of one width.
        Samples::Layers => {
            layers::samples()
                .iter()
                .for_each(|sample| judge_gradients::<bf16>(&gpu, &rows, sample, gradients_held, &mut verdicts));
            layers::samples()
                .iter()
                .for_each(|sample| judge_gradients::<f16>(&gpu, &rows, sample, gradients_held, &mut verdicts));
            assert!(verdicts.taken.iter().any(|&taken| taken > 0), "no row took a layer");
        }
    }
    let Verdicts { taken, past_goal, wrong } = verdicts;
    let total = taken.iter().sum::<usize>();
    say(&format!("{arch}: {total} verdicts, {past_goal} past {RMSE} (rmse) or {LARGEST} (max), {} wrong", wrong.len()));
    assert!(
        wrong.is_empty(),
        "errors of gradients past what is allowed (rmse, max), as times those with a running maximum, or NaN where none \
         belongs:\n{}",
        wrong.join("\n")
    );
}

#[test]
fn sm90_gradients_are_nearly_as_accurate_as_a_running_maximums() {
    gradients_of("sm90_gradients_are_nearly_as_accurate_as_a_running_maximums", Arch::Sm90, Samples::Classes);
}

#[test]
fn sm80_gradients_keep_to_their_bounds() {
    gradients_of("sm80_gradients_keep_to_their_bounds", Arch::Sm80, Samples::Classes);
}

/// The worst case for a kernel that makes dS of rounded weights: dQ and dK share a factor then. (sm80 does so at head dim 64: the test
/// says how far off its gradients are, and holds the RMSE to 1.8 times that of weights in f32.)
#[test]
fn alike_weights_give_no_common_factor() {
    let Some(gpu) = Gpu::open("alike_weights_give_no_common_factor") else { return };
    let unmasked = |row: &KernelInfo| matches!(row.mask(), MaskClass::Full | MaskClass::Window);
    let rows: Vec<_> = gpu.backward_rows().into_iter().filter(unmasked).collect();
    let held = |row: &KernelInfo| match (row.arch(), row.head_dim_qk()) {
        (Arch::Sm80, 64) => (1.8, 1.5),
        _ => (RMSE, LARGEST),
    };
    let mut verdicts = Verdicts { taken: vec![0; rows.len()], ..Verdicts::default() };
    say(gradients::Verdict::HEAD);
    for head_dim in [64, 128] {
        judge_gradients(&gpu, &rows, &gradients::Sample::<bf16>::alike(head_dim), held, &mut verdicts);
        judge_gradients(&gpu, &rows, &gradients::Sample::<f16>::alike(head_dim), held, &mut verdicts);
    }
    let Verdicts { taken, wrong, .. } = verdicts;
    assert!(taken.iter().all(|&taken| taken > 0), "rows that took no case: {taken:?}");
    assert!(
        wrong.is_empty(),
        "errors of gradients past what is allowed, as times those of weights in f32:\n{}",
        wrong.join("\n")
    );
}

#[test]
fn sm90_is_nearly_as_accurate_on_real_layers() {
    gradients_of("sm90_is_nearly_as_accurate_on_real_layers", Arch::Sm90, Samples::Layers);
}

#[test]
fn sm80_keeps_to_its_bounds_on_real_layers() {
    gradients_of("sm80_keeps_to_its_bounds_on_real_layers", Arch::Sm80, Samples::Layers);
}
