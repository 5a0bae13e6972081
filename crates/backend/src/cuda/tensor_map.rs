//! Descriptions of tensors for the copy engine.

use cudarc::driver::sys;
use inflight_kernels::{TensorMap, ops::hopper_gemm::HopperBoxes};

use super::check::check;
use crate::BackendError;

/// A tensor of bf16 and the boxes taken of it. The fastest dimension comes first.
pub(super) struct Boxes<'a> {
    pub(super) address: sys::CUdeviceptr,
    /// Elements along each dimension; what lies outside reads as zeros.
    pub(super) dims: &'a [usize],
    /// Bytes from one element to the next, of all dimensions but the first.
    pub(super) strides: &'a [usize],
    /// Elements of a box along each dimension.
    pub(super) sides: &'a [u32],
}

impl<'a> Boxes<'a> {
    /// As a kernel asks for them.
    pub(super) fn of(address: sys::CUdeviceptr, boxes: &'a HopperBoxes) -> Self {
        let HopperBoxes { dims, strides, sides } = boxes;
        Self { address, dims, strides, sides }
    }
}

/// As the driver encodes it, with chunks of 16 bytes exchanged within 8 rows of 128 bytes.
pub(super) fn tensor_map(boxes: &Boxes<'_>) -> Result<TensorMap, BackendError> {
    encode(boxes, sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B)
}

/// As above, but rows of a box lie one behind the other in shared memory.
pub(super) fn plain_tensor_map(boxes: &Boxes<'_>) -> Result<TensorMap, BackendError> {
    encode(boxes, sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_NONE)
}

fn encode(boxes: &Boxes<'_>, swizzle: sys::CUtensorMapSwizzle) -> Result<TensorMap, BackendError> {
    let dims: Vec<u64> = boxes.dims.iter().map(|dim| *dim as u64).collect();
    let strides: Vec<u64> = boxes.strides.iter().map(|stride| *stride as u64).collect();
    assert!(strides.len() + 1 == dims.len() && boxes.sides.len() == dims.len(), "dimensions");
    let steps = vec![1_u32; dims.len()];
    let mut map = TensorMap([0; 16]);
    // SAFETY: `map` has the size and alignment of a `CUtensorMap`, and every list as many elements
    // as there are dimensions (`strides` one fewer). The address is only noted.
    let encoded = unsafe {
        sys::cuTensorMapEncodeTiled(
            (&raw mut map).cast(),
            sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
            dims.len() as u32,
            boxes.address as *mut std::ffi::c_void,
            dims.as_ptr(),
            strides.as_ptr(),
            boxes.sides.as_ptr(),
            steps.as_ptr(),
            sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
            swizzle,
            sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
            sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    };
    check("cuTensorMapEncodeTiled", encoded)?;
    Ok(map)
}
