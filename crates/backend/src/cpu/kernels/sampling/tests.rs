//! Sampling as a whole.
