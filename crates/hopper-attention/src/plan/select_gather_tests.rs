//! One query in each sequence, and equal tiles of e4m3 in two rounds.

use super::*;

/// One query of 8 heads that read one KV head, in each of `batch` sequences.
fn one_query(batch: usize) -> ForwardProblem {
    let dims = Dims::new(batch, 1, 8, 128).with_heads_kv(1).with_seqlen_kv(32_768);
    problem(dims, Mask::causal())
}

/// The kernel computes 8 queries of one head, and the plan says so.
#[test]
fn the_query_heads_of_a_kv_head_are_queries() {
    let rows = table();
    let choice = select(&one_query(3), &H100, &rows).unwrap();
    assert_eq!((choice.heads_as_queries, choice.m_tiles, choice.tiles), (8, 1, 3));
    assert_eq!(choice.kernel.mask, MaskClass::Full);
    assert!(choice.to_string().contains(", 8 heads as queries"), "{choice}");
    // As the same problem with 8 queries of one head.
    let same = problem(one_query(3).dims().with_seqlen_q(8).with_heads_q(1), Mask::Full);
    let alike = select(&same, &H100, &rows).unwrap();
    assert_eq!(choice, Choice { heads_as_queries: 8, ..alike });
    assert_eq!(candidates(&one_query(3), &H100, &rows), candidates(&same, &H100, &rows));
    for row in candidates(&one_query(3), &H100, &rows).unwrap() {
        assert_eq!(select_row(&one_query(3), &H100, &row, None, &rows).unwrap().heads_as_queries, 8, "{row}");
    }
    // Two queries are not gathered.
    let two = problem(one_query(3).dims().with_seqlen_q(2), Mask::causal());
    let choice = select(&two, &H100, &rows).unwrap();
    assert_eq!((choice.heads_as_queries, choice.tiles), (1, 24));
}

/// A limit of the workspace and a margin are those of the problem.
#[test]
fn limits_hold_for_gathered_problems() {
    let rows = [KernelInfo { most_shares: 8, sums_bytes: 36_864, ..row(0, MaskClass::Full, 128, 64) }];
    let free = select(&one_query(1), &H100, &rows).unwrap();
    assert!(free.splits > 1 && free.workspace_bytes() > 0, "{free}");
    let limited = one_query(1).to_builder().workspace_limit(Some(0)).build().unwrap();
    let choice = select(&limited, &H100, &rows).unwrap();
    assert_eq!((choice.splits, choice.workspace_bytes(), choice.heads_as_queries), (1, 0, 8));
    let margin = one_query(1).to_builder().sm_margin(128).build().unwrap();
    assert!(select(&margin, &H100, &rows).unwrap().grid <= 4);
}

/// 176 tiles of 192 queries take two rounds of 132 CTAs, and so do 256 tiles of 128, which are shorter. Drawing evens out no such
/// launch. With twice as many tiles of 192 the rounds are fuller.
#[test]
fn equal_tiles_of_e4m3_fill_two_rounds() {
    let choice = |heads, seqlen| {
        let dims = Dims::new(1, seqlen, heads, 128);
        let problem = ForwardProblem::builder(DType::E4M3, dims).half_scores(true).build().unwrap();
        select(&problem, &H100, &fp8_rows()).unwrap()
    };
    for (heads, seqlen) in [(8, 4096), (16, 2048)] {
        let choice = choice(heads, seqlen);
        assert_eq!((choice.kernel.tile_m, choice.tiles, choice.tile_counter), (128, 256, false), "{choice}");
    }
    assert_eq!(choice(16, 4096).kernel.tile_m, 192);
}
