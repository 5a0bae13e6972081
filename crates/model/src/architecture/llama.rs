//! Llama 2 and 3, SmolLM2, and the many models that took their shape.

use super::{Family, JsonOptions, SILU};
use crate::{LayerStyle, ModelError, config::Fields};

pub(super) const FAMILY: Family = Family {
    class: "LlamaForCausalLM",
    model_type: "llama",
    gguf_name: Some("llama"),
    gguf_interleaved: true,
    default_head_dim: None,
    qk_norm: false,
    activations: SILU,
    part_of: None,
    json_defaults: None,
    read_json,
};

fn read_json(fields: &Fields<'_>, num_layers: usize) -> Result<JsonOptions, ModelError> {
    let attention_bias = fields.bool("attention_bias")?.unwrap_or(false);
    Ok(JsonOptions {
        qkv_bias: attention_bias,
        attention_output_bias: attention_bias,
        ffn_bias: fields.bool("mlp_bias")?.unwrap_or(false),
        layer_windows: vec![None; num_layers],
        style: LayerStyle::default(),
    })
}
