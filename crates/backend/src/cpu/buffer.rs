//! CPU memory that streams share, with a check that they never use it at odds.

use std::{
    marker::PhantomData,
    ops::{Deref, DerefMut},
    ptr::NonNull,
};

use half::{bf16, f16};
use memmap2::MmapMut;

use super::kernels::{Fp8, Int4, Int8};
use crate::{
    BackendError,
    sync::{Arc, AtomicI32, Mutex, MutexGuard, Ordering, lock},
};

/// From this size on a buffer may use huge pages: fewer TLB misses while a KV cache is read.
const MIN_HUGE_BYTES: usize = 4 << 20;

/// Types for which every bit pattern is a value, so that zeroed and reinterpreted memory is valid.
///
/// # Safety
/// Implementors have no padding, no invalid bit pattern and an alignment of at most 64.
pub(crate) unsafe trait Element: Copy + Send + Sync + 'static {}

// SAFETY: plain numbers of at most four bytes.
unsafe impl Element for f32 {}
// SAFETY: as above.
unsafe impl Element for u32 {}
// SAFETY: as above.
unsafe impl Element for u8 {}
// SAFETY: as above.
unsafe impl Element for f16 {}
// SAFETY: as above.
unsafe impl Element for bf16 {}
// SAFETY: as above: bytes.
unsafe impl Element for Int8 {}
// SAFETY: as `u8`, which it is.
unsafe impl Element for Int4 {}
// SAFETY: as above.
unsafe impl Element for Fp8 {}

/// A handle to CPU memory. Cloning gives another handle to the same memory.
///
/// Operations lease a buffer while they run: many readers or one writer. Streams and events must
/// order the operations so that leases never collide; a collision means that a wait is missing, so
/// it panics on the stream, which the backend reports as a lost device. That makes the handle safe
/// to share, and a missing wait a failing test instead of a wrong token.
#[derive(Clone)]
pub struct CpuBuffer {
    allocation: Arc<Allocation>,
}

struct Allocation {
    label: &'static str,
    /// First byte of `memory`; page-aligned.
    start: NonNull<u8>,
    memory: MmapMut,
    /// Number of readers, or -1 for a writer.
    lease: AtomicI32,
    turn: Mutex<()>,
}

// SAFETY: the memory is only reached through leases, which `lease` makes exclusive for writers.
unsafe impl Send for Allocation {}
// SAFETY: as above.
unsafe impl Sync for Allocation {}

impl CpuBuffer {
    /// `bytes` bytes of zeros; pages are not touched, so unused memory costs nothing.
    pub(crate) fn zeroed(label: &'static str, bytes: usize) -> Result<Self, BackendError> {
        let fail = || BackendError::OutOfMemory { device: "cpu", what: label.to_string(), bytes };
        let mut memory = MmapMut::map_anon(bytes.max(1)).map_err(|_| fail())?;
        if bytes >= MIN_HUGE_BYTES {
            advise_huge_pages(&memory);
        }
        let start = NonNull::new(memory.as_mut_ptr()).ok_or_else(fail)?;
        let allocation =
            Allocation { label, start, memory, lease: AtomicI32::new(0), turn: Mutex::new(()) };
        Ok(Self { allocation: Arc::new(allocation) })
    }

    /// Waits until nobody else has the buffer to himself. For memory of which two streams use
    /// different parts at the same time, as with blocks of the KV cache that are moved: here they
    /// take turns, where other devices let them.
    pub(crate) fn take_turns(&self) -> MutexGuard<'_, ()> {
        lock(&self.allocation.turn)
    }

    /// Leases the buffer for reading.
    pub(crate) fn read<T: Element>(&self) -> ReadLease<'_, T> {
        let lease = &self.allocation.lease;
        let before = lease.fetch_add(1, Ordering::Acquire);
        if before < 0 {
            lease.fetch_sub(1, Ordering::Release);
            panic!("buffer {}: read while being written: a wait is missing", self.allocation.label);
        }
        ReadLease { allocation: &self.allocation, element: PhantomData }
    }

    /// Leases the buffer for writing.
    pub(crate) fn write<T: Element>(&self) -> WriteLease<'_, T> {
        let taken =
            self.allocation.lease.compare_exchange(0, -1, Ordering::Acquire, Ordering::Relaxed);
        if taken.is_err() {
            panic!("buffer {}: written while in use: a wait is missing", self.allocation.label);
        }
        WriteLease { allocation: &self.allocation, element: PhantomData }
    }
}

impl Allocation {
    fn len<T>(&self) -> usize {
        self.memory.len() / size_of::<T>()
    }
}

#[cfg(target_os = "linux")]
fn advise_huge_pages(memory: &MmapMut) {
    // Only advice: a kernel without huge pages is slower, not wrong.
    let _ = memory.advise(memmap2::Advice::HugePage);
}

#[cfg(not(target_os = "linux"))]
fn advise_huge_pages(_memory: &MmapMut) {}

/// Shared access to a buffer's elements.
pub(crate) struct ReadLease<'a, T> {
    allocation: &'a Allocation,
    element: PhantomData<T>,
}

impl<T: Element> Deref for ReadLease<'_, T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        let start = self.allocation.start.as_ptr().cast();
        // SAFETY: the memory is initialised, page-aligned and `len` elements long; any bits are a
        // valid T; the lease keeps writers out while it lives.
        unsafe { std::slice::from_raw_parts(start, self.allocation.len::<T>()) }
    }
}

impl<T> Drop for ReadLease<'_, T> {
    fn drop(&mut self) {
        self.allocation.lease.fetch_sub(1, Ordering::Release);
    }
}

/// Exclusive access to a buffer's elements.
pub(crate) struct WriteLease<'a, T> {
    allocation: &'a Allocation,
    element: PhantomData<T>,
}

impl<T: Element> Deref for WriteLease<'_, T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        let start = self.allocation.start.as_ptr().cast();
        // SAFETY: as in `ReadLease`; the lease keeps everyone else out.
        unsafe { std::slice::from_raw_parts(start, self.allocation.len::<T>()) }
    }
}

impl<T: Element> DerefMut for WriteLease<'_, T> {
    fn deref_mut(&mut self) -> &mut [T] {
        let start = self.allocation.start.as_ptr().cast();
        // SAFETY: as in `ReadLease`; the lease keeps everyone else out, and `&mut self` makes this
        // the only reference made from it.
        unsafe { std::slice::from_raw_parts_mut(start, self.allocation.len::<T>()) }
    }
}

impl<T> Drop for WriteLease<'_, T> {
    fn drop(&mut self) {
        // Add rather than store 0: a reader that is about to panic may have added itself.
        self.allocation.lease.fetch_add(1, Ordering::Release);
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use super::*;

    #[test]
    fn a_buffer_has_many_readers_or_one_writer() {
        let buffer = CpuBuffer::zeroed("test", 8).unwrap();
        buffer.write::<u32>()[1] = 7;
        let other = buffer.clone();
        let (a, b) = (buffer.read::<u32>(), other.read::<u32>());
        assert_eq!((a[1], b[1]), (7, 7));
        let write = || drop(other.write::<u32>());
        assert!(catch_unwind(AssertUnwindSafe(write)).is_err());
        drop((a, b));
        let writer = buffer.write::<u32>();
        let read = || drop(other.read::<u32>());
        assert!(catch_unwind(AssertUnwindSafe(read)).is_err());
        drop(writer);
        assert_eq!(other.read::<u32>()[1], 7);
    }

    #[test]
    fn an_impossible_size_is_an_error() {
        assert!(CpuBuffer::zeroed("huge", usize::MAX - 100).is_err());
    }
}
