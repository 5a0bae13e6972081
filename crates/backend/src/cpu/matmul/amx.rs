//! Kernels for weights in bf16 and AMX, whose tiles multiply 16 rows of activations with a panel.
//!
//! ```text
//!                        tile 6         tile 7           weights: 16 vectors, 32 columns
//!                        panel 0        panel 1
//! tile 4   rows 0..16    sums, tile 0   sums, tile 2     [rows][16 lanes]
//! tile 5   rows 16..32   sums, tile 1   sums, tile 3
//! x: [rows][16 words]
//! ```
//!
//! A panel's vectors, 16 rows times a pair of neighbouring columns, are what AMX wants of its
//! second operand. The instructions are written by hand, since Rust has no stable names for them;
//! nothing else in this process touches tiles, so they keep their contents from one piece of
//! assembly to the next.
//!
//! Quantised weights do without tiles: their products would be exact and cheap, but every 32
//! columns must leave the tiles to be scaled. Measured on a Xeon of family 6, model 207, that made
//! tiles of bytes 0.6 times as fast as the dot products of AVX-512.
//!
//! # Source
//! Intel's manual, volume 1 chapter 18 and volume 2.

use std::{
    arch::{asm, x86_64::*},
    cell::Cell,
};

use super::{
    activations::{Form, Part},
    avx512,
    format::{PANEL_ROWS, VECTOR_BYTES},
    tile::{Tile, TileKernel, prefetch},
};

/// Rows of a tile, and vectors of a panel that a tile holds: 32 columns, two a word.
const TILE_ROWS: usize = 16;

/// Words of a row of activations that a tile holds.
const ROW_WORDS: usize = VECTOR_BYTES / 4;

/// Most rows of a block: two tiles.
const MAX_ROWS: usize = 2 * TILE_ROWS;

/// Most panels at once.
const MAX_PANELS: usize = 2;

/// Number `n - 1` takes `n` rows of activations.
pub(super) const KERNELS: &[TileKernel] = &[tile as TileKernel; MAX_ROWS];

/// What `ldtilecfg` reads: bytes of a row and rows, of each tile.
#[repr(C, align(64))]
struct TileShapes {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    num_rows: [u8; 16],
}

impl TileShapes {
    /// For `num_rows` rows of activations.
    fn new(num_rows: usize) -> Self {
        let rows = [num_rows.min(TILE_ROWS), num_rows.saturating_sub(TILE_ROWS)];
        // A tile of no rows is not allowed; what is not there is not used either.
        let [low, high] = rows.map(|rows| rows.max(1) as u8);
        let mut shapes = Self {
            palette: 1,
            start_row: 0,
            reserved: [0; 14],
            row_bytes: [0; 16],
            num_rows: [0; 16],
        };
        shapes.row_bytes[..8].fill(VECTOR_BYTES as u16);
        let all = TILE_ROWS as u8;
        shapes.num_rows[..8].copy_from_slice(&[low, high, low, high, low, high, all, all]);
        shapes
    }
}

thread_local! {
    /// Rows of activations that this thread's tiles are shaped for; 0: none.
    static SHAPED: Cell<usize> = const { Cell::new(0) };
}

/// Shapes this thread's tiles, if they have another shape: doing so costs as much as ten products.
///
/// # Safety
/// The processor has AMX and this process may use it.
unsafe fn shape(num_rows: usize) {
    if SHAPED.replace(num_rows) != num_rows {
        let shapes = TileShapes::new(num_rows);
        // SAFETY: the caller's promise; the shapes are of palette 1, within its limits.
        unsafe { asm!("ldtilecfg [{}]", in(reg) &shapes, options(nostack, readonly)) };
    }
}

/// Gives this thread's tiles back: the system saves what is in use when it switches threads.
pub(super) fn release() {
    if SHAPED.replace(0) != 0 {
        // SAFETY: tiles could be shaped, so they can be given back.
        unsafe { asm!("tilerelease", options(nostack, nomem)) };
    }
}

/// Sums of a tile: `[panel][row][lane]`.
#[repr(C, align(64))]
struct Sums([[[f32; PANEL_ROWS]; MAX_ROWS]; MAX_PANELS]);

/// Panels of weights times activations rounded to bf16.
#[target_feature(enable = "avx512f")]
fn tile(tile: &Tile<'_>) {
    let num_rows = tile.x.len() / (tile.num_steps * ROW_WORDS);
    let num_panels = tile.out.num_lanes.div_ceil(PANEL_ROWS);
    assert!((1..=MAX_ROWS).contains(&num_rows) && (1..=MAX_PANELS).contains(&num_panels));
    let num_vectors = tile.weights.len() / (num_panels * VECTOR_BYTES);
    assert!(num_vectors.div_ceil(TILE_ROWS) == tile.num_steps);
    let mut sums = Sums([[[0.0; PANEL_ROWS]; MAX_ROWS]; MAX_PANELS]);
    let mut padded = [[0; TILE_ROWS * VECTOR_BYTES]; MAX_PANELS];
    // SAFETY: kernels run only where the processor has what they need; every step's weights and
    // activations are inside the panels and the block, or in a copy with zeros behind the last
    // columns; the kernel's caller keeps everybody else off the tile.
    unsafe {
        shape(num_rows);
        clear();
        for step in 0..tile.num_steps {
            let vectors = step * TILE_ROWS..num_vectors.min((step + 1) * TILE_ROWS);
            let weights = |panel: usize| {
                let start = (panel * num_vectors + vectors.start) * VECTOR_BYTES;
                &tile.weights[start..start + vectors.len() * VECTOR_BYTES]
            };
            load_x(tile.x[step * num_rows * ROW_WORDS..].as_ptr(), num_rows);
            add_first(whole(weights(0), &mut padded[0]), num_rows);
            if num_panels > 1 {
                add_second(whole(weights(1), &mut padded[1]), num_rows);
            }
        }
        store_first(&mut sums.0[0], num_rows);
        if num_panels > 1 {
            store_second(&mut sums.0[1], num_rows);
        }
        for row in 0..num_rows {
            for (panel, sums) in sums.0[..num_panels].iter().enumerate() {
                avx512::write_row(tile, row, panel, _mm512_load_ps(sums[row].as_ptr()));
            }
        }
    }
}

/// The vectors of a step, if there are 16; else a copy of them with zeros after it.
#[inline(always)]
fn whole(vectors: &[u8], padded: &mut [u8; TILE_ROWS * VECTOR_BYTES]) -> *const u8 {
    if vectors.len() == padded.len() {
        prefetch(vectors.as_ptr(), vectors.len());
        return vectors.as_ptr();
    }
    padded[..vectors.len()].copy_from_slice(vectors);
    padded.as_ptr()
}

/// Sets all sums to zero.
///
/// # Safety
/// Tiles are shaped.
#[inline(always)]
unsafe fn clear() {
    // SAFETY: the caller's promise.
    unsafe {
        asm!(
            "tilezero tmm0", "tilezero tmm1", "tilezero tmm2", "tilezero tmm3",
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _, options(nostack, nomem),
        );
    }
}

/// Loads a step's rows of activations.
///
/// # Safety
/// Tiles are shaped, and `x` leads to as many rows.
#[inline(always)]
unsafe fn load_x(x: *const u32, num_rows: usize) {
    // SAFETY: the caller's promise.
    unsafe {
        asm!("tileloadd tmm4, [{} + {} * 1]", in(reg) x, in(reg) VECTOR_BYTES,
            out("tmm4") _, options(nostack, readonly));
        if num_rows > TILE_ROWS {
            asm!("tileloadd tmm5, [{} + {} * 1]", in(reg) x.add(TILE_ROWS * ROW_WORDS),
                in(reg) VECTOR_BYTES, out("tmm5") _, options(nostack, readonly));
        }
    }
}

/// Declares, for one panel, functions that add a step's products to the sums, and that store them.
macro_rules! panel {
    ($add:ident, $store:ident, $low:tt, $high:tt, $weights:tt) => {
        /// # Safety
        /// Tiles are shaped, x is loaded, `vectors` leads to 16 of them.
        #[inline(always)]
        unsafe fn $add(vectors: *const u8, num_rows: usize) {
            // SAFETY: the caller's promise.
            unsafe {
                asm!(
                    concat!("tileloadd ", $weights, ", [{} + {} * 1]"),
                    concat!("tdpbf16ps ", $low, ", tmm4, ", $weights),
                    in(reg) vectors, in(reg) VECTOR_BYTES,
                    out($low) _, out($weights) _, options(nostack, readonly),
                );
                if num_rows > TILE_ROWS {
                    asm!(
                        concat!("tdpbf16ps ", $high, ", tmm5, ", $weights),
                        out($high) _, options(nostack, nomem),
                    );
                }
            }
        }

        /// # Safety
        /// Tiles are shaped.
        #[inline(always)]
        unsafe fn $store(sums: &mut [[f32; PANEL_ROWS]; MAX_ROWS], num_rows: usize) {
            // SAFETY: the caller's promise; there is room for two tiles.
            unsafe {
                asm!(concat!("tilestored [{} + {} * 1], ", $low), in(reg) sums.as_mut_ptr(),
                    in(reg) VECTOR_BYTES, options(nostack));
                if num_rows > TILE_ROWS {
                    asm!(concat!("tilestored [{} + {} * 1], ", $high),
                        in(reg) sums[TILE_ROWS..].as_mut_ptr(), in(reg) VECTOR_BYTES,
                        options(nostack));
                }
            }
        }
    };
}

panel!(add_first, store_first, "tmm0", "tmm1", "tmm6");
panel!(add_second, store_second, "tmm2", "tmm3", "tmm7");

/// Rounds a part to nearest even, into [`Form::Bf16Tiles`].
#[target_feature(enable = "avx512f,avx512bf16")]
pub(super) fn round(part: &Part<'_>, out: &mut [u32]) {
    let num_rows = part.num_rows();
    assert!(out.len() >= num_rows * Form::Bf16Tiles.row_words(part.num_columns()));
    for row in 0..num_rows {
        for (step, x) in part.row(row).chunks(2 * ROW_WORDS).enumerate() {
            let mut numbers = [0.0_f32; 2 * ROW_WORDS];
            numbers[..x.len()].copy_from_slice(x);
            let words = &mut out[(step * num_rows + row) * ROW_WORDS..][..ROW_WORDS];
            // SAFETY: 32 numbers in, 16 words out.
            unsafe {
                let [low, high] = [0, ROW_WORDS].map(|i| _mm512_loadu_ps(numbers[i..].as_ptr()));
                let rounded: __m512i = std::mem::transmute(_mm512_cvtne2ps_pbh(high, low));
                _mm512_storeu_si512(words.as_mut_ptr().cast(), rounded);
            }
        }
    }
}
