//! Gemma 3, its language model: five layers with a window to each that sees everything, norms on
//! both sides of attention and feed-forward network, GELU, scaled embeddings.
//!
//! # Source
//! transformers, `models/gemma3/modeling_gemma3.py`; Gemma Team: "Gemma 3 technical report", 2025,
//! section 2.

use inflight_backend::{Activation, Dtype};

use super::{Family, JsonOptions, sliding_window, windows_by_type};
use crate::{
    LayerStyle, ModelError, RopeConfig,
    config::{Fields, limits},
};

pub(super) const FAMILY: Family = Family {
    class: "Gemma3ForCausalLM",
    model_type: "gemma3_text",
    gguf_name: Some("gemma3"),
    gguf_interleaved: false,
    default_head_dim: Some(256),
    qk_norm: true,
    activations: &["gelu_pytorch_tanh"],
    part_of: Some(("Gemma3ForConditionalGeneration", "gemma3")),
    json_defaults: Some(DEFAULTS),
    read_json,
};

/// Of transformers: published files leave out what is as usual.
const DEFAULTS: &str = r#"{
    "vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 131072, "tie_word_embeddings": true, "rope_theta": 1e6,
    "query_pre_attn_scalar": 256, "sliding_window": 4096
}"#;

/// Every so manyth layer sees everything.
pub(crate) const PATTERN: usize = 6;

fn read_json(fields: &Fields<'_>, num_layers: usize) -> Result<JsonOptions, ModelError> {
    refuse_unsupported(fields)?;
    let head_dim = fields.size("head_dim", limits::MAX_HEAD_DIM)?;
    let max_position = fields.size("max_position_embeddings", limits::MAX_POSITION)?;
    let attention_bias = fields.bool("attention_bias")?.unwrap_or(false);
    let scalar = fields.required_positive("query_pre_attn_scalar")?;
    let style = LayerStyle {
        activation: Activation::GeluTanh,
        attention_scale: Some(scalar.powf(-0.5) as f32),
        embedding_scale: embedding_scale(fields)?,
        post_norms: true,
        norms_less_one: true,
        local_rope: Some(RopeConfig::local_from_json(fields, head_dim, max_position)?),
    };
    Ok(JsonOptions {
        qkv_bias: attention_bias,
        attention_output_bias: attention_bias,
        ffn_bias: false,
        layer_windows: layer_windows(fields, num_layers)?,
        style,
    })
}

/// By `layer_types`, or else by the pattern.
fn layer_windows(fields: &Fields<'_>, num_layers: usize) -> Result<Vec<Option<usize>>, ModelError> {
    let window = sliding_window(fields)?;
    if let Some(windows) = windows_by_type(fields, num_layers, window)? {
        return Ok(windows);
    }
    let pattern = match fields.value("sliding_window_pattern") {
        Some(_) => fields.size("sliding_window_pattern", limits::MAX_LAYERS)?,
        None => PATTERN,
    };
    Ok(by_pattern(num_layers, pattern, window))
}

/// Every `pattern`th layer sees everything, the others have a window.
pub(crate) fn by_pattern(
    num_layers: usize,
    pattern: usize,
    window: Option<usize>,
) -> Vec<Option<usize>> {
    (1..=num_layers).map(|layer| window.filter(|_| layer % pattern != 0)).collect()
}

/// The root of the hidden size, rounded to the type in which the model is meant to compute.
fn embedding_scale(fields: &Fields<'_>) -> Result<f32, ModelError> {
    let root = (fields.size("hidden_size", limits::MAX_HIDDEN)? as f64).sqrt() as f32;
    let dtype = match fields.string("dtype")? {
        Some(dtype) => Some(dtype),
        None => fields.string("torch_dtype")?,
    };
    Ok(match dtype {
        Some("bfloat16") => Dtype::BF16.round(root),
        Some("float16") => Dtype::F16.round(root),
        _ => root,
    })
}

fn refuse_unsupported(fields: &Fields<'_>) -> Result<(), ModelError> {
    for field in ["final_logit_softcapping", "attn_logit_softcapping"] {
        if fields.number(field)?.is_some() {
            return Err(fields.error(field, "is not supported"));
        }
    }
    match fields.bool("use_bidirectional_attention")? {
        Some(true) => Err(fields.error("use_bidirectional_attention", "is not supported")),
        _ => Ok(()),
    }
}
