//! The card's ceilings without PyTorch: a large matrix product by cuBLAS, where it is on the machine, and a copy.

use std::sync::Arc;

use anyhow::Result;
use hopper_attention::cudarc::cublas::sys::cublasOperation_t::CUBLAS_OP_N;
use hopper_attention::cudarc::cublas::{CudaBlas, Gemm, GemmConfig};
use hopper_attention::cudarc::driver::{CudaStream, DeviceRepr};
use hopper_attention::{Float, bf16, f16};
use rand::rngs::SmallRng;
use rand::{Rng as _, RngCore as _, SeedableRng as _};
use rand_distr::StandardNormal;

use super::events::EventClock;
use super::{Event, WARM_UPS};
use crate::Precision;

/// Rows, columns and depth of the product.
const SIZE: usize = 8192;
/// What is copied.
const COPY_BYTES: usize = 1 << 30;
/// Timings of a ceiling.
const ITERS: usize = 10;

/// A matrix product of a type.
pub(super) fn product(stream: &Arc<CudaStream>, dtype: Precision, clock: &mut EventClock) -> Result<Event> {
    let what = format!("product_{dtype}");
    let absent = |error: String| Ok(Event::Ceiling { what: what.clone(), work: 0.0, ms: vec![], error: Some(error) });
    // cudarc panics on its first call where the library is missing.
    let names = ["libcublas.so", "libcublas.so.13", "libcublas.so.12"];
    // SAFETY: cuBLAS may be loaded at any time; cudarc loads the same one.
    if !names.into_iter().any(|name| unsafe { libloading::Library::new(name) }.is_ok()) {
        return absent("this machine has neither PyTorch nor cuBLAS".into());
    }
    let ms = match dtype {
        Precision::Bf16 => multiply::<bf16>(stream, clock, bf16::ONE, bf16::ZERO),
        Precision::F16 => multiply::<f16>(stream, clock, f16::ONE, f16::ZERO),
        Precision::E4m3 => return absent("without PyTorch there is no product of e4m3".into()),
    };
    match ms {
        Ok(ms) => Ok(Event::Ceiling { what, work: 2.0 * (SIZE as f64).powi(3), ms, error: None }),
        Err(error) => absent(format!("{error:#}")),
    }
}

fn multiply<T: Float + DeviceRepr>(
    stream: &Arc<CudaStream>,
    clock: &mut EventClock,
    one: T,
    zero: T,
) -> Result<Vec<f64>>
where
    CudaBlas: Gemm<T>,
{
    let blas = CudaBlas::new(stream.clone())?;
    let mut rng = SmallRng::seed_from_u64(1);
    // Random data: products of zeros run faster, as they draw less power.
    let values: Vec<T> = (0..SIZE * SIZE).map(|_| T::from_f32(rng.sample(StandardNormal))).collect();
    let (a, b) = (stream.clone_htod(&values)?, stream.clone_htod(&values)?);
    let mut c = stream.clone_htod(&values)?;
    let n = SIZE as i32;
    let config = GemmConfig {
        transa: CUBLAS_OP_N,
        transb: CUBLAS_OP_N,
        m: n,
        n,
        k: n,
        alpha: one,
        lda: n,
        ldb: n,
        beta: zero,
        ldc: n,
    };
    let mut ms = Vec::new();
    for i in 0..WARM_UPS + ITERS {
        // SAFETY: three square matrices of the size that the configuration says.
        clock.between::<anyhow::Error>(|| Ok(unsafe { blas.gemm(config, &a, &b, &mut c) }?))?;
        let took = clock.elapsed()?;
        if i >= WARM_UPS {
            ms.extend(took);
        }
    }
    Ok(ms)
}

/// A copy from device memory to device memory, counting bytes read and written.
pub(super) fn copy(stream: &Arc<CudaStream>, clock: &mut EventClock) -> Result<Event> {
    let mut bytes = vec![0u8; COPY_BYTES];
    SmallRng::seed_from_u64(1).fill_bytes(&mut bytes);
    let source = stream.clone_htod(&bytes)?;
    let mut target = stream.alloc_zeros::<u8>(COPY_BYTES)?;
    let mut ms = Vec::new();
    for i in 0..WARM_UPS + ITERS {
        clock.between::<anyhow::Error>(|| Ok(stream.memcpy_dtod(&source, &mut target)?))?;
        let took = clock.elapsed()?;
        if i >= WARM_UPS {
            ms.extend(took);
        }
    }
    Ok(Event::Ceiling { what: "copy".into(), work: 2.0 * COPY_BYTES as f64, ms, error: None })
}
