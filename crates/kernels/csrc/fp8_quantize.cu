// codes[r, :] = x[r, :] / scales[r] in e4m3, the scale being the row's largest magnitude over 448.
// Weights are rounded with it when they are loaded, activations before products of fp8.
#include "common.cuh"

typedef ElementOf<X_IS_BF16>::type X;

constexpr u32 WARPS = THREADS / 32;

struct Params {
    const X* x;    // [num_rows, len]
    u8* codes;     // [num_rows, padded len]
    float* scales; // [num_rows]
    u32 num_rows;
    u32 len;
};

DEVICE float block_max(float x) {
    __shared__ float maxima[WARPS];
#pragma unroll
    for (int offset = 16; offset > 0; offset >>= 1) {
        x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, offset));
    }
    if (lane_id() == 0) maxima[warp_id()] = x;
    __syncthreads();
#pragma unroll
    for (u32 i = 0; i < WARPS; i++) x = fmaxf(x, maxima[i]);
    return x;
}

// Two neighbours; zeros past the end. Columns are even, as is the length.
DEVICE void load2(const X* x, u32 col, u32 len, float& first, float& second) {
    bool inside = col < len;
    first = inside ? to_float(x[col]) : 0.0f;
    second = inside ? to_float(x[col + 1]) : 0.0f;
}

KERNEL void __launch_bounds__(THREADS) fp8_quantize(const Params p) {
    wait_for_earlier_kernels();
    const X* x = p.x + u64(blockIdx.x) * p.len;
    float amax = 1e-12f;
    for (u32 i = threadIdx.x * 8; i < p.len; i += THREADS * 8) {
        float v[8];
        load8(x + i, v);
#pragma unroll
        for (int j = 0; j < 8; j++) amax = fmaxf(amax, fabsf(v[j]));
    }
    amax = block_max(amax);
    float inverse = 448.0f / amax;
    if (threadIdx.x == 0) p.scales[blockIdx.x] = amax / 448.0f;

    u32 chunks = ceil_div(p.len, FP8_GROUP) * (FP8_GROUP / 16);
    uint4* codes = reinterpret_cast<uint4*>(p.codes) + u64(blockIdx.x) * chunks;
    for (u32 i = threadIdx.x; i < chunks; i += THREADS) {
        u32 first = i / 4 * FP8_GROUP + i % 4 * 2, words[4];
#pragma unroll
        for (u32 s = 0; s < 4; s++) {
            float a, b, c, d;
            load2(x, first + 16 * s, p.len, a, b);
            load2(x, first + 16 * s + 8, p.len, c, d);
            words[s] = pack_e4m3(c * inverse, a * inverse) |
                       pack_e4m3(d * inverse, b * inverse) << 16;
        }
        codes[i] = make_uint4(words[0], words[1], words[2], words[3]);
    }
}
