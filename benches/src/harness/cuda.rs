//! The harness on a GPU without PyTorch: it calls every library through the C entry. The clock is CUDA events, and
//! L2 is emptied before each call.

mod through;

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

use anyhow::Result;
use hopper_attention::cudarc::driver::{CudaSlice, CudaStream};
use hopper_attention::{CudaDevice, Float};
use sha2::{Digest as _, Sha256};

use super::contest::{Contestants, Place, Pool};
use super::events::{EVICT_BYTES, EventClock};
use super::{Event, FLOPS, Harness, Job, ORDER, Ready, Sink, WARM_UPS, inputs, label_and_path, product, turns};
use crate::entry::Entry;
use crate::report::{Library, Missing};
use crate::{Precision, Role};

/// What the entry promises every library.
pub(super) const WORKSPACE_BYTES: usize = 16 << 20;

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

    /// The event that is sent before the first point.
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
                "in turn, iteration by iteration, one process, {ORDER}; CUDA events around the call, median of {} after \
                 {WARM_UPS} warm-ups; {} MiB written before each call to empty L2, a wait after each round; {}; {FLOPS}",
                job.iters,
                EVICT_BYTES >> 20,
                inputs(job)
            ),
            libraries,
            missing,
            cupti: None,
        }
    }

    /// Q, K, V and dO on the GPU; one element stands for a dO that no point reads.
    pub(super) fn upload<T: Float>(&self, pool: &Pool<T>) -> Result<Arc<Vec<CudaSlice<T>>>> {
        let stand_in = [T::from_f32(f32::NAN)];
        let d_o = if pool.d_o.is_empty() { &stand_in[..] } else { &pool.d_o };
        let copies = [&pool.q, &pool.k, &pool.v, d_o].map(|x| self.stream.clone_htod(x));
        Ok(Arc::new(copies.into_iter().collect::<Result<Vec<_>, _>>()?))
    }

    /// Everybody, with these inputs.
    fn libraries<'a, T: Float>(&'a self, pool: &Pool<T>) -> Result<impl Iterator<Item = through::Library<'a, T>>> {
        let inputs = self.upload(pool)?;
        Ok(self.entries.iter().map(move |(name, role, entry)| through::Library {
            name,
            role: *role,
            entry: *entry,
            stream: self.stream.clone(),
            inputs: inputs.clone(),
        }))
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
        turns::sixteen_bits(job)?;
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

    fn forwards<'a, T: Float>(&'a self, pool: &'a Pool<T>) -> Result<Contestants<'a, T>> {
        let workspace = Rc::new(RefCell::new(self.stream.alloc_zeros(WORKSPACE_BYTES)?));
        self.libraries(pool)?
            .map(|library| Ok(Box::new(through::Forward::new(library, workspace.clone())?) as _))
            .collect()
    }

    fn backwards<'a, T: Float>(&'a self, pool: &'a Pool<T>) -> Result<Contestants<'a, T>> {
        Ok(self.libraries(pool)?.map(|library| Box::new(through::Backward::new(library)) as _).collect())
    }
}
