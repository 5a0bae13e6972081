//! Products on Hopper: `hopper_gemm.cu`.

use half::bf16;
use inflight_kernels::{
    Arch, Gpu,
    ops::{
        fp8_quantize::{fp8_place, fp8_row_bytes},
        fp8_split::{Fp8Split, Fp8SplitParams, SplitRows},
        hopper_gemm::{HopperGemm, HopperGemmParams, HopperOp, HopperShape, HopperWeights},
    },
};

use crate::{
    attention::NULL,
    boxes::Boxes,
    emulator::{Emulated, Order},
    kv::e4m3,
    memory::{Dice, Memory},
};

/// Columns that share a scale.
const SCALED: usize = 128;

/// A product and the GPU that it is fitted to: little shared memory makes rings go round, few
/// multiprocessors few parts.
#[derive(Clone, Copy)]
struct Case {
    num_rows: usize,
    rows: usize,
    cols: usize,
    weights: HopperWeights,
    op: HopperOp,
    gpu: Gpu,
    order: Order,
}

const SMALL: Gpu = Gpu { num_sms: 16, smem_per_block: 80 << 10, ..Gpu::H200 };

/// Weights as a kernel takes them, and what they are.
pub(crate) struct Weights {
    pub(crate) codes: Memory<u8>,
    pub(crate) scales: Memory<f32>,
    pub(crate) numbers: Vec<f64>,
}

impl Weights {
    pub(crate) fn new(
        (rows, cols): (usize, usize),
        weights: HopperWeights,
        dice: &mut Dice,
    ) -> Self {
        if weights == HopperWeights::Bf16 {
            let numbers = dice.bf16s(rows * cols, 1.0);
            let bytes: Vec<u8> = numbers.iter().flat_map(|x| x.to_le_bytes()).collect();
            let numbers = numbers.iter().map(|x| f64::from(*x)).collect();
            return Self { codes: Memory::new(&bytes), scales: Memory::new(&[]), numbers };
        }
        let is_blocks = weights == HopperWeights::Fp8Blocks;
        let num_scales = if is_blocks { cols.div_ceil(SCALED) * rows } else { rows };
        let scales: Vec<f32> = (0..num_scales).map(|_| 1.5 + dice.number()).collect();
        let pitch = fp8_row_bytes(cols);
        let (mut codes, mut numbers) = (vec![0; rows * pitch], Vec::new());
        for (row, codes) in codes.chunks_mut(pitch).enumerate() {
            for col in 0..cols {
                // Of -1.75 to 1.75.
                let code = (dice.next() & 0xbf) as u8;
                codes[fp8_place(col)] = code;
                let block = if is_blocks { col / SCALED } else { 0 };
                numbers.push(e4m3(code) * f64::from(scales[block * rows + row]));
            }
        }
        Self { codes: Memory::new(&codes), scales: Memory::new(&scales), numbers }
    }
}

/// Rows that are multiplied, and as codes.
struct Rows {
    numbers: Memory<bf16>,
    codes: Codes,
}

/// As `fp8_split.cu` makes them.
struct Codes {
    codes: Memory<u8>,
    scales: Memory<f32>,
    num_rows: usize,
    padded_rows: usize,
}

impl Codes {
    fn new(num_rows: usize, padded_rows: usize, len: usize) -> Self {
        let codes = Memory::unwritten(2 * num_rows * fp8_row_bytes(len));
        let scales = Memory::unwritten(len.div_ceil(SCALED) * padded_rows);
        Self { codes, scales, num_rows, padded_rows }
    }

    fn address(&mut self) -> SplitRows {
        SplitRows {
            codes: self.codes.address(),
            scales: self.scales.address(),
            num_rows: self.num_rows as u32,
            padded_rows: self.padded_rows as u32,
        }
    }

    /// The number that codes stand for.
    fn number(&self, row: usize, col: usize, len: usize) -> f64 {
        let pitch = fp8_row_bytes(len);
        let at = row * pitch + fp8_place(col);
        let codes = self.codes.as_slice();
        let sum = e4m3(codes[at]) + e4m3(codes[self.num_rows * pitch + at]);
        sum * f64::from(self.scales.as_slice()[col / SCALED * self.padded_rows + row])
    }
}

impl Rows {
    fn new(case: &Case, dice: &mut Dice) -> Option<Self> {
        let Case { num_rows, cols, .. } = *case;
        let mut numbers = Memory::new(&dice.bf16s(num_rows * cols, 1.0));
        let padded = HopperGemm::padded_rows(num_rows as u32) as usize;
        let mut codes = Codes::new(num_rows, padded, cols);
        let split = Emulated::new(Fp8Split, Arch::SM_90A)?;
        let (x, to) = (numbers.address(), codes.address());
        // SAFETY: memory is of the sizes that parameters say.
        unsafe {
            split.launch(&Fp8SplitParams { x, to, len: cols as u32, reserved: 0 }, case.order)
        };
        Some(Self { numbers, codes })
    }
}

impl Case {
    fn kernel(&self) -> HopperGemm {
        let shape = HopperShape {
            num_rows: self.num_rows as u32,
            rows: self.rows as u32,
            cols: self.cols as u32,
            weights: self.weights,
        };
        HopperGemm::new(&self.gpu, shape, self.op).unwrap()
    }

    /// All but where results go.
    fn params(&self, kernel: &HopperGemm, w: &mut Weights, x: &mut Rows) -> HopperGemmParams {
        let Self { num_rows, rows, cols, .. } = *self;
        let is_bf16 = self.weights == HopperWeights::Bf16;
        let row_bytes = if is_bf16 { 2 * cols } else { fp8_row_bytes(cols) };
        let boxes = kernel.weight_boxes(rows, row_bytes);
        let num_dims = if is_bf16 { 2 } else { 3 };
        let of_x = Boxes {
            address: if is_bf16 { x.numbers.address() } else { x.codes.codes.address() },
            dims: &[row_bytes / 2, num_rows, 2][..num_dims],
            strides: &[row_bytes, num_rows * row_bytes][..num_dims - 1],
            sides: &[HopperGemm::BOX_COLS, kernel.x_box_rows(), 2][..num_dims],
        };
        HopperGemmParams {
            weight: Boxes::of(w.codes.address(), &boxes).map(),
            x: of_x.map(),
            bias: NULL,
            scales: w.scales.address(),
            x_scales: x.codes.scales.address(),
            out: NULL,
            split: SplitRows::default(),
            num_rows: num_rows as u32,
            rows: rows as u32,
            cols: cols as u32,
            reserved: 0,
        }
    }

    /// `x[m, :] . weight[n, :]`, and what of that may be lost: a part of what is added up, and what
    /// `fp8_split.cuh` says of small numbers beside others of up to 1.
    fn expected(&self, (w, x): (&Weights, &Rows), m: usize, n: usize) -> (f64, f64) {
        let of_codes = if self.weights == HopperWeights::Bf16 { 0.0 } else { 2_f64.powi(-17) };
        let x = &x.numbers.as_slice()[m * self.cols..][..self.cols];
        let w = &w.numbers[n * self.cols..][..self.cols];
        x.iter().zip(w).fold((0.0, 1e-6), |(sum, lost), (x, w)| {
            let x = f64::from(*x);
            let of_x = if x.abs() < 2_f64.powi(-9) { of_codes } else { 0.0 };
            (sum + x * w, lost + (x.abs() * 1e-6 + of_x) * w.abs())
        })
    }

    fn check(self) -> Option<()> {
        let mut dice = Dice::new((self.rows + self.cols) as u64);
        let kernel = Emulated::new(self.kernel(), Arch::SM_90A)?;
        let (mut w, mut x) = (
            Weights::new((self.rows, self.cols), self.weights, &mut dice),
            Rows::new(&self, &mut dice)?,
        );
        let params = self.params(&kernel.kernel, &mut w, &mut x);
        match self.op {
            HopperOp::Silu => self.check_silu(&kernel, params, (&w, &x), &mut dice),
            HopperOp::Parts | HopperOp::Sums => self.check_sums(&kernel, params, (&w, &x)),
        }
        Some(())
    }

    fn check_sums(
        &self,
        kernel: &Emulated<HopperGemm>,
        params: HopperGemmParams,
        operands: (&Weights, &Rows),
    ) {
        let Self { num_rows, rows, order, .. } = *self;
        let num_parts = kernel.kernel.num_parts() as usize;
        let mut out = Memory::<f32>::unwritten(num_parts * num_rows * rows);
        let params = HopperGemmParams { out: out.address(), ..params };
        // SAFETY: memory is of the sizes that parameters say.
        unsafe { kernel.launch(&params, order) };
        for at in 0..num_rows * rows {
            let parts = out.as_slice().chunks(num_rows * rows).map(|part| f64::from(part[at]));
            let (found, (m, n)) = (parts.sum::<f64>(), (at / rows, at % rows));
            let (sum, lost) = self.expected(operands, m, n);
            assert!((found - sum).abs() <= lost, "row {m}, column {n}: {found}, not {sum}");
        }
    }

    fn check_silu(
        &self,
        kernel: &Emulated<HopperGemm>,
        params: HopperGemmParams,
        operands: (&Weights, &Rows),
        dice: &mut Dice,
    ) {
        let Self { num_rows, rows, order, .. } = *self;
        let len = rows / 2;
        let mut bias = Memory::new(&dice.f32s(rows, 1.0));
        let mut out = Memory::<bf16>::unwritten(num_rows * len);
        let mut codes = Codes::new(num_rows, kernel.kernel.x_box_rows() as usize, len);
        let params = HopperGemmParams {
            bias: bias.address(),
            out: out.address(),
            split: codes.address(),
            ..params
        };
        // SAFETY: memory is of the sizes that parameters say.
        unsafe { kernel.launch(&params, order) };
        for (m, row) in out.as_slice().chunks(len).enumerate() {
            let greatest = row.iter().map(|x| f64::from(*x).abs()).fold(0.0, f64::max);
            for (n, found) in row.iter().map(|x| f64::from(*x)).enumerate() {
                let [(gate, gate_lost), (up, up_lost)] =
                    [n, len + n].map(|n| self.expected(operands, m, n));
                let (gate, up) = (
                    gate + f64::from(bias.as_slice()[n]),
                    up + f64::from(bias.as_slice()[len + n]),
                );
                let (expected, lost) = silu_and_mul((gate, gate_lost), (up, up_lost));
                assert!((found - expected).abs() <= lost, "{m}, {n}: {found}, not {expected}");
                if kernel.kernel.leaves_codes() {
                    // Of small ones some is lost.
                    let off = (codes.number(m, n, len) - found).abs();
                    assert!(off <= greatest * 2_f64.powi(-17), "codes of {m}, {n}: off by {off}");
                }
            }
        }
    }
}

/// `silu(gate) * up` of sums and what of them may be lost, and that of an output of bf16.
pub(crate) fn silu_and_mul((gate, gate_lost): (f64, f64), (up, up_lost): (f64, f64)) -> (f64, f64) {
    let expected = gate / (1.0 + (-gate).exp()) * up;
    (expected, expected.abs() / 250.0 + gate_lost * up.abs() + up_lost * gate.abs())
}

const BF16: Case = Case {
    num_rows: 5,
    rows: 200,
    cols: 328,
    weights: HopperWeights::Bf16,
    op: HopperOp::Parts,
    gpu: SMALL,
    order: Order::InTurn,
};

#[test]
fn parts_of_bf16() {
    let Some(()) = BF16.check() else { return };
    Case { order: Order::Shuffled(1), ..BF16 }.check();
    // No parts: the ring goes round. And one with more parts than columns to divide evenly.
    let one = Gpu { num_sms: 1, ..SMALL };
    Case { gpu: one, order: Order::Shuffled(2), ..BF16 }.check();
    Case { num_rows: 33, rows: 72, cols: 200, order: Order::Shuffled(3), ..BF16 }.check();
}

#[test]
fn silu_of_bf16() {
    let silu = Case { op: HopperOp::Silu, num_rows: 8, rows: 336, ..BF16 };
    let Some(()) = silu.check() else { return };
    Case { num_rows: 32, order: Order::Shuffled(4), ..silu }.check();
    // Few rows of weights in the last tile, and twice as many of x as are stored at once.
    Case { num_rows: 33, rows: 272, cols: 72, order: Order::Shuffled(10), ..silu }.check();
}

/// Codes, with scales of rows and of blocks of columns.
const FP8: [HopperWeights; 2] = [HopperWeights::Fp8, HopperWeights::Fp8Blocks];

#[test]
fn parts_of_fp8() {
    for (weights, seed) in FP8.into_iter().zip(5..) {
        let parts = Case { weights, order: Order::Shuffled(seed), ..BF16 };
        let Some(()) = parts.check() else { return };
        Case { num_rows: 20, gpu: Gpu { num_sms: 1, ..SMALL }, ..parts }.check();
    }
    // One kind of codes after the other.
    Case { weights: FP8[0], num_rows: 40, rows: 72, ..BF16 }.check();
}

#[test]
fn silu_of_fp8() {
    for (weights, seed) in FP8.into_iter().zip(7..) {
        // Cut tiles, and whole ones that are left as codes.
        let silu = Case { weights, op: HopperOp::Silu, order: Order::Shuffled(seed), ..BF16 };
        let Some(()) = (Case { rows: 336, ..silu }).check() else { return };
        let gpu = Gpu { num_sms: 3, smem_per_block: 112 << 10, ..SMALL };
        let split = Case { num_rows: 20, rows: 512, gpu, ..silu };
        assert!(split.kernel().leaves_codes());
        split.check();
    }
}

#[test]
fn sums_of_tiles_in_turn() {
    let gpu = Gpu { num_sms: 2, smem_per_block: 112 << 10, ..SMALL };
    let sums = Case { weights: FP8[0], op: HopperOp::Sums, rows: 632, gpu, ..BF16 };
    let Some(()) = sums.check() else { return };
    // Fewer columns than the ring has stages.
    let order = Order::Shuffled(9);
    Case { num_rows: 12, cols: 136, weights: FP8[1], order, ..sums }.check();
}
