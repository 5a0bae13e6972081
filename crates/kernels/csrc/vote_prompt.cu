// How much the last tokens of a prompt attend to those before: what cutting it is decided by; see
// `ops/cut_prompt.rs`.
//
// Blocks along x take turns of the context's tiles, along y key/value heads. Two launches: the
// first (VOTES is 0) leaves each query's greatest score and denominator over what the block saw;
// the second adds up those of all blocks and all weights of a position. All sums are f32, so that
// the choice is that of any other device. Which block takes what depends on the context alone.
//
// Source: tiles of 4 x 4 sums a thread as in any product of f32, see "CUTLASS: fast linear algebra
// in CUDA C++", NVIDIA, 2017.
#include "common.cuh"
#include "kv_cache.cuh"

constexpr u32 SIDE = 64; // Positions, and queries, of a tile.
constexpr u32 DEPTH = HEAD_DIM % 32 == 0 ? 32 : 16;
constexpr u32 THREADS = 256;
static_assert(HEAD_DIM % DEPTH == 0 && PARTS % 4 == 0, "shapes");

struct Params {
    const bf16* qkv;
    const u8* keys;
    const u32* blocks;
    const u32* block_starts;
    const u32* row_starts;
    float2* parts; // [num_kv_heads, PARTS, num_queries]: greatest score, denominator.
    float* votes;  // [num_kv_heads, context_len]
    u32 row;
    u32 context_len;
    u32 num_observed;
    u32 num_heads;
    u32 num_kv_heads;
    float scale;
};

// Sides by side, dims along the outer axis.
struct Tiles {
    float keys[DEPTH][SIDE];
    float queries[DEPTH][SIDE];
};

// What a block knows of its prompt.
struct Prompt {
    const u32* blocks;
    u32 kv_head;
    u32 group;
    u32 num_queries; // Of a key/value head.
    u32 first_token; // That decides.
    u32 num_voted;

    DEVICE Prompt(const Params& p) {
        blocks = p.blocks + p.block_starts[p.row];
        kv_head = blockIdx.y;
        group = p.num_heads / p.num_kv_heads;
        num_queries = p.num_observed * group;
        first_token = p.row_starts[p.row + 1] - p.num_observed;
        num_voted = p.context_len - p.num_observed;
    }

    // Whether a query is real and sees a position.
    DEVICE bool sees(u32 query, u32 position) const {
        return query < num_queries && position <= num_voted + query / group;
    }

    // A thread takes eight dims of one position and of one query.
    DEVICE void load(const Params& p, u32 position, u32 query, u32 dim, Tiles& tiles) const {
        u32 at = threadIdx.x % SIDE, part = threadIdx.x / SIDE * 8;
        if (part >= DEPTH) return;
        float key[8] = {}, x[8] = {};
        if (position + at < p.context_len) {
            u32 block = blocks[(position + at) / BLOCK_SIZE];
            const u8* strip = p.keys + strip_at(block, p.num_kv_heads, kv_head);
            read8(strip, (position + at) % BLOCK_SIZE, dim + part, key);
        }
        if (query + at < num_queries) {
            u64 token = first_token + (query + at) / group;
            u64 head = kv_head * group + (query + at) % group;
            u64 from = (token * (p.num_heads + 2 * p.num_kv_heads) + head) * HEAD_DIM;
            load8(p.qkv + from + dim + part, x);
        }
#pragma unroll
        for (u32 i = 0; i < 8; i++) {
            tiles.keys[part + i][at] = key[i];
            tiles.queries[part + i][at] = x[i];
        }
    }

    // Scores of a thread's four queries with its four positions, in units of log 2.
    DEVICE void score(const Params& p, u32 position, u32 query, Tiles& tiles,
                      float (&s)[4][4]) const {
        float sums[4][4] = {};
        for (u32 dim = 0; dim < HEAD_DIM; dim += DEPTH) {
            __syncthreads(); // The last tiles have been read.
            load(p, position, query, dim, tiles);
            __syncthreads();
#pragma unroll 4
            for (u32 d = 0; d < DEPTH; d++) {
                float4 k = reinterpret_cast<const float4*>(tiles.keys[d])[threadIdx.x % 16];
                float4 q = reinterpret_cast<const float4*>(tiles.queries[d])[threadIdx.x / 16];
                float keys[4] = {k.x, k.y, k.z, k.w}, queries[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
                for (u32 i = 0; i < 16; i++) {
                    sums[i / 4][i % 4] = fmaf(queries[i / 4], keys[i % 4], sums[i / 4][i % 4]);
                }
            }
        }
        float scale = p.scale * 1.44269504f; // log2(e)
#pragma unroll
        for (u32 i = 0; i < 16; i++) s[i / 4][i % 4] = sums[i / 4][i % 4] * scale;
    }
};

// Adds another part of a softmax; nothing of nothing is nothing.
DEVICE void combine(float2& x, float greatest, float denominator) {
    float both = fmaxf(x.x, greatest), base = both == -INFINITE ? 0.0f : both;
    x.y = x.y * exp2_fast(x.x - base) + denominator * exp2_fast(greatest - base);
    x.x = both;
}

#if !VOTES
// Of this thread's four queries, combined with the fifteen that have other positions.
DEVICE void leave_parts(const Params& p, const Prompt& prompt, u32 query, float2 (&parts)[4]) {
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
#pragma unroll
        for (u32 offset = 1; offset < 16; offset <<= 1) {
            float greatest = __shfl_xor_sync(ALL_LANES, parts[i].x, offset);
            float denominator = __shfl_xor_sync(ALL_LANES, parts[i].y, offset);
            combine(parts[i], greatest, denominator);
        }
        u32 own = query + threadIdx.x / 16 * 4 + i;
        u64 at = u64(prompt.kv_head * PARTS + blockIdx.x) * prompt.num_queries + own;
        if (threadIdx.x % 16 == 0 && own < prompt.num_queries) p.parts[at] = parts[i];
    }
}

DEVICE void sum_up(const Params& p, const Prompt& prompt, Tiles& tiles) {
    for (u32 query = 0; query < prompt.num_queries; query += SIDE) {
        float2 parts[4];
#pragma unroll
        for (u32 i = 0; i < 4; i++) parts[i] = make_float2(-INFINITE, 0.0f);
        for (u32 position = blockIdx.x * SIDE; position < p.context_len; position += PARTS * SIDE) {
            float s[4][4];
            prompt.score(p, position, query, tiles, s);
#pragma unroll
            for (u32 i = 0; i < 16; i++) {
                u32 own = query + threadIdx.x / 16 * 4 + i / 4;
                u32 seen = position + threadIdx.x % 16 * 4 + i % 4;
                if (prompt.sees(own, seen)) combine(parts[i / 4], s[i / 4][i % 4], 1.0f);
            }
        }
        leave_parts(p, prompt, query, parts);
    }
}
#else
// Greatest scores and inverse denominators of a tile of queries. Four threads take a query.
DEVICE void add_parts(const Params& p, const Prompt& prompt, u32 query, float2 (&softmax)[SIDE]) {
    u32 own = query + threadIdx.x / 4;
    float2 sum = make_float2(-INFINITE, 0.0f);
    for (u32 part = threadIdx.x % 4; part < PARTS && own < prompt.num_queries; part += 4) {
        u64 at = u64(prompt.kv_head * PARTS + part) * prompt.num_queries + own;
        combine(sum, p.parts[at].x, p.parts[at].y);
    }
#pragma unroll
    for (u32 offset = 1; offset < 4; offset <<= 1) {
        float greatest = __shfl_xor_sync(ALL_LANES, sum.x, offset);
        float denominator = __shfl_xor_sync(ALL_LANES, sum.y, offset);
        combine(sum, greatest, denominator);
    }
    if (threadIdx.x % 4 == 0) softmax[threadIdx.x / 4] = make_float2(sum.x, 1.0f / sum.y);
}

// A tile's votes, of all threads that have the same positions.
DEVICE void leave_votes(const Params& p, const Prompt& prompt, u32 position, float (&votes)[4]) {
    __shared__ float all[16][SIDE];
#pragma unroll
    for (u32 i = 0; i < 4; i++) all[threadIdx.x / 16][threadIdx.x % 16 * 4 + i] = votes[i];
    __syncthreads();
    u32 own = position + threadIdx.x;
    if (threadIdx.x >= SIDE || own >= prompt.num_voted) return;
    float sum = 0.0f;
#pragma unroll
    for (u32 i = 0; i < 16; i++) sum += all[i][threadIdx.x];
    p.votes[u64(prompt.kv_head) * p.context_len + own] = sum;
}

DEVICE void vote(const Params& p, const Prompt& prompt, Tiles& tiles) {
    __shared__ float2 softmax[SIDE];
    for (u32 position = blockIdx.x * SIDE; position < prompt.num_voted; position += PARTS * SIDE) {
        float votes[4] = {};
        for (u32 query = 0; query < prompt.num_queries; query += SIDE) {
            __syncthreads(); // The last tile's have been read.
            add_parts(p, prompt, query, softmax);
            float s[4][4];
            prompt.score(p, position, query, tiles, s);
#pragma unroll
            for (u32 i = 0; i < 16; i++) {
                u32 own = threadIdx.x / 16 * 4 + i / 4;
                if (query + own >= prompt.num_queries) continue;
                votes[i % 4] += exp2_fast(s[i / 4][i % 4] - softmax[own].x) * softmax[own].y;
            }
        }
        leave_votes(p, prompt, position, votes);
    }
}
#endif

KERNEL void __launch_bounds__(THREADS, 4) vote_prompt(const Params p) {
    wait_for_earlier_kernels();
    __shared__ __align__(16) Tiles tiles;
    Prompt prompt(p);
#if VOTES
    vote(p, prompt, tiles);
#else
    sum_up(p, prompt, tiles);
#endif
}
