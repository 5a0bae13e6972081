//! What weight files call a decoder's tensors.

/// A convention of names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Naming {
    /// Of `transformers`, in safetensors.
    HuggingFace,
    /// Of llama.cpp.
    Gguf,
}

/// A tensor of which there is one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum GlobalTensor {
    Embedding,
    Norm,
    Output,
}

/// A tensor of which every layer has one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LayerTensor {
    AttentionNorm,
    Query,
    Key,
    Value,
    QueryNorm,
    KeyNorm,
    AttentionOutput,
    /// Behind attention, where there is one.
    PostAttentionNorm,
    FfnNorm,
    /// The norm in front of the feed-forward network where there is one behind attention, too.
    PreFfnNorm,
    /// Behind the feed-forward network, where there is one.
    PostFfnNorm,
    Gate,
    Up,
    Down,
}

impl Naming {
    /// Name of a tensor's weights.
    pub(crate) fn global(self, tensor: GlobalTensor) -> &'static str {
        match (self, tensor) {
            (Self::HuggingFace, GlobalTensor::Embedding) => "model.embed_tokens.weight",
            (Self::HuggingFace, GlobalTensor::Norm) => "model.norm.weight",
            (Self::HuggingFace, GlobalTensor::Output) => "lm_head.weight",
            (Self::Gguf, GlobalTensor::Embedding) => "token_embd.weight",
            (Self::Gguf, GlobalTensor::Norm) => "output_norm.weight",
            (Self::Gguf, GlobalTensor::Output) => "output.weight",
        }
    }

    /// Name of a layer's tensor; `kind` is `weight` or `bias`.
    pub(crate) fn layer(self, layer: usize, tensor: LayerTensor, kind: &str) -> String {
        let (hugging_face, gguf) = tensor.stems();
        match self {
            Self::HuggingFace => format!("model.layers.{layer}.{hugging_face}.{kind}"),
            Self::Gguf => format!("blk.{layer}.{gguf}.{kind}"),
        }
    }
}

impl LayerTensor {
    /// The middle of the name, for Hugging Face and for GGUF.
    fn stems(self) -> (&'static str, &'static str) {
        match self {
            Self::AttentionNorm => ("input_layernorm", "attn_norm"),
            Self::Query => ("self_attn.q_proj", "attn_q"),
            Self::Key => ("self_attn.k_proj", "attn_k"),
            Self::Value => ("self_attn.v_proj", "attn_v"),
            Self::QueryNorm => ("self_attn.q_norm", "attn_q_norm"),
            Self::KeyNorm => ("self_attn.k_norm", "attn_k_norm"),
            Self::AttentionOutput => ("self_attn.o_proj", "attn_output"),
            Self::PostAttentionNorm => ("post_attention_layernorm", "post_attention_norm"),
            Self::FfnNorm => ("post_attention_layernorm", "ffn_norm"),
            Self::PreFfnNorm => ("pre_feedforward_layernorm", "ffn_norm"),
            Self::PostFfnNorm => ("post_feedforward_layernorm", "post_ffw_norm"),
            Self::Gate => ("mlp.gate_proj", "ffn_gate"),
            Self::Up => ("mlp.up_proj", "ffn_up"),
            Self::Down => ("mlp.down_proj", "ffn_down"),
        }
    }
}
