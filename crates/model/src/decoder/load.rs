//! Loading a decoder's weights onto a device.

use inflight_backend::{Backend, Dtype, HostTensor, TensorData};

use super::{Decoder, Layer, Linear};
use crate::{
    Fp8Weights, LayerGroups, ModelConfig, ModelError, Naming, Weights,
    names::{GlobalTensor, LayerTensor},
    rotary_table,
};

/// How far loading has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoadProgress {
    /// Parts loaded: the embedding table, each layer, the output matrix.
    pub done: usize,
    /// All parts.
    pub total: usize,
}

impl<B: Backend> Decoder<B> {
    /// Loads all weights and checks their shapes against `config`. Sequences may have up to
    /// `max_model_len` tokens. `progress` is called after each part.
    ///
    /// # Errors
    /// [`ModelError`] naming the tensor that is missing, of another shape or damaged.
    pub fn load(
        backend: &B,
        config: &ModelConfig,
        weights: &Weights,
        max_model_len: usize,
        progress: &mut dyn FnMut(LoadProgress),
    ) -> Result<Self, ModelError> {
        let groups = LayerGroups::new(config);
        let prefix = prefix(weights);
        let naming = weights.naming();
        let loader = Loader { backend, config, weights, groups: &groups, naming, prefix };
        let total = config.num_layers + 2;
        let mut done = 0;
        let mut advance = || {
            done += 1;
            progress(LoadProgress { done, total });
        };
        let table = loader.global(GlobalTensor::Embedding)?;
        let embedding = backend.load_embedding(&table)?;
        advance();
        let mut layers = Vec::with_capacity(config.num_layers);
        for layer in 0..config.num_layers {
            layers.push(loader.layer(layer)?);
            advance();
        }
        let output = match config.tie_word_embeddings {
            true => table,
            false => loader.global(GlobalTensor::Output)?,
        };
        let norm = loader.whole_norm(loader.global(GlobalTensor::Norm)?);
        let host_norm = norm.to_f32();
        let norm = backend.load_vector(&[norm])?;
        let output = match config.fp8_weights {
            Some(Fp8Weights::AllAtLoad) => output.rounded_to_fp8(),
            Some(Fp8Weights::AtLoad | Fp8Weights::Stored) | None => output,
        };
        let output = Linear { weight: backend.load_matrix(&[output])?, bias: None };
        let table = |rope| backend.load_vector(&[rotary_table(rope, max_model_len)]);
        let rotary = table(&config.rope)?;
        let local_rotary = config.style.local_rope.as_ref().map(table).transpose()?;
        advance();
        let config = config.clone();
        Ok(Self {
            config,
            groups,
            embedding,
            layers,
            norm,
            host_norm,
            output,
            rotary,
            local_rotary,
            max_model_len,
        })
    }
}

struct Loader<'a, B: Backend> {
    backend: &'a B,
    config: &'a ModelConfig,
    weights: &'a Weights,
    groups: &'a LayerGroups,
    naming: Naming,
    /// What names begin with instead of `model.`, if the model is a part of another.
    prefix: Option<&'static str>,
}

/// Where a folder holds more than a language model, that one's tensors have names of their own.
fn prefix(weights: &Weights) -> Option<&'static str> {
    let is_there = |prefix: &&str| weights.has(&format!("{prefix}embed_tokens.weight"));
    let nested = ["language_model.model.", "model.language_model."];
    nested.into_iter().find(is_there).filter(|_| !is_there(&"model."))
}

impl<B: Backend> Loader<'_, B> {
    fn layer(&self, layer: usize) -> Result<Layer<B>, ModelError> {
        use LayerTensor::{
            AttentionNorm, AttentionOutput, Down, FfnNorm, Gate, Key, KeyNorm, PostAttentionNorm,
            PostFfnNorm, PreFfnNorm, Query, QueryNorm, Up, Value,
        };
        let config = self.config;
        let qk_norm = match config.qk_norm {
            true => Some((self.norm(layer, QueryNorm)?, self.norm(layer, KeyNorm)?)),
            false => None,
        };
        let (ffn_norm, post_norms) = match config.style.post_norms {
            true => {
                let post = (self.norm(layer, PostAttentionNorm)?, self.norm(layer, PostFfnNorm)?);
                (PreFfnNorm, Some(post))
            }
            false => (FfnNorm, None),
        };
        Ok(Layer {
            attention_norm: self.norm(layer, AttentionNorm)?,
            qkv: self.linear(layer, &[Query, Key, Value], config.qkv_bias)?,
            qk_norm,
            attention_output: self.linear(
                layer,
                &[AttentionOutput],
                config.attention_output_bias,
            )?,
            post_norms,
            ffn_norm: self.norm(layer, ffn_norm)?,
            gate_up: self.linear(layer, &[Gate, Up], config.ffn_bias)?,
            down: self.linear(layer, &[Down], config.ffn_bias)?,
            window: config.layer_windows[layer],
            place: self.groups.layers()[layer],
            is_local: config.style.local_rope.is_some() && config.layer_windows[layer].is_some(),
        })
    }

    /// Matrices stacked along their rows, and their biases one after the other.
    fn linear(
        &self,
        layer: usize,
        parts: &[LayerTensor],
        with_bias: bool,
    ) -> Result<Linear<B>, ModelError> {
        let tensors = |kind: &str| {
            let one = |part: &LayerTensor| {
                let [rows, cols] = self.matrix_shape(*part);
                let shape: &[usize] = if kind == "bias" { &[rows] } else { &[rows, cols] };
                self.tensor(&self.naming.layer(layer, *part, kind), shape)
            };
            parts.iter().map(one).collect::<Result<Vec<HostTensor>, _>>()
        };
        let mut weight = tensors("weight")?;
        if let Some(Fp8Weights::AtLoad | Fp8Weights::AllAtLoad) = self.config.fp8_weights {
            weight = weight.into_iter().map(HostTensor::rounded_to_fp8).collect();
        }
        let weight = self.backend.load_matrix(&weight)?;
        let bias = match with_bias {
            true => Some(self.backend.load_vector(&tensors("bias")?)?),
            false => None,
        };
        Ok(Linear { weight, bias })
    }

    fn norm(&self, layer: usize, part: LayerTensor) -> Result<B::Buffer, ModelError> {
        let len = match part {
            LayerTensor::QueryNorm | LayerTensor::KeyNorm => self.config.head_dim,
            _ => self.config.hidden_size,
        };
        let name = self.naming.layer(layer, part, "weight");
        Ok(self.backend.load_vector(&[self.whole_norm(self.tensor(&name, &[len])?)])?)
    }

    fn global(&self, tensor: GlobalTensor) -> Result<HostTensor, ModelError> {
        let (vocab, hidden) = (self.config.vocab_size, self.config.hidden_size);
        let shape: &[usize] = match tensor {
            GlobalTensor::Embedding | GlobalTensor::Output => &[vocab, hidden],
            GlobalTensor::Norm => &[hidden],
        };
        self.tensor(self.naming.global(tensor), shape)
    }

    fn tensor(&self, name: &str, shape: &[usize]) -> Result<HostTensor, ModelError> {
        let nested = self.prefix.zip(name.strip_prefix("model."));
        match nested {
            Some((prefix, rest)) => self.weights.tensor(&format!("{prefix}{rest}"), shape),
            None => self.weights.tensor(name, shape),
        }
    }

    /// A norm's weights with the one that files leave out.
    fn whole_norm(&self, norm: HostTensor) -> HostTensor {
        if !self.config.style.norms_less_one || self.naming == Naming::Gguf {
            return norm;
        }
        let whole = norm.to_f32().into_iter().flat_map(|weight| (1.0 + weight).to_le_bytes());
        let data = TensorData::Owned(whole.collect::<Vec<u8>>().into());
        HostTensor { dtype: Dtype::F32, data, ..norm }
    }

    /// `[rows, cols]` of a matrix.
    fn matrix_shape(&self, part: LayerTensor) -> [usize; 2] {
        let config = self.config;
        match part {
            LayerTensor::Query => [config.q_len(), config.hidden_size],
            LayerTensor::Key | LayerTensor::Value => [config.kv_len(), config.hidden_size],
            LayerTensor::AttentionOutput => [config.hidden_size, config.q_len()],
            LayerTensor::Gate | LayerTensor::Up => [config.ffn_size, config.hidden_size],
            LayerTensor::Down => [config.hidden_size, config.ffn_size],
            LayerTensor::AttentionNorm
            | LayerTensor::FfnNorm
            | LayerTensor::PostAttentionNorm
            | LayerTensor::PreFfnNorm
            | LayerTensor::PostFfnNorm
            | LayerTensor::QueryNorm
            | LayerTensor::KeyNorm => unreachable!("norms are vectors"),
        }
    }
}
