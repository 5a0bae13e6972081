// Copies blocks of the KV cache with keys turned to other positions. Blocks along x take key/value
// heads, along y turns, along z layers; a warp takes a token's key at a time.
#include "common.cuh"
#include "kv_heads.cuh"

struct Params {
    u64 parts[2 * MAX_LAYERS]; // Keys and values of each layer.
    const float* rotary_table; // [max_positions, rotary_dim]: cosines, then sines
    u32 rotary_dim;
    u32 num_layers;
    u32 num_turns;
    u32 num_kv_heads;
    u32 turns[4 * MAX_TURNS]; // From, to, by how many positions, 0.
};

constexpr u32 THREADS = 32 * WARPS;

// A key of the cache as f32, one warp's.
DEVICE void read_key(const u8* strip, u32 token, float* head) {
    for (u32 dim = 8 * lane_id(); dim < HEAD_DIM; dim += 8 * 32) {
        float x[8];
        read8(strip, token, dim, x);
#pragma unroll
        for (u32 i = 0; i < 8; i++) head[dim + i] = x[i];
    }
    __syncwarp();
}

KERNEL void __launch_bounds__(THREADS) turn_blocks(const __grid_constant__ Params p) {
    wait_for_earlier_kernels();
    __shared__ float heads[WARPS][HEAD_DIM];
    __shared__ float turn[HEAD_DIM];
    u32 from = p.turns[4 * blockIdx.y], to = p.turns[4 * blockIdx.y + 1];
    const float* row = p.rotary_table + u64(p.turns[4 * blockIdx.y + 2]) * p.rotary_dim;
    // Without the factor that the table may have.
    u32 half = p.rotary_dim / 2;
    for (u32 i = threadIdx.x; i < half; i += THREADS) {
        float cos = row[i], sin = row[half + i], scale = rsqrtf(cos * cos + sin * sin);
        turn[i] = cos * scale;
        turn[half + i] = sin * scale;
    }
    __syncthreads();

    u64 from_strip = strip_at(from, gridDim.x, blockIdx.x);
    u64 to_strip = strip_at(to, gridDim.x, blockIdx.x);
    u8* keys = reinterpret_cast<u8*>(p.parts[2 * blockIdx.z]);
    u8* values = reinterpret_cast<u8*>(p.parts[2 * blockIdx.z + 1]);
    const u32* words = reinterpret_cast<const u32*>(values + from_strip);
    u32* copied = reinterpret_cast<u32*>(values + to_strip);
    for (u32 i = threadIdx.x; i < STRIP_BYTES / 4; i += THREADS) copied[i] = words[i];

    float* head = heads[warp_id()];
    for (u32 token = warp_id(); token < BLOCK_SIZE; token += WARPS) {
        read_key(keys + from_strip, token, head);
        Place{keys + to_strip, token}.write([&](u32 pair) {
            return make_float2(rotated(head, turn, p.rotary_dim, 2 * pair),
                               rotated(head, turn, p.rotary_dim, 2 * pair + 1));
        });
        __syncwarp();
    }
}
