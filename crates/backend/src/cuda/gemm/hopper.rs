//! Products of few rows that do what comes next as well, by kernels for Hopper alone.

use std::sync::Arc;

use inflight_kernels::{
    TensorMap,
    ops::{
        add_norm::{AddNorm, AddNormParams},
        hopper_gemm::{HopperGemm, HopperGemmParams, HopperOp, HopperShape},
    },
};

use super::{
    Next, Norm, Problem, Product,
    problem::{NextKind, WeightKind},
    word,
};
use crate::{
    BackendError,
    cuda::{
        by_key::ByKey,
        check::lost,
        loaded::{KernelLoader, Loaded, unsupported},
        stream::{CudaStream, WORKSPACE_BYTES},
        tensor_map::{Boxes, tensor_map},
        weights::MatrixPlace,
    },
};

/// The kernels that were needed so far.
pub(super) struct HopperGemms {
    loader: Arc<KernelLoader>,
    gemms: ByKey<HopperGemm, Loaded<HopperGemm>>,
    add_norm: ByKey<(), Loaded<AddNorm>>,
}

impl HopperGemms {
    pub(super) fn new(loader: &Arc<KernelLoader>) -> Self {
        let (gemms, add_norm) = (ByKey::default(), ByKey::default());
        Self { loader: Arc::clone(loader), gemms, add_norm }
    }

    /// Whether there is a kernel for this product and what comes next.
    pub(super) fn takes(&self, problem: Problem) -> bool {
        let Problem { num_rows, n, k, f32_out, accumulate, .. } = problem;
        if problem.weights != WeightKind::Bf16 {
            return false;
        }
        let op = match problem.next {
            NextKind::Nothing => return false,
            NextKind::Silu if n.is_multiple_of(16) && !accumulate => HopperOp::Silu,
            NextKind::Norm if f32_out && accumulate => HopperOp::Parts,
            NextKind::Silu | NextKind::Norm => return false,
        };
        let Ok(kernel) = self.kernel((num_rows, n, k), op) else { return false };
        let parts_bytes = kernel.num_parts() as usize * num_rows * n * size_of::<f32>();
        let adds = parts_bytes <= WORKSPACE_BYTES && AddNorm::check_len(word(n)).is_ok();
        (op == HopperOp::Silu || adds) && n.is_multiple_of(8) && k.is_multiple_of(8)
    }

    /// Loads what `product` and what comes next need.
    pub(super) fn load(&self, product: &Product) -> Result<(), BackendError> {
        let op = match product.next {
            Next::Norm(_) => HopperOp::Parts,
            Next::Nothing | Next::Silu { .. } => HopperOp::Silu,
        };
        self.loaded(product, op)?;
        self.add_norm().map(drop)
    }

    /// Enqueues `product` and what comes next.
    pub(super) fn launch(
        &self,
        product: &Product,
        stream: &CudaStream,
    ) -> Result<(), BackendError> {
        match product.next {
            Next::Nothing => Err(lost("matmul", "nothing comes next")),
            Next::Silu { out } => self.multiply(product, HopperOp::Silu, out, stream).map(drop),
            Next::Norm(norm) => self.add_and_norm(product, norm, stream),
        }
    }

    /// `out += x * weight^T (+ bias)`, and its norm.
    fn add_and_norm(
        &self,
        product: &Product,
        norm: Norm,
        stream: &CudaStream,
    ) -> Result<(), BackendError> {
        let parts = stream.workspace()?.address();
        let num_parts = self.multiply(product, HopperOp::Parts, parts, stream)?;
        let params = AddNormParams {
            x: product.out,
            parts,
            bias: product.bias.map_or(0, |bias| bias.f32),
            weight: norm.weight,
            out: norm.out,
            num_rows: word(product.num_rows),
            num_parts,
            len: word(product.n),
            eps: norm.eps,
        };
        self.add_norm()?.launch(&params, stream)
    }

    /// Enqueues the product alone; how many parts its sums are in.
    fn multiply(
        &self,
        product: &Product,
        op: HopperOp,
        out: u64,
        stream: &CudaStream,
    ) -> Result<u32, BackendError> {
        let loaded = self.loaded(product, op)?;
        let kernel = loaded.kernel();
        let Product { x, num_rows, n, k, .. } = *product;
        let MatrixPlace::Bf16(weight) = product.weight else {
            return Err(lost("matmul", "the weights are not in bf16"));
        };
        let params = HopperGemmParams {
            weight: matrix_map(weight, (n, k), kernel.weight_box_rows())?,
            x: matrix_map(x, (num_rows, k), kernel.x_box_rows())?,
            bias: product.bias.map_or(0, |bias| bias.f32),
            out,
            num_rows: word(num_rows),
            rows: word(n),
            cols: word(k),
            reserved: 0,
        };
        loaded.launch(&params, stream)?;
        Ok(kernel.num_parts())
    }

    fn loaded(
        &self,
        product: &Product,
        op: HopperOp,
    ) -> Result<Arc<Loaded<HopperGemm>>, BackendError> {
        let kernel = self.kernel((product.num_rows, product.n, product.k), op)?;
        self.gemms.get(kernel, || self.loader.load(kernel))
    }

    fn add_norm(&self) -> Result<Arc<Loaded<AddNorm>>, BackendError> {
        self.add_norm.get((), || self.loader.load(AddNorm))
    }

    fn kernel(
        &self,
        (num_rows, n, k): (usize, usize, usize),
        op: HopperOp,
    ) -> Result<HopperGemm, BackendError> {
        let num_rows = u32::try_from(num_rows).unwrap_or(u32::MAX);
        let shape = HopperShape { num_rows, rows: word(n), cols: word(k) };
        HopperGemm::new(&self.loader.gpu, shape, op).map_err(unsupported)
    }
}

/// Boxes of a matrix of bf16.
fn matrix_map(
    address: u64,
    (rows, cols): (usize, usize),
    box_rows: u32,
) -> Result<TensorMap, BackendError> {
    tensor_map(&Boxes {
        address,
        dims: &[cols, rows],
        strides: &[2 * cols],
        sides: &[HopperGemm::BOX_COLS, box_rows],
    })
}
