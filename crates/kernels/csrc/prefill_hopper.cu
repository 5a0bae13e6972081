// As `prefill_attention.cu`, for Hopper: see `ops/prefill_hopper.rs` for the parameters.
//
// A block takes one item (a tile of query rows of one key/value head) after the other from a queue.
// One warp has the copy engine bring queries, keys and values; two warpgroups of 64 query rows each
// multiply. While a group turns one tile's scores into weights, its products with the values before
// are under way, and so are those of the other group: they take turns at issuing. Where the cache
// holds numbers of eight bits, more warps turn what was copied into tiles of bf16.
//
//   copies    K0  K1 V0  K2 V1 ..  Kn Vn-1  Vn            (two stages each)
//   widening     K0  K1 V0  K2 V1 ..  Kn Vn-1  Vn         (numbers of eight bits alone)
//   group 0   QK0 weigh0 | QK1 PV0 . weigh1 | QK2 PV1 . weigh2 | .. PVn  out
//   group 1      QK0 weigh0 ......... | QK1 PV0 . weigh1 | QK2 PV1 . weigh2 | ..
//
// Source: Shah et al., "FlashAttention-3", 2024, sections 3.1 and 3.2: roles of warpgroups, softmax
// under products; packed query rows as in `prefill_attention.cu`.
#include "hopper.cuh"
#include "kv_cache.cuh"

constexpr u32 GROUPS = 2;
constexpr u32 ROWS = 64 * GROUPS;
constexpr u32 STAGES = 2;
constexpr u32 PANELS = (HEAD_DIM + 63) / 64;
constexpr u32 PANEL_BYTES = 128; // Of a row.
constexpr u32 QUERY_BYTES = PANELS * ROWS * PANEL_BYTES;
constexpr u32 TILE_BYTES = PANELS * KEYS * PANEL_BYTES;
constexpr u32 BLOCKS = KEYS / BLOCK_SIZE; // Of the KV cache, in a tile.
constexpr u32 BLOCK_BYTES = PANELS * BLOCK_SIZE * PANEL_BYTES;
constexpr u32 STRIPS_BYTES = SCALED ? BLOCKS * STRIP_BYTES : 0; // Of a tile, as the cache has them.
// Sums of long heads leave too few registers for more.
constexpr u32 WIDENING_WARPS = HEAD_DIM > 128 ? 3 : 7;
constexpr u32 MATH_THREADS = 128 * GROUPS;
// Of the warps that copy and widen: whole warpgroups, so that each can have its own registers.
constexpr u32 HELPERS = SCALED ? 32 + 32 * WIDENING_WARPS : 128;
constexpr u32 THREADS = HELPERS + MATH_THREADS;
constexpr u32 HELPER_REGISTERS = 56;
constexpr u32 MATH_REGISTERS = HELPERS > 128 ? 200 : 224;
static_assert(HELPERS * HELPER_REGISTERS + MATH_THREADS * MATH_REGISTERS <= 65536, "registers");
static_assert(KEYS % BLOCK_SIZE == 0 && BLOCKS <= 32 && BLOCK_SIZE % 8 == 0, "blocks of a tile");

struct Params {
    TensorMap queries; // [num_tokens, heads, HEAD_DIM], boxes [tokens of a tile, group, 64]
    TensorMap keys;    // [rows, HEAD_DIM], boxes [BLOCK_SIZE, 64]; if not SCALED, as the next
    TensorMap values;
    const u8* key_strips; // If SCALED, as the next.
    const u8* value_strips;
    bf16* out;
    const u32* blocks;
    const u32* block_starts;
    const u32* row_starts;
    const u32* context_lens;
    const u32* plan;
    u32* queue; // Items given out; blocks that found none left.
    u32 prefill_tiles; // Offset of the plan's list.
    u32 num_heads;
    u32 num_kv_heads;
    u32 window;
    float scale;
    u32 reserved;
};

// What a block does between two looks at the queue.
struct Item {
    u32 token;    // Of the row's first query.
    u32 position; // Of the row's first query.
    u32 first;    // First query row of the tile.
    u32 end;      // Past the last query row of the tile that is real; NONE: there is no more work.
    u32 kv_head;
    u32 from; // First position that any query sees.
    u32 to;   // Last position that any query sees.
    u32 reserved;
};

struct Shared {
    Item items[QUERY_STAGES];
    u64 full_queries[QUERY_STAGES], empty_queries[QUERY_STAGES];
    u64 full_keys[STAGES], empty_keys[STAGES];
    u64 full_values[STAGES], empty_values[STAGES];
    u64 last_values;
    u64 full_strips[STAGES], empty_strips[STAGES];
};

// Addresses of what is in shared memory.
struct Memory {
    u32 base; // Queries, keys, values.
    Shared* shared;

    DEVICE explicit Memory(u8* memory) {
        u32 start = shared_address(memory);
        u32 skip = (1024 - start % 1024) % 1024;
        base = start + skip;
        shared = reinterpret_cast<Shared*>(memory + skip + (strips(STAGES) - base));
    }

    DEVICE u32 queries(u32 stage) const { return base + stage * QUERY_BYTES; }
    DEVICE u32 keys(u32 stage) const {
        return base + QUERY_STAGES * QUERY_BYTES + stage * TILE_BYTES;
    }
    DEVICE u32 values(u32 stage) const { return keys(STAGES + stage); }
    DEVICE u32 strips(u32 stage) const { return keys(2 * STAGES) + stage * STRIPS_BYTES; }
};

DEVICE void init_barriers(Shared* s) {
    constexpr u32 MATH_WARPS = MATH_THREADS / 32, WRITERS = SCALED ? WIDENING_WARPS : 1;
    for (u32 i = 0; i < QUERY_STAGES; i++) {
        barrier_init(shared_address(&s->full_queries[i]), 1);
        barrier_init(shared_address(&s->empty_queries[i]), MATH_WARPS);
    }
    for (u32 i = 0; i < STAGES; i++) {
        barrier_init(shared_address(&s->full_keys[i]), WRITERS);
        barrier_init(shared_address(&s->empty_keys[i]), MATH_WARPS);
        barrier_init(shared_address(&s->full_values[i]), WRITERS);
        barrier_init(shared_address(&s->empty_values[i]), MATH_WARPS);
        barrier_init(shared_address(&s->full_strips[i]), 1);
        barrier_init(shared_address(&s->empty_strips[i]), WIDENING_WARPS);
    }
    barrier_init(shared_address(&s->last_values), 1);
    barriers_are_ready();
}

// First position that the token at `position` sees.
DEVICE u32 visible_from(u32 position, u32 window) {
    return position >= window ? position + 1 - window : 0;
}

// ---- the warp that copies ----

// An item, and where its keys and values are.
struct Source {
    Item item;
    const u32* blocks; // The row's block table.
};

// The order in which items are given out: tile by tile, the longest first, of a few heads at once.
// Few, so that their keys and values stay in the L2 cache; enough for the long tiles of the last
// heads not to start when all others have nearly ended.
struct Order {
    u32 num_tiles;
    u32 heads; // At once.

    DEVICE explicit Order(const Params& p) {
        constexpr u32 ENOUGH_ITEMS = 1024, CACHE_BYTES = 24 << 20;
        num_tiles = p.plan[3];
        u32 longest = min(p.plan[4], CACHE_BYTES / (4 * HEAD_DIM));
        u32 most = CACHE_BYTES / (4 * HEAD_DIM * max(longest, 1u));
        heads = min(min(ceil_div(ENOUGH_ITEMS, max(num_tiles, 1u)), most), p.num_kv_heads);
    }
};

// The next item of the queue; false if there is none. The last block to find none resets the queue.
DEVICE bool take(const Params& p, const Order& order, bool is_first, Source& next) {
    u32 num_items = order.num_tiles * p.num_kv_heads, index = blockIdx.x;
    if (!is_first) {
        if (lane_id() == 0) index = gridDim.x + atomicAdd(p.queue, 1);
        index = __shfl_sync(ALL_LANES, index, 0);
    }
    if (index >= num_items) {
        bool is_last = lane_id() == 0 && atomicInc(p.queue + 1, gridDim.x - 1) == gridDim.x - 1;
        if (is_last) p.queue[0] = 0;
        return false;
    }
    u32 first_head = index / (order.num_tiles * order.heads) * order.heads;
    u32 heads = min(order.heads, p.num_kv_heads - first_head);
    index -= order.num_tiles * first_head;
    uint2 entry = reinterpret_cast<const uint2*>(p.plan + p.prefill_tiles)[index / heads];
    u32 row = entry.x, token = p.row_starts[row];
    u32 num_queries = p.row_starts[row + 1] - token, context = p.context_lens[row];
    u32 group = p.num_heads / p.num_kv_heads;
    Item& item = next.item;
    item.token = token;
    item.position = context - num_queries;
    item.first = entry.y;
    item.end = min(item.first + ROWS / group * group, num_queries * group);
    item.kv_head = first_head + index % heads;
    item.from = visible_from(item.position + item.first / group, p.window);
    item.to = item.position + (item.end - 1) / group;
    next.blocks = p.blocks + p.block_starts[row];
    return true;
}

struct Copier {
    const Params& p;
    const Memory& memory;
    RingPlace<STAGES> keys, values, strips;
    u32 last_parity = 0;

    // The strip in the cache of this lane's block of a tile; NONE if nobody sees it.
    DEVICE u32 place(const Source& s, u32 tile) const {
        u32 index = tile * BLOCKS + lane_id();
        bool seen = lane_id() < BLOCKS && index >= s.item.from / BLOCK_SIZE &&
                    index <= s.item.to / BLOCK_SIZE;
        return seen ? s.blocks[index] * p.num_kv_heads + s.item.kv_head : NONE;
    }

    // Strips of a tile as they are.
    DEVICE void load_strips(const u8* cache, u32 strip) {
        Shared* s = memory.shared;
        u32 full = shared_address(&s->full_strips[strips.stage]);
        barrier_wait(shared_address(&s->empty_strips[strips.stage]), strips.parity ^ 1);
        u32 num_seen = __popc(__ballot_sync(ALL_LANES, strip != NONE));
        if (lane_id() == 0) barrier_arrive_and_expect(full, num_seen * STRIP_BYTES);
        __syncwarp();
        u32 to = memory.strips(strips.stage) + lane_id() * STRIP_BYTES;
        if (strip != NONE) copy_bytes(to, cache + u64(strip) * STRIP_BYTES, STRIP_BYTES, full);
        strips.advance();
    }

    // What lies outside of the cache reads as zeros.
    DEVICE void block(u32 to, const TensorMap& map, u32 strip, u32 barrier) const {
        constexpr int OUTSIDE = 0x7fff0000;
        int at = strip == NONE ? OUTSIDE : int(strip * BLOCK_SIZE);
#pragma unroll
        for (u32 panel = 0; panel < PANELS; panel++) {
            u32 offset = (panel * KEYS + lane_id() * BLOCK_SIZE) * PANEL_BYTES;
            copy_box(to + offset, map, panel * 64, at, barrier);
        }
    }

    DEVICE void load_keys(u32 strip) {
        if (SCALED) return load_strips(p.key_strips, strip);
        Shared* s = memory.shared;
        u32 full = shared_address(&s->full_keys[keys.stage]);
        barrier_wait(shared_address(&s->empty_keys[keys.stage]), keys.parity ^ 1);
        if (lane_id() == 0) barrier_arrive_and_expect(full, TILE_BYTES);
        __syncwarp();
        if (lane_id() < BLOCKS) block(memory.keys(keys.stage), p.keys, strip, full);
        keys.advance();
    }

    // `partial`: the last block, if not all of its positions are seen.
    DEVICE void load_values(u32 strip, u32 partial, u32 rows_of_last) {
        if (SCALED) return load_strips(p.value_strips, strip);
        Shared* s = memory.shared;
        u32 full = shared_address(&s->full_values[values.stage]);
        u32 to = memory.values(values.stage);
        barrier_wait(shared_address(&s->empty_values[values.stage]), values.parity ^ 1);
        if (lane_id() == 0) {
            barrier_expect(full, TILE_BYTES - (partial == NONE ? 0 : BLOCK_BYTES));
        }
        __syncwarp();
        if (lane_id() < BLOCKS && lane_id() != partial) block(to, p.values, strip, full);
        if (partial != NONE) load_partial(to, strip, partial, rows_of_last);
        if (lane_id() == 0) barrier_arrive(full);
        values.advance();
    }

    // Positions that nobody sees become zeros: what the cache holds there may not even be a number,
    // and a weight of zero does not help against that.
    DEVICE void load_partial(u32 to, u32 strip, u32 partial, u32 rows_of_last) {
        u32 arrived = shared_address(&memory.shared->last_values);
        if (lane_id() == partial) {
            barrier_arrive_and_expect(arrived, BLOCK_BYTES);
            block(to, p.values, strip, arrived);
        }
        barrier_wait(arrived, last_parity);
        last_parity ^= 1;
        constexpr u32 CHUNKS = PANEL_BYTES / 16;
        u32 first = (partial * BLOCK_SIZE + rows_of_last) * CHUNKS;
        u32 end = (partial + 1) * BLOCK_SIZE * CHUNKS;
        for (u32 panel = 0; panel < PANELS; panel++) {
            for (u32 i = first + lane_id(); i < end; i += 32) {
                u32 place = to + panel * KEYS * PANEL_BYTES + i * 16;
                asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(place), "r"(0)
                             : "memory");
            }
        }
        fence_async_proxy();
        __syncwarp();
    }
};

DEVICE void copy_items(const Params& p, const Memory& memory) {
    Shared* s = memory.shared;
    u32 group = p.num_heads / p.num_kv_heads;
    u32 query_bytes = PANELS * PANEL_BYTES * (ROWS / group * group);
    Copier copier{p, memory};
    RingPlace<QUERY_STAGES> queries;
    Order order(p);
    Source source, next;
    bool more = take(p, order, true, source);
    while (true) {
        u32 full = shared_address(&s->full_queries[queries.stage]);
        barrier_wait(shared_address(&s->empty_queries[queries.stage]), queries.parity ^ 1);
        if (lane_id() == 0) {
            s->items[queries.stage] = source.item;
            if (!more) {
                s->items[queries.stage].end = NONE;
                barrier_arrive(full);
            } else {
                barrier_arrive_and_expect(full, query_bytes);
                const Item& item = source.item;
#pragma unroll
                for (u32 panel = 0; panel < PANELS; panel++) {
                    u32 to = memory.queries(queries.stage) + panel * ROWS * PANEL_BYTES;
                    copy_box(to, p.queries, panel * 64, item.kv_head * group,
                             item.token + item.first / group, full);
                }
            }
        }
        if (!more) return;
        queries.advance();
        u32 tile = source.item.from / KEYS, last_tile = source.item.to / KEYS;
        u32 strip = copier.place(source, tile);
        copier.load_keys(strip);
        bool more_after = take(p, order, false, next);
        for (; tile < last_tile; tile++) {
            u32 after = copier.place(source, tile + 1);
            copier.load_keys(after);
            copier.load_values(strip, NONE, 0);
            strip = after;
        }
        u32 rows_of_last = source.item.to % BLOCK_SIZE + 1;
        u32 last_block = source.item.to / BLOCK_SIZE % BLOCKS;
        copier.load_values(strip, rows_of_last < BLOCK_SIZE ? last_block : NONE, rows_of_last);
        source = next;
        more = more_after;
    }
}

// ---- the warps that widen ----

// One of the warps that must all have let go of, or written, a stage.
DEVICE void release(const u64& barrier) {
    if (lane_id() == 0) barrier_arrive(shared_address(&barrier));
}

struct Widener {
    const Memory& memory;
    RingPlace<STAGES> keys, values, strips;

    // A tile of bf16 out of strips. Positions that nobody sees become zeros: what was there may not
    // even be a number.
    DEVICE void widen(u32 to, u32 from, const Item& item, u32 tile) const {
        constexpr u32 CHUNKS = HEAD_DIM / 16, WIDENING_THREADS = 32 * WIDENING_WARPS;
#pragma unroll 2
        for (u32 i = threadIdx.x - 32; i < KEYS * CHUNKS; i += WIDENING_THREADS) {
            u32 row = i / CHUNKS, part = i % CHUNKS, position = tile * KEYS + row;
            u32 strip = from + row / BLOCK_SIZE * STRIP_BYTES, token = row % BLOCK_SIZE;
            u32 codes[4];
            asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(codes[0]), "=r"(codes[1]), "=r"(codes[2]), "=r"(codes[3])
                         : "r"(strip + head_at(token) + part * 16)
                         : "memory");
            float scale = load_shared(strip + scale_at(token));
            bool seen = position >= item.from && position <= item.to;
            u32 pairs[8];
#pragma unroll
            for (u32 j = 0; j < 4; j++) {
                float x[4];
                widen_to_float(codes[j], x);
                pairs[2 * j] = seen ? pack_bf16(x[0] * scale, x[1] * scale) : 0;
                pairs[2 * j + 1] = seen ? pack_bf16(x[2] * scale, x[3] * scale) : 0;
            }
            u32 place = to + (part / 4 * KEYS + row) * PANEL_BYTES;
#pragma unroll
            for (u32 j = 0; j < 2; j++) {
                u32 chunk = (part % 4 * 2 + j) ^ row % 8;
                asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(place + chunk * 16),
                             "r"(pairs[4 * j]), "r"(pairs[4 * j + 1]), "r"(pairs[4 * j + 2]),
                             "r"(pairs[4 * j + 3])
                             : "memory");
            }
        }
        fence_async_proxy();
        __syncwarp();
    }

    // The next strips become the next tile of a ring.
    DEVICE void next(RingPlace<STAGES>& ring, u64* full, u64* empty, u32 first_stage,
                     const Item& item, u32 tile) {
        Shared* s = memory.shared;
        barrier_wait(shared_address(&empty[ring.stage]), ring.parity ^ 1);
        barrier_wait(shared_address(&s->full_strips[strips.stage]), strips.parity);
        u32 to = first_stage + ring.stage * TILE_BYTES;
        widen(to, memory.strips(strips.stage), item, tile);
        release(full[ring.stage]);
        release(s->empty_strips[strips.stage]);
        ring.advance();
        strips.advance();
    }

    DEVICE void next_keys(const Item& item, u32 tile) {
        Shared* s = memory.shared;
        next(keys, s->full_keys, s->empty_keys, memory.keys(0), item, tile);
    }

    DEVICE void next_values(const Item& item, u32 tile) {
        Shared* s = memory.shared;
        next(values, s->full_values, s->empty_values, memory.values(0), item, tile);
    }
};

// The same items in the same order as those that copy and those that multiply.
DEVICE void widen_items(const Memory& memory) {
    Shared* s = memory.shared;
    Widener widener{memory};
    for (RingPlace<QUERY_STAGES> queries;; queries.advance()) {
        barrier_wait(shared_address(&s->full_queries[queries.stage]), queries.parity);
        Item item = s->items[queries.stage];
        if (item.end == NONE) return;
        u32 tile = item.from / KEYS, last_tile = item.to / KEYS;
        widener.next_keys(item, tile);
        for (; tile < last_tile; tile++) {
            widener.next_keys(item, tile + 1);
            widener.next_values(item, tile);
        }
        widener.next_values(item, tile);
    }
}

// ---- the warpgroups that multiply ----

typedef float Scores[KEYS / 8][4];
typedef float Sums[HEAD_DIM / 8][4];
typedef u32 Weights[KEYS / 16][4];

// Two query rows of a lane: lane / 4 and + 8 of its warp's 16.
struct Rows {
    u32 position[2];
    u32 from[2];
    u32 lowest;       // Position, of the warp's rows.
    u32 highest_from; // First position seen, of the warp's rows.
    float base[2];    // What weights are relative to: exponents of two.
    float sum[2];     // Over this lane's columns alone.

    DEVICE Rows(const Params& p, const Item& item, u32 warp_first) {
        u32 group = p.num_heads / p.num_kv_heads;
        auto position_of = [&](u32 row) { return item.position + min(row, item.end - 1) / group; };
#pragma unroll
        for (u32 h = 0; h < 2; h++) {
            position[h] = position_of(warp_first + lane_id() / 4 + 8 * h);
            from[h] = visible_from(position[h], p.window);
            base[h] = -INFINITE, sum[h] = 0.0f;
        }
        lowest = position_of(warp_first);
        highest_from = visible_from(position_of(warp_first + 15), p.window);
    }
};

// Asks for the scores of 64 query rows with a tile of keys.
DEVICE void score(Scores& s, u32 queries, u32 keys) {
    products_begin();
#pragma unroll
    for (u32 k = 0; k < HEAD_DIM / 16; k++) {
        u64 a = rows_descriptor(queries + k / 4 * ROWS * PANEL_BYTES + k % 4 * 32);
        u64 b = rows_descriptor(keys + k / 4 * KEYS * PANEL_BYTES + k % 4 * 32);
        Product<KEYS>::both(s, a, b, k > 0);
    }
    products_commit();
}

// Asks for the sums of a tile of values.
DEVICE void add_values(Sums& sums, const Weights& w, u32 values) {
    products_begin();
#pragma unroll
    for (u32 k = 0; k < KEYS / 16; k++) {
        u64 b = columns_descriptor(values + k * 16 * PANEL_BYTES, KEYS * PANEL_BYTES);
        Product<HEAD_DIM>::columns(sums, w[k], b);
    }
    products_commit();
}

// Hides what a query does not see.
DEVICE void mask(Scores& s, u32 tile, const Rows& r) {
    u32 start = tile * KEYS, end = start + KEYS;
    if (end - 1 <= r.lowest && start >= r.highest_from) return;
#pragma unroll
    for (u32 n = 0; n < KEYS / 8; n++) {
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            u32 key = start + n * 8 + lane_id() % 4 * 2 + i % 2;
            bool seen = key <= r.position[i / 2] && key >= r.from[i / 2];
            s[n][i] = seen ? s[n][i] : -INFINITE;
        }
    }
}

// Turns scores into weights; `factor` is what earlier sums are to be multiplied by. Weights are
// relative to a row's greatest score, but that of its first tile will do while no other is 2^SLACK
// times as heavy: most tiles leave the sums alone. `scale` includes log2(e).
DEVICE void weigh(Rows& r, Scores& s, float scale, float (&factor)[2]) {
    constexpr float SLACK = 8.0f;
#pragma unroll
    for (u32 h = 0; h < 2; h++) {
        float greatest = -INFINITE;
#pragma unroll
        for (u32 n = 0; n < KEYS / 8; n++) {
            greatest = fmaxf(greatest, fmaxf(s[n][2 * h], s[n][2 * h + 1]));
        }
        greatest = fmaxf(greatest, __shfl_xor_sync(ALL_LANES, greatest, 1));
        greatest = fmaxf(greatest, __shfl_xor_sync(ALL_LANES, greatest, 2));
        greatest *= scale;
        float before = r.base[h];
        if (greatest > before + SLACK) r.base[h] = greatest;
        // Nothing seen so far: any finite number will do.
        float base = r.base[h] == -INFINITE ? 0.0f : r.base[h];
        factor[h] = exp2_fast(before - base);
        float sum = 0.0f;
#pragma unroll
        for (u32 n = 0; n < KEYS / 8; n++) {
#pragma unroll
            for (u32 i = 0; i < 2; i++) {
                float weight = exp2_fast(s[n][2 * h + i] * scale - base);
                sum += weight;
                s[n][2 * h + i] = weight;
            }
        }
        r.sum[h] = r.sum[h] * factor[h] + sum;
    }
}

DEVICE void pack(Weights& w, const Scores& s) {
#pragma unroll
    for (u32 k = 0; k < KEYS / 16; k++) {
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            w[k][2 * i] = pack_bf16(s[2 * k + i][0], s[2 * k + i][1]);
            w[k][2 * i + 1] = pack_bf16(s[2 * k + i][2], s[2 * k + i][3]);
        }
    }
}

DEVICE void rescale(Sums& sums, const float (&factor)[2]) {
    if (!__any_sync(ALL_LANES, factor[0] != 1.0f || factor[1] != 1.0f)) return;
#pragma unroll
    for (u32 d = 0; d < HEAD_DIM / 8; d++) {
#pragma unroll
        for (u32 i = 0; i < 4; i++) sums[d][i] *= factor[i / 2];
    }
}

// Divides by the sums of the weights and writes the group's rows, by way of where its queries were.
DEVICE void write_out(const Params& p, const Item& item, Rows& r, const Sums& sums, u32 staging,
                      u32 group_first, u32 barrier) {
#pragma unroll
    for (u32 h = 0; h < 2; h++) {
        r.sum[h] += __shfl_xor_sync(ALL_LANES, r.sum[h], 1);
        r.sum[h] += __shfl_xor_sync(ALL_LANES, r.sum[h], 2);
        float scale = 1.0f / r.sum[h];
        u32 row = warp_id() % 4 * 16 + lane_id() / 4 + 8 * h;
#pragma unroll
        for (u32 d = 0; d < HEAD_DIM / 8; d++) {
            u32 place = staging + (d / 8 * ROWS + row) * PANEL_BYTES + ((d ^ row) % 8 << 4) +
                        lane_id() % 4 * 4;
            u32 pair = pack_bf16(sums[d][2 * h] * scale, sums[d][2 * h + 1] * scale);
            asm volatile("st.shared.u32 [%0], %1;" ::"r"(place), "r"(pair) : "memory");
        }
    }
    meet(barrier, 128);
    constexpr u32 CHUNKS = HEAD_DIM / 8;
    u32 group = p.num_heads / p.num_kv_heads;
#pragma unroll
    for (u32 i = 0; i < 64 * CHUNKS / 128; i++) {
        u32 at = i * 128 + threadIdx.x % 128, row = at / CHUNKS, chunk = at % CHUNKS;
        u32 query_row = group_first + row;
        u32 place = staging + (chunk / 8 * ROWS + row) * PANEL_BYTES + ((chunk ^ row) % 8 << 4);
        uint4 v;
        asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                     : "r"(place)
                     : "memory");
        if (query_row >= item.end) continue;
        u64 token = item.token + query_row / group;
        u64 head = item.kv_head * group + query_row % group;
        bf16* out = p.out + (token * p.num_heads + head) * HEAD_DIM + chunk * 8;
        *reinterpret_cast<uint4*>(out) = v;
    }
    fence_async_proxy(); // The copy engine writes here next,
    __syncwarp();        // as soon as one lane says for all that they are done.
}

struct Reader {
    RingPlace<STAGES> keys, values;
};

DEVICE void attend(const Params& p, const Memory& memory, const Item& item, u32 queries,
                   Reader& reader, u32 group) {
    Shared* s = memory.shared;
    u32 group_queries = queries + group * 64 * PANEL_BYTES;
    u32 group_first = item.first + group * 64;
    Rows rows(p, item, group_first + warp_id() % 4 * 16);
    float scale = p.scale * 1.44269504f; // log2(e)
    float factor[2];
    Scores scores;
    Weights weights;
    Sums sums;
#pragma unroll
    for (u32 d = 0; d < HEAD_DIM / 8; d++) {
#pragma unroll
        for (u32 i = 0; i < 4; i++) sums[d][i] = 0.0f;
    }

    barrier_wait(shared_address(&s->full_keys[reader.keys.stage]), reader.keys.parity);
    score(scores, group_queries, memory.keys(reader.keys.stage));
    products_wait<0>();
    pin(scores);
    release(s->empty_keys[reader.keys.stage]);
    reader.keys.advance();
    u32 tile = item.from / KEYS, last_tile = item.to / KEYS;
    mask(scores, tile, rows);
    weigh(rows, scores, scale, factor);
    pack(weights, scores);

    for (tile++; tile <= last_tile; tile++) {
        barrier_wait(shared_address(&s->full_keys[reader.keys.stage]), reader.keys.parity);
        meet(1 + group, MATH_THREADS); // This group's turn.
        score(scores, group_queries, memory.keys(reader.keys.stage));
        barrier_wait(shared_address(&s->full_values[reader.values.stage]), reader.values.parity);
        add_values(sums, weights, memory.values(reader.values.stage));
        meet_later(2 - group, MATH_THREADS);
        products_wait<1>();
        pin(scores);
        release(s->empty_keys[reader.keys.stage]);
        reader.keys.advance();
        mask(scores, tile, rows);
        weigh(rows, scores, scale, factor);
        products_wait<0>();
        pin(sums);
        release(s->empty_values[reader.values.stage]);
        reader.values.advance();
        rescale(sums, factor);
        pack(weights, scores);
    }

    barrier_wait(shared_address(&s->full_values[reader.values.stage]), reader.values.parity);
    add_values(sums, weights, memory.values(reader.values.stage));
    products_wait<0>();
    pin(sums);
    release(s->empty_values[reader.values.stage]);
    reader.values.advance();
    write_out(p, item, rows, sums, group_queries, group_first, 3 + group);
}

KERNEL void __launch_bounds__(THREADS, 1) prefill_hopper(const __grid_constant__ Params p) {
    extern __shared__ __align__(1024) u8 dynamic[];
    Memory memory(dynamic);
    if (threadIdx.x == 0) init_barriers(memory.shared);
    __syncthreads();
    wait_for_earlier_kernels();
    if (threadIdx.x < HELPERS) {
        give_up_registers<HELPER_REGISTERS>();
        if (warp_id() == 0) {
            copy_items(p, memory);
        } else if (SCALED) {
            widen_items(memory);
        }
    } else {
        take_registers<MATH_REGISTERS>();
        u32 group = threadIdx.x / 128 - HELPERS / 128;
        if (group == GROUPS - 1) meet_later(1, MATH_THREADS); // Group 0 begins.
        Reader reader;
        for (RingPlace<QUERY_STAGES> queries;; queries.advance()) {
            Shared* s = memory.shared;
            barrier_wait(shared_address(&s->full_queries[queries.stage]), queries.parity);
            Item item = s->items[queries.stage];
            if (item.end == NONE) break;
            attend(p, memory, item, memory.queries(queries.stage), reader, group);
            release(s->empty_queries[queries.stage]);
        }
    }
}
