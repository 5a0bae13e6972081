// Normalises (if asked) and rotates query and key heads; queries go back to their place, keys and
// values to the KV cache. Blocks along x take tokens, along y groups of heads; a warp takes a head.
#include "common.cuh"
#include "kv_cache.cuh"

struct Params {
    bf16* qkv;                 // [num_tokens, (num_heads + 2 num_kv_heads) * HEAD_DIM]
    const float* rotary_table; // [max_positions, rotary_dim]: cosines, then sines
    const float* q_norm;       // [HEAD_DIM]
    const float* k_norm;       // [HEAD_DIM]
    u8* keys;
    u8* values;
    const u32* positions;
    const u32* slot_mapping;
    u32 num_tokens;
    u32 num_heads;
    u32 num_kv_heads;
    u32 rotary_dim;
    float eps;
    u32 reserved;
};

constexpr u32 PAIRS = HEAD_DIM / 2;
constexpr u32 PAIRS_PER_LANE = (PAIRS + 31) / 32;
static_assert(HEAD_DIM % 2 == 0, "heads are read two elements at a time");

// One warp's head as f32.
DEVICE void load_head(const u32* from, float* head) {
#pragma unroll
    for (u32 j = 0; j < PAIRS_PER_LANE; j++) {
        u32 i = j * 32 + lane_id();
        if (i < PAIRS) {
            u32 pair = from[i];
            head[2 * i] = low_float(pair);
            head[2 * i + 1] = high_float(pair);
        }
    }
    __syncwarp();
}

DEVICE void norm_head(float* head, const float* weight, float eps) {
    float squares = 0.0f;
    for (u32 i = lane_id(); i < HEAD_DIM; i += 32) squares += head[i] * head[i];
    float scale = 1.0f / sqrtf(warp_sum(squares) / HEAD_DIM + eps);
    for (u32 i = lane_id(); i < HEAD_DIM; i += 32) head[i] *= scale * weight[i];
    __syncwarp();
}

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

    static DEVICE Place of(const Params& p, u8* cache, u32 slot, u32 kv_head) {
        return Place{cache + strip_at(slot / BLOCK_SIZE, p.num_kv_heads, kv_head),
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

KERNEL void __launch_bounds__(32 * WARPS) rope_and_cache(const Params p) {
    wait_for_earlier_kernels();
    __shared__ float heads[WARPS][HEAD_DIM];
    u32 token = blockIdx.x;
    u32 i = blockIdx.y * WARPS + warp_id();
    u32 num_rotated = p.num_heads + p.num_kv_heads;
    if (i >= num_rotated + p.num_kv_heads) return;
    u32* from = reinterpret_cast<u32*>(p.qkv) +
                (u64(token) * (num_rotated + p.num_kv_heads) + i) * PAIRS;

    Place place;
    if (i >= p.num_heads) {
        u32 slot = p.slot_mapping[token];
        if (slot == NONE) return; // Padding.
        u32 kv_head = i < num_rotated ? i - p.num_heads : i - num_rotated;
        place = Place::of(p, i < num_rotated ? p.keys : p.values, slot, kv_head);
    }
    if (i >= num_rotated) {
        place.write([&](u32 pair) {
            return make_float2(low_float(from[pair]), high_float(from[pair]));
        });
        return;
    }

    float* head = heads[warp_id()];
    load_head(from, head);
#if QK_NORM
    norm_head(head, i < p.num_heads ? p.q_norm : p.k_norm, p.eps);
#endif
    const float* turn = p.rotary_table + u64(p.positions[token]) * p.rotary_dim;
    auto turned = [&](u32 pair) {
        return make_float2(rotated(head, turn, p.rotary_dim, 2 * pair),
                           rotated(head, turn, p.rotary_dim, 2 * pair + 1));
    };
    if (i >= p.num_heads) {
        place.write(turned);
        return;
    }
#pragma unroll
    for (u32 j = 0; j < PAIRS_PER_LANE; j++) {
        u32 pair = j * 32 + lane_id();
        if (pair >= PAIRS) break;
        float2 v = turned(pair);
        from[pair] = pack_bf16(v.x, v.y);
    }
}
