//! Weights on the device: matrices as bf16 or fp8, tables as bf16, vectors as f32.
//!
//! [`upload`]: how they get there. [`fp8`]: matrices of codes and scales.

mod fp8;
mod upload;

use std::sync::{Arc, Mutex, PoisonError, Weak};

use cudarc::driver::sys::CUdeviceptr;

use self::upload::Uploader;
use super::{
    device::Device,
    memory::{Allocation, CudaBuffer, Element},
    operators::Operators,
};
use crate::{BackendError, HostTensor, TensorData};

/// A weight matrix, `[rows, cols]`.
pub struct CudaMatrix {
    pub(super) elements: MatrixElements,
    pub(super) rows: usize,
    pub(super) cols: usize,
}

/// What a matrix is stored as.
#[derive(Clone)]
pub(super) enum MatrixElements {
    /// `[rows, cols]`.
    Bf16(Arc<Allocation>),
    /// Codes, `[rows, fp8_row_bytes(cols)]`, and scales.
    Fp8 {
        codes: Arc<Allocation>,
        /// `[rows]`, or of blocks `[ceil(cols / 128), rows]`, f32.
        scales: Arc<Allocation>,
        blocks: bool,
    },
}

/// Where a matrix lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum MatrixPlace {
    Bf16(CUdeviceptr),
    Fp8 { codes: CUdeviceptr, scales: CUdeviceptr, blocks: bool },
}

impl MatrixElements {
    pub(super) fn bytes(&self) -> usize {
        match self {
            Self::Bf16(allocation) => allocation.bytes(),
            Self::Fp8 { codes, scales, .. } => codes.bytes() + scales.bytes(),
        }
    }

    pub(super) fn place(&self) -> MatrixPlace {
        match self {
            Self::Bf16(allocation) => MatrixPlace::Bf16(allocation.address()),
            Self::Fp8 { codes, scales, blocks } => MatrixPlace::Fp8 {
                codes: codes.address(),
                scales: scales.address(),
                blocks: *blocks,
            },
        }
    }
}

/// A table as bf16, `[rows, cols]`.
pub struct CudaEmbedding {
    pub(super) allocation: Arc<Allocation>,
    pub(super) rows: usize,
    pub(super) cols: usize,
}

/// Takes weights to the device.
pub(super) struct Weights {
    device: Arc<Device>,
    /// Made when the first weight comes.
    uploader: Mutex<Option<Uploader>>,
    /// The embedding table loaded last, for an output matrix that is the same tensor.
    table: Mutex<Option<(HostTensor, Weak<Allocation>)>>,
}

impl Weights {
    pub(super) fn new(device: &Arc<Device>) -> Self {
        let (uploader, table) = (Mutex::default(), Mutex::default());
        Self { device: Arc::clone(device), uploader, table }
    }

    /// One matrix of `parts` stacked along their rows.
    pub(super) fn matrix(
        &self,
        parts: &[HostTensor],
        operators: &Operators,
    ) -> Result<CudaMatrix, BackendError> {
        if let Some(allocation) = self.same_table(parts) {
            let (rows, cols) = (parts[0].num_rows(), parts[0].row_len());
            return Ok(CudaMatrix { elements: MatrixElements::Bf16(allocation), rows, cols });
        }
        let (rows, cols) = check_parts(parts)?;
        let elements = match fp8::matrices(parts) {
            Some(parts) => self.stack_fp8(&parts, (rows, cols), operators)?,
            None => MatrixElements::Bf16(self.stack(parts, (rows, cols), operators)?),
        };
        Ok(CudaMatrix { elements, rows, cols })
    }

    /// A table of rows to look up.
    pub(super) fn embedding(
        &self,
        table: &HostTensor,
        operators: &Operators,
    ) -> Result<CudaEmbedding, BackendError> {
        let parts = std::slice::from_ref(table);
        let (rows, cols) = check_parts(parts)?;
        let allocation = self.stack(parts, (rows, cols), operators)?;
        let known = (table.clone(), Arc::downgrade(&allocation));
        *self.table.lock().unwrap_or_else(PoisonError::into_inner) = Some(known);
        Ok(CudaEmbedding { allocation, rows, cols })
    }

    /// Vectors one after the other as f32; with a copy as bf16 if they may be a bias.
    pub(super) fn vector(
        &self,
        parts: &[HostTensor],
        operators: &Operators,
    ) -> Result<CudaBuffer, BackendError> {
        let len = parts.iter().map(|part| part.num_rows() * part.row_len()).sum();
        let upload = |element| {
            let buffer = CudaBuffer::zeroed(&self.device, "vector", len, element)?;
            self.upload(parts, buffer.allocation(), element, operators)?;
            Ok::<_, BackendError>(buffer)
        };
        let vector = upload(Element::F32)?;
        if parts.iter().any(|part| part.shape.len() > 1) {
            return Ok(vector); // a table of rotations
        }
        Ok(vector.with_bf16(upload(Element::Bf16)?))
    }

    /// All of `parts` as bf16.
    fn stack(
        &self,
        parts: &[HostTensor],
        (rows, cols): (usize, usize),
        operators: &Operators,
    ) -> Result<Arc<Allocation>, BackendError> {
        let bytes = rows * cols * Element::Bf16.bytes();
        let allocation = Arc::new(Allocation::new(&self.device, &parts[0].name, bytes)?);
        self.upload(parts, &allocation, Element::Bf16, operators)?;
        Ok(allocation)
    }

    /// The embedding table's memory, if `parts` are that very tensor.
    fn same_table(&self, parts: &[HostTensor]) -> Option<Arc<Allocation>> {
        let table = self.table.lock().unwrap_or_else(PoisonError::into_inner);
        let (table, allocation) = table.as_ref()?;
        let [part] = parts else { return None };
        if is_same(table, part) { allocation.upgrade() } else { None }
    }

    /// Uploads `parts` one after the other.
    fn upload(
        &self,
        parts: &[HostTensor],
        to: &Allocation,
        element: Element,
        operators: &Operators,
    ) -> Result<(), BackendError> {
        self.with_uploader(|uploader| uploader.load(parts, to, element, operators))
    }

    fn with_uploader<R>(
        &self,
        run: impl FnOnce(&mut Uploader) -> Result<R, BackendError>,
    ) -> Result<R, BackendError> {
        let mut uploader = self.uploader.lock().unwrap_or_else(PoisonError::into_inner);
        if uploader.is_none() {
            *uploader = Some(Uploader::new(&self.device)?);
        }
        run(uploader.as_mut().expect("was just made"))
    }
}

/// Rows and columns of all parts, stacked.
fn check_parts(parts: &[HostTensor]) -> Result<(usize, usize), BackendError> {
    let first = parts.first().expect("a matrix has at least one part");
    let cols = first.row_len();
    for part in parts {
        if part.shape.len() != 2 || part.row_len() != cols {
            return Err(part.error(format!("is to be stacked on rows of {cols} elements")));
        }
        if cols == 0 || !cols.is_multiple_of(8) {
            return Err(part.error("needs rows of a multiple of 8 elements on CUDA devices"));
        }
    }
    Ok((parts.iter().map(HostTensor::num_rows).sum(), cols))
}

/// Whether two tensors are one: the same place in the same file, or drawn alike.
fn is_same(a: &HostTensor, b: &HostTensor) -> bool {
    use TensorData::{Fp8, Mapped, Owned, Random};
    let same_data = match (&a.data, &b.data) {
        (Mapped { file, range }, Mapped { file: other, range: other_range }) => {
            Arc::ptr_eq(file, other) && range == other_range
        }
        (Owned(bytes), Owned(other)) => Arc::ptr_eq(bytes, other),
        (Fp8(matrix), Fp8(other)) => Arc::ptr_eq(matrix, other),
        (Random { seed, std }, Random { seed: other, std: other_std }) => {
            seed == other && std == other_std
        }
        _ => false,
    };
    same_data && a.shape == b.shape && a.dtype == b.dtype
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Dtype;

    #[test]
    fn tensors_are_one_if_they_have_the_same_source_and_shape() {
        let tensor = |shape: &[usize], data: &TensorData| HostTensor {
            name: "any".into(),
            dtype: Dtype::F32,
            shape: shape.to_vec(),
            data: data.clone(),
        };
        let owned = || TensorData::Owned(Arc::from([0_u8; 32]));
        let (first, second) = (owned(), owned());
        let random = |seed| TensorData::Random { seed, std: 0.02 };
        let check = |a: HostTensor, b: HostTensor, same| assert_eq!(is_same(&a, &b), same);
        check(tensor(&[2, 4], &first), tensor(&[2, 4], &first), true);
        check(tensor(&[2, 4], &first), tensor(&[4, 2], &first), false);
        check(tensor(&[2, 4], &first), tensor(&[2, 4], &second), false);
        check(tensor(&[2, 4], &random(1)), tensor(&[2, 4], &random(1)), true);
        check(tensor(&[2, 4], &random(1)), tensor(&[2, 4], &random(2)), false);
        check(tensor(&[2, 4], &random(1)), tensor(&[2, 4], &first), false);
    }
}
