//! From a file and the options to a problem, its layouts and the device that will compute it.

use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use hopper_attention::{
    Access, AlibiSlopes, BackwardPlan, BackwardProblem, Bias, DType, Device, Dims, ForwardPlan, ForwardProblem,
    Operand, Presence, QuantizePlan, Quantizer, Slot, Tuning, dropout_state,
};

use hopper_attention_verify::alibi::standard;

use crate::args::{ComputeArgs, DeviceArg, FileLayout};
use crate::blocks;
use crate::input::TensorFile;
use crate::layout::{axes, is_in_files_order, logical, shape_in_file};
use crate::operands::inputs;
use crate::report;
use crate::values::{Tensors, Values, lengths};

/// Where a layout was stated, when it was not in the file.
const OPTION: &str = "--layout";

/// An input that has been found to be a problem, and how its tensors lie in the file.
pub struct Request {
    pub input: TensorFile,
    /// The element type in the file, which `problem.output_dtype()` may differ from when `--dtype` was given.
    pub file_dtype: DType,
    pub layout: FileLayout,
    /// Where the layout was stated, for the report.
    pub layout_source: &'static str,
    pub problem: ForwardProblem,
    /// The gradients, where they are wanted.
    pub backward: Option<BackwardProblem>,
    /// What quantises q, k and v, where the problem is of e4m3.
    pub quantizer: Option<Quantizer>,
    /// Whether the ALiBi slopes are those of models, and not in the file.
    standard_slopes: bool,
    /// Whether the seed and the offset of dropout are 0, and not in the file.
    no_seed: bool,
}

impl Request {
    /// Reads the header of the input and checks everything that can be checked without the tensors' values.
    pub fn new(args: &ComputeArgs) -> Result<Self> {
        let input = TensorFile::open(&args.input)?;
        let name = args.input.display();
        let (layout, layout_source) = stated_layout(&input, args)?;
        if layout_source == OPTION
            && let Ok(Some(stated)) = input.layout()
            && stated != layout
        {
            report::warn(format!("--layout {} overrides the file's own layout {}", layout.name(), stated.name()));
        }

        let ([q, k, v], file_dtype) = shapes(&input, layout)?;
        let packed = layout == FileLayout::Thd;
        let batch = if packed { sequences(&input)? } else { q[0] };
        let dims = Dims::new(batch, q[1], q[2], q[3]).with_seqlen_kv(k[1]).with_heads_kv(k[2]).with_head_dim_vo(v[3]);
        let dtype = args.dtype.map_or(file_dtype, DType::from);
        let options = match args.fp8 {
            None => ForwardProblem::builder(dtype, dims),
            Some(_) if !matches!(dtype, DType::BF16 | DType::F16) => bail!(
                "input {name}: --fp8 quantises what is converted to {dtype}; allowed: bf16, f16 (--dtype converts)"
            ),
            Some(scaling) => ForwardProblem::builder(DType::E4M3, dims)
                .scaling(scaling.into())
                .half_scores(args.half_scores)
                .output(dtype),
        };
        let problem = options.packed(packed).build().with_context(|| format!("input {name}"))?;
        let mut options =
            problem.to_builder().mask(args.mask).softcap(args.softcap).lse(true).sm_margin(args.sm_margin);
        options = options.workspace_limit(args.workspace_limit);
        if let Some(scale) = args.scale {
            options = options.softmax_scale(scale);
        }
        if let Some(arch) = args.arch {
            options = options.arch(arch.into());
        }
        if args.max_logits {
            options = options.max_logits(true);
        }
        let slopes = Slot::AlibiSlopes.name();
        match (args.alibi, input.has(slopes)) {
            (true, true) => {
                bail!("input {name}: --alibi, and a tensor `{slopes}` with other slopes; allowed: one of them")
            }
            (true, false) => options = options.alibi(AlibiSlopes::PerHead),
            (false, true) if input.tensor(slopes)?.1.len() == 2 => options = options.alibi(AlibiSlopes::PerBatch),
            (false, true) => options = options.alibi(AlibiSlopes::PerHead),
            (false, false) => {}
        }
        if input.has(Slot::Sinks.name()) {
            options = options.sinks(input.tensor(Slot::Sinks.name())?.0);
        }
        let state = Slot::DropoutState.name();
        let dropout = args.dropout.map_or_else(|| input.dropout(), |dropout| Ok(Some(dropout)))?;
        if dropout.is_none() && input.has(state) {
            bail!("input {name}: a tensor `{state}`, and no probability; allowed: --dropout, or metadata `dropout`");
        }
        let dropout = dropout.filter(|dropout| dropout.dropped() > 0);
        let no_seed = dropout.is_some() && !input.has(state);
        options = options.dropout(dropout).bias(bias(&input, packed).with_context(|| format!("input {name}"))?);
        options = options.block_mask(blocks::form(&input).with_context(|| format!("input {name}"))?);
        let problem = options.build().with_context(|| format!("input {name}"))?;
        let problem = with_optional_inputs(problem, &input);
        // A file has no memory that is not written.
        let problem = problem.to_builder().fill_gaps(problem.has_lengths()).build()?;
        let quantizer = args.fp8.map(|_| {
            let options = Quantizer::builder(&problem, dtype);
            args.hadamard.into_iter().fold(options, |options, seed| options.hadamard(seed)).build()
        });
        let backward = args.backward.then(|| {
            let options = BackwardProblem::builder(&problem).deterministic(args.deterministic);
            let options = options.d_lse(input.has(Slot::DLse.name())).d_sinks(problem.sinks().is_some());
            options.d_bias(problem.bias().is_some()).build()
        });
        let (quantizer, backward) = (quantizer.transpose()?, backward.transpose()?);
        let standard_slopes = args.alibi;
        let mut request =
            Self { input, file_dtype, layout, layout_source, problem, backward, quantizer, standard_slopes, no_seed };
        for operand in request.inputs().into_iter().filter(|operand| !request.makes(operand.slot())) {
            let (dtype, axes) = match is_in_files_order(&operand) {
                true => (file_dtype, axes(layout)),
                false => (operand.dtype(), operand.axes()),
            };
            request.input.check(operand.slot().name(), dtype, &shape_in_file(layout, &operand), axes)?;
        }
        let mut lists = Tensors::new();
        let of_lengths = |operand: &&Operand| {
            operand.dtype() == DType::I32 && !blocks::is_list(operand.slot()) && operand.slot() != Slot::DropoutState
        };
        for slot in request.inputs().iter().filter(of_lengths).map(Operand::slot) {
            lists.insert(slot, request.input.read(slot.name(), DType::I32)?);
        }
        lengths(&lists).check(&request.problem).with_context(|| format!("input {name}"))?;
        Ok(request)
    }

    /// What the file must hold.
    fn inputs(&self) -> Vec<Operand> {
        let backward = self.backward.as_ref().map(BackwardProblem::operands);
        inputs(&self.problem.operands(), backward.as_ref()).into_values().copied().collect()
    }

    /// Whether an input is not in the file.
    fn makes(&self, slot: Slot) -> bool {
        (self.standard_slopes && slot == Slot::AlibiSlopes) || (self.no_seed && slot == Slot::DropoutState)
    }

    /// Reads the tensors, in the type that is computed in or quantised from.
    pub fn read(&mut self) -> Result<Tensors> {
        let source = self.problem.output_dtype();
        let dtype = |operand: &Operand| if operand.dtype() == DType::E4M3 { source } else { operand.dtype() };
        let inputs = self.inputs();
        let one = |input: &Operand| {
            if self.makes(input.slot()) && input.slot() == Slot::DropoutState {
                return Ok((input.slot(), Values::I32(dropout_state(0, 0).to_vec())));
            }
            if self.makes(input.slot()) {
                let slopes = standard(self.problem.dims().heads_q).map(|slope| slope as f32);
                return Ok((input.slot(), Values::F32(slopes.collect())));
            }
            Ok((input.slot(), self.input.read(input.slot().name(), dtype(input))?))
        };
        inputs.iter().map(one).collect()
    }
}

/// The shapes of q, k and v, each as `[batch, seqlen, heads, head_dim]`, and their type. What names one size must agree.
pub fn shapes(input: &TensorFile, layout: FileLayout) -> Result<([[usize; 4]; 3], DType)> {
    let name = input.path().display();
    let mut shapes = [[0; 4]; 3];
    let mut dtypes = [DType::F32; 3];
    for (tensor, (shape, dtype)) in ["q", "k", "v"].into_iter().zip(shapes.iter_mut().zip(&mut dtypes)) {
        let (found, dims) = input.tensor(tensor)?;
        *dtype = found;
        let (wanted, logical) = match layout {
            // Packed tensors have a batch of 1.
            FileLayout::Thd => (3, <[usize; 3]>::try_from(dims).ok().map(|[rows, heads, dim]| [1, rows, heads, dim])),
            _ => (4, <[usize; 4]>::try_from(dims).ok().map(|dims| logical(layout, dims))),
        };
        *shape = logical.with_context(|| {
            let dimensions = dims.len();
            format!(
                "input {name}: tensor `{tensor}` has {dimensions} dimensions {dims:?}; allowed: {wanted}, {}",
                axes(layout)
            )
        })?;
    }
    let [q, k, v] = shapes;
    let [dtype_q, dtype_k, dtype_v] = dtypes;
    ensure!(
        dtype_q == dtype_k && dtype_q == dtype_v,
        "input {name}: q, k and v have dtypes {dtype_q}, {dtype_k} and {dtype_v}; allowed: one for all three"
    );
    ensure!(dtype_q != DType::I32, "input {name}: tensor `q` has dtype I32; allowed: BF16, F16, F32");
    // What names the same size in two tensors must agree.
    for (what, (left, a), (right, b)) in [
        ("batch", ("q", q[0]), ("k", k[0])),
        ("batch", ("k", k[0]), ("v", v[0])),
        ("seqlen", ("k", k[1]), ("v", v[1])),
        ("heads", ("k", k[2]), ("v", v[2])),
        ("head_dim", ("q", q[3]), ("k", k[3])),
    ] {
        ensure!(
            a == b,
            "input {name}: {what} is {a} in {left} and {b} in {right}; allowed: the same (layout {})",
            layout.name()
        );
    }
    Ok(([q, k, v], dtype_q))
}

/// The form of the bias of a file, from the type and the shape of the tensor. `None` where it has none. `packed`: whether sequences
/// are packed. Then it may have numbers for fewer rows than all together have.
fn bias(input: &TensorFile, packed: bool) -> Result<Option<Bias>> {
    let name = Slot::Bias.name();
    if !input.has(name) {
        return Ok(None);
    }
    let (dtype, shape) = input.tensor(name)?;
    let &[batch, heads, queries, keys] = shape else {
        bail!("tensor `{name}` has shape {shape:?}; allowed: {}", Slot::Bias.axes());
    };
    let form = Bias::new(dtype).per_batch(batch != 1).per_head(heads != 1).per_query(queries != 1);
    Ok(Some(if packed { form.covering(queries, keys) } else { form }))
}

/// The number of packed sequences in a file: one less than there are offsets.
pub fn sequences(input: &TensorFile) -> Result<usize> {
    let name = Slot::CuSeqlensQ.name();
    match *input.tensor(name)?.1 {
        [offsets] if offsets > 0 => Ok(offsets - 1),
        ref other => bail!("tensor `{name}` has shape {other:?}; allowed: [batch + 1]"),
    }
}

/// The problem with every optional input that the file holds and that it can be asked for.
fn with_optional_inputs(mut problem: ForwardProblem, input: &TensorFile) -> ForwardProblem {
    for operand in &problem.operands() {
        let name = operand.slot().name();
        // The layout says whether tensors are packed.
        // Without dropout nobody reads its state.
        let is_offsets = matches!(operand.slot(), Slot::CuSeqlensQ | Slot::CuSeqlensKv | Slot::DropoutState);
        if operand.access() == Access::Read && !is_offsets && operand.presence() == Presence::Refused && input.has(name)
        {
            match problem.to_builder().operand(operand.slot(), true).build() {
                Ok(with) => problem = with,
                Err(error) => report::warn(format!("tensor `{name}` of the input is left out: {error}")),
            }
        }
    }
    problem
}

fn stated_layout(input: &TensorFile, args: &ComputeArgs) -> Result<(FileLayout, &'static str)> {
    if let Some(asked) = args.layout {
        return Ok((asked, OPTION));
    }
    match input.layout()? {
        Some(stated) => Ok((stated, "the file")),
        None => bail!(
            "input {}: the layout is stated neither by --layout nor by the file's metadata; allowed: bshd, bhsd, thd",
            args.input.display()
        ),
    }
}

/// A device, the plans for it, and why it was taken where the user left it open.
pub struct Choice {
    pub device: Device,
    pub plan: ForwardPlan,
    /// Where q, k and v are quantised on the way.
    pub quantise: Option<QuantizePlan>,
    /// Where gradients are wanted.
    pub backward: Option<BackwardPlan>,
    pub why: Option<String>,
}

/// Picks the device. Only `auto` may end up elsewhere than asked, and says why.
pub fn choose(asked: DeviceArg, request: &Request, tuning: &Tuning) -> Result<Choice> {
    match asked {
        DeviceArg::Cpu => Ok(on(Device::cpu(), request, tuning, None)?),
        DeviceArg::Cuda(ordinal) => {
            if request.problem.dtype() == DType::F32 {
                bail!("--device cuda:{ordinal}: the GPU kernels do not compute f32; --dtype bf16 or f16 converts");
            }
            Ok(on(Device::cuda(ordinal)?, request, tuning, None)?)
        }
        DeviceArg::Auto => auto(request, tuning),
    }
}

fn on(device: Device, request: &Request, tuning: &Tuning, why: Option<String>) -> hopper_attention::Result<Choice> {
    let plan = request.problem.plan_tuned(&device, tuning)?;
    let quantise = request.quantizer.as_ref().map(|quantizer| quantizer.plan(&device)).transpose()?;
    let backward = request.backward.as_ref().map(|backward| backward.plan(&device)).transpose()?;
    Ok(Choice { device, plan, quantise, backward, why })
}

fn auto(request: &Request, tuning: &Tuning) -> Result<Choice> {
    if !cfg!(feature = "cuda") {
        return Ok(on(Device::cpu(), request, tuning, Some("this build has no GPU kernels".into()))?);
    }
    let mut refusals = Vec::new();
    for ordinal in 0..Device::available().len() {
        match Device::cuda(ordinal).and_then(|device| on(device, request, tuning, None)) {
            Ok(choice) => {
                let why =
                    if refusals.is_empty() { "a GPU that supports the problem".into() } else { refusals.join("; ") };
                return Ok(Choice { why: Some(why), ..choice });
            }
            Err(error) => refusals.push(format!("cuda:{ordinal}: {error}")),
        }
    }
    let why = if refusals.is_empty() { "no GPU was found".into() } else { refusals.join("; ") };
    Ok(on(Device::cpu(), request, tuning, Some(why))?)
}

/// Whether two paths lead to one existing file.
pub fn same_file(a: &Path, b: &Path) -> bool {
    matches!((a.canonicalize(), b.canonicalize()), (Ok(a), Ok(b)) if a == b)
}
