//! Experiments on an engine in this process: no server, no text, token ids in and out.
//!
//! Reading order: [`configs`] (shapes of well-known models), [`offline`] (many requests at once),
//! [`report`] (what that run's figures are), [`loop_check`] (the loop gives the same tokens with
//! overlap as without), [`invariance`] (a request's tokens do not depend on its neighbours),
//! [`batching`] (what batching gains), [`chats`] (chats that come back), [`bandwidth`] (what the
//! memory can do), [`kernels`] (every operator alone).
//!
//! Invariant: measures by what the engine tells of itself; nothing here is on the engine's way.
//! Invariant: reads no arguments and no environment.

mod bandwidth;
pub mod batching;
mod chats;
mod configs;
mod gate;
mod invariance;
mod kernels;
mod loop_check;
mod offline;
mod report;

pub use bandwidth::{Bandwidth, measure_bandwidths};
pub use chats::{ChatsPhase, ChatsReport, ChatsWorkload, run_chats};
pub use configs::BuiltInConfig;
pub use invariance::{InvarianceCheck, check_invariance};
pub use kernels::{
    DecodePeer, KernelReport, KernelWorkload, OperatorTiming, Peer, measure_kernels,
};
pub use loop_check::{LoopCheck, check_loop};
pub use offline::{OfflineRun, OfflineWorkload, RequestLengths, run_offline};
pub use report::{DEVICE_BUSY_DEFINITION, HostTime, Quarter, Report, WAITS_DEFINITION};
