//! Lists of blocks that the host makes of slices, documents, prefixes and spans: compared with dense masks, pair by pair.

use hopper_attention::reference::{self, Modifiers, Tensor};
use hopper_attention::{
    AttnSlice, BlockLists, BlockMask, DType, Device, Dims, ForwardArgs, ForwardProblem, Layout, Lengths, MASK_BLOCK,
    MASK_BLOCK_WORDS, Mask, OwnedBlockLists, SliceKind, Stream, TensorMut, TensorRef, Workspace,
};
use proptest::prelude::*;

mod common;

use common::{dense, kept, values};

/// What lists say of a block.
#[derive(Clone, Debug, PartialEq)]
enum Block {
    Hidden,
    Full,
    Partial(Vec<bool>),
}

/// Lists read by their definition, and by no code of the library: `[B, H, Qb, Kb]`.
fn read(dims: Dims, lists: &OwnedBlockLists) -> Vec<Block> {
    let form: BlockMask = lists.block_mask();
    let BlockLists { counts, indices, bits, full } = lists.as_lists();
    let (full_counts, full) = full.unwrap();
    assert!(form.has_full_blocks());
    let kv_blocks = dims.seqlen_kv.div_ceil(MASK_BLOCK);
    let mut table = vec![Block::Hidden; counts.len() * kv_blocks];
    for row in 0..counts.len() {
        for &block in &full[row * kv_blocks..][..full_counts[row] as usize] {
            let at = &mut table[row * kv_blocks + block as usize];
            assert_eq!(std::mem::replace(at, Block::Full), Block::Hidden);
        }
        for (n, &block) in indices[row * kv_blocks..][..counts[row] as usize].iter().enumerate() {
            let words = &bits[(row * form.most_partial() + n) * MASK_BLOCK_WORDS..][..MASK_BLOCK_WORDS];
            let pairs = words.iter().flat_map(|&word| (0..32).map(move |bit| word as u32 >> bit & 1 == 1)).collect();
            let at = &mut table[row * kv_blocks + block as usize];
            assert_eq!(std::mem::replace(at, Block::Partial(pairs)), Block::Hidden);
        }
    }
    let most = counts.iter().copied().max().unwrap_or(0);
    assert_eq!(most as usize, form.most_partial());
    table
}

/// What they must say, pair by pair. `keep(batch, query, key)`: heads share the lists.
fn expected(dims: Dims, batch: usize, keep: impl Fn(usize, usize, usize) -> bool) -> Vec<Block> {
    let [q_blocks, kv_blocks] = [dims.seqlen_q, dims.seqlen_kv].map(|len| len.div_ceil(MASK_BLOCK));
    let mut table = Vec::new();
    for (b, q_block, kv_block) in
        (0..batch).flat_map(|b| (0..q_blocks).flat_map(move |q| (0..kv_blocks).map(move |kv| (b, q, kv))))
    {
        let (mut kept, mut pairs) = (vec![false; MASK_BLOCK * MASK_BLOCK], 0);
        for i in 0..MASK_BLOCK.min(dims.seqlen_q - q_block * MASK_BLOCK) {
            for j in 0..MASK_BLOCK.min(dims.seqlen_kv - kv_block * MASK_BLOCK) {
                kept[i * MASK_BLOCK + j] = keep(b, q_block * MASK_BLOCK + i, kv_block * MASK_BLOCK + j);
                pairs += 1;
            }
        }
        table.push(match kept.iter().filter(|&&kept| kept).count() {
            0 => Block::Hidden,
            all if all == pairs => Block::Full,
            _ => Block::Partial(kept),
        });
    }
    table
}

/// Compares lists with a dense mask, and with the lists that the slow function makes of it.
#[track_caller]
fn check(dims: Dims, lists: &OwnedBlockLists, keep: impl Fn(usize, usize, usize) -> bool) {
    let per_batch = lists.block_mask().is_per_batch();
    assert!(!lists.block_mask().is_per_head());
    let batch = if per_batch { dims.batch } else { 1 };
    let (got, want) = (read(dims, lists), expected(dims, batch, &keep));
    let wrong = got.iter().zip(&want).position(|(got, want)| got != want);
    assert!(got.len() == want.len() && wrong.is_none(), "block {wrong:?} of {}", want.len());
    let slow = OwnedBlockLists::from_predicate(dims, per_batch, false, |b, _, q, kv| keep(b, q, kv)).unwrap();
    assert_eq!(*lists, slow);
}

/// The definition of slices, over all pairs of the tensors.
fn sliced(slice: &AttnSlice, q: usize, kv: usize) -> bool {
    let [q, kv, q0, q1, k0, k1] =
        [q, kv, slice.queries.start, slice.queries.end, slice.keys.start, slice.keys.end].map(|n| n as i64);
    // Counted from the corner of the slice's own matrix.
    let (i, j, rows, columns) = (q - q0, kv - k0, q1 - q0, k1 - k0);
    let bottom_right = j <= i + columns - rows;
    let top_left = j >= i;
    (0..rows).contains(&i)
        && (0..columns).contains(&j)
        && match slice.kind {
            SliceKind::Full => true,
            SliceKind::Causal => bottom_right,
            SliceKind::InverseCausal => top_left,
            SliceKind::BiCausal => bottom_right && top_left,
        }
}

const KINDS: [SliceKind; 4] = [SliceKind::Full, SliceKind::Causal, SliceKind::InverseCausal, SliceKind::BiCausal];

#[test]
fn kinds_of_slices_by_hand() {
    let drawn = |queries: usize, keys: usize, kind| {
        let dims = Dims::new(1, queries, 1, 8).with_seqlen_kv(keys);
        let lists = OwnedBlockLists::from_slices(dims, &[AttnSlice::new(0..queries, 0..keys, kind)]).unwrap();
        let table = read(dims, &lists);
        let row = |q: usize| {
            let kept = |kv: usize| match &table[0] {
                Block::Hidden => '.',
                Block::Full => 'x',
                Block::Partial(pairs) => ['.', 'x'][usize::from(pairs[q * MASK_BLOCK + kv])],
            };
            (0..keys).map(kept).collect::<String>()
        };
        (0..queries).map(row).collect::<Vec<_>>().join(" ")
    };
    assert_eq!(drawn(2, 4, SliceKind::Full), "xxxx xxxx");
    assert_eq!(drawn(2, 4, SliceKind::Causal), "xxx. xxxx");
    assert_eq!(drawn(4, 2, SliceKind::Causal), ".. .. x. xx");
    assert_eq!(drawn(2, 4, SliceKind::InverseCausal), "xxxx .xxx");
    assert_eq!(drawn(4, 2, SliceKind::InverseCausal), "xx .x .. ..");
    assert_eq!(drawn(2, 4, SliceKind::BiCausal), "xxx. .xxx");
    assert_eq!(drawn(3, 3, SliceKind::BiCausal), "x.. .x. ..x");
    assert_eq!(drawn(4, 2, SliceKind::BiCausal), ".. .. .. ..");
    for (number, kind) in (0..).zip(KINDS) {
        assert_eq!(SliceKind::try_from(number), Ok(kind));
    }
    let text = SliceKind::try_from(4).unwrap_err().to_string();
    assert_eq!(text, "type of a slice: 4; allowed: 0 (full), 1 (causal), 2 (inverse causal) or 3 (both)");
}

#[test]
fn slices_of_one_range_of_queries_are_one_row_of_lists() {
    let dims = Dims::new(2, 400, 2, 8).with_seqlen_kv(700);
    // Three slices share queries. The first two have meeting rectangles that no pair is in twice: keys up to a diagonal, and
    // keys behind the diagonal that is one key to the right of it.
    let slices = [
        AttnSlice::new(10..300, 0..290, SliceKind::Causal),
        AttnSlice::new(10..300, 1..291, SliceKind::InverseCausal),
        AttnSlice::new(10..300, 291..640, SliceKind::Full),
        AttnSlice::new(300..400, 5..700, SliceKind::BiCausal),
        AttnSlice::new(7..7, 3..50, SliceKind::Full),
    ];
    let keep = |_, q, kv| slices.iter().any(|slice| sliced(slice, q, kv));
    let lists = OwnedBlockLists::from_slices(dims, &slices).unwrap();
    check(dims, &lists, keep);
    // The block of queries 128 to 255 keeps every key to 639: full blocks, although three slices make them.
    let BlockLists { counts, full, .. } = lists.as_lists();
    assert_eq!((counts[1], full.unwrap().0[1], &full.unwrap().1[6..12]), (0, 5, &[0, 1, 2, 3, 4, 0][..]));
}

#[test]
fn slices_that_keep_a_pair_twice_are_refused_by_name() {
    let dims = Dims::new(1, 300, 1, 8);
    let refused = |slices: &[AttnSlice]| OwnedBlockLists::from_slices(dims, slices).unwrap_err().to_string();
    let slices = [
        AttnSlice::new(0..100, 0..50, SliceKind::Full),
        AttnSlice::new(140..300, 0..160, SliceKind::Causal),
        AttnSlice::new(140..300, 0..160, SliceKind::InverseCausal),
    ];
    let text = "slices: slice 1 (causal queries 140 to 300 keys 0 to 160) and slice 2 (inverse causal queries 140 to 300 keys 0 \
                to 160) both keep query 140 and key 0; allowed: slices that have no pair in common";
    assert_eq!(refused(&slices), text);
    // One pair alone, the diagonal's last.
    let slices =
        [AttnSlice::new(0..300, 0..300, SliceKind::Causal), AttnSlice::new(299..300, 299..300, SliceKind::Full)];
    assert!(refused(&slices).contains("both keep query 299 and key 299"));
    let of = |queries, keys| refused(&[AttnSlice::default(), AttnSlice::new(queries, keys, SliceKind::Full)]);
    #[allow(clippy::reversed_empty_ranges, reason = "what is refused")]
    let reversed = of(5..3, 0..1);
    assert_eq!(reversed, "slices: queries 5 to 3 of slice 1; allowed: 0 to 300, and no end before its start");
    let text = "slices: keys 0 to 301 of slice 1; allowed: 0 to 300, and no end before its start";
    assert_eq!(of(0..1, 0..301), text);
}

#[test]
fn documents_need_not_be_in_one_piece() {
    let dims = Dims::new(2, 300, 2, 8).with_seqlen_kv(520);
    let id = |batch: usize, token: usize| match token {
        0..=30 if batch == 1 => -1,
        200..=240 => 7,
        _ => (token / (90 + 40 * batch)) as i32,
    };
    let ids = |seqlen: usize| (0..2).flat_map(|b| (0..seqlen).map(move |token| id(b, token))).collect::<Vec<_>>();
    let lists = OwnedBlockLists::from_documents(dims, &ids(300), &ids(520)).unwrap();
    assert!(lists.block_mask().is_per_batch());
    check(dims, &lists, |b, q, kv| id(b, q) == id(b, kv) && id(b, q) >= 0);
    // Shared by all batch entries.
    let lists = OwnedBlockLists::from_documents(dims, &ids(300)[..300], &ids(520)[..520]).unwrap();
    check(dims, &lists, |_, q, kv| id(0, q) == id(0, kv));
    let text = OwnedBlockLists::from_documents(dims, &ids(300), &ids(519)).unwrap_err().to_string();
    assert_eq!(text, "kv_ids: shape [1038], expected [2, 520] [batch, seqlen]");
    // Documents of single tokens, in turns: no two keys of a document meet.
    let dims = Dims::new(1, 260, 1, 8);
    let ids: Vec<i32> = (0..260).map(|token| token % 3).collect();
    check(dims, &OwnedBlockLists::from_documents(dims, &ids, &ids).unwrap(), |_, q, kv| q % 3 == kv % 3);
}

fn masks() -> impl Strategy<Value = Mask> {
    use hopper_attention::Corner;
    let corner = || prop_oneof![Just(Corner::BottomRight), Just(Corner::TopLeft)];
    let bound = || proptest::option::of(0usize..300);
    prop_oneof![
        Just(Mask::Full),
        corner().prop_map(|corner| Mask::Causal { corner }),
        (bound(), bound(), corner()).prop_map(|(left, right, corner)| Mask::Window { left, right, corner }),
        (1usize..200, corner()).prop_map(|(chunk, corner)| Mask::Chunked { chunk, corner }),
        (0usize..200, corner()).prop_map(|(keys, corner)| Mask::Prefix { keys, corner }),
    ]
}

fn range(end: usize) -> impl Strategy<Value = std::ops::Range<usize>> {
    // Ends of blocks are likely.
    let place = move || prop_oneof![0..=end, (0..=end / 128).prop_map(move |block| (block * 128).min(end)), Just(end)];
    (place(), place()).prop_map(|(a, b)| a.min(b)..a.max(b))
}

fn sizes() -> impl Strategy<Value = Dims> {
    (1usize..4, 0usize..300, 0usize..300).prop_map(|(batch, q, kv)| Dims::new(batch, q, 2, 8).with_seqlen_kv(kv))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: kept().cases.min(64), ..kept() })]

    /// Either no pair is kept twice and the lists are the dense mask's, or the error names a pair that two slices keep.
    #[test]
    fn slices_keep_what_their_definition_keeps(
        (dims, slices) in sizes().prop_flat_map(|dims| {
            let slice = (range(dims.seqlen_q), range(dims.seqlen_kv), 0usize..4)
                .prop_map(|(queries, keys, kind)| AttnSlice::new(queries, keys, KINDS[kind]));
            (Just(dims), proptest::collection::vec(slice, 0..4))
        }),
    ) {
        let of = |q, kv| (0..slices.len()).filter(|&n| sliced(&slices[n], q, kv)).collect::<Vec<_>>();
        let twice = (0..dims.seqlen_q)
            .flat_map(|q| (0..dims.seqlen_kv).map(move |kv| (q, kv)))
            .find(|&(q, kv)| of(q, kv).len() > 1);
        match OwnedBlockLists::from_slices(dims, &slices) {
            Ok(lists) => {
                prop_assert_eq!(twice, None);
                check(dims, &lists, |_, q, kv| !of(q, kv).is_empty());
            }
            Err(error) => {
                let (q, kv) = twice.expect("a pair that is kept twice");
                let text = error.to_string();
                // The first such query. Of its keys the library may name another.
                let named = text.split("both keep query ").nth(1).and_then(|text| text.split(';').next()).unwrap();
                let (query, key) = named.split_once(" and key ").unwrap();
                prop_assert_eq!(query.parse::<usize>().unwrap(), q);
                prop_assert!(key.parse::<usize>().unwrap() >= kv);
                let its = of(q, key.parse().unwrap());
                let both: Vec<usize> = (0..slices.len()).filter(|n| text.contains(&format!("slice {n} ("))).collect();
                prop_assert!(both.len() == 2 && both.iter().all(|n| its.contains(n)), "{}", text);
            }
        }
    }

    #[test]
    fn prefixes_widen_a_mask(dims in sizes(), mask in masks(), share in 0usize..=100) {
        let prefix = |batch: usize| (share * dims.seqlen_kv / 100 + batch * 17).min(dims.seqlen_kv);
        let prefixes: Vec<i32> = (0..dims.batch).map(|batch| prefix(batch) as i32).collect();
        let lists = OwnedBlockLists::from_prefixes(dims, mask, &prefixes).unwrap();
        check(dims, &lists, |b, q, kv| kv < prefix(b) || mask.keep(q, kv, dims.seqlen_q, dims.seqlen_kv));
    }

    #[test]
    fn spans_see_each_other(
        (dims, spans) in sizes().prop_flat_map(|dims| {
            let spans = proptest::collection::vec(range(dims.seqlen_kv), 0..4);
            (Just(dims), proptest::collection::vec(spans, dims.batch))
        }),
        mask in masks(),
        within in prop_oneof![Just(Mask::Full), masks()],
    ) {
        let numbers: Vec<Vec<[i32; 2]>> =
            spans.iter().map(|its| its.iter().map(|keys| [keys.start as i32, keys.end as i32]).collect()).collect();
        let lists = OwnedBlockLists::from_spans(dims, mask, &numbers, within).unwrap();
        let offset = match mask.corner() {
            Some(hopper_attention::Corner::TopLeft) => 0,
            _ => dims.seqlen_kv as i64 - dims.seqlen_q as i64,
        };
        check(dims, &lists, |b, q, kv| {
            let own = q as i64 + offset;
            let has_own = |keys: &std::ops::Range<usize>| usize::try_from(own).is_ok_and(|own| keys.contains(&own));
            let in_span = spans[b].iter().any(|keys| has_own(keys) && keys.contains(&kv));
            let kept = |mask: Mask| mask.keep(q, kv, dims.seqlen_q, dims.seqlen_kv);
            (kept(mask) || in_span) && kept(within)
        });
    }
}

/// Both orders of a window and an image that is longer than it, by hand: 6 tokens, an image of tokens 1 to 4, a window of 2.
#[test]
fn spans_compose_with_a_window_in_two_orders() {
    let dims = Dims::new(1, 6, 1, 8);
    let image = [[[1, 5]]];
    let drawn = |mask, within| {
        let lists = OwnedBlockLists::from_spans(dims, mask, &image, within).unwrap();
        let table = read(dims, &lists);
        let Block::Partial(pairs) = &table[0] else { panic!("some are kept") };
        let row = |q: usize| (0..6).map(|kv| if pairs[q * MASK_BLOCK + kv] { 'x' } else { '.' }).collect::<String>();
        (0..6).map(row).collect::<Vec<_>>().join(" ")
    };
    let flashinfer = drawn(Mask::window(Some(1), Some(0)), Mask::Full);
    assert_eq!(flashinfer, "x..... xxxxx. .xxxx. .xxxx. .xxxx. ....xx");
    let gemma = drawn(Mask::causal(), Mask::window(Some(1), None));
    assert_eq!(gemma, "x..... xxxxx. .xxxx. ..xxx. ...xx. ....xx");
}

#[test]
fn wrong_numbers_are_refused_by_name() {
    let dims = Dims::new(2, 10, 1, 8).with_seqlen_kv(20);
    let prefixes =
        |numbers: &[i32]| OwnedBlockLists::from_prefixes(dims, Mask::causal(), numbers).unwrap_err().to_string();
    assert_eq!(prefixes(&[3, -1]), "prefixes: -1 of batch entry 1; allowed: 0 to 20");
    assert_eq!(prefixes(&[21, 0]), "prefixes: 21 of batch entry 0; allowed: 0 to 20");
    assert_eq!(prefixes(&[3]), "prefixes: shape [1], expected [2] [batch]");
    let spans = |spans: &[&[[i32; 2]]]| {
        OwnedBlockLists::from_spans(dims, Mask::causal(), spans, Mask::Full).unwrap_err().to_string()
    };
    let allowed = "allowed: 0 to 20, and no end before its start";
    assert_eq!(spans(&[&[], &[[0, 3], [4, 2]]]), format!("spans: 4 to 2, span 1 of batch entry 1; {allowed}"));
    assert_eq!(spans(&[&[[-1, 2]]]), format!("spans: -1 to 2, span 0 of batch entry 0; {allowed}"));
    assert_eq!(spans(&[&[[0, 21]]]), format!("spans: 0 to 21, span 0 of batch entry 0; {allowed}"));
    assert_eq!(spans(&[&[][..]; 3]), "spans: shape [3], expected [2] [batch]");
    for mask in [Mask::chunked(0), Mask::Full] {
        let within = if mask == Mask::Full { Mask::chunked(0) } else { Mask::Full };
        assert!(OwnedBlockLists::from_spans(dims, mask, &[[]], within).unwrap_err().to_string().contains("chunks"));
    }
    assert!(
        OwnedBlockLists::from_prefixes(dims, Mask::chunked(0), &[0, 0]).unwrap_err().to_string().contains("chunks")
    );
}

#[test]
fn predicates_may_differ_between_heads() {
    let dims = Dims::new(2, 140, 3, 8).with_seqlen_kv(150);
    let keep = |b: usize, h: usize, q: usize, kv: usize| (q * (h + 2) + kv * (b + 1)) % 5 < h + 1;
    let lists = OwnedBlockLists::from_predicate(dims, true, true, keep).unwrap();
    assert!(lists.block_mask().is_per_batch() && lists.block_mask().is_per_head());
    let mut want = Vec::new();
    for (b, h) in (0..2).flat_map(|b| (0..3).map(move |h| (b, h))) {
        want.extend(expected(dims, 1, |_, q, kv| keep(b, h, q, kv)));
    }
    assert_eq!(read(dims, &lists), want);
}

/// Documents as packed sequences, as slices, as ids, and as a dense mask: one result. On the CPU and by the oracle.
#[test]
fn documents_by_offsets_by_slices_and_by_ids_give_one_result() {
    let (ends, heads) = ([0, 70, 200, 200, 333], 2);
    let dims = Dims::new(1, 333, heads, 16);
    let document = |token: usize| ends.partition_point(|&end| end <= token) as i32;
    let ids: Vec<i32> = (0..333).map(document).collect();
    let slices: Vec<_> =
        ends.windows(2).map(|ends| AttnSlice::new(ends[0]..ends[1], ends[0]..ends[1], SliceKind::Causal)).collect();
    let by_slices = OwnedBlockLists::from_slices(dims, &slices).unwrap();
    let by_ids = OwnedBlockLists::from_documents(dims, &ids, &ids).unwrap();
    let [q, k, v] = [1, 2, 3].map(|seed| values::<f32>(333 * heads * 16, seed));
    let layout = dense([1, 333, heads, 16]);
    let run = |mask: Mask, lists: &OwnedBlockLists| {
        let options = ForwardProblem::builder(DType::F32, dims).mask(mask).lse(true);
        let problem = options.block_mask(Some(lists.block_mask())).build().unwrap();
        let (mut o, mut lse) = (vec![f32::NAN; q.len()], vec![f32::NAN; heads * 333]);
        let [q_ref, k_ref, v_ref] = [&q, &k, &v].map(|data| TensorRef::host(data, layout).unwrap());
        let args = ForwardArgs::new(q_ref, k_ref, v_ref, TensorMut::host(&mut o, layout).unwrap());
        let args = args.lse(TensorMut::host(&mut lse, Layout::contiguous([1, heads, 333]).unwrap()).unwrap());
        let plan = problem.plan(&Device::cpu()).unwrap();
        let mut workspace = Workspace::alloc(&Stream::Cpu, plan.workspace_bytes()).unwrap();
        plan.run(&Stream::Cpu, &mut workspace, lists.add_to(args).unwrap()).unwrap();
        let inputs = [&q, &k, &v].map(|data| Tensor::from_strided(data, &layout));
        let modifiers = Modifiers { blocks: Some(lists.as_lists()), ..Modifiers::default() };
        let [a, b, c] = &inputs;
        let exact = reference::forward_with(&problem, &Lengths::default(), [a, b, c], modifiers).unwrap();
        let close = |(a, b): (&f32, &f64)| (f64::from(*a) - b).abs() < 1e-5;
        assert!(o.iter().zip(exact.o.data()).all(close));
        exact.o.data().to_vec()
    };
    let of_slices = run(Mask::Full, &by_slices);
    assert_eq!(of_slices, run(Mask::causal(), &by_ids));
    // The oracle of packed sequences.
    let packed = Dims::new(4, 333, heads, 16);
    let problem = ForwardProblem::builder(DType::F32, packed).mask(Mask::causal()).packed(true).build().unwrap();
    let offsets: Vec<i32> = ends.iter().map(|&end| end as i32).collect();
    let lengths = Lengths { cu_seqlens_q: Some(&offsets), cu_seqlens_kv: Some(&offsets), ..Lengths::default() };
    let [a, b, c] = &[&q, &k, &v].map(|data| Tensor::from_strided(data, &layout));
    let of_packed = reference::forward_with(&problem, &lengths, [a, b, c], Modifiers::default()).unwrap();
    let near = of_packed.o.data().iter().zip(&of_slices).all(|(a, b)| (a - b).abs() < 1e-12);
    assert!(near && of_packed.o.data().len() == of_slices.len());
}
