//! Language models of candle-transformers with random weights, which a test loads again on another device or in
//! another type.

use std::collections::HashMap;

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

/// The logits after a prompt and after each of some tokens that follow one by one, `[steps, batch, vocabulary]` in f32
/// on the host. `forward` takes tokens and the number of those before them.
///
/// # Errors
/// The model fails.
pub fn logits(
    prompt: usize,
    following: usize,
    device: &Device,
    forward: &mut dyn FnMut(&Tensor, usize) -> Result<Tensor>,
) -> Result<Tensor> {
    // Any tokens will do, as long as they differ.
    let tokens = |begin: usize, count: usize| {
        let tokens = (0..2 * count).map(|i| ((7 + (i % count + begin) * (31 + i / count * 6)) % 512) as u32);
        Tensor::from_iter(tokens, device)?.reshape((2, count))
    };
    let mut all = Vec::new();
    for step in 0..=following {
        let (begin, count) = if step == 0 { (0, prompt) } else { (prompt + step - 1, 1) };
        let logits = forward(&tokens(begin, count)?, begin)?;
        all.push(logits.to_dtype(DType::F32)?.to_device(&Device::Cpu)?.flatten(0, logits.rank() - 2)?);
    }
    Tensor::stack(&all, 0)
}
