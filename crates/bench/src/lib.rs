//! Experiments on an engine in this process: no server, no text, token ids in and out.
//!
//! Reading order: [`configs`] (shapes of well-known models), [`offline`] (many requests at once),
//! [`report`] (what that run's figures are), [`bubbles`] (when the device had nothing to run, and
//! why), [`timeline`] (every step as a file for Perfetto), [`loop_check`] (the loop gives the same
//! tokens with overlap as without), [`bandwidth`] (what the memory can do).
//!
//! Invariant: measures by what the engine tells of itself; nothing here is on the engine's way.
//! Invariant: reads no arguments and no environment.

mod bandwidth;
mod bubbles;
mod configs;
mod loop_check;
mod offline;
mod report;
mod timeline;

pub use bandwidth::{Bandwidth, measure_bandwidths};
pub use bubbles::{Bubble, Bubbles, Cause};
pub use configs::BuiltInConfig;
pub use loop_check::{LoopCheck, check_loop};
pub use offline::{OfflineRun, OfflineWorkload, run_offline};
pub use report::{DEVICE_BUSY_DEFINITION, HostTime, Quarter, Report, WAITS_DEFINITION};
pub use timeline::TimelineWriter;
