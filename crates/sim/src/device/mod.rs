//! A device of virtual time.
//!
//! Reading order: [`backend`] (what the engine sees), [`state`] (streams, time and memory behind
//! it), [`order`] (which uses of memory are ordered), [`step`], [`kv`] and [`token`] (what a step
//! computes), [`faults`] (what goes wrong).

mod backend;
mod faults;
mod kv;
mod memory;
mod order;
mod state;
mod step;
mod token;

pub use backend::SimBackend;
pub use faults::{Faults, Wait};
pub use memory::{SimBuffer, SimHostBuffer, SimMatrix};
pub use state::{SimConfig, Usage};
pub(crate) use token::{Seen, chosen, count_value, draw, kv_value, turned, with_layer};
