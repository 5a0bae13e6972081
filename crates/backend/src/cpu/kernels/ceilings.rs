//! What this processor could do at best: reading memory, and multiplying registers.

use std::time::Instant;

use super::{
    Cores,
    lanes::{Kernel, Lanes, dispatch},
};
use crate::Ceilings;

/// Floats that are read: 256 MiB, more than caches hold.
const NUM_FLOATS: usize = 64 << 20;
/// Rounds of [`Multiply`] in one measurement: some milliseconds.
const ROUNDS: usize = 1 << 20;
/// The best of so many counts, since others' work only slows.
const NUM_REPEATS: usize = 5;

/// Measures with all cores.
pub(crate) fn measure_ceilings(cores: Cores<'_>) -> Ceilings {
    let Cores { pool, simd } = cores;
    let num_threads = pool.num_threads();
    let floats = vec![1.0_f32; NUM_FLOATS];
    let share = NUM_FLOATS / num_threads;
    let read_s = best_s(|| {
        pool.run(num_threads, |i| {
            let part = &floats[i * share..(i + 1) * share];
            std::hint::black_box(dispatch(simd, Read(part)));
        });
    });
    let multiply_s = best_s(|| {
        pool.run(num_threads, |_| {
            std::hint::black_box(dispatch(simd, Multiply));
        });
    });
    let num_bytes = num_threads * share * size_of::<f32>();
    let num_operations = num_threads * dispatch(simd, CountOperations);
    Ceilings {
        bytes_per_s: num_bytes as f64 / read_s,
        operations_per_s: num_operations as f64 / multiply_s,
        bytes_by: "reading",
        operations_by: "f32 multiply-adds; dot products of codes or of bf16 may do more",
    }
}

fn best_s(work: impl Fn()) -> f64 {
    work(); // the first time is never the fastest
    let times = (0..NUM_REPEATS).map(|_| {
        let start = Instant::now();
        work();
        start.elapsed().as_secs_f64()
    });
    times.fold(f64::INFINITY, f64::min).max(1e-9)
}

/// Independent registers: enough to hide every instruction's latency.
const REGISTERS: usize = 12;

/// Sum of all numbers.
struct Read<'a>(&'a [f32]);

impl Kernel for Read<'_> {
    type Output = f32;

    #[inline(always)]
    fn run<L: Lanes>(self, l: L) -> f32 {
        let mut sums = [l.splat(0.0); REGISTERS];
        for chunk in self.0.chunks_exact(REGISTERS * L::N) {
            for (i, sum) in sums.iter_mut().enumerate() {
                *sum = l.add(*sum, l.load_part(&chunk[i * L::N..]));
            }
        }
        sums.into_iter().map(|sum| l.sum(sum)).sum()
    }
}

/// Multiply-adds of registers alone.
struct Multiply;

impl Kernel for Multiply {
    type Output = f32;

    #[inline(always)]
    fn run<L: Lanes>(self, l: L) -> f32 {
        let (a, b) = std::hint::black_box((0.999, 0.001));
        let (a, b) = (l.splat(a), l.splat(b));
        let mut sums = [b; REGISTERS];
        for _ in 0..ROUNDS {
            for sum in &mut sums {
                *sum = l.mul_add(*sum, a, b);
            }
        }
        sums.into_iter().map(|sum| l.sum(sum)).sum()
    }
}

/// Multiplications and additions of [`Multiply`].
struct CountOperations;

impl Kernel for CountOperations {
    type Output = usize;

    #[inline(always)]
    fn run<L: Lanes>(self, _: L) -> usize {
        2 * L::N * REGISTERS * ROUNDS
    }
}
