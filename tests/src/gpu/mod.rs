//! Cases in device memory.

pub mod backward;
pub mod jobs;
pub mod training;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use hopper_attention::cudarc::driver::{CudaContext, CudaSlice, CudaStream, DevicePtr};
use hopper_attention::{
    BackwardArgs, BackwardProblem, CudaDevice, DType, Device, Element, Error, Float, KernelInfo, Layout, MaskClass,
    Result, Stream, TensorMut, TensorRef, backward_kernels, kernels,
};
use rayon::prelude::*;

use crate::blocks::BlocksImage;
use crate::c::{BlocksMemory, Memory, tensor};
use crate::data::{GUARD, Poison};
use crate::problems::Case;
use crate::runner::{Prepared, Ready, Runner};
use crate::say;

use hopper_attention_verify::gpu::BlocksOnDevice;
pub use hopper_attention_verify::gpu::{MODE, NO_FLAGS, OnDevice, fp8, quantize, read, same_bits, write};

/// A GPU for one test. Tests take turns: they share its memory, and a capture in one must not see another allocate.
pub struct Gpu {
    /// The GPU, through a context object of this test's own.
    pub device: CudaDevice,
    /// Its default stream.
    pub stream: Arc<CudaStream>,
    _turn: MutexGuard<'static, ()>,
}

impl Gpu {
    /// The GPU, or `None` and a line that says so. With `HATTN_REQUIRE_GPU=1` its absence is a failure.
    pub fn open(test: &str) -> Option<Self> {
        static TURN: Mutex<()> = Mutex::new(());
        // A test that failed has said so itself.
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        let found = Device::available();
        if !found.iter().any(|info| info.ordinal == 0 && kernels().iter().any(|row| row.runs_on(&info.facts))) {
            let required = std::env::var("HATTN_REQUIRE_GPU").is_ok_and(|value| value == "1");
            assert!(!required, "HATTN_REQUIRE_GPU=1, but no GPU runs a row of this build; found: {found:?}");
            say(&format!("skipped: no GPU ({test})"));
            return None;
        }
        let context = CudaContext::new(0).expect("the GPU opens");
        let device = CudaDevice::from_context(context).expect("the GPU describes itself");
        let stream = device.context().default_stream();
        Some(Self { device, stream, _turn: turn })
    }

    /// The default stream as the library takes it.
    pub fn lane(&self) -> Stream {
        Stream::Cuda(self.stream.clone())
    }

    /// The forward rows of 16-bit operands that this GPU runs, but those for lists of blocks.
    pub fn rows(&self) -> Vec<KernelInfo> {
        let plain = |row: &KernelInfo| row.dtype() != DType::E4M3 && !row.needs_modifiers() && !is_listed(row);
        self.running(kernels()).into_iter().filter(plain).collect()
    }

    /// The forward rows of 16-bit operands for lists of blocks, but those for modified scores alone.
    pub fn listed_rows(&self) -> Vec<KernelInfo> {
        self.listed(kernels(), |row| !row.needs_modifiers())
    }

    /// Those that take modified scores.
    pub fn listed_modified_rows(&self) -> Vec<KernelInfo> {
        self.listed(kernels(), KernelInfo::takes_modifiers)
    }

    /// The rows of e4m3 operands for lists of blocks.
    pub fn listed_fp8_rows(&self) -> Vec<KernelInfo> {
        let of_e4m3 = |row: &KernelInfo| row.dtype() == DType::E4M3 && is_listed(row);
        self.running(kernels()).into_iter().filter(of_e4m3).collect()
    }

    /// The backward rows for lists of blocks, but those for modified scores alone.
    pub fn listed_backward_rows(&self) -> Vec<KernelInfo> {
        self.listed(backward_kernels(), |row| !row.needs_modifiers())
    }

    /// Those that take modified scores.
    pub fn listed_modified_backward_rows(&self) -> Vec<KernelInfo> {
        self.listed(backward_kernels(), KernelInfo::takes_modifiers)
    }

    /// Those that take modified scores, but those for lists of blocks.
    pub fn modified_rows(&self) -> Vec<KernelInfo> {
        self.modified(kernels())
    }

    /// Those of e4m3 operands, but those for modified scores and for lists of blocks.
    pub fn fp8_rows(&self) -> Vec<KernelInfo> {
        self.all_fp8_rows().into_iter().filter(|row| !row.needs_modifiers()).collect()
    }

    /// The same with those for modified scores.
    pub fn all_fp8_rows(&self) -> Vec<KernelInfo> {
        let of_e4m3 = |row: &KernelInfo| row.dtype() == DType::E4M3 && !is_listed(row);
        self.running(kernels()).into_iter().filter(of_e4m3).collect()
    }

    /// The backward rows that this GPU runs, but those for modified scores alone, and for lists of blocks.
    pub fn backward_rows(&self) -> Vec<KernelInfo> {
        let plain = |row: &KernelInfo| !row.needs_modifiers() && !is_listed(row);
        self.running(backward_kernels()).into_iter().filter(plain).collect()
    }

    /// The backward rows that this GPU runs, and that take modified scores, but those for lists of blocks.
    pub fn modified_backward_rows(&self) -> Vec<KernelInfo> {
        self.modified(backward_kernels())
    }

    /// Those of 16-bit operands that take modified scores, but those for lists of blocks.
    fn modified(&self, rows: &[KernelInfo]) -> Vec<KernelInfo> {
        let takes = |row: &KernelInfo| row.dtype() != DType::E4M3 && !is_listed(row) && row.takes_modifiers();
        self.running(rows).into_iter().filter(takes).collect()
    }

    /// Those of 16-bit operands for lists of blocks that are of a kind.
    fn listed(&self, rows: &[KernelInfo], is_of_kind: impl Fn(&KernelInfo) -> bool) -> Vec<KernelInfo> {
        let takes = |row: &KernelInfo| row.dtype() != DType::E4M3 && is_listed(row) && is_of_kind(row);
        self.running(rows).into_iter().filter(takes).collect()
    }

    /// The rows that this GPU runs. `HATTN_TEST_ROWS` asks for those alone whose description has one of these texts, with `|`
    /// between them: `sm80 fwd|head_dim 96/96`. Then a line says how many are left.
    fn running(&self, rows: &[KernelInfo]) -> Vec<KernelInfo> {
        let mut running: Vec<_> = rows.iter().copied().filter(|row| row.runs_on(&self.device.info().facts)).collect();
        if let Ok(texts) = std::env::var("HATTN_TEST_ROWS") {
            let all = running.len();
            running.retain(|row| texts.split('|').any(|text| row.to_string().contains(text)));
            say(&format!("skipped: {} of {all} rows (HATTN_TEST_ROWS={texts})", all - running.len()));
        }
        running
    }

    /// The card, for records.
    pub fn card(&self) -> String {
        self.device.info().to_string()
    }

    /// The driver, for records.
    pub fn driver(&self) -> String {
        let (major, minor) = self.device.info().driver;
        match std::fs::read_to_string("/sys/module/nvidia/version") {
            Ok(version) => format!("driver {}, CUDA {major}.{minor}", version.trim()),
            Err(_) => format!("CUDA {major}.{minor}"),
        }
    }
}

fn is_listed(row: &KernelInfo) -> bool {
    row.mask() == MaskClass::Blocks
}

/// The plan of a row for a case; none where the row is of another mask class or of smaller head dims.
///
/// # Panics
/// When it was refused for another reason.
pub fn planned<P>(plan: Result<P>, row: &KernelInfo, case: &Case) -> Option<P> {
    supported(plan, || format!("{row}, {case}"))
}

/// A plan; none where the problem is not supported. `what` was planned.
///
/// # Panics
/// When it was refused for another reason, such as a kernel that cannot be loaded.
pub fn supported<P>(plan: Result<P>, what: impl FnOnce() -> String) -> Option<P> {
    match plan {
        Ok(plan) => Some(plan),
        Err(Error::Unsupported { .. }) => None,
        Err(error) => panic!("{}: {error}", what()),
    }
}

/// Takes cases through all rows of their type: `upload` brings a case to the GPU, `run` computes it there by a row, where the row
/// takes it, and `check_inputs` says whether its inputs are still what they were.
///
/// # Panics
/// When they are not.
pub fn take_rows<P: Ready, M>(
    runner: &mut Runner,
    (rows, cases): (&[KernelInfo], &[Case]),
    upload: impl Fn(&P) -> M,
    mut run: impl FnMut(&KernelInfo, &P, &mut M) -> Option<std::result::Result<P::Outputs, String>>,
    check_inputs: impl Fn(&P, &M) -> std::result::Result<(), String>,
) {
    for cases in cases.chunks(64) {
        for prepared in P::all(cases) {
            let mut memory = upload(&prepared);
            let of_type = rows.iter().enumerate().filter(|(_, row)| row.dtype() == P::DTYPE);
            let ran: Vec<_> = of_type.filter_map(|(i, row)| Some((i, run(row, &prepared, &mut memory)?))).collect();
            // The oracle's side takes longer than the GPU.
            let judged = ran.into_par_iter().map(|(i, ran)| (i, prepared.verdict_on(ran)));
            for (i, verdict) in judged.collect::<Vec<_>>() {
                runner.take(i, prepared.case(), P::DTYPE, verdict);
            }
            let unchanged = check_inputs(&prepared, &memory);
            unchanged.unwrap_or_else(|why| panic!("{} {}: {why}", P::DTYPE, prepared.case()));
        }
    }
}

/// All of a slice as a dense tensor of this shape.
///
/// # Errors
/// When it is too short.
pub fn whole<T: Element, const R: usize>(slice: &CudaSlice<T>, shape: [usize; R]) -> Result<TensorRef<'_, T, R>> {
    TensorRef::cuda(slice.slice(..), Layout::contiguous(shape)?)
}

/// The same to write to.
///
/// # Errors
/// As [`whole`].
pub fn whole_mut<T: Element, const R: usize>(
    slice: &mut CudaSlice<T>,
    shape: [usize; R],
) -> Result<TensorMut<'_, T, R>> {
    TensorMut::cuda(slice.slice_mut(..), Layout::contiguous(shape)?)
}

/// What a backward pass of dense tensors reads and writes: `q`, `k`, `v`, `o`, `d_o`, the LSE; `d_q`, `d_k`, `d_v`.
///
/// # Errors
/// When one is too short.
pub fn dense<'a, T: Float>(
    problem: &BackwardProblem,
    [q, k, v, o, d_o]: [&'a CudaSlice<T>; 5],
    lse: &'a CudaSlice<f32>,
    [d_q, d_k, d_v]: [&'a mut CudaSlice<T>; 3],
) -> Result<BackwardArgs<'a>> {
    let forward = problem.forward();
    Ok(BackwardArgs::new(
        [whole(q, forward.q_shape())?, whole(k, forward.k_shape())?, whole(v, forward.v_shape())?],
        whole(o, forward.o_shape())?,
        whole(lse, forward.lse_shape())?,
        whole(d_o, forward.o_shape())?,
        [
            whole_mut(d_q, problem.d_q_shape())?,
            whole_mut(d_k, problem.d_k_shape())?,
            whole_mut(d_v, problem.d_v_shape())?,
        ],
    ))
}

/// A case in device memory as the C ABI takes it.
pub trait ByAddress<P> {
    /// The addresses.
    type Memory;

    /// The tensors by address, without a workspace. The stream orders them after what wrote the memory here; a run on another
    /// stream has to wait for this one.
    fn c_memory(&self, stream: &Arc<CudaStream>, prepared: &P) -> Self::Memory;
}

/// Lists of blocks by address, where there are any.
fn blocks_memory(
    stream: &Arc<CudaStream>,
    image: Option<&BlocksImage>,
    lists: Option<&BlocksOnDevice>,
) -> Option<BlocksMemory> {
    let ordinal = i32::try_from(stream.context().ordinal()).expect("few GPUs");
    let (image, lists) = image.zip(lists)?;
    Some(BlocksMemory::new(image, ordinal, |slot| lists.address(stream, slot).expect("a list of the case")))
}

impl<T: Poison> ByAddress<Prepared<T>> for OnDevice<T> {
    type Memory = Memory;

    fn c_memory(&self, stream: &Arc<CudaStream>, prepared: &Prepared<T>) -> Memory {
        let inner = |slice: &CudaSlice<T>| slice.device_ptr(stream).0 + (GUARD * size_of::<T>()) as u64;
        let ordinal = i32::try_from(stream.context().ordinal()).expect("few GPUs");
        let o_layout = prepared.case.placement.layout(prepared.problem.o_shape(), false);
        let lse_layout = prepared.case.placement.lse_layout(prepared.problem.lse_shape());
        Memory {
            q: tensor(inner(&self.q), T::DTYPE, ordinal, prepared.q.layout()),
            k: tensor(inner(&self.k), T::DTYPE, ordinal, prepared.k.layout()),
            v: tensor(inner(&self.v), T::DTYPE, ordinal, prepared.v.layout()),
            o: tensor(inner(&self.o), T::DTYPE, ordinal, o_layout),
            lse: self.lse.as_ref().map(|lse| {
                let address = lse.device_ptr(stream).0 + (GUARD * size_of::<f32>()) as u64;
                tensor(address, DType::F32, ordinal, lse_layout)
            }),
            sinks: None,
            alibi_slopes: None,
            max_logits: None,
            bias: None,
            blocks: blocks_memory(stream, prepared.blocks.as_ref(), self.blocks.as_ref()),
            dropout_state: None,
            workspace: 0,
            workspace_bytes: 0,
        }
    }
}
