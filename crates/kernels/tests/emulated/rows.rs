//! Kernels that work on one row at a time: `rms_norm.cu`, `add_norm.cu`, `gate_and_mul.cu`.

use half::bf16;
use inflight_kernels::{
    Arch, Element, Kernel,
    ops::{
        add_norm::{AddNorm, AddNormParams},
        fp8_split::SplitRows,
        gate_and_mul::{GateAndMul, GateAndMulParams},
        rms_norm::{RmsNorm, RmsNormParams},
    },
};

use crate::{
    attention::NULL,
    emulator::{Emulated, Order},
    memory::{Dice, Memory},
};

const EPS: f32 = 1e-5;
/// Sums of f32, in any order.
const OF_F32: f64 = 1e-5;
/// Rounded to bf16 besides.
const OF_BF16: f64 = 1.01 / 256.0;

/// Launches a kernel with blocks and threads in another order; `None` without a C++ compiler.
fn launch<K: Kernel>(kernel: K, params: &K::Params) -> Option<()> {
    let kernel = Emulated::new(kernel, Arch::SM_90A)?;
    // SAFETY: the tests below give memory of the sizes that parameters say.
    unsafe { kernel.launch(params, Order::Shuffled(1)) };
    Some(())
}

fn check_near(found: f64, expected: f64, tolerance: f64, what: &str) {
    let off = (found - expected).abs();
    assert!(off <= tolerance * expected.abs().max(1e-3), "{what}: {found}, not {expected}");
}

/// `x / sqrt(mean(x^2) + eps)`, as Zhang and Sennrich define it ("Root Mean Square Layer
/// Normalization", 2019, equation 4).
fn normalised(x: &[f64]) -> Vec<f64> {
    let mean = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
    x.iter().map(|x| x / (mean + f64::from(EPS)).sqrt()).collect()
}

fn wide<T: Copy + Into<f64>>(numbers: &[T]) -> Vec<f64> {
    numbers.iter().map(|x| (*x).into()).collect()
}

#[test]
fn rms_norm() {
    let mut dice = Dice::new(2);
    // Of less than a warp's vectors, not of whole vectors, and more than a block's threads hold.
    for len in [8_usize, 77, 320, 8448] {
        let mut x = Memory::new(&dice.f32s(3 * len, 2.0));
        let mut weight = Memory::new(&dice.f32s(len, 1.0));
        let before = dice.f32s(3 * len, 1.0);
        let mut sum = Memory::new(&before);
        let mut out = Memory::<bf16>::unwritten(3 * len);
        let mut params = |out| RmsNormParams {
            x: x.address(),
            weight: weight.address(),
            out,
            num_rows: 3,
            len: len as u32,
            eps: EPS,
            reserved: 0,
        };
        let (to_out, to_sum) = (params(out.address()), params(sum.address()));
        let Some(()) = launch(RmsNorm::of_state(), &to_out) else { return };
        launch(RmsNorm::of_branch(), &to_sum);
        for (row, x) in x.as_slice().chunks(len).enumerate() {
            for (i, x) in normalised(&wide(x)).into_iter().enumerate() {
                let (at, expected) = (row * len + i, x * f64::from(weight.as_slice()[i]));
                check_near(out.as_slice()[at].into(), expected, OF_BF16, "out");
                let sum = f64::from(sum.as_slice()[at]) - f64::from(before[at]);
                assert!((sum - expected).abs() < 1e-5, "{len}: {sum}, not {expected}");
            }
        }
    }
}

#[test]
fn rows_of_bf16_are_normalised() {
    let mut dice = Dice::new(3);
    let mut x = Memory::new(&dice.bf16s(2 * 104, 3.0));
    let mut weight = Memory::new(&dice.f32s(104, 1.0));
    let mut out = Memory::<f32>::unwritten(2 * 104);
    let kernel = RmsNorm { x: Element::Bf16, out: Element::F32, add: false };
    let params = RmsNormParams {
        x: x.address(),
        weight: weight.address(),
        out: out.address(),
        num_rows: 2,
        len: 104,
        eps: EPS,
        reserved: 0,
    };
    let Some(()) = launch(kernel, &params) else { return };
    for (x, out) in x.as_slice().chunks(104).zip(out.as_slice().chunks(104)) {
        for (i, x) in normalised(&wide(x)).into_iter().enumerate() {
            let expected = x * f64::from(weight.as_slice()[i]);
            check_near(out[i].into(), expected, OF_F32, "out");
        }
    }
}

/// A row is added up, normalised if there is a weight, and left alone if there is none.
fn check_add_norm(len: usize, num_parts: usize, has_bias: bool, has_weight: bool) -> Option<()> {
    let mut dice = Dice::new(len as u64);
    let before = dice.f32s(2 * len, 1.0);
    let mut x = Memory::new(&before);
    let mut parts = Memory::new(&dice.f32s(num_parts * 2 * len, 1.0));
    let mut bias = Memory::new(&dice.f32s(len, 1.0));
    let mut weight = Memory::new(&dice.f32s(len, 1.0));
    let mut out = Memory::<bf16>::unwritten(2 * len);
    let params = AddNormParams {
        x: x.address(),
        parts: parts.address(),
        bias: if has_bias { bias.address() } else { NULL },
        weight: if has_weight { weight.address() } else { NULL },
        out: out.address(),
        split: SplitRows::default(),
        num_rows: 2,
        num_parts: num_parts as u32,
        len: len as u32,
        eps: EPS,
    };
    launch(AddNorm { split: false }, &params)?;
    for row in 0..2 {
        let sum = |i: usize| {
            let of_parts = parts.as_slice().chunks(2 * len).map(|part| part[row * len + i]);
            let bias = if has_bias { bias.as_slice()[i] } else { 0.0 };
            let others = of_parts.chain([bias]).map(f64::from).sum::<f64>();
            f64::from(before[row * len + i]) + others
        };
        let sums: Vec<f64> = (0..len).map(sum).collect();
        for (i, normalised) in normalised(&sums).into_iter().enumerate() {
            let at = row * len + i;
            assert!((f64::from(x.as_slice()[at]) - sums[i]).abs() < 1e-5, "x[{row}, {i}]");
            if has_weight {
                // Terms of a sum may cancel: of f32, so what is left is less exact.
                let expected = normalised * f64::from(weight.as_slice()[i]);
                let found = f64::from(out.as_slice()[at]);
                let allowed = OF_BF16 * expected.abs() + 1e-5;
                assert!((found - expected).abs() <= allowed, "{found}, not {expected}");
            } else {
                assert!(out.as_slice()[at].is_nan(), "nothing was asked for");
            }
        }
    }
    Some(())
}

#[test]
fn add_norm() {
    for (len, num_parts, has_bias, has_weight) in
        [(4, 1, true, true), (576, 3, false, true), (576, 0, true, false), (5120, 5, true, true)]
    {
        let Some(()) = check_add_norm(len, num_parts, has_bias, has_weight) else { return };
    }
}

#[test]
fn gate_and_mul() {
    let mut dice = Dice::new(4);
    for (len, gelu) in [(13_usize, false), (2056, false), (2056, true)] {
        let mut gate_up = dice.bf16s(4 * len, 8.0);
        // Far out the gate is shut or open.
        gate_up[0] = bf16::from_f32(-1e30);
        gate_up[1] = bf16::from_f32(300.0);
        let mut from = Memory::new(&gate_up);
        let mut out = Memory::<bf16>::unwritten(2 * len);
        let params = GateAndMulParams {
            gate_up: from.address(),
            out: out.address(),
            num_rows: 2,
            len: len as u32,
        };
        let Some(()) = launch(GateAndMul { gelu }, &params) else { return };
        for (row, numbers) in gate_up.chunks(2 * len).enumerate() {
            for i in 0..len {
                let (x, up) = (f64::from(numbers[i]), f64::from(numbers[len + i]));
                // GELU by its approximation: Hendrycks and Gimpel, 2016, section 2.
                let cubic = x + 0.044715 * x.powi(3);
                let tanh = (std::f64::consts::FRAC_2_PI.sqrt() * cubic).tanh();
                let gate = if gelu { 0.5 * x * (1.0 + tanh) } else { x / (1.0 + (-x).exp()) };
                let found = f64::from(out.as_slice()[row * len + i]);
                // Where one is added to nearly minus one, the definition has few digits left.
                let allowed = OF_BF16 * (gate * up).abs() + 1e-6;
                assert!((found - gate * up).abs() <= allowed, "{x}, {up}: {found}");
            }
        }
    }
}
