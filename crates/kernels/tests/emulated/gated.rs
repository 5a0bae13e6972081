//! Gated products of many rows: `gated_gemm.cu`.

use half::bf16;
use inflight_kernels::{
    Arch, Gpu,
    ops::{
        fp8_quantize::{fp8_place, fp8_row_bytes},
        gated_gemm::{GatedGemm, GatedGemmParams, GatedShape},
    },
};

use crate::{
    boxes::Boxes,
    emulator::{Emulated, Order},
    kv::e4m3,
    memory::{Dice, Memory},
};

#[derive(Clone, Copy)]
struct Case {
    num_rows: usize,
    /// Of gate and of up each.
    len: usize,
    cols: usize,
    has_codes: bool,
    num_sms: u32,
    order: Order,
}

/// Rows as a kernel takes them, and what they are.
struct Rows {
    bytes: Memory<u8>,
    /// Of codes.
    scales: Memory<f32>,
    numbers: Vec<f64>,
}

impl Rows {
    fn new(case: &Case, num_rows: usize, dice: &mut Dice) -> Self {
        let cols = case.cols;
        if !case.has_codes {
            let numbers = dice.bf16s(num_rows * cols, 1.0);
            let bytes: Vec<u8> = numbers.iter().flat_map(|x| x.to_le_bytes()).collect();
            let numbers = numbers.iter().map(|x| f64::from(*x)).collect();
            return Self { bytes: Memory::new(&bytes), scales: Memory::new(&[]), numbers };
        }
        let scales: Vec<f32> = (0..num_rows).map(|_| 0.5 + dice.number().abs()).collect();
        let mut codes = vec![0; num_rows * case.row_bytes()];
        let mut numbers = Vec::new();
        for (codes, scale) in codes.chunks_mut(case.row_bytes()).zip(&scales) {
            for col in 0..cols {
                // Of -1.75 to 1.75.
                let code = (dice.next() & 0xbf) as u8;
                codes[fp8_place(col)] = code;
                numbers.push(e4m3(code) * f64::from(*scale));
            }
        }
        Self { bytes: Memory::new(&codes), scales: Memory::new(&scales), numbers }
    }
}

impl Case {
    fn row_bytes(&self) -> usize {
        if self.has_codes { fp8_row_bytes(self.cols) } else { 2 * self.cols }
    }

    /// `silu(a) * b`, and what of it may be lost: sums of f32 in any order, an output of bf16.
    fn gated(&self, x: &Rows, weight: &Rows, m: usize, n: usize) -> (f64, f64) {
        let x = &x.numbers[m * self.cols..][..self.cols];
        let sum = |row: usize| {
            let weight = &weight.numbers[row * self.cols..][..self.cols];
            let products = x.iter().zip(weight).map(|(x, w)| x * w);
            products.fold((0.0, 1e-6), |(sum, lost), p| (sum + p, lost + p.abs() * 1e-6))
        };
        let ((gate, gate_lost), (up, up_lost)) = (sum(n), sum(self.len + n));
        let expected = gate / (1.0 + (-gate).exp()) * up;
        (expected, expected.abs() / 250.0 + gate_lost * up.abs() + up_lost * gate.abs())
    }

    fn params(
        &self,
        kernel: &GatedGemm,
        (x, weight): (&mut Rows, &mut Rows),
        out: &mut Memory<bf16>,
    ) -> GatedGemmParams {
        let Self { num_rows, len, cols, .. } = *self;
        let (row_bytes, box_cols) = (self.row_bytes(), self.row_bytes() / 2);
        let of_x = Boxes {
            address: x.bytes.address(),
            dims: &[box_cols, num_rows],
            strides: &[row_bytes],
            sides: &[GatedGemm::BOX_COLS, kernel.x_box_rows()],
        };
        let of_weight = Boxes {
            address: weight.bytes.address(),
            dims: &[box_cols, 8, 2, len / 8],
            strides: &[row_bytes, len * row_bytes, 8 * row_bytes],
            sides: &kernel.weight_box(),
        };
        let of_out = Boxes {
            address: out.address(),
            dims: &[len, num_rows],
            strides: &[2 * len],
            sides: &kernel.out_box(),
        };
        GatedGemmParams {
            x: of_x.map(),
            weight: of_weight.map(),
            out: of_out.plain_map(),
            x_scales: x.scales.address(),
            scales: weight.scales.address(),
            num_rows: num_rows as u32,
            len: len as u32,
            cols: cols as u32,
            reserved: 0,
        }
    }

    /// The tile that is chosen, by rows of x and of weights; `None` without a C++ compiler.
    fn check(&self) -> Option<(u32, u32)> {
        let Self { num_rows, len, cols, has_codes, num_sms, order } = *self;
        let mut dice = Dice::new((num_rows + len + cols) as u64);
        let shape = GatedShape { num_rows: num_rows as u32, len: len as u32, has_codes };
        let kernel = GatedGemm::new(&Gpu { num_sms, ..Gpu::H200 }, shape).unwrap();
        let kernel = Emulated::new(kernel, Arch::SM_90A)?;
        let mut x = Rows::new(self, num_rows, &mut dice);
        let mut weight = Rows::new(self, 2 * len, &mut dice);
        let mut out = Memory::<bf16>::unwritten(num_rows * len);
        let params = self.params(&kernel.kernel, (&mut x, &mut weight), &mut out);
        // SAFETY: memory is of the sizes that parameters say.
        unsafe { kernel.launch(&params, order) };
        for (m, row) in out.as_slice().chunks(len).enumerate() {
            for (n, found) in row.iter().map(|x| f64::from(*x)).enumerate() {
                let (right, lost) = self.gated(&x, &weight, m, n);
                assert!((found - right).abs() <= lost, "{m}, {n}: {found}, not {right}");
            }
        }
        Some((kernel.kernel.x_box_rows(), 16 * kernel.kernel.weight_box()[3]))
    }
}

#[test]
fn tiles_of_all_sizes() {
    // Cut tiles along both, fewer columns than a ring has stages and more, one block and several.
    let case = |num_rows, len, cols, num_sms, seed| {
        let order = if seed == 0 { Order::InTurn } else { Order::Shuffled(seed) };
        Case { num_rows, len, cols, has_codes: false, num_sms, order }
    };
    for (case, tile) in [
        (case(70, 96, 72, 1, 0), (128, 224)),
        (case(70, 200, 328, 2, 1), (128, 224)),
        (case(70, 80, 200, 1, 2), (128, 176)),
        (case(130, 80, 136, 1, 3), (256, 176)),
        (case(130, 96, 264, 1, 4), (256, 192)),
    ] {
        let Some(found) = case.check() else { return };
        assert_eq!(found, tile);
        Case { has_codes: true, cols: 2 * case.cols - 8, ..case }.check();
    }
}

/// More tiles than blocks, in more groups than one: the ring goes from a tile to the next, and with
/// few columns far ahead.
#[test]
fn tiles_in_turn() {
    for has_codes in [false, true] {
        let order = Order::Shuffled(5);
        let case = Case { num_rows: 2100, len: 120, cols: 24, has_codes, num_sms: 4, order };
        let Some(_) = case.check() else { return };
        let (len, cols, num_sms) = (296, 136, 2);
        Case { num_rows: 300, len, cols, num_sms, order: Order::Shuffled(6), ..case }.check();
    }
}
