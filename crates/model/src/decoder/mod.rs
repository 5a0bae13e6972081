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
//! Behind the last layer's attention, `hidden` and `attended` become those of the sampled tokens,
//! since nobody asks for the others' states (where somebody does: [`ForwardInputs::keeps_states`]).
//! In a step of prompts that saves nearly a layer.
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
    /// Whether [`Decoder::logits`] or [`Decoder::gather_states`] will ask for tokens that this pass
    /// does not sample.
    pub keeps_states: bool,
}

/// The rows that operators behind a layer's attention work on.
struct Rows<'b, B: Backend> {
    /// `[len, hidden_size]`.
    hidden: &'b B::Buffer,
    /// `[len, q_len]`.
    attended: &'b B::Buffer,
    len: usize,
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
        if let Some(first) = self.layers.first() {
            pass.norm(hidden, &first.attention_norm, step.num_tokens)?;
        }
        let batches: Vec<_> =
            (0..self.groups.num_groups()).map(|group| batch.of_group(group)).collect();
        let narrows = step.num_sampled < step.num_tokens && !inputs.keeps_states;
        for (index, layer) in self.layers.iter().enumerate() {
            let rotary_table = self.rotary_table(layer.is_local);
            let batch = &batches[layer.place.group];
            let next = self.layers.get(index + 1).map(|next| &next.attention_norm);
            if next.is_none() && narrows {
                return pass.last_layer(layer, batch, rotary_table, (&self.norm, &self.output));
            }
            pass.attention(layer, batch, rotary_table)?;
            pass.behind_attention(&pass.all_rows(), layer, next)?;
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
    /// The last layer and the logits, of no more than what is sampled.
    fn last_layer(
        &self,
        layer: &Layer<B>,
        batch: &DeviceBatch<B>,
        rotary_table: &B::Buffer,
        (norm, output): (&B::Buffer, &Linear<B>),
    ) -> Result<(), BackendError> {
        let ForwardInputs { step, scratch, cuts, .. } = *self.inputs;
        if step.num_sampled == 0 && cuts.is_empty() {
            let (qkv, rope) = self.qkv_and_rope(layer, batch, rotary_table);
            return self.backend.matmul_and_rope(qkv, rope, self.stream);
        }
        self.attention(layer, batch, rotary_table)?;
        if step.num_sampled == 0 {
            return Ok(());
        }
        // Queries, keys and values have been read.
        let rows = Rows { hidden: &scratch.sampled, attended: &scratch.qkv, len: step.num_sampled };
        self.gather(&scratch.hidden, self.config.hidden_size, rows.hidden)?;
        self.gather(&scratch.attended, self.config.q_len(), rows.attended)?;
        self.behind_attention(&rows, layer, Some(norm))?;
        self.output(output)
    }

    fn all_rows(&self) -> Rows<'_, B> {
        let ForwardInputs { step, scratch, .. } = *self.inputs;
        Rows { hidden: &scratch.hidden, attended: &scratch.attended, len: step.num_tokens }
    }

    /// `out = x[sample_indices]`, rows of `len`.
    fn gather(&self, x: &B::Buffer, len: usize, out: &B::Buffer) -> Result<(), BackendError> {
        let ForwardInputs { batch, step, .. } = *self.inputs;
        self.backend.gather_sampled(x, batch, step, len, out, self.stream)
    }

    /// The product that makes queries, keys and values, and what becomes of them.
    fn qkv_and_rope<'b>(
        &'b self,
        layer: &'b Layer<B>,
        batch: &'b DeviceBatch<B>,
        rotary_table: &'b B::Buffer,
    ) -> (Matmul<'b, B>, RopeAndCache<'b, B>) {
        let ForwardInputs { step, scratch, block_size, kv, .. } = *self.inputs;
        let rope = RopeAndCache {
            qkv: &scratch.qkv,
            rotary_table,
            rotary_dim: self.config.rope.rotary_dim,
            interleaved: self.config.rope.interleaved,
            qk_norm: layer.qk_norm.as_ref().map(|(query, key)| (query, key)),
            eps: self.config.rms_norm_eps,
            attention: self.config.attention_shape(block_size),
            kv: &kv[layer.place.index],
            batch,
            step,
        };
        (matmul_args(&scratch.normed, &layer.qkv, &scratch.qkv, step.num_tokens), rope)
    }

    /// `attended = attention(normed)`.
    fn attention(
        &self,
        layer: &Layer<B>,
        batch: &DeviceBatch<B>,
        rotary_table: &B::Buffer,
    ) -> Result<(), BackendError> {
        let ForwardInputs { step, scratch, block_size, kv, .. } = *self.inputs;
        let kv = &kv[layer.place.index];
        let attention = self.config.attention_shape(block_size);
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
        let (qkv, rope) = self.qkv_and_rope(layer, batch, rotary_table);
        self.backend.matmul_and_rope(qkv, rope, self.stream)?;
        self.backend.attention(attend, self.stream)?;
        if self.inputs.cuts.is_empty() { Ok(()) } else { self.cut(kv) }
    }

    /// `hidden += attended`, `normed = rms_norm(hidden)`, and the feed-forward network.
    fn behind_attention(
        &self,
        rows: &Rows<'_, B>,
        layer: &Layer<B>,
        next_norm: Option<&B::Buffer>,
    ) -> Result<(), BackendError> {
        let post_norm = layer.post_norms.as_ref().map(|(post, _)| post);
        let norms = (post_norm, Some(&layer.ffn_norm));
        self.add(rows, rows.attended, &layer.attention_output, norms)?;
        self.ffn(rows, layer, next_norm)
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

    /// `hidden += ffn(normed)`, and `normed = rms_norm(hidden)` for what comes next.
    fn ffn(
        &self,
        rows: &Rows<'_, B>,
        layer: &Layer<B>,
        next_norm: Option<&B::Buffer>,
    ) -> Result<(), BackendError> {
        let scratch = self.inputs.scratch;
        let args = GatedMatmul {
            x: &scratch.normed,
            weight: &layer.gate_up.weight,
            bias: layer.gate_up.bias.as_ref(),
            gate_up: &scratch.gate_up,
            out: &scratch.ffn,
            num_rows: rows.len,
            len: self.config.ffn_size,
            activation: self.config.style.activation,
        };
        self.backend.gated_matmul(args, self.stream)?;
        let post_norm = layer.post_norms.as_ref().map(|(_, post)| post);
        self.add(rows, &scratch.ffn, &layer.down, (post_norm, next_norm))
    }

    fn logits(&self, norm: &B::Buffer, output: &Linear<B>) -> Result<(), BackendError> {
        let ForwardInputs { step, scratch, .. } = *self.inputs;
        self.gather(&scratch.hidden, self.config.hidden_size, &scratch.sampled)?;
        self.norm(&scratch.sampled, norm, step.num_sampled)?;
        self.output(output)
    }

    /// The logits of the sampled tokens, whose states are normed.
    fn output(&self, output: &Linear<B>) -> Result<(), BackendError> {
        let ForwardInputs { step, scratch, .. } = *self.inputs;
        let args = matmul_args(&scratch.normed, output, &scratch.logits, step.num_sampled);
        self.backend.matmul(args, self.stream)
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

    /// `hidden += x * weight^T (+ bias)` for every row, normed if there is a `post` norm, and
    /// `normed = rms_norm(hidden)`.
    fn add(
        &self,
        rows: &Rows<'_, B>,
        x: &B::Buffer,
        linear: &Linear<B>,
        (post, norm): (Option<&B::Buffer>, Option<&B::Buffer>),
    ) -> Result<(), BackendError> {
        let (hidden, num_rows) = (rows.hidden, rows.len);
        if let Some((post, branch)) = post.zip(self.inputs.scratch.branch.as_ref()) {
            self.backend.matmul(matmul_args(x, linear, branch, num_rows), self.stream)?;
            let args = RmsNorm { out: hidden, ..self.norm_args(branch, post, num_rows) };
            self.backend.add_rms_norm(args, self.stream)?;
            return norm.map_or(Ok(()), |weight| self.norm(hidden, weight, num_rows));
        }
        let args = Matmul { accumulate: true, ..matmul_args(x, linear, hidden, num_rows) };
        match norm {
            Some(weight) => {
                let norm = self.norm_args(hidden, weight, num_rows);
                self.backend.add_matmul_and_norm(args, norm, self.stream)
            }
            None => self.backend.matmul(args, self.stream),
        }
    }
}

/// `out = x * weight^T (+ bias)` for every row.
fn matmul_args<'b, B: Backend>(
    x: &'b B::Buffer,
    linear: &'b Linear<B>,
    out: &'b B::Buffer,
    num_rows: usize,
) -> Matmul<'b, B> {
    let (weight, bias) = (&linear.weight, linear.bias.as_ref());
    Matmul { x, weight, bias, out, num_rows, accumulate: false }
}
