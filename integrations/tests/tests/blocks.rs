//! Block-sparse masks on the CPU: values and gradients beside candle's own operations, and what is refused.

use candle_core::{D, DType, Device, Result, Tensor, Var};
use hopper_attention_candle::hopper_attention::{AttnSlice, Dims, Error, OwnedBlockLists, SliceKind};
use hopper_attention_candle::{BlockLists, Mask, Options, attention_with_blocks, cause};
use hopper_attention_integration_tests::difference;

const HEADS: usize = 4;
const SIZES: (usize, usize) = (260, 390);

/// A mask with full, empty and partial blocks: `[batch, heads, 260, 390]`. Every query keeps a key.
fn mask(batch: usize, heads: usize) -> Result<Tensor> {
    let (rows, columns) = SIZES;
    let kept = (0..batch * heads * rows * columns).map(|pair| {
        let (of, q, kv) = (pair / (rows * columns), pair / columns % rows, pair % columns);
        let kind = (q / 128 + kv / 128 + of) % 3;
        u8::from(kv == 5 || kind == 0 || (kind == 1 && (q * 7 + kv * 13 + of) % 5 < 2)) * 3
    });
    Tensor::from_iter(kept, &Device::Cpu)?.reshape((batch, heads, rows, columns))
}

fn inputs() -> Result<[Var; 3]> {
    let (rows, columns) = SIZES;
    let random = |rows, heads| Var::randn(0f32, 1.0, (2, rows, heads, 16), &Device::Cpu);
    Ok([random(rows, HEADS)?, random(columns, 2)?, random(columns, 2)?])
}

/// Attention of candle's own operations, of the pairs that a mask keeps.
fn own(q: &Tensor, k: &Tensor, v: &Tensor, mask: &Tensor) -> Result<Tensor> {
    let repeated = |tensor: &Tensor| {
        let (batch, rows, heads, dim) = tensor.dims4()?;
        let wide = tensor.unsqueeze(3)?.broadcast_as((batch, rows, heads, 2, dim))?;
        wide.reshape((batch, rows, HEADS, dim))?.transpose(1, 2)?.contiguous()
    };
    let scores = (q.transpose(1, 2)?.contiguous()?.matmul(&repeated(k)?.t()?)? * 0.25)?;
    let hidden = (mask.eq(0u8)?.to_dtype(DType::F32)? * -1e30)?;
    candle_nn::ops::softmax(&scores.broadcast_add(&hidden)?, D::Minus1)?.matmul(&repeated(v)?)?.transpose(1, 2)
}

#[test]
fn values_and_gradients_are_those_of_candles_own_operations() -> Result<()> {
    let [q, k, v] = inputs()?;
    for (batch, heads) in [(1, 1), (2, 1), (1, HEADS), (2, HEADS)] {
        let mask = mask(batch, heads)?;
        let blocks = BlockLists::from_mask(&mask)?;
        let weight = Tensor::randn(0f32, 1.0, q.dims(), &Device::Cpu)?;
        let got = attention_with_blocks(&q, &k, &v, &blocks, &Options::new())?;
        let want = own(&q, &k, &v, &mask)?;
        let worst = difference(&got, &want)?.0;
        assert!(worst < 4e-6, "{batch} {heads}: {worst}");
        let [got, want] = [got, want].map(|o| o.mul(&weight)?.sum_all()?.backward());
        let (got, want) = (got?, want?);
        for of in [&q, &k, &v] {
            let worst = difference(got.get(of).expect("a gradient"), want.get(of).expect("a gradient"))?.0;
            assert!(worst < 2e-5, "{batch} {heads}: a gradient, {worst}");
        }
    }
    Ok(())
}

/// Both masks apply, rows without keys give 0, and another mask gives something else.
#[test]
fn masks_are_what_they_say() -> Result<()> {
    let [q, k, v] = inputs()?;
    let (rows, columns) = SIZES;
    let all = mask(1, 1)?;
    let blocks = BlockLists::from_mask(&all)?;
    let causal = Tensor::tril2(columns, DType::U8, &Device::Cpu)?.narrow(0, columns - rows, rows)?;
    let both = (all.ne(0u8)? * causal.reshape((1, 1, rows, columns))?)?;
    let got = attention_with_blocks(&q, &k, &v, &blocks, &Options::new().mask(Mask::causal()))?;
    assert!(difference(&got, &own(&q, &k, &v, &both)?)?.0 < 4e-6);
    assert!(difference(&got, &own(&q, &k, &v, &all)?)?.0 > 1e-2);
    let none = BlockLists::from_mask(&all.zeros_like()?)?;
    let got = attention_with_blocks(&q, &k, &v, &none, &Options::new())?;
    assert_eq!(got.abs()?.max_all()?.to_scalar::<f32>()?, 0.0);
    // A mask that is a view.
    let wide = Tensor::cat(&[&all, &all], 3)?.narrow(3, columns, columns)?;
    let got = attention_with_blocks(&q, &k, &v, &BlockLists::from_mask(&wide)?, &Options::new())?;
    assert!(difference(&got, &own(&q, &k, &v, &all)?)?.0 < 4e-6);
    Ok(())
}

/// Lists that a caller made: the diagonal of 2 x 2 blocks, one of them with bits, as full and as partial blocks.
#[test]
fn lists_are_taken() -> Result<()> {
    let qkv = Tensor::randn(0f32, 1.0, (1, 200, 1, 16), &Device::Cpu)?;
    let list = |numbers: Vec<i32>, last: &[usize]| Tensor::from_vec(numbers, [&[1, 1, 2], last].concat(), &Device::Cpu);
    // Of each query of the first block the keys 0 to 31, and 64.
    let mut bits = vec![0; 2 * 512];
    for query in 0..128 {
        (bits[query * 4], bits[query * 4 + 2]) = (-1, 1);
    }
    let blocks = BlockLists::new(&list(vec![1, 0], &[])?, &list(vec![0; 4], &[2])?, &list(bits, &[512])?)?
        .with_full_blocks(&list(vec![0, 1], &[])?, &list(vec![0, 0, 1, 0], &[2])?)?;
    let kept = (0..200 * 200).map(|pair| {
        let (q, kv) = (pair / 200, pair % 200);
        u8::from(if q < 128 { kv < 32 || kv == 64 } else { kv >= 128 })
    });
    let mask = Tensor::from_iter(kept, &Device::Cpu)?.reshape((1, 1, 200, 200))?;
    let call = |blocks: &BlockLists| attention_with_blocks(&qkv, &qkv, &qkv, blocks, &Options::new());
    let (got, want) = (call(&blocks)?, call(&BlockLists::from_mask(&mask)?)?);
    assert_eq!(difference(&got, &want)?.0, 0.0);
    assert!(format!("{blocks:?}").contains("BlockLists"));

    let counts = list(vec![0, 0], &[])?;
    let indices = list(vec![0; 4], &[2])?;
    let words = list(vec![0; 1024], &[512])?;
    let wrong = BlockLists::new(&list(vec![1, 3], &[])?, &indices, &words)?;
    let refused = call(&wrong).unwrap_err();
    assert!(matches!(cause(&refused), Some(Error::Value { what: "mask_block_cnt", .. })), "{refused}");
    let u32s = counts.to_dtype(DType::U32)?;
    let others = [
        BlockLists::new(&u32s, &indices, &words),
        BlockLists::new(&counts.narrow(2, 0, 1)?, &indices, &words),
        BlockLists::new(&counts, &counts, &words),
        BlockLists::new(&counts, &indices, &words.narrow(3, 0, 500)?),
        BlockLists::new(&counts, &indices, &words)?.with_full_blocks(&counts, &counts),
        blocks.clone().with_full_blocks(&counts, &indices),
        BlockLists::from_mask(&mask.to_dtype(DType::F32)?),
        BlockLists::from_mask(&mask.squeeze(0)?),
    ];
    for (at, other) in others.into_iter().enumerate() {
        let error = other.expect_err(&at.to_string());
        assert!(matches!(cause(&error), Some(Error::Value { .. })), "{at}: {error}");
    }
    // Lists of another size than Q and K.
    let shorter = BlockLists::from_mask(&mask.narrow(2, 0, 100)?)?;
    let error = call(&shorter).unwrap_err();
    assert!(matches!(cause(&error), Some(Error::Shape { .. })), "{error}");
    Ok(())
}

/// Lists that the host made without a dense mask, and the dense mask that says the same.
#[test]
fn lists_of_documents_and_slices_are_taken() -> Result<()> {
    let [q, k, v] = inputs()?;
    let (rows, columns) = SIZES;
    let dims = Dims::new(2, rows, HEADS, 16).with_seqlen_kv(columns);
    let document = |batch: usize, token: usize| (token / (100 + 30 * batch)) as i32;
    let ids = |seqlen: usize| (0..2).flat_map(|b| (0..seqlen).map(move |token| document(b, token))).collect::<Vec<_>>();
    let documents = OwnedBlockLists::from_documents(dims, &ids(rows), &ids(columns)).unwrap();
    let kept = (0..2 * rows * columns)
        .map(|pair| {
            let (batch, q, kv) = (pair / (rows * columns), pair / columns % rows, pair % columns);
            u8::from(document(batch, q) == document(batch, kv))
        })
        .collect::<Vec<u8>>();
    let slices = [
        AttnSlice::new(0..rows, 0..columns - 9, SliceKind::Causal),
        AttnSlice::new(0..rows, columns - 5..columns, SliceKind::Full),
    ];
    let of_slices = OwnedBlockLists::from_slices(dims, &slices).unwrap();
    let of_pairs = (0..rows * columns).map(|pair| {
        let (q, kv) = (pair / columns, pair % columns);
        u8::from(kv + rows < q + columns - 8 || kv >= columns - 5)
    });
    let of_pairs = Tensor::from_iter(of_pairs, &Device::Cpu)?.reshape((1, 1, rows, columns))?;
    for (lists, mask) in
        [(documents, Tensor::from_vec(kept, (2, 1, rows, columns), &Device::Cpu)?), (of_slices, of_pairs)]
    {
        let call = |blocks: &BlockLists| attention_with_blocks(&q, &k, &v, blocks, &Options::new());
        let got = call(&BlockLists::from_owned(&lists, &Device::Cpu)?)?;
        assert_eq!(difference(&got, &call(&BlockLists::from_mask(&mask)?)?)?.0, 0.0);
        assert!(difference(&got, &own(&q, &k, &v, &mask)?)?.0 < 4e-6);
    }
    Ok(())
}
