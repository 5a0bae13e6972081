// Attention of rows with one new token over the prefixes that they share: keys and values are read
// once for all query rows of a tile; see `ops/prefix_attention.rs` for the parameters,
// `ops/plan_attention.rs` for how the work is divided and `query_tiles.cuh` for how a block goes
// through the context.
//
// A strip is one query tile of one prefix and key/value head. What a block finds of a strip it
// leaves in a slot; `decode_attention.cu` adds that to what a row sees behind its prefix.
//
// Source: cascade attention as in FlashInfer (Ye et al., 2024), Hydragen (Juravsky et al., 2024).
#include "common.cuh"
#include "prefix_plan.cuh"
#include "query_tiles.cuh"

struct Params {
    const bf16* qkv;
    const u8* keys;
    const u8* values;
    const u32* blocks;
    const u32* block_starts;
    const u32* row_starts;
    const u32* prefixes;    // As the step has them: two counts, then three words each.
    const u32* prefix_rows; // As the step has them: a row and its prefix.
    const u32* plan;
    const uint4* spans;
    float* parts;
    u32 num_heads;
    u32 num_kv_heads;
    float scale;
    u32 reserved;
};

// The query rows of a strip.
struct Queries {
    const uint2* entries; // Of `prefix_rows`.
    const u32* row_starts;
    u32 first; // Zero: counted from the strip's own first.
    u32 end;   // Past the last query row that is real.
    u32 group;
    u32 kv_head;

    DEVICE u32 token_of(u32 query_row) const { return row_starts[entries[query_row / group].x]; }
};

// Tiles of a strip that fall to this block.
struct Piece {
    u32 prefix;
    u32 strip; // Of all.
    u32 query_tile;
    u32 kv_head;
    u32 first; // First tile.
    u32 count;

    static DEVICE Piece at(const Params& p, u32 unit, u32 end) {
        Piece piece;
        piece.prefix = 0;
        while (piece.prefix + 1 < p.prefixes[0] && p.spans[piece.prefix + 1].x <= unit) {
            piece.prefix++;
        }
        uint4 span = p.spans[piece.prefix];
        u32 tiles = span.y, strip = (unit - span.x) / tiles;
        piece.strip = span.z + strip;
        piece.query_tile = strip / p.num_kv_heads;
        piece.kv_head = strip % p.num_kv_heads;
        piece.first = (unit - span.x) % tiles;
        piece.count = min(tiles - piece.first, end - unit);
        return piece;
    }

    DEVICE Queries queries(const Params& p) const {
        const u32* prefix = p.prefixes + PREFIX_COUNTS + prefix_words(this->prefix);
        Queries q;
        q.group = p.num_heads / p.num_kv_heads;
        u32 rows = TILE / q.group, before = query_tile * rows;
        q.entries = reinterpret_cast<const uint2*>(p.prefix_rows) + prefix[1] + before;
        q.row_starts = p.row_starts;
        q.first = 0;
        q.end = min(rows, prefix[2] - before) * q.group;
        q.kv_head = kv_head;
        return q;
    }
};

// Sums, greatest scores and denominators of this lane's query rows.
DEVICE void leave(const Params& p, const Queries& q, const Piece& piece, Running& r, float scale) {
    r.finish_sums();
    float* slot = p.parts + prefix_slot_at(piece.strip, blockIdx.x, TILE);
#pragma unroll
    for (u32 h = 0; h < 2; h++) {
        u32 row = warp_id() * 16 + lane_id() / 4 + h * 8;
        if (row >= q.end) continue;
        float2* sums = reinterpret_cast<float2*>(slot + row * HEAD_DIM);
#pragma unroll
        for (u32 d = 0; d < 2 * STEPS; d++) {
            sums[d * 4 + lane_id() % 4] = make_float2(r.acc[d][2 * h], r.acc[d][2 * h + 1]);
        }
        float2* softmax = reinterpret_cast<float2*>(slot + TILE * HEAD_DIM);
        if (lane_id() % 4 == 0) softmax[row] = make_float2(r.max[h] * scale, r.sum[h]);
    }
}

KERNEL void __launch_bounds__(THREADS, 1) prefix_attention(const Params p) {
    let_next_begin();
    extern __shared__ __align__(16) u8 memory[];
    u32 buffer = shared_address(memory);
    u32 share = p.plan[PREFIX_SHARE], unit = blockIdx.x * share;
    u32 end = min(unit + share, p.plan[PREFIX_UNITS]);
    if (unit >= end) wait_only();

    bool waited = false;
    float scale = p.scale * 1.44269504f; // log2(e)
    while (unit < end) {
        Piece piece = Piece::at(p, unit, end);
        Queries q = piece.queries(p);
        Loader loader;
        loader.blocks = p.blocks + p.block_starts[q.entries[0].x];
        loader.from = 0;
        loader.to = p.spans[piece.prefix].y * TILE_LEN - 1;
        constexpr u32 PER_TILE = TILE_LEN / KEYS;
        u32 tile = piece.first * PER_TILE, last = tile + piece.count * PER_TILE - 1;
        loader.look_up(tile);
        loader.load(p, q.kv_head, tile, buffer);
        copies_commit();
        loader.look_up(tile + 1);
        // Prefixes were written by earlier steps, but queries by the kernel in front.
        if (!waited) wait_only(), waited = true;
        QueryMatrices matrices;
        matrices.load(p, q, buffer + QUERIES_AT);
        Running running;
        running.clear();
        through_tiles(p, q.kv_head, loader, buffer, tile, last, [&](u32, u32 keys) {
            if (warp_id() * 16 >= q.end) return; // Nothing for this warp.
            float s[KEYS / 8][4];
            score(matrices, keys, s);
            weigh(running, s, scale);
            add_values(running, s, keys + KEYS * PITCH);
        });
        leave(p, q, piece, running, scale);
        unit += piece.count;
        __syncthreads(); // All have read what the next piece's copies overwrite.
    }
}
