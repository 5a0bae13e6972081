//! The fixture `gemma3` as llama.cpp's converter would write it.
//!
//! # Source
//! llama.cpp, `conversion/gemma.py` and `conversion/base.py` (keys; norms are stored with one
//! added), `gguf-py/gguf/tensor_mapping.py` (names), `src/models/gemma3.cpp` (what is read).

use std::path::Path;

use inflight_model::SafetensorsFolder;
use serde_json::Value;

use super::{GgufBytes, array, code};

/// What lies between `model.layers.N.` and `.weight`, there and here.
const LAYER_NAMES: [(&str, &str); 13] = [
    ("input_layernorm", "attn_norm"),
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.o_proj", "attn_output"),
    ("self_attn.q_norm", "attn_q_norm"),
    ("self_attn.k_norm", "attn_k_norm"),
    ("post_attention_layernorm", "post_attention_norm"),
    ("pre_feedforward_layernorm", "ffn_norm"),
    ("post_feedforward_layernorm", "post_ffw_norm"),
    ("mlp.gate_proj", "ffn_gate"),
    ("mlp.up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
];

/// The model in `folder`, which is in f32 and has its output tied, in one GGUF file.
///
/// GGUF has no key for the scale of scores: llama.cpp takes the root of the head size. The fixture
/// has another (`query_pre_attn_scalar`), so norms of queries are stored times the difference,
/// which rotation leaves alone.
pub fn gemma3_gguf(folder: &Path) -> GgufBytes {
    let config = std::fs::read(folder.join("config.json")).unwrap();
    let config: Value = serde_json::from_slice(&config).unwrap();
    let number = |field: &str| config[field].as_f64().unwrap();
    let query_scale = (number("head_dim") / number("query_pre_attn_scalar")).sqrt() as f32;
    let weights = SafetensorsFolder::open(folder).unwrap();
    let mut names: Vec<&str> = weights.names().collect();
    names.sort_unstable();
    names.into_iter().fold(metadata(&config), |file, name| {
        let (tensor, gguf_name) = (weights.tensor(name).unwrap(), gguf_name(name));
        let dims: Vec<u64> = tensor.shape.iter().rev().map(|extent| *extent as u64).collect();
        let mut values = tensor.to_f32();
        if gguf_name.ends_with("norm.weight") {
            let scale = if gguf_name.ends_with("attn_q_norm.weight") { query_scale } else { 1.0 };
            values.iter_mut().for_each(|value| *value = (*value + 1.0) * scale);
        }
        file.f32s(&gguf_name, &dims, &values)
    })
}

fn metadata(config: &Value) -> GgufBytes {
    let number = |field: &str| config[field].as_u64().unwrap() as u32;
    let rope =
        |kind: &str, field: &str| config["rope_parameters"][kind][field].as_f64().unwrap() as f32;
    let has_window = |kind: &Value| vec![u8::from(kind == "sliding_attention")];
    let layers = config["layer_types"].as_array().unwrap();
    let pattern: Vec<Vec<u8>> = layers.iter().map(has_window).collect();
    GgufBytes::new()
        .text("general.architecture", "gemma3")
        .u32("gemma3.context_length", number("max_position_embeddings"))
        .u32("gemma3.embedding_length", number("hidden_size"))
        .u32("gemma3.block_count", number("num_hidden_layers"))
        .u32("gemma3.feed_forward_length", number("intermediate_size"))
        .u32("gemma3.attention.head_count", number("num_attention_heads"))
        .u32("gemma3.attention.head_count_kv", number("num_key_value_heads"))
        .u32("gemma3.attention.key_length", number("head_dim"))
        .u32("gemma3.attention.value_length", number("head_dim"))
        .f32(
            "gemma3.attention.layer_norm_rms_epsilon",
            config["rms_norm_eps"].as_f64().unwrap() as f32,
        )
        .u32("gemma3.attention.sliding_window", number("sliding_window"))
        .meta("gemma3.attention.sliding_window_pattern", code::ARRAY, array(code::BOOL, &pattern))
        .f32("gemma3.rope.freq_base", rope("full_attention", "rope_theta"))
        .f32("gemma3.rope.freq_base_swa", rope("sliding_attention", "rope_theta"))
        .text("gemma3.rope.scaling.type", "linear")
        .f32("gemma3.rope.scaling.factor", rope("full_attention", "factor"))
        .u32("gemma3.vocab_size", number("vocab_size"))
        .text("tokenizer.ggml.model", "no_vocab")
}

fn gguf_name(name: &str) -> String {
    match name {
        "model.embed_tokens.weight" => return "token_embd.weight".into(),
        "model.norm.weight" => return "output_norm.weight".into(),
        _ => {}
    }
    let (layer, stem) = name.strip_prefix("model.layers.").unwrap().split_once('.').unwrap();
    let stem = stem.strip_suffix(".weight").unwrap();
    let (_, stem) = LAYER_NAMES.iter().find(|(theirs, _)| *theirs == stem).expect(name);
    format!("blk.{layer}.{stem}.weight")
}
