//! Memory whose lack is an error. The collections of the standard library end the process instead.

use crate::error::{Error, Result};

/// An empty vector with a capacity of `len` elements.
pub(super) fn reserved<T>(len: usize) -> Result<Vec<T>> {
    let mut made = Vec::new();
    let need = len.saturating_mul(size_of::<T>());
    made.try_reserve_exact(len).map_err(|_| Error::Memory { what: "buffers of the CPU backend", need })?;
    Ok(made)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_than_there_is_is_an_error() {
        let error = reserved::<f32>(1 << 60).unwrap_err();
        assert_eq!(error, Error::Memory { what: "buffers of the CPU backend", need: 1 << 62 });
    }
}
