// Logits in the order in which they are preferred, and how they are read.
#pragma once
#include "common.cuh"

// Orders tokens by logit, then by lowest id; 0 for what is not a number.
DEVICE u64 key_of(float x, u32 id) {
    u32 bits = __float_as_uint(x + 0.0f); // Zeros are equal whatever their sign.
    u32 ordered = bits >> 31 == 0 ? bits | 1u << 31 : ~bits;
    return x == x ? u64(ordered) << 32 | ~id : 0;
}

DEVICE u32 id_of(u64 key) { return ~u32(key); }

DEVICE float logit_of(u64 key) {
    u32 ordered = key >> 32;
    return __uint_as_float(ordered >> 31 == 1 ? ordered & ~(1u << 31) : ~ordered);
}

// Greatest key of a warp's, for its first lane.
DEVICE u64 warp_max(u64 key) {
    for (u32 offset = 16; offset > 0; offset /= 2) {
        key = max(key, __shfl_down_sync(ALL_LANES, key, offset));
    }
    return key;
}

DEVICE float not_a_number() { return __uint_as_float(0x7fc00000u); }

DEVICE float4 nothing4() {
    float nan = not_a_number();
    return make_float4(nan, nan, nan, nan);
}

// Logits `i` to `i + 3` of a row; places past its end hold NaN.
DEVICE float4 read4(const float* row, u32 i, u32 n) {
    if (n % 4 == 0) return *reinterpret_cast<const float4*>(row + i);
    float4 x;
    x.x = row[i];
    x.y = i + 1 < n ? row[i + 1] : not_a_number();
    x.z = i + 2 < n ? row[i + 2] : not_a_number();
    x.w = i + 3 < n ? row[i + 3] : not_a_number();
    return x;
}

// Key of the greatest logit that this thread of the block meets from `begin` to `end`, multiples of
// 4 or the row's end; 0 if all are NaN. AT_ONCE reads are under way.
template <u32 AT_ONCE> DEVICE u64 greatest_of_share(const float* row, u32 begin, u32 end, u32 n) {
    constexpr u32 STRIDE = 4 * THREADS;
    float best = -INFINITE;
    u32 id = NONE;
#pragma unroll 1
    for (u32 first = begin + threadIdx.x * 4; first < end; first += AT_ONCE * STRIDE) {
        float4 vectors[AT_ONCE];
#pragma unroll
        for (u32 k = 0; k < AT_ONCE; k++) {
            u32 i = first + k * STRIDE;
            vectors[k] = i < end ? read4(row, i, n) : nothing4();
        }
#pragma unroll
        for (u32 k = 0; k < AT_ONCE; k++) {
            float x[4] = {vectors[k].x, vectors[k].y, vectors[k].z, vectors[k].w};
#pragma unroll
            for (u32 j = 0; j < 4; j++) {
                // A thread meets its tokens in order of ids.
                if (x[j] > best || (id == NONE && x[j] == best)) {
                    best = x[j];
                    id = first + k * STRIDE + j;
                }
            }
        }
    }
    return id == NONE ? 0 : key_of(best, id);
}
