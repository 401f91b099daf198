//! Memory whose lack is an error with words. The collections of the standard library end the process instead.

use anyhow::{Context as _, Result};

/// An empty vector with a capacity of so many elements.
///
/// # Errors
/// When there is not so much memory.
pub fn reserved<T>(len: usize) -> Result<Vec<T>> {
    let mut empty = Vec::new();
    empty
        .try_reserve_exact(len)
        .with_context(|| format!("out of memory: {len} elements of {} bytes", size_of::<T>()))?;
    Ok(empty)
}

/// A vector of equal elements.
///
/// # Errors
/// Those of [`reserved`].
pub fn filled<T: Clone>(len: usize, value: T) -> Result<Vec<T>> {
    let mut all = reserved(len)?;
    all.resize(len, value);
    Ok(all)
}

/// A copy.
///
/// # Errors
/// Those of [`reserved`].
pub fn copied<T: Copy>(values: &[T]) -> Result<Vec<T>> {
    let mut all = reserved(values.len())?;
    all.extend_from_slice(values);
    Ok(all)
}

/// Takes so many bytes and gives them back: for work that is about to allocate in collections which cannot refuse.
///
/// # Errors
/// Those of [`reserved`].
pub fn probe(bytes: usize) -> Result<()> {
    // The compiler may leave out an allocation that nobody looks at.
    std::hint::black_box(reserved::<u8>(bytes)?.as_ptr());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn too_much_is_an_error() {
        for bytes in [usize::MAX, isize::MAX as usize] {
            let error = probe(bytes).expect_err("there is not so much memory").to_string();
            assert_eq!(error, format!("out of memory: {bytes} elements of 1 bytes"));
        }
        assert!(filled(usize::MAX / 2, 1.0).is_err());
        assert_eq!(filled(3, 2).expect("three"), [2, 2, 2]);
        assert_eq!(copied(&[1, 2]).expect("two"), [1, 2]);
    }
}
