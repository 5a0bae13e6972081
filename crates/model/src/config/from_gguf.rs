//! Reading the metadata of a GGUF file, whose keys begin with the architecture's name.

use inflight_backend::Activation;

use super::{
    ModelConfig, RopeConfig, RopeScaling, limits,
    rope::{DEFAULT_THETA, yarn_mscale},
};
use crate::{
    Architecture, GgufFile, GgufValue, LayerStyle, ModelError,
    architecture::{GEMMA3_PATTERN, by_pattern},
};

/// Llama 3's frequencies come as divisors in a tensor, not as metadata.
const DIVISORS: &str = "rope_freqs.weight";
const EMBEDDING: &str = "token_embd.weight";

impl ModelConfig {
    /// Reads the configuration of a GGUF file: most from its metadata, the rest from its tensors.
    ///
    /// # Errors
    /// [`ModelError::UnknownArchitecture`], or [`ModelError::BadConfig`] naming a key that is
    /// missing, of the wrong type, out of range or asks for what is not supported.
    pub fn from_gguf(file: &GgufFile) -> Result<Self, ModelError> {
        let keys = Keys { file, architecture: architecture_name(file)? };
        let architecture = architecture(&keys)?;
        let family = architecture.family();
        if keys.optional("expert_count", GgufValue::as_u64)?.unwrap_or(0) > 0 {
            return Err(keys.error("expert_count", "mixtures of experts are not supported"));
        }
        let hidden_size = keys.size("embedding_length", limits::MAX_HIDDEN)?;
        let num_layers = keys.size("block_count", limits::MAX_LAYERS)?;
        let num_heads = keys.size("attention.head_count", limits::MAX_HEADS)?;
        let num_kv_heads = keys.size_or("attention.head_count_kv", limits::MAX_HEADS, num_heads)?;
        let kv_key = keys.name("attention.head_count_kv");
        limits::kv_heads(file.path(), &kv_key, num_kv_heads, num_heads)?;
        let default = (hidden_size / num_heads).max(1);
        let head_dim = keys.size_or("attention.key_length", limits::MAX_HEAD_DIM, default)?;
        let value_dim = keys.size_or("attention.value_length", limits::MAX_HEAD_DIM, head_dim)?;
        if value_dim != head_dim {
            return Err(keys.error("attention.value_length", "must equal attention.key_length"));
        }
        let max_position = keys.size("context_length", limits::MAX_POSITION)?;
        let rope = RopeConfig {
            interleaved: family.gguf_interleaved,
            ..rope(&keys, head_dim, max_position)?
        };
        let window = keys.optional("attention.sliding_window", GgufValue::as_u64)?;
        let window = window.and_then(|window| usize::try_from(window).ok()).filter(|n| *n > 0);
        let (layer_windows, style) = match architecture {
            Architecture::Gemma3 => gemma3(&keys, &rope, window)?,
            _ => (vec![window; num_layers], LayerStyle::default()),
        };
        Ok(Self {
            architecture,
            vocab_size: vocab_size(file)?,
            hidden_size,
            num_layers,
            num_heads,
            num_kv_heads,
            head_dim,
            ffn_size: keys.size("feed_forward_length", limits::MAX_HIDDEN)?,
            rms_norm_eps: keys.epsilon("attention.layer_norm_rms_epsilon")?,
            max_position,
            rope,
            tie_word_embeddings: !file.has("output.weight"),
            qkv_bias: file.has("blk.0.attn_q.bias"),
            attention_output_bias: file.has("blk.0.attn_output.bias"),
            ffn_bias: file.has("blk.0.ffn_down.bias"),
            qk_norm: family.qk_norm,
            layer_windows,
            eos_token_ids: eos_token_ids(file),
            fp8_weights: None,
            style,
        })
    }
}

/// Windows of Gemma 3's layers, and what is peculiar to them. Norms are stored whole, and the scale
/// of embeddings is not rounded.
///
/// # Source
/// llama.cpp, `src/llama-model.cpp`: its 27B alone, of 62 layers, scales scores by the hidden size.
fn gemma3(
    keys: &Keys<'_>,
    rope: &RopeConfig,
    window: Option<usize>,
) -> Result<(Vec<Option<usize>>, LayerStyle), ModelError> {
    const SOFTCAPPING: &str = "final_logit_softcapping";
    if keys.optional(SOFTCAPPING, GgufValue::as_f64)?.unwrap_or(0.0) != 0.0 {
        return Err(keys.error(SOFTCAPPING, "is not supported"));
    }
    let num_layers = keys.size("block_count", limits::MAX_LAYERS)?;
    let hidden_size = keys.size("embedding_length", limits::MAX_HIDDEN)?;
    let num_heads = keys.size("attention.head_count", limits::MAX_HEADS)?;
    let theta = keys.positive("rope.freq_base_swa")?.unwrap_or(DEFAULT_THETA);
    limits::theta(keys.file.path(), &keys.name("rope.freq_base_swa"), theta)?;
    let scaled_by_hidden = num_layers == 62;
    let scalar = (hidden_size / num_heads) as f32;
    let style = LayerStyle {
        activation: Activation::GeluTanh,
        attention_scale: scaled_by_hidden.then(|| 1.0 / scalar.sqrt()),
        embedding_scale: (hidden_size as f64).sqrt() as f32,
        post_norms: true,
        norms_less_one: true,
        local_rope: Some(RopeConfig { theta, scaling: RopeScaling::Default, ..rope.clone() }),
    };
    Ok((gemma3_windows(keys, num_layers, window)?, style))
}

/// Which layers have the window: told for each, or by every how manyth has none.
fn gemma3_windows(
    keys: &Keys<'_>,
    num_layers: usize,
    window: Option<usize>,
) -> Result<Vec<Option<usize>>, ModelError> {
    const PATTERN: &str = "attention.sliding_window_pattern";
    let pattern = match keys.optional(PATTERN, Some)? {
        None => GEMMA3_PATTERN,
        Some(GgufValue::Array(layers)) if layers.len() == num_layers => {
            let windows = layers.iter().map(|has_window| match has_window {
                GgufValue::Bool(has_window) => Ok(window.filter(|_| *has_window)),
                _ => Err(keys.error(PATTERN, "must hold true or false for each layer")),
            });
            return windows.collect();
        }
        Some(GgufValue::Array(layers)) => {
            let reason = format!("tells of {} layers, there are {num_layers}", layers.len());
            return Err(keys.error(PATTERN, reason));
        }
        Some(_) => keys.size(PATTERN, limits::MAX_LAYERS)?,
    };
    Ok(by_pattern(num_layers, pattern, window))
}

fn architecture_name(file: &GgufFile) -> Result<&str, ModelError> {
    const KEY: &str = "general.architecture";
    let name = file.metadata(KEY).and_then(GgufValue::as_str);
    name.ok_or_else(|| ModelError::bad_config(file.path(), KEY, "is missing"))
}

fn architecture(keys: &Keys<'_>) -> Result<Architecture, ModelError> {
    let found = Architecture::find(|family| family.gguf_name == Some(keys.architecture));
    found.ok_or_else(|| ModelError::UnknownArchitecture {
        path: keys.file.path().to_owned(),
        name: keys.architecture.to_owned(),
        known: Architecture::known(|family| family.gguf_name.unwrap_or_default()),
    })
}

/// The embedding table tells how many tokens there are: the list of tokens may be padded or absent.
fn vocab_size(file: &GgufFile) -> Result<usize, ModelError> {
    let table = file.tensor(EMBEDDING)?;
    let rows = table.num_rows();
    if table.shape.len() != 2 || rows > limits::MAX_VOCAB {
        let reason = format!("shape {:?} is not that of an embedding table", table.shape);
        return Err(ModelError::bad_tensor(file.path(), EMBEDDING, reason));
    }
    Ok(rows)
}

fn eos_token_ids(file: &GgufFile) -> Vec<u32> {
    let mut ids = Vec::new();
    for kind in ["eos", "eot", "eom"] {
        let id = file.metadata(&format!("tokenizer.ggml.{kind}_token_id"));
        let id = id.and_then(GgufValue::as_u64).and_then(|id| u32::try_from(id).ok());
        ids.extend(id.filter(|id| !ids.contains(id)));
    }
    ids
}

fn rope(keys: &Keys<'_>, head_dim: usize, max_position: usize) -> Result<RopeConfig, ModelError> {
    let rotary_dim = keys.size_or("rope.dimension_count", limits::MAX_HEAD_DIM, head_dim)?;
    let key = keys.name("rope.dimension_count");
    limits::rotary_dim(keys.file.path(), &key, rotary_dim, head_dim)?;
    let scaling = scaling(keys, max_position)?;
    let scaling = if keys.file.has(DIVISORS) {
        if scaling != RopeScaling::Default {
            return Err(keys.error("rope.scaling.type", format!("cannot go with {DIVISORS}")));
        }
        RopeScaling::Divisors(divisors(keys.file, rotary_dim / 2)?)
    } else {
        scaling
    };
    let theta = keys.positive("rope.freq_base")?.unwrap_or(DEFAULT_THETA);
    limits::theta(keys.file.path(), &keys.name("rope.freq_base"), theta)?;
    Ok(RopeConfig { theta, rotary_dim, interleaved: false, scaling })
}

fn scaling(keys: &Keys<'_>, max_position: usize) -> Result<RopeScaling, ModelError> {
    match keys.optional("rope.scaling.type", GgufValue::as_str)? {
        // Files without a type scale linearly if at all, older ones by a key of another name.
        None => {
            let factor = keys.positive("rope.scaling.factor")?;
            let factor = factor.map_or_else(|| keys.positive("rope.scale_linear"), |f| Ok(Some(f)));
            let factor = factor?.filter(|factor| *factor != 1.0);
            Ok(factor.map_or(RopeScaling::Default, |factor| RopeScaling::Linear { factor }))
        }
        Some("none") => Ok(RopeScaling::Default),
        Some("linear") => {
            Ok(RopeScaling::Linear { factor: keys.required_positive("rope.scaling.factor")? })
        }
        Some("yarn") => yarn(keys, max_position),
        Some(other) => {
            let reason = format!("{other} is not supported; none, linear and yarn are");
            Err(keys.error("rope.scaling.type", reason))
        }
    }
}

fn yarn(keys: &Keys<'_>, max_position: usize) -> Result<RopeScaling, ModelError> {
    let factor = keys.required_positive("rope.scaling.factor")?;
    let sharpening = keys.positive("rope.scaling.attn_factor")?.unwrap_or(1.0);
    Ok(RopeScaling::Yarn {
        factor,
        original_max_position: keys.size_or(
            "rope.scaling.original_context_length",
            limits::MAX_POSITION,
            max_position,
        )?,
        beta_fast: keys.positive("rope.scaling.yarn_beta_fast")?.unwrap_or(32.0),
        beta_slow: keys.positive("rope.scaling.yarn_beta_slow")?.unwrap_or(1.0),
        attention_factor: sharpening * yarn_mscale(factor, 1.0),
        truncate: true,
    })
}

fn divisors(file: &GgufFile, len: usize) -> Result<Vec<f32>, ModelError> {
    let tensor = file.tensor(DIVISORS)?;
    let error = |reason: String| ModelError::bad_tensor(file.path(), DIVISORS, reason);
    if tensor.shape != [len] {
        return Err(error(format!("has shape {:?}, must have [{len}]", tensor.shape)));
    }
    let divisors = tensor.to_f32();
    if divisors.iter().all(|divisor| divisor.is_finite() && *divisor > 0.0) {
        return Ok(divisors);
    }
    Err(error("all elements must be positive".into()))
}

/// The metadata keys of one architecture.
struct Keys<'a> {
    file: &'a GgufFile,
    architecture: &'a str,
}

impl<'a> Keys<'a> {
    fn name(&self, key: &str) -> String {
        format!("{}.{key}", self.architecture)
    }

    fn error(&self, key: &str, reason: impl Into<String>) -> ModelError {
        ModelError::bad_config(self.file.path(), &self.name(key), reason)
    }

    fn optional<T>(
        &self,
        key: &str,
        convert: impl Fn(&'a GgufValue) -> Option<T>,
    ) -> Result<Option<T>, ModelError> {
        let Some(value) = self.file.metadata(&self.name(key)) else { return Ok(None) };
        match convert(value) {
            Some(value) => Ok(Some(value)),
            None => Err(self.error(key, "is of the wrong type")),
        }
    }

    /// A count or size; one for each layer is fine if they agree.
    fn whole_number(&self, key: &str) -> Result<Option<u64>, ModelError> {
        let values = match self.optional(key, Some)? {
            Some(GgufValue::Array(values)) => values.as_slice(),
            Some(value) => std::slice::from_ref(value),
            None => return Ok(None),
        };
        match values {
            [first, rest @ ..] if rest.iter().all(|value| value == first) => {
                let value = first.as_u64();
                value.map(Some).ok_or_else(|| self.error(key, "must be a whole number"))
            }
            _ => Err(self.error(key, "must be the same for all layers")),
        }
    }

    fn size(&self, key: &str, max: usize) -> Result<usize, ModelError> {
        limits::size(self.file.path(), &self.name(key), self.whole_number(key)?, max)
    }

    fn size_or(&self, key: &str, max: usize, default: usize) -> Result<usize, ModelError> {
        match self.whole_number(key)? {
            None => Ok(default),
            value => limits::size(self.file.path(), &self.name(key), value, max),
        }
    }

    fn positive(&self, key: &str) -> Result<Option<f64>, ModelError> {
        let Some(value) = self.optional(key, GgufValue::as_f64)? else { return Ok(None) };
        limits::positive(self.file.path(), &self.name(key), value).map(Some)
    }

    fn required_positive(&self, key: &str) -> Result<f64, ModelError> {
        self.positive(key)?.ok_or_else(|| self.error(key, "is missing"))
    }

    fn epsilon(&self, key: &str) -> Result<f32, ModelError> {
        let value = self.optional(key, GgufValue::as_f64)?;
        let value = value.ok_or_else(|| self.error(key, "is missing"))?;
        limits::epsilon(self.file.path(), &self.name(key), value)
    }
}
