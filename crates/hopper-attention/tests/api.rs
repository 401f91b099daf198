//! What holds of the API as a whole: which traits its types have, that problems serve as keys, whose memory a workspace is,
//! and that any combination of operands is computed or refused by name.

use std::collections::{BTreeSet, HashMap};
use std::fmt::Debug;
use std::hash::Hash;
use std::ptr::null_mut;

use hopper_attention::raw::{Place, RawArgs, RawTensor};
use hopper_attention::reference::{
    BackwardExpected, BackwardOracle, BackwardPlain, BackwardReport, BiasNoise, Expected, MaxLogit, Noise, Oracle,
    Plain, Report, RowScale, SinkNoise, Tensor, tolerance::Figures,
};
use hopper_attention::*;
use proptest::prelude::*;

mod common;

use common::{DIMS, dense, values};

/// Used from any thread, and printed.
trait Shared: Send + Sync + Debug {}
impl<T: Send + Sync + Debug> Shared for T {}

/// Copied beside.
trait Data: Shared + Clone + 'static {}
impl<T: Shared + Clone + 'static> Data for T {}

/// The key of a map.
trait Key: Data + Eq + Hash {}
impl<T: Data + Eq + Hash> Key for T {}

/// A table of types and what they have. It compiles where they have it.
macro_rules! types {
    ($names:ident: $($(#[$cfg:meta])? $name:ident $(<$($parameter:tt),+>)? is $what:path;)*) => {
        const $names: &[&str] = &[$($(#[$cfg])? stringify!($name)),*];
        $($(#[$cfg])?
        const _: () = {
            const fn has<T: $what>() {}
            has::<$name $(<$($parameter),+>)?>();
        };)*
    };
}

types! { OF_THE_CRATE:
    Access is Key;
    AlibiSlopes is Key;
    Arch is Key;
    Args<'static> is Shared;
    BackwardArgs<'static> is Shared;
    BackwardPlan is Data;
    BackwardProblem is Key;
    BackwardProblemBuilder is Data;
    Band is Data;
    Bias is Key;
    BlockLists<'static> is Data;
    BlockMask is Key;
    ComputeCapability is Key;
    Corner is Key;
    #[cfg(feature = "cuda")]
    CudaDevice is Data;
    DType is Key;
    Descale<'static> is Shared;
    Device is Data;
    DeviceFacts is Key;
    DeviceInfo is Data;
    Dims is Key;
    E4M3 is Data;
    Error is Data;
    ErrorSource is Data;
    ForwardArgs<'static> is Shared;
    ForwardPlan is Data;
    ForwardProblem is Key;
    ForwardProblemBuilder is Data;
    KernelInfo is Key;
    Layout<4> is Key;
    Lengths<'static> is Data;
    Mask is Key;
    MaskClass is Key;
    Operand is Data;
    Operands is Data;
    Pass is Key;
    Presence is Key;
    QuantizeArgs<'static> is Shared;
    QuantizePlan is Data;
    Quantizer is Key;
    QuantizerBuilder is Data;
    Scaling is Key;
    SequenceOffsets is Shared;
    SequenceRows is Key;
    Slot is Key;
    Stream is Data;
    TensorMut<'static, bf16, 4> is Shared;
    TensorRef<'static, E4M3, 4> is Data;
    Tuning is Data;
    UsedLengths is Shared;
    Workspace<'static> is Shared;
    bf16 is Data;
    f16 is Data;
}

types! { OF_RAW:
    Place is Key;
    RawArgs is Data;
    RawTensor is Data;
}

types! { OF_REFERENCE:
    BackwardExpected is Data;
    BackwardOracle is Data;
    BackwardPlain is Data;
    BackwardReport is Data;
    BiasNoise is Data;
    Expected is Data;
    Figures is Data;
    MaxLogit is Data;
    Noise is Data;
    Oracle is Data;
    Plain is Data;
    Report is Data;
    RowScale is Data;
    SinkNoise is Data;
    Tensor is Data;
}

/// Traits, which have no traits, and an alias.
const NO_TYPES: &[&str] = &["Element", "Float", "OutputOf", "Result"];

/// What can be compared, printed for people, made from nothing or copied by an assignment beyond that.
const _: () = {
    const fn has_eq<T: Eq>() {}
    const fn has_copy<T: Copy>() {}
    const fn has_default<T: Default>() {}
    const fn is_error<T: std::error::Error + Send + Sync + 'static>() {}
    has_eq::<Band>();
    has_eq::<DeviceInfo>();
    has_eq::<Error>();
    has_eq::<ErrorSource>();
    has_eq::<Operand>();
    has_eq::<Tuning>();
    has_eq::<RawTensor>();
    has_copy::<Dims>();
    has_copy::<KernelInfo>();
    has_copy::<Layout<4>>();
    has_copy::<Mask>();
    has_copy::<Operand>();
    has_copy::<Slot>();
    has_copy::<RawTensor>();
    has_default::<Args<'static>>();
    has_default::<QuantizeArgs<'static>>();
    has_default::<RawArgs>();
    has_default::<AlibiSlopes>();
    has_default::<Mask>();
    has_default::<Scaling>();
    has_default::<Tuning>();
    is_error::<Error>();
    is_error::<ErrorSource>();
};

/// The names of types that a module re-exports, without those behind `doc(hidden)`.
fn exported(source: &str) -> BTreeSet<&str> {
    let visible = source.split("#[doc(hidden)]").next().unwrap_or_default();
    let uses = visible.split("pub use ").skip(1).filter_map(|rest| rest.split_once(';')).map(|(path, _)| path);
    let names = uses.flat_map(|path| match path.split_once('{') {
        Some((_, list)) => list.trim_end_matches('}').split(',').map(str::trim).collect::<Vec<_>>(),
        None => path.rsplit("::").next().into_iter().collect(),
    });
    // Not constants and functions; two types are written small.
    let is_type = |name: &&str| {
        let small = ["bf16", "f16"].contains(name);
        small || (name.starts_with(char::is_uppercase) && (name.contains(char::is_lowercase) || *name == "E4M3"))
    };
    names.filter(is_type).collect()
}

#[test]
fn every_type_of_the_api_is_in_the_tables() {
    let tables = |names: &[&'static str]| names.iter().copied().collect::<BTreeSet<_>>();
    let mut listed = tables(OF_THE_CRATE);
    listed.extend(NO_TYPES);
    // Without the feature it is no part of the build, and written in lib.rs all the same.
    listed.insert("CudaDevice");
    assert_eq!(listed, exported(include_str!("../src/lib.rs")));
    assert_eq!(tables(OF_RAW), exported(include_str!("../src/raw.rs")));
    let mut of_reference = exported(include_str!("../src/reference/mod.rs"));
    of_reference.insert("Figures");
    assert_eq!(tables(OF_REFERENCE), of_reference);
}

#[test]
fn problems_are_the_keys_of_maps_of_plans() {
    let device = Device::cpu();
    let forward = ForwardProblem::builder(DType::E4M3, DIMS).mask(Mask::causal()).softmax_scale(0.3).build().unwrap();
    let others = [
        forward.to_builder().lse(true),
        forward.to_builder().mask(Mask::Full),
        forward.to_builder().mask(Mask::Causal { corner: Corner::TopLeft }),
        forward.to_builder().softmax_scale(0.3f32.next_up()),
        forward.to_builder().scaling(Scaling::PerHead),
        forward.to_builder().output(DType::F16),
        forward.to_builder().amax(true),
        forward.to_builder().half_scores(true),
        ForwardProblem::builder(DType::E4M3, DIMS.with_batch(3)).mask(Mask::causal()).softmax_scale(0.3),
        ForwardProblem::builder(DType::BF16, DIMS).mask(Mask::causal()).softmax_scale(0.3),
    ]
    .map(|options| options.build().unwrap());
    let mut plans: HashMap<ForwardProblem, ForwardPlan> = HashMap::new();
    for problem in others.iter().chain([&forward]) {
        assert!(plans.insert(problem.clone(), problem.plan(&device).unwrap()).is_none(), "{problem}");
    }
    // The same options in another order are the same problem, and so is what its builder gives back.
    let again = ForwardProblem::builder(DType::E4M3, DIMS).softmax_scale(0.3).output(DType::BF16).mask(Mask::causal());
    assert_eq!(plans[&again.build().unwrap()].problem(), &forward);
    for problem in &others {
        assert_eq!(plans[&problem.to_builder().build().unwrap()].problem(), problem);
    }

    let options = ForwardProblem::builder(DType::BF16, DIMS).build().unwrap();
    let backward = BackwardProblem::builder(&options).build().unwrap();
    let mut plans: HashMap<BackwardProblem, BackwardPlan> = HashMap::new();
    for problem in [
        backward.clone(),
        backward.to_builder().d_lse(true).build().unwrap(),
        backward.to_builder().deterministic(true).build().unwrap(),
        BackwardProblem::builder(&others[9]).build().unwrap(),
    ] {
        assert!(plans.insert(problem.clone(), problem.plan(&device).unwrap()).is_none(), "{problem}");
    }
    // Whether the forward problem was made with its LSE is no difference.
    let with_lse = options.to_builder().lse(true).build().unwrap();
    assert_eq!(plans[&BackwardProblem::builder(&with_lse).build().unwrap()].problem(), &backward);

    let quantizer = Quantizer::builder(&forward, DType::BF16).build().unwrap();
    let mut plans: HashMap<Quantizer, QuantizePlan> = HashMap::new();
    for quantizer in [
        quantizer.clone(),
        Quantizer::builder(&forward, DType::F32).build().unwrap(),
        Quantizer::builder(&forward, DType::BF16).hadamard(0).build().unwrap(),
        Quantizer::builder(&forward, DType::BF16).hadamard(1).build().unwrap(),
        Quantizer::builder(&others[4], DType::BF16).build().unwrap(),
    ] {
        assert!(plans.insert(quantizer.clone(), quantizer.plan(&device).unwrap()).is_none(), "{quantizer}");
    }
    let again = Quantizer::builder(&forward, DType::BF16).build().unwrap();
    assert_eq!(plans[&again].quantizer(), &quantizer);
}

/// A plan of any pass.
#[derive(Debug)]
enum Plan {
    Forward(ForwardPlan),
    Backward(BackwardPlan),
    Quantize(QuantizePlan),
}

impl Plan {
    fn forward(options: ForwardProblemBuilder) -> Self {
        Self::Forward(options.build().unwrap().plan(&Device::cpu()).unwrap())
    }

    fn backward(options: BackwardProblemBuilder) -> Self {
        Self::Backward(options.build().unwrap().plan(&Device::cpu()).unwrap())
    }

    fn quantize(options: QuantizerBuilder) -> Self {
        Self::Quantize(options.build().unwrap().plan(&Device::cpu()).unwrap())
    }

    fn operands(&self) -> &Operands {
        match self {
            Self::Forward(plan) => plan.operands(),
            Self::Backward(plan) => plan.operands(),
            Self::Quantize(plan) => plan.operands(),
        }
    }

    fn run(&self, workspace: &mut Workspace<'_>, buffers: &mut [Buffer]) -> Result<()> {
        let args = buffers.iter_mut().fold(Args::new(), |args, buffer| buffer.lend(args));
        match self {
            Self::Forward(plan) => plan.run(&Stream::Cpu, workspace, args),
            Self::Backward(plan) => plan.run(&Stream::Cpu, workspace, args),
            Self::Quantize(plan) => plan.run(&Stream::Cpu, workspace, args),
        }
    }

    fn run_raw(&self, buffers: &mut [Buffer]) -> Result<()> {
        let args = buffers.iter_mut().fold(RawArgs::new(), |args, buffer| buffer.give(args));
        // SAFETY: the addresses are those of live vectors, one for each tensor.
        unsafe {
            match self {
                Self::Forward(plan) => plan.run_raw(&args, null_mut()),
                Self::Backward(plan) => plan.run_raw(&args, null_mut()),
                Self::Quantize(plan) => plan.run_raw(&args, null_mut()),
            }
        }
    }
}

/// Elements of any type.
#[derive(Clone, Debug)]
enum Memory {
    F16(Vec<f16>),
    BF16(Vec<bf16>),
    E4M3(Vec<E4M3>),
    F32(Vec<f32>),
}

/// A tensor to give, as an operand or in the place of one.
#[derive(Clone, Debug)]
struct Buffer {
    slot: Slot,
    access: Access,
    shape: Vec<usize>,
    memory: Memory,
}

impl Buffer {
    /// For a row of a list: numbers to read, or NaN to write over.
    fn of(operand: &Operand) -> Self {
        Self::new(operand.slot(), operand.access(), operand.dtype(), operand.shape())
    }

    fn new(slot: Slot, access: Access, dtype: DType, shape: &[usize]) -> Self {
        let count = shape.iter().product();
        let numbers = match access {
            Access::Write => vec![f32::NAN; count],
            // What is a factor is above 0, and no value of an LSE out of reach.
            _ if dtype == DType::F32 && shape.len() < 4 => vec![1.5; count],
            _ => values(count, slot as u32),
        };
        fn cast<T: Element>(numbers: &[f32]) -> Vec<T> {
            numbers.iter().map(|&x| T::from_f32(x)).collect()
        }
        let memory = match dtype {
            DType::F16 => Memory::F16(cast(&numbers)),
            DType::BF16 => Memory::BF16(cast(&numbers)),
            DType::E4M3 => Memory::E4M3(cast(&numbers)),
            _ => Memory::F32(numbers),
        };
        Self { slot, access, shape: shape.into(), memory }
    }

    fn dtype(&self) -> DType {
        match self.memory {
            Memory::F16(_) => DType::F16,
            Memory::BF16(_) => DType::BF16,
            Memory::E4M3(_) => DType::E4M3,
            Memory::F32(_) => DType::F32,
        }
    }

    fn numbers(&self) -> Vec<f32> {
        fn wide<T: Element>(data: &[T]) -> Vec<f32> {
            data.iter().map(|x| x.to_f32()).collect()
        }
        match &self.memory {
            Memory::F16(data) => wide(data),
            Memory::BF16(data) => wide(data),
            Memory::E4M3(data) => wide(data),
            Memory::F32(data) => data.clone(),
        }
    }

    fn bits(&self) -> Vec<u32> {
        self.numbers().into_iter().map(f32::to_bits).collect()
    }

    fn lend<'a>(&'a mut self, args: Args<'a>) -> Args<'a> {
        fn ranked<'a, T: Element, const R: usize>(
            (slot, access): (Slot, Access),
            data: &'a mut [T],
            shape: [usize; R],
            args: Args<'a>,
        ) -> Args<'a> {
            match access {
                Access::Write => args.write(slot, TensorMut::host(data, dense(shape)).unwrap()),
                _ => args.read(slot, TensorRef::host(data, dense(shape)).unwrap()),
            }
        }
        fn typed<'a, T: Element>(of: (Slot, Access), data: &'a mut [T], shape: &[usize], args: Args<'a>) -> Args<'a> {
            match *shape {
                [a] => ranked(of, data, [a], args),
                [a, b] => ranked(of, data, [a, b], args),
                [a, b, c] => ranked(of, data, [a, b, c], args),
                [a, b, c, d] => ranked(of, data, [a, b, c, d], args),
                _ => unreachable!("{shape:?}"),
            }
        }
        let of = (self.slot, self.access);
        match &mut self.memory {
            Memory::F16(data) => typed(of, data, &self.shape, args),
            Memory::BF16(data) => typed(of, data, &self.shape, args),
            Memory::E4M3(data) => typed(of, data, &self.shape, args),
            Memory::F32(data) => typed(of, data, &self.shape, args),
        }
    }

    fn give(&mut self, args: RawArgs) -> RawArgs {
        let dtype = self.dtype();
        let address = match &mut self.memory {
            Memory::F16(data) => data.as_mut_ptr() as u64,
            Memory::BF16(data) => data.as_mut_ptr() as u64,
            Memory::E4M3(data) => data.as_mut_ptr() as u64,
            Memory::F32(data) => data.as_mut_ptr() as u64,
        };
        let raw = match *self.shape {
            [a] => RawTensor::new(address, dtype, Place::Cpu, dense([a])),
            [a, b] => RawTensor::new(address, dtype, Place::Cpu, dense([a, b])),
            [a, b, c] => RawTensor::new(address, dtype, Place::Cpu, dense([a, b, c])),
            [a, b, c, d] => RawTensor::new(address, dtype, Place::Cpu, dense([a, b, c, d])),
            _ => unreachable!("{self:?}"),
        };
        args.with(self.slot, raw)
    }
}

/// The operands of each tensor that is quantised: values, what is stored, factors that are written, factors that are read.
const QUANTISED: [[Slot; 4]; 3] = [
    [Slot::QValues, Slot::QStored, Slot::QDescale, Slot::QDescaleGiven],
    [Slot::KValues, Slot::KStored, Slot::KDescale, Slot::KDescaleGiven],
    [Slot::VValues, Slot::VStored, Slot::VDescale, Slot::VDescaleGiven],
];

/// Those operands that a run must be given; of a quantiser everything, with factors that are written.
fn all(plan: &Plan) -> Vec<Buffer> {
    let given = QUANTISED.map(|[.., given]| given);
    let wanted = |row: &&Operand| row.presence() != Presence::Refused && !given.contains(&row.slot());
    plan.operands().iter().filter(wanted).map(Buffer::of).collect()
}

fn bits(buffers: &[Buffer]) -> Vec<Vec<u32>> {
    buffers.iter().map(Buffer::bits).collect()
}

#[test]
fn a_workspace_of_the_callers_memory_runs_plans() {
    let forward = ForwardProblem::builder(DType::F32, DIMS).lse(true).build().unwrap();
    let e4m3 = ForwardProblem::builder(DType::E4M3, DIMS).build().unwrap();
    let mut memory = [0x55u8; 64];
    for plan in [
        Plan::forward(forward.to_builder()),
        Plan::backward(BackwardProblem::builder(&forward)),
        Plan::quantize(Quantizer::builder(&e4m3, DType::BF16)),
    ] {
        let ran = |workspace: &mut Workspace<'_>| {
            let mut buffers = all(&plan);
            plan.run(workspace, &mut buffers).unwrap();
            bits(&buffers)
        };
        let own = ran(&mut Workspace::alloc(&Stream::Cpu, 0).unwrap());
        assert_eq!(own, ran(&mut Workspace::host(&mut [])));
        // Of any size and alignment, one after another run.
        let mut borrowed = Workspace::host(&mut memory[1..]);
        assert_eq!((borrowed.bytes(), ran(&mut borrowed)), (63, own.clone()));
        assert_eq!(ran(&mut borrowed), own);
    }
    memory.fill(0); // the caller's again
}

/// What a run is to say: the name of the operand that is refused, and what is wrong with it.
fn refusal(plan: &Plan, buffers: &[Buffer]) -> Option<(&'static str, &'static str)> {
    let given = |slot: Slot| buffers.iter().find(|buffer| buffer.slot == slot);
    if let Some(other) = buffers.iter().find(|buffer| plan.operands().find(buffer.slot).is_none()) {
        return Some((other.slot.name(), "given"));
    }
    for operand in plan.operands() {
        let what = match (operand.presence(), given(operand.slot())) {
            (Presence::Required, None) => "missing",
            (Presence::Refused, Some(_)) => "given",
            (_, Some(buffer)) if buffer.dtype() != operand.dtype() => "dtype",
            (_, Some(buffer)) if buffer.shape != operand.shape() => "shape",
            _ => continue,
        };
        return Some((operand.slot().name(), what));
    }
    let Plan::Quantize(_) = plan else { return None };
    for [values, stored, descale, read] in QUANTISED {
        let is_given = |slot| given(slot).is_some();
        if is_given(descale) && is_given(read) {
            return Some((descale.name(), "given twice"));
        }
        let factors = is_given(descale) || is_given(read);
        if ![is_given(values), is_given(stored), factors].contains(&true) {
            continue;
        }
        for (there, slot) in [(is_given(values), values), (is_given(stored), stored), (factors, descale)] {
            if !there {
                return Some((slot.name(), "missing"));
            }
        }
    }
    None
}

/// The same of an error.
fn said(error: &Error) -> (&'static str, &'static str) {
    match error {
        Error::Value { what, got, .. } => (
            what,
            match got.as_str() {
                "given" => "given",
                "missing" => "missing",
                "given twice" => "given twice",
                _ => "another value",
            },
        ),
        Error::Dtype { what, .. } => (what, "dtype"),
        Error::Shape { tensor, .. } => (tensor, "shape"),
        _ => ("?", "another error"),
    }
}

/// Plans of all passes and of every option that operands depend on.
fn plans() -> impl Strategy<Value = Plan> {
    let dtype = prop_oneof![Just(DType::F16), Just(DType::BF16), Just(DType::F32)];
    let e4m3 = |scaling: usize| ForwardProblem::builder(DType::E4M3, DIMS).scaling(Scaling::ALL[scaling]);
    let output = prop_oneof![Just(DType::F16), Just(DType::BF16), Just(DType::E4M3)];
    let bias = prop::option::weighted(0.3, (dtype.clone(), any::<[bool; 3]>())).prop_map(|bias| {
        bias.map(|(dtype, [batch, head, query])| Bias::new(dtype).per_batch(batch).per_head(head).per_query(query))
    });
    prop_oneof![
        (dtype.clone(), any::<bool>(), bias.clone())
            .prop_map(|(dtype, lse, bias)| { Plan::forward(ForwardProblem::builder(dtype, DIMS).lse(lse).bias(bias)) }),
        (output, any::<bool>(), any::<bool>(), 0..3usize).prop_map(move |(output, lse, amax, scaling)| {
            Plan::forward(e4m3(scaling).output(output).lse(lse).amax(amax))
        }),
        (dtype.clone(), any::<bool>(), bias, any::<bool>()).prop_map(|(dtype, d_lse, bias, d_bias)| {
            let forward = ForwardProblem::builder(dtype, DIMS).bias(bias).build().unwrap();
            Plan::backward(BackwardProblem::builder(&forward).d_lse(d_lse).d_bias(bias.is_some() && d_bias))
        }),
        (dtype, 0..3usize).prop_map(move |(dtype, scaling)| {
            Plan::quantize(Quantizer::builder(&e4m3(scaling).build().unwrap(), dtype))
        }),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1500, ..common::kept() })]
    /// From all operands that there are some are left out, others added, and one may be of another type or shape.
    #[test]
    fn any_combination_of_operands_is_computed_or_refused_by_name(
        plan in plans(),
        // Of a quantiser: which tensors it is given at first, and which of their factors are read.
        tensors in [0..3, 0..3, 0..3],
        changed in prop::collection::vec(any::<prop::sample::Index>(), 0..4),
        // Mostly none, mostly of another pass.
        added in prop::option::weighted(0.1, 0..Slot::ALL.len()),
        spoilt in prop::option::weighted(0.3, (any::<prop::sample::Index>(), 0..4)),
    ) {
        let mut buffers = all(&plan);
        for ([values, stored, written, read], how) in QUANTISED.into_iter().zip(tensors) {
            match (how, plan.operands().find(read)) {
                (1, Some(operand)) => {
                    buffers.retain(|buffer| buffer.slot != written);
                    buffers.push(Buffer::of(operand));
                }
                (2, _) => buffers.retain(|buffer| ![values, stored, written].contains(&buffer.slot)),
                _ => {}
            }
        }
        let changed = changed.into_iter().map(|which| which.get(plan.operands()).slot());
        for slot in changed.chain(added.map(|i| Slot::ALL[i])) {
            match buffers.iter().position(|buffer| buffer.slot == slot) {
                Some(i) => drop(buffers.remove(i)),
                None => buffers.push(match plan.operands().find(slot) {
                    Some(operand) => Buffer::of(operand),
                    None => Buffer::new(slot, Access::Write, DType::F32, &[1]),
                }),
            }
        }
        if let Some((which, how)) = spoilt && !buffers.is_empty() {
            let buffer = which.get(&buffers);
            let (slot, access, dtype, shape) = (buffer.slot, buffer.access, buffer.dtype(), buffer.shape.clone());
            let other = if dtype == DType::F16 { DType::E4M3 } else { DType::F16 };
            let i = which.index(buffers.len());
            buffers[i] = match how {
                0 => Buffer::new(slot, access, other, &shape),
                1 => Buffer::new(slot, access, dtype, &[shape[0] + 1]),
                2 => Buffer::new(slot, access, dtype, &shape.iter().map(|size| size + 1).collect::<Vec<_>>()),
                // As many elements, in another order of dimensions.
                _ => Buffer::new(slot, access, dtype, &shape.iter().rev().copied().collect::<Vec<_>>()),
            };
        }

        let (before, mut raw) = (bits(&buffers), buffers.clone());
        let result = plan.run(&mut Workspace::alloc(&Stream::Cpu, 0).unwrap(), &mut buffers);
        prop_assert_eq!(result.as_ref().err().map(said), refusal(&plan, &buffers), "{:?}", &result);
        // By address it is the same.
        prop_assert_eq!(&plan.run_raw(&mut raw), &result);
        prop_assert_eq!(bits(&raw), bits(&buffers));
        match result {
            Err(error) => {
                prop_assert!(error.to_string().starts_with(&format!("{}: ", said(&error).0)), "{}", error);
                prop_assert_eq!(bits(&buffers), before);
            }
            Ok(()) => {
                for (buffer, before) in buffers.iter().zip(before) {
                    match buffer.access {
                        Access::Read => prop_assert_eq!(buffer.bits(), before),
                        _ => prop_assert!(!buffer.numbers().iter().any(|x| x.is_nan()), "{}", buffer.slot),
                    }
                }
                // What comes out of a tensor does not depend on what else is given.
                let mut everything = all(&plan);
                plan.run(&mut Workspace::alloc(&Stream::Cpu, 0).unwrap(), &mut everything).unwrap();
                let given = |slot| buffers.iter().any(|buffer| buffer.slot == slot);
                for buffer in buffers.iter().filter(|buffer| buffer.slot != Slot::Counts) {
                    // What is stored goes by the factors.
                    let of = QUANTISED.into_iter().find(|[_, stored, ..]| *stored == buffer.slot);
                    if of.is_some_and(|[.., read]| given(read)) {
                        continue;
                    }
                    if let Some(same) = everything.iter().find(|other| other.slot == buffer.slot) {
                        prop_assert_eq!(buffer.bits(), same.bits(), "{}", buffer.slot);
                    }
                }
            }
        }
    }
}

/// What is read may be lent for writing, which it is not written.
#[test]
fn what_is_read_may_be_lent_exclusively() {
    let plan = Plan::forward(ForwardProblem::builder(DType::F32, DIMS));
    let mut buffers = all(&plan);
    for buffer in &mut buffers {
        buffer.access = Access::Write;
    }
    let before = bits(&buffers);
    plan.run(&mut Workspace::alloc(&Stream::Cpu, 0).unwrap(), &mut buffers).unwrap();
    assert_eq!(bits(&buffers)[..3], before[..3]);
}

/// A shared borrow is not written through.
#[test]
fn what_is_written_is_not_lent_for_reading() {
    for (plan, written) in [
        (Plan::forward(ForwardProblem::builder(DType::F32, DIMS).lse(true)), vec![Slot::O, Slot::Lse]),
        (
            Plan::backward(BackwardProblem::builder(&ForwardProblem::builder(DType::F32, DIMS).build().unwrap())),
            vec![Slot::DQ, Slot::DK, Slot::DV],
        ),
        (
            Plan::quantize(Quantizer::builder(
                &ForwardProblem::builder(DType::E4M3, DIMS).build().unwrap(),
                DType::F32,
            )),
            vec![Slot::QStored, Slot::KDescale, Slot::Counts],
        ),
    ] {
        for slot in written {
            let mut buffers = all(&plan);
            let buffer = buffers.iter_mut().find(|buffer| buffer.slot == slot).unwrap();
            buffer.access = Access::Read;
            let before = bits(&buffers);
            let error = plan.run(&mut Workspace::alloc(&Stream::Cpu, 0).unwrap(), &mut buffers).unwrap_err();
            assert!(error.to_string().starts_with(&format!("{slot}: ")), "{error}");
            assert_eq!(bits(&buffers), before);
        }
    }
}
