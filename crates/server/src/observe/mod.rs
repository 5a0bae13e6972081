//! What the server tells of itself: figures, the last steps, who holds what.
//!
//! [`metrics`]: what is counted. [`request_clock`]: one request's times. [`exposition`]: the text
//! that Prometheus reads. [`scrape`]: `GET /metrics`, of
//! which [`memory_figures`] are a part. [`debug`]: timelines and the state of the
//! engine as JSON. [`http_request`]: names of a request and its place in a trace. [`request_log`]:
//! the latest requests. [`requests`]: one of them, step by step. [`otlp`]: requests as traces.

pub(crate) mod debug;
mod exposition;
mod http_request;
mod memory_figures;
mod metrics;
mod otlp;
mod request_clock;
mod request_log;
pub(crate) mod requests;
pub(crate) mod scrape;

pub(crate) use http_request::{follow, name_answer};
pub use memory_figures::KvCapacity;
pub(crate) use metrics::{Ending, Metrics};
pub use otlp::check_collector;
pub(crate) use request_clock::RequestClock;
