//! Qwen3: Llama with norms on every query and key head, whose size is its own.

use super::{Family, JsonOptions, SILU, qwen_windows};
use crate::{LayerStyle, ModelError, config::Fields};

pub(super) const FAMILY: Family = Family {
    class: "Qwen3ForCausalLM",
    model_type: "qwen3",
    gguf_name: Some("qwen3"),
    gguf_interleaved: false,
    default_head_dim: Some(128),
    qk_norm: true,
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
        ffn_bias: false,
        layer_windows: qwen_windows(fields, num_layers)?,
        style: LayerStyle::default(),
    })
}
