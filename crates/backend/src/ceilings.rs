//! What a device could do at best.

/// Measured rates that no operator exceeds by much: what it is judged by.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Ceilings {
    /// Bytes a second that the memory moves; `bytes_by` says how they were moved.
    pub bytes_per_s: f64,
    /// Multiplications and additions a second; `operations_by` says which.
    pub operations_per_s: f64,
    /// How `bytes_per_s` was measured, for people.
    pub bytes_by: &'static str,
    /// How `operations_per_s` was measured, for people.
    pub operations_by: &'static str,
}
