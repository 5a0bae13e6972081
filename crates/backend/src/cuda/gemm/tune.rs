//! The fastest algorithm for a problem, timed as the loop will run it: inside a graph, so that the
//! host's launches do not count; over one matrix after the other, so that the L2 cache is cold; and
//! between the small kernels that surround it, whose ends and beginnings may overlap with it.
//!
//! Products of many rows run for so long that the GPU reaches its power limit and slows down, some
//! algorithms more than others: on an H200 the fastest of 8192 x 28672 x 4096 in the first
//! milliseconds is a quarter slower than the others after a tenth of a second. So the best of those
//! are timed again on a GPU that is hot.

use std::{panic, thread, time::Duration};

use cudarc::driver::sys;
use half::bf16;

use super::{Bias, Gemm, Method, Next, Norm, Plan, Problem, Product, problem::NextKind};
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
/// Most rows of problems whose neighbours are timed as well: beyond, they are a small part.
const MAX_ROWS_WITH_NEIGHBOURS: usize = 256;
/// Bytes of a buffer that is not used: none cannot be allocated.
const NOTHING: usize = 16;

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
        trial.load(self, candidates, stream)?;
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
pub(super) struct Trial<'a> {
    problem: Problem,
    weights: &'a [MatrixElements],
    /// `[num_rows, k]`, f32: what a norm makes `x` of.
    state: Allocation,
    x: Allocation,
    /// `[max(n, k)]`: bias, and weight of norms.
    bias: Allocation,
    out: Allocation,
    /// `[num_rows, n]`, bf16: of what comes next.
    next_out: Allocation,
    started: CudaEvent,
    ended: CudaEvent,
}

impl<'a> Trial<'a> {
    /// `None` if there is no memory for it.
    pub(super) fn new(
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
        let Problem { num_rows, n, k, next, .. } = problem;
        let behind_norm = num_rows <= MAX_ROWS_WITH_NEIGHBOURS;
        let state = filled(if behind_norm { num_rows * k * size_of::<f32>() } else { NOTHING })?;
        let x = filled(num_rows * k * 2)?;
        for random in [&x, &state].into_iter().flatten() {
            fill_normal(random)?;
        }
        let bias = filled(n.max(k) * size_of::<f32>())?;
        let out = filled(num_rows * n * problem.out_element().bytes())?;
        let ends_here = next == NextKind::Nothing;
        let next_out = filled(if ends_here { NOTHING } else { num_rows * n * 2 })?;
        let (Some(state), Some(x), Some(bias), Some(out), Some(next_out)) =
            (state, x, bias, out, next_out)
        else {
            return Ok(None);
        };
        gemm.neighbours.load()?;
        device.finish()?;
        let event = || CudaEvent::new(device, false);
        let (started, ended) = (event()?, event()?);
        Ok(Some(Self { problem, weights, state, x, bias, out, next_out, started, ended }))
    }

    /// Compiles those of our kernels that are `candidates`, side by side.
    fn load(
        &self,
        gemm: &Gemm,
        candidates: &[Method],
        stream: &CudaStream,
    ) -> Result<(), BackendError> {
        let ours = candidates.iter().filter(|method| !matches!(method, Method::Library(_)));
        let product = self.product(self.weights[0].place());
        thread::scope(|scope| {
            let load = |method| scope.spawn(move || gemm.load(method, &product, stream));
            let loading: Vec<_> = ours.map(|method| load(*method)).collect();
            loading.into_iter().try_for_each(|thread| {
                thread.join().unwrap_or_else(|panicked| panic::resume_unwind(panicked))
            })
        })
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
        self.time_graph(&graph, hopeless, stream)
    }

    /// Time of one product by `plan` with what comes next, without the norm in front.
    pub(super) fn time_of_one(
        &self,
        gemm: &Gemm,
        plan: &Plan,
        stream: &CudaStream,
    ) -> Result<Duration, BackendError> {
        let all = self.time(gemm, plan, f64::INFINITY, stream)?;
        let norms = if self.is_behind_norm() {
            let norms = CapturedGraph::capture(&gemm.device, stream, || {
                (0..self.num_products()).try_for_each(|_| self.enqueue_norm(gemm, stream))
            })?;
            self.time_graph(&norms, f64::INFINITY, stream)?
        } else {
            Duration::ZERO
        };
        Ok(all.saturating_sub(norms) / self.num_products() as u32)
    }

    /// Least time of a graph; not measured well if it is over `hopeless` seconds.
    fn time_graph(
        &self,
        graph: &CapturedGraph,
        hopeless: f64,
        stream: &CudaStream,
    ) -> Result<Duration, BackendError> {
        graph.launch(stream)?;
        let mut best = Duration::MAX;
        for _ in 0..NUM_RUNS {
            best = best.min(self.run(graph, 1, stream)?);
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
                self.enqueue(gemm, plan, &self.product(weight), stream)?;
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

    fn is_behind_norm(&self) -> bool {
        self.problem.num_rows <= MAX_ROWS_WITH_NEIGHBOURS && self.problem.next != NextKind::Norm
    }

    /// The norm in front of a product, if there is to be one.
    fn enqueue_norm(&self, gemm: &Gemm, stream: &CudaStream) -> Result<(), BackendError> {
        let Problem { num_rows, k, .. } = self.problem;
        if !self.is_behind_norm() {
            return Ok(());
        }
        let norm = self.norm(self.x.address());
        gemm.neighbours.norm((self.state.address(), num_rows, k), norm, stream)
    }

    /// One product as the loop has it: behind a norm, or, if a norm is what comes next, before one.
    fn enqueue(
        &self,
        gemm: &Gemm,
        plan: &Plan,
        product: &Product,
        stream: &CudaStream,
    ) -> Result<(), BackendError> {
        let (Problem { num_rows, n, .. }, beside) = (self.problem, &gemm.neighbours);
        self.enqueue_norm(gemm, stream)?;
        if self.is_behind_norm() && plan.method == Method::Hopper {
            gemm.hopper.assume_codes(product, stream)?;
        }
        gemm.launch(plan, product, stream)?;
        match product.next {
            // Something that reads it, as rotation does, whose cache there is not here.
            Next::Rope if plan.method == Method::Hopper => gemm.hopper.sum(product, stream),
            Next::Rope => {
                beside.silu((product.out, num_rows, n / 2), self.next_out.address(), stream)
            }
            _ if plan.method.does_next() => Ok(()),
            Next::Nothing => Ok(()),
            Next::Silu { out } => beside.silu((product.out, num_rows, n / 2), out, stream),
            Next::Norm(norm) => beside.norm((product.out, num_rows, n), norm, stream),
        }
    }

    fn norm(&self, out: sys::CUdeviceptr) -> Norm {
        Norm { weight: self.bias.address(), out, eps: 1e-5 }
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
            next: match self.problem.next {
                NextKind::Nothing => Next::Nothing,
                NextKind::Silu => Next::Silu { out: self.next_out.address() },
                NextKind::Norm => Next::Norm(self.norm(self.next_out.address())),
                NextKind::Rope => Next::Rope,
            },
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
