//! What could compute a problem: cuBLASLt's proposals, those for more rows, those with the sums
//! over k split among more blocks, and our own kernels.
//!
//! cuBLASLt proposes few splits, although a product of few rows and columns has fewer tiles than
//! the GPU has multiprocessors.

use cudarc::cublaslt::sys as lt;
use inflight_kernels::ops::{
    flat_gemm::{FlatGemm, Ring},
    gemv::Gemv,
};

use super::{
    Descriptors, Gemm, Method, Problem,
    descriptor::{Layouts, Preference, ProductDescriptor},
    problem::WeightKind,
};
use crate::{
    BackendError,
    cuda::{
        check::{check_blas, lost},
        memory::Element,
        stream::WORKSPACE_BYTES,
    },
};

/// Proposals asked of cuBLASLt.
const MAX_PROPOSALS: usize = 8;
/// Numbers of rows whose proposals are tried for fewer rows too: on an H200, those for 64 rows are
/// a sixth faster for 32 rows of 4096x4096 than those for 32.
const OTHER_ROWS: [usize; 2] = [64, 128];
/// Proposals of which splits are tried.
const MAX_TO_SPLIT: usize = 4;
/// Among how many blocks sums are split.
const SPLITS: [i32; 6] = [2, 3, 4, 5, 6, 8];
/// Most rows of a problem whose splits are tried: beyond, tiles are many.
const MAX_ROWS_TO_SPLIT: usize = 128;
/// Most columns of one.
const MAX_COLUMNS_TO_SPLIT: usize = 8192;

impl Gemm {
    /// Whether `method` can compute `problem`.
    pub(super) fn is_usable(
        &self,
        descriptors: &Descriptors,
        problem: Problem,
        method: Method,
    ) -> Result<bool, BackendError> {
        if problem.weights != WeightKind::Bf16 {
            return self.is_usable_for_fp8(descriptors, problem, method);
        }
        match method {
            Method::Library(algorithm) => {
                self.takes(&descriptors.bf16, (problem, Element::Bf16), &algorithm)
            }
            Method::InParts { algorithm, num_parts } => {
                self.takes_in_parts(descriptors, problem, (&algorithm, num_parts))
            }
            Method::Expanded(_) => Ok(false),
            Method::Gemv => Ok(problem.num_rows <= Gemv::MAX_ROWS as usize),
            Method::Flat(_) => {
                let few = Gemv::MAX_ROWS as usize + 1..=FlatGemm::MAX_ROWS as usize;
                Ok(few.contains(&problem.num_rows) && problem.n.is_multiple_of(8))
            }
            Method::Hopper => Ok(self.hopper.takes(problem)),
            Method::Gated => Ok(self.gated.takes(problem)),
        }
    }

    /// What cuBLASLt proposes for `problem`; at least one.
    pub(super) fn proposed(
        &self,
        descriptors: &Descriptors,
        problem: Problem,
    ) -> Result<Vec<Method>, BackendError> {
        if problem.weights != WeightKind::Bf16 {
            return self.proposed_for_fp8(descriptors, problem);
        }
        let proposals = self.proposals(&descriptors.bf16, (problem, Element::Bf16))?;
        Ok(proposals.into_iter().map(Method::Library).collect())
    }

    /// Everything that can compute `problem`, what cuBLASLt thinks best first; at least one.
    pub(super) fn candidates(
        &self,
        descriptors: &Descriptors,
        problem: Problem,
    ) -> Result<Vec<Method>, BackendError> {
        if problem.weights != WeightKind::Bf16 {
            return self.candidates_for_fp8(descriptors, problem);
        }
        let (descriptor, element) = (&descriptors.bf16, Element::Bf16);
        let proposals = self.proposals(descriptor, (problem, element))?;
        let mut methods: Vec<Method> = proposals.iter().copied().map(Method::Library).collect();
        for num_rows in OTHER_ROWS.into_iter().filter(|rows| *rows > problem.num_rows) {
            for proposal in
                self.proposals(descriptor, (Problem { num_rows, ..problem }, element))?
            {
                let method = Method::Library(proposal);
                if !methods.contains(&method)
                    && self.takes(descriptor, (problem, element), &proposal)?
                {
                    methods.push(method);
                }
            }
        }
        if problem.num_rows <= MAX_ROWS_TO_SPLIT && problem.n <= MAX_COLUMNS_TO_SPLIT {
            for proposal in proposals.iter().take(MAX_TO_SPLIT) {
                for split in SPLITS {
                    let Some(algorithm) = with_split(proposal, split) else { continue };
                    let method = Method::Library(algorithm);
                    if !methods.contains(&method)
                        && self.takes(descriptor, (problem, element), &algorithm)?
                    {
                        methods.push(method);
                    }
                }
            }
        }
        for method in [Method::Gemv, Method::Flat(Ring::Whole), Method::Flat(Ring::Half)] {
            if self.is_usable(descriptors, problem, method)? {
                methods.push(method);
            }
        }
        Ok(methods)
    }

    /// Whether cuBLASLt takes `algorithm` for `problem` with both operands of a type, in the
    /// working memory there is.
    pub(super) fn takes(
        &self,
        descriptor: &ProductDescriptor,
        (problem, operands): (Problem, Element),
        algorithm: &lt::cublasLtMatmulAlgo_t,
    ) -> Result<bool, BackendError> {
        let layouts = problem.layouts(operands)?;
        Ok(self.takes_layouts(descriptor, &layouts, algorithm, WORKSPACE_BYTES))
    }

    /// As above, of operands that lie as `layouts` say.
    pub(super) fn takes_layouts(
        &self,
        descriptor: &ProductDescriptor,
        layouts: &Layouts,
        algorithm: &lt::cublasLtMatmulAlgo_t,
        workspace_bytes: usize,
    ) -> bool {
        let mut result = std::mem::MaybeUninit::<lt::cublasLtMatmulHeuristicResult_t>::zeroed();
        // SAFETY: all descriptors live; `result` is a valid place for the result.
        let status = unsafe {
            lt::cublasLtMatmulAlgoCheck(
                self.handle,
                descriptor.raw(),
                layouts.weight.raw(),
                layouts.x.raw(),
                layouts.out.raw(),
                layouts.out.raw(),
                algorithm,
                result.as_mut_ptr(),
            )
        };
        // SAFETY: zeroed, and of plain numbers: every field is initialised.
        let result = unsafe { result.assume_init() };
        let ok = status == lt::cublasStatus_t::CUBLAS_STATUS_SUCCESS;
        ok && result.workspaceSize <= workspace_bytes
    }

    /// cuBLASLt's proposals for `problem`, the one it thinks best first; at least one.
    pub(super) fn proposals(
        &self,
        descriptor: &ProductDescriptor,
        (problem, operands): (Problem, Element),
    ) -> Result<Vec<lt::cublasLtMatmulAlgo_t>, BackendError> {
        let proposals = self.any_proposals(descriptor, (problem, operands))?;
        if proposals.is_empty() {
            return Err(lost("cuBLASLt", &format!("no algorithm for {problem}")));
        }
        Ok(proposals)
    }

    /// As above, but perhaps none.
    pub(super) fn any_proposals(
        &self,
        descriptor: &ProductDescriptor,
        (problem, operands): (Problem, Element),
    ) -> Result<Vec<lt::cublasLtMatmulAlgo_t>, BackendError> {
        self.proposals_for(descriptor, &problem.layouts(operands)?, WORKSPACE_BYTES)
    }

    /// As above, for operands that lie as `layouts` say.
    pub(super) fn proposals_for(
        &self,
        descriptor: &ProductDescriptor,
        layouts: &Layouts,
        workspace_bytes: usize,
    ) -> Result<Vec<lt::cublasLtMatmulAlgo_t>, BackendError> {
        let preference = Preference::new(workspace_bytes)?;
        // SAFETY: plain numbers, for which zeros are values.
        let mut found: [lt::cublasLtMatmulHeuristicResult_t; MAX_PROPOSALS] =
            unsafe { std::mem::zeroed() };
        let mut num_found = 0;
        // SAFETY: all descriptors live; `found` has as many places as are asked for.
        let status = unsafe {
            lt::cublasLtMatmulAlgoGetHeuristic(
                self.handle,
                descriptor.raw(),
                layouts.weight.raw(),
                layouts.x.raw(),
                layouts.out.raw(),
                layouts.out.raw(),
                preference.raw(),
                MAX_PROPOSALS as i32,
                found.as_mut_ptr(),
                &raw mut num_found,
            )
        };
        if status == lt::cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED {
            return Ok(Vec::new());
        }
        check_blas("cublasLtMatmulAlgoGetHeuristic", status)?;
        let num_found = usize::try_from(num_found).unwrap_or(0);
        let works = |result: &&lt::cublasLtMatmulHeuristicResult_t| {
            result.state == lt::cublasStatus_t::CUBLAS_STATUS_SUCCESS
                && result.workspaceSize <= workspace_bytes
        };
        Ok(found[..num_found].iter().filter(works).map(|result| result.algo).collect())
    }
}

/// `algorithm` with its sums split among `split` blocks and added up in f32; `None` if cuBLASLt
/// does not let it be changed.
fn with_split(
    algorithm: &lt::cublasLtMatmulAlgo_t,
    split: i32,
) -> Option<lt::cublasLtMatmulAlgo_t> {
    use lt::cublasLtMatmulAlgoConfigAttributes_t as Attribute;
    let scheme = lt::cublasLtReductionScheme_t::CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE as u32;
    let mut changed = *algorithm;
    let mut set = |attribute, value: *const std::ffi::c_void, size| {
        // SAFETY: `changed` is an algorithm of cuBLASLt; `value` points to `size` bytes.
        let status = unsafe {
            lt::cublasLtMatmulAlgoConfigSetAttribute(&raw mut changed, attribute, value, size)
        };
        (status == lt::cublasStatus_t::CUBLAS_STATUS_SUCCESS).then_some(())
    };
    let value = (&raw const split).cast();
    set(Attribute::CUBLASLT_ALGO_CONFIG_SPLITK_NUM, value, size_of::<i32>())?;
    let value = (&raw const scheme).cast();
    set(Attribute::CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME, value, size_of::<u32>())?;
    Some(changed)
}
