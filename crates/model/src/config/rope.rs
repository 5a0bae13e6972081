//! Rotary position embeddings.

use super::{Fields, limits};
use crate::ModelError;

/// How positions rotate queries and keys.
#[derive(Clone, Debug, PartialEq)]
pub struct RopeConfig {
    /// Base of the frequencies.
    pub theta: f64,
    /// Elements of a head that are rotated; even.
    pub rotary_dim: usize,
    /// Whether pairs are neighbours or `rotary_dim / 2` apart; a matter of how weights are stored.
    pub interleaved: bool,
    /// How frequencies are changed for contexts longer than those first trained on.
    pub scaling: RopeScaling,
}

/// A change of the frequencies.
#[derive(Clone, Debug, PartialEq)]
pub enum RopeScaling {
    /// None.
    Default,
    /// Positions are divided by `factor`.
    Linear {
        /// At least 1 in practice.
        factor: f64,
    },
    /// Long waves are stretched by `factor`, short ones kept, those between blended.
    ///
    /// # Source
    /// Llama 3.1, `apply_scaling` in its reference model.
    Llama3 {
        /// For waves longer than `original_max_position / low_freq_factor`.
        factor: f64,
        /// See `factor`.
        low_freq_factor: f64,
        /// Waves shorter than `original_max_position / high_freq_factor` are kept.
        high_freq_factor: f64,
        /// Context first trained on.
        original_max_position: usize,
    },
    /// As above by number of rotations, and attention is sharpened by `attention_factor`.
    ///
    /// # Source
    /// Peng et al., "YaRN: Efficient context window extension" (2023), sections 3.2 to 3.4.
    Yarn {
        /// For dimensions that rotate less than `beta_slow` times.
        factor: f64,
        /// Context first trained on.
        original_max_position: usize,
        /// Dimensions that rotate more often than this over the original context are kept.
        beta_fast: f64,
        /// See `factor`.
        beta_slow: f64,
        /// Multiplies cosines and sines.
        attention_factor: f64,
        /// Whether the ramp between begins and ends at whole dimensions.
        truncate: bool,
    },
    /// Each frequency is divided by a number of its own, as in GGUF's `rope_freqs.weight`.
    Divisors(Vec<f32>),
}

/// For files that do not say.
pub(super) const DEFAULT_THETA: f64 = 10_000.0;

impl RopeConfig {
    /// Reads `rope_parameters`, or `rope_scaling` and `rope_theta` as older files have them.
    pub(super) fn from_json(
        config: &Fields<'_>,
        head_dim: usize,
        max_position: usize,
    ) -> Result<Self, ModelError> {
        let rope = match config.object("rope_parameters")? {
            // Some families have parameters for each kind of layer.
            Some(rope) => Some(rope.object("full_attention")?.unwrap_or(rope)),
            None => config.object("rope_scaling")?,
        };
        let either = |field: &str| match rope.as_ref().map(|rope| rope.positive(field)) {
            Some(Ok(Some(value))) => Ok(Some(value)),
            Some(Err(error)) => Err(error),
            Some(Ok(None)) | None => config.positive(field),
        };
        let theta = either("rope_theta")?.unwrap_or(DEFAULT_THETA);
        limits::theta(config.path(), "rope_theta", theta)?;
        let fraction = either("partial_rotary_factor")?.unwrap_or(1.0);
        let rotary_dim = (head_dim as f64 * fraction) as usize;
        limits::rotary_dim(config.path(), "partial_rotary_factor", rotary_dim, head_dim)?;
        let scaling = match &rope {
            Some(rope) => RopeScaling::from_json(rope, max_position)?,
            None => RopeScaling::Default,
        };
        Ok(Self { theta, rotary_dim, interleaved: false, scaling })
    }
}

impl RopeConfig {
    /// Reads what layers with a window have of their own: `rope_parameters.sliding_attention`, or
    /// `rope_local_base_freq` as older files have it.
    pub(crate) fn local_from_json(
        config: &Fields<'_>,
        rotary_dim: usize,
        max_position: usize,
    ) -> Result<Self, ModelError> {
        let all = config.object("rope_parameters")?;
        let own = all.map(|all| all.object("sliding_attention")).transpose()?.flatten();
        let theta = own.as_ref().map(|own| own.positive("rope_theta")).transpose()?.flatten();
        let theta = match theta {
            Some(theta) => theta,
            None => config.positive("rope_local_base_freq")?.unwrap_or(DEFAULT_THETA),
        };
        limits::theta(config.path(), "rope_local_base_freq", theta)?;
        let scaling = match &own {
            Some(own) => RopeScaling::from_json(own, max_position)?,
            None => RopeScaling::Default,
        };
        Ok(Self { theta, rotary_dim, interleaved: false, scaling })
    }
}

impl RopeScaling {
    fn from_json(rope: &Fields<'_>, max_position: usize) -> Result<Self, ModelError> {
        let kind = match rope.string("rope_type")? {
            Some(kind) => Some(kind),
            None => rope.string("type")?,
        };
        match kind {
            Some("default") => Ok(Self::Default),
            Some("linear") => Ok(Self::Linear { factor: rope.required_positive("factor")? }),
            Some("llama3") => Self::llama3_from_json(rope),
            Some("yarn") => Self::yarn_from_json(rope, max_position),
            Some(other) => {
                let known = "default, linear, llama3 and yarn";
                Err(rope.error("rope_type", format!("{other} is not supported; {known} are")))
            }
            None => Err(rope.error("rope_type", "is missing")),
        }
    }

    fn llama3_from_json(rope: &Fields<'_>) -> Result<Self, ModelError> {
        let low_freq_factor = rope.required_positive("low_freq_factor")?;
        let high_freq_factor = rope.required_positive("high_freq_factor")?;
        if high_freq_factor <= low_freq_factor {
            let reason = format!("must be above low_freq_factor, {low_freq_factor}");
            return Err(rope.error("high_freq_factor", reason));
        }
        Ok(Self::Llama3 {
            factor: rope.required_positive("factor")?,
            low_freq_factor,
            high_freq_factor,
            original_max_position: rope
                .size("original_max_position_embeddings", limits::MAX_POSITION)?,
        })
    }

    fn yarn_from_json(rope: &Fields<'_>, max_position: usize) -> Result<Self, ModelError> {
        const ORIGINAL: &str = "original_max_position_embeddings";
        let factor = rope.required_positive("factor")?;
        // As in transformers, a zero counts as absent here.
        let scales = (rope.number("mscale")?, rope.number("mscale_all_dim")?);
        let attention_factor = match (rope.positive("attention_factor")?, scales) {
            (Some(attention_factor), _) => attention_factor,
            (None, (Some(mscale), Some(all_dim))) if mscale != 0.0 && all_dim != 0.0 => {
                yarn_mscale(factor, mscale) / yarn_mscale(factor, all_dim)
            }
            _ => yarn_mscale(factor, 1.0),
        };
        let original_max_position = match rope.value(ORIGINAL) {
            Some(_) => rope.size(ORIGINAL, limits::MAX_POSITION)?,
            None => max_position,
        };
        Ok(Self::Yarn {
            factor,
            original_max_position,
            beta_fast: rope.positive("beta_fast")?.unwrap_or(32.0),
            beta_slow: rope.positive("beta_slow")?.unwrap_or(1.0),
            attention_factor,
            truncate: rope.bool("truncate")?.unwrap_or(true),
        })
    }

    /// Tokens of context that this scaling reaches, given what the configuration says.
    pub(super) fn reach(&self, max_position: usize) -> usize {
        match self {
            Self::Yarn { factor, original_max_position, .. } => {
                let stretched = (*original_max_position as f64 * factor) as usize;
                stretched.clamp(max_position, limits::MAX_POSITION.max(max_position))
            }
            _ => max_position,
        }
    }
}

/// How much YaRN sharpens attention for contexts `factor` times as long.
pub(super) fn yarn_mscale(factor: f64, mscale: f64) -> f64 {
    if factor <= 1.0 { 1.0 } else { 0.1 * mscale * factor.ln() + 1.0 }
}
