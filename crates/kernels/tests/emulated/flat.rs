//! `flat_gemm.cu`: products that clusters of blocks share.

use inflight_kernels::{
    Arch, Element, Gpu,
    ops::flat_gemm::{FlatGemm, FlatGemmParams, FlatShape, Ring},
};

use crate::{
    emulator::{Emulated, Order},
    memory::{Dice, Memory},
    products::{Output, Product, optional},
};

#[derive(Clone, Copy)]
struct Case {
    num_rows: usize,
    rows: usize,
    cols: usize,
    accumulate: bool,
    has_bias: bool,
    /// Whether two blocks share a tile.
    shares: bool,
    order: Order,
}

impl Case {
    fn kernel(&self, out: Element) -> FlatGemm {
        // Room for three or four stages.
        let num_sms = if self.shares { 132 } else { 1 };
        let gpu = Gpu { num_sms, smem_per_block: 75 << 10, ..Gpu::H200 };
        let shape = FlatShape {
            num_rows: self.num_rows as u32,
            rows: self.rows as u32,
            out,
            accumulate: self.accumulate,
        };
        FlatGemm::new(&gpu, shape, Ring::Whole).unwrap()
    }

    fn check_of(&self, out: Element) -> Option<()> {
        let Self { num_rows, rows, cols, order, .. } = *self;
        let mut dice = Dice::new(31);
        let kernel = Emulated::new(self.kernel(out), Arch::SM_90A)?;
        let x = dice.bf16s(num_rows * cols, 1.0);
        let numbers = dice.bf16s(rows * cols, 1.0);
        let bias = self.has_bias.then(|| dice.f32s(rows, 1.0));
        let before = self.accumulate.then(|| dice.f32s(num_rows * rows, 8.0));
        let weight = numbers.iter().map(|x| f64::from(*x)).collect();
        let product = Product { rows, cols, x, weight, bias, before };
        let (mut x, mut weight) = (Memory::new(&product.x), Memory::new(&numbers));
        let mut bias = product.bias.as_ref().map(|bias| Memory::new(bias));
        let mut output = Output::new(out, num_rows * rows, product.before.as_deref());
        let params = FlatGemmParams {
            x: x.address(),
            weight: weight.address(),
            bias: optional(bias.as_mut()),
            out: output.address(),
            num_rows: num_rows as u32,
            rows: rows as u32,
            cols: cols as u32,
        };
        // SAFETY: memory is of the sizes that parameters say.
        unsafe { kernel.launch(&params, order) };
        product.check(&output.numbers(), output.rounding());
        Some(())
    }

    fn check(&self) -> Option<()> {
        // What is added to is f32 in the loop.
        if !self.accumulate {
            self.check_of(Element::Bf16)?;
        }
        self.check_of(Element::F32)
    }
}

#[test]
fn tiles_of_clusters_and_of_one_block() {
    let case = Case {
        num_rows: 5,
        rows: 136,
        cols: 1000,
        accumulate: false,
        has_bias: true,
        shares: true,
        order: Order::InTurn,
    };
    let Some(()) = case.check() else { return };
    Case { num_rows: 20, order: Order::Shuffled(1), accumulate: true, ..case }.check();
    let alone = Case { shares: false, has_bias: false, ..case };
    Case { num_rows: 9, order: Order::Shuffled(2), ..alone }.check();
    // Fewer columns than a cluster's blocks could take.
    Case { cols: 72, order: Order::Shuffled(3), ..case }.check();
}
