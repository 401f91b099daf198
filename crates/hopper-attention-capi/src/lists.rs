//! Lists of blocks that the library makes on the host: of slices, documents, prefixes, spans, or a dense mask.
//!
//! `include/hopper_attention_lists.h` is made of this file and of `abi/block_lists.rs`.

use hopper_attention::{AttnSlice, DType, Dims, Error, ForwardProblem, OwnedBlockLists, SliceKind};

use crate::abi::{
    HATTN_ABI_VERSION, Versioned, fill, hattn_block_arrays, hattn_dense_mask, hattn_documents, hattn_prefixes,
    hattn_slices, hattn_spans, read,
};
use crate::convert;
use crate::handle::{self, Handle, live};
use crate::status::{Failure, Outcome, entry, hattn_status};

/// Lists of blocks in host memory: the operands of a problem with a block_mask. They do not change. Many threads may use them at
/// once.
pub struct hattn_block_lists {
    lists: OwnedBlockLists,
}

impl Handle for hattn_block_lists {
    type Held = OwnedBlockLists;
    const WHAT: &'static str = "lists";
    const MADE_BY: &'static str = "hattn_block_lists_from_slices or a function like it";

    fn held(&self) -> &OwnedBlockLists {
        &self.lists
    }
}

/// Makes the lists of blocks that keep the pairs that a slice keeps. Writes them to `*lists`, or null on failure.
///
/// All batch entries and heads share the lists. The problem's own mask holds beside them, and is usually HATTN_MASK_FULL. This and
/// the four functions below compute on the host, in the calling thread, and keep nothing of their arguments.
/// hattn_block_lists_destroy frees the lists. Errors:
///
/// - HATTN_ERROR_ARGUMENT: an array is null or misaligned.
/// - HATTN_ERROR_VALUE: a size is negative or too large. A range is not within the sequences, or ends before it starts. A type is
///   not 0 to 3. Two slices keep one pair, which FFA would count twice: the text names both slices and a pair.
/// - HATTN_ERROR_MEMORY: the host has no memory for the lists.
///
/// # Safety
/// `slices` is null, or points to a struct of the size that the struct says. Its arrays are null, or all their elements can be
/// read, and nothing writes them during the call. `lists` is null, or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hattn_block_lists_from_slices(
    slices: *const hattn_slices,
    lists: *mut *mut hattn_block_lists,
) -> hattn_status {
    // SAFETY: the caller's promise, for both.
    unsafe { create("slices", slices, lists, |given| of_slices(given)) }
}

/// Makes the lists of blocks that keep the pairs of one document. Writes them to `*lists`, or null on failure.
///
/// The problem's own mask holds beside them: with HATTN_MASK_CAUSAL tokens attend to earlier ones of their document. With a batch
/// of 1 all batch entries share the lists. Otherwise each has lists of its own. Heads share them. Errors:
///
/// - HATTN_ERROR_ARGUMENT: an array is null or misaligned.
/// - HATTN_ERROR_VALUE: a size is negative or too large.
/// - HATTN_ERROR_MEMORY: the host has no memory for the lists.
///
/// # Safety
/// `documents` is null, or points to a struct of the size that the struct says. Its arrays are null, or all their elements can be
/// read, and nothing writes them during the call. `lists` is null, or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hattn_block_lists_from_documents(
    documents: *const hattn_documents,
    lists: *mut *mut hattn_block_lists,
) -> hattn_status {
    // SAFETY: the caller's promise, for both.
    unsafe { create("documents", documents, lists, |given| of_documents(given)) }
}

/// Makes the lists of blocks that keep what a mask keeps, and the prefix of each batch entry. Writes them to `*lists`, or null on
/// failure.
///
/// Lists only narrow the problem's own mask, so that is HATTN_MASK_FULL. With a batch of 1 all batch entries share the lists.
/// Otherwise each has lists of its own. Heads share them. Errors:
///
/// - HATTN_ERROR_ARGUMENT: an array is null or misaligned. A constant is unknown.
/// - HATTN_ERROR_VALUE: a size is negative or too large. A prefix is not 0 to seqlen_kv. A number of the mask is out of range.
/// - HATTN_ERROR_MEMORY: the host has no memory for the lists.
///
/// # Safety
/// `prefixes` is null, or points to a struct of the size that the struct says. Its arrays are null, or all their elements can be
/// read, and nothing writes them during the call. `lists` is null, or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hattn_block_lists_from_prefixes(
    prefixes: *const hattn_prefixes,
    lists: *mut *mut hattn_block_lists,
) -> hattn_status {
    // SAFETY: the caller's promise, for both.
    unsafe { create("prefixes", prefixes, lists, |given| of_prefixes(given)) }
}

/// Makes the lists of blocks that keep what a mask keeps, and the pairs of one span. Writes them to `*lists`, or null on failure.
///
/// Lists only narrow the problem's own mask, so that is HATTN_MASK_FULL. With a batch of 1 all batch entries share the lists.
/// Otherwise each has lists of its own. Heads share them. Errors:
///
/// - HATTN_ERROR_ARGUMENT: an array is null or misaligned. A constant is unknown.
/// - HATTN_ERROR_VALUE: a size or a count is negative or too large. A span is not within the keys, or ends before it starts. A
///   number of a mask is out of range.
/// - HATTN_ERROR_MEMORY: the host has no memory for the lists.
///
/// # Safety
/// `spans` is null, or points to a struct of the size that the struct says. Its arrays are null, or all their elements can be
/// read, and nothing writes them during the call. `lists` is null, or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hattn_block_lists_from_spans(
    spans: *const hattn_spans,
    lists: *mut *mut hattn_block_lists,
) -> hattn_status {
    // SAFETY: the caller's promise, for both.
    unsafe { create("spans", spans, lists, |given| of_spans(given)) }
}

/// Makes the lists of blocks that keep the pairs that a dense mask keeps. Writes them to `*lists`, or null on failure.
///
/// Every pair is looked at, so this takes longer than the functions above where one of them has the mask. The problem's own mask
/// holds beside the lists. With a batch of 1 all batch entries share them, and with one head all query heads do. Errors:
///
/// - HATTN_ERROR_ARGUMENT: the array is null.
/// - HATTN_ERROR_VALUE: a size is negative or too large, or heads_q is 0. A byte is neither 0 nor 1: the text says which.
/// - HATTN_ERROR_MEMORY: the host has no memory for the lists.
///
/// # Safety
/// `mask` is null, or points to a struct of the size that the struct says. Its array is null, or all its elements can be read,
/// and nothing writes them during the call. `lists` is null, or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hattn_block_lists_from_dense_mask(
    mask: *const hattn_dense_mask,
    lists: *mut *mut hattn_block_lists,
) -> hattn_status {
    // SAFETY: the caller's promise, for both.
    unsafe { create("mask", mask, lists, |given| of_dense_mask(given)) }
}

/// Writes to `*arrays` where the numbers of the lists are, their shapes, and what a problem says of them. All fields of the struct
/// but its size and version are overwritten.
///
/// # Safety
/// `lists` is null or live. `arrays` is null, or points to a struct of the size that the struct says, which can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hattn_block_lists_arrays(
    lists: *const hattn_block_lists,
    arrays: *mut hattn_block_arrays,
) -> hattn_status {
    // SAFETY: the caller's promise, for both.
    entry(|| unsafe { fill("arrays", arrays, &arrays_of(live(lists)?)) })
}

/// Frees lists, and the arrays that hattn_block_lists_arrays showed. `lists` may be null.
///
/// # Safety
/// `lists` is null, or live and not used by any other call, now or later. No run reads its arrays, now or later.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hattn_block_lists_destroy(lists: *mut hattn_block_lists) {
    // SAFETY: the caller's promise.
    unsafe { handle::destroy(lists) };
}

/// Reads a struct, makes lists of it with `make`, and writes their handle to `*lists`.
///
/// # Safety
/// `given` is null, which is refused, or as [`read`] asks. `lists` is null, which is refused, or valid for writing.
unsafe fn create<T: Versioned>(
    what: &str,
    given: *const T,
    lists: *mut *mut hattn_block_lists,
    make: impl FnOnce(&T) -> Outcome<OwnedBlockLists>,
) -> hattn_status {
    entry(|| {
        // SAFETY: the caller's promise.
        let made = || Ok(hattn_block_lists { lists: make(&unsafe { read(what, given) }?)? });
        // SAFETY: the caller's promise.
        unsafe { handle::create(lists, made) }
    })
}

/// # Safety
/// The arrays of the struct are as [`array`] asks.
unsafe fn of_slices(given: &hattn_slices) -> Outcome<OwnedBlockLists> {
    let dims = dims(1, 1, given.seqlen_q, given.seqlen_kv)?;
    let count = convert::size("count", given.count, "0 and above")?;
    // SAFETY: the caller's promise, for all three.
    let (queries, keys, types) = unsafe {
        let queries = array("q_ranges", given.q_ranges, &[count, 2])?;
        (queries, array("k_ranges", given.k_ranges, &[count, 2])?, array("types", given.types, &[count])?)
    };
    let (queries, keys) = (queries.as_chunks().0, keys.as_chunks().0);
    let slices = queries.iter().zip(keys).zip(types).enumerate().map(|(number, ((&queries, &keys), &kind))| {
        let range = |name: &str, [start, end]: [i32; 2], seqlen: usize| {
            let range = usize::try_from(start).and_then(|start| Ok(start..usize::try_from(end)?));
            range.map_err(|_| Error::Value {
                what: "slices",
                got: format!("{name} {start} to {end} of slice {number}"),
                allowed: format!("0 to {seqlen}, and no end before its start"),
            })
        };
        let kind = SliceKind::try_from(kind).map_err(|error| match error {
            Error::Value { got, allowed, .. } => {
                Error::Value { what: "types", got: format!("{got} of slice {number}"), allowed }
            }
            other => other,
        })?;
        let (queries, keys) = (range("queries", queries, dims.seqlen_q)?, range("keys", keys, dims.seqlen_kv)?);
        Ok(AttnSlice::new(queries, keys, kind))
    });
    Ok(OwnedBlockLists::from_slices(dims, &slices.collect::<Result<Vec<_>, Error>>()?)?)
}

/// # Safety
/// The arrays of the struct are as [`array`] asks.
unsafe fn of_documents(given: &hattn_documents) -> Outcome<OwnedBlockLists> {
    let dims = dims(given.batch, 1, given.seqlen_q, given.seqlen_kv)?;
    // SAFETY: the caller's promise, for both.
    let (q_ids, kv_ids) = unsafe {
        let q_ids = array("q_ids", given.q_ids, &[dims.batch, dims.seqlen_q])?;
        (q_ids, array("kv_ids", given.kv_ids, &[dims.batch, dims.seqlen_kv])?)
    };
    Ok(OwnedBlockLists::from_documents(dims, q_ids, kv_ids)?)
}

/// # Safety
/// The arrays of the struct are as [`array`] asks.
unsafe fn of_prefixes(given: &hattn_prefixes) -> Outcome<OwnedBlockLists> {
    let dims = dims(given.batch, 1, given.seqlen_q, given.seqlen_kv)?;
    let window = [given.window_left, given.window_right];
    let mask = convert::mask(convert::MASK, given.mask, given.corner, window)?;
    // SAFETY: the caller's promise.
    let prefixes = unsafe { array("prefixes", given.prefixes, &[dims.batch]) }?;
    Ok(OwnedBlockLists::from_prefixes(dims, mask, prefixes)?)
}

/// # Safety
/// The arrays of the struct are as [`array`] asks.
unsafe fn of_spans(given: &hattn_spans) -> Outcome<OwnedBlockLists> {
    const WITHIN: [&str; 4] = ["within", "within_corner", "within_left", "within_right"];
    let dims = dims(given.batch, 1, given.seqlen_q, given.seqlen_kv)?;
    let mask = convert::mask(convert::MASK, given.mask, given.corner, [given.window_left, given.window_right])?;
    let window = [given.within_left, given.within_right];
    let within = convert::mask(WITHIN, given.within, given.within_corner, window)?;
    // SAFETY: the caller's promise.
    let counts = unsafe { array("counts", given.counts, &[dims.batch]) }?;
    let mut total = 0usize;
    let mut ends = Vec::with_capacity(counts.len());
    for (batch, &count) in counts.iter().enumerate() {
        let count = usize::try_from(count).map_err(|_| Error::Value {
            what: "counts",
            got: format!("{count} of batch entry {batch}"),
            allowed: "0 and above".into(),
        })?;
        total = total.saturating_add(count);
        ends.push(total);
    }
    // SAFETY: the caller's promise.
    let mut rest = unsafe { array("spans", given.spans, &[total, 2]) }?.as_chunks::<2>().0;
    let mut begin = 0;
    let of_batch = ends.iter().map(|&end| {
        let (its, others) = rest.split_at(end - begin);
        (rest, begin) = (others, end);
        its
    });
    Ok(OwnedBlockLists::from_spans(dims, mask, &of_batch.collect::<Vec<_>>(), within)?)
}

/// # Safety
/// The array of the struct is as [`array`] asks.
unsafe fn of_dense_mask(given: &hattn_dense_mask) -> Outcome<OwnedBlockLists> {
    let dims = dims(given.batch, given.heads_q, given.seqlen_q, given.seqlen_kv)?;
    let shape = [dims.batch, dims.heads_q, dims.seqlen_q, dims.seqlen_kv];
    // SAFETY: the caller's promise.
    let kept = unsafe { array("kept", given.kept, &shape) }?;
    if let Some(at) = kept.iter().position(|&byte| byte > 1) {
        let (rows, key) = (at / dims.seqlen_kv, at % dims.seqlen_kv);
        let (heads, query) = (rows / dims.seqlen_q, rows % dims.seqlen_q);
        let place = [heads / dims.heads_q, heads % dims.heads_q, query, key];
        let got = format!("{} at {place:?}", kept[at]);
        return Err(Error::Value { what: "kept", got, allowed: "0 (not kept), 1 (kept)".into() }.into());
    }
    let is_kept = |batch, head, query, key| {
        kept[((batch * dims.heads_q + head) * dims.seqlen_q + query) * dims.seqlen_kv + key] == 1
    };
    Ok(OwnedBlockLists::from_predicate(dims, dims.batch != 1, dims.heads_q != 1, is_kept)?)
}

/// Sizes that a problem may have. Head dims have no part in lists.
fn dims(batch: i64, heads_q: i64, seqlen_q: i64, seqlen_kv: i64) -> Outcome<Dims> {
    let batch = convert::size("batch", batch, "0 and above")?;
    let seqlen_q = convert::size("seqlen_q", seqlen_q, "0 and above")?;
    let dims = Dims::new(batch, seqlen_q, convert::size("heads_q", heads_q, "1 and above")?, 1);
    let dims = dims.with_seqlen_kv(convert::size("seqlen_kv", seqlen_kv, "0 and above")?);
    // The safe crate's limits, before an array is read by these sizes.
    ForwardProblem::builder(DType::F32, dims).build()?;
    Ok(dims)
}

/// An array of the caller, row-major and without gaps. It is not looked at if it has no elements.
///
/// # Safety
/// `pointer` is null or misaligned, which is refused, or as many elements as the shape says can be read, and nobody writes them
/// while the array lives.
unsafe fn array<'a, T>(what: &'static str, pointer: *const T, shape: &[usize]) -> Outcome<&'a [T]> {
    if shape.contains(&0) {
        return Ok(&[]);
    }
    let bytes = shape.iter().try_fold(size_of::<T>(), |bytes, &size| bytes.checked_mul(size));
    let Some(bytes) = bytes.filter(|&bytes| bytes <= isize::MAX as usize) else {
        let (got, allowed) = (format!("shape {shape:?}"), "arrays of less than 2^63 bytes".into());
        return Err(Error::Value { what, got, allowed }.into());
    };
    if pointer.is_null() {
        return Err(Failure::argument(what, "a null pointer", format_args!("an array {shape:?}")));
    }
    if !pointer.is_aligned() {
        let allowed = format_args!("multiples of {} bytes", align_of::<T>());
        return Err(Failure::argument(what, format_args!("address {pointer:p}"), allowed));
    }
    // SAFETY: neither null nor misaligned, so the caller promises the elements. They are no more bytes than a slice may have.
    Ok(unsafe { std::slice::from_raw_parts(pointer, bytes / size_of::<T>()) })
}

fn arrays_of(lists: &OwnedBlockLists) -> hattn_block_arrays {
    let [(_, _, counts), (_, shape, indices), (_, bits_shape, bits), (_, _, full_counts), (_, _, full_indices)] =
        lists.operands();
    let signed = |shape: Vec<usize>| std::array::from_fn(|axis| shape[axis] as i64);
    let form = lists.block_mask();
    hattn_block_arrays {
        struct_size: size_of::<hattn_block_arrays>() as u32,
        abi_version: HATTN_ABI_VERSION,
        block_mask: convert::block_mask_flags(form),
        block_mask_most_partial: form.most_partial() as i32,
        shape: signed(shape),
        bits_shape: signed(bits_shape),
        mask_block_cnt: counts.as_ptr(),
        mask_block_idx: indices.as_ptr(),
        mask_bits: bits.as_ptr(),
        full_block_cnt: full_counts.as_ptr(),
        full_block_idx: full_indices.as_ptr(),
        cnt_elements: counts.len() as i64,
        idx_elements: indices.len() as i64,
        bits_elements: bits.len() as i64,
    }
}

#[cfg(test)]
mod tests;
