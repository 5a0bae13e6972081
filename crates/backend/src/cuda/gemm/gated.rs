//! Products of many rows by a kernel for Hopper alone, which does SiLU as well.

use std::sync::Arc;

use inflight_kernels::ops::gated_gemm::{GatedGemm, GatedGemmParams};

use super::{
    Next, Problem, Product,
    problem::{NextKind, WeightKind, row_bucket},
    word,
};
use crate::{
    BackendError,
    cuda::{
        by_key::ByKey,
        check::lost,
        loaded::{KernelLoader, Loaded, unsupported},
        stream::CudaStream,
        tensor_map::{Boxes, plain_tensor_map, tensor_map},
        weights::MatrixPlace,
    },
};

/// The kernels that were needed so far.
pub(super) struct GatedGemms {
    loader: Arc<KernelLoader>,
    kernels: ByKey<GatedGemm, Loaded<GatedGemm>>,
}

impl GatedGemms {
    pub(super) fn new(loader: &Arc<KernelLoader>) -> Self {
        Self { loader: Arc::clone(loader), kernels: <_>::default() }
    }

    /// Whether there is a kernel for this product and what comes next.
    pub(super) fn takes(&self, problem: Problem) -> bool {
        let Problem { num_rows, n, k, bias, accumulate, weights, next, .. } = problem;
        let is_gated = next == NextKind::Silu && !bias && !accumulate;
        let has_many_rows = num_rows >= GatedGemm::MIN_ROWS as usize;
        let is_whole = n.is_multiple_of(2) && k.is_multiple_of(8);
        is_gated
            && has_many_rows
            && is_whole
            && weights == WeightKind::Bf16
            && self.kernel(num_rows, n).is_ok()
    }

    /// Loads what `product` needs: the same for all rows of a bucket.
    pub(super) fn load(&self, product: &Product) -> Result<Arc<Loaded<GatedGemm>>, BackendError> {
        let kernel = self.kernel(row_bucket(product.num_rows), product.n)?;
        self.kernels.get(kernel, || self.loader.load(kernel))
    }

    /// Enqueues `product` and SiLU.
    pub(super) fn launch(
        &self,
        product: &Product,
        stream: &CudaStream,
    ) -> Result<(), BackendError> {
        let (Next::Silu { out }, MatrixPlace::Bf16(weight)) = (product.next, product.weight) else {
            return Err(lost("matmul", "a product that is not gated"));
        };
        let loaded = self.load(product)?;
        let kernel = loaded.kernel();
        let Product { x, num_rows, n, k, .. } = *product;
        let (len, row_bytes) = (n / 2, 2 * k);
        let params = GatedGemmParams {
            x: tensor_map(&Boxes {
                address: x,
                dims: &[k, num_rows],
                strides: &[row_bytes],
                sides: &[GatedGemm::BOX_COLS, kernel.x_box_rows()],
            })?,
            weight: tensor_map(&Boxes {
                address: weight,
                dims: &[k, 8, 2, len / 8],
                strides: &[row_bytes, len * row_bytes, 8 * row_bytes],
                sides: &kernel.weight_box(),
            })?,
            out: plain_tensor_map(&Boxes {
                address: out,
                dims: &[len, num_rows],
                strides: &[2 * len],
                sides: &kernel.out_box(),
            })?,
            num_rows: word(num_rows),
            len: word(len),
            cols: word(k),
            reserved: 0,
        };
        loaded.launch(&params, stream)
    }

    fn kernel(&self, num_rows: usize, n: usize) -> Result<GatedGemm, BackendError> {
        let num_rows = u32::try_from(num_rows).unwrap_or(u32::MAX);
        GatedGemm::new(&self.loader.gpu, num_rows, word(n / 2)).map_err(unsupported)
    }
}
