// Attention of rows with one new token over their paged context; see `ops/plan_attention.rs` for
// how the work is divided and `ops/decode_attention.rs` for the parameters.
//
// A block takes a stretch of units, piece by piece (a piece: tiles of one row and head group). In a
// piece its warps take turns of 16 positions. Everything a warp loads, it alone reads: its ring in
// shared memory runs on from piece to piece and needs no barrier.
//
//            positions of a piece   0..15  16..31  32..47  48..63  64..79 ..
//            warp                     0      1       2       3       0    ..
//
// Scores are computed transposed, S^T[16 positions, 8 heads] = K[16, dim] Q^T[dim, 8], so that the
// heads of a group fill the short side of the tensor cores' tile; then O^T[dim, 8] += V^T P^T. Each
// lane has two heads, the same ones in S^T and O^T.
//
// Source: swapped operands as in XQA of TensorRT-LLM; running softmax after Milakov and Gimelshein,
// 2018; merging parts in the last block to arrive as in "Flash-Decoding", 2023.
#include "common.cuh"

constexpr u32 SUBTILE = 16;
constexpr u32 HEADS = 8;
constexpr u32 HEADER = 8;
constexpr u32 THREADS = 32 * WARPS;
// Eight rows of a matrix fall into different banks.
constexpr u32 PITCH = 2 * HEAD_DIM + 16;
constexpr u32 STAGE_BYTES = 2 * SUBTILE * PITCH;
constexpr u32 CHUNKS = HEAD_DIM / 8;
constexpr u32 COPIES = SUBTILE * CHUNKS / 32;
constexpr u32 STEPS = HEAD_DIM / 16;
constexpr u32 SUMS = HEAD_DIM * HEADS;
constexpr bool ONE_BLOCK = BLOCK_SIZE % SUBTILE == 0;
static_assert(HEAD_DIM % 16 == 0 && TILE_LEN % SUBTILE == 0 && WARPS % 2 == 0, "shapes");

struct Params {
    const bf16* qkv;
    const bf16* keys;
    const bf16* values;
    bf16* out;
    const u32* blocks;
    const u32* block_starts;
    const u32* row_starts;
    const u32* context_lens;
    const u32* plan;
    float* partials;
    u32* arrivals;
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

    DEVICE bool done() const { return unit >= end; }

    // The piece here; steps past it.
    DEVICE Piece next(const Params& p, u32 head_groups) {
        uint4 row = reinterpret_cast<const uint4*>(p.plan + HEADER)[index];
        u32 offset = unit - row.y;
        Piece piece;
        piece.row = row.x;
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

// What a warp loads, well ahead of what it computes.
struct Loader {
    Walk walk;
    Turns turns;
    const u32* blocks; // The row's block table.
    u32 kv_head;
    u32 block; // Of the next subtile (or of this lane's position in it), on its way meanwhile.
    bool done;

    DEVICE void begin(const Params& p, u32 head_groups) {
        walk = Walk::begin(p);
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

    // Starts the copies of the next subtile to `stage`. Positions that are not seen become zeros:
    // what the cache holds there may not even be a number.
    DEVICE void load(const Params& p, u32 head_groups, u32 stage) {
        if (!done) {
            u32 start = turns.subtile * SUBTILE;
#pragma unroll
            for (u32 i = 0; i < COPIES; i++) {
                u32 chunk = i * 32 + lane_id(), token = chunk / CHUNKS, part = chunk % CHUNKS;
                u32 id = ONE_BLOCK ? block : __shfl_sync(ALL_LANES, block, token);
                u32 offset = (start + token) % BLOCK_SIZE;
                bool seen = turns.sees(start + token);
                u64 at = ((u64(seen ? id : 0) * p.num_kv_heads + kv_head) * BLOCK_SIZE + offset) *
                             HEAD_DIM + part * 8;
                u32 to = stage + token * PITCH + part * 16;
                copy16_or_zero(to, p.keys + at, seen);
                copy16_or_zero(to + SUBTILE * PITCH, p.values + at, seen);
            }
            turns.subtile += WARPS;
            seek(p, head_groups);
        }
        copies_commit();
    }
};

// A warp's running softmax of one piece.
struct Running {
    float max[2];       // Of this lane's two heads, in units of log 2.
    float sum[2];       // Over this lane's positions alone.
    float acc[STEPS][4]; // O^T: dims lane / 4 and + 8 of every 16, two heads each.

    DEVICE void clear() {
        max[0] = max[1] = -INFINITE;
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
    const u32* from = reinterpret_cast<const u32*>(p.qkv + at * HEAD_DIM) + lane_id() % 4;
    bool real = in_group < group;
#pragma unroll
    for (u32 k = 0; k < STEPS; k++) {
        q[k][0] = real ? from[k * 8] : 0;
        q[k][1] = real ? from[k * 8 + 4] : 0;
    }
}

// Scores of a subtile: positions lane / 4 (first two) and + 8 (last two), two heads each.
DEVICE void score(const u32 (&q)[STEPS][2], u32 keys, float (&s)[4]) {
    float even[4] = {}, odd[4] = {};
    u32 row = keys + (lane_id() % 16) * PITCH + lane_id() / 16 * 16;
#pragma unroll
    for (u32 k = 0; k < STEPS; k++) {
        u32 a[4];
        load_matrices(row + k * 32, a);
        // Two sums, so that products need not wait for each other.
        multiply_add(k % 2 == 0 ? even : odd, a, q[k][0], q[k][1]);
    }
#pragma unroll
    for (u32 i = 0; i < 4; i++) s[i] = even[i] + odd[i];
}

// Turns scores into weights relative to the greatest so far.
DEVICE void weigh(Running& r, float (&s)[4]) {
    float greatest[2];
#pragma unroll
    for (u32 h = 0; h < 2; h++) {
        float m = fmaxf(s[h], s[h + 2]);
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
#pragma unroll
    for (u32 i = 0; i < 4; i++) s[i] = relative(s[i], r.max[i % 2]);
    r.sum[0] += s[0] + s[2];
    r.sum[1] += s[1] + s[3];
}

DEVICE void add_values(Running& r, const float (&w)[4], u32 values) {
    u32 b0 = transpose_matrix(pack_bf16(w[0], w[1]));
    u32 b1 = transpose_matrix(pack_bf16(w[2], w[3]));
    u32 token = lane_id() % 8 + lane_id() / 16 * 8;
    u32 row = values + token * PITCH + lane_id() / 8 % 2 * 16;
#pragma unroll
    for (u32 d = 0; d < STEPS; d++) {
        u32 a[4];
        load_matrices_transposed(row + d * 32, a);
        multiply_add(r.acc[d], a, b0, b1);
    }
}

// One turn of a warp: the subtile at `stage`.
DEVICE void add_subtile(Running& r, const u32 (&q)[STEPS][2], const Turns& turns, float scale,
                        u32 stage) {
    float s[4];
    score(q, stage, s);
    u32 position = turns.subtile * SUBTILE + lane_id() / 4;
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
        s[i] = turns.sees(position + i / 2 * 8) ? s[i] * scale : -INFINITE;
    }
    weigh(r, s);
    add_values(r, s, stage + SUBTILE * PITCH);
}

// Shared memory behind the rings.
struct Meeting {
    float sums[WARPS / 2][SUMS];    // [dim, head]
    float softmax[WARPS][HEADS][2]; // Greatest score and denominator.
};

// Adds up all warps' sums. Afterwards `sums` of all halves added together are the block's, and
// `softmax[0]` its greatest scores and denominators.
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
    }
    __syncthreads();
    float greatest[2], denominator[2];
#pragma unroll
    for (u32 h = 0; h < 2; h++) {
        greatest[h] = -INFINITE;
        denominator[h] = 0.0f;
        for (u32 w = 0; w < WARPS; w++) {
            greatest[h] = fmaxf(greatest[h], meeting.softmax[w][head + h][0]);
        }
        for (u32 w = 0; w < WARPS; w++) {
            float factor = relative(meeting.softmax[w][head + h][0], greatest[h]);
            denominator[h] += meeting.softmax[w][head + h][1] * factor;
        }
        r.scale(h, relative(r.max[h], greatest[h]));
    }
    // The lower half of the warps adds to what the upper half left.
    float* own = meeting.sums[warp_id() % (WARPS / 2)] + lane_id() / 4 * HEADS + head;
    bool upper = warp_id() >= WARPS / 2;
    for (u32 turn = 0; turn < 2; turn++) {
        if (upper == (turn == 0)) {
#pragma unroll
            for (u32 d = 0; d < 2 * STEPS; d++) {
                float2* to = reinterpret_cast<float2*>(own + d * 8 * HEADS);
                float2 x = make_float2(r.acc[d / 2][d % 2 * 2], r.acc[d / 2][d % 2 * 2 + 1]);
                if (!upper) {
                    float2 other = *to;
                    x.x += other.x, x.y += other.y;
                }
                *to = x;
            }
        }
        __syncthreads();
    }
    if (warp_id() == 0 && lane_id() < 4) {
        for (u32 h = 0; h < 2; h++) {
            meeting.softmax[0][head + h][0] = greatest[h];
            meeting.softmax[0][head + h][1] = denominator[h];
        }
    }
    __syncthreads();
}

DEVICE float met(const Meeting& meeting, u32 i) {
    float sum = meeting.sums[0][i];
#pragma unroll
    for (u32 w = 1; w < WARPS / 2; w++) sum += meeting.sums[w][i];
    return sum;
}

// Calls `value(dim, head)` twice for every pair of dims of every real head and writes the results.
template <typename Value>
DEVICE void write_out(const Params& p, const Piece& piece, Value value) {
    u32 group = p.num_heads / p.num_kv_heads, chunks = ceil_div(group, HEADS);
    u32 first = piece.head_group % chunks * HEADS;
    u32 head = threadIdx.x % HEADS;
    if (first + head >= group) return;
    u64 at = u64(p.row_starts[piece.row]) * p.num_heads + piece.head_group / chunks * group;
    u32* out = reinterpret_cast<u32*>(p.out + (at + first + head) * HEAD_DIM);
    for (u32 pair = threadIdx.x / HEADS; pair < HEAD_DIM / 2; pair += THREADS / HEADS) {
        out[pair] = pack_bf16(value(2 * pair, head), value(2 * pair + 1, head));
    }
}

// A slot of `partials`: sums [HEAD_DIM, HEADS], then greatest scores and denominators [HEADS, 2].
DEVICE float* slot(const Params& p, u32 index) {
    return p.partials + u64(index) * (SUMS + 2 * HEADS);
}

// Of the pieces of a row and head group, block `cta`'s: the first piece is the last of its block,
// all others are the first of theirs.
DEVICE float* slot_of(const Params& p, u32 cta, u32 first_cta) {
    return slot(p, 2 * cta + (cta == first_cta ? 1 : 0));
}

// Adds up all pieces of a row and head group in order.
DEVICE void merge(const Params& p, const Piece& piece, u32 first_cta, u32 last_cta) {
    u32 head = threadIdx.x % HEADS;
    float greatest = -INFINITE, denominator = 0.0f;
    for (u32 cta = first_cta; cta <= last_cta; cta++) {
        greatest = fmaxf(greatest, load_fresh(slot_of(p, cta, first_cta) + SUMS + 2 * head));
    }
    for (u32 cta = first_cta; cta <= last_cta; cta++) {
        const float* softmax = slot_of(p, cta, first_cta) + SUMS + 2 * head;
        denominator += load_fresh(softmax + 1) * relative(load_fresh(softmax), greatest);
    }
    float scale = 1.0f / denominator;
    write_out(p, piece, [&](u32 dim, u32 h) {
        float sum = 0.0f;
        for (u32 cta = first_cta; cta <= last_cta; cta++) {
            const float* from = slot_of(p, cta, first_cta);
            float factor = relative(load_fresh(from + SUMS + 2 * h), greatest);
            sum += load_fresh(from + dim * HEADS + h) * factor;
        }
        return sum * scale;
    });
}

// Leaves a piece that is not the whole, and merges all if it is the last to arrive.
DEVICE void leave(const Params& p, const Piece& piece, u32 head_groups, const Meeting& meeting) {
    __shared__ bool last;
    u32 share = p.plan[0];
    u32 first_cta = piece.unit / share, last_cta = (piece.unit + piece.tiles - 1) / share;
    float* to = slot_of(p, blockIdx.x, first_cta);
    for (u32 i = threadIdx.x; i < SUMS; i += THREADS) to[i] = met(meeting, i);
    const float* softmax = &meeting.softmax[0][0][0];
    if (threadIdx.x < 2 * HEADS) to[SUMS + threadIdx.x] = softmax[threadIdx.x];
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        u32* arrivals = p.arrivals + piece.row * head_groups + piece.head_group;
        last = atomicAdd(arrivals, 1u) == last_cta - first_cta;
        if (last) *arrivals = 0; // For the next launch.
        __threadfence();
    }
    __syncthreads();
    if (last) merge(p, piece, first_cta, last_cta);
}

// Rows of padding: nothing seen, and nothing that is not a number left behind.
DEVICE void clear_empty_rows(const Params& p) {
    u32 words = p.num_heads * HEAD_DIM / 2;
    for (u32 row = blockIdx.x; row < p.num_rows; row += gridDim.x) {
        u32 token = p.row_starts[row];
        if (p.context_lens[row] != 0 || p.row_starts[row + 1] - token != 1) continue;
        u32* out = reinterpret_cast<u32*>(p.out) + u64(token) * words;
        for (u32 i = threadIdx.x; i < words; i += THREADS) out[i] = 0;
    }
}

KERNEL void __launch_bounds__(THREADS) decode_attention(const Params p) {
    wait_for_earlier_kernels();
    extern __shared__ __align__(16) u8 memory[];
    Meeting& meeting = *reinterpret_cast<Meeting*>(memory + WARPS * STAGES * STAGE_BYTES);
    u32 ring = shared_address(memory) + warp_id() * STAGES * STAGE_BYTES;
    u32 head_groups = p.num_kv_heads * chunks_of_group(p);
    float scale = p.scale * 1.44269504f; // log2(e)

    clear_empty_rows(p);
    Walk walk = Walk::begin(p);
    if (walk.done()) return;
    Loader loader;
    loader.begin(p, head_groups);
    for (u32 i = 0; i + 1 < STAGES; i++) loader.load(p, head_groups, ring + i * STAGE_BYTES);

    u32 stage = 0, free_stage = STAGES - 1;
    while (!walk.done()) {
        Piece piece = walk.next(p, head_groups);
        u32 q[STEPS][2];
        load_queries(p, piece, q);
        Running running;
        running.clear();
        for (Turns turns = Turns::of(p, piece); !turns.done(); turns.subtile += WARPS) {
            copies_wait<STAGES - 2>();
            __syncwarp(); // All lanes' copies have arrived, and the free stage was read by all.
            loader.load(p, head_groups, ring + free_stage * STAGE_BYTES);
            add_subtile(running, q, turns, scale, ring + stage * STAGE_BYTES);
            free_stage = stage;
            stage = stage + 1 == STAGES ? 0 : stage + 1;
        }
        meet(running, meeting);
        if (piece.count == piece.tiles) {
            write_out(p, piece, [&](u32 dim, u32 head) {
                return met(meeting, dim * HEADS + head) / meeting.softmax[0][head][1];
            });
        } else {
            leave(p, piece, head_groups, meeting);
        }
        __syncthreads(); // The meeting is over.
    }
}
