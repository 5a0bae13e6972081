// Attention of many query rows at once, 16 to a warp: what kernels share that take a tile of query
// rows (token, head of the group) through tiles of KEYS positions with a running softmax. While one
// tile is worked on, the next is on its way. Numbers of eight or four bits become bf16 in between,
// all threads widening some.
//
// Source: Dao, "FlashAttention-2", 2023, algorithm 1 and section 3.2; packed query rows as in
// FlashAttention's and FlashInfer's grouped-query kernels.
#pragma once
#include "kv_cache.cuh"

constexpr u32 THREADS = 32 * WARPS;
constexpr u32 TILE = 16 * WARPS;
// Eight rows of a matrix fall into different banks.
constexpr u32 PITCH = 2 * HEAD_DIM + 16;
constexpr u32 TILE_BYTES = 2 * KEYS * PITCH;
// Where copies arrive: tiles as they are used, or smaller numbers, then their scales.
constexpr u32 ROW_BYTES = SCALED ? HEAD_BYTES : PITCH;
constexpr u32 SCALES_AT = 2 * KEYS * ROW_BYTES;
constexpr u32 BUFFER_BYTES = SCALES_AT + 8 * SCALE_WORDS * KEYS;
constexpr u32 QUERIES_AT = 2 * BUFFER_BYTES + (SCALED ? TILE_BYTES : 0);
constexpr u32 CHUNKS = HEAD_BYTES / 16;
constexpr u32 COPIES = (KEYS * CHUNKS + THREADS - 1) / THREADS;
constexpr u32 STEPS = HEAD_DIM / 16;
// Long heads would need too many registers for their queries.
constexpr bool QUERIES_IN_REGISTERS = HEAD_DIM <= 128;
static_assert(HEAD_DIM % 16 == 0 && KEYS % 16 == 0, "shapes");

// What the block loads of keys and values, a tile ahead of what it computes.
struct Loader {
    const u32* blocks; // The row's block table.
    u32 from;          // First position that any query sees.
    u32 to;            // Last position that any query sees.
    u32 ids[COPIES];   // Blocks of the next tile, on their way meanwhile.

    DEVICE void look_up(u32 tile) {
#pragma unroll
        for (u32 i = 0; i < COPIES; i++) {
            u32 key = (i * THREADS + threadIdx.x) / CHUNKS;
            u32 position = tile * KEYS + key;
            bool seen = key < KEYS && position >= from && position <= to;
            ids[i] = seen ? blocks[position / BLOCK_SIZE] : NONE;
        }
    }

    // Starts the copies of `tile`, whose blocks were looked up. Positions that nobody sees become
    // zeros: what the cache holds there may not even be a number.
    template <typename Params>
    DEVICE void load(const Params& p, u32 kv_head, u32 tile, u32 buffer) {
#pragma unroll
        for (u32 i = 0; i < COPIES; i++) {
            u32 chunk = i * THREADS + threadIdx.x, key = chunk / CHUNKS, part = chunk % CHUNKS;
            if (KEYS * CHUNKS % THREADS != 0 && key >= KEYS) break;
            u32 offset = (tile * KEYS + key) % BLOCK_SIZE;
            bool seen = ids[i] != NONE;
            u64 strip = strip_at(seen ? ids[i] : 0, p.num_kv_heads, kv_head);
            u64 at = strip + head_at(offset) + part * 16;
            u32 place = buffer + key * ROW_BYTES + part * 16;
            copy16_or_zero(place, p.keys + at, seen);
            copy16_or_zero(place + KEYS * ROW_BYTES, p.values + at, seen);
            // A chunk of four bits is a group.
            if (SCALED && part < SCALE_WORDS) {
                u32 scale = buffer + SCALES_AT + (key * SCALE_WORDS + part) * 4;
                u64 from = strip + scale_at(offset) + part * 4;
                copy4_or_zero(scale, p.keys + from, seen);
                copy4_or_zero(scale + 4 * SCALE_WORDS * KEYS, p.values + from, seen);
            }
        }
    }
};

// A tile in bf16 out of the numbers and scales in `buffer`: a thread's share of 16 bytes each.
DEVICE void widen_tile(u32 buffer, u32 tile) {
    constexpr u32 NUMBERS = 16 * HEAD_DIM / HEAD_BYTES;
    for (u32 chunk = threadIdx.x; chunk < 2 * KEYS * CHUNKS; chunk += THREADS) {
        u32 row = chunk / CHUNKS, part = chunk % CHUNKS; // Rows of keys, then of values.
        u32 codes[4];
        asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(codes[0]), "=r"(codes[1]), "=r"(codes[2]), "=r"(codes[3])
                     : "r"(buffer + chunk * 16)
                     : "memory");
        u32 pairs[NUMBERS / 2];
#if KV == KV_INT4
        float2 by = unpack_f16(load_shared_word(buffer + SCALES_AT + chunk * 4));
#pragma unroll
        for (u32 i = 0; i < NUMBERS; i += 2) {
            u32 pair = codes[i / 4 % 4] >> (i % 4 * 8 + i / 16 * 4);
            pairs[i / 2] = pack_bf16(fmaf(float(pair & 15), by.x, by.y),
                                     fmaf(float(pair >> 8 & 15), by.x, by.y));
        }
#else
        float scale = load_shared(buffer + SCALES_AT + row * 4);
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            float x[4];
            widen_to_float(codes[i], x);
            pairs[2 * i] = pack_bf16(x[0] * scale, x[1] * scale);
            pairs[2 * i + 1] = pack_bf16(x[2] * scale, x[3] * scale);
        }
#endif
#pragma unroll
        for (u32 i = 0; i < NUMBERS / 2; i += 4) {
            u32 to = tile + row * PITCH + part * 2 * NUMBERS + i * 4;
            asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(pairs[i]),
                         "r"(pairs[i + 1]), "r"(pairs[i + 2]), "r"(pairs[i + 3])
                         : "memory");
        }
    }
}

// Two query rows of a lane: lane / 4 and + 8 of its warp's 16.
struct Running {
    float max[2]; // Of raw scores.
    float sum[2]; // Over this lane's columns alone.
    float acc[2 * STEPS][4];

    DEVICE void clear() {
#pragma unroll
        for (u32 h = 0; h < 2; h++) max[h] = -INFINITE, sum[h] = 0.0f;
#pragma unroll
        for (u32 d = 0; d < 2 * STEPS; d++) {
#pragma unroll
            for (u32 i = 0; i < 4; i++) acc[d][i] = 0.0f;
        }
    }

    // Lanes add up what they have of the two rows.
    DEVICE void finish_sums() {
#pragma unroll
        for (u32 h = 0; h < 2; h++) {
            sum[h] += __shfl_xor_sync(ALL_LANES, sum[h], 1);
            sum[h] += __shfl_xor_sync(ALL_LANES, sum[h], 2);
        }
    }
};

// The left operand of the scores: a warp's queries.
struct QueryMatrices {
    u32 m[QUERIES_IN_REGISTERS ? STEPS : 1][4];
    u32 shared; // Address of this lane's row where they are not in registers.

    template <typename Params, typename Queries>
    DEVICE void load(const Params& p, const Queries& q, u32 memory) {
        u32 row = q.first + warp_id() * 16 + lane_id() / 4;
        const u32* from[2];
        bool real[2];
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            u32 r = row + i * 8;
            real[i] = r < q.end;
            r = min(r, q.end - 1);
            u64 token = q.token_of(r);
            u64 head = q.kv_head * q.group + r % q.group;
            u64 at = (token * (p.num_heads + 2 * p.num_kv_heads) + head) * HEAD_DIM;
            from[i] = reinterpret_cast<const u32*>(p.qkv + at) + lane_id() % 4;
        }
#pragma unroll
        for (u32 k = 0; k < STEPS; k++) {
#pragma unroll
            for (u32 i = 0; i < 4; i++) {
                u32 pair = real[i % 2] ? from[i % 2][k * 8 + i / 2 * 4] : 0;
                if (QUERIES_IN_REGISTERS) {
                    m[k][i] = pair;
                } else {
                    u32 place = memory + (warp_id() * 16 + lane_id() / 4 + i % 2 * 8) * PITCH +
                                k * 32 + i / 2 * 16 + lane_id() % 4 * 4;
                    asm volatile("st.shared.u32 [%0], %1;" ::"r"(place), "r"(pair) : "memory");
                }
            }
        }
        __syncwarp();
        shared = memory + (warp_id() * 16 + lane_id() % 16) * PITCH + lane_id() / 16 * 16;
    }

    DEVICE void get(u32 k, u32 (&a)[4]) const {
        if (QUERIES_IN_REGISTERS) {
#pragma unroll
            for (u32 i = 0; i < 4; i++) a[i] = m[k][i];
        } else {
            load_matrices(shared + k * 32, a);
        }
    }
};

// Raw scores of a warp's queries with a tile of keys.
DEVICE void score(const QueryMatrices& q, u32 keys, float (&s)[KEYS / 8][4]) {
    u32 row = keys + (lane_id() % 8 + lane_id() / 16 * 8) * PITCH + lane_id() / 8 % 2 * 16;
#pragma unroll
    for (u32 n = 0; n < KEYS / 8; n++) {
#pragma unroll
        for (u32 i = 0; i < 4; i++) s[n][i] = 0.0f;
    }
#pragma unroll
    for (u32 k = 0; k < STEPS; k++) {
        u32 a[4];
        q.get(k, a);
#pragma unroll
        for (u32 n = 0; n < KEYS / 16; n++) {
            u32 b[4];
            load_matrices(row + n * 16 * PITCH + k * 32, b);
            multiply_add(s[2 * n], a, b[0], b[1]);
            multiply_add(s[2 * n + 1], a, b[2], b[3]);
        }
    }
}

// Turns scores into weights relative to the greatest so far. `scale` includes log2(e).
DEVICE void weigh(Running& r, float (&s)[KEYS / 8][4], float scale) {
#pragma unroll
    for (u32 h = 0; h < 2; h++) {
        float greatest = r.max[h];
#pragma unroll
        for (u32 n = 0; n < KEYS / 8; n++) {
            greatest = fmaxf(greatest, fmaxf(s[n][2 * h], s[n][2 * h + 1]));
        }
        greatest = fmaxf(greatest, __shfl_xor_sync(ALL_LANES, greatest, 1));
        greatest = fmaxf(greatest, __shfl_xor_sync(ALL_LANES, greatest, 2));
        // Nothing seen so far: any finite number will do.
        float base = greatest == -INFINITE ? 0.0f : greatest * scale;
        float factor = exp2_fast(r.max[h] * scale - base);
        r.max[h] = greatest;
        r.sum[h] *= factor;
#pragma unroll
        for (u32 d = 0; d < 2 * STEPS; d++) {
            r.acc[d][2 * h] *= factor;
            r.acc[d][2 * h + 1] *= factor;
        }
#pragma unroll
        for (u32 n = 0; n < KEYS / 8; n++) {
#pragma unroll
            for (u32 i = 0; i < 2; i++) {
                float weight = exp2_fast(s[n][2 * h + i] * scale - base);
                r.sum[h] += weight;
                s[n][2 * h + i] = weight;
            }
        }
    }
}

DEVICE void add_values(Running& r, const float (&w)[KEYS / 8][4], u32 values) {
    u32 row = values + (lane_id() % 16) * PITCH + lane_id() / 16 * 16;
#pragma unroll
    for (u32 k = 0; k < KEYS / 16; k++) {
        u32 a[4] = {pack_bf16(w[2 * k][0], w[2 * k][1]), pack_bf16(w[2 * k][2], w[2 * k][3]),
                    pack_bf16(w[2 * k + 1][0], w[2 * k + 1][1]),
                    pack_bf16(w[2 * k + 1][2], w[2 * k + 1][3])};
#pragma unroll
        for (u32 d = 0; d < STEPS; d++) {
            u32 b[4];
            load_matrices_transposed(row + k * 16 * PITCH + d * 32, b);
            multiply_add(r.acc[2 * d], a, b[0], b[1]);
            multiply_add(r.acc[2 * d + 1], a, b[2], b[3]);
        }
    }
}

// Calls `take(tile, keys)` for every tile up to `last`; its keys are at `keys` in bf16, its values
// behind them. The first tile's copies are under way, the next one's blocks were looked up.
template <typename Params, typename Take>
DEVICE void through_tiles(const Params& p, u32 kv_head, Loader& loader, u32 buffer, u32 tile,
                          u32 last, Take take) {
    for (u32 turn = 0; tile <= last; tile++, turn ^= 1) {
        copies_wait<0>();
        __syncthreads(); // The tile is there for all, and the other buffer was read by all.
        if (tile < last) {
            loader.load(p, kv_head, tile + 1, buffer + (turn ^ 1) * BUFFER_BYTES);
            copies_commit();
            loader.look_up(tile + 2);
        }
        u32 keys = buffer + turn * BUFFER_BYTES;
        if (SCALED) {
            keys = buffer + 2 * BUFFER_BYTES;
            widen_tile(buffer + turn * BUFFER_BYTES, keys);
            __syncthreads();
        }
        take(tile, keys);
    }
}
