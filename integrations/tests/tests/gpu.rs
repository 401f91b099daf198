//! The adapters on a GPU: values and gradients, candle-transformers' models on the patched crate, and training.

use std::io::Cursor;
use std::time::Instant;

use candle_core::quantized::gguf_file;
use candle_core::{DType, Device, Result, Tensor, Var};
use candle_nn::VarBuilder;
use candle_transformers::models::bert::BertModel;
use candle_transformers::models::{gemma, gemma2, gemma3, llama, quantized_phi3, qwen3};
use hopper_attention_candle::hopper_attention::Error;
use hopper_attention_candle::{
    BlockLists, Dropout, Mask, Options, attention, attention_varlen_with_bias, attention_with_bias,
    attention_with_blocks, attention_with_lse, cause,
};
use hopper_attention_integration_tests::causal::{Weights, gemma_config, llama_config, logits, phi_file, qwen_config};
use hopper_attention_integration_tests::gradients;
use hopper_attention_integration_tests::language::{Setup, train, verdict};
use hopper_attention_integration_tests::minilm::{self, Encoder, Model, SENTENCES, embedding_of};
use hopper_attention_integration_tests::{difference, own, packed_bias, say, sinks, varlen};

/// The GPU. Without one a test is skipped, and fails where `HATTN_REQUIRE_GPU` is set.
fn gpu() -> Option<Device> {
    match Device::new_cuda(0) {
        Ok(device) => Some(device),
        Err(error) if std::env::var_os("HATTN_REQUIRE_GPU").is_some() => panic!("no GPU: {error}"),
        Err(error) => {
            say(&format!("skipped: no GPU ({error})"));
            None
        }
    }
}

#[test]
fn values_and_gradients_are_those_of_candles_own_operations() -> Result<()> {
    let Some(device) = gpu() else { return Ok(()) };
    for (dtype, bound) in [(DType::BF16, 2e-2), (DType::F16, 4e-3)] {
        let mut worst = 0f32;
        for case in gradients::cases() {
            let report = case.run(&device, dtype)?;
            assert!(report.worst() <= bound, "{dtype:?} {case:?}: {report:?}");
            worst = worst.max(report.worst());
        }
        say(&format!("{dtype:?}: O and gradients differ from f32 by at most {worst:.1e} of the largest element"));
    }
    Ok(())
}

#[test]
fn capped_scores_are_those_of_candles_own_operations() -> Result<()> {
    let Some(device) = gpu() else { return Ok(()) };
    for (dtype, bound) in [(DType::BF16, 2e-2), (DType::F16, 4e-3)] {
        for (case, cap) in gradients::cases().into_iter().zip([1.0, 15.0, 50.0, 1.0, 15.0, 1.0]) {
            let report = case.run_capped(&device, dtype, cap)?;
            assert!(report.worst() <= bound, "{dtype:?} {case:?} {cap}: {report:?}");
        }
    }
    Ok(())
}

/// Offsets on the GPU, and the same sequences one by one.
#[test]
fn packed_sequences_are_those_sequences_one_by_one() -> Result<()> {
    let Some(device) = gpu() else { return Ok(()) };
    for (dtype, bound) in [(DType::BF16, 2e-2), (DType::F16, 4e-3)] {
        for mask in [Mask::Full, Mask::causal(), Mask::window(Some(3), Some(1))] {
            let worst = varlen::run(&device, dtype, mask)?;
            assert!(worst <= bound, "{dtype:?} {mask:?}: {worst}");
            say(&format!("{dtype:?} {mask:?}: packed and single sequences differ by at most {worst:.1e}"));
        }
    }
    Ok(())
}

/// Sinks with their gradient: dense, packed, and padded queries with packed keys.
#[test]
fn sinks_are_computed_with_their_gradient() -> Result<()> {
    let Some(device) = gpu() else { return Ok(()) };
    // Sums over all rows: their rounding errors may be larger than those of O.
    for (dtype, bound) in [(DType::BF16, 4e-2), (DType::F16, 8e-3)] {
        for of_sinks in [DType::F32, DType::BF16] {
            for mask in [Mask::Full, Mask::causal(), Mask::window(Some(3), Some(0))] {
                for kind in [sinks::Kind::Dense, sinks::Kind::Packed, sinks::Kind::PaddedQ] {
                    let worst = sinks::run(&device, dtype, of_sinks, mask, kind)?;
                    assert!(worst <= bound, "{kind:?} {dtype:?} {of_sinks:?} {mask:?}: {worst}");
                }
            }
        }
    }
    Ok(())
}

/// A mask with full, empty and partial blocks: on the GPU as on the CPU, where other tests look at it.
#[test]
fn block_sparse_masks_are_those_of_the_cpu() -> Result<()> {
    let Some(device) = gpu() else { return Ok(()) };
    let (rows, columns) = (260, 390);
    let kept = (0..2 * rows * columns).map(|pair| {
        let (of, q, kv) = (pair / (rows * columns), pair / columns % rows, pair % columns);
        let kind = (q / 128 + kv / 128 + of) % 3;
        u8::from(kind == 0 || (kind == 1 && (q * 7 + kv * 13 + of) % 5 < 2))
    });
    let mask = Tensor::from_iter(kept, &Device::Cpu)?.reshape((2, 1, rows, columns))?;
    as_on_the_cpu(&device, [rows, columns], |device, [q, k, v]| {
        let blocks = BlockLists::from_mask(&mask.to_device(device)?)?;
        attention_with_blocks(q, k, v, &blocks, &Options::new())
    })
}

/// The weights that dropout makes 0 are those of the CPU, where other tests look at them.
#[test]
fn dropout_is_that_of_the_cpu() -> Result<()> {
    let Some(device) = gpu() else { return Ok(()) };
    let dropout = Dropout::new(0.3).expect("a probability");
    for mask in [Mask::Full, Mask::causal()] {
        let options = Options::new().mask(mask).dropout(dropout, 77, 5 << 32);
        as_on_the_cpu(&device, [260, 390], |_, [q, k, v]| attention(q, k, v, &options))?;
    }
    Ok(())
}

/// A bias and its gradient are those of the CPU, where other tests look at them.
#[test]
fn a_bias_is_that_of_the_cpu() -> Result<()> {
    let Some(device) = gpu() else { return Ok(()) };
    let q = Tensor::zeros((2, 260, 4, 64), DType::BF16, &device)?;
    let k = Tensor::zeros((2, 392, 2, 64), DType::BF16, &device)?;
    let bias = Tensor::randn(0f32, 1.0, (1, 4, 260, 392), &Device::Cpu)?;
    let on_host = attention_with_bias(&q, &k, &k, &bias, &Options::new()).unwrap_err();
    assert!(matches!(cause(&on_host), Some(Error::Device { what: "bias", .. })), "{on_host}");
    let capped = Options::new().softcap(20.0);
    let (q, on_device) = (Var::from_tensor(&q)?, bias.to_device(&device)?);
    let error = attention_with_bias(&q, &k, &k, &on_device, &capped).and_then(|o| o.sum_all()?.backward()).unwrap_err();
    assert!(error.to_string().contains("softcap and a bias together"), "{error}");
    let options = Options::new().mask(Mask::causal());
    for bias in [bias.clone(), bias.narrow(1, 0, 1)?.contiguous()?, bias.narrow(2, 0, 1)?.contiguous()?] {
        let more = [bias];
        as_on_the_cpu_with(&device, [260, 392], &more, |_, [q, k, v], more| {
            attention_with_bias(q, k, v, &more[0], &options)
        })?;
    }
    Ok(())
}

/// A bias of packed sequences, as long as the longest and longer.
#[test]
fn a_packed_bias_is_that_of_single_sequences() -> Result<()> {
    let Some(device) = gpu() else { return Ok(()) };
    // Sums over all sequences: their rounding errors may be larger than those of O.
    for (dtype, bound) in [(DType::BF16, 4e-2), (DType::F16, 8e-3)] {
        for shape in packed_bias::forms([packed_bias::LONGEST; 2]).chain(packed_bias::forms([40, 50])) {
            let plain = packed_bias::Case { dtype, ..packed_bias::Case::new(shape) };
            let causal = packed_bias::Case { mask: Mask::causal(), of_bias: dtype, ..plain };
            let together = packed_bias::Case { alibi: true, sinks: true, ..causal };
            for case in [plain, causal, together] {
                let worst = packed_bias::run(&device, case)?;
                assert!(worst <= bound, "{case:?}: {worst}");
            }
        }
    }
    Ok(())
}

/// Offsets on the GPU are not looked at: a sequence of 5 rows ends where its bias of 4 ends. Offsets on the host are.
#[test]
fn a_sequence_ends_where_its_bias_ends() -> Result<()> {
    let Some(device) = gpu() else { return Ok(()) };
    let random = |shape: [usize; 3]| Tensor::randn(0f32, 1.0, &shape, &Device::Cpu)?.to_dtype(DType::BF16);
    let (q, k, weight) = (random([8, 4, 64])?, random([8, 2, 64])?, random([8, 4, 64])?);
    let bias = Tensor::randn(0f32, 1.0, (1, 4, 4, 4), &device)?;
    let offsets = |numbers: [u32; 3], device: &Device| Tensor::new(&numbers, device);
    let options = Options::new().mask(Mask::causal()).deterministic(true);
    // O, dQ and dK of the first rows.
    let run = |rows: usize, offsets: Tensor| {
        let part = |tensor: &Tensor| tensor.narrow(0, 0, rows)?.to_device(&device);
        let (q, k, bias) = (Var::from_tensor(&part(&q)?)?, Var::from_tensor(&part(&k)?)?, Var::from_tensor(&bias)?);
        let o = attention_varlen_with_bias(&q, &k, &k, &bias, &offsets, &offsets, &options)?;
        let gradients = o.mul(&part(&weight)?)?.sum_all()?.backward()?;
        let of = |var: &Var| gradients.get(var).expect("a gradient").clone();
        Ok::<_, candle_core::Error>(([o.detach(), of(&q), of(&k)], of(&bias)))
    };
    let (got, want) = (run(8, offsets([0, 3, 8], &device)?)?, run(7, offsets([0, 3, 7], &device)?)?);
    let same = |got: &Tensor, want: &Tensor| {
        let (worst, largest) = difference(got, want)?;
        assert!(worst <= 2e-2 * largest && largest > 0.05, "{worst} of {largest}");
        Ok::<_, candle_core::Error>(())
    };
    for (got, want) in got.0.iter().zip(&want.0) {
        same(&got.narrow(0, 0, 7)?, want)?;
        let last = got.narrow(0, 7, 1)?;
        assert_eq!(difference(&last, &last.zeros_like()?)?.0, 0.0);
    }
    same(&got.1, &want.1)?;
    let error = run(8, offsets([0, 3, 8], &Device::Cpu)?).unwrap_err();
    assert!(error.to_string().contains("cu_seqlens_q: 5 rows at 1; allowed: at most 4"), "{error}");
    Ok(())
}

/// O and the gradients of Q, K and V on the GPU, in both types, beside those of the CPU in f32.
fn as_on_the_cpu(
    device: &Device,
    sizes: [usize; 2],
    attend: impl Fn(&Device, [&Tensor; 3]) -> Result<Tensor>,
) -> Result<()> {
    as_on_the_cpu_with(device, sizes, &[], |device, qkv, _| attend(device, qkv))
}

/// The same of a function that takes more tensors in f32, and gives their gradients.
fn as_on_the_cpu_with(
    device: &Device,
    [rows, columns]: [usize; 2],
    more: &[Tensor],
    attend: impl Fn(&Device, [&Tensor; 3], &[Var]) -> Result<Tensor>,
) -> Result<()> {
    let random = |rows, heads| Tensor::randn(0f32, 1.0, (2, rows, heads, 64), &Device::Cpu);
    let qkv = [random(rows, 4)?, random(columns, 2)?, random(columns, 2)?];
    let weight = random(rows, 4)?;
    for (dtype, bound) in [(DType::BF16, 2e-2), (DType::F16, 4e-3)] {
        let run = |device: &Device, of_run: DType| {
            let vars = [0, 1, 2]
                .map(|at: usize| Var::from_tensor(&qkv[at].to_dtype(dtype)?.to_dtype(of_run)?.to_device(device)?));
            let [q, k, v] = vars;
            let (q, k, v) = (q?, k?, v?);
            let more =
                more.iter().map(|tensor| Var::from_tensor(&tensor.to_device(device)?)).collect::<Result<Vec<_>>>()?;
            let o = attend(device, [&q, &k, &v], &more)?;
            let weight = weight.to_dtype(dtype)?.to_dtype(of_run)?.to_device(device)?;
            let gradients = o.mul(&weight)?.sum_all()?.backward()?;
            let of = |var: &Var| gradients.get(var).expect("a gradient").clone();
            let all = [o.detach(), of(&q), of(&k), of(&v)].into_iter().chain(more.iter().map(of));
            all.map(|tensor| tensor.to_device(&Device::Cpu)?.to_dtype(DType::F32)).collect::<Result<Vec<_>>>()
        };
        for (at, (got, want)) in run(device, dtype)?.iter().zip(run(&Device::Cpu, DType::F32)?).enumerate() {
            let largest = want.abs()?.max_all()?.to_scalar::<f32>()?;
            let worst = difference(got, &want)?.0;
            assert!(worst <= bound * largest, "{dtype:?} {at}: {worst} of {largest}");
        }
    }
    Ok(())
}

#[test]
fn a_device_with_a_stream_of_its_own_serves_too() -> Result<()> {
    if gpu().is_none() {
        return Ok(());
    }
    let device = Device::new_cuda_with_stream(0)?;
    for case in gradients::cases() {
        let report = case.run(&device, DType::BF16)?;
        assert!(report.worst() <= 2e-2, "{case:?}: {report:?}");
    }
    Ok(())
}

/// candle's default stream is another one in each thread. Tensors that one thread made are read in others.
#[test]
fn threads_hand_tensors_on() -> Result<()> {
    let Some(device) = gpu() else { return Ok(()) };
    let random = |heads| Tensor::randn(0f32, 1.0, (2, 2048, heads, 128), &device)?.to_dtype(DType::BF16);
    let (q, k, v) = (random(8)?, random(2)?, random(2)?);
    let options = Options::new().mask(Mask::causal());
    let want = attention(&q, &k, &v, &options)?.to_device(&Device::Cpu)?;
    // candle's copies before the call must be done: without events candle does not order them with other threads'
    // streams.
    device.synchronize()?;
    let results = std::thread::scope(|scope| {
        // A thread waits for its work before it ends. Else NVIDIA's driver (580.159.04) may hang: it does in a program of C alone
        // whose threads call cuMemAllocAsync on their own default stream, and end while that stream has work.
        let work = || {
            let o = attention(&q, &k, &v, &options)?;
            device.synchronize()?;
            Ok::<_, candle_core::Error>(o)
        };
        let threads: Vec<_> = (0..4).map(|_| scope.spawn(work)).collect();
        threads.into_iter().map(|thread| thread.join().expect("no panic")).collect::<Vec<_>>()
    });
    device.synchronize()?;
    for result in results {
        assert_eq!(difference(&result?, &want)?.0, 0.0);
    }
    Ok(())
}

#[test]
fn gradients_repeat_where_that_is_asked_for() -> Result<()> {
    let Some(device) = gpu() else { return Ok(()) };
    let random = |heads| Tensor::randn(0f32, 1.0, (2, 1024, heads, 128), &device)?.to_dtype(DType::BF16);
    let (q, k, v) = (Var::from_tensor(&random(8)?)?, random(2)?, random(2)?);
    let options = Options::new().mask(Mask::causal()).deterministic(true);
    let gradient = || {
        let gradients = attention(&q, &k, &v, &options)?.sqr()?.sum_all()?.backward()?;
        Ok::<Tensor, candle_core::Error>(gradients.get(&q).expect("a gradient of q").clone())
    };
    let first = gradient()?;
    for _ in 0..5 {
        assert_eq!(difference(&gradient()?, &first)?.0, 0.0);
    }
    Ok(())
}

#[test]
fn more_lengths_than_plans_are_kept() -> Result<()> {
    let Some(device) = gpu() else { return Ok(()) };
    let random = |seqlen| Tensor::randn(0f32, 1.0, (1, seqlen, 2, 64), &device)?.to_dtype(DType::BF16);
    let (q, k) = (random(1)?, random(600)?);
    for seqlen in 1..=600 {
        let k = k.narrow(1, 0, seqlen)?;
        let (o, lse) = attention_with_lse(&q, &k, &k, &Options::new())?;
        if seqlen % 100 == 1 {
            let want = own::attention(
                &q.to_dtype(DType::F32)?,
                &k.to_dtype(DType::F32)?,
                &k.to_dtype(DType::F32)?,
                Mask::Full,
                0.125,
            )?;
            assert!(difference(&o, &want)?.0 < 2e-2 && lse.dims() == [1, 2, 1]);
        }
    }
    Ok(())
}

#[test]
fn what_the_gpu_cannot_compute_is_refused_by_name() -> Result<()> {
    let Some(device) = gpu() else { return Ok(()) };
    let zeros = |head_dim, dtype| Tensor::zeros((1, 4, 2, head_dim), dtype, &device);
    let refused = |tensor: &Tensor| {
        let error = attention(tensor, tensor, tensor, &Options::new()).unwrap_err();
        (error.to_string(), cause(&error).cloned())
    };
    for (head_dim, dtype) in [(64, DType::F32), (512, DType::BF16)] {
        let (text, error) = refused(&zeros(head_dim, dtype)?);
        assert!(matches!(error, Some(Error::Unsupported { .. })), "{text}");
    }
    let (text, error) = refused(&zeros(72, DType::BF16)?.narrow(3, 4, 64)?);
    assert!(matches!(error, Some(Error::Layout { tensor: "q", .. })), "{text}");
    let (text, _) = refused(&zeros(64, DType::F64)?);
    assert!(text.contains("dtype f64"), "{text}");
    let q = zeros(64, DType::BF16)?;
    let text = attention(&q, &q, &q, &Options::new().sm_margin(10_000)).unwrap_err().to_string();
    assert!(text.contains("sm_margin"), "{text}");
    Ok(())
}

/// The forward takes pairs of head dims up to 256 on Hopper. Gradients end at 128, and `backward()` says so. The last
/// case is the attention of Gemma 2, whose cap and window candle's flash path leaves out.
#[test]
fn head_dims_without_gradients() -> Result<()> {
    let Some(device) = gpu() else { return Ok(()) };
    let all = [(136, 136), (192, 128), (64, 192), (256, 256)].map(|head_dims| (head_dims, Mask::causal(), None));
    let capped = ((256, 256), Mask::window(Some(63), Some(0)), Some(2.0));
    for ((head_dim, head_dim_vo), mask, cap) in all.into_iter().chain([capped]) {
        let options = Options::new().mask(mask).softcap(cap.unwrap_or(0.0));
        let random =
            |heads, head_dim| Tensor::randn(0f32, 1.0, (2, 150, heads, head_dim), &device)?.to_dtype(DType::BF16);
        let (q, k, v) = (random(4, head_dim)?, random(2, head_dim)?, random(2, head_dim_vo)?);
        let o = match attention(&q, &k, &v, &options) {
            Ok(o) => o,
            Err(error) => {
                assert!(error.to_string().contains("on sm80"), "{error}");
                say(&format!("refused: {error}"));
                continue;
            }
        };
        let [q32, k32, v32] = [&q, &k, &v].map(|x| x.to_dtype(DType::F32));
        let scale = (head_dim as f64).sqrt().recip();
        let want = own::capped(&q32?, &k32?, &v32?, mask, scale, cap.map(f64::from))?;
        let (worst, _) = difference(&o, &want)?;
        assert!(worst < 4e-2, "{head_dim}/{head_dim_vo} {mask:?} {cap:?}: {worst}");
        let variable = Var::from_tensor(&q)?;
        let error = attention(&variable, &k, &v, &options)?.sum_all()?.backward().unwrap_err();
        assert!(matches!(cause(&error), Some(Error::Unsupported { .. })), "{error}");
        assert!(error.to_string().contains("for a backward pass of bf16"), "{error}");
    }
    Ok(())
}

#[test]
fn sentences_have_the_embeddings_of_candles_own_model() -> Result<()> {
    let Some(device) = gpu() else { return Ok(()) };
    let Some(folder) = minilm::folder() else {
        say(
            "skipped: no model; scripts/make_fixture.py --model FOLDER makes one, and HATTN_MINILM_DIR=FOLDER names it",
        );
        return Ok(());
    };
    let model = Model::open(&folder)?;
    let ours = Encoder::load(model.weights(&device)?, &model.config)?;
    let theirs = BertModel::load(model.weights(&device)?, &model.config)?;
    for (dtype, bound) in [(DType::F16, 1e-3), (DType::BF16, 8e-3)] {
        let attend = |q: &Tensor, k: &Tensor, v: &Tensor| {
            let [q, k, v] = [q, k, v].map(|tensor| tensor.to_dtype(dtype));
            attention(&q?, &k?, &v?, &Options::new())?.to_dtype(DType::F32)
        };
        let mut worst = 0f32;
        for sentence in SENTENCES {
            let tokens = model.tokens(sentence, &device)?;
            let own = embedding_of(&theirs.forward(&tokens, &tokens.zeros_like()?, None)?)?;
            worst = worst.max(difference(&embedding_of(&ours.forward(&tokens, &attend)?)?, &own)?.0);
        }
        say(&format!("MiniLM, attention in {dtype:?}: embeddings differ from f32 by at most {worst:.1e}"));
        assert!(worst <= bound, "{worst}");
    }
    Ok(())
}

/// A model's logits with the patched crate, which `load` is told to take or not. They may be twice as far from f32 as
/// those with candle's own attention in the same precision, as everywhere in this repository.
fn judge<M>(
    name: &str,
    device: &Device,
    weights: &Weights,
    load: impl Fn(bool, VarBuilder<'static>) -> Result<M>,
    forward: impl Fn(&mut M, &Tensor, usize) -> Result<Tensor>,
) -> Result<()> {
    let run = |dtype, device: &Device, patched| {
        let mut model = load(patched, weights.on(dtype, device)?)?;
        logits(2, device, &mut |tokens, before| forward(&mut model, tokens, before))
    };
    let exact = run(DType::F32, &Device::Cpu, false)?;
    let (own, largest) = difference(&run(DType::BF16, device, false)?, &exact)?;
    let (ours, _) = difference(&run(DType::BF16, device, true)?, &exact)?;
    say(&format!(
        "{name}, logits up to {largest:.2}: ours differ from f32 by at most {ours:.1e}, candle's own by {own:.1e}"
    ));
    assert!(ours <= 2.0 * own && largest > 0.1, "{ours} {own} {largest}");
    Ok(())
}

#[test]
fn llama_runs_on_the_patched_crate() -> Result<()> {
    let Some(device) = gpu() else { return Ok(()) };
    for head_dim in [64, 128, 256] {
        let load = |patched, at: VarBuilder<'static>| {
            let config = llama::Config { use_flash_attn: patched, ..llama_config(head_dim) };
            Ok((llama::Cache::new(true, at.dtype(), &config, at.device())?, llama::Llama::load(at, &config)?))
        };
        let weights = Weights::random(|at| load(false, at))?;
        judge(&format!("Llama, head dim {head_dim}"), &device, &weights, load, |(cache, model), tokens, before| {
            model.forward(tokens, before, cache)
        })?;
    }
    Ok(())
}

/// [`gemma_config`] says which part of them candle gives to the crate.
#[test]
fn gemmas_run_on_the_patched_crate() -> Result<()> {
    let Some(device) = gpu() else { return Ok(()) };
    macro_rules! judge_each {
        ($($model:ident),*) => {$(
            let config = serde_json::from_value::<$model::Config>(gemma_config()).expect("a config");
            let load = |patched, at| $model::Model::new(patched, &config, at);
            let weights = Weights::random(|at| load(false, at))?.with_small_embeddings()?;
            judge(stringify!($model), &device, &weights, load, $model::Model::forward)?;
        )*};
    }
    judge_each!(gemma, gemma2, gemma3);
    Ok(())
}

/// Of candle's Phi models `quantized_phi3` alone has a flash path. It computes attention in bf16, and all else in f32.
/// On a GPU it takes a batch of 1 alone.
#[test]
fn phi_runs_on_the_patched_crate() -> Result<()> {
    let Some(device) = gpu() else { return Ok(()) };
    let file = phi_file()?;
    let run = |device: &Device, patched| {
        let mut file = Cursor::new(&file);
        let content = gguf_file::Content::read(&mut file)?;
        let mut model = quantized_phi3::ModelWeights::from_gguf(patched, content, &mut file, device)?;
        logits(1, device, &mut |tokens, before| model.forward(tokens, before))
    };
    let (ours, largest) = difference(&run(&device, true)?, &run(&Device::Cpu, false)?)?;
    say(&format!("Phi 3, logits up to {largest:.2}: ours differ from f32 by at most {ours:.1e}"));
    assert!(ours <= 4e-2 * largest && largest > 0.1, "{ours} {largest}");
    Ok(())
}

/// With the patched crate candle's Qwen 3 has no other attention on a GPU, so that it is compared with the one on the
/// CPU.
#[test]
fn qwen_runs_on_the_patched_crate() -> Result<()> {
    let Some(device) = gpu() else { return Ok(()) };
    let config = qwen_config();
    let weights = Weights::random(|at| qwen3::ModelForCausalLM::new(&config, at))?;
    let run = |dtype: DType, device: &Device| {
        let mut model = qwen3::ModelForCausalLM::new(&config, weights.on(dtype, device)?)?;
        logits(2, device, &mut |tokens, before| model.forward(tokens, before))
    };
    let exact = run(DType::F32, &Device::Cpu)?;
    for (dtype, bound) in [(DType::BF16, 4e-2), (DType::F16, 8e-3)] {
        let (ours, largest) = difference(&run(dtype, &device)?, &exact)?;
        say(&format!("Qwen 3, {dtype:?}, logits up to {largest:.2}: ours differ from f32 by at most {ours:.1e}"));
        assert!(ours <= bound * largest && largest > 0.1, "{ours} {largest}");
    }
    Ok(())
}

#[test]
fn a_language_model_learns_as_with_candles_own_attention() -> Result<()> {
    let Some(device) = gpu() else { return Ok(()) };
    let setup = Setup {
        batch: 16,
        seqlen: 256,
        layers: 4,
        heads_q: 8,
        heads_kv: 2,
        head_dim: 64,
        steps: 400,
        learning_rate: 1e-3,
    };
    let options = Options::new().mask(Mask::causal());
    let half = |q: &Tensor, k: &Tensor, v: &Tensor| {
        let [q, k, v] = [q, k, v].map(|tensor| tensor.to_dtype(DType::BF16));
        attention(&q?, &k?, &v?, &options)?.to_dtype(DType::F32)
    };
    let timed = |attend: hopper_attention_integration_tests::Attend<'_>| {
        let since = Instant::now();
        let losses = train(setup, &device, attend)?;
        Ok::<_, candle_core::Error>((losses, since.elapsed().as_secs_f64()))
    };
    let (ours, seconds) = timed(&half)?;
    let (theirs, seconds_own) = timed(&|q, k, v| own::attention(q, k, v, Mask::causal(), 0.125))?;
    let result = verdict(&ours, &theirs, 3e-2, 0.05);
    say(&format!("training: {}", result.text));
    say(&format!("training: {seconds:.1} s with ours in bf16, {seconds_own:.1} s with candle's own operations in f32"));
    assert!(result.passed, "{}", result.text);
    Ok(())
}
