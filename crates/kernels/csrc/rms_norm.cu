// out = x / sqrt(mean(x^2) + eps) * weight, or with ADD out += that. One block a row.
#include "common.cuh"

typedef ElementOf<X_IS_BF16>::type X;
typedef ElementOf<OUT_IS_BF16>::type Out;

struct Params {
    const X* x;          // [num_rows, len]
    const float* weight; // [len]
    Out* out;            // [num_rows, len]
    u32 num_rows;
    u32 len;
    float eps;
    u32 reserved;
};

// Sum over the block, for every thread.
DEVICE float block_sum(float x) {
    __shared__ float sums[32];
    x = warp_sum(x);
    if (lane_id() == 0) sums[warp_id()] = x;
    __syncthreads();
    return warp_sum(lane_id() < blockDim.x / 32 ? sums[lane_id()] : 0.0f);
}

// Rows of whole vectors. Most rows fit the block's registers; the rest is read again.
DEVICE void norm_vectors(const X* x, const float* weight, Out* out, u32 len, float eps) {
    u32 first = threadIdx.x * 8, stride = blockDim.x * 8;
    float kept[8] = {};
    if (first < len) load8(x + first, kept);
    float squares = 0.0f;
#pragma unroll
    for (int j = 0; j < 8; j++) squares += kept[j] * kept[j];
    for (u32 i = first + stride; i < len; i += stride) {
        float v[8];
        load8(x + i, v);
#pragma unroll
        for (int j = 0; j < 8; j++) squares += v[j] * v[j];
    }
    float scale = 1.0f / sqrtf(block_sum(squares) / len + eps);
    for (u32 i = first; i < len; i += stride) {
        float w[8];
        load8(weight + i, w);
        if (i != first) load8(x + i, kept);
#pragma unroll
        for (int j = 0; j < 8; j++) kept[j] = kept[j] * scale * w[j];
        if (ADD) {
            float before[8];
            load8(out + i, before);
#pragma unroll
            for (int j = 0; j < 8; j++) kept[j] += before[j];
        }
        store8(out + i, kept);
    }
}

DEVICE void norm_elements(const X* x, const float* weight, Out* out, u32 len, float eps) {
    float squares = 0.0f;
    for (u32 i = threadIdx.x; i < len; i += blockDim.x) {
        float v = to_float(x[i]);
        squares += v * v;
    }
    float scale = 1.0f / sqrtf(block_sum(squares) / len + eps);
    for (u32 i = threadIdx.x; i < len; i += blockDim.x) {
        float normed = to_float(x[i]) * scale * weight[i];
        out[i] = from_float<Out>(ADD ? to_float(out[i]) + normed : normed);
    }
}

KERNEL void __launch_bounds__(1024) rms_norm(const Params p) {
    wait_for_earlier_kernels();
    u64 start = u64(blockIdx.x) * p.len;
    if (p.len % 8 == 0) {
        norm_vectors(p.x + start, p.weight, p.out + start, p.len, p.eps);
    } else {
        norm_elements(p.x + start, p.weight, p.out + start, p.len, p.eps);
    }
}
