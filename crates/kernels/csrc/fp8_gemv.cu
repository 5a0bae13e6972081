// out[m, n] = x[m, :] . weight[n, :] * scale[n] (+ bias[n]), or out[m, n] += ..., for up to 8 rows
// of x and weights in e4m3: on tensor cores, since turning codes into numbers for them takes fewer
// instructions than multiplying one by one.
//
// A block takes ROWS rows of the weights, its warps groups of 64 columns in turn. A lane reads what
// it needs of the weights straight into registers, DEPTH groups ahead; the first of them before
// earlier kernels have ended. x comes from the caches, one group ahead.
#include "common.cuh"

typedef ElementOf<OUT_IS_BF16>::type Out;

constexpr u32 THREADS = 32 * WARPS;
constexpr u32 TILES = ROWS / 16; // Of 16 rows of the weights.
constexpr u32 PITCH = ROWS + 4;  // Lanes write sums into different banks.

struct Params {
    const bf16* x;       // [num_rows, cols]
    const u8* codes;     // [rows, padded cols]
    const float* scales; // [rows], or [ceil(cols / 128), rows]
    const float* bias;   // [rows], or null
    Out* out;            // [num_rows, rows]
    u32 num_rows; // 1 to 8
    u32 rows;
    u32 cols;
    u32 reserved;
};

typedef uint4 Weights[2 * TILES];
typedef u32 X[8];

struct Lane {
    const Params& p;
    u32 groups;
    const u8* weights[2 * TILES]; // Rows lane / 4 and that plus 8 of every tile: this lane's bytes.
    const u8* x;                  // Row lane / 4.

    DEVICE explicit Lane(const Params& p) : p(p) {
        groups = ceil_div(p.cols, FP8_GROUP);
        u32 first = blockIdx.x * ROWS + lane_id() / 4;
#pragma unroll
        for (u32 i = 0; i < 2 * TILES; i++) {
            u32 row = min(first + 8 * i, p.rows - 1);
            weights[i] = p.codes + u64(row) * groups * FP8_GROUP + lane_id() % 4 * 16;
        }
        u32 m = min(lane_id() / 4, p.num_rows - 1);
        x = reinterpret_cast<const u8*>(p.x + u64(m) * p.cols + lane_id() % 4 * 2);
    }

    DEVICE void load_weights(u32 group, Weights& w) const {
#pragma unroll
        for (u32 i = 0; i < 2 * TILES; i++) {
            w[i] = make_uint4(0, 0, 0, 0);
            if (group >= groups) continue;
            asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(w[i].x), "=r"(w[i].y), "=r"(w[i].z), "=r"(w[i].w)
                         : "l"(weights[i] + u64(group) * FP8_GROUP));
        }
    }

    // Columns 16 s + 2 (lane % 4) and the next, and those plus 8.
    DEVICE void load_x(u32 group, X& v) const {
#pragma unroll
        for (u32 i = 0; i < 8; i++) {
            u32 col = group * FP8_GROUP + 8 * i;
            bool inside = lane_id() / 4 < p.num_rows && col < p.cols;
            v[i] = inside ? *reinterpret_cast<const u32*>(x + 2 * col) : 0;
        }
    }
};

typedef float Sums[TILES][4];

DEVICE void add_products(const Weights& w, const X& x, Sums& sums) {
#pragma unroll
    for (u32 t = 0; t < TILES; t++) {
        u32 upper_rows[4] = {w[2 * t].x, w[2 * t].y, w[2 * t].z, w[2 * t].w};
        u32 lower_rows[4] = {w[2 * t + 1].x, w[2 * t + 1].y, w[2 * t + 1].z, w[2 * t + 1].w};
#pragma unroll
        for (u32 s = 0; s < 4; s++) {
            u32 a[4];
            e4m3_to_bf16(upper_rows[s], a[0], a[2]);
            e4m3_to_bf16(lower_rows[s], a[1], a[3]);
            multiply_add(sums[t], a, x[2 * s], x[2 * s + 1]);
        }
    }
}

DEVICE void add_group(const Params& p, u32 group, const Weights& w, const X& x, Sums& sums) {
#if BLOCKS
    Sums group_sums = {};
    add_products(w, x, group_sums);
    const float* scales = p.scales + u64(group / 2) * p.rows;
    u32 first = blockIdx.x * ROWS + lane_id() / 4;
#pragma unroll
    for (u32 t = 0; t < TILES; t++) {
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            float scale = scales[min(first + 16 * t + 8 * half, p.rows - 1)];
#pragma unroll
            for (u32 i = 2 * half; i < 2 * half + 2; i++) {
                sums[t][i] = fmaf(group_sums[t][i], scale, sums[t][i]);
            }
        }
    }
#else
    add_products(w, x, sums);
#endif
}

// The warps' sums, [WARPS][8][PITCH], added in their order.
DEVICE void write_out(const Params& p, const float* shared) {
    for (u32 i = threadIdx.x; i < p.num_rows * ROWS; i += THREADS) {
        u32 m = i / ROWS, n = blockIdx.x * ROWS + i % ROWS;
        if (n >= p.rows) continue;
        float sum = 0.0f;
#pragma unroll
        for (u32 w = 0; w < WARPS; w++) sum += shared[(w * 8 + m) * PITCH + i % ROWS];
#if !BLOCKS
        sum *= p.scales[n];
#endif
        if (p.bias != nullptr) sum += p.bias[n];
        Out* out = p.out + u64(m) * p.rows + n;
#if ACCUMULATE
        sum += to_float(*out);
#endif
        *out = from_float<Out>(sum);
    }
}

KERNEL void __launch_bounds__(THREADS, 2) fp8_gemv(const Params p) {
    __shared__ float shared[WARPS * 8 * PITCH];
    Lane lane(p);
    Weights w[DEPTH];
#pragma unroll
    for (u32 i = 0; i < DEPTH; i++) lane.load_weights(warp_id() + i * WARPS, w[i]);
    wait_for_earlier_kernels(); // The weights are nobody's result.
    X x[2];
    lane.load_x(warp_id(), x[0]);
    Sums sums = {};
    for (u32 first = warp_id(); first < lane.groups; first += DEPTH * WARPS) {
#pragma unroll
        for (u32 i = 0; i < DEPTH; i++) {
            u32 group = first + i * WARPS;
            if (group >= lane.groups) break;
            lane.load_x(group + WARPS, x[(i + 1) % 2]);
            add_group(p, group, w[i], x[i % 2], sums);
            lane.load_weights(group + DEPTH * WARPS, w[i]);
        }
    }
    u32 m = lane_id() % 4 * 2, row = lane_id() / 4;
    float* to = shared + (warp_id() * 8 + m) * PITCH + row;
#pragma unroll
    for (u32 t = 0; t < TILES; t++) {
        to[16 * t] = sums[t][0];
        to[16 * t + PITCH] = sums[t][1];
        to[16 * t + 8] = sums[t][2];
        to[16 * t + PITCH + 8] = sums[t][3];
    }
    __syncthreads();
    write_out(p, shared);
}
