// out[m, n] = x[m, :] . weight[n, :] (+ bias[n]), or out[m, n] += ..., for up to M rows of x.
//
// Operands are swapped: rows of the weights fill the long side of the tensor cores' tile, so that x
// is padded to a multiple of 8 only. A block takes TILE_ROWS rows of the weights and a part of the
// columns; SPLIT blocks, a cluster, share the same rows and add up their sums in each other's
// shared memory, always in the same order. Where tiles are few, all blocks run at once, each with
// as much to read, so that none waits for another at the end.
//
//   columns    0..127   128..255   256..       a stage: 128 columns of the weights' tile and of x;
//   stage        0         1         2 ..      STAGES of them are a ring in shared memory
//
// What depends on earlier kernels (x, out) is read only after the first stages of the weights have
// been asked for.
//
// Source: operands swapped and x padded to 8 after FlashDecoding++, 2023; sums split among the
// blocks of a cluster as in DeepGEMM.
#include "common.cuh"

typedef ElementOf<OUT_IS_BF16>::type Out;

constexpr u32 THREADS = 32 * WARPS;
constexpr u32 TILE_ROWS = 16 * WARPS; // Of the weights.
constexpr u32 TILE_COLS = 128;
constexpr u32 CHUNKS = TILE_COLS / 8; // Of 16 bytes, in a row of a stage.
constexpr u32 ROW_BYTES = 2 * TILE_COLS;
constexpr u32 WEIGHT_BYTES = TILE_ROWS * ROW_BYTES;
constexpr u32 STAGE_BYTES = WEIGHT_BYTES + M * ROW_BYTES;
constexpr u32 ROWS_AT_ONCE = THREADS / CHUNKS;
constexpr u32 WEIGHT_COPIES = TILE_ROWS / ROWS_AT_ONCE;
constexpr u32 X_COPIES = (M + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE;
// Sums lie [M][PITCH]: what a warp writes at once falls into different banks.
constexpr u32 PITCH = TILE_ROWS + 4;
constexpr u32 SLICE = TILE_ROWS / SPLIT; // Rows whose sums a block adds up and writes.
static_assert(ROWS_AT_ONCE % 8 == 0 && M % 8 == 0 && SLICE % 4 == 0, "shapes");
static_assert(STAGES * STAGE_BYTES >= 4 * M * PITCH, "sums fit where the ring was");

struct Params {
    const bf16* x;      // [num_rows, cols]
    const bf16* weight; // [rows, cols]
    const float* bias;  // [rows], or null
    Out* out;           // [num_rows, rows]
    u32 num_rows;
    u32 rows;
    u32 cols;
};

// ---- the blocks that share a tile ----

#if SPLIT > 1
#define CLUSTER __cluster_dims__(SPLIT, 1, 1)

DEVICE void cluster_barrier() {
    asm volatile("barrier.cluster.arrive.release.aligned;\n"
                 "barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// From the shared memory of block `rank` of the cluster.
DEVICE float4 load_sums(u32 address, u32 rank) {
    float4 v;
    asm volatile("{ .reg .b32 there; mapa.shared::cluster.u32 there, %4, %5;\n"
                 "ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [there]; }"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "r"(address), "r"(rank)
                 : "memory");
    return v;
}
#else
#define CLUSTER

DEVICE void cluster_barrier() { __syncthreads(); }

DEVICE float4 load_sums(u32 address, u32) {
    float4 v;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "r"(address)
                 : "memory");
    return v;
}
#endif

// ---- reading ----

// A thread's share of the copies: the same chunk of every ROWS_AT_ONCE-th row.
struct Copies {
    const Params& p;
    u32 chunk;
    u32 row;   // First of x, and first of the weights' tile.
    u32 first; // Row of the weights, of all.
    u32 to;    // Offset in a stage's weights or x; chunks change places so that no banks collide.

    DEVICE explicit Copies(const Params& p) : p(p) {
        chunk = threadIdx.x % CHUNKS;
        row = threadIdx.x / CHUNKS;
        first = blockIdx.y * TILE_ROWS + row;
        to = row * ROW_BYTES + ((chunk ^ (row % 8)) << 4);
    }

    DEVICE void weights(u32 block, u32 stage) const {
        u32 col = block * TILE_COLS + chunk * 8;
        const bf16* from = p.weight + u64(first) * p.cols + col;
#pragma unroll
        for (u32 i = 0; i < WEIGHT_COPIES; i++) {
            bool inside = col < p.cols && first + i * ROWS_AT_ONCE < p.rows;
            const bf16* row_from = from + u64(i * ROWS_AT_ONCE) * p.cols;
            copy16_or_zero(stage + to + i * ROWS_AT_ONCE * ROW_BYTES,
                           inside ? row_from : p.weight, inside);
        }
    }

    DEVICE bool has_x(u32 i) const { return M % ROWS_AT_ONCE == 0 || row + i * ROWS_AT_ONCE < M; }

    DEVICE const bf16* x_from(u32 block, u32 i) const {
        u32 col = block * TILE_COLS + chunk * 8, m = row + i * ROWS_AT_ONCE;
        return col < p.cols && m < p.num_rows ? p.x + u64(m) * p.cols + col : nullptr;
    }

    DEVICE u32 x_to(u32 stage, u32 i) const {
        return stage + WEIGHT_BYTES + to + i * ROWS_AT_ONCE * ROW_BYTES;
    }

    DEVICE void x(u32 block, u32 stage) const {
#pragma unroll
        for (u32 i = 0; i < X_COPIES; i++) {
            if (!has_x(i)) break;
            const bf16* from = x_from(block, i);
            copy16_or_zero(x_to(stage, i), from == nullptr ? p.x : from, from != nullptr);
        }
    }
};

DEVICE uint4 load16_fresh(const void* from) {
    uint4 v;
    asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(from)
                 : "memory");
    return v;
}

DEVICE void store16_shared(u32 to, uint4 v) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(v.x), "r"(v.y),
                 "r"(v.z), "r"(v.w)
                 : "memory");
}

// Fills all stages but one. x goes by registers: as an asynchronous copy behind those of the
// weights it would have the first stage wait for all weights.
DEVICE void fill(const Copies& copies, u32 begin, u32 count, u32 ring) {
#pragma unroll
    for (u32 s = 0; s + 1 < STAGES; s++) {
        if (s < count) copies.weights(begin + s, ring + s * STAGE_BYTES);
        copies_commit();
    }
    wait_for_earlier_kernels();
    uint4 x[STAGES - 1][X_COPIES];
#pragma unroll
    for (u32 s = 0; s + 1 < STAGES; s++) {
#pragma unroll
        for (u32 i = 0; i < X_COPIES; i++) {
            const bf16* from = s < count && copies.has_x(i) ? copies.x_from(begin + s, i) : nullptr;
            x[s][i] = from == nullptr ? make_uint4(0, 0, 0, 0) : load16_fresh(from);
        }
    }
#pragma unroll
    for (u32 s = 0; s + 1 < STAGES; s++) {
#pragma unroll
        for (u32 i = 0; i < X_COPIES; i++) {
            if (copies.has_x(i)) store16_shared(copies.x_to(ring + s * STAGE_BYTES, i), x[s][i]);
        }
    }
}

// ---- multiplying ----

typedef float Sums[M / 8][4];

// Address of a chunk of a row of a stage's weights or x.
DEVICE u32 chunk_at(u32 base, u32 row, u32 chunk) {
    return base + row * ROW_BYTES + ((chunk ^ (row % 8)) << 4);
}

DEVICE void multiply_stage(u32 stage, Sums& sums) {
    u32 lane = lane_id(), x = stage + WEIGHT_BYTES;
#pragma unroll
    for (u32 k = 0; k < TILE_COLS / 16; k++) {
        u32 a[4];
        load_matrices(chunk_at(stage, warp_id() * 16 + lane % 16, 2 * k + lane / 16), a);
        // Matrices of x: rows 0 to 7 of this half of the columns and the other, then rows 8 to 15.
        u32 row = lane % 8 + lane / 16 * 8, chunk = 2 * k + lane / 8 % 2;
#pragma unroll
        for (u32 n = 0; n < M / 8; n += 2) {
            u32 b[4];
            load_matrices(chunk_at(x, M == 8 ? lane % 8 : row + n * 8, chunk), b);
            multiply_add(sums[n], a, b[0], b[1]);
            if (n + 1 < M / 8) multiply_add(sums[n + 1], a, b[2], b[3]);
        }
    }
}

// ---- adding up and writing ----

DEVICE void store_sums(float* shared, const Sums& sums) {
    u32 lane = lane_id();
    float* row = shared + warp_id() * 16 + lane / 4;
#pragma unroll
    for (u32 n = 0; n < M / 8; n++) {
        float* to = row + (n * 8 + lane % 4 * 2) * PITCH;
        to[0] = sums[n][0];
        to[PITCH] = sums[n][1];
        to[8] = sums[n][2];
        to[PITCH + 8] = sums[n][3];
    }
}

DEVICE float4 load4(const float* from) { return *reinterpret_cast<const float4*>(from); }
DEVICE void store4(float* to, float4 v) { *reinterpret_cast<float4*>(to) = v; }
DEVICE float4 load4(const bf16* from) {
    uint2 v = *reinterpret_cast<const uint2*>(from);
    return make_float4(low_float(v.x), high_float(v.x), low_float(v.y), high_float(v.y));
}
DEVICE void store4(bf16* to, float4 v) {
    *reinterpret_cast<uint2*>(to) = make_uint2(pack_bf16(v.x, v.y), pack_bf16(v.z, v.w));
}
DEVICE float4 add4(float4 a, float4 b) {
    return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}

// This block's slice of the tile, four rows of the weights at a time.
DEVICE void write_slice(const Params& p, u32 shared) {
    constexpr u32 GROUPS = SLICE / 4;
#pragma unroll 2
    for (u32 i = threadIdx.x; i < M * GROUPS; i += THREADS) {
        u32 m = i / GROUPS, row = blockIdx.x * SLICE + i % GROUPS * 4;
        u32 n = blockIdx.y * TILE_ROWS + row;
        if (m >= p.num_rows || n >= p.rows) continue;
        Out* out = p.out + u64(m) * p.rows + n;
        float4 sums[SPLIT];
#pragma unroll
        for (u32 s = 0; s < SPLIT; s++) sums[s] = load_sums(shared + (m * PITCH + row) * 4, s);
        float4 sum = sums[0];
#pragma unroll
        for (u32 s = 1; s < SPLIT; s++) sum = add4(sum, sums[s]);
        if (p.bias != nullptr) sum = add4(sum, load4(p.bias + n));
#if ACCUMULATE
        sum = add4(sum, load4(out));
#endif
        store4(out, sum);
    }
}

KERNEL void CLUSTER __launch_bounds__(THREADS) flat_gemm(const Params p) {
    extern __shared__ __align__(128) u8 memory[];
    u32 ring = shared_address(memory);
    u32 all = ceil_div(p.cols, TILE_COLS);
    u32 begin = blockIdx.x * all / SPLIT, count = (blockIdx.x + 1) * all / SPLIT - begin;
    Copies copies(p);
    fill(copies, begin, count, ring);

    Sums sums = {};
    u32 stage = 0, free_stage = STAGES - 1;
    for (u32 i = 0; i < count; i++) {
        copies_wait<STAGES - 2>();
        __syncthreads();
        u32 next = i + STAGES - 1;
        if (next < count) {
            copies.weights(begin + next, ring + free_stage * STAGE_BYTES);
            copies.x(begin + next, ring + free_stage * STAGE_BYTES);
        }
        copies_commit();
        multiply_stage(ring + stage * STAGE_BYTES, sums);
        free_stage = stage;
        stage = stage + 1 == STAGES ? 0 : stage + 1;
    }

    __syncthreads();
    store_sums(reinterpret_cast<float*>(memory), sums);
    cluster_barrier();
    write_slice(p, ring);
    if (SPLIT > 1) cluster_barrier(); // Others may still read this block's sums.
}
