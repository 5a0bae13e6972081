//! Products with weights in fp8. A device may multiply activations as they are or rounded to fp8.

use super::{
    BF16_ROUNDING, BF16_TOLERANCE, Pair,
    dense::{Gated, add_and_norm, gated},
    relative_error,
    rig::{Rig, normal, tensor},
};
use crate::{
    Backend, BackendError, Dtype, HostTensor, TensorData,
    ops::{Activation, GatedMatmul, Matmul, RmsNorm},
    quant::fp8::{BLOCK, round_row},
};

/// How the weights are scaled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Scales {
    Rows,
    Blocks,
    /// Rounded when loaded, not stored.
    Rounded,
}

#[derive(Clone, Copy)]
struct Case {
    scales: Scales,
    num_rows: usize,
    /// Rows of the parts of the weight.
    parts: &'static [usize],
    cols: usize,
    bias: bool,
    accumulate: bool,
    /// The output is f32 although nothing is added to it, as logits are.
    logits: bool,
}

impl Case {
    fn name(&self) -> String {
        let Self { scales, num_rows, parts, cols, .. } = self;
        let marks = [(self.bias, "+bias"), (self.accumulate, "+add"), (self.logits, " of logits")];
        let marks: String = marks.iter().filter(|(set, _)| *set).map(|(_, mark)| *mark).collect();
        let rows: usize = parts.iter().sum();
        format!("matmul {num_rows}x{rows}x{cols}{marks}, weights in fp8: {scales:?}")
    }

    /// Whether the output is f32, as where it is added to.
    fn f32_out(&self) -> bool {
        self.accumulate || self.logits
    }
}

pub(super) fn check<B: Backend>(pair: &mut Pair<'_, B>) -> Result<(), BackendError> {
    for case in cases() {
        let out = matmul(&pair.device, &case, false)?;
        let exact = matmul(&pair.reference, &case, false)?;
        let rounded = matmul(&pair.reference, &case, true)?;
        let expected = nearer(&out, &exact, &rounded);
        pair.compare(case.name(), &out, expected, BF16_ROUNDING);
    }
    check_with_what_comes_next(pair)?;
    check_gated_with_many_rows(pair)?;
    for num_rows in [1, 3, 32, 64] {
        let name = format!("product of {num_rows} rows, weights in fp8:");
        let Twice { at_once, later } = after_norm(&pair.device, num_rows)?;
        pair.compare(format!("{name} behind a norm or later"), &at_once, &later, 0.0);
        let Twice { at_once, later } = after_silu(&pair.device, num_rows)?;
        pair.compare(format!("{name} behind SiLU or later"), &at_once, &later, 0.0);
    }
    Ok(())
}

/// Sums of the same product: of what was just made, and when something else was enqueued since. An
/// operator may leave its output in another form for a product right behind it.
pub(super) struct Twice {
    pub(super) at_once: Vec<f32>,
    pub(super) later: Vec<f32>,
}

impl Twice {
    /// `make` enqueues what makes `x`, `[num_rows, cols]`.
    pub(super) fn of<B: Backend>(
        rig: &Rig<'_, B>,
        x: &B::Buffer,
        (num_rows, cols): (usize, usize),
        make: impl FnOnce() -> Result<(), BackendError>,
    ) -> Result<Self, BackendError> {
        const ROWS: usize = 136;
        let weight = rig.backend.load_matrix(&[weight(Scales::Rounded, 90, ROWS, cols)?])?;
        let state = || rig.state(&vec![0.0; num_rows * ROWS]);
        let (unused, first, second) = (state()?, state()?, state()?);
        let multiply = |out: &B::Buffer| {
            let (bias, weight) = (None, &weight);
            let args = Matmul { x, weight, bias, out, num_rows, accumulate: true };
            rig.backend.matmul(args, &rig.stream)
        };
        let (norm_weight, normed) = (rig.vector(&normal(91, ROWS))?, rig.poisoned(ROWS)?);
        // Choosing how enqueues much, too: not between the two.
        multiply(&unused)?;
        make()?;
        multiply(&first)?;
        let (x, weight, out) = (&first, &norm_weight, &normed);
        let norm = RmsNorm { x, weight, out, num_rows: 1, len: ROWS, eps: 1e-5 };
        rig.backend.rms_norm(norm, &rig.stream)?;
        multiply(&second)?;
        let read = |out| rig.read_state(out, num_rows * ROWS);
        Ok(Self { at_once: read(&first)?, later: read(&second)? })
    }
}

fn after_norm<B: Backend>(rig: &Rig<'_, B>, num_rows: usize) -> Result<Twice, BackendError> {
    let (len, cols) = (640, 256);
    let weight = rig.backend.load_matrix(&[weight(Scales::Rounded, 92, len, cols)?])?;
    let x = rig.activations(&normal(93, num_rows * cols))?;
    let sums = rig.state(&normal(94, num_rows * len))?;
    let (norm_weight, out) = (rig.vector(&normal(95, len))?, rig.poisoned(num_rows * len)?);
    Twice::of(rig, &out, (num_rows, len), || {
        let (bias, weight, out_of_matmul) = (None, &weight, &sums);
        let matmul = Matmul { x: &x, weight, bias, out: out_of_matmul, num_rows, accumulate: true };
        let (x, weight) = (&sums, &norm_weight);
        let norm = RmsNorm { x, weight, out: &out, num_rows, len, eps: 1e-5 };
        rig.backend.add_matmul_and_norm(matmul, norm, &rig.stream)
    })
}

/// As wide as models of 8B, where a GPU has a multiprocessor for every 128 columns.
fn after_silu<B: Backend>(rig: &Rig<'_, B>, num_rows: usize) -> Result<Twice, BackendError> {
    let (len, cols) = (14_336, 128);
    let half = |key| weight(Scales::Rounded, key, len, cols);
    let weight = rig.backend.load_matrix(&[half(96)?, half(97)?])?;
    let x = rig.activations(&normal(98, num_rows * cols))?;
    let (gate_up, out) = (rig.poisoned(2 * num_rows * len)?, rig.poisoned(num_rows * len)?);
    Twice::of(rig, &out, (num_rows, len), || {
        let (x, weight, bias, gate_up, out) = (&x, &weight, None, &gate_up, &out);
        let activation = Activation::Silu;
        let args = GatedMatmul { x, weight, bias, gate_up, out, num_rows, len, activation };
        rig.backend.gated_matmul(args, &rig.stream)
    })
}

/// So few rows that no device rounds activations.
fn check_with_what_comes_next<B: Backend>(pair: &mut Pair<'_, B>) -> Result<(), BackendError> {
    for scales in [Scales::Rows, Scales::Blocks, Scales::Rounded] {
        for (num_rows, len, cols) in [(1, 264, 200), (8, 640, 1024), (17, 328, 576), (32, 136, 72)]
        {
            let half = |key| weight(scales, key, len, cols);
            let (halves, weight) = ([half(60)?, half(70)?], half(80)?);
            let name = format!("{num_rows}x{len}x{cols}, weights in fp8: {scales:?}");
            let case = Gated { num_rows, halves: &halves, bias: true, rounds_x: false };
            let (out, expected) = (gated(&pair.device, &case)?, gated(&pair.reference, &case)?);
            pair.compare(format!("gated_matmul {name}"), &out, &expected, BF16_TOLERANCE);
            let (sums, normed) = add_and_norm(&pair.device, num_rows, &weight, true)?;
            let (expected_sums, expected) = add_and_norm(&pair.reference, num_rows, &weight, true)?;
            let name = format!("add_matmul_and_norm {name}");
            pair.compare(format!("{name}: sums"), &sums, &expected_sums, BF16_ROUNDING);
            pair.compare(format!("{name}: norm"), &normed, &expected, BF16_TOLERANCE);
        }
    }
    Ok(())
}

/// More rows: on an H200 tiles of all sizes, some of which are cut.
fn check_gated_with_many_rows<B: Backend>(pair: &mut Pair<'_, B>) -> Result<(), BackendError> {
    for (num_rows, len, cols) in
        [(65, 264, 200), (130, 640, 1024), (1000, 1416, 72), (1000, 1800, 136), (1000, 2912, 72)]
    {
        let half = |key| weight(Scales::Rows, key, len, cols);
        let halves = [half(60)?, half(70)?];
        let case = |rounds_x| Gated { num_rows, halves: &halves, bias: false, rounds_x };
        let out = gated(&pair.device, &case(false))?;
        let [exact, rounded] =
            [gated(&pair.reference, &case(false))?, gated(&pair.reference, &case(true))?];
        let name = format!("gated_matmul {num_rows}x{len}x{cols}, weights in fp8, without bias");
        pair.compare(name, &out, nearer(&out, &exact, &rounded), BF16_TOLERANCE);
    }
    Ok(())
}

/// What a device computed: with activations as they are, or rounded.
fn nearer<'a>(out: &[f32], exact: &'a [f32], rounded: &'a [f32]) -> &'a [f32] {
    let is_rounded = relative_error(out, rounded) < relative_error(out, exact);
    if is_rounded { rounded } else { exact }
}

fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for scales in [Scales::Rows, Scales::Blocks] {
        for num_rows in [1, 3, 8, 16, 33, 130] {
            for (bias, accumulate) in [(false, false), (true, false), (false, true), (true, true)] {
                let (parts, cols, logits): (&[usize], _, _) = (&[384, 128, 128], 576, false);
                cases.push(Case { scales, num_rows, parts, cols, bias, accumulate, logits });
            }
        }
    }
    for scales in [Scales::Rows, Scales::Blocks, Scales::Rounded] {
        for (num_rows, parts, cols) in
            [(2, &[1000, 72][..], 72), (5, &[264], 4096), (40, &[264], 1000), (64, &[136], 200)]
        {
            let (bias, accumulate, logits) = (false, false, false);
            cases.push(Case { scales, num_rows, parts, cols, bias, accumulate, logits });
        }
        // More tiles than a GPU has multiprocessors, and fewer columns than fit its memory.
        for (num_rows, parts, cols) in
            [(1, &[70_008][..], 72), (8, &[70_008], 520), (40, &[1000], 1296)]
        {
            let (bias, accumulate, logits) = (false, false, true);
            cases.push(Case { scales, num_rows, parts, cols, bias, accumulate, logits });
        }
    }
    cases
}

fn matmul<B: Backend>(
    rig: &Rig<'_, B>,
    case: &Case,
    round_x: bool,
) -> Result<Vec<f32>, BackendError> {
    let Case { num_rows, parts, cols, bias, accumulate, .. } = *case;
    let rows: usize = parts.iter().sum();
    let weights = (40..).zip(parts).map(|(key, part)| weight(case.scales, key, *part, cols));
    let weight = rig.backend.load_matrix(&weights.collect::<Result<Vec<_>, _>>()?)?;
    let bias = bias.then(|| rig.vector(&normal(20, rows))).transpose()?;
    let mut x = normal(21, num_rows * cols);
    if round_x {
        x.chunks_exact_mut(cols).for_each(round_row);
    }
    let x = rig.activations(&x)?;
    let len = num_rows * rows;
    let before = if accumulate { normal(22, len) } else { vec![f32::NAN; len] };
    let out = if case.f32_out() { rig.state(&before)? } else { rig.activations(&before)? };
    let (bias, weight) = (bias.as_ref(), &weight);
    let args = Matmul { x: &x, weight, bias, out: &out, num_rows, accumulate };
    rig.backend.matmul(args, &rig.stream)?;
    if case.f32_out() { rig.read_state(&out, len) } else { rig.read_activations(&out, len) }
}

/// A matrix in fp8. Stored ones have every code but NaN, and scales of all sizes.
fn weight(scales: Scales, key: u64, rows: usize, cols: usize) -> Result<HostTensor, BackendError> {
    if scales == Scales::Rounded {
        return Ok(tensor(&[rows, cols], &normal(key, rows * cols)).rounded_to_fp8());
    }
    let codes: Vec<u8> = (0..rows * cols).map(|i| code(key as usize + i)).collect();
    let data = TensorData::Owned(codes.into());
    let (dtype, shape) = (Dtype::F8E4M3, vec![rows, cols]);
    let codes = HostTensor { name: "codes".into(), dtype, shape, data };
    let shape = match scales {
        Scales::Blocks => [rows.div_ceil(BLOCK), cols.div_ceil(BLOCK)],
        Scales::Rows | Scales::Rounded => [rows, 1],
    };
    let scales = normal(key + 10, shape[0] * shape[1]);
    let scales: Vec<f32> = scales.iter().map(|scale| scale * scale * 0.01 + 0.001).collect();
    codes.with_scales(&tensor(&shape, &scales))
}

/// Every code but the two that are no numbers, in an order without a pattern that fits tiles.
fn code(i: usize) -> u8 {
    let code = (i.wrapping_mul(0x9e37_79b1) >> 7) as u8;
    if code & 0x7f == 0x7f { code ^ 1 } else { code }
}
