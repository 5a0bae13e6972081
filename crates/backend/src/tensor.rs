//! Weights as they lie on the host, before a backend takes them.

use std::{borrow::Cow, ops::Range, sync::Arc};

use crate::{BackendError, Dtype, Fp8Matrix, MappedFile, quant};

/// A named weight on the host.
///
/// # Shapes
/// `[rows, cols]` row-major for matrices, `[len]` for vectors; quantisation blocks lie along a row.
#[derive(Clone, Debug)]
pub struct HostTensor {
    /// Name in the weight file, for messages.
    pub name: String,
    /// Element type.
    pub dtype: Dtype,
    /// Extents, outermost first.
    pub shape: Vec<usize>,
    /// Where the elements are.
    pub data: TensorData,
}

/// Where the elements of a [`HostTensor`] are.
#[derive(Clone, Debug)]
pub enum TensorData {
    /// A byte range of a mapped file. The reader has checked that it lies inside the file.
    Mapped {
        /// The file.
        file: Arc<MappedFile>,
        /// The tensor's bytes in it.
        range: Range<usize>,
    },
    /// Bytes in memory.
    Owned(Arc<[u8]>),
    /// Not stored: normally distributed with mean 0, drawn from `seed`; the dtype must be F32.
    Random {
        /// Keys the draws, together with the element's index.
        seed: u64,
        /// Standard deviation.
        std: f32,
    },
    /// In fp8 with scales; the dtype must be [`Dtype::F8E4M3`].
    Fp8(Arc<Fp8Matrix>),
}

impl HostTensor {
    /// Rows of a matrix; 1 for a vector.
    pub fn num_rows(&self) -> usize {
        if self.shape.len() == 2 { self.shape[0] } else { 1 }
    }

    /// Elements in a row.
    pub fn row_len(&self) -> usize {
        self.shape.last().copied().unwrap_or(0)
    }

    /// The stored bytes of row `row`, or `None` for what is made up or rounded when it is read.
    pub fn row_bytes(&self, row: usize) -> Option<&[u8]> {
        let len = self.dtype.row_bytes(self.row_len())?;
        let all = match &self.data {
            TensorData::Mapped { file, range } => &file.bytes()[range.clone()],
            TensorData::Owned(bytes) => bytes,
            TensorData::Random { .. } => return None,
            TensorData::Fp8(matrix) => match &**matrix {
                Fp8Matrix::Stored { codes, .. } => return codes.row_bytes(row),
                Fp8Matrix::Rounded(_) => return None,
            },
        };
        all.get(row * len..(row + 1) * len)
    }

    /// Writes row `row` as f32 into `out`.
    ///
    /// # Panics
    /// If `row` or `out.len()` do not fit the shape, which the loader has checked.
    pub fn read_row(&self, row: usize, out: &mut [f32]) {
        assert_eq!(out.len(), self.row_len(), "{}: row length", self.name);
        match (&self.data, self.row_bytes(row)) {
            (TensorData::Fp8(matrix), _) => matrix.read_row(row, out),
            (TensorData::Random { seed, std }, _) => {
                quant::random_row(*seed, *std, row * out.len(), out);
            }
            (_, Some(bytes)) => quant::dequantize_row(self.dtype, bytes, out),
            (_, None) => panic!("{}: row {row} lies outside shape {:?}", self.name, self.shape),
        }
    }

    /// The whole tensor as f32.
    pub fn to_f32(&self) -> Vec<f32> {
        let mut out = vec![0.0; self.num_rows() * self.row_len()];
        for (row, chunk) in out.chunks_exact_mut(self.row_len().max(1)).enumerate() {
            self.read_row(row, chunk);
        }
        out
    }

    /// An error about this tensor.
    pub fn error(&self, reason: impl Into<Cow<'static, str>>) -> BackendError {
        BackendError::BadTensor {
            tensor: self.name.clone(),
            shape: self.shape.clone(),
            dtype: self.dtype,
            reason: reason.into().into_owned(),
        }
    }
}
