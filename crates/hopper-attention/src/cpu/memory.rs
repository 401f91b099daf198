//! Buffers of the backend, whose lack is an error.

use crate::error::Result;

/// An empty vector with a capacity of `len` elements.
pub(super) fn reserved<T>(len: usize) -> Result<Vec<T>> {
    crate::memory::reserved("buffers of the CPU backend", len)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Error;

    #[test]
    fn more_than_there_is_is_an_error() {
        let error = reserved::<f32>(1 << 60).unwrap_err();
        assert_eq!(error, Error::Memory { what: "buffers of the CPU backend", need: 1 << 62 });
    }
}
