//! Operators on rows that know nothing of sequences.

use super::{
    BF16_ROUNDING, BF16_TOLERANCE, F32_TOLERANCE, Pair,
    rig::{Rig, normal, tensor},
    steps::RandomStep,
};
use crate::{
    Backend, BackendError, HostTensor,
    ops::{Activation, Embed, GateAndMul, GatedMatmul, Matmul, RmsNorm},
    quant::fp8::round_row,
};

pub(super) fn check<B: Backend>(pair: &mut Pair<'_, B>) -> Result<(), BackendError> {
    for (num_rows, len) in [(1, 64), (3, 576), (33, 4096), (2, 8200)] {
        let (out, expected) =
            (rms_norm(&pair.device, num_rows, len)?, rms_norm(&pair.reference, num_rows, len)?);
        pair.compare(format!("rms_norm {num_rows}x{len}"), &out, &expected, BF16_ROUNDING);
        let (out, expected) = (
            add_rms_norm(&pair.device, num_rows, len)?,
            add_rms_norm(&pair.reference, num_rows, len)?,
        );
        pair.compare(format!("add_rms_norm {num_rows}x{len}"), &out, &expected, F32_TOLERANCE);
    }
    for (num_rows, len) in [(1, 8), (3, 1536), (33, 14336)] {
        for activation in [Activation::Silu, Activation::GeluTanh] {
            let out = gate(&pair.device, activation, num_rows, len)?;
            let expected = gate(&pair.reference, activation, num_rows, len)?;
            let name = format!("{activation:?} gate {num_rows}x{len}");
            pair.compare(name, &out, &expected, BF16_ROUNDING);
        }
    }
    for case in matmul_cases() {
        let (out, expected) = (matmul(&pair.device, &case)?, matmul(&pair.reference, &case)?);
        let tolerance = if case.f32_out { F32_TOLERANCE } else { BF16_ROUNDING };
        pair.compare(case.name(), &out, &expected, tolerance);
    }
    fused(pair)?;
    let step = RandomStep::mixed(16);
    let (out, expected) = (embed(&pair.device, &step)?, embed(&pair.reference, &step)?);
    pair.compare("embed", &out, &expected, 0.0);
    let (out, expected) = (gather(&pair.device, &step)?, gather(&pair.reference, &step)?);
    pair.compare("gather_sampled states", &out.0, &expected.0, 0.0);
    pair.compare("gather_sampled activations", &out.1, &expected.1, 0.0);
    for num_values in [1, 1001] {
        let (out, expected) =
            (random(&pair.device, num_values)?, random(&pair.reference, num_values)?);
        pair.compare(
            format!("random weights 4x{}", num_values * 8),
            &out,
            &expected,
            BF16_TOLERANCE,
        );
    }
    Ok(())
}

fn rms_norm<B: Backend>(
    rig: &Rig<'_, B>,
    num_rows: usize,
    len: usize,
) -> Result<Vec<f32>, BackendError> {
    let x = rig.state(&normal(1, num_rows * len))?;
    let weight = rig.vector(&normal(2, len))?;
    let out = rig.poisoned(num_rows * len)?;
    let args = RmsNorm { x: &x, weight: &weight, out: &out, num_rows, len, eps: 1e-5 };
    rig.backend.rms_norm(args, &rig.stream)?;
    rig.read_activations(&out, num_rows * len)
}

fn add_rms_norm<B: Backend>(
    rig: &Rig<'_, B>,
    num_rows: usize,
    len: usize,
) -> Result<Vec<f32>, BackendError> {
    let x = rig.state(&normal(4, num_rows * len))?;
    let weight = rig.vector(&normal(5, len))?;
    let out = rig.state(&normal(6, num_rows * len))?;
    let args = RmsNorm { x: &x, weight: &weight, out: &out, num_rows, len, eps: 1e-6 };
    rig.backend.add_rms_norm(args, &rig.stream)?;
    rig.read_state(&out, num_rows * len)
}

fn gate<B: Backend>(
    rig: &Rig<'_, B>,
    activation: Activation,
    num_rows: usize,
    len: usize,
) -> Result<Vec<f32>, BackendError> {
    let gate_up = rig.activations(&normal(3, num_rows * len * 2))?;
    let out = rig.poisoned(num_rows * len)?;
    let args = GateAndMul { gate_up: &gate_up, out: &out, num_rows, len, activation };
    rig.backend.gate_and_mul(args, &rig.stream)?;
    rig.read_activations(&out, num_rows * len)
}

/// One matrix product to check.
struct MatmulCase {
    num_rows: usize,
    /// Rows of the parts of the weight.
    parts: &'static [usize],
    cols: usize,
    bias: bool,
    accumulate: bool,
    f32_out: bool,
}

impl MatmulCase {
    fn name(&self) -> String {
        let Self { num_rows, parts, cols, .. } = self;
        let marks = [(self.bias, "+bias"), (self.accumulate, "+add"), (self.f32_out, "+f32")];
        let marks: String = marks.iter().filter(|(set, _)| *set).map(|(_, mark)| *mark).collect();
        format!("matmul {num_rows}x{}x{cols}{marks}", parts.iter().sum::<usize>())
    }
}

fn matmul_cases() -> Vec<MatmulCase> {
    let mut cases = Vec::new();
    for num_rows in [1, 3, 16, 33, 130] {
        for (bias, accumulate, f32_out) in [
            (false, false, false),
            (true, false, false),
            (false, true, true),
            (true, true, true),
            (false, false, true),
        ] {
            let parts: &[usize] = &[384, 128, 128];
            cases.push(MatmulCase { num_rows, parts, cols: 576, bias, accumulate, f32_out });
        }
    }
    for (parts, cols) in [(&[1000][..], 72), (&[264], 4096)] {
        let (bias, accumulate, f32_out) = (false, false, true);
        cases.push(MatmulCase { num_rows: 7, parts, cols, bias, accumulate, f32_out });
    }
    cases
}

fn matmul<B: Backend>(rig: &Rig<'_, B>, case: &MatmulCase) -> Result<Vec<f32>, BackendError> {
    let MatmulCase { num_rows, parts, cols, bias, accumulate, f32_out } = *case;
    let rows: usize = parts.iter().sum();
    let weights: Vec<_> = (0..)
        .zip(parts)
        .map(|(i, part)| tensor(&[*part, cols], &normal(10 + i, part * cols)))
        .collect();
    let weight = rig.backend.load_matrix(&weights)?;
    let bias = bias.then(|| rig.vector(&normal(20, rows))).transpose()?;
    let x = rig.activations(&normal(21, num_rows * cols))?;
    let before =
        if accumulate { normal(22, num_rows * rows) } else { vec![f32::NAN; num_rows * rows] };
    let out = if f32_out { rig.state(&before)? } else { rig.activations(&before)? };
    let (bias, weight) = (bias.as_ref(), &weight);
    let args = Matmul { x: &x, weight, bias, out: &out, num_rows, accumulate };
    rig.backend.matmul(args, &rig.stream)?;
    let len = num_rows * rows;
    if f32_out { rig.read_state(&out, len) } else { rig.read_activations(&out, len) }
}

/// Products with what comes next.
fn fused<B: Backend>(pair: &mut Pair<'_, B>) -> Result<(), BackendError> {
    for num_rows in [1, 3, 16, 33, 64, 65, 130, 300] {
        for (len, cols) in [(200, 72), (1536, 576), (416, 4096)] {
            // Some kernels add no bias.
            for bias in [true, false] {
                check_gated(pair, (num_rows, len, cols), bias)?;
            }
            let weight = tensor(&[len, cols], &normal(50, len * cols));
            for (bias, mark) in [(true, ""), (false, " without bias")] {
                let name = format!("add_matmul_and_norm {num_rows}x{len}x{cols}{mark}");
                let (sums, normed) = add_and_norm(&pair.device, num_rows, &weight, bias)?;
                let (expected_sums, expected) =
                    add_and_norm(&pair.reference, num_rows, &weight, bias)?;
                pair.compare(format!("{name}: sums"), &sums, &expected_sums, F32_TOLERANCE);
                pair.compare(format!("{name}: norm"), &normed, &expected, BF16_ROUNDING);
            }
        }
    }
    // On an H200 larger tiles each, some of which are cut.
    for len in [1416, 1800, 2912] {
        check_gated(pair, (1000, len, 72), false)?;
    }
    Ok(())
}

fn check_gated<B: Backend>(
    pair: &mut Pair<'_, B>,
    (num_rows, len, cols): (usize, usize, usize),
    bias: bool,
) -> Result<(), BackendError> {
    let mark = if bias { "" } else { " without bias" };
    let half = |seed| tensor(&[len, cols], &normal(seed, len * cols));
    let halves = [half(40), half(41)];
    let case = Gated { num_rows, halves: &halves, bias, rounds_x: false };
    let (out, expected) = (gated(&pair.device, &case)?, gated(&pair.reference, &case)?);
    let name = format!("gated_matmul {num_rows}x{len}x{cols}{mark}");
    pair.compare(name, &out, &expected, BF16_TOLERANCE);
    Ok(())
}

/// A gated product to check.
pub(super) struct Gated<'a> {
    pub(super) num_rows: usize,
    pub(super) halves: &'a [HostTensor; 2],
    pub(super) bias: bool,
    /// Whether activations are rounded to fp8 first.
    pub(super) rounds_x: bool,
}

pub(super) fn gated<B: Backend>(
    rig: &Rig<'_, B>,
    case: &Gated<'_>,
) -> Result<Vec<f32>, BackendError> {
    let Gated { num_rows, halves, bias, rounds_x } = *case;
    let (len, cols) = (halves[0].num_rows(), halves[0].row_len());
    let weight = rig.backend.load_matrix(halves)?;
    let bias = bias.then(|| rig.vector(&normal(42, 2 * len))).transpose()?;
    let mut x = normal(43, num_rows * cols);
    if rounds_x {
        x.chunks_exact_mut(cols).for_each(round_row);
    }
    let x = rig.activations(&x)?;
    let (gate_up, out) = (rig.poisoned(2 * num_rows * len)?, rig.poisoned(num_rows * len)?);
    let args = GatedMatmul {
        x: &x,
        weight: &weight,
        bias: bias.as_ref(),
        gate_up: &gate_up,
        out: &out,
        num_rows,
        len,
        activation: Activation::Silu,
    };
    rig.backend.gated_matmul(args, &rig.stream)?;
    rig.read_activations(&out, num_rows * len)
}

/// Sums and their norm.
pub(super) fn add_and_norm<B: Backend>(
    rig: &Rig<'_, B>,
    num_rows: usize,
    weight: &HostTensor,
    bias: bool,
) -> Result<(Vec<f32>, Vec<f32>), BackendError> {
    let (rows, cols) = (weight.num_rows(), weight.row_len());
    let weight = rig.backend.load_matrix(std::slice::from_ref(weight))?;
    let bias = bias.then(|| rig.vector(&normal(51, rows))).transpose()?;
    let x = rig.activations(&normal(52, num_rows * cols))?;
    let sums = rig.state(&normal(53, num_rows * rows))?;
    let (norm_weight, out) = (rig.vector(&normal(54, rows))?, rig.poisoned(num_rows * rows)?);
    let matmul = Matmul {
        x: &x,
        weight: &weight,
        bias: bias.as_ref(),
        out: &sums,
        num_rows,
        accumulate: true,
    };
    let (x, weight) = (&sums, &norm_weight);
    let norm = RmsNorm { x, weight, out: &out, num_rows, len: rows, eps: 1e-5 };
    rig.backend.add_matmul_and_norm(matmul, norm, &rig.stream)?;
    let len = num_rows * rows;
    Ok((rig.read_state(&sums, len)?, rig.read_activations(&out, len)?))
}

fn embed<B: Backend>(rig: &Rig<'_, B>, step: &RandomStep) -> Result<Vec<f32>, BackendError> {
    let (vocab, len) = (RandomStep::VOCAB_SIZE, 72);
    let table = rig.backend.load_embedding(&tensor(&[vocab, len], &normal(30, vocab * len)))?;
    let (batch, shape) = step.unpack(rig)?;
    let out = rig.state(&vec![f32::NAN; shape.num_tokens * len])?;
    // A power of two, so that nothing is rounded.
    let args = Embed { table: &table, out: &out, scale: 4.0, batch: &batch, step: shape };
    rig.backend.embed(args, &rig.stream)?;
    rig.read_state(&out, shape.num_tokens * len)
}

/// States, and activations: numbers that are exact in both types.
fn gather<B: Backend>(
    rig: &Rig<'_, B>,
    step: &RandomStep,
) -> Result<(Vec<f32>, Vec<f32>), BackendError> {
    let len = 72;
    let (batch, shape) = step.unpack(rig)?;
    let out_len = shape.num_sampled * len;
    let gather =
        |x: &_, out: &_| rig.backend.gather_sampled(x, &batch, shape, len, out, &rig.stream);
    let x = rig.state(&normal(31, shape.num_tokens * len))?;
    let states = rig.state(&vec![f32::NAN; out_len])?;
    gather(&x, &states)?;
    let numbers: Vec<f32> = (0..shape.num_tokens * len).map(|i| (i % 251) as f32).collect();
    let x = rig.activations(&numbers)?;
    let activations = rig.poisoned(out_len)?;
    gather(&x, &activations)?;
    Ok((rig.read_state(&states, out_len)?, rig.read_activations(&activations, out_len)?))
}

/// Random weights as a device makes them, seen by looking up every row.
fn random<B: Backend>(rig: &Rig<'_, B>, num_values: usize) -> Result<Vec<f32>, BackendError> {
    let (rows, cols) = (4, num_values * 8);
    let random = HostTensor {
        data: crate::TensorData::Random { seed: 7, std: 0.02 },
        ..tensor(&[rows, cols], &[])
    };
    let table = rig.backend.load_embedding(&random)?;
    let step = RandomStep::tokens(&[0, 1, 2, 3]);
    let (batch, shape) = step.unpack(rig)?;
    let out = rig.state(&vec![f32::NAN; rows * cols])?;
    let args = Embed { table: &table, out: &out, scale: 1.0, batch: &batch, step: shape };
    rig.backend.embed(args, &rig.stream)?;
    rig.read_state(&out, rows * cols)
}
