// silu(x . gate^T) * (x . up^T) of many rows of x, on Hopper, where such products are bound by
// tensor cores and, after a tenth of a second, by what power the GPU may take.
//
// A block takes tiles of ROWS rows of x by COLS rows of the weights in turn: 8 rows of gate and 8
// of up alternate, so that a thread has both sums of each of its outputs.
//
//   a stage: 64 columns, of codes 128, of the tile's rows of x and of the weights
//
//   warps 0..3            one thread fills stages, as many in advance as there is room for, of the
//                         next tile as well
//   warps 4..7, 8..11     ROWS / 2 rows of x each, by all rows of the weights; sums in registers
//
// Tiles are as large as registers permit: what is copied for each product costs power too. On an
// H200 256 x 192 reaches 692 TFLOP/s where 256 x 128 reaches 655, and two tiles of 128 x 192, one
// written while the other is multiplied, 675; cuBLASLt's best, which leaves SiLU to another kernel,
// 693. Blocks that share what they read by clusters were slower.
//
// GROUP tiles along x take the same weights at the same time, 2048 rows: x of these stays in the L2
// cache, weights are read once for all. 8192 rows so read 1.2 GB of memory, with half the rows 2.0,
// with twice as many 1.9 (cuBLASLt: 1.5), which is 0.5 to 2 % slower.
//
// Of codes in e4m3 the tensor cores keep sums in fewer bits than f32 has: of normally distributed
// numbers that costs 0.13 % of a sum over 4096 columns, 0.29 % over 14336 (root mean square), where
// rounding both operands has cost 3 to 4 %. Adding up 128 columns at a time in f32 instead takes a
// second set of registers, so tiles of 128 x 192, and 7 % longer.
//
// Source: CUTLASS's cooperative kernels for Hopper, for the roles of warps.
#include "hopper.cuh"

constexpr u32 ROW_BYTES = 128;          // Of x or of weights, in shared memory.
constexpr u32 BOX_COLS = ROW_BYTES / 2; // Numbers, or pairs of codes.
constexpr u32 TILE_COLS = FP8 ? 2 * BOX_COLS : BOX_COLS;
constexpr u32 PART_ROWS = 64;                 // Of x: what tensor cores take at once.
constexpr u32 PARTS = ROWS / (2 * PART_ROWS); // Of a group of four warps.
constexpr u32 X_BYTES = ROWS * ROW_BYTES;
constexpr u32 WEIGHT_BYTES = COLS * ROW_BYTES;
constexpr u32 STAGE_BYTES = X_BYTES + WEIGHT_BYTES;
constexpr u32 OUT_COLS = COLS / 2;
constexpr u32 OUT_ROWS = 16;                       // Of a box of outputs, a warp's.
constexpr u32 OUT_BYTES = 2 * OUT_ROWS * OUT_COLS; // Of a box.
constexpr u32 SCALE_TILES = 2;                     // Tiles whose scales are there at once.
constexpr u32 SCALE_BYTES = FP8 ? 4 * COLS : 0;    // Of the weights of one.
constexpr u32 WARPS = 8;                           // That multiply.
constexpr u32 THREADS = 32 * WARPS + 128;
// Registers of a thread that copies, and of one that multiplies: 168 as they are launched.
constexpr u32 COPY_REGISTERS = 40;
constexpr u32 SUM_REGISTERS = 232;
// Stages whose weights are on their way at once before earlier kernels have ended.
constexpr u32 AHEAD = 64 * 1024 / WEIGHT_BYTES < STAGES ? 64 * 1024 / WEIGHT_BYTES : STAGES;
static_assert(PARTS * 2 * PART_ROWS == ROWS && COLS % 16 == 0, "whole parts, whole pairs of 8");

struct Params {
    // Numbers, or pairs of codes.
    TensorMap x;      // [num_rows, cols], boxes [ROWS, 64]
    TensorMap weight; // [len / 8, 2, 8, cols], of gate and of up, boxes [COLS / 16, 2, 8, 64]
    TensorMap out;    // [num_rows, len], boxes [16, COLS / 2] whose rows lie one behind the other
    const float* x_scales; // Of codes: [num_rows]
    const float* scales;   // Of codes: [2 * len]
    u32 num_rows;
    u32 len;  // A multiple of 8.
    u32 cols; // A multiple of 8.
    u32 reserved;
};

// In shared memory: stages, then outputs, then scales, then barriers.
struct Ring : RingPlace<STAGES> {
    u32 stages;

    DEVICE explicit Ring(u32 address) : stages(address) {}

    DEVICE u32 x(u32 i) const { return stages + i * STAGE_BYTES; }
    DEVICE u32 weights(u32 i) const { return x(i) + X_BYTES; }
    // The box of so many before it.
    DEVICE u32 outputs(u32 i) const { return x(STAGES) + i * OUT_BYTES; }
    DEVICE u32 scales(u32 i) const { return outputs(ROWS / OUT_ROWS) + i * SCALE_BYTES; }
    DEVICE u32 full(u32 i) const { return scales(SCALE_TILES) + 8 * i; }
    DEVICE u32 empty(u32 i) const { return full(STAGES + i); }
    DEVICE u32 scales_full(u32 i) const { return empty(STAGES + i); }
    DEVICE u32 scales_empty(u32 i) const { return scales_full(SCALE_TILES + i); }
};

// The tiles of this block: of GROUP tiles along x by all along the weights after one another, the
// former first.
struct Tiles {
    u32 row_tiles;
    u32 col_tiles;
    u32 tile = blockIdx.x;

    DEVICE explicit Tiles(const Params& p)
        : row_tiles(ceil_div(p.num_rows, ROWS)), col_tiles(ceil_div(p.len, OUT_COLS)) {}

    DEVICE bool done() const { return tile >= row_tiles * col_tiles; }
    DEVICE void advance() { tile += gridDim.x; }

    DEVICE u32 group() const { return tile / (GROUP * col_tiles); }
    DEVICE u32 in_group() const { return tile % (GROUP * col_tiles); }
    DEVICE u32 group_rows() const { return min(GROUP, row_tiles - group() * GROUP); }
    DEVICE u32 row() const { return (group() * GROUP + in_group() % group_rows()) * ROWS; }
    DEVICE u32 out_col() const { return in_group() / group_rows() * OUT_COLS; }
};

// ---- copying ----

DEVICE void copy_weights(const Params& p, const Ring& ring, u32 out_col, u32 block, u32 stage) {
    barrier_arrive_and_expect(ring.full(stage), STAGE_BYTES);
    copy_box_hinted(ring.weights(stage), p.weight, block * BOX_COLS, 0, 0, out_col / 8,
                    ring.full(stage), EVICT_FIRST);
}

// Scales of a tile's rows of gate, then of up.
DEVICE void copy_scales(const Params& p, const Ring& ring, u32 out_col,
                        RingPlace<SCALE_TILES>& place) {
    u32 bytes = 4 * min(OUT_COLS, p.len - out_col), to = ring.scales(place.stage);
    u32 barrier = ring.scales_full(place.stage);
    barrier_wait(ring.scales_empty(place.stage), place.parity);
    barrier_arrive_and_expect(barrier, 2 * bytes);
    copy_bytes(to, p.scales + out_col, bytes, barrier);
    copy_bytes(to + 4 * OUT_COLS, p.scales + p.len + out_col, bytes, barrier);
    place.advance();
}

DEVICE void copy_all(const Params& p, Ring ring) {
    Tiles tiles(p);
    RingPlace<SCALE_TILES> scales;
    scales.parity = 1;
    u32 all = ceil_div(p.cols, TILE_COLS), ahead = min(AHEAD, all);
    for (u32 i = 0; i < ahead; i++) copy_weights(p, ring, tiles.out_col(), i, i);
    wait_only();
    ring.parity = 1; // The phase before the first counts as ended: stages are free.
    for (; !tiles.done(); tiles.advance()) {
        u32 row = tiles.row(), out_col = tiles.out_col();
        if (FP8) copy_scales(p, ring, out_col, scales);
        for (u32 block = 0; block < all; block++, ring.advance()) {
            u32 stage = ring.stage;
            if (ahead > 0) {
                ahead--;
            } else {
                barrier_wait(ring.empty(stage), ring.parity);
                copy_weights(p, ring, out_col, block, stage);
            }
            copy_box_hinted(ring.x(stage), p.x, block * BOX_COLS, row, ring.full(stage),
                            EVICT_LAST);
        }
    }
}

// ---- multiplying ----

// sums[part][i]: of columns 8 i + 2 (lane % 4) and the next, of rows lane / 4 and that plus 8 of a
// warp's 16; of gate where i is even, of up where it is odd.
typedef float Sums[PARTS][COLS / 8][4];

// Rows of x of this warp's group in a tile.
DEVICE u32 group_row() { return (warp_id() / 4 - 1) * PARTS * PART_ROWS; }

DEVICE void multiply_stage(const Ring& ring, Sums& sums, u32 stage, bool is_first) {
    u64 x = rows_descriptor(ring.x(stage) + group_row() * ROW_BYTES);
    u64 weights = rows_descriptor(ring.weights(stage));
    products_begin();
#pragma unroll
    for (u32 part = 0; part < PARTS; part++) {
#pragma unroll
        for (u32 k = 0; k < ROW_BYTES / 32; k++) {
            u64 own = x + part * (PART_ROWS * ROW_BYTES >> 4) + 2 * k;
            bool adds = !is_first || k > 0;
            if (FP8) Product<COLS>::codes(sums[part], own, weights + 2 * k, adds);
            else Product<COLS>::both(sums[part], own, weights + 2 * k, adds);
        }
    }
    products_commit();
}

DEVICE void multiply_tile(const Params& p, Ring& ring, Sums& sums) {
    u32 all = ceil_div(p.cols, TILE_COLS), done = 0;
    for (u32 block = 0; block < all; block++, ring.advance()) {
        barrier_wait(ring.full(ring.stage), ring.parity);
        multiply_stage(ring, sums, ring.stage, block == 0);
        products_wait<1>();
        if (block > 0 && lane_id() == 0) barrier_arrive(ring.empty(done));
        done = ring.stage;
    }
    products_wait<0>();
#pragma unroll
    for (u32 part = 0; part < PARTS; part++) pin(sums[part]);
    if (lane_id() == 0) barrier_arrive(ring.empty(done));
}

// ---- writing ----

// Of a pair of columns, of gate and of up, for two rows of x.
struct Scales {
    float2 gate = {1.0f, 1.0f};
    float2 up = {1.0f, 1.0f};
    float rows[2] = {1.0f, 1.0f};

    // Rows of x: lane / 4 of 16 and that plus 8.
    DEVICE void of_rows(const Params& p, u32 row) {
        if constexpr (FP8) {
            for (u32 i = 0; i < 2; i++) {
                rows[i] = p.x_scales[min(row + lane_id() / 4 + 8 * i, p.num_rows - 1)];
            }
        }
    }

    DEVICE void of_columns(u32 scales, u32 column) {
        if constexpr (FP8) {
            gate = load2_shared(scales + 4 * column);
            up = load2_shared(scales + 4 * (OUT_COLS + column));
        }
    }

    DEVICE u32 outputs(const float (&g)[4], const float (&u)[4], u32 i) const {
        float left = silu_and_mul(g[2 * i] * (gate.x * rows[i]), u[2 * i] * (up.x * rows[i]));
        float right = silu_and_mul(g[2 * i + 1] * (gate.y * rows[i]),
                                   u[2 * i + 1] * (up.y * rows[i]));
        return pack_bf16(left, right);
    }
};

// A warp's own rows, by way of shared memory, from where the copy engine takes them while the next
// tile is multiplied.
DEVICE void write_tile(const Params& p, const Ring& ring, const Sums& sums, const Tiles& tiles,
                       u32 of_scales) {
    u32 row = tiles.row(), out_col = tiles.out_col();
    u32 own_row = group_row() + warp_id() % 4 * OUT_ROWS, lane = lane_id();
    if (lane == 0) copies_out_have_read(); // Those of the tile before.
    __syncwarp();
#pragma unroll
    for (u32 part = 0; part < PARTS; part++) {
        u32 box = ring.outputs((own_row + part * PART_ROWS) / OUT_ROWS);
        u32 to = box + lane % OUT_ROWS * 2 * OUT_COLS;
        Scales scales;
        scales.of_rows(p, row + own_row + part * PART_ROWS);
#pragma unroll
        for (u32 i = 0; i < OUT_COLS / 8; i++) {
            const float(&gate)[4] = sums[part][2 * i];
            const float(&up)[4] = sums[part][2 * i + 1];
            scales.of_columns(of_scales, 8 * i + lane % 4 * 2);
            u32 pairs[2] = {scales.outputs(gate, up, 0), scales.outputs(gate, up, 1)};
            store_matrices(to + 16 * i, pairs);
        }
        fence_async_proxy();
        __syncwarp();
        if (lane == 0) copy_box_out(p.out, out_col, row + own_row + part * PART_ROWS, box);
    }
    if (lane == 0) copies_out_commit();
}

KERNEL void __launch_bounds__(THREADS, 1) gated_gemm(const __grid_constant__ Params p) {
    extern __shared__ __align__(1024) u8 memory[];
    Ring ring(shared_address(memory));
    if (threadIdx.x == 0) {
        for (u32 i = 0; i < STAGES; i++) {
            barrier_init(ring.full(i), 1);
            barrier_init(ring.empty(i), WARPS);
        }
        for (u32 i = 0; i < SCALE_TILES; i++) {
            barrier_init(ring.scales_full(i), 1);
            barrier_init(ring.scales_empty(i), WARPS);
        }
        barriers_are_ready();
    }
    __syncthreads();
    let_next_begin();
    if (warp_id() < 4) {
        give_up_registers<COPY_REGISTERS>();
        if (threadIdx.x == 0) copy_all(p, ring);
        return;
    }
    take_registers<SUM_REGISTERS>();
    Sums sums;
    RingPlace<SCALE_TILES> scales;
    for (Tiles tiles(p); !tiles.done(); tiles.advance(), scales.advance()) {
        multiply_tile(p, ring, sums);
        if (tiles.tile == blockIdx.x) wait_only();
        if (FP8) barrier_wait(ring.scales_full(scales.stage), scales.parity);
        write_tile(p, ring, sums, tiles, ring.scales(scales.stage));
        if (FP8 && lane_id() == 0) barrier_arrive(ring.scales_empty(scales.stage));
    }
    if (lane_id() == 0) copies_out_have_ended();
}
