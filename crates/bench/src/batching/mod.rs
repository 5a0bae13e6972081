//! What batching gains: experiments on one engine whose policy changes between runs.
//!
//! Reading order: [`lengths`] (how long prompts and outputs are), [`load`] (requests through the
//! engine, every token's time), [`burst`] (all requests at once: static against continuous),
//! [`rates`] (latency against request rate), [`long_prompt`] (a long prompt among decodes),
//! [`tenants`] (one tenant floods, another must not feel it).
//!
//! # Source
//! anyscale.com/blog/continuous-batching-llm-inference and the repository
//! anyscale/llm-continuous-batching-benchmarks, for lengths, limits, batch sizes and the metric.

mod burst;
mod lengths;
mod load;
mod long_prompt;
mod rates;
mod tenants;

pub use burst::{Burst, BurstRow, LIMITS, run_burst};
pub use lengths::Lengths;
pub use load::Rig;
pub use long_prompt::{LongPrompt, LongPromptRow, run_long_prompt};
pub use rates::{Rates, RatesRow, run_rates};
pub use tenants::{Tenants, TenantsRow, run_tenants};

/// The value below which a part of all lies; 0 of none. Sorts.
fn quantile(values: &mut [f64], part: f64) -> f64 {
    values.sort_unstable_by(f64::total_cmp);
    let last = values.len().saturating_sub(1);
    let at = ((values.len() as f64 * part).ceil() as usize).saturating_sub(1).min(last);
    values.get(at).copied().unwrap_or(0.0)
}

#[cfg(test)]
mod tests {
    use super::quantile;

    #[test]
    fn quantiles_are_nearest_ranks() {
        let mut values: Vec<f64> = (1..=100).rev().map(f64::from).collect();
        assert_eq!(quantile(&mut values, 0.5), 50.0);
        assert_eq!(quantile(&mut values, 0.99), 99.0);
        assert_eq!(quantile(&mut values, 1.0), 100.0);
        assert_eq!(quantile(&mut [7.0], 0.01), 7.0);
        assert_eq!(quantile(&mut [], 0.5), 0.0);
    }
}
