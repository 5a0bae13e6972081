//! The table of cosines and sines that rotates queries and keys.

use std::f64::consts::TAU;

use inflight_backend::{Dtype, HostTensor, TensorData};

use crate::{RopeConfig, RopeScaling};

/// Cosines and sines of every position below `max_positions`, as f32.
///
/// Frequencies and angles are rounded to f32 where transformers rounds them, since at thousands of
/// positions the rounding of an angle can be seen in logits.
///
/// # Shapes
/// `[max_positions, rotary_dim]`: `rotary_dim / 2` cosines, then as many sines.
pub fn rotary_table(rope: &RopeConfig, max_positions: usize) -> HostTensor {
    let frequencies = frequencies(rope);
    let scale = attention_factor(rope);
    let mut bytes = Vec::with_capacity(max_positions * rope.rotary_dim * 4);
    for position in 0..max_positions {
        let angles = || frequencies.iter().map(|frequency| f64::from(position as f32 * frequency));
        let cosines = angles().map(f64::cos);
        for value in cosines.chain(angles().map(f64::sin)) {
            bytes.extend_from_slice(&(value as f32 * scale).to_le_bytes());
        }
    }
    HostTensor {
        name: "rotary table".to_owned(),
        dtype: Dtype::F32,
        shape: vec![max_positions, rope.rotary_dim],
        data: TensorData::Owned(bytes.into()),
    }
}

/// What multiplies cosines and sines.
fn attention_factor(rope: &RopeConfig) -> f32 {
    match rope.scaling {
        RopeScaling::Yarn { attention_factor, .. } => attention_factor as f32,
        _ => 1.0,
    }
}

/// Radians per position of each pair, fastest first, `[rotary_dim / 2]`.
///
/// # Source
/// transformers, `modeling_rope_utils.py`.
fn frequencies(rope: &RopeConfig) -> Vec<f32> {
    let dim = rope.rotary_dim;
    let wave = |pair: usize| {
        let exponent = (2 * pair) as f32 / dim as f32;
        rope.theta.powf(f64::from(exponent)) as f32
    };
    let waves = (0..dim / 2).map(wave);
    match &rope.scaling {
        RopeScaling::Default => waves.map(|wave| 1.0 / wave).collect(),
        RopeScaling::Linear { factor } => waves.map(|wave| 1.0 / wave / *factor as f32).collect(),
        RopeScaling::Divisors(divisors) => {
            waves.zip(divisors).map(|(wave, divisor)| 1.0 / wave / divisor).collect()
        }
        RopeScaling::Llama3 { .. } => waves.map(|wave| llama3(&rope.scaling, 1.0 / wave)).collect(),
        RopeScaling::Yarn { factor, .. } => {
            let ramp = yarn_ramp(rope);
            let blend = |(wave, stretched): (f32, f32)| {
                let kept = 1.0 - stretched;
                1.0 / (*factor as f32 * wave) * (1.0 - kept) + 1.0 / wave * kept
            };
            waves.zip(ramp).map(blend).collect()
        }
    }
}

/// The frequency as Llama 3 scales it.
fn llama3(scaling: &RopeScaling, frequency: f32) -> f32 {
    let RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_position } =
        scaling
    else {
        return frequency;
    };
    let (low, high) = (*low_freq_factor as f32, *high_freq_factor as f32);
    let (context, factor) = (*original_max_position as f32, *factor as f32);
    let wavelength = TAU as f32 / frequency;
    if wavelength < context / high {
        frequency
    } else if wavelength > context / low {
        frequency / factor
    } else {
        let smooth = (context / wavelength - low) / (high - low);
        (1.0 - smooth) * frequency / factor + smooth * frequency
    }
}

/// How far YaRN stretches each pair's wave: 0 not at all, 1 by the whole factor.
fn yarn_ramp(rope: &RopeConfig) -> Vec<f32> {
    let RopeScaling::Yarn { original_max_position, beta_fast, beta_slow, truncate, .. } =
        rope.scaling
    else {
        return vec![0.0; rope.rotary_dim / 2];
    };
    let dim = rope.rotary_dim as f64;
    // The pair, as a real number, that rotates so often over the original context.
    let pair = |rotations: f64| {
        dim * (original_max_position as f64 / (rotations * TAU)).ln() / (2.0 * rope.theta.ln())
    };
    let (mut first, mut last) = (pair(beta_fast), pair(beta_slow));
    if truncate {
        (first, last) = (first.floor(), last.ceil());
    }
    let (first, mut last) = (first.max(0.0), last.min(dim - 1.0));
    if first == last {
        last += 0.001;
    }
    let (first, width) = (first as f32, (last - first) as f32);
    (0..rope.rotary_dim / 2).map(|i| ((i as f32 - first) / width).clamp(0.0, 1.0)).collect()
}
