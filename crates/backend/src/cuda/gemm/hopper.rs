//! Products of few rows that do what comes next as well, by kernels for Hopper alone.

use std::sync::Arc;

use inflight_kernels::{
    TensorMap,
    ops::{
        add_norm::{AddNorm, AddNormParams},
        hopper_gemm::{HopperGemm, HopperGemmParams, HopperOp, HopperShape},
    },
};

use super::{Product, word};
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

/// The norm of what was added to.
#[derive(Clone, Copy, Debug)]
pub(in crate::cuda) struct Norm {
    /// `[n]`, f32.
    pub(in crate::cuda) weight: u64,
    /// `[num_rows, n]`, bf16.
    pub(in crate::cuda) out: u64,
    pub(in crate::cuda) eps: f32,
}

impl HopperGemms {
    pub(super) fn new(loader: &Arc<KernelLoader>) -> Self {
        let (gemms, add_norm) = (ByKey::default(), ByKey::default());
        Self { loader: Arc::clone(loader), gemms, add_norm }
    }

    /// Whether `op` of this product is worth it and possible.
    pub(super) fn takes(&self, product: &Product, op: HopperOp) -> bool {
        let MatrixPlace::Bf16(_) = product.weight else { return false };
        let fits = match self.kernel(product, op) {
            Ok(kernel) => match op {
                HopperOp::Silu => product.n.is_multiple_of(16),
                HopperOp::Parts => {
                    let bytes = kernel.num_parts() as usize * product.num_rows * product.n * 4;
                    bytes <= WORKSPACE_BYTES && AddNorm::check_len(word(product.n)).is_ok()
                }
            },
            Err(_) => false,
        };
        fits && product.n.is_multiple_of(8) && product.k.is_multiple_of(8)
    }

    /// `out = silu(a) * b` of the halves of `x * weight^T (+ bias)`, `[num_rows, n / 2]`.
    pub(super) fn gated(&self, product: &Product, stream: &CudaStream) -> Result<(), BackendError> {
        self.launch(product, HopperOp::Silu, product.out, stream).map(drop)
    }

    /// `out += x * weight^T (+ bias)`, and its norm if asked for.
    pub(super) fn add_norm(
        &self,
        product: &Product,
        norm: Option<Norm>,
        stream: &CudaStream,
    ) -> Result<(), BackendError> {
        let parts = stream.workspace()?.address();
        let num_parts = self.launch(product, HopperOp::Parts, parts, stream)?;
        let params = AddNormParams {
            x: product.out,
            parts,
            bias: product.bias.map_or(0, |bias| bias.f32),
            weight: norm.map_or(0, |norm| norm.weight),
            out: norm.map_or(0, |norm| norm.out),
            num_rows: word(product.num_rows),
            num_parts,
            len: word(product.n),
            eps: norm.map_or(0.0, |norm| norm.eps),
        };
        let add_norm = self.add_norm.get((), || self.loader.load(AddNorm))?;
        add_norm.launch(&params, stream)
    }

    /// Enqueues the product alone; how many parts its sums are in.
    fn launch(
        &self,
        product: &Product,
        op: HopperOp,
        out: u64,
        stream: &CudaStream,
    ) -> Result<u32, BackendError> {
        let kernel = self.kernel(product, op)?;
        let loaded = self.gemms.get(kernel, || self.loader.load(kernel))?;
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

    fn kernel(&self, product: &Product, op: HopperOp) -> Result<HopperGemm, BackendError> {
        let Product { num_rows, n, k, .. } = *product;
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
