//! `hattn random`: an input of any size, for trying things out.

use std::collections::BTreeMap;

use anyhow::{Result, bail, ensure};
use hopper_attention::{DType, Dims, ForwardProblem, bf16, f16};
use rand::SeedableRng;
use rand::rngs::StdRng;
use rand_distr::{Distribution, StandardNormal};

use crate::args::{FileLayout, RandomArgs};
use crate::layout::file_shape;
use crate::output::{AtomicFile, NamedTensor, write_safetensors};
use crate::report;
use crate::values::{Value, filled};

/// Writes q, k and v, and d_o and d_lse where they are wanted, each element from the normal distribution with mean 0 and
/// deviation 1.
pub fn random(args: &RandomArgs) -> Result<()> {
    ensure!(args.layout != FileLayout::Thd, "layout thd (packed sequences) is not supported yet; allowed: bshd, bhsd");
    let dims = Dims {
        batch: args.batch,
        seqlen_q: args.seqlen_q,
        seqlen_kv: args.seqlen_kv.unwrap_or(args.seqlen_q),
        heads_q: args.heads_q,
        heads_kv: args.heads_kv.unwrap_or(args.heads_q),
        head_dim_qk: args.head_dim,
        head_dim_vo: args.head_dim_vo.unwrap_or(args.head_dim),
    };
    let problem = ForwardProblem::new(args.dtype.into(), dims)?;
    let file = AtomicFile::create(&args.output)?;
    match problem.dtype() {
        DType::BF16 => fill::<bf16>(args, &problem, file),
        DType::F16 => fill::<f16>(args, &problem, file),
        DType::F32 => fill::<f32>(args, &problem, file),
        other => bail!("dtype {other}; allowed: bf16, f16, f32"),
    }
}

fn fill<T: Value>(args: &RandomArgs, problem: &ForwardProblem, file: AtomicFile) -> Result<()> {
    let mut rng = StdRng::seed_from_u64(args.seed);
    let (path, dtype, layout) = (args.output.display(), problem.dtype(), args.layout.name());
    let in_file = |logical_shape| file_shape(args.layout, logical_shape).to_vec();
    // d_lse comes last: its elements are of another type.
    let mut drawn: Vec<(&str, Vec<usize>)> =
        vec![("q", in_file(problem.q_shape())), ("k", in_file(problem.k_shape())), ("v", in_file(problem.v_shape()))];
    if args.backward {
        drawn.push(("d_o", in_file(problem.o_shape())));
    }
    let (tensors, d_lse) = report::busy("drawing numbers", || {
        let tensors: Result<Vec<Vec<T>>> = drawn.iter().map(|(_, shape)| normal(shape, &mut rng)).collect();
        let d_lse = args.backward.then(|| normal::<f32>(&problem.lse_shape(), &mut rng)).transpose();
        Ok::<_, anyhow::Error>((tensors?, d_lse?))
    })?;
    let metadata: BTreeMap<String, String> = [
        ("layout", layout.to_string()),
        ("source", format!("normal distribution, seed {}", args.seed)),
        ("made_by", concat!("hattn ", env!("CARGO_PKG_VERSION")).to_string()),
    ]
    .map(|(key, value)| (key.to_string(), value))
    .into();
    let mut named: Vec<NamedTensor> = drawn
        .iter()
        .zip(&tensors)
        .map(|((name, shape), values)| NamedTensor {
            name,
            dtype,
            shape: shape.clone(),
            bytes: bytemuck::cast_slice(values),
        })
        .collect();
    let mut wrote: Vec<String> = drawn.iter().map(|(name, shape)| format!("{name} {shape:?}")).collect();
    wrote.push(format!("{dtype} {layout}"));
    if let Some(d_lse) = &d_lse {
        let shape = problem.lse_shape().to_vec();
        wrote.push(format!("d_lse f32 {shape:?}"));
        named.push(NamedTensor { name: "d_lse", dtype: DType::F32, shape, bytes: bytemuck::cast_slice(d_lse) });
    }
    report::busy("writing", || file.finish(|writer| write_safetensors(writer, &metadata, &named)))?;
    report::line("output", format!("{path}: {}", wrote.join(", ")))
}

/// Normally distributed values.
fn normal<T: Value>(shape: &[usize], rng: &mut StdRng) -> Result<Vec<T>> {
    let Some(elements) = shape.iter().try_fold(1usize, |product, &size| product.checked_mul(size)) else {
        bail!("shape {shape:?}; allowed: a number of elements that fits the machine");
    };
    let mut values = filled(T::zeroed(), elements)?;
    values.fill_with(|| T::from_f32(StandardNormal.sample(rng)));
    Ok(values)
}
