//! The gated activation of feed-forward layers.
//!
//! # Source
//! Shazeer: "GLU variants improve transformer", 2020, equations 5 and 6 (GEGLU, SwiGLU).

use super::{
    Cores,
    exp::exp,
    lanes::{Kernel, Lanes, dispatch},
};
use crate::{Activation, cpu::pool::SharedMut};

/// Arguments of [`gate_and_mul`].
pub(crate) struct GateAndMul<'a> {
    /// `[num_rows, 2 * len]`: gates, then what they gate.
    pub(crate) gate_up: &'a [f32],
    /// `[num_rows, len]`.
    pub(crate) out: &'a mut [f32],
    pub(crate) num_rows: usize,
    pub(crate) len: usize,
    pub(crate) activation: Activation,
}

/// `out = f(gate) * up`.
pub(crate) fn gate_and_mul(cores: Cores<'_>, args: GateAndMul<'_>) {
    let len = args.len;
    let out = SharedMut::new(args.out);
    cores.for_rows(args.num_rows, len, |rows| {
        let gate_up = &args.gate_up[rows.start * 2 * len..rows.end * 2 * len];
        // SAFETY: rows of different tasks are different.
        let out = unsafe { out.slice(rows.start * len..rows.end * len) };
        dispatch(cores.simd, Rows { gate_up, out, len, activation: args.activation });
    });
}

struct Rows<'a> {
    gate_up: &'a [f32],
    out: &'a mut [f32],
    len: usize,
    activation: Activation,
}

impl Kernel for Rows<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, l: L) {
        let len = self.len.max(1);
        let rows = self.gate_up.chunks_exact(2 * len).zip(self.out.chunks_exact_mut(len));
        for (gate_up, out) in rows {
            let (gate, up) = gate_up.split_at(len);
            let chunks = out.chunks_mut(L::N).zip(gate.chunks(L::N)).zip(up.chunks(L::N));
            for ((out, gate), up) in chunks {
                let (gate, up) = (l.load_part(gate), l.load_part(up));
                let rate = match self.activation {
                    Activation::Silu => gate,
                    Activation::GeluTanh => gelu_rate(l, gate),
                };
                let negated = l.sub(l.splat(0.0), rate);
                let denominator = l.add(l.splat(1.0), exp(l, negated));
                l.store_part(out, l.mul(l.div(gate, denominator), up));
            }
        }
    }
}

/// What makes `x / (1 + exp(-rate))` the GELU of `x`: `(1 + tanh(y)) / 2` is `1 / (1 + exp(-2 y))`.
#[inline(always)]
fn gelu_rate<L: Lanes>(l: L, x: L::V) -> L::V {
    /// `2 sqrt(2 / pi)`.
    const FACTOR: f32 = 1.595_769;
    let cubic = l.mul(l.mul(x, x), l.splat(0.044_715 * FACTOR));
    l.mul(x, l.add(cubic, l.splat(FACTOR)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::kernels::testing::{assert_close, at_every_level, normal};

    fn check(activation: Activation, num_rows: usize, len: usize, spread: f32) {
        let activate = |x: f64| match activation {
            Activation::Silu => x / (1.0 + (-x).exp()),
            Activation::GeluTanh => {
                let y = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x.powi(3));
                0.5 * x * (1.0 + y.tanh())
            }
        };
        let gate_up: Vec<f32> = normal(3, num_rows * 2 * len).iter().map(|x| x * spread).collect();
        let mut expected = Vec::new();
        for row in gate_up.chunks(2 * len) {
            for (gate, up) in row[..len].iter().zip(&row[len..]) {
                let (gate, up) = (f64::from(*gate), f64::from(*up));
                expected.push(activate(gate) * up);
            }
        }
        at_every_level(|cores| {
            let mut out = vec![f32::NAN; num_rows * len + 1];
            let (gate_up, out_all) = (&gate_up, &mut out);
            let args = GateAndMul { gate_up, out: out_all, num_rows, len, activation };
            gate_and_mul(cores, args);
            assert_close(&out[..num_rows * len], &expected, 1e-6);
            assert!(out[num_rows * len].is_nan(), "wrote past the end");
        });
    }

    #[test]
    fn gates_multiply() {
        for activation in [Activation::Silu, Activation::GeluTanh] {
            for len in [1, 15, 16, 100, 1536] {
                check(activation, 2, len, 3.0);
            }
            check(activation, 40, 1536, 1.0);
            check(activation, 2, 500, 60.0);
            check(activation, 0, 64, 1.0);
        }
    }

    #[test]
    fn extreme_gates_saturate() {
        for activation in [Activation::Silu, Activation::GeluTanh] {
            at_every_level(|cores| {
                let gate_up = &[1000.0, -1000.0, f32::NAN, 2.0, 2.0, 2.0];
                let mut out = [0.0; 3];
                let args = GateAndMul { gate_up, out: &mut out, num_rows: 1, len: 3, activation };
                gate_and_mul(cores, args);
                assert_eq!((out[0], out[1]), (2000.0, 0.0));
                assert!(out[2].is_nan());
            });
        }
    }
}
