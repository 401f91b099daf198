//! Backward cases in device memory.

use std::sync::Arc;

use hopper_attention::cudarc::driver::{CudaSlice, CudaStream};
use hopper_attention::{Args, BackwardPlan, Layout, Slot, Stream, Workspace};

use super::{
    AlibiOnDevice, BiasOnDevice, BlocksOnDevice, Lists, SinksOnDevice, StateOnDevice, given_read, given_read_numbers,
    given_write, rewrite_others, write,
};
use crate::backward::{Outputs, Prepared};
use crate::bias::BiasImage;
use crate::data::{Image, Poison};

/// A case's tensors on the GPU, guard bands included.
pub struct OnDevice<T> {
    /// Offsets and used lengths.
    pub lists: Lists,
    /// q, k, v, o, d_o.
    pub inputs: [CudaSlice<T>; 5],
    /// The log-sum-exp.
    pub lse: CudaSlice<f32>,
    /// Its gradient, where there is one.
    pub d_lse: Option<CudaSlice<f32>>,
    /// d_q, d_k, d_v.
    pub outputs: [CudaSlice<T>; 3],
    /// The attention sinks and their gradient, where there are any.
    pub sinks: Option<(SinksOnDevice, CudaSlice<f32>)>,
    /// The additive bias and its gradient, where there is one.
    pub bias: Option<(BiasOnDevice, BiasOnDevice)>,
    /// The ALiBi slopes, where there are any.
    pub alibi: Option<AlibiOnDevice>,
    /// The lists of blocks, where there are any.
    pub blocks: Option<BlocksOnDevice>,
    /// The words of the seed and the offset of dropout, where there is any.
    pub dropout_state: Option<StateOnDevice>,
}

fn inputs<T>(prepared: &Prepared<T>) -> [&Image<T, 4>; 5] {
    [&prepared.q, &prepared.k, &prepared.v, &prepared.o, &prepared.d_o]
}

fn up<T: Poison, const R: usize>(stream: &Arc<CudaStream>, image: &Image<T, R>) -> CudaSlice<T> {
    stream.clone_htod(image.data()).expect("device memory")
}

impl<T: Poison> OnDevice<T> {
    /// Inputs, and outputs of poison.
    pub fn new(stream: &Arc<CudaStream>, prepared: &Prepared<T>) -> Self {
        let Outputs { d_q, d_k, d_v, d_sinks, d_bias } = prepared.outputs();
        Self {
            lists: Lists::new(stream, &prepared.case.packing),
            inputs: inputs(prepared).map(|image| up(stream, image)),
            lse: up(stream, &prepared.lse),
            d_lse: prepared.d_lse.as_ref().map(|d_lse| up(stream, d_lse)),
            outputs: [&d_q, &d_k, &d_v].map(|image| up(stream, image)),
            blocks: prepared.blocks.as_ref().map(|blocks| BlocksOnDevice::new(stream, blocks)),
            dropout_state: prepared.dropout_state.as_ref().map(|state| StateOnDevice::new(stream, state)),
            sinks: prepared
                .sinks
                .as_ref()
                .zip(d_sinks)
                .map(|(sinks, d_sinks)| (SinksOnDevice::new(stream, sinks), up(stream, &d_sinks))),
            bias: prepared
                .bias
                .as_ref()
                .zip(d_bias)
                .map(|(bias, d_bias)| (BiasOnDevice::new(stream, bias), BiasOnDevice::new(stream, &d_bias))),
            alibi: prepared.alibi.as_ref().map(|alibi| AlibiOnDevice::new(stream, alibi)),
        }
    }

    /// Poisons the outputs again.
    pub fn poison(&mut self, stream: &Arc<CudaStream>, prepared: &Prepared<T>) {
        let Outputs { d_q, d_k, d_v, d_sinks, d_bias } = prepared.outputs();
        for (to, from) in self.outputs.iter_mut().zip([d_q, d_k, d_v]) {
            stream.memcpy_htod(from.data(), to).expect("a copy");
        }
        if let (Some((_, to)), Some(from)) = (&mut self.sinks, &d_sinks) {
            stream.memcpy_htod(from.data(), to).expect("a copy");
        }
        if let (Some((_, to)), Some(from)) = (&mut self.bias, &d_bias)
            && !to.rewrite(stream, from)
        {
            *to = BiasOnDevice::new(stream, from);
        }
    }

    /// Writes another case's inputs, of the same sizes, into the same memory. (But for offsets and used lengths.)
    pub fn write_inputs(&mut self, stream: &Arc<CudaStream>, prepared: &Prepared<T>) {
        for (to, from) in self.inputs.iter_mut().zip(inputs(prepared)) {
            stream.memcpy_htod(from.data(), to).expect("a copy");
        }
        rewrite_others(
            (&mut self.alibi, prepared.alibi.as_ref()),
            (&mut self.blocks, prepared.blocks.as_ref()),
            (&mut self.dropout_state, prepared.dropout_state.as_ref()),
            stream,
        );
        if let (Some((to, _)), Some(from)) = (&mut self.sinks, &prepared.sinks)
            && !to.rewrite(stream, from)
        {
            *to = SinksOnDevice::new(stream, from);
        }
        if let (Some((to, _)), Some(from)) = (&mut self.bias, &prepared.bias)
            && !to.rewrite(stream, from)
        {
            *to = BiasOnDevice::new(stream, from);
        }
        stream.memcpy_htod(prepared.lse.data(), &mut self.lse).expect("a copy");
        if let (Some(to), Some(from)) = (&mut self.d_lse, &prepared.d_lse) {
            stream.memcpy_htod(from.data(), to).expect("a copy");
        }
    }

    /// The arguments of a run.
    pub fn args(&mut self, prepared: &Prepared<T>) -> Args<'_> {
        let output = |shape| prepared.case.placement.layout(shape, false);
        let problem = &prepared.problem;
        let [packed_q, packed_kv] = [Slot::CuSeqlensQ, Slot::CuSeqlensKv].map(|slot| problem.forward().wants(slot));
        let slots = [Slot::Q, Slot::K, Slot::V, Slot::O, Slot::DO];
        let mut args = self.lists.add_to(Args::new());
        if let Some(alibi) = &self.alibi {
            args = alibi.add_to(args);
        }
        if let Some(blocks) = &self.blocks {
            args = blocks.add_to(args);
        }
        if let Some(state) = &self.dropout_state {
            args = state.add_to(args);
        }
        for ((slice, image), slot) in self.inputs.iter().zip(inputs(prepared)).zip(slots) {
            let packed = if matches!(slot, Slot::K | Slot::V) { packed_kv } else { packed_q };
            args = given_read(args, slot, slice, image.layout(), packed);
        }
        args = given_read_numbers(args, Slot::Lse, &self.lse, prepared.lse.layout(), packed_q);
        if let Some((slice, image)) = self.d_lse.as_ref().zip(prepared.d_lse.as_ref()) {
            args = given_read_numbers(args, Slot::DLse, slice, image.layout(), packed_q);
        }
        let outputs = [
            (Slot::DQ, problem.d_q_shape(), packed_q),
            (Slot::DK, problem.d_k_shape(), packed_kv),
            (Slot::DV, problem.d_v_shape(), packed_kv),
        ];
        for (slice, (slot, shape, packed)) in self.outputs.iter_mut().zip(outputs) {
            args = given_write(args, slot, slice, output(shape), packed);
        }
        if let Some((sinks, d_sinks)) = &mut self.sinks {
            let layout = Layout::contiguous([problem.dims().heads_q]).expect("a short list");
            args = sinks.add_to(args).write(Slot::DSinks, write(d_sinks, layout));
        }
        if let Some((bias, d_bias)) = &mut self.bias {
            args = d_bias.add_gradient_to(bias.add_to(args));
        }
        args
    }

    /// Runs a plan once on outputs of poison, waits, and takes the outputs back if the guard bands are whole.
    ///
    /// # Errors
    /// What was refused, failed, or was overwritten.
    pub fn run(
        &mut self,
        stream: &Arc<CudaStream>,
        workspace: &mut Workspace<'_>,
        plan: &BackwardPlan,
        prepared: &Prepared<T>,
    ) -> Result<Outputs<T>, String> {
        self.poison(stream, prepared);
        plan.run(&Stream::Cuda(stream.clone()), workspace, self.args(prepared)).map_err(|error| error.to_string())?;
        self.outputs(stream, prepared)
    }

    /// Waits, and takes the outputs back if the guard bands are whole. An error of the GPU itself ends the test: nothing
    /// after it can be trusted.
    ///
    /// # Errors
    /// What was overwritten or left unwritten.
    pub fn outputs(&self, stream: &Arc<CudaStream>, prepared: &Prepared<T>) -> Result<Outputs<T>, String> {
        if let Err(error) = stream.synchronize() {
            panic!("the GPU failed on {} {}: {error}", T::DTYPE, prepared.case);
        }
        let mut outputs = prepared.outputs();
        let images = [("d_q", &mut outputs.d_q), ("d_k", &mut outputs.d_k), ("d_v", &mut outputs.d_v)];
        for ((name, image), slice) in images.into_iter().zip(&self.outputs) {
            let data = stream.clone_dtoh(slice).expect("a copy");
            image.take_output(data).map_err(|why| format!("{name}: {why}"))?;
        }
        if let (Some(image), Some((_, slice))) = (&mut outputs.d_sinks, &self.sinks) {
            let data = stream.clone_dtoh(slice).expect("a copy");
            image.take_output(data).map_err(|why| format!("d_sinks: {why}"))?;
        }
        if let (Some(image), Some((_, d_bias))) = (&mut outputs.d_bias, &self.bias) {
            d_bias.take(stream, image).map_err(|why| format!("d_bias: {why}"))?;
        }
        Ok(outputs)
    }

    /// Whether nothing was written at all: what must hold after a refusal and during a capture.
    pub fn untouched(&self, stream: &Arc<CudaStream>, prepared: &Prepared<T>) -> bool {
        let poison = |slice| stream.clone_dtoh::<T, _>(slice).expect("a copy").iter().all(|x| x.is_poison());
        self.outputs.iter().all(poison) && self.check_inputs(stream, prepared).is_ok()
    }

    /// Whether the inputs are still what they were, guard bands included.
    ///
    /// # Errors
    /// Where they are not.
    pub fn check_inputs(&self, stream: &Arc<CudaStream>, prepared: &Prepared<T>) -> Result<(), String> {
        for (slice, image) in self.inputs.iter().zip(inputs(prepared)) {
            image.check_unchanged(&stream.clone_dtoh(slice).expect("a copy"))?;
        }
        prepared.lse.check_unchanged(&stream.clone_dtoh(&self.lse).expect("a copy"))?;
        if let Some(((slice, _), image)) = self.sinks.as_ref().zip(prepared.sinks.as_ref()) {
            slice.check(stream, image)?;
        }
        if let Some((slopes, image)) = self.alibi.as_ref().zip(prepared.alibi.as_ref()) {
            slopes.check(stream, image)?;
        }
        if let Some(((bias, _), image)) = self.bias.as_ref().zip(prepared.bias.as_ref()) {
            bias.check(stream, image)?;
        }
        self.blocks.as_ref().map_or(Ok(()), |blocks| blocks.check(stream))?;
        if let Some((state, words)) = self.dropout_state.as_ref().zip(prepared.dropout_state.as_ref()) {
            state.check(stream, words)?;
        }
        match (&self.d_lse, &prepared.d_lse) {
            (Some(slice), Some(image)) => image.check_unchanged(&stream.clone_dtoh(slice).expect("a copy")),
            _ => Ok(()),
        }
    }
}

/// Whether two runs gave the same bits in the gradients of the sinks and of the bias, which repeat in any case.
pub fn same_sums<T>(a: &Outputs<T>, b: &Outputs<T>) -> bool {
    let bits = |outputs: &Outputs<T>| {
        let sinks = outputs.d_sinks.as_ref().map(|image| image.data().iter().map(|x| x.to_bits()).collect::<Vec<_>>());
        let bias = outputs.d_bias.as_ref().map(BiasImage::values);
        (sinks, bias.map(|values| values.into_iter().map(f64::to_bits).collect::<Vec<_>>()))
    };
    bits(a) == bits(b)
}

/// Whether two runs gave the same bits: of dK and dV, and of dQ.
pub fn same_bits<T: Poison>(a: &Outputs<T>, b: &Outputs<T>) -> [bool; 2] {
    let same =
        |a: &Image<T, 4>, b: &Image<T, 4>| a.data().iter().map(|x| x.bits()).eq(b.data().iter().map(|x| x.bits()));
    [same(&a.d_k, &b.d_k) && same(&a.d_v, &b.d_v), same(&a.d_q, &b.d_q)]
}
