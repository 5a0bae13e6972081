// Normalises (if asked) and rotates query and key heads; queries go back to their place, keys and
// values to the KV cache. Blocks along x take tokens, along y groups of heads.
//
// LANES neighbouring lanes share a head. Each has two runs of eight elements, such that what is
// rotated together lies in the same lane. Lanes of the runs of a head of 96, of which 64 turn:
//
//   halves apart   0 1 2 3 0 1 2 3 4 4 5 5
//   neighbours     0 0 1 1 2 2 3 3 4 4 5 5
//
// What the product in front left in parts is added up here first, in their order.
#include "common.cuh"
#include "kv_cache.cuh"

struct Params {
    bf16* qkv;                 // [num_tokens, (num_heads + 2 num_kv_heads) * HEAD_DIM]
    const float* parts;        // [num_parts, ...] of that, or null: it is in `qkv`.
    const float* bias;         // To be added to parts, or null.
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
    u32 rotary_dim; // A multiple of 16.
    float eps;
    u32 num_parts;
    u32 is_settled; // `positions` and `slot_mapping` were written before the kernel in front began.
    u32 reserved;
};

constexpr u32 LANES_USED = HEAD_DIM / 16;
static_assert(HEAD_DIM % 16 == 0 && LANES >= LANES_USED && 32 % LANES == 0, "whole runs");

// Combined over all lanes of a head.
template <typename Combine> DEVICE float over_head(float x, Combine combine) {
#pragma unroll
    for (u32 offset = 1; offset < LANES; offset <<= 1) {
        x = combine(x, __shfl_xor_sync(ALL_LANES, x, offset));
    }
    return x;
}

// This lane's cosines and sines of a position.
struct Turn {
    float cos[8], sin[8];

    DEVICE void load(const Params& p, u32 position, u32 lane) {
        const float* table = p.rotary_table + u64(position) * p.rotary_dim + 8 * lane;
        load8(table, cos);
        load8(table + p.rotary_dim / 2, sin);
    }
};

// One lane's part of a head.
struct Runs {
    u32 at[2]; // Where they begin.
    float x[2][8];

    DEVICE Runs(u32 lane, u32 rotary_dim) : x{} {
        u32 half = rotary_dim / 2;
        bool apart = !INTERLEAVED && 8 * lane < half;
        at[0] = apart ? 8 * lane : 16 * lane;
        at[1] = apart ? half + 8 * lane : 16 * lane + 8;
    }

    // Head `i` of a token.
    DEVICE void load(const Params& p, u32 token, u32 i) {
        u64 len = u64(p.num_heads + 2 * p.num_kv_heads) * HEAD_DIM, start = u64(i) * HEAD_DIM;
        if (p.parts == nullptr) {
            load8(p.qkv + token * len + start + at[0], x[0]);
            load8(p.qkv + token * len + start + at[1], x[1]);
            return;
        }
        if (p.bias != nullptr) {
            load8(p.bias + start + at[0], x[0]);
            load8(p.bias + start + at[1], x[1]);
        }
        const float* from = p.parts + token * len + start;
#pragma unroll 4
        for (u32 part = 0; part < p.num_parts; part++, from += p.num_tokens * len) {
            float v[2][8];
            load8(from + at[0], v[0]);
            load8(from + at[1], v[1]);
#pragma unroll
            for (u32 j = 0; j < 16; j++) x[j / 8][j % 8] += v[j / 8][j % 8];
        }
    }

    // With all lanes of the head.
    DEVICE void normalise(const float* weight, float eps) {
        float squares = 0.0f;
#pragma unroll
        for (u32 j = 0; j < 16; j++) squares += x[j / 8][j % 8] * x[j / 8][j % 8];
        squares = over_head(squares, [](float a, float b) { return a + b; });
        float scale = 1.0f / sqrtf(squares / HEAD_DIM + eps);
        if (weight == nullptr) return;
#pragma unroll
        for (u32 run = 0; run < 2; run++) {
            float w[8];
            load8(weight + at[run], w);
#pragma unroll
            for (u32 j = 0; j < 8; j++) x[run][j] *= scale * w[j];
        }
    }

    DEVICE void rotate(const Turn& turn) {
#pragma unroll
        for (u32 j = 0; j < 8; j++) {
            float& first = INTERLEAVED ? x[j / 4][j % 4 * 2] : x[0][j];
            float& second = INTERLEAVED ? x[j / 4][j % 4 * 2 + 1] : x[1][j];
            float turned = first * turn.cos[j] - second * turn.sin[j];
            second = second * turn.cos[j] + first * turn.sin[j];
            first = turned;
        }
    }

    DEVICE void store(bf16* head) const {
        store8(head + at[0], x[0]);
        store8(head + at[1], x[1]);
    }

#if KV != KV_INT4
    // With all lanes of the head: its largest magnitude.
    DEVICE float greatest() const {
        float greatest = 0.0f;
#pragma unroll
        for (u32 j = 0; j < 16; j++) greatest = fmaxf(greatest, fabsf(x[j / 8][j % 8]));
        return over_head(greatest, [](float a, float b) { return fmaxf(a, b); });
    }

    // To a head of the cache, as codes relative to its largest magnitude.
    DEVICE void store_codes(u8* head, float greatest) const {
        float inverse = greatest > 0.0f ? GREATEST_CODE / greatest : 0.0f;
#pragma unroll
        for (u32 run = 0; run < 2; run++) {
            u32 pairs[4];
#pragma unroll
            for (u32 j = 0; j < 4; j++) {
                pairs[j] = narrow_pair(x[run][2 * j] * inverse, x[run][2 * j + 1] * inverse);
            }
            *reinterpret_cast<uint2*>(head + at[run]) =
                make_uint2(pairs[0] | pairs[1] << 16, pairs[2] | pairs[3] << 16);
        }
    }
#endif
};

#if KV == KV_INT4
// One lane's half of a group's bytes.
struct Codes {
    u32 share; // Which half of the head's groups.
    u32 words[2];
    u32 scales;

    // With all lanes of the head, by way of `staged`, [HEAD_DIM].
    DEVICE Codes(const Runs& runs, u32 lane, float* staged) : share(lane % LANES_USED), words{} {
        if (lane < LANES_USED) {
#pragma unroll
            for (u32 j = 0; j < 16; j++) staged[runs.at[j / 8] + j % 8] = runs.x[j / 8][j % 8];
        }
        __syncwarp();
        float lower[8], upper[8];
        load8(staged + share / 2 * KV_GROUP + share % 2 * 8, lower);
        load8(staged + share / 2 * KV_GROUP + share % 2 * 8 + KV_GROUP / 2, upper);
        float smallest = lower[0], greatest = lower[0];
#pragma unroll
        for (u32 j = 0; j < 8; j++) {
            smallest = fminf(smallest, fminf(lower[j], upper[j]));
            greatest = fmaxf(greatest, fmaxf(lower[j], upper[j]));
        }
        smallest = fminf(smallest, __shfl_xor_sync(ALL_LANES, smallest, 1));
        greatest = fmaxf(greatest, __shfl_xor_sync(ALL_LANES, greatest, 1));
        Steps steps(smallest, greatest);
        scales = steps.word;
#pragma unroll
        for (u32 j = 0; j < 8; j++) {
            words[j / 4] |= (steps.code(lower[j]) | steps.code(upper[j]) << 4) << 8 * (j % 4);
        }
    }

    DEVICE void store(u8* strip, u32 token) const {
        u8* head = strip + head_at(token) + 8 * share;
        *reinterpret_cast<uint2*>(head) = make_uint2(words[0], words[1]);
        if (share % 2 == 0) {
            reinterpret_cast<u32*>(strip + scale_at(token))[share / 2] = scales;
        }
    }
};
#endif

// Left to itself the compiler spills in one of these to keep registers for a block more.
#if KV == KV_INT4
#define BOUNDS __launch_bounds__(THREADS, 5)
#else
#define BOUNDS __launch_bounds__(THREADS)
#endif

KERNEL void BOUNDS rope_and_cache(const Params p) {
    u32 token = blockIdx.x, lane = threadIdx.x % LANES;
    u32 i = (blockIdx.y * THREADS + threadIdx.x) / LANES;
    u32 num_rotated = p.num_heads + p.num_kv_heads;
    bool is_real = i < num_rotated + p.num_kv_heads && lane < LANES_USED;
    bool is_rotated = is_real && i < num_rotated;
    bool turns = is_rotated && 16 * lane < p.rotary_dim;
    u32 slot = NONE;
    Turn turn;
    auto look_up = [&] {
        slot = p.slot_mapping[token];
        if (turns) turn.load(p, p.positions[token], lane);
    };
    if (p.is_settled) look_up();
    // Not before: what comes next may read, before it waits, what was written before this began.
    wait_only();
    let_next_begin();
    if (!p.is_settled) look_up();

    Runs runs(lane, p.rotary_dim);
    if (is_real) runs.load(p, token, i);
#if QK_NORM
    const float* norm = i < p.num_heads ? p.q_norm : p.k_norm;
    runs.normalise(is_rotated ? norm : nullptr, p.eps);
#endif
    if (turns) runs.rotate(turn);
#if KV == KV_INT4
    __shared__ __align__(16) float staged[THREADS / LANES][HEAD_DIM];
    Codes codes(runs, lane, staged[threadIdx.x / LANES]);
#elif KV != KV_BF16
    float greatest = runs.greatest();
#endif
    if (!is_real) return;
    if (i < p.num_heads) {
        runs.store(p.qkv + (u64(token) * (num_rotated + p.num_kv_heads) + i) * HEAD_DIM);
        return;
    }
    if (slot == NONE) return; // Padding.
    u32 kv_head = i < num_rotated ? i - p.num_heads : i - num_rotated, in_block = slot % BLOCK_SIZE;
    u8* strip = (i < num_rotated ? p.keys : p.values) +
                strip_at(slot / BLOCK_SIZE, p.num_kv_heads, kv_head);
#if KV == KV_BF16
    runs.store(reinterpret_cast<bf16*>(strip + head_at(in_block)));
#elif KV == KV_INT4
    codes.store(strip, in_block);
#else
    runs.store_codes(strip + head_at(in_block), greatest);
    if (lane == 0) {
        *reinterpret_cast<float*>(strip + scale_at(in_block)) = greatest / GREATEST_CODE;
    }
#endif
}
