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
// Weights in e4m3 have 128 columns in as many bytes. They go to the tensor cores by way of
// registers, where they become bf16; sums are multiplied by the rows' scales at the end, or by
// those of blocks of 128 columns after each stage.
//
// With fewer tiles than multiprocessors, blocks along y share the columns of a tile. Each writes
// its own sums, and the kernel behind, which reads them anyway, adds them up: if blocks waited for
// each other here, memory would be idle for 3 of 13 us.
//
// One thread has everything copied by the tensor memory accelerator. The weights are nobody's
// result: as many as fill the ring are asked for before earlier kernels have ended.
//
// Source: operands swapped and x padded to 8 after FlashDecoding++, 2023; roles of warps as in
// CUTLASS's kernels for Hopper.
#include "hopper.cuh"

typedef ElementOf<SILU>::type Out; // bf16, or f32.

constexpr u32 WARPS = 4 * GROUPS; // That multiply; one more copies.
constexpr u32 THREADS = 32 * WARPS;
constexpr u32 TILE_ROWS = GROUPS * GROUP_ROWS; // Of the weights.
constexpr u32 ROW_BYTES = 128; // Of weights or of x, in shared memory.
constexpr u32 TILE_COLS = FP8 ? 128 : 64;
constexpr u32 PANELS = TILE_COLS / 64; // Of x, each of 64 columns.
constexpr u32 PANEL_BYTES = M * ROW_BYTES;
constexpr u32 WEIGHT_BYTES = TILE_ROWS * ROW_BYTES;
constexpr u32 STAGE_BYTES = WEIGHT_BYTES + PANELS * PANEL_BYTES;
// Tensor cores take 64 rows of the weights: those beyond a group's are not used, but read.
constexpr u32 BEYOND = (64 - GROUP_ROWS) * ROW_BYTES;
constexpr u32 CHUNK = M < 16 ? M : 16; // Rows of x whose sums are written at once.
constexpr u32 PITCH = TILE_ROWS + 4;   // What a warp writes at once falls into different banks.
constexpr u32 SUMS_BYTES = 4 * CHUNK * PITCH;
// SiLU: the first half of a tile's rows is of one half of the weights' rows.
constexpr u32 HALVES = SILU ? 2 : 1;
constexpr u32 OUT_ROWS = TILE_ROWS / HALVES;
static_assert(M % 8 == 0 && GROUP_ROWS % 8 == 0 && GROUP_ROWS <= 64, "whole swizzled patterns");
static_assert(GROUPS % HALVES == 0, "a group is of one half");

struct Params {
    TensorMap weight;    // [rows, cols], boxes [TILE_ROWS / HALVES, 64]; codes as pairs
    TensorMap x;         // [num_rows, cols], boxes [M, 64]
    const float* bias;   // [rows], or null; only of SiLU
    const float* scales; // Of codes: [rows], or of blocks [ceil(cols / 128), rows]
    Out* out;            // [gridDim.y, num_rows, rows], or of SiLU [num_rows, rows / 2]
    u32 num_rows;
    u32 rows;
    u32 cols;
    u32 reserved;
};

// The ring in shared memory: stages, then sums to be written, then barriers.
struct Ring : RingPlace<STAGES> {
    u32 stages;

    DEVICE explicit Ring(u32 address) : stages(address) {}

    DEVICE u32 at(u32 i) const { return stages + i * STAGE_BYTES; }
    DEVICE u32 full(u32 i) const {
        return at(STAGES) + (SUMS_BYTES > BEYOND ? SUMS_BYTES : BEYOND) + 8 * i;
    }
    DEVICE u32 empty(u32 i) const { return full(STAGES + i); }
};

// ---- copying ----

// Weights are read once, x by every block.
DEVICE void copy_weights(const Params& p, const Ring& ring, u32 block, u32 stage) {
    barrier_arrive_and_expect(ring.full(stage), STAGE_BYTES);
#pragma unroll
    for (u32 half = 0; half < HALVES; half++) {
        u32 row = half * (p.rows / 2) + blockIdx.x * OUT_ROWS;
        copy_box_hinted(ring.at(stage) + half * OUT_ROWS * ROW_BYTES, p.weight, block * 64, row,
                        ring.full(stage), EVICT_FIRST);
    }
}

DEVICE void copy_x(const Params& p, const Ring& ring, u32 block, u32 stage) {
#pragma unroll
    for (u32 panel = 0; panel < PANELS; panel++) {
        copy_box_hinted(ring.at(stage) + WEIGHT_BYTES + panel * PANEL_BYTES, p.x,
                        block * TILE_COLS + panel * 64, 0, ring.full(stage), EVICT_LAST);
    }
}

DEVICE void copy_all(const Params& p, Ring ring, u32 begin, u32 end) {
    u32 filled = min(begin + STAGES, end);
    for (u32 block = begin; block < filled; block++) copy_weights(p, ring, block, block - begin);
    wait_only();
    for (u32 block = begin; block < filled; block++) copy_x(p, ring, block, block - begin);
    for (u32 block = filled; block < end; block++, ring.advance()) {
        barrier_wait(ring.empty(ring.stage), ring.parity);
        copy_weights(p, ring, block, ring.stage);
        copy_x(p, ring, block, ring.stage);
    }
}

// ---- multiplying ----

// sums[i]: of columns (of x's rows) 8 i + 2 (lane % 4) and the next, of rows lane / 4 and that plus
// 8 of a warp's 16.
typedef float Sums[M / 8][4];

#if FP8
// Row of all weights that row `row` of this warpgroup's is.
DEVICE u32 weight_row(const Params& p, u32 row) {
    u32 in_tile = warp_id() / 4 * GROUP_ROWS + min(row, GROUP_ROWS - 1);
    u32 first = in_tile / OUT_ROWS * (p.rows / 2) + blockIdx.x * OUT_ROWS;
    return min(first + in_tile % OUT_ROWS, p.rows - 1);
}

// This lane's codes of a row of `tile`, of four products of 16 columns. Not before this point.
DEVICE uint4 load_codes(u32 tile, u32 row, u32 group) {
    u32 chunk = group * 4 + lane_id() % 4;
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(tile + row * ROW_BYTES + ((chunk ^ row % 8) << 4))
                 : "memory");
    return v;
}

// Half of a stage: its codes become numbers in `a`, which are multiplied.
DEVICE void multiply_half(Sums& sums, u32 (&a)[4][4], u32 stage, u32 half) {
    u32 tile = stage + warp_id() / 4 * GROUP_ROWS * ROW_BYTES;
    u32 row = warp_id() % 4 * 16 + lane_id() / 4;
    uint4 upper = load_codes(tile, row, half), lower = load_codes(tile, row + 8, half);
    u32 words[2][4] = {{upper.x, upper.y, upper.z, upper.w}, {lower.x, lower.y, lower.z, lower.w}};
#pragma unroll
    for (u32 k = 0; k < 4; k++) {
        e4m3_to_bf16(words[0][k], a[k][0], a[k][2]);
        e4m3_to_bf16(words[1][k], a[k][1], a[k][3]);
    }
    u64 x = rows_descriptor(stage + WEIGHT_BYTES + half * PANEL_BYTES);
    products_begin();
#pragma unroll
    for (u32 k = 0; k < 4; k++) Product<M>::rows(sums, a[k], x + 2 * k);
    products_commit();
}

// Registers that products read may not be written before these have ended. So codes of one half of
// a stage are turned into numbers while the other half is multiplied.
DEVICE void multiply_all(const Params& p, Sums& sums, Ring ring, u32 begin, u32 end) {
    u32 a[2][4][4];
#if BLOCKS
    for (u32 block = begin; block < end; block++, ring.advance()) {
        barrier_wait(ring.full(ring.stage), ring.parity);
        const float* scales = p.scales + u64(block) * p.rows;
        u32 row = warp_id() % 4 * 16 + lane_id() / 4;
        float upper = scales[weight_row(p, row)], lower = scales[weight_row(p, row + 8)];
        Sums part = {};
        multiply_half(part, a[0], ring.at(ring.stage), 0);
        multiply_half(part, a[1], ring.at(ring.stage), 1);
        products_wait<0>();
        pin(part);
        if (lane_id() == 0) barrier_arrive(ring.empty(ring.stage));
#pragma unroll
        for (u32 i = 0; i < M / 8; i++) {
            sums[i][0] = fmaf(part[i][0], upper, sums[i][0]);
            sums[i][1] = fmaf(part[i][1], upper, sums[i][1]);
            sums[i][2] = fmaf(part[i][2], lower, sums[i][2]);
            sums[i][3] = fmaf(part[i][3], lower, sums[i][3]);
        }
    }
#else
    u32 done = 0;
    for (u32 block = begin; block < end; block++, ring.advance()) {
        barrier_wait(ring.full(ring.stage), ring.parity);
        multiply_half(sums, a[0], ring.at(ring.stage), 0);
        products_wait<1>();
        if (block > begin && lane_id() == 0) barrier_arrive(ring.empty(done));
        multiply_half(sums, a[1], ring.at(ring.stage), 1);
        products_wait<1>();
        done = ring.stage;
    }
    products_wait<0>();
    pin(sums);
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

DEVICE void multiply_all(const Params&, Sums& sums, Ring ring, u32 begin, u32 end) {
    u32 done = 0;
    for (u32 block = begin; block < end; block++, ring.advance()) {
        barrier_wait(ring.full(ring.stage), ring.parity);
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
DEVICE void store4(float* to, float4 v) { *reinterpret_cast<float4*>(to) = v; }
DEVICE void store4(bf16* to, float4 v) {
    *reinterpret_cast<uint2*>(to) = make_uint2(pack_bf16(v.x, v.y), pack_bf16(v.z, v.w));
}
DEVICE float4 add4(float4 a, float4 b) {
    return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}

DEVICE float4 multiply4(float4 a, float4 b) {
    return make_float4(a.x * b.x, a.y * b.y, a.z * b.z, a.w * b.w);
}

// x / (1 + exp(-x)) * up: saturates at both ends without ever dividing infinities.
DEVICE float silu_and_mul(float x, float up) { return x / (1.0f + __expf(-x)) * up; }

// Four neighbours of row `m` of the output, from `n` on; `sums` are theirs.
DEVICE void write4(const Params& p, u32 m, u32 n, const float* sums) {
    u32 len = p.rows / HALVES;
    if (m >= p.num_rows || n >= len) return;
    float4 sum = load4(sums);
#if FP8 && !BLOCKS
    sum = multiply4(sum, load4(p.scales + n));
#endif
#if SILU
    float4 up = load4(sums + OUT_ROWS);
#if FP8 && !BLOCKS
    up = multiply4(up, load4(p.scales + len + n));
#endif
    if (p.bias != nullptr) {
        sum = add4(sum, load4(p.bias + n));
        up = add4(up, load4(p.bias + len + n));
    }
    sum = make_float4(silu_and_mul(sum.x, up.x), silu_and_mul(sum.y, up.y),
                      silu_and_mul(sum.z, up.z), silu_and_mul(sum.w, up.w));
#endif
    store4(p.out + (u64(blockIdx.y) * p.num_rows + m) * len + n, sum);
}

// CHUNK rows of x at a time, by way of shared memory so that neighbours of a row of the output are
// written together.
DEVICE void write_tile(const Params& p, const Sums& sums, float* shared) {
    u32 lane = lane_id(), row = warp_id() % 4 * 16 + lane / 4;
    float* to = shared + lane % 4 * 2 * PITCH + warp_id() / 4 * GROUP_ROWS + row;
#pragma unroll
    for (u32 chunk = 0; chunk < M; chunk += CHUNK) {
        if (chunk > 0) meet(1, THREADS); // What was there has been written.
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
            write4(p, chunk + m, blockIdx.x * OUT_ROWS + n, shared + m * PITCH + n);
        }
    }
}

KERNEL void __launch_bounds__(THREADS + 32) hopper_gemm(const __grid_constant__ Params p) {
    extern __shared__ __align__(1024) u8 memory[];
    Ring ring(shared_address(memory));
    if (threadIdx.x == THREADS) {
        for (u32 i = 0; i < STAGES; i++) {
            barrier_init(ring.full(i), 1);
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
    Sums sums = {};
    pin(sums); // Set here, not among the products, which would have to wait for each other then.
    multiply_all(p, sums, ring, begin, end);
    wait_only();
    write_tile(p, sums, reinterpret_cast<float*>(memory + STAGES * STAGE_BYTES));
}
