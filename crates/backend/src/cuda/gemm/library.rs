//! Products by cuBLASLt alone, by its fastest algorithm: what our own kernels are compared with.

use super::{Descriptors, Gemm, Method, Plan, Problem, Product, State};
use crate::{
    BackendError,
    cuda::{check::lost, rehearsal, stream::CudaStream},
};

impl Gemm {
    /// As [`Gemm::prepare`].
    pub(in crate::cuda) fn prepare_by_library(
        &self,
        product: &Product,
        stream: &CudaStream,
    ) -> Result<(), BackendError> {
        self.device.bind()?;
        stream.workspace()?;
        let problem = Problem::of(product);
        let mut state = self.lock();
        let method = match state.library_plans.get(&problem) {
            Some(plan) => plan.method,
            None => {
                let plan = self.library_plan(&state, problem, stream)?;
                let method = plan.method;
                state.library_plans.insert(problem, plan);
                method
            }
        };
        self.load(method, product, stream)
    }

    /// Enqueues `product`, which was prepared by [`Gemm::prepare_by_library`].
    pub(in crate::cuda) fn enqueue_by_library(
        &self,
        product: &Product,
        stream: &CudaStream,
    ) -> Result<(), BackendError> {
        self.device.bind()?;
        let state = self.lock();
        let plan = state.library_plans.get(&Problem::of(product));
        let plan = plan.ok_or_else(|| lost("matmul", "a product was not prepared"))?;
        self.launch(plan, product, stream)
    }

    /// The fastest algorithm; kept nowhere, since only comparisons ask for it.
    fn library_plan(
        &self,
        state: &State,
        problem: Problem,
        stream: &CudaStream,
    ) -> Result<Plan, BackendError> {
        let descriptors = Descriptors::new(problem)?;
        let mut candidates = self.candidates(&descriptors, problem)?;
        candidates.retain(|method| matches!(method, Method::Library(_) | Method::Expanded(_)));
        if candidates.is_empty() {
            candidates = self.proposed(&descriptors, problem)?;
        }
        let plan = Plan { descriptors, method: candidates[0] };
        let weights = state.weights_of(problem);
        if weights.is_empty() {
            return Ok(plan);
        }
        rehearsal::pause(|| self.fastest(plan, &candidates, problem, &weights, stream))
    }
}
