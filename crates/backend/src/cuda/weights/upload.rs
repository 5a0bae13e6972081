//! Weights on their way to the device: read and converted on all cores into one half of a pinned
//! staging area while the other half is being copied.

use std::{ops::Range, sync::Arc, thread};

use cudarc::driver::sys;
use half::{bf16, slice::HalfFloatSliceExt};
use inflight_kernels::ops::fp8_quantize::{fp8_place, fp8_row_bytes};

use crate::cuda::{
    check::check,
    device::Device,
    event::CudaEvent,
    memory::{Allocation, CudaHostBuffer, Element},
    operators::{FillNormal, Operators},
    stream::CudaStream,
};
use crate::{BackendError, Dtype, HostTensor, TensorData};

/// Bytes of each half of the staging area.
const STAGING_BYTES: usize = 32 << 20;
/// Most threads that convert: beyond, the host's memory is the limit.
const MAX_THREADS: usize = 16;
/// Bytes below which another thread costs more than it gives.
const MIN_BYTES_PER_THREAD: usize = 256 << 10;

/// Copies weights to the device.
pub(super) struct Uploader {
    stream: CudaStream,
    halves: [Half; 2],
    /// The half that was filled last.
    latest: usize,
}

struct Half {
    host: CudaHostBuffer,
    copied: CudaEvent,
}

impl Uploader {
    pub(super) fn new(device: &Arc<Device>) -> Result<Self, BackendError> {
        let half = || {
            let host = CudaHostBuffer::zeroed(device, "weight staging", STAGING_BYTES)?;
            Ok::<_, BackendError>(Half { host, copied: CudaEvent::new(device, true)? })
        };
        Ok(Self { stream: CudaStream::new(device)?, halves: [half()?, half()?], latest: 1 })
    }

    pub(super) fn stream(&self) -> &CudaStream {
        &self.stream
    }

    /// Writes `parts` one after the other into `to`, as `element`. Returns when they are there.
    pub(super) fn load(
        &mut self,
        parts: &[HostTensor],
        to: &Allocation,
        element: Element,
        operators: &Operators,
    ) -> Result<(), BackendError> {
        let mut address = to.address();
        for part in parts {
            let len = part.num_rows() * part.row_len();
            match part.data {
                TensorData::Random { seed, std } => {
                    let fill = FillNormal { address, element, len, seed, std };
                    operators.fill_normal(&fill, &self.stream)?;
                }
                _ => self.copy(part, address, element)?,
            }
            address += (part.num_rows() * row_bytes(part, element)) as u64;
        }
        self.stream.finish()
    }

    /// Writes stored codes to `address`. Returns when they are there.
    pub(super) fn copy_codes(
        &mut self,
        codes: &HostTensor,
        address: sys::CUdeviceptr,
    ) -> Result<(), BackendError> {
        self.copy(codes, address, Element::Fp8)?;
        self.stream.finish()
    }

    fn copy(
        &mut self,
        tensor: &HostTensor,
        address: sys::CUdeviceptr,
        element: Element,
    ) -> Result<(), BackendError> {
        let row_bytes = row_bytes(tensor, element);
        if row_bytes > STAGING_BYTES {
            return Err(tensor.error("has rows longer than the staging area"));
        }
        let rows_per_chunk = STAGING_BYTES / row_bytes.max(1);
        for first in (0..tensor.num_rows()).step_by(rows_per_chunk) {
            let rows = first..tensor.num_rows().min(first + rows_per_chunk);
            let at = address + (first * row_bytes) as u64;
            self.copy_rows(tensor, rows, at, element)?;
        }
        Ok(())
    }

    fn copy_rows(
        &mut self,
        tensor: &HostTensor,
        rows: Range<usize>,
        address: sys::CUdeviceptr,
        element: Element,
    ) -> Result<(), BackendError> {
        self.latest = 1 - self.latest;
        let half = &mut self.halves[self.latest];
        half.copied.synchronize()?;
        let bytes = rows.len() * row_bytes(tensor, element);
        // SAFETY: the copy from this half, if there was one, has ended.
        let staged = &mut unsafe { half.host.bytes_mut() }[..bytes];
        convert_rows(tensor, rows, staged, element);
        let from = half.host.as_ptr();
        // SAFETY: both ranges lie in their allocations; the half is not touched until `copied`.
        let copied = unsafe { sys::cuMemcpyHtoDAsync_v2(address, from, bytes, self.stream.raw()) };
        check("cuMemcpyHtoDAsync (weights)", copied)?;
        half.copied.record(&self.stream)
    }
}

/// Bytes of a row on the device: rows of codes are padded.
fn row_bytes(tensor: &HostTensor, element: Element) -> usize {
    match element {
        Element::Fp8 => fp8_row_bytes(tensor.row_len()),
        _ => tensor.row_len() * element.bytes(),
    }
}

/// Writes `rows` of `tensor` as `element` into `out`, on several threads. Codes must be stored.
fn convert_rows(tensor: &HostTensor, rows: Range<usize>, out: &mut [u8], element: Element) {
    let row_bytes = row_bytes(tensor, element);
    let cores = thread::available_parallelism().map_or(1, usize::from).min(MAX_THREADS);
    let num_threads = (out.len() / MIN_BYTES_PER_THREAD).clamp(1, cores).min(rows.len().max(1));
    let rows_per_thread = rows.len().div_ceil(num_threads).max(1);
    let convert = |first: usize, out: &mut [u8]| {
        let mut scratch = vec![0.0; tensor.row_len()];
        for (i, out) in out.chunks_exact_mut(row_bytes.max(1)).enumerate() {
            convert_row(tensor, first + i, &mut scratch, out, element);
        }
    };
    thread::scope(|scope| {
        let chunks = out.chunks_mut((rows_per_thread * row_bytes).max(1));
        for (i, chunk) in chunks.enumerate() {
            scope.spawn(move || convert(rows.start + i * rows_per_thread, chunk));
        }
    });
}

/// Writes row `row` of `tensor` as `element` into `out`; `scratch` has the row's length.
fn convert_row(
    tensor: &HostTensor,
    row: usize,
    scratch: &mut [f32],
    out: &mut [u8],
    element: Element,
) {
    if element == Element::Fp8 {
        let codes = tensor.row_bytes(row).expect("codes are stored");
        out.fill(0);
        return codes.iter().enumerate().for_each(|(col, code)| out[fp8_place(col)] = *code);
    }
    let stored = match (tensor.dtype, element) {
        (Dtype::BF16, Element::Bf16) | (Dtype::F32, Element::F32) => tensor.row_bytes(row),
        _ => None,
    };
    if let Some(stored) = stored {
        return out.copy_from_slice(stored);
    }
    tensor.read_row(row, scratch);
    match element {
        Element::Bf16 => {
            let mut rounded = [bf16::ZERO; 256];
            for (values, out) in scratch.chunks(256).zip(out.chunks_mut(512)) {
                let rounded = &mut rounded[..values.len()];
                rounded.convert_from_f32_slice(values);
                for (value, out) in rounded.iter().zip(out.as_chunks_mut::<2>().0) {
                    *out = value.to_le_bytes();
                }
            }
        }
        Element::F32 | Element::Word | Element::Fp8 => {
            for (value, out) in scratch.iter().zip(out.as_chunks_mut::<4>().0) {
                *out = value.to_le_bytes();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tensor(dtype: Dtype, shape: &[usize], bytes: Vec<u8>) -> HostTensor {
        let data = TensorData::Owned(bytes.into());
        HostTensor { name: "test".into(), dtype, shape: shape.to_vec(), data }
    }

    fn f32_bytes(values: &[f32]) -> Vec<u8> {
        values.iter().flat_map(|value| value.to_le_bytes()).collect()
    }

    #[test]
    fn rows_become_bf16_and_f32_whatever_the_thread() {
        let (num_rows, len) = (3000, 300);
        let values: Vec<f32> = (0..num_rows * len).map(|i| (i % 251) as f32 / 7.0).collect();
        let tensor = tensor(Dtype::F32, &[num_rows, len], f32_bytes(&values));
        let rows = 10..num_rows - 5;
        let expected = &values[10 * len..(num_rows - 5) * len];

        let mut out = vec![0; expected.len() * 2];
        convert_rows(&tensor, rows.clone(), &mut out, Element::Bf16);
        let bits = expected.iter().flat_map(|value| bf16::from_f32(*value).to_le_bytes());
        assert!(bits.eq(out.iter().copied()));

        let mut out = vec![0; expected.len() * 4];
        convert_rows(&tensor, rows, &mut out, Element::F32);
        assert_eq!(out, f32_bytes(expected));
    }

    #[test]
    fn stored_bf16_is_copied_as_it_is() {
        let bytes = vec![0x01, 0x80, 0x49, 0x40, 0xff, 0x7f];
        let mut out = vec![0; 6];
        convert_rows(&tensor(Dtype::BF16, &[3], bytes.clone()), 0..1, &mut out, Element::Bf16);
        assert_eq!(out, bytes);
    }

    #[test]
    fn halves_round_to_nearest() {
        // 1 + 2^-8 lies midway between two bf16 values: ties go to the even one, which is 1.
        let bytes = f32_bytes(&[1.0 + f32::powi(2.0, -8), -2.5]);
        let mut out = vec![0; 4];
        convert_rows(&tensor(Dtype::F32, &[2], bytes), 0..1, &mut out, Element::Bf16);
        assert_eq!(out, [0x80, 0x3f, 0x20, 0xc0]);
    }
}
