//! Language models of candle-transformers with random weights, which a test loads again on another device or in
//! another type.

use std::collections::HashMap;
use std::io::Cursor;

use candle_core::quantized::gguf_file::{self, Value};
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{DType, Device, Result, Tensor};
use candle_nn::{VarBuilder, VarMap};
use candle_transformers::models::{llama, qwen3};

/// Weights in f32 on the host, by their names.
pub struct Weights(HashMap<String, Tensor>);

impl Weights {
    /// The weights that `load` asks for, random.
    ///
    /// # Errors
    /// `load` fails.
    pub fn random<M>(load: impl FnOnce(VarBuilder<'static>) -> Result<M>) -> Result<Self> {
        let variables = VarMap::new();
        load(VarBuilder::from_varmap(&variables, DType::F32, &Device::Cpu))?;
        let variables = variables.data().lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        Ok(Self(variables.iter().map(|(name, variable)| (name.clone(), variable.as_detached_tensor())).collect()))
    }

    /// The same weights with embeddings of the standard deviation `1 / sqrt(hidden_size)`, in the place of candle's 1.
    /// Gemma multiplies its embeddings. Beside larger ones its attention would count for nothing.
    ///
    /// # Errors
    /// candle's own.
    pub fn with_small_embeddings(mut self) -> Result<Self> {
        if let Some(embeddings) = self.0.get_mut("model.embed_tokens.weight") {
            *embeddings = (&*embeddings / (embeddings.dim(1)? as f64).sqrt())?;
        }
        Ok(self)
    }

    /// The same weights elsewhere.
    ///
    /// # Errors
    /// They cannot be copied.
    pub fn on(&self, dtype: DType, device: &Device) -> Result<VarBuilder<'static>> {
        let moved = |(name, tensor): (&String, &Tensor)| Ok((name.clone(), tensor.to_device(device)?.to_dtype(dtype)?));
        let tensors = self.0.iter().map(moved).collect::<Result<HashMap<_, _>>>()?;
        Ok(VarBuilder::from_tensors(tensors, dtype, device))
    }
}

/// A small Llama with four query heads for each KV head.
pub fn llama_config(head_dim: usize) -> llama::Config {
    llama::Config {
        hidden_size: 8 * head_dim,
        intermediate_size: 16 * head_dim,
        vocab_size: 512,
        num_hidden_layers: 4,
        num_attention_heads: 8,
        num_key_value_heads: 2,
        ..llama::Config::config_7b_v2(false)
    }
}

/// A small Qwen 3 with two query heads for each KV head, and a head dim that is not `hidden_size / heads`.
pub fn qwen_config() -> qwen3::Config {
    qwen3::Config {
        vocab_size: 512,
        hidden_size: 512,
        intermediate_size: 1024,
        num_hidden_layers: 4,
        num_attention_heads: 8,
        head_dim: 128,
        attention_bias: false,
        num_key_value_heads: 4,
        max_position_embeddings: 4096,
        sliding_window: None,
        max_window_layers: 0,
        tie_word_embeddings: false,
        rope_theta: 10_000.0,
        rms_norm_eps: 1e-6,
        use_sliding_window: false,
        hidden_act: candle_nn::Activation::Silu,
    }
}

/// A small Gemma, Gemma 2 or Gemma 3, with the head dim of the real ones and four query heads for the KV head.
///
/// - With a base of 1 all angles of RoPE are whole numbers. candle computes them in the model's type: rounded angles
///   would hide the errors of attention.
/// - candle's flash path leaves out both the cap and the window. With either its logits are wrong. So there is no cap,
///   and the prompt of [`logits`] is as long as the window.
/// - For the tokens that follow, the window counts in Gemma 3: in every other layer its cache holds 200 keys.
pub fn gemma_config() -> serde_json::Value {
    serde_json::json!({
        "attention_bias": false,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_attention_heads": 4,
        "num_hidden_layers": 4,
        "num_key_value_heads": 1,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1.0,
        "rope_local_base_freq": 1.0,
        "vocab_size": 512,
        "final_logit_softcapping": 30.0,
        "attn_logit_softcapping": null,
        "query_pre_attn_scalar": 256,
        "sliding_window": 200,
        "sliding_window_pattern": 2,
        "max_position_embeddings": 256
    })
}

/// A small Phi 3 with its head dim of 96 and two query heads for each KV head: a file of random weights in f32, as
/// candle's `quantized_phi3` reads it.
///
/// # Errors
/// candle's own.
pub fn phi_file() -> Result<Vec<u8>> {
    let (layers, heads, heads_kv, hidden, inner) = (4, 8, 4, 768, 1536);
    let of_layer = |layer: usize| {
        let shapes = [
            ("attn_norm", vec![hidden]),
            ("attn_qkv", vec![hidden + 2 * heads_kv * 96, hidden]),
            ("attn_output", vec![hidden, hidden]),
            ("ffn_norm", vec![hidden]),
            ("ffn_up", vec![2 * inner, hidden]),
            ("ffn_down", vec![hidden, inner]),
        ];
        shapes.map(|(name, shape)| (format!("blk.{layer}.{name}.weight"), shape))
    };
    let others = [("token_embd", vec![512, hidden]), ("output_norm", vec![hidden]), ("output", vec![512, hidden])];
    let others = others.map(|(name, shape)| (format!("{name}.weight"), shape));
    let random = |(name, shape): (String, Vec<usize>)| {
        let tensor = match shape[..] {
            [_, columns] => Tensor::randn(0f32, (columns as f32).sqrt().recip(), shape, &Device::Cpu)?,
            _ => Tensor::ones(shape, DType::F32, &Device::Cpu)?,
        };
        Ok((name, QTensor::quantize(&tensor, GgmlDType::F32)?))
    };
    let tensors = others.into_iter().chain((0..layers).flat_map(of_layer)).map(random).collect::<Result<Vec<_>>>()?;
    let tensors: Vec<_> = tensors.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
    let numbers = [
        ("phi3.attention.head_count", heads),
        ("phi3.attention.head_count_kv", heads_kv),
        ("phi3.block_count", layers),
        ("phi3.embedding_length", hidden),
        ("phi3.context_length", 256),
        ("phi3.feed_forward_length", inner),
        ("phi3.rope.dimension_count", 96),
    ];
    let numbers = numbers.map(|(name, number)| (name, Value::U32(number as u32)));
    let epsilon = Value::F32(1e-5);
    let mut values: Vec<_> = numbers.iter().map(|(name, value)| (*name, value)).collect();
    values.push(("phi3.attention.layer_norm_rms_epsilon", &epsilon));
    let mut file = Cursor::new(Vec::new());
    gguf_file::write(&mut file, &values, &tensors)?;
    Ok(file.into_inner())
}

/// The logits after prompts of 200 tokens and after each of 8 tokens that follow one by one,
/// `[steps, batch, vocabulary]` in f32 on the host. `forward` takes tokens and the number of those before them.
///
/// # Errors
/// The model fails.
pub fn logits(
    batch: usize,
    device: &Device,
    forward: &mut dyn FnMut(&Tensor, usize) -> Result<Tensor>,
) -> Result<Tensor> {
    // Any tokens will do, as long as they differ.
    let tokens = |begin: usize, count: usize| {
        let tokens = (0..batch * count).map(|i| ((7 + (i % count + begin) * (31 + i / count * 6)) % 512) as u32);
        Tensor::from_iter(tokens, device)?.reshape((batch, count))
    };
    let mut all = Vec::new();
    for (begin, count) in std::iter::once((0, 200)).chain((200..208).map(|begin| (begin, 1))) {
        let logits = forward(&tokens(begin, count)?, begin)?;
        all.push(logits.to_dtype(DType::F32)?.to_device(&Device::Cpu)?.flatten(0, logits.rank() - 2)?);
    }
    Tensor::stack(&all, 0)
}
