// x[m, :] . weight[n, :] for up to M rows of x: either the sums, in parts, or SiLU of one half of
// them times the other. On Hopper, about as fast as the weights can be read.
//
// Operands are swapped: rows of the weights fill the long side of the tensor cores' tile, so that x
// is padded to a multiple of 8 only. A block takes GROUPS * GROUP_ROWS rows of the weights, each
// group of four warps its own, such that all blocks run at once and end together:
//
//   columns    0..63   64..127   128..      a stage: 64 columns of the weights' tile and of x;
//   stage        0        1        2 ..     STAGES of them are a ring in shared memory
//
// Weights in e4m3 have 128 columns in as many bytes. x is split beforehand into two numbers of e4m3
// for each, see `fp8_split.cuh`, so that tensor cores take all as it comes: sums of a stage are
// multiplied by x's scales, which are of 128 columns of a row, and by the weights' if these are of
// blocks of 128 columns; scales of rows of the weights come at the end. Sums of a stage alone also
// keep what the tensor cores' sums of e4m3 lack in precision from mattering. SPLIT: what SiLU makes
// is left as codes besides, for the next such product; a tile is of 128 columns of it.
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

constexpr u32 WARPS = 4 * GROUPS; // That multiply; one more copies.
constexpr u32 THREADS = 32 * WARPS;
constexpr u32 TILE_ROWS = GROUPS * GROUP_ROWS; // Of the weights.
constexpr u32 ROW_BYTES = 128; // Of weights or of x, in shared memory.
constexpr u32 TILE_COLS = FP8 ? 128 : 64;
constexpr u32 PANELS = FP8 ? 2 : 1;    // Of x: of codes the greater and the lesser.
constexpr u32 PANEL_BYTES = M * ROW_BYTES;
constexpr u32 WEIGHT_BYTES = TILE_ROWS * ROW_BYTES;
constexpr u32 STAGE_BYTES = WEIGHT_BYTES + PANELS * PANEL_BYTES;
constexpr u32 SCALES_BYTES = FP8 ? 4 * M : 0; // Of x, of a stage.
// Tensor cores take 64 rows of the weights: those beyond a group's are not used, but read.
constexpr u32 BEYOND = (64 - GROUP_ROWS) * ROW_BYTES;
constexpr u32 CHUNK = M < 16 ? M : 16; // Rows of x whose sums are written at once.
constexpr u32 PITCH = TILE_ROWS + 4;   // What a warp writes at once falls into different banks.
// Stages whose weights are on their way at once before earlier kernels have ended.
constexpr u32 AHEAD = WEIGHT_BYTES < 64 * 1024 ? 64 * 1024 / WEIGHT_BYTES : 1;
constexpr u32 SUMS_BYTES = 4 * CHUNK * PITCH;
// SiLU: the first half of a tile's rows is of one half of the weights' rows.
constexpr u32 HALVES = SILU ? 2 : 1;
constexpr u32 OUT_ROWS = TILE_ROWS / HALVES;
static_assert(M % 8 == 0 && GROUP_ROWS % 8 == 0 && GROUP_ROWS <= 64, "whole swizzled patterns");
static_assert(GROUPS % HALVES == 0, "a group is of one half");
static_assert(!SPLIT || OUT_ROWS == SPLIT_COLS, "a warp has what shares a scale");

struct Params {
    TensorMap weight;    // [rows, cols], boxes [TILE_ROWS / HALVES, 64]; codes as pairs
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

// The ring in shared memory: stages, then sums to be written, then x's scales, then barriers.
struct Ring : RingPlace<STAGES> {
    u32 stages;

    DEVICE explicit Ring(u32 address) : stages(address) {}

    DEVICE u32 at(u32 i) const { return stages + i * STAGE_BYTES; }
    DEVICE u32 scales(u32 i) const {
        return at(STAGES) + (SUMS_BYTES > BEYOND ? SUMS_BYTES : BEYOND) + i * SCALES_BYTES;
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
    barrier_arrive_and_expect(ring.weights(stage), WEIGHT_BYTES);
#pragma unroll
    for (u32 half = 0; half < HALVES; half++) {
        u32 row = half * (p.rows / 2) + tile * OUT_ROWS;
        copy_box_hinted(ring.at(stage) + half * OUT_ROWS * ROW_BYTES, p.weight, block * 64, row,
                        ring.weights(stage), EVICT_FIRST);
    }
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

// sums[i]: of columns (of x's rows) 8 i + 2 (lane % 4) and the next, of rows lane / 4 and that plus
// 8 of a warp's 16.
typedef float Sums[M / 8][4];

#if FP8
// The weights' scales of the rows whose sums this lane has: row lane / 4 of a warp's 16, and that
// plus 8.
struct RowScales {
    float upper;
    float lower;

    DEVICE RowScales(const Params& p, u32 tile, const float* scales) {
        u32 row = warp_id() % 4 * 16 + lane_id() / 4;
        upper = scales[weight_row(p, tile, row)];
        lower = scales[weight_row(p, tile, row + 8)];
    }

    // Row of all weights that row `row` of this warpgroup's is.
    static DEVICE u32 weight_row(const Params& p, u32 tile, u32 row) {
        u32 in_tile = warp_id() / 4 * GROUP_ROWS + min(row, GROUP_ROWS - 1);
        u32 first = in_tile / OUT_ROWS * (p.rows / 2) + tile * OUT_ROWS;
        return min(first + in_tile % OUT_ROWS, p.rows - 1);
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

DEVICE float2 load2_shared(u32 address) {
    float2 v;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(address));
    return v;
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

DEVICE float4 load4(const float* from) { return *reinterpret_cast<const float4*>(from); }
DEVICE uint2 pack4(float4 v) { return make_uint2(pack_bf16(v.x, v.y), pack_bf16(v.z, v.w)); }
DEVICE void store4(float* to, float4 v) { *reinterpret_cast<float4*>(to) = v; }
DEVICE void store4(bf16* to, float4 v) { *reinterpret_cast<uint2*>(to) = pack4(v); }
DEVICE float4 add4(float4 a, float4 b) {
    return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}

// x / (1 + exp(-x)) * up: saturates at both ends without ever dividing infinities.
DEVICE float silu_and_mul(float x, float up) { return x / (1.0f + __expf(-x)) * up; }

// Four neighbours of row `m` of the output, from `n` on; `sums` are theirs.
DEVICE void write4(const Params& p, u32 m, u32 n, const float* sums) {
    u32 len = p.rows / HALVES;
    if (m >= p.num_rows || n >= len) return;
    float4 sum = load4(sums);
#if SILU
    float4 up = load4(sums + OUT_ROWS);
    if (p.bias != nullptr) {
        sum = add4(sum, load4(p.bias + n));
        up = add4(up, load4(p.bias + len + n));
    }
    sum = make_float4(silu_and_mul(sum.x, up.x), silu_and_mul(sum.y, up.y),
                      silu_and_mul(sum.z, up.z), silu_and_mul(sum.w, up.w));
#endif
    store4(p.out + (u64(blockIdx.y) * p.num_rows + m) * len + n, sum);
#if SPLIT
    split_pairs(p.split, m, n / SPLIT_COLS, len, pack4(sum));
#endif
}

// CHUNK rows of x at a time, by way of shared memory so that neighbours of a row of the output are
// written together.
DEVICE void write_tile(const Params& p, u32 tile, const Sums& sums, float* shared) {
    u32 lane = lane_id(), row = warp_id() % 4 * 16 + lane / 4;
    float* to = shared + lane % 4 * 2 * PITCH + warp_id() / 4 * GROUP_ROWS + row;
#pragma unroll
    for (u32 chunk = 0; chunk < M; chunk += CHUNK) {
        if (TILES || chunk > 0) meet(1, THREADS); // What was there has been written.
#pragma unroll
        for (u32 i = 0; i < CHUNK; i += 8) {
            const float(&from)[4] = sums[(chunk + i) / 8];
            if (row < GROUP_ROWS) to[i * PITCH] = from[0], to[(i + 1) * PITCH] = from[1];
            if (row + 8 < GROUP_ROWS) {
                to[i * PITCH + 8] = from[2], to[(i + 1) * PITCH + 8] = from[3];
            }
        }
        meet(1, THREADS);
        constexpr u32 VECTORS = OUT_ROWS / 4;
#pragma unroll 2
        for (u32 i = threadIdx.x; i < CHUNK * VECTORS; i += THREADS) {
            u32 m = i / VECTORS, n = i % VECTORS * 4;
            write4(p, chunk + m, tile * OUT_ROWS + n, shared + m * PITCH + n);
        }
    }
}

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
    float* shared = reinterpret_cast<float*>(memory + STAGES * STAGE_BYTES);
    for (Tiles tiles(p); !tiles.done(); tiles.advance()) {
        Sums sums = {};
        pin(sums); // Set here: among the products it would make these wait for each other.
        multiply_all(p, sums, ring, tiles.tile, begin, end);
        if (tiles.tile == blockIdx.x) wait_only();
        write_tile(p, tiles.tile, sums, shared);
    }
}
