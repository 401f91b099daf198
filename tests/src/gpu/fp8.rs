//! Problems with e4m3 operands in device memory.

use std::sync::Arc;

use hopper_attention::cudarc::driver::{CudaSlice, CudaStream};
use hopper_attention::reference::Tensor;
use hopper_attention::{
    DType, E4M3, Element, ForwardPlan, ForwardProblem, Fp8ForwardArgs, Fp8Output, Stream, Workspace,
};

use super::{read, write};
use crate::data::GUARD;
use crate::fp8::{Operands, Output, dense};

/// A value that no kernel writes here, before and after what it may write.
const BAND: f32 = -117.0;

/// Operands and factors on the GPU, with bands of NaN around them.
pub struct OnDevice {
    stored: [CudaSlice<E4M3>; 3],
    descale: [CudaSlice<f32>; 3],
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
        }
    }

    /// Runs a plan once on outputs of NaN, waits, and takes the outputs if nothing was written beside them.
    ///
    /// # Errors
    /// What was refused, failed or was overwritten.
    pub fn run<O: Fp8Output>(
        &self,
        stream: &Arc<CudaStream>,
        workspace: &mut Workspace,
        plan: &ForwardPlan,
        scale_o: Option<f32>,
    ) -> Result<Written<O>, String> {
        let problem = plan.problem();
        let poisoned = |len: usize| vec![f32::NAN; len];
        let (o_layout, lse_layout) = (dense(problem.o_shape()), dense(problem.lse_shape()));
        let poison = vec![O::from_f32(f32::NAN); o_layout.span()];
        let mut o = banded(stream, &poison, O::from_f32(BAND));
        let mut lse = banded(stream, &poisoned(lse_layout.span()), BAND);
        let mut amax = problem.wants_amax().then(|| banded(stream, &poisoned(1), BAND));
        let scale_o = scale_o.map(|scale| banded(stream, &[scale], f32::NAN));
        let [q, k, v] = &self.stored;
        let [descale_q, descale_k, descale_v] = &self.descale;
        let args = Fp8ForwardArgs {
            q: read(q, dense(problem.q_shape())),
            k: read(k, dense(problem.k_shape())),
            v: read(v, dense(problem.v_shape())),
            descale_q: read(descale_q, dense(problem.descale_q_shape())),
            descale_k: read(descale_k, dense(problem.descale_k_shape())),
            descale_v: read(descale_v, dense(problem.descale_v_shape())),
            o: write(&mut o, o_layout),
            lse: Some(write(&mut lse, lse_layout)),
            scale_o: scale_o.as_ref().map(|scale_o| read(scale_o, dense([1]))),
            amax: amax.as_mut().map(|amax| write(amax, dense([1]))),
        };
        plan.run_fp8(&Stream::Cuda(stream.clone()), workspace, args).map_err(|error| error.to_string())?;
        if let Err(error) = stream.synchronize() {
            panic!("the GPU failed on {plan}: {error}");
        }
        Ok(Written {
            o: taken(stream, "o", &o)?,
            lse: taken(stream, "lse", &lse)?,
            amax: amax.map(|amax| taken(stream, "amax", &amax)).transpose()?.map(|amax| amax[0]),
        })
    }
}

impl<O: Fp8Output> Written<O> {
    /// As the law takes it.
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
