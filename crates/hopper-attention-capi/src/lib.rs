//! The C ABI of `hopper-attention`. C and C++ programs include `hopper_attention.h`, which cbindgen makes of this crate.
//! `hopper_attention_lists.h` beside it has the functions that make lists of blocks, and the mask of dropout.
//! `docs/c.md` in the repository says how to link.
//!
//! Each function reads its arguments, calls the safe crate, and turns the result into a status and a text. The safe crate
//! makes all checks. A panic becomes a status too.
//!
//! # The stability of the ABI
//!
//! `HATTN_ABI_VERSION` is the major number of the shared library. Within one version:
//!
//! - Functions and constants are only added. Structs only grow at their end.
//! - Each struct begins with the size that its caller knows.
//! - Fields that an older caller does not know are read as 0. 0 always means what the library did before.
//! - Fields that an older library does not know must be 0.

#![deny(missing_docs)]
// The names are C's.
#![allow(non_camel_case_types)]

mod abi;
mod backward;
mod convert;
mod devices;
mod dropout;
mod forward;
mod handle;
mod lists;
mod pass;
mod quantize;
mod status;
mod tensor;
mod tuning;

pub use abi::*;
pub use backward::*;
pub use devices::*;
pub use dropout::*;
pub use forward::*;
pub use lists::*;
pub use quantize::*;
pub use status::*;
pub use tensor::*;
pub use tuning::*;
