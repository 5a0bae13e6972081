//! Gated products of many rows: `gated_gemm.cu`.

use half::bf16;
use inflight_kernels::{
    Arch, Gpu,
    ops::gated_gemm::{GatedGemm, GatedGemmParams},
};

use crate::{
    boxes::Boxes,
    emulator::{Emulated, Order},
    memory::{Dice, Memory},
};

struct Case {
    num_rows: usize,
    /// Of gate and of up each.
    len: usize,
    cols: usize,
    num_sms: u32,
    order: Order,
}

/// `silu(a) * b`, and what of it may be lost: sums of f32 in any order, an output of bf16.
fn gated(case: &Case, x: &[bf16], weight: &[bf16], m: usize, n: usize) -> (f64, f64) {
    let x = &x[m * case.cols..][..case.cols];
    let sum = |row: usize| {
        let weight = &weight[row * case.cols..][..case.cols];
        let products = x.iter().zip(weight).map(|(x, w)| f64::from(*x) * f64::from(*w));
        products.fold((0.0, 1e-6), |(sum, lost), p| (sum + p, lost + p.abs() * 1e-6))
    };
    let ((gate, gate_lost), (up, up_lost)) = (sum(n), sum(case.len + n));
    let expected = gate / (1.0 + (-gate).exp()) * up;
    (expected, expected.abs() / 250.0 + gate_lost * up.abs() + up_lost * gate.abs())
}

impl Case {
    /// The tile that is chosen, by rows of x and of weights; `None` without a C++ compiler.
    fn check(&self) -> Option<(u32, u32)> {
        let Self { num_rows, len, cols, num_sms, order } = *self;
        let mut dice = Dice::new((num_rows + len + cols) as u64);
        let gpu = Gpu { num_sms, ..Gpu::H200 };
        let kernel = GatedGemm::new(&gpu, num_rows as u32, len as u32).unwrap();
        let kernel = Emulated::new(kernel, Arch::SM_90A)?;
        let mut x = Memory::new(&dice.bf16s(num_rows * cols, 1.0));
        let mut weight = Memory::new(&dice.bf16s(2 * len * cols, 1.0));
        let mut out = Memory::<bf16>::unwritten(num_rows * len);
        let x_sides = [GatedGemm::BOX_COLS, kernel.kernel.x_box_rows()];
        let weight_sides = kernel.kernel.weight_box();
        let row_bytes = 2 * cols;
        let boxes_of_x = Boxes {
            address: x.address(),
            dims: &[cols, num_rows],
            strides: &[row_bytes],
            sides: &x_sides,
        };
        let boxes_of_weight = Boxes {
            address: weight.address(),
            dims: &[cols, 8, 2, len / 8],
            strides: &[row_bytes, len * row_bytes, 8 * row_bytes],
            sides: &weight_sides,
        };
        let boxes_of_out = Boxes {
            address: out.address(),
            dims: &[len, num_rows],
            strides: &[2 * len],
            sides: &kernel.kernel.out_box(),
        };
        let params = GatedGemmParams {
            x: boxes_of_x.map(),
            weight: boxes_of_weight.map(),
            out: boxes_of_out.plain_map(),
            num_rows: num_rows as u32,
            len: len as u32,
            cols: cols as u32,
            reserved: 0,
        };
        // SAFETY: memory is of the sizes that parameters say.
        unsafe { kernel.launch(&params, order) };
        for (m, row) in out.as_slice().chunks(len).enumerate() {
            for (n, found) in row.iter().map(|x| f64::from(*x)).enumerate() {
                let (right, lost) = gated(self, x.as_slice(), weight.as_slice(), m, n);
                assert!((found - right).abs() <= lost, "{m}, {n}: {found}, not {right}");
            }
        }
        Some((x_sides[1], 16 * weight_sides[3]))
    }
}

#[test]
fn tiles_of_all_sizes() {
    // Cut tiles along both, fewer columns than a ring has stages and more, one block and several.
    let case = |num_rows, len, cols, num_sms, seed| {
        let order = if seed == 0 { Order::InTurn } else { Order::Shuffled(seed) };
        Case { num_rows, len, cols, num_sms, order }
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
    }
}

/// More tiles than blocks, in more groups than one: the ring goes from a tile to the next.
#[test]
fn tiles_in_turn() {
    let order = Order::Shuffled(5);
    let case = Case { num_rows: 2100, len: 120, cols: 24, num_sms: 4, order };
    case.check();
    Case { num_rows: 300, len: 296, cols: 136, num_sms: 2, order: Order::Shuffled(6) }.check();
}
