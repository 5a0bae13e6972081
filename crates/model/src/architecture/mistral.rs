//! Mistral: Llama with a sliding window in its first version.

use super::{Family, JsonOptions, SILU, sliding_window};
use crate::{LayerStyle, ModelError, config::Fields};

pub(super) const FAMILY: Family = Family {
    class: "MistralForCausalLM",
    model_type: "mistral",
    // GGUF files of Mistral call themselves llama.
    gguf_name: None,
    gguf_interleaved: true,
    default_head_dim: None,
    qk_norm: false,
    activations: SILU,
    part_of: None,
    json_defaults: None,
    read_json,
};

/// Of transformers, for configurations without the field; `null` means no window.
const DEFAULT_WINDOW: usize = 4096;

fn read_json(fields: &Fields<'_>, num_layers: usize) -> Result<JsonOptions, ModelError> {
    let window = match fields.mentions("sliding_window") {
        true => sliding_window(fields)?,
        false => Some(DEFAULT_WINDOW),
    };
    Ok(JsonOptions {
        qkv_bias: false,
        attention_output_bias: false,
        ffn_bias: false,
        layer_windows: vec![window; num_layers],
        style: LayerStyle::default(),
    })
}
