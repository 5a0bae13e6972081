//! What was started, as a short table.

use std::fmt;

use inflight_backend::KvDtype;
use inflight_engine::EngineConfig;
use inflight_model::{LayerGroups, ModelConfig};
use inflight_server::KvCapacity;

use crate::kv_capacity;
use crate::memory::MemoryTable;

/// Rows of a label and a text.
#[derive(Clone, Debug, Default)]
pub(crate) struct Summary {
    rows: Vec<(&'static str, String)>,
}

/// What an engine is made of.
pub(crate) struct Parts<'a> {
    pub(crate) name: &'a str,
    pub(crate) model: &'a ModelConfig,
    /// What became of the weights, for people.
    pub(crate) weights: &'static str,
    pub(crate) device: &'a str,
    pub(crate) kv_dtype: KvDtype,
    /// What the KV cache would hold with other types.
    pub(crate) kv_capacities: &'a [KvCapacity],
    pub(crate) engine: &'a EngineConfig,
    pub(crate) memory: MemoryTable,
}

impl Summary {
    pub(crate) fn new(parts: &Parts<'_>) -> Self {
        let Parts { name, model, weights, device, kv_dtype, kv_capacities, engine, memory } = parts;
        let family = format!("{:?}", model.architecture).to_lowercase();
        let parameters = num_parameters(model) as f64 / 1e6;
        let overlap = if engine.overlap { "on" } else { "off" };
        let (sequences, budget) = (engine.max_num_seqs, engine.max_num_batched_tokens);
        let kv_tokens = engine.kv_terms(model).num_tokens(engine.num_blocks, engine.max_model_len);
        let prefixes = if engine.memory.prefix_caching { ", prefixes are kept" } else { "" };
        let mut summary = Self::default();
        summary.push("model", format!("{name}, {family}, {parameters:.1} M parameters"));
        summary.push("device", (*device).to_owned());
        summary.push("context", format!("{} tokens", engine.max_model_len));
        summary.push("batch", format!("{sequences} sequences, {budget} tokens, overlap {overlap}"));
        for (label, bytes, what) in [
            ("memory", memory.weights, format!("weights, {weights}")),
            ("", memory.steps, "steps: activations, logits, inputs and outputs".to_owned()),
            ("", memory.kv_cache, format!("KV cache: {kv_tokens} tokens of {kv_dtype}{prefixes}")),
            ("", memory.free, "left free".to_owned()),
        ] {
            summary.push(label, format!("{:>9}  {what}", size(bytes)));
        }
        summary.push("KV cache", kv_capacity::describe(kv_capacities));
        if let Some(text) = layer_groups(model) {
            summary.push("layers", text);
        }
        if memory.swap > 0 {
            let cold = if engine.memory.keeps_cold_prefixes { ", and cold prefixes" } else { "" };
            let terms = engine.kv_terms(model);
            let tokens = terms.num_tokens(engine.memory.num_swap_blocks, engine.max_model_len);
            let what = format!("of the host: {tokens} tokens of requests that give way{cold}");
            summary.push("swap space", format!("{:>9}  {what}", size(memory.swap)));
        }
        summary
    }

    pub(crate) fn push(&mut self, label: &'static str, text: String) {
        self.rows.push((label, text));
    }
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.rows.iter().try_for_each(|(label, text)| writeln!(f, "{label:>10}  {text}"))
    }
}

/// How layers share the KV cache's blocks, if not all in the same way.
fn layer_groups(model: &ModelConfig) -> Option<String> {
    let groups = LayerGroups::new(model);
    if groups.num_groups() == 1 {
        return None;
    }
    let mut kinds: Vec<(Option<usize>, usize)> = Vec::new();
    for window in groups.windows() {
        match kinds.last_mut().filter(|(kind, _)| kind == window) {
            Some((_, count)) => *count += 1,
            None => kinds.push((*window, 1)),
        }
    }
    let kind = |(window, count): &(Option<usize>, usize)| match window {
        None => format!("{count} that see everything"),
        Some(window) => format!("{count} that see {window} tokens"),
    };
    let kinds: Vec<String> = kinds.iter().map(kind).collect();
    Some(format!("in groups of {}: {}", groups.width(), kinds.join(", ")))
}

/// Weights of the decoder; an output matrix that is the embedding table counts once.
fn num_parameters(model: &ModelConfig) -> usize {
    let attention = model.hidden_size * (model.qkv_len() + model.q_len());
    let biases = usize::from(model.qkv_bias) * model.qkv_len();
    let qk_norms = usize::from(model.qk_norm) * 2 * model.head_dim;
    let ffn = 3 * model.hidden_size * model.ffn_size;
    let num_norms = if model.style.post_norms { 4 } else { 2 };
    let layer = attention + biases + qk_norms + ffn + num_norms * model.hidden_size;
    let num_tables = if model.tie_word_embeddings { 1 } else { 2 };
    model.num_layers * layer + num_tables * model.vocab_size * model.hidden_size + model.hidden_size
}

fn size(bytes: usize) -> String {
    let mib = bytes as f64 / f64::from(1 << 20);
    if mib < 1024.0 { format!("{mib:.0} MiB") } else { format!("{:.1} GiB", mib / 1024.0) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_readable() {
        assert_eq!(size(98_362_432), "94 MiB");
        assert_eq!(size(6 << 30), "6.0 GiB");
    }

    /// SmolLM2-135M has 134,515,008 parameters, Qwen2.5-0.5B 494,032,768 by their safetensors.
    #[test]
    fn parameters_are_counted() {
        let count =
            |json: &str| num_parameters(&ModelConfig::from_json("config.json", json).unwrap());
        let smollm2 = r#"{"architectures": ["LlamaForCausalLM"], "model_type": "llama",
            "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
            "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152,
            "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 100000,
            "tie_word_embeddings": true, "hidden_act": "silu"}"#;
        assert_eq!(count(smollm2), 134_515_008);
        let qwen2 = r#"{"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2",
            "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
            "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936,
            "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0,
            "tie_word_embeddings": true, "hidden_act": "silu"}"#;
        assert_eq!(count(qwen2), 494_032_768);
    }
}
