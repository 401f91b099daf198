//! The sentence encoder all-MiniLM-L6-v2 with an attention of the caller's choice.
//!
//! A model is read from a folder that `scripts/make_fixture.py --model FOLDER` makes.

use std::path::{Path, PathBuf};

use candle_core::{D, DType, Device, Error, Result, Tensor};
use candle_nn::{Embedding, LayerNorm, Linear, Module, VarBuilder, embedding, layer_norm, linear};
use candle_transformers::models::bert::Config;
use tokenizers::Tokenizer;

use crate::Attend;

/// Of each three sentences the first two mean nearly the same, and the third has nothing to do with them. All their tokens
/// are frequent ones, which a small model (`--small`) has too.
pub const SENTENCES: [&str; 6] = [
    "A cat sits at the window and looks at the birds in the garden.",
    "From the window the cat sees some birds outside the house.",
    "The central bank raised its interest rate by half a percentage point.",
    "With attention a model asks for each position of a text how much every other position matters, which lets it look \
     anywhere in the text at once; that is why its cost grows with the square of the length of the text.",
    "With attention each position of a text looks at all other positions of the text.",
    "Cook the meat slowly until it is brown, then add salt and water.",
];

/// The folder with the model, which the variable `HATTN_MINILM_DIR` names.
pub fn folder() -> Option<PathBuf> {
    let given = std::env::var_os("HATTN_MINILM_DIR").map(PathBuf::from);
    given.filter(|folder| folder.join("model.safetensors").exists())
}

/// What both encoders need: weights, sizes and the tokens of sentences.
pub struct Model {
    folder: PathBuf,
    /// The sizes.
    pub config: Config,
    tokenizer: Tokenizer,
}

impl Model {
    /// Reads the sizes and the tokenizer.
    ///
    /// # Errors
    /// A file is missing or is no such file.
    pub fn open(folder: &Path) -> Result<Self> {
        let config = std::fs::read_to_string(folder.join("config.json"))?;
        let config = serde_json::from_str(&config).map_err(Error::wrap)?;
        let mut tokenizer = Tokenizer::from_file(folder.join("tokenizer.json")).map_err(Error::wrap)?;
        // Each sentence is encoded alone, in its own length.
        tokenizer.with_padding(None);
        Ok(Self { folder: folder.into(), config, tokenizer })
    }

    /// The weights, in f32.
    ///
    /// # Errors
    /// The file is missing or broken.
    pub fn weights(&self, device: &Device) -> Result<VarBuilder<'static>> {
        let bytes = std::fs::read(self.folder.join("model.safetensors"))?;
        VarBuilder::from_buffered_safetensors(bytes, DType::F32, device)
    }

    /// The tokens of a sentence: `[1, tokens]`.
    ///
    /// # Errors
    /// The tokenizer refuses the sentence.
    pub fn tokens(&self, sentence: &str, device: &Device) -> Result<Tensor> {
        let encoding = self.tokenizer.encode(sentence, true).map_err(Error::wrap)?;
        Tensor::new(encoding.get_ids(), device)?.unsqueeze(0)
    }
}

/// The meaning of a sentence as a vector of length 1: the mean of its tokens' states `[1, tokens, hidden]`.
///
/// # Errors
/// The states have another shape.
pub fn embedding_of(states: &Tensor) -> Result<Tensor> {
    let mean = states.mean(1)?;
    mean.broadcast_div(&mean.sqr()?.sum_keepdim(D::Minus1)?.sqrt()?)?.squeeze(0)
}

/// The encoder. Its weights have the names that BERT's have.
pub struct Encoder {
    words: Embedding,
    positions: Embedding,
    types: Embedding,
    norm: LayerNorm,
    layers: Vec<Layer>,
    heads: usize,
}

struct Layer {
    query: Linear,
    key: Linear,
    value: Linear,
    output: Linear,
    norm_attention: LayerNorm,
    inner: Linear,
    outer: Linear,
    norm: LayerNorm,
}

impl Encoder {
    /// Reads the weights.
    ///
    /// # Errors
    /// A weight is missing or has another shape.
    pub fn load(weights: VarBuilder<'_>, config: &Config) -> Result<Self> {
        let (hidden, eps) = (config.hidden_size, config.layer_norm_eps);
        let at = weights.pp("embeddings");
        let layer = |number| Layer::load(weights.pp(format!("encoder.layer.{number}")), config);
        Ok(Self {
            words: embedding(config.vocab_size, hidden, at.pp("word_embeddings"))?,
            positions: embedding(config.max_position_embeddings, hidden, at.pp("position_embeddings"))?,
            types: embedding(config.type_vocab_size, hidden, at.pp("token_type_embeddings"))?,
            norm: layer_norm(hidden, eps, at.pp("LayerNorm"))?,
            layers: (0..config.num_hidden_layers).map(layer).collect::<Result<_>>()?,
            heads: config.num_attention_heads,
        })
    }

    /// The last layer's states `[batch, tokens, hidden]` of tokens `[batch, tokens]`.
    ///
    /// # Errors
    /// The attention refuses.
    pub fn forward(&self, tokens: &Tensor, attend: Attend<'_>) -> Result<Tensor> {
        let positions = Tensor::arange(0u32, tokens.dim(1)? as u32, tokens.device())?;
        let x = (self.words.forward(tokens)? + self.types.forward(&tokens.zeros_like()?)?)?;
        let mut x = self.norm.forward(&x.broadcast_add(&self.positions.forward(&positions)?)?)?;
        for layer in &self.layers {
            x = layer.forward(&x, self.heads, attend)?;
        }
        Ok(x)
    }
}

impl Layer {
    fn load(at: VarBuilder<'_>, config: &Config) -> Result<Self> {
        let (hidden, inner, eps) = (config.hidden_size, config.intermediate_size, config.layer_norm_eps);
        let attention = at.pp("attention");
        Ok(Self {
            query: linear(hidden, hidden, attention.pp("self.query"))?,
            key: linear(hidden, hidden, attention.pp("self.key"))?,
            value: linear(hidden, hidden, attention.pp("self.value"))?,
            output: linear(hidden, hidden, attention.pp("output.dense"))?,
            norm_attention: layer_norm(hidden, eps, attention.pp("output.LayerNorm"))?,
            inner: linear(hidden, inner, at.pp("intermediate.dense"))?,
            outer: linear(inner, hidden, at.pp("output.dense"))?,
            norm: layer_norm(hidden, eps, at.pp("output.LayerNorm"))?,
        })
    }

    fn forward(&self, x: &Tensor, heads: usize, attend: Attend<'_>) -> Result<Tensor> {
        let (batch, seqlen, hidden) = x.dims3()?;
        let split = |x: Tensor| x.reshape((batch, seqlen, heads, hidden / heads));
        let [q, k, v] = [&self.query, &self.key, &self.value].map(|linear| split(linear.forward(x)?));
        let context = attend(&q?, &k?, &v?)?.reshape((batch, seqlen, hidden))?;
        let x = self.norm_attention.forward(&(x + self.output.forward(&context)?)?)?;
        let inner = self.inner.forward(&x)?.gelu_erf()?;
        self.norm.forward(&(&x + self.outer.forward(&inner)?)?)
    }
}
