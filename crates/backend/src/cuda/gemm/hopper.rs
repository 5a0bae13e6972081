//! Products of few rows by kernels for Hopper alone, which do what comes next as well; with weights
//! in fp8 also where nothing does.

use std::sync::Arc;

use inflight_kernels::{
    TensorMap,
    ops::{
        add_norm::{AddNorm, AddNormParams},
        fp8_quantize::fp8_row_bytes,
        hopper_gemm::{HopperGemm, HopperGemmParams, HopperOp, HopperShape, HopperWeights},
        sum_parts::{SumParts, SumPartsParams},
    },
};

use super::{
    Next, Norm, Parts, Problem, Product,
    problem::{NextKind, WeightKind},
    word,
};
use crate::{
    BackendError,
    cuda::{
        by_key::ByKey,
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
    sum_parts: ByKey<(), Loaded<SumParts>>,
}

impl HopperGemms {
    pub(super) fn new(loader: &Arc<KernelLoader>) -> Self {
        let (gemms, add_norm, sum_parts) = <_>::default();
        Self { loader: Arc::clone(loader), gemms, add_norm, sum_parts }
    }

    /// Whether there is a kernel for this product and what comes next.
    pub(super) fn takes(&self, problem: Problem) -> bool {
        let Problem { num_rows, n, k, f32_out, accumulate, weights, .. } = problem;
        let op = match problem.next {
            // Parts become activations, or are added to the state.
            NextKind::Nothing if weights == WeightKind::Bf16 || accumulate != f32_out => {
                return false;
            }
            NextKind::Nothing if accumulate || n.is_multiple_of(16) => HopperOp::Parts,
            NextKind::Silu if n.is_multiple_of(16) && !accumulate => HopperOp::Silu,
            NextKind::Norm if f32_out && accumulate => HopperOp::Parts,
            NextKind::Rope if n.is_multiple_of(16) && !accumulate && !f32_out => HopperOp::Parts,
            NextKind::Nothing | NextKind::Silu | NextKind::Norm | NextKind::Rope => return false,
        };
        let Ok(kernel) = self.kernel((num_rows, n, k), weights, op) else { return false };
        let parts_bytes = kernel.num_parts() as usize * num_rows * n * size_of::<f32>();
        let sums =
            parts_bytes <= WORKSPACE_BYTES && (!accumulate || AddNorm::check_len(word(n)).is_ok());
        (op == HopperOp::Silu || sums) && n.is_multiple_of(8) && k.is_multiple_of(8)
    }

    /// Loads what `product` and what comes next need.
    pub(super) fn load(&self, product: &Product) -> Result<(), BackendError> {
        match product.next {
            Next::Silu { .. } => self.loaded(product, HopperOp::Silu).map(drop),
            Next::Nothing | Next::Rope if !product.accumulate => {
                self.loaded(product, HopperOp::Parts)?;
                self.sum_parts().map(drop)
            }
            Next::Nothing | Next::Rope | Next::Norm(_) => {
                self.loaded(product, HopperOp::Parts)?;
                self.add_norm().map(drop)
            }
        }
    }

    /// Enqueues `product` and what comes next.
    pub(super) fn launch(
        &self,
        product: &Product,
        stream: &CudaStream,
    ) -> Result<(), BackendError> {
        match product.next {
            Next::Rope => {
                let parts = stream.workspace()?.address();
                self.multiply(product, HopperOp::Parts, parts, stream).map(drop)
            }
            Next::Nothing if !product.accumulate => {
                let parts = stream.workspace()?.address();
                self.multiply(product, HopperOp::Parts, parts, stream)?;
                self.sum(product, stream)
            }
            Next::Nothing => self.add(product, None, stream),
            Next::Silu { out } => self.multiply(product, HopperOp::Silu, out, stream).map(drop),
            Next::Norm(norm) => self.add(product, Some(norm), stream),
        }
    }

    /// Where the parts of an enqueued product are.
    pub(super) fn parts(
        &self,
        product: &Product,
        stream: &CudaStream,
    ) -> Result<Parts, BackendError> {
        Ok(Parts {
            address: stream.workspace()?.address(),
            num_parts: self.loaded(product, HopperOp::Parts)?.kernel().num_parts() as usize,
            bias: product.bias.map_or(0, |bias| bias.f32),
        })
    }

    /// Adds up the parts of an enqueued product: `out = x * weight^T (+ bias)`.
    pub(super) fn sum(&self, product: &Product, stream: &CudaStream) -> Result<(), BackendError> {
        let Parts { address, num_parts, bias } = self.parts(product, stream)?;
        let params = SumPartsParams {
            parts: address,
            bias,
            out: product.out,
            num_rows: word(product.num_rows),
            num_parts: word(num_parts),
            len: word(product.n),
            reserved: 0,
        };
        self.sum_parts()?.launch(&params, stream)
    }

    /// `out += x * weight^T (+ bias)`, and its norm if asked for.
    fn add(
        &self,
        product: &Product,
        norm: Option<Norm>,
        stream: &CudaStream,
    ) -> Result<(), BackendError> {
        let parts = stream.workspace()?.address();
        let num_parts = self.multiply(product, HopperOp::Parts, parts, stream)?;
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
        // Two codes are as wide as one number, and boxes of them too.
        let (weight, width, scales) = match product.weight {
            MatrixPlace::Bf16(weight) => (weight, k, 0),
            MatrixPlace::Fp8 { codes, scales, .. } => (codes, fp8_row_bytes(k) / 2, scales),
        };
        let params = HopperGemmParams {
            weight: matrix_map(weight, (n, width), kernel.weight_box_rows())?,
            x: matrix_map(x, (num_rows, k), kernel.x_box_rows())?,
            bias: product.bias.map_or(0, |bias| bias.f32),
            scales,
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
        let sides = (product.num_rows, product.n, product.k);
        let kernel = self.kernel(sides, WeightKind::of(product.weight), op)?;
        self.gemms.get(kernel, || self.loader.load(kernel))
    }

    fn sum_parts(&self) -> Result<Arc<Loaded<SumParts>>, BackendError> {
        self.sum_parts.get((), || self.loader.load(SumParts))
    }

    fn add_norm(&self) -> Result<Arc<Loaded<AddNorm>>, BackendError> {
        self.add_norm.get((), || self.loader.load(AddNorm))
    }

    fn kernel(
        &self,
        (num_rows, n, k): (usize, usize, usize),
        weights: WeightKind,
        op: HopperOp,
    ) -> Result<HopperGemm, BackendError> {
        let num_rows = u32::try_from(num_rows).unwrap_or(u32::MAX);
        let weights = match weights {
            WeightKind::Bf16 => HopperWeights::Bf16,
            WeightKind::Fp8 => HopperWeights::Fp8,
            WeightKind::Fp8Blocks => HopperWeights::Fp8Blocks,
        };
        let shape = HopperShape { num_rows, rows: word(n), cols: word(k), weights };
        HopperGemm::new(&self.loader.gpu, shape, op).map_err(unsupported)
    }
}

/// Boxes of a matrix of bf16, or of pairs of codes.
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
