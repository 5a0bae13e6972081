// Attention of rows with one new token over their paged context; see `ops/plan_attention.rs` for
// how the work is divided and `ops/decode_attention.rs` for the parameters.
//
// A block takes a stretch of units, piece by piece (a piece: tiles of one row and head group). In a
// piece its warps take turns of SUBTILE positions. Everything a warp loads, it alone reads: its
// ring in shared memory runs on from piece to piece and needs no barrier.
//
//            positions of a piece   0..15  16..31  32..47  48..63  64..79 ..
//            warp                     0      1       2       3       0    ..
//
// Scores are computed transposed, S^T[16 positions, 8 heads] = K[16, dim] Q^T[dim, 8], so that the
// heads of a group fill the short side of the tensor cores' tile; then O^T[dim, 8] += V^T P^T. Each
// lane has two heads, the same ones in S^T and O^T.
//
// The plan, block tables and all keys and values but the newest were written before the kernel in
// front began, which sees to that: so they are read before it has ended.
//
// Numbers of eight bits are widened between shared memory and tensor cores: keys to f16, in which
// queries are then as well, and values too, but to bf16 in a unified softmax, whose weights need
// its range. Lanes read them two at a time, as one number of 16 bits, which leaves dims in another
// order: queries are read and sums are written in that order. A token's scales multiply its scores
// and its weights. Numbers of four bits are widened and scaled there, all to f16, or values to bf16
// in a unified softmax.
//
// Softmax. ONLINE: weights are relative to the greatest score so far, and sums are scaled when it
// grows. Unified: weights are relative to a number that is fixed for each head, so that warps and
// blocks need not agree on anything and sums are simply added. f32 and bf16 have room for rows
// whose scores lie anywhere within some 40 of it; a row that does not shows in its denominator, and
// the block that would have written it computes it again ONLINE.
//
// CASCADE: rows may share prefixes, whose parts `prefix_attention.cu` has left by then. Their own
// pieces begin behind the prefix, and the last one to arrive adds those parts as well.
//
// Source: swapped operands as in XQA of TensorRT-LLM; running softmax after Milakov and Gimelshein,
// 2018; unified maximum after FlashDecoding++, 2023; merging parts in the last block to arrive as
// in "Flash-Decoding", 2023.
#include "common.cuh"
#include "fp8_split.cuh"
#include "kv_cache.cuh"
#include "prefix_plan.cuh"

constexpr u32 HALVES = SUBTILE / 16;
constexpr u32 HEADS = 8;
constexpr u32 HEADER = 8;
constexpr u32 THREADS = 32 * WARPS;
// Eight rows of a matrix fall into different banks: 16-byte chunks of every 128 bytes of a token
// are in another order for each token of eight, or rows are longer than heads.
constexpr bool SWIZZLED = HEAD_BYTES % 128 == 0;
constexpr u32 PITCH = HEAD_BYTES + (SWIZZLED ? 0 : 16);
constexpr u32 VALUES_AT = SUBTILE * PITCH;
constexpr u32 SCALES_AT = 2 * SUBTILE * PITCH;
constexpr u32 STAGE_BYTES = SCALES_AT + 8 * SCALE_WORDS * SUBTILE;
constexpr u32 CHUNKS = HEAD_BYTES / 16;
constexpr u32 COPIES = (SUBTILE * CHUNKS + 31) / 32;
constexpr bool EVEN_COPIES = SUBTILE * CHUNKS % 32 == 0 && 32 % CHUNKS == 0;
constexpr u32 STEPS = HEAD_DIM / 16;
constexpr u32 SUMS = HEAD_DIM * HEADS;
constexpr bool ONE_BLOCK = BLOCK_SIZE % SUBTILE == 0;
static_assert(HEAD_DIM % (SCALED ? 32 : 16) == 0, "shapes");
static_assert(!SWIZZLED || STAGE_BYTES % 128 == 0, "chunks of 128 bytes that lie on such");
static_assert(!SPLIT || HEAD_DIM == SPLIT_COLS, "a warp has what shares a scale");
static_assert(!CASCADE || (!UNIFIED && !SPLIT), "parts are relative to their greatest scores");
static_assert(TILE_LEN % SUBTILE == 0 && (SUBTILE == 16 || SUBTILE == 32), "shapes");
// A denominator outside of these says that weights were too small or too large for bf16.
constexpr float LEAST_SUM = 0x1p-60f;
constexpr float GREATEST_SUM = 0x1p100f;
// What queries in f16 are multiplied by, exactly, so that large ones are not too large.
constexpr float F16_SHARE = 0.0625f;
// What weights in f16 are multiplied by, so that small ones are not too small.
constexpr float F16_WEIGHTS = 256.0f;
constexpr float GREATEST_F16 = 65504.0f;

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
    float* partials;
    u32* arrivals;
    const float* unified; // [num_heads], of this layer, in units of log 2; or null: all zero.
    u32* recomputed;      // Counts rows and head groups whose softmax was computed again.
    SplitRows split;      // `out` as codes besides, or null; of heads whose dims share a scale.
    const uint4* prefix_spans; // Of the plan, as is the next.
    const uint2* row_prefixes;
    const float* prefix_parts;
    u32 prefix_tile; // Query rows of a part.
    u32 reserved;
    u32 num_rows;
    u32 max_rows;
    u32 num_heads;
    u32 num_kv_heads;
    u32 window;
    float scale;
};

// Tiles of one row and head group that fall to this block.
struct Piece {
    u32 row;
    u32 head_group;
    u32 tiles; // Of the row, all pieces together.
    u32 first; // First tile of this piece, counted from the first that the row sees.
    u32 count;
    u32 unit; // Of the first tile of the row and head group.
    u32 first_tile; // The row's, in its context.
    u32 index;      // Of the decode row.
};

// Where a block is in its stretch of units.
struct Walk {
    u32 unit;
    u32 end;
    u32 index; // Of the decode row.

    static DEVICE Walk begin(const Params& p) {
        u32 share = p.plan[0], all = p.plan[1];
        Walk walk;
        walk.unit = blockIdx.x * share;
        walk.end = min(walk.unit + share, all);
        walk.index = p.plan[HEADER + 4 * p.max_rows + blockIdx.x];
        return walk;
    }

    // Over the whole row and head group of a piece, and nothing else.
    static DEVICE Walk over(const Params& p, const Piece& piece) {
        Walk walk;
        walk.unit = piece.unit;
        walk.end = piece.unit + piece.tiles;
        walk.index = piece.index;
        return walk;
    }

    DEVICE bool done() const { return unit >= end; }

    // The piece here; steps past it.
    DEVICE Piece next(const Params& p, u32 head_groups) {
        uint4 row = reinterpret_cast<const uint4*>(p.plan + HEADER)[index];
        u32 offset = unit - row.y;
        Piece piece;
        piece.row = row.x;
        piece.index = index;
        piece.tiles = row.z;
        piece.first_tile = row.w;
        piece.head_group = offset / row.z;
        piece.first = offset % row.z;
        piece.count = min(row.z - piece.first, end - unit);
        piece.unit = unit - piece.first;
        unit += piece.count;
        if (unit - row.y == row.z * head_groups) index++;
        return piece;
    }
};

// The positions of a piece that one warp takes.
struct Turns {
    u32 subtile;
    u32 end;
    u32 visible;     // First position that the row sees.
    u32 context_len;

    static DEVICE Turns of(const Params& p, const Piece& piece) {
        Turns turns;
        turns.context_len = p.context_lens[piece.row];
        turns.visible = turns.context_len > p.window ? turns.context_len - p.window : 0;
        constexpr u32 PER_TILE = TILE_LEN / SUBTILE;
        u32 tile = piece.first_tile + piece.first;
        u32 start = max(tile * PER_TILE, turns.visible / SUBTILE);
        turns.end = min((tile + piece.count) * PER_TILE, ceil_div(turns.context_len, SUBTILE));
        turns.subtile = start + warp_id();
        return turns;
    }

    DEVICE bool done() const { return subtile >= end; }
    DEVICE bool sees(u32 position) const { return position >= visible && position < context_len; }
};

DEVICE u32 chunks_of_group(const Params& p) {
    return ceil_div(p.num_heads / p.num_kv_heads, HEADS);
}

// Where a token's chunk lies in a matrix of a stage.
DEVICE u32 chunk_at(u32 token, u32 chunk) {
    return token * PITCH + (SWIZZLED ? chunk ^ token % 8 : chunk) * 16;
}

// A lane's row of matrices: chunks `half`, 2 + `half`, 4 + `half` ... of a token.
struct MatrixRow {
    u32 address;

    DEVICE MatrixRow(u32 matrix, u32 token, u32 half) : address(matrix + chunk_at(token, half)) {}

    DEVICE u32 at(u32 pair) const {
        return SWIZZLED ? (address ^ pair % 4 * 32) + pair / 4 * 128 : address + pair * 32;
    }
};

// What a warp loads, well ahead of what it computes.
struct Loader {
    Walk walk;
    Turns turns;
    const u32* blocks; // The row's block table.
    u32 kv_head;
    u32 block; // Of the next subtile (or of this lane's position in it), on its way meanwhile.
    bool done;

    DEVICE void begin(const Params& p, u32 head_groups, const Walk& from) {
        walk = from;
        done = false;
        turns.subtile = 0;
        turns.end = 0;
        seek(p, head_groups);
    }

    // Goes on to a piece that has a turn for this warp.
    DEVICE void seek(const Params& p, u32 head_groups) {
        while (turns.done()) {
            if (walk.done()) {
                done = true;
                return;
            }
            Piece piece = walk.next(p, head_groups);
            turns = Turns::of(p, piece);
            blocks = p.blocks + p.block_starts[piece.row];
            kv_head = piece.head_group / chunks_of_group(p);
        }
        u32 position = turns.subtile * SUBTILE;
        if (!ONE_BLOCK) {
            // The table may name no block where nothing is seen.
            u32 own = position + lane_id() % SUBTILE;
            position = min(max(own, turns.visible), turns.context_len - 1);
        }
        block = blocks[position / BLOCK_SIZE];
    }

#if KV != KV_BF16
    // A lane takes a token's scales.
    DEVICE void load_scales(const Params& p, u32 start, u32 to) {
        u32 position = start + lane_id() % SUBTILE;
        bool seen = turns.sees(position) && lane_id() < SUBTILE;
        u64 at = strip_at(seen ? block : 0, p.num_kv_heads, kv_head) +
                 scale_at(position % BLOCK_SIZE);
        to += 4 * SCALE_WORDS * (lane_id() % SUBTILE);
#pragma unroll
        for (u32 i = 0; i < 4 * SCALE_WORDS && lane_id() < SUBTILE; i += 4) {
            copy4_or_zero(to + i, p.keys + at + i, seen);
            copy4_or_zero(to + 4 * SCALE_WORDS * SUBTILE + i, p.values + at + i, seen);
        }
    }
#endif

    // Whether the kernel in front writes to the next subtile: the row's newest position.
    DEVICE bool is_new() const {
        return !done && (turns.subtile + 1) * SUBTILE >= turns.context_len;
    }

    // Starts the copies of a subtile that is seen as a whole: what lies together in the cache.
    DEVICE void load_whole(const Params& p, u32 start, u32 stage) {
        u32 lane = lane_id();
        u64 strip = strip_at(block, p.num_kv_heads, kv_head), at = strip + lane * 16;
        u32 first = stage + chunk_at(lane / CHUNKS, lane % CHUNKS);
        at += head_at(start % BLOCK_SIZE);
#pragma unroll
        for (u32 i = 0; i < COPIES; i++) {
            // Counted from the first copy's: in bits that this lane's token has not there.
            u32 token = i * (32 / CHUNKS);
            u32 to = (SWIZZLED ? first ^ token % 8 * 16 : first) + token * PITCH;
            copy16_or_zero(to, p.keys + at + i * 512, true);
            copy16_or_zero(to + VALUES_AT, p.values + at + i * 512, true);
        }
#if KV != KV_BF16
        constexpr u32 SCALE_CHUNKS = SCALE_WORDS * SUBTILE / 4;
#pragma unroll
        for (u32 first = 0; first < 2 * SCALE_CHUNKS; first += 32) {
            u32 i = first + lane;
            if (i >= 2 * SCALE_CHUNKS) break;
            const u8* cache = i < SCALE_CHUNKS ? p.keys : p.values;
            u32 offset = scale_at(start % BLOCK_SIZE) + i % SCALE_CHUNKS * 16;
            copy16_or_zero(stage + SCALES_AT + i * 16, cache + strip + offset, true);
        }
#endif
    }

    // As above, of any. Positions that are not seen become zeros: what the cache holds there may
    // not even be a number.
    DEVICE void load_part(const Params& p, u32 start, u32 stage) {
#pragma unroll
        for (u32 i = 0; i < COPIES; i++) {
            u32 chunk = i * 32 + lane_id(), token = chunk / CHUNKS, part = chunk % CHUNKS;
            u32 id = ONE_BLOCK ? block : __shfl_sync(ALL_LANES, block, token);
            if (!EVEN_COPIES && token >= SUBTILE) break;
            u32 offset = (start + token) % BLOCK_SIZE;
            bool seen = turns.sees(start + token);
            u64 at = strip_at(seen ? id : 0, p.num_kv_heads, kv_head) + head_at(offset) + part * 16;
            u32 to = stage + chunk_at(token, part);
            copy16_or_zero(to, p.keys + at, seen);
            copy16_or_zero(to + VALUES_AT, p.values + at, seen);
        }
#if KV != KV_BF16
        load_scales(p, start, stage + SCALES_AT);
#endif
    }

    // Starts the copies of the next subtile to `stage`.
    DEVICE void load(const Params& p, u32 head_groups, u32 stage) {
        if (!done) {
            u32 start = turns.subtile * SUBTILE;
            bool whole = start >= turns.visible && start + SUBTILE <= turns.context_len;
            if (ONE_BLOCK && EVEN_COPIES && whole) {
                load_whole(p, start, stage);
            } else {
                load_part(p, start, stage);
            }
            turns.subtile += WARPS;
            seek(p, head_groups);
        }
        copies_commit();
    }
};

// A warp's softmax of one piece.
struct Running {
    float max[2];        // What weights of this lane's two heads are relative to, as powers of 2.
    float sum[2];        // Over this lane's positions alone.
    float acc[STEPS][4]; // O^T: two dims of every 16, see `dim_of`, two heads each.

    DEVICE void clear(float first, float second) {
        max[0] = first;
        max[1] = second;
        sum[0] = sum[1] = 0.0f;
#pragma unroll
        for (u32 d = 0; d < STEPS; d++) {
#pragma unroll
            for (u32 i = 0; i < 4; i++) acc[d][i] = 0.0f;
        }
    }

    DEVICE void scale(u32 head, float factor) {
        sum[head] *= factor;
#pragma unroll
        for (u32 d = 0; d < STEPS; d++) {
            acc[d][head] *= factor;
            acc[d][head + 2] *= factor;
        }
    }
};

// The first (`second` is 0) or second dim of step `d` whose sums this lane has.
DEVICE u32 dim_of(u32 d, u32 second) {
    return d * 16 + (SCALED ? lane_id() / 4 * 2 + second : lane_id() / 4 + second * 8);
}

// exp2(x - max), 0 where nothing was seen at all.
DEVICE float relative(float x, float max) {
    return exp2_fast(x - (max == -INFINITE ? 0.0f : max));
}

DEVICE void load_queries(const Params& p, const Piece& piece, u32 (&q)[STEPS][2]) {
    u32 group = p.num_heads / p.num_kv_heads, chunks = ceil_div(group, HEADS);
    u32 kv_head = piece.head_group / chunks;
    u32 in_group = piece.head_group % chunks * HEADS + lane_id() / 4;
    u64 token = p.row_starts[piece.row];
    u64 at = token * (p.num_heads + 2 * p.num_kv_heads) + kv_head * group + in_group;
    const u32* from = reinterpret_cast<const u32*>(p.qkv + at * HEAD_DIM);
    bool real = in_group < group;
#pragma unroll
    for (u32 k = 0; k < STEPS; k++) {
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            u32 pair = k * 8 + (SCALED ? lane_id() % 4 * 2 + i : lane_id() % 4 + i * 4);
            q[k][i] = real ? from[pair] : 0;
            if (SCALED) {
                float low = low_float(q[k][i]) * F16_SHARE, high = high_float(q[k][i]) * F16_SHARE;
                q[k][i] = pack_f16(low, high);
            }
        }
#if KV == KV_INT4
        // As `widen_nibbles` leaves dims: those of even bytes, then of odd ones.
        u32 even = __byte_perm(q[k][0], q[k][1], 0x5410);
        q[k][1] = __byte_perm(q[k][0], q[k][1], 0x7632);
        q[k][0] = even;
#endif
    }
}

// What weights of this lane's two heads are relative to before any was seen.
template <bool ONLINE> DEVICE void start(const Params& p, const Piece& piece, Running& r) {
    float unified[2] = {};
    if (!ONLINE && p.unified != nullptr) {
        u32 group = p.num_heads / p.num_kv_heads, chunks = ceil_div(group, HEADS);
        u32 first = piece.head_group / chunks * group;
        u32 in_group = piece.head_group % chunks * HEADS + lane_id() % 4 * 2;
#pragma unroll
        for (u32 h = 0; h < 2; h++) {
            if (in_group + h < group) unified[h] = p.unified[first + in_group + h];
        }
    }
    r.clear(ONLINE ? -INFINITE : unified[0], ONLINE ? -INFINITE : unified[1]);
}

#if KV == KV_INT4
// The dims of a group's lower halves, then of its upper halves: left operands of 16 x 16.
template <bool F16>
DEVICE void widen_group(u32 first, u32 second, const Factors (&by)[2], u32 (&a)[2][4],
                        bool in_rows) {
#pragma unroll
    for (u32 i = 0; i < 2; i++) {
        u32 shift = 4 * i;
        a[i][0] = widen_nibbles<F16>(first >> shift, by[0]);
        a[i][3] = widen_nibbles<F16>(second >> (shift + 8), by[1]);
        u32 odd = widen_nibbles<F16>(first >> (shift + 8), by[0]);
        u32 even = widen_nibbles<F16>(second >> shift, by[1]);
        a[i][1] = in_rows ? even : odd;
        a[i][2] = in_rows ? odd : even;
    }
}

// Scores of 16 positions: lane / 4 (first two) and + 8 (last two), two heads each. `scales` are the
// first position's.
DEVICE void score(const u32 (&q)[STEPS][2], u32 keys, u32 scales, float (&s)[4]) {
    float even[4] = {}, odd[4] = {};
    MatrixRow row(keys, lane_id() % 16, lane_id() / 16);
    scales += lane_id() / 4 * (4 * KV_GROUPS);
    u32 m[4], a[2][4]; // Both halves of the positions of a group, then of the next.
#pragma unroll
    for (u32 g = 0; g < KV_GROUPS; g++) {
        if (g % 2 == 0) load_matrices(row.at(g / 2), m);
        u32 lower = load_shared_word(scales + 4 * g);
        u32 upper = load_shared_word(scales + 4 * g + 32 * KV_GROUPS);
        Factors by[2] = {Factors::of<true>(lower, lower), Factors::of<true>(upper, upper)};
        widen_group<true>(m[g % 2 * 2], m[g % 2 * 2 + 1], by, a, true);
        multiply_add_f16(even, a[0], q[2 * g][0], q[2 * g][1]);
        multiply_add_f16(odd, a[1], q[2 * g + 1][0], q[2 * g + 1][1]);
    }
#pragma unroll
    for (u32 i = 0; i < 4; i++) s[i] = even[i] + odd[i];
}
#else
// Scores of 16 positions: lane / 4 (first two) and + 8 (last two), two heads each.
DEVICE void score(const u32 (&q)[STEPS][2], u32 keys, float (&s)[4]) {
    float even[4] = {}, odd[4] = {};
    MatrixRow row(keys, lane_id() % 16, lane_id() / 16);
#if KV == KV_BF16
#pragma unroll
    for (u32 k = 0; k < STEPS; k++) {
        u32 a[4];
        load_matrices(row.at(k), a);
        // Two sums, so that products need not wait for each other.
        multiply_add(k % 2 == 0 ? even : odd, a, q[k][0], q[k][1]);
    }
#else
#pragma unroll
    for (u32 k = 0; k < STEPS; k += 2) {
        // Both halves of the positions of 16 dims, then of the next 16.
        u32 m[4], a[4], b[4];
        load_matrices(row.at(k / 2), m);
        widen_to_f16(m[0], a[0], a[2]);
        widen_to_f16(m[1], a[1], a[3]);
        multiply_add_f16(even, a, q[k][0], q[k][1]);
        widen_to_f16(m[2], b[0], b[2]);
        widen_to_f16(m[3], b[1], b[3]);
        multiply_add_f16(odd, b, q[k + 1][0], q[k + 1][1]);
    }
#endif
#pragma unroll
    for (u32 i = 0; i < 4; i++) s[i] = even[i] + odd[i];
}
#endif

// Turns scores into weights relative to the greatest so far, or to what is fixed.
template <bool ONLINE> DEVICE void weigh(Running& r, float (&s)[HALVES][4]) {
    if (ONLINE) {
        float greatest[2];
#pragma unroll
        for (u32 h = 0; h < 2; h++) {
            float m = fmaxf(s[0][h], s[0][h + 2]);
            if (HALVES == 2) m = fmaxf(m, fmaxf(s[HALVES - 1][h], s[HALVES - 1][h + 2]));
#pragma unroll
            for (u32 offset = 4; offset < 32; offset <<= 1) {
                m = fmaxf(m, __shfl_xor_sync(ALL_LANES, m, offset));
            }
            greatest[h] = fmaxf(r.max[h], m);
        }
        bool grew = greatest[0] > r.max[0] || greatest[1] > r.max[1];
        if (__any_sync(ALL_LANES, grew)) {
#pragma unroll
            for (u32 h = 0; h < 2; h++) {
                r.scale(h, relative(r.max[h], greatest[h]));
                r.max[h] = greatest[h];
            }
        }
    }
#pragma unroll
    for (u32 half = 0; half < HALVES; half++) {
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            float x = s[half][i], max = r.max[i % 2];
            s[half][i] = ONLINE ? relative(x, max) : exp2_fast(x - max);
        }
        r.sum[0] += s[half][0] + s[half][2];
        r.sum[1] += s[half][1] + s[half][3];
    }
}

#if KV == KV_BF16
DEVICE void add_values(Running& r, const float (&w)[4], u32 values) {
    u32 b0 = transpose_matrix(pack_bf16(w[0], w[1]));
    u32 b1 = transpose_matrix(pack_bf16(w[2], w[3]));
    u32 token = lane_id() % 8 + lane_id() / 16 * 8;
    MatrixRow row(values, token, lane_id() / 8 % 2);
#pragma unroll
    for (u32 d = 0; d < STEPS; d++) {
        u32 a[4];
        load_matrices_transposed(row.at(d), a);
        multiply_add(r.acc[d], a, b0, b1);
    }
}
#elif KV == KV_INT4
// `scales` are the first position's.
template <bool F16>
DEVICE void add_values(Running& r, const float (&w)[4], u32 values, u32 scales) {
    u32 b0 = transpose_matrix(F16 ? pack_f16(w[0], w[1]) : pack_bf16(w[0], w[1]));
    u32 b1 = transpose_matrix(F16 ? pack_f16(w[2], w[3]) : pack_bf16(w[2], w[3]));
    MatrixRow row(values, lane_id() % 16, lane_id() / 16);
    scales += lane_id() % 4 * (8 * KV_GROUPS);
    u32 m[4], a[2][4];
#pragma unroll
    for (u32 g = 0; g < KV_GROUPS; g++) {
        if (g % 2 == 0) load_matrices_transposed(row.at(g / 2), m);
        Factors by[2];
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            u32 at = scales + 4 * g + i * 32 * KV_GROUPS;
            by[i] = Factors::of<F16>(load_shared_word(at), load_shared_word(at + 4 * KV_GROUPS));
        }
        widen_group<F16>(m[g % 2 * 2], m[g % 2 * 2 + 1], by, a, false);
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            if (F16) {
                multiply_add_f16(r.acc[2 * g + i], a[i], b0, b1);
            } else {
                multiply_add(r.acc[2 * g + i], a[i], b0, b1);
            }
        }
    }
}
#else
// Adds what is in two matrices, of which the lower eight tokens come first.
template <bool F16>
DEVICE void add_matrices(float (&acc)[4], u32 lower, u32 upper, u32 b0, u32 b1) {
    u32 a[4];
    if (F16) {
        widen_to_f16(__byte_perm(lower, 0, 0x3120), a[0], a[1]);
        widen_to_f16(__byte_perm(upper, 0, 0x3120), a[2], a[3]);
        multiply_add_f16(acc, a, b0, b1);
    } else {
        widen_to_bf16(lower, a[0], a[1]);
        widen_to_bf16(upper, a[2], a[3]);
        multiply_add(acc, a, b0, b1);
    }
}

template <bool F16> DEVICE void add_values(Running& r, const float (&w)[4], u32 values) {
    u32 b0 = transpose_matrix(F16 ? pack_f16(w[0], w[1]) : pack_bf16(w[0], w[1]));
    u32 b1 = transpose_matrix(F16 ? pack_f16(w[2], w[3]) : pack_bf16(w[2], w[3]));
    MatrixRow row(values, lane_id() % 16, lane_id() / 16);
#pragma unroll
    for (u32 d = 0; d < STEPS; d += 2) {
        u32 m[4];
        load_matrices_transposed(row.at(d / 2), m);
        add_matrices<F16>(r.acc[d], m[0], m[1], b0, b1);
        add_matrices<F16>(r.acc[d + 1], m[2], m[3], b0, b1);
    }
}
#endif

// One turn of a warp: the subtile at `stage`.
template <bool ONLINE>
DEVICE void add_subtile(Running& r, const u32 (&q)[STEPS][2], const Turns& turns, float scale,
                        u32 stage) {
    float s[HALVES][4];
    float of_values[HALVES][2];
    u32 position = turns.subtile * SUBTILE + lane_id() / 4;
#pragma unroll
    for (u32 half = 0; half < HALVES; half++) {
#if KV == KV_INT4
        score(q, stage + half * 16 * PITCH, stage + SCALES_AT + half * 64 * KV_GROUPS, s[half]);
        float of_keys[2] = {scale / F16_SHARE, scale / F16_SHARE};
        of_values[half][0] = of_values[half][1] = ONLINE ? F16_WEIGHTS : 1.0f;
#else
        score(q, stage + half * 16 * PITCH, s[half]);
        float of_keys[2] = {scale, scale};
#endif
#pragma unroll
        for (u32 i = 0; SCALED && KV != KV_INT4 && i < 2; i++) {
            u32 at = stage + SCALES_AT + 4 * (half * 16 + i * 8 + lane_id() / 4);
            of_keys[i] = load_shared(at) * (scale / F16_SHARE);
            of_values[half][i] = load_shared(at + 4 * SUBTILE);
            if (ONLINE) of_values[half][i] = fminf(of_values[half][i] * F16_WEIGHTS, GREATEST_F16);
        }
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            bool seen = turns.sees(position + half * 16 + i / 2 * 8);
            s[half][i] = seen ? s[half][i] * of_keys[i / 2] : -INFINITE;
        }
    }
    weigh<ONLINE>(r, s);
#pragma unroll
    for (u32 half = 0; half < HALVES; half++) {
#pragma unroll
        for (u32 i = 0; SCALED && i < 4; i++) s[half][i] *= of_values[half][i / 2];
        u32 values = stage + VALUES_AT + half * 16 * PITCH;
#if KV == KV_BF16
        add_values(r, s[half], values);
#elif KV == KV_INT4
        u32 scales = stage + SCALES_AT + (SUBTILE + half * 16) * 4 * KV_GROUPS;
        add_values<ONLINE>(r, s[half], values, scales);
#else
        add_values<ONLINE>(r, s[half], values);
#endif
    }
}

// Shared memory behind the rings. Longer rows: neighbouring heads' dims fall into different banks.
struct Meeting {
    float sums[WARPS][HEADS][HEAD_DIM + 4];
    float softmax[WARPS][HEADS][2]; // Greatest score and denominator.
};

// Every warp leaves its sums for all.
DEVICE void meet(Running& r, Meeting& meeting) {
    u32 head = lane_id() % 4 * 2;
#pragma unroll
    for (u32 h = 0; h < 2; h++) {
#pragma unroll
        for (u32 offset = 4; offset < 32; offset <<= 1) {
            r.sum[h] += __shfl_xor_sync(ALL_LANES, r.sum[h], offset);
        }
        if (lane_id() < 4) {
            meeting.softmax[warp_id()][head + h][0] = r.max[h];
            meeting.softmax[warp_id()][head + h][1] = r.sum[h];
        }
        float* to = meeting.sums[warp_id()][head + h];
#pragma unroll
        for (u32 d = 0; d < STEPS; d++) {
            float first = r.acc[d][h], second = r.acc[d][h + 2];
            if (SCALED) {
                *reinterpret_cast<float2*>(to + dim_of(d, 0)) = make_float2(first, second);
            } else {
                to[dim_of(d, 0)] = first;
                to[dim_of(d, 1)] = second;
            }
        }
    }
    __syncthreads();
}

// What the warps left of a head, added up.
template <bool ONLINE> struct Met {
    const Meeting& meeting;
    u32 head;
    float greatest;
    float denominator;
    float factors[WARPS]; // What warps' sums count for.

    DEVICE Met(const Meeting& meeting_, u32 head_) : meeting(meeting_), head(head_) {
        greatest = meeting.softmax[0][head][0];
        denominator = 0.0f;
#pragma unroll
        for (u32 w = 1; ONLINE && w < WARPS; w++) {
            greatest = fmaxf(greatest, meeting.softmax[w][head][0]);
        }
#pragma unroll
        for (u32 w = 0; w < WARPS; w++) {
            float factor = ONLINE ? relative(meeting.softmax[w][head][0], greatest) : 1.0f;
            denominator += meeting.softmax[w][head][1] * factor;
            factors[w] = SCALED && ONLINE ? factor / F16_WEIGHTS : factor;
        }
    }

    // Sums become values.
    DEVICE void divide() {
        float inverse = 1.0f / denominator;
#pragma unroll
        for (u32 w = 0; w < WARPS; w++) factors[w] *= inverse;
    }

    // Of a dim and the next.
    DEVICE float2 pair(u32 dim) const {
        float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll
        for (u32 w = 0; w < WARPS; w++) {
            float2 x = *reinterpret_cast<const float2*>(&meeting.sums[w][head][dim]);
            sum.x += x.x * factors[w], sum.y += x.y * factors[w];
        }
        return sum;
    }
};

// Writes what `of_head(head).pair(dim)` says of all dims of real heads.
template <typename OfHead>
DEVICE void write_out(const Params& p, const Piece& piece, OfHead of_head) {
    u32 group = p.num_heads / p.num_kv_heads, chunks = ceil_div(group, HEADS);
    u32 first = piece.head_group % chunks * HEADS;
    u32 head = threadIdx.x % HEADS;
    if (first + head >= group) return;
    auto values = of_head(head);
    u64 at = u64(p.row_starts[piece.row]) * p.num_heads + piece.head_group / chunks * group;
    u32* out = reinterpret_cast<u32*>(p.out + (at + first + head) * HEAD_DIM);
    for (u32 pair = threadIdx.x / HEADS; pair < HEAD_DIM / 2; pair += THREADS / HEADS) {
        float2 x = values.pair(2 * pair);
        out[pair] = pack_bf16(x.x, x.y);
    }
}

#if SPLIT
// As above, and leaves codes: a warp takes a head, a lane the dims whose codes are a word.
template <typename OfHead>
DEVICE void write_codes(const Params& p, const Piece& piece, OfHead of_head) {
    u32 group = p.num_heads / p.num_kv_heads, chunks = ceil_div(group, HEADS);
    u32 first = piece.head_group % chunks * HEADS, token = p.row_starts[piece.row];
    u32 dim = lane_id() / 16 * FP8_GROUP + lane_id() % 4 * 16 + lane_id() / 4 % 4 * 2;
    for (u32 head = warp_id(); head < HEADS && first + head < group; head += WARPS) {
        auto values = of_head(head);
        u32 pairs[2];
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            float2 x = values.pair(dim + 8 * i);
            pairs[i] = pack_bf16(x.x, x.y);
        }
        u32 of_all = piece.head_group / chunks * group + first + head;
        u32* out = reinterpret_cast<u32*>(p.out + (u64(token) * p.num_heads + of_all) * HEAD_DIM);
        out[dim / 2] = pairs[0], out[dim / 2 + 4] = pairs[1];
        split_word(p.split, token, of_all, p.num_heads * HEAD_DIM, lane_id(), pairs[0], pairs[1]);
    }
}
#endif

// A slot of `partials`: sums [HEAD_DIM, HEADS], then greatest scores and denominators [HEADS, 2].
DEVICE float* slot(const Params& p, u32 index) {
    return p.partials + u64(index) * (SUMS + 2 * HEADS);
}

// Of the pieces of a row and head group, block `cta`'s: the first piece is the last of its block,
// all others are the first of theirs.
DEVICE float* slot_of(const Params& p, u32 cta, u32 first_cta) {
    return slot(p, 2 * cta + (cta == first_cta ? 1 : 0));
}

// Whether a denominator of a real head says that the fixed number was too far off.
DEVICE bool is_unsafe(const Params& p, const Piece& piece, u32 head, float denominator) {
    u32 group = p.num_heads / p.num_kv_heads, chunks = ceil_div(group, HEADS);
    bool real = piece.head_group % chunks * HEADS + head < group;
    return real && !(denominator > LEAST_SUM && denominator < GREATEST_SUM);
}

// Adds another part of a softmax.
DEVICE void combine(float& greatest, float& denominator, float other, float of_other) {
    float both = fmaxf(greatest, other);
    denominator = denominator * (UNIFIED ? 1.0f : relative(greatest, both)) +
                  of_other * (UNIFIED ? 1.0f : relative(other, both));
    greatest = both;
}

// What a shared prefix came to for a row and head group: parts of it, each a row of some heads.
struct PrefixParts {
    const float* parts;
    u32 slot;
    u32 count;
    u32 query_row; // The head group's first.
    u32 query_rows;

    static DEVICE PrefixParts of(const Params& p, const Piece& piece) {
        PrefixParts parts;
        parts.count = 0;
#if CASCADE
        uint2 row = p.row_prefixes[piece.row];
        if (row.x == NONE) return parts;
        u32 group = p.num_heads / p.num_kv_heads, chunks = ceil_div(group, HEADS);
        u32 kv_head = piece.head_group / chunks, rows = p.prefix_tile / group;
        uint4 span = p.prefix_spans[row.x];
        u32 strip = row.y / rows * p.num_kv_heads + kv_head, share = p.plan[PREFIX_SHARE];
        u32 unit = span.x + strip * span.y, first_cta = unit / share;
        parts.parts = p.prefix_parts;
        parts.slot = span.z + strip + first_cta;
        parts.count = (unit + span.y - 1) / share - first_cta + 1;
        parts.query_row = row.y % rows * group + piece.head_group % chunks * HEADS;
        parts.query_rows = p.prefix_tile;
#endif
        return parts;
    }

    DEVICE const float* softmax(u32 part, u32 head) const {
        const float* slot_ = parts + prefix_slot_at(slot, part, query_rows);
        return slot_ + query_rows * HEAD_DIM + 2 * (query_row + head);
    }

    DEVICE const float* sums(u32 part, u32 head) const {
        const float* slot_ = parts + prefix_slot_at(slot, part, query_rows);
        return slot_ + (query_row + head) * HEAD_DIM;
    }
};

DEVICE bool has_prefix(const Params& p, const Piece& piece) {
    return CASCADE && p.row_prefixes[piece.row].x != NONE;
}

// Real heads of a piece.
DEVICE u32 heads_of(const Params& p, const Piece& piece) {
    u32 group = p.num_heads / p.num_kv_heads, chunks = ceil_div(group, HEADS);
    return min(group - piece.head_group % chunks * HEADS, HEADS);
}

// Greatest scores and denominators of all pieces and parts, left in `softmax[0]`.
DEVICE void merge_softmax(const Params& p, u32 first_cta, u32 last_cta, const PrefixParts& parts,
                          u32 num_heads, Meeting& meeting) {
    u32 head = threadIdx.x % HEADS;
    float greatest = -INFINITE, denominator = 0.0f;
    for (u32 cta = first_cta + threadIdx.x / HEADS; cta <= last_cta; cta += THREADS / HEADS) {
        const float* from = slot_of(p, cta, first_cta) + SUMS + 2 * head;
        combine(greatest, denominator, load_fresh(from), load_fresh(from + 1));
    }
#if CASCADE
    for (u32 i = threadIdx.x / HEADS; i < parts.count; i += THREADS / HEADS) {
        if (head >= num_heads) break;
        const float* from = parts.softmax(i, head);
        combine(greatest, denominator, load_fresh(from), load_fresh(from + 1));
    }
#endif
#pragma unroll
    for (u32 offset = HEADS; offset < 32; offset <<= 1) {
        float other = __shfl_xor_sync(ALL_LANES, greatest, offset);
        float of_other = __shfl_xor_sync(ALL_LANES, denominator, offset);
        combine(greatest, denominator, other, of_other);
    }
    if (lane_id() < HEADS) {
        meeting.softmax[warp_id()][head][0] = greatest;
        meeting.softmax[warp_id()][head][1] = denominator;
    }
    __syncthreads();
    if (threadIdx.x < HEADS) {
        for (u32 w = 1; w < WARPS; w++) {
            combine(greatest, denominator, meeting.softmax[w][head][0],
                    meeting.softmax[w][head][1]);
        }
        meeting.softmax[0][head][0] = greatest;
        meeting.softmax[0][head][1] = denominator;
    }
    __syncthreads();
}

constexpr u32 DIMS = (HEAD_DIM + THREADS - 1) / THREADS;
constexpr u32 AT_ONCE = THREADS / HEADS;
constexpr u32 UNDER_WAY = DIMS < 4 ? 4 / DIMS : 1; // Pieces whose reads are.
#if CASCADE
// As above, parts of prefixes; there are too few registers where a block has eight warps.
constexpr u32 PARTS_UNDER_WAY = WARPS == 8 ? 1 : UNDER_WAY;
#endif

// Adds up `count` pieces of a row and head group in order. A thread takes all heads of a dim; what
// pieces count for, `factor(i)` for the thread's head, is worked out for some at a time.
// `sums_of(i, dim, x)` reads a piece's sums of all heads.
template <u32 UNROLL, typename Factor, typename Sums>
DEVICE void add_pieces(float (&sums)[DIMS][HEADS], u32 count, Meeting& meeting, Factor factor,
                       Sums sums_of) {
    float* factors = &meeting.sums[0][0][0]; // [AT_ONCE, HEADS]
    for (u32 first = 0; first < count; first += AT_ONCE) {
        u32 own = first + threadIdx.x / HEADS;
        factors[threadIdx.x] = own < count ? factor(own) : 0.0f;
        __syncthreads();
        u32 here = min(AT_ONCE, count - first);
#pragma unroll UNROLL
        for (u32 i = 0; i < here; i++) {
#pragma unroll
            for (u32 d = 0; d < DIMS; d++) {
                float x[HEADS];
                sums_of(first + i, min(threadIdx.x + d * THREADS, HEAD_DIM - 1), x);
#pragma unroll
                for (u32 h = 0; h < HEADS; h++) {
                    sums[d][h] = fmaf(x[h], factors[i * HEADS + h], sums[d][h]);
                }
            }
        }
        __syncthreads();
    }
}

#if SPLIT
// A head's values of [HEAD_DIM, HEADS].
struct Merged {
    const float* values;

    DEVICE float2 pair(u32 dim) const {
        return make_float2(values[dim * HEADS], values[(dim + 1) * HEADS]);
    }
};
#endif

// Adds up all pieces of a row and head group; false, for all threads, if that is in vain.
DEVICE bool merge(const Params& p, const Piece& piece, u32 first_cta, u32 last_cta,
                  Meeting& meeting) {
    PrefixParts parts = PrefixParts::of(p, piece);
    u32 num_heads = heads_of(p, piece), head = threadIdx.x % HEADS;
    merge_softmax(p, first_cta, last_cta, parts, num_heads, meeting);
    float greatest = meeting.softmax[0][head][0], denominator = meeting.softmax[0][head][1];
    if (UNIFIED && __syncthreads_or(is_unsafe(p, piece, head, denominator))) return false;

    float sums[DIMS][HEADS] = {};
    auto factor = [&](u32 i) {
        if (UNIFIED) return 1.0f / denominator;
        const float* softmax = slot_of(p, first_cta + i, first_cta) + SUMS + 2 * head;
        return relative(load_fresh(softmax), greatest) / denominator;
    };
    auto sums_of = [&](u32 i, u32 dim, float(&x)[HEADS]) {
        load8_fresh(slot_of(p, first_cta + i, first_cta) + dim * HEADS, x);
    };
    add_pieces<UNDER_WAY>(sums, last_cta + 1 - first_cta, meeting, factor, sums_of);
#if CASCADE
    auto factor_of_part = [&](u32 i) {
        if (head >= num_heads) return 0.0f;
        return relative(load_fresh(parts.softmax(i, head)), greatest) / denominator;
    };
    auto sums_of_part = [&](u32 i, u32 dim, float(&x)[HEADS]) {
#pragma unroll
        for (u32 h = 0; h < HEADS; h++) {
            x[h] = h < num_heads ? load_fresh(parts.sums(i, h) + dim) : 0.0f;
        }
    };
    add_pieces<PARTS_UNDER_WAY>(sums, parts.count, meeting, factor_of_part, sums_of_part);
#endif
#if SPLIT
    if (p.split.codes != nullptr) {
        float* all = &meeting.sums[0][0][0]; // [HEAD_DIM, HEADS]; the factors are not needed now.
#pragma unroll
        for (u32 d = 0; d < DIMS; d++) {
            u32 dim = threadIdx.x + d * THREADS;
#pragma unroll
            for (u32 h = 0; h < HEADS; h++) {
                if (dim < HEAD_DIM) all[dim * HEADS + h] = sums[d][h];
            }
        }
        __syncthreads();
        write_codes(p, piece, [&](u32 head) { return Merged{all + head}; });
        return true;
    }
#endif
    u32 group = p.num_heads / p.num_kv_heads, chunks = ceil_div(group, HEADS);
    u32 in_group = piece.head_group % chunks * HEADS;
    u64 at = u64(p.row_starts[piece.row]) * p.num_heads + piece.head_group / chunks * group;
    bf16* out = p.out + (at + in_group) * HEAD_DIM;
#pragma unroll
    for (u32 d = 0; d < DIMS; d++) {
        u32 dim = threadIdx.x + d * THREADS;
#pragma unroll
        for (u32 h = 0; h < HEADS; h++) {
            if (dim < HEAD_DIM && in_group + h < group) {
                out[h * HEAD_DIM + dim] = from_float<bf16>(sums[d][h]);
            }
        }
    }
    return true;
}

// Writes a whole row and head group; false, for all threads, if that would be in vain.
template <bool ONLINE>
DEVICE bool finish(const Params& p, const Piece& piece, const Meeting& meeting) {
    if (!ONLINE) {
        Met<ONLINE> met(meeting, threadIdx.x % HEADS);
        if (__syncthreads_or(is_unsafe(p, piece, met.head, met.denominator))) return false;
    }
    auto of_head = [&](u32 head) {
        Met<ONLINE> met(meeting, head);
        met.divide();
        return met;
    };
#if SPLIT
    if (p.split.codes != nullptr) {
        write_codes(p, piece, of_head);
        return true;
    }
#endif
    write_out(p, piece, of_head);
    return true;
}

// Leaves a piece that is not the whole, and merges all if it is the last to arrive; false, for all
// threads, if that is in vain.
DEVICE bool leave(const Params& p, const Piece& piece, u32 head_groups, Meeting& meeting) {
    __shared__ bool last;
    u32 share = p.plan[0];
    u32 first_cta = piece.unit / share, last_cta = (piece.unit + piece.tiles - 1) / share;
    float* to = slot_of(p, blockIdx.x, first_cta);
    Met<!UNIFIED> met(meeting, threadIdx.x % HEADS);
    for (u32 dim = threadIdx.x / HEADS * 2; dim < HEAD_DIM; dim += THREADS / HEADS * 2) {
        float2 sums = met.pair(dim);
        to[dim * HEADS + met.head] = sums.x;
        to[(dim + 1) * HEADS + met.head] = sums.y;
    }
    if (threadIdx.x < HEADS) {
        to[SUMS + 2 * threadIdx.x] = met.greatest;
        to[SUMS + 2 * threadIdx.x + 1] = met.denominator;
    }
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        u32* arrivals = p.arrivals + piece.row * head_groups + piece.head_group;
        last = atomicAdd(arrivals, 1u) == last_cta - first_cta;
        if (last) *arrivals = 0; // For the next launch.
        __threadfence();
    }
    __syncthreads();
    return !last || merge(p, piece, first_cta, last_cta, meeting);
}

// Rows of padding: nothing seen, and nothing that is not a number left behind.
DEVICE void clear_empty_rows(const Params& p) {
    u32 words = p.num_heads * HEAD_DIM / 2;
    for (u32 row = blockIdx.x; row < p.num_rows; row += gridDim.x) {
        u32 token = p.row_starts[row];
        if (p.context_lens[row] != 0 || p.row_starts[row + 1] - token != 1) continue;
        u32* out = reinterpret_cast<u32*>(p.out) + u64(token) * words;
        for (u32 i = threadIdx.x; i < words; i += THREADS) out[i] = 0;
#if SPLIT
        if (p.split.codes == nullptr) continue;
        u32* codes = reinterpret_cast<u32*>(p.split.codes) + u64(token) * words / 2;
        u64 lesser = u64(p.split.num_rows) * words / 2;
        for (u32 i = threadIdx.x; i < words / 2; i += THREADS) codes[i] = codes[lesser + i] = 0;
        for (u32 head = threadIdx.x; head < p.num_heads; head += THREADS) {
            p.split.scales[head * p.split.padded_rows + token] = 0.0f;
        }
#endif
    }
}

// A warp's ring of subtiles.
struct Ring {
    u32 memory;
    u32 stage;
    Loader loader;

    // All stages are on their way: what `walk` comes to next. The kernel in front has ended then,
    // and what it writes was not asked for before.
    DEVICE void begin(const Params& p, u32 head_groups, const Walk& walk) {
        stage = 0;
        loader.begin(p, head_groups, walk);
        bool waited = false;
        for (u32 i = 0; i < STAGES; i++) {
            if (!waited && loader.is_new()) wait_only(), waited = true;
            loader.load(p, head_groups, memory + i * STAGE_BYTES);
        }
        if (!waited) wait_only();
    }
};

// The first piece's token: where its queries are is known before the kernel in front has ended.
DEVICE u32 first_token(const Params& p, Walk walk, u32 head_groups) {
    return walk.done() ? 0 : p.row_starts[walk.next(p, head_groups).row];
}

// A warp's turns of a piece, whose subtiles come out of the ring.
template <bool ONLINE>
DEVICE void add_piece(const Params& p, const Piece& piece, u32 head_groups, Ring& ring,
                      Running& running) {
    float scale = p.scale * 1.44269504f; // log2(e)
    u32 q[STEPS][2];
    load_queries(p, piece, q);
    start<ONLINE>(p, piece, running);
    for (Turns turns = Turns::of(p, piece); !turns.done(); turns.subtile += WARPS) {
        u32 at = ring.memory + ring.stage * STAGE_BYTES;
        copies_wait<STAGES - 1>();
        __syncwarp(); // All lanes' copies have arrived.
        add_subtile<ONLINE>(running, q, turns, scale, at);
        __syncwarp(); // All lanes have read them.
        ring.loader.load(p, head_groups, at);
        ring.stage = ring.stage + 1 == STAGES ? 0 : ring.stage + 1;
    }
}

#if UNIFIED
// The whole row and head group of `piece` once more, without a fixed number; `walk` is behind it.
DEVICE void recompute(const Params& p, Piece piece, u32 head_groups, Meeting& meeting, Ring& ring,
                      const Walk& walk) {
    copies_wait<0>(); // The ring is needed.
    __syncthreads();
    piece.first = 0;
    piece.count = piece.tiles;
    Running running;
    ring.begin(p, head_groups, Walk::over(p, piece));
    add_piece<true>(p, piece, head_groups, ring, running);
    meet(running, meeting);
    finish<true>(p, piece, meeting);
    __syncthreads(); // The meeting is over.
    if (threadIdx.x == 0) atomicAdd(p.recomputed, 1u);
    copies_wait<0>();
    __syncwarp();
    ring.begin(p, head_groups, walk);
}
#endif

// Left to itself the compiler spills here to keep registers for a block more.
#if HEAD_DIM == 64
#define BOUNDS __launch_bounds__(THREADS, 512 / THREADS)
#elif __CUDA_ARCH__ < 900 || (KV == KV_INT4 && (UNIFIED || CASCADE) && HEAD_DIM <= 128) ||        \
    (KV != KV_BF16 && HEAD_DIM == 96)
#define BOUNDS __launch_bounds__(THREADS, 2)
#else
#define BOUNDS __launch_bounds__(THREADS)
#endif

KERNEL void BOUNDS decode_attention(const Params p) {
    let_next_begin();
    extern __shared__ __align__(128) u8 memory[];
    Meeting& meeting = *reinterpret_cast<Meeting*>(memory + WARPS * STAGES * STAGE_BYTES);
    u32 head_groups = p.num_kv_heads * chunks_of_group(p);

    Walk walk = Walk::begin(p);
    Ring ring;
    ring.memory = shared_address(memory) + warp_id() * STAGES * STAGE_BYTES;
    u32 token = first_token(p, walk, head_groups);
    ring.begin(p, head_groups, walk);
    asm volatile("" ::"r"(token)); // Near by from here on.
    clear_empty_rows(p);

    while (!walk.done()) {
        Piece piece = walk.next(p, head_groups);
        Running running;
        add_piece<!UNIFIED>(p, piece, head_groups, ring, running);
        meet(running, meeting);
        bool whole = piece.count == piece.tiles && !has_prefix(p, piece);
        bool good = whole ? finish<!UNIFIED>(p, piece, meeting)
                          : leave(p, piece, head_groups, meeting);
        __syncthreads(); // The meeting is over.
#if UNIFIED
        if (!good) recompute(p, piece, head_groups, meeting, ring, walk);
#endif
    }
}
