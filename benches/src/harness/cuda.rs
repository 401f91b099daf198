//! The harness on a GPU without PyTorch: everybody through the C entry, by CUDA events, with L2 emptied before each call.

use std::cell::RefCell;
use std::ffi::c_void;
use std::rc::Rc;
use std::sync::Arc;

use anyhow::{Context as _, Result, anyhow};
use hopper_attention::cudarc::driver::sys::CUevent_flags;
use hopper_attention::cudarc::driver::{CudaEvent, CudaSlice, CudaStream, DevicePtr as _, DevicePtrMut as _};
use hopper_attention::{CudaDevice, Operand};
use sha2::{Digest as _, Sha256};

use super::turns::{self, Clock, Contestant, Place, Pool, Refusal, Task};
use super::{Event, Harness, Job, Ready, Sink, WARM_UPS, label_and_path, product};
use crate::entry::{Args, Entry};
use crate::report::{Library, Missing};
use crate::{Precision, Role};

/// Several times any L2.
pub const EVICT_BYTES: usize = 256 << 20;
/// What the entry promises every library.
const WORKSPACE_BYTES: usize = 16 << 20;

/// Our library and the shared objects of peers on one GPU.
pub struct Cuda {
    stream: Arc<CudaStream>,
    device: CudaDevice,
    entries: Vec<(String, Role, Entry)>,
}

impl Cuda {
    /// On this GPU. Its context becomes the thread's, which is where entries look for it.
    ///
    /// # Errors
    /// When the driver refuses.
    pub fn new(device: CudaDevice) -> Result<Self> {
        device.context().bind_to_thread()?;
        // The default stream: with one stream, cudarc records no events of its own into the timed region.
        Ok(Self { stream: device.context().default_stream(), device, entries: vec![] })
    }

    /// The stream that everything runs on.
    pub(super) fn stream(&self) -> &Arc<CudaStream> {
        &self.stream
    }

    /// The GPU.
    pub(super) fn device(&self) -> &CudaDevice {
        &self.device
    }

    /// What is told before the first point.
    pub(super) fn ready(&self, job: &Job, libraries: Vec<Library>, missing: Vec<Missing>) -> Ready {
        let info = self.device.info();
        Ready {
            device: info.name.clone(),
            uuid: self.uuid(),
            versions: [
                ("hopper-attention".into(), env!("CARGO_PKG_VERSION").into()),
                ("driver_cuda".into(), format!("{}.{}", info.driver.0, info.driver.1).into()),
            ]
            .into(),
            method: format!(
                "in turn, iteration by iteration, one process, order rotating; CUDA events around the call, median of {} after \
                 {WARM_UPS} warm-ups; {} MiB written before each call to empty L2, a wait after each round; unit-variance \
                 normal inputs; forward FLOPs 4*s*s*d*h*b, halved when causal, of the pairs kept with a window",
                job.iters,
                EVICT_BYTES >> 20
            ),
            libraries,
            missing,
            cupti: None,
        }
    }

    /// Q, K and V on the GPU.
    pub(super) fn upload<T: Operand>(&self, pool: &Pool<T>) -> Result<Arc<Vec<CudaSlice<T>>>> {
        let copies = [&pool.q, &pool.k, &pool.v].map(|x| self.stream.clone_htod(x));
        Ok(Arc::new(copies.into_iter().collect::<Result<Vec<_>, _>>()?))
    }

    /// Loads what was asked for: who takes part, and who cannot.
    fn load(&mut self, job: &Job) -> (Vec<Library>, Vec<Missing>) {
        let (mut libraries, mut missing) = (Vec::new(), Vec::new());
        if job.ours.is_empty() {
            self.entries.push((crate::NAME.into(), Role::Ours, Entry::own()));
            libraries.push(Library {
                name: crate::NAME.into(),
                role: Role::Ours,
                file: "this program".into(),
                sha256: None,
                version: Some(env!("CARGO_PKG_VERSION").into()),
            });
        }
        let asked =
            job.ours.iter().map(|text| (Role::Ours, text)).chain(job.peers.iter().map(|text| (Role::Peer, text)));
        for (role, text) in asked {
            let (label, path) = label_and_path(text);
            let file = path.rsplit('/').next().unwrap_or(path).to_owned();
            let entry = Entry::load(path).and_then(|entry| {
                let name = label.map_or_else(|| entry.name(), Into::into);
                let taken = self.entries.iter().any(|(other, ..)| *other == name);
                if taken {
                    Err(format!("another is called {name}: name one, as in NAME=PATH"))
                } else {
                    Ok((name, entry))
                }
            });
            match entry {
                Ok((name, entry)) => {
                    let bytes = std::fs::read(path).unwrap_or_default();
                    let sha256 = Some(Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect());
                    libraries.push(Library { name: name.clone(), role, file, sha256, version: None });
                    self.entries.push((name, role, entry));
                }
                Err(error) => missing.push(Missing { name: label.map_or(file, Into::into), role, error }),
            }
        }
        (libraries, missing)
    }

    /// The GPU's UUID as NVML writes it.
    fn uuid(&self) -> Option<String> {
        let bytes = self.device.context().uuid().ok()?.bytes;
        let hex: String = bytes.iter().map(|&byte| format!("{:02x}", byte as u8)).collect();
        Some(format!("GPU-{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]))
    }

    fn ceilings(&self, job: &Job, sink: Sink<'_>) -> Result<()> {
        let mut clock = self.clock()?;
        for dtype in [Precision::Bf16, Precision::F16] {
            if job.points.iter().any(|point| point.dtype == dtype) {
                sink(product::product(&self.stream, dtype, &mut clock)?)?;
            }
        }
        sink(product::copy(&self.stream, &mut clock)?)
    }
}

impl Harness for Cuda {
    fn name(&self) -> &'static str {
        "rust"
    }

    fn run(&mut self, job: &Job, sink: Sink<'_>) -> Result<()> {
        let (libraries, missing) = self.load(job);
        sink(Event::Ready(self.ready(job, libraries, missing)))?;
        self.ceilings(job, sink)?;
        turns::run(self, job, sink)?;
        self.ceilings(job, sink)
    }
}

impl Place for Cuda {
    type Clock = EventClock;

    fn clock(&self) -> Result<EventClock> {
        EventClock::new(self.stream.clone())
    }

    fn contestants<'a, T: Operand<Out = T>>(&'a self, pool: &'a Pool<T>) -> Result<Vec<Box<dyn Contestant<T> + 'a>>> {
        let stream = &self.stream;
        let inputs = self.upload(pool)?;
        let workspace = Rc::new(RefCell::new(stream.alloc_zeros(WORKSPACE_BYTES)?));
        let contestant = |(name, role, entry): &'a (String, Role, Entry)| {
            Ok(Box::new(Through {
                name,
                role: *role,
                entry: *entry,
                stream: stream.clone(),
                inputs: inputs.clone(),
                workspace: workspace.clone(),
                o: stream.clone_htod(&[T::from_f32(f32::NAN)])?,
                lse: stream.clone_htod(&[f32::NAN])?,
                args: None,
            }) as Box<dyn Contestant<T> + 'a>)
        };
        self.entries.iter().map(contestant).collect()
    }
}

/// CUDA events around each call.
pub struct EventClock {
    stream: Arc<CudaStream>,
    evict: CudaSlice<u8>,
    spare: Vec<(CudaEvent, CudaEvent)>,
    pending: Vec<(CudaEvent, CudaEvent)>,
}

impl EventClock {
    /// On a stream.
    ///
    /// # Errors
    /// When memory runs out.
    pub fn new(stream: Arc<CudaStream>) -> Result<Self> {
        Ok(Self { evict: stream.alloc_zeros(EVICT_BYTES)?, stream, spare: vec![], pending: vec![] })
    }

    /// Empties L2, then makes a call between two events.
    ///
    /// # Errors
    /// When the driver or the call fails.
    pub fn between<E: From<anyhow::Error>>(&mut self, call: impl FnOnce() -> Result<(), E>) -> Result<(), E> {
        let event = || self.stream.context().new_event(Some(CUevent_flags::CU_EVENT_DEFAULT));
        let pair = match self.spare.pop() {
            Some(pair) => pair,
            None => (event().map_err(anyhow::Error::from)?, event().map_err(anyhow::Error::from)?),
        };
        self.stream.memset_zeros(&mut self.evict).map_err(anyhow::Error::from)?;
        pair.0.record(&self.stream).map_err(anyhow::Error::from)?;
        call()?;
        pair.1.record(&self.stream).map_err(anyhow::Error::from)?;
        self.pending.push(pair);
        Ok(())
    }

    /// Waits; the milliseconds of each call since the last time.
    ///
    /// # Errors
    /// When the work failed.
    pub fn elapsed(&mut self) -> Result<Vec<f64>> {
        self.stream.synchronize()?;
        let ms = self.pending.iter().map(|(start, end)| Ok(f64::from(start.elapsed_ms(end)?))).collect();
        self.spare.append(&mut self.pending);
        ms
    }
}

impl Clock for EventClock {
    fn time(&mut self, call: &mut dyn FnMut() -> Result<(), Refusal>) -> Result<(), Refusal> {
        self.between(call)
    }

    fn wait(&mut self) -> Result<Vec<f64>> {
        self.elapsed()
    }
}

/// A library through its entry.
struct Through<'a, T> {
    name: &'a str,
    role: Role,
    entry: Entry,
    stream: Arc<CudaStream>,
    inputs: Arc<Vec<CudaSlice<T>>>,
    workspace: Rc<RefCell<CudaSlice<u8>>>,
    o: CudaSlice<T>,
    lse: CudaSlice<f32>,
    args: Option<Args>,
}

impl<T: Operand<Out = T>> Contestant<T> for Through<'_, T> {
    fn name(&self) -> &str {
        self.name
    }

    fn role(&self) -> Role {
        self.role
    }

    fn prepare(&mut self, task: &Task<'_>) -> Result<(), Refusal> {
        let (stream, driver) = (&self.stream, anyhow::Error::from);
        self.o = stream.clone_htod(&vec![T::from_f32(f32::NAN); task.q.span()]).map_err(driver)?;
        self.lse = stream.clone_htod(&vec![f32::NAN; task.lse.span()]).map_err(driver)?;
        let size = |size: usize| i32::try_from(size).map_err(|_| anyhow!("{size} is past the entry's 32 bits"));
        let strides = |layout: &hopper_attention::Layout<4>| {
            let [batch, seqlen, head, _] = layout.stride();
            [batch, seqlen, head]
        };
        let address = |x: &CudaSlice<T>| x.device_ptr(stream).0 as *const c_void;
        let mut workspace = self.workspace.borrow_mut();
        let workspace_bytes = workspace.len() as u64;
        let p = task.point;
        self.args = Some(Args {
            struct_bytes: size_of::<Args>() as u64,
            q: address(&self.inputs[0]),
            k: address(&self.inputs[1]),
            v: address(&self.inputs[2]),
            o: self.o.device_ptr_mut(stream).0 as *mut c_void,
            lse: self.lse.device_ptr_mut(stream).0 as *mut f32,
            q_stride: strides(&task.q),
            k_stride: strides(&task.kv),
            v_stride: strides(&task.kv),
            o_stride: strides(&task.q),
            batch: size(p.batch)?,
            seqlen_q: size(p.seqlen)?,
            seqlen_kv: size(p.seqlen)?,
            heads_q: size(p.heads_q)?,
            heads_kv: size(p.heads_kv)?,
            head_dim_qk: size(p.head_dim)?,
            head_dim_vo: size(p.head_dim)?,
            dtype: match p.dtype {
                Precision::F16 => 0,
                Precision::Bf16 => 1,
            },
            // The C ABI's masks, corners and "without bound".
            mask: if p.window.is_some() { 2 } else { p.causal.into() },
            corner: 0,
            window_left: p.window.map_or(Ok(-1), size)?,
            window_right: if p.window.is_some() { 0 } else { -1 },
            softmax_scale: 1.0 / (p.head_dim as f32).sqrt(),
            reserved: 0,
            stream: stream.cu_stream().cast(),
            workspace: workspace.device_ptr_mut(stream).0 as *mut c_void,
            workspace_bytes,
        });
        Ok(())
    }

    fn call(&mut self, _: &Task<'_>) -> Result<(), Refusal> {
        let args = self.args.context("not prepared")?;
        // SAFETY: the addresses are of live buffers of this stream's context, as large as the layouts reach; all the
        // work is on one stream, which is waited for before they are read or freed.
        let status = unsafe { (self.entry.forward)(&args) };
        match status {
            0 => Ok(()),
            status if Entry::unsupported(status) => Err(Refusal::Unsupported(self.entry.complaint(status))),
            status => Err(Refusal::Failed(self.entry.complaint(status))),
        }
    }

    fn outputs(&mut self) -> Result<(Vec<T>, Vec<f32>)> {
        Ok((self.stream.clone_dtoh(&self.o)?, self.stream.clone_dtoh(&self.lse)?))
    }
}
