//! `prefix_attention.cu`, and `decode_attention.cu` behind it: rows that share prefixes get what
//! attention's definition gives.

use inflight_kernels::{
    DevicePtr, Gpu, KvNumbers, KvShape,
    ops::{
        decode_attention::{DecodeAttention, DecodeAttentionParams, Softmax},
        plan_attention::{PlanAttention, PlanAttentionParams, PlanLayout},
        prefix_attention::{PrefixAttention, PrefixAttentionParams},
    },
};

use crate::{
    attention::{Layer, Row, Step},
    decode::{self, NO_WINDOW},
    emulator::{Emulated, Order},
    memory::Memory,
};

/// Tokens, and the rows that begin with them.
struct Prefix {
    num_tokens: u32,
    rows: Vec<u32>,
}

/// The step's prefixes as devices are told of them; rows begin with the blocks of their first.
struct Shared {
    prefixes: Memory<u32>,
    prefix_rows: Memory<u32>,
}

impl Shared {
    fn new(step: &mut Step, all: &[Prefix]) -> Self {
        let num_rows: usize = all.iter().map(|prefix| prefix.rows.len()).sum();
        let (mut prefixes, mut rows) = (vec![all.len() as u32, num_rows as u32], Vec::new());
        for (i, Prefix { num_tokens, rows: sharing }) in all.iter().enumerate() {
            prefixes.extend([*num_tokens, rows.len() as u32 / 2, sharing.len() as u32]);
            rows.extend(sharing.iter().flat_map(|row| [*row, i as u32]));
            let num_blocks = (num_tokens / step.layer.cache.block_size) as usize;
            let starts = step.block_starts.as_slice().to_vec();
            let start = |row: u32| starts[row as usize] as usize;
            for row in &sharing[1..] {
                let from = start(sharing[0]);
                step.blocks.as_mut_slice().copy_within(from..from + num_blocks, start(*row));
            }
        }
        Self { prefixes: Memory::new(&prefixes), prefix_rows: Memory::new(&rows) }
    }
}

/// The kernels of one layer.
struct Kernels {
    plan: Emulated<PlanAttention>,
    prefix: Emulated<PrefixAttention>,
    decode: Emulated<DecodeAttention>,
}

/// A step's plan, and where it has prefixes.
struct Plan {
    words: Memory<u32>,
    prefix_spans: DevicePtr,
    row_prefixes: DevicePtr,
}

impl Kernels {
    fn new(cache: KvShape, gpu: &Gpu) -> Option<Self> {
        let decode = DecodeAttention::new(gpu, cache, Softmax::Online).unwrap();
        Some(Self {
            plan: Emulated::new(PlanAttention, gpu.arch)?,
            prefix: Emulated::new(PrefixAttention::new(gpu, cache).unwrap(), gpu.arch)?,
            decode: Emulated::new(decode.behind_prefixes(), gpu.arch)?,
        })
    }

    /// Runs the step's decode rows.
    fn run(&self, step: &mut Step, all: &[Prefix], order: Order) {
        let mut shared = Shared::new(step, all);
        let mut plan = self.plan(step, &mut shared, order);
        let mut parts = self.attend_prefixes(step, (&mut shared, &mut plan), order);
        self.attend_behind(step, (&mut parts, &mut plan), order);
    }

    fn plan(&self, step: &mut Step, shared: &mut Shared, order: Order) -> Plan {
        let (prefix, decode) = (&self.prefix.kernel, &self.decode.kernel);
        let num_rows = step.rows.len() as u32;
        let layout = PlanLayout {
            max_rows: num_rows,
            num_ctas: decode.num_ctas(),
            max_prefill_tiles: 0,
            max_prefixes: shared.prefixes.as_slice()[0],
        };
        let mut words = Memory::<u32>::unwritten(layout.num_words());
        let at = |word: u32| 4 * u64::from(word);
        let prefix_spans = words.address() + at(layout.prefix_spans_at());
        let row_prefixes = words.address() + at(layout.row_prefixes_at());
        let params = PlanAttentionParams {
            context_lens: step.context_lens.address(),
            row_starts: step.row_starts.address(),
            plan: words.address(),
            num_rows,
            max_rows: num_rows,
            num_ctas: decode.num_ctas(),
            max_prefill_tiles: 0,
            head_groups: step.layer.head_groups(),
            group: step.layer.group(),
            prefill_tile: 64,
            window: step.layer.window,
            one_kernel: 0,
            prefix_tile: prefix.tile(),
            prefixes: shared.prefixes.address(),
            prefix_rows: shared.prefix_rows.address(),
            prefix_spans,
            row_prefixes,
            num_prefix_ctas: prefix.num_ctas(),
            num_kv_heads: step.layer.num_kv_heads,
        };
        // SAFETY: all memory is as large as its doc says, and the step is ours alone.
        unsafe { self.plan.launch(&params, order) };
        Plan { words, prefix_spans, row_prefixes }
    }

    fn attend_prefixes(
        &self,
        step: &mut Step,
        (shared, plan): (&mut Shared, &mut Plan),
        order: Order,
    ) -> Memory<f32> {
        let Layer { num_heads, num_kv_heads, .. } = step.layer;
        let num_prefixes = shared.prefixes.as_slice()[0];
        let kernel = &self.prefix.kernel;
        let heads = (num_heads, num_kv_heads);
        let strips = kernel.strips(step.rows.len() as u32, num_prefixes, heads);
        let mut parts = Memory::<f32>::unwritten(kernel.part_floats(strips));
        let params = PrefixAttentionParams {
            qkv: step.qkv.address(),
            keys: step.keys.bytes.address(),
            values: step.values.bytes.address(),
            blocks: step.blocks.address(),
            block_starts: step.block_starts.address(),
            row_starts: step.row_starts.address(),
            prefixes: shared.prefixes.address(),
            prefix_rows: shared.prefix_rows.address(),
            plan: plan.words.address(),
            spans: plan.prefix_spans,
            parts: parts.address(),
            num_heads,
            num_kv_heads,
            scale: step.layer.scale(),
            reserved: 0,
        };
        // SAFETY: as above.
        unsafe { self.prefix.launch(&params, order) };
        parts.as_slice();
        parts
    }

    fn attend_behind(
        &self,
        step: &mut Step,
        (parts, plan): (&mut Memory<f32>, &mut Plan),
        order: Order,
    ) {
        decode::launch(step, &self.decode, order, |params| DecodeAttentionParams {
            plan: plan.words.address(),
            prefix_spans: plan.prefix_spans,
            row_prefixes: plan.row_prefixes,
            prefix_parts: parts.address(),
            prefix_tile: self.prefix.kernel.tile(),
            ..params
        });
    }
}

/// Rows that share: more than a tile of queries takes, more of the context than a block takes, few
/// of both; and some that share nothing, among them padding.
fn check(numbers: KvNumbers, head_dim: u32, block_size: u32, heads: [u32; 2], num_sms: u32) {
    let cache = KvShape { numbers, head_dim, block_size };
    let [num_heads, num_kv_heads] = heads;
    let layer = Layer { cache, num_heads, num_kv_heads, window: NO_WINDOW };
    let gpu = Gpu { num_sms, ..Gpu::A100 };
    let Some(kernels) = Kernels::new(cache, &gpu) else { return };
    let per_tile = kernels.prefix.kernel.tile() / layer.group();
    let num_rows = per_tile + 12;
    let lens = [64, 704, 128];
    let prefix_of = |row: u32| match row {
        3 | 7 | 9 => Some(1),
        1 | 6 | 10 | 11 => Some(2),
        0 | 8 => None,
        _ => Some(0),
    };
    let rows: Vec<Row> = (0..num_rows)
        .map(|row| match prefix_of(row) {
            Some(prefix) => Row { context: lens[prefix] + 1 + row * 17 % 140, queries: 1 },
            None => Row { context: row * 9, queries: 1 },
        })
        .collect();
    let prefixes = lens.iter().enumerate().map(|(i, &num_tokens)| Prefix {
        num_tokens,
        rows: (0..num_rows).filter(|row| prefix_of(*row) == Some(i)).collect(),
    });
    let prefixes: Vec<_> = prefixes.collect();
    assert!(prefixes[0].rows.len() as u32 > per_tile, "two tiles of queries");
    for order in [Order::InTurn, Order::Shuffled(1)] {
        let mut step = Step::new(layer, &rows, u64::from(head_dim + num_sms));
        kernels.run(&mut step, &prefixes, order);
        // Weights and outputs are rounded to bf16, and so are values of four bits.
        let rounded = if numbers == KvNumbers::Int4 { 1.0 / 64.0 } else { 1.0 / 120.0 };
        step.check(|_| true, rounded);
    }
}

#[test]
fn bf16() {
    check(KvNumbers::Bf16, 64, 16, [32, 2], 3);
    // A block has several strips, of which some are whole.
    check(KvNumbers::Bf16, 64, 64, [14, 2], 2);
}

#[test]
fn scaled_numbers() {
    check(KvNumbers::Fp8, 64, 16, [24, 1], 5);
    check(KvNumbers::Int8, 64, 32, [16, 2], 3);
    check(KvNumbers::Int4, 64, 16, [32, 4], 3);
}
