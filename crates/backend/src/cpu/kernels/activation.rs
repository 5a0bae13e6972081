//! The gated activation of feed-forward layers.
//!
//! # Source
//! Shazeer: "GLU variants improve transformer", 2020, equation 6 (SwiGLU).

use super::{
    Cores,
    exp::exp,
    lanes::{Kernel, Lanes, dispatch},
};
use crate::cpu::pool::SharedMut;

/// Arguments of [`silu_and_mul`].
pub(crate) struct SiluAndMul<'a> {
    /// `[num_rows, 2 * len]`: gates, then what they gate.
    pub(crate) gate_up: &'a [f32],
    /// `[num_rows, len]`.
    pub(crate) out: &'a mut [f32],
    pub(crate) num_rows: usize,
    pub(crate) len: usize,
}

/// `out = silu(gate) * up`, where `silu(x) = x / (1 + exp(-x))`.
pub(crate) fn silu_and_mul(cores: Cores<'_>, args: SiluAndMul<'_>) {
    let len = args.len;
    let out = SharedMut::new(args.out);
    cores.for_rows(args.num_rows, len, |rows| {
        let gate_up = &args.gate_up[rows.start * 2 * len..rows.end * 2 * len];
        // SAFETY: rows of different tasks are different.
        let out = unsafe { out.slice(rows.start * len..rows.end * len) };
        dispatch(cores.simd, Rows { gate_up, out, len });
    });
}

struct Rows<'a> {
    gate_up: &'a [f32],
    out: &'a mut [f32],
    len: usize,
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
                let negated = l.sub(l.splat(0.0), gate);
                let denominator = l.add(l.splat(1.0), exp(l, negated));
                l.store_part(out, l.mul(l.div(gate, denominator), up));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::kernels::testing::{assert_close, at_every_level, normal};

    fn check(num_rows: usize, len: usize, spread: f32) {
        let gate_up: Vec<f32> = normal(3, num_rows * 2 * len).iter().map(|x| x * spread).collect();
        let mut expected = Vec::new();
        for row in gate_up.chunks(2 * len) {
            for (gate, up) in row[..len].iter().zip(&row[len..]) {
                let (gate, up) = (f64::from(*gate), f64::from(*up));
                expected.push(gate / (1.0 + (-gate).exp()) * up);
            }
        }
        at_every_level(|cores| {
            let mut out = vec![f32::NAN; num_rows * len + 1];
            silu_and_mul(cores, SiluAndMul { gate_up: &gate_up, out: &mut out, num_rows, len });
            assert_close(&out[..num_rows * len], &expected, 1e-6);
            assert!(out[num_rows * len].is_nan(), "wrote past the end");
        });
    }

    #[test]
    fn gates_multiply() {
        for len in [1, 15, 16, 100, 1536] {
            check(2, len, 3.0);
        }
        check(40, 1536, 1.0);
        check(2, 500, 60.0);
        check(0, 64, 1.0);
    }

    #[test]
    fn extreme_gates_saturate() {
        at_every_level(|cores| {
            let gate_up = [1000.0, -1000.0, f32::NAN, 2.0, 2.0, 2.0];
            let mut out = [0.0; 3];
            silu_and_mul(
                cores,
                SiluAndMul { gate_up: &gate_up, out: &mut out, num_rows: 1, len: 3 },
            );
            assert_eq!((out[0], out[1]), (2000.0, 0.0));
            assert!(out[2].is_nan());
        });
    }
}
