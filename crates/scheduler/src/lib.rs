//! Decides which rows run, in which blocks: `plan` gives a [`Batch`].
//!
//! The engine owns a [`Scheduler`] and drives it in this order, once per batch:
//!
//! ```text
//!   add / abort*    plan ──► stage, launch ──► advance          commit (each sampled row)
//!   host            N+1        N+1              N+1                N
//!
//!             add              admitted (blocks, state slot)      last token launched
//!   spec ─────────────► waiting ────────────────────► running ────────────────────► finishing
//!                          ▲                             │                              │
//!                          └── preempted: newest first, ─┘                              │
//!                              keeps its tokens                                         ▼
//!                          any phase: abort, or commit of a stop token ───────────►  gone
//! ```
//!
//! A *token launched* is one whose row runs on the device; it is *pending* until `commit` brings
//! its value. Overlap means that batch N+1 is planned while N's tokens are pending; overlap off is
//! the same calls with the commits of N first.
//!
//! In reading order: [`SchedulerConfig`] are the limits, [`SequenceSpec`] is what a caller asks
//! for, [`Batch`] and [`Row`] are the answer, [`Scheduler`] does the work: `queue.rs` says who is
//! next, `plan.rs` chooses rows, `admission.rs` who joins, `preemption.rs` who gives way,
//! `commit.rs` takes results, `integrity.rs` checks it all.
//!
//! Invariant: pure and deterministic. No device, clock, thread, log or randomness; the same calls
//! give the same batches.
//!
//! Invariant: a batch has at most `max_num_batched_tokens` tokens and `max_num_seqs` rows, and at
//! most one row per sequence. Sequences that need one token go first, so a long prompt never makes
//! a decode sit out.
//!
//! Invariant: a row covers exactly the positions `start .. context_len` that follow what its
//! sequence has launched since it was last admitted, and its table has room for all of them.
//!
//! Invariant: a row with [`RowInputs::Pending`] has one token, and its sequence's sampled row is in
//! the batch planned just before.
//!
//! Invariant: running sequences arrived before waiting ones, and both lists are in order of
//! arrival. Room for a running sequence is taken from the newest one.
//!
//! Invariant: the oldest sequence advances with every batch, so the queue drains. An admitted
//! request fits the pool when it is alone ([`Scheduler::check_fits`]), and it is never preempted
//! for a newer one.
//!
//! Invariant: every state slot and block is free or held by a running sequence. A sequence gives
//! all of them back at once: when its last token is launched, when a stop token is committed, when
//! it is preempted, when it is aborted. Its rows in flight may then still read and write them. This
//! is safe on one condition, which the engine keeps: everything that touches blocks and sampling
//! state, clearing it included, is on the one compute stream, so the new owner's work comes
//! after. Only committed tokens may ever be used to find a block again.
//!
//! Invariant: a preempted sequence is not planned while one of its tokens is pending, so a fresh
//! row never has unknown inputs. The pending token still commits and counts.
//!
//! Invariant: a sequence ends at `max_tokens` or at `max_model_len`, known when planning and
//! costing nothing, or at its first stop token after `min_tokens`, learned at commit and costing
//! one stray row, whose token `commit` drops.
//!
//! # Source
//! Yu et al., "Orca", 2022, section 3.2 (iteration-level scheduling); Agrawal et al.,
//! "Sarathi-Serve", 2024, section 4 (chunked prefills beside decodes under a token budget); Kwon et
//! al., "PagedAttention", 2023, section 4.5 (preemption by recomputation, newest first).

mod admission;
mod batch;
mod commit;
mod config;
mod error;
mod integrity;
mod memory;
mod moves;
mod plan;
mod preemption;
mod prefix;
mod queue;
mod scheduler;
mod sequence;
mod state_slot;

pub use batch::{Batch, Row, RowInputs};
pub use commit::{Commit, FinishReason};
pub use config::SchedulerConfig;
pub use error::{AdmissionError, SchedulerError};
pub use memory::{MemoryConfig, MoveCosts, Preemption};
pub use moves::{BlockMove, Moves};
pub use scheduler::Scheduler;
pub use sequence::{SequenceId, SequenceSpec};
pub use state_slot::StateSlot;
