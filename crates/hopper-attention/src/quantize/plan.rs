//! Running a quantiser.

use std::fmt;

use super::select::{rows, select};
use super::{Choice, Descale, NAMES, Name, Quantize, QuantizeArgs, Quantizer, check_tensor};
use crate::cpu::{self, Factors, QuantizeTask};
#[cfg(feature = "cuda")]
use crate::cuda::CudaDevice;
use crate::plan::{Gpu, Target};
use crate::{Device, DeviceFacts, Operand, Result, Stream, Workspace, checks};

/// How tensors are quantised on one device: made once, and run as often as wanted, from any thread and on any stream of the
/// device. It holds no device memory, and prints itself.
#[derive(Clone, Debug)]
pub struct QuantizePlan {
    quantizer: Quantizer,
    target: Target<Choice>,
}

impl Quantizer {
    /// Picks how the device does it, and loads its kernels, so that a later run loads nothing.
    ///
    /// # Errors
    /// [`Error::Unsupported`](crate::Error::Unsupported) when the GPU has no kernel for it, with what it has;
    /// [`Error::Driver`](crate::Error::Driver) and [`Error::Launch`](crate::Error::Launch) when one cannot be loaded.
    pub fn plan(&self, device: &Device) -> Result<QuantizePlan> {
        let target = match device {
            Device::Cpu => Target::Cpu,
            #[cfg(feature = "cuda")]
            Device::Cuda(device) => Target::Gpu(self.load(device)?),
        };
        Ok(QuantizePlan { quantizer: self.clone(), target })
    }

    #[cfg(feature = "cuda")]
    fn load(&self, device: &CudaDevice) -> Result<Gpu<Choice>> {
        let choice = select(self, &device.info().facts, rows())?;
        let _current = device.make_current()?;
        device.look_up_driver()?;
        crate::sys::prepare_quantize(&choice.row)?;
        Ok(Gpu::loaded(choice, device.clone()))
    }

    /// The plan that [`plan`](Self::plan) makes on a GPU with these facts. It can be looked at and printed, and needs no
    /// GPU; running it is refused, since it was loaded nowhere.
    ///
    /// # Errors
    /// [`Error::Unsupported`](crate::Error::Unsupported) as for [`plan`](Self::plan).
    pub fn plan_for(&self, facts: &DeviceFacts) -> Result<QuantizePlan> {
        let choice = select(self, facts, rows())?;
        Ok(QuantizePlan { quantizer: self.clone(), target: Target::Gpu(Gpu::described(choice)) })
    }
}

impl QuantizePlan {
    /// What it does.
    pub fn quantizer(&self) -> &Quantizer {
        &self.quantizer
    }

    /// What a [`Workspace`] must hold, in bytes: none on the CPU; on a GPU enough for factors of all three operands that
    /// tiles share, and for counts.
    pub fn workspace_bytes(&self) -> usize {
        match &self.target {
            Target::Cpu => 0,
            Target::Gpu(gpu) => gpu.choice().workspace_bytes,
        }
    }

    pub(crate) fn target(&self) -> &Target<Choice> {
        &self.target
    }

    /// Quantises. On the CPU it is done on return. On a GPU it is enqueued on the stream, without allocating, waiting or
    /// loading anything; the borrows may end at once (the crate's documentation says why that is sound).
    ///
    /// # Errors
    /// Before anything is written: [`Error::Dtype`] and [`Error::Shape`] for tensors that are not the problem's;
    /// [`Error::Device`] for a stream, workspace or tensor that is not where the plan is; [`Error::Workspace`] for one that
    /// is too small; on the CPU [`Error::Value`] for a given factor that is not finite and above 0; on a GPU
    /// [`Error::Layout`] for addresses and strides that are not multiples of 16 bytes, [`Error::Capture`] while the stream
    /// is captured and cudarc tracks events, [`Error::Driver`] for errors of the driver, including those of earlier work
    /// that surface now, and [`Error::Launch`] when the launch itself fails.
    ///
    /// [`Error::Capture`]: crate::Error::Capture
    /// [`Error::Device`]: crate::Error::Device
    /// [`Error::Driver`]: crate::Error::Driver
    /// [`Error::Dtype`]: crate::Error::Dtype
    /// [`Error::Launch`]: crate::Error::Launch
    /// [`Error::Layout`]: crate::Error::Layout
    /// [`Error::Shape`]: crate::Error::Shape
    /// [`Error::Value`]: crate::Error::Value
    /// [`Error::Workspace`]: crate::Error::Workspace
    pub fn run<T: Operand>(&self, stream: &Stream, workspace: &mut Workspace, args: QuantizeArgs<'_, T>) -> Result<()> {
        self.check(&args)?;
        self.target.accept(stream, workspace, self.workspace_bytes())?;
        match stream {
            Stream::Cpu => self.run_cpu(args),
            #[cfg(feature = "cuda")]
            Stream::Cuda(stream) => super::cuda::run(self, stream, workspace, args),
        }
    }

    /// What every device checks: types and shapes.
    fn check<T: Operand>(&self, args: &QuantizeArgs<'_, T>) -> Result<()> {
        checks::dtype("q, k and v", T::DTYPE, self.quantizer.source, "the quantizer's source")?;
        for (of, tensor) in NAMES.iter().zip([&args.q, &args.k, &args.v]) {
            if let Some(Quantize { values, stored, descale }) = tensor {
                let descale = match descale {
                    Descale::FromAmax(descale) => descale.layout(),
                    Descale::Given(descale) => descale.layout(),
                };
                check_tensor(of, &self.quantizer.problem, values.layout(), stored.layout(), descale)?;
            }
        }
        args.counts.as_ref().map_or(Ok(()), |counts| check_counts(counts.layout().shape()))
    }

    fn run_cpu<T: Operand>(&self, args: QuantizeArgs<'_, T>) -> Result<()> {
        let QuantizeArgs { mut q, mut k, mut v, mut counts } = args;
        let [of_q, of_k, of_v] = &NAMES;
        let tasks = [
            q.as_mut().map(|q| self.task(of_q, q)).transpose()?,
            k.as_mut().map(|k| self.task(of_k, k)).transpose()?,
            v.as_mut().map(|v| self.task(of_v, v)).transpose()?,
        ];
        let mut counts = counts.as_mut().map(|counts| checks::host_mut("counts", counts)).transpose()?;
        for (row, task) in tasks.into_iter().enumerate() {
            let found = task.map_or([0; 2], cpu::quantize);
            if let Some(counts) = &mut counts {
                for (column, found) in found.into_iter().enumerate() {
                    // Checked above, so the place exists.
                    if let Some(place) = counts.layout.offset([row, column]) {
                        counts.data[place] = found as f32;
                    }
                }
            }
        }
        Ok(())
    }

    /// A tensor that was found to be the problem's.
    fn task<'t, T: Operand>(&self, of: &Name, tensor: &'t mut Quantize<'_, T>) -> Result<QuantizeTask<'t, T>> {
        let problem = &self.quantizer.problem;
        let descale = match &mut tensor.descale {
            Descale::FromAmax(descale) => Factors::FromAmax(checks::host_mut(of.descale, descale)?),
            Descale::Given(descale) => {
                let descale = checks::host(of.descale, descale)?;
                cpu::check_factors(of.descale, &descale)?;
                Factors::Given(descale)
            }
        };
        Ok(QuantizeTask {
            values: checks::host(of.values, &tensor.values)?,
            stored: checks::host_mut(of.stored, &mut tensor.stored)?,
            descale,
            scaling: problem.scaling_value().unwrap_or_default(),
            group: (of.shape)(problem)[2] / problem.dims().heads_kv,
            rotation: self.quantizer.hadamard.filter(|_| of.scored),
            most: self.quantizer.most(of),
        })
    }
}

/// Whether counts have their shape.
pub(crate) fn check_counts(shape: [usize; 2]) -> Result<()> {
    checks::shape_of("counts", shape, [3, 2], "[q k v, saturated and not finite]")
}

impl fmt::Display for QuantizePlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.target {
            Target::Cpu => f.write_str("cpu")?,
            Target::Gpu(gpu) => write!(f, "{}", gpu.choice())?,
        }
        write!(f, ", workspace {} bytes", self.workspace_bytes())
    }
}
