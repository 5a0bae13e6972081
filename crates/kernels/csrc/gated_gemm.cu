// silu(x . gate^T) * (x . up^T) of many rows of x, on Hopper, where such products are bound by
// tensor cores and, after a tenth of a second, by what power the GPU may take.
//
// A block takes tiles of ROWS rows of x by COLS rows of the weights in turn: 8 rows of gate and 8
// of up alternate, so that a thread has both sums of each of its outputs.
//
//   a stage: 64 columns of the tile's rows of x, and of its rows of the weights
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
// GROUP tiles along x take the same weights at the same time. With 8, about as many as a GPU has
// clusters of multiprocessors, among which neighbouring blocks are spread, weights are fetched once
// for 2048 rows, and each cluster stays with its rows of x: 4 and 16 are 1.5 to 2.5 % slower, tiles
// side by side along the weights 4 %.
//
// Source: CUTLASS's cooperative kernels for Hopper, for the roles of warps.
#include "hopper.cuh"

constexpr u32 ROW_BYTES = 128;                // Of x or of weights, in shared memory.
constexpr u32 TILE_COLS = ROW_BYTES / 2;
constexpr u32 PART_ROWS = 64;                 // Of x: what tensor cores take at once.
constexpr u32 PARTS = ROWS / (2 * PART_ROWS); // Of a group of four warps.
constexpr u32 X_BYTES = ROWS * ROW_BYTES;
constexpr u32 WEIGHT_BYTES = COLS * ROW_BYTES;
constexpr u32 STAGE_BYTES = X_BYTES + WEIGHT_BYTES;
constexpr u32 OUT_COLS = COLS / 2;
constexpr u32 OUT_ROWS = 16;                      // Of a warp: a box.
constexpr u32 OUT_BYTES = 2 * OUT_ROWS * OUT_COLS; // Of a box.
constexpr u32 WARPS = 8;                          // That multiply.
constexpr u32 THREADS = 32 * WARPS + 128;
// Registers of a thread that copies, and of one that multiplies: 168 as they are launched.
constexpr u32 COPY_REGISTERS = 40;
constexpr u32 SUM_REGISTERS = 232;
// Stages whose weights are on their way at once before earlier kernels have ended.
constexpr u32 AHEAD = 64 * 1024 / WEIGHT_BYTES < STAGES ? 64 * 1024 / WEIGHT_BYTES : STAGES;
static_assert(PARTS * 2 * PART_ROWS == ROWS && COLS % 16 == 0, "whole parts, whole pairs of 8");

struct Params {
    TensorMap x;      // [num_rows, cols], boxes [ROWS, 64]
    TensorMap weight; // [len / 8, 2, 8, cols], of gate and of up, boxes [COLS / 16, 2, 8, 64]
    TensorMap out;    // [num_rows, len], boxes [16, COLS / 2] whose rows lie one behind the other
    u32 num_rows;
    u32 len;  // A multiple of 8.
    u32 cols; // A multiple of 8.
    u32 reserved;
};

// In shared memory: stages, then outputs, then barriers.
struct Ring : RingPlace<STAGES> {
    u32 stages;

    DEVICE explicit Ring(u32 address) : stages(address) {}

    DEVICE u32 x(u32 i) const { return stages + i * STAGE_BYTES; }
    DEVICE u32 weights(u32 i) const { return x(i) + X_BYTES; }
    // The box of so many before it.
    DEVICE u32 outputs(u32 i) const { return x(STAGES) + i * OUT_BYTES; }
    DEVICE u32 full(u32 i) const { return outputs(ROWS / OUT_ROWS) + 8 * i; }
    DEVICE u32 empty(u32 i) const { return full(STAGES + i); }
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
    copy_box_hinted(ring.weights(stage), p.weight, block * TILE_COLS, 0, 0, out_col / 8,
                    ring.full(stage), EVICT_FIRST);
}

DEVICE void copy_all(const Params& p, Ring ring) {
    Tiles tiles(p);
    u32 all = ceil_div(p.cols, TILE_COLS), ahead = min(AHEAD, all);
    for (u32 i = 0; i < ahead; i++) copy_weights(p, ring, tiles.out_col(), i, i);
    wait_only();
    ring.parity = 1; // The phase before the first counts as ended: stages are free.
    for (; !tiles.done(); tiles.advance()) {
        u32 row = tiles.row(), out_col = tiles.out_col();
        for (u32 block = 0; block < all; block++, ring.advance()) {
            u32 stage = ring.stage;
            if (ahead > 0) {
                ahead--;
            } else {
                barrier_wait(ring.empty(stage), ring.parity);
                copy_weights(p, ring, out_col, block, stage);
            }
            copy_box_hinted(ring.x(stage), p.x, block * TILE_COLS, row, ring.full(stage),
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
        for (u32 k = 0; k < TILE_COLS / 16; k++) {
            u64 own = x + part * (PART_ROWS * ROW_BYTES >> 4) + 2 * k;
            Product<COLS>::both(sums[part], own, weights + 2 * k, !is_first || k > 0);
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

// x / (1 + exp(-x)) * up: saturates at both ends without ever dividing infinities. An exact
// division branches, which would keep a thread's outputs apart.
DEVICE float silu_and_mul(float x, float up) { return __fdividef(x, 1.0f + __expf(-x)) * up; }

// A warp's own rows, by way of shared memory, from where the copy engine takes them while the next
// tile is multiplied.
DEVICE void write_tile(const Params& p, const Ring& ring, const Sums& sums, u32 row, u32 out_col) {
    u32 own_row = group_row() + warp_id() % 4 * OUT_ROWS, lane = lane_id();
    if (lane == 0) copies_out_have_read(); // Those of the tile before.
    __syncwarp();
#pragma unroll
    for (u32 part = 0; part < PARTS; part++) {
        u32 box = ring.outputs((own_row + part * PART_ROWS) / OUT_ROWS);
        u32 to = box + lane % OUT_ROWS * 2 * OUT_COLS;
#pragma unroll
        for (u32 i = 0; i < OUT_COLS / 8; i++) {
            const float(&gate)[4] = sums[part][2 * i];
            const float(&up)[4] = sums[part][2 * i + 1];
            u32 pairs[2] = {
                pack_bf16(silu_and_mul(gate[0], up[0]), silu_and_mul(gate[1], up[1])),
                pack_bf16(silu_and_mul(gate[2], up[2]), silu_and_mul(gate[3], up[3])),
            };
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
    for (Tiles tiles(p); !tiles.done(); tiles.advance()) {
        multiply_tile(p, ring, sums);
        if (tiles.tile == blockIdx.x) wait_only();
        write_tile(p, ring, sums, tiles.row(), tiles.out_col());
    }
    if (lane_id() == 0) copies_out_have_ended();
}
