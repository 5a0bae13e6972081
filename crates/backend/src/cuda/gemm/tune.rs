//! The fastest algorithm for a problem, timed as the loop will run it: inside a graph, so that the
//! host's launches do not count, and over one matrix after the other, so that the L2 cache is cold.
//!
//! Products of many rows run for so long that the GPU reaches its power limit and slows down, some
//! algorithms more than others: on an H200 the fastest of 8192 x 28672 x 4096 in the first
//! milliseconds is a quarter slower than the others after a tenth of a second. So the best of those
//! are timed again on a GPU that is hot.

use std::time::Duration;

use cudarc::driver::sys;
use half::bf16;

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
    quant,
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
/// Two bytes of this make a bf16 of about 0.01: nothing that grows.
const FILLER: u8 = 0x3c;
/// From so many rows on, the best are timed again when the GPU is hot.
const MANY_ROWS: usize = 4096;
/// How many of them.
const NUM_FINALISTS: usize = 4;
/// How long the GPU is heated up, and how long each of them then runs in each round.
const HEATING: Duration = Duration::from_millis(150);
const HOT_ROUND: Duration = Duration::from_millis(40);
const NUM_HOT_ROUNDS: usize = 2;

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
        let mut all = Vec::new();
        for method in candidates {
            plan.method = *method;
            let time = trial.time(self, &plan, best.0 * HOPELESS, stream)?.as_secs_f64();
            all.push((time, *method));
            if time < best.0 * (1.0 - MIN_GAIN) {
                best = (time, *method);
            }
        }
        plan.method = best.1;
        if problem.num_rows >= MANY_ROWS {
            all.sort_by(|a, b| a.0.total_cmp(&b.0));
            all.truncate(NUM_FINALISTS);
            return self.fastest_when_hot(plan, &all, &trial, stream);
        }
        Ok(plan)
    }

    /// Puts the fastest of `finalists`, whose times on a cool GPU are known, into `plan`.
    fn fastest_when_hot(
        &self,
        mut plan: Plan,
        finalists: &[(f64, Method)],
        trial: &Trial<'_>,
        stream: &CudaStream,
    ) -> Result<Plan, BackendError> {
        let mut runs = Vec::new();
        for (seconds, method) in finalists {
            plan.method = *method;
            runs.push((trial.capture(self, &plan, stream)?, *seconds, *method));
        }
        let Some((first, seconds, _)) = runs.first() else { return Ok(plan) };
        trial.run(first, launches_in(HEATING, *seconds), stream)?;
        let mut best = (Duration::MAX, plan.method);
        let mut times = vec![Duration::ZERO; runs.len()];
        for _ in 0..NUM_HOT_ROUNDS {
            for (time, (graph, seconds, _)) in times.iter_mut().zip(&runs) {
                let num_launches = launches_in(HOT_ROUND, *seconds);
                *time += trial.run(graph, num_launches, stream)? / num_launches;
            }
        }
        for (time, (_, _, method)) in times.into_iter().zip(&runs) {
            if time < best.0 {
                best = (time, *method);
            }
        }
        plan.method = best.1;
        Ok(plan)
    }
}

/// How often something that takes `seconds` runs within `time`; once at least.
fn launches_in(time: Duration, seconds: f64) -> u32 {
    (time.as_secs_f64() / seconds.max(1e-6)).clamp(1.0, 1e4) as u32
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
        if let Some(x) = &x {
            fill_normal(x)?;
        }
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
        let graph = self.capture(gemm, plan, stream)?;
        graph.launch(stream)?;
        let mut best = Duration::MAX;
        for _ in 0..NUM_RUNS {
            best = best.min(self.run(&graph, 1, stream)?);
            if best.as_secs_f64() > hopeless {
                break;
            }
        }
        Ok(best)
    }

    /// So many products by `plan`, as a graph.
    fn capture(
        &self,
        gemm: &Gemm,
        plan: &Plan,
        stream: &CudaStream,
    ) -> Result<CapturedGraph, BackendError> {
        gemm.load(plan.method, &self.product(self.weights[0].place()), stream)?;
        CapturedGraph::capture(&gemm.device, stream, || {
            for i in 0..self.num_products() {
                let weight = self.weights[i % self.weights.len()].place();
                gemm.launch(plan, &self.product(weight), stream)?;
            }
            Ok(())
        })
    }

    /// Time of so many launches of `graph` in a row.
    fn run(
        &self,
        graph: &CapturedGraph,
        num_launches: u32,
        stream: &CudaStream,
    ) -> Result<Duration, BackendError> {
        self.started.record(stream)?;
        for _ in 0..num_launches {
            graph.launch(stream)?;
        }
        self.ended.record(stream)?;
        self.ended.synchronize()?;
        self.started.elapsed_to(&self.ended, stream)
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

/// Fills memory with normally distributed bf16: fewer bits change in constants, which therefore
/// multiply faster. A short stretch is repeated.
fn fill_normal(to: &Allocation) -> Result<(), BackendError> {
    const NUM_DRAWN: usize = 1 << 16;
    let mut drawn = vec![0.0; NUM_DRAWN];
    quant::random_row(1, 1.0, 0, &mut drawn);
    let drawn: Vec<bf16> = drawn.into_iter().map(bf16::from_f32).collect();
    let (address, bytes) = (to.address(), to.bytes());
    let mut done = bytes.min(size_of_val(&drawn[..]));
    // SAFETY: `done` is no more than either range.
    let copied = unsafe { sys::cuMemcpyHtoD_v2(address, drawn.as_ptr().cast(), done) };
    check("cuMemcpyHtoD", copied)?;
    while done < bytes {
        let len = done.min(bytes - done);
        // SAFETY: both ranges lie in the allocation, one after the other.
        let copied = unsafe { sys::cuMemcpyDtoD_v2(address + done as u64, address, len) };
        check("cuMemcpyDtoD", copied)?;
        done += len;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn launches_fill_a_time_and_are_at_least_one() {
        let check = |ms, seconds, expected| {
            assert_eq!(launches_in(Duration::from_millis(ms), seconds), expected);
        };
        check(150, 2.5e-3, 60);
        check(40, 0.1, 1);
        check(40, 0.0, 10_000);
    }
}
