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
//! In reading order: [`SchedulerConfig`] are the limits and [`Policy`] is what decides within them,
//! [`SequenceSpec`] is what a caller asks for, [`Batch`] and [`Row`] are the answer, [`Decision`]
//! says why. [`Scheduler`] does the work: `queue.rs` says who is next, `tenant.rs` what each tenant
//! had, `plan.rs` chooses rows, `prompt_share.rs` their lengths, `admission.rs` and `gate.rs` who
//! joins, `preemption.rs` and `way.rs` who gives way, `host_prefixes.rs` and `file_prefixes.rs`
//! what the host and a file keep, `commit.rs` takes results, `lapse.rs` ends what is late,
//! `latency.rs` and `step_model.rs` keep steps short, `integrity.rs` checks it all.
//!
//! Invariant: pure and deterministic. No device, clock, thread, log or randomness; the same calls
//! give the same batches. Times are told: [`Scheduler::set_now`], [`Scheduler::observe`].
//!
//! Invariant: a batch has at most `max_num_batched_tokens` tokens and `max_num_seqs` rows, and at
//! most one row per sequence. Where prompts and decodes share a batch, sequences that need one
//! token go first, so a long prompt never makes a decode sit out.
//!
//! Invariant: a row covers exactly the positions `start .. context_len` that follow what its
//! sequence has launched since it was last admitted, and its table has room for all of them.
//!
//! Invariant: a row with [`RowInputs::Pending`] has one token, and its sequence's sampled row is in
//! the batch planned just before.
//!
//! Invariant: running sequences stand by rank, and so do waiting ones; room for a running sequence
//! is taken from the last. A rank is a place in the order of arrival, behind the priority if that
//! counts; where tenants are served fairly it is the place in the order of admission.
//!
//! Invariant: nobody overtakes but those that wait for a prefix that is being computed: while the
//! first of the others in the queue may not join, nobody does.
//!
//! Invariant: every plan gives somebody a row as long as a sequence can have one, and the running
//! sequence of the first rank is never preempted, so the queue drains. First come, first served,
//! the oldest sequence advances with every batch. An admitted request fits the pool when it is
//! alone ([`Scheduler::check_fits`]), and it is never preempted for one of a later rank.
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
//! al., "PagedAttention", 2023, section 4.5 (preemption by recomputation, newest first); Sheng et
//! al., "Fairness in Serving Large Language Models", 2024, section 4 (virtual token counters).

mod admission;
mod batch;
mod commit;
mod config;
#[cfg(feature = "damage")]
mod damage;
mod decision;
mod error;
mod file_prefixes;
mod gate;
mod host_prefixes;
mod id_map;
mod integrity;
mod lapse;
mod latency;
mod leaks;
mod memory;
mod moves;
mod plan;
mod policy;
mod preemption;
mod prefix;
mod prompt_share;
mod queue;
pub mod record;
mod scheduler;
mod sequence;
mod state_slot;
mod step_model;
mod tenant;
mod view;
mod way;

pub use batch::{Batch, BlockTurn, PromptCut, Row, RowInputs};
pub use commit::{Commit, FinishReason};
pub use config::SchedulerConfig;
#[cfg(feature = "damage")]
pub use damage::Damage;
pub use decision::{Decision, HeldBack, LimitedBy, Share};
pub use error::{AdmissionError, SchedulerError};
pub use file_prefixes::FileBlock;
pub use host_prefixes::HostPrefixes;
pub use lapse::Lapse;
pub use memory::{MemoryConfig, MoveCosts, Preemption};
pub use moves::{BlockMove, MoveOwner, Moves};
pub use policy::{Batching, Gate, Mixing, Order, Policy, Targets};
pub use scheduler::Scheduler;
pub use sequence::{SequenceId, SequenceSpec, Service};
pub use state_slot::StateSlot;
pub use tenant::Tenant;
pub use view::SequenceView;
