//! `prefill_attention.cu` against attention's definition.

use inflight_kernels::{
    Gpu, KvNumbers, KvShape,
    ops::prefill_attention::{PrefillAttention, PrefillAttentionParams},
};

use crate::{
    attention::{Division, Layer, Row, Step, plan},
    emulator::{Emulated, Order},
};

/// Weights, outputs and, if they are widened, keys and values are rounded to bf16, by up to 2^-8
/// each; so are scores therefore, by what their terms add up to.
fn tolerance(numbers: KvNumbers) -> f64 {
    if numbers.has_scales() { 1.0 / 40.0 } else { 1.0 / 120.0 }
}

/// Runs the step's rows of several tokens, or all of them.
fn prefill(
    step: &mut Step,
    kernel: PrefillAttention,
    one_kernel: bool,
    order: Order,
) -> Option<()> {
    let kernel = Emulated::new(kernel, Gpu::A100.arch)?;
    let division = Division { one_kernel, ..Division::of(step, 1, kernel.kernel.tile()) };
    let mut plan = plan(step, division, order)?;
    let num_rows = step.rows.len() as u32;
    let params = PrefillAttentionParams {
        qkv: step.qkv.address(),
        keys: step.keys.bytes.address(),
        values: step.values.bytes.address(),
        out: step.out.address(),
        blocks: step.blocks.address(),
        block_starts: step.block_starts.address(),
        row_starts: step.row_starts.address(),
        context_lens: step.context_lens.address(),
        plan: plan.address(),
        num_tokens: step.num_tokens(),
        num_rows,
        max_rows: division.layout.max_rows,
        num_ctas: division.layout.num_ctas,
        num_heads: step.layer.num_heads,
        num_kv_heads: step.layer.num_kv_heads,
        window: step.layer.window,
        scale: step.layer.scale(),
    };
    // SAFETY: all memory is as large as its doc says, and the step is ours alone.
    unsafe { kernel.launch(&params, order) };
    Some(())
}

/// Chunks without and with context before them, ends of tiles, and a row of the other kernel; large
/// and small tiles.
fn check(numbers: KvNumbers, head_dim: u32, block_size: u32, heads: [u32; 2], window: u32) {
    let cache = KvShape { numbers, head_dim, block_size };
    let [num_heads, num_kv_heads] = heads;
    let layer = Layer { cache, num_heads, num_kv_heads, window };
    let rows = [(2, 2), (70, 33), (40, 1), (130, 2), (0, 0), (64, 64), (191, 5)];
    let rows = rows.map(|(context, queries)| Row { context, queries });
    let large = PrefillAttention::new(&Gpu::A100, cache).unwrap();
    for (kernel, one_kernel, order) in
        [(large, false, Order::InTurn), (large.with_small_tiles(), true, Order::Shuffled(1))]
    {
        let mut step = Step::new(layer, &rows, u64::from(head_dim) + u64::from(window));
        let Some(()) = prefill(&mut step, kernel, one_kernel, order) else { return };
        let is_of = |row: &Row| row.queries > 1 || one_kernel;
        step.check(is_of, tolerance(numbers));
        let other = &step.out.as_slice()[35 * (num_heads * head_dim) as usize..];
        let is_left = other[..(num_heads * head_dim) as usize].iter().all(|x| x.is_nan());
        assert_eq!(is_left, !one_kernel, "the row of one token");
    }
}

#[test]
fn bf16() {
    check(KvNumbers::Bf16, 64, 16, [4, 2], u32::MAX);
    check(KvNumbers::Bf16, 64, 16, [7, 1], 50);
}

#[test]
fn long_heads() {
    check(KvNumbers::Bf16, 256, 64, [2, 1], u32::MAX);
}

#[test]
fn fp8() {
    check(KvNumbers::Fp8, 128, 16, [3, 1], u32::MAX);
}

#[test]
fn int8() {
    check(KvNumbers::Int8, 64, 64, [3, 1], 50);
}

#[test]
fn int4() {
    check(KvNumbers::Int4, 64, 16, [3, 1], u32::MAX);
}
