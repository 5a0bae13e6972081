//! What operators cost: [`gpu`] says what a device can do, [`model`] what it takes for each.

mod gpu;
mod model;

pub use gpu::{Gpu, HostCosts};
pub use model::{CostModel, RowLoad};
