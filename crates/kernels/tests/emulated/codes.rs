//! Activations as codes: `fp8_split.cu`, and `add_norm.cu` where it leaves them besides.

use half::bf16;
use inflight_kernels::{
    Arch,
    ops::{
        add_norm::{AddNorm, AddNormParams},
        fp8_quantize::{fp8_place, fp8_row_bytes},
        fp8_split::{Fp8Split, Fp8SplitParams, SplitRows},
    },
};

use crate::{
    attention::NULL,
    emulator::{Emulated, Order},
    kv::e4m3,
    memory::{Dice, Memory},
};

const NUM_ROWS: usize = 3;
const PADDED_ROWS: usize = 8;
/// Columns that share a scale.
const COLS: usize = 128;

/// Rows as codes.
struct Codes {
    len: usize,
    codes: Memory<u8>,
    scales: Memory<f32>,
}

impl Codes {
    fn new(len: usize) -> Self {
        let codes = Memory::unwritten(2 * NUM_ROWS * fp8_row_bytes(len));
        Self { len, codes, scales: Memory::unwritten(len.div_ceil(COLS) * PADDED_ROWS) }
    }

    fn address(&mut self) -> SplitRows {
        SplitRows {
            codes: self.codes.address(),
            scales: self.scales.address(),
            num_rows: NUM_ROWS as u32,
            padded_rows: PADDED_ROWS as u32,
        }
    }

    /// The sum of both codes of each number is the number, but for the smallest.
    fn check(&self, x: &[bf16]) {
        let pitch = fp8_row_bytes(self.len);
        for (row, x) in x.chunks(self.len).enumerate() {
            for (block, x) in x.chunks(COLS).enumerate() {
                let scale = f64::from(self.scales.as_slice()[block * PADDED_ROWS + row]);
                assert_eq!(scale.log2().fract(), 0.0, "{scale} is no power of 2");
                let greatest = x.iter().map(|x| f64::from(*x).abs()).fold(0.0, f64::max);
                for (i, x) in x.iter().enumerate() {
                    let at = row * pitch + fp8_place(block * COLS + i);
                    let [greater, lesser] =
                        [0, NUM_ROWS * pitch].map(|lesser| self.codes.as_slice()[lesser + at]);
                    let sum = scale * (e4m3(greater) + e4m3(lesser));
                    let is_small = f64::from(*x).abs() < greatest * 2_f64.powi(-9);
                    let allowed = if is_small { greatest * 2_f64.powi(-17) } else { 0.0 };
                    let off = (sum - f64::from(*x)).abs();
                    assert!(off <= allowed, "row {row}, {block}, {i}: {sum}, not {x}");
                }
            }
        }
    }
}

/// Numbers of many sizes, so that some are small beside others.
fn uneven(len: usize) -> Vec<bf16> {
    let mut dice = Dice::new(11);
    let number = |_| bf16::from_f32(dice.number() * 2_f32.powi(dice.below(24) as i32 - 18));
    (0..len).map(number).collect()
}

#[test]
fn codes_add_up_to_the_numbers() {
    let Some(kernel) = Emulated::new(Fp8Split, Arch::SM_90A) else { return };
    for len in [128, 200, 384] {
        let numbers = uneven(NUM_ROWS * len);
        let (mut x, mut codes) = (Memory::new(&numbers), Codes::new(len));
        let params =
            Fp8SplitParams { x: x.address(), to: codes.address(), len: len as u32, reserved: 0 };
        // SAFETY: memory is of the sizes that parameters say.
        unsafe { kernel.launch(&params, Order::Shuffled(1)) };
        codes.check(&numbers);
        // Rows are padded to whole groups, with zeros.
        let pitch = fp8_row_bytes(len);
        for col in len..pitch {
            assert!(
                codes.codes.as_slice().chunks(pitch).all(|row| row[fp8_place(col)] & 0x7f == 0)
            );
        }
    }
}

#[test]
fn what_add_norm_leaves_are_codes_of_its_output() {
    let Some(kernel) = Emulated::new(AddNorm { split: true }, Arch::SM_90A) else { return };
    let len = 384;
    let wide: Vec<f32> = uneven(NUM_ROWS * len).iter().map(|x| x.to_f32()).collect();
    let (mut x, mut parts) = (Memory::new(&wide), Memory::new(&wide));
    let mut weight = Memory::new(&Dice::new(12).f32s(len, 1.0));
    let mut out = Memory::<bf16>::unwritten(NUM_ROWS * len);
    let mut codes = Codes::new(len);
    let params = AddNormParams {
        x: x.address(),
        parts: parts.address(),
        bias: NULL,
        weight: weight.address(),
        out: out.address(),
        split: codes.address(),
        num_rows: NUM_ROWS as u32,
        num_parts: 1,
        len: len as u32,
        eps: 1e-5,
    };
    // SAFETY: memory is of the sizes that parameters say.
    unsafe { kernel.launch(&params, Order::Shuffled(1)) };
    assert!(out.as_slice().iter().any(|x| x.to_f32().abs() > 0.1), "something to split");
    codes.check(out.as_slice());
}
