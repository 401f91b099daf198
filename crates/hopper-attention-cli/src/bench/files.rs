//! The files of `hattn bench --input`: q, k and v of real layers, to be timed in place of drawn inputs.

use std::path::Path;
use std::str::FromStr;
use std::sync::Arc;

use anyhow::{Context, Result, anyhow, bail, ensure};
use hopper_attention::{DType, Layout, bf16, f16};
use hopper_attention_benches::text::excerpt;
use hopper_attention_benches::{
    Direction, FileTensor, FileTensors, InputFile, PointMask, Precision, Scale, Sweep, memory,
};
use serde_json::{Value, json};

use crate::args::{BenchArgs, FileLayout};
use crate::input::TensorFile;
use crate::layout::{file_shape, strided};
use crate::request::shapes;
use crate::values::Values;

/// Tensors that change what a problem is, and that no library of a sweep is given.
const REFUSED: [&str; 14] = [
    "cu_seqlens_q",
    "cu_seqlens_kv",
    "seqused_q",
    "seqused_kv",
    "sinks",
    "alibi_slopes",
    "bias",
    "dropout_state",
    "mask_block_cnt",
    "mask_block_idx",
    "mask_bits",
    "full_block_cnt",
    "full_block_idx",
    "d_lse",
];

/// What a report says of a file.
struct About {
    path: String,
    dtype: DType,
    has_d_o: bool,
}

/// The files that were asked for, in their order.
#[derive(Default)]
pub struct Files {
    pub tensors: Vec<Arc<FileTensors>>,
    about: Vec<About>,
}

impl Files {
    /// Reads and checks them.
    pub fn read(args: &BenchArgs) -> Result<Self> {
        let mut files = Self::default();
        for path in &args.input {
            let (tensors, about) = read(path, args)?;
            files.tensors.push(Arc::new(tensors));
            files.about.push(about);
        }
        Ok(files)
    }

    /// As a report's options have them.
    pub fn options(&self) -> Value {
        let option = |(tensors, about): (&Arc<FileTensors>, &About)| {
            let tensor = |(name, tensor): (&str, &FileTensor)| (name.to_owned(), json!(tensor.shape()));
            let shapes: serde_json::Map<String, Value> = tensors.tensors().map(tensor).collect();
            json!({"name": tensors.file.name, "path": about.path, "dtype": about.dtype.name(), "shapes": shapes})
        };
        self.tensors.iter().zip(&self.about).map(option).collect()
    }

    /// What a reader of a report must know of each file.
    pub fn notes(&self, sweep: &Sweep) -> Vec<String> {
        let note = |(tensors, about): (&Arc<FileTensors>, &About)| {
            let FileTensors { file, q, v, .. } = &**tensors;
            let batch = sweep.batch_of(file.sequences, q.shape()[1].max(v.shape()[1]));
            let (name, path, dtype, sequences) = (&file.name, &about.path, about.dtype, file.sequences);
            let scale = file.scale.map_or(String::new(), |scale| format!(", scale {scale}"));
            let d_o = match (sweep.directions.contains(&Direction::Bwd), about.has_d_o) {
                (false, _) => "",
                (true, true) => "; dO is the file's",
                (true, false) => "; dO is drawn, normal",
            };
            format!(
                "{name}: q, k and v of {path}, {dtype}{scale}; batch {batch}: its {sequences} sequences in turn{d_o}"
            )
        };
        self.tensors.iter().zip(&self.about).map(note).collect()
    }
}

fn read(path: &Path, args: &BenchArgs) -> Result<(FileTensors, About)> {
    let mut input = TensorFile::open(path)?;
    let name = path.display();
    let layout = input.layout()?;
    let layout = layout.with_context(|| format!("input {name}: its metadata states no layout; allowed: bshd, bhsd"))?;
    ensure!(
        layout != FileLayout::Thd,
        "input {name}: layout thd: packed sequences of a file are not timed; allowed: bshd, bhsd"
    );
    let backward = args.points.directions.contains(&Direction::Bwd);
    let is_there = |tensor: &&str| input.has(tensor) && (backward || *tensor != "d_lse");
    if let Some(tensor) = REFUSED.into_iter().find(is_there) {
        bail!("input {name}: a tensor `{tensor}`, which `bench` gives to no library; allowed: q, k, v and d_o");
    }
    ensure!(
        input.dropout()?.is_none_or(|dropout| dropout.dropped() == 0),
        "input {name}: metadata `dropout`: `bench` times a file without dropout; allowed: 0"
    );
    let ([q, k, v], dtype) = shapes(&input, layout)?;
    let d_o = [q[0], q[1], q[2], v[3]];
    let has_d_o = backward && input.has("d_o");
    if has_d_o {
        input.check("d_o", dtype, &file_shape(layout, d_o), crate::layout::axes(layout))?;
    }
    let asked = &args.points.masks;
    let masks = match (&asked[..], stated::<PointMask>(&input, "mask")?) {
        ([], stated) => vec![stated.unwrap_or(PointMask::Full)],
        (given, _) => given.to_vec(),
    };
    let dtypes = args.points.sweep(false).dtypes;
    let mut tensor = |name: &str, shape| tensor(&mut input, name, strided(layout, shape)?, &dtypes);
    let (q, k, v) = (tensor("q", q)?, tensor("k", k)?, tensor("v", v)?);
    let d_o = if has_d_o { Some(tensor("d_o", d_o)?) } else { None };
    let stem = path.file_stem().unwrap_or_default().to_string_lossy();
    let file =
        InputFile { name: InputFile::word(&stem), sequences: q.shape()[0], scale: stated(&input, "scale")?.map(Scale) };
    let about = About { path: path.display().to_string(), dtype, has_d_o };
    Ok((FileTensors { file, masks, q, k, v, d_o }, about))
}

/// What the file's metadata says under a key.
fn stated<T: FromStr<Err: std::fmt::Display>>(input: &TensorFile, key: &str) -> Result<Option<T>> {
    let refused =
        |text: &str, why| anyhow!("input {}: metadata `{key}` {}: {why}", input.path().display(), excerpt(text, 60));
    let parse = |text: &str| text.parse().map_err(|why| refused(text, why));
    input.metadata(key).map(parse).transpose()
}

/// A tensor in logical order. Its values must be finite in every type that is timed: others are nothing to time and to judge.
fn tensor(input: &mut TensorFile, name: &str, at: Layout<4>, dtypes: &[Precision]) -> Result<FileTensor> {
    let Values::F32(values) = input.read(name, DType::F32)? else { bail!("tensor `{name}` is no f32") };
    for dtype in dtypes {
        let fits = |&x: &f32| match dtype {
            Precision::F16 => f16::from_f32(x).to_f32().is_finite(),
            _ => bf16::from_f32(x).to_f32().is_finite(),
        };
        let wrong = values.iter().find(|x| !fits(x));
        ensure!(
            wrong.is_none(),
            "input {}: tensor `{name}` has {:e}, which is not finite in {dtype}; allowed: finite numbers",
            input.path().display(),
            wrong.unwrap_or(&0.0)
        );
    }
    let [batch, seqlen, heads, head_dim] = at.shape();
    let mut logical = memory::reserved(values.len())?;
    for (b, s, h) in (0..batch).flat_map(|b| (0..seqlen).flat_map(move |s| (0..heads).map(move |h| (b, s, h)))) {
        let start = at.offset([b, s, h, 0]).context("a row of the tensor")?;
        logical.extend_from_slice(values.get(start..start + head_dim).context("a row of the tensor")?);
    }
    FileTensor::new(at.shape(), logical)
}
