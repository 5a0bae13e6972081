//! Products of many rows by a kernel for Hopper alone, which does SiLU as well.

use std::sync::Arc;

use cudarc::driver::sys::CUdeviceptr;
use inflight_kernels::ops::{
    fp8_quantize::fp8_row_bytes,
    gated_gemm::{GatedGemm, GatedGemmParams, GatedShape},
};

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

/// What a kernel multiplies.
struct Operands {
    x: CUdeviceptr,
    weight: CUdeviceptr,
    /// Of either.
    row_bytes: usize,
    x_scales: CUdeviceptr,
    scales: CUdeviceptr,
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
        is_gated && has_many_rows && is_whole && self.kernel((num_rows, n), weights).is_ok()
    }

    /// Loads what `product` needs: the same for all rows of a bucket.
    pub(super) fn load(&self, product: &Product) -> Result<Arc<Loaded<GatedGemm>>, BackendError> {
        let sides = (row_bucket(product.num_rows), product.n);
        let kernel = self.kernel(sides, WeightKind::of(product.weight))?;
        self.kernels.get(kernel, || self.loader.load(kernel))
    }

    /// Enqueues `product` and SiLU; of weights in fp8 x is `rounded` to codes and scales.
    pub(super) fn launch(
        &self,
        product: &Product,
        rounded: Option<(CUdeviceptr, CUdeviceptr)>,
        stream: &CudaStream,
    ) -> Result<(), BackendError> {
        let Next::Silu { out } = product.next else {
            return Err(lost("matmul", "a product that is not gated"));
        };
        let loaded = self.load(product)?;
        let kernel = loaded.kernel();
        let Product { num_rows, n, k, .. } = *product;
        let Operands { x, weight, row_bytes, x_scales, scales } = operands(product, rounded)?;
        let len = n / 2;
        let params = GatedGemmParams {
            x: tensor_map(&Boxes::of(x, &kernel.x_boxes(num_rows, row_bytes)))?,
            weight: tensor_map(&Boxes::of(weight, &kernel.weight_boxes(len, row_bytes)))?,
            out: plain_tensor_map(&Boxes::of(out, &kernel.out_boxes(num_rows, len)))?,
            x_scales,
            scales,
            num_rows: word(num_rows),
            len: word(len),
            cols: word(k),
            reserved: 0,
        };
        loaded.launch(&params, stream)
    }

    fn kernel(
        &self,
        (num_rows, n): (usize, usize),
        weights: WeightKind,
    ) -> Result<GatedGemm, BackendError> {
        let has_codes = match weights {
            WeightKind::Bf16 => false,
            WeightKind::Fp8 => true,
            WeightKind::Fp8Blocks => {
                return Err(BackendError::Unsupported(
                    "gated products with scales of blocks".into(),
                ));
            }
        };
        let num_rows = u32::try_from(num_rows).unwrap_or(u32::MAX);
        let shape = GatedShape { num_rows, len: word(n / 2), has_codes };
        GatedGemm::new(&self.loader.gpu, shape).map_err(unsupported)
    }
}

fn operands(
    product: &Product,
    rounded: Option<(CUdeviceptr, CUdeviceptr)>,
) -> Result<Operands, BackendError> {
    let Product { x, weight, k, .. } = *product;
    match (weight, rounded) {
        (MatrixPlace::Bf16(weight), None) => {
            Ok(Operands { x, weight, row_bytes: 2 * k, x_scales: 0, scales: 0 })
        }
        (MatrixPlace::Fp8 { codes: weight, scales, .. }, Some((x, x_scales))) => {
            Ok(Operands { x, weight, row_bytes: fp8_row_bytes(k), x_scales, scales })
        }
        _ => Err(lost("matmul", "x and weights of two types")),
    }
}
