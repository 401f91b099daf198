//! Lists of blocks made through C: those of the safe crate bit for bit, what attention makes of them, and what is refused.

use std::ptr::{null, null_mut};

use hopper_attention::{
    AttnSlice, BlockMask, Corner, DType, Device, Dims, ForwardArgs, ForwardProblem, Layout, Mask, OwnedBlockLists,
    Slot, Stream, TensorMut, TensorRef, Workspace,
};
use hopper_attention_capi::*;
use hopper_attention_tests::c::{BlocksMemory, Memory, Plan, Refusal, checked, last_error, problem, tensor};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

/// Lists of the ABI, freed when dropped.
struct Made(*mut hattn_block_lists);

impl Drop for Made {
    fn drop(&mut self) {
        // SAFETY: made by the ABI, and used nowhere after this.
        unsafe { hattn_block_lists_destroy(self.0) };
    }
}

/// A function of the ABI that makes lists.
type Make<T> = unsafe extern "C" fn(*const T, *mut *mut hattn_block_lists) -> hattn_status;

/// Makes lists of a struct whose arrays have as many elements as it says.
fn make<T>(function: Make<T>, given: &T) -> Result<Made, Refusal> {
    let mut lists = null_mut();
    // SAFETY: the caller's struct and arrays.
    let status = unsafe { function(given, &mut lists) };
    let made = checked(status).map(|()| Made(lists));
    assert_eq!(made.is_err(), lists.is_null());
    made
}

fn arrays(lists: &Made) -> hattn_block_arrays {
    let mut arrays = hattn_block_arrays {
        struct_size: size_of::<hattn_block_arrays>() as u32,
        abi_version: HATTN_ABI_VERSION,
        block_mask: -1,
        block_mask_most_partial: -1,
        shape: [-1; 4],
        bits_shape: [-1; 4],
        mask_block_cnt: null(),
        mask_block_idx: null(),
        mask_bits: null(),
        full_block_cnt: null(),
        full_block_idx: null(),
        cnt_elements: -1,
        idx_elements: -1,
        bits_elements: -1,
    };
    // SAFETY: live lists, and a struct of this function.
    checked(unsafe { hattn_block_lists_arrays(lists.0, &mut arrays) }).unwrap();
    arrays
}

/// The arrays of the ABI, in the order of `OwnedBlockLists::operands`.
fn numbers<'a>(lists: &'a Made, arrays: &hattn_block_arrays) -> [&'a [i32]; 5] {
    let _live: &'a Made = lists;
    let hattn_block_arrays { cnt_elements, idx_elements, bits_elements, .. } = *arrays;
    [
        (arrays.mask_block_cnt, cnt_elements),
        (arrays.mask_block_idx, idx_elements),
        (arrays.mask_bits, bits_elements),
        (arrays.full_block_cnt, cnt_elements),
        (arrays.full_block_idx, idx_elements),
    ]
    // SAFETY: the ABI says that there are so many elements as long as the lists live.
    .map(|(pointer, elements)| unsafe { std::slice::from_raw_parts(pointer, usize::try_from(elements).unwrap()) })
}

fn flags(form: BlockMask) -> hattn_block_mask {
    let when = |has, flag| if has { flag } else { 0 };
    HATTN_BLOCK_MASK_LISTS
        | when(form.is_per_batch(), HATTN_BLOCK_MASK_PER_BATCH)
        | when(form.is_per_head(), HATTN_BLOCK_MASK_PER_HEAD)
        | when(form.has_full_blocks(), HATTN_BLOCK_MASK_FULL_BLOCKS)
}

/// Lists of the ABI say what those of the safe crate say.
#[track_caller]
fn same(made: &Made, want: &OwnedBlockLists) {
    let arrays = arrays(made);
    let form = want.block_mask();
    assert_eq!(arrays.block_mask, flags(form));
    assert_eq!(usize::try_from(arrays.block_mask_most_partial).unwrap(), form.most_partial());
    let got = numbers(made, &arrays);
    for ((slot, shape, numbers), got) in want.operands().into_iter().zip(got) {
        let its = if slot == Slot::MaskBits { arrays.bits_shape } else { arrays.shape };
        let shape: Vec<i64> = shape.into_iter().map(|size| size as i64).collect();
        assert_eq!(its[..shape.len()], shape, "{slot}");
        assert!(got == numbers, "{slot} differs");
    }
}

/// Slices in C's words: the ranges of queries, those of keys, and the types.
struct Slices {
    dims: Dims,
    q_ranges: Vec<[i32; 2]>,
    k_ranges: Vec<[i32; 2]>,
    types: Vec<i32>,
}

impl Slices {
    fn random(dims: Dims, count: usize, rng: &mut StdRng) -> Self {
        let mut made = Self { dims, q_ranges: vec![], k_ranges: vec![], types: vec![] };
        for _ in 0..count {
            let mut range = |seqlen: usize| {
                let ends: [i32; 2] = std::array::from_fn(|_| rng.random_range(0..=seqlen as i32));
                [ends[0].min(ends[1]), ends[0].max(ends[1])]
            };
            let (queries, keys) = (range(dims.seqlen_q), range(dims.seqlen_kv));
            made.q_ranges.push(queries);
            made.k_ranges.push(keys);
            made.types.push(rng.random_range(0..4));
        }
        made
    }

    fn c(&self) -> hattn_slices {
        hattn_slices {
            struct_size: size_of::<hattn_slices>() as u32,
            abi_version: HATTN_ABI_VERSION,
            seqlen_q: self.dims.seqlen_q as i64,
            seqlen_kv: self.dims.seqlen_kv as i64,
            count: self.types.len() as i64,
            q_ranges: self.q_ranges.as_ptr().cast(),
            k_ranges: self.k_ranges.as_ptr().cast(),
            types: self.types.as_ptr(),
        }
    }

    fn safe(&self) -> hopper_attention::Result<OwnedBlockLists> {
        let range = |[start, end]: [i32; 2]| start as usize..end as usize;
        let slices = self.q_ranges.iter().zip(&self.k_ranges).zip(&self.types);
        let slices = slices.map(|((&q, &k), &kind)| AttnSlice::new(range(q), range(k), kind.try_into().unwrap()));
        OwnedBlockLists::from_slices(self.dims, &slices.collect::<Vec<_>>())
    }
}

fn dims(batch: usize, seqlen_q: usize, seqlen_kv: usize) -> Dims {
    Dims::new(batch, seqlen_q, 1, 8).with_seqlen_kv(seqlen_kv)
}

#[test]
fn slices_make_the_lists_of_the_safe_crate() {
    let rng = &mut StdRng::seed_from_u64(1);
    let (mut made, mut refused) = (0, 0);
    while made < 40 || refused < 40 {
        let (seqlen_q, seqlen_kv) = (rng.random_range(0..400), rng.random_range(0..400));
        let slices = Slices::random(dims(1, seqlen_q, seqlen_kv), [0, 1, 2, 3, 6][(made + refused) % 5], rng);
        match (slices.safe(), make(hattn_block_lists_from_slices, &slices.c())) {
            (Ok(want), Ok(lists)) => {
                same(&lists, &want);
                made += 1;
            }
            // Slices that keep one pair.
            (Err(want), Err((status, text))) => {
                assert_eq!((status, text), (HATTN_ERROR_VALUE, want.to_string()));
                refused += 1;
            }
            (safe, through_c) => panic!("{safe:?}, and through C {:?}", through_c.err()),
        }
    }
}

fn documents(dims: Dims, q_ids: &[i32], kv_ids: &[i32]) -> hattn_documents {
    hattn_documents {
        struct_size: size_of::<hattn_documents>() as u32,
        abi_version: HATTN_ABI_VERSION,
        batch: dims.batch as i64,
        seqlen_q: dims.seqlen_q as i64,
        seqlen_kv: dims.seqlen_kv as i64,
        q_ids: q_ids.as_ptr(),
        kv_ids: kv_ids.as_ptr(),
    }
}

#[test]
fn documents_make_the_lists_of_the_safe_crate() {
    let rng = &mut StdRng::seed_from_u64(2);
    for (batch, seqlen_q, seqlen_kv) in
        [(1, 300, 300), (3, 140, 400), (2, 1, 130), (0, 5, 5), (2, 0, 7), (2, 7, 0), (2, 0, 0), (1, 0, 0)]
    {
        let dims = dims(batch, seqlen_q, seqlen_kv);
        let mut ids = |seqlen: usize| {
            let mut id = 0;
            let next = |_| {
                if rng.random_range(0..40) == 0 {
                    id = rng.random_range(-1..5);
                }
                id
            };
            (0..batch * seqlen).map(next).collect::<Vec<i32>>()
        };
        let (q_ids, kv_ids) = (ids(seqlen_q), ids(seqlen_kv));
        let made = make(hattn_block_lists_from_documents, &documents(dims, &q_ids, &kv_ids)).unwrap();
        same(&made, &OwnedBlockLists::from_documents(dims, &q_ids, &kv_ids).unwrap());
    }
}

/// Masks, each with its four fields in C.
fn masks() -> [(Mask, hattn_mask, hattn_corner, [i64; 2]); 6] {
    let top_left = Corner::TopLeft;
    let window = |left, right, corner| Mask::Window { left, right, corner };
    [
        (Mask::Full, HATTN_MASK_FULL, HATTN_BOTTOM_RIGHT, [0, 0]),
        (Mask::causal(), HATTN_MASK_CAUSAL, HATTN_BOTTOM_RIGHT, [0, 0]),
        (Mask::Causal { corner: top_left }, HATTN_MASK_CAUSAL, HATTN_TOP_LEFT, [0, 0]),
        (window(Some(30), None, top_left), HATTN_MASK_WINDOW, HATTN_TOP_LEFT, [30, HATTN_UNBOUNDED]),
        (window(Some(90), Some(0), Corner::BottomRight), HATTN_MASK_WINDOW, HATTN_BOTTOM_RIGHT, [90, 0]),
        (Mask::chunked(100), HATTN_MASK_CHUNKED, HATTN_BOTTOM_RIGHT, [100, 0]),
    ]
}

fn prefixes(dims: Dims, lengths: &[i32], mask: (Mask, hattn_mask, hattn_corner, [i64; 2])) -> hattn_prefixes {
    let (_, mask, corner, [window_left, window_right]) = mask;
    hattn_prefixes {
        struct_size: size_of::<hattn_prefixes>() as u32,
        abi_version: HATTN_ABI_VERSION,
        batch: dims.batch as i64,
        seqlen_q: dims.seqlen_q as i64,
        seqlen_kv: dims.seqlen_kv as i64,
        prefixes: lengths.as_ptr(),
        mask,
        corner,
        window_left,
        window_right,
    }
}

#[test]
fn prefixes_make_the_lists_of_the_safe_crate() {
    for (batch, lengths) in [(1, &[129][..]), (3, &[0, 300, 41]), (0, &[])] {
        for mask in masks() {
            let dims = dims(batch, 170, 300);
            let made = make(hattn_block_lists_from_prefixes, &prefixes(dims, lengths, mask)).unwrap();
            same(&made, &OwnedBlockLists::from_prefixes(dims, mask.0, lengths).unwrap());
        }
    }
}

fn spans(
    dims: Dims,
    counts: &[i32],
    of_all: &[[i32; 2]],
    [(_, mask, corner, window), (_, within, within_corner, within_window)]: [(Mask, hattn_mask, hattn_corner, [i64; 2]);
        2],
) -> hattn_spans {
    hattn_spans {
        struct_size: size_of::<hattn_spans>() as u32,
        abi_version: HATTN_ABI_VERSION,
        batch: dims.batch as i64,
        seqlen_q: dims.seqlen_q as i64,
        seqlen_kv: dims.seqlen_kv as i64,
        counts: counts.as_ptr(),
        spans: of_all.as_ptr().cast(),
        mask,
        corner,
        window_left: window[0],
        window_right: window[1],
        within,
        within_corner,
        within_left: within_window[0],
        within_right: within_window[1],
    }
}

#[test]
fn spans_make_the_lists_of_the_safe_crate() {
    let of_batch: [&[&[[i32; 2]]]; 4] =
        [&[&[[3, 150], [200, 260]]], &[&[[0, 299]], &[], &[[5, 5], [100, 140], [120, 300]]], &[&[]], &[]];
    for (turn, its) in of_batch.into_iter().enumerate() {
        let dims = dims(its.len(), 170, 300);
        let counts: Vec<i32> = its.iter().map(|spans| spans.len() as i32).collect();
        let of_all = its.concat();
        for (at, mask) in masks().into_iter().enumerate() {
            let within = masks()[(at + turn * 2) % 6];
            let made = make(hattn_block_lists_from_spans, &spans(dims, &counts, &of_all, [mask, within])).unwrap();
            same(&made, &OwnedBlockLists::from_spans(dims, mask.0, its, within.0).unwrap());
        }
    }
}

fn dense(dims: Dims, kept: &[u8]) -> hattn_dense_mask {
    hattn_dense_mask {
        struct_size: size_of::<hattn_dense_mask>() as u32,
        abi_version: HATTN_ABI_VERSION,
        batch: dims.batch as i64,
        heads_q: dims.heads_q as i64,
        seqlen_q: dims.seqlen_q as i64,
        seqlen_kv: dims.seqlen_kv as i64,
        kept: kept.as_ptr(),
    }
}

#[test]
fn dense_masks_make_the_lists_of_the_safe_crate() {
    let rng = &mut StdRng::seed_from_u64(3);
    for (batch, heads, seqlen_q, seqlen_kv) in
        [(1, 1, 200, 300), (2, 1, 130, 257), (1, 3, 129, 128), (2, 2, 5, 9), (0, 2, 5, 5), (2, 2, 0, 5), (2, 1, 5, 0)]
    {
        let dims = dims(batch, seqlen_q, seqlen_kv).with_heads_q(heads).with_heads_kv(heads);
        let [[_, h], [q, k]] = [[batch, heads], [seqlen_q, seqlen_kv]];
        // Blocks that keep all, nothing, or any pairs.
        let kinds: Vec<u8> =
            (0..batch * heads * q.div_ceil(128) * k.div_ceil(128)).map(|_| rng.random_range(0..3)).collect();
        let mut kept = vec![0u8; batch * heads * q * k];
        for (at, kept) in kept.iter_mut().enumerate() {
            let (rows, key) = (at / k, at % k);
            let block = (rows / q * q.div_ceil(128) + rows % q / 128) * k.div_ceil(128) + key / 128;
            *kept = if kinds[block] == 2 { rng.random_range(0..2) } else { kinds[block] };
        }
        let made = make(hattn_block_lists_from_dense_mask, &dense(dims, &kept)).unwrap();
        let keep = |batch, head, query, key| kept[((batch * h + head) * q + query) * k + key] == 1;
        same(&made, &OwnedBlockLists::from_predicate(dims, batch != 1, heads != 1, keep).unwrap());
    }
}

/// Attention through C, with lists that were made through C, gives what the safe crate gives with its own lists.
#[test]
fn attention_with_the_lists_is_the_safe_crates() {
    let (heads, head_dim) = (2, 16);
    let dims = Dims::new(2, 200, heads, head_dim).with_seqlen_kv(333);
    let rng = &mut StdRng::seed_from_u64(4);
    let ids = |seqlen: usize| (0..2 * seqlen).map(|at| (at / 90 % 3) as i32).collect::<Vec<_>>();
    let (q_ids, kv_ids) = (ids(200), ids(333));
    let lengths = [70, 300];
    let kept: Vec<u8> = (0..2 * heads * 200 * 333).map(|_| rng.random_range(0..2)).collect();
    let keep = |batch, head, query, key| kept[((batch * heads + head) * 200 + query) * 333 + key] == 1;
    let causal = masks()[1];
    let cases = [
        (
            make(hattn_block_lists_from_documents, &documents(dims, &q_ids, &kv_ids)).unwrap(),
            OwnedBlockLists::from_documents(dims, &q_ids, &kv_ids).unwrap(),
            Mask::causal(),
        ),
        (
            make(hattn_block_lists_from_prefixes, &prefixes(dims, &lengths, causal)).unwrap(),
            OwnedBlockLists::from_prefixes(dims, causal.0, &lengths).unwrap(),
            Mask::Full,
        ),
        (
            make(hattn_block_lists_from_dense_mask, &dense(dims, &kept)).unwrap(),
            OwnedBlockLists::from_predicate(dims, true, true, keep).unwrap(),
            Mask::window(Some(250), None),
        ),
    ];
    let (q_layout, kv_layout) = (
        Layout::contiguous([2, 200, heads, head_dim]).unwrap(),
        Layout::contiguous([2, 333, heads, head_dim]).unwrap(),
    );
    let mut values =
        |layout: &Layout<4>| (0..layout.span()).map(|_| rng.random_range(-1.0..1.0f32)).collect::<Vec<_>>();
    let [q, k, v] = [&q_layout, &kv_layout, &kv_layout].map(&mut values);
    for (made, lists, mask) in &cases {
        let options = ForwardProblem::builder(DType::F32, dims).mask(*mask);
        let of = options.block_mask(Some(lists.block_mask())).build().unwrap();
        let mut want = vec![f32::NAN; q.len()];
        let host = |data, layout| TensorRef::host(data, layout).unwrap();
        let out = TensorMut::host(&mut want, q_layout).unwrap();
        let args = ForwardArgs::new(host(&q[..], q_layout), host(&k[..], kv_layout), host(&v[..], kv_layout), out);
        let mut workspace = Workspace::alloc(&Stream::Cpu, 0).unwrap();
        of.plan(&Device::cpu()).unwrap().run(&Stream::Cpu, &mut workspace, lists.add_to(args).unwrap()).unwrap();

        let arrays = arrays(made);
        let mut given = problem(&of);
        (given.block_mask, given.block_mask_most_partial) = (arrays.block_mask, arrays.block_mask_most_partial);
        let mut got = vec![f32::NAN; q.len()];
        let list = |pointer: *const i32, shape: [i64; 4]| {
            tensor(pointer as u64, DType::I32, HATTN_CPU, Layout::contiguous(shape.map(|size| size as usize)).unwrap())
        };
        let counts = |pointer: *const i32| {
            let [a, b, c, _] = arrays.shape.map(|size| size as usize);
            tensor(pointer as u64, DType::I32, HATTN_CPU, Layout::contiguous([a, b, c]).unwrap())
        };
        let float = |pointer: *const f32, layout| tensor(pointer as u64, DType::F32, HATTN_CPU, layout);
        let memory = Memory {
            q: float(q.as_ptr(), q_layout),
            k: float(k.as_ptr(), kv_layout),
            v: float(v.as_ptr(), kv_layout),
            o: float(got.as_mut_ptr(), q_layout),
            lse: None,
            sinks: None,
            alibi_slopes: None,
            max_logits: None,
            bias: None,
            blocks: Some(BlocksMemory {
                partial: [
                    counts(arrays.mask_block_cnt),
                    list(arrays.mask_block_idx, arrays.shape),
                    list(arrays.mask_bits, arrays.bits_shape),
                ],
                full: Some([counts(arrays.full_block_cnt), list(arrays.full_block_idx, arrays.shape)]),
            }),
            dropout_state: None,
            workspace: 0,
            workspace_bytes: 0,
        };
        let plan = Plan::new(&given, HATTN_CPU).unwrap();
        // SAFETY: the addresses and layouts are those of live vectors and lists.
        unsafe { plan.run(&memory, null_mut()) }.unwrap();
        let bits = |data: &[f32]| data.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        assert!(bits(&got) == bits(&want), "{mask}");
        assert!(got.iter().any(|&x| x != 0.0));
    }
}

/// The status and the text of a call that is refused.
fn refused<T: Copy>(function: Make<T>, given: T, edit: impl FnOnce(&mut T)) -> Refusal {
    let mut wrong = given;
    edit(&mut wrong);
    make(function, &wrong).err().expect("a refusal")
}

#[test]
fn slices_are_refused_by_name() {
    let rng = &mut StdRng::seed_from_u64(5);
    let mut slices = Slices::random(dims(1, 10, 20), 2, rng);
    (slices.q_ranges, slices.k_ranges, slices.types) = (vec![[0, 10], [4, 6]], vec![[0, 9], [8, 20]], vec![0, 1]);
    let error = |slices: &Slices, edit: fn(&mut hattn_slices)| refused(hattn_block_lists_from_slices, slices.c(), edit);
    let (status, text) = error(&slices, |_| ());
    assert_eq!(status, HATTN_ERROR_VALUE);
    let both = "slice 0 (full queries 0 to 10 keys 0 to 9) and slice 1 (causal queries 4 to 6 keys 8 to 20) both keep query 4 and \
                key 8";
    assert_eq!(text, format!("slices: {both}; allowed: slices that have no pair in common"));
    slices.k_ranges[1] = [9, 21];
    let text = "slices: keys 9 to 21 of slice 1; allowed: 0 to 20, and no end before its start";
    assert_eq!(error(&slices, |_| ()), (HATTN_ERROR_VALUE, text.into()));
    slices.k_ranges[1] = [-1, 3];
    assert!(error(&slices, |_| ()).1.starts_with("slices: keys -1 to 3 of slice 1; allowed: 0 to 20, and"));
    (slices.k_ranges[1], slices.q_ranges[0]) = ([9, 20], [3, 2]);
    assert!(error(&slices, |_| ()).1.starts_with("slices: queries 3 to 2 of slice 0; allowed: 0 to 10, and"));
    slices.q_ranges[0] = [0, 10];
    assert!(make(hattn_block_lists_from_slices, &slices.c()).is_ok());
    slices.types[1] = 4;
    let text = "types: 4 of slice 1; allowed: 0 (full), 1 (causal), 2 (inverse causal) or 3 (both)";
    assert_eq!(error(&slices, |_| ()), (HATTN_ERROR_VALUE, text.into()));
    let text = "q_ranges: a null pointer; allowed: an array [2, 2]";
    assert_eq!(error(&slices, |c| c.q_ranges = null()), (HATTN_ERROR_ARGUMENT, text.into()));
    assert!(error(&slices, |c| c.k_ranges = null()).1.starts_with("k_ranges: a null pointer"));
    assert_eq!(error(&slices, |c| c.types = null()).1, "types: a null pointer; allowed: an array [2]");
    let text = error(&slices, |c| c.types = c.types.cast::<u8>().wrapping_add(2).cast()).1;
    assert!(text.starts_with("types: address 0x") && text.ends_with("; allowed: multiples of 4 bytes"), "{text}");
    assert_eq!(error(&slices, |c| c.count = -2), (HATTN_ERROR_VALUE, "count: -2; allowed: 0 and above".into()));
    let text = error(&slices, |c| c.count = i64::MAX).1;
    assert!(text.starts_with("q_ranges: shape [9223372036854775807, 2]; allowed: arrays of less"), "{text}");
    let text = "seqlen_q: HATTN_UNSET (-1); allowed: 0 and above";
    assert_eq!(error(&slices, |c| c.seqlen_q = HATTN_UNSET), (HATTN_ERROR_VALUE, text.into()));
    assert!(error(&slices, |c| c.seqlen_kv = 1 << 30).1.contains("seqlen_q + seqlen_kv"));
    assert_eq!(error(&slices, |c| c.struct_size = 48).0, HATTN_ERROR_ABI);
    assert_eq!(error(&slices, |c| c.abi_version = 2).0, HATTN_ERROR_ABI);
    // No slices: their arrays may be null, and nothing is kept.
    slices.types.clear();
    let mut none = slices.c();
    (none.q_ranges, none.k_ranges, none.types) = (null(), null(), null());
    let made = make(hattn_block_lists_from_slices, &none).unwrap();
    assert_eq!(numbers(&made, &arrays(&made)), [&[0][..], &[0], &[], &[0], &[0]]);
}

#[test]
fn other_descriptions_are_refused_by_name() {
    let of_documents = documents(dims(2, 3, 4), &[0; 6], &[0; 8]);
    let error = |edit: fn(&mut hattn_documents)| refused(hattn_block_lists_from_documents, of_documents, edit).1;
    assert_eq!(error(|c| c.q_ids = null()), "q_ids: a null pointer; allowed: an array [2, 3]");
    assert_eq!(error(|c| c.kv_ids = null()), "kv_ids: a null pointer; allowed: an array [2, 4]");
    assert_eq!(error(|c| c.batch = HATTN_UNSET), "batch: HATTN_UNSET (-1); allowed: 0 and above");
    assert_eq!(error(|c| c.batch = 1 << 31), "batch * heads_q: 2147483648 * 1; allowed: below 2^31");

    let lengths = [4, 0];
    let of_prefixes = prefixes(dims(2, 3, 4), &lengths, masks()[1]);
    let error = |edit: fn(&mut hattn_prefixes)| refused(hattn_block_lists_from_prefixes, of_prefixes, edit);
    assert_eq!(error(|c| c.prefixes = null()).1, "prefixes: a null pointer; allowed: an array [2]");
    let text = "prefixes: 4 of batch entry 0; allowed: 0 to 3";
    assert_eq!(error(|c| c.seqlen_kv = 3), (HATTN_ERROR_VALUE, text.into()));
    let (status, text) = error(|c| c.mask = 5);
    assert!(status == HATTN_ERROR_ARGUMENT && text.starts_with("mask: 5; allowed: HATTN_MASK_FULL (0)"), "{text}");
    assert!(error(|c| c.corner = 2).1.starts_with("corner: 2; allowed: HATTN_BOTTOM_RIGHT (0)"));
    let text = error(|c| (c.mask, c.window_left) = (HATTN_MASK_CHUNKED, 0)).1;
    assert_eq!(text, "window_left: 0; allowed: 1 and above with this mask");
    let text = error(|c| (c.mask, c.window_right) = (HATTN_MASK_WINDOW, -2)).1;
    assert_eq!(text, "window_right: -2; allowed: 0 and above, HATTN_UNBOUNDED (-1)");

    let (mut counts, mut of_all) = ([1, 2], [[0, 4], [1, 1], [2, 4]]);
    let error = |counts: &[i32; 2], of_all: &[[i32; 2]; 3], edit: fn(&mut hattn_spans)| {
        let given = spans(dims(2, 3, 4), counts, of_all, [masks()[1], masks()[0]]);
        refused(hattn_block_lists_from_spans, given, edit)
    };
    assert_eq!(error(&counts, &of_all, |c| c.counts = null()).1, "counts: a null pointer; allowed: an array [2]");
    assert_eq!(error(&counts, &of_all, |c| c.spans = null()).1, "spans: a null pointer; allowed: an array [3, 2]");
    assert!(error(&counts, &of_all, |c| c.within = -1).1.starts_with("within: -1; allowed: HATTN_MASK_FULL (0)"));
    assert!(error(&counts, &of_all, |c| c.within_corner = 2).1.starts_with("within_corner: 2; allowed"));
    let text = error(&counts, &of_all, |c| (c.within, c.within_left) = (HATTN_MASK_WINDOW, -3)).1;
    assert_eq!(text, "within_left: -3; allowed: 0 and above, HATTN_UNBOUNDED (-1)");
    of_all[2] = [3, 2];
    let text = "spans: 3 to 2, span 1 of batch entry 1; allowed: 0 to 4, and no end before its start";
    assert_eq!(error(&counts, &of_all, |_| ()), (HATTN_ERROR_VALUE, text.into()));
    counts[1] = -1;
    let text = "counts: -1 of batch entry 1; allowed: 0 and above";
    assert_eq!(error(&counts, &of_all, |_| ()), (HATTN_ERROR_VALUE, text.into()));

    let mut kept = [0u8; 24];
    kept[23] = 2;
    let of_mask = dense(dims(2, 3, 4), &kept);
    let error = |edit: fn(&mut hattn_dense_mask)| refused(hattn_block_lists_from_dense_mask, of_mask, edit);
    let text = "kept: 2 at [1, 0, 2, 3]; allowed: 0 (not kept), 1 (kept)";
    assert_eq!(error(|_| ()), (HATTN_ERROR_VALUE, text.into()));
    let text = "kept: a null pointer; allowed: an array [2, 1, 3, 4]";
    assert_eq!(error(|c| c.kept = null()), (HATTN_ERROR_ARGUMENT, text.into()));
    assert_eq!(error(|c| c.heads_q = 0), (HATTN_ERROR_VALUE, "heads_q: 0; allowed: 1 and above".into()));
}

#[test]
fn null_structs_and_handles_are_refused_by_name() {
    let mut lists = null_mut();
    let ids = [0; 3];
    let given = documents(dims(1, 3, 3), &ids, &ids);
    // SAFETY: nulls, which are refused, and structs of this function.
    unsafe {
        assert_eq!(hattn_block_lists_from_slices(null(), &mut lists), HATTN_ERROR_ARGUMENT);
        assert_eq!(last_error(), "slices: a null pointer; allowed: a pointer to a hattn_slices");
        assert_eq!(hattn_block_lists_from_documents(null(), &mut lists), HATTN_ERROR_ARGUMENT);
        assert_eq!(hattn_block_lists_from_prefixes(null(), &mut lists), HATTN_ERROR_ARGUMENT);
        assert_eq!(hattn_block_lists_from_spans(null(), &mut lists), HATTN_ERROR_ARGUMENT);
        assert_eq!(hattn_block_lists_from_dense_mask(null(), &mut lists), HATTN_ERROR_ARGUMENT);
        assert_eq!(last_error(), "mask: a null pointer; allowed: a pointer to a hattn_dense_mask");
        assert_eq!(hattn_block_lists_from_documents(&given, null_mut()), HATTN_ERROR_ARGUMENT);
        assert_eq!(last_error(), "lists: a null pointer; allowed: where to write the lists");
        let made = make(hattn_block_lists_from_documents, &given).unwrap();
        assert_eq!(hattn_block_lists_arrays(made.0, null_mut()), HATTN_ERROR_ARGUMENT);
        assert_eq!(last_error(), "arrays: a null pointer; allowed: a pointer to a hattn_block_arrays");
        let mut shown = arrays(&made);
        let before = shown;
        assert_eq!(hattn_block_lists_arrays(null(), &mut shown), HATTN_ERROR_ARGUMENT);
        assert!(last_error().starts_with("lists: a null pointer; allowed: one from hattn_block_lists_from_slices"));
        shown.struct_size = 136;
        assert_eq!(hattn_block_lists_arrays(made.0, &mut shown), HATTN_ERROR_ABI);
        assert_eq!((shown.shape, shown.bits_elements), (before.shape, before.bits_elements));
        hattn_block_lists_destroy(null_mut());
    }
}
