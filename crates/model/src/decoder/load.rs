//! Loading a decoder's weights onto a device.

use inflight_backend::{Backend, HostTensor};

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
        let loader = Loader { backend, config, weights, groups: &groups, naming: weights.naming() };
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
        let norm = loader.global(GlobalTensor::Norm)?;
        let host_norm = norm.to_f32();
        let norm = backend.load_vector(&[norm])?;
        let output = loader.rounded(output);
        let output = Linear { weight: backend.load_matrix(&[output])?, bias: None };
        let rotary_table = backend.load_vector(&[rotary_table(&config.rope, max_model_len)])?;
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
            rotary_table,
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
}

impl<B: Backend> Loader<'_, B> {
    fn layer(&self, layer: usize) -> Result<Layer<B>, ModelError> {
        use LayerTensor::{
            AttentionNorm, AttentionOutput, Down, FfnNorm, Gate, Key, KeyNorm, Query, QueryNorm,
            Up, Value,
        };
        let config = self.config;
        let qk_norm = match config.qk_norm {
            true => Some((self.norm(layer, QueryNorm)?, self.norm(layer, KeyNorm)?)),
            false => None,
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
            ffn_norm: self.norm(layer, FfnNorm)?,
            gate_up: self.linear(layer, &[Gate, Up], config.ffn_bias)?,
            down: self.linear(layer, &[Down], config.ffn_bias)?,
            window: config.layer_windows[layer],
            place: self.groups.layers()[layer],
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
                self.weights.tensor(&self.naming.layer(layer, *part, kind), shape)
            };
            parts.iter().map(one).collect::<Result<Vec<HostTensor>, _>>()
        };
        let weight: Vec<_> =
            tensors("weight")?.into_iter().map(|matrix| self.rounded(matrix)).collect();
        let weight = self.backend.load_matrix(&weight)?;
        let bias = match with_bias {
            true => Some(self.backend.load_vector(&tensors("bias")?)?),
            false => None,
        };
        Ok(Linear { weight, bias })
    }

    /// A matrix that products are made with, rounded to fp8 if that is asked for.
    fn rounded(&self, matrix: HostTensor) -> HostTensor {
        match self.config.fp8_weights {
            Some(Fp8Weights::AtLoad) => matrix.rounded_to_fp8(),
            Some(Fp8Weights::Stored) | None => matrix,
        }
    }

    fn norm(&self, layer: usize, part: LayerTensor) -> Result<B::Buffer, ModelError> {
        let len = match part {
            LayerTensor::QueryNorm | LayerTensor::KeyNorm => self.config.head_dim,
            _ => self.config.hidden_size,
        };
        let name = self.naming.layer(layer, part, "weight");
        Ok(self.backend.load_vector(&[self.weights.tensor(&name, &[len])?])?)
    }

    fn global(&self, tensor: GlobalTensor) -> Result<HostTensor, ModelError> {
        let (vocab, hidden) = (self.config.vocab_size, self.config.hidden_size);
        let shape: &[usize] = match tensor {
            GlobalTensor::Embedding | GlobalTensor::Output => &[vocab, hidden],
            GlobalTensor::Norm => &[hidden],
        };
        self.weights.tensor(self.naming.global(tensor), shape)
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
            | LayerTensor::QueryNorm
            | LayerTensor::KeyNorm => unreachable!("norms are vectors"),
        }
    }
}
