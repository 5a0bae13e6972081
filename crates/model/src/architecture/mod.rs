//! The families of decoders, one small file each: names, and what one does unlike the others.

mod gemma3;
mod llama;
mod mistral;
mod qwen2;
mod qwen3;

pub(crate) use gemma3::{PATTERN as GEMMA3_PATTERN, by_pattern};
use serde_json::Value;

use crate::{LayerStyle, ModelError, config::Fields};

/// A family of decoders.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Architecture {
    Llama,
    Mistral,
    Qwen2,
    Qwen3,
    Gemma3,
}

/// How files name a family, and what sets it apart.
pub(crate) struct Family {
    /// In `architectures` of `config.json`.
    pub(crate) class: &'static str,
    /// In `model_type` of `config.json`.
    pub(crate) model_type: &'static str,
    /// In `general.architecture` of GGUF files; `None` if they use another family's name.
    pub(crate) gguf_name: Option<&'static str>,
    /// Whether GGUF files order rows of queries and keys so that pairs are neighbours.
    pub(crate) gguf_interleaved: bool,
    /// Elements of a head if `config.json` does not say; `None`: hidden size / heads.
    pub(crate) default_head_dim: Option<usize>,
    /// Whether every query and key head is normalised before rotation.
    pub(crate) qk_norm: bool,
    /// What `hidden_act` may be.
    pub(crate) activations: &'static [&'static str],
    /// Class and model type of models that this family is the language model of.
    pub(crate) part_of: Option<(&'static str, &'static str)>,
    /// A JSON object of what files leave out.
    pub(crate) json_defaults: Option<&'static str>,
    /// Reads the options of `config.json` that families have or mean differently.
    pub(crate) read_json: fn(&Fields<'_>, num_layers: usize) -> Result<JsonOptions, ModelError>,
}

/// Fields of [`crate::ModelConfig`] that families read differently from `config.json`.
pub(crate) struct JsonOptions {
    pub(crate) qkv_bias: bool,
    pub(crate) attention_output_bias: bool,
    pub(crate) ffn_bias: bool,
    pub(crate) layer_windows: Vec<Option<usize>>,
    pub(crate) style: LayerStyle,
}

/// Names of SiLU.
const SILU: &[&str] = &["silu", "swish"];

impl Architecture {
    const ALL: [Self; 5] = [Self::Llama, Self::Mistral, Self::Qwen2, Self::Qwen3, Self::Gemma3];

    pub(crate) const fn family(self) -> &'static Family {
        match self {
            Self::Llama => &llama::FAMILY,
            Self::Mistral => &mistral::FAMILY,
            Self::Qwen2 => &qwen2::FAMILY,
            Self::Qwen3 => &qwen3::FAMILY,
            Self::Gemma3 => &gemma3::FAMILY,
        }
    }

    pub(crate) fn find(matches: impl Fn(&Family) -> bool) -> Option<Self> {
        Self::ALL.into_iter().find(|architecture| matches(architecture.family()))
    }

    /// A list of all families by one of their names, for messages.
    pub(crate) fn known(name: impl Fn(&Family) -> &'static str) -> String {
        let names = Self::ALL.into_iter().map(|architecture| name(architecture.family()));
        names.filter(|name| !name.is_empty()).collect::<Vec<_>>().join(", ")
    }
}

/// The largest window that makes sense; larger ones see everything anyway.
const MAX_WINDOW: usize = 1 << 26;

/// Reads `sliding_window`, which may be absent.
fn sliding_window(fields: &Fields<'_>) -> Result<Option<usize>, ModelError> {
    const FIELD: &str = "sliding_window";
    fields.value(FIELD).map(|_| fields.size(FIELD, MAX_WINDOW)).transpose()
}

/// Windows by `layer_types`, if the file has them.
fn windows_by_type(
    fields: &Fields<'_>,
    num_layers: usize,
    window: Option<usize>,
) -> Result<Option<Vec<Option<usize>>>, ModelError> {
    let Some(kinds) = fields.array("layer_types")? else { return Ok(None) };
    if kinds.len() != num_layers {
        let reason = format!("has {} entries for {num_layers} layers", kinds.len());
        return Err(fields.error("layer_types", reason));
    }
    let window_of = |kind: &Value| match kind.as_str() {
        Some("full_attention") => Ok(None),
        Some("sliding_attention") => Ok(window),
        _ => Err(fields.error("layer_types", format!("{kind} is not supported"))),
    };
    kinds.iter().map(window_of).collect::<Result<_, _>>().map(Some)
}

/// Windows of Qwen's layers: by `layer_types`, or else from layer `max_window_layers` on.
fn qwen_windows(fields: &Fields<'_>, num_layers: usize) -> Result<Vec<Option<usize>>, ModelError> {
    let used = fields.bool("use_sliding_window")?.unwrap_or(false);
    let window = sliding_window(fields)?.filter(|_| used);
    if let Some(windows) = windows_by_type(fields, num_layers, window)? {
        return Ok(windows);
    }
    let default = DEFAULT_MAX_WINDOW_LAYERS;
    let first = fields.unsigned("max_window_layers")?.unwrap_or(default);
    Ok((0..num_layers as u64).map(|layer| window.filter(|_| layer >= first)).collect())
}

/// Of transformers, for configurations without the field.
const DEFAULT_MAX_WINDOW_LAYERS: u64 = 28;
