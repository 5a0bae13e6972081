//! What was started, as a short table.

use std::fmt;

use anyhow::Result;
use inflight_backend::WeightPrecision;
use inflight_model::ModelConfig;

use crate::resolve::Resolved;

/// Rows of a label and a text.
#[derive(Clone, Debug, Default)]
pub(crate) struct Summary {
    rows: Vec<(&'static str, String)>,
}

impl Summary {
    pub(crate) fn new(
        name: &str,
        model: &ModelConfig,
        resolved: &Resolved,
        matrix_bytes: usize,
    ) -> Result<Self> {
        let family = format!("{:?}", model.architecture).to_lowercase();
        let parameters = num_parameters(model) as f64 / 1e6;
        let precision = match resolved.cpu.weights {
            WeightPrecision::Native => "as stored",
            WeightPrecision::F32 => "expanded to f32",
        };
        let (cpu, engine) = (&resolved.cpu, &resolved.engine);
        let tokens = resolved.kv_cache_tokens();
        let kv_bytes = size(resolved.kv_cache_bytes(model)?);
        let overlap = if engine.overlap { "on" } else { "off" };
        let mut summary = Self::default();
        summary.push("model", format!("{name}, {family}, {parameters:.1} M parameters"));
        summary.push("weights", format!("{} {precision}", size(matrix_bytes)));
        summary.push("device", format!("CPU, {} threads, {:?}", cpu.num_threads, cpu.simd));
        summary.push("context", format!("{} tokens", engine.max_model_len));
        summary.push("KV cache", format!("{tokens} tokens, {kv_bytes} of {}", cpu.kv_dtype));
        let (sequences, budget) = (engine.max_num_seqs, engine.max_num_batched_tokens);
        summary.push("batch", format!("{sequences} sequences, {budget} tokens, overlap {overlap}"));
        Ok(summary)
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

/// Weights of the decoder; an output matrix that is the embedding table counts once.
fn num_parameters(model: &ModelConfig) -> usize {
    let attention = model.hidden_size * (model.qkv_len() + model.q_len());
    let biases = usize::from(model.qkv_bias) * model.qkv_len();
    let qk_norms = usize::from(model.qk_norm) * 2 * model.head_dim;
    let ffn = 3 * model.hidden_size * model.ffn_size;
    let layer = attention + biases + qk_norms + ffn + 2 * model.hidden_size;
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
