//! Gated products of many rows: `gated_gemm.cu`.

use half::bf16;
use inflight_kernels::{
    Arch, Gpu,
    ops::{
        fp8_quantize::fp8_row_bytes,
        gated_gemm::{GatedGemm, GatedGemmParams, GatedShape},
        hopper_gemm::HopperWeights,
    },
};

use crate::{
    boxes::Boxes,
    emulator::{Emulated, Order},
    gemm::{Weights, silu_and_mul},
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

impl Case {
    fn row_bytes(&self) -> usize {
        if self.has_codes { fp8_row_bytes(self.cols) } else { 2 * self.cols }
    }

    /// The output, and what of it may be lost: sums of f32 in any order are added up.
    fn gated(&self, x: &Weights, weight: &Weights, m: usize, n: usize) -> (f64, f64) {
        let x = &x.numbers[m * self.cols..][..self.cols];
        let sum = |row: usize| {
            let weight = &weight.numbers[row * self.cols..][..self.cols];
            let products = x.iter().zip(weight).map(|(x, w)| x * w);
            products.fold((0.0, 1e-6), |(sum, lost), p| (sum + p, lost + p.abs() * 1e-6))
        };
        silu_and_mul(sum(n), sum(self.len + n))
    }

    fn params(
        &self,
        kernel: &GatedGemm,
        (x, weight): (&mut Weights, &mut Weights),
        out: &mut Memory<bf16>,
    ) -> GatedGemmParams {
        let Self { num_rows, len, cols, .. } = *self;
        let of_x = kernel.x_boxes(num_rows, self.row_bytes());
        let of_weight = kernel.weight_boxes(len, self.row_bytes());
        let of_out = kernel.out_boxes(num_rows, len);
        GatedGemmParams {
            x: Boxes::of(x.codes.address(), &of_x).map(),
            weight: Boxes::of(weight.codes.address(), &of_weight).map(),
            out: Boxes::of(out.address(), &of_out).plain_map(),
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
        let kind = if has_codes { HopperWeights::Fp8 } else { HopperWeights::Bf16 };
        let mut x = Weights::new((num_rows, cols), kind, &mut dice);
        let mut weight = Weights::new((2 * len, cols), kind, &mut dice);
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
        let row_bytes = self.row_bytes();
        let of_x = kernel.kernel.x_boxes(num_rows, row_bytes);
        let of_weight = kernel.kernel.weight_boxes(len, row_bytes);
        Some((of_x.sides[1], of_weight.sides[1..].iter().product()))
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
