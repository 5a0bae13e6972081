// Heads of the KV cache: rotated, and written as the cache has them. For the kernels that do;
// INTERLEAVED says which elements are pairs. A warp takes a head.
#pragma once
#include "kv_cache.cuh"

constexpr u32 PAIRS = HEAD_DIM / 2;
constexpr u32 PAIRS_PER_LANE = (PAIRS + 31) / 32;
static_assert(HEAD_DIM % 2 == 0, "heads are read two elements at a time");

// Element `i` of the rotated head.
DEVICE float rotated(const float* head, const float* turn, u32 dim, u32 i) {
    if (i >= dim) return head[i];
    u32 half = dim / 2;
#if INTERLEAVED
    bool first = i % 2 == 0;
    u32 angle = i / 2, partner = i ^ 1;
#else
    bool first = i < half;
    u32 angle = first ? i : i - half, partner = first ? i + half : i - half;
#endif
    float cos = turn[angle], sin = turn[half + angle];
    return first ? head[i] * cos - head[partner] * sin : head[i] * cos + head[partner] * sin;
}

// Where a head of the cache lies.
struct Place {
    u8* strip;
    u32 token;

    static DEVICE Place of(u8* cache, u32 num_kv_heads, u32 slot, u32 kv_head) {
        return Place{cache + strip_at(slot / BLOCK_SIZE, num_kv_heads, kv_head),
                     slot % BLOCK_SIZE};
    }

    // This lane's pairs of a head: `x(pair)` of element 2 pair and the next.
    template <typename Pair> DEVICE void write(Pair x) const {
#if KV == KV_BF16
        u32* to = reinterpret_cast<u32*>(strip + head_at(token));
#pragma unroll
        for (u32 j = 0; j < PAIRS_PER_LANE; j++) {
            u32 pair = j * 32 + lane_id();
            if (pair >= PAIRS) break;
            float2 v = x(pair);
            to[pair] = pack_bf16(v.x, v.y);
        }
#elif KV == KV_INT4
        // A lane takes a byte, sixteen of them a group.
        auto number = [&](u32 i) {
            float2 v = x(i / 2);
            return i % 2 == 0 ? v.x : v.y;
        };
        for (u32 start = 0; start < HEAD_BYTES; start += 32) {
            u32 byte = min(start + lane_id(), HEAD_BYTES - 1);
            u32 dim = byte / (KV_GROUP / 2) * KV_GROUP + byte % (KV_GROUP / 2);
            float lower = number(dim), upper = number(dim + KV_GROUP / 2);
            float smallest = fminf(lower, upper), greatest = fmaxf(lower, upper);
#pragma unroll
            for (int offset = 8; offset > 0; offset >>= 1) {
                smallest = fminf(smallest, __shfl_xor_sync(ALL_LANES, smallest, offset));
                greatest = fmaxf(greatest, __shfl_xor_sync(ALL_LANES, greatest, offset));
            }
            Steps steps(smallest, greatest);
            if (start + lane_id() >= HEAD_BYTES) break;
            strip[head_at(token) + byte] = steps.code(lower) | steps.code(upper) << 4;
            u32* scales = reinterpret_cast<u32*>(strip + scale_at(token));
            if (byte % (KV_GROUP / 2) == 0) scales[dim / KV_GROUP] = steps.word;
        }
#else
        float2 pairs[PAIRS_PER_LANE];
        float greatest = 0.0f;
#pragma unroll
        for (u32 j = 0; j < PAIRS_PER_LANE; j++) {
            u32 pair = j * 32 + lane_id();
            pairs[j] = pair < PAIRS ? x(pair) : make_float2(0.0f, 0.0f);
            greatest = fmaxf(greatest, fmaxf(fabsf(pairs[j].x), fabsf(pairs[j].y)));
        }
#pragma unroll
        for (int offset = 16; offset > 0; offset >>= 1) {
            greatest = fmaxf(greatest, __shfl_xor_sync(ALL_LANES, greatest, offset));
        }
        float inverse = greatest > 0.0f ? GREATEST_CODE / greatest : 0.0f;
        u16* to = reinterpret_cast<u16*>(strip + head_at(token));
#pragma unroll
        for (u32 j = 0; j < PAIRS_PER_LANE; j++) {
            u32 pair = j * 32 + lane_id();
            if (pair < PAIRS) to[pair] = narrow_pair(pairs[j].x * inverse, pairs[j].y * inverse);
        }
        if (lane_id() == 0) {
            *reinterpret_cast<float*>(strip + scale_at(token)) = greatest / GREATEST_CODE;
        }
#endif
    }
};
