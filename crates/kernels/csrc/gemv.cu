// out[m, n] = x[m, :] . weight[n, :] (+ bias[n]), or out[m, n] += ..., for the few rows of x that M
// says. A warp takes ROWS rows of the weights; what it reads goes through a ring in shared memory,
// so that much is under way without holding registers. A lane reads only what it copied itself, so
// nobody waits for anybody. x stays in the caches.
//
// Every weight is read once whatever M is, so the time is that of reading the weights as long as
// the arithmetic hides behind it.
#include "common.cuh"

typedef ElementOf<OUT_IS_BF16>::type Out;

constexpr u32 THREADS = 32 * WARPS;
constexpr u32 STEP = 32 * 8; // Columns that a warp takes at a time.
constexpr u32 ROW_BYTES = 2 * STEP;
constexpr u32 STAGE_BYTES = ROWS * ROW_BYTES;

struct Params {
    const bf16* x;      // [M, cols]
    const bf16* weight; // [rows, cols]
    const float* bias;  // [rows], or null
    Out* out;           // [M, rows]
    u32 rows;
    u32 cols;
};

DEVICE void multiply(const uint4& w, const float (&x)[8], float& sum) {
    u32 pairs[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
        sum = fmaf(low_float(pairs[i]), x[2 * i], sum);
        sum = fmaf(high_float(pairs[i]), x[2 * i + 1], sum);
    }
}

// Starts the copies of one step: a vector of every row.
DEVICE void load_step(const Params& p, const bf16* const (&rows)[ROWS], u32 col, u32 to) {
#pragma unroll
    for (u32 r = 0; r < ROWS; r++) {
        bool inside = col < p.cols;
        copy16_or_zero(to + r * ROW_BYTES, rows[r] + (inside ? col : 0), inside);
    }
    copies_commit();
}

// Adds the products of one step.
DEVICE void add_step(const Params& p, u32 col, const u8* from, float (&sums)[ROWS][M]) {
    if (col >= p.cols) return;
    uint4 w[ROWS];
#pragma unroll
    for (u32 r = 0; r < ROWS; r++) w[r] = *reinterpret_cast<const uint4*>(from + r * ROW_BYTES);
#pragma unroll
    for (u32 m = 0; m < M; m++) {
        float x[8];
        load8(p.x + u64(m) * p.cols + col, x);
#pragma unroll
        for (u32 r = 0; r < ROWS; r++) multiply(w[r], x, sums[r][m]);
    }
}

DEVICE void write_out(const Params& p, u32 row, u32 m, float sum) {
    if (p.bias != nullptr) sum += p.bias[row];
    Out* out = p.out + u64(m) * p.rows + row;
#if ACCUMULATE
    sum += to_float(*out);
#endif
    *out = from_float<Out>(sum);
}

KERNEL void __launch_bounds__(THREADS) gemv(const Params p) {
    extern __shared__ __align__(16) u8 memory[];
    u32 first = (blockIdx.x * WARPS + warp_id()) * ROWS;
    if (first >= p.rows) return;
    const bf16* rows[ROWS];
#pragma unroll
    for (u32 r = 0; r < ROWS; r++) rows[r] = p.weight + u64(min(first + r, p.rows - 1)) * p.cols;
    u8* ring = memory + warp_id() * STAGES * STAGE_BYTES + lane_id() * 16;
    u32 ring_address = shared_address(ring);

    float sums[ROWS][M] = {};
    u32 col = lane_id() * 8, next = col;
#pragma unroll
    for (u32 i = 0; i + 1 < STAGES; i++, next += STEP) {
        load_step(p, rows, next, ring_address + i * STAGE_BYTES);
    }
    wait_for_earlier_kernels(); // The weights are nobody's result.
    u32 num_steps = ceil_div(p.cols, STEP), stage = 0, free_stage = STAGES - 1;
#pragma unroll 2
    for (u32 step = 0; step < num_steps; step++, col += STEP, next += STEP) {
        load_step(p, rows, next, ring_address + free_stage * STAGE_BYTES);
        copies_wait<STAGES - 1>();
        add_step(p, col, ring + stage * STAGE_BYTES, sums);
        free_stage = stage;
        stage = stage + 1 == STAGES ? 0 : stage + 1;
    }

#pragma unroll
    for (u32 r = 0; r < ROWS; r++) {
#pragma unroll
        for (u32 m = 0; m < M; m++) {
            float sum = warp_sum(sums[r][m]);
            // Different lanes write, so that writes need not wait for each other.
            if (lane_id() == r * M + m && first + r < p.rows) write_out(p, first + r, m, sum);
        }
    }
}
