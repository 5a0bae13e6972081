//! Every kernel of every level against sums in f64 over the dequantised weights.

use std::sync::Arc;

use proptest::prelude::*;

use half::bf16;

use super::{
    MatmulArgs, MatmulScratch, PackedMatrix, WeightMemory, WeightPrecision, activations::Form,
    kernels::KernelSet, matmul,
};
use crate::{
    Dtype, HostTensor, TensorData,
    cpu::{pool::ThreadPool, simd::SimdLevel},
    quant,
};

const DTYPES: [Dtype; 11] = [
    Dtype::F32,
    Dtype::F16,
    Dtype::BF16,
    Dtype::Q4_0,
    Dtype::Q4_1,
    Dtype::Q5_0,
    Dtype::Q5_1,
    Dtype::Q8_0,
    Dtype::Q4K,
    Dtype::Q5K,
    Dtype::Q6K,
];

/// Numbers that look random: SplitMix64.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    /// In -1..1.
    fn unit(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }

    fn vector(&mut self, len: usize) -> Vec<f32> {
        (0..len).map(|_| self.unit() * self.unit() * 3.0).collect()
    }

    /// Any bytes are a valid block but for its f16 scales, which get moderate exponents.
    fn tensor(&mut self, dtype: Dtype, rows: usize, cols: usize) -> HostTensor {
        let mut bytes = vec![0; rows * dtype.row_bytes(cols).unwrap()];
        bytes.iter_mut().for_each(|byte| *byte = self.next() as u8);
        let half_offsets: &[usize] = match dtype {
            Dtype::F32 => {
                for number in bytes.as_chunks_mut::<4>().0 {
                    *number = self.unit().to_le_bytes();
                }
                &[]
            }
            // No NaN, nor large numbers.
            Dtype::F8E4M3 => {
                bytes.iter_mut().for_each(|code| *code &= 0xbf);
                &[]
            }
            Dtype::BF16 | Dtype::F16 | Dtype::Q4_0 | Dtype::Q5_0 | Dtype::Q8_0 => &[0],
            Dtype::Q4_1 | Dtype::Q5_1 | Dtype::Q4K | Dtype::Q5K => &[0, 2],
            Dtype::Q6K => &[208],
        };
        for block in bytes.chunks_exact_mut(dtype.block_bytes()) {
            for offset in half_offsets {
                let high = &mut block[offset + 1];
                *high = *high & 0x83 | if dtype == Dtype::BF16 { 0x3c } else { 0x28 };
            }
        }
        let (name, data) = (format!("{dtype} {rows}x{cols}"), TensorData::Owned(bytes.into()));
        HostTensor { name, dtype, shape: vec![rows, cols], data }
    }
}

fn pool() -> ThreadPool {
    ThreadPool::new(3).unwrap()
}

/// `parts` for some kernels.
fn pack(kernels: KernelSet, parts: &[HostTensor], precision: WeightPrecision) -> PackedMatrix {
    let place = (&WeightMemory::default(), &pool());
    PackedMatrix::pack_for(kernels, place, parts, precision).unwrap()
}

/// One tensor as stored, for some kernels.
fn pack_one(kernels: KernelSet, tensor: &HostTensor) -> PackedMatrix {
    pack(kernels, std::slice::from_ref(tensor), WeightPrecision::Native)
}

/// `x * weight^T` at one level.
fn product(kernels: KernelSet, x: &[f32], weight: &PackedMatrix, num_rows: usize) -> Vec<f32> {
    let mut out = vec![f32::NAN; num_rows * weight.rows()];
    let args = MatmulArgs { x, weight, bias: None, out: &mut out, num_rows, accumulate: false };
    matmul(&pool(), args, &mut MatmulScratch::with_kernels(kernels));
    out
}

/// Activations as kernels take them: rounded to bf16 by some.
fn seen_by(kernels: KernelSet, dtype: Dtype, x: &[f32]) -> Vec<f32> {
    let round = |x: &f32| bf16::from_f32(*x).to_f32();
    match kernels.form(dtype) {
        Form::Bf16Pairs | Form::Bf16Tiles => x.iter().map(round).collect(),
        _ => x.to_vec(),
    }
}

/// The exact product, and for each output a bound of the error that a matmul may make.
fn expected(tensor: &HostTensor, x: &[f32], precision: WeightPrecision) -> Vec<(f64, f64)> {
    let (weights, cols) = (tensor.to_f32(), tensor.row_len());
    let group_len = quant::group_len(tensor.dtype).filter(|_| precision == WeightPrecision::Native);
    let mut expected = Vec::new();
    for x in x.chunks_exact(cols) {
        for w in weights.chunks_exact(cols) {
            let (mut sum, mut magnitude, mut bound) = (0.0, 0.0, 0.0);
            for (k, (w, value)) in w.iter().zip(x).enumerate() {
                let (w, value) = (f64::from(*w), f64::from(*value));
                sum += w * value;
                magnitude += (w * value).abs();
                if let Some(len) = group_len {
                    // Half a step of the activations' codes, each 1 / 127 of the largest.
                    let group = &x[k / len * len..][..len];
                    let largest = group.iter().fold(0.0, |most: f32, x| most.max(x.abs()));
                    bound += w.abs() * f64::from(largest) / 127.0 / 2.0;
                    // What is rounded are codes times scales, which the minimum then cancels.
                    magnitude += 256.0 / 127.0 * w.abs() * f64::from(largest);
                }
            }
            expected.push((sum, bound * 1.0001 + magnitude * 1e-5));
        }
    }
    expected
}

fn assert_close(actual: &[f32], expected: &[(f64, f64)], what: &str) {
    assert_eq!(actual.len(), expected.len());
    for (i, (actual, (exact, bound))) in actual.iter().zip(expected).enumerate() {
        let error = (f64::from(*actual) - exact).abs();
        assert!(error <= *bound, "{what}: output {i}: {actual}, exact {exact} +- {bound}");
    }
}

fn cols_of(dtype: Dtype) -> &'static [usize] {
    match dtype.block_len() {
        1 => &[1, 33, 64],
        32 => &[32, 96, 576],
        _ => &[256, 768],
    }
}

#[test]
fn outputs_lie_within_the_error_of_quantised_activations() {
    let random = &mut Random(1);
    for dtype in DTYPES {
        for &cols in cols_of(dtype) {
            for (rows, num_rows) in [(1, 1), (16, 2), (37, 5), (50, 29)] {
                let tensor = random.tensor(dtype, rows, cols);
                let x = random.vector(num_rows * cols);
                for precision in [WeightPrecision::Native, WeightPrecision::F32] {
                    for kernels in KernelSet::available() {
                        let weight = pack(kernels, std::slice::from_ref(&tensor), precision);
                        assert_eq!((weight.rows(), weight.cols()), (rows, cols));
                        let seen = seen_by(kernels, weight.segments()[0].dtype, &x);
                        let expected = expected(&tensor, &seen, precision);
                        let actual = product(kernels, &x, &weight, num_rows);
                        let what = format!("{kernels:?} {precision:?} {}", tensor.name);
                        assert_close(&actual, &expected, &what);
                    }
                }
            }
        }
    }
}

/// With activations that their codes represent exactly, and integer dot products, what is left is
/// the rounding of f32.
#[test]
fn quantised_outputs_are_exact_for_representable_activations() {
    let random = &mut Random(2);
    for dtype in DTYPES {
        let cols = cols_of(dtype).last().copied().unwrap();
        let tensor = random.tensor(dtype, 40, cols);
        let mut x: Vec<f32> = (0..7 * cols).map(|_| (random.unit() * 127.0).round()).collect();
        x.iter_mut().step_by(16).for_each(|x| *x = 127.0);
        let exact = expected(&tensor, &x, WeightPrecision::F32);
        for kernels in KernelSet::available() {
            let actual = product(kernels, &x, &pack_one(kernels, &tensor), 7);
            assert_close(&actual, &exact, &format!("{kernels:?} {dtype}"));
        }
    }
}

/// Saturation would show here: all codes at their ends, all activations at theirs.
#[test]
fn extreme_codes_do_not_saturate() {
    for dtype in [Dtype::Q4_0, Dtype::Q4_1, Dtype::Q5_1, Dtype::Q8_0, Dtype::Q6K] {
        for byte in [0x00, 0x80, 0xff] {
            let mut tensor = Random(3).tensor(dtype, 16, 256);
            let TensorData::Owned(bytes) = &tensor.data else { unreachable!() };
            let mut bytes = bytes.to_vec();
            for block in bytes.chunks_exact_mut(dtype.block_bytes()) {
                block.fill(byte);
                let scale = if dtype == Dtype::Q6K { 208 } else { 0 };
                block[scale..scale + 2].copy_from_slice(&[0x00, 0x3c]);
                if matches!(dtype, Dtype::Q4_1 | Dtype::Q5_1) {
                    block[2..4].copy_from_slice(&[0x00, 0xbc]);
                }
            }
            tensor.data = TensorData::Owned(bytes.into());
            for x in [1.0, -1.0] {
                let x = vec![x; 256 * 5];
                let exact = expected(&tensor, &x, WeightPrecision::F32);
                for kernels in KernelSet::available() {
                    let actual = product(kernels, &x, &pack_one(kernels, &tensor), 5);
                    assert_close(&actual, &exact, &format!("{kernels:?} {dtype} {byte:x}"));
                }
            }
        }
    }
}

#[test]
fn parts_of_all_types_stack_along_their_rows() {
    let random = &mut Random(4);
    let (cols, num_rows) = (256, 19);
    let parts: Vec<_> = DTYPES
        .into_iter()
        .chain([Dtype::Q6K, Dtype::F32])
        .enumerate()
        .map(|(i, dtype)| random.tensor(dtype, 5 + 7 * i, cols))
        .collect();
    let x = random.vector(num_rows * cols);
    for kernels in KernelSet::available() {
        let weight = pack(kernels, &parts, WeightPrecision::Native);
        assert_eq!(weight.rows(), parts.iter().map(HostTensor::num_rows).sum::<usize>());
        let all = product(kernels, &x, &weight, num_rows);
        let mut first = 0;
        for part in &parts {
            let alone = product(kernels, &x, &pack_one(kernels, part), num_rows);
            for (row, alone) in alone.chunks_exact(part.num_rows()).enumerate() {
                let start = row * weight.rows() + first;
                assert_eq!(all[start..start + part.num_rows()], *alone, "{}", part.name);
            }
            first += part.num_rows();
        }
    }
}

#[test]
fn bias_and_accumulation_add_up() {
    let random = &mut Random(5);
    let (rows, cols, num_rows) = (21, 64, 6);
    let tensor = random.tensor(Dtype::F32, rows, cols);
    let (x, bias) = (random.vector(num_rows * cols), random.vector(rows));
    let before = random.vector(num_rows * rows);
    for kernels in KernelSet::available() {
        let weight = pack_one(kernels, &tensor);
        let product = product(kernels, &x, &weight, num_rows);
        for (with_bias, accumulate) in [(true, false), (false, true), (true, true)] {
            let mut out = before.clone();
            let bias = with_bias.then_some(&*bias);
            let args =
                MatmulArgs { x: &x, weight: &weight, bias, out: &mut out, num_rows, accumulate };
            matmul(&pool(), args, &mut MatmulScratch::with_kernels(kernels));
            for (i, out) in out.iter().enumerate() {
                let base = if accumulate { before[i] } else { 0.0 };
                let expected = base + bias.map_or(0.0, |bias| bias[i % rows]) + product[i];
                assert_eq!(*out, expected, "{kernels:?} output {i}");
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// The invariant of this module: a row alone, on one thread, gives the same bits.
    #[test]
    fn a_row_does_not_depend_on_its_neighbours(
        dtype in prop::sample::select(DTYPES.to_vec()),
        num_rows in 1_usize..70,
        rows in 1_usize..300,
        num_threads in 1_usize..5,
        seed in any::<u64>(),
    ) {
        let random = &mut Random(seed);
        let cols = *cols_of(dtype).last().unwrap();
        let tensor = random.tensor(dtype, rows, cols);
        let x = random.vector(num_rows * cols);
        let [alone, together] = [1, num_threads].map(|num| ThreadPool::new(num).unwrap());
        for kernels in KernelSet::available() {
            let weight = pack_one(kernels, &tensor);
            let mut scratch = MatmulScratch::with_kernels(kernels);
            let mut run = |pool: &ThreadPool, x: &[f32]| {
                let num_rows = x.len() / cols;
                let mut out = vec![0.0; num_rows * rows];
                let args = MatmulArgs {
                    x, weight: &weight, bias: None, out: &mut out, num_rows, accumulate: false,
                };
                matmul(pool, args, &mut scratch);
                out
            };
            let all = run(&together, &x);
            for (x, all) in x.chunks_exact(cols).zip(all.chunks_exact(rows)) {
                let one = run(&alone, x);
                let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                prop_assert_eq!(bits(&one), bits(all));
            }
        }
    }
}

#[test]
fn what_does_not_fit_is_refused_by_name() {
    let random = &mut Random(6);
    let good = random.tensor(Dtype::Q4_0, 4, 64);
    let changed = |change: &dyn Fn(&mut HostTensor)| {
        let mut tensor = good.clone();
        tensor.name = "blk.3.attn_q".to_string();
        change(&mut tensor);
        vec![good.clone(), tensor]
    };
    let random_data = TensorData::Random { seed: 1, std: 0.1 };
    let cases = [
        (vec![], "no tensors"),
        (changed(&|t| t.shape = vec![64]), "two dimensions"),
        (changed(&|t| t.shape = vec![4, 32]), "64 columns"),
        (changed(&|t| t.shape = vec![0, 64]), "empty"),
        (changed(&|t| t.shape = vec![5, 64]), "needs 180"),
        (changed(&|t| t.dtype = Dtype::Q4K), "whole number of blocks"),
        (changed(&|t| t.data = random_data.clone()), "must be F32"),
        (changed(&|t| t.shape = vec![usize::MAX / 4, 64]), "too large"),
    ];
    for (parts, reason) in cases {
        let (native, level) = (WeightPrecision::Native, SimdLevel::detect());
        let memory = WeightMemory::default();
        let packed = PackedMatrix::pack(&memory, &pool(), &parts, native, level);
        let error = packed.err().unwrap();
        let message = error.to_string();
        assert!(message.contains(reason), "{message}");
        assert!(parts.is_empty() || message.contains("blk.3.attn_q"), "{message}");
    }
}

#[test]
fn random_weights_are_drawn_when_packed() {
    let data = TensorData::Random { seed: 7, std: 0.02 };
    let tensor = HostTensor { name: "w".to_string(), dtype: Dtype::F32, shape: vec![33, 48], data };
    let x = Random(8).vector(48);
    let exact = expected(&tensor, &x, WeightPrecision::Native);
    let kernels = KernelSet::of(SimdLevel::detect());
    let weight = pack_one(kernels, &tensor);
    assert!(weight.bytes() >= 33 * 48 * 4);
    assert_close(&product(kernels, &x, &weight, 1), &exact, "random");
}

/// Not finite in, not finite out: an overflow upstream must not turn into plausible numbers.
#[test]
fn what_is_not_finite_spreads_to_its_row_only() {
    let mut random = Random(9);
    for dtype in DTYPES {
        let cols = *cols_of(dtype).last().unwrap();
        let tensor = random.tensor(dtype, 20, cols);
        for (kernels, bad) in
            KernelSet::available().flat_map(|set| [(set, f32::NAN), (set, f32::INFINITY)])
        {
            let weight = pack_one(kernels, &tensor);
            let mut x = random.vector(3 * cols);
            x[cols + 5] = bad;
            let out = product(kernels, &x, &weight, 3);
            assert!(out[20..40].iter().all(|out| !out.is_finite()), "{kernels:?} {dtype} {bad}");
            assert!(out[..20].iter().chain(&out[40..]).all(|out| out.is_finite()));
        }
    }
}

/// A view of all reads through the packed panels: rows keep their places.
#[test]
fn identity_activations_read_the_weights_back() {
    let tensor = Random(10).tensor(Dtype::F16, 18, 20);
    let values = tensor.to_f32();
    let kernels = KernelSet::of(SimdLevel::Plain);
    let mut x = vec![0.0; 20 * 20];
    (0..20).for_each(|i| x[i * 21] = 1.0);
    let out = product(kernels, &x, &pack_one(kernels, &tensor), 20);
    let transposed: Vec<_> = (0..20 * 18).map(|i| values[i % 18 * 20 + i / 18]).collect();
    assert_eq!(out, transposed);
}

/// `Arc` keeps a mapped or owned tensor alive no longer than packing takes.
#[test]
fn packing_keeps_no_hold_on_its_source() {
    let data: Arc<[u8]> = vec![0; 32 * 34].into();
    let (name, shape) = ("w".to_string(), vec![32, 32]);
    let tensor =
        HostTensor { name, dtype: Dtype::Q8_0, shape, data: TensorData::Owned(Arc::clone(&data)) };
    let weight = pack_one(KernelSet::of(SimdLevel::detect()), &tensor);
    drop(tensor);
    assert_eq!((Arc::strong_count(&data), weight.rows()), (1, 32));
}
