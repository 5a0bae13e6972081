//! Seeded runs of the real engine, checked after every step.
//!
//! Reading order: [`scenario`] (what a seed stands for), [`requests`] and [`policies`] (what is
//! asked for and who decides), [`expected`] (what every request must yield, worked out apart from
//! the engine), [`client`] (what it did yield), [`run`] (the run), [`verdict`] (its checks).

mod client;
mod expected;
mod policies;
mod requests;
mod run;
mod scenario;
mod verdict;

pub use requests::{Leaving, Planned};
pub use run::{Failure, Figures, Plants, Saboteur, run, run_with};
pub use scenario::Scenario;
