//! Device memory, and host memory that copies can reach while the host goes on.

use std::{
    ffi::c_void,
    ptr::NonNull,
    sync::{Arc, atomic::Ordering},
};

use cudarc::driver::sys;

use super::{check::check, device::Device};
use crate::BackendError;

/// What a buffer's elements are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Element {
    /// Activations.
    Bf16,
    /// Norm weights, rotary tables and logits.
    F32,
    /// Everything of [`crate::step`], and the KV cache.
    Word,
    /// Codes of weights and of activations, one byte each.
    Fp8,
}

impl Element {
    pub(super) const fn bytes(self) -> usize {
        match self {
            Self::Bf16 => 2,
            Self::F32 | Self::Word => 4,
            Self::Fp8 => 1,
        }
    }
}

/// A handle to device memory. Cloning gives another handle to the same memory.
///
/// Who may use it when is a matter of streams and events; the memory is freed with the last handle,
/// and freeing waits for the device.
#[derive(Clone)]
pub struct CudaBuffer {
    allocation: Arc<Allocation>,
    element: Element,
    /// The same values as bf16, kept beside biases for cuBLASLt's epilogues.
    bf16: Option<Arc<Allocation>>,
}

/// Device memory, freed when dropped.
pub(super) struct Allocation {
    device: Arc<Device>,
    address: sys::CUdeviceptr,
    bytes: usize,
}

impl CudaBuffer {
    /// `len` elements of zeros.
    pub(super) fn zeroed(
        device: &Arc<Device>,
        label: &str,
        len: usize,
        element: Element,
    ) -> Result<Self, BackendError> {
        let bytes = len.saturating_mul(element.bytes());
        let allocation = Allocation::new(device, label, bytes)?;
        // SAFETY: the range is the whole allocation.
        let result = unsafe { sys::cuMemsetD8_v2(allocation.address, 0, allocation.bytes) };
        check("cuMemsetD8", result)?;
        // The host goes on while memory is being set, and other streams do not wait for it.
        device.finish()?;
        Ok(Self { allocation: Arc::new(allocation), element, bf16: None })
    }

    /// The first word, as left by what the caller has waited for.
    pub(super) fn read_word(&self) -> Result<u32, BackendError> {
        let mut word = 0u32;
        let allocation = &self.allocation;
        allocation.device.bind()?;
        // SAFETY: allocations have at least one word, and `word` is a valid place for it.
        let copied = unsafe { sys::cuMemcpyDtoH_v2((&raw mut word).cast(), allocation.address, 4) };
        check("cuMemcpyDtoH", copied)?;
        Ok(word)
    }

    pub(super) fn with_bf16(self, copy: Self) -> Self {
        Self { bf16: Some(copy.allocation), ..self }
    }

    /// First byte, as kernels see it.
    pub(super) fn address(&self) -> sys::CUdeviceptr {
        self.allocation.address
    }

    pub(super) fn allocation(&self) -> &Allocation {
        &self.allocation
    }

    /// First byte of the bf16 copy, if there is one.
    pub(super) fn bf16_address(&self) -> Option<sys::CUdeviceptr> {
        self.bf16.as_ref().map(|allocation| allocation.address)
    }

    pub(super) fn element(&self) -> Element {
        self.element
    }

    /// Number of elements.
    pub(super) fn len(&self) -> usize {
        self.allocation.bytes / self.element.bytes()
    }

    pub(super) fn bytes(&self) -> usize {
        self.allocation.bytes
    }
}

impl Allocation {
    /// `bytes` bytes, not set to anything.
    pub(super) fn new(
        device: &Arc<Device>,
        label: &str,
        bytes: usize,
    ) -> Result<Self, BackendError> {
        device.bind()?;
        let mut address = 0;
        // The driver refuses empty allocations.
        let bytes = bytes.max(16);
        // SAFETY: `address` is a valid place for the result.
        match unsafe { sys::cuMemAlloc_v2(&raw mut address, bytes) } {
            sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY => {
                Err(BackendError::OutOfMemory { device: "cuda", what: label.to_owned(), bytes })
            }
            result => {
                check("cuMemAlloc", result)?;
                device.num_allocations.fetch_add(1, Ordering::Relaxed);
                Ok(Self { device: Arc::clone(device), address, bytes })
            }
        }
    }

    pub(super) fn address(&self) -> sys::CUdeviceptr {
        self.address
    }

    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` and freed once; freeing waits for operations that use it.
        self.device.release("cuMemFree", || unsafe { sys::cuMemFree_v2(self.address) });
    }
}

/// Pinned host memory: the device reads and writes it while the host goes on. It is ordinary cached
/// memory, since the host reads sampled tokens from it.
pub struct CudaHostBuffer {
    device: Arc<Device>,
    start: NonNull<u8>,
    bytes: usize,
}

// SAFETY: the memory belongs to this handle alone, and any thread may use it.
unsafe impl Send for CudaHostBuffer {}

impl CudaHostBuffer {
    /// `bytes` bytes of zeros, at least one word.
    pub(super) fn zeroed(
        device: &Arc<Device>,
        label: &str,
        bytes: usize,
    ) -> Result<Self, BackendError> {
        device.bind()?;
        let bytes = bytes.max(4);
        let mut start: *mut c_void = std::ptr::null_mut();
        // SAFETY: `start` is a valid place for the result.
        let result = unsafe { sys::cuMemHostAlloc(&raw mut start, bytes, 0) };
        let start = NonNull::new(start.cast::<u8>());
        let (sys::CUresult::CUDA_SUCCESS, Some(start)) = (result, start) else {
            let what = format!("{label} (pinned host memory)");
            return Err(BackendError::OutOfMemory { device: "cuda", what, bytes });
        };
        // SAFETY: the allocation is `bytes` bytes long and nobody else knows it.
        unsafe { start.as_ptr().write_bytes(0, bytes) };
        Ok(Self { device: Arc::clone(device), start, bytes })
    }

    pub(super) fn as_ptr(&self) -> *mut c_void {
        self.start.as_ptr().cast()
    }

    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// The memory as words.
    ///
    /// # Safety
    /// No enqueued copy writes it while the slice lives.
    pub(super) unsafe fn words(&self) -> &[u32] {
        // SAFETY: page-aligned, initialised in `zeroed`, `bytes` long; the caller keeps copies
        // away.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr().cast(), self.bytes / 4) }
    }

    /// The memory as words, to write.
    ///
    /// # Safety
    /// No enqueued copy reads or writes it while the slice lives.
    pub(super) unsafe fn words_mut(&mut self) -> &mut [u32] {
        // SAFETY: as in `words`; `&mut self` makes this the only slice.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr().cast(), self.bytes / 4) }
    }

    /// The memory as bytes, to write.
    ///
    /// # Safety
    /// No enqueued copy reads or writes it while the slice lives.
    pub(super) unsafe fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `words_mut`.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.bytes) }
    }
}

impl Drop for CudaHostBuffer {
    fn drop(&mut self) {
        // SAFETY: allocated in `zeroed` and freed once; freeing waits for copies that use it.
        self.device.release("cuMemFreeHost", || unsafe { sys::cuMemFreeHost(self.as_ptr()) });
    }
}
