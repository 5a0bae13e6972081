//! Weight matrices, repacked into panels when they are loaded.

use std::ops::Range;

use half::{bf16, f16};

use super::{
    format::{GroupLayout, number_panel_bytes},
    kernels::KernelSet,
    memory::{PanelMemory, WeightMemory},
};
use crate::{
    BackendError, Dtype, HostTensor, TensorData,
    cpu::{
        pool::{SharedMut, ThreadPool},
        simd::SimdLevel,
    },
    quant,
};

/// What weights are computed with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WeightPrecision {
    /// As stored; quantised weights meet activations quantised to 8 bits.
    Native,
    /// Expanded to f32, which costs memory and time: the reference for exactness.
    F32,
}

/// A matrix of one or more tensors stacked along their rows, as panels.
pub struct PackedMatrix {
    rows: usize,
    cols: usize,
    segments: Vec<Segment>,
}

/// Neighbouring rows of one type.
pub(super) struct Segment {
    /// Of the weights in the panels.
    pub(super) dtype: Dtype,
    pub(super) first_row: usize,
    pub(super) num_rows: usize,
    /// Of a panel: what the kernels that it was packed for take.
    pub(super) panel_rows: usize,
    /// `[num_panels, panel_bytes]`; rows past `num_rows` are zero.
    memory: PanelMemory,
}

impl PackedMatrix {
    /// Packs `parts`, each `[rows_i, cols]`, into a matrix `[sum of rows_i, cols]`, for the kernels
    /// of `level`.
    ///
    /// # Errors
    /// If a part is no matrix, differs in columns or lacks data, or memory runs out.
    ///
    /// # Panics
    /// If this processor lacks the level's instructions.
    pub(crate) fn pack(
        memory: &WeightMemory,
        pool: &ThreadPool,
        parts: &[HostTensor],
        precision: WeightPrecision,
        level: SimdLevel,
    ) -> Result<Self, BackendError> {
        Self::pack_for(KernelSet::of(level), (memory, pool), parts, precision)
    }

    /// As [`PackedMatrix::pack`], for given kernels.
    pub(super) fn pack_for(
        kernels: KernelSet,
        (memory, pool): (&WeightMemory, &ThreadPool),
        parts: &[HostTensor],
        precision: WeightPrecision,
    ) -> Result<Self, BackendError> {
        let none = || BackendError::Unsupported("a matrix of no tensors".to_string());
        let cols = parts.first().ok_or_else(none)?.row_len();
        let mut matrix = Self { rows: 0, cols, segments: Vec::new() };
        for part in parts {
            check_part(part, cols)?;
        }
        let stored = |part: &HostTensor| stored_dtype(part.dtype, precision);
        for run in parts.chunk_by(|a, b| stored(a) == stored(b)) {
            let dtype = stored(&run[0]);
            let rows = SegmentRows {
                first: matrix.rows,
                num: run.iter().map(HostTensor::num_rows).sum(),
                of_panel: kernels.form(dtype).panel_rows(),
            };
            let segment = pack_segment((memory, pool), run, dtype, rows)?;
            matrix.rows += segment.num_rows;
            matrix.segments.push(segment);
        }
        Ok(matrix)
    }

    /// Rows, which are the outputs.
    pub(crate) fn rows(&self) -> usize {
        self.rows
    }

    /// Columns, which are the inputs.
    pub(crate) fn cols(&self) -> usize {
        self.cols
    }

    /// Bytes of all panels.
    pub(crate) fn bytes(&self) -> usize {
        self.segments.iter().map(|segment| segment.memory.bytes().len()).sum()
    }

    pub(super) fn segments(&self) -> &[Segment] {
        &self.segments
    }
}

impl Segment {
    pub(super) fn num_panels(&self) -> usize {
        self.num_rows.div_ceil(self.panel_rows)
    }

    /// Bytes of a panel.
    pub(super) fn panel_bytes(&self) -> usize {
        self.memory.bytes().len() / self.num_panels()
    }

    /// The bytes of neighbouring panels.
    pub(super) fn panels(&self, panels: Range<usize>) -> &[u8] {
        let len = self.panel_bytes();
        &self.memory.bytes()[panels.start * len..panels.end * len]
    }
}

fn stored_dtype(dtype: Dtype, precision: WeightPrecision) -> Dtype {
    match precision {
        // No kernel multiplies codes; their values lose no more than bits of the scale in bf16.
        WeightPrecision::Native if dtype == Dtype::F8E4M3 => Dtype::BF16,
        WeightPrecision::Native => dtype,
        WeightPrecision::F32 => Dtype::F32,
    }
}

fn check_part(part: &HostTensor, cols: usize) -> Result<(), BackendError> {
    let &[rows, row_len] = part.shape.as_slice() else {
        return Err(part.error("a weight matrix must have two dimensions"));
    };
    if rows == 0 || row_len == 0 {
        return Err(part.error("a weight matrix must not be empty"));
    }
    if row_len != cols {
        return Err(part.error(format!("stacked with a matrix of {cols} columns")));
    }
    let row_bytes = part.dtype.row_bytes(row_len);
    let row_bytes = row_bytes.ok_or_else(|| part.error("a row is not a whole number of blocks"))?;
    let bytes = rows.checked_mul(row_bytes).ok_or_else(|| part.error("too large"))?;
    let stored = match &part.data {
        TensorData::Fp8(fp8) => return check_part(fp8.source(), cols),
        TensorData::Random { .. } if part.dtype == Dtype::F32 => bytes,
        TensorData::Random { .. } => return Err(part.error("random weights must be F32")),
        TensorData::Mapped { range, .. } => range.len(),
        TensorData::Owned(data) => data.len(),
    };
    if stored < bytes {
        return Err(part.error(format!("has {stored} bytes of data, needs {bytes}")));
    }
    Ok(())
}

/// Bytes of a panel, or `None` if they overflow.
fn panel_bytes(dtype: Dtype, cols: usize, panel_rows: usize) -> Option<usize> {
    match GroupLayout::of(dtype) {
        Some(layout) => (cols / layout.super_block_len()).checked_mul(layout.super_block_bytes()),
        None if cols > usize::MAX / 256 => None,
        None => Some(number_panel_bytes(dtype, cols, panel_rows)),
    }
}

/// Where a segment lies in its matrix, and how many of its rows make a panel.
#[derive(Clone, Copy)]
struct SegmentRows {
    first: usize,
    num: usize,
    of_panel: usize,
}

fn pack_segment(
    (memory, pool): (&WeightMemory, &ThreadPool),
    parts: &[HostTensor],
    dtype: Dtype,
    rows: SegmentRows,
) -> Result<Segment, BackendError> {
    let (cols, panel_rows) = (parts[0].row_len(), rows.of_panel);
    let num_panels = rows.num.div_ceil(panel_rows);
    let too_large = || parts[0].error("too large");
    let panel_bytes = panel_bytes(dtype, cols, panel_rows).ok_or_else(too_large)?;
    let bytes = panel_bytes.checked_mul(num_panels).ok_or_else(too_large)?;
    let mut memory = memory.zeroed(bytes)?;
    let panels = SharedMut::new(memory.bytes_mut());
    pool.run_chunks(num_panels, 1, |chunk| {
        let mut packer = RowPacker::new(dtype, cols, panel_rows);
        // SAFETY: chunks are disjoint, so these ranges are.
        let bytes = unsafe { panels.slice(chunk.start * panel_bytes..chunk.end * panel_bytes) };
        let first_row = chunk.start * panel_rows;
        let rows = rows_of(parts).skip(first_row).take(chunk.len() * panel_rows);
        for (i, (part, row)) in rows.enumerate() {
            let panel = &mut bytes[i / panel_rows * panel_bytes..][..panel_bytes];
            packer.pack(part, row, panel, i % panel_rows);
        }
    });
    Ok(Segment { dtype, first_row: rows.first, num_rows: rows.num, panel_rows, memory })
}

/// All rows of `parts`, in order.
fn rows_of(parts: &[HostTensor]) -> impl Iterator<Item = (&HostTensor, usize)> {
    parts.iter().flat_map(|part| (0..part.num_rows()).map(move |row| (part, row)))
}

/// Writes rows into panels of one type, and keeps what it needs for that.
struct RowPacker {
    dtype: Dtype,
    panel_rows: usize,
    values: Vec<f32>,
    codes: Vec<u8>,
    groups: Vec<quant::Group>,
}

impl RowPacker {
    fn new(dtype: Dtype, cols: usize, panel_rows: usize) -> Self {
        let (mut values, mut codes, mut groups) = (Vec::new(), Vec::new(), Vec::new());
        match GroupLayout::of(dtype) {
            Some(layout) => {
                codes.resize(cols, 0);
                groups.resize(cols / layout.group_len, quant::Group::default());
            }
            None => values.resize(cols, 0.0),
        }
        Self { dtype, panel_rows, values, codes, groups }
    }

    fn pack(&mut self, part: &HostTensor, row: usize, panel: &mut [u8], lane: usize) {
        let Some(layout) = GroupLayout::of(self.dtype) else {
            part.read_row(row, &mut self.values);
            let place = (lane, self.panel_rows);
            return match self.dtype {
                Dtype::F16 => {
                    scatter(panel, place, &self.values, |x| f16::from_f32(x).to_ne_bytes())
                }
                Dtype::BF16 => scatter_pairs(panel, place, &self.values),
                _ => scatter(panel, place, &self.values, f32::to_ne_bytes),
            };
        };
        let bytes = part.row_bytes(row).expect("the part was checked to have its rows");
        quant::unpack_groups(part.dtype, bytes, &mut self.codes, &mut self.groups);
        let panel = panel.chunks_exact_mut(layout.super_block_bytes());
        let sources = bytes.chunks_exact(part.dtype.block_bytes());
        let codes = self.codes.chunks_exact(layout.super_block_len());
        let groups = self.groups.chunks_exact(layout.num_groups);
        for ((out, source), (groups, codes)) in panel.zip(sources).zip(groups.zip(codes)) {
            let scales = shared_scales(part.dtype, source).unwrap_or(groups[0]);
            layout.write_row(out, lane, scales, (groups, codes));
        }
    }
}

/// What scales and minimums of the groups of a super-block are multiples of.
///
/// # Source
/// As [`quant::unpack_groups`].
fn shared_scales(dtype: Dtype, block: &[u8]) -> Option<quant::Group> {
    let half = |at: usize| f16::from_le_bytes([block[at], block[at + 1]]).to_f32();
    match dtype {
        Dtype::Q4K | Dtype::Q5K => Some(quant::Group { scale: half(0), min: -half(2) }),
        Dtype::Q6K => Some(quant::Group { scale: half(208), min: 0.0 }),
        _ => None,
    }
}

/// Writes plain numbers into `[cols, panel_rows]`.
fn scatter<const N: usize>(
    panel: &mut [u8],
    (lane, panel_rows): (usize, usize),
    values: &[f32],
    to_bytes: impl Fn(f32) -> [u8; N],
) {
    let columns = panel.as_chunks_mut::<N>().0.chunks_exact_mut(panel_rows);
    for (column, value) in columns.zip(values) {
        column[lane] = to_bytes(*value);
    }
}

/// Writes numbers as bf16 into `[cols / 2, panel_rows, 2]`.
fn scatter_pairs(panel: &mut [u8], (lane, panel_rows): (usize, usize), values: &[f32]) {
    let pairs = panel.as_chunks_mut::<4>().0.chunks_exact_mut(panel_rows);
    for (pair, values) in pairs.zip(values.chunks(2)) {
        for (bytes, value) in pair[lane].as_chunks_mut::<2>().0.iter_mut().zip(values) {
            *bytes = bf16::from_f32(*value).to_ne_bytes();
        }
    }
}
