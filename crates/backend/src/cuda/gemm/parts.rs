//! Products whose sums cuBLASLt leaves in parts, as a batch of products over stretches of k: the
//! norm behind them reads the sums anyway and adds the parts up. Where cuBLASLt splits sums itself
//! it adds them up by a kernel of its own, for 6 of 50 us (256 rows of 4096 x 14336 on an H200).

use cudarc::{cublaslt::sys as lt, driver::sys::CUdeviceptr};
use inflight_kernels::ops::add_norm::AddNorm;

use super::{
    Descriptors, Gemm, LibraryCall, Method, Next, Problem, Product,
    descriptor::{Layouts, ProductDescriptor},
    problem::{NextKind, WeightKind},
    word,
};
use crate::{
    BackendError,
    cuda::{
        memory::Element,
        stream::{CudaStream, WORKSPACE_BYTES},
    },
};

/// Rows of problems that are tried so: fewer have kernels of our own, more have tiles enough.
const NUM_ROWS: std::ops::RangeInclusive<usize> = 65..=256;
const NUMS_OF_PARTS: [usize; 2] = [2, 4];
/// Proposals that are tried for each of them.
const MAX_PROPOSALS: usize = 4;
/// A part is of a multiple of so many columns.
const COLUMNS: usize = 128;

/// Where the sums of a product were left, `[num_parts, num_rows, n]`, f32.
#[derive(Clone, Copy, Debug)]
pub(in crate::cuda) struct Parts {
    pub(in crate::cuda) address: CUdeviceptr,
    pub(in crate::cuda) num_parts: usize,
    /// `[n]`, f32, to be added; 0 without.
    pub(in crate::cuda) bias: CUdeviceptr,
}

impl Parts {
    pub(super) fn new(product: &Product, address: CUdeviceptr, num_parts: usize) -> Self {
        Self { address, num_parts, bias: product.bias.map_or(0, |bias| bias.f32) }
    }
}

impl Gemm {
    /// What could compute `problem` in parts, which a norm is behind; perhaps nothing.
    pub(super) fn candidates_in_parts(
        &self,
        descriptors: &Descriptors,
        problem: Problem,
    ) -> Result<Vec<Method>, BackendError> {
        let mut methods = Vec::new();
        for num_parts in NUMS_OF_PARTS {
            if !has_parts(problem, num_parts) {
                continue;
            }
            let layouts = layouts(problem, num_parts)?;
            // The workspace is for the parts.
            let proposals = self.proposals_for(&descriptors.bf16, &layouts, 0)?;
            let proposals = proposals.into_iter().take(MAX_PROPOSALS);
            methods.extend(proposals.map(|algorithm| Method::InParts { algorithm, num_parts }));
        }
        Ok(methods)
    }

    /// Whether cuBLASLt takes `algorithm` for `problem` in parts.
    pub(super) fn takes_in_parts(
        &self,
        descriptors: &Descriptors,
        problem: Problem,
        (algorithm, num_parts): (&lt::cublasLtMatmulAlgo_t, usize),
    ) -> Result<bool, BackendError> {
        if !has_parts(problem, num_parts) {
            return Ok(false);
        }
        let layouts = layouts(problem, num_parts)?;
        Ok(self.takes_layouts(&descriptors.bf16, &layouts, algorithm, 0))
    }

    /// Enqueues `product` in parts, and the norm that adds them up.
    pub(super) fn launch_in_parts(
        &self,
        descriptor: &ProductDescriptor,
        (algorithm, num_parts): (&lt::cublasLtMatmulAlgo_t, usize),
        (product, weight): (&Product, CUdeviceptr),
        stream: &CudaStream,
    ) -> Result<(), BackendError> {
        let Product { x, num_rows, n, k, .. } = *product;
        let Next::Norm(norm) = product.next else { unreachable!("planned before a norm alone") };
        let parts = Parts::new(product, stream.workspace()?.address(), num_parts);
        let layouts = Layouts::in_parts((num_rows, n, k), num_parts)?;
        let out = parts.address;
        let call = LibraryCall { weight, x, out, beta: 0.0, workspace: (0, 0) };
        self.call_library(descriptor, &layouts, algorithm, call, stream)?;
        self.hopper.add_parts(product, parts, Some(norm), stream)
    }
}

/// Whether there is room for so many parts of `problem`, and something to add them up.
fn has_parts(problem: Problem, num_parts: usize) -> bool {
    let Problem { num_rows, n, k, bias, weights, next, .. } = problem;
    NUM_ROWS.contains(&num_rows)
        && (weights, next, bias) == (WeightKind::Bf16, NextKind::Norm, false)
        && k.is_multiple_of(COLUMNS * num_parts)
        && num_parts * num_rows * n * Element::F32.bytes() <= WORKSPACE_BYTES
        && AddNorm::check_len(word(n)).is_ok()
}

fn layouts(problem: Problem, num_parts: usize) -> Result<Layouts, BackendError> {
    Layouts::in_parts((problem.num_rows, problem.n, problem.k), num_parts)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_whole_and_have_room() {
        let problem = |num_rows, n, k| Problem {
            num_rows,
            n,
            k,
            bias: false,
            accumulate: true,
            f32_out: true,
            weights: WeightKind::Bf16,
            next: NextKind::Norm,
        };
        let check = |problem, expected: [bool; 2]| {
            assert_eq!(NUMS_OF_PARTS.map(|num_parts| has_parts(problem, num_parts)), expected);
        };
        check(problem(256, 4096, 14336), [true, true]);
        // 256 x 8192 x 4 bytes are 8 MiB a part, of 32 in all; 16384 are twice that.
        check(problem(256, 8192, 28672), [true, true]);
        check(problem(256, 16384, 4096), [true, false]);
        // 768 columns are three times 256, and not a multiple of 512.
        check(problem(128, 4096, 768), [true, false]);
        check(problem(64, 4096, 4096), [false, false]);
        check(problem(512, 4096, 4096), [false, false]);
        check(Problem { bias: true, ..problem(128, 4096, 4096) }, [false, false]);
        check(Problem { next: NextKind::Nothing, ..problem(128, 4096, 4096) }, [false, false]);
    }
}
