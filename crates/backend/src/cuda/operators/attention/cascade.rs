//! Attention of rows that share prefixes: one kernel for the prefixes, one for what is behind them.

use std::thread;

use inflight_kernels::{
    KvShape,
    ops::{
        decode_attention::{DecodeAttention, DecodeAttentionParams, Softmax},
        plan_attention::{PlanAttentionParams, TILE_LEN},
        prefix_attention::{PrefixAttention, PrefixAttentionParams},
    },
};

use super::{Plan, PlanKey};
use crate::{
    AttentionShape, BackendError, KvLayout, PrefixRule,
    cuda::{
        backend::CudaBackend,
        loaded::{KernelLoader, Loaded, unsupported},
        memory::{CudaBuffer, Element},
        operators::word,
        stream::CudaStream,
    },
    ops::Attention,
};

/// Bytes of a layer's keys and values that a step must save. On an H200 one more kernel and merging
/// what it leaves cost as long as reading some 50 MB takes, much of that from the L2 cache: sparing
/// 59 MB saved 1.4 us a layer, 101 MB 11 us.
const MIN_SAVED_BYTES: usize = 64_000_000;

/// Kernels of one shape of heads.
pub(super) struct Cascade {
    prefix: Loaded<PrefixAttention>,
    /// For what rows see behind their prefixes.
    decode: Loaded<DecodeAttention>,
}

/// When steps are to tell of their prefixes; `None`: heads or blocks are of other sizes than the
/// kernels'.
pub(in crate::cuda) fn prefix_rule(
    attention: AttentionShape,
    layout: KvLayout,
) -> Option<PrefixRule> {
    let AttentionShape { num_heads, num_kv_heads, block_size, .. } = attention;
    let tile = TILE_LEN as usize;
    let fits = tile.is_multiple_of(block_size) || block_size.is_multiple_of(tile);
    let packs = num_heads / num_kv_heads <= PrefixAttention::MIN_TILE as usize;
    (fits && packs).then(|| PrefixRule {
        unit: tile.max(block_size),
        // Computing a tile for many rows takes about as long as reading it for two.
        rows_of_reading: 2,
        min_saved: MIN_SAVED_BYTES / (2 * layout.block_bytes() / block_size),
    })
}

impl Cascade {
    pub(super) fn load(loader: &KernelLoader, cache: KvShape) -> Result<Self, BackendError> {
        let decode = DecodeAttention::new(&loader.gpu, cache, Softmax::Online);
        let decode = decode.map_err(unsupported)?;
        let prefix = PrefixAttention::new(&loader.gpu, cache).map_err(unsupported)?;
        thread::scope(|scope| {
            let decode = loader.begin(scope, decode.behind_prefixes());
            Ok(Self { prefix: loader.load(prefix)?, decode: decode.end()? })
        })
    }

    /// Has the plan divide the step's prefixes as well.
    pub(super) fn plan(
        &self,
        plan: &Plan,
        args: &Attention<'_, CudaBackend>,
        params: PlanAttentionParams,
    ) -> PlanAttentionParams {
        PlanAttentionParams {
            prefix_tile: self.prefix.kernel().tile(),
            prefixes: args.batch.prefixes.address(),
            prefix_rows: args.batch.prefix_rows.address(),
            prefix_spans: plan.prefix_spans(),
            row_prefixes: plan.row_prefixes(),
            num_prefix_ctas: self.prefix.kernel().num_ctas(),
            ..params
        }
    }

    /// Launches both kernels.
    pub(super) fn launch(
        &self,
        (key, plan): (&PlanKey, &Plan),
        args: &Attention<'_, CudaBackend>,
        decode: DecodeAttentionParams,
        stream: &CudaStream,
    ) -> Result<(), BackendError> {
        let parts = plan.prefix_parts.as_ref().expect("batches that tell of prefixes have parts");
        let params = PrefixAttentionParams {
            qkv: args.qkv.address(),
            keys: args.kv.keys.address(),
            values: args.kv.values.address(),
            blocks: args.batch.blocks.address(),
            block_starts: args.batch.block_starts.address(),
            row_starts: args.batch.row_starts.address(),
            prefixes: args.batch.prefixes.address(),
            prefix_rows: args.batch.prefix_rows.address(),
            plan: plan.words.address(),
            spans: plan.prefix_spans(),
            parts: parts.address(),
            num_heads: word(key.num_heads),
            num_kv_heads: word(key.num_kv_heads),
            scale: args.scale,
            reserved: 0,
        };
        self.prefix.launch(&params, stream)?;
        let decode = DecodeAttentionParams {
            prefix_spans: plan.prefix_spans(),
            row_prefixes: plan.row_prefixes(),
            prefix_parts: parts.address(),
            prefix_tile: self.prefix.kernel().tile(),
            ..decode
        };
        self.decode.launch(&decode, stream)
    }
}

/// Room for what prefixes come to, for the largest step.
pub(super) fn parts(
    key: &PlanKey,
    cache: KvShape,
    loader: &KernelLoader,
) -> Result<CudaBuffer, BackendError> {
    let kernel = PrefixAttention::new(&loader.gpu, cache).map_err(unsupported)?;
    let heads = (word(key.num_heads), word(key.num_kv_heads));
    let strips = kernel.strips(word(key.max_rows), word(key.max_prefixes), heads);
    let len = kernel.part_floats(strips);
    CudaBuffer::zeroed(&loader.device, "attention prefix parts", len, Element::F32)
}

impl Plan {
    fn prefix_spans(&self) -> u64 {
        self.words.address() + 4 * u64::from(self.layout.prefix_spans_at())
    }

    fn row_prefixes(&self) -> u64 {
        self.words.address() + 4 * u64::from(self.layout.row_prefixes_at())
    }
}
