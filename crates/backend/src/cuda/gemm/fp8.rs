//! Products with weights in fp8.
//!
//! ```text
//! few rows     our kernels: on Hopper x becomes codes, which lose nothing; else codes become
//!              bf16 in registers
//! many rows    x is rounded to fp8 with a scale for each row, cuBLASLt multiplies codes, or our
//!              kernel where SiLU comes next (weights with a scale for each row only, where
//!              cuBLASLt can do that)
//! else         weights are expanded to bf16 first, then as any other
//! ```

use std::sync::Arc;

use cudarc::driver::sys;
use inflight_kernels::ops::{
    fp8_expand::{Fp8Expand, Fp8ExpandParams},
    fp8_gemv::{Fp8Gemv, Fp8GemvParams},
    fp8_quantize::{Fp8Quantize, Fp8QuantizeParams, fp8_row_bytes},
};

use super::{Descriptors, Gemm, Method, Operands, Plan, Problem, Product, kernel_element, word};
use crate::{
    BackendError,
    cuda::{
        by_key::ByKey,
        check::lost,
        loaded::Loaded,
        memory::Element,
        stream::{CudaStream, Scratch},
        weights::MatrixPlace,
    },
};

/// Our kernels for weights in fp8.
#[derive(Default)]
pub(super) struct Fp8Kernels {
    gemv: ByKey<Fp8Gemv, Loaded<Fp8Gemv>>,
    quantize: ByKey<Fp8Quantize, Loaded<Fp8Quantize>>,
    expand: ByKey<Fp8Expand, Loaded<Fp8Expand>>,
}

/// Rounds x.
const QUANTIZE: Fp8Quantize = Fp8Quantize { x: inflight_kernels::Element::Bf16 };
/// Proposals tried with expanded weights: expanding takes most of the time where rows are few.
const MAX_EXPANDED: usize = 2;

impl Gemm {
    /// Whether `method` can compute `problem`, whose weights are in fp8.
    pub(super) fn is_usable_for_fp8(
        &self,
        descriptors: &Descriptors,
        problem: Problem,
        method: Method,
    ) -> Result<bool, BackendError> {
        match (method, &descriptors.fp8) {
            (Method::Library(algorithm), Some(descriptor)) => {
                self.takes(descriptor, (problem, Element::Fp8), &algorithm)
            }
            (Method::Expanded(algorithm), _) => {
                self.takes(&descriptors.bf16, (problem, Element::Bf16), &algorithm)
            }
            (Method::Gemv, _) => Ok(problem.num_rows <= Fp8Gemv::MAX_ROWS as usize),
            (Method::Hopper, _) => Ok(self.hopper.takes(problem)),
            (Method::Gated, _) => Ok(self.gated.takes(problem)),
            _ => Ok(false),
        }
    }

    /// What cuBLASLt proposes for codes, or else for expanded weights; at least one.
    pub(super) fn proposed_for_fp8(
        &self,
        descriptors: &Descriptors,
        problem: Problem,
    ) -> Result<Vec<Method>, BackendError> {
        let mut methods = Vec::new();
        if let Some(descriptor) = &descriptors.fp8 {
            let proposals = self.any_proposals(descriptor, (problem, Element::Fp8))?;
            methods.extend(proposals.into_iter().map(Method::Library));
        }
        if methods.is_empty() {
            let proposals = self.proposals(&descriptors.bf16, (problem, Element::Bf16))?;
            let proposals = proposals.into_iter().take(MAX_EXPANDED);
            methods.extend(proposals.map(Method::Expanded));
        }
        Ok(methods)
    }

    /// Everything that can compute `problem`, whose weights are in fp8; at least one.
    pub(super) fn candidates_for_fp8(
        &self,
        descriptors: &Descriptors,
        problem: Problem,
    ) -> Result<Vec<Method>, BackendError> {
        let mut methods = Vec::new();
        for method in [Method::Hopper, Method::Gemv] {
            if self.is_usable_for_fp8(descriptors, problem, method)? {
                methods.push(method);
            }
        }
        // So few rows cannot be faster, nor as exact, in another way.
        if problem.num_rows > Fp8Gemv::MAX_ROWS as usize || methods.is_empty() {
            methods.extend(self.proposed_for_fp8(descriptors, problem)?);
        }
        Ok(methods)
    }

    /// Loads what `product` needs, and finds room for operands in another type.
    pub(super) fn load_fp8(
        &self,
        method: Method,
        product: &Product,
        stream: &CudaStream,
    ) -> Result<(), BackendError> {
        match method {
            Method::Library(_) => self.load_rounding(product, stream),
            Method::Expanded(_) => {
                stream.scratch(Scratch::First, expanded_bytes(product))?;
                self.expand(product).map(drop)
            }
            Method::Hopper => self.hopper.load(product, stream),
            Method::Gated => {
                self.load_rounding(product, stream)?;
                self.gated.load(product).map(drop)
            }
            Method::Gemv | Method::Flat(_) | Method::InParts { .. } => {
                self.fp8_gemv(product).map(drop)
            }
        }
    }

    /// Loads what rounds x, and finds room for that.
    fn load_rounding(&self, product: &Product, stream: &CudaStream) -> Result<(), BackendError> {
        stream.scratch(Scratch::First, rounded_bytes(product))?;
        self.quantize().map(drop)
    }

    /// Enqueues `product`, whose weights are in fp8.
    pub(super) fn launch_fp8(
        &self,
        plan: &Plan,
        product: &Product,
        stream: &CudaStream,
    ) -> Result<(), BackendError> {
        match &plan.method {
            Method::Library(algorithm) => {
                let descriptor = plan.descriptors.fp8.as_ref();
                let descriptor = descriptor.ok_or_else(|| lost("matmul", "not planned for fp8"))?;
                let (x, scales) = self.round_x(product, stream)?;
                let (weight, weight_scales, _) = codes(product);
                descriptor.set_scales(weight_scales, scales)?;
                let operands = Operands { element: Element::Fp8, weight, x };
                self.launch_library(descriptor, algorithm, (product, operands), stream)
            }
            Method::Expanded(algorithm) => {
                let weight = self.expand_weights(product, stream)?;
                let operands = Operands { element: Element::Bf16, weight, x: product.x };
                let descriptor = &plan.descriptors.bf16;
                self.launch_library(descriptor, algorithm, (product, operands), stream)
            }
            Method::Hopper => self.hopper.launch(product, stream),
            Method::Gated => {
                let rounded = self.round_x(product, stream)?;
                self.gated.launch(product, Some(rounded), stream)
            }
            Method::Gemv | Method::Flat(_) | Method::InParts { .. } => {
                self.fp8_gemv(product)?.launch(&gemv_params(product), stream)
            }
        }
    }

    /// Where the codes and the scales of x are, once the stream comes to it.
    fn round_x(
        &self,
        product: &Product,
        stream: &CudaStream,
    ) -> Result<(sys::CUdeviceptr, sys::CUdeviceptr), BackendError> {
        let codes = stream.scratch(Scratch::First, rounded_bytes(product))?;
        let scales = codes + (product.num_rows * fp8_row_bytes(product.k)) as u64;
        let params = Fp8QuantizeParams {
            x: product.x,
            codes,
            scales,
            num_rows: word(product.num_rows),
            len: word(product.k),
        };
        self.quantize()?.launch(&params, stream)?;
        Ok((codes, scales))
    }

    /// Where the weights are as bf16, once the stream comes to it.
    fn expand_weights(
        &self,
        product: &Product,
        stream: &CudaStream,
    ) -> Result<sys::CUdeviceptr, BackendError> {
        let (all_codes, all_scales, _) = codes(product);
        let out = stream.scratch(Scratch::First, expanded_bytes(product))?;
        let params = Fp8ExpandParams {
            codes: all_codes,
            scales: all_scales,
            out,
            rows: word(product.n),
            cols: word(product.k),
        };
        self.expand(product)?.launch(&params, stream)?;
        Ok(out)
    }

    fn fp8_gemv(&self, product: &Product) -> Result<Arc<Loaded<Fp8Gemv>>, BackendError> {
        let kernel = Fp8Gemv {
            out: kernel_element(product.out_element),
            accumulate: product.accumulate,
            blocks: codes(product).2,
        };
        self.fp8.gemv.get(kernel, || self.loader.load(kernel))
    }

    fn quantize(&self) -> Result<Arc<Loaded<Fp8Quantize>>, BackendError> {
        self.fp8.quantize.get(QUANTIZE, || self.loader.load(QUANTIZE))
    }

    fn expand(&self, product: &Product) -> Result<Arc<Loaded<Fp8Expand>>, BackendError> {
        let kernel = Fp8Expand { blocks: codes(product).2 };
        self.fp8.expand.get(kernel, || self.loader.load(kernel))
    }
}

/// Codes, scales, and whether these are of blocks.
fn codes(product: &Product) -> (sys::CUdeviceptr, sys::CUdeviceptr, bool) {
    match product.weight {
        MatrixPlace::Fp8 { codes, scales, blocks } => (codes, scales, blocks),
        MatrixPlace::Bf16(_) => unreachable!("the weights are in fp8"),
    }
}

/// Bytes of x's codes and scales.
fn rounded_bytes(product: &Product) -> usize {
    product.num_rows * (fp8_row_bytes(product.k) + Element::F32.bytes())
}

/// Bytes of the weights as bf16.
fn expanded_bytes(product: &Product) -> usize {
    product.n * product.k * Element::Bf16.bytes()
}

fn gemv_params(product: &Product) -> Fp8GemvParams {
    let (codes, scales, _) = codes(product);
    Fp8GemvParams {
        x: product.x,
        codes,
        scales,
        bias: product.bias.map_or(0, |bias| bias.f32),
        out: product.out,
        num_rows: word(product.num_rows),
        rows: word(product.n),
        cols: word(product.k),
        reserved: 0,
    }
}
