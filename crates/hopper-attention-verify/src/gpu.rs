//! Cases in device memory.

pub mod backward;
pub mod fp8;
pub mod quantize;

use std::sync::Arc;

use hopper_attention::cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};
use hopper_attention::cudarc::driver::{CudaSlice, CudaStream, DevicePtr};
use hopper_attention::{
    Args, Element, ForwardPlan, Layout, SequenceOffsets, Slot, Stream, TensorMut, TensorRef, UsedLengths, Workspace,
    bf16, f16,
};

use crate::alibi::AlibiImage;
use crate::bias::BiasImage;
use crate::blocks::BlocksImage;
use crate::data::{GUARD, Image, Poison};
use crate::forward::{Outputs, Prepared};
use crate::packing::{Packing, without_batch};
use crate::sinks::SinksImage;

/// How a stream is captured: calls of other threads are no part of it.
pub const MODE: CUstreamCaptureMode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
/// Of a graph. cudarc has no name for "no flags".
pub const NO_FLAGS: CUgraphInstantiate_flags = CUgraphInstantiate_flags(0);

/// The tensor between the guard bands.
pub fn read<T: Element, const R: usize>(slice: &CudaSlice<T>, layout: Layout<R>) -> TensorRef<'_, T, R> {
    TensorRef::cuda(slice.slice(GUARD..slice.len() - GUARD), layout).expect("a fitting layout")
}

/// The same to write to.
pub fn write<T: Element, const R: usize>(slice: &mut CudaSlice<T>, layout: Layout<R>) -> TensorMut<'_, T, R> {
    let end = slice.len() - GUARD;
    TensorMut::cuda(slice.slice_mut(GUARD..end), layout).expect("a fitting layout")
}

macro_rules! given {
    ($($given_read:ident $given_write:ident: $rank:literal $packed:literal;)*) => {$(
        /// Adds a tensor between guard bands that is read. The layout has a batch, also where the tensor is packed.
        fn $given_read<'a, T: Element>(
            args: Args<'a>,
            slot: Slot,
            slice: &'a CudaSlice<T>,
            layout: Layout<$rank>,
            packed: bool,
        ) -> Args<'a> {
            if packed {
                return args.read(slot, read(slice, without_batch::<$rank, $packed>(layout)));
            }
            args.read(slot, read(slice, layout))
        }

        /// The same for a tensor that is written.
        fn $given_write<'a, T: Element>(
            args: Args<'a>,
            slot: Slot,
            slice: &'a mut CudaSlice<T>,
            layout: Layout<$rank>,
            packed: bool,
        ) -> Args<'a> {
            if packed {
                return args.write(slot, write(slice, without_batch::<$rank, $packed>(layout)));
            }
            args.write(slot, write(slice, layout))
        }
    )*};
}

given! {
    given_read given_write: 4 3;
    given_read_numbers given_write_numbers: 3 2;
}

/// Offsets and used lengths of a case in device memory.
#[derive(Default)]
pub struct Lists {
    offsets: Vec<(Slot, SequenceOffsets)>,
    used: Vec<(Slot, UsedLengths)>,
}

impl Lists {
    /// Copies the lists of a case to the GPU.
    pub fn new(stream: &Arc<CudaStream>, packing: &Packing) -> Self {
        let stream = Stream::Cuda(stream.clone());
        let mut lists = Self::default();
        for (slot, list) in packing.lists() {
            match slot {
                Slot::CuSeqlensQ | Slot::CuSeqlensKv => {
                    lists.offsets.push((slot, SequenceOffsets::new(&stream, list).expect("legal offsets")));
                }
                _ => lists.used.push((slot, UsedLengths::new(&stream, list).expect("legal lengths"))),
            }
        }
        lists
    }

    fn add_to<'a>(&'a self, args: Args<'a>) -> Args<'a> {
        let args = self.offsets.iter().fold(args, |args, (slot, offsets)| args.offsets(*slot, offsets));
        self.used.iter().fold(args, |args, (slot, used)| args.used(*slot, used))
    }
}

/// Attention sinks of a case in device memory, guard bands included.
pub enum SinksOnDevice {
    /// In f32.
    F32(CudaSlice<f32>),
    /// In bf16.
    Bf16(CudaSlice<bf16>),
}

impl SinksOnDevice {
    /// Copies them.
    pub fn new(stream: &Arc<CudaStream>, sinks: &SinksImage) -> Self {
        match sinks {
            SinksImage::F32(image) => Self::F32(stream.clone_htod(image.data()).expect("device memory")),
            SinksImage::Bf16(image) => Self::Bf16(stream.clone_htod(image.data()).expect("device memory")),
        }
    }

    /// Writes others of the same type and number into the same memory. Says whether they are.
    fn rewrite(&mut self, stream: &Arc<CudaStream>, sinks: &SinksImage) -> bool {
        match (self, sinks) {
            (Self::F32(slice), SinksImage::F32(image)) => overwritten(stream, image.data(), slice),
            (Self::Bf16(slice), SinksImage::Bf16(image)) => overwritten(stream, image.data(), slice),
            _ => false,
        }
    }

    /// Adds them to the arguments of a run.
    pub fn add_to<'a>(&'a self, args: Args<'a>) -> Args<'a> {
        let layout = |len: usize| Layout::contiguous([len - 2 * GUARD]).expect("a short list");
        match self {
            Self::F32(slice) => args.read(Slot::Sinks, read(slice, layout(slice.len()))),
            Self::Bf16(slice) => args.read(Slot::Sinks, read(slice, layout(slice.len()))),
        }
    }

    /// Whether they are still what they were.
    ///
    /// # Errors
    /// Where they are not.
    pub fn check(&self, stream: &Arc<CudaStream>, sinks: &SinksImage) -> std::result::Result<(), String> {
        match (self, sinks) {
            (Self::F32(slice), SinksImage::F32(image)) => {
                image.check_unchanged(&stream.clone_dtoh(slice).expect("a copy"))
            }
            (Self::Bf16(slice), SinksImage::Bf16(image)) => {
                image.check_unchanged(&stream.clone_dtoh(slice).expect("a copy"))
            }
            _ => Err("sinks of another type".into()),
        }
    }
}

/// Writes a case's numbers into memory that holds those of another, so that a captured graph finds them. Where there is none of
/// that form, or none at all, there is new memory.
fn rewrite<M, I: ?Sized>(
    memory: &mut Option<M>,
    image: Option<&I>,
    write: impl Fn(&mut M, &I) -> bool,
    new: impl Fn(&I) -> M,
) {
    let is_written = match (memory.as_mut(), image) {
        (Some(memory), Some(image)) => write(memory, image),
        _ => false,
    };
    if !is_written {
        *memory = image.map(new);
    }
}

/// Whether memory took numbers: only where there are as many.
fn overwritten<T: Element>(stream: &Arc<CudaStream>, from: &[T], to: &mut CudaSlice<T>) -> bool {
    let fits = from.len() == to.len();
    if fits {
        stream.memcpy_htod(from, to).expect("a copy");
    }
    fits
}

/// Lists of blocks of a case in device memory, guard bands included.
pub struct BlocksOnDevice {
    image: BlocksImage,
    lists: Vec<(Slot, CudaSlice<i32>)>,
}

impl BlocksOnDevice {
    /// Copies them.
    pub fn new(stream: &Arc<CudaStream>, image: &BlocksImage) -> Self {
        let up = |(slot, list): &(Slot, Vec<i32>)| (*slot, stream.clone_htod(list).expect("device memory"));
        Self { image: image.clone(), lists: image.lists().iter().map(up).collect() }
    }

    /// Writes others of the same form into the same memory. Says whether they are.
    fn rewrite(&mut self, stream: &Arc<CudaStream>, image: &BlocksImage) -> bool {
        let form = |image: &BlocksImage| {
            let lists = image.lists().iter().map(|(slot, list)| (*slot, list.len())).collect::<Vec<_>>();
            (image.layouts(), lists)
        };
        let same = form(&self.image) == form(image);
        if same {
            let lists = self.lists.iter_mut().zip(image.lists());
            lists.for_each(|((_, slice), (_, list))| stream.memcpy_htod(list, slice).expect("a copy"));
            self.image = image.clone();
        }
        same
    }

    /// Where the memory of a list begins. `None` where there is no such list.
    pub fn address(&self, stream: &Arc<CudaStream>, slot: Slot) -> Option<u64> {
        let (_, slice) = self.lists.iter().find(|(of, _)| *of == slot)?;
        Some(slice.device_ptr(stream).0 + (GUARD * size_of::<i32>()) as u64)
    }

    /// Adds them to the arguments of a run.
    pub fn add_to<'a>(&'a self, mut args: Args<'a>) -> Args<'a> {
        let (counts, indices, words) = self.image.layouts();
        for (slot, slice) in &self.lists {
            args = match slot {
                Slot::MaskBlockCnt | Slot::FullBlockCnt => args.read(*slot, read(slice, counts)),
                Slot::MaskBits => args.read(*slot, read(slice, words)),
                _ => args.read(*slot, read(slice, indices)),
            };
        }
        args
    }

    /// Whether they are still what they were, guard bands included.
    ///
    /// # Errors
    /// Where they are not.
    pub fn check(&self, stream: &Arc<CudaStream>) -> std::result::Result<(), String> {
        for ((slot, slice), (_, list)) in self.lists.iter().zip(self.image.lists()) {
            if stream.clone_dtoh(slice).expect("a copy") != *list {
                return Err(format!("{slot} was changed"));
            }
        }
        Ok(())
    }
}

/// ALiBi slopes of a case in device memory, guard bands included.
pub struct AlibiOnDevice {
    slopes: CudaSlice<f32>,
    layout: Layout<2>,
    per_batch: bool,
}

impl AlibiOnDevice {
    /// Copies them.
    pub fn new(stream: &Arc<CudaStream>, alibi: &AlibiImage) -> Self {
        let slopes = stream.clone_htod(alibi.image().data()).expect("device memory");
        Self { slopes, layout: alibi.image().layout(), per_batch: alibi.is_per_batch() }
    }

    /// Writes others of the same form into the same memory. Says whether they are.
    fn rewrite(&mut self, stream: &Arc<CudaStream>, alibi: &AlibiImage) -> bool {
        (self.layout, self.per_batch) == (alibi.image().layout(), alibi.is_per_batch())
            && overwritten(stream, alibi.image().data(), &mut self.slopes)
    }

    /// Adds them to the arguments of a run.
    pub fn add_to<'a>(&'a self, args: Args<'a>) -> Args<'a> {
        match self.per_batch {
            true => args.read(Slot::AlibiSlopes, read(&self.slopes, self.layout)),
            false => args.read(Slot::AlibiSlopes, read(&self.slopes, without_batch::<2, 1>(self.layout))),
        }
    }

    /// Whether they are still what they were.
    ///
    /// # Errors
    /// Where they are not.
    pub fn check(&self, stream: &Arc<CudaStream>, alibi: &AlibiImage) -> std::result::Result<(), String> {
        alibi.image().check_unchanged(&stream.clone_dtoh(&self.slopes).expect("a copy"))
    }
}

/// The additive bias of a case in device memory, or its gradient, guard bands included.
pub struct BiasOnDevice {
    memory: BiasMemory,
    layout: Layout<4>,
}

enum BiasMemory {
    F32(CudaSlice<f32>),
    Bf16(CudaSlice<bf16>),
    F16(CudaSlice<f16>),
}

/// Does the same to the memory of every type.
macro_rules! each {
    ($memory:expr, $slice:ident => $what:expr) => {
        match $memory {
            BiasMemory::F32($slice) => $what,
            BiasMemory::Bf16($slice) => $what,
            BiasMemory::F16($slice) => $what,
        }
    };
}

impl BiasOnDevice {
    /// Copies it.
    pub fn new(stream: &Arc<CudaStream>, bias: &BiasImage) -> Self {
        let memory = match bias {
            BiasImage::F32(image) => BiasMemory::F32(stream.clone_htod(image.data()).expect("device memory")),
            BiasImage::Bf16(image) => BiasMemory::Bf16(stream.clone_htod(image.data()).expect("device memory")),
            BiasImage::F16(image) => BiasMemory::F16(stream.clone_htod(image.data()).expect("device memory")),
        };
        Self { memory, layout: bias.layout() }
    }

    /// Writes another of the same form into the same memory. Says whether it is.
    fn rewrite(&mut self, stream: &Arc<CudaStream>, bias: &BiasImage) -> bool {
        let same = self.layout == bias.layout();
        same && match (&mut self.memory, bias) {
            (BiasMemory::F32(slice), BiasImage::F32(image)) => overwritten(stream, image.data(), slice),
            (BiasMemory::Bf16(slice), BiasImage::Bf16(image)) => overwritten(stream, image.data(), slice),
            (BiasMemory::F16(slice), BiasImage::F16(image)) => overwritten(stream, image.data(), slice),
            _ => false,
        }
    }

    /// Adds a bias to the arguments of a run.
    pub fn add_to<'a>(&'a self, args: Args<'a>) -> Args<'a> {
        each!(&self.memory, slice => args.read(Slot::Bias, read(slice, self.layout)))
    }

    /// Adds a gradient to the arguments of a run.
    pub fn add_gradient_to<'a>(&'a mut self, args: Args<'a>) -> Args<'a> {
        each!(&mut self.memory, slice => args.write(Slot::DBias, write(slice, self.layout)))
    }

    /// What is in the memory now, as [`Image::take_output`] does it.
    ///
    /// # Errors
    /// What was overwritten or left unwritten.
    pub fn take(&self, stream: &Arc<CudaStream>, image: &mut BiasImage) -> std::result::Result<(), String> {
        match (&self.memory, image) {
            (BiasMemory::F32(slice), BiasImage::F32(image)) => image.take_output(host(stream, slice)),
            (BiasMemory::Bf16(slice), BiasImage::Bf16(image)) => image.take_output(host(stream, slice)),
            (BiasMemory::F16(slice), BiasImage::F16(image)) => image.take_output(host(stream, slice)),
            _ => Err("a bias of another type".into()),
        }
    }

    /// Whether it is still what it was.
    ///
    /// # Errors
    /// Where it is not.
    pub fn check(&self, stream: &Arc<CudaStream>, bias: &BiasImage) -> std::result::Result<(), String> {
        match (&self.memory, bias) {
            (BiasMemory::F32(slice), BiasImage::F32(image)) => image.check_unchanged(&host(stream, slice)),
            (BiasMemory::Bf16(slice), BiasImage::Bf16(image)) => image.check_unchanged(&host(stream, slice)),
            (BiasMemory::F16(slice), BiasImage::F16(image)) => image.check_unchanged(&host(stream, slice)),
            _ => Err("a bias of another type".into()),
        }
    }
}

/// A copy of what is in device memory.
fn host<T: Element>(stream: &Arc<CudaStream>, slice: &CudaSlice<T>) -> Vec<T> {
    stream.clone_dtoh(slice).expect("a copy")
}

/// The words of the seed and the offset of dropout in device memory.
pub struct StateOnDevice(CudaSlice<i32>);

impl StateOnDevice {
    /// Copies them.
    pub fn new(stream: &Arc<CudaStream>, state: &[i32; 4]) -> Self {
        Self(stream.clone_htod(&state[..]).expect("device memory"))
    }

    /// Writes others into the same memory.
    fn rewrite(&mut self, stream: &Arc<CudaStream>, state: &[i32; 4]) -> bool {
        overwritten(stream, state, &mut self.0)
    }

    /// Adds them to the arguments of a run.
    pub fn add_to<'a>(&'a self, args: Args<'a>) -> Args<'a> {
        let layout = Layout::contiguous([4]).expect("a short list");
        let tensor = TensorRef::cuda(self.0.slice(..), layout).expect("a fitting layout");
        args.read(Slot::DropoutState, tensor)
    }

    /// Whether they are still what they were.
    ///
    /// # Errors
    /// Where they are not.
    pub fn check(&self, stream: &Arc<CudaStream>, state: &[i32; 4]) -> std::result::Result<(), String> {
        let same = stream.clone_dtoh(&self.0).expect("a copy") == state;
        if same { Ok(()) } else { Err("the state of dropout was changed".into()) }
    }
}

/// Memory of what modifies scores, and what is to be in it.
type Rewritten<'a, M, I> = (&'a mut Option<M>, Option<&'a I>);

/// [`rewrite`] of what both passes have alike.
fn rewrite_others(
    (alibi, slopes): Rewritten<'_, AlibiOnDevice, AlibiImage>,
    (blocks, lists): Rewritten<'_, BlocksOnDevice, BlocksImage>,
    (state, words): Rewritten<'_, StateOnDevice, [i32; 4]>,
    stream: &Arc<CudaStream>,
) {
    rewrite(alibi, slopes, |memory, image| memory.rewrite(stream, image), |image| AlibiOnDevice::new(stream, image));
    rewrite(blocks, lists, |memory, image| memory.rewrite(stream, image), |image| BlocksOnDevice::new(stream, image));
    rewrite(state, words, |memory, image| memory.rewrite(stream, image), |image| StateOnDevice::new(stream, image));
}

/// A case's tensors on the GPU, guard bands included.
pub struct OnDevice<T> {
    /// Offsets and used lengths.
    pub lists: Lists,
    /// Queries.
    pub q: CudaSlice<T>,
    /// Keys.
    pub k: CudaSlice<T>,
    /// Values.
    pub v: CudaSlice<T>,
    /// The output.
    pub o: CudaSlice<T>,
    /// The log-sum-exp, where it was asked for.
    pub lse: Option<CudaSlice<f32>>,
    /// The attention sinks, where there are any.
    pub sinks: Option<SinksOnDevice>,
    /// The ALiBi slopes, where there are any.
    pub alibi: Option<AlibiOnDevice>,
    /// The additive bias, where there is one.
    pub bias: Option<BiasOnDevice>,
    /// The maximum logits, where they were asked for.
    pub max_logits: Option<CudaSlice<f32>>,
    /// The lists of blocks, where there are any.
    pub blocks: Option<BlocksOnDevice>,
    /// The words of the seed and the offset of dropout, where there is any.
    pub dropout_state: Option<StateOnDevice>,
}

impl<T: Poison> OnDevice<T> {
    /// Inputs, and outputs of poison.
    pub fn new(stream: &Arc<CudaStream>, prepared: &Prepared<T>) -> Self {
        let outputs = prepared.outputs();
        let up = |image: &Image<T, 4>| stream.clone_htod(image.data()).expect("device memory");
        Self {
            lists: Lists::new(stream, &prepared.case.packing),
            q: up(&prepared.q),
            k: up(&prepared.k),
            v: up(&prepared.v),
            o: up(&outputs.o),
            lse: outputs.lse.map(|lse| stream.clone_htod(lse.data()).expect("device memory")),
            sinks: prepared.sinks.as_ref().map(|sinks| SinksOnDevice::new(stream, sinks)),
            alibi: prepared.alibi.as_ref().map(|alibi| AlibiOnDevice::new(stream, alibi)),
            bias: prepared.bias.as_ref().map(|bias| BiasOnDevice::new(stream, bias)),
            max_logits: outputs.max_logits.map(|logits| stream.clone_htod(logits.data()).expect("device memory")),
            blocks: prepared.blocks.as_ref().map(|blocks| BlocksOnDevice::new(stream, blocks)),
            dropout_state: prepared.dropout_state.as_ref().map(|state| StateOnDevice::new(stream, state)),
        }
    }

    /// Poisons the outputs again.
    pub fn poison(&mut self, stream: &Arc<CudaStream>, prepared: &Prepared<T>) {
        let outputs = prepared.outputs();
        stream.memcpy_htod(outputs.o.data(), &mut self.o).expect("a copy");
        if let (Some(to), Some(from)) = (&mut self.lse, &outputs.lse) {
            stream.memcpy_htod(from.data(), to).expect("a copy");
        }
        if let (Some(to), Some(from)) = (&mut self.max_logits, &outputs.max_logits) {
            stream.memcpy_htod(from.data(), to).expect("a copy");
        }
    }

    /// Writes another case's inputs, of the same sizes, into the same memory. (But for offsets and used lengths.)
    pub fn write_inputs(&mut self, stream: &Arc<CudaStream>, prepared: &Prepared<T>) {
        for (to, from) in [(&mut self.q, &prepared.q), (&mut self.k, &prepared.k), (&mut self.v, &prepared.v)] {
            stream.memcpy_htod(from.data(), to).expect("a copy");
        }
        let sinks = prepared.sinks.as_ref();
        rewrite(&mut self.sinks, sinks, |m, i| m.rewrite(stream, i), |i| SinksOnDevice::new(stream, i));
        rewrite_others(
            (&mut self.alibi, prepared.alibi.as_ref()),
            (&mut self.blocks, prepared.blocks.as_ref()),
            (&mut self.dropout_state, prepared.dropout_state.as_ref()),
            stream,
        );
        rewrite(&mut self.bias, prepared.bias.as_ref(), |m, i| m.rewrite(stream, i), |i| BiasOnDevice::new(stream, i));
    }

    /// The arguments of a run.
    pub fn args(&mut self, prepared: &Prepared<T>) -> Args<'_> {
        let o_layout = prepared.case.placement.layout(prepared.problem.o_shape(), false);
        let lse_layout = prepared.case.placement.lse_layout(prepared.problem.lse_shape());
        let [q, kv] = [Slot::CuSeqlensQ, Slot::CuSeqlensKv].map(|slot| prepared.problem.wants(slot));
        let mut args = self.lists.add_to(Args::new());
        if let Some(sinks) = &self.sinks {
            args = sinks.add_to(args);
        }
        if let Some(alibi) = &self.alibi {
            args = alibi.add_to(args);
        }
        if let Some(bias) = &self.bias {
            args = bias.add_to(args);
        }
        if let Some(max_logits) = &mut self.max_logits {
            let layout = Layout::contiguous([prepared.case.dims.heads_q]).expect("a short list");
            args = args.write(Slot::MaxLogits, write(max_logits, layout));
        }
        if let Some(blocks) = &self.blocks {
            args = blocks.add_to(args);
        }
        if let Some(state) = &self.dropout_state {
            args = state.add_to(args);
        }
        args = given_read(args, Slot::Q, &self.q, prepared.q.layout(), q);
        args = given_read(args, Slot::K, &self.k, prepared.k.layout(), kv);
        args = given_read(args, Slot::V, &self.v, prepared.v.layout(), kv);
        args = given_write(args, Slot::O, &mut self.o, o_layout, q);
        match &mut self.lse {
            Some(lse) => given_write_numbers(args, Slot::Lse, lse, lse_layout, q),
            None => args,
        }
    }

    /// Runs a plan once on outputs of poison, waits, and takes the outputs back if the guard bands are whole.
    ///
    /// # Errors
    /// What was refused, failed, or was overwritten.
    pub fn run(
        &mut self,
        stream: &Arc<CudaStream>,
        workspace: &mut Workspace<'_>,
        plan: &ForwardPlan,
        prepared: &Prepared<T>,
    ) -> std::result::Result<Outputs<T>, String> {
        self.poison(stream, prepared);
        plan.run(&Stream::Cuda(stream.clone()), workspace, self.args(prepared)).map_err(|error| error.to_string())?;
        self.outputs(stream, prepared)
    }

    /// Waits, and takes the outputs back if the guard bands are whole. An error of the GPU itself ends the test: nothing
    /// after it can be trusted.
    ///
    /// # Errors
    /// What was overwritten or left unwritten.
    pub fn outputs(&self, stream: &Arc<CudaStream>, prepared: &Prepared<T>) -> std::result::Result<Outputs<T>, String> {
        if let Err(error) = stream.synchronize() {
            panic!("the GPU failed on {} {}: {error}", T::DTYPE, prepared.case);
        }
        let mut outputs = prepared.outputs();
        outputs.o.take_output(stream.clone_dtoh(&self.o).expect("a copy")).map_err(|why| format!("o: {why}"))?;
        if let (Some(image), Some(lse)) = (&mut outputs.lse, &self.lse) {
            image.take_output(stream.clone_dtoh(lse).expect("a copy")).map_err(|why| format!("lse: {why}"))?;
        }
        if let (Some(image), Some(logits)) = (&mut outputs.max_logits, &self.max_logits) {
            let data = stream.clone_dtoh(logits).expect("a copy");
            image.take_output(data).map_err(|why| format!("max_logits: {why}"))?;
        }
        Ok(outputs)
    }

    /// Whether nothing was written at all: what must hold after a refusal.
    pub fn untouched(&self, stream: &Arc<CudaStream>, prepared: &Prepared<T>) -> bool {
        let o = stream.clone_dtoh(&self.o).expect("a copy");
        let lse = self.lse.as_ref().map(|lse| stream.clone_dtoh(lse).expect("a copy"));
        let max_logits = self.max_logits.as_ref().map(|logits| stream.clone_dtoh(logits).expect("a copy"));
        o.iter().all(|x| x.is_poison())
            && max_logits.is_none_or(|logits| logits.iter().all(|x| x.is_poison()))
            && lse.is_none_or(|lse| lse.iter().all(|x| x.is_poison()))
            && self.check_inputs(stream, prepared).is_ok()
    }

    /// Whether the inputs are still what they were, guard bands included.
    ///
    /// # Errors
    /// Where they are not.
    pub fn check_inputs(&self, stream: &Arc<CudaStream>, prepared: &Prepared<T>) -> std::result::Result<(), String> {
        for (slice, image) in [(&self.q, &prepared.q), (&self.k, &prepared.k), (&self.v, &prepared.v)] {
            image.check_unchanged(&stream.clone_dtoh(slice).expect("a copy"))?;
        }
        self.blocks.as_ref().map_or(Ok(()), |blocks| blocks.check(stream))?;
        if let Some((state, words)) = self.dropout_state.as_ref().zip(prepared.dropout_state.as_ref()) {
            state.check(stream, words)?;
        }
        if let Some((bias, image)) = self.bias.as_ref().zip(prepared.bias.as_ref()) {
            bias.check(stream, image)?;
        }
        match self.alibi.as_ref().zip(prepared.alibi.as_ref()) {
            Some((slopes, image)) => slopes.check(stream, image),
            None => Ok(()),
        }
    }
}

/// Whether two outputs are the same, bit for bit.
pub fn same_bits<T: Poison>(a: &Outputs<T>, b: &Outputs<T>) -> bool {
    let bits = |outputs: &Outputs<T>| {
        let o: Vec<u32> = outputs.o.data().iter().map(|x| x.bits()).collect();
        let lse: Option<Vec<u32>> = outputs.lse.as_ref().map(|lse| lse.data().iter().map(|x| x.bits()).collect());
        let max_logits: Option<Vec<u32>> =
            outputs.max_logits.as_ref().map(|logits| logits.data().iter().map(|x| x.bits()).collect());
        (o, lse, max_logits)
    };
    bits(a) == bits(b)
}
