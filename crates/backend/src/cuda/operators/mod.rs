//! Operators as launches: checks sizes, fills in addresses.
//!
//! [`attention`]: the two attention kernels and their plan. [`block_moves`]: blocks of the KV cache
//! on their way. [`prompt_cuts`]: what stays of prompts.

mod attention;
mod block_moves;
mod block_turns;
mod prompt_cuts;

use std::{sync::Arc, thread};

use cudarc::driver::sys::CUdeviceptr;
use inflight_kernels::{
    self as kernels, KvNumbers, KvShape,
    ops::{
        embed::{Embed, EmbedParams},
        fp8_quantize::{Fp8Quantize, Fp8QuantizeParams},
        gate_and_mul::{GateAndMul, GateAndMulParams},
        gather_sampled::{GatherSampled, GatherSampledParams},
        greatest_logits::{GreatestLogits, GreatestLogitsParams},
        move_blocks::MoveBlocks,
        random_normal::{RandomNormal, RandomNormalParams},
        rms_norm::{RmsNorm, RmsNormParams},
        rope_and_cache::{RopeAndCache, RopeAndCacheParams, Rotation},
        sample::{Sample, SampleParams},
        track_tokens::{TrackTokens, TrackTokensParams},
        turn_blocks::TurnBlocks,
        unpack::{MAX_MORE_GROUPS, Unpack, UnpackGroup, UnpackParams},
    },
};

pub(super) use self::attention::prefix_rule;
use self::{attention::AttentionPlans, prompt_cuts::PromptCuts};
use super::{
    backend::CudaBackend,
    by_key::ByKey,
    gemm::Parts,
    loaded::{KernelLoader, Loaded, unsupported},
    memory::{CudaBuffer, Element},
    numerics::Numerics,
    stream::CudaStream,
};
use crate::{
    Activation, AttentionShape, BackendError, DeviceBatch, HistoryShape, KvLayout, OutputLayout,
    SharedPrefixes, StepShape, ops, ops::SamplingState,
};

/// All kernels, and the working memory of those that need some.
pub(super) struct Operators {
    loader: Arc<KernelLoader>,
    unpack: Loaded<Unpack>,
    track_tokens: Loaded<TrackTokens>,
    embed: Loaded<Embed>,
    rms_norm: Loaded<RmsNorm>,
    /// Loaded when first needed.
    add_rms_norm: ByKey<(), Loaded<RmsNorm>>,
    silu_and_mul: Loaded<GateAndMul>,
    /// Loaded when first needed.
    gelu_and_mul: ByKey<(), Loaded<GateAndMul>>,
    gather_f32: Loaded<GatherSampled>,
    gather_bf16: Loaded<GatherSampled>,
    greatest_logits: Loaded<GreatestLogits>,
    /// Keys, by the logits they are of.
    greatest: ByKey<CUdeviceptr, CudaBuffer>,
    sample: Loaded<Sample>,
    /// Loaded when first needed.
    unusual_sample: ByKey<(), Loaded<Sample>>,
    move_blocks: Loaded<MoveBlocks>,
    fill_bf16: Loaded<RandomNormal>,
    fill_f32: Loaded<RandomNormal>,
    kv_numbers: KvNumbers,
    rope: ByKey<RopeAndCache, Loaded<RopeAndCache>>,
    turn: ByKey<TurnBlocks, Loaded<TurnBlocks>>,
    cuts: PromptCuts,
    quantize: ByKey<Fp8Quantize, Loaded<Fp8Quantize>>,
    attention: AttentionPlans,
    /// Room for logits with penalties and bias, by rows and vocabulary.
    adjusted: ByKey<(CUdeviceptr, usize), CudaBuffer>,
}

/// Values to fill memory with: normally distributed, of mean 0.
pub(super) struct FillNormal {
    pub(super) address: CUdeviceptr,
    pub(super) element: Element,
    pub(super) len: usize,
    pub(super) seed: u64,
    pub(super) std: f32,
}

/// Rows to be rounded to fp8, with a scale for each.
#[derive(Clone, Copy, Debug)]
pub(super) struct RoundRows {
    /// `[num_rows, len]`.
    pub(super) x: CUdeviceptr,
    pub(super) element: Element,
    /// `[num_rows, fp8_row_bytes(len)]`.
    pub(super) codes: CUdeviceptr,
    /// `[num_rows]`.
    pub(super) scales: CUdeviceptr,
    pub(super) num_rows: usize,
    pub(super) len: usize,
}

/// Arguments of [`crate::Backend::gather_sampled`].
pub(super) struct Gather<'a> {
    pub(super) x: &'a CudaBuffer,
    pub(super) batch: &'a DeviceBatch<CudaBackend>,
    pub(super) shape: StepShape,
    pub(super) len: usize,
    pub(super) out: &'a CudaBuffer,
}

impl Operators {
    /// Compiles and loads what every model needs; the rest comes when first used.
    pub(super) fn new(
        loader: &Arc<KernelLoader>,
        numerics: Numerics,
    ) -> Result<Self, BackendError> {
        use kernels::Element::{Bf16, F32};
        thread::scope(|scope| {
            let unpack = loader.begin(scope, Unpack);
            let track_tokens = loader.begin(scope, TrackTokens);
            let embed = loader.begin(scope, Embed { table: Bf16, out: F32 });
            let rms_norm = loader.begin(scope, RmsNorm::of_state());
            let silu_and_mul = loader.begin(scope, GateAndMul { gelu: false });
            let gather_f32 = loader.begin(scope, GatherSampled { element: F32 });
            let gather_bf16 = loader.begin(scope, GatherSampled { element: Bf16 });
            let greatest_logits = loader.begin(scope, GreatestLogits);
            let sample = loader.begin(scope, Sample { unusual: false });
            let move_blocks = loader.begin(scope, MoveBlocks);
            let fill_bf16 = loader.begin(scope, RandomNormal { out: Bf16 });
            let fill_f32 = loader.begin(scope, RandomNormal { out: F32 });
            let attention = AttentionPlans::new(loader, numerics)?;
            Ok(Self {
                unpack: unpack.end()?,
                track_tokens: track_tokens.end()?,
                embed: embed.end()?,
                rms_norm: rms_norm.end()?,
                add_rms_norm: ByKey::default(),
                silu_and_mul: silu_and_mul.end()?,
                gelu_and_mul: ByKey::default(),
                gather_f32: gather_f32.end()?,
                gather_bf16: gather_bf16.end()?,
                greatest_logits: greatest_logits.end()?,
                greatest: ByKey::default(),
                sample: sample.end()?,
                unusual_sample: ByKey::default(),
                move_blocks: move_blocks.end()?,
                fill_bf16: fill_bf16.end()?,
                fill_f32: fill_f32.end()?,
                kv_numbers: numerics.kv_numbers()?,
                rope: ByKey::default(),
                turn: ByKey::default(),
                cuts: PromptCuts::default(),
                quantize: ByKey::default(),
                attention,
                adjusted: ByKey::default(),
                loader: Arc::clone(loader),
            })
        })
    }

    pub(super) fn fill_normal(
        &self,
        fill: &FillNormal,
        stream: &CudaStream,
    ) -> Result<(), BackendError> {
        let kernel = match fill.element {
            Element::Bf16 => &self.fill_bf16,
            Element::F32 | Element::Word | Element::Fp8 => &self.fill_f32,
        };
        let params = RandomNormalParams {
            out: fill.address,
            seed: fill.seed,
            first_index: 0,
            len: fill.len as u64,
            std: fill.std,
            reserved: 0,
        };
        kernel.launch(&params, stream)
    }

    pub(super) fn round_rows(
        &self,
        rows: &RoundRows,
        stream: &CudaStream,
    ) -> Result<(), BackendError> {
        let x = match rows.element {
            Element::Bf16 => kernels::Element::Bf16,
            _ => kernels::Element::F32,
        };
        let kernel = Fp8Quantize { x };
        let kernel = self.quantize.get(kernel, || self.loader.load(kernel))?;
        let params = Fp8QuantizeParams {
            x: rows.x,
            codes: rows.codes,
            scales: rows.scales,
            num_rows: word(rows.num_rows),
            len: word(rows.len),
        };
        kernel.launch(&params, stream)
    }

    pub(super) fn unpack(
        &self,
        packed: &CudaBuffer,
        previous: &CudaBuffer,
        shape: StepShape,
        batch: &DeviceBatch<CudaBackend>,
        stream: &CudaStream,
    ) -> Result<(), BackendError> {
        check_batch(batch, shape);
        self.attention.start_step(batch);
        let mut more_groups = [UnpackGroup::default(); MAX_MORE_GROUPS];
        for (to, group) in more_groups.iter_mut().zip(&batch.more_groups) {
            *to = UnpackGroup {
                slot_mapping: group.slot_mapping.address(),
                context_lens: group.context_lens.address(),
                block_starts: group.block_starts.address(),
            };
        }
        let params = UnpackParams {
            packed: packed.address(),
            previous: previous.address(),
            token_ids: batch.token_ids.address(),
            positions: batch.positions.address(),
            slot_mapping: batch.slot_mapping.address(),
            row_starts: batch.row_starts.address(),
            context_lens: batch.context_lens.address(),
            block_starts: batch.block_starts.address(),
            row_states: batch.row_states.address(),
            blocks: batch.blocks.address(),
            sample_indices: batch.sample_indices.address(),
            sampling: batch.sampling.address(),
            bias_ids: batch.bias_ids.address(),
            bias_values: batch.bias_values.address(),
            more_groups,
            prefixes: batch.prefixes.address(),
            prefix_rows: batch.prefix_rows.address(),
            num_tokens: word(shape.num_tokens),
            num_rows: word(shape.num_rows),
            num_sampled: word(shape.num_sampled),
            num_more_groups: word(shape.num_more_groups),
        };
        self.unpack.launch(&params, stream)
    }

    pub(super) fn track_tokens(
        &self,
        batch: &DeviceBatch<CudaBackend>,
        shape: StepShape,
        state: &SamplingState<CudaBackend>,
        stream: &CudaStream,
    ) -> Result<(), BackendError> {
        let params = TrackTokensParams {
            token_ids: batch.token_ids.address(),
            positions: batch.positions.address(),
            row_starts: batch.row_starts.address(),
            row_states: batch.row_states.address(),
            token_counts: state.token_counts.address(),
            num_rows: word(shape.num_rows),
            vocab_size: word(state.vocab_size),
        };
        self.track_tokens.launch(&params, stream)
    }

    /// The same kernel, over words that lie one after the other.
    pub(super) fn count_history(
        &self,
        words: &CudaBuffer,
        shape: HistoryShape,
        state: &SamplingState<CudaBackend>,
        stream: &CudaStream,
    ) -> Result<(), BackendError> {
        check_buffer(words, Element::Word, shape.num_words(), "count_history: words");
        let at = shape.layout();
        let address = |start: usize| words.address() + 4 * start as u64;
        let params = TrackTokensParams {
            token_ids: address(at.token_ids.start),
            positions: address(at.positions.start),
            row_starts: address(at.row_starts.start),
            row_states: address(at.row_states.start),
            token_counts: state.token_counts.address(),
            num_rows: word(shape.num_rows),
            vocab_size: word(state.vocab_size),
        };
        self.track_tokens.launch(&params, stream)
    }

    pub(super) fn move_blocks(
        &self,
        args: &crate::MoveBlocks<'_, CudaBackend>,
        stream: &CudaStream,
    ) -> Result<(), BackendError> {
        block_moves::launch(&self.move_blocks, args, stream)
    }

    pub(super) fn embed(
        &self,
        args: &ops::Embed<'_, CudaBackend>,
        stream: &CudaStream,
    ) -> Result<(), BackendError> {
        let ops::Embed { table, out, scale, batch, step: shape } = *args;
        check_buffer(out, Element::F32, shape.num_tokens * table.cols, "embed: out");
        let params = EmbedParams {
            table: table.allocation.address(),
            token_ids: batch.token_ids.address(),
            out: out.address(),
            num_tokens: word(shape.num_tokens),
            num_embeddings: word(table.rows),
            len: word(table.cols),
            scale,
        };
        self.embed.launch(&params, stream)
    }

    pub(super) fn rms_norm(
        &self,
        args: &ops::RmsNorm<'_, CudaBackend>,
        stream: &CudaStream,
    ) -> Result<(), BackendError> {
        self.rms_norm.launch(&norm_params(args, Element::Bf16), stream)
    }

    pub(super) fn add_rms_norm(
        &self,
        args: &ops::RmsNorm<'_, CudaBackend>,
        stream: &CudaStream,
    ) -> Result<(), BackendError> {
        let kernel = self.add_rms_norm.get((), || self.loader.load(RmsNorm::of_branch()))?;
        kernel.launch(&norm_params(args, Element::F32), stream)
    }

    /// Of what a product left in parts, if it did.
    pub(super) fn rope_and_cache(
        &self,
        args: &ops::RopeAndCache<'_, CudaBackend>,
        parts: Option<Parts>,
        stream: &CudaStream,
    ) -> Result<(), BackendError> {
        let shape = args.attention;
        let cache = kv_shape(self.kv_numbers, shape);
        check_buffer(args.qkv, Element::Bf16, args.step.num_tokens * shape.qkv_len(), "rope: qkv");
        let norm = args.qk_norm.map_or((0, 0), |(q, k)| (q.address(), k.address()));
        let params = RopeAndCacheParams {
            qkv: args.qkv.address(),
            parts: parts.map_or(0, |parts| parts.address),
            bias: parts.map_or(0, |parts| parts.bias),
            rotary_table: args.rotary_table.address(),
            q_norm: norm.0,
            k_norm: norm.1,
            keys: args.kv.keys.address(),
            values: args.kv.values.address(),
            positions: args.batch.positions.address(),
            slot_mapping: args.batch.slot_mapping.address(),
            num_tokens: word(args.step.num_tokens),
            num_heads: word(shape.num_heads),
            num_kv_heads: word(shape.num_kv_heads),
            rotary_dim: word(args.rotary_dim),
            eps: args.eps,
            num_parts: parts.map_or(0, |parts| word(parts.num_parts)),
            is_settled: u32::from(!self.attention.rotates_first(args.batch)),
            reserved: 0,
        };
        let rotation = Rotation {
            dim: word(args.rotary_dim),
            interleaved: args.interleaved,
            qk_norm: args.qk_norm.is_some(),
        };
        let kernel = RopeAndCache::new(cache, rotation).map_err(unsupported)?;
        self.rope.get(kernel, || self.loader.load(kernel))?.launch(&params, stream)
    }

    pub(super) fn turn_blocks(
        &self,
        args: &crate::TurnBlocks<'_, CudaBackend>,
        block_bytes: usize,
        stream: &CudaStream,
    ) -> Result<(), BackendError> {
        let cache = kv_shape(self.kv_numbers, args.attention);
        let kernel = TurnBlocks { cache, interleaved: args.interleaved };
        let kernel = self.turn.get(kernel, || self.loader.load(kernel))?;
        block_turns::launch(&kernel, args, block_bytes, stream)
    }

    pub(super) fn cut_prompts(
        &self,
        args: &crate::CutPrompts<'_, CudaBackend>,
        layout: KvLayout,
        stream: &CudaStream,
    ) -> Result<(), BackendError> {
        let cache = kv_shape(self.kv_numbers, args.attention);
        self.cuts.launch(args, cache, layout, &self.loader, stream)
    }

    pub(super) fn attention(
        &self,
        args: &ops::Attention<'_, CudaBackend>,
        before_codes: bool,
        stream: &CudaStream,
    ) -> Result<(), BackendError> {
        self.attention.launch(args, before_codes, &self.loader, stream)
    }

    /// See [`CudaBackend::num_recomputed`].
    pub(super) fn num_recomputed(&self) -> Result<u32, BackendError> {
        self.attention.num_recomputed()
    }

    pub(super) fn gate_and_mul(
        &self,
        args: &ops::GateAndMul<'_, CudaBackend>,
        stream: &CudaStream,
    ) -> Result<(), BackendError> {
        let ops::GateAndMul { gate_up, out, num_rows, len, activation } = *args;
        check_buffer(gate_up, Element::Bf16, 2 * num_rows * len, "gate_and_mul: gate_up");
        check_buffer(out, Element::Bf16, num_rows * len, "gate_and_mul: out");
        let params = GateAndMulParams {
            gate_up: gate_up.address(),
            out: out.address(),
            num_rows: word(num_rows),
            len: word(len),
        };
        match activation {
            Activation::Silu => self.silu_and_mul.launch(&params, stream),
            Activation::GeluTanh => {
                let load = || self.loader.load(GateAndMul { gelu: true });
                self.gelu_and_mul.get((), load)?.launch(&params, stream)
            }
        }
    }

    pub(super) fn gather_sampled(
        &self,
        gather: &Gather<'_>,
        stream: &CudaStream,
    ) -> Result<(), BackendError> {
        let Gather { x, batch, shape, len, out } = *gather;
        let element = x.element();
        check_buffer(x, element, shape.num_tokens * len, "gather_sampled: x");
        check_buffer(out, element, shape.num_sampled * len, "gather_sampled: out");
        let params = GatherSampledParams {
            x: x.address(),
            sample_indices: batch.sample_indices.address(),
            out: out.address(),
            num_sampled: word(shape.num_sampled),
            len: word(len),
        };
        let kernel = match element {
            Element::Bf16 => &self.gather_bf16,
            Element::F32 => &self.gather_f32,
            Element::Word | Element::Fp8 => panic!("gather_sampled: x of {element:?}"),
        };
        kernel.launch(&params, stream)
    }

    pub(super) fn sample(
        &self,
        args: &ops::Sample<'_, CudaBackend>,
        stream: &CudaStream,
    ) -> Result<(), BackendError> {
        let ops::Sample { logits, state, batch, step, late, outputs, max_rows, .. } = *args;
        let num_logits = max_rows * state.vocab_size;
        check_buffer(logits, Element::F32, step.num_sampled * state.vocab_size, "sample: logits");
        let num_words = OutputLayout { max_rows }.num_words();
        check_buffer(outputs, Element::Word, num_words, "sample: outputs");
        assert!(step.num_sampled <= max_rows, "sample: more rows than outputs");
        if state.vocab_size > Sample::MAX_VOCAB as usize {
            let (has, most) = (state.vocab_size, Sample::MAX_VOCAB);
            let reason = format!("a vocabulary of {has} tokens; CUDA devices take {most} at most");
            return Err(BackendError::Unsupported(reason));
        }
        let adjusted = self.adjusted.get((logits.address(), num_logits), || {
            CudaBuffer::zeroed(&self.loader.device, "adjusted logits", num_logits, Element::F32)
        })?;
        let (greatest, num_parts) = self.greatest_logits(args, stream)?;
        let params = SampleParams {
            logits: logits.address(),
            adjusted: adjusted.address(),
            token_counts: state.token_counts.address(),
            sampling: batch.sampling.address(),
            bias_ids: batch.bias_ids.address(),
            bias_values: batch.bias_values.address(),
            late: late.address(),
            outputs: outputs.address(),
            greatest,
            num_sampled: word(step.num_sampled),
            max_rows: word(max_rows),
            vocab_size: word(state.vocab_size),
            num_parts,
        };
        if !args.is_unusual {
            return self.sample.launch(&params, stream);
        }
        let load = || self.loader.load(Sample { unusual: true });
        self.unusual_sample.get((), load)?.launch(&params, stream)
    }

    /// Where the greatest logits of parts of rows are, once the stream comes to it, and in how many
    /// parts rows are; in none where rows are many.
    fn greatest_logits(
        &self,
        args: &ops::Sample<'_, CudaBackend>,
        stream: &CudaStream,
    ) -> Result<(u64, u32), BackendError> {
        let (num_rows, vocab_size) = (word(args.step.num_sampled), word(args.state.vocab_size));
        let num_parts = GreatestLogits::num_parts(self.loader.gpu.num_sms, num_rows, vocab_size);
        if num_parts == 0 {
            return Ok((0, 0));
        }
        let keys = self.greatest.get(args.logits.address(), || {
            // A key is two words, and parts are two for each multiprocessor at most.
            let num_words = 4 * self.loader.gpu.num_sms as usize;
            CudaBuffer::zeroed(&self.loader.device, "greatest logits", num_words, Element::Word)
        })?;
        let params = GreatestLogitsParams {
            logits: args.logits.address(),
            keys: keys.address(),
            num_rows,
            num_parts,
            vocab_size,
            reserved: 0,
        };
        self.greatest_logits.launch(&params, stream)?;
        Ok((keys.address(), num_parts))
    }
}

/// What kernels that use the KV cache of such heads are specialised for.
fn kv_shape(numbers: KvNumbers, shape: AttentionShape) -> KvShape {
    KvShape { numbers, head_dim: word(shape.head_dim), block_size: word(shape.block_size) }
}

/// Checks the operands of a norm whose result is of this type.
fn norm_params(args: &ops::RmsNorm<'_, CudaBackend>, out_element: Element) -> RmsNormParams {
    let ops::RmsNorm { x, weight, out, num_rows, len, eps } = *args;
    check_buffer(x, Element::F32, num_rows * len, "rms_norm: x");
    check_buffer(weight, Element::F32, len, "rms_norm: weight");
    check_buffer(out, out_element, num_rows * len, "rms_norm: out");
    RmsNormParams {
        x: x.address(),
        weight: weight.address(),
        out: out.address(),
        num_rows: word(num_rows),
        len: word(len),
        eps,
        reserved: 0,
    }
}

/// Asserts that a step of this shape fits the batch's buffers.
fn check_batch(batch: &DeviceBatch<CudaBackend>, shape: StepShape) {
    let fits = shape.num_tokens <= batch.token_ids.len()
        && shape.num_rows <= batch.context_lens.len()
        && shape.num_sampled <= batch.sample_indices.len()
        && shape.num_blocks <= batch.blocks.len()
        && shape.num_bias <= batch.bias_ids.len()
        && shape.num_more_groups == batch.more_groups.len()
        && shape.num_more_groups <= MAX_MORE_GROUPS
        && shape.num_prefixes <= max_prefixes(batch)
        && SharedPrefixes::ROW_WORDS * shape.num_prefix_rows <= batch.prefix_rows.len();
    assert!(fits, "a step of {shape:?} exceeds what the batch has room for");
}

/// Most prefixes that rows of a step share.
fn max_prefixes(batch: &DeviceBatch<CudaBackend>) -> usize {
    (batch.prefixes.len() - 2) / SharedPrefixes::WORDS
}

/// Asserts that a buffer holds what an operator takes from it.
fn check_buffer(buffer: &CudaBuffer, element: Element, len: usize, name: &str) {
    let (has, found) = (buffer.len(), buffer.element());
    assert!(found == element && has >= len, "{name}: {has} of {found:?}, not {len} of {element:?}");
}

/// Kernels count in 32 bits; every count is one of buffers that exist.
fn word(value: usize) -> u32 {
    u32::try_from(value).expect("counts of a step fit 32 bits")
}
