//! Running a plan: check the borrowed tensors, take their addresses, and enqueue the work before the borrows end.

mod args;
#[cfg(feature = "cuda")]
mod cuda;
mod lengths;
#[cfg(feature = "cuda")]
mod order;

use std::ffi::c_void;

use crate::device::Stream;
use crate::error::Result;
use crate::launch::{self, Given, Launch, Place, RawArgs, RawTensor};
use crate::plan::{BackwardPlan, ForwardPlan, QuantizePlan, Target};
use crate::tensor::Memory;
use crate::workspace::Workspace;

pub use args::{Args, BackwardArgs, Descale, ForwardArgs, QuantizeArgs};
pub use lengths::{SequenceOffsets, UsedLengths};

/// Defines `run` (borrowed tensors) and `run_raw` (addresses) of a plan. Both are the same for every pass.
macro_rules! runs {
    ($plan:ident, $args:ident, $(#[$doc:meta])*) => {
        impl $plan {
            $(#[$doc])*
            ///
            /// On the CPU the work is done when the call returns. On a GPU the call enqueues the work on the stream and
            /// returns. It allocates nothing, waits for nothing and loads nothing. The borrows may end at once: the crate's
            /// documentation says why that is sound. The thread's current CUDA context stays as it was.
            ///
            /// The run comes after all earlier uses of its tensors and workspace, and before all later ones, on any stream and
            /// thread. The crate's documentation lists the exceptions. Two of them: event tracking is off, or another
            /// operation of cudarc reads the same tensors on a third stream.
            ///
            /// `args` is
            #[doc = concat!("[`", stringify!($args), "`](crate::", stringify!($args), ")")]
            /// or [`Args`].
            ///
            /// # Errors
            /// Before anything is launched:
            /// - [`Value`](crate::Error::Value): an operand is missing or was not asked for. An offset or used length of a
            ///   sequence is not within the tensors, or on a GPU nothing is known of it. On the CPU also: a factor is not finite
            ///   and above 0. (A descale factor that a forward reads may be 0.)
            /// - [`Dtype`](crate::Error::Dtype) or [`Shape`](crate::Error::Shape): an operand's type or shape is not the
            ///   problem's.
            /// - [`Device`](crate::Error::Device): the stream, the workspace or a tensor is not where the plan is. (A run on a
            ///   GPU takes the state of dropout from the host, too.)
            /// - [`Workspace`](crate::Error::Workspace): the workspace is too small.
            /// - [`Layout`](crate::Error::Layout), on a GPU: an address or a stride is not a multiple of 16 bytes, or a stride
            ///   reaches 2^40 bytes. For f32 tensors with fewer than four dimensions: an address is not a multiple of 4 bytes.
            /// - [`Capture`](crate::Error::Capture): the stream is captured while cudarc tracks events.
            /// - [`Memory`](crate::Error::Memory) or [`Threads`](crate::Error::Threads), on the CPU: there is no memory for the
            ///   buffers, or the threads cannot be started.
            /// - [`Driver`](crate::Error::Driver): the driver failed, now or in earlier work whose error surfaces now.
            ///
            /// [`Launch`](crate::Error::Launch): the launch itself failed. [`Driver`](crate::Error::Driver) may then also mean
            /// that the run was enqueued and the stream failed.
            pub fn run<'a>(
                &self,
                stream: &Stream,
                workspace: &mut Workspace<'_>,
                args: impl Into<Args<'a>>,
            ) -> Result<()> {
                run(self, stream, workspace, args.into())
            }

            /// [`run`](Self::run) with addresses in place of borrowed tensors.
            ///
            /// On a GPU the call enqueues the work on the stream and returns. It allocates nothing, waits for nothing and loads
            /// nothing. The thread's current CUDA context stays as it was. On the CPU the work is done when the call returns,
            /// and `stream` and the workspace are ignored.
            ///
            /// # Errors
            /// As [`run`](Self::run), and also:
            /// - [`Layout`](crate::Error::Layout): an address is not a multiple of the element's size, or two indices of an
            ///   output share an element. On the CPU also: the address range of an output overlaps another tensor's range.
            /// - [`Device`](crate::Error::Device): the stream's context is not the primary context of the plan's GPU.
            /// - [`Workspace`](crate::Error::Workspace): the plan needs a workspace, and its address is 0.
            ///
            /// # Safety
            /// "Until the work is done" means: until the call returns on the CPU, until the stream has done the work on a GPU.
            /// - Each tensor's memory is in the place that its [`RawTensor`](crate::raw::RawTensor) says. All elements that
            ///   its layout reaches are valid memory until the work is done. (The state of dropout in host memory, for a run on a
            ///   GPU: until the call returns.)
            /// - Tensors that are read are initialised when the work starts.
            /// - The workspace is on the plan's device, and valid until the work is done.
            /// - Until the work is done, nothing else writes a tensor that is read, and nothing else reads or writes the
            ///   workspace or a tensor that is written.
            /// - The workspace and the tensors that are written share no element with each other, nor with a tensor that is
            ///   read.
            /// - `stream` is a live `CUstream` (or `cudaStream_t`), or a handle of CUDA's own: null or `CU_STREAM_LEGACY` for the
            ///   default stream of the plan's context, `CU_STREAM_PER_THREAD` for that of the calling thread.
            pub unsafe fn run_raw(&self, args: &RawArgs, stream: *mut c_void) -> Result<()> {
                // SAFETY: the caller's promise.
                unsafe { launch::run_raw(self, args, stream) }
            }
        }
    };
}

runs! {
    ForwardPlan, ForwardArgs,
    /// Computes O, and the other outputs that the problem's options ask for.
}

runs! {
    BackwardPlan, BackwardArgs,
    /// Computes the gradients of Q, K and V. They are overwritten, not added to.
}

runs! {
    QuantizePlan, QuantizeArgs,
    /// Quantises each of Q, K and V that is given. A forward pass that is enqueued on the same stream afterwards may read
    /// the results.
}

fn run<P: Launch>(plan: &P, stream: &Stream, workspace: &mut Workspace<'_>, args: Args<'_>) -> Result<()> {
    launch::check(plan, args.given())?;
    let planned = plan.planned();
    args.check_lengths(plan.of_forward(), matches!(planned.target, Target::Gpu(_)))?;
    planned.accept(stream, workspace)?;
    match (stream, &planned.target) {
        #[cfg(feature = "cuda")]
        (Stream::Cuda(stream), Target::Gpu(gpu)) => cuda::run(plan, gpu, stream, workspace, args),
        // SAFETY: the tensors are borrowed. Those that are written are borrowed exclusively. Each layout was checked against
        // its memory when the tensor was made. Types and shapes were checked against the problem above.
        (_, Target::Cpu) => unsafe { plan.on_cpu(&args.on_the_host()) },
        (_, target) => Err(crate::plan::not_on_a_gpu(target)),
    }
}

impl Args<'_> {
    /// The tensors as the checks see them.
    fn given(&self) -> impl Iterator<Item = Given<'_>> + Clone {
        self.0.iter().map(|(slot, tensor)| {
            let place = match &tensor.memory {
                Memory::Host(..) => Place::Cpu,
                #[cfg(feature = "cuda")]
                Memory::Cuda(view) => Place::Cuda(view.context().ordinal()),
                #[cfg(feature = "cuda")]
                Memory::CudaMut(view) => Place::Cuda(view.context().ordinal()),
            };
            Given { slot: *slot, dtype: tensor.dtype, layout: &tensor.layout, place, lent: Some(tensor.lent) }
        })
    }

    /// The tensors by address. All of them were checked to be on the host.
    fn on_the_host(&self) -> RawArgs {
        let mut raw = RawArgs::new();
        for (slot, tensor) in self.0.iter() {
            let address = match &tensor.memory {
                Memory::Host(address, _) => *address,
                #[cfg(feature = "cuda")]
                Memory::Cuda(_) | Memory::CudaMut(_) => 0,
            };
            let (dtype, place, layout) = (tensor.dtype, Place::Cpu, tensor.layout);
            raw.tensors.set(*slot, RawTensor { address, dtype, place, layout });
        }
        raw
    }
}
