//! Counting the driver's calls by CUPTI's callbacks, where its library is on the machine.

use std::collections::BTreeMap;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use anyhow::Result;
use libloading::Library;

/// `CUPTI_CB_DOMAIN_DRIVER_API`.
const DRIVER_API: c_int = 1;
/// `CUPTI_API_ENTER`.
const ENTER: c_int = 0;

/// The front of `CUpti_CallbackData`.
#[repr(C)]
struct CallbackData {
    site: c_int,
    function_name: *const c_char,
}

type Callback = unsafe extern "C" fn(*mut c_void, c_int, u32, *const CallbackData);
type Subscribe = unsafe extern "C" fn(*mut *mut c_void, Callback, *mut c_void) -> c_int;
type EnableDomain = unsafe extern "C" fn(u32, *mut c_void, c_int) -> c_int;
type Unsubscribe = unsafe extern "C" fn(*mut c_void) -> c_int;

/// Calls seen since the last look.
static SEEN: Mutex<BTreeMap<String, u64>> = Mutex::new(BTreeMap::new());

unsafe extern "C" fn count_call(_: *mut c_void, domain: c_int, _: u32, data: *const CallbackData) {
    // SAFETY: CUPTI hands over null or a live struct.
    let Some(data) = (unsafe { data.as_ref() }) else { return };
    if domain != DRIVER_API || data.site != ENTER || data.function_name.is_null() {
        return;
    }
    // SAFETY: a string that lives as long as the library.
    let name = unsafe { CStr::from_ptr(data.function_name) }.to_string_lossy().into_owned();
    *SEEN.lock().unwrap_or_else(PoisonError::into_inner).entry(name).or_default() += 1;
}

/// CUPTI, loaded.
pub(super) struct Counter {
    subscribe: Subscribe,
    enable: EnableDomain,
    unsubscribe: Unsubscribe,
}

impl Counter {
    /// Looks where the system does, and at `beside`.
    pub(super) fn open(beside: Option<&Path>) -> Result<Self, String> {
        let folders = ["/usr/local/cuda/extras/CUPTI/lib64", "/usr/local/cuda/lib64"].map(Path::new);
        let names = ["libcupti.so.13", "libcupti.so.12", "libcupti.so"];
        let beside = beside.map(Path::to_path_buf).into_iter();
        let system = names.iter().map(|name| Path::new(name).to_path_buf());
        let toolkit = folders.iter().flat_map(|folder| names.iter().map(move |name| folder.join(name)));
        for path in beside.chain(system).chain(toolkit) {
            // SAFETY: CUPTI may be loaded at any time.
            let Ok(library) = (unsafe { Library::new(&path) }) else { continue };
            let library = Box::leak(Box::new(library));
            // SAFETY: these names have these types in cupti_callbacks.h.
            let found = unsafe {
                (|| {
                    Ok(Self {
                        subscribe: *library.get::<Subscribe>(b"cuptiSubscribe")?,
                        enable: *library.get::<EnableDomain>(b"cuptiEnableDomain")?,
                        unsubscribe: *library.get::<Unsubscribe>(b"cuptiUnsubscribe")?,
                    })
                })()
            };
            return found.map_err(|error: libloading::Error| error.to_string());
        }
        Err("libcupti was not found; it comes with the CUDA toolkit and with PyTorch".into())
    }

    /// The driver's calls that one `call` makes, on average over `times` of them.
    pub(super) fn count(&self, times: usize, call: &mut dyn FnMut() -> Result<()>) -> Result<BTreeMap<String, f64>> {
        let check = |what: &str, code: c_int| {
            anyhow::ensure!(code == 0, "{what} of CUPTI answered {code}");
            Ok(())
        };
        let mut subscriber = std::ptr::null_mut();
        // SAFETY: a place for the handle, and a function of the type that CUPTI calls.
        check("cuptiSubscribe", unsafe { (self.subscribe)(&mut subscriber, count_call, std::ptr::null_mut()) })?;
        // SAFETY: the handle of just now.
        let enabled = check("cuptiEnableDomain", unsafe { (self.enable)(1, subscriber, DRIVER_API) });
        SEEN.lock().unwrap_or_else(PoisonError::into_inner).clear();
        let called = enabled.and_then(|()| (0..times).try_for_each(|_| call()));
        let seen = std::mem::take(&mut *SEEN.lock().unwrap_or_else(PoisonError::into_inner));
        // SAFETY: as above; it is not used afterwards.
        check("cuptiUnsubscribe", unsafe { (self.unsubscribe)(subscriber) })?;
        called?;
        Ok(seen.into_iter().map(|(name, count)| (name, count as f64 / times as f64)).collect())
    }
}
