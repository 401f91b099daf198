//! `hattn random`: an input of any size, for trying things out.

use std::collections::BTreeMap;

use anyhow::{Result, bail, ensure};
use hopper_attention::{DType, Dims, ForwardProblem, bf16, f16};
use rand::SeedableRng;
use rand::rngs::StdRng;
use rand_distr::{Distribution, StandardNormal};

use crate::args::{FileLayout, RandomArgs};
use crate::compute::filled;
use crate::input::Value;
use crate::output::{AtomicFile, NamedTensor, write_safetensors};
use crate::report;
use crate::request::file_shape;

/// Writes q, k and v, each element from the normal distribution with mean 0 and deviation 1.
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
    let mut tensor = |logical_shape: [usize; 4]| -> Result<([usize; 4], Vec<T>)> {
        let shape = file_shape(args.layout, logical_shape);
        let Some(elements) = shape.iter().try_fold(1usize, |product, &size| product.checked_mul(size)) else {
            bail!("shape {shape:?}; allowed: a number of elements that fits the machine");
        };
        let mut values = filled(T::zeroed(), elements)?;
        values.fill_with(|| T::from_f32(StandardNormal.sample(&mut rng)));
        Ok((shape, values))
    };
    let (path, dtype, layout) = (args.output.display(), problem.dtype(), args.layout.name());
    let tensors = report::busy("drawing numbers", || {
        Ok::<_, anyhow::Error>([tensor(problem.q_shape())?, tensor(problem.k_shape())?, tensor(problem.v_shape())?])
    })?;
    let metadata: BTreeMap<String, String> = [
        ("layout", layout.to_string()),
        ("source", format!("normal distribution, seed {}", args.seed)),
        ("made_by", concat!("hattn ", env!("CARGO_PKG_VERSION")).to_string()),
    ]
    .map(|(key, value)| (key.to_string(), value))
    .into();
    let named: Vec<NamedTensor> = ["q", "k", "v"]
        .into_iter()
        .zip(&tensors)
        .map(|(name, (shape, values))| NamedTensor {
            name,
            dtype,
            shape: shape.to_vec(),
            bytes: bytemuck::cast_slice(values),
        })
        .collect();
    report::busy("writing", || file.finish(|writer| write_safetensors(writer, &metadata, &named)))?;
    let [(q, _), (k, _), (v, _)] = &tensors;
    report::line("output", format!("{path}: q {q:?}, k {k:?}, v {v:?}, {dtype} {layout}"))
}
