//! Every operator alone, at the sizes of a model: how long it takes, and how far that is from what
//! the device could do at best.
//!
//! [`stopwatch`]: times. [`layers`]: weights, more than caches hold. [`dense`]: operators that know
//! of rows only. [`steps`], [`context`]: those that know where tokens are. [`report`]: the figures.

mod context;
mod dense;
mod layers;
mod report;
mod steps;
mod stopwatch;

use anyhow::{Context as _, Result};
use inflight_backend::{Backend, Dtype};
use inflight_model::ModelConfig;

pub use report::{Judged, KernelReport, OperatorTiming, Peer};

use self::{context::Contexts, dense::Dense, layers::Layers, stopwatch::Stopwatch};

/// What is measured.
#[derive(Clone, Debug)]
pub struct KernelWorkload {
    /// The model's sizes.
    pub config: ModelConfig,
    /// What weights are stored as; GPUs hold them as bf16 whatever this says.
    pub weights: Dtype,
    /// Tokens of a block of the KV cache.
    pub block_size: usize,
    /// Rows of matrix products, and tokens of what goes token by token.
    pub num_rows: Vec<usize>,
    /// Sequences of decode attention.
    pub batches: Vec<usize>,
    /// Tokens of each of those.
    pub contexts: Vec<usize>,
    /// Tokens of a prompt that is prefilled alone.
    pub prompts: Vec<usize>,
}

/// The same device used in another way, whose decode attention stands beside.
#[derive(Clone, Copy, Debug)]
pub struct DecodePeer<'a, B: Backend> {
    /// What it is called.
    pub name: &'static str,
    /// The device.
    pub backend: &'a B,
}

/// Measures all operators of `backend`, telling `progress` of each.
///
/// # Errors
/// Too little memory, or a lost device.
pub fn measure_kernels<B: Backend>(
    backend: &B,
    peer: Option<DecodePeer<'_, B>>,
    workload: &KernelWorkload,
    progress: &mut dyn FnMut(&OperatorTiming),
) -> Result<KernelReport> {
    let ceilings = backend.ceilings(workload.weights);
    let ceilings = ceilings.context("what the device could do at best")?;
    let stopwatch = Stopwatch::new(backend)?;
    let layers = Layers::new(backend, &workload.config, workload.weights)?;
    let mut operators = Vec::new();
    let mut note = |timing: OperatorTiming| {
        progress(&timing);
        operators.push(timing);
    };
    Dense { workload, stopwatch: &stopwatch, layers: &layers }.measure(&mut note)?;
    let contexts = |stopwatch| Contexts { workload, stopwatch };
    match peer {
        Some(DecodePeer { name, backend }) => {
            let beside = Stopwatch::new(backend)?;
            contexts(&stopwatch).measure(Some((name, &contexts(&beside))), &mut note)?;
        }
        None => contexts(&stopwatch).measure(None, &mut note)?,
    }
    Ok(KernelReport::new(backend.description(), ceilings, operators))
}
