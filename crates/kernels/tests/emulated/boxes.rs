//! Tensors and the boxes that kernels copy of them.

use inflight_kernels::{DevicePtr, TensorMap, ops::hopper_gemm::HopperBoxes};

/// As `Boxes` of the backend, of elements of two bytes.
pub(crate) struct Boxes<'a> {
    pub(crate) address: DevicePtr,
    /// Elements along each dimension, the fastest first; what lies outside reads as zeros.
    pub(crate) dims: &'a [usize],
    /// Bytes from one element to the next, of all dimensions but the first.
    pub(crate) strides: &'a [usize],
    /// Elements of a box along each dimension.
    pub(crate) sides: &'a [u32],
}

impl<'a> Boxes<'a> {
    /// As a kernel asks for them.
    pub(crate) fn of(address: DevicePtr, boxes: &'a HopperBoxes) -> Self {
        let HopperBoxes { dims, strides, sides } = boxes;
        Self { address, dims, strides, sides }
    }

    /// Rows of a box lie one behind the other in shared memory, and nothing is exchanged.
    pub(crate) fn plain_map(&self) -> TensorMap {
        let TensorMap(mut words) = self.map();
        words[15] = 1;
        TensorMap(words)
    }

    /// As `cuda/bulk.h` has it: what the driver makes of it is nobody's business.
    pub(crate) fn map(&self) -> TensorMap {
        const IS_BOX: u64 = 0x0b0c_0ded;
        const MAX_DIMS: usize = 4;
        let num_dims = self.dims.len();
        assert!(self.strides.len() + 1 == num_dims && self.sides.len() == num_dims);
        let mut words = [0; 16];
        words[..3].copy_from_slice(&[IS_BOX, self.address, num_dims as u64]);
        for i in 0..MAX_DIMS {
            words[3 + i] = self.dims.get(i).map_or(1, |dim| *dim as u64);
            words[10 + i] = self.sides.get(i).map_or(1, |side| u64::from(*side));
        }
        for (word, stride) in words[7..10].iter_mut().zip(self.strides) {
            *word = *stride as u64;
        }
        words[14] = 2;
        TensorMap(words)
    }
}
