//! Reading `config.json` as transformers writes it, in its 4th and 5th version.

use std::borrow::Cow;

use serde_json::{Map, Value};

use super::{Fields, Fp8Weights, ModelConfig, RopeConfig, limits};
use crate::{
    Architecture, ModelError,
    architecture::{Family, JsonOptions},
};

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
        let architecture = architecture(&Fields::new(path, object))?;
        let object = language_model(architecture.family(), object);
        Self::from_fields(architecture, &Fields::new(path, &object))
    }

    fn from_fields(architecture: Architecture, fields: &Fields<'_>) -> Result<Self, ModelError> {
        let family = architecture.family();
        refuse_unsupported(fields, family)?;
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
        let JsonOptions { qkv_bias, attention_output_bias, ffn_bias, layer_windows, style } =
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
            style,
        })
    }
}

/// By the class that transformers would load, or else by the model's type.
fn architecture(fields: &Fields<'_>) -> Result<Architecture, ModelError> {
    let class = fields.array("architectures")?.and_then(|classes| classes.first()?.as_str());
    let (name, found) = match (class, fields.string("model_type")?) {
        (Some(class), _) => {
            let is_it = |family: &Family| {
                family.class == class || family.part_of.is_some_and(|(whole, _)| whole == class)
            };
            (class, Architecture::find(is_it))
        }
        (None, Some(kind)) => {
            let is_it = |family: &Family| {
                family.model_type == kind || family.part_of.is_some_and(|(_, whole)| whole == kind)
            };
            (kind, Architecture::find(is_it))
        }
        (None, None) => return Err(fields.error("architectures", "is missing")),
    };
    found.ok_or_else(|| ModelError::UnknownArchitecture {
        path: fields.path().to_owned(),
        name: name.to_owned(),
        known: Architecture::known(|family| family.class),
    })
}

/// What describes the language model: its own object where the file describes more than that, over
/// what such files leave out.
fn language_model<'a>(
    family: &Family,
    object: &'a Map<String, Value>,
) -> Cow<'a, Map<String, Value>> {
    let Some(defaults) = family.json_defaults else { return Cow::Borrowed(object) };
    let mut all: Map<String, Value> =
        serde_json::from_str(defaults).expect("defaults are part of this program");
    let own = object.get("text_config").and_then(Value::as_object);
    let outer = object.iter().filter(|(name, _)| own.is_none() || OF_ALL.contains(&name.as_str()));
    for (name, value) in outer.chain(own.into_iter().flatten()) {
        if !value.is_null() {
            all.insert(name.clone(), value.clone());
        }
    }
    Cow::Owned(all)
}

/// Fields that hold for all parts of a model.
const OF_ALL: [&str; 5] =
    ["dtype", "torch_dtype", "eos_token_id", "tie_word_embeddings", "quantization_config"];

fn refuse_unsupported(fields: &Fields<'_>, family: &Family) -> Result<(), ModelError> {
    for field in ["hidden_act", "hidden_activation"] {
        if let Some(other) = fields.string(field)?
            && !family.activations.contains(&other)
        {
            return Err(fields.error(field, format!("{other} is not supported")));
        }
    }
    Ok(())
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
