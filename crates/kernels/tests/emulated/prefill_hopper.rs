//! `prefill_hopper.cu` against attention's definition.

use inflight_kernels::{
    Gpu, KvNumbers, KvShape,
    ops::{
        plan_attention::PlanLayout,
        prefill_hopper::{PrefillHopper, PrefillHopperParams},
    },
};

use crate::{
    attention::{Division, Layer, Row, Step, plan},
    boxes::Boxes,
    emulator::{Emulated, Order},
    kv::{Cache, Place},
    memory::{Dice, Memory},
};

/// As of `prefill_attention.cu`; scores are sums of exact products here.
fn tolerance(numbers: KvNumbers) -> f64 {
    if numbers.has_scales() { 1.0 / 40.0 } else { 1.0 / 100.0 }
}

/// Two blocks take the step's tiles from the queue.
const GPU: Gpu = Gpu { num_sms: 2, ..Gpu::H200 };

/// What a window has left behind in the first block that is seen: numbers, as kernels rely on.
fn fill_first_blocks(step: &mut Step) {
    let mut dice = Dice::new(41);
    let Layer { cache, num_kv_heads, window, .. } = step.layer;
    for (index, row) in step.rows.clone().iter().enumerate() {
        let first = (row.context - row.queries.min(row.context) + 1).saturating_sub(window);
        let at = step.block_starts.as_slice()[index] + first / cache.block_size;
        for offset in 0..first % cache.block_size {
            let block = step.blocks.as_slice()[at as usize];
            for kv_head in 0..num_kv_heads {
                let place = Place { block, kv_head, offset };
                step.keys.write_any(place, &mut dice);
                step.values.write_any(place, &mut dice);
            }
        }
    }
}

/// Boxes of a block of one head, of bf16; of no use to others.
fn boxes_of(cache: &mut Cache) -> inflight_kernels::TensorMap {
    let KvShape { head_dim, block_size, .. } = cache.shape;
    let row_bytes = 2 * head_dim as usize;
    let map = Boxes {
        address: cache.bytes.address(),
        dims: &[head_dim as usize, cache.bytes.as_slice().len() / row_bytes],
        strides: &[row_bytes],
        sides: &[PrefillHopper::PANEL, block_size],
    };
    map.map()
}

fn prefill(step: &mut Step, kernel: PrefillHopper, order: Order) -> Option<()> {
    let Layer { cache, num_heads, num_kv_heads, window } = step.layer;
    let kernel = Emulated::new(kernel, GPU.arch)?;
    let group = step.layer.group();
    let tile = PrefillHopper::tile(group);
    let division = Division::of(step, 1, tile);
    let mut plan = plan(step, division, order)?;
    let mut queue = Memory::new(&[0_u32; 2]);
    let (heads, row_bytes) = ((num_heads + 2 * num_kv_heads) as usize, 2 * cache.head_dim as usize);
    let (num_tokens, num_rows) = (step.num_tokens(), step.rows.len() as u32);
    let queries = Boxes {
        address: step.qkv.address(),
        dims: &[cache.head_dim as usize, heads, num_tokens as usize],
        strides: &[row_bytes, heads * row_bytes],
        sides: &[PrefillHopper::PANEL, group, PrefillHopper::tokens(group)],
    };
    let params = PrefillHopperParams {
        queries: queries.map(),
        keys: boxes_of(&mut step.keys),
        values: boxes_of(&mut step.values),
        key_strips: step.keys.bytes.address(),
        value_strips: step.values.bytes.address(),
        out: step.out.address(),
        blocks: step.blocks.address(),
        block_starts: step.block_starts.address(),
        row_starts: step.row_starts.address(),
        context_lens: step.context_lens.address(),
        plan: plan.address(),
        queue: queue.address(),
        prefill_tiles_at: division.layout.prefill_tiles_at(),
        num_heads,
        num_kv_heads,
        window,
        scale: step.layer.scale(),
        max_tiles: PlanLayout::prefill_tiles(num_tokens, num_rows, group, tile),
    };
    // SAFETY: all memory is as large as its doc says, and the step is ours alone.
    unsafe { kernel.launch(&params, order) };
    assert_eq!(queue.as_slice(), [0, 0], "the next launch begins anew");
    Some(())
}

/// Chunks without and with context before them, several tiles of keys and of queries, blocks that
/// are filled in part, and a row of another kernel.
fn check(cache: KvShape, heads: [u32; 2], window: u32, order: Order) {
    let [num_heads, num_kv_heads] = heads;
    let layer = Layer { cache, num_heads, num_kv_heads, window };
    let rows = [(2, 2), (170, 33), (40, 1), (130, 2), (0, 0), (64, 64), (290, 5)];
    let rows = rows.map(|(context, queries)| Row { context, queries });
    let kernel = PrefillHopper::new(&GPU, cache, layer.group()).unwrap();
    let mut step = Step::new(layer, &rows, u64::from(cache.head_dim));
    fill_first_blocks(&mut step);
    let Some(()) = prefill(&mut step, kernel, order) else { return };
    step.check(|row| row.queries > 1, tolerance(cache.numbers));
}

#[test]
fn bf16() {
    let cache = KvShape { numbers: KvNumbers::Bf16, head_dim: 64, block_size: 16 };
    check(cache, [4, 2], u32::MAX, Order::InTurn);
    check(cache, [7, 1], 50, Order::Shuffled(1));
}

#[test]
fn heads_that_panels_do_not_divide() {
    let cache = KvShape { numbers: KvNumbers::Bf16, head_dim: 96, block_size: 32 };
    check(cache, [3, 1], u32::MAX, Order::Shuffled(2));
}

#[test]
fn long_heads() {
    let cache = KvShape { numbers: KvNumbers::Bf16, head_dim: 256, block_size: 64 };
    // One stage of queries: they come as soon as the tile before has been written.
    for seed in 3..9 {
        check(cache, [2, 1], u32::MAX, Order::Shuffled(seed));
    }
}

#[test]
fn numbers_of_eight_bits_are_widened() {
    let fp8 = KvShape { numbers: KvNumbers::Fp8, head_dim: 128, block_size: 16 };
    check(fp8, [3, 1], u32::MAX, Order::Shuffled(4));
    let int8 = KvShape { numbers: KvNumbers::Int8, head_dim: 64, block_size: 64 };
    check(int8, [2, 1], 50, Order::Shuffled(5));
}
