//! Reading `config.json` as transformers writes it, in its 4th and 5th version.

use serde_json::Value;

use super::{Fields, Fp8Weights, ModelConfig, RopeConfig, limits};
use crate::{Architecture, ModelError, architecture::JsonOptions};

impl ModelConfig {
    /// Reads the text of a `config.json`; `path` is for messages.
    ///
    /// # Errors
    /// [`ModelError::UnknownArchitecture`], or [`ModelError::BadConfig`] naming a field that is
    /// missing, of the wrong type, out of range or asks for what is not supported.
    pub fn from_json(path: &str, text: &str) -> Result<Self, ModelError> {
        let value: Value = serde_json::from_str(text)
            .map_err(|error| ModelError::bad_file(path, error.to_string()))?;
        let object = value.as_object();
        let object = object.ok_or_else(|| ModelError::bad_file(path, "must be a JSON object"))?;
        Self::from_fields(&Fields::new(path, object))
    }

    fn from_fields(fields: &Fields<'_>) -> Result<Self, ModelError> {
        let architecture = architecture(fields)?;
        refuse_unsupported(fields)?;
        let family = architecture.family();
        let hidden_size = fields.size("hidden_size", limits::MAX_HIDDEN)?;
        let num_layers = fields.size("num_hidden_layers", limits::MAX_LAYERS)?;
        let num_heads = fields.size("num_attention_heads", limits::MAX_HEADS)?;
        let num_kv_heads = match fields.value("num_key_value_heads") {
            Some(_) => fields.size("num_key_value_heads", limits::MAX_HEADS)?,
            None => num_heads,
        };
        limits::kv_heads(fields.path(), "num_key_value_heads", num_kv_heads, num_heads)?;
        let head_dim = match (fields.value("head_dim"), family.default_head_dim) {
            (Some(_), _) => fields.size("head_dim", limits::MAX_HEAD_DIM)?,
            (None, Some(default)) => default,
            (None, None) if hidden_size >= num_heads => hidden_size / num_heads,
            (None, None) => return Err(fields.error("head_dim", "is missing")),
        };
        let eps = fields.number("rms_norm_eps")?.unwrap_or(1e-6);
        let max_position = fields.size("max_position_embeddings", limits::MAX_POSITION)?;
        let rope = RopeConfig::from_json(fields, head_dim, max_position)?;
        let JsonOptions { qkv_bias, attention_output_bias, ffn_bias, layer_windows } =
            (family.read_json)(fields, num_layers)?;
        Ok(Self {
            architecture,
            vocab_size: fields.size("vocab_size", limits::MAX_VOCAB)?,
            hidden_size,
            num_layers,
            num_heads,
            num_kv_heads,
            head_dim,
            ffn_size: fields.size("intermediate_size", limits::MAX_HIDDEN)?,
            rms_norm_eps: limits::epsilon(fields.path(), "rms_norm_eps", eps)?,
            max_position: rope.scaling.reach(max_position),
            rope,
            tie_word_embeddings: fields.bool("tie_word_embeddings")?.unwrap_or(false),
            qkv_bias,
            attention_output_bias,
            ffn_bias,
            qk_norm: family.qk_norm,
            layer_windows,
            eos_token_ids: eos_token_ids(fields)?,
            fp8_weights: Fp8Weights::from_json(fields)?,
        })
    }
}

/// By the class that transformers would load, or else by the model's type.
fn architecture(fields: &Fields<'_>) -> Result<Architecture, ModelError> {
    let class = fields.array("architectures")?.and_then(|classes| classes.first()?.as_str());
    let (name, found) = match (class, fields.string("model_type")?) {
        (Some(class), _) => (class, Architecture::find(|family| family.class == class)),
        (None, Some(kind)) => (kind, Architecture::find(|family| family.model_type == kind)),
        (None, None) => return Err(fields.error("architectures", "is missing")),
    };
    found.ok_or_else(|| ModelError::UnknownArchitecture {
        path: fields.path().to_owned(),
        name: name.to_owned(),
        known: Architecture::known(|family| family.class),
    })
}

fn refuse_unsupported(fields: &Fields<'_>) -> Result<(), ModelError> {
    match fields.string("hidden_act")? {
        None | Some("silu" | "swish") => Ok(()),
        Some(other) => Err(fields.error("hidden_act", format!("{other} is not supported"))),
    }
}

/// One id or several, as found in `config.json` and `generation_config.json`.
fn eos_token_ids(fields: &Fields<'_>) -> Result<Vec<u32>, ModelError> {
    const FIELD: &str = "eos_token_id";
    let ids = match fields.value(FIELD) {
        None => return Ok(Vec::new()),
        Some(Value::Array(ids)) => ids.as_slice(),
        Some(id) => std::slice::from_ref(id),
    };
    let id = |id: &Value| id.as_u64().and_then(|id| u32::try_from(id).ok());
    let ids: Option<_> = ids.iter().map(id).collect();
    ids.ok_or_else(|| fields.error(FIELD, "must be a token id or an array of them"))
}

/// The ids that end a sequence by the text of a `generation_config.json`.
pub(crate) fn generation_eos_token_ids(path: &str, text: &str) -> Result<Vec<u32>, ModelError> {
    let value: Value = serde_json::from_str(text)
        .map_err(|error| ModelError::bad_file(path, error.to_string()))?;
    let object = value.as_object();
    let object = object.ok_or_else(|| ModelError::bad_file(path, "must be a JSON object"))?;
    eos_token_ids(&Fields::new(path, object))
}
