//! Backward cases in device memory as the C ABI takes them.

use std::sync::Arc;

use hopper_attention::DType;
use hopper_attention::cudarc::driver::{CudaSlice, CudaStream, DevicePtr};

use super::{ByAddress, blocks_memory};
use crate::backward::Prepared;
use crate::c::{BackwardMemory, tensor};
use crate::data::{GUARD, Poison};

pub use hopper_attention_verify::gpu::backward::{OnDevice, same_bits, same_sums};

impl<T: Poison> ByAddress<Prepared<T>> for OnDevice<T> {
    type Memory = BackwardMemory;

    fn c_memory(&self, stream: &Arc<CudaStream>, prepared: &Prepared<T>) -> BackwardMemory {
        fn inner<E: Poison>(slice: &CudaSlice<E>, stream: &Arc<CudaStream>) -> u64 {
            slice.device_ptr(stream).0 + (GUARD * size_of::<E>()) as u64
        }
        let ordinal = i32::try_from(stream.context().ordinal()).expect("few GPUs");
        let of = |slice, layout| tensor(inner::<T>(slice, stream), T::DTYPE, ordinal, layout);
        let rows = |slice, layout| tensor(inner::<f32>(slice, stream), DType::F32, ordinal, layout);
        let output = |slice, shape| of(slice, prepared.case.placement.layout(shape, false));
        let [q, k, v, o, d_o] = &self.inputs;
        let [d_q, d_k, d_v] = &self.outputs;
        BackwardMemory {
            q: of(q, prepared.q.layout()),
            k: of(k, prepared.k.layout()),
            v: of(v, prepared.v.layout()),
            o: of(o, prepared.o.layout()),
            lse: rows(&self.lse, prepared.lse.layout()),
            d_o: of(d_o, prepared.d_o.layout()),
            d_lse: self.d_lse.as_ref().zip(prepared.d_lse.as_ref()).map(|(slice, image)| rows(slice, image.layout())),
            d_q: output(d_q, prepared.problem.d_q_shape()),
            d_k: output(d_k, prepared.problem.d_k_shape()),
            d_v: output(d_v, prepared.problem.d_v_shape()),
            sinks: None,
            alibi_slopes: None,
            bias: None,
            blocks: blocks_memory(stream, prepared.blocks.as_ref(), self.blocks.as_ref()),
            dropout_state: None,
            workspace: 0,
            workspace_bytes: 0,
        }
    }
}
