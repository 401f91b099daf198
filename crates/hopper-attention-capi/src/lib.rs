//! The C ABI of `hopper-attention`. C and C++ programs see it as `hopper_attention.h`, which cbindgen makes of this crate;
//! `README.md` at the root says how to link.
//!
//! Each entry reads its arguments, hands them to the safe crate's problems and plans (all checks live there, once), and
//! turns what comes back into a status and a text. No panic crosses.
//!
//! # The stability of the ABI
//!
//! Within one `HATTN_ABI_VERSION`, the major number of the shared library, functions and constants are only added, and
//! structs only grow at their end. Each struct says how large its caller thinks it is: fields that an older caller does
//! not know are read as 0, which always means what the library did before, and fields that an older library does not
//! know must be 0.

#![deny(missing_docs)]
// The names are C's.
#![allow(non_camel_case_types)]

mod abi;
mod backward;
mod convert;
mod devices;
mod forward;
mod handle;
mod pass;
mod quantize;
mod status;
mod tuning;

pub use abi::*;
pub use backward::*;
pub use devices::*;
pub use forward::*;
pub use quantize::*;
pub use status::*;
pub use tuning::*;
