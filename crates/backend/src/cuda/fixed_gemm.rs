//! Matrix products by one method whatever the number of rows, so that a row's sums have the same
//! bits in every batch: our kernel for few rows, which adds up in an order that depends on the
//! weights' sides alone, on one group of rows after the other.

use std::{ops::Range, sync::Arc};

use cudarc::driver::sys::CUdeviceptr;
use inflight_kernels::{
    Element as KernelElement,
    ops::flat_gemm::{FlatGemm, FlatGemmParams, FlatShape, Ring},
};

use super::{
    by_key::ByKey,
    gemm::Product,
    loaded::{KernelLoader, Loaded, unsupported},
    memory::Element,
    stream::CudaStream,
    weights::MatrixPlace,
};
use crate::BackendError;

/// The kernels met so far.
pub(super) struct FixedGemm {
    loader: Arc<KernelLoader>,
    kernels: ByKey<FlatGemm, Loaded<FlatGemm>>,
}

impl FixedGemm {
    pub(super) fn new(loader: &Arc<KernelLoader>) -> Self {
        Self { loader: Arc::clone(loader), kernels: ByKey::default() }
    }

    /// Enqueues `product`.
    ///
    /// # Errors
    /// [`BackendError::Unsupported`] if a side of the weights is no multiple of 8, or they are in
    /// fp8.
    pub(super) fn enqueue(
        &self,
        product: &Product,
        stream: &CudaStream,
    ) -> Result<(), BackendError> {
        let Product { num_rows, n, k, .. } = *product;
        if !n.is_multiple_of(8) || !k.is_multiple_of(8) {
            let reason = format!("batch-invariant products with a matrix of {n} x {k}");
            return Err(BackendError::Unsupported(reason));
        }
        let MatrixPlace::Bf16(weight) = product.weight else {
            let reason = "batch-invariant products with weights in fp8".to_owned();
            return Err(BackendError::Unsupported(reason));
        };
        let most = FlatGemm::MAX_ROWS as usize;
        for first in (0..num_rows).step_by(most) {
            let num_rows = most.min(num_rows - first);
            let rows = FlatShape {
                num_rows: word(num_rows),
                rows: word(n),
                out: match product.out_element {
                    Element::Bf16 => KernelElement::Bf16,
                    Element::F32 | Element::Word | Element::Fp8 => KernelElement::F32,
                },
                accumulate: product.accumulate,
            };
            let kernel = FlatGemm::new(&self.loader.gpu, rows, Ring::Half).map_err(unsupported)?;
            let kernel = self.kernels.get(kernel, || self.loader.load(kernel))?;
            kernel.launch(&params(product, weight, first..first + num_rows), stream)?;
        }
        Ok(())
    }
}

/// Of some of the rows.
fn params(product: &Product, weight: CUdeviceptr, rows: Range<usize>) -> FlatGemmParams {
    let bytes = |rows: usize, cols: usize, element: Element| (rows * cols * element.bytes()) as u64;
    FlatGemmParams {
        x: product.x + bytes(rows.start, product.k, Element::Bf16),
        weight,
        bias: product.bias.map_or(0, |bias| bias.f32),
        out: product.out + bytes(rows.start, product.n, product.out_element),
        num_rows: word(rows.len()),
        rows: word(product.n),
        cols: word(product.k),
    }
}

fn word(value: usize) -> u32 {
    u32::try_from(value).expect("sides of matrices fit 32 bits")
}
