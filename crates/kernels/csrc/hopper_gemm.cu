// x[m, :] . weight[n, :] for up to M rows of x: either the sums, in parts, or SiLU of one half of
// them times the other. On Hopper, about as fast as the weights can be read.
//
// Operands are swapped: rows of the weights fill the long side of the tensor cores' tile, so that x
// is padded to a multiple of 8 only. A block takes TILE_ROWS rows of the weights, each of its
// groups of four warps 64 of them, the last what is left, such that all blocks run at once and end
// together:
//
//   columns    0..63   64..127   128..      a stage: 64 columns of the weights' tile and of x;
//   stage        0        1        2 ..     STAGES of them are a ring in shared memory
//
// Weights in e4m3 have 128 columns in as many bytes. x is split beforehand into two numbers of e4m3
// for each, see `fp8_split.cuh`, so that tensor cores take all as it comes: sums of a stage are
// multiplied by x's scales, which are of 128 columns of a row, and by the weights' if these are of
// blocks of 128 columns; scales of rows of the weights come at the end. Sums of a stage alone also
// keep what the tensor cores' sums of e4m3 lack in precision from mattering.
//
// SiLU: 8 rows of one half of the weights and 8 of the other in turn are a tile, so that a thread
// has both sums of an output. These meet in shared memory once, and leave as whole rows. SPLIT: as
// codes besides, for the next such product; a tile is of 128 columns of it.
//
// With fewer tiles than multiprocessors, blocks along y share the columns of a tile. Each writes
// its own sums, and the kernel behind, which reads them anyway, adds them up: if blocks waited for
// each other here, memory would be idle for 3 of 13 us.
//
// TILES: as many blocks as multiprocessors take tiles in turn, without parts: of so many rows that
// this loses little. What the next tile needs is on its way while a tile's sums are written.
//
// One thread has everything copied by the tensor memory accelerator. The weights are nobody's
// result: as many as fill the ring are asked for before earlier kernels have ended, but not at
// once. 64 KB a multiprocessor keep memory busy; with more under way, what those kernels read
// themselves has to wait behind it, 5 us for all that rings can take.
//
// Source: operands swapped and x padded to 8 after FlashDecoding++, 2023; roles of warps as in
// CUTLASS's kernels for Hopper; sums of 128 columns of e4m3 at a time as in DeepSeek-V3, 2024.
#include "fp8_split.cuh"
#include "hopper.cuh"

typedef ElementOf<SILU>::type Out; // bf16, or f32.

constexpr u32 GROUP_ROWS = 64; // Of the weights: what tensor cores take at once.
constexpr u32 GROUPS = (TILE_ROWS + GROUP_ROWS - 1) / GROUP_ROWS;
constexpr u32 WARPS = 4 * GROUPS; // That multiply; one more copies.
constexpr u32 THREADS = 32 * WARPS;
constexpr u32 ROW_BYTES = 128; // Of weights or of x, in shared memory.
constexpr u32 TILE_COLS = FP8 ? 128 : 64;
constexpr u32 PANELS = FP8 ? 2 : 1;    // Of x: of codes the greater and the lesser.
constexpr u32 PANEL_BYTES = M * ROW_BYTES;
constexpr u32 WEIGHT_BYTES = TILE_ROWS * ROW_BYTES;
constexpr u32 STAGE_BYTES = WEIGHT_BYTES + PANELS * PANEL_BYTES;
constexpr u32 SCALES_BYTES = FP8 ? 4 * M : 0; // Of x, of a stage.
// Rows that the last group has beyond the tile's are not used, but read.
constexpr u32 BEYOND = (GROUPS * GROUP_ROWS - TILE_ROWS) * ROW_BYTES;
// Stages whose weights are on their way at once before earlier kernels have ended.
constexpr u32 AHEAD = WEIGHT_BYTES < 64 * 1024 ? 64 * 1024 / WEIGHT_BYTES : 1;
// SiLU: the weights' rows are two halves, 8 rows of one and 8 of the other in turn a tile.
constexpr u32 HALVES = SILU ? 2 : 1;
constexpr u32 OUT_ROWS = TILE_ROWS / HALVES;
#if SILU
// An odd number of 16 bytes, so that what a warp writes at once falls into different banks.
constexpr u32 PITCH = (OUT_ROWS / 8 | 1) * 16; // Bytes, of a row of outputs.
constexpr u32 OUT_BYTES = M * PITCH;
#else
constexpr u32 CHUNK = M < 16 ? M : 16; // Rows of x whose sums are written at once.
constexpr u32 PITCH = TILE_ROWS + 4;   // What a warp writes at once falls into different banks.
constexpr u32 OUT_BYTES = 4 * CHUNK * PITCH;
#endif
static_assert(M % 8 == 0 && OUT_ROWS % 8 == 0, "whole swizzled patterns");
static_assert(!SPLIT || OUT_ROWS == SPLIT_COLS, "a warp has what shares a scale");

struct Params {
    // [rows, cols], boxes [TILE_ROWS, 64]; codes as pairs. Of SiLU [rows / 16, 2, 8, cols], 8 rows
    // of one half and 8 of the other: boxes [TILE_ROWS / 16, 2, 8, 64].
    TensorMap weight;
    TensorMap x;         // [num_rows, cols], boxes [M, 64]; of codes 2 of them, boxes [2, M, 64]
    const float* bias;   // [rows], or null; only of SiLU
    const float* scales; // Of codes: [rows], or of blocks [ceil(cols / 128), rows]
    const float* x_scales; // Of codes: [ceil(cols / 128), M]
    Out* out;            // [gridDim.y, num_rows, rows], or of SiLU [num_rows, rows / 2]
    SplitRows split;     // Of `out`.
    u32 num_rows;
    u32 rows;
    u32 cols;
    u32 reserved;
};

// The ring in shared memory: stages, then what is to be written, then x's scales, then barriers.
struct Ring : RingPlace<STAGES> {
    u32 stages;

    DEVICE explicit Ring(u32 address) : stages(address) {}

    DEVICE u32 at(u32 i) const { return stages + i * STAGE_BYTES; }
    DEVICE u32 scales(u32 i) const {
        return at(STAGES) + (OUT_BYTES > BEYOND ? OUT_BYTES : BEYOND) + i * SCALES_BYTES;
    }
    // Of a stage's weights, of its x, and of both: they are no longer needed.
    DEVICE u32 weights(u32 i) const { return scales(STAGES) + 8 * i; }
    DEVICE u32 x(u32 i) const { return weights(STAGES + i); }
    DEVICE u32 empty(u32 i) const { return weights(2 * STAGES + i); }
};

// ---- copying ----

// The tiles of this block.
struct Tiles {
    u32 tile = blockIdx.x;
    u32 end;

    DEVICE explicit Tiles(const Params& p)
        : end(TILES ? ceil_div(p.rows / HALVES, OUT_ROWS) : blockIdx.x + 1) {}

    DEVICE bool done() const { return tile >= end; }
    DEVICE void advance() { tile += gridDim.x; }
};

// Weights are read once, x by every block.
DEVICE void copy_weights(const Params& p, const Ring& ring, u32 tile, u32 block, u32 stage) {
    u32 to = ring.at(stage), barrier = ring.weights(stage);
    barrier_arrive_and_expect(barrier, WEIGHT_BYTES);
#if SILU
    copy_box_hinted(to, p.weight, block * 64, 0, 0, tile * (OUT_ROWS / 8), barrier, EVICT_FIRST);
#else
    copy_box_hinted(to, p.weight, block * 64, tile * TILE_ROWS, barrier, EVICT_FIRST);
#endif
}

DEVICE void copy_x(const Params& p, const Ring& ring, u32 block, u32 stage) {
    u32 to = ring.at(stage) + WEIGHT_BYTES, barrier = ring.x(stage);
    barrier_arrive_and_expect(barrier, PANELS * PANEL_BYTES + SCALES_BYTES);
#if FP8
    copy_box(to, p.x, block * 64, 0, 0, barrier);
    copy_bytes(ring.scales(stage), p.x_scales + block * M, SCALES_BYTES, barrier);
#else
    copy_box_hinted(to, p.x, block * TILE_COLS, 0, barrier, EVICT_LAST);
#endif
}

// What fills the ring of x, as soon as there is one: by a thread that has nothing else to do.
DEVICE void copy_first_x(const Params& p, const Ring& ring, u32 begin, u32 end) {
    wait_only();
    for (u32 i = 0; i < min(STAGES, end - begin); i++) copy_x(p, ring, begin + i, i);
}

DEVICE void copy_all(const Params& p, Ring ring, u32 begin, u32 end) {
    Tiles tiles(p);
    u32 filled = min(STAGES, end - begin);
    for (u32 i = 0; i < filled; i++) {
        if (i >= AHEAD) barrier_wait(ring.weights(i - AHEAD), 0);
        copy_weights(p, ring, tiles.tile, begin + i, i);
    }
    // Stages that were never filled are free: their phase before the first counts as ended.
    if (TILES && filled < STAGES) ring.stage = filled, ring.parity = 1;
    for (u32 block = begin + filled; !tiles.done(); tiles.advance(), block = begin) {
        for (; block < end; block++, ring.advance()) {
            barrier_wait(ring.empty(ring.stage), ring.parity);
            copy_weights(p, ring, tiles.tile, block, ring.stage);
            copy_x(p, ring, block, ring.stage);
        }
    }
}

// ---- multiplying ----

// The output's row of weights that this lane has sums of: of SiLU in both halves, else of this row
// and that plus 8.
DEVICE u32 first_row(u32 tile) {
    return tile * OUT_ROWS + warp_id() * (16 / HALVES) + lane_id() / 4;
}

// sums[i]: of columns (of x's rows) 8 i + 2 (lane % 4) and the next, of rows lane / 4 and that plus
// 8 of a warp's 16.
typedef float Sums[M / 8][4];

#if FP8
// The weights' scales of the rows whose sums this lane has.
struct RowScales {
    float upper;
    float lower;

    DEVICE RowScales(const Params& p, u32 tile, const float* scales) {
        u32 row = first_row(tile), end = p.rows / HALVES;
        upper = scales[min(row, end - 1)];
        lower = scales[SILU ? end + min(row, end - 1) : min(row + 8, end - 1)];
    }
};

// Both parts of x at once, as more rows of it, so that the weights are read once; of many rows one
// part after the other, in the same sums.
constexpr u32 PASSES = M <= 32 ? 1 : 2;
typedef float Part[2 / PASSES * M / 8][4];

DEVICE void multiply_stage(Part& part, u32 stage) {
    u64 weights = rows_descriptor(stage + warp_id() / 4 * GROUP_ROWS * ROW_BYTES);
    u64 x = rows_descriptor(stage + WEIGHT_BYTES);
    products_begin();
#pragma unroll
    for (u32 i = 0; i < 4 * PASSES; i++) {
        u64 own = x + i / 4 * (PANEL_BYTES >> 4) + 2 * (i % 4);
        Product<2 / PASSES * M>::codes(part, weights + 2 * (i % 4), own, i > 0);
    }
    products_commit();
}

DEVICE void add_scaled(Sums& sums, const Part& part, u32 scales, RowScales rows) {
#pragma unroll
    for (u32 i = 0; i < M / 8; i++) {
        float2 of_x = load2_shared(scales + 4 * (8 * i + 2 * (lane_id() % 4)));
#pragma unroll
        for (u32 j = 0; j < 4; j++) {
            float sum = part[i][j] + (PASSES == 1 ? part[M / 8 + i][j] : 0.0f);
            if (BLOCKS) sum *= j < 2 ? rows.upper : rows.lower;
            sums[i][j] = fmaf(sum, j % 2 == 0 ? of_x.x : of_x.y, sums[i][j]);
        }
    }
}

DEVICE void multiply_all(const Params& p, Sums& sums, Ring& ring, u32 tile, u32 begin, u32 end) {
    RowScales rows(p, tile, p.scales + (BLOCKS ? u64(begin) * p.rows : 0));
    Part part = {};
    pin(part);
    for (u32 block = begin; block < end; block++, ring.advance()) {
#if BLOCKS
        if (block > begin) rows = RowScales(p, tile, p.scales + u64(block) * p.rows);
#endif
        barrier_wait(ring.weights(ring.stage), ring.parity);
        barrier_wait(ring.x(ring.stage), ring.parity);
        multiply_stage(part, ring.at(ring.stage));
        products_wait<0>();
        pin(part);
        add_scaled(sums, part, ring.scales(ring.stage), rows);
        __syncwarp();
        if (lane_id() == 0) barrier_arrive(ring.empty(ring.stage));
    }
#if !BLOCKS
#pragma unroll
    for (u32 i = 0; i < M / 8; i++) {
        sums[i][0] *= rows.upper, sums[i][1] *= rows.upper;
        sums[i][2] *= rows.lower, sums[i][3] *= rows.lower;
    }
#endif
}
#else
DEVICE void multiply_stage(Sums& sums, u32 stage) {
    u64 weights = rows_descriptor(stage + warp_id() / 4 * GROUP_ROWS * ROW_BYTES);
    u64 x = rows_descriptor(stage + WEIGHT_BYTES);
    products_begin();
#pragma unroll
    for (u32 k = 0; k < TILE_COLS / 16; k++) Product<M>::both(sums, weights + 2 * k, x + 2 * k, 1);
    products_commit();
}

DEVICE void multiply_all(const Params&, Sums& sums, Ring& ring, u32, u32 begin, u32 end) {
    u32 done = 0;
    for (u32 block = begin; block < end; block++, ring.advance()) {
        barrier_wait(ring.weights(ring.stage), ring.parity);
        barrier_wait(ring.x(ring.stage), ring.parity);
        multiply_stage(sums, ring.at(ring.stage));
        products_wait<1>();
        if (block > begin && lane_id() == 0) barrier_arrive(ring.empty(done));
        done = ring.stage;
    }
    products_wait<0>();
    pin(sums);
}
#endif

// ---- writing ----

#if SILU
// Outputs of this warp's 8 columns, to rows of shared memory.
DEVICE void place_outputs(const Params& p, u32 tile, const Sums& sums, u32 shared) {
    float gate_bias = 0.0f, up_bias = 0.0f;
    if (p.bias != nullptr) {
        u32 len = p.rows / 2, n = min(first_row(tile), len - 1);
        gate_bias = p.bias[n], up_bias = p.bias[len + n];
    }
    constexpr u32 AT_ONCE = M < 32 ? M : 32; // Rows of x.
    u32 to = shared + lane_id() % AT_ONCE * PITCH + warp_id() * 16;
#pragma unroll
    for (u32 first = 0; first < M; first += AT_ONCE) {
        u32 pairs[AT_ONCE / 8]; // Of rows of x.
#pragma unroll
        for (u32 i = 0; i < AT_ONCE / 8; i++) {
            const float(&sum)[4] = sums[first / 8 + i];
            pairs[i] = pack_bf16(silu_and_mul(sum[0] + gate_bias, sum[2] + up_bias),
                                 silu_and_mul(sum[1] + gate_bias, sum[3] + up_bias));
        }
        store_matrices_transposed(to + first * PITCH, pairs);
    }
}

DEVICE void write_tile(const Params& p, u32 tile, const Sums& sums, u8* shared) {
    if (warp_id() * 8 < OUT_ROWS) place_outputs(p, tile, sums, shared_address(shared));
    meet(1, THREADS);
    u32 len = p.rows / 2;
#if SPLIT
    // A warp's rows side by side: those beyond the last are the last once more, without a branch.
    constexpr u32 WARP_ROWS = (M + WARPS - 1) / WARPS;
    if (warp_id() >= M) return;
    uint2 pairs[WARP_ROWS];
    u32 m[WARP_ROWS];
#pragma unroll
    for (u32 i = 0; i < WARP_ROWS; i++) {
        m[i] = min(warp_id() + i * WARPS, p.num_rows - 1);
        pairs[i] = *reinterpret_cast<const uint2*>(shared + m[i] * PITCH + lane_id() * 8);
    }
#pragma unroll
    for (u32 i = 0; i < WARP_ROWS; i++) {
        bf16* out = p.out + u64(m[i]) * len + tile * OUT_ROWS + lane_id() * 4;
        *reinterpret_cast<uint2*>(out) = pairs[i];
        split_pairs(p.split, m[i], tile, len, pairs[i]);
    }
#else
    constexpr u32 VECTORS = OUT_ROWS / 8;
    for (u32 i = threadIdx.x; i < M * VECTORS; i += THREADS) {
        u32 m = i / VECTORS, in_tile = i % VECTORS * 8, n = tile * OUT_ROWS + in_tile;
        if (m >= p.num_rows || n >= len) continue;
        *reinterpret_cast<uint4*>(p.out + u64(m) * len + n) =
            *reinterpret_cast<const uint4*>(shared + m * PITCH + in_tile * 2);
    }
#endif
}
#else
// CHUNK rows of x at a time, by way of shared memory so that neighbours of a row of the output are
// written together.
DEVICE void write_tile(const Params& p, u32 tile, const Sums& sums, u8* memory) {
    float* shared = reinterpret_cast<float*>(memory);
    u32 lane = lane_id(), row = warp_id() * 16 + lane / 4;
    float* to = shared + lane % 4 * 2 * PITCH + row;
#pragma unroll
    for (u32 chunk = 0; chunk < M; chunk += CHUNK) {
        if (TILES || chunk > 0) meet(1, THREADS); // What was there has been written.
#pragma unroll
        for (u32 i = 0; i < CHUNK; i += 8) {
            const float(&from)[4] = sums[(chunk + i) / 8];
            if (row < TILE_ROWS) to[i * PITCH] = from[0], to[(i + 1) * PITCH] = from[1];
            if (row + 8 < TILE_ROWS) {
                to[i * PITCH + 8] = from[2], to[(i + 1) * PITCH + 8] = from[3];
            }
        }
        meet(1, THREADS);
        constexpr u32 VECTORS = TILE_ROWS / 4;
#pragma unroll 2
        for (u32 i = threadIdx.x; i < CHUNK * VECTORS; i += THREADS) {
            u32 m = chunk + i / VECTORS, n = tile * TILE_ROWS + i % VECTORS * 4;
            if (m >= p.num_rows || n >= p.rows) continue;
            float* out = p.out + (u64(blockIdx.y) * p.num_rows + m) * p.rows + n;
            *reinterpret_cast<float4*>(out) =
                *reinterpret_cast<const float4*>(shared + (m - chunk) * PITCH + i % VECTORS * 4);
        }
    }
}
#endif

KERNEL void __launch_bounds__(THREADS + 32) hopper_gemm(const __grid_constant__ Params p) {
    extern __shared__ __align__(1024) u8 memory[];
    Ring ring(shared_address(memory));
    if (threadIdx.x == THREADS) {
        for (u32 i = 0; i < STAGES; i++) {
            barrier_init(ring.weights(i), 1);
            barrier_init(ring.x(i), 1);
            barrier_init(ring.empty(i), WARPS);
        }
        barriers_are_ready();
    }
    __syncthreads();
    let_next_begin();

    u32 all = ceil_div(p.cols, TILE_COLS);
    u32 begin = blockIdx.y * all / gridDim.y, end = (blockIdx.y + 1) * all / gridDim.y;
    if (warp_id() == WARPS) {
        if (lane_id() == 0) copy_all(p, ring, begin, end);
        return;
    }
    if (threadIdx.x == 0) copy_first_x(p, ring, begin, end);
    __syncwarp();
    for (Tiles tiles(p); !tiles.done(); tiles.advance()) {
        Sums sums = {};
        pin(sums); // Set here: among the products it would make these wait for each other.
        multiply_all(p, sums, ring, tiles.tile, begin, end);
        if (tiles.tile == blockIdx.x) wait_only();
        write_tile(p, tiles.tile, sums, memory + STAGES * STAGE_BYTES);
    }
}
