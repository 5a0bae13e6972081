//! Which kernels compute matrix products: what users write.

use std::num::NonZeroUsize;

use clap::Args;
use inflight_bench::BuiltInConfig;

use super::{DeviceChoice, MODEL_HELP, bench::built_in};

pub(super) const EXAMPLES: &str = "\
Examples:
  inflight tune --config llama-3.1-8b
  inflight tune model.gguf --rows 1,32 --again

For every matrix and number of rows the fastest of our own kernels and cuBLASLt's algorithms is \
found by trying them as the loop runs them: in a graph, the weights not in a cache, a norm in \
front. That happens when a shape is first met, and is kept for this GPU, driver, cuBLASLt and \
revision of our kernels. Times include what becomes of a product (SiLU, the sum with the state and \
its norm); rates are of reading the weights, and of multiplying.";

#[derive(Args, Debug)]
pub(crate) struct TuneArgs {
    #[arg(help = MODEL_HELP, default_value = "default", hide_default_value = true)]
    pub(crate) model: String,

    /// Shapes of a well-known model instead of MODEL's
    #[arg(long, value_parser = built_in(), value_name = "NAME", conflicts_with = "model")]
    pub(crate) config: Option<BuiltInConfig>,

    /// Rows of activations; between powers of two up to 256, and above, only those count that steps
    /// are padded to
    #[arg(
        long,
        value_delimiter = ',',
        value_name = "ROWS",
        default_value = "1,2,4,8,16,32,64,128,256,512,2048"
    )]
    pub(crate) rows: Vec<NonZeroUsize>,

    /// Choose anew, instead of showing what was chosen before
    #[arg(long)]
    pub(crate) again: bool,

    /// Which GPU: cuda, or cuda:1 for the second
    #[arg(long, default_value = "cuda", value_name = "cuda")]
    pub(crate) device: DeviceChoice,

    /// No progress on the terminal
    #[arg(long)]
    pub(crate) no_progress: bool,
}
