//! `hattn random`: an input of any size, for trying things out.

use std::collections::BTreeMap;

use anyhow::{Result, ensure};
use hopper_attention::{BackwardProblem, Dims, ForwardProblem, Operand};
use rand::SeedableRng;
use rand::rngs::StdRng;
use rand_distr::{Distribution, StandardNormal};

use crate::args::{FileLayout, RandomArgs};
use crate::layout::{is_in_files_order, shape_in_file};
use crate::operands::inputs;
use crate::output::{AtomicFile, NamedTensor, write_safetensors};
use crate::report;
use crate::values::Values;

/// Writes q, k and v, and d_o and d_lse where they are wanted, each element from the normal distribution with mean 0 and
/// deviation 1.
pub fn random(args: &RandomArgs) -> Result<()> {
    ensure!(args.layout != FileLayout::Thd, "layout thd (packed sequences) is not supported yet; allowed: bshd, bhsd");
    let dims = Dims::new(args.batch, args.seqlen_q, args.heads_q, args.head_dim)
        .with_seqlen_kv(args.seqlen_kv.unwrap_or(args.seqlen_q))
        .with_heads_kv(args.heads_kv.unwrap_or(args.heads_q))
        .with_head_dim_vo(args.head_dim_vo.unwrap_or(args.head_dim));
    let problem = ForwardProblem::builder(args.dtype.into(), dims).lse(true).build()?;
    let backward = BackwardProblem::builder(&problem).d_lse(true).build()?.operands();
    let (dtype, forward) = (problem.dtype(), problem.operands());
    let inputs: Vec<&Operand> = inputs(&forward, args.backward.then_some(&backward)).into_values().collect();

    let file = AtomicFile::create(&args.output)?;
    let mut rng = StdRng::seed_from_u64(args.seed);
    let drawn = report::busy("drawing numbers", || {
        let draw = |operand: &&Operand| {
            let mut values = Values::unwritten(operand.dtype(), operand.shape())?;
            values.fill(StandardNormal.sample_iter(&mut rng));
            anyhow::Ok(values)
        };
        inputs.iter().map(draw).collect::<Result<Vec<_>>>()
    })?;
    let layout = args.layout.name();
    let metadata: BTreeMap<String, String> = [
        ("layout", layout.to_string()),
        ("source", format!("normal distribution, seed {}", args.seed)),
        ("made_by", concat!("hattn ", env!("CARGO_PKG_VERSION")).to_string()),
    ]
    .map(|(key, value)| (key.to_string(), value))
    .into();
    let shape = |operand| shape_in_file(args.layout, operand);
    let named = inputs.iter().zip(&drawn).map(|(operand, values)| NamedTensor {
        name: operand.slot().name(),
        dtype: operand.dtype(),
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
    report::line("output", format!("{}: {in_order}{dtype} {layout}{others}", args.output.display()));
    Ok(())
}
