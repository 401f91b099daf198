//! GPUs, their contexts and their streams, through the CUDA driver. Nothing here panics on a machine without a driver.

use std::ffi::{CStr, c_void};
use std::fmt;
use std::sync::Arc;

use cudarc::driver::sys::{self, CUdevice_attribute};
use cudarc::driver::{CudaContext, CudaSlice, CudaStream, DriverError, result};
use once_cell::sync::OnceCell;

use crate::arch::{ComputeCapability, DeviceFacts, DeviceInfo};
use crate::error::{Error, ErrorSource, Result};

/// A GPU: its context and its properties. Clones share the context.
#[derive(Clone)]
pub struct CudaDevice {
    context: Arc<CudaContext>,
    info: Arc<DeviceInfo>,
}

impl CudaDevice {
    /// Opens the primary context of the GPU with this ordinal.
    ///
    /// # Errors
    /// As [`Device::cuda`](crate::Device::cuda).
    pub fn open(ordinal: usize) -> Result<Self> {
        known(ordinal)?;
        // `CudaContext::new` makes the context current on this thread. That choice is the caller's, so it is undone.
        let _current = Current::keep()?;
        Self::from_context(CudaContext::new(ordinal).map_err(driver("opening the GPU"))?)
    }

    /// As [`open`](Self::open), but the GPU is opened once and kept until the process ends.
    ///
    /// # Errors
    /// As [`Device::cuda`](crate::Device::cuda).
    pub fn shared(ordinal: usize) -> Result<Self> {
        known(ordinal)?.opened.get_or_try_init(|| Self::open(ordinal)).cloned()
    }

    /// The GPU of a context that the caller already has. Plans then work with the streams and the memory of that context.
    ///
    /// # Errors
    /// [`Error::Driver`] when the driver does not give the GPU's properties.
    pub fn from_context(context: Arc<CudaContext>) -> Result<Self> {
        let ordinal = context.ordinal();
        Ok(Self { context, info: known(ordinal)?.info(ordinal)? })
    }

    /// The context. A program makes streams and allocates memory with it.
    pub fn context(&self) -> &Arc<CudaContext> {
        &self.context
    }

    /// Makes this GPU's context current on this thread until the guard is dropped.
    ///
    /// The guard restores the context that was current before. Without this, a program with several GPUs would make its
    /// next allocation on the wrong GPU.
    pub(crate) fn make_current(&self) -> Result<Current> {
        Current::enter(&self.context)
    }

    /// Calls the driver functions that a run calls, once, on the default stream.
    ///
    /// The first call of a driver function looks the function up, and that allocates. A run must not allocate.
    pub(crate) fn look_up_driver(&self) -> Result<()> {
        // An error here means that some stream is being captured. A run asks again, for its own stream.
        let _ = is_captured(&self.context.default_stream());
        self.check_stream(std::ptr::null_mut())
    }

    /// Refuses a stream of another context than this GPU's. This GPU's context must be current.
    ///
    /// Null, `CU_STREAM_LEGACY` and `CU_STREAM_PER_THREAD` name a stream of whichever context is current. So they name one of
    /// this GPU's, and the driver says the same.
    pub(crate) fn check_stream(&self, stream: *mut c_void) -> Result<()> {
        let stream: sys::CUstream = stream.cast();
        let mut context = std::ptr::null_mut();
        // SAFETY: the caller of the raw layer promises a live stream or null. The other pointer is to a local variable.
        let status = unsafe { sys::cuStreamGetCtx(stream, &raw mut context) };
        // The driver gives this error for a stream of a green context: this call cannot name such a context.
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

    /// Refuses a stream of another context than the one in which the plan's kernels were loaded.
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

    /// The properties of the GPU.
    pub fn info(&self) -> &DeviceInfo {
        &self.info
    }
}

/// A guard. When it is dropped, it makes the CUDA context current again that was current when the guard was made.
pub(crate) struct Current(sys::CUcontext);

impl Current {
    fn keep() -> Result<Self> {
        let current = result::ctx::get_current().map_err(driver("asking for the current context"))?;
        Ok(Self(current.unwrap_or(std::ptr::null_mut())))
    }

    /// Makes a context current until the guard is dropped.
    ///
    /// cudarc's `bind_to_thread` does the same, but it first takes the error that another thread may have left in the
    /// context, and fails with that.
    fn enter(context: &CudaContext) -> Result<Self> {
        let before = Self::keep()?;
        if before.0 != context.cu_ctx() {
            // SAFETY: a `CudaContext` owns its context, so that the handle is valid. A context that was destroyed all the
            // same is an error of the driver.
            unsafe { result::ctx::set_current(context.cu_ctx()) }.map_err(driver("making the GPU current"))?;
        }
        Ok(before)
    }
}

/// A guard around calls of cudarc. It keeps apart the errors that other code has left in the context.
///
/// cudarc has one place for an error in each context. A destructor that fails leaves its error there, and the next call of any
/// thread takes the error and fails. The guard takes the error first, and puts it back when it is dropped: the error belongs
/// to whoever asks cudarc next.
pub(crate) struct OthersError<'a> {
    context: &'a CudaContext,
    error: Option<DriverError>,
}

impl<'a> OthersError<'a> {
    /// Takes the error out of the context, if there is one.
    pub fn set_aside(context: &'a CudaContext) -> Self {
        Self { context, error: context.check_err().err() }
    }

    /// Whether an error has been left in the context since. It may come from a call of cudarc under this guard, or from another
    /// thread. Either way, such a call may have done nothing.
    pub fn has_another(&mut self) -> bool {
        let another = self.context.check_err().err();
        self.error = another.or(self.error);
        another.is_some()
    }
}

impl Drop for OthersError<'_> {
    fn drop(&mut self) {
        if let Some(error) = self.error {
            self.context.record_err::<()>(Err(error));
        }
    }
}

impl Drop for Current {
    fn drop(&mut self) {
        // SAFETY: `self.0` is null, or a context that was current when the guard was made. If another thread has destroyed
        // the context meanwhile, the driver returns an error, which is ignored.
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

/// What the process remembers of one GPU. A failure is not remembered: the next call tries again.
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

/// The GPUs whose properties the driver gives.
pub(crate) fn devices() -> Vec<DeviceInfo> {
    let all = all().unwrap_or_default();
    all.iter().enumerate().filter_map(|(ordinal, known)| Some(DeviceInfo::clone(&*known.info(ordinal).ok()?))).collect()
}

/// The reason why the GPUs cannot be counted.
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

/// Whether the driver's library can be loaded.
///
/// This is checked here because the first call of cudarc panics without the library. cudarc has a check of its own, but in
/// one of its linking modes only, and another crate of the program may have chosen a different mode.
fn driver_is_present() -> bool {
    static PRESENT: OnceCell<bool> = OnceCell::new();
    let name = if cfg!(windows) { "nvcuda.dll" } else { "libcuda.so.1" };
    // SAFETY: the driver's library may be loaded from any thread at any time. cudarc loads the same library.
    *PRESENT.get_or_init(|| unsafe { libloading::Library::new(name) }.is_ok())
}

/// Asks the driver for a GPU's properties. `result::init` must have been called: a caller with an ordinal from [`all`], or
/// with a context, has called it.
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

/// Converts a driver's error to this crate's, for `map_err`. `what` says what the library was doing.
pub(crate) fn driver(what: &'static str) -> impl FnOnce(DriverError) -> Error {
    move |error| Error::Driver {
        what,
        code: error.0 as u32,
        name: said(error.error_name(), error),
        text: text(error),
        source: Some(ErrorSource::new(error)),
    }
}

/// Refuses memory whose `CudaContext` object is not the stream's.
///
/// A program may have two `CudaContext` objects of one GPU's primary context. They compare equal, but each one counts its
/// own streams and decides by that count whether to record events. Memory of one object could then be freed while a kernel
/// on a stream of the other object still uses it.
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

/// Whether the stream is captured into a CUDA graph. The stream's context must be current.
pub(crate) fn is_captured(stream: &CudaStream) -> Result<bool> {
    // SAFETY: the `CudaStream` keeps the stream alive.
    let status = unsafe { result::stream::is_capturing(stream.cu_stream()) };
    let status = status.map_err(driver("asking whether the stream is captured"))?;
    Ok(status != sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE)
}

/// Allocates zeroed memory on the stream.
pub(crate) fn alloc_zeros(stream: &Arc<CudaStream>, bytes: usize) -> Result<CudaSlice<u8>> {
    let _current = Current::enter(stream.context())?;
    if is_captured(stream)? {
        let allowed = "allocating before the capture begins";
        return Err(Error::Capture { got: "allocating a workspace".into(), allowed: allowed.into() });
    }
    let mut others = OthersError::set_aside(stream.context());
    let memory = stream.alloc_zeros(bytes).map_err(driver("allocating a workspace"))?;
    if others.has_another() {
        // cudarc may have recorded no event for the zeroing.
        synchronize(stream)?;
    }
    Ok(memory)
}

/// Copies a list to the stream's device. It has at least one number, so that there is memory. Waits for the copy.
pub(crate) fn upload(stream: &Arc<CudaStream>, list: &[i32]) -> Result<CudaSlice<i32>> {
    let _current = Current::enter(stream.context())?;
    if is_captured(stream)? {
        let allowed = "making them before the capture begins";
        return Err(Error::Capture { got: "copying offsets or lengths".into(), allowed: allowed.into() });
    }
    let list = if list.is_empty() { &[0] } else { list };
    let _others = OthersError::set_aside(stream.context());
    let copy = stream.clone_htod(list).map_err(driver("copying offsets or lengths"))?;
    // The list may be pageable memory that its owner writes next.
    synchronize(stream)?;
    Ok(copy)
}

/// A new stream of the context.
pub(crate) fn new_stream(context: &Arc<CudaContext>) -> Result<Arc<CudaStream>> {
    let _current = Current::enter(context)?;
    let _others = OthersError::set_aside(context);
    context.new_stream().map_err(driver("making a stream"))
}

/// Waits until all work of the stream is done.
pub(crate) fn synchronize(stream: &CudaStream) -> Result<()> {
    let _current = Current::enter(stream.context())?;
    // SAFETY: the `CudaStream` keeps the stream alive.
    unsafe { result::stream::synchronize(stream.cu_stream()) }.map_err(driver("waiting for a stream"))
}

fn text(error: DriverError) -> String {
    said(error.error_string(), error)
}

/// What the driver says of an error. A driver that does not know the error says nothing.
fn said(words: std::result::Result<&CStr, DriverError>, error: DriverError) -> String {
    words.map_or_else(|_| format!("{:?}", error.0), |words| words.to_string_lossy().into_owned())
}
