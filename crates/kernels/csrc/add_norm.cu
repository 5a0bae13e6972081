// x += parts (+ bias), and out = x / sqrt(mean(x^2) + eps) * weight if asked for. One block a row.
// SPLIT: out as codes besides, for a product with weights in e4m3.
#include "fp8_split.cuh"

struct Params {
    float* x;            // [num_rows, len]
    const float* parts;  // [num_parts, num_rows, len]
    const float* bias;   // [len], or null
    const float* weight; // [len], or null: nothing is normalised
    bf16* out;           // [num_rows, len]
    SplitRows split;
    u32 num_rows;
    u32 num_parts;
    u32 len; // With SPLIT a multiple of 128.
    float eps;
};

DEVICE float4 load4(const float* from) { return *reinterpret_cast<const float4*>(from); }
DEVICE float4 add4(float4 a, float4 b) {
    return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}

// Sum over the block, for every thread.
DEVICE float block_sum(float x) {
    __shared__ float sums[32];
    x = warp_sum(x);
    if (lane_id() == 0) sums[warp_id()] = x;
    __syncthreads();
    return warp_sum(lane_id() < blockDim.x / 32 ? sums[lane_id()] : 0.0f);
}

// Four elements of the row, the parts added in their order.
DEVICE float4 total(const Params& p, u64 at, u32 i) {
    float4 parts[4], x = load4(p.x + at);
    u64 stride = u64(p.num_rows) * p.len;
    for (u32 first = 0; first < p.num_parts; first += 4) {
#pragma unroll
        for (u32 j = 0; j < 4; j++) {
            if (first + j < p.num_parts) parts[j] = load4(p.parts + at + (first + j) * stride);
        }
#pragma unroll
        for (u32 j = 0; j < 4; j++) {
            if (first + j < p.num_parts) x = add4(x, parts[j]);
        }
    }
    return p.bias == nullptr ? x : add4(x, load4(p.bias + i));
}

KERNEL void __launch_bounds__(1024) add_norm(const Params p) {
    let_next_begin();
    u64 start = u64(blockIdx.x) * p.len;
    u32 first = threadIdx.x * 4, stride = blockDim.x * 4;
    // The weights are nobody's result, and mostly not in a cache.
    bool has_first = p.weight != nullptr && first < p.len;
    float4 weight = has_first ? load4(p.weight + first) : float4{};
    wait_only();
    float4 kept[VECTORS]; // Most that a thread keeps.
    float squares = 0.0f;
#pragma unroll
    for (u32 j = 0; j < VECTORS; j++) {
        u32 i = first + j * stride;
        if (i >= p.len) break;
        float4 v = kept[j] = total(p, start + i, i);
        *reinterpret_cast<float4*>(p.x + start + i) = v;
        squares += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
    }
    if (p.weight == nullptr) return;
    float scale = 1.0f / sqrtf(block_sum(squares) / p.len + p.eps);
#pragma unroll
    for (u32 j = 0; j < VECTORS; j++) {
        u32 i = first + j * stride;
        if (i >= p.len) break;
        float4 v = kept[j], w = j == 0 ? weight : load4(p.weight + i);
        uint2 pairs = make_uint2(pack_bf16(v.x * scale * w.x, v.y * scale * w.y),
                                 pack_bf16(v.z * scale * w.z, v.w * scale * w.w));
        *reinterpret_cast<uint2*>(p.out + start + i) = pairs;
#if SPLIT
        split_pairs(p.split, blockIdx.x, i / SPLIT_COLS, p.len, pairs);
#endif
    }
}
