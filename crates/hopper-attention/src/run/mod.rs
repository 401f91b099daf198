//! Running a plan: borrowed tensors are checked, their addresses taken, and the work enqueued before the borrows end.

mod args;
#[cfg(feature = "cuda")]
mod cuda;

use std::ffi::c_void;

use crate::device::Stream;
use crate::error::Result;
use crate::launch::{self, Given, Launch, Place, RawArgs, RawTensor};
use crate::plan::{BackwardPlan, ForwardPlan, QuantizePlan, Target};
use crate::tensor::Memory;
use crate::workspace::Workspace;

pub use args::{Args, BackwardArgs, Descale, ForwardArgs, QuantizeArgs};

/// The same of every pass: a run of borrowed tensors, and a run by address.
macro_rules! runs {
    ($plan:ident, $args:ident, $(#[$doc:meta])*) => {
        impl $plan {
            $(#[$doc])*
            ///
            /// On the CPU it is done on return. On a GPU it is enqueued on the stream, without allocating, waiting or loading
            /// anything; the borrows may end at once (the crate's documentation says why that is sound). The thread's current
            /// CUDA context is left as it was. Takes
            #[doc = concat!("[`", stringify!($args), "`](crate::", stringify!($args), ")")]
            /// or [`Args`].
            ///
            /// # Errors
            /// Before anything is launched:
            /// - [`Value`](crate::Error::Value) for an operand that is missing or not asked for,
            ///   [`Dtype`](crate::Error::Dtype) and [`Shape`](crate::Error::Shape) for one that is not the problem's; on the CPU
            ///   [`Value`](crate::Error::Value) also for a factor that is not finite and above 0.
            /// - [`Device`](crate::Error::Device) for a stream, workspace or tensor that is not where the plan is.
            /// - [`Workspace`](crate::Error::Workspace) for one that is too small.
            /// - On a GPU, [`Layout`](crate::Error::Layout) for addresses and strides that are not multiples of 16 bytes (of 4,
            ///   of f32 tensors with fewer than four dimensions).
            /// - [`Capture`](crate::Error::Capture) while the stream is captured and cudarc tracks events.
            /// - [`Driver`](crate::Error::Driver) for errors of the driver, including those of earlier work that surface now.
            ///
            /// [`Launch`](crate::Error::Launch) when the launch itself fails.
            pub fn run<'a>(
                &self,
                stream: &Stream,
                workspace: &mut Workspace<'_>,
                args: impl Into<Args<'a>>,
            ) -> Result<()> {
                run(self, stream, workspace, args.into())
            }

            /// [`run`](Self::run) by address. On a GPU it enqueues the work on the stream and returns, without allocating,
            /// waiting or loading anything, and leaves the thread's current CUDA context as it was. On the CPU it is done on
            /// return, and neither the stream nor the workspace is looked at.
            ///
            /// # Errors
            /// As [`run`](Self::run); beyond that [`Layout`](crate::Error::Layout) for an address that is not a multiple of the
            /// element's size, for an output that uses an element twice, and on the CPU for an output whose range of addresses
            /// meets another tensor's; [`Device`](crate::Error::Device) for a stream of another context than the primary one of
            /// the plan's GPU; [`Workspace`](crate::Error::Workspace) for one at address 0.
            ///
            /// # Safety
            /// - Each tensor's memory is where it says, and valid from now until the work is done, for every element that its
            ///   layout reaches. What is read is initialised by then.
            /// - The workspace is valid for as long, in the plan's place.
            /// - Until then nothing writes what is read, and nothing else reads or writes what is written and the workspace.
            /// - What is written and the workspace share no element with each other or with what is read.
            /// - `stream` is a live `CUstream` (or `cudaStream_t`), or null for the default stream.
            pub unsafe fn run_raw(&self, args: &RawArgs, stream: *mut c_void) -> Result<()> {
                // SAFETY: the caller's promise.
                unsafe { launch::run_raw(self, args, stream) }
            }
        }
    };
}

runs! {
    ForwardPlan, ForwardArgs,
    /// Computes O, and what else the problem's options ask for.
}

runs! {
    BackwardPlan, BackwardArgs,
    /// Computes the gradients of Q, K and V, which are overwritten, not added to.
}

runs! {
    QuantizePlan, QuantizeArgs,
    /// Quantises those of Q, K and V that are given. What it writes may be read by a forward pass that is enqueued on the same
    /// stream afterwards.
}

fn run<P: Launch>(plan: &P, stream: &Stream, workspace: &mut Workspace<'_>, args: Args<'_>) -> Result<()> {
    launch::check(plan, args.given())?;
    let planned = plan.planned();
    planned.accept(stream, workspace)?;
    match (stream, &planned.target) {
        #[cfg(feature = "cuda")]
        (Stream::Cuda(stream), Target::Gpu(gpu)) => cuda::run(plan, gpu, stream, workspace, args),
        // SAFETY: tensors are borrowed, those that are written exclusively; layouts were checked against their memory where
        // tensors were made, types and shapes against the problem above.
        (_, Target::Cpu) => unsafe { plan.on_cpu(&args.on_the_host()) },
        (_, target) => Err(crate::plan::not_on_a_gpu(target)),
    }
}

impl Args<'_> {
    /// What the checks look at.
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

    /// The addresses of tensors that were found to be on the host.
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
