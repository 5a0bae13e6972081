//! One description of operators for all architectures.
//!
//! ```text
//! hidden = embedding[token_ids] * scale
//! normed = rms_norm(hidden)
//! each layer:
//!   qkv      = normed * Wqkv (+ bias)          queries, keys, values side by side
//!   qkv      = rope(qk_norm?(qkv))             keys and values go to the KV cache
//!   attended = attention(qkv, KV cache)
//!   hidden  += attended * Wo
//!   normed   = rms_norm(hidden)
//!   ffn      = silu(normed * Wgate) * (normed * Wup)
//!   hidden  += ffn * Wdown
//!   normed   = rms_norm(hidden)                not after the last layer
//! logits = rms_norm(hidden[sample_indices]) * Woutput
//! ```
//!
//! Some families norm what attention and feed-forward network give before it is added, have GELU in
//! place of SiLU, or other rotations in layers with a window ([`LayerStyle`](crate::LayerStyle)).

mod load;
mod scratch;

use inflight_backend::{
    Backend, BackendError, BlockTurn, CutPrompts, DeviceBatch, KvLayer, PromptCut, StepShape,
    TurnBlocks,
    ops::{Attention, Embed, GatedMatmul, Matmul, RmsNorm, RopeAndCache},
};
pub use load::LoadProgress;
pub use scratch::{Scratch, scratch_bytes};

use crate::{LayerGroups, LayerPlace, ModelConfig};

/// A decoder's weights on a device, and the order of operators that runs them.
pub struct Decoder<B: Backend> {
    config: ModelConfig,
    groups: LayerGroups,
    embedding: B::Embedding,
    layers: Vec<Layer<B>>,
    /// `[hidden_size]`.
    norm: B::Buffer,
    /// The same on the host, for states that are told instead of sampled from.
    host_norm: Vec<f32>,
    /// `[vocab_size, hidden_size]`.
    output: Linear<B>,
    /// `[max_model_len, rotary_dim]`.
    rotary: B::Buffer,
    /// The same for layers that have a window, if it is another.
    local_rotary: Option<B::Buffer>,
    max_model_len: usize,
}

struct Layer<B: Backend> {
    /// `[hidden_size]`.
    attention_norm: B::Buffer,
    /// `[qkv_len, hidden_size]`.
    qkv: Linear<B>,
    /// Of queries and of keys, `[head_dim]` each.
    qk_norm: Option<(B::Buffer, B::Buffer)>,
    /// `[hidden_size, q_len]`.
    attention_output: Linear<B>,
    /// Of what attention and feed-forward network give, `[hidden_size]` each.
    post_norms: Option<(B::Buffer, B::Buffer)>,
    /// `[hidden_size]`.
    ffn_norm: B::Buffer,
    /// `[2 * ffn_size, hidden_size]`.
    gate_up: Linear<B>,
    /// `[hidden_size, ffn_size]`.
    down: Linear<B>,
    window: Option<usize>,
    /// Where its keys and values are.
    place: LayerPlace,
    /// Whether it rotates as layers with a window do.
    is_local: bool,
}

struct Linear<B: Backend> {
    weight: B::Matrix,
    bias: Option<B::Buffer>,
}

/// What a forward pass reads and writes besides the weights.
pub struct ForwardInputs<'a, B: Backend> {
    /// The step's inputs, unpacked.
    pub batch: &'a DeviceBatch<B>,
    /// How many of everything the step has.
    pub step: StepShape,
    /// One entry for each layer of a group, see [`crate::kv_layers`].
    pub kv: &'a [KvLayer<B>],
    /// Written; logits of the sampled tokens are in [`Scratch::logits`] afterwards.
    pub scratch: &'a Scratch<B>,
    /// Tokens of a block of the KV cache.
    pub block_size: usize,
    /// Prompts that end with this step and are to be cut.
    pub cuts: &'a [PromptCut],
}

impl<B: Backend> Decoder<B> {
    /// What the model is.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// How its layers share the blocks of the KV cache.
    pub fn groups(&self) -> &LayerGroups {
        &self.groups
    }

    /// Tokens that a sequence may have: there is no rotation for later positions.
    pub fn max_model_len(&self) -> usize {
        self.max_model_len
    }

    /// Bytes that the device holds for matrices (embedding table, norms and biases excluded).
    pub fn matrix_bytes(&self, backend: &B) -> usize {
        let layers = self
            .layers
            .iter()
            .flat_map(|layer| [&layer.qkv, &layer.attention_output, &layer.gate_up, &layer.down]);
        let all = layers.chain([&self.output]);
        all.map(|linear| backend.matrix_bytes(&linear.weight)).sum()
    }

    /// Normalises the state of one token, from [`Scratch::sampled`], as it is before the output
    /// matrix.
    ///
    /// # Shapes
    /// `[hidden_size]`, host.
    pub fn normalise_state(&self, state: &mut [f32]) {
        assert_eq!(state.len(), self.host_norm.len(), "the state of one token");
        let sum: f32 = state.iter().map(|x| x * x).sum();
        let scale = 1.0 / (sum / state.len() as f32 + self.config.rms_norm_eps).sqrt();
        for (x, weight) in state.iter_mut().zip(&self.host_norm) {
            *x *= scale * weight;
        }
    }

    /// Enqueues copies of a layer group's blocks of the KV cache, of this block size, with keys
    /// turned to other positions.
    ///
    /// # Errors
    /// [`BackendError::Unsupported`] on a device that cannot.
    pub fn turn_blocks(
        &self,
        backend: &B,
        (kv, block_size): (&[KvLayer<B>], usize),
        (group, turns): (usize, &[BlockTurn]),
        stream: &B::Stream,
    ) -> Result<(), BackendError> {
        for is_local in [false, true] {
            let rotates_so =
                |layer: &&Layer<B>| layer.place.group == group && layer.is_local == is_local;
            let layers = self.layers.iter().filter(rotates_so);
            let kv: Vec<_> = layers.map(|layer| kv[layer.place.index].clone()).collect();
            if kv.is_empty() {
                continue;
            }
            let args = TurnBlocks {
                kv: &kv,
                attention: self.config.attention_shape(block_size),
                rotary_table: self.rotary_table(is_local),
                rotary_dim: self.config.rope.rotary_dim,
                interleaved: self.config.rope.interleaved,
                turns,
            };
            backend.turn_blocks(args, stream)?;
        }
        Ok(())
    }

    fn rotary_table(&self, is_local: bool) -> &B::Buffer {
        self.local_rotary.as_ref().filter(|_| is_local).unwrap_or(&self.rotary)
    }

    /// Enqueues a forward pass; without sampled tokens, all of it but the logits.
    ///
    /// # Errors
    /// [`BackendError::DeviceLost`].
    pub fn forward(
        &self,
        backend: &B,
        inputs: ForwardInputs<'_, B>,
        stream: &B::Stream,
    ) -> Result<(), BackendError> {
        assert_eq!(
            inputs.kv.len(),
            self.groups.width(),
            "one KV cache for each of a group's layers"
        );
        let pass = Pass { config: &self.config, backend, inputs: &inputs, stream };
        let (batch, step) = (inputs.batch, inputs.step);
        let hidden = &inputs.scratch.hidden;
        let (table, scale) = (&self.embedding, self.config.style.embedding_scale);
        backend.embed(Embed { table, out: hidden, scale, batch, step }, stream)?;
        let norms = self.layers.iter().map(|layer| &layer.attention_norm);
        let mut next_norms = norms.skip(1);
        if let Some(first) = self.layers.first() {
            pass.norm(hidden, &first.attention_norm, step.num_tokens)?;
        }
        let batches: Vec<_> =
            (0..self.groups.num_groups()).map(|group| batch.of_group(group)).collect();
        for layer in &self.layers {
            let rotary_table = self.rotary_table(layer.is_local);
            pass.attention(layer, &batches[layer.place.group], rotary_table)?;
            pass.ffn(layer, next_norms.next())?;
        }
        if step.num_sampled > 0 {
            pass.logits(&self.norm, &self.output)?;
        }
        Ok(())
    }
}

impl<B: Backend> Decoder<B> {
    /// Enqueues the logits of the tokens that `inputs.batch` samples of the forward pass before,
    /// whichever batch that had.
    ///
    /// # Errors
    /// [`BackendError::DeviceLost`].
    pub fn logits(
        &self,
        backend: &B,
        inputs: ForwardInputs<'_, B>,
        stream: &B::Stream,
    ) -> Result<(), BackendError> {
        let pass = Pass { config: &self.config, backend, inputs: &inputs, stream };
        pass.logits(&self.norm, &self.output)
    }

    /// Enqueues no more than having those tokens' states, not normed, in [`Scratch::sampled`].
    ///
    /// # Errors
    /// [`BackendError::DeviceLost`].
    pub fn gather_states(
        &self,
        backend: &B,
        inputs: ForwardInputs<'_, B>,
        stream: &B::Stream,
    ) -> Result<(), BackendError> {
        let ForwardInputs { batch, step, scratch, .. } = inputs;
        let (hidden, sampled) = (&scratch.hidden, &scratch.sampled);
        backend.gather_sampled(hidden, batch, step, self.config.hidden_size, sampled, stream)
    }
}

/// One forward pass being enqueued.
struct Pass<'a, B: Backend> {
    config: &'a ModelConfig,
    backend: &'a B,
    inputs: &'a ForwardInputs<'a, B>,
    stream: &'a B::Stream,
}

impl<B: Backend> Pass<'_, B> {
    /// `hidden += attention(normed)`, and `normed = rms_norm(hidden)`.
    fn attention(
        &self,
        layer: &Layer<B>,
        batch: &DeviceBatch<B>,
        rotary_table: &B::Buffer,
    ) -> Result<(), BackendError> {
        let ForwardInputs { step, scratch, block_size, kv, .. } = *self.inputs;
        let kv = &kv[layer.place.index];
        let attention = self.config.attention_shape(block_size);
        let rope = RopeAndCache {
            qkv: &scratch.qkv,
            rotary_table,
            rotary_dim: self.config.rope.rotary_dim,
            interleaved: self.config.rope.interleaved,
            qk_norm: layer.qk_norm.as_ref().map(|(query, key)| (query, key)),
            eps: self.config.rms_norm_eps,
            attention,
            kv,
            batch,
            step,
        };
        let attend = Attention {
            qkv: &scratch.qkv,
            kv,
            out: &scratch.attended,
            attention,
            scale: self.config.attention_scale(),
            window: layer.window,
            batch,
            step,
        };
        let qkv = self.matmul_args(&scratch.normed, &layer.qkv, &scratch.qkv);
        self.backend.matmul_and_rope(qkv, rope, self.stream)?;
        self.backend.attention(attend, self.stream)?;
        if !self.inputs.cuts.is_empty() {
            self.cut(kv)?;
        }
        let post_norm = layer.post_norms.as_ref().map(|(post, _)| post);
        let norms = (post_norm, Some(&layer.ffn_norm));
        self.add(&scratch.attended, &layer.attention_output, norms)
    }

    /// Copies what is to stay of prompts.
    fn cut(&self, kv: &KvLayer<B>) -> Result<(), BackendError> {
        let ForwardInputs { batch, step, scratch, block_size, cuts, .. } = *self.inputs;
        let args = CutPrompts {
            qkv: &scratch.qkv,
            kv,
            attention: self.config.attention_shape(block_size),
            scale: self.config.attention_scale(),
            batch,
            step,
            cuts,
        };
        self.backend.cut_prompts(args, self.stream)
    }

    /// `hidden += ffn(normed)`, and `normed = rms_norm(hidden)` for the next layer.
    fn ffn(&self, layer: &Layer<B>, next_norm: Option<&B::Buffer>) -> Result<(), BackendError> {
        let ForwardInputs { step, scratch, .. } = *self.inputs;
        let args = GatedMatmul {
            x: &scratch.normed,
            weight: &layer.gate_up.weight,
            bias: layer.gate_up.bias.as_ref(),
            gate_up: &scratch.gate_up,
            out: &scratch.ffn,
            num_rows: step.num_tokens,
            len: self.config.ffn_size,
            activation: self.config.style.activation,
        };
        self.backend.gated_matmul(args, self.stream)?;
        let post_norm = layer.post_norms.as_ref().map(|(_, post)| post);
        self.add(&scratch.ffn, &layer.down, (post_norm, next_norm))
    }

    fn logits(&self, norm: &B::Buffer, output: &Linear<B>) -> Result<(), BackendError> {
        let ForwardInputs { batch, step, scratch, .. } = *self.inputs;
        let (hidden, sampled) = (&scratch.hidden, &scratch.sampled);
        let len = self.config.hidden_size;
        self.backend.gather_sampled(hidden, batch, step, len, sampled, self.stream)?;
        self.norm(sampled, norm, step.num_sampled)?;
        let matmul = Matmul {
            x: &scratch.normed,
            weight: &output.weight,
            bias: output.bias.as_ref(),
            out: &scratch.logits,
            num_rows: step.num_sampled,
            accumulate: false,
        };
        self.backend.matmul(matmul, self.stream)
    }

    /// `normed = rms_norm(x)`.
    fn norm(&self, x: &B::Buffer, weight: &B::Buffer, num_rows: usize) -> Result<(), BackendError> {
        self.backend.rms_norm(self.norm_args(x, weight, num_rows), self.stream)
    }

    fn norm_args<'b>(
        &'b self,
        x: &'b B::Buffer,
        weight: &'b B::Buffer,
        num_rows: usize,
    ) -> RmsNorm<'b, B> {
        RmsNorm {
            x,
            weight,
            out: &self.inputs.scratch.normed,
            num_rows,
            len: self.config.hidden_size,
            eps: self.config.rms_norm_eps,
        }
    }

    /// `hidden += x * weight^T (+ bias)` for every token, normed if there is a `post` norm, and
    /// `normed = rms_norm(hidden)`.
    fn add(
        &self,
        x: &B::Buffer,
        linear: &Linear<B>,
        (post, norm): (Option<&B::Buffer>, Option<&B::Buffer>),
    ) -> Result<(), BackendError> {
        let hidden = &self.inputs.scratch.hidden;
        if let Some((post, branch)) = post.zip(self.inputs.scratch.branch.as_ref()) {
            self.backend.matmul(self.matmul_args(x, linear, branch), self.stream)?;
            let num_rows = self.inputs.step.num_tokens;
            let args = RmsNorm { out: hidden, ..self.norm_args(branch, post, num_rows) };
            self.backend.add_rms_norm(args, self.stream)?;
            return norm.map_or(Ok(()), |weight| self.norm(hidden, weight, num_rows));
        }
        let args = Matmul { accumulate: true, ..self.matmul_args(x, linear, hidden) };
        match norm {
            Some(weight) => {
                let norm = self.norm_args(hidden, weight, args.num_rows);
                self.backend.add_matmul_and_norm(args, norm, self.stream)
            }
            None => self.backend.matmul(args, self.stream),
        }
    }

    /// `out = x * weight^T (+ bias)` for every token.
    fn matmul_args<'b>(
        &self,
        x: &'b B::Buffer,
        linear: &'b Linear<B>,
        out: &'b B::Buffer,
    ) -> Matmul<'b, B> {
        Matmul {
            x,
            weight: &linear.weight,
            bias: linear.bias.as_ref(),
            out,
            num_rows: self.inputs.step.num_tokens,
            accumulate: false,
        }
    }
}
