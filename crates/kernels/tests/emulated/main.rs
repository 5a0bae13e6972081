//! Kernels that run without a GPU: the sources of `csrc/`, compiled by the host's C++ compiler and
//! launched on host memory, compared with what arithmetic gives.
//!
//! A test makes a specialisation [`Emulated`](emulator::Emulated) and launches it with what a
//! backend would pass, but for addresses, which are of [`Memory`](memory::Memory):
//!
//! ```text
//! let Some(kernel) = Emulated::new(AddBias, Arch::SM_80) else { return };   no compiler: skipped
//! let mut x = Memory::new(&[1.0_f32, 2.0]);
//! let params = AddBiasParams { x: x.address(), .. };
//! unsafe { kernel.launch(&params, Order::Shuffled(1)) };                     panics where it fails
//! assert_eq!(x.as_slice(), [..]);                                            and fences are whole
//! ```
//!
//! [`attention`] has a step's inputs over a paged [`kv`] cache, its plan, and attention in f64.
//! `cuda/` is the emulator: CUDA's language, fibers, blocks, warps and the instructions that
//! kernels write as PTX ([`translate`] makes calls of them). What it finds, beside wrong results:
//! threads that wait for ever or meet at different places, shared memory that is read unwritten
//! (no number) or beyond its end, copies that nobody waited for, addresses behind the end of any
//! [`Memory`](memory::Memory), of nothing or not aligned, and results that depend on the order of
//! blocks and threads: a warp runs as far ahead of others as it can, so that a missing barrier
//! shows.
//!
//! Of what only Hopper has there are barriers that count bytes, copies of [`boxes`], products of
//! warpgroups, and clusters. Copies and products end as late as they can, or at any time, and are
//! no numbers until then: so who is early has none, nor has who lets go of operands too early.
//!
//! Out of scope is time: fences of memory do nothing.

#![allow(clippy::unwrap_used, reason = "a test's helpers fail as tests do")]

mod attention;
mod blocks;
mod boxes;
mod checks;
mod codes;
mod cut;
mod decode;
mod decode_codes;
mod emulator;
mod flat;
mod gated;
mod gemm;
mod kept;
mod kv;
mod memory;
mod plan;
mod prefill;
mod prefill_hopper;
mod prefixes;
mod products;
mod rope;
mod rows;
mod sample;
mod sums;
mod tokens;
mod translate;
mod truncated;
mod unpack;
mod weights;
