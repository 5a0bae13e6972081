//! What makes and converts weights: `fp8_quantize.cu`, `fp8_expand.cu`, `random_normal.cu`.

use half::bf16;
use inflight_kernels::{
    Arch, Element,
    ops::{
        fp8_expand::{Fp8Expand, Fp8ExpandParams},
        fp8_quantize::{Fp8Quantize, Fp8QuantizeParams, fp8_place, fp8_row_bytes},
        random_normal::{RandomNormal, RandomNormalParams},
    },
};

use crate::{
    emulator::{Emulated, ORDERS, Order},
    kv::e4m3,
    memory::{Dice, Memory, Plain},
};

/// The codes and scales of rows.
fn quantize<T: Plain>(
    kernel: &Emulated<Fp8Quantize>,
    x: &[T],
    len: usize,
    order: Order,
) -> (Vec<u8>, Vec<f32>) {
    let num_rows = x.len() / len;
    let mut from = Memory::new(x);
    let mut codes = Memory::<u8>::unwritten(num_rows * fp8_row_bytes(len));
    let mut scales = Memory::<f32>::unwritten(num_rows);
    let params = Fp8QuantizeParams {
        x: from.address(),
        codes: codes.address(),
        scales: scales.address(),
        num_rows: num_rows as u32,
        len: len as u32,
    };
    // SAFETY: memory is of the sizes that parameters say.
    unsafe { kernel.launch(&params, order) };
    (codes.as_slice().to_vec(), scales.as_slice().to_vec())
}

/// Every code is the nearest there is, and padding is 0.
fn check_codes(x: &[f32], len: usize, codes: &[u8], scales: &[f32]) {
    let mut numbers: Vec<f64> = (0..=u8::MAX).map(e4m3).filter(|x| !x.is_nan()).collect();
    numbers.sort_by(f64::total_cmp);
    let rows = x.chunks(len).zip(codes.chunks(fp8_row_bytes(len))).zip(scales);
    for ((x, codes), scale) in rows {
        let greatest = x.iter().fold(0.0_f64, |greatest, x| greatest.max(f64::from(x.abs())));
        let scale = f64::from(*scale);
        assert!((scale * 448.0 - greatest).abs() <= greatest * 1e-6 + 1.01e-12, "{scale}");
        for (col, x) in x.iter().enumerate() {
            let wanted = f64::from(*x) / scale;
            let at = numbers.partition_point(|x| *x < wanted);
            let near = &numbers[at.saturating_sub(1)..numbers.len().min(at + 1)];
            let least = near.iter().fold(f64::MAX, |least, x| least.min((x - wanted).abs()));
            let found = e4m3(codes[fp8_place(col)]);
            let allowed = least + wanted.abs() * 1e-6;
            assert!((found - wanted).abs() <= allowed, "{len}: {col}: {found}, not {wanted}");
        }
        assert!((len..codes.len()).all(|col| codes[fp8_place(col)] & 0x7f == 0), "padding");
    }
}

#[test]
fn rows_are_rounded_to_the_nearest_codes() {
    let kernels = [(Element::F32, Arch::SM_80), (Element::F32, Arch::SM_90A)]
        .map(|(x, arch)| Emulated::new(Fp8Quantize { x }, arch));
    let [Some(first), Some(second)] = &kernels else { return };
    let of_bf16 = Emulated::new(Fp8Quantize { x: Element::Bf16 }, Arch::SM_80).unwrap();
    // Padded or not, of less than a warp and of more than a block takes at once.
    for len in [8, 200, 4104] {
        let mut dice = Dice::new(41);
        let number = |_| dice.number() * 2_f32.powi(dice.below(16) as i32 - 12);
        let mut x: Vec<f32> = (0..3 * len).map(number).collect();
        x[len..2 * len].fill(0.0);
        let (codes, scales) = quantize(first, &x, len, Order::Shuffled(1));
        check_codes(&x, len, &codes, &scales);
        // The instruction rounds as other GPUs do without.
        assert_eq!(quantize(second, &x, len, Order::Shuffled(2)), (codes, scales));
        let short: Vec<bf16> = x.iter().map(|x| bf16::from_f32(*x)).collect();
        let x: Vec<f32> = short.iter().map(|x| x.to_f32()).collect();
        let (codes, scales) = quantize(&of_bf16, &short, len, Order::Shuffled(1));
        check_codes(&x, len, &codes, &scales);
    }
}

#[test]
fn codes_become_numbers() {
    const ROWS: usize = 5;
    for (cols, has_blocks) in [(8, false), (200, true), (2056, false), (2056, true)] {
        let Some(kernel) = Emulated::new(Fp8Expand { blocks: has_blocks }, Arch::SM_80) else {
            return;
        };
        let mut dice = Dice::new(42);
        let mut byte = |_| match dice.next() as u8 {
            0x7f | 0xff => 0, // No numbers.
            code => code,
        };
        let bytes: Vec<u8> = (0..ROWS * fp8_row_bytes(cols)).map(&mut byte).collect();
        let by = dice.f32s(if has_blocks { cols.div_ceil(128) * ROWS } else { ROWS }, 2.0);
        let (mut codes, mut scales) = (Memory::new(&bytes), Memory::new(&by));
        let mut out = Memory::<bf16>::unwritten(ROWS * cols);
        let params = Fp8ExpandParams {
            codes: codes.address(),
            scales: scales.address(),
            out: out.address(),
            rows: ROWS as u32,
            cols: cols as u32,
        };
        // SAFETY: memory is of the sizes that parameters say.
        unsafe { kernel.launch(&params, Order::Shuffled(1)) };
        for (at, found) in out.as_slice().iter().enumerate() {
            let (row, col) = (at / cols, at % cols);
            let code = bytes[row * fp8_row_bytes(cols) + fp8_place(col)];
            let scale = if has_blocks { by[col / 128 * ROWS + row] } else { by[row] };
            assert_eq!(*found, bf16::from_f32(e4m3(code) as f32 * scale), "{row}, {col}");
        }
    }
}

/// Two numbers of a normal distribution.
///
/// # Source
/// Box and Muller: "A note on the generation of random normal deviates", 1958; bits by SplitMix64,
/// see [`Dice`].
fn normal_pair(seed: u64, pair: u64) -> [f64; 2] {
    let key = Dice::new(seed).next();
    let bits = Dice::new(key.wrapping_add(pair)).next();
    let [u, turn] = [(bits >> 32) as f64 + 0.5, (bits as u32).into()].map(|x| x / 2_f64.powi(32));
    let radius = (-2.0 * u.ln()).sqrt();
    let (sin, cos) = (turn * std::f64::consts::TAU).sin_cos();
    [radius * cos, radius * sin]
}

#[test]
fn random_numbers_depend_on_their_index_alone() {
    const STD: f32 = 0.25;
    let kernels = [Element::F32, Element::Bf16].map(|out| RandomNormal { out });
    let [of_f32, of_bf16] = kernels.map(|kernel| Emulated::new(kernel, Arch::SM_80));
    let (Some(of_f32), Some(of_bf16)) = (of_f32, of_bf16) else { return };
    // From the start or not; of odd lengths; beyond what 32 bits count.
    for (first_index, len) in [(0, 1), (0, 1500), (10, 77), (1 << 34, 513)] {
        let (seed, order) = (0xfedc_ba98_7654_3210, ORDERS[1]);
        let mut floats = Memory::<f32>::unwritten(len);
        let mut shorts = Memory::<bf16>::unwritten(len);
        let params = |out| RandomNormalParams {
            out,
            seed,
            first_index,
            len: len as u64,
            std: STD,
            reserved: 0,
        };
        // SAFETY: memory is of the sizes that parameters say.
        unsafe { of_f32.launch(&params(floats.address()), order) };
        // SAFETY: as above.
        unsafe { of_bf16.launch(&params(shorts.address()), order) };
        for (i, (found, short)) in floats.as_slice().iter().zip(shorts.as_slice()).enumerate() {
            let pair = normal_pair(seed, (first_index + i as u64) / 2);
            let expected = f64::from(STD) * pair[i % 2];
            // Where the radius is nearly 0, so is the logarithm of an f32 near 1.
            let off = (f64::from(*found) - expected).abs();
            assert!(off < 5e-4 * f64::from(STD), "{i}: {found}, not {expected}");
            assert!(off < 1e-5 || pair[0].hypot(pair[1]) < 0.1, "{i}: {found}, not {expected}");
            assert_eq!(*short, bf16::from_f32(*found));
        }
    }
}
