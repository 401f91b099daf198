//! The threads that compute.
//!
//! The library has a pool of its own, so that it neither uses nor configures rayon's global pool, which belongs to the
//! program. A caller that already runs on a thread of some rayon pool computes on that pool.
//!
//! Threads do not survive `fork`: a child process has a copy of the pool's memory, and none of its threads. So a pool belongs
//! to the process that made it, and a child makes another one. `pool_of_this_process` finds the pool without a lock, because
//! a lock that another thread held during the `fork` would stay locked in the child.

use std::num::NonZero;
use std::process;
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

use once_cell::sync::OnceCell;
use rayon::{ThreadPool, ThreadPoolBuilder};

use super::memory::reserved;
use crate::error::{Error, ErrorSource, Result};

/// Memory that is set aside for each thread that starts. It is far more than a thread needs, so that it is a mapping of its own,
/// which is given back at once.
const BYTES_ASIDE: usize = 256 << 10;

/// The pool of one process.
struct ProcessPool {
    process: u32,
    /// Empty until the threads have been started.
    pool: OnceCell<ThreadPool>,
}

/// The pool of this process, or of an ancestor if this process has not computed yet. Null if no process has.
static LATEST: AtomicPtr<ProcessPool> = AtomicPtr::new(ptr::null_mut());

/// The number of threads that [`install`] computes on.
pub(super) fn count() -> Result<usize> {
    if rayon::current_thread_index().is_some() {
        return Ok(rayon::current_num_threads());
    }
    Ok(pool()?.current_num_threads())
}

/// Calls `work` on a thread of the pool, so that its parallel iterators run on the pool.
pub(super) fn install<R: Send>(work: impl FnOnce() -> R + Send) -> Result<R> {
    if rayon::current_thread_index().is_some() {
        return Ok(work());
    }
    Ok(pool()?.install(work))
}

/// The pool, whose threads are started now if they have not been. If they cannot be started, a later call tries again.
fn pool() -> Result<&'static ThreadPool> {
    pool_of_this_process().pool.get_or_try_init(start)
}

/// Starts the threads, and waits until each has run something.
///
/// A thread allocates some kilobytes for itself when it starts and when it first looks for work. These allocations cannot be
/// refused: without memory they end the process. So memory is set aside for them, and they are over before a run takes the rest.
fn start() -> Result<ThreadPool> {
    let expected = std::thread::available_parallelism().map_or(1, NonZero::get);
    let aside = reserved::<u8>(expected * BYTES_ASIDE)?;
    // The compiler may leave out an allocation that nobody looks at.
    std::hint::black_box(aside.as_ptr());
    let builder = ThreadPoolBuilder::new().thread_name(|index| format!("hattn-{index}"));
    let pool = builder.build().map_err(|error| Error::Threads { source: Some(ErrorSource::new(error)) })?;
    drop(aside);
    pool.broadcast(|_| ());
    Ok(pool)
}

fn pool_of_this_process() -> &'static ProcessPool {
    let process = process::id();
    let latest = LATEST.load(Ordering::Acquire);
    // SAFETY: the pointer is null, or it is from `Box::into_raw` below and never freed.
    if let Some(latest) = unsafe { latest.as_ref() }
        && latest.process == process
    {
        return latest;
    }
    let made = Box::into_raw(Box::new(ProcessPool { process, pool: OnceCell::new() }));
    match LATEST.compare_exchange(latest, made, Ordering::AcqRel, Ordering::Acquire) {
        // An ancestor's pool is never dropped, since its threads are not here to be ended.
        // SAFETY: from `Box::into_raw`, and never freed.
        Ok(_) => unsafe { &*made },
        Err(first) => {
            // Another thread of this process came first.
            // SAFETY: from `Box::into_raw`, and nobody else has seen it.
            drop(unsafe { Box::from_raw(made) });
            // SAFETY: not null, because null is never stored. From `Box::into_raw`, and never freed.
            unsafe { &*first }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_has_one_pool() {
        let here: *const ThreadPool = pool().unwrap();
        let others: Vec<_> = (0..8).map(|_| std::thread::spawn(|| ptr::from_ref(pool().unwrap()).addr())).collect();
        assert!(others.into_iter().all(|other| other.join().unwrap() == here.addr()));
        assert_eq!(count().unwrap(), pool().unwrap().current_num_threads());
    }

    #[test]
    fn a_thread_of_a_pool_computes_on_its_pool() {
        let callers = ThreadPoolBuilder::new().num_threads(3).build().unwrap();
        let (threads, name) = callers.install(|| {
            let name = install(|| std::thread::current().name().map(str::to_owned)).unwrap();
            (count().unwrap(), name)
        });
        assert_eq!((threads, name), (3, None));
        let name = install(|| std::thread::current().name().map(str::to_owned)).unwrap();
        assert!(name.is_some_and(|name| name.starts_with("hattn-")));
    }
}
