//! Any OpenAI-compatible server under load, ours or a peer's: what its clients see.
//!
//! Reading order: [`lengths`] (how long prompts and outputs are), [`workload`] (requests as they
//! are sent), [`answer`] (what comes back, read as it comes), [`drive`] (requests in a closed loop
//! or at a rate), [`figures`] (what a run's clients saw).
//!
//! Invariant: one thread drives all requests; its own share of a core is among the figures, since a
//! client that is busy measures itself.

mod answer;
mod drive;
mod figures;
mod lengths;
mod workload;

pub use drive::{Arrivals, Load, LoadProgress, LoadRun, Pace, run_load};
pub use figures::{GoodputTargets, LoadFigures, Quantiles};
pub use lengths::{LengthDistribution, LoadLengths};
pub use workload::{Endpoint, PlannedRequest, PromptKind, ServeWorkload};
