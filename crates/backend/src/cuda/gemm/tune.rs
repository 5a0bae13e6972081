//! The fastest algorithm for a problem, timed as the loop will run it: inside a graph, so that the
//! host's launches do not count, and over one matrix after the other, so that the L2 cache is cold.

use std::time::Duration;

use cudarc::driver::sys;

use super::{Bias, Gemm, Method, Plan, Problem, Product};
use crate::{
    BackendError,
    cuda::{
        check::check,
        event::CudaEvent,
        graph::CapturedGraph,
        memory::Allocation,
        stream::CudaStream,
        weights::{MatrixElements, MatrixPlace},
    },
};

/// Most products in one timed graph.
const MAX_PRODUCTS: usize = 8;
/// Multiplications and additions of one timed graph, if that is at least one product: about 3 ms on
/// an H200. Products of many rows are long enough to be timed alone.
const MAX_OPERATIONS: usize = 2_000_000_000_000;
/// Timed runs of that graph; the fastest counts.
const NUM_RUNS: usize = 3;
/// A candidate whose first run takes this many times the best is not run again.
const HOPELESS: f64 = 1.2;
/// How much faster a later proposal must be: less is noise.
const MIN_GAIN: f64 = 0.02;
/// Two bytes of this make a bf16 of about 0.01: neither zeros, which are faster than real values,
/// nor anything that grows.
const FILLER: u8 = 0x3c;

impl Gemm {
    /// Times `candidates` and puts the fastest into `plan`. Without memory to try them in, `plan`
    /// stays as it is.
    pub(super) fn fastest(
        &self,
        mut plan: Plan,
        candidates: &[Method],
        problem: Problem,
        weights: &[MatrixElements],
        stream: &CudaStream,
    ) -> Result<Plan, BackendError> {
        let Some(trial) = Trial::new(self, problem, weights)? else { return Ok(plan) };
        let mut best = (f64::INFINITY, plan.method);
        for method in candidates {
            plan.method = *method;
            let time = trial.time(self, &plan, best.0 * HOPELESS, stream)?.as_secs_f64();
            if time < best.0 * (1.0 - MIN_GAIN) {
                best = (time, *method);
            }
        }
        plan.method = best.1;
        Ok(plan)
    }
}

/// Operands to try algorithms with.
struct Trial<'a> {
    problem: Problem,
    weights: &'a [MatrixElements],
    x: Allocation,
    bias: Allocation,
    out: Allocation,
    started: CudaEvent,
    ended: CudaEvent,
}

impl<'a> Trial<'a> {
    /// `None` if there is no memory for it.
    fn new(
        gemm: &Gemm,
        problem: Problem,
        weights: &'a [MatrixElements],
    ) -> Result<Option<Self>, BackendError> {
        let device = &gemm.device;
        let filled = |bytes| {
            let allocation = match Allocation::new(device, "tuning", bytes) {
                Err(BackendError::OutOfMemory { .. }) => return Ok(None),
                other => other?,
            };
            let (address, bytes) = (allocation.address(), allocation.bytes());
            // SAFETY: the range is the whole allocation.
            check("cuMemsetD8", unsafe { sys::cuMemsetD8_v2(address, FILLER, bytes) })?;
            Ok::<_, BackendError>(Some(allocation))
        };
        let Problem { num_rows, n, k, .. } = problem;
        let x = filled(num_rows * k * 2)?;
        let bias = filled(n * size_of::<f32>())?;
        let out = filled(num_rows * n * problem.out_element().bytes())?;
        let (Some(x), Some(bias), Some(out)) = (x, bias, out) else { return Ok(None) };
        device.finish()?;
        let event = || CudaEvent::new(device, false);
        let (started, ended) = (event()?, event()?);
        Ok(Some(Self { problem, weights, x, bias, out, started, ended }))
    }

    /// Products in one timed graph.
    fn num_products(&self) -> usize {
        let Problem { num_rows, n, k, .. } = self.problem;
        (MAX_OPERATIONS / (2 * num_rows * n * k).max(1)).clamp(1, MAX_PRODUCTS)
    }

    /// Time of so many products by `plan`; not measured well if it is over `hopeless` seconds.
    fn time(
        &self,
        gemm: &Gemm,
        plan: &Plan,
        hopeless: f64,
        stream: &CudaStream,
    ) -> Result<Duration, BackendError> {
        gemm.load(plan.method, &self.product(self.weights[0].place()), stream)?;
        let graph = CapturedGraph::capture(&gemm.device, stream, || {
            for i in 0..self.num_products() {
                let weight = self.weights[i % self.weights.len()].place();
                gemm.launch(plan, &self.product(weight), stream)?;
            }
            Ok(())
        })?;
        graph.launch(stream)?;
        let mut best = Duration::MAX;
        for _ in 0..NUM_RUNS {
            self.started.record(stream)?;
            graph.launch(stream)?;
            self.ended.record(stream)?;
            self.ended.synchronize()?;
            best = best.min(self.started.elapsed_to(&self.ended, stream)?);
            if best.as_secs_f64() > hopeless {
                break;
            }
        }
        Ok(best)
    }

    fn product(&self, weight: MatrixPlace) -> Product {
        let Problem { num_rows, n, k, bias, accumulate, .. } = self.problem;
        Product {
            x: self.x.address(),
            weight,
            bias: bias.then(|| Bias { f32: self.bias.address(), like_out: self.bias.address() }),
            out: self.out.address(),
            out_element: self.problem.out_element(),
            num_rows,
            n,
            k,
            accumulate,
        }
    }
}
