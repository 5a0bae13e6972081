//! What the server tells of itself: figures, the last steps, who holds what.
//!
//! [`metrics`]: what is counted. [`request_clock`]: one request's times. [`exposition`]: the text
//! that Prometheus reads. [`scrape`]: `GET /metrics`, of
//! which [`memory_figures`] are a part. [`debug`]: timelines and the state of the
//! engine as JSON.

pub(crate) mod debug;
mod exposition;
mod memory_figures;
mod metrics;
mod request_clock;
pub(crate) mod scrape;

pub use memory_figures::KvCapacity;
pub(crate) use metrics::{Ending, Metrics};
pub(crate) use request_clock::RequestClock;
