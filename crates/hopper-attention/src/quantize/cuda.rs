//! Quantising cudarc's views. As in the forward a kernel outlives the borrows that it was given, and the order of the lines
//! is what makes that sound: the crate's documentation has the argument.

use std::sync::Arc;

use cudarc::driver::{CudaStream, CudaView, CudaViewMut, DevicePtr, DevicePtrMut, SyncOnDrop};

use super::{Descale, NAMES, Name, Quantize, QuantizeArgs, QuantizePlan};
use crate::raw::{Place, RawQuantize, RawQuantizeTensor, RawTensor, RawWorkspace};
use crate::views::{before_launch, input, no_wait_failed, output};
use crate::{DType, E4M3, Layout, Operand, Result, Workspace};

/// Enqueues the plan's kernels. The caller has compared shapes, and the stream's GPU with the plan's.
pub(super) fn run<T: Operand>(
    plan: &QuantizePlan,
    stream: &Arc<CudaStream>,
    workspace: &mut Workspace,
    mut args: QuantizeArgs<'_, T>,
) -> Result<()> {
    let [of_q, of_k, of_v] = &NAMES;
    let of_counts = args.counts.as_ref().map(|counts| counts.layout());
    let workspace_bytes = workspace.bytes();
    let q = args.q.as_mut().map(|q| Views::of(of_q, q, stream)).transpose()?;
    let k = args.k.as_mut().map(|k| Views::of(of_k, k, stream)).transpose()?;
    let v = args.v.as_mut().map(|v| Views::of(of_v, v, stream)).transpose()?;
    let counts = args.counts.as_mut().map(|counts| output("counts", counts, stream)).transpose()?;
    before_launch(stream)?;

    // From here to the end of the launch every guard lives: each makes the stream wait for earlier uses of the memory
    // now, and records this use when it is dropped.
    let (q, _q) = q.map(|q| q.addresses(stream)).unzip();
    let (k, _k) = k.map(|k| k.addresses(stream)).unzip();
    let (v, _v) = v.map(|v| v.addresses(stream)).unzip();
    let (counts, _counts) = counts.map(|counts| counts.device_ptr_mut(stream)).unzip();
    let scratch = if plan.workspace_bytes() > 0 { workspace.as_cuda() } else { None };
    let (scratch, _scratch) = scratch.map(|scratch| scratch.device_ptr_mut(stream)).unzip();
    no_wait_failed(stream)?;

    let place = Place::Cuda(stream.context().ordinal());
    let raw = RawQuantize {
        q,
        k,
        v,
        counts: counts.zip(of_counts).map(|(address, layout)| RawTensor { address, dtype: DType::F32, place, layout }),
        workspace: RawWorkspace { address: scratch.unwrap_or(0), bytes: workspace_bytes },
    };
    // SAFETY: views keep memory within the layouts (checked where tensors are made), outputs are injective and borrowed
    // exclusively, the guards order this use against every other one, and stream and memory are of the plan's GPU.
    unsafe { plan.run_raw(&raw, stream.cu_stream().cast()) }
}

/// A tensor's memory, found to be of the stream's context.
struct Views<'t, 'a, T> {
    values: (&'t CudaView<'a, T>, Layout<4>),
    stored: (&'t mut CudaViewMut<'a, E4M3>, Layout<4>),
    descale: (Factors<'t, 'a>, Layout<3>),
}

enum Factors<'t, 'a> {
    Written(&'t mut CudaViewMut<'a, f32>),
    Read(&'t CudaView<'a, f32>),
}

impl<'t, 'a, T: Operand> Views<'t, 'a, T> {
    fn of(of: &Name, tensor: &'t mut Quantize<'a, T>, stream: &CudaStream) -> Result<Self> {
        let of_stored = tensor.stored.layout();
        Ok(Self {
            values: (input(of.values, &tensor.values, stream)?, tensor.values.layout()),
            stored: (output(of.stored, &mut tensor.stored, stream)?, of_stored),
            descale: match &mut tensor.descale {
                Descale::FromAmax(descale) => {
                    let layout = descale.layout();
                    (Factors::Written(output(of.descale, descale, stream)?), layout)
                }
                Descale::Given(descale) => (Factors::Read(input(of.descale, descale, stream)?), descale.layout()),
            },
        })
    }

    /// Addresses, and the guards that must live until after the launch.
    fn addresses(self, stream: &'t CudaStream) -> (RawQuantizeTensor, [SyncOnDrop<'t>; 3]) {
        let place = Place::Cuda(stream.context().ordinal());
        let Self { values: (values, of_values), stored: (stored, of_stored), descale: (descale, of_descale) } = self;
        let (values, values_guard) = values.device_ptr(stream);
        let (stored, stored_guard) = stored.device_ptr_mut(stream);
        let given = matches!(descale, Factors::Read(_));
        let (descale, descale_guard) = match descale {
            Factors::Written(descale) => descale.device_ptr_mut(stream),
            Factors::Read(descale) => descale.device_ptr(stream),
        };
        let raw = RawQuantizeTensor {
            values: RawTensor { address: values, dtype: T::DTYPE, place, layout: of_values },
            stored: RawTensor { address: stored, dtype: DType::E4M3, place, layout: of_stored },
            descale: RawTensor { address: descale, dtype: DType::F32, place, layout: of_descale },
            given,
        };
        (raw, [values_guard, stored_guard, descale_guard])
    }
}
