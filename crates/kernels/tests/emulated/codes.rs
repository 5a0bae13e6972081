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
/// Columns that share a scale.
const COLS: usize = 128;

/// Rows as codes.
pub(crate) struct Codes {
    num_rows: usize,
    padded_rows: usize,
    len: usize,
    codes: Memory<u8>,
    scales: Memory<f32>,
}

impl Codes {
    pub(crate) fn new(num_rows: usize, len: usize) -> Self {
        let padded_rows = num_rows.next_multiple_of(8);
        Self {
            num_rows,
            padded_rows,
            len,
            codes: Memory::unwritten(2 * num_rows * fp8_row_bytes(len)),
            scales: Memory::unwritten(len.div_ceil(COLS) * padded_rows),
        }
    }

    pub(crate) fn address(&mut self) -> SplitRows {
        SplitRows {
            codes: self.codes.address(),
            scales: self.scales.address(),
            num_rows: self.num_rows as u32,
            padded_rows: self.padded_rows as u32,
        }
    }

    /// A row's greater and lesser codes.
    pub(crate) fn codes(&self, row: usize) -> [&[u8]; 2] {
        let pitch = fp8_row_bytes(self.len);
        [row, self.num_rows + row].map(|row| &self.codes.as_slice()[row * pitch..][..pitch])
    }

    /// A row's scales.
    pub(crate) fn scales(&self, row: usize) -> Vec<f32> {
        let of_blocks = self.scales.as_slice().chunks(self.padded_rows);
        of_blocks.map(|scales| scales[row]).collect()
    }

    fn check(&self, x: &[bf16]) {
        x.chunks(self.len).enumerate().for_each(|(row, x)| self.check_row(row, x));
    }

    /// The sum of both codes of each number is the number, but for the smallest.
    pub(crate) fn check_row(&self, row: usize, x: &[bf16]) {
        let ([greater, lesser], scales) = (self.codes(row), self.scales(row));
        for (block, x) in x.chunks(COLS).enumerate() {
            let scale = f64::from(scales[block]);
            assert_eq!(scale.log2().fract(), 0.0, "{scale} is no power of 2");
            let greatest = x.iter().map(|x| f64::from(*x).abs()).fold(0.0, f64::max);
            for (i, x) in x.iter().enumerate() {
                let at = fp8_place(block * COLS + i);
                let sum = scale * (e4m3(greater[at]) + e4m3(lesser[at]));
                let is_small = f64::from(*x).abs() < greatest * 2_f64.powi(-9);
                let allowed = if is_small { greatest * 2_f64.powi(-17) } else { 0.0 };
                let off = (sum - f64::from(*x)).abs();
                assert!(off <= allowed, "row {row}, {block}, {i}: {sum}, not {x}");
            }
        }
    }
}

/// As `fp8_split.cu` makes them; `None` where there is no C++ compiler.
pub(crate) fn split(x: &mut Memory<bf16>, len: usize) -> Option<Codes> {
    let kernel = Emulated::new(Fp8Split, Arch::SM_90A)?;
    let mut codes = Codes::new(x.as_slice().len() / len, len);
    let params =
        Fp8SplitParams { x: x.address(), to: codes.address(), len: len as u32, reserved: 0 };
    // SAFETY: memory is of the sizes that parameters say.
    unsafe { kernel.launch(&params, Order::Shuffled(1)) };
    Some(codes)
}

/// Numbers of many sizes, so that some are small beside others.
fn uneven(len: usize) -> Vec<bf16> {
    let mut dice = Dice::new(11);
    let number = |_| bf16::from_f32(dice.number() * 2_f32.powi(dice.below(24) as i32 - 18));
    (0..len).map(number).collect()
}

#[test]
fn codes_add_up_to_the_numbers() {
    for len in [128, 200, 384] {
        let numbers = uneven(NUM_ROWS * len);
        let Some(codes) = split(&mut Memory::new(&numbers), len) else { return };
        codes.check(&numbers);
        // Rows are padded to whole groups, with zeros.
        let is_zero =
            |codes: &[u8]| (len..codes.len()).all(|col| codes[fp8_place(col)] & 0x7f == 0);
        assert!((0..NUM_ROWS).all(|row| codes.codes(row).into_iter().all(is_zero)));
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
    let mut codes = Codes::new(NUM_ROWS, len);
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
