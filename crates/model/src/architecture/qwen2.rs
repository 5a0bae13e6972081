//! Qwen2 and Qwen2.5: Llama with biases on queries, keys and values.

use super::{Family, JsonOptions, SILU, qwen_windows};
use crate::{LayerStyle, ModelError, config::Fields};

pub(super) const FAMILY: Family = Family {
    class: "Qwen2ForCausalLM",
    model_type: "qwen2",
    gguf_name: Some("qwen2"),
    gguf_interleaved: false,
    default_head_dim: None,
    qk_norm: false,
    activations: SILU,
    part_of: None,
    json_defaults: None,
    read_json,
};

fn read_json(fields: &Fields<'_>, num_layers: usize) -> Result<JsonOptions, ModelError> {
    Ok(JsonOptions {
        qkv_bias: true,
        attention_output_bias: false,
        ffn_bias: false,
        layer_windows: qwen_windows(fields, num_layers)?,
        style: LayerStyle::default(),
    })
}
