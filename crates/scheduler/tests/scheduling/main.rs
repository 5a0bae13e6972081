//! The scheduler driven as the engine drives it, with a device that remembers who wrote what.
//!
//! `workload.rs` says what every sequence must yield, `device.rs` runs batches and checks each
//! row's view of the KV cache and of its sampling state, `engine.rs` is the loop at depth one or
//! two, `properties.rs` lets random scripts loose on it, `scenarios.rs` has the cases worth a name,
//! `policies.rs` those of each policy.

mod device;
mod engine;
mod host_prefixes;
mod policies;
mod properties;
mod scenarios;
mod sharing;
mod workload;
