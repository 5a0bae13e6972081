//! The families of decoders, one small file each: names, and what one does unlike the others.

mod llama;
mod mistral;
mod qwen2;
mod qwen3;

use serde_json::Value;

use crate::{ModelError, config::Fields};

/// A family of decoders.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Architecture {
    Llama,
    Mistral,
    Qwen2,
    Qwen3,
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
    /// Reads the options of `config.json` that families have or mean differently.
    pub(crate) read_json: fn(&Fields<'_>, num_layers: usize) -> Result<JsonOptions, ModelError>,
}

/// Fields of [`crate::ModelConfig`] that families read differently from `config.json`.
pub(crate) struct JsonOptions {
    pub(crate) qkv_bias: bool,
    pub(crate) attention_output_bias: bool,
    pub(crate) ffn_bias: bool,
    pub(crate) layer_windows: Vec<Option<usize>>,
}

impl Architecture {
    const ALL: [Self; 4] = [Self::Llama, Self::Mistral, Self::Qwen2, Self::Qwen3];

    pub(crate) const fn family(self) -> &'static Family {
        match self {
            Self::Llama => &llama::FAMILY,
            Self::Mistral => &mistral::FAMILY,
            Self::Qwen2 => &qwen2::FAMILY,
            Self::Qwen3 => &qwen3::FAMILY,
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

/// Windows of Qwen's layers: by `layer_types`, or else from layer `max_window_layers` on.
fn qwen_windows(fields: &Fields<'_>, num_layers: usize) -> Result<Vec<Option<usize>>, ModelError> {
    let used = fields.bool("use_sliding_window")?.unwrap_or(false);
    let window = sliding_window(fields)?.filter(|_| used);
    if let Some(kinds) = fields.array("layer_types")? {
        if kinds.len() != num_layers {
            let reason = format!("has {} entries for {num_layers} layers", kinds.len());
            return Err(fields.error("layer_types", reason));
        }
        let window_of = |kind: &Value| match kind.as_str() {
            Some("full_attention") => Ok(None),
            Some("sliding_attention") => Ok(window),
            _ => Err(fields.error("layer_types", format!("{kind} is not supported"))),
        };
        return kinds.iter().map(window_of).collect();
    }
    let default = DEFAULT_MAX_WINDOW_LAYERS;
    let first = fields.unsigned("max_window_layers")?.unwrap_or(default);
    Ok((0..num_layers as u64).map(|layer| window.filter(|_| layer >= first)).collect())
}

/// Of transformers, for configurations without the field.
const DEFAULT_MAX_WINDOW_LAYERS: u64 = 28;
