//! Problems with e4m3 operands in device memory.

use std::sync::Arc;

use hopper_attention::cudarc::driver::{CudaSlice, CudaStream};
use hopper_attention::reference::{Expected, Tensor};
use hopper_attention::{
    Args, DType, E4M3, Element, ForwardArgs, ForwardPlan, ForwardProblem, OutputOf, Slot, Stream, TensorRef, Workspace,
};

use super::{
    BlocksOnDevice, Lists, SinksOnDevice, given_read, given_read_numbers, given_write, given_write_numbers, read, write,
};
use crate::data::GUARD;
use crate::fp8::{Operands, Output, dense, packed, shapes};
use crate::ready::Verdict;

/// A value that no kernel writes here, before and after what it may write.
const BAND: f32 = -117.0;

/// Operands and factors on the GPU, with bands of NaN around them.
pub struct OnDevice {
    stored: [CudaSlice<E4M3>; 3],
    descale: [CudaSlice<f32>; 3],
    lists: Lists,
    sinks: Option<SinksOnDevice>,
    blocks: Option<BlocksOnDevice>,
}

/// What a run wrote.
pub struct Written<O> {
    /// O, without gaps.
    pub o: Vec<O>,
    /// The log-sum-exp.
    pub lse: Vec<f32>,
    /// The largest magnitude, where it was asked for.
    pub amax: Option<f32>,
}

fn banded<T: Element>(stream: &Arc<CudaStream>, values: &[T], band: T) -> CudaSlice<T> {
    let mut all = vec![band; GUARD];
    all.extend_from_slice(values);
    all.extend(std::iter::repeat_n(band, GUARD));
    stream.clone_htod(&all).expect("a copy")
}

/// What lies between the bands, if they are whole.
fn taken<T: Element>(stream: &Arc<CudaStream>, what: &str, slice: &CudaSlice<T>) -> Result<Vec<T>, String> {
    let all = stream.clone_dtoh(slice).expect("a copy");
    let (before, rest) = all.split_at(GUARD);
    let (values, after) = rest.split_at(rest.len() - GUARD);
    let whole = |band: &[T]| band.iter().all(|x| x.to_f32() == T::from_f32(BAND).to_f32());
    if whole(before) && whole(after) { Ok(values.to_vec()) } else { Err(format!("{what}: written out of bounds")) }
}

impl OnDevice {
    /// Copies them.
    pub fn new(stream: &Arc<CudaStream>, operands: &Operands) -> Self {
        let nan = E4M3::from_bits(0x7f);
        Self {
            stored: operands.stored().each_ref().map(|values| banded(stream, values, nan)),
            descale: operands.descale().each_ref().map(|values| banded(stream, values, f32::NAN)),
            lists: Lists::new(stream, operands.packing()),
            sinks: operands.sinks().map(|sinks| SinksOnDevice::new(stream, sinks)),
            blocks: operands.blocks().map(|blocks| BlocksOnDevice::new(stream, blocks)),
        }
    }

    /// Runs a plan once on outputs of NaN, waits, and takes the outputs if nothing was written beside them.
    ///
    /// # Errors
    /// What was refused, failed or was overwritten.
    pub fn run<O: OutputOf<E4M3>>(
        &self,
        stream: &Arc<CudaStream>,
        workspace: &mut Workspace<'_>,
        plan: &ForwardPlan,
        scale_o: Option<f32>,
    ) -> Result<Written<O>, String> {
        let mut outputs = Outputs::new(stream, plan.problem(), scale_o);
        let args = self.all_args(plan.problem(), &mut outputs);
        plan.run(&Stream::Cuda(stream.clone()), workspace, args).map_err(|error| error.to_string())?;
        if let Err(error) = stream.synchronize() {
            panic!("the GPU failed on {plan}: {error}");
        }
        outputs.written(stream)
    }

    /// Runs a plan once, as [`run`](Self::run), and judges O and the log-sum-exp.
    pub fn judged<O: OutputOf<E4M3>>(
        &self,
        stream: &Arc<CudaStream>,
        workspace: &mut Workspace<'_>,
        plan: &ForwardPlan,
        expected: &Expected,
    ) -> Verdict {
        self.run::<O>(stream, workspace, plan, None).map_or_else(Verdict::failed, |written| {
            let (o, lse) = written.output(plan.problem());
            Verdict::from(&expected.check(&o, Some(&lse)).expect("outputs of the plan's problem"))
        })
    }

    /// The arguments of a run, but for offsets and used lengths.
    pub fn args<'a, O: OutputOf<E4M3>>(&'a self, problem: &ForwardProblem, outputs: &'a mut Outputs<O>) -> Args<'a> {
        let slots = [(Slot::Q, Slot::DescaleQ), (Slot::K, Slot::DescaleK), (Slot::V, Slot::DescaleV)];
        let mut args = Args::new();
        if let Some(sinks) = &self.sinks {
            args = sinks.add_to(args);
        }
        if let Some(blocks) = &self.blocks {
            args = blocks.add_to(args);
        }
        for (i, ((slot, of_factors), packed)) in slots.into_iter().zip(packed(problem)).enumerate() {
            let (shape, factors) = shapes(problem)[i];
            args = given_read(args, slot, &self.stored[i], dense(shape), packed.rows);
            args = given_read_numbers(args, of_factors, &self.descale[i], dense(factors), packed.blocks);
        }
        let is_packed = problem.is_packed_q();
        args = given_write(args, Slot::O, &mut outputs.o, dense(problem.o_shape()), is_packed);
        if problem.wants(Slot::Lse) {
            args = given_write_numbers(args, Slot::Lse, &mut outputs.lse, dense(problem.lse_shape()), is_packed);
        }
        if let Some(scale_o) = &outputs.scale_o {
            args = args.read(Slot::ScaleO, read(scale_o, dense([1])));
        }
        if let Some(amax) = &mut outputs.amax {
            args = args.write(Slot::Amax, write(amax, dense([1])));
        }
        args
    }

    /// The arguments of a run.
    pub fn all_args<'a, O: OutputOf<E4M3>>(
        &'a self,
        problem: &ForwardProblem,
        outputs: &'a mut Outputs<O>,
    ) -> Args<'a> {
        self.lists.add_to(self.args(problem, outputs))
    }

    /// The operands and their factors as a run reads them.
    pub fn inputs(&self, problem: &ForwardProblem) -> Inputs<'_> {
        let [q, k, v] = &self.stored;
        let [descale_q, descale_k, descale_v] = &self.descale;
        Inputs {
            stored: [
                read(q, dense(problem.q_shape())),
                read(k, dense(problem.k_shape())),
                read(v, dense(problem.v_shape())),
            ],
            descale: [
                read(descale_q, dense(problem.descale_q_shape())),
                read(descale_k, dense(problem.descale_k_shape())),
                read(descale_v, dense(problem.descale_v_shape())),
            ],
        }
    }

    /// Writes other operands of the same sizes into the same memory.
    pub fn write(&mut self, stream: &Arc<CudaStream>, operands: &Operands) {
        let other = Self::new(stream, operands);
        for (to, from) in self.stored.iter_mut().zip(&other.stored) {
            stream.memcpy_dtod(from, to).expect("a copy");
        }
        for (to, from) in self.descale.iter_mut().zip(&other.descale) {
            stream.memcpy_dtod(from, to).expect("a copy");
        }
    }
}

/// What a run reads: q, k and v, and their factors.
pub struct Inputs<'a> {
    /// Operands.
    pub stored: [TensorRef<'a, E4M3, 4>; 3],
    /// Factors.
    pub descale: [TensorRef<'a, f32, 3>; 3],
}

/// Memory for what runs write, with bands around it.
pub struct Outputs<O> {
    problem: ForwardProblem,
    o: CudaSlice<O>,
    lse: CudaSlice<f32>,
    amax: Option<CudaSlice<f32>>,
    scale_o: Option<CudaSlice<f32>>,
}

impl<O: OutputOf<E4M3>> Outputs<O> {
    /// Outputs of NaN.
    pub fn new(stream: &Arc<CudaStream>, problem: &ForwardProblem, scale_o: Option<f32>) -> Self {
        let poisoned = |len: usize| vec![f32::NAN; len];
        let poison = vec![O::from_f32(f32::NAN); dense(problem.o_shape()).span()];
        Self {
            problem: problem.clone(),
            o: banded(stream, &poison, O::from_f32(BAND)),
            lse: banded(stream, &poisoned(dense(problem.lse_shape()).span()), BAND),
            amax: problem.wants_amax().then(|| banded(stream, &poisoned(1), BAND)),
            scale_o: scale_o.map(|scale| banded(stream, &[scale], f32::NAN)),
        }
    }

    /// Another value everywhere in O.
    pub fn mark(&mut self, stream: &Arc<CudaStream>, value: f32) {
        let marked = vec![O::from_f32(value); self.o.len() - 2 * GUARD];
        self.o = banded(stream, &marked, O::from_f32(BAND));
    }

    /// NaN again.
    pub fn poison(&mut self, stream: &Arc<CudaStream>) {
        let fresh = Self::new(stream, &self.problem, None);
        stream.memcpy_dtod(&fresh.o, &mut self.o).expect("a copy");
        stream.memcpy_dtod(&fresh.lse, &mut self.lse).expect("a copy");
        if let (Some(to), Some(from)) = (&mut self.amax, &fresh.amax) {
            stream.memcpy_dtod(from, to).expect("a copy");
        }
    }

    /// The arguments of a run.
    pub fn args<'a>(&'a mut self, Inputs { stored, descale }: Inputs<'a>) -> ForwardArgs<'a> {
        let ([q, k, v], [descale_q, descale_k, descale_v]) = (stored, descale);
        let o = write(&mut self.o, dense(self.problem.o_shape()));
        let mut args = ForwardArgs::new(q, k, v, o).descale(descale_q, descale_k, descale_v);
        args = args.lse(write(&mut self.lse, dense(self.problem.lse_shape())));
        if let Some(scale_o) = &self.scale_o {
            args = args.scale_o(read(scale_o, dense([1])));
        }
        if let Some(amax) = &mut self.amax {
            args = args.amax(write(amax, dense([1])));
        }
        args
    }

    /// Whether nothing was written: what must hold after a capture.
    pub fn untouched(&self, stream: &Arc<CudaStream>) -> bool {
        let is_nan = |written: Written<O>| {
            written.o.iter().all(|o| o.to_f32().is_nan()) && written.lse.iter().all(|x| x.is_nan())
        };
        self.written(stream).is_ok_and(is_nan)
    }

    /// What was written, after what is enqueued on the stream.
    ///
    /// # Errors
    /// What was written beside it.
    pub fn written(&self, stream: &Arc<CudaStream>) -> Result<Written<O>, String> {
        Ok(Written {
            o: taken(stream, "o", &self.o)?,
            lse: taken(stream, "lse", &self.lse)?,
            amax: self.amax.as_ref().map(|amax| taken(stream, "amax", amax)).transpose()?.map(|amax| amax[0]),
        })
    }
}

impl<O: OutputOf<E4M3>> Written<O> {
    /// Whether two runs wrote the same bits.
    pub fn same_bits(&self, other: &Self) -> bool {
        let bits = |written: &Self| -> (Vec<u32>, Vec<u32>, Option<u32>) {
            // As f32, which is exact.
            (
                written.o.iter().map(|o| o.to_f32().to_bits()).collect(),
                written.lse.iter().map(|lse| lse.to_bits()).collect(),
                written.amax.map(f32::to_bits),
            )
        };
        bits(self) == bits(other)
    }

    /// As the tolerance takes it.
    pub fn output(&self, problem: &ForwardProblem) -> Output {
        let o = Tensor::from_strided(&self.o, &dense(problem.o_shape()));
        (o, self.lse.iter().copied().map(f64::from).collect())
    }
}

/// Whether e4m3 kernels take a head dim.
pub fn takes(problem: &ForwardProblem) -> bool {
    let dims = problem.dims();
    let step = 16 / DType::E4M3.bytes();
    dims.head_dim_qk.is_multiple_of(step) && dims.head_dim_vo.is_multiple_of(step)
}
