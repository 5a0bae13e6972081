//! Planning: a model on a GPU under a load, through the real engine in virtual time.
//!
//! Reading order: [`workload`] (who asks for what and when), [`simulate`] (one engine serves it),
//! [`report`] (what that gives), [`fleet`] (how many GPUs a rate needs).

mod fleet;
mod report;
mod simulate;
mod workload;

pub use fleet::{Aims, Fleet, gpus_needed};
pub use report::{Percentiles, PlanReport};
pub use simulate::{PlanError, Planned, Served, simulate};
pub use workload::{Arrival, Lengths, Workload};
