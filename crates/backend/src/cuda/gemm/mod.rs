//! Matrix products by cuBLASLt: `y = x * weight^T`, bf16 in, f32 accumulation.
//!
//! cuBLASLt is column-major: `x [m, k]` row-major is `k x m`, `weight [n, k]` is `k x n`, and
//! `y [m, n]` is `n x m`, so the product asked for is `y = op(weight) * x` with `op` a transposition.
//!
//! [`descriptor`]: what cuBLASLt is told. [`problem`]: which products share an algorithm. [`tune`]:
//! the fastest algorithm, timed with a cold L2. [`store`]: the choices of earlier runs.

mod descriptor;
mod problem;
mod store;
mod tune;

use std::{
    collections::HashMap,
    path::Path,
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
};

use cudarc::{cublaslt::sys as lt, driver::sys};
pub(super) use problem::{Problem, row_bucket};
use store::AlgorithmStore;

use self::descriptor::{Layouts, ProductDescriptor};
use super::{
    check::{check_blas, lost},
    device::Device,
    memory::{Allocation, Element},
    stream::{CudaStream, WORKSPACE_BYTES},
};
use crate::BackendError;

/// cuBLASLt, and the algorithm of every product met so far.
pub(super) struct Gemm {
    device: Arc<Device>,
    handle: lt::cublasLtHandle_t,
    state: Mutex<State>,
}

struct State {
    plans: HashMap<Problem, Plan>,
    /// Matrices of the same shape, between which tuning turns so that none is in the L2 cache.
    weights: HashMap<(usize, usize), Vec<Weak<Allocation>>>,
    store: AlgorithmStore,
}

/// How products of one [`Problem`] are computed.
struct Plan {
    descriptor: ProductDescriptor,
    algorithm: lt::cublasLtMatmulAlgo_t,
}

/// One product's operands.
#[derive(Clone, Copy, Debug)]
pub(super) struct Product {
    /// `[num_rows, k]`, bf16.
    pub(super) x: sys::CUdeviceptr,
    /// `[n, k]`, bf16.
    pub(super) weight: sys::CUdeviceptr,
    /// `[n]`, of the output's type.
    pub(super) bias: Option<sys::CUdeviceptr>,
    /// `[num_rows, n]`.
    pub(super) out: sys::CUdeviceptr,
    pub(super) out_element: Element,
    pub(super) num_rows: usize,
    pub(super) n: usize,
    pub(super) k: usize,
    /// Add to `out` instead of overwriting it.
    pub(super) accumulate: bool,
}

// SAFETY: cuBLASLt's handle may be used from any thread; plans are behind a lock.
unsafe impl Send for Gemm {}
// SAFETY: as above.
unsafe impl Sync for Gemm {}

impl Gemm {
    /// `cache` holds the choices of earlier runs, if it is a folder that can be written.
    pub(super) fn new(
        device: &Arc<Device>,
        cublaslt_version: usize,
        cache: Option<&Path>,
    ) -> Result<Self, BackendError> {
        device.bind()?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: `handle` is a valid place for the result; destroyed in `drop`.
        check_blas("cublasLtCreate", unsafe { lt::cublasLtCreate(&raw mut handle) })?;
        let store = AlgorithmStore::open(cache, &device.info, cublaslt_version);
        let state = State { plans: HashMap::new(), weights: HashMap::new(), store };
        Ok(Self { device: Arc::clone(device), handle, state: Mutex::new(state) })
    }

    /// Tells of a matrix that products will be made with.
    pub(super) fn add_weight(&self, weight: &Arc<Allocation>, n: usize, k: usize) {
        self.lock().weights.entry((n, k)).or_default().push(Arc::downgrade(weight));
    }

    /// Chooses the algorithm for `product`, unless that was done before. Allocates and waits for the
    /// device, so it must not happen while a graph is being captured.
    pub(super) fn prepare(
        &self,
        product: &Product,
        stream: &CudaStream,
    ) -> Result<(), BackendError> {
        self.device.bind()?;
        stream.workspace()?;
        let problem = Problem::of(product);
        let mut state = self.lock();
        if !state.plans.contains_key(&problem) {
            let plan = self.plan(&mut state, problem, stream)?;
            state.plans.insert(problem, plan);
        }
        Ok(())
    }

    /// Enqueues `product`, which was prepared.
    pub(super) fn enqueue(
        &self,
        product: &Product,
        stream: &CudaStream,
    ) -> Result<(), BackendError> {
        self.device.bind()?;
        let state = self.lock();
        let plan = state.plans.get(&Problem::of(product));
        let plan = plan.ok_or_else(|| lost("matmul", "a product was not prepared"))?;
        self.launch(plan, product, stream)
    }

    fn launch(
        &self,
        plan: &Plan,
        product: &Product,
        stream: &CudaStream,
    ) -> Result<(), BackendError> {
        if let Some(bias) = product.bias {
            plan.descriptor.set_bias(bias)?;
        }
        let layouts = Layouts::new(product.num_rows, product.n, product.k, product.out_element)?;
        let workspace = stream.workspace()?;
        let (alpha, beta) = (1f32, if product.accumulate { 1f32 } else { 0f32 });
        let (weight, x) = (product.weight as *const _, product.x as *const _);
        // SAFETY: descriptor and layouts describe buffers whose sizes the caller has checked, which
        // live until the stream has used them; the workspace belongs to the stream.
        let status = unsafe {
            lt::cublasLtMatmul(
                self.handle,
                plan.descriptor.raw(),
                (&raw const alpha).cast(),
                weight,
                layouts.weight.raw(),
                x,
                layouts.x.raw(),
                (&raw const beta).cast(),
                product.out as *const _,
                layouts.out.raw(),
                product.out as *mut _,
                layouts.out.raw(),
                &raw const plan.algorithm,
                workspace.address() as *mut _,
                workspace.bytes(),
                stream.raw().cast(),
            )
        };
        check_blas("cublasLtMatmul", status)
    }

    /// The stored choice if it still works, else the fastest of cuBLASLt's proposals.
    fn plan(
        &self,
        state: &mut State,
        problem: Problem,
        stream: &CudaStream,
    ) -> Result<Plan, BackendError> {
        let descriptor = ProductDescriptor::new(problem.bias.then(|| problem.out_element()))?;
        if let Some(algorithm) = state.store.get(&problem)
            && self.is_usable(&descriptor, problem, &algorithm)?
        {
            return Ok(Plan { descriptor, algorithm });
        }
        let candidates = self.candidates(&descriptor, problem)?;
        let mut plan = Plan { descriptor, algorithm: candidates[0] };
        let weights = state.weights.get(&(problem.n, problem.k));
        let weights: Vec<_> = weights.into_iter().flatten().filter_map(Weak::upgrade).collect();
        if candidates.len() > 1 && !weights.is_empty() {
            plan = self.fastest(plan, &candidates, problem, &weights, stream)?;
        }
        state.store.put(problem, plan.algorithm);
        Ok(plan)
    }

    /// Whether cuBLASLt takes `algorithm` for `problem`, in the working memory there is.
    fn is_usable(
        &self,
        descriptor: &ProductDescriptor,
        problem: Problem,
        algorithm: &lt::cublasLtMatmulAlgo_t,
    ) -> Result<bool, BackendError> {
        let layouts = problem.layouts()?;
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
        Ok(ok && result.workspaceSize <= WORKSPACE_BYTES)
    }

    /// cuBLASLt's proposals for `problem`, the one it thinks best first; at least one.
    fn candidates(
        &self,
        descriptor: &ProductDescriptor,
        problem: Problem,
    ) -> Result<Vec<lt::cublasLtMatmulAlgo_t>, BackendError> {
        let preference = descriptor::Preference::new()?;
        let layouts = problem.layouts()?;
        // SAFETY: plain numbers, for which zeros are values.
        let mut found: [lt::cublasLtMatmulHeuristicResult_t; tune::MAX_CANDIDATES] =
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
                tune::MAX_CANDIDATES as i32,
                found.as_mut_ptr(),
                &raw mut num_found,
            )
        };
        check_blas("cublasLtMatmulAlgoGetHeuristic", status)?;
        let num_found = usize::try_from(num_found).unwrap_or(0);
        let works = |result: &&lt::cublasLtMatmulHeuristicResult_t| {
            result.state == lt::cublasStatus_t::CUBLAS_STATUS_SUCCESS
                && result.workspaceSize <= WORKSPACE_BYTES
        };
        let usable: Vec<_> =
            found[..num_found].iter().filter(works).map(|result| result.algo).collect();
        if usable.is_empty() {
            return Err(lost("cuBLASLt", &format!("no algorithm for {problem}")));
        }
        Ok(usable)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Gemm {
    fn drop(&mut self) {
        if self.device.bind().is_ok() {
            // SAFETY: created in `new` and destroyed once. A failure leaks host memory, no more.
            let _ = unsafe { lt::cublasLtDestroy(self.handle) };
        }
    }
}
