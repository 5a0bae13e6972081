//! What the engine's steps tell: where time went, and why the device was idle.
//!
//! Reading order: [`bubbles`] (when the device had nothing to run, and why), [`recorder`] (the last
//! steps and the totals of all, always on), [`timeline`] (steps as a file for Perfetto),
//! [`timeline_reader`] (and such a file as steps again), [`picture`] (steps as a picture, overlap
//! off beside on), [`requests`] (each request's own timeline), [`histogram`] (latencies in
//! buckets).
//!
//! Invariant: nothing here is on the engine's way; it reads records that the engine sends, and the
//! engine never waits for it.

mod bubbles;
mod histogram;
mod picture;
mod recorder;
mod requests;
mod timeline;
mod timeline_reader;

pub use bubbles::{Bubble, Bubbles, Cause};
pub use histogram::{Histogram, HistogramSnapshot};
pub use picture::{Panel, write_picture};
pub use recorder::{StepRecorder, StepTotals};
pub use requests::{RequestTimeline, Stretch};
pub use timeline::TimelineWriter;
pub use timeline_reader::read_timeline;
