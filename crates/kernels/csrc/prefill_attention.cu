// Causal attention of rows with several new tokens over their paged context; see
// `ops/prefill_attention.rs` for the parameters, `ops/plan_attention.rs` for the tiles and
// `query_tiles.cuh` for how a block goes through the context.
#include "common.cuh"
#include "query_tiles.cuh"

constexpr u32 HEADER = 8;

struct Params {
    const bf16* qkv;
    const u8* keys;
    const u8* values;
    bf16* out;
    const u32* blocks;
    const u32* block_starts;
    const u32* row_starts;
    const u32* context_lens;
    const u32* plan;
    u32 num_tokens;
    u32 num_rows;
    u32 max_rows;
    u32 num_ctas;
    u32 num_heads;
    u32 num_kv_heads;
    u32 window;
    float scale;
};

// The query rows of a block.
struct Queries {
    u32 token;    // Of the row's first query.
    u32 position; // Of the row's first query.
    u32 first;    // First query row of the tile.
    u32 end;      // Past the last query row of the tile that is real.
    u32 group;
    u32 kv_head;

    DEVICE u32 token_of(u32 query_row) const { return token + query_row / group; }
    DEVICE u32 position_of(u32 query_row) const {
        return position + min(query_row, end - 1) / group;
    }
};

// First position that the token at `position` sees.
DEVICE u32 visible_from(u32 position, u32 window) {
    return position >= window ? position + 1 - window : 0;
}

// Hides what a query does not see. `position` and `from` are of this lane's two query rows.
DEVICE void mask(float (&s)[KEYS / 8][4], u32 tile, const u32 (&position)[2],
                 const u32 (&from)[2]) {
#pragma unroll
    for (u32 n = 0; n < KEYS / 8; n++) {
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            u32 key = tile * KEYS + n * 8 + lane_id() % 4 * 2 + i % 2;
            bool seen = key <= position[i / 2] && key >= from[i / 2];
            s[n][i] = seen ? s[n][i] : -INFINITE;
        }
    }
}

DEVICE void write_out(const Params& p, const Queries& q, Running& r) {
    r.finish_sums();
#pragma unroll
    for (u32 h = 0; h < 2; h++) {
        u32 row = q.first + warp_id() * 16 + lane_id() / 4 + h * 8;
        if (row >= q.end) continue;
        u64 token = q.token_of(row);
        u64 head = q.kv_head * q.group + row % q.group;
        u32* out = reinterpret_cast<u32*>(p.out + (token * p.num_heads + head) * HEAD_DIM);
        float scale = 1.0f / r.sum[h];
#pragma unroll
        for (u32 d = 0; d < 2 * STEPS; d++) {
            out[d * 4 + lane_id() % 4] =
                pack_bf16(r.acc[d][2 * h] * scale, r.acc[d][2 * h + 1] * scale);
        }
    }
}

KERNEL void __launch_bounds__(THREADS, 1) prefill_attention(const Params p) {
    wait_for_earlier_kernels();
    extern __shared__ __align__(16) u8 memory[];
    if (blockIdx.x >= p.plan[3]) return;
    u32 tiles = HEADER + 4 * p.max_rows + p.num_ctas + p.num_ctas % 2;
    uint2 entry = reinterpret_cast<const uint2*>(p.plan + tiles)[blockIdx.x];
    u32 row = entry.x, num_queries = p.row_starts[row + 1] - p.row_starts[row];

    Queries q;
    q.token = p.row_starts[row];
    q.position = p.context_lens[row] - num_queries;
    q.group = p.num_heads / p.num_kv_heads;
    q.kv_head = blockIdx.y;
    q.first = entry.y;
    q.end = min(q.first + TILE, num_queries * q.group);

    Loader loader;
    loader.blocks = p.blocks + p.block_starts[row];
    loader.from = visible_from(q.position_of(q.first), p.window);
    loader.to = q.position_of(q.end - 1);
    u32 tile = loader.from / KEYS, last_tile = loader.to / KEYS;

    u32 buffer = shared_address(memory);
    loader.look_up(tile);
    loader.load(p, q.kv_head, tile, buffer);
    copies_commit();
    loader.look_up(tile + 1);
    QueryMatrices matrices;
    matrices.load(p, q, buffer + QUERIES_AT);

    // This lane's query rows, and the extremes of its warp's.
    u32 warp_first = q.first + warp_id() * 16, lane_row = warp_first + lane_id() / 4;
    u32 position[2] = {q.position_of(lane_row), q.position_of(lane_row + 8)};
    u32 from[2] = {visible_from(position[0], p.window), visible_from(position[1], p.window)};
    u32 lowest = q.position_of(warp_first), highest = q.position_of(warp_first + 15);
    u32 lowest_from = visible_from(lowest, p.window);
    u32 highest_from = visible_from(highest, p.window);

    Running running;
    running.clear();
    float scale = p.scale * 1.44269504f; // log2(e)
    through_tiles(p, q.kv_head, loader, buffer, tile, last_tile, [&](u32 tile, u32 keys) {
        u32 start = tile * KEYS, end = start + KEYS;
        bool idle = start > highest || end <= lowest_from || warp_first >= q.end;
        if (idle) return; // Nothing for this warp.
        float s[KEYS / 8][4];
        score(matrices, keys, s);
        if (end - 1 > lowest || start < highest_from) mask(s, tile, position, from);
        weigh(running, s, scale);
        add_values(running, s, keys + KEYS * PITCH);
    });
    write_out(p, q, running);
}
