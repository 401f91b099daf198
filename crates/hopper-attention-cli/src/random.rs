//! `hattn random`: an input of any size, for trying things out.

use std::collections::BTreeMap;

use anyhow::{Result, ensure};
use hopper_attention::{BackwardProblem, DType, Dims, ForwardProblem, Mask, Operand, Slot, dropout_state};
use hopper_attention_verify::alibi::standard;
use hopper_attention_verify::inputs::{Class, Input, Shaped};
use hopper_attention_verify::packing::{Kind, Packing, longest};
use rand::SeedableRng;
use rand::rngs::StdRng;
use rand_distr::{Distribution, StandardNormal};

use crate::args::{FileLayout, RandomArgs};
use crate::blocks::Lists;
use crate::layout::{is_in_files_order, logical, shape_in_file};
use crate::operands::inputs;
use crate::output::{AtomicFile, NamedTensor, write_safetensors};
use crate::report;
use crate::values::Values;

/// Writes q, k and v, and d_o, d_lse, sinks, ALiBi slopes, a bias, lists of blocks and the state of dropout where they are wanted.
/// Each element but those of slopes, the bias, lists and the state is from the normal distribution with mean 0 and deviation 1. A
/// class of inputs changes q and k.
pub fn random(args: &RandomArgs) -> Result<()> {
    let packed = args.packed || args.layout == FileLayout::Thd;
    let layout = if packed { FileLayout::Thd } else { args.layout };
    ensure!(!packed || args.like.is_normal(), "--like {} with packed sequences; allowed: normal", args.like);
    let dims = Dims::new(args.batch, args.seqlen_q, args.heads_q, args.head_dim)
        .with_seqlen_kv(args.seqlen_kv.unwrap_or(args.seqlen_q))
        .with_heads_kv(args.heads_kv.unwrap_or(args.heads_q))
        .with_head_dim_vo(args.head_dim_vo.unwrap_or(args.head_dim));
    let options = ForwardProblem::builder(args.dtype.into(), dims).lse(true).packed(packed);
    let options = if args.sinks { options.sinks(DType::F32) } else { options };
    let lists = args.block_mask.as_ref().map(|kind| Lists::new(kind, dims, args.seed)).transpose()?.flatten();
    let options = options.operand(Slot::AlibiSlopes, args.alibi).block_mask(lists.as_ref().map(Lists::form));
    let options = options.dropout(args.dropout);
    let lengths = if packed { cuts(dims, args.seed) } else { Packing::default() };
    let sequences = lengths.sequences(dims)?;
    // A bias of packed sequences has the size of the longest.
    let covering = packed.then(|| longest(&sequences));
    let form = args.bias.option().map(|bias| covering.map_or(bias, |[queries, keys]| bias.covering(queries, keys)));
    let problem = options.bias(form).build()?;
    let biases = args.bias.image_of(dims, covering, &sequences, Mask::Full, args.seed).map(|biases| biases.values());
    let backward = BackwardProblem::builder(&problem).d_lse(true).build()?.operands();
    let (dtype, forward) = (problem.dtype(), problem.operands());
    let inputs: Vec<&Operand> = inputs(&forward, args.backward.then_some(&backward)).into_values().collect();

    let file = AtomicFile::create(&args.output)?;
    let mut rng = StdRng::seed_from_u64(args.seed);
    let drawn = report::busy("drawing numbers", || {
        let draw = |operand: &&Operand| {
            let mut values = Values::unwritten(operand.dtype(), operand.shape())?;
            if let (Values::I32(numbers), Some((_, list))) =
                (&mut values, lengths.lists().find(|(slot, _)| *slot == operand.slot()))
            {
                numbers.copy_from_slice(list);
                return Ok(values);
            }
            if let (Values::I32(numbers), Slot::DropoutState) = (&mut values, operand.slot()) {
                numbers.copy_from_slice(&dropout_state(args.seed, 0));
                return Ok(values);
            }
            if let (Values::I32(numbers), Some(lists)) = (&mut values, &lists) {
                numbers.copy_from_slice(lists.of(operand.slot()));
                return Ok(values);
            }
            if operand.slot() == Slot::AlibiSlopes {
                values.fill(standard(args.heads_q).map(|slope| slope as f32));
                return Ok(values);
            }
            if let (Slot::Bias, Some(biases)) = (operand.slot(), &biases) {
                values.fill(biases.iter().map(|&bias| bias as f32));
                return Ok(values);
            }
            let numbers = StandardNormal.sample_iter(&mut rng);
            match rows(args, operand) {
                Some(rows) => values.fill(rows.changed(numbers)),
                None => values.fill(numbers),
            }
            anyhow::Ok(values)
        };
        inputs.iter().map(draw).collect::<Result<Vec<_>>>()
    })?;
    let layout_name = layout.name();
    let mut metadata: BTreeMap<String, String> = [
        ("layout", layout_name.to_string()),
        ("source", source(args)),
        ("made_by", concat!("hattn ", env!("CARGO_PKG_VERSION")).to_string()),
    ]
    .map(|(key, value)| (key.to_string(), value))
    .into();
    metadata.extend(args.dropout.map(|dropout| ("dropout".to_string(), dropout.probability().to_string())));
    let shape = |operand| shape_in_file(layout, operand);
    let named = inputs.iter().zip(&drawn).map(|(operand, values)| NamedTensor {
        name: operand.slot().name(),
        dtype: operand.dtype().name(),
        shape: shape(operand),
        bytes: values.bytes(),
    });
    let named: Vec<NamedTensor> = named.collect();
    report::busy("writing", || file.finish(|writer| write_safetensors(writer, &metadata, &named)))?;
    let (in_order, others): (Vec<&Operand>, Vec<&Operand>) =
        inputs.iter().partition(|operand| is_in_files_order(operand));
    let in_order = in_order.into_iter().map(|operand| format!("{} {:?}, ", operand.slot(), shape(operand)));
    let others =
        others.into_iter().map(|operand| format!(", {} {} {:?}", operand.slot(), operand.dtype(), operand.shape()));
    let (in_order, others) = (in_order.collect::<String>(), others.collect::<String>());
    report::line("output", format!("{}: {in_order}{dtype} {layout_name}{others}", args.output.display()));
    Ok(())
}

/// Cuts the rows of both sides into sequences of random lengths, the same ones where both have as many rows.
fn cuts(dims: Dims, seed: u64) -> Packing {
    let kind = Kind { packed: [true; 2], ..Kind::default() };
    let mut lengths = Packing::whole(kind, dims.batch, [dims.seqlen_q, dims.seqlen_kv], seed);
    if dims.seqlen_q == dims.seqlen_kv {
        lengths.cu_seqlens_kv.clone_from(&lengths.cu_seqlens_q);
    }
    lengths
}

/// Where the numbers come from, for the file's metadata.
fn source(args: &RandomArgs) -> String {
    let class = if args.like.is_normal() { String::new() } else { format!(", inputs `{}`", args.like) };
    format!("normal distribution{class}, seed {}", args.seed)
}

/// The rows of an operand that the class of inputs changes.
fn rows(args: &RandomArgs, operand: &Operand) -> Option<Rows> {
    let input = match operand.slot() {
        Slot::Q => Input::Q,
        Slot::K => Input::K,
        _ => return None,
    };
    let &[batch, seqlen, heads, head_dim] = operand.shape() else { return None };
    let shape = [batch, seqlen, heads, head_dim];
    let changed = args.like != Class::Normal && shape.iter().all(|&size| size > 0);
    changed.then(|| Rows { layout: args.layout, shape, shaped: args.like.shaped(input, shape, args.seed) })
}

/// What a class makes of a tensor, row after row in the file's order.
struct Rows {
    layout: FileLayout,
    /// `[batch, seqlen, heads, head_dim]`.
    shape: [usize; 4],
    shaped: Shaped,
}

impl Rows {
    /// The numbers of the whole tensor, made of normal ones.
    fn changed(self, mut normal: impl Iterator<Item = f32>) -> impl Iterator<Item = f32> {
        let [_, second, third, head_dim] = logical(self.layout, self.shape); // as in the file: the swap is its own inverse
        let rows = self.shape[..3].iter().product::<usize>();
        (0..rows).flat_map(move |row| {
            let [batch, token, head, _] =
                logical(self.layout, [row / third / second, row / third % second, row % third, 0]);
            let mut values: Vec<f64> = normal.by_ref().take(head_dim).map(f64::from).collect();
            self.shaped.row([batch, token, head], &mut values);
            values.into_iter().map(|value| value as f32)
        })
    }
}
