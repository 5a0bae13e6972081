//! What goes wrong on a simulated device.

/// Faults of one run.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Faults {
    /// The device is lost with this operation.
    pub lost_at: Option<u64>,
    /// This allocation fails.
    pub out_of_memory_at: Option<usize>,
    /// One step in a thousand, times this, takes fifty times as long as it should.
    pub slow_per_mille: u64,
    /// Of the blocks that are noted to be full, so many stay as they are; the next one changes.
    pub flips_after: Option<usize>,
    /// A wait that the engine asks for and that is not done: a planted bug.
    pub skipped_wait: Option<Wait>,
}

/// A wait of the two-slot protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// The compute stream waits for `h2d_done` before a forward pass.
    ComputeForH2d,
    /// The compute stream waits for `late_ready` between a forward pass and sampling.
    ComputeForLate,
    /// The H2D stream waits for the previous batch's `compute_done` before blocks come back.
    H2dForCompute,
    /// The D2H stream waits for `compute_done`.
    D2hForCompute,
    /// The D2H stream waits for blocks that come back before it calls a batch done.
    D2hForSwapIn,
    /// The host waits for `d2h_done`.
    HostForD2h,
}
