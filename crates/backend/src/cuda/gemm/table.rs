//! What is chosen for a product and how long it takes then, for people.

use std::time::Duration;

use super::{
    Gemm, Method, Problem,
    problem::{NextKind, WeightKind, row_bucket},
    tune::Trial,
};
use crate::{BackendError, cuda::stream::CudaStream};

/// A product of a decoder whose weights are in bf16.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TunedProduct {
    /// Rows of activations.
    pub num_rows: usize,
    /// Rows of the weights.
    pub rows: usize,
    /// Columns of both.
    pub cols: usize,
    /// Whether a bias is added.
    pub bias: bool,
    /// What becomes of it.
    pub kind: TunedKind,
}

/// What becomes of a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TunedKind {
    /// Queries, keys and values, which are rotated; what is timed reads them instead.
    Rotated,
    /// SiLU of one half times the other.
    Gated,
    /// It is added to the state between layers, which is normalised.
    Added,
    /// Logits.
    Logits,
}

/// How a product is computed.
#[derive(Clone, Debug, PartialEq)]
pub struct Tuned {
    /// By what, for people.
    pub method: String,
    /// How long it takes with what becomes of it, the weights not being in a cache and a norm in
    /// front, whose time is not counted.
    pub time: Duration,
}

impl Gemm {
    /// How `product` is computed, chosen anew if `again`. Waits for the device.
    ///
    /// # Errors
    /// [`BackendError::Unsupported`] if no weights of these sides are loaded to try it with, or if
    /// there is no memory for the rest.
    pub(in crate::cuda) fn tuned(
        &self,
        product: &TunedProduct,
        again: bool,
        stream: &CudaStream,
    ) -> Result<Tuned, BackendError> {
        self.device.bind()?;
        stream.workspace()?;
        let problem = Problem::from(product);
        let mut state = self.lock();
        if again {
            for problem in [problem, problem.alone()] {
                state.plans.remove(&problem);
                state.store.forget(&problem);
            }
        }
        let method = self.planned(&mut state, problem, stream)?;
        let weights = state.weights_of(problem);
        if weights.is_empty() {
            let reason = format!("no weights of {} x {} are loaded", problem.n, problem.k);
            return Err(BackendError::Unsupported(reason));
        }
        let Some(trial) = Trial::new(self, problem, &weights)? else {
            return Err(BackendError::Unsupported(format!("no memory to try {problem}")));
        };
        let plan = state.plans.get(&problem).expect("it was just planned");
        Ok(Tuned { method: method.to_string(), time: trial.time_of_one(self, plan, stream)? })
    }
}

impl From<&TunedProduct> for Problem {
    fn from(product: &TunedProduct) -> Self {
        let TunedProduct { num_rows, rows, cols, bias, kind } = *product;
        Self {
            num_rows: row_bucket(num_rows),
            n: rows,
            k: cols,
            bias,
            accumulate: kind == TunedKind::Added,
            f32_out: matches!(kind, TunedKind::Added | TunedKind::Logits),
            weights: WeightKind::Bf16,
            next: match kind {
                TunedKind::Logits => NextKind::Nothing,
                TunedKind::Rotated => NextKind::Rope,
                TunedKind::Gated => NextKind::Silu,
                TunedKind::Added => NextKind::Norm,
            },
        }
    }
}

impl std::fmt::Display for Method {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Library(_) => "cuBLASLt",
            Self::InParts { .. } => "cuBLASLt, in parts",
            Self::Expanded(_) => "cuBLASLt, expanded",
            Self::Gemv => "gemv",
            Self::Flat(super::Ring::Whole) => "flat, whole ring",
            Self::Flat(super::Ring::Half) => "flat, half a ring",
            Self::Hopper => "hopper",
            Self::Gated => "gated",
        })
    }
}
