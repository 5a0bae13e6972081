//! Matrices of e4m3 with scales.

use std::sync::Arc;

use crate::{BackendError, Dtype, HostTensor, TensorData, e4m3};

/// Rows and columns of the blocks that may share a scale.
pub const BLOCK: usize = 128;

/// Rows whose largest magnitude is below this are scaled as if it were this.
const LEAST_AMAX: f32 = 1e-12;

/// Divides a row by the scale that makes its largest magnitude the largest number; the scale.
///
/// Kernels compute just this.
pub fn scale_row(row: &mut [f32]) -> f32 {
    let amax = row.iter().fold(LEAST_AMAX, |max, value| max.max(value.abs()));
    let inverse = e4m3::GREATEST / amax;
    row.iter_mut().for_each(|value| *value *= inverse);
    amax / e4m3::GREATEST
}

/// Rounds a row to what e4m3 with one scale can hold.
pub fn round_row(row: &mut [f32]) {
    let scale = scale_row(row);
    row.iter_mut().for_each(|value| *value = e4m3::to_f32(e4m3::from_f32(*value)) * scale);
}

/// A matrix in fp8.
#[derive(Clone, Debug)]
pub enum Fp8Matrix {
    /// Codes as stored, and what to multiply them by.
    Stored {
        /// `[rows, cols]`, of [`Dtype::F8E4M3`].
        codes: HostTensor,
        /// Scales.
        scales: Fp8Scales,
    },
    /// A matrix of another type that is to be rounded, with a scale for each row.
    Rounded(HostTensor),
}

/// What codes are multiplied by.
#[derive(Clone, Debug, PartialEq)]
pub enum Fp8Scales {
    /// `[rows]`.
    Rows(Vec<f32>),
    /// `[ceil(rows / 128), ceil(cols / 128)]`.
    Blocks(Vec<f32>),
}

impl Fp8Matrix {
    /// The tensor with the elements: codes, or numbers to be rounded.
    pub fn source(&self) -> &HostTensor {
        match self {
            Self::Stored { codes: source, .. } | Self::Rounded(source) => source,
        }
    }

    /// Writes the values of row `row` into `out`.
    pub(crate) fn read_row(&self, row: usize, out: &mut [f32]) {
        self.source().read_row(row, out);
        match self {
            Self::Rounded(_) => round_row(out),
            Self::Stored { scales: Fp8Scales::Rows(scales), .. } => {
                out.iter_mut().for_each(|value| *value *= scales[row]);
            }
            Self::Stored { scales: Fp8Scales::Blocks(scales), .. } => {
                let first = row / BLOCK * out.len().div_ceil(BLOCK);
                for (values, scale) in out.chunks_mut(BLOCK).zip(&scales[first..]) {
                    values.iter_mut().for_each(|value| *value *= scale);
                }
            }
        }
    }
}

impl HostTensor {
    /// This matrix of [`Dtype::F8E4M3`] with a tensor of scales: one, one for each row, or one for
    /// each block of 128 rows and columns.
    ///
    /// # Errors
    /// If the scales are of none of these shapes, or are no numbers.
    pub fn with_scales(self, scales: &HostTensor) -> Result<Self, BackendError> {
        let (rows, cols) = (self.num_rows(), self.row_len());
        if rows == 0 || cols == 0 {
            return Err(self.error("a weight matrix must not be empty"));
        }
        let values = scales.to_f32();
        if values.iter().any(|scale| !scale.is_finite()) {
            return Err(scales.error("holds what is no finite number"));
        }
        let scales = match scales.shape[..] {
            [1] | [1, 1] => Fp8Scales::Rows(vec![values[0]; rows]),
            [len] | [len, 1] if len == rows => Fp8Scales::Rows(values),
            [a, b] if (a, b) == (rows.div_ceil(BLOCK), cols.div_ceil(BLOCK)) => {
                Fp8Scales::Blocks(values)
            }
            _ => {
                let shape = &self.shape;
                let reason = format!(
                    "is no scale of a matrix {shape:?}: neither one nor one for each row or for \
                     each block of {BLOCK} rows and columns"
                );
                return Err(scales.error(reason));
            }
        };
        let (name, shape) = (self.name.clone(), self.shape.clone());
        let data = TensorData::Fp8(Arc::new(Fp8Matrix::Stored { codes: self, scales }));
        Ok(Self { name, dtype: Dtype::F8E4M3, shape, data })
    }

    /// This matrix rounded to fp8 with a scale for each row; itself, if it is in fp8.
    #[must_use]
    pub fn rounded_to_fp8(self) -> Self {
        if self.dtype == Dtype::F8E4M3 {
            return self;
        }
        let (name, shape) = (self.name.clone(), self.shape.clone());
        let data = TensorData::Fp8(Arc::new(Fp8Matrix::Rounded(self)));
        Self { name, dtype: Dtype::F8E4M3, shape, data }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn matrix(dtype: Dtype, shape: &[usize], bytes: Vec<u8>) -> HostTensor {
        let data = TensorData::Owned(bytes.into());
        HostTensor { name: "test".into(), dtype, shape: shape.to_vec(), data }
    }

    fn floats(shape: &[usize], values: &[f32]) -> HostTensor {
        matrix(Dtype::F32, shape, values.iter().flat_map(|v| v.to_le_bytes()).collect())
    }

    #[test]
    fn scales_are_one_or_those_of_rows_or_of_blocks() {
        // 0x38 is 1, 0x40 is 2.
        let codes = || matrix(Dtype::F8E4M3, &[2, 3], vec![0x38, 0x40, 0x38, 0x38, 0x38, 0x40]);
        let check = |shape: &[usize], scales: &[f32], expected: [f32; 6]| {
            let scaled = codes().with_scales(&floats(shape, scales)).unwrap();
            assert_eq!(scaled.to_f32(), expected, "{shape:?}");
        };
        check(&[1], &[0.5], [0.5, 1.0, 0.5, 0.5, 0.5, 1.0]);
        check(&[2], &[0.5, 3.0], [0.5, 1.0, 0.5, 3.0, 3.0, 6.0]);
        check(&[2, 1], &[0.5, 3.0], [0.5, 1.0, 0.5, 3.0, 3.0, 6.0]);

        let large = matrix(Dtype::F8E4M3, &[130, 260], vec![0x38; 130 * 260]);
        let scales = floats(&[2, 3], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
        let values = large.with_scales(&scales).unwrap().to_f32();
        for (row, col, scale) in
            [(0, 0, 1.0), (127, 127, 1.0), (127, 128, 2.0), (128, 127, 4.0), (129, 259, 6.0)]
        {
            assert_eq!(values[row * 260 + col], scale, "{row}, {col}");
        }
    }

    #[test]
    fn scales_that_do_not_fit_are_refused() {
        let codes = || matrix(Dtype::F8E4M3, &[4, 3], vec![0x38; 12]);
        let error = |shape: &[usize], scale: f32| {
            let scales = floats(shape, &vec![scale; shape.iter().product()]);
            codes().with_scales(&scales).unwrap_err().to_string()
        };
        assert!(error(&[3], 1.0).contains("no scale of a matrix [4, 3]"));
        assert!(error(&[2, 2], 1.0).contains("no scale of a matrix"));
        assert!(error(&[1], f32::NAN).contains("finite"));
        let empty = matrix(Dtype::F8E4M3, &[usize::MAX, 0], Vec::new());
        assert!(empty.with_scales(&floats(&[1], &[1.0])).is_err());
    }

    #[test]
    fn rounding_keeps_the_largest_and_three_bits_of_the_others() {
        let row = [3.5, -1.0, 0.3, 0.0];
        let rounded = floats(&[1, 4], &row).rounded_to_fp8();
        assert_eq!(rounded.dtype, Dtype::F8E4M3);
        let values = rounded.to_f32();
        assert_eq!(values[0], 3.5);
        assert_eq!(values[3], 0.0);
        for (value, exact) in values.iter().zip(row) {
            assert!((value - exact).abs() <= exact.abs() / 16.0, "{value} for {exact}");
        }
        // 1 / 3.5 of 448 is 128, a number of the format; 0.3 / 3.5 of it, 38.4, becomes 40.
        assert_eq!(values[1], -1.0);
        assert!((values[2] - 40.0 / 128.0).abs() < 1e-6);
        let again = rounded.clone().rounded_to_fp8();
        assert_eq!(again.to_f32(), values);
        assert_eq!(floats(&[1, 2], &[0.0, 0.0]).rounded_to_fp8().to_f32(), [0.0, 0.0]);
    }
}
