//! Ranges that values of a configuration must lie in, whatever file they come from.
//!
//! The limits are a few times what the largest published models have. Below them no product of
//! sizes that the loader forms overflows.

use super::Fields;
use crate::ModelError;

pub(crate) const MAX_VOCAB: usize = 1 << 24;
pub(crate) const MAX_HIDDEN: usize = 1 << 18;
pub(crate) const MAX_LAYERS: usize = 1 << 12;
pub(crate) const MAX_HEADS: usize = 1 << 12;
pub(crate) const MAX_HEAD_DIM: usize = 1 << 12;
pub(crate) const MAX_POSITION: usize = 1 << 26;

/// A count or size between 1 and `max`.
pub(super) fn size(
    path: &str,
    field: &str,
    value: Option<u64>,
    max: usize,
) -> Result<usize, ModelError> {
    let value = value.ok_or_else(|| ModelError::bad_config(path, field, "is missing"))?;
    let fits = usize::try_from(value).ok().filter(|value| (1..=max).contains(value));
    fits.ok_or_else(|| {
        ModelError::bad_config(path, field, format!("must be 1 to {max}, is {value}"))
    })
}

/// A finite number above zero.
pub(super) fn positive(path: &str, field: &str, value: f64) -> Result<f64, ModelError> {
    if value.is_finite() && value > 0.0 && value <= f64::from(f32::MAX) {
        return Ok(value);
    }
    Err(ModelError::bad_config(path, field, format!("must be positive, is {value}")))
}

/// The base of rotary frequencies, which must fall from one pair to the next.
pub(super) fn theta(path: &str, field: &str, value: f64) -> Result<(), ModelError> {
    if value > 1.0 {
        return Ok(());
    }
    Err(ModelError::bad_config(path, field, format!("must be above 1, is {value}")))
}

/// The epsilon of RMSNorm.
pub(super) fn epsilon(path: &str, field: &str, value: f64) -> Result<f32, ModelError> {
    if (0.0..1.0).contains(&value) {
        return Ok(value as f32);
    }
    Err(ModelError::bad_config(path, field, format!("must be 0 to 1, is {value}")))
}

/// Key and value heads must be shared evenly among query heads.
pub(super) fn kv_heads(
    path: &str,
    field: &str,
    num_kv_heads: usize,
    num_heads: usize,
) -> Result<(), ModelError> {
    if num_heads.is_multiple_of(num_kv_heads) {
        return Ok(());
    }
    let reason = format!("{num_kv_heads} does not divide the {num_heads} query heads");
    Err(ModelError::bad_config(path, field, reason))
}

/// Rotation pairs elements, and only those of a head.
pub(super) fn rotary_dim(
    path: &str,
    field: &str,
    rotary_dim: usize,
    head_dim: usize,
) -> Result<(), ModelError> {
    if rotary_dim > 0 && rotary_dim.is_multiple_of(2) && rotary_dim <= head_dim {
        return Ok(());
    }
    let reason = format!("{rotary_dim} of {head_dim} elements cannot be rotated in pairs");
    Err(ModelError::bad_config(path, field, reason))
}

impl Fields<'_> {
    /// A count or size between 1 and `max`.
    pub(crate) fn size(&self, field: &str, max: usize) -> Result<usize, ModelError> {
        size(self.path(), &self.name(field), self.unsigned(field)?, max)
    }

    /// A finite number above zero, if the field is there.
    pub(crate) fn positive(&self, field: &str) -> Result<Option<f64>, ModelError> {
        let Some(value) = self.number(field)? else { return Ok(None) };
        positive(self.path(), &self.name(field), value).map(Some)
    }

    /// A finite number above zero.
    pub(crate) fn required_positive(&self, field: &str) -> Result<f64, ModelError> {
        self.positive(field)?.ok_or_else(|| self.error(field, "is missing"))
    }
}
