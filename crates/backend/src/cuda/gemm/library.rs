//! Products by cuBLASLt alone, by its fastest algorithm: what our own kernels are compared with.

use super::{Gemm, Method, Plan, Problem, Product, ProductDescriptor, State};
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
        if !state.library_plans.contains_key(&problem) {
            let plan = self.library_plan(&state, problem, stream)?;
            state.library_plans.insert(problem, plan);
        }
        Ok(())
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
        let descriptor = ProductDescriptor::new(problem.bias.then(|| problem.out_element()))?;
        let mut candidates = self.candidates(&descriptor, problem)?;
        candidates.retain(|method| matches!(method, Method::Library(_)));
        let plan = Plan { descriptor, method: candidates[0] };
        let weights = state.weights_of(problem);
        if weights.is_empty() {
            return Ok(plan);
        }
        rehearsal::pause(|| self.fastest(plan, &candidates, problem, &weights, stream))
    }
}
