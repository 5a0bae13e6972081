//! What a model is: sizes, options and the rotary embedding.

mod fields;
mod from_gguf;
mod from_json;
pub(crate) mod limits;
mod quantization;
mod rope;

use inflight_backend::{Activation, AttentionShape};

pub(crate) use fields::Fields;
pub(crate) use from_json::generation_eos_token_ids;
pub use quantization::Fp8Weights;
pub use rope::{RopeConfig, RopeScaling};

use crate::Architecture;

/// A decoder's sizes and options, checked: read from `config.json` or GGUF metadata.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// The family.
    pub architecture: Architecture,
    /// Tokens that the model knows.
    pub vocab_size: usize,
    /// Elements of a token's state between layers.
    pub hidden_size: usize,
    /// Layers.
    pub num_layers: usize,
    /// Query heads.
    pub num_heads: usize,
    /// Key and value heads; divides `num_heads`.
    pub num_kv_heads: usize,
    /// Elements of a head; even.
    pub head_dim: usize,
    /// Elements between the two halves of the feed-forward network.
    pub ffn_size: usize,
    /// Keeps RMSNorm from dividing by zero.
    pub rms_norm_eps: f32,
    /// Positions.
    pub rope: RopeConfig,
    /// Tokens of context that the model was made for.
    pub max_position: usize,
    /// Whether the output matrix is the embedding table.
    pub tie_word_embeddings: bool,
    /// Whether queries, keys and values have biases.
    pub qkv_bias: bool,
    /// Whether the attention's output has a bias.
    pub attention_output_bias: bool,
    /// Whether the feed-forward network has biases.
    pub ffn_bias: bool,
    /// Whether every query and key head is normalised before rotation.
    pub qk_norm: bool,
    /// For each layer how many tokens, itself included, a token sees; `None`: all before it.
    pub layer_windows: Vec<Option<usize>>,
    /// Tokens that end a sequence, if the files say so.
    pub eos_token_ids: Vec<u32>,
    /// How the linear layers' weights come to be in fp8, if they are.
    pub fp8_weights: Option<Fp8Weights>,
    /// What sets its layers apart from Llama's.
    pub style: LayerStyle,
}

/// What sets the layers of some families apart from Llama's; those by default.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerStyle {
    /// What gates of the feed-forward network go through.
    pub activation: Activation,
    /// Multiplies scores; `None`: one over the root of the head's size.
    pub attention_scale: Option<f32>,
    /// Multiplies embeddings as they enter the first layer.
    pub embedding_scale: f32,
    /// Whether what attention and feed-forward network give is normalised before it joins the
    /// state.
    pub post_norms: bool,
    /// Whether norms of Hugging Face folders are stored less one.
    pub norms_less_one: bool,
    /// Positions in layers that have a window, if they are others there.
    pub local_rope: Option<RopeConfig>,
}

impl Default for LayerStyle {
    fn default() -> Self {
        Self {
            activation: Activation::Silu,
            attention_scale: None,
            embedding_scale: 1.0,
            post_norms: false,
            norms_less_one: false,
            local_rope: None,
        }
    }
}

impl ModelConfig {
    /// The attention layers' shape with KV cache blocks of `block_size` tokens.
    pub fn attention_shape(&self, block_size: usize) -> AttentionShape {
        AttentionShape {
            num_heads: self.num_heads,
            num_kv_heads: self.num_kv_heads,
            head_dim: self.head_dim,
            block_size,
        }
    }

    /// What multiplies scores.
    pub fn attention_scale(&self) -> f32 {
        self.style.attention_scale.unwrap_or(1.0 / (self.head_dim as f32).sqrt())
    }

    /// Elements of one token's query heads.
    pub fn q_len(&self) -> usize {
        self.num_heads * self.head_dim
    }

    /// Elements of one token's key heads, and of its value heads.
    pub fn kv_len(&self) -> usize {
        self.num_kv_heads * self.head_dim
    }

    /// Elements of one token's query, key and value heads together.
    pub fn qkv_len(&self) -> usize {
        self.q_len() + 2 * self.kv_len()
    }
}
