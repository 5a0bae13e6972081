//! `decode_attention.cu` against attention's definition.

use inflight_kernels::{
    Gpu, KvNumbers, KvShape,
    ops::{
        decode_attention::{DecodeAttention, DecodeAttentionParams, Softmax},
        fp8_split::SplitRows,
    },
};

use crate::{
    attention::{Division, Layer, NULL, Row, Step, plan},
    emulator::{Emulated, Order},
    memory::Memory,
};

/// Few multiprocessors, so that few rows keep all blocks busy.
pub(crate) const GPU: Gpu = Gpu { num_sms: 3, ..Gpu::A100 };
pub(crate) const NO_WINDOW: u32 = u32::MAX;

/// How far weights and values may be off, as a share of themselves: weights and outputs are rounded
/// to bf16, by up to 2^-8 each; factors, least numbers and values of four bits are as well in a
/// unified softmax.
pub(crate) fn tolerance(numbers: KvNumbers, softmax: Softmax) -> f64 {
    match (numbers, softmax) {
        (KvNumbers::Int4, Softmax::Unified) => 1.0 / 32.0,
        _ => 1.0 / 120.0,
    }
}

/// Runs the step's decode rows; how many rows and head groups were computed again.
fn decode(step: &mut Step, softmax: Softmax, gpu: &Gpu, order: Order) -> Option<u32> {
    let kernel = DecodeAttention::new(gpu, step.layer.cache, softmax).unwrap();
    run(step, &Emulated::new(kernel, gpu.arch)?, SplitRows::default(), order)
}

/// As [`decode`], with codes of the output besides.
pub(crate) fn run(
    step: &mut Step,
    kernel: &Emulated<DecodeAttention>,
    split: SplitRows,
    order: Order,
) -> Option<u32> {
    let division = Division::of(step, kernel.kernel.num_ctas(), 64);
    let mut plan = plan(step, division, order)?;
    let plan_at = plan.address();
    Some(launch(step, kernel, order, |params| DecodeAttentionParams {
        plan: plan_at,
        split,
        ..params
    }))
}

/// Launches `kernel` with what `complete` makes of the step's parameters, which lack a plan; how
/// many rows and head groups were computed again.
pub(crate) fn launch(
    step: &mut Step,
    kernel: &Emulated<DecodeAttention>,
    order: Order,
    complete: impl FnOnce(DecodeAttentionParams) -> DecodeAttentionParams,
) -> u32 {
    let Layer { num_heads, num_kv_heads, window, .. } = step.layer;
    let num_rows = step.rows.len() as u32;
    let mut partials = Memory::<f32>::unwritten(kernel.kernel.partial_floats());
    let num_arrivals = DecodeAttention::arrival_words(num_rows, num_heads, num_kv_heads);
    let mut arrivals = Memory::new(&vec![0_u32; num_arrivals]);
    let mut recomputed = Memory::new(&[0_u32]);
    let params = complete(DecodeAttentionParams {
        qkv: step.qkv.address(),
        keys: step.keys.bytes.address(),
        values: step.values.bytes.address(),
        out: step.out.address(),
        blocks: step.blocks.address(),
        block_starts: step.block_starts.address(),
        row_starts: step.row_starts.address(),
        context_lens: step.context_lens.address(),
        plan: NULL,
        partials: partials.address(),
        arrivals: arrivals.address(),
        unified: NULL,
        recomputed: recomputed.address(),
        split: SplitRows::default(),
        prefix_spans: NULL,
        row_prefixes: NULL,
        prefix_parts: NULL,
        prefix_tile: 0,
        reserved: 0,
        num_rows,
        max_rows: num_rows,
        num_heads,
        num_kv_heads,
        window,
        scale: step.layer.scale(),
    });
    // SAFETY: all memory is as large as its doc says, and the step is ours alone.
    unsafe { kernel.launch(&params, order) };
    partials.as_slice();
    assert!(arrivals.as_slice().iter().all(|count| *count == 0), "left for the next launch");
    recomputed.as_slice()[0]
}

/// All heads of a cache of these numbers, both kinds of softmax, in turn and in other orders.
fn check(numbers: KvNumbers, head_dim: u32, block_size: u32, heads: [u32; 2], window: u32) {
    check_on(&GPU, numbers, [head_dim, block_size], heads, window);
}

fn check_on(
    gpu: &Gpu,
    numbers: KvNumbers,
    [head_dim, block_size]: [u32; 2],
    heads: [u32; 2],
    window: u32,
) {
    let cache = KvShape { numbers, head_dim, block_size };
    let [num_heads, num_kv_heads] = heads;
    let layer = Layer { cache, num_heads, num_kv_heads, window };
    // Alone in a block, cut into pieces, of less than a tile, padding, and several tokens.
    let rows = [1, 700, 0, 63, 65, 130].map(|context| Row { context, queries: 1 });
    let rows = [&rows[..], &[Row { context: 9, queries: 3 }]].concat();
    for softmax in [Softmax::Online, Softmax::Unified] {
        for order in [Order::InTurn, Order::Shuffled(1)] {
            let mut step = Step::new(layer, &rows, u64::from(head_dim) + u64::from(window));
            let Some(recomputed) = decode(&mut step, softmax, gpu, order) else { return };
            step.check(|row| row.queries == 1, tolerance(numbers, softmax));
            assert_eq!(recomputed, 0);
            let prefill = &step.out.as_slice()[6 * (num_heads * head_dim) as usize..];
            assert!(prefill.iter().all(|x| x.to_bits() == u16::MAX), "another kernel's rows");
        }
    }
}

/// Rows whose scores are too large, or too small, for a fixed number are computed again, and no
/// others. Blocks have one piece, or several.
#[test]
fn scores_out_of_range_are_computed_again() {
    let wide = Gpu { num_sms: 32, ..GPU };
    let check = |gpu: &Gpu, contexts: &[u32], loud: &[(usize, f32)], order| {
        let cache = KvShape { numbers: KvNumbers::Bf16, head_dim: 64, block_size: 16 };
        let layer = Layer { cache, num_heads: 8, num_kv_heads: 1, window: NO_WINDOW };
        let row = |context: &u32| Row { context: *context, queries: 1 };
        let mut step = Step::new(layer, &contexts.iter().map(row).collect::<Vec<_>>(), 7);
        loud.iter().for_each(|(row, factor)| step.amplify(*row, *factor));
        let Some(recomputed) = decode(&mut step, Softmax::Unified, gpu, order) else { return };
        step.check(|_| true, tolerance(KvNumbers::Bf16, Softmax::Unified));
        let is_unsafe = |row: &usize| {
            (0..8).any(|head| {
                let exponent = step.expected(*row, 0, head).log2_denominator;
                let is_near = |limit: f64| (exponent - limit).abs() < 0.5;
                assert!(!is_near(-60.0) && !is_near(100.0), "{exponent}: choose another seed");
                !(-60.0..100.0).contains(&exponent)
            })
        };
        assert_eq!((0..contexts.len()).filter(is_unsafe).count(), loud.len());
        assert_eq!(recomputed as usize, loud.len());
    };
    for order in [Order::InTurn, Order::Shuffled(2)] {
        // Whole and in pieces; then one score alone, which is far below for some heads.
        for gpu in [&wide, &GPU] {
            check(gpu, &[66, 600, 100, 600, 128], &[(2, 40.0), (3, 40.0)], order);
        }
        check(&wide, &[1], &[(0, 200.0)], order);
        check(&wide, &[1], &[], order);
        // What comes next may hardly be anything.
        check(&GPU, &[1, 1, 600, 1, 64, 1], &[(0, 200.0), (2, 40.0), (3, 200.0)], order);
    }
}

#[test]
fn bf16() {
    check(KvNumbers::Bf16, 64, 16, [8, 2], NO_WINDOW);
    check(KvNumbers::Bf16, 64, 16, [7, 1], 100);
}

#[test]
fn fp8() {
    check(KvNumbers::Fp8, 128, 16, [8, 2], NO_WINDOW);
    check(KvNumbers::Fp8, 128, 16, [16, 1], 100);
    // By three warps.
    let small = Gpu { num_sms: 3, ..Gpu::RTX_3090 };
    check_on(&small, KvNumbers::Fp8, [128, 16], [8, 2], NO_WINDOW);
}

#[test]
fn int8() {
    check(KvNumbers::Int8, 64, 64, [8, 2], NO_WINDOW);
    check(KvNumbers::Int8, 64, 64, [2, 2], 100);
}

#[test]
fn int4() {
    check(KvNumbers::Int4, 64, 16, [4, 1], NO_WINDOW);
    check(KvNumbers::Int4, 64, 16, [8, 1], 100);
}
