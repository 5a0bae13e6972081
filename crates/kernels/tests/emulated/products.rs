//! Products of few rows: `gemv.cu`, `fp8_gemv.cu`.

use half::bf16;
use inflight_kernels::{
    Arch, Element, Kernel,
    ops::{
        fp8_gemv::{Fp8Gemv, Fp8GemvParams},
        fp8_quantize::{fp8_place, fp8_row_bytes},
        gemv::{Gemv, GemvParams},
    },
};

use crate::{
    attention::NULL,
    emulator::{Emulated, Order},
    kv::e4m3,
    memory::{Dice, Memory},
};

/// A product's inputs: `weight` is `[rows, cols]` as numbers.
pub(crate) struct Product {
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    pub(crate) x: Vec<bf16>,
    pub(crate) weight: Vec<f64>,
    pub(crate) bias: Option<Vec<f32>>,
    /// What is added to.
    pub(crate) before: Option<Vec<f32>>,
}

impl Product {
    fn num_rows(&self) -> usize {
        self.x.len() / self.cols
    }

    /// Compares the output, whose rounding is off by `rounding` times itself.
    pub(crate) fn check(&self, found: &[f64], rounding: f64) {
        for (at, found) in found.iter().enumerate() {
            let (row, of_weight) = (at / self.rows, at % self.rows);
            let x = &self.x[row * self.cols..][..self.cols];
            let weight = &self.weight[of_weight * self.cols..][..self.cols];
            let products = || x.iter().zip(weight).map(|(x, w)| f64::from(*x) * w);
            let bias = self.bias.as_ref().map_or(0.0, |bias| bias[of_weight].into());
            let before = self.before.as_ref().map_or(0.0, |before| before[at].into());
            let right = products().sum::<f64>() + bias + before;
            // Sums of f32 in any order.
            let magnitude = products().map(f64::abs).sum::<f64>() + bias.abs() + before.abs();
            let allowed = 1e-6 * magnitude + rounding * right.abs();
            let what = [row, of_weight, self.rows, self.cols];
            assert!((found - right).abs() <= allowed, "{what:?}: {found}, not {right}");
        }
    }
}

/// Of the output, in either type: what it holds before, and after.
pub(crate) struct Output {
    f32s: Memory<f32>,
    bf16s: Memory<bf16>,
    out: Element,
}

impl Output {
    pub(crate) fn new(out: Element, len: usize, before: Option<&[f32]>) -> Self {
        let mut output = Self { f32s: Memory::unwritten(len), bf16s: Memory::unwritten(len), out };
        if let Some(before) = before {
            output.f32s.as_mut_slice().copy_from_slice(before);
        }
        output
    }

    pub(crate) fn address(&mut self) -> u64 {
        match self.out {
            Element::F32 => self.f32s.address(),
            Element::Bf16 => self.bf16s.address(),
        }
    }

    pub(crate) fn numbers(&self) -> Vec<f64> {
        match self.out {
            Element::F32 => self.f32s.as_slice().iter().map(|x| f64::from(*x)).collect(),
            Element::Bf16 => self.bf16s.as_slice().iter().map(|x| f64::from(*x)).collect(),
        }
    }

    pub(crate) fn rounding(&self) -> f64 {
        if self.out == Element::F32 { 0.0 } else { 1.01 / 256.0 }
    }
}

fn run<K: Kernel>(kernel: K, params: &K::Params) -> Option<()> {
    let kernel = Emulated::new(kernel, Arch::SM_90A)?;
    // SAFETY: the tests below give memory of the sizes that parameters say.
    unsafe { kernel.launch(params, Order::Shuffled(1)) };
    Some(())
}

pub(crate) fn optional(memory: Option<&mut Memory<f32>>) -> u64 {
    memory.map_or(NULL, Memory::address)
}

#[test]
fn gemv() {
    // Less than a step, not of whole steps, and around the ring; rows that warps do not fill.
    for (num_rows, out, rows, cols) in [
        (1, Element::Bf16, 1, 8),
        (1, Element::Bf16, 37, 264),
        (1, Element::Bf16, 16, 4104),
        (3, Element::F32, 37, 1536),
        (3, Element::F32, 5, 1544),
        (4, Element::F32, 19, 2056),
    ] {
        let adds = out == Element::F32;
        let mut dice = Dice::new(51);
        let x = dice.bf16s(num_rows * cols, 1.0);
        let numbers = dice.bf16s(rows * cols, 1.0);
        let bias = (num_rows != 3).then(|| dice.f32s(rows, 1.0));
        let before = adds.then(|| dice.f32s(num_rows * rows, 1.0));
        let weight = numbers.iter().map(|x| f64::from(*x)).collect();
        let product = Product { rows, cols, x, weight, bias, before };
        let (mut x, mut weight) = (Memory::new(&product.x), Memory::new(&numbers));
        let mut bias = product.bias.as_ref().map(|bias| Memory::new(bias));
        let mut output = Output::new(out, num_rows * rows, product.before.as_deref());
        let params = GemvParams {
            x: x.address(),
            weight: weight.address(),
            bias: optional(bias.as_mut()),
            out: output.address(),
            rows: rows as u32,
            cols: cols as u32,
        };
        let Some(()) = run(Gemv::new(num_rows as u32, out, adds).unwrap(), &params) else {
            return;
        };
        product.check(&output.numbers(), output.rounding());
    }
}

/// Weights as codes: what lies behind a row's end is 0.
struct CodedWeights {
    codes: Memory<u8>,
    scales: Memory<f32>,
    numbers: Vec<f64>,
}

impl CodedWeights {
    fn new(rows: usize, cols: usize, has_blocks: bool, dice: &mut Dice) -> Self {
        let mut codes = vec![0; rows * fp8_row_bytes(cols)];
        let num_scales = if has_blocks { cols.div_ceil(128) * rows } else { rows };
        let scales = dice.f32s(num_scales, 0.01);
        let mut numbers = Vec::new();
        for (row, codes) in codes.chunks_mut(fp8_row_bytes(cols)).enumerate() {
            for col in 0..cols {
                let code = match dice.next() as u8 {
                    0x7f | 0xff => 0x38, // No numbers.
                    code => code,
                };
                codes[fp8_place(col)] = code;
                let scale = if has_blocks { scales[col / 128 * rows + row] } else { scales[row] };
                numbers.push(e4m3(code) * f64::from(scale));
            }
        }
        Self { codes: Memory::new(&codes), scales: Memory::new(&scales), numbers }
    }
}

/// The product; `None` without a C++ compiler.
fn fp8_gemv(
    kernel: Fp8Gemv,
    product: &Product,
    codes: &mut Memory<u8>,
    scales: &mut Memory<f32>,
) -> Option<Output> {
    let mut x = Memory::new(&product.x);
    let mut bias = product.bias.as_ref().map(|bias| Memory::new(bias));
    let len = product.num_rows() * product.rows;
    let mut output = Output::new(kernel.out, len, product.before.as_deref());
    let params = Fp8GemvParams {
        x: x.address(),
        codes: codes.address(),
        scales: scales.address(),
        bias: optional(bias.as_mut()),
        out: output.address(),
        num_rows: product.num_rows() as u32,
        rows: product.rows as u32,
        cols: product.cols as u32,
        reserved: 0,
    };
    run(kernel, &params)?;
    Some(output)
}

#[test]
fn fp8_gemv_of_one_row_and_of_more() {
    // Less than a group, not of whole blocks, and more than a warp has under way.
    let shapes = [(1, 8), (40, 72), (37, 200), (16, 2120)];
    let kernels = [(Element::Bf16, false), (Element::F32, true)];
    for (out, blocks) in kernels {
        let kernel = Fp8Gemv { out, accumulate: blocks, blocks };
        for (rows, cols) in shapes {
            let mut dice = Dice::new(52);
            let CodedWeights { mut codes, mut scales, numbers } =
                CodedWeights::new(rows, cols, blocks, &mut dice);
            let x = dice.bf16s(8 * cols, 1.0);
            let bias = (rows != 40).then(|| dice.f32s(rows, 1.0));
            let before = kernel.accumulate.then(|| dice.f32s(8 * rows, 1.0));
            let mut first = None;
            for num_rows in [8, 1, 5] {
                let product = Product {
                    rows,
                    cols,
                    x: x[..num_rows * cols].to_vec(),
                    weight: numbers.clone(),
                    bias: bias.clone(),
                    before: before.as_ref().map(|before| before[..num_rows * rows].to_vec()),
                };
                let output = fp8_gemv(kernel, &product, &mut codes, &mut scales);
                let Some(output) = output else { return };
                let found = output.numbers();
                product.check(&found, output.rounding());
                // A row's sums have the same order whatever the number of rows is.
                let of_all = first.get_or_insert_with(|| found.clone());
                assert_eq!(found, of_all[..num_rows * rows]);
            }
        }
    }
}
