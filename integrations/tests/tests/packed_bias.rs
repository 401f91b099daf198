//! An additive bias of packed sequences on the CPU: values and gradients are those of each sequence by itself with its
//! part of the bias, and what is refused.

use candle_core::{DType, Device, IndexOp, Result, Tensor, Var};
use hopper_attention_candle::hopper_attention::Error;
use hopper_attention_candle::{
    BlockLists, Dropout, Mask, Modifiers, Options, attention_varlen, attention_varlen_with,
    attention_varlen_with_alibi, attention_varlen_with_bias, attention_varlen_with_sinks, attention_with_bias, cause,
};
use hopper_attention_integration_tests::difference;
use hopper_attention_integration_tests::packed_bias::{Case, HEADS, LONGEST, SEQUENCES, forms, run, run_with};

const CPU: &Device = &Device::Cpu;

fn cases(shape: [usize; 4]) -> [Case; 7] {
    let plain = Case::new(shape);
    [
        plain,
        Case { mask: Mask::causal(), ..plain },
        Case { mask: Mask::window(Some(3), Some(1)), ..plain },
        Case { softcap: 2.0, ..plain },
        Case { alibi: true, ..plain },
        Case { sinks: true, ..plain },
        Case { mask: Mask::causal(), softcap: 2.0, alibi: true, sinks: true, ..plain },
    ]
}

#[test]
fn values_and_gradients_are_those_of_each_sequence() -> Result<()> {
    for shape in forms([LONGEST; 2]) {
        for case in cases(shape) {
            let worst = run(CPU, case)?;
            assert!(worst <= 5e-6, "{case:?}: {worst}");
        }
    }
    Ok(())
}

/// As many numbers as the longest sequence needs, and more of queries, of keys, and of both than all rows together.
#[test]
fn a_bias_may_be_larger_than_the_longest_sequence() -> Result<()> {
    for sizes in [[LONGEST + 2, LONGEST], [LONGEST, LONGEST + 7], [60, 70]] {
        for shape in forms(sizes) {
            let worst = run(CPU, Case { mask: Mask::causal(), ..Case::new(shape) })?;
            assert!(worst <= 5e-6, "{shape:?}: {worst}");
        }
    }
    Ok(())
}

#[test]
fn the_bias_has_a_type_of_its_own() -> Result<()> {
    let types = [(DType::F32, 5e-6), (DType::BF16, 3e-2), (DType::F16, 5e-3)];
    for (dtype, bound) in types {
        for (of_bias, of_gradient) in types {
            for shape in [[1, HEADS[0], LONGEST, LONGEST], [SEQUENCES, 1, 1, LONGEST]] {
                let worst = run(CPU, Case { dtype, of_bias, ..cases(shape)[6] })?;
                assert!(worst <= f32::max(bound, of_gradient), "{dtype:?} {of_bias:?} {shape:?}: {worst}");
            }
        }
    }
    Ok(())
}

type Change<'a> = &'a dyn Fn(&Tensor) -> Result<Tensor>;

#[test]
fn a_wrong_bias_and_a_lost_gradient_are_seen() -> Result<()> {
    let rotated = |bias: &Tensor, axis: usize| bias.roll(1, axis)?.contiguous();
    // With the axis that has to be more than 1.
    let changes: [(&str, Change<'_>, usize); 6] = [
        ("another sequence's", &|bias| rotated(bias, 0), 0),
        ("another head's", &|bias| rotated(bias, 1), 1),
        ("another query's", &|bias| rotated(bias, 2), 2),
        ("another key's", &|bias| rotated(bias, 3), 3),
        ("a little more", &|bias| bias * 1.01, 3),
        ("without a gradient", &|bias| Ok(bias.detach()), 3),
    ];
    for shape in forms([LONGEST; 2]) {
        for (name, change, axis) in changes {
            if shape[axis] > 1 {
                let worst = run_with(CPU, Case::new(shape), change)?;
                assert!(worst > 5e-4, "{shape:?} {name}: {worst}");
            }
        }
    }
    Ok(())
}

/// A table of numbers for each head and distance, as T5 has, and a part of a larger bias that is made of it. Gradients flow
/// to the table.
#[test]
fn gradients_flow_to_what_a_bias_is_made_of() -> Result<()> {
    let lengths = [3usize, 5, 2];
    let offsets = Tensor::new(&[0u32, 3, 8, 10], CPU)?;
    let qkv = Tensor::randn(0f32, 1.0, (10, 4, 16), CPU)?;
    let table = Var::randn(0f32, 1.0, (4, 9), CPU)?; // of each distance from -4 to 4
    let distances = Tensor::from_iter((0..35u32).map(|pair| (pair % 7 + 3).saturating_sub(pair / 7).min(8)), CPU)?;
    let bias = table.index_select(&distances, 1)?.reshape((1, 4, 5, 7))?.narrow(3, 1, 5)?;
    assert!(!bias.is_contiguous());
    let o = attention_varlen_with_bias(&qkv, &qkv, &qkv, &bias, &offsets, &offsets, &Options::new())?;
    let mut rows = Vec::new();
    for (i, len) in lengths.into_iter().enumerate() {
        let qkv = qkv.narrow(0, lengths[..i].iter().sum(), len)?.unsqueeze(0)?;
        let bias = bias.narrow(2, 0, len)?.narrow(3, 0, len)?;
        rows.push(attention_with_bias(&qkv, &qkv, &qkv, &bias, &Options::new())?.squeeze(0)?);
    }
    let want = Tensor::cat(&rows, 0)?;
    assert!(difference(&o, &want)?.0 <= 1e-6);
    let of = |o: Tensor| Ok::<_, candle_core::Error>(o.sqr()?.sum_all()?.backward()?.get(&table).cloned());
    let (got, want) = (of(o)?.expect("a gradient"), of(want)?.expect("a gradient"));
    let (worst, largest) = difference(&got, &want)?;
    assert!(worst <= 5e-6 * largest && largest > 1e-2, "{worst} of {largest}");
    Ok(())
}

/// Two sequences of 3 and 5 rows, with what is given beside Q, K and V.
fn two(modifiers: Modifiers<'_>, options: &Options) -> Result<Tensor> {
    let numbers = |from: f32| Tensor::arange(from, from + 256.0, CPU)?.sin()?.reshape((8, 2, 16));
    let offsets = Tensor::new(&[0u32, 3, 8], CPU)?;
    attention_varlen_with(&numbers(0.0)?, &numbers(1.5)?, &numbers(2.5)?, modifiers, &offsets, &offsets, options)
}

/// The same of a function of its own.
type Function<'a> = &'a dyn Fn([&Tensor; 3], &Tensor, &Options) -> Result<Tensor>;

#[test]
fn modifiers_are_what_they_say() -> Result<()> {
    let bias = Tensor::randn(0f32, 1.0, (2, 2, 5, 5), CPU)?;
    let (sinks, slopes) = (Tensor::new(&[0.5f32, -1.0], CPU)?, Tensor::new(&[0.25f32, 0.125], CPU)?);
    let new = Modifiers::new;
    let functions: [(&str, Modifiers<'_>, Function<'_>); 4] = [
        ("none", new(), &|[q, k, v], at, options| attention_varlen(q, k, v, at, at, options)),
        ("bias", new().bias(&bias), &|[q, k, v], at, options| {
            attention_varlen_with_bias(q, k, v, &bias, at, at, options)
        }),
        ("sinks", new().sinks(&sinks), &|[q, k, v], at, options| {
            attention_varlen_with_sinks(q, k, v, &sinks, at, at, options)
        }),
        ("alibi", new().alibi_slopes(&slopes), &|[q, k, v], at, options| {
            attention_varlen_with_alibi(q, k, v, &slopes, at, at, options)
        }),
    ];
    let options = Options::new().mask(Mask::causal());
    let numbers = |from: f32| Tensor::arange(from, from + 256.0, CPU)?.sin()?.reshape((8, 2, 16));
    let (q, k, v, offsets) = (numbers(0.0)?, numbers(1.5)?, numbers(2.5)?, Tensor::new(&[0u32, 3, 8], CPU)?);
    let plain = two(new(), &options)?;
    for (name, modifiers, function) in functions {
        let got = two(modifiers, &options)?;
        assert_eq!(difference(&got, &function([&q, &k, &v], &offsets, &options)?)?.0, 0.0, "{name}");
        assert_eq!(difference(&got, &plain)?.0 == 0.0, name == "none", "{name}");
    }
    // A bias of 0 changes nothing, beside dropout as well.
    let dropping = options.clone().dropout(Dropout::new(0.3).map_err(candle_core::Error::wrap)?, 77, 5);
    let dropped = two(new(), &dropping)?;
    assert_eq!(difference(&two(new().bias(&bias.zeros_like()?), &dropping)?, &dropped)?.0, 0.0);
    assert!(difference(&dropped, &plain)?.0 > 0.1);
    // Lists of blocks are of whole tensors.
    let blocks = BlockLists::from_mask(&Tensor::ones((1, 1, 8, 8), DType::U8, CPU)?)?;
    let error = two(new().bias(&bias).blocks(&blocks), &options).unwrap_err();
    assert!(error.to_string().contains("a block mask with packed sequences"), "{error}");
    Ok(())
}

#[test]
fn no_rows_and_no_sequences_are_legal() -> Result<()> {
    let zeros = |shape: &[usize]| Var::zeros(shape, DType::F32, CPU);
    // No sequence; two without rows; two without keys.
    for (offsets, rows, keys, shape) in [
        (&[0u32][..], 0, 0, [1, 4, 5, 5]),
        (&[0], 0, 0, [0, 4, 5, 5]),
        (&[0, 0, 0], 0, 0, [2, 4, 0, 0]),
        (&[0, 0, 0], 3, 2, [1, 4, 1, 5]),
    ] {
        let (q, k, bias) = (zeros(&[rows, 4, 16])?, zeros(&[keys, 2, 16])?, zeros(&shape)?);
        let offsets = Tensor::new(offsets, CPU)?;
        let o = attention_varlen_with_bias(&q, &k, &k, &bias, &offsets, &offsets, &Options::new())?;
        assert_eq!(o.dims(), [rows, 4, 16]);
        let gradient = o.sum_all()?.backward()?.get(&bias).expect("a gradient").clone();
        assert_eq!(gradient.dims(), bias.dims());
        assert_eq!(gradient.flatten_all()?.to_vec1::<f32>()?, vec![0.0; shape.iter().product()]);
    }
    Ok(())
}

#[test]
fn what_is_wrong_is_named() -> Result<()> {
    let bias = |shape: &[usize], dtype| Tensor::zeros(shape, dtype, CPU);
    let allowed = "allowed: [1 or 2 (sequences), 1 or 2, 1 or queries, keys]";
    let shape = |shape: &[usize]| {
        Ok::<_, candle_core::Error>((format!("bias: shape {shape:?}; {allowed}"), bias(shape, DType::F32)?))
    };
    let other = |words: &str, bias: Tensor| (words.to_string(), bias);
    for (words, bias) in [
        shape(&[3, 2, 5, 5])?,
        shape(&[2, 4, 5, 5])?,
        shape(&[8, 2, 5, 5])?,
        shape(&[0, 2, 5, 5])?,
        other(
            "bias: 3 dimensions, [2, 5, 5]; allowed: 4, [1 or batch, 1 or heads_q, 1 or queries, keys]",
            bias(&[2, 5, 5], DType::F32)?,
        ),
        other("bias: dtype u8; allowed: f32, bf16, f16", bias(&[1, 1, 5, 5], DType::U8)?),
        other("stride 5 in seqlen_kv; allowed: stride 1", bias(&[1, 1, 5, 5], DType::F32)?.t()?),
        // Sequences that are longer than the bias.
        other(
            "cu_seqlens_q: 5 rows at 1; allowed: at most 4, which the bias has numbers for",
            bias(&[1, 1, 4, 5], DType::F32)?,
        ),
        other(
            "cu_seqlens_q: 3 rows at 0; allowed: at most 2, which the bias has numbers for",
            bias(&[2, 2, 2, 2], DType::F32)?,
        ),
        other(
            "cu_seqlens_kv: 5 rows at 1; allowed: at most 4, which the bias has numbers for",
            bias(&[1, 2, 5, 4], DType::F32)?,
        ),
        other(
            "cu_seqlens_kv: 3 rows at 0; allowed: at most 1, which the bias has numbers for",
            bias(&[1, 1, 1, 1], DType::F32)?,
        ),
        other(
            "cu_seqlens_q: 3 rows at 0; allowed: at most 0, which the bias has numbers for",
            bias(&[1, 1, 0, 5], DType::F32)?,
        ),
    ] {
        let error = two(Modifiers::new().bias(&bias), &Options::new()).unwrap_err();
        assert!(error.to_string().contains(&words), "{words}: {error}");
        assert!(matches!(cause(&error), Some(Error::Value { .. } | Error::Layout { .. })), "{error}");
    }
    // Queries that share their numbers may be any number of them.
    assert!(two(Modifiers::new().bias(&bias(&[1, 1, 1, 5], DType::F32)?), &Options::new()).is_ok());
    // A Q with another number of dimensions is named itself.
    let (q, offsets) = (Tensor::zeros((1, 8, 2, 16), DType::F32, CPU)?, Tensor::new(&[0u32, 3, 8], CPU)?);
    let bias = bias(&[1, 1, 5, 5], DType::F32)?;
    let error = attention_varlen_with_bias(&q, &q.i(0)?, &q.i(0)?, &bias, &offsets, &offsets, &Options::new());
    let error = error.unwrap_err();
    assert!(error.to_string().contains("q: 4 dimensions"), "{error}");
    Ok(())
}
