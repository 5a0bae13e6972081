//! `flat_gemm.cu`: products that clusters of blocks share.

use half::bf16;
use inflight_kernels::{
    Arch, Element, Gpu,
    ops::flat_gemm::{FlatGemm, FlatGemmParams, FlatShape, Ring},
};

use crate::{
    attention::NULL,
    emulator::{Emulated, Order},
    memory::{Dice, Memory, Plain},
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

    /// `rounded`: a part of a result that rounding may change.
    fn check<T: Plain + Into<f64>>(
        &self,
        out: Element,
        before: Vec<T>,
        rounded: f64,
    ) -> Option<()> {
        let Self { num_rows, rows, cols, .. } = *self;
        let mut dice = Dice::new(31);
        let kernel = Emulated::new(self.kernel(out), Arch::SM_90A)?;
        let mut x = Memory::new(&dice.bf16s(num_rows * cols, 1.0));
        let mut weight = Memory::new(&dice.bf16s(rows * cols, 1.0));
        let mut bias = Memory::new(&dice.f32s(rows, 1.0));
        let mut out = Memory::new(&before);
        let params = FlatGemmParams {
            x: x.address(),
            weight: weight.address(),
            bias: if self.has_bias { bias.address() } else { NULL },
            out: out.address(),
            num_rows: num_rows as u32,
            rows: rows as u32,
            cols: cols as u32,
        };
        // SAFETY: memory is of the sizes that parameters say.
        unsafe { kernel.launch(&params, self.order) };
        for (at, found) in out.as_slice().iter().enumerate() {
            let (m, n) = (at / rows, at % rows);
            let x = x.as_slice()[m * cols..][..cols].iter().map(|x| f64::from(*x));
            let w = weight.as_slice()[n * cols..][..cols].iter().map(|w| f64::from(*w));
            let bias = if self.has_bias { bias.as_slice()[n].into() } else { 0.0 };
            let before = if self.accumulate { before[at].into() } else { 0.0 };
            let (sum, size) = x.zip(w).fold((bias + before, 1.0), |(sum, size), (x, w)| {
                (sum + x * w, size + (x * w).abs())
            });
            let found: f64 = (*found).into();
            let lost = size * 1e-6 + sum.abs() * rounded;
            assert!((found - sum).abs() <= lost, "row {m}, column {n}: {found}, not {sum}");
        }
        Some(())
    }

    fn check_both(&self) -> Option<()> {
        let before = Dice::new(32).f32s(self.num_rows * self.rows, 8.0);
        let short: Vec<bf16> = before.iter().map(|x| bf16::from_f32(*x)).collect();
        self.check(Element::Bf16, short, 1.01 / 256.0)?;
        self.check(Element::F32, before, 0.0)
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
    let Some(()) = case.check_both() else { return };
    Case { num_rows: 20, order: Order::Shuffled(1), accumulate: true, ..case }.check_both();
    let alone = Case { shares: false, has_bias: false, ..case };
    Case { num_rows: 9, order: Order::Shuffled(2), ..alone }.check_both();
    // Fewer columns than a cluster's blocks could take.
    Case { cols: 72, order: Order::Shuffled(3), ..case }.check_both();
}
