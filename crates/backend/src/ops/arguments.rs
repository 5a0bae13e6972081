//! What operators take.

use crate::{AttentionShape, Backend, DeviceBatch, KvLayer, StepShape};

/// What penalties need to know of each sequence, kept on the device.
#[derive(Clone)]
pub struct SamplingState<B: Backend> {
    /// `[max_rows, vocab_size]` words: bit 31 set if the token is in the prompt, the rest counts
    /// how often it is in the output.
    pub token_counts: B::Buffer,
    /// Tokens a model knows.
    pub vocab_size: usize,
}

/// Arguments of [`Backend::embed`].
#[allow(missing_docs)]
pub struct Embed<'a, B: Backend> {
    /// `[vocab_size, hidden]`.
    pub table: &'a B::Embedding,
    /// `[num_tokens, hidden]`.
    pub out: &'a B::Buffer,
    /// Multiplies every element; 1 for most models.
    pub scale: f32,
    pub batch: &'a DeviceBatch<B>,
    pub step: StepShape,
}

/// What a gate of a feed-forward layer goes through.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Activation {
    /// `x / (1 + exp(-x))`.
    #[default]
    Silu,
    /// The Gaussian error linear unit, with its usual approximation by a hyperbolic tangent.
    ///
    /// # Source
    /// Hendrycks and Gimpel: "Gaussian error linear units", 2016, section 2.
    GeluTanh,
}

/// Arguments of [`Backend::rms_norm`].
#[allow(missing_docs)]
pub struct RmsNorm<'a, B: Backend> {
    /// `[num_rows, len]`.
    pub x: &'a B::Buffer,
    /// `[len]`, f32.
    pub weight: &'a B::Buffer,
    /// `[num_rows, len]`.
    pub out: &'a B::Buffer,
    pub num_rows: usize,
    pub len: usize,
    pub eps: f32,
}

/// Arguments of [`Backend::matmul`].
#[allow(missing_docs)]
pub struct Matmul<'a, B: Backend> {
    /// `[num_rows, cols]`.
    pub x: &'a B::Buffer,
    /// `[rows, cols]`.
    pub weight: &'a B::Matrix,
    /// `[rows]`, f32.
    pub bias: Option<&'a B::Buffer>,
    /// `[num_rows, rows]`.
    pub out: &'a B::Buffer,
    pub num_rows: usize,
    /// Add to `out` instead of overwriting it (residual connections).
    pub accumulate: bool,
}

/// Arguments of [`Backend::gated_matmul`].
#[allow(missing_docs)]
pub struct GatedMatmul<'a, B: Backend> {
    /// `[num_rows, cols]`.
    pub x: &'a B::Buffer,
    /// `[2 * len, cols]`.
    pub weight: &'a B::Matrix,
    /// `[2 * len]`, f32.
    pub bias: Option<&'a B::Buffer>,
    /// Room for both products, `[num_rows, 2 * len]`. What is in it afterwards is not said.
    pub gate_up: &'a B::Buffer,
    /// `[num_rows, len]`.
    pub out: &'a B::Buffer,
    pub num_rows: usize,
    pub len: usize,
    pub activation: Activation,
}

impl<'a, B: Backend> GatedMatmul<'a, B> {
    /// What follows the product.
    pub fn gate(&self) -> GateAndMul<'a, B> {
        let Self { gate_up, out, num_rows, len, activation, .. } = *self;
        GateAndMul { gate_up, out, num_rows, len, activation }
    }

    /// Both products side by side.
    pub fn matmul(&self) -> Matmul<'a, B> {
        let Self { x, weight, bias, gate_up, num_rows, .. } = *self;
        Matmul { x, weight, bias, out: gate_up, num_rows, accumulate: false }
    }
}

/// Arguments of [`Backend::gate_and_mul`].
#[allow(missing_docs)]
pub struct GateAndMul<'a, B: Backend> {
    /// `[num_rows, 2 * len]`.
    pub gate_up: &'a B::Buffer,
    /// `[num_rows, len]`.
    pub out: &'a B::Buffer,
    pub num_rows: usize,
    pub len: usize,
    pub activation: Activation,
}

/// Arguments of [`Backend::rope_and_cache`].
#[allow(missing_docs)]
pub struct RopeAndCache<'a, B: Backend> {
    /// `[num_tokens, qkv_len]`: queries, keys, values. Queries are changed in place.
    pub qkv: &'a B::Buffer,
    /// `[max_positions, rotary_dim]`: `rotary_dim / 2` cosines, then as many sines. f32.
    pub rotary_table: &'a B::Buffer,
    /// Elements of a head that are rotated.
    pub rotary_dim: usize,
    /// Whether pairs are neighbours (GGUF's llama) or half a head apart (Hugging Face).
    pub interleaved: bool,
    /// `[head_dim]` each: RMSNorm of every query and key head before rotation.
    pub qk_norm: Option<(&'a B::Buffer, &'a B::Buffer)>,
    /// Epsilon of that norm.
    pub eps: f32,
    pub attention: AttentionShape,
    pub kv: &'a KvLayer<B>,
    pub batch: &'a DeviceBatch<B>,
    pub step: StepShape,
}

/// Arguments of [`Backend::attention`].
#[allow(missing_docs)]
pub struct Attention<'a, B: Backend> {
    /// `[num_tokens, qkv_len]`; only the queries are read.
    pub qkv: &'a B::Buffer,
    pub kv: &'a KvLayer<B>,
    /// `[num_tokens, q_len]`.
    pub out: &'a B::Buffer,
    pub attention: AttentionShape,
    /// Multiplies scores before the softmax.
    pub scale: f32,
    /// How many tokens, itself included, a token sees; `None`: all before it.
    pub window: Option<usize>,
    pub batch: &'a DeviceBatch<B>,
    pub step: StepShape,
}

/// Arguments of [`Backend::sample`].
#[allow(missing_docs)]
pub struct Sample<'a, B: Backend> {
    /// `[num_sampled, vocab_size]`.
    pub logits: &'a B::Buffer,
    pub state: &'a SamplingState<B>,
    pub batch: &'a DeviceBatch<B>,
    pub step: StepShape,
    /// Whether some row has a rule that looks at the whole distribution.
    pub is_unusual: bool,
    /// Laid out as [`crate::late`] says; read by rows that have a late row.
    pub late: &'a B::Buffer,
    /// Laid out as [`crate::OutputLayout`].
    pub outputs: &'a B::Buffer,
    pub max_rows: usize,
}
