//! Memory whose lack is an error. The collections of the standard library end the process instead.

use crate::error::{Error, Result};

/// An empty vector with a capacity of `len` elements. `what` names it in the error.
pub(crate) fn reserved<T>(what: &'static str, len: usize) -> Result<Vec<T>> {
    let mut made = Vec::new();
    let need = len.saturating_mul(size_of::<T>());
    made.try_reserve_exact(len).map_err(|_| Error::Memory { what, need })?;
    Ok(made)
}
