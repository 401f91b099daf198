//! An allocator that counts: for tests that hold a run to allocate nothing. A test binary that uses it says
//!
//! ```
//! # use hopper_attention_tests::allocations::Counting;
//! #[global_allocator]
//! static ALLOCATOR: Counting = Counting;
//! ```

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

thread_local! {
    /// Calls of the allocator on this thread, frees included.
    static CALLS: Cell<u64> = const { Cell::new(0) };
}

/// The system's allocator, counted.
pub struct Counting;

impl Counting {
    fn count() {
        // A thread that is ending has no counter any more, and is none of the test's.
        let _ = CALLS.try_with(|calls| calls.set(calls.get() + 1));
    }
}

// SAFETY: every call is the system's allocator's own; the counter has no destructor and allocates nothing.
unsafe impl GlobalAlloc for Counting {
    // SAFETY: the caller's promises are those that the system's allocator asks for, here and below.
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        Self::count();
        // SAFETY: passed on.
        unsafe { System.alloc(layout) }
    }

    // SAFETY: as above.
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        Self::count();
        // SAFETY: passed on.
        unsafe { System.alloc_zeroed(layout) }
    }

    // SAFETY: as above.
    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        Self::count();
        // SAFETY: passed on.
        unsafe { System.realloc(memory, layout, size) }
    }

    // SAFETY: as above.
    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        Self::count();
        // SAFETY: passed on.
        unsafe { System.dealloc(memory, layout) }
    }
}

/// What a call returns, and how often it called the allocator on this thread, frees included. 0 where [`Counting`] is not the
/// allocator.
pub fn counted<R>(call: impl FnOnce() -> R) -> (R, u64) {
    let before = CALLS.get();
    let returned = call();
    (returned, CALLS.get() - before)
}
