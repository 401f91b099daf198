//! Q, K and V of layers of trained models, as inputs of the accuracy tests.

use std::path::{Path, PathBuf};

use hopper_attention::{Dims, Float, ForwardProblem, Mask, bf16, f16};
use safetensors::{Dtype, SafeTensors};

use crate::data::{Input, Values};
use crate::gradients::Sample;
use crate::say;

/// The layer that is kept in this repository. `fixtures/README.md` says whose it is.
const FIXTURE: &[u8] = include_bytes!("../../fixtures/minilm_layer3.safetensors");

/// Q, K and V of a layer, each `[batch, seqlen, heads, head_dim]`.
struct Layer {
    name: String,
    shape: [usize; 4],
    qkv: [Vec<f32>; 3],
}

/// The layer in `fixtures/`, and those in the folder that `HATTN_LAYERS` names: safetensors files with q, k and v, such as
/// `scripts/make_fixture.py --layer 0 --output FILE` writes.
///
/// # Panics
/// When a file cannot be read, or holds something else.
fn layers() -> Vec<Layer> {
    let mut layers = vec![read("minilm_layer3".into(), FIXTURE)];
    match std::env::var_os("HATTN_LAYERS") {
        None => say("the layer in fixtures/ alone; HATTN_LAYERS names a folder of others"),
        Some(folder) => {
            let files = std::fs::read_dir(&folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
            let mut paths: Vec<PathBuf> = files.map(|file| file.expect("a file").path()).collect();
            paths.retain(|path| path.extension().is_some_and(|ending| ending == "safetensors"));
            paths.sort();
            layers.extend(paths.iter().map(|path| {
                let bytes = std::fs::read(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
                read(path.file_stem().map(Path::new).unwrap_or(path).display().to_string(), &bytes)
            }));
        }
    }
    layers
}

fn read(name: String, bytes: &[u8]) -> Layer {
    let tensors = SafeTensors::deserialize(bytes).unwrap_or_else(|error| panic!("{name}: {error}"));
    let tensor = |of| tensors.tensor(of).unwrap_or_else(|error| panic!("{name}: {of}: {error}"));
    let shape = <[usize; 4]>::try_from(tensor("q").shape()).expect("four dimensions");
    let qkv = ["q", "k", "v"].map(|of| {
        let tensor = tensor(of);
        assert_eq!(tensor.shape(), shape, "{name}: {of} has another shape than q");
        let halves = tensor.data().chunks_exact(2).map(|bytes| u16::from_le_bytes([bytes[0], bytes[1]]));
        match tensor.dtype() {
            Dtype::BF16 => halves.map(|bits| bf16::from_bits(bits).to_f32()).collect(),
            Dtype::F16 => halves.map(|bits| f16::from_bits(bits).to_f32()).collect(),
            other => panic!("{name}: {of} is {other:?}; allowed: BF16, F16"),
        }
    });
    Layer { name, shape, qkv }
}

/// A sample for each sequence of each layer, without a mask and with a causal one. dO is normal.
pub fn samples<T: Float>() -> Vec<Sample<T>> {
    let mut samples = Vec::new();
    for Layer { name, shape: [batch, seqlen, heads, head_dim], qkv } in layers() {
        let count = seqlen * heads * head_dim;
        for sequence in 0..batch {
            let d_o = Values::Normal.tensor(Input::DO, [1, seqlen, heads, head_dim], sequence as u64);
            for (mask, word) in [(Mask::Full, "full"), (Mask::causal(), "causal")] {
                let of = |values: &[f32]| values.iter().map(|&x| T::from_f32(x)).collect::<Vec<T>>();
                let [q, k, v] = qkv.each_ref().map(|values| of(&values[sequence * count..][..count]));
                let d_o = d_o.data().iter().map(|&x| T::from_f32(x as f32)).collect();
                let dims = Dims::new(1, seqlen, heads, head_dim);
                let problem = ForwardProblem::builder(T::DTYPE, dims).mask(mask).lse(true).build();
                let name = format!("{name} sequence {sequence} d{head_dim} {word} s{seqlen}");
                samples.push(Sample::of(name, problem.expect("legal sizes"), [q, k, v, d_o]));
            }
        }
    }
    samples
}
