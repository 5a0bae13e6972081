//! Shapes of well-known models, so that their speed is measured without a download.

use anyhow::Result;
use inflight_model::{DummyWeights, ModelConfig, ModelFiles, Weights};

/// A model of which only the shapes are known here.
///
/// # Source
/// Each model's `config.json` on the Hugging Face hub, less what shapes and arithmetic do not
/// depend on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BuiltInConfig {
    /// meta-llama/Llama-3.1-8B
    Llama31B8,
    /// HuggingFaceTB/SmolLM2-135M
    SmolLm2M135,
    /// Qwen/Qwen3-8B
    Qwen3B8,
    /// No real model: as small as runs everywhere, for checks.
    Tiny,
}

impl BuiltInConfig {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Llama31B8, Self::SmolLm2M135, Self::Qwen3B8, Self::Tiny];

    /// How users call it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Llama31B8 => "llama-3.1-8b",
            Self::SmolLm2M135 => "smollm2-135m",
            Self::Qwen3B8 => "qwen3-8b",
            Self::Tiny => "tiny",
        }
    }

    /// A model of these shapes with random weights.
    ///
    /// # Errors
    /// None that a test would not find: the files are part of the program.
    pub fn dummy(self, seed: u64) -> Result<ModelFiles> {
        let config = ModelConfig::from_json(self.name(), self.json())?;
        Ok(ModelFiles { config, weights: Weights::Dummy(DummyWeights { seed }), folder: None })
    }

    fn json(self) -> &'static str {
        match self {
            Self::Llama31B8 => include_str!("../configs/llama-3.1-8b.json"),
            Self::SmolLm2M135 => include_str!("../configs/smollm2-135m.json"),
            Self::Qwen3B8 => include_str!("../configs/qwen3-8b.json"),
            Self::Tiny => include_str!("../configs/tiny.json"),
        }
    }
}

#[cfg(test)]
mod tests {
    use inflight_backend::KvDtype;
    use inflight_model::kv_bytes_per_block;

    use super::*;

    #[test]
    fn all_are_models() {
        for config in BuiltInConfig::ALL {
            let model = config.dummy(0).unwrap().config;
            assert!(model.num_layers > 0, "{}", config.name());
        }
    }

    /// 2 (keys, values) × layers × KV heads × head size × 2 bytes.
    #[test]
    fn kv_bytes_are_those_of_the_models() {
        let check = |config: BuiltInConfig, expected| {
            let model = config.dummy(0).unwrap().config;
            let bytes = kv_bytes_per_block(&model, KvDtype::Bf16, 16) / 16;
            assert_eq!(bytes, expected, "{}", config.name());
        };
        check(BuiltInConfig::Llama31B8, 131_072);
        check(BuiltInConfig::Qwen3B8, 147_456);
        check(BuiltInConfig::SmolLm2M135, 23_040);
    }
}
