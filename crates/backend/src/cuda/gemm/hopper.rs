//! Products of few rows by kernels for Hopper alone, which do what comes next as well; with weights
//! in fp8 also where nothing does.

use std::sync::Arc;

use inflight_kernels::{
    TensorMap,
    ops::{
        add_norm::{AddNorm, AddNormParams},
        fp8_quantize::fp8_row_bytes,
        fp8_split::{Fp8Split, Fp8SplitParams, SplitRows},
        hopper_gemm::{
            HopperBoxes, HopperGemm, HopperGemmParams, HopperOp, HopperShape, HopperWeights,
        },
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
        memory::Element,
        stream::{CudaStream, LeftCodes, Scratch, WORKSPACE_BYTES},
        tensor_map::{Boxes, tensor_map},
        weights::MatrixPlace,
    },
};

/// The kernels that were needed so far.
pub(super) struct HopperGemms {
    loader: Arc<KernelLoader>,
    gemms: ByKey<HopperGemm, Loaded<HopperGemm>>,
    add_norm: ByKey<AddNorm, Loaded<AddNorm>>,
    sum_parts: ByKey<(), Loaded<SumParts>>,
    split: ByKey<(), Loaded<Fp8Split>>,
}

/// What a kernel multiplies.
struct Operands {
    weight: TensorMap,
    x: TensorMap,
    scales: u64,
    x_scales: u64,
}

impl HopperGemms {
    pub(super) fn new(loader: &Arc<KernelLoader>) -> Self {
        let (gemms, add_norm, sum_parts, split) = <_>::default();
        Self { loader: Arc::clone(loader), gemms, add_norm, sum_parts, split }
    }

    /// Whether there is a kernel for this product and what comes next.
    pub(super) fn takes(&self, problem: Problem) -> bool {
        let Problem { num_rows, n, k, bias, f32_out, accumulate, weights, .. } = problem;
        let op = match problem.next {
            NextKind::Nothing if weights == WeightKind::Bf16 => return false,
            // The logits.
            NextKind::Nothing if f32_out && !accumulate && !bias => HopperOp::Sums,
            // Parts become activations, or are added to the state.
            NextKind::Nothing if accumulate != f32_out => return false,
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
        (op != HopperOp::Parts || sums) && n.is_multiple_of(8) && k.is_multiple_of(8)
    }

    /// Loads what `product` and what comes next need, and finds room for `x` as codes.
    pub(super) fn load(&self, product: &Product, stream: &CudaStream) -> Result<(), BackendError> {
        if let MatrixPlace::Fp8 { .. } = product.weight {
            for which in [Scratch::First, Scratch::Second] {
                stream.split_rows((product.num_rows, product.k), which)?;
                if !is_sums(product) {
                    stream.split_rows((product.num_rows, product.n), which)?;
                }
            }
            self.split()?;
        }
        match product.next {
            Next::Silu { .. } => self.loaded(product, HopperOp::Silu).map(drop),
            Next::Nothing if is_sums(product) => self.loaded(product, HopperOp::Sums).map(drop),
            Next::Nothing | Next::Rope if !product.accumulate => {
                self.loaded(product, HopperOp::Parts)?;
                self.sum_parts().map(drop)
            }
            Next::Nothing | Next::Rope | Next::Norm(_) => {
                self.loaded(product, HopperOp::Parts)?;
                let splits = matches!(product.next, Next::Norm(_)) && leaves_codes(product);
                self.add_norm(splits).map(drop)
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
            Next::Nothing if is_sums(product) => {
                self.multiply(product, HopperOp::Sums, product.out, stream).map(drop)
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
        let num_parts = self.loaded(product, HopperOp::Parts)?.kernel().num_parts();
        Ok(Parts::new(product, stream.workspace()?.address(), num_parts as usize))
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
        let address = stream.workspace()?.address();
        let num_parts = self.multiply(product, HopperOp::Parts, address, stream)?;
        let parts = Parts::new(product, address, num_parts as usize);
        self.add_parts(product, parts, norm, stream)
    }

    /// Adds the parts of `product`, which was enqueued, to its output, and norms that if asked for.
    pub(super) fn add_parts(
        &self,
        product: &Product,
        parts: Parts,
        norm: Option<Norm>,
        stream: &CudaStream,
    ) -> Result<(), BackendError> {
        let Product { num_rows, n, .. } = *product;
        let splits = norm.is_some() && leaves_codes(product);
        let split = if splits {
            stream.split_rows((num_rows, n), Scratch::Second)?
        } else {
            SplitRows::default()
        };
        let params = AddNormParams {
            x: product.out,
            parts: parts.address,
            bias: parts.bias,
            weight: norm.map_or(0, |norm| norm.weight),
            out: norm.map_or(0, |norm| norm.out),
            split,
            num_rows: word(num_rows),
            num_parts: word(parts.num_parts),
            len: word(n),
            eps: norm.map_or(0.0, |norm| norm.eps),
        };
        self.add_norm(splits)?.launch(&params, stream)?;
        let left = norm.filter(|_| splits);
        stream.set_left(left.map(|norm| LeftCodes { x: norm.out, len: n, codes: split }));
        Ok(())
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
        let Operands { weight, x, scales, x_scales } = self.operands(product, *kernel, stream)?;
        let out_len = product.n / 2;
        let split = if kernel.leaves_codes() {
            stream.split_rows((product.num_rows, out_len), Scratch::First)?
        } else {
            SplitRows::default()
        };
        let params = HopperGemmParams {
            weight,
            x,
            bias: product.bias.map_or(0, |bias| bias.f32),
            scales,
            x_scales,
            out,
            split,
            num_rows: word(product.num_rows),
            rows: word(product.n),
            cols: word(product.k),
            reserved: 0,
        };
        loaded.launch(&params, stream)?;
        if kernel.leaves_codes() {
            stream.set_left(Some(LeftCodes { x: out, len: out_len, codes: split }));
        }
        Ok(kernel.num_parts())
    }

    /// What `kernel` multiplies; with weights in fp8, `x` is split first.
    fn operands(
        &self,
        product: &Product,
        kernel: HopperGemm,
        stream: &CudaStream,
    ) -> Result<Operands, BackendError> {
        let Product { x, num_rows, n, k, .. } = *product;
        match product.weight {
            MatrixPlace::Bf16(weight) => {
                let boxes_of_x = HopperBoxes::of_rows(num_rows, 2 * k, kernel.x_box_rows());
                Ok(Operands {
                    weight: tensor_map(&Boxes::of(weight, &kernel.weight_boxes(n, 2 * k)))?,
                    x: tensor_map(&Boxes::of(x, &boxes_of_x))?,
                    scales: 0,
                    x_scales: 0,
                })
            }
            MatrixPlace::Fp8 { codes, scales, .. } => {
                let split = self.split_x(product, stream)?;
                let x = codes_map(&split, k)?;
                let x_scales = split.scales;
                let boxes = kernel.weight_boxes(n, fp8_row_bytes(k));
                let weight = tensor_map(&Boxes::of(codes, &boxes))?;
                Ok(Operands { weight, x, scales, x_scales })
            }
        }
    }

    /// Where the codes of `x` are, once the stream comes to it.
    fn split_x(&self, product: &Product, stream: &CudaStream) -> Result<SplitRows, BackendError> {
        let Product { x, num_rows, k, .. } = *product;
        let is_x = |left: &LeftCodes| {
            left.x == x && left.len == k && left.codes.num_rows == word(num_rows)
        };
        if let Some(left) = stream.left().filter(is_x) {
            return Ok(left.codes);
        }
        let to = stream.split_rows((num_rows, k), scratch_of_x(product))?;
        self.split()?.launch(&Fp8SplitParams { x, to, len: word(k), reserved: 0 }, stream)?;
        Ok(to)
    }

    /// As if what was enqueued last had left codes for `product`, as norms in the loop do: for
    /// timing, which numbers do not matter to.
    pub(super) fn assume_codes(
        &self,
        product: &Product,
        stream: &CudaStream,
    ) -> Result<(), BackendError> {
        let Product { x, num_rows, k, .. } = *product;
        let is_fp8 = matches!(product.weight, MatrixPlace::Fp8 { .. });
        if is_fp8 && AddNorm::splits(word(k)) {
            let codes = stream.split_rows((num_rows, k), scratch_of_x(product))?;
            stream.set_left(Some(LeftCodes { x, len: k, codes }));
        }
        Ok(())
    }

    fn split(&self) -> Result<Arc<Loaded<Fp8Split>>, BackendError> {
        self.split.get((), || self.loader.load(Fp8Split))
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

    /// What adds parts up, loaded.
    pub(super) fn add_norm(&self, split: bool) -> Result<Arc<Loaded<AddNorm>>, BackendError> {
        let kernel = AddNorm { split };
        self.add_norm.get(kernel, || self.loader.load(kernel))
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

/// Whether the sums of `product` are its output as they are.
fn is_sums(product: &Product) -> bool {
    product.out_element == Element::F32 && !product.accumulate
}

/// Whether the norm behind `product` leaves codes: the next product's weights are as this one's.
fn leaves_codes(product: &Product) -> bool {
    let is_fp8 = matches!(product.weight, MatrixPlace::Fp8 { .. });
    is_fp8 && AddNorm::splits(word(product.n))
}

/// Where `product` has its `x` as codes: not where SiLU of it is left.
fn scratch_of_x(product: &Product) -> Scratch {
    if matches!(product.next, Next::Silu { .. }) { Scratch::Second } else { Scratch::First }
}

/// Boxes of the greater codes and the lesser together, as pairs.
fn codes_map(split: &SplitRows, len: usize) -> Result<TensorMap, BackendError> {
    let (row_bytes, num_rows) = (fp8_row_bytes(len), split.num_rows as usize);
    tensor_map(&Boxes {
        address: split.codes,
        dims: &[row_bytes / 2, num_rows, 2],
        strides: &[row_bytes, num_rows * row_bytes],
        sides: &[HopperGemm::BOX_COLS, split.padded_rows, 2],
    })
}
