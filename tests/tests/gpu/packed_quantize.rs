//! The quantiser with packed tensors and used lengths on a GPU: the CPU's bytes, factors and counts, whatever the lengths.

use std::sync::Arc;

use hopper_attention::cudarc::driver::{CudaSlice, CudaStream};
use hopper_attention::{
    Args, DType, Device, Dims, Float, ForwardProblem, Quantizer, Scaling, Slot, Stream, Workspace, bf16, f16,
};
use hopper_attention_tests::gpu::quantize::{Kind, Like, OnDevice, Sample};
use hopper_attention_tests::gpu::{Gpu, MODE, NO_FLAGS};
use hopper_attention_tests::layouts::Placement;
use hopper_attention_tests::packing::{self, Packing};
use hopper_attention_tests::problems::{Grid, random};
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};

use crate::packed::{hostile, list};
use crate::quantize::{STORED, follows_the_cpu};
use crate::with_dtype;

/// Sizes and options of a problem and its quantiser.
#[derive(Clone, Copy, Debug)]
struct Drawn {
    dims: Dims,
    lists: packing::Kind,
    scaling: Scaling,
    half_scores: bool,
    hadamard: Option<u64>,
    kinds: [Option<Kind>; 3],
    counts: bool,
}

impl Drawn {
    fn random(rng: &mut StdRng) -> Self {
        let flags = |rng: &mut StdRng| [rng.random_bool(0.6), rng.random_bool(0.6)];
        let lists = packing::Kind { packed: flags(rng), used: flags(rng), fill_gaps: rng.random_bool(0.4) };
        let mut pick = |from: &[usize]| *from.choose(rng).unwrap();
        // A packed tensor has the rows of all sequences together.
        let batch = if lists.packed == [true; 2] { pick(&[0, 1, 3, 40, 1100]) } else { pick(&[0, 1, 2, 5, 40]) };
        let mut rows = |packed: bool| if packed { pick(&[0, 1, 130, 777, 3000]) } else { pick(&[0, 1, 63, 128, 300]) };
        let [seqlen_q, seqlen_kv] = lists.packed.map(&mut rows);
        let (heads_kv, group) = (pick(&[1, 2, 3]), pick(&[1, 1, 2, 4]));
        let head_dims = [16, 32, 48, 64, 80, 96, 112, 128, 64, 128, 144, 192, 240, 256];
        let dims = Dims::new(batch, seqlen_q, heads_kv * group, pick(&head_dims)).with_seqlen_kv(seqlen_kv);
        let dims = dims.with_heads_kv(heads_kv).with_head_dim_vo(pick(&head_dims));
        let mut kind = || {
            rng.random_bool(0.8).then(|| Kind {
                values: *Placement::ALL.choose(rng).unwrap(),
                stored: *STORED.choose(rng).unwrap(),
                given: rng.random_bool(0.3),
                like: *Like::ALL.choose(rng).unwrap(),
            })
        };
        let kinds = [kind(), kind(), kind()];
        Self {
            dims,
            lists,
            scaling: Scaling::ALL[rng.random_range(0..3)],
            half_scores: rng.random_bool(0.5),
            hadamard: rng.random_bool(0.6).then(|| rng.random()),
            kinds,
            counts: rng.random_bool(0.5),
        }
    }

    /// Legal lists.
    fn packing(&self, seed: u64) -> Packing {
        Packing::random(self.lists, self.dims.batch, [self.dims.seqlen_q, self.dims.seqlen_kv], seed)
    }

    /// The same lists with any numbers.
    fn garbage(&self, rng: &mut StdRng) -> Packing {
        let Dims { batch, seqlen_q, seqlen_kv, .. } = self.dims;
        let mut of = |list: Option<Vec<i32>>, rows| list.map(|list| hostile(rng, list.len(), rows));
        let legal = self.packing(1);
        assert!(legal.cu_seqlens_q.as_ref().is_none_or(|list| list.len() == batch + 1));
        Packing {
            cu_seqlens_q: of(legal.cu_seqlens_q, seqlen_q),
            cu_seqlens_kv: of(legal.cu_seqlens_kv, seqlen_kv),
            seqused_q: of(legal.seqused_q, seqlen_q),
            seqused_kv: of(legal.seqused_kv, seqlen_kv),
            fill_gaps: legal.fill_gaps,
            ..Packing::default()
        }
    }

    fn problem(&self, packing: &Packing) -> ForwardProblem {
        let options = ForwardProblem::builder(DType::E4M3, self.dims).scaling(self.scaling);
        packing.options(options.half_scores(self.half_scores)).build().unwrap()
    }

    fn sample<T: Float>(&self, packing: Packing, seed: u64) -> Sample<T> {
        let options = Quantizer::builder(&self.problem(&packing), T::DTYPE);
        let options = self.hadamard.map_or(options.clone(), |seed| options.hadamard(seed));
        Sample::packed(options.build().unwrap(), packing, self.kinds, self.counts, seed)
    }
}

fn seeds(small: u64, full: u64) -> impl Iterator<Item = u64> {
    let first = random::seed();
    (0..Grid::from_env().pick(small, full)).map(move |i| first.wrapping_add(i))
}

fn source_of(seed: u64) -> DType {
    if seed.is_multiple_of(2) { DType::BF16 } else { DType::F16 }
}

#[test]
fn packed_tensors_give_the_cpus_bytes() {
    let Some(gpu) = Gpu::open("packed_tensors_give_the_cpus_bytes") else { return };
    for seed in seeds(24, 600) {
        with_dtype!(source_of(seed), legal(&gpu, seed));
    }
}

fn legal<T: Float>(gpu: &Gpu, seed: u64) {
    let drawn = Drawn::random(&mut StdRng::seed_from_u64(seed));
    follows_the_cpu(gpu, &drawn.sample::<T>(drawn.packing(seed), seed), &format!("seed {seed}, {drawn:?}"));
}

/// Offsets and lengths that are garbage stand for clamped ones. Bands, gaps, and rows and factors of no sequence are compared, too.
#[test]
fn garbage_lengths_are_clamped() {
    let Some(gpu) = Gpu::open("garbage_lengths_are_clamped (quantiser)") else { return };
    for seed in seeds(12, 300) {
        with_dtype!(source_of(seed), garbage(&gpu, seed));
    }
}

fn garbage<T: Float>(gpu: &Gpu, seed: u64) {
    let mut rng = StdRng::seed_from_u64(seed ^ 0x6a7_ba6e);
    let drawn = Drawn::random(&mut rng);
    let lists = drawn.garbage(&mut rng);
    let sample = drawn.sample::<T>(lists.clamped(&drawn.problem(&lists)), seed);
    let plan = sample.quantizer.plan(&Device::Cuda(gpu.device.clone())).unwrap();
    let mut workspace = Workspace::alloc(&gpu.lane(), plan.workspace_bytes()).unwrap();
    let mut on_device = OnDevice::new(&gpu.stream, &sample);
    let arrays = Arrays::new(&gpu.stream, &lists);
    plan.run(&gpu.lane(), &mut workspace, arrays.add_to(on_device.args_without_lists(&sample))).unwrap();
    gpu.stream.synchronize().unwrap_or_else(|error| panic!("seed {seed}, {drawn:?}: {error} with {lists:?}"));
    let (got, want) = (on_device.outcome(&gpu.stream), sample.on_cpu());
    assert!(got == want, "seed {seed}, {drawn:?}, {lists:?}: {}", got.difference(&want));
}

/// Lists on the GPU that nobody has checked.
struct Arrays(Vec<(Slot, CudaSlice<i32>)>);

impl Arrays {
    fn new(stream: &Arc<CudaStream>, packing: &Packing) -> Self {
        Self(packing.lists().map(|(slot, list)| (slot, stream.clone_htod(list).unwrap())).collect())
    }

    fn write(&mut self, stream: &Arc<CudaStream>, packing: &Packing) {
        for ((_, array), (_, list)) in self.0.iter_mut().zip(packing.lists()) {
            stream.memcpy_htod(list, array).unwrap();
        }
    }

    fn add_to<'a>(&'a self, args: Args<'a>) -> Args<'a> {
        self.0.iter().fold(args, |args, (slot, array)| {
            // SAFETY: wrong numbers are what is tested. All that a run may write is looked at, and nothing else relies on it.
            unsafe { args.lengths_unchecked(*slot, list(array)) }
        })
    }
}

/// One captured graph serves all lengths within its capacity, garbage too: only the arrays on the device change.
#[test]
fn one_graph_quantises_changing_lengths() {
    let Some(gpu) = Gpu::open("one_graph_quantises_changing_lengths") else { return };
    // SAFETY: everything of this context object happens on one stream, in its order; nothing relies on events.
    unsafe { gpu.device.context().disable_event_tracking() };
    for scaling in Scaling::ALL {
        for packed in [[true, true], [true, false], [false, true], [false, false]] {
            let fill_gaps = packed[0] == packed[1];
            let lists = packing::Kind { packed, used: [true, packed[0]], fill_gaps };
            replays(&gpu, scaling, lists);
        }
    }
}

fn replays(gpu: &Gpu, scaling: Scaling, lists: packing::Kind) {
    let stream = gpu.device.context().new_stream().unwrap();
    let lane = Stream::Cuda(stream.clone());
    let kind = Kind { values: Placement::Bshd, stored: Placement::Bshd, given: false, like: Like::NotFinite };
    let drawn = Drawn {
        dims: Dims::new(9, 900, 4, 128).with_heads_kv(2).with_head_dim_vo(64),
        lists,
        scaling,
        half_scores: false,
        hadamard: Some(5),
        kinds: [Some(kind); 3],
        counts: true,
    };
    let first = drawn.sample::<bf16>(drawn.packing(0), 0);
    let plan = first.quantizer.plan(&Device::Cuda(gpu.device.clone())).unwrap();
    let mut workspace = Workspace::alloc(&lane, plan.workspace_bytes()).unwrap();
    let mut on_device = OnDevice::new(&stream, &first);
    let mut arrays = Arrays::new(&stream, &first.packing);
    stream.synchronize().unwrap();
    // The very first launch of this plan is the captured one: planning has loaded all there is to load.
    stream.begin_capture(MODE).unwrap();
    let ran = plan.run(&lane, &mut workspace, arrays.add_to(on_device.args_without_lists(&first)));
    let graph = stream.end_capture(NO_FLAGS).unwrap().expect("a graph");
    ran.unwrap();
    let mut rng = StdRng::seed_from_u64(random::seed());
    for seed in 1..Grid::from_env().pick(5, 12) {
        let lists = if seed % 2 == 0 { drawn.packing(seed) } else { drawn.garbage(&mut rng) };
        let sample = drawn.sample::<bf16>(lists.clamped(first.quantizer.problem()), seed);
        on_device.write(&stream, &sample);
        arrays.write(&stream, &lists);
        graph.launch().unwrap();
        graph.launch().unwrap();
        let (got, want) = (on_device.outcome(&stream), sample.on_cpu());
        assert!(got == want, "{plan}, {scaling}, seed {seed}, {lists:?}: {}", got.difference(&want));
    }
}

/// More sequences than the table makes in one CTA, and more than it keeps in shared memory. One is long.
#[test]
fn many_sequences_are_quantised() {
    let Some(gpu) = Gpu::open("many_sequences_are_quantised") else { return };
    let mut rng = StdRng::seed_from_u64(7);
    for count in Grid::from_env().pick(vec![1500], vec![1024, 1025, 3000, 12_000]) {
        let mut offsets = vec![0];
        for i in 0..count {
            let len = if i == count / 3 { 5000 } else { rng.random_range(0..17) };
            offsets.push(offsets[i] + len);
        }
        quantised(&gpu, &offsets);
    }
}

/// Ten thousand sequences of 1 to 16 tokens.
#[test]
fn many_short_sequences_are_quantised() {
    let Some(gpu) = Gpu::open("many_short_sequences_are_quantised") else { return };
    let mut rng = StdRng::seed_from_u64(9);
    let mut offsets = vec![0];
    for i in 0..Grid::from_env().pick(1500, 10_000) {
        offsets.push(offsets[i] + rng.random_range(1..17));
    }
    quantised(&gpu, &offsets);
}

/// Packed sequences of these offsets are quantised as the CPU does it, with each scaling.
fn quantised(gpu: &Gpu, offsets: &[i32]) {
    let (count, total) = (offsets.len() - 1, offsets[offsets.len() - 1] as usize);
    let kind = Kind { values: Placement::Bhsd, stored: Placement::Bshd, given: false, like: Like::Uneven };
    for scaling in Scaling::ALL {
        let drawn = Drawn {
            dims: Dims::new(count, total, 2, 64).with_heads_kv(1),
            lists: packing::Kind { packed: [true; 2], used: [false; 2], fill_gaps: false },
            scaling,
            half_scores: false,
            hadamard: None,
            kinds: [Some(kind); 3],
            counts: true,
        };
        let list = Some(offsets.to_vec());
        let lists = Packing { cu_seqlens_q: list.clone(), cu_seqlens_kv: list, ..Packing::default() };
        follows_the_cpu(gpu, &drawn.sample::<f16>(lists, 3), &format!("{count} sequences, {scaling}"));
    }
}
