//! What the driver is asked about GPUs and streams. Nothing here panics where there is no driver.

use std::ffi::c_void;
use std::fmt;
use std::sync::Arc;

use cudarc::driver::sys::{self, CUdevice_attribute};
use cudarc::driver::{CudaContext, CudaStream, DriverError, result};
use once_cell::sync::OnceCell;

use crate::arch::{ComputeCapability, DeviceFacts, DeviceInfo};
use crate::error::{Error, ErrorSource, Result};

/// A GPU, its context, and what is known of it. Clones share the context.
#[derive(Clone)]
pub struct CudaDevice {
    context: Arc<CudaContext>,
    info: Arc<DeviceInfo>,
}

impl CudaDevice {
    /// The GPU with this ordinal, through its primary context.
    ///
    /// # Errors
    /// As [`Device::cuda`](crate::Device::cuda).
    pub fn open(ordinal: usize) -> Result<Self> {
        known(ordinal)?;
        // Opening makes the context current, which is the caller's to decide.
        let _current = Current::keep()?;
        Self::from_context(CudaContext::new(ordinal).map_err(driver("opening the GPU"))?)
    }

    /// As [`open`](Self::open), but opened once and kept for the life of the process.
    ///
    /// # Errors
    /// As [`Device::cuda`](crate::Device::cuda).
    pub fn shared(ordinal: usize) -> Result<Self> {
        known(ordinal)?.opened.get_or_try_init(|| Self::open(ordinal)).cloned()
    }

    /// The GPU of a context that exists already, so that its streams and memory can be used.
    ///
    /// # Errors
    /// [`Error::Driver`] when the GPU cannot be asked for its properties.
    pub fn from_context(context: Arc<CudaContext>) -> Result<Self> {
        let ordinal = context.ordinal();
        Ok(Self { context, info: known(ordinal)?.info(ordinal)? })
    }

    /// The context, from which streams are made and memory is allocated.
    pub fn context(&self) -> &Arc<CudaContext> {
        &self.context
    }

    /// Makes the GPU current on this thread until the guard is dropped. A library that left it so would send the next
    /// allocation of a program with several GPUs to the wrong one.
    pub(crate) fn make_current(&self) -> Result<Current> {
        let current = Current::keep()?;
        self.context.bind_to_thread().map_err(driver("making the GPU current"))?;
        Ok(current)
    }

    /// Asks what a run asks of its stream, of the default stream: the first call of each of the driver's functions looks
    /// it up, which allocates, and a run must not.
    pub(crate) fn look_up_driver(&self) -> Result<()> {
        // An error says that some stream is being captured, which a run finds out for its own.
        let _ = self.context.default_stream().capture_status();
        self.check_stream(std::ptr::null_mut())
    }

    /// Whether a stream is of this GPU's context, which is current.
    pub(crate) fn check_stream(&self, stream: *mut c_void) -> Result<()> {
        let stream: sys::CUstream = stream.cast();
        let mut context = std::ptr::null_mut();
        // SAFETY: the caller of the raw layer promises a live stream or null, and the other pointer is to a local.
        let status = unsafe { sys::cuStreamGetCtx(stream, &raw mut context) };
        // A stream of a green context belongs to no context that this call can name.
        if status == sys::CUresult::CUDA_ERROR_NOT_SUPPORTED {
            return Ok(());
        }
        status.result().map_err(driver("asking for the stream's context"))?;
        if context == self.context.cu_ctx() {
            return Ok(());
        }
        Err(Error::Device {
            what: "stream",
            got: "another CUDA context".into(),
            allowed: format!("the primary context of {self}, the plan's"),
        })
    }

    /// Whether a stream is of the context for which the plan's kernels were loaded.
    pub(crate) fn check_context(&self, stream: &CudaStream) -> Result<()> {
        if *self.context == **stream.context() {
            return Ok(());
        }
        Err(Error::Device {
            what: "stream",
            got: format!("cuda:{}", stream.context().ordinal()),
            allowed: format!("{self}, and the context that the plan was made with"),
        })
    }

    /// What is known of the GPU.
    pub fn info(&self) -> &DeviceInfo {
        &self.info
    }
}

/// Gives the thread back the CUDA context that was current when it was made.
pub(crate) struct Current(sys::CUcontext);

impl Current {
    fn keep() -> Result<Self> {
        let current = result::ctx::get_current().map_err(driver("asking for the current context"))?;
        Ok(Self(current.unwrap_or(std::ptr::null_mut())))
    }
}

impl Drop for Current {
    fn drop(&mut self) {
        // SAFETY: null, or a context that was current a moment ago; whoever destroys it meanwhile gets an error here,
        // which changes nothing.
        unsafe {
            if result::ctx::get_current().ok().flatten().unwrap_or(std::ptr::null_mut()) != self.0 {
                let _ = result::ctx::set_current(self.0);
            }
        }
    }
}

impl fmt::Debug for CudaDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("CudaDevice").field(&self.info).finish()
    }
}

impl fmt::Display for CudaDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "cuda:{} {}", self.info.ordinal, self.info.name)
    }
}

/// What is kept of each GPU. What fails is not kept: it is tried again at the next call.
#[derive(Default)]
struct Known {
    info: OnceCell<Arc<DeviceInfo>>,
    opened: OnceCell<CudaDevice>,
}

impl Known {
    fn info(&self, ordinal: usize) -> Result<Arc<DeviceInfo>> {
        let info = self.info.get_or_try_init(|| describe(ordinal).map(Arc::new));
        info.cloned().map_err(driver("asking for a GPU's properties"))
    }
}

/// The GPUs of this machine, by ordinal.
fn all() -> std::result::Result<&'static [Known], NoDriver> {
    static ALL: OnceCell<Box<[Known]>> = OnceCell::new();
    ALL.get_or_try_init(|| Ok((0..device_count()?).map(|_| Known::default()).collect())).map(|all| &**all)
}

/// The GPU with this ordinal.
fn known(ordinal: usize) -> Result<&'static Known> {
    let wanted = || format!("cuda:{ordinal}");
    let all = all().map_err(|NoDriver { found, source }| Error::NoDevice { wanted: wanted(), found, source })?;
    all.get(ordinal).ok_or_else(|| {
        let count = all.len();
        let found = if count == 1 { "there is 1 GPU".into() } else { format!("there are {count} GPUs") };
        Error::NoDevice { wanted: wanted(), found, source: None }
    })
}

/// The GPUs that answer.
pub(crate) fn devices() -> Vec<DeviceInfo> {
    let all = all().unwrap_or_default();
    all.iter().enumerate().filter_map(|(ordinal, known)| Some(DeviceInfo::clone(&*known.info(ordinal).ok()?))).collect()
}

/// Why it cannot be known how many GPUs there are.
struct NoDriver {
    found: String,
    source: Option<ErrorSource>,
}

fn device_count() -> std::result::Result<usize, NoDriver> {
    if !driver_is_present() {
        let found = "this machine has no CUDA driver (libcuda.so.1 was not found)".into();
        return Err(NoDriver { found, source: None });
    }
    let count = result::init().and_then(|()| result::device::get_count());
    match count {
        Ok(count) => Ok(usize::try_from(count).unwrap_or(0)),
        Err(DriverError(sys::CUresult::CUDA_ERROR_NO_DEVICE)) => Ok(0),
        Err(error) => {
            let found = format!("the driver does not start: {}", text(error));
            Err(NoDriver { found, source: Some(ErrorSource::new(error)) })
        }
    }
}

/// cudarc panics on its first call where the driver's library is missing, and its own check for it exists in only one of
/// its linking modes, which another crate of the program may have changed.
fn driver_is_present() -> bool {
    static PRESENT: OnceCell<bool> = OnceCell::new();
    let name = if cfg!(windows) { "nvcuda.dll" } else { "libcuda.so.1" };
    // SAFETY: the driver's library may be loaded from any thread at any time; cudarc loads the same one.
    *PRESENT.get_or_init(|| unsafe { libloading::Library::new(name) }.is_ok())
}

/// Needs `result::init`, which whoever has an ordinal or a context has called.
fn describe(ordinal: usize) -> std::result::Result<DeviceInfo, DriverError> {
    let device = result::device::get(i32::try_from(ordinal).unwrap_or(i32::MAX))?;
    let attribute = |attribute| -> std::result::Result<u32, DriverError> {
        // SAFETY: `device` came from the driver just now.
        let value = unsafe { result::device::get_attribute(device, attribute) }?;
        Ok(u32::try_from(value).unwrap_or(0))
    };
    let mut version = 0;
    // SAFETY: the pointer is to a live i32.
    unsafe { sys::cuDriverGetVersion(&raw mut version) }.result()?;
    let version = u32::try_from(version).unwrap_or(0);
    let arch = ComputeCapability {
        major: attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
        minor: attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
    };
    let facts = DeviceFacts {
        arch,
        multiprocessors: attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)? as usize,
        l2_bytes: attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)? as usize,
        smem_bytes_per_block: attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?
            as usize,
    };
    Ok(DeviceInfo {
        ordinal,
        name: result::device::get_name(device)?,
        facts,
        // SAFETY: `device` came from the driver just now.
        memory_bytes: unsafe { result::device::total_mem(device) }?,
        driver: (version / 1000, version % 1000 / 10),
    })
}

/// A driver's error as ours, for `map_err`.
pub(crate) fn driver(what: &'static str) -> impl FnOnce(DriverError) -> Error {
    move |error| Error::Driver { what, code: error.0 as u32, text: text(error), source: Some(ErrorSource::new(error)) }
}

/// Whether memory and stream are ordered by one context object. Two objects of one GPU's primary context are equal, but
/// each counts its own streams and so decides alone whether to record events: a kernel on a stream of one would not be
/// seen when memory of the other is freed.
pub(crate) fn same_context(what: &'static str, context: &Arc<CudaContext>, stream: &CudaStream) -> Result<()> {
    if Arc::ptr_eq(context, stream.context()) {
        return Ok(());
    }
    let of = |ordinal: usize| format!("cuda:{ordinal}");
    let same_gpu = **context == **stream.context();
    Err(Error::Device {
        what,
        got: of(context.ordinal()) + if same_gpu { " of another CudaContext" } else { "" },
        allowed: of(stream.context().ordinal()) + ", with the stream's own CudaContext",
    })
}

/// Refuses what would break a capture, or what a capture would break.
pub(crate) fn refuse_capture(stream: &CudaStream, what: &str, allowed: &str) -> Result<()> {
    match stream.capture_status().map_err(driver("asking whether the stream is captured"))? {
        sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE => Ok(()),
        _ => Err(Error::Capture { got: what.into(), allowed: allowed.into() }),
    }
}

fn text(error: DriverError) -> String {
    match error.error_string() {
        Ok(text) => text.to_string_lossy().into_owned(),
        Err(_) => format!("{:?}", error.0),
    }
}
