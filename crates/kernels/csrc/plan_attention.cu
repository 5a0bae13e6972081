// Divides a step's attention among the blocks of a fixed grid; see `ops/plan_attention.rs`.
// One block; rows are taken THREADS at a time.
#include "common.cuh"
#include "prefix_plan.cuh"

constexpr u32 WARPS = THREADS / 32;
constexpr u32 HEADER = 8;

struct Params {
    const u32* context_lens; // [num_rows]
    const u32* row_starts;   // [num_rows + 1]
    u32* plan;
    u32 num_rows;
    u32 max_rows;
    u32 num_ctas;
    u32 max_prefill_tiles;
    u32 head_groups;
    u32 group;
    u32 prefill_tile;
    u32 window;
    u32 one_kernel; // Rows of one new token are cut into query tiles like all others.
    u32 prefix_tile;
    const u32* prefixes;    // As the step has them, see `prefix_plan.cuh`; null: none are shared.
    const u32* prefix_rows; // As the step has them: a row and its prefix.
    uint4* prefix_spans;    // Of the plan, as is the next.
    uint2* row_prefixes;
    u32 num_prefix_ctas;
    u32 num_kv_heads;
};

// Index of the decode row that unit `unit` belongs to.
DEVICE u32 find_row(const uint4* rows, u32 num_rows, u32 unit) {
    u32 low = 0, high = num_rows;
    while (high - low > 1) {
        u32 middle = (low + high) / 2;
        if (rows[middle].y <= unit) {
            low = middle;
        } else {
            high = middle;
        }
    }
    return low;
}

// Divides the attention over shared prefixes, and tells every row which one it has.
DEVICE void plan_prefixes(const Params& p) {
    u32 num_prefixes = p.prefixes[0], num_entries = p.prefixes[1], units = 0, strips = 0;
    const u32* prefixes = p.prefixes + PREFIX_COUNTS;
    for (u32 start = 0; start < num_prefixes; start += THREADS) {
        u32 prefix = start + threadIdx.x, tiles = 0, own = 0;
        if (prefix < num_prefixes) {
            const u32* words = prefixes + prefix_words(prefix);
            tiles = words[0] / TILE_LEN;
            own = ceil_div(words[2], p.prefix_tile / p.group) * p.num_kv_heads;
        }
        u32 units_here, strips_here;
        u32 unit = units + block_prefix_sum<WARPS>(own * tiles, units_here);
        u32 strip = strips + block_prefix_sum<WARPS>(own, strips_here);
        if (prefix < num_prefixes) p.prefix_spans[prefix] = make_uint4(unit, tiles, strip, 0);
        units += units_here;
        strips += strips_here;
    }
    for (u32 row = threadIdx.x; row < p.num_rows; row += THREADS) {
        p.row_prefixes[row] = make_uint2(NONE, 0);
    }
    __syncthreads();
    for (u32 i = threadIdx.x; i < num_entries; i += THREADS) {
        uint2 entry = reinterpret_cast<const uint2*>(p.prefix_rows)[i];
        u32 first = prefixes[prefix_words(entry.y) + 1];
        p.row_prefixes[entry.x] = make_uint2(entry.y, i - first);
    }
    if (threadIdx.x == 0) {
        p.plan[PREFIX_SHARE] = max(MIN_PREFIX_UNITS, ceil_div(units, p.num_prefix_ctas));
        p.plan[PREFIX_UNITS] = units;
    }
    __syncthreads(); // Spans and rows' prefixes are there for all.
}

// Tiles of the context that a row leaves to its prefix.
DEVICE u32 tiles_of_prefix(const Params& p, u32 row) {
    if (p.prefixes == nullptr) return 0;
    u32 prefix = p.row_prefixes[row].x;
    return prefix == NONE ? 0 : p.prefix_spans[prefix].y;
}

// If there are blocks enough for it, gives each row and head group blocks of its own, as if it had
// so many tiles more: a block has one piece then, where one of two takes twice as long to begin and
// to end. All units then.
DEVICE u32 part_rows(const Params& p, uint4* rows, u32 num_rows, u32 units, u32 share) {
    if (num_rows * p.head_groups > p.num_ctas || num_rows > THREADS) return units;
    bool own = threadIdx.x < num_rows;
    uint4 row = own ? rows[threadIdx.x] : make_uint4(0, 0, 0, 0);
    row.z = ceil_div(row.z, share) * share;
    u32 all;
    row.y = block_prefix_sum<WARPS>(row.z * p.head_groups, all);
    if (all > p.num_ctas * share) return units;
    if (own) rows[threadIdx.x] = row;
    __syncthreads(); // They are there for all.
    return all;
}

KERNEL void __launch_bounds__(THREADS) plan_attention(const Params p) {
    wait_only();
    if (p.prefixes != nullptr) plan_prefixes(p);
    uint4* decode_rows = reinterpret_cast<uint4*>(p.plan + HEADER);
    u32* cta_rows = p.plan + HEADER + 4 * p.max_rows;
    uint2* prefill_tiles = reinterpret_cast<uint2*>(cta_rows + p.num_ctas + p.num_ctas % 2);

    __shared__ u32 longest_prefill, most_tiles, least_tiles;
    if (threadIdx.x == 0) longest_prefill = 0, most_tiles = 0, least_tiles = NONE;
    __syncthreads();
    u32 num_decode_rows = 0, num_units = 0, num_prefill_tiles = 0;
    for (u32 start = 0; start < p.num_rows; start += THREADS) {
        u32 row = start + threadIdx.x;
        u32 context = 0, queries = 0;
        if (row < p.num_rows) {
            context = p.context_lens[row];
            queries = p.row_starts[row + 1] - p.row_starts[row];
        }
        bool decode = queries == 1 && context > 0 && !p.one_kernel;
        u32 first_tile = context > p.window ? (context - p.window) / TILE_LEN : 0;
        if (decode) first_tile = max(first_tile, tiles_of_prefix(p, row));
        u32 tiles = decode ? ceil_div(context, TILE_LEN) - first_tile : 0;
        bool prefill = queries > 1 || (p.one_kernel && queries == 1 && context > 0);
        u32 query_tiles = prefill ? ceil_div(queries * p.group, p.prefill_tile) : 0;

        u32 rows_here, units_here, tiles_here;
        u32 index = num_decode_rows + block_prefix_sum<WARPS>(decode, rows_here);
        u32 unit = num_units + block_prefix_sum<WARPS>(tiles * p.head_groups, units_here);
        u32 place = num_prefill_tiles + block_prefix_sum<WARPS>(query_tiles, tiles_here);
        if (query_tiles > 0) atomicMax(&longest_prefill, context);
        if (decode) {
            decode_rows[index] = make_uint4(row, unit, tiles, first_tile);
            atomicMax(&most_tiles, tiles);
            atomicMin(&least_tiles, tiles);
        }
        // The last queries see the most, so they start first.
        for (u32 i = 0; i < query_tiles && place + i < p.max_prefill_tiles; i++) {
            prefill_tiles[place + i] = make_uint2(row, (query_tiles - 1 - i) * p.prefill_tile);
        }
        num_decode_rows += rows_here;
        num_units += units_here;
        num_prefill_tiles += tiles_here;
    }

    __syncthreads(); // All rows are written, and visible within the block.
    u32 least_share = most_tiles > MANY_PIECES * MIN_UNITS ? 2 * MIN_UNITS : MIN_UNITS;
    u32 share = max(least_share, ceil_div(num_units, p.num_ctas));
    // Rows of one length are better left whole, if blocks get little more work by that.
    u32 whole = most_tiles == least_tiles ? ceil_div(share, most_tiles) * most_tiles : 0;
    if (whole > share && whole * 15 <= share * 16) share = whole;
    num_units = part_rows(p, decode_rows, num_decode_rows, num_units, share);
    if (threadIdx.x == 0) {
        p.plan[0] = share;
        p.plan[1] = num_units;
        p.plan[2] = num_decode_rows;
        p.plan[3] = min(num_prefill_tiles, p.max_prefill_tiles);
        p.plan[4] = longest_prefill;
    }
    for (u32 cta = threadIdx.x; cta < p.num_ctas; cta += THREADS) {
        u32 unit = cta * share;
        cta_rows[cta] = unit < num_units ? find_row(decode_rows, num_decode_rows, unit) : NONE;
    }
    // Attention reads the plan before it waits.
    __threadfence();
    __syncthreads();
    let_next_begin();
}
