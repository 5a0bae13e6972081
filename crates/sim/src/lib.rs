//! A device of virtual time that drives the real scheduler and the real engine loop.
//!
//! Reading order: [`SimBackend`] (the device: streams, events, memory, time), [`CostModel`] (what
//! operators cost), [`check`] (seeded runs, checked after every step), [`plan`] (what a model on a
//! GPU would do under a load).
//!
//! ```text
//!   seed ─► scenario ─► requests, aborts, policies ─► engine (the real one) ─► clients, each knows
//!                  └──► faults ─► SimBackend ◄── operators ──┘      │          what it must get
//!                                   │ time, order of uses           └─► scheduler's books
//!                                   └──────────── checked after every step ────────┘
//! ```
//!
//! Invariant: a seed reproduces a run: no clock of the machine, no thread, no unordered container
//! has a part in it.
//! Invariant: only `Engine::step` is driven, the step that serves users.

pub mod check;
mod cost;
mod device;
pub mod plan;
mod random;

pub use cost::{CostModel, Gpu, HostCosts, RowLoad};
pub use device::{Faults, SimBackend, SimBuffer, SimConfig, SimHostBuffer, SimMatrix, Usage, Wait};
pub use random::Random;
