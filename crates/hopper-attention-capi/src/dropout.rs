//! Which pairs dropout keeps, for programs that check or replay a pass.

use std::slice;

use hopper_attention::reference::DropoutMask;
use hopper_attention::{Dropout, dropout_state};

use crate::status::{Failure, Outcome, entry, hattn_status};

/// Writes which pairs of a query and a key dropout keeps: 1 where a pair is kept, 0 where it is dropped.
///
/// `keep` is `[batch, heads_q, seqlen_q, seqlen_kv]` in host memory, row-major, without gaps. `seed` and `offset` are those of
/// dropout_state. All devices drop the same pairs. The mask of the problem is not looked at. For packed sequences `batch` is how many
/// there are, and `seqlen_q` and `seqlen_kv` are the longest lengths. Entry b is then sequence b, and query 0 and key 0 are its first.
/// Ignore pairs past its lengths. Computes on the host, in the calling thread. Nothing is written on failure:
///
/// - HATTN_ERROR_ARGUMENT: `keep` is null, and there are pairs. Or `bytes` is not the number of pairs.
/// - HATTN_ERROR_VALUE: `dropout` is not a probability from 0 to below 1. A size is negative, or there are 2^63 pairs or more.
///
/// # Safety
/// `keep` is null, or `bytes` bytes can be written there, and nothing else reads or writes them during the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hattn_dropout_mask(
    dropout: f32,
    seed: u64,
    offset: u64,
    batch: i64,
    heads_q: i64,
    seqlen_q: i64,
    seqlen_kv: i64,
    keep: *mut u8,
    bytes: usize,
) -> hattn_status {
    entry(|| {
        let dropout = Dropout::new(dropout)?;
        let [batch, heads_q, seqlen_q, seqlen_kv] = sizes([batch, heads_q, seqlen_q, seqlen_kv], bytes)?;
        if bytes == 0 {
            return Ok(());
        }
        if keep.is_null() {
            return Err(Failure::argument("keep", "null", format!("memory of {bytes} bytes")));
        }
        // SAFETY: not null, and the caller promises so many bytes that nothing else touches.
        let mut keep = unsafe { slice::from_raw_parts_mut(keep, bytes) }.iter_mut();
        let mask = DropoutMask::new(dropout, heads_q, dropout_state(seed, offset));
        for plane in 0..batch * heads_q {
            for pair in 0..seqlen_q * seqlen_kv {
                let kept = mask.keeps(plane / heads_q, plane % heads_q, pair / seqlen_kv, pair % seqlen_kv);
                if let Some(to) = keep.next() {
                    *to = u8::from(kept);
                }
            }
        }
        Ok(())
    })
}

/// The sizes of a mask of so many bytes.
fn sizes(given: [i64; 4], bytes: usize) -> Outcome<[usize; 4]> {
    let names = ["batch", "heads_q", "seqlen_q", "seqlen_kv"];
    let mut pairs = 1_i64;
    for (what, size) in names.into_iter().zip(given) {
        let refused =
            |allowed: &str| hopper_attention::Error::Value { what, got: size.to_string(), allowed: allowed.into() };
        if size < 0 {
            return Err(refused("0 and above").into());
        }
        // (A size of 0 makes no pair, whatever stands beside it.)
        pairs = if given.contains(&0) {
            0
        } else {
            pairs.checked_mul(size).ok_or_else(|| refused("below 2^63 pairs in all"))?
        };
    }
    if u64::try_from(pairs) != Ok(bytes as u64) {
        return Err(Failure::argument("bytes", bytes, format!("{pairs}, a byte for each pair")));
    }
    Ok(given.map(|size| usize::try_from(size).unwrap_or(0)))
}
