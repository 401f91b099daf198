//! Counting the driver's calls by CUPTI's callbacks, where its library is on the machine.

use std::collections::BTreeMap;
use std::ffi::{CStr, c_void};
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use anyhow::Result;
use hopper_attention::cudarc::cupti::result::{CuptiError, enable_domain, subscribe, unsubscribe};
use hopper_attention::cudarc::cupti::sys::{
    CUpti_ApiCallbackSite, CUpti_CallbackData, CUpti_CallbackDomain, CUpti_CallbackId, culib, is_culib_present,
};
use libloading::Library;

/// Calls seen since the last look.
static SEEN: Mutex<BTreeMap<String, u64>> = Mutex::new(BTreeMap::new());

unsafe extern "C" fn count_call(
    _: *mut c_void,
    domain: CUpti_CallbackDomain,
    _: CUpti_CallbackId,
    data: *const c_void,
) {
    if domain != CUpti_CallbackDomain::CUPTI_CB_DOMAIN_DRIVER_API {
        return;
    }
    // SAFETY: of this domain CUPTI hands over null or a live struct of this type.
    let Some(data) = (unsafe { data.cast::<CUpti_CallbackData>().as_ref() }) else { return };
    if data.callbackSite != CUpti_ApiCallbackSite::CUPTI_API_ENTER || data.functionName.is_null() {
        return;
    }
    // SAFETY: a string that lives as long as the library.
    let name = unsafe { CStr::from_ptr(data.functionName) }.to_string_lossy().into_owned();
    *SEEN.lock().unwrap_or_else(PoisonError::into_inner).entry(name).or_default() += 1;
}

/// CUPTI, found: cudarc's functions may be called.
pub(super) struct Counter(());

impl Counter {
    /// Looks at `beside`, where the system looks, and where toolkits are installed.
    pub(super) fn open(beside: Option<&Path>) -> Result<Self, String> {
        let folders = ["/usr/local/cuda/extras/CUPTI/lib64", "/usr/local/cuda/lib64"].map(Path::new);
        let names = ["libcupti.so.13", "libcupti.so.12", "libcupti.so"];
        let beside = beside.map(Path::to_path_buf).into_iter();
        let system = names.iter().map(|name| Path::new(name).to_path_buf());
        let toolkit = folders.iter().flat_map(|folder| names.iter().map(move |name| folder.join(name)));
        for path in beside.chain(system).chain(toolkit) {
            // SAFETY: CUPTI may be loaded at any time.
            let Ok(library) = (unsafe { Library::new(&path) }) else { continue };
            // It stays loaded. cudarc asks the system for names alone, and the system answers with a library that is loaded under
            // the name, wherever it came from. cudarc panics where it finds none, so it is asked first.
            std::mem::forget(library);
            // SAFETY: as above.
            if unsafe { is_culib_present() } {
                return Self::whole();
            }
        }
        Err("libcupti was not found; it comes with the CUDA toolkit and with PyTorch".into())
    }

    /// Where cudarc's library has what is called below; cudarc would panic at the first call.
    fn whole() -> Result<Self, String> {
        for name in ["cuptiSubscribe", "cuptiEnableDomain", "cuptiUnsubscribe"] {
            // SAFETY: the library is there; the function is looked up and not called.
            let found = unsafe { culib().get::<unsafe extern "C" fn()>(name) };
            found.map_err(|error| format!("libcupti has no {name}: {error}"))?;
        }
        Ok(Self(()))
    }

    /// The driver's calls that one `call` makes, on average over `times` of them.
    pub(super) fn count(&self, times: usize, call: &mut dyn FnMut() -> Result<()>) -> Result<BTreeMap<String, f64>> {
        let check = |what: &str, done: Result<(), CuptiError>| {
            done.map_err(|CuptiError(code)| anyhow::anyhow!("{what} of CUPTI answered {code:?}"))
        };
        let mut subscriber = std::ptr::null_mut();
        // SAFETY: a place for the handle, and a function of the type that CUPTI calls.
        check("cuptiSubscribe", unsafe { subscribe(&mut subscriber, Some(count_call), std::ptr::null_mut()) })?;
        // SAFETY: the handle of just now.
        let enabled = unsafe { enable_domain(1, subscriber, CUpti_CallbackDomain::CUPTI_CB_DOMAIN_DRIVER_API) };
        let enabled = check("cuptiEnableDomain", enabled);
        SEEN.lock().unwrap_or_else(PoisonError::into_inner).clear();
        let called = enabled.and_then(|()| (0..times).try_for_each(|_| call()));
        let seen = std::mem::take(&mut *SEEN.lock().unwrap_or_else(PoisonError::into_inner));
        // SAFETY: as above; it is not used afterwards.
        check("cuptiUnsubscribe", unsafe { unsubscribe(subscriber) })?;
        called?;
        Ok(seen.into_iter().map(|(name, count)| (name, count as f64 / times as f64)).collect())
    }
}
