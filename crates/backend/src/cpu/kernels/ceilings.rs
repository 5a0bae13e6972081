//! What this processor could do at best: reading memory, and multiplying registers.

use std::time::Instant;

use memmap2::MmapMut;

use super::{
    Cores,
    lanes::{Kernel, Lanes, dispatch},
};
use crate::{BackendError, Ceilings, Dtype, cpu::simd::SimdLevel};

/// Floats that are read: 256 MiB, more than caches hold.
const NUM_FLOATS: usize = 64 << 20;
/// How far ahead floats are fetched: what keeps a memory busy, as the kernels of products do.
const FETCHED_AHEAD: usize = 8192 / size_of::<f32>();
/// Rounds of [`Multiply`] in one measurement: some milliseconds.
const ROUNDS: usize = 1 << 20;
/// The best of so many counts, since others' work only slows.
const NUM_REPEATS: usize = 5;

/// Measures with all cores; arithmetic by the instructions that suit `weights` best.
///
/// # Errors
/// There is no memory to read.
pub(crate) fn measure_ceilings(cores: Cores<'_>, weights: Dtype) -> Result<Ceilings, BackendError> {
    let Cores { pool, simd } = cores;
    let unit = Unit::of(weights, simd);
    let num_threads = pool.num_threads();
    let memory = huge_pages(NUM_FLOATS * size_of::<f32>())?;
    // SAFETY: a mapping is aligned to pages, as long as was asked for, and holds zeros.
    let floats = unsafe { std::slice::from_raw_parts(memory.as_ptr().cast::<f32>(), NUM_FLOATS) };
    let share = NUM_FLOATS / num_threads;
    let read_s = best_s(|| {
        pool.run(num_threads, |i| {
            let part = &floats[i * share..(i + 1) * share];
            std::hint::black_box(dispatch(simd, Read(part)));
        });
    });
    let multiply_s = best_s(|| {
        pool.run(num_threads, |_| {
            unit.multiply(simd);
        });
    });
    let num_bytes = num_threads * share * size_of::<f32>();
    let num_operations = num_threads * unit.num_operations(simd);
    Ok(Ceilings {
        bytes_per_s: num_bytes as f64 / read_s,
        operations_per_s: num_operations as f64 / multiply_s,
        bytes_by: "reading",
        operations_by: unit.name(),
    })
}

/// Instructions that multiply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Unit {
    /// Multiply-adds of f32.
    F32,
    /// Dot products of pairs of bf16.
    Bf16,
    /// Dot products of four codes of eight bits.
    Codes,
}

impl Unit {
    /// The best for such weights that this processor has at this level.
    #[cfg(target_arch = "x86_64")]
    fn of(weights: Dtype, simd: SimdLevel) -> Self {
        let has_avx512 = simd >= SimdLevel::Avx512;
        match weights {
            Dtype::F32 | Dtype::F16 | Dtype::F8E4M3 => Self::F32,
            Dtype::BF16 if has_avx512 && is_x86_feature_detected!("avx512bf16") => Self::Bf16,
            Dtype::BF16 => Self::F32,
            _ if has_avx512 && is_x86_feature_detected!("avx512vnni") => Self::Codes,
            _ => Self::F32,
        }
    }

    #[cfg(not(target_arch = "x86_64"))]
    fn of(_: Dtype, _: SimdLevel) -> Self {
        Self::F32
    }

    fn name(self) -> &'static str {
        match self {
            Self::F32 => "multiply-adds of f32 in registers",
            Self::Bf16 => "dot products of bf16 in vector registers",
            Self::Codes => "dot products of codes in vector registers",
        }
    }

    /// Multiplications and additions of [`Unit::multiply`].
    fn num_operations(self, simd: SimdLevel) -> usize {
        let of_a_register = match self {
            Self::F32 => 2 * dispatch(simd, CountLanes),
            Self::Bf16 => 2 * 32,
            Self::Codes => 2 * 64,
        };
        of_a_register * REGISTERS * ROUNDS
    }

    #[cfg(target_arch = "x86_64")]
    fn multiply(self, simd: SimdLevel) {
        match self {
            Self::F32 => drop(std::hint::black_box(dispatch(simd, Multiply))),
            // SAFETY: `of` found the instructions.
            Self::Bf16 => unsafe { registers::dots_of_bf16() },
            // SAFETY: as above.
            Self::Codes => unsafe { registers::dots_of_codes() },
        }
    }

    #[cfg(not(target_arch = "x86_64"))]
    fn multiply(self, simd: SimdLevel) {
        std::hint::black_box(dispatch(simd, Multiply));
    }
}

/// Instructions that [`Lanes`] does not have.
#[cfg(target_arch = "x86_64")]
mod registers {
    use std::{arch::x86_64::*, hint::black_box};

    use super::{REGISTERS, ROUNDS};

    #[target_feature(enable = "avx512f,avx512vnni")]
    pub(super) fn dots_of_codes() {
        let (a, b) = (_mm512_set1_epi8(black_box(3)), _mm512_set1_epi8(black_box(1)));
        let mut sums = [a; REGISTERS];
        for _ in 0..ROUNDS {
            for sum in &mut sums {
                *sum = _mm512_dpbusd_epi32(*sum, a, b);
            }
        }
        black_box(sums);
    }

    #[target_feature(enable = "avx512f,avx512bf16")]
    pub(super) fn dots_of_bf16() {
        const ONE: i32 = 0x3f80_3f80;
        let pair = _mm512_set1_epi32(black_box(ONE));
        // SAFETY: both are 512 bits, all of which are numbers.
        let pair: __m512bh = unsafe { std::mem::transmute(pair) };
        let mut sums = [_mm512_set1_ps(black_box(0.0)); REGISTERS];
        for _ in 0..ROUNDS {
            for sum in &mut sums {
                *sum = _mm512_dpbf16_ps(*sum, pair, pair);
            }
        }
        black_box(sums);
    }
}

/// Memory as weights have it: in huge pages, where the system gives them.
fn huge_pages(len: usize) -> Result<MmapMut, BackendError> {
    let fail = |_| BackendError::OutOfMemory {
        device: "cpu",
        what: "measuring memory".to_string(),
        bytes: len,
    };
    let mut memory = MmapMut::map_anon(len).map_err(fail)?;
    #[cfg(target_os = "linux")]
    {
        // A system that has no huge pages goes without.
        let _ = memory.advise(memmap2::Advice::HugePage);
    }
    // Pages that were never written are all the same one.
    memory.fill(0);
    Ok(memory)
}

/// Fetches a line of the caches. Touches no memory as far as the program can see.
#[inline(always)]
fn prefetch(line: *const f32) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch may point anywhere, and every x86-64 processor has it.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(line.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = line;
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
                let numbers = &chunk[i * L::N..];
                prefetch(numbers.as_ptr().wrapping_add(FETCHED_AHEAD));
                *sum = l.add(*sum, l.load_part(numbers));
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

/// Numbers in a register.
struct CountLanes;

impl Kernel for CountLanes {
    type Output = usize;

    #[inline(always)]
    fn run<L: Lanes>(self, _: L) -> usize {
        L::N
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::pool::ThreadPool;

    /// No machine reads or multiplies ten thousand times faster or slower than those of our time.
    #[test]
    fn ceilings_are_of_a_credible_size() {
        let pool = ThreadPool::new(1).unwrap();
        for weights in [Dtype::F32, Dtype::BF16, Dtype::Q4_1] {
            let cores = Cores { pool: &pool, simd: SimdLevel::detect() };
            let ceilings = measure_ceilings(cores, weights).unwrap();
            assert!((1e7..1e13).contains(&ceilings.bytes_per_s), "{ceilings:?}");
            assert!((1e7..1e14).contains(&ceilings.operations_per_s), "{ceilings:?}");
        }
    }
}
