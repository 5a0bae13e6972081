//! Matrices in fp8: codes as tensor cores want them, and scales.

use std::sync::Arc;

use cudarc::driver::sys::CUdeviceptr;
use inflight_kernels::ops::fp8_quantize::fp8_row_bytes;

use super::{MatrixElements, Weights};
use crate::{
    BackendError, Dtype, Fp8Matrix, Fp8Scales, HostTensor, TensorData,
    cuda::{
        memory::{Allocation, Element},
        operators::{Operators, RoundRows},
    },
    quant::fp8::BLOCK,
};

/// All of `parts`, if each is a matrix of fp8, stored or to be rounded. Anything else becomes bf16.
pub(super) fn matrices(parts: &[HostTensor]) -> Option<Vec<&Fp8Matrix>> {
    let mut matrices: Vec<&Fp8Matrix> = Vec::new();
    for part in parts {
        let TensorData::Fp8(matrix) = &part.data else { return None };
        matrices.push(matrix);
    }
    let is_stored = |matrix: &&Fp8Matrix| matches!(matrix, Fp8Matrix::Stored { .. });
    (matrices.iter().all(is_stored) || !matrices.iter().any(is_stored)).then_some(matrices)
}

impl Weights {
    /// Stacks matrices of fp8 along their rows. Those that are to be rounded are so on the device.
    pub(super) fn stack_fp8(
        &self,
        parts: &[&Fp8Matrix],
        (rows, cols): (usize, usize),
        operators: &Operators,
    ) -> Result<MatrixElements, BackendError> {
        let is_blocks = |part: &Fp8Matrix| {
            matches!(part, Fp8Matrix::Stored { scales: Fp8Scales::Blocks(_), .. })
        };
        let blocks = parts.iter().any(|part| is_blocks(part));
        let scales_per_row = if blocks { cols.div_ceil(BLOCK) } else { 1 };
        let name = &parts[0].source().name;
        let alloc = |bytes| Allocation::new(&self.device, name, bytes).map(Arc::new);
        let codes = alloc(rows * fp8_row_bytes(cols))?;
        let scales = alloc(rows * scales_per_row * Element::F32.bytes())?;
        let mut host_scales = vec![0.0; rows * scales_per_row];
        let mut first = 0;
        for part in parts {
            let source = part.source();
            let num_rows = source.num_rows();
            let at = codes.address() + (first * fp8_row_bytes(cols)) as u64;
            if let Fp8Matrix::Stored { scales, .. } = part {
                self.with_uploader(|uploader| uploader.copy_codes(source, at))?;
                let to = StackedScales { scales: &mut host_scales, rows, first, num_rows, cols };
                to.fill(scales, blocks);
            }
            first += num_rows;
        }
        self.upload_scales(&host_scales, &scales, operators)?;
        let mut first = 0;
        for part in parts {
            let num_rows = part.source().num_rows();
            if let Fp8Matrix::Rounded(source) = part {
                let to_codes = codes.address() + (first * fp8_row_bytes(cols)) as u64;
                let to_scales = scales.address() + (first * Element::F32.bytes()) as u64;
                self.round(source, (to_codes, to_scales), operators)?;
            }
            first += num_rows;
        }
        Ok(MatrixElements::Fp8 { codes, scales, blocks })
    }

    fn upload_scales(
        &self,
        scales: &[f32],
        to: &Allocation,
        operators: &Operators,
    ) -> Result<(), BackendError> {
        let bytes: Vec<u8> = scales.iter().flat_map(|scale| scale.to_le_bytes()).collect();
        let tensor = HostTensor {
            name: "scales".into(),
            dtype: Dtype::F32,
            shape: vec![scales.len(), 1],
            data: TensorData::Owned(bytes.into()),
        };
        self.upload(&[tensor], to, Element::F32, operators)
    }

    /// Rounds `source` on the device: a copy of it lies there until that is done.
    fn round(
        &self,
        source: &HostTensor,
        (codes, scales): (CUdeviceptr, CUdeviceptr),
        operators: &Operators,
    ) -> Result<(), BackendError> {
        // What is not bf16 is rounded once, not twice.
        let element = if source.dtype == Dtype::BF16 { Element::Bf16 } else { Element::F32 };
        let (num_rows, len) = (source.num_rows(), source.row_len());
        let copy = Allocation::new(&self.device, &source.name, num_rows * len * element.bytes())?;
        self.upload(std::slice::from_ref(source), &copy, element, operators)?;
        let round = RoundRows { x: copy.address(), element, codes, scales, num_rows, len };
        self.with_uploader(|uploader| {
            operators.round_rows(&round, uploader.stream())?;
            uploader.stream().finish()
        })
    }
}

/// The scales of a stacked matrix, and a part of it.
struct StackedScales<'a> {
    /// `[rows]`, or of blocks `[ceil(cols / 128), rows]`.
    scales: &'a mut [f32],
    rows: usize,
    first: usize,
    num_rows: usize,
    cols: usize,
}

impl StackedScales<'_> {
    /// Writes the part's; all for each block of columns, if there are `blocks` elsewhere.
    fn fill(self, part: &Fp8Scales, blocks: bool) {
        let num_blocks = self.cols.div_ceil(BLOCK);
        let columns = self.scales.chunks_exact_mut(self.rows.max(1)).enumerate();
        for (block, column) in columns.take(if blocks { num_blocks } else { 1 }) {
            let rows = &mut column[self.first..self.first + self.num_rows];
            for (row, scale) in rows.iter_mut().enumerate() {
                *scale = match part {
                    Fp8Scales::Rows(scales) => scales[row],
                    Fp8Scales::Blocks(scales) => scales[row / BLOCK * num_blocks + block],
                };
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scales_of_stacked_parts_lie_block_after_block() {
        let (rows, cols) = (133, 200);
        let mut scales = vec![0.0; 2 * rows];
        let mut fill = |first, num_rows, part: &Fp8Scales| {
            StackedScales { scales: &mut scales, rows, first, num_rows, cols }.fill(part, true);
        };
        fill(0, 130, &Fp8Scales::Blocks(vec![1.0, 2.0, 3.0, 4.0]));
        fill(130, 3, &Fp8Scales::Rows(vec![5.0, 6.0, 7.0]));
        let at = |block: usize, row: usize| scales[block * rows + row];
        assert_eq!([at(0, 0), at(0, 127), at(0, 128), at(0, 129)], [1.0, 1.0, 3.0, 3.0]);
        assert_eq!([at(1, 0), at(1, 127), at(1, 128), at(1, 129)], [2.0, 2.0, 4.0, 4.0]);
        assert_eq!([at(0, 130), at(1, 130), at(0, 132), at(1, 132)], [5.0, 5.0, 7.0, 7.0]);

        let mut scales = vec![0.0; 5];
        let part = StackedScales { scales: &mut scales, rows: 5, first: 3, num_rows: 2, cols };
        part.fill(&Fp8Scales::Rows(vec![8.0, 9.0]), false);
        assert_eq!(scales, [0.0, 0.0, 0.0, 8.0, 9.0]);
    }
}
