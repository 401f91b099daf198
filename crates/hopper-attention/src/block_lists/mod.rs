//! Lists of blocks that the host makes of other descriptions of a mask: [`OwnedBlockLists`].

mod documents;
mod owned;
mod slices;
mod spans;

pub use owned::OwnedBlockLists;
pub use slices::{AttnSlice, SliceKind};
