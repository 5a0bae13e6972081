//! Memory for weights: pieces of large mappings, so that huge pages hold small matrices too.

use std::{ops::Range, ptr::NonNull};

use memmap2::MmapMut;

use crate::{
    BackendError,
    sync::{Arc, Mutex, lock},
};

/// Bytes of a huge page, to which mappings are aligned.
const HUGE_PAGE_BYTES: usize = 2 << 20;

/// Bytes of a mapping, unless a piece needs more. Pages that nobody touches cost nothing.
const CHUNK_BYTES: usize = 64 << 20;

/// Pieces begin at whole lines of the caches, so that registers are loaded from one line.
const PIECE_ALIGNMENT: usize = 64;

/// Where panels are put. A matrix of its own mapping would have its ends, or all of it, in small
/// pages; decoding with few rows, which reads all weights in every step, then waits for the
/// processor's address cache.
#[derive(Default)]
pub(crate) struct WeightMemory {
    /// The mapping that is being filled, and how far it is.
    open: Mutex<Option<(Arc<Chunk>, usize)>>,
}

/// A piece, which holds panels. It keeps its whole mapping.
pub(super) struct PanelMemory {
    chunk: Arc<Chunk>,
    range: Range<usize>,
}

/// Zeroed memory, aligned to huge pages, which it asks for.
struct Chunk {
    start: NonNull<u8>,
    len: usize,
    /// Owns the memory.
    _map: MmapMut,
}

// SAFETY: it is memory that only pieces reach, each its own range.
unsafe impl Send for Chunk {}
// SAFETY: as above; a piece is written only by whoever has it to himself.
unsafe impl Sync for Chunk {}

impl WeightMemory {
    /// `len` bytes of zeros.
    pub(super) fn zeroed(&self, len: usize) -> Result<PanelMemory, BackendError> {
        let mut open = lock(&self.open);
        let fits = |(chunk, used): &(Arc<Chunk>, usize)| chunk.len - used >= len;
        let (chunk, used) = match open.take().filter(fits) {
            Some(open) => open,
            None => (Arc::new(Chunk::zeroed(len)?), 0),
        };
        let range = used..used + len;
        let end = range.end.next_multiple_of(PIECE_ALIGNMENT);
        if end < chunk.len {
            *open = Some((Arc::clone(&chunk), end));
        }
        Ok(PanelMemory { chunk, range })
    }
}

impl Chunk {
    /// At least `len` bytes.
    fn zeroed(len: usize) -> Result<Self, BackendError> {
        let fail =
            || BackendError::OutOfMemory { device: "cpu", what: "weights".to_string(), bytes: len };
        let len = len.max(CHUNK_BYTES);
        let with_ends = len.checked_add(HUGE_PAGE_BYTES).ok_or_else(fail)?;
        let mut map = MmapMut::map_anon(with_ends).map_err(|_| fail())?;
        #[cfg(target_os = "linux")]
        {
            // Only advice: a system that has no huge pages goes without.
            let _ = map.advise(memmap2::Advice::HugePage);
        }
        let before = map.as_ptr().align_offset(HUGE_PAGE_BYTES).min(HUGE_PAGE_BYTES);
        let start = NonNull::new(map[before..].as_mut_ptr()).ok_or_else(fail)?;
        Ok(Self { start, len, _map: map })
    }
}

impl PanelMemory {
    pub(super) fn bytes(&self) -> &[u8] {
        // SAFETY: the range lies in the chunk, whose bytes are initialised; it is this piece's
        // alone, and nobody writes it while it is borrowed.
        unsafe { std::slice::from_raw_parts(self.start().as_ptr(), self.range.len()) }
    }

    pub(super) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and whoever borrows the piece mutably has it to himself.
        unsafe { std::slice::from_raw_parts_mut(self.start().as_ptr(), self.range.len()) }
    }

    fn start(&self) -> NonNull<u8> {
        // SAFETY: inside the chunk.
        unsafe { self.chunk.start.add(self.range.start) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_zeroed_aligned_and_their_own() {
        let memory = WeightMemory::default();
        let lens = [1, 100, 0, 64, CHUNK_BYTES - 256, 3, CHUNK_BYTES + 1, 5];
        let mut pieces: Vec<_> = lens.iter().map(|len| memory.zeroed(*len).unwrap()).collect();
        drop(memory);
        for (i, (piece, len)) in pieces.iter_mut().zip(lens).enumerate() {
            assert_eq!(piece.bytes().len(), len);
            assert!(piece.bytes().as_ptr().addr().is_multiple_of(PIECE_ALIGNMENT));
            assert!(piece.bytes().iter().step_by(64).all(|byte| *byte == 0));
            piece.bytes_mut().first_mut().into_iter().for_each(|byte| *byte = i as u8 + 1);
            piece.bytes_mut().last_mut().into_iter().for_each(|byte| *byte = i as u8 + 1);
        }
        for (i, piece) in pieces.iter().enumerate().filter(|(i, _)| lens[*i] > 0) {
            let bytes = piece.bytes();
            assert_eq!((bytes[0], bytes[bytes.len() - 1]), (i as u8 + 1, i as u8 + 1));
        }
    }

    #[test]
    fn too_much_is_an_error() {
        assert!(WeightMemory::default().zeroed(usize::MAX).is_err());
        assert!(WeightMemory::default().zeroed(1 << 60).is_err());
    }
}
