//! The CUDA kernels of Hopper Attention, seen from Rust: the tables of what was compiled, and for each a function that
//! loads a row's kernels and one that launches them.
//!
//! This crate validates nothing and promises nothing. It exists so that all C++ is in one place; the crate
//! `hopper-attention` is the one to use, and the only one that calls this one. [`params`] says what a launch relies on.
//!
//! Functions return a [`Status`] rather than throw, and none of them panics.

pub mod params;

pub use params::*;

// Clippy does not see documentation through cxx's macro: the launch functions have their section on safety.
#[allow(clippy::missing_safety_doc)]
#[cxx::bridge(namespace = "hattn::bridge")]
mod ffi {
    // Defined in params.rs. C++ sees them through kernels.hpp, which bridge.h includes.
    #[namespace = "hattn"]
    unsafe extern "C++" {
        include!("hopper-attention-sys/include/bridge.h");

        type FwdParams = crate::params::FwdParams;
        type BwdParams = crate::params::BwdParams;
        type QuantizeParams = crate::params::QuantizeParams;
        type RowInfo = crate::params::RowInfo;
        type QuantizeRowInfo = crate::params::QuantizeRowInfo;
        type Status = crate::params::Status;
    }

    impl Vec<RowInfo> {}
    impl Vec<QuantizeRowInfo> {}

    unsafe extern "C++" {
        /// CUDA's stream; a `CUstream` or `cudaStream_t` points to one.
        #[namespace = ""]
        type CUstream_st;

        /// The compiled forward kernels. A row's index here is its index everywhere.
        fn fwd_rows() -> Vec<RowInfo>;

        /// Loads a row's module on the current device, so that a later launch does not (a lazy load breaks a graph capture).
        fn fwd_prepare(row: u32) -> Status;

        /// Enqueues one forward kernel on a stream of the current context and returns.
        ///
        /// # Safety
        ///
        /// `params` must satisfy what [`params`](crate::params) and its fields say, for this row. Its addresses must be
        /// valid device memory of the current context until the kernel has run. `stream` must be a live stream of that
        /// context or null.
        unsafe fn fwd_launch(row: u32, params: &FwdParams, stream: *mut CUstream_st) -> Status;

        /// The compiled backward kernels, likewise.
        fn bwd_rows() -> Vec<RowInfo>;

        /// As [`fwd_prepare`], of a backward row and the kernels before and after it.
        fn bwd_prepare(row: u32) -> Status;

        /// Enqueues one backward pass on a stream of the current context and returns.
        ///
        /// # Safety
        ///
        /// As [`fwd_launch`], of `BwdParams`.
        unsafe fn bwd_launch(row: u32, params: &BwdParams, stream: *mut CUstream_st) -> Status;

        /// The quantising kernels, by source type.
        fn quantize_rows() -> Vec<QuantizeRowInfo>;

        /// As [`fwd_prepare`], of all kernels of a quantising row.
        fn quantize_prepare(row: u32) -> Status;

        /// Enqueues the quantisation of up to three tensors on a stream of the current context and returns.
        ///
        /// # Safety
        ///
        /// As [`fwd_launch`], of `QuantizeParams`.
        unsafe fn quantize_launch(row: u32, params: &QuantizeParams, stream: *mut CUstream_st) -> Status;

        /// A status in words.
        fn status_text(status: Status) -> String;
    }
}

pub use ffi::{
    CUstream_st, bwd_launch, bwd_prepare, bwd_rows, fwd_launch, fwd_prepare, fwd_rows, quantize_launch,
    quantize_prepare, quantize_rows, status_text,
};
