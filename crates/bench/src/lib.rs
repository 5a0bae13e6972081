//! Experiments: an engine in this process, token ids in and out, or any server under load.
//!
//! Reading order: [`configs`] (shapes of well-known models), [`offline`] (many requests at once),
//! [`report`] (what that run's figures are), [`loop_check`] (the loop gives the same tokens with
//! overlap as without), [`invariance`] (a request's tokens do not depend on its neighbours),
//! [`batching`] (what batching gains), [`chats`] (chats that come back), [`bandwidth`] (what the
//! memory can do), [`kernels`] (every operator alone), [`client`] (HTTP), [`serve`] (any server
//! under load), [`plot`] (figures as pictures), [`compare`] (two files of figures side by side).
//!
//! Invariant: measures by what the engine tells of itself, or by what a server's clients see;
//! nothing here is on the engine's way.
//! Invariant: reads no arguments and no environment.

mod bandwidth;
pub mod batching;
mod chats;
pub mod client;
mod compare;
mod configs;
mod gate;
mod invariance;
mod kernels;
mod loop_check;
mod offline;
pub mod plot;
mod report;
pub mod serve;

pub use bandwidth::{Bandwidth, measure_bandwidths};
pub use chats::{ChatsPhase, ChatsReport, ChatsWorkload, run_chats};
pub use compare::{Better, ComparedFigure, Comparison};
pub use configs::BuiltInConfig;
pub use invariance::{InvarianceCheck, check_invariance};
pub use kernels::{
    DecodePeer, Judged, KernelReport, KernelWorkload, OperatorTiming, Peer, measure_kernels,
};
pub use loop_check::{LoopCheck, check_loop};
pub use offline::{OfflineRun, OfflineWorkload, RequestLengths, Watch, run_offline, run_watched};
pub use report::{DEVICE_BUSY_DEFINITION, HostTime, Quarter, Report, WAITS_DEFINITION};
