//! Which pairs dropout keeps, for programs that check or replay a pass.

use std::slice;

use hopper_attention::reference::DropoutMask;
use hopper_attention::{Dropout, Error, dropout_state};

use crate::convert::size;
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
        let [_, heads_q, seqlen_q, seqlen_kv] = sizes([batch, heads_q, seqlen_q, seqlen_kv], bytes)?;
        if bytes == 0 {
            return Ok(());
        }
        if keep.is_null() {
            return Err(Failure::argument("keep", "null", format!("memory of {bytes} bytes")));
        }
        // SAFETY: not null, and the caller promises so many bytes that nothing else touches.
        let keep = unsafe { slice::from_raw_parts_mut(keep, bytes) };
        let mask = DropoutMask::new(dropout, heads_q, dropout_state(seed, offset));
        for (pair, kept) in keep.iter_mut().enumerate() {
            let (row, key) = (pair / seqlen_kv, pair % seqlen_kv);
            let (plane, query) = (row / seqlen_q, row % seqlen_q);
            *kept = u8::from(mask.keeps(plane / heads_q, plane % heads_q, query, key));
        }
        Ok(())
    })
}

/// The sizes of a mask of so many bytes.
fn sizes(given: [i64; 4], bytes: usize) -> Outcome<[usize; 4]> {
    let (mut sizes, mut pairs) = ([0; 4], 1_i64);
    let is_empty = given.contains(&0); // then there is no pair, whatever stands beside the 0
    for ((what, got), to) in ["batch", "heads_q", "seqlen_q", "seqlen_kv"].into_iter().zip(given).zip(&mut sizes) {
        *to = size(what, got, "0 and above")?;
        let product = if is_empty { Some(0) } else { pairs.checked_mul(got) };
        let (got, allowed) = (got.to_string(), "below 2^63 pairs in all".into());
        pairs = product.ok_or(Error::Value { what, got, allowed })?;
    }
    if u64::try_from(pairs) != Ok(bytes as u64) {
        return Err(Failure::argument("bytes", bytes, format!("{pairs}, a byte for each pair")));
    }
    Ok(sizes)
}
